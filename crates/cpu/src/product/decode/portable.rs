//! Decoders in portable Rust: the readable definition of the others.

use flint_weights::matrix::e4m3;
use flint_weights::{Form, PlainType};

use super::{Block, Decode, DecodeKernel};
use crate::product::layout::{Arrangement, BLOCK, Layout, Unit};

pub(crate) fn kernel(layout: Layout, form: &Form) -> DecodeKernel {
    match layout.unit {
        Unit::Fma => by_form::<false>(form),
        Unit::Dot => by_form::<true>(form),
    }
}

fn by_form<const DOT: bool>(form: &Form) -> DecodeKernel {
    match form {
        Form::Plain { kind: PlainType::F32, .. } => each::<F32>,
        Form::Plain { kind: PlainType::F16, .. } => each::<F16>,
        Form::Plain { kind: PlainType::Bf16, .. } => each::<Bf16<DOT>>,
        Form::Fp8Block { .. } => each::<Fp8<DOT>>,
        Form::Affine { bits: 2, .. } => each::<Affine<2, DOT>>,
        Form::Affine { bits: 3, .. } => each::<Affine<3, DOT>>,
        Form::Affine { bits: 4, .. } => each::<Affine<4, DOT>>,
        Form::Affine { bits: 5, .. } => each::<Affine<5, DOT>>,
        Form::Affine { bits: 6, .. } => each::<Affine<6, DOT>>,
        Form::Affine { .. } => each::<Affine<8, DOT>>,
        // Tasks of trellises decode tiles (`trellis/`), never rows of blocks.
        Form::Exl3(_) => nothing,
    }
}

unsafe fn nothing(_: &Decode) {}

unsafe fn each<B: Block>(run: &Decode) {
    // SAFETY: the caller's promise is handed on.
    unsafe { super::each::<B>(run) }
}

struct F32;

impl Block for F32 {
    const BYTES: usize = BLOCK * 4;
    const DECODED: usize = BLOCK * 4;

    unsafe fn decode(from: *const u8, to: *mut u8) {
        // SAFETY: the caller vouches for both blocks.
        unsafe { std::ptr::copy_nonoverlapping(from, to, BLOCK * 4) };
    }
}

struct F16;

impl Block for F16 {
    const BYTES: usize = BLOCK * 2;
    const DECODED: usize = BLOCK * 4;

    unsafe fn decode(from: *const u8, to: *mut u8) {
        for i in 0..BLOCK {
            // SAFETY: the caller vouches for both blocks.
            unsafe {
                let value = half::f16::from_bits(from.cast::<u16>().add(i).read_unaligned());
                to.cast::<f32>().add(i).write(value.to_f32());
            }
        }
    }
}

struct Bf16<const DOT: bool>;

impl<const DOT: bool> Block for Bf16<DOT> {
    const BYTES: usize = BLOCK * 2;
    const DECODED: usize = unit::<DOT>().block_bytes();

    unsafe fn decode(from: *const u8, to: *mut u8) {
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
}

struct Fp8<const DOT: bool>;

impl<const DOT: bool> Block for Fp8<DOT> {
    const BYTES: usize = BLOCK;
    const DECODED: usize = unit::<DOT>().block_bytes();

    unsafe fn decode(from: *const u8, to: *mut u8) {
        // SAFETY: the caller vouches for both blocks.
        let codes = unsafe { from.cast::<[u8; BLOCK]>().read_unaligned() };
        let layout = Layout { unit: unit::<DOT>(), arrangement: Arrangement::Bytes };
        // SAFETY: as above.
        unsafe { write::<DOT>(layout, to, |input| e4m3(codes[input])) };
    }
}

struct Affine<const BITS: usize, const DOT: bool>;

impl<const BITS: usize, const DOT: bool> Block for Affine<BITS, DOT> {
    const BYTES: usize = BLOCK * BITS / 8;
    const DECODED: usize = unit::<DOT>().block_bytes();

    unsafe fn decode(from: *const u8, to: *mut u8) {
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
        // As `layout::code_factor` says.
        let factor = if BITS == 8 && DOT { 2.0 } else { 1.0 };
        // SAFETY: as above.
        unsafe { write::<DOT>(layout, to, |input| f32::from(codes[input]) * factor) };
    }
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
