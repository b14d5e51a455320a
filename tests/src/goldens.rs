//! Stored results of the reference implementations.

use std::path::Path;

use crate::feeding::Bits;

/// A file of golden tensors.
pub struct Goldens(Vec<u8>);

impl Goldens {
    /// Reads a safetensors file.
    ///
    /// # Panics
    /// When it cannot be read.
    pub fn open(path: &Path) -> Self {
        Self(std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn tensor(&self, name: &str) -> Vec<[u8; 4]> {
        let file = safetensors::SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        tensor.data().chunks_exact(4).map(|b| b.try_into().unwrap()).collect()
    }

    /// An fp32 tensor.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.tensor(name).into_iter().map(f32::from_le_bytes).collect()
    }

    /// An i32 tensor.
    pub fn ints(&self, name: &str) -> Vec<i32> {
        self.tensor(name).into_iter().map(i32::from_le_bytes).collect()
    }

    /// An i32 tensor of tokens.
    ///
    /// # Panics
    /// When an id is negative.
    pub fn tokens(&self, name: &str) -> Vec<u32> {
        self.ints(name).into_iter().map(|t| u32::try_from(t).unwrap()).collect()
    }

    /// Whether the file has a tensor.
    ///
    /// # Panics
    /// When the file is damaged.
    pub fn has(&self, name: &str) -> bool {
        safetensors::SafeTensors::deserialize(&self.0).unwrap().tensor(name).is_ok()
    }
}

/// The largest distance of logits from the reference's.
///
pub fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |worst, d| if d > worst || d.is_nan() { d } else { worst })
}

/// Fails when a value is farther than `tolerance` from the reference's, or is no number.
///
pub fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    let worst = distance(found, expected);
    assert!(worst <= tolerance, "{what}: {worst:e} away from the reference, {tolerance:e} is allowed");
}

/// Bits as numbers.
pub fn floats(bits: &Bits) -> Vec<f32> {
    bits.iter().map(|b| f32::from_bits(*b)).collect()
}
