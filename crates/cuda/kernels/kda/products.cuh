// A head's products with two matrices of 128 inputs, eight tokens at a time: sixteen tiles, one a warp. The order of the sums is
// that of product/stream.cuh.
#pragma once
#include "common/base.cuh"
#include "product/encoding.cuh"

// Units of a tile, and the most bytes of its scales.
#define TILE_UNITS 2
#define TILE_SCALES 256
// Tiles of a head of one matrix.
#define HEAD_TILES 8

// Both matrices have one part of the same encoding; as in src/op/step.rs.
struct Products {
    const float* x[2];
    const u8* codes[2];
    const u8* scales[2];
    u64 x_stride;
    u32 encoding, share;

    __device__ __forceinline__ u32 tile_bytes() const {
        u32 bits = encoding & 15;
        return (bits == 0 ? 16 : bits) * 128 * TILE_UNITS;
    }
};

// Starts copying this warp's tile. A warp waits for its own alone.
DEVICE void request_tile(u8* room, const Products& p, u32 head) {
    bool second = warp_index() >= HEAD_TILES;
    u32 tile = head * HEAD_TILES + warp_index() % HEAD_TILES, bytes = p.tile_bytes(), lane = lane_index() * 16;
    const u8* codes = (second ? p.codes[1] : p.codes[0]) + (u64)tile * bytes;
    room += warp_index() * (bytes + TILE_SCALES);
    for (u32 at = lane; at < bytes; at += 512) copy_async_16(room + at, codes + at);
    u32 scales = p.encoding == 0 ? 0 : 2 * TILE_UNITS * 64 >> p.share;
    if (lane < scales) copy_async_16(room + bytes + lane, (second ? p.scales[1] : p.scales[0]) + (u64)tile * scales + lane);
    copy_async_commit();
}

// A lane's inputs of a token (its column of the instruction), rounded; zeros where there is none.
DEVICE void read_inputs(uint4 (&x)[2 * TILE_UNITS], const float* row) {
#pragma unroll
    for (u32 half = 0; half < 2 * TILE_UNITS; ++half) {
        x[half] = make_uint4(0, 0, 0, 0);
        if (!row) continue;
        const float4* from = (const float4*)(row + half * 32 + lane_index() % 4 * 8);
        float4 low = from[0], high = from[1];
        x[half] = make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y),
                             pack_bf16(high.z, high.w));
    }
}

template <class E> DEVICE void multiply_tile(float (&acc)[4], const u8* tile, const uint4 (&x)[2 * TILE_UNITS], u32 share) {
#pragma unroll
    for (u32 unit = 0; unit < TILE_UNITS; ++unit) {
        u32 words[E::WORDS], pairs[16];
        read_words<E::WORDS>(tile + unit * E::UNIT, lane_index(), words);
        E::Decoder::decode(words, pairs);
        const u8* scales = tile + TILE_UNITS * E::UNIT;
        weigh_unit<E>(pairs, scales + (2 * unit >> share) * E::ENTRY, scales + (2 * unit + 1 >> share) * E::ENTRY);
        multiply_half(acc, pairs, x[2 * unit]);
        multiply_half(acc, pairs + 8, x[2 * unit + 1]);
    }
}

// This warp's tile of the products: outputs of two halves of eight, tokens of two columns.
DEVICE void multiply_head(float (&acc)[4], const u8* room, const Products& p, const float* row) {
    uint4 x[2 * TILE_UNITS];
    read_inputs(x, row);
    const u8* tile = room + warp_index() * (p.tile_bytes() + TILE_SCALES);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) acc[i] = 0.0f;
    switch (p.encoding & 15) {
    case 0: return multiply_tile<Bf16Encoding>(acc, tile, x, p.share);
    case 4: return multiply_tile<AffineEncoding<4>>(acc, tile, x, p.share);
    case 5: return multiply_tile<AffineEncoding<5>>(acc, tile, x, p.share);
    case 6: return multiply_tile<AffineEncoding<6>>(acc, tile, x, p.share);
    case 8: return multiply_tile<AffineEncoding<8>>(acc, tile, x, p.share);
    }
}
