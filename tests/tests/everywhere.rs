//! The same bits with any number of threads, at every instruction level, and behind a queue that runs late.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_backend::wrap::Recorder;
use flint_contracts::contracts::{pieces, same_pieces};
use flint_contracts::{TINY, arithmetics, cpu, load};
use flint_cpu::{Arithmetic, Cpu, Level, Options};
use flint_model::LanguageModel;

#[test]
fn one_thread_and_several_give_the_same_bits() {
    for tiny in TINY {
        for arithmetic in arithmetics() {
            let expected = pieces(&mut load(tiny, cpu(arithmetic, 1)));
            for threads in [2, 3, 5] {
                let found = pieces(&mut load(tiny, cpu(arithmetic, threads)));
                same_pieces(&format!("{tiny:?} {arithmetic:?} {threads} threads"), &found, &expected);
            }
        }
    }
}

#[test]
fn every_instruction_level_gives_the_same_bits() {
    let levels = [Level::Avx2, Level::Avx512, Level::Neon];
    for tiny in TINY {
        let at = |level| Cpu::new(Options { arithmetic: Arithmetic::Lanes, threads: 2, level }).unwrap();
        let expected = pieces(&mut load(tiny, at(Level::Scalar)));
        for level in levels.into_iter().filter(|level| level.is_available()) {
            let found = pieces(&mut load(tiny, at(level)));
            same_pieces(&format!("{tiny:?} {level:?}"), &found, &expected);
        }
    }
}

#[test]
fn a_queue_that_runs_at_the_next_wait_gives_the_same_bits() {
    for tiny in TINY {
        for arithmetic in arithmetics() {
            let expected = pieces(&mut load(tiny, cpu(arithmetic, 2)));
            let found = pieces(&mut load(tiny, Recorder::new(cpu(arithmetic, 2))));
            same_pieces(&format!("{tiny:?} {arithmetic:?} queued"), &found, &expected);
        }
    }
}

/// FNV-1a of the logits' bits, rows in order.
fn digest(rows: &[Vec<u32>]) -> u64 {
    rows.iter()
        .flatten()
        .flat_map(|bits| bits.to_le_bytes())
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

/// Digests of `cpu-lanes-1`, taken on x86-64 with AVX-512. A change of one is a change of the arithmetic: it needs a new
/// arithmetic string.
const LANES_1: [u64; 3] = [0xDE14_3AB5_83EF_F112, 0x241F_DE4D_C49D_3F3F, 0x5FAF_F288_6E88_4FA3];

#[test]
fn the_fp32_arithmetic_gives_the_bits_of_every_other_machine() {
    let found = TINY.map(|tiny| {
        let mut model = load(tiny, cpu(Arithmetic::Lanes, 1));
        assert_eq!(model.arithmetic_id().split_once("cpu-").map(|(_, name)| name), Some("lanes-1"));
        digest(&pieces(&mut model))
    });
    assert_eq!(found, LANES_1, "{found:#018x?}");
}
