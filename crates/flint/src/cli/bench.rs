//! `flint bench`: speed as shares of what this machine can do.
//!
//! [`measure`] feeds real tokens to the model, [`roof`] counts the bytes and operations that they ask for, [`report`]
//! writes both beside the machine's own rates, which are measured in the same run. Threads and sizes take turns, and the
//! best round of each figure counts: on a shared machine the others' work only ever slows a round down.

mod measure;
mod report;
mod roof;

use std::process::ExitCode;

use flint_cpu::Cpu;
use flint_cpu::limits::{self, MachineLimits};
use flint_weights::{Checkpoint, LoadPlan};

use crate::assemble;
use crate::config::BenchFlags;
use crate::config::settings::{BenchSettings, ModelSettings};
use crate::device::ROWS;
use crate::error::{Error, Result};
use crate::terminal::{Style, Terminal, counted};
use measure::{Decode, Feeder, PROMPT_BEFORE_DECODE, Prefill};
use report::{Report, Run};
use roof::Roof;

/// Measures and reports.
pub(crate) fn run(flags: &BenchFlags, terminal: Terminal) -> Result<ExitCode> {
    let settings = BenchSettings::new(flags)?;
    let context = context(&settings);
    let most = settings.batches.iter().copied().max().unwrap_or(1);
    let models: Vec<ModelSettings> =
        settings.threads.iter().map(|&threads| ModelSettings::bench(flags, threads, context, most)).collect();
    let Some(first) = models.first() else { return Ok(ExitCode::SUCCESS) };
    let checkpoint = Checkpoint::open(first.source.clone())?;
    refuse_long(&checkpoint, context)?;
    let (_, plan, _) = assemble::plan(&checkpoint, first)?;
    assemble::check_memory(&plan, first, terminal)?;
    let roof = Roof::new(&plan);
    let mut runs = Vec::new();
    for model in &models {
        terminal.note(Style::Dim, &format!("measuring with {}", counted(model.cpu.threads, "thread")));
        runs.push(measure(&checkpoint, &plan, model, &settings, terminal)?);
    }
    let report = Report::new(first, &checkpoint, &plan, &settings, &roof, runs);
    let text = if flags.json { report.json() } else { report.text() };
    terminal.line(Style::Plain, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Longest sequence of the bench.
fn context(settings: &BenchSettings) -> usize {
    const LEAST: usize = 64;
    let longest = settings.prompts.iter().copied().max().unwrap_or(0);
    longest.max(PROMPT_BEFORE_DECODE + settings.decode).max(LEAST) + 1
}

fn refuse_long(checkpoint: &Checkpoint, context: usize) -> Result<()> {
    let most = checkpoint.config().max_positions;
    if context <= most {
        return Ok(());
    }
    Err(Error::Option {
        option: "--prompt or --decode".into(),
        value: (context - 1).to_string(),
        expected: format!("this model holds {most} tokens at most"),
    })
}

/// One run: everything with one number of threads.
fn measure(
    checkpoint: &Checkpoint,
    plan: &LoadPlan,
    model: &ModelSettings,
    settings: &BenchSettings,
    terminal: Terminal,
) -> Result<Run> {
    let threads = model.cpu.threads;
    let mut limits = machine_limits(threads)?;
    let glm =
        assemble::load(checkpoint, model, Cpu::new(model.cpu)?, (plan.request.context, ROWS), terminal)?;
    let mut feeder = Feeder::new(glm, ROWS);
    let mut prefills: Vec<Option<Prefill>> = vec![None; settings.prompts.len()];
    let mut decodes: Vec<Option<Decode>> = vec![None; settings.batches.len()];
    for _ in 0..settings.repeat {
        for (best, &tokens) in prefills.iter_mut().zip(&settings.prompts) {
            let round = feeder.prefill(tokens)?;
            *best = Some(match best.take() {
                Some(best) => best.better(round),
                None => round,
            });
        }
        for (best, &batch) in decodes.iter_mut().zip(&settings.batches) {
            let round = feeder.decode(batch, settings.decode)?;
            *best = Some(match best.take() {
                Some(best) => best.better(round)?,
                None => round,
            });
        }
        limits = better(limits, machine_limits(threads)?);
    }
    Ok(Run {
        limits,
        prefills: prefills.into_iter().flatten().collect(),
        decodes: decodes.into_iter().flatten().collect(),
    })
}

fn machine_limits(threads: usize) -> Result<MachineLimits> {
    limits::measure(threads).ok_or_else(|| Error::Memory("measuring read bandwidth needs 512 MiB".into()))
}

/// The higher of both rates each: a roof is what the machine can give at best.
fn better(one: MachineLimits, other: MachineLimits) -> MachineLimits {
    MachineLimits {
        threads: one.threads,
        read_bytes_per_second: one.read_bytes_per_second.max(other.read_bytes_per_second),
        fma_per_second: one.fma_per_second.max(other.fma_per_second),
        dot_per_second: one.dot_per_second.zip(other.dot_per_second).map(|(one, other)| one.max(other)),
    }
}
