// Products of two to four rows, and of more where the inputs are wide.
#include "product/stream_usual.cuh"

STREAM_KERNEL(product_stream_4, run_usual, 4u)
