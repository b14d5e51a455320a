// Rows of a tile, whichever kernel takes them.
#pragma once
#include "product/groups.cuh"

#define TILE_ROWS 128u

// A group of up to TILE_ROWS rows of one member. `virtual_row`: where the first one's rounded inputs are. Members' rows begin
// at multiples of eight.
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
