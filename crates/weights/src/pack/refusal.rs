//! Why a pack is not opened, by the names that the format's public reader uses.

use crate::Error;

/// A reason, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// A manifest is not there.
    ManifestMissing,
    /// A manifest is there and cannot be read: a link, no regular file, above the bound.
    ManifestOpen,
    /// A manifest is no JSON of the expected form, or has a key twice.
    ManifestSyntax,
    /// Another format or version.
    ManifestFormat,
    /// A codebook that no decoder has.
    CodebookNotImplemented,
    /// A codebook's name and multiplier contradict each other.
    CodebookMultiplier,
    /// Sizes that no model has.
    DimsInvalid,
    /// Sizes of another model than `config.json`'s.
    DimsNotImplemented,
    /// A width that no decoder has.
    KNotImplemented,
    /// A layer's segments, record size or place differ from what sizes and width give.
    LayerGeometry,
    /// The bank's name, alignment or size.
    SidecarGeometry,
    /// The bank is not there.
    SidecarMissing,
    /// The bank is a link, no regular file, or shorter than its manifest says.
    SidecarOpen,
    /// Another number of records than layers times experts.
    RecordCount,
    /// A record twice.
    RecordDuplicate,
    /// A record's place or size.
    RecordGeometry,
    /// A record's sum is missing or no SHA-256.
    RecordSha256,
    /// The pack was never compared with its source.
    ParityNotPassed,
    /// The older manifest has another mode.
    RuntimeModeNotExl3,
    /// The older manifest has other records.
    RuntimeRecordMismatch,
    /// `config.json` says pack and there is no bank, or the reverse.
    BankMissing,
    /// A routed expert stands in the trunk's shards too.
    ExpertInTrunk,
    /// A file of sums that cannot be used.
    SumsInvalid,
}

impl Refusal {
    /// The error of this reason.
    pub(crate) fn error(self, file: &str, what: impl Into<String>, remedy: &'static str) -> Error {
        Error::Pack { refusal: self, file: file.to_owned(), what: what.into(), remedy }
    }
}
