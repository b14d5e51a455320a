// Rows that are gathered, copied into streams, and averaged over streams. Grid: rows × pieces of a row.
#include "common/base.cuh"

// A number of the piece at hand, the thread's first and the step to its next.
#define EACH(i, count) \
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < (count); i += gridDim.y * blockDim.x)

// A row number outside `x` gives NaN: the device cannot refuse it.
KERNEL gather_rows(float* out, u32 out_stride, const float* x, u32 x_stride, u32 x_rows,
                                       const u32* index, u32 width) {
    grid_release();
    grid_wait();
    u64 row = blockIdx.x;
    u32 from = index[row];
    EACH(i, width) out[row * out_stride + i] = from < x_rows ? x[(u64)from * x_stride + i] : __uint_as_float(0x7FC00000u);
}

KERNEL spread_streams(float* streams, u32 streams_stride, const float* x, u32 x_stride, u32 hidden,
                                          u32 count) {
    grid_release();
    grid_wait();
    u64 row = blockIdx.x;
    EACH(i, hidden) {
        float value = x[row * x_stride + i];
        for (u32 stream = 0; stream < count; ++stream) streams[row * streams_stride + (u64)stream * hidden + i] = value;
    }
}

KERNEL mean_streams(float* out, u32 out_stride, const float* streams, u32 streams_stride, u32 hidden,
                                        u32 count) {
    grid_release();
    grid_wait();
    u64 row = blockIdx.x;
    EACH(i, hidden) {
        const float* from = streams + row * streams_stride + i;
        float total = from[0];
        for (u32 stream = 1; stream < count; ++stream) total = __fadd_rn(total, from[(u64)stream * hidden]);
        out[row * out_stride + i] = __fdiv_rn(total, (float)count);
    }
}
