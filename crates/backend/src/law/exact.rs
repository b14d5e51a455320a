//! True results in float64, with bounds that follow from the depth of a sum.
//!
//! A bound is never a guessed tolerance: `depth · 2^-24` times the sum of the magnitudes that were added, plus the
//! roundings of what follows. That it means something is shown each time: the result of a slightly wrong operation and
//! the result of another row must lie outside it.

use super::Session;
use super::rows::{RowCase, RowWords};
use crate::Backend;

/// Half a unit in the last place of 1: the relative error of one rounding.
pub(super) const U: f64 = 1.0 / (1 << 24) as f64;
/// Relative error of a backend's `exp`, `sigmoid` or `softplus`: four units in the last place.
pub(super) const FUNCTION: f64 = 8.0 * U;
/// The smallest normal fp32 number: roundings below it are absolute.
pub(super) const TINY: f64 = f32::MIN_POSITIVE as f64;

/// The true value of one output.
#[derive(Clone, Copy, Debug)]
pub(super) enum Exact {
    /// Within `slack` of `value`.
    Near { value: f64, slack: f64 },
    /// These bits.
    Bits(u32),
}

impl Exact {
    /// A value that is computed with a relative error.
    pub(super) fn relative(value: f64, error: f64) -> Self {
        Self::Near { value, slack: value.abs() * error + TINY }
    }

    /// The bits of a value.
    pub(super) fn value(value: f32) -> Self {
        Self::Bits(value.to_bits())
    }

    /// Whether a backend may give `word`.
    pub(super) fn allows(self, word: u32) -> bool {
        match self {
            Self::Bits(bits) => bits == word,
            Self::Near { value, slack } => {
                let found = f64::from(f32::from_bits(word));
                // One more rounding: that of the output itself.
                let bound = slack + (value.abs() + slack) * U + TINY;
                (found - value).abs() <= bound
                    || (found.is_infinite() && value.abs() + slack >= f64::from(f32::MAX))
            }
        }
    }
}

/// The rounding depth that a sum over `terms` may have: groups of 64 in one chain, then one chain of groups, folds.
pub(super) fn depth(terms: usize) -> f64 {
    64.0 + terms.div_ceil(64) as f64 + 8.0
}

/// `x / sqrt(mean(x²) + epsilon)`'s factor, and its relative error.
pub(super) fn rms_factor(x: &[f64], epsilon: f64) -> (f64, f64) {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    (1.0 / (mean + epsilon).sqrt(), (depth(x.len()) + 6.0) * U)
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Checks the outputs of a pool of rows against the truth, and that a wrong truth does not pass.
pub(super) fn check_exact<B: Backend>(
    session: &mut Session,
    case: &impl RowCase<B>,
    pool: &[RowWords],
    found: &[RowWords],
) {
    let truths = |reading: usize, mutated: bool| -> Vec<Vec<Vec<Exact>>> {
        pool.iter().map(|row| case.exact(row, reading, mutated)).collect()
    };
    let stored: Vec<_> = pool.iter().filter_map(|row| case.stored(row)).collect();
    if let Some(difference) = (!stored.is_empty()).then(|| first_outside(&stored, found, 0)).flatten() {
        session.inexact(&difference);
        return;
    }
    let mut outside = None;
    for reading in 0..case.readings() {
        let exact = truths(reading, false);
        let Some(difference) = first_outside(&exact, found, 0) else {
            show_teeth(session, &exact, &truths(reading, true), found);
            return;
        };
        outside = outside.or(Some(difference));
    }
    if let Some(difference) = outside {
        session.inexact(&difference);
    }
}

/// Checks rows whose truth was computed for all of them at once.
pub(super) fn check_truths(
    session: &mut Session,
    exact: &[Vec<Vec<Exact>>],
    mutated: &[Vec<Vec<Exact>>],
    found: &[RowWords],
) {
    match first_outside(exact, found, 0) {
        None => show_teeth(session, exact, mutated, found),
        Some(difference) => session.inexact(&difference),
    }
}

/// A wrong operation and another row's result must lie outside the bounds.
fn show_teeth(
    session: &mut Session,
    exact: &[Vec<Vec<Exact>>],
    mutated: &[Vec<Vec<Exact>>],
    found: &[RowWords],
) {
    if first_outside(mutated, found, 0).is_none() {
        session.toothless("a mutated operation");
    }
    if found.len() > 1 && first_outside(exact, found, 1).is_none() {
        session.toothless("the result of another row");
    }
}

/// An output that its truth does not allow.
pub(super) struct Difference {
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) exact: Exact,
    pub(super) word: u32,
}

/// The first output that its truth does not allow, the truths taken `shift` rows later.
fn first_outside(exact: &[Vec<Vec<Exact>>], found: &[RowWords], shift: usize) -> Option<Difference> {
    for (row, ports) in found.iter().enumerate() {
        let truth = &exact[(row + shift) % exact.len()];
        for (truth, words) in truth.iter().zip(ports) {
            for (column, (&exact, &word)) in truth.iter().zip(words).enumerate() {
                if !exact.allows(word) {
                    return Some(Difference { row, column, exact, word });
                }
            }
        }
    }
    None
}
