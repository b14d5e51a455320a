// The causal depthwise convolution of a KDA layer, and its window of rows from before.
#include "common/base.cuh"
#include "common/maths.cuh"
#include "common/parts.cuh"

#define MAX_TAPS 8
// Rows of a chunk: as in src/op/conv.rs. At least MAX_TAPS - 1, so that only a part's first chunk reads its window.
#define CHUNK_ROWS 32
// Rows that a thread reads together.
#define TOGETHER 8

// Channel `channel` of a part: its rows in the batch and the row before them in the window.
struct Channel {
    const float* u;
    u64 u_stride;
    float* window;
    u32 width;
    // Rows of the window before the part's first.
    u32 before;

    // The value `source` rows after the window's first row.
    __device__ __forceinline__ float at(u32 source) const {
        return source < before ? window[(u64)source * width] : u[(source - before) * u_stride];
    }
};

// Rows `first..last` of a channel: a window of registers slides over them.
template <int TAPS>
DEVICE void convolve(const Channel& channel, float* out, u64 out_stride, const float* taps, u32 tap_count,
                                         u32 first, u32 last) {
    float weight[TAPS], past[TAPS];
    u32 count = TAPS == 4 ? 4 : tap_count;
#pragma unroll
    for (int j = 0; j < TAPS; ++j) weight[j] = j < count ? taps[j] : 0.0f;
    // Position of row `first`, counted from the window's first row, is `before + first`.
#pragma unroll
    for (int j = 0; j < TAPS; ++j) past[j] = j + 1 < count ? channel.at(channel.before + first + j + 1 - count) : 0.0f;
    // All of a group are asked for before one is waited for.
    auto group = [&](u32 row, u32 here) {
        float fresh[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i) fresh[i] = i < here ? channel.u[(row + i) * channel.u_stride] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i) {
            if (i >= here) break;
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                if (j + 1 < count) total = __fmaf_rn(weight[j], past[j], total);
                if (j + 1 == count) total = __fmaf_rn(weight[j], fresh[i], total);
            }
#pragma unroll
            for (int j = 0; j + 1 < TAPS; ++j) past[j] = j + 2 < count ? past[j + 1] : fresh[i];
            out[(row + i) * out_stride] = silu(total);
        }
    };
    u32 row = first;
    for (; row + TOGETHER <= last; row += TOGETHER) group(row, TOGETHER);
    if (row < last) group(row, last - row);
}

// Grid: chunks of rows × pieces of 256 channels. A thread has a channel to itself: what it reads of the window it reads
// before it writes there.
KERNEL kda_conv(float* out, u32 out_stride, const float* u, u32 u_stride, const float* taps,
                                    u32 tap_count, u32 width, const KdaPart* parts, const Chunk* chunks) {
    Chunk chunk = chunks[blockIdx.x];
    u32 at = blockIdx.y * blockDim.x + threadIdx.x;
    if (chunk.part == NO_PART || at >= width) return;
    KdaPart part = parts[chunk.part];
    u32 back = tap_count - 1, rows = part.sure + part.drafts;
    Channel channel = {u + (u64)part.first_row * u_stride + at, u_stride, part.window + at, width, back + part.logged};
    u32 last = min(chunk.first + CHUNK_ROWS, rows);
    float* to = out + (u64)part.first_row * out_stride + at;
    const float* weights = taps + (u64)at * tap_count;
    if (tap_count == 4) {
        convolve<4>(channel, to, out_stride, weights, 4, chunk.first, last);
    } else {
        convolve<MAX_TAPS>(channel, to, out_stride, weights, tap_count, chunk.first, last);
    }
    if (chunk.first != 0) return;
    // The window moves to the last rows before the state, then the drafts. A row of it comes from a later one of the old
    // window or from the batch, so ascending order is safe.
    for (u32 slot = 0; slot < back + part.drafts; ++slot) {
        channel.window[(u64)slot * width] = channel.at(channel.before + part.sure + slot - back);
    }
}
