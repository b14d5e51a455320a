//! What a bank of streamed experts did during a bench.

use std::fmt::{Result, Write};

use flint_model::bank::report::{BankReport, Phase};
use serde_json::{Value, json};

use crate::terminal::bytes;

/// Lines of the table: what was read, and how long it was waited for. `raw` is the rate of plain reads.
pub(super) fn write(out: &mut String, bank: &BankReport, raw: f64) -> Result {
    let (prompt, decode) = (bank.total(Phase::Prompt), bank.total(Phase::Decode));
    let read = (prompt.bytes + decode.bytes) as f64;
    let reading = bank.reading.as_secs_f64();
    writeln!(
        out,
        "bank: {} of {} experts a layer, {} ({}); plain reads {:.2} GB/s, the bank's {:.2} GB/s = {:.0} %",
        bank.slots,
        bank.experts,
        bytes(bank.bank_bytes),
        bank.engine,
        raw / 1e9,
        read / reading.max(1e-9) / 1e9,
        read / reading.max(1e-9) / raw.max(1.0) * 100.0,
    )?;
    for (name, counts) in [("prompts", prompt), ("decode", decode)] {
        writeln!(
            out,
            "  {name}: {:.1} % of {} experts held, {} read, {:.2} s waited for, {:.1} waves a layer",
            counts.hit_rate() * 100.0,
            counts.asked,
            bytes(counts.bytes),
            counts.exposed.as_secs_f64(),
            counts.waves as f64 / counts.forwards.max(1) as f64,
        )?;
    }
    Ok(())
}

/// The same for programs.
pub(super) fn json(bank: &BankReport, raw: f64) -> Value {
    let phase = |phase| {
        let counts = bank.total(phase);
        json!({
            "forwards": counts.forwards,
            "asked": counts.asked,
            "held": counts.held,
            "waves": counts.waves,
            "bytes": counts.bytes,
            "exposed_seconds": counts.exposed.as_secs_f64(),
        })
    };
    json!({
        "slots": bank.slots,
        "experts": bank.experts,
        "bank_bytes": bank.bank_bytes,
        "engine": bank.engine,
        "raw_bytes_per_second": raw,
        "reading_seconds": bank.reading.as_secs_f64(),
        "prompt": phase(Phase::Prompt),
        "decode": phase(Phase::Decode),
    })
}
