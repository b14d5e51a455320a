//! Which rows meet which member of a matrix: the kernels' `product/groups.cuh`.

use flint_backend::Result;

use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::matrix::Stack;
use crate::queue::{Args, Grid, Queue};

static SORT_PAIRS: Kernel = Kernel::new("sort_pairs", "product_sort.cu").early();

/// Pairs that a kernel's blocks group by themselves.
const MOST_PAIRS: usize = 128;
/// Members that pairs can be sorted by.
const MOST_MEMBERS: usize = 2048;

/// How rows and members belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// All rows with the only member.
    RowsOfOne,
    /// Part `h` of each row with member `h`.
    PartAMember,
    /// Each pair with the member in its pick's slot.
    Picked,
}

/// The rows of a call.
pub(crate) struct Groups {
    pub(crate) manner: Manner,
    pub(crate) x: RowsF32,
    pub(crate) out: RowsF32,
    pub(crate) rows: usize,
    pub(crate) members: usize,
    pub(crate) outputs: usize,
    /// Device addresses of picks and slots.
    pub(crate) picks: u64,
    pub(crate) slots: u64,
    pub(crate) experts: usize,
    pub(crate) picks_per_row: usize,
    /// Whether each pair has an input of its own.
    pub(crate) paired: bool,
    /// Whether picks were there before the launch before this one began.
    pub(crate) picks_known: bool,
    /// Whether a row of `x` holds gates and, behind them, what they gate, and the activation's limit.
    pub(crate) activated: Option<f32>,
}

/// Sorted pairs: device addresses of `order`, `starts` and `group_starts`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sorted {
    pub(crate) order: u64,
    pub(crate) starts: u64,
    pub(crate) group_starts: u64,
}

impl Groups {
    pub(crate) fn new(manner: Manner, x: RowsF32, out: RowsF32, stack: &Stack) -> Self {
        let (members, outputs) = (stack.members, stack.outputs);
        let rows = x.rows;
        Self {
            manner,
            x,
            out,
            rows,
            members,
            outputs,
            picks: 0,
            slots: 0,
            experts: 1,
            picks_per_row: 1,
            paired: false,
            picks_known: false,
            activated: None,
        }
    }

    /// Rows that any member multiplies: pairs, where experts are picked.
    pub(crate) fn pairs(&self) -> usize {
        self.rows * self.picks_per_row
    }

    /// At most so many groups of up to `columns` rows.
    pub(crate) fn most(&self, columns: usize) -> usize {
        match self.manner {
            Manner::RowsOfOne => self.rows.div_ceil(columns),
            Manner::PartAMember => self.rows.div_ceil(columns) * self.members,
            Manner::Picked => self.pairs().min(self.pairs().div_ceil(columns) + self.members),
        }
    }

    /// Whether pairs must be sorted before.
    pub(crate) fn needs_sorting(&self) -> bool {
        self.manner == Manner::Picked && self.pairs() > MOST_PAIRS && self.members <= MOST_MEMBERS
    }

    /// Sorts the pairs on the device, for groups of up to `columns`.
    pub(crate) fn sort(&self, queue: &mut Queue, columns: usize) -> Result<Sorted> {
        let (pairs, members) = (self.pairs(), self.members);
        let order = queue.scratch("sorted pairs", (pairs + 2 * (members + 1)) * 4)?;
        let starts = order + pairs as u64 * 4;
        let sorted = Sorted { order, starts, group_starts: starts + (members as u64 + 1) * 4 };
        let args = Args::new()
            .address(self.picks)
            .address(self.slots)
            .u32(self.experts)
            .u32(members)
            .u32(pairs)
            .u32(columns)
            .address(sorted.order)
            .address(sorted.starts)
            .address(sorted.group_starts);
        queue.launch(&SORT_PAIRS, Grid { blocks: [members as u32, 1, 1], threads: 1024, shared: 0 }, args)?;
        Ok(sorted)
    }

    /// Adds the parameters `GROUP_PARAMETERS`.
    pub(crate) fn args(&self, args: Args, columns: usize, sorted: Option<Sorted>) -> Args {
        let manner = match (self.manner, sorted) {
            (Manner::RowsOfOne, _) => 0,
            (Manner::PartAMember, _) => 1,
            (Manner::Picked, None) => 2,
            (Manner::Picked, Some(_)) => 3,
        };
        let sorted = sorted.unwrap_or_default();
        args.u32(manner)
            .u32(self.rows)
            .u32(columns)
            .u32(self.members)
            .u32(self.outputs)
            .u64(self.x.stride as u64)
            .u64(self.out.stride as u64)
            .address(self.picks)
            .address(self.slots)
            .u32(self.experts)
            .u32(self.picks_per_row)
            .u32(usize::from(self.paired))
            .address(sorted.order)
            .address(sorted.starts)
            .address(sorted.group_starts)
    }
}
