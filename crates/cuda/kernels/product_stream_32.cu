// Products of few rows where parts have groups of 32 inputs.
#define SPLIT true
#include "product/stream_usual.cuh"

STREAM_KERNEL(product_stream_32, run_usual, 4u)
