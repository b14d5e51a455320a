//! Tensors to modules: each tensor is used exactly once, each module that the model needs is there.
//!
//! Works on headers only. What is missing and what is left over is reported in one error.

use std::collections::HashSet;
use std::ops::Range;

use crate::encoding::scheme::Scheme;
use crate::encoding::{Encoding, Matrix, Piece, Pieces, Span, Stored};
use crate::names::{Part, Place, exl3, place_of_tensor};
use crate::shards::{Shards, Tensor};
use crate::table::{Group, Need, Shape, Spec, Table};
use crate::{Error, Result};

/// Decides for every module of the table how its members are stored. A module that the checkpoint does not have has
/// no members.
pub(crate) fn assemble(
    table: &Table,
    scheme: &Scheme,
    shards: &Shards,
    trunk_layers: usize,
) -> Result<Vec<Vec<Stored>>> {
    let mut found = Found { table, shards, pieces: vec![Vec::new(); table.specs.len()], surplus: Vec::new() };
    for number in 0..shards.tensors.len() {
        found.add(number, trunk_layers)?;
    }
    found.check_complete()?;
    let stored = |(spec, pieces): (&Spec, &Vec<Pieces>)| match spec.shape {
        Shape::Matrix { .. } | Shape::Stack { .. } => matrices(spec, pieces, shards, scheme),
        Shape::Array(_) | Shape::Values(_) => arrays(spec, pieces, shards),
    };
    table.specs.iter().zip(&found.pieces).map(stored).collect()
}

/// A module that a tensor provides: its number, and its first row among all rows of the tensor if that is a fusion.
type Provided = (usize, Option<(usize, usize)>);

/// Pieces of each module, as they turn up.
struct Found<'a> {
    table: &'a Table,
    shards: &'a Shards,
    /// By module, then by member; empty for a module of which nothing was found.
    pieces: Vec<Vec<Pieces>>,
    /// Stored names that no module uses.
    surplus: Vec<String>,
}

impl Found<'_> {
    fn add(&mut self, number: usize, trunk_layers: usize) -> Result<()> {
        let stored = &self.shards.tensors[number].info.name;
        let place = place_of_tensor(stored, trunk_layers);
        if let Part::Foreign(format) = place.part {
            return Err(Error::Unsupported {
                at: stored.clone(),
                what: format!("a tensor of the {format} format"),
                remedy: "use the official FP8 or BF16 checkpoint, an MLX affine or an EXL3 quantisation",
            });
        }
        let Some(modules) = self.modules(&place) else {
            self.surplus.push(stored.clone());
            return Ok(());
        };
        for (spec, rows) in modules {
            let members = match place.member {
                Some(member) => member..member + 1,
                None => 0..self.table.specs[spec].shape.members(),
            };
            for member in members {
                self.put(spec, member, &place, Piece { tensor: number, member: None, rows })?;
            }
        }
        Ok(())
    }

    /// The modules that a tensor provides; `None` when the model has no such place.
    fn modules(&self, place: &Place) -> Option<Vec<Provided>> {
        let fits = |spec: usize| {
            let members = self.table.specs[spec].shape.members();
            let stack = matches!(self.table.specs[spec].shape, Shape::Stack { .. });
            place.member.is_none_or(|member| stack && member < members).then_some(spec)
        };
        let Some(fusion) = place.fusion else {
            return Some(vec![(self.table.find(&place.module).and_then(fits)?, None)]);
        };
        let specs: Vec<usize> = fusion
            .members
            .iter()
            .map(|name| self.table.find(&format!("{}{name}", place.module)).and_then(fits))
            .collect::<Option<_>>()?;
        let rows = |spec: &usize| self.table.specs[*spec].shape.rows();
        let all = specs.iter().map(rows).sum();
        let mut first = 0;
        Some(
            specs
                .iter()
                .map(|spec| {
                    let start = first;
                    first += rows(spec);
                    (*spec, Some((start, all)))
                })
                .collect(),
        )
    }

    fn put(&mut self, spec: usize, member: usize, place: &Place, piece: Piece) -> Result<()> {
        let Spec { name, shape, .. } = &self.table.specs[spec];
        let whole_stack = matches!(shape, Shape::Stack { .. }) && place.member.is_none();
        let piece = Piece { member: whole_stack.then_some(member), ..piece };
        if self.pieces[spec].is_empty() {
            self.pieces[spec] = vec![Pieces::default(); shape.members()];
        }
        let Some(slot) = self.pieces[spec][member].slot(place.part) else { return Ok(()) };
        match slot.replace(piece) {
            None => Ok(()),
            Some(other) => Err(Error::Twice {
                module: member_name(name, shape, member),
                first: self.shards.tensors[other.tensor].info.name.clone(),
                second: self.shards.tensors[piece.tensor].info.name.clone(),
            }),
        }
    }

    /// Whether anything of a module was found.
    fn has(&self, spec: usize) -> bool {
        !self.pieces[spec].is_empty()
    }

    /// Checks that nothing is missing and nothing is left over.
    fn check_complete(&mut self) -> Result<()> {
        let mut missing = Vec::new();
        let table = self.table;
        let specs = || table.specs.iter().enumerate();
        let parts: HashSet<String> =
            specs().filter(|(at, _)| self.has(*at)).filter_map(|(_, spec)| optional_part(spec)).collect();
        for (at, spec) in specs() {
            let is_absent_part = optional_part(spec).is_some_and(|part| !parts.contains(&part));
            if !is_absent_part && self.is_needed(at, spec)? {
                self.list_missing(at, spec, &mut missing);
            }
        }
        let surplus = std::mem::take(&mut self.surplus);
        if missing.is_empty() && surplus.is_empty() { Ok(()) } else { Err(Error::Names { missing, surplus }) }
    }

    /// Whether a module must be there, given what else is.
    fn is_needed(&mut self, at: usize, spec: &Spec) -> Result<bool> {
        match spec.need {
            Need::Always => Ok(true),
            // The matrix and its pair stand one behind the other in the table.
            Need::Joined => {
                let pair = (at + 1..at + 3).find(|split| self.has(*split));
                match pair {
                    Some(split) if self.has(at) => Err(Error::Twice {
                        module: spec.name.clone(),
                        first: self.some_tensor(at),
                        second: self.some_tensor(split),
                    }),
                    pair => Ok(pair.is_none()),
                }
            }
            Need::Replaced => {
                let replaced = self.replacements(spec).any(|part| self.has(part));
                if replaced {
                    self.pieces[at].clear();
                }
                Ok(!replaced)
            }
            Need::Replacing => Ok(self.replacements(spec).any(|part| self.has(part))),
            Need::Split => {
                let joined = if self.table.specs[at - 1].need == Need::Joined { at - 1 } else { at - 2 };
                Ok(self.has(joined + 1) || self.has(joined + 2))
            }
        }
    }

    /// The modules that may stand for [`Need::Replaced`] ones, those of the same block.
    fn replacements(&self, spec: &Spec) -> impl Iterator<Item = usize> {
        let names = [exl3::VISION_WHOLE].into_iter().chain(exl3::VISION_SPLIT);
        let bare = spec.name.strip_suffix(".bias").unwrap_or(&spec.name);
        let block = names.into_iter().find_map(|name| bare.strip_suffix(name)).unwrap_or(bare);
        let part = |name: &str| [format!("{block}{name}"), format!("{block}{name}.bias")];
        let parts = exl3::VISION_SPLIT.into_iter().flat_map(part);
        parts.filter_map(|name| self.table.find(&name)).collect::<Vec<_>>().into_iter()
    }

    fn list_missing(&self, at: usize, spec: &Spec, missing: &mut Vec<String>) {
        if !self.has(at) {
            missing.push(spec.name.clone());
            return;
        }
        for (member, pieces) in self.pieces[at].iter().enumerate() {
            if pieces.numbers().is_none() {
                missing.push(member_name(&spec.name, &spec.shape, member));
            }
        }
    }

    /// A tensor of a module of which something was found.
    fn some_tensor(&self, at: usize) -> String {
        let piece = self.pieces[at].iter().find_map(Pieces::any);
        piece.map_or(String::new(), |piece| self.shards.tensors[piece.tensor].info.name.clone())
    }
}

/// The optional part that a module belongs to, as a prefix of names: an MTP layer, or the vision tower.
fn optional_part(spec: &Spec) -> Option<String> {
    match spec.group {
        Group::Vision => Some("visual.".to_owned()),
        Group::Mtp | Group::MtpExperts => {
            let layer = spec.name.split('.').nth(1)?;
            Some(format!("layers.{layer}."))
        }
        _ => None,
    }
}

/// The name of a member in the release's spelling: `layers.3.mlp.experts.17.gate_proj`.
pub(crate) fn member_name(module: &str, shape: &Shape, member: usize) -> String {
    if !matches!(shape, Shape::Stack { .. }) {
        return module.to_owned();
    }
    match module.rsplit_once('.') {
        Some((stack, projection)) if stack.ends_with("experts") => format!("{stack}.{member}.{projection}"),
        _ => format!("{module}.{member}"),
    }
}

/// Whether members of one stack may be stored so. Widths of trellises differ as their converter pleases.
fn may_stack(first: Encoding, other: Encoding) -> bool {
    first == other || matches!((first, other), (Encoding::Exl3 { .. }, Encoding::Exl3 { .. }))
}

/// How the members of a matrix or a stack are stored. A stack has one kind of encoding.
fn matrices(spec: &Spec, pieces: &[Pieces], shards: &Shards, scheme: &Scheme) -> Result<Vec<Stored>> {
    let (Shape::Matrix { rows, cols } | Shape::Stack { rows, cols, .. }) = spec.shape else {
        return Ok(Vec::new());
    };
    let mut members: Vec<Stored> = Vec::with_capacity(pieces.len());
    for (member, pieces) in pieces.iter().enumerate() {
        let name = member_name(&spec.name, &spec.shape, member);
        let matrix = Matrix {
            name: &name,
            module: &spec.name,
            member,
            members: spec.shape.members(),
            rows,
            cols,
            pieces: *pieces,
            shards,
        };
        let stored = matrix.stored(scheme)?;
        if let Some(first) = members.first().filter(|first| !may_stack(first.encoding, stored.encoding)) {
            let first_name = member_name(&spec.name, &spec.shape, 0);
            return Err(Error::Inconsistent {
                module: spec.name.clone(),
                what: format!("{first_name} is {}, but {name} is {}", first.encoding, stored.encoding),
                remedy: "all members of a stack must be stored alike: convert the checkpoint anew",
            });
        }
        members.push(stored);
    }
    Ok(members)
}

/// How an array is stored: plain numbers, never quantised.
fn arrays(spec: &Spec, pieces: &[Pieces], shards: &Shards) -> Result<Vec<Stored>> {
    let Some(pieces) = pieces.first() else { return Ok(Vec::new()) };
    let others = [pieces.scales, pieces.biases, pieces.scale_inv, pieces.exl3.any()];
    if others.iter().any(Option::is_some) {
        return Err(Error::Inconsistent {
            module: spec.name.clone(),
            what: "it has scales, but norms, convolutions and biases are never quantised".to_owned(),
            remedy: "convert the checkpoint anew",
        });
    }
    let Some(weight) = pieces.weight else { return Ok(Vec::new()) };
    let tensor = &shards.tensors[weight.tensor];
    let Some(kind) = tensor.info.dtype.plain() else {
        return Err(Error::Type {
            tensor: tensor.info.name.clone(),
            file: shards.files[tensor.shard].name.clone(),
            found: format!("{:?}", tensor.info.dtype),
            expected: "F32, F16 or BF16".to_owned(),
        });
    };
    let rows = weight.rows.map_or(spec.shape.rows(), |(_, all)| all);
    check_array_shape(spec, weight, tensor, shards)?;
    let values = tensor.info.shape.iter().product::<usize>();
    let cut = |(first, _): (usize, usize)| -> Range<usize> { first..first + spec.shape.rows() };
    Ok(vec![Stored {
        encoding: Encoding::Plain(kind),
        rows,
        cols: values / rows.max(1),
        weight: Span { tensor: weight.tensor, start: 0, len: values * kind.size() },
        scales: None,
        biases: None,
        marker: None,
        cut: weight.rows.map(cut),
    }])
}

/// Checks an array's shape, sides of 1 aside: `[8192, 1, 4]` and `[8192, 4, 1]` hold the same bytes in one order.
fn check_array_shape(spec: &Spec, weight: Piece, tensor: &Tensor, shards: &Shards) -> Result<()> {
    let squeeze = |shape: &[usize]| shape.iter().copied().filter(|side| *side != 1).collect::<Vec<_>>();
    let found = squeeze(&tensor.info.shape);
    let (fits, expected) = match &spec.shape {
        Shape::Array(shapes) => {
            let whole = |shape: &Vec<usize>| {
                let mut shape = shape.clone();
                if let (Some((_, all)), Some(first)) = (weight.rows, shape.first_mut()) {
                    *first = all;
                }
                shape
            };
            let shapes: Vec<_> = shapes.iter().map(whole).collect();
            let expected = shapes.iter().map(|shape| format!("{shape:?}")).collect::<Vec<_>>().join(" or ");
            (shapes.iter().any(|shape| squeeze(shape) == found), expected)
        }
        shape => {
            let values = shape.values();
            (found.iter().product::<usize>() == values, format!("{values} values"))
        }
    };
    if fits {
        return Ok(());
    }
    Err(Error::Shape {
        tensor: tensor.info.name.clone(),
        file: shards.files[tensor.shard].name.clone(),
        found: tensor.info.shape.clone(),
        expected,
    })
}
