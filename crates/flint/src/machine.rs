//! What this machine has: cores and memory.

use std::num::NonZero;
use std::path::PathBuf;

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// All of it, or what the process's control group may use.
    pub(crate) total: u64,
    /// What can be had without pushing others out.
    pub(crate) available: u64,
}

/// This machine's memory, where the system says.
pub(crate) fn memory() -> Option<Memory> {
    let stated = parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let read =
        |file: &str| std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<u64>().ok());
    // What the group uses already counts the page cache, which gives way: only its bound is used.
    let Some(limit) = read("/sys/fs/cgroup/memory.max") else { return Some(stated) };
    Some(Memory { total: stated.total.min(limit), available: stated.available.min(limit) })
}

fn parse_meminfo(text: &str) -> Option<Memory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kilobytes = line.trim_start_matches(':').trim().strip_suffix("kB")?;
        kilobytes.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Memory { total: field("MemTotal")?, available: field("MemAvailable")? })
}

/// Where this user's programs keep what they can make again, where the system says.
#[expect(clippy::disallowed_methods, reason = "the user's folders are the environment's to name")]
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
    caches.is_absolute().then(|| caches.join("flint"))
}

/// The processor's name, where the system says.
pub(crate) fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start().trim_start_matches(':').trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_memory_table_is_read() {
        let text = "MemTotal:       24689764 kB\nMemFree: 1 kB\nMemAvailable:   24000000 kB\n";
        let memory = parse_meminfo(text).unwrap();
        assert_eq!(memory, Memory { total: 24_689_764 * 1024, available: 24_000_000 * 1024 });
        assert_eq!(parse_meminfo("MemTotal: much\n"), None);
    }
}
