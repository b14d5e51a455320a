//! Ways to feed a model, and how their results are compared.

use flint_model::{Batch, LanguageModel, SequenceId, Span, Want};

/// A small deterministic generator for tokens, cuts and schedules.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end.max(1) as u64) as usize
    }

    /// `count` tokens of a vocabulary.
    pub fn tokens(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocabulary) as u32).collect()
    }

    /// Cuts `len` into pieces of 1 to `most`.
    pub fn cuts(&mut self, len: usize, most: usize) -> Vec<usize> {
        let mut cuts = Vec::new();
        let mut left = len;
        while left > 0 {
            let piece = 1 + self.below(most.min(left));
            cuts.push(piece);
            left -= piece;
        }
        cuts
    }
}

/// Logits as bits: what "the same" means.
pub type Bits = Vec<u32>;

/// The bits of logits.
pub fn bits(logits: &[f32]) -> Bits {
    logits.iter().map(|v| v.to_bits()).collect()
}

/// Says where two rows of logits differ first.
///
pub fn assert_same(what: &str, found: &[u32], expected: &[u32]) {
    assert_eq!(found.len(), expected.len(), "{what}: number of logits");
    let differ = found.iter().zip(expected).filter(|(a, b)| a != b).count();
    if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
        let (a, b) = (f32::from_bits(found[at]), f32::from_bits(expected[at]));
        panic!(
            "{what}: {differ} of {} logits differ, first at {at}: {a:e} where {b:e} is expected",
            found.len()
        );
    }
}

/// Appends sure tokens to a sequence and commits them; logits of every row.
pub fn append(model: &mut dyn LanguageModel, sequence: SequenceId, tokens: &[u32]) -> Vec<Bits> {
    let span = Span { sequence, sure: tokens.to_vec(), drafts: vec![], want: Want::All };
    let logits = model.forward(&Batch { spans: vec![span] }).unwrap();
    model.commit(sequence, 0).unwrap();
    (0..logits.rows()).map(|row| bits(logits.row(row))).collect()
}

/// Feeds tokens to an open sequence in pieces; logits of every row.
pub fn append_cut(
    model: &mut dyn LanguageModel,
    sequence: SequenceId,
    tokens: &[u32],
    cuts: &[usize],
) -> Vec<Bits> {
    let mut rows = Vec::new();
    let mut at = 0;
    for cut in cuts {
        rows.extend(append(model, sequence, &tokens[at..at + cut]));
        at += cut;
    }
    assert_eq!(at, tokens.len());
    rows
}

/// Feeds tokens to a fresh sequence in pieces and closes it; logits of every row.
pub fn feed(model: &mut dyn LanguageModel, tokens: &[u32], cuts: &[usize]) -> Vec<Bits> {
    let sequence = model.open().unwrap();
    let rows = append_cut(model, sequence, tokens, cuts);
    model.close(sequence).unwrap();
    rows
}

/// The largest piece that one forward takes, repeated.
pub fn whole(model: &dyn LanguageModel, len: usize) -> Vec<usize> {
    let rows = model.limits().rows;
    let mut cuts = vec![rows; len / rows];
    if !len.is_multiple_of(rows) {
        cuts.push(len % rows);
    }
    cuts
}

/// The best token: highest logit, then lowest id.
pub fn best(logits: &[u32]) -> u32 {
    let mut best = 0;
    for (id, bits) in logits.iter().enumerate() {
        if f32::from_bits(*bits) > f32::from_bits(logits[best]) {
            best = id;
        }
    }
    best as u32
}

/// Greedy tokens after a prompt: the first comes from the prompt's last row, each next one from the one before.
/// Also the logits that each step's token gave.
pub fn greedy(model: &mut dyn LanguageModel, prompt: &[u32], steps: usize) -> (Vec<u32>, Vec<Bits>) {
    let sequence = model.open().unwrap();
    let cuts = whole(model, prompt.len());
    let mut last = append_cut(model, sequence, prompt, &cuts).pop().unwrap();
    let (mut tokens, mut logits) = (vec![best(&last)], Vec::new());
    for _ in 0..steps {
        last = append(model, sequence, &[tokens[tokens.len() - 1]]).pop().unwrap();
        tokens.push(best(&last));
        logits.push(last.clone());
    }
    model.close(sequence).unwrap();
    (tokens, logits)
}
