// Copies between tables and buffers, as launches, so that a graph holds them.
#include "common/base.cuh"

// `to[i] = from[i]` for `count` words.
KERNEL copy_words(u32 *to, const u32 *__restrict__ from, u32 count)
{
    grid_release();
    grid_wait();
    u32 step = gridDim.x * blockDim.x;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        to[i] = from[i];
}
