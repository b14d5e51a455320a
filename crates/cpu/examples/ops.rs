//! Times of the operations that are not products, at the release's sizes.
//!
//! `cargo run --release -p flint-cpu --example ops [threads]`: the least of many runs, for one row and for 512, with the
//! fp32 arithmetic that each reaches. Rates count multiply-adds of the formulas as two.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a measurement prints, and stops at the first error"
)]

use std::time::Instant;

use flint_backend::ops::{
    Attend, Combine, DsaAppend, DsaSpan, GatedNorm, HcPost, HcPre, KdaConv, KdaPrepare, KdaScan, KdaSpan,
    Ops, Page, RmsNorm, Route, SelectPools, SwiGlu,
};
use flint_backend::{Backend, Element, Precision, Result, Rows};
use flint_cpu::{Cpu, CpuBuffer, Options};
use flint_weights::{Form, HostBytes, PlainType, QuantMatrix};

const HIDDEN: usize = 4096;
const HEADS: usize = 64;
const DIM: usize = 128;
const CHANNELS: usize = HEADS * DIM;
const RANK: usize = 512;
const PAGE: usize = 64;

/// A backend and a source of numbers.
struct Bench {
    cpu: Cpu,
    seed: u64,
}

impl Bench {
    fn values(&mut self, len: usize, low: f32, high: f32) -> Vec<f32> {
        let mut next = || {
            self.seed =
                self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            low + (high - low) * ((self.seed >> 40) as f32 / (1 << 24) as f32)
        };
        (0..len).map(|_| next()).collect()
    }

    fn buffer(&mut self, len: usize, low: f32, high: f32) -> CpuBuffer {
        let values = self.values(len, low, high);
        let buffer = self.cpu.allocate(Element::F32, len).unwrap();
        self.cpu.write_f32(&buffer, 0, &values).unwrap();
        buffer
    }

    fn rows(&mut self, rows: usize, width: usize) -> Rows<CpuBuffer> {
        Rows::dense(&self.buffer(rows * width, -1.0, 1.0), rows, width)
    }

    /// Prints the least time of an operation, and its rates.
    fn report(
        &mut self,
        name: &str,
        rows: usize,
        flops: usize,
        bytes: usize,
        mut run: impl FnMut(&mut Cpu) -> Result<()>,
    ) {
        let mut least = f64::INFINITY;
        let (start, mut runs) = (Instant::now(), 0);
        while runs < 3 || (start.elapsed().as_secs_f64() < 1.0 && runs < 2000) {
            let begin = Instant::now();
            run(&mut self.cpu).unwrap();
            least = least.min(begin.elapsed().as_secs_f64());
            runs += 1;
        }
        let (rate, traffic) = (flops as f64 / least / 1e9, bytes as f64 / least / 1e9);
        println!("{name:24} {rows:4} rows {:10.1} µs {rate:8.1} GFLOP/s {traffic:8.1} GB/s", least * 1e6);
    }

    fn norms_and_streams(&mut self, rows: usize) {
        let wide = 24;
        let weight = self.buffer(HIDDEN, 0.5, 1.5);
        let (x, out) = (self.rows(rows, HIDDEN), self.rows(rows, HIDDEN));
        let (streams, mix) = (self.rows(rows, 4 * HIDDEN), self.rows(rows, 20));
        let values = self.values(wide * 4 * HIDDEN, -1.0, 1.0);
        let bytes = values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect();
        let form = Form::Plain { kind: PlainType::Bf16, values: HostBytes::from_vec(bytes) };
        let matrix = QuantMatrix { name: "function".into(), rows: wide, cols: 4 * HIDDEN, form };
        let function = self.cpu.upload(&[matrix], Precision::Full).unwrap();
        let (base, scale) = (self.buffer(wide, -1.0, 1.0), self.buffer(3, 0.001, 0.01));
        let norm = RmsNorm { out: out.clone(), x: x.clone(), weight, epsilon: 1e-5 };
        self.report("rms_norm 4096", rows, 4 * rows * HIDDEN, 8 * rows * HIDDEN, |cpu| cpu.rms_norm(&norm));
        let pre = HcPre {
            collapsed: out.clone(),
            mix: mix.clone(),
            streams: streams.clone(),
            function,
            base,
            scale,
            norm_epsilon: 1e-5,
            hc_epsilon: 1e-6,
            rounds: 20,
        };
        let flops = rows * 4 * HIDDEN * (2 * wide + 4);
        self.report("hc_pre (with product)", rows, flops, 16 * rows * HIDDEN, |cpu| cpu.hc_pre(&pre));
        let post = HcPost { streams, y: x, mix };
        self.report("hc_post", rows, rows * HIDDEN * 36, 36 * rows * HIDDEN, |cpu| cpu.hc_post(&post));
    }

    fn feed(&mut self, rows: usize) {
        let (gate, up) = (self.rows(rows * 8, 2048), self.rows(rows * 8, 2048));
        let swiglu = SwiGlu { out: gate.clone(), gate, up, limit: 10.0 };
        self.report("swiglu 8 x 2048", rows, 0, 12 * rows * 8 * 2048, |cpu| cpu.swiglu(&swiglu));
        let (logits, weights) = (self.rows(rows, 288), self.rows(rows, 8));
        let bias = self.buffer(288, -0.1, 0.1);
        let picks = self.cpu.allocate(Element::U32, rows * 8).unwrap();
        let route = Route {
            picks,
            weights: weights.clone(),
            logits,
            bias,
            picks_per_row: 8,
            groups: 1,
            groups_kept: 1,
            normalise: true,
            scaling: 2.5,
        };
        self.report("route 8 of 288", rows, 0, 0, |cpu| cpu.route(&route));
        let (pairs, shared) = (self.rows(rows * 8, HIDDEN), self.rows(rows, HIDDEN));
        let combine = Combine { out: self.rows(rows, HIDDEN), pairs, weights, shared };
        self.report("combine 8 x 4096", rows, 16 * rows * HIDDEN, 40 * rows * HIDDEN, |cpu| {
            cpu.combine(&combine)
        });
    }

    fn recurrent(&mut self, rows: usize) {
        let (u, qkv) = (self.rows(rows, 3 * CHANNELS), self.rows(rows, 3 * CHANNELS));
        let (decay, beta) = (self.rows(rows, CHANNELS), self.rows(rows, HEADS));
        let out = self.rows(rows, CHANNELS);
        let span = KdaSpan {
            first_row: 0,
            logged: 0,
            sure: rows,
            drafts: 0,
            window: self.buffer(7 * 3 * CHANNELS, 0.0, 0.0),
            state: self.buffer(HEADS * DIM * DIM, 0.0, 0.0),
            log: self.buffer(4 * (3 * CHANNELS + HEADS), 0.0, 0.0),
        };
        let taps = self.buffer(3 * CHANNELS * 4, -0.5, 0.5);
        let spans = vec![span];
        let conv = KdaConv { out: qkv.clone(), u, taps, tap_count: 4, spans: spans.clone() };
        self.report("kda_conv", rows, 8 * rows * 3 * CHANNELS, 24 * rows * CHANNELS, |cpu| {
            cpu.kda_conv(&conv)
        });
        let (dt_bias, a_log) = (self.buffer(CHANNELS, -1.0, 1.0), self.buffer(HEADS, -1.0, 1.0));
        let prepare = KdaPrepare {
            qkv: qkv.clone(),
            decay: decay.clone(),
            beta: beta.clone(),
            dt_bias,
            a_log,
            head_dim: DIM,
            lower_bound: Some(-5.0),
        };
        self.report("kda_prepare", rows, 0, 24 * rows * CHANNELS, |cpu| cpu.kda_prepare(&prepare));
        let scan = KdaScan { out: out.clone(), qkv, decay, beta, head_dim: DIM, spans };
        let (flops, bytes) = (7 * rows * HEADS * DIM * DIM, 8 * HEADS * DIM * DIM);
        self.report("kda_scan", rows, flops, bytes, |cpu| cpu.kda_scan(&scan));
        let gate = self.rows(rows, CHANNELS);
        let weight = self.buffer(DIM, 0.5, 1.5);
        let norm = GatedNorm { out: out.clone(), o: out, gate, weight, head_dim: DIM, epsilon: 1e-5 };
        self.report("gated_norm", rows, 0, 12 * rows * CHANNELS, |cpu| cpu.gated_norm(&norm));
    }

    fn attention(&mut self, rows: usize, position: usize) {
        let (kpool, kept, index_heads) = (4, 512, 32);
        let element = self.cpu.cache_element();
        let pages = (position + rows).div_ceil(PAGE);
        let page = |cpu: &mut Cpu| Page {
            latents: cpu.allocate(element, PAGE * RANK).unwrap(),
            pooled: cpu.allocate(element, PAGE / kpool * DIM).unwrap(),
        };
        let pages = (0..pages).map(|_| page(&mut self.cpu)).collect();
        let ring = self.buffer(16 * 2 * DIM, 0.0, 0.0);
        let mut fill = DsaAppend {
            latents: self.rows(position + rows, RANK),
            keys: Some(self.rows(position + rows, DIM)),
            gates: Some(self.rows(position + rows, DIM)),
            ape: Some(self.buffer(kpool * DIM, -1.0, 1.0)),
            kpool,
            page_rows: PAGE,
            ring_rows: 16,
            spans: vec![DsaSpan { first_row: 0, rows: position + rows, position: 0, pages, ring }],
        };
        self.cpu.dsa_append(&fill).unwrap();
        let span = &mut fill.spans[0];
        (span.rows, span.position) = (rows, position);
        let spans = fill.spans.clone();
        let bytes = 8 * rows * (RANK + 2 * DIM);
        self.report(&format!("dsa_append at {position}"), rows, 0, bytes, |cpu| cpu.dsa_append(&fill));
        let picks = self.cpu.allocate(Element::U32, rows * kept).unwrap();
        let (q, weights) = (self.rows(rows, index_heads * DIM), self.rows(rows, index_heads));
        let select = SelectPools {
            picks: picks.clone(),
            q,
            weights,
            head_dim: DIM,
            pools_kept: kept,
            kpool,
            page_rows: PAGE,
            spans: spans.clone(),
        };
        let visible = |row: usize| (position + row + 1) / kpool;
        let scored: usize = (0..rows).map(visible).filter(|&pools| pools > kept).sum();
        let (flops, bytes) = (2 * scored * index_heads * DIM, element.size() * visible(0) * DIM);
        self.report(&format!("select_pools at {position}"), rows, flops, bytes, |cpu| {
            cpu.select_pools(&select)
        });
        let (q, out) = (self.rows(rows, HEADS * RANK), self.rows(rows, HEADS * RANK));
        let attend = Attend {
            out,
            q,
            picks,
            pools_kept: kept,
            kv_lora_rank: RANK,
            scale: 1.0 / 16.0,
            kpool,
            page_rows: PAGE,
            spans,
        };
        let listed: usize =
            (0..rows).map(|row| visible(row).min(kept) * kpool + (position + row + 1) % kpool).sum();
        let flops = 4 * listed * HEADS * RANK;
        self.report(&format!("attend at {position}"), rows, flops, element.size() * listed * RANK, |cpu| {
            cpu.attend(&attend)
        });
    }
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|threads| threads.parse().ok()).unwrap_or(1);
    let options = Options::detect(threads);
    println!("{options:?}");
    let mut bench = Bench { cpu: Cpu::new(options).unwrap(), seed: 1 };
    for rows in [1, 512] {
        bench.norms_and_streams(rows);
        bench.feed(rows);
        bench.recurrent(rows);
    }
    for (rows, position) in [(1, 600), (1, 32_000), (512, 0), (64, 2048), (64, 8192)] {
        bench.attention(rows, position);
    }
}
