//! The contract between the network and a device.
//!
//! [`ops`] declares every operation once: the table makes the trait method, the recordable command and the entry
//! in the conformance suite. [`Backend`] adds memory, uploads and the few named host reads. [`law`] holds the
//! suite that every backend passes, [`wrap`] the wrappers (a recorder, and the cheaters that the suite must catch).
//!
//! The rules that an implementation keeps (the five laws; ARCHITECTURE.md has their reasons):
//! * **Row**: an output row depends on its input row, the weights and its own sequence's state, nothing else.
//! * **Seam**: cutting a run of tokens into several calls changes no row and no state.
//! * **Order**: no sum depends on threads, arrival or a selection's return order.
//! * **Place**: where bytes live changes no arithmetic.

mod backend;
pub mod law;
pub mod ops;
pub mod wrap;

pub use backend::{Backend, Element, Error, Precision, Result};
pub use ops::Rows;
