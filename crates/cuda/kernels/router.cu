// A router's logits and its choice in one launch, for few rows. A logit has the order of product_rows.cu: chains of 64 inputs,
// one a thread, added ascending. The last block of a group of rows chooses.
#include "common/base.cuh"
#include "common/bf16.cuh"
#include "common/maths.cuh"
#include "route/flat.cuh"

// Inputs of a chain, chains of a logit at most, logits of a block. As in src/op/router.rs.
#define CHAIN 64
#define MOST_CHAINS 64
#define OUTPUTS 4
#define THREADS (MOST_CHAINS * OUTPUTS)
// Rows that a block takes together, and picks of a row at most.
#define GROUP 4
#define MOST_PICKS 32
// Floats of a chain's inputs in shared memory: chains start in different banks.
#define ROOM (CHAIN + 4)

// A chain's weights as they come.
template <bool WIDE> struct Weights {
    uint4 words[WIDE ? 16 : 8];

    // Number `i`; known when compiled.
    __device__ __forceinline__ float at(u32 i) const {
        const u32* all = (const u32*)words;
        if (WIDE) return __uint_as_float(all[i]);
        return i & 1 ? bf16_high(all[i / 2]) : bf16_low(all[i / 2]);
    }
};

// Rows of inputs into shared memory, chain beside chain.
DEVICE void stage_inputs(float* room, const float* x, u64 x_stride, u32 inputs, u32 rows) {
    for (u32 row = 0; row < rows; ++row)
        for (u32 i = threadIdx.x * 4; i < inputs; i += THREADS * 4)
            copy_async_16(room + (row * (inputs / CHAIN) + i / CHAIN) * ROOM + i % CHAIN, x + row * x_stride + i);
    copy_async_commit();
    copy_async_wait<0>();
}

// Whether this block is the last of its group. What the group's other blocks wrote is seen then.
DEVICE bool arrives_last(u32* arrived) {
    __shared__ u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrived, 1u) == gridDim.x - 1;
        // The next launch finds it zero.
        if (last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return last != 0;
}

struct Router {
    u32* picks;
    float* weights;
    float* logits;
    const float* x;
    const u8* function;
    const float* bias;
    u32* arrived;
    u64 weights_stride, logits_stride, x_stride;
    u32 experts, inputs, rows, picked, normalise;
    float scaling;
};

template <bool WIDE> DEVICE void route_rows(const Router& r, float* room) {
    __shared__ float sums[OUTPUTS][GROUP][MOST_CHAINS + 1];
    __shared__ float scores[GROUP][MOST_PICKS];
    u32 chains = r.inputs / CHAIN, chain = threadIdx.x % MOST_CHAINS, output = threadIdx.x / MOST_CHAINS;
    u32 expert = blockIdx.x * OUTPUTS + output, first = blockIdx.y * GROUP, count = min(GROUP, r.rows - first), warp = warp_index();
    bool multiplies = chain < chains && expert < r.experts;
    Weights<WIDE> weights;
    if (multiplies) {
        const uint4* from = (const uint4*)(r.function + ((u64)expert * r.inputs + chain * CHAIN) * (WIDE ? 4 : 2));
#pragma unroll
        for (u32 i = 0; i < (WIDE ? 16 : 8); ++i) weights.words[i] = from[i];
    }
    Held biases;
    if (warp < count) biases = hold(r.bias, r.experts);
    grid_wait();
    stage_inputs(room, r.x + first * r.x_stride, r.x_stride, r.inputs, count);
    __syncthreads();
    if (multiplies) {
        float acc[GROUP] = {};
#pragma unroll
        for (u32 i = 0; i < CHAIN; i += 4) {
#pragma unroll
            for (u32 row = 0; row < GROUP; ++row) {
                if (row >= count) break;
                float4 four = *(const float4*)(room + (row * chains + chain) * ROOM + i);
                acc[row] = __fmaf_rn(weights.at(i), four.x, acc[row]);
                acc[row] = __fmaf_rn(weights.at(i + 1), four.y, acc[row]);
                acc[row] = __fmaf_rn(weights.at(i + 2), four.z, acc[row]);
                acc[row] = __fmaf_rn(weights.at(i + 3), four.w, acc[row]);
            }
        }
#pragma unroll
        for (u32 row = 0; row < GROUP; ++row)
            if (row < count) sums[output][row][chain] = acc[row];
    }
    __syncthreads();
    if (threadIdx.x < OUTPUTS * GROUP) {
        u32 mine = threadIdx.x / GROUP, row = threadIdx.x % GROUP, logit = blockIdx.x * OUTPUTS + mine;
        if (logit < r.experts && row < count) {
            const float* from = sums[mine][row];
            float total = from[0];
#pragma unroll 16
            for (u32 i = 1; i < chains; ++i) total = __fadd_rn(total, from[i]);
            r.logits[(first + row) * r.logits_stride + logit] = total;
        }
    }
    if (!arrives_last(r.arrived + blockIdx.y) || warp >= count) return;
    u64 row = first + warp;
    Held held = hold(r.logits + row * r.logits_stride, r.experts);
    choose_flat(r.picks + row * r.picked, r.weights + row * r.weights_stride, scores[warp], held, biases, r.experts, r.picked,
                r.normalise != 0, r.scaling);
}

// Grid: four experts each × groups of rows. `arrived` has a zero for each group. Dynamic shared memory: the group's inputs.
#define ROUTER(NAME, WIDE)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                    \
        NAME(u32* picks, float* weights, u32 weights_stride, float* logits, u32 logits_stride, const float* x, u32 x_stride, \
             const u8* function, const float* bias, u32* arrived, u32 experts, u32 inputs, u32 rows, u32 picked,             \
             u32 normalise, float scaling) {                                                                                 \
        extern __shared__ uint4 router_room[];                                                                               \
        grid_release();                                                                                                      \
        Router r = {picks,         weights,  logits, x,       function, bias, arrived, weights_stride,                       \
                    logits_stride, x_stride, experts, inputs, rows,     picked, normalise, scaling};                         \
        route_rows<WIDE>(r, (float*)router_room);                                                                            \
    }

ROUTER(router_16, false)
ROUTER(router_32, true)
