//! Plain numbers: bf16, f16, f32, kept in the type that they are stored in.
//!
//! Nothing is narrowed on the way: an fp32 tensor where the config says bf16 stays fp32. Where a caller must have a
//! narrower type, [`narrow`] converts exactly or says which value does not fit.

use crate::encoding::scheme::{Scheme, Setting};
use crate::encoding::{Encoding, Matrix, Piece, Stored};
use crate::matrix::PlainType;
use crate::{Error, Result};

/// The stored matrix of a plain tensor.
pub(crate) fn stored(matrix: &Matrix<'_>, weight: Piece, scheme: &Scheme) -> Result<Stored> {
    let info = &matrix.tensor(weight).info;
    let found = info.dtype;
    if matrix.pieces.scales.is_some() || matrix.pieces.biases.is_some() || matrix.pieces.scale_inv.is_some() {
        return Err(matrix.inconsistent(format!("its weight is plain {found:?}, but it has scales")));
    }
    if let Some((key, Setting::Quantised(width))) = scheme.own_entry(matrix.module, matrix.member) {
        return Err(matrix.inconsistent(format!("{key} declares it {width}, but it is stored as {found:?}")));
    }
    let Some(kind) = found.plain() else {
        return Err(Error::Type {
            tensor: info.name.clone(),
            file: matrix.file(weight).to_owned(),
            found: format!("{found:?}"),
            expected: "F32, F16 or BF16".to_owned(),
        });
    };
    let (rows, cols) = (matrix.stored_rows(weight), matrix.cols);
    Ok(Stored {
        encoding: Encoding::Plain(kind),
        rows,
        cols,
        weight: matrix.span(weight, rows, cols)?,
        scales: None,
        biases: None,
        marker: None,
        cut: matrix.cut(weight),
    })
}

/// Numbers of type `from` as type `to`, exactly.
///
/// # Errors
/// The index and the value of the first number that `to` cannot hold.
pub(crate) fn narrow(
    bytes: &[u8],
    from: PlainType,
    to: PlainType,
) -> std::result::Result<Vec<u8>, (usize, f32)> {
    let count = bytes.len() / from.size();
    let mut out = Vec::with_capacity(count * to.size());
    for index in 0..count {
        let value = from.read(bytes, index);
        let exact = match to {
            PlainType::F32 => {
                out.extend(value.to_le_bytes());
                true
            }
            PlainType::F16 => {
                let narrowed = half::f16::from_f32(value);
                out.extend(narrowed.to_le_bytes());
                narrowed.to_f32().to_bits() == value.to_bits()
            }
            PlainType::Bf16 => {
                let narrowed = half::bf16::from_f32(value);
                out.extend(narrowed.to_le_bytes());
                narrowed.to_f32().to_bits() == value.to_bits()
            }
        };
        if !exact {
            return Err((index, value));
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_is_exact_or_names_the_first_value_that_does_not_fit() {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        let fits = narrow(&bytes(&[1.5, -0.0, f32::INFINITY]), PlainType::F32, PlainType::Bf16);
        assert_eq!(fits, Ok(vec![0xC0, 0x3F, 0x00, 0x80, 0x80, 0x7F]));
        let third = 1.0 / 3.0;
        assert_eq!(narrow(&bytes(&[2.0, third]), PlainType::F32, PlainType::Bf16), Err((1, third)));
        assert_eq!(narrow(&bytes(&[1e5]), PlainType::F32, PlainType::F16), Err((0, 1e5)));
    }
}
