// Products of few rows with the usual encodings: bf16, FP8, and affine with bf16 scales.
#pragma once
#include "product/stream_kernel.cuh"

template <u32 COLUMNS> DEVICE void run_usual(Stream &s, const Part &part, u32 first, u32 last, const Inputs &from)
{
    switch (part.encoding & 15u) {
    case 0: return stream_part<Bf16Encoding, COLUMNS>(s, part, first, last, from);
    case 1: return stream_part<Fp8Encoding, COLUMNS>(s, part, first, last, from);
    case 2: return stream_part<AffineEncoding<2>, COLUMNS>(s, part, first, last, from);
    case 3: return stream_part<AffineEncoding<3>, COLUMNS>(s, part, first, last, from);
    case 4: return stream_part<AffineEncoding<4>, COLUMNS>(s, part, first, last, from);
    case 5: return stream_part<AffineEncoding<5>, COLUMNS>(s, part, first, last, from);
    case 6: return stream_part<AffineEncoding<6>, COLUMNS>(s, part, first, last, from);
    case 8: return stream_part<AffineEncoding<8>, COLUMNS>(s, part, first, last, from);
    }
}
