// Where each code of a unit lies. The decoders of `decode/` read what this writes.
#pragma once
#include "common/bf16.cuh"

// The output in the tile and the first input in the unit of a lane's pair.
DEVICE u32 output_of(u32 lane, u32 pair)
{
    return (lane >> 2) + 8u * (pair & 1u);
}

DEVICE u32 input_of(u32 lane, u32 pair)
{
    return 32u * (pair >> 3) + 8u * (lane & 3u) + 4u * (pair >> 2 & 1u) + 2u * (pair >> 1 & 1u);
}

// Word and place in the lower half (or, 16 higher, the upper half) of bit `bit` of a pair's codes.
struct Place {
    u32 word, at;
};

DEVICE Place place_of(u32 bits, u32 pair, u32 bit)
{
    Place place;
    switch (bits) {
    case 3:
    case 5: {
        // Five or three codes a word; the last pair has one bit in each word's top.
        u32 whole = 15u / bits;
        place.word = pair < 15u ? pair / whole : bit;
        place.at = pair < 15u ? pair % whole * bits + bit : 15u;
        return place;
    }
    case 6: {
        // Three words hold two codes each; their top four bits hold two more.
        u32 eighth = pair & 7u, first = pair / 8u * 3u;
        if (eighth < 6u)
            place.word = first + eighth / 2u, place.at = (eighth & 1u) * 6u + bit;
        else if (bit < 4u)
            place.word = first + (eighth - 6u), place.at = 12u + bit;
        else
            place.word = first + 2u, place.at = 12u + 2u * (eighth - 6u) + (bit - 4u);
        return place;
    }
    default: {
        u32 whole = 16u / bits;
        place.word = pair / whole, place.at = pair % whole * bits + bit;
        return place;
    }
    }
}

DEVICE void put_code(u32 *words, u32 bits, u32 pair, u32 half, u32 code)
{
    for (u32 bit = 0; bit < bits; bit++) {
        Place place = place_of(bits, pair, bit);
        words[place.word] |= (code >> bit & 1u) << (place.at + 16u * half);
    }
}

// Byte of a lane's word in its unit: words four at a time, then two, then one.
DEVICE u32 word_offset(u32 bits, u32 lane, u32 word)
{
    u32 fours = bits / 4u * 4u;
    if (word < fours)
        return word / 4u * 512u + lane * 16u + word % 4u * 4u;
    if ((bits & 2u) != 0u && word < fours + 2u)
        return fours * 128u + lane * 8u + (word - fours) * 4u;
    return (bits - 1u) * 128u + lane * 4u;
}
