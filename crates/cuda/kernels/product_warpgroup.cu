// architectures: sm_90a
// Products of many rows by warp groups with the usual encodings: FP8, and affine in groups of 64 or 128 with bf16 scales.
#include "product/warpgroup.cuh"

DEVICE void run_part(const Tile &tile, const Part &part, u32 first_tile, u64 *barriers)
{
    switch (part.encoding) {
    case 1: return multiply_tile<Encoding<Fp8, 1, FACTORS_F32>>(tile, part, first_tile, barriers);
    case 2: return multiply_tile<AffineEncoding<2, 1, PAIRS_BF16>>(tile, part, first_tile, barriers);
    case 3: return multiply_tile<AffineEncoding<3, 1, PAIRS_BF16>>(tile, part, first_tile, barriers);
    case 4: return multiply_tile<AffineEncoding<4, 1, PAIRS_BF16>>(tile, part, first_tile, barriers);
    case 5: return multiply_tile<AffineEncoding<5, 1, PAIRS_BF16>>(tile, part, first_tile, barriers);
    case 6: return multiply_tile<AffineEncoding<6, 1, PAIRS_BF16>>(tile, part, first_tile, barriers);
    case 8: return multiply_tile<AffineEncoding<8, 1, PAIRS_BF16>>(tile, part, first_tile, barriers);
    }
}

GROUP_KERNEL(product_warpgroup, run_part)
