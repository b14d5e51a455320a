//! What a KDA scan needs of a row: normalised q and k, decay factors, write strengths.
//! `reference/glm5_next.md` section 5, steps 4 to 6.

use flint_backend::Result;
use flint_backend::ops::KdaPrepare;

use super::{require, spread, sum_of_squares};
use crate::buffer::RowsF32;
use crate::lanes::{Kernel, LANES, Lanes};
use crate::maths::{exp, sigmoid, softplus};
use crate::{Cpu, CpuBuffer};

/// Added to the sum of squares of q and k.
const NORM_EPSILON: f32 = 1e-6;

pub(crate) fn kda_prepare(cpu: &mut Cpu, op: &KdaPrepare<CpuBuffer>) -> Result<()> {
    const NAME: &str = "kda_prepare";
    let (qkv, decay) = (RowsF32::new(NAME, &op.qkv)?, RowsF32::new(NAME, &op.decay)?);
    let beta = RowsF32::new(NAME, &op.beta)?;
    let (width, channels, heads) = (op.head_dim, decay.width, beta.width);
    require(NAME, width > 0 && heads * width == channels && qkv.width == 3 * channels, || {
        format!("{heads} heads of {width}, {channels} channels of decay, q, k, v of {}", qkv.width)
    })?;
    require(NAME, qkv.rows == decay.rows && qkv.rows == beta.rows, || {
        format!("{}, {} and {} rows", qkv.rows, decay.rows, beta.rows)
    })?;
    // SAFETY: no operation writes weights.
    let (bias, a_log) = unsafe { (op.dt_bias.f32s(NAME, channels)?, op.a_log.f32s(NAME, heads)?) };
    let level = cpu.options.level;
    spread(cpu, qkv.rows * heads, 12 * width, &|items| {
        for item in items {
            let (row, head) = (item / heads, item % heads);
            let at = head * width;
            // SAFETY: the rows exist, the head lies inside each, and tasks write different heads.
            let head = unsafe {
                Head {
                    q: qkv.at(row).add(at),
                    k: qkv.at(row).add(channels + at),
                    decay: decay.at(row).add(at),
                    beta: beta.at(row).add(head),
                    bias: &bias[at..at + width],
                    a_log: a_log[head],
                    lower_bound: op.lower_bound,
                }
            };
            level.run(head);
        }
    });
    Ok(())
}

/// One head of one row.
struct Head<'a> {
    q: *mut f32,
    k: *mut f32,
    decay: *mut f32,
    beta: *mut f32,
    bias: &'a [f32],
    a_log: f32,
    lower_bound: Option<f32>,
}

impl Kernel for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let width = self.bias.len();
        let rate = exp(L::splat(self.a_log));
        // SAFETY: q, k and decay have `width` values and beta one; nobody else reaches them.
        unsafe {
            normalise::<L>(self.q, width, 1.0 / (width as f32).sqrt());
            normalise::<L>(self.k, width, 1.0);
            for at in (0..width).step_by(LANES) {
                let left = width - at;
                let bias = L::read_some(self.bias.as_ptr().add(at), left);
                let z = L::read_some(self.decay.add(at), left).add(bias);
                let g = match self.lower_bound {
                    Some(bound) => L::splat(bound).mul(sigmoid(rate.mul(z))),
                    None => L::zero().sub(rate.mul(softplus(z))),
                };
                exp(g).write_some(self.decay.add(at), left);
            }
            sigmoid(L::splat(*self.beta)).write_some(self.beta, 1);
        }
    }
}

/// `x · (scale / sqrt(Σ x² + epsilon))`, in place.
///
/// # Safety
/// `x` is valid for reading and writing `width` values.
#[inline(always)]
unsafe fn normalise<L: Lanes>(x: *mut f32, width: usize, scale: f32) {
    // SAFETY: as the caller vouches.
    unsafe {
        let factor = L::splat(scale / (sum_of_squares::<L>(x, width) + NORM_EPSILON).sqrt());
        for at in (0..width).step_by(LANES) {
            let left = width - at;
            L::read_some(x.add(at), left).mul(factor).write_some(x.add(at), left);
        }
    }
}
