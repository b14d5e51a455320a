//! A sequence as bytes.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `FLINTSQ1` |
//! | 8, n | length and text of the arithmetic id |
//! | 8, 8 | `len` and `folded` |
//! | 8, n, repeated | length and bytes of each array, in the order of [`arrays`] |
//! | 32 | BLAKE3 of everything before |
//!
//! All integers are little-endian u64. Only what committed rows need is written, so equal sequences with an equal
//! `folded` have equal bytes whatever was drafted before.

use flint_backend::Backend;
use flint_weights::ModelConfig;

use crate::language::{Error, Result};
use crate::sequence::{CacheShape, Sequence};

const MAGIC: &[u8; 8] = b"FLINTSQ1";
const DIGEST: usize = 32;

/// A buffer and the part of it that committed rows need: the first `used` bytes, or for a ring the given rows.
struct Array<Buf> {
    name: &'static str,
    buffer: Buf,
    bytes: usize,
    used: Used,
}

enum Used {
    /// The first bytes.
    Front(usize),
    /// Rows of a ring: `rows` rows of `row_bytes` from position `first`, each in row `position mod ring_rows`.
    Ring { first: usize, rows: usize, ring_rows: usize, row_bytes: usize },
}

impl Used {
    /// The byte ranges of the buffer, in order.
    fn ranges(&self) -> Vec<std::ops::Range<usize>> {
        match *self {
            Self::Front(len) => std::iter::once(0..len).collect(),
            Self::Ring { first, rows, ring_rows, row_bytes } => (first..first + rows)
                .map(|position| position % ring_rows * row_bytes)
                .map(|at| at..at + row_bytes)
                .collect(),
        }
    }

    fn len(&self) -> usize {
        self.ranges().iter().map(ExactSizeIterator::len).sum()
    }
}

/// Every array of a sequence: per KDA layer window, state and log, then per DSA layer its pages and its ring.
fn arrays<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    shape: &CacheShape,
    sequence: &Sequence<B>,
) -> Vec<Array<B::Buffer>> {
    const F32: usize = 4;
    let channels = config.linear_width();
    let logged = sequence.len - sequence.folded;
    let window_row = 3 * channels * F32;
    let log_row = (3 * channels + config.linear_heads) * F32;
    let history = config.linear_conv_taps - 1;
    let mut all = Vec::new();
    for layer in &sequence.kda {
        let whole = channels * config.linear_head_dim * F32;
        let parts = [
            ("window", &layer.window, (history + shape.drafts) * window_row, (history + logged) * window_row),
            ("state", &layer.state, whole, whole),
            ("log", &layer.log, shape.drafts * log_row, logged * log_row),
        ];
        all.extend(parts.map(|(name, buffer, bytes, used)| Array {
            name,
            buffer: buffer.clone(),
            bytes,
            used: Used::Front(used),
        }));
    }
    let element = backend.cache_element().size();
    let (latent_row, pooled_row) = (config.kv_lora_rank * element, config.index_head_dim * element);
    let ring_row = 2 * config.index_head_dim * F32;
    let pools_of_page = shape.page_rows / config.index_kpool;
    for layer in &sequence.dsa {
        for (index, page) in layer.pages.iter().enumerate() {
            let rows = sequence.len.saturating_sub(index * shape.page_rows).min(shape.page_rows);
            let pools =
                (sequence.len / config.index_kpool).saturating_sub(index * pools_of_page).min(pools_of_page);
            let parts = [
                ("latents", &page.latents, shape.page_rows * latent_row, rows * latent_row),
                ("pooled keys", &page.pooled, pools_of_page * pooled_row, pools * pooled_row),
            ];
            all.extend(parts.map(|(name, buffer, bytes, used)| Array {
                name,
                buffer: buffer.clone(),
                bytes,
                used: Used::Front(used),
            }));
        }
        let rows = sequence.len % config.index_kpool;
        let used =
            Used::Ring { first: sequence.len - rows, rows, ring_rows: shape.ring_rows, row_bytes: ring_row };
        all.push(Array { name: "ring", buffer: layer.ring.clone(), bytes: shape.ring_rows * ring_row, used });
    }
    all
}

/// The bytes of a sequence that waits for no commit.
pub(crate) fn write<B: Backend>(
    backend: &mut B,
    config: &ModelConfig,
    shape: &CacheShape,
    arithmetic_id: &str,
    sequence: &Sequence<B>,
) -> Result<Vec<u8>> {
    if sequence.pending.is_some() || sequence.failed.is_some() {
        return Err(Error::Saved("only a committed sequence can be saved; commit or close it first".into()));
    }
    let mut out = Vec::new();
    out.extend_from_slice(MAGIC);
    put(&mut out, arithmetic_id.len());
    out.extend_from_slice(arithmetic_id.as_bytes());
    put(&mut out, sequence.len);
    put(&mut out, sequence.folded);
    let used_pages = sequence.len.div_ceil(shape.page_rows);
    debug_assert!(sequence.dsa.iter().all(|layer| layer.pages.len() >= used_pages));
    for array in arrays(backend, config, shape, sequence) {
        put(&mut out, array.used.len());
        if array.used.len() > 0 {
            let bytes = backend.read_bytes(&array.buffer)?;
            array.used.ranges().into_iter().for_each(|range| out.extend_from_slice(&bytes[range]));
        }
    }
    let digest = blake3::hash(&out);
    out.extend_from_slice(digest.as_bytes());
    Ok(out)
}

/// Opens a sequence from [`write`]'s bytes.
pub(crate) fn read<B: Backend>(
    backend: &mut B,
    config: &ModelConfig,
    shape: &CacheShape,
    arithmetic_id: &str,
    context: usize,
    saved: &[u8],
) -> Result<Sequence<B>> {
    let body = checked_body(saved)?;
    let mut reader = Reader { rest: body };
    let found = reader.text()?;
    if found != arithmetic_id {
        return Err(Error::Saved(format!(
            "it was made with {found}, this model computes with {arithmetic_id}; the bits would differ, prefill anew"
        )));
    }
    let (len, folded) = (reader.number()?, reader.number()?);
    if folded > len || len - folded > shape.drafts || len > context {
        return Err(Error::Saved(format!("{len} rows folded to {folded} do not fit a context of {context}")));
    }
    let mut sequence = Sequence::open(backend, config, shape)?;
    sequence.reserve(backend, config, shape, len)?;
    (sequence.len, sequence.folded) = (len, folded);
    for array in arrays(backend, config, shape, &sequence) {
        let stored = reader.bytes(array.name)?;
        if stored.len() != array.used.len() {
            let (name, expected) = (array.name, array.used.len());
            return Err(Error::Saved(format!("{name} has {} bytes, {expected} are needed", stored.len())));
        }
        let mut bytes = vec![0; array.bytes];
        let mut at = 0;
        for range in array.used.ranges() {
            let next = at + range.len();
            bytes[range].copy_from_slice(&stored[at..next]);
            at = next;
        }
        backend.write_bytes(&array.buffer, &bytes)?;
    }
    if reader.rest.is_empty() {
        Ok(sequence)
    } else {
        Err(Error::Saved(format!("{} bytes follow the last array", reader.rest.len())))
    }
}

/// The bytes before the digest, when digest and magic are right.
fn checked_body(saved: &[u8]) -> Result<&[u8]> {
    let damaged =
        || Error::Saved("its checksum does not match its bytes; it is damaged, prefill anew".into());
    let (body, digest) = saved.split_last_chunk::<DIGEST>().ok_or_else(damaged)?;
    if blake3::hash(body).as_bytes() != digest {
        return Err(damaged());
    }
    body.strip_prefix(MAGIC).ok_or_else(|| Error::Saved("it does not start with FLINTSQ1".into()))
}

fn put(out: &mut Vec<u8>, number: usize) {
    out.extend_from_slice(&(number as u64).to_le_bytes());
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8]> {
        let (taken, rest) =
            self.rest.split_at_checked(len).ok_or_else(|| Error::Saved(format!("it ends inside {what}")))?;
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<usize> {
        let bytes = self.take(8, "a number")?;
        let mut number = [0; 8];
        number.copy_from_slice(bytes);
        usize::try_from(u64::from_le_bytes(number)).map_err(|_| Error::Saved("a number is too large".into()))
    }

    fn bytes(&mut self, what: &str) -> Result<&'a [u8]> {
        let len = self.number()?;
        self.take(len, what)
    }

    fn text(&mut self) -> Result<String> {
        let bytes = self.bytes("the arithmetic id")?;
        String::from_utf8(bytes.to_vec()).map_err(|_| Error::Saved("the arithmetic id is no text".into()))
    }
}
