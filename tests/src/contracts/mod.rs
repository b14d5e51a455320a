//! The whole-program contracts as functions over any model: the tests hold the CPU's arithmetics to them, `gpu` a device.
//!
//! Each panics where the contract is broken; `label` names the model in the message.

mod panel;
mod soak;

use flint_model::{Batch, Best, LanguageModel, SequenceId, Span, Want};

use crate::feeding::{Bits, Dice, append, append_cut, assert_same, best, bits, feed, whole};
use crate::goldens::{Goldens, assert_close, floats};

pub use panel::{REFERENCE, panel_score};
pub use soak::soak;

/// Longer than the selection's switch-over and than one page of every tiny model.
const LENGTH: usize = 330;

/// Pieces of one prompt: single rows, wide parts, and both after one another.
const PIECES: [usize; 6] = [1, 90, 2, 1, 150, 16];

/// Chunked == whole: cutting a prompt anywhere changes no bit of any row.
pub fn chunked(model: &mut dyn LanguageModel, label: &str) {
    let mut dice = Dice::new(1);
    let tokens = dice.tokens(LENGTH, model.limits().vocabulary);
    let cuts = whole(model, LENGTH);
    let expected = feed(model, &tokens, &cuts);
    let mut schedules = vec![vec![1; LENGTH], vec![17; 19].into_iter().chain([7]).collect()];
    schedules.extend([3, 16, 64, 255].map(|first| vec![first, LENGTH - first]));
    schedules.extend((0..6).map(|_| dice.cuts(LENGTH, 90)));
    for cuts in schedules {
        for (row, found) in feed(model, &tokens, &cuts).iter().enumerate() {
            assert_same(&format!("{label} cut as {cuts:?}, row {row}"), found, &expected[row]);
        }
    }
}

/// The best logits that a model hands out alone are those of the whole rows, in forwards of any size.
pub fn best_alone(model: &mut dyn LanguageModel, label: &str) {
    let mut dice = Dice::new(9);
    let tokens = dice.tokens(120, model.limits().vocabulary);
    let [whole, alone] = [model.open().unwrap(), model.open().unwrap()];
    let mut at = 0;
    while at < tokens.len() {
        let rows = (1 + dice.below(24)).min(tokens.len() - at);
        let want = [Want::All, Want::Next, Want::Nothing][dice.below(3)];
        let sure = tokens[at..at + rows].to_vec();
        let batch =
            |sequence| Batch { spans: vec![Span { sequence, sure: sure.clone(), drafts: Vec::new(), want }] };
        let logits = model.forward(&batch(whole)).unwrap();
        let found = model.forward_best(&batch(alone)).unwrap();
        let expected: Vec<Best> = (0..logits.rows()).filter_map(|row| Best::of(logits.row(row))).collect();
        assert_eq!(found, expected, "{label}: {rows} rows from {at}");
        for sequence in [whole, alone] {
            model.commit(sequence, 0).unwrap();
        }
        at += rows;
    }
    for sequence in [whole, alone] {
        model.close(sequence).unwrap();
    }
}

/// Drafted == plain: feeds tokens in spans of random sure tokens and drafts, of which a random number is true (and
/// accepted) and the rest is not. The logits of every row whose prefix is true must be the plain run's.
pub fn drafted(model: &mut dyn LanguageModel, label: &str, length: usize, seed: u64) {
    let limits = model.limits();
    let mut dice = Dice::new(seed);
    let tokens = dice.tokens(length, limits.vocabulary);
    let cuts = whole(model, length);
    let expected = feed(model, &tokens, &cuts);
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
            let what = format!("{label} seed {seed}: row {}", at + row);
            assert_same(&what, &bits(logits.row(row)), &expected[at + row]);
        }
        model.commit(sequence, right).unwrap();
        at += sure + right;
    }
    assert_eq!(model.length(sequence).unwrap(), length);
    model.close(sequence).unwrap();
}

/// Resumed == fresh: a sequence that was saved and loaded at any of `lengths` goes on with the same bits.
pub fn resumed(model: &mut dyn LanguageModel, label: &str, lengths: &[usize]) {
    const LENGTH: usize = 310;
    let tokens = Dice::new(5).tokens(LENGTH, model.limits().vocabulary);
    let cuts = whole(model, LENGTH);
    let expected = feed(model, &tokens, &cuts);
    for &length in lengths {
        let sequence = model.open().unwrap();
        append(model, sequence, &tokens[..length]);
        let saved = model.save(sequence).unwrap();
        model.close(sequence).unwrap();
        let sequence = model.load(&saved).unwrap();
        assert_eq!(model.length(sequence).unwrap(), length);
        assert_eq!(model.save(sequence).unwrap(), saved, "{label}: saving again gives the same bytes");
        let end = (length + 20).min(LENGTH);
        let rows = append_cut(model, sequence, &tokens[length..end], &[1, end - length - 1]);
        for (row, found) in rows.iter().enumerate() {
            let what = format!("{label} resumed at {length}, row {}", length + row);
            assert_same(&what, found, &expected[length + row]);
        }
        model.close(sequence).unwrap();
    }
}

struct Stream {
    tokens: Vec<u32>,
    expected: Vec<Bits>,
    sequence: SequenceId,
    at: usize,
}

/// Concurrent == solo: ragged spans of different lengths in one forward give each sequence the bits it has alone.
pub fn concurrent(model: &mut dyn LanguageModel, label: &str, seed: u64) {
    let mut dice = Dice::new(seed);
    let mut streams: Vec<Stream> = Vec::new();
    for length in [7, 300, 64, 1, 129, 33, 210] {
        let tokens = dice.tokens(length, model.limits().vocabulary);
        let cuts = whole(model, length);
        let expected = feed(model, &tokens, &cuts);
        streams.push(Stream { tokens, expected, sequence: model.open().unwrap(), at: 0 });
    }
    while streams.iter().any(|s| s.at < s.tokens.len()) {
        let (batch, parts) = ragged_batch(&streams, &mut dice, model);
        let logits = model.forward(&batch).unwrap();
        let mut row = 0;
        for (index, rows, accepted) in parts {
            let stream = &mut streams[index];
            for offset in 0..rows {
                let what = format!("{label} seed {seed}: stream {index}, row {}", stream.at + offset);
                assert_same(&what, &bits(logits.row(row + offset)), &stream.expected[stream.at + offset]);
            }
            row += rows;
            stream.at += rows;
            model.commit(stream.sequence, accepted).unwrap();
        }
    }
    for stream in streams {
        model.close(stream.sequence).unwrap();
    }
}

/// Some of the streams' next tokens, sure and as drafts; for each span its stream, rows and right drafts.
fn ragged_batch(
    streams: &[Stream],
    dice: &mut Dice,
    model: &dyn LanguageModel,
) -> (Batch, Vec<(usize, usize, usize)>) {
    let limits = model.limits();
    let (mut batch, mut parts, mut rows) = (Batch::default(), Vec::new(), 0);
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
    (batch, parts)
}

/// The bits of a prompt that is fed in uneven pieces: what two ways of running one arithmetic must agree on.
pub fn pieces(model: &mut dyn LanguageModel) -> Vec<Bits> {
    let tokens = Dice::new(11).tokens(PIECES.iter().sum(), model.limits().vocabulary);
    feed(model, &tokens, &PIECES)
}

/// The same, shorter: for tools under which a launch takes long.
pub fn few_pieces(model: &mut dyn LanguageModel) -> Vec<Bits> {
    const PIECES: [usize; 3] = [1, 17, 2];
    let tokens = Dice::new(11).tokens(PIECES.iter().sum(), model.limits().vocabulary);
    feed(model, &tokens, &PIECES)
}

/// Two ways of running one arithmetic give the same bits.
pub fn same_pieces(label: &str, found: &[Bits], expected: &[Bits]) {
    assert_eq!(found.len(), expected.len(), "{label}: rows");
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_same(&format!("{label}, row {row}"), found, expected);
    }
}

/// The trained model says what the reference says: greedy text of every golden prompt; the logits too where they are
/// firm and `tolerance` is given.
pub fn golden_text(model: &mut dyn LanguageModel, label: &str, tolerance: Option<f32>) {
    let folder = crate::root().join("tests/fixtures/flint_tiny");
    let goldens = Goldens::open(&folder.join("flint_tiny_mlx.safetensors"));
    let text = std::fs::read_to_string(folder.join("flint_tiny_mlx.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    for prompt in json["prompts"].as_array().unwrap() {
        let id = prompt["id"].as_str().unwrap();
        let ids = goldens.tokens(&format!("{id}.prompt_ids"));
        let expected = goldens.tokens(&format!("{id}.greedy.tokens"));
        let sequence = model.open().unwrap();
        let cuts = whole(model, ids.len());
        let mut rows = append_cut(model, sequence, &ids, &cuts);
        let mut found = vec![best(&rows[ids.len() - 1])];
        while found.len() < expected.len() {
            rows.extend(append(model, sequence, &[found[found.len() - 1]]));
            found.push(best(&rows[rows.len() - 1]));
        }
        model.close(sequence).unwrap();
        assert_eq!(found, expected, "{id} {label}: greedy tokens");
        let firm = prompt["logits_firm"].as_bool().unwrap();
        if let Some(tolerance) = tolerance.filter(|_| firm) {
            let positions = goldens.tokens(&format!("{id}.logits.positions"));
            let kept: Vec<f32> = positions.iter().flat_map(|p| floats(&rows[*p as usize])).collect();
            assert_close(id, &kept, &goldens.floats(&format!("{id}.logits")), tolerance);
        }
    }
}
