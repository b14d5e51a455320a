// Products of many rows with affine codes whose scales are fp32 (or were fp16).
#include "product/tile.cuh"

template <int BITS> DEVICE void run_groups(const Tile &tile, const Part &part, u32 first_tile)
{
    if (part.encoding & 16u)
        multiply_tile<WideEncoding<BITS, 2>>(tile, part, first_tile);
    else
        multiply_tile<WideEncoding<BITS, 1>>(tile, part, first_tile);
}

DEVICE void run_part(const Tile &tile, const Part &part, u32 first_tile)
{
    switch (part.encoding & 15u) {
    case 2: return run_groups<2>(tile, part, first_tile);
    case 3: return run_groups<3>(tile, part, first_tile);
    case 4: return run_groups<4>(tile, part, first_tile);
    case 5: return run_groups<5>(tile, part, first_tile);
    case 6: return run_groups<6>(tile, part, first_tile);
    case 8: return run_groups<8>(tile, part, first_tile);
    }
}

TILE_KERNEL(product_tile_wide, run_part)
