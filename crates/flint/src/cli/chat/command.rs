//! What a line of the chat means.

use crate::config::SamplingOptions;

/// A line that was read.
#[derive(Debug, PartialEq)]
pub(super) enum Line {
    Empty,
    /// Something to say to the model.
    Message(String),
    Command(Command),
    /// A command that does not exist or lacks something; the text says what.
    Wrong(String),
}

/// What the user can tell the program.
#[derive(Debug, PartialEq)]
pub(super) enum Command {
    Help,
    Clear,
    /// Replaces the system text; none removes it.
    System(Option<String>),
    Think(bool),
    /// A sampling option and its value; none shows all.
    Set(Option<(String, String)>),
    Stats,
    Save(String),
    Quit,
}

/// The commands, for people.
pub(super) const HELP: &str = "\
/clear              forget the conversation
/system [TEXT]      put an instruction first (no text removes it); forgets too
/think on|off       let the model think before it answers, or not
/set [NAME VALUE]   change how tokens are drawn, or show it: temperature,
                    top-p, top-k, min-p, repetition-penalty, presence-penalty,
                    frequency-penalty, seed, max-tokens
/stats              figures of this conversation
/save FILE          write the conversation as JSON
/quit               end (also Ctrl-D)
A line that ends in \\ goes on in the next one. Write // to start with a slash.";

/// Tells messages from commands.
pub(super) fn parse(text: &str) -> Line {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Line::Empty;
    }
    let Some(rest) = trimmed.strip_prefix('/') else { return Line::Message(text.to_owned()) };
    if rest.starts_with('/') {
        return Line::Message(rest.to_owned());
    }
    let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let argument = argument.trim();
    let wrong = |what: &str| Line::Wrong(format!("/{name}: {what}"));
    match (name, argument) {
        ("help" | "?", _) => Line::Command(Command::Help),
        ("clear", _) => Line::Command(Command::Clear),
        ("system", "") => Line::Command(Command::System(None)),
        ("system", text) => Line::Command(Command::System(Some(text.to_owned()))),
        ("think", "on") => Line::Command(Command::Think(true)),
        ("think", "off") => Line::Command(Command::Think(false)),
        ("think", _) => wrong("say on or off"),
        ("set", "") => Line::Command(Command::Set(None)),
        ("set", pair) => match pair.split_once(char::is_whitespace) {
            Some((option, value)) => {
                Line::Command(Command::Set(Some((option.to_owned(), value.trim().to_owned()))))
            }
            None => wrong("say a name and a value, as /set temperature 0.7"),
        },
        ("stats", _) => Line::Command(Command::Stats),
        ("save", "") => wrong("say a file"),
        ("save", file) => Line::Command(Command::Save(file.to_owned())),
        ("quit" | "exit" | "q", _) => Line::Command(Command::Quit),
        _ => wrong("there is no such command; /help lists them"),
    }
}

/// Sets one sampling option by its long flag's name.
///
/// # Errors
/// A sentence that names the option.
pub(super) fn set(options: &mut SamplingOptions, name: &str, value: &str) -> Result<(), String> {
    fn read<T: std::str::FromStr>(name: &str, value: &str) -> Result<Option<T>, String> {
        value.parse().map(Some).map_err(|_| format!("{name}: {value:?} is not a number of its kind"))
    }
    match name.trim_start_matches("--").replace('_', "-").as_str() {
        "temperature" => options.temperature = read(name, value)?,
        "top-p" => options.top_p = read(name, value)?,
        "top-k" => options.top_k = read(name, value)?,
        "min-p" => options.min_p = read(name, value)?,
        "repetition-penalty" => options.repetition_penalty = read(name, value)?,
        "presence-penalty" => options.presence_penalty = read(name, value)?,
        "frequency-penalty" => options.frequency_penalty = read(name, value)?,
        "seed" => options.seed = read(name, value)?,
        "max-tokens" => options.max_tokens = read(name, value)?,
        _ => return Err(format!("{name}: there is no such option; /help lists them")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_message_unless_it_starts_with_a_slash() {
        assert_eq!(parse("  \t"), Line::Empty);
        assert_eq!(parse("what is 1/2?"), Line::Message("what is 1/2?".into()));
        assert_eq!(parse("//help me"), Line::Message("/help me".into()));
    }

    #[test]
    fn commands_are_read_with_their_arguments() {
        assert_eq!(parse("/system Be brief. "), Line::Command(Command::System(Some("Be brief.".into()))));
        assert_eq!(parse("/think off"), Line::Command(Command::Think(false)));
        let set = Command::Set(Some(("temperature".into(), "0.7".into())));
        assert_eq!(parse("/set  temperature   0.7"), Line::Command(set));
        assert_eq!(parse("/quit"), Line::Command(Command::Quit));
    }

    #[test]
    fn a_wrong_command_says_what_is_missing() {
        for (line, part) in
            [("/think", "on or off"), ("/save", "a file"), ("/set seed", "name and a value"), ("/x", "/help")]
        {
            match parse(line) {
                Line::Wrong(what) => assert!(what.contains(part), "{line}: {what}"),
                other => panic!("{line}: {other:?}"),
            }
        }
    }

    #[test]
    fn every_sampling_option_can_be_set_by_its_flags_name() {
        let mut options = SamplingOptions::default();
        for name in [
            "temperature",
            "top-p",
            "top_k",
            "min-p",
            "repetition-penalty",
            "presence-penalty",
            "frequency-penalty",
            "seed",
            "--max-tokens",
        ] {
            set(&mut options, name, "1").unwrap();
        }
        let one = Some(1.0);
        let all = SamplingOptions {
            temperature: one,
            top_p: one,
            top_k: Some(1),
            min_p: one,
            repetition_penalty: one,
            presence_penalty: one,
            frequency_penalty: one,
            seed: Some(1),
            max_tokens: Some(1),
        };
        assert_eq!(options, all);
        assert!(set(&mut options, "temperature", "hot").unwrap_err().contains("\"hot\""));
        assert!(set(&mut options, "colour", "1").is_err());
    }
}
