//! The decided tokens of one sequence, and what the penalties count of them.

use std::collections::HashMap;

/// Prompt and reply so far. Only decided tokens ever enter, so nothing is ever taken back.
#[derive(Clone, Debug)]
pub(crate) struct History {
    tokens: Vec<u32>,
    prompt: usize,
    /// Times that the reply holds a token, 0 for one that only the prompt holds. Kept for requests with penalties only.
    seen: Option<HashMap<u32, u32>>,
}

impl History {
    /// Starts a history from a prompt; `counted` when a penalty will ask for counts.
    pub(crate) fn new(prompt: Vec<u32>, counted: bool) -> Self {
        let seen = counted.then(|| prompt.iter().map(|&token| (token, 0)).collect());
        Self { prompt: prompt.len(), tokens: prompt, seen }
    }

    /// Appends a token of the reply.
    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        if let Some(seen) = &mut self.seen {
            *seen.entry(token).or_insert(0) += 1;
        }
    }

    /// Every token, prompt first.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens, prompt and reply: the absolute position of the token that comes next.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens of the prompt.
    pub(crate) fn prompt(&self) -> usize {
        self.prompt
    }

    /// Each distinct token with the times that the reply holds it, in no order.
    pub(crate) fn seen(&self) -> impl Iterator<Item = (u32, u32)> {
        self.seen.iter().flatten().map(|(&token, &count)| (token, count))
    }
}
