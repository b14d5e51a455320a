// architectures: sm_90a
// Products of many rows by warp groups with the usual encodings but bf16: FP8, and affine with bf16 scales.
#include "product/warpgroup.cuh"

DEVICE void run_part(const Tile &tile, const Part &part, u32 first_tile, u64 *barriers)
{
    switch (part.encoding & 15u) {
    case 1: return multiply_tile<Fp8Encoding>(tile, part, first_tile, barriers);
    case 2: return multiply_tile<AffineEncoding<2>>(tile, part, first_tile, barriers);
    case 3: return multiply_tile<AffineEncoding<3>>(tile, part, first_tile, barriers);
    case 4: return multiply_tile<AffineEncoding<4>>(tile, part, first_tile, barriers);
    case 5: return multiply_tile<AffineEncoding<5>>(tile, part, first_tile, barriers);
    case 6: return multiply_tile<AffineEncoding<6>>(tile, part, first_tile, barriers);
    case 8: return multiply_tile<AffineEncoding<8>>(tile, part, first_tile, barriers);
    }
}

GROUP_KERNEL(product_warpgroup, run_part)
