//! Compiles the CUDA kernels into the code that the program embeds, and runs the checks on a device.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::{Outcome, output};

/// The compiler's package. Of the oldest driver generation that Flint supports, so that its code runs on all of them.
const PACKAGE: &str = "nvidia-cuda-nvrtc-cu12==12.8.93";
/// The script that compiles: it speaks to the library, which is not linked anywhere.
const SCRIPT: &str = include_str!("compile.py");

/// Compiles the CUDA kernels and says what each costs; fails where registers spill.
#[derive(Args)]
pub(crate) struct Kernels {
    /// Only these files of crates/cuda/kernels, as norms.cu
    #[arg(long, value_name = "FILE")]
    only: Vec<String>,
    /// Compile and say, but keep the embedded code as it is
    #[arg(long)]
    check: bool,
    /// Only these architectures [default: sm_80, sm_90, and PTX for later ones]
    #[arg(long, value_name = "NAME")]
    architecture: Vec<String>,
    /// Write the code as the disassembler wants it to this folder
    #[arg(long, value_name = "DIR")]
    code_to: Option<PathBuf>,
}

impl Kernels {
    pub(crate) fn run(&self, root: &Path) -> Outcome {
        let (python, library) = compiler(&root.join("target/nvrtc"))?;
        let mut command = Command::new(python);
        command.args(["-c", SCRIPT]).arg(root.join("crates/cuda/kernels")).arg("--library").arg(library);
        for file in &self.only {
            command.args(["--only", file]);
        }
        for name in &self.architecture {
            command.args(["--architecture", name]);
        }
        if self.check {
            command.arg("--check");
        }
        if let Some(folder) = &self.code_to {
            std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
            command.arg("--code-to").arg(folder);
        }
        let status = command.status().map_err(|e| format!("python: {e}"))?;
        if status.success() { Ok(()) } else { Err("not every kernel compiles without spills".into()) }
    }
}

/// A Python with the compiler's package in its own environment, and the library.
fn compiler(environment: &Path) -> Outcome<(PathBuf, PathBuf)> {
    let python = environment.join("bin/python");
    let stamp = environment.join("package");
    if std::fs::read_to_string(&stamp).is_ok_and(|found| found == PACKAGE) {
        return Ok((python.clone(), library(&python)?));
    }
    println!("installing {PACKAGE} below {}", environment.display());
    output(Command::new("python3").args(["-m", "venv"]).arg(environment))?;
    output(Command::new(&python).args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        PACKAGE,
    ]))?;
    let library = library(&python)?;
    std::fs::write(&stamp, PACKAGE).map_err(|e| format!("{}: {e}", stamp.display()))?;
    Ok((python, library))
}

fn library(python: &Path) -> Outcome<PathBuf> {
    const FIND: &str = "import nvidia.cuda_nvrtc as n, os; print(os.path.join(list(n.__path__)[0], 'lib', 'libnvrtc.so.12'))";
    output(Command::new(python).args(["-c", FIND])).map(|path| PathBuf::from(path.trim()))
}

/// Runs every law and contract on the CUDA device of this machine; where there is none it says so.
#[derive(Args)]
pub(crate) struct Cuda {
    /// Build the program only, and say where it is: it runs in any checkout of this revision
    #[arg(long)]
    build: bool,
    /// Options and name filters of the program: parts of names, --list, --device N; --few checks in few launches, for
    /// compute-sanitizer (benches/peers/cuda.py --sanitize runs it over every check)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

impl Cuda {
    pub(crate) fn run(&self, root: &Path) -> Outcome {
        let build = ["build", "--quiet", "--release", "--package", "flint-contracts", "--bin", "gpu"];
        // Stripped: the program travels to machines with a device.
        let strip = ["--config", "profile.release.strip=true"];
        let built = Command::new("cargo").current_dir(root).args(build).args(strip).status();
        if !built.map_err(|e| format!("cargo: {e}"))?.success() {
            return Err("the checks do not build".into());
        }
        let metadata = output(Command::new("cargo").current_dir(root).args([
            "metadata",
            "--no-deps",
            "--format-version",
            "1",
        ]))?;
        let metadata: serde_json::Value =
            serde_json::from_str(&metadata).map_err(|e| format!("cargo: {e}"))?;
        let target = metadata["target_directory"].as_str().ok_or("cargo names no target folder")?;
        let program = Path::new(target).join("release/gpu");
        println!("{}", program.display());
        if self.build {
            return Ok(());
        }
        let status = Command::new(&program).current_dir(root).args(&self.arguments).status();
        if status.map_err(|e| format!("{}: {e}", program.display()))?.success() {
            Ok(())
        } else {
            Err("a law or a contract is broken on the device".into())
        }
    }
}
