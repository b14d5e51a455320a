//! The chat template: the checkpoint's own Jinja file, run unchanged.
//!
//! The engine is minijinja with the options and the additions that templates find in transformers' Jinja: trimmed
//! blocks, loop controls, Python's string methods ([`methods`]), Python's JSON ([`tojson`]), `raise_exception`,
//! `strftime_now`, and `{% generation %}` tags, which mark training text and mean nothing here. What a conversation
//! looks like to a template is `message.rs`; who wrote which character is `ink.rs`.

mod methods;
mod tojson;
mod value;

use std::sync::Arc;

use jiff::ZonedDateTime;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};

use crate::error::{Error, Result};
use crate::ink::Ink;
use crate::python;

pub(crate) use value::Paint;

/// The only template of an environment.
const NAME: &str = "chat_template";

/// A compiled chat template.
pub(crate) struct Template {
    environment: Environment<'static>,
    /// Whether it asks for the date: the clock is then read once for each prompt.
    uses_clock: bool,
}

/// One moment for all renderings of one prompt, so that they can be compared.
#[derive(Clone, Default)]
pub(crate) struct Moment(Option<ZonedDateTime>);

impl Template {
    /// Compiles a template; `name` is what errors call it.
    pub(crate) fn compile(name: &str, source: &str) -> Result<Self> {
        let broken = |line, problem| Error::Template { name: name.into(), line, problem };
        let mut environment = Environment::new();
        let mut syntax = environment.syntax().to_builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().map_err(|error| broken(None, error.to_string()))?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_formatter(|out, _, value| {
            if value.kind() == ValueKind::Number && !value.is_integer() {
                out.write_str(&python::float_text(f64::try_from(value.clone())?))?;
            } else {
                write_plain(out, value)?;
            }
            Ok(())
        });
        environment.add_filter("trim", methods::trim);
        environment.add_test("iterable", methods::is_iterable);
        environment.add_test("sequence", methods::is_sequence);
        environment.add_function("raise_exception", |message: String| {
            Err::<Value, _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|error| broken(error.line(), describe(&error)))?;
        let uses_clock = source.contains("strftime_now");
        if uses_clock {
            // Loads the time zone tables, which takes longer than a rendering.
            let _ = ZonedDateTime::now();
        }
        Ok(Self { environment, uses_clock })
    }

    /// The time for the renderings of one prompt.
    pub(crate) fn moment(&self) -> Moment {
        Moment(self.uses_clock.then(ZonedDateTime::now))
    }

    /// Renders `context`; with `ink`, methods and filters see through it.
    pub(crate) fn render(&self, context: Value, ink: Option<&Arc<Ink>>, moment: &Moment) -> Result<String> {
        let mut environment = self.environment.clone();
        let methods_ink = ink.cloned();
        environment.set_unknown_method_callback(move |state, value, method, arguments| {
            methods::call(methods_ink.as_deref(), state, value, method, arguments)
        });
        let json_ink = ink.cloned();
        environment.add_filter("tojson", move |value: &Value, options| {
            tojson::filter(json_ink.as_deref(), value, options)
        });
        if let Some(now) = moment.0.clone() {
            environment.add_function("strftime_now", move |format: String| {
                jiff::fmt::strtime::format(format.as_bytes(), &now)
                    .map_err(|error| minijinja::Error::new(ErrorKind::InvalidOperation, error.to_string()))
            });
        }
        let rendered = environment.get_template(NAME).and_then(|template| template.render(context));
        rendered.map_err(|error| Error::Render { line: error.line(), problem: describe(&error) })
    }
}

/// Writes a value as `str()` of it.
fn write_plain(out: &mut minijinja::Output<'_>, value: &Value) -> std::fmt::Result {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None => std::fmt::Write::write_fmt(out, format_args!("{value}")),
    }
}

/// The message of an error without its place, which travels as a field. An error in a macro or a loop comes wrapped;
/// the innermost says what happened.
fn describe(error: &minijinja::Error) -> String {
    let mut inner = error;
    while let Some(source) = std::error::Error::source(inner).and_then(|source| source.downcast_ref()) {
        inner = source;
    }
    match (inner.kind(), inner.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    }
}

/// `{% generation %}` and `{% endgeneration %}` become an `if` that always holds, with their white space control.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        // Of any other tag only the opening is done: what follows may hold a `{%` of its own, in a string.
        rest = tag;
        let Some((inside, after)) = tag.split_once("%}") else { break };
        let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let meaning = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&inside.replace(word, meaning));
        out.push_str("%}");
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests;
