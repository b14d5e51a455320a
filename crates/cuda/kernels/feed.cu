// The clamped SwiGLU and the sum over a row's experts. Grid: rows × pieces of a row.
#include "common/activate.cuh"
#include "common/base.cuh"

#define EACH(i, count) \
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < (count); i += gridDim.y * blockDim.x)

// Four elements at once where rows begin at multiples of sixteen bytes.
DEVICE bool aligned(const void* row) { return ((u64)row & 15) == 0; }

// One row of an activation. `out` may be `gate` or `up`.
DEVICE void activate_row(float* out, const float* gate, const float* up, u32 width, float limit) {
    if (width % 4 != 0 || !aligned(out) || !aligned(gate) || !aligned(up)) {
        EACH(i, width) out[i] = activate(gate[i], up[i], limit);
        return;
    }
    EACH(i, width / 4) {
        float4 g = ((const float4*)gate)[i], u = ((const float4*)up)[i];
        ((float4*)out)[i] = make_float4(activate(g.x, u.x, limit), activate(g.y, u.y, limit), activate(g.z, u.z, limit),
                                        activate(g.w, u.w, limit));
    }
}

// Rows of one activation, then those of another.
KERNEL swiglu(float* out, u32 out_stride, const float* gate, u32 gate_stride, const float* up, u32 up_stride, u32 rows, u32 width,
              float limit, float* other_out, u32 other_out_stride, const float* other_gate, u32 other_gate_stride,
              const float* other_up, u32 other_up_stride, u32 other_width, float other_limit) {
    grid_release();
    grid_wait();
    u64 row = blockIdx.x;
    if (row < rows) {
        activate_row(out + row * out_stride, gate + row * gate_stride, up + row * up_stride, width, limit);
        return;
    }
    row -= rows;
    activate_row(other_out + row * other_out_stride, other_gate + row * other_gate_stride, other_up + row * other_up_stride,
                 other_width, other_limit);
}

KERNEL combine(float* out, u32 out_stride, const float* pairs, u32 pairs_stride, const float* weights,
                                   u32 weights_stride, const float* shared, u32 shared_stride, u32 hidden, u32 picks) {
    grid_release();
    grid_wait();
    u64 row = blockIdx.x;
    weights += row * weights_stride;
    pairs += row * picks * pairs_stride;
    EACH(i, hidden) {
        float total = 0.0f;
        for (u32 j = 0; j < picks; ++j) total = __fmaf_rn(weights[j], pairs[(u64)j * pairs_stride + i], total);
        out[row * out_stride + i] = __fadd_rn(total, shared[row * shared_stride + i]);
    }
}
