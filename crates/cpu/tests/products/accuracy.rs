//! Products against float64, within a bound that follows from the depth of the sums.

use flint_backend::{Backend, Precision, Rows, ops, ops::Ops};
use flint_cpu::{Arithmetic, Level};
use flint_weights::{Form, PlainType, QuantMatrix};

use crate::support::{
    Kind, activations, arithmetics, cpu, download, kinds, linear, matrix, single, upload, upload_u32,
};

/// Input widths of the network's matrices: hidden, KDA channels, attention heads · 256, q and kv ranks, expert width,
/// head widths.
const WIDTHS: [usize; 8] = [4096, 8192, 16384, 1536, 2048, 512, 256, 128];

/// Exact output, and the magnitude that its rounding errors scale with: `Σ |scale · code · x| + |bias · x|`.
fn exact(matrix: &QuantMatrix, row: usize, x: &[f64]) -> (f64, f64) {
    let weights = matrix.decode_row_f64(row);
    let biases: Vec<f64> = match &matrix.form {
        Form::Affine { group, kind, biases, .. } => (0..matrix.cols)
            .map(|col| f64::from(kind.read(biases.as_slice(), row * (matrix.cols / group) + col / group)))
            .collect(),
        _ => vec![0.0; matrix.cols],
    };
    let sum = weights.iter().zip(x).map(|(w, x)| w * x).sum();
    let terms = weights.iter().zip(&biases).zip(x);
    (sum, terms.map(|((w, b), x)| ((w - b) * x).abs() + (b * x).abs()).sum())
}

/// Roundings on the longest way of a product into an output: its lane's 16 steps, one scale a block of 256, one bias
/// step for 16 groups, the group sum's lanes and fold, the fold of the lanes, and the output's own.
fn depth(matrix: &QuantMatrix) -> f64 {
    let bias = match &matrix.form {
        Form::Affine { group, .. } => (matrix.cols / group).div_ceil(16) + group / 16 + 4,
        _ => 0,
    };
    (16 + matrix.cols.div_ceil(256) + bias + 4 + 1) as f64
}

fn rounded(x: &[f32], arithmetic: Arithmetic, form: &Form) -> Vec<f64> {
    let exact_in_bf16 = !matches!(form, Form::Plain { kind: PlainType::F16 | PlainType::F32, .. });
    let round = arithmetic == Arithmetic::Dot && exact_in_bf16;
    x.iter().map(|x| f64::from(if round { half::bf16::from_f32(*x).to_f32() } else { *x })).collect()
}

/// Largest error over bound of a product's outputs against `reference`.
fn worst(y: &[f32], reference: &QuantMatrix, x: &[f64]) -> f64 {
    let rows = reference.rows;
    let mut worst = 0.0f64;
    for (index, y) in y.iter().enumerate() {
        let (row, output) = (index / rows, index % rows);
        let (sum, magnitude) = exact(reference, output, &x[row * reference.cols..(row + 1) * reference.cols]);
        // Half an ulp at each rounding; subnormals of the dot product's instruction are zeros.
        let bound = depth(reference) * magnitude * 2f64.powi(-24) + 1e-37;
        worst = worst.max((f64::from(*y) - sum).abs() / bound);
    }
    worst
}

/// The same matrix with scales (plain: values) 1 % larger.
fn one_percent_off(matrix: &QuantMatrix) -> QuantMatrix {
    let mut weights = matrix.decode_f64();
    if let Form::Affine { group, kind, biases, .. } = &matrix.form {
        for (index, weight) in weights.iter_mut().enumerate() {
            let bias = f64::from(kind.read(biases.as_slice(), index / group));
            *weight = (*weight - bias) * 1.01 + bias;
        }
    } else {
        for weight in &mut weights {
            *weight *= 1.01;
        }
    }
    let values = weights.iter().flat_map(|weight| (*weight as f32).to_le_bytes()).collect();
    let form = Form::Plain { kind: PlainType::F32, values: flint_weights::HostBytes::from_vec(values) };
    QuantMatrix { form, ..matrix.clone() }
}

#[test]
fn every_format_is_within_its_bound_at_the_networks_widths_and_scales_off_by_one_percent_are_not() {
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 2);
        for (index, kind) in kinds().into_iter().enumerate() {
            // Each format meets a third of the widths, the formats of one width and group together all of them.
            for cols in WIDTHS.into_iter().skip(index % 3).step_by(3) {
                let matrix = matrix(kind, 10, cols, index as u64);
                let x = activations(2 * cols, cols as u64);
                let uploaded = single(&mut cpu, &matrix);
                let y = linear(&mut cpu, &uploaded, &x);
                let x = rounded(&x, arithmetic, &matrix.form);
                let error = worst(&y, &matrix, &x);
                assert!(error <= 1.0, "{arithmetic:?} {kind:?} {cols}: {error} of the bound");
                let mutated = worst(&y, &one_percent_off(&matrix), &x);
                assert!(
                    mutated > 1.0,
                    "{arithmetic:?} {kind:?} {cols}: a wrong scale is {mutated} of the bound"
                );
            }
        }
    }
}

#[test]
fn widths_that_end_inside_a_block_or_a_group_are_within_the_bound() {
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 1);
        for kind in kinds() {
            let widths: &[usize] = match kind {
                Kind::Affine { group: 32, .. } => &[32, 96, 288, 1056],
                Kind::Affine { group: 64, .. } => &[64, 192, 320, 1344],
                Kind::Affine { .. } => &[128, 384, 1152],
                Kind::Plain(_) | Kind::Fp8 => &[1, 7, 100, 129, 257, 300, 1000],
            };
            for cols in widths.iter().copied() {
                let matrix = matrix(kind, 150, cols, cols as u64);
                let x = activations(cols, 5);
                let uploaded = single(&mut cpu, &matrix);
                let y = linear(&mut cpu, &uploaded, &x);
                let error = worst(&y, &matrix, &rounded(&x, arithmetic, &matrix.form));
                assert!(error <= 1.0, "{arithmetic:?} {kind:?} {cols}: {error} of the bound");
            }
        }
    }
}

#[test]
fn a_matrix_with_full_precision_keeps_fp32_inputs_in_every_arithmetic() {
    let matrix = matrix(Kind::Plain(PlainType::Bf16), 24, 4096, 3);
    let x = activations(4096, 4);
    let mut outputs = Vec::new();
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 1);
        let uploaded = cpu.upload(std::slice::from_ref(&matrix), Precision::Full).unwrap();
        outputs.push(linear(&mut cpu, &uploaded, &x));
    }
    let exact_x: Vec<f64> = x.iter().copied().map(f64::from).collect();
    for y in &outputs {
        assert!(worst(y, &matrix, &exact_x) <= 1.0);
        assert_eq!(y, &outputs[0]);
    }
}

#[test]
fn an_fp8_matrix_cut_inside_a_block_uses_the_scales_of_its_own_rows() {
    let whole = matrix(Kind::Fp8, 300, 300, 7);
    let cut = whole.cut_rows(70..290).unwrap();
    let x = activations(300, 8);
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 1);
        let uploaded = [single(&mut cpu, &whole), single(&mut cpu, &cut)];
        let all = linear(&mut cpu, &uploaded[0], &x);
        assert_eq!(linear(&mut cpu, &uploaded[1], &x), all[70..290]);
    }
}

#[test]
fn embedded_rows_are_the_stored_values() {
    let mut cpu = cpu(Arithmetic::Lanes, Level::detect(), 2);
    for (index, kind) in kinds().into_iter().enumerate() {
        let parts = [matrix(kind, 130, 384, index as u64), matrix(kind, 40, 384, 99)];
        let table = cpu.upload(&parts, Precision::Product).unwrap();
        let tokens = [0, 169, 129, 130, 5];
        let buffer = upload_u32(&mut cpu, &tokens);
        let out = upload(&mut cpu, &vec![0.0; 5 * 384]);
        cpu.embed(&ops::Embed { out: Rows::dense(&out, 5, 384), table, tokens: buffer }).unwrap();
        let values: Vec<f64> = parts.iter().flat_map(QuantMatrix::decode_f64).collect();
        let found = download(&mut cpu, &out);
        for (row, token) in tokens.iter().enumerate() {
            for col in 0..384 {
                // One rounding of the exact value.
                let expected = values[*token as usize * 384 + col] as f32;
                assert_eq!(found[row * 384 + col], expected, "{kind:?}, token {token}, column {col}");
            }
        }
    }
}
