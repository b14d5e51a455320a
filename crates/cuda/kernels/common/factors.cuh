// Factors of norms and decays, from sums that the caller made.
#pragma once
#include "common/base.cuh"
#include "common/maths.cuh"

// 1 / sqrt(mean of squares + epsilon).
DEVICE float rms_factor(float squares, u32 width, float epsilon) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, (float)width), epsilon)));
}

// What makes a vector's length `scale`.
DEVICE float unit_factor(float squares, float scale) {
    return __fdiv_rn(scale, __fsqrt_rn(__fadd_rn(squares, 1e-6f)));
}

// A KDA decay factor; `rate` is exp(a_log) of the head.
DEVICE float decay_factor(float f, float bias, float rate, bool bounded, float bound) {
    float z = __fadd_rn(f, bias);
    float g = bounded ? __fmul_rn(bound, sigmoid(__fmul_rn(rate, z))) : -__fmul_rn(rate, softplus(z));
    return exponential(g);
}
