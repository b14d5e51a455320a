// Products of five to eight rows.
#include "product/stream_usual.cuh"

STREAM_KERNEL(product_stream_8, run_usual, 8u)
