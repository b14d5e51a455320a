//! The events of one reply, on the client's side.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{Error, Event, status::Shared};

/// The events of one reply, in order. Dropping it cancels the request: its work stops within one forward.
///
/// After `Finished` or `Failed` every call returns `None`. The last event always comes, also when the engine dies.
#[derive(Debug)]
pub struct Events {
    pub(crate) id: u64,
    pub(crate) receiver: flume::Receiver<Event>,
    pub(crate) abandoned: Arc<AtomicBool>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) over: bool,
}

/// Nothing happened within the time given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed;

impl Events {
    /// The request's number, unique in this engine: for logs.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Waits for the next event, blocking the thread.
    pub fn recv(&mut self) -> Option<Event> {
        if self.over {
            return None;
        }
        let received = self.receiver.recv().ok();
        Some(self.hand_out(received))
    }

    /// Waits for the next event, at most so long. For a terminal that must look at its keys in between.
    pub fn recv_timeout(&mut self, wait: Duration) -> Result<Option<Event>, Elapsed> {
        if self.over {
            return Ok(None);
        }
        match self.receiver.recv_timeout(wait) {
            Ok(event) => Ok(Some(self.hand_out(Some(event)))),
            Err(flume::RecvTimeoutError::Timeout) => Err(Elapsed),
            Err(flume::RecvTimeoutError::Disconnected) => Ok(Some(self.hand_out(None))),
        }
    }

    /// Waits for the next event without blocking the thread. Losing the future loses no event.
    pub async fn recv_async(&mut self) -> Option<Event> {
        if self.over {
            return None;
        }
        let received = self.receiver.recv_async().await.ok();
        Some(self.hand_out(received))
    }

    /// An engine that went away without a word still ends every reply.
    fn hand_out(&mut self, received: Option<Event>) -> Event {
        let event = received.unwrap_or_else(|| Event::Failed(self.shared.ended().unwrap_or(Error::Stopped)));
        self.over = matches!(event, Event::Finished { .. } | Event::Failed(_));
        event
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.abandoned.store(true, Ordering::Release);
    }
}
