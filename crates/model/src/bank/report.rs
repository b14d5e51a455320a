//! What a bank did, for people and for metrics.

use std::time::Duration;

/// What kind of forward asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// One with a span of several sure rows.
    Prompt,
    /// All others.
    #[default]
    Decode,
}

/// Counts of one layer in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Forwards.
    pub forwards: u64,
    /// Experts that forwards asked for, each once a forward.
    pub asked: u64,
    /// Those that were in a slot already.
    pub held: u64,
    /// Products in which a forward's experts came (1 when all were held).
    pub waves: u64,
    /// Bytes read for those that were not.
    pub bytes: u64,
    /// Time for which the forward waited for reads.
    pub exposed: Duration,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.forwards += other.forwards;
        self.asked += other.asked;
        self.held += other.held;
        self.waves += other.waves;
        self.bytes += other.bytes;
        self.exposed += other.exposed;
    }

    /// Share of the experts asked for that were in a slot; 1 when none was asked for.
    pub fn hit_rate(&self) -> f64 {
        if self.asked == 0 { 1.0 } else { self.held as f64 / self.asked as f64 }
    }
}

/// What a bank is and did since it was made.
#[derive(Clone, Debug, Default)]
pub struct BankReport {
    /// Experts of a layer.
    pub experts: usize,
    /// Slots of a layer.
    pub slots: usize,
    /// Bytes of all slots, and of the experts on their way.
    pub bank_bytes: u64,
    /// What reads: `io_uring` or `threads`.
    pub engine: &'static str,
    /// By layer of the model: prompt, decode.
    pub layers: Vec<[Counts; 2]>,
    /// Time during which at least one read was under way.
    pub reading: Duration,
}

impl BankReport {
    /// The counts of one layer.
    pub fn layer(&mut self, layer: usize, phase: Phase) -> &mut Counts {
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, [Counts::default(); 2]);
        }
        &mut self.layers[layer][phase as usize]
    }

    /// The sum over layers of one phase.
    pub fn total(&self, phase: Phase) -> Counts {
        let mut total = Counts::default();
        self.layers.iter().for_each(|layer| total.add(&layer[phase as usize]));
        total
    }
}
