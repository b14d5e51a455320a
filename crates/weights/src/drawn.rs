//! Drawn numbers in place of stored ones, for measuring speed without them.
//!
//! A model's speed does not depend on what its weights say, only that they are not all alike. Drawn matrices share one
//! bank of random bytes, at an offset of their own, so a stack of hundreds of gigabytes takes 64 MiB of host memory.

use std::sync::{Arc, OnceLock};

use crate::exl3::Exl3;
use crate::matrix::{Form, HostBytes, PlainType, QuantMatrix};

/// Deviation of the values of random states, in each of EXL3's codebooks.
const CODEBOOK_DEVIATION: f32 = 1.24;
/// Bytes of the bank of codes.
const BANK: usize = 64 << 20;

/// A matrix like `matrix` with drawn numbers of the size that keeps a row's size: deviation `1 / sqrt(cols)`.
///
/// Returns the matrix as it is where it is larger than the bank.
pub(crate) fn draw(matrix: QuantMatrix, seed: u64) -> QuantMatrix {
    let deviation = 1.0 / (matrix.cols as f32).sqrt();
    let form = match &matrix.form {
        Form::Plain { kind, values } => {
            plain(*kind, values.len(), deviation, seed).map(|values| Form::Plain { kind: *kind, values })
        }
        Form::Affine { bits, group, kind, codes, scales, .. } => {
            // Uniform codes from 0 to `levels` have the deviation sqrt((levels² + 2 levels) / 12).
            let levels = ((1_u32 << bits) - 1) as f32;
            let scale = deviation / (levels * (levels + 2.0) / 12.0).sqrt();
            let pairs = scales.len() / kind.size();
            random(codes.len(), seed).map(|codes| Form::Affine {
                bits: *bits,
                group: *group,
                kind: *kind,
                codes,
                scales: repeated(*kind, scale, pairs),
                biases: repeated(*kind, -scale * levels / 2.0, pairs),
            })
        }
        // A code of 8 random bits is a number up to 448 or, twice in 256, none: bit 6 is left out.
        Form::Fp8Block { codes, scales, first_row } => {
            finite(codes.len(), seed).map(|codes| Form::Fp8Block {
                codes,
                scales: repeated(PlainType::F32, deviation, scales.len() / 4),
                first_row: *first_row,
            })
        }
        Form::Exl3(exl3) => random(exl3.trellis.len(), seed).map(|trellis| {
            let scales = |len, value| repeated(PlainType::F16, value, len);
            Form::Exl3(Exl3 {
                trellis,
                input_scales: scales(exl3.inputs, 1.0),
                output_scales: scales(exl3.outputs, deviation / CODEBOOK_DEVIATION),
                ..exl3.clone()
            })
        }),
    };
    match form {
        Some(form) => QuantMatrix { form, ..matrix },
        None => matrix,
    }
}

fn bank(fill: impl FnOnce() -> Vec<u8>, place: &OnceLock<Arc<Vec<u8>>>) -> Arc<Vec<u8>> {
    place.get_or_init(|| Arc::new(fill())).clone()
}

fn bytes() -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let words = (0..BANK / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

/// Random bytes, elsewhere in the bank for each seed.
fn random(len: usize, seed: u64) -> Option<HostBytes> {
    static CODES: OnceLock<Arc<Vec<u8>>> = OnceLock::new();
    part(bank(bytes, &CODES), len, seed)
}

/// The same without codes of FP8 that are no numbers.
fn finite(len: usize, seed: u64) -> Option<HostBytes> {
    static CODES: OnceLock<Arc<Vec<u8>>> = OnceLock::new();
    part(bank(|| bytes().into_iter().map(|byte| byte & 0xBF).collect(), &CODES), len, seed)
}

fn part(bank: Arc<Vec<u8>>, len: usize, seed: u64) -> Option<HostBytes> {
    const ALIGNED: u64 = 64;
    let room = (BANK.checked_sub(len)? as u64 / ALIGNED).max(1);
    let first = (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) % room * ALIGNED;
    HostBytes::new(bank).slice(first as usize..first as usize + len)
}

/// Plain numbers of a deviation: equal in size, random in sign.
fn plain(kind: PlainType, len: usize, deviation: f32, seed: u64) -> Option<HostBytes> {
    let signs = random(len / kind.size(), seed)?;
    let [plus, minus] = [deviation, -deviation].map(|value| number(kind, value));
    let numbers = signs.as_slice().iter().flat_map(|sign| if sign & 1 == 0 { &plus } else { &minus });
    Some(HostBytes::from_vec(numbers.copied().collect()))
}

fn repeated(kind: PlainType, value: f32, count: usize) -> HostBytes {
    HostBytes::from_vec(number(kind, value).repeat(count))
}

fn number(kind: PlainType, value: f32) -> Vec<u8> {
    match kind {
        PlainType::F32 => value.to_le_bytes().to_vec(),
        PlainType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        PlainType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exl3::{Codebook, Rate};

    fn check(form: Form) {
        let matrix = QuantMatrix { name: "m".into(), rows: 128, cols: 256, form };
        matrix.check().unwrap();
        let [one, other] = [1, 2].map(|seed| draw(matrix.clone(), seed));
        for drawn in [&one, &other] {
            drawn.check().unwrap();
            let values = drawn.decode_f64();
            assert!(values.iter().all(|value| value.is_finite()));
            let square: f64 = values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64;
            assert!((0.2..5.0).contains(&(square * 256.0)), "{square}: near 1 / 256");
        }
        assert_ne!(one.decode_f64(), other.decode_f64(), "another seed, other numbers");
        assert_eq!(one.decode_f64(), draw(matrix, 1).decode_f64(), "the same seed, the same numbers");
    }

    #[test]
    fn drawn_matrices_have_the_stored_ones_shape_and_a_weights_size() {
        let zeros = |len: usize| HostBytes::from_vec(vec![0; len]);
        for kind in [PlainType::F32, PlainType::F16, PlainType::Bf16] {
            check(Form::Plain { kind, values: zeros(128 * 256 * kind.size()) });
        }
        for bits in [2, 3, 4, 5, 6, 8] {
            let pairs = || zeros(128 * 4 * 2);
            check(Form::Affine {
                bits,
                group: 64,
                kind: PlainType::Bf16,
                codes: zeros(128 * 256 * usize::from(bits) / 8),
                scales: pairs(),
                biases: pairs(),
            });
        }
        check(Form::Fp8Block { codes: zeros(128 * 256), scales: zeros(8), first_row: 0 });
        for codebook in [Codebook::ThreeInst, Codebook::Mcg, Codebook::Mul1] {
            let Some(rate) = Rate::of_halves(6) else { continue };
            check(Form::Exl3(Exl3 {
                rate,
                codebook,
                inputs: 256,
                outputs: 128,
                first_row: 0,
                trellis: zeros(128 * 256 * 3 / 8),
                input_scales: zeros(512),
                output_scales: zeros(256),
            }));
        }
    }
}
