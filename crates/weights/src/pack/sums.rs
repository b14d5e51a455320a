//! `manifest.sha256`: a line `<hex>  <path>` for every file but itself and README.md, as `shasum -a 256 -c` reads it.

use std::collections::BTreeMap;
use std::path::Path;

use super::{REPACK, Refusal, SUMS, strict};
use crate::Result;

/// Files without a line.
pub(super) fn is_listed(path: &str) -> bool {
    path != SUMS && path != "README.md"
}

/// The file's text.
pub(super) fn text(sums: &BTreeMap<String, [u8; 32]>) -> String {
    sums.iter().fold(String::new(), |mut text, (path, sum)| {
        text.push_str(&strict::hex(sum));
        text.push_str("  ");
        text.push_str(path);
        text.push('\n');
        text
    })
}

/// Reads the sums of a folder; `None` when it has no such file.
///
/// # Errors
/// A line of another form, a path that leaves the folder, a path twice.
pub(super) fn read(folder: &Path) -> Result<Option<BTreeMap<String, [u8; 32]>>> {
    let Some(bytes) = strict::read_optional(folder, SUMS)? else { return Ok(None) };
    let refused = |number: usize, what: &str| {
        Err(Refusal::SumsInvalid.error(SUMS, format!("line {}: {what}", number + 1), REPACK))
    };
    let mut sums = BTreeMap::new();
    for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let Ok(line) = std::str::from_utf8(line) else { return refused(number, "it is no UTF-8") };
        let line = line.trim_end_matches('\r');
        if line.is_empty() {
            continue;
        }
        // The second form is that of files read as binary.
        let parts = line.split_once("  ").or_else(|| line.split_once(" *"));
        let Some((sum, path)) = parts.and_then(|(sum, path)| Some((strict::sha256(sum)?, path))) else {
            return refused(number, "expected 64 hexadecimal digits, two spaces and a path");
        };
        let path = path.strip_prefix("./").unwrap_or(path);
        let leaves = path.is_empty()
            || path.contains(['\\', '\0'])
            || path.split('/').any(|part| matches!(part, "" | "." | ".."));
        if leaves {
            return refused(number, "the path is none inside the folder");
        }
        if sums.insert(path.to_owned(), sum).is_some() {
            return refused(number, "the path stands twice");
        }
    }
    Ok(Some(sums))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Option<BTreeMap<String, [u8; 32]>>> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(SUMS), text).unwrap();
        read(folder.path())
    }

    #[test]
    fn what_is_written_is_read() {
        let sums = BTreeMap::from([("a b".to_owned(), [1; 32]), ("receipts/x.json".to_owned(), [2; 32])]);
        assert_eq!(read_text(&text(&sums)).unwrap(), Some(sums));
    }

    #[test]
    fn paths_that_leave_the_folder_are_refused() {
        let sum = "0".repeat(64);
        for path in ["../x", "/etc/passwd", "a/../b", "a//b", "", "a\\b"] {
            let error = read_text(&format!("{sum}  {path}\n")).unwrap_err().to_string();
            assert!(error.starts_with("SumsInvalid: manifest.sha256: line 1"), "{error}");
        }
        assert!(read_text(&format!("{sum}  a\n{sum}  a\n")).is_err());
        assert!(read_text("00  a\n").is_err());
    }
}
