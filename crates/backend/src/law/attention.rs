//! Laws of the operations over a DSA layer's cache: `dsa_append`, `select_pools` and `attend`.

use super::Session;
use super::exact::{Exact, FUNCTION, TINY, U, depth};
use super::rows::{Port, RowWords, Temper, Vector, read_words, reals, words};
use super::seam::{DRAFTS, Part, SeamCase, check_seams};
use super::seed::Seed;
use crate::ops::{Attend, DsaAppend, DsaSpan, Page, SelectPools};
use crate::{Backend, Element, Result, Rows};

/// Shapes of a cache.
#[derive(Clone, Copy)]
struct Shape {
    rank: usize,
    key_dim: usize,
    kpool: usize,
    page_rows: usize,
}

impl Shape {
    fn ring_rows(self) -> usize {
        self.kpool + DRAFTS
    }
}

/// What a DSA layer keeps of a sequence.
struct Cache<B: Backend> {
    pages: Vec<Page<B::Buffer>>,
    ring: B::Buffer,
}

impl<B: Backend> Cache<B> {
    fn new(backend: &mut B, shape: Shape, tokens: usize) -> Result<Self> {
        let element = backend.cache_element();
        let pools = shape.page_rows / shape.kpool;
        let pages = (0..(tokens + DRAFTS).div_ceil(shape.page_rows))
            .map(|_| {
                Ok(Page {
                    latents: backend.allocate(element, shape.page_rows * shape.rank)?,
                    pooled: backend.allocate(element, pools * shape.key_dim)?,
                })
            })
            .collect::<Result<_>>()?;
        let ring = backend.allocate(Element::F32, shape.ring_rows() * 2 * shape.key_dim)?;
        Ok(Self { pages, ring })
    }

    fn spans(parts: &[Part<'_, Self>]) -> Vec<DsaSpan<B::Buffer>> {
        let span = |part: &Part<'_, Self>| DsaSpan {
            first_row: part.first_row,
            rows: part.sure + part.drafts,
            position: part.position,
            pages: part.state.pages.clone(),
            ring: part.state.ring.clone(),
        };
        parts.iter().map(span).collect()
    }
}

/// A cache buffer as fp32 words.
fn read_cached<B: Backend>(backend: &mut B, buffer: &B::Buffer) -> Result<Vec<u32>> {
    let bytes = backend.read_bytes(buffer)?;
    let wide = |four: &[u8]| four.iter().rev().fold(0u32, |word, &byte| word << 8 | u32::from(byte));
    Ok(match backend.cache_element() {
        Element::Bf16 => bytes.chunks_exact(2).map(|two| wide(two) << 16).collect(),
        _ => bytes.chunks_exact(4).map(wide).collect(),
    })
}

/// Fills a cache buffer with values that bf16 holds exactly.
fn write_cached<B: Backend>(backend: &mut B, buffer: &B::Buffer, values: &[f32]) -> Result<()> {
    let bytes: Vec<u8> = match backend.cache_element() {
        Element::Bf16 => {
            values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
        }
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    };
    backend.write_bytes(buffer, &bytes)
}

/// The same value in bf16.
fn short(value: f32) -> f32 {
    half::bf16::from_f32(value).to_f32()
}

struct AppendCase<B: Backend> {
    shape: Shape,
    ape: Vector<B>,
    /// Whether the cache rounds to bf16.
    rounds: bool,
    /// Whether the layer has an indexer of its own.
    indexer: bool,
}

impl<B: Backend> AppendCase<B> {
    /// The true key of a pool.
    fn key(&self, members: &[RowWords], mutated: bool) -> Vec<Exact> {
        let (dim, kpool) = (self.shape.key_dim, self.shape.kpool);
        let keys: Vec<Vec<f64>> = members.iter().map(|token| reals(&token[1])).collect();
        let gates: Vec<Vec<f64>> = members.iter().map(|token| reals(&token[2])).collect();
        (0..dim)
            .map(|channel| {
                let gate = |j: usize| {
                    let place = if mutated { (j + 1) % kpool } else { j };
                    gates[j][channel] + self.ape.value(place * dim + channel)
                };
                let highest = (0..kpool).map(gate).fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = (0..kpool).map(|j| (gate(j) - highest).exp()).sum();
                let (mut value, mut slack) = (0.0, TINY);
                for (j, key) in keys.iter().enumerate() {
                    let share = (gate(j) - highest).exp() / total;
                    // The inputs of exp are rounded twice, the sum and the quotient add theirs.
                    let error = 2.0 * (gate(j).abs() + highest.abs()) * 2.0 * U + 2.0 * FUNCTION;
                    value += share * key[channel];
                    slack += (share * key[channel]).abs() * (error + (2.0 * kpool as f64 + 3.0) * U);
                }
                if self.rounds {
                    slack += (value.abs() + slack) / 256.0;
                }
                Exact::Near { value, slack }
            })
            .collect()
    }
}

impl<B: Backend> SeamCase<B> for AppendCase<B> {
    type State = Cache<B>;

    fn label(&self) -> String {
        let Shape { rank, key_dim, kpool, page_rows } = self.shape;
        let indexer = if self.indexer { "" } else { ", no indexer" };
        format!("latents of {rank}, keys of {key_dim}, pools of {kpool}, pages of {page_rows}{indexer}")
    }

    fn ports(&self) -> Vec<Port> {
        let dim = self.shape.key_dim;
        vec![Port::input(self.shape.rank), Port::input(dim), Port::input(dim)]
    }

    fn token(&self, seed: &mut Seed, _position: usize, temper: Temper) -> RowWords {
        let dim = self.shape.key_dim;
        [self.shape.rank, dim, dim].map(|width| words(&temper.values(seed, width))).to_vec()
    }

    fn open(&self, backend: &mut B, tokens: usize, _name: u64) -> Result<Cache<B>> {
        Cache::new(backend, self.shape, tokens)
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], parts: &[Part<'_, Cache<B>>]) -> Result<()> {
        let [latents, keys, gates] = ports else { return Ok(()) };
        backend.dsa_append(&DsaAppend {
            latents: latents.clone(),
            keys: self.indexer.then(|| keys.clone()),
            gates: self.indexer.then(|| gates.clone()),
            ape: self.indexer.then(|| self.ape.buffer.clone()),
            kpool: self.shape.kpool,
            page_rows: self.shape.page_rows,
            ring_rows: self.shape.ring_rows(),
            spans: Cache::spans(parts),
        })
    }

    /// Latents, keys of complete pools, then what the ring holds of the incomplete pool.
    fn state(&self, backend: &mut B, state: &Cache<B>, len: usize) -> Result<Vec<u32>> {
        let Shape { rank, key_dim, kpool, .. } = self.shape;
        let (mut latents, mut pooled) = (Vec::new(), Vec::new());
        for page in &state.pages {
            latents.extend(read_cached(backend, &page.latents)?);
            pooled.extend(read_cached(backend, &page.pooled)?);
        }
        latents.truncate(len * rank);
        if !self.indexer {
            return Ok(latents);
        }
        latents.extend(&pooled[..len / kpool * key_dim]);
        let rows = self.shape.ring_rows();
        let ring = read_words(backend, &state.ring, Element::F32, rows * 2 * key_dim)?;
        for position in len / kpool * kpool..len {
            let at = position % rows * 2 * key_dim;
            latents.extend(&ring[at..at + 2 * key_dim]);
        }
        Ok(latents)
    }

    fn exact(&self, tokens: &[RowWords], _name: u64, mutated: bool) -> (Vec<Vec<Vec<Exact>>>, Vec<Exact>) {
        let stored = |&word: &u32| {
            let value = f32::from_bits(word);
            Exact::value(if self.rounds { short(value) } else { value })
        };
        let shift = usize::from(mutated && !self.indexer);
        let row = |t: usize| &tokens[(t + shift) % tokens.len()][0];
        let mut state: Vec<Exact> = (0..tokens.len()).flat_map(row).map(stored).collect();
        if self.indexer {
            let pools = tokens.chunks_exact(self.shape.kpool);
            let pending = pools.remainder();
            state.extend(pools.flat_map(|members| self.key(members, mutated)));
            state.extend(
                pending.iter().flat_map(|token| token[1].iter().chain(&token[2])).map(|&w| Exact::Bits(w)),
            );
        }
        (vec![vec![]; tokens.len()], state)
    }
}

/// Laws of `dsa_append`.
pub(crate) fn dsa_append<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let rounds = backend.cache_element() == Element::Bf16;
    let mut seed = Seed::new(61);
    for (rank, key_dim, kpool, page_rows, indexer) in [
        (24, 16, 4, 16, true),
        (16, 20, 16, 32, true),
        (37, 5, 3, 12, true),
        (24, 16, 4, 8, false),
        (512, 128, 4, 64, true),
    ] {
        let shape = Shape { rank, key_dim, kpool, page_rows };
        let ape = Vector::new(backend, seed.normals(kpool * key_dim, 1.0))?;
        check_seams(backend, session, &AppendCase { shape, ape, rounds, indexer }, 75)?;
    }
    Ok(())
}

struct SelectCase {
    shape: Shape,
    heads: usize,
    kept: usize,
}

/// The cached rows of the sequence `name`: of few different values, so that scores tie.
fn cached_rows(name: u64, rows: usize, width: usize, different: usize) -> Vec<f32> {
    let mut seed = Seed::new(100 + name);
    let kinds: Vec<Vec<f32>> = (0..different).map(|_| seed.normals(width, 1.0)).collect();
    (0..rows).flat_map(|_| kinds[seed.below(different)].clone()).map(short).collect()
}

impl SelectCase {
    /// Different keys of a sequence: fewer than its pools.
    const KINDS: usize = 12;

    fn keys(&self, name: u64, pools: usize) -> Vec<f32> {
        cached_rows(name, pools, self.shape.key_dim, Self::KINDS)
    }

    /// The true picks of the token at `t`; `mutated` breaks ties the other way.
    fn picks(&self, token: &RowWords, t: usize, keys: &[f32], mutated: bool) -> Vec<u32> {
        let dim = self.shape.key_dim;
        let (q, weights) = (reals(&token[0]), reals(&token[1]));
        let score = |pool: usize| -> f64 {
            let key = &keys[pool * dim..(pool + 1) * dim];
            let liked =
                |q: &[f64]| q.iter().zip(key).map(|(q, key)| q * f64::from(*key)).sum::<f64>().max(0.0);
            q.chunks(dim).zip(&weights).map(|(q, weight)| weight * liked(q)).sum()
        };
        let visible = (t + 1) / self.shape.kpool;
        let scores: Vec<f64> = (0..visible).map(score).collect();
        let mut pools: Vec<usize> = (0..visible).collect();
        pools.sort_by(|&a, &b| {
            let tie = if mutated { b.cmp(&a) } else { a.cmp(&b) };
            scores[b].total_cmp(&scores[a]).then(tie)
        });
        pools.truncate(self.kept);
        pools.sort_unstable();
        let picked = pools.into_iter().map(|pool| pool as u32);
        picked.chain(std::iter::repeat(u32::MAX)).take(self.kept).collect()
    }
}

impl<B: Backend> SeamCase<B> for SelectCase {
    type State = Cache<B>;

    fn label(&self) -> String {
        let Shape { key_dim, kpool, page_rows, .. } = self.shape;
        let Self { heads, kept, .. } = self;
        format!("{kept} pools of {kpool}, {heads} heads of {key_dim}, pages of {page_rows}")
    }

    fn ports(&self) -> Vec<Port> {
        let q = Port::input(self.heads * self.shape.key_dim);
        vec![q, Port::input(self.heads), Port::output(self.kept).words()]
    }

    fn token(&self, seed: &mut Seed, _position: usize, temper: Temper) -> RowWords {
        vec![
            words(&temper.values(seed, self.heads * self.shape.key_dim)),
            words(&temper.values(seed, self.heads)),
        ]
    }

    fn open(&self, backend: &mut B, tokens: usize, name: u64) -> Result<Cache<B>> {
        let cache = Cache::new(backend, self.shape, tokens)?;
        let pools = self.shape.page_rows / self.shape.kpool;
        let keys = self.keys(name, cache.pages.len() * pools);
        for (page, keys) in cache.pages.iter().zip(keys.chunks(pools * self.shape.key_dim)) {
            write_cached(backend, &page.pooled, keys)?;
        }
        Ok(cache)
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], parts: &[Part<'_, Cache<B>>]) -> Result<()> {
        let [q, weights, picks] = ports else { return Ok(()) };
        backend.select_pools(&SelectPools {
            picks: picks.buffer.clone(),
            q: q.clone(),
            weights: weights.clone(),
            head_dim: self.shape.key_dim,
            pools_kept: self.kept,
            kpool: self.shape.kpool,
            page_rows: self.shape.page_rows,
            spans: Cache::spans(parts),
        })
    }

    fn state(&self, _backend: &mut B, _state: &Cache<B>, _len: usize) -> Result<Vec<u32>> {
        Ok(vec![])
    }

    fn exact(&self, tokens: &[RowWords], name: u64, mutated: bool) -> (Vec<Vec<Vec<Exact>>>, Vec<Exact>) {
        let keys = self.keys(name, tokens.len() / self.shape.kpool + 1);
        let picks = |(t, token)| self.picks(token, t, &keys, mutated).into_iter().map(Exact::Bits).collect();
        (tokens.iter().enumerate().map(|token| vec![picks(token)]).collect(), vec![])
    }
}

/// Laws of `select_pools`.
pub(crate) fn select_pools<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    for (key_dim, kpool, page_rows, heads, kept, tokens) in
        [(16, 4, 16, 2, 5, 150), (20, 2, 12, 3, 9, 90), (72, 3, 9, 5, 8, 120), (128, 4, 64, 32, 20, 350)]
    {
        let shape = Shape { rank: 1, key_dim, kpool, page_rows };
        check_seams(backend, session, &SelectCase { shape, heads, kept }, tokens)?;
    }
    Ok(())
}

struct AttendCase {
    shape: Shape,
    heads: usize,
    kept: usize,
    scale: f32,
}

impl AttendCase {
    /// The positions that a token attends to.
    fn list(&self, token: &RowWords, t: usize) -> Vec<usize> {
        let kpool = self.shape.kpool;
        let picked = token[1].iter().take_while(|&&pool| pool != u32::MAX);
        let pools = picked.flat_map(|&pool| pool as usize * kpool..(pool as usize + 1) * kpool);
        pools.chain((t + 1) / kpool * kpool..=t).collect()
    }

    /// The true answer of one head.
    fn answer(&self, q: &[f64], latents: &[f32], list: &[usize], mutated: bool) -> Vec<Exact> {
        let rank = self.shape.rank;
        let scale = f64::from(self.scale) * if mutated { 1.01 } else { 1.0 };
        let latent = |position: usize| &latents[position * rank..(position + 1) * rank];
        let (mut scores, mut error) = (Vec::new(), 0.0f64);
        for &position in list {
            let terms = || q.iter().zip(latent(position)).map(|(q, c)| q * f64::from(*c));
            let (score, magnitude): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
            scores.push(score * scale);
            error = error.max(scale * (magnitude * depth(rank) + score.abs()) * U);
        }
        let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // An error of the scores is a relative error of a weight and of their sum; s - m is rounded, and each of the
        // blocks may rescale what came before.
        let spread = scores.iter().map(|score| highest - score).fold(0.0, f64::max);
        let blocks = list.len().div_ceil(64) as f64;
        let relative = 2.0 * (2.0 * error + spread * U + FUNCTION)
            + (depth(list.len()) + 2.0 * blocks) * U
            + blocks * (FUNCTION + U);
        let total: f64 = scores.iter().map(|score| (score - highest).exp()).sum();
        (0..rank)
            .map(|column| {
                let (mut value, mut magnitude) = (0.0, 0.0);
                for (&position, score) in list.iter().zip(&scores) {
                    let term = (score - highest).exp() / total * f64::from(latent(position)[column]);
                    value += term;
                    magnitude += term.abs();
                }
                Exact::Near { value, slack: magnitude * relative + TINY }
            })
            .collect()
    }
}

impl<B: Backend> SeamCase<B> for AttendCase {
    type State = Cache<B>;

    fn label(&self) -> String {
        let Shape { rank, kpool, page_rows, .. } = self.shape;
        let Self { heads, kept, .. } = self;
        format!("{heads} heads over latents of {rank}, {kept} pools of {kpool}, pages of {page_rows}")
    }

    fn ports(&self) -> Vec<Port> {
        let width = self.heads * self.shape.rank;
        vec![Port::input(width), Port::input(self.kept).words(), Port::output(width)]
    }

    fn token(&self, seed: &mut Seed, position: usize, temper: Temper) -> RowWords {
        let visible = (position + 1) / self.shape.kpool;
        let mut pools: Vec<u32> = (0..visible as u32).collect();
        while pools.len() > self.kept {
            pools.remove(seed.below(pools.len()));
        }
        pools.resize(self.kept, u32::MAX);
        vec![words(&temper.values(seed, self.heads * self.shape.rank)), pools]
    }

    fn open(&self, backend: &mut B, tokens: usize, name: u64) -> Result<Cache<B>> {
        let cache = Cache::new(backend, self.shape, tokens)?;
        let (rank, rows) = (self.shape.rank, self.shape.page_rows);
        let latents = cached_rows(name, cache.pages.len() * rows, rank, tokens);
        for (page, latents) in cache.pages.iter().zip(latents.chunks(rows * rank)) {
            write_cached(backend, &page.latents, latents)?;
        }
        Ok(cache)
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], parts: &[Part<'_, Cache<B>>]) -> Result<()> {
        let [q, picks, out] = ports else { return Ok(()) };
        backend.attend(&Attend {
            out: out.clone(),
            q: q.clone(),
            picks: picks.buffer.clone(),
            pools_kept: self.kept,
            kv_lora_rank: self.shape.rank,
            scale: self.scale,
            kpool: self.shape.kpool,
            page_rows: self.shape.page_rows,
            spans: Cache::spans(parts),
        })
    }

    fn state(&self, _backend: &mut B, _state: &Cache<B>, _len: usize) -> Result<Vec<u32>> {
        Ok(vec![])
    }

    fn exact(&self, tokens: &[RowWords], name: u64, mutated: bool) -> (Vec<Vec<Vec<Exact>>>, Vec<Exact>) {
        let rank = self.shape.rank;
        let latents = cached_rows(name, tokens.len(), rank, tokens.len());
        let output = |(t, token): (usize, &RowWords)| {
            let list = self.list(token, t);
            let q = reals(&token[0]);
            vec![q.chunks(rank).flat_map(|q| self.answer(q, &latents, &list, mutated)).collect()]
        };
        (tokens.iter().enumerate().map(output).collect(), vec![])
    }
}

/// Laws of `attend`.
pub(crate) fn attend<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    for (rank, kpool, page_rows, heads, kept, tokens) in [
        (32, 4, 16, 3, 40, 200),
        (72, 3, 9, 5, 10, 60),
        (20, 2, 32, 1, 100, 150),
        (512, 4, 64, 8, 20, 100),
        // Lists of several hundred entries: more than a block of threads may take at once.
        (16, 4, 64, 2, 129, 525),
        (512, 4, 64, 1, 129, 525),
    ] {
        let shape = Shape { rank, key_dim: 1, kpool, page_rows };
        let scale = 1.0 / (rank as f32).sqrt();
        check_seams(backend, session, &AttendCase { shape, heads, kept, scale }, tokens)?;
    }
    Ok(())
}
