//! The causal depthwise convolution of a KDA layer, and its window of rows from before.
//! `reference/glm5_next.md` section 5, step 2.

use flint_backend::Result;
use flint_backend::ops::{KdaConv, KdaSpan};

use super::{require, require_apart, spread};
use crate::buffer::{RowsF32, Start};
use crate::lanes::{Kernel, LANES, Lanes};
use crate::maths::silu;
use crate::{Cpu, CpuBuffer};

/// Taps that the kernels have room for.
const MAX_TAPS: usize = 8;
/// Rows that a task takes: the taps are put in order once for all of them.
const ROWS: usize = 8;
/// Channels that a task takes: a decode step has one row, so channels are what threads share.
const CHANNELS: usize = 2048;

pub(crate) fn kda_conv(cpu: &mut Cpu, op: &KdaConv<CpuBuffer>) -> Result<()> {
    const NAME: &str = "kda_conv";
    let (out, u) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.u)?);
    let (channels, taps) = (u.width, op.tap_count);
    require(NAME, out.width == channels && out.rows == u.rows, || {
        format!("{} × {} from {} × {channels}", out.rows, out.width, u.rows)
    })?;
    require(NAME, (1..=MAX_TAPS).contains(&taps), || format!("{taps} taps, 1 to {MAX_TAPS} are possible"))?;
    // SAFETY: no operation writes weights.
    let weights = unsafe { op.taps.f32s(NAME, channels * taps) }?;
    let streams: Vec<Stream> =
        op.spans.iter().map(|span| Stream::new(NAME, span, u, taps)).collect::<Result<_>>()?;
    require_apart(NAME, streams.iter().map(|stream| (stream.first_row, stream.rows)))?;
    let pieces = channels.div_ceil(CHANNELS);
    let blocks = blocks(&streams);
    let level = cpu.options.level;
    spread(cpu, blocks.len() * pieces, 8 * ROWS.min(u.rows) * CHANNELS.min(channels), &|items| {
        for item in items {
            let (stream, first) = blocks[item / pieces];
            let at = item % pieces * CHANNELS;
            let count = CHANNELS.min(channels - at);
            level.run(Block { out, stream: &streams[stream], weights, taps, first, at, count });
        }
    });
    // Only now: a task may read any of a span's window.
    spread(cpu, streams.len() * pieces, 2 * taps * CHANNELS.min(channels), &|items| {
        for item in items {
            let at = item % pieces * CHANNELS;
            streams[item / pieces].keep(at, CHANNELS.min(channels - at));
        }
    });
    Ok(())
}

/// (span, first row) of each block of rows.
fn blocks(streams: &[Stream]) -> Vec<(usize, usize)> {
    let of_one =
        |(index, stream): (usize, &Stream)| (0..stream.rows).step_by(ROWS).map(move |row| (index, row));
    streams.iter().enumerate().flat_map(of_one).collect()
}

/// A span's rows and those before them.
struct Stream {
    u: RowsF32,
    window: Start<f32>,
    first_row: usize,
    rows: usize,
    sure: usize,
    /// Rows of the window before the span's first.
    before: usize,
    /// Rows that a convolution looks back.
    back: usize,
}

impl Stream {
    fn new(op: &'static str, span: &KdaSpan<CpuBuffer>, u: RowsF32, taps: usize) -> Result<Self> {
        let (rows, back) = (span.sure + span.drafts, taps - 1);
        require(op, span.first_row + rows <= u.rows, || {
            format!("a span of rows {}..{} of {}", span.first_row, span.first_row + rows, u.rows)
        })?;
        let window = span.window.f32_start(op, (back + span.logged.max(span.drafts)) * u.width)?;
        let (first_row, sure) = (span.first_row, span.sure);
        Ok(Self { u, window, first_row, rows, sure, before: back + span.logged, back })
    }

    /// Channel `at` of the row that stands `behind` rows before row `row`.
    ///
    /// # Safety
    /// `row` is a row of the span, `behind <= back`, `at` a channel.
    #[inline(always)]
    unsafe fn past(&self, row: usize, behind: usize, at: usize) -> *const f32 {
        // SAFETY: the span's rows and the window's were checked.
        unsafe {
            if row >= behind {
                self.u.at(self.first_row + row - behind).add(at)
            } else {
                self.window.at((self.before + row - behind) * self.u.width + at)
            }
        }
    }

    /// Moves channels `at..at + count` of the last rows before the state, then of the drafts, into the window.
    fn keep(&self, at: usize, count: usize) {
        let width = self.u.width;
        // A row of the new window comes from a later row of the old one or from the span: ascending order is safe.
        for slot in 0..self.back + self.rows - self.sure {
            let source = self.before + self.sure + slot - self.back;
            // SAFETY: both rows were checked; `copy` allows the same place, and tasks have channels of their own.
            unsafe {
                let from = if source < self.before {
                    self.window.at(source * width + at)
                } else {
                    self.u.at(self.first_row + source - self.before).add(at)
                };
                std::ptr::copy(from, self.window.at(slot * width + at), count);
            }
        }
    }
}

/// Channels `at..at + count` of up to [`ROWS`] rows from `first`.
struct Block<'a> {
    out: RowsF32,
    stream: &'a Stream,
    weights: &'a [f32],
    taps: usize,
    first: usize,
    at: usize,
    count: usize,
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        if self.taps == 4 {
            self.convolve::<L, 4>();
        } else {
            self.convolve::<L, MAX_TAPS>();
        }
    }
}

impl Block<'_> {
    #[inline(always)]
    fn convolve<L: Lanes, const N: usize>(self) {
        let taps = self.taps.min(N);
        let rows = ROWS.min(self.stream.rows - self.first);
        for at in (self.at..self.at + self.count).step_by(LANES) {
            let left = self.at + self.count - at;
            let weights = self.tap_vectors::<L, N>(at, left);
            for row in self.first..self.first + rows {
                let mut total = L::zero();
                // SAFETY: the row and the channels exist; tasks write different blocks of `out`, which is not `u`.
                unsafe {
                    for (j, weight) in weights[..taps].iter().enumerate() {
                        let past = self.stream.past(row, taps - 1 - j, at);
                        total = weight.fma(L::read_some(past, left), total);
                    }
                    silu(total).write_some(self.out.at(self.stream.first_row + row).add(at), left);
                }
            }
        }
    }

    /// Tap `j` of sixteen channels from `at`, for each `j`.
    #[inline(always)]
    fn tap_vectors<L: Lanes, const N: usize>(&self, at: usize, left: usize) -> [L; N] {
        let mut vectors = [L::zero(); N];
        if N == 4 && left >= LANES {
            // SAFETY: sixteen channels are left, four taps each.
            let four = unsafe { L::read_groups_of_four(self.weights.as_ptr().add(at * 4)) };
            vectors.copy_from_slice(&four);
            return vectors;
        }
        for (j, vector) in vectors[..self.taps.min(N)].iter_mut().enumerate() {
            let mut values = [0.0; LANES];
            for (lane, value) in values.iter_mut().enumerate().take(left) {
                *value = self.weights[(at + lane) * self.taps + j];
            }
            *vector = L::load(&values);
        }
        vectors
    }
}
