// The clamped SwiGLU and the sum over a row's experts. Grid: rows × pieces of a row.
#include "common/base.cuh"
#include "common/maths.cuh"

#define EACH(i, count) \
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < (count); i += gridDim.y * blockDim.x)

// silu(min(gate, limit)) · clamp(up, -limit, limit); comparisons let NaN through.
DEVICE float activate(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return __fmul_rn(silu(gate), up);
}

// `out` may be `gate` or `up`.
KERNEL swiglu(float* out, u32 out_stride, const float* gate, u32 gate_stride, const float* up,
                                  u32 up_stride, u32 width, float limit) {
    u64 row = blockIdx.x;
    EACH(i, width) out[row * out_stride + i] = activate(gate[row * gate_stride + i], up[row * up_stride + i], limit);
}

KERNEL combine(float* out, u32 out_stride, const float* pairs, u32 pairs_stride, const float* weights,
                                   u32 weights_stride, const float* shared, u32 shared_stride, u32 hidden, u32 picks) {
    u64 row = blockIdx.x;
    weights += row * weights_stride;
    pairs += row * picks * pairs_stride;
    EACH(i, hidden) {
        float total = 0.0f;
        for (u32 j = 0; j < picks; ++j) total = __fmaf_rn(weights[j], pairs[(u64)j * pairs_stride + i], total);
        out[row * out_stride + i] = __fadd_rn(total, shared[row * shared_stride + i]);
    }
}
