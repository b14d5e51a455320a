//! Resumed == fresh: a sequence that was saved and loaded at any length goes on with the same bits, also when drafts
//! wait in its log; a damaged or foreign save is refused.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::contracts::resumed;
use flint_contracts::feeding::{Dice, append, assert_same, bits, feed};
use flint_contracts::{TINY, Tiny, arithmetics, model};
use flint_cpu::Arithmetic;
use flint_model::{Batch, LanguageModel, Span, Want};

const LENGTH: usize = 310;

#[test]
fn a_sequence_resumed_at_any_length_goes_on_with_the_same_bits() {
    let every: Vec<usize> = (1..LENGTH - 2).step_by(7).chain([15, 16, 17, 63, 64, 255, 256, 257]).collect();
    for tiny in TINY {
        for arithmetic in arithmetics() {
            resumed(&mut model(tiny, arithmetic), &format!("{tiny:?} {arithmetic:?}"), &every);
        }
    }
}

#[test]
fn accepted_drafts_that_wait_in_the_log_are_saved_with_the_sequence() {
    let mut model = model(Tiny::Mlx4, Arithmetic::Lanes);
    let tokens = Dice::new(6).tokens(60, model.limits().vocabulary);
    let expected = feed(&mut model, &tokens, &[60]);
    for accepted in 0..=5 {
        let sequence = model.open().unwrap();
        let (sure, drafts) = (tokens[..33].to_vec(), tokens[33..38].to_vec());
        model.forward(&Batch { spans: vec![Span { sequence, sure, drafts, want: Want::Nothing }] }).unwrap();
        model.commit(sequence, accepted).unwrap();
        let saved = model.save(sequence).unwrap();
        let resumed = model.load(&saved).unwrap();
        let at = 33 + accepted;
        for (row, found) in append(&mut model, resumed, &tokens[at..]).iter().enumerate() {
            assert_same(&format!("{accepted} accepted, row {}", at + row), found, &expected[at + row]);
        }
        model.close(sequence).unwrap();
        model.close(resumed).unwrap();
    }
}

#[test]
fn rejected_drafts_leave_no_byte_in_a_saved_sequence() {
    let mut model = model(Tiny::MixedWidths, Arithmetic::Lanes);
    let tokens = Dice::new(7).tokens(80, model.limits().vocabulary);
    let mut saved = Vec::new();
    for drafts in [vec![], vec![1, 2, 3], tokens[50..58].to_vec()] {
        let sequence = model.open().unwrap();
        let span = Span { sequence, sure: tokens[..50].to_vec(), drafts, want: Want::Nothing };
        model.forward(&Batch { spans: vec![span] }).unwrap();
        model.commit(sequence, 0).unwrap();
        saved.push(model.save(sequence).unwrap());
        model.close(sequence).unwrap();
    }
    assert!(saved[0] == saved[1] && saved[0] == saved[2]);
}

#[test]
fn a_damaged_or_foreign_save_is_refused() {
    let mut one = model(Tiny::Mlx4, Arithmetic::Lanes);
    let sequence = one.open().unwrap();
    append(&mut one, sequence, &[1, 2, 3, 4, 5]);
    let saved = one.save(sequence).unwrap();
    for byte in [0, 9, 20, saved.len() / 2, saved.len() - 1] {
        let mut damaged = saved.clone();
        damaged[byte] ^= 4;
        assert!(one.load(&damaged).unwrap_err().to_string().contains("checksum"), "byte {byte}");
    }
    for len in [0, 7, 31, 32, saved.len() - 1] {
        one.load(&saved[..len]).unwrap_err();
    }
    let mut other = model(Tiny::MixedWidths, Arithmetic::Lanes);
    let message = other.load(&saved).unwrap_err().to_string();
    assert!(message.contains("prefill anew"), "{message}");
}

#[test]
fn a_call_out_of_turn_is_an_error_that_changes_nothing() {
    let mut model = model(Tiny::Mlx4, Arithmetic::Lanes);
    let tokens = [3, 1, 4, 1, 5, 9, 2, 6];
    let expected = feed(&mut model, &tokens, &[8]);
    let sequence = model.open().unwrap();
    let span = |sure: &[u32], drafts: &[u32]| Batch {
        spans: vec![Span { sequence, sure: sure.to_vec(), drafts: drafts.to_vec(), want: Want::All }],
    };
    model.commit(sequence, 0).unwrap_err();
    model.forward(&span(&[], &[])).unwrap_err();
    model.forward(&span(&[70_000], &[])).unwrap_err();
    model.forward(&span(&[1], &[2; 9])).unwrap_err();
    model.forward(&span(&[1; 513], &[])).unwrap_err();
    let twice = Batch { spans: [span(&[1], &[]).spans, span(&[2], &[]).spans].concat() };
    model.forward(&twice).unwrap_err();
    let logits = model.forward(&span(&tokens[..5], &tokens[5..])).unwrap();
    model.forward(&span(&[1], &[])).unwrap_err();
    model.save(sequence).unwrap_err();
    model.commit(sequence, 4).unwrap_err();
    model.commit(sequence, 3).unwrap();
    for row in 0..8 {
        assert_same(&format!("row {row}"), &bits(logits.row(row)), &expected[row]);
    }
    model.close(sequence).unwrap();
    model.close(sequence).unwrap_err();
    model.length(sequence).unwrap_err();
}
