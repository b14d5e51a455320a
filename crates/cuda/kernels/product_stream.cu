// Products of few rows with the usual encodings: bf16, FP8, and affine in groups of 64 or 128 with bf16 scales.
#include "product/stream.cuh"

DEVICE void run_part(Stream &s, const Part &part, u32 first, u32 last, const float *x, bool prepared)
{
    switch (part.encoding) {
    case 0: return stream_part<Encoding<PlainBf16, 0, NONE>>(s, part, first, last, x, prepared);
    case 1: return stream_part<Encoding<Fp8, 1, FACTORS_F32>>(s, part, first, last, x, prepared);
    case 2: return stream_part<AffineEncoding<2, 1, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 3: return stream_part<AffineEncoding<3, 1, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 4: return stream_part<AffineEncoding<4, 1, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 5: return stream_part<AffineEncoding<5, 1, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 6: return stream_part<AffineEncoding<6, 1, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 8: return stream_part<AffineEncoding<8, 1, PAIRS_BF16>>(s, part, first, last, x, prepared);
    }
}

STREAM_KERNEL(product_stream, run_part)
