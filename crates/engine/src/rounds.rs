//! Rounds: plan, propose, forward, draw, commit, tell. One round is one forward.
//!
//! This file owns the requests in flight and the model; it knows no thread. `engine.rs` calls it from the engine's thread,
//! the contract tests call it step by step.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use flint_model::{Batch, Best, LanguageModel, Limits, Logits, SequenceId, Span, Want};

use crate::{
    Drafter, EngineOptions, Error, Event, Usage,
    history::History,
    sampler::{Row, Sampler},
    scheduler::{PlannedSpan, RequestView, View, plan},
    status::{Outcome, Shared, Ticket},
    walk::{End, Rules, Walked, walk},
};

/// What a forward gave of the wanted rows.
enum Wanted {
    Whole(Logits),
    Best(Vec<Best>),
}

impl Wanted {
    fn row(&self, row: usize) -> Row<'_> {
        match self {
            Self::Whole(logits) => Row::Whole(logits.row(row)),
            Self::Best(best) => Row::Best(best[row]),
        }
    }

    /// Refuses another number of rows or tokens than was asked for.
    fn check(&self, rows: usize, vocabulary: usize) -> Result<(), Error> {
        let found = match self {
            Self::Whole(logits)
                if logits.vocabulary != vocabulary || logits.values.len() != rows * vocabulary =>
            {
                format!("{} logits for a vocabulary of {}", logits.values.len(), logits.vocabulary)
            }
            Self::Best(best) if best.len() != rows => format!("the best logits of {} rows", best.len()),
            _ => return Ok(()),
        };
        Err(Error::Broken { found, expected: format!("{rows} rows of {vocabulary}") })
    }
}

/// A request on its way to the model.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: u64,
    pub(crate) prompt: Vec<u32>,
    pub(crate) rules: Rules,
    pub(crate) events: flume::Sender<Event>,
    /// Set when the client dropped its events.
    pub(crate) abandoned: Arc<AtomicBool>,
    pub(crate) submitted: Instant,
    pub(crate) ticket: Ticket,
}

impl Job {
    fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    fn tell(&self, event: Event) {
        // A client that left is noticed by its flag.
        let _ = self.events.send(event);
    }

    /// Leaves the gauges first, so that a client that has seen the end sees its place free, too.
    fn end(self, outcome: Outcome, event: Option<Event>) {
        tracing::debug!(request = self.id, ?outcome, "request ended");
        self.ticket.end(outcome);
        if let Some(event) = event {
            let _ = self.events.send(event);
        }
    }

    pub(crate) fn fail(self, error: Error) {
        self.end(Outcome::Failed, Some(Event::Failed(error)));
    }
}

/// A request with an open sequence.
#[derive(Debug)]
struct Running {
    job: Job,
    sequence: SequenceId,
    history: History,
    /// Tokens of the history that the sequence has seen.
    committed: usize,
    admitted: Instant,
    first_token: Option<Instant>,
    /// Set when the reply has ended; the round's end takes it out.
    end: Option<End>,
}

impl Running {
    /// Tokens of the reply, a stop token included.
    fn drawn(&self) -> usize {
        self.history.len() - self.history.prompt()
    }

    fn usage(&self, now: Instant) -> Usage {
        let first_token = self.first_token.unwrap_or(now);
        Usage {
            prompt_tokens: self.history.prompt(),
            completion_tokens: self.drawn(),
            queue_seconds: self.admitted.duration_since(self.job.submitted).as_secs_f64(),
            prefill_seconds: first_token.duration_since(self.admitted).as_secs_f64(),
            decode_seconds: now.duration_since(first_token).as_secs_f64(),
        }
    }
}

/// The requests in flight and what serves them.
pub(crate) struct Rounds {
    model: Box<dyn LanguageModel>,
    drafter: Option<Box<dyn Drafter>>,
    limits: Limits,
    options: EngineOptions,
    sampler: Sampler,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    shared: Arc<Shared>,
}

impl Rounds {
    /// `options` must be [`EngineOptions::within`] the model's limits.
    pub(crate) fn new(
        model: Box<dyn LanguageModel>,
        drafter: Option<Box<dyn Drafter>>,
        options: EngineOptions,
        shared: Arc<Shared>,
    ) -> Self {
        let limits = model.limits();
        Self {
            model,
            drafter,
            limits,
            options,
            sampler: Sampler::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            shared,
        }
    }

    pub(crate) fn accept(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// One round. Does nothing when nothing is in flight.
    pub(crate) fn round(&mut self) {
        self.sweep();
        let plan = plan(&self.view());
        self.admit(plan.admitted);
        let (batch, indices) = self.batch(&plan.spans);
        if !batch.spans.is_empty() {
            match self.forward(&batch, &indices) {
                Ok(rows) => self.draw(&batch, &indices, &rows),
                Err(error) => {
                    tracing::error!(requests = indices.len(), %error, "forward failed");
                    for index in indices {
                        self.running[index].end = Some(End::Failed(error.clone()));
                    }
                }
            }
        }
        self.take_out_ended();
    }

    /// Ends every request with `error`, without a call on the model.
    pub(crate) fn fail_all(&mut self, error: &Error) {
        for running in self.running.drain(..) {
            running.job.fail(error.clone());
        }
        for job in self.waiting.drain(..) {
            job.fail(error.clone());
        }
    }

    /// Ends the requests whose clients left.
    fn sweep(&mut self) {
        let (left, stay): (Vec<_>, Vec<_>) =
            self.running.drain(..).partition(|running| running.job.is_abandoned());
        self.running = stay;
        for running in left {
            self.close(running.sequence);
            running.job.end(Outcome::Cancelled, None);
        }
        let (left, stay): (VecDeque<_>, VecDeque<_>) = self.waiting.drain(..).partition(Job::is_abandoned);
        self.waiting = stay;
        for job in left {
            job.end(Outcome::Cancelled, None);
        }
    }

    fn view(&self) -> View {
        let places = self.options.parallel.saturating_sub(self.running.len());
        let running = self.running.iter().map(|running| RequestView {
            request: running.job.id,
            pending: running.history.len() - running.committed,
            drafts: self.drafts_worth(running),
        });
        let waiting = self.waiting.iter().take(places).map(|job| RequestView {
            request: job.id,
            pending: job.prompt.len(),
            drafts: 0,
        });
        View {
            running: running.collect(),
            waiting: waiting.collect(),
            places,
            rows: self.options.rows_per_round,
        }
    }

    /// A round emits one token more than it accepts drafts, so the last token of a reply needs no draft.
    fn drafts_worth(&self, running: &Running) -> usize {
        if self.drafter.is_none() {
            return 0;
        }
        let left = running.job.rules.max_tokens - running.drawn();
        self.limits.drafts.min(left.saturating_sub(1))
    }

    fn admit(&mut self, count: usize) {
        for mut job in self.waiting.drain(..count) {
            match self.model.open() {
                Ok(sequence) => {
                    job.ticket.start();
                    job.tell(Event::Started { prompt_tokens: job.prompt.len() });
                    let prompt = std::mem::take(&mut job.prompt);
                    let history = History::new(prompt, job.rules.sampling.has_penalties());
                    self.running.push(Running {
                        job,
                        sequence,
                        history,
                        committed: 0,
                        admitted: Instant::now(),
                        first_token: None,
                        end: None,
                    });
                }
                Err(error) => {
                    tracing::error!(request = job.id, %error, "no sequence could be opened");
                    job.fail(error.into());
                }
            }
        }
    }

    /// The spans of a plan, and the running request that each belongs to.
    fn batch(&mut self, plan: &[PlannedSpan]) -> (Batch, Vec<usize>) {
        let mut batch = Batch::default();
        let mut indices = Vec::with_capacity(plan.len());
        for span in plan {
            // One that is in the plan and does not run could not be opened.
            let found = self.running.iter().position(|running| running.job.id == span.request);
            let Some(index) = found else { continue };
            let running = &self.running[index];
            let tokens = running.history.tokens();
            let end = running.committed + span.sure;
            let drafts = match &mut self.drafter {
                Some(drafter) if span.drafts > 0 => {
                    usable(drafter.propose(tokens, span.drafts), span.drafts, self.limits.vocabulary)
                }
                _ => Vec::new(),
            };
            let want = if end == tokens.len() { Want::Next } else { Want::Nothing };
            let sure = tokens[running.committed..end].to_vec();
            batch.spans.push(Span { sequence: running.sequence, sure, drafts, want });
            indices.push(index);
        }
        (batch, indices)
    }

    /// Runs a batch. Where every request draws by the best logits, nothing else of the rows is asked for.
    fn forward(&mut self, batch: &Batch, indices: &[usize]) -> Result<Wanted, Error> {
        let best = indices.iter().all(|&index| self.running[index].job.rules.need_only_the_best());
        let result = if best {
            self.model.forward_best(batch).map(Wanted::Best)
        } else {
            self.model.forward(batch).map(Wanted::Whole)
        };
        let rows = batch.spans.iter().map(|span| span.rows() as u64).sum::<u64>();
        let mut status = self.shared.status();
        status.rounds += 1;
        status.last_progress = Instant::now();
        let found = result?;
        status.rows += rows;
        drop(status);
        let wanted = batch.spans.iter().map(Span::wanted_rows).sum::<usize>();
        found.check(wanted, self.limits.vocabulary)?;
        Ok(found)
    }

    /// Draws, commits and tells, request by request.
    fn draw(&mut self, batch: &Batch, indices: &[usize], wanted: &Wanted) {
        let mut first_row = 0;
        for (span, &index) in batch.spans.iter().zip(indices) {
            let rows = first_row..first_row + span.wanted_rows();
            first_row = rows.end;
            let running = &mut self.running[index];
            let walked = if rows.is_empty() {
                Walked::default()
            } else {
                let rows = rows.map(|row| wanted.row(row));
                walk(&mut self.sampler, &running.job.rules, &mut running.history, rows, &span.drafts)
            };
            if let Err(error) = self.model.commit(running.sequence, walked.accepted) {
                tracing::error!(request = running.job.id, %error, "commit failed");
                running.end = Some(End::Failed(error.into()));
                continue;
            }
            running.committed += span.sure.len() + walked.accepted;
            let mut status = self.shared.status();
            status.emitted += walked.tokens.len() as u64;
            status.drafted += span.drafts.len() as u64;
            status.accepted += walked.accepted as u64;
            drop(status);
            if span.want != Want::Nothing {
                running.first_token.get_or_insert_with(Instant::now);
            }
            for token in walked.tokens {
                running.job.tell(Event::Token(token));
            }
            running.end = walked.end;
        }
    }

    fn take_out_ended(&mut self) {
        let (over, stay): (Vec<_>, Vec<_>) =
            self.running.drain(..).partition(|running| running.end.is_some());
        self.running = stay;
        for running in over {
            self.close(running.sequence);
            let usage = running.usage(Instant::now());
            match running.end {
                Some(End::Finished(reason)) => {
                    running.job.end(Outcome::Finished, Some(Event::Finished { reason, usage }));
                }
                Some(End::Failed(error)) => {
                    tracing::warn!(request = running.job.id, %error, "request failed");
                    running.job.fail(error);
                }
                None => {}
            }
        }
    }

    fn close(&mut self, sequence: SequenceId) {
        if let Err(error) = self.model.close(sequence) {
            tracing::error!(?sequence, %error, "a sequence could not be closed");
        }
    }
}

/// A proposal without what exceeds `most` and without anything from the first token on that does not exist.
fn usable(mut proposal: Vec<u32>, most: usize, vocabulary: usize) -> Vec<u32> {
    proposal.truncate(most);
    let known = proposal.iter().position(|&token| token as usize >= vocabulary).unwrap_or(proposal.len());
    proposal.truncate(known);
    proposal
}
