// Matrices of 8 × 8 bf16 from shared memory into the fragments of a tensor-core product, and numbers split into bf16 terms.
#pragma once
#include "common/base.cuh"
#include "common/bf16.cuh"

#ifndef FLINT_EMULATED

// Four matrices; lane l names a row (16 bytes, aligned) of matrix l / 8. Register i of a lane holds row lane / 4 of matrix i,
// columns 2 (lane % 4) and the next.
DEVICE void load_matrices(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, transposed: register i of a lane holds column lane / 4 of matrix i, rows 2 (lane % 4) and the next.
DEVICE void load_transposed(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

#endif

// Splits two numbers into pairs of bf16 terms; each takes what the ones before it left, exactly.
template <int TERMS> DEVICE void split_pair(u32 (&terms)[TERMS], float low, float high) {
#pragma unroll
    for (u32 i = 0; i < TERMS; ++i) {
        terms[i] = pack_bf16(low, high);
        low = __fadd_rn(low, -bf16_low(terms[i]));
        high = __fadd_rn(high, -bf16_high(terms[i]));
    }
}
