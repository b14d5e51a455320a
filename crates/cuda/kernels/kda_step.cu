// A KDA layer between its products, for few rows, in one launch: convolution, what the scan needs of a row, the scan, the gated
// norm, the log of drafts; with the products that make decays and gates of 128 inputs, or without. A block has a head of a
// sequence, so that nothing is shared between blocks. Each value is made by the formulas and in the order of conv.cu,
// norms.cu, scan.cu and product/stream.cuh.
#include "common/base.cuh"
#include "common/factors.cuh"
#include "common/maths.cuh"
#include "common/parts.cuh"
#include "kda/cells.cuh"
#include "kda/products.cuh"

#define THREADS 512
#define TAPS 4
#define BACK (TAPS - 1)
// Rows of the window that a thread moves together.
#define MOVED 4

struct Layer {
    float* out;
    float* qkv;
    float* decay;
    float* beta;
    const float* u;
    float* gate;
    u64 out_stride, qkv_stride, decay_stride, beta_stride, u_stride, gate_stride;
    u32 heads;

    __device__ __forceinline__ u32 channels() const { return heads * DIM; }
    __device__ __forceinline__ u32 log_width() const { return 3 * channels() + heads; }
};

// How decays are made of a head's f.
struct Decay {
    float bias[DIM];
    float rate, bound;
    bool bounded;
};

// Tokens as they come: q, k, v after the convolution (k of a logged token is ready), decay factors.
struct Raw {
    float values[STAGE][4][DIM];
    float beta[STAGE];
};

// A thread's channel: those of q, k and v, then the decay's.
struct Channel {
    u32 kind, lane, index;
    float taps[TAPS], past[BACK], bias, rate;

    __device__ __forceinline__ Channel(u32 head, u32 channels) {
        kind = threadIdx.x / DIM, lane = threadIdx.x % DIM, index = head * DIM + lane;
        if (kind < 3) index += kind * channels;
    }
};

// The value `source` rows after the window's first row, of which `before` are in the window.
DEVICE float value_at(const Layer& layer, const KdaPart& part, u32 index, u32 source) {
    u32 before = BACK + part.logged;
    if (source < before) return part.window[(u64)source * 3 * layer.channels() + index];
    return layer.u[(part.first_row + source - before) * layer.u_stride + index];
}

// Tokens `first..first + count` of a part into `raw`, by all threads: a channel each. With products they make f of fresh tokens.
template <bool PRODUCTS>
DEVICE void fill_raw(Raw& raw, Channel& channel, const Layer& layer, const KdaPart& part, u32 head, u32 first, u32 count,
                     bool bounded, float bound) {
    float fresh[STAGE];
#pragma unroll
    for (u32 slot = 0; slot < STAGE; ++slot) {
        fresh[slot] = 0.0f;
        if (slot >= count) continue;
        u32 token = first + slot;
        u64 row = part.first_row + token - part.logged;
        if (token < part.logged) {
            // A log has k, v, decay factors.
            if (channel.kind > 0)
                fresh[slot] = part.log[(u64)token * layer.log_width() + (channel.kind - 1) * layer.channels() +
                                       head * DIM + channel.lane];
        } else if (!PRODUCTS || channel.kind < 3) {
            fresh[slot] = channel.kind < 3 ? layer.u[row * layer.u_stride + channel.index]
                                           : layer.decay[row * layer.decay_stride + channel.index];
        }
    }
    if (threadIdx.x < count) {
        u32 token = first + threadIdx.x;
        u64 row = part.first_row + token - part.logged;
        raw.beta[threadIdx.x] = token < part.logged
                                    ? part.log[(u64)token * layer.log_width() + 3 * layer.channels() + head]
                                    : sigmoid(layer.beta[row * layer.beta_stride + head]);
    }
#pragma unroll
    for (u32 slot = 0; slot < STAGE; ++slot) {
        if (slot >= count) break;
        float value = fresh[slot];
        if (first + slot >= part.logged) {
            if (PRODUCTS && channel.kind == 3) continue;
            if (channel.kind < 3) {
                float total = 0.0f;
#pragma unroll
                for (u32 j = 0; j < BACK; ++j) total = __fmaf_rn(channel.taps[j], channel.past[j], total);
                total = __fmaf_rn(channel.taps[BACK], value, total);
#pragma unroll
                for (u32 j = 0; j + 1 < BACK; ++j) channel.past[j] = channel.past[j + 1];
                channel.past[BACK - 1] = value;
                value = silu(total);
            } else {
                value = decay_factor(value, channel.bias, channel.rate, bounded, bound);
            }
        }
        raw.values[slot][channel.kind][channel.lane] = value;
    }
}

// The window moves to the last rows before the state, then the drafts. A row comes from a later one, so what is read before a
// group is written is what stood there.
DEVICE void move_window(const Layer& layer, const KdaPart& part, u32 index) {
    u32 count = BACK + part.drafts, shift = part.logged + part.sure;
    for (u32 first = 0; first < count; first += MOVED) {
        float value[MOVED];
#pragma unroll
        for (u32 i = 0; i < MOVED; ++i) value[i] = first + i < count ? value_at(layer, part, index, first + i + shift) : 0.0f;
#pragma unroll
        for (u32 i = 0; i < MOVED; ++i)
            if (first + i < count) part.window[(u64)(first + i) * 3 * layer.channels() + index] = value[i];
    }
}

// Σ x² of a head over a warp.
DEVICE float squares_of(const float (&x)[4]) {
    float chain = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) chain = __fmaf_rn(x[i], x[i], chain);
    return warp_sum(chain);
}

// One token of `raw` into the stage by a warp. What the operations leave in memory is left there.
template <bool PRODUCTS>
DEVICE void stage_token(Stage<DIM>& stage, const Raw& raw, const Decay& made, const Layer& layer, const KdaPart& part, u32 head,
                        u32 token, u32 slot) {
    u32 lane = lane_index();
    float q[4], k[4], v[4], a[4], dot = 0.0f, beta = raw.beta[slot];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 key = lane + 32 * i;
        q[i] = raw.values[slot][0][key], k[i] = raw.values[slot][1][key];
        v[i] = raw.values[slot][2][key], a[i] = raw.values[slot][3][key];
    }
    if (token >= part.logged) {
        float q_factor = unit_factor(squares_of(q), __fdiv_rn(1.0f, __fsqrt_rn((float)DIM)));
        float k_factor = unit_factor(squares_of(k), 1.0f);
        u32 row = token - part.logged, channels = layer.channels();
        float* qkv = layer.qkv + (part.first_row + row) * layer.qkv_stride + head * DIM;
        float* decay = layer.decay + (part.first_row + row) * layer.decay_stride + head * DIM;
        bool drafted = row >= part.sure;
        float* log = part.log + (u64)(row - part.sure) * layer.log_width() + head * DIM;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 key = lane + 32 * i;
            q[i] = __fmul_rn(q[i], q_factor), k[i] = __fmul_rn(k[i], k_factor);
            if (PRODUCTS) a[i] = decay_factor(a[i], made.bias[key], made.rate, made.bounded, made.bound);
            qkv[key] = q[i], qkv[channels + key] = k[i], qkv[2 * channels + key] = v[i], decay[key] = a[i];
            if (drafted) log[key] = k[i], log[channels + key] = v[i], log[2 * channels + key] = a[i];
        }
        if (lane == 0) {
            layer.beta[(part.first_row + row) * layer.beta_stride + head] = beta;
            if (drafted) part.log[(u64)(row - part.sure) * layer.log_width() + 3 * channels + head] = beta;
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 key = lane + 32 * i;
        stage.vectors[slot][0][key] = __fmul_rn(k[i], a[i]);
        stage.vectors[slot][1][key] = __fmul_rn(q[i], a[i]);
        stage.vectors[slot][2][key] = k[i];
        stage.vectors[slot][3][key] = a[i];
        stage.values[slot][key] = v[i];
        dot = __fmaf_rn(q[i], k[i], dot);
    }
    dot = warp_sum(dot);
    if (lane == 0) stage.scalars[slot] = make_float2(beta, dot);
}

// The gated norm of a head of one row, by a warp. Gates that products made are left in memory.
template <bool PRODUCTS>
DEVICE void finish_token(const float* answer, const float* gates, const float* norm_weight, float epsilon, const Layer& layer,
                         u64 row, u32 head) {
    u32 lane = lane_index();
    float o[4], gate[4], weight[4];
    float* gate_row = layer.gate + row * layer.gate_stride + head * DIM;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        gate[i] = PRODUCTS ? gates[lane + 32 * i] : gate_row[lane + 32 * i];
        weight[i] = norm_weight[lane + 32 * i];
        o[i] = answer[lane + 32 * i];
    }
    float factor = rms_factor(squares_of(o), DIM, epsilon);
    float* out = layer.out + row * layer.out_stride + head * DIM;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if (PRODUCTS) gate_row[lane + 32 * i] = gate[i];
        out[lane + 32 * i] = __fmul_rn(__fmul_rn(__fmul_rn(o[i], factor), weight[i]), sigmoid(gate[i]));
    }
}

// This warp's tile of the products for the tokens of a chunk: f into `raw`, gates into `gates`. Logged tokens need none.
DEVICE void make_products(Raw& raw, float (*gates)[DIM], const u8* room, const Products& products, const KdaPart& part, u32 first,
                          u32 count) {
    u32 lane = lane_index(), column = lane / 4;
    bool second = warp_index() >= HEAD_TILES, fresh = column < count && first + column >= part.logged;
    u64 row = part.first_row + first + column - part.logged;
    float acc[4];
    multiply_head(acc, room, products, fresh ? (second ? products.x[1] : products.x[0]) + row * products.x_stride : nullptr);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 output = warp_index() % HEAD_TILES * 16 + lane / 4 + i / 2 * 8, slot = lane % 4 * 2 + i % 2;
        if (slot >= count || first + slot < part.logged) continue;
        if (second) gates[slot][output] = acc[i];
        else raw.values[slot][3][output] = acc[i];
    }
}

// Constants of a layer.
struct Weights {
    const float* taps;
    const float* dt_bias;
    const float* a_log;
    const float* norm;
    float norm_epsilon, bound;
    bool bounded;
};

template <bool PRODUCTS>
DEVICE void step_head(const Layer& layer, const Weights& weights, const Products& products, u8* room, const KdaPart* parts) {
    __shared__ __align__(16) Raw raw;
    __shared__ __align__(16) Stage<DIM> stage;
    __shared__ __align__(16) float answers_room[STAGE][DIM];
    __shared__ float gates[PRODUCTS ? STAGE : 1][DIM];
    __shared__ Decay made;
    u32 head = blockIdx.x, warp = warp_index();
    if (PRODUCTS) request_tile(room, products, head);
    Channel channel(head, layer.channels());
    // Weights are asked for before the table of parts is there.
#pragma unroll
    for (u32 j = 0; j < TAPS; ++j) channel.taps[j] = channel.kind < 3 ? weights.taps[(u64)channel.index * TAPS + j] : 0.0f;
    channel.bias = channel.kind < 3 ? 0.0f : weights.dt_bias[channel.index];
    float logarithm = weights.a_log[head];
    KdaPart part = parts[blockIdx.y];
    u32 stands = part.logged + part.sure, tokens = stands + part.drafts;
    // No launch of this step wrote the state or the window: they are asked for before the wait.
    Place place;
    float* state = part.state + (u64)head * DIM * DIM;
    Cells cells;
    if (tokens > 0) cells.load(state, place);
#pragma unroll
    for (u32 j = 0; j < BACK; ++j)
        channel.past[j] = channel.kind < 3 ? value_at(layer, part, channel.index, part.logged + j) : 0.0f;
    channel.rate = exponential(logarithm);
    if (PRODUCTS) {
        if (channel.kind == 3) made.bias[channel.lane] = channel.bias;
        if (threadIdx.x == 0) made.rate = channel.rate, made.bound = weights.bound, made.bounded = weights.bounded;
    }
    copy_async_wait<0>();
    grid_wait();
    if (tokens == 0) return;
    bool answers = (place.key_lane & 12) == 4;
    for (u32 first = 0; first < tokens; first += STAGE) {
        u32 count = min(STAGE, tokens - first);
        if (PRODUCTS) {
            // Of the chunk before, nobody reads gates any more.
            if (first == 0) __syncwarp();
            else __syncthreads();
            make_products(raw, gates, room, products, part, first, count);
        }
        fill_raw<PRODUCTS>(raw, channel, layer, part, head, first, count, weights.bounded, weights.bound);
        if (first == 0 && channel.kind < 3) move_window(layer, part, channel.index);
        __syncthreads();
        if (warp < count) stage_token<PRODUCTS>(stage, raw, made, layer, part, head, first + warp, warp);
        __syncthreads();
        for (u32 slot = 0; slot < count;) {
            u32 end = first + slot < stands ? min(count, stands - first) : count;
            for (; slot < end; ++slot)
                step(cells, stage, slot, place, &answers_room[slot][place.group + place.flip], answers);
            // Drafts leave no trace: the state stands before the first of them.
            if (first + slot == stands) cells.store(state, place);
        }
        __syncthreads();
        if (warp < count && first + warp >= part.logged)
            finish_token<PRODUCTS>(answers_room[warp], gates[PRODUCTS ? warp : 0], weights.norm, weights.norm_epsilon, layer,
                                   part.first_row + first + warp - part.logged, head);
    }
}

// What both kernels take. Grid: heads × parts.
#define LAYER_PARAMETERS                                                                                                     \
    float *out, u32 out_stride, float *qkv, u32 qkv_stride, float *decay, u32 decay_stride, float *beta, u32 beta_stride,    \
        const float *u, u32 u_stride, float *gate, u32 gate_stride, const float *taps, const float *dt_bias,                 \
        const float *a_log, const float *norm_weight, float norm_epsilon, u32 heads, u32 bounded, float bound,               \
        const KdaPart *parts
#define LAYER_OF                                                                                                             \
    {                                                                                                                        \
        out, qkv, decay, beta, u, gate, out_stride, qkv_stride, decay_stride, beta_stride, u_stride, gate_stride, heads      \
    }
#define WEIGHTS_OF {taps, dt_bias, a_log, norm_weight, norm_epsilon, bound, bounded != 0}

extern "C" __global__ void __launch_bounds__(THREADS) kda_step(LAYER_PARAMETERS) {
    grid_release();
    Layer layer = LAYER_OF;
    Weights weights = WEIGHTS_OF;
    step_head<false>(layer, weights, Products{}, nullptr, parts);
}

// Dynamic shared memory: a tile of each warp.
extern "C" __global__ void __launch_bounds__(THREADS)
kda_step_products(LAYER_PARAMETERS, const float* f_x, const float* gate_x, u32 x_stride, const u8* f_codes, const u8* gate_codes,
                  const u8* f_scales, const u8* gate_scales, u32 encoding, u32 share) {
    extern __shared__ uint4 tiles_room[];
    grid_release();
    Layer layer = LAYER_OF;
    Weights weights = WEIGHTS_OF;
    Products products = {{f_x, gate_x}, {f_codes, gate_codes}, {f_scales, gate_scales}, x_stride, encoding, share};
    step_head<true>(layer, weights, products, (u8*)tiles_room, parts);
}
