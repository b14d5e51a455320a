//! The official FP8: E4M3 codes and one fp32 factor for each block of 128 × 128.
//!
//! | tensor | dtype | shape |
//! |---|---|---|
//! | `P.weight` | F8_E4M3 | `[out, in]` |
//! | `P.weight_scale_inv` | F32 | `[⌈out / 128⌉, ⌈in / 128⌉]` |
//!
//! Decided by dtype and by the presence of the factors, never by the config's list. Source: `reference/fp8.md`.

use crate::encoding::scheme::Scheme;
use crate::encoding::{Encoding, Matrix, Piece, Stored};
use crate::matrix::FP8_BLOCK;
use crate::safetensors::Dtype;
use crate::{Error, Result};

/// The stored matrix of an F8_E4M3 tensor.
pub(crate) fn stored(matrix: &Matrix<'_>, weight: Piece, scheme: &Scheme) -> Result<Stored> {
    if !matches!(scheme, Scheme::Fp8) {
        let what =
            "its weight is F8_E4M3, but config.json has no quantization_config with quant_method \"fp8\"";
        return Err(matrix.inconsistent(what.to_owned()));
    }
    let Some(scales) = matrix.pieces.scale_inv else {
        return Err(matrix.inconsistent("its weight is F8_E4M3, but it has no weight_scale_inv".to_owned()));
    };
    if matrix.pieces.scales.is_some() || matrix.pieces.biases.is_some() {
        return Err(matrix.inconsistent("its weight is F8_E4M3, but it has affine scales".to_owned()));
    }
    if !weight.same_cut(&scales) {
        return Err(matrix.inconsistent("its weight and weight_scale_inv are fused differently".to_owned()));
    }
    let info = &matrix.tensor(scales).info;
    if info.dtype != Dtype::F32 {
        return Err(Error::Type {
            tensor: info.name.clone(),
            file: matrix.file(scales).to_owned(),
            found: format!("{:?}", info.dtype),
            expected: "F32".to_owned(),
        });
    }
    let (rows, cols) = (matrix.stored_rows(weight), matrix.cols);
    Ok(Stored {
        encoding: Encoding::Fp8Block,
        rows,
        cols,
        weight: matrix.span(weight, rows, cols)?,
        scales: Some(matrix.span(scales, rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK))?),
        biases: None,
        marker: None,
        cut: matrix.cut(weight),
    })
}
