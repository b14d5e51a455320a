// The router's choice: a total order (score descending, expert ascending), whatever the scores are. A warp for each row.
#include "common/base.cuh"
#include "common/maths.cuh"
#include "common/reduce.cuh"
#include "route/flat.cuh"

// The sum of a group's two best scores (of the only one), the best first.
DEVICE float two_best(const u64* ranks, const float* scores, const float* bias, u32 first, u32 size) {
    u64 best = 0, second = 0;
    for (u32 i = first; i < first + size; ++i) {
        u64 rank = ranks[i];
        if (rank > best) {
            second = best;
            best = rank;
        } else if (rank > second) {
            second = rank;
        }
    }
    u32 expert = ranked_index(best);
    float sum = __fadd_rn(scores[expert], bias[expert]);
    if (second == 0) return sum;
    expert = ranked_index(second);
    return __fadd_rn(sum, __fadd_rn(scores[expert], bias[expert]));
}

// The greatest of `count` ranks, in every lane; it is 0 from now on.
DEVICE u64 take_greatest(u64* ranks, u32 count) {
    u64 best = 0;
    for (u32 i = threadIdx.x; i < count; i += 32) best = ranks[i] > best ? ranks[i] : best;
    best = warp_greatest(best);
    u32 index = ranked_index(best);
    if (index % 32 == threadIdx.x) ranks[index] = 0;
    __syncwarp();
    return best;
}

// Leaves only the experts of the best groups.
DEVICE void keep_groups(u64* ranks, u64* group_ranks, const float* scores, const float* bias, u32 experts,
                                            u32 groups, u32 kept) {
    u32 size = experts / groups;
    for (u32 group = threadIdx.x; group < groups; group += 32) {
        group_ranks[group] = rank_of(two_best(ranks, scores, bias, group * size, size), group);
    }
    __syncwarp();
    for (u32 i = 0; i < kept; ++i) take_greatest(group_ranks, groups);
    // A group that was taken has rank 0.
    for (u32 expert = threadIdx.x; expert < experts; expert += 32) {
        if (group_ranks[expert / size] != 0) ranks[expert] = 0;
    }
    __syncwarp();
}

// The same choice without groups, for up to 32 · HELD experts. Grid: a block of one warp for each row. Dynamic shared memory:
// the picks' scores.
KERNEL route_flat(u32* picks, float* weights, u32 weights_stride, const float* logits, u32 logits_stride, const float* bias,
                  u32 experts, u32 picked, u32 normalise, float scaling) {
    extern __shared__ float chosen_scores[];
    grid_release();
    u64 row = blockIdx.x;
    Held biases = hold(bias, experts);
    grid_wait();
    Held held = hold(logits + row * logits_stride, experts);
    choose_flat(picks + row * picked, weights + row * weights_stride, chosen_scores, held, biases, experts, picked, normalise != 0,
                scaling);
}

// Grid: a block of one warp for each row. Dynamic shared memory: ranks of experts, then of groups, then scores, then picks.
KERNEL route(u32* picks, float* weights, u32 weights_stride, const float* logits, u32 logits_stride,
                                 const float* bias, u32 experts, u32 picked, u32 groups, u32 kept, u32 normalise,
                                 float scaling) {
    extern __shared__ u64 route_room[];
    grid_release();
    grid_wait();
    u64* ranks = route_room;
    u64* group_ranks = ranks + experts;
    float* scores = (float*)(group_ranks + groups);
    u32* chosen = (u32*)(scores + experts);
    u64 row = blockIdx.x;
    for (u32 expert = threadIdx.x; expert < experts; expert += 32) {
        float score = sigmoid(logits[row * logits_stride + expert]);
        scores[expert] = score;
        ranks[expert] = rank_of(__fadd_rn(score, bias[expert]), expert);
    }
    __syncwarp();
    if (groups > 1) keep_groups(ranks, group_ranks, scores, bias, experts, groups, kept);
    for (u32 j = 0; j < picked; ++j) {
        u64 best = take_greatest(ranks, experts);
        if (threadIdx.x == 0) chosen[j] = ranked_index(best);
    }
    __syncwarp();
    if (threadIdx.x != 0) return;
    // Ascending: the sum and later ones have one order.
    for (u32 j = 1; j < picked; ++j) {
        u32 expert = chosen[j], place = j;
        for (; place > 0 && chosen[place - 1] > expert; --place) chosen[place] = chosen[place - 1];
        chosen[place] = expert;
    }
    float total = 0.0f;
    for (u32 j = 0; j < picked; ++j) total = __fadd_rn(total, scores[chosen[j]]);
    float divisor = normalise ? __fadd_rn(total, 1e-20f) : 1.0f;
    for (u32 j = 0; j < picked; ++j) {
        picks[row * picked + j] = chosen[j];
        weights[row * weights_stride + j] = __fmul_rn(__fdiv_rn(scores[chosen[j]], divisor), scaling);
    }
}
