//! Matrices of every encoding, written from a seed.

use flint_weights::{Form, HostBytes, PlainType, QuantMatrix};

use super::seed::Seed;

/// How a test matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Plain(PlainType),
    Fp8,
    Affine { bits: u8, group: usize, kind: PlainType },
}

impl std::fmt::Display for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plain(kind) => write!(f, "{kind:?}"),
            Self::Fp8 => write!(f, "fp8"),
            Self::Affine { bits, group, kind } => write!(f, "affine {bits}/{group} with {kind:?} scales"),
        }
    }
}

impl Encoding {
    /// Every encoding that a checkpoint may have.
    pub(super) fn all() -> Vec<Self> {
        let mut all: Vec<Self> = [PlainType::F32, PlainType::F16, PlainType::Bf16].map(Self::Plain).to_vec();
        all.push(Self::Fp8);
        for bits in [2, 3, 4, 5, 6, 8] {
            for group in [32, 64, 128] {
                all.push(Self::Affine { bits, group, kind: PlainType::Bf16 });
            }
        }
        all.push(Self::Affine { bits: 4, group: 64, kind: PlainType::F32 });
        all.push(Self::Affine { bits: 8, group: 32, kind: PlainType::F16 });
        all
    }

    /// One of each family.
    pub(super) fn some() -> Vec<Self> {
        vec![
            Self::Plain(PlainType::Bf16),
            Self::Fp8,
            Self::Affine { bits: 4, group: 64, kind: PlainType::Bf16 },
            Self::Affine { bits: 6, group: 32, kind: PlainType::Bf16 },
        ]
    }

    /// Whether rows of any length can be stored.
    pub(super) fn takes_any_width(self) -> bool {
        !matches!(self, Self::Affine { .. })
    }

    /// A matrix `[rows, cols]` whose values are of order 1.
    pub(super) fn matrix(self, name: &str, rows: usize, cols: usize, seed: &mut Seed) -> QuantMatrix {
        let form = match self {
            Self::Plain(kind) => Form::Plain { kind, values: numbers(kind, rows * cols, || seed.normal()) },
            Self::Fp8 => fp8(rows, cols, seed),
            Self::Affine { bits, group, kind } => affine(bits, group, kind, rows, cols, seed),
        };
        QuantMatrix { name: name.into(), rows, cols, form }
    }
}

/// `count` numbers of a type.
fn numbers(kind: PlainType, count: usize, mut next: impl FnMut() -> f32) -> HostBytes {
    let mut bytes = Vec::with_capacity(count * kind.size());
    for _ in 0..count {
        match kind {
            PlainType::F32 => bytes.extend(next().to_le_bytes()),
            PlainType::F16 => bytes.extend(half::f16::from_f32(next()).to_le_bytes()),
            PlainType::Bf16 => bytes.extend(half::bf16::from_f32(next()).to_le_bytes()),
        }
    }
    HostBytes::from_vec(bytes)
}

fn fp8(rows: usize, cols: usize, seed: &mut Seed) -> Form {
    let blocks = rows.div_ceil(128) * cols.div_ceil(128);
    let codes = (0..rows * cols).map(|_| match seed.bits() as u8 {
        // The two codes that are not numbers.
        code if code & 0x7F == 0x7F => code - 1,
        code => code,
    });
    let codes = HostBytes::from_vec(codes.collect());
    let scales = numbers(PlainType::F32, blocks, || seed.between(0.002, 0.02));
    Form::Fp8Block { codes, scales, first_row: 0 }
}

fn affine(bits: u8, group: usize, kind: PlainType, rows: usize, cols: usize, seed: &mut Seed) -> Form {
    let width = usize::from(bits);
    let mut codes = vec![0u8; rows * cols * width / 8];
    for row in codes.chunks_exact_mut(cols * width / 8) {
        for index in 0..cols {
            let code = seed.bits() & ((1 << width) - 1);
            for bit in 0..width {
                let place = index * width + bit;
                row[place / 8] |= ((code >> bit & 1) as u8) << (place % 8);
            }
        }
    }
    let pairs = rows * (cols / group);
    let step = 4.0 / (1 << width) as f32;
    let scales = numbers(kind, pairs, || seed.between(0.5, 1.0) * step);
    let biases = numbers(kind, pairs, || seed.between(-2.0, -0.5));
    Form::Affine { bits, group, kind, codes: HostBytes::from_vec(codes), scales, biases }
}

/// The bf16 number nearest to a normal `value`, the even one of two.
fn round_to_bf16(value: f64) -> f64 {
    let exponent = (value.to_bits() >> 52 & 0x7FF) as i32 - 1023;
    // Numbers of eight significant bits.
    let step = 2f64.powi(exponent - 7);
    if value == 0.0 { value } else { (value / step).round_ties_even() * step }
}

/// What a product with a matrix is made of: for each weight its value and the sum of the magnitudes that a product
/// may add up to form it (an affine weight may come as code and bias).
pub(super) struct Weights {
    pub(super) cols: usize,
    values: Vec<f64>,
    magnitudes: Vec<f64>,
    /// The part of each value that a scale multiplies.
    scaled: Vec<f64>,
    /// The values as they are stored, where a product takes others.
    stored: Option<Vec<f64>>,
}

impl Weights {
    /// As they are stored.
    pub(super) fn new(parts: &[QuantMatrix]) -> Self {
        Self::read(parts, false)
    }

    /// As a product takes them: affine ones whose scales are bf16 rounded to bf16, if `rounded`.
    pub(super) fn read(parts: &[QuantMatrix], rounded: bool) -> Self {
        let cols = parts.first().map_or(0, |part| part.cols);
        let (values, magnitudes, scaled) = (Vec::new(), Vec::new(), Vec::new());
        let mut all = Self { cols, values, magnitudes, scaled, stored: rounded.then(Vec::new) };
        for part in parts {
            let mut values = part.decode_f64();
            all.stored.iter_mut().for_each(|stored| stored.extend(&values));
            let rounded = rounded && matches!(part.form, Form::Affine { kind: PlainType::Bf16, .. });
            if rounded {
                for value in &mut values {
                    *value = round_to_bf16(*value);
                }
            }
            let bias = |place: usize| match &part.form {
                Form::Affine { group, kind, biases, .. } => {
                    let pair = place / cols * (cols / group) + place % cols / group;
                    f64::from(kind.read(biases.as_slice(), pair))
                }
                _ => 0.0,
            };
            for (place, value) in values.iter().enumerate() {
                let bias = bias(place);
                all.scaled.push(value - bias);
                all.magnitudes.push(if rounded { value.abs() } else { (value - bias).abs() + bias.abs() });
            }
            all.values.extend(values);
        }
        all
    }

    pub(super) fn rows(&self) -> usize {
        self.values.len().checked_div(self.cols).unwrap_or(0)
    }

    /// Weight (`row`, `col`); `mutated` takes its scale 1 % too large.
    pub(super) fn value(&self, row: usize, col: usize, mutated: bool) -> f64 {
        let place = row * self.cols + col;
        if mutated { self.values[place] + 0.01 * self.scaled[place] } else { self.values[place] }
    }

    /// Weight (`row`, `col`) as it is stored, where a product takes another.
    pub(super) fn stored(&self, row: usize, col: usize) -> Option<f64> {
        self.stored.as_ref().map(|stored| stored[row * self.cols + col])
    }

    pub(super) fn magnitude(&self, row: usize, col: usize) -> f64 {
        self.magnitudes[row * self.cols + col]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rounding_to_bf16_is_that_of_numbers_that_fp32_holds() {
        let mut seed = Seed::new(3);
        let rounds_to = |value: f64, expected: f64| {
            assert_eq!(round_to_bf16(value).to_bits(), expected.to_bits(), "{value}");
        };
        for _ in 0..10_000 {
            let value = seed.normal() * 3.0;
            rounds_to(f64::from(value), f64::from(half::bf16::from_f32(value).to_f32()));
        }
        // Half a step above 1, and a little more than fp32 could say.
        rounds_to(1.0 + 1.0 / 256.0, 1.0);
        rounds_to(1.0 + 1.0 / 256.0 + 2f64.powi(-40), 1.0 + 1.0 / 128.0);
        rounds_to(0.0, 0.0);
    }
}
