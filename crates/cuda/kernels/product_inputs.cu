// Rounds the inputs of a product of many rows once: half units of 32, row beside row, and the sums of each group.
#include "product/encoding.cuh"

// A warp takes eight rows and a run of units. Virtual row `part * rows + r` is part `part` of row r.
extern "C" __global__ void __launch_bounds__(256)
    product_inputs(const float *__restrict__ x, u64 x_stride, u32 rows, u32 parts, u32 inputs, u8 *__restrict__ rounded,
                   float *__restrict__ sums_64, float *__restrict__ sums_32, u32 units_a_warp)
{
    u32 lane = lane_index(), g = lane >> 2, t = lane & 3u, all = rows * parts, units = ceil_div(inputs, 64u);
    u32 row = blockIdx.x * 8u + g;
    u32 first = (blockIdx.y * (blockDim.x / 32u) + warp_index()) * units_a_warp;
    // Lanes beyond the last row still take part in the products.
    u32 source = min(row, all - 1u);
    const float *from = x + (source % rows) * x_stride + (u64)(source / rows) * inputs;
    for (u32 unit = first; unit < min(first + units_a_warp, units); unit++) {
        uint4 eight[2];
#pragma unroll
        for (u32 half = 0; half < 2u; half++) {
            u32 input = unit * 64u + half * 32u + t * 8u;
            float v[8];
            if (input + 8u <= inputs && ((u64)(from + input) & 15u) == 0u) {
                float4 low = *(const float4 *)(from + input), high = *(const float4 *)(from + input + 4);
                v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
                v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
            } else {
#pragma unroll
                for (u32 k = 0; k < 8u; k++)
                    v[k] = input + k < inputs ? from[input + k] : 0.0f;
            }
            eight[half].x = pack_bf16(v[0], v[1]), eight[half].y = pack_bf16(v[2], v[3]);
            eight[half].z = pack_bf16(v[4], v[5]), eight[half].w = pack_bf16(v[6], v[7]);
            if (row < all)
                *(uint4 *)(rounded + ((u64)(2u * unit + half) * all + row) * 64u + t * 16u) = eight[half];
        }
        float whole[4] = {0.0f, 0.0f, 0.0f, 0.0f}, second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        sum_half(whole, eight[0]);
        float2 first_sums = make_float2(whole[0], whole[1]);
        sum_half(whole, eight[1]);
        sum_half(second, eight[1]);
        u32 column = blockIdx.x * 8u + 2u * t;
        if (g != 0u)
            continue;
#pragma unroll
        for (u32 i = 0; i < 2u; i++) {
            if (column + i >= all)
                break;
            if (sums_64)
                sums_64[(u64)unit * all + column + i] = whole[i];
            if (sums_32) {
                sums_32[(u64)(2u * unit) * all + column + i] = i ? first_sums.y : first_sums.x;
                sums_32[(u64)(2u * unit + 1u) * all + column + i] = second[i];
            }
        }
    }
}
