// Products of many rows with the usual encodings: bf16, FP8, and affine in groups of 64 or 128 with bf16 scales.
#include "product/tile.cuh"

DEVICE void run_part(const Tile &tile, const Part &part, u32 first_tile)
{
    switch (part.encoding) {
    case 0: return multiply_tile<Encoding<PlainBf16, 0, NONE>>(tile, part, first_tile);
    case 1: return multiply_tile<Encoding<Fp8, 1, FACTORS_F32>>(tile, part, first_tile);
    case 2: return multiply_tile<AffineEncoding<2, 1, PAIRS_BF16>>(tile, part, first_tile);
    case 3: return multiply_tile<AffineEncoding<3, 1, PAIRS_BF16>>(tile, part, first_tile);
    case 4: return multiply_tile<AffineEncoding<4, 1, PAIRS_BF16>>(tile, part, first_tile);
    case 5: return multiply_tile<AffineEncoding<5, 1, PAIRS_BF16>>(tile, part, first_tile);
    case 6: return multiply_tile<AffineEncoding<6, 1, PAIRS_BF16>>(tile, part, first_tile);
    case 8: return multiply_tile<AffineEncoding<8, 1, PAIRS_BF16>>(tile, part, first_tile);
    }
}

TILE_KERNEL(product_tile, run_part)
