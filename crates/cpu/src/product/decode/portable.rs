//! Decoders in portable Rust: the readable definition of the others.

use flint_weights::matrix::e4m3;
use flint_weights::{Form, PlainType};

use super::BlockDecoder;
use crate::product::layout::{Arrangement, BLOCK, Layout, Unit};

pub(crate) fn decoder(layout: Layout, form: &Form) -> BlockDecoder {
    match layout.unit {
        Unit::Fma => by_form::<false>(form),
        Unit::Dot => by_form::<true>(form),
    }
}

fn by_form<const DOT: bool>(form: &Form) -> BlockDecoder {
    match form {
        Form::Plain { kind: PlainType::F32, .. } => plain_f32,
        Form::Plain { kind: PlainType::F16, .. } => plain_f16,
        Form::Plain { kind: PlainType::Bf16, .. } => plain_bf16::<DOT>,
        Form::Fp8Block { .. } => fp8::<DOT>,
        Form::Affine { bits: 2, .. } => affine::<2, DOT>,
        Form::Affine { bits: 3, .. } => affine::<3, DOT>,
        Form::Affine { bits: 4, .. } => affine::<4, DOT>,
        Form::Affine { bits: 5, .. } => affine::<5, DOT>,
        Form::Affine { bits: 6, .. } => affine::<6, DOT>,
        Form::Affine { .. } => affine::<8, DOT>,
    }
}

unsafe fn plain_f32(from: *const u8, to: *mut u8) {
    // SAFETY: the caller vouches for both blocks.
    unsafe { std::ptr::copy_nonoverlapping(from, to, BLOCK * 4) };
}

unsafe fn plain_f16(from: *const u8, to: *mut u8) {
    for i in 0..BLOCK {
        // SAFETY: the caller vouches for both blocks.
        unsafe {
            let value = half::f16::from_bits(from.cast::<u16>().add(i).read_unaligned());
            to.cast::<f32>().add(i).write(value.to_f32());
        }
    }
}

unsafe fn plain_bf16<const DOT: bool>(from: *const u8, to: *mut u8) {
    if DOT {
        // SAFETY: the caller vouches for both blocks.
        unsafe { std::ptr::copy_nonoverlapping(from, to, BLOCK * 2) };
        return;
    }
    for i in 0..BLOCK {
        // SAFETY: as above.
        unsafe {
            let bits = from.cast::<u16>().add(i).read_unaligned();
            to.cast::<f32>().add(i).write(f32::from_bits(u32::from(bits) << 16));
        }
    }
}

unsafe fn fp8<const DOT: bool>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller vouches for both blocks.
    let codes = unsafe { from.cast::<[u8; BLOCK]>().read_unaligned() };
    let layout = Layout { unit: unit::<DOT>(), arrangement: Arrangement::Bytes };
    // SAFETY: as above.
    unsafe { write::<DOT>(layout, to, |input| e4m3(codes[input])) };
}

unsafe fn affine<const BITS: usize, const DOT: bool>(from: *const u8, to: *mut u8) {
    let mut codes = [0u8; BLOCK];
    for (i, run) in codes.chunks_exact_mut(8).enumerate() {
        let mut stream = [0u8; 8];
        for (j, byte) in stream[..BITS].iter_mut().enumerate() {
            // SAFETY: the caller vouches for `BLOCK · BITS / 8` bytes.
            *byte = unsafe { *from.add(i * BITS + j) };
        }
        let stream = u64::from_le_bytes(stream);
        for (j, code) in run.iter_mut().enumerate() {
            *code = (stream >> (j * BITS) & ((1 << BITS) - 1)) as u8;
        }
    }
    let arrangement = if BITS == 8 { Arrangement::Bytes } else { Arrangement::Runs(BITS as u8) };
    let layout = Layout { unit: unit::<DOT>(), arrangement };
    // SAFETY: as above.
    unsafe { write::<DOT>(layout, to, |input| f32::from(codes[input])) };
}

const fn unit<const DOT: bool>() -> Unit {
    if DOT { Unit::Dot } else { Unit::Fma }
}

/// Writes the values of the inputs in decoded order.
unsafe fn write<const DOT: bool>(layout: Layout, to: *mut u8, value: impl Fn(usize) -> f32) {
    for (position, input) in layout.order().iter().enumerate() {
        let value = value(usize::from(*input));
        // SAFETY: the caller vouches for the decoded block.
        unsafe {
            if DOT {
                to.cast::<u16>().add(position).write((value.to_bits() >> 16) as u16);
            } else {
                to.cast::<f32>().add(position).write(value);
            }
        }
    }
}
