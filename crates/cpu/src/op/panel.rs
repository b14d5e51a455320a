//! Products of a few rows with a block of sixty-four cached rows, the heart of attention and of the indexer.
//!
//! A block is gathered once and used by every head. It stands as panels of 64 × 64 values (16 KB, so that a panel stays
//! in the L1 cache): transposed for scores, as it is for sums over entries. An element of a product is one chain of
//! fused multiply-adds over at most 64 terms, and a longer dot product adds the chains of its panels in ascending order;
//! tile sizes only choose which independent chains share loads.

use super::pages::Cached;
use crate::lanes::{LANES, Lanes};

/// Entries of a block, and the longest chain.
pub(super) const BLOCK: usize = 64;
/// Values of a panel.
pub(super) const PANEL: usize = BLOCK * BLOCK;
/// Vectors of a panel's row.
const VECTORS: usize = BLOCK / LANES;
/// Left rows of a tile.
const TILE: usize = 4;

/// A block of up to sixty-four rows as panels; entries that are not there are zeros.
pub(super) struct Panels {
    /// `[width / 64]` panels `[column, entry]`.
    transposed: Vec<f32>,
    /// `[width / 64]` panels `[entry, column]`; empty when nobody sums over entries.
    straight: Vec<f32>,
    width: usize,
}

impl Panels {
    /// Room for rows of `width` values.
    pub(super) fn new(width: usize, sums: bool) -> Self {
        let len = width.div_ceil(BLOCK) * PANEL;
        Self { transposed: vec![0.0; len], straight: vec![0.0; if sums { len } else { 0 }], width }
    }

    /// Gathers a block; entry `i` is the row at `place(i)`, of `count`. Entries beyond them, up to the next vector, are
    /// zeros, and later ones what they were.
    ///
    /// # Safety
    /// Every place has `width` values that nobody writes.
    #[inline(always)]
    pub(super) unsafe fn gather<L: Lanes>(&mut self, count: usize, place: impl Fn(usize) -> (Cached, usize)) {
        for first in (0..count).step_by(LANES) {
            let places: [Option<(Cached, usize)>; LANES] =
                std::array::from_fn(|i| (first + i < count).then(|| place(first + i)));
            // Sixteen rows at once are more streams than a hardware prefetcher follows.
            for next in first + LANES..count.min(first + 2 * LANES) {
                let (rows, at) = place(next);
                rows.prefetch(at, self.width);
            }
            for column in (0..self.width).step_by(LANES) {
                let left = self.width - column;
                let mut square = [L::zero(); LANES];
                for (row, place) in square.iter_mut().zip(&places) {
                    if let Some((rows, at)) = place {
                        // SAFETY: as the caller vouches.
                        *row = unsafe { rows.read(at + column, left) };
                    }
                }
                // SAFETY: the panels have room for whole blocks of columns and entries.
                unsafe { self.put::<L>(&mut square, first, column) };
            }
        }
    }

    /// Puts a square of sixteen entries and columns into the panels.
    ///
    /// # Safety
    /// Entries and columns lie inside the panels.
    #[inline(always)]
    unsafe fn put<L: Lanes>(&mut self, square: &mut [L; LANES], entry: usize, column: usize) {
        let (panel, inside) = (column / BLOCK * PANEL, column % BLOCK);
        // SAFETY: as the caller vouches.
        unsafe {
            if !self.straight.is_empty() {
                let to = self.straight.as_mut_ptr().add(panel + inside);
                for (i, row) in square.iter().enumerate() {
                    row.write(to.add((entry + i) * BLOCK));
                }
            }
            L::transpose(square);
            let to = self.transposed.as_mut_ptr().add(panel + entry);
            for (i, row) in square.iter().enumerate() {
                row.write(to.add((inside + i) * BLOCK));
            }
        }
    }

    /// `out[h, entry] = left[h] · row[entry]` for `rows` left rows and `count` entries, in whole vectors.
    ///
    /// # Safety
    /// `left` has `rows` rows of `width` values; `out` has room for `rows × 64`.
    #[inline(always)]
    pub(super) unsafe fn dots<L: Lanes>(&self, out: *mut f32, left: *const f32, rows: usize, count: usize) {
        for first in (0..self.width).step_by(BLOCK) {
            let terms = BLOCK.min(self.width - first);
            // SAFETY: as the caller vouches; the panel exists.
            unsafe {
                let panel = self.transposed.as_ptr().add(first / BLOCK * PANEL);
                let left = Left { start: left.add(first), stride: self.width, rows, terms };
                left.each::<L>(panel, count, |row, column, chain| {
                    let to = out.add(row * BLOCK + column);
                    let total = if first == 0 { chain } else { L::read(to).add(chain) };
                    total.write(to);
                });
            }
        }
    }

    /// `out[h] = out[h] · keep[h] + Σ_i left[h, i] · row[i]` over the first `count` entries; `keep` is 0 at first.
    ///
    /// # Safety
    /// `left` has `rows` rows of 64 values, `keep` `rows` values, `out` `rows` rows of `width` values.
    #[inline(always)]
    pub(super) unsafe fn sums<L: Lanes>(
        &self,
        out: *mut f32,
        keep: Option<&[f32]>,
        left: *const f32,
        rows: usize,
        count: usize,
    ) {
        for first in (0..self.width).step_by(BLOCK) {
            // SAFETY: as the caller vouches; the panel exists.
            unsafe {
                let panel = self.straight.as_ptr().add(first / BLOCK * PANEL);
                let columns = BLOCK.min(self.width - first);
                let left = Left { start: left, stride: BLOCK, rows, terms: count };
                left.each::<L>(panel, columns, |row, column, chain| {
                    let (to, space) = (out.add(row * self.width + first + column), columns - column);
                    let total = match keep {
                        Some(keep) => L::read_some(to, space).fma(L::splat(keep[row]), chain),
                        None => chain,
                    };
                    total.write_some(to, space);
                });
            }
        }
    }
}

/// The left rows of a product, `terms` values each.
#[derive(Clone, Copy)]
struct Left {
    start: *const f32,
    stride: usize,
    rows: usize,
    terms: usize,
}

impl Left {
    /// Gives `done` every chain `Σ_i left[row, i] · panel[i, column..]` of the first `columns` columns, in whole vectors.
    ///
    /// # Safety
    /// The left rows exist; `panel` has `terms` rows of 64.
    #[inline(always)]
    unsafe fn each<L: Lanes>(self, panel: *const f32, columns: usize, mut done: impl FnMut(usize, usize, L)) {
        let vectors = columns.div_ceil(LANES);
        // SAFETY: as the caller vouches.
        unsafe {
            let mut row = 0;
            while row + TILE <= self.rows {
                self.tiles::<L, TILE>(row, panel, vectors, &mut done);
                row += TILE;
            }
            while row < self.rows {
                self.tiles::<L, 1>(row, panel, vectors, &mut done);
                row += 1;
            }
        }
    }

    /// The chains of `R` rows.
    ///
    /// # Safety
    /// As for [`each`](Self::each).
    #[inline(always)]
    unsafe fn tiles<L: Lanes, const R: usize>(
        self,
        row: usize,
        panel: *const f32,
        vectors: usize,
        done: &mut impl FnMut(usize, usize, L),
    ) {
        // SAFETY: as the caller vouches.
        unsafe {
            if L::MANY_REGISTERS && vectors == VECTORS {
                self.tile::<L, R, VECTORS>(row, panel, 0, done);
            } else if L::MANY_REGISTERS && vectors >= 2 {
                self.tile::<L, R, 2>(row, panel, 0, done);
                if vectors > 2 {
                    self.tile::<L, R, 1>(row, panel, 2, done);
                }
            } else {
                for vector in 0..vectors {
                    self.tile::<L, R, 1>(row, panel, vector, done);
                }
            }
        }
    }

    /// The chains of `R` rows and `V` vectors from `vector`.
    ///
    /// # Safety
    /// As for [`each`](Self::each).
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const V: usize>(
        self,
        row: usize,
        panel: *const f32,
        vector: usize,
        done: &mut impl FnMut(usize, usize, L),
    ) {
        let mut chains = [[L::zero(); V]; R];
        // SAFETY: as the caller vouches.
        unsafe {
            let (left, panel) = (self.start.add(row * self.stride), panel.add(vector * LANES));
            for i in 0..self.terms {
                let mut right = [L::zero(); V];
                for (j, right) in right.iter_mut().enumerate() {
                    *right = L::read(panel.add(i * BLOCK + j * LANES));
                }
                for (row, chains) in chains.iter_mut().enumerate() {
                    let factor = L::splat(*left.add(row * self.stride + i));
                    for (chain, right) in chains.iter_mut().zip(right) {
                        *chain = factor.fma(right, *chain);
                    }
                }
            }
        }
        for (i, chains) in chains.iter().enumerate() {
            for (j, chain) in chains.iter().enumerate() {
                done(row + i, (vector + j) * LANES, *chain);
            }
        }
    }
}
