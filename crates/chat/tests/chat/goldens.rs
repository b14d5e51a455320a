//! Prompts as transformers renders and tokenises them (`fixtures/prompts.json`), text and ids.

use flint_chat::ChatRequest;
use serde_json::{Value, json};

use crate::{fixture, request, tiny};

/// The one golden whose user text holds control tokens: transformers makes them real.
const FOREIGN_MARKERS: &str = "specials_in_text";
/// The one golden with a role that templates drop without a word; here it becomes a system message.
const DEVELOPER: &str = "unknown_role";

fn cases() -> Vec<Value> {
    serde_json::from_str(&fixture("prompts.json")).unwrap()
}

fn ids(case: &Value) -> Vec<u32> {
    case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn every_golden_renders_to_the_same_text_and_ids() {
    let format = tiny();
    let cases = cases();
    assert_eq!(cases.len(), 36);
    for case in cases.iter().filter(|case| case["name"] != DEVELOPER) {
        let name = case["name"].as_str().unwrap();
        let prompt = format.render(&request(case)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(prompt.text, case["text"].as_str().unwrap(), "{name}");
        assert_eq!(format.encode_trusted(&prompt.text).unwrap(), ids(case), "{name}");
        assert_eq!(prompt.in_reasoning, prompt.text.ends_with("<think>"), "{name}");
        assert_eq!(format.decode(&prompt.tokens), prompt.text, "{name}");
        if name != FOREIGN_MARKERS {
            assert_eq!(prompt.tokens, ids(case), "{name}");
        }
    }
}

#[test]
fn calls_whose_arguments_are_json_strings_render_as_those_with_objects() {
    let format = tiny();
    let mut seen = 0;
    for mut case in cases() {
        for message in case["messages"].as_array_mut().unwrap() {
            for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
                let arguments = &mut call["function"]["arguments"];
                *arguments = Value::String(arguments.to_string());
                seen += 1;
            }
        }
        if case["name"] != DEVELOPER && case["name"] != FOREIGN_MARKERS {
            let prompt = format.render(&request(&case)).unwrap();
            assert_eq!(prompt.text, case["text"].as_str().unwrap(), "{}", case["name"]);
            assert_eq!(prompt.tokens, ids(&case), "{}", case["name"]);
        }
    }
    assert!(seen > 10);
}

#[test]
fn control_tokens_in_user_text_differ_from_the_golden_in_nothing_but_their_spelling() {
    let format = tiny();
    let cases = cases();
    let case = cases.iter().find(|case| case["name"] == FOREIGN_MARKERS).unwrap();
    let prompt = format.render(&request(case)).unwrap();
    let content = case["messages"][0]["content"].as_str().unwrap();
    let (head, tail) = prompt.text.split_once(content).unwrap();
    let mut expected = format.encode_trusted(head).unwrap();
    expected.extend(format.encode(content).unwrap());
    expected.extend(format.encode_trusted(tail).unwrap());
    assert_eq!(prompt.tokens, expected);
    assert_ne!(prompt.tokens, ids(case));
}

#[test]
fn a_developer_message_is_a_system_message() {
    let format = tiny();
    let render = |role: &str| {
        let messages =
            vec![json!({"role": role, "content": "Be brief."}), json!({"role": "user", "content": "Hi"})];
        format.render(&ChatRequest::new(messages)).unwrap()
    };
    assert_eq!(render("developer"), render("system"));
    assert!(render("developer").text.contains("<|system|>Be brief."));
}
