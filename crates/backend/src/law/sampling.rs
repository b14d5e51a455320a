//! Laws of the operations between logits and a token.

use super::Session;
use super::exact::Exact;
use super::rows::{FEW_ROWS, Port, ROWS, RowCase, RowWords, Temper, check_rows, words};
use super::seed::Seed;
use crate::ops::TopLogits;
use crate::{Backend, Result, Rows};

struct TopCase {
    vocabulary: usize,
    count: usize,
    /// Whether plain rows hold what a sort gets wrong: ties, both zeros, infinities, NaN of both signs.
    odd: bool,
}

impl TopCase {
    /// Ids in the order that the operation promises; `mutated` breaks ties the other way.
    fn order(logits: &[u32], mutated: bool) -> Vec<usize> {
        let value = |id: usize| f32::from_bits(logits[id]);
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        ids.sort_by(|&a, &b| {
            let (x, y) = (value(a), value(b));
            let by_value = match (x.is_nan(), y.is_nan()) {
                (false, false) => y.partial_cmp(&x).unwrap_or(std::cmp::Ordering::Equal),
                (x, y) => y.cmp(&x),
            };
            by_value.then(if mutated { b.cmp(&a) } else { a.cmp(&b) })
        });
        ids
    }

    /// Logits that tie, and everything that has a place of its own in the order.
    fn odd_logits(&self, seed: &mut Seed) -> Vec<f32> {
        let mut logits: Vec<f32> =
            (0..self.vocabulary).map(|_| (seed.below(9) as f32 - 4.0) * 0.25).collect();
        let special =
            [-0.0, 0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::MAX, 1e-40, -1e-40];
        for value in special {
            for _ in 0..seed.below(3) {
                logits[seed.below(self.vocabulary)] = value;
            }
        }
        logits
    }
}

impl<B: Backend> RowCase<B> for TopCase {
    fn label(&self) -> String {
        format!("{} of {}{}", self.count, self.vocabulary, if self.odd { ", odd" } else { "" })
    }

    fn ports(&self) -> Vec<Port> {
        vec![Port::input(self.vocabulary), Port::output(self.count).words(), Port::output(self.count)]
    }

    fn row(&self, seed: &mut Seed, temper: Temper) -> RowWords {
        let logits = if self.odd && temper == Temper::Plain {
            self.odd_logits(seed)
        } else {
            temper.values(seed, self.vocabulary)
        };
        vec![words(&logits)]
    }

    fn tempers(&self) -> &'static [Temper] {
        &[Temper::Tied, Temper::Zero, Temper::Infinite]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [logits, ids, values] = ports else { return Ok(()) };
        backend.top_logits(&TopLogits {
            ids: ids.buffer.clone(),
            values: values.clone(),
            logits: logits.clone(),
            count: self.count,
        })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let order = Self::order(&row[0], mutated);
        let best = || order.iter().take(self.count);
        let ids = best().map(|&id| Exact::Bits(id as u32)).collect();
        vec![ids, best().map(|&id| Exact::Bits(row[0][id])).collect()]
    }
}

/// Laws of `top_logits`.
pub(crate) fn top_logits<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    for (vocabulary, count, odd, counts) in [
        (40, 1, true, ROWS),
        (200, 64, true, ROWS),
        (7, 7, true, FEW_ROWS),
        (5000, 20, false, FEW_ROWS),
        (20_000, 64, true, FEW_ROWS),
    ] {
        check_rows(backend, session, &TopCase { vocabulary, count, odd }, counts)?;
    }
    Ok(())
}
