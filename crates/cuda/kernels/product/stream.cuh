// Products of few rows: weights stream through shared memory, up to eight rows at a time.
//
// A group is a member of the matrix and up to COLUMNS rows (columns of the instruction). The work is the list of all groups'
// tiles of 16 outputs; a block takes a run of them that has as many bytes as the others'. A tile's slices of 512 inputs are
// its cells: the block's warps deal the cells of a run out among them, and each copies its own weights, some chunks ahead.
// The last warp that comes to a tile adds the slices' sums in ascending order, so that no bit hangs on how many there are.
//
// The kernel begins early: weights are asked for before the inputs are there.
#pragma once
#include "product/encoding.cuh"
#include "product/groups.cuh"
#include "product/inputs.cuh"

// Units of a slice.
#define SLICE 8u
// Threads of a block; a unit that needs more registers has fewer. As in `src/product/stream.rs`.
#ifndef MOST_THREADS
#define MOST_THREADS 512
#endif
// Whether entries may belong to half units: groups of 32.
#ifndef SPLIT
#define SPLIT false
#endif

// Chunks under way and at work.
#define STAGES 4u
// Parts that a block keeps in shared memory.
#define KNOWN_PARTS 8u
// Bytes that are asked for at once on the way to the second cache.
#define AHEAD_PIECE 16384u

// Units copied at once: about 1 KiB of codes.
template <class E> struct Chunk {
    static constexpr u32 UNITS = E::WORDS <= 2u ? 4u : E::WORDS <= 5u ? 2u : 1u;
    // Chunks of a slice.
    static constexpr u32 COUNT = SLICE / UNITS;
    // Where its scales begin, and the bytes of a stage.
    static constexpr u32 SCALES = UNITS * E::UNIT;
    static constexpr u32 ENTRIES = UNITS * (SPLIT ? E::ENTRIES : E::ENTRY == 0u ? 0u : 1u);
    static constexpr u32 STAGE = SCALES + ENTRIES * E::ENTRY;
};

// What the block's warps share of the work at hand.
struct Work {
    // Items that are left, and how many the first matrix has.
    u32 item, stop, first_items;
    // Tiles of the block's runs before this one.
    u32 tiles_before;
    float *out;
    Columns columns;
};

// What a warp knows. Most of it are the kernel's parameters.
struct Stream {
    u32 units, slices;
    // How far a warp's next cell is.
    u32 step_tiles, step_slices;
    // Slots for tiles at hand.
    u32 slots;
    // Shared memory, and where in it the slices' sums, the counters and the stages begin; bytes of a stage.
    u8 *shared;
    u32 sums_at, counters_at, stages_at, stage_bytes;
    // Inputs whose sums the biases need, as bits: 64, 32.
    u32 group_sizes;
    // Bytes that the block asks for ahead of its inputs.
    u32 ahead;
    Work *work;
    bool waited, prepared;
};

// Sums of 32 and 64 inputs, eight columns each: before the slices' sums.
DEVICE float *sums_of_32(const Stream &s)
{
    return (float *)(s.shared + s.sums_at) - s.units * 16u;
}

DEVICE float *sums_of_64(const Stream &s)
{
    return (float *)(s.shared + s.sums_at) - ((s.group_sizes & 32u) ? s.units * 24u : s.units * 8u);
}

// A slice of a tile, and where a lane's first sixteen bytes of its codes and scales are.
struct Cell {
    u32 tile, slice;
};

DEVICE void next_cell(Cell &cell, const Stream &s)
{
    cell.tile += s.step_tiles;
    cell.slice += s.step_slices;
    if (cell.slice >= s.slices)
        cell.slice -= s.slices, cell.tile++;
}

// Units of a cell: eight but in a row's last slice.
DEVICE u32 cell_units(const Cell &cell, const Stream &s)
{
    return min(s.units - cell.slice * SLICE, SLICE);
}

// A member of a part.
struct Source {
    const u8 *codes, *scales;
    u32 entries, share;
};

// The cell that chunks are asked for of, from a lane's first sixteen bytes on.
struct Asked {
    Cell cell;
    const u8 *codes, *scales;
};

template <class E> DEVICE void point_at(Asked &asked, const Stream &s, const Source &source)
{
    asked.codes = source.codes + (u64)(asked.cell.tile * s.units + asked.cell.slice * SLICE) * E::UNIT;
    if constexpr (E::ENTRY != 0u)
        asked.scales = source.scales + (u64)(asked.cell.tile * source.entries + (asked.cell.slice * 2u * SLICE >> source.share)) * E::ENTRY;
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

// Starts the copy of a chunk of up to UNITS units; `stage` is the lane's too.
template <class E> DEVICE void request(const Asked &asked, u32 share, u32 chunk, u32 units, u8 *stage)
{
    constexpr u32 UNITS = Chunk<E>::UNITS;
    const u8 *codes = asked.codes + chunk * Chunk<E>::SCALES;
    if (units >= UNITS)
        copy_bytes<Chunk<E>::SCALES>(stage, codes, Chunk<E>::SCALES);
    else
        copy_bytes<Chunk<E>::SCALES>(stage, codes, units * E::UNIT);
    if constexpr (E::ENTRY != 0u) {
        u32 first = 2u * UNITS * chunk >> share, count = (2u * min(units, UNITS) - 1u >> share) + 1u;
        copy_bytes<Chunk<E>::ENTRIES * E::ENTRY>(stage + Chunk<E>::SCALES, asked.scales + first * E::ENTRY, count * E::ENTRY);
    }
}

// `entries` are the two halves', `x` is where this lane's inputs of the unit begin, `sums` its columns' sums of them.
template <class E, u32 STEP>
DEVICE void multiply_unit(const u8 *codes, const u8 *first, const u8 *second, const u8 *x, const float *sums, float (&acc)[4])
{
    u32 words[E::WORDS], pairs[16];
    read_words<E::WORDS>(codes, lane_index(), words);
    E::Decoder::decode(words, pairs);
    weigh_unit<E>(pairs, first, second);
    float partial[4];
#pragma unroll
    for (u32 half = 0; half < 2u; half++) {
        uint4 inputs = *(const uint4 *)(x + half * STEP);
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
            fold_into<E>(acc, partial, read_fold<E>(half ? second : first, lane_index() >> 2), two);
        }
    }
}

// Unit `i` of a chunk, unit `unit` of the row. `x` is where this lane's inputs of the chunk begin.
template <class E, u32 COLUMNS>
DEVICE void multiply_chunk_unit(const Stream &s, const u8 *stage, u32 i, u32 unit, u32 share, const u8 *x, float (&acc)[4])
{
    constexpr u32 STEP = 64u * COLUMNS;
    const float *sums = nullptr;
    if (E::BIASED)
        sums = (E::FOLDS == 2u ? sums_of_32(s) + unit * 16u : sums_of_64(s) + unit * 8u) + 2u * (lane_index() & 3u);
    const u8 *first = stage + Chunk<E>::SCALES + (2u * i >> share) * E::ENTRY, *second = first;
    if (SPLIT && share == 0u)
        second += E::ENTRY;
    multiply_unit<E, STEP>(stage + i * E::UNIT, first, second, x + 2u * i * STEP, sums, acc);
}

// Writes a tile's outputs of all rows.
DEVICE void write_tile(const Stream &s, const Part &part, u32 tile, const float (&total)[4])
{
    u32 g = lane_index() >> 2, t = lane_index() & 3u;
#pragma unroll
    for (u32 i = 0; i < 4u; i++) {
        u32 output = tile * 16u + g + 8u * (i >> 1), column = 2u * t + (i & 1u);
        if (output < part.outputs && column < s.work->columns.count)
            s.work->out[s.work->columns.out[column] + part.first_output + output] = total[i];
    }
}

// A tile's total from its slices' sums, `step` apart.
DEVICE void add_slices(const float4 *sums, u32 step, u32 slices, float (&total)[4])
{
    float4 four = sums[0];
    total[0] = four.x, total[1] = four.y, total[2] = four.z, total[3] = four.w;
#pragma unroll 4
    for (u32 slice = 1; slice < slices; slice++) {
        four = sums[slice * step];
        total[0] = __fadd_rn(total[0], four.x), total[1] = __fadd_rn(total[1], four.y);
        total[2] = __fadd_rn(total[2], four.z), total[3] = __fadd_rn(total[3], four.w);
    }
}

// Keeps a cell's sums; the last warp that comes to the tile writes it. `number` counts the block's tiles.
template <u32 COLUMNS>
DEVICE void finish_cell(const Stream &s, const Part &part, const Cell &cell, u32 number, const float (&acc)[4])
{
    if (s.slices == 1u)
        return write_tile(s, part, cell.tile, acc);
    // Lanes of a row of eight that have columns.
    constexpr u32 LANES = (COLUMNS + 1u) / 2u, STEP = 8u * LANES;
    u32 slot = number & (s.slots - 1u), lane = lane_index();
    u32 *arrived = (u32 *)(s.shared + s.counters_at) + slot;
    volatile u32 *written = arrived + s.slots;
    // The tile that had the slot before must be written.
    while (__any_sync(ALL_LANES, *written != number - slot)) {
    }
    float4 *sums = (float4 *)(s.shared + s.sums_at) + slot * s.slices * STEP + (lane >> 2) * LANES + (lane & 3u);
    bool has_columns = (lane & 3u) < LANES;
    if (has_columns)
        sums[cell.slice * STEP] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    __threadfence_block();
    __syncwarp();
    u32 came = 0;
    if (lane == 0u)
        came = atomicAdd(arrived, 1u);
    if (__shfl_sync(ALL_LANES, came, 0) + 1u != s.slices)
        return;
    __threadfence_block();
    float total[4] = {};
    if (has_columns)
        add_slices(sums, STEP, s.slices, total);
    write_tile(s, part, cell.tile, total);
    __syncwarp();
    if (lane == 0u) {
        *arrived = 0u;
        __threadfence_block();
        *written = number - slot + s.slots;
    }
}

// Asks for `bytes` bytes (a multiple of 16) to come to the second cache, on devices that can.
DEVICE void prefetch_second(const void *from, u32 bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// What an early kernel does before its inputs are there: the block's weights come nearer. `most` is a multiple of 16.
DEVICE void ask_ahead(const u8 *from, u32 bytes, u32 most)
{
    bytes = min(bytes, most);
    if (lane_index() == 0u)
        for (u32 at = warp_index() * AHEAD_PIECE; at < bytes; at += blockDim.x / 32u * AHEAD_PIECE)
            prefetch_second(from + at, min(AHEAD_PIECE, bytes - at));
}

// Where a lane's inputs begin. Columns without a row read the last row's: no column meets another.
template <u32 COLUMNS> DEVICE const u8 *lane_inputs(const Stream &s)
{
    return s.shared + min(lane_index() >> 2, s.work->columns.count - 1u) * 64u + (lane_index() & 3u) * 16u;
}

template <u32 COLUMNS> DEVICE void prepare_inputs(Stream &s, const Inputs &inputs)
{
    round_inputs<COLUMNS>(inputs, s.units, s.work->columns.x, s.work->columns.count, s.shared);
    __syncthreads();
    if (s.group_sizes != 0u) {
        sum_inputs(lane_inputs<COLUMNS>(s), 64u * COLUMNS, s.units, (s.group_sizes & 64u) ? sums_of_64(s) : nullptr,
                   (s.group_sizes & 32u) ? sums_of_32(s) : nullptr);
        __syncthreads();
    }
    s.prepared = true;
}

namespace {

// A warp's cells of a run. Chunk `i` of a cell lies in stage `i` of the ring, counted on from the cell before where a slice
// has fewer chunks than the ring has stages. WHOLE: every slice has eight units.
template <class E, u32 COLUMNS, bool WHOLE> struct Cells {
    static constexpr u32 COUNT = Chunk<E>::COUNT, UNITS = Chunk<E>::UNITS, STAGE = Chunk<E>::STAGE;

    // Asks for chunk `chunk` of the cell at hand, or of the next where that was the last one's end.
    static __device__ __forceinline__ void ask(const Stream &s, const Source &source, Asked &asked, u32 last, u32 number, u32 stage, u8 *ring)
    {
        u32 chunk = number % COUNT;
        if (chunk == 0u && number != 0u) {
            next_cell(asked.cell, s);
            point_at<E>(asked, s, source);
        }
        if (asked.cell.tile < last) {
            u32 units = WHOLE ? UNITS : cell_units(asked.cell, s);
            if (WHOLE || chunk * UNITS < units)
                request<E>(asked, source.share, chunk, WHOLE ? UNITS : units - chunk * UNITS, ring + stage * STAGE + lane_index() * 16u);
        }
        copy_async_commit();
    }

    static __device__ __forceinline__ void multiply(const Stream &s, const Cell &cell, u32 chunk, u32 share, const u8 *stage, const u8 *x, float (&acc)[4])
    {
        u32 unit = cell.slice * SLICE + chunk * UNITS;
        if (WHOLE) {
#pragma unroll
            for (u32 i = 0; i < UNITS; i++)
                multiply_chunk_unit<E, COLUMNS>(s, stage, i, unit + i, share, x + chunk * UNITS * 128u * COLUMNS, acc);
        } else {
            u32 units = cell_units(cell, s);
#pragma unroll 1
            for (u32 i = 0; i < UNITS && chunk * UNITS + i < units; i++)
                multiply_chunk_unit<E, COLUMNS>(s, stage, i, unit + i, share, x + chunk * UNITS * 128u * COLUMNS, acc);
        }
    }

    // The cell's chunks; those three further on are asked for.
    static __device__ __forceinline__ void run(const Stream &s, const Source &source, const Cell &cell, Asked &asked, u32 last, u32 turn, u8 *ring, const u8 *x, float (&acc)[4])
    {
        x += cell.slice * (SLICE * 128u * COLUMNS);
        auto chunk = [&](u32 i) {
            copy_async_wait<STAGES - 2u>();
            // The chunk is here for all lanes, and all lanes are done with the stage before it.
            __syncwarp();
            u32 at = COUNT < STAGES ? (turn + i) % STAGES : i % STAGES;
            ask(s, source, asked, last, i + STAGES - 1u, (at + STAGES - 1u) % STAGES, ring);
            multiply(s, cell, i, source.share, ring + at * STAGE, x, acc);
        };
        if (WHOLE) {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++)
                chunk(i);
        } else {
#pragma unroll 1
            for (u32 i = 0; i < COUNT; i++)
                chunk(i);
        }
    }
};

}

template <class E, u32 COLUMNS, bool WHOLE>
DEVICE void stream_cells(Stream &s, const Part &part, const Source &source, u32 first, u32 last, const Inputs &inputs)
{
    typedef Cells<E, COLUMNS, WHOLE> Here;
    Cell cell = {first + warp_index() / s.slices, warp_index() % s.slices};
    Asked asked = {cell, nullptr, nullptr};
    point_at<E>(asked, s, source);
    u8 *ring = s.shared + s.stages_at + warp_index() * (STAGES * s.stage_bytes);
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < STAGES - 1u; i++)
        Here::ask(s, source, asked, last, i, i, ring);
    if (!s.waited) {
        u32 lane = lane_index() * 16u;
        ask_ahead(source.codes - lane + (u64)first * s.units * E::UNIT, (last - first) * s.units * E::UNIT, s.ahead);
        if (E::ENTRY != 0u)
            ask_ahead(source.scales - lane + (u64)first * source.entries * E::ENTRY, (last - first) * source.entries * E::ENTRY,
                      s.ahead);
        grid_wait();
        grid_release();
        s.waited = true;
    }
    if (!s.prepared)
        prepare_inputs<COLUMNS>(s, inputs);
    const u8 *x = lane_inputs<COLUMNS>(s);
    u32 number = s.work->tiles_before - first, turn = 0;
#pragma unroll 1
    while (cell.tile < last) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        Here::run(s, source, cell, asked, last, turn, ring, x, acc);
        finish_cell<COLUMNS>(s, part, cell, number + cell.tile, acc);
        next_cell(cell, s);
        turn += Chunk<E>::COUNT;
    }
    copy_async_wait<0u>();
}

// Tiles `first..last` of one part. The group's inputs are prepared behind the first requests where they are not yet.
template <class E, u32 COLUMNS> DEVICE void stream_part(Stream &s, const Part &part, u32 first, u32 last, const Inputs &inputs)
{
    u32 member = s.work->columns.member;
    Source source = {part.codes + member * part.code_stride, part.scales + member * part.scale_stride, part.entries, part.share};
    source.codes += lane_index() * 16u, source.scales += lane_index() * 16u;
    // Code is unrolled for the common encodings and numbers of rows alone.
    constexpr bool COMMON = E::WEIGHED && !SPLIT && COLUMNS != 4u && (E::WORDS == 4u || (COLUMNS == 1u && (E::WORDS == 2u || E::WORDS == 8u)));
    if (COMMON && s.units % SLICE == 0u)
        stream_cells<E, COLUMNS, COMMON>(s, part, source, first, last, inputs);
    else
        stream_cells<E, COLUMNS, false>(s, part, source, first, last, inputs);
    // The next run's tiles count on; all warps have read the number.
    __syncthreads();
    if (threadIdx.x == 0u)
        s.work->tiles_before += last - first;
    __syncthreads();
}
