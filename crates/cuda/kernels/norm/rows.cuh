// Norms of a row by a block. A thread takes every blockDim-th element, ascending, in one chain; the number of threads follows
// from the width (`row_threads` in src/op/norm.rs).
#pragma once
#include "common/base.cuh"
#include "common/factors.cuh"
#include "common/reduce.cuh"

// Elements that a thread keeps: those of the widest usual row.
#define KEPT 8

// A thread's elements of a row, all asked for at once; zeros behind `width`.
DEVICE void keep_row(float (&kept)[KEPT], const float* x, u32 width) {
#pragma unroll
    for (u32 k = 0; k < KEPT; ++k) {
        u32 i = threadIdx.x + k * blockDim.x;
        kept[k] = i < width ? x[i] : 0.0f;
    }
}

// Adds a thread's other elements to its chain, ascending.
template <typename Add> DEVICE float chain_row(const float (&kept)[KEPT], const float* x, u32 width, Add add) {
    float chain = 0.0f;
#pragma unroll
    for (u32 k = 0; k < KEPT; ++k)
        if (threadIdx.x + k * blockDim.x < width) chain = add(chain, kept[k]);
    for (u32 i = threadIdx.x + KEPT * blockDim.x; i < width; i += blockDim.x) chain = add(chain, x[i]);
    return chain;
}

// Visits a thread's elements with their values.
template <typename Visit> DEVICE void each_element(const float (&kept)[KEPT], const float* x, u32 width, Visit visit) {
#pragma unroll
    for (u32 k = 0; k < KEPT; ++k) {
        u32 i = threadIdx.x + k * blockDim.x;
        if (i < width) visit(i, kept[k], k);
    }
    for (u32 i = threadIdx.x + KEPT * blockDim.x; i < width; i += blockDim.x) visit(i, x[i], KEPT);
}

// `out` may be `x`: an element is written by the thread that reads it. Weights are asked for before `wait`.
template <typename Wait>
DEVICE void rms_row(float* out, const float* x, const float* weight, u32 width, float epsilon, float* room, Wait wait) {
    float kept[KEPT], weights[KEPT];
    keep_row(weights, weight, width);
    wait();
    keep_row(kept, x, width);
    float chain = chain_row(kept, x, width, [](float sum, float value) { return __fmaf_rn(value, value, sum); });
    float factor = rms_factor(block_sum(chain, room), width, epsilon);
    each_element(kept, x, width, [&](u32 i, float value, u32 k) {
        out[i] = __fmul_rn(__fmul_rn(value, factor), k < KEPT ? weights[k] : weight[i]);
    });
}
