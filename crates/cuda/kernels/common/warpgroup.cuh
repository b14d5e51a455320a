// Tensor-core products of four warps together (wgmma: sm_90a alone). Their sums have the bits of a chain of `mma_bf16`.
#pragma once
#include "common/tensor.cuh"

#define OPERANDS(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])

// d = a · b, or d += a · b where `keep` is not zero: 64 outputs by 64 (or 128) rows over sixteen inputs, by four warps together.
// A lane's registers are those of `mma_bf16`: four outputs' warps beside each other, columns of eight rows. Runs on its own:
// neither d nor a may be touched before a wait.
DEVICE void multiply_async(float (&d)[8][4], const u32 *a, u64 b, u32 keep)
{
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, keep, 1, 1, 0;\n}"
        : OPERANDS(d[0]), OPERANDS(d[1]), OPERANDS(d[2]), OPERANDS(d[3]),
          OPERANDS(d[4]), OPERANDS(d[5]), OPERANDS(d[6]), OPERANDS(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

DEVICE void multiply_async(float (&d)[16][4], const u32 *a, u64 b, u32 keep)
{
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, keep, 1, 1, 0;\n}"
        : OPERANDS(d[0]), OPERANDS(d[1]), OPERANDS(d[2]), OPERANDS(d[3]),
          OPERANDS(d[4]), OPERANDS(d[5]), OPERANDS(d[6]), OPERANDS(d[7]),
          OPERANDS(d[8]), OPERANDS(d[9]), OPERANDS(d[10]), OPERANDS(d[11]),
          OPERANDS(d[12]), OPERANDS(d[13]), OPERANDS(d[14]), OPERANDS(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// Before the first product, and after registers or shared memory that the next ones take were written.
DEVICE void before_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` of the newest groups are under way.
template <u32 pending> DEVICE void wait_products()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Makes this thread's writes to shared memory visible to the tensor cores' own reads.
DEVICE void show_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Rows of 128 bytes whose pieces of sixteen are swizzled: piece p of row r lies at p ^ r % 8. `place` is a multiple of 1024.
DEVICE u64 describe_rows(const void *place)
{
    // Start, then (64 · 16 bytes) from eight rows to the next eight, then the swizzle of 128 bytes.
    return (u64)(shared_address(place) >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Starts a barrier in shared memory that `arrivals` arrivals complete, again and again. A `show_shared` and a barrier of the
// block come before its first use.
DEVICE void start_barrier(u64 *barrier, u32 arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// An arrival that completes only with `bytes` bytes of bulk copies.
DEVICE void arrive_with_bytes(u64 *barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Copies `bytes` bytes (a multiple of sixteen, as are the addresses) to shared memory; the barrier counts them.
DEVICE void copy_bulk(void *to, const void *from, u32 bytes, u64 *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// This thread's arrival once its copies so far (`copy_async_16`) are done.
DEVICE void arrive_behind_copies(u64 *barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// A warp's arrival: all that its lanes read and wrote before is done.
DEVICE void arrive_warp(u64 *barrier)
{
    __syncwarp();
    if (lane_index() == 0u)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
    __syncwarp();
}

// Waits for the barrier's completion number n, where `parity` is n % 2; the one before must be known to be complete.
DEVICE void await_barrier(u64 *barrier, u32 parity)
{
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Changes how many registers the threads of a warp group may have: a multiple of eight. All its warps call it.
template <u32 count> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }
template <u32 count> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }
