// The state of a KDA head of 128 in registers, and one token through it. Sixteen lanes share a group of four columns, eight keys
// each; a warp has eight columns.
#pragma once
#include "common/base.cuh"

#define DIM 128
// Tokens that are staged at once.
#define STAGE 8

// Tokens in shared memory, and the values of a block's columns.
template <int COLUMNS> struct Stage {
    // k·a, q·a, k, a.
    float vectors[STAGE][4][DIM];
    float values[STAGE][COLUMNS];
    // beta, q·k.
    float2 scalars[STAGE];
};

// A thread's place: key lane `l` has keys 4 l .. 4 l + 3 and 64 more; register j is column j ^ flip of the group of four, so
// that what a lane sends in a fold is always in the upper registers and nothing is selected.
struct Place {
    u32 key_lane, group, flip, role;

    __device__ __forceinline__ Place() {
        u32 lane = lane_index();
        key_lane = lane & 15;
        group = warp_index() * 8 + (lane >> 4) * 4;
        flip = (key_lane & 1) << 1 | (key_lane >> 1 & 1);
        role = key_lane >> 2 & 1;
    }

    // The key of register row `i`.
    __device__ __forceinline__ u32 key(u32 i) const { return key_lane * 4 + (i & 3) + (i >> 2) * 64; }

    // The lane that holds r of this lane's register column `j`.
    __device__ __forceinline__ u32 source(u32 j) const {
        u32 column = j ^ flip;
        return (lane_index() & 16) | (column >> 1 & 1) | (column & 1) << 1;
    }
};

DEVICE void swap_if(bool swap, float& a, float& b) {
    float first = swap ? b : a;
    b = swap ? a : b;
    a = first;
}

// Puts columns in a thread's order, and back: the exchange is its own inverse.
DEVICE void reorder(float (&columns)[4], u32 flip) {
    swap_if(flip & 2, columns[0], columns[2]);
    swap_if(flip & 2, columns[1], columns[3]);
    swap_if(flip & 1, columns[0], columns[1]);
    swap_if(flip & 1, columns[2], columns[3]);
}

// A thread's part of the state.
struct Cells {
    float m[8][4];

    __device__ __forceinline__ void load(const float* state, const Place& place) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            float4 four = *(const float4*)(state + place.key(i) * DIM + place.group);
            m[i][0] = four.x, m[i][1] = four.y, m[i][2] = four.z, m[i][3] = four.w;
            reorder(m[i], place.flip);
        }
    }

    __device__ __forceinline__ void store(float* state, const Place& place) const {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            float four[4] = {m[i][0], m[i][1], m[i][2], m[i][3]};
            reorder(four, place.flip);
            *(float4*)(state + place.key(i) * DIM + place.group) = make_float4(four[0], four[1], four[2], four[3]);
        }
    }
};

// A thread's eight values of a staged vector.
DEVICE void read_keys(float (&out)[8], const float* vector, u32 key_lane) {
    float4 low = *(const float4*)(vector + key_lane * 4);
    float4 high = *(const float4*)(vector + key_lane * 4 + 64);
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

// Σ over a thread's keys for each of its columns.
DEVICE void partial_dots(float (&sums)[4], const Cells& cells, const float* vector, u32 key_lane) {
    float factors[8];
    read_keys(factors, vector, key_lane);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) sums[j] = __fmul_rn(factors[0], cells.m[0][j]);
#pragma unroll
    for (u32 i = 1; i < 8; ++i)
#pragma unroll
        for (u32 j = 0; j < 4; ++j) sums[j] = __fmaf_rn(factors[i], cells.m[i][j], sums[j]);
}

// One token through a thread's cells; a thread that `answers` writes its column to `out`.
template <int COLUMNS>
DEVICE void step(Cells& cells, const Stage<COLUMNS>& stage, u32 slot, const Place& place, float* out, bool answers) {
    float mine[4], other[4];
    // Role 0 ends with r of column `flip`, role 1 with the same column of (q a)ᵀ M.
    partial_dots(mine, cells, stage.vectors[slot][place.role], place.key_lane);
    partial_dots(other, cells, stage.vectors[slot][place.role ^ 1], place.key_lane);
#pragma unroll
    for (u32 j = 0; j < 2; ++j) {
        mine[j] = __fadd_rn(mine[j], __shfl_xor_sync(ALL_LANES, mine[j + 2], 1));
        other[j] = __fadd_rn(other[j], __shfl_xor_sync(ALL_LANES, other[j + 2], 1));
    }
    mine[0] = __fadd_rn(mine[0], __shfl_xor_sync(ALL_LANES, mine[1], 2));
    other[0] = __fadd_rn(other[0], __shfl_xor_sync(ALL_LANES, other[1], 2));
    float sum = __fadd_rn(mine[0], __shfl_xor_sync(ALL_LANES, other[0], 4));
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 8));

    float2 scalars = stage.scalars[slot];
    float change = __fmul_rn(scalars.x, __fadd_rn(stage.values[slot][place.group + place.flip], -sum));
    float changes[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) changes[j] = __shfl_sync(ALL_LANES, change, place.source(j));
    float k[8], decay[8];
    read_keys(k, stage.vectors[slot][2], place.key_lane);
    read_keys(decay, stage.vectors[slot][3], place.key_lane);
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
#pragma unroll
        for (u32 j = 0; j < 4; ++j) cells.m[i][j] = __fmaf_rn(k[i], changes[j], __fmul_rn(decay[i], cells.m[i][j]));
    if (answers) *out = __fmaf_rn(scalars.y, changes[0], sum);
}
