//! EXL3 against exllamav3: its own quantiser's tensors with what its kernels made of them, and a checkpoint that its
//! converter wrote. Both are too large for the repository; `cargo xtask goldens` takes their places.

use std::collections::HashMap;
use std::path::Path;

use flint_backend::ops::{Linear, Ops};
use flint_backend::{Backend, Element, Precision, Rows};
use flint_cpu::{Arithmetic, Cpu};
use flint_model::bank::Experts;
use flint_model::{Glm, LanguageModel};
use flint_weights::exl3::{BLOCK, Codebook, Exl3, Rate, TILE, TILE_WEIGHTS, place, states, unpack_signs};
use flint_weights::{Checkpoint, Form, HostBytes, PlainType, QuantMatrix, Source};
use serde_json::Value;

use crate::contracts::{chunked, concurrent, drafted, resumed};
use crate::feeding::{best, feed, greedy};
use crate::goldens::{Goldens, assert_close, floats};
use crate::{arithmetics, cpu, sizes};

/// Unrounded rotated inputs against exllamav3's fp16 ones, and the same inputs: parts of the largest output.
const UNROUNDED: f64 = 1e-3;
const SAME_INPUTS: f64 = 2e-6;
/// Largest distance of logits from transformers' in fp32 on the same weights: measured 1.2e-5 in fp32, 0.015 with bf16
/// caches. exllamav3 itself, which computes in fp16, is 0.058 away.
const LOGITS_FP32: f32 = 1e-4;
const LOGITS_BF16: f32 = 0.05;
/// How far the second logit must be away for the best token to be held to, by the checkpoint's README.
const FIRM: f32 = 0.6;
/// The same distance from exllamav3's own logits.
const LOGITS_EXLLAMA: f32 = 0.1;

/// All tensors of a file.
struct File {
    tensors: HashMap<String, (Vec<usize>, Vec<u8>)>,
    metadata: HashMap<String, String>,
}

impl File {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter();
        Self {
            tensors: tensors.map(|(name, t)| (name, (t.shape().to_vec(), t.data().to_vec()))).collect(),
            metadata: header.metadata().clone().unwrap_or_default(),
        }
    }

    fn bytes(&self, name: &str) -> &[u8] {
        &self.tensors.get(name).unwrap_or_else(|| panic!("the file has no {name}")).1
    }

    fn halves(&self, name: &str) -> Vec<f32> {
        let bytes = self.bytes(name);
        (0..bytes.len() / 2).map(|index| PlainType::F16.read(bytes, index)).collect()
    }

    fn words(&self, name: &str) -> Vec<u16> {
        self.bytes(name).chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    }

    fn matrix(&self, case: &str, codebook: Codebook) -> QuantMatrix {
        let trellis = format!("{case}.trellis");
        let shape = &self.tensors[&trellis].0;
        let (inputs, outputs) = (shape[0] * TILE, shape[1] * TILE);
        let host = |name: &str| HostBytes::from_vec(self.bytes(&format!("{case}.{name}")).to_vec());
        let form = Form::Exl3(Exl3 {
            rate: Rate::of_words(shape[2]).unwrap(),
            codebook,
            inputs,
            outputs,
            first_row: 0,
            trellis: host("trellis"),
            input_scales: host("suh"),
            output_scales: host("svh"),
        });
        let matrix = QuantMatrix { name: case.to_owned(), rows: outputs, cols: inputs, form };
        matrix.check().unwrap();
        matrix
    }
}

fn codebook(name: &str) -> Codebook {
    let all = [Codebook::ThreeInst, Codebook::Mcg, Codebook::Mul1];
    all.into_iter().find(|codebook| codebook.to_string() == name).unwrap_or_else(|| panic!("codebook {name}"))
}

/// Compares every codebook entry, state, rotated weight and product of the fixture.
#[allow(clippy::print_stdout)]
pub fn check_fixture(path: &Path) {
    let file = File::read(path);
    for name in ["3inst", "mcg", "mul1"] {
        let table = file.words(&format!("codebook.{name}"));
        for (state, value) in (0..=u16::MAX).zip(&table) {
            assert_eq!(codebook(name).value(state).to_bits(), *value, "{name}: state {state:#06x}");
        }
        assert_eq!(table.len(), 1 << 16);
    }
    assert_eq!(unpack_signs(file.bytes("signs.packed")), file.bytes("signs.values"));
    let cases: Value = serde_json::from_str(&file.metadata["cases"]).unwrap();
    let cases = cases.as_object().unwrap();
    for (case, facts) in cases {
        let matrix = file.matrix(case, codebook(facts["codebook"].as_str().unwrap()));
        check_decoding(&file, case, &matrix);
        check_products(&file, case, &matrix);
    }
    println!("{}: {} matrices, every bit and every product", path.display(), cases.len());
}

/// States and rotated weights by bits; the weights within what exllamav3's fp16 steps leave.
fn check_decoding(file: &File, case: &str, matrix: &QuantMatrix) {
    let Form::Exl3(exl3) = &matrix.form else { panic!("{case}") };
    if file.tensors.contains_key(&format!("{case}.states")) {
        let expected = file.words(&format!("{case}.states"));
        for (tile, expected) in expected.chunks_exact(TILE_WEIGHTS).enumerate() {
            let across = exl3.outputs / TILE;
            let found = states(exl3.tile(tile / across, tile % across), exl3.rate);
            assert_eq!(found, expected, "{case}: states of tile {tile}");
        }
    }
    if file.tensors.contains_key(&format!("{case}.inner")) {
        let expected = file.words(&format!("{case}.inner"));
        for block in 0..exl3.outputs / BLOCK {
            for (index, value) in exl3.rotated(block).iter().enumerate() {
                let (input, output) = (index / BLOCK, block * BLOCK + index % BLOCK);
                let expected = expected[input * exl3.outputs + output];
                assert_eq!(value.to_bits(), expected, "{case}: rotated weight ({input}, {output})");
            }
        }
    }
    assert_eq!(place(0), (0, 0));
    let weights = matrix.decode_f64();
    let expected = file.halves(&format!("{case}.weight"));
    let transposed = (0..matrix.cols)
        .flat_map(|input| (0..matrix.rows).map(move |output| output * matrix.cols + input))
        .map(|at| weights[at]);
    assert_near(&format!("{case}: weights"), transposed, &expected, 1e-3);
}

/// Products in every arithmetic: within the bounds of the float64 product and of exllamav3's.
fn check_products(file: &File, case: &str, matrix: &QuantMatrix) {
    let x = file.halves(&format!("src.{}x{}.x", matrix.cols, matrix.rows));
    let weights = matrix.decode_f64();
    let exact: Vec<f32> = x
        .chunks_exact(matrix.cols)
        .flat_map(|x| {
            weights
                .chunks_exact(matrix.cols)
                .map(move |w| w.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum::<f64>() as f32)
        })
        .collect();
    let same = with_rotated_inputs(file, case, matrix);
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, 2);
        let found = product(&mut cpu, matrix, &x);
        let what = format!("{case} {arithmetic:?}");
        assert_near(&format!("{what}, float64"), found.iter().map(|y| f64::from(*y)), &exact, 1e-6);
        let name = format!("{case}.y_gemm_f32");
        if !file.tensors.contains_key(&name) {
            continue;
        }
        let bytes = file.bytes(&name);
        let expected: Vec<f32> = (0..bytes.len() / 4).map(|at| PlainType::F32.read(bytes, at)).collect();
        assert_near(&what, found.iter().map(|y| f64::from(*y)), &expected, UNROUNDED);
        let found = product(&mut cpu, &same.0, &same.1);
        let what = format!("{what}, inputs rounded as exllamav3 does");
        assert_near(&what, found.iter().map(|y| f64::from(*y)), &expected, SAME_INPUTS);
    }
}

/// The matrix without scales of inputs, and inputs that its rotation makes exllamav3's rotated inputs of.
fn with_rotated_inputs(file: &File, case: &str, matrix: &QuantMatrix) -> (QuantMatrix, Vec<f32>) {
    let Form::Exl3(exl3) = &matrix.form else { panic!("{case}") };
    let mut inputs = file.halves(&format!("{case}.xh"));
    for block in inputs.chunks_exact_mut(BLOCK) {
        let rotated: Vec<f64> = (0..BLOCK)
            .map(|a| {
                let sign = |b: usize| if (a & b).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                let sum: f64 = block.iter().enumerate().map(|(b, x)| sign(b) * f64::from(*x)).sum();
                sum / (BLOCK as f64).sqrt()
            })
            .collect();
        block.iter_mut().zip(rotated).for_each(|(to, from)| *to = from as f32);
    }
    let ones = HostBytes::from_vec(0x3C00_u16.to_le_bytes().repeat(exl3.inputs));
    let form = Form::Exl3(Exl3 { input_scales: ones, ..exl3.clone() });
    (QuantMatrix { form, ..matrix.clone() }, inputs)
}

fn product(cpu: &mut Cpu, matrix: &QuantMatrix, x: &[f32]) -> Vec<f32> {
    let rows = x.len() / matrix.cols;
    let uploaded = cpu.upload(std::slice::from_ref(matrix), Precision::Product).unwrap();
    let [from, to] = [x.len(), rows * matrix.rows].map(|len| cpu.allocate(Element::F32, len).unwrap());
    cpu.write_f32(&from, 0, x).unwrap();
    let (x, out) = (Rows::dense(&from, rows, matrix.cols), Rows::dense(&to, rows, matrix.rows));
    cpu.linear(&Linear { out, x, matrix: uploaded }).unwrap();
    let mut found = vec![0.0; rows * matrix.rows];
    cpu.read_f32(&to, 0, &mut found).unwrap();
    found
}

/// Fails when a value is farther away than `most` of the largest.
fn assert_near(what: &str, found: impl Iterator<Item = f64>, expected: &[f32], most: f64) {
    let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(f64::from(value.abs())));
    let mut count = 0;
    for (index, (found, expected)) in found.zip(expected).enumerate() {
        let apart = (found - f64::from(*expected)).abs() / largest;
        assert!(apart <= most, "{what}: value {index} is {apart:e} of the largest away, {most:e} is allowed");
        count += 1;
    }
    assert_eq!(count, expected.len(), "{what}: values");
}

/// Compares a converted checkpoint with its goldens, and holds it to the whole-program contracts.
#[allow(clippy::print_stdout)]
pub fn check_model(folder: &Path) {
    let checkpoint = Checkpoint::open(Source::Folder(folder.to_owned())).unwrap();
    let goldens = Goldens::open(&folder.join("goldens/goldens.safetensors"));
    for arithmetic in arithmetics() {
        let mut model =
            Glm::load(&checkpoint, cpu(arithmetic, 2), sizes(), Experts::Resident, &mut |_, _| {}).unwrap();
        let label = format!("{arithmetic:?}");
        match arithmetic {
            Arithmetic::Lanes => check_fp32(&mut model, &goldens),
            Arithmetic::Dot => check_bf16(&mut model, &goldens),
        }
        chunked(&mut model, &label);
        resumed(&mut model, &label, &[1, 63, 64, 255, 289]);
        concurrent(&mut model, &label, 3);
        drafted(&mut model, &label, 300, 1);
    }
    println!("{}: goldens and contracts", folder.display());
}

/// Logits and greedy tokens in fp32, the same bits as on every machine.
fn check_fp32(model: &mut dyn LanguageModel, goldens: &Goldens) {
    check_logits(model, goldens, LOGITS_FP32);
    for prompt in 0..4 {
        let tokens = goldens.tokens(&format!("prompt{prompt}.ids"));
        let last = feed(model, &tokens, &[tokens.len()]).pop().map(|row| floats(&row)).unwrap_or_default();
        let what = format!("prompt {prompt}");
        assert_close(&what, &last, &goldens.floats(&format!("prompt{prompt}.last_logits")), LOGITS_EXLLAMA);
        let (found, _) = greedy(model, &tokens, 63);
        assert_eq!(found, goldens.tokens(&format!("greedy{prompt}.tokens")), "{what}: greedy tokens");
    }
}

/// With bf16 caches: a choice of experts or pools that is nearly even may fall otherwise, which moved logits by 0.9. The best
/// token behind the reference's tokens is its best token wherever the second is far away.
fn check_bf16(model: &mut dyn LanguageModel, goldens: &Goldens) {
    check_logits(model, goldens, LOGITS_BF16);
    for prompt in 0..4 {
        let mut tokens = goldens.tokens(&format!("prompt{prompt}.ids"));
        let (first, expected) = (tokens.len() - 1, goldens.tokens(&format!("greedy{prompt}.tokens")));
        tokens.extend(&expected[..expected.len() - 1]);
        let rows = feed(model, &tokens, &[tokens.len()]);
        let margins = goldens.floats(&format!("greedy{prompt}.margin_rebuilt"));
        for (step, expected) in expected.iter().enumerate().filter(|(step, _)| margins[*step] >= FIRM) {
            assert_eq!(best(&rows[first + step]), *expected, "prompt {prompt}, step {step}: best token");
        }
    }
}

fn check_logits(model: &mut dyn LanguageModel, goldens: &Goldens, tolerance: f32) {
    let tokens = goldens.tokens("prompt40.ids");
    let logits: Vec<f32> = feed(model, &tokens, &[tokens.len()]).iter().flat_map(floats).collect();
    assert_close("rebuilt weights", &logits, &goldens.floats("prompt40.logits_rebuilt"), tolerance);
    assert_close("exllamav3", &logits, &goldens.floats("prompt40.logits"), LOGITS_EXLLAMA);
}
