//! The delta-rule recurrence of a KDA layer. `reference/glm5_next.md` section 5, step 7.
//!
//! A value column of a head's state never meets another one, so lanes run along values, and sums over keys are one
//! chain of fused multiply-adds in ascending order for each value. Two ways through the state share this arithmetic:
//! * a run of several tokens takes a tile of columns, small enough for the L1 cache, through all of them; the write of
//!   a token and the decay for the next one are one pass;
//! * a single token reads the state in memory order, twice: the second time it comes from the L2 cache.

use std::mem::MaybeUninit;

use flint_backend::Result;
use flint_backend::ops::{KdaScan, KdaSpan};

use super::{require, require_apart, spread};
use crate::buffer::{RowsF32, Start};
use crate::lanes::{Kernel, LANES, Lanes};
use crate::{Cpu, CpuBuffer};

/// Widest head: a tile of its state must fit on the stack.
const MAX_HEAD_DIM: usize = 256;
/// Vectors of values in a tile: 16 KB of state at 128 keys.
const TILE: usize = 2;

pub(crate) fn kda_scan(cpu: &mut Cpu, op: &KdaScan<CpuBuffer>) -> Result<()> {
    const NAME: &str = "kda_scan";
    let (out, qkv) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.qkv)?);
    let (decay, beta) = (RowsF32::new(NAME, &op.decay)?, RowsF32::new(NAME, &op.beta)?);
    let (dim, channels, heads) = (op.head_dim, out.width, beta.width);
    require(NAME, (1..=MAX_HEAD_DIM).contains(&dim) && heads * dim == channels, || {
        format!("{heads} heads of {dim} (at most {MAX_HEAD_DIM}) for {channels} channels")
    })?;
    require(NAME, qkv.width == 3 * channels && decay.width == channels, || {
        format!("{channels} channels, q, k, v of {}, decay of {}", qkv.width, decay.width)
    })?;
    let rows = out.rows;
    require(NAME, qkv.rows == rows && decay.rows == rows && beta.rows == rows, || {
        format!("{rows}, {}, {} and {} rows", qkv.rows, decay.rows, beta.rows)
    })?;
    let inputs = Inputs { out, qkv, decay, beta, dim, channels, heads };
    let streams: Vec<Stream> =
        op.spans.iter().map(|span| Stream::new(NAME, span, &inputs)).collect::<Result<_>>()?;
    require_apart(NAME, streams.iter().map(|stream| (stream.first_row, stream.sure + stream.drafts)))?;
    let level = cpu.options.level;
    let longest = streams.iter().map(|stream| stream.logged + stream.sure + stream.drafts).max().unwrap_or(0);
    spread(cpu, streams.len() * heads, 4 * longest * dim * dim, &|items| {
        for item in items {
            level.run(Run { inputs: &inputs, stream: &streams[item / heads], head: item % heads });
        }
    });
    // Only now: a task may read any of a span's log.
    for stream in &streams {
        stream.keep(&inputs);
    }
    Ok(())
}

/// The rows of the operation.
struct Inputs {
    out: RowsF32,
    qkv: RowsF32,
    decay: RowsF32,
    beta: RowsF32,
    dim: usize,
    channels: usize,
    heads: usize,
}

/// A span with its checked memory.
struct Stream {
    first_row: usize,
    logged: usize,
    sure: usize,
    drafts: usize,
    state: Start<f32>,
    log: Start<f32>,
}

impl Stream {
    fn new(op: &'static str, span: &KdaSpan<CpuBuffer>, inputs: &Inputs) -> Result<Self> {
        let rows = span.sure + span.drafts;
        require(op, span.first_row + rows <= inputs.out.rows, || {
            format!("a span of rows {}..{} of {}", span.first_row, span.first_row + rows, inputs.out.rows)
        })?;
        let log_width = 3 * inputs.channels + inputs.heads;
        Ok(Self {
            first_row: span.first_row,
            logged: span.logged,
            sure: span.sure,
            drafts: span.drafts,
            state: span.state.f32_start(op, inputs.heads * inputs.dim * inputs.dim)?,
            log: span.log.f32_start(op, span.logged.max(span.drafts) * log_width)?,
        })
    }

    /// Logs what the draft rows would fold: k, v, decay factors, beta.
    fn keep(&self, inputs: &Inputs) {
        let (channels, heads) = (inputs.channels, inputs.heads);
        for draft in 0..self.drafts {
            let row = self.first_row + self.sure + draft;
            // SAFETY: the rows and the log were checked, and no task runs.
            unsafe {
                let log = self.log.at(draft * (3 * channels + heads));
                log.copy_from_nonoverlapping(inputs.qkv.at(row).add(channels), 2 * channels);
                log.add(2 * channels).copy_from_nonoverlapping(inputs.decay.at(row), channels);
                log.add(3 * channels).copy_from_nonoverlapping(inputs.beta.at(row), heads);
            }
        }
    }

    /// What token `token` of a run brings to `head`; the run is the logged rows, then the span's.
    ///
    /// # Safety
    /// `token` and `head` exist.
    #[inline(always)]
    unsafe fn token(&self, inputs: &Inputs, token: usize, head: usize) -> Token {
        let (channels, at) = (inputs.channels, head * inputs.dim);
        // SAFETY: rows, log and head were checked.
        unsafe {
            if token < self.logged {
                let log = self.log.at(token * (3 * channels + inputs.heads));
                return Token {
                    q: None,
                    k: log.add(at),
                    v: log.add(channels + at),
                    decay: log.add(2 * channels + at),
                    beta: *log.add(3 * channels + head),
                };
            }
            let row = self.first_row + token - self.logged;
            let qkv = inputs.qkv.at(row).add(at);
            Token {
                q: Some((qkv, inputs.out.at(row).add(at))),
                k: qkv.add(channels),
                v: qkv.add(2 * channels),
                decay: inputs.decay.at(row).add(at),
                beta: *inputs.beta.at(row).add(head),
            }
        }
    }
}

/// One token's part for one head: `dim` values behind each pointer.
#[derive(Clone, Copy)]
struct Token {
    /// The query and where its answer goes; a logged token needs none.
    q: Option<(*const f32, *mut f32)>,
    k: *const f32,
    v: *const f32,
    decay: *const f32,
    beta: f32,
}

/// One head of one span.
struct Run<'a> {
    inputs: &'a Inputs,
    stream: &'a Stream,
    head: usize,
}

impl Kernel for Run<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let stream = self.stream;
        let stands = stream.logged + stream.sure;
        self.fold::<L>(0..stands, true);
        self.fold::<L>(stands..stands + stream.drafts, false);
    }
}

/// A tile of a state: keys × [`TILE`] vectors.
#[repr(align(64))]
struct Tile(MaybeUninit<[f32; MAX_HEAD_DIM * TILE * LANES]>);

impl Run<'_> {
    /// Takes a run of tokens through the state, and keeps the state they leave or not.
    #[inline(always)]
    fn fold<L: Lanes>(&self, tokens: std::ops::Range<usize>, keep: bool) {
        let dim = self.inputs.dim;
        // SAFETY: the state of every head was checked; tasks have heads of their own.
        let state = unsafe { self.stream.state.at(self.head * dim * dim) };
        match tokens.len() {
            0 => {}
            // SAFETY: the token exists, and the state has `dim` rows of `dim` values.
            1 => unsafe {
                let token = self.stream.token(self.inputs, tokens.start, self.head);
                let wide = 8 * LANES;
                let mut at = 0;
                while L::MANY_REGISTERS && at + wide <= dim {
                    single::<L, 8>(token, state, dim, at, keep);
                    at += wide;
                }
                while at < dim {
                    single::<L, TILE>(token, state, dim, at, keep);
                    at += TILE * LANES;
                }
            },
            _ => {
                let mut tile = Tile(MaybeUninit::uninit());
                for at in (0..dim).step_by(TILE * LANES) {
                    self.fold_tile::<L>(tokens.clone(), keep, state, at, tile.0.as_mut_ptr().cast());
                }
            }
        }
    }

    /// Takes value columns `at..` of the state through a run of tokens, in `tile`.
    #[inline(always)]
    fn fold_tile<L: Lanes>(
        &self,
        tokens: std::ops::Range<usize>,
        keep: bool,
        state: *mut f32,
        at: usize,
        tile: *mut f32,
    ) {
        let dim = self.inputs.dim;
        // SAFETY: tokens exist, every pointer of a token has `dim` values, the state `dim · dim`, and the tile room
        // for `dim` rows of TILE vectors.
        unsafe {
            let mut token = self.stream.token(self.inputs, tokens.start, self.head);
            let mut predicted = [L::zero(); TILE];
            for key in 0..dim {
                let decay = L::splat(*token.decay.add(key));
                let k = L::splat(*token.k.add(key));
                for (j, predicted) in predicted.iter_mut().enumerate() {
                    let column = at + j * LANES;
                    let value = read_column::<L>(state.add(key * dim), column, dim).mul(decay);
                    *predicted = k.fma(value, *predicted);
                    value.write(tile.add((key * TILE + j) * LANES));
                }
            }
            for next in tokens.start + 1..tokens.end {
                let following = self.stream.token(self.inputs, next, self.head);
                predicted = advance::<L>(token, following, predicted, tile, dim, at);
                token = following;
            }
            let wanted = changes::<L, TILE>(token, predicted, dim, at);
            let mut read = [L::zero(); TILE];
            for key in 0..dim {
                let (k, q) = (L::splat(*token.k.add(key)), L::splat(token.query(key)));
                for j in 0..TILE {
                    let value = k.fma(wanted[j], L::read(tile.add((key * TILE + j) * LANES)));
                    read[j] = q.fma(value, read[j]);
                    let column = at + j * LANES;
                    if keep && column < dim {
                        value.write_some(state.add(key * dim + column), dim - column);
                    }
                }
            }
            answer::<L, TILE>(token, read, dim, at);
        }
    }
}

impl Token {
    /// Value `key` of the query; of a logged token, any number.
    ///
    /// # Safety
    /// `key` is inside the head.
    #[inline(always)]
    unsafe fn query(&self, key: usize) -> f32 {
        // SAFETY: as the caller vouches.
        unsafe { *self.q.map_or(self.k, |(q, _)| q).add(key) }
    }
}

/// Sixteen values of a state row from `column`; zeros outside the head.
///
/// # Safety
/// `row` is valid for reading `dim` values.
#[inline(always)]
unsafe fn read_column<L: Lanes>(row: *const f32, column: usize, dim: usize) -> L {
    if column >= dim {
        return L::zero();
    }
    // SAFETY: `column` is below `dim`.
    unsafe { L::read_some(row.add(column), dim - column) }
}

/// `beta · (v - predicted)`.
///
/// # Safety
/// The token has `dim` values.
#[inline(always)]
unsafe fn changes<L: Lanes, const N: usize>(
    token: Token,
    predicted: [L; N],
    dim: usize,
    at: usize,
) -> [L; N] {
    let mut out = predicted;
    for (j, value) in out.iter_mut().enumerate() {
        // SAFETY: as the caller vouches.
        let v = unsafe { read_column::<L>(token.v, at + j * LANES, dim) };
        *value = L::splat(token.beta).mul(v.sub(*value));
    }
    out
}

/// Writes a token's answer, if it wants one.
///
/// # Safety
/// The token has `dim` values.
#[inline(always)]
unsafe fn answer<L: Lanes, const N: usize>(token: Token, read: [L; N], dim: usize, at: usize) {
    let Some((_, out)) = token.q else { return };
    for (j, value) in read.into_iter().enumerate() {
        let column = at + j * LANES;
        if column < dim {
            // SAFETY: as the caller vouches.
            unsafe { value.write_some(out.add(column), dim - column) };
        }
    }
}

/// Writes `token` into the tile and reads its answer; decays the tile for `next` and returns what it predicts.
///
/// # Safety
/// Both tokens have `dim` values, and the tile `dim` rows of TILE vectors.
#[inline(always)]
unsafe fn advance<L: Lanes>(
    token: Token,
    next: Token,
    predicted: [L; TILE],
    tile: *mut f32,
    dim: usize,
    at: usize,
) -> [L; TILE] {
    // SAFETY: as the caller vouches.
    unsafe {
        let wanted = changes::<L, TILE>(token, predicted, dim, at);
        let mut read = [L::zero(); TILE];
        let mut predicted = [L::zero(); TILE];
        for key in 0..dim {
            let (k, q) = (L::splat(*token.k.add(key)), L::splat(token.query(key)));
            let (next_k, decay) = (L::splat(*next.k.add(key)), L::splat(*next.decay.add(key)));
            for j in 0..TILE {
                let place = tile.add((key * TILE + j) * LANES);
                let written = k.fma(wanted[j], L::read(place));
                read[j] = q.fma(written, read[j]);
                let decayed = written.mul(decay);
                predicted[j] = next_k.fma(decayed, predicted[j]);
                decayed.write(place);
            }
        }
        answer::<L, TILE>(token, read, dim, at);
        predicted
    }
}

/// One token through `N` vectors of value columns from `at`, in place.
///
/// # Safety
/// The token has `dim` values and the state `dim · dim`.
#[inline(always)]
unsafe fn single<L: Lanes, const N: usize>(token: Token, state: *mut f32, dim: usize, at: usize, keep: bool) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut predicted = [L::zero(); N];
        for key in 0..dim {
            let (decay, k) = (L::splat(*token.decay.add(key)), L::splat(*token.k.add(key)));
            for (j, predicted) in predicted.iter_mut().enumerate() {
                let value = read_column::<L>(state.add(key * dim), at + j * LANES, dim).mul(decay);
                *predicted = k.fma(value, *predicted);
            }
        }
        let wanted = changes::<L, N>(token, predicted, dim, at);
        let mut read = [L::zero(); N];
        for key in 0..dim {
            let (decay, k) = (L::splat(*token.decay.add(key)), L::splat(*token.k.add(key)));
            let q = L::splat(token.query(key));
            for j in 0..N {
                let column = at + j * LANES;
                let value = k.fma(wanted[j], read_column::<L>(state.add(key * dim), column, dim).mul(decay));
                read[j] = q.fma(value, read[j]);
                if keep && column < dim {
                    value.write_some(state.add(key * dim + column), dim - column);
                }
            }
        }
        answer::<L, N>(token, read, dim, at);
    }
}
