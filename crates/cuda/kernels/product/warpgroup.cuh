// Products of many rows by warp groups (sm_90a): tiles of 256 outputs by 64 rows, the same sums as `product/stream.cuh`.
//
// Four warp groups of 64 outputs: a warp copies and decodes the units of its 16 outputs, the tensor cores read the rows from
// shared memory, where the first warp copies them. All copies run stages of two units ahead.
#pragma once
#include "common/warpgroup.cuh"
#include "product/tile_rows.cuh"

#define TILE_THREADS (TILE_RUNS * WARP)
#define MOST_STAGES 4u
// Bytes of the totals of a tile with folds, before its stages.
#define TOTALS (8u * TILE_THREADS * 16u)
#define DEVICE_MEMBER __device__ __forceinline__

// Bytes of a stage: inputs of two units, then the codes and scales of sixteen runs of outputs.
template <class E> struct Stage {
    static constexpr u32 INPUTS = TILE_ROWS * 128u;
    static constexpr u32 CODES = 2u * INPUTS;
    static constexpr u32 SCALES = CODES + 2u * TILE_RUNS * E::UNIT;
    // Scales of a run's two units.
    static constexpr u32 RUN_SCALES = 2u * E::ENTRIES * E::ENTRY;
    static constexpr u32 BYTES = (SCALES + TILE_RUNS * RUN_SCALES + 1023u) / 1024u * 1024u;
    // Stages that fit; as in `product/warpgroup.rs`.
    static constexpr u32 COUNT = E::WORDS <= 5u ? 4u : E::WORDS <= 8u ? 3u : 2u;
    // How far ahead rows are asked for: with a stage to spare, so that warps need not keep step.
    static constexpr u32 AHEAD = COUNT > 2u ? COUNT - 2u : 1u;
};

// A warp's weights of a unit of the stage.
template <class E> DEVICE void decode_stage(const u8 *stage, u32 share, u32 which, u32 (&pairs)[16])
{
    u32 words[E::WORDS];
    read_words<E::WORDS>(stage + Stage<E>::CODES + (warp_index() * 2u + which) * E::UNIT, lane_index(), words);
    E::Decoder::decode(words, pairs);
    const u8 *entries = stage + Stage<E>::SCALES + warp_index() * Stage<E>::RUN_SCALES;
    weigh_unit<E>(pairs, entries + (2u * which >> share) * E::ENTRY, entries + (2u * which + 1u >> share) * E::ENTRY);
}

// Starts the products of a unit: from zero, or onto what is there.
DEVICE void start_unit(float (&sums)[8][4], const u32 (&pairs)[16], u64 rows, u32 keep)
{
    before_products();
    multiply_async(sums, pairs, rows, keep);
    multiply_async(sums, pairs + 4, rows + 2u, 1u);
    multiply_async(sums, pairs + 8, rows + 4u, 1u);
    multiply_async(sums, pairs + 12, rows + 6u, 1u);
    end_products();
}

// Adds a slice's sums to the totals, which each thread keeps in places of its own; after the last they are in `acc`.
DEVICE void end_slice(float4 *totals, bool first, bool last, float (&acc)[8][4])
{
#pragma unroll
    for (u32 i = 0; i < 8u; i++) {
        float(&a)[4] = acc[i];
        float4 *place = totals + i * TILE_THREADS + threadIdx.x;
        if (!first) {
            float4 total = *place;
            a[0] = __fadd_rn(total.x, a[0]), a[1] = __fadd_rn(total.y, a[1]);
            a[2] = __fadd_rn(total.z, a[2]), a[3] = __fadd_rn(total.w, a[3]);
        }
        if (!last) {
            *place = make_float4(a[0], a[1], a[2], a[3]);
            a[0] = a[1] = a[2] = a[3] = 0.0f;
        }
    }
}

// The same where nothing is folded: a slice's sums are its products', and registers have room for the totals.
DEVICE void add_slice(float (&total)[8][4], const float (&sums)[8][4], bool first)
{
#pragma unroll
    for (u32 i = 0; i < 32u; i++) {
        float &to = total[i / 4u][i % 4u], from = sums[i / 4u][i % 4u];
        to = first ? from : __fadd_rn(to, from);
    }
}

DEVICE void write_outputs(const Tile &tile, const Part &part, u32 first_tile, const float (&acc)[8][4])
{
    u32 lane = lane_index(), g = lane >> 2, t = lane & 3u, output = (first_tile + warp_index()) * 16u + g;
#pragma unroll
    for (u32 i = 0; i < 16u; i++) {
        u32 n = i / 2u, c = i % 2u, row = n * 8u + 2u * t + c;
        if (row >= tile.rows->count)
            continue;
        float *out = tile.out + tile.rows->out[row] * tile.out_stride + tile.head_outputs + part.first_output;
        if (output < part.outputs)
            out[output] = acc[n][c];
        if (output + 8u < part.outputs)
            out[output + 8u] = acc[n][2u + c];
    }
}

// A tile under way; `first_tile` counts runs of 16 outputs.
struct Work {
    const Tile &tile;
    const Part &part;
    u32 first_tile, pairs;
    // Of each stage: its rows are here; all warps are done with it.
    u64 *here, *free;
    // This warp's codes and scales.
    const u8 *codes, *scales;
};

// Copies a pair of units' rows: one thread. They go past the threads, since the tensor cores read them past the threads.
template <class E> DEVICE void request_rows(const Work &work, u32 pair)
{
    const Tile &tile = work.tile;
    u32 stage = pair % Stage<E>::COUNT, units = min(2u, tile.units - pair * 2u), rows = (tile.rows->count + 7u) & ~7u;
    u64 *barrier = work.here + stage;
    u8 *to = tile.stages + stage * Stage<E>::BYTES;
    arrive_with_bytes(barrier, units * rows * 128u);
    for (u32 which = 0; which < units; which++) {
        u64 from = (u64)(pair * 2u + which) * tile.virtual_rows + tile.first_row;
        copy_bulk(to + which * Stage<E>::INPUTS, tile.rounded + from * 128u, rows * 128u, barrier);
    }
}

// The first warp asks for rows, once all are done with those that have their place.
template <class E> DEVICE void refill_rows(const Work &work, u32 pair)
{
    constexpr u32 COUNT = Stage<E>::COUNT;
    u32 asked = pair + Stage<E>::AHEAD;
    if (warp_index() != 0u || asked >= work.pairs)
        return;
    if (asked >= COUNT)
        await_barrier(work.free + asked % COUNT, (asked / COUNT + 1u) & 1u);
    if (lane_index() == 0u)
        request_rows<E>(work, asked);
    __syncwarp();
}

// Copies a pair of units' codes and scales of the warp's outputs. All lanes are done with what has their place.
template <class E> DEVICE void request_codes(const Work &work, u32 pair)
{
    if (pair < work.pairs) {
        u32 lane = lane_index(), units = min(2u, work.tile.units - pair * 2u);
        u8 *stage = work.tile.stages + pair % Stage<E>::COUNT * Stage<E>::BYTES;
        u8 *to = stage + Stage<E>::CODES + warp_index() * 2u * E::UNIT + lane * 16u;
        const u8 *codes = work.codes + (u64)pair * 2u * E::UNIT + lane * 16u;
#pragma unroll
        for (u32 i = 0; i < 2u * E::UNIT; i += 512u)
            if (i + lane * 16u < units * E::UNIT)
                copy_async_16(to + i, codes + i);
        u32 entries = (2u * units - 1u >> work.part.share) + 1u;
        if (E::ENTRY != 0u && lane * 16u < entries * E::ENTRY)
            copy_async_16(stage + Stage<E>::SCALES + warp_index() * Stage<E>::RUN_SCALES + lane * 16u,
                          work.scales + (u64)(pair * 4u >> work.part.share) * E::ENTRY + lane * 16u);
    }
    copy_async_commit();
}

// Folds a unit's sums.
template <class E>
DEVICE void fold_unit(const Work &work, const u8 *stage, u32 which, float (&acc)[8][4], const float (&sums)[8][4])
{
    const u8 *entries = stage + Stage<E>::SCALES + warp_index() * Stage<E>::RUN_SCALES;
    Fold by = read_fold<E>(entries + (2u * which >> work.part.share) * E::ENTRY, lane_index() >> 2);
#pragma unroll
    for (u32 n = 0; n < 8u; n++)
        fold_into<E>(acc[n], sums[n], by, make_float2(0.0f, 0.0f));
}

// Multiplies a pair of units; `BOTH` unless the last has no second.
template <class E, bool BOTH> DEVICE void multiply_pair(const Work &work, u32 pair, float (&acc)[8][4], float (&sums)[8][4])
{
    u32 stage = pair % Stage<E>::COUNT, even[16], odd[16];
    const u8 *place = work.tile.stages + stage * Stage<E>::BYTES;
    u64 rows = describe_rows(place);
    request_codes<E>(work, pair + Stage<E>::COUNT - 1u);
    copy_async_wait<Stage<E>::COUNT - 1u>();
    // The codes are here for all lanes.
    __syncwarp();
    await_barrier(work.here + stage, pair / Stage<E>::COUNT & 1u);
    decode_stage<E>(place, work.part.share, 0u, even);
    start_unit(sums, even, rows, E::FOLDS == 0u && pair % (SLICE / 2u) != 0u);
    refill_rows<E>(work, pair);
    wait_products<0u>();
    if (E::FOLDS != 0u)
        fold_unit<E>(work, place, 0u, acc, sums);
    if (BOTH) {
        decode_stage<E>(place, work.part.share, 1u, odd);
        start_unit(sums, odd, rows + Stage<E>::INPUTS / 16u, E::FOLDS == 0u);
        wait_products<0u>();
        if (E::FOLDS != 0u)
            fold_unit<E>(work, place, 1u, acc, sums);
    }
    wait_products<0u>();
    arrive_warp(work.free + stage);
    bool last = pair + 1u == work.pairs;
    if (!last && pair % (SLICE / 2u) != SLICE / 2u - 1u)
        return;
    if (E::FOLDS == 0u)
        add_slice(acc, sums, pair < SLICE / 2u);
    else
        end_slice(work.tile.totals, pair < SLICE / 2u, last, acc);
}

// A tile of one part. `barriers` is ready: two for each stage.
template <class E> DEVICE void multiply_tile(Tile tile, const Part &part, u32 first_tile, u64 *barriers)
{
    if (E::FOLDS != 0u && tile.units > SLICE)
        tile.stages += TOTALS;
    u32 at = min(first_tile + warp_index(), part.tiles - 1u);
    Work work = {tile, part, first_tile, ceil_div(tile.units, 2u), barriers, barriers + MOST_STAGES};
    work.codes = part.codes + (u64)at * tile.units * E::UNIT, work.scales = part.scales + (u64)at * part.entries * E::ENTRY;
    if (threadIdx.x == 0u)
        for (u32 pair = 0; pair < min(Stage<E>::AHEAD, work.pairs); pair++)
            request_rows<E>(work, pair);
    __syncwarp();
    for (u32 pair = 0; pair < Stage<E>::COUNT - 1u; pair++)
        request_codes<E>(work, pair);
    float acc[8][4], sums[8][4];
#pragma unroll
    for (u32 i = 0; i < 32u; i++)
        acc[i / 4u][i % 4u] = 0.0f;
#pragma unroll 1
    for (u32 pair = 0; pair < tile.units / 2u; pair++)
        multiply_pair<E, true>(work, pair, acc, sums);
    if (tile.units % 2u != 0u)
        multiply_pair<E, false>(work, work.pairs - 1u, acc, sums);
    write_outputs(tile, part, first_tile, acc);
}

// A kernel's parameters; the same order in `product/tile.rs`.
#define TILE_PARAMETERS                                                                                                \
    const Part *__restrict__ parts, u32 part_count, u32 inputs, const u8 *__restrict__ rounded,                        \
        u32 virtual_rows, float *__restrict__ out, GROUP_PARAMETERS

// Grid: runs of 128 outputs of all parts by groups. Each kernel has its own encodings.
#define GROUP_KERNEL(NAME, RUN)                                                                                        \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) NAME(TILE_PARAMETERS)                                \
    {                                                                                                                  \
        extern __shared__ __align__(1024) u8 shared[];                                                                 \
        __shared__ TileRows tile_rows;                                                                                 \
        __shared__ u64 barriers[2u * MOST_STAGES];                                                                     \
        Groups groups = GROUPS_OF_PARAMETERS;                                                                          \
        u32 run = blockIdx.x, group = blockIdx.y;                                                                      \
        if (manner <= PART_A_MEMBER) {                                                                                 \
            u64 block = blockIdx.x + (u64)gridDim.x * blockIdx.y;                                                      \
            u32 first = (u32)(block / (SIDE_BY_SIDE * gridDim.x)) * SIDE_BY_SIDE;                                      \
            u32 width = min(SIDE_BY_SIDE, gridDim.y - first);                                                          \
            u32 rest = (u32)(block - (u64)first * gridDim.x);                                                          \
            run = rest / width, group = first + rest % width;                                                          \
        }                                                                                                              \
        if (threadIdx.x < 2u * MOST_STAGES)                                                                            \
            start_barrier(barriers + threadIdx.x, threadIdx.x < MOST_STAGES ? 1u : TILE_RUNS);                  \
        show_shared();                                                                                                 \
        if (!describe_tile(groups, group, tile_rows))                                                                  \
            return;                                                                                                    \
        __syncthreads();                                                                                               \
        Tile tile;                                                                                                     \
        tile.rounded = rounded, tile.virtual_rows = virtual_rows;                                                      \
        tile.units = ceil_div(inputs, 64u), tile.out = out, tile.out_stride = out_stride;                              \
        tile.head_outputs = manner == PART_A_MEMBER ? tile_rows.member * outputs : 0u;                                 \
        tile.totals = (float4 *)shared;                                                                                \
        tile.stages = shared;                                                                                          \
        tile.rows = &tile_rows, tile.first_row = tile_rows.first;                                                      \
        for (u32 p = 0; p < part_count; p++) {                                                                         \
            Part part = parts[p];                                                                                      \
            u32 runs = ceil_div(part.tiles, TILE_RUNS);                                                                \
            if (run >= runs) {                                                                                         \
                run -= runs;                                                                                           \
                continue;                                                                                              \
            }                                                                                                          \
            part.codes += tile_rows.member * part.code_stride;                                                         \
            part.scales += tile_rows.member * part.scale_stride;                                                       \
            RUN(tile, part, run * TILE_RUNS, barriers);                                                                \
            return;                                                                                                    \
        }                                                                                                              \
    }
