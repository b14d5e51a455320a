//! What can be seen of the engine from outside, without asking its thread.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::Error;

/// The engine at one moment: gauges, and counts since it was started.
///
/// An engine is stuck, not busy, when requests run or wait and `last_progress` is older than any forward can take.
#[derive(Clone, Debug)]
pub struct Status {
    /// Requests with an open sequence.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Forwards that returned.
    pub rounds: u64,
    /// Rows that were computed, rejected drafts included.
    pub rows: u64,
    /// Tokens that were drawn.
    pub emitted: u64,
    /// Drafts that were verified.
    pub drafted: u64,
    /// Drafts that were kept.
    pub accepted: u64,
    /// Replies that were completed.
    pub finished: u64,
    /// Requests that ended in an error.
    pub failed: u64,
    /// Requests whose events were dropped before their end.
    pub cancelled: u64,
    /// When the last forward returned, or the engine last awoke from having nothing to do.
    pub last_progress: Instant,
    /// Why the engine takes no more requests, when it does not.
    pub ended: Option<Error>,
}

/// How a request left the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Finished,
    Failed,
    Cancelled,
}

/// The status, shared by the engine's thread and its handles. The lock is never held across a call on the model.
#[derive(Debug)]
pub(crate) struct Shared {
    status: Mutex<Status>,
}

impl Shared {
    pub(crate) fn new() -> Self {
        Self {
            status: Mutex::new(Status {
                running: 0,
                waiting: 0,
                rounds: 0,
                rows: 0,
                emitted: 0,
                drafted: 0,
                accepted: 0,
                finished: 0,
                failed: 0,
                cancelled: 0,
                last_progress: Instant::now(),
                ended: None,
            }),
        }
    }

    pub(crate) fn status(&self) -> MutexGuard<'_, Status> {
        // Plain counts stay meaningful even if a holder panicked.
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ended(&self) -> Option<Error> {
        self.status().ended.clone()
    }

    /// Takes a place in the queue, unless the engine has ended or `limit` requests are in flight.
    pub(crate) fn enter(self: &Arc<Self>, limit: usize) -> Result<Ticket, Error> {
        let mut status = self.status();
        if let Some(ended) = &status.ended {
            return Err(ended.clone());
        }
        let in_flight = status.running + status.waiting;
        if in_flight >= limit {
            return Err(Error::Busy { in_flight, limit });
        }
        status.waiting += 1;
        drop(status);
        Ok(Ticket { shared: Arc::clone(self), running: false, outcome: Outcome::Failed })
    }
}

/// A request's place in the gauges. They return to zero because every way out of the engine drops it.
#[derive(Debug)]
pub(crate) struct Ticket {
    shared: Arc<Shared>,
    running: bool,
    outcome: Outcome,
}

impl Ticket {
    /// From the queue to a sequence.
    pub(crate) fn start(&mut self) {
        if !std::mem::replace(&mut self.running, true) {
            let mut status = self.shared.status();
            status.waiting -= 1;
            status.running += 1;
        }
    }

    pub(crate) fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut status = self.shared.status();
        if self.running {
            status.running -= 1;
        } else {
            status.waiting -= 1;
        }
        match self.outcome {
            Outcome::Finished => status.finished += 1,
            Outcome::Failed => status.failed += 1,
            Outcome::Cancelled => status.cancelled += 1,
        }
    }
}
