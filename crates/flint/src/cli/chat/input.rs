//! Where the chat's lines come from: a line editor with history, or a pipe.

use std::io::BufRead as _;
use std::path::PathBuf;

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::error::{Error, Result};
use crate::terminal::{Style, Terminal};

const PROMPT: &str = "> ";
/// Before the following lines of a message.
const MORE: &str = ". ";

/// The source of lines.
pub(super) struct Input {
    source: Source,
    /// The last read was a Ctrl-C: a second one ends.
    interrupted: bool,
}

enum Source {
    Editor {
        editor: Box<DefaultEditor>,
        history: Option<PathBuf>,
    },
    /// A pipe or a file. The lines are shown where a person watches the output.
    Pipe {
        echo: Option<Terminal>,
    },
}

/// What was read.
pub(super) enum Read {
    Text(String),
    /// Ctrl-C at the prompt, for the first time in a row.
    Interrupted,
    End,
}

impl Input {
    /// An editor when a person types, else standard input line by line. Lines are remembered in `history`.
    pub(super) fn new(terminal: Terminal, history: Option<PathBuf>) -> Result<Self> {
        let source = if terminal.person_types && terminal.person_reads {
            let mut editor = Box::new(DefaultEditor::new()?);
            if let Some(path) = &history {
                // No history yet, or one that cannot be read: the chat works without.
                let _ = editor.load_history(path);
            }
            Source::Editor { editor, history }
        } else {
            Source::Pipe { echo: terminal.person_reads.then_some(terminal) }
        };
        Ok(Self { source, interrupted: false })
    }

    /// The next message, joined from lines that end in a backslash.
    pub(super) fn read(&mut self) -> Result<Read> {
        let mut text = String::new();
        loop {
            let prompt = if text.is_empty() { PROMPT } else { MORE };
            match self.source.line(prompt)? {
                Read::Text(line) => {
                    self.interrupted = false;
                    if let Some(start) = line.strip_suffix('\\') {
                        text.push_str(start);
                        text.push('\n');
                        continue;
                    }
                    text.push_str(&line);
                    self.source.remember(&text);
                    return Ok(Read::Text(text));
                }
                Read::Interrupted if self.interrupted => return Ok(Read::End),
                Read::Interrupted => {
                    self.interrupted = true;
                    return Ok(Read::Interrupted);
                }
                Read::End if text.is_empty() => return Ok(Read::End),
                Read::End => return Ok(Read::Text(text)),
            }
        }
    }
}

impl Source {
    fn line(&mut self, prompt: &str) -> Result<Read> {
        match self {
            Self::Editor { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Read::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(Read::Interrupted),
                Err(ReadlineError::Eof) => Ok(Read::End),
                Err(error) => Err(error.into()),
            },
            Self::Pipe { echo } => {
                let mut bytes = Vec::new();
                let read = std::io::stdin().lock().read_until(b'\n', &mut bytes);
                if read.map_err(Error::io("standard input"))? == 0 {
                    return Ok(Read::End);
                }
                let line = String::from_utf8_lossy(&bytes);
                let line = line.trim_end_matches(['\n', '\r']).to_owned();
                if let Some(terminal) = echo {
                    terminal.line(Style::Bold, &format!("{prompt}{line}"))?;
                }
                Ok(Read::Text(line))
            }
        }
    }

    /// Adds a message to the history, on disk too: a chat that is killed keeps its lines.
    fn remember(&mut self, text: &str) {
        let Self::Editor { editor, history } = self else { return };
        let Ok(true) = editor.add_history_entry(text) else { return };
        let Some(path) = history else { return };
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        if folder.and_then(|()| private(path)).is_err() || editor.append_history(path).is_err() {
            // Nowhere to keep it: the lines last as long as the program.
            *history = None;
        }
    }
}

/// Makes the history a file that only its owner can read, before anything is in it.
fn private(path: &std::path::Path) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.create(true).append(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path).map(drop)
}
