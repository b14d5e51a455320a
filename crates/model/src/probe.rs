//! Looking at the inside of a forward, for goldens.
//!
//! A probe makes the model wait and copy at each point that it wants, and changes no value.

/// A place in the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// Hyper-connection coefficients of the attention site, `[rows, n + n · n]`.
    AttentionMix(usize),
    /// Output of the attention block, `[rows, hidden]`.
    Attention(usize),
    /// Streams after the attention site, `[rows, n · hidden]`.
    AttentionStreams(usize),
    /// Hyper-connection coefficients of the feed-forward site.
    FeedMix(usize),
    /// Output of the feed-forward block.
    Feed(usize),
    /// Streams after the layer.
    Streams(usize),
    /// Router logits, `[rows, experts]`.
    RouterLogits(usize),
    /// Picked experts, `[rows, experts_per_token]`, ascending.
    Picks(usize),
    /// Their weights.
    PickWeights(usize),
    /// The shared expert's output.
    Shared(usize),
    /// Latents after the norm, `[rows, kv_lora_rank]`.
    Latents(usize),
    /// Selected pools, `[rows, pools]`, ascending, then `u32::MAX`.
    Pools(usize),
    /// The first span's KDA state after its sure rows, `[heads, key, value]`.
    KdaState(usize),
    /// The first span's convolution window, `[taps - 1, 3 · channels]`, oldest first.
    KdaWindow(usize),
    /// The row that the head reads, `[wanted rows, hidden]`.
    FinalNorm,
}

/// What a probe is given.
#[derive(Clone, Debug)]
pub enum Seen {
    /// fp32 values.
    Floats(Vec<f32>),
    /// Token, expert or pool numbers.
    Ids(Vec<u32>),
}

/// Somebody who looks.
pub trait Probe {
    /// Whether this point is of interest.
    fn wants(&self, point: Point) -> bool;
    /// Takes what was there.
    fn take(&mut self, point: Point, seen: Seen);
}

/// Nobody looks.
pub struct Nobody;

impl Probe for Nobody {
    fn wants(&self, _point: Point) -> bool {
        false
    }

    fn take(&mut self, _point: Point, _seen: Seen) {}
}
