// Products of one row.
#include "product/stream_usual.cuh"

STREAM_KERNEL(product_stream_1, run_usual, 1u)
