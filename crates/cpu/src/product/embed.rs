//! Rows of a table, decoded exactly.

use flint_backend::{Error, Result, ops};
use flint_weights::matrix::{affine_code, e4m3};
use flint_weights::{Form, PlainType};

use super::CpuMatrix;
use super::matrix::{Member, Part};
use crate::buffer::RowsF32;
use crate::{Cpu, CpuBuffer};

pub(crate) fn embed(cpu: &mut Cpu, op: &ops::Embed<CpuBuffer, CpuMatrix>) -> Result<()> {
    let out = RowsF32::new("embed", &op.out)?;
    let stack = op.table.stacked();
    if out.width != stack.inputs || stack.members.len() != 1 {
        let what = format!("rows of {} from {:?}", out.width, op.table);
        return Err(Error::Shape { op: "embed", what });
    }
    // SAFETY: nothing writes the tokens while this operation runs: its output has another element type.
    let tokens = &unsafe { op.tokens.u32s("embed", out.rows)? }[..out.rows];
    if let Some(token) = tokens.iter().find(|token| **token as usize >= stack.outputs) {
        let what = format!("token {token} of a table of {} rows", stack.outputs);
        return Err(Error::Shape { op: "embed", what });
    }
    let table = &stack.members[0];
    if table.parts.iter().any(|part| matches!(part.form, Form::Exl3(_))) {
        return Err(Error::Unsupported {
            name: "the embedding".into(),
            backend: "cpu",
            what: "rows of a trellis".into(),
            remedy: "convert the checkpoint with an unquantised embedding",
        });
    }
    cpu.pool.run(out.rows, &|row| {
        // SAFETY: each task writes one row.
        let to = unsafe { out.row_mut(row) };
        if let Some((part, output)) = find(table, tokens[row] as usize) {
            decode_row(part, output, to);
        }
    });
    Ok(())
}

fn find(member: &Member, output: usize) -> Option<(&Part, usize)> {
    let part = member.parts.iter().find(|part| output < part.first_output + part.outputs)?;
    Some((part, output - part.first_output))
}

/// The values of an output's weights: plain exactly, FP8 by one product, affine by one `fma(scale, code, bias)`.
fn decode_row(part: &Part, output: usize, to: &mut [f32]) {
    let codes = &part.codes()[output * part.row_bytes()..(output + 1) * part.row_bytes()];
    let scales = part.scales().map(|scales| (scales, scales.row(output), scales.bias_row(output)));
    match (&part.form, scales) {
        (Form::Affine { bits, group, kind, .. }, Some((_, scales, Some(biases)))) => {
            for (index, values) in to.chunks_exact_mut(*group).enumerate() {
                let (scale, bias) = (kind.read(scales, index), kind.read(biases, index));
                for (i, value) in values.iter_mut().enumerate() {
                    let code = affine_code(codes, usize::from(*bits), index * group + i);
                    *value = scale.mul_add(code as f32, bias);
                }
            }
        }
        (Form::Fp8Block { .. }, Some((layout, scales, _))) => {
            for (index, values) in to.chunks_mut(layout.group).enumerate() {
                let scale = PlainType::F32.read(scales, index);
                for (value, code) in values.iter_mut().zip(&codes[index * layout.group..]) {
                    *value = e4m3(*code) * scale;
                }
            }
        }
        (Form::Plain { kind, .. }, _) => {
            for (i, value) in to.iter_mut().enumerate() {
                *value = kind.read(codes, i);
            }
        }
        (Form::Affine { .. } | Form::Fp8Block { .. } | Form::Exl3(_), _) => {
            debug_assert!(false, "scales come with these forms, and trellises were refused");
        }
    }
}
