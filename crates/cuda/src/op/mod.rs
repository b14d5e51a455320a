//! Every operation that is not a product: one file for each concept.
//!
//! An operation checks its shapes, computes the grid, and queues its launches.

pub(crate) mod append;
pub(crate) mod attend;
pub(crate) mod conv;
pub(crate) mod feed;
pub(crate) mod hyper;
pub(crate) mod norm;
pub(crate) mod prepare;
pub(crate) mod route;
pub(crate) mod scan;
pub(crate) mod select;
pub(crate) mod streams;

use flint_backend::{Error, Result};

fn not_yet(op: &'static str) -> Result<()> {
    Err(Error::Device { backend: "cuda", what: format!("{op}: not yet") })
}
