// The delta-rule recurrence of a KDA layer, token by token: exact under any cut into forwards.
//
// A value column of a head's state never meets another one. With the state M before a token, a = exp(g), and d the change:
//   r = (k a)ᵀ M;   d = beta (v - r);   o = (q a)ᵀ M + (q·k) d;   M = a M + k dᵀ
// so that both dot products read the same M and their sums travel through the warp together.
#include "common/base.cuh"
#include "common/parts.cuh"

// The operation's rows. `log_width` values for each logged token: k, v, decay factors, beta.
struct ScanRows {
    float* out;
    const float* qkv;
    const float* decay;
    const float* beta;
    u64 out_stride, qkv_stride, decay_stride, beta_stride;
    u32 heads, dim;

    __device__ __forceinline__ u32 channels() const { return heads * dim; }
};

// What one token brings to a head. `q` and `out` are null for a logged token: it only changes the state.
struct Token {
    const float* q;
    const float* k;
    const float* v;
    const float* decay;
    const float* beta;
    float* out;
};

// Token `token` of a part's run: the logged ones, then the rows.
DEVICE Token token_of(const ScanRows& rows, const KdaPart& part, u32 token, u32 head) {
    u64 channels = rows.channels(), at = head * rows.dim;
    if (token < part.logged) {
        const float* log = part.log + token * (3 * channels + rows.heads);
        return {nullptr, log + at, log + channels + at, log + 2 * channels + at, log + 3 * channels + head, nullptr};
    }
    u64 row = part.first_row + token - part.logged;
    const float* q = rows.qkv + row * rows.qkv_stride + at;
    return {q,
            q + channels,
            q + 2 * channels,
            rows.decay + row * rows.decay_stride + at,
            rows.beta + row * rows.beta_stride + head,
            rows.out + row * rows.out_stride + at};
}

// ---- Heads of 128: sixteen lanes share a group of four columns, eight keys each.

#define DIM 128
#define SCAN_THREADS 256
// Columns of a block: eight for each warp.
#define COLUMNS 64
// Tokens that are staged at once, one by each warp.
#define STAGE 8

struct Stage {
    // k·a, q·a, k, a.
    float vectors[STAGE][4][DIM];
    float values[STAGE][COLUMNS];
    // beta, q·k.
    float2 scalars[STAGE];
};

// A token on its way from device memory to a stage: each lane has every 32nd value.
struct Fetched {
    float q[4], k[4], decay[4], v[2], beta;

    __device__ __forceinline__ void load(const Token& token, u32 column) {
        u32 lane = lane_index();
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            k[i] = token.k[lane + 32 * i];
            decay[i] = token.decay[lane + 32 * i];
            q[i] = token.q ? token.q[lane + 32 * i] : 0.0f;
        }
        v[0] = token.v[column + lane];
        v[1] = token.v[column + lane + 32];
        beta = *token.beta;
    }

    __device__ __forceinline__ void store(Stage& stage, u32 slot) const {
        u32 lane = lane_index();
        float dot = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 key = lane + 32 * i;
            stage.vectors[slot][0][key] = __fmul_rn(k[i], decay[i]);
            stage.vectors[slot][1][key] = __fmul_rn(q[i], decay[i]);
            stage.vectors[slot][2][key] = k[i];
            stage.vectors[slot][3][key] = decay[i];
            dot = __fmaf_rn(q[i], k[i], dot);
        }
        stage.values[slot][lane] = v[0];
        stage.values[slot][lane + 32] = v[1];
        dot = warp_sum(dot);
        if (lane == 0) stage.scalars[slot] = make_float2(beta, dot);
    }
};

// A thread's place: key lane `l` has keys 4 l .. 4 l + 3 and 64 more; register j is column j ^ flip of the group of four, so
// that what a lane sends in a fold is always in the upper registers and nothing is selected.
struct Place {
    u32 key_lane, group, flip, role;

    __device__ __forceinline__ Place() {
        u32 lane = lane_index();
        key_lane = lane & 15;
        group = warp_index() * 8 + (lane >> 4) * 4;
        flip = (key_lane & 1) << 1 | (key_lane >> 1 & 1);
        role = key_lane >> 2 & 1;
    }

    // The key of register row `i`.
    __device__ __forceinline__ u32 key(u32 i) const { return key_lane * 4 + (i & 3) + (i >> 2) * 64; }

    // The lane that holds r of this lane's register column `j`.
    __device__ __forceinline__ u32 source(u32 j) const {
        u32 column = j ^ flip;
        return (lane_index() & 16) | (column >> 1 & 1) | (column & 1) << 1;
    }
};

DEVICE void swap_if(bool swap, float& a, float& b) {
    float first = swap ? b : a;
    b = swap ? a : b;
    a = first;
}

// Puts columns in a thread's order, and back: the exchange is its own inverse.
DEVICE void reorder(float (&columns)[4], u32 flip) {
    swap_if(flip & 2, columns[0], columns[2]);
    swap_if(flip & 2, columns[1], columns[3]);
    swap_if(flip & 1, columns[0], columns[1]);
    swap_if(flip & 1, columns[2], columns[3]);
}

// A thread's part of the state.
struct Cells {
    float m[8][4];

    __device__ __forceinline__ void load(const float* state, const Place& place) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            float4 four = *(const float4*)(state + place.key(i) * DIM + place.group);
            m[i][0] = four.x, m[i][1] = four.y, m[i][2] = four.z, m[i][3] = four.w;
            reorder(m[i], place.flip);
        }
    }

    __device__ __forceinline__ void store(float* state, const Place& place) const {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            float four[4] = {m[i][0], m[i][1], m[i][2], m[i][3]};
            reorder(four, place.flip);
            *(float4*)(state + place.key(i) * DIM + place.group) = make_float4(four[0], four[1], four[2], four[3]);
        }
    }
};

// A thread's eight values of a staged vector.
DEVICE void read_keys(float (&out)[8], const float* vector, u32 key_lane) {
    float4 low = *(const float4*)(vector + key_lane * 4);
    float4 high = *(const float4*)(vector + key_lane * 4 + 64);
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

// Σ over a thread's keys for each of its columns.
DEVICE void partial_dots(float (&sums)[4], const Cells& cells, const float* vector, u32 key_lane) {
    float factors[8];
    read_keys(factors, vector, key_lane);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) sums[j] = __fmul_rn(factors[0], cells.m[0][j]);
#pragma unroll
    for (u32 i = 1; i < 8; ++i)
#pragma unroll
        for (u32 j = 0; j < 4; ++j) sums[j] = __fmaf_rn(factors[i], cells.m[i][j], sums[j]);
}

// One token through a thread's cells; a thread that `answers` writes its column to `out`.
DEVICE void step(Cells& cells, const Stage& stage, u32 slot, const Place& place, float* out, bool answers) {
    float mine[4], other[4];
    // Role 0 ends with r of column `flip`, role 1 with the same column of (q a)ᵀ M.
    partial_dots(mine, cells, stage.vectors[slot][place.role], place.key_lane);
    partial_dots(other, cells, stage.vectors[slot][place.role ^ 1], place.key_lane);
#pragma unroll
    for (u32 j = 0; j < 2; ++j) {
        mine[j] = __fadd_rn(mine[j], __shfl_xor_sync(ALL_LANES, mine[j + 2], 1));
        other[j] = __fadd_rn(other[j], __shfl_xor_sync(ALL_LANES, other[j + 2], 1));
    }
    mine[0] = __fadd_rn(mine[0], __shfl_xor_sync(ALL_LANES, mine[1], 2));
    other[0] = __fadd_rn(other[0], __shfl_xor_sync(ALL_LANES, other[1], 2));
    float sum = __fadd_rn(mine[0], __shfl_xor_sync(ALL_LANES, other[0], 4));
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 8));

    float2 scalars = stage.scalars[slot];
    float change = __fmul_rn(scalars.x, __fadd_rn(stage.values[slot][place.group + place.flip], -sum));
    float changes[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) changes[j] = __shfl_sync(ALL_LANES, change, place.source(j));
    float k[8], decay[8];
    read_keys(k, stage.vectors[slot][2], place.key_lane);
    read_keys(decay, stage.vectors[slot][3], place.key_lane);
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
#pragma unroll
        for (u32 j = 0; j < 4; ++j) cells.m[i][j] = __fmaf_rn(k[i], changes[j], __fmul_rn(decay[i], cells.m[i][j]));
    if (answers) *out = __fmaf_rn(scalars.y, changes[0], sum);
}

// Grid: groups of 64 columns × heads × parts.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 2)
kda_scan_128(float* out, u32 out_stride, const float* qkv, u32 qkv_stride, const float* decay, u32 decay_stride,
             const float* beta, u32 beta_stride, u32 heads, u32 dim, const KdaPart* parts) {
    __shared__ Stage stages[2];
    ScanRows rows = {out, qkv, decay, beta, out_stride, qkv_stride, decay_stride, beta_stride, heads, DIM};
    KdaPart part = parts[blockIdx.z];
    u32 head = blockIdx.y, column = blockIdx.x * COLUMNS, warp = warp_index();
    u32 stands = part.logged + part.sure, tokens = stands + part.drafts;
    if (tokens == 0) return;
    Place place;
    float* state = part.state + (u64)head * DIM * DIM + column;
    Fetched fetched;
    if (warp < tokens) fetched.load(token_of(rows, part, warp, head), column);
    Cells cells;
    cells.load(state, place);
    if (warp < tokens) fetched.store(stages[0], warp);
    __syncthreads();
    // Lanes 4 to 7 of sixteen have (q a)ᵀ M, one column each. Logged tokens have no row: nothing is written where they point.
    bool answers = (place.key_lane & 12) == 4;
    float* to = out + ((u64)part.first_row - part.logged) * out_stride + head * DIM + column + place.group + place.flip;
    for (u32 first = 0; first < tokens; first += STAGE) {
        const Stage& stage = stages[first / STAGE & 1];
        u32 ahead = first + STAGE + warp;
        if (ahead < tokens) fetched.load(token_of(rows, part, ahead, head), column);
        u32 count = min(STAGE, tokens - first);
        for (u32 slot = 0; slot < count;) {
            u32 end = first + slot < stands ? min(count, stands - first) : count;
            for (; slot < end; ++slot) {
                step(cells, stage, slot, place, to, answers && first + slot >= part.logged);
                to += out_stride;
            }
            // Drafts leave no trace: the state stands before the first of them.
            if (first + slot == stands) cells.store(state, place);
        }
        if (ahead < tokens) fetched.store(stages[(first / STAGE & 1) ^ 1], warp);
        __syncthreads();
    }
}

// ---- Heads of any size: a thread for each column, the state in shared memory.

// Grid: groups of 32 columns × heads × parts; a warp. Dynamic shared memory: dim × 32 values.
KERNEL kda_scan(float* out, u32 out_stride, const float* qkv, u32 qkv_stride, const float* decay, u32 decay_stride,
                const float* beta, u32 beta_stride, u32 heads, u32 dim, const KdaPart* parts) {
    extern __shared__ float scan_cells[];
    ScanRows rows = {out, qkv, decay, beta, out_stride, qkv_stride, decay_stride, beta_stride, heads, dim};
    KdaPart part = parts[blockIdx.z];
    u32 head = blockIdx.y, column = blockIdx.x * 32 + threadIdx.x;
    if (column >= dim) return;
    u32 stands = part.logged + part.sure, tokens = stands + part.drafts;
    float* state = part.state + (u64)head * dim * dim + column;
    float* cells = scan_cells + threadIdx.x;
    for (u32 key = 0; key < dim; ++key) cells[key * 32] = state[key * dim];
    for (u32 at = 0; at < tokens; ++at) {
        Token token = token_of(rows, part, at, head);
        float predicted = 0.0f, read = 0.0f;
        for (u32 key = 0; key < dim; ++key) {
            float value = __fmul_rn(cells[key * 32], token.decay[key]);
            cells[key * 32] = value;
            predicted = __fmaf_rn(token.k[key], value, predicted);
        }
        float change = __fmul_rn(*token.beta, __fadd_rn(token.v[column], -predicted));
        for (u32 key = 0; key < dim; ++key) {
            float value = __fmaf_rn(token.k[key], change, cells[key * 32]);
            cells[key * 32] = value;
            if (token.q) read = __fmaf_rn(token.q[key], value, read);
        }
        if (token.out) token.out[column] = read;
        if (at + 1 == stands) {
            for (u32 key = 0; key < dim; ++key) state[key * dim] = cells[key * 32];
        }
    }
}

// Logs what the draft rows would fold. A launch of its own: blocks of a scan read the log that this one replaces.
// Grid: pieces of a row × drafts × parts.
KERNEL kda_log(const float* qkv, u32 qkv_stride, const float* decay, u32 decay_stride, const float* beta, u32 beta_stride,
               u32 channels, u32 heads, const KdaPart* parts) {
    KdaPart part = parts[blockIdx.z];
    u32 draft = blockIdx.y;
    if (draft >= part.drafts) return;
    u64 row = part.first_row + part.sure + draft;
    u32 width = 3 * channels + heads;
    float* log = part.log + (u64)draft * width;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x) {
        if (i < 2 * channels) {
            log[i] = qkv[row * qkv_stride + channels + i];
        } else if (i < 3 * channels) {
            log[i] = decay[row * decay_stride + i - 2 * channels];
        } else {
            log[i] = beta[row * beta_stride + i - 3 * channels];
        }
    }
}
