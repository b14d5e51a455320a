//! The conformance suite over both arithmetics, every instruction set and several threads.

#![allow(clippy::unwrap_used, clippy::panic)] // a law that cannot run has failed

use std::collections::BTreeSet;

use flint_backend::law::{Report, check, check_all, check_few};
use flint_cpu::{Arithmetic, Cpu, Level, Options};

fn lanes(level: Level, threads: usize) -> Cpu {
    Cpu::new(Options { threads, arithmetic: Arithmetic::Lanes, level }).unwrap()
}

/// The dot arithmetic, or the other one on a CPU that cannot.
fn dot(threads: usize) -> Cpu {
    let options = Options::detect(threads);
    Cpu::new(options).unwrap()
}

flint_backend::law_tests!(fp32, || lanes(Level::detect(), 1));
flint_backend::law_tests!(bf16_dot, || dot(2));

#[test]
fn the_fp32_arithmetic_keeps_the_laws_with_the_same_bits_at_every_level_and_for_any_number_of_threads() {
    let scalar = check_all(|| lanes(Level::Scalar, 1));
    assert_eq!(scalar.complaint(), None);
    for (level, threads) in [(Level::Avx2, 2), (Level::Avx512, 3), (Level::Neon, 2)] {
        if level.is_available() {
            let found = check_all(|| lanes(level, threads));
            assert_eq!(found.complaint(), None, "{level:?}");
            assert_eq!(scalar.difference(&found), None, "{level:?} with {threads} threads");
        }
    }
}

#[test]
fn the_fp32_arithmetic_has_the_bits_that_it_has_on_every_machine() {
    let golden = include_str!("fixtures/fp32-bits.txt");
    let golden: Vec<&str> = golden.lines().filter(|line| !line.starts_with('#')).collect();
    let digests = check_all(|| lanes(Level::detect(), 1)).digests();
    let found: Vec<String> = digests.iter().map(|(op, digest)| format!("{op} {digest:016x}")).collect();
    assert_eq!(found, golden, "read the file's head before you change a line of it");
}

#[test]
fn the_laws_hold_in_few_launches_of_every_shape() {
    for op in flint_backend::ops::NAMES {
        let [few, all] = [check_few(|| dot(1), op), check(|| dot(1), op)];
        assert_eq!(few.complaint(), None);
        let cases = |report: &Report| {
            report.transcripts.iter().map(|transcript| transcript.case.clone()).collect::<BTreeSet<_>>()
        };
        assert_eq!(cases(&few), cases(&all), "{op}");
    }
}

#[test]
fn the_dot_arithmetic_has_the_same_bits_for_any_number_of_threads() {
    let one = check_all(|| dot(1));
    assert_eq!(one.complaint(), None);
    assert_eq!(one.difference(&check_all(|| dot(3))), None);
}
