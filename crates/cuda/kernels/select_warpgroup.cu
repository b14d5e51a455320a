// architectures: sm_90a
// Scores of many rows by warp groups: the sums of select.cu for 32 heads of 128. A block keeps the keys of its pools in
// registers and goes through some rows, whose queries are arranged for the tensor cores while the row before is multiplied.
#include "common/panels.cuh"
#include "common/bf16.cuh"
#include "common/fragments.cuh"
#include "common/maths.cuh"
#include "common/parts.cuh"

#define THREADS 256
#define HEADS 32
#define DIM 128
// Dimensions are taken in blocks of 32, two steps of a product each: lane % 4 holds eight in a row of them, the first four in
// the first step.
#define BLOCKS (DIM / 32)
#define STEPS (DIM / 16)
#define TERMS 3
#define POOLS (THREADS / 2)
// Rows of a block.
#define ROWS 64

// A term's queries: for each half of the steps 32 rows of 128 bytes, pieces swizzled.
typedef uint4 Term[2][HEADS][8];

// At a multiple of 1024 bytes.
struct Room {
    Term terms[2][TERMS];
    // Of each row: its part, NO_PART where this block has nothing to score for it, and the pools that it sees.
    u32 parts[ROWS], visible[ROWS];
};

// A thread's queries of a row: sixteen dimensions of a head, a step.
struct Queries {
    float4 x[4];

    __device__ __forceinline__ void load(const float* q) {
        u32 head = threadIdx.x % HEADS, step = threadIdx.x / HEADS;
        const float* from = q + head * DIM + step / 2 * 32 + step % 2 * 4;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) x[i] = *(const float4*)(from + i * 8);
    }

    __device__ __forceinline__ void store(Term (&terms)[TERMS]) const {
        u32 head = threadIdx.x % HEADS, step = threadIdx.x / HEADS, low[4][TERMS], high[4][TERMS];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            split_pair(low[i], x[i].x, x[i].y);
            split_pair(high[i], x[i].z, x[i].w);
        }
#pragma unroll
        for (u32 term = 0; term < TERMS; ++term) {
            uint4* row = terms[term][step / 4][head];
            u32 piece = step % 4 * 2;
            row[piece ^ head % 8] = make_uint4(low[0][term], low[1][term], low[2][term], low[3][term]);
            row[(piece + 1) ^ head % 8] = make_uint4(high[0][term], high[1][term], high[2][term], high[3][term]);
        }
    }
};

// A warp's keys of sixteen pools from `first`; pools behind `count` are zeros.
DEVICE void load_keys(uint4 (&keys)[2][BLOCKS], const u16* const* pages, u32 first, u32 count, u32 page_pools) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        u32 pool = first + half * 8 + lane_index() / 4;
        const u16* row = pool < count ? pages[pool / page_pools] + (u64)(pool % page_pools) * DIM : nullptr;
#pragma unroll
        for (u32 block = 0; block < BLOCKS; ++block)
            keys[half][block] = row ? *(const uint4*)(row + block * 32 + lane_index() % 4 * 8) : make_uint4(0, 0, 0, 0);
    }
}

// Looks at the block's rows, so that none of them waits for the tables.
DEVICE void find_rows(Room& room, u64 first_row, u32 count, u32 first_pool, u32 kept, u32 kpool, const DsaPart* parts,
                      const u32* row_parts) {
    if (threadIdx.x < ROWS) {
        u32 part = threadIdx.x < count ? row_parts[first_row + threadIdx.x] : NO_PART, visible = 0;
        if (part != NO_PART) {
            visible = visible_pools(parts[part], first_row + threadIdx.x - parts[part].first_row, kpool);
            // All visible pools are picked when they are few.
            if (visible <= kept || first_pool >= visible) part = NO_PART;
        }
        room.parts[threadIdx.x] = part, room.visible[threadIdx.x] = visible;
    }
    __syncthreads();
}

// The next row from `row` that has something to score.
DEVICE u32 next_row(const Room& room, u32 row, u32 count) {
    while (row < count && room.parts[row] == NO_PART) ++row;
    return row;
}

// As score_pools of select.cu, for rows `first_row..first_row + rows`. Grid: blocks of pools × groups of rows. Dynamic shared
// memory: Room. Rows of q are whole pieces of sixteen bytes, those of weights of eight.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
score_pools_warpgroup(u32* scores, u32 stride, const float* q, u32 q_stride, const float* weights, u32 weights_stride, u32 kept,
                      u32 kpool, u32 page_rows, u32 first_row, u32 rows, const DsaPart* parts, const u32* row_parts,
                      const u16* const* pages) {
    extern __shared__ uint4 score_room[];
    Room& room = *(Room*)score_room;
    u32 first = blockIdx.x * POOLS, pool = first + warp_index() * 16 + lane_index() / 4;
    u64 begin = (u64)first_row + blockIdx.y * ROWS;
    u32 count = min(ROWS, rows - blockIdx.y * ROWS);
    find_rows(room, begin, count, first, kept, kpool, parts, row_parts);
    u32 row = next_row(room, 0, count), held = NO_PART, buffer = 0;
    if (row >= count) return;
    q += begin * q_stride, weights += begin * weights_stride, scores += (begin - first_row) * stride;
    float head_scale = __fdiv_rn(1.0f, __fsqrt_rn((float)HEADS)), dot_scale = __fdiv_rn(1.0f, __fsqrt_rn((float)DIM));
    uint4 keys[2][BLOCKS];
    Queries next;
    next.load(q + (u64)row * q_stride);
    next.store(room.terms[0]);
    show_shared();
    __syncthreads();
    while (row < count) {
        u32 after = next_row(room, row + 1, count), part = room.parts[row];
        if (after < count) next.load(q + (u64)after * q_stride);
        if (held != part) {
            // All that the part's last row sees; a row's scores end with what it sees itself.
            DsaPart of = parts[part];
            load_keys(keys, pages + of.first_page, first + warp_index() * 16, visible_pools(of, of.rows - 1, kpool),
                      page_rows / kpool);
            held = part;
        }
        float2 factors[4];
#pragma unroll
        for (u32 tile = 0; tile < 4; ++tile)
            factors[tile] = *(const float2*)(weights + (u64)row * weights_stride + tile * 8 + lane_index() % 4 * 2);
        float dots[4][4], rest[4][4];
        before_products();
#pragma unroll
        for (u32 step = 0; step < STEPS; ++step) {
            uint4 a = keys[0][step / 2], b = keys[1][step / 2];
            u32 fragment[4];
            fragment[0] = step % 2 ? a.z : a.x, fragment[1] = step % 2 ? b.z : b.x;
            fragment[2] = step % 2 ? a.w : a.y, fragment[3] = step % 2 ? b.w : b.y;
#pragma unroll
            for (u32 term = 0; term < TERMS; ++term) {
                const u8* columns = (const u8*)room.terms[buffer][term][step / 4] + step % 4 * 32;
                multiply_heads(term == 0 ? dots : rest, fragment, columns, term == 0 ? step > 0 : step > 0 || term > 1);
            }
        }
        end_products();
        if (after < count) next.store(room.terms[buffer ^ 1]);
        show_shared();
        wait_products<0>();
        settle(dots);
        settle(rest);
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (u32 tile = 0; tile < 4; ++tile) {
            float factor[2] = {__fmul_rn(factors[tile].x, head_scale), __fmul_rn(factors[tile].y, head_scale)};
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                float liked = __fmul_rn(__fadd_rn(dots[tile][i], rest[tile][i]), dot_scale);
                liked = liked < 0.0f ? 0.0f : liked;
                sums[i / 2] = __fmaf_rn(factor[i % 2], liked, sums[i / 2]);
            }
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            float sum = sums[half];
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
            if (lane_index() % 4 == 0 && pool + half * 8 < room.visible[row])
                scores[(u64)row * stride + pool + half * 8] = ordered(sum);
        }
        __syncthreads();
        row = after, buffer ^= 1;
    }
}
