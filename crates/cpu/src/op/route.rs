//! The router's choice: a total order (score descending, expert ascending), whatever the scores are.

use flint_backend::Result;
use flint_backend::ops::Route;

use super::{require, spread};
use crate::buffer::RowsF32;
use crate::lanes::{Kernel, LANES, Lanes};
use crate::maths::sigmoid;
use crate::{Cpu, CpuBuffer};

/// Added to the sum of the picked scores. `reference/glm5_next.md` section 7.
const SUM_EPSILON: f32 = 1e-20;

pub(crate) fn route(cpu: &mut Cpu, op: &Route<CpuBuffer>) -> Result<()> {
    const NAME: &str = "route";
    let (weights, logits) = (RowsF32::new(NAME, &op.weights)?, RowsF32::new(NAME, &op.logits)?);
    let (experts, picks_per_row) = (logits.width, op.picks_per_row);
    let picks = op.picks.u32_start(NAME, logits.rows * picks_per_row)?;
    // SAFETY: no operation writes the bias.
    let bias = &unsafe { op.bias.f32s(NAME, experts) }?[..experts];
    require(NAME, weights.rows == logits.rows && weights.width == picks_per_row, || {
        format!("weights {} × {} for {} × {picks_per_row} picks", weights.rows, weights.width, logits.rows)
    })?;
    let groups = op.groups.max(1);
    let kept = if groups == 1 { 1 } else { op.groups_kept };
    let whole = experts.is_multiple_of(groups) && kept >= 1 && kept <= groups;
    require(NAME, whole && picks_per_row <= experts / groups * kept, || {
        format!("{picks_per_row} picks of {experts} experts in {groups} groups of which {kept} are kept")
    })?;
    let level = cpu.options.level;
    spread(cpu, logits.rows, 16 * experts, &|rows| {
        let mut choice = Choice::new(experts, groups, kept, picks_per_row);
        for row in rows {
            // SAFETY: the row exists, nobody writes logits; tasks write different rows of weights and picks.
            let (logits, weights, picks) = unsafe {
                let picks = std::slice::from_raw_parts_mut(picks.at(row * picks_per_row), picks_per_row);
                (logits.row(row), weights.row_mut(row), picks)
            };
            level.run(Sigmoid { out: &mut choice.scores, x: logits });
            choice.pick(bias, picks);
            choice.weigh(picks, weights, op.normalise, op.scaling);
        }
    });
    Ok(())
}

/// `out = σ(x)`.
struct Sigmoid<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
}

impl Kernel for Sigmoid<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let count = self.x.len().min(self.out.len());
        for at in (0..count).step_by(LANES) {
            let left = count - at;
            // SAFETY: no more than `count` values are read and written.
            unsafe {
                let x = L::read_some(self.x.as_ptr().add(at), left);
                sigmoid(x).write_some(self.out.as_mut_ptr().add(at), left);
            }
        }
    }
}

/// A number that sorts as (score descending, index ascending) when taken in descending order. Every score has a
/// place, NaN too; the two zeros are equal.
pub(super) fn rank(score: f32, index: u32) -> u64 {
    let bits = (score + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!index)
}

/// The index of a [`rank`].
pub(super) fn ranked_index(rank: u64) -> u32 {
    !(rank as u32)
}

/// Room for one row's choice.
struct Choice {
    scores: Vec<f32>,
    groups: usize,
    kept: usize,
    /// The best ranks so far, descending.
    best: Best,
    best_groups: Best,
}

impl Choice {
    fn new(experts: usize, groups: usize, kept: usize, picks: usize) -> Self {
        let scores = vec![0.0; experts];
        Self { scores, groups, kept, best: Best::new(picks), best_groups: Best::new(kept) }
    }

    /// Writes the picked experts in ascending order.
    fn pick(&mut self, bias: &[f32], picks: &mut [u32]) {
        let size = self.scores.len() / self.groups;
        let pick_score = |expert: usize| self.scores[expert] + bias[expert];
        self.best_groups.clear();
        for group in 0..self.groups {
            let score =
                if self.groups == 1 { 0.0 } else { two_best(group * size..(group + 1) * size, pick_score) };
            self.best_groups.offer(rank(score, group as u32));
        }
        debug_assert_eq!(self.best_groups.ranks.len(), self.kept);
        self.best.clear();
        for &group in &self.best_groups.ranks {
            let first = ranked_index(group) as usize * size;
            for expert in first..first + size {
                self.best.offer(rank(pick_score(expert), expert as u32));
            }
        }
        for (pick, &rank) in picks.iter_mut().zip(&self.best.ranks) {
            *pick = ranked_index(rank);
        }
        picks.sort_unstable();
    }

    /// Writes the picked experts' weights.
    fn weigh(&self, picks: &[u32], weights: &mut [f32], normalise: bool, scaling: f32) {
        let mut total = 0.0;
        for (weight, &expert) in weights.iter_mut().zip(picks) {
            *weight = self.scores[expert as usize];
            total += *weight;
        }
        let divisor = if normalise { total + SUM_EPSILON } else { 1.0 };
        for weight in weights {
            *weight = *weight / divisor * scaling;
        }
    }
}

/// The sum of the two best scores (of the only one).
fn two_best(experts: std::ops::Range<usize>, score: impl Fn(usize) -> f32) -> f32 {
    let mut best = Best::new(2);
    for expert in experts {
        best.offer(rank(score(expert), expert as u32));
    }
    best.ranks.iter().map(|&rank| score(ranked_index(rank) as usize)).sum()
}

/// The few greatest of many ranks, descending.
pub(super) struct Best {
    ranks: Vec<u64>,
    most: usize,
}

impl Best {
    pub(super) fn new(most: usize) -> Self {
        Self { ranks: Vec::with_capacity(most + 1), most }
    }

    pub(super) fn clear(&mut self) {
        self.ranks.clear();
    }

    pub(super) fn offer(&mut self, rank: u64) {
        if self.ranks.len() == self.most && self.ranks.last().is_none_or(|&last| last >= rank) {
            return;
        }
        let place = self.ranks.partition_point(|&other| other > rank);
        self.ranks.insert(place, rank);
        self.ranks.truncate(self.most);
    }

    pub(super) fn ranks(&self) -> &[u64] {
        &self.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_score_has_a_place_and_equal_scores_go_to_the_lower_index() {
        let scores = [1.0, f32::NEG_INFINITY, -0.0, 0.0, f32::INFINITY, -1e-40, f32::NAN, 1.0, -f32::NAN];
        let mut ranks: Vec<u64> =
            scores.iter().enumerate().map(|(i, &score)| rank(score, i as u32)).collect();
        ranks.sort_unstable_by(|a, b| b.cmp(a));
        let order: Vec<u32> = ranks.into_iter().map(ranked_index).collect();
        assert_eq!(order, [6, 4, 0, 7, 2, 3, 5, 1, 8]);
    }

    #[test]
    fn the_best_are_kept_in_descending_order() {
        let mut best = Best::new(3);
        for rank in [5, 1, 9, 7, 8, 2] {
            best.offer(rank);
        }
        assert_eq!(best.ranks, [9, 8, 7]);
        let mut none = Best::new(0);
        none.offer(1);
        assert!(none.ranks.is_empty());
    }
}
