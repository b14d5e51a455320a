// The delta-rule recurrence of a KDA layer, token by token: exact under any cut into forwards.
//
// A value column of a head's state never meets another one. With the state M before a token, a = exp(g), and d the change:
//   r = (k a)ᵀ M;   d = beta (v - r);   o = (q a)ᵀ M + (q·k) d;   M = a M + k dᵀ
// so that both dot products read the same M and their sums travel through the warp together.
#include "common/base.cuh"
#include "common/parts.cuh"
#include "kda/cells.cuh"

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

// ---- Heads of 128: the state in registers.

#define SCAN_THREADS 256
// Columns of a block: eight for each warp.
#define COLUMNS 64

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

    __device__ __forceinline__ void store(Stage<COLUMNS>& stage, u32 slot) const {
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

// Grid: groups of 64 columns × heads × parts.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 1)
kda_scan_128(float* out, u32 out_stride, const float* qkv, u32 qkv_stride, const float* decay, u32 decay_stride,
             const float* beta, u32 beta_stride, u32 heads, u32 dim, const KdaPart* parts) {
    __shared__ Stage<COLUMNS> stages[2];
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
        const Stage<COLUMNS>& stage = stages[first / STAGE & 1];
        u32 ahead = first + STAGE + warp;
        if (ahead < tokens) fetched.load(token_of(rows, part, ahead, head), column);
        u32 count = min(STAGE, tokens - first);
        for (u32 slot = 0; slot < count;) {
            u32 end = first + slot < stands ? min(count, stands - first) : count;
#pragma unroll 4
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
