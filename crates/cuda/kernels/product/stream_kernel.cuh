// The kernel of products of few rows; a unit names it and the encodings that it takes.
#pragma once
#include "product/stream.cuh"

// Parameters; the same order in `src/product/stream.rs`. The second matrix has as many inputs and is multiplied with all
// rows; a tile's `weight` is its share of bytes. Those of GROUP_PARAMETERS stand here again: what earlier launches write
// must not be `__restrict__` in an early kernel.
#define STREAM_PARAMETERS                                                                                              \
    const Part *__restrict__ parts, u32 part_count, u32 tiles, u32 weight, u32 inputs, u32 units, u32 slices,          \
        u32 step_tiles, u32 step_slices, u32 tile_slots, u32 sums_at, u32 counters_at, u32 stages_at,                  \
        u32 stage_bytes, u32 group_sizes, u32 ahead, u32 known, u32 activated, float limit, const float *x,            \
        float *out, u32 manner, u32 rows, u32 columns_of_group, u32 members, u32 outputs, u64 x_stride,                \
        u64 out_stride, const u32 *picks, const u32 *slots, u32 experts, u32 picks_per_row, u32 paired,                \
        const u32 *order, const u32 *starts, const u32 *group_starts, const Part *__restrict__ second_parts,           \
        u32 second_part_count, u32 second_tiles, u32 second_weight, const float *second_x, u64 second_x_stride,        \
        float *second_out, u64 second_out_stride

// Runs tiles `first..last` of a part; each kernel has its own encodings.
#define STREAM_KERNEL(NAME, RUN, COLUMNS_OF_KERNEL)                                                                    \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) NAME(STREAM_PARAMETERS)                              \
    {                                                                                                                  \
        extern __shared__ __align__(16) u8 shared[];                                                                   \
        __shared__ Grouping grouping;                                                                                  \
        __shared__ Work work;                                                                                          \
        __shared__ Part table[2][KNOWN_PARTS];                                                                         \
        copy_parts(table[0], parts, part_count);                                                                       \
        copy_parts(table[1], second_parts, second_part_count);                                                         \
        clear_counters(shared, counters_at, tile_slots);                                                               \
        Groups groups = GROUPS_OF_PARAMETERS;                                                                          \
        Stream s = {units,       slices,    step_tiles,  step_slices, tile_slots, shared, sums_at, counters_at,        \
                    stages_at,   stage_bytes, group_sizes, ahead,       &work,      false,  false};                    \
        if (!known) {                                                                                                  \
            grid_wait();                                                                                               \
            grid_release();                                                                                            \
            s.waited = true;                                                                                           \
        }                                                                                                              \
        u32 group_count = count_groups(groups, grouping);                                                              \
        if (threadIdx.x == 0u) {                                                                                       \
            u32 first_items = group_count * tiles;                                                                     \
            u32 items = first_items + ceil_div(rows, columns_of_group) * second_tiles;                                 \
            work.item = first_item(blockIdx.x, first_items, weight, items, second_weight);                             \
            work.stop = first_item(blockIdx.x + 1u, first_items, weight, items, second_weight);                        \
            work.first_items = first_items, work.tiles_before = 0u;                                                    \
        }                                                                                                              \
        for (;;) {                                                                                                     \
            __syncthreads();                                                                                           \
            u32 item = work.item, stop = work.stop, first_items = work.first_items;                                    \
            if (item >= stop)                                                                                          \
                break;                                                                                                 \
            bool is_second = item >= first_items;                                                                      \
            u32 all = is_second ? second_tiles : tiles;                                                                \
            item -= is_second ? first_items : 0u, stop -= is_second ? first_items : 0u;                                \
            u32 group = item / all, first = item % all, last = min(first + (stop - item), all);                        \
            Groups now = groups;                                                                                       \
            if (is_second)                                                                                             \
                now.manner = ROWS_OF_ONE, now.x_stride = second_x_stride, now.out_stride = second_out_stride;          \
            describe_group(now, grouping, group, work.columns);                                                        \
            if (threadIdx.x == 0u)                                                                                     \
                work.out = is_second ? second_out : out;                                                               \
            __syncthreads();                                                                                           \
            if (threadIdx.x == 0u)                                                                                     \
                work.item += last - first;                                                                             \
            s.prepared = false;                                                                                        \
            Inputs from = {is_second ? second_x : x, inputs, activated, limit};                                        \
            u32 count = is_second ? second_part_count : part_count;                                                    \
            for (u32 p = 0, before = 0; p < count && before < last; p++) {                                             \
                const Part &part = p < KNOWN_PARTS ? table[is_second][p] : (is_second ? second_parts : parts)[p];      \
                u32 end = before + part.tiles;                                                                         \
                if (first < end)                                                                                       \
                    RUN<COLUMNS_OF_KERNEL>(s, part, max(first, before) - before, min(last, end) - before, from);       \
                before = end;                                                                                          \
            }                                                                                                          \
        }                                                                                                              \
        if (!s.waited)                                                                                                 \
            grid_wait();                                                                                               \
    }

DEVICE void copy_parts(Part *to, const Part *from, u32 count)
{
    for (u32 i = threadIdx.x; i < min(count, KNOWN_PARTS) * (u32)(sizeof(Part) / 8u); i += blockDim.x)
        ((u64 *)to)[i] = ((const u64 *)from)[i];
}

// How many cells came to each slot's tile, and which of the slot's tiles are written. A barrier comes before their use.
DEVICE void clear_counters(u8 *shared, u32 counters_at, u32 slots)
{
    u32 *counters = (u32 *)(shared + counters_at);
    for (u32 i = threadIdx.x; i < 2u * slots; i += blockDim.x)
        counters[i] = 0u;
}

// The first item of a block: all of the first matrix weigh the same, and all of the second.
DEVICE u32 first_item(u32 block, u32 first_items, u32 weight, u32 items, u32 second_weight)
{
    u64 of_first = (u64)first_items * weight;
    u64 at = (of_first + (u64)(items - first_items) * second_weight) * block / gridDim.x;
    return at < of_first ? (u32)(at / weight) : first_items + (at > of_first ? (u32)((at - of_first) / second_weight) : 0u);
}
