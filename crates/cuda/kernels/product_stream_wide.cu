// Products of few rows with affine codes whose scales are fp32 (or were fp16).
// fp32 scales take registers: blocks have half the threads.
#define MOST_THREADS 256
#define ROWS_AT_ONCE 1u
#include "product/stream.cuh"

template <int BITS> DEVICE void run_groups(Stream &s, const Part &part, u32 first, u32 last, const float *x, bool prepared)
{
    if (part.encoding & 16u)
        stream_part<WideEncoding<BITS, 2>>(s, part, first, last, x, prepared);
    else
        stream_part<WideEncoding<BITS, 1>>(s, part, first, last, x, prepared);
}

DEVICE void run_part(Stream &s, const Part &part, u32 first, u32 last, const float *x, bool prepared)
{
    switch (part.encoding & 15u) {
    case 2: return run_groups<2>(s, part, first, last, x, prepared);
    case 3: return run_groups<3>(s, part, first, last, x, prepared);
    case 4: return run_groups<4>(s, part, first, last, x, prepared);
    case 5: return run_groups<5>(s, part, first, last, x, prepared);
    case 6: return run_groups<6>(s, part, first, last, x, prepared);
    case 8: return run_groups<8>(s, part, first, last, x, prepared);
    }
}

STREAM_KERNEL(product_stream_wide, run_part)
