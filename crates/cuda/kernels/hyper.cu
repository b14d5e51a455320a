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

// The function's numbers as they are stored.
#define NUMBERS_BF16 0
#define NUMBERS_F16 1
#define NUMBERS_F32 2

// A thread's chain of the function's row: `count` products with x, ascending.
template <int NUMBERS>
DEVICE float chain_of(const void* row, u32 first, const float* x, u32 count) {
    float chain = 0.0f;
    if (NUMBERS == NUMBERS_F32) {
        const float* weights = (const float*)row + first;
#pragma unroll 8
        for (u32 i = 0; i < count; ++i) chain = __fmaf_rn(weights[i], x[i], chain);
        return chain;
    }
    const u16* weights = (const u16*)row + first;
    if (NUMBERS == NUMBERS_BF16 && count == CHAIN && ((u64)weights & 15) == 0) {
        uint4 packed[CHAIN / 8];
#pragma unroll
        for (u32 i = 0; i < CHAIN / 8; ++i) packed[i] = ((const uint4*)weights)[i];
#pragma unroll
        for (u32 i = 0; i < CHAIN / 8; ++i) {
            u32 pairs[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                chain = __fmaf_rn(bf16_low(pairs[j]), x[i * 8 + j * 2], chain);
                chain = __fmaf_rn(bf16_high(pairs[j]), x[i * 8 + j * 2 + 1], chain);
            }
        }
        return chain;
    }
    for (u32 i = 0; i < count; ++i) {
        float weight = NUMBERS == NUMBERS_BF16 ? bf16_to_f32(weights[i]) : f16_to_f32(weights[i]);
        chain = __fmaf_rn(weight, x[i], chain);
    }
    return chain;
}

// Products of one row with one slice of the function: `sums[output]` of the slice, `outputs` of them the function's, then
// the sum of squares. Threads: a chain of an output each.
template <int NUMBERS>
DEVICE void slice_products(float* sums, const float* streams, const void* function, u32 width, u32 outputs, u32 slice,
                           float (*x)[CHAIN_ROOM], float (*chains)[CHAINS]) {
    u32 first = slice * SLICE;
    for (u32 i = threadIdx.x; i < SLICE; i += blockDim.x) {
        x[i / CHAIN][i % CHAIN] = first + i < width ? streams[first + i] : 0.0f;
    }
    __syncthreads();
    u32 output = threadIdx.x / CHAINS, chain = threadIdx.x % CHAINS, at = first + chain * CHAIN;
    if (output <= outputs) {
        u32 count = at < width ? min(CHAIN, width - at) : 0;
        float sum;
        if (output == outputs) {
            sum = 0.0f;
            for (u32 i = 0; i < count; ++i) sum = __fmaf_rn(x[chain][i], x[chain][i], sum);
        } else {
            u64 row = (u64)output * width * (NUMBERS == NUMBERS_F32 ? 4 : 2);
            sum = chain_of<NUMBERS>((const u8*)function + row, at, x[chain], count);
        }
        chains[output][chain] = sum;
    }
    __syncthreads();
    if (threadIdx.x <= outputs) {
        float total = chains[threadIdx.x][0];
        for (u32 i = 1; i < CHAINS; ++i) total = __fadd_rn(total, chains[threadIdx.x][i]);
        sums[threadIdx.x] = total;
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
    u32 n = of.n, outputs = 2 * n + n * n;
    for (u32 output = threadIdx.x; output <= outputs; output += blockDim.x) {
        float total = sums[output];
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

// Grid: slices × rows. A thread for each chain of each output.
template <int NUMBERS>
DEVICE void products_of(float* sums, const float* streams, u32 streams_stride, const void* function, u32 width, u32 outputs) {
    __shared__ float x[CHAINS][CHAIN_ROOM];
    __shared__ float chains[2 * MAX_STREAMS + MAX_STREAMS * MAX_STREAMS + 1][CHAINS];
    u64 row = blockIdx.y;
    sums += (row * gridDim.x + blockIdx.x) * (outputs + 1);
    slice_products<NUMBERS>(sums, streams + row * streams_stride, function, width, outputs, blockIdx.x, x, chains);
}

KERNEL hc_products(float* sums, const float* streams, u32 streams_stride, const void* function, u32 numbers, u32 width,
                   u32 outputs) {
    if (numbers == NUMBERS_BF16) products_of<NUMBERS_BF16>(sums, streams, streams_stride, function, width, outputs);
    else if (numbers == NUMBERS_F16) products_of<NUMBERS_F16>(sums, streams, streams_stride, function, width, outputs);
    else products_of<NUMBERS_F32>(sums, streams, streams_stride, function, width, outputs);
}

// Grid: a block for each row.
KERNEL hc_finish(float* collapsed, u32 collapsed_stride, float* mix, u32 mix_stride, const float* streams,
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
