// architectures: sm_90a
// Products of many rows by warp groups with the usual encodings: bf16, FP8, and affine with bf16 scales.
#include "product/warpgroup.cuh"

DEVICE void run_part(const Product &product, const Groups &groups, const Tile &tile, Ring &ring)
{
    switch (tile.part.encoding & 15u) {
    case 0: return consume_tile<Bf16Encoding>(product, groups, tile, ring);
    case 1: return consume_tile<Fp8Encoding>(product, groups, tile, ring);
    case 2: return consume_tile<AffineEncoding<2>>(product, groups, tile, ring);
    case 3: return consume_tile<AffineEncoding<3>>(product, groups, tile, ring);
    case 4: return consume_tile<AffineEncoding<4>>(product, groups, tile, ring);
    case 5: return consume_tile<AffineEncoding<5>>(product, groups, tile, ring);
    case 6: return consume_tile<AffineEncoding<6>>(product, groups, tile, ring);
    case 8: return consume_tile<AffineEncoding<8>>(product, groups, tile, ring);
    }
}

WARPGROUP_KERNEL(product_warpgroup, run_part)
