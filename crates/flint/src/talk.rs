//! One reply from the engine, shown while it grows and stopped by Ctrl-C.

use std::time::Instant;

use flint_chat::{ChatFormat, Piece, StreamOptions};
use flint_engine::{Event, FinishReason, Handle, Request};

use crate::error::{Error, Result};
use crate::interrupt::{Press, Presses};
use crate::terminal::{Style, Terminal, counted, printable};

/// How a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The model ended it.
    Stop,
    /// The bound or the context ended it.
    Length,
    /// The user ended it.
    Pressed(Press),
}

/// A reply and what it took.
#[derive(Clone, Debug)]
pub(crate) struct Spoken {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) ending: Ending,
    pub(crate) prompt_tokens: usize,
    pub(crate) reply_tokens: usize,
    /// From submission to the first token.
    pub(crate) prompt_seconds: f64,
    /// From the first token to the last.
    pub(crate) reply_seconds: f64,
}

impl Spoken {
    /// Tokens a second after the first one, which belongs to the prompt's time.
    pub(crate) fn rate(&self) -> Option<f64> {
        (self.reply_tokens > 1 && self.reply_seconds > 0.0)
            .then(|| (self.reply_tokens - 1) as f64 / self.reply_seconds)
    }

    /// A line about tokens and times.
    pub(crate) fn figures(&self) -> String {
        let rate = self.rate().map(|rate| format!(" · {rate:.1} tok/s")).unwrap_or_default();
        let ending = match self.ending {
            Ending::Stop => "",
            Ending::Length => " · cut at the length limit",
            Ending::Pressed(_) => " · stopped",
        };
        format!(
            "{}{rate} · prompt {} in {:.2} s{ending}",
            counted(self.reply_tokens, "token"),
            counted(self.prompt_tokens, "token"),
            self.prompt_seconds
        )
    }
}

/// Submits a request and hands each piece of text to `show` as it comes, until the end or a press of Ctrl-C.
pub(crate) fn speak(
    handle: &Handle,
    chat: &ChatFormat,
    request: Request,
    options: StreamOptions,
    presses: &mut Presses,
    show: &mut dyn FnMut(&Piece) -> Result<()>,
) -> Result<Spoken> {
    let mut text = chat.stream(options);
    let mut spoken = Spoken {
        reasoning: String::new(),
        content: String::new(),
        ending: Ending::Stop,
        prompt_tokens: request.prompt.len(),
        reply_tokens: 0,
        prompt_seconds: 0.0,
        reply_seconds: 0.0,
    };
    let submitted = Instant::now();
    let mut first = None;
    let mut events = handle.submit(request)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().build().map_err(Error::io("waiting for the reply"))?;
    loop {
        let event = match runtime.block_on(wait(events.recv_async(), presses)) {
            Waited::Event(Some(event)) => event,
            Waited::Event(None) => return Err(flint_engine::Error::Stopped.into()),
            Waited::Pressed(press) => {
                spoken.ending = Ending::Pressed(press);
                break;
            }
        };
        match event {
            Event::Started { .. } => {}
            Event::Token(token) => {
                let began = *first.get_or_insert_with(Instant::now);
                spoken.prompt_seconds = (began - submitted).as_secs_f64();
                spoken.reply_seconds = began.elapsed().as_secs_f64();
                spoken.reply_tokens += 1;
                spoken.take(text.push(token.id), show)?;
            }
            Event::Finished { reason, usage } => {
                spoken.reply_tokens = usage.completion_tokens;
                spoken.ending = match reason {
                    FinishReason::StopToken(_) => Ending::Stop,
                    FinishReason::Length => Ending::Length,
                };
                // The engine's own clock: tokens reach this thread in bunches.
                spoken.prompt_seconds = usage.queue_seconds + usage.prefill_seconds;
                spoken.reply_seconds = usage.decode_seconds;
                break;
            }
            Event::Failed(error) => return Err(error.into()),
        }
    }
    spoken.take(text.finish(), show)?;
    Ok(spoken)
}

impl Spoken {
    fn take(&mut self, pieces: Vec<Piece>, show: &mut dyn FnMut(&Piece) -> Result<()>) -> Result<()> {
        for piece in pieces {
            show(&piece)?;
            match piece {
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::Content(text) => self.content.push_str(&text),
            }
        }
        Ok(())
    }
}

enum Waited {
    Event(Option<Event>),
    Pressed(Press),
}

/// Waits for the next event or for Ctrl-C, whichever comes first: a prompt of minutes can be stopped too.
async fn wait(event: impl Future<Output = Option<Event>>, presses: &mut Presses) -> Waited {
    tokio::select! {
        biased;
        press = presses.next() => Waited::Pressed(press),
        event = event => Waited::Event(event),
    }
}

/// A reply on its way to the terminal.
pub(crate) struct Shown {
    terminal: Terminal,
    /// Reasoning was shown and no answer yet.
    reasoning: bool,
}

impl Shown {
    /// Nothing shown yet.
    pub(crate) fn new(terminal: Terminal) -> Self {
        Self { terminal, reasoning: false }
    }

    /// A person sees the reasoning dimmed and apart; a program gets the answer alone.
    pub(crate) fn show(&mut self, piece: &Piece) -> Result<()> {
        let person = self.terminal.person_reads;
        match piece {
            Piece::Reasoning(text) if person => {
                self.reasoning = true;
                self.terminal.write(Style::Dim, &printable(text))
            }
            Piece::Reasoning(_) => Ok(()),
            Piece::Content(text) if person => {
                if std::mem::take(&mut self.reasoning) {
                    self.terminal.write(Style::Plain, "\n")?;
                }
                self.terminal.write(Style::Plain, &printable(text))
            }
            Piece::Content(text) => self.terminal.write(Style::Plain, text),
        }
    }
}
