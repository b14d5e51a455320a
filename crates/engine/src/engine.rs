//! The engine's thread, and the handles that reach it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Instant,
};

use flint_model::{LanguageModel, Limits};

use crate::{
    Drafter, Error, Events, Request, Status,
    rounds::{Job, Rounds},
    status::Shared,
    walk::Rules,
};

/// How much the engine takes on at once. None of it changes a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Most rows of one forward. More read a prompt faster, fewer let running replies get their next token sooner.
    pub rows_per_round: usize,
    /// Most requests that run at once; each holds an open sequence.
    pub parallel: usize,
    /// Most requests that wait beyond those.
    pub queue: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { rows_per_round: 512, parallel: 8, queue: 256 }
    }
}

impl EngineOptions {
    /// What is possible with a model: at least one row and one request, at most what the model holds, and never more
    /// requests than rows, so that every running request has a row in every forward.
    #[must_use]
    pub fn within(self, limits: &Limits) -> Self {
        let rows_per_round = self.rows_per_round.min(limits.rows).max(1);
        let parallel = self.parallel.min(limits.sequences).min(rows_per_round).max(1);
        Self { rows_per_round, parallel, queue: self.queue }
    }
}

/// What a handle asks of the engine's thread.
pub(crate) enum Command {
    Serve(Box<Job>),
    Stop,
}

/// Owns the engine's thread, which owns the model. Dropping it shuts down.
#[derive(Debug)]
pub struct Engine {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the engine's thread. The model's limits bound the options.
    ///
    /// Should the system refuse a thread, the engine starts dead: every `submit` says why.
    pub fn start(model: Box<dyn LanguageModel>, options: EngineOptions) -> Self {
        Self::launch(model, options, None)
    }

    /// As [`start`](Self::start), with a drafter whose proposals are verified.
    pub fn start_with_drafter(
        model: Box<dyn LanguageModel>,
        options: EngineOptions,
        drafter: Box<dyn Drafter>,
    ) -> Self {
        Self::launch(model, options, Some(drafter))
    }

    fn launch(
        model: Box<dyn LanguageModel>,
        options: EngineOptions,
        drafter: Option<Box<dyn Drafter>>,
    ) -> Self {
        let (handle, commands) = Handle::new(&*model, options);
        let shared = Arc::clone(&handle.door.shared);
        let rounds = Rounds::new(model, drafter, handle.door.options, Arc::clone(&shared));
        let spawned = std::thread::Builder::new()
            .name("flint-engine".to_owned())
            .spawn(move || live(rounds, &commands, &shared));
        let thread = match spawned {
            Ok(thread) => Some(thread),
            Err(error) => {
                let reason = format!("its thread could not be started: {error}");
                handle.door.shared.status().ended = Some(Error::Dead { reason });
                None
            }
        };
        Self { handle, thread }
    }

    /// A handle to submit requests with. Handles may outlive the engine; they then refuse.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Stops after the forward that is running, ends every request with [`Error::Stopped`] and joins the thread.
    pub fn shutdown(self) {
        drop(self);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // An error of either says that the thread is gone, which is what is wanted.
        let _ = self.handle.commands.send(Command::Stop);
        // Nobody new is taken on while the last forward runs.
        self.handle.door.shared.status().ended.get_or_insert(Error::Stopped);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread's life: rounds until it is told to stop or panics, then an end for everyone who waits.
fn live(mut rounds: Rounds, commands: &flume::Receiver<Command>, shared: &Arc<Shared>) {
    let outcome = catch_unwind(AssertUnwindSafe(|| serve(&mut rounds, commands, shared)));
    let end = match outcome {
        Ok(()) => Error::Stopped,
        Err(payload) => {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
            tracing::error!(message = text, "the engine's thread panicked");
            Error::Dead { reason: format!("its thread panicked: {text}") }
        }
    };
    // First the word, then the queue: a job that is sent after the queue was emptied finds the word.
    shared.status().ended = Some(end.clone());
    rounds.fail_all(&end);
    for command in commands.try_iter() {
        if let Command::Serve(job) = command {
            job.fail(end.clone());
        }
    }
    // A model that panicked may panic again in its drop; nobody waits any more.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(rounds)));
}

fn serve(rounds: &mut Rounds, commands: &flume::Receiver<Command>, shared: &Shared) {
    loop {
        if rounds.is_idle() {
            match commands.recv() {
                Ok(Command::Serve(job)) => rounds.accept(*job),
                Ok(Command::Stop) | Err(_) => return,
            }
            shared.status().last_progress = Instant::now();
        }
        for command in commands.try_iter() {
            match command {
                Command::Serve(job) => rounds.accept(*job),
                Command::Stop => return,
            }
        }
        rounds.round();
    }
}

/// The only door to the engine. Cheap to clone, usable from any thread.
#[derive(Clone, Debug)]
pub struct Handle {
    door: Arc<Door>,
    commands: flume::Sender<Command>,
}

/// What every handle of an engine shares.
#[derive(Debug)]
struct Door {
    shared: Arc<Shared>,
    limits: Limits,
    options: EngineOptions,
    arithmetic_id: String,
    next_id: AtomicU64,
}

impl Handle {
    /// A handle, and the commands that it sends.
    pub(crate) fn new(model: &dyn LanguageModel, options: EngineOptions) -> (Self, flume::Receiver<Command>) {
        let (commands, receiver) = flume::unbounded();
        let limits = model.limits();
        let door = Door {
            shared: Arc::new(Shared::new()),
            limits,
            options: options.within(&limits),
            arithmetic_id: model.arithmetic_id().to_owned(),
            next_id: AtomicU64::new(1),
        };
        (Self { door: Arc::new(door), commands }, receiver)
    }

    /// Checks a request and queues it. Everything that can be wrong with a request is refused here, by name.
    ///
    /// Errors: [`Error::Invalid`], [`Error::ContextLength`], [`Error::Busy`]; [`Error::Stopped`] or [`Error::Dead`] when
    /// the engine has ended.
    pub fn submit(&self, request: Request) -> Result<Events, Error> {
        let max_tokens = request.check(&self.door.limits)?;
        let shared = &self.door.shared;
        let ticket = shared.enter(self.door.options.parallel.saturating_add(self.door.options.queue))?;
        let (sender, receiver) = flume::unbounded();
        let abandoned = Arc::new(AtomicBool::new(false));
        let id = self.door.next_id.fetch_add(1, Ordering::Relaxed);
        let job = Job {
            id,
            prompt: request.prompt,
            rules: Rules {
                sampling: request.sampling,
                stop_tokens: request.stop_tokens,
                max_tokens,
                logprobs: request.logprobs,
            },
            events: sender,
            abandoned: Arc::clone(&abandoned),
            submitted: Instant::now(),
            ticket,
        };
        let events = Events { id, receiver, abandoned, shared: Arc::clone(shared), over: false };
        // A thread that ended in between either emptied its queue after this, or left its word before it.
        if self.commands.send(Command::Serve(Box::new(job))).is_err() {
            return Err(shared.ended().unwrap_or(Error::Stopped));
        }
        shared.ended().map_or(Ok(events), Err)
    }

    /// The model's sizes.
    pub fn limits(&self) -> Limits {
        self.door.limits
    }

    /// The options in effect, bounded by the model's sizes.
    pub fn options(&self) -> EngineOptions {
        self.door.options
    }

    /// Names checkpoint and arithmetic: equal ids give equal replies.
    pub fn arithmetic_id(&self) -> &str {
        &self.door.arithmetic_id
    }

    /// The engine at this moment. Never waits for the engine's thread.
    pub fn status(&self) -> Status {
        self.door.shared.status().clone()
    }
}

#[cfg(test)]
impl Handle {
    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.door.shared)
    }
}
