// What a block of the network left, and how four streams take it. Each value is made in the order of feed.cu and hyper.cu.
#pragma once
#include "common/base.cuh"

#define STREAMS 4

// A site before the mix. No `y`: streams are as they should be. No `mix`: each stream becomes a copy of `y`.
struct Left {
    float* y;
    const float* mix;
    const float* pairs;
    const float* weights;
    const float* shared;
    u64 y_stride, mix_stride, pairs_stride, weights_stride, shared_stride;
    u32 picks;
};

// One column of what a block of the network left: y, or the sum over the row's experts.
DEVICE float left_column(const Left& left, u64 row, u32 column) {
    if (left.picks == 0) return left.y[row * left.y_stride + column];
    const float* weights = left.weights + row * left.weights_stride;
    const float* pairs = left.pairs + row * left.picks * left.pairs_stride + column;
    float shared = left.shared[row * left.shared_stride + column], total = 0.0f;
    for (u32 first = 0; first < left.picks; first += 8) {
        float weight[8], pair[8];
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            bool there = first + j < left.picks;
            weight[j] = there ? weights[first + j] : 0.0f;
            pair[j] = there ? pairs[(first + j) * left.pairs_stride] : 0.0f;
        }
#pragma unroll
        for (u32 j = 0; j < 8; ++j)
            if (first + j < left.picks) total = __fmaf_rn(weight[j], pair[j], total);
    }
    return __fadd_rn(total, shared);
}

// One column of the streams after the mix: what they were, and y.
DEVICE void mix_column(float (&streams)[STREAMS], const float (&mix)[STREAMS + STREAMS * STREAMS], float y) {
    float before[STREAMS];
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) before[j] = streams[j];
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) {
        float total = __fmul_rn(mix[j], y);
#pragma unroll
        for (u32 k = 0; k < STREAMS; ++k) total = __fmaf_rn(mix[STREAMS + k * STREAMS + j], before[k], total);
        streams[j] = total;
    }
}

// Leaves a column of a row: `streams` has its place in memory, `values` what it holds there afterwards.
DEVICE void leave_column(float (&values)[STREAMS], float* streams, const Left& left, u64 row, u32 column, u32 hidden) {
    float mix[STREAMS + STREAMS * STREAMS];
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) values[j] = left.mix || !left.y ? streams[j * hidden + column] : 0.0f;
    if (!left.y) return;
    if (left.mix) {
#pragma unroll
        for (u32 j = 0; j < STREAMS + STREAMS * STREAMS; ++j) mix[j] = left.mix[row * left.mix_stride + j];
    }
    float y = left_column(left, row, column);
    if (left.picks > 0) left.y[row * left.y_stride + column] = y;
    if (left.mix) {
        mix_column(values, mix, y);
    } else {
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) values[j] = y;
    }
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) streams[j * hidden + column] = values[j];
}
