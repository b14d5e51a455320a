//! Which pools a row attends to: a total order (score descending, pool ascending). `reference/glm5_next.md` section 6.3.

use flint_backend::Result;
use flint_backend::ops::SelectPools;

use super::pages::{Cache, PageShape};
use super::panel::{BLOCK, Panels};
use super::route::{rank, ranked_index};
use super::{require, spread};
use crate::buffer::{RowsF32, Start};
use crate::lanes::{Kernel, LANES, Lanes};
use crate::{Cpu, CpuBuffer};

const NAME: &str = "select_pools";
/// Rows that share a gathered block.
const ROWS: usize = 8;
/// Pools that a task scores.
const POOLS: usize = 16 * BLOCK;
/// Scores that stand in memory at once: 16 MB.
const SCORES: usize = 1 << 22;

pub(crate) fn select_pools(cpu: &mut Cpu, op: &SelectPools<CpuBuffer>) -> Result<()> {
    let (q, weights) = (RowsF32::new(NAME, &op.q)?, RowsF32::new(NAME, &op.weights)?);
    let heads = weights.width;
    require(NAME, heads > 0 && q.width == heads * op.head_dim && q.rows == weights.rows, || {
        format!("q {} × {}, weights {} × {heads}, head {}", q.rows, q.width, weights.rows, op.head_dim)
    })?;
    let picks = op.picks.u32_start(NAME, q.rows * op.pools_kept)?;
    let shape =
        PageShape { kpool: op.kpool, page_rows: op.page_rows, latent_width: 0, key_width: op.head_dim };
    for span in &op.spans {
        let cache = Cache::new(NAME, span, q.rows, shape)?;
        let selection = Selection { cache, q, weights, picks, kept: op.pools_kept, head_dim: op.head_dim };
        selection.run(cpu);
    }
    Ok(())
}

/// The operation for one span.
struct Selection {
    cache: Cache,
    q: RowsF32,
    weights: RowsF32,
    picks: Start<u32>,
    kept: usize,
    head_dim: usize,
}

impl Selection {
    fn run(&self, cpu: &Cpu) {
        let rows = self.cache.rows;
        // Visibility grows with the row: up to here every visible pool is picked.
        let dense = (0..rows).find(|&row| self.cache.visible(row) > self.kept).unwrap_or(rows);
        for row in 0..dense {
            let visible = self.cache.visible(row);
            self.write(row, 0..visible as u32);
        }
        if dense == rows {
            return;
        }
        let most = self.cache.visible(rows - 1);
        let at_once = (SCORES / most).clamp(1, rows);
        let mut scores = vec![0.0; at_once.min(rows - dense) * most];
        for first in (dense..rows).step_by(at_once) {
            let scored = first..rows.min(first + at_once);
            self.score(cpu, scored.clone(), most, &mut scores);
            let scores = &scores;
            spread(cpu, scored.len(), 8 * most, &|items| {
                let mut ranks = Vec::with_capacity(most);
                for item in items {
                    let row = first + item;
                    let visible = self.cache.visible(row);
                    self.pick(row, &scores[item * most..item * most + visible], &mut ranks);
                }
            });
        }
    }

    /// Scores of rows `rows` for their visible pools, `stride` apart.
    fn score(&self, cpu: &Cpu, rows: std::ops::Range<usize>, stride: usize, scores: &mut [f32]) {
        let pieces = stride.div_ceil(POOLS);
        let groups = rows.len().div_ceil(ROWS);
        let out = Start::new(scores.as_mut_ptr());
        let level = cpu.options.level;
        let work = ROWS.min(rows.len()) * POOLS.min(stride) * self.q.width / LANES;
        spread(cpu, groups * pieces, work, &|items| {
            let mut room = Room::new(self);
            for item in items {
                let first = rows.start + item / pieces * ROWS;
                let pools = item % pieces * POOLS;
                level.run(Score {
                    selection: self,
                    room: &mut room,
                    // SAFETY: the group's first row has its scores there.
                    out: unsafe { out.at((first - rows.start) * stride) },
                    stride,
                    rows: first..rows.end.min(first + ROWS),
                    pools: pools..stride.min(pools + POOLS),
                });
            }
        });
    }

    /// Picks the best of `scores`.
    fn pick(&self, row: usize, scores: &[f32], ranks: &mut Vec<u64>) {
        ranks.clear();
        ranks.extend(scores.iter().enumerate().map(|(pool, &score)| rank(score, pool as u32)));
        if ranks.len() > self.kept {
            ranks.select_nth_unstable_by(self.kept, |a, b| b.cmp(a));
            ranks.truncate(self.kept);
        }
        let mut pools: Vec<u32> = ranks.iter().map(|&rank| ranked_index(rank)).collect();
        pools.sort_unstable();
        self.write(row, pools.into_iter());
    }

    /// Writes a row's picks, ascending.
    fn write(&self, row: usize, pools: impl Iterator<Item = u32>) {
        let at = (self.cache.first_row + row) * self.kept;
        // SAFETY: the picks of every row were checked; rows are written by one task each.
        let picks = unsafe { std::slice::from_raw_parts_mut(self.picks.at(at), self.kept) };
        for (pick, pool) in picks.iter_mut().zip(pools.chain(std::iter::repeat(u32::MAX))) {
            *pick = pool;
        }
    }
}

/// A task's room.
struct Room {
    panels: Panels,
    dots: Vec<f32>,
}

impl Room {
    fn new(selection: &Selection) -> Self {
        let heads = selection.weights.width;
        Self { panels: Panels::new(selection.head_dim, false), dots: vec![0.0; heads * BLOCK] }
    }
}

/// Scores of a group of rows for a range of pools.
struct Score<'a> {
    selection: &'a Selection,
    room: &'a mut Room,
    /// The first row's scores.
    out: *mut f32,
    stride: usize,
    rows: std::ops::Range<usize>,
    pools: std::ops::Range<usize>,
}

impl Kernel for Score<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Selection { cache, q, weights, head_dim, .. } = self.selection;
        let heads = weights.width;
        let (head_scale, dot_scale) = (1.0 / (heads as f32).sqrt(), 1.0 / (*head_dim as f32).sqrt());
        let most = cache.visible(self.rows.end - 1).min(self.pools.end);
        for first in (self.pools.start..most).step_by(BLOCK) {
            let count = BLOCK.min(most - first);
            // SAFETY: the pools are visible to a row of the span, so their pages exist; every row has its heads, and
            // this task's scores are its own.
            unsafe {
                self.room.panels.gather::<L>(count, |i| cache.key(first + i));
                for (item, row) in self.rows.clone().enumerate() {
                    let batch_row = cache.first_row + row;
                    let dots = self.room.dots.as_mut_ptr();
                    self.room.panels.dots::<L>(dots, q.at(batch_row), heads, count);
                    let out = self.out.add(item * self.stride + first);
                    weigh::<L>(out, count, dots, weights.row(batch_row), head_scale, dot_scale);
                }
            }
        }
    }
}

/// `Σ_h (weights[h] · head_scale) · max(0, dots[h] · dot_scale)` for `count` pools, heads ascending.
///
/// # Safety
/// `dots` has 64 values for each weight, `out` room for `count`.
#[inline(always)]
unsafe fn weigh<L: Lanes>(
    out: *mut f32,
    count: usize,
    dots: *const f32,
    weights: &[f32],
    head_scale: f32,
    dot_scale: f32,
) {
    for at in (0..count).step_by(LANES) {
        let mut score = L::zero();
        for (head, weight) in weights.iter().enumerate() {
            // SAFETY: as the caller vouches.
            let dot = unsafe { L::read(dots.add(head * BLOCK + at)) };
            let liked = L::zero().max(dot.mul(L::splat(dot_scale)));
            score = L::splat(weight * head_scale).fma(liked, score);
        }
        // SAFETY: as the caller vouches.
        unsafe { score.write_some(out.add(at), count - at) };
    }
}
