//! What products with a matrix promise: accuracy, and bits that depend on a row alone.

#![allow(clippy::unwrap_used, clippy::panic, clippy::float_cmp, reason = "tests, many of equality by bits")]

mod accuracy;
mod bits;
mod exl3;
mod mlx;
mod refusals;
mod support;
