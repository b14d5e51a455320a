//! A measured memory plan of a bank of experts, and the reasons for which it is not applied.
//!
//! `mlx-serve-bank-fit-v2` was measured on the machine kind of its server; Flint's own on other kinds is
//! `flint-bank-fit-v1`, so that neither is taken for the other. Source: `reference/streaming-pack.md` section 6.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::profile::Phase;
use super::strict;
use crate::Result;

/// The file in a pack's folder.
pub const FILE: &str = "bank-fit.json";
const V2: &str = "mlx-serve-bank-fit-v2";
const V1: &str = "mlx-serve-bank-fit-v1";
const FLINT: &str = "flint-bank-fit-v1";
/// How far below the ceiling a fit plans the peak.
pub const MARGIN_BYTES: u64 = 1 << 30;

/// Why a fit is not applied. The bills decide then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotApplied {
    /// It was measured under another ceiling.
    BankFitOtherCeiling {
        /// The fit's, in bytes.
        fit: u64,
        /// The one that holds.
        now: u64,
    },
    /// It was measured for another reference request.
    BankFitOtherCell {
        /// The fit's, in tokens.
        fit: u64,
        /// The one that holds.
        now: u64,
    },
    /// The first version counted other programs' memory otherwise.
    BankFitV1Rest,
    /// Another format, or no format.
    BankFitFormat(String),
    /// A field is missing or has a value that cannot be.
    BankFitInvalid(String),
}

impl fmt::Display for NotApplied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BankFitOtherCeiling { fit, now } => {
                write!(f, "BankFitOtherCeiling: measured under {fit} bytes, the ceiling is {now}")
            }
            Self::BankFitOtherCell { fit, now } => {
                write!(f, "BankFitOtherCell: measured for requests of {fit} tokens, the reference is {now}")
            }
            Self::BankFitV1Rest => write!(f, "BankFitV1Rest: {V1} counted other programs' memory otherwise"),
            Self::BankFitFormat(found) => {
                write!(f, "BankFitFormat: its format is {found}, not {V2} or {FLINT}")
            }
            Self::BankFitInvalid(what) => write!(f, "BankFitInvalid: {what}"),
        }
    }
}

/// What a measurement found on one memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bases {
    /// The most that was used in the prompt phase, without the bank.
    pub base_prompt_bytes: u64,
    /// The same in decoding.
    pub base_decode_bytes: u64,
    /// What others used when the bank was opened.
    pub rest_bytes: u64,
}

/// A fit of one memory: `mlx-serve-bank-fit-v2`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BankFit {
    format: String,
    /// The ceiling that it applies at.
    pub ceiling_bytes: u64,
    /// Tokens of the fixed reference request, prompt and reply.
    pub cell_tokens: u64,
    /// Tokens of the request that was measured.
    pub evidence_tokens: u64,
    /// What was found.
    #[serde(flatten)]
    pub bases: Bases,
}

/// A fit of a host with a device: `flint-bank-fit-v1`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFit {
    format: String,
    /// The device's name; another device has another fit.
    pub device: String,
    /// The host's ceiling that it applies at.
    pub host_ceiling_bytes: u64,
    /// The device's ceiling that it applies at; 0 without one.
    pub device_ceiling_bytes: u64,
    /// Tokens of the fixed reference request.
    pub cell_tokens: u64,
    /// Tokens of the request that was measured.
    pub evidence_tokens: u64,
    /// What was found on the host.
    pub host: Bases,
    /// What was found on the device.
    #[serde(rename = "on_device")]
    pub on_device: Bases,
}

/// A fit that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Of one memory.
    One(BankFit),
    /// Of a host with a device.
    Device(DeviceFit),
}

impl Fit {
    /// Reads `bank-fit.json`.
    ///
    /// # Errors
    /// The reason for which it is not applied.
    pub fn read(json: &[u8]) -> std::result::Result<Self, NotApplied> {
        let invalid = |what: String| NotApplied::BankFitInvalid(what);
        let value: Value = strict::parse(FILE, json).map_err(|error| invalid(error.to_string()))?;
        let format = value.get("format");
        match format.and_then(Value::as_str) {
            Some(V2) => {
                let fit: BankFit =
                    serde_json::from_value(value).map_err(|error| invalid(error.to_string()))?;
                fit.check().map_err(invalid)?;
                Ok(Self::One(fit))
            }
            Some(FLINT) => {
                let fit: DeviceFit =
                    serde_json::from_value(value).map_err(|error| invalid(error.to_string()))?;
                fit.check().map_err(invalid)?;
                Ok(Self::Device(fit))
            }
            Some(V1) => Err(NotApplied::BankFitV1Rest),
            _ => Err(NotApplied::BankFitFormat(format.map_or("missing".to_owned(), ToString::to_string))),
        }
    }
}

/// Checks what no measurement can have found.
fn check(ceiling: u64, tokens: [u64; 2], bases: &Bases) -> std::result::Result<(), String> {
    if tokens.contains(&0) {
        return Err("cell_tokens and evidence_tokens must be at least 1".to_owned());
    }
    match [bases.base_prompt_bytes, bases.base_decode_bytes].iter().find(|base| **base >= ceiling) {
        Some(base) => Err(format!("a base of {base} bytes is not below the ceiling of {ceiling}")),
        None => Ok(()),
    }
}

impl BankFit {
    /// A fit that was measured.
    pub fn new(ceiling_bytes: u64, cell_tokens: u64, evidence_tokens: u64, bases: Bases) -> Self {
        Self { format: V2.to_owned(), ceiling_bytes, cell_tokens, evidence_tokens, bases }
    }

    fn check(&self) -> std::result::Result<(), String> {
        check(self.ceiling_bytes, [self.cell_tokens, self.evidence_tokens], &self.bases)
    }

    /// Whether it may be applied.
    ///
    /// # Errors
    /// The reason for which not.
    pub fn applies(&self, ceiling_bytes: u64, cell_tokens: u64) -> std::result::Result<(), NotApplied> {
        same_ceiling(self.ceiling_bytes, ceiling_bytes)?;
        same_cell(self.cell_tokens, cell_tokens)
    }

    /// Slots of each layer in a phase, so that the peak stays [`MARGIN_BYTES`] below the ceiling. As
    /// [`slots`], with the fit's ceiling.
    pub fn slots(&self, phase: Phase, growth_bytes: i64, row_bytes: u64, rest_now: u64) -> u64 {
        slots(self.ceiling_bytes, &self.bases, phase, growth_bytes, row_bytes, rest_now)
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// None in practice: the numbers can always be written.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        strict::text(FILE, self)
    }
}

impl DeviceFit {
    /// A fit that was measured; `host` and `on_device` each with their ceiling.
    pub fn new(device: String, tokens: (u64, u64), host: (u64, Bases), on_device: (u64, Bases)) -> Self {
        Self {
            format: FLINT.to_owned(),
            device,
            host_ceiling_bytes: host.0,
            device_ceiling_bytes: on_device.0,
            cell_tokens: tokens.0,
            evidence_tokens: tokens.1,
            host: host.1,
            on_device: on_device.1,
        }
    }

    fn check(&self) -> std::result::Result<(), String> {
        let tokens = [self.cell_tokens, self.evidence_tokens];
        check(self.host_ceiling_bytes, tokens, &self.host)?;
        if self.device_ceiling_bytes == 0 {
            Ok(())
        } else {
            check(self.device_ceiling_bytes, tokens, &self.on_device)
        }
    }

    /// Whether it may be applied to this device under these ceilings.
    ///
    /// # Errors
    /// The reason for which not; another device counts as another ceiling of it, 0.
    pub fn applies(
        &self,
        device: &str,
        host_ceiling_bytes: u64,
        device_ceiling_bytes: u64,
        cell_tokens: u64,
    ) -> std::result::Result<(), NotApplied> {
        if self.device != device {
            return Err(NotApplied::BankFitInvalid(format!("measured on {}, this is {device}", self.device)));
        }
        same_ceiling(self.host_ceiling_bytes, host_ceiling_bytes)?;
        same_ceiling(self.device_ceiling_bytes, device_ceiling_bytes)?;
        same_cell(self.cell_tokens, cell_tokens)
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// None in practice: the numbers can always be written.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        strict::text(FILE, self)
    }
}

fn same_ceiling(fit: u64, now: u64) -> std::result::Result<(), NotApplied> {
    if fit == now { Ok(()) } else { Err(NotApplied::BankFitOtherCeiling { fit, now }) }
}

fn same_cell(fit: u64, now: u64) -> std::result::Result<(), NotApplied> {
    if fit == now { Ok(()) } else { Err(NotApplied::BankFitOtherCell { fit, now }) }
}

/// `(ceiling − 1 GiB − base − growth) / row`, none below 0. `row_bytes` is one slot in every layer, `growth_bytes` the
/// bills' difference between the measured request and the context that is asked for; other programs that use more than
/// when it was measured (`rest_now`) count into the base.
pub fn slots(
    ceiling_bytes: u64,
    bases: &Bases,
    phase: Phase,
    growth_bytes: i64,
    row_bytes: u64,
    rest_now: u64,
) -> u64 {
    let base = match phase {
        Phase::Prompt => bases.base_prompt_bytes,
        Phase::Decode => bases.base_decode_bytes,
    };
    let others = rest_now.saturating_sub(bases.rest_bytes);
    let free = i128::from(ceiling_bytes)
        - i128::from(MARGIN_BYTES)
        - i128::from(base)
        - i128::from(others)
        - i128::from(growth_bytes);
    u64::try_from(free).unwrap_or(0).checked_div(row_bytes).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const GIB_110: u64 = 118_111_600_640;

    fn published() -> Value {
        json!({
            "format": V2, "ceiling_bytes": GIB_110, "cell_tokens": 17_408, "evidence_tokens": 17_411,
            "base_prompt_bytes": 38_068_233_600_u64, "base_decode_bytes": 31_743_548_992_u64,
            "rest_bytes": 12_880_707_584_u64,
        })
    }

    fn read(value: &Value) -> std::result::Result<Fit, NotApplied> {
        Fit::read(value.to_string().as_bytes())
    }

    fn one(value: &Value) -> BankFit {
        match read(value) {
            Ok(Fit::One(fit)) => fit,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_published_fit_is_read_applied_and_written_back() {
        let fit = one(&published());
        assert_eq!(fit.applies(GIB_110, 17_408), Ok(()));
        assert_eq!(serde_json::from_slice::<Value>(&fit.to_json().unwrap()).unwrap(), published());
    }

    #[test]
    fn published_slots_follow_with_their_growth() {
        // 401 MB a slot in every layer; the bills' growth is what makes 188 and 209 of 196 and 212.
        let (fit, row) = (one(&published()), 401_736_000);
        assert_eq!(fit.slots(Phase::Prompt, 0, row, 12_880_707_584), 196);
        assert_eq!(fit.slots(Phase::Decode, 0, row, 0), 212);
        assert_eq!(fit.slots(Phase::Prompt, 3_400_000_000, row, 0), 188);
        assert_eq!(fit.slots(Phase::Decode, 1_300_000_000, row, 0), 209);
    }

    #[test]
    fn other_programs_cost_slots_and_never_give_any() {
        let (fit, row) = (one(&published()), 401_736_000);
        let more = fit.bases.rest_bytes + 10 * row;
        assert_eq!(fit.slots(Phase::Decode, 0, row, more), 202);
        assert_eq!(fit.slots(Phase::Decode, 0, row, 1), 212);
        assert_eq!(fit.slots(Phase::Decode, i64::MAX, row, 0), 0);
        assert_eq!(fit.slots(Phase::Decode, 0, 0, 0), 0);
    }

    #[test]
    fn each_reason_has_its_name() {
        let fit = one(&published());
        let name = |reason: &NotApplied| reason.to_string().split(':').next().unwrap_or("").to_owned();
        assert_eq!(name(&fit.applies(GIB_110 + 1, 17_408).unwrap_err()), "BankFitOtherCeiling");
        assert_eq!(name(&fit.applies(GIB_110, 17_409).unwrap_err()), "BankFitOtherCell");
        let with = |key: &str, value: Value| {
            let mut changed = published();
            changed[key] = value;
            name(&read(&changed).unwrap_err())
        };
        assert_eq!(with("format", json!(V1)), "BankFitV1Rest");
        assert_eq!(with("format", json!("mlx-serve-bank-fit-v3")), "BankFitFormat");
        assert_eq!(with("format", json!(2)), "BankFitFormat");
        assert_eq!(with("rest_bytes", json!(null)), "BankFitInvalid");
        assert_eq!(with("base_prompt_bytes", json!(GIB_110)), "BankFitInvalid");
        assert_eq!(with("cell_tokens", json!(0)), "BankFitInvalid");
        assert_eq!(name(&Fit::read(b"{").unwrap_err()), "BankFitInvalid");
        let mut missing = published();
        missing.as_object_mut().unwrap().remove("base_decode_bytes");
        assert_eq!(name(&read(&missing).unwrap_err()), "BankFitInvalid");
    }

    #[test]
    fn a_fit_of_a_device_is_for_that_device_under_its_ceilings() {
        let bases = Bases { base_prompt_bytes: 3, base_decode_bytes: 2, rest_bytes: 1 };
        let fit = DeviceFit::new("H200".to_owned(), (17_408, 17_411), (100, bases), (50, bases));
        assert_eq!(Fit::read(&fit.to_json().unwrap()), Ok(Fit::Device(fit.clone())));
        assert_eq!(fit.applies("H200", 100, 50, 17_408), Ok(()));
        assert!(fit.applies("A100", 100, 50, 17_408).is_err());
        let other = NotApplied::BankFitOtherCeiling { fit: 50, now: 51 };
        assert_eq!(fit.applies("H200", 100, 51, 17_408), Err(other));
        assert_eq!(slots(1 << 40, &bases, Phase::Prompt, 0, 1 << 30, 0), 1022);
    }
}
