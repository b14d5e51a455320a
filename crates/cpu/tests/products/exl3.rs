//! Products with EXL3 matrices: against exllamav3's kernels, and against float64 within a bound of their three stages.

use flint_backend::{Backend, Error, Precision, Rows, ops, ops::Ops};
use flint_cpu::{Arithmetic, Level};
use flint_weights::exl3::{BLOCK, Codebook, Exl3, Rate, TILE};
use flint_weights::{Form, HostBytes, PlainType, QuantMatrix};
use safetensors::SafeTensors;

use crate::support::{
    Random, activations, arithmetics, assert_same_bits, cpu, linear, single, upload, upload_u32,
};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../weights/tests/fixtures/exl3.safetensors");

/// Every rate in a codebook that has it.
fn kinds() -> Vec<(Rate, Codebook)> {
    let rates = (0..=16).filter_map(Rate::of_halves);
    let codebook = |rate: Rate| match rate.halves() {
        4 | 10 => Codebook::ThreeInst,
        6 | 14 => Codebook::Mcg,
        _ => Codebook::Mul1,
    };
    rates.map(|rate| (rate, codebook(rate))).collect()
}

fn matrix((rate, codebook): (Rate, Codebook), rows: usize, cols: usize, seed: u64) -> QuantMatrix {
    let mut random = Random::new(seed);
    let (outputs, inputs) = (rows.next_multiple_of(BLOCK), cols.next_multiple_of(BLOCK));
    let tiles = inputs / TILE * (outputs / TILE);
    let trellis = (0..tiles * rate.tile_bytes()).map(|_| random.next() as u8).collect();
    let mut scales = |len: usize| {
        let mut scale = || {
            half::f16::from_f32((0.6 + 0.4 * random.unit()) * if random.below(2) == 0 { 1.0 } else { -1.0 })
        };
        HostBytes::from_vec((0..len).flat_map(|_| scale().to_le_bytes()).collect())
    };
    let (input_scales, output_scales) = (scales(inputs), scales(outputs));
    let trellis = HostBytes::from_vec(trellis);
    let form = Form::Exl3(Exl3 {
        rate,
        codebook,
        inputs,
        outputs,
        first_row: 0,
        trellis,
        input_scales,
        output_scales,
    });
    let matrix = QuantMatrix { name: format!("{rate} bits, {codebook}"), rows, cols, form };
    matrix.check().unwrap();
    matrix
}

fn parts(matrix: &QuantMatrix) -> &Exl3 {
    match &matrix.form {
        Form::Exl3(exl3) => exl3,
        other => panic!("{other:?}"),
    }
}

/// Exact outputs of a row, and how far rounding may move each.
struct Stages {
    outputs: Vec<f64>,
    slack: Vec<f64>,
}

/// Half an ulp of fp32, relative.
const U: f64 = 1.0 / (1 << 24) as f64;

/// The three stages in float64. Errors of one stage go through the next: magnitudes are those that occur, not the worst.
fn stages(matrix: &QuantMatrix, x: &[f64]) -> Stages {
    let exl3 = parts(matrix);
    let root = (BLOCK as f64).sqrt();
    // Rotation: the product with suh, seven additions, the product with 1 / √128 and that constant's own rounding.
    let mut rotated = vec![0.0; exl3.inputs];
    for (input, x) in x.iter().enumerate() {
        rotated[input] = x * f64::from(exl3.input_scale(input));
    }
    let mut rotated_slack = vec![0.0; exl3.inputs];
    for (block, slack) in rotated.chunks_exact_mut(BLOCK).zip(rotated_slack.chunks_exact_mut(BLOCK)) {
        let magnitude: f64 = block.iter().map(|x| x.abs()).sum::<f64>() / root;
        slack.fill(10.0 * U * magnitude);
        transform(block);
    }
    // Sums: 32 steps of a block, one addition for each block, two of the fold.
    let depth = (32 + exl3.inputs / BLOCK + 2) as f64;
    let (mut outputs, mut slack) = (Vec::new(), Vec::new());
    let (first, last) = (exl3.first_row / BLOCK, (exl3.first_row + matrix.rows).div_ceil(BLOCK));
    for block in first..last {
        let values = exl3.rotated(block);
        let (mut z, mut z_slack) = (vec![0.0; BLOCK], vec![0.0; BLOCK]);
        for (input, values) in values.chunks_exact(BLOCK).enumerate() {
            for (output, value) in values.iter().enumerate() {
                let value = value.to_f64();
                z[output] += value * rotated[input];
                let product = (value * rotated[input]).abs() + value.abs() * rotated_slack[input];
                z_slack[output] += value.abs() * rotated_slack[input] + depth * U * product;
            }
        }
        // The way back: seven additions, two products, the constant's rounding.
        let magnitude: f64 =
            z.iter().zip(&z_slack).map(|(z, slack)| slack + 10.0 * U * (z.abs() + slack)).sum();
        transform(&mut z);
        for (output, z) in z.into_iter().enumerate() {
            let scale = f64::from(exl3.output_scale(block * BLOCK + output));
            outputs.push(z * scale);
            slack.push(scale.abs() * magnitude / root + 1e-37);
        }
    }
    let skipped = exl3.first_row % BLOCK;
    let cut = |all: Vec<f64>| all[skipped..skipped + matrix.rows].to_vec();
    Stages { outputs: cut(outputs), slack: cut(slack) }
}

/// The scaled transform of a block.
fn transform(block: &mut [f64]) {
    let from = block.to_vec();
    for (a, value) in block.iter_mut().enumerate() {
        let sign = |b: usize| if (a & b).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        *value = from.iter().enumerate().map(|(b, x)| sign(b) * x).sum::<f64>() / (BLOCK as f64).sqrt();
    }
}

/// Largest error over bound of a row's outputs.
fn worst(y: &[f32], reference: &QuantMatrix, x: &[f32]) -> f64 {
    let x: Vec<f64> = x.iter().copied().map(f64::from).collect();
    let Stages { outputs, slack } = stages(reference, &x);
    let errors = y.iter().zip(outputs).zip(slack);
    errors.map(|((y, exact), slack)| (f64::from(*y) - exact).abs() / slack).fold(0.0, f64::max)
}

/// The same matrix with an `svh` 1 % larger.
fn one_percent_off(matrix: &QuantMatrix) -> QuantMatrix {
    let exl3 = parts(matrix);
    let scales =
        (0..exl3.outputs).flat_map(|o| half::f16::from_f32(exl3.output_scale(o) * 1.01).to_le_bytes());
    let output_scales = HostBytes::from_vec(scales.collect());
    QuantMatrix { form: Form::Exl3(Exl3 { output_scales, ..exl3.clone() }), ..matrix.clone() }
}

#[test]
fn every_rate_is_within_its_bound_and_scales_off_by_one_percent_are_not() {
    let sizes = [(128, 128), (256, 512), (130, 1536), (128, 4096), (7, 300), (40, 64)];
    for (index, kind) in kinds().into_iter().enumerate() {
        for (rows, cols) in sizes.into_iter().skip(index % 2).step_by(2) {
            let matrix = matrix(kind, rows, cols, index as u64);
            let x = activations(cols, cols as u64);
            for arithmetic in arithmetics() {
                let mut cpu = cpu(arithmetic, Level::detect(), 2);
                let uploaded = single(&mut cpu, &matrix);
                let y = linear(&mut cpu, &uploaded, &x);
                let error = worst(&y, &matrix, &x);
                assert!(error <= 1.0, "{} {rows} × {cols}: {error} of the bound", matrix.name);
                let mutated = worst(&y, &one_percent_off(&matrix), &x);
                assert!(mutated > 1.0, "{} {rows} × {cols}: wrong scales are {mutated} of it", matrix.name);
            }
        }
    }
}

#[test]
fn cuts_of_one_trellis_are_rows_of_the_whole() {
    let kind = (Rate::of_halves(6).unwrap(), Codebook::Mul1);
    let whole = matrix(kind, 384, 256, 5);
    let cuts = [0..128, 128..384, 70..290, 3..5].map(|rows| whole.cut_rows(rows).unwrap());
    let x = activations(3 * 256, 8);
    let mut cpu = cpu(Arithmetic::Lanes, Level::detect(), 2);
    let uploaded = single(&mut cpu, &whole);
    let all = linear(&mut cpu, &uploaded, &x);
    let uploaded = cpu.upload(&cuts, Precision::Product).unwrap();
    let found = linear(&mut cpu, &uploaded, &x);
    let expected: Vec<f32> =
        all.chunks_exact(384).flat_map(|y| [y, &y[70..290], &y[3..5]].concat()).collect();
    assert_same_bits("cuts", 606, &found, &expected);
}

#[test]
fn both_arithmetics_have_the_same_bits() {
    for kind in kinds() {
        let matrix = matrix(kind, 200, 384, 9);
        let x = activations(7 * 384, 3);
        let outputs = arithmetics().into_iter().map(|arithmetic| {
            let mut cpu = cpu(arithmetic, Level::detect(), 1);
            let uploaded = single(&mut cpu, &matrix);
            linear(&mut cpu, &uploaded, &x)
        });
        let outputs: Vec<Vec<f32>> = outputs.collect();
        for found in &outputs {
            assert_same_bits(&matrix.name, 200, found, &outputs[0]);
        }
    }
}

#[test]
fn products_are_within_a_thousandth_of_exllamav3s_which_rounds_its_inputs_to_fp16() {
    let file = std::fs::read(FIXTURE).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let bytes = |name: &str| HostBytes::from_vec(tensors.tensor(name).unwrap().data().to_vec());
    let x = bytes("x");
    let x: Vec<f32> = (0..5 * 256).map(|index| PlainType::F16.read(x.as_slice(), index)).collect();
    let cases = [("K2.5.mul1", Codebook::Mul1), ("K3.mcg", Codebook::Mcg), ("K2.3inst", Codebook::ThreeInst)];
    for (case, codebook) in cases {
        let part = |name: &str| bytes(&format!("{case}.256x128.{name}"));
        let words = tensors.tensor(&format!("{case}.256x128.trellis")).unwrap().shape()[2];
        let form = Form::Exl3(Exl3 {
            rate: Rate::of_words(words).unwrap(),
            codebook,
            inputs: 256,
            outputs: 128,
            first_row: 0,
            trellis: part("trellis"),
            input_scales: part("suh"),
            output_scales: part("svh"),
        });
        let host = QuantMatrix { name: case.into(), rows: 128, cols: 256, form };
        let expected = part("y_gemm_f32");
        let expected: Vec<f32> =
            (0..5 * 128).map(|index| PlainType::F32.read(expected.as_slice(), index)).collect();
        let largest = expected.iter().fold(0.0f32, |largest, y| largest.max(y.abs()));
        let mut cpu = cpu(Arithmetic::Lanes, Level::detect(), 1);
        let uploaded = single(&mut cpu, &host);
        let found = linear(&mut cpu, &uploaded, &x);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(
                (found - expected).abs() <= 1e-3 * largest,
                "{case}, output {index}: {found} for {expected}"
            );
        }
    }
}

#[test]
fn rows_of_a_trellis_are_no_embedding() {
    let mut cpu = cpu(Arithmetic::Lanes, Level::detect(), 1);
    let table = single(&mut cpu, &matrix(kinds()[0], 128, 128, 1));
    let (tokens, out) = (upload_u32(&mut cpu, &[3]), upload(&mut cpu, &[0.0; 128]));
    let error = cpu.embed(&ops::Embed { out: Rows::dense(&out, 1, 128), table, tokens }).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}
