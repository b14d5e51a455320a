//! What the bench asks of a model beside its replies: experts that rows picked, kernels that ran, a profiler's marks.

use std::collections::BTreeSet;

use flint_cpu::Cpu;
use flint_cuda::{Cuda, profiler};
use flint_model::probe::{Point, Probe, Seen};
use flint_model::{Batch, Glm, LanguageModel, Logits};

/// A model that is measured.
pub(super) trait Subject: LanguageModel {
    /// A forward with somebody looking.
    fn forward_probed(&mut self, batch: &Batch, probe: &mut dyn Probe) -> flint_model::Result<Logits>;

    /// Kernels that ran so far, where there are some.
    fn kernels(&self) -> Option<u64> {
        None
    }

    /// Tells a profiler to begin or to end.
    fn mark(&self, _begin: bool) {}
}

impl Subject for Glm<Cpu> {
    fn forward_probed(&mut self, batch: &Batch, probe: &mut dyn Probe) -> flint_model::Result<Logits> {
        Self::forward_probed(self, batch, probe)
    }
}

impl Subject for Glm<Cuda> {
    fn forward_probed(&mut self, batch: &Batch, probe: &mut dyn Probe) -> flint_model::Result<Logits> {
        Self::forward_probed(self, batch, probe)
    }

    fn kernels(&self) -> Option<u64> {
        Some(self.backend().counts().kernels)
    }

    fn mark(&self, begin: bool) {
        if begin { profiler::start() } else { profiler::stop() }
    }
}

/// Counts the different experts that a forward's rows pick in a layer.
#[derive(Debug, Default)]
pub(super) struct Picks {
    distinct: usize,
    layers: usize,
}

impl Picks {
    /// Different experts of a layer, on average; `None` when no layer picked any.
    pub(super) fn distinct(&self) -> Option<f64> {
        (self.layers > 0).then(|| self.distinct as f64 / self.layers as f64)
    }
}

impl Probe for Picks {
    fn wants(&self, point: Point) -> bool {
        matches!(point, Point::Picks(_))
    }

    fn take(&mut self, _point: Point, seen: Seen) {
        if let Seen::Ids(picks) = seen {
            self.distinct += picks.iter().collect::<BTreeSet<_>>().len();
            self.layers += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Subject for flint_engine::testing::ToyLm {
        fn forward_probed(&mut self, batch: &Batch, _probe: &mut dyn Probe) -> flint_model::Result<Logits> {
            self.forward(batch)
        }
    }

    #[test]
    fn experts_that_several_rows_pick_count_once() {
        let mut picks = Picks::default();
        assert_eq!(picks.distinct(), None);
        picks.take(Point::Picks(1), Seen::Ids(vec![1, 4, 1, 7]));
        picks.take(Point::Picks(2), Seen::Ids(vec![2, 4, 2, 4]));
        assert_eq!(picks.distinct(), Some(2.5));
        assert!(picks.wants(Point::Picks(3)) && !picks.wants(Point::Feed(3)));
    }
}
