// architectures: sm_90a
// Attention of many rows by warp groups: the sums of attend.cu, with all of a row's heads together.
//
// A row has two blocks of threads, on neighbouring multiprocessors. Each has half of the dimensions: it gathers them, gives
// their part of all scores, and sums their columns of the output; parts of scores are exchanged, and both have all weights.
// While a panel of 64 dimensions is summed the panels before it are gathered for the next block of entries. A multiprocessor
// has blocks of two rows, so that one multiplies while the other waits or makes weights.
#include "attend/list.cuh"
#include "common/panels.cuh"
#include "common/bf16.cuh"
#include "common/fragments.cuh"

#define HEADS 64
#define RANK 512
#define PANEL 64
#define PANELS (RANK / PANEL)
#define GROUPS 2
#define OWN (PANELS / GROUPS)
#define THREADS 128
#define STEPS (BLOCK / 16)

// 64 rows of 64 dimensions in bf16, pieces swizzled.
typedef uint4 Panel[64][PANEL / 8];

// At a multiple of 1024 bytes, as a block's dynamic shared memory is. Two of them fill a multiprocessor's.
struct Room {
    Panel queries[2][OWN];
    Panel latents[OWN];
    float4 parts[8][THREADS];
    const u16* places[BLOCK];
    // The other block's parts are here; the other block has read this one's.
    u64 here, taken;
};

// Which half of the dimensions this block has.
DEVICE u32 group_index() { return blockIdx.x % GROUPS; }

// A row's queries as two terms, this block's dimensions; heads behind the last are zeros.
DEVICE void load_queries(Room& room, const float* from, u32 heads) {
    const u32 pieces = RANK / GROUPS / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < HEADS * pieces; i += THREADS) {
        u32 head = i / pieces, piece = i % pieces, terms[4][2];
        float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
        if (head < heads) {
            const float4* x = (const float4*)(from + (u64)head * RANK + group_index() * (RANK / GROUPS) + piece * 8);
            low = x[0], high = x[1];
        }
        split_pair(terms[0], low.x, low.y), split_pair(terms[1], low.z, low.w);
        split_pair(terms[2], high.x, high.y), split_pair(terms[3], high.z, high.w);
#pragma unroll
        for (u32 term = 0; term < 2; ++term)
            room.queries[term][piece / 8][head][piece % 8 ^ head % 8] =
                make_uint4(terms[0][term], terms[1][term], terms[2][term], terms[3][term]);
    }
}

// Where a thread's entry of the next blocks stands. Each step of the way is read a block before the next one needs it, so that
// nobody waits for it. Nothing stands behind the last entry.
struct Finder {
    u32 position;
    const u16* place;

    // Behind it the place is that of block `block`, the position of the one after.
    __device__ __forceinline__ void advance(const Row& row, u32 block) {
        u32 entry = block * BLOCK + threadIdx.x;
        place = entry < row.count ? row.at(position) : nullptr;
        position = entry + BLOCK < row.count ? row.position(entry + BLOCK) : 0;
    }
};

// What a thread copies of a block of entries: a piece of four rows of each panel.
struct Gather {
    const u16* from[BLOCK / 16];
    u32 bytes[BLOCK / 16];

    __device__ __forceinline__ void find(const Room& room, const Row& row) {
        const u16* place[BLOCK / 16];
#pragma unroll
        for (u32 i = 0; i < BLOCK / 16; ++i) place[i] = room.places[i * 16 + threadIdx.x / 8];
#pragma unroll
        for (u32 i = 0; i < BLOCK / 16; ++i) {
            // Nothing is read from the table of pages; it is a valid address.
            from[i] = (place[i] ? place[i] : (const u16*)row.pages) + group_index() * OWN * PANEL + threadIdx.x % 8 * 8;
            bytes[i] = place[i] ? 16 : 0;
        }
    }

    // Starts copying panel `index` of this block's; what is not there is zeros.
    __device__ __forceinline__ void start(Panel& panel, u32 index) const {
        u32 piece = threadIdx.x % 8 ^ threadIdx.x / 8 % 8;
#pragma unroll
        for (u32 i = 0; i < BLOCK / 16; ++i)
            copy_async_16(&panel[i * 16 + threadIdx.x / 8][piece], from[i] + index * PANEL, bytes[i]);
        copy_async_commit();
    }
};

// A lane's heads: rows lane / 4 and 8 more of its warp's sixteen.
struct Heads {
    Weight of[2];

    __device__ __forceinline__ void clear() { of[0] = of[1] = {-infinity(), 0.0f}; }
};

// Waits for the block's latents and shows them to the tensor cores. (A fence waits for all of a thread's copies: a panel that is
// waited for alone would wait for the others too.)
DEVICE void await_latents() {
    copy_async_wait<0>();
    show_shared();
    __syncthreads();
}

// Starts a panel's part of the scores.
DEVICE void score_panel(float (&scores)[8][4], const Room& room, u32 index, bool first) {
    const u8 *latents = (const u8*)room.latents[index], *high = (const u8*)room.queries[0][index],
             *low = (const u8*)room.queries[1][index];
#pragma unroll
    for (u32 step = 0; step < PANEL / 16; ++step) {
        multiply_rows(scores, high + step * 32, latents + step * 32, !first || step > 0);
        multiply_rows(scores, low + step * 32, latents + step * 32, 1);
    }
    end_products();
}

// Adds the other block's half. A block stores to the other's room when that one has read what was there before.
DEVICE void exchange(float (&scores)[8][4], Room& room, u32 block, bool more) {
    u32 other = group_index() ^ 1;
    if (threadIdx.x == 0) arrive_with_bytes(&room.here, sizeof(room.parts));
    if (block > 0) await_barrier(&room.taken, (block - 1) % 2);
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
        store_to_block(&room.parts[i][threadIdx.x], &room.here, other,
                       make_float4(scores[i][0], scores[i][1], scores[i][2], scores[i][3]));
    await_barrier(&room.here, block % 2);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        float4 part = room.parts[i][threadIdx.x];
        scores[i][0] = __fadd_rn(scores[i][0], part.x), scores[i][1] = __fadd_rn(scores[i][1], part.y);
        scores[i][2] = __fadd_rn(scores[i][2], part.z), scores[i][3] = __fadd_rn(scores[i][3], part.w);
    }
    settle(scores);
    if (more) arrive_at_block(&room.taken, other);
}

// Turns scores of `count` entries into weights; `keep` brings what was summed before to the new maximum.
DEVICE void soften(float (&p)[8][4], Heads& heads, float (&keep)[2], u32 count, float scale) {
#pragma unroll
    for (u32 tile = 0; tile < 8; ++tile)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) p[tile][i] = __fmul_rn(p[tile][i], scale);
    if (count < BLOCK) {
#pragma unroll
        for (u32 tile = 0; tile < 8; ++tile)
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                if (tile * 8 + lane_index() % 4 * 2 + i % 2 >= count) p[tile][i] = -infinity();
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        Weight& state = heads.of[half];
        float highest = state.highest, sums[8];
#pragma unroll
        for (u32 tile = 0; tile < 8; ++tile)
            highest = fmaxf(highest, fmaxf(p[tile][half * 2], p[tile][half * 2 + 1]));
#pragma unroll
        for (u32 step = 1; step <= 2; step <<= 1) highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, step));
#pragma unroll
        for (u32 tile = 0; tile < 8; ++tile) {
#pragma unroll
            for (u32 i = half * 2; i < half * 2 + 2; ++i) p[tile][i] = weight_of(__fadd_rn(p[tile][i], -highest));
            sums[tile] = __fadd_rn(p[tile][half * 2], p[tile][half * 2 + 1]);
        }
#pragma unroll
        for (u32 step = 4; step > 0; step >>= 1)
#pragma unroll
            for (u32 tile = 0; tile < step; ++tile) sums[tile] = __fadd_rn(sums[tile], sums[tile + step]);
        float total = sums[0];
        total = __fadd_rn(total, __shfl_xor_sync(ALL_LANES, total, 1));
        total = __fadd_rn(total, __shfl_xor_sync(ALL_LANES, total, 2));
        keep[half] = weight_of(__fadd_rn(state.highest, -highest));
        state.total = __fmaf_rn(state.total, keep[half], total);
        state.highest = highest;
    }
}

// Weights as the fragments of the products with latents, in two terms.
DEVICE void arrange(u32 (&a)[2][STEPS][4], const float (&p)[8][4]) {
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 terms[2];
            split_pair(terms, p[step * 2 + i / 2][i % 2 * 2], p[step * 2 + i / 2][i % 2 * 2 + 1]);
            a[0][step][i] = terms[0], a[1][step][i] = terms[1];
        }
}

// out = out · keep. No branch leaves it out: tensor-core products behind a branch would run one by one.
DEVICE void rescale(float (&out)[8][4], const float (&keep)[2]) {
#pragma unroll
    for (u32 tile = 0; tile < 8; ++tile)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) out[tile][i] = __fmul_rn(out[tile][i], keep[i / 2]);
}

// Starts out += p · latents of a panel.
DEVICE void sum_panel(float (&out)[8][4], const u32 (&a)[2][STEPS][4], const Panel& panel) {
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step) {
        multiply_columns(out, a[0][step], panel[step * 16]);
        multiply_columns(out, a[1][step], panel[step * 16]);
    }
    end_products();
}

// One block: its scores, its weights, and what they add to a segment; the next block's gathering begins.
DEVICE void run_block(float (&out)[OWN][8][4], Heads& segment, Room& room, const Row& row, Finder& finder, u32 block,
                      float scale) {
    bool more = (block + 1) * BLOCK < row.count;
    float scores[8][4];
    before_products();
    await_latents();
#pragma unroll
    for (u32 panel = 0; panel < OWN; ++panel) score_panel(scores, room, panel, panel == 0);
    // This block's places were read when its gathering began.
    if (threadIdx.x < BLOCK) {
        room.places[threadIdx.x] = finder.place;
        finder.advance(row, block + 2);
    }
    wait_products<0>();
    settle(scores);
    exchange(scores, room, block, more);
    float keep[2];
    soften(scores, segment, keep, min(BLOCK, row.count - block * BLOCK), scale);
    u32 a[2][STEPS][4];
    arrange(a, scores);
#pragma unroll
    for (u32 panel = 0; panel < OWN; ++panel) {
        rescale(out[panel], keep);
        before_products();
        sum_panel(out[panel], a, room.latents[panel]);
    }
    // A panel that all warps have summed makes room for the next block's.
    Gather next;
    wait_products<3>();
    __syncthreads();
    if (more) {
        next.find(room, row);
        next.start(room.latents[0], 0);
    }
    wait_products<2>();
    __syncthreads();
    if (more) next.start(room.latents[1], 1);
    wait_products<1>();
    __syncthreads();
    if (more) next.start(room.latents[2], 2);
    wait_products<0>();
    __syncthreads();
    if (more) next.start(room.latents[3], 3);
#pragma unroll
    for (u32 panel = 0; panel < OWN; ++panel) settle(out[panel]);
}

// Folds a segment into what waits in `to`; the last one is divided by the sum of weights.
DEVICE void fold_segment(float* to, float (&out)[OWN][8][4], Heads& whole, const Heads& segment, u32 heads, bool begins,
                         bool ends) {
    u32 lane = lane_index(), first_head = warp_index() * 16 + lane / 4;
    float2 factors[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) factors[half] = fold(whole.of[half], segment.of[half]);
#pragma unroll
    for (u32 panel = 0; panel < OWN; ++panel) {
        float2* places[2];
        float2 before[2][8];
        // All of a panel is asked for before one is waited for.
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 head = first_head + half * 8;
            places[half] = (float2*)(to + (u64)head * RANK + (group_index() * OWN + panel) * PANEL + lane % 4 * 2);
#pragma unroll
            for (u32 tile = 0; tile < 8; ++tile)
                before[half][tile] = begins || head >= heads ? make_float2(0.0f, 0.0f) : places[half][tile * 4];
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half)
#pragma unroll
            for (u32 tile = 0; tile < 8; ++tile) {
                float x = folded(before[half][tile].x, out[panel][tile][half * 2], factors[half]);
                float y = folded(before[half][tile].y, out[panel][tile][half * 2 + 1], factors[half]);
                if (ends) x = __fdiv_rn(x, whole.of[half].total), y = __fdiv_rn(y, whole.of[half].total);
                if (first_head + half * 8 < heads) places[half][tile * 4] = make_float2(x, y);
            }
    }
}

// Grid: two blocks for each group of 64 heads × rows. Dynamic shared memory: Room. Rows of q are whole pieces of sixteen bytes,
// those of out of eight; latents have RANK values.
extern "C" __global__ void __cluster_dims__(GROUPS, 1, 1) __launch_bounds__(THREADS, 2)
attend_rows_warpgroup(float* all_out, u32 out_stride, ATTENTION) {
    extern __shared__ uint4 warpgroup_room[];
    Room& room = *(Room*)warpgroup_room;
    Attention of = ATTENTION_OF;
    u64 index = blockIdx.y;
    Row row;
    if (!find_row(row, of, index)) return;
    u32 first_head = blockIdx.x / GROUPS * HEADS, blocks = ceil_div(row.count, BLOCK);
    heads = min(HEADS, heads - first_head);
    float* to = all_out + index * out_stride + first_head * RANK;
    Finder finder = {threadIdx.x < BLOCK && threadIdx.x < row.count ? row.position(threadIdx.x) : 0, nullptr};
    if (threadIdx.x < BLOCK) {
        finder.advance(row, 0);
        room.places[threadIdx.x] = finder.place;
        finder.advance(row, 1);
    }
    load_queries(room, q + index * q_stride + first_head * RANK, heads);
    if (threadIdx.x == 0) {
        start_barrier(&room.here, 1);
        start_barrier(&room.taken, THREADS / WARP);
    }
    show_shared();
    // The other block must have begun before anything is stored to it.
    cluster_arrive();
    cluster_wait();
    Gather begin;
    begin.find(room, row);
#pragma unroll
    for (u32 panel = 0; panel < OWN; ++panel) begin.start(room.latents[panel], panel);
    float out[OWN][8][4];
    Heads whole, segment;
    whole.clear();
    for (u32 first = 0; first < blocks; first += SEGMENT / BLOCK) {
        u32 last = min(first + SEGMENT / BLOCK, blocks);
        segment.clear();
#pragma unroll
        for (u32 panel = 0; panel < OWN; ++panel)
#pragma unroll
            for (u32 tile = 0; tile < 8; ++tile)
#pragma unroll
                for (u32 i = 0; i < 4; ++i) out[panel][tile][i] = 0.0f;
        for (u32 block = first; block < last; ++block) run_block(out, segment, room, row, finder, block, of.scale);
        fold_segment(to, out, whole, segment, heads, first == 0, last == blocks);
    }
}
