//! Which input each lane multiplies when: the fixed reduction tree of every encoding.
//!
//! Inputs are cut into blocks of [`BLOCK`]. Inside a block each of the 16 lanes owns 16 inputs, and where the encoding
//! has scales all 16 share one. A lane's product is, for blocks in ascending order,
//! `acc = fma(scale, Σ w·x over the lane's 16 inputs from zero, acc)`, and an output is the pairwise fold of its lanes.
//! A layout only says *which* 16 inputs, in *which* order; it was chosen so that codes can be unpacked in registers.
//! It depends on the encoding and the arithmetic, never on rows, threads or instruction set.

use flint_weights::{Form, PlainType};

/// Inputs of a block: 16 lanes × 16 inputs, so that one scale FMA pays for eight bf16 dot products.
pub(crate) const BLOCK: usize = 256;

/// Lanes of a sum.
pub(crate) const LANES: usize = 16;

/// How products of a part are computed: fixed when the matrix is uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unit {
    /// fp32 inputs, one FMA an input. 16 steps a block.
    Fma,
    /// bf16 inputs, `vdpbf16ps` on pairs. 8 steps a block.
    Dot,
}

impl Unit {
    /// Steps of a block; one step is 64 bytes of weights and 64 bytes of inputs.
    pub(crate) const fn steps(self) -> usize {
        match self {
            Self::Fma => 16,
            Self::Dot => 8,
        }
    }

    /// Bytes of a decoded block of one row.
    pub(crate) const fn block_bytes(self) -> usize {
        self.steps() * STEP_BYTES
    }
}

/// Bytes of a step: 16 fp32 numbers or 16 pairs of bf16.
pub(crate) const STEP_BYTES: usize = 64;

/// Where the codes of a block go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Arrangement {
    /// Input `i` of step `i / 16` in lane `i % 16` (pairs: two neighbours a lane). Numbers without scales.
    Natural,
    /// A lane owns a run of 16 consecutive inputs. Affine codes of 2, 3, 4, 5 and 6 bits.
    Runs(u8),
    /// One byte a code, two lanes for each run of 32. FP8 and 8-bit affine codes.
    Bytes,
}

/// The tree of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub(crate) unit: Unit,
    pub(crate) arrangement: Arrangement,
}

/// `ORDER[p]` is the input of a block at decoded position `p`: position = step × 16 + lane for [`Unit::Fma`],
/// (step × 16 + lane) × 2 + half for [`Unit::Dot`].
pub(crate) type Order = [u8; BLOCK];

impl Layout {
    /// The layout of a form.
    pub(crate) fn of(unit: Unit, form: &Form) -> Self {
        let arrangement = match form {
            // A trellis has an order of its own (`trellis/`).
            Form::Plain { .. } | Form::Exl3(_) => Arrangement::Natural,
            Form::Affine { bits: 8, .. } | Form::Fp8Block { .. } => Arrangement::Bytes,
            Form::Affine { bits, .. } => Arrangement::Runs(*bits),
        };
        Self { unit, arrangement }
    }

    /// Input of each decoded position.
    pub(crate) const fn order(self) -> &'static Order {
        const NATURAL: &Order = &natural();
        const BYTES: &[Order; 2] = &[bytes(Unit::Fma), bytes(Unit::Dot)];
        // 3, 5 and 6 bits share an order: their codes reach any position by a shift of their own.
        const RUNS_2: &[Order; 2] = &[runs(2, Unit::Fma), runs(2, Unit::Dot)];
        const RUNS_4: &[Order; 2] = &[runs(4, Unit::Fma), runs(4, Unit::Dot)];
        const RUNS_ODD: &[Order; 2] = &[runs(3, Unit::Fma), runs(3, Unit::Dot)];
        let unit = self.unit as usize;
        match self.arrangement {
            Arrangement::Natural => NATURAL,
            Arrangement::Bytes => &BYTES[unit],
            Arrangement::Runs(2) => &RUNS_2[unit],
            Arrangement::Runs(4) => &RUNS_4[unit],
            Arrangement::Runs(_) => &RUNS_ODD[unit],
        }
    }

    /// The first input that a lane owns. Its 16 inputs lie in one run of 32, so in one quantisation group.
    pub(crate) fn first_input(self, lane: usize) -> usize {
        let position = match self.unit {
            Unit::Fma => lane,
            Unit::Dot => lane * 2,
        };
        usize::from(self.order()[position])
    }
}

/// What decoded codes are multiplied by, and scales divided by: a power of two, so no bit depends on it. Doubled 8-bit
/// codes are cheaper to make as bf16.
pub(crate) fn code_factor(unit: Unit, form: &Form) -> f32 {
    match form {
        Form::Affine { bits: 8, .. } if unit == Unit::Dot => 2.0,
        _ => 1.0,
    }
}

/// Whether a part can be multiplied by bf16 dot products: its codes (without scale) are exact in bf16.
pub(crate) fn exact_in_bf16(form: &Form) -> bool {
    match form {
        Form::Plain { kind, .. } => *kind == PlainType::Bf16,
        Form::Affine { .. } | Form::Fp8Block { .. } => true,
        Form::Exl3(_) => false,
    }
}

const fn natural() -> Order {
    let mut order = [0; BLOCK];
    let mut position = 0;
    while position < BLOCK {
        order[position] = position as u8;
        position += 1;
    }
    order
}

/// Lane `l` owns the run `r(l)` of 16 inputs. At 4 bits a run is two words, and the first words of all lanes are
/// gathered by one blend of two loads when even lanes own the first half of the block and odd lanes the second.
const fn runs(bits: usize, unit: Unit) -> Order {
    let mut order = [0; BLOCK];
    let mut lane = 0;
    while lane < LANES {
        let run = if bits == 4 { lane / 2 + lane % 2 * 8 } else { lane };
        let mut i = 0;
        while i < 16 {
            let (position, input) = match unit {
                Unit::Fma => (i * LANES + lane, i),
                Unit::Dot => {
                    let (step, half) = (i / 2, i % 2);
                    // A 16-bit half of a word holds the codes of one half of each pair, so that one shift moves both.
                    let input = match bits {
                        2 => step + 8 * half,
                        4 => step % 4 + 4 * half + step / 4 * 8,
                        _ => i,
                    };
                    ((step * LANES + lane) * 2 + half, input)
                }
            };
            order[position] = (run * 16 + input) as u8;
            i += 1;
        }
        lane += 1;
    }
    order
}

/// Runs of 32 bytes whose words interleave in quarter `c` of the registers: the even words, then the odd ones.
pub(crate) const BYTE_RUNS: [[usize; 2]; 4] = [[0, 4], [2, 6], [1, 5], [3, 7]];

/// Four registers `z` of 16 words; word `4c + d` of `z` is word `z / 2 · 4 + z % 2 · 2 + d / 2` of run
/// `BYTE_RUNS[c][d % 2]`. With FMA a lane is a word; pairs are the register's bytes, low and high halves of each quarter.
const fn bytes(unit: Unit) -> Order {
    let mut order = [0; BLOCK];
    let mut position = 0;
    while position < BLOCK {
        // (register, quarter, byte of the quarter) that a position takes.
        let (z, c, byte) = match unit {
            Unit::Fma => {
                let (step, lane) = (position / LANES, position % LANES);
                (step / 4, lane / 4, lane % 4 * 4 + step % 4)
            }
            Unit::Dot => {
                let (step, rest) = (position / 32, position % 32);
                (step / 2, rest / 8, step % 2 * 8 + rest % 8)
            }
        };
        let (d, y) = (byte / 4, byte % 4);
        let word = z / 2 * 4 + z % 2 * 2 + d / 2;
        order[position] = (BYTE_RUNS[c][d % 2] * 32 + word * 4 + y) as u8;
        position += 1;
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layouts() -> Vec<Layout> {
        let arrangements = [Arrangement::Natural, Arrangement::Bytes]
            .into_iter()
            .chain([2, 3, 4, 5, 6].map(Arrangement::Runs));
        arrangements
            .flat_map(|arrangement| [Unit::Fma, Unit::Dot].map(|unit| Layout { unit, arrangement }))
            .collect()
    }

    #[test]
    fn every_input_of_a_block_has_exactly_one_position() {
        for layout in layouts() {
            let mut inputs = *layout.order();
            inputs.sort_unstable();
            assert_eq!(inputs, natural(), "{layout:?}");
        }
    }

    #[test]
    fn the_inputs_of_a_lane_share_every_quantisation_group() {
        for layout in layouts().into_iter().filter(|layout| layout.arrangement != Arrangement::Natural) {
            for (position, input) in layout.order().iter().enumerate() {
                let lane = match layout.unit {
                    Unit::Fma => position % LANES,
                    Unit::Dot => position / 2 % LANES,
                };
                let run = layout.first_input(lane) / 32;
                assert_eq!(usize::from(*input) / 32, run, "{layout:?}, position {position}");
            }
        }
    }
}
