//! What commands receive: every option with its default filled in and its bound checked.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use flint_chat::GenerationDefaults;
use flint_cpu::{Arithmetic, Level, Options};
use flint_engine::Sampling;
use flint_weights::Source;
use flint_weights::plan::ExpertsWanted;
use flint_weights::stream::VerifyRecords;

use super::{
    ArithmeticChoice, BenchFlags, LevelChoice, LogLevel, ModelOptions, SamplingOptions, ServeOptions,
    VerifyChoice,
};
use crate::device::DeviceChoice;
use crate::embedded;
use crate::error::{Error, Result};
use crate::machine;

/// Longest conversation unless the user says otherwise: an hour of talk, and small beside any model.
const DEFAULT_CONTEXT: usize = 16_384;
const THREADS: RangeInclusive<usize> = 1..=1024;
const CONTEXT: RangeInclusive<usize> = 64..=16 << 20;
const PARALLEL: RangeInclusive<usize> = 1..=256;

/// Which model, and how it is computed.
#[derive(Clone, Debug)]
pub(crate) struct ModelSettings {
    /// Where its files are.
    pub(crate) source: Source,
    /// What users call it.
    pub(crate) name: String,
    /// Where it runs.
    pub(crate) device: DeviceChoice,
    /// Threads, arithmetic and instruction set of the CPU.
    pub(crate) cpu: Options,
    /// Whether the user names one of the CPU's arithmetics.
    pub(crate) cpu_arithmetic: bool,
    /// Folder for code that was compiled for this machine's devices.
    pub(crate) code_cache: Option<PathBuf>,
    /// Memory that may be used, where the user bounds it.
    pub(crate) memory: Option<u64>,
    /// Which experts are to be in memory.
    pub(crate) experts: ExpertsWanted,
    /// When records are compared with their checksums.
    pub(crate) verify: VerifyRecords,
    /// Longest sequence that the user asks for.
    context: Option<usize>,
    /// Sequences at once.
    pub(crate) parallel: usize,
    /// Drafts of one span.
    pub(crate) drafts: usize,
    /// Rows of one forward, where they are not the device's own.
    pub(crate) rows: Option<usize>,
    /// Whether a device may run steps as graphs.
    pub(crate) graphs: bool,
    /// Load even if it does not fit.
    pub(crate) force: bool,
}

impl ModelSettings {
    /// Checks the options; `dir` is the folder that stood alone on the command line.
    pub(crate) fn new(
        options: ModelOptions,
        dir: Option<PathBuf>,
        parallel: usize,
        force: bool,
    ) -> Result<Self> {
        let folder = match (dir, options.model) {
            (Some(dir), Some(model)) if dir != model => {
                let expected = format!("the folder {} is named too; name one", dir.display());
                return Err(refused("--model", model.display(), expected));
            }
            (dir, model) => dir.or(model),
        };
        let threads = match options.threads {
            Some(threads) => bounded("--threads", threads, &THREADS)?,
            None => machine::cores(),
        };
        let context = options.context.map(|context| bounded("--context", context, &CONTEXT)).transpose()?;
        let parallel = bounded("--parallel", parallel, &PARALLEL)?;
        let arithmetic = options.arithmetic.unwrap_or_default();
        let cpu = cpu_options(threads, arithmetic, options.level.unwrap_or_default());
        let device = options.device.unwrap_or_default();
        let cpu_arithmetic = arithmetic != ArithmeticChoice::Auto;
        if cpu_arithmetic && matches!(device, DeviceChoice::Cuda(_)) {
            let expected = format!("--device {device} has an arithmetic of its own; name one of the two");
            return Err(refused("--arithmetic", format!("{arithmetic:?}").to_lowercase(), expected));
        }
        let (source, name) = place(folder.as_deref());
        let code_cache = machine::cache_folder();
        Ok(Self {
            source,
            name,
            device,
            cpu,
            cpu_arithmetic,
            code_cache,
            memory: options.memory.map(|size| size.0),
            experts: options.slots.unwrap_or_default().0,
            verify: match options.verify.unwrap_or_default() {
                VerifyChoice::Always => VerifyRecords::Always,
                VerifyChoice::First => VerifyRecords::First,
                VerifyChoice::Never => VerifyRecords::Never,
            },
            context,
            parallel,
            drafts: 0,
            rows: None,
            graphs: true,
            force,
        })
    }

    /// The settings of a bench at one number of threads and expert slots.
    pub(crate) fn bench(
        flags: &BenchFlags,
        (threads, experts): (usize, ExpertsWanted),
        context: usize,
        parallel: usize,
    ) -> Self {
        let cpu = cpu_options(threads, flags.arithmetic.unwrap_or_default(), flags.level.unwrap_or_default());
        let (source, name) = place(flags.dir.as_deref());
        Self {
            source,
            name,
            device: flags.device.unwrap_or(DeviceChoice::Cpu),
            cpu,
            cpu_arithmetic: true,
            code_cache: machine::cache_folder(),
            memory: flags.memory.map(|size| size.0),
            verify: VerifyRecords::default(),
            experts: if flags.draw_experts { ExpertsWanted::All } else { experts },
            context: Some(context),
            parallel,
            drafts: flags.block.iter().max().map_or(0, |rows| rows - 1),
            rows: flags.rows,
            graphs: !flags.profile,
            force: flags.force,
        }
    }

    /// Longest sequence for a model that can hold `most`.
    ///
    /// # Errors
    /// When the user asks for more than the model can hold.
    pub(crate) fn context(&self, most: usize) -> Result<usize> {
        match self.context {
            Some(context) if context > most => {
                Err(refused("--context", context, format!("this model holds {most} tokens at most")))
            }
            Some(context) => Ok(context),
            None => Ok(DEFAULT_CONTEXT.min(most)),
        }
    }
}

fn place(folder: Option<&Path>) -> (Source, String) {
    match folder {
        None => (Source::Embedded(embedded::FILES), embedded::NAME.into()),
        Some(folder) => {
            let named = folder
                .canonicalize()
                .ok()
                .and_then(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()));
            let name = named.unwrap_or_else(|| folder.display().to_string());
            (Source::Folder(folder.to_owned()), name)
        }
    }
}

fn cpu_options(threads: usize, arithmetic: ArithmeticChoice, level: LevelChoice) -> Options {
    let detected = Options::detect(threads);
    let arithmetic = match arithmetic {
        ArithmeticChoice::Auto => detected.arithmetic,
        ArithmeticChoice::Fp32 => Arithmetic::Lanes,
        ArithmeticChoice::Dot => Arithmetic::Dot,
    };
    let level = match level {
        LevelChoice::Auto => detected.level,
        LevelChoice::Scalar => Level::Scalar,
        LevelChoice::Avx2 => Level::Avx2,
        LevelChoice::Avx512 => Level::Avx512,
        LevelChoice::Neon => Level::Neon,
    };
    Options { threads, arithmetic, level }
}

/// How tokens are drawn: the user's wish, else the checkpoint's, else the model's distribution as it is.
///
/// # Errors
/// When a value is outside its range; `vocabulary` bounds token numbers.
pub(crate) fn sampling(
    options: &SamplingOptions,
    defaults: &GenerationDefaults,
    vocabulary: usize,
) -> Result<Sampling> {
    let usual = flint_server::default_sampling(defaults);
    let sampling = Sampling {
        temperature: options.temperature.unwrap_or(usual.temperature),
        top_p: options.top_p.unwrap_or(usual.top_p),
        top_k: options.top_k.unwrap_or(usual.top_k),
        min_p: options.min_p.unwrap_or(usual.min_p),
        repetition_penalty: options.repetition_penalty.unwrap_or(usual.repetition_penalty),
        presence_penalty: options.presence_penalty.unwrap_or(usual.presence_penalty),
        frequency_penalty: options.frequency_penalty.unwrap_or(usual.frequency_penalty),
        logit_bias: usual.logit_bias,
        seed: options.seed.unwrap_or_else(random_seed),
    };
    sampling.validate(vocabulary)?;
    if let Some(tokens) = options.max_tokens {
        bounded("--max-tokens", tokens, &(1..=usize::MAX))?;
    }
    Ok(sampling)
}

/// A seed for a user who names none.
pub(super) fn random_seed() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now()) >> 11
}

/// How the server is reached.
#[derive(Clone, Debug)]
pub(crate) struct ServeSettings {
    /// Where to listen.
    pub(crate) address: SocketAddr,
    /// Name for clients, where the user gives one.
    pub(crate) name: Option<String>,
    /// Replies at once.
    pub(crate) parallel: usize,
    /// Requests that may wait.
    pub(crate) queue: usize,
    /// Largest body.
    pub(crate) body_bytes: usize,
    /// Time for running replies after Ctrl-C.
    pub(crate) drain: Duration,
    /// What is logged.
    pub(crate) log: LogLevel,
}

impl ServeSettings {
    /// Checks the options.
    pub(crate) fn new(options: ServeOptions) -> Result<Self> {
        let host = options.host.unwrap_or_else(|| "127.0.0.1".into());
        let ip = match host.as_str() {
            "localhost" => IpAddr::from([127, 0, 0, 1]),
            other => other.parse().map_err(|_| {
                refused(
                    "--host",
                    other,
                    "it must be an address of this machine, as 127.0.0.1, 0.0.0.0 or ::1".into(),
                )
            })?,
        };
        let body_mib = bounded("--max-body", options.max_body.unwrap_or(32), &(1..=1024))?;
        let drain = bounded("--drain", options.drain.unwrap_or(30), &(0..=3600))?;
        Ok(Self {
            address: SocketAddr::new(ip, options.port.unwrap_or(8080)),
            name: options.name,
            parallel: bounded("--parallel", options.parallel.unwrap_or(4), &PARALLEL)?,
            queue: bounded("--queue", options.queue.unwrap_or(256), &(0..=100_000))?,
            body_bytes: body_mib << 20,
            drain: Duration::from_secs(drain),
            log: options.log.unwrap_or_default(),
        })
    }
}

/// What a bench measures.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BenchSettings {
    /// Prompt lengths.
    pub(crate) prompts: Vec<usize>,
    /// Tokens to decode.
    pub(crate) decode: usize,
    /// Sequences together.
    pub(crate) batches: Vec<usize>,
    /// Rows of one sequence together.
    pub(crate) blocks: Vec<usize>,
    /// Tokens of a sequence before it decodes.
    pub(crate) behind: usize,
    /// Threads.
    pub(crate) threads: Vec<usize>,
    /// Which experts are in memory.
    pub(crate) slots: Vec<ExpertsWanted>,
    /// Rounds.
    pub(crate) repeat: usize,
    /// Rows of scans alone.
    pub(crate) scans: Vec<usize>,
    /// Whether one step of each figure is marked for a profiler.
    pub(crate) profile: bool,
}

impl BenchSettings {
    /// Checks the flags.
    pub(crate) fn new(flags: &BenchFlags) -> Result<Self> {
        let list = |option: &str, given: &[usize], default: &[usize], range: &RangeInclusive<usize>| {
            let mut values = if given.is_empty() { default.to_vec() } else { given.to_vec() };
            values.dedup();
            values.into_iter().map(|value| bounded(option, value, range)).collect::<Result<Vec<_>>>()
        };
        if let Some(rows) = flags.rows {
            bounded("--rows", rows, &(1..=1 << 16))?;
        }
        Ok(Self {
            prompts: list("--prompt", &flags.prompt, &[512], &(1..=1 << 20))?,
            decode: bounded("--decode", flags.decode.unwrap_or(64), &(1..=1 << 20))?,
            batches: list("--batch", &flags.batch, &[1, 4, 8], &PARALLEL)?,
            blocks: list("--block", &flags.block, &[], &(2..=64))?,
            behind: bounded("--behind", flags.behind.unwrap_or(32), &(1..=1 << 20))?,
            threads: list("--threads", &flags.threads, &[1, machine::cores()], &THREADS)?,
            slots: match flags.slots.iter().map(|choice| choice.0).collect::<Vec<_>>() {
                none if none.is_empty() => vec![ExpertsWanted::Auto],
                slots => slots,
            },
            repeat: bounded("--repeat", flags.repeat.unwrap_or(3), &(1..=100))?,
            scans: list("--scan", &flags.scan, &[], &(1..=1 << 20))?,
            profile: flags.profile,
        })
    }
}

pub(super) fn bounded<T: PartialOrd + std::fmt::Display>(
    option: &str,
    value: T,
    range: &RangeInclusive<T>,
) -> Result<T> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(refused(option, value, format!("it must be from {} to {}", range.start(), range.end())))
}

pub(super) fn refused(option: &str, value: impl std::fmt::Display, expected: String) -> Error {
    Error::Option { option: option.into(), value: value.to_string(), expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message<T>(result: Result<T>) -> String {
        result.err().map(|error| error.to_string()).unwrap()
    }

    fn model(options: ModelOptions) -> Result<ModelSettings> {
        ModelSettings::new(options, None, 1, false)
    }

    #[test]
    fn without_options_the_embedded_model_runs_on_all_cores() {
        let settings = model(ModelOptions::default()).unwrap();
        assert_eq!(settings.name, "flint-tiny");
        assert_eq!(format!("{:?}", settings.cpu), format!("{:?}", Options::detect(machine::cores())));
        assert_eq!(settings.device, DeviceChoice::Auto);
        assert_eq!(settings.context(8192).unwrap(), 8192);
        assert_eq!(settings.context(1 << 20).unwrap(), 16_384);
    }

    #[test]
    fn model_options_outside_their_bounds_are_refused_by_name() {
        for threads in [0, 1025] {
            let text = message(model(ModelOptions { threads: Some(threads), ..ModelOptions::default() }));
            assert_eq!(text, format!("--threads: {threads} cannot be used; it must be from 1 to 1024"));
        }
        assert!(
            message(model(ModelOptions { context: Some(63), ..ModelOptions::default() }))
                .starts_with("--context")
        );
        let parallel = ModelSettings::new(ModelOptions::default(), None, 257, false);
        assert!(message(parallel).starts_with("--parallel: 257"));
    }

    #[test]
    fn a_context_beyond_the_models_is_refused_with_both_numbers() {
        let settings = model(ModelOptions { context: Some(9000), ..ModelOptions::default() }).unwrap();
        let text = message(settings.context(8192));
        assert_eq!(text, "--context: 9000 cannot be used; this model holds 8192 tokens at most");
    }

    #[test]
    fn an_arithmetic_of_the_cpu_is_refused_on_a_device() {
        let with = |device: &str| ModelOptions {
            device: Some(device.parse().unwrap()),
            arithmetic: Some(ArithmeticChoice::Fp32),
            ..ModelOptions::default()
        };
        assert!(model(with("cpu")).is_ok() && model(with("auto")).is_ok());
        let text = message(model(with("cuda")));
        assert_eq!(
            text,
            "--arithmetic: fp32 cannot be used; --device cuda:0 has an arithmetic of its own; name one of the two"
        );
    }

    #[test]
    fn two_folders_that_differ_are_refused() {
        let options = ModelOptions { model: Some("a".into()), ..ModelOptions::default() };
        assert!(ModelSettings::new(options.clone(), Some("a".into()), 1, false).is_ok());
        assert!(ModelSettings::new(options, Some("b".into()), 1, false).is_err());
    }

    #[test]
    fn server_options_outside_their_bounds_are_refused_by_name() {
        let with = |change: fn(&mut ServeOptions)| {
            let mut options = ServeOptions::default();
            change(&mut options);
            message(ServeSettings::new(options))
        };
        assert!(with(|o| o.host = Some("example.org".into())).starts_with("--host: example.org"));
        assert!(with(|o| o.parallel = Some(0)).starts_with("--parallel: 0"));
        assert!(with(|o| o.queue = Some(100_001)).starts_with("--queue"));
        assert!(with(|o| o.max_body = Some(0)).starts_with("--max-body"));
        assert!(with(|o| o.drain = Some(3601)).starts_with("--drain"));
    }

    #[test]
    fn the_server_listens_on_this_machine_only_unless_told_otherwise() {
        let settings = ServeSettings::new(ServeOptions::default()).unwrap();
        assert_eq!(settings.address, "127.0.0.1:8080".parse().unwrap());
        let v6 = ServeOptions { host: Some("::1".into()), port: Some(0), ..ServeOptions::default() };
        assert_eq!(ServeSettings::new(v6).unwrap().address, "[::1]:0".parse().unwrap());
    }

    #[test]
    fn the_users_sampling_wins_over_the_checkpoints() {
        let defaults = GenerationDefaults { temperature: Some(0.7), top_p: Some(0.9), ..Default::default() };
        let options = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
        let sampling = sampling(&options, &defaults, 10).unwrap();
        assert!(sampling.temperature.abs() < f32::EPSILON && (sampling.top_p - 0.9).abs() < f32::EPSILON);
    }

    #[test]
    fn sampling_outside_its_range_is_refused_by_name() {
        let options = SamplingOptions { top_p: Some(1.5), ..SamplingOptions::default() };
        let text = message(sampling(&options, &GenerationDefaults::default(), 10));
        assert!(text.contains("top_p") && text.contains("1.5"), "{text}");
        let options = SamplingOptions { max_tokens: Some(0), ..SamplingOptions::default() };
        assert!(
            message(sampling(&options, &GenerationDefaults::default(), 10)).starts_with("--max-tokens: 0")
        );
    }
}
