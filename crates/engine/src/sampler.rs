//! One logit row to one token.
//!
//! A draw is a function of the row, the request's rules, its history, its seed and the token's absolute position. It holds
//! no state but scratch memory. Every choice is made in a total order (larger first, then lower id), every sum runs in an
//! order that the row alone fixes, and all arithmetic is f64 by [`math`](crate::math), so equal rows give equal tokens on
//! every machine.
//!
//! A row with a NaN, or with nothing but `-inf`, has no token. Among several `+inf` logits the probability is shared.

use std::{cmp::Ordering, collections::BinaryHeap};

use crate::{
    Error, Sampling, TokenLogprobs,
    history::History,
    math::{exp, ln},
    noise::{Noise, gumbel, gumbel_bound},
};

/// Draws tokens. Keeps one row of scratch memory, `[vocabulary]` f64.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    row: Vec<f64>,
}

/// A token that may be drawn. The order puts the better one first: larger score, then lower id.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    score: f64,
    token: u32,
}

impl Eq for Candidate {}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        other.score.total_cmp(&self.score).then(self.token.cmp(&other.token))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Sampler {
    /// Draws the token that follows `history`. `logits` is `[vocabulary]`.
    pub(crate) fn draw(&mut self, logits: &[f32], rules: &Sampling, history: &History) -> Result<u32, Error> {
        let greedy = rules.temperature == 0.0;
        if greedy && rules.logit_bias.is_empty() && !rules.has_penalties() {
            return largest(logits.iter().copied(), history.len()).map(|(token, _)| token);
        }
        self.adjust(logits, rules, history);
        let (token, score) = largest(self.row.iter().copied(), history.len())?;
        if greedy {
            return Ok(token);
        }
        self.scale(score, f64::from(rules.temperature));
        Ok(self.sample(rules, Noise::new(rules.seed, history.len()), token))
    }

    /// Log-probabilities of `chosen` and of the `count` best tokens, from the row as the model made it.
    ///
    /// The row must be one that [`draw`](Self::draw) accepts.
    pub(crate) fn logprobs(&mut self, logits: &[f32], chosen: u32, count: usize) -> TokenLogprobs {
        self.copy(logits);
        let best = best(&self.row, f64::NEG_INFINITY, count);
        let most = self.row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        self.scale(most, 1.0);
        let total = ln(mass(&self.row, f64::NEG_INFINITY));
        let of = |token: u32| self.row.get(token as usize).map_or(f32::NAN, |score| (score - total) as f32);
        TokenLogprobs {
            chosen: of(chosen),
            top: best.iter().map(|candidate| (candidate.token, of(candidate.token))).collect(),
        }
    }

    fn copy(&mut self, logits: &[f32]) {
        self.row.clear();
        // Adding zero makes -0.0 and 0.0 one number, as they are for every comparison of the draw.
        self.row.extend(logits.iter().map(|&logit| f64::from(logit) + 0.0));
    }

    /// Bias, then the penalties. In f64 no finite logit can become infinite by them.
    fn adjust(&mut self, logits: &[f32], rules: &Sampling, history: &History) {
        self.copy(logits);
        for &(token, bias) in &rules.logit_bias {
            if let Some(logit) = self.row.get_mut(token as usize) {
                *logit += f64::from(bias);
            }
        }
        if !rules.has_penalties() {
            return;
        }
        let repetition = f64::from(rules.repetition_penalty);
        for (token, count) in history.seen() {
            let Some(logit) = self.row.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            if count > 0 {
                *logit -= f64::from(rules.frequency_penalty) * f64::from(count);
                *logit -= f64::from(rules.presence_penalty);
            }
        }
    }

    /// Makes the row `(logit - most) / temperature`: the best token has 0, the weight of a token is `exp` of it.
    fn scale(&mut self, most: f64, temperature: f64) {
        if most == f64::INFINITY {
            for logit in &mut self.row {
                *logit = if *logit == f64::INFINITY { 0.0 } else { f64::NEG_INFINITY };
            }
        } else {
            for logit in &mut self.row {
                *logit = (*logit - most) / temperature;
            }
        }
    }

    /// Cuts the scaled row and draws from what is left. `likeliest` has a score of 0.
    fn sample(&self, rules: &Sampling, noise: Noise, likeliest: u32) -> u32 {
        // A weight of at least min_p of the best one's, which is 1.
        let floor = match f64::from(rules.min_p) {
            share if share >= f64::MIN_POSITIVE => ln(share),
            _ => f64::NEG_INFINITY,
        };
        let share = f64::from(rules.top_p);
        if rules.top_k > 0 && rules.top_k < self.row.len() {
            let mut kept = best(&self.row, floor, rules.top_k);
            if share < 1.0 {
                let total = kept.iter().fold(0.0, |sum, candidate| sum + exp(candidate.score));
                let count = reaching(&kept, share * total).unwrap_or(kept.len());
                kept.truncate(count);
            }
            draw_among(&kept, noise, likeliest)
        } else if share < 1.0 {
            draw_among(&nucleus(&self.row, floor, share), noise, likeliest)
        } else {
            draw_from_all(&self.row, floor, noise, likeliest)
        }
    }
}

/// The largest element and its index, the first among equals. `position` is for the error.
fn largest<T: PartialOrd + Copy + Into<f64>>(
    row: impl Iterator<Item = T>,
    position: usize,
) -> Result<(u32, f64), Error> {
    let mut nan = false;
    let mut found: Option<(u32, T)> = None;
    for (token, logit) in (0..).zip(row) {
        nan |= logit.partial_cmp(&logit).is_none();
        if found.is_none_or(|(_, most)| logit > most) {
            found = Some((token, logit));
        }
    }
    match found.map(|(token, most)| (token, most.into())) {
        _ if nan => Err(Error::Logits { position, found: "a logit is NaN" }),
        Some((_, f64::NEG_INFINITY)) => Err(Error::Logits { position, found: "every logit is -inf" }),
        Some(found) => Ok(found),
        None => Err(Error::Logits { position, found: "there are no logits" }),
    }
}

/// The `count` best of the tokens with at least `floor`, best first. `-inf` is never among them.
fn best(row: &[f64], floor: f64, count: usize) -> Vec<Candidate> {
    // The worst of the kept ones is on top; ids ascend, so a later equal never replaces an earlier one.
    let mut kept: BinaryHeap<Candidate> = BinaryHeap::new();
    for (token, &score) in (0..).zip(row) {
        if score < floor || score == f64::NEG_INFINITY {
            continue;
        }
        if kept.len() < count {
            kept.push(Candidate { score, token });
        } else if let Some(mut worst) = kept.peek_mut()
            && score > worst.score
        {
            *worst = Candidate { score, token };
        }
    }
    kept.into_sorted_vec()
}

/// The sum of weights of the tokens with at least `floor`: eight lanes by index, folded in pairs.
fn mass(row: &[f64], floor: f64) -> f64 {
    let mut lanes = [0.0; 8];
    let mut chunks = row.chunks_exact(8);
    let weight = |score: f64| if score < floor { 0.0 } else { exp(score) };
    for chunk in &mut chunks {
        for (lane, &score) in lanes.iter_mut().zip(chunk) {
            *lane += weight(score);
        }
    }
    for (lane, &score) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += weight(score);
    }
    ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
}

/// How many candidates, in order, it takes to sum up to `target`.
fn reaching(candidates: &[Candidate], target: f64) -> Option<usize> {
    let mut sum = 0.0;
    for (index, candidate) in candidates.iter().enumerate() {
        sum += exp(candidate.score);
        if sum >= target {
            return Some(index + 1);
        }
    }
    None
}

/// The fewest best tokens that hold `share` of the weight of those with at least `floor`, best first.
fn nucleus(row: &[f64], floor: f64, share: f64) -> Vec<Candidate> {
    let target = share * mass(row, floor);
    // Sorting a whole vocabulary costs more than the draw: look at the top only, twice as deep each time. The prefix that
    // comes out is the same at every depth that holds it. Below -1024 every weight is zero.
    let mut depth = 4.0;
    loop {
        let least = if -depth < floor { floor } else { -depth };
        let mut kept: Vec<Candidate> = (0..)
            .zip(row)
            .filter(|(_, score)| **score >= least)
            .map(|(token, &score)| Candidate { score, token })
            .collect();
        kept.sort_unstable();
        let count = reaching(&kept, target);
        if count.is_some() || -depth <= floor || depth > 1000.0 {
            kept.truncate(count.unwrap_or(kept.len()));
            return kept;
        }
        depth *= 2.0;
    }
}

/// Draws among a few candidates.
fn draw_among(candidates: &[Candidate], noise: Noise, likeliest: u32) -> u32 {
    candidates
        .iter()
        .map(|candidate| Candidate {
            score: candidate.score + gumbel(noise.bits(candidate.token)),
            token: candidate.token,
        })
        .min()
        .map_or(likeliest, |drawn| drawn.token)
}

/// Draws among all tokens with at least `floor`: most are ruled out by the bound of their noise.
fn draw_from_all(row: &[f64], floor: f64, noise: Noise, likeliest: u32) -> u32 {
    // The score of the likeliest is 0: starting from it, the bound rules out more.
    let mut drawn = Candidate { score: gumbel(noise.bits(likeliest)), token: likeliest };
    for (token, &score) in (0..).zip(row) {
        let bits = noise.bits(token);
        if score < floor || score + gumbel_bound(bits) < drawn.score {
            continue;
        }
        let rival = Candidate { score: score + gumbel(bits), token };
        if rival < drawn {
            drawn = rival;
        }
    }
    drawn.token
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
