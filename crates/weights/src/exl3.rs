//! EXL3 matrices: the trellis, its codebooks, and the exact value of every weight.
//!
//! ```text
//! trellis  [in / 16, out / 16] tiles of 16 × 16 weights; a tile is a ring of 256·K bits
//! suh      [in] fp16, svh [out] fp16: sign and scale of each input and output
//! W[in, out] = diag(suh) · H · I · H · diag(svh)        I: the tiles' values, H: Hadamard blocks of 128
//! ```
//!
//! `in` and `out` are padded to multiples of 128. This file is the readable definition that kernels are held against;
//! `encoding/exl3.rs` checks the tensors. Source: `reference/exl3.md`, checked against exllamav3 1.6.5.

use std::fmt;

use half::f16;

use crate::matrix::{HostBytes, PlainType};

/// Inputs, and outputs, of a Hadamard block. Sides are padded to a multiple of it.
pub const BLOCK: usize = 128;
/// Inputs, and outputs, of a tile.
pub const TILE: usize = 16;
/// Weights of a tile.
pub const TILE_WEIGHTS: usize = TILE * TILE;
/// The scale of a Hadamard transform, `1 / √128`, in fp32.
pub const HADAMARD_SCALE: f32 = 0.088_388_346;

/// The formula that turns a state of 16 bits into a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Codebook {
    /// Two halves of a linear congruence, added. No marker.
    ThreeInst,
    /// The same with one multiplication.
    Mcg,
    /// The sum of the four bytes of a product.
    Mul1,
}

impl Codebook {
    /// The factor of a state, and what is added to the product.
    pub const fn congruence(self) -> (u32, u32) {
        match self {
            Self::ThreeInst => (89_226_354, 64_248_484),
            Self::Mcg => (0xCBAC_1FED, 0),
            Self::Mul1 => (0x83DC_D12D, 0),
        }
    }

    /// The value of a state.
    pub fn value(self, state: u16) -> f16 {
        let (factor, addend) = self.congruence();
        let x = u32::from(state).wrapping_mul(factor).wrapping_add(addend);
        if self == Self::Mul1 {
            let sum: f64 = x.to_le_bytes().map(f64::from).iter().sum();
            // Exact in float64, so that the conversion is the only rounding, that of a fused multiply-add in fp16.
            return f16::from_f64((1024.0 + sum) * MUL1_SLOPE.to_f64() + MUL1_OFFSET.to_f64());
        }
        let y = (x & HALVES_KEPT) ^ HALVES_FLIPPED;
        // Both are multiples of 2⁻¹³ below 4: their sum is exact in fp32.
        f16::from_f32(f16::from_bits(y as u16).to_f32() + f16::from_bits((y >> 16) as u16).to_f32())
    }
}

/// A value of [`Codebook::Mul1`] is `slope · (1024 + sum) + offset`, rounded once.
pub const MUL1_SLOPE: f16 = f16::from_bits(0x1EEE);
/// See [`MUL1_SLOPE`].
pub const MUL1_OFFSET: f16 = f16::from_bits(0xC931);
/// Bits of both fp16 halves that the other codebooks keep of a product.
pub const HALVES_KEPT: u32 = 0x8FFF_8FFF;
/// Bits that they flip then.
pub const HALVES_FLIPPED: u32 = 0x3B60_3B60;

impl fmt::Display for Codebook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ThreeInst => "3inst",
            Self::Mcg => "mcg",
            Self::Mul1 => "mul1",
        })
    }
}

/// Bits of a weight, in halves: 2 for one bit to 16 for eight; 3, 5 and 7 for the half rates of [`Codebook::Mul1`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rate(u8);

impl Rate {
    /// The rate of `halves` half bits, or `None` if the format has no such rate.
    pub fn of_halves(halves: usize) -> Option<Self> {
        matches!(halves, 2..=8 | 10 | 12 | 14 | 16).then_some(Self(halves as u8))
    }

    /// The rate of a tile of `words` 16-bit words.
    pub fn of_words(words: usize) -> Option<Self> {
        words.is_multiple_of(8).then(|| Self::of_halves(words / 8))?
    }

    /// Half bits of a weight.
    pub const fn halves(self) -> usize {
        self.0 as usize
    }

    /// Whether a weight has a whole number of bits.
    pub const fn is_whole(self) -> bool {
        self.0.is_multiple_of(2)
    }

    /// Bytes of a tile.
    pub const fn tile_bytes(self) -> usize {
        self.0 as usize * TILE_WEIGHTS / 16
    }

    /// Bits of the ring behind the bits that weight `index` appends.
    pub const fn end(self, index: usize) -> usize {
        (index + 1) * self.0 as usize / 2
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let half = if self.is_whole() { "" } else { ".5" };
        write!(f, "{}{half}", self.0 / 2)
    }
}

/// The states of a tile's 256 weights, in the order of the stream.
///
/// # Panics
/// When `tile` is shorter than [`Rate::tile_bytes`].
pub fn states(tile: &[u8], rate: Rate) -> [u16; TILE_WEIGHTS] {
    let ring = rate.tile_bytes() * 8;
    // Words of 32 bits, each highest bit first: byte `b` of the stream is byte `b ^ 3` of the file.
    let byte = |at: usize| u32::from(tile[(at % rate.tile_bytes()) ^ 3]);
    std::array::from_fn(|index| {
        let start = (rate.end(index) + ring - 16) % ring;
        let window = byte(start / 8) << 16 | byte(start / 8 + 1) << 8 | byte(start / 8 + 2);
        (window >> (8 - start % 8)) as u16
    })
}

/// Input and output, inside its tile, of weight `index` of the stream.
pub const fn place(index: usize) -> (usize, usize) {
    let (lane, j) = (index >> 3, index & 7);
    ((lane & 3) * 2 + (j & 1) + 8 * ((j >> 1) & 1), (lane >> 2) + 8 * ((j >> 2) & 1))
}

/// The arrays of an EXL3 matrix: outputs `first_row..` of a trellis.
#[derive(Clone, Debug)]
pub struct Exl3 {
    /// Bits of a weight.
    pub rate: Rate,
    /// Formula of the values.
    pub codebook: Codebook,
    /// Inputs of the trellis, a multiple of 128; those beyond the matrix meet zeros.
    pub inputs: usize,
    /// Outputs of the trellis, a multiple of 128.
    pub outputs: usize,
    /// The trellis's output that is row 0.
    pub first_row: usize,
    /// `[inputs / 16, outputs / 16]` tiles.
    pub trellis: HostBytes,
    /// `suh`, `[inputs]` fp16.
    pub input_scales: HostBytes,
    /// `svh`, `[outputs]` fp16.
    pub output_scales: HostBytes,
}

impl Exl3 {
    /// Bytes of one tile.
    ///
    /// # Panics
    /// When the trellis has no such tile.
    pub fn tile(&self, input_tile: usize, output_tile: usize) -> &[u8] {
        let (bytes, across) = (self.rate.tile_bytes(), self.outputs / TILE);
        let at = (input_tile * across + output_tile) * bytes;
        &self.trellis.as_slice()[at..at + bytes]
    }

    /// `suh` of an input.
    pub fn input_scale(&self, input: usize) -> f32 {
        PlainType::F16.read(self.input_scales.as_slice(), input)
    }

    /// `svh` of an output of the trellis.
    pub fn output_scale(&self, output: usize) -> f32 {
        PlainType::F16.read(self.output_scales.as_slice(), output)
    }

    /// The rotated weights `I` of 128 outputs, from `128 · block` on: `[inputs, 128]`.
    pub fn rotated(&self, block: usize) -> Vec<f16> {
        let mut values = vec![f16::ZERO; self.inputs * BLOCK];
        for input_tile in 0..self.inputs / TILE {
            for tile in 0..BLOCK / TILE {
                let states = states(self.tile(input_tile, block * (BLOCK / TILE) + tile), self.rate);
                for (index, state) in states.into_iter().enumerate() {
                    let (input, output) = place(index);
                    values[(input_tile * TILE + input) * BLOCK + tile * TILE + output] =
                        self.codebook.value(state);
                }
            }
        }
        values
    }

    /// Rows `first..first + rows` as values, `[rows, cols]`, exactly: 7 + 7 additions of fp16 numbers, a division by 128 and two
    /// products with fp16 numbers fit in float64.
    pub(crate) fn decode_f64(&self, first: usize, rows: usize, cols: usize) -> Vec<f64> {
        let mut weights = vec![0.0; rows * cols];
        let (start, end) = (self.first_row + first, self.first_row + first + rows);
        for block in start / BLOCK..end.div_ceil(BLOCK) {
            let mut values: Vec<f64> = self.rotated(block).iter().map(|value| value.to_f64()).collect();
            for input in values.chunks_exact_mut(BLOCK) {
                hadamard(input, 1);
            }
            for inputs in values.chunks_exact_mut(BLOCK * BLOCK) {
                for output in 0..BLOCK {
                    hadamard(&mut inputs[output..], BLOCK);
                }
            }
            for output in start.max(block * BLOCK)..end.min((block + 1) * BLOCK) {
                let scale = f64::from(self.output_scale(output)) / BLOCK as f64;
                let row = &mut weights[(output - start) * cols..][..cols];
                for (input, weight) in row.iter_mut().enumerate() {
                    let value = values[input * BLOCK + output % BLOCK];
                    *weight = f64::from(self.input_scale(input)) * scale * value;
                }
            }
        }
        weights
    }
}

/// The unscaled Hadamard transform of 128 numbers that lie `apart` from each other: butterflies at strides 1 to 64.
fn hadamard(values: &mut [f64], apart: usize) {
    let mut stride = 1;
    while stride < BLOCK {
        for low in (0..BLOCK).filter(|index| index & stride == 0) {
            let (a, b) = (values[low * apart], values[(low + stride) * apart]);
            values[low * apart] = a + b;
            values[(low + stride) * apart] = a - b;
        }
        stride *= 2;
    }
}

/// Packed signs (`su`, `sv` of early files) as fp16 scales: bit `i` of word `w` is element `16 w + i`, set for −1.
pub fn unpack_signs(packed: &[u8]) -> Vec<u8> {
    let bits = packed.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1));
    bits.flat_map(|bit| f16::from_f32(if bit == 1 { -1.0 } else { 1.0 }).to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tile (0, 0) of `K3.mul1.256x128` in the fixture that exllamav3 wrote begins and ends like this.
    #[test]
    fn a_tile_starts_with_the_states_and_values_of_the_worked_example() {
        let mut tile = vec![0; 96];
        for (at, word) in [(0, 0x1131_u16), (1, 0xA920), (2, 0x4DF5), (3, 0x0608), (4, 0x07A3), (5, 0x11E6)]
            .into_iter()
            .chain([(44, 0xB95D), (45, 0xCF75), (46, 0x8F37), (47, 0x8049)])
        {
            tile[2 * at..2 * at + 2].copy_from_slice(&word.to_le_bytes());
        }
        let rate = Rate::of_words(48).unwrap();
        let states = states(&tile, rate);
        let expected = [0x79BD, 0xCDEA, 0x6F52, 0x7A92, 0xD490, 0xA480, 0x2402, 0x2011, 0x0089, 0x044C_u16];
        assert_eq!(states[..10], expected);
        let values = [0.932_128_9, -1.605_468_8, 0.586_914_06, 0.796_875, -0.502_441_4_f32];
        for (state, value) in states.iter().zip(values) {
            assert_eq!(Codebook::Mul1.value(*state), f16::from_f32(value));
        }
        let places: Vec<_> = (0..11).map(place).collect();
        let first = [(0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8), (2, 0), (3, 0), (10, 0)];
        assert_eq!(places, first);
    }

    #[test]
    fn the_codebooks_have_the_documented_values() {
        let states = [0, 1, 2, 3, 0x1234, 0x8000, 0xFFFF_u16];
        let table = [
            (
                Codebook::ThreeInst,
                [
                    0.768_066_4,
                    -0.919_433_6,
                    0.931_640_6,
                    0.294_433_6,
                    -2.199_218_8,
                    -0.498_046_88,
                    -0.158_203_13,
                ],
            ),
            (
                Codebook::Mcg,
                [
                    1.843_75,
                    0.134_521_48,
                    -0.759_277_34,
                    0.839_843_75,
                    1.514_648_4,
                    -0.635_253_9,
                    0.850_097_66,
                ],
            ),
            (
                Codebook::Mul1,
                [
                    -3.453_125,
                    0.641_113_3,
                    -0.448_486_33,
                    0.194_458_01,
                    -0.577_148_44,
                    -0.868_164_06,
                    -0.651_367_2,
                ],
            ),
        ];
        for (codebook, values) in table {
            for (state, value) in states.iter().zip(values) {
                assert_eq!(codebook.value(*state), f16::from_f32(value), "{codebook} {state:#x}");
            }
        }
    }

    #[test]
    fn rates_are_those_of_the_format() {
        let halves: Vec<usize> = (0..40).filter(|halves| Rate::of_halves(*halves).is_some()).collect();
        assert_eq!(halves, [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]);
        assert_eq!(Rate::of_words(48).unwrap().to_string(), "3");
        assert_eq!(Rate::of_words(40).unwrap().to_string(), "2.5");
        assert_eq!(Rate::of_words(41), None);
        assert_eq!(Rate::of_words(136), None);
        // Half rates: floor(K) bits for even weights, one more for odd ones.
        let rate = Rate::of_halves(5).unwrap();
        assert_eq!([0, 1, 2, 3, 255].map(|index| rate.end(index)), [2, 5, 7, 10, 640]);
    }
}
