// Tensor-core products of four warps over blocks of 64 rows of 128 bytes (wgmma: sm_90a alone). Pieces of sixteen bytes are
// swizzled: piece p of row r lies at p ^ r % 8. Sums have the bits of a chain of `mma_bf16`. Products run on their own:
// neither d nor a may be touched before a wait.
#pragma once
#include "common/warpgroup.cuh"

#ifndef FLINT_EMULATED

#define SUMS_OF(d)                                                                                                            \
    "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),    \
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]),              \
        "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]),              \
        "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]),              \
        "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
#define PLACES_OF_SUMS                                                                                                        \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

// d = a · bᵀ, or d += a · bᵀ where `keep` is not zero: 64 rows of a by 64 rows of b over the sixteen columns that begin at both
// places.
DEVICE void multiply_rows(float (&d)[8][4], const void* a, const void* b, u32 keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " PLACES_OF_SUMS ", %32, %33, keep, 1, 1, 0, 0;\n}"
                 : SUMS_OF(d)
                 : "l"(describe_rows(a)), "l"(describe_rows(b)), "r"(keep));
}

// d += a · b: 64 rows of a, in registers as for `mma_bf16`, by the 64 columns of sixteen rows of b.
DEVICE void multiply_columns(float (&d)[8][4], const u32 (&a)[4], const void* b) {
    // From eight rows to the next eight there are 1024 bytes; there is no second block of columns.
    u64 rows = (u64)(shared_address(b) >> 4 & 0x3fffu) | 64ull << 16 | 64ull << 32 | 1ull << 62;
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " PLACES_OF_SUMS ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : SUMS_OF(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}

// Stores to the same place of another block of the cluster; its barrier counts the bytes.
DEVICE void store_to_block(float4* place, u64* barrier, u32 block, float4 x) {
    asm volatile("{\n.reg .b32 there, counted;\nmapa.shared::cluster.u32 there, %0, %2;\n"
                 "mapa.shared::cluster.u32 counted, %1, %2;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counted];\n}" ::"r"(
                     shared_address(place)),
                 "r"(shared_address(barrier)), "r"(block), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

// A warp's arrival at the barrier of another block of the cluster. It says that the warp has what it read, no more.
DEVICE void arrive_at_block(u64* barrier, u32 block) {
    __syncwarp();
    if (lane_index() == 0)
        asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
                     "r"(block)
                     : "memory");
    __syncwarp();
}

// A barrier of all threads of the cluster in two halves: what was stored before an arrival is seen behind the wait.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

#define FEW_SUMS_OF(d)                                                                                                        \
    "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),    \
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])

// d = a · bᵀ, or d += a · bᵀ where `keep` is not zero: 64 rows of a, in registers as for `mma_bf16`, by 32 rows of b over the
// sixteen columns that begin at its place.
DEVICE void multiply_heads(float (&d)[4][4], const u32 (&a)[4], const void* b, u32 keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, keep, 1, 1, 0;\n}"
                 : FEW_SUMS_OF(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(describe_rows(b)), "r"(keep));
}

DEVICE void settle(float (&d)[4][4]) { asm volatile("" : FEW_SUMS_OF(d)::"memory"); }

// What a wait completed may be read behind this, not before it.
DEVICE void settle(float (&d)[8][4]) { asm volatile("" : SUMS_OF(d)::"memory"); }

#endif
