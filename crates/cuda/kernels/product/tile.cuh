// Products of many rows: tiles of 128 outputs by 128 rows, the same sums as `product/stream.cuh`.
//
// Eight warps, four along the outputs and two along the rows: each decodes 32 outputs of a unit in registers and
// multiplies them with 64 rows. Codes, scales, inputs and their sums come through shared memory, stages ahead.
#pragma once
#include "product/encoding.cuh"
#include "product/groups.cuh"

#define TILE_ROWS 128u
#define TILE_STAGES 3u
#define TILE_THREADS 256u
// Units of a slice, as in `product/stream.cuh`.
#define SLICE 8u
// Row tiles that are walked side by side, so that their inputs stay in the second-level cache.
#define SIDE_BY_SIDE 16u

// Bytes of a stage: inputs of 128 rows, their sums, then eight tiles' codes and scales.
template <class E> struct Stage {
    static constexpr u32 SUMS = TILE_ROWS * 128u;
    static constexpr u32 CODES = SUMS + (E::BIASED ? E::FOLDS * TILE_ROWS * 4u : 0u);
    static constexpr u32 SCALES = CODES + 8u * E::UNIT;
    static constexpr u32 UNIT_SCALES = E::ENTRIES * E::ENTRY;
    static constexpr u32 BYTES = SCALES + 8u * UNIT_SCALES;
};

struct TileRows {
    // Virtual rows of the rounded inputs, and rows of the output.
    u32 x[TILE_ROWS], out[TILE_ROWS];
    u32 member, count;
};

struct Tile {
    const u8 *rounded;
    const float *sums_64, *sums_32;
    u32 virtual_rows, units;
    float *out;
    u64 out_stride;
    u32 head_outputs;
    u8 *stages;
    float4 *totals;
    const TileRows *rows;
    // This thread's rows of the copies.
    u32 copied[2];
};

// Fills in the rows of a group; false when there is no such group.
DEVICE bool describe_tile(const Groups &g, u32 group, TileRows &to)
{
    u32 row_groups = ceil_div(g.rows, TILE_ROWS), first, count, member = 0;
    if (g.manner <= PART_A_MEMBER) {
        member = group / row_groups;
        first = group % row_groups * TILE_ROWS;
        count = min(TILE_ROWS, g.rows - first);
    } else {
        if (group >= g.group_starts[g.members])
            return false;
        member = slot_of_group(g.group_starts, g.members, group);
        first = g.starts[member] + (group - g.group_starts[member]) * TILE_ROWS;
        count = min(TILE_ROWS, g.starts[member + 1u] - first);
    }
    if (threadIdx.x < TILE_ROWS) {
        u32 row = first + min(threadIdx.x, count - 1u);
        if (g.manner == SORTED) {
            u32 pair = g.order[row];
            to.x[threadIdx.x] = g.paired ? pair : pair / g.picks_per_row;
            to.out[threadIdx.x] = pair;
        } else {
            to.x[threadIdx.x] = member * g.rows + row;
            to.out[threadIdx.x] = row;
        }
    }
    if (threadIdx.x == 0u)
        to.member = member, to.count = count;
    return true;
}

// Starts the copy of a unit.
template <class E> DEVICE void request_unit(const Tile &tile, const Part &part, u32 first_tile, u32 unit, u8 *stage)
{
    u32 thread = threadIdx.x;
#pragma unroll
    for (u32 j = 0; j < 4u; j++) {
        u32 half = j >> 1, row = thread / 4u + 64u * (j & 1u);
        const u8 *from = tile.rounded + ((u64)(2u * unit + half) * tile.virtual_rows + tile.copied[j & 1u]) * 64u;
        copy_async_16(stage + half * (TILE_ROWS * 64u) + row * 64u + thread % 4u * 16u, from + thread % 4u * 16u);
    }
    if (E::BIASED && thread < E::FOLDS * TILE_ROWS) {
        const float *sums = E::FOLDS == 2u ? tile.sums_32 : tile.sums_64;
        u32 group = unit * E::FOLDS + thread / TILE_ROWS;
        copy_async_4(stage + Stage<E>::SUMS + thread * 4u,
                     sums + (u64)group * tile.virtual_rows + tile.rows->x[thread % TILE_ROWS]);
    }
    constexpr u32 PIECES = E::UNIT / 16u;
#pragma unroll
    for (u32 j = 0; j < (8u * PIECES + TILE_THREADS - 1u) / TILE_THREADS; j++) {
        u32 i = j * TILE_THREADS + thread;
        if (8u * PIECES % TILE_THREADS != 0u && i >= 8u * PIECES)
            break;
        u32 at = min(first_tile + i / PIECES, part.tiles - 1u);
        copy_async_16(stage + Stage<E>::CODES + i * 16u,
                      part.codes + ((u64)at * tile.units + unit) * E::UNIT + i % PIECES * 16u);
    }
    if constexpr (E::ENTRY != 0u) {
        constexpr u32 SCALE_PIECES = Stage<E>::UNIT_SCALES / 16u;
        if (thread < 8u * SCALE_PIECES) {
            u32 at = min(first_tile + thread / SCALE_PIECES, part.tiles - 1u);
            u32 piece = thread % SCALE_PIECES, half = piece * 16u / E::ENTRY;
            u64 entry = (u64)at * part.entries + (2u * unit + half >> part.share);
            copy_async_16(stage + Stage<E>::SCALES + thread * 16u, part.scales + entry * E::ENTRY + piece * 16u % E::ENTRY);
        }
    }
}

// Multiplies a unit: two tiles of 16 outputs by eight columns of eight rows.
template <class E> DEVICE void multiply_stage(const u8 *stage, float (&acc)[2][8][4])
{
    u32 lane = lane_index(), g = lane >> 2, t = lane & 3u;
    u32 first_tile = warp_index() % 4u * 2u, first_row = warp_index() / 4u * 64u;
    u32 pairs[2][16];
    Fold folds[2][2];
#pragma unroll
    for (u32 i = 0; i < 2u; i++) {
        u32 words[E::WORDS];
        read_words<E::WORDS>(stage + Stage<E>::CODES + (first_tile + i) * E::UNIT, lane, words);
        E::Decoder::decode(words, pairs[i]);
        const u8 *entry = stage + Stage<E>::SCALES + (first_tile + i) * Stage<E>::UNIT_SCALES;
        weigh_unit<E>(pairs[i], entry, entry + E::ENTRY);
        folds[i][0] = read_fold<E>(entry, g);
        folds[i][1] = E::FOLDS == 2u ? read_fold<E>(entry + E::ENTRY, g) : folds[i][0];
    }
    const float *sums = (const float *)(stage + Stage<E>::SUMS) + first_row + 2u * t;
#pragma unroll
    for (u32 n = 0; n < 8u; n++) {
        const u8 *at = stage + (first_row + n * 8u) * 64u + lane * 16u;
        uint4 x[2] = {*(const uint4 *)at, *(const uint4 *)(at + TILE_ROWS * 64u)};
#pragma unroll
        for (u32 i = 0; i < 2u; i++) {
            if (E::FOLDS == 0u) {
                multiply_half(acc[i][n], pairs[i], x[0]);
                multiply_half(acc[i][n], pairs[i] + 8, x[1]);
                continue;
            }
            float partial[4];
            float2 two = make_float2(0.0f, 0.0f);
            start_half(partial, pairs[i], x[0]);
            if (E::FOLDS == 2u) {
                if (E::BIASED)
                    two = *(const float2 *)(sums + n * 8u);
                fold_into<E>(acc[i][n], partial, folds[i][0], two);
                start_half(partial, pairs[i] + 8, x[1]);
            } else {
                multiply_half(partial, pairs[i] + 8, x[1]);
            }
            if (E::BIASED)
                two = *(const float2 *)(sums + (E::FOLDS == 2u ? TILE_ROWS : 0u) + n * 8u);
            fold_into<E>(acc[i][n], partial, folds[i][1], two);
        }
    }
}

// Adds a slice's sums to the totals, which each thread keeps in places of its own; after the last they are in `acc`.
DEVICE void end_slice(const Tile &tile, bool first, bool last, float (&acc)[2][8][4])
{
#pragma unroll
    for (u32 i = 0; i < 16u; i++) {
        float(&a)[4] = acc[i / 8u][i % 8u];
        float4 *place = tile.totals + i * TILE_THREADS + threadIdx.x;
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

DEVICE void write_outputs(const Tile &tile, const Part &part, u32 first_tile, const float (&acc)[2][8][4])
{
    u32 lane = lane_index(), g = lane >> 2, t = lane & 3u;
#pragma unroll
    for (u32 n = 0; n < 8u; n++) {
#pragma unroll
        for (u32 c = 0; c < 2u; c++) {
            u32 row = warp_index() / 4u * 64u + n * 8u + 2u * t + c;
            if (row >= tile.rows->count)
                continue;
            float *out = tile.out + tile.rows->out[row] * tile.out_stride + tile.head_outputs + part.first_output;
#pragma unroll
            for (u32 i = 0; i < 4u; i++) {
                u32 output = (first_tile + warp_index() % 4u * 2u + (i >> 1)) * 16u + g + 8u * (i & 1u);
                if (output < part.outputs)
                    out[output] = acc[i >> 1][n][2u * (i & 1u) + c];
            }
        }
    }
}

// A tile of one part; `first_tile` counts runs of 16 outputs.
template <class E> DEVICE void multiply_tile(const Tile &tile, const Part &part, u32 first_tile)
{
    float acc[2][8][4];
#pragma unroll
    for (u32 i = 0; i < 64u; i++)
        acc[i / 32u][i / 4u % 8u][i % 4u] = 0.0f;
    for (u32 unit = 0; unit < TILE_STAGES - 1u; unit++) {
        if (unit < tile.units)
            request_unit<E>(tile, part, first_tile, unit, tile.stages + unit * Stage<E>::BYTES);
        copy_async_commit();
    }
    u32 stage = 0;
#pragma unroll 1
    for (u32 unit = 0; unit < tile.units; unit++) {
        copy_async_wait<TILE_STAGES - 2u>();
        // The unit is here for all threads, and all are done with the stage before it.
        __syncthreads();
        u32 free = stage == 0u ? TILE_STAGES - 1u : stage - 1u;
        if (unit + TILE_STAGES - 1u < tile.units)
            request_unit<E>(tile, part, first_tile, unit + TILE_STAGES - 1u, tile.stages + free * Stage<E>::BYTES);
        copy_async_commit();
        multiply_stage<E>(tile.stages + stage * Stage<E>::BYTES, acc);
        stage = stage + 1u == TILE_STAGES ? 0u : stage + 1u;
        bool last = unit + 1u == tile.units;
        if (last || unit % SLICE == SLICE - 1u)
            end_slice(tile, unit < SLICE, last, acc);
    }
    write_outputs(tile, part, first_tile, acc);
}

// A kernel's parameters; the same order in `product/tile.rs`.
#define TILE_PARAMETERS                                                                                                \
    const Part *__restrict__ parts, u32 part_count, u32 inputs, const u8 *__restrict__ rounded,                        \
        const float *__restrict__ sums_64, const float *__restrict__ sums_32, u32 virtual_rows,                        \
        float *__restrict__ out, GROUP_PARAMETERS

// Grid: runs of 128 outputs of all parts by groups. Each kernel has its own encodings.
#define TILE_KERNEL(NAME, RUN)                                                                                         \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) NAME(TILE_PARAMETERS)                                \
    {                                                                                                                  \
        extern __shared__ __align__(16) u8 shared[];                                                                   \
        __shared__ TileRows tile_rows;                                                                                 \
        Groups groups = GROUPS_OF_PARAMETERS;                                                                          \
        u32 run = blockIdx.x, group = blockIdx.y;                                                                      \
        if (manner <= PART_A_MEMBER) {                                                                                 \
            u64 block = blockIdx.x + (u64)gridDim.x * blockIdx.y;                                                      \
            u32 first = (u32)(block / (SIDE_BY_SIDE * gridDim.x)) * SIDE_BY_SIDE;                                      \
            u32 width = min(SIDE_BY_SIDE, gridDim.y - first);                                                          \
            u32 rest = (u32)(block - (u64)first * gridDim.x);                                                          \
            run = rest / width, group = first + rest % width;                                                          \
        }                                                                                                              \
        if (!describe_tile(groups, group, tile_rows))                                                                  \
            return;                                                                                                    \
        __syncthreads();                                                                                               \
        Tile tile;                                                                                                     \
        tile.rounded = rounded, tile.sums_64 = sums_64, tile.sums_32 = sums_32, tile.virtual_rows = virtual_rows;      \
        tile.units = ceil_div(inputs, 64u), tile.out = out, tile.out_stride = out_stride;                              \
        tile.head_outputs = manner == PART_A_MEMBER ? tile_rows.member * outputs : 0u;                                 \
        tile.totals = (float4 *)shared;                                                                                \
        tile.stages = shared + (tile.units > SLICE ? 16u * TILE_THREADS * 16u : 0u);                                   \
        tile.rows = &tile_rows;                                                                                        \
        tile.copied[0] = tile_rows.x[threadIdx.x / 4u], tile.copied[1] = tile_rows.x[64u + threadIdx.x / 4u];          \
        for (u32 p = 0; p < part_count; p++) {                                                                         \
            Part part = parts[p];                                                                                      \
            u32 runs = ceil_div(part.tiles, 8u);                                                                       \
            if (run >= runs) {                                                                                         \
                run -= runs;                                                                                           \
                continue;                                                                                              \
            }                                                                                                          \
            part.codes += tile_rows.member * part.code_stride;                                                         \
            part.scales += tile_rows.member * part.scale_stride;                                                       \
            RUN(tile, part, run * 8u);                                                                                 \
            return;                                                                                                    \
        }                                                                                                              \
    }
