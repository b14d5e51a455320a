// Norms over rows, and what a KDA scan needs of a row. A thread takes every blockDim-th element, ascending, in one chain.
#include "common/base.cuh"
#include "common/maths.cuh"
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

// Grid: a block for each row. `out` may be `x`: an element is written by the thread that reads it.
KERNEL rms_norm(float* out, u32 out_stride, const float* x, u32 x_stride, const float* weight, u32 width, float epsilon) {
    __shared__ float room[32];
    u64 row = blockIdx.x;
    out += row * out_stride;
    x += row * x_stride;
    float kept[KEPT], weights[KEPT];
    keep_row(kept, x, width);
    keep_row(weights, weight, width);
    float chain = chain_row(kept, x, width, [](float sum, float value) { return __fmaf_rn(value, value, sum); });
    float factor = rms_factor(block_sum(chain, room), width, epsilon);
    each_element(kept, x, width, [&](u32 i, float value, u32 k) {
        out[i] = __fmul_rn(__fmul_rn(value, factor), k < KEPT ? weights[k] : weight[i]);
    });
}

// Grid: a block for each row.
KERNEL layer_norm(float* out, u32 out_stride, const float* x, u32 x_stride, const float* weight, const float* bias, u32 width,
                  float epsilon) {
    __shared__ float room[32];
    u64 row = blockIdx.x;
    out += row * out_stride;
    x += row * x_stride;
    float kept[KEPT];
    keep_row(kept, x, width);
    float chain = chain_row(kept, x, width, [](float sum, float value) { return __fadd_rn(sum, value); });
    float mean = __fdiv_rn(block_sum(chain, room), (float)width);
    float squares = chain_row(kept, x, width, [&](float sum, float value) {
        float centred = __fadd_rn(value, -mean);
        return __fmaf_rn(centred, centred, sum);
    });
    float factor = rms_factor(block_sum(squares, room), width, epsilon);
    each_element(kept, x, width, [&](u32 i, float value, u32) {
        out[i] = __fmaf_rn(__fmul_rn(__fadd_rn(value, -mean), factor), weight[i], bias[i]);
    });
}

// Σ x² of a head over a warp: lane l takes elements l, l + 32, ...
DEVICE float head_squares(const float* x, u32 dim) {
    float chain = 0.0f;
    for (u32 i = threadIdx.x % 32; i < dim; i += 32) chain = __fmaf_rn(x[i], x[i], chain);
    return warp_sum(chain);
}

// One head of one row by a warp. `out` may be `o`.
DEVICE void gated_head(float* out, const float* o, const float* gate, const float* weight, u32 dim,
                                           float epsilon) {
    float factor = rms_factor(head_squares(o, dim), dim, epsilon);
    for (u32 i = threadIdx.x % 32; i < dim; i += 32) {
        out[i] = __fmul_rn(__fmul_rn(__fmul_rn(o[i], factor), weight[i]), sigmoid(gate[i]));
    }
}

// Grid: a warp for each head of each row.
KERNEL gated_norm(float* out, u32 out_stride, const float* o, u32 o_stride, const float* gate,
                                      u32 gate_stride, const float* weight, u32 rows, u32 heads, u32 dim, float epsilon) {
    u64 item = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (item >= (u64)rows * heads) return;
    u64 row = item / heads, at = item % heads * dim;
    gated_head(out + row * out_stride + at, o + row * o_stride + at, gate + row * gate_stride + at, weight, dim, epsilon);
}

// x · (scale / sqrt(Σ x² + 1e-6)), in place, by a warp.
DEVICE void normalise_head(float* x, u32 dim, float scale) {
    float factor = unit_factor(head_squares(x, dim), scale);
    for (u32 i = threadIdx.x % 32; i < dim; i += 32) x[i] = __fmul_rn(x[i], factor);
}

// What a scan needs of one head of one row, in place, by a warp.
DEVICE void prepare_head(float* q, float* k, float* decay, float* beta, const float* bias, float a_log,
                                             u32 dim, bool bounded, float bound) {
    normalise_head(q, dim, __fdiv_rn(1.0f, __fsqrt_rn((float)dim)));
    normalise_head(k, dim, 1.0f);
    float rate = exponential(a_log);
    for (u32 i = threadIdx.x % 32; i < dim; i += 32) {
        decay[i] = decay_factor(decay[i], bias[i], rate, bounded, bound);
    }
    if (threadIdx.x % 32 == 0) *beta = sigmoid(*beta);
}

// Grid: a warp for each head of each row.
KERNEL kda_prepare(float* qkv, u32 qkv_stride, float* decay, u32 decay_stride, float* beta,
                                       u32 beta_stride, const float* dt_bias, const float* a_log, u32 rows, u32 heads,
                                       u32 dim, u32 bounded, float bound) {
    u64 item = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (item >= (u64)rows * heads) return;
    u64 row = item / heads, head = item % heads, at = head * dim;
    float* q = qkv + row * qkv_stride + at;
    prepare_head(q, q + (u64)heads * dim, decay + row * decay_stride + at, beta + row * beta_stride + head, dt_bias + at,
                 a_log[head], dim, bounded != 0, bound);
}
