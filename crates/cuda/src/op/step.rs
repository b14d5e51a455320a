//! Launches of operations that were joined: see `join.rs`.

use flint_backend::Result;
use flint_backend::ops::{
    Combine, GatedNorm, HcPost, HcPre, KdaConv, KdaPrepare, KdaScan, KdaSpan, Linear, RmsNorm, Rows,
};

use super::join::{MOST_ROWS, same};
use super::spans::{KdaPart, kda_parts};
use super::{conv, feed, hyper, norm, prepare, scan};
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::product::table::{Encoding, UNIT, UnitPart};
use crate::queue::{Args, Grid, Queue};
use crate::{CudaBuffer, CudaMatrix};

static HC_STEP: Kernel = Kernel::new("hc_step", "hyper_step.cu").early();
static KDA_STEP: Kernel = Kernel::new("kda_step", "kda_step.cu").early();
static KDA_STEP_PRODUCTS: Kernel = Kernel::new("kda_step_products", "kda_step.cu").early();

/// As in `kernels/hyper_step.cu`: streams, columns of a chain, columns of two, the widest row.
const STREAMS: usize = 4;
const CHAIN: usize = 64;
const WIDTHS: usize = 128;
const MOST_HIDDEN: usize = 4096;
/// Rows that a block takes together: as in the kernel.
const GROUP: usize = 4;
/// Multiprocessors from which blocks may take rows together.
const LEAST_MULTIPROCESSORS: u32 = 48;
/// Below this a reciprocal might not be a normal number.
const LEAST_EPSILON: f32 = 1e-20;
/// As in `kernels/kda_step.cu`.
pub(super) const HEAD_DIM: usize = 128;
const TAPS: usize = 4;
/// As in `kernels/kda/products.cuh`: tiles of a block, bytes of one's scales.
const TILES: usize = 16;
const TILE_SCALES: usize = 256;

fn few(rows: &Rows<CudaBuffer>, hidden: &Rows<CudaBuffer>) -> bool {
    let of_four = rows.width == STREAMS * hidden.width && hidden.width.is_multiple_of(WIDTHS);
    (1..=MOST_ROWS).contains(&rows.rows) && of_four && hidden.width <= MOST_HIDDEN
}

fn in_one_buffer(a: &Rows<CudaBuffer>, b: &Rows<CudaBuffer>) -> bool {
    a.buffer.at(0) == b.buffer.at(0)
}

/// Whether the joined kernel can mix these streams.
pub(super) fn mixes(op: &HcPost<CudaBuffer>) -> bool {
    few(&op.streams, &op.y) && !in_one_buffer(&op.streams, &op.y) && !in_one_buffer(&op.streams, &op.mix)
}

/// Whether the joined kernel can enter this site.
pub(super) fn enters(op: &HcPre<CudaBuffer, CudaMatrix>) -> bool {
    let aligned = op.function.plain().is_some_and(|function| function.address.is_multiple_of(16));
    let apart = !in_one_buffer(&op.collapsed, &op.streams) && !in_one_buffer(&op.mix, &op.streams);
    few(&op.streams, &op.collapsed)
        && aligned
        && apart
        && !in_one_buffer(&op.collapsed, &op.mix)
        && op.hc_epsilon >= LEAST_EPSILON
}

/// Whether what a sum over experts reads is not what the mix writes.
pub(super) fn apart(combine: &Combine<CudaBuffer>, post: &HcPost<CudaBuffer>) -> bool {
    [&combine.pairs, &combine.weights, &combine.shared].into_iter().all(|read| {
        !in_one_buffer(read, &post.streams)
            && !in_one_buffer(read, &post.y)
            && !in_one_buffer(read, &post.mix)
    }) && !in_one_buffer(&post.y, &post.mix)
}

/// Whether what a site's end reads and writes is not what the next one's collapse writes. The mix of both may be one: it is
/// written when all have read it.
pub(super) fn collapses_apart(held: &[super::join::Joinable], pre: &HcPre<CudaBuffer, CudaMatrix>) -> bool {
    use super::join::Joinable as J;
    held.iter().all(|op| match op {
        J::Combine(op) => [&op.out, &op.pairs, &op.weights, &op.shared]
            .into_iter()
            .all(|rows| !in_one_buffer(rows, &pre.collapsed) && !in_one_buffer(rows, &pre.mix)),
        J::HcPost(op) => {
            let mix_apart = same(&op.mix, &pre.mix) || !in_one_buffer(&op.mix, &pre.mix);
            let y_apart = !in_one_buffer(&op.y, &pre.collapsed) && !in_one_buffer(&op.y, &pre.mix);
            mix_apart && y_apart && !in_one_buffer(&op.mix, &pre.collapsed)
        }
        _ => true,
    })
}

/// The end of a site, the next one's coefficients, and the norm of what it collapses.
pub(super) fn between(
    queue: &mut Queue,
    combine: Option<&Combine<CudaBuffer>>,
    post: Option<&HcPost<CudaBuffer>>,
    pre: &HcPre<CudaBuffer, CudaMatrix>,
    norm: Option<&RmsNorm<CudaBuffer>>,
) -> Result<()> {
    let site = hyper::check_pre(pre)?;
    let hidden = site.collapsed.width;
    let chains = hidden / CHAIN;
    let sums = queue.scratch("hc_step", MOST_ROWS * chains * STREAMS * (site.outputs + 1) * 4)?;
    let mut args = Args::new()
        .rows(&site.collapsed)
        .rows(&site.mix)
        .rows(&site.streams)
        .address(site.function)
        .u32(site.numbers)
        .address(sums)
        .address(queue.counters("hc_step rows", MOST_ROWS)?)
        .u32(hidden)
        .u32(site.streams.rows);
    args = hyper::coefficients(args, pre);
    args = match post {
        Some(post) => {
            let (_, y, mix, _) = hyper::check_post(post)?;
            args.rows(&y).rows(&mix)
        }
        None => args.address(0).u32(0).address(0).u32(0),
    };
    args = match combine {
        Some(combine) => {
            let (_, pairs, weights, shared) = feed::check_combine(combine)?;
            args.rows(&pairs).rows(&weights).rows(&shared).u32(weights.width)
        }
        None => (0..3).fold(args, |args, _| args.address(0).u32(0)).u32(0),
    };
    args = match norm {
        Some(op) => {
            norm::check_rms(op)?;
            args.pointer(&op.weight, 0).f32(op.epsilon)
        }
        None => args.address(0).f32(0.0),
    };
    // The norm's threads, whose number its sum hangs on, and a warp for the coefficients.
    let threads = norm::row_threads(hidden) + 32;
    // Blocks that finish a group's rows wait for each other: they must leave most of the device to the others.
    let together = if queue.limits().multiprocessors < LEAST_MULTIPROCESSORS { 1 } else { GROUP.min(chains) };
    let blocks = [chains as u32, site.streams.rows.div_ceil(together) as u32, 1];
    let grid = Grid { blocks, threads, shared: 0 };
    queue.launch(&HC_STEP, grid, args)
}

/// Whether the joined kernel can begin with this convolution.
pub(super) fn convolves(op: &KdaConv<CudaBuffer>) -> bool {
    let rows: usize = op.spans.iter().map(|span| span.sure + span.drafts).sum();
    // The other operations take all rows of the batch.
    rows == op.out.rows && rows <= MOST_ROWS && op.tap_count == TAPS && !in_one_row(&op.out, &op.u)
}

/// Whether rows overlap in memory, as far as their first and last elements say.
pub(super) fn in_one_row(a: &Rows<CudaBuffer>, b: &Rows<CudaBuffer>) -> bool {
    let reach = |rows: &Rows<CudaBuffer>| {
        let last = rows.first + rows.rows.saturating_sub(1) * rows.stride + rows.width;
        (rows.buffer.at(rows.first), rows.buffer.at(rows.first) + 4 * (last - rows.first) as u64)
    };
    let ((a_first, a_end), (b_first, b_end)) = (reach(a), reach(b));
    a_first < b_end && b_first < a_end
}

/// Whether two operations have the same parts of the same sequences.
pub(super) fn same_spans(a: &[KdaSpan<CudaBuffer>], b: &[KdaSpan<CudaBuffer>]) -> bool {
    let of = |span: &KdaSpan<CudaBuffer>| {
        let counts = (span.first_row, span.logged, span.sure, span.drafts);
        (counts, span.window.at(0), span.state.at(0), span.log.at(0))
    };
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| of(a) == of(b))
}

/// The encoding and the part of a matrix that the joined kernel can multiply a head's rows with.
fn head_part(op: &Linear<CudaBuffer, CudaMatrix>) -> Option<(Encoding, UnitPart)> {
    let stack = op.matrix.stacked();
    let ([units], None) = (stack.units.as_slice(), &stack.rows) else { return None };
    let &[(encoding, part)] = units.parts.as_slice() else { return None };
    let known = match encoding {
        Encoding::Bf16 => true,
        Encoding::Affine { bits, wide, .. } => !wide && matches!(bits, 4 | 5 | 6 | 8),
        Encoding::Fp8 => false,
    };
    (known && stack.members == 1 && stack.inputs == HEAD_DIM).then_some((encoding, part))
}

/// Whether a product can be one of the two with which a KDA layer's kernel begins.
pub(super) fn makes_heads(op: &Linear<CudaBuffer, CudaMatrix>) -> bool {
    let shapes = op.x.width == HEAD_DIM && op.out.width == op.matrix.stacked().outputs;
    let aligned = op.x.stride.is_multiple_of(4) && op.x.buffer.at(op.x.first).is_multiple_of(16);
    let few = (1..=MOST_ROWS).contains(&op.x.rows) && op.x.rows == op.out.rows;
    shapes && aligned && few && op.out.width.is_multiple_of(HEAD_DIM) && head_part(op).is_some()
}

/// Whether two products are those of decays and gates.
pub(super) fn makes_both(f: &Linear<CudaBuffer, CudaMatrix>, gate: &Linear<CudaBuffer, CudaMatrix>) -> bool {
    let alike = match (head_part(f), head_part(gate)) {
        (Some((one, _)), Some((other, _))) => one == other,
        _ => false,
    };
    let shapes = (f.x.stride, f.x.rows, f.out.width) == (gate.x.stride, gate.x.rows, gate.out.width);
    let apart = [&f.x, &gate.x].into_iter().all(|x| !in_one_row(x, &f.out) && !in_one_row(x, &gate.out));
    alike && shapes && apart && makes_heads(gate) && !in_one_row(&f.out, &gate.out)
}

/// Whether what the layer's kernel writes before all heads have multiplied is not what products read.
pub(super) fn multiplies_apart(
    products: &[&Linear<CudaBuffer, CudaMatrix>],
    written: &Rows<CudaBuffer>,
) -> bool {
    products.iter().all(|product| !in_one_row(&product.x, written))
}

type Product = Linear<CudaBuffer, CudaMatrix>;

/// A KDA layer between its products; with those of decays and gates, or without.
pub(super) fn kda(
    queue: &mut Queue,
    products: Option<(&Product, &Product)>,
    conv: &KdaConv<CudaBuffer>,
    prepare: &KdaPrepare<CudaBuffer>,
    scan: &KdaScan<CudaBuffer>,
    gated: &GatedNorm<CudaBuffer>,
) -> Result<()> {
    let (_, u) = conv::check(conv)?;
    prepare::check(prepare)?;
    let scanned = scan::check(scan)?;
    let [_, _, gate] = norm::check_gated(gated)?;
    let parts = kda_parts("kda_scan", &scan.spans, scanned.out.rows)?;
    let args = Args::new()
        .rows(&scanned.out)
        .rows(&scanned.qkv)
        .rows(&scanned.decay)
        .rows(&scanned.beta)
        .rows(&u)
        .rows(&gate)
        .pointer(&conv.taps, 0)
        .pointer(&prepare.dt_bias, 0)
        .pointer(&prepare.a_log, 0)
        .pointer(&gated.weight, 0)
        .f32(gated.epsilon)
        .u32(scanned.beta.width)
        .u32(usize::from(prepare.lower_bound.is_some()))
        .f32(prepare.lower_bound.unwrap_or(0.0))
        .table(queue.table(&parts, parts.len() * size_of::<KdaPart>())?);
    let grid = Grid { blocks: [scanned.beta.width as u32, parts.len() as u32, 1], threads: 512, shared: 0 };
    let Some((f, other)) = products else { return queue.launch(&KDA_STEP, grid, args) };
    let (Some((encoding, f_part)), Some((_, gate_part))) = (head_part(f), head_part(other)) else {
        return Ok(());
    };
    let (f_x, gate_x) = (RowsF32::new("linear", &f.x)?, RowsF32::new("linear", &other.x)?);
    let args = args
        .address(f_x.address)
        .address(gate_x.address)
        .u32(f_x.stride)
        .address(f_part.codes)
        .address(gate_part.codes)
        .address(f_part.scales)
        .address(gate_part.scales)
        .u32(encoding.number() as usize)
        .u32(encoding.share());
    let shared = TILES * (HEAD_DIM / UNIT * encoding.unit_bytes() + TILE_SCALES);
    queue.launch(&KDA_STEP_PRODUCTS, Grid { shared: shared as u32, ..grid }, args)
}
