// Products in fp32: inputs as they are, one fma a weight.
//
// The inputs are cut in slices of 64; a slice's products are one chain from zero, and the slices' sums are added in
// ascending order from the first. Both kernels do this.
#include "product/groups.cuh"
#include "product/rows.cuh"

#define ROW_SLICE 64u
// Rows that a warp takes together in the kernel for few rows.
#define FEW 4u

// A run of eight weights; what lies outside the matrix is zero.
DEVICE void read_eight(const RowPart &part, u32 member, u32 output, u32 input, u32 inputs, float (&w)[8])
{
    u64 at = (u64)output * inputs + input;
    const u8 *codes = part.codes + member * part.code_stride;
    if (part.form == 0u && input + 8u <= inputs && (inputs & 7u) == 0u) {
        uint4 four = *(const uint4 *)(codes + at * 2u);
        w[0] = bf16_low(four.x), w[1] = bf16_high(four.x), w[2] = bf16_low(four.y), w[3] = bf16_high(four.y);
        w[4] = bf16_low(four.z), w[5] = bf16_high(four.z), w[6] = bf16_low(four.w), w[7] = bf16_high(four.w);
    } else if (part.form == 2u && input + 8u <= inputs && (inputs & 3u) == 0u) {
        float4 low = *(const float4 *)(codes + at * 4u), high = *(const float4 *)(codes + at * 4u + 16u);
        w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w;
        w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
    } else {
#pragma unroll
        for (u32 i = 0; i < 8u; i++)
            w[i] = input + i < inputs ? weight_at(part, member, output, input + i, inputs) : 0.0f;
    }
}

DEVICE void read_eight_inputs(const float *x, u32 input, u32 inputs, float (&v)[8])
{
    const float *from = x + input;
    if (input + 8u <= inputs && ((u64)from & 15u) == 0u) {
        float4 low = *(const float4 *)from, high = *(const float4 *)(from + 4);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
        for (u32 i = 0; i < 8u; i++)
            v[i] = input + i < inputs ? from[i] : 0.0f;
    }
}

// Inputs of a whole slice whose weights are asked for together.
#define RUN 32u

// A run of weights as they come, and as numbers.
struct Run {
    uint4 words[RUN / 4u];
};

DEVICE Run read_run(const u8 *weights, bool wide)
{
    Run run;
#pragma unroll
    for (u32 i = 0; i < RUN / 4u; i++)
        if (wide || i < RUN / 8u)
            run.words[i] = ((const uint4 *)weights)[i];
    return run;
}

DEVICE float weight_of(const Run &run, bool wide, u32 i)
{
    const u32 *words = (const u32 *)run.words;
    if (wide)
        return __uint_as_float(words[i]);
    return i & 1u ? bf16_high(words[i >> 1]) : bf16_low(words[i >> 1]);
}

// A whole slice of bf16 or fp32 weights whose rows begin at multiples of 16 bytes.
template <bool WIDE>
DEVICE void whole_slice_sums(const u8 *weights, const float *x, const Columns &columns, float (&acc)[FEW])
{
#pragma unroll
    for (u32 start = 0; start < ROW_SLICE; start += RUN) {
        Run run = read_run(weights + start * (WIDE ? 4u : 2u), WIDE);
#pragma unroll
        for (u32 r = 0; r < FEW; r++) {
            if (r >= columns.count)
                break;
            const float4 *from = (const float4 *)(x + columns.x[r] + start);
            float4 v[RUN / 4u];
#pragma unroll
            for (u32 i = 0; i < RUN / 4u; i++)
                v[i] = from[i];
#pragma unroll
            for (u32 i = 0; i < RUN / 4u; i++) {
                acc[r] = __fmaf_rn(weight_of(run, WIDE, 4u * i), v[i].x, acc[r]);
                acc[r] = __fmaf_rn(weight_of(run, WIDE, 4u * i + 1u), v[i].y, acc[r]);
                acc[r] = __fmaf_rn(weight_of(run, WIDE, 4u * i + 2u), v[i].z, acc[r]);
                acc[r] = __fmaf_rn(weight_of(run, WIDE, 4u * i + 3u), v[i].w, acc[r]);
            }
        }
    }
}

// Whether every row of the group begins at a multiple of 16 bytes.
DEVICE bool rows_aligned(const float *x, const Columns &columns)
{
    bool aligned = true;
#pragma unroll
    for (u32 r = 0; r < FEW; r++)
        aligned = aligned && (r >= columns.count || ((u64)(x + columns.x[r]) & 15u) == 0u);
    return aligned;
}

// One slice of one output for up to FEW rows. Products of missing inputs are left out, not added as zeros.
DEVICE void slice_sums(const RowPart &part, u32 member, u32 output, u32 slice, u32 inputs, const float *x,
                       const Columns &columns, float (&acc)[FEW])
{
#pragma unroll
    for (u32 r = 0; r < FEW; r++)
        acc[r] = 0.0f;
    const u8 *codes = part.codes + member * part.code_stride;
    u64 at = (u64)output * inputs + slice * ROW_SLICE;
    bool whole = (slice + 1u) * ROW_SLICE <= inputs && (inputs & 7u) == 0u && rows_aligned(x, columns);
    if (whole && part.form == 0u)
        return whole_slice_sums<false>(codes + at * 2u, x + slice * ROW_SLICE, columns, acc);
    if (whole && part.form == 2u)
        return whole_slice_sums<true>(codes + at * 4u, x + slice * ROW_SLICE, columns, acc);
    for (u32 input = slice * ROW_SLICE; input < min(inputs, (slice + 1u) * ROW_SLICE); input += 8u) {
        float w[8], v[8];
        read_eight(part, member, output, input, inputs, w);
#pragma unroll
        for (u32 r = 0; r < FEW; r++) {
            if (r >= columns.count)
                break;
            read_eight_inputs(x + columns.x[r], input, inputs, v);
#pragma unroll
            for (u32 i = 0; i < 8u; i++)
                acc[r] = input + i < inputs ? __fmaf_rn(w[i], v[i], acc[r]) : acc[r];
        }
    }
}

// An output a warp, slices side by side; groups of up to FEW rows in the grid's y.
extern "C" __global__ void __launch_bounds__(128)
    product_rows_few(const RowPart *__restrict__ parts, u32 part_count, u32 inputs, const float *__restrict__ x,
                     float *__restrict__ out, GROUP_PARAMETERS)
{
    extern __shared__ float sums[];
    __shared__ Grouping grouping;
    __shared__ Columns columns;
    Groups groups = GROUPS_OF_PARAMETERS;
    u32 group_count = count_groups(groups, grouping);
    u32 slices = ceil_div(inputs, ROW_SLICE), lane = lane_index();
    u32 output = blockIdx.x * (blockDim.x / 32u) + warp_index();
    float *mine = sums + warp_index() * slices * FEW;
    for (u32 group = blockIdx.y; group < group_count; group += gridDim.y) {
        __syncthreads();
        describe_group(groups, grouping, group, columns);
        __syncthreads();
        const RowPart *part = output < outputs ? part_of(parts, part_count, output) : nullptr;
        if (part == nullptr)
            continue;
        for (u32 slice = lane; slice < slices; slice += 32u) {
            float acc[FEW];
            slice_sums(*part, columns.member, output - part->first_output, slice, inputs, x, columns, acc);
#pragma unroll
            for (u32 r = 0; r < FEW; r++)
                mine[slice * FEW + r] = acc[r];
        }
        __syncwarp();
        if (lane < columns.count) {
            float total = mine[lane];
            for (u32 slice = 1; slice < slices; slice++)
                total = __fadd_rn(total, mine[slice * FEW + lane]);
            out[columns.out[lane] + output] = total;
        }
        __syncwarp();
    }
}

// Rows and outputs of a block's tile, and of a thread's.
#define TILE 64u
#define CELL 4u

// Tiles of 64 outputs by 64 rows of one matrix: a slice at a time through shared memory.
extern "C" __global__ void __launch_bounds__(256)
    product_rows_many(const RowPart *__restrict__ parts, u32 part_count, u32 inputs, const float *__restrict__ x,
                      u64 x_stride, float *__restrict__ out, u64 out_stride, u32 rows, u32 outputs)
{
    // Input by input, so that a thread reads its four neighbours at once.
    __shared__ __align__(16) float w[ROW_SLICE][TILE + 4u], v[ROW_SLICE][TILE + 4u];
    u32 first_output = blockIdx.x * TILE, first_row = blockIdx.y * TILE;
    u32 column = threadIdx.x % 16u * CELL, line = threadIdx.x / 16u * CELL;
    float total[CELL][CELL], acc[CELL][CELL];
    for (u32 start = 0; start < inputs; start += ROW_SLICE) {
        u32 length = min(ROW_SLICE, inputs - start);
        for (u32 i = threadIdx.x; i < TILE * ROW_SLICE / 8u; i += blockDim.x) {
            u32 at = i / 8u, input = i % 8u * 8u;
            float eight[8] = {};
            if (first_output + at < outputs && input < length) {
                const RowPart *part = part_of(parts, part_count, first_output + at);
                if (part != nullptr)
                    read_eight(*part, 0u, first_output + at - part->first_output, start + input, inputs, eight);
            }
#pragma unroll
            for (u32 k = 0; k < 8u; k++)
                w[input + k][at] = eight[k], eight[k] = 0.0f;
            if (first_row + at < rows && input < length)
                read_eight_inputs(x + (first_row + at) * x_stride, start + input, inputs, eight);
#pragma unroll
            for (u32 k = 0; k < 8u; k++)
                v[input + k][at] = eight[k];
        }
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < CELL * CELL; i++)
            acc[i / CELL][i % CELL] = 0.0f;
        for (u32 k = 0; k < length; k++) {
            float4 a = *(const float4 *)&w[k][column], b = *(const float4 *)&v[k][line];
            float wide[CELL] = {a.x, a.y, a.z, a.w}, tall[CELL] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (u32 i = 0; i < CELL * CELL; i++)
                acc[i / CELL][i % CELL] = __fmaf_rn(wide[i % CELL], tall[i / CELL], acc[i / CELL][i % CELL]);
        }
#pragma unroll
        for (u32 i = 0; i < CELL * CELL; i++) {
            float sum = acc[i / CELL][i % CELL];
            total[i / CELL][i % CELL] = start == 0u ? sum : __fadd_rn(total[i / CELL][i % CELL], sum);
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < CELL * CELL; i++) {
        u32 row = first_row + line + i / CELL, output = first_output + column + i % CELL;
        if (row < rows && output < outputs && part_of(parts, part_count, output) != nullptr)
            out[row * out_stride + output] = total[i / CELL][i % CELL];
    }
}
