//! From stored codes to the operands of a step: one block of one output at a time.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod portable;

use flint_weights::Form;

use super::layout::{BLOCK, Layout, Unit};
use crate::Level;

/// Decodes a whole block: reads `Part::block_bytes` codes, writes `Unit::block_bytes` operands in the layout's order.
///
/// # Safety
/// The pointers cover these bytes, `to` is aligned to 64, and the CPU has the decoder's instructions.
pub(crate) type BlockDecoder = unsafe fn(from: *const u8, to: *mut u8);

/// The decoder of a form.
pub(crate) fn decoder(level: Level, layout: Layout, form: &Form) -> BlockDecoder {
    let own = match (layout.unit, level) {
        #[cfg(target_arch = "x86_64")]
        (Unit::Dot, _) | (_, Level::Avx512) => avx512::decoder(layout, form),
        _ => None,
    };
    own.unwrap_or_else(|| portable::decoder(layout, form))
}

const _: () = assert!(Unit::Fma.block_bytes() == BLOCK * 4 && Unit::Dot.block_bytes() == BLOCK * 2);

#[cfg(test)]
mod tests {
    use flint_weights::{HostBytes, PlainType};

    use super::*;

    fn forms() -> Vec<Form> {
        let none = || HostBytes::from_vec(Vec::new());
        let mut forms: Vec<Form> = [PlainType::F32, PlainType::F16, PlainType::Bf16]
            .map(|kind| Form::Plain { kind, values: none() })
            .into_iter()
            .collect();
        forms.push(Form::Fp8Block { codes: none(), scales: none(), first_row: 0 });
        forms.extend([2, 3, 4, 5, 6, 8].map(|bits| Form::Affine {
            bits,
            group: 64,
            kind: PlainType::F32,
            codes: none(),
            scales: none(),
            biases: none(),
        }));
        forms
    }

    #[repr(align(64))]
    struct Block([u8; 1024]);

    #[test]
    fn every_instruction_set_decodes_a_block_as_the_portable_decoder_does() {
        let levels =
            [Level::Avx2, Level::Avx512, Level::Neon].into_iter().filter(|level| level.is_available());
        for level in levels {
            for form in forms() {
                for unit in [Unit::Fma, Unit::Dot] {
                    if unit == Unit::Dot && !crate::Arithmetic::dot_is_available()
                        || !super::super::layout::exact_in_bf16(&form) && unit == Unit::Dot
                    {
                        continue;
                    }
                    let layout = Layout::of(unit, &form);
                    for seed in 0..20u32 {
                        let byte = |i: u32| ((i + 1).wrapping_mul(2_654_435_761 + seed * 97) >> 13) as u8;
                        // E4M3's NaN codes are refused where checkpoints are read; 1024 bytes hold any block.
                        let not_nan = |byte: u8| if byte & 0x7F == 0x7F { byte ^ 2 } else { byte };
                        let codes: Vec<u8> = (0..1024).map(byte).map(not_nan).collect();
                        let (mut found, mut expected) = (Block([0; 1024]), Block([0; 1024]));
                        // SAFETY: blocks are at most 1024 bytes on both sides; the level is available.
                        unsafe {
                            decoder(level, layout, &form)(codes.as_ptr(), found.0.as_mut_ptr());
                            portable::decoder(layout, &form)(codes.as_ptr(), expected.0.as_mut_ptr());
                        }
                        let bytes = unit.block_bytes();
                        let first = (0..bytes).find(|i| found.0[*i] != expected.0[*i]);
                        assert_eq!(first, None, "{level:?} {layout:?} {form:?}: first different byte");
                    }
                }
            }
        }
    }
}
