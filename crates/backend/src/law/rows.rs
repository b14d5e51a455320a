//! The Row law for operations over independent rows, with their float64 bounds.
//!
//! A [`RowCase`] says what one row brings, how a batch is launched and what a row's true result is. The harness
//! launches rows alone and in batches of every size, next to plain and hostile neighbours, in dense and in strided
//! memory, and compares bits. Nothing outside the output rows may change.

use super::exact::{Exact, check_exact};
use super::seed::Seed;
use super::{Law, Session};
use crate::{Backend, Element, Result, Rows};

/// Batch sizes: around every tile size that a kernel may have.
pub(super) const ROWS: &[usize] = &[2, 3, 8, 16, 17, 33, 64, 129];
/// Batch sizes for wide shapes, where a launch costs more.
pub(super) const FEW_ROWS: &[usize] = &[2, 3, 8, 17];

/// What stands in memory that no operation may touch.
const CANARY: f32 = -7.062_5e11;
/// Different rows that batches are filled with; no batch size is a multiple of it but one.
const POOL: usize = 11;
/// The same where launches are dear: plain rows and one of another temper.
const FEW_POOL: usize = 4;

/// One argument of an operation that has a row for each row of the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Port {
    pub(super) element: Element,
    pub(super) width: usize,
    pub(super) input: bool,
    pub(super) output: bool,
    /// Rows stand side by side (an argument that has no stride of its own).
    pub(super) dense: bool,
}

impl Port {
    pub(super) fn input(width: usize) -> Self {
        Self { element: Element::F32, width, input: true, output: false, dense: false }
    }

    pub(super) fn output(width: usize) -> Self {
        Self { input: false, output: true, ..Self::input(width) }
    }

    pub(super) fn in_place(width: usize) -> Self {
        Self { output: true, ..Self::input(width) }
    }

    pub(super) fn dense(self) -> Self {
        Self { dense: true, ..self }
    }

    /// Unsigned numbers, which have no stride.
    pub(super) fn words(self) -> Self {
        Self { element: Element::U32, dense: true, ..self }
    }
}

/// The words of one row: one list for each port that is an input, or an output.
pub(super) type RowWords = Vec<Vec<u32>>;

/// What a row is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Temper {
    Plain,
    /// All zeros.
    Zero,
    /// Magnitudes whose products overflow.
    Huge,
    /// Infinities of both signs.
    Infinite,
    /// Values that repeat, so that choices tie.
    Tied,
}

impl Temper {
    /// `width` values of this temper.
    pub(super) fn values(self, seed: &mut Seed, width: usize) -> Vec<f32> {
        let mut sign = {
            let mut seed = seed.clone();
            move |value: f32| if seed.bits() & 1 == 0 { value } else { -value }
        };
        match self {
            Self::Plain => seed.normals(width, 1.0),
            Self::Zero => vec![0.0; width],
            Self::Huge => (0..width).map(|_| sign(seed.between(1e30, 3e38))).collect(),
            Self::Infinite => (0..width).map(|_| sign(f32::INFINITY)).collect(),
            Self::Tied => (0..width).map(|_| (seed.below(3) as f32 - 1.0) * 0.5).collect(),
        }
    }
}

/// The bits of values.
pub(super) fn words(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The values of bits, in float64.
pub(super) fn reals(words: &[u32]) -> Vec<f64> {
    words.iter().map(|&word| f64::from(f32::from_bits(word))).collect()
}

/// An operation over independent rows, at one shape.
pub(super) trait RowCase<B: Backend> {
    /// Names shape and encoding.
    fn label(&self) -> String;

    /// The arguments that have rows.
    fn ports(&self) -> Vec<Port>;

    /// A row's inputs, for each input port.
    fn row(&self, seed: &mut Seed, temper: Temper) -> RowWords {
        let inputs = self.ports().into_iter().filter(|port| port.input);
        inputs.map(|port| words(&temper.values(seed, port.width))).collect()
    }

    /// Tempers that give results which can be compared with the truth, beside plain rows.
    fn tempers(&self) -> &'static [Temper] {
        &[Temper::Zero]
    }

    /// Queues the operation over `ports`, whose rows are `rows`.
    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], rows: usize) -> Result<()>;

    /// Readings of the operation that a backend may choose from, once for all rows.
    fn readings(&self) -> usize {
        1
    }

    /// The truth for each output port; `mutated` is a truth that is a little wrong, as a bad kernel would be.
    fn exact(&self, row: &RowWords, reading: usize, mutated: bool) -> Vec<Vec<Exact>>;

    /// Looser bounds around what the stored numbers give, where [`exact`](Self::exact) takes them rounded as the backend says.
    fn stored(&self, _row: &RowWords) -> Option<Vec<Vec<Exact>>> {
        None
    }
}

/// Checks a case at one row and at each of `counts`.
pub(super) fn check_rows<B: Backend>(
    backend: &mut B,
    session: &mut Session,
    case: &impl RowCase<B>,
    counts: &[usize],
) -> Result<()> {
    let mut seed = Seed::new(counts.len() as u64);
    let tempers = case.tempers();
    let few = session.few;
    let size = if few { FEW_POOL } else { POOL };
    let pool: Vec<RowWords> = (0..size)
        .map(|index| {
            let temper = if index % 3 == 2 { tempers.get(index / 3 % tempers.len().max(1)) } else { None };
            case.row(&mut seed, temper.copied().unwrap_or(Temper::Plain))
        })
        .collect();
    let hostile = [Temper::Huge, Temper::Infinite, Temper::Zero].map(|temper| case.row(&mut seed, temper));
    session.case(case.label());
    let mut alone = Vec::new();
    for row in &pool {
        alone.extend(launch(backend, session, case, &[row], false)?);
    }
    session.record(&alone);
    check_exact(session, case, &pool, &alone);
    // Where launches are dear: a few rows, and the most.
    for &rows in counts.iter().filter(|rows| !few || **rows == 3 || counts.last() == Some(rows)) {
        let plain: Vec<Option<usize>> = (0..rows).map(|row| Some((row * 5 + rows) % size)).collect();
        let mixed =
            |turn: usize| (0..rows).map(move |row| (row + turn).is_multiple_of(3).then_some(row % size));
        let fillings = [mixed(0).collect(), plain, mixed(2).collect()];
        for picks in fillings.into_iter().take(if few { 1 } else { 3 }) {
            let member =
                |(row, pick): (usize, &Option<usize>)| pick.map_or(&hostile[row % 3], |index| &pool[index]);
            let batch: Vec<&RowWords> = picks.iter().enumerate().map(member).collect();
            let found = launch(backend, session, case, &batch, rows % 2 == 1)?;
            for (row, (pick, found)) in picks.iter().zip(&found).enumerate() {
                if let Some(index) = pick {
                    session.compare(Law::Row, rows, row, &alone[*index], found);
                }
            }
        }
    }
    Ok(())
}

/// Runs a batch and returns each row's outputs.
fn launch<B: Backend>(
    backend: &mut B,
    session: &mut Session,
    case: &impl RowCase<B>,
    batch: &[&RowWords],
    strided: bool,
) -> Result<Vec<RowWords>> {
    run_batch(backend, session, &case.ports(), batch, strided, |backend, ports| {
        case.launch(backend, ports, batch.len())
    })
}

/// Puts a batch into fresh memory, runs `queue` over it, and returns each row's outputs.
pub(super) fn run_batch<B: Backend>(
    backend: &mut B,
    session: &mut Session,
    ports: &[Port],
    batch: &[&RowWords],
    strided: bool,
    queue: impl FnOnce(&mut B, &[Rows<B::Buffer>]) -> Result<()>,
) -> Result<Vec<RowWords>> {
    let rows = batch.len();
    let mut views = Vec::new();
    let mut images = Vec::new();
    let mut input = 0;
    for port in ports {
        let (first, stride) = if strided && !port.dense { (5, port.width + 3) } else { (0, port.width) };
        let len = first + (rows * stride).max(1);
        let mut image = vec![CANARY.to_bits(); len];
        if port.input {
            for (row, words) in batch.iter().enumerate() {
                let at = first + row * stride;
                image[at..at + port.width].copy_from_slice(&words[input]);
            }
            input += 1;
        }
        let buffer = backend.allocate(port.element, len)?;
        write_words(backend, &buffer, port.element, &image)?;
        views.push(Rows { buffer, first, stride, width: port.width, rows });
        images.push(image);
    }
    queue(backend, &views)?;
    let mut out = vec![RowWords::new(); rows];
    for ((port, view), before) in ports.iter().zip(&views).zip(&images) {
        let after = read_words(backend, &view.buffer, port.element, before.len())?;
        if port.output {
            for (row, words) in out.iter_mut().enumerate() {
                let at = view.first + row * view.stride;
                words.push(after[at..at + port.width].to_vec());
            }
        }
        let inside = |index: usize| {
            port.output && index >= view.first && (index - view.first) % view.stride.max(1) < view.width
        };
        let changed = (0..before.len()).find(|&index| !inside(index) && before[index] != after[index]);
        if let Some(index) = changed {
            session.outside(rows, index, before[index], after[index]);
        }
    }
    Ok(out)
}

/// Writes the whole of an F32 or U32 buffer.
pub(super) fn write_words<B: Backend>(
    backend: &mut B,
    buffer: &B::Buffer,
    element: Element,
    words: &[u32],
) -> Result<()> {
    if element == Element::U32 {
        return backend.write_u32(buffer, 0, words);
    }
    let values: Vec<f32> = words.iter().map(|&word| f32::from_bits(word)).collect();
    backend.write_f32(buffer, 0, &values)
}

/// Reads the first `len` elements of an F32 or U32 buffer.
pub(super) fn read_words<B: Backend>(
    backend: &mut B,
    buffer: &B::Buffer,
    element: Element,
    len: usize,
) -> Result<Vec<u32>> {
    if element == Element::U32 {
        let mut out = vec![0; len];
        backend.read_u32(buffer, 0, &mut out)?;
        return Ok(out);
    }
    let mut out = vec![0.0; len];
    backend.read_f32(buffer, 0, &mut out)?;
    Ok(words(&out))
}

/// A new buffer with these values.
pub(super) fn upload_f32<B: Backend>(backend: &mut B, values: &[f32]) -> Result<B::Buffer> {
    let buffer = backend.allocate(Element::F32, values.len())?;
    backend.write_f32(&buffer, 0, values)?;
    Ok(buffer)
}

/// A new buffer with these numbers.
pub(super) fn upload_u32<B: Backend>(backend: &mut B, values: &[u32]) -> Result<B::Buffer> {
    let buffer = backend.allocate(Element::U32, values.len())?;
    backend.write_u32(&buffer, 0, values)?;
    Ok(buffer)
}

/// A vector of weights on the device and on the host.
pub(super) struct Vector<B: Backend> {
    pub(super) buffer: B::Buffer,
    pub(super) values: Vec<f32>,
}

impl<B: Backend> Vector<B> {
    pub(super) fn new(backend: &mut B, values: Vec<f32>) -> Result<Self> {
        Ok(Self { buffer: upload_f32(backend, &values)?, values })
    }

    pub(super) fn value(&self, index: usize) -> f64 {
        f64::from(self.values[index])
    }
}
