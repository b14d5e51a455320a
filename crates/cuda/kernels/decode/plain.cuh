// Numbers of bf16: operands as they are.
#pragma once
#include "common/tensor.cuh"

struct PlainBf16 {
    static constexpr int WORDS = 16;
    DEVICE void decode(const u32 (&w)[16], u32 (&pairs)[16])
    {
#pragma unroll
        for (int i = 0; i < 16; i++)
            pairs[i] = w[i];
    }
};
