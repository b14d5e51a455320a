//! Lists the kernels' sources, and the code that was built from exactly these sources.

// Cargo tells a build script its folders by environment variables, and listens on standard output.
#![allow(clippy::disallowed_methods, clippy::print_stdout)]
// Paths are written as Rust's string literals; the sources' names are ours.
#![allow(clippy::unnecessary_debug_formatting, clippy::case_sensitive_file_extension_comparisons)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=kernels");
    let folder = |name: &str| env::var_os(name).map(PathBuf::from).ok_or(io::Error::other("run by cargo"));
    let kernels = folder("CARGO_MANIFEST_DIR")?.join("kernels");
    let mut texts = BTreeMap::new();
    read_sources(&kernels, &kernels, &mut texts)?;
    let flags: Vec<String> =
        fs::read_to_string(kernels.join("flags.txt"))?.split_whitespace().map(str::to_owned).collect();
    let built = built_files(&kernels.join("built"))?;
    let mut out = String::new();
    let _ = writeln!(out, "pub(crate) static FLAGS: &[&str] = &{flags:?};");
    let _ = writeln!(out, "pub(crate) static UNITS: &[Unit] = &[");
    for (name, text) in texts.iter().filter(|(name, _)| name.ends_with(".cu")) {
        let headers = headers_of(name, &texts)?;
        let digest = digest(&flags, text, headers.iter().filter_map(|h| texts.get(h)));
        let stem = name.trim_end_matches(".cu");
        let _ = writeln!(out, "Unit {{ file: {name:?}, digest: \"{digest}\",");
        let _ = writeln!(out, "source: include_str!({:?}), headers: &[", kernels.join(name));
        for header in &headers {
            let _ = writeln!(out, "({header:?}, include_str!({:?})),", kernels.join(header));
        }
        let _ = writeln!(out, "], built: &[");
        for (file, path) in &built {
            let Some(rest) = file.strip_prefix(&format!("{stem}-")) else { continue };
            if let Some(architecture) = rest.strip_suffix(&format!("-{digest}.z")) {
                let _ = writeln!(out, "({architecture:?}, include_bytes!({path:?})),");
            }
        }
        let _ = writeln!(out, "] }},");
    }
    let _ = writeln!(out, "];");
    fs::write(folder("OUT_DIR")?.join("units.rs"), out)
}

/// Reads every `.cu` and `.cuh`, by its path from `kernels/`.
fn read_sources(root: &Path, folder: &Path, texts: &mut BTreeMap<String, String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            read_sources(root, &path, texts)?;
        } else if path.extension().is_some_and(|e| e == "cu" || e == "cuh") {
            let name: Vec<_> = path
                .strip_prefix(root)
                .map_err(io::Error::other)?
                .components()
                .map(|c| c.as_os_str().to_string_lossy())
                .collect();
            texts.insert(name.join("/"), fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

/// Everything that a unit includes, sorted.
fn headers_of(unit: &str, texts: &BTreeMap<String, String>) -> io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![unit.to_owned()];
    while let Some(name) = waiting.pop() {
        let Some(text) = texts.get(&name) else {
            return Err(io::Error::other(format!("{unit}: includes {name}, which is not in kernels/")));
        };
        for line in text.lines() {
            let Some(rest) = line.trim_start().strip_prefix('#') else { continue };
            let Some(rest) = rest.trim_start().strip_prefix("include") else { continue };
            if let Some(header) = rest.trim_start().strip_prefix('"').and_then(|r| r.split('"').next())
                && found.insert(header.to_owned())
            {
                waiting.push(header.to_owned());
            }
        }
    }
    Ok(found)
}

/// FNV-1a over the flags and the sources; the compiling script computes the same.
fn digest<'a>(flags: &[String], unit: &str, headers: impl Iterator<Item = &'a String>) -> String {
    let mut value: u64 = 0xcbf2_9ce4_8422_2325;
    let mut add = |text: &str| {
        for byte in text.bytes().chain([0]) {
            value = (value ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    add(&flags.join(" "));
    add(unit);
    headers.for_each(|header| add(header));
    format!("{value:016x}")
}

/// Names and paths of the built code, sorted.
fn built_files(folder: &Path) -> io::Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    if folder.is_dir() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if let Some(name) = path.file_name() {
                found.insert(name.to_string_lossy().into_owned(), path);
            }
        }
    }
    Ok(found)
}
