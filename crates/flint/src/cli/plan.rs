//! `flint plan`: what a checkpoint would need. Only headers are read.

use std::process::ExitCode;

use flint_weights::Checkpoint;

use crate::assemble;
use crate::config::settings::ModelSettings;
use crate::config::{ConfigFile, PlanFlags};
use crate::error::{Error, Result};
use crate::terminal::{Style, Terminal};

/// Width of the table.
const WIDTH: usize = 100;

/// Prints the plan.
pub(crate) fn run(flags: PlanFlags, file: &ConfigFile, terminal: Terminal) -> Result<ExitCode> {
    let parallel = flags.parallel.unwrap_or(1);
    let settings = ModelSettings::new(flags.model.over(file)?, flags.dir, parallel, true)?;
    let checkpoint = Checkpoint::open(settings.source.clone())?;
    let (_, plan, _) = assemble::plan(&checkpoint, &settings)?;
    if flags.json {
        let text = serde_json::to_string_pretty(&plan)
            .map_err(|error| Error::Io { what: "writing the plan as JSON".into(), source: error.into() })?;
        terminal.line(Style::Plain, &text)?;
    } else {
        terminal.line(Style::Plain, plan.render(WIDTH).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}
