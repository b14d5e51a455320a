//! The embedded model answers the held-out panel as well as the reference does: 187 of 200 prompts.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::contracts::{REFERENCE, panel_score};
use flint_contracts::{Tiny, model};
use flint_cpu::Arithmetic;
use flint_engine::EngineOptions;

fn passed(arithmetic: Arithmetic) -> usize {
    panel_score(Box::new(model(Tiny::Trained, arithmetic)), EngineOptions::default())
}

#[test]
fn the_fp32_arithmetic_passes_what_the_reference_passes() {
    assert!(passed(Arithmetic::Lanes) >= REFERENCE);
}

#[test]
fn the_bf16_arithmetic_passes_as_many_up_to_three() {
    if Arithmetic::dot_is_available() {
        let passed = passed(Arithmetic::Dot);
        assert!(passed + 3 >= REFERENCE, "{passed} of 200; the reference passes {REFERENCE}");
    }
}
