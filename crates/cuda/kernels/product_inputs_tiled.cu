// Rounds the inputs of a product of many rows for `product/warpgroup.cuh`: units of 64 inputs, a member's rows beside each
// other.
#include "common/bf16.cuh"
#include "product/tile_rows.cuh"

// Word i of lane t of four neighbours becomes word t of lane i.
DEVICE uint4 transpose_four(uint4 mine)
{
    u32 t = lane_index() & 3u, words[4] = {mine.x, mine.y, mine.z, mine.w}, out[4];
#pragma unroll
    for (u32 step = 0; step < 4u; step++) {
        u32 to = t ^ step;
        u32 word = to & 2u ? (to & 1u ? words[3] : words[2]) : (to & 1u ? words[1] : words[0]);
        word = __shfl_xor_sync(ALL_LANES, word, step);
#pragma unroll
        for (u32 i = 0; i < 4u; i++)
            out[i] = i == to ? word : out[i];
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

// Eight inputs of a row, rounded; zeros behind its end.
DEVICE uint4 round_eight(const float *row, u32 input, u32 inputs)
{
    const float *from = row + input;
    float v[8];
    if (input + 8u <= inputs && ((u64)from & 15u) == 0u) {
        float4 low = *(const float4 *)from, high = *(const float4 *)(from + 4);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
        for (u32 k = 0; k < 8u; k++)
            v[k] = input + k < inputs ? from[k] : 0.0f;
    }
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

// A warp takes eight rows of a tile and a run of units. Grid: eight rows of a tile × runs of units × tiles.
extern "C" __global__ void __launch_bounds__(256)
    product_inputs_tiled(const float *__restrict__ x, u32 inputs, u8 *__restrict__ rounded, u32 virtual_rows,
                         u32 units_a_warp, GROUP_PARAMETERS)
{
    Groups groups = GROUPS_OF_PARAMETERS;
    TileGroup tile;
    if (!find_group(groups, blockIdx.z, tile) || blockIdx.x * 8u >= tile.count)
        return;
    u32 lane = lane_index(), g = lane >> 2, t = lane & 3u, units = ceil_div(inputs, 64u);
    u32 place = blockIdx.x * 8u + g, row = tile.first + min(place, tile.count - 1u);
    if (manner == SORTED)
        row = paired ? order[row] : order[row] / picks_per_row;
    const float *from = x + row * x_stride + (manner == PART_A_MEMBER ? (u64)tile.member * inputs : 0u);
    u64 to = tile.virtual_row + place;
    u32 first = (blockIdx.y * (blockDim.x / 32u) + warp_index()) * units_a_warp;
    for (u32 unit = first; unit < min(first + units_a_warp, units); unit++) {
        uint4 eight[2];
#pragma unroll
        for (u32 half = 0; half < 2u; half++)
            eight[half] = round_eight(from, unit * 64u + half * 32u + t * 8u, inputs);
#pragma unroll
        for (u32 half = 0; half < 2u; half++) {
            // Pieces of a row as the tensor cores' swizzle wants them; a tile's first row is a multiple of eight.
            u32 piece = half * 4u + t ^ g;
            *(uint4 *)(rounded + (unit * (u64)virtual_rows + to) * 128u + piece * 16u) = transpose_four(eight[half]);
        }
    }
}
