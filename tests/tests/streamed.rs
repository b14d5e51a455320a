//! Streamed == resident: a model that holds only some of its experts gives the bits of one that holds them all, however
//! few slots there are, cold or warm, alone or with others, drafted or plain.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use flint_backend::ops::Op;
use flint_backend::wrap::{Hooked, OpOf};
use flint_contracts::contracts::{chunked, concurrent, drafted};
use flint_contracts::feeding::{Dice, assert_same, feed};
use flint_contracts::{TINY, Tiny, arithmetics, cpu, load_streamed, model, streamed_from};
use flint_cpu::{Arithmetic, Cpu};
use flint_model::bank::BankOptions;
use flint_model::bank::replace::Replacement;
use flint_model::bank::report::Phase;
use flint_model::{Batch, Glm, LanguageModel, Span, Want};

/// More than there are experts.
const ALL: usize = 1000;

fn streamed(tiny: Tiny, arithmetic: Arithmetic, options: BankOptions) -> Glm<Cpu> {
    load_streamed(tiny, cpu(arithmetic, 1), options)
}

fn slots(slots: usize) -> BankOptions {
    BankOptions { slots, ..BankOptions::default() }
}

#[test]
fn any_number_of_slots_gives_the_bits_of_all_experts() {
    let cuts = [90, 1, 1, 1, 60, 1, 1];
    for tiny in TINY {
        for arithmetic in arithmetics() {
            let mut resident = model(tiny, arithmetic);
            let tokens = Dice::new(31).tokens(cuts.iter().sum(), resident.limits().vocabulary);
            let expected = feed(&mut resident, &tokens, &cuts);
            for slots in [1, 2, 8, ALL] {
                for staging in [1, 16] {
                    let options = BankOptions { slots, staging, ..BankOptions::default() };
                    let mut streamed = streamed(tiny, arithmetic, options);
                    // Cold, then warm.
                    for pass in 0..2 {
                        for (row, found) in feed(&mut streamed, &tokens, &cuts).iter().enumerate() {
                            let label =
                                format!("{tiny:?} {arithmetic:?} {slots} slots, pass {pass}, row {row}");
                            assert_same(&label, found, &expected[row]);
                        }
                    }
                    let report = streamed.bank_report().unwrap();
                    let (prompt, decode) = (report.total(Phase::Prompt), report.total(Phase::Decode));
                    assert!(prompt.held < prompt.asked, "something was read");
                    if slots == ALL {
                        assert!(decode.bytes == 0 || decode.hit_rate() > 0.5, "{decode:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_contracts_hold_with_two_slots() {
    for tiny in [Tiny::Mlx4, Tiny::Trained] {
        let label = format!("{tiny:?} in two slots");
        chunked(&mut streamed(tiny, Arithmetic::Lanes, slots(2)), &label);
        drafted(&mut streamed(tiny, Arithmetic::Lanes, slots(2)), &label, 60, 33);
        concurrent(&mut streamed(tiny, Arithmetic::Lanes, slots(2)), &label, 34);
    }
}

#[test]
fn what_was_used_before_is_there_at_the_start() {
    let tokens = Dice::new(32).tokens(64, 200);
    let mut cold = streamed(Tiny::Trained, Arithmetic::Lanes, slots(ALL));
    feed(&mut cold, &tokens, &[64]);
    let layers = cold.bank_report().unwrap().layers.len();
    let usage = vec![vec![1; cold.config().experts]; layers];
    for replacement in [Replacement::LeastRecent, Replacement::default()] {
        let options = BankOptions { slots: ALL, replacement, usage: usage.clone(), ..BankOptions::default() };
        let mut warm = streamed(Tiny::Trained, Arithmetic::Lanes, options);
        feed(&mut warm, &tokens, &[64]);
        let prompt = warm.bank_report().unwrap().total(Phase::Prompt);
        assert_eq!(prompt.held, prompt.asked);
        assert_eq!(prompt.bytes, 0);
    }
}

/// A copy of the nano checkpoint whose file can be damaged.
fn damaged() -> (tempfile::TempDir, Glm<Cpu>) {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(Tiny::Mlx4.folder()).unwrap() {
        let file = file.unwrap();
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
        }
    }
    let model = streamed_from(folder.path(), cpu(Arithmetic::Lanes, 1), slots(1));
    (folder, model)
}

#[test]
fn a_file_that_is_cut_ends_the_requests_that_need_it_and_no_other() {
    let (folder, mut model) = damaged();
    let tokens = Dice::new(35).tokens(40, model.limits().vocabulary);
    let expected = feed(&mut model, &tokens, &[40]);
    let [needs, idle] = [model.open().unwrap(), model.open().unwrap()];
    let batch = |sequence, range: std::ops::Range<usize>| Batch {
        spans: vec![Span { sequence, sure: tokens[range].to_vec(), drafts: Vec::new(), want: Want::All }],
    };
    model.forward(&batch(idle, 0..20)).unwrap();
    model.commit(idle, 0).unwrap();
    let shard = folder.path().join("model.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    std::fs::OpenOptions::new().write(true).open(&shard).unwrap().set_len(100_000).unwrap();
    // The trunk is mapped: its pages are beyond the cut now, so it is put back before anything touches them.
    std::fs::write(&shard, &whole).unwrap();
    model.forward(&batch(needs, 0..20)).unwrap();
    let error = model.commit(needs, 0).unwrap_err().to_string();
    for part in ["layers.", "expert ", "model.safetensors", "at byte", "changed"] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    assert!(model.forward(&batch(needs, 20..40)).is_err(), "a lost sequence stays lost");
    model.close(needs).unwrap();
    assert_eq!(model.length(idle).unwrap(), 20, "the other one is as it was");
    assert!(expected.len() == 40);
}

#[test]
fn a_forward_that_fails_leaves_no_reads_behind() {
    let tiny = Tiny::Trained;
    let tokens = Dice::new(36).tokens(12, 200);
    let expected = feed(&mut model(tiny, Arithmetic::Lanes), &tokens, &[12]);
    // The expert product that fails next; none while it is 0.
    let fault = Arc::new(AtomicUsize::new(0));
    let left = Arc::clone(&fault);
    let backend = Hooked::new(cpu(Arithmetic::Lanes, 1), move |cpu: &mut Cpu, op: OpOf<Cpu>| {
        if matches!(op, Op::ExpertLinear(_)) && left.load(Relaxed) > 0 && left.fetch_sub(1, Relaxed) == 1 {
            return Err(flint_backend::Error::Device { backend: "cpu", what: "a fault for a test".into() });
        }
        op.run(cpu)
    });
    let options = BankOptions { slots: 2, staging: 1, ..BankOptions::default() };
    let mut streamed = load_streamed(tiny, backend, options);
    // Wherever in a layer it is, the memory of what was on its way comes back.
    for product in 1..60 {
        let sequence = streamed.open().unwrap();
        let spans = vec![Span { sequence, sure: tokens.clone(), drafts: Vec::new(), want: Want::All }];
        fault.store(product, Relaxed);
        assert!(streamed.forward(&Batch { spans }).is_err(), "product {product}");
        streamed.close(sequence).unwrap();
        for (row, found) in feed(&mut streamed, &tokens, &[12]).iter().enumerate() {
            assert_same(&format!("after product {product} failed, row {row}"), found, &expected[row]);
        }
    }
}
