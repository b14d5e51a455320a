// The best logits of a row in a total order: NaN, then value descending, id ascending. Pieces of a row have blocks of their
// own; another launch merges what they found.
#include "common/base.cuh"
#include "common/maths.cuh"
#include "common/reduce.cuh"

#define THREADS 256
#define KEYS 2048

// Sorts as the operation orders. 0 is no logit.
DEVICE u64 logit_rank(float logit, u32 id) { return rank_of(logit == logit ? logit : __uint_as_float(0x7FC00000u), id); }

// Sorts KEYS keys descending: a bitonic network.
DEVICE void sort_keys(u64* keys) {
    for (u32 size = 2; size <= KEYS; size <<= 1) {
        for (u32 step = size / 2; step > 0; step >>= 1) {
            __syncthreads();
            for (u32 pair = threadIdx.x; pair < KEYS / 2; pair += THREADS) {
                u32 at = pair / step * step * 2 + pair % step;
                u64 first = keys[at], second = keys[at + step];
                bool descends = (at & size) == 0;
                if (descends == (first < second)) {
                    keys[at] = second;
                    keys[at + step] = first;
                }
            }
        }
    }
    __syncthreads();
}

// The best `most` of `count` keys that `key_of` gives, at the front of `keys`, descending.
template <typename KeyOf> DEVICE void best_of(u64* keys, u32 most, u32 count, KeyOf key_of) {
    u32 fresh = KEYS - most;
    for (u32 i = threadIdx.x; i < most; i += THREADS) keys[i] = 0;
    for (u32 first = 0; first < count; first += fresh) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < fresh; i += THREADS) keys[most + i] = first + i < count ? key_of(first + i) : 0;
        sort_keys(keys);
    }
}

// The best of `count` keys alone, at the front of `keys`: no order is needed.
template <typename KeyOf> DEVICE void best_alone(u64* keys, u32 count, KeyOf key_of) {
    __shared__ u64 room[THREADS / WARP];
    u64 best = 0;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        u64 key = key_of(i);
        best = key > best ? key : best;
    }
    best = warp_greatest(best);
    if (lane_index() == 0) room[warp_index()] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (u32 warp = 1; warp < THREADS / WARP; ++warp) best = room[warp] > best ? room[warp] : best;
    keys[0] = best;
}

// The best of a piece of a row. Grid: pieces × rows.
KERNEL top_pieces(u64* found, const float* logits, u32 logits_stride, u32 vocabulary, u32 piece, u32 most) {
    __shared__ u64 keys[KEYS];
    grid_release();
    grid_wait();
    const float* row = logits + (u64)blockIdx.y * logits_stride;
    u32 first = blockIdx.x * piece, count = min(piece, vocabulary - first);
    auto key_of = [&](u32 i) { return logit_rank(row[first + i], first + i); };
    if (most == 1) best_alone(keys, count, key_of);
    else best_of(keys, most, count, key_of);
    found += ((u64)blockIdx.y * gridDim.x + blockIdx.x) * most;
    for (u32 i = threadIdx.x; i < most; i += THREADS) found[i] = keys[i];
}

// The best of what a row's pieces found. Grid: rows.
KERNEL top_merge(u32* ids, float* values, u32 values_stride, const float* logits, u32 logits_stride, const u64* found,
                 u32 count, u32 most) {
    __shared__ u64 keys[KEYS];
    grid_release();
    grid_wait();
    u64 row = blockIdx.x;
    found += row * count;
    auto key_of = [&](u32 i) { return found[i]; };
    if (most == 1) best_alone(keys, count, key_of);
    else best_of(keys, most, count, key_of);
    for (u32 i = threadIdx.x; i < most; i += THREADS) {
        u32 id = ranked_index(keys[i]);
        ids[row * most + i] = id;
        values[row * values_stride + i] = logits[row * logits_stride + id];
    }
}
