//! `exp`, `sigmoid`, `silu` and `softplus` over lanes.
//!
//! Own definitions, because every libm rounds differently and bits must hold on every machine. Built from exactly
//! rounded operations only. `exp`, `sigmoid` and
//! `softplus` are within 2 units in the last place of the true value over all of fp32, overflow to infinity
//! and gradual underflow to zero included; NaN gives NaN. The polynomials are minimax fits (Remez, 200 bits), and the
//! error each adds is below 0.01 units.

use crate::lanes::Lanes;

/// Adding and subtracting 1.5 · 2^23 rounds to the nearest integer below 2^22 in magnitude.
const ROUND: f32 = 12_582_912.0;
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 rounded to fp32, negated: a product with an integer below 256 cancels exactly inside an fma.
const MINUS_LN2_HIGH: f32 = -std::f32::consts::LN_2;
/// What the rounding of ln 2 left.
const MINUS_LN2_LOW: f32 = 1.904_654_2e-9;
/// `(exp(r) - 1 - r) / r²` for `|r| <= ln(2) / 2`, from the highest power down.
const EXP: [f32; 6] = [0.000_197_903_41, 0.001_394_466, 0.008_333_497, 0.041_666_295, 0.166_666_66, 0.5];
/// `(atanh(z) / z - 1) / z²` in `z²` for `0 <= z <= 1/3`, from the highest power down.
const ATANH: [f32; 5] = [0.121_507_62, 0.107_137_57, 0.143_084_48, 0.199_994_39, 0.333_333_38];

#[inline(always)]
fn polynomial<L: Lanes>(x: L, coefficients: &[f32]) -> L {
    let mut value = L::splat(coefficients[0]);
    for &coefficient in &coefficients[1..] {
        value = value.fma(x, L::splat(coefficient));
    }
    value
}

/// `e^x`.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(x: L) -> L {
    let one = L::splat(1.0);
    // Beyond these bounds the result is infinite or zero. The operand order lets NaN through.
    let x = L::splat(-104.0).max(L::splat(89.0).min(x));
    let n = x.fma(L::splat(LOG2_E), L::splat(ROUND)).sub(L::splat(ROUND));
    let near = n.fma(L::splat(MINUS_LN2_HIGH), x);
    let low = L::splat(MINUS_LN2_LOW);
    let r = n.fma(low, near);
    // What rounding took from r and from 1 + r: they would show in a sigmoid.
    let r_rest = n.fma(low, near.sub(r));
    let lead = one.add(r);
    let lead_rest = r.sub(lead.sub(one));
    let tail = r.mul(r).fma(polynomial(r, &EXP), lead_rest.add(r_rest));
    lead.add(tail).scale(n)
}

/// `1 / (1 + e^-x)`, from `e^-|x|` so that neither side overflows.
#[inline(always)]
pub(crate) fn sigmoid<L: Lanes>(x: L) -> L {
    let one = L::splat(1.0);
    let e = exp(L::zero().sub(x.abs()));
    let numerator = x.where_less(L::zero(), e, one);
    let denominator = one.add(e);
    let quotient = numerator.div(denominator);
    // One correction by what the sum and the quotient lost; a linear 1 / d (within 5 % on 1..2) suffices for it.
    let lost = e.sub(denominator.sub(one));
    let minus = L::zero().sub(quotient);
    let rest = minus.fma(lost, minus.fma(denominator, numerator));
    rest.fma(denominator.fma(L::splat(-0.5), L::splat(1.457)), quotient)
}

/// `x · sigmoid(x)`, within 3 units. Below -87, where the sigmoid is subnormal, only its tiny magnitude is kept; NaN for -inf.
#[inline(always)]
pub(crate) fn silu<L: Lanes>(x: L) -> L {
    x.mul(sigmoid(x))
}

/// `ln(1 + e^x)` as `max(x, 0) + ln(1 + t)` with `t = e^-|x|` and `ln(1 + t) = 2 atanh(t / (2 + t))`.
#[inline(always)]
pub(crate) fn softplus<L: Lanes>(x: L) -> L {
    let t = exp(L::zero().sub(x.abs()));
    let two = L::splat(2.0);
    let denominator = two.add(t);
    let z = t.div(denominator);
    // What the sum and the quotient lost, as in a sigmoid; the linear function is 2 / d within 4 % on 2..3.
    let lost = t.sub(denominator.sub(two));
    let minus = L::zero().sub(z);
    let rest = minus.fma(lost, minus.fma(denominator, t));
    let rest = rest.mul(denominator.fma(L::splat(-1.0 / 3.0), L::splat(1.65)));
    let square = z.mul(z);
    let twice = z.add(z);
    let logarithm = twice.add(twice.mul(square).fma(polynomial(square, &ATANH), rest));
    L::zero().max(x).add(logarithm)
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "infinities and exact values")]
mod tests {
    use super::*;
    use crate::Level;
    use crate::lanes::{Kernel, LANES};

    /// The four functions of sixteen values.
    struct Functions<'a>(&'a [f32; LANES]);

    impl Kernel for Functions<'_> {
        type Output = [[f32; LANES]; 4];

        #[inline(always)]
        fn run<L: Lanes>(self) -> Self::Output {
            let x = L::load(self.0);
            [exp(x), sigmoid(x), silu(x), softplus(x)].map(|vector| {
                let mut out = [0.0; LANES];
                vector.store(&mut out);
                out
            })
        }
    }

    const NAMES: [&str; 4] = ["exp", "sigmoid", "silu", "softplus"];

    fn exactly(x: f64) -> [f64; 4] {
        let sigmoid = if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) };
        [x.exp(), sigmoid, x * sigmoid, x.max(0.0) + (-x.abs()).exp().ln_1p()]
    }

    /// Distance in units of the last place of the fp32 value nearest to `exact`.
    fn units(found: f32, exact: f64) -> f64 {
        let nearest = exact as f32;
        if nearest.is_infinite() {
            return if found == nearest { 0.0 } else { f64::INFINITY };
        }
        let exponent = (((nearest.to_bits() >> 23) & 255) as i32).max(1) - 150;
        (f64::from(found) - exact).abs() / 2.0f64.powi(exponent)
    }

    /// Every `stride`-th fp32 value.
    fn sweep(stride: usize) -> [(f64, f32); 4] {
        let mut worst = [(0.0, 0.0); 4];
        let patterns: Vec<u32> = (0..=u32::MAX).step_by(stride).collect();
        for chunk in patterns.as_chunks::<LANES>().0 {
            let x = chunk.map(f32::from_bits);
            let found = Level::detect().run(Functions(&x));
            for lane in 0..LANES {
                if x[lane].is_nan() {
                    assert!(found.iter().all(|values| values[lane].is_nan()));
                    continue;
                }
                let exact = exactly(f64::from(x[lane]));
                for (function, values) in found.iter().enumerate() {
                    // There silu is a product with a subnormal number.
                    if function == 2 && x[lane] < -87.0 {
                        assert!(values[lane].is_nan() || values[lane].abs() < 1e-35);
                        continue;
                    }
                    let error = units(values[lane], exact[function]);
                    if error > worst[function].0 || error.is_nan() {
                        worst[function] = (error, x[lane]);
                    }
                }
            }
        }
        worst
    }

    #[test]
    fn every_function_is_within_its_units_of_the_true_value() {
        for (name, (error, at)) in NAMES.iter().zip(sweep(1499)) {
            println!("{name}: {error:.3} units at {at:e}");
            let bound = if *name == "silu" { 3.0 } else { 2.0 };
            assert!(error <= bound, "{name}: {error} units at {at:e}");
        }
    }

    #[test]
    fn the_ends_of_the_range_are_exact() {
        let mut x = [0.0; LANES];
        x[..6].copy_from_slice(&[f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e30, -1e30]);
        for level in [Level::Scalar, Level::detect()] {
            let [exp, sigmoid, _, softplus] = level.run(Functions(&x));
            assert_eq!(exp[..6], [f32::INFINITY, 0.0, 1.0, 1.0, f32::INFINITY, 0.0]);
            assert_eq!(sigmoid[..6], [1.0, 0.0, 0.5, 0.5, 1.0, 0.0]);
            assert_eq!(softplus[..2], [f32::INFINITY, 0.0]);
            assert_eq!(softplus[4..6], [1e30, 0.0]);
        }
    }

    #[test]
    fn every_function_has_the_same_bits_at_every_level() {
        let patterns: Vec<u32> = (0..=u32::MAX).step_by(50_021).collect();
        for chunk in patterns.as_chunks::<LANES>().0 {
            let x = chunk.map(f32::from_bits);
            let bits = |level: Level| {
                level
                    .run(Functions(&x))
                    .map(|values| values.map(|v| if v.is_nan() { 1 } else { v.to_bits() }))
            };
            for level in [Level::Avx2, Level::Avx512, Level::Neon] {
                if level.is_available() {
                    assert_eq!(bits(level), bits(Level::Scalar), "{level:?} at {x:?}");
                }
            }
        }
    }
}
