//! A hub on this machine that serves files by ranges, and misbehaves when it is told to.

#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The repository that it has.
pub(crate) const REPOSITORY: &str = "owner/tiny";
/// Its commit.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What it does wrong with one request for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// Answers with this status.
    Status(u16),
    /// Ends the connection after so many bytes of the body.
    Cut(usize),
    /// Ends the connection without an answer.
    Silence,
    /// Sends the whole file whatever was asked for.
    IgnoresRanges,
    /// Sends the bytes after those that were asked for.
    OtherRange,
    /// Says that the file has one byte more.
    OtherLength,
    /// Sends fewer bytes than were asked for, and says so.
    Shorter,
    /// Flips a bit of the body.
    Flips,
    /// Sends to another address that has the file.
    Redirects,
    /// The same, with another name of this machine.
    RedirectsAway,
}

/// A file: name, bytes, and the SHA-256 that the list has for it.
pub(crate) type Served = (String, Vec<u8>, Option<String>);

/// A running server.
pub(crate) struct LocalHub {
    pub(crate) address: String,
    /// Requests for files so far.
    pub(crate) requests: Arc<AtomicUsize>,
    /// `Authorization` headers that came.
    pub(crate) tokens: Arc<Mutex<Vec<String>>>,
}

/// The fault of the request of this number for this file.
type Faults = Box<dyn Fn(usize, &str) -> Fault + Send + Sync>;

struct State {
    files: Vec<Served>,
    /// What to do with the request of this number for this file.
    fault: Faults,
    requests: Arc<AtomicUsize>,
    tokens: Arc<Mutex<Vec<String>>>,
    address: String,
}

impl LocalHub {
    /// Serves until the test's process ends.
    pub(crate) fn start(
        files: Vec<Served>,
        fault: impl Fn(usize, &str) -> Fault + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (requests, tokens) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let state = Arc::new(State {
            files,
            fault: Box::new(fault),
            requests: Arc::clone(&requests),
            tokens: Arc::clone(&tokens),
            address: address.clone(),
        });
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&state);
                std::thread::spawn(move || serve(&state, stream));
            }
        });
        Self { address, requests, tokens }
    }
}

/// Answers the requests of one connection.
fn serve(state: &State, stream: TcpStream) {
    let mut out = stream.try_clone().unwrap();
    let mut lines = BufReader::new(stream).lines();
    loop {
        let mut head = Vec::new();
        loop {
            match lines.next() {
                Some(Ok(line)) if line.is_empty() => break,
                Some(Ok(line)) => head.push(line),
                _ => return,
            }
        }
        let Some(path) = head.first().and_then(|line| line.split(' ').nth(1)).map(str::to_owned) else {
            return;
        };
        let header = |name: &str| {
            head.iter().find_map(|line| {
                let (key, value) = line.split_once(": ")?;
                key.eq_ignore_ascii_case(name).then(|| value.to_owned())
            })
        };
        state.tokens.lock().unwrap().extend(header("authorization"));
        if !answer(state, &mut out, &path, header("range").as_deref()) {
            let _ = out.shutdown(std::net::Shutdown::Both);
            return;
        }
    }
}

/// Whether the connection goes on.
fn answer(state: &State, out: &mut TcpStream, path: &str, range: Option<&str>) -> bool {
    let tree = format!("/api/models/{REPOSITORY}/tree/{COMMIT}");
    if let Some(query) = path.strip_prefix(&tree) {
        return listing(state, out, query);
    }
    let (name, redirected) = match path.strip_prefix("/other/") {
        Some(name) => (name, true),
        None => match path.strip_prefix(&format!("/{REPOSITORY}/resolve/{COMMIT}/")) {
            Some(name) => (name, false),
            None => return send(out, "404 Not Found", "", b"no such page"),
        },
    };
    let Some((_, bytes, _)) = state.files.iter().find(|(file, _, _)| file == name) else {
        return send(out, "404 Not Found", "", b"no such file");
    };
    let number = state.requests.fetch_add(1, Ordering::SeqCst);
    let fault = (state.fault)(number, name);
    let (start, end) = range.and_then(parse_range).unwrap_or((0, bytes.len()));
    let end = end.min(bytes.len());
    let partial = |start: usize, end: usize, all: usize| {
        format!("Content-Range: bytes {start}-{}/{all}\r\n", end.saturating_sub(1))
    };
    let of_range = &bytes[start.min(end)..end];
    match fault {
        Fault::Status(status) => send(out, &format!("{status} Fault"), "", b"fault"),
        Fault::Silence => false,
        Fault::Cut(most) => {
            let head = format!(
                "HTTP/1.1 206 Partial\r\n{}Content-Length: {}\r\n\r\n",
                partial(start, end, bytes.len()),
                of_range.len()
            );
            let _ = out.write_all(head.as_bytes());
            let _ = out.write_all(&of_range[..most.min(of_range.len())]);
            false
        }
        Fault::IgnoresRanges => send(out, "200 OK", "", bytes),
        Fault::OtherRange => {
            let (start, end) = (start + 1, (end + 1).min(bytes.len()));
            send(out, "206 Partial", &partial(start, end, bytes.len()), &bytes[start.min(end)..end])
        }
        Fault::OtherLength => send(out, "206 Partial", &partial(start, end, bytes.len() + 1), of_range),
        Fault::Shorter => {
            let end = start + (end - start).div_ceil(2);
            send(out, "206 Partial", &partial(start, end, bytes.len()), &bytes[start..end])
        }
        Fault::Flips => {
            let mut wrong = of_range.to_vec();
            let middle = wrong.len() / 2;
            wrong[middle] ^= 1;
            send(out, "206 Partial", &partial(start, end, bytes.len()), &wrong)
        }
        Fault::Redirects if !redirected => {
            let more = format!("Location: {}/other/{name}\r\n", state.address);
            send(out, "302 Found", &more, b"")
        }
        Fault::RedirectsAway if !redirected => {
            let away = state.address.replace("127.0.0.1", "localhost");
            send(out, "302 Found", &format!("Location: {away}/other/{name}\r\n"), b"")
        }
        Fault::None | Fault::Redirects | Fault::RedirectsAway => {
            send(out, "206 Partial", &partial(start, end, bytes.len()), of_range)
        }
    }
}

/// Two pages of the list.
fn listing(state: &State, out: &mut TcpStream, query: &str) -> bool {
    let half = state.files.len() / 2;
    let second = query.contains("cursor=2");
    let files = if second { &state.files[half..] } else { &state.files[..half] };
    let entries: Vec<serde_json::Value> = files
        .iter()
        .map(|(name, bytes, sum)| {
            let mut entry =
                serde_json::json!({"type": "file", "path": name, "size": bytes.len(), "oid": "1234"});
            if let Some(sum) = sum {
                entry["lfs"] = serde_json::json!({"oid": sum, "size": bytes.len(), "pointerSize": 135});
            }
            entry
        })
        .chain([serde_json::json!({"type": "directory", "path": "folder", "oid": "1"})])
        .collect();
    let next = format!(
        "Link: <{}/api/models/{REPOSITORY}/tree/{COMMIT}?recursive=true&cursor=2>; rel=\"next\"\r\n",
        state.address
    );
    let more = if second { "" } else { next.as_str() };
    send(out, "200 OK", more, serde_json::Value::from(entries).to_string().as_bytes())
}

fn send(out: &mut TcpStream, status: &str, more: &str, body: &[u8]) -> bool {
    let head = format!("HTTP/1.1 {status}\r\n{more}Content-Length: {}\r\n\r\n", body.len());
    out.write_all(head.as_bytes()).and_then(|()| out.write_all(body)).is_ok()
}

/// `bytes=4-7` as 4 and 8.
fn parse_range(range: &str) -> Option<(usize, usize)> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    Some((first.parse().ok()?, last.parse::<usize>().ok()? + 1))
}
