// Absorbed latent attention: a row's heads over the latents of its list, by tensor cores. attend/list.cuh has the order of sums.
//
// One block of threads may run all of a row's segments, or each segment has a block of threads and another kernel folds them,
// with the same bits; attend_warpgroup.cu has them too.
//
// A group of eight warps has sixteen heads; the groups of a block of threads share the gathered latents. A group's warp w
// gathers dimensions 64 w .. 64 w + 63, gives the scores of sixteen entries over one half of the dimensions, and sums the
// output's columns 64 w .. 64 w + 63.
#include "attend/list.cuh"
#include "common/base.cuh"
#include "common/bf16.cuh"
#include "common/fragments.cuh"
#include "common/maths.cuh"
#include "common/tensor.cuh"

#define HEADS 16
#define SLICE 64
#define WARPS 8
#define MAX_RANK (WARPS * SLICE)
#define HALVES (MAX_RANK / HALF)
#define GROUP_THREADS (WARPS * 32)
// Values of a row of scores, weights and queries in shared memory: what a warp reads at once stands in different banks.
#define SCORE_ROOM (BLOCK + 8)
#define WEIGHT_ROOM (BLOCK + 8)
#define QUERY_ROOM (MAX_RANK + 8)

// A group's share of the block's shared memory.
struct GroupRoom {
    u16 queries[2][HEADS][QUERY_ROOM];
    float scores[HALVES][HEADS][SCORE_ROOM];
    u16 weights[2][HEADS][WEIGHT_ROOM];
    float keep[HEADS];
    float2 fold[HEADS];
};

template <int GROUPS, int BUFFERS> struct Room {
    // Sixteen-byte pieces of a slice: piece p of entry e stands at p ^ (e % 8).
    uint4 latents[BUFFERS][WARPS][BLOCK][SLICE / 8];
    GroupRoom groups[GROUPS];
    const u16* places[2][BLOCK];
};

// The warp's group and its slice of the dimensions.
DEVICE u32 group_index() { return threadIdx.x / GROUP_THREADS; }
DEVICE u32 slice_index() { return warp_index() % WARPS; }

// Puts the places of a block's entries into `places`; null where there is none. Threads below 64.
DEVICE void place_block(const u16** places, const Row& row, u32 first, u32 last) {
    if (threadIdx.x >= BLOCK) return;
    u32 entry = first + threadIdx.x;
    places[threadIdx.x] = entry < last ? row.latent(entry) : nullptr;
}

// Starts the gathering of a slice of a block, a group's share of the entries each; what is not there is zeros.
template <int GROUPS> DEVICE void gather_slice(uint4 (*slice)[SLICE / 8], const u16* const* places, const Row& row) {
    u32 piece = lane_index() % 8, at = slice_index() * SLICE + piece * 8;
#pragma unroll
    for (u32 i = 0; i < BLOCK / 4 / GROUPS; ++i) {
        u32 entry = (i * GROUPS + group_index()) * 4 + lane_index() / 8;
        const u16* place = places[entry];
        bool there = place && at < row.rank;
        // Nothing is read from the table of pages; it is a valid address.
        const void* from = there ? (const void*)(place + at) : (const void*)row.pages;
        copy_async_16(&slice[entry][piece ^ (entry & 7)], from, there ? 16 : 0);
    }
    copy_async_commit();
}

// Sixteen heads' queries as two terms; zeros behind the rank and the heads.
DEVICE void load_queries(GroupRoom& room, const float* from, u32 rank, u32 heads) {
    for (u32 i = threadIdx.x % GROUP_THREADS; i < HEADS * MAX_RANK / 2; i += GROUP_THREADS) {
        u32 head = i / (MAX_RANK / 2), at = i % (MAX_RANK / 2) * 2, terms[2];
        bool there = head < heads && at < rank;
        const float* x = from + head * rank + at;
        split_pair(terms, there ? x[0] : 0.0f, there ? x[1] : 0.0f);
#pragma unroll
        for (u32 term = 0; term < 2; ++term) *(u32*)&room.queries[term][head][at] = terms[term];
    }
}

// A warp's part of the scores of a block: a half of the dimensions of sixteen entries.
DEVICE void score_half(GroupRoom& room, const uint4 (*latents)[BLOCK][SLICE / 8], u32 rank) {
    u32 lane = lane_index(), half = slice_index() / 4, first = slice_index() % 4 * 16;
    u32 end = min(ceil_div(rank, 16), (half + 1) * (HALF / 16));
    if (half * HALF >= rank) return;
    float sums[2][4] = {};
    u32 entry = first + lane / 16 * 8 + lane % 8;
#pragma unroll 4
    for (u32 step = half * (HALF / 16); step < end; ++step) {
        u32 c[4], q[2][4], piece = step % 4 * 2 + lane / 8 % 2;
        load_matrices(c, &latents[step / 4][entry][piece ^ (entry & 7)]);
#pragma unroll
        for (u32 term = 0; term < 2; ++term)
            load_matrices(q[term], &room.queries[term][lane % 16][step * 16 + lane / 16 * 8]);
#pragma unroll
        for (u32 tile = 0; tile < 2; ++tile)
#pragma unroll
            for (u32 term = 0; term < 2; ++term)
                mma_bf16(sums[tile], q[term][0], q[term][1], q[term][2], q[term][3], c[tile * 2], c[tile * 2 + 1]);
    }
#pragma unroll
    for (u32 tile = 0; tile < 2; ++tile) {
        u32 head = lane / 4, at = first + tile * 8 + lane % 4 * 2;
        *(float2*)&room.scores[half][head][at] = make_float2(sums[tile][0], sums[tile][1]);
        *(float2*)&room.scores[half][head + 8][at] = make_float2(sums[tile][2], sums[tile][3]);
    }
}

// Turns a block's scores into weights. Sixteen lanes have a head, four entries each; all of them know the head's `state`.
DEVICE void soften(GroupRoom& room, Weight& state, u32 count, u32 rank, float scale) {
    u32 head = threadIdx.x % GROUP_THREADS / 16, first = threadIdx.x % 16 * 4;
    float4 sum = *(const float4*)&room.scores[0][head][first];
    float s[4] = {sum.x, sum.y, sum.z, sum.w};
    for (u32 half = 1; half * HALF < rank; ++half) {
        float4 more = *(const float4*)&room.scores[half][head][first];
        s[0] = __fadd_rn(s[0], more.x), s[1] = __fadd_rn(s[1], more.y);
        s[2] = __fadd_rn(s[2], more.z), s[3] = __fadd_rn(s[3], more.w);
    }
    float highest = state.highest;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        s[i] = first + i < count ? __fmul_rn(s[i], scale) : -infinity();
        highest = fmaxf(highest, s[i]);
    }
#pragma unroll
    for (u32 step = 8; step > 0; step >>= 1) {
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, step));
    }
    float p[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) p[i] = weight_of(__fadd_rn(s[i], -highest));
    // Over tiles of eight entries first, so that a lane of attend_warpgroup.cu has them all.
    float low = __fadd_rn(p[0], p[1]), high = __fadd_rn(p[2], p[3]);
#pragma unroll
    for (u32 step = 8; step > 1; step >>= 1) {
        low = __fadd_rn(low, __shfl_xor_sync(ALL_LANES, low, step));
        high = __fadd_rn(high, __shfl_xor_sync(ALL_LANES, high, step));
    }
    float total = __fadd_rn(low, high);
    total = __fadd_rn(total, __shfl_xor_sync(ALL_LANES, total, 1));
    float keep = weight_of(__fadd_rn(state.highest, -highest));
    state.total = __fmaf_rn(state.total, keep, total);
    state.highest = highest;
    if (first == 0) room.keep[head] = keep;
    u32 left[2], right[2];
    split_pair(left, p[0], p[1]);
    split_pair(right, p[2], p[3]);
#pragma unroll
    for (u32 term = 0; term < 2; ++term) *(uint2*)&room.weights[term][head][first] = make_uint2(left[term], right[term]);
}

// A warp's columns: out = out · keep + p · latents.
DEVICE void sum_slice(float (&out)[8][4], const GroupRoom& room, const uint4 (*slice)[SLICE / 8]) {
    u32 lane = lane_index();
    float keep_low = room.keep[lane / 4], keep_high = room.keep[lane / 4 + 8];
#pragma unroll
    for (u32 tile = 0; tile < 8; ++tile) {
        out[tile][0] = __fmul_rn(out[tile][0], keep_low), out[tile][1] = __fmul_rn(out[tile][1], keep_low);
        out[tile][2] = __fmul_rn(out[tile][2], keep_high), out[tile][3] = __fmul_rn(out[tile][3], keep_high);
    }
#pragma unroll
    for (u32 step = 0; step < BLOCK / 16; ++step) {
        u32 p[2][4];
#pragma unroll
        for (u32 term = 0; term < 2; ++term)
            load_matrices(p[term], &room.weights[term][lane % 16][step * 16 + lane / 16 * 8]);
#pragma unroll
        for (u32 pair = 0; pair < 4; ++pair) {
            u32 c[4];
            u32 entry = step * 16 + lane % 16, piece = pair * 2 + lane / 16;
            load_transposed(c, &slice[entry][piece ^ (entry & 7)]);
#pragma unroll
            for (u32 half = 0; half < 2; ++half)
#pragma unroll
                for (u32 term = 0; term < 2; ++term)
                    mma_bf16(out[pair * 2 + half], p[term][0], p[term][1], p[term][2], p[term][3], c[half * 2],
                             c[half * 2 + 1]);
        }
    }
}

// Where a lane's values of a tile of eight columns stand.
template <typename Visit> DEVICE void each_output(u32 rank, u32 heads, Visit visit) {
#pragma unroll
    for (u32 tile = 0; tile < 8; ++tile)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 head = lane_index() / 4 + i / 2 * 8, column = slice_index() * SLICE + tile * 8 + lane_index() % 4 * 2 + i % 2;
            if (head < heads && column < rank) visit(tile, i, head, column);
        }
}

// Runs one segment: `out` and `state` are what it leaves. Entries `first..last` of the row. Every thread of the block is
// behind its last read of the room.
template <int GROUPS, int BUFFERS>
DEVICE void run_segment(float (&out)[8][4], Weight& state, Room<GROUPS, BUFFERS>& room, const Row& row,
                        u32 first, u32 last, float scale) {
    u32 slice = slice_index(), blocks = ceil_div(last - first, BLOCK), slices = ceil_div(row.rank, SLICE);
    GroupRoom& mine = room.groups[group_index()];
    state = {-infinity(), 0.0f};
#pragma unroll
    for (u32 tile = 0; tile < 8; ++tile)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) out[tile][i] = 0.0f;
    place_block(room.places[0], row, first, last);
    place_block(room.places[1], row, first + BLOCK, last);
    __syncthreads();
    gather_slice<GROUPS>(room.latents[0][slice], room.places[0], row);
    for (u32 block = 0; block < blocks; ++block) {
        u32 buffer = block % BUFFERS, start = first + block * BLOCK;
        copy_async_wait<0>();
        // The block's latents are there, and nobody is at work on the block before.
        __syncthreads();
        if (BUFFERS == 2 && block + 1 < blocks) {
            gather_slice<GROUPS>(room.latents[buffer ^ 1][slice], room.places[(block + 1) % 2], row);
        }
        score_half(mine, room.latents[buffer], row.rank);
        __syncthreads();
        soften(mine, state, min(BLOCK, last - start), row.rank, scale);
        // The places of this block were read when its gathering began, before the last barrier.
        place_block(room.places[block % 2], row, start + 2 * BLOCK, last);
        __syncthreads();
        if (slice < slices) sum_slice(out, mine, room.latents[buffer][slice]);
        if (BUFFERS == 1 && block + 1 < blocks) {
            __syncthreads();
            gather_slice<GROUPS>(room.latents[0][slice], room.places[(block + 1) % 2], row);
        }
    }
}

// All segments of a row, folded in order; what is folded waits in `out`. Grid: a block's heads × rows.
template <int GROUPS, int BUFFERS>
DEVICE void attend_row(float* out, u64 out_stride, const Attention& of, Room<GROUPS, BUFFERS>& room) {
    u64 index = blockIdx.y;
    Row row;
    if (!find_row(row, of, index)) return;
    u32 first_head = (blockIdx.x * GROUPS + group_index()) * HEADS;
    u32 heads = first_head < of.heads ? min(HEADS, of.heads - first_head) : 0;
    GroupRoom& mine = room.groups[group_index()];
    load_queries(mine, of.q + index * of.q_stride + first_head * of.rank, of.rank, heads);
    out += index * out_stride + first_head * of.rank;
    Weight whole = {-infinity(), 0.0f};
    for (u32 first = 0; first < row.count; first += SEGMENT) {
        float segment[8][4];
        Weight state;
        bool ends = first + SEGMENT >= row.count;
        run_segment(segment, state, room, row, first, min(first + SEGMENT, row.count), of.scale);
        float2 factors = fold(whole, state);
        __syncthreads();
        if (threadIdx.x % 16 == 0) {
            mine.fold[threadIdx.x % GROUP_THREADS / 16] = factors;
            mine.keep[threadIdx.x % GROUP_THREADS / 16] = whole.total;
        }
        __syncthreads();
        each_output(of.rank, heads, [&](u32 tile, u32 i, u32 head, u32 column) {
            float* place = out + head * of.rank + column;
            float total = folded(first == 0 ? 0.0f : *place, segment[tile][i], mine.fold[head]);
            *place = ends ? __fdiv_rn(total, mine.keep[head]) : total;
        });
        __syncthreads();
    }
}

// One segment of a row. Grid: segments × groups of sixteen heads × rows.
template <int BUFFERS> DEVICE void attend_segment(float* sums, Weight* states, const Attention& of, Room<1, BUFFERS>& room) {
    u64 index = blockIdx.z;
    Row row;
    if (!find_row(row, of, index)) return;
    u32 first = blockIdx.x * SEGMENT;
    if (first >= row.count) return;
    u32 first_head = blockIdx.y * HEADS, heads = min(HEADS, of.heads - first_head);
    load_queries(room.groups[0], of.q + index * of.q_stride + first_head * of.rank, of.rank, heads);
    float segment[8][4];
    Weight state;
    run_segment(segment, state, room, row, first, min(first + SEGMENT, row.count), of.scale);
    u64 place = (index * of.heads + first_head) * gridDim.x + blockIdx.x;
    if (threadIdx.x % 16 == 0 && threadIdx.x / 16 < heads) states[place + threadIdx.x / 16 * gridDim.x] = state;
    each_output(of.rank, heads, [&](u32 tile, u32 i, u32 head, u32 column) {
        sums[(place + head * gridDim.x) * of.rank + column] = segment[tile][i];
    });
}

// With room for two blocks of latents, one is gathered while the other is used, and two groups share them. Without, a group
// has a block of threads to itself.
#define ATTEND(BUFFERS)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(BUFFERS* GROUP_THREADS, 1)                                                   \
        attend_rows_##BUFFERS(float* out, u32 out_stride, ATTENTION) {                                                        \
        extern __shared__ uint4 attend_room[];                                                                                \
        Attention of = ATTENTION_OF;                                                                                          \
        attend_row(out, out_stride, of, *(Room<BUFFERS, BUFFERS>*)attend_room);                                               \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 1)                                                            \
        attend_segments_##BUFFERS(float* sums, Weight* states, ATTENTION) {                                                   \
        extern __shared__ uint4 attend_room[];                                                                                \
        Attention of = ATTENTION_OF;                                                                                          \
        attend_segment(sums, states, of, *(Room<1, BUFFERS>*)attend_room);                                                    \
    }

ATTEND(1)
ATTEND(2)

// Folds the segments of a row's heads in order. Grid: heads × rows.
KERNEL attend_fold(float* out, u32 out_stride, const float* sums, const Weight* states, u32 segments, u32 heads, u32 kept,
                   u32 rank, u32 kpool, const u32* picks, const DsaPart* parts, const u32* row_parts) {
    u64 index = blockIdx.y;
    u32 part_index = row_parts[index], head = blockIdx.x;
    if (part_index == NO_PART) return;
    DsaPart part = parts[part_index];
    Row row = list_row(picks + index * kept, kept, kpool, 1, rank, part, index - part.first_row, nullptr);
    u64 place = (index * heads + head) * segments;
    u32 used = ceil_div(row.count, SEGMENT);
    for (u32 i = threadIdx.x; i < rank; i += blockDim.x) {
        Weight whole = {-infinity(), 0.0f};
        float total = 0.0f;
        for (u32 segment = 0; segment < used; ++segment) {
            float2 factors = fold(whole, states[place + segment]);
            total = folded(total, sums[(place + segment) * rank + i], factors);
        }
        out[index * out_stride + head * rank + i] = __fdiv_rn(total, whole.total);
    }
}

// Latents whose rows are no whole pieces of sixteen bytes, or wider than eight slices: plain fp32.
// Grid: heads × rows. Dynamic shared memory: the query and the output.
KERNEL attend_any(float* out, u32 out_stride, ATTENTION) {
    extern __shared__ float any_room[];
    __shared__ float scores[BLOCK];
    float *query = any_room, *sum = any_room + rank;
    u64 index = blockIdx.y;
    u32 part_index = row_parts[index], head = blockIdx.x;
    if (part_index == NO_PART) return;
    DsaPart part = parts[part_index];
    Row row = list_row(picks + index * kept, kept, kpool, page_rows, rank, part, index - part.first_row, pages);
    for (u32 i = threadIdx.x; i < rank; i += blockDim.x) {
        query[i] = q[index * q_stride + head * rank + i];
        sum[i] = 0.0f;
    }
    Weight state = {-infinity(), 0.0f};
    for (u32 first = 0; first < row.count; first += BLOCK) {
        u32 count = min(BLOCK, row.count - first);
        __syncthreads();
        for (u32 entry = warp_index(); entry < count; entry += blockDim.x / WARP) {
            const u16* latent = row.latent(first + entry);
            float chain = 0.0f;
            for (u32 i = lane_index(); i < rank; i += WARP) chain = __fmaf_rn(query[i], bf16_to_f32(latent[i]), chain);
            chain = warp_sum(chain);
            if (lane_index() == 0) scores[entry] = __fmul_rn(chain, scale);
        }
        __syncthreads();
        float highest = state.highest, total = 0.0f;
        for (u32 entry = 0; entry < count; ++entry) highest = scores[entry] > highest ? scores[entry] : highest;
        float keep = exponential(__fadd_rn(state.highest, -highest));
        __syncthreads();
        if (threadIdx.x < count) scores[threadIdx.x] = exponential(__fadd_rn(scores[threadIdx.x], -highest));
        __syncthreads();
        for (u32 entry = 0; entry < count; ++entry) total = __fadd_rn(total, scores[entry]);
        for (u32 i = threadIdx.x; i < rank; i += blockDim.x) {
            float value = 0.0f;
            for (u32 entry = 0; entry < count; ++entry) {
                value = __fmaf_rn(scores[entry], bf16_to_f32(row.latent(first + entry)[i]), value);
            }
            sum[i] = __fmaf_rn(sum[i], keep, value);
        }
        state = {highest, __fmaf_rn(state.total, keep, total)};
    }
    for (u32 i = threadIdx.x; i < rank; i += blockDim.x) {
        out[index * out_stride + head * rank + i] = __fdiv_rn(sum[i], state.total);
    }
}
