//! The bench's figures as a table for people and as JSON for programs.

use std::fmt::Write as _;

use flint_weights::{Checkpoint, LoadPlan};
use serde_json::{Value, json};

use super::measure::{Decode, Marked, Prefill, WINDOW};
use super::roof::{Limits, Roof};
use super::scan::Scan;
use crate::config::settings::{BenchSettings, ModelSettings};
use crate::machine;
use crate::terminal::{bytes, counted};

/// Everything at one place.
pub(super) struct Run {
    pub(super) limits: Limits,
    pub(super) scans: Vec<Scan>,
    /// From an open checkpoint to a model that answers.
    pub(super) load_seconds: f64,
    pub(super) prefills: Vec<Prefill>,
    pub(super) decodes: Vec<Decode>,
    pub(super) blocks: Vec<Decode>,
    pub(super) marked: Vec<Marked>,
}

/// All figures.
pub(super) struct Report<'a> {
    model: &'a ModelSettings,
    plan: &'a LoadPlan,
    settings: &'a BenchSettings,
    roof: &'a Roof,
    model_hash: String,
    processor: String,
    /// The arithmetic in words.
    arithmetic: String,
    /// Rows of one forward.
    rows: usize,
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
        (arithmetic, rows): (String, usize),
        runs: Vec<Run>,
    ) -> Self {
        let processor = machine::processor().unwrap_or_else(|| std::env::consts::ARCH.into());
        let model_hash = checkpoint.manifest_digest();
        Self { model, plan, settings, roof, model_hash, processor, arithmetic, rows, runs }
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
            self.arithmetic,
            counted(self.settings.repeat, "round"),
        )?;
        for run in &self.runs {
            self.write_run(out, run)?;
        }
        writeln!(
            out,
            "\nPrefill in parts of {} rows. Decode behind {} tokens a sequence, greedy; a block is rows of one sequence. \
             Shares: of\nthis run's own bandwidth and multiply-add peak. Bytes: weights once, the experts that \
             rows picked,\nrecurrent state in and out, what is read of earlier positions.",
            self.rows, self.settings.behind,
        )
    }

    fn write_run(&self, out: &mut String, run: &Run) -> std::fmt::Result {
        let limits = &run.limits;
        write!(out, "\n{}: moves {:.1} GB/s", limits.place, limits.bytes_per_second / 1e9)?;
        for (what, rate) in &limits.rates {
            write!(out, ", {what} {:.0} GFLOP/s", rate / 1e9)?;
        }
        let loaded = self.plan.resident_bytes() as f64 / run.load_seconds / 1e9;
        writeln!(out, "; loaded in {:.1} s ({loaded:.1} GB/s)", run.load_seconds)?;
        if let Some(rate) = limits.upload_bytes_per_second {
            writeln!(out, "pinned host memory to the device: {:.1} GB/s", rate / 1e9)?;
        }
        for scan in &run.scans {
            write_scan(out, scan, limits)?;
        }
        let head = ["", "fed", "tok/s", "bytes/token", "of bytes", "of peak", "experts", "kernels"];
        let [name, fed, rate, size, reads, top, experts, kernels] = head;
        writeln!(
            out,
            "  {name:<18}{fed:>10}{rate:>12}{size:>14}{reads:>11}{top:>10}{experts:>9}{kernels:>9}  tokens"
        )?;
        for row in self.rows(run) {
            writeln!(
                out,
                "  {:<18}{:>10}{:>12.1}{:>14}{:>10.1}%{:>10}{:>9}{:>9}  {}",
                row.name(),
                row.tokens,
                row.rate(),
                bytes((row.bytes / row.tokens as f64) as u64),
                row.byte_share(limits) * 100.0,
                row.peak_share(limits).map_or("-".to_owned(), |share| format!("{:.1}%", share * 100.0)),
                row.experts.map_or("-".to_owned(), |count| format!("{count:.1}")),
                row.kernels.map_or("-".to_owned(), |count| format!("{count:.0}")),
                row.hash
            )?;
        }
        for Marked { kind, rows, kernels } in &run.marked {
            writeln!(out, "  marked: {kind} of {rows}, {kernels} kernels")?;
        }
        Ok(())
    }

    /// The run's figures in the order of the table.
    fn rows(&self, run: &Run) -> Vec<Row> {
        let last = |prefill: &Prefill| {
            let seconds = *prefill.windows.last().filter(|_| prefill.windows.len() > 1)?;
            let tokens = (prefill.tokens - 1) % WINDOW + 1;
            let row = Row {
                kind: "prefill end",
                tokens,
                seconds,
                bytes: self.roof.prefill_bytes(tokens, self.rows),
                operations: self.roof.prefill_operations(tokens),
                ..self.prefill_row(prefill)
            };
            Some(row)
        };
        let behind = self.settings.behind;
        let decode = |decode: &Decode| Row {
            kind: "decode",
            size: decode.batch,
            batch: decode.batch,
            tokens: decode.batch * decode.steps,
            seconds: decode.seconds,
            bytes: self.roof.decode_bytes(decode.batch, decode.experts, behind + decode.steps / 2)
                * decode.steps as f64,
            operations: self.roof.decode_operations(decode.batch) * decode.steps as f64,
            experts: decode.experts,
            kernels: decode.kernels,
            hash: decode.reply_hash.clone(),
        };
        let block = |block: &Decode| Row {
            kind: "block",
            bytes: self.roof.block_bytes(block.batch, block.experts, behind + block.steps / 2)
                * block.steps as f64,
            ..decode(block)
        };
        let prefills = run.prefills.iter().flat_map(|row| [Some(self.prefill_row(row)), last(row)]).flatten();
        prefills.chain(run.decodes.iter().map(decode)).chain(run.blocks.iter().map(block)).collect()
    }

    fn prefill_row(&self, prefill: &Prefill) -> Row {
        Row {
            kind: "prefill",
            size: prefill.tokens,
            batch: 1,
            tokens: prefill.tokens,
            seconds: prefill.seconds,
            bytes: self.roof.prefill_bytes(prefill.tokens, self.rows),
            operations: self.roof.prefill_operations(prefill.tokens),
            experts: None,
            kernels: None,
            hash: prefill.prompt_hash.clone(),
        }
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
                "layers": model.layers,
                "experts": model.experts,
                "experts_per_token": model.experts_per_token,
                "parameters": model.parameters,
                "active_parameters": model.active_parameters,
            },
            "machine": { "processor": self.processor, "cores": machine::cores() },
            "arithmetic": self.arithmetic,
            "rounds": self.settings.repeat,
            "prefill_rows": self.rows,
            "prompt_before_decode": self.settings.behind,
            "load_seconds": self.runs.iter().map(|run| run.load_seconds).collect::<Vec<_>>(),
            "limits": self.runs.iter().map(|run| limits_json(&run.limits)).collect::<Vec<_>>(),
            "scans": self.runs.iter().flat_map(scans_json).collect::<Vec<_>>(),
            "marked": self.runs.iter().flat_map(|run| marked_json(&run.marked)).collect::<Vec<_>>(),
            "runs": self.runs.iter().flat_map(|run| self.rows_json(run)).collect::<Vec<_>>(),
        });
        format!("{report:#}")
    }

    fn rows_json(&self, run: &Run) -> Vec<Value> {
        let limits = &run.limits;
        let row = |row: Row| {
            let (bytes, peak) = (row.byte_share(limits), row.peak_share(limits));
            json!({
                "kind": row.kind,
                "threads": limits.threads,
                "batch": row.batch,
                "tokens": row.tokens,
                "seconds": row.seconds,
                "tokens_per_second": row.rate(),
                "size": row.size,
                "distinct_experts": row.experts,
                "kernels": row.kernels,
                "bytes_per_token": row.bytes / row.tokens as f64,
                "operations_per_token": row.operations / row.tokens as f64,
                "share_of_bytes": bytes,
                "share_of_peak": peak,
                // The roof that binds is the one whose share is larger.
                "share_of_roof": bytes.max(peak.unwrap_or_default()),
                "hash": row.hash,
            })
        };
        self.rows(run).into_iter().map(row).collect()
    }
}

fn write_scan(out: &mut String, scan: &Scan, limits: &Limits) -> std::fmt::Result {
    writeln!(
        out,
        "scan of {} rows, {} heads of {}: {:.3} ms ({:.1} % of bytes), with norms and gates {:.3} ms",
        scan.rows,
        scan.heads,
        scan.head_dim,
        scan.seconds * 1e3,
        scan.bytes() / scan.seconds / limits.bytes_per_second * 100.0,
        scan.prepared_seconds * 1e3,
    )
}

fn scans_json(run: &Run) -> Vec<Value> {
    let scan = |scan: &Scan| {
        json!({
            "rows": scan.rows,
            "heads": scan.heads,
            "head_dim": scan.head_dim,
            "seconds": scan.seconds,
            "prepared_seconds": scan.prepared_seconds,
            "bytes": scan.bytes(),
            "share_of_bytes": scan.bytes() / scan.seconds / run.limits.bytes_per_second,
        })
    };
    run.scans.iter().map(scan).collect()
}

fn marked_json(marked: &[Marked]) -> Vec<Value> {
    marked
        .iter()
        .map(|step| json!({ "kind": step.kind, "rows": step.rows, "kernels": step.kernels }))
        .collect()
}

fn limits_json(limits: &Limits) -> Value {
    let rates = limits.rates.iter().map(|(what, rate)| ((*what).to_owned(), json!(rate)));
    json!({
        "place": limits.place,
        "threads": limits.threads,
        "bytes_per_second": limits.bytes_per_second,
        "upload_bytes_per_second": limits.upload_bytes_per_second,
        "operations_per_second": rates.collect::<serde_json::Map<_, _>>(),
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
    /// Different experts that a step's rows picked in a layer.
    experts: Option<f64>,
    /// Kernels of a step.
    kernels: Option<f64>,
    hash: String,
}

impl Row {
    fn name(&self) -> String {
        let by = if self.kind.starts_with("prefill") { "" } else { "× " };
        format!("{} {by}{}", self.kind, self.size)
    }

    fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    fn byte_share(&self, limits: &Limits) -> f64 {
        self.bytes / self.seconds / limits.bytes_per_second
    }

    fn peak_share(&self, limits: &Limits) -> Option<f64> {
        Some(self.operations / self.seconds / limits.peak?)
    }
}

fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}
