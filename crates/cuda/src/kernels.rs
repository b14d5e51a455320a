//! Which kernels there are and where their code comes from.
//!
//! Code for a device is looked for in this order: built into the program, in the user's cache folder, made by NVRTC.
//! Built code is included only when it was made from exactly these sources (`build.rs` compares digests), so that
//! stale code cannot run.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::CudaError;
use crate::driver::{Device, Function, Module, capability_text, compile};

/// A kernel: an `extern "C" __global__` function of a file of `kernels/`. Declared as a `static` next to its launch.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// The function's name, unique in the crate.
    pub(crate) name: &'static str,
    /// The file of `kernels/` that defines it: `norms.cu`.
    pub(crate) file: &'static str,
    /// Whether a launch may begin while the one before it ends: every thread calls `grid_wait` (`common/base.cuh`) before
    /// it touches what an earlier launch writes, or writes anything.
    pub(crate) begins_early: bool,
}

impl Kernel {
    /// The kernel `name` of `kernels/<file>`.
    pub(crate) const fn new(name: &'static str, file: &'static str) -> Self {
        Self { name, file, begins_early: false }
    }

    /// The same, for a kernel that waits by itself for the launch before it.
    pub(crate) const fn early(self) -> Self {
        Self { begins_early: true, ..self }
    }
}

/// A file of `kernels/` with what it includes and the code that was built from it.
pub(crate) struct Unit {
    /// Its name.
    file: &'static str,
    /// Digest of the flags and all sources.
    digest: &'static str,
    /// Its text.
    source: &'static str,
    /// Names and texts of everything that it includes.
    headers: &'static [(&'static str, &'static str)],
    /// Architectures (`sm_90`, `compute_80`) and their compressed code.
    built: &'static [(&'static str, &'static [u8])],
}

include!(concat!(env!("OUT_DIR"), "/units.rs"));

/// The functions of a device that were asked for.
pub(crate) struct Kernels {
    functions: Vec<(&'static Kernel, Function)>,
    numbers: HashMap<&'static str, usize>,
    modules: HashMap<&'static str, Module>,
    device: Arc<Device>,
    cache: Option<PathBuf>,
}

impl Kernels {
    /// None yet. Code that NVRTC makes is kept in `cache`.
    pub(crate) fn new(device: &Arc<Device>, cache: Option<PathBuf>) -> Self {
        Self {
            functions: Vec::new(),
            numbers: HashMap::new(),
            modules: HashMap::new(),
            device: device.clone(),
            cache,
        }
    }

    /// The number of a kernel's function; its code is loaded at the first call.
    pub(crate) fn number(&mut self, kernel: &'static Kernel) -> Result<usize, CudaError> {
        if let Some(&number) = self.numbers.get(kernel.name) {
            debug_assert_eq!(self.functions[number].0.file, kernel.file, "kernels' names are unique");
            return Ok(number);
        }
        self.device.bind()?;
        if !self.modules.contains_key(kernel.file) {
            let code = self.code(kernel.file)?;
            self.modules.insert(kernel.file, Module::load(&self.device, kernel.file, &code)?);
        }
        let module = self.modules.get(kernel.file).ok_or_else(|| unknown(kernel.file))?;
        let function = module.function(kernel.file, kernel.name)?;
        self.functions.push((kernel, function));
        self.numbers.insert(kernel.name, self.functions.len() - 1);
        Ok(self.functions.len() - 1)
    }

    /// A function by its number.
    pub(crate) fn function(&self, number: usize) -> &Function {
        &self.functions[number].1
    }

    /// Whether a kernel may begin early, by its number.
    pub(crate) fn begins_early(&self, number: usize) -> bool {
        self.functions[number].0.begins_early
    }

    /// A kernel's name by its number.
    pub(crate) fn name(&self, number: usize) -> &'static str {
        self.functions[number].0.name
    }

    /// A file's code for the device.
    fn code(&self, file: &'static str) -> Result<Vec<u8>, CudaError> {
        let unit = UNITS.iter().find(|unit| unit.file == file).ok_or_else(|| unknown(file))?;
        let capability = self.device.info().capability;
        if let Some(code) = unit.built_for(capability) {
            return miniz_oxide::inflate::decompress_to_vec_zlib(code).map_err(|error| CudaError::Code {
                file,
                log: format!("the built code is damaged: {error}"),
            });
        }
        let architecture = unit.architecture(capability);
        let kept =
            self.cache.as_ref().map(|folder| folder.join(format!("{}-{architecture}.cubin", unit.digest)));
        if let Some(code) = kept.as_ref().and_then(|path| std::fs::read(path).ok())
            && code.starts_with(b"\x7fELF")
        {
            return Ok(code);
        }
        let code = compile(file, unit.source, unit.headers, &architecture, FLAGS)
            .map_err(|why| CudaError::NoCode { file, capability: capability_text(capability), why })?;
        if let Some(path) = kept {
            keep(&path, &code);
        }
        Ok(code)
    }
}

impl Unit {
    /// Code that runs on a device of this capability: a cubin of its generation, or PTX of an older one.
    fn built_for(&self, capability: u32) -> Option<&'static [u8]> {
        let rank = |name: &str| match architecture(name)? {
            Target::Exact(found) => (found == capability).then_some(2000 + found),
            Target::Generation(found) => {
                (found / 10 == capability / 10 && found <= capability).then_some(1000 + found)
            }
            Target::Virtual(found) => (found <= capability).then_some(found),
        };
        let ranked = self.built.iter().filter_map(|(name, code)| Some((rank(name)?, *code)));
        ranked.max_by_key(|(rank, _)| *rank).map(|(_, code)| code)
    }

    /// What NVRTC is asked for.
    fn architecture(&self, capability: u32) -> String {
        let exact = format!("sm_{capability}a");
        let only = self.source.lines().find_map(|line| line.strip_prefix("// architectures: "));
        match only {
            Some(list) if list.split(", ").any(|name| name == exact) => exact,
            _ => format!("sm_{capability}"),
        }
    }
}

/// Which devices run the code of an architecture.
enum Target {
    /// `sm_90a`: this capability alone.
    Exact(u32),
    /// `sm_80`: this capability and greater ones of its generation.
    Generation(u32),
    /// `compute_80`: this capability and all greater ones.
    Virtual(u32),
}

fn architecture(name: &str) -> Option<Target> {
    if let Some(number) = name.strip_prefix("compute_") {
        return number.parse().ok().map(Target::Virtual);
    }
    let number = name.strip_prefix("sm_")?;
    match number.strip_suffix('a') {
        Some(number) => number.parse().ok().map(Target::Exact),
        None => number.parse().ok().map(Target::Generation),
    }
}

/// Keeps code for the next start, whole or not at all. A cache that cannot be written costs time, nothing else.
fn keep(path: &std::path::Path, code: &[u8]) {
    let unfinished = path.with_extension(format!("{}.part", std::process::id()));
    let written = path
        .parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| std::fs::write(&unfinished, code))
        .and_then(|()| std::fs::rename(&unfinished, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
}

fn unknown(file: &'static str) -> CudaError {
    CudaError::Code { file, log: "there is no such file of kernels".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(built: &'static [(&'static str, &'static [u8])]) -> Unit {
        Unit { file: "x.cu", digest: "0", source: "// architectures: sm_90a\n", headers: &[], built }
    }

    #[test]
    fn a_device_gets_the_nearest_code_that_it_can_run() {
        let all = unit(&[("sm_80", b"80"), ("sm_90", b"90"), ("compute_80", b"ptx")]);
        let found = |capability| all.built_for(capability).map(<[u8]>::to_vec);
        assert_eq!(found(75), None);
        assert_eq!(found(80).as_deref(), Some(&b"80"[..]));
        assert_eq!(found(86).as_deref(), Some(&b"80"[..]));
        assert_eq!(found(89).as_deref(), Some(&b"80"[..]));
        assert_eq!(found(90).as_deref(), Some(&b"90"[..]));
        assert_eq!(found(100).as_deref(), Some(&b"ptx"[..]));
        assert_eq!(found(120).as_deref(), Some(&b"ptx"[..]));
        let special = unit(&[("sm_90a", b"a")]);
        assert_eq!(special.built_for(90), Some(&b"a"[..]));
        assert_eq!(special.built_for(100), None);
        assert_eq!(special.architecture(90), "sm_90a");
        assert_eq!(special.architecture(100), "sm_100");
    }

    #[test]
    fn every_file_is_built_from_its_present_sources() {
        let stale: Vec<_> = UNITS.iter().filter(|unit| unit.built.is_empty()).map(|unit| unit.file).collect();
        assert!(stale.is_empty(), "run `cargo xtask kernels`: no code of the present {}", stale.join(", "));
    }

    #[test]
    fn built_code_is_whole() {
        for unit in UNITS {
            for (architecture, code) in unit.built {
                let code = miniz_oxide::inflate::decompress_to_vec_zlib(code).unwrap();
                let (start, what) = if architecture.starts_with("sm_") {
                    (&b"\x7fELF"[..], "a cubin")
                } else {
                    (&b"//"[..], "PTX")
                };
                assert!(code.starts_with(start), "{} for {architecture} is not {what}", unit.file);
            }
        }
    }
}
