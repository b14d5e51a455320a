// Affine codes: a lane's 32 codes of a unit lie in BITS words; they become 16 pairs of bf16, exactly.
//
// A unit is 16 outputs by 64 inputs. Pair p = 8 h + 4 j + r of lane (g, t) is the operand register r of the product j of
// half h: output g + 8 (r & 1), inputs 32 h + 8 t + 4 j + 2 (r >> 1) and the next. Its first code has bits in the words'
// lower halves, its second at the same places of the upper halves. Where they lie: `product/arrange.rs` and `place_of`.
#pragma once
#include "common/tensor.cuh"

// 128.0, twice: a code in the low bits of its seven mantissa bits makes 128 + code.
#define BF16_128 0x43004300u

DEVICE constexpr u32 both(u32 half)
{
    return half | half << 16;
}

// 128 + code · 2^AT to code.
template <int AT> DEVICE u32 unbias(u32 biased)
{
    return fma_pair(biased, both((127u - AT) << 7), both(0x8000u | (134u - AT) << 7));
}

// Code number INDEX of both halves of a word of BITS-bit fields; neighbours share a shift where the mantissa holds them.
template <int BITS, int INDEX> DEVICE u32 field(u32 word)
{
    constexpr int WINDOW = 7 / BITS;
    constexpr int SHIFT = INDEX / WINDOW * WINDOW * BITS;
    constexpr int AT = INDEX * BITS - SHIFT;
    return unbias<AT>(and_or(word >> SHIFT, both(((1u << BITS) - 1) << AT), BF16_128));
}

template <int BITS> struct Affine;

template <> struct Affine<2> {
    static constexpr int WORDS = 2;
    DEVICE void decode(const u32 (&w)[2], u32 (&pairs)[16])
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 *to = pairs + 8 * i;
            to[0] = field<2, 0>(w[i]), to[1] = field<2, 1>(w[i]), to[2] = field<2, 2>(w[i]), to[3] = field<2, 3>(w[i]);
            to[4] = field<2, 4>(w[i]), to[5] = field<2, 5>(w[i]), to[6] = field<2, 6>(w[i]), to[7] = field<2, 7>(w[i]);
        }
    }
};

template <> struct Affine<3> {
    static constexpr int WORDS = 3;
    DEVICE void decode(const u32 (&w)[3], u32 (&pairs)[16])
    {
        u32 rest = BF16_128;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            u32 *to = pairs + 5 * i;
            to[0] = field<3, 0>(w[i]), to[1] = field<3, 1>(w[i]), to[2] = field<3, 2>(w[i]), to[3] = field<3, 3>(w[i]);
            to[4] = field<3, 4>(w[i]);
            rest = and_or(w[i] >> (15 - i), both(1u << i), rest);
        }
        pairs[15] = unbias<0>(rest);
    }
};

template <> struct Affine<4> {
    static constexpr int WORDS = 4;
    DEVICE void decode(const u32 (&w)[4], u32 (&pairs)[16])
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 *to = pairs + 4 * i;
            to[0] = field<4, 0>(w[i]), to[1] = field<4, 1>(w[i]), to[2] = field<4, 2>(w[i]), to[3] = field<4, 3>(w[i]);
        }
    }
};

template <> struct Affine<5> {
    static constexpr int WORDS = 5;
    DEVICE void decode(const u32 (&w)[5], u32 (&pairs)[16])
    {
        u32 rest = BF16_128;
#pragma unroll
        for (int i = 0; i < 5; i++) {
            u32 *to = pairs + 3 * i;
            to[0] = field<5, 0>(w[i]), to[1] = field<5, 1>(w[i]), to[2] = field<5, 2>(w[i]);
            rest = and_or(w[i] >> (15 - i), both(1u << i), rest);
        }
        pairs[15] = unbias<0>(rest);
    }
};

template <> struct Affine<6> {
    static constexpr int WORDS = 6;
    DEVICE void decode(const u32 (&w)[6], u32 (&pairs)[16])
    {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            u32 *to = pairs + 8 * q;
            const u32 *from = w + 3 * q;
#pragma unroll
            for (int i = 0; i < 3; i++)
                to[2 * i] = field<6, 0>(from[i]), to[2 * i + 1] = field<6, 1>(from[i]);
            to[6] = unbias<0>(and_or(from[0] >> 12, both(0x0f), and_or(from[2] >> 8, both(0x30), BF16_128)));
            to[7] = unbias<0>(and_or(from[1] >> 12, both(0x0f), and_or(from[2] >> 10, both(0x30), BF16_128)));
        }
    }
};

template <> struct Affine<8> {
    static constexpr int WORDS = 8;
    // The low seven bits make 128 + low; the high bit makes 128 or 256, less 256 what is missing.
    DEVICE u32 byte(u32 word)
    {
        u32 low = and_or(word, both(0x7f), BF16_128);
        u32 high = fma_pair(and_or(word, both(0x80), BF16_128), both(0x3f80), both(0xc380));
        return fma_pair(low, both(0x3f80), high);
    }
    DEVICE void decode(const u32 (&w)[8], u32 (&pairs)[16])
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
            pairs[2 * i] = byte(w[i]), pairs[2 * i + 1] = byte(w[i] >> 8);
    }
};
