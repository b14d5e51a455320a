//! Random numbers for seeds and ids.

use std::hash::{BuildHasher as _, RandomState};

/// 64 random bits from the process's random hash keys. Not for secrets.
pub(crate) fn random_bits() -> u64 {
    RandomState::new().hash_one(std::time::SystemTime::now())
}

/// A seed that every JSON reader keeps exactly: below 2⁵³, where JavaScript's numbers end.
pub(crate) fn random_seed() -> u64 {
    random_bits() >> 11
}
