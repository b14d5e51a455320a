//! From stored codes to the operands of a step.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use flint_weights::Form;

use super::layout::{BLOCK, Layout, Unit};
use crate::Level;

/// A run of whole blocks of neighbouring outputs.
pub(crate) struct Decode {
    pub(crate) outputs: usize,
    pub(crate) blocks: usize,
    /// Codes of the first output's first block.
    pub(crate) codes: *const u8,
    /// Bytes from one output's codes to the next.
    pub(crate) code_stride: usize,
    /// Where the next run's codes are, as far apart: they are asked for meanwhile. May point anywhere.
    pub(crate) ahead: *const u8,
    /// Decoded blocks, aligned to 64.
    pub(crate) to: *mut u8,
    /// Bytes from one output's decoded blocks to the next.
    pub(crate) to_stride: usize,
}

/// Decodes a run in the layout's order.
///
/// # Safety
/// The pointers cover what [`Decode`] says and the CPU has the kernel's instructions.
pub(crate) type DecodeKernel = unsafe fn(&Decode);

/// The kernel of a form.
pub(crate) fn kernel(level: Level, layout: Layout, form: &Form) -> DecodeKernel {
    let own = match (layout.unit, level) {
        #[cfg(target_arch = "x86_64")]
        (Unit::Dot, _) | (_, Level::Avx512) => avx512::kernel(layout, form),
        #[cfg(target_arch = "x86_64")]
        (Unit::Fma, Level::Avx2) => avx2::kernel(form),
        #[cfg(target_arch = "aarch64")]
        (Unit::Fma, Level::Neon) => neon::kernel(form),
        _ => None,
    };
    own.unwrap_or_else(|| portable::kernel(layout, form))
}

/// One instruction set's way to decode a block.
trait Block {
    /// Bytes of a block of codes.
    const BYTES: usize;
    /// Bytes of a decoded block.
    const DECODED: usize;

    /// Decodes a block.
    ///
    /// # Safety
    /// The pointers cover these bytes, `to` is aligned to 64, and the CPU has the instructions.
    unsafe fn decode(from: *const u8, to: *mut u8);
}

#[inline(always)]
unsafe fn each<B: Block>(run: &Decode) {
    for output in 0..run.outputs {
        for block in 0..run.blocks {
            let at = output * run.code_stride + block * B::BYTES;
            ask(run.ahead.wrapping_add(at), B::BYTES);
            // SAFETY: the caller vouches for every block of every output.
            unsafe { B::decode(run.codes.add(at), run.to.add(output * run.to_stride + block * B::DECODED)) };
        }
    }
}

/// Asks for bytes that come soon.
#[inline(always)]
pub(crate) fn ask(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing, wherever it points; every x86-64 CPU has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, bytes);
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
    struct Decoded([u8; 1024]);

    fn one_block(codes: &[u8], to: &mut Decoded) -> Decode {
        Decode {
            outputs: 1,
            blocks: 1,
            codes: codes.as_ptr(),
            code_stride: 0,
            ahead: codes.as_ptr(),
            to: to.0.as_mut_ptr(),
            to_stride: 0,
        }
    }

    #[test]
    fn every_instruction_set_decodes_a_block_as_the_portable_decoder_does() {
        let levels =
            [Level::Avx2, Level::Avx512, Level::Neon].into_iter().filter(|level| level.is_available());
        for level in levels {
            for form in forms() {
                for unit in [Unit::Fma, Unit::Dot] {
                    let dot =
                        super::super::layout::exact_in_bf16(&form) && crate::Arithmetic::dot_is_available();
                    if unit == Unit::Dot && !dot {
                        continue;
                    }
                    let layout = Layout::of(unit, &form);
                    for seed in 0..20u32 {
                        let byte = |i: u32| ((i + 1).wrapping_mul(2_654_435_761 + seed * 97) >> 13) as u8;
                        // E4M3's NaN codes are refused where checkpoints are read; 1024 bytes hold any block.
                        let not_nan = |byte: u8| if byte & 0x7F == 0x7F { byte ^ 2 } else { byte };
                        let codes: Vec<u8> = (0..1024).map(byte).map(not_nan).collect();
                        let (mut found, mut expected) = (Decoded([0; 1024]), Decoded([0; 1024]));
                        // SAFETY: blocks are at most 1024 bytes on both sides; the level is available.
                        unsafe {
                            kernel(level, layout, &form)(&one_block(&codes, &mut found));
                            portable::kernel(layout, &form)(&one_block(&codes, &mut expected));
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
