// Integer types, indices and warp helpers. No toolkit headers: NVRTC needs none.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__

// Lanes of a warp.
#define WARP 32u
#define ALL_LANES 0xffffffffu

DEVICE u32 lane_index() { return threadIdx.x & 31u; }
DEVICE u32 warp_index() { return threadIdx.x >> 5; }

DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1u) / b; }

// A kernel that is declared early (`Kernel::early`) begins while the launch before it ends. It calls grid_release first, so
// that the next launch can do the same, and every thread calls grid_wait before it reads what an earlier launch writes,
// and before it writes anything. What earlier launches write must not be `__restrict__` there: the compiler could
// move its loads before the wait.
DEVICE void grid_release()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void grid_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Sum over a warp: a butterfly, so that every lane has the same bits (a + b == b + a).
DEVICE float warp_sum(float x)
{
#pragma unroll
    for (u32 offset = 16u; offset > 0u; offset >>= 1)
        x = __fadd_rn(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// Greatest value over a warp. NaN never wins against a number.
DEVICE float warp_max(float x)
{
#pragma unroll
    for (u32 offset = 16u; offset > 0u; offset >>= 1)
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// Shared-memory address of a pointer, for inline PTX.
DEVICE u32 shared_address(const void *pointer)
{
    return (u32)__cvta_generic_to_shared(pointer);
}

// Sixteen bytes from global to shared memory, asynchronously, past L1. `valid` bytes are read, the rest are zeros.
DEVICE void copy_async_16(void *to, const void *from, u32 valid = 16u)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid)
                 : "memory");
}

// Four bytes from global to shared memory, asynchronously.
DEVICE void copy_async_4(void *to, const void *from, u32 valid = 4u)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid)
                 : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's newest groups are under way.
template <u32 pending> DEVICE void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
