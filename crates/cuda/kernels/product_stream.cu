// Products of few rows with the usual encodings: bf16, FP8, and affine with bf16 scales.
#include "product/stream.cuh"

DEVICE void run_part(Stream &s, const Part &part, u32 first, u32 last, const float *x, bool prepared)
{
    switch (part.encoding & 15u) {
    case 0: return stream_part<Bf16Encoding>(s, part, first, last, x, prepared);
    case 1: return stream_part<Fp8Encoding>(s, part, first, last, x, prepared);
    case 2: return stream_part<AffineEncoding<2>>(s, part, first, last, x, prepared);
    case 3: return stream_part<AffineEncoding<3>>(s, part, first, last, x, prepared);
    case 4: return stream_part<AffineEncoding<4>>(s, part, first, last, x, prepared);
    case 5: return stream_part<AffineEncoding<5>>(s, part, first, last, x, prepared);
    case 6: return stream_part<AffineEncoding<6>>(s, part, first, last, x, prepared);
    case 8: return stream_part<AffineEncoding<8>>(s, part, first, last, x, prepared);
    }
}

STREAM_KERNEL(product_stream, run_part)
