// The end of the last site, for few rows, in one launch: the sum over a row's experts, the mix of four streams, their mean.
#include "common/base.cuh"
#include "hyper/left.cuh"

// Grid: rows × pieces of a row. `mean` may be `y`: a thread has a column to itself.
KERNEL hc_leave(float* mean, u32 mean_stride, float* streams, u32 streams_stride, u32 hidden, float* y, u32 y_stride,
                const float* mix, u32 mix_stride, const float* pairs, u32 pairs_stride, const float* weights, u32 weights_stride,
                const float* shared, u32 shared_stride, u32 picks) {
    grid_release();
    grid_wait();
    Left left = {y, mix, pairs, weights, shared, y_stride, mix_stride, pairs_stride, weights_stride, shared_stride, picks};
    u64 row = blockIdx.x;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < hidden; i += gridDim.y * blockDim.x) {
        float values[STREAMS];
        leave_column(values, streams + row * streams_stride, left, row, i, hidden);
        float total = values[0];
#pragma unroll
        for (u32 j = 1; j < STREAMS; ++j) total = __fadd_rn(total, values[j]);
        mean[row * mean_stride + i] = __fdiv_rn(total, (float)STREAMS);
    }
}
