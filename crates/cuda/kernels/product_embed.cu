// Rows of a table, decoded exactly.
#include "product/encoding.cuh"
#include "product/place.cuh"
#include "product/rows.cuh"

// The code of (`output`, `input`) among units.
DEVICE u32 unit_code(const u8 *codes, u32 bits, u32 units, u32 output, u32 input)
{
    u32 row = output & 15u, inside = input & 63u;
    const u8 *unit = codes + ((u64)(output >> 4) * units + (input >> 6)) * (128u * bits);
    u32 lane = (row & 7u) * 4u + (inside >> 3 & 3u);
    u32 pair = (inside >> 5) * 8u + (inside >> 2 & 1u) * 4u + (inside >> 1 & 1u) * 2u + (row >> 3);
    u32 half = input & 1u, code = 0u;
    for (u32 bit = 0; bit < bits;) {
        Place place = place_of(bits, pair, bit);
        u32 word = *(const u32 *)(unit + word_offset(bits, lane, place.word)) >> (place.at + 16u * half);
        // Fields are whole but for those at the words' tops.
        bool split = (bits == 3u || bits == 5u) ? pair == 15u : bits == 6u && (pair & 7u) >= 6u;
        u32 length = !split ? bits : bits == 6u ? (bit < 4u ? 4u : 2u) : 1u;
        code |= (word & ((1u << length) - 1u)) << bit;
        bit += length;
    }
    return code;
}

// Encodings are those of `product/table.rs`: 0 bf16, 1 FP8, else bits, with 16 for groups of 32 and 32 for fp32 scales.
KERNEL product_embed_units(const Part *__restrict__ parts, u32 part_count, u32 inputs, const u32 *__restrict__ tokens,
                           float *__restrict__ out, u64 out_stride, u32 table_rows)
{
    u32 token = min(tokens[blockIdx.x], table_rows - 1u), p = 0;
    while (p + 1u < part_count && token >= parts[p + 1u].first_output)
        p++;
    const Part &part = parts[p];
    u32 output = token - part.first_output, units = ceil_div(inputs, 64u);
    u32 bits = part.encoding == 0u ? 16u : part.encoding == 1u ? 8u : part.encoding & 15u;
    u32 g = output & 7u, second = output >> 3 & 1u;
    for (u32 input = blockIdx.y * blockDim.x + threadIdx.x; input < inputs; input += gridDim.y * blockDim.x) {
        u32 code = unit_code(part.codes, bits, units, output, input);
        float value;
        if (part.encoding == 0u) {
            value = bf16_to_f32((u16)code);
        } else {
            u32 entry = input / 32u >> part.share;
            u64 at = (u64)(output >> 4) * part.entries + entry;
            if (part.encoding == 1u) {
                value = __fmul_rn(e4m3_to_f32(code), ((const float *)(part.scales + at * 64u))[g * 2u + second]);
            } else {
                u32 kind = (part.encoding & 32u) ? 2u : 0u;
                const u8 *numbers = part.scales + at * (kind ? 128u : 64u);
                float scale = number_at(numbers, kind, g * 4u + second);
                value = __fmaf_rn(scale, (float)code, number_at(numbers, kind, g * 4u + 2u + second));
            }
        }
        out[blockIdx.x * out_stride + input] = value;
    }
}

KERNEL product_embed_rows(const RowPart *__restrict__ parts, u32 part_count, u32 inputs, const u32 *__restrict__ tokens,
                          float *__restrict__ out, u64 out_stride, u32 table_rows)
{
    u32 token = min(tokens[blockIdx.x], table_rows - 1u);
    const RowPart *part = part_of(parts, part_count, token);
    if (part == nullptr)
        return;
    for (u32 input = blockIdx.y * blockDim.x + threadIdx.x; input < inputs; input += gridDim.y * blockDim.x)
        out[blockIdx.x * out_stride + input] = weight_at(*part, 0u, token - part->first_output, input, inputs);
}
