// Rearranges a matrix at upload, from the checkpoint's rows to units and entries (`product/encoding.cuh`), bit for bit.
#include "product/place.cuh"
#include "product/rows.cuh"

// One lane's words of one unit a thread. `bits` is 16 for bf16, 8 for FP8. Codes outside the matrix are zeros.
KERNEL product_arrange_codes(u8 *__restrict__ to, const u8 *__restrict__ from, u32 bits, u32 outputs, u32 inputs, u64 total)
{
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= total)
        return;
    u32 lane = (u32)thread & 31u, units = ceil_div(inputs, 64u);
    u64 unit = thread >> 5;
    u32 tile = (u32)(unit / units), first_input = (u32)(unit % units) * 64u;
    u64 row_bytes = (u64)inputs * bits / 8u;
    u32 words[16] = {};
    for (u32 pair = 0; pair < 16u; pair++) {
        u32 output = tile * 16u + output_of(lane, pair), input = first_input + input_of(lane, pair);
        for (u32 half = 0; half < 2u; half++) {
            if (output >= outputs || input + half >= inputs)
                continue;
            u32 code = stream_code(from + output * row_bytes, bits, input + half);
            put_code(words, bits, pair, half, code);
        }
    }
    u8 *place = to + unit * (128u * bits);
    for (u32 word = 0; word < bits; word++)
        *(u32 *)(place + word_offset(bits, lane, word)) = words[word];
}

// One output's place in one entry a thread: `fold` bf16 or fp32 numbers. `kind`: 0 bf16, 1 fp16, 2 fp32 pairs; 3 FP8.
KERNEL product_arrange_scales(u8 *__restrict__ to, const u8 *__restrict__ scales, const u8 *__restrict__ biases, u32 kind,
                              u32 outputs, u32 groups, u32 entries, u32 first_row, u64 total)
{
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= total)
        return;
    u32 row = (u32)thread & 15u, g = row & 7u, second = row >> 3;
    u64 entry = thread >> 4;
    u32 output = (u32)(entry / entries) * 16u + row, group = (u32)(entry % entries);
    bool inside = output < outputs && group < groups;
    if (kind == 3u) {
        u64 from = (u64)((first_row + output) / 128u) * groups + group;
        ((float *)(to + entry * 64u))[g * 2u + second] = inside ? ((const float *)scales)[from] : 0.0f;
        return;
    }
    u64 from = (u64)output * groups + group;
    for (u32 bias = 0; bias < 2u; bias++) {
        const u8 *numbers = bias ? biases : scales;
        u32 place = g * 4u + bias * 2u + second;
        if (kind == 0u) {
            ((u16 *)(to + entry * 64u))[place] = inside ? ((const u16 *)numbers)[from] : (u16)0;
        } else {
            float number = 0.0f;
            if (inside)
                number = kind == 1u ? f16_to_f32(((const u16 *)numbers)[from]) : ((const float *)numbers)[from];
            ((float *)(to + entry * 128u))[place] = number;
        }
    }
}
