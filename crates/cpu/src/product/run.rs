//! One call: which rows meet which matrix, arranged inputs, and the tasks of the threads.

use flint_backend::{Error, Result};
use flint_weights::Form;
use flint_weights::exl3::{BLOCK, Exl3};

use super::decode;
use super::input::{self, Shape};
use super::layout::Unit;
use super::matrix::{Part, Stack, View};
use super::outputs::{Method, Outputs, PANEL, PANEL_ROWS};
use super::sums::{LaneScales, SumKernels};
use super::tile::{self, Tiles};
use super::trellis;
use crate::{Cpu, Level};

/// One row's way through a matrix. The caller of [`Run::multiply`] checked that both sides lie in their buffers, and
/// that no two pairs write the same place.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    pub(crate) x: *const f32,
    pub(crate) out: *mut f32,
}

/// Pairs `first..first + rows` of a call use one member of the stack.
#[derive(Clone, Copy)]
struct Group {
    member: usize,
    first: usize,
    rows: usize,
    /// Index of the arranged set of the member's first view.
    set: usize,
}

/// An arranged set of rows.
#[derive(Clone, Copy)]
struct Set {
    shape: Shape,
    member: usize,
    /// The first pair.
    first: usize,
    /// Line of the scratch memory.
    line: usize,
}

/// Rows `first..first + rows` of a set are arranged together.
#[derive(Clone, Copy)]
struct Arrange {
    set: usize,
    first: usize,
    rows: usize,
}

/// Outputs of a part for tiles of a group's rows.
#[derive(Clone, Copy)]
struct Task {
    group: usize,
    part: usize,
    first_output: usize,
    outputs: usize,
    first_tile: usize,
    tiles: usize,
}

/// One cache line of scratch memory.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// Memory of a call, kept from call to call.
#[derive(Default)]
pub(crate) struct Run {
    pub(crate) pairs: Vec<Pair>,
    groups: Vec<Group>,
    sets: Vec<Set>,
    arrange: Vec<Arrange>,
    tasks: Vec<Task>,
    memory: Vec<Line>,
}

/// What the threads of a call read.
struct Shared<'a> {
    run: &'a Run,
    stack: &'a Stack,
    level: Level,
    memory: *mut u8,
}

// SAFETY: tasks write disjoint rows and outputs (`Pair`), and disjoint rows of the arranged sets.
unsafe impl Sync for Shared<'_> {}
// SAFETY: the pointers of `Run` are only used during `multiply`.
unsafe impl Send for Run {}

/// Elements of arranged rows below which the caller's thread arranges alone: about as long as waking another.
const ARRANGE_ALONE: usize = 16 << 10;
/// Rows that one task arranges.
const ARRANGE_ROWS: usize = 8;
/// Weight products of a task: 20 to 60 µs, long against a claim and short against a call.
const TASK_PRODUCTS: usize = 2 << 20;

impl Run {
    /// Starts a call.
    pub(crate) fn clear(&mut self) {
        self.pairs.clear();
        self.groups.clear();
    }

    /// The pairs from `first` on use `member`.
    pub(crate) fn group(&mut self, member: usize, first: usize) {
        let rows = self.pairs.len() - first;
        if rows > 0 {
            self.groups.push(Group { member, first, rows, set: 0 });
        }
    }

    /// Computes `out = W · x` for every pair.
    ///
    /// # Safety
    /// For each pair of a group, `x` is valid for reading the stack's inputs and `out` for writing its outputs; nothing
    /// that is written overlaps anything else of the call; every group's member exists.
    pub(crate) unsafe fn multiply(&mut self, cpu: &Cpu, stack: &Stack) -> Result<()> {
        self.plan_sets(stack, cpu.options.level)?;
        self.plan_tasks(cpu, stack);
        let memory = self.memory.as_mut_ptr().cast::<u8>();
        let shared = Shared { run: self, stack, level: cpu.options.level, memory };
        let elements: usize = self.sets.iter().map(|set| set.shape.rows * set.shape.inputs).sum();
        // SAFETY: every task's index is in range, and `multiply`'s promise covers the pairs.
        if elements <= ARRANGE_ALONE {
            (0..self.arrange.len()).for_each(|index| unsafe { shared.arrange(index) });
        } else {
            cpu.pool.run(self.arrange.len(), &|index| unsafe { shared.arrange(index) });
        }
        cpu.pool.run(self.tasks.len(), &|index| unsafe { shared.task(index) });
        Ok(())
    }

    fn plan_sets(&mut self, stack: &Stack, level: Level) -> Result<()> {
        self.sets.clear();
        self.arrange.clear();
        let mut line = 0;
        for group in &mut self.groups {
            group.set = self.sets.len();
            for view in &stack.members[group.member].views {
                let tile_rows = tile_rows(view, level, group.rows);
                let shape = Shape { view: *view, rows: group.rows, tile_rows, inputs: stack.inputs };
                for first in (0..group.rows).step_by(ARRANGE_ROWS) {
                    let rows = ARRANGE_ROWS.min(group.rows - first);
                    self.arrange.push(Arrange { set: self.sets.len(), first, rows });
                }
                self.sets.push(Set { shape, member: group.member, first: group.first, line });
                line += shape.bytes().div_ceil(size_of::<Line>());
            }
        }
        if self.memory.len() < line {
            let what = || "the inputs of a product".to_owned();
            let bytes = line * size_of::<Line>();
            self.memory.clear();
            let reserved = self.memory.try_reserve_exact(line);
            reserved.map_err(|_| Error::OutOfMemory { backend: "cpu", bytes, what: what() })?;
            self.memory.resize(line, Line([0; 64]));
        }
        Ok(())
    }

    fn plan_tasks(&mut self, cpu: &Cpu, stack: &Stack) {
        self.tasks.clear();
        // Four tasks a thread at least, or the last one is waited for.
        let fair = (stack.outputs * self.groups.len()).div_ceil(4 * cpu.pool.threads());
        for (index, group) in self.groups.iter().enumerate() {
            let member = &stack.members[group.member];
            for (part_index, part) in member.parts.iter().enumerate() {
                let shape = self.sets[group.set + part.view].shape;
                let tiles_at_once = PANEL_ROWS / shape.tile_rows;
                let rows = group.rows.min(tiles_at_once * shape.tile_rows);
                let ideal = (TASK_PRODUCTS / (rows.max(4) * stack.inputs).max(1)).min(fair);
                let chunk = ideal.next_multiple_of(PANEL).max(PANEL);
                let mut first_output = 0;
                while first_output < part.outputs {
                    let chunk = match &part.form {
                        // A block of a trellis's outputs is rotated back together.
                        Form::Exl3(exl3) => BLOCK - (exl3.first_row + first_output) % BLOCK,
                        _ => chunk,
                    };
                    let outputs = chunk.min(part.outputs - first_output);
                    for first_tile in (0..shape.tiles()).step_by(tiles_at_once) {
                        let tiles = tiles_at_once.min(shape.tiles() - first_tile);
                        let part = part_index;
                        self.tasks.push(Task {
                            group: index,
                            part,
                            first_output,
                            outputs,
                            first_tile,
                            tiles,
                        });
                    }
                    first_output += outputs;
                }
            }
        }
    }
}

/// Rows of a tile: as many as stream together, or as many as a panel's best tile has; about equal tiles.
fn tile_rows(view: &View, level: Level, rows: usize) -> usize {
    let most = if view.rotation.is_some() {
        trellis::TILE_ROWS
    } else if rows <= view.stream.rows {
        view.stream.tile
    } else {
        tiles(view.layout.unit, level).best.0
    };
    rows.div_ceil(rows.div_ceil(most))
}

/// The tile kernels of a unit at a level.
fn tiles(unit: Unit, level: Level) -> &'static Tiles {
    match (unit, level) {
        #[cfg(target_arch = "x86_64")]
        (Unit::Dot, _) => &tile::DOT,
        #[cfg(target_arch = "x86_64")]
        (Unit::Fma, Level::Avx512) => &tile::AVX512,
        #[cfg(target_arch = "x86_64")]
        (Unit::Fma, Level::Avx2) => &tile::AVX2,
        #[cfg(target_arch = "aarch64")]
        (Unit::Fma, Level::Neon) => &tile::NEON,
        _ => &tile::SCALAR,
    }
}

/// How a part meets the rows of a set at a level.
fn method(part: &Part, shape: &Shape, level: Level) -> Method {
    #[cfg(target_arch = "x86_64")]
    if shape.rows <= shape.view.stream.rows
        && let Some(kernels) = super::stream::kernels(part.layout.unit, &part.form)
    {
        return Method::Stream(kernels.tiles);
    }
    Method::Panel(decode::kernel(level, part.layout, &part.form))
}

impl Shared<'_> {
    unsafe fn arrange(&self, index: usize) {
        let Arrange { set, first, rows } = self.run.arrange[index];
        let Set { shape, member, first: pair, line } = self.run.sets[set];
        for row in first..first + rows {
            // SAFETY: the pair's input is valid (`multiply`), the set's memory was sized for its shape, and each row
            // is arranged by one task.
            unsafe {
                let x = std::slice::from_raw_parts(self.run.pairs[pair + row].x, shape.inputs);
                let to = self.memory.add(line * size_of::<Line>());
                match shape.view.rotation {
                    Some(index) => {
                        let suh = self.stack.members[member].rotations[index].as_slice();
                        let to = to.add(row * shape.row_bytes()).cast();
                        trellis::rotate_row(self.level, x, suh, to);
                    }
                    None => input::arrange_row(&shape, row, x, to),
                }
            }
        }
    }

    unsafe fn task(&self, index: usize) {
        let task = self.run.tasks[index];
        let group = self.run.groups[task.group];
        let part: &Part = &self.stack.members[group.member].parts[task.part];
        let set = self.run.sets[group.set + part.view];
        let outputs = task.first_output..task.first_output + task.outputs;
        let tiles = task.first_tile..task.first_tile + task.tiles;
        // SAFETY: the set lies in the memory.
        let inputs = unsafe { self.memory.add(set.line * size_of::<Line>()) };
        let pairs = &self.run.pairs[group.first..group.first + group.rows];
        if let Form::Exl3(exl3) = &part.form {
            // SAFETY: as below.
            return unsafe { self.trellis_task(exl3, &task, &set, pairs, part.first_output) };
        }
        // The dot product's CPU has AVX-512 whatever the level.
        let level = if part.layout.unit == Unit::Dot { Level::Avx512 } else { self.level };
        let scales = part.scales();
        let work = Outputs {
            part,
            scales,
            lanes: scales.map(|scales| LaneScales::new(part.layout, &scales, part.scale_factor)),
            sums: SumKernels::of(level),
            tiles: self::tiles(part.layout.unit, level),
            method: method(part, &set.shape, level),
            shape: set.shape,
            inputs,
            pairs,
        };
        // SAFETY: the rows were arranged before; the output lies in the pairs' rows (`multiply`), each is written by one
        // task; `Cpu::new` checked the level's and the arithmetic's instructions.
        unsafe { work.run(outputs, tiles) };
    }

    /// A task of a trellis's block.
    unsafe fn trellis_task(&self, exl3: &Exl3, task: &Task, set: &Set, pairs: &[Pair], first_output: usize) {
        let shape = &set.shape;
        let first = task.first_tile * shape.tile_rows;
        let rows = first..shape.rows.min(first + task.tiles * shape.tile_rows);
        // SAFETY: the set and its rows lie in the memory; the rest as `task` says.
        unsafe {
            let inputs = self.memory.add(set.line * size_of::<Line>() + first * shape.row_bytes());
            let work = trellis::Outputs {
                exl3,
                level: self.level,
                tile_rows: shape.tile_rows,
                inputs: inputs.cast(),
                pairs: &pairs[rows],
                first_output,
            };
            work.run(task.first_output..task.first_output + task.outputs);
        }
    }
}
