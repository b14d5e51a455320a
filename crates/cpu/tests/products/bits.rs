//! The row law of products: a row's bits do not depend on what travels with it, on threads or on instruction sets.

use flint_backend::{Backend, Element, Precision, Rows, ops, ops::Ops};
use flint_cpu::{Arithmetic, Cpu, CpuMatrix, Level};
use flint_weights::{PlainType, QuantMatrix};

use crate::support::{
    Kind, Random, activations, arithmetics, assert_same_bits, cpu, distinct_kinds, download, kinds, levels,
    linear, matrix, single, upload, upload_u32,
};

const ROWS: [usize; 9] = [1, 2, 3, 8, 16, 17, 33, 64, 129];

/// Each row in a launch of its own.
fn alone(cpu: &mut Cpu, matrix: &CpuMatrix, x: &[f32]) -> Vec<f32> {
    x.chunks_exact(matrix.inputs()).flat_map(|row| linear(cpu, matrix, row)).collect()
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_any_number_at_any_offset() {
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 2);
        for (index, kind) in distinct_kinds().into_iter().enumerate() {
            // 640 inputs: two whole blocks and a half; 37 outputs: panels and tiles that end early.
            let (inputs, outputs) = (640, 37);
            let uploaded = single(&mut cpu, &matrix(kind, outputs, inputs, index as u64));
            let x = activations(129 * inputs, 1);
            let expected = alone(&mut cpu, &uploaded, &x);
            for rows in ROWS {
                for offset in (0..=129 - rows).step_by(1 + (129 - rows) / 3) {
                    let found = linear(&mut cpu, &uploaded, &x[offset * inputs..(offset + rows) * inputs]);
                    let expected = &expected[offset * outputs..(offset + rows) * outputs];
                    let what = format!("{arithmetic:?} {kind:?}, {rows} rows from {offset}");
                    assert_same_bits(&what, outputs, &found, expected);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_among_hostile_neighbours() {
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 1);
        for kind in distinct_kinds() {
            let (inputs, outputs) = (512, 19);
            let uploaded = single(&mut cpu, &matrix(kind, outputs, inputs, 2));
            let row = activations(inputs, 3);
            let expected = linear(&mut cpu, &uploaded, &row);
            for hostile in [f32::INFINITY, f32::MAX, 1e-40, 0.0, f32::NAN] {
                for (rows, place) in [(2, 0), (2, 1), (7, 3), (17, 16), (65, 31)] {
                    let mut x = vec![hostile; rows * inputs];
                    x[place * inputs..(place + 1) * inputs].copy_from_slice(&row);
                    let found = linear(&mut cpu, &uploaded, &x);
                    let found = &found[place * outputs..(place + 1) * outputs];
                    let what = format!("{arithmetic:?} {kind:?}, row {place} of {rows} beside {hostile}");
                    assert_same_bits(&what, outputs, found, &expected);
                }
            }
        }
    }
}

#[test]
fn threads_change_no_bit() {
    for arithmetic in arithmetics() {
        for kind in distinct_kinds() {
            let host = matrix(kind, 301, 512, 4);
            let x = activations(33 * 512, 5);
            let mut found = Vec::new();
            for threads in [1, 2, 3] {
                let mut cpu = cpu(arithmetic, Level::detect(), threads);
                let uploaded = single(&mut cpu, &host);
                found.push((linear(&mut cpu, &uploaded, &x), linear(&mut cpu, &uploaded, &x[..512])));
            }
            for (many, one) in &found[1..] {
                assert_same_bits(&format!("{arithmetic:?} {kind:?}, 33 rows"), 301, many, &found[0].0);
                assert_same_bits(&format!("{arithmetic:?} {kind:?}, one row"), 301, one, &found[0].1);
            }
        }
    }
}

#[test]
fn instruction_sets_change_no_bit() {
    for kind in kinds() {
        let inputs = if matches!(kind, Kind::Affine { .. }) { 640 } else { 603 };
        let host = matrix(kind, 13, inputs, 6);
        let x = activations(7 * inputs, 7);
        let mut expected = None;
        for level in levels() {
            let mut cpu = cpu(Arithmetic::Lanes, level, 1);
            let uploaded = single(&mut cpu, &host);
            for rows in [1, 7] {
                let found = linear(&mut cpu, &uploaded, &x[..rows * inputs]);
                if rows == 7 {
                    let expected = expected.get_or_insert_with(|| found.clone());
                    assert_same_bits(&format!("{kind:?} at {level:?}"), 13, &found, expected);
                }
            }
        }
    }
}

#[test]
fn parts_of_different_forms_give_what_each_gives_alone() {
    let kinds = [
        Kind::Affine { bits: 5, group: 64, scale: PlainType::Bf16 },
        Kind::Affine { bits: 8, group: 64, scale: PlainType::Bf16 },
        Kind::Affine { bits: 8, group: 32, scale: PlainType::F16 },
        Kind::Plain(PlainType::F32),
        Kind::Plain(PlainType::Bf16),
        Kind::Fp8,
    ];
    let parts: Vec<QuantMatrix> =
        kinds.iter().enumerate().map(|(i, kind)| matrix(*kind, 11 + 7 * i, 512, i as u64)).collect();
    let x = activations(5 * 512, 9);
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 2);
        let joined = cpu.upload(&parts, Precision::Product).unwrap();
        let found = linear(&mut cpu, &joined, &x);
        let mut first = 0;
        for part in &parts {
            let uploaded = single(&mut cpu, part);
            let expected = linear(&mut cpu, &uploaded, &x);
            let rows = found.chunks_exact(joined.outputs());
            let cut: Vec<f32> = rows.flat_map(|row| row[first..first + part.rows].to_vec()).collect();
            assert_same_bits(&format!("{arithmetic:?} {}", part.name), part.rows, &cut, &expected);
            first += part.rows;
        }
    }
}

#[test]
fn views_with_strides_leave_the_rest_of_their_rows_alone() {
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 2);
        let kind = Kind::Affine { bits: 4, group: 64, scale: PlainType::Bf16 };
        let uploaded = single(&mut cpu, &matrix(kind, 40, 256, 1));
        let x = activations(9 * 256, 2);
        let expected = linear(&mut cpu, &uploaded, &x);
        let mut wide = vec![7.0; 9 * 300];
        for (to, from) in wide.chunks_exact_mut(300).zip(x.chunks_exact(256)) {
            to[20..276].copy_from_slice(from);
        }
        let (from, to) = (upload(&mut cpu, &wide), upload(&mut cpu, &vec![3.0; 9 * 55]));
        let op = ops::Linear {
            out: Rows::dense(&to, 9, 55).columns(10, 40),
            x: Rows::dense(&from, 9, 300).columns(20, 256),
            matrix: uploaded,
        };
        cpu.linear(&op).unwrap();
        let found = download(&mut cpu, &to);
        for (row, found) in found.chunks_exact(55).enumerate() {
            assert_same_bits("inside", 40, &found[10..50], &expected[row * 40..(row + 1) * 40]);
            assert!(
                found[..10].iter().chain(&found[50..]).all(|value| *value == 3.0),
                "row {row} was written beside"
            );
        }
    }
}

#[test]
fn a_stack_of_heads_gives_what_each_head_gives_alone() {
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 2);
        for kind in
            [Kind::Plain(PlainType::Bf16), Kind::Affine { bits: 6, group: 64, scale: PlainType::Bf16 }]
        {
            let (heads, inputs, outputs, rows) = (5, 256, 24, 7);
            let members: Vec<QuantMatrix> =
                (0..heads).map(|head| matrix(kind, outputs, inputs, head)).collect();
            let stacked: Vec<Vec<QuantMatrix>> = members.iter().map(|member| vec![member.clone()]).collect();
            let stack = cpu.upload_stack(&stacked, Precision::Product).unwrap();
            let width = heads as usize * inputs;
            let x = activations(rows * width, 4);
            let from = upload(&mut cpu, &x);
            let to = cpu.allocate(Element::F32, rows * heads as usize * outputs).unwrap();
            let op = ops::HeadLinear {
                out: Rows::dense(&to, rows, heads as usize * outputs),
                x: Rows::dense(&from, rows, width),
                stack,
            };
            cpu.head_linear(&op).unwrap();
            let found = download(&mut cpu, &to);
            for (head, member) in members.iter().enumerate() {
                let uploaded = single(&mut cpu, member);
                let own: Vec<f32> = x
                    .chunks_exact(width)
                    .flat_map(|row| row[head * inputs..(head + 1) * inputs].to_vec())
                    .collect();
                let expected = linear(&mut cpu, &uploaded, &own);
                let rows = found.chunks_exact(heads as usize * outputs);
                let cut: Vec<f32> =
                    rows.flat_map(|row| row[head * outputs..(head + 1) * outputs].to_vec()).collect();
                assert_same_bits(&format!("{arithmetic:?} {kind:?} head {head}"), outputs, &cut, &expected);
            }
        }
    }
}

#[test]
fn a_pair_gives_what_its_expert_gives_alone_wherever_the_expert_lies() {
    for arithmetic in arithmetics() {
        let mut cpu = cpu(arithmetic, Level::detect(), 2);
        for kind in distinct_kinds() {
            let (experts, inputs, outputs, rows, picks_per_row) = (6usize, 512, 21, 13, 3);
            let members: Vec<QuantMatrix> =
                (0..experts).map(|e| matrix(kind, outputs, inputs, e as u64)).collect();
            let slots: Vec<u32> = vec![3, 0, 5, 1, 4, 2];
            let mut stacked = vec![Vec::new(); experts];
            for (expert, slot) in slots.iter().enumerate() {
                stacked[*slot as usize] = vec![members[expert].clone()];
            }
            let stack = cpu.upload_stack(&stacked, Precision::Product).unwrap();
            let mut random = Random::new(11);
            let picks: Vec<u32> = (0..rows * picks_per_row).map(|_| random.below(experts) as u32).collect();
            for own_rows in [false, true] {
                let x_rows = if own_rows { rows * picks_per_row } else { rows };
                let x = activations(x_rows * inputs, 12);
                let from = upload(&mut cpu, &x);
                let to = cpu.allocate(Element::F32, picks.len() * outputs).unwrap();
                let op = ops::ExpertLinear {
                    out: Rows::dense(&to, picks.len(), outputs),
                    x: Rows::dense(&from, x_rows, inputs),
                    stack: stack.clone(),
                    picks: upload_u32(&mut cpu, &picks),
                    picks_per_row,
                    slots: upload_u32(&mut cpu, &slots),
                };
                cpu.expert_linear(&op).unwrap();
                let found = download(&mut cpu, &to);
                for (pair, pick) in picks.iter().enumerate() {
                    let row = if own_rows { pair } else { pair / picks_per_row };
                    let uploaded = single(&mut cpu, &members[*pick as usize]);
                    let expected = linear(&mut cpu, &uploaded, &x[row * inputs..(row + 1) * inputs]);
                    let what = format!("{arithmetic:?} {kind:?} pair {pair}");
                    assert_same_bits(&what, outputs, &found[pair * outputs..(pair + 1) * outputs], &expected);
                }
            }
        }
    }
}
