//! Which expert leaves a full layer. Speed only: no choice here can change a result.

/// A rule for choosing the expert that leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Replacement {
    /// The one that was used longest ago.
    LeastRecent,
    /// The one that was used least, where a use counts half after `half_life` forwards.
    LeastFrequent {
        /// Forwards after which a use counts half.
        half_life: f32,
    },
}

impl Default for Replacement {
    /// What kept most on recorded traces; see `docs/performance.md`.
    fn default() -> Self {
        Self::LeastFrequent { half_life: 64.0 }
    }
}

/// What is known of a layer's experts.
#[derive(Clone, Debug)]
pub struct Usage {
    rule: Replacement,
    /// By expert: the forward of its last use, or its uses in units that grow as the forwards pass.
    scores: Vec<f64>,
    forwards: u64,
    /// What a use counts now: grows by the half-life, so that no score need ever be changed.
    unit: f64,
}

/// Above this, scores are scaled down before they lose digits.
const LARGE: f64 = 1e200;

impl Usage {
    /// A layer of `experts` experts, with uses from before (none, or one number for each expert).
    pub fn new(rule: Replacement, experts: usize, before: &[u64]) -> Self {
        let most = before.iter().copied().max().unwrap_or(0).max(1) as f64;
        // A profile orders the experts and weighs less than one real use.
        let score = |expert| before.get(expert).map_or(0.0, |uses| *uses as f64 / most / 2.0);
        Self { rule, scores: (0..experts).map(score).collect(), forwards: 0, unit: 1.0 }
    }

    /// Counts one forward and the experts that its sure rows used, each with its number of rows.
    pub fn count(&mut self, used: impl IntoIterator<Item = (usize, u64)>) {
        self.forwards += 1;
        if let Replacement::LeastFrequent { half_life } = self.rule {
            self.unit *= f64::from(1.0 / half_life.max(1.0)).exp2();
            if self.unit > LARGE {
                self.scores.iter_mut().for_each(|score| *score /= self.unit);
                self.unit = 1.0;
            }
        }
        for (expert, rows) in used {
            let Some(score) = self.scores.get_mut(expert) else { continue };
            match self.rule {
                Replacement::LeastRecent => *score = self.forwards as f64,
                // Many rows of one forward say little more than one.
                Replacement::LeastFrequent { .. } => {
                    *score += self.unit * (1.0 + (rows as f64).log2().max(0.0));
                }
            }
        }
    }

    /// How much an expert is worth keeping.
    pub fn worth(&self, expert: usize) -> f64 {
        self.scores.get(expert).copied().unwrap_or(0.0)
    }

    /// The experts, the worthiest first; equal ones in ascending order.
    pub fn ranked(&self) -> Vec<usize> {
        let mut experts: Vec<usize> = (0..self.scores.len()).collect();
        experts.sort_by(|a, b| self.worth(*b).total_cmp(&self.worth(*a)).then(a.cmp(b)));
        experts
    }
}

/// The share of uses that a rule finds in `slots` slots, for one layer's forwards (the experts of each). Measures rules.
pub fn hit_rate(
    rule: Replacement,
    experts: usize,
    slots: usize,
    before: &[u64],
    trace: &[Vec<usize>],
) -> f64 {
    let mut usage = Usage::new(rule, experts, before);
    let mut held: Vec<usize> = if before.is_empty() { Vec::new() } else { usage.ranked() };
    held.truncate(slots);
    let (mut hits, mut uses) = (0_usize, 0_usize);
    for forward in trace {
        uses += forward.len();
        hits += forward.iter().filter(|expert| held.contains(expert)).count();
        usage.count(forward.iter().map(|expert| (*expert, 1)));
        for expert in forward {
            if held.contains(expert) {
                continue;
            }
            if held.len() < slots {
                held.push(*expert);
                continue;
            }
            // As in the bank: an expert of this forward leaves only when there is no other.
            let key = |at: &usize| (forward.contains(&held[*at]), usage.worth(held[*at]));
            let leaves = (0..held.len()).min_by(|a, b| {
                let (a, b) = (key(a), key(b));
                a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
            });
            if let Some(at) = leaves {
                held[at] = *expert;
            }
        }
    }
    hits as f64 / uses.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recent_leaves_by_time_and_the_least_frequent_by_use() {
        let uses = [vec![0, 1], vec![0], vec![0], vec![1], vec![1, 2]];
        let count = |rule| {
            let mut usage = Usage::new(rule, 4, &[]);
            for forward in &uses {
                usage.count(forward.iter().map(|expert| (*expert, 1)));
            }
            usage.ranked()
        };
        assert_eq!(count(Replacement::LeastRecent), [1, 2, 0, 3]);
        assert_eq!(count(Replacement::LeastFrequent { half_life: 1000.0 }), [1, 0, 2, 3]);
        assert_eq!(count(Replacement::LeastFrequent { half_life: 1.0 })[2], 0, "old uses count little");
    }

    #[test]
    fn a_profile_orders_experts_until_they_are_used() {
        let mut usage = Usage::new(Replacement::default(), 3, &[5, 9, 0]);
        assert_eq!(usage.ranked(), [1, 0, 2]);
        usage.count([(2, 1)]);
        assert_eq!(usage.ranked(), [2, 1, 0]);
    }

    #[test]
    fn scores_stay_numbers_over_a_long_life() {
        let mut usage = Usage::new(Replacement::LeastFrequent { half_life: 1.0 }, 2, &[]);
        for forward in 0..10_000 {
            usage.count([(forward % 2, 3)]);
        }
        assert!(usage.scores.iter().all(|score| score.is_finite()));
        assert_eq!(usage.ranked(), [1, 0]);
    }

    #[test]
    fn enough_slots_miss_each_expert_once() {
        let trace: Vec<Vec<usize>> = (0..50).map(|forward| vec![forward % 5, 5 + forward % 3]).collect();
        for rule in [Replacement::LeastRecent, Replacement::default()] {
            assert!((hit_rate(rule, 8, 8, &[], &trace) - 92.0 / 100.0).abs() < 1e-9);
        }
    }
}
