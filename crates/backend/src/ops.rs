//! Every operation of the network, declared once.
//!
//! An operation is plain data: handles, sizes and constants. The table at the end makes the trait method
//! ([`Ops`]), the command that a recorder keeps ([`Op`]) and the entry of the conformance suite, so that none can
//! be added without the others. Shapes: `rows` first; `[rows, width]` of fp32 unless said otherwise.
//! Outputs never overlap inputs unless an argument is documented as *in place*.
//! Formulas: `reference/glm5_next.md`, section numbers with each operation.

use crate::backend::{Handle, Result};

/// A window of `rows` × `width` elements in a buffer: row `r` starts at element `first + r * stride`.
#[derive(Clone, Debug)]
pub struct Rows<Buf> {
    /// The memory.
    pub buffer: Buf,
    /// Element at which row 0 starts.
    pub first: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Elements of a row.
    pub width: usize,
    /// Rows.
    pub rows: usize,
}

impl<Buf: Clone> Rows<Buf> {
    /// `rows` dense rows from the buffer's start.
    pub fn dense(buffer: &Buf, rows: usize, width: usize) -> Self {
        Self { buffer: buffer.clone(), first: 0, stride: width, width, rows }
    }

    /// Columns `first..first + width` of each row.
    #[must_use]
    pub fn columns(&self, first: usize, width: usize) -> Self {
        debug_assert!(first + width <= self.width);
        Self {
            buffer: self.buffer.clone(),
            first: self.first + first,
            stride: self.stride,
            width,
            rows: self.rows,
        }
    }

    /// Rows `first..first + rows`.
    #[must_use]
    pub fn span(&self, first: usize, rows: usize) -> Self {
        debug_assert!(first + rows <= self.rows);
        Self { first: self.first + first * self.stride, rows, ..self.clone() }
    }
}

/// `out[r] = table[tokens[r]]`, decoded to fp32 exactly (affine: `fma(scale, code, bias)`).
#[derive(Clone, Debug)]
pub struct Embed<Buf, Mat> {
    /// `[rows, hidden]`.
    pub out: Rows<Buf>,
    /// `[vocabulary, hidden]`.
    pub table: Mat,
    /// U32, at least `rows` token ids, each below the table's rows.
    pub tokens: Buf,
}

/// `out[r] = x[index[r]]`.
#[derive(Clone, Debug)]
pub struct GatherRows<Buf> {
    /// `[rows, width]`.
    pub out: Rows<Buf>,
    /// `[any, width]`.
    pub x: Rows<Buf>,
    /// U32, `rows` row numbers of `x`.
    pub index: Buf,
}

/// Copies each row of `x` `[rows, hidden]` into every stream of `streams` `[rows, streams · hidden]`. Section 1.
#[derive(Clone, Debug)]
pub struct SpreadStreams<Buf> {
    /// `[rows, streams · hidden]`.
    pub streams: Rows<Buf>,
    /// `[rows, hidden]`.
    pub x: Rows<Buf>,
}

/// The unweighted mean of the streams, summed in ascending stream order. Section 4.
#[derive(Clone, Debug)]
pub struct MeanStreams<Buf> {
    /// `[rows, hidden]`.
    pub out: Rows<Buf>,
    /// `[rows, streams · hidden]`.
    pub streams: Rows<Buf>,
}

/// Hyper-connections before a block: the streams' mix coefficients and the collapsed row. Section 4, `hc_pre`.
/// Everything in fp32. `n` = `streams.width / collapsed.width`.
#[derive(Clone, Debug)]
pub struct HcPre<Buf, Mat> {
    /// `[rows, hidden]`: `Σ_s pre[s] · S[s]`.
    pub collapsed: Rows<Buf>,
    /// `[rows, n + n · n]`: `post`, then `C[i, j]` row-major (i the source stream, j the destination).
    pub mix: Rows<Buf>,
    /// `[rows, n · hidden]`.
    pub streams: Rows<Buf>,
    /// `[2n + n · n, n · hidden]`, uploaded with full precision.
    pub function: Mat,
    /// F32 `[2n + n · n]`.
    pub base: Buf,
    /// F32 `[3]`.
    pub scale: Buf,
    /// Epsilon of the RMS over all streams.
    pub norm_epsilon: f32,
    /// Epsilon of `pre` and of the Sinkhorn normalisation.
    pub hc_epsilon: f32,
    /// Sinkhorn rounds.
    pub rounds: usize,
}

/// Hyper-connections after a block: `S'[j] = post[j] · y + Σ_i C[i, j] · S[i]`, i ascending. Section 4.
#[derive(Clone, Debug)]
pub struct HcPost<Buf> {
    /// `[rows, n · hidden]`, in place.
    pub streams: Rows<Buf>,
    /// `[rows, hidden]`.
    pub y: Rows<Buf>,
    /// As [`HcPre::mix`].
    pub mix: Rows<Buf>,
}

/// `out = weight · x / sqrt(mean(x²) + epsilon)` over each row. `out` may be `x`.
#[derive(Clone, Debug)]
pub struct RmsNorm<Buf> {
    /// `[rows, width]`.
    pub out: Rows<Buf>,
    /// `[rows, width]`.
    pub x: Rows<Buf>,
    /// F32 `[width]`.
    pub weight: Buf,
    /// Added to the mean square.
    pub epsilon: f32,
}

/// Layer norm with weight and bias over each row. Section 6.3. `out` may be `x`.
#[derive(Clone, Debug)]
pub struct LayerNorm<Buf> {
    /// `[rows, width]`.
    pub out: Rows<Buf>,
    /// `[rows, width]`.
    pub x: Rows<Buf>,
    /// F32 `[width]`.
    pub weight: Buf,
    /// F32 `[width]`.
    pub bias: Buf,
    /// Added to the variance.
    pub epsilon: f32,
}

/// `out[r] = W · x[r]`.
#[derive(Clone, Debug)]
pub struct Linear<Buf, Mat> {
    /// `[rows, out]`.
    pub out: Rows<Buf>,
    /// `[rows, in]`.
    pub x: Rows<Buf>,
    /// `[out, in]`.
    pub matrix: Mat,
}

/// One matrix for each head: `out[r, h] = W[h] · x[r, h]`, heads side by side in a row.
#[derive(Clone, Debug)]
pub struct HeadLinear<Buf, Mat> {
    /// `[rows, heads · out]`.
    pub out: Rows<Buf>,
    /// `[rows, heads · in]`.
    pub x: Rows<Buf>,
    /// A stack of `heads` matrices `[out, in]`.
    pub stack: Mat,
}

/// One expert's matrix for each (row, pick): pair `p = r · picks_per_row + j` uses expert `picks[p]`.
#[derive(Clone, Debug)]
pub struct ExpertLinear<Buf, Mat> {
    /// `[rows · picks_per_row, out]`.
    pub out: Rows<Buf>,
    /// `[rows, in]` (each row feeds all its pairs) or `[rows · picks_per_row, in]`.
    pub x: Rows<Buf>,
    /// A stack of matrices `[out, in]`, indexed by slot.
    pub stack: Mat,
    /// U32 `[rows · picks_per_row]`: expert ids.
    pub picks: Buf,
    /// Experts that a row uses.
    pub picks_per_row: usize,
    /// U32 `[experts]`: the slot of the stack that holds an expert, or [`ABSENT`]. The identity when all are resident.
    /// A pair whose expert is absent is left out: its row of `out` stays as it is.
    pub slots: Buf,
}

/// In a slot table: no slot holds the expert now.
pub const ABSENT: u32 = u32::MAX;

/// `out = silu(min(gate, limit)) · clamp(up, -limit, limit)`. Section 7. `out` may be `gate` or `up`.
#[derive(Clone, Debug)]
pub struct SwiGlu<Buf> {
    /// `[rows, width]`.
    pub out: Rows<Buf>,
    /// `[rows, width]`.
    pub gate: Rows<Buf>,
    /// `[rows, width]`.
    pub up: Rows<Buf>,
    /// The bound.
    pub limit: f32,
}

/// The router's choice. Section 7. `s = σ(logits)`; the experts with the best `s + bias` (score descending, id
/// ascending), inside the best groups when `groups > 1`; weight `s / (Σ s + 1e-20) · scaling` (no division when
/// `normalise` is false). Picks are written in ascending expert id, so that later sums have one order.
#[derive(Clone, Debug)]
pub struct Route<Buf> {
    /// U32 `[rows · picks_per_row]`, ascending inside a row.
    pub picks: Buf,
    /// `[rows, picks_per_row]`.
    pub weights: Rows<Buf>,
    /// `[rows, experts]`.
    pub logits: Rows<Buf>,
    /// F32 `[experts]`.
    pub bias: Buf,
    /// Experts that a row uses.
    pub picks_per_row: usize,
    /// Groups of experts.
    pub groups: usize,
    /// Groups that a row may use.
    pub groups_kept: usize,
    /// Whether weights are divided by their sum.
    pub normalise: bool,
    /// Factor of the weights.
    pub scaling: f32,
}

/// `out[r] = Σ_j weights[r, j] · pairs[r · picks_per_row + j] + shared[r]`: j ascending from zero, shared last.
#[derive(Clone, Debug)]
pub struct Combine<Buf> {
    /// `[rows, hidden]`.
    pub out: Rows<Buf>,
    /// `[rows · picks_per_row, hidden]`.
    pub pairs: Rows<Buf>,
    /// `[rows, picks_per_row]`.
    pub weights: Rows<Buf>,
    /// `[rows, hidden]`.
    pub shared: Rows<Buf>,
}

/// A sequence's part of a KDA operation.
///
/// `window` and `log` are sized for `drafts_max` drafts. A forward first uses the `logged` rows (drafts that were
/// accepted after the last forward), then its own `sure` rows; the state then stands there. Its `drafts` rows give
/// outputs and are logged; they leave no other trace.
#[derive(Clone, Debug)]
pub struct KdaSpan<Buf> {
    /// Row of the batch at which the span starts.
    pub first_row: usize,
    /// Logged rows that were accepted: the state folds them first.
    pub logged: usize,
    /// Rows that are decided.
    pub sure: usize,
    /// Rows that are proposals.
    pub drafts: usize,
    /// F32 `[taps - 1 + drafts_max, 3 · channels]`: rows of `u` before the convolution. Rows `0..taps - 1` are those
    /// before the state's position, oldest first (zeros before the sequence's start), then the logged drafts.
    pub window: Buf,
    /// F32 `[heads, head_dim (keys), head_dim (values)]`.
    pub state: Buf,
    /// F32 `[drafts_max, 3 · channels + heads]`: normalised k, v, decay factors, beta of the drafts.
    pub log: Buf,
}

/// Causal depthwise convolution over each sequence's own rows, then SiLU. Section 5, step 2:
/// `silu(Σ_j taps[ch, j] · u[t - 3 + j, ch])`, tap ascending from zero with fma.
/// Row `t - 1` of a span's first row is its last logged row, or the newest of `window`.
/// Afterwards `window` holds the last `taps - 1` rows up to the last sure row, then the draft rows.
#[derive(Clone, Debug)]
pub struct KdaConv<Buf> {
    /// `[rows, 3 · channels]`.
    pub out: Rows<Buf>,
    /// `[rows, 3 · channels]`: q, k and v projections.
    pub u: Rows<Buf>,
    /// F32 `[3 · channels, taps]`.
    pub taps: Buf,
    /// Taps of the kernel.
    pub tap_count: usize,
    /// The sequences' parts (disjoint rows).
    pub spans: Vec<KdaSpan<Buf>>,
}

/// Prepares a KDA scan, row by row, in place. Section 5, steps 4 to 6:
/// q and k are l2-normalised per head (`x / sqrt(Σx² + 1e-6)`, q also times `head_dim^-0.5`),
/// `decay` becomes `exp(g)` with `g = bound · σ(exp(a_log[h]) · (f + dt_bias))`, or
/// `g = -exp(a_log[h]) · softplus(f + dt_bias)` without a bound; `beta` becomes `σ(beta)`.
#[derive(Clone, Debug)]
pub struct KdaPrepare<Buf> {
    /// `[rows, 3 · channels]`: q, k, v; q and k in place.
    pub qkv: Rows<Buf>,
    /// `[rows, channels]`: `f`, then the decay factor, in place.
    pub decay: Rows<Buf>,
    /// `[rows, heads]`, in place.
    pub beta: Rows<Buf>,
    /// F32 `[channels]`.
    pub dt_bias: Buf,
    /// F32 `[heads]`.
    pub a_log: Buf,
    /// Key and value width of a head.
    pub head_dim: usize,
    /// Lower bound of `g`.
    pub lower_bound: Option<f32>,
}

/// The delta-rule recurrence, token by token. Section 5, step 7, for each head with state `M`:
/// `M = M · decay[:, None]; r = kᵀM; d = beta · (v - r); M += k ⊗ d; o = qᵀM`.
/// Sums over keys ascend in a fixed tree. Spans as [`KdaSpan`] says.
#[derive(Clone, Debug)]
pub struct KdaScan<Buf> {
    /// `[rows, channels]`.
    pub out: Rows<Buf>,
    /// As prepared.
    pub qkv: Rows<Buf>,
    /// As prepared.
    pub decay: Rows<Buf>,
    /// As prepared.
    pub beta: Rows<Buf>,
    /// Key and value width of a head.
    pub head_dim: usize,
    /// The sequences' parts.
    pub spans: Vec<KdaSpan<Buf>>,
}

/// `out = weight · o / sqrt(mean(o²) + epsilon) · σ(gate)` per head. Section 5, step 8. `out` may be `o`.
#[derive(Clone, Debug)]
pub struct GatedNorm<Buf> {
    /// `[rows, channels]`.
    pub out: Rows<Buf>,
    /// `[rows, channels]`.
    pub o: Rows<Buf>,
    /// `[rows, channels]`.
    pub gate: Rows<Buf>,
    /// F32 `[head_dim]`.
    pub weight: Buf,
    /// Width of a head.
    pub head_dim: usize,
    /// Added to the mean square.
    pub epsilon: f32,
}

/// A page of a DSA layer's cache: `page_rows` positions.
#[derive(Clone, Debug)]
pub struct Page<Buf> {
    /// Cache element, `[page_rows, kv_lora_rank]`: latents.
    pub latents: Buf,
    /// Cache element, `[page_rows / kpool, index_head_dim]`: keys of complete pools.
    pub pooled: Buf,
}

/// A sequence's part of a DSA operation.
#[derive(Clone, Debug)]
pub struct DsaSpan<Buf> {
    /// Row of the batch at which the span starts.
    pub first_row: usize,
    /// Rows (sure and drafts alike).
    pub rows: usize,
    /// Position of the first row in its sequence.
    pub position: usize,
    /// Pages of the sequence, enough for every row.
    pub pages: Vec<Page<Buf>>,
    /// F32 `[ring_rows, 2 · index_head_dim]`: `k` and `γ` of position `p` in row `p mod ring_rows`, with
    /// `ring_rows >= kpool - 1 + drafts_max + 1`.
    pub ring: Buf,
}

/// Appends rows to a DSA layer's cache: latents at their positions, and the key of each pool that becomes complete.
/// Section 6.3: per channel `a = softmax_j(γ_j + ape_j)`, `key = Σ_j a_j · k_j`, j ascending. Pools stand at absolute
/// positions. Rows of uncommitted drafts are overwritten by the next forward.
#[derive(Clone, Debug)]
pub struct DsaAppend<Buf> {
    /// `[rows, kv_lora_rank]`, after the norm.
    pub latents: Rows<Buf>,
    /// `[rows, index_head_dim]`: `k` after the layer norm. `None` when the layer has no indexer of its own.
    pub keys: Option<Rows<Buf>>,
    /// `[rows, index_head_dim]`: `γ`.
    pub gates: Option<Rows<Buf>>,
    /// F32 `[kpool, index_head_dim]`.
    pub ape: Option<Buf>,
    /// Tokens of a pool.
    pub kpool: usize,
    /// Positions of a page.
    pub page_rows: usize,
    /// Rows of a span's ring.
    pub ring_rows: usize,
    /// The sequences' parts.
    pub spans: Vec<DsaSpan<Buf>>,
}

/// Which pools a row attends to. Section 6.3: of the complete pools visible to the row at position `t` (those with
/// `p < (t + 1) / kpool`), the `pools_kept` with the best score (descending, pool ascending), all when they are fewer.
/// `score = Σ_h (weights[h] · heads^-0.5) · max(0, (q[h] · key) · head_dim^-0.5)`, h ascending, fp32.
#[derive(Clone, Debug)]
pub struct SelectPools<Buf> {
    /// U32 `[rows, pools_kept]`: pool numbers ascending, then `u32::MAX`.
    pub picks: Buf,
    /// `[rows, heads · index_head_dim]`.
    pub q: Rows<Buf>,
    /// `[rows, heads]`.
    pub weights: Rows<Buf>,
    /// Width of an indexer head.
    pub head_dim: usize,
    /// Pools that a row may pick.
    pub pools_kept: usize,
    /// Tokens of a pool.
    pub kpool: usize,
    /// Positions of a page.
    pub page_rows: usize,
    /// The sequences' parts.
    pub spans: Vec<DsaSpan<Buf>>,
}

/// Absorbed latent attention. Section 6.2. A row's list is the positions of its picked pools, ascending, then those of
/// the incomplete pool up to itself. `p = softmax(q[h] · c_n · scale)`, `out[h] = Σ p_n c_n`: blocks of 64 entries of
/// the row's own list, running maximum and sum folded in block order.
#[derive(Clone, Debug)]
pub struct Attend<Buf> {
    /// `[rows, heads · kv_lora_rank]`.
    pub out: Rows<Buf>,
    /// `[rows, heads · kv_lora_rank]`.
    pub q: Rows<Buf>,
    /// As [`SelectPools::picks`].
    pub picks: Buf,
    /// Pools that a row may pick.
    pub pools_kept: usize,
    /// Width of a latent.
    pub kv_lora_rank: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Tokens of a pool.
    pub kpool: usize,
    /// Positions of a page.
    pub page_rows: usize,
    /// The sequences' parts.
    pub spans: Vec<DsaSpan<Buf>>,
}

/// The best logits of each row, for sampling without the whole row: any NaN first, then value descending, id ascending
/// among equals (the two zeros are equal). Values are the logits' own bits.
#[derive(Clone, Debug)]
pub struct TopLogits<Buf> {
    /// U32 `[rows · count]`: ids, the best first.
    pub ids: Buf,
    /// `[rows, count]`: their logits.
    pub values: Rows<Buf>,
    /// `[rows, vocabulary]`.
    pub logits: Rows<Buf>,
    /// How many, 1 to 64, at most the vocabulary.
    pub count: usize,
}

/// A wrapper that takes operations as data. Whoever implements it has every method of [`Ops`].
pub trait Intercept {
    /// As [`Ops::Buffer`].
    type Buffer: Handle;
    /// As [`Ops::Matrix`].
    type Matrix: Handle;

    /// Takes one operation.
    fn intercept(&mut self, op: Op<Self::Buffer, Self::Matrix>) -> Result<()>;
}

macro_rules! ops {
    ($( $name:ident $args:ident<$($part:ident),*> => $file:ident; )*) => {
        /// The operations. One method for each entry of the table; arguments are documented on their types.
        pub trait Ops {
            /// A handle of device memory.
            type Buffer: Handle;
            /// A handle of an uploaded matrix or stack.
            type Matrix: Handle;
            $(
                #[doc = concat!("Queues [`", stringify!($args), "`].")]
                fn $name(&mut self, op: &$args<$(Self::$part),*>) -> Result<()>;
            )*
        }

        /// Any operation, as data.
        #[derive(Clone, Debug)]
        pub enum Op<Buffer, Matrix> {
            $(
                #[doc = concat!("[`", stringify!($args), "`].")]
                $args($args<$($part),*>),
            )*
        }

        impl<Buffer: Handle, Matrix: Handle> Op<Buffer, Matrix> {
            /// The operation's name in the table.
            pub fn name(&self) -> &'static str {
                match self { $( Self::$args(_) => stringify!($name), )* }
            }

            /// Queues it on a backend.
            pub fn run<B: Ops<Buffer = Buffer, Matrix = Matrix> + ?Sized>(&self, backend: &mut B) -> Result<()> {
                match self { $( Self::$args(op) => backend.$name(op), )* }
            }
        }

        /// Names of all operations, in the table's order.
        pub const NAMES: &[&str] = &[$( stringify!($name) ),*];

        /// How each operation is checked by the conformance suite: by the function of its name in a file of `law`.
        pub(crate) fn checks<B: crate::Backend>() -> Vec<(&'static str, crate::law::Check<B>)> {
            vec![$( (stringify!($name), crate::law::$file::$name::<B>) ),*]
        }

        impl<T: Intercept> Ops for T {
            type Buffer = T::Buffer;
            type Matrix = T::Matrix;
            $(
                fn $name(&mut self, op: &$args<$(Self::$part),*>) -> Result<()> {
                    self.intercept(Op::$args(op.clone()))
                }
            )*
        }
    };
}

ops! {
    embed Embed<Buffer, Matrix> => products;
    gather_rows GatherRows<Buffer> => streams;
    spread_streams SpreadStreams<Buffer> => streams;
    mean_streams MeanStreams<Buffer> => streams;
    hc_pre HcPre<Buffer, Matrix> => streams;
    hc_post HcPost<Buffer> => streams;
    rms_norm RmsNorm<Buffer> => norms;
    layer_norm LayerNorm<Buffer> => norms;
    linear Linear<Buffer, Matrix> => products;
    head_linear HeadLinear<Buffer, Matrix> => products;
    expert_linear ExpertLinear<Buffer, Matrix> => products;
    swiglu SwiGlu<Buffer> => feed;
    route Route<Buffer> => feed;
    combine Combine<Buffer> => feed;
    kda_conv KdaConv<Buffer> => recurrent;
    kda_prepare KdaPrepare<Buffer> => norms;
    kda_scan KdaScan<Buffer> => recurrent;
    gated_norm GatedNorm<Buffer> => norms;
    dsa_append DsaAppend<Buffer> => attention;
    select_pools SelectPools<Buffer> => attention;
    attend Attend<Buffer> => attention;
    top_logits TopLogits<Buffer> => sampling;
}
