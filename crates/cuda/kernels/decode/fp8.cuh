// E4M3 codes: four codes a word, as the 8-bit affine ones lie. Every value is exact in bf16.
#pragma once
#include "common/tensor.cuh"

struct Fp8 {
    static constexpr int WORDS = 8;
    // Exponent and mantissa of a code, four places up, are those of a bf16 that is 2^120 too small; subnormals too.
    DEVICE u32 scaled(u32 magnitude, u32 sign)
    {
        return fma_pair(and_or(sign, 0x80008000u, magnitude & 0x07f007f0u), 0x7b807b80u, 0x80008000u);
    }
    DEVICE void decode(const u32 (&w)[8], u32 (&pairs)[16])
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
            pairs[2 * i] = scaled(w[i] << 4, w[i] << 8), pairs[2 * i + 1] = scaled(w[i] >> 4, w[i]);
    }
};
