//! `flint bench`: speed as shares of what this machine can do.
//!
//! [`measure`] feeds real tokens to the model, [`subject`] counts the experts that they pick, [`roof`] the bytes and
//! operations that they ask for, [`scan`] measures one operation alone, [`report`] writes all beside the machine's own rates, which are measured in the same run. Threads and sizes take turns, and the
//! best round of each figure counts: on a shared machine the others' work only ever slows a round down.

mod measure;
mod report;
mod roof;
mod scan;
mod subject;

use std::process::ExitCode;
use std::time::Instant;

use flint_backend::Backend;
use flint_cpu::Cpu;
use flint_cpu::limits;
use flint_cuda::Cuda;
use flint_weights::{Checkpoint, LoadPlan};

use crate::assemble;
use crate::config::BenchFlags;
use crate::config::settings::{BenchSettings, ModelSettings};
use crate::device::Chosen;
use crate::error::{Error, Result};
use crate::terminal::{Style, Terminal, counted};
use flint_model::Glm;
use measure::{Decode, Feeder, Marked, Prefill};
use report::{Report, Run};
use roof::{Limits, Roof};
use scan::Scan;
use subject::Subject;

/// Measures and reports.
pub(crate) fn run(flags: &BenchFlags, terminal: Terminal) -> Result<ExitCode> {
    let settings = BenchSettings::new(flags)?;
    let context = context(&settings);
    let most = settings.batches.iter().copied().max().unwrap_or(1);
    let of_threads = |&threads: &usize| ModelSettings::bench(flags, threads, context, most);
    let models: Vec<ModelSettings> = settings.threads.iter().map(of_threads).collect();
    let Some(first) = models.first() else { return Ok(ExitCode::SUCCESS) };
    let mut checkpoint = Checkpoint::open(first.source.clone())?;
    if flags.draw_experts {
        checkpoint.draw_experts();
    }
    refuse_long(&checkpoint, context)?;
    let (chosen, plan, _) = assemble::plan(&checkpoint, first)?;
    assemble::check_memory(&plan, first, terminal)?;
    let roof = Roof::new(&plan, checkpoint.config());
    let rows = chosen.rows(first);
    let bench = Bench { checkpoint: &checkpoint, plan: &plan, settings: &settings, rows, terminal };
    let (arithmetic, runs) = match chosen {
        Chosen::Cpu { .. } => {
            let runs = models.iter().map(|model| bench.on_cpu(model)).collect::<Result<_>>()?;
            (assemble::arithmetic_name(first.cpu), runs)
        }
        Chosen::Cuda(cuda) => (cuda.arithmetic(), vec![bench.on_device(first, *cuda)?]),
    };
    let report = Report::new(first, &checkpoint, &plan, &settings, &roof, (arithmetic, rows), runs);
    let text = if flags.json { report.json() } else { report.text() };
    terminal.line(Style::Plain, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Longest sequence of the bench.
fn context(settings: &BenchSettings) -> usize {
    const LEAST: usize = 64;
    let longest = settings.prompts.iter().copied().max().unwrap_or(0);
    let block = settings.blocks.iter().copied().max().unwrap_or(0);
    let decoded = settings.behind + settings.decode + measure::COUNTED + block;
    longest.max(decoded).max(LEAST) + 1
}

fn refuse_long(checkpoint: &Checkpoint, context: usize) -> Result<()> {
    let most = checkpoint.config().max_positions;
    if context <= most {
        return Ok(());
    }
    Err(Error::Option {
        option: "--prompt, --behind or --decode".into(),
        value: (context - 1).to_string(),
        expected: format!("this model holds {most} tokens at most"),
    })
}

/// What is measured.
struct Bench<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a LoadPlan,
    settings: &'a BenchSettings,
    /// Rows of one forward.
    rows: usize,
    terminal: Terminal,
}

impl Bench<'_> {
    /// Everything with one number of threads.
    fn on_cpu(&self, model: &ModelSettings) -> Result<Run> {
        let place = counted(model.cpu.threads, "thread");
        self.terminal.note(Style::Dim, &format!("measuring with {place}"));
        let before = cpu_limits(&place, model)?;
        let mut cpu = Cpu::new(model.cpu)?;
        let scans = self.scans(&mut cpu)?;
        let mut run = self.measure(model, cpu, (before, scans))?;
        run.limits = run.limits.better(&cpu_limits(&place, model)?);
        Ok(run)
    }

    /// Everything on a CUDA device.
    fn on_device(&self, model: &ModelSettings, mut cuda: Cuda) -> Result<Run> {
        let place = cuda.info().name.clone();
        self.terminal.note(Style::Dim, &format!("measuring on {place}"));
        let limits = Limits::of_device(place, &cuda.measure_limits()?);
        let scans = self.scans(&mut cuda)?;
        self.measure(model, cuda, (limits, scans))
    }

    /// Scans alone.
    fn scans<B: Backend>(&self, backend: &mut B) -> Result<Vec<Scan>> {
        let config = self.checkpoint.config();
        let heads = (config.linear_heads, config.linear_head_dim);
        self.settings.scans.iter().map(|&rows| scan::measure(backend, heads, rows)).collect()
    }

    /// Loads the model and runs all rounds.
    fn measure<B: Backend>(
        &self,
        model: &ModelSettings,
        backend: B,
        (limits, scans): (Limits, Vec<Scan>),
    ) -> Result<Run>
    where
        Glm<B>: Subject,
    {
        let settings = self.settings;
        let began = Instant::now();
        let sizes = (self.plan.request.context, self.rows);
        let model = assemble::load(self.checkpoint, model, backend, sizes, self.terminal)?;
        let load_seconds = began.elapsed().as_secs_f64();
        let mut feeder = Feeder::new(model, self.rows, settings.behind);
        let mut prefills: Vec<Option<Prefill>> = vec![None; settings.prompts.len()];
        let mut decodes: Vec<Option<Decode>> = vec![None; settings.batches.len()];
        let mut blocks: Vec<Option<Decode>> = vec![None; settings.blocks.len()];
        for _ in 0..settings.repeat {
            for (best, &tokens) in prefills.iter_mut().zip(&settings.prompts) {
                let round = feeder.prefill(tokens)?;
                *best = Some(match best.take() {
                    Some(best) => best.better(round),
                    None => round,
                });
            }
            for (best, &batch) in decodes.iter_mut().zip(&settings.batches) {
                keep_better(best, feeder.decode(batch, settings.decode)?)?;
            }
            for (best, &rows) in blocks.iter_mut().zip(&settings.blocks) {
                keep_better(best, feeder.block(rows, settings.decode)?)?;
            }
        }
        let marked = if settings.profile { self.marks(&mut feeder)? } else { Vec::new() };
        Ok(Run {
            limits,
            scans,
            load_seconds,
            marked,
            prefills: prefills.into_iter().flatten().collect(),
            decodes: decodes.into_iter().flatten().collect(),
            blocks: blocks.into_iter().flatten().collect(),
        })
    }
}

impl Bench<'_> {
    /// One step of each figure between a profiler's marks.
    fn marks<M: Subject>(&self, feeder: &mut Feeder<M>) -> Result<Vec<Marked>> {
        let Self { settings, .. } = self;
        let decodes: Vec<_> =
            settings.batches.iter().map(|&n| feeder.mark_decode(n)).collect::<Result<_>>()?;
        let blocks: Vec<_> = settings.blocks.iter().map(|&n| feeder.mark_block(n)).collect::<Result<_>>()?;
        let prefills: Vec<_> =
            settings.prompts.iter().map(|&n| feeder.mark_prefill(n)).collect::<Result<_>>()?;
        Ok([decodes, blocks, prefills].concat())
    }
}

fn keep_better(best: &mut Option<Decode>, round: Decode) -> Result<()> {
    *best = Some(match best.take() {
        Some(best) => best.better(round)?,
        None => round,
    });
    Ok(())
}

fn cpu_limits(place: &str, model: &ModelSettings) -> Result<Limits> {
    let measured = limits::measure(model.cpu.threads)
        .ok_or_else(|| Error::Memory("measuring read bandwidth needs 512 MiB".into()))?;
    Ok(Limits::of_cpu(place.to_owned(), &measured, model.cpu))
}
