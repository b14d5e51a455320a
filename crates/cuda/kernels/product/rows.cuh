// Matrices that stay as the checkpoint has them: row beside row. Any weight as fp32.
#pragma once
#include "common/bf16.cuh"

// A run of outputs of one form; the same at `product/table.rs`.
struct RowPart {
    const u8 *codes, *scales, *biases;
    // Bytes from one member of a stack to the next, for each of the three.
    u64 code_stride, scale_stride;
    // Form of the codes: 0 bf16, 1 fp16, 2 fp32, 3 FP8, 4 affine; that of affine scales: 0, 1 or 2.
    u32 form, numbers;
    u32 bits, group;
    u32 outputs, first_output;
    // Where output 0 lies in its block of FP8.
    u32 first_row;
    u32 reserved;
};

DEVICE float number_at(const u8 *numbers, u32 kind, u64 index)
{
    if (kind == 2u)
        return ((const float *)numbers)[index];
    u16 bits = ((const u16 *)numbers)[index];
    return kind == 1u ? f16_to_f32(bits) : bf16_to_f32(bits);
}

DEVICE float e4m3_to_f32(u32 code)
{
    // As in `decode/fp8.cuh`: a number that is 2^120 too small.
    return __fmul_rn(__uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20), __uint_as_float(0x7b800000u));
}

// Code `index` of a row's stream of bits.
DEVICE u32 stream_code(const u8 *row, u32 bits, u32 index)
{
    u64 bit = (u64)index * bits;
    const u8 *at = row + (bit >> 3);
    u32 shift = (u32)bit & 7u, code = at[0];
    if (shift + bits > 8u)
        code |= (u32)at[1] << 8;
    if (shift + bits > 16u)
        code |= (u32)at[2] << 16;
    return (code >> shift) & ((1u << bits) - 1u);
}

// Weight (`output`, `input`) of a member: plain exactly, the others with one rounding.
DEVICE float weight_at(const RowPart &part, u32 member, u32 output, u32 input, u32 inputs)
{
    const u8 *codes = part.codes + member * part.code_stride;
    if (part.form <= 2u)
        return number_at(codes, part.form, (u64)output * inputs + input);
    const u8 *scales = part.scales + member * part.scale_stride;
    if (part.form == 3u) {
        u64 block = (u64)((part.first_row + output) / 128u) * ceil_div(inputs, 128u) + input / 128u;
        return __fmul_rn(e4m3_to_f32(codes[(u64)output * inputs + input]), ((const float *)scales)[block]);
    }
    u64 pair = (u64)output * (inputs / part.group) + input / part.group;
    u32 code = stream_code(codes + (u64)output * inputs * part.bits / 8u, part.bits, input);
    const u8 *biases = part.biases + member * part.scale_stride;
    return __fmaf_rn(number_at(scales, part.numbers, pair), (float)code, number_at(biases, part.numbers, pair));
}

// The part of an output; nothing where the output belongs to a part that is kept in another way.
DEVICE const RowPart *part_of(const RowPart *parts, u32 count, u32 output)
{
    for (u32 p = 0; p < count; p++)
        if (output - parts[p].first_output < parts[p].outputs)
            return parts + p;
    return nullptr;
}
