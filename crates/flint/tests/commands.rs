//! The program as its users run it, over the embedded model.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn flint() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flint"));
    // Another folder than the source's, and no home: the program needs neither.
    command.current_dir(std::env::temp_dir()).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(arguments: &[&str], input: &str) -> Output {
    let mut child = flint().args(arguments).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Standard output of a command that succeeds.
fn said(arguments: &[&str], input: &str) -> String {
    let output = run(arguments, input);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

/// Standard error of a command that fails with status 1.
fn refused(arguments: &[&str]) -> String {
    let output = run(arguments, "");
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    text(&output.stderr).to_owned()
}

#[test]
fn a_piped_chat_prints_the_answers_and_nothing_else() {
    let input = "What is 7 times 11?\n/clear\n/think off\n\nWhat is 9 times 8?\n/quit\nnever read\n";
    let output = run(&["chat", "--temperature", "0"], input);
    let (answers, notes) = (text(&output.stdout), text(&output.stderr));
    let lines: Vec<&str> = answers.lines().collect();
    assert_eq!(lines.len(), 2, "{answers}");
    assert!(lines[0].contains("77") && lines[1].contains("72"), "{answers}");
    assert!(notes.contains("flint-tiny") && notes.contains("thread"), "{notes}");
    assert!(!notes.contains('\u{1b}') && !answers.contains('\u{1b}'), "no codes where nobody looks");
}

#[test]
fn a_chat_keeps_the_conversation_until_it_is_cleared() {
    let saved = std::env::temp_dir().join(format!("flint-saved-{}.json", std::process::id()));
    let save = format!("/save {}", saved.display());
    let input = format!("What is 7 times 11?\nWhat is 9 times 8?\n{save}\n/clear\n/stats\n");
    let output = run(&["chat", "--temperature", "0", "--system", "Be brief."], &input);
    let conversation: Value = serde_json::from_str(&std::fs::read_to_string(&saved).unwrap()).unwrap();
    std::fs::remove_file(&saved).unwrap();
    let roles: Vec<&str> =
        conversation["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    let notes = text(&output.stderr);
    assert!(notes.contains("2 replies") && notes.contains("context 0 of"), "{notes}");
}

#[test]
fn a_reply_is_the_same_on_any_number_of_threads_and_at_any_level() {
    let reply = |more: &[&str]| {
        let fixed =
            ["generate", "Copy this: stone river lamp", "--arithmetic", "fp32", "--seed", "3", "--json"];
        let reply: Value = serde_json::from_str(&said(&[&fixed, more].concat(), "")).unwrap();
        (reply["content"].clone(), reply["reasoning_content"].clone(), reply["arithmetic_id"].clone())
    };
    let one = reply(&["--threads", "1"]);
    assert_eq!(reply(&["--threads", "3"]), one);
    assert_eq!(reply(&["--threads", "1", "--level", "scalar"]), one);
}

#[test]
fn generate_reads_its_prompt_from_the_line_a_file_or_standard_input() {
    let question = "What is 7 times 11?";
    let base = ["generate", "--temperature", "0"];
    let answer = said(&[&base[..], &[question]].concat(), "");
    assert!(answer.contains("77"), "{answer}");
    assert_eq!(said(&base, &format!("{question}\n")), answer);
    let file = std::env::temp_dir().join(format!("flint-prompt-{}.txt", std::process::id()));
    std::fs::write(&file, question).unwrap();
    assert_eq!(said(&[&base[..], &["--file", file.to_str().unwrap()]].concat(), ""), answer);
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn generate_bounds_the_reply_and_says_so() {
    let reply = said(&["generate", "--raw", "Once", "--max-tokens", "3", "--json"], "");
    let reply: Value = serde_json::from_str(&reply).unwrap();
    assert_eq!((&reply["finish_reason"], &reply["completion_tokens"]), (&"length".into(), &3.into()));
}

#[test]
fn a_configuration_file_gives_defaults_and_flags_win() {
    let file = std::env::temp_dir().join(format!("flint-config-{}.json", std::process::id()));
    std::fs::write(&file, r#"{"max-tokens": 2, "temperature": 0, "threads": 1}"#).unwrap();
    let config = ["--config", file.to_str().unwrap()];
    let tokens = |more: &[&str]| {
        let reply = said(&[&["generate", "--raw", "Once", "--json"], &config[..], more].concat(), "");
        serde_json::from_str::<Value>(&reply).unwrap()["completion_tokens"].clone()
    };
    assert_eq!(tokens(&[]), 2);
    assert_eq!(tokens(&["--max-tokens", "4"]), 4);
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn a_plan_is_a_table_or_json_and_grows_with_the_context() {
    assert!(said(&["plan"], "").contains("flint-tiny") || said(&["plan"], "").contains("embedded"));
    let total = |context: &str| {
        let plan: Value = serde_json::from_str(&said(&["plan", "--json", "--context", context], "")).unwrap();
        plan["total_bytes"].as_u64().unwrap()
    };
    assert!(total("8192") > total("1024"));
}

#[test]
fn what_cannot_be_done_is_refused_in_a_sentence() {
    let text = refused(&["chat", "/nowhere/at/all"]);
    assert!(text.contains("/nowhere/at/all"), "{text}");
    let text = refused(&["generate", "a", "--context", "9000"]);
    assert!(text.contains("--context: 9000 cannot be used; this model holds 8192 tokens at most"), "{text}");
    let text = refused(&["generate", "a", "--top-p", "1.5"]);
    assert!(text.contains("top_p") && text.contains("1.5"), "{text}");
    let text = refused(&["bench", "--prompt", "9000"]);
    assert!(text.contains("--prompt"), "{text}");
    let text = refused(&["serve", "--config", "/nowhere.json"]);
    assert!(text.contains("/nowhere.json"), "{text}");
    assert_eq!(run(&["chat", "--no-such-flag"], "").status.code(), Some(2));
}

#[test]
fn a_device_that_is_not_there_is_refused_with_the_reason_and_auto_runs_without_it() {
    // No machine has a device of this number; most have no driver either.
    let text = refused(&["generate", "a", "--device", "cuda:4096"]);
    assert!(text.starts_with("flint: --device cuda:4096: "), "{text}");
    assert!(text.contains("--device cpu") || text.contains("the driver lists"), "{text}");
    let text = text_of_usage(&["generate", "a", "--device", "gpu"]);
    assert!(text.contains("auto, cpu, cuda and cuda:N"), "{text}");
    let reply = |device: &str| {
        let fixed = [
            "generate",
            "--raw",
            "Once",
            "--max-tokens",
            "4",
            "--temperature",
            "0",
            "--device",
            device,
            "--arithmetic",
            "fp32",
        ];
        said(&fixed, "")
    };
    assert_eq!(reply("auto"), reply("cpu"));
    let file = std::env::temp_dir().join(format!("flint-device-{}.json", std::process::id()));
    std::fs::write(&file, r#"{"device": "cuda:4096"}"#).unwrap();
    let text = refused(&["plan", "--config", file.to_str().unwrap()]);
    std::fs::remove_file(&file).unwrap();
    assert!(text.contains("--device cuda:4096"), "{text}");
}

/// Standard error of a command line that is refused as such.
fn text_of_usage(arguments: &[&str]) -> String {
    let output = run(arguments, "");
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    text(&output.stderr).to_owned()
}

#[test]
fn a_reader_that_goes_away_ends_the_command_quietly() {
    let mut child = flint().args(["generate", "--raw", "Once", "--temperature", "2"]).spawn().unwrap();
    drop(child.stdout.take());
    let mut notes = String::new();
    child.stderr.take().unwrap().read_to_string(&mut notes).unwrap();
    assert!(child.wait().unwrap().success(), "{notes}");
    assert_eq!(notes, "");
}

#[test]
fn a_bench_reports_shares_of_this_machine() {
    let arguments =
        ["bench", "--prompt", "40", "--decode", "4", "--batch", "1,3", "--threads", "1", "--repeat", "2"];
    let report: Value = serde_json::from_str(&said(&[&arguments[..], &["--json"]].concat(), "")).unwrap();
    let runs = report["runs"].as_array().unwrap();
    let kinds: Vec<(&str, u64, u64)> = runs
        .iter()
        .map(|run| {
            let number = |name: &str| run[name].as_u64().unwrap();
            (run["kind"].as_str().unwrap(), number("batch"), number("tokens"))
        })
        .collect();
    assert_eq!(kinds, [("prefill", 1, 40), ("decode", 1, 4), ("decode", 3, 12)]);
    for run in runs {
        for name in
            ["tokens_per_second", "bytes_per_token", "share_of_bytes", "share_of_peak", "share_of_roof"]
        {
            assert!(run[name].as_f64().unwrap() > 0.0, "{name}: {run}");
        }
    }
    assert!(report["limits"][0]["bytes_per_second"].as_f64().unwrap() > 1e8);
    assert!(said(&arguments, "").contains("decode × 3"));
    // Rows that decode together share some of their experts.
    assert!(runs[2]["distinct_experts"].as_f64().unwrap() >= runs[1]["distinct_experts"].as_f64().unwrap());
}

#[test]
fn a_bench_measures_a_scan_alone_and_marks_steps_for_a_profiler() {
    let arguments =
        ["bench", "--prompt", "40", "--decode", "2", "--batch", "2", "--block", "3", "--threads", "1"];
    let more = ["--repeat", "1", "--rows", "16", "--scan", "5", "--profile", "--json"];
    let report: Value = serde_json::from_str(&said(&[&arguments[..], &more].concat(), "")).unwrap();
    assert_eq!(report["scans"][0]["rows"], 5);
    assert!(report["scans"][0]["seconds"].as_f64().unwrap() > 0.0);
    assert_eq!(report["prefill_rows"], 16);
    let marked: Vec<_> = report["marked"].as_array().unwrap().iter().map(|step| &step["kind"]).collect();
    assert_eq!(marked, ["decode", "block", "prefill"]);
    assert!(refused(&["bench", "--rows", "0"]).contains("--rows"));
}

/// A server on a free port, and its address.
fn server(more: &[&str]) -> (Child, String) {
    let mut child = flint().args(["serve", "--port", "0"]).args(more).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    match line.trim().strip_prefix("listening on http://") {
        Some(address) => (child, address.to_owned()),
        None => panic!("{line:?}: {}", text(&child.wait_with_output().unwrap().stderr)),
    }
}

fn post(address: &str, body: &Value) -> Value {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().timeout_global(Some(Duration::from_mins(1))).build().into();
    let url = format!("http://{address}/v1/chat/completions");
    agent.post(url).send_json(body).unwrap().body_mut().read_json().unwrap()
}

#[cfg(unix)]
fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").arg(name).arg(child.id().to_string()).status().unwrap().success());
}

#[cfg(unix)]
#[test]
fn a_server_answers_and_ends_cleanly_when_it_is_asked_to() {
    for name in ["-INT", "-TERM"] {
        let (mut child, address) = server(&["--name", "tiny"]);
        let body = serde_json::json!({
            "messages": [{ "role": "user", "content": "What is 7 times 11?" }],
            "temperature": 0,
        });
        let reply = post(&address, &body);
        assert_eq!(reply["model"], "tiny");
        let answer = reply["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(answer.contains("77"), "{reply}");
        signal(&child, name);
        assert!(child.wait().unwrap().success(), "{name}");
    }
}

#[test]
fn a_port_in_use_is_refused_before_anything_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let text = refused(&["serve", "--port", &port]);
    assert!(text.contains(&port) && text.contains("--port"), "{text}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_long_reply_at_once() {
    let mut child =
        flint().args(["generate", "--raw", "Once", "--temperature", "3", "--threads", "1"]).spawn().unwrap();
    let mut first = [0];
    let mut output = child.stdout.take().unwrap();
    output.read_exact(&mut first).unwrap();
    signal(&child, "-INT");
    let asked = Instant::now();
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    assert!(asked.elapsed() < Duration::from_secs(5));
}

#[test]
fn the_embedded_model_is_the_one_in_the_source_tree() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flint-tiny");
    let digest = |more: &[&str]| {
        let fixed = ["generate", "--raw", "Once", "--max-tokens", "1", "--json", "--threads", "1"];
        serde_json::from_str::<Value>(&said(&[&fixed, more].concat(), "")).unwrap()["arithmetic_id"].clone()
    };
    assert_eq!(digest(&[]), digest(&["--model", folder.to_str().unwrap()]));
}
