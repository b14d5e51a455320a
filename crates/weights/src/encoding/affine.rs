//! MLX affine: three tensors for a module, and the width that they must have.
//!
//! | tensor | dtype | shape |
//! |---|---|---|
//! | `P.weight` | U32 | `[out, in · bits / 32]` |
//! | `P.scales`, `P.biases` | BF16, F16 or F32 | `[out, in / group]` |
//!
//! A stack has a leading side. With `in` known from the model, `bits = 32 · cols(weight) / in` and
//! `group = in / cols(scales)`; both must equal what the table declares. Source: `reference/mlx-affine.md`.

use crate::encoding::scheme::{Scheme, Setting, Width};
use crate::encoding::{Encoding, Matrix, Piece, Stored};
use crate::{Error, Result};

/// The stored matrix of a packed tensor.
pub(crate) fn stored(matrix: &Matrix<'_>, weight: Piece, scheme: &Scheme) -> Result<Stored> {
    let (Some(scales), Some(biases)) = (matrix.pieces.scales, matrix.pieces.biases) else {
        let lacks = if matrix.pieces.scales.is_none() { "scales" } else { "biases" };
        return Err(matrix.inconsistent(format!("its weight is packed, but it has no {lacks}")));
    };
    if matrix.pieces.scale_inv.is_some() {
        return Err(matrix.inconsistent("its weight is packed, but it has an FP8 scale".to_owned()));
    }
    if !weight.same_cut(&scales) || !weight.same_cut(&biases) {
        return Err(matrix.inconsistent("its weight, scales and biases are fused differently".to_owned()));
    }
    let (key, declared) = match scheme.setting(matrix.module, matrix.member) {
        Some((key, Setting::Quantised(width))) => (key, width),
        Some((key, Setting::Plain)) => {
            return Err(matrix.inconsistent(format!("{key} declares it unquantised, but it has scales")));
        }
        None => {
            let what = "its weight is packed, but config.json has no MLX quantization table".to_owned();
            return Err(matrix.inconsistent(what));
        }
    };
    check_width(matrix, weight, scales, declared, key)?;

    let (rows, cols) = (matrix.stored_rows(weight), matrix.cols);
    let kind = scale_type(matrix, scales)?;
    if matrix.tensor(biases).info.dtype != matrix.tensor(scales).info.dtype {
        return Err(matrix.inconsistent("its scales and biases have different types".to_owned()));
    }
    let (bits, group) = (declared.bits, declared.group);
    Ok(Stored {
        encoding: Encoding::Affine { bits, group, kind },
        rows,
        cols,
        weight: matrix.span(weight, rows, cols * usize::from(bits) / 32)?,
        scales: Some(matrix.span(scales, rows, cols / group)?),
        biases: Some(matrix.span(biases, rows, cols / group)?),
        marker: None,
        cut: matrix.cut(weight),
    })
}

fn scale_type(matrix: &Matrix<'_>, scales: Piece) -> Result<crate::PlainType> {
    let info = &matrix.tensor(scales).info;
    info.dtype.plain().ok_or_else(|| Error::Type {
        tensor: info.name.clone(),
        file: matrix.file(scales).to_owned(),
        found: format!("{:?}", info.dtype),
        expected: "F32, F16 or BF16 (U8 scales belong to the modes mxfp4, nvfp4 and mxfp8)".to_owned(),
    })
}

/// Checks that the stored width is the declared one.
fn check_width(matrix: &Matrix<'_>, weight: Piece, scales: Piece, declared: Width, key: &str) -> Result<()> {
    let cols = matrix.cols;
    let last = |piece: Piece| matrix.tensor(piece).info.shape.last().copied().unwrap_or(0);
    let (words, groups) = (last(weight), last(scales));
    let bits = words as u64 * 32;
    let fits = bits == cols as u64 * u64::from(declared.bits)
        && groups as u64 * declared.group as u64 == cols as u64;
    if fits {
        return Ok(());
    }
    let part = |number: u64, by: u64| match number.checked_div(by) {
        Some(whole) if number.is_multiple_of(by) => whole.to_string(),
        _ => "no whole number of".to_owned(),
    };
    let stored = format!(
        "{} bits, group {} (rows of {words} words and {groups} scales for {cols} inputs)",
        part(bits, cols as u64),
        part(cols as u64, groups as u64)
    );
    Err(Error::Width {
        tensor: matrix.tensor(weight).info.name.clone(),
        stored,
        declared: declared.to_string(),
        key: key.to_owned(),
    })
}
