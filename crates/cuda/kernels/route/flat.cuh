// The router's choice without groups, by a warp: a total order (score descending, expert ascending), whatever the scores are.
#pragma once
#include "common/base.cuh"
#include "common/maths.cuh"

// Experts of a lane: scores in registers. Expert `k · 32 + lane` is a lane's k-th, so that ballots over k ascend.
#define HELD 12

// A lane's biases, or logits.
struct Held {
    float of[HELD];
};

// Asks for those of a row, past L1: other blocks may have written them.
DEVICE Held hold(const float* row, u32 experts) {
    Held held;
#pragma unroll
    for (u32 k = 0; k < HELD; ++k) {
        u32 expert = k * WARP + lane_index();
        held.of[k] = expert < experts ? __ldcg(row + expert) : 0.0f;
    }
    return held;
}

// A row's picks, ascending, and their weights. `room` has a float for each pick.
DEVICE void choose_flat(u32* picks, float* weights, float* room, const Held& logits, const Held& bias, u32 experts, u32 picked,
                        bool normalise, float scaling) {
    u32 lane = lane_index(), key[HELD], taken = 0;
    float score[HELD];
    // 0 is no expert: NaN with its sign sorts last, above it.
#pragma unroll
    for (u32 k = 0; k < HELD; ++k) {
        score[k] = 0.0f, key[k] = 0;
        if (k * WARP + lane < experts) {
            score[k] = sigmoid(logits.of[k]);
            key[k] = max(ordered(__fadd_rn(score[k], bias.of[k])), 1u);
        }
    }
    for (u32 j = 0; j < picked; ++j) {
        u32 best = 0;
#pragma unroll
        for (u32 k = 0; k < HELD; ++k)
            if (k * WARP < experts) best = max(best, key[k]);
        best = __reduce_max_sync(ALL_LANES, best);
        // The lowest of those that have it.
        u32 mine = HELD;
#pragma unroll
        for (u32 k = HELD; k-- > 0;)
            if (k * WARP < experts && key[k] == best) mine = k;
        u32 winner = 0xFFFFFFFFu - __reduce_max_sync(ALL_LANES, 0xFFFFFFFFu - (mine * WARP + lane));
        bool own = winner % WARP == lane;
        taken |= own ? 1u << winner / WARP : 0u;
#pragma unroll
        for (u32 k = 0; k < HELD; ++k) key[k] = own && k == winner / WARP ? 0u : key[k];
    }
    // Ascending: the sum and later ones have one order.
    u32 before = 0;
#pragma unroll
    for (u32 k = 0; k < HELD; ++k) {
        u32 lanes = __ballot_sync(ALL_LANES, taken >> k & 1);
        if (taken >> k & 1) {
            u32 place = before + __popc(lanes & ((1u << lane) - 1));
            room[place] = score[k];
            picks[place] = k * WARP + lane;
        }
        before += __popc(lanes);
    }
    __syncwarp();
    float total = 0.0f;
#pragma unroll 8
    for (u32 j = 0; j < picked; ++j) total = __fadd_rn(total, room[j]);
    float divisor = normalise ? __fadd_rn(total, 1e-20f) : 1.0f;
    for (u32 j = lane; j < picked; j += WARP) weights[j] = __fmul_rn(__fdiv_rn(room[j], divisor), scaling);
}
