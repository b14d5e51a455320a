// Products of few rows with affine codes whose scales are fp32 (or were fp16).
// fp32 scales take registers: blocks have half the threads.
#define MOST_THREADS 256
#define OCTETS_AT_ONCE 2u
#define SPLIT true
#include "product/stream_kernel.cuh"

template <int BITS, u32 COLUMNS>
DEVICE void run_groups(Stream &s, const Part &part, u32 first, u32 last, const Inputs &from)
{
    if (part.encoding & 16u)
        stream_part<WideEncoding<BITS, 2>, COLUMNS>(s, part, first, last, from);
    else
        stream_part<WideEncoding<BITS, 1>, COLUMNS>(s, part, first, last, from);
}

template <u32 COLUMNS> DEVICE void run_wide(Stream &s, const Part &part, u32 first, u32 last, const Inputs &from)
{
    switch (part.encoding & 15u) {
    case 2: return run_groups<2, COLUMNS>(s, part, first, last, from);
    case 3: return run_groups<3, COLUMNS>(s, part, first, last, from);
    case 4: return run_groups<4, COLUMNS>(s, part, first, last, from);
    case 5: return run_groups<5, COLUMNS>(s, part, first, last, from);
    case 6: return run_groups<6, COLUMNS>(s, part, first, last, from);
    case 8: return run_groups<8, COLUMNS>(s, part, first, last, from);
    }
}

STREAM_KERNEL(product_stream_wide, run_wide, 4u)
