//! Laws of the operations with a recurrent state: `kda_conv` and `kda_scan`.

use super::Session;
use super::exact::{Exact, FUNCTION, TINY, U, depth, sigmoid};
use super::rows::{Port, RowWords, Temper, Vector, read_words, reals, words};
use super::seam::{DRAFTS, Part, SeamCase, check_seams};
use super::seed::Seed;
use crate::ops::{KdaConv, KdaScan, KdaSpan};
use crate::{Backend, Element, Result, Rows};

/// What a KDA layer keeps of a sequence.
struct Memory<B: Backend> {
    window: B::Buffer,
    state: B::Buffer,
    log: B::Buffer,
}

impl<B: Backend> Memory<B> {
    fn new(backend: &mut B, heads: usize, dim: usize, back: usize) -> Result<Self> {
        let channels = heads * dim;
        Ok(Self {
            window: backend.allocate(Element::F32, (back + DRAFTS) * 3 * channels)?,
            state: backend.allocate(Element::F32, heads * dim * dim)?,
            log: backend.allocate(Element::F32, DRAFTS * (3 * channels + heads))?,
        })
    }

    fn spans(parts: &[Part<'_, Self>]) -> Vec<KdaSpan<B::Buffer>> {
        let span = |part: &Part<'_, Self>| KdaSpan {
            first_row: part.first_row,
            logged: part.logged,
            sure: part.sure,
            drafts: part.drafts,
            window: part.state.window.clone(),
            state: part.state.state.clone(),
            log: part.state.log.clone(),
        };
        parts.iter().map(span).collect()
    }
}

struct ConvCase<B: Backend> {
    heads: usize,
    dim: usize,
    taps: usize,
    weights: Vector<B>,
}

impl<B: Backend> ConvCase<B> {
    fn width(&self) -> usize {
        3 * self.heads * self.dim
    }
}

impl<B: Backend> SeamCase<B> for ConvCase<B> {
    type State = Memory<B>;

    fn label(&self) -> String {
        format!("{} taps over {} channels", self.taps, self.width())
    }

    fn ports(&self) -> Vec<Port> {
        vec![Port::input(self.width()), Port::output(self.width())]
    }

    fn token(&self, seed: &mut Seed, _position: usize, temper: Temper) -> RowWords {
        vec![words(&temper.values(seed, self.width()))]
    }

    fn open(&self, backend: &mut B, _tokens: usize, _name: u64) -> Result<Memory<B>> {
        Memory::new(backend, self.heads, self.dim, self.taps - 1)
    }

    fn launch(
        &self,
        backend: &mut B,
        ports: &[Rows<B::Buffer>],
        parts: &[Part<'_, Memory<B>>],
    ) -> Result<()> {
        let [u, out] = ports else { return Ok(()) };
        backend.kda_conv(&KdaConv {
            out: out.clone(),
            u: u.clone(),
            taps: self.weights.buffer.clone(),
            tap_count: self.taps,
            spans: Memory::spans(parts),
        })
    }

    fn state(&self, backend: &mut B, state: &Memory<B>, _len: usize) -> Result<Vec<u32>> {
        read_words(backend, &state.window, Element::F32, (self.taps - 1) * self.width())
    }

    fn exact(&self, tokens: &[RowWords], _name: u64, mutated: bool) -> (Vec<Vec<Vec<Exact>>>, Vec<Exact>) {
        let u: Vec<Vec<f64>> = tokens.iter().map(|token| reals(&token[0])).collect();
        let output = |t: usize, channel: usize| {
            let (mut value, mut magnitude) = (0.0, 0.0);
            for j in 0..self.taps {
                let Some(row) = (t + j).checked_sub(self.taps - 1) else { continue };
                let tap = self.weights.value(channel * self.taps + j);
                let off = if mutated && j + 1 == self.taps { 1.01 } else { 1.0 };
                value += tap * u[row][channel] * off;
                magnitude += (tap * u[row][channel]).abs();
            }
            let error = magnitude * (self.taps as f64 + 1.0) * U;
            let out = value * sigmoid(value);
            // The slope of silu is below 1.1.
            Exact::Near { value: out, slack: 1.1 * error + out.abs() * (FUNCTION + U) + TINY }
        };
        let outputs =
            (0..tokens.len()).map(|t| vec![(0..self.width()).map(|c| output(t, c)).collect()]).collect();
        let state = (0..self.taps - 1).flat_map(|slot| {
            let row = (tokens.len() + slot).checked_sub(self.taps - 1);
            let shift = usize::from(mutated);
            let value = move |channel: usize| {
                Exact::Bits(row.map_or(0, |row| tokens[row][0][(channel + shift) % tokens[row][0].len()]))
            };
            (0..self.width()).map(value)
        });
        (outputs, state.collect())
    }
}

/// Laws of `kda_conv`.
pub(crate) fn kda_conv<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(51);
    for (heads, dim, taps, tokens) in [(2, 16, 4, 70), (1, 7, 4, 30), (2, 5, 3, 30), (8, 128, 4, 36)] {
        let weights = Vector::new(backend, seed.normals(3 * heads * dim * taps, 0.5))?;
        check_seams(backend, session, &ConvCase { heads, dim, taps, weights }, tokens)?;
    }
    Ok(())
}

struct ScanCase {
    heads: usize,
    dim: usize,
}

impl ScanCase {
    fn channels(&self) -> usize {
        self.heads * self.dim
    }
}

/// A head's state in float64, with a bound of each element's error.
struct Recurrence {
    dim: usize,
    value: Vec<f64>,
    error: Vec<f64>,
}

impl Recurrence {
    fn new(dim: usize) -> Self {
        Self { dim, value: vec![0.0; dim * dim], error: vec![0.0; dim * dim] }
    }

    /// One token; returns the answer with its bounds.
    fn step(&mut self, q: &[f64], k: &[f64], v: &[f64], decay: &[f64], beta: f64) -> Vec<Exact> {
        let dim = self.dim;
        let sums = depth(dim) * U;
        for (place, (value, error)) in self.value.iter_mut().zip(&mut self.error).enumerate() {
            *value *= decay[place / dim];
            *error = *error * decay[place / dim] + value.abs() * U;
        }
        let column = |memory: &Self, factor: &[f64], col: usize| {
            let (mut value, mut slack) = (0.0, TINY);
            for (key, factor) in factor.iter().enumerate() {
                let place = key * dim + col;
                value += factor * memory.value[place];
                slack += factor.abs() * (memory.error[place] + memory.value[place].abs() * sums);
            }
            (value, slack)
        };
        for col in 0..dim {
            let (predicted, predicted_error) = column(self, k, col);
            let change = beta * (v[col] - predicted);
            let change_error =
                beta.abs() * (predicted_error + (v[col].abs() + predicted.abs()) * U) + change.abs() * U;
            for (key, k) in k.iter().enumerate() {
                let place = key * dim + col;
                self.value[place] += k * change;
                self.error[place] +=
                    k.abs() * change_error + (self.value[place].abs() + (k * change).abs()) * U;
            }
        }
        (0..dim)
            .map(|col| {
                let (value, slack) = column(self, q, col);
                Exact::Near { value, slack }
            })
            .collect()
    }
}

impl<B: Backend> SeamCase<B> for ScanCase {
    type State = Memory<B>;

    fn label(&self) -> String {
        format!("{} heads of {}", self.heads, self.dim)
    }

    fn ports(&self) -> Vec<Port> {
        let channels = self.channels();
        let inputs = [Port::input(3 * channels), Port::input(channels), Port::input(self.heads)];
        [&inputs[..], &[Port::output(channels)]].concat()
    }

    fn token(&self, seed: &mut Seed, _position: usize, temper: Temper) -> RowWords {
        let channels = self.channels();
        if temper != Temper::Plain {
            return [3 * channels, channels, self.heads]
                .map(|width| words(&temper.values(seed, width)))
                .to_vec();
        }
        // q and k of length about 1, as prepared ones have.
        let mut qkv = seed.normals(2 * channels, 1.0 / (self.dim as f32).sqrt());
        qkv.extend(seed.normals(channels, 1.0));
        let (decay, beta) = (seed.uniform(channels, 0.2, 0.8), seed.uniform(self.heads, 0.1, 0.6));
        vec![words(&qkv), words(&decay), words(&beta)]
    }

    fn open(&self, backend: &mut B, _tokens: usize, _name: u64) -> Result<Memory<B>> {
        Memory::new(backend, self.heads, self.dim, 0)
    }

    fn launch(
        &self,
        backend: &mut B,
        ports: &[Rows<B::Buffer>],
        parts: &[Part<'_, Memory<B>>],
    ) -> Result<()> {
        let [qkv, decay, beta, out] = ports else { return Ok(()) };
        backend.kda_scan(&KdaScan {
            out: out.clone(),
            qkv: qkv.clone(),
            decay: decay.clone(),
            beta: beta.clone(),
            head_dim: self.dim,
            spans: Memory::spans(parts),
        })
    }

    fn state(&self, backend: &mut B, state: &Memory<B>, _len: usize) -> Result<Vec<u32>> {
        read_words(backend, &state.state, Element::F32, self.heads * self.dim * self.dim)
    }

    fn exact(&self, tokens: &[RowWords], _name: u64, mutated: bool) -> (Vec<Vec<Vec<Exact>>>, Vec<Exact>) {
        let (dim, channels) = (self.dim, self.channels());
        let mut memories: Vec<Recurrence> = (0..self.heads).map(|_| Recurrence::new(dim)).collect();
        let mut outputs = Vec::new();
        for token in tokens {
            let (qkv, mut decay, beta) = (reals(&token[0]), reals(&token[1]), reals(&token[2]));
            if mutated {
                for decay in &mut decay {
                    *decay *= 1.01;
                }
            }
            let mut out = Vec::new();
            for (head, memory) in memories.iter_mut().enumerate() {
                let part =
                    |third: usize| &qkv[third * channels + head * dim..third * channels + (head + 1) * dim];
                let decay = &decay[head * dim..(head + 1) * dim];
                out.extend(memory.step(part(0), part(1), part(2), decay, beta[head]));
            }
            outputs.push(vec![out]);
        }
        let element = |(&value, &slack): (&f64, &f64)| Exact::Near { value, slack };
        let state = memories.iter().flat_map(|memory| memory.value.iter().zip(&memory.error).map(element));
        (outputs, state.collect())
    }
}

/// Laws of `kda_scan`.
pub(crate) fn kda_scan<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    for (heads, dim, tokens) in [(2, 16, 70), (3, 24, 40), (1, 7, 30), (2, 128, 36)] {
        check_seams(backend, session, &ScanCase { heads, dim }, tokens)?;
    }
    Ok(())
}
