// Appends rows to a DSA layer's cache: latents at their positions, and the key of each pool that becomes complete.
#include "append/members.cuh"
#include "common/base.cuh"
#include "common/bf16.cuh"
#include "common/parts.cuh"

// Grid: a block for each row. The block of the row that completes a part's first pool also moves the ring (or that of row 0,
// when none is completed): only that pool reads it, channel by channel, before it is written.
KERNEL dsa_append(const float* latents, u32 latents_stride, const float* keys, u32 keys_stride, const float* gates,
                  u32 gates_stride, const float* ape, u32 rank, u32 width, u32 kpool, u32 page_rows, u32 ring_rows,
                  const DsaPart* parts, const u32* row_parts, u16* const* latent_pages, u16* const* key_pages) {
    grid_release();
    grid_wait();
    u64 row = blockIdx.x;
    u32 index = row_parts[row];
    if (index == NO_PART) return;
    DsaPart part = parts[index];
    u32 local = row - part.first_row, position = part.position + local;
    u16* page = latent_pages[part.first_page + position / page_rows] + (u64)(position % page_rows) * rank;
    for (u32 i = threadIdx.x; i < rank; i += blockDim.x) page[i] = f32_to_bf16(latents[row * latents_stride + i]);
    if (!keys) return;
    bool completes = (position + 1) % kpool == 0;
    // The row that completes the first pool, when the part has one.
    u32 first_complete = kpool - 1 - part.position % kpool;
    bool moves_ring = local == (first_complete < part.rows ? first_complete : 0);
    if (!completes && !moves_ring) return;
    Members members = {keys + (u64)part.first_row * keys_stride, gates + (u64)part.first_row * gates_stride,
                       keys_stride, gates_stride, part.ring, ring_rows, width, part.position};
    for (u32 channel = threadIdx.x; channel < width; channel += blockDim.x) {
        if (completes) {
            u32 pool = position / kpool, pools = page_rows / kpool;
            u16* to = key_pages[part.first_page + pool / pools] + (u64)(pool % pools) * width;
            to[channel] = f32_to_bf16(pool_key(members, ape, pool * kpool, kpool, channel));
        }
        if (!moves_ring) continue;
        for (u32 from = part.rows - min(part.rows, ring_rows); from < part.rows; ++from) {
            float* slot = part.ring + (u64)((part.position + from) % ring_rows) * 2 * width + channel;
            slot[0] = members.key(part.position + from, channel);
            slot[width] = members.gate(part.position + from, channel);
        }
    }
}
