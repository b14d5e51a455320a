//! Operations that run as one launch, at the release's widths: what they leave in memory has the bits of the operations alone.

use flint_backend::ops::{
    Combine, DsaAppend, DsaSpan, GatedNorm, GatherRows, HcPost, HcPre, KdaConv, KdaPrepare, KdaScan, KdaSpan,
    LayerNorm, Linear, MeanStreams, Ops as _, Page, RmsNorm, Route, SelectPools, SpreadStreams, SwiGlu,
};
use flint_backend::{Backend as _, Element, Precision, Rows};
use flint_contracts::feeding::Dice;
use flint_cuda::{Cuda, CudaBuffer, CudaMatrix, Options};
use flint_weights::{Form, HostBytes, PlainType, QuantMatrix};

/// Sure rows and drafts of each sequence's part.
type Parts = &'static [(usize, usize)];

/// One row, blocks, batches, seams of what a kernel takes at once.
const SHAPES: [Parts; 8] = [
    &[(1, 0)],
    &[(1, 7)],
    &[(3, 0), (1, 2)],
    &[(1, 0), (1, 0), (1, 0), (1, 0), (1, 0)],
    &[(9, 0)],
    &[(1, 4), (2, 3), (6, 0)],
    &[(16, 1)],
    &[(32, 0)],
];

/// What a scene touches on a device, and how many kernels it took.
struct Seen {
    bytes: Vec<Vec<u8>>,
    kernels: u64,
}

/// A device, numbers, and all memory that was given out.
struct Stage {
    cuda: Cuda,
    dice: Dice,
    all: Vec<CudaBuffer>,
}

impl Stage {
    fn new(device: usize, joins: bool) -> Self {
        let cuda = Cuda::new(Options { joins, ..Options::device(device) }).unwrap();
        Self { cuda, dice: Dice::new(7), all: Vec::new() }
    }

    fn number(&mut self) -> f32 {
        self.dice.below(1 << 20) as f32 / (1 << 18) as f32 - 2.0
    }

    fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.number()).collect()
    }

    /// Memory with random numbers.
    fn floats(&mut self, len: usize) -> CudaBuffer {
        let values = self.numbers(len);
        let buffer = self.empty(Element::F32, len);
        self.cuda.write_f32(&buffer, 0, &values).unwrap();
        buffer
    }

    fn empty(&mut self, element: Element, len: usize) -> CudaBuffer {
        let buffer = self.cuda.allocate(element, len).unwrap();
        self.all.push(buffer.clone());
        buffer
    }

    fn rows(&mut self, rows: usize, width: usize) -> Rows<CudaBuffer> {
        Rows::dense(&self.floats(rows * width), rows, width)
    }

    fn matrix(&mut self, rows: usize, cols: usize, form: Form, precision: Precision) -> CudaMatrix {
        let matrix = QuantMatrix { name: "test".into(), rows, cols, form };
        self.cuda.upload(&[matrix], precision).unwrap()
    }

    /// `count` numbers of bf16.
    fn bf16(&mut self, count: usize, size: f32) -> HostBytes {
        let bytes = (0..count).flat_map(|_| {
            let bits = (self.number() * size).to_bits() >> 16;
            (bits as u16).to_le_bytes()
        });
        HostBytes::from_vec(bytes.collect())
    }

    fn affine(&mut self, bits: u8, group: usize, rows: usize, cols: usize) -> Form {
        let codes = (0..rows * cols * usize::from(bits) / 8).map(|_| self.dice.below(256) as u8).collect();
        let pairs = rows * cols / group;
        let (scales, biases) = (self.bf16(pairs, 0.01), self.bf16(pairs, 0.1));
        Form::Affine { bits, group, kind: PlainType::Bf16, codes: HostBytes::from_vec(codes), scales, biases }
    }

    /// Runs operations as a step.
    fn step(&mut self, run: impl FnOnce(&mut Cuda)) {
        self.cuda.begin_step().unwrap();
        run(&mut self.cuda);
        self.cuda.end_step().unwrap();
    }

    fn seen(mut self) -> Seen {
        let kernels = self.cuda.counts().kernels;
        let bytes = self.all.iter().map(|buffer| self.cuda.read_bytes(buffer).unwrap()).collect();
        Seen { bytes, kernels }
    }
}

/// Runs a scene with joined operations and with operations apart; says how many kernels each took.
fn compare(device: usize, what: &str, scene: impl Fn(&mut Stage)) -> (u64, u64) {
    let [joined, apart] = [true, false].map(|joins| {
        let mut stage = Stage::new(device, joins);
        scene(&mut stage);
        stage.seen()
    });
    for (index, (found, expected)) in joined.bytes.iter().zip(&apart.bytes).enumerate() {
        let at = found.iter().zip(expected).position(|(a, b)| a != b);
        assert!(
            at.is_none(),
            "{what}: buffer {index} differs at byte {} of {}",
            at.unwrap_or(0),
            found.len()
        );
    }
    assert!(joined.kernels < apart.kernels, "{what}: {} kernels, {} apart", joined.kernels, apart.kernels);
    (joined.kernels, apart.kernels)
}

fn total(parts: Parts) -> usize {
    parts.iter().map(|(sure, drafts)| sure + drafts).sum()
}

/// A KDA layer between its products, and with those of decays and gates; three steps, with accepted drafts.
pub(crate) fn kda(device: usize) -> String {
    let mut note = String::new();
    for (bits, group) in [(0, 0), (4, 64), (8, 32), (6, 128), (5, 64), (3, 64)] {
        let shapes = if bits == 4 { &SHAPES[..] } else { &SHAPES[4..6] };
        for &parts in shapes {
            let (joined, apart) = compare(device, &format!("{parts:?}, {bits} bits"), |stage| {
                kda_scene(stage, parts, bits, group);
            });
            note = format!("{joined} kernels for {apart}");
        }
    }
    note
}

fn kda_scene(stage: &mut Stage, parts: Parts, bits: u8, group: usize) {
    const HEADS: usize = 2;
    const DIM: usize = 128;
    const CHANNELS: usize = HEADS * DIM;
    let rows = total(parts);
    let [forget, gating] = [0, 1].map(|_| {
        let form = match bits {
            0 => Form::Plain { kind: PlainType::Bf16, values: stage.bf16(CHANNELS * DIM, 0.1) },
            bits => stage.affine(bits, group, CHANNELS, DIM),
        };
        stage.matrix(CHANNELS, DIM, form, Precision::Product)
    });
    let [taps, dt_bias] =
        [4, 1].map(|each| stage.floats(each * if each == 4 { 3 * CHANNELS } else { CHANNELS }));
    let (a_log, norm) = (stage.floats(HEADS), stage.floats(DIM));
    let mut logged = vec![0; parts.len()];
    let memory: Vec<[CudaBuffer; 3]> = parts
        .iter()
        .map(|_| {
            [11 * 3 * CHANNELS, HEADS * DIM * DIM, 8 * (3 * CHANNELS + HEADS)].map(|len| stage.floats(len))
        })
        .collect();
    for round in 0..3 {
        let projected = stage.rows(rows, 3 * CHANNELS + 2 * DIM + HEADS + 2);
        let (qkv, decay) = (stage.rows(rows, 3 * CHANNELS), stage.rows(rows, CHANNELS));
        let (gate, out) = (stage.rows(rows, CHANNELS), stage.rows(rows, CHANNELS));
        let mut first_row = 0;
        let spans: Vec<KdaSpan<CudaBuffer>> = parts
            .iter()
            .zip(&memory)
            .zip(&logged)
            .map(|((&(sure, drafts), [window, state, log]), &logged)| {
                first_row += sure + drafts;
                let (window, state, log) = (window.clone(), state.clone(), log.clone());
                KdaSpan { first_row: first_row - sure - drafts, logged, sure, drafts, window, state, log }
            })
            .collect();
        let beta = projected.columns(3 * CHANNELS + 2 * DIM, HEADS);
        stage.step(|cuda| {
            let product = |out: &Rows<CudaBuffer>, first, matrix: &CudaMatrix| Linear {
                out: out.clone(),
                x: projected.columns(first, DIM),
                matrix: matrix.clone(),
            };
            cuda.linear(&product(&decay, 3 * CHANNELS, &forget)).unwrap();
            cuda.linear(&product(&gate, 3 * CHANNELS + DIM, &gating)).unwrap();
            let u = projected.columns(0, 3 * CHANNELS);
            let conv =
                KdaConv { out: qkv.clone(), u, taps: taps.clone(), tap_count: 4, spans: spans.clone() };
            cuda.kda_conv(&conv).unwrap();
            let (qkv, decay, beta) = (qkv.clone(), decay.clone(), beta.clone());
            let scan = KdaScan {
                out: out.clone(),
                qkv: qkv.clone(),
                decay: decay.clone(),
                beta: beta.clone(),
                head_dim: DIM,
                spans,
            };
            let (dt_bias, a_log) = (dt_bias.clone(), a_log.clone());
            let bound = Some(-5.0).filter(|_| round != 1);
            let prepare = KdaPrepare { qkv, decay, beta, dt_bias, a_log, head_dim: DIM, lower_bound: bound };
            cuda.kda_prepare(&prepare).unwrap();
            cuda.kda_scan(&scan).unwrap();
            let (out, o, weight) = (out.clone(), out.clone(), norm.clone());
            let gated = GatedNorm { out, o, gate: gate.clone(), weight, head_dim: DIM, epsilon: 1e-5 };
            cuda.gated_norm(&gated).unwrap();
        });
        for (accepted, (_, drafts)) in logged.iter_mut().zip(parts) {
            *accepted = (drafts + round) / 2;
            *accepted = (*accepted).min(*drafts);
        }
    }
}

/// A DSA layer's norms, its append and its choice, with an indexer and without; steps that end inside a pool and behind one.
pub(crate) fn dsa(device: usize) -> String {
    let mut note = String::new();
    for parts in SHAPES {
        for indexed in [true, false] {
            // All pools are picked, or pools are scored.
            let kept = if parts.len() == 2 { 2 } else { 32 };
            let what = format!("{parts:?}, indexer {indexed}");
            let (joined, apart) = compare(device, &what, |stage| dsa_scene(stage, parts, indexed, kept));
            note = format!("{joined} kernels for {apart}");
        }
    }
    note
}

fn dsa_scene(stage: &mut Stage, parts: Parts, indexed: bool, pools_kept: usize) {
    const RANK: usize = 512;
    const KEY: usize = 128;
    const LOW: usize = 1536;
    const RING: usize = 16;
    const KPOOL: usize = 4;
    const PAGE: usize = 16;
    let rows = total(parts);
    let (low_weight, latent_weight) = (stage.floats(LOW), stage.floats(RANK));
    let [key_weight, key_bias] = [0, 1].map(|_| stage.floats(KEY));
    let ape = stage.floats(KPOOL * KEY);
    let form = stage.affine(4, 64, KEY, LOW);
    let query = stage.matrix(KEY, LOW, form, Precision::Product);
    let caches: Vec<(Vec<Page<CudaBuffer>>, CudaBuffer)> = parts
        .iter()
        .map(|_| {
            let page = |stage: &mut Stage| Page {
                latents: stage.empty(Element::Bf16, PAGE * RANK),
                pooled: stage.empty(Element::Bf16, PAGE / KPOOL * KEY),
            };
            ((0..7).map(|_| page(stage)).collect(), stage.floats(RING * 2 * KEY))
        })
        .collect();
    let mut positions: Vec<usize> = (0..parts.len()).map(|part| part * 3).collect();
    for _ in 0..3 {
        let projected = stage.rows(rows, LOW + RANK + 2 * KEY + 32);
        let queries = stage.rows(rows, KEY);
        let picks = stage.empty(Element::U32, rows * pools_kept);
        let columns = |first, width| projected.columns(first, width);
        let (low, latents) = (columns(0, LOW), columns(LOW, RANK));
        let (keys, gates) = (columns(LOW + RANK, KEY), columns(LOW + RANK + KEY, KEY));
        let mut first_row = 0;
        let spans: Vec<DsaSpan<CudaBuffer>> = parts
            .iter()
            .zip(&caches)
            .zip(&positions)
            .map(|((&(sure, drafts), (pages, ring)), &position)| {
                first_row += sure + drafts;
                let (pages, ring) = (pages.clone(), ring.clone());
                DsaSpan { first_row: first_row - sure - drafts, rows: sure + drafts, position, pages, ring }
            })
            .collect();
        stage.step(|cuda| {
            for (rows, weight) in [(&low, &low_weight), (&latents, &latent_weight)] {
                let (out, x, weight) = (rows.clone(), rows.clone(), weight.clone());
                cuda.rms_norm(&RmsNorm { out, x, weight, epsilon: 1e-5 }).unwrap();
            }
            let mut append = DsaAppend {
                latents: latents.clone(),
                keys: None,
                gates: None,
                ape: None,
                kpool: KPOOL,
                page_rows: PAGE,
                ring_rows: RING,
                spans,
            };
            if indexed {
                let (out, x) = (keys.clone(), keys.clone());
                let (weight, bias) = (key_weight.clone(), key_bias.clone());
                cuda.layer_norm(&LayerNorm { out, x, weight, bias, epsilon: 1e-6 }).unwrap();
                append.keys = Some(keys.clone());
                append.gates = Some(gates.clone());
                append.ape = Some(ape.clone());
            }
            cuda.dsa_append(&append).unwrap();
            let (out, x, matrix) = (queries.clone(), low.clone(), query.clone());
            cuda.linear(&Linear { out, x, matrix }).unwrap();
            let select = SelectPools {
                picks: picks.clone(),
                q: queries.clone(),
                weights: projected.columns(LOW + RANK + 2 * KEY, 1),
                head_dim: KEY,
                pools_kept,
                kpool: KPOOL,
                page_rows: PAGE,
                spans: append.spans,
            };
            cuda.select_pools(&select).unwrap();
        });
        for (position, (sure, drafts)) in positions.iter_mut().zip(parts) {
            *position += sure + drafts / 2;
        }
    }
}

/// A router and its choice; ties among its logits.
pub(crate) fn router(device: usize) -> String {
    let mut note = String::new();
    for (rows, experts, inputs, kind) in [
        (1, 288, 4096, PlainType::Bf16),
        (4, 64, 4096, PlainType::F32),
        (5, 30, 128, PlainType::Bf16),
        (16, 288, 1024, PlainType::F32),
        (32, 384, 256, PlainType::Bf16),
    ] {
        let what = format!("{rows} rows, {experts} experts of {inputs}, {kind:?}");
        let (joined, apart) = compare(device, &what, |stage| {
            let count = experts * inputs;
            let values = match kind {
                PlainType::F32 => {
                    let numbers = stage.numbers(count).into_iter().flat_map(f32::to_le_bytes);
                    HostBytes::from_vec(numbers.collect())
                }
                _ => stage.bf16(count, 1.0),
            };
            let function = stage.matrix(experts, inputs, Form::Plain { kind, values }, Precision::Full);
            let (x, logits) = (stage.rows(rows, inputs), stage.rows(rows, experts));
            let (weights, bias) = (stage.rows(rows, 8), stage.floats(experts));
            let picks = stage.empty(Element::U32, rows * 8);
            for normalise in [true, false] {
                stage.step(|cuda| {
                    let (out, x, matrix) = (logits.clone(), x.clone(), function.clone());
                    cuda.linear(&Linear { out, x, matrix }).unwrap();
                    let route = Route {
                        picks: picks.clone(),
                        weights: weights.clone(),
                        logits: logits.clone(),
                        bias: bias.clone(),
                        picks_per_row: 8,
                        groups: 1,
                        groups_kept: 1,
                        normalise,
                        scaling: 2.5,
                    };
                    cuda.route(&route).unwrap();
                });
            }
        });
        note = format!("{joined} kernels for {apart}");
    }
    note
}

/// Two activations of unlike rows.
pub(crate) fn activations(device: usize) -> String {
    for (rows, width, other_rows, other_width) in [(8, 2048, 1, 2048), (64, 24, 8, 50), (3, 7, 1, 2048)] {
        let what = format!("{rows} × {width} and {other_rows} × {other_width}");
        compare(device, &what, |stage| {
            let [one, other] = [(rows, width), (other_rows, other_width)].map(|(rows, width)| {
                let both = stage.rows(rows, 2 * width);
                let (gate, up) = (both.columns(0, width), both.columns(width, width));
                SwiGlu { out: stage.rows(rows, width), gate, up, limit: 1.5 }
            });
            stage.step(|cuda| {
                cuda.swiglu(&one).unwrap();
                cuda.swiglu(&other).unwrap();
            });
        });
    }
    String::new()
}

/// Streams from their begin to the mean of the last ones, and the norm of some rows.
pub(crate) fn sites(device: usize) -> String {
    let mut note = String::new();
    for (rows, hidden) in [(1, 4096), (5, 128), (8, 256), (32, 384), (3, 4096), (16, 4096)] {
        for experts in [true, false] {
            let what = format!("{rows} rows of {hidden}, experts {experts}");
            let (joined, apart) = compare(device, &what, |stage| site_scene(stage, rows, hidden, experts));
            note = format!("{joined} kernels for {apart}");
        }
    }
    note
}

fn site_scene(stage: &mut Stage, rows: usize, hidden: usize, experts: bool) {
    const STREAMS: usize = 4;
    const OUTPUTS: usize = STREAMS * (2 + STREAMS);
    const PICKS: usize = 8;
    let values = stage.bf16(OUTPUTS * STREAMS * hidden, 0.02);
    let form = Form::Plain { kind: PlainType::Bf16, values };
    let function = stage.matrix(OUTPUTS, STREAMS * hidden, form, Precision::Full);
    let (base, scale, norm) = (stage.floats(OUTPUTS), stage.floats(3), stage.floats(hidden));
    let (streams, mix) = (stage.rows(rows, STREAMS * hidden), stage.rows(rows, STREAMS * (1 + STREAMS)));
    let (x, y) = (stage.rows(rows, hidden), stage.rows(rows, hidden));
    let (pairs, weights) = (stage.rows(rows * PICKS, hidden), stage.rows(rows, PICKS));
    let (shared, wanted) = (stage.rows(rows, hidden), stage.rows(rows.div_ceil(2), hidden));
    let index = stage.empty(Element::U32, rows.div_ceil(2));
    let numbers: Vec<u32> = (0..rows.div_ceil(2)).map(|row| 2 * row as u32 % rows as u32).collect();
    stage.cuda.write_u32(&index, 0, &numbers).unwrap();
    stage.step(|cuda| {
        let enter = |cuda: &mut Cuda| {
            let pre = HcPre {
                collapsed: x.clone(),
                mix: mix.clone(),
                streams: streams.clone(),
                function: function.clone(),
                base: base.clone(),
                scale: scale.clone(),
                norm_epsilon: 1e-5,
                hc_epsilon: 1e-6,
                rounds: 20,
            };
            cuda.hc_pre(&pre).unwrap();
            let (out, x, weight) = (x.clone(), x.clone(), norm.clone());
            cuda.rms_norm(&RmsNorm { out, x, weight, epsilon: 1e-5 }).unwrap();
        };
        let leave = |cuda: &mut Cuda| {
            if experts {
                let (out, pairs) = (y.clone(), pairs.clone());
                let (weights, shared) = (weights.clone(), shared.clone());
                cuda.combine(&Combine { out, pairs, weights, shared }).unwrap();
            }
            let (streams, y, mix) = (streams.clone(), y.clone(), mix.clone());
            cuda.hc_post(&HcPost { streams, y, mix }).unwrap();
        };
        let (spread, from) = (streams.clone(), x.clone());
        cuda.spread_streams(&SpreadStreams { streams: spread, x: from }).unwrap();
        enter(cuda);
        leave(cuda);
        enter(cuda);
        leave(cuda);
        cuda.mean_streams(&MeanStreams { out: y.clone(), streams: streams.clone() }).unwrap();
        let (out, from) = (wanted.clone(), y.clone());
        cuda.gather_rows(&GatherRows { out, x: from, index: index.clone() }).unwrap();
        let (out, x, weight) = (wanted.clone(), wanted.clone(), norm.clone());
        cuda.rms_norm(&RmsNorm { out, x, weight, epsilon: 1e-5 }).unwrap();
    });
}
