use serde_json::json;

use super::*;

fn read(messages: serde_json::Value) -> Result<Conversation> {
    let serde_json::Value::Array(messages) = messages else { panic!("not a list") };
    Conversation::read(&ChatRequest::new(messages))
}

fn tools(tools: serde_json::Value) -> Result<Conversation> {
    let serde_json::Value::Array(tools) = tools else { panic!("not a list") };
    let messages = vec![json!({"role": "user", "content": "a"})];
    Conversation::read(&ChatRequest { tools: Some(tools), ..ChatRequest::new(messages) })
}

fn refusal(result: Result<Conversation>) -> String {
    let error = result.err().unwrap();
    assert!(error.is_request());
    error.to_string()
}

/// The template's view of the first message.
fn first(messages: serde_json::Value) -> String {
    let context = read(messages).unwrap().context(&Paint::Plain, Inline::Keep, &[]);
    context.get_attr("messages").unwrap().get_item_by_index(0).unwrap().to_string()
}

#[test]
fn what_is_wrong_is_named_by_its_path() {
    for (messages, message) in [
        (json!([]), "messages: an empty list, expected at least one message"),
        (json!(["hi"]), "messages[0]: \"hi\", expected an object"),
        (json!([{"content": "a"}]), "messages[0].role: missing, expected a string"),
        (json!([{"role": 1}]), "messages[0].role: a number, expected a string"),
        (
            json!([{"role": "robot"}]),
            "messages[0].role: \"robot\", expected one of system, developer, user, assistant, tool",
        ),
        (
            json!([{"role": "user", "content": {"a": 1}}]),
            "messages[0].content: an object, expected a string, null or a list of content parts",
        ),
        (
            json!([{"role": "user", "content": ["a", {"type": "audio"}]}]),
            "messages[0].content[1].type: \"audio\", expected one of text, image_url, image, video_url, video",
        ),
        (json!([{"role": "user", "content": [3]}]), "messages[0].content[0]: a number, expected an object"),
        (
            json!([{"role": "user", "content": [{}]}]),
            "messages[0].content[0].type: missing, expected a string",
        ),
        (
            json!([{"role": "user", "content": [{"type": "text", "text": null}]}]),
            "messages[0].content[0].text: null, expected a string",
        ),
        (
            json!([{"role": "assistant", "reasoning_content": ["r"]}]),
            "messages[0].reasoning_content: an array, expected a string or null",
        ),
        (
            json!([{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": 7}]),
            "messages[1].tool_call_id: a number, expected a string or null",
        ),
        (
            json!([{"role": "assistant", "tool_calls": "f"}]),
            "messages[0].tool_calls: \"f\", expected a list of calls",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]),
            "messages[0].tool_calls[0].type: \"custom\", expected \"function\"",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]),
            "messages[0].tool_calls[0].function.name: missing, expected a string",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]),
            "messages[0].tool_calls[0].function.arguments: an array, expected an object, or a string that holds one as JSON",
        ),
    ] {
        assert_eq!(refusal(read(messages)), message);
    }
    let broken =
        json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": "}}]}]);
    let message = refusal(read(broken));
    assert!(
        message.starts_with("messages[0].tool_calls[0].function.arguments: a string that is not JSON ("),
        "{message}"
    );
}

#[test]
fn tools_are_functions_with_names() {
    for (list, message) in [
        (json!([1]), "tools[0]: a number, expected a function object"),
        (
            json!([{"type": "function", "function": {}}]),
            "tools[0].function.name: missing, expected the function's name",
        ),
        (
            json!([{"type": "web", "function": {"name": "f"}}]),
            "tools[0].type: \"web\", expected \"function\"",
        ),
        (json!([{"name": "f"}, {"name": 3}]), "tools[1].name: a number, expected the function's name"),
    ] {
        assert_eq!(refusal(tools(list)), message);
    }
    assert!(tools(json!([{"name": "f"}, {"function": {"name": "g"}}])).is_ok());
}

#[test]
fn null_content_is_empty_and_absent_fields_stay_absent() {
    let empty = "{'role': 'assistant', 'content': ''}";
    for message in [
        json!({"role": "assistant", "content": null}),
        json!({"role": "assistant"}),
        json!({"role": "assistant", "content": "", "tool_calls": null, "reasoning_content": null, "tool_call_id": null}),
        json!({"role": "assistant", "content": "", "tool_calls": []}),
    ] {
        assert_eq!(first(json!([message])), empty);
    }
}

#[test]
fn arguments_become_an_object_in_every_form() {
    let with = |arguments: serde_json::Value| {
        first(json!([{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}]))
    };
    let shown = |arguments: &str| {
        format!(
            "{{'role': 'assistant', 'content': '', 'tool_calls': [{{'id': '1', 'type': 'function', \
             'function': {{'name': 'f', 'arguments': {arguments}}}}}]}}"
        )
    };
    assert_eq!(with(json!({"b": 1, "a": [true]})), shown("{'b': 1, 'a': [True]}"));
    assert_eq!(with(json!(" {\"b\": 1, \"a\": [true]}\n")), shown("{'b': 1, 'a': [True]}"));
    for nothing in [json!(""), json!("  "), json!(null), json!({})] {
        assert_eq!(with(nothing), shown("{}"));
    }
}

#[test]
fn unknown_fields_travel_to_the_template() {
    let message =
        json!({"role": "user", "content": "a", "name": "Ann", "weight": null, "meta": {"k": [1.5]}});
    assert_eq!(
        first(json!([message])),
        "{'role': 'user', 'content': 'a', 'name': 'Ann', 'weight': None, 'meta': {'k': [1.5]}}"
    );
}

#[test]
fn results_may_be_lists_and_references_but_only_in_tool_messages() {
    let parts = json!([{"type": "tool_reference", "name": "f"}, {"tool_call_id": "1", "output": "x"}]);
    assert!(read(json!([{"role": "tool", "content": parts}])).is_ok());
    assert!(read(json!([{"role": "user", "content": parts}])).is_err());
}

#[test]
fn options_have_one_value_and_cannot_replace_the_conversation() {
    let with = |name: &str, value: serde_json::Value| {
        let mut request = ChatRequest::new(vec![json!({"role": "user", "content": "a"})]);
        request.enable_thinking = Some(true);
        request.extra.insert(name.into(), value);
        Conversation::read(&request)
    };
    assert!(with("enable_thinking", json!(true)).is_ok());
    assert_eq!(
        refusal(with("enable_thinking", json!(false))),
        "chat_template_kwargs.enable_thinking: another value than `enable_thinking` has, expected the same value"
    );
    assert_eq!(
        refusal(with("messages", json!([]))),
        "chat_template_kwargs.messages: a variable that the request itself fills, expected another name"
    );
    let mut request = ChatRequest::new(vec![json!({"role": "user", "content": "a"})]);
    request.extra.insert("enable_thinking".into(), json!(false));
    assert_eq!(Conversation::read(&request).unwrap().enable_thinking, Some(false));
}

#[test]
fn a_long_run_of_results_is_sorted_and_hides_its_calls_from_the_template() {
    let call = |id: usize| json!({"id": format!("c{id}"), "function": {"name": "f", "arguments": {}}});
    let result =
        |id: usize| json!({"role": "tool", "content": format!("r{id}"), "tool_call_id": format!("c{id}")});
    let roles_and_texts = |results: usize, answered: std::ops::Range<usize>, rule| {
        let calls: Vec<_> = (0..results).map(call).collect();
        let mut messages = vec![json!({"role": "assistant", "content": "", "tool_calls": calls})];
        messages.extend(answered.rev().map(result));
        let mut conversation = Conversation::read(&ChatRequest::new(messages)).unwrap();
        conversation.sort_results(rule, false);
        let text = |message: &Message| match &message.content {
            Content::Text(text) => format!("{} {text}", message.role),
            Content::Parts(_) => panic!("parts"),
        };
        conversation.messages.iter().map(text).collect::<Vec<_>>()
    };
    let sorted = roles_and_texts(40, 0..40, SortRule::AllAnswered);
    assert_eq!(sorted[..4], ["assistant ", "- ", "tool r0", "tool r1"]);
    assert_eq!(sorted.len(), 42);
    assert_eq!(roles_and_texts(40, 1..40, SortRule::SomeAnswered)[1..3], ["- ", "tool r1"]);
    assert_eq!(roles_and_texts(40, 1..40, SortRule::AllAnswered)[1..3], ["- ", "tool r39"]);
    let short = roles_and_texts(20, 0..20, SortRule::AllAnswered);
    assert_eq!((short.len(), short[1].as_str()), (21, "tool r19"));
}
