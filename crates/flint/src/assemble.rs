//! From options to a running engine: open, plan, upload, start. The only place that names a backend.

use std::sync::Arc;

use flint_chat::{ChatFiles, ChatFormat};
use flint_cpu::{Arithmetic, Cpu, Options};
use flint_engine::{Engine, EngineOptions};
use flint_model::{Glm, GlmOptions};
use flint_weights::{Checkpoint, HostBytes, LoadPlan, PlanRequest, Source};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::config::settings::ModelSettings;
use crate::error::{Error, Result};
use crate::machine;
use crate::terminal::{Style, Terminal, bytes, counted};

/// Rows of one forward. Prompts are read in parts of this size: large enough that a part's arithmetic outweighs reading
/// the weights once, small enough that running replies wait for well under a second on a machine that suits the model.
pub(crate) const ROWS: usize = 512;

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
    let checkpoint = Checkpoint::open(settings.source.clone())?;
    let chat = Arc::new(chat_format(&settings.source)?);
    let (plan, context) = plan(&checkpoint, settings)?;
    check_memory(&plan, settings, terminal)?;
    let model = load(&checkpoint, settings, context, terminal)?;
    let summary = summary(settings, &plan, context);
    let options = EngineOptions { rows_per_round: ROWS, parallel: settings.parallel, queue };
    let engine = Engine::start(Box::new(model), options);
    Ok(Assembled { engine, chat, name: settings.name.clone(), summary })
}

/// What loading would take, and the longest sequence.
pub(crate) fn plan(checkpoint: &Checkpoint, settings: &ModelSettings) -> Result<(LoadPlan, usize)> {
    let context = settings.context(checkpoint.config().max_positions)?;
    let cache_element_bytes = match settings.device.arithmetic {
        Arithmetic::Lanes => 4,
        Arithmetic::Dot => 2,
    };
    let request = PlanRequest {
        context,
        sequences: settings.parallel,
        cache_element_bytes,
        drafts_max: 0,
        machine_bytes: machine::memory().map(|memory| memory.available),
    };
    Ok((LoadPlan::new(checkpoint, &request), context))
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

/// Uploads the weights to the device.
pub(crate) fn load(
    checkpoint: &Checkpoint,
    settings: &ModelSettings,
    context: usize,
    terminal: Terminal,
) -> Result<Glm<Cpu>> {
    let backend = Cpu::new(settings.device)?;
    let options = GlmOptions { context, sequences: settings.parallel, rows: ROWS, drafts: 0 };
    let bar = progress_bar(&settings.name, terminal);
    let model = Glm::load(checkpoint, backend, options, &mut |done, all| {
        if bar.length() != Some(all) {
            bar.set_length(all);
        }
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    Ok(model)
}

fn progress_bar(name: &str, terminal: Terminal) -> ProgressBar {
    if !terminal.person_reads_notes {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let template = "loading {msg} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.with_message(name.to_owned())
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

fn summary(settings: &ModelSettings, plan: &LoadPlan, context: usize) -> String {
    format!(
        "{} · {} · {} · {} · context {context}",
        settings.name,
        bytes(plan.resident_bytes()),
        arithmetic_name(settings.device),
        counted(settings.device.threads, "thread"),
    )
}

/// The arithmetic and instruction set in words.
pub(crate) fn arithmetic_name(options: Options) -> String {
    let arithmetic = match options.arithmetic {
        Arithmetic::Lanes => "fp32",
        Arithmetic::Dot => "bf16 dot",
    };
    format!("{arithmetic} ({})", format!("{:?}", options.level).to_lowercase())
}
