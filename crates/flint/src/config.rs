//! Options: flags, the configuration file and the environment. Nothing else in Flint reads any of them.
//!
//! A flag wins over the file (`--config FILE`, a JSON object with the long options' names as keys), the file wins over
//! the default. [`settings`] holds what commands receive: every value checked against its bound.

pub(crate) mod packing;
pub(crate) mod settings;

use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::device::DeviceChoice;
use crate::error::{Error, Result};
use crate::memory::{MemorySize, SlotsChoice};

/// GLM-5.3-Flash on the machine you have, exact.
///
/// Without a model folder every command uses flint-tiny, a toy that is part of this program.
#[derive(Debug, Parser)]
#[command(name = "flint", version, max_term_width = 100)]
pub(crate) struct Flags {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// JSON file with defaults for options: {"threads": 8, "context": 32768}
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// No colours and styles (also by the environment's NO_COLOR)
    #[arg(long, global = true)]
    no_color: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Talk to the model in the terminal
    Chat(ChatFlags),
    /// Answer one prompt and end
    Generate(GenerateFlags),
    /// Serve the OpenAI API over HTTP
    Serve(ServeFlags),
    /// Show what a checkpoint would need, without loading it
    Plan(PlanFlags),
    /// Measure speed as shares of what this machine can do
    Bench(BenchFlags),
    /// Make a streaming pack of a checkpoint: experts in one file of aligned, checked records
    Pack(PackFlags),
    /// Write the checkpoint that a pack was made of, byte for byte
    Unpack(UnpackFlags),
    /// Read a pack against its checksums
    Verify(VerifyFlags),
    /// Show what is in a checkpoint or a pack, from its headers
    Inspect(InspectFlags),
}

/// Declares a group of options: clap's flags, the file's keys, and "the flag, else the file".
macro_rules! options {
    ($(#[$group:meta])* $heading:literal $name:ident { $($(#[$meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$group])*
        #[derive(Args, Clone, Debug, Default, PartialEq)]
        #[command(next_help_heading = $heading)]
        pub(crate) struct $name {
            $($(#[$meta])* #[arg(long)] pub(crate) $field: Option<$type>,)*
        }

        impl $name {
            /// Keys of the configuration file.
            const KEYS: &[&str] = &[$(stringify!($field)),*];

            fn read(file: &ConfigFile) -> Result<Self> {
                Ok(Self { $($field: file.field(stringify!($field))?,)* })
            }

            fn or(self, other: Self) -> Self {
                Self { $($field: self.$field.or(other.$field),)* }
            }

            /// These flags, completed from the file.
            pub(crate) fn over(self, file: &ConfigFile) -> Result<Self> {
                Ok(self.or(Self::read(file)?))
            }
        }
    };
}

options! {
    /// Which model, and how it is computed.
    "Model" ModelOptions {
        /// Checkpoint folder [default: the embedded flint-tiny]
        #[arg(value_name = "DIR")]
        model: PathBuf,
        /// Where it runs: auto, cpu, cuda or cuda:N; auto takes a CUDA device that holds the model, else the CPU [default: auto]
        #[arg(value_name = "DEVICE")]
        device: DeviceChoice,
        /// Threads that compute on the CPU, 1 to 1024 [default: this machine's cores]
        #[arg(value_name = "N")]
        threads: usize,
        /// The CPU's arithmetic of products [default: auto, the fastest]
        #[arg(value_enum)]
        arithmetic: ArithmeticChoice,
        /// The CPU's instruction set; changes speed, never a bit [default: auto, the best]
        #[arg(value_enum)]
        level: LevelChoice,
        /// Longest conversation in tokens, at least 64 [default: 16384, or the model's own limit if lower]
        #[arg(value_name = "TOKENS")]
        context: usize,
        /// Memory that Flint may use, as 96G [default: what is free, of the device where one is used]
        #[arg(value_name = "SIZE")]
        memory: MemorySize,
        /// Experts of each layer in memory: auto, all or a number; the others are read from the files when they are needed [default: auto, all if they fit]
        #[arg(value_name = "N")]
        slots: SlotsChoice,
        /// When an expert that is read from a pack is compared with its checksum [default: first]
        #[arg(value_enum)]
        verify: VerifyChoice,
    }
}

options! {
    /// How tokens are drawn. Defaults are the checkpoint's own.
    "Sampling" SamplingOptions {
        /// 0 takes the most likely token always, 1 draws from the model's distribution; 0 to 10
        #[arg(value_name = "T")]
        temperature: f32,
        /// Keep the most likely tokens up to this share of probability, 0 to 1
        #[arg(value_name = "P")]
        top_p: f32,
        /// Keep this many of the most likely tokens; 0 keeps all
        #[arg(value_name = "N")]
        top_k: usize,
        /// Keep tokens at least this likely, relative to the best; 0 to 1
        #[arg(value_name = "P")]
        min_p: f32,
        /// Divide the chance of tokens that occurred; 1 is off
        #[arg(value_name = "X")]
        repetition_penalty: f32,
        /// Subtract from tokens that the reply has; -2 to 2, 0 is off
        #[arg(value_name = "X", allow_hyphen_values = true)]
        presence_penalty: f32,
        /// Subtract from tokens for each time that the reply has them; -2 to 2, 0 is off
        #[arg(value_name = "X", allow_hyphen_values = true)]
        frequency_penalty: f32,
        /// The same seed gives the same reply [default: random]
        #[arg(value_name = "N")]
        seed: u64,
        /// Longest reply in tokens, at least 1 [default: what the context holds]
        #[arg(value_name = "N")]
        max_tokens: usize,
    }
}

options! {
    /// How the server is reached.
    "Server" ServeOptions {
        /// Address to listen on [default: 127.0.0.1, this machine only]
        #[arg(value_name = "ADDRESS")]
        host: String,
        /// Port to listen on; 0 lets the system choose [default: 8080]
        #[arg(value_name = "N")]
        port: u16,
        /// Name of the model for clients [default: the folder's name]
        #[arg(value_name = "NAME")]
        name: String,
        /// Replies that are computed at once, 1 to 256 [default: 4]
        #[arg(value_name = "N")]
        parallel: usize,
        /// Requests that may wait, 0 to 100000 [default: 256]
        #[arg(value_name = "N")]
        queue: usize,
        /// Largest request body in MiB, 1 to 1024 [default: 32]
        #[arg(value_name = "MIB")]
        max_body: usize,
        /// Seconds that running replies have left after Ctrl-C, 0 to 3600 [default: 30]
        #[arg(value_name = "SECONDS")]
        drain: u64,
        /// What is logged [default: info]
        #[arg(value_enum)]
        log: LogLevel,
    }
}

/// Arithmetic of products with matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ArithmeticChoice {
    /// dot where the CPU has it, else fp32
    #[default]
    Auto,
    /// fp32 lanes: the same bits on every machine
    Fp32,
    /// bf16 dot products (AVX-512 BF16): about twice as fast
    Dot,
}

/// Instruction set of the kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LevelChoice {
    #[default]
    Auto,
    Scalar,
    Avx2,
    Avx512,
    Neon,
}

/// When records of packs are compared with their checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum VerifyChoice {
    /// at every read
    Always,
    /// when a record is read for the first time
    #[default]
    First,
    /// never
    Never,
}

/// Which events are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    #[default]
    Info,
    Debug,
}

/// Flags of `flint chat`.
#[derive(Debug, Args)]
pub(crate) struct ChatFlags {
    /// Checkpoint folder [default: the embedded flint-tiny]
    #[arg(value_name = "MODEL_DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Instruction that stands before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Answer without thinking first
    #[arg(long)]
    pub(crate) no_think: bool,
    /// Load even if the plan does not fit into memory
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    pub(crate) sampling: SamplingOptions,
}

/// Flags of `flint generate`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct GenerateFlags {
    /// The prompt [default: standard input]
    pub(crate) prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) file: Option<PathBuf>,
    /// Instruction that stands before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Continue the text as it is, without the chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Answer without thinking first
    #[arg(long, conflicts_with = "raw")]
    pub(crate) no_think: bool,
    /// Write one JSON object with the reply and its figures
    #[arg(long)]
    pub(crate) json: bool,
    /// Load even if the plan does not fit into memory
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    pub(crate) sampling: SamplingOptions,
}

/// Flags of `flint serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeFlags {
    /// Checkpoint folder [default: the embedded flint-tiny]
    #[arg(value_name = "MODEL_DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Load even if the plan does not fit into memory
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    pub(crate) serve: ServeOptions,
}

/// Flags of `flint plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanFlags {
    /// Checkpoint folder [default: the embedded flint-tiny]
    #[arg(value_name = "MODEL_DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Conversations at once, 1 to 256 [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) parallel: Option<usize>,
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// Flags of `flint bench`.
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
#[derive(Debug, Args)]
pub(crate) struct BenchFlags {
    /// Checkpoint folder [default: the embedded flint-tiny]
    #[arg(value_name = "MODEL_DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Prompt lengths in tokens, separated by commas [default: 512]
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(crate) prompt: Vec<usize>,
    /// Tokens to decode after each prompt, at least 1 [default: 64]
    #[arg(long, value_name = "N")]
    pub(crate) decode: Option<usize>,
    /// Sequences decoded together, separated by commas, 1 to 256 each [default: 1,4,8]
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(crate) batch: Vec<usize>,
    /// Rows of one sequence in one forward, as when drafts are verified, separated by commas, 2 to 64 each
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(crate) block: Vec<usize>,
    /// Tokens of a sequence before it decodes [default: 32]
    #[arg(long, value_name = "N")]
    pub(crate) behind: Option<usize>,
    /// Device: cpu, cuda or cuda:N [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceChoice>,
    /// Threads of the CPU, separated by commas, 1 to 1024 each [default: 1 and this machine's cores]
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(crate) threads: Vec<usize>,
    /// Experts of each layer in memory, separated by commas: auto, all, or numbers [default: auto]
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(crate) slots: Vec<SlotsChoice>,
    /// Memory that Flint may use, as 96G [default: what is free]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<MemorySize>,
    /// Rounds; the best of each figure counts, 1 to 100 [default: 3]
    #[arg(long, value_name = "N")]
    pub(crate) repeat: Option<usize>,
    /// The CPU's arithmetic of products [default: auto, the fastest]
    #[arg(long, value_enum)]
    pub(crate) arithmetic: Option<ArithmeticChoice>,
    /// Instruction set [default: auto, the best]
    #[arg(long, value_enum)]
    pub(crate) level: Option<LevelChoice>,
    /// Rows of one forward of a prompt, 1 to 65536 [default: 512 on the CPU, 4096 on a CUDA device]
    #[arg(long, value_name = "N")]
    pub(crate) rows: Option<usize>,
    /// Rows of one sequence through the recurrence of a delta-attention layer alone, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(crate) scan: Vec<usize>,
    /// Run without graphs, and mark one step of each figure for a profiler (ncu --profile-from-start off)
    #[arg(long)]
    pub(crate) profile: bool,
    /// Draw the routed experts' numbers instead of reading them; the files may have holes there
    #[arg(long)]
    pub(crate) draw_experts: bool,
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Load even if the plan does not fit into memory
    #[arg(long)]
    pub(crate) force: bool,
}

/// Flags of `flint pack`.
#[derive(Debug, Args)]
pub(crate) struct PackFlags {
    /// Checkpoint folder, or hf:owner/name@COMMIT for a Hugging Face repository at a commit
    #[arg(value_name = "SRC")]
    pub(crate) source: String,
    /// Folder of the pack; it must not exist. A run that was ended goes on where it was
    #[arg(value_name = "DEST")]
    pub(crate) dest: PathBuf,
    /// How the experts must be stored; another format is refused [default: any]
    #[arg(long, value_enum)]
    pub(crate) format: Option<ExpertFormat>,
    /// Write the model's layer numbers into the manifests instead of 0, 1, 2, …
    #[arg(long)]
    pub(crate) model_layer_numbers: bool,
    /// Address of the hub that hf: means [default: https://huggingface.co]
    #[arg(long, value_name = "URL")]
    pub(crate) hub: Option<String>,
    /// File with a token for repositories that are not open to all
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

/// How routed experts are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpertFormat {
    /// Trellis codes of exllamav3
    Exl3,
    /// Codes with scales and biases of MLX
    Affine,
    /// FP8 with factors of blocks
    Fp8,
    /// Numbers without a scale
    Plain,
}

/// Flags of `flint unpack`.
#[derive(Debug, Args)]
pub(crate) struct UnpackFlags {
    /// Folder of the pack
    #[arg(value_name = "DIR")]
    pub(crate) pack: PathBuf,
    /// Folder of the checkpoint; it must not exist
    #[arg(value_name = "DEST")]
    pub(crate) dest: PathBuf,
}

/// Flags of `flint verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyFlags {
    /// Folder of the pack
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Read small files and this many random records only, 1 to 1048576 [default: everything]
    #[arg(long, value_name = "N")]
    pub(crate) quick: Option<usize>,
}

/// Flags of `flint inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectFlags {
    /// Folder of the checkpoint or the pack
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The configuration file, or nothing where none was named.
#[derive(Debug, Default)]
pub(crate) struct ConfigFile {
    name: String,
    values: Map<String, Value>,
}

impl ConfigFile {
    /// Reads the file and refuses keys that no command knows.
    fn read(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(Error::io(&name))?;
        Self::parse(name, &text)
    }

    fn parse(name: String, text: &str) -> Result<Self> {
        let values: Map<String, Value> = serde_json::from_str(text).map_err(|error| Error::ConfigFile {
            file: name.clone(),
            what: format!("it must hold one JSON object: {error}"),
        })?;
        let known: Vec<String> = [ModelOptions::KEYS, SamplingOptions::KEYS, ServeOptions::KEYS]
            .iter()
            .flat_map(|keys| keys.iter().map(|key| option_name(key)))
            .collect();
        match values.keys().find(|key| !known.contains(key)) {
            Some(key) => {
                let what = format!("{key:?} is no option; the options are {}", known.join(", "));
                Err(Error::ConfigFile { file: name, what })
            }
            None => Ok(Self { name, values }),
        }
    }

    fn field<T: for<'a> Deserialize<'a>>(&self, field: &str) -> Result<Option<T>> {
        let key = option_name(field);
        let Some(value) = self.values.get(&key) else { return Ok(None) };
        serde_json::from_value(value.clone())
            .map_err(|error| Error::ConfigFile { file: self.name.clone(), what: format!("{key}: {error}") })
    }
}

/// `top_p` as the user writes it: `top-p`.
fn option_name(field: &str) -> String {
    field.replace('_', "-")
}

impl Flags {
    /// The file that `--config` names.
    pub(crate) fn config_file(&self) -> Result<ConfigFile> {
        self.config.as_deref().map_or(Ok(ConfigFile::default()), ConfigFile::read)
    }

    /// Whether the user wants styles.
    pub(crate) fn colour(&self) -> bool {
        !self.no_color && environment("NO_COLOR").is_none_or(|value| value.is_empty())
    }
}

/// Where the chat's lines are remembered: `$XDG_STATE_HOME/flint/history` or `~/.local/state/flint/history`.
/// `None` where the user has no home: then they last as long as the program.
pub(crate) fn history_file() -> Option<PathBuf> {
    let absolute = |name: &str| environment(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("flint").join("history"))
}

#[expect(clippy::disallowed_methods, reason = "this file is the one reader of the environment")]
fn environment(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    fn file(text: &str) -> Result<ConfigFile> {
        ConfigFile::parse("flint.json".into(), text)
    }

    #[test]
    fn the_flags_are_consistent() {
        Flags::command().debug_assert();
    }

    #[test]
    fn every_option_says_what_it_does() {
        for command in Flags::command().get_subcommands() {
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
            }
        }
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_nothing() {
        let file = file(r#"{"threads": 3, "context": 100, "arithmetic": "fp32"}"#).unwrap();
        let flags = ModelOptions { threads: Some(2), ..ModelOptions::default() }.over(&file).unwrap();
        assert_eq!(flags.threads, Some(2));
        assert_eq!(flags.context, Some(100));
        assert_eq!(flags.arithmetic, Some(ArithmeticChoice::Fp32));
        assert_eq!(flags.level, None);
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let message = file(r#"{"thread": 3}"#).unwrap_err().to_string();
        assert!(
            message.contains("flint.json: \"thread\" is no option; the options are model, device, threads"),
            "{message}"
        );
    }

    #[test]
    fn a_value_of_another_type_is_refused_by_name() {
        let file = file(r#"{"top-p": "high"}"#).unwrap();
        let message = SamplingOptions::default().over(&file).unwrap_err().to_string();
        assert!(message.starts_with("flint.json: top-p: invalid type"), "{message}");
    }

    #[test]
    fn a_file_that_is_no_object_is_refused() {
        assert!(file("[1]").is_err());
        assert!(file("{").is_err());
    }
}
