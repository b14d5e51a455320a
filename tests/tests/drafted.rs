//! Drafted == plain: proposals that are accepted or rejected at random change no bit, and rejected ones leave no trace.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::contracts::drafted;
use flint_contracts::feeding::{Dice, assert_same, bits, feed};
use flint_contracts::{TINY, Tiny, arithmetics, model};
use flint_cpu::Arithmetic;
use flint_model::{Batch, LanguageModel, Span, Want};

#[test]
fn drafts_that_come_and_go_at_random_change_no_bit() {
    for tiny in TINY {
        for arithmetic in arithmetics() {
            for seed in 0..4 {
                drafted(&mut model(tiny, arithmetic), &format!("{tiny:?} {arithmetic:?}"), 300, seed);
            }
        }
    }
}

#[test]
fn an_accepted_prefix_shorter_than_what_was_right_is_legal() {
    let mut model = model(Tiny::Mlx4, Arithmetic::Lanes);
    let tokens = Dice::new(9).tokens(60, model.limits().vocabulary);
    let expected = feed(&mut model, &tokens, &[60]);
    let sequence = model.open().unwrap();
    let mut at = 0;
    for accepted in [0, 2, 1, 0, 4, 3, 0, 1] {
        let (sure, drafts) = (tokens[at..=at].to_vec(), tokens[at + 1..at + 6].to_vec());
        let span = Span { sequence, sure, drafts, want: Want::Next };
        let logits = model.forward(&Batch { spans: vec![span] }).unwrap();
        for row in 0..6 {
            assert_same(&format!("row {}", at + row), &bits(logits.row(row)), &expected[at + row]);
        }
        model.commit(sequence, accepted).unwrap();
        at += 1 + accepted;
    }
}
