// A DSA layer between its input's product and its queries', for few rows, in one launch: the norms of the low-rank row, the latent
// and the indexer's key, and their way into the cache. Sums have the trees of norms.cu, pools the formula of append.cu.
#include "append/members.cuh"
#include "common/base.cuh"
#include "common/bf16.cuh"
#include "common/parts.cuh"
#include "common/tensor.cuh"
#include "norm/rows.cuh"

// Widths of latents and keys, and threads of a block: those of a norm of a low-rank row. As in src/op/enter.rs.
#define RANK 512
#define KEY 128
#define THREADS 256
#define WARPS (THREADS / WARP)
// Two warps norm a latent, one norms a key, as blocks of their widths would.
#define TEAMS (WARPS / 2)

struct Latents {
    float* rows;
    const float* weight;
    u64 stride;
    float epsilon;
};

// A block's latents, one for each team: normed in place, and into the cache.
DEVICE void enter_latents(const Latents& latents, u32 row, u32 rows, u32 page_rows, const DsaPart* parts, const u32* row_parts,
                          u16* const* pages) {
    __shared__ float sums[TEAMS][2];
    u32 team = threadIdx.x / 64, thread = threadIdx.x % 64;
    float weight[8], x[8], chain = 0.0f;
#pragma unroll
    for (u32 k = 0; k < 8; ++k) weight[k] = latents.weight[thread + 64 * k];
    grid_wait();
    row += team;
    // Teams have barriers of their own.
    if (row >= rows) return;
    u32 index = row_parts[row];
    float* from = latents.rows + row * latents.stride;
#pragma unroll
    for (u32 k = 0; k < 8; ++k) x[k] = from[thread + 64 * k];
    u16* page = nullptr;
    if (index != NO_PART) {
        DsaPart part = parts[index];
        u32 position = part.position + row - part.first_row;
        page = pages[part.first_page + position / page_rows] + (u64)(position % page_rows) * RANK;
    }
#pragma unroll
    for (u32 k = 0; k < 8; ++k) chain = __fmaf_rn(x[k], x[k], chain);
    chain = warp_sum(chain);
    if (lane_index() == 0) sums[team][warp_index() % 2] = chain;
    team_barrier(team + 1, 64);
    float factor = rms_factor(__fadd_rn(sums[team][0], sums[team][1]), RANK, latents.epsilon);
#pragma unroll
    for (u32 k = 0; k < 8; ++k) {
        float value = __fmul_rn(__fmul_rn(x[k], factor), weight[k]);
        from[thread + 64 * k] = value;
        if (page) page[thread + 64 * k] = f32_to_bf16(value);
    }
}

struct Keys {
    float* rows;
    const float* weight;
    const float* bias;
    const float* gates;
    const float* ape;
    u64 stride, gate_stride;
    float epsilon;
};

// A layer norm in place, by a warp.
DEVICE void norm_key(float* row, const float (&weight)[KEY / WARP], const float (&bias)[KEY / WARP], float epsilon) {
    u32 lane = lane_index();
    float x[KEY / WARP], sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (u32 k = 0; k < KEY / WARP; ++k) x[k] = row[lane + WARP * k];
#pragma unroll
    for (u32 k = 0; k < KEY / WARP; ++k) sum = __fadd_rn(sum, x[k]);
    float mean = __fdiv_rn(warp_sum(sum), (float)KEY);
#pragma unroll
    for (u32 k = 0; k < KEY / WARP; ++k) {
        float centred = __fadd_rn(x[k], -mean);
        squares = __fmaf_rn(centred, centred, squares);
    }
    float factor = rms_factor(warp_sum(squares), KEY, epsilon);
#pragma unroll
    for (u32 k = 0; k < KEY / WARP; ++k)
        row[lane + WARP * k] = __fmaf_rn(__fmul_rn(__fadd_rn(x[k], -mean), factor), weight[k], bias[k]);
}

// A part's keys: normed in place, into the ring, and the keys of the pools that they complete.
DEVICE void enter_keys(const Keys& keys, u32 kpool, u32 page_rows, u32 ring_rows, const DsaPart* parts, u32 index,
                       u16* const* pages) {
    float weight[KEY / WARP], bias[KEY / WARP];
#pragma unroll
    for (u32 k = 0; k < KEY / WARP; ++k)
        weight[k] = keys.weight[lane_index() + WARP * k], bias[k] = keys.bias[lane_index() + WARP * k];
    grid_wait();
    DsaPart part = parts[index];
    for (u32 row = warp_index(); row < part.rows; row += WARPS)
        norm_key(keys.rows + (part.first_row + row) * keys.stride, weight, bias, keys.epsilon);
    __syncthreads();
    Members members = {keys.rows + part.first_row * keys.stride, keys.gates + part.first_row * keys.gate_stride,
                       keys.stride, keys.gate_stride, part.ring, ring_rows, KEY, part.position};
    u32 channel = threadIdx.x % KEY, group = threadIdx.x / KEY;
    // Only the first pool reads the ring; the thread that has its channel of it writes that channel of the ring later.
    u32 first = part.position / kpool, last = (part.position + part.rows) / kpool;
    for (u32 pool = first + group; pool < last; pool += THREADS / KEY) {
        u32 pools = page_rows / kpool;
        u16* to = pages[part.first_page + pool / pools] + (u64)(pool % pools) * KEY;
        to[channel] = f32_to_bf16(pool_key(members, keys.ape, pool * kpool, kpool, channel));
    }
    if (group != 0) return;
    for (u32 from = part.rows - min(part.rows, ring_rows); from < part.rows; ++from) {
        float* slot = part.ring + (u64)((part.position + from) % ring_rows) * 2 * KEY + channel;
        slot[0] = members.key(part.position + from, channel);
        slot[KEY] = members.gate(part.position + from, channel);
    }
}

// The picks of a row that sees no more pools than it may pick: all of them.
DEVICE void pick_all(u32* picks, u32 kept, u32 row, u32 kpool, const DsaPart* parts, const u32* row_parts) {
    grid_wait();
    DsaPart part = parts[row_parts[row]];
    u32 visible = visible_pools(part, row - part.first_row, kpool);
    for (u32 i = threadIdx.x; i < kept; i += THREADS) picks[(u64)row * kept + i] = i < visible ? i : 0xFFFFFFFFu;
}

// Grid: a block for each row's low-rank row, for each four latents, for each part that has keys, then for each row's picks.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
dsa_enter(float* low_rank, u32 low_rank_stride, const float* low_rank_weight, u32 width, float epsilon, float* latent_rows,
          u32 latents_stride, const float* latent_weight, float latent_epsilon, float* key_rows, u32 keys_stride,
          const float* key_weight, const float* key_bias, float key_epsilon, const float* gates, u32 gates_stride,
          const float* ape, u32 rows, u32 kpool, u32 page_rows, u32 ring_rows, const DsaPart* parts, const u32* row_parts,
          u16* const* latent_pages, u16* const* key_pages, u32 key_parts, u32* picks, u32 kept) {
    __shared__ float room[32];
    grid_release();
    u64 block = blockIdx.x;
    if (block < rows) {
        float* row = low_rank + block * low_rank_stride;
        rms_row(row, row, low_rank_weight, width, epsilon, room, [] { grid_wait(); });
        return;
    }
    block -= rows;
    if (block < ceil_div(rows, TEAMS)) {
        Latents latents = {latent_rows, latent_weight, latents_stride, latent_epsilon};
        enter_latents(latents, block * TEAMS, rows, page_rows, parts, row_parts, latent_pages);
        return;
    }
    block -= ceil_div(rows, TEAMS);
    if (block >= key_parts) return pick_all(picks, kept, block - key_parts, kpool, parts, row_parts);
    Keys keys = {key_rows, key_weight, key_bias, gates, ape, keys_stride, gates_stride, key_epsilon};
    enter_keys(keys, kpool, page_rows, ring_rows, parts, block, key_pages);
}
