// Sequences' parts of an operation, as the host's tables hold them (src/op/spans.rs).
#pragma once
#include "common/base.cuh"

// A sequence's part of a KDA operation.
struct KdaPart {
    float* window;
    float* state;
    float* log;
    u32 first_row;
    u32 logged;
    u32 sure;
    u32 drafts;
};

// Some rows of a part, from `first`; a part of NO_PART ends the list.
struct Chunk {
    u32 part;
    u32 first;
};

#define NO_PART 0xFFFFFFFFu

// A sequence's part of a DSA operation; its pages stand at `first_page` of the table of pages.
struct DsaPart {
    float* ring;
    u32 first_row;
    u32 rows;
    u32 position;
    u32 first_page;
};

// Complete pools that row `row` of a part sees.
DEVICE u32 visible_pools(const DsaPart& part, u32 row, u32 kpool) {
    return (part.position + row + 1) / kpool;
}
