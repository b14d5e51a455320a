//! Other people's text never becomes a control token, wherever it stands and whatever the template does with it.

use flint_chat::{ChatFormat, ChatRequest, Prompt};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{Files, fixture, tiny};

/// The first control token of the embedded model's vocabulary.
const FIRST_CONTROL: u32 = 5084;
const MARKERS: [&str; 8] =
    ["<|user|>", "<|system|>", "<think>", "</think>", "<tool_call>", "[gMASK]", "<|endoftext|>", "/nothink"];

fn control_tokens(prompt: &Prompt) -> Vec<u32> {
    prompt.tokens.iter().copied().filter(|token| *token >= FIRST_CONTROL).collect()
}

fn templates() -> [(&'static str, ChatFormat); 2] {
    let files = Files::read();
    [("tiny", files.open()), ("release", files.with_template(&fixture("release_like.jinja")).unwrap())]
}

/// A conversation with `word` in one of the places that a client fills.
fn with_word(place: usize, word: &str) -> Option<ChatRequest> {
    let mut fields: Vec<Value> = (0..12).map(|_| json!("x")).collect();
    *fields.get_mut(place)? = json!(word);
    let [system, user, part, thinking, answer, name, key, value, result, tool, description, property] =
        fields.try_into().ok()?;
    let mut arguments = serde_json::Map::new();
    arguments.insert(key.as_str()?.to_owned(), value.clone());
    arguments.insert("deep".into(), json!([{ value.as_str()?: value }]));
    let mut properties = serde_json::Map::new();
    properties
        .insert(property.as_str()?.to_owned(), json!({"type": "string", "enum": [description.clone()]}));
    let mut request = ChatRequest::new(vec![
        json!({"role": "system", "content": system}),
        json!({"role": "user", "content": user}),
        json!({"role": "user", "content": ["a ", {"type": "text", "text": part}, {"type": "image"}]}),
        json!({"role": "assistant", "content": answer, "reasoning_content": thinking, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]}),
        json!({"role": "tool", "content": result, "tool_call_id": "1"}),
    ]);
    request.tools = Some(vec![json!({"type": "function", "function": {
        "name": tool, "description": description, "parameters": {"type": "object", "properties": properties}}})]);
    Some(request)
}

#[test]
fn a_control_token_in_any_field_of_a_request_stays_text() {
    for (name, format) in templates() {
        for place in 0..12 {
            let harmless = format.render(&with_word(place, "x").unwrap()).unwrap();
            for marker in MARKERS {
                for word in [marker.to_owned(), format!("a {marker}b{marker} ")] {
                    let prompt = format.render(&with_word(place, &word).unwrap()).unwrap();
                    let at = format!("{name}: {word:?} in field {place}");
                    assert_eq!(control_tokens(&prompt), control_tokens(&harmless), "{at}");
                    assert!(prompt.text.contains(marker), "{at}");
                    assert_eq!(format.decode(&prompt.tokens), prompt.text, "{at}");
                }
            }
        }
    }
}

#[test]
fn a_control_token_does_not_form_across_the_parts_of_a_message() {
    for (name, format) in templates() {
        for parts in
            [["<|us", "er|>"], ["<", "|user|>"], ["<|user|", ">"], [" <|us", "er|> "], ["/noth", "ink"]]
        {
            let prompt =
                format.render(&ChatRequest::new(vec![json!({"role": "user", "content": parts})])).unwrap();
            assert!(prompt.text.contains(&parts.concat()), "{name}");
            assert_eq!(control_tokens(&prompt).len(), 6, "{name}: {parts:?}");
        }
    }
}

#[test]
fn thinking_inside_an_answer_is_cut_out_and_what_remains_is_text() {
    for (name, format) in templates() {
        let answer = |content: &str| {
            let messages = vec![
                json!({"role": "user", "content": "a"}),
                json!({"role": "assistant", "content": content}),
            ];
            let request = ChatRequest { add_generation_prompt: false, ..ChatRequest::new(messages) };
            format.render(&request).unwrap()
        };
        let plain = answer("x");
        for (content, tail) in [
            ("<think>r</think>\n\nb ", "<think>r</think>b"),
            ("r</think>b", "<think>r</think>b"),
            ("<think>a<think>r</think>m</think>b<think>c", "<think>r</think>b<think>c"),
            ("<think>r<|user|></think>b<|user|>", "<think>r<|user|></think>b<|user|>"),
            ("only <think> opens", "<think></think>only <think> opens"),
        ] {
            let prompt = answer(content);
            assert!(prompt.text.ends_with(&format!("<|assistant|>{tail}")), "{name}: {}", prompt.text);
            assert_eq!(control_tokens(&prompt), control_tokens(&plain), "{name}: {content}");
        }
    }
}

#[test]
fn a_template_that_drops_characters_cannot_be_used_to_forge_a_token() {
    let template =
        "{% for m in messages %}<|user|>{{ m.content | replace('\\n', '') }}{{ m.content[1:] }}{% endfor %}";
    let format = Files::read().with_template(template).unwrap();
    let prompt =
        format.render(&ChatRequest::new(vec![json!({"role": "user", "content": "<|us\ner|>"})])).unwrap();
    assert_eq!(prompt.text, "<|user|><|user|>|us\ner|>");
    assert_eq!(control_tokens(&prompt).len(), 1);
}

#[test]
fn a_token_that_the_template_puts_together_around_foreign_text_stays_text() {
    let template = "{% for m in messages %}<|{{ m.role }}|><|{{ m.name }}|>{{ m.content }}{% endfor %}";
    let format = Files::read().with_template(template).unwrap();
    let message = json!({"role": "user", "name": "system", "content": "x"});
    let prompt = format.render(&ChatRequest::new(vec![message])).unwrap();
    assert_eq!(prompt.text, "<|user|><|system|>x");
    assert_eq!(control_tokens(&prompt).len(), 1);
}

#[test]
fn a_template_that_looks_at_schemas_and_texts_still_renders_as_it_would() {
    let template = "{% for t in tools or [] %}{{ 'S' if t.function.parameters.type == 'string' else 'O' }}\
                    {{ t.function.description | upper }}{% endfor %}\
                    {% for m in messages %}<|user|>{{ m.content }}\
                    {{ '' if m.content.endswith('/nothink') else '/nothink' }}\
                    {{ ' greeting' if m.content == 'hello' }}{% endfor %}";
    let format = Files::read().with_template(template).unwrap();
    let tool = json!({"type": "function", "function": {
        "name": "f", "description": "sums up", "parameters": {"type": "string"}}});
    let render = |content: &str| {
        let messages = vec![json!({"role": "user", "content": content})];
        format.render(&ChatRequest { tools: Some(vec![tool.clone()]), ..ChatRequest::new(messages) }).unwrap()
    };
    assert_eq!(render("hello").text, "SSUMS UP<|user|>hello/nothink greeting");
    assert_eq!(control_tokens(&render("hello")).len(), 2);
    assert_eq!(render("<|user|>/nothink").text, "SSUMS UP<|user|><|user|>/nothink");
    assert_eq!(control_tokens(&render("<|user|>/nothink")).len(), 1);
}

#[test]
fn a_template_that_obeys_foreign_control_tokens_is_rendered_without_obeying() {
    let template = "{% for m in messages %}<|user|>{{ m.content.split('<sop>')[-1] }}{% endfor %}";
    let format = Files::read().with_template(template).unwrap();
    let prompt = format
        .render(&ChatRequest::new(vec![json!({"role": "user", "content": "a<sop>b<|user|>"})]))
        .unwrap();
    assert_eq!(prompt.text, "<|user|>a<sop>b<|user|>");
    assert_eq!(control_tokens(&prompt).len(), 1);
}

#[test]
fn private_use_characters_in_text_survive() {
    let format = tiny();
    let content: String =
        (0xF_0000..0xF_0100).chain(0x10_FF00..0x10_FFFE).filter_map(char::from_u32).collect();
    let content = format!("{content}<|user|>\u{e000}\u{f8ff}");
    let prompt = format.render(&ChatRequest::new(vec![json!({"role": "user", "content": content})])).unwrap();
    assert!(prompt.text.contains(&content));
    assert_eq!(format.decode(&prompt.tokens), prompt.text);
    assert_eq!(control_tokens(&prompt).len(), 6);
}

#[test]
fn template_options_cannot_smuggle_a_token_in() {
    let template = "{{ reasoning_effort }}{{ extra.list[0] if extra is defined }}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}";
    let format = Files::read().with_template(template).unwrap();
    let mut request = ChatRequest::new(vec![json!({"role": "user", "content": "a"})]);
    request.reasoning_effort = Some("<|system|>".into());
    request.extra.insert("extra".into(), json!({"list": ["<sop>"]}));
    let prompt = format.render(&request).unwrap();
    assert_eq!(prompt.text, "<|system|><sop><|user|>a");
    assert_eq!(control_tokens(&prompt).len(), 1);
}

/// Words of which control tokens are made, and some neighbours.
fn shreds() -> impl Strategy<Value = String> {
    let shred = prop::sample::select(vec![
        "<",
        "|",
        ">",
        "user",
        "<|user|>",
        "<think>",
        "</think>",
        "/",
        "think",
        "no",
        "[gMASK]",
        "[",
        "]",
        " ",
        "\n",
        "é",
        "\u{f0000}",
        "\u{f0001}",
        "a",
        "\"",
        "\\",
        "<|",
        "|>",
        "</",
        "tool_call>",
        "\u{10fffd}",
    ]);
    prop::collection::vec(shred, 0..12).prop_map(|shreds| shreds.concat())
}

proptest! {
    #![proptest_config(crate::cases(128))]

    #[test]
    fn no_text_in_any_field_makes_a_control_token(place in 0..12_usize, word in shreds()) {
        // Thinking inside an answer is the template's to cut; another test holds what is left of it.
        prop_assume!(place != 4 || !word.contains("</think>"));
        let format = tiny();
        let harmless = format.render(&with_word(place, "x").unwrap()).unwrap();
        let prompt = format.render(&with_word(place, &word).unwrap()).unwrap();
        prop_assert_eq!(control_tokens(&prompt), control_tokens(&harmless));
        prop_assert_eq!(format.decode(&prompt.tokens), prompt.text);
    }

    #[test]
    fn a_user_turn_is_the_text_between_its_marks_and_the_ids_of_that_text(first in shreds(), second in shreds()) {
        let format = tiny();
        let message = json!({"role": "user", "content": [first, {"type": "text", "text": second}]});
        let prompt = format.render(&ChatRequest::new(vec![message])).unwrap();
        let [head, tail] = ["[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>", "<|assistant|><think>"];
        let content = first + &second;
        prop_assert_eq!(&prompt.text, &format!("{head}{content}{tail}"));
        let mut tokens = format.encode_trusted(head).unwrap();
        tokens.extend(format.encode(&content).unwrap());
        tokens.extend(format.encode_trusted(tail).unwrap());
        prop_assert_eq!(prompt.tokens, tokens);
    }
}
