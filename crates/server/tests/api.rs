//! What clients send and what they get, byte by byte where it matters.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use serde_json::{Value, json};
use support::{LIMITS, Server, ask, endless, fault, says};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const REPLY: &str = "Seven times eleven.</think>The answer is 77.";

fn speaker() -> Server {
    Server::start(|chat| says(chat, REPLY))
}

/// A body without what differs from run to run.
fn timeless(mut body: Value) -> Value {
    let id = body["id"].take();
    assert!(
        id.as_str().unwrap().starts_with("chatcmpl-") || id.as_str().unwrap().starts_with("cmpl-"),
        "{id}"
    );
    assert!(body["created"].take().as_u64().unwrap() > 1_700_000_000);
    body
}

#[test]
fn a_chat_reply_is_the_golden_body() {
    let server = speaker();
    let (status, body) = server.post(CHAT, &json!({ "model": "any", "messages": ask("7 x 11?"), "seed": 5 }));
    let golden = json!({
        "id": null,
        "object": "chat.completion",
        "created": null,
        "model": "toy",
        "system_fingerprint": server.handle().arithmetic_id(),
        "seed": 5,
        "choices": [{
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "The answer is 77.",
                "reasoning_content": "Seven times eleven."
            },
            "logprobs": null,
            "finish_reason": "stop"
        }],
        "usage": body["usage"]
    });
    assert_eq!((status, timeless(body.clone())), (200, golden));
    let reply_tokens = server.chat.encode_trusted(REPLY).unwrap().len() + 1;
    assert_eq!(body["usage"]["completion_tokens"], reply_tokens);
    let sum = body["usage"]["prompt_tokens"].as_u64().unwrap() + reply_tokens as u64;
    assert_eq!(body["usage"]["total_tokens"], sum);
}

#[test]
fn a_chat_stream_is_the_golden_events() {
    let server = speaker();
    let body = json!({ "messages": ask("7 x 11?"), "stream": true });
    let (frames, done) = server.stream(CHAT, &body);
    assert!(done);
    assert_eq!(frames[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let (mut reasoning, mut content) = (String::new(), String::new());
    for frame in &frames {
        assert_eq!(frame["object"], "chat.completion.chunk");
        assert_eq!(frame["id"], frames[0]["id"]);
        assert!(frame.get("usage").is_none(), "usage was not asked for: {frame}");
        assert_eq!(frame["choices"].as_array().unwrap().len(), 1, "no choices are no chunk: {frame}");
        let choice = &frame["choices"][0];
        assert_eq!(choice["finish_reason"].is_null(), frame != frames.last().unwrap());
        reasoning += choice["delta"]["reasoning_content"].as_str().unwrap_or_default();
        content += choice["delta"]["content"].as_str().unwrap_or_default();
    }
    assert_eq!((reasoning.as_str(), content.as_str()), ("Seven times eleven.", "The answer is 77."));
    let last = &frames.last().unwrap()["choices"][0];
    assert_eq!((&last["delta"], &last["finish_reason"]), (&json!({}), &json!("stop")));
}

#[test]
fn usage_in_a_stream_is_one_more_chunk_without_choices_and_only_when_asked_for() {
    let server = speaker();
    for (route, prompt) in [(CHAT, json!({ "messages": ask("a") })), (TEXT, json!({ "prompt": "a<think>" }))]
    {
        let mut body = prompt;
        body["stream"] = true.into();
        body["stream_options"] = json!({ "include_usage": true });
        let (frames, done) = server.stream(route, &body);
        assert!(done);
        let (last, before) = frames.split_last().unwrap();
        assert_eq!(last["choices"], json!([]), "{route}");
        assert!(last["usage"]["total_tokens"].as_u64().unwrap() > 0, "{route}");
        assert!(
            before.iter().all(|frame| frame["usage"].is_null() && frame.get("usage").is_some()),
            "{route}"
        );
        assert_eq!(before.last().unwrap()["choices"][0]["finish_reason"], "stop", "{route}");
        body["stream_options"]["include_usage"] = false.into();
        let (frames, _) = server.stream(route, &body);
        assert!(frames.iter().all(|frame| frame.get("usage").is_none()), "{route}");
    }
}

#[test]
fn a_stream_folds_to_the_whole_reply_of_the_same_seed() {
    let server = Server::start(|chat| endless(chat, std::time::Duration::ZERO));
    for seed in 0..8 {
        let mut body = json!({ "messages": ask("go"), "seed": seed, "max_tokens": 60, "temperature": 1.5,
            "logprobs": true, "top_logprobs": 2 });
        let (_, whole) = server.post(CHAT, &body);
        body["stream"] = true.into();
        let (frames, _) = server.stream(CHAT, &body);
        let message = &whole["choices"][0]["message"];
        for name in ["content", "reasoning_content"] {
            let parts: Vec<&str> =
                frames.iter().filter_map(|frame| frame["choices"][0]["delta"][name].as_str()).collect();
            assert_eq!(parts.concat(), message[name].as_str().unwrap_or_default(), "seed {seed}, {name}");
        }
        let logprobs: Vec<&Value> = frames
            .iter()
            .filter_map(|frame| frame["choices"][0]["logprobs"]["content"].as_array())
            .flatten()
            .collect();
        let expected: Vec<&Value> =
            whole["choices"][0]["logprobs"]["content"].as_array().unwrap().iter().collect();
        assert_eq!(logprobs, expected, "seed {seed}");
        assert_eq!(logprobs.len(), 60);
    }
}

#[test]
fn the_seed_is_random_unless_given_and_its_echo_repeats_the_reply() {
    let server = Server::start(|chat| endless(chat, std::time::Duration::ZERO));
    let mut body = json!({ "messages": ask("go"), "max_tokens": 30, "temperature": 2.0 });
    let (_, first) = server.post(CHAT, &body);
    let (_, second) = server.post(CHAT, &body);
    assert_ne!(first["choices"], second["choices"]);
    body["seed"] = first["seed"].clone();
    let (_, again) = server.post(CHAT, &body);
    assert_eq!(again["choices"], first["choices"]);
}

#[test]
fn thinking_is_turned_off_by_each_of_its_switches() {
    let server = speaker();
    for switch in [
        json!({ "chat_template_kwargs": { "enable_thinking": false } }),
        json!({ "reasoning_effort": "none" }),
        json!({ "thinking": { "type": "disabled" } }),
    ] {
        let mut body = json!({ "messages": ask("7 x 11?") });
        body.as_object_mut().unwrap().extend(switch.as_object().unwrap().clone());
        let (status, answer) = server.post(CHAT, &body);
        let message = json!({ "role": "assistant", "content": "The answer is 77." });
        assert_eq!((status, &answer["choices"][0]["message"]), (200, &message), "{switch}");
    }
}

#[test]
fn a_stop_string_ends_the_answer_before_itself_and_the_work_with_it() {
    let server = speaker();
    for stream in [false, true] {
        let body = json!({ "messages": ask("a"), "stop": ["", "is 77"], "stream": stream });
        let (content, reason) = if stream {
            let (frames, _) = server.stream(CHAT, &body);
            let part = |frame: &Value| frame["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
            let content: String = frames.iter().filter_map(part).collect();
            (content, frames.last().unwrap()["choices"][0]["finish_reason"].clone())
        } else {
            let (_, body) = server.post(CHAT, &body);
            let choice = &body["choices"][0];
            (choice["message"]["content"].as_str().unwrap().to_owned(), choice["finish_reason"].clone())
        };
        assert_eq!((content.as_str(), reason), ("The answer ", json!("stop")));
    }
    server.wait("both requests left the engine", |status| {
        status.running == 0 && status.finished + status.cancelled == 2
    });
}

#[test]
fn an_empty_stop_string_never_matches() {
    let (status, body) = speaker().post(CHAT, &json!({ "messages": ask("a"), "stop": "" }));
    assert_eq!((status, &body["choices"][0]["message"]["content"]), (200, &json!("The answer is 77.")));
}

#[test]
fn logprobs_are_sorted_and_spelled_with_their_bytes() {
    let server = speaker();
    let body = json!({ "messages": ask("a"), "logprobs": true, "top_logprobs": 5, "temperature": 0 });
    let (_, answer) = server.post(CHAT, &body);
    let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(entries.len(), server.chat.encode_trusted(REPLY).unwrap().len());
    let mut bytes = Vec::new();
    for entry in entries {
        let own: Vec<u8> = serde_json::from_value(entry["bytes"].clone()).unwrap();
        assert_eq!(entry["token"], String::from_utf8_lossy(&own).as_ref());
        bytes.extend(own);
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 5);
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&entry["token"], &entry["logprob"]));
        let values: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert!(values.is_sorted_by(|a, b| a >= b), "{values:?}");
    }
    assert_eq!(String::from_utf8(bytes).unwrap(), REPLY);
}

#[test]
fn a_completion_continues_a_text_and_reports_the_older_logprobs() {
    let server = speaker();
    let body = json!({ "prompt": "Sum:<think>", "logprobs": 2, "seed": 1 });
    let (status, answer) = server.post(TEXT, &body);
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(REPLY), &json!("stop")));
    let logprobs = &choice["logprobs"];
    let count = server.chat.encode_trusted(REPLY).unwrap().len();
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[name].as_array().unwrap().len(), count, "{name}");
    }
    for (token, offset) in
        logprobs["tokens"].as_array().unwrap().iter().zip(logprobs["text_offset"].as_array().unwrap())
    {
        let (token, offset) = (token.as_str().unwrap(), offset.as_u64().unwrap() as usize);
        assert!(REPLY[offset..].starts_with(token), "{token:?} at {offset}");
    }
    let tokens = server.chat.encode_trusted("Sum:<think>").unwrap();
    let (_, same) = server.post(TEXT, &json!({ "prompt": tokens, "logprobs": 2, "seed": 1 }));
    assert_eq!(same["choices"], answer["choices"]);
}

#[test]
fn a_bound_cuts_the_reply_and_says_so() {
    let (_, body) = speaker().post(CHAT, &json!({ "messages": ask("a"), "max_completion_tokens": 3 }));
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["usage"]["completion_tokens"], 3);
}

#[test]
fn a_bound_beyond_the_context_is_refused_and_no_bound_is_clamped() {
    let server = Server::start(|chat| endless(chat, std::time::Duration::ZERO));
    for bound in ["max_tokens", "max_completion_tokens"] {
        let (status, body) = server.post(CHAT, &json!({ "messages": ask("a"), bound: 1_000_000_000 }));
        let (param, code, message) = fault(&body);
        assert_eq!((status, param.as_str(), code.as_str()), (400, bound, "context_length_exceeded"));
        assert!(message.contains("1000000000") && message.contains("600"), "{message}");
    }
    let long = "word ".repeat(2000);
    let (status, body) = server.post(CHAT, &json!({ "messages": ask(&long) }));
    assert_eq!(
        (status, fault(&body).0.as_str(), fault(&body).1.as_str()),
        (400, "messages", "context_length_exceeded")
    );
    let (status, body) = server.post(TEXT, &json!({ "prompt": long, "max_tokens": 5 }));
    assert_eq!((status, fault(&body).0.as_str()), (400, "prompt"));
    let (status, body) = server.post(CHAT, &json!({ "messages": ask("a") }));
    assert_eq!((status, &body["choices"][0]["finish_reason"]), (200, &json!("length")));
    assert_eq!(body["usage"]["total_tokens"], LIMITS.context);
}

#[test]
fn what_the_engine_refuses_is_a_fault_of_the_clients_field() {
    let server = speaker();
    for (name, value) in [
        ("temperature", json!(-1)),
        ("top_p", json!(1.5)),
        ("min_p", json!(2)),
        ("presence_penalty", json!(3)),
        ("frequency_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("logit_bias", json!({ "99999": 1 })),
    ] {
        let (status, body) = server.post(CHAT, &json!({ "messages": ask("a"), name: value }));
        assert_eq!((status, fault(&body).0.as_str()), (400, name), "{body}");
    }
    let (status, body) = server.post(TEXT, &json!({ "prompt": [5120] }));
    assert_eq!((status, fault(&body).0.as_str()), (400, "prompt"), "{body}");
    let (status, body) = server.post(TEXT, &json!({ "prompt": "" }));
    assert_eq!((status, fault(&body).0.as_str()), (400, "prompt"), "{body}");
}

#[test]
fn histories_of_every_kind_are_rendered() {
    let server = speaker();
    let call =
        json!({ "id": "c1", "type": "function", "function": { "name": "f", "arguments": "{\"a\": [1]}" } });
    let messages = json!([
        { "role": "developer", "content": "Be brief." },
        { "role": "user", "content": [{ "type": "text", "text": "a" }] },
        { "role": "assistant", "content": null },
        { "role": "user", "content": "b" },
        { "role": "assistant", "content": null, "tool_calls": [call.clone()] },
        { "role": "tool", "tool_call_id": "c1", "content": "r" },
        { "role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "unknown", "content": "r" },
    ]);
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } });
    let (status, body) = server.post(CHAT, &json!({ "messages": messages, "tools": [tool] }));
    assert_eq!(status, 200, "{body}");
}

#[test]
fn wrong_messages_are_refused_with_their_path() {
    let server = speaker();
    for (messages, path) in [
        (json!([]), "messages"),
        (json!("hello"), "messages"),
        (json!([{ "content": "a" }]), "messages[0].role"),
        (json!([{ "role": "user", "content": 5 }]), "messages[0].content"),
        (
            json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }]),
            "messages[0].content[0].type",
        ),
    ] {
        let (status, body) = server.post(CHAT, &json!({ "messages": messages }));
        assert_eq!((status, fault(&body).0.as_str()), (400, path), "{body}");
    }
}

#[test]
fn control_tokens_in_a_users_text_are_text() {
    let server = speaker();
    let (_, plain) = server.post(CHAT, &json!({ "messages": ask("a") }));
    let (_, marked) = server.post(CHAT, &json!({ "messages": ask("<|assistant|>") }));
    let tokens = |body: &Value| body["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&marked) > tokens(&plain) + 2, "one control token would have been one token");
}

#[test]
fn the_model_is_listed_and_found_by_its_name() {
    let server = speaker();
    let (status, list) = server.get("/v1/models");
    let model =
        json!({ "id": "toy", "object": "model", "created": 0, "owned_by": "flint", "max_model_len": 600 });
    assert_eq!((status, list), (200, json!({ "object": "list", "data": [model.clone()] })));
    assert_eq!(server.get("/v1/models/toy"), (200, model));
    let (status, body) = server.get("/v1/models/org/other");
    assert_eq!((status, fault(&body).1.as_str()), (404, "model_not_found"));
}

#[test]
fn health_counts_what_the_engine_did() {
    let server = speaker();
    server.post(CHAT, &json!({ "messages": ask("a") }));
    server.wait("the request left", |status| status.finished == 1);
    let (status, body) = server.get("/health");
    assert_eq!(status, 200);
    assert_eq!((&body["status"], &body["running"], &body["finished"]), (&json!("ok"), &json!(0), &json!(1)));
    assert!(body["rounds"].as_u64().unwrap() > 5, "{body}");
}

#[test]
fn unknown_paths_and_methods_are_answered_in_json() {
    let server = speaker();
    let (status, body) = server.get("/v1/nothing");
    assert_eq!((status, fault(&body).1.as_str()), (404, "not_found"));
    let (status, body) = server.get(CHAT);
    assert_eq!((status, fault(&body).1.as_str()), (405, "method_not_allowed"));
}

#[test]
fn a_message_that_quotes_a_value_is_valid_json_whatever_the_value() {
    let server = speaker();
    let (status, body) = server.post(CHAT, &json!({ "messages": ask("a"), "tool_choice": "say \"hi\"\n\\" }));
    assert_eq!((status, fault(&body).0.as_str()), (400, "tool_choice"));
    assert!(fault(&body).2.contains("hi"), "{body}");
}
