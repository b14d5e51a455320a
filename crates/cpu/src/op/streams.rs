//! Rows that are gathered, copied into streams, and averaged over streams.

use flint_backend::Result;
use flint_backend::ops::{GatherRows, MeanStreams, SpreadStreams};

use super::{require, spread};
use crate::buffer::RowsF32;
use crate::lanes::{Kernel, LANES, Lanes};
use crate::{Cpu, CpuBuffer};

pub(crate) fn gather_rows(cpu: &mut Cpu, op: &GatherRows<CpuBuffer>) -> Result<()> {
    const NAME: &str = "gather_rows";
    let (out, x) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.x)?);
    require(NAME, out.width == x.width, || format!("out has width {}, x {}", out.width, x.width))?;
    // SAFETY: no operation writes the index while this one runs.
    let index = &unsafe { op.index.u32s(NAME, out.rows) }?[..out.rows];
    let outside = index.iter().find(|&&row| row as usize >= x.rows);
    require(NAME, outside.is_none(), || format!("row {outside:?} of {} rows", x.rows))?;
    spread(cpu, out.rows, out.width, &|rows| {
        for row in rows {
            // SAFETY: both rows exist, tasks write different rows of `out`, and `out` is not `x`.
            unsafe { out.row_mut(row).copy_from_slice(x.row(index[row] as usize)) };
        }
    });
    Ok(())
}

pub(crate) fn spread_streams(cpu: &mut Cpu, op: &SpreadStreams<CpuBuffer>) -> Result<()> {
    const NAME: &str = "spread_streams";
    let (streams, x) = (RowsF32::new(NAME, &op.streams)?, RowsF32::new(NAME, &op.x)?);
    check(NAME, streams, x)?;
    spread(cpu, x.rows, streams.width, &|rows| {
        for row in rows {
            // SAFETY: both rows exist, tasks write different rows, and `streams` is not `x`.
            let (to, from) = unsafe { (streams.row_mut(row), x.row(row)) };
            to.chunks_exact_mut(x.width).for_each(|stream| stream.copy_from_slice(from));
        }
    });
    Ok(())
}

pub(crate) fn mean_streams(cpu: &mut Cpu, op: &MeanStreams<CpuBuffer>) -> Result<()> {
    const NAME: &str = "mean_streams";
    let (out, streams) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.streams)?);
    check(NAME, streams, out)?;
    let level = cpu.options.level;
    spread(cpu, out.rows, streams.width, &|rows| {
        for row in rows {
            // SAFETY: both rows exist and tasks write different rows.
            let (out_row, from) = unsafe { (out.at(row), streams.at(row)) };
            level.run(Mean { out: out_row, from, hidden: out.width, count: streams.width / out.width });
        }
    });
    Ok(())
}

/// Checks that `streams` holds whole streams of `x`'s width.
fn check(op: &'static str, streams: RowsF32, x: RowsF32) -> Result<()> {
    require(op, x.width > 0 && streams.width > 0 && streams.width.is_multiple_of(x.width), || {
        format!("streams of width {} for rows of width {}", streams.width, x.width)
    })?;
    require(op, streams.rows == x.rows, || format!("{} and {} rows", streams.rows, x.rows))
}

/// One row's mean over `count` streams.
struct Mean {
    out: *mut f32,
    from: *const f32,
    hidden: usize,
    count: usize,
}

impl Kernel for Mean {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let count = L::splat(self.count as f32);
        for at in (0..self.hidden).step_by(LANES) {
            let left = self.hidden - at;
            // SAFETY: `out` has `hidden` values, `from` `count` times as many.
            unsafe {
                let mut total = L::read_some(self.from.add(at), left);
                for stream in 1..self.count {
                    total = total.add(L::read_some(self.from.add(stream * self.hidden + at), left));
                }
                total.div(count).write_some(self.out.add(at), left);
            }
        }
    }
}
