//! Chunked == whole: cutting a prompt anywhere changes no bit of any row.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::contracts::{best_alone, chunked};
use flint_contracts::feeding::{Dice, assert_same, feed};
use flint_contracts::{TINY, Tiny, arithmetics, model};
use flint_cpu::Arithmetic;
use flint_model::LanguageModel;

#[test]
fn every_cut_of_a_prompt_gives_the_bits_of_the_whole_prompt() {
    for tiny in TINY {
        for arithmetic in arithmetics() {
            chunked(&mut model(tiny, arithmetic), &format!("{tiny:?} {arithmetic:?}"));
        }
    }
}

#[test]
fn the_best_logits_alone_are_those_of_the_whole_rows() {
    for tiny in TINY {
        for arithmetic in arithmetics() {
            best_alone(&mut model(tiny, arithmetic), &format!("{tiny:?} {arithmetic:?}"));
        }
    }
}

#[test]
fn every_length_gives_the_bits_of_the_prefix() {
    let mut model = model(Tiny::Mlx4, Arithmetic::Lanes);
    let tokens = Dice::new(2).tokens(150, model.limits().vocabulary);
    let expected = feed(&mut model, &tokens, &[150]);
    for length in 1..150 {
        let rows = feed(&mut model, &tokens[..length], &[length]);
        assert_same(&format!("the last row of {length} tokens"), &rows[length - 1], &expected[length - 1]);
    }
}

#[test]
fn every_two_way_cut_gives_the_same_last_row() {
    let mut model = model(Tiny::MixedWidths, Arithmetic::Lanes);
    let tokens = Dice::new(3).tokens(97, model.limits().vocabulary);
    let expected = feed(&mut model, &tokens, &[97]);
    for cut in 1..97 {
        let rows = feed(&mut model, &tokens, &[cut, 97 - cut]);
        assert_same(&format!("cut after {cut}"), &rows[96], &expected[96]);
    }
}
