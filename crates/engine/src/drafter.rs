//! The seam for speculation: who proposes tokens.

/// Proposes tokens that may follow.
///
/// A proposal may be wrong, too long, hold tokens that do not exist, or be empty. It changes the number of forwards that a
/// reply takes and never the reply: the engine draws every token itself and keeps a draft only where it drew the same.
pub trait Drafter: Send {
    /// What may follow `history` (prompt and reply so far), at most `max` tokens; more are cut off.
    fn propose(&mut self, history: &[u32], max: usize) -> Vec<u32>;
}
