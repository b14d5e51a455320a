//! What uploads and products refuse, by name.

use flint_backend::{Backend, Precision, Rows, ops, ops::Ops};
use flint_cpu::{Arithmetic, Cpu, Level};
use flint_weights::{Form, PlainType};

use crate::support::{Kind, cpu, matrix, single, upload, upload_u32};

fn lanes() -> Cpu {
    cpu(Arithmetic::Lanes, Level::detect(), 1)
}

#[test]
fn parts_with_different_inputs_are_refused_with_both_names() {
    let mut parts = [matrix(Kind::Fp8, 4, 256, 1), matrix(Kind::Fp8, 4, 512, 2)];
    parts[0].name = "layers.0.mlp.gate_proj".into();
    parts[1].name = "layers.0.mlp.up_proj".into();
    let error = lanes().upload(&parts, Precision::Product).unwrap_err().to_string();
    assert!(error.contains("layers.0.mlp.gate_proj") && error.contains("layers.0.mlp.up_proj"), "{error}");
}

#[test]
fn a_stack_whose_members_differ_in_shape_is_refused() {
    let members = [vec![matrix(Kind::Fp8, 4, 256, 1)], vec![matrix(Kind::Fp8, 5, 256, 2)]];
    let error = lanes().upload_stack(&members, Precision::Product).unwrap_err().to_string();
    assert!(error.contains("member 1") && error.contains("[5, 256]"), "{error}");
    assert!(lanes().upload_stack(&[], Precision::Product).is_err());
    assert!(lanes().upload(&[], Precision::Product).is_err());
}

#[test]
fn widths_without_a_kernel_are_refused_at_upload() {
    let mut host = matrix(Kind::Affine { bits: 4, group: 64, scale: PlainType::Bf16 }, 4, 256, 1);
    if let Form::Affine { bits, .. } = &mut host.form {
        *bits = 7;
    }
    let error = lanes().upload(&[host], Precision::Product).unwrap_err().to_string();
    assert!(error.contains("7 bits"), "{error}");
}

#[test]
fn arrays_of_another_size_are_refused_at_upload() {
    let mut host = matrix(Kind::Plain(PlainType::F32), 4, 256, 1);
    host.rows = 5;
    assert!(lanes().upload(&[host], Precision::Product).is_err());
}

#[test]
fn rows_of_another_width_are_refused() {
    let mut cpu = lanes();
    let uploaded = single(&mut cpu, &matrix(Kind::Fp8, 4, 256, 1));
    let (x, out) = (upload(&mut cpu, &[0.0; 512]), upload(&mut cpu, &[0.0; 8]));
    let op = |x_width, out_width, rows| ops::Linear {
        out: Rows::dense(&out, rows, out_width),
        x: Rows::dense(&x, 2, x_width),
        matrix: uploaded.clone(),
    };
    assert!(cpu.linear(&op(255, 4, 2)).is_err());
    assert!(cpu.linear(&op(256, 3, 2)).is_err());
    assert!(cpu.linear(&op(256, 4, 1)).is_err());
    assert!(cpu.linear(&op(256, 4, 2)).is_ok());
}

#[test]
fn picks_and_tokens_outside_their_tables_are_refused() {
    let mut cpu = lanes();
    let stack = cpu.upload_stack(&[vec![matrix(Kind::Fp8, 4, 256, 1)]], Precision::Product).unwrap();
    let (x, out) = (upload(&mut cpu, &[0.0; 256]), upload(&mut cpu, &[0.0; 256]));
    for (pick, slot) in [(1, 0), (0, 1)] {
        let op = ops::ExpertLinear {
            out: Rows::dense(&out, 1, 4),
            x: Rows::dense(&x, 1, 256),
            stack: stack.clone(),
            picks: upload_u32(&mut cpu, &[pick]),
            picks_per_row: 1,
            slots: upload_u32(&mut cpu, &[slot]),
        };
        assert!(cpu.expert_linear(&op).is_err(), "pick {pick}, slot {slot}");
    }
    let tokens = upload_u32(&mut cpu, &[4]);
    assert!(cpu.embed(&ops::Embed { out: Rows::dense(&out, 1, 256), table: stack, tokens }).is_err());
}
