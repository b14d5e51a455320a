//! The checks: each law of each operation, each contract of each tiny model, goldens, and the way to them.

use flint_backend::law;
use flint_backend::ops::NAMES;
use flint_backend::wrap::{Hooked, OpOf};
use flint_backend::{Backend as _, Result};
use flint_contracts::contracts::{self, REFERENCE};
use flint_contracts::feeding::{Bits, Dice, append, feed};
use flint_contracts::goldens::Goldens;
use flint_contracts::{TINY, Tiny, arithmetics, cpu, load, nano};
use flint_cpu::Arithmetic;
use flint_cuda::{Counts, Cuda, Options};
use flint_engine::EngineOptions;
use flint_model::{Glm, LanguageModel};

/// A check with its name. It panics when it fails, and may have something to say when it does not.
pub(crate) struct Check {
    pub(crate) name: String,
    pub(crate) run: Box<dyn FnOnce() -> String>,
}

/// Largest relative distance (root of the mean square) from the fp32 goldens of the random tiny models. Rounded inputs
/// make other choices of experts there, whose weights are random: the CPU's bf16 arithmetic is 0.23 away. Garbage is 1.4.
const NANO_DISTANCE: f64 = 0.5;

/// Largest relative distance of a point inside the network from the CPU's bf16 arithmetic while all choices agree.
const INSIDE_DISTANCE: f64 = 0.05;

/// A check of operations that run as one launch, on a device.
type Join = fn(usize) -> String;

/// Checks of operations that run as one launch, at the release's widths.
const JOINS: [(&str, Join); 5] = [
    ("kda", crate::joined::kda),
    ("dsa", crate::joined::dsa),
    ("router", crate::joined::router),
    ("activations", crate::joined::activations),
    ("sites", crate::joined::sites),
];

/// Every check, in the order in which they help to find a fault.
pub(crate) fn all(device: usize) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut add = |name: String, run: Box<dyn FnOnce() -> String>| checks.push(Check { name, run });
    add("device/copies".into(), Box::new(move || copies(device)));
    for op in NAMES {
        add(format!("law/{op}"), Box::new(move || complaint(&law::check(|| cuda(device, true), op))));
    }
    for op in NAMES {
        let run = move || complaint(&law::check(|| stepped(device), op));
        add(format!("law-in-steps/{op}"), Box::new(run));
    }
    for (what, check) in JOINS {
        add(format!("joined/{what}"), Box::new(move || check(device)));
    }
    for tiny in TINY {
        add(format!("inside/{tiny:?}"), Box::new(move || inside(tiny, device)));
        add(format!("graphs/{tiny:?}"), Box::new(move || graphs(tiny, device)));
        add(format!("joined/{tiny:?}"), Box::new(move || joined(tiny, device, contracts::pieces)));
        add(format!("early/{tiny:?}"), Box::new(move || early(tiny, device)));
        add(format!("chunked/{tiny:?}"), contract(tiny, device, contracts::chunked));
        add(format!("best/{tiny:?}"), contract(tiny, device, contracts::best_alone));
        for seed in 0..2 {
            let run = move |model: &mut dyn LanguageModel, label: &str| {
                contracts::drafted(model, label, 300, seed);
            };
            add(format!("drafted/{tiny:?}/{seed}"), contract(tiny, device, run));
        }
        for seed in 20..22 {
            let run = move |model: &mut dyn LanguageModel, label: &str| {
                contracts::concurrent(model, label, seed);
            };
            add(format!("concurrent/{tiny:?}/{seed}"), contract(tiny, device, run));
        }
        let run = |model: &mut dyn LanguageModel, label: &str| {
            contracts::resumed(model, label, &[1, 15, 16, 17, 63, 64, 100, 255, 256, 257, 290]);
        };
        add(format!("resumed/{tiny:?}"), contract(tiny, device, run));
    }
    for tiny in [Tiny::Mlx4, Tiny::MixedWidths] {
        add(format!("golden/{tiny:?}"), Box::new(move || golden_distance(tiny, device)));
    }
    let text = |model: &mut dyn LanguageModel, label: &str| {
        contracts::golden_text(model, label, None);
    };
    add("golden/text".into(), contract(Tiny::Trained, device, text));
    add("golden/panel".into(), Box::new(move || panel(device)));
    add("device/memory".into(), Box::new(move || memory(device)));
    add("device/soak".into(), Box::new(move || soak(device)));
    checks
}

/// The checks for tools under which a launch takes long: the laws in few launches, and the joined operations.
pub(crate) fn few(device: usize) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut add = |name: String, run: Box<dyn FnOnce() -> String>| checks.push(Check { name, run });
    for op in NAMES {
        let run = move || complaint(&law::check_few(|| cuda(device, true), op));
        add(format!("law/{op}"), Box::new(run));
    }
    for (what, check) in JOINS {
        add(format!("joined/{what}"), Box::new(move || check(device)));
    }
    for tiny in TINY {
        let run = move || joined(tiny, device, contracts::few_pieces);
        add(format!("joined/{tiny:?}"), Box::new(run));
    }
    checks
}

fn cuda(device: usize, graphs: bool) -> Cuda {
    Cuda::new(Options { graphs, ..Options::device(device) }).unwrap()
}

fn model(tiny: Tiny, device: usize, graphs: bool) -> Glm<Cuda> {
    load(tiny, cuda(device, graphs))
}

/// How a hooked device runs an operation.
type Run = fn(&mut Cuda, OpOf<Cuda>) -> Result<()>;

/// A device that runs each operation as a step of its own.
fn stepped(device: usize) -> Hooked<Cuda, Run> {
    let run: Run = |cuda, op| {
        cuda.begin_step()?;
        let ran = op.run(cuda);
        cuda.end_step()?;
        ran
    };
    Hooked::new(cuda(device, true), run)
}

fn contract(
    tiny: Tiny,
    device: usize,
    check: impl Fn(&mut dyn LanguageModel, &str) + 'static,
) -> Box<dyn FnOnce() -> String> {
    Box::new(move || {
        check(&mut model(tiny, device, true), &format!("{tiny:?}"));
        String::new()
    })
}

/// Fails with what a law's report complains of.
fn complaint(report: &law::Report) -> String {
    if let Some(text) = report.complaint() {
        let lines: Vec<&str> = text.lines().collect();
        let shown = lines.iter().take(8).copied().collect::<Vec<_>>().join("\n    ");
        panic!("{} violations:\n    {shown}", lines.len());
    }
    format!("{} cases", report.transcripts.len())
}

/// What is written comes back, at any offset and size, in and out of steps.
fn copies(device: usize) -> String {
    let mut cuda = cuda(device, true);
    let mut dice = Dice::new(3);
    for step in [false, true] {
        for len in [1, 3, 1000, 70_000, 9_000_000] {
            let values = dice.tokens(len, usize::MAX);
            let buffer = cuda.allocate(flint_backend::Element::U32, len + 5).unwrap();
            if step {
                cuda.begin_step().unwrap();
            }
            cuda.write_u32(&buffer, 2, &values).unwrap();
            if step {
                cuda.end_step().unwrap();
            }
            let mut found = vec![7; len + 5];
            cuda.read_u32(&buffer, 0, &mut found).unwrap();
            assert!(found[2..len + 2] == values[..], "{len} values, in a step: {step}");
            assert!(found[..2] == [0; 2] && found[len + 2..] == [0; 3], "what was not written is zero");
        }
    }
    format!("{:?}", cuda.info())
}

/// Every point of a forward beside the CPU's nearest arithmetic: where the device goes wrong first.
fn inside(tiny: Tiny, device: usize) -> String {
    let nearest = if arithmetics().contains(&Arithmetic::Dot) { Arithmetic::Dot } else { Arithmetic::Lanes };
    nano::compare_inside(&mut model(tiny, device, true), &mut load(tiny, cpu(nearest, 4)), INSIDE_DISTANCE)
}

/// Joined operations change no bit: decoded tokens, blocks with drafts, several sequences in a batch, prefills.
fn joined(tiny: Tiny, device: usize, pieces: fn(&mut dyn LanguageModel) -> Vec<Bits>) -> String {
    let apart = Cuda::new(Options { joins: false, ..Options::device(device) }).unwrap();
    let expected = pieces(&mut load(tiny, apart));
    let mut joining = model(tiny, device, true);
    let found = pieces(&mut joining);
    contracts::same_pieces(&format!("{tiny:?} with joined operations"), &found, &expected);
    String::new()
}

/// Kernels that begin while the one before them ends change no bit, in graphs (the rounds after the second) and without.
fn early(tiny: Tiny, device: usize) -> String {
    let late = Cuda::new(Options { early: false, ..Options::device(device) }).unwrap();
    let expected = contracts::pieces(&mut load(tiny, late));
    let mut launched = model(tiny, device, false);
    let mut graphed = model(tiny, device, true);
    for round in 0..4 {
        let found = contracts::pieces(&mut launched);
        contracts::same_pieces(&format!("{tiny:?} with early kernels, round {round}"), &found, &expected);
        let found = contracts::pieces(&mut graphed);
        contracts::same_pieces(
            &format!("{tiny:?} with early kernels in graphs, round {round}"),
            &found,
            &expected,
        );
    }
    String::new()
}

/// Graphs change no bit, and a decoded token of each row count after the second runs as one.
fn graphs(tiny: Tiny, device: usize) -> String {
    let mut plain = model(tiny, device, false);
    let expected = contracts::pieces(&mut plain);
    let mut graphed = model(tiny, device, true);
    for round in 0..3 {
        let found = contracts::pieces(&mut graphed);
        contracts::same_pieces(&format!("{tiny:?} with graphs, round {round}"), &found, &expected);
    }
    let tokens = Dice::new(4).tokens(40, graphed.limits().vocabulary);
    let before = graphed.backend().counts();
    let sequence = graphed.open().unwrap();
    for &token in &tokens {
        append(&mut graphed, sequence, &[token]);
    }
    let Counts { kernels, graphs_launched, graphs_made, .. } = graphed.backend().counts();
    let steps = tokens.len() as u64;
    let (graphs, kernels) = (graphs_launched - before.graphs_launched, kernels - before.kernels);
    assert!(
        graphs + 3 >= steps,
        "{steps} tokens of one sequence launched {graphs} graphs ({graphs_made} were made): an argument or a grid \
         moves with the position"
    );
    format!("{} kernels a token in {} layers", kernels / steps, graphed.config().layers())
}

/// Distance from the fp32 goldens, beside the CPU's.
fn golden_distance(tiny: Tiny, device: usize) -> String {
    let goldens = Goldens::open(&tiny.folder().join("goldens.safetensors"));
    let found = nano::text_distance(&mut model(tiny, device, true), &goldens, "f32.");
    let mut note = format!("{found:.2e} of the logits' size");
    if arithmetics().contains(&Arithmetic::Dot) {
        let other = nano::text_distance(&mut load(tiny, cpu(Arithmetic::Dot, 4)), &goldens, "f32.");
        note = format!("{note}, the CPU's bf16 {other:.2e}");
    }
    assert!(found <= NANO_DISTANCE, "{note}; {NANO_DISTANCE} is allowed");
    note
}

fn panel(device: usize) -> String {
    let options = EngineOptions { parallel: flint_contracts::sizes().sequences, ..EngineOptions::default() };
    let score = contracts::panel_score(Box::new(model(Tiny::Trained, device, true)), options);
    assert!(score + 3 >= REFERENCE, "{score} of 200; the reference passes {REFERENCE}");
    format!("{score} of 200")
}

/// Requests that come, go and leave early give the same replies each time and leave no memory behind.
fn soak(device: usize) -> String {
    let options = EngineOptions { parallel: flint_contracts::sizes().sequences, ..EngineOptions::default() };
    let watch = cuda(device, false);
    contracts::soak(Box::new(model(Tiny::Trained, device, true)), options, || watch.memory().unwrap().0)
}

/// Sequences that come and go leave no memory behind.
fn memory(device: usize) -> String {
    let mut model = model(Tiny::Trained, device, true);
    let vocabulary = model.limits().vocabulary;
    let mut dice = Dice::new(8);
    let mut round = |model: &mut Glm<Cuda>| {
        for _ in 0..20 {
            let length = 1 + dice.below(400);
            let tokens = dice.tokens(length, vocabulary);
            let cuts = dice.cuts(length, 200);
            feed(model, &tokens, &cuts);
        }
        model.backend().memory().unwrap().0
    };
    // The pool and the graphs grow to their working size first.
    round(&mut model);
    let before = round(&mut model);
    let after = round(&mut model);
    let lost = before.saturating_sub(after);
    assert!(lost <= 64 << 20, "20 sequences took {lost} bytes that they did not give back");
    format!("{lost} bytes")
}
