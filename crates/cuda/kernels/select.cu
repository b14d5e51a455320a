// Which pools a row attends to: scores by tensor cores, then the exact best by their bits.
#include "common/base.cuh"
#include "common/bf16.cuh"
#include "common/fragments.cuh"
#include "common/maths.cuh"
#include "common/parts.cuh"
#include "common/tensor.cuh"

// Warps of a block, and pools of a warp: two tiles of sixteen.
#define WARPS 8
#define TILES 2
#define BLOCK_POOLS (WARPS * TILES * 16)
// Dimensions are taken in blocks of 32, two steps of a tensor-core product: lane % 4 holds eight in a row of them, the first
// four in the first step. Widths up to 128 have their keys in registers.
#define MAX_BLOCKS 4
// Terms of a query: three bf16 hold any fp32.
#define TERMS 3

// Eight values of a cached row from `at`; zeros behind `width`.
DEVICE uint4 read_eight(const u16* row, u32 at, u32 width) {
    if (at + 8 <= width && ((u64)(row + at) & 15) == 0) return *(const uint4*)(row + at);
    u32 pairs[4];
    for (u32 i = 0; i < 4; ++i) {
        u32 low = at + 2 * i < width ? row[at + 2 * i] : 0;
        u32 high = at + 2 * i + 1 < width ? row[at + 2 * i + 1] : 0;
        pairs[i] = low | high << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The queries of a row as fragments: for each tile of eight heads, block of 32, step, term and lane, a pair of registers.
DEVICE void arrange_queries(uint2* fragments, const float* q, u32 heads, u32 dim, u32 blocks) {
    u32 tiles = ceil_div(heads, 8), places = tiles * blocks * 2 * WARP;
    for (u32 place = threadIdx.x; place < places; place += blockDim.x) {
        u32 lane = place % WARP, step = place / WARP % 2, block = place / WARP / 2 % blocks;
        u32 head = place / WARP / 2 / blocks * 8 + lane / 4, first = block * 32 + lane % 4 * 8 + step * 4;
        float x[4];
        for (u32 i = 0; i < 4; ++i) x[i] = head < heads && first + i < dim ? q[head * dim + first + i] : 0.0f;
        u32 low[TERMS], high[TERMS];
        split_pair(low, x[0], x[1]);
        split_pair(high, x[2], x[3]);
        for (u32 term = 0; term < TERMS; ++term) {
            fragments[(place / WARP * TERMS + term) * WARP + lane] = make_uint2(low[term], high[term]);
        }
    }
}

// Keys of two tiles of sixteen pools from `first`; pools behind `count` are zeros.
DEVICE void load_keys(uint4 (&keys)[TILES][2][MAX_BLOCKS], const u16* const* pages, u32 first, u32 count, u32 page_pools,
                      u32 dim, u32 blocks) {
    u32 lane = lane_index();
#pragma unroll
    for (u32 tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 pool = first + tile * 16 + half * 8 + lane / 4;
            bool there = pool < count;
            const u16* row = there ? pages[pool / page_pools] + (u64)(pool % page_pools) * dim : nullptr;
#pragma unroll
            for (u32 block = 0; block < MAX_BLOCKS; ++block) {
                bool read = there && block < blocks;
                keys[tile][half][block] =
                    read ? read_eight(row, block * 32 + lane % 4 * 8, dim) : make_uint4(0, 0, 0, 0);
            }
        }
}

// Dot products of a tile of pools with a tile of heads. The first terms have a chain of their own.
DEVICE void dots_of(float (&dots)[4], const uint4 (&keys)[2][MAX_BLOCKS], const uint2* fragments, u32 blocks) {
    float rest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) dots[i] = 0.0f;
#pragma unroll
    for (u32 block = 0; block < MAX_BLOCKS; ++block) {
        if (block >= blocks) break;
        uint4 a = keys[0][block], b = keys[1][block];
#pragma unroll
        for (u32 step = 0; step < 2; ++step) {
            u32 first = step == 0 ? a.x : a.z, second = step == 0 ? b.x : b.z;
            u32 third = step == 0 ? a.y : a.w, fourth = step == 0 ? b.y : b.w;
#pragma unroll
            for (u32 term = 0; term < TERMS; ++term) {
                uint2 q = fragments[((block * 2 + step) * TERMS + term) * WARP + lane_index()];
                mma_bf16(term == 0 ? dots : rest, first, second, third, fourth, q.x, q.y);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) dots[i] = __fadd_rn(dots[i], rest[i]);
}

// Scores of rows `first_row..` for the pools that they see, as numbers that sort as the scores do: Σ_h weight[h] ·
// heads^-0.5 · max(0, dot · dim^-0.5). A lane sums two heads of each tile, ascending; lanes are folded by a butterfly.
// Grid: blocks of pools × rows. Dynamic shared memory: the row's fragments.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
score_pools(u32* scores, u32 stride, const float* q, u32 q_stride, const float* weights, u32 weights_stride, u32 heads, u32 dim,
            u32 kept, u32 kpool, u32 page_rows, u32 first_row, const DsaPart* parts, const u32* row_parts,
            const u16* const* pages) {
    extern __shared__ uint2 fragments[];
    grid_release();
    grid_wait();
    u64 row = first_row + blockIdx.y;
    u32 index = row_parts[row];
    if (index == NO_PART) return;
    DsaPart part = parts[index];
    u32 visible = visible_pools(part, row - part.first_row, kpool), first = blockIdx.x * BLOCK_POOLS;
    // All visible pools are picked when they are few.
    if (visible <= kept || first >= visible) return;
    u32 blocks = ceil_div(dim, 32), tiles = ceil_div(heads, 8);
    arrange_queries(fragments, q + row * q_stride, heads, dim, blocks);
    __syncthreads();
    first += warp_index() * TILES * 16;
    if (first >= visible) return;
    uint4 keys[TILES][2][MAX_BLOCKS];
    load_keys(keys, pages + part.first_page, first, visible, page_rows / kpool, dim, blocks);
    float head_scale = __fdiv_rn(1.0f, __fsqrt_rn((float)heads)), dot_scale = __fdiv_rn(1.0f, __fsqrt_rn((float)dim));
    float sums[TILES][2] = {};
    weights += row * weights_stride;
    for (u32 heads_tile = 0; heads_tile < tiles; ++heads_tile) {
        float factor[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            u32 head = heads_tile * 8 + lane_index() % 4 * 2 + i;
            factor[i] = head < heads ? __fmul_rn(weights[head], head_scale) : 0.0f;
        }
#pragma unroll
        for (u32 tile = 0; tile < TILES; ++tile) {
            float dots[4];
            dots_of(dots, keys[tile], fragments + heads_tile * blocks * 2 * TERMS * WARP, blocks);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                float liked = __fmul_rn(dots[i], dot_scale);
                liked = liked < 0.0f ? 0.0f : liked;
                sums[tile][i / 2] = __fmaf_rn(factor[i % 2], liked, sums[tile][i / 2]);
            }
        }
    }
#pragma unroll
    for (u32 tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            float sum = sums[tile][half];
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
            u32 pool = first + tile * 16 + half * 8 + lane_index() / 4;
            if (lane_index() % 4 == 0 && pool < visible) scores[(u64)blockIdx.y * stride + pool] = ordered(sum);
        }
}

#define PICK_THREADS 512

// Adds up a count over the block: the sum of lower threads' counts; `total` is the sum of all.
DEVICE u32 counts_before(u32 count, u32* room, u32& total) {
    u32 sum = count;
#pragma unroll
    for (u32 step = 1; step < WARP; step <<= 1) {
        u32 other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane_index() >= step) sum += other;
    }
    __syncthreads();
    if (lane_index() == WARP - 1) room[warp_index()] = sum;
    __syncthreads();
    u32 before = 0;
    total = 0;
    for (u32 warp = 0; warp < PICK_THREADS / WARP; ++warp) {
        if (warp < warp_index()) before += room[warp];
        total += room[warp];
    }
    return before + sum - count;
}

// The byte of the `left`-th greatest key, and how many keys have a greater one. A warp; a lane has eight bytes, from the top.
DEVICE void find_byte(const u32* histogram, u32 left, u32* found) {
    u32 top = 255 - lane_index() * 8, counts[8], sum = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        counts[i] = histogram[top - i];
        sum += counts[i];
    }
    u32 through = sum;
#pragma unroll
    for (u32 step = 1; step < WARP; step <<= 1) {
        u32 other = __shfl_up_sync(ALL_LANES, through, step);
        if (lane_index() >= step) through += other;
    }
    u32 above = through - sum;
    if (above >= left || through < left) return;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        if (above < left && above + counts[i] >= left) {
            found[0] = top - i;
            found[1] = above;
        }
        above += counts[i];
    }
}

// The `kept`-th greatest of `count` keys, and how many equal to it are kept, by radix from the highest byte.
DEVICE u32 threshold_of(const u32* keys, u32 count, u32 kept, u32& equals, u32* histogram, u32* found) {
    u32 prefix = 0, left = kept;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < 256; i += PICK_THREADS) histogram[i] = 0;
        __syncthreads();
        for (u32 first = 0; first < count; first += PICK_THREADS) {
            u32 at = first + threadIdx.x;
            u32 key = at < count ? keys[at] : 0;
            bool counts = at < count && (shift == 24 || key >> (shift + 8) == prefix >> (shift + 8));
            u32 byte = counts ? key >> shift & 255 : 256;
            // Keys are alike: a warp adds equal bytes at once.
            u32 same = __match_any_sync(ALL_LANES, byte);
            if (counts && __ffs(same) - 1 == lane_index()) atomicAdd(histogram + byte, (u32)__popc(same));
        }
        __syncthreads();
        if (threadIdx.x < WARP) find_byte(histogram, left, found);
        __syncthreads();
        prefix |= found[0] << shift;
        left -= found[1];
        __syncthreads();
    }
    equals = left;
    return prefix;
}

// The picks of rows `first_row..`, ascending: keys above the threshold, and of those equal to it the first.
// Grid: a block for each row.
extern "C" __global__ void __launch_bounds__(PICK_THREADS)
pick_pools(u32* picks, const u32* scores, u32 stride, u32 kept, u32 kpool, u32 first_row, const DsaPart* parts,
           const u32* row_parts) {
    __shared__ u32 histogram[256], found[2], room[PICK_THREADS / WARP];
    grid_release();
    grid_wait();
    u64 row = first_row + blockIdx.x;
    u32 index = row_parts[row];
    if (index == NO_PART) return;
    DsaPart part = parts[index];
    u32 visible = visible_pools(part, row - part.first_row, kpool);
    picks += row * kept;
    if (visible <= kept) {
        for (u32 i = threadIdx.x; i < kept; i += PICK_THREADS) picks[i] = i < visible ? i : 0xFFFFFFFFu;
        return;
    }
    if (kept == 0) return;
    const u32* keys = scores + (u64)blockIdx.x * stride;
    u32 equals;
    u32 threshold = threshold_of(keys, visible, kept, equals, histogram, found);
    // A thread takes neighbouring pools, so that what it writes stands together.
    u32 each = ceil_div(visible, PICK_THREADS), first = min(threadIdx.x * each, visible), last = min(first + each, visible);
    u32 greater = 0, same = 0, total;
    for (u32 pool = first; pool < last; ++pool) {
        u32 key = keys[pool];
        greater += key > threshold;
        same += key == threshold;
    }
    u32 same_before = counts_before(same, room, total);
    u32 taken = same_before < equals ? min(same, equals - same_before) : 0;
    u32 to = counts_before(greater + taken, room, total);
    for (u32 pool = first; pool < last; ++pool) {
        u32 key = keys[pool];
        bool equal = key == threshold && taken > 0;
        if (equal) --taken;
        if (key > threshold || equal) picks[to++] = pool;
    }
}
