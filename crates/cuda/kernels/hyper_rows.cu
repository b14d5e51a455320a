// Hyper-connections of four streams and many rows: coefficients' products, the coefficients, the collapsed rows.
//
// Sums have the order of hyper.cu: chains of 64 columns, eight chains are a slice; chains and slices ascend. A lane has two
// rows and all outputs of a chain, so that a number of the function is read once for 64 rows, and a column once for all
// outputs.
#include "common/base.cuh"
#include "common/bf16.cuh"
#include "common/maths.cuh"

#define STREAMS 4
#define OUTPUTS (2 * STREAMS + STREAMS * STREAMS)
// One more output: the sum of squares.
#define SUMS (OUTPUTS + 1)
#define SLICE 512
#define CHAIN 64
#define CHAINS (SLICE / CHAIN)
// Rows of a lane, and of a group.
#define EACH 2
#define GROUP (EACH * WARP)
// Columns of a chain that are copied at once, in pieces of four.
#define STEP 32
#define PIECES (STEP / 4)

// The function's numbers as they are stored.
#define NUMBERS_BF16 0
#define NUMBERS_F16 1

struct Room {
    float numbers[OUTPUTS][SLICE];
    // For each warp two steps. Piece p of row r stands at p ^ r % 8.
    float4 x[CHAINS][2][GROUP][PIECES];
    float chains[CHAINS][SUMS][GROUP];
};

// The function's columns of a slice as fp32.
DEVICE void load_numbers(Room& room, const void* function, u32 numbers, u32 width, u32 first) {
    for (u32 i = threadIdx.x; i < OUTPUTS * SLICE; i += blockDim.x) {
        u64 at = (u64)(i / SLICE) * width + first + i % SLICE;
        room.numbers[i / SLICE][i % SLICE] = numbers == NUMBERS_BF16  ? bf16_to_f32(((const u16*)function)[at])
                                             : numbers == NUMBERS_F16 ? f16_to_f32(((const u16*)function)[at])
                                                                      : ((const float*)function)[at];
    }
}

// Starts copying a warp's columns of a group of rows; rows behind the last are zeros.
DEVICE void request(float4 (*x)[PIECES], const float* streams, u64 stride, u32 first_row, u32 rows) {
    u32 piece = lane_index() % PIECES;
#pragma unroll
    for (u32 i = 0; i < GROUP / 4; ++i) {
        u32 row = i * 4 + lane_index() / PIECES;
        bool there = first_row + row < rows;
        const float* from = streams + (there ? first_row + row : 0) * stride + piece * 4;
        copy_async_16(&x[row][piece ^ (row & 7)], from, there ? 16 : 0);
    }
    copy_async_commit();
}

// A step through the chains of a lane's rows.
DEVICE void multiply(float (&sums)[SUMS][EACH], const float (*numbers)[SLICE], const float4 (*x)[PIECES]) {
#pragma unroll
    for (u32 piece = 0; piece < PIECES; ++piece) {
        float4 v[EACH];
#pragma unroll
        for (u32 r = 0; r < EACH; ++r) {
            u32 row = lane_index() + r * WARP;
            v[r] = x[row][piece ^ (row & 7)];
        }
#pragma unroll
        for (u32 output = 0; output < SUMS; ++output) {
            float4 w = output < OUTPUTS ? *(const float4*)&numbers[output][piece * 4] : make_float4(0, 0, 0, 0);
#pragma unroll
            for (u32 r = 0; r < EACH; ++r) {
                float4 f = output < OUTPUTS ? w : v[r];
                float sum = sums[output][r];
                sum = __fmaf_rn(f.x, v[r].x, sum);
                sum = __fmaf_rn(f.y, v[r].y, sum);
                sum = __fmaf_rn(f.z, v[r].z, sum);
                sums[output][r] = __fmaf_rn(f.w, v[r].w, sum);
            }
        }
    }
}

// Grid: slices × blocks that share the groups of rows. A warp has a chain of the slice. `sums` has a row of `room_rows` values
// for each slice and output. Dynamic shared memory: Room. Rows and the function are whole pieces of sixteen bytes.
extern "C" __global__ void __launch_bounds__(CHAINS * 32, 1)
hc_rows_products(float* sums, u32 room_rows, const float* streams, u32 streams_stride, const void* function, u32 numbers,
                 u32 width, u32 rows) {
    extern __shared__ uint4 products_room[];
    Room& room = *(Room*)products_room;
    u32 chain = warp_index(), groups = ceil_div(rows, GROUP);
    const float* columns = streams + blockIdx.x * SLICE + chain * CHAIN;
    auto& x = room.x[chain];
    request(x[0], columns, streams_stride, blockIdx.y * GROUP, rows);
    load_numbers(room, function, numbers, width, blockIdx.x * SLICE);
    __syncthreads();
    for (u32 group = blockIdx.y; group < groups; group += gridDim.y) {
        float part[SUMS][EACH] = {};
#pragma unroll
        for (u32 step = 0; step < CHAIN / STEP; ++step) {
            // The other step's columns were read before: by this warp alone.
            __syncwarp();
            u32 next = step + 1 < CHAIN / STEP ? group : group + gridDim.y, at = (step + 1) * STEP % CHAIN;
            request(x[(step + 1) % 2], columns + at, streams_stride, next * GROUP, rows);
            copy_async_wait<1>();
            __syncwarp();
            multiply(part, (const float(*)[SLICE])&room.numbers[0][chain * CHAIN + step * STEP], x[step % 2]);
        }
        // The sums of the group before were read.
        __syncthreads();
#pragma unroll
        for (u32 output = 0; output < SUMS; ++output)
#pragma unroll
            for (u32 r = 0; r < EACH; ++r) room.chains[chain][output][lane_index() + r * WARP] = part[output][r];
        __syncthreads();
        for (u32 i = threadIdx.x; i < SUMS * GROUP; i += blockDim.x) {
            u32 output = i / GROUP, row = i % GROUP;
            float total = room.chains[0][output][row];
#pragma unroll
            for (u32 j = 1; j < CHAINS; ++j) total = __fadd_rn(total, room.chains[j][output][row]);
            sums[(u64)(blockIdx.x * SUMS + output) * room_rows + group * GROUP + row] = total;
        }
    }
}

// One column or row of the matrix divided by its sum.
DEVICE void divide(float& a, float& b, float& c, float& d, float epsilon) {
    float sum = __fadd_rn(__fadd_rn(__fadd_rn(a, b), c), d);
    float inverse = __frcp_rn(__fadd_rn(sum, epsilon));
    a = __fmul_rn(a, inverse), b = __fmul_rn(b, inverse), c = __fmul_rn(c, inverse), d = __fmul_rn(d, inverse);
}

// Softmax over rows plus epsilon, then the Sinkhorn normalisation: columns, then `rounds - 1` times rows and columns.
DEVICE void balance(float (&c)[STREAMS][STREAMS], u32 rounds, float epsilon) {
#pragma unroll
    for (u32 i = 0; i < STREAMS; ++i) {
        float highest = -infinity(), total = 0.0f;
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) highest = c[i][j] > highest ? c[i][j] : highest;
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) {
            c[i][j] = exponential(__fadd_rn(c[i][j], -highest));
            total = __fadd_rn(total, c[i][j]);
        }
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) c[i][j] = __fadd_rn(__fdiv_rn(c[i][j], total), epsilon);
    }
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) divide(c[0][j], c[1][j], c[2][j], c[3][j], epsilon);
    for (u32 round = 1; round < rounds; ++round) {
#pragma unroll
        for (u32 i = 0; i < STREAMS; ++i) divide(c[i][0], c[i][1], c[i][2], c[i][3], epsilon);
#pragma unroll
        for (u32 j = 0; j < STREAMS; ++j) divide(c[0][j], c[1][j], c[2][j], c[3][j], epsilon);
    }
}

// What collapses each row, and its mix, from its sums. A warp has an output of 32 rows, then a lane balances a row's matrix.
// Grid: groups of 32 rows; SUMS warps.
extern "C" __global__ void __launch_bounds__(SUMS * 32)
hc_rows_coefficients(float* pre, float* mix, u32 mix_stride, const float* sums, u32 room_rows, u32 slices, u32 hidden, u32 rows,
                     const float* base, const float* scale, float norm_epsilon, float epsilon, u32 rounds) {
    __shared__ float matrix[STREAMS * STREAMS][WARP];
    __shared__ float squares[WARP];
    u32 output = warp_index();
    u64 row = blockIdx.x * WARP + lane_index();
    bool there = row < rows;
    const float* from = sums + (u64)output * room_rows + (there ? row : 0);
    float total = from[0];
#pragma unroll 8
    for (u32 slice = 1; slice < slices; ++slice) total = __fadd_rn(total, from[(u64)slice * SUMS * room_rows]);
    if (output == OUTPUTS) squares[lane_index()] = total;
    __syncthreads();
    mix += (there ? row : 0) * mix_stride;
    if (output < OUTPUTS) {
        float mean = __fdiv_rn(squares[lane_index()], (float)(STREAMS * hidden));
        float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, norm_epsilon)));
        float value = __fmaf_rn(__fmul_rn(total, factor), scale[min(output / STREAMS, 2)], base[output]);
        if (output >= 2 * STREAMS) matrix[output - 2 * STREAMS][lane_index()] = value;
        else if (there && output < STREAMS) pre[row * STREAMS + output] = __fadd_rn(sigmoid(value), epsilon);
        else if (there) mix[output - STREAMS] = __fmul_rn(2.0f, sigmoid(value));
    }
    __syncthreads();
    if (output > 0) return;
    float c[STREAMS][STREAMS];
#pragma unroll
    for (u32 i = 0; i < STREAMS * STREAMS; ++i) c[i / STREAMS][i % STREAMS] = matrix[i][lane_index()];
    balance(c, rounds, epsilon);
    if (!there) return;
#pragma unroll
    for (u32 i = 0; i < STREAMS * STREAMS; ++i) mix[STREAMS + i] = c[i / STREAMS][i % STREAMS];
}

// Grid: rows × pieces of a row, four columns a thread.
extern "C" __global__ void __launch_bounds__(256)
hc_rows_collapse(float* collapsed, u32 collapsed_stride, const float* pre, const float* streams, u32 streams_stride, u32 hidden) {
    u64 row = blockIdx.x;
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (column >= hidden) return;
    const float* from = streams + row * streams_stride + column;
    float4 factors = *(const float4*)(pre + row * STREAMS), x[STREAMS];
    float factor[STREAMS] = {factors.x, factors.y, factors.z, factors.w};
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) x[j] = *(const float4*)(from + (u64)j * hidden);
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) {
        total.x = __fmaf_rn(factor[j], x[j].x, total.x), total.y = __fmaf_rn(factor[j], x[j].y, total.y);
        total.z = __fmaf_rn(factor[j], x[j].z, total.z), total.w = __fmaf_rn(factor[j], x[j].w, total.w);
    }
    *(float4*)(collapsed + row * collapsed_stride + column) = total;
}
