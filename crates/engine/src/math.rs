//! `exp` and `ln` with one definition, so that a draw has the same bits on every machine.
//!
//! Only IEEE additions, multiplications, one division and bit moves in a fixed order: no libm, no fused operation. The
//! largest error seen against the platform's libm is under 4e-16 of the result (test below).

/// ln 2 in two parts; the first has 32 trailing zero bits, so that its product with an exponent is exact.
const LN_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
const LN_2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);

/// Adding it rounds a small number to an integer, ties to even, and leaves that integer in the low bits.
const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// Under this the result counts as zero: `exp(-700)` is 1e-304, still far from the subnormal numbers.
const SMALLEST: f64 = -700.0;

/// `1/13!`, `1/12!`, … `1/2!`: the Taylor series on `|x| <= ln 2 / 2` misses less than 1e-17.
const EXP_SERIES: [f64; 12] = [
    1.0 / 6_227_020_800.0,
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
];

/// `e^x` for `x <= 0`, without a branch so that a loop of them becomes vectors. Zero under -700.
#[inline(always)]
pub(crate) fn exp(x: f64) -> f64 {
    let bounded = if x < SMALLEST { SMALLEST } else { x };
    let rounded = bounded * std::f64::consts::LOG2_E + ROUNDER;
    let whole = rounded - ROUNDER;
    let rest = (bounded - whole * LN_2_HIGH) - whole * LN_2_LOW;
    let mut series = EXP_SERIES[0];
    for coefficient in &EXP_SERIES[1..] {
        series = series * rest + coefficient;
    }
    let fraction = 1.0 + (rest + rest * rest * series);
    // The exponent's integer stands in the low bits of `rounded`; all above the shift falls off.
    let power = f64::from_bits(rounded.to_bits().wrapping_add(1023) << 52);
    if x < SMALLEST { 0.0 } else { fraction * power }
}

/// `1/21`, `1/19`, … `1/3`: the series of `atanh` on `|s| <= 0.1716` misses less than 1e-17.
const ATANH_SERIES: [f64; 10] = [
    1.0 / 21.0,
    1.0 / 19.0,
    1.0 / 17.0,
    1.0 / 15.0,
    1.0 / 13.0,
    1.0 / 11.0,
    1.0 / 9.0,
    1.0 / 7.0,
    1.0 / 5.0,
    1.0 / 3.0,
];

/// The bits of sqrt(1/2). Counting exponents from it leaves a mantissa in [sqrt(1/2), sqrt(2)), where the series is short.
const SQRT_HALF: u64 = 0x3fe6_a09e_667f_3bcd;

/// Natural logarithm of a positive normal number.
#[inline]
pub(crate) fn ln(x: f64) -> f64 {
    debug_assert!(x.is_normal() && x > 0.0, "ln of {x}");
    let exponent = (x.to_bits().wrapping_sub(SQRT_HALF) as i64) >> 52;
    let mantissa = f64::from_bits(x.to_bits().wrapping_sub((exponent << 52) as u64));
    let distance = mantissa - 1.0;
    let s = distance / (mantissa + 1.0);
    let square = s * s;
    let mut series = ATANH_SERIES[0];
    for coefficient in &ATANH_SERIES[1..] {
        series = series * square + coefficient;
    }
    // 2 atanh(s) = 2s + 2s^3(1/3 + ...), and 2s = distance - s * distance: the large part is exact.
    let whole = exponent as f64;
    let small = 2.0 * s * square * series - s * distance;
    whole * LN_2_HIGH + (distance + (small + whole * LN_2_LOW))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(inputs: impl Iterator<Item = f64>, ours: fn(f64) -> f64, theirs: fn(f64) -> f64) -> (f64, f64) {
        inputs
            .map(|x| ((ours(x) - theirs(x)).abs() / theirs(x).abs().max(f64::MIN_POSITIVE), x))
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap()
    }

    #[test]
    fn exp_is_within_two_roundings_of_the_true_value() {
        let inputs = (0..400_000).map(|i| -f64::from(i) * 0.001_749_3);
        let (error, at) = worst(inputs, exp, f64::exp);
        assert!(error < 4e-16, "{error:e} at {at}");
    }

    #[test]
    fn ln_is_within_two_roundings_of_the_true_value() {
        let near_one = (1..200_000).map(|i| 1.0 - f64::from(i) * 2f64.powi(-20));
        let tiny = (1..53).map(|i| 1.0 - 2f64.powi(-i));
        let wide = (-1000..1000).map(|i| 1.37 * 2f64.powi(i));
        let (error, at) = worst(near_one.filter(|x| *x > 0.0).chain(tiny).chain(wide), ln, f64::ln);
        assert!(error < 4e-16, "{error:e} at {at}");
    }

    #[test]
    fn the_ends_are_exact() {
        assert_eq!(exp(0.0).to_bits(), 1f64.to_bits());
        assert_eq!(exp(-0.0).to_bits(), 1f64.to_bits());
        assert_eq!(exp(-701.0).to_bits(), 0f64.to_bits());
        assert_eq!(exp(f64::NEG_INFINITY).to_bits(), 0f64.to_bits());
        assert_eq!(ln(1.0).to_bits(), 0f64.to_bits());
    }
}
