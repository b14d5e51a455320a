// Encodings of weights as the tensor cores take them: scaled and rounded, or with a fold of a group's sum into an output's.
//
// A unit is 16 outputs by 64 inputs: WORDS words a lane, first those that come four at a time, then two, then one, lane
// beside lane. An entry holds the scales of 16 outputs for the inputs that share them, lane g's beside lane g + 1's:
// scale of output g, of g + 8, then their biases.
#pragma once
#include "common/bf16.cuh"
#include "common/tensor.cuh"
#include "decode/affine.cuh"
#include "decode/fp8.cuh"
#include "decode/plain.cuh"

// A run of outputs of one encoding; the same at `product/table.rs`.
struct Part {
    const u8 *codes;
    const u8 *scales;
    // Bytes from one member of a stack to the next.
    u64 code_stride;
    u64 scale_stride;
    u32 encoding;
    u32 outputs;
    // The matrix's output that is the part's first.
    u32 first_output;
    // Runs of 16 outputs.
    u32 tiles;
    // Entries of a tile.
    u32 entries;
    // Half units that share an entry, as a shift: groups of 32 have none to share.
    u32 share;
};

// How scales are stored.
enum Scales { NONE, PAIRS_BF16, PAIRS_F32, FACTORS_F32 };

template <class Codes, u32 GROUPS, Scales SCALES> struct Encoding {
    typedef Codes Decoder;
    static constexpr u32 WORDS = Codes::WORDS;
    static constexpr u32 UNIT = WORDS * 128u;
    // Whether scale and bias go into the weights, rounded once to bf16.
    static constexpr bool WEIGHED = SCALES == PAIRS_BF16;
    // Groups of a unit whose sums start at zero and are folded; 0 when the products of a slice form one chain.
    static constexpr u32 FOLDS = GROUPS;
    static constexpr Scales KIND = SCALES;
    static constexpr u32 ENTRY = SCALES == NONE ? 0u : SCALES == PAIRS_F32 ? 128u : 64u;
    // Entries of a unit at most.
    static constexpr u32 ENTRIES = SCALES == NONE ? 0u : WEIGHED || FOLDS == 2u ? 2u : 1u;
    // Whether sums need those of the inputs.
    static constexpr bool BIASED = SCALES == PAIRS_F32;
};

typedef Encoding<PlainBf16, 0, NONE> Bf16Encoding;
typedef Encoding<Fp8, 1, FACTORS_F32> Fp8Encoding;
template <int BITS> using AffineEncoding = Encoding<Affine<BITS>, 0, PAIRS_BF16>;
template <int BITS, u32 GROUPS> using WideEncoding = Encoding<Affine<BITS>, GROUPS, PAIRS_F32>;

// Scales of a lane's two outputs for one group.
struct Fold {
    float scale[2], bias[2];
};

template <class E> DEVICE Fold read_fold(const u8 *entry, u32 g)
{
    Fold fold = {};
    if (E::KIND == PAIRS_F32) {
        float4 four = *(const float4 *)(entry + g * 16u);
        fold.scale[0] = four.x, fold.scale[1] = four.y;
        fold.bias[0] = four.z, fold.bias[1] = four.w;
    } else if (E::KIND == FACTORS_F32) {
        float2 two = *(const float2 *)(entry + g * 8u);
        fold.scale[0] = two.x, fold.scale[1] = two.y;
    }
    return fold;
}

// acc += scale · partial, then += bias · sums of the inputs of two columns.
template <class E> DEVICE void fold_into(float (&acc)[4], const float (&partial)[4], const Fold &fold, float2 sums)
{
    acc[0] = __fmaf_rn(fold.scale[0], partial[0], acc[0]);
    acc[1] = __fmaf_rn(fold.scale[0], partial[1], acc[1]);
    acc[2] = __fmaf_rn(fold.scale[1], partial[2], acc[2]);
    acc[3] = __fmaf_rn(fold.scale[1], partial[3], acc[3]);
    if (E::BIASED) {
        acc[0] = __fmaf_rn(fold.bias[0], sums.x, acc[0]);
        acc[1] = __fmaf_rn(fold.bias[0], sums.y, acc[1]);
        acc[2] = __fmaf_rn(fold.bias[1], sums.x, acc[2]);
        acc[3] = __fmaf_rn(fold.bias[1], sums.y, acc[3]);
    }
}

// Codes of a half unit to its weights: scale · code + bias, rounded once. `entry` is the half's.
DEVICE void weigh_half(u32 *pairs, const u8 *entry, u32 g)
{
    uint2 four = *(const uint2 *)(entry + g * 8u);
    u32 scale[2] = {both_low(four.x), both_high(four.x)}, bias[2] = {both_low(four.y), both_high(four.y)};
#pragma unroll
    for (u32 i = 0; i < 8u; i++)
        pairs[i] = fma_pair(pairs[i], scale[i & 1u], bias[i & 1u]);
}

// The same for a whole unit, from its halves' entries; nothing where sums are folded.
template <class E> DEVICE void weigh_unit(u32 (&pairs)[16], const u8 *first, const u8 *second)
{
    if constexpr (E::WEIGHED) {
        weigh_half(pairs, first, lane_index() >> 2);
        weigh_half(pairs + 8, second, lane_index() >> 2);
    }
}

// A lane's words of a unit.
template <u32 WORDS> DEVICE void read_words(const u8 *unit, u32 lane, u32 (&words)[WORDS])
{
#pragma unroll
    for (int i = 0; i < (int)WORDS / 4; i++) {
        uint4 four = *(const uint4 *)(unit + i * 512 + lane * 16u);
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
    if (WORDS & 2u) {
        uint2 two = *(const uint2 *)(unit + WORDS / 4u * 512u + lane * 8u);
        words[WORDS / 4u * 4u] = two.x, words[WORDS / 4u * 4u + 1u] = two.y;
    }
    if (WORDS & 1u)
        words[WORDS - 1u] = *(const u32 *)(unit + (WORDS - 1u) * 128u + lane * 4u);
}

// The products of a half unit (32 inputs) from its eight operand registers and a column's inputs.
DEVICE void multiply_half(float (&sums)[4], const u32 *pairs, uint4 x)
{
    mma_bf16(sums, pairs[0], pairs[1], pairs[2], pairs[3], x.x, x.y);
    mma_bf16(sums, pairs[4], pairs[5], pairs[6], pairs[7], x.z, x.w);
}

// The same, from zeros.
DEVICE void start_half(float (&sums)[4], const u32 *pairs, uint4 x)
{
    mma_bf16_start(sums, pairs[0], pairs[1], pairs[2], pairs[3], x.x, x.y);
    mma_bf16(sums, pairs[4], pairs[5], pairs[6], pairs[7], x.z, x.w);
}

// The sums of a group's inputs by the same instruction: ones for weights.
DEVICE void sum_half(float (&sums)[4], uint4 x)
{
    mma_bf16(sums, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u, x.x, x.y);
    mma_bf16(sums, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u, x.z, x.w);
}
