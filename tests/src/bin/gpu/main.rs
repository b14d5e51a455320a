//! Every law and contract on a CUDA device:
//! `gpu [PART OF A NAME ...] [--exactly] [--few] [--device N] [--list] [--here] [--patience S]`.
//!
//! Prints one line a check and a summary; the status is 0 when all hold. Checks run in a child process, in order: a
//! kernel that faults takes its context with it, so the next check starts in a new process, and a check that says
//! nothing for long is ended. `--here` runs them in this process, for a debugger or a sanitizer, and `--few` in
//! few launches, since those take long under such tools; `--exactly` takes whole names. Without a device it says
//! why in a line and ends with status 0. Reads the tiny checkpoints and goldens from the repository's folder.

#![allow(clippy::print_stdout, clippy::print_stderr)] // a command for developers
#![allow(clippy::unwrap_used, clippy::panic)] // a check that cannot run has failed

mod checks;
mod joined;
mod supervise;

use std::any::Any;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use flint_backend::Backend as _;
use flint_cuda::{Cuda, Options};

/// A child's status when the device is lost: its parent goes on with the next check.
const LOST: u8 = 3;

/// Characters of a check's message.
const MOST_SAID: usize = 4000;

/// What the command line says.
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
#[derive(Clone, Debug)]
struct Arguments {
    filters: Vec<String>,
    device: usize,
    list: bool,
    here: bool,
    few: bool,
    exactly: bool,
    patience_seconds: u64,
    /// Number of the first check, for a child.
    from: usize,
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    let all = if arguments.few { checks::few(arguments.device) } else { checks::all(arguments.device) };
    let wanted =
        |name: &str, filter: &String| if arguments.exactly { name == filter } else { name.contains(filter) };
    let chosen: Vec<checks::Check> = all
        .into_iter()
        .filter(|check| {
            arguments.filters.is_empty() || arguments.filters.iter().any(|filter| wanted(&check.name, filter))
        })
        .collect();
    if arguments.list {
        for check in &chosen {
            println!("{}", check.name);
        }
        return ExitCode::SUCCESS;
    }
    if arguments.here {
        return run(chosen, &arguments);
    }
    match flint_cuda::devices() {
        Ok(devices) => devices.iter().for_each(|device| println!("{device:?}")),
        Err(error) => {
            println!("skipped: {error}");
            return ExitCode::SUCCESS;
        }
    }
    let names: Vec<String> = chosen.iter().map(|check| check.name.clone()).collect();
    supervise::run(&names, &arguments)
}

/// Runs checks from number `from` in this process.
fn run(checks: Vec<checks::Check>, arguments: &Arguments) -> ExitCode {
    // Messages are printed on the check's own line, with the place in the source.
    static PLACE: Mutex<String> = Mutex::new(String::new());
    std::panic::set_hook(Box::new(|info| {
        if let (Some(place), Ok(mut kept)) = (info.location(), PLACE.lock()) {
            *kept = format!(" ({}:{})", place.file(), place.line());
        }
    }));
    // Keeps the device's context: each check makes its own backend.
    let kept = match Cuda::new(Options::device(arguments.device)) {
        Ok(kept) => kept,
        Err(error) => {
            println!("FAILED opening the device: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut failed = 0;
    for check in checks.into_iter().skip(arguments.from) {
        print!("{} ... ", check.name);
        let _ = std::io::stdout().flush();
        let began = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(check.run));
        let seconds = began.elapsed().as_secs_f64();
        match outcome {
            Ok(note) => println!("ok {seconds:.1} s{}{note}", if note.is_empty() { "" } else { ": " }),
            Err(reason) => {
                failed += 1;
                let place = PLACE.lock().map(|place| place.clone()).unwrap_or_default();
                println!("FAILED {seconds:.1} s: {}{place}", message(&*reason));
                if !answers(arguments.device) {
                    println!("the device is lost");
                    // Its memory cannot be freed any more; the next process starts anew.
                    std::mem::forget(kept);
                    return ExitCode::from(LOST);
                }
            }
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether the device still works in this process.
fn answers(device: usize) -> bool {
    Cuda::new(Options::device(device)).is_ok_and(|mut cuda| cuda.synchronize().is_ok())
}

fn message(reason: &(dyn Any + Send)) -> String {
    let text = reason.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| reason.downcast_ref::<&str>().copied()).unwrap_or("no message");
    match text.char_indices().nth(MOST_SAID) {
        Some((end, _)) => format!("{} […]", &text[..end]),
        None => text.to_owned(),
    }
}

fn arguments() -> Result<Arguments, String> {
    let mut found = Arguments {
        filters: Vec::new(),
        device: 0,
        list: false,
        here: false,
        few: false,
        exactly: false,
        patience_seconds: 180,
        from: 0,
    };
    let mut rest = std::env::args().skip(1);
    while let Some(argument) = rest.next() {
        let mut number = || {
            let text = rest.next().unwrap_or_default();
            text.parse::<u64>().map_err(|_| format!("{argument} takes a number, not {text:?}"))
        };
        match argument.as_str() {
            "--device" => found.device = number()? as usize,
            "--patience" => found.patience_seconds = number()?,
            "--from" => found.from = number()? as usize,
            "--list" => found.list = true,
            "--here" => found.here = true,
            "--few" => found.few = true,
            "--exactly" => found.exactly = true,
            flag if flag.starts_with('-') => return Err(format!("{flag} is no option")),
            _ => found.filters.push(argument),
        }
    }
    Ok(found)
}
