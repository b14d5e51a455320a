//! Bytes and operations that a forward asks for, from the load plan.

use flint_cpu::limits::MachineLimits;
use flint_cpu::{Arithmetic, Options};
use flint_cuda::DeviceLimits;
use flint_weights::{Group, LoadPlan, ModelConfig};

/// What a place gave at best in this run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Limits {
    /// The place in words.
    pub(super) place: String,
    /// Threads of the CPU; `None` on a device.
    pub(super) threads: Option<usize>,
    /// Bytes a second: reads on the CPU, a copy's both ways on a device.
    pub(super) bytes_per_second: f64,
    /// Bytes a second from pinned host memory to a device.
    pub(super) upload_bytes_per_second: Option<f64>,
    /// The multiply-add rate that the products' arithmetic could reach, where it is known.
    pub(super) peak: Option<f64>,
    /// All rates that were measured, in operations a second.
    pub(super) rates: Vec<(&'static str, f64)>,
}

impl Limits {
    /// Those of a number of threads.
    pub(super) fn of_cpu(place: String, limits: &MachineLimits, device: Options) -> Self {
        let mut rates = vec![("fp32", limits.fma_per_second)];
        rates.extend(limits.dot_per_second.map(|rate| ("bf16 dot", rate)));
        let peak = match device.arithmetic {
            Arithmetic::Lanes => limits.fma_per_second,
            Arithmetic::Dot => limits.dot_per_second.unwrap_or(limits.fma_per_second),
        };
        let (threads, bytes_per_second) = (Some(limits.threads), limits.read_bytes_per_second);
        let upload_bytes_per_second = None;
        Self { place, threads, bytes_per_second, upload_bytes_per_second, peak: Some(peak), rates }
    }

    /// Those of a CUDA device.
    pub(super) fn of_device(place: String, limits: &DeviceLimits) -> Self {
        let rates = limits.product_per_second.map(|rate| ("bf16 product", rate));
        let (bytes_per_second, peak) = (limits.copy_bytes_per_second, limits.product_per_second);
        let upload_bytes_per_second = Some(limits.upload_bytes_per_second);
        let rates = rates.into_iter().collect();
        Self { place, threads: None, bytes_per_second, upload_bytes_per_second, peak, rates }
    }

    /// The higher of both of each rate: a roof is what the place can give at best.
    pub(super) fn better(mut self, other: &Self) -> Self {
        self.bytes_per_second = self.bytes_per_second.max(other.bytes_per_second);
        self.peak = self.peak.zip(other.peak).map(|(one, other)| one.max(other));
        for (mine, theirs) in self.rates.iter_mut().zip(&other.rates) {
            mine.1 = mine.1.max(theirs.1);
        }
        self
    }
}

/// What rows cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Roof {
    /// Weight bytes that one row reads.
    row_bytes: f64,
    /// Bytes of one routed expert, all sparse layers together.
    expert_bytes: f64,
    experts: f64,
    experts_per_row: f64,
    /// Recurrent state of a sequence: read and written at every step.
    state_bytes: f64,
    /// Latents that a row at a late position reads, and pooled keys for each position before it.
    latent_bytes: f64,
    selected: f64,
    key_bytes: f64,
    /// Weights that a row multiplies, the head included.
    row_values: f64,
    head_values: f64,
}

impl Roof {
    /// The costs of a plan's model.
    pub(super) fn new(plan: &LoadPlan, config: &ModelConfig) -> Self {
        let group = |wanted: Group| plan.groups.iter().find(|group| group.group == wanted);
        let experts = plan.model.experts.max(1) as f64;
        Self {
            row_bytes: plan.weight_bytes_per_token as f64,
            expert_bytes: group(Group::Experts).map_or(0.0, |group| group.resident_bytes as f64) / experts,
            experts,
            experts_per_row: plan.model.experts_per_token as f64,
            state_bytes: 2.0 * plan.state.kda_state as f64,
            latent_bytes: plan.state.latents_per_token as f64,
            selected: config.index_topk as f64,
            key_bytes: plan.state.pooled_keys_per_pool as f64 / plan.state.pool_tokens.max(1) as f64,
            row_values: plan.model.active_parameters as f64,
            head_values: group(Group::Head).map_or(0.0, |group| group.values as f64),
        }
    }

    /// Bytes that a forward of one row for each of `batch` sequences reads: all shared weights once, `experts` different
    /// ones (or those that independent picks would touch), each sequence's recurrent state in and out, and what its row
    /// reads of the `behind` positions before it.
    pub(super) fn decode_bytes(&self, batch: usize, experts: Option<f64>, behind: usize) -> f64 {
        self.weight_bytes(batch, experts) + batch as f64 * (self.state_bytes + self.context_bytes(1, behind))
    }

    /// Bytes that a prompt of `tokens` tokens reads in parts of `rows` rows: weights once a part, the state likewise.
    pub(super) fn prefill_bytes(&self, tokens: usize, rows: usize) -> f64 {
        let (parts, rest) = (tokens / rows, tokens % rows);
        let part = |rows: usize| self.weight_bytes(rows, None) + self.state_bytes;
        parts as f64 * part(rows) + if rest > 0 { part(rest) } else { 0.0 }
    }

    /// Bytes that a forward of `rows` rows of one sequence reads: the state once.
    pub(super) fn block_bytes(&self, rows: usize, experts: Option<f64>, behind: usize) -> f64 {
        self.weight_bytes(rows, experts) + self.state_bytes + self.context_bytes(rows, behind)
    }

    /// Different experts that `rows` independent rows pick.
    pub(super) fn independent_experts(&self, rows: usize) -> f64 {
        let missed = (1.0 - self.experts_per_row / self.experts).powf(rows as f64);
        self.experts * (1.0 - missed)
    }

    fn weight_bytes(&self, rows: usize, experts: Option<f64>) -> f64 {
        let distinct = experts.unwrap_or_else(|| self.independent_experts(rows));
        self.row_bytes + (distinct - self.experts_per_row) * self.expert_bytes
    }

    /// What `rows` rows of one sequence read of the positions before them: every pooled key once, the latents that they
    /// select at most once.
    fn context_bytes(&self, rows: usize, behind: usize) -> f64 {
        let behind = behind as f64;
        behind * self.key_bytes + behind.min(rows as f64 * self.selected) * self.latent_bytes
    }

    /// Operations of a forward of one row for each of `batch` sequences: a multiply and an add for each weight.
    pub(super) fn decode_operations(&self, batch: usize) -> f64 {
        2.0 * self.row_values * batch as f64
    }

    /// Operations of a prompt's rows; the head is computed for the last row alone.
    pub(super) fn prefill_operations(&self, tokens: usize) -> f64 {
        2.0 * ((self.row_values - self.head_values) * tokens as f64 + self.head_values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roof() -> Roof {
        Roof {
            row_bytes: 100.0,
            expert_bytes: 2.0,
            experts: 8.0,
            experts_per_row: 2.0,
            state_bytes: 5.0,
            latent_bytes: 0.5,
            selected: 20.0,
            key_bytes: 0.25,
            row_values: 1000.0,
            head_values: 400.0,
        }
    }

    #[test]
    fn more_rows_share_the_weights_but_not_all_experts_and_no_state() {
        assert!((roof().decode_bytes(1, None, 0) - 105.0).abs() < 1e-9);
        // Two rows touch 8·(1 − 0.75²) = 3.5 experts.
        assert!((roof().decode_bytes(2, None, 0) - (100.0 + 1.5 * 2.0 + 10.0)).abs() < 1e-9);
        // Counted ones stand for them.
        assert!((roof().decode_bytes(2, Some(3.0), 0) - (100.0 + 2.0 + 10.0)).abs() < 1e-9);
        // Many rows touch all eight.
        assert!((roof().decode_bytes(1000, None, 0) - (100.0 + 6.0 * 2.0 + 5000.0)).abs() < 1e-6);
    }

    #[test]
    fn a_row_reads_every_pooled_key_and_the_latents_that_it_selects() {
        let behind = |behind| roof().decode_bytes(1, None, behind) - roof().decode_bytes(1, None, 0);
        assert!((behind(8) - (2.0 + 4.0)).abs() < 1e-9);
        assert!((behind(100) - (25.0 + 10.0)).abs() < 1e-9);
        // A block's rows share the keys, and select different latents at most.
        let block = roof().block_bytes(2, Some(2.0), 100) - roof().block_bytes(2, Some(2.0), 0);
        assert!((block - (25.0 + 20.0)).abs() < 1e-9);
    }

    #[test]
    fn a_prompt_reads_the_weights_once_a_part() {
        let whole = roof().weight_bytes(8, None) + 5.0;
        let rest = roof().weight_bytes(3, None) + 5.0;
        assert!((roof().prefill_bytes(19, 8) - (2.0 * whole + rest)).abs() < 1e-9);
        assert!((roof().prefill_bytes(16, 8) - 2.0 * whole).abs() < 1e-9);
    }

    #[test]
    fn a_prompts_head_is_counted_once() {
        assert!((roof().prefill_operations(10) - 2.0 * (600.0 * 10.0 + 400.0)).abs() < 1e-9);
        assert!((roof().decode_operations(3) - 6000.0).abs() < 1e-9);
    }
}
