//! Numbers that no checkpoint has: found when a tensor is handed out, at the speed of memory.
//!
//! Each scan folds over a block without leaving it early, which compilers turn into vector code, and looks for the place
//! only in a block that has one.

use crate::matrix::PlainType;

/// Bytes of a block.
const BLOCK: usize = 4096;

/// Index of the first number that is NaN or infinite.
pub(crate) fn first_not_finite(bytes: &[u8], kind: PlainType) -> Option<usize> {
    let of_block = match kind {
        PlainType::F32 => |block: &[u8]| {
            let exponent = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) & 0x7F80_0000;
            block.chunks_exact(4).fold(false, |any, number| any | (exponent(number) == 0x7F80_0000))
        },
        PlainType::F16 => |block: &[u8]| any_word(block, 0x7C00),
        PlainType::Bf16 => |block: &[u8]| any_word(block, 0x7F80),
    };
    let at = bytes.chunks(BLOCK).position(of_block)? * BLOCK / kind.size();
    (at..bytes.len() / kind.size()).find(|index| !kind.read(bytes, *index).is_finite())
}

/// Whether a 16-bit number has all bits of the mask.
fn any_word(block: &[u8], mask: u16) -> bool {
    block.chunks_exact(2).fold(false, |any, b| any | (u16::from_le_bytes([b[0], b[1]]) & mask == mask))
}

/// Index of the first E4M3 code that is NaN.
pub(crate) fn first_nan_code(codes: &[u8]) -> Option<usize> {
    let is_nan = |code: &u8| code & 0x7F == 0x7F;
    let at =
        codes.chunks(BLOCK).position(|block| block.iter().fold(false, |any, code| any | is_nan(code)))?
            * BLOCK;
    Some(at + codes[at..].iter().position(is_nan)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_that_is_not_finite_is_found_wherever_it_stands() {
        for kind in [PlainType::F32, PlainType::F16, PlainType::Bf16] {
            let bad: &[&[u8]] = match kind {
                PlainType::F32 => &[&[0, 0, 0x80, 0x7F], &[1, 0, 0x80, 0xFF]],
                PlainType::F16 => &[&[0, 0x7C], &[1, 0xFE]],
                PlainType::Bf16 => &[&[0x80, 0x7F], &[0xC0, 0xFF]],
            };
            let size = kind.size();
            let clean = vec![0x3B; 3 * BLOCK + 5 * size];
            assert_eq!(first_not_finite(&clean, kind), None);
            for at in [0, 1, BLOCK / size - 1, BLOCK / size, 2 * BLOCK / size + 7, clean.len() / size - 1] {
                for number in bad {
                    let mut bytes = clean.clone();
                    bytes[at * size..(at + 1) * size].copy_from_slice(number);
                    assert_eq!(first_not_finite(&bytes, kind), Some(at), "{kind:?}");
                }
            }
        }
    }

    #[test]
    fn the_first_nan_code_is_found_wherever_it_stands() {
        let clean = vec![0x7E; 2 * BLOCK + 9];
        assert_eq!(first_nan_code(&clean), None);
        for at in [0, BLOCK - 1, BLOCK, 2 * BLOCK + 8] {
            for code in [0x7F, 0xFF] {
                let mut codes = clean.clone();
                codes[at] = code;
                assert_eq!(first_nan_code(&codes), Some(at));
            }
        }
    }
}
