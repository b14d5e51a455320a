//! Drafted == plain: proposals that are accepted or rejected at random change no bit, and rejected ones leave no trace.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::feeding::{Dice, assert_same, bits, feed, whole};
use flint_contracts::{TINY, Tiny, arithmetics, model};
use flint_cpu::Arithmetic;
use flint_model::{Batch, LanguageModel, Span, Want};

/// Feeds `tokens` in spans of random sure tokens and drafts, of which a random number is true (and accepted) and the
/// rest is not. The logits of every row whose prefix is true must be the plain run's.
fn check(tiny: Tiny, arithmetic: Arithmetic, length: usize, seed: u64) {
    let mut model = model(tiny, arithmetic);
    let limits = model.limits();
    let mut dice = Dice::new(seed);
    let tokens = dice.tokens(length, limits.vocabulary);
    let cuts = whole(&model, length);
    let expected = feed(&mut model, &tokens, &cuts);
    let sequence = model.open().unwrap();
    let mut at = 0;
    while at < length {
        let most = if dice.below(4) == 0 { 60 } else { 3 };
        let sure = (1 + dice.below(most)).min(length - at);
        let right = dice.below(limits.drafts + 1).min(length - at - sure);
        let wrong = dice.below(limits.drafts + 1 - right);
        let mut drafts = tokens[at + sure..at + sure + right].to_vec();
        let vocabulary = limits.vocabulary as u32;
        let truth = |index: usize| tokens.get(at + sure + index).copied().unwrap_or(0);
        drafts.extend((right..right + wrong).map(|i| (truth(i) + 1 + i as u32) % vocabulary));
        let span = Span { sequence, sure: tokens[at..at + sure].to_vec(), drafts, want: Want::All };
        let logits = model.forward(&Batch { spans: vec![span] }).unwrap();
        for row in 0..sure + right {
            let what = format!("{tiny:?} {arithmetic:?} seed {seed}: row {}", at + row);
            assert_same(&what, &bits(logits.row(row)), &expected[at + row]);
        }
        model.commit(sequence, right).unwrap();
        at += sure + right;
    }
    assert_eq!(model.length(sequence).unwrap(), length);
}

#[test]
fn drafts_that_come_and_go_at_random_change_no_bit() {
    for tiny in TINY {
        for arithmetic in arithmetics() {
            for seed in 0..4 {
                check(tiny, arithmetic, 300, seed);
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
