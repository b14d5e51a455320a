//! Where a forward's time goes: `profile FOLDER [THREADS]` runs a prompt and a few decoded tokens and prints the time of
//! each operation.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)] // a command for developers

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use flint_backend::ops::Op;
use flint_backend::wrap::{Hooked, OpOf};
use flint_contracts::feeding::{Dice, append};
use flint_cpu::{Cpu, Options};
use flint_model::bank::Experts;
use flint_model::{Glm, GlmOptions, LanguageModel};
use flint_weights::{Checkpoint, Source};

const PROMPT: usize = 512;
const DECODED: usize = 24;

type Times = Arc<Mutex<BTreeMap<String, (usize, Duration)>>>;

fn main() {
    let mut arguments = std::env::args_os().skip(1);
    let Some(folder) = arguments.next().map(PathBuf::from) else {
        eprintln!("usage: profile FOLDER [THREADS]");
        std::process::exit(2);
    };
    let threads = arguments.next().and_then(|n| n.to_str()?.parse().ok()).unwrap_or(1);
    let times = Times::default();
    let seen = Arc::clone(&times);
    let cpu = Cpu::new(Options::detect(threads)).unwrap();
    let backend = Hooked::new(cpu, move |cpu, op| {
        let (name, start) = (label(&op), Instant::now());
        let result = op.run(cpu);
        let mut seen = seen.lock().unwrap();
        let entry = seen.entry(name).or_default();
        entry.0 += 1;
        entry.1 += start.elapsed();
        result
    });
    let checkpoint = Checkpoint::open(Source::Folder(folder)).unwrap();
    let options = GlmOptions { context: 1024, sequences: 1, rows: PROMPT, drafts: 0 };
    let mut model = Glm::load(&checkpoint, backend, options, Experts::Resident, &mut |_, _| {}).unwrap();
    let tokens = Dice::new(1).tokens(PROMPT + DECODED, model.limits().vocabulary);
    let sequence = model.open().unwrap();
    append(&mut model, sequence, &tokens[..8]);
    for (what, tokens) in
        [("prompt", vec![&tokens[8..PROMPT]]), ("decode", tokens[PROMPT..].chunks(1).collect())]
    {
        times.lock().unwrap().clear();
        let start = Instant::now();
        for part in &tokens {
            append(&mut model, sequence, part);
        }
        report(what, start.elapsed() / tokens.len() as u32, tokens.len(), &times);
    }
}

/// An operation's name, with its matrix for products.
fn label(op: &OpOf<Cpu>) -> String {
    match op {
        Op::Linear(op) => format!("linear {} × {}", op.out.width, op.x.width),
        Op::HeadLinear(op) => format!("head_linear {} × {}", op.out.width, op.x.width),
        Op::ExpertLinear(op) => format!("expert_linear {} × {}", op.out.width, op.x.width),
        other => other.name().to_owned(),
    }
}

fn report(what: &str, forward: Duration, forwards: usize, times: &Times) {
    println!(
        "{what}: {:.3} ms a forward, {:.1} forwards/s",
        forward.as_secs_f64() * 1e3,
        1.0 / forward.as_secs_f64()
    );
    let times = times.lock().unwrap();
    let mut rows: Vec<_> = times.iter().collect();
    rows.sort_by_key(|(_, (_, time))| std::cmp::Reverse(*time));
    for (name, (count, time)) in rows {
        let each = time.as_secs_f64() / forwards as f64;
        println!(
            "  {name:<28} {:>4} times {:>9.1} µs {:>5.1} %",
            count / forwards,
            each * 1e6,
            each / forward.as_secs_f64() * 100.0
        );
    }
}
