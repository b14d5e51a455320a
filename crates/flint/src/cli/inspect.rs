//! `flint inspect`: what is in a checkpoint's or a pack's folder. Only headers and manifests are read.

use std::fmt::Write as _;
use std::process::ExitCode;

use flint_weights::pack::{BankSummary, LayerSummary, Summary, inspect};

use crate::config::InspectFlags;
use crate::error::{Error, Result};
use crate::terminal::{Style, Terminal, bytes, counted, printable};

/// Prints the table.
pub(crate) fn run(flags: &InspectFlags, terminal: Terminal) -> Result<ExitCode> {
    let summary = inspect(&flags.dir)?;
    let text = if flags.json {
        serde_json::to_string_pretty(&summary)
            .map_err(|error| Error::Io { what: "writing the summary as JSON".into(), source: error.into() })?
    } else {
        printable(table(&summary).trim_end())
    };
    terminal.line(Style::Plain, &text)?;
    Ok(ExitCode::SUCCESS)
}

fn table(summary: &Summary) -> String {
    let kind = if summary.is_pack { "a streaming pack" } else { "a checkpoint" };
    let mut text = format!("{}: {kind}\n", summary.folder);
    let mut row = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<16} {value}");
    };
    if let Some(origin) = &summary.origin {
        row("made of", origin.clone());
    }
    row("shards", format!("{}, {}", counted(summary.shards, "file"), counted(summary.tensors, "tensor")));
    row("other tensors", bytes(summary.trunk_bytes));
    row("routed experts", format!("{}, {} a layer", bytes(summary.expert_bytes), summary.experts));
    for bank in &summary.banks {
        let aligned = if summary.is_pack {
            format!(", records at multiples of {}", bank.alignment)
        } else {
            String::new()
        };
        row(&bank.file, format!("{}{aligned}", bytes(bank.bytes)));
        for layer in &bank.layers {
            row("", layer_row(bank, layer));
        }
    }
    for profile in &summary.profiles {
        row("profile", profile.clone());
    }
    if let Some(fit) = &summary.fit {
        row("bank-fit.json", fit.clone());
    }
    for note in &summary.notes {
        row("note", note.clone());
    }
    text
}

/// `layers 3-44: exl3 K=3, 9.04 MiB an expert, one read`.
fn layer_row(bank: &BankSummary, layer: &LayerSummary) -> String {
    let range = |(first, last): &(usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    let ranges = layer.layers.iter().map(range).collect::<Vec<_>>().join(", ");
    let many = layer.layers.len() > 1 || layer.layers.iter().any(|(first, last)| first != last);
    let reads = if bank.alignment > 1 { "one aligned read".to_owned() } else { counted(layer.reads, "read") };
    let noun = if many { "layers" } else { "layer" };
    format!("{noun} {ranges}: {}, {} an expert, {reads}", layer.form, bytes(layer.expert_bytes))
}
