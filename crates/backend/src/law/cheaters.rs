//! Backends that break one law each, on purpose. A suite that lets one through shows nothing.

use super::rows::{read_words, upload_f32, upload_u32, write_words};
use crate::ops::{
    ABSENT, Attend, Combine, DsaAppend, KdaConv, KdaScan, KdaSpan, Linear, Op, RmsNorm, Route, SelectPools,
    TopLogits,
};
use crate::wrap::{Hooked, OpOf};
use crate::{Backend, Element, Result, Rows};

/// What a cheater does with an operation.
type Hook<B> = fn(&mut B, OpOf<B>) -> Result<()>;

/// A broken backend.
struct Cheater<B: Backend> {
    /// What it does wrong.
    name: &'static str,
    /// The operation in which it does it.
    op: &'static str,
    hook: Hook<B>,
}

/// Names of the cheaters that the suite does not catch over this backend. None, if all is well.
pub fn uncaught_cheaters<B: Backend>(make: impl Fn() -> B) -> Vec<&'static str> {
    let caught = |cheater: &Cheater<B>| {
        !super::check(|| Hooked::new(make(), cheater.hook), cheater.op).violations.is_empty()
    };
    cheaters::<B>().iter().filter(|cheater| !caught(cheater)).map(|cheater| cheater.name).collect()
}

fn cheaters<B: Backend>() -> Vec<Cheater<B>> {
    let cheater = |name, op, hook| Cheater { name, op, hook };
    vec![
        cheater("cuts the inputs in two halves above 8 rows", "linear", split_by_rows::<B>),
        cheater("is one ulp off in row 7", "linear", one_ulp_in_row_seven::<B>),
        cheater("takes scales 1 % too large", "linear", scales_one_percent_off::<B>),
        cheater("lets rows share their largest value", "rms_norm", shared_maximum::<B>),
        cheater("writes behind its rows", "rms_norm", writes_behind::<B>),
        cheater("sums experts from the last when rows travel together", "combine", reversed_sum::<B>),
        cheater("takes absent experts for the first slot's", "expert_linear", absent_is_first::<B>),
        cheater("prefers the higher expert in a tie", "route", reversed_ties::<B>),
        cheater("stores the state after the drafts", "kda_scan", stores_after_drafts::<B>),
        cheater("forgets accepted drafts", "kda_scan", forgets_drafts::<B>),
        cheater("lets the window follow the drafts", "kda_conv", window_after_drafts::<B>),
        cheater("starts pools at the chunk", "dsa_append", pools_at_the_chunk::<B>),
        cheater("sees the pool that the next token completes", "select_pools", sees_ahead::<B>),
        cheater("lists the newest pool first when rows travel together", "attend", reversed_list::<B>),
        cheater("takes a NaN for the smallest logit", "top_logits", small_nan::<B>),
    ]
}

/// The elements of rows, read back.
fn read_rows<B: Backend>(backend: &mut B, rows: &Rows<B::Buffer>) -> Result<Vec<Vec<f32>>> {
    (0..rows.rows)
        .map(|row| {
            let mut values = vec![0.0; rows.width];
            backend.read_f32(&rows.buffer, rows.first + row * rows.stride, &mut values)?;
            Ok(values)
        })
        .collect()
}

fn write_rows<B: Backend>(backend: &mut B, rows: &Rows<B::Buffer>, values: &[Vec<f32>]) -> Result<()> {
    for (row, values) in values.iter().enumerate() {
        backend.write_f32(&rows.buffer, rows.first + row * rows.stride, values)?;
    }
    Ok(())
}

/// New dense rows with these values.
fn new_rows<B: Backend>(backend: &mut B, values: &[Vec<f32>]) -> Result<Rows<B::Buffer>> {
    let width = values.first().map_or(0, Vec::len);
    Ok(Rows::dense(&upload_f32(backend, &values.concat())?, values.len(), width))
}

fn absent_is_first<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::ExpertLinear(mut op) = op else { return op.run(backend) };
    let mut slots = [0; super::place::EXPERTS];
    if backend.read_u32(&op.slots, 0, &mut slots).is_err() {
        return backend.expert_linear(&op);
    }
    slots.iter_mut().filter(|slot| **slot == ABSENT).for_each(|slot| *slot = 0);
    op.slots = upload_u32(backend, &slots)?;
    backend.expert_linear(&op)
}

fn split_by_rows<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::Linear(op) = op else { return op.run(backend) };
    if op.x.rows <= 8 {
        return backend.linear(&op);
    }
    let x = read_rows(backend, &op.x)?;
    let mut sums: Option<Vec<Vec<f32>>> = None;
    for half in 0..2 {
        let mut part = x.clone();
        for row in &mut part {
            let (low, high) = row.split_at_mut(op.x.width / 2);
            if half == 0 { high.fill(0.0) } else { low.fill(0.0) }
        }
        let x = new_rows(backend, &part)?;
        backend.linear(&Linear { out: op.out.clone(), x, matrix: op.matrix.clone() })?;
        let found = read_rows(backend, &op.out)?;
        sums = Some(match sums {
            None => found,
            Some(sums) => {
                sums.iter().zip(&found).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
            }
        });
    }
    write_rows(backend, &op.out, &sums.unwrap_or_default())
}

fn one_ulp_in_row_seven<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::Linear(op) = op else { return op.run(backend) };
    backend.linear(&op)?;
    let mut out = read_rows(backend, &op.out)?;
    if let Some(row) = out.get_mut(7) {
        row[0] = f32::from_bits(row[0].to_bits() ^ 1);
    }
    write_rows(backend, &op.out, &out)
}

fn scales_one_percent_off<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::Linear(op) = op else { return op.run(backend) };
    backend.linear(&op)?;
    let mut out = read_rows(backend, &op.out)?;
    out.iter_mut().flatten().for_each(|value| *value *= 1.01);
    write_rows(backend, &op.out, &out)
}

fn shared_maximum<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::RmsNorm(op) = op else { return op.run(backend) };
    let mut x = read_rows(backend, &op.x)?;
    let finite = x.iter().flatten().copied().filter(|value| value.abs() < 1e20);
    // Scaling by a power of two and back changes bits only where a number leaves the normal range or meets epsilon.
    let scale = if finite.fold(0.0, f32::max) > 2.5 { 0.5 } else { 1.0 };
    x.iter_mut().flatten().for_each(|value| *value *= scale);
    let x = new_rows(backend, &x)?;
    backend.rms_norm(&RmsNorm { x, ..op })
}

fn writes_behind<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::RmsNorm(op) = op else { return op.run(backend) };
    backend.rms_norm(&op)?;
    if op.out.stride > op.out.width {
        backend.write_f32(&op.out.buffer, op.out.first + op.out.width, &[0.0])?;
    }
    Ok(())
}

fn reversed_sum<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::Combine(op) = op else { return op.run(backend) };
    if op.out.rows == 1 {
        return backend.combine(&op);
    }
    let (mut pairs, mut weights) = (read_rows(backend, &op.pairs)?, read_rows(backend, &op.weights)?);
    pairs.chunks_mut(op.weights.width).for_each(<[_]>::reverse);
    for row in &mut weights {
        row.reverse();
    }
    let (pairs, weights) = (new_rows(backend, &pairs)?, new_rows(backend, &weights)?);
    backend.combine(&Combine { pairs, weights, ..op })
}

fn reversed_ties<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::Route(op) = op else { return op.run(backend) };
    let experts = op.logits.width;
    let mut logits = read_rows(backend, &op.logits)?;
    for row in &mut logits {
        row.reverse();
    }
    let mut bias = vec![0.0; experts];
    backend.read_f32(&op.bias, 0, &mut bias)?;
    bias.reverse();
    let (logits, bias) = (new_rows(backend, &logits)?, upload_f32(backend, &bias)?);
    let count = op.logits.rows * op.picks_per_row;
    backend.route(&Route { logits, bias, ..op.clone() })?;
    let mut picks = read_words(backend, &op.picks, Element::U32, count)?;
    let mut weights = read_rows(backend, &op.weights)?;
    for (picks, weights) in picks.chunks_mut(op.picks_per_row).zip(&mut weights) {
        for pick in &mut *picks {
            *pick = experts as u32 - 1 - *pick;
        }
        picks.reverse();
        weights.reverse();
    }
    write_words(backend, &op.picks, Element::U32, &picks)?;
    write_rows(backend, &op.weights, &weights)
}

/// The drafts as sure rows.
fn all_sure<B: Backend>(spans: Vec<KdaSpan<B::Buffer>>) -> Vec<KdaSpan<B::Buffer>> {
    spans.into_iter().map(|span| KdaSpan { sure: span.sure + span.drafts, drafts: 0, ..span }).collect()
}

fn stores_after_drafts<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::KdaScan(op) = op else { return op.run(backend) };
    backend.kda_scan(&KdaScan { spans: all_sure::<B>(op.spans), ..op })
}

fn forgets_drafts<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::KdaScan(op) = op else { return op.run(backend) };
    let spans = op.spans.into_iter().map(|span| KdaSpan { logged: 0, ..span }).collect();
    backend.kda_scan(&KdaScan { spans, ..op })
}

fn window_after_drafts<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::KdaConv(op) = op else { return op.run(backend) };
    backend.kda_conv(&KdaConv { spans: all_sure::<B>(op.spans), ..op })
}

fn pools_at_the_chunk<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::DsaAppend(mut op) = op else { return op.run(backend) };
    let width = op.keys.as_ref().map_or(1, |keys| 2 * keys.width);
    for span in &mut op.spans {
        // The pool that the last chunk began is lost.
        backend.write_f32(&span.ring, 0, &vec![0.0; op.ring_rows * width])?;
    }
    backend.dsa_append(&DsaAppend { ..op })
}

fn sees_ahead<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::SelectPools(op) = op else { return op.run(backend) };
    let ahead = |mut span: crate::ops::DsaSpan<B::Buffer>| {
        // As far as the last page allows.
        if (span.position + span.rows) % op.page_rows != 0 {
            span.position += 1;
        }
        span
    };
    let spans = op.spans.iter().cloned().map(ahead).collect();
    backend.select_pools(&SelectPools { spans, ..op })
}

fn reversed_list<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::Attend(op) = op else { return op.run(backend) };
    if op.out.rows == 1 {
        return backend.attend(&op);
    }
    let mut picks = read_words(backend, &op.picks, Element::U32, op.out.rows * op.pools_kept)?;
    for row in picks.chunks_mut(op.pools_kept) {
        let picked = row.iter().take_while(|&&pool| pool != u32::MAX).count();
        row[..picked].reverse();
    }
    let picks = upload_u32(backend, &picks)?;
    backend.attend(&Attend { picks, ..op })
}

fn small_nan<B: Backend>(backend: &mut B, op: OpOf<B>) -> Result<()> {
    let Op::TopLogits(op) = op else { return op.run(backend) };
    let mut logits = read_rows(backend, &op.logits)?;
    logits.iter_mut().flatten().filter(|logit| logit.is_nan()).for_each(|logit| *logit = f32::NEG_INFINITY);
    let logits = new_rows(backend, &logits)?;
    backend.top_logits(&TopLogits { logits, ..op })
}
