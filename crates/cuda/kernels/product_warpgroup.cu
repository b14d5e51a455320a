// architectures: sm_90a
// Products of many rows by warp groups with the usual encodings: bf16, FP8, and affine with bf16 scales.
#include "product/warpgroup.cuh"

WARPGROUP_KERNEL(product_warpgroup_bf16, Bf16Encoding, 0u)
WARPGROUP_KERNEL(product_warpgroup_fp8, Fp8Encoding, 1u)
WARPGROUP_KERNEL(product_warpgroup_2, AffineEncoding<2>, 2u)
WARPGROUP_KERNEL(product_warpgroup_3, AffineEncoding<3>, 3u)
WARPGROUP_KERNEL(product_warpgroup_4, AffineEncoding<4>, 4u)
WARPGROUP_KERNEL(product_warpgroup_5, AffineEncoding<5>, 5u)
WARPGROUP_KERNEL(product_warpgroup_6, AffineEncoding<6>, 6u)
WARPGROUP_KERNEL(product_warpgroup_8, AffineEncoding<8>, 8u)
