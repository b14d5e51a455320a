// bf16 and f16 as bits: exact widening, rounding to nearest even.
#pragma once
#include "common/base.cuh"

DEVICE float bf16_to_f32(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Low and high half of a pair.
DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Nearest even; NaN stays NaN, overflow becomes infinity.
DEVICE u16 f32_to_bf16(float x)
{
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Two values rounded into one register, `low` in the lower half.
DEVICE u32 pack_bf16(float low, float high)
{
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE float f16_to_f32(u16 bits)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
