// Products of many rows with the usual encodings: bf16, FP8, and affine with bf16 scales.
#include "product/tile.cuh"

DEVICE void run_part(const Tile &tile, const Part &part, u32 first_tile)
{
    switch (part.encoding & 15u) {
    case 0: return multiply_tile<Bf16Encoding>(tile, part, first_tile);
    case 1: return multiply_tile<Fp8Encoding>(tile, part, first_tile);
    case 2: return multiply_tile<AffineEncoding<2>>(tile, part, first_tile);
    case 3: return multiply_tile<AffineEncoding<3>>(tile, part, first_tile);
    case 4: return multiply_tile<AffineEncoding<4>>(tile, part, first_tile);
    case 5: return multiply_tile<AffineEncoding<5>>(tile, part, first_tile);
    case 6: return multiply_tile<AffineEncoding<6>>(tile, part, first_tile);
    case 8: return multiply_tile<AffineEncoding<8>>(tile, part, first_tile);
    }
}

TILE_KERNEL(product_tile, run_part)
