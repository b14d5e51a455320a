//! The conformance suite over both arithmetics, every instruction set and several threads.

use flint_backend::law::{Transcript, transcript};
use flint_cpu::{Arithmetic, Cpu, Level, Options};

/// A backend; the closest one that this CPU can be, when it lacks the instructions.
fn cpu(arithmetic: Arithmetic, level: Level, threads: usize) -> Cpu {
    let level = if level.is_available() { level } else { Level::detect() };
    let dot = arithmetic == Arithmetic::Dot && Arithmetic::dot_is_available();
    let arithmetic = if dot { Arithmetic::Dot } else { Arithmetic::Lanes };
    Cpu::new(Options { threads, arithmetic, level }).unwrap()
}

fn lanes_scalar() -> Cpu {
    cpu(Arithmetic::Lanes, Level::Scalar, 1)
}

fn lanes_avx2() -> Cpu {
    cpu(Arithmetic::Lanes, Level::Avx2, 2)
}

fn lanes_best() -> Cpu {
    cpu(Arithmetic::Lanes, Level::detect(), 1)
}

fn dot_one_thread() -> Cpu {
    cpu(Arithmetic::Dot, Level::detect(), 1)
}

fn dot_two_threads() -> Cpu {
    cpu(Arithmetic::Dot, Level::detect(), 2)
}

flint_backend::law_tests!(scalar, lanes_scalar);
flint_backend::law_tests!(avx2, lanes_avx2);
flint_backend::law_tests!(best, lanes_best);
flint_backend::law_tests!(dot, dot_one_thread);
flint_backend::law_tests!(dot_threads, dot_two_threads);

fn assert_equal(name: &str, one: &[Transcript], other: &[Transcript]) {
    assert_eq!(one.len(), other.len());
    for (a, b) in one.iter().zip(other) {
        let differs = a.words.iter().zip(&b.words).position(|(a, b)| a != b);
        assert!(a == b, "{name}: {} [{}] differs from value {differs:?} of {}", a.op, a.case, a.words.len());
    }
}

#[test]
fn the_fp32_arithmetic_has_the_same_bits_at_every_level_and_for_any_number_of_threads() {
    let scalar = transcript(lanes_scalar);
    for level in [Level::Avx2, Level::Avx512, Level::Neon] {
        for threads in [1, 3] {
            if level.is_available() {
                let found = transcript(|| cpu(Arithmetic::Lanes, level, threads));
                assert_equal(&format!("{level:?}, {threads} threads"), &scalar, &found);
            }
        }
    }
}

#[test]
fn the_dot_arithmetic_has_the_same_bits_for_any_number_of_threads() {
    assert_equal("dot", &transcript(dot_one_thread), &transcript(|| cpu(Arithmetic::Dot, Level::detect(), 3)));
}
