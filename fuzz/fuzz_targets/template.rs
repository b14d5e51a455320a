//! A request of any shape is rendered or refused; foreign text makes no control token; a reply streams to its whole.
//!
//! The input is a JSON object: `messages`, `tools`, `options` (the template's variables), `reply` (text that streams
//! back) and `stop`.

#![no_main]

use std::sync::LazyLock;

use flint_chat::{ChatFiles, ChatFormat, ChatRequest, Piece, StreamOptions};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// The embedded model's template, and one with the logic of the model's release.
static FORMATS: LazyLock<[ChatFormat; 2]> = LazyLock::new(|| {
    let open = |template| {
        let tokenizer_json = include_bytes!("../../models/flint-tiny/tokenizer.json");
        let files = ChatFiles { tokenizer_json, chat_template: Some(template), ..ChatFiles::default() };
        ChatFormat::open(&files).expect("a template of this repository")
    };
    [
        open(include_str!("../../models/flint-tiny/chat_template.jinja")),
        open(include_str!("../../crates/chat/tests/fixtures/release_like.jinja")),
    ]
});

/// The turns that only the template may open.
const TURNS: [&str; 4] = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"];

fuzz_target!(|data: &[u8]| {
    let Ok(Value::Object(input)) = serde_json::from_slice(data) else { return };
    let list = |name: &str| input.get(name).and_then(Value::as_array).cloned();
    let mut request = ChatRequest::new(list("messages").unwrap_or_default());
    request.tools = list("tools");
    request.extra = input.get("options").and_then(Value::as_object).cloned().unwrap_or_default();
    for format in &*FORMATS {
        match format.render(&request) {
            Ok(prompt) => {
                assert_eq!(format.decode(&prompt.tokens), prompt.text);
                count_turns(format, &request, &prompt.tokens);
            }
            Err(error) => assert!(error.is_request(), "{error}"),
        }
    }
    let reply = input.get("reply").and_then(Value::as_str).unwrap_or_default();
    let stop = list("stop").unwrap_or_default();
    stream(&FORMATS[0], reply, stop.iter().filter_map(|stop| stop.as_str().map(str::to_owned)).collect());
});

/// No more turns than messages, the effort's, the tools' and the reply's.
fn count_turns(format: &ChatFormat, request: &ChatRequest, tokens: &[u32]) {
    let turns: Vec<u32> =
        TURNS.iter().flat_map(|turn| format.encode_trusted(turn).expect("a token")).collect();
    let opened = tokens.iter().filter(|token| turns.contains(token)).count();
    assert!(opened <= request.messages.len() + 3, "{opened} turns of {} messages", request.messages.len());
}

/// One token at a time gives what all bytes at once give.
fn stream(format: &ChatFormat, reply: &str, stop: Vec<String>) {
    let whole = stop
        .iter()
        .filter(|stop| !stop.is_empty())
        .filter_map(|stop| reply.match_indices(stop.as_str()).map(|(at, _)| (at + stop.len(), at)).next());
    // The stop string that ends first, the longest of those.
    let expected = whole.min().map_or(reply, |(_, at)| &reply[..at]);
    for tokens in [format.encode(reply), format.encode_trusted(reply)] {
        let mut machine = format.stream(StreamOptions { stop: stop.clone(), ..StreamOptions::default() });
        let mut text = String::new();
        let mut add = |pieces: Vec<Piece>| {
            for piece in pieces {
                match piece {
                    Piece::Content(piece) => text.push_str(&piece),
                    Piece::Reasoning(piece) => panic!("{piece:?} is no thinking"),
                }
            }
        };
        for token in tokens.expect("text has tokens") {
            add(machine.push(token));
        }
        add(machine.finish());
        assert_eq!(text, expected);
    }
}
