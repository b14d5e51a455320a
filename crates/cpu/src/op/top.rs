//! The best logits of a row: a total order (NaN, then value descending, id ascending).

use flint_backend::Result;
use flint_backend::ops::TopLogits;

use super::route::{Best, rank, ranked_index};
use super::{require, spread};
use crate::buffer::RowsF32;
use crate::{Cpu, CpuBuffer};

/// Most logits of a row that can be asked for: the order of a backend's lists.
const MOST: usize = 64;

pub(crate) fn top_logits(cpu: &mut Cpu, op: &TopLogits<CpuBuffer>) -> Result<()> {
    const NAME: &str = "top_logits";
    let (values, logits) = (RowsF32::new(NAME, &op.values)?, RowsF32::new(NAME, &op.logits)?);
    let count = op.count;
    require(NAME, (1..=MOST).contains(&count) && count <= logits.width, || {
        format!("{count} of {} logits, 1 to {MOST} are possible", logits.width)
    })?;
    require(NAME, values.width == count && values.rows == logits.rows, || {
        format!("values {} × {} for {count} of {} rows", values.rows, values.width, logits.rows)
    })?;
    let ids = op.ids.u32_start(NAME, logits.rows * count)?;
    spread(cpu, logits.rows, logits.width, &|rows| {
        let mut best = Best::new(count);
        for row in rows {
            // SAFETY: the row exists and nobody writes logits; tasks write different rows of ids and values.
            let (from, values, ids) = unsafe {
                (
                    logits.row(row),
                    values.row_mut(row),
                    std::slice::from_raw_parts_mut(ids.at(row * count), count),
                )
            };
            best.clear();
            for (id, &logit) in from.iter().enumerate() {
                // A NaN of either sign is the greatest.
                best.offer(rank(if logit.is_nan() { f32::NAN } else { logit }, id as u32));
            }
            for ((id, value), &rank) in ids.iter_mut().zip(values).zip(best.ranks()) {
                *id = ranked_index(rank);
                *value = from[*id as usize];
            }
        }
    });
    Ok(())
}
