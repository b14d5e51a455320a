//! The held-out panel: 200 prompts with rules for their answers.

use flint_chat::{ChatFiles, ChatFormat, ChatRequest, Piece, StreamOptions};
use flint_engine::{Engine, EngineOptions, Event, Request, Sampling};
use flint_model::LanguageModel;
use serde_json::Value;

use crate::{Tiny, checks};

/// Prompts that the reference passes.
pub const REFERENCE: usize = 187;
/// Tokens of a reply, as in the reference's evaluation.
const MOST_TOKENS: usize = 420;

fn format() -> ChatFormat {
    let folder = Tiny::Trained.folder();
    let read = |file: &str| std::fs::read(folder.join(file)).unwrap();
    let template = String::from_utf8(read("chat_template.jinja")).unwrap();
    ChatFormat::open(&ChatFiles {
        tokenizer_json: &read("tokenizer.json"),
        chat_template: Some(&template),
        tokenizer_config: Some(&read("tokenizer_config.json")),
        generation_config: Some(&read("generation_config.json")),
        config: Some(&read("config.json")),
    })
    .unwrap()
}

fn rows() -> Vec<Value> {
    let path = crate::root().join("tests/fixtures/flint_tiny/heldout.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn request(row: &Value) -> ChatRequest {
    ChatRequest {
        tools: row["tools"].as_array().cloned(),
        enable_thinking: row["enable_thinking"].as_bool(),
        ..ChatRequest::new(row["messages"].as_array().unwrap().clone())
    }
}

/// The panel's prompts in tokens.
pub fn panel_prompts() -> Vec<Vec<u32>> {
    let chat = format();
    rows().iter().map(|row| chat.render(&request(row)).unwrap().tokens).collect()
}

/// Prompts of the panel that the trained model answers well, greedily.
pub fn panel_score(model: Box<dyn LanguageModel>, options: EngineOptions) -> usize {
    let chat = format();
    let engine = Engine::start(model, options);
    let handle = engine.handle();
    let running: Vec<_> = rows()
        .into_iter()
        .map(|row| {
            let prompt = chat.render(&request(&row)).unwrap();
            assert_eq!(prompt.tokens.len() as u64, row["prompt_tokens"].as_u64().unwrap(), "{}", row["id"]);
            let stream = chat.stream(StreamOptions {
                in_reasoning: prompt.in_reasoning,
                split_reasoning: true,
                ..StreamOptions::default()
            });
            let events = handle
                .submit(Request {
                    prompt: prompt.tokens,
                    max_tokens: Some(MOST_TOKENS),
                    stop_tokens: chat.stop_tokens().to_vec(),
                    sampling: Sampling::greedy(),
                    logprobs: None,
                })
                .unwrap();
            (row, stream, events)
        })
        .collect();
    let mut passed = 0;
    for (row, mut stream, mut events) in running {
        let mut pieces = Vec::new();
        while let Some(event) = events.recv() {
            match event {
                Event::Token(token) => pieces.extend(stream.push(token.id)),
                Event::Failed(error) => panic!("{}: {error}", row["id"]),
                Event::Started { .. } | Event::Finished { .. } => {}
            }
        }
        pieces.extend(stream.finish());
        let answer: String = pieces
            .iter()
            .filter_map(|p| if let Piece::Content(text) = p { Some(text.as_str()) } else { None })
            .collect();
        passed += usize::from(checks::passes(&row["check"], &answer));
    }
    engine.shutdown();
    passed
}
