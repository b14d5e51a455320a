//! Numbers from a seed, the same on every machine.

/// A small generator (SplitMix64): every test draws from its own seed.
#[derive(Clone, Debug)]
pub(super) struct Seed(u64);

impl Seed {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D)
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is not 0.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound.max(1) as u64) as usize
    }

    /// In `low..high`, with 24 bits.
    pub(super) fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * ((self.bits() >> 40) as f32 / (1 << 24) as f32)
    }

    /// About normal, deviation 1: the sum of four uniform numbers.
    pub(super) fn normal(&mut self) -> f32 {
        let total: f32 = (0..4).map(|_| self.between(-1.0, 1.0)).sum();
        total * 0.866
    }

    /// `len` of [`normal`](Self::normal), times `scale`.
    pub(super) fn normals(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.normal() * scale).collect()
    }

    /// `len` of [`between`](Self::between).
    pub(super) fn uniform(&mut self, len: usize, low: f32, high: f32) -> Vec<f32> {
        (0..len).map(|_| self.between(low, high)).collect()
    }
}
