//! Concurrent == solo: ragged spans of different lengths in one forward give each sequence the bits it has alone.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::contracts::concurrent;
use flint_contracts::{TINY, arithmetics, model};

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
