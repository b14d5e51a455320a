// A tile's rows, whichever kernel multiplies it.
#pragma once
#include "product/encoding.cuh"
#include "product/groups.cuh"

#define TILE_ROWS 64u
// Runs of 16 outputs of a tile: a warp's each.
#define TILE_RUNS 16u
// Units of a slice, as in `product/stream.cuh`.
#define SLICE 8u
// Row tiles that are walked side by side, so that their inputs stay in the second-level cache.
#define SIDE_BY_SIDE 16u

// A tile's rows: its first among the rounded inputs, and where each one's output is.
struct TileRows {
    u32 out[TILE_ROWS];
    u32 member, first, count;
};

struct Tile {
    const u8 *rounded;
    u32 virtual_rows, first_row, units;
    float *out;
    u64 out_stride;
    u32 head_outputs;
    u8 *stages;
    float4 *totals;
    const TileRows *rows;
};

// A group of up to 64 rows of one member. `virtual_row`: where the first one's rounded inputs are. Members' rows begin at
// multiples of eight.
struct TileGroup {
    u32 member, first, count, virtual_row;
};

// False when there is no such group.
DEVICE bool find_group(const Groups &g, u32 group, TileGroup &to)
{
    u32 row_groups = ceil_div(g.rows, TILE_ROWS), start, end;
    if (g.manner <= PART_A_MEMBER) {
        to.member = group / row_groups, to.first = group % row_groups * TILE_ROWS, end = g.rows;
        to.virtual_row = to.member * ((g.rows + 7u) & ~7u) + to.first;
    } else {
        if (group >= g.group_starts[g.members])
            return false;
        to.member = slot_of_group(g.group_starts, g.members, group);
        start = g.starts[to.member], end = g.starts[to.member + 1u];
        u32 before = (group - g.group_starts[to.member]) * TILE_ROWS;
        to.first = start + before, to.virtual_row = (start & ~7u) + 8u * to.member + before;
    }
    to.count = min(TILE_ROWS, end - to.first);
    return true;
}

// Fills in the rows of a group; false when there is no such group.
DEVICE bool describe_tile(const Groups &g, u32 group, TileRows &to)
{
    TileGroup found;
    if (!find_group(g, group, found))
        return false;
    if (threadIdx.x < TILE_ROWS) {
        u32 row = found.first + min(threadIdx.x, found.count - 1u);
        to.out[threadIdx.x] = g.manner == SORTED ? g.order[row] : row;
    }
    if (threadIdx.x == 0u)
        to.member = found.member, to.first = found.virtual_row, to.count = found.count;
    return true;
}
