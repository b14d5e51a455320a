//! Whether an answer of the held-out panel is right. The rules are the panel's own (`tests/fixtures/flint_tiny`).

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

/// Whether `text` passes `check`, a `{"type", "value"}` object.
///
pub fn passes(check: &Value, text: &str) -> bool {
    let value = &check["value"];
    match check["type"].as_str().unwrap_or_default() {
        "exact" => normal(text) == normal(string(value)),
        "contains" => normal(text).contains(&normal(string(value))),
        "all" => array(value).iter().all(|part| normal(text).contains(&normal(string(part)))),
        "number" => {
            let last = numbers(&text.replace(',', "")).last().copied();
            last.zip(value.as_f64()).is_some_and(|(a, b)| (a - b).abs() < 1e-6)
        }
        "numbers" => {
            let expected: Vec<f64> = array(value).iter().filter_map(Value::as_f64).collect();
            let found = numbers(text);
            found.len() == expected.len() && found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-9)
        }
        "lines" => sorted_lines(text) == sorted_lines(string(value)),
        "parts" => parts(value, text),
        "json" => serde_json::from_str::<Value>(text).is_ok_and(|found| &found == value),
        "python" => python(value, text),
        "tool" => call(text).is_some_and(|found| found == flat_call(value)),
        other => panic!("unknown check {other:?}"),
    }
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Lower case, single spaces, no final full stops.
fn normal(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").to_lowercase().trim_end_matches('.').to_owned()
}

fn sorted_lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.trim().lines().map(normal).collect();
    lines.sort();
    lines
}

/// Every `-?\d+(\.\d+)?` of a text.
fn numbers(text: &str) -> Vec<f64> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        at += usize::from(bytes[at] == b'-');
        let digits = at;
        while bytes.get(at).is_some_and(u8::is_ascii_digit) {
            at += 1;
        }
        if at == digits {
            at = start + 1;
            continue;
        }
        if bytes.get(at) == Some(&b'.') && bytes.get(at + 1).is_some_and(u8::is_ascii_digit) {
            at += 1;
            while bytes.get(at).is_some_and(u8::is_ascii_digit) {
                at += 1;
            }
        }
        found.extend(text[start..at].parse::<f64>());
    }
    found
}

/// Numbered parts: each label's line has its own check.
fn parts(value: &Value, text: &str) -> bool {
    array(value).iter().all(|part| {
        let label = string(&part[0]);
        let line = text.trim().lines().find_map(|line| line.strip_prefix(label));
        line.is_some_and(|line| passes(&part[1], line.trim()))
    })
}

/// The first tool call of a text, arguments as the text wrote them.
fn call(text: &str) -> Option<(String, Vec<(String, String)>)> {
    let body = text.split_once("<tool_call>")?.1.split_once("</tool_call>")?.0;
    let (name, mut rest) = body.split_once("<arg_key>").unwrap_or((body, ""));
    let mut arguments = Vec::new();
    while let Some((key, after)) = rest.split_once("</arg_key><arg_value>") {
        let (value, after) = after.split_once("</arg_value>")?;
        arguments.push((key.to_owned(), value.to_owned()));
        rest = after.strip_prefix("<arg_key>").unwrap_or(after);
    }
    arguments.sort();
    Some((name.trim().to_owned(), arguments))
}

fn flat_call(value: &Value) -> (String, Vec<(String, String)>) {
    let flat = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let mut arguments: Vec<_> =
        value["arguments"].as_object().into_iter().flatten().map(|(k, v)| (k.clone(), flat(v))).collect();
    arguments.sort();
    (string(&value["name"]).to_owned(), arguments)
}

/// Runs the answer's code on the check's cases.
fn python(value: &Value, text: &str) -> bool {
    let code = text
        .split_once("```python\n")
        .and_then(|(_, rest)| rest.split_once("```"))
        .map_or(text, |(code, _)| code);
    let program = "import json, sys\ntask = json.load(sys.stdin)\nspace = {}\nexec(task['code'], space)\n\
                   print(all(space[task['fn']](*case[0]) == case[1] for case in task['cases']))";
    let task = serde_json::json!({ "code": code, "fn": value["fn"], "cases": value["cases"] });
    let run = || -> std::io::Result<Vec<u8>> {
        let mut child = Command::new("python3")
            .args(["-c", program])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(task.to_string().as_bytes())?;
        }
        Ok(child.wait_with_output()?.stdout)
    };
    let printed = run().expect("the panel's code answers are checked by python3; install it");
    printed == b"True\n"
}
