//! What products with a matrix promise: accuracy, and bits that depend on a row alone.

mod accuracy;
mod bits;
mod refusals;
mod support;
