// Products of many rows by warp groups (sm_90a): tiles of 128 outputs by 128 rows, the same sums as `product/stream.cuh`.
//
// A block walks over tiles. A warp group copies rows, codes and scales into a ring of stages of two units. Two others of 64
// outputs each take them: a warp decodes the units of its 16 outputs into registers while the tensor cores, which read the rows
// from shared memory, multiply the unit before.
#pragma once
#include "common/warpgroup.cuh"
#include "product/encoding.cuh"
#include "product/tile_rows.cuh"

// Runs of 16 outputs of a tile: a warp's each.
#define TILE_RUNS 8u
#define CONSUMERS (TILE_RUNS * WARP)
// Warps that copy, each for so many runs.
#define COPIERS 4u
#define COPIED_RUNS (TILE_RUNS / COPIERS)
#define TILE_THREADS (CONSUMERS + COPIERS * WARP)
#define COPY_REGISTERS 56u
#define TILE_REGISTERS 224u
#define MOST_STAGES 6u
// Pairs of units of a slice: 512 inputs, as in `product/stream.cuh`.
#define SLICE_PAIRS 4u
// Bytes of a stage: the rows' inputs of two units, then each run's codes of both, then each run's entries.
#define ROW_BYTES (TILE_ROWS * 128u)
#define STAGE_CODES (2u * ROW_BYTES)
#define RUN_SCALES 256u
// Bytes of the slices' totals of a tile with folds, before the stages.
#define TOTALS (64u * CONSUMERS * 4u)
// Row tiles that are walked side by side, so that their inputs stay in the second-level cache.
#define SIDE_BY_SIDE 16u

// What a block multiplies; the same for all its tiles.
struct Product {
    const u8 *rounded;
    u32 virtual_rows, units, pairs;
    float *out;
    u64 out_stride;
    u8 *stages;
    float4 *totals;
};

// One tile: rows of a group, and up to TILE_RUNS runs of a part from `first_run` on.
struct Tile {
    TileGroup rows;
    Part part;
    u32 first_run;
    // Where the first output of a row is in the row of all outputs.
    u32 first_output;
};

// What the copying warps tell the others of a tile: a tile without rows is the end. `out`: rows of the outputs.
struct __align__(8) Job {
    u32 out[TILE_ROWS];
    u32 count, first_run, first_output, share, outputs;
};

// Jobs that are kept: copies are at most MOST_STAGES tiles ahead.
#define JOBS 8u

// The stages, in turn. `here`: a stage's copies are here; `free`: all warps are done with it.
struct Ring {
    u64 *here, *free;
    u32 stages, stage_bytes, stage, turn;
};

DEVICE void next_stage(Ring &ring)
{
    ring.stage = ring.stage + 1u == ring.stages ? 0u : ring.stage + 1u;
    ring.turn ^= ring.stage == 0u;
}

// The tile number `item` of the launch: `runs` runs of all parts with codes of `bits` bits (or 0 bf16, 1 FP8) by groups. False
// behind the last.
DEVICE bool find_tile(const Groups &groups, const Part *parts, u32 part_count, u32 bits, u32 runs, u64 item, Tile &to)
{
    u32 group, run;
    if (groups.manner <= PART_A_MEMBER) {
        u32 all = ceil_div(groups.rows, TILE_ROWS) * groups.members;
        u32 first = (u32)(item / (SIDE_BY_SIDE * runs)) * SIDE_BY_SIDE;
        if (first >= all)
            return false;
        u32 width = min(SIDE_BY_SIDE, all - first), rest = (u32)(item - (u64)first * runs);
        run = rest / width, group = first + rest % width;
        if (run >= runs)
            return false;
    } else {
        group = (u32)(item / runs), run = (u32)(item % runs);
    }
    if (!find_group(groups, group, to.rows))
        return false;
    u32 p = 0;
    for (; p + 1u < part_count; p++) {
        if ((parts[p].encoding & 15u) != bits)
            continue;
        u32 of_part = ceil_div(parts[p].tiles, TILE_RUNS);
        if (run < of_part)
            break;
        run -= of_part;
    }
    to.part = parts[p];
    to.first_output = to.part.first_output + (groups.manner == PART_A_MEMBER ? to.rows.member * groups.outputs : 0u);
    to.part.codes += to.rows.member * to.part.code_stride;
    to.part.scales += to.rows.member * to.part.scale_stride;
    to.first_run = run * TILE_RUNS;
    return true;
}

// Writes a job, before the arrival that shows it: with a barrier of the copying warps.
DEVICE void tell(const Groups &groups, const Tile &tile, Job &job)
{
    u32 thread = threadIdx.x - CONSUMERS;
    if (thread == 0u) {
        job.count = tile.rows.count, job.first_run = tile.first_run, job.first_output = tile.first_output;
        job.share = tile.part.share, job.outputs = tile.part.outputs;
    }
    if (thread < tile.rows.count) {
        u32 row = tile.rows.first + thread;
        job.out[thread] = groups.manner == SORTED ? groups.order[row] : row;
    }
    team_barrier(1u, COPIERS * WARP);
}

// Tells that there are no more tiles.
DEVICE void tell_end(const Groups &groups, Tile &tile, Ring &ring, Job &job)
{
    await_barrier(ring.free + ring.stage, ring.turn ^ 1u);
    tile.rows.count = 0u;
    tell(groups, tile, job);
    if (threadIdx.x == CONSUMERS)
        arrive_with_bytes(ring.here + ring.stage, 0u);
    arrive_behind_copies(ring.here + ring.stage);
    copy_async_wait<0u>();
}

// Copies a tile's pairs of units. The first of the copying warps has the rows copied, past the threads, since the tensor cores
// read past the threads; every one copies the codes and scales of its runs: bulk copies of so few bytes are slow.
DEVICE void copy_tile(const Product &product, const Groups &groups, const Tile &tile, Ring &ring, Job &job)
{
    u32 lane = lane_index(), bits = tile.part.encoding & 15u, first = (warp_index() - TILE_RUNS) * COPIED_RUNS;
    u32 unit_bytes = (bits == 0u ? 16u : bits == 1u ? 8u : bits) * 128u, entry_bytes = bits == 0u ? 0u : 64u;
    u32 rows = ((tile.rows.count + 7u) & ~7u) * 128u;
    // Half a warp copies a run's scales.
    u32 scale_at = min(tile.first_run + first + lane / 16u, tile.part.tiles - 1u), piece = lane % 16u * 16u;
    const u8 *scales = tile.part.scales + (u64)scale_at * tile.part.entries * entry_bytes + piece;
    u32 scale_place = STAGE_CODES + TILE_RUNS * 2u * unit_bytes + (first + lane / 16u) * RUN_SCALES + piece;
    const u8 *codes[COPIED_RUNS];
#pragma unroll
    for (u32 run = 0; run < COPIED_RUNS; run++) {
        u32 at = min(tile.first_run + first + run, tile.part.tiles - 1u);
        codes[run] = tile.part.codes + (u64)at * product.units * unit_bytes + lane * 16u;
    }
    for (u32 pair = 0; pair < product.pairs; pair++) {
        u32 units = min(2u, product.units - 2u * pair), bytes = units * unit_bytes;
        u32 entries = entry_bytes * ((2u * units - 1u >> tile.part.share) + 1u);
        u8 *stage = product.stages + ring.stage * ring.stage_bytes;
        u64 *barrier = ring.here + ring.stage;
        await_barrier(ring.free + ring.stage, ring.turn ^ 1u);
        if (pair == 0u)
            tell(groups, tile, job);
        if (warp_index() == TILE_RUNS && lane == 0u) {
            arrive_with_bytes(barrier, units * rows);
            const u8 *from = product.rounded + ((u64)(2u * pair) * product.virtual_rows + tile.rows.virtual_row) * 128u;
            copy_bulk(stage, from, rows, barrier);
            if (units == 2u)
                copy_bulk(stage + ROW_BYTES, from + product.virtual_rows * 128ull, rows, barrier);
        }
#pragma unroll
        for (u32 run = 0; run < COPIED_RUNS; run++) {
            u8 *to = stage + STAGE_CODES + (first + run) * 2u * unit_bytes + lane * 16u;
            for (u32 at = 0; at + lane * 16u < bytes; at += 512u)
                copy_async_16(to + at, codes[run] + at);
            codes[run] += 2u * unit_bytes;
        }
        if (piece < entries)
            copy_async_16(stage + scale_place, scales + (u64)(4u * pair >> tile.part.share) * entry_bytes);
        arrive_behind_copies(barrier);
        next_stage(ring);
    }
}

// A warp's weights of a unit of the stage.
template <class E> DEVICE void decode_stage(const u8 *stage, u32 share, u32 which, u32 (&pairs)[16])
{
    u32 words[E::WORDS];
    read_words<E::WORDS>(stage + STAGE_CODES + (warp_index() * 2u + which) * E::UNIT, lane_index(), words);
    E::Decoder::decode(words, pairs);
    const u8 *entries = stage + STAGE_CODES + TILE_RUNS * 2u * E::UNIT + warp_index() * RUN_SCALES;
    weigh_unit<E>(pairs, entries + (2u * which >> share) * E::ENTRY, entries + (2u * which + 1u >> share) * E::ENTRY);
}

// Starts the products of a unit: from zero, or onto what is there.
template <u32 COLUMNS> DEVICE void start_unit(float (&sums)[COLUMNS][4], const u32 (&pairs)[16], u64 rows, u32 keep)
{
    before_products();
    multiply_async(sums, pairs, rows, keep);
    multiply_async(sums, pairs + 4, rows + 2u, 1u);
    multiply_async(sums, pairs + 8, rows + 4u, 1u);
    multiply_async(sums, pairs + 12, rows + 6u, 1u);
    end_products();
}

template <u32 COLUMNS> DEVICE void add_slice(float (&total)[COLUMNS][4], const float (&sums)[COLUMNS][4])
{
#pragma unroll
    for (u32 i = 0; i < 4u * COLUMNS; i++)
        total[i / 4u][i % 4u] = __fadd_rn(total[i / 4u][i % 4u], sums[i / 4u][i % 4u]);
}

template <u32 COLUMNS> DEVICE void fill(float (&sums)[COLUMNS][4], float with)
{
#pragma unroll
    for (u32 i = 0; i < 4u * COLUMNS; i++)
        sums[i / 4u][i % 4u] = with;
}

// Keeps the compiler from moving what touches sums past this place.
template <u32 COLUMNS> DEVICE void keep_sums(float (&sums)[COLUMNS][4])
{
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++)
        asm volatile("" : OPERANDS(sums[i])::"memory");
}

// The products of all units: a chain from zero for each slice. While a unit is multiplied, the next one's weights are decoded.
template <class E, u32 COLUMNS>
DEVICE void multiply_chains(const Product &product, u32 share, Ring &ring, float (&total)[COLUMNS][4])
{
    u32 even[16], odd[16], unit = 0;
    float sums[COLUMNS][4];
    // A negative zero: adding to it changes no bit.
    fill(total, -0.0f);
    fill(sums, 0.0f);
    keep_sums(sums);
    await_barrier(ring.here + ring.stage, ring.turn);
    decode_stage<E>(product.stages + ring.stage * ring.stage_bytes, share, 0u, even);
#pragma unroll 1
    while (unit < product.units) {
        u32 end = min(unit + 2u * SLICE_PAIRS, product.units), keep = 0u;
        u64 *before = nullptr;
#pragma unroll 1
        for (; unit + 2u <= end; unit += 2u) {
            const u8 *stage = product.stages + ring.stage * ring.stage_bytes;
            start_unit(sums, even, describe_rows(stage), keep);
            keep = 1u;
            wait_products<1u>();
            if (before)
                arrive_warp(before);
            decode_stage<E>(stage, share, 1u, odd);
            start_unit(sums, odd, describe_rows(stage) + ROW_BYTES / 16u, 1u);
            before = ring.free + ring.stage;
            next_stage(ring);
            wait_products<1u>();
            if (unit + 2u < product.units) {
                await_barrier(ring.here + ring.stage, ring.turn);
                decode_stage<E>(product.stages + ring.stage * ring.stage_bytes, share, 0u, even);
            }
        }
        if (unit < end) {
            start_unit(sums, even, describe_rows(product.stages + ring.stage * ring.stage_bytes), keep);
            wait_products<1u>();
            if (before)
                arrive_warp(before);
            before = ring.free + ring.stage;
            next_stage(ring);
            unit++;
        }
        wait_products<0u>();
        keep_sums(sums);
        arrive_warp(before);
        add_slice(total, sums);
        keep_sums(sums);
    }
}

// Folds a unit's sums into a slice's.
template <class E, u32 COLUMNS>
DEVICE void fold_unit(const u8 *stage, u32 share, u32 which, float (&acc)[COLUMNS][4], const float (&sums)[COLUMNS][4])
{
    const u8 *entries = stage + STAGE_CODES + TILE_RUNS * 2u * E::UNIT + warp_index() * RUN_SCALES;
    Fold by = read_fold<E>(entries + (2u * which >> share) * E::ENTRY, lane_index() >> 2);
#pragma unroll
    for (u32 n = 0; n < COLUMNS; n++)
        fold_into<E>(acc[n], sums[n], by, make_float2(0.0f, 0.0f));
}

// Adds a slice's sums to the totals, which each thread keeps in places of its own; after the last they are in `acc`.
template <u32 COLUMNS> DEVICE void end_slice(float4 *totals, bool first, bool last, float (&acc)[COLUMNS][4])
{
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) {
        float(&a)[4] = acc[i];
        float4 *place = totals + i * CONSUMERS + threadIdx.x;
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

// A pair of units whose sums are folded.
template <class E, u32 COLUMNS>
DEVICE void fold_pair(const Product &product, u32 share, Ring &ring, u32 pair, float (&acc)[COLUMNS][4])
{
    float sums[COLUMNS][4];
    u32 weights[16];
    const u8 *stage = product.stages + ring.stage * ring.stage_bytes;
    u64 rows = describe_rows(stage);
    await_barrier(ring.here + ring.stage, ring.turn);
#pragma unroll 1
    for (u32 which = 0; which < min(2u, product.units - 2u * pair); which++) {
        decode_stage<E>(stage, share, which, weights);
        start_unit(sums, weights, rows + which * (ROW_BYTES / 16u), 0u);
        wait_products<0u>();
        fold_unit<E>(stage, share, which, acc, sums);
    }
    arrive_warp(ring.free + ring.stage);
    next_stage(ring);
    bool last = pair + 1u == product.pairs;
    if (last || pair % SLICE_PAIRS == SLICE_PAIRS - 1u)
        end_slice(product.totals, pair < SLICE_PAIRS, last, acc);
}

template <u32 COLUMNS>
DEVICE void write_outputs(const Product &product, const Job &job, const float (&acc)[COLUMNS][4])
{
    u32 lane = lane_index(), g = lane >> 2, t = lane & 3u, output = (job.first_run + warp_index()) * 16u + g;
    float *out = product.out + job.first_output + output;
    bool first = output < job.outputs, second = output + 8u < job.outputs;
#pragma unroll
    for (u32 n = 0; n < COLUMNS; n++) {
        u32 row = n * 8u + 2u * t;
        uint2 two = *(const uint2 *)(job.out + row);
#pragma unroll
        for (u32 c = 0; c < 2u; c++) {
            float *to = out + (c ? two.y : two.x) * product.out_stride;
            if (row + c < job.count && first)
                to[0] = acc[n][c];
            if (row + c < job.count && second)
                to[8] = acc[n][2u + c];
        }
    }
}

// Multiplies a tile of up to eight times COLUMNS rows.
template <class E, u32 COLUMNS>
DEVICE void consume_columns(const Product &product, const Job &job, Ring &ring)
{
    u32 share = job.share;
    float total[COLUMNS][4];
    if constexpr (E::FOLDS == 0u) {
        multiply_chains<E>(product, share, ring, total);
    } else {
        fill(total, 0.0f);
#pragma unroll 1
        for (u32 pair = 0; pair < product.pairs; pair++)
            fold_pair<E>(product, share, ring, pair, total);
    }
    write_outputs(product, job, total);
}

template <class E> DEVICE void consume_tile(const Product &product, const Job &job, Ring &ring)
{
    if (job.count <= 64u)
        consume_columns<E, 8u>(product, job, ring);
    else
        consume_columns<E, 16u>(product, job, ring);
}

// A kernel's parameters; the same order in `product/warpgroup.rs`.
#define WARPGROUP_PARAMETERS                                                                                           \
    const Part *__restrict__ parts, u32 part_count, u32 runs, u32 inputs, u32 stages, u32 stage_bytes, u32 totals,     \
        const u8 *__restrict__ rounded, u32 virtual_rows, float *__restrict__ out, GROUP_PARAMETERS

// The parts of one encoding: a kernel that knows more than one has no registers to keep products under way.
#define WARPGROUP_KERNEL(NAME, ENCODING, BITS)                                                                         \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) NAME(WARPGROUP_PARAMETERS)                           \
    {                                                                                                                  \
        extern __shared__ __align__(1024) u8 shared[];                                                                 \
        __shared__ u64 barriers[2u * MOST_STAGES];                                                                     \
        __shared__ Job jobs[JOBS];                                                                                     \
        Groups groups = GROUPS_OF_PARAMETERS;                                                                          \
        if (threadIdx.x < 2u * MOST_STAGES)                                                                            \
            start_barrier(barriers + threadIdx.x, threadIdx.x < MOST_STAGES ? 1u + COPIERS * WARP : TILE_RUNS);        \
        show_shared();                                                                                                 \
        __syncthreads();                                                                                               \
        Product product;                                                                                               \
        product.rounded = rounded, product.virtual_rows = virtual_rows;                                                \
        product.out = out, product.out_stride = out_stride;                                                            \
        product.units = ceil_div(inputs, 64u), product.pairs = ceil_div(product.units, 2u);                            \
        product.totals = (float4 *)shared, product.stages = shared + totals;                                           \
        Ring ring = {barriers, barriers + MOST_STAGES, stages, stage_bytes, 0u, 0u};                                   \
        if (warp_index() >= TILE_RUNS) {                                                                               \
            fewer_registers<COPY_REGISTERS>();                                                                         \
            Tile tile;                                                                                                 \
            u32 job = 0;                                                                                               \
            u64 item = blockIdx.x;                                                                                     \
            for (; find_tile(groups, parts, part_count, BITS, runs, item, tile); item += gridDim.x)                    \
                copy_tile(product, groups, tile, ring, jobs[job++ % JOBS]);                                            \
            tell_end(groups, tile, ring, jobs[job % JOBS]);                                                            \
            return;                                                                                                    \
        }                                                                                                              \
        more_registers<TILE_REGISTERS>();                                                                              \
        for (u32 job = 0;; job++) {                                                                                    \
            await_barrier(ring.here + ring.stage, ring.turn);                                                          \
            if (jobs[job % JOBS].count == 0u)                                                                          \
                return;                                                                                                \
            consume_tile<ENCODING>(product, jobs[job % JOBS], ring);                                                   \
        }                                                                                                              \
    }
