//! Laws of the feed-forward blocks' own operations.

use super::Session;
use super::exact::{Exact, FUNCTION, U, sigmoid};
use super::rows::{FEW_ROWS, Port, ROWS, RowCase, RowWords, Temper, Vector, check_rows, reals, words};
use super::seed::Seed;
use crate::ops::{Combine, Route, SwiGlu};
use crate::{Backend, Result, Rows};

struct SwiGluCase {
    width: usize,
    limit: f32,
    in_place: bool,
}

impl<B: Backend> RowCase<B> for SwiGluCase {
    fn label(&self) -> String {
        format!("width {}, limit {}{}", self.width, self.limit, if self.in_place { ", in place" } else { "" })
    }

    fn ports(&self) -> Vec<Port> {
        let mut ports = vec![Port::input(self.width), Port::input(self.width), Port::output(self.width)];
        if self.in_place {
            ports.truncate(2);
            ports[0] = Port::in_place(self.width);
        }
        ports
    }

    fn row(&self, seed: &mut Seed, temper: Temper) -> RowWords {
        // Wide enough that both clamps act on plain rows.
        let values = |seed: &mut Seed| {
            if temper == Temper::Plain {
                seed.normals(self.width, self.limit)
            } else {
                temper.values(seed, self.width)
            }
        };
        vec![words(&values(seed)), words(&values(seed))]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let (Some(gate), Some(up)) = (ports.first(), ports.get(1)) else { return Ok(()) };
        let out = ports.get(2).unwrap_or(gate).clone();
        backend.swiglu(&SwiGlu { out, gate: gate.clone(), up: up.clone(), limit: self.limit })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let (gate, up) = (reals(&row[0]), reals(&row[1]));
        let limit = f64::from(self.limit) * if mutated { 1.01 } else { 1.0 };
        let value = |(gate, up): (&f64, &f64)| {
            let gate = gate.min(limit);
            Exact::relative(gate * sigmoid(gate) * up.clamp(-limit, limit), FUNCTION + 2.0 * U)
        };
        vec![gate.iter().zip(&up).map(value).collect()]
    }
}

/// Laws of `swiglu`.
pub(crate) fn swiglu<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    check_rows(backend, session, &SwiGluCase { width: 80, limit: 10.0, in_place: false }, ROWS)?;
    check_rows(backend, session, &SwiGluCase { width: 37, limit: 2.0, in_place: true }, ROWS)?;
    check_rows(backend, session, &SwiGluCase { width: 2048, limit: 10.0, in_place: true }, FEW_ROWS)
}

struct RouteCase<B: Backend> {
    experts: usize,
    picks: usize,
    groups: usize,
    kept: usize,
    normalise: bool,
    bias: Vector<B>,
}

const SCALING: f32 = 2.5;

impl<B: Backend> RouteCase<B> {
    /// The picked experts, ascending: score descending, expert ascending. Equal logits with equal biases tie exactly.
    fn picks(&self, logits: &[f64]) -> Vec<usize> {
        let score = |expert: usize| sigmoid(logits[expert]) + self.bias.value(expert);
        let better = |&a: &usize, &b: &usize| score(b).total_cmp(&score(a)).then(a.cmp(&b));
        let size = self.experts / self.groups;
        let group_score = |group: usize| {
            let mut members: Vec<usize> = (group * size..(group + 1) * size).collect();
            members.sort_by(better);
            members.iter().take(2).map(|&expert| score(expert)).sum::<f64>()
        };
        let mut groups: Vec<usize> = (0..self.groups).collect();
        groups.sort_by(|&a, &b| group_score(b).total_cmp(&group_score(a)).then(a.cmp(&b)));
        let mut candidates: Vec<usize> =
            groups.iter().take(self.kept).flat_map(|group| group * size..(group + 1) * size).collect();
        candidates.sort_by(better);
        candidates.truncate(self.picks);
        candidates.sort_unstable();
        candidates
    }
}

impl<B: Backend> RowCase<B> for RouteCase<B> {
    fn label(&self) -> String {
        let Self { experts, picks, groups, kept, normalise, .. } = self;
        format!("{picks} of {experts} experts, {kept} of {groups} groups, normalise {normalise}")
    }

    fn ports(&self) -> Vec<Port> {
        vec![Port::input(self.experts), Port::output(self.picks).words(), Port::output(self.picks)]
    }

    fn tempers(&self) -> &'static [Temper] {
        &[Temper::Tied, Temper::Zero]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [logits, picks, weights] = ports else { return Ok(()) };
        backend.route(&Route {
            picks: picks.buffer.clone(),
            weights: weights.clone(),
            logits: logits.clone(),
            bias: self.bias.buffer.clone(),
            picks_per_row: self.picks,
            groups: self.groups,
            groups_kept: self.kept,
            normalise: self.normalise,
            scaling: SCALING,
        })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let logits = reals(&row[0]);
        let picks = self.picks(&logits);
        let total: f64 = picks.iter().map(|&expert| sigmoid(logits[expert])).sum();
        let divisor = if self.normalise { total + f64::from(1e-20f32) } else { 1.0 };
        let scaling = f64::from(SCALING) * if mutated { 1.01 } else { 1.0 };
        let error = 2.0 * FUNCTION + (self.picks as f64 + 3.0) * U;
        let weight = |&expert: &usize| Exact::relative(sigmoid(logits[expert]) / divisor * scaling, error);
        let weights = picks.iter().map(weight).collect();
        vec![picks.iter().map(|&expert| Exact::Bits(expert as u32)).collect(), weights]
    }
}

/// Laws of `route`.
pub(crate) fn route<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(42);
    for (experts, picks, groups, kept, normalise) in
        [(16, 4, 1, 1, true), (24, 3, 4, 2, true), (16, 2, 2, 1, false), (288, 8, 1, 1, true)]
    {
        // Biases from few values, so that tied logits give tied scores.
        let bias = (0..experts).map(|_| seed.below(2) as f32 * 0.25 + 1.0).collect();
        let bias = Vector::new(backend, bias)?;
        check_rows(backend, session, &RouteCase { experts, picks, groups, kept, normalise, bias }, ROWS)?;
    }
    Ok(())
}

struct CombineCase {
    hidden: usize,
    picks: usize,
}

impl<B: Backend> RowCase<B> for CombineCase {
    fn label(&self) -> String {
        format!("{} experts of width {}", self.picks, self.hidden)
    }

    fn ports(&self) -> Vec<Port> {
        vec![
            Port::input(self.picks * self.hidden).dense(),
            Port::input(self.picks),
            Port::input(self.hidden),
            Port::output(self.hidden),
        ]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], rows: usize) -> Result<()> {
        let [pairs, weights, shared, out] = ports else { return Ok(()) };
        backend.combine(&Combine {
            out: out.clone(),
            pairs: Rows::dense(&pairs.buffer, rows * self.picks, self.hidden),
            weights: weights.clone(),
            shared: shared.clone(),
        })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let (pairs, weights, shared) = (reals(&row[0]), reals(&row[1]), reals(&row[2]));
        let value = |at: usize| {
            let terms = weights.iter().enumerate().map(|(j, weight)| weight * pairs[j * self.hidden + at]);
            let shared = shared[at] * if mutated { 1.01 } else { 1.0 };
            let (value, magnitude) =
                terms.fold((shared, shared.abs()), |(v, m), term| (v + term, m + term.abs()));
            Exact::Near { value, slack: magnitude * (self.picks as f64 + 2.0) * U }
        };
        vec![(0..self.hidden).map(value).collect()]
    }
}

/// Laws of `combine`.
pub(crate) fn combine<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    check_rows(backend, session, &CombineCase { hidden: 40, picks: 4 }, ROWS)?;
    check_rows(backend, session, &CombineCase { hidden: 37, picks: 1 }, FEW_ROWS)?;
    check_rows(backend, session, &CombineCase { hidden: 4096, picks: 8 }, FEW_ROWS)
}
