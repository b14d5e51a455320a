//! The Place law: where an expert's weights lie, and when they come, changes no bit.

use flint_weights::QuantMatrix;

use super::encoding::Encoding;
use super::rows::{upload_f32, upload_u32, words};
use super::seed::Seed;
use super::{Law, Session};
use crate::ops::{ABSENT, ExpertLinear};
use crate::{Backend, Element, Error, Precision, Result, Rows};

/// Experts of the case, and how many a row uses.
pub(super) const EXPERTS: usize = 9;
const PICKS: usize = 3;

/// One product over all its pairs, through different stacks.
struct Case<B: Backend> {
    x: Rows<B::Buffer>,
    picks: B::Buffer,
    outputs: usize,
}

impl<B: Backend> Case<B> {
    fn launch(&self, backend: &mut B, out: &B::Buffer, stack: &B::Matrix, slots: &B::Buffer) -> Result<()> {
        backend.expert_linear(&ExpertLinear {
            out: Rows::dense(out, self.x.rows * PICKS, self.outputs),
            x: self.x.clone(),
            stack: stack.clone(),
            picks: self.picks.clone(),
            picks_per_row: PICKS,
            slots: slots.clone(),
        })
    }

    fn read(&self, backend: &mut B, out: &B::Buffer) -> Result<Vec<u32>> {
        let mut values = vec![0.0; self.x.rows * PICKS * self.outputs];
        backend.read_f32(out, 0, &mut values)?;
        Ok(words(&values))
    }
}

/// Experts that come a few at a time, into few slots, give the bits of experts that were all there.
pub(super) fn expert_slots<B: Backend>(
    backend: &mut B,
    session: &mut Session,
    encoding: Encoding,
    (outputs, cols): (usize, usize),
) -> Result<()> {
    let mut seed = Seed::new(23);
    // A backend may have no slots; then it refuses them by name, and no model asks it for any.
    let like = [encoding.matrix("test.slots", outputs, cols, &mut seed)];
    if let Err(Error::Unsupported { .. }) = backend.allocate_stack(&like, 1, Precision::Product) {
        return Ok(());
    }
    let mut part = |rows| encoding.matrix("test.slots", rows, cols, &mut seed);
    let members: Vec<Vec<QuantMatrix>> =
        (0..EXPERTS).map(|_| vec![part(outputs - outputs / 2), part(outputs / 2)]).collect();
    let all = backend.upload_stack(&members, Precision::Product)?;
    let everywhere = upload_u32(backend, &(0..EXPERTS as u32).collect::<Vec<_>>())?;
    for (rows, slots) in [(1, 1), (1, 2), (3, 1), (17, 2), (33, 4)] {
        session.case(format!("{encoding}, {outputs} × {cols}, {slots} slots for {EXPERTS} experts"));
        let picks: Vec<u32> = (0..rows).flat_map(|_| distinct(&mut seed)).collect();
        let case = Case::<B> {
            x: Rows::dense(&upload_f32(backend, &seed.normals(rows * cols, 1.0))?, rows, cols),
            picks: upload_u32(backend, &picks)?,
            outputs,
        };
        let expected = backend.allocate(Element::F32, rows * PICKS * outputs)?;
        case.launch(backend, &expected, &all, &everywhere)?;
        let found = backend.allocate(Element::F32, rows * PICKS * outputs)?;
        stream(backend, &case, &found, &members, slots, &mut seed)?;
        let (expected, found) = (case.read(backend, &expected)?, case.read(backend, &found)?);
        let lines = expected.chunks(outputs).zip(found.chunks(outputs)).enumerate();
        for (pair, (expected, found)) in lines {
            session.compare(Law::Place, rows, pair, &vec![expected.to_vec()], &vec![found.to_vec()]);
        }
    }
    Ok(())
}

/// Runs the product as often as it takes for each expert to be in a slot once, in an order of chance.
fn stream<B: Backend>(
    backend: &mut B,
    case: &Case<B>,
    out: &B::Buffer,
    members: &[Vec<QuantMatrix>],
    slots: usize,
    seed: &mut Seed,
) -> Result<()> {
    let stack = backend.allocate_stack(&members[0], slots, Precision::Product)?;
    let table = backend.allocate(Element::U32, EXPERTS)?;
    let mut order: Vec<usize> = (0..EXPERTS).collect();
    (1..EXPERTS).for_each(|last| order.swap(last, seed.below(last + 1)));
    for wave in order.chunks(slots) {
        let mut places = [ABSENT; EXPERTS];
        for (slot, &expert) in wave.iter().enumerate() {
            backend.write_member(&stack, slot, &members[expert])?;
            places[expert] = slot as u32;
        }
        backend.write_u32(&table, 0, &places)?;
        case.launch(backend, out, &stack, &table)?;
    }
    Ok(())
}

/// Different experts of one row, ascending as the router writes them.
fn distinct(seed: &mut Seed) -> Vec<u32> {
    let mut picks: Vec<u32> = Vec::new();
    while picks.len() < PICKS {
        let pick = seed.below(EXPERTS) as u32;
        if !picks.contains(&pick) {
            picks.push(pick);
        }
    }
    picks.sort_unstable();
    picks
}
