//! Tiles to numbers: where each window of the ring lies, and the portable decoder.
//!
//! A tile becomes 16 registers of 16 numbers, `[step, a, lane]`. Register `(step, a)` with `a = h + 2 · (j / 4)` and
//! `step = j % 4` holds weights `8 t + j` of the stream for the 16 lanes `t = 16 h ..` of a fragment: outputs
//! `4 a ..  4 a + 4`, four inputs of each.

use flint_weights::exl3::{
    Codebook, HALVES_FLIPPED, HALVES_KEPT, MUL1_OFFSET, MUL1_SLOPE, Rate, TILE_WEIGHTS, states,
};

use super::TILE_NUMBERS;
use crate::Level;

/// Decodes one tile into 256 numbers.
///
/// # Safety
/// `tile` is valid for the rate's bytes of a tile, `to` for 256 numbers, and the CPU has the kernel's instructions.
pub(crate) type DecodeTile = unsafe fn(tile: *const u8, to: *mut f32);

/// The decoder of a rate and a codebook.
pub(crate) fn kernel(level: Level, rate: Rate, codebook: Codebook) -> DecodeTile {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => super::avx512::kernel(rate, codebook),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => super::avx2::kernel(rate, codebook),
        _ => portable(rate, codebook),
    }
}

/// A column of the tiles of 128 inputs, and the rows that meet it.
pub(crate) struct Tiles {
    /// The first tile.
    pub(crate) first: *const u8,
    /// Bytes from one tile to the next.
    pub(crate) stride: usize,
    /// Rotated inputs of the first row.
    pub(crate) inputs: *const f32,
    /// Numbers from one row's to the next.
    pub(crate) input_stride: usize,
    /// Totals of the first row, 512 numbers from row to row.
    pub(crate) totals: *mut f32,
}

/// Adds the products of a column to the totals of some rows, in the order of `multiply.rs`.
///
/// # Safety
/// The pointers cover what [`Tiles`] says, and the CPU has the kernel's instructions.
pub(crate) type StreamTiles = unsafe fn(&Tiles);

/// The kernel that multiplies in registers, where there is one for so few rows.
pub(crate) fn stream(level: Level, rate: Rate, codebook: Codebook, rows: usize) -> Option<StreamTiles> {
    #[cfg(target_arch = "x86_64")]
    if level == Level::Avx512 {
        return super::avx512::stream(rate, codebook, rows);
    }
    let _ = (level, rate, codebook, rows);
    None
}

/// Names the function of a rate (in half bits) and a codebook.
macro_rules! by_rate {
    ($rate:expr, $codebook:expr, $function:ident) => {
        by_rate!(@codebooks $rate, $codebook, $function, 2 4 6 8 10 12 14 16)
    };
    (@codebooks $rate:expr, $codebook:expr, $function:ident, $($whole:literal)*) => {
        match ($rate.halves(), $codebook) {
            $(
                ($whole, Codebook::ThreeInst) => $function::<$whole, { super::decode::THREE_INST }>,
                ($whole, Codebook::Mcg) => $function::<$whole, { super::decode::MCG }>,
                ($whole, Codebook::Mul1) => $function::<$whole, { super::decode::MUL1 }>,
            )*
            (3, _) => $function::<3, { super::decode::MUL1 }>,
            (5, _) => $function::<5, { super::decode::MUL1 }>,
            _ => $function::<7, { super::decode::MUL1 }>,
        }
    };
}
pub(crate) use by_rate;

/// Codebooks as constants of functions.
pub(crate) const THREE_INST: u8 = 0;
/// See [`THREE_INST`].
pub(crate) const MCG: u8 = 1;
/// See [`THREE_INST`].
pub(crate) const MUL1: u8 = 2;

/// The codebook of a constant.
pub(crate) const fn codebook<const CODEBOOK: u8>() -> Codebook {
    match CODEBOOK {
        THREE_INST => Codebook::ThreeInst,
        MCG => Codebook::Mcg,
        _ => Codebook::Mul1,
    }
}

/// Where weight `index` of the stream goes.
const fn register_place(index: usize) -> usize {
    let (t, j) = (index / 8, index % 8);
    (j % 4 * 4 + t / 16 + j / 4 * 2) * 16 + t % 16
}

fn portable(rate: Rate, codebook: Codebook) -> DecodeTile {
    by_rate!(rate, codebook, decode)
}

unsafe fn decode<const HALVES: usize, const CODEBOOK: u8>(tile: *const u8, to: *mut f32) {
    let Some(rate) = Rate::of_halves(HALVES) else { return };
    // SAFETY: the caller vouches for the tile's bytes and for 256 numbers.
    unsafe {
        let states = states(std::slice::from_raw_parts(tile, rate.tile_bytes()), rate);
        for (index, state) in states.into_iter().enumerate() {
            to.add(register_place(index)).write(value(codebook::<CODEBOOK>(), state));
        }
    }
}

/// Makes a value of 11 bits of an exact one: `(2¹³ + 1) · v` leaves the upper 11 of 24 bits when `v` is taken away and added
/// again (Dekker's splitting). For the values that occur this is fp16's rounding to nearest even; the test tries all.
pub(crate) const SPLIT: f32 = 8193.0;
/// `slope · (1024 + n) + offset` with `n` in the low bits of the number `2²³ + 1024 + n`: exact, as the offset is a multiple
/// of 2⁻⁷ below 2¹⁶.
pub(crate) const MUL1_MAGIC: u32 = 0x4B00_0400;
/// See [`MUL1_MAGIC`].
pub(crate) fn mul1_line() -> (f32, f32) {
    let slope = MUL1_SLOPE.to_f32();
    (slope, MUL1_OFFSET.to_f32() - slope * 8_388_608.0)
}
/// An fp16 number's bits, 13 places up, are those of an fp32 number 2¹¹² times smaller.
pub(crate) const HALF_TO_FLOAT: f32 = 5.192_297e33;
/// What is kept of a product whose upper half lies 3 places down from an fp32 number's place, and what is flipped.
pub(crate) const KEPT: u32 = HALVES_KEPT & 0x8000_0000 | (HALVES_KEPT >> 3 & 0x01FF_E000);
/// See [`KEPT`].
pub(crate) const FLIPPED: u32 = (HALVES_FLIPPED >> 16) << 13;

/// The value of a state, in the steps of the vector code.
fn value(codebook: Codebook, state: u16) -> f32 {
    let (factor, addend) = codebook.congruence();
    let x = u32::from(state).wrapping_mul(factor).wrapping_add(addend);
    let exact = if codebook == Codebook::Mul1 {
        let sum: u32 = x.to_le_bytes().map(u32::from).iter().sum();
        let (slope, offset) = mul1_line();
        f32::from_bits(MUL1_MAGIC + sum).mul_add(slope, offset)
    } else {
        let half = |x: u32| f32::from_bits(((x as i32 >> 3) as u32 & KEPT) ^ FLIPPED);
        (half(x << 16) + half(x)) * HALF_TO_FLOAT
    };
    let split = exact * SPLIT;
    split - (split - exact)
}

/// Where the windows of a rate's states lie. Lane `t` of a fragment has states `8 t + j`; a window is four bytes of the
/// ring that hold the states of some neighbouring `j`.
#[repr(C, align(64))]
pub(crate) struct Windows {
    /// Byte of the tile for each byte of a register: `[half of the fragment, window, 16 lanes · 4]`.
    pub(crate) bytes: [[[u8; 64]; MOST_WINDOWS]; 2],
    /// How far a state lies above the window's lowest bit.
    pub(crate) shift: [[[u32; 16]; 8]; 2],
    /// The window of each `j`.
    pub(crate) of: [usize; 8],
    /// Windows of a half.
    pub(crate) count: usize,
}

/// Windows of a half at most: at eight bits each holds three states.
pub(crate) const MOST_WINDOWS: usize = 4;

/// First bit of a state, one turn of the ring up.
const fn start(halves: usize, t: usize, j: usize) -> usize {
    (8 * t + j + 1) * halves / 2 + halves * 128 - 16
}

/// First byte of a window: that of the bit before its first state, so that no shift is as long as a state.
const fn first_byte(halves: usize, t: usize, first: usize) -> usize {
    (start(halves, t, first) - 1) / 8
}

/// The windows of a rate.
pub(crate) const fn windows(halves: usize) -> Windows {
    let mut windows =
        Windows { bytes: [[[0; 64]; MOST_WINDOWS]; 2], shift: [[[0; 16]; 8]; 2], of: [0; 8], count: 0 };
    let ring = halves * TILE_WEIGHTS / 16;
    let (mut j, mut first) = (0, 0);
    while j < 8 {
        // The first state that does not fit in every lane's window opens another.
        let mut t = 0;
        while t < 32 {
            if start(halves, t, j) - first_byte(halves, t, first) * 8 > 16 {
                first = j;
                windows.count += 1;
            }
            t += 1;
        }
        windows.of[j] = windows.count;
        t = 0;
        while t < 32 {
            let byte = first_byte(halves, t, first);
            windows.shift[t / 16][j][t % 16] = (16 - (start(halves, t, j) - byte * 8)) as u32;
            let mut i = 0;
            while i < 4 {
                // The ring's bytes are words of 32 bits, each highest byte first.
                let from = ((byte + i) % ring) ^ 3;
                windows.bytes[t / 16][windows.count][t % 16 * 4 + 3 - i] = from as u8;
                i += 1;
            }
            t += 1;
        }
        j += 1;
    }
    windows.count += 1;
    windows
}

const _: () = assert!(TILE_NUMBERS == TILE_WEIGHTS);

#[cfg(test)]
mod tests {
    use super::*;

    const CODEBOOKS: [Codebook; 3] = [Codebook::ThreeInst, Codebook::Mcg, Codebook::Mul1];

    #[test]
    fn every_state_has_the_value_that_the_format_defines() {
        for codebook in CODEBOOKS {
            for state in 0..=u16::MAX {
                let (found, expected) = (value(codebook, state), codebook.value(state).to_f32());
                assert_eq!(found.to_bits(), expected.to_bits(), "{codebook}, state {state:#x}");
            }
        }
    }

    #[test]
    fn every_instruction_set_decodes_every_rate_as_the_portable_decoder_does() {
        let levels = [Level::Avx2, Level::Avx512].into_iter().filter(|level| level.is_available());
        for level in levels {
            for rate in (0..=16).filter_map(Rate::of_halves) {
                let codebooks = CODEBOOKS.into_iter().filter(|c| rate.is_whole() || *c == Codebook::Mul1);
                for (codebook, seed) in codebooks.flat_map(|codebook| (0..40u32).map(move |s| (codebook, s)))
                {
                    let byte = |i: u32| ((i + 1).wrapping_mul(2_654_435_761 + seed * 96) >> 13) as u8;
                    // No byte behind the tile may be read: it ends where the vector ends, at an odd address.
                    let tile: Vec<u8> = (0..=rate.tile_bytes() as u32).map(byte).collect();
                    let (mut found, mut expected) = ([0.0f32; 256], [1.0f32; 256]);
                    // SAFETY: a whole tile and 256 numbers; the level is available.
                    unsafe {
                        kernel(level, rate, codebook)(tile[1..].as_ptr(), found.as_mut_ptr());
                        portable(rate, codebook)(tile[1..].as_ptr(), expected.as_mut_ptr());
                    }
                    let differs = (0..256).find(|i| found[*i].to_bits() != expected[*i].to_bits());
                    assert_eq!(differs, None, "{level:?}, {rate} bits, {codebook}: first different number");
                }
            }
        }
    }
}
