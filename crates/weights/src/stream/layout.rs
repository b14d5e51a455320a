//! What a record's reads are: pieces of files, as runs of whole blocks.

use std::ops::Range;

use super::slab::BLOCK;

/// Bytes between two pieces that are read along rather than asked for apart.
const GAP: u64 = 64 << 10;

/// Bytes of a file that a record needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Number of the file.
    pub(crate) file: usize,
    /// First byte.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) len: usize,
}

/// Whole blocks of a file that lie one behind the other, and where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) file: usize,
    /// First byte in the file, a multiple of [`BLOCK`].
    pub(crate) start: u64,
    /// Bytes asked for, a multiple of [`BLOCK`]; the file may end before.
    pub(crate) len: usize,
    /// Bytes that must come.
    pub(crate) needed: usize,
    /// First byte in the slab, a multiple of [`BLOCK`].
    pub(crate) to: usize,
}

/// How a record lies in its files and in a slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The reads, in ascending order of file and place.
    pub(crate) runs: Vec<Run>,
    /// Where each piece lies in the slab, in the order in which the pieces were given.
    pub(crate) places: Vec<Range<usize>>,
    /// Bytes of the slab.
    pub(crate) bytes: usize,
}

impl Layout {
    /// The layout of pieces in any order. Pieces that lie close together are read as one run.
    pub(crate) fn new(pieces: &[Piece]) -> Self {
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_by_key(|&at| (pieces[at].file, pieces[at].start));
        let mut layout = Self { runs: Vec::new(), places: vec![0..0; pieces.len()], bytes: 0 };
        for at in order {
            let Piece { file, start, len } = pieces[at];
            let run = layout.run_of(file, start, start + len as u64);
            let from = run.to + (start - run.start) as usize;
            layout.places[at] = from..from + len;
        }
        layout
    }

    /// The run that holds `start..end` of a file: the last one, made longer, or a new one.
    fn run_of(&mut self, file: usize, start: u64, end: u64) -> Run {
        const ALIGNED: u64 = BLOCK as u64;
        let first = start / ALIGNED * ALIGNED;
        let last = self
            .runs
            .last_mut()
            .filter(|run| run.file == file && start <= run.start + run.needed as u64 + GAP);
        let run = if let Some(run) = last {
            run.needed = run.needed.max((end - run.start) as usize);
            run.len = run.needed.next_multiple_of(BLOCK);
            *run
        } else {
            let needed = (end - first) as usize;
            let run = Run { file, start: first, len: needed.next_multiple_of(BLOCK), needed, to: self.bytes };
            self.runs.push(run);
            run
        };
        self.bytes = run.to + run.len;
        run
    }

    /// Bytes that must be read.
    pub(crate) fn needed(&self) -> u64 {
        self.runs.iter().map(|run| run.needed as u64).sum()
    }

    /// The runs in parts of at most `most` bytes (a multiple of [`BLOCK`]), so that one record keeps a queue full.
    pub(crate) fn chunks(&self, most: usize) -> impl Iterator<Item = Run> + '_ {
        self.runs.iter().flat_map(move |run| {
            (0..run.len).step_by(most).map(move |at| {
                let len = most.min(run.len - at);
                let needed = run.needed.saturating_sub(at).min(len);
                Run { file: run.file, start: run.start + at as u64, len, needed, to: run.to + at }
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces() -> impl Strategy<Value = Vec<Piece>> {
        let piece = (0..3_usize, 0..2_000_000_u64, 1..300_000_usize);
        prop::collection::vec(piece.prop_map(|(file, start, len)| Piece { file, start, len }), 1..12)
    }

    proptest! {
        #[test]
        fn reading_the_runs_puts_every_piece_in_its_place(pieces in pieces(), most in 1..64_usize) {
            let byte = |file: usize, at: u64| (at as usize * 31 + file * 7) as u8;
            let layout = Layout::new(&pieces);
            let mut slab = vec![0_u8; layout.bytes];
            let mut read = 0;
            for chunk in layout.chunks(most * BLOCK) {
                prop_assert_eq!((chunk.start % BLOCK as u64, chunk.len % BLOCK, chunk.to % BLOCK), (0, 0, 0));
                prop_assert!(chunk.needed <= chunk.len);
                for at in 0..chunk.needed {
                    slab[chunk.to + at] = byte(chunk.file, chunk.start + at as u64);
                }
                read += chunk.needed as u64;
            }
            prop_assert_eq!(read, layout.needed());
            for (piece, place) in pieces.iter().zip(&layout.places) {
                prop_assert_eq!(place.len(), piece.len);
                for (at, found) in slab[place.clone()].iter().enumerate() {
                    prop_assert_eq!(*found, byte(piece.file, piece.start + at as u64));
                }
            }
        }
    }

    #[test]
    fn pieces_that_lie_together_are_one_read() {
        let piece = |start, len| Piece { file: 0, start, len };
        let layout = Layout::new(&[piece(5000, 9000), piece(14_000, 100), piece(14_100, 70_000)]);
        assert_eq!(layout.runs, [Run { file: 0, start: 4096, len: 81_920, needed: 80_004, to: 0 }]);
        assert_eq!(Layout::new(&[piece(0, 10), piece(1 << 20, 10)]).runs.len(), 2);
    }
}
