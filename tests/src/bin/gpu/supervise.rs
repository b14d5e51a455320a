//! Runs checks in child processes, one after another, and goes on behind a fault or a hang.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::{Arguments, LOST};

/// Runs all; prints the children's lines and a summary.
pub(crate) fn run(names: &[String], arguments: &Arguments) -> ExitCode {
    let (mut held, mut broken, mut next) = (0, Vec::new(), 0);
    while next < names.len() {
        let outcome = child(names, arguments, next);
        held += outcome.held;
        broken.extend(outcome.broken);
        // A child that ran nothing will not do better the next time.
        if outcome.reached == next {
            broken.push(format!("{} (the process ended before it)", names[next]));
            next += 1;
        } else {
            next = outcome.reached;
        }
    }
    println!("\n{held} of {} checks hold", names.len());
    for name in &broken {
        println!("broken: {name}");
    }
    if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

struct Outcome {
    held: usize,
    broken: Vec<String>,
    /// Number of the check at which the next child starts.
    reached: usize,
}

/// Runs checks from number `from` until all ran, the device is lost, or one says nothing for too long.
fn child(names: &[String], arguments: &Arguments, from: usize) -> Outcome {
    let mut outcome = Outcome { held: 0, broken: Vec::new(), reached: from };
    let program = std::env::current_exe().unwrap();
    let also = [(arguments.few, "--few"), (arguments.exactly, "--exactly")];
    let mut child = Command::new(program)
        .args(&arguments.filters)
        .args(also.iter().filter(|(on, _)| *on).map(|(_, name)| name))
        .args(["--here", "--device", &arguments.device.to_string(), "--from", &from.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (send, lines) = channel();
    let output = BufReader::new(child.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                break;
            }
        }
    });
    loop {
        match lines.recv_timeout(Duration::from_secs(arguments.patience_seconds)) {
            Ok(line) => {
                println!("{line}");
                let Some(name) = names.get(outcome.reached) else { continue };
                let Some(rest) = line.strip_prefix(&format!("{name} ... ")) else { continue };
                if rest.starts_with("ok") {
                    outcome.held += 1;
                } else {
                    outcome.broken.push(name.clone());
                }
                outcome.reached += 1;
            }
            Err(RecvTimeoutError::Timeout) => {
                let name = names.get(outcome.reached).map_or("the end", String::as_str);
                println!("{name} ... ended: silent for {} s", arguments.patience_seconds);
                outcome.broken.push(format!("{name} (hangs)"));
                outcome.reached += 1;
                let _ = child.kill();
                break;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = child.wait().ok().and_then(|status| status.code());
    let _ = reader.join();
    // A process that ended inside a check (a signal, an abort) breaks that check.
    if !matches!(status, Some(0 | 1)) && status != Some(i32::from(LOST)) && outcome.reached < names.len() {
        let name = &names[outcome.reached];
        if !outcome.broken.iter().any(|broken| broken.starts_with(name.as_str())) {
            println!("{name} ... FAILED: the process ended with {status:?}");
            outcome.broken.push(name.clone());
            outcome.reached += 1;
        }
    }
    outcome
}
