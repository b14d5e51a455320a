//! Matrices and rows from a seed, and one-call products.

use flint_backend::{Backend, Precision, Rows, ops, ops::Ops};
use flint_cpu::{Arithmetic, Cpu, CpuMatrix, Level, Options};
use flint_weights::matrix::FP8_BLOCK;
use flint_weights::{Form, HostBytes, PlainType, QuantMatrix};

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Between -1 and 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Like an activation: most values small, some large.
    pub(crate) fn activation(&mut self) -> f32 {
        let value = self.unit() + self.unit() + self.unit();
        if self.below(61) == 0 { value * 20.0 } else { value }
    }
}

/// A way to store a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain(PlainType),
    Fp8,
    Affine { bits: u8, group: usize, scale: PlainType },
}

pub(crate) const TYPES: [PlainType; 3] = [PlainType::Bf16, PlainType::F16, PlainType::F32];

/// Every storage: 3 plain types, FP8, 6 widths × 3 groups × 3 scale types.
pub(crate) fn kinds() -> Vec<Kind> {
    let mut kinds: Vec<Kind> = TYPES.map(Kind::Plain).to_vec();
    kinds.push(Kind::Fp8);
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            kinds.extend(TYPES.map(|scale| Kind::Affine { bits, group, scale }));
        }
    }
    kinds
}

/// Storages that differ in their kernels: one scale type and one group of each width would hide a tree.
pub(crate) fn distinct_kinds() -> Vec<Kind> {
    let keep = |kind: &Kind| match kind {
        Kind::Affine { bits, group, scale } => {
            *scale == TYPES[(usize::from(*bits) + group / 32) % 3] || (*bits == 4 && *group == 64)
        }
        _ => true,
    };
    kinds().into_iter().filter(keep).collect()
}

fn numbers(kind: PlainType, values: impl Iterator<Item = f32>) -> HostBytes {
    let bytes = values.flat_map(|value| match kind {
        PlainType::F32 => value.to_le_bytes().to_vec(),
        PlainType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        PlainType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
    });
    HostBytes::from_vec(bytes.collect())
}

fn bytes(random: &mut Random, count: usize) -> HostBytes {
    HostBytes::from_vec((0..count).map(|_| random.next() as u8).collect())
}

/// A matrix whose values look like a layer's.
pub(crate) fn matrix(kind: Kind, rows: usize, cols: usize, seed: u64) -> QuantMatrix {
    let mut random = Random::new(seed);
    let form = match kind {
        Kind::Plain(kind) => {
            Form::Plain { kind, values: numbers(kind, (0..rows * cols).map(|_| random.unit() * 0.05)) }
        }
        Kind::Fp8 => {
            let codes = (0..rows * cols).map(|_| random.next() as u8);
            let codes = codes.map(|code| if code & 0x7F == 0x7F { code ^ 1 } else { code }).collect();
            let blocks = rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK);
            let scales = (0..blocks).map(|_| 0.0002 * (1.5 + random.unit()));
            Form::Fp8Block {
                codes: HostBytes::from_vec(codes),
                scales: numbers(PlainType::F32, scales.collect::<Vec<_>>().into_iter()),
                first_row: 0,
            }
        }
        Kind::Affine { bits, group, scale: kind } => {
            let codes = bytes(&mut random, rows * cols * usize::from(bits) / 8);
            let steps = ((1u32 << bits) - 1) as f32;
            let pairs: Vec<(f32, f32)> = (0..rows * cols / group)
                .map(|_| {
                    let scale = 0.1 / steps * (1.2 + random.unit());
                    // Some groups are stored from the top down.
                    let scale = if random.below(5) == 0 { -scale } else { scale };
                    (scale, -scale * steps * (0.5 + 0.1 * random.unit()))
                })
                .collect();
            Form::Affine {
                bits,
                group,
                kind,
                codes,
                scales: numbers(kind, pairs.iter().map(|pair| pair.0)),
                biases: numbers(kind, pairs.iter().map(|pair| pair.1)),
            }
        }
    };
    QuantMatrix { name: format!("{kind:?}"), rows, cols, form }
}

pub(crate) fn activations(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.activation()).collect()
}

pub(crate) fn cpu(arithmetic: Arithmetic, level: Level, threads: usize) -> Cpu {
    Cpu::new(Options { threads, arithmetic, level }).unwrap()
}

/// Every arithmetic that this CPU has.
pub(crate) fn arithmetics() -> Vec<Arithmetic> {
    let mut all = vec![Arithmetic::Lanes];
    if Arithmetic::dot_is_available() {
        all.push(Arithmetic::Dot);
    }
    all
}

/// Every level that this CPU has.
pub(crate) fn levels() -> Vec<Level> {
    [Level::Scalar, Level::Avx2, Level::Avx512, Level::Neon]
        .into_iter()
        .filter(|l| l.is_available())
        .collect()
}

/// `x` `[rows, inputs]` times one matrix.
pub(crate) fn linear(cpu: &mut Cpu, matrix: &CpuMatrix, x: &[f32]) -> Vec<f32> {
    let rows = x.len() / matrix.inputs();
    let from = upload(cpu, x);
    let to = cpu.allocate(flint_backend::Element::F32, rows * matrix.outputs()).unwrap();
    let op = ops::Linear {
        out: Rows::dense(&to, rows, matrix.outputs()),
        x: Rows::dense(&from, rows, matrix.inputs()),
        matrix: matrix.clone(),
    };
    cpu.linear(&op).unwrap();
    download(cpu, &to)
}

pub(crate) fn upload(cpu: &mut Cpu, values: &[f32]) -> flint_cpu::CpuBuffer {
    let buffer = cpu.allocate(flint_backend::Element::F32, values.len()).unwrap();
    cpu.write_f32(&buffer, 0, values).unwrap();
    buffer
}

pub(crate) fn upload_u32(cpu: &mut Cpu, values: &[u32]) -> flint_cpu::CpuBuffer {
    let buffer = cpu.allocate(flint_backend::Element::U32, values.len()).unwrap();
    cpu.write_u32(&buffer, 0, values).unwrap();
    buffer
}

pub(crate) fn download(cpu: &mut Cpu, buffer: &flint_cpu::CpuBuffer) -> Vec<f32> {
    let mut out = vec![0.0; buffer.len()];
    cpu.read_f32(buffer, 0, &mut out).unwrap();
    out
}

pub(crate) fn single(cpu: &mut Cpu, matrix: &QuantMatrix) -> CpuMatrix {
    cpu.upload(std::slice::from_ref(matrix), Precision::Product).unwrap()
}

/// Equality by bits, with the first difference named.
pub(crate) fn assert_same_bits(what: &str, width: usize, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    let pairs = found.iter().zip(expected).enumerate();
    let different: Vec<_> =
        pairs.filter(|(_, (a, b))| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan())).collect();
    if let Some((index, (a, b))) = different.first() {
        let (row, column) = (index / width, index % width);
        panic!(
            "{what}: {} of {} differ, first at row {row}, column {column}: {a:e} for {b:e}",
            different.len(),
            found.len()
        );
    }
}
