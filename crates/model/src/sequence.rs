//! What a sequence is between two forwards.
//!
//! State only ever folds committed rows: the KDA states stand at `folded`, and the rows of accepted drafts between
//! `folded` and `len` wait in the log until the next forward folds them. `commit` is the only way forward.

use flint_backend::ops::{DsaSpan, KdaSpan, Page};
use flint_backend::{Backend, Element};
use flint_weights::ModelConfig;
use flint_weights::config::Attention;

use crate::language::{Error, Result, SequenceId};

/// Positions of a page, when a pool's size divides them.
const PAGE_ROWS: usize = 256;

/// Sizes of the caches, the same for every sequence of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheShape {
    /// Positions of a page.
    pub(crate) page_rows: usize,
    /// Rows of the ring of raw indexer keys.
    pub(crate) ring_rows: usize,
    /// Pools that a row may pick.
    pub(crate) pools_kept: usize,
    /// Drafts of one span.
    pub(crate) drafts: usize,
}

impl CacheShape {
    pub(crate) fn new(config: &ModelConfig, drafts: usize) -> Self {
        Self {
            page_rows: PAGE_ROWS.div_ceil(config.index_kpool) * config.index_kpool,
            ring_rows: config.index_kpool + drafts,
            pools_kept: config.index_topk / config.index_kpool,
            drafts,
        }
    }
}

/// A KDA layer's state.
pub(crate) struct KdaState<B: Backend> {
    pub(crate) window: B::Buffer,
    pub(crate) state: B::Buffer,
    pub(crate) log: B::Buffer,
}

/// A DSA layer's cache.
pub(crate) struct DsaState<B: Backend> {
    pub(crate) pages: Vec<Page<B::Buffer>>,
    pub(crate) ring: B::Buffer,
}

/// A forward that waits for its commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pending {
    pub(crate) sure: usize,
    pub(crate) drafts: usize,
}

/// A sequence.
pub(crate) struct Sequence<B: Backend> {
    /// Committed rows.
    pub(crate) len: usize,
    /// Where the KDA states stand; `folded <= len`.
    pub(crate) folded: usize,
    pub(crate) pending: Option<Pending>,
    /// A device failure left the state half written.
    pub(crate) failed: Option<String>,
    /// In the order of KDA layers.
    pub(crate) kda: Vec<KdaState<B>>,
    /// In the order of DSA layers.
    pub(crate) dsa: Vec<DsaState<B>>,
}

impl<B: Backend> Sequence<B> {
    /// An empty sequence.
    pub(crate) fn open(backend: &mut B, config: &ModelConfig, shape: &CacheShape) -> Result<Self> {
        let count = |kind| config.attention.iter().filter(|a| **a == kind).count();
        let channels = config.linear_width();
        let head = config.linear_head_dim;
        let mut kda = Vec::with_capacity(count(Attention::Kda));
        for _ in 0..count(Attention::Kda) {
            let window = (config.linear_conv_taps - 1 + shape.drafts) * 3 * channels;
            let log = shape.drafts * (3 * channels + config.linear_heads);
            kda.push(KdaState {
                window: backend.allocate(Element::F32, window)?,
                state: backend.allocate(Element::F32, channels * head)?,
                log: backend.allocate(Element::F32, log)?,
            });
        }
        let mut dsa = Vec::with_capacity(count(Attention::Dsa));
        for _ in 0..count(Attention::Dsa) {
            let ring = backend.allocate(Element::F32, shape.ring_rows * 2 * config.index_head_dim)?;
            dsa.push(DsaState { pages: Vec::new(), ring });
        }
        Ok(Self { len: 0, folded: 0, pending: None, failed: None, kda, dsa })
    }

    /// Makes room for `rows` more rows.
    pub(crate) fn reserve(
        &mut self,
        backend: &mut B,
        config: &ModelConfig,
        shape: &CacheShape,
        rows: usize,
    ) -> Result<()> {
        let pages = (self.len + rows).div_ceil(shape.page_rows);
        let element = backend.cache_element();
        for layer in &mut self.dsa {
            while layer.pages.len() < pages {
                layer.pages.push(Page {
                    latents: backend.allocate(element, shape.page_rows * config.kv_lora_rank)?,
                    pooled: backend
                        .allocate(element, shape.page_rows / config.index_kpool * config.index_head_dim)?,
                });
            }
        }
        Ok(())
    }

    /// This sequence's part of a KDA operation.
    pub(crate) fn kda_span(&self, layer: usize, first_row: usize, rows: Pending) -> KdaSpan<B::Buffer> {
        let state = &self.kda[layer];
        KdaSpan {
            first_row,
            logged: self.len - self.folded,
            sure: rows.sure,
            drafts: rows.drafts,
            window: state.window.clone(),
            state: state.state.clone(),
            log: state.log.clone(),
        }
    }

    /// This sequence's part of a DSA operation.
    pub(crate) fn dsa_span(&self, layer: usize, first_row: usize, rows: usize) -> DsaSpan<B::Buffer> {
        let state = &self.dsa[layer];
        DsaSpan { first_row, rows, position: self.len, pages: state.pages.clone(), ring: state.ring.clone() }
    }

    /// Makes the pending sure rows and the first `accepted` drafts part of the sequence.
    pub(crate) fn commit(&mut self, sequence: SequenceId, accepted: usize) -> Result<()> {
        let refused = |what: String| Error::Commit { sequence, what };
        if let Some(why) = &self.failed {
            return Err(refused(format!("{why}; close it")));
        }
        let pending = self.pending.ok_or_else(|| refused("no forward waits for a commit".into()))?;
        if accepted > pending.drafts {
            return Err(refused(format!("{accepted} drafts accepted of {}", pending.drafts)));
        }
        self.folded = self.len + pending.sure;
        self.len = self.folded + accepted;
        self.pending = None;
        Ok(())
    }
}
