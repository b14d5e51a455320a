// exp, sigmoid, silu and softplus from exactly rounded operations only: the formulas of the CPU backend's maths.rs.
// Within 2 units in the last place over all of fp32 (silu 3); NaN gives NaN. Sources are compiled without contraction, so an
// operator is one rounding; a product that feeds a sum is written with intrinsics all the same.
#pragma once
#include "common/base.cuh"
#include "common/tensor.cuh"

DEVICE float infinity() { return __uint_as_float(0x7F800000u); }

// x · 2^n for |n| <= 252. The first factor keeps a value of about one normal, so the result is rounded once.
DEVICE float scale_by_power(float x, int n) {
    int half = n >> 1;
    float first = __uint_as_float((u32)(half + 127) << 23);
    float second = __uint_as_float((u32)(n - half + 127) << 23);
    return __fmul_rn(__fmul_rn(x, first), second);
}

// e^x.
DEVICE float exponential(float x) {
    const float round = 12582912.0f;
    const float minus_ln2_high = -0.693147182464599609375f;
    const float ln2_low = 1.904654212e-9f;
    // Beyond these bounds the result is infinite or zero. Comparisons let NaN through.
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    float shifted = __fmaf_rn(x, 1.44269502162933349609375f, round);
    float n = __fadd_rn(shifted, -round);
    float near = __fmaf_rn(n, minus_ln2_high, x);
    float r = __fmaf_rn(n, ln2_low, near);
    // What rounding took from r and from 1 + r: they would show in a sigmoid.
    float r_rest = __fmaf_rn(n, ln2_low, __fadd_rn(near, -r));
    float lead = __fadd_rn(1.0f, r);
    float lead_rest = __fadd_rn(r, -__fadd_rn(lead, -1.0f));
    float p = 0.00019790341f;
    p = __fmaf_rn(p, r, 0.001394466f);
    p = __fmaf_rn(p, r, 0.008333497f);
    p = __fmaf_rn(p, r, 0.041666295f);
    p = __fmaf_rn(p, r, 0.16666666f);
    p = __fmaf_rn(p, r, 0.5f);
    float tail = __fmaf_rn(__fmul_rn(r, r), p, __fadd_rn(lead_rest, r_rest));
    float value = __fadd_rn(lead, tail);
    // The integer stands in the lowest bits of the shifted number. NaN has none; its value stays NaN whatever the power is.
    int power = (int)(__float_as_uint(shifted) - __float_as_uint(round));
    return scale_by_power(value, power);
}

// 1 / (1 + e^-x), from e^-|x| so that neither side overflows.
DEVICE float sigmoid(float x) {
    float e = exponential(-fabsf(x));
    float numerator = x < 0.0f ? e : 1.0f;
    float denominator = __fadd_rn(1.0f, e);
    float quotient = __fmul_rn(numerator, reciprocal_of_normal(denominator));
    // One correction by what the sum and the quotient lost; a linear 1 / d suffices for it.
    float lost = __fadd_rn(e, -__fadd_rn(denominator, -1.0f));
    float rest = __fmaf_rn(-quotient, lost, __fmaf_rn(-quotient, denominator, numerator));
    return __fmaf_rn(rest, __fmaf_rn(denominator, -0.5f, 1.457f), quotient);
}

// x · sigmoid(x).
DEVICE float silu(float x) { return __fmul_rn(x, sigmoid(x)); }

// ln(1 + e^x) as max(x, 0) + 2 atanh(t / (2 + t)) with t = e^-|x|.
DEVICE float softplus(float x) {
    float t = exponential(-fabsf(x));
    float denominator = __fadd_rn(2.0f, t);
    float z = __fdiv_rn(t, denominator);
    float lost = __fadd_rn(t, -__fadd_rn(denominator, -2.0f));
    float rest = __fmaf_rn(-z, lost, __fmaf_rn(-z, denominator, t));
    rest = __fmul_rn(rest, __fmaf_rn(denominator, -1.0f / 3.0f, 1.65f));
    float square = __fmul_rn(z, z);
    float p = 0.12150762f;
    p = __fmaf_rn(p, square, 0.10713757f);
    p = __fmaf_rn(p, square, 0.14308448f);
    p = __fmaf_rn(p, square, 0.19999439f);
    p = __fmaf_rn(p, square, 0.33333338f);
    float twice = __fadd_rn(z, z);
    float logarithm = __fadd_rn(twice, __fmaf_rn(__fmul_rn(twice, square), p, rest));
    // NaN goes through: the comparison is false for it.
    return __fadd_rn(x < 0.0f ? 0.0f : x, logarithm);
}

// A number that sorts as the score does: NaN above infinity or, with its sign, below minus infinity; the zeros are equal.
DEVICE u32 ordered(float score) {
    u32 bits = __float_as_uint(__fadd_rn(score, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Sorts as (score descending, index ascending) when taken in descending order. Never 0 for an index that exists.
DEVICE u64 rank_of(float score, u32 index) { return (u64)ordered(score) << 32 | (u64)(~index); }

// The index of a rank.
DEVICE u32 ranked_index(u64 rank) { return ~(u32)rank; }
