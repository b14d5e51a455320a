// Which rows a product multiplies with which member of a matrix.
#pragma once
#include "common/base.cuh"

// Pairs that a block groups by itself.
#define MOST_PAIRS 128u
// Rows of a group at most.
#define MOST_COLUMNS 8u

// How rows and members belong together.
enum Manner {
    // All rows with the only member.
    ROWS_OF_ONE,
    // Part h of each row with member h.
    PART_A_MEMBER,
    // Pair p with the member in its pick's slot; grouped here.
    PICKED,
    // The same, sorted by `sort_pairs`.
    SORTED,
};

struct Groups {
    u32 manner, rows, columns, members;
    u32 inputs, outputs;
    u64 x_stride, out_stride;
    const u32 *picks, *slots;
    u32 experts, picks_per_row, paired;
    // Of sorted pairs: the pairs by slot, where each slot's start, and in how many groups.
    const u32 *order, *starts, *group_starts;
};

#define GROUP_PARAMETERS                                                                                               \
    u32 manner, u32 rows, u32 columns_of_group, u32 members, u32 outputs, u64 x_stride, u64 out_stride,                \
        const u32 *__restrict__ picks, const u32 *__restrict__ slots, u32 experts, u32 picks_per_row, u32 paired,      \
        const u32 *__restrict__ order, const u32 *__restrict__ starts, const u32 *__restrict__ group_starts

#define GROUPS_OF_PARAMETERS                                                                                           \
    {                                                                                                                  \
        manner, rows, columns_of_group, members, inputs, outputs, x_stride, out_stride, picks, slots, experts,         \
            picks_per_row, paired, order, starts, group_starts                                                         \
    }

// Pairs by member, made by each block for itself.
struct Grouping {
    u32 slot[MOST_PAIRS];
    // How many pairs before have the same slot.
    u32 place[MOST_PAIRS];
    u32 member[MOST_PAIRS];
    u32 size[MOST_PAIRS];
    u8 pair[MOST_PAIRS][MOST_COLUMNS];
    u32 count;
};

// A group: a member, and for each of its rows where its input and its output start.
struct Columns {
    u32 member, count;
    u64 x[MOST_COLUMNS], out[MOST_COLUMNS];
};

// The slot of a pair's expert. A pick without one would be a bug in the caller; it must not leave the stack.
DEVICE u32 slot_of_pair(const u32 *picks, const u32 *slots, u32 experts, u32 members, u32 pair)
{
    return min(slots[min(picks[pair], experts - 1u)], members - 1u);
}

// Groups pairs in the order of each slot's first. A barrier of the block.
DEVICE u32 group_pairs(const Groups &g, Grouping &to)
{
    u32 pairs = g.rows * g.picks_per_row, pair = threadIdx.x;
    if (pair < pairs)
        to.slot[pair] = slot_of_pair(g.picks, g.slots, g.experts, g.members, pair);
    __syncthreads();
    if (pair < pairs) {
        u32 before = 0;
        for (u32 q = 0; q < pair; q++)
            before += to.slot[q] == to.slot[pair];
        to.place[pair] = before;
    }
    __syncthreads();
    if (pair < pairs) {
        u32 group = 0;
        for (u32 q = 0; q < pair; q++)
            group += to.place[q] % g.columns == 0u;
        bool leads = to.place[pair] % g.columns == 0u;
        if (leads) {
            u32 size = 0;
            for (u32 q = pair; q < pairs && size < g.columns; q++)
                if (to.slot[q] == to.slot[pair])
                    to.pair[group][size++] = (u8)q;
            to.member[group] = to.slot[pair], to.size[group] = size;
        }
        if (pair == pairs - 1u)
            to.count = group + leads;
    }
    __syncthreads();
    return to.count;
}

DEVICE u32 count_groups(const Groups &g, Grouping &grouping)
{
    u32 row_groups = ceil_div(g.rows, g.columns);
    switch (g.manner) {
    case ROWS_OF_ONE: return row_groups;
    case PART_A_MEMBER: return row_groups * g.members;
    case PICKED: return group_pairs(g, grouping);
    default: return g.group_starts[g.members];
    }
}

// The last slot whose groups start at or before `group` and which has any.
DEVICE u32 slot_of_group(const u32 *group_starts, u32 members, u32 group)
{
    u32 low = 0, high = members;
    while (low + 1u < high) {
        u32 middle = (low + high) / 2u;
        if (group_starts[middle] <= group)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// One thread for each row fills in the group's rows.
DEVICE void describe_group(const Groups &g, const Grouping &grouping, u32 group, Columns &to)
{
    u32 column = threadIdx.x, row_groups = ceil_div(g.rows, g.columns);
    if (column >= g.columns)
        return;
    u32 member = 0, count;
    if (g.manner <= PART_A_MEMBER) {
        member = g.manner == PART_A_MEMBER ? group / row_groups : 0u;
        u32 first = (g.manner == PART_A_MEMBER ? group % row_groups : group) * g.columns;
        count = min(g.columns, g.rows - first);
        to.x[column] = (first + column) * g.x_stride + (u64)member * g.inputs;
        to.out[column] = (first + column) * g.out_stride + (u64)member * g.outputs;
    } else {
        u32 pair = 0;
        if (g.manner == PICKED) {
            member = grouping.member[group], count = grouping.size[group];
            pair = column < count ? grouping.pair[group][column] : 0u;
        } else {
            member = slot_of_group(g.group_starts, g.members, group);
            u32 first = g.starts[member] + (group - g.group_starts[member]) * g.columns;
            count = min(g.columns, g.starts[member + 1u] - first);
            pair = column < count ? g.order[first + column] : 0u;
        }
        to.x[column] = (g.paired ? pair : pair / g.picks_per_row) * g.x_stride;
        to.out[column] = pair * g.out_stride;
    }
    if (column == 0u)
        to.member = member, to.count = count;
}
