//! Absorbed latent attention. `reference/glm5_next.md` section 6.2.
//!
//! A row's list is cut into blocks of sixty-four by index in the row's own list. A block is gathered once for the heads
//! of a task; scores are dot products with chains of sixty-four; running maximum and sum are folded in block order:
//! `m' = max(m, max s); p = exp(s - m'); l = l · exp(m - m') + Σ p; out = out · exp(m - m') + Σ p · c`, then `out / l`.

use flint_backend::Result;
use flint_backend::ops::Attend;

use super::pages::{Cache, PageShape};
use super::panel::{BLOCK, Panels};
use super::{require, require_apart, spread};
use crate::buffer::{RowsF32, Start};
use crate::lanes::{Kernel, LANES, Lanes};
use crate::maths::exp;
use crate::{Cpu, CpuBuffer};

const NAME: &str = "attend";

pub(crate) fn attend(cpu: &mut Cpu, op: &Attend<CpuBuffer>) -> Result<()> {
    let (out, q) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.q)?);
    let rank = op.kv_lora_rank;
    require(NAME, rank > 0 && q.width.is_multiple_of(rank) && q.width > 0, || {
        format!("q of {} for latents of {rank}", q.width)
    })?;
    require(NAME, out.width == q.width && out.rows == q.rows, || {
        format!("{} × {} from {} × {}", out.rows, out.width, q.rows, q.width)
    })?;
    let picks = op.picks.u32_start(NAME, q.rows * op.pools_kept)?;
    let shape = PageShape { kpool: op.kpool, page_rows: op.page_rows, latent_width: rank, key_width: 0 };
    let caches: Vec<Cache> =
        op.spans.iter().map(|span| Cache::new(NAME, span, q.rows, shape)).collect::<Result<_>>()?;
    require_apart(NAME, caches.iter().map(|cache| (cache.first_row, cache.rows)))?;
    let attention = Attention { out, q, picks, kept: op.pools_kept, rank, scale: op.scale, caches };
    attention.run(cpu);
    Ok(())
}

/// The operation.
struct Attention {
    out: RowsF32,
    q: RowsF32,
    picks: Start<u32>,
    kept: usize,
    rank: usize,
    scale: f32,
    caches: Vec<Cache>,
}

impl Attention {
    fn run(&self, cpu: &Cpu) {
        let rows: Vec<(usize, usize)> = self
            .caches
            .iter()
            .enumerate()
            .flat_map(|(span, cache)| (0..cache.rows).map(move |row| (span, row)))
            .collect();
        let heads = self.q.width / self.rank;
        let threads = cpu.pool.threads();
        // Heads share a gathered block, so a row is only cut when there are too few rows for the threads.
        let pieces = if rows.len() >= 2 * threads { 1 } else { threads.min(heads) };
        let longest = self.caches.iter().map(|cache| self.longest(cache)).max().unwrap_or(0);
        let level = cpu.options.level;
        spread(cpu, rows.len() * pieces, longest * self.q.width / 4 / pieces, &|items| {
            let mut room = Room::new(self.rank, heads);
            for item in items {
                let ((span, row), piece) = (rows[item / pieces], item % pieces);
                let heads = heads * piece / pieces..heads * (piece + 1) / pieces;
                level.run(Share { attention: self, cache: &self.caches[span], row, heads, room: &mut room });
            }
        });
    }

    /// Entries of a span's longest list.
    fn longest(&self, cache: &Cache) -> usize {
        (cache.position + cache.rows).min((self.kept + 1) * cache.kpool)
    }
}

/// A task's room.
struct Room {
    panels: Panels,
    /// Scores, then probabilities, `[heads, 64]`.
    scores: Vec<f32>,
    highest: Vec<f32>,
    totals: Vec<f32>,
    /// `exp(m - m')` of the block at hand.
    keep: Vec<f32>,
    /// Positions of the row's list.
    list: Vec<u32>,
}

impl Room {
    fn new(rank: usize, heads: usize) -> Self {
        Self {
            panels: Panels::new(rank, true),
            scores: vec![0.0; heads * BLOCK],
            highest: vec![0.0; heads],
            totals: vec![0.0; heads],
            keep: vec![0.0; heads],
            list: Vec::new(),
        }
    }
}

/// Some heads of one row.
struct Share<'a> {
    attention: &'a Attention,
    cache: &'a Cache,
    row: usize,
    heads: std::ops::Range<usize>,
    room: &'a mut Room,
}

impl Share<'_> {
    /// Lists the positions that the row attends to: its pools, ascending, then those of the incomplete pool.
    fn list(&mut self) {
        let (cache, visible) = (self.cache, self.cache.visible(self.row));
        let at = (cache.first_row + self.row) * self.attention.kept;
        // SAFETY: the picks of every row were checked, and nobody writes them.
        let picks = unsafe { std::slice::from_raw_parts(self.attention.picks.at(at), self.attention.kept) };
        let list = &mut self.room.list;
        list.clear();
        for &pool in picks.iter().take_while(|&&pool| (pool as usize) < visible) {
            let first = pool * cache.kpool as u32;
            list.extend(first..first + cache.kpool as u32);
        }
        list.extend((visible * cache.kpool) as u32..=(cache.position + self.row) as u32);
    }
}

impl Kernel for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        self.list();
        let Attention { out, q, rank, scale, .. } = self.attention;
        let (rank, count) = (*rank, self.heads.len());
        let row = self.cache.first_row + self.row;
        let room = self.room;
        room.highest[..count].fill(f32::NEG_INFINITY);
        room.totals[..count].fill(0.0);
        // SAFETY: the row exists with all its heads; listed positions are at most the row's own, so their pages exist;
        // tasks have rows or heads of their own.
        unsafe {
            let (q, out) = (q.at(row).add(self.heads.start * rank), out.at(row).add(self.heads.start * rank));
            for (block, entries) in room.list.chunks(BLOCK).enumerate() {
                room.panels.gather::<L>(entries.len(), |i| self.cache.latent(entries[i] as usize));
                for &position in room.list.iter().skip((block + 1) * BLOCK).take(LANES) {
                    let (rows, at) = self.cache.latent(position as usize);
                    rows.prefetch(at, rank);
                }
                let scores = room.scores.as_mut_ptr();
                room.panels.dots::<L>(scores, q, count, entries.len());
                for head in 0..count {
                    let scores = &mut room.scores[head * BLOCK..(head + 1) * BLOCK];
                    let (highest, total) = (&mut room.highest[head], &mut room.totals[head]);
                    room.keep[head] = soften::<L>(scores, entries.len(), *scale, highest, total);
                }
                let keep = if block == 0 { None } else { Some(&room.keep[..count]) };
                room.panels.sums::<L>(out, keep, room.scores.as_ptr(), count, entries.len());
            }
            for head in 0..count {
                let total = L::splat(room.totals[head]);
                for at in (0..rank).step_by(LANES) {
                    let place = out.add(head * rank + at);
                    L::read_some(place, rank - at).div(total).write_some(place, rank - at);
                }
            }
        }
    }
}

/// Turns a head's scores of a block into weights; returns the factor of what was summed before.
#[inline(always)]
fn soften<L: Lanes>(scores: &mut [f32], count: usize, scale: f32, highest: &mut f32, total: &mut f32) -> f32 {
    let scale = L::splat(scale);
    let (vectors, _) = scores.as_chunks_mut::<LANES>();
    let mut best = L::splat(f32::NEG_INFINITY);
    for (i, vector) in vectors.iter_mut().enumerate() {
        L::load(vector).mul(scale).store(vector);
        if (i + 1) * LANES > count {
            vector[count.saturating_sub(i * LANES)..].fill(f32::NEG_INFINITY);
        }
        best = L::load(vector).max(best);
    }
    let before = *highest;
    let now = best.maximum();
    let now = if now > before { now } else { before };
    let factor = exp(L::splat(before - now));
    let mut sums = [L::zero(); BLOCK / LANES];
    for (vector, sum) in vectors.iter_mut().zip(&mut sums) {
        *sum = exp(L::load(vector).sub(L::splat(now)));
        sum.store(vector);
    }
    let sum = sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum();
    let mut first = [0.0; LANES];
    factor.store(&mut first);
    *highest = now;
    *total = total.mul_add(first[0], sum);
    first[0]
}
