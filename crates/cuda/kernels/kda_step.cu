// A KDA layer between its products, for few rows, in one launch: convolution, what the scan needs of a row, the scan, the gated
// norm, the log of drafts. A block has a head of a sequence, so that nothing is shared between blocks. Each value is made by
// the formulas and in the order of conv.cu, norms.cu and scan.cu.
#include "common/base.cuh"
#include "common/factors.cuh"
#include "common/maths.cuh"
#include "common/parts.cuh"
#include "kda/cells.cuh"

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
    const float* gate;
    u64 out_stride, qkv_stride, decay_stride, beta_stride, u_stride, gate_stride;
    u32 heads;

    __device__ __forceinline__ u32 channels() const { return heads * DIM; }
    __device__ __forceinline__ u32 log_width() const { return 3 * channels() + heads; }
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

// Tokens `first..first + count` of a part into `raw`, by all threads: a channel each.
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
        } else {
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
DEVICE void stage_token(Stage<DIM>& stage, const Raw& raw, const Layer& layer, const KdaPart& part, u32 head, u32 token, u32 slot) {
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

// The gated norm of a head of one row, by a warp.
DEVICE void finish_token(const float* answer, const float* norm_weight, float epsilon, const Layer& layer, u64 row, u32 head) {
    u32 lane = lane_index();
    float o[4], gate[4], weight[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        gate[i] = layer.gate[row * layer.gate_stride + head * DIM + lane + 32 * i];
        weight[i] = norm_weight[lane + 32 * i];
        o[i] = answer[lane + 32 * i];
    }
    float factor = rms_factor(squares_of(o), DIM, epsilon);
    float* out = layer.out + row * layer.out_stride + head * DIM;
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        out[lane + 32 * i] = __fmul_rn(__fmul_rn(__fmul_rn(o[i], factor), weight[i]), sigmoid(gate[i]));
}

// Grid: heads × parts.
extern "C" __global__ void __launch_bounds__(THREADS)
kda_step(float* out, u32 out_stride, float* qkv, u32 qkv_stride, float* decay, u32 decay_stride, float* beta, u32 beta_stride,
         const float* u, u32 u_stride, const float* gate, u32 gate_stride, const float* taps, const float* dt_bias,
         const float* a_log, const float* norm_weight, float norm_epsilon, u32 heads, u32 bounded, float bound,
         const KdaPart* parts) {
    __shared__ __align__(16) Raw raw;
    __shared__ __align__(16) Stage<DIM> stage;
    __shared__ __align__(16) float answers_room[STAGE][DIM];
    grid_release();
    Layer layer = {out,        qkv,        decay,        beta,        u,        gate,
                   out_stride, qkv_stride, decay_stride, beta_stride, u_stride, gate_stride, heads};
    u32 head = blockIdx.x, warp = warp_index();
    Channel channel(head, layer.channels());
    // Weights are asked for before the table of parts is there.
#pragma unroll
    for (u32 j = 0; j < TAPS; ++j) channel.taps[j] = channel.kind < 3 ? taps[(u64)channel.index * TAPS + j] : 0.0f;
    channel.bias = channel.kind < 3 ? 0.0f : dt_bias[channel.index];
    float logarithm = a_log[head];
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
    grid_wait();
    if (tokens == 0) return;
    channel.rate = exponential(logarithm);
    bool answers = (place.key_lane & 12) == 4;
    for (u32 first = 0; first < tokens; first += STAGE) {
        u32 count = min(STAGE, tokens - first);
        fill_raw(raw, channel, layer, part, head, first, count, bounded != 0, bound);
        if (first == 0 && channel.kind < 3) move_window(layer, part, channel.index);
        __syncthreads();
        if (warp < count) stage_token(stage, raw, layer, part, head, first + warp, warp);
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
            finish_token(answers_room[warp], norm_weight, norm_epsilon, layer, part.first_row + first + warp - part.logged, head);
    }
}
