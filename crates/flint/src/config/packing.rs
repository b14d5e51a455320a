//! What the commands around streaming packs receive.

use std::path::PathBuf;

use flint_weights::pack::Scope;

use super::settings::{bounded, random_seed, refused};
use super::{ExpertFormat, PackFlags, VerifyFlags};
use crate::error::Result;
use crate::hub::{HUB, Repository};

/// Where the source of a pack is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PackSource {
    /// Here.
    Folder(PathBuf),
    /// On a hub.
    Repository(Repository),
}

/// What `flint pack` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PackSettings {
    /// The checkpoint.
    pub(crate) source: PackSource,
    /// The pack's folder.
    pub(crate) folder: PathBuf,
    /// How the experts must be stored.
    pub(crate) format: Option<String>,
    /// Whether manifests have the model's layer numbers.
    pub(crate) model_numbers: bool,
    /// The hub's address.
    pub(crate) hub: String,
    /// File of the token.
    pub(crate) token_file: Option<PathBuf>,
}

impl PackSettings {
    /// Checks the flags.
    pub(crate) fn new(flags: PackFlags) -> Result<Self> {
        let source = if flags.source.starts_with("hf:") {
            let repository = flags.source.parse().map_err(|why| refused("SRC", &flags.source, why))?;
            PackSource::Repository(repository)
        } else {
            PackSource::Folder(PathBuf::from(&flags.source))
        };
        let hub = flags.hub.unwrap_or_else(|| HUB.to_owned());
        if !["https://", "http://"].iter().any(|scheme| hub.starts_with(scheme)) {
            return Err(refused("--hub", hub, "it must be an address with https:// or http://".to_owned()));
        }
        if flags.token_file.is_some() && hub.starts_with("http://") {
            let expected = "a token goes over https:// only".to_owned();
            return Err(refused("--token-file", hub, expected));
        }
        let format = flags.format.map(|format| match format {
            ExpertFormat::Exl3 => "exl3",
            ExpertFormat::Affine => "affine",
            ExpertFormat::Fp8 => "fp8",
            ExpertFormat::Plain => "plain",
        });
        Ok(Self {
            source,
            folder: flags.dest,
            format: format.map(str::to_owned),
            model_numbers: flags.model_layer_numbers,
            hub,
            token_file: flags.token_file,
        })
    }
}

/// How much `flint verify` reads.
pub(crate) fn verify_scope(flags: &VerifyFlags) -> Result<Scope> {
    match flags.quick {
        None => Ok(Scope::All),
        Some(records) => {
            let records = bounded("--quick", records, &(1..=1 << 20))?;
            Ok(Scope::Quick { records, seed: random_seed() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(source: &str) -> PackFlags {
        PackFlags {
            source: source.to_owned(),
            dest: PathBuf::from("pack"),
            format: None,
            model_layer_numbers: false,
            hub: None,
            token_file: None,
        }
    }

    #[test]
    fn a_source_is_a_folder_or_a_repository_at_a_commit() {
        let settings = PackSettings::new(flags("models/here")).unwrap();
        assert_eq!(settings.source, PackSource::Folder(PathBuf::from("models/here")));
        assert_eq!(settings.hub, "https://huggingface.co");
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let settings = PackSettings::new(flags(&format!("hf:a/b@{commit}"))).unwrap();
        assert!(matches!(settings.source, PackSource::Repository(repository) if repository.commit == commit));
        let message = PackSettings::new(flags("hf:a/b@main")).unwrap_err().to_string();
        assert!(message.starts_with("SRC: hf:a/b@main cannot be used; \"main\" is no commit"), "{message}");
    }

    #[test]
    fn a_hub_has_an_address_and_a_token_goes_over_https() {
        let other = |hub: &str, token: Option<&str>| PackFlags {
            hub: Some(hub.to_owned()),
            token_file: token.map(PathBuf::from),
            ..flags("hf:a/b@0123456789abcdef0123456789abcdef01234567")
        };
        assert!(
            PackSettings::new(other("mirror", None)).unwrap_err().to_string().starts_with("--hub: mirror")
        );
        PackSettings::new(other("http://127.0.0.1:9", None)).unwrap();
        let message = PackSettings::new(other("http://127.0.0.1:9", Some("t"))).unwrap_err().to_string();
        assert!(message.starts_with("--token-file") && message.contains("https://"), "{message}");
        PackSettings::new(other("https://hub", Some("t"))).unwrap();
    }

    #[test]
    fn a_quick_look_has_a_bound() {
        let scope = |quick| verify_scope(&VerifyFlags { dir: PathBuf::new(), quick });
        assert_eq!(scope(None).unwrap(), Scope::All);
        assert!(matches!(scope(Some(7)).unwrap(), Scope::Quick { records: 7, .. }));
        for records in [0, (1 << 20) + 1] {
            let message = scope(Some(records)).unwrap_err().to_string();
            assert_eq!(message, format!("--quick: {records} cannot be used; it must be from 1 to 1048576"));
        }
    }
}
