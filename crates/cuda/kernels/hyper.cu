// Hyper-connections: several residual streams, mixed by coefficients that each row computes for itself.
//
// A coefficient's product with the streams is cut into slices of 512 columns, a slice into chains of 64: a chain ascends, the
// chains of a slice and the slices of a row are added in ascending order. One more output takes the streams themselves as
// its weights: the sum of squares. The root mean square is applied after the product.
#include "common/base.cuh"
#include "common/bf16.cuh"
#include "common/maths.cuh"

#define MAX_STREAMS 8
#define SLICE 512
#define CHAIN 64
#define CHAINS (SLICE / CHAIN)
// Chains in shared memory stand a bank group apart.
#define CHAIN_ROOM (CHAIN + 4)
// Sums of slices that a block stages in shared memory, so that they are waited for once.
#define STAGED 2048

// The function's numbers as they are stored.
#define NUMBERS_BF16 0
#define NUMBERS_F16 1
#define NUMBERS_F32 2

// Sixty-four of the function's numbers from `at`, `count` of them there and zeros behind.
template <int NUMBERS> DEVICE void load_chain(float (&weights)[CHAIN], const void* function, u64 at, u32 count) {
    if (NUMBERS == NUMBERS_F32) {
        const float* from = (const float*)function + at;
#pragma unroll
        for (u32 i = 0; i < CHAIN; ++i) weights[i] = i < count ? from[i] : 0.0f;
        return;
    }
    const u16* from = (const u16*)function + at;
    if (NUMBERS == NUMBERS_BF16 && count == CHAIN && ((u64)from & 15) == 0) {
#pragma unroll
        for (u32 i = 0; i < CHAIN / 8; ++i) {
            uint4 packed = ((const uint4*)from)[i];
            u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                weights[i * 8 + j * 2] = bf16_low(pairs[j]);
                weights[i * 8 + j * 2 + 1] = bf16_high(pairs[j]);
            }
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < CHAIN; ++i) {
        weights[i] = i >= count ? 0.0f : NUMBERS == NUMBERS_BF16 ? bf16_to_f32(from[i]) : f16_to_f32(from[i]);
    }
}

// Products of some rows with a slice of the function: `sums` has, for each row, slice and output, the function's product and
// then the sum of squares. A thread has a chain of an output and keeps its numbers for all rows. What stands behind a row
// is zeros, which add nothing.
template <int NUMBERS>
DEVICE void slice_products(float* sums, const float* streams, u32 streams_stride, const void* function, u32 width, u32 outputs,
                           u32 rows, u32 each) {
    __shared__ __align__(16) float x[2][CHAINS][CHAIN_ROOM];
    __shared__ float chains[2][2 * MAX_STREAMS + MAX_STREAMS * MAX_STREAMS + 1][CHAINS];
    u32 output = threadIdx.x / CHAINS, chain = threadIdx.x % CHAINS, first = blockIdx.x * SLICE, at = first + chain * CHAIN;
    float weights[CHAIN];
    load_chain<NUMBERS>(weights, function, (u64)output * width + at, output < outputs && at < width ? min(CHAIN, width - at) : 0);
    u32 last = min((blockIdx.y + 1) * each, rows), turn = 0;
    for (u64 row = blockIdx.y * each; row < last; ++row, turn ^= 1) {
        for (u32 i = threadIdx.x; i < SLICE; i += blockDim.x) {
            x[turn][i / CHAIN][i % CHAIN] = first + i < width ? streams[row * streams_stride + first + i] : 0.0f;
        }
        __syncthreads();
        if (output <= outputs) {
            const float4* from = (const float4*)x[turn][chain];
            float sum = 0.0f;
            if (output < outputs) {
#pragma unroll
                for (u32 i = 0; i < CHAIN / 4; ++i) {
                    float4 four = from[i];
                    sum = __fmaf_rn(weights[i * 4], four.x, sum);
                    sum = __fmaf_rn(weights[i * 4 + 1], four.y, sum);
                    sum = __fmaf_rn(weights[i * 4 + 2], four.z, sum);
                    sum = __fmaf_rn(weights[i * 4 + 3], four.w, sum);
                }
            } else {
#pragma unroll 4
                for (u32 i = 0; i < CHAIN / 4; ++i) {
                    float4 four = from[i];
                    sum = __fmaf_rn(four.x, four.x, sum);
                    sum = __fmaf_rn(four.y, four.y, sum);
                    sum = __fmaf_rn(four.z, four.z, sum);
                    sum = __fmaf_rn(four.w, four.w, sum);
                }
            }
            chains[turn][output][chain] = sum;
        }
        __syncthreads();
        if (threadIdx.x > outputs) continue;
        float total = chains[turn][threadIdx.x][0];
#pragma unroll
        for (u32 i = 1; i < CHAINS; ++i) total = __fadd_rn(total, chains[turn][threadIdx.x][i]);
        sums[(row * gridDim.x + blockIdx.x) * (outputs + 1) + threadIdx.x] = total;
    }
}

// Softmax over each row of an n × n matrix, plus epsilon, then the Sinkhorn normalisation: columns, then `rounds - 1` times
// rows and columns. One thread; sums ascend. N is n, or a bound of it.
template <int N> DEVICE void balance(float* matrix, u32 count, u32 rounds, float epsilon) {
    float c[N][N];
    u32 n = N == 4 ? 4 : count;
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        float highest = -infinity(), total = 0.0f;
#pragma unroll
        for (u32 j = 0; j < N; ++j) {
            c[i][j] = i < n && j < n ? matrix[i * n + j] : 0.0f;
            if (j < n) highest = c[i][j] > highest ? c[i][j] : highest;
        }
#pragma unroll
        for (u32 j = 0; j < N; ++j) {
            c[i][j] = i < n && j < n ? exponential(__fadd_rn(c[i][j], -highest)) : 0.0f;
            total = __fadd_rn(total, c[i][j]);
        }
#pragma unroll
        for (u32 j = 0; j < N; ++j) c[i][j] = i < n && j < n ? __fadd_rn(__fdiv_rn(c[i][j], total), epsilon) : 0.0f;
    }
    for (u32 round = 0; round < max(rounds, 1); ++round) {
        if (round > 0) {
#pragma unroll
            for (u32 i = 0; i < N; ++i) {
                float sum = 0.0f;
#pragma unroll
                for (u32 j = 0; j < N; ++j) sum = __fadd_rn(sum, c[i][j]);
                float inverse = __frcp_rn(__fadd_rn(sum, epsilon));
#pragma unroll
                for (u32 j = 0; j < N; ++j) c[i][j] = __fmul_rn(c[i][j], inverse);
            }
        }
#pragma unroll
        for (u32 j = 0; j < N; ++j) {
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < N; ++i) sum = __fadd_rn(sum, c[i][j]);
            float inverse = __frcp_rn(__fadd_rn(sum, epsilon));
#pragma unroll
            for (u32 i = 0; i < N; ++i) c[i][j] = __fmul_rn(c[i][j], inverse);
        }
    }
#pragma unroll
    for (u32 i = 0; i < N; ++i)
#pragma unroll
        for (u32 j = 0; j < N; ++j)
            if (i < n && j < n) matrix[i * n + j] = c[i][j];
}

// What a row's coefficients need besides its own numbers.
struct Coefficients {
    const float* base;
    const float* scale;
    u32 n, rounds;
    float norm_epsilon, epsilon;
};

// One row from its slices' sums: the collapsed row and the mix. A block; the first warp balances while the others collapse.
DEVICE void finish_row(float* collapsed, float* mix, const float* streams, const float* sums, u32 slices, u32 hidden,
                       const Coefficients& of) {
    __shared__ float totals[2 * MAX_STREAMS + MAX_STREAMS * MAX_STREAMS + 1];
    __shared__ float pre[MAX_STREAMS];
    __shared__ float staged[STAGED];
    u32 n = of.n, outputs = 2 * n + n * n, count = slices * (outputs + 1);
    bool fits = count <= STAGED;
    for (u32 i = threadIdx.x; fits && i < count; i += blockDim.x) staged[i] = sums[i];
    __syncthreads();
    if (fits) sums = staged;
    for (u32 output = threadIdx.x; output <= outputs; output += blockDim.x) {
        float total = sums[output];
#pragma unroll 8
        for (u32 slice = 1; slice < slices; ++slice) total = __fadd_rn(total, sums[slice * (outputs + 1) + output]);
        totals[output] = total;
    }
    __syncthreads();
    float mean = __fdiv_rn(totals[outputs], (float)(n * hidden));
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, of.norm_epsilon)));
    if (threadIdx.x < outputs) {
        u32 i = threadIdx.x;
        float value = __fmaf_rn(__fmul_rn(totals[i], factor), of.scale[min(i / n, 2)], of.base[i]);
        if (i < n) pre[i] = __fadd_rn(sigmoid(value), of.epsilon);
        else if (i < 2 * n) mix[i - n] = __fmul_rn(2.0f, sigmoid(value));
        else totals[i] = value;
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        if (threadIdx.x == 0) {
            if (n == 4) balance<4>(totals + 2 * n, n, of.rounds, of.epsilon);
            else balance<MAX_STREAMS>(totals + 2 * n, n, of.rounds, of.epsilon);
        }
        __syncwarp();
        for (u32 i = threadIdx.x; i < n * n; i += WARP) mix[n + i] = totals[2 * n + i];
        return;
    }
    for (u32 i = threadIdx.x - WARP; i < hidden; i += blockDim.x - WARP) {
        float total = 0.0f;
        for (u32 stream = 0; stream < n; ++stream) total = __fmaf_rn(pre[stream], streams[(u64)stream * hidden + i], total);
        collapsed[i] = total;
    }
}

DEVICE void products(u32 numbers, float* sums, const float* streams, u32 streams_stride, const void* function, u32 width,
                     u32 outputs, u32 rows, u32 each) {
    if (numbers == NUMBERS_BF16)
        slice_products<NUMBERS_BF16>(sums, streams, streams_stride, function, width, outputs, rows, each);
    else if (numbers == NUMBERS_F16)
        slice_products<NUMBERS_F16>(sums, streams, streams_stride, function, width, outputs, rows, each);
    else
        slice_products<NUMBERS_F32>(sums, streams, streams_stride, function, width, outputs, rows, each);
}

// Grid: slices × groups of `each` rows. A thread for each chain of each output.
extern "C" __global__ void __launch_bounds__(672)
hc_products(float* sums, const float* streams, u32 streams_stride, const void* function, u32 numbers, u32 width, u32 outputs,
            u32 rows, u32 each) {
    products(numbers, sums, streams, streams_stride, function, width, outputs, rows, each);
}

// Products and the rest of a few rows in one launch: the last of a row's blocks finishes it. Sums are added in the order of
// the slices, whichever block that is. Grid: slices × rows. `arrived` has a zero for each row, and again when it is done.
extern "C" __global__ void __launch_bounds__(512)
hc_pre(float* collapsed, u32 collapsed_stride, float* mix, u32 mix_stride, const float* streams, u32 streams_stride,
       const void* function, u32 numbers, float* sums, u32* arrived, u32 hidden, u32 n, u32 rows, const float* base,
       const float* scale, float norm_epsilon, float epsilon, u32 rounds) {
    __shared__ u32 last;
    u32 outputs = 2 * n + n * n;
    products(numbers, sums, streams, streams_stride, function, n * hidden, outputs, rows, 1);
    // What this block wrote is seen by whoever sees its arrival.
    __threadfence();
    __syncthreads();
    u64 row = blockIdx.y;
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived + row, 1u) == gridDim.x - 1;
        if (last) arrived[row] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    Coefficients of = {base, scale, n, rounds, norm_epsilon, epsilon};
    finish_row(collapsed + row * collapsed_stride, mix + row * mix_stride, streams + row * streams_stride,
               sums + row * gridDim.x * (outputs + 1), gridDim.x, hidden, of);
}

// Grid: a block for each row.
extern "C" __global__ void __launch_bounds__(512)
hc_finish(float* collapsed, u32 collapsed_stride, float* mix, u32 mix_stride, const float* streams,
                 u32 streams_stride, const float* sums, u32 slices, u32 hidden, u32 n, const float* base, const float* scale,
                 float norm_epsilon, float epsilon, u32 rounds) {
    u64 row = blockIdx.x;
    Coefficients of = {base, scale, n, rounds, norm_epsilon, epsilon};
    finish_row(collapsed + row * collapsed_stride, mix + row * mix_stride, streams + row * streams_stride,
               sums + row * slices * (2 * n + n * n + 1), slices, hidden, of);
}

// One element of every stream after a block: S'[j] = post[j] · y + Σ_i C[i, j] · S[i], i ascending.
template <int N> DEVICE void mix_element(float* streams, float y, const float* mix, u32 hidden, u32 count) {
    float before[N];
    u32 n = N == 4 ? 4 : count;
#pragma unroll
    for (u32 i = 0; i < N; ++i) before[i] = i < n ? streams[(u64)i * hidden] : 0.0f;
#pragma unroll
    for (u32 j = 0; j < N; ++j) {
        if (j >= n) break;
        float total = __fmul_rn(mix[j], y);
#pragma unroll
        for (u32 i = 0; i < N; ++i)
            if (i < n) total = __fmaf_rn(mix[n + i * n + j], before[i], total);
        streams[(u64)j * hidden] = total;
    }
}

// In place. Grid: rows × pieces of a row.
KERNEL hc_post(float* streams, u32 streams_stride, const float* y, u32 y_stride, const float* mix, u32 mix_stride, u32 hidden,
               u32 n) {
    __shared__ float shared[MAX_STREAMS + MAX_STREAMS * MAX_STREAMS];
    u64 row = blockIdx.x;
    for (u32 i = threadIdx.x; i < n + n * n; i += blockDim.x) shared[i] = mix[row * mix_stride + i];
    __syncthreads();
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < hidden; i += gridDim.y * blockDim.x) {
        float* column = streams + row * streams_stride + i;
        float value = y[row * y_stride + i];
        if (n == 4) mix_element<4>(column, value, shared, hidden, n);
        else mix_element<MAX_STREAMS>(column, value, shared, hidden, n);
    }
}
