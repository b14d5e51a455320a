//! Norms. Statistics run over sixty-four chains that the width fixes.

use flint_backend::Result;
use flint_backend::ops::{GatedNorm, LayerNorm, RmsNorm};

use super::{fold_row, only, require, spread, sum_of_squares};
use crate::buffer::RowsF32;
use crate::lanes::{Kernel, LANES, Lanes};
use crate::maths::sigmoid;
use crate::{Cpu, CpuBuffer};

pub(crate) fn rms_norm(cpu: &mut Cpu, op: &RmsNorm<CpuBuffer>) -> Result<()> {
    const NAME: &str = "rms_norm";
    let (out, x) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.x)?);
    check(NAME, out, x)?;
    // SAFETY: no operation writes weights.
    let weight = unsafe { op.weight.f32s(NAME, x.width) }?;
    let (level, epsilon) = (cpu.options.level, op.epsilon);
    spread(cpu, x.rows, 2 * x.width, &|rows| {
        for row in rows {
            // SAFETY: both rows exist and tasks write different rows.
            let (out, x_row) = unsafe { (out.at(row), x.at(row)) };
            level.run(Rms { out, x: x_row, weight: weight.as_ptr(), width: x.width, epsilon, gate: None });
        }
    });
    Ok(())
}

pub(crate) fn gated_norm(cpu: &mut Cpu, op: &GatedNorm<CpuBuffer>) -> Result<()> {
    const NAME: &str = "gated_norm";
    let (out, o) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.o)?);
    let gate = RowsF32::new(NAME, &op.gate)?;
    check(NAME, out, o)?;
    check(NAME, out, gate)?;
    let width = op.head_dim;
    require(NAME, width > 0 && o.width.is_multiple_of(width), || format!("{} channels of {width}", o.width))?;
    // SAFETY: no operation writes weights.
    let weight = unsafe { op.weight.f32s(NAME, width) }?;
    let (level, epsilon, heads) = (cpu.options.level, op.epsilon, o.width / width);
    spread(cpu, o.rows * heads, 4 * width, &|items| {
        for item in items {
            let (row, at) = (item / heads, item % heads * width);
            // SAFETY: the rows exist, the head lies inside, and tasks write different heads.
            let (out, x, gate) = unsafe { (out.at(row).add(at), o.at(row).add(at), gate.at(row).add(at)) };
            level.run(Rms { out, x, weight: weight.as_ptr(), width, epsilon, gate: Some(gate) });
        }
    });
    Ok(())
}

pub(crate) fn layer_norm(cpu: &mut Cpu, op: &LayerNorm<CpuBuffer>) -> Result<()> {
    const NAME: &str = "layer_norm";
    let (out, x) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.x)?);
    check(NAME, out, x)?;
    // SAFETY: no operation writes weights.
    let (weight, bias) = unsafe { (op.weight.f32s(NAME, x.width)?, op.bias.f32s(NAME, x.width)?) };
    let (level, epsilon) = (cpu.options.level, op.epsilon);
    spread(cpu, x.rows, 3 * x.width, &|rows| {
        for row in rows {
            // SAFETY: both rows exist and tasks write different rows.
            let (out, from) = unsafe { (out.at(row), x.at(row)) };
            let (weight, bias) = (weight.as_ptr(), bias.as_ptr());
            level.run(Layer { out, x: from, weight, bias, width: x.width, epsilon });
        }
    });
    Ok(())
}

fn check(op: &'static str, out: RowsF32, x: RowsF32) -> Result<()> {
    require(op, out.width == x.width && out.rows == x.rows && x.width > 0, || {
        format!("{} × {} from {} × {}", out.rows, out.width, x.rows, x.width)
    })
}

/// `((x · (1 / rms)) · weight) · σ(gate)` of one row or head.
struct Rms {
    out: *mut f32,
    x: *const f32,
    weight: *const f32,
    width: usize,
    epsilon: f32,
    gate: Option<*mut f32>,
}

impl Kernel for Rms {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        // SAFETY: every pointer has `width` values; `out` is either `x` or apart from all of them.
        unsafe {
            let mean = sum_of_squares::<L>(self.x, self.width) / self.width as f32;
            let factor = L::splat(1.0 / (mean + self.epsilon).sqrt());
            for at in (0..self.width).step_by(LANES) {
                let left = self.width - at;
                let weight = L::read_some(self.weight.add(at), left);
                let mut value = L::read_some(self.x.add(at), left).mul(factor).mul(weight);
                if let Some(gate) = self.gate {
                    value = value.mul(sigmoid(L::read_some(gate.add(at), left)));
                }
                value.write_some(self.out.add(at), left);
            }
        }
    }
}

/// `(x - mean) · (1 / deviation) · weight + bias` of one row.
struct Layer {
    out: *mut f32,
    x: *const f32,
    weight: *const f32,
    bias: *const f32,
    width: usize,
    epsilon: f32,
}

impl Kernel for Layer {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let count = self.width as f32;
        // SAFETY: every pointer has `width` values; `out` is either `x` or apart from all of them.
        unsafe {
            let mean =
                L::splat(fold_row::<L>(self.x, self.width, |chain, values, _| chain.add(values)) / count);
            let variance = fold_row::<L>(self.x, self.width, |chain, values, left| {
                let centred = only(values.sub(mean), left);
                centred.fma(centred, chain)
            }) / count;
            let factor = L::splat(1.0 / (variance + self.epsilon).sqrt());
            for at in (0..self.width).step_by(LANES) {
                let left = self.width - at;
                let centred = L::read_some(self.x.add(at), left).sub(mean).mul(factor);
                let (weight, bias) =
                    (L::read_some(self.weight.add(at), left), L::read_some(self.bias.add(at), left));
                centred.fma(weight, bias).write_some(self.out.add(at), left);
            }
        }
    }
}
