//! The Seam law for operations over sequences.
//!
//! A sequence's tokens are run one at a time, alone; that run is the truth. Then they are run in every other way that an
//! engine may choose: whole, in equal cuts, and by random schedules in which several sequences travel together, drafts
//! are true or lies, and any number of true ones is accepted. Rows and state must have the same bits.

use super::exact::{Exact, check_truths};
use super::rows::{Port, RowWords, Temper, run_batch};
use super::seed::Seed;
use super::{Law, Session};
use crate::{Backend, Result, Rows};

/// Drafts that the tests' states have room for.
pub(super) const DRAFTS: usize = 4;
/// Random schedules of a case.
const SCHEDULES: usize = 6;
/// Tokens of a launch of the run that is the truth, where launches are dear.
const FEW_CUT: usize = 16;

/// A sequence's part of one launch.
pub(super) struct Part<'a, S> {
    pub(super) first_row: usize,
    /// Committed tokens before the part.
    pub(super) position: usize,
    /// Of these, drafts that were accepted after the last launch.
    pub(super) logged: usize,
    pub(super) sure: usize,
    pub(super) drafts: usize,
    pub(super) state: &'a S,
}

/// An operation over sequences, at one shape.
pub(super) trait SeamCase<B: Backend> {
    /// What a sequence keeps on the device.
    type State;

    /// Names the shape.
    fn label(&self) -> String;

    /// The arguments that have rows.
    fn ports(&self) -> Vec<Port>;

    /// The inputs of the token at `position`.
    fn token(&self, seed: &mut Seed, position: usize, temper: Temper) -> RowWords;

    /// A sequence without tokens, with room for `tokens` and for drafts; `name` tells sequences apart.
    fn open(&self, backend: &mut B, tokens: usize, name: u64) -> Result<Self::State>;

    /// Queues the operation.
    fn launch(
        &self,
        backend: &mut B,
        ports: &[Rows<B::Buffer>],
        parts: &[Part<'_, Self::State>],
    ) -> Result<()>;

    /// What the state holds after `len` tokens, the last of which was sure.
    fn state(&self, backend: &mut B, state: &Self::State, len: usize) -> Result<Vec<u32>>;

    /// The true outputs of each token, and the true state, of the sequence `name`.
    fn exact(&self, tokens: &[RowWords], name: u64, mutated: bool) -> (Vec<Vec<Vec<Exact>>>, Vec<Exact>);
}

/// The tokens of a sequence and what they give one at a time.
struct Truth {
    name: u64,
    tokens: Vec<RowWords>,
    outputs: Vec<RowWords>,
    state: Vec<u32>,
}

/// A sequence on its way.
struct Walk<'a, S> {
    truth: &'a Truth,
    state: S,
    len: usize,
    logged: usize,
}

/// One launch's rows of one sequence.
struct Step {
    walk: usize,
    sure: usize,
    drafts: usize,
    /// Drafts that are the sequence's next tokens; the others are lies.
    true_drafts: usize,
    accepted: usize,
}

/// Checks a case on sequences of `tokens` tokens.
pub(super) fn check_seams<B: Backend, C: SeamCase<B>>(
    backend: &mut B,
    session: &mut Session,
    case: &C,
    tokens: usize,
) -> Result<()> {
    session.case(case.label());
    let mut seed = Seed::new(tokens as u64);
    let few = session.few;
    let truths: Vec<Truth> = [tokens, tokens / 2 + 1, tokens - 1]
        .into_iter()
        .take(if few { 2 } else { 3 })
        .enumerate()
        .map(|(name, len)| plain_run(backend, session, case, &mut seed, len, name as u64))
        .collect::<Result<_>>()?;
    for truth in &truths {
        session.record(&truth.outputs);
        session.record(&[vec![truth.state.clone()]]);
        let (outputs, state) = case.exact(&truth.tokens, truth.name, false);
        let (mutated, mutated_state) = case.exact(&truth.tokens, truth.name, true);
        if truth.outputs.iter().flatten().next().is_some() {
            check_truths(session, &outputs, &mutated, &truth.outputs);
        }
        if !state.is_empty() {
            check_truths(session, &[vec![state]], &[vec![mutated_state]], &[vec![truth.state.clone()]]);
        }
    }
    let cuts = [2, 3, 5, 8, 16, 17, 33, 64, tokens];
    for cut in cuts.into_iter().skip(if few { cuts.len() - 1 } else { 0 }) {
        let mut walks = open_all(backend, case, &truths[..1])?;
        while walks[0].len < tokens {
            let sure = cut.min(tokens - walks[0].len);
            let step = Step { walk: 0, sure, drafts: 0, true_drafts: 0, accepted: 0 };
            run_steps(backend, session, case, &mut walks, &[step], &mut seed)?;
        }
        compare_states(backend, session, case, &walks)?;
    }
    for _ in 0..if few { 1 } else { SCHEDULES } {
        let mut walks = open_all(backend, case, &truths)?;
        while walks.iter().any(|walk| walk.len < walk.truth.tokens.len()) {
            let steps = random_steps(&walks, &mut seed);
            run_steps(backend, session, case, &mut walks, &steps, &mut seed)?;
        }
        compare_states(backend, session, case, &walks)?;
    }
    Ok(())
}

/// Runs a sequence one token at a time, alone (in larger parts where launches are dear).
fn plain_run<B: Backend, C: SeamCase<B>>(
    backend: &mut B,
    session: &mut Session,
    case: &C,
    seed: &mut Seed,
    len: usize,
    name: u64,
) -> Result<Truth> {
    let tokens: Vec<RowWords> = (0..len).map(|position| case.token(seed, position, Temper::Plain)).collect();
    let state = case.open(backend, len, name)?;
    let mut outputs = Vec::new();
    let cut = if session.few { FEW_CUT } else { 1 };
    for (index, tokens) in tokens.chunks(cut).enumerate() {
        let (position, sure) = (index * cut, tokens.len());
        let part = Part { first_row: 0, position, logged: 0, sure, drafts: 0, state: &state };
        let batch: Vec<&RowWords> = tokens.iter().collect();
        outputs.extend(run_batch(backend, session, &case.ports(), &batch, false, |backend, ports| {
            case.launch(backend, ports, &[part])
        })?);
    }
    let state = case.state(backend, &state, len)?;
    Ok(Truth { name, tokens, outputs, state })
}

fn open_all<'a, B: Backend, C: SeamCase<B>>(
    backend: &mut B,
    case: &C,
    truths: &'a [Truth],
) -> Result<Vec<Walk<'a, C::State>>> {
    truths
        .iter()
        .map(|truth| {
            let state = case.open(backend, truth.tokens.len(), truth.name)?;
            Ok(Walk { truth, state, len: 0, logged: 0 })
        })
        .collect()
}

/// A launch for some of the sequences that are not at their end.
fn random_steps<S>(walks: &[Walk<'_, S>], seed: &mut Seed) -> Vec<Step> {
    let mut steps = Vec::new();
    for (index, walk) in walks.iter().enumerate() {
        let left = walk.truth.tokens.len() - walk.len;
        if left == 0 || seed.below(4) == 0 {
            continue;
        }
        let most = [1, 1, 3, 20][seed.below(4)];
        let sure = 1 + seed.below(most.min(left));
        let drafts = seed.below(DRAFTS + 1);
        // The last token is never accepted as a draft, so that every walk ends in a state of its own.
        let possible = drafts.min((left - sure).saturating_sub(1));
        let true_drafts = seed.below(possible + 1);
        let accepted = seed.below(true_drafts + 1);
        steps.push(Step { walk: index, sure, drafts, true_drafts, accepted });
    }
    if seed.below(2) == 0 {
        steps.reverse();
    }
    steps
}

/// Runs one launch, compares the rows that are true, and commits.
fn run_steps<B: Backend, C: SeamCase<B>>(
    backend: &mut B,
    session: &mut Session,
    case: &C,
    walks: &mut [Walk<'_, C::State>],
    steps: &[Step],
    seed: &mut Seed,
) -> Result<()> {
    let mut lies = Vec::new();
    for step in steps {
        let position = walks[step.walk].len + step.sure;
        for draft in step.true_drafts..step.drafts {
            let temper = [Temper::Plain, Temper::Huge, Temper::Infinite][seed.below(3)];
            lies.push(case.token(seed, position + draft, temper));
        }
    }
    let (mut batch, mut parts, mut next_lie) = (Vec::new(), Vec::new(), lies.iter());
    for step in steps {
        let walk = &walks[step.walk];
        parts.push(Part {
            first_row: batch.len(),
            position: walk.len,
            logged: walk.logged,
            sure: step.sure,
            drafts: step.drafts,
            state: &walk.state,
        });
        batch.extend(&walk.truth.tokens[walk.len..walk.len + step.sure + step.true_drafts]);
        batch.extend(next_lie.by_ref().take(step.drafts - step.true_drafts));
    }
    let strided = batch.len() % 2 == 1;
    let found = run_batch(backend, session, &case.ports(), &batch, strided, |backend, ports| {
        case.launch(backend, ports, &parts)
    })?;
    let rows = batch.len();
    let firsts: Vec<usize> = parts.iter().map(|part| part.first_row).collect();
    for (step, first) in steps.iter().zip(firsts) {
        let walk = &mut walks[step.walk];
        for row in 0..step.sure + step.true_drafts {
            session.compare(
                Law::Seam,
                rows,
                first + row,
                &walk.truth.outputs[walk.len + row],
                &found[first + row],
            );
        }
        walk.len += step.sure + step.accepted;
        walk.logged = step.accepted;
    }
    Ok(())
}

fn compare_states<B: Backend, C: SeamCase<B>>(
    backend: &mut B,
    session: &mut Session,
    case: &C,
    walks: &[Walk<'_, C::State>],
) -> Result<()> {
    for walk in walks {
        let found = case.state(backend, &walk.state, walk.len)?;
        session.compare(Law::Seam, walk.len, 0, &vec![walk.truth.state.clone()], &vec![found]);
    }
    Ok(())
}
