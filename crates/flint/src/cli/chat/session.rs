//! A conversation: its messages, how it is sampled, and what it took.

use std::ops::ControlFlow;

use flint_chat::{ChatRequest, StreamOptions};
use flint_engine::{Handle, Request, Sampling};
use serde_json::{Value, json};

use super::command::{Command, HELP, set};
use crate::assemble::Assembled;
use crate::config::SamplingOptions;
use crate::config::settings::sampling;
use crate::error::{Error, Result};
use crate::interrupt::{Interrupts, Press};
use crate::talk::{Ending, Shown, Spoken, speak};
use crate::terminal::{Style, Terminal};

/// The conversation so far.
pub(super) struct Session<'a> {
    assembled: &'a Assembled,
    handle: Handle,
    terminal: Terminal,
    options: SamplingOptions,
    sampling: Sampling,
    system: Option<String>,
    think: bool,
    /// User and assistant messages in turn.
    messages: Vec<Value>,
    totals: Totals,
}

/// Sums over the session's replies.
#[derive(Default)]
struct Totals {
    replies: usize,
    prompt_tokens: usize,
    prompt_seconds: f64,
    reply_tokens: usize,
    reply_seconds: f64,
    /// Tokens of the last prompt and its reply: how full the context is.
    held_tokens: usize,
}

impl<'a> Session<'a> {
    /// An empty conversation.
    pub(super) fn new(
        assembled: &'a Assembled,
        options: SamplingOptions,
        system: Option<String>,
        think: bool,
        terminal: Terminal,
    ) -> Result<Self> {
        let handle = assembled.engine.handle();
        let sampling = sampling(&options, &assembled.chat.defaults(), handle.limits().vocabulary)?;
        let (messages, totals) = (Vec::new(), Totals::default());
        Ok(Self { assembled, handle, terminal, options, sampling, system, think, messages, totals })
    }

    /// Says `message` and shows the reply. A request of the system to end comes back as the press.
    ///
    /// # Errors
    /// When output or the engine is gone. What the engine or the template refuses is shown, and the message forgotten.
    pub(super) fn reply(&mut self, message: &str, interrupts: &Interrupts) -> Result<Option<Press>> {
        self.messages.push(json!({ "role": "user", "content": message }));
        let spoken = match self.speak(interrupts) {
            Ok(spoken) => spoken,
            Err(error @ (Error::OutputClosed | Error::Io { .. })) => return Err(error),
            Err(error) => {
                self.messages.pop();
                self.terminal.note(Style::Warning, &format!("{error}"));
                return Ok(None);
            }
        };
        self.terminal.line(Style::Plain, "")?;
        self.terminal.note(Style::Dim, &spoken.figures());
        self.totals.add(&spoken);
        let stopped = matches!(spoken.ending, Ending::Pressed(_));
        if stopped && spoken.content.is_empty() {
            self.messages.pop();
            self.terminal.note(Style::Dim, "there was no answer yet, so the message is forgotten");
        } else {
            let mut answer = json!({ "role": "assistant", "content": spoken.content });
            if !spoken.reasoning.is_empty() {
                answer["reasoning_content"] = spoken.reasoning.into();
            }
            self.messages.push(answer);
        }
        Ok(match spoken.ending {
            Ending::Pressed(press @ Press::Terminate) => Some(press),
            _ => None,
        })
    }

    fn speak(&self, interrupts: &Interrupts) -> Result<Spoken> {
        let request = ChatRequest {
            enable_thinking: (!self.think).then_some(false),
            ..ChatRequest::new(self.conversation())
        };
        let chat = &self.assembled.chat;
        let prompt = chat.render(&request)?;
        let options =
            StreamOptions { in_reasoning: prompt.in_reasoning, stop: Vec::new(), split_reasoning: true };
        let request = Request {
            prompt: prompt.tokens,
            max_tokens: self.options.max_tokens,
            stop_tokens: chat.stop_tokens().to_vec(),
            sampling: self.sampling.clone(),
            logprobs: None,
        };
        let mut presses = interrupts.take();
        let mut shown = Shown::new(self.terminal);
        speak(&self.handle, chat, request, options, &mut presses, &mut |piece| shown.show(piece))
    }

    /// The system text and all messages.
    fn conversation(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({ "role": "system", "content": text }));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Does what a command says; breaks when it is to end.
    pub(super) fn obey(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::Help => self.say(HELP),
            Command::Clear => {
                self.forget();
                self.say("the conversation is forgotten");
            }
            Command::System(text) => {
                self.forget();
                self.say(if text.is_some() {
                    "the instruction is in place"
                } else {
                    "there is no instruction"
                });
                self.system = text;
            }
            Command::Think(think) => {
                self.think = think;
                self.say(if think {
                    "the model thinks before it answers"
                } else {
                    "the model answers at once"
                });
            }
            Command::Set(None) => self.say(&self.rules()),
            Command::Set(Some((name, value))) => self.set(&name, &value),
            Command::Stats => self.say(&self.figures()),
            Command::Save(file) => self.save(&file),
            Command::Quit => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    fn say(&self, text: &str) {
        self.terminal.note(Style::Dim, text);
    }

    fn forget(&mut self) {
        self.messages.clear();
        self.totals.held_tokens = 0;
    }

    fn set(&mut self, name: &str, value: &str) {
        let mut options = self.options.clone();
        let vocabulary = self.handle.limits().vocabulary;
        let done = set(&mut options, name, value).and_then(|()| {
            // A seed that was drawn at the start stays until the user names one.
            let fixed =
                SamplingOptions { seed: options.seed.or(Some(self.sampling.seed)), ..options.clone() };
            sampling(&fixed, &self.assembled.chat.defaults(), vocabulary).map_err(|error| error.to_string())
        });
        match done {
            Ok(sampling) => {
                (self.options, self.sampling) = (options, sampling);
                self.say(&self.rules());
            }
            Err(what) => self.terminal.note(Style::Warning, &what),
        }
    }

    fn rules(&self) -> String {
        let s = &self.sampling;
        let bound = self.options.max_tokens.map_or("none".to_owned(), |tokens| tokens.to_string());
        format!(
            "temperature {} · top-p {} · top-k {} · min-p {} · repetition-penalty {} · presence-penalty {} · \
             frequency-penalty {} · seed {} · max-tokens {bound}",
            s.temperature,
            s.top_p,
            s.top_k,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            s.seed
        )
    }

    fn figures(&self) -> String {
        let totals = &self.totals;
        let rate = |tokens: usize, seconds: f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        format!(
            "{} replies · {} tokens at {:.1} tok/s · prompts {} tokens at {:.1} tok/s\n\
             context {} of {} tokens · {}\n{}",
            totals.replies,
            totals.reply_tokens,
            rate(totals.reply_tokens.saturating_sub(totals.replies), totals.reply_seconds),
            totals.prompt_tokens,
            rate(totals.prompt_tokens, totals.prompt_seconds),
            totals.held_tokens,
            self.handle.limits().context,
            self.handle.arithmetic_id(),
            self.assembled.summary,
        )
    }

    fn save(&self, file: &str) {
        let conversation = json!({ "model": self.assembled.name, "messages": self.conversation() });
        let text = format!("{conversation:#}\n");
        match std::fs::write(file, text) {
            Ok(()) => self.say(&format!("written to {file}")),
            Err(error) => self.terminal.note(Style::Warning, &format!("{file}: {error}")),
        }
    }
}

impl Totals {
    fn add(&mut self, spoken: &Spoken) {
        self.replies += 1;
        self.prompt_tokens += spoken.prompt_tokens;
        self.prompt_seconds += spoken.prompt_seconds;
        self.reply_tokens += spoken.reply_tokens;
        self.reply_seconds += spoken.reply_seconds;
        self.held_tokens = spoken.prompt_tokens + spoken.reply_tokens;
    }
}
