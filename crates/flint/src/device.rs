//! Which device a model runs on, and the memory that it can give.

use std::fmt;
use std::str::FromStr;

use flint_cuda::{Cuda, DeviceInfo};
use flint_weights::{Checkpoint, LoadPlan, PlanRequest};
use serde::Deserialize;

use crate::config::settings::ModelSettings;
use crate::error::{Error, Result};
use crate::machine;

/// Rows of one forward on the CPU. Prompts are read in parts of this size: large enough that a part's arithmetic
/// outweighs reading the weights once, small enough that running replies wait for well under a second on a machine that
/// suits the model.
pub(crate) const ROWS: usize = 512;

/// The same on a CUDA device, whose arithmetic outweighs its reads only at more rows.
const CUDA_ROWS: usize = 4096;

/// Device memory that is left alone: code, graphs, scratch of operations, and what others on the device need.
const FLOOR_BYTES: u64 = 1 << 30;

/// The option `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum DeviceChoice {
    /// A CUDA device when a driver answers and the model fits, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device of this number.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(Self::Auto),
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", number)) if number.parse::<u16>().is_ok() => {
                Ok(Self::Cuda(number.parse().unwrap_or_default()))
            }
            _ => Err(format!("{text:?} is no device; the devices are auto, cpu, cuda and cuda:N, N from 0")),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// The device that was chosen, opened.
pub(crate) enum Chosen {
    /// The CPU, and why `auto` did not take a device that is there.
    Cpu {
        /// A sentence for the user.
        note: Option<String>,
    },
    /// A CUDA device.
    Cuda(Box<Cuda>),
}

impl Chosen {
    /// Most rows of a forward.
    pub(crate) fn rows(&self, settings: &ModelSettings) -> usize {
        settings.rows.unwrap_or(match self {
            Self::Cpu { .. } => ROWS,
            Self::Cuda(_) => CUDA_ROWS,
        })
    }
}

/// Chooses a device and plans the load on it.
///
/// # Errors
/// When the device that the user names cannot be used.
pub(crate) fn choose(
    checkpoint: &Checkpoint,
    settings: &ModelSettings,
    context: usize,
) -> Result<(Chosen, LoadPlan)> {
    let on_cpu = |note| (Chosen::Cpu { note }, cpu_plan(checkpoint, settings, context));
    match settings.device {
        DeviceChoice::Cpu => Ok(on_cpu(None)),
        DeviceChoice::Cuda(number) => {
            let cuda = open(number, settings).map_err(|error| Error::Device {
                device: settings.device.to_string(),
                why: error.to_string(),
            })?;
            let plan = cuda_plan(checkpoint, settings, context, &cuda)?;
            Ok((Chosen::Cuda(Box::new(cuda)), plan))
        }
        // The CPU's arithmetics were asked for by name.
        DeviceChoice::Auto if settings.cpu_arithmetic => Ok(on_cpu(None)),
        DeviceChoice::Auto => match flint_cuda::devices() {
            // No driver or no device: nothing that a user of this machine expects.
            Err(_) => Ok(on_cpu(None)),
            Ok(devices) => Ok(first_that_fits(checkpoint, settings, context, &devices)
                .unwrap_or_else(|why| on_cpu(Some(why)))),
        },
    }
}

/// The first device on which the model fits, or why there is none.
fn first_that_fits(
    checkpoint: &Checkpoint,
    settings: &ModelSettings,
    context: usize,
    devices: &[DeviceInfo],
) -> std::result::Result<(Chosen, LoadPlan), String> {
    let mut why = String::new();
    for device in devices {
        let tried = open(device.ordinal, settings).map_err(|error| error.to_string()).and_then(|cuda| {
            let plan = cuda_plan(checkpoint, settings, context, &cuda).map_err(|error| error.to_string())?;
            match plan.shortage() {
                None => Ok((Chosen::Cuda(Box::new(cuda)), plan)),
                Some(text) => Err(text),
            }
        });
        match tried {
            Ok(found) => return Ok(found),
            Err(text) if why.is_empty() => why = format!("{} is not used: {text}", device.name),
            Err(_) => {}
        }
    }
    Err(why)
}

fn open(number: usize, settings: &ModelSettings) -> std::result::Result<Cuda, flint_cuda::CudaError> {
    let options = flint_cuda::Options::device(number);
    let code_cache = settings.code_cache.clone();
    Cuda::new(flint_cuda::Options { graphs: settings.graphs, code_cache, ..options })
}

fn cpu_plan(checkpoint: &Checkpoint, settings: &ModelSettings, context: usize) -> LoadPlan {
    let cache_element_bytes = match settings.cpu.arithmetic {
        flint_cpu::Arithmetic::Lanes => 4,
        flint_cpu::Arithmetic::Dot => 2,
    };
    let request = PlanRequest {
        context,
        sequences: settings.parallel,
        cache_element_bytes,
        drafts_max: settings.drafts,
        rows: settings.rows.unwrap_or(ROWS),
        machine_bytes: machine::memory().map(|memory| memory.available),
        on_device: false,
    };
    LoadPlan::new(checkpoint, &request)
}

fn cuda_plan(
    checkpoint: &Checkpoint,
    settings: &ModelSettings,
    context: usize,
    cuda: &Cuda,
) -> Result<LoadPlan> {
    let (free, _) = cuda.memory()?;
    let request = PlanRequest {
        context,
        sequences: settings.parallel,
        cache_element_bytes: 2,
        drafts_max: settings.drafts,
        rows: settings.rows.unwrap_or(CUDA_ROWS),
        machine_bytes: Some((free as u64).saturating_sub(FLOOR_BYTES)),
        on_device: true,
    };
    Ok(LoadPlan::new(checkpoint, &request))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_written_as_they_are_read() {
        for text in ["auto", "cpu", "cuda:0", "cuda:7"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "CUDA"] {
            let message = text.parse::<DeviceChoice>().unwrap_err();
            assert!(message.contains("auto, cpu, cuda and cuda:N"), "{message}");
        }
    }
}
