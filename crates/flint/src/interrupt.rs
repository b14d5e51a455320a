//! Ctrl-C and the system's request to end.
//!
//! While something runs that can be stopped (a reply, a server), it holds [`Presses`] and decides what Ctrl-C means.
//! Otherwise Ctrl-C ends the program at once. The line editor reads Ctrl-C as a key, so it does not come here then.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

use crate::error::{Error, Result};

/// What the user or the system wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Press {
    /// Ctrl-C: stop what is running.
    Interrupt,
    /// End the program.
    Terminate,
}

impl Press {
    /// Exit status of a program that this ended: 128 and the signal's number.
    pub(crate) fn status(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// Listens for Ctrl-C from its creation to the program's end.
#[derive(Clone)]
pub(crate) struct Interrupts {
    /// The number of presses and the last one.
    presses: watch::Receiver<(u64, Press)>,
    /// How many [`Presses`] are held.
    held: Arc<AtomicUsize>,
}

impl Interrupts {
    /// Starts to listen.
    pub(crate) fn listen() -> Result<Self> {
        let (sender, presses) = watch::channel((0, Press::Interrupt));
        let held = Arc::new(AtomicUsize::new(0));
        let interrupts = Self { presses, held: Arc::clone(&held) };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(Error::io("listening for Ctrl-C"))?;
        std::thread::Builder::new()
            .name("interrupts".into())
            .spawn(move || {
                // Without signals the system's own handling of Ctrl-C stays: it ends the program.
                let _ = runtime.block_on(count(&sender, &held));
            })
            .map_err(Error::io("listening for Ctrl-C"))?;
        Ok(interrupts)
    }

    /// Takes Ctrl-C over until the result is dropped.
    pub(crate) fn take(&self) -> Presses {
        self.held.fetch_add(1, Ordering::SeqCst);
        let mut receiver = self.presses.clone();
        receiver.mark_unchanged();
        Presses { receiver, held: Arc::clone(&self.held) }
    }
}

/// The presses of Ctrl-C since it was taken over.
pub(crate) struct Presses {
    receiver: watch::Receiver<(u64, Press)>,
    held: Arc<AtomicUsize>,
}

impl Presses {
    /// Completes at the next press.
    pub(crate) async fn next(&mut self) -> Press {
        if self.receiver.changed().await.is_err() {
            // The listener is gone, so no press can come.
            std::future::pending::<()>().await;
        }
        self.receiver.borrow_and_update().1
    }
}

impl Drop for Presses {
    fn drop(&mut self) {
        self.held.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn count(sender: &watch::Sender<(u64, Press)>, held: &AtomicUsize) -> io::Result<()> {
    let mut signals = Signals::new()?;
    loop {
        let press = signals.next().await;
        if held.load(Ordering::SeqCst) == 0 {
            std::process::exit(i32::from(press.status()));
        }
        sender.send_modify(|(presses, last)| (*presses, *last) = (*presses + 1, press));
    }
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) -> Press {
        tokio::select! {
            _ = self.interrupt.recv() => Press::Interrupt,
            _ = self.terminate.recv() => Press::Terminate,
        }
    }
}

#[cfg(windows)]
struct Signals(tokio::signal::windows::CtrlC);

#[cfg(windows)]
impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self(tokio::signal::windows::ctrl_c()?))
    }

    async fn next(&mut self) -> Press {
        self.0.recv().await;
        Press::Interrupt
    }
}
