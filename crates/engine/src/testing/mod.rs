//! A model and a drafter to test with: the engine's contracts in milliseconds, and a server without weights.

mod liar;
mod toy;

pub use liar::Liar;
pub use toy::{ForwardHook, RowHook, ToyLm};
