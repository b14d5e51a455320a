//! Operations whose shapes contradict each other are refused by name, never run.

#![allow(clippy::unwrap_used, clippy::panic)] // a law that cannot run has failed

use flint_backend::ops::{
    Attend, Combine, DsaSpan, GatedNorm, GatherRows, HcPost, KdaConv, KdaScan, KdaSpan, LayerNorm,
    MeanStreams, Ops, RmsNorm, Route, SelectPools, SwiGlu,
};
use flint_backend::{Backend, Element, Error, Result, Rows};
use flint_cpu::{Cpu, CpuBuffer, Options};

fn cpu() -> Cpu {
    Cpu::new(Options::detect(1)).unwrap()
}

fn buffer(cpu: &mut Cpu, len: usize) -> CpuBuffer {
    cpu.allocate(Element::F32, len).unwrap()
}

fn rows(cpu: &mut Cpu, rows: usize, width: usize) -> Rows<CpuBuffer> {
    Rows::dense(&buffer(cpu, rows * width), rows, width)
}

fn assert_refused(result: Result<()>, op: &str, hint: &str) {
    match result {
        Err(Error::Shape { op: found, what }) => {
            assert_eq!(found, op);
            assert!(what.contains(hint), "{what:?} does not mention {hint:?}");
        }
        other => panic!("{op}: {other:?}"),
    }
}

#[test]
fn a_view_that_leaves_its_buffer_is_refused() {
    let cpu = &mut cpu();
    let (x, weight) = (rows(cpu, 2, 32), buffer(cpu, 32));
    for out in [
        Rows { rows: 3, ..x.clone() },
        Rows { first: 1, ..x.clone() },
        Rows { stride: usize::MAX, ..x.clone() },
        Rows { width: usize::MAX, ..x.clone() },
    ] {
        let norm = RmsNorm { out, x: x.clone(), weight: weight.clone(), epsilon: 1e-5 };
        assert_refused(cpu.rms_norm(&norm), "rms_norm", "is needed");
    }
}

#[test]
fn a_buffer_of_another_type_is_refused() {
    let cpu = &mut cpu();
    let x = rows(cpu, 2, 32);
    let numbers = cpu.allocate(Element::U32, 64).unwrap();
    let norm =
        RmsNorm { out: Rows::dense(&numbers, 2, 32), x: x.clone(), weight: buffer(cpu, 32), epsilon: 1e-5 };
    assert_refused(cpu.rms_norm(&norm), "rms_norm", "F32");
    let gather = GatherRows { out: x.clone(), x: x.clone(), index: buffer(cpu, 2) };
    assert_refused(cpu.gather_rows(&gather), "gather_rows", "U32");
}

#[test]
fn a_row_that_is_not_there_is_not_gathered() {
    let cpu = &mut cpu();
    let (out, x) = (rows(cpu, 2, 8), rows(cpu, 3, 8));
    let index = cpu.allocate(Element::U32, 2).unwrap();
    cpu.write_u32(&index, 0, &[2, 3]).unwrap();
    assert_refused(cpu.gather_rows(&GatherRows { out, x, index }), "gather_rows", "of 3 rows");
}

#[test]
fn widths_and_rows_that_disagree_are_refused() {
    let cpu = &mut cpu();
    let (a, b, c) = (rows(cpu, 2, 32), rows(cpu, 2, 48), rows(cpu, 3, 32));
    let (weight, bias) = (buffer(cpu, 48), buffer(cpu, 48));
    let layer = LayerNorm { out: a.clone(), x: b.clone(), weight: weight.clone(), bias, epsilon: 1e-6 };
    assert_refused(cpu.layer_norm(&layer), "layer_norm", "48");
    let gated =
        GatedNorm { out: a.clone(), o: a.clone(), gate: a.clone(), weight, head_dim: 20, epsilon: 1e-5 };
    assert_refused(cpu.gated_norm(&gated), "gated_norm", "32 channels of 20");
    let swiglu = SwiGlu { out: a.clone(), gate: a.clone(), up: c.clone(), limit: 10.0 };
    assert_refused(cpu.swiglu(&swiglu), "swiglu", "up 3");
    let mean = MeanStreams { out: a.clone(), streams: b.clone() };
    assert_refused(cpu.mean_streams(&mean), "mean_streams", "48");
    let post = HcPost { streams: rows(cpu, 2, 128), y: a.clone(), mix: a.clone() };
    assert_refused(cpu.hc_post(&post), "hc_post", "for 4 streams");
    let combine = Combine { out: a.clone(), pairs: c, weights: rows(cpu, 2, 2), shared: a };
    assert_refused(cpu.combine(&combine), "combine", "3 pairs");
}

#[test]
fn more_picks_than_the_kept_groups_have_are_refused() {
    let cpu = &mut cpu();
    let route = Route {
        picks: cpu.allocate(Element::U32, 10).unwrap(),
        weights: rows(cpu, 2, 5),
        logits: rows(cpu, 2, 16),
        bias: buffer(cpu, 16),
        picks_per_row: 5,
        groups: 4,
        groups_kept: 1,
        normalise: true,
        scaling: 1.0,
    };
    assert_refused(cpu.route(&route), "route", "5 picks of 16 experts");
}

#[test]
fn a_span_outside_the_batch_or_without_room_is_refused() {
    let cpu = &mut cpu();
    let span = KdaSpan {
        first_row: 1,
        logged: 0,
        sure: 2,
        drafts: 1,
        window: buffer(cpu, 3 * 96),
        state: buffer(cpu, 2 * 16 * 16),
        log: buffer(cpu, 0),
    };
    let (u, taps) = (rows(cpu, 3, 96), buffer(cpu, 4 * 96));
    let mut conv = KdaConv { out: rows(cpu, 3, 96), u, taps, tap_count: 4, spans: vec![span.clone()] };
    assert_refused(cpu.kda_conv(&conv), "kda_conv", "rows 1..4 of 3");
    conv.spans[0] = KdaSpan { drafts: 0, ..span.clone() };
    conv.spans.push(KdaSpan { first_row: 2, sure: 1, drafts: 0, ..span.clone() });
    assert_refused(cpu.kda_conv(&conv), "kda_conv", "two spans hold row 2");
    conv.spans = vec![KdaSpan { first_row: 0, ..span.clone() }];
    assert_refused(cpu.kda_conv(&conv), "kda_conv", "is needed");
    let (qkv, decay, beta) = (rows(cpu, 3, 96), rows(cpu, 3, 32), rows(cpu, 3, 2));
    let mut scan = KdaScan { out: rows(cpu, 3, 32), qkv, decay, beta, head_dim: 16, spans: vec![span] };
    assert_refused(cpu.kda_scan(&scan), "kda_scan", "rows 1..4 of 3");
    scan.spans[0].first_row = 0;
    assert_refused(cpu.kda_scan(&scan), "kda_scan", "is needed");
}

#[test]
fn a_sequence_with_too_few_pages_is_refused() {
    let cpu = &mut cpu();
    let span = DsaSpan { first_row: 0, rows: 2, position: 7, pages: vec![], ring: buffer(cpu, 64) };
    let picks = cpu.allocate(Element::U32, 8).unwrap();
    let select = SelectPools {
        picks: picks.clone(),
        q: rows(cpu, 2, 32),
        weights: rows(cpu, 2, 2),
        head_dim: 16,
        pools_kept: 4,
        kpool: 4,
        page_rows: 8,
        spans: vec![span.clone()],
    };
    assert_refused(cpu.select_pools(&select), "select_pools", "0 pages of 8");
    let (q, out) = (rows(cpu, 2, 32), rows(cpu, 2, 32));
    let attend = Attend {
        out,
        q,
        picks,
        pools_kept: 4,
        kv_lora_rank: 16,
        scale: 1.0,
        kpool: 4,
        page_rows: 9,
        spans: vec![span],
    };
    assert_refused(cpu.attend(&attend), "attend", "pages of 9 positions for pools of 4");
}
