//! Experts on their way into slots, and products in waves.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flint_backend::ops::ABSENT;
use flint_backend::{Backend, Precision};
use flint_weights::stream::{Arrival, ExpertId, ExpertStream, Slab};

use super::replace::Usage;
use super::report::{BankReport, Phase};
use super::slabs::Slabs;
use super::{BankOptions, ExpertBank};
use crate::Result;
use crate::language::Error;

/// How long a read may take before the reader counts as lost.
const PATIENCE: Duration = Duration::from_mins(2);

/// Waves into which a product is cut where slots allow: each costs launches over all rows.
const WAVES: usize = 8;

/// The experts that a layer's rows want.
pub(crate) struct Wanted {
    /// By expert: its rows that are sure.
    sure_rows: BTreeMap<usize, u64>,
}

impl Wanted {
    /// From the picks of rows; `drafts` says which rows are drafts.
    pub(crate) fn new(picks: &[u32], picks_per_row: usize, drafts: &[bool]) -> Self {
        let mut sure_rows = BTreeMap::new();
        for (row, picks) in picks.chunks(picks_per_row.max(1)).enumerate() {
            let sure = u64::from(!drafts.get(row).copied().unwrap_or(false));
            for pick in picks {
                *sure_rows.entry(*pick as usize).or_default() += sure;
            }
        }
        Self { sure_rows }
    }
}

/// What is in a slot.
struct Held {
    expert: usize,
    /// The memory that its matrices may be read from.
    slab: Arc<Slab>,
}

/// The slots of one layer.
struct LayerSlots {
    held: Vec<Option<Held>>,
    /// By expert.
    slot_of: Vec<Option<usize>>,
    usage: Usage,
    slab_bytes: usize,
}

impl LayerSlots {
    /// The slot for a newcomer: an empty one, else that of the expert that is worth least, of `wanted` ones last. The
    /// experts of the wave at hand stay.
    fn slot_for_newcomer(&self, wave: &[usize], wanted: &BTreeMap<usize, u64>) -> Option<usize> {
        if let Some(empty) = self.held.iter().position(Option::is_none) {
            return Some(empty);
        }
        let may_leave = |slot: &usize| self.held[*slot].as_ref().is_some_and(|h| !wave.contains(&h.expert));
        let worth = |slot: usize| {
            let expert = self.held[slot].as_ref().map_or(0, |held| held.expert);
            (wanted.contains_key(&expert), self.usage.worth(expert))
        };
        (0..self.held.len()).filter(may_leave).min_by(|a, b| {
            let (a, b) = (worth(*a), worth(*b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        })
    }
}

/// All slots of a model whose experts are streamed.
pub(crate) struct Bank {
    stream: ExpertStream,
    layers: Vec<Option<LayerSlots>>,
    slabs: Slabs,
    staging: usize,
    /// Experts on their way.
    coming: HashSet<ExpertId>,
    /// Since when some are.
    coming_since: Option<Instant>,
    /// Rows of the forward at hand that are drafts.
    drafts: Vec<bool>,
    /// Rows of the forward at hand whose experts could not be read, and why.
    lost: Vec<Option<Arc<str>>>,
    phase: Phase,
    report: BankReport,
}

impl Bank {
    /// A bank without layers.
    pub(crate) fn new(stream: ExpertStream, experts: usize, options: &BankOptions) -> Self {
        let slots = options.slots.clamp(1, experts.max(1));
        let report = BankReport { experts, slots, engine: stream.engine(), ..BankReport::default() };
        Self {
            stream,
            layers: Vec::new(),
            slabs: Slabs::default(),
            staging: options.staging.max(1),
            coming: HashSet::new(),
            coming_since: None,
            drafts: Vec::new(),
            lost: Vec::new(),
            phase: Phase::Decode,
            report,
        }
    }

    /// Makes a layer's slots and fills them with the experts that were used most before, if any were.
    pub(crate) fn add_layer<B: Backend>(
        &mut self,
        backend: &mut B,
        layer: usize,
        table: B::Buffer,
        options: &BankOptions,
    ) -> Result<ExpertBank<B>> {
        let (slots, experts) = (self.report.slots, self.report.experts);
        let like = self.stream.like(layer)?;
        let bank = ExpertBank {
            gate_up: backend.allocate_stack(&like.gate_up, slots, Precision::Product)?,
            down: backend.allocate_stack(std::slice::from_ref(&like.down), slots, Precision::Product)?,
            slots: table,
        };
        let usage = options.usage.get(layer).map_or(&[][..], Vec::as_slice);
        let slab_bytes = Slab::rounded(self.stream.slab_bytes(layer));
        let more = slots + if self.slabs.knows(slab_bytes) { 0 } else { self.staging };
        self.slabs.allow(slab_bytes, more);
        self.report.bank_bytes += (slab_bytes * more) as u64;
        self.layers.resize_with(self.layers.len().max(layer + 1), || None);
        self.layers[layer] = Some(LayerSlots {
            held: (0..slots).map(|_| None).collect(),
            slot_of: vec![None; experts],
            usage: Usage::new(options.replacement, experts, usage),
            slab_bytes,
        });
        self.fill(backend, layer, &bank, usage)?;
        Ok(bank)
    }

    fn fill<B: Backend>(
        &mut self,
        backend: &mut B,
        layer: usize,
        bank: &ExpertBank<B>,
        usage: &[u64],
    ) -> Result<()> {
        let mut used: Vec<usize> =
            (0..usage.len().min(self.report.experts)).filter(|e| usage[*e] > 0).collect();
        used.sort_by_key(|expert| (std::cmp::Reverse(usage[*expert]), *expert));
        used.truncate(self.report.slots);
        let mut queue = VecDeque::from(used);
        let mut waited_for = HashSet::new();
        while !queue.is_empty() || !waited_for.is_empty() {
            self.start(backend, layer, &mut queue, &mut waited_for)?;
            if let Some(arrival) = self.next(layer, &mut waited_for, PATIENCE)? {
                self.place(backend, bank, arrival, &[], &BTreeMap::new())?;
            }
        }
        Ok(())
    }

    /// What the bank is and did.
    pub(crate) fn report(&self) -> &BankReport {
        &self.report
    }

    /// Starts a forward whose rows are sure or drafts.
    pub(crate) fn begin(&mut self, drafts: Vec<bool>, phase: Phase) {
        self.lost = vec![None; drafts.len()];
        (self.drafts, self.phase) = (drafts, phase);
    }

    /// Why the first of some rows of the last forward that was lost was lost.
    pub(crate) fn lost(&self, mut rows: Range<usize>) -> Option<String> {
        rows.find_map(|row| self.lost.get(row)?.as_ref().map(ToString::to_string))
    }

    /// Notes the rows that an expert was lost for.
    fn lose(&mut self, (picks, picks_per_row): (&[u32], usize), expert: usize, error: &Error) {
        let why: Arc<str> = error.to_string().into();
        for (row, picks) in picks.chunks(picks_per_row.max(1)).enumerate() {
            if picks.contains(&(expert as u32))
                && let Some(lost) = self.lost.get_mut(row)
            {
                lost.get_or_insert_with(|| Arc::clone(&why));
            }
        }
    }

    /// Runs `compute` as often as it takes for each picked expert to be in the slot table once.
    pub(crate) fn serve<B: Backend>(
        &mut self,
        backend: &mut B,
        (layer, bank): (usize, &ExpertBank<B>),
        (picks, picks_per_row): (&[u32], usize),
        mut compute: impl FnMut(&mut B) -> Result<()>,
    ) -> Result<()> {
        self.drain()?;
        let wanted = Wanted::new(picks, picks_per_row, &self.drafts).sure_rows;
        let Some(slots) = self.layers.get_mut(layer).and_then(Option::as_mut) else {
            return Err(Error::Unsupported(format!("layers.{layer} has no expert slots")));
        };
        slots
            .usage
            .count(wanted.iter().filter(|(_, rows)| **rows > 0).map(|(expert, rows)| (*expert, *rows)));
        let (held, missing): (Vec<usize>, Vec<usize>) =
            wanted.keys().partition(|expert| slots.slot_of.get(**expert).is_some_and(Option::is_some));
        let counts = self.report.layer(layer, self.phase);
        counts.forwards += 1;
        counts.asked += wanted.len() as u64;
        counts.held += held.len() as u64;

        let least = missing.len().div_ceil(WAVES).clamp(1, self.report.slots);
        let (mut queue, mut waited_for) = (VecDeque::from(missing), HashSet::new());
        self.start(backend, layer, &mut queue, &mut waited_for)?;
        // What is there is computed while the rest is on its way.
        if !held.is_empty() {
            self.wave(backend, (layer, bank), &held, &mut compute)?;
        }
        while !queue.is_empty() || !waited_for.is_empty() {
            let before = (queue.len(), waited_for.len());
            let mut wave = Vec::new();
            while wave.len() < self.report.slots && !(queue.is_empty() && waited_for.is_empty()) {
                self.start(backend, layer, &mut queue, &mut waited_for)?;
                // Without memory for another read, the wave goes as it is, and its slots give theirs back.
                let enough = wave.len() >= least || (waited_for.is_empty() && !wave.is_empty());
                let patience = if enough { Duration::ZERO } else { PATIENCE };
                let Some(arrival) = self.next(layer, &mut waited_for, patience)? else { break };
                let expert = arrival.id.expert;
                match self.place(backend, bank, arrival, &wave, &wanted) {
                    Ok(()) => wave.push(expert),
                    // Rows of other experts go on.
                    Err(error @ Error::Weights(_)) => self.lose((picks, picks_per_row), expert, &error),
                    Err(error) => return Err(error),
                }
            }
            if !wave.is_empty() {
                self.wave(backend, (layer, bank), &wave, &mut compute)?;
            } else if before == (queue.len(), waited_for.len()) {
                let what =
                    format!("layers.{layer}: no memory is left to read experts into; load the model anew");
                return Err(Error::Experts(what));
            }
        }
        Ok(())
    }

    /// Waits for what a forward asked for before it failed: nobody wants it any more, and its memory is needed.
    fn drain(&mut self) -> Result<()> {
        while !self.coming.is_empty() {
            let Some(arrival) = self.stream.next(PATIENCE) else { return Err(lost_reader()) };
            self.coming.remove(&arrival.id);
            drop(arrival.matrices);
            self.slabs.give_back(arrival.slab);
        }
        self.coming_since = None;
        Ok(())
    }

    /// Starts reads while there is memory for them.
    fn start<B: Backend>(
        &mut self,
        backend: &mut B,
        layer: usize,
        queue: &mut VecDeque<usize>,
        waited_for: &mut HashSet<usize>,
    ) -> Result<()> {
        let Some(bytes) = self.layers.get(layer).and_then(Option::as_ref).map(|slots| slots.slab_bytes)
        else {
            return Ok(());
        };
        while let Some(&expert) = queue.front() {
            let id = ExpertId { layer, expert };
            if !self.coming.contains(&id) {
                if self.coming.len() >= self.staging {
                    return Ok(());
                }
                let mut slab = self.slabs.take(bytes)?;
                if slab.is_none() && waited_for.is_empty() && self.slabs.are_leaving() {
                    backend.synchronize()?;
                    slab = self.slabs.take(bytes)?;
                }
                let Some(slab) = slab else { return Ok(()) };
                self.stream.start(id, slab)?;
                self.coming.insert(id);
                self.coming_since.get_or_insert_with(Instant::now);
            }
            queue.pop_front();
            waited_for.insert(expert);
        }
        Ok(())
    }

    /// The next expert of a layer that is waited for; `None` when none comes within `patience`.
    fn next(
        &mut self,
        layer: usize,
        waited_for: &mut HashSet<usize>,
        patience: Duration,
    ) -> Result<Option<Arrival>> {
        let began = Instant::now();
        while !waited_for.is_empty() {
            let Some(arrival) = self.stream.next(patience) else {
                if patience.is_zero() {
                    return Ok(None);
                }
                return Err(lost_reader());
            };
            self.coming.remove(&arrival.id);
            if self.coming.is_empty()
                && let Some(since) = self.coming_since.take()
            {
                self.report.reading += since.elapsed();
            }
            if arrival.id.layer != layer || !waited_for.remove(&arrival.id.expert) {
                drop(arrival.matrices);
                self.slabs.give_back(arrival.slab);
                continue;
            }
            let counts = self.report.layer(layer, self.phase);
            counts.bytes += arrival.bytes;
            counts.exposed += began.elapsed();
            return Ok(Some(arrival));
        }
        Ok(None)
    }

    /// Puts an expert into a slot.
    fn place<B: Backend>(
        &mut self,
        backend: &mut B,
        bank: &ExpertBank<B>,
        arrival: Arrival,
        wave: &[usize],
        wanted: &BTreeMap<usize, u64>,
    ) -> Result<()> {
        let Arrival { id: ExpertId { layer, expert }, slab, matrices, .. } = arrival;
        let matrices = match matrices {
            Ok(matrices) => matrices,
            Err(error) => {
                self.slabs.give_back(slab);
                return Err(error.into());
            }
        };
        let Some(slots) = self.layers.get_mut(layer).and_then(Option::as_mut) else { return Ok(()) };
        let Some(slot) = slots.slot_for_newcomer(wave, wanted) else {
            return Err(Error::Experts(format!("layers.{layer}: no slot is free for expert {expert}")));
        };
        if let Some(held) = slots.held[slot].take() {
            slots.slot_of[held.expert] = None;
            self.slabs.leave(held.slab);
        }
        backend.write_member(&bank.gate_up, slot, &matrices.gate_up)?;
        backend.write_member(&bank.down, slot, std::slice::from_ref(&matrices.down))?;
        slots.held[slot] = Some(Held { expert, slab });
        slots.slot_of[expert] = Some(slot);
        Ok(())
    }

    /// One product of the experts of a wave.
    fn wave<B: Backend>(
        &mut self,
        backend: &mut B,
        (layer, bank): (usize, &ExpertBank<B>),
        experts: &[usize],
        compute: &mut impl FnMut(&mut B) -> Result<()>,
    ) -> Result<()> {
        let Some(slots) = self.layers.get(layer).and_then(Option::as_ref) else { return Ok(()) };
        let mut table = vec![ABSENT; self.report.experts];
        for &expert in experts {
            if let Some(slot) = slots.slot_of[expert] {
                table[expert] = slot as u32;
            }
        }
        backend.write_u32(&bank.slots, 0, &table)?;
        self.report.layer(layer, self.phase).waves += 1;
        compute(backend)
    }
}

fn lost_reader() -> Error {
    Error::Experts(format!("an expert did not come within {PATIENCE:?}; check the disk"))
}
