//! A file read by ranges: taken up again where it was cut, and nothing believed that can be checked.

use std::io::{Error, Read, Result};

use flint_weights::pack::OriginFile;
use ureq::BodyReader;
use ureq::http::Response;

use super::{Failure, Hub};

/// Bytes of one request: long enough that asking costs nothing, short enough that a stall is noticed.
const CHUNK: u64 = 256 << 20;

/// Bytes of a file on a hub.
pub(super) struct RangeReader<'a> {
    hub: &'a Hub,
    file: OriginFile,
    at: u64,
    end: u64,
    /// The body that is being read, and the byte after its last.
    body: Option<(BodyReader<'static>, u64)>,
    /// Attempts since the last byte.
    attempts: u32,
}

impl<'a> RangeReader<'a> {
    /// Reads from `at` to `end`.
    pub(super) fn new(hub: &'a Hub, file: &OriginFile, at: u64, end: u64) -> Self {
        Self { hub, file: file.clone(), at, end, body: None, attempts: 0 }
    }

    /// Asks for the next bytes.
    fn ask(&mut self) -> std::result::Result<(BodyReader<'static>, u64), Failure> {
        let goal = self.end.min(self.at + CHUNK);
        let response = self.hub.ask(&self.hub.file_url(&self.file.name), Some((self.at, goal)))?;
        let end = if response.status().as_u16() == 206 {
            self.partial(&response, goal)?
        } else {
            self.whole(&response)?
        };
        Ok((response.into_body().into_reader(), end))
    }

    /// Checks the answer to a range: that it is this range of a file of this length.
    fn partial(&self, response: &Response<ureq::Body>, goal: u64) -> std::result::Result<u64, Failure> {
        let header = response
            .headers()
            .get("content-range")
            .and_then(|value| value.to_str().ok())
            .unwrap_or("missing");
        let Some((first, last, all)) = content_range(header) else {
            return Err(lie(format!("its Content-Range is {header:?}")));
        };
        if all.is_some_and(|all| all != self.file.bytes) {
            let listed = self.file.bytes;
            return Err(lie(format!("its Content-Range is {header:?}, but the commit lists {listed} bytes")));
        }
        if first != self.at || last < first || last >= self.file.bytes {
            return Err(lie(format!(
                "bytes from {} were asked for, its Content-Range is {header:?}",
                self.at
            )));
        }
        Ok(goal.min(last + 1))
    }

    /// Checks the answer of a server that sends the whole file: of use only from the start.
    fn whole(&self, response: &Response<ureq::Body>) -> std::result::Result<u64, Failure> {
        if self.at > 0 {
            return Err(Failure::Lasting {
                what: format!(
                    "the server ignores ranges: bytes from {} were asked for, it sends the whole file",
                    self.at
                ),
                remedy: "use a hub that answers ranges, or download the repository and give the folder",
            });
        }
        let header = response.headers().get("content-length").and_then(|value| value.to_str().ok());
        match header.map(str::parse::<u64>) {
            Some(Ok(length)) if length != self.file.bytes => {
                let listed = self.file.bytes;
                Err(lie(format!("its Content-Length is {length}, but the commit lists {listed} bytes")))
            }
            _ => Ok(self.end),
        }
    }

    fn failed(&self, what: &str, remedy: &str) -> Error {
        Error::other(format!("{what} (at byte {} of {}); {remedy}", self.at, self.file.bytes))
    }

    /// Counts an attempt that brought nothing, and waits.
    fn retry(&mut self, what: &str) -> Result<()> {
        self.body = None;
        self.attempts += 1;
        let gone = |what: String| {
            self.failed(&what, "what was copied stays: run the same command again when the network is back")
        };
        self.hub.wait(self.attempts, what).map_err(gone)
    }
}

impl Read for RangeReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        while self.at < self.end && !buffer.is_empty() {
            if self.body.is_none() {
                match self.ask() {
                    Ok(body) => self.body = Some(body),
                    Err(Failure::Passing(what)) => {
                        self.retry(&what)?;
                        continue;
                    }
                    Err(Failure::Lasting { what, remedy }) => return Err(self.failed(&what, remedy)),
                }
            }
            let Some((body, end)) = &mut self.body else { continue };
            let most = buffer.len().min(usize::try_from(*end - self.at).unwrap_or(usize::MAX));
            match body.read(&mut buffer[..most]) {
                Ok(0) => self.retry("the answer ended early")?,
                Ok(read) => {
                    self.at += read as u64;
                    self.attempts = 0;
                    if self.at == *end {
                        self.body = None;
                    }
                    return Ok(read);
                }
                Err(error) => self.retry(&error.to_string())?,
            }
        }
        Ok(0)
    }
}

fn lie(what: String) -> Failure {
    Failure::Lasting {
        what,
        remedy: "the server and the repository's list contradict each other: try again later",
    }
}

/// `bytes 0-7/100` as 0, 7 and 100; the length may be `*`.
fn content_range(header: &str) -> Option<(u64, u64, Option<u64>)> {
    let (range, all) = header.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let all = if all == "*" { None } else { Some(all.parse().ok()?) };
    Some((first.parse().ok()?, last.parse().ok()?, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read() {
        assert_eq!(content_range("bytes 0-7/100"), Some((0, 7, Some(100))));
        assert_eq!(content_range("bytes 8-9/*"), Some((8, 9, None)));
        for wrong in ["bytes */100", "0-7/100", "bytes 7/100", "bytes -1-7/100", "missing"] {
            assert_eq!(content_range(wrong), None);
        }
    }
}
