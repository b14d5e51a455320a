// What stands between two blocks of the network, for few rows, in one launch: the sum over a row's experts, the mix of four
// streams (or their start as copies of a row), the coefficients of the next site, the collapsed row and its norm. Each part may be left out.
//
// Sums have the order of hyper.cu and norms.cu: a coefficient's product is cut into chains of 64 columns, eight chains are a
// slice; chains and slices ascend. A block has the same 64 columns of every stream, so that it mixes what it multiplies; the
// last block of a row adds everything up.
#include "common/base.cuh"
#include "common/bf16.cuh"
#include "common/factors.cuh"
#include "common/maths.cuh"
#include "common/tensor.cuh"
#include "hyper/left.cuh"

#define OUTPUTS (2 * STREAMS + STREAMS * STREAMS)
// One more output: the sum of squares.
#define SUMS (OUTPUTS + 1)
#define CHAIN 64
#define SLICE_CHAINS 8
// Slices of the widest row, and columns of a row for each thread that collapses it.
#define MAX_SLICES 32
#define EACH 8
// Threads that collapse a row, and a warp for its coefficients.
#define MAX_THREADS (512 + 32)
// Rows that a block takes together.
#define MAX_GROUP 8
// Bytes of a chain's numbers in shared memory: the widest kind, and what keeps chains in different banks.
#define ROOM (CHAIN * 4 + 16)

#define NUMBERS_BF16 0
#define NUMBERS_F16 1

// The site that is entered.
struct Site {
    const u8* function;
    const float* base;
    const float* scale;
    u32 numbers, rounds;
    float norm_epsilon, epsilon;
};

// Starts copying this block's chains of the function.
DEVICE void request_function(u8 (*room)[ROOM], const Site& site, u32 hidden) {
    u32 bytes = (site.numbers <= NUMBERS_F16 ? 2 : 4) * CHAIN, pieces = bytes / 16;
    for (u32 i = threadIdx.x; i < OUTPUTS * STREAMS * pieces; i += blockDim.x) {
        u32 chain = i / pieces, piece = i % pieces;
        u64 at = (u64)chain * hidden / CHAIN + blockIdx.x;
        copy_async_16(&room[chain][piece * 16], site.function + at * bytes + piece * 16);
    }
    copy_async_commit();
}

// Number `i` and the three behind it of a chain.
DEVICE float4 four_of(const u8* chain, u32 numbers, u32 i) {
    if (numbers > NUMBERS_F16) return *(const float4*)(chain + i * 4);
    uint2 pairs = *(const uint2*)(chain + i * 2);
    if (numbers == NUMBERS_BF16)
        return make_float4(bf16_low(pairs.x), bf16_high(pairs.x), bf16_low(pairs.y), bf16_high(pairs.y));
    return make_float4(f16_to_f32((u16)pairs.x), f16_to_f32((u16)(pairs.x >> 16)), f16_to_f32((u16)pairs.y),
                       f16_to_f32((u16)(pairs.y >> 16)));
}

// This block's columns of some rows' streams, mixed first when a site is left.
DEVICE void take_columns(float (*rooms)[STREAMS][CHAIN + 4], float* all_streams, u64 streams_stride, const Left& left, u32 hidden,
                         u64 first_row, u32 rows) {
    for (u32 at = threadIdx.x; at < rows * CHAIN; at += blockDim.x) {
        u64 row = first_row + at / CHAIN;
        u32 i = at % CHAIN, column = blockIdx.x * CHAIN + i;
        float(*x)[CHAIN + 4] = rooms[at / CHAIN];
        float values[STREAMS];
        leave_column(values, all_streams + row * streams_stride, left, row, column, hidden);
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) x[j][i] = values[j];
    }
}

// Chain `chain` of this block: an output's product with a stream's columns, or their squares.
DEVICE float chain_sum(const u8 (*room)[ROOM], const float (*x)[CHAIN + 4], u32 numbers, u32 chain) {
    const float4* from = (const float4*)x[chain % STREAMS];
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < CHAIN / 4; ++i) {
        float4 v = from[i];
        float4 w = chain < OUTPUTS * STREAMS ? four_of(room[chain], numbers, i * 4) : v;
        sum = __fmaf_rn(w.x, v.x, sum);
        sum = __fmaf_rn(w.y, v.y, sum);
        sum = __fmaf_rn(w.z, v.z, sum);
        sum = __fmaf_rn(w.w, v.w, sum);
    }
    return sum;
}

// Slices' sums of a row from its chains: a thread's are asked for before anything else, and added when they are here.
struct ChainSums {
    float4 low[2], high[2];

    // Sums that a thread takes: there are no more than two for each.
    __device__ __forceinline__ void request(const float* chains, u32 count) {
#pragma unroll
        for (u32 k = 0; k < 2; ++k) {
            u32 i = threadIdx.x + k * blockDim.x;
            const float4* from = (const float4*)(chains + (u64)i * SLICE_CHAINS);
            bool there = i < SUMS * count;
            low[k] = there ? __ldcg(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            high[k] = there ? __ldcg(from + 1) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    __device__ __forceinline__ void add(float (*slices)[MAX_SLICES + 1], u32 count) const {
#pragma unroll
        for (u32 k = 0; k < 2; ++k) {
            u32 i = threadIdx.x + k * blockDim.x;
            float total = __fadd_rn(__fadd_rn(__fadd_rn(low[k].x, low[k].y), low[k].z), low[k].w);
            total = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(total, high[k].x), high[k].y), high[k].z), high[k].w);
            if (i < SUMS * count) slices[i / count][i % count] = total;
        }
    }
};

// One column or row of the matrix divided by its sum. The sums are at least epsilon, which is a normal number, so that the
// reciprocal is: no other case is looked at.
DEVICE void divide(float& a, float& b, float& c, float& d, float epsilon) {
    float sum = __fadd_rn(__fadd_rn(__fadd_rn(a, b), c), d);
    float inverse = reciprocal_of_normal(__fadd_rn(sum, epsilon));
    a = __fmul_rn(a, inverse), b = __fmul_rn(b, inverse), c = __fmul_rn(c, inverse), d = __fmul_rn(d, inverse);
}

// Softmax over rows plus epsilon, then the Sinkhorn normalisation: columns, then `rounds - 1` times rows and columns.
DEVICE void balance(float (&c)[STREAMS][STREAMS], u32 rounds, float epsilon) {
#pragma unroll
    for (u32 i = 0; i < STREAMS; ++i) {
        float highest = -infinity(), total = 0.0f;
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) highest = c[i][j] > highest ? c[i][j] : highest;
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) {
            c[i][j] = exponential(__fadd_rn(c[i][j], -highest));
            total = __fadd_rn(total, c[i][j]);
        }
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) c[i][j] = __fadd_rn(__fdiv_rn(c[i][j], total), epsilon);
    }
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) divide(c[0][j], c[1][j], c[2][j], c[3][j], epsilon);
    for (u32 round = 1; round < rounds; ++round) {
#pragma unroll
        for (u32 i = 0; i < STREAMS; ++i) divide(c[i][0], c[i][1], c[i][2], c[i][3], epsilon);
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) divide(c[0][j], c[1][j], c[2][j], c[3][j], epsilon);
    }
}

// The row's coefficients by a warp, from a sum in each of the first lanes. `pre` is in shared memory.
DEVICE void find_coefficients(float* pre, float* mix, float sum, const Site& site, float base, float scale, u32 hidden) {
    u32 lane = lane_index();
    float mean = __fdiv_rn(__shfl_sync(ALL_LANES, sum, OUTPUTS), (float)(STREAMS * hidden));
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, site.norm_epsilon)));
    float value = __fmaf_rn(__fmul_rn(sum, factor), scale, base), gate = sigmoid(value);
    if (lane < STREAMS) pre[lane] = __fadd_rn(gate, site.epsilon);
    else if (lane < 2 * STREAMS) mix[lane - STREAMS] = __fmul_rn(2.0f, gate);
    // The others go on; the matrix isn't needed here.
    __syncwarp();
    team_barrier(1, blockDim.x);
    float c[STREAMS][STREAMS];
#pragma unroll
    for (u32 i = 0; i < STREAMS * STREAMS; ++i) c[i / STREAMS][i % STREAMS] = __shfl_sync(ALL_LANES, value, 2 * STREAMS + i);
    balance(c, site.rounds, site.epsilon);
#pragma unroll
    for (u32 i = 0; i < STREAMS * STREAMS; ++i)
        if (lane == i) mix[STREAMS + i] = c[i / STREAMS][i % STREAMS];
}

// The collapsed row by the threads above the first warp, normed when `weight` is there; `columns` has each thread's columns of
// the streams. A thread's chain, butterflies and the sum over warps are those of rms_norm.
DEVICE void collapse(float* out, const float* pre, const float (&columns)[EACH][STREAMS], const float (&weight)[EACH],
                     bool normed, float epsilon, u32 hidden, float* room) {
    u32 thread = threadIdx.x - WARP, threads = blockDim.x - WARP;
    float x[EACH], chain = 0.0f, factor = 1.0f;
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        if (thread + k * threads >= hidden) break;
        float total = 0.0f;
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) total = __fmaf_rn(pre[j], columns[k][j], total);
        x[k] = total;
        chain = __fmaf_rn(total, total, chain);
    }
    if (normed) {
        chain = warp_sum(chain);
        if (lane_index() == 0) room[thread / WARP] = chain;
        team_barrier(2, threads);
        float sums[16], total = room[0];
#pragma unroll
        for (u32 warp = 1; warp < 16; ++warp) sums[warp] = warp < threads / WARP ? room[warp] : 0.0f;
#pragma unroll
        for (u32 warp = 1; warp < 16; ++warp)
            if (warp < threads / WARP) total = __fadd_rn(total, sums[warp]);
        factor = rms_factor(total, hidden, epsilon);
    }
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 column = thread + k * threads;
        if (column >= hidden) break;
        out[column] = normed ? __fmul_rn(__fmul_rn(x[k], factor), weight[k]) : x[k];
    }
}

// The last block of a row: everything that needs the whole row.
DEVICE void finish_row(float* out, float* mix, const float* streams, const float* chains, const Site& site,
                       const float* norm_weight, float rms_epsilon, u32 hidden) {
    __shared__ float slices[SUMS][MAX_SLICES + 1];
    __shared__ float pre[STREAMS];
    __shared__ float room[16];
    u32 thread = threadIdx.x - WARP, threads = blockDim.x - WARP, count = STREAMS * hidden / (CHAIN * SLICE_CHAINS);
    bool collapses = threadIdx.x >= WARP;
    float columns[EACH][STREAMS], weight[EACH], base = 0.0f, scale = 0.0f;
    // All that is read later is asked for now, what is needed first first. Other blocks wrote the streams: past L1.
    ChainSums sums;
    sums.request(chains, count);
    if (threadIdx.x < OUTPUTS) {
        base = site.base[threadIdx.x];
        scale = site.scale[min(threadIdx.x / STREAMS, 2)];
    }
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 column = thread + k * threads;
        bool there = collapses && column < hidden;
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) columns[k][j] = there ? __ldcg(streams + j * hidden + column) : 0.0f;
        weight[k] = there && norm_weight ? norm_weight[column] : 0.0f;
    }
    sums.add(slices, count);
    __syncthreads();
    if (!collapses) {
        float sum = 0.0f;
        if (threadIdx.x < SUMS) {
            sum = slices[threadIdx.x][0];
#pragma unroll 8
            for (u32 slice = 1; slice < count; ++slice) sum = __fadd_rn(sum, slices[threadIdx.x][slice]);
        }
        find_coefficients(pre, mix, sum, site, base, scale, hidden);
        return;
    }
    team_barrier(1, blockDim.x);
    collapse(out, pre, columns, weight, norm_weight != nullptr, rms_epsilon, hidden, room);
}

// Counts this block's arrival at the end of its rows. The last blocks, one for each row, wait until all are there; returns the
// row that this block finishes, or `rows`. At most seven blocks of a group wait; the host leaves room for the others.
// `arrived` is zero, and again when all have left.
DEVICE u32 arrive(u32* arrived, u32 rows) {
    __shared__ u32 mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        // What this block wrote is seen by whoever sees its arrival.
        __threadfence();
        u32 before = atomicAdd(arrived, 1u), first = gridDim.x - rows;
        mine = rows;
        if (before >= first) {
            mine = before - first;
            while (rows > 1 && *(volatile u32*)arrived < gridDim.x) {}
            __threadfence();
        }
    }
    __syncthreads();
    return mine;
}

// The last of the blocks that finish a row leaves a zero.
DEVICE void leave(u32* arrived, u32 rows) {
    if (threadIdx.x == 0 && (rows == 1 || atomicAdd(arrived, 1u) == gridDim.x + rows - 1)) *arrived = 0;
}

// Grid: columns in groups of 64 × groups of rows, of at most MAX_GROUP rows and no more than blocks. `arrived` has a zero for
// each group. Threads: those of a norm of this width, and a warp.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
hc_step(float* out, u32 out_stride, float* mix, u32 mix_stride, float* streams, u32 streams_stride, const u8* function,
        u32 numbers, float* chains, u32* arrived, u32 hidden, u32 rows, const float* base, const float* scale, float norm_epsilon,
        float epsilon, u32 rounds, float* y, u32 y_stride, const float* left_mix, u32 left_mix_stride, const float* pairs,
        u32 pairs_stride, const float* weights, u32 weights_stride, const float* shared, u32 shared_stride, u32 picks,
        const float* norm_weight, float rms_epsilon) {
    __shared__ __align__(16) u8 numbers_room[OUTPUTS * STREAMS][ROOM];
    __shared__ __align__(16) float x[MAX_GROUP][STREAMS][CHAIN + 4];
    Site site = {function, base, scale, numbers, rounds, norm_epsilon, epsilon};
    Left left = {y,        left_mix,        pairs,        weights,        shared, y_stride, left_mix_stride, pairs_stride,
                 weights_stride, shared_stride, picks};
    u32 each = ceil_div(rows, gridDim.y), first = blockIdx.y * each, count = min(each, rows - first);
    u64 row_chains = (u64)gridDim.x * STREAMS * SUMS;
    grid_release();
    request_function(numbers_room, site, hidden);
    grid_wait();
    take_columns(x, streams, streams_stride, left, hidden, first, count);
    copy_async_wait<0>();
    __syncthreads();
    for (u32 i = threadIdx.x; i < count * SUMS * STREAMS; i += blockDim.x) {
        u32 row = i / (SUMS * STREAMS), chain = i % (SUMS * STREAMS);
        float sum = chain_sum(numbers_room, x[row], numbers, chain);
        chains[(first + row) * row_chains + (u64)chain * gridDim.x + blockIdx.x] = sum;
    }
    u32 mine = arrive(arrived + blockIdx.y, count);
    if (mine >= count) return;
    u64 row = first + mine;
    finish_row(out + row * out_stride, mix + row * mix_stride, streams + row * streams_stride, chains + row * row_chains, site,
               norm_weight, rms_epsilon, hidden);
    leave(arrived + blockIdx.y, count);
}
