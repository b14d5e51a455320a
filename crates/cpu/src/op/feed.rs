//! The clamped SwiGLU and the sum over a row's experts.

use flint_backend::Result;
use flint_backend::ops::{Combine, SwiGlu};

use super::{require, spread};
use crate::buffer::RowsF32;
use crate::lanes::{Kernel, LANES, Lanes};
use crate::maths::silu;
use crate::{Cpu, CpuBuffer};

pub(crate) fn swiglu(cpu: &mut Cpu, op: &SwiGlu<CpuBuffer>) -> Result<()> {
    const NAME: &str = "swiglu";
    let (out, gate) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.gate)?);
    let up = RowsF32::new(NAME, &op.up)?;
    for (what, other) in [("gate", gate), ("up", up)] {
        require(NAME, out.width == other.width && out.rows == other.rows, || {
            format!("{} × {} from {what} {} × {}", out.rows, out.width, other.rows, other.width)
        })?;
    }
    let (level, limit) = (cpu.options.level, op.limit);
    // A row is cut as well: a decode step has one wide row.
    let pieces = out.width.div_ceil(PIECE);
    spread(cpu, out.rows * pieces, 4 * PIECE.min(out.width), &|items| {
        for item in items {
            let (row, at) = (item / pieces, item % pieces * PIECE);
            let count = PIECE.min(out.width - at);
            // SAFETY: the rows exist, the piece lies inside, and tasks write different pieces.
            let (out, gate, up) = unsafe { (out.at(row).add(at), gate.at(row).add(at), up.at(row).add(at)) };
            level.run(Activate { out, gate, up, count, limit });
        }
    });
    Ok(())
}

/// Elements of a row that one task takes at a time.
const PIECE: usize = 1024;

/// `silu(min(gate, limit)) · clamp(up, -limit, limit)`; NaN goes through.
struct Activate {
    out: *mut f32,
    gate: *const f32,
    up: *const f32,
    count: usize,
    limit: f32,
}

impl Kernel for Activate {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (high, low) = (L::splat(self.limit), L::splat(-self.limit));
        for at in (0..self.count).step_by(LANES) {
            let left = self.count - at;
            // SAFETY: every pointer has `count` values; a chunk is read before it is written.
            unsafe {
                let gate = high.min(L::read_some(self.gate.add(at), left));
                let up = low.max(high.min(L::read_some(self.up.add(at), left)));
                silu(gate).mul(up).write_some(self.out.add(at), left);
            }
        }
    }
}

pub(crate) fn combine(cpu: &mut Cpu, op: &Combine<CpuBuffer>) -> Result<()> {
    const NAME: &str = "combine";
    let (out, pairs) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.pairs)?);
    let (weights, shared) = (RowsF32::new(NAME, &op.weights)?, RowsF32::new(NAME, &op.shared)?);
    let picks = weights.width;
    require(NAME, pairs.width == out.width && shared.width == out.width, || {
        format!("widths {}, {} and {} differ", out.width, pairs.width, shared.width)
    })?;
    let rows_agree = weights.rows == out.rows && shared.rows == out.rows && pairs.rows == out.rows * picks;
    require(NAME, rows_agree, || {
        let (pairs, weights, shared) = (pairs.rows, weights.rows, shared.rows);
        format!("{} rows from {pairs} pairs, {weights} weights × {picks}, {shared} shared rows", out.rows)
    })?;
    let level = cpu.options.level;
    spread(cpu, out.rows, (picks + 2) * out.width, &|rows| {
        for row in rows {
            level.run(Sum { out, pairs, weights, shared, row });
        }
    });
    Ok(())
}

/// One row's sum over its experts.
struct Sum {
    out: RowsF32,
    pairs: RowsF32,
    weights: RowsF32,
    shared: RowsF32,
    row: usize,
}

impl Kernel for Sum {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { out, pairs, weights, shared, row } = self;
        // SAFETY: shapes were checked; tasks write different rows of `out`, which no input overlaps.
        unsafe {
            let weights = weights.row(row);
            for at in (0..out.width).step_by(LANES) {
                let left = out.width - at;
                let mut total = L::zero();
                for (j, &weight) in weights.iter().enumerate() {
                    let pair = L::read_some(pairs.at(row * weights.len() + j).add(at), left);
                    total = L::splat(weight).fma(pair, total);
                }
                let shared = L::read_some(shared.at(row).add(at), left);
                total.add(shared).write_some(out.at(row).add(at), left);
            }
        }
    }
}
