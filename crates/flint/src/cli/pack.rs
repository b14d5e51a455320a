//! `flint pack` and `flint unpack`: a streaming pack from a checkpoint, and the reverse.

use std::process::ExitCode;

use flint_weights::pack::{self, Folder, Numbering, Origin, PackOptions, PackPlan, Progress, Stage};

use crate::config::packing::{PackSettings, PackSource};
use crate::config::{PackFlags, UnpackFlags};
use crate::error::{Error, Result};
use crate::hub::{Hub, read_token};
use crate::progress::{bytes_bar, show};
use crate::terminal::{Style, Terminal, bytes, counted};

/// Makes a pack.
pub(crate) fn run(flags: PackFlags, terminal: Terminal) -> Result<ExitCode> {
    let settings = PackSettings::new(flags)?;
    let origin: Box<dyn Origin> = match settings.source {
        PackSource::Folder(folder) => Box::new(Folder::new(folder)),
        PackSource::Repository(repository) => {
            let token = match &settings.token_file {
                Some(path) => Some(read_token(path).map_err(Error::io(path.display().to_string()))?),
                None => None,
            };
            Box::new(Hub::new(&settings.hub, repository, token))
        }
    };
    let numbering = if settings.model_numbers { Numbering::Model } else { Numbering::Bank };
    let options = PackOptions { format: settings.format, numbering };
    let plan = PackPlan::new(origin.as_ref(), &options)?;
    let summary = format!(
        "{} of {} experts, {}; {} of other tensors",
        counted(plan.records(), "record"),
        plan.mode().name(),
        bytes(plan.bank_bytes()),
        bytes(plan.trunk_bytes())
    );
    terminal.note(Style::Plain, &format!("{}: {summary}", origin.label()));
    let copying = bytes_bar("copying".to_owned(), terminal);
    let checking = bytes_bar("reading back".to_owned(), terminal);
    let packed = pack::pack(
        &plan,
        origin.as_ref(),
        &settings.folder,
        &mut |progress: Progress| match progress.stage {
            Stage::Copying => show(&copying, progress.done, progress.all),
            Stage::Checking => {
                copying.finish_and_clear();
                show(&checking, progress.done, progress.all);
            }
        },
    )?;
    checking.finish_and_clear();
    if packed.resumed_shards > 0 {
        let shards = counted(packed.resumed_shards, "shard");
        terminal.note(Style::Dim, &format!("{shards} had been copied by an earlier run"));
    }
    let done = format!(
        "{}: {}, every byte read back and compared with its source",
        packed.folder.display(),
        counted(packed.records, "record")
    );
    terminal.line(Style::Plain, &done)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a pack's source.
pub(crate) fn unpack(flags: &UnpackFlags, terminal: Terminal) -> Result<ExitCode> {
    let bar = bytes_bar("unpacking".to_owned(), terminal);
    pack::unpack(&flags.pack, &flags.dest, &mut |done, all| show(&bar, done, all))?;
    bar.finish_and_clear();
    let done = format!("{}: the source of {}, byte for byte", flags.dest.display(), flags.pack.display());
    terminal.line(Style::Plain, &done)?;
    Ok(ExitCode::SUCCESS)
}
