//! Appends rows to a DSA layer's cache. `reference/glm5_next.md` section 6.3.

use flint_backend::Result;
use flint_backend::ops::DsaAppend;

use super::pages::{Cache, PageShape};
use super::{require, spread};
use crate::buffer::{RowsF32, Start};
use crate::lanes::{Kernel, LANES, Lanes};
use crate::maths::exp;
use crate::{Cpu, CpuBuffer};

const NAME: &str = "dsa_append";

pub(crate) fn dsa_append(cpu: &mut Cpu, op: &DsaAppend<CpuBuffer>) -> Result<()> {
    let latents = RowsF32::new(NAME, &op.latents)?;
    let indexer = Indexer::new(op, latents.rows)?;
    let shape = PageShape {
        kpool: op.kpool,
        page_rows: op.page_rows,
        latent_width: latents.width,
        key_width: indexer.as_ref().map_or(0, |indexer| indexer.keys.width),
    };
    for span in &op.spans {
        let cache = Cache::new(NAME, span, latents.rows, shape)?;
        spread(cpu, cache.rows, 2 * latents.width, &|rows| {
            for row in rows {
                let (page, at) = cache.latent(cache.position + row);
                // SAFETY: the row and its place in the page were checked; tasks write different positions.
                unsafe { page.write(at, latents.row(cache.first_row + row)) };
            }
        });
        if let Some(indexer) = &indexer {
            let ring = span.ring.f32_start(NAME, op.ring_rows * 2 * indexer.keys.width)?;
            indexer.pool(cpu, &cache, ring);
            indexer.remember(&cache, ring);
        }
    }
    Ok(())
}

/// The indexer's part of the operation.
struct Indexer<'a> {
    keys: RowsF32,
    gates: RowsF32,
    ape: &'a [f32],
    ring_rows: usize,
}

impl<'a> Indexer<'a> {
    fn new(op: &'a DsaAppend<CpuBuffer>, rows: usize) -> Result<Option<Self>> {
        let (Some(keys), Some(gates), Some(ape)) = (&op.keys, &op.gates, &op.ape) else {
            let none = op.keys.is_none() && op.gates.is_none() && op.ape.is_none();
            require(NAME, none, || "keys, gates and ape come together".into())?;
            return Ok(None);
        };
        let (keys, gates) = (RowsF32::new(NAME, keys)?, RowsF32::new(NAME, gates)?);
        require(
            NAME,
            keys.width == gates.width && keys.width > 0 && keys.rows == rows && gates.rows == rows,
            || {
                format!(
                    "keys {} × {}, gates {} × {}, {rows} rows",
                    keys.rows, keys.width, gates.rows, gates.width
                )
            },
        )?;
        require(NAME, op.ring_rows >= op.kpool, || {
            format!("a ring of {} rows for pools of {}", op.ring_rows, op.kpool)
        })?;
        // SAFETY: no operation writes weights.
        let ape = unsafe { ape.f32s(NAME, op.kpool * keys.width) }?;
        Ok(Some(Self { keys, gates, ape, ring_rows: op.ring_rows }))
    }

    /// Makes the key of every pool that the span completes.
    fn pool(&self, cpu: &Cpu, cache: &Cache, ring: Start<f32>) {
        let (first, last) = (cache.position / cache.kpool, (cache.position + cache.rows) / cache.kpool);
        let level = cpu.options.level;
        spread(cpu, last - first, 8 * cache.kpool * self.keys.width, &|pools| {
            let mut key = vec![0.0; self.keys.width];
            for pool in pools {
                level.run(Key { indexer: self, cache, ring, pool: first + pool, out: &mut key });
                let (page, at) = cache.key(first + pool);
                // SAFETY: the pool's place in the page was checked; tasks write different pools.
                unsafe { page.write(at, &key) };
            }
        });
    }

    /// `k` and `γ` of a position, from the batch or from the ring.
    ///
    /// # Safety
    /// The position is a row of the span, or fewer than `ring_rows` rows before its end.
    #[inline(always)]
    unsafe fn member(&self, cache: &Cache, ring: Start<f32>, position: usize) -> (*const f32, *const f32) {
        let width = self.keys.width;
        // SAFETY: the span's rows and the ring were checked.
        unsafe {
            if position >= cache.position {
                let row = cache.first_row + position - cache.position;
                return (self.keys.at(row), self.gates.at(row));
            }
            let at = ring.at(position % self.ring_rows * 2 * width);
            (at, at.add(width))
        }
    }

    /// Leaves the span's last rows in the ring.
    fn remember(&self, cache: &Cache, ring: Start<f32>) {
        let width = self.keys.width;
        let kept = cache.rows.min(self.ring_rows);
        for row in cache.rows - kept..cache.rows {
            let slot = (cache.position + row) % self.ring_rows;
            // SAFETY: the ring and the rows were checked, and no task runs.
            unsafe {
                let (key, gate) = self.member(cache, ring, cache.position + row);
                ring.at(slot * 2 * width).copy_from_nonoverlapping(key, width);
                ring.at(slot * 2 * width + width).copy_from_nonoverlapping(gate, width);
            }
        }
    }
}

/// One pool's key.
struct Key<'a> {
    indexer: &'a Indexer<'a>,
    cache: &'a Cache,
    ring: Start<f32>,
    pool: usize,
    out: &'a mut [f32],
}

impl Kernel for Key<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (kpool, width) = (self.cache.kpool, self.out.len());
        for at in (0..width).step_by(LANES) {
            let left = width - at;
            // SAFETY: the members are rows of the span or, since the pool becomes complete here, fewer than `kpool`
            // rows before it; every row has `width` values.
            unsafe {
                let member = |j| self.indexer.member(self.cache, self.ring, self.pool * kpool + j);
                let gate = |j: usize| {
                    let ape = L::read_some(self.indexer.ape.as_ptr().add(j * width + at), left);
                    L::read_some(member(j).1.add(at), left).add(ape)
                };
                let mut highest = gate(0);
                for j in 1..kpool {
                    highest = gate(j).max(highest);
                }
                let mut total = L::zero();
                for j in 0..kpool {
                    total = total.add(exp(gate(j).sub(highest)));
                }
                let mut key = L::zero();
                for j in 0..kpool {
                    let share = exp(gate(j).sub(highest)).div(total);
                    key = share.fma(L::read_some(member(j).0.add(at), left), key);
                }
                key.write_some(self.out.as_mut_ptr().add(at), left);
            }
        }
    }
}
