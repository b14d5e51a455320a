//! Single layers at the release's sizes against transformers' fp32 results.
//!
//! Weights and inputs come from names by the fixture's generator (`tests/fixtures/glm5_next_layers/README.md`); the
//! file holds expected outputs. Its noise between orders of summation is 2e-5, its bar 2e-4.

use flint_backend::{Backend, Element, Precision, Rows};
use flint_cpu::{Arithmetic, Cpu, Options};
use flint_weights::config::{Attention, FeedForward};
use flint_weights::{Form, HostBytes, ModelConfig, PlainType, QuantMatrix};

use crate::bank::{ExpertBank, identity_slots};
use crate::dsa::{Dsa, Indexer};
use crate::feed::{Dense, Feed, Sparse};
use crate::hyper::{Site, leave, mix_rows, stream_rows};
use crate::kda::Kda;
use crate::probe::{Point, Probe, Seen};
use crate::scratch::Scratch;
use crate::sequence::{CacheShape, Pending, Sequence};

const SEED: u64 = 0x5F53_A7E1;
const HIDDEN: usize = 4096;
const TOLERANCE: f32 = 2e-4;

/// `v · scale + offset` with `v` uniform in [-1, 1), a function of the name alone.
fn uniform(name: &str, len: usize, scale: f32, offset: f32) -> Vec<f32> {
    let hash = name
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3));
    let seed = hash ^ SEED;
    (0..len as u64)
        .map(|i| {
            let z = seed.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            let z = z ^ (z >> 31);
            let v = ((z >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0) * scale;
            if offset == 0.0 { v } else { v + offset }
        })
        .collect()
}

struct Goldens(Vec<u8>);

impl Goldens {
    fn open() -> Self {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/glm5_next_layers/goldens.safetensors");
        Self(std::fs::read(path).unwrap())
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        safetensors::SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap().data().to_vec()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn ints(&self, name: &str) -> Vec<i32> {
        self.bytes(name).chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

fn close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= tolerance, "{what}: {worst} away from the reference, {tolerance} is allowed");
}

fn cpu() -> Cpu {
    Cpu::new(Options { arithmetic: Arithmetic::Lanes, ..Options::detect(2) }).unwrap()
}

/// The release's sizes with the fixture's pools (32 tokens selected) and experts (4 of 8).
fn config(attention: Attention) -> ModelConfig {
    ModelConfig {
        vocab_size: 16,
        hidden_size: HIDDEN,
        attention: vec![attention],
        feed_forward: vec![FeedForward::Sparse],
        own_indexer: vec![true],
        linear_heads: 64,
        linear_head_dim: 128,
        linear_conv_taps: 4,
        linear_lower_bound: Some(-5.0),
        heads: 64,
        q_lora_rank: 1536,
        kv_lora_rank: 512,
        qk_head_dim: 256,
        v_head_dim: 256,
        index_heads: 32,
        index_head_dim: 128,
        index_topk: 32,
        index_kpool: 4,
        intermediate_size: 12288,
        moe_intermediate_size: 2048,
        experts: 8,
        experts_per_token: 4,
        shared_experts: 1,
        expert_groups: 1,
        expert_groups_kept: 1,
        norm_topk_prob: true,
        routed_scaling_factor: 2.5,
        swiglu_limit: 10.0,
        rms_norm_eps: 1e-5,
        streams: 4,
        sinkhorn_rounds: 20,
        hc_eps: 1e-6,
        mtp_layers: 0,
        max_positions: 4096,
        eos_tokens: vec![],
    }
}

fn plain(rows: usize, cols: usize, values: &[f32]) -> QuantMatrix {
    let values = HostBytes::from_vec(bytemuck::cast_slice(values).to_vec());
    QuantMatrix { name: "test".into(), rows, cols, form: Form::Plain { kind: PlainType::F32, values } }
}

fn drawn(name: &str, rows: usize, cols: usize, scale: f32) -> QuantMatrix {
    plain(rows, cols, &uniform(name, rows * cols, scale, 0.0))
}

fn buffer(backend: &mut Cpu, values: &[f32]) -> <Cpu as flint_backend::ops::Ops>::Buffer {
    let buffer = backend.allocate(Element::F32, values.len()).unwrap();
    backend.write_f32(&buffer, 0, values).unwrap();
    buffer
}

fn read(backend: &mut Cpu, buffer: &<Cpu as flint_backend::ops::Ops>::Buffer, len: usize) -> Vec<f32> {
    let mut out = vec![0.0; len];
    backend.read_f32(buffer, 0, &mut out).unwrap();
    out
}

fn picked(all: &[f32], rows: &[i32], width: usize) -> Vec<f32> {
    rows.iter().flat_map(|r| all[*r as usize * width..(*r as usize + 1) * width].to_vec()).collect()
}

fn kda_layer(backend: &mut Cpu) -> Kda<Cpu> {
    let input = [
        drawn("kda.q_proj.weight", 8192, HIDDEN, 0.027),
        drawn("kda.k_proj.weight", 8192, HIDDEN, 0.027),
        drawn("kda.v_proj.weight", 8192, HIDDEN, 0.027),
        drawn("kda.f_a_proj.weight", 128, HIDDEN, 0.027),
        drawn("kda.b_proj.weight", 64, HIDDEN, 0.04),
        drawn("kda.g_a_proj.weight", 128, HIDDEN, 0.027),
    ];
    let taps = ["q", "k", "v"].map(|part| uniform(&format!("kda.{part}_conv1d.weight"), 8192 * 4, 0.5, 0.1));
    Kda {
        input: backend.upload(&input, Precision::Product).unwrap(),
        forget: backend.upload(&[drawn("kda.f_b_proj.weight", 8192, 128, 0.2)], Precision::Product).unwrap(),
        gate: backend.upload(&[drawn("kda.g_b_proj.weight", 8192, 128, 0.2)], Precision::Product).unwrap(),
        output: backend
            .upload(&[drawn("kda.o_proj.weight", HIDDEN, 8192, 0.015)], Precision::Product)
            .unwrap(),
        taps: buffer(backend, &taps.concat()),
        dt_bias: buffer(backend, &uniform("kda.dt_bias", 8192, 2.0, -4.5)),
        a_log: buffer(backend, &uniform("kda.A_log", 64, 1.0, 0.5)),
        norm: buffer(backend, &uniform("kda.o_norm.weight", 128, 0.2, 1.0)),
    }
}

#[test]
fn a_kda_layer_of_the_release_gives_the_references_rows_and_states() {
    let goldens = Goldens::open();
    let mut backend = cpu();
    let config = config(Attention::Kda);
    let shape = CacheShape::new(&config, 3);
    let layer = kda_layer(&mut backend);
    let scratch = Scratch::new(&mut backend, &config, 70).unwrap();
    let mut sequence = Sequence::open(&mut backend, &config, &shape).unwrap();
    let input = uniform("kda.input", 72 * HIDDEN, 1.7, 0.0);
    let mut out = Vec::new();
    for rows in [70, 1, 1] {
        let at = out.len();
        backend.write_f32(&scratch.x, 0, &input[at..at + rows * HIDDEN]).unwrap();
        let span = sequence.kda_span(0, 0, Pending { sure: rows, drafts: 0 });
        layer.run(&mut backend, &config, &scratch, rows, vec![span]).unwrap();
        out.extend(read(&mut backend, &scratch.y, rows * HIDDEN));
        sequence.len += rows;
        sequence.folded = sequence.len;
        if rows == 70 {
            let state = read(&mut backend, &sequence.kda[0].state, 64 * 128 * 128);
            close(
                "state of head 5",
                &state[5 * 16384..6 * 16384],
                &goldens.floats("kda.state.head5"),
                TOLERANCE,
            );
            let sums: Vec<f32> = state.chunks_exact(128).map(|row| row.iter().sum()).collect();
            close("state sums", &sums, &goldens.floats("kda.state.sum_v"), 1e-3);
            let window = read(&mut backend, &sequence.kda[0].window, 3 * 24576);
            let first: Vec<f32> =
                (0..9).flat_map(|i| window[i / 3 * 24576 + i % 3 * 8192..][..256].to_vec()).collect();
            close("conv window", &first, &goldens.floats("kda.conv_state.first256"), TOLERANCE);
        }
    }
    let rows = goldens.ints("kda.rows");
    close("output", &picked(&out, &rows, HIDDEN), &goldens.floats("kda.output"), TOLERANCE);
}

fn dsa_layer(backend: &mut Cpu) -> Dsa<Cpu> {
    let input = [
        drawn("dsa.q_a_proj.weight", 1536, HIDDEN, 0.027),
        drawn("dsa.kv_a_proj_with_mqa.weight", 512, HIDDEN, 0.027),
        drawn("dsa.indexer.wk.weight", 128, HIDDEN, 0.027),
        drawn("dsa.indexer.index_kpool_compress_gate", 128, HIDDEN, 0.04),
        drawn("dsa.indexer.weights_proj.weight", 32, HIDDEN, 0.04),
    ];
    let query = [
        drawn("dsa.q_b_proj.weight", 16384, 1536, 0.07),
        drawn("dsa.indexer.wq_b.weight", 4096, 1536, 0.066),
    ];
    let kv_b = uniform("dsa.kv_b_proj.weight", 32768 * 512, 0.12, 0.0);
    let heads = kv_b.chunks_exact(512 * 512);
    let absorb: Vec<_> = heads
        .clone()
        .map(|head| {
            let transposed: Vec<f32> = (0..512 * 256).map(|i| head[i % 256 * 512 + i / 256]).collect();
            vec![plain(512, 256, &transposed)]
        })
        .collect();
    let expand: Vec<_> = heads.map(|head| vec![plain(256, 512, &head[256 * 512..])]).collect();
    let indexer = Indexer {
        norm: buffer(backend, &uniform("dsa.indexer.k_norm.weight", 128, 0.2, 1.0)),
        norm_bias: buffer(backend, &uniform("dsa.indexer.k_norm.bias", 128, 0.3, 0.0)),
        ape: buffer(backend, &uniform("dsa.indexer.index_kpool_compress_ape", 4 * 128, 0.8, 0.0)),
    };
    Dsa {
        input: backend.upload(&input, Precision::Product).unwrap(),
        query_norm: buffer(backend, &uniform("dsa.q_a_layernorm.weight", 1536, 0.2, 1.0)),
        latent_norm: buffer(backend, &uniform("dsa.kv_a_layernorm.weight", 512, 0.2, 1.0)),
        query: backend.upload(&query, Precision::Product).unwrap(),
        absorb: backend.upload_stack(&absorb, Precision::Product).unwrap(),
        expand: backend.upload_stack(&expand, Precision::Product).unwrap(),
        output: backend
            .upload(&[drawn("dsa.o_proj.weight", HIDDEN, 16384, 0.0106)], Precision::Product)
            .unwrap(),
        indexer: Some(indexer),
    }
}

#[derive(Default)]
struct Looker {
    latents: Vec<f32>,
    pools: Vec<u32>,
    logits: Vec<f32>,
    weights: Vec<f32>,
    picks: Vec<u32>,
    shared: Vec<f32>,
}

impl Probe for Looker {
    fn wants(&self, _point: Point) -> bool {
        true
    }

    fn take(&mut self, point: Point, seen: Seen) {
        match (point, seen) {
            (Point::Latents(_), Seen::Floats(v)) => self.latents.extend(v),
            (Point::Pools(_), Seen::Ids(v)) => self.pools.extend(v),
            (Point::RouterLogits(_), Seen::Floats(v)) => self.logits.extend(v),
            (Point::PickWeights(_), Seen::Floats(v)) => self.weights.extend(v),
            (Point::Picks(_), Seen::Ids(v)) => self.picks.extend(v),
            (Point::Shared(_), Seen::Floats(v)) => self.shared.extend(v),
            _ => {}
        }
    }
}

#[test]
fn a_dsa_layer_of_the_release_gives_the_references_rows_and_selections() {
    let goldens = Goldens::open();
    let mut backend = cpu();
    let config = config(Attention::Dsa);
    let shape = CacheShape::new(&config, 3);
    let layer = dsa_layer(&mut backend);
    let scratch = Scratch::new(&mut backend, &config, 96).unwrap();
    let mut sequence = Sequence::open(&mut backend, &config, &shape).unwrap();
    let input = uniform("dsa.input", 97 * HIDDEN, 1.7, 0.0);
    let mut out = Vec::new();
    let mut seen = Looker::default();
    for rows in [96, 1] {
        let at = out.len();
        sequence.reserve(&mut backend, &config, &shape, rows).unwrap();
        backend.write_f32(&scratch.x, 0, &input[at..at + rows * HIDDEN]).unwrap();
        let span = sequence.dsa_span(0, 0, rows);
        layer.run(&mut backend, &config, &scratch, &shape, rows, vec![span], (0, &mut seen)).unwrap();
        out.extend(read(&mut backend, &scratch.y, rows * HIDDEN));
        sequence.len += rows;
    }
    let rows = goldens.ints("dsa.rows");
    close("output", &picked(&out, &rows, HIDDEN), &goldens.floats("dsa.output"), TOLERANCE);
    close("latents", &picked(&seen.latents, &rows, 512), &goldens.floats("dsa.latent"), TOLERANCE);
    for (row, reference) in goldens.ints("dsa.topk").chunks_exact(35).enumerate() {
        let mut expected: Vec<u32> = reference.iter().filter(|p| **p >= 0).map(|p| *p as u32).collect();
        expected.sort_unstable();
        let pools = seen.pools[row * 8..(row + 1) * 8].iter().filter(|p| **p != u32::MAX);
        let tail = (row as u32 + 1) / 4 * 4..row as u32 + 1;
        let found: Vec<u32> = pools.flat_map(|p| p * 4..p * 4 + 4).chain(tail).collect();
        assert_eq!(found, expected, "positions that row {row} attends to");
    }
}

#[test]
fn a_moe_layer_of_the_release_gives_the_references_picks_and_rows() {
    let goldens = Goldens::open();
    let mut backend = cpu();
    let config = config(Attention::Kda);
    let member = |name: &str, part: &str| match part {
        "down" => drawn(&format!("moe.{name}.down_proj.weight"), HIDDEN, 2048, 0.01),
        _ => drawn(&format!("moe.{name}.{part}_proj.weight"), 2048, HIDDEN, 0.12),
    };
    let names: Vec<String> = (0..8).map(|expert| format!("experts.{expert}")).collect();
    let gate_up: Vec<_> = names.iter().map(|n| vec![member(n, "gate"), member(n, "up")]).collect();
    let down: Vec<_> = names.iter().map(|n| vec![member(n, "down")]).collect();
    let slots = identity_slots(&mut backend, 8).unwrap();
    let shared = [member("shared_experts", "gate"), member("shared_experts", "up")];
    let layer = Feed::Sparse(Sparse {
        router: backend.upload(&[drawn("moe.gate.weight", 8, HIDDEN, 0.04)], Precision::Full).unwrap(),
        bias: buffer(&mut backend, &uniform("moe.gate.e_score_correction_bias", 8, 0.1, 0.0)),
        experts: ExpertBank {
            gate_up: backend.upload_stack(&gate_up, Precision::Product).unwrap(),
            down: backend.upload_stack(&down, Precision::Product).unwrap(),
            slots,
        },
        shared: Dense {
            gate_up: backend.upload(&shared, Precision::Product).unwrap(),
            down: backend.upload(&[member("shared_experts", "down")], Precision::Product).unwrap(),
            width: 2048,
        },
    });
    let scratch = Scratch::new(&mut backend, &config, 5).unwrap();
    backend.write_f32(&scratch.x, 0, &uniform("moe.input", 5 * HIDDEN, 1.7, 0.0)).unwrap();
    let mut seen = Looker::default();
    layer.run(&mut backend, &config, &scratch, 5, None, (0, &mut seen)).unwrap();
    close("router logits", &seen.logits, &goldens.floats("moe.router.logits"), TOLERANCE);
    let (ids, weights) = (goldens.ints("moe.router.experts"), goldens.floats("moe.router.weights"));
    for row in 0..5 {
        let mut expected: Vec<_> = (row * 4..row * 4 + 4).map(|i| (ids[i] as u32, weights[i])).collect();
        expected.sort_by_key(|pair| pair.0);
        assert_eq!(seen.picks[row * 4..row * 4 + 4], expected.iter().map(|p| p.0).collect::<Vec<_>>());
        let expected: Vec<f32> = expected.iter().map(|pair| pair.1).collect();
        close("weights", &seen.weights[row * 4..row * 4 + 4], &expected, 1e-5);
    }
    close("shared", &seen.shared, &goldens.floats("moe.shared"), TOLERANCE);
    close("output", &read(&mut backend, &scratch.y, 5 * HIDDEN), &goldens.floats("moe.output"), TOLERANCE);
}

#[test]
fn a_hyper_connection_site_of_the_release_gives_the_references_mix_and_streams() {
    let goldens = Goldens::open();
    let mut backend = cpu();
    let config = config(Attention::Kda);
    let scratch = Scratch::new(&mut backend, &config, 5).unwrap();
    backend.write_f32(&scratch.streams, 0, &uniform("hc.input", 5 * 4 * HIDDEN, 1.7, 0.0)).unwrap();
    let site = Site {
        function: backend.upload(&[drawn("hc.fn", 24, 4 * HIDDEN, 0.01)], Precision::Full).unwrap(),
        base: buffer(&mut backend, &uniform("hc.base", 24, 0.8, 0.0)),
        scale: buffer(&mut backend, &uniform("hc.scale", 3, 0.5, 1.0)),
        norm: buffer(&mut backend, &vec![1.0; HIDDEN]),
    };
    site.enter(&mut backend, &config, &scratch, 5).unwrap();
    // The site norms what it collapsed; with unit weights the reference's row is normed the same way here.
    let collapsed = goldens.floats("hc.collapsed");
    let normed: Vec<f32> = collapsed
        .chunks_exact(HIDDEN)
        .flat_map(|row| {
            let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / HIDDEN as f64;
            let factor = 1.0 / (mean + 1e-5).sqrt();
            row.iter().map(move |v| (f64::from(*v) * factor) as f32).collect::<Vec<_>>()
        })
        .collect();
    close("collapsed", &read(&mut backend, &scratch.x, 5 * HIDDEN), &normed, TOLERANCE);
    let mix = read(&mut backend, &mix_rows(&config, &scratch, 5).buffer, 5 * 20);
    let (post, comb) = (goldens.floats("hc.post"), goldens.floats("hc.comb"));
    for row in 0..5 {
        close("post", &mix[row * 20..row * 20 + 4], &post[row * 4..row * 4 + 4], 1e-5);
        close("comb", &mix[row * 20 + 4..row * 20 + 20], &comb[row * 16..row * 16 + 16], 1e-5);
    }
    backend.write_f32(&scratch.y, 0, &uniform("hc.block_output", 5 * HIDDEN, 1.7, 0.0)).unwrap();
    leave(&mut backend, &config, &scratch, 5).unwrap();
    let rows: Rows<_> = stream_rows(&config, &scratch, 5);
    let streams = read(&mut backend, &rows.buffer, 5 * 4 * HIDDEN);
    close("streams", &streams[..4 * HIDDEN], &goldens.floats("hc.streams.token0"), TOLERANCE);
    let sums: Vec<f32> =
        streams.chunks_exact(HIDDEN).map(|s| s.iter().map(|v| f64::from(*v)).sum::<f64>() as f32).collect();
    close("stream sums", &sums, &goldens.floats("hc.streams.sum"), 5e-3);
}
