//! Files that a reader gets lost in.

use std::path::Path;
use std::process::Command;

use crate::{Outcome, output};

/// Lines of a file, its tests apart.
const LIMIT: usize = 600;

/// Names every tracked source file with more than [`LIMIT`] lines before its tests.
pub(crate) fn run(root: &Path) -> Outcome {
    let listed = output(Command::new("git").arg("-C").arg(root).args(["ls-files", "*.rs", "*.cu", "*.cuh"]))?;
    let mut long = Vec::new();
    for file in listed.lines() {
        let text = std::fs::read_to_string(root.join(file)).map_err(|e| format!("{file}: {e}"))?;
        let lines = text.lines().take_while(|line| *line != "#[cfg(test)]").count();
        if lines > LIMIT {
            long.push(format!(
                "{file}: {lines} lines before its tests, {LIMIT} are the limit; split it by concern"
            ));
        }
    }
    if long.is_empty() { Ok(()) } else { Err(long.join("\n")) }
}
