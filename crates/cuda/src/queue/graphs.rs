//! Graphs of scripts that come again.

use std::collections::{HashMap, HashSet};

use crate::driver::Graph;
use crate::queue::launch::Script;

/// Scripts shorter than this are not worth a graph.
const LEAST: usize = 8;
/// Graphs that are kept: one for each row count of a busy server's rounds, with and without logits.
const MOST: usize = 96;
/// Scripts that are remembered as seen.
const REMEMBERED: usize = 4096;

struct Kept {
    script: Script,
    graph: Graph,
    used: u64,
}

/// What to do with a script.
pub(crate) enum Plan<'a> {
    /// It has a graph.
    Launch(&'a Graph),
    /// It comes for the second time: make a graph, and hand it to [`Graphs::keep`].
    Capture(u64),
    /// Launch its kernels one by one.
    Run,
}

/// Graphs by their scripts.
#[derive(Default)]
pub(crate) struct Graphs {
    kept: HashMap<u64, Kept>,
    seen: HashSet<u64>,
    clock: u64,
}

impl Graphs {
    /// What to do with a script.
    pub(crate) fn plan(&mut self, script: &Script) -> Plan<'_> {
        if script.len() < LEAST {
            return Plan::Run;
        }
        self.clock += 1;
        let digest = script.digest();
        // Equal digests of unequal scripts are as good as impossible; such a script runs without a graph.
        if let Some(kept) = self.kept.get_mut(&digest) {
            if kept.script != *script {
                return Plan::Run;
            }
            kept.used = self.clock;
            return Plan::Launch(&kept.graph);
        }
        if self.seen.len() >= REMEMBERED {
            self.seen.clear();
        }
        if self.seen.remove(&digest) {
            return Plan::Capture(digest);
        }
        self.seen.insert(digest);
        Plan::Run
    }

    /// Keeps a graph, and drops the one that was not used for longest when there are too many.
    pub(crate) fn keep(&mut self, digest: u64, script: Script, graph: Graph) -> &Graph {
        if self.kept.len() >= MOST
            && let Some((&oldest, _)) = self.kept.iter().min_by_key(|(_, kept)| kept.used)
        {
            self.kept.remove(&oldest);
        }
        let kept = Kept { script, graph, used: self.clock };
        &self.kept.entry(digest).insert_entry(kept).into_mut().graph
    }
}
