//! Concurrent == solo: ragged spans of different lengths in one forward give each sequence the bits it has alone.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::contracts::{concurrent, soak};
use flint_contracts::{TINY, Tiny, arithmetics, model, sizes};
use flint_engine::EngineOptions;

#[test]
fn ragged_spans_in_one_forward_give_each_sequence_its_own_bits() {
    for tiny in TINY {
        for arithmetic in arithmetics() {
            for seed in 20..23 {
                concurrent(&mut model(tiny, arithmetic), &format!("{tiny:?} {arithmetic:?}"), seed);
            }
        }
    }
}

#[test]
fn requests_that_come_go_and_leave_early_get_the_same_replies_in_any_order() {
    let fastest = arithmetics().pop().unwrap();
    let options = EngineOptions { parallel: sizes().sequences, ..EngineOptions::default() };
    soak(Box::new(model(Tiny::Trained, fastest)), options, || 0);
}
