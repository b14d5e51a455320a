// Pairs of (row, pick) sorted by the slot of their expert; the order inside a slot is that of the pairs.
#include "product/groups.cuh"

#define MOST_MEMBERS 2048u

// A block for each slot: counts all slots, then finds its own pairs. 1024 threads.
KERNEL sort_pairs(const u32 *picks, const u32 *__restrict__ slots, u32 experts, u32 members, u32 pairs,
                  u32 columns, u32 *order, u32 *starts, u32 *group_starts)
{
    __shared__ u32 counts[MOST_MEMBERS];
    __shared__ u32 warp_counts[32];
    grid_release();
    grid_wait();
    u32 slot = blockIdx.x, lane = lane_index(), warp = warp_index();
    for (u32 i = threadIdx.x; i < members; i += blockDim.x)
        counts[i] = 0u;
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < pairs; pair += blockDim.x)
        atomicAdd(&counts[slot_of_pair(picks, slots, experts, members, pair)], 1u);
    __syncthreads();
    // Every warp adds for itself what lies before its slot.
    u32 before = 0, groups = 0;
    for (u32 i = lane; i < slot; i += 32u)
        before += counts[i], groups += ceil_div(counts[i], columns);
#pragma unroll
    for (u32 offset = 16u; offset > 0u; offset >>= 1) {
        before += __shfl_xor_sync(ALL_LANES, before, offset);
        groups += __shfl_xor_sync(ALL_LANES, groups, offset);
    }
    if (threadIdx.x == 0u) {
        starts[slot] = before, group_starts[slot] = groups;
        if (slot == members - 1u)
            starts[members] = pairs, group_starts[members] = groups + ceil_div(counts[slot], columns);
    }
    if (counts[slot] == 0u)
        return;
    for (u32 first = 0; first < pairs; first += blockDim.x) {
        u32 pair = first + threadIdx.x;
        bool mine = pair < pairs && slot_of_pair(picks, slots, experts, members, pair) == slot;
        u32 votes = __ballot_sync(ALL_LANES, mine);
        if (lane == 0u)
            warp_counts[warp] = (u32)__popc(votes);
        __syncthreads();
        u32 earlier = lane < warp ? warp_counts[lane] : 0u, all = warp_counts[lane];
#pragma unroll
        for (u32 offset = 16u; offset > 0u; offset >>= 1) {
            earlier += __shfl_xor_sync(ALL_LANES, earlier, offset);
            all += __shfl_xor_sync(ALL_LANES, all, offset);
        }
        if (mine)
            order[before + earlier + (u32)__popc(votes & ((1u << lane) - 1u))] = pair;
        before += all;
        __syncthreads();
    }
}
