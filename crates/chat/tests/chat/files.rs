//! What a checkpoint's files say, and what is refused when it is opened.

use flint_chat::{Capabilities, ChatFiles, ChatFormat, ChatRequest, Error, GenerationDefaults};
use serde_json::{Value, json};

use crate::{Files, fixture, tiny};

fn ask() -> ChatRequest {
    ChatRequest::new(vec![json!({"role": "user", "content": "a"})])
}

fn refused(files: &ChatFiles<'_>) -> String {
    let error = ChatFormat::open(files).err().unwrap();
    assert!(!error.is_request());
    error.to_string()
}

/// The tokenizer file after a change.
fn tokenizer(files: &Files, change: impl Fn(&mut Value)) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(&files.tokenizer).unwrap();
    change(&mut json);
    serde_json::to_vec(&json).unwrap()
}

#[test]
fn stop_tokens_of_both_files_are_merged() {
    let files = Files::read();
    assert_eq!(tiny().stop_tokens(), [5084, 5091, 5093]);
    let stop = |config: Value, generation: Value| {
        let (config, generation) = (config.to_string(), generation.to_string());
        let files = ChatFiles {
            config: Some(config.as_bytes()),
            generation_config: Some(generation.as_bytes()),
            ..files.all()
        };
        ChatFormat::open(&files).map(|format| format.stop_tokens().to_vec())
    };
    assert_eq!(stop(json!({"eos_token_id": 7}), json!({"eos_token_id": [9, 7]})), Ok(vec![7, 9]));
    assert_eq!(stop(json!({"text_config": {"eos_token_id": [8]}}), json!({})), Ok(vec![8]));
    assert_eq!(stop(json!({"eos_token_id": null}), json!({})), Ok(vec![5084, 5091, 5093]), "by their texts");
    let error = stop(json!({}), json!({"eos_token_id": "<|user|>"})).unwrap_err().to_string();
    assert!(error.starts_with("generation_config.json: eos_token_id is \"<|user|>\""), "{error}");
}

#[test]
fn sampling_defaults_are_the_file_s() {
    let defaults = tiny().defaults();
    let expected = GenerationDefaults {
        do_sample: Some(true),
        temperature: Some(1.0),
        top_p: Some(0.95),
        ..GenerationDefaults::default()
    };
    assert_eq!(defaults, expected);
    let files = Files::read();
    let error = refused(&ChatFiles { generation_config: Some(br#"{"temperature": "hot"}"#), ..files.all() });
    assert_eq!(error, "generation_config.json: temperature is not a number; download the file again");
}

#[test]
fn capabilities_come_from_trial_renderings() {
    let files = Files::read();
    let all = Capabilities { thinking_switch: true, reasoning_effort: true, tools: true, images: true };
    assert_eq!(tiny().capabilities(), all);
    let release = files.with_template(&fixture("release_like.jinja")).unwrap();
    assert_eq!(release.capabilities(), Capabilities { thinking_switch: false, ..all });
    let bare = "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('text only') }}{% endif %}\
                <|user|>{{ m.content }}{% endfor %}";
    assert_eq!(files.with_template(bare).unwrap().capabilities(), Capabilities::default());
}

#[test]
fn pictures_are_refused_by_a_template_that_does_not_show_them() {
    let blind = "{% for m in messages %}<|user|>{% if m.content is string %}{{ m.content }}{% else %}I cannot see \
                 that.{% endif %}{% endfor %}";
    let format = Files::read().with_template(blind).unwrap();
    let parts = json!(["a", {"type": "image_url", "image_url": {"url": "data:,"}}]);
    let request = ChatRequest::new(vec![json!({"role": "user", "content": parts})]);
    let error = format.render(&request).unwrap_err();
    assert_eq!(error, Error::NoImages { field: "messages[0].content[1]".into() });
}

#[test]
fn a_template_may_stand_in_the_tokenizer_s_configuration() {
    let files = Files::read();
    let render = |config: Value, tools: Option<Vec<Value>>| {
        let config = config.to_string();
        let files =
            ChatFiles { chat_template: None, tokenizer_config: Some(config.as_bytes()), ..files.all() };
        let format = ChatFormat::open(&files)?;
        format.render(&ChatRequest { tools, ..ask() }).map(|prompt| prompt.text)
    };
    assert_eq!(render(json!({"chat_template": "x{{ bos_token }}", "bos_token": "B"}), None), Ok("xB".into()));
    assert_eq!(
        render(json!({"chat_template": "{{ eos_token }}", "eos_token": {"content": "E"}}), None),
        Ok("E".into())
    );
    let two = json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]});
    let tool = json!({"name": "f"});
    assert_eq!(render(two.clone(), None), Ok("plain".into()));
    assert_eq!(render(two.clone(), Some(vec![])), Ok("plain".into()));
    assert_eq!(render(two, Some(vec![tool])), Ok("tools".into()));
    let nameless = json!({"chat_template": [{"name": "x", "template": "y"}]});
    assert!(
        render(nameless, None)
            .unwrap_err()
            .to_string()
            .starts_with("tokenizer_config.json: chat_template is a list")
    );
}

#[test]
fn a_checkpoint_without_a_template_opens_and_completes_but_cannot_chat() {
    let files = Files::read();
    let config = br"{}";
    let format = ChatFormat::open(&ChatFiles {
        tokenizer_json: &files.tokenizer,
        tokenizer_config: Some(config),
        ..ChatFiles::default()
    });
    let format = format.unwrap();
    assert!(!format.has_template());
    assert_eq!(format.decode(&format.encode("Once upon").unwrap()), "Once upon");
    assert_eq!(format.stop_tokens(), [5084, 5091, 5093]);
    let error = format.render(&ask()).unwrap_err();
    assert_eq!(error, Error::NoTemplate);
    assert!(error.to_string().contains("chat_template.jinja"));
}

#[test]
fn a_template_that_cannot_render_one_message_is_refused_at_opening() {
    let files = Files::read();
    let error = |template: &str| files.with_template(template).err().unwrap().to_string();
    assert!(
        error("{% for %}").starts_with("chat template chat_template.jinja, line 1: "),
        "{}",
        error("{% for %}")
    );
    assert_eq!(
        error("\n{{ raise_exception('system first') }}"),
        "chat template chat_template.jinja, line 2: a single user message does not render: system first; take the \
         template of the model's release"
    );
}

#[test]
fn what_a_template_raises_on_a_conversation_is_the_request_s_error() {
    let template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}";
    let format = Files::read().with_template(template).unwrap();
    let error = format.render(&ChatRequest::new(vec![json!({"role": "tool", "content": "x"})])).unwrap_err();
    assert!(error.is_request());
    assert_eq!(error.to_string(), "the chat template refused the conversation, line 1: no tools");
}

#[test]
fn broken_files_are_refused_by_name() {
    let files = Files::read();
    let with_tokenizer = |bytes: &[u8]| refused(&ChatFiles { tokenizer_json: bytes, ..files.all() });
    assert!(with_tokenizer(b"version https://git-lfs").starts_with("tokenizer.json: "));
    assert!(with_tokenizer(&files.tokenizer[..1000]).starts_with("tokenizer.json: "));
    assert_eq!(
        with_tokenizer(&tokenizer(&files, |json| json["decoder"] = Value::Null)),
        "tokenizer.json: the decoder is not ByteLevel; only the byte-level tokenizers of GLM checkpoints are read"
    );
    let stripping = tokenizer(&files, |json| json["added_tokens"][0]["lstrip"] = json!(true));
    assert!(
        with_tokenizer(&stripping)
            .starts_with("tokenizer.json: added token 5084 (\"<|endoftext|>\") is empty, or")
    );
    assert!(
        refused(&ChatFiles { config: Some(b"[]"), ..files.all() })
            .starts_with("config.json: not a JSON object (")
    );
    assert!(
        refused(&ChatFiles {
            tokenizer_config: Some(br#"{"chat_template": 3}"#),
            chat_template: None,
            ..files.all()
        })
        .starts_with("tokenizer_config.json: chat_template is neither")
    );
}

#[test]
fn a_prompt_is_never_cut_to_the_tokenizer_s_own_limit() {
    let files = Files::read();
    let limited = tokenizer(&files, |json| {
        json["truncation"] =
            json!({"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
    });
    let format = ChatFormat::open(&ChatFiles { tokenizer_json: &limited, ..files.all() }).unwrap();
    assert_eq!(format.render(&ask()).unwrap(), tiny().render(&ask()).unwrap());
}

#[test]
fn of_two_control_tokens_that_start_alike_the_longer_is_taken() {
    let files = Files::read();
    let longer = tokenizer(&files, |json| {
        let added = json["added_tokens"].as_array_mut().unwrap();
        let mut token = added[0].clone();
        token["id"] = json!(5120);
        token["content"] = json!("<think>ing");
        added.push(token);
    });
    let original = tokenizers::Tokenizer::from_bytes(&longer).unwrap();
    let format = ChatFormat::open(&ChatFiles { tokenizer_json: &longer, ..files.all() }).unwrap();
    for text in ["<think>ing", "<think>in", "a<think><think>ing<think>inging</think>"] {
        let expected = original.encode(text, false).unwrap();
        assert_eq!(format.encode_trusted(text).unwrap(), expected.get_ids(), "{text}");
    }
    assert_eq!(format.token_bytes(5120), b"<think>ing");
}
