// The members of a pool, and its key.
#pragma once
#include "common/base.cuh"
#include "common/maths.cuh"

// The indexer's inputs of a part. A thread has a channel to itself.
struct Members {
    const float* keys;
    const float* gates;
    u64 key_stride, gate_stride;
    const float* ring;
    u32 ring_rows, width, position;

    // k of a position, from the batch or from the ring; γ stands `gate` further.
    __device__ __forceinline__ float key(u32 at, u32 channel) const {
        if (at >= position) return keys[(at - position) * key_stride + channel];
        return ring[(u64)(at % ring_rows) * 2 * width + channel];
    }

    __device__ __forceinline__ float gate(u32 at, u32 channel) const {
        if (at >= position) return gates[(at - position) * gate_stride + channel];
        return ring[(u64)(at % ring_rows) * 2 * width + width + channel];
    }
};

// One channel of a pool's key: Σ_j softmax_j(γ_j + ape_j) · k_j, j ascending.
DEVICE float pool_key(const Members& members, const float* ape, u32 first, u32 kpool, u32 channel) {
    float highest = -infinity();
    for (u32 j = 0; j < kpool; ++j) {
        float gate = __fadd_rn(members.gate(first + j, channel), ape[j * members.width + channel]);
        highest = gate > highest ? gate : highest;
    }
    float total = 0.0f, sum = 0.0f;
    for (u32 j = 0; j < kpool; ++j) {
        float gate = __fadd_rn(members.gate(first + j, channel), ape[j * members.width + channel]);
        total = __fadd_rn(total, exponential(__fadd_rn(gate, -highest)));
    }
    for (u32 j = 0; j < kpool; ++j) {
        float gate = __fadd_rn(members.gate(first + j, channel), ape[j * members.width + channel]);
        float share = __fdiv_rn(exponential(__fadd_rn(gate, -highest)), total);
        sum = __fmaf_rn(share, members.key(first + j, channel), sum);
    }
    return sum;
}
