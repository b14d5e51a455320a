//! Whole-program contracts live in the test files beside this one.
