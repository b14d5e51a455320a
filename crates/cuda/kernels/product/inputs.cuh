// Inputs of a product of few rows, as a block keeps them: rounded to bf16, half units of 32, row beside row.
#pragma once
#include "common/activate.cuh"
#include "common/bf16.cuh"
#include "product/encoding.cuh"

// Octets that a thread asks for together.
#ifndef OCTETS_AT_ONCE
#define OCTETS_AT_ONCE 4u
#endif

// Where rows come from.
struct Inputs {
    const float *x;
    u32 inputs;
    // Whether a row holds gates and, behind them, what they gate: the inputs are the activation of both.
    u32 activated;
    float limit;
};

// Eight numbers from the `octet`th octet on; zeros behind the last of `inputs`.
DEVICE void read_octet(const float *row, u32 inputs, u32 octet, float (&v)[8])
{
    const float *from = row + octet * 8u;
    if (octet * 8u + 8u <= inputs && ((u64)from & 15u) == 0u) {
        float4 low = *(const float4 *)from, high = *(const float4 *)(from + 4);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
        for (u32 k = 0; k < 8u; k++)
            v[k] = octet * 8u + k < inputs ? from[k] : 0.0f;
    }
}

DEVICE void write_octet(u8 *to, const float (&v)[8])
{
    *(uint4 *)to = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
}

// Rounds the rows that start at `starts`; a half unit of COLUMNS rows takes 64 COLUMNS bytes.
template <u32 COLUMNS> DEVICE void round_inputs(const Inputs &from, u32 units, const u64 *starts, u32 count, u8 *to)
{
    u32 octets = units * 8u;
    auto place = [&](u32 row, u32 octet) { return to + ((octet >> 2) * COLUMNS + row) * 64u + (octet & 3u) * 16u; };
    if (from.activated) {
#pragma unroll 1
        for (u32 row = 0; row < count; row++) {
            const float *x = from.x + starts[row];
#pragma unroll 1
            for (u32 octet = threadIdx.x; octet < octets; octet += blockDim.x) {
                float gate[8], up[8];
                read_octet(x, from.inputs, octet, gate);
                read_octet(x + from.inputs, from.inputs, octet, up);
#pragma unroll
                for (u32 k = 0; k < 8u; k++)
                    gate[k] = activate(gate[k], up[k], from.limit);
                write_octet(place(row, octet), gate);
            }
        }
        return;
    }
    constexpr u32 TOGETHER = COLUMNS < OCTETS_AT_ONCE ? COLUMNS : OCTETS_AT_ONCE;
#pragma unroll 1
    for (u32 octet = threadIdx.x; octet < octets; octet += blockDim.x) {
#pragma unroll 1
        for (u32 first = 0; first < count; first += TOGETHER) {
            float v[TOGETHER][8];
#pragma unroll
            for (u32 k = 0; k < TOGETHER; k++)
                if (first + k < count)
                    read_octet(from.x + starts[first + k], from.inputs, octet, v[k]);
#pragma unroll
            for (u32 k = 0; k < TOGETHER; k++)
                if (first + k < count)
                    write_octet(place(first + k, octet), v[k]);
        }
    }
}

// The sums of each group of inputs, for the biases of fp32; `lane_x` as in the products.
DEVICE void sum_inputs(const u8 *lane_x, u32 lane_step, u32 units, float *of_64, float *of_32)
{
    u32 warps = blockDim.x / 32u, lane = lane_index();
    for (u32 unit = warp_index(); unit < units; unit += warps) {
        uint4 x[2] = {*(const uint4 *)(lane_x + 2u * unit * lane_step), *(const uint4 *)(lane_x + (2u * unit + 1u) * lane_step)};
        float first[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        sum_half(first, x[0]);
        if (of_32 != nullptr) {
            float second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            sum_half(second, x[1]);
            if (lane < 4u) {
                *(float2 *)(of_32 + unit * 16u + 2u * lane) = make_float2(first[0], first[1]);
                *(float2 *)(of_32 + unit * 16u + 8u + 2u * lane) = make_float2(second[0], second[1]);
            }
        }
        if (of_64 != nullptr) {
            sum_half(first, x[1]);
            if (lane < 4u)
                *(float2 *)(of_64 + unit * 8u + 2u * lane) = make_float2(first[0], first[1]);
        }
    }
}
