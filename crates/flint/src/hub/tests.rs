//! The hub's reader against a server that fails, cuts, lies and ignores.

use std::io::Read as _;
use std::sync::atomic::Ordering;
use std::time::Duration;

use flint_weights::pack::{Origin as _, OriginFile};

use super::Hub;
use server::{COMMIT, Fault, LocalHub, REPOSITORY, Served};

#[path = "../../tests/support/hub.rs"]
mod server;

/// Two files, the second with a sum.
fn files() -> Vec<Served> {
    let bytes = |seed: usize, len: usize| (0..len).map(|at| (at * 31 + seed * 7 + at / 251) as u8).collect();
    vec![
        ("config.json".to_owned(), bytes(1, 100), None),
        ("folder/a b.bin".replace(' ', "_"), bytes(2, 50_000), Some("ab".repeat(32))),
    ]
}

fn hub(server: &LocalHub, token: Option<&str>) -> Hub {
    let repository = format!("hf:{REPOSITORY}@{COMMIT}").parse().unwrap();
    let mut hub = Hub::new(&server.address, repository, token.map(str::to_owned));
    hub.pause = Duration::from_millis(1);
    hub
}

/// Reads part of the second file.
fn read(hub: &Hub, offset: u64, length: u64) -> std::io::Result<Vec<u8>> {
    let file = file();
    let mut bytes = Vec::new();
    hub.open(&file, offset, length).unwrap().read_to_end(&mut bytes).map(|_| bytes)
}

fn file() -> OriginFile {
    let (name, bytes, _) = files().remove(1);
    OriginFile { name, bytes: bytes.len() as u64, sha256: None, stamp: 0 }
}

#[test]
fn the_list_of_a_commit_has_lengths_and_sums_from_all_pages() {
    let server = LocalHub::start(files(), |_, _| Fault::None);
    let listed = hub(&server, None).files().unwrap();
    let names: Vec<(&str, u64, Option<[u8; 32]>)> =
        listed.iter().map(|file| (file.name.as_str(), file.bytes, file.sha256)).collect();
    assert_eq!(names, [("config.json", 100, None), ("folder/a_b.bin", 50_000, Some([0xAB; 32]))]);
}

#[test]
fn bytes_arrive_whatever_breaks_on_the_way() {
    let faults: [fn(usize, &str) -> Fault; 7] = [
        |_, _| Fault::None,
        |number, _| if number % 2 == 0 { Fault::Status(503) } else { Fault::None },
        |number, _| if number % 3 == 0 { Fault::Silence } else { Fault::Cut(7_777) },
        |number, _| if number < 5 { Fault::Cut(number) } else { Fault::None },
        |_, _| Fault::Shorter,
        |_, _| Fault::Redirects,
        |number, _| if number == 0 { Fault::Status(429) } else { Fault::Cut(20_000) },
    ];
    let expected = files().remove(1).1;
    for (number, fault) in faults.into_iter().enumerate() {
        let server = LocalHub::start(files(), fault);
        let hub = hub(&server, None);
        for (offset, length) in [(0, 50_000), (12_345, 30_000), (49_999, 1), (0, 0), (40_000, 1 << 40)] {
            let bytes = read(&hub, offset, length).unwrap_or_else(|error| panic!("fault {number}: {error}"));
            let end = (offset + length).min(50_000) as usize;
            assert!(bytes == expected[offset as usize..end], "fault {number}, {offset} + {length}");
        }
    }
}

#[test]
fn a_hub_that_lies_is_caught_by_name() {
    type Case = (fn(usize, &str) -> Fault, u64, &'static [&'static str]);
    let cases: [Case; 5] = [
        (|_, _| Fault::OtherRange, 100, &["bytes from 100 were asked for", "bytes 101-"]),
        (|_, _| Fault::OtherLength, 100, &["bytes 100-1099/50001", "the commit lists 50000 bytes"]),
        (|_, _| Fault::IgnoresRanges, 100, &["ignores ranges", "download the repository"]),
        (|_, _| Fault::Status(403), 0, &["403", "--token-file"]),
        (|_, _| Fault::Status(416), 0, &["416", "at byte 0 of 50000"]),
    ];
    for (fault, offset, parts) in cases {
        let server = LocalHub::start(files(), fault);
        let text = read(&hub(&server, None), offset, 1000).unwrap_err().to_string();
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert_eq!(server.requests.load(Ordering::SeqCst), 1, "asking again does not help: {text}");
    }
}

#[test]
fn a_whole_file_is_taken_from_its_start() {
    let server = LocalHub::start(files(), |_, _| Fault::IgnoresRanges);
    assert_eq!(read(&hub(&server, None), 0, 1000).unwrap(), files().remove(1).1[..1000]);
}

#[test]
fn a_hub_that_is_gone_is_given_up_with_what_to_do() {
    let server = LocalHub::start(files(), |_, _| Fault::Status(500));
    let text = read(&hub(&server, None), 100, 1000).unwrap_err().to_string();
    assert!(
        text.contains("500") && text.contains("times in a row") && text.contains("at byte 100"),
        "{text}"
    );
    let text = read(&Hub { endpoint: "http://127.0.0.1:1".into(), ..hub(&server, None) }, 0, 1).unwrap_err();
    assert!(text.to_string().contains("run the same command again"), "{text}");
    let missing = Hub { endpoint: format!("{}/nowhere", server.address), ..hub(&server, None) };
    let text = missing.files().unwrap_err().to_string();
    assert!(text.contains("404") && text.contains("check owner, name and commit"), "{text}");
}

#[test]
fn a_token_goes_to_the_hub_and_not_where_it_redirects() {
    let server = LocalHub::start(files(), |_, _| Fault::RedirectsAway);
    assert_eq!(read(&hub(&server, Some("secret")), 0, 10).unwrap(), files().remove(1).1[..10]);
    assert_eq!(server.requests.load(Ordering::SeqCst), 2);
    assert_eq!(*server.tokens.lock().unwrap(), ["Bearer secret"]);
}
