// The clamped SwiGLU.
#pragma once
#include "common/base.cuh"
#include "common/maths.cuh"

// silu(min(gate, limit)) · clamp(up, -limit, limit); comparisons let NaN through.
DEVICE float activate(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return __fmul_rn(silu(gate), up);
}
