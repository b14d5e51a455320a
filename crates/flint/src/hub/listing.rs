//! The files of a commit, with their lengths and, of LFS files, their SHA-256.

use flint_weights::pack::OriginFile;
use flint_weights::{Error, Result};
use serde::Deserialize;

use super::{Failure, Hub};

/// Bytes that one page of the list may have.
const PAGE_BOUND: u64 = 64 << 20;
/// Pages that are read: of a thousand files each.
const PAGES: usize = 100;

/// An entry of the hub's list.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    lfs: Option<Lfs>,
}

/// What the hub knows of a large file.
#[derive(Deserialize)]
struct Lfs {
    oid: String,
    size: u64,
}

/// All files of the commit, by name.
pub(super) fn files(hub: &Hub) -> Result<Vec<OriginFile>> {
    let base = format!("{}/api/models/{}/tree/{}", hub.endpoint, hub.repository.name, hub.repository.commit);
    let mut url = format!("{base}?recursive=true");
    let mut files = Vec::new();
    for _ in 0..PAGES {
        let (entries, next) = page(hub, &url)?;
        for entry in entries.into_iter().filter(|entry| entry.kind == "file") {
            files.push(file(hub, entry)?);
        }
        match next {
            None => {
                files.sort_by(|a, b| a.name.cmp(&b.name));
                return Ok(files);
            }
            // The token goes along: to nobody but the hub.
            Some(next) if next.starts_with(&format!("{base}?")) => url = next,
            Some(next) => {
                return Err(refused(hub, format!("its list goes on at {next}, which is another place")));
            }
        }
    }
    Err(refused(hub, format!("its list has more than {PAGES} pages")))
}

fn file(hub: &Hub, entry: Entry) -> Result<OriginFile> {
    let sha256 = match &entry.lfs {
        None => None,
        Some(lfs) => match sha256(&lfs.oid) {
            Some(sum) => Some(sum),
            None => return Err(refused(hub, format!("{}: its LFS sum is {:?}", entry.path, lfs.oid))),
        },
    };
    let bytes = entry.lfs.as_ref().map_or(entry.size, |lfs| lfs.size);
    Ok(OriginFile { name: entry.path, bytes, sha256, stamp: 0 })
}

/// One page, and where the next one is.
fn page(hub: &Hub, url: &str) -> Result<(Vec<Entry>, Option<String>)> {
    let mut attempts = 0;
    loop {
        let what = match hub.ask(url, None) {
            Ok(mut response) => {
                let next =
                    response.headers().get("link").and_then(|link| link.to_str().ok()).and_then(next_page);
                match response.body_mut().with_config().limit(PAGE_BOUND).read_to_vec() {
                    Ok(json) => match serde_json::from_slice(&json) {
                        Ok(entries) => return Ok((entries, next)),
                        Err(error) => return Err(refused(hub, format!("its list of files: {error}"))),
                    },
                    Err(error) => error.to_string(),
                }
            }
            Err(Failure::Passing(what)) => what,
            Err(Failure::Lasting { what, remedy }) => {
                return Err(Error::Origin { place: place(hub), what, remedy });
            }
        };
        attempts += 1;
        if let Err(what) = hub.wait(attempts, &what) {
            let remedy = "run the same command again when the network is back";
            return Err(Error::Origin { place: place(hub), what, remedy });
        }
    }
}

/// The address in `<…>; rel="next"`.
fn next_page(link: &str) -> Option<String> {
    let next = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    Some(next.split_once('<')?.1.split_once('>')?.0.to_owned())
}

fn place(hub: &Hub) -> String {
    format!("{} at {}", hub.repository.name, hub.endpoint)
}

fn refused(hub: &Hub, what: String) -> Error {
    Error::Origin { place: place(hub), what, remedy: "the hub's answer is not understood: try again later" }
}

/// A SHA-256 from its digits, with or without the name before them.
fn sha256(oid: &str) -> Option<[u8; 32]> {
    let digits = oid.strip_prefix("sha256:").unwrap_or(oid);
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    let mut sum = [0; 32];
    for (at, byte) in sum.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_found_in_the_link() {
        let link = "<https://h/a?cursor=x>; rel=\"prev\", <https://h/b?cursor=y>; rel=\"next\"";
        assert_eq!(next_page(link).as_deref(), Some("https://h/b?cursor=y"));
        assert_eq!(next_page("<https://h/a>; rel=\"prev\""), None);
    }

    #[test]
    fn sums_are_read_with_and_without_their_name() {
        let digits = "ab".repeat(32);
        assert_eq!(sha256(&digits), Some([0xAB; 32]));
        assert_eq!(sha256(&format!("sha256:{digits}")), Some([0xAB; 32]));
        assert_eq!(sha256("ab"), None);
    }
}
