//! Latent attention over positions that a pooled indexer selects. `reference/glm5_next.md` section 6.

use flint_backend::ops::{Attend, DsaAppend, DsaSpan, HeadLinear, LayerNorm, Linear, RmsNorm, SelectPools};
use flint_backend::{Backend, Rows};
use flint_weights::ModelConfig;

use crate::Result;
use crate::probe::{Point, Probe};
use crate::scratch::Scratch;
use crate::sequence::CacheShape;

/// Epsilon of the indexer's layer norm.
const INDEX_NORM_EPSILON: f32 = 1e-6;

/// A DSA layer's weights.
pub(crate) struct Dsa<B: Backend> {
    /// q_a, kv_a and, with an indexer, its k, γ and head weights, over the same input.
    pub(crate) input: B::Matrix,
    pub(crate) query_norm: B::Buffer,
    pub(crate) latent_norm: B::Buffer,
    /// q_b and, with an indexer, its queries, over the same low-rank row.
    pub(crate) query: B::Matrix,
    /// Heads `[kv_lora_rank, qk_head_dim]`.
    pub(crate) absorb: B::Matrix,
    /// Heads `[v_head_dim, kv_lora_rank]`.
    pub(crate) expand: B::Matrix,
    pub(crate) output: B::Matrix,
    /// `None`: the selection of the DSA layer before this one is used.
    pub(crate) indexer: Option<Indexer<B>>,
}

/// What an indexer has beside its part of the fused projections.
pub(crate) struct Indexer<B: Backend> {
    pub(crate) norm: B::Buffer,
    pub(crate) norm_bias: B::Buffer,
    pub(crate) ape: B::Buffer,
}

/// The columns of a layer's projections.
struct Columns<Buf> {
    projected: Rows<Buf>,
    queries: Rows<Buf>,
    low_rank: Rows<Buf>,
    latents: Rows<Buf>,
    keys: Rows<Buf>,
    gates: Rows<Buf>,
    weights: Rows<Buf>,
    q: Rows<Buf>,
    index_q: Rows<Buf>,
}

impl<B: Backend> Dsa<B> {
    /// `scratch.x` to `scratch.y`; rows are appended to the spans' caches.
    #[allow(clippy::too_many_arguments)] // the block's surroundings, each used once
    pub(crate) fn run(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        scratch: &Scratch<B>,
        cache: &CacheShape,
        rows: usize,
        spans: Vec<DsaSpan<B::Buffer>>,
        (layer, probe): (usize, &mut dyn Probe),
    ) -> Result<()> {
        let mut slab = scratch.slab();
        let (rank, heads) = (config.kv_lora_rank, config.heads);
        let columns = self.columns(config, &mut slab, rows);
        let absorbed = slab.rows(rows, heads * rank);
        let mixed = slab.rows(rows, heads * rank);
        let values = slab.rows(rows, heads * config.v_head_dim);
        let x = Rows::dense(&scratch.x, rows, config.hidden_size);
        backend.linear(&Linear { out: columns.projected.clone(), x, matrix: self.input.clone() })?;
        self.enter(backend, config, cache, &columns, spans.clone())?;
        crate::glm::look(backend, probe, Point::Latents(layer), &columns.latents)?;
        let x = columns.low_rank.clone();
        backend.linear(&Linear { out: columns.queries.clone(), x, matrix: self.query.clone() })?;
        self.select(backend, config, scratch, cache, &columns, spans.clone())?;
        crate::glm::look_ids(backend, probe, Point::Pools(layer), &scratch.pools, rows * cache.pools_kept)?;
        backend.head_linear(&HeadLinear {
            out: absorbed.clone(),
            x: columns.q,
            stack: self.absorb.clone(),
        })?;
        backend.attend(&Attend {
            out: mixed.clone(),
            q: absorbed,
            picks: scratch.pools.clone(),
            pools_kept: cache.pools_kept,
            kv_lora_rank: rank,
            scale: 1.0 / (config.qk_head_dim as f32).sqrt(),
            kpool: config.index_kpool,
            page_rows: cache.page_rows,
            spans,
        })?;
        backend.head_linear(&HeadLinear { out: values.clone(), x: mixed, stack: self.expand.clone() })?;
        let y = Rows::dense(&scratch.y, rows, config.hidden_size);
        Ok(backend.linear(&Linear { out: y, x: values, matrix: self.output.clone() })?)
    }

    /// Where the projections go.
    fn columns(
        &self,
        config: &ModelConfig,
        slab: &mut crate::scratch::Slab<'_, B>,
        rows: usize,
    ) -> Columns<B::Buffer> {
        let index = if self.indexer.is_some() { config.index_head_dim } else { 0 };
        let index_heads = if self.indexer.is_some() { config.index_heads } else { 0 };
        let (q_rank, rank) = (config.q_lora_rank, config.kv_lora_rank);
        let projected = slab.rows(rows, q_rank + rank + 2 * index + index_heads);
        let q_width = config.heads * config.qk_head_dim;
        let queries = slab.rows(rows, q_width + index_heads * config.index_head_dim);
        Columns {
            low_rank: projected.columns(0, q_rank),
            latents: projected.columns(q_rank, rank),
            keys: projected.columns(q_rank + rank, index),
            gates: projected.columns(q_rank + rank + index, index),
            weights: projected.columns(q_rank + rank + 2 * index, index_heads),
            q: queries.columns(0, q_width),
            index_q: queries.columns(q_width, index_heads * config.index_head_dim),
            projected,
            queries,
        }
    }

    /// Norms what was projected and puts it into the caches. These operations are neighbours, so that a device may take them
    /// at once.
    fn enter(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        cache: &CacheShape,
        columns: &Columns<B::Buffer>,
        spans: Vec<DsaSpan<B::Buffer>>,
    ) -> Result<()> {
        for (part, weight) in [(&columns.low_rank, &self.query_norm), (&columns.latents, &self.latent_norm)] {
            let (out, x) = (part.clone(), part.clone());
            backend.rms_norm(&RmsNorm { out, x, weight: weight.clone(), epsilon: config.rms_norm_eps })?;
        }
        let mut append = DsaAppend {
            latents: columns.latents.clone(),
            keys: None,
            gates: None,
            ape: None,
            kpool: config.index_kpool,
            page_rows: cache.page_rows,
            ring_rows: cache.ring_rows,
            spans,
        };
        if let Some(indexer) = &self.indexer {
            backend.layer_norm(&LayerNorm {
                out: columns.keys.clone(),
                x: columns.keys.clone(),
                weight: indexer.norm.clone(),
                bias: indexer.norm_bias.clone(),
                epsilon: INDEX_NORM_EPSILON,
            })?;
            append.keys = Some(columns.keys.clone());
            append.gates = Some(columns.gates.clone());
            append.ape = Some(indexer.ape.clone());
        }
        Ok(backend.dsa_append(&append)?)
    }

    /// Leaves the selection in `scratch.pools`; without an indexer it is there.
    fn select(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        scratch: &Scratch<B>,
        cache: &CacheShape,
        columns: &Columns<B::Buffer>,
        spans: Vec<DsaSpan<B::Buffer>>,
    ) -> Result<()> {
        if self.indexer.is_none() {
            return Ok(());
        }
        Ok(backend.select_pools(&SelectPools {
            picks: scratch.pools.clone(),
            q: columns.index_q.clone(),
            weights: columns.weights.clone(),
            head_dim: config.index_head_dim,
            pools_kept: cache.pools_kept,
            kpool: config.index_kpool,
            page_rows: cache.page_rows,
            spans,
        })?)
    }
}
