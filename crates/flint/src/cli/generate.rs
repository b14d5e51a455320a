//! `flint generate`: one prompt, one reply.

use std::io::Read as _;
use std::process::ExitCode;

use flint_chat::{ChatRequest, Piece, Prompt, StreamOptions};
use flint_engine::Request;
use serde_json::json;

use crate::assemble::{Assembled, assemble};
use crate::config::settings::{ModelSettings, sampling};
use crate::config::{ConfigFile, GenerateFlags};
use crate::error::{Error, Result};
use crate::interrupt::Interrupts;
use crate::talk::{Ending, Shown, Spoken, speak};
use crate::terminal::{Style, Terminal};

/// Answers the prompt.
pub(crate) fn run(
    flags: &GenerateFlags,
    file: &ConfigFile,
    interrupts: &Interrupts,
    terminal: Terminal,
) -> Result<ExitCode> {
    let options = flags.sampling.clone().over(file)?;
    let settings = ModelSettings::new(flags.model.clone().over(file)?, None, 1, flags.force)?;
    let text = prompt_text(flags)?;
    let assembled = assemble(&settings, 0, terminal)?;
    let prompt = prompt(&assembled, flags, text)?;
    let handle = assembled.engine.handle();
    let sampling = sampling(&options, &assembled.chat.defaults(), handle.limits().vocabulary)?;
    let seed = sampling.seed;
    let request = Request {
        prompt: prompt.tokens,
        max_tokens: options.max_tokens,
        stop_tokens: assembled.chat.stop_tokens().to_vec(),
        sampling,
        logprobs: None,
    };
    let stream =
        StreamOptions { in_reasoning: prompt.in_reasoning, stop: Vec::new(), split_reasoning: !flags.raw };
    let mut presses = interrupts.take();
    let mut shown = Shown::new(terminal);
    let mut show = |piece: &Piece| if flags.json { Ok(()) } else { shown.show(piece) };
    let spoken = speak(&handle, &assembled.chat, request, stream, &mut presses, &mut show)?;
    if flags.json {
        terminal.line(Style::Plain, &report(&spoken, &assembled, seed).to_string())?;
    } else {
        terminal.line(Style::Plain, "")?;
        if terminal.person_reads {
            terminal.note(Style::Dim, &spoken.figures());
        }
    }
    assembled.engine.shutdown();
    Ok(match spoken.ending {
        Ending::Pressed(press) => ExitCode::from(press.status()),
        Ending::Stop | Ending::Length => ExitCode::SUCCESS,
    })
}

/// The prompt from the command line, a file, or standard input.
fn prompt_text(flags: &GenerateFlags) -> Result<String> {
    if let Some(prompt) = &flags.prompt {
        return Ok(prompt.clone());
    }
    if let Some(path) = &flags.file {
        return std::fs::read_to_string(path).map_err(Error::io(path.display().to_string()));
    }
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text).map_err(Error::io("standard input"))?;
    Ok(text.strip_suffix('\n').map(str::to_owned).unwrap_or(text))
}

fn prompt(assembled: &Assembled, flags: &GenerateFlags, text: String) -> Result<Prompt> {
    if flags.raw {
        let tokens = assembled.chat.encode_trusted(&text)?;
        return Ok(Prompt { tokens, text, in_reasoning: false });
    }
    let system = flags.system.iter().map(|system| json!({ "role": "system", "content": system }));
    let messages = system.chain(std::iter::once(json!({ "role": "user", "content": text }))).collect();
    let request =
        ChatRequest { enable_thinking: flags.no_think.then_some(false), ..ChatRequest::new(messages) };
    Ok(assembled.chat.render(&request)?)
}

fn report(spoken: &Spoken, assembled: &Assembled, seed: u64) -> serde_json::Value {
    json!({
        "model": assembled.name,
        "arithmetic_id": assembled.engine.handle().arithmetic_id(),
        "seed": seed,
        "content": spoken.content,
        "reasoning_content": spoken.reasoning,
        "finish_reason": match spoken.ending {
            Ending::Stop => "stop",
            Ending::Length => "length",
            Ending::Pressed(_) => "interrupted",
        },
        "prompt_tokens": spoken.prompt_tokens,
        "completion_tokens": spoken.reply_tokens,
        "prompt_seconds": spoken.prompt_seconds,
        "completion_seconds": spoken.reply_seconds,
    })
}
