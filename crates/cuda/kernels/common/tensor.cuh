// Tensor-core instructions, one function each, so that the rest of a kernel is plain C++.
#pragma once
#include "common/base.cuh"

// d += a · b: sixteen outputs by eight rows over sixteen inputs.
// A lane (g = lane / 4, t = lane % 4) holds of a: [g], [g + 8] at slots 2t, 2t + 1, then the same at slots 2t + 8, 2t + 9;
// of b: column g at slots 2t, 2t + 1 and 2t + 8, 2t + 9; of d: [g] at columns 2t, 2t + 1, then [g + 8] there.
DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d = a · b, from zeros.
DEVICE void mma_bf16_start(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

// (a & b) | c, as one instruction whatever the constants.
DEVICE u32 and_or(u32 a, u32 b, u32 c)
{
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// a · b + c of two bf16 side by side, each rounded once.
DEVICE u32 fma_pair(u32 a, u32 b, u32 c)
{
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// The lower or the upper half of a word, twice.
DEVICE u32 both_low(u32 word)
{
    return __byte_perm(word, 0u, 0x1010);
}

DEVICE u32 both_high(u32 word)
{
    return __byte_perm(word, 0u, 0x3232);
}

// Waits for the other threads of one of the block's teams; `team` is 1 to 15, `threads` a multiple of 32.
DEVICE void team_barrier(u32 team, u32 threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(team), "r"(threads) : "memory");
}

// 1 / x, rounded to nearest, where x and the result are normal numbers: an approximation and one Newton step, as the exactly
// rounded reciprocal does in this case.
DEVICE float reciprocal_of_normal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y);
}
