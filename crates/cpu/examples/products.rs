//! Speed of products as shares of what this machine can do.
//!
//! `cargo run --release -p flint-cpu --example products -- [words that a line must hold …]`
//!
//! Read bandwidth and multiply-add peaks are measured in the same process. A product's roof is the slower of reading its
//! weights once and of its multiply-adds at the peak of its arithmetic; `share` is the roof's time over the product's.
//! Weights of 192 MiB or more are walked through, so that no cache holds them. Times are the best of several calls.

#![expect(clippy::print_stdout, reason = "a command")]

use std::time::{Duration, Instant};

use flint_backend::ops::{Linear, Ops};
use flint_backend::{Backend, Element, Precision, Rows};
use flint_cpu::limits::{MachineLimits, measure};
use flint_cpu::{Arithmetic, Cpu, CpuMatrix, Level, Options};
use flint_weights::exl3::{Codebook, Exl3, Rate};
use flint_weights::{Form, HostBytes, PlainType, QuantMatrix};

const OUTPUTS: usize = 4096;
const INPUTS: usize = 4096;
/// More than the caches of the machines in question.
const WALKED_BYTES: usize = 192 << 20;
const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 64, 512];
/// How long one line measures.
const BUDGET: Duration = Duration::from_millis(400);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut arithmetics = vec![(Arithmetic::Lanes, Level::detect())];
    if Level::Avx2.is_available() && Level::Avx512.is_available() {
        arithmetics.push((Arithmetic::Lanes, Level::Avx2));
    }
    if Arithmetic::dot_is_available() {
        arithmetics.insert(0, (Arithmetic::Dot, Level::detect()));
    }
    for threads in [1, 2] {
        if !words.is_empty()
            && words.iter().all(|word| word.ends_with("thr") && *word != format!("{threads}thr"))
        {
            continue;
        }
        let Some(limits) = measure(threads) else { return Err("not enough memory".into()) };
        println!(
            "{threads} threads: read {:.1} GB/s, fp32 {:.0} GFLOP/s, bf16 dot {:.0} GFLOP/s",
            limits.read_bytes_per_second / 1e9,
            limits.fma_per_second / 1e9,
            limits.dot_per_second.unwrap_or_default() / 1e9
        );
        for (arithmetic, level) in &arithmetics {
            let mut cpu = Cpu::new(Options { threads, arithmetic: *arithmetic, level: *level })?;
            for (name, form) in forms() {
                let label = format!("{threads}thr {arithmetic:?} {level:?} {name}");
                if words.iter().all(|word| label.split(' ').any(|part| part == word)) {
                    report(&mut cpu, &label, &form, &limits)?;
                }
            }
        }
    }
    Ok(())
}

/// Names and makers of one matrix of each storage.
fn forms() -> Vec<(String, Form)> {
    let weights = OUTPUTS * INPUTS;
    let affine = |bits: u8, group: usize| {
        let pairs = weights / group;
        Form::Affine {
            bits,
            group,
            kind: PlainType::Bf16,
            codes: random(weights * usize::from(bits) / 8),
            scales: numbers(pairs, 0.01),
            biases: numbers(pairs, -0.08),
        }
    };
    let mut forms: Vec<(String, Form)> =
        [(4, 64), (8, 64), (4, 32), (4, 128), (2, 64), (3, 64), (5, 64), (6, 64)]
            .into_iter()
            .map(|(bits, group)| (format!("affine {bits}/{group}"), affine(bits, group)))
            .collect();
    let values = HostBytes::from_vec(random(weights * 2).as_slice().iter().map(|byte| byte & 0x3F).collect());
    forms.push(("bf16".into(), Form::Plain { kind: PlainType::Bf16, values }));
    let codes = HostBytes::from_vec(random(weights).as_slice().iter().map(|byte| byte & 0xF7).collect());
    let scales = HostBytes::from_vec(0.01f32.to_le_bytes().repeat(weights / 128 / 128));
    forms.push(("fp8".into(), Form::Fp8Block { codes, scales, first_row: 0 }));
    for (halves, codebook) in
        [(4, Codebook::Mul1), (5, Codebook::Mul1), (6, Codebook::Mul1), (8, Codebook::Mul1)]
            .into_iter()
            .chain([(12, Codebook::Mul1), (16, Codebook::Mul1), (6, Codebook::Mcg), (6, Codebook::ThreeInst)])
    {
        if let Some(rate) = Rate::of_halves(halves) {
            let form = Form::Exl3(Exl3 {
                rate,
                codebook,
                inputs: INPUTS,
                outputs: OUTPUTS,
                first_row: 0,
                trellis: random(weights * halves / 16),
                input_scales: HostBytes::from_vec(vec![0x2C; 2 * INPUTS]),
                output_scales: HostBytes::from_vec(vec![0x2C; 2 * OUTPUTS]),
            });
            forms.push((format!("exl3 {rate}-{codebook}"), form));
        }
    }
    forms
}

fn random(bytes: usize) -> HostBytes {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    HostBytes::from_vec((0..bytes).map(|_| next()).collect())
}

fn numbers(count: usize, value: f32) -> HostBytes {
    HostBytes::from_vec(half::bf16::from_f32(value).to_le_bytes().repeat(count))
}

/// The same numbers at another place.
fn copy(form: &Form) -> Form {
    let again = |bytes: &HostBytes| HostBytes::from_vec(bytes.as_slice().to_vec());
    match form {
        Form::Plain { kind, values } => Form::Plain { kind: *kind, values: again(values) },
        Form::Affine { bits, group, kind, codes, scales, biases } => Form::Affine {
            bits: *bits,
            group: *group,
            kind: *kind,
            codes: again(codes),
            scales: again(scales),
            biases: again(biases),
        },
        Form::Fp8Block { codes, scales, first_row } => {
            Form::Fp8Block { codes: again(codes), scales: again(scales), first_row: *first_row }
        }
        Form::Exl3(exl3) => Form::Exl3(Exl3 { trellis: again(&exl3.trellis), ..exl3.clone() }),
    }
}

fn report(
    cpu: &mut Cpu,
    label: &str,
    form: &Form,
    limits: &MachineLimits,
) -> Result<(), Box<dyn std::error::Error>> {
    let host = QuantMatrix { name: label.into(), rows: OUTPUTS, cols: INPUTS, form: form.clone() };
    let bytes = host.bytes();
    let matrices = (0..WALKED_BYTES.div_ceil(bytes)).map(|_| {
        let host = QuantMatrix { form: copy(form), ..host.clone() };
        cpu.upload(&[host], Precision::Product)
    });
    let matrices = matrices.collect::<Result<Vec<CpuMatrix>, _>>()?;
    let peak = match cpu.options().arithmetic {
        Arithmetic::Dot if !matches!(form, Form::Exl3(_)) => {
            limits.dot_per_second.unwrap_or(limits.fma_per_second)
        }
        _ => limits.fma_per_second,
    };
    let mut one = None;
    for rows in ROWS {
        let seconds = time(cpu, &matrices, rows)?;
        let operations = 2.0 * (rows * OUTPUTS * INPUTS) as f64;
        let roof = (bytes as f64 / limits.read_bytes_per_second).max(operations / peak);
        println!(
            "{label:<34} {rows:>4} rows {:>8.3} ms {:>6.1} GB/s {:>6.0} GFLOP/s {:>4.0} % of the roof, {:>5.2} × one row",
            seconds * 1e3,
            bytes as f64 / seconds / 1e9,
            operations / seconds / 1e9,
            100.0 * roof / seconds,
            seconds / *one.get_or_insert(seconds)
        );
    }
    Ok(())
}

fn time(cpu: &mut Cpu, matrices: &[CpuMatrix], rows: usize) -> Result<f64, Box<dyn std::error::Error>> {
    let x = cpu.allocate(Element::F32, rows * INPUTS)?;
    let out = cpu.allocate(Element::F32, rows * OUTPUTS)?;
    let values: Vec<f32> = (0..rows * INPUTS).map(|i| (i % 251) as f32 * 0.01 - 1.25).collect();
    cpu.write_f32(&x, 0, &values)?;
    let mut best = f64::MAX;
    let start = Instant::now();
    for matrix in matrices.iter().cycle() {
        let op = Linear {
            out: Rows::dense(&out, rows, OUTPUTS),
            x: Rows::dense(&x, rows, INPUTS),
            matrix: matrix.clone(),
        };
        let call = Instant::now();
        cpu.linear(&op)?;
        best = best.min(call.elapsed().as_secs_f64());
        if start.elapsed() > BUDGET && start.elapsed().as_secs_f64() > 3.0 * best {
            break;
        }
    }
    Ok(best)
}
