//! Laws of `embed`, `linear`, `head_linear` and `expert_linear`, in every encoding.

use flint_weights::{PlainType, QuantMatrix};

use super::Session;
use super::encoding::{Encoding, Weights};
use super::exact::{Exact, U, depth};
use super::place::expert_slots;
use super::rows::{FEW_ROWS, Port, ROWS, RowCase, RowWords, Temper, check_rows, upload_u32, words};
use super::seed::Seed;
use crate::ops::{Embed, ExpertLinear, HeadLinear, Linear};
use crate::{Backend, Element, Error, Precision, Result, Rows};

/// How many readings of its inputs a product may have: as they are, and rounded where the backend says so.
fn readings<B: Backend>(backend: &B, precision: Precision) -> usize {
    if precision == Precision::Product && backend.product_element() == Element::Bf16 { 2 } else { 1 }
}

/// Parts as a backend's products take them.
fn read_weights<B: Backend>(backend: &B, parts: &[QuantMatrix], precision: Precision) -> Weights {
    Weights::read(parts, precision == Precision::Product && backend.affine_element() == Element::Bf16)
}

/// Inputs as reading `reading` of a product takes them.
fn read_inputs(words: &[u32], reading: usize) -> Vec<f64> {
    let read = |&word: &u32| {
        let value = f32::from_bits(word);
        f64::from(if reading == 1 { half::bf16::from_f32(value).to_f32() } else { value })
    };
    words.iter().map(read).collect()
}

/// The true product with every row of a matrix.
fn product(weights: &Weights, x: &[f64], mutated: bool) -> Vec<Exact> {
    let output = |row: usize| {
        let (mut value, mut magnitude) = (0.0, 0.0);
        for (col, x) in x.iter().enumerate() {
            value += weights.value(row, col, mutated) * x;
            magnitude += weights.magnitude(row, col) * x.abs();
        }
        Exact::Near { value, slack: (depth(x.len()) + 8.0) * U * magnitude }
    };
    (0..weights.rows()).map(output).collect()
}

/// The product with the weights as they are stored, where a backend takes them rounded: within what rounding weights and inputs
/// to bf16 may change.
fn stored_product(weights: &Weights, x: &[f64]) -> Option<Vec<Exact>> {
    let output = |row: usize| {
        let (mut value, mut magnitude) = (0.0, 0.0);
        for (col, x) in x.iter().enumerate() {
            let term = weights.stored(row, col)? * x;
            value += term;
            magnitude += term.abs();
        }
        Some(Exact::Near { value, slack: magnitude * 2.1 / 256.0 })
    };
    (0..weights.rows()).map(output).collect()
}

/// Whether a backend takes a matrix of this encoding; it may refuse one by name.
fn takes<B: Backend>(backend: &mut B, encoding: Encoding) -> Result<bool> {
    let matrix = encoding.matrix("test.taken", 128, 128, &mut Seed::new(10));
    match backend.upload(&[matrix], Precision::Product) {
        Ok(_) => Ok(true),
        Err(Error::Unsupported { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The trellises that a backend takes.
fn trellises<B: Backend>(backend: &mut B) -> Result<Vec<Encoding>> {
    let mut taken = Vec::new();
    for encoding in Encoding::trellises() {
        if takes(backend, encoding)? {
            taken.push(encoding);
        }
    }
    Ok(taken)
}

struct LinearCase<B: Backend> {
    label: String,
    matrix: B::Matrix,
    weights: Weights,
    readings: usize,
    /// Whether inputs are bf16 numbers already, for parts that read them in different ways.
    rounded: bool,
}

impl<B: Backend> LinearCase<B> {
    fn new(
        backend: &mut B,
        parts: &[(Encoding, usize)],
        cols: usize,
        precision: Precision,
        seed: &mut Seed,
    ) -> Result<Self> {
        let names: Vec<String> =
            parts.iter().map(|(encoding, rows)| format!("{encoding}, {rows} × {cols}")).collect();
        let parts: Vec<QuantMatrix> =
            parts.iter().map(|&(encoding, rows)| encoding.matrix("test.linear", rows, cols, seed)).collect();
        Self::of(backend, &names.join(" + "), &parts, precision)
    }

    fn of(backend: &mut B, name: &str, parts: &[QuantMatrix], precision: Precision) -> Result<Self> {
        Ok(Self {
            label: format!("{name}, {precision:?}"),
            matrix: backend.upload(parts, precision)?,
            weights: read_weights(backend, parts, precision),
            readings: readings(backend, precision),
            rounded: false,
        })
    }
}

impl<B: Backend> RowCase<B> for LinearCase<B> {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn ports(&self) -> Vec<Port> {
        vec![Port::input(self.weights.cols), Port::output(self.weights.rows())]
    }

    fn row(&self, seed: &mut Seed, temper: Temper) -> RowWords {
        let kept = if self.rounded { 0xFFFF_0000 } else { u32::MAX };
        let values = temper.values(seed, self.weights.cols);
        vec![words(&values).into_iter().map(|word| word & kept).collect()]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [x, out] = ports else { return Ok(()) };
        backend.linear(&Linear { out: out.clone(), x: x.clone(), matrix: self.matrix.clone() })
    }

    fn readings(&self) -> usize {
        self.readings
    }

    fn exact(&self, row: &RowWords, reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        vec![product(&self.weights, &read_inputs(&row[0], reading), mutated)]
    }

    fn stored(&self, row: &RowWords) -> Option<Vec<Vec<Exact>>> {
        Some(vec![stored_product(&self.weights, &read_inputs(&row[0], 0))?])
    }
}

/// Laws of `linear`.
pub(crate) fn linear<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(11);
    let four = Encoding::Affine { bits: 4, group: 64, kind: PlainType::Bf16 };
    let eight = Encoding::Affine { bits: 8, group: 64, kind: PlainType::Bf16 };
    let bf16 = Encoding::Plain(PlainType::Bf16);
    let mut check = |parts: &[(Encoding, usize)], cols, precision, counts: &[usize]| -> Result<()> {
        let case = LinearCase::new(backend, parts, cols, precision, &mut seed)?;
        check_rows(backend, session, &case, counts)
    };
    for encoding in Encoding::all() {
        check(&[(encoding, 19)], 256, Precision::Product, ROWS)?;
        check(&[(encoding, 5)], 384, Precision::Full, FEW_ROWS)?;
        if encoding.takes_any_width() {
            for cols in [1, 40, 200, 333] {
                check(&[(encoding, 6)], cols, Precision::Product, FEW_ROWS)?;
            }
        }
    }
    // Fused members of different widths are parts of one matrix.
    check(&[(four, 24), (bf16, 5), (eight, 16), (four, 1)], 256, Precision::Product, ROWS)?;
    check(&[(Encoding::Fp8, 130), (bf16, 3)], 256, Precision::Product, FEW_ROWS)?;
    // Widths of the release.
    for (encoding, cols) in
        [(four, 4096), (eight, 4096), (bf16, 4096), (four, 1536), (eight, 8192), (four, 16384)]
    {
        check(&[(encoding, 12)], cols, Precision::Product, FEW_ROWS)?;
    }
    check(&[(bf16, 24)], 16384, Precision::Full, FEW_ROWS)?;
    // A cut keeps its place inside the blocks that share a scale.
    for encoding in Encoding::some() {
        let whole = encoding.matrix("test.cut", 200, 384, &mut seed);
        let parts: Vec<QuantMatrix> =
            whole.cut_rows(70..140).into_iter().chain(whole.cut_rows(3..5)).collect();
        let name = format!("{encoding}, rows 70..140 and 3..5 of 200 × 384");
        let case = LinearCase::of(backend, &name, &parts, Precision::Product)?;
        check_rows(backend, session, &case, FEW_ROWS)?;
    }
    // So are members that a backend may keep in different ways.
    let six = Encoding::Affine { bits: 6, group: 32, kind: PlainType::Bf16 };
    let wide = Encoding::Affine { bits: 4, group: 64, kind: PlainType::F32 };
    let [fp16, fp32] = [PlainType::F16, PlainType::F32].map(Encoding::Plain);
    let fused =
        [(four, 5), (fp32, 70), (six, 17), (wide, 3), (Encoding::Fp8, 2), (fp16, 66), (bf16, 1), (fp32, 2)];
    let mut fused = LinearCase::new(backend, &fused, 256, Precision::Product, &mut seed)?;
    fused.rounded = true;
    check_rows(backend, session, &fused, ROWS)?;
    linear_trellises(backend, session)
}

/// Laws of `linear` with trellises: every rate, sizes that are padded, cuts, and parts of one trellis beside others.
fn linear_trellises<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(15);
    let taken = trellises(backend)?;
    for (index, &encoding) in taken.iter().enumerate() {
        let counts = if index == 0 { ROWS } else { FEW_ROWS };
        for (rows, cols, precision) in
            [(19, 256, Precision::Product), (150, 384, Precision::Product), (6, 40, Precision::Full)]
        {
            let case = LinearCase::new(backend, &[(encoding, rows)], cols, precision, &mut seed)?;
            check_rows(backend, session, &case, counts)?;
        }
    }
    let Some(&encoding) = taken.first() else { return Ok(()) };
    let whole = encoding.matrix("test.cut", 384, 256, &mut seed);
    let cuts = [0..128, 128..200, 200..384, 3..5].into_iter().filter_map(|rows| whole.cut_rows(rows));
    let others = [Encoding::Plain(PlainType::F16), taken[taken.len() - 1]];
    let others = others.map(|other| other.matrix("test.beside", 9, 256, &mut seed));
    let parts: Vec<QuantMatrix> = cuts.chain(others).collect();
    let name = format!("{encoding}, rows 0..384 and 3..5 of 384 × 256, others beside them");
    let case = LinearCase::of(backend, &name, &parts, Precision::Product)?;
    check_rows(backend, session, &case, ROWS)
}

struct HeadCase<B: Backend> {
    label: String,
    stack: B::Matrix,
    heads: Vec<Weights>,
    readings: usize,
}

impl<B: Backend> RowCase<B> for HeadCase<B> {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn ports(&self) -> Vec<Port> {
        let head = &self.heads[0];
        vec![Port::input(self.heads.len() * head.cols), Port::output(self.heads.len() * head.rows())]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [x, out] = ports else { return Ok(()) };
        backend.head_linear(&HeadLinear { out: out.clone(), x: x.clone(), stack: self.stack.clone() })
    }

    fn readings(&self) -> usize {
        self.readings
    }

    fn exact(&self, row: &RowWords, reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let x = read_inputs(&row[0], reading);
        let heads = self.heads.iter().zip(x.chunks(self.heads[0].cols));
        vec![heads.flat_map(|(head, x)| product(head, x, mutated)).collect()]
    }

    fn stored(&self, row: &RowWords) -> Option<Vec<Vec<Exact>>> {
        let x = read_inputs(&row[0], 0);
        let heads = self.heads.iter().zip(x.chunks(self.heads[0].cols));
        let outputs: Option<Vec<_>> = heads.map(|(head, x)| stored_product(head, x)).collect();
        Some(vec![outputs?.concat()])
    }
}

/// Laws of `head_linear`.
pub(crate) fn head_linear<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(12);
    let taken = trellises(backend)?;
    let mut check =
        |encoding: Encoding, heads: usize, rows: usize, cols: usize, counts: &[usize]| -> Result<()> {
            let matrices: Vec<QuantMatrix> =
                (0..heads).map(|_| encoding.matrix("test.heads", rows, cols, &mut seed)).collect();
            let members: Vec<Vec<QuantMatrix>> = matrices.iter().map(|matrix| vec![matrix.clone()]).collect();
            let case = HeadCase::<B> {
                label: format!("{heads} heads of {encoding}, {rows} × {cols}"),
                stack: backend.upload_stack(&members, Precision::Product)?,
                heads: members.iter().map(|parts| read_weights(backend, parts, Precision::Product)).collect(),
                readings: readings(backend, Precision::Product),
            };
            check_rows(backend, session, &case, counts)
        };
    for encoding in Encoding::all() {
        check(encoding, 3, 5, 128, FEW_ROWS)?;
    }
    for encoding in Encoding::some() {
        check(encoding, 5, 16, 256, ROWS)?;
    }
    check(Encoding::Plain(PlainType::F32), 2, 9, 72, ROWS)?;
    check(Encoding::Plain(PlainType::Bf16), 2, 64, 512, FEW_ROWS)?;
    for encoding in taken {
        check(encoding, 3, 20, 256, FEW_ROWS)?;
    }
    Ok(())
}

/// Experts of a test; the stack has more slots, in another order.
const EXPERTS: usize = 5;
const SLOTS: [u32; EXPERTS] = [4, 0, 6, 1, 3];
const PICKS: usize = 3;

struct ExpertCase<B: Backend> {
    label: String,
    stack: B::Matrix,
    slots: B::Buffer,
    members: Vec<Weights>,
    readings: usize,
    /// Whether each pair has an input of its own.
    paired: bool,
}

impl<B: Backend> RowCase<B> for ExpertCase<B> {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn ports(&self) -> Vec<Port> {
        let member = &self.members[0];
        let x = if self.paired { Port::input(PICKS * member.cols).dense() } else { Port::input(member.cols) };
        vec![x, Port::input(PICKS).words(), Port::output(PICKS * member.rows()).dense()]
    }

    fn row(&self, seed: &mut Seed, temper: Temper) -> RowWords {
        let width = self.members[0].cols * if self.paired { PICKS } else { 1 };
        let x = words(&temper.values(seed, width));
        vec![x, (0..PICKS).map(|_| seed.below(EXPERTS) as u32).collect()]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], rows: usize) -> Result<()> {
        let [x, picks, out] = ports else { return Ok(()) };
        let member = &self.members[0];
        let x = if self.paired { Rows::dense(&x.buffer, rows * PICKS, member.cols) } else { x.clone() };
        backend.expert_linear(&ExpertLinear {
            out: Rows::dense(&out.buffer, rows * PICKS, member.rows()),
            x,
            stack: self.stack.clone(),
            picks: picks.buffer.clone(),
            picks_per_row: PICKS,
            slots: self.slots.clone(),
        })
    }

    fn readings(&self) -> usize {
        self.readings
    }

    fn exact(&self, row: &RowWords, reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let x = read_inputs(&row[0], reading);
        let cols = self.members[0].cols;
        let pair = |(j, &expert): (usize, &u32)| {
            let x = if self.paired { &x[j * cols..(j + 1) * cols] } else { &x[..] };
            product(&self.members[SLOTS[expert as usize] as usize], x, mutated)
        };
        vec![row[1].iter().enumerate().flat_map(pair).collect()]
    }

    fn stored(&self, row: &RowWords) -> Option<Vec<Vec<Exact>>> {
        let x = read_inputs(&row[0], 0);
        let cols = self.members[0].cols;
        let pair = |(j, &expert): (usize, &u32)| {
            let x = if self.paired { &x[j * cols..(j + 1) * cols] } else { &x[..] };
            stored_product(&self.members[SLOTS[expert as usize] as usize], x)
        };
        let outputs: Option<Vec<_>> = row[1].iter().enumerate().map(pair).collect();
        Some(vec![outputs?.concat()])
    }
}

/// Laws of `expert_linear`.
pub(crate) fn expert_linear<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(13);
    let taken = trellises(backend)?;
    let slots = upload_u32(backend, &SLOTS)?;
    let mut check = |encodings: &[Encoding],
                     rows: usize,
                     cols: usize,
                     paired: bool,
                     counts: &[usize]|
     -> Result<()> {
        let part = |encoding: &Encoding, seed: &mut Seed| encoding.matrix("test.experts", rows, cols, seed);
        let members: Vec<Vec<QuantMatrix>> =
            (0..7).map(|_| encodings.iter().map(|encoding| part(encoding, &mut seed)).collect()).collect();
        let names: Vec<String> = encodings.iter().map(ToString::to_string).collect();
        let kind = if paired { "an input for each pair" } else { "an input for each row" };
        let case = ExpertCase::<B> {
            label: format!("{}, {rows} × {cols}, {kind}", names.join(" + ")),
            stack: backend.upload_stack(&members, Precision::Product)?,
            slots: slots.clone(),
            members: members.iter().map(|parts| read_weights(backend, parts, Precision::Product)).collect(),
            readings: readings(backend, Precision::Product),
            paired,
        };
        check_rows(backend, session, &case, counts)
    };
    for encoding in Encoding::all() {
        check(&[encoding], 7, 128, false, FEW_ROWS)?;
        check(&[encoding], 5, 128, true, FEW_ROWS)?;
    }
    let [bf16, fp8, four, six] = Encoding::some()[..] else { return Ok(()) };
    for encoding in [bf16, fp8, four, six] {
        check(&[encoding], 8, 256, false, ROWS)?;
    }
    // Gate and up projections of one expert, in different widths.
    check(&[four, six], 9, 256, false, ROWS)?;
    check(&[four], 6, 4096, false, &[2, 8])?;
    check(&[four], 6, 2048, true, &[2, 8])?;
    // Every expert has scales of its own.
    for pair in taken.windows(2) {
        check(pair, 9, 256, false, FEW_ROWS)?;
        check(&pair[..1], 130, 128, true, FEW_ROWS)?;
    }
    for encoding in Encoding::all() {
        expert_slots(backend, session, encoding, (7, 128))?;
    }
    expert_slots(backend, session, four, (40, 1024))
}

struct EmbedCase<B: Backend> {
    label: String,
    table: B::Matrix,
    weights: Weights,
}

impl<B: Backend> RowCase<B> for EmbedCase<B> {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn ports(&self) -> Vec<Port> {
        vec![Port::input(1).words(), Port::output(self.weights.cols)]
    }

    fn row(&self, seed: &mut Seed, _temper: Temper) -> RowWords {
        vec![vec![seed.below(self.weights.rows()) as u32]]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [tokens, out] = ports else { return Ok(()) };
        let (table, tokens) = (self.table.clone(), tokens.buffer.clone());
        backend.embed(&Embed { out: out.clone(), table, tokens })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        // Scale times code plus bias is exact in float64, so its rounding is that of one fma.
        let value = |col| Exact::value(self.weights.value(row[0][0] as usize, col, mutated) as f32);
        vec![(0..self.weights.cols).map(value).collect()]
    }
}

/// Laws of `embed`.
pub(crate) fn embed<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(14);
    for encoding in Encoding::all() {
        let table = [encoding.matrix("test.embed", 150, 256, &mut seed)];
        let case = EmbedCase::<B> {
            label: format!("{encoding}, 150 × 256"),
            table: backend.upload(&table, Precision::Product)?,
            weights: Weights::new(&table),
        };
        check_rows(backend, session, &case, ROWS)?;
    }
    Ok(())
}
