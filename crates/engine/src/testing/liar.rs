//! A drafter that lies at random.

use crate::{Drafter, noise::mix};

/// Knows whole texts and proposes how they go on, except where it lies: wrong tokens, tokens that do not exist, proposals
/// that are too short, too long or empty. All from a seed.
#[derive(Clone, Debug)]
pub struct Liar {
    texts: Vec<Vec<u32>>,
    state: u64,
}

impl Liar {
    /// `texts` are prompts with their replies.
    pub fn new(seed: u64, texts: Vec<Vec<u32>>) -> Self {
        Self { texts, state: seed }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state) % below
    }
}

impl Drafter for Liar {
    fn propose(&mut self, history: &[u32], max: usize) -> Vec<u32> {
        let texts = self.texts.iter().filter(|text| text.starts_with(history));
        let truth: Vec<u32> =
            texts.max_by_key(|text| text.len()).map_or(&[][..], |text| &text[history.len()..]).to_vec();
        let length = self.random(max as u64 + 3) as usize;
        let mut proposal = Vec::with_capacity(length);
        for index in 0..length {
            let token = match (self.random(8), truth.get(index)) {
                (0 | 1, _) => self.random(100) as u32,
                (2, _) if self.random(4) == 0 => u32::MAX,
                (_, Some(&token)) => token,
                (_, None) => self.random(100) as u32,
            };
            proposal.push(token);
        }
        proposal
    }
}
