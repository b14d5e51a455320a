// Products of many rows with affine codes in groups of 32.
#include "product/tile.cuh"

DEVICE void run_part(const Tile &tile, const Part &part, u32 first_tile)
{
    switch (part.encoding & 15u) {
    case 2: return multiply_tile<AffineEncoding<2, 2, PAIRS_BF16>>(tile, part, first_tile);
    case 3: return multiply_tile<AffineEncoding<3, 2, PAIRS_BF16>>(tile, part, first_tile);
    case 4: return multiply_tile<AffineEncoding<4, 2, PAIRS_BF16>>(tile, part, first_tile);
    case 5: return multiply_tile<AffineEncoding<5, 2, PAIRS_BF16>>(tile, part, first_tile);
    case 6: return multiply_tile<AffineEncoding<6, 2, PAIRS_BF16>>(tile, part, first_tile);
    case 8: return multiply_tile<AffineEncoding<8, 2, PAIRS_BF16>>(tile, part, first_tile);
    }
}

TILE_KERNEL(product_tile_32, run_part)
