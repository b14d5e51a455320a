//! Where a plain checkpoint keeps its routed experts: a tensor for each, stacks of all, or gate and up in one.
//!
//! Reads names, types and shapes only. A stack `[experts, rows, n]` holds each expert's rows together, so every layout
//! gives each array of each expert as one range of one file.

use std::collections::{BTreeMap, HashMap};

use super::bank::{dims, trunk_layers};
use super::form::{Codebook, Component, Dims, MatrixForm, Mode, Part, Projection, RecordForm};
use crate::config::ModelConfig;
use crate::names::place_of_tensor;
use crate::safetensors::TensorInfo;
use crate::{Error, Result};

/// What to do about a checkpoint whose experts do not fit together.
const CONVERT: &str = "the checkpoint is inconsistent: download it again, or convert it anew";

/// What a stored tensor is to a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Not of a routed expert.
    Trunk,
    /// Arrays of routed experts.
    Expert,
    /// The four bytes beside an expert's trellis that name its codebook.
    Marker(Codebook),
}

/// The routed experts of a plain checkpoint.
#[derive(Debug)]
pub(super) struct StoredExperts {
    /// Each tensor's role, in the order of the tensors.
    pub(super) roles: Vec<Role>,
    /// Layers of the trunk, ascending.
    pub(super) trunk: Vec<StoredLayer>,
    /// MTP layers, ascending; none where the checkpoint has none.
    pub(super) mtp: Vec<StoredLayer>,
}

/// The routed experts of one layer.
#[derive(Clone, Debug)]
pub(super) struct StoredLayer {
    /// The model's number of the layer.
    pub(super) layer: usize,
    pub(super) mode: Mode,
    pub(super) form: RecordForm,
    /// Where each segment of each expert is: expert-major.
    pub(super) places: Vec<StoredPlace>,
}

/// Where one segment of one expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StoredPlace {
    /// Number of the tensor.
    pub(super) tensor: usize,
    /// First byte, from the start of the file.
    pub(super) start: u64,
}

/// A tensor with the name of its file.
pub(super) type Listed<'a> = (&'a TensorInfo, &'a str);

/// Finds the routed experts among all tensors.
///
/// # Errors
/// An expert without one of its arrays, experts of a layer that differ, arrays that no form has, two tensors for one
/// array.
pub(super) fn experts(tensors: &[Listed<'_>], config: &ModelConfig) -> Result<StoredExperts> {
    let mut found = Found { config, dims: dims(config), layers: BTreeMap::new() };
    let roles =
        tensors.iter().enumerate().map(|(at, listed)| found.add(at, *listed)).collect::<Result<_>>()?;
    let mut trunk = Vec::new();
    for layer in trunk_layers(config) {
        let arrays = found.layers.remove(&layer).unwrap_or_default();
        trunk.push(arrays.layer(layer, &found.dims, tensors)?);
    }
    let mtp = std::mem::take(&mut found.layers);
    let mtp = mtp.into_iter().map(|(layer, arrays)| arrays.layer(layer, &found.dims, tensors));
    Ok(StoredExperts { roles, trunk, mtp: mtp.collect::<Result<_>>()? })
}

/// What one tensor is to a pack, by its name.
pub(super) fn role((info, _): Listed<'_>, config: &ModelConfig) -> Role {
    let (path, end) = split(&info.name);
    let place = place_of_tensor(&format!("{path}.weight"), config.layers());
    match (expert_path(&place.module), end) {
        (None, _) => Role::Trunk,
        (Some(_), End::Marker(codebook)) => Role::Marker(codebook),
        (Some(_), _) => Role::Expert,
    }
}

/// Arrays as they turn up.
struct Found<'a> {
    config: &'a ModelConfig,
    dims: Dims,
    layers: BTreeMap<usize, LayerArrays>,
}

/// Arrays and markers of a layer.
#[derive(Default)]
struct LayerArrays {
    /// By expert and component: place, type, shape of one expert.
    arrays: HashMap<(usize, Component), Array>,
    /// By expert and projection.
    markers: HashMap<(usize, Projection), Codebook>,
}

#[derive(Clone)]
struct Array {
    place: StoredPlace,
    dtype: crate::safetensors::Dtype,
    shape: Vec<usize>,
}

impl Found<'_> {
    fn add(&mut self, at: usize, (info, file): Listed<'_>) -> Result<Role> {
        let (path, part) = split(&info.name);
        let place = place_of_tensor(&format!("{path}.weight"), self.config.layers());
        let Some((layer, rest)) = expert_path(&place.module) else { return Ok(Role::Trunk) };
        let projections: &[Projection] = match (place.fusion.map(|fusion| fusion.name), rest) {
            (Some("gate_up_proj"), "") => &[Projection::Gate, Projection::Up],
            (None, "gate_proj") => &[Projection::Gate],
            (None, "up_proj") => &[Projection::Up],
            (None, "down_proj") => &[Projection::Down],
            _ => return Ok(Role::Trunk),
        };
        let refused =
            |what: String| Error::BadTensor { file: file.to_owned(), tensor: info.name.clone(), what };
        let is_known = trunk_layers(self.config).contains(&layer) || layer >= self.config.layers();
        if !is_known || place.member.is_some_and(|member| member >= self.dims.experts) {
            return Err(refused("config.json has no such expert".to_owned()));
        }
        let of_layer = self.layers.entry(layer).or_default();
        let part = match part {
            End::Part(part) => part,
            End::Marker(codebook) => {
                let (Some(member), [projection]) = (place.member, projections) else {
                    return Err(refused("a codebook's marker belongs to one expert's matrix".to_owned()));
                };
                of_layer.markers.insert((member, *projection), codebook);
                return Ok(Role::Marker(codebook));
            }
            End::Other(end) => {
                return Err(refused(format!("routed experts with {end:?} are not read by this build")));
            }
        };
        let arrays = cut(info, place.member, projections.len(), self.dims.experts).map_err(&refused)?;
        for (expert, half, start, shape) in arrays {
            let component = Component { projection: projections[half], part };
            let place = StoredPlace { tensor: at, start };
            let array = Array { place, dtype: info.dtype, shape };
            if of_layer.arrays.insert((expert, component), array).is_some() {
                let what = format!("another tensor holds {component} of layer {layer}, expert {expert} too");
                return Err(refused(what));
            }
        }
        Ok(Role::Expert)
    }
}

/// What a tensor's name ends in.
enum End<'a> {
    Part(Part),
    Marker(Codebook),
    /// An array that experts have in no form that a pack holds.
    Other(&'a str),
}

/// A tensor's name as a module's path and the array. transformers' stacks have no last component for their weights.
fn split(name: &str) -> (&str, End<'_>) {
    if let Some(path) = name.strip_suffix("_scale_inv").filter(|path| !path.ends_with(".weight")) {
        return (path, End::Part(Part::ScaleInv));
    }
    let Some((path, end)) = name.rsplit_once('.') else { return (name, End::Part(Part::Weight)) };
    if let Some(part) = Part::of_tensor(end) {
        return (path, End::Part(part));
    }
    if let Some(codebook) = Codebook::ALL.into_iter().find(|codebook| codebook.marker() == Some(end)) {
        return (path, End::Marker(codebook));
    }
    match end {
        "su" | "sv" | "bias" | "qweight" | "qzeros" | "g_idx" | "weight_packed" | "weight_scale" => {
            (path, End::Other(end))
        }
        _ => (name, End::Part(Part::Weight)),
    }
}

/// `layers.3.mlp.experts.gate_proj` as 3 and `gate_proj`.
fn expert_path(module: &str) -> Option<(usize, &str)> {
    let (layer, rest) = module.strip_prefix("layers.")?.split_once(".mlp.experts.")?;
    Some((layer.parse().ok()?, rest))
}

/// One expert's share of a tensor: expert, which half of a fusion, first byte in the file, shape.
type Share = (usize, usize, u64, Vec<usize>);

/// Cuts a tensor into experts and, where gate and up are fused, into halves of rows.
fn cut(
    info: &TensorInfo,
    member: Option<usize>,
    halves: usize,
    experts: usize,
) -> std::result::Result<Vec<Share>, String> {
    let (members, of_one) = match member {
        Some(member) => (member..member + 1, info.shape.as_slice()),
        None => match info.shape.split_first() {
            Some((&count, rest)) if count == experts => (0..experts, rest),
            _ => {
                return Err(format!(
                    "shape {:?}, but a stack of {experts} experts starts with {experts}",
                    info.shape
                ));
            }
        },
    };
    let mut shape = of_one.to_vec();
    match shape.first_mut() {
        Some(rows) if rows.is_multiple_of(halves) => *rows /= halves,
        None if halves == 1 => {}
        _ => return Err(format!("shape {:?} cannot be cut into gate and up", info.shape)),
    }
    let bytes = shape.iter().product::<usize>() as u64 * info.dtype.size() as u64;
    let first = members.start;
    let share = |expert: usize, half: usize| {
        let start = info.start + ((expert - first) * halves + half) as u64 * bytes;
        (expert, half, start, shape.clone())
    };
    Ok(members
        .flat_map(|expert| (0..halves).map(move |half| (expert, half)))
        .map(|(e, h)| share(e, h))
        .collect())
}

impl LayerArrays {
    /// The layer, if every expert has the same arrays.
    fn layer(self, layer: usize, dims: &Dims, tensors: &[Listed<'_>]) -> Result<StoredLayer> {
        let module = |expert: usize| format!("layers.{layer}.mlp.experts.{expert}");
        let inconsistent = |expert: usize, what: String| Error::Inconsistent {
            module: module(expert),
            what,
            remedy: CONVERT,
        };
        let components = self.components(0);
        if components.is_empty() {
            return Err(inconsistent(0, "the checkpoint has no tensor of it".to_owned()));
        }
        let first: Vec<_> = components
            .iter()
            .filter_map(|component| {
                self.arrays.get(&(0, *component)).map(|a| (*component, a.dtype, a.shape.clone()))
            })
            .collect();
        let form = RecordForm::read(dims, &first).map_err(|what| inconsistent(0, what))?;
        let mut places = Vec::with_capacity(dims.experts * components.len());
        for expert in 0..dims.experts {
            if self.components(expert) != components {
                return Err(inconsistent(expert, "it has other arrays than expert 0".to_owned()));
            }
            for (component, segment) in components.iter().zip(&form.segments) {
                let Some(array) = self.arrays.get(&(expert, *component)) else { continue };
                if array.dtype != segment.dtype || array.shape != segment.shape {
                    let what = format!(
                        "{} is {} {:?}, but expert 0 of the layer has {} {:?}; experts of one layer must be stored \
                         alike",
                        tensors[array.place.tensor].0.name,
                        array.dtype.name(),
                        array.shape,
                        segment.dtype.name(),
                        segment.shape
                    );
                    return Err(inconsistent(expert, what));
                }
                places.push(array.place);
            }
        }
        let mode = self.mode(layer, dims, &form)?;
        Ok(StoredLayer { layer, mode, form, places })
    }

    /// The components that an expert has, in the order of a record.
    fn components(&self, expert: usize) -> Vec<Component> {
        const PARTS: [Part; 7] =
            [Part::Code, Part::Rout, Part::Rin, Part::Weight, Part::Scales, Part::Biases, Part::ScaleInv];
        let all = Projection::ALL
            .into_iter()
            .flat_map(|projection| PARTS.map(|part| Component { projection, part }));
        all.filter(|component| self.arrays.contains_key(&(expert, *component))).collect()
    }

    fn mode(&self, layer: usize, dims: &Dims, form: &RecordForm) -> Result<Mode> {
        let name = |expert: usize| format!("layers.{layer}.mlp.experts.{expert}");
        let inconsistent =
            |expert: usize, what: String| Error::Inconsistent { module: name(expert), what, remedy: CONVERT };
        let [gate, up, down] = form.matrices;
        let modes = [Mode::Affine, Mode::Fp8, Mode::Plain, Mode::Exl3(Codebook::ThreeInst)];
        let mode = modes.into_iter().find(|mode| [gate, up, down].iter().all(|form| form.is_of(*mode)));
        match mode {
            None => Err(inconsistent(0, format!("its matrices are of different formats: {}", form.label()))),
            Some(Mode::Exl3(_)) => {
                let of = |expert, projection| self.markers.get(&(expert, projection)).copied();
                let first = of(0, Projection::Gate);
                for expert in 0..dims.experts {
                    if Projection::ALL.into_iter().any(|projection| of(expert, projection) != first) {
                        return Err(inconsistent(expert, "its matrices have different codebooks".to_owned()));
                    }
                }
                let codebook = first.unwrap_or(Codebook::ThreeInst);
                let halves =
                    |form: &MatrixForm| matches!(form, MatrixForm::Exl3 { half_bits } if half_bits % 2 == 1);
                if codebook != Codebook::Mul1 && form.matrices.iter().any(halves) {
                    return Err(inconsistent(0, format!("{} has no half widths", codebook.name())));
                }
                Ok(Mode::Exl3(codebook))
            }
            Some(mode) if self.markers.is_empty() => Ok(mode),
            Some(_) => Err(inconsistent(0, "it has a codebook's marker and no trellis".to_owned())),
        }
    }
}
