// Norms over rows, and what a KDA scan needs of a row.
#include "common/base.cuh"
#include "common/maths.cuh"
#include "common/factors.cuh"
#include "common/reduce.cuh"
#include "norm/rows.cuh"

// Grid: a block for each row.
KERNEL rms_norm(float* out, u32 out_stride, const float* x, u32 x_stride, const float* weight, u32 width, float epsilon) {
    __shared__ float room[32];
    grid_release();
    u64 row = blockIdx.x;
    rms_row(out + row * out_stride, x + row * x_stride, weight, width, epsilon, room, [] { grid_wait(); });
}

// The norm of rows that are gathered. A row number outside `x` gives NaN: the device cannot refuse it. Grid: a block for each row.
KERNEL gather_norm(float* out, u32 out_stride, const float* x, u32 x_stride, u32 x_rows, const u32* index, const float* weight,
                   u32 width, float epsilon) {
    __shared__ float room[32];
    grid_release();
    grid_wait();
    u64 row = blockIdx.x;
    u32 from = index[row];
    out += row * out_stride;
    if (from < x_rows) {
        rms_row(out, x + (u64)from * x_stride, weight, width, epsilon, room, [] {});
    } else {
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = __uint_as_float(0x7FC00000u);
    }
}

// Grid: a block for each row.
KERNEL layer_norm(float* out, u32 out_stride, const float* x, u32 x_stride, const float* weight, const float* bias, u32 width,
                  float epsilon) {
    __shared__ float room[32];
    grid_release();
    grid_wait();
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
    grid_release();
    grid_wait();
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
    grid_release();
    grid_wait();
    u64 item = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (item >= (u64)rows * heads) return;
    u64 row = item / heads, head = item % heads, at = head * dim;
    float* q = qkv + row * qkv_stride + at;
    prepare_head(q, q + (u64)heads * dim, decay + row * decay_stride + at, beta + row * beta_stride + head, dt_bias + at,
                 a_log[head], dim, bounded != 0, bound);
}
