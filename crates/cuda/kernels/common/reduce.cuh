// Sums with one tree: butterflies over a warp, then the warps' sums in order. The tree hangs on the number of threads, which
// the host takes from an operation's widths alone.
#pragma once
#include "common/base.cuh"

// The greatest of the warp, in every lane.
DEVICE u64 warp_greatest(u64 value) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        u64 other = __shfl_xor_sync(0xFFFFFFFFu, value, step);
        value = other > value ? other : value;
    }
    return value;
}

// Σ over the block, in every thread. `room` holds a value for each warp (16 at most); it may be used again after the next barrier.
DEVICE float block_sum(float value, float* room) {
    value = warp_sum(value);
    if (blockDim.x <= 32) return value;
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
    __syncthreads();
    // Read at once, added in order.
    float sums[16], total = room[0];
#pragma unroll
    for (u32 warp = 1; warp < 16; ++warp) sums[warp] = warp < blockDim.x / 32 ? room[warp] : 0.0f;
#pragma unroll
    for (u32 warp = 1; warp < 16; ++warp)
        if (warp < blockDim.x / 32) total = __fadd_rn(total, sums[warp]);
    return total;
}
