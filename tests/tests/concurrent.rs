//! Concurrent == solo: ragged spans of different lengths in one forward give each sequence the bits it has alone.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::feeding::{Bits, Dice, assert_same, bits, feed, whole};
use flint_contracts::{TINY, Tiny, arithmetics, model};
use flint_cpu::Arithmetic;
use flint_model::{Batch, LanguageModel, SequenceId, Span, Want};

struct Stream {
    tokens: Vec<u32>,
    expected: Vec<Bits>,
    sequence: SequenceId,
    at: usize,
}

fn check(tiny: Tiny, arithmetic: Arithmetic, seed: u64) {
    let mut model = model(tiny, arithmetic);
    let limits = model.limits();
    let mut dice = Dice::new(seed);
    let mut streams: Vec<Stream> = [7, 300, 64, 1, 129, 33, 210]
        .map(|length| {
            let tokens = dice.tokens(length, limits.vocabulary);
            let cuts = whole(&model, length);
            let expected = feed(&mut model, &tokens, &cuts);
            Stream { tokens, expected, sequence: model.open().unwrap(), at: 0 }
        })
        .into();
    while streams.iter().any(|s| s.at < s.tokens.len()) {
        let mut batch = Batch::default();
        let mut parts = Vec::new();
        let mut rows = 0;
        for (index, stream) in streams.iter().enumerate() {
            let left = stream.tokens.len() - stream.at;
            if left == 0 || dice.below(4) == 0 {
                continue;
            }
            let most = [1, 1, 5, 100][dice.below(4)].min(left);
            let sure = 1 + dice.below(most);
            let right = dice.below(limits.drafts + 1).min(left - sure);
            if rows + sure + right > limits.rows {
                continue;
            }
            rows += sure + right;
            let range = stream.at..stream.at + sure;
            batch.spans.push(Span {
                sequence: stream.sequence,
                sure: stream.tokens[range.clone()].to_vec(),
                drafts: stream.tokens[range.end..range.end + right].to_vec(),
                want: Want::All,
            });
            parts.push((index, sure + right, right));
        }
        let logits = model.forward(&batch).unwrap();
        let mut row = 0;
        for (index, rows, accepted) in parts {
            let stream = &mut streams[index];
            for offset in 0..rows {
                let what = format!(
                    "{tiny:?} {arithmetic:?} seed {seed}: stream {index}, row {}",
                    stream.at + offset
                );
                assert_same(&what, &bits(logits.row(row + offset)), &stream.expected[stream.at + offset]);
            }
            row += rows;
            stream.at += rows;
            model.commit(stream.sequence, accepted).unwrap();
        }
    }
}

#[test]
fn ragged_spans_in_one_forward_give_each_sequence_its_own_bits() {
    for tiny in TINY {
        for arithmetic in arithmetics() {
            for seed in 20..23 {
                check(tiny, arithmetic, seed);
            }
        }
    }
}
