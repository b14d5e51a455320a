//! The bench's figures as a table for people and as JSON for programs.

use std::fmt::Write as _;

use flint_cpu::Options;
use flint_cpu::limits::MachineLimits;
use flint_weights::{Checkpoint, LoadPlan};
use serde_json::{Value, json};

use super::measure::{Decode, PROMPT_BEFORE_DECODE, Prefill};
use super::roof::{Roof, peak};
use crate::assemble::arithmetic_name;
use crate::config::settings::{BenchSettings, ModelSettings};
use crate::device::ROWS;
use crate::machine;
use crate::terminal::{bytes, counted};

/// Everything with one number of threads.
pub(super) struct Run {
    pub(super) limits: MachineLimits,
    pub(super) prefills: Vec<Prefill>,
    pub(super) decodes: Vec<Decode>,
}

/// All figures.
pub(super) struct Report<'a> {
    model: &'a ModelSettings,
    plan: &'a LoadPlan,
    settings: &'a BenchSettings,
    roof: &'a Roof,
    model_hash: String,
    processor: String,
    runs: Vec<Run>,
}

impl<'a> Report<'a> {
    /// The figures of `runs`.
    pub(super) fn new(
        model: &'a ModelSettings,
        checkpoint: &Checkpoint,
        plan: &'a LoadPlan,
        settings: &'a BenchSettings,
        roof: &'a Roof,
        runs: Vec<Run>,
    ) -> Self {
        let processor = machine::processor().unwrap_or_else(|| std::env::consts::ARCH.into());
        let model_hash = checkpoint.manifest_digest();
        Self { model, plan, settings, roof, model_hash, processor, runs }
    }

    fn device(&self) -> Options {
        self.model.cpu
    }

    /// The table.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = self.write(&mut text);
        text.trim_end().to_owned()
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let model = &self.plan.model;
        writeln!(
            out,
            "{} · {} · {:.2} G parameters, {:.2} G a token · model {}",
            self.model.name,
            bytes(self.plan.resident_bytes()),
            model.parameters as f64 / 1e9,
            model.active_parameters as f64 / 1e9,
            short(&self.model_hash),
        )?;
        writeln!(
            out,
            "{} · {} · {} · best of {}",
            self.processor,
            counted(machine::cores(), "core"),
            arithmetic_name(self.device()),
            counted(self.settings.repeat, "round"),
        )?;
        for run in &self.runs {
            self.write_run(out, run)?;
        }
        writeln!(
            out,
            "\nPrefill in parts of {ROWS} rows. Decode behind {PROMPT_BEFORE_DECODE} tokens a sequence, greedy. Shares: of this \
             run's own read bandwidth\nand multiply-add peak. Bytes: weights once, the experts that independent picks \
             touch, recurrent state in and out."
        )
    }

    fn write_run(&self, out: &mut String, run: &Run) -> std::fmt::Result {
        let limits = &run.limits;
        let dot = limits.dot_per_second.map(|rate| format!(", bf16 dot {:.0} GFLOP/s", rate / 1e9));
        writeln!(
            out,
            "\n{}: reads {:.1} GB/s, fp32 {:.0} GFLOP/s{}",
            counted(limits.threads, "thread"),
            limits.read_bytes_per_second / 1e9,
            limits.fma_per_second / 1e9,
            dot.unwrap_or_default()
        )?;
        let head = ["", "fed", "tok/s", "bytes/token", "of reads", "of peak"];
        let [name, fed, rate, size, reads, top] = head;
        writeln!(out, "  {name:<14}{fed:>10}{rate:>12}{size:>14}{reads:>11}{top:>11}  tokens")?;
        for row in self.rows(run) {
            writeln!(
                out,
                "  {:<14}{:>10}{:>12.1}{:>14}{:>10.1}%{:>10.1}%  {}",
                row.name(),
                row.tokens,
                row.rate(),
                bytes((row.bytes / row.tokens as f64) as u64),
                row.read_share(limits) * 100.0,
                row.peak_share(limits, self.device()) * 100.0,
                row.hash
            )?;
        }
        Ok(())
    }

    /// The run's figures in the order of the table.
    fn rows(&self, run: &Run) -> Vec<Row> {
        let prefill = |prefill: &Prefill| Row {
            kind: "prefill",
            size: prefill.tokens,
            batch: 1,
            tokens: prefill.tokens,
            seconds: prefill.seconds,
            bytes: self.roof.prefill_bytes(prefill.tokens, ROWS),
            operations: self.roof.prefill_operations(prefill.tokens),
            hash: prefill.prompt_hash.clone(),
        };
        let decode = |decode: &Decode| Row {
            kind: "decode",
            size: decode.batch,
            batch: decode.batch,
            tokens: decode.batch * decode.steps,
            seconds: decode.seconds,
            bytes: self.roof.decode_bytes(decode.batch) * decode.steps as f64,
            operations: self.roof.decode_operations(decode.batch) * decode.steps as f64,
            hash: decode.reply_hash.clone(),
        };
        run.prefills.iter().map(prefill).chain(run.decodes.iter().map(decode)).collect()
    }

    /// The same for programs.
    pub(super) fn json(&self) -> String {
        let model = &self.plan.model;
        let report = json!({
            "flint": env!("CARGO_PKG_VERSION"),
            "model": {
                "name": self.model.name,
                "hash": self.model_hash,
                "weight_bytes": self.plan.resident_bytes(),
                "parameters": model.parameters,
                "active_parameters": model.active_parameters,
            },
            "machine": { "processor": self.processor, "cores": machine::cores() },
            "arithmetic": arithmetic_name(self.device()),
            "rounds": self.settings.repeat,
            "prefill_rows": ROWS,
            "prompt_before_decode": PROMPT_BEFORE_DECODE,
            "limits": self.runs.iter().map(|run| limits_json(&run.limits)).collect::<Vec<_>>(),
            "runs": self.runs.iter().flat_map(|run| self.rows_json(run)).collect::<Vec<_>>(),
        });
        format!("{report:#}")
    }

    fn rows_json(&self, run: &Run) -> Vec<Value> {
        let limits = &run.limits;
        let row = |row: Row| {
            let (read, peak) = (row.read_share(limits), row.peak_share(limits, self.device()));
            json!({
                "kind": row.kind,
                "threads": limits.threads,
                "batch": row.batch,
                "tokens": row.tokens,
                "seconds": row.seconds,
                "tokens_per_second": row.rate(),
                "bytes_per_token": row.bytes / row.tokens as f64,
                "share_of_reads": read,
                "share_of_peak": peak,
                // The roof that binds is the one whose share is larger.
                "share_of_roof": read.max(peak),
                "hash": row.hash,
            })
        };
        self.rows(run).into_iter().map(row).collect()
    }
}

fn limits_json(limits: &MachineLimits) -> Value {
    json!({
        "threads": limits.threads,
        "read_bytes_per_second": limits.read_bytes_per_second,
        "fma_per_second": limits.fma_per_second,
        "dot_per_second": limits.dot_per_second,
    })
}

/// One measurement beside what it asked for.
struct Row {
    kind: &'static str,
    /// Tokens of the prompt, or sequences together.
    size: usize,
    batch: usize,
    /// Tokens that were fed.
    tokens: usize,
    seconds: f64,
    bytes: f64,
    operations: f64,
    hash: String,
}

impl Row {
    fn name(&self) -> String {
        let by = if self.kind == "decode" { "× " } else { "" };
        format!("{} {by}{}", self.kind, self.size)
    }

    fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    fn read_share(&self, limits: &MachineLimits) -> f64 {
        self.bytes / self.seconds / limits.read_bytes_per_second
    }

    fn peak_share(&self, limits: &MachineLimits, device: Options) -> f64 {
        self.operations / self.seconds / peak(limits, device)
    }
}

fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}
