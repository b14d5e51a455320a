//! The encodings against mlx and torch: fixtures in `fixtures/`, made by those libraries.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end them")]

mod support;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use flint_weights::matrix::{FP8_BLOCK, affine_code, e4m3};
use flint_weights::safetensors::Header;
use flint_weights::{Form, HostBytes, PlainType, QuantMatrix};
use half::{bf16, f16};

/// All tensors of a fixture, read with Flint's own header reader.
struct Fixture {
    bytes: HostBytes,
    tensors: HashMap<String, flint_weights::safetensors::TensorInfo>,
}

impl Fixture {
    fn read(file: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(file);
        let bytes = HostBytes::new(Arc::new(std::fs::read(path).unwrap()));
        let header = Header::of_bytes(file, &bytes).unwrap();
        Self {
            bytes,
            tensors: header.tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect(),
        }
    }

    fn shape(&self, name: &str) -> &[usize] {
        &self.tensors[name].shape
    }

    fn bytes(&self, name: &str) -> HostBytes {
        let tensor = &self.tensors[name];
        self.bytes.slice(tensor.start as usize..tensor.end as usize).unwrap()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let (kind, bytes) = (self.tensors[name].dtype.plain().unwrap(), self.bytes(name));
        (0..bytes.len() / kind.size()).map(|index| kind.read(bytes.as_slice(), index)).collect()
    }

    fn affine(&self, stem: &str, bits: u8, group: usize) -> QuantMatrix {
        let codes = format!("{stem}.packed");
        let (rows, words) = (self.shape(&codes)[0], self.shape(&codes)[1]);
        let kind = self.tensors[&format!("{stem}.scales")].dtype.plain().unwrap();
        let form = Form::Affine {
            bits,
            group,
            kind,
            codes: self.bytes(&codes),
            scales: self.bytes(&format!("{stem}.scales")),
            biases: self.bytes(&format!("{stem}.biases")),
        };
        let matrix = QuantMatrix { name: stem.to_owned(), rows, cols: words * 32 / usize::from(bits), form };
        matrix.check().unwrap();
        matrix
    }
}

fn kinds() -> [(&'static str, PlainType); 3] {
    [("BF16", PlainType::Bf16), ("F16", PlainType::F16), ("F32", PlainType::F32)]
}

fn each_width(mut visit: impl FnMut(&str, u8, usize, PlainType)) {
    for (name, kind) in kinds() {
        for bits in [2, 3, 4, 5, 6, 8] {
            for group in [32, 64, 128] {
                visit(&format!("{name}.b{bits}.g{group}"), bits, group, kind);
            }
        }
    }
}

fn round(value: f32, kind: PlainType) -> f32 {
    match kind {
        PlainType::F32 => value,
        PlainType::F16 => f16::from_f32(value).to_f32(),
        PlainType::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

/// Codes as one stream of bits, lowest first: the reverse of reading them.
fn pack(codes: &[u32], bits: u8) -> Vec<u8> {
    let width = usize::from(bits);
    let mut bytes = vec![0; codes.len() * width / 8];
    for (index, code) in codes.iter().enumerate() {
        for bit in 0..width {
            let at = index * width + bit;
            bytes[at / 8] |= ((code >> bit & 1) as u8) << (at % 8);
        }
    }
    bytes
}

#[test]
fn affine_codes_of_every_width_unpack_and_repack_to_the_same_words() {
    let fixture = Fixture::read("mlx_affine.safetensors");
    each_width(|stem, bits, group, _| {
        let matrix = fixture.affine(stem, bits, group);
        let Form::Affine { codes, .. } = &matrix.form else { panic!("{stem}") };
        let row = codes.len() / matrix.rows;
        for stream in codes.as_slice().chunks(row) {
            let read: Vec<u32> =
                (0..matrix.cols).map(|col| affine_code(stream, usize::from(bits), col)).collect();
            assert!(read.iter().all(|code| *code < 1 << bits));
            assert_eq!(pack(&read, bits), stream, "{stem}");
        }
    });
}

#[test]
fn affine_matrices_decode_to_what_mlx_gives_with_its_two_roundings() {
    let fixture = Fixture::read("mlx_affine.safetensors");
    each_width(|stem, bits, group, kind| {
        let matrix = fixture.affine(stem, bits, group);
        let Form::Affine { codes, scales, biases, .. } = &matrix.form else { panic!("{stem}") };
        let expected = fixture.floats(&format!("{stem}.dequantized"));
        let row = codes.len() / matrix.rows;
        for (index, expected) in expected.iter().enumerate() {
            let (at, col) = (index / matrix.cols, index % matrix.cols);
            let code = affine_code(&codes.as_slice()[at * row..(at + 1) * row], usize::from(bits), col);
            let pair = at * (matrix.cols / group) + col / group;
            let product = round(kind.read(scales.as_slice(), pair) * code as f32, kind);
            let value = round(product + kind.read(biases.as_slice(), pair), kind);
            assert_eq!(value.to_bits(), expected.to_bits(), "{stem} [{at}, {col}]");
        }
    });
}

#[test]
fn exact_affine_values_give_mlx_products_within_their_rounding() {
    let fixture = Fixture::read("mlx_affine.safetensors");
    let x = fixture.floats("F32.x");
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            let matrix = fixture.affine(&format!("F32.b{bits}.g{group}"), bits, group);
            let (weights, y) = (matrix.decode_f64(), fixture.floats(&format!("F32.b{bits}.g{group}.y")));
            let largest = y.iter().fold(0.0_f64, |largest, y| largest.max(f64::from(y.abs())));
            for (index, expected) in y.iter().enumerate() {
                let (row, out) = (index / matrix.rows, index % matrix.rows);
                let x = &x[row * matrix.cols..(row + 1) * matrix.cols];
                let w = &weights[out * matrix.cols..(out + 1) * matrix.cols];
                let sum: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * w).sum();
                assert!(
                    (sum - f64::from(*expected)).abs() <= 1e-5 * largest,
                    "b{bits} g{group} [{row}, {out}]"
                );
            }
        }
    }
}

#[test]
fn an_expert_is_a_contiguous_part_of_its_stack() {
    let fixture = Fixture::read("mlx_affine.safetensors");
    let expected = fixture.floats("experts.dequantized");
    for expert in 0..6 {
        let part = |name: &str| {
            let bytes = fixture.bytes(&format!("experts.{name}"));
            let len = bytes.len() / 6;
            bytes.slice(expert * len..(expert + 1) * len).unwrap()
        };
        let form = Form::Affine {
            bits: 3,
            group: 64,
            kind: PlainType::F32,
            codes: part("packed"),
            scales: part("scales"),
            biases: part("biases"),
        };
        let matrix = QuantMatrix { name: "expert".to_owned(), rows: 16, cols: 128, form };
        matrix.check().unwrap();
        let expected = &expected[expert * 16 * 128..(expert + 1) * 16 * 128];
        for (value, expected) in matrix.decode_f64().into_iter().zip(expected) {
            assert!((value - f64::from(*expected)).abs() <= 1e-6, "{value} {expected}");
        }
    }
}

#[test]
fn every_e4m3_code_has_torchs_value() {
    for file in ["mlx_affine.safetensors", "fp8_block.safetensors"] {
        let values = Fixture::read(file).floats("e4m3.values");
        for (code, expected) in values.iter().enumerate() {
            let value = e4m3(code as u8);
            let same = value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan());
            assert!(same, "{file}: {code:#x} is {value}, not {expected}");
        }
        assert_eq!(values.iter().filter(|value| value.is_nan()).count(), 2);
    }
}

fn fp8(fixture: &Fixture, stem: &str) -> QuantMatrix {
    let weight = format!("{stem}.weight");
    let (rows, cols) = (fixture.shape(&weight)[0], fixture.shape(&weight)[1]);
    let scales = fixture.bytes(&format!("{stem}.weight_scale_inv"));
    let form = Form::Fp8Block { codes: fixture.bytes(&weight), scales, first_row: 0 };
    let matrix = QuantMatrix { name: stem.to_owned(), rows, cols, form };
    matrix.check().unwrap();
    matrix
}

#[test]
fn fp8_blocks_decode_to_transformers_numbers_bit_for_bit() {
    let fixture = Fixture::read("fp8_block.safetensors");
    for stem in ["full", "cut"] {
        let values = fp8(&fixture, stem).decode_f64();
        let exact = fixture.floats(&format!("{stem}.dequantized_f32"));
        let rounded = fixture.floats(&format!("{stem}.dequantized_bf16"));
        for ((value, exact), rounded) in values.iter().zip(&exact).zip(&rounded) {
            assert_eq!((*value as f32).to_bits(), exact.to_bits());
            assert_eq!(bf16::from_f32(*value as f32).to_f32().to_bits(), rounded.to_bits());
        }
    }
}

#[test]
fn rows_cut_anywhere_decode_as_in_the_whole() {
    let fixture = Fixture::read("fp8_block.safetensors");
    let affine = Fixture::read("mlx_affine.safetensors");
    for whole in [fp8(&fixture, "full"), fp8(&fixture, "cut"), affine.affine("BF16.b5.g32", 5, 32)] {
        let values = whole.decode_f64();
        let step = whole.rows / 8 - 1;
        for start in (0..whole.rows).step_by(step) {
            for end in (start..=whole.rows).step_by(step) {
                let cut = whole.cut_rows(start..end).unwrap();
                cut.check().unwrap();
                assert!(cut.decode_f64() == values[start * whole.cols..end * whole.cols], "{start}..{end}");
                let again = cut.cut_rows(0..(end - start) / 2).unwrap();
                assert!(
                    again.decode_f64()
                        == values[start * whole.cols..(start + (end - start) / 2) * whole.cols]
                );
            }
        }
        assert!(whole.cut_rows(0..whole.rows + 1).is_none());
    }
    assert_eq!(FP8_BLOCK, 128);
}
