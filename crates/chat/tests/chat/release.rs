//! A template with the logic of the model's release, against Python's Jinja (`fixtures/release_like.json`).

use flint_chat::{ChatFormat, ChatRequest};
use serde_json::{Value, json};

use crate::{Files, fixture, request};

fn release_like() -> ChatFormat {
    Files::read().with_template(&fixture("release_like.jinja")).unwrap()
}

#[test]
fn every_conversation_renders_as_in_python_and_encodes_as_plain_text_does() {
    let format = release_like();
    let cases: Vec<Value> = serde_json::from_str(&fixture("release_like.json")).unwrap();
    assert!(cases.len() > 20);
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let prompt = format.render(&request(case)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(prompt.text, case["text"].as_str().unwrap(), "{name}");
        assert_eq!(prompt.in_reasoning, prompt.text.ends_with("<|assistant|><think>"), "{name}");
        // No conversation here has a control token in foreign text but those that the template cuts out.
        assert_eq!(prompt.tokens, format.encode_trusted(&prompt.text).unwrap(), "{name}");
    }
}

#[test]
fn without_a_switch_thinking_is_ended_by_hand() {
    let format = release_like();
    assert!(!format.capabilities().thinking_switch);
    let user = || vec![json!({"role": "user", "content": "a"})];
    let prompt = |enable_thinking| {
        format.render(&ChatRequest { enable_thinking, ..ChatRequest::new(user()) }).unwrap()
    };
    let off = prompt(Some(false));
    assert!(off.text.ends_with("<|assistant|><think></think>") && !off.in_reasoning);
    assert_eq!(off.tokens, format.encode_trusted(&off.text).unwrap());
    assert_eq!(prompt(Some(true)), prompt(None));
    assert!(prompt(None).in_reasoning);
}

#[test]
fn thinking_that_is_sent_back_keeps_its_bytes() {
    let format = release_like();
    let thinking = "\n  \u{2028}two\n\n lines \t\n";
    let messages = vec![
        json!({"role": "user", "content": "a"}),
        json!({"role": "assistant", "content": "b", "reasoning_content": thinking}),
        json!({"role": "user", "content": "c"}),
    ];
    let prompt = format.render(&ChatRequest::new(messages)).unwrap();
    assert!(prompt.text.contains(&format!("<think>{thinking}</think>b<|user|>")));
}

#[test]
fn answers_are_stripped_of_the_white_space_that_python_strips() {
    let format = release_like();
    let messages = vec![
        json!({"role": "user", "content": "a"}),
        json!({"role": "assistant", "content": "\u{1c}\u{85} b\u{2028}\u{1f}\n"}),
    ];
    let prompt = format.render(&ChatRequest::new(messages)).unwrap();
    assert!(prompt.text.contains("</think>b<|assistant|>"), "{:?}", prompt.text);
}

#[test]
fn integers_beyond_64_bits_in_arguments_keep_their_digits() {
    let format = release_like();
    let arguments = r#"{"n": 123456789012345678901234567890123456789012345678901234567890, "m": [-18446744073709551616], "f": 1E5}"#;
    let messages = vec![
        json!({"role": "user", "content": "a"}),
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}),
    ];
    let text = format.render(&ChatRequest::new(messages)).unwrap().text;
    assert!(
        text.contains("<arg_value>123456789012345678901234567890123456789012345678901234567890</arg_value>")
    );
    assert!(text.contains("<arg_value>[-18446744073709551616]</arg_value>"));
    assert!(text.contains("<arg_value>100000.0</arg_value>"));
}

#[test]
fn two_hundred_results_take_the_order_of_their_calls() {
    let format = release_like();
    let call =
        |n| json!({"id": format!("c{n}"), "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let result = |n| json!({"role": "tool", "tool_call_id": format!("c{n}"), "content": format!("r{n}")});
    let calls: Vec<Value> = (0..200).map(call).collect();
    let mut messages = vec![
        json!({"role": "user", "content": "a"}),
        json!({"role": "assistant", "content": null, "tool_calls": calls}),
    ];
    messages.extend((0..200).rev().map(result));
    let text = format.render(&ChatRequest::new(messages)).unwrap().text;
    let sorted =
        (0..200).map(|n| format!("<tool_response>r{n}</tool_response>")).collect::<Vec<_>>().concat();
    assert!(text.contains(&format!("<|observation|>{sorted}<|assistant|>")));
}

#[test]
fn a_long_run_of_results_renders_as_short_runs_do() {
    // One run of 40 results (put into order before the template runs) against the template's own work on the same
    // results in runs that it sorts itself.
    let call = |n: usize| json!({"id": format!("c{n}"), "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let result =
        |n: usize| json!({"role": "tool", "tool_call_id": format!("c{n}"), "content": format!("r{n}")});
    let responses = |format: &ChatFormat, calls: &[usize], results: &[usize]| {
        let calls: Vec<Value> = calls.iter().map(|n| call(*n)).collect();
        let mut messages = vec![json!({"role": "assistant", "content": "", "tool_calls": calls})];
        messages.extend(results.iter().map(|n| result(*n)));
        let request = ChatRequest { add_generation_prompt: false, ..ChatRequest::new(messages) };
        let text = format.render(&request).unwrap().text;
        let (_, responses) = text.split_once("<|observation|>").unwrap();
        responses.to_owned()
    };
    let in_order = |order: &[usize]| {
        order.iter().map(|n| format!("<tool_response>r{n}</tool_response>")).collect::<Vec<_>>().concat()
    };
    let up: Vec<usize> = (0..40).collect();
    let down: Vec<usize> = (0..40).rev().collect();
    for format in [&release_like(), crate::tiny()] {
        assert_eq!(responses(format, &up, &down), in_order(&up));
        assert_eq!(responses(format, &down, &up), in_order(&down));
        // Two results for one call, or one for none: the order as given, nothing dropped.
        let twice = [&down[..], &[3]].concat();
        assert_eq!(responses(format, &up, &twice), in_order(&twice));
        let unknown = [&down[..], &[99]].concat();
        assert_eq!(responses(format, &up, &unknown), in_order(&unknown));
    }
    // An unanswered call: the release sorts, the embedded model's template does not.
    let some = &down[..36];
    let sorted: Vec<usize> = some.iter().rev().copied().collect();
    assert_eq!(responses(&release_like(), &up, some), in_order(&sorted));
    assert_eq!(responses(crate::tiny(), &up, some), in_order(some));
}
