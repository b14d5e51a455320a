// A row's list of cached latents, and how what was summed over parts of it is folded.
//
// A row's list (its picked pools, ascending, then the incomplete pool) is cut by index into blocks of 64 entries, and into
// segments of eight blocks. A segment starts afresh; its blocks fold a running maximum and sum, and segments are folded in
// order. Scores have a chain for each half of 256 dimensions, and the halves are added; of q there are two bf16 terms, and of
// a weight too: a chain takes sixteen values' first terms, then their second ones. Latents are bf16.
#pragma once
#include "common/base.cuh"
#include "common/maths.cuh"
#include "common/parts.cuh"

#define BLOCK 64
#define SEGMENT 512
// Dimensions of a chain of a score.
#define HALF 256

// The row of the batch that a block works on.
struct Row {
    const u32* picks;
    const u16* const* pages;
    u32 kpool, page_rows, rank;
    // Entries of picked pools, then of the incomplete one from `tail`.
    u32 picked, count, tail;

    // The position of an entry, and where its latent stands.
    __device__ __forceinline__ u32 position(u32 entry) const {
        return entry < picked ? picks[entry / kpool] * kpool + entry % kpool : tail + entry - picked;
    }
    __device__ __forceinline__ const u16* at(u32 position) const {
        return pages[position / page_rows] + (u64)(position % page_rows) * rank;
    }
    __device__ __forceinline__ const u16* latent(u32 entry) const { return at(position(entry)); }
};

// Lists a row. Every thread of the block takes part; picks that stand are those before the first that is not visible.
DEVICE Row list_row(const u32* picks, u32 kept, u32 kpool, u32 page_rows, u32 rank, const DsaPart& part, u32 local,
                    const u16* const* pages) {
    u32 visible = visible_pools(part, local, kpool), pools = 0;
    for (u32 first = 0; first < kept; first += blockDim.x) {
        u32 at = first + threadIdx.x;
        pools += __syncthreads_count(at < kept && picks[at] < visible);
    }
    u32 tail = visible * kpool, picked = pools * kpool;
    return {picks, pages + part.first_page, kpool, page_rows, rank, picked, picked + part.position + local + 1 - tail, tail};
}

// e^x for x <= 0, within two units in the last place; zero below e^-86. NaN gives NaN.
DEVICE float weight_of(float x) {
    const float round = 12582912.0f;
    // Selected at both ends, so that there is no branch. The comparison lets NaN through.
    bool gone = x < -86.0f;
    x = gone ? -86.0f : x;
    float shifted = __fmaf_rn(x, 1.44269502162933349609375f, round), n = __fadd_rn(shifted, -round);
    float r = __fmaf_rn(n, 1.904654212e-9f, __fmaf_rn(n, -0.693147182464599609375f, x));
    float p = 0.00019790341f;
    p = __fmaf_rn(p, r, 0.001394466f);
    p = __fmaf_rn(p, r, 0.008333497f);
    p = __fmaf_rn(p, r, 0.041666295f);
    p = __fmaf_rn(p, r, 0.16666666f);
    p = __fmaf_rn(p, r, 0.5f);
    float value = __fadd_rn(1.0f, __fmaf_rn(__fmul_rn(r, r), p, r));
    // The integer stands in the lowest bits of the shifted number.
    float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3F800000u);
    return __fmul_rn(value, gone ? 0.0f : power);
}

// What a segment, or several folded ones, leave of a head: the greatest score and the sum of weights against it.
struct Weight {
    float highest, total;
};

// Factors that bring what was folded before, and a segment, to their common maximum.
DEVICE float2 fold(Weight& before, const Weight& segment) {
    float highest = fmaxf(segment.highest, before.highest);
    float keep = weight_of(__fadd_rn(before.highest, -highest)), take = weight_of(__fadd_rn(segment.highest, -highest));
    before.total = __fmaf_rn(before.total, keep, __fmul_rn(segment.total, take));
    before.highest = highest;
    return make_float2(keep, take);
}

DEVICE float folded(float before, float segment, float2 factors) {
    return __fmaf_rn(before, factors.x, __fmul_rn(segment, factors.y));
}

// What every launch of attention has.
struct Attention {
    const float* q;
    u64 q_stride;
    const u32* picks;
    u32 heads, kept, rank, kpool, page_rows;
    float scale;
    const DsaPart* parts;
    const u32* row_parts;
    const u16* const* pages;
};

// The row of a block, or false when no part holds it.
DEVICE bool find_row(Row& row, const Attention& of, u64 index) {
    u32 part_index = of.row_parts[index];
    if (part_index == NO_PART) return false;
    DsaPart part = of.parts[part_index];
    row = list_row(of.picks + index * of.kept, of.kept, of.kpool, of.page_rows, of.rank, part, index - part.first_row, of.pages);
    return true;
}

#define ATTENTION                                                                                                             \
    const float *q, u32 q_stride, const u32 *picks, u32 heads, u32 kept, u32 rank, u32 kpool, u32 page_rows, float scale,     \
        const DsaPart *parts, const u32 *row_parts, const u16 *const *pages
#define ATTENTION_OF {q, q_stride, picks, heads, kept, rank, kpool, page_rows, scale, parts, row_parts, pages}
