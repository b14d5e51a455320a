//! EXL3: a trellis, its scales, and the marker of its codebook.
//!
//! | tensor | dtype | shape |
//! |---|---|---|
//! | `P.trellis` | I16 | `[in / 16, out / 16, 16·K]` |
//! | `P.suh`, `P.svh` | F16 | `[in]`, `[out]` |
//! | `P.su`, `P.sv` (early files) | I16 | `[in / 16]`, `[out / 16]` |
//! | `P.mcg` or `P.mul1` or neither | I32 | `[]` |
//!
//! `in` and `out` are the model's sizes, padded to multiples of 128. The shape is the authority on K; config.json is not
//! asked. The markers' values are checked when the module is loaded, so that opening reads no data.
//! Source: `reference/exl3.md`, sections 1 and 8.

use crate::encoding::{Encoding, Matrix, Piece, Span, Stored};
use crate::exl3::{BLOCK, Codebook, Rate, TILE};
use crate::names::exl3::Array;
use crate::safetensors::Dtype;
use crate::{Error, Result};

/// The pieces of an EXL3 module.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Exl3Pieces {
    trellis: Option<Piece>,
    suh: Option<Piece>,
    svh: Option<Piece>,
    su: Option<Piece>,
    sv: Option<Piece>,
    mcg: Option<Piece>,
    mul1: Option<Piece>,
}

impl Exl3Pieces {
    /// The slot of an array.
    pub(crate) fn slot(&mut self, array: Array) -> &mut Option<Piece> {
        match array {
            Array::Trellis => &mut self.trellis,
            Array::Suh => &mut self.suh,
            Array::Svh => &mut self.svh,
            Array::Su => &mut self.su,
            Array::Sv => &mut self.sv,
            Array::Mcg => &mut self.mcg,
            Array::Mul1 => &mut self.mul1,
        }
    }

    /// The tiles.
    pub(crate) fn trellis(&self) -> Option<Piece> {
        self.trellis
    }

    /// Any array.
    pub(crate) fn any(&self) -> Option<Piece> {
        self.trellis.or(self.suh).or(self.svh).or(self.su).or(self.sv).or(self.mcg).or(self.mul1)
    }
}

/// A codebook's marker: where it is stored, and the factor that it must hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marker {
    /// The tensor's data.
    pub(crate) span: Span,
    /// The codebook's factor.
    pub(crate) value: u32,
}

/// The stored matrix of a trellis.
pub(crate) fn stored(matrix: &Matrix<'_>, trellis: Piece) -> Result<Stored> {
    let pieces = matrix.pieces;
    if pieces.weight.is_some() {
        return Err(matrix.inconsistent("it has both a trellis and a weight".to_owned()));
    }
    if pieces.scales.is_some() || pieces.biases.is_some() || pieces.scale_inv.is_some() {
        return Err(matrix.inconsistent("it has a trellis and scales of another format".to_owned()));
    }
    if matrix.name == "embed_tokens" {
        return Err(Error::Unsupported {
            at: matrix.tensor(trellis).info.name.clone(),
            what: "an embedding in EXL3".to_owned(),
            remedy: "convert the checkpoint with an unquantised embedding, as exllamav3 does by default",
        });
    }
    let (rows, cols) = (matrix.stored_rows(trellis), matrix.cols);
    let (outputs, inputs) = (rows.next_multiple_of(BLOCK), cols.next_multiple_of(BLOCK));
    let (codebook, marker) = codebook(matrix, trellis)?;
    let (rate, span) = trellis_span(matrix, trellis, inputs, outputs, codebook)?;
    let exl3 = pieces.exl3;
    Ok(Stored {
        encoding: Encoding::Exl3 { rate, codebook },
        rows,
        cols,
        weight: span,
        scales: Some(scales(matrix, trellis, ["suh", "su"], [exl3.suh, exl3.su], inputs)?),
        biases: Some(scales(matrix, trellis, ["svh", "sv"], [exl3.svh, exl3.sv], outputs)?),
        marker,
        cut: matrix.cut(trellis),
    })
}

/// Checks the tiles' type and shape.
fn trellis_span(
    matrix: &Matrix<'_>,
    trellis: Piece,
    inputs: usize,
    outputs: usize,
    codebook: Codebook,
) -> Result<(Rate, Span)> {
    check_type(matrix, trellis, Dtype::I16, "I16")?;
    let info = &matrix.tensor(trellis).info;
    let shape_error = |expected: String| Error::Shape {
        tensor: info.name.clone(),
        file: matrix.file(trellis).to_owned(),
        found: info.shape.clone(),
        expected,
    };
    let sides = [inputs / TILE, outputs / TILE];
    let [input_tiles, output_tiles, words] = info.shape[..] else {
        return Err(shape_error(format!("[{}, {}, 16·K]", sides[0], sides[1])));
    };
    if [input_tiles, output_tiles] != sides {
        let sizes = format!("of {inputs} inputs and {outputs} outputs in tiles of 16 × 16, inputs first");
        return Err(shape_error(format!("[{}, {}, 16·K], {sizes}", sides[0], sides[1])));
    }
    let Some(rate) = Rate::of_words(words) else {
        let rates = "words of a tile, with K of 1 to 8, or 1.5, 2.5 or 3.5";
        return Err(shape_error(format!("[{input_tiles}, {output_tiles}, 16·K] {rates}")));
    };
    if !rate.is_whole() && codebook != Codebook::Mul1 {
        return Err(matrix.inconsistent(format!(
            "its trellis has {rate} bits a weight with the codebook {codebook}, but half rates are mul1's"
        )));
    }
    let len = input_tiles * output_tiles * rate.tile_bytes();
    Ok((rate, Span { tensor: trellis.tensor, start: 0, len }))
}

/// The codebook, by the markers that are there.
fn codebook(matrix: &Matrix<'_>, trellis: Piece) -> Result<(Codebook, Option<Marker>)> {
    let (codebook, piece) = match (matrix.pieces.exl3.mcg, matrix.pieces.exl3.mul1) {
        (None, None) => return Ok((Codebook::ThreeInst, None)),
        (Some(mcg), None) => (Codebook::Mcg, mcg),
        (None, Some(mul1)) => (Codebook::Mul1, mul1),
        (Some(_), Some(_)) => {
            return Err(matrix.inconsistent("it has the markers of two codebooks, mcg and mul1".to_owned()));
        }
    };
    same_fusion(matrix, trellis, piece)?;
    check_type(matrix, piece, Dtype::I32, "I32")?;
    let info = &matrix.tensor(piece).info;
    if info.shape.iter().product::<usize>() != 1 {
        return Err(Error::Shape {
            tensor: info.name.clone(),
            file: matrix.file(piece).to_owned(),
            found: info.shape.clone(),
            expected: "one number, the codebook's factor".to_owned(),
        });
    }
    let span = Span { tensor: piece.tensor, start: 0, len: 4 };
    Ok((codebook, Some(Marker { span, value: codebook.congruence().0 })))
}

/// Scales of one side: numbers, or packed signs.
fn scales(
    matrix: &Matrix<'_>,
    trellis: Piece,
    names: [&str; 2],
    pieces: [Option<Piece>; 2],
    len: usize,
) -> Result<Span> {
    let (piece, dtype, type_name, expected) = match pieces {
        [Some(numbers), None] => (numbers, Dtype::F16, "F16", len),
        [None, Some(signs)] => (signs, Dtype::I16, "I16", len / TILE),
        [None, None] => {
            let what = format!("it has a trellis, but neither {} nor {}", names[0], names[1]);
            return Err(matrix.inconsistent(what));
        }
        [Some(_), Some(_)] => {
            return Err(matrix.inconsistent(format!("it has both {} and {}", names[0], names[1])));
        }
    };
    same_fusion(matrix, trellis, piece)?;
    check_type(matrix, piece, dtype, type_name)?;
    let info = &matrix.tensor(piece).info;
    if info.shape != [expected] {
        return Err(Error::Shape {
            tensor: info.name.clone(),
            file: matrix.file(piece).to_owned(),
            found: info.shape.clone(),
            expected: format!("[{expected}]"),
        });
    }
    Ok(Span { tensor: piece.tensor, start: 0, len: expected * 2 })
}

/// Refuses arrays of different fusions, and stacks, which the format does not have.
fn same_fusion(matrix: &Matrix<'_>, trellis: Piece, other: Piece) -> Result<()> {
    if !trellis.same_cut(&other) {
        return Err(matrix.inconsistent("its trellis, scales and marker are fused differently".to_owned()));
    }
    if trellis.member.is_some() {
        let what = "it is a stack of trellises in one tensor, which EXL3 does not have";
        return Err(matrix.inconsistent(what.to_owned()));
    }
    Ok(())
}

fn check_type(matrix: &Matrix<'_>, piece: Piece, dtype: Dtype, expected: &str) -> Result<()> {
    let info = &matrix.tensor(piece).info;
    if info.dtype == dtype {
        return Ok(());
    }
    Err(Error::Type {
        tensor: info.name.clone(),
        file: matrix.file(piece).to_owned(),
        found: format!("{:?}", info.dtype),
        expected: expected.to_owned(),
    })
}
