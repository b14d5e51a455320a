//! What can be wrong with a checkpoint.

use std::path::PathBuf;

use crate::pack::Refusal;

/// A checkpoint that cannot be used, with the thing, what was found, what was expected and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The place holds no checkpoint that Flint can open.
    #[error("{place}: {found}; {remedy}")]
    NoCheckpoint {
        /// The folder or file.
        place: String,
        /// What is there instead.
        found: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// Memory that the system would not give.
    #[error("no room for {bytes} bytes of an expert: {source}; lower the number of expert slots")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// No engine for reading experts.
    #[error("experts cannot be read by the engine {engine}: {source}; choose another one")]
    Reader {
        /// The engine.
        engine: String,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// An expert that could not be read.
    #[error(
        "layers.{layer}, expert {expert}: {file} at byte {offset}: {what}; check the disk and download this file again"
    )]
    Expert {
        /// Layer of the model.
        layer: usize,
        /// Number in the layer.
        expert: usize,
        /// The file.
        file: String,
        /// Byte in the file.
        offset: u64,
        /// What happened.
        what: String,
    },
    /// A format or a variant that this build does not read.
    #[error("{at}: {what} is not supported by this build; {remedy}")]
    Unsupported {
        /// File, key or tensor.
        at: String,
        /// What it is.
        what: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// A pointer of Git LFS instead of the file.
    #[error(
        "{file} is a Git LFS pointer: its content was not downloaded; run `git lfs pull` or download it again"
    )]
    LfsPointer {
        /// The file.
        file: String,
    },
    /// A file that is not as long as its header says.
    #[error(
        "{file} has {found} bytes, its header asks for {expected} ({}); download this file again",
        difference(*found, *expected)
    )]
    FileSize {
        /// The shard.
        file: String,
        /// Bytes that are there.
        found: u64,
        /// Bytes of length field, header and data.
        expected: u64,
    },
    /// A safetensors header above the bound.
    #[error(
        "{file}: the header is declared to have {declared} bytes, the bound is {bound}; this is no safetensors file, or it is damaged: download it again"
    )]
    HeaderTooLong {
        /// The shard.
        file: String,
        /// Bytes that the length field declares.
        declared: u64,
        /// Bytes that a header may have.
        bound: u64,
    },
    /// A JSON file or header that cannot be read.
    #[error("{file}: {what}; the file is damaged, download it again")]
    Malformed {
        /// The file.
        file: String,
        /// What is wrong and where.
        what: String,
    },
    /// A tensor whose entry in a header is impossible.
    #[error("{file}: tensor {tensor}: {what}; the file is damaged, download it again")]
    BadTensor {
        /// The shard.
        file: String,
        /// The tensor's stored name.
        tensor: String,
        /// What is wrong.
        what: String,
    },
    /// Files that the index names and that are not there.
    #[error("{index} names {} that {} not there: {}; download the missing files", count(files.len(), "file"), if files.len() == 1 { "is" } else { "are" }, list(files))]
    MissingFiles {
        /// The index.
        index: String,
        /// The files.
        files: Vec<String>,
    },
    /// An index that does not fit its shards.
    #[error("{index}: {what}; download the index and the shards of one version")]
    Index {
        /// The index.
        index: String,
        /// The contradiction.
        what: String,
    },
    /// A key of `config.json` that is missing or has a value that Flint cannot run.
    #[error("config.json: {key} {found}, expected {expected}{}", advice(.remedy))]
    Config {
        /// The key, with the objects around it.
        key: String,
        /// What is there.
        found: String,
        /// What Flint can run.
        expected: String,
        /// What the user can do, when it is not plain from the rest.
        remedy: &'static str,
    },
    /// Names that are missing from the checkpoint, or left over.
    #[error("the checkpoint and config.json do not fit: {}{}{}; download config.json and the shards of one version", missing_names(missing), if missing.is_empty() || surplus.is_empty() { "" } else { "; " }, surplus_names(surplus))]
    Names {
        /// Canonical names that no tensor provides.
        missing: Vec<String>,
        /// Stored names that nothing uses.
        surplus: Vec<String>,
    },
    /// Two tensors for one thing.
    #[error(
        "{module}: both {first} and {second} provide it; a checkpoint has one spelling of a tensor: convert it anew"
    )]
    Twice {
        /// Canonical module name.
        module: String,
        /// First stored name.
        first: String,
        /// Second stored name.
        second: String,
    },
    /// Two entries of the quantisation tables that contradict each other.
    #[error(
        "config.json: {first} says {first_setting}, {second} says {second_setting}, and both name {module}; the two must agree: download config.json again, or convert the checkpoint anew"
    )]
    Spellings {
        /// Canonical module name.
        module: String,
        /// First key.
        first: String,
        /// Its setting.
        first_setting: String,
        /// Second key.
        second: String,
        /// Its setting.
        second_setting: String,
    },
    /// A tensor of another shape than the config asks for.
    #[error(
        "{tensor} ({file}): shape {found:?}, but config.json asks for {expected}; the two must agree: download config.json and the shards of one version"
    )]
    Shape {
        /// The tensor's stored name.
        tensor: String,
        /// Its shard.
        file: String,
        /// Stored shape.
        found: Vec<usize>,
        /// Shape that fits the config.
        expected: String,
    },
    /// A tensor whose number type does not fit its place.
    #[error("{tensor} ({file}): stored as {found}, expected {expected}; convert the checkpoint anew")]
    Type {
        /// The tensor's stored name.
        tensor: String,
        /// Its shard.
        file: String,
        /// Stored type.
        found: String,
        /// Types that fit.
        expected: String,
    },
    /// A tensor stored at another width than the quantisation table declares.
    #[error(
        "{tensor}: stored as {stored}, but config.json says {declared} for this module ({key}); the two must agree. The checkpoint is inconsistent: download config.json again, or convert it anew"
    )]
    Width {
        /// The tensor's stored name.
        tensor: String,
        /// Width by the tensors' shapes.
        stored: String,
        /// Width by the table.
        declared: String,
        /// The entry of the table.
        key: String,
    },
    /// A marker of a trellis's codebook that does not hold the codebook's factor.
    #[error(
        "{tensor} ({file}, offset {offset}): the codebook's marker holds {found:#010x}, expected {expected:#010x}; this is \
         another codebook, or the file is damaged: convert the checkpoint anew, or download it again"
    )]
    Marker {
        /// The marker's stored name.
        tensor: String,
        /// Its shard.
        file: String,
        /// Where it lies in the shard, in bytes.
        offset: u64,
        /// The number that it holds.
        found: u32,
        /// The codebook's factor.
        expected: u32,
    },
    /// A module whose tensors contradict each other or the table.
    #[error("{module}: {what}; {remedy}")]
    Inconsistent {
        /// Canonical module name.
        module: String,
        /// The contradiction.
        what: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// A number that cannot be used.
    #[error("{tensor} ({file}, offset {offset}, shape {shape:?}): value {value} at index {index} {what}")]
    Value {
        /// The tensor's stored name.
        tensor: String,
        /// Its shard.
        file: String,
        /// Where the tensor starts in the shard, in bytes.
        offset: u64,
        /// Its stored shape.
        shape: Vec<usize>,
        /// The number.
        value: f64,
        /// Its place in the tensor, row-major.
        index: usize,
        /// Why it cannot be used, and the remedy.
        what: &'static str,
    },
    /// A name that the model does not have, or that is asked for in the wrong way.
    #[error("{name}: the model has no {what} of this name")]
    NoSuchModule {
        /// The name asked for.
        name: String,
        /// What was asked for.
        what: &'static str,
    },
    /// A matrix's bytes do not have the size that its shape and form ask for.
    #[error(
        "{name}: {what} holds {found} bytes, its shape asks for {expected}; the checkpoint is damaged, download it again"
    )]
    WrongSize {
        /// Canonical module name.
        name: String,
        /// Which of the module's arrays.
        what: &'static str,
        /// Bytes that are there.
        found: usize,
        /// Bytes that the shape asks for.
        expected: usize,
    },
    /// A streaming pack that is not opened.
    #[error("{refusal:?}: {file}: {what}; {remedy}")]
    Pack {
        /// The reason, by name.
        refusal: Refusal,
        /// The file.
        file: String,
        /// What is wrong and where.
        what: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// Bytes whose SHA-256 is another one.
    #[error("{file}: {part} at offset {offset}: SHA-256 {found}, expected {expected}; {remedy}")]
    Sum {
        /// The file.
        file: String,
        /// Which part of it.
        part: String,
        /// Where the part starts, in bytes.
        offset: u64,
        /// The bytes' sum.
        found: String,
        /// What it should be.
        expected: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// A pack that cannot be written.
    #[error("{place}: {what}; {remedy}")]
    Packing {
        /// The folder or file.
        place: String,
        /// What is wrong.
        what: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// A place where the files of a checkpoint come from that fails, such as a server.
    #[error("{place}: {what}; {remedy}")]
    Origin {
        /// The place and the file.
        place: String,
        /// What it did.
        what: String,
        /// What the user can do.
        remedy: &'static str,
    },
}

/// Names that a message lists before it only counts.
const LISTED: usize = 20;

fn difference(found: u64, expected: u64) -> String {
    if found < expected {
        format!("{} bytes are missing", expected - found)
    } else {
        format!("{} bytes too many", found - expected)
    }
}

fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

fn list(names: &[String]) -> String {
    let shown = names.iter().take(LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(LISTED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn missing_names(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("{} missing: {}", names.len(), list(names)) }
}

fn surplus_names(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("{} left over: {}", names.len(), list(names)) }
}

/// A remedy after its semicolon, if there is one.
fn advice(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("; {text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_of_names_is_cut_with_a_count() {
        let names = |n: usize| (0..n).map(|i| format!("t{i}")).collect::<Vec<_>>();
        let text = Error::Names { missing: names(23), surplus: names(1) }.to_string();
        assert!(text.contains("23 missing: t0, t1"), "{text}");
        assert!(text.contains("t19 and 3 more; 1 left over: t0;"), "{text}");
    }
}
