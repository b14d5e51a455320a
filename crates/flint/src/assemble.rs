//! From options to a running engine: open, plan, upload, start. The only place that names a backend.

use std::sync::Arc;

use flint_backend::Backend;
use flint_chat::{ChatFiles, ChatFormat};
use flint_cpu::{Arithmetic, Cpu, Options};
use flint_engine::{Engine, EngineOptions};
use flint_model::bank::{BankOptions, Experts};
use flint_model::{Glm, GlmOptions, LanguageModel};
use flint_weights::config::FeedForward;
use flint_weights::pack::profile::{Phase, Usage, UsageProfile};
use flint_weights::stream::{ExpertStream, ReadOptions};
use flint_weights::{Checkpoint, HostBytes, LoadPlan, Source};

use crate::config::settings::ModelSettings;
use crate::device::{self, Chosen};
use crate::error::{Error, Result};
use crate::progress::{bytes_bar, show};
use crate::terminal::{Style, Terminal, bytes, counted};

/// A loaded model with everything around it.
pub(crate) struct Assembled {
    /// The running engine.
    pub(crate) engine: Engine,
    /// Tokenizer and template.
    pub(crate) chat: Arc<ChatFormat>,
    /// What users call the model.
    pub(crate) name: String,
    /// A line about the model and how it runs.
    pub(crate) summary: String,
}

/// Loads a model and starts its engine; `queue` requests may wait.
pub(crate) fn assemble(settings: &ModelSettings, queue: usize, terminal: Terminal) -> Result<Assembled> {
    let checkpoint = Arc::new(Checkpoint::open(settings.source.clone())?);
    let chat = Arc::new(chat_format(&settings.source)?);
    let (chosen, plan, context) = plan(&checkpoint, settings)?;
    check_memory(&plan, settings, terminal)?;
    let rows = chosen.rows(settings);
    let (model, place): (Box<dyn LanguageModel>, _) = match chosen {
        Chosen::Cpu { note } => {
            if let Some(note) = note {
                terminal.note(Style::Warning, &note);
            }
            let model =
                load((&checkpoint, &plan), settings, Cpu::new(settings.cpu)?, (context, rows), terminal)?;
            (Box::new(model), cpu_place(settings.cpu))
        }
        Chosen::Cuda(cuda) => {
            let place = format!("{} (cuda:{})", cuda.info().name, cuda.info().ordinal);
            (Box::new(load((&checkpoint, &plan), settings, *cuda, (context, rows), terminal)?), place)
        }
    };
    let weights = bytes(plan.resident_bytes());
    let experts = plan.slots.map_or(String::new(), |slots| {
        format!(" · {} of {} experts a layer, the others on disk", slots.slots, slots.experts)
    });
    let summary = format!("{} · {weights}{experts} · {place} · context {context}", settings.name);
    let options = EngineOptions { rows_per_round: rows, parallel: settings.parallel, queue };
    let engine = Engine::start(model, options);
    Ok(Assembled { engine, chat, name: settings.name.clone(), summary })
}

/// The device, what loading would take there, and the longest sequence.
pub(crate) fn plan(checkpoint: &Checkpoint, settings: &ModelSettings) -> Result<(Chosen, LoadPlan, usize)> {
    let context = settings.context(checkpoint.config().max_positions)?;
    let (chosen, plan) = device::choose(checkpoint, settings, context)?;
    Ok((chosen, plan, context))
}

/// Refuses a plan that does not fit, with its numbers.
pub(crate) fn check_memory(plan: &LoadPlan, settings: &ModelSettings, terminal: Terminal) -> Result<()> {
    let Some(text) = plan.shortage() else { return Ok(()) };
    if settings.force {
        terminal.note(Style::Warning, &text);
        return Ok(());
    }
    Err(Error::Memory(format!("{text} (--force loads it all the same)")))
}

/// Uploads the weights to a device, for sequences and forwards of at most so many rows.
pub(crate) fn load<B: Backend>(
    (checkpoint, plan): (&Arc<Checkpoint>, &LoadPlan),
    settings: &ModelSettings,
    backend: B,
    (context, rows): (usize, usize),
    terminal: Terminal,
) -> Result<Glm<B>> {
    let options = GlmOptions { context, sequences: settings.parallel, rows, drafts: settings.drafts };
    let bar = bytes_bar(format!("loading {}", settings.name), terminal);
    let experts = experts(checkpoint, plan, settings, terminal)?;
    let model = Glm::load(checkpoint, backend, options, experts, &mut |done, all| show(&bar, done, all))?;
    bar.finish_and_clear();
    Ok(model)
}

/// Where the experts are to be.
fn experts(
    checkpoint: &Arc<Checkpoint>,
    plan: &LoadPlan,
    settings: &ModelSettings,
    terminal: Terminal,
) -> Result<Experts> {
    let Some(slots) = &plan.slots else { return Ok(Experts::Resident) };
    let options = ReadOptions { verify: settings.verify, ..ReadOptions::default() };
    let stream = ExpertStream::open(Arc::clone(checkpoint), options)?;
    let usage = usage(checkpoint, terminal)?;
    let bank = BankOptions { slots: slots.slots, usage, ..BankOptions::default() };
    Ok(Experts::Streamed(Box::new(stream), bank))
}

/// How often experts were used before, by layer, where a profile lies beside the weights; that of decoding first.
fn usage(checkpoint: &Checkpoint, terminal: Terminal) -> Result<Vec<Vec<u64>>> {
    let config = checkpoint.config();
    let sparse = |layer: &usize| config.feed_forward[*layer] == FeedForward::Sparse;
    let layers: Vec<usize> = (0..config.layers()).filter(sparse).collect();
    for phase in [Phase::Decode, Phase::Prompt] {
        let Some(json) = checkpoint.source().read(phase.file())? else { continue };
        match UsageProfile::read(json.as_slice(), phase, &layers, config.experts) {
            Usage::Understood(profile) => {
                let mut usage = vec![Vec::new(); config.layers()];
                for layer in profile.layers {
                    usage[layer.layer] = layer.counts;
                }
                return Ok(usage);
            }
            Usage::NotUnderstood(why) => {
                let file = phase.file();
                terminal
                    .note(Style::Warning, &format!("{file} is left aside: {why}; expert slots start empty"));
            }
        }
    }
    Ok(Vec::new())
}

/// Tokenizer and template from the checkpoint's own files.
fn chat_format(source: &Source) -> Result<ChatFormat> {
    const TOKENIZER: &str = "tokenizer.json";
    let tokenizer = source
        .read(TOKENIZER)?
        .ok_or_else(|| Error::MissingFile { place: source.label(), file: TOKENIZER })?;
    let template = source.read("chat_template.jinja")?;
    let tokenizer_config = source.read("tokenizer_config.json")?;
    let generation_config = source.read("generation_config.json")?;
    let config = source.read("config.json")?;
    let template = template.as_ref().map(|bytes| String::from_utf8_lossy(bytes.as_slice()));
    let files = ChatFiles {
        tokenizer_json: tokenizer.as_slice(),
        chat_template: template.as_deref(),
        tokenizer_config: tokenizer_config.as_ref().map(HostBytes::as_slice),
        generation_config: generation_config.as_ref().map(HostBytes::as_slice),
        config: config.as_ref().map(HostBytes::as_slice),
    };
    Ok(ChatFormat::open(&files)?)
}

/// The CPU's part of the summary.
fn cpu_place(options: Options) -> String {
    format!("{} · {}", arithmetic_name(options), counted(options.threads, "thread"))
}

/// The arithmetic and instruction set in words.
pub(crate) fn arithmetic_name(options: Options) -> String {
    let arithmetic = match options.arithmetic {
        Arithmetic::Lanes => "fp32",
        Arithmetic::Dot => "bf16 dot",
    };
    format!("{arithmetic} ({})", format!("{:?}", options.level).to_lowercase())
}
