//! A launch as data: a grid, and arguments.

use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::queue::Table;

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Grid {
    /// Blocks in x, y and z.
    pub(crate) blocks: [u32; 3],
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block in bytes; above 48 KiB too (up to what the device grants).
    pub(crate) shared: u32,
}

/// Arguments of a launch, in the order of the kernel's parameters. At most [`Args::MOST`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Args {
    /// One a cell, each in the cell's first bytes.
    cells: Vec<u64>,
}

impl Args {
    /// Most parameters of a kernel.
    pub(crate) const MOST: usize = 48;

    /// No arguments.
    pub(crate) fn new() -> Self {
        Self { cells: Vec::with_capacity(16) }
    }

    /// A pointer to an element of a buffer.
    pub(crate) fn pointer(self, buffer: &CudaBuffer, first: usize) -> Self {
        self.u64(buffer.at(first))
    }

    /// A pointer by its device address; 0 is a null pointer.
    pub(crate) fn address(self, address: u64) -> Self {
        self.u64(address)
    }

    /// A pointer to rows: two parameters, `float*` and the `u32` stride in elements.
    pub(crate) fn rows(self, rows: &RowsF32) -> Self {
        self.u64(rows.address).u32(rows.stride)
    }

    /// A pointer to a table.
    pub(crate) fn table(self, table: Table) -> Self {
        self.u64(table.address)
    }

    /// A `u32` parameter (sizes come as `usize`).
    pub(crate) fn u32(self, value: usize) -> Self {
        debug_assert!(u32::try_from(value).is_ok(), "{value} is no u32");
        self.u64(u64::from(value as u32))
    }

    /// A `float` parameter.
    pub(crate) fn f32(self, value: f32) -> Self {
        self.u64(u64::from(value.to_bits()))
    }

    /// A `u64` parameter.
    pub(crate) fn u64(mut self, value: u64) -> Self {
        debug_assert!(self.cells.len() < Self::MOST, "more than {} parameters", Self::MOST);
        self.cells.push(value);
        self
    }
}

/// One entry of a [`Script`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    /// The kernel's number.
    pub(crate) kernel: u32,
    /// The first of its cells.
    first: u32,
    /// Its cells.
    count: u32,
    /// Its grid.
    pub(crate) grid: Grid,
}

/// Launches that wait, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Script {
    launches: Vec<Launch>,
    cells: Vec<u64>,
}

impl Script {
    /// Adds a launch.
    pub(crate) fn push(&mut self, kernel: usize, grid: Grid, args: Args) {
        let (first, count) = (self.cells.len() as u32, args.cells.len() as u32);
        self.cells.extend(args.cells);
        self.launches.push(Launch { kernel: kernel as u32, first, count, grid });
    }

    /// The launches, each with its cells.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Launch, &[u64])> {
        self.launches.iter().map(|launch| {
            let first = launch.first as usize;
            (launch, &self.cells[first..first + launch.count as usize])
        })
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.launches.len()
    }

    /// Whether none wait.
    pub(crate) fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }

    /// Forgets them, keeping the memory.
    pub(crate) fn clear(&mut self) {
        self.launches.clear();
        self.cells.clear();
    }

    /// A number that equal scripts share. A step has thousands of words, so each costs one multiplication.
    pub(crate) fn digest(&self) -> u64 {
        let mix = |sum: u64, word: u64| (sum.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let launches = self.launches.iter().fold(self.launches.len() as u64, |sum, launch| {
            let [x, y, z] = launch.grid.blocks.map(u64::from);
            let sum = mix(sum, u64::from(launch.kernel) << 32 | x);
            mix(mix(sum, y << 32 | z), u64::from(launch.grid.threads) << 32 | u64::from(launch.grid.shared))
        });
        self.cells.iter().fold(launches, |sum, &cell| mix(sum, cell))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: Grid = Grid { blocks: [3, 1, 1], threads: 128, shared: 0 };

    #[test]
    fn a_script_keeps_each_launchs_arguments() {
        let mut script = Script::default();
        script.push(4, GRID, Args::new().u32(7).f32(1.5));
        script.push(2, GRID, Args::new().address(99));
        let seen: Vec<_> = script.iter().map(|(launch, cells)| (launch.kernel, cells.to_vec())).collect();
        assert_eq!(seen, [(4, vec![7, u64::from(1.5f32.to_bits())]), (2, vec![99])]);
    }

    #[test]
    fn scripts_differ_by_kernel_grid_and_arguments() {
        let of = |kernel, grid, args: Args| {
            let mut script = Script::default();
            script.push(kernel, grid, args);
            script
        };
        let one = of(1, GRID, Args::new().u32(7));
        assert_eq!(one, of(1, GRID, Args::new().u32(7)));
        assert_eq!(one.digest(), of(1, GRID, Args::new().u32(7)).digest());
        let wider = Grid { blocks: [4, 1, 1], ..GRID };
        for other in [
            of(2, GRID, Args::new().u32(7)),
            of(1, wider, Args::new().u32(7)),
            of(1, GRID, Args::new().u32(8)),
            of(1, GRID, Args::new().u32(7).u32(0)),
        ] {
            assert_ne!(one, other);
            assert_ne!(one.digest(), other.digest());
        }
    }
}
