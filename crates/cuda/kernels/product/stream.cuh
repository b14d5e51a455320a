// Products of few rows: weights stream through shared memory, eight rows at a time.
//
// A group is a member of the matrix and up to eight rows (columns of the instruction). A block keeps the group's inputs,
// rounded, and walks over tiles of 16 outputs. A team of warps shares a tile: each takes slices of 512 inputs in turn, and
// the slices' sums are added in ascending order, so that no bit hangs on the team's size. Every warp copies its own
// weights, three chunks ahead.
#pragma once
#include "product/encoding.cuh"
#include "product/groups.cuh"

// Chunks under way and at work.
#define STAGES 4u
// Units of a slice.
#define SLICE 8u

// Units copied at once: about 2 KiB of codes.
template <class E> struct Chunk {
    static constexpr u32 UNITS = E::WORDS <= 2u ? 8u : E::WORDS <= 4u ? 4u : E::WORDS <= 8u ? 2u : 1u;
    static constexpr u32 SCALES = UNITS * E::UNIT;
};

// What a block knows of its work; addresses are of shared memory.
struct Stream {
    u32 inputs, units, slices;
    // Warps of a team, teams of the block; this warp's place in its team, and its team.
    u32 team_warps, teams, place, team;
    // Rows of the group at hand.
    u32 count;
    u8 *x;
    // Where this lane's inputs of a unit begin, and bytes from half to half; zeros for a column without a row.
    const u8 *lane_x;
    u32 lane_step;
    float *sums_64;
    float *sums_32;
    float4 *slice_sums;
    // This warp's stages.
    u8 *stages;
    u32 stage_bytes;
    const Columns *columns;
    float *out;
    // Which half of `slice_sums` is free.
    u32 turn;
};

// A warp's walk over chunks: its slices of a tile, then its next tile.
struct Walk {
    u32 tile, slice, unit, end;
};

DEVICE void enter_slice(Walk &walk, const Stream &s)
{
    walk.unit = walk.slice * SLICE;
    walk.end = min(walk.unit + SLICE, s.units);
}

DEVICE void advance(Walk &walk, const Stream &s, u32 chunk)
{
    walk.unit += chunk;
    if (walk.unit < walk.end)
        return;
    walk.slice += s.team_warps;
    if (walk.slice >= s.slices) {
        walk.slice = s.place;
        walk.tile += s.teams;
    }
    enter_slice(walk, s);
}

DEVICE void copy_bytes(u8 *to, const u8 *from, u32 bytes)
{
    for (u32 at = lane_index() * 16u; at < bytes; at += 512u)
        copy_async_16(to + at, from + at);
}

// Starts the copy of a chunk's codes and scales.
template <class E> DEVICE void request(const Stream &s, const Part &part, const Walk &walk, u8 *stage)
{
    u32 units = min(Chunk<E>::UNITS, walk.end - walk.unit);
    const u8 *codes = part.codes + ((u64)walk.tile * s.units + walk.unit) * E::UNIT;
    if (units == Chunk<E>::UNITS) {
        constexpr u32 BYTES = Chunk<E>::UNITS * E::UNIT;
#pragma unroll
        for (u32 i = 0; i < (BYTES + 511u) / 512u; i++) {
            u32 at = i * 512u + lane_index() * 16u;
            if (BYTES % 512u == 0u || at < BYTES)
                copy_async_16(stage + at, codes + at);
        }
    } else {
        copy_bytes(stage, codes, units * E::UNIT);
    }
    if (E::ENTRY != 0u) {
        u32 first = (walk.unit * E::FOLDS) >> part.share;
        u32 last = (((walk.unit + units) * E::FOLDS - 1u) >> part.share) + 1u;
        const u8 *scales = part.scales + ((u64)walk.tile * part.entries + first) * E::ENTRY;
        copy_bytes(stage + Chunk<E>::SCALES, scales, (last - first) * E::ENTRY);
    }
}

// A column's inputs of a half unit.
DEVICE uint4 read_inputs(const Stream &s, u32 half)
{
    return *(const uint4 *)(s.lane_x + half * s.lane_step);
}

template <class E> DEVICE void multiply_unit(const Stream &s, const u8 *stage, u32 i, u32 unit, u32 share, float (&acc)[4])
{
    u32 words[E::WORDS], pairs[16];
    read_words<E::WORDS>(stage + i * E::UNIT, lane_index(), words);
    E::Decoder::decode(words, pairs);
    u32 g = lane_index() >> 2, t = lane_index() & 3u;
    float partial[4];
#pragma unroll
    for (u32 half = 0; half < 2u; half++) {
        uint4 x = read_inputs(s, 2u * unit + half);
        if (E::FOLDS == 0u) {
            multiply_half(acc, pairs + 8u * half, x);
            continue;
        }
        if (E::FOLDS == 2u || half == 0u)
            start_half(partial, pairs + 8u * half, x);
        else
            multiply_half(partial, pairs + 8u * half, x);
        if (E::FOLDS == 2u || half == 1u) {
            const u8 *entry = stage + Chunk<E>::SCALES + ((i * E::FOLDS + (E::FOLDS == 2u ? half : 0u)) >> share) * E::ENTRY;
            const float *sums = E::FOLDS == 2u ? s.sums_32 + (2u * unit + half) * 8u : s.sums_64 + unit * 8u;
            float2 two = E::BIASED ? *(const float2 *)(sums + 2u * t) : make_float2(0.0f, 0.0f);
            fold_into<E>(acc, partial, read_fold<E>(entry, g), two);
        }
    }
}

template <class E> DEVICE void multiply_chunk(const Stream &s, const u8 *stage, const Walk &walk, u32 share, float (&acc)[4])
{
    u32 units = walk.end - walk.unit;
    if (units >= Chunk<E>::UNITS) {
#pragma unroll 2
        for (u32 i = 0; i < Chunk<E>::UNITS; i++)
            multiply_unit<E>(s, stage, i, walk.unit + i, share, acc);
    } else {
#pragma unroll 1
        for (u32 i = 0; i < units; i++)
            multiply_unit<E>(s, stage, i, walk.unit + i, share, acc);
    }
}

// Writes a tile's outputs of all rows.
DEVICE void write_tile(const Stream &s, const Part &part, u32 tile, const float (&total)[4])
{
    u32 g = lane_index() >> 2, t = lane_index() & 3u;
#pragma unroll
    for (u32 i = 0; i < 4u; i++) {
        u32 output = tile * 16u + g + 8u * (i >> 1), column = 2u * t + (i & 1u);
        if (output < part.outputs && column < s.count)
            s.out[s.columns->out[column] + part.first_output + output] = total[i];
    }
}

DEVICE void add_slice(float (&total)[4], const float (&sums)[4], bool first)
{
#pragma unroll
    for (u32 i = 0; i < 4u; i++)
        total[i] = first ? sums[i] : __fadd_rn(total[i], sums[i]);
}

// A team's warps met: the first adds the slices' sums and writes.
DEVICE void finish_tile(Stream &s, const Part &part, u32 tile, float4 *sums)
{
    team_barrier(s.team + 1u, s.team_warps * 32u);
    s.turn ^= 1u;
    if (s.place != 0u)
        return;
    float total[4];
    for (u32 slice = 0; slice < s.slices; slice++) {
        float4 four = sums[slice * 32u + lane_index()];
        float one[4] = {four.x, four.y, four.z, four.w};
        add_slice(total, one, slice == 0u);
    }
    write_tile(s, part, tile, total);
}

// Tiles of panels `first..last` of one part; a panel is a tile for each team.
template <class E> DEVICE void stream_part(Stream &s, const Part &part, u32 first, u32 last)
{
    u32 tiles = min(last * s.teams, part.tiles);
    Walk now;
    now.tile = first * s.teams + s.team, now.slice = s.place;
    enter_slice(now, s);
    Walk ahead = now;
    __syncwarp();
    for (u32 i = 0; i < STAGES - 1u; i++) {
        if (ahead.tile < tiles) {
            request<E>(s, part, ahead, s.stages + i * s.stage_bytes);
            advance(ahead, s, Chunk<E>::UNITS);
        }
        copy_async_commit();
    }
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f}, total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 stage = 0; now.tile < tiles; stage = (stage + 1u) % STAGES) {
        copy_async_wait<STAGES - 2u>();
        // The chunk is here for all lanes, and all lanes are done with the stage before it.
        __syncwarp();
        if (ahead.tile < tiles) {
            request<E>(s, part, ahead, s.stages + (stage + STAGES - 1u) % STAGES * s.stage_bytes);
            advance(ahead, s, Chunk<E>::UNITS);
        }
        copy_async_commit();
        multiply_chunk<E>(s, s.stages + stage * s.stage_bytes, now, part.share, acc);
        Walk before = now;
        advance(now, s, Chunk<E>::UNITS);
        if (now.slice == before.slice && now.tile == before.tile && now.unit > before.unit)
            continue;
        if (s.team_warps == 1u) {
            add_slice(total, acc, before.slice == 0u);
            if (now.tile != before.tile)
                write_tile(s, part, before.tile, total);
        } else {
            float4 *sums = s.slice_sums + (s.turn * s.teams + s.team) * s.slices * 32u;
            sums[before.slice * 32u + lane_index()] = make_float4(acc[0], acc[1], acc[2], acc[3]);
            if (now.tile != before.tile)
                finish_tile(s, part, before.tile, sums);
        }
        acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
    }
    copy_async_wait<0u>();
}

// Rounds the group's inputs to bf16: half units of 32, row beside row.
DEVICE void round_inputs(const Stream &s, const float *x)
{
    u32 octets = s.units * 8u;
    for (u32 i = threadIdx.x; i < octets * s.count; i += blockDim.x) {
        u32 row = i / octets, octet = i - row * octets;
        const float *from = x + s.columns->x[row] + octet * 8u;
        float v[8];
        if (octet * 8u + 8u <= s.inputs && ((u64)from & 15u) == 0u) {
            float4 low = *(const float4 *)from, high = *(const float4 *)(from + 4);
            v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
            v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
        } else {
#pragma unroll
            for (u32 k = 0; k < 8u; k++)
                v[k] = octet * 8u + k < s.inputs ? from[k] : 0.0f;
        }
        uint4 four = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
        *(uint4 *)(s.x + (octet >> 2) * 64u * s.count + row * 64u + (octet & 3u) * 16u) = four;
    }
}

// The sums of each group of inputs, for the biases.
DEVICE void sum_inputs(const Stream &s, bool of_64, bool of_32)
{
    u32 warps = blockDim.x / 32u, lane = lane_index();
    for (u32 unit = warp_index(); unit < s.units; unit += warps) {
        uint4 x[2] = {read_inputs(s, 2u * unit), read_inputs(s, 2u * unit + 1u)};
        float whole[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        sum_half(whole, x[0]);
        float2 first = make_float2(whole[0], whole[1]);
        sum_half(whole, x[1]);
        float second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        sum_half(second, x[1]);
        if (of_64 && lane < 4u)
            *(float2 *)(s.sums_64 + unit * 8u + 2u * lane) = make_float2(whole[0], whole[1]);
        if (of_32 && lane < 4u) {
            *(float2 *)(s.sums_32 + unit * 16u + 2u * lane) = first;
            *(float2 *)(s.sums_32 + unit * 16u + 8u + 2u * lane) = make_float2(second[0], second[1]);
        }
    }
}

// A kernel's parameters; the same order in `product/stream.rs`.
#define STREAM_PARAMETERS                                                                                              \
    const Part *__restrict__ parts, u32 part_count, u32 panels, u32 inputs, u32 team_warps, u32 stage_bytes,           \
        u32 group_sizes, const float *__restrict__ x, float *__restrict__ out, GROUP_PARAMETERS

// Runs panels `first..last` of a part; each kernel has its own encodings.
#define STREAM_KERNEL(NAME, RUN)                                                                                       \
    extern "C" __global__ void __launch_bounds__(512, 1) NAME(STREAM_PARAMETERS)                                       \
    {                                                                                                                  \
        extern __shared__ __align__(16) u8 shared[];                                                                   \
        __shared__ Grouping grouping;                                                                                  \
        __shared__ Columns columns;                                                                                    \
        Groups groups = GROUPS_OF_PARAMETERS;                                                                          \
        u32 group_count = count_groups(groups, grouping);                                                              \
        Stream s;                                                                                                      \
        s.inputs = inputs, s.units = ceil_div(inputs, 64u), s.slices = ceil_div(s.units, SLICE);                       \
        s.team_warps = team_warps, s.teams = blockDim.x / 32u / team_warps;                                            \
        s.team = warp_index() / team_warps, s.place = warp_index() % team_warps;                                       \
        s.x = shared + 16;                                                                                             \
        if (threadIdx.x < 4u)                                                                                          \
            ((u32 *)shared)[threadIdx.x] = 0u;                                                                         \
        s.sums_64 = (float *)(s.x + s.units * 128u * groups.columns);                                               \
        s.sums_32 = s.sums_64 + ((group_sizes & 64u) ? s.units * 8u : 0u);                                             \
        s.slice_sums = (float4 *)(s.sums_32 + ((group_sizes & 32u) ? s.units * 16u : 0u));                             \
        s.stages = (u8 *)(s.slice_sums + (team_warps > 1u ? 2u * s.teams * s.slices * 32u : 0u));                      \
        s.stages += warp_index() * STAGES * stage_bytes;                                                               \
        s.stage_bytes = stage_bytes, s.columns = &columns, s.out = out, s.turn = 0u;                                   \
        u64 items = (u64)group_count * panels;                                                                         \
        u64 item = items * blockIdx.x / gridDim.x, stop = items * (blockIdx.x + 1u) / gridDim.x;                       \
        while (item < stop) {                                                                                          \
            u32 group = (u32)(item / panels), first = (u32)(item % panels);                                            \
            u32 last = (u32)min(stop - item + first, (u64)panels);                                                     \
            item += last - first;                                                                                      \
            __syncthreads();                                                                                           \
            describe_group(groups, grouping, group, columns);                                                          \
            __syncthreads();                                                                                           \
            s.count = columns.count;                                                                                   \
            bool has_row = lane_index() < 4u * s.count;                                                                \
            s.lane_x = shared + (has_row ? 16u + lane_index() * 16u : 0u);                                             \
            s.lane_step = has_row ? 64u * s.count : 0u;                                                                \
            round_inputs(s, x);                                                                                        \
            __syncthreads();                                                                                           \
            if (group_sizes != 0u)                                                                                     \
                sum_inputs(s, (group_sizes & 64u) != 0u, (group_sizes & 32u) != 0u);                                   \
            __syncthreads();                                                                                           \
            for (u32 p = 0, base = 0; p < part_count; p++) {                                                           \
                Part part = parts[p];                                                                                  \
                part.codes += columns.member * part.code_stride;                                                       \
                part.scales += columns.member * part.scale_stride;                                                     \
                u32 count = ceil_div(part.tiles, s.teams), end = base + count;                                         \
                if (first < end && last > base)                                                                        \
                    RUN(s, part, max(first, base) - base, min(last, end) - base);                                      \
                base = end;                                                                                            \
            }                                                                                                          \
        }                                                                                                              \
    }
