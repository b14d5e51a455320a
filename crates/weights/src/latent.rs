//! The absorbed pair of a latent-attention layer, from either way of storing it.

use crate::checkpoint::Checkpoint;
use crate::matrix::{Form, HostBytes, PlainType, QuantMatrix};
use crate::{Error, Result};

/// The two products with a latent, per head.
///
/// Source: `reference/glm5_next.md` section 6.2.
#[derive(Clone, Debug)]
pub struct LatentHeads {
    /// `Bk[h]ᵀ`, `[kv_lora_rank, qk_head_dim]`: queries into the space of latents.
    pub absorb: Vec<QuantMatrix>,
    /// `Bv[h]`, `[v_head_dim, kv_lora_rank]`: attended latents to values.
    pub expand: Vec<QuantMatrix>,
}

impl Checkpoint {
    /// The absorbed pair of layer `layer`.
    ///
    /// A stored pair (`embed_q`, `unembed_out`) is taken as it is. Of `kv_b_proj` the value half is cut by rows, and
    /// the key half is transposed once: plain numbers in their own type, quantised ones as fp32, each rounded once
    /// from its exact value.
    ///
    /// # Errors
    /// A layer without latent attention, or scales that are not finite.
    pub fn latent_heads(&self, layer: usize) -> Result<LatentHeads> {
        let at = format!("layers.{layer}.self_attn.");
        if self.has(&format!("{at}embed_q")) {
            let absorb = self.stack(&format!("{at}embed_q"))?;
            return Ok(LatentHeads { absorb, expand: self.stack(&format!("{at}unembed_out"))? });
        }
        let joined = self.matrix(&format!("{at}kv_b_proj"))?;
        let config = self.config();
        let (qk, v) = (config.qk_head_dim, config.v_head_dim);
        let (mut absorb, mut expand) = (Vec::new(), Vec::new());
        for head in 0..config.heads {
            let first = head * (qk + v);
            let cut = |rows| joined.cut_rows(rows).ok_or_else(|| short(&joined.name));
            let keys = transposed(&cut(first..first + qk)?);
            absorb.push(QuantMatrix { name: format!("{at}embed_q.{head}"), ..keys });
            let values = cut(first + qk..first + qk + v)?;
            expand.push(QuantMatrix { name: format!("{at}unembed_out.{head}"), ..values });
        }
        Ok(LatentHeads { absorb, expand })
    }
}

fn short(name: &str) -> Error {
    Error::NoSuchModule { name: name.to_owned(), what: "matrix of so many rows" }
}

/// The transposed matrix as plain numbers.
fn transposed(matrix: &QuantMatrix) -> QuantMatrix {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let (kind, numbers) = match &matrix.form {
        Form::Plain { kind, values } => (*kind, values.clone()),
        Form::Affine { .. } | Form::Fp8Block { .. } | Form::Exl3(_) => (PlainType::F32, decoded(matrix)),
    };
    let (size, from) = (kind.size(), numbers.as_slice());
    let mut values = Vec::with_capacity(from.len());
    for col in 0..cols {
        for row in 0..rows {
            let at = (row * cols + col) * size;
            values.extend_from_slice(&from[at..at + size]);
        }
    }
    let form = Form::Plain { kind, values: HostBytes::from_vec(values) };
    QuantMatrix { name: matrix.name.clone(), rows: cols, cols: rows, form }
}

/// A quantised matrix as little-endian fp32.
fn decoded(matrix: &QuantMatrix) -> HostBytes {
    HostBytes::from_vec(
        matrix.decode_f64().into_iter().flat_map(|value| (value as f32).to_le_bytes()).collect(),
    )
}
