//! The noise of a draw: a Gumbel number for every (seed, position, token), from a counter and not from a generator.
//!
//! A token is drawn as the largest of `logit / temperature + gumbel(seed, position, token)` over the tokens that the rules
//! keep, which has exactly the distribution of the softmax. Against one uniform number on a cumulative sum this
//! - needs no sum, so no summation order: the largest is the largest in whatever order one looks;
//! - couples a drafter with the model: both add the same noise, so they agree with probability at least
//!   `(1 - d) / (1 + d)` where `d` is the total variation distance of their distributions, whatever the token order. On a
//!   cumulative sum a little mass moved at the front shifts every token behind it.
//!
//! Source: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", section 3.

use crate::math::ln;

/// 2^64 over the golden ratio: the step of the splitmix64 sequence.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of splitmix64 (Steele, Lea, Flood 2014): every input bit moves every output bit.
#[inline(always)]
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The noise of one position of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Noise {
    key: u64,
}

impl Noise {
    pub(crate) fn new(seed: u64, position: usize) -> Self {
        Self { key: mix(mix(seed.wrapping_add(STEP)) ^ (position as u64).wrapping_mul(STEP)) }
    }

    /// 64 random bits of a token.
    #[inline(always)]
    pub(crate) fn bits(self, token: u32) -> u64 {
        mix(self.key.wrapping_add((u64::from(token) + 1).wrapping_mul(STEP)))
    }
}

/// The Gumbel number of random bits, between -3.7 and 36.8.
pub(crate) fn gumbel(bits: u64) -> f64 {
    // 52 bits and a half: the sum is exact, and neither 0 nor 1 can come out.
    let uniform = ((bits >> 12) as f64 + 0.5) * f64::from_bits((1023 - 52) << 52);
    -ln(-ln(uniform))
}

/// A number that [`gumbel`] of the same bits never exceeds, from a count of leading bits: most tokens of a large
/// vocabulary are ruled out by it without a logarithm.
///
/// `-ln u >= 1 - u >= 2^-(1+z)` where `z` counts the leading ones of `u`, so `gumbel <= (1 + z) ln 2`; the last digits
/// cover the rounding of both logarithms.
#[inline(always)]
pub(crate) fn gumbel_bound(bits: u64) -> f64 {
    f64::from(1 + (!bits | 0xfff).leading_zeros()) * (std::f64::consts::LN_2 + 1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_never_exceeded() {
        let noise = Noise::new(7, 11);
        for token in 0..200_000 {
            let bits = noise.bits(token);
            assert!(gumbel(bits) <= gumbel_bound(bits), "{bits:#x}");
        }
        for shift in 0..64 {
            for bits in
                [u64::MAX << shift, !(u64::MAX << shift), u64::MAX >> shift, 1 << shift, !(1 << shift)]
            {
                assert!(gumbel(bits) <= gumbel_bound(bits), "{bits:#x}");
                assert!(gumbel(bits).is_finite());
            }
        }
    }

    #[test]
    fn the_noise_is_the_same_on_every_machine() {
        let bits: Vec<u64> = (0..3).map(|token| Noise::new(42, 1000).bits(token)).collect();
        assert_eq!(bits, GOLDEN_BITS);
        assert_eq!(gumbel(bits[0]).to_bits(), GOLDEN_GUMBEL);
    }

    /// Pinned: another value would change every sampled reply of every user.
    const GOLDEN_BITS: [u64; 3] =
        [18_312_883_444_347_077_553, 12_592_744_382_168_972_854, 9_583_392_180_916_585_680];
    const GOLDEN_GUMBEL: u64 = 0x4013_b056_6b58_1051;

    #[test]
    fn neighbouring_keys_have_unrelated_noise() {
        // Mean and variance of a Gumbel are 0.5772 and 1.6449; correlation of neighbours must vanish.
        let of = |seed, position, token| gumbel(Noise::new(seed, position).bits(token));
        let count = 50_000;
        for step in [(1, 0, 0), (0, 1, 0), (0, 0, 1)] {
            let (mut sum, mut squares, mut products) = (0.0, 0.0, 0.0);
            for i in 0..count {
                let (seed, position, token) = (i * step.0, i as usize * step.1, i as u32 * step.2 as u32);
                let here = of(seed, position, token) - 0.577_215_66;
                let next = of(seed + step.0, position + step.1, token + step.2 as u32) - 0.577_215_66;
                sum += here;
                squares += here * here;
                products += here * next;
            }
            let count = count as f64;
            assert!((sum / count).abs() < 0.03, "mean {} along {step:?}", sum / count);
            assert!((squares / count - 1.6449).abs() < 0.08, "variance {} along {step:?}", squares / count);
            assert!((products / count).abs() < 0.03, "correlation {} along {step:?}", products / count);
        }
    }
}
