//! A Hugging Face repository as the place that a checkpoint comes from: one commit, read by HTTP ranges.
//!
//! A body that is cut, a server that fails or a connection that breaks is asked again from the byte that is missing.
//! What a server says of itself is checked: ranges, lengths, and, by the packer, the SHA-256 of each LFS file. The token
//! goes to the hub alone: a redirect to another host does not get it.

mod listing;
mod range;

use std::io::Read;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use flint_weights::Result;
use flint_weights::pack::{Origin, OriginFile};
use ureq::Agent;
use ureq::http::Response;

use range::RangeReader;

/// The hub that `hf:` means.
pub(crate) const HUB: &str = "https://huggingface.co";
/// Attempts in a row that bring no byte before the hub is given up.
const ATTEMPTS: u32 = 9;
/// The first pause between attempts; each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(250);
/// Until a connection stands and an answer begins.
const ANSWER: Duration = Duration::from_mins(1);
/// For a whole body of one request: a connection that stalls is taken up by a new one.
const BODY: Duration = Duration::from_mins(15);

/// A repository at one commit: `hf:owner/name@<40 hex digits>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Repository {
    /// `owner/name`.
    pub(crate) name: String,
    /// The commit.
    pub(crate) commit: String,
}

impl FromStr for Repository {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let form = "the form is hf:owner/name@COMMIT, COMMIT being the 40 hexadecimal digits of a commit";
        let rest = text.strip_prefix("hf:").ok_or(form)?;
        let (name, commit) = rest
            .split_once('@')
            .ok_or_else(|| format!("no commit is named; {form}, so that all files are of one version"))?;
        let is_part = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.'))
        };
        if name.split('/').count() != 2 || !name.split('/').all(is_part) {
            return Err(format!("{name:?} is no owner/name; {form}"));
        }
        if commit.len() != 40 || !commit.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Err(format!("{commit:?} is no commit: branches and tags move; {form}"));
        }
        Ok(Self { name: name.to_owned(), commit: commit.to_ascii_lowercase() })
    }
}

/// A repository on a hub.
#[derive(Debug)]
pub(crate) struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    repository: Repository,
    pause: Duration,
}

impl Hub {
    /// A repository on the hub at `endpoint`; `token` is for those that are not open to all.
    pub(crate) fn new(endpoint: &str, repository: Repository, token: Option<String>) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("flint/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(ANSWER))
            .timeout_recv_response(Some(ANSWER))
            .timeout_recv_body(Some(BODY))
            .build();
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Self { agent: config.into(), endpoint, token, repository, pause: PAUSE }
    }

    fn file_url(&self, file: &str) -> String {
        let Repository { name, commit } = &self.repository;
        format!("{}/{name}/resolve/{commit}/{}", self.endpoint, encoded(file))
    }

    /// Asks once. `range` is first byte and byte after the last.
    fn ask(
        &self,
        url: &str,
        range: Option<(u64, u64)>,
    ) -> std::result::Result<Response<ureq::Body>, Failure> {
        let mut request = self.agent.get(url);
        if let Some((start, end)) = range {
            request = request.header("Range", format!("bytes={start}-{}", end - 1));
        }
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let response = request.call().map_err(|error| Failure::Passing(error.to_string()))?;
        match response.status().as_u16() {
            200 | 206 => Ok(response),
            401 | 403 => Err(Failure::Lasting {
                what: format!("the hub answers {}", response.status()),
                remedy: "the repository is private or asks for consent: give a token with --token-file",
            }),
            404 => Err(Failure::Lasting {
                what: format!("the hub answers {}", response.status()),
                remedy: "check owner, name and commit",
            }),
            408 | 429 | 500..=599 => Err(Failure::Passing(format!("the hub answers {}", response.status()))),
            _ => Err(Failure::Lasting {
                what: format!("the hub answers {}", response.status()),
                remedy: "the repository may have changed on the hub: check its page, or try again later",
            }),
        }
    }

    /// Waits before the next attempt; an error when there were enough.
    fn wait(&self, attempt: u32, what: &str) -> std::result::Result<(), String> {
        if attempt >= ATTEMPTS {
            return Err(format!("{what}, {ATTEMPTS} times in a row"));
        }
        std::thread::sleep(self.pause * 2_u32.pow(attempt - 1));
        Ok(())
    }
}

/// Why a request brought nothing.
#[derive(Debug)]
enum Failure {
    /// Another attempt may succeed.
    Passing(String),
    /// None will.
    Lasting { what: String, remedy: &'static str },
}

impl Origin for Hub {
    fn label(&self) -> String {
        format!("hf:{}", self.repository.name)
    }

    fn repository(&self) -> Option<(String, String)> {
        Some((self.repository.name.clone(), self.repository.commit.clone()))
    }

    fn files(&self) -> Result<Vec<OriginFile>> {
        listing::files(self)
    }

    fn open(&self, file: &OriginFile, offset: u64, length: u64) -> Result<Box<dyn Read + Send + '_>> {
        let end = file.bytes.min(offset.saturating_add(length));
        Ok(Box::new(RangeReader::new(self, file, offset, end)))
    }
}

/// A path in a URL: everything but letters, digits and `-_.~/` as `%XX`.
fn encoded(path: &str) -> String {
    use std::fmt::Write as _;
    path.bytes().fold(String::with_capacity(path.len()), |mut text, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
            text.push(byte as char);
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
        text
    })
}

/// The token of a file: its first line.
pub(crate) fn read_token(path: &Path) -> std::io::Result<String> {
    Ok(std::fs::read_to_string(path)?.lines().next().unwrap_or("").trim().to_owned())
}

#[cfg(test)]
#[path = "hub/tests.rs"]
mod server_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_pinned_to_a_commit() {
        let commit = "0123456789abcdef0123456789ABCDEF01234567";
        let repository: Repository = format!("hf:owner/name-1.5_x@{commit}").parse().unwrap();
        assert_eq!(repository.name, "owner/name-1.5_x");
        assert_eq!(repository.commit, commit.to_ascii_lowercase());
        for (text, part) in [
            ("hf:owner/name", "no commit is named"),
            ("hf:owner/name@main", "\"main\" is no commit"),
            ("hf:name@0123456789abcdef0123456789abcdef01234567", "no owner/name"),
            ("hf:a/b/c@0123456789abcdef0123456789abcdef01234567", "no owner/name"),
            ("hf:../b@0123456789abcdef0123456789abcdef01234567", "no owner/name"),
            ("hf:a/b?x@0123456789abcdef0123456789abcdef01234567", "no owner/name"),
        ] {
            let error = text.parse::<Repository>().unwrap_err();
            assert!(error.contains(part) && error.contains("hf:owner/name@COMMIT"), "{text}: {error}");
        }
    }

    #[test]
    fn paths_are_encoded() {
        assert_eq!(encoded("a b/ü?#.json"), "a%20b/%C3%BC%3F%23.json");
    }
}
