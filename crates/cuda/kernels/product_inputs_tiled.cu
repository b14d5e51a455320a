// Rounds the inputs of a product of many rows for `product/warpgroup.cuh`: units of 64 inputs, a member's rows beside each other.
#include "common/bf16.cuh"
#include "product/groups.cuh"

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

// Where a row's inputs come from, and their place among the virtual rows: each member's begin at a multiple of eight, as
// `find_group` has them.
struct Source {
    const float *from;
    u64 to;
};

DEVICE Source source_of(const Groups &g, const float *x, u32 row)
{
    if (g.manner == SORTED) {
        u32 pair = g.order[row], member = slot_of_pair(g.picks, g.slots, g.experts, g.members, pair), start = g.starts[member];
        return {x + (g.paired ? pair : pair / g.picks_per_row) * g.x_stride, (start & ~7u) + 8u * member + row - start};
    }
    u32 member = row / g.rows, inside = row % g.rows;
    return {x + inside * g.x_stride + (u64)member * g.inputs, member * (u64)((g.rows + 7u) & ~7u) + inside};
}

// A warp takes eight rows (of sorted pairs, or of each member) and a run of units. Grid: eight rows × runs of units.
extern "C" __global__ void __launch_bounds__(256)
    product_inputs_tiled(const float *__restrict__ x, u32 inputs, u8 *__restrict__ rounded, u32 virtual_rows,
                         u32 units_a_warp, GROUP_PARAMETERS)
{
    Groups groups = GROUPS_OF_PARAMETERS;
    u32 all = manner == SORTED ? rows * picks_per_row : rows * members;
    u32 lane = lane_index(), t = lane & 3u, units = ceil_div(inputs, 64u), row = blockIdx.x * 8u + (lane >> 2);
    Source source = source_of(groups, x, min(row, all - 1u));
    u32 first = (blockIdx.y * (blockDim.x / 32u) + warp_index()) * units_a_warp;
#pragma unroll 2
    for (u32 unit = first; unit < min(first + units_a_warp, units); unit++) {
        uint4 eight[2];
#pragma unroll
        for (u32 half = 0; half < 2u; half++)
            eight[half] = round_eight(source.from, unit * 64u + half * 32u + t * 8u, inputs);
#pragma unroll
        for (u32 half = 0; half < 2u; half++) {
            // Pieces of a row as the tensor cores' swizzle wants them.
            u32 piece = half * 4u + t ^ (u32)source.to & 7u;
            uint4 four = transpose_four(eight[half]);
            if (row < all)
                *(uint4 *)(rounded + (unit * (u64)virtual_rows + source.to) * 128u + piece * 16u) = four;
        }
    }
}
