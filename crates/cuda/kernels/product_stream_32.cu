// Products of few rows with affine codes in groups of 32.
#include "product/stream.cuh"

DEVICE void run_part(Stream &s, const Part &part, u32 first, u32 last, const float *x, bool prepared)
{
    switch (part.encoding & 15u) {
    case 2: return stream_part<AffineEncoding<2, 2, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 3: return stream_part<AffineEncoding<3, 2, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 4: return stream_part<AffineEncoding<4, 2, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 5: return stream_part<AffineEncoding<5, 2, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 6: return stream_part<AffineEncoding<6, 2, PAIRS_BF16>>(s, part, first, last, x, prepared);
    case 8: return stream_part<AffineEncoding<8, 2, PAIRS_BF16>>(s, part, first, last, x, prepared);
    }
}

STREAM_KERNEL(product_stream_32, run_part)
