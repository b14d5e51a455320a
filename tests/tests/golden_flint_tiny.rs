//! The embedded model says what the reference says: greedy text of every golden prompt, logits where they are firm.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::contracts::golden_text;
use flint_contracts::{Tiny, arithmetics, model};
use flint_cpu::Arithmetic;

/// Two correct programs differ by at most 6e-5 in fp32 here.
const LOGITS: f32 = 1e-3;

#[test]
fn greedy_text_of_every_golden_prompt_is_the_references_in_every_arithmetic() {
    for arithmetic in arithmetics() {
        let tolerance = (arithmetic == Arithmetic::Lanes).then_some(LOGITS);
        golden_text(&mut model(Tiny::Trained, arithmetic), &format!("{arithmetic:?}"), tolerance);
    }
}
