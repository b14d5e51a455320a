// Products of few rows: weights stream through shared memory, eight rows at a time.
//
// A group is a member of the matrix and up to eight rows (columns of the instruction). A block keeps the group's inputs,
// rounded, and walks over tiles of 16 outputs. A team of warps shares a tile: each takes slices of 512 inputs in turn, and
// the slices' sums are added in ascending order, so that no bit hangs on the team's size. Every warp copies its own
// weights, three chunks ahead; the first are on their way while the block rounds its inputs.
#pragma once
#include "product/encoding.cuh"
#include "product/groups.cuh"

// Units of a slice.
#define SLICE 8u

// Threads of a block; a unit that needs more registers has fewer. As in `src/product/stream.rs`.
#ifndef MOST_THREADS
#define MOST_THREADS 512
#endif

// Chunks under way and at work.
#define STAGES 4u

// Units copied at once: about 2 KiB of codes.
template <class E> struct Chunk {
    static constexpr u32 UNITS = E::WORDS <= 2u ? 8u : E::WORDS <= 4u ? 4u : E::WORDS <= 8u ? 2u : 1u;
    // Units whose products are interleaved.
    static constexpr u32 UNROLLED = E::WORDS == 4u && E::WEIGHED ? 2u : 1u;
    // Where its scales begin.
    static constexpr u32 SCALES = UNITS * E::UNIT;
};

// Parts that a block keeps in shared memory.
#define KNOWN_PARTS 8u

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
    // Inputs whose sums the biases need, as bits: 64, 32.
    u32 group_sizes;
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

// Whether that was the slice's last chunk.
DEVICE bool advance(Walk &walk, const Stream &s, u32 chunk)
{
    walk.unit += chunk;
    if (walk.unit < walk.end)
        return false;
    walk.slice += s.team_warps;
    if (walk.slice >= s.slices) {
        walk.slice = s.place;
        walk.tile += s.teams;
    }
    enter_slice(walk, s);
    return true;
}

// The first `bytes` of up to MOST bytes, a lane's sixteen of each 512; both addresses are the lane's.
template <u32 MOST> DEVICE void copy_bytes(u8 *to, const u8 *from, u32 bytes)
{
    u32 lane = lane_index() * 16u;
#pragma unroll
    for (u32 at = 0; at < MOST; at += 512u)
        if (at + lane < bytes)
            copy_async_16(to + at, from + at);
}

// A member of a part, from a lane's first sixteen bytes on.
struct Source {
    const u8 *codes, *scales;
    u32 entries, share;
};

// Starts the copy of a chunk's codes and scales.
template <class E> DEVICE void request(const Stream &s, const Source &source, const Walk &walk, u8 *stage)
{
    constexpr u32 UNITS = Chunk<E>::UNITS;
    u32 units = min(UNITS, walk.end - walk.unit);
    const u8 *codes = source.codes + (u64)(walk.tile * s.units + walk.unit) * E::UNIT;
    stage += lane_index() * 16u;
    if (units == UNITS)
        copy_bytes<UNITS * E::UNIT>(stage, codes, UNITS * E::UNIT);
    else
        copy_bytes<UNITS * E::UNIT>(stage, codes, units * E::UNIT);
    if constexpr (E::ENTRY != 0u) {
        u32 first = 2u * walk.unit >> source.share;
        u32 count = (2u * units - 1u >> source.share) + 1u;
        const u8 *scales = source.scales + (u64)(walk.tile * source.entries + first) * E::ENTRY;
        copy_bytes<UNITS * E::ENTRIES * E::ENTRY>(stage + Chunk<E>::SCALES, scales, count * E::ENTRY);
    }
}

// A column's inputs of a half unit.
DEVICE uint4 read_inputs(const Stream &s, u32 half)
{
    return *(const uint4 *)(s.lane_x + half * s.lane_step);
}

// `entries` are the two halves', `x` is where this lane's inputs of the unit begin, `sums` its columns' sums of them.
template <class E>
DEVICE void multiply_unit(const u8 *codes, const u8 *(&entries)[2], const u8 *x, u32 step, const float *sums,
                          float (&acc)[4])
{
    u32 words[E::WORDS], pairs[16];
    read_words<E::WORDS>(codes, lane_index(), words);
    E::Decoder::decode(words, pairs);
    weigh_unit<E>(pairs, entries[0], entries[1]);
    float partial[4];
#pragma unroll
    for (u32 half = 0; half < 2u; half++) {
        uint4 inputs = *(const uint4 *)(x + half * step);
        if (E::FOLDS == 0u) {
            multiply_half(acc, pairs + 8u * half, inputs);
            continue;
        }
        if (E::FOLDS == 2u || half == 0u)
            start_half(partial, pairs + 8u * half, inputs);
        else
            multiply_half(partial, pairs + 8u * half, inputs);
        if (E::FOLDS == 2u || half == 1u) {
            float2 two = E::BIASED ? *(const float2 *)(sums + (E::FOLDS == 2u ? half : 0u) * 8u) : make_float2(0.0f, 0.0f);
            fold_into<E>(acc, partial, read_fold<E>(entries[half], lane_index() >> 2), two);
        }
    }
}

template <class E>
DEVICE void multiply_units(const Stream &s, const u8 *stage, const Walk &walk, u32 share, float (&acc)[4])
{
    const u8 *x = s.lane_x + 2u * walk.unit * s.lane_step;
    const float *sums = (E::FOLDS == 2u ? s.sums_32 + walk.unit * 16u : s.sums_64 + walk.unit * 8u) + 2u * (lane_index() & 3u);
    auto multiply = [&](u32 i) {
        const u8 *scales = stage + Chunk<E>::SCALES;
        const u8 *entries[2] = {scales + (2u * i >> share) * E::ENTRY, scales + (2u * i + 1u >> share) * E::ENTRY};
        multiply_unit<E>(stage + i * E::UNIT, entries, x, s.lane_step, sums + i * 8u * E::FOLDS, acc);
        x += 2u * s.lane_step;
    };
    if (walk.unit + Chunk<E>::UNITS <= walk.end) {
#pragma unroll(Chunk<E>::UNROLLED)
        for (u32 i = 0; i < Chunk<E>::UNITS; i++)
            multiply(i);
    } else {
#pragma unroll 1
        for (u32 i = 0; i < walk.end - walk.unit; i++)
            multiply(i);
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

// Rows whose inputs a thread asks for together.
#ifndef ROWS_AT_ONCE
#define ROWS_AT_ONCE 2u
#endif

// Eight inputs from the `octet`th on; zeros behind the last.
DEVICE void read_octet(const Stream &s, const float *row, u32 octet, float (&v)[8])
{
    const float *from = row + octet * 8u;
    if (octet * 8u + 8u <= s.inputs && ((u64)from & 15u) == 0u) {
        float4 low = *(const float4 *)from, high = *(const float4 *)(from + 4);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
        for (u32 k = 0; k < 8u; k++)
            v[k] = octet * 8u + k < s.inputs ? from[k] : 0.0f;
    }
}

// Rounds the group's inputs to bf16: half units of 32, row beside row.
DEVICE void round_inputs(const Stream &s, const float *x)
{
    for (u32 octet = threadIdx.x; octet < s.units * 8u; octet += blockDim.x) {
#pragma unroll 1
        for (u32 first = 0; first < s.count; first += ROWS_AT_ONCE) {
            float v[ROWS_AT_ONCE][8];
#pragma unroll
            for (u32 r = 0; r < ROWS_AT_ONCE; r++)
                if (first + r < s.count)
                    read_octet(s, x + s.columns->x[first + r], octet, v[r]);
            u8 *to = s.x + (octet >> 2) * 64u * s.count + first * 64u + (octet & 3u) * 16u;
#pragma unroll
            for (u32 r = 0; r < ROWS_AT_ONCE; r++) {
                uint4 four = {pack_bf16(v[r][0], v[r][1]), pack_bf16(v[r][2], v[r][3]), pack_bf16(v[r][4], v[r][5]),
                              pack_bf16(v[r][6], v[r][7])};
                if (first + r < s.count)
                    *(uint4 *)(to + r * 64u) = four;
            }
        }
    }
}

// The sums of each group of inputs, for the biases.
DEVICE void sum_inputs(const Stream &s, bool of_64, bool of_32)
{
    u32 warps = blockDim.x / 32u, lane = lane_index();
    for (u32 unit = warp_index(); unit < s.units; unit += warps) {
        uint4 x[2] = {read_inputs(s, 2u * unit), read_inputs(s, 2u * unit + 1u)};
        float first[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        sum_half(first, x[0]);
        if (of_32) {
            float second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            sum_half(second, x[1]);
            if (lane < 4u) {
                *(float2 *)(s.sums_32 + unit * 16u + 2u * lane) = make_float2(first[0], first[1]);
                *(float2 *)(s.sums_32 + unit * 16u + 8u + 2u * lane) = make_float2(second[0], second[1]);
            }
        }
        if (of_64) {
            sum_half(first, x[1]);
            if (lane < 4u)
                *(float2 *)(s.sums_64 + unit * 8u + 2u * lane) = make_float2(first[0], first[1]);
        }
    }
}

DEVICE void prepare_inputs(const Stream &s, const float *x)
{
    round_inputs(s, x);
    __syncthreads();
    if (s.group_sizes != 0u)
        sum_inputs(s, (s.group_sizes & 64u) != 0u, (s.group_sizes & 32u) != 0u);
    __syncthreads();
}

// Tiles of panels `first..last` of one part; a panel is a tile for each team. The group's inputs are prepared behind the
// first requests where they are not yet.
template <class E>
DEVICE void stream_part(Stream &s, const Part &part, u32 first, u32 last, const float *x, bool prepared)
{
    u32 tiles = min(last * s.teams, part.tiles), member = s.columns->member;
    Source source;
    source.codes = part.codes + member * part.code_stride + lane_index() * 16u;
    source.scales = part.scales + member * part.scale_stride + lane_index() * 16u;
    source.entries = part.entries, source.share = part.share;
    Walk now;
    now.tile = first * s.teams + s.team, now.slice = s.place;
    enter_slice(now, s);
    Walk ahead = now;
    __syncwarp();
    for (u32 i = 0; i < STAGES - 1u; i++) {
        if (ahead.tile < tiles) {
            request<E>(s, source, ahead, s.stages + i * s.stage_bytes);
            advance(ahead, s, Chunk<E>::UNITS);
        }
        copy_async_commit();
    }
    if (!prepared)
        prepare_inputs(s, x);
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f}, total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 stage = 0, free_stage = (STAGES - 1u) * s.stage_bytes, stages = STAGES * s.stage_bytes;
#pragma unroll 1
    while (now.tile < tiles) {
        copy_async_wait<STAGES - 2u>();
        // The chunk is here for all lanes, and all lanes are done with the stage before it.
        __syncwarp();
        if (ahead.tile < tiles) {
            request<E>(s, source, ahead, s.stages + free_stage);
            advance(ahead, s, Chunk<E>::UNITS);
        }
        copy_async_commit();
        multiply_units<E>(s, s.stages + stage, now, source.share, acc);
        free_stage = stage;
        stage += s.stage_bytes;
        stage = stage == stages ? 0u : stage;
        u32 tile = now.tile, slice = now.slice;
        if (!advance(now, s, Chunk<E>::UNITS))
            continue;
        if (s.team_warps == 1u) {
            add_slice(total, acc, slice == 0u);
            if (now.tile != tile)
                write_tile(s, part, tile, total);
        } else {
            float4 *sums = s.slice_sums + (s.turn * s.teams + s.team) * s.slices * 32u;
            sums[slice * 32u + lane_index()] = make_float4(acc[0], acc[1], acc[2], acc[3]);
            if (now.tile != tile)
                finish_tile(s, part, tile, sums);
        }
        acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
    }
    copy_async_wait<0u>();
}

// A kernel's parameters; the same order in `product/stream.rs`.
#define STREAM_PARAMETERS                                                                                              \
    const Part *__restrict__ parts, u32 part_count, u32 panels, u32 inputs, u32 team_warps, u32 stage_bytes,           \
        u32 group_sizes, const float *__restrict__ x, float *__restrict__ out, GROUP_PARAMETERS

// Runs panels `first..last` of a part; each kernel has its own encodings.
#define STREAM_KERNEL(NAME, RUN)                                                                                       \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) NAME(STREAM_PARAMETERS)                              \
    {                                                                                                                  \
        extern __shared__ __align__(16) u8 shared[];                                                                   \
        __shared__ Grouping grouping;                                                                                  \
        __shared__ Columns columns;                                                                                    \
        __shared__ Part table[KNOWN_PARTS];                                                                            \
        for (u32 i = threadIdx.x; i < min(part_count, KNOWN_PARTS) * (sizeof(Part) / 8u); i += blockDim.x)             \
            ((u64 *)table)[i] = ((const u64 *)parts)[i];                                                               \
        Groups groups = GROUPS_OF_PARAMETERS;                                                                          \
        u32 group_count = count_groups(groups, grouping);                                                              \
        Stream s;                                                                                                      \
        s.inputs = inputs, s.units = ceil_div(inputs, 64u), s.slices = ceil_div(s.units, SLICE);                       \
        s.team_warps = team_warps, s.teams = blockDim.x / 32u / team_warps;                                            \
        s.team = warp_index() / team_warps, s.place = warp_index() % team_warps;                                       \
        s.x = shared + 16;                                                                                             \
        if (threadIdx.x < 4u)                                                                                          \
            ((u32 *)shared)[threadIdx.x] = 0u;                                                                         \
        s.group_sizes = group_sizes;                                                                                   \
        s.sums_64 = (float *)(s.x + s.units * 128u * groups.columns);                                                  \
        s.sums_32 = s.sums_64 + ((group_sizes & 64u) ? s.units * 8u : 0u);                                             \
        s.slice_sums = (float4 *)(s.sums_32 + ((group_sizes & 32u) ? s.units * 16u : 0u));                             \
        s.stages = (u8 *)(s.slice_sums + (team_warps > 1u ? 2u * s.teams * s.slices * 32u : 0u));                      \
        s.stages += warp_index() * STAGES * stage_bytes;                                                               \
        s.stage_bytes = stage_bytes, s.columns = &columns, s.out = out, s.turn = 0u;                                   \
        u64 items = (u64)group_count * panels;                                                                         \
        __shared__ u32 item, stop;                                                                                     \
        if (threadIdx.x == 0u) {                                                                                       \
            item = (u32)(items * blockIdx.x / gridDim.x);                                                              \
            stop = (u32)(items * (blockIdx.x + 1u) / gridDim.x);                                                       \
        }                                                                                                              \
        for (;;) {                                                                                                     \
            __syncthreads();                                                                                           \
            if (item >= stop)                                                                                          \
                break;                                                                                                 \
            u32 group = item / panels, first = item % panels, last = min(stop - item + first, panels);                 \
            describe_group(groups, grouping, group, columns);                                                          \
            __syncthreads();                                                                                           \
            if (threadIdx.x == 0u)                                                                                     \
                item += last - first;                                                                                  \
            s.count = columns.count;                                                                                   \
            bool has_row = lane_index() < 4u * s.count, prepared = false;                                              \
            s.lane_x = shared + (has_row ? 16u + lane_index() * 16u : 0u);                                             \
            s.lane_step = has_row ? 64u * s.count : 0u;                                                                \
            for (u32 p = 0, base = 0; p < part_count; p++) {                                                           \
                const Part &part = p < KNOWN_PARTS ? table[p] : parts[p];                                              \
                u32 count = ceil_div(part.tiles, s.teams), end = base + count;                                         \
                if (first < end && last > base) {                                                                      \
                    RUN(s, part, max(first, base) - base, min(last, end) - base, x, prepared);                         \
                    prepared = true;                                                                                   \
                }                                                                                                      \
                base = end;                                                                                            \
            }                                                                                                          \
        }                                                                                                              \
    }
