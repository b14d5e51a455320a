// architectures: sm_90a
// Products of many rows by warp groups with the usual encodings: bf16, FP8, and affine with bf16 scales.
#include "product/warpgroup.cuh"

DEVICE void run_part(const Product &product, const Job &job, Ring &ring)
{
    switch (job.encoding & 15u) {
    case 0: return consume_tile<Bf16Encoding>(product, job, ring);
    case 1: return consume_tile<Fp8Encoding>(product, job, ring);
    case 2: return consume_tile<AffineEncoding<2>>(product, job, ring);
    case 3: return consume_tile<AffineEncoding<3>>(product, job, ring);
    case 4: return consume_tile<AffineEncoding<4>>(product, job, ring);
    case 5: return consume_tile<AffineEncoding<5>>(product, job, ring);
    case 6: return consume_tile<AffineEncoding<6>>(product, job, ring);
    case 8: return consume_tile<AffineEncoding<8>>(product, job, ring);
    }
}

WARPGROUP_KERNEL(product_warpgroup, run_part)
