//! Conversations: the messages of OpenAI's chat API, checked, and as a chat template wants them.
//!
//! The template looks fields up without asking whether they are there, and skips roles that it does not know without a
//! word. So everything that it relies on is checked here, and refused by the field's path: roles, the kinds of content
//! parts, calls. Arguments of calls, which the API carries as JSON in a string, become objects; `null` content becomes
//! empty; `developer` becomes `system`; thinking stays as it is, byte for byte.

mod results;

use minijinja::Value;

use crate::error::{Error, Result};
use crate::json::Json;
use crate::reasoning::Inline;
use crate::template::Paint;

pub(crate) use results::{SortRule, find_rule};

/// A conversation to be rendered.
///
/// Fields of messages that are not checked travel to the template as they are; absent fields stay absent.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// Messages in the shape of OpenAI's chat API: objects with `role` and `content`, and `reasoning_content`,
    /// `tool_calls` or `tool_call_id` where they apply. At least one.
    pub messages: Vec<serde_json::Value>,
    /// Tools in the shape of the same API, or the bare function objects. `None` or empty: no tools.
    pub tools: Option<Vec<serde_json::Value>>,
    /// Whether the prompt ends where the model's answer begins. Else it ends behind the last message.
    pub add_generation_prompt: bool,
    /// Whether the model thinks before it answers; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// How hard the model thinks, as the template names it (`low`, `high`); `None` leaves it to the template.
    pub reasoning_effort: Option<String>,
    /// Whether the thinking of earlier turns is left out; `None` leaves it to the template.
    pub clear_thinking: Option<bool>,
    /// Further variables of the template (`chat_template_kwargs` of other servers).
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl ChatRequest {
    /// A request with the template's defaults that asks for an answer.
    pub fn new(messages: Vec<serde_json::Value>) -> Self {
        Self {
            messages,
            tools: None,
            add_generation_prompt: true,
            enable_thinking: None,
            reasoning_effort: None,
            clear_thinking: None,
            extra: serde_json::Map::new(),
        }
    }
}

/// A checked request.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    messages: Vec<Message>,
    tools: Vec<Json>,
    add_generation_prompt: bool,
    /// Whether the sender wants thinking; also among `variables`.
    pub(crate) enable_thinking: Option<bool>,
    variables: Vec<(String, Json)>,
}

#[derive(Clone, Debug)]
struct Message {
    role: &'static str,
    content: Content,
    reasoning: Option<String>,
    calls: Vec<Call>,
    rest: Vec<(String, Json)>,
}

#[derive(Clone, Debug)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Clone, Debug)]
enum Part {
    Text(String),
    /// `kind` is what the template compares `type` with; `path` names the part in errors.
    Object {
        kind: &'static str,
        fields: Vec<(String, Json)>,
        path: String,
    },
    /// One of several results in one tool message: `{tool_call_id, output}`.
    Result {
        output: Content,
        fields: Vec<(String, Json)>,
    },
}

/// A call of a function by the assistant.
#[derive(Clone, Debug)]
struct Call {
    /// The fields around `function`; `None` for a bare `{name, arguments}`.
    around: Option<Vec<(String, Json)>>,
    name: String,
    /// Always an object.
    arguments: Json,
    rest: Vec<(String, Json)>,
}

/// Kinds of content parts that templates know, by what they hold.
const TEXT: &str = "text";
const PICTURES: [&str; 4] = ["image", "image_url", "video", "video_url"];
/// In a tool's result: names a tool whose description the template prints.
const REFERENCE: &str = "tool_reference";
/// In a tool's result: the text or the parts of one of several results.
const OUTPUT: &str = "output";
/// Variables that the conversation itself fills.
const TAKEN: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

impl Conversation {
    /// Checks a request.
    pub(crate) fn read(request: &ChatRequest) -> Result<Self> {
        if request.messages.is_empty() {
            return Err(Error::request("messages", "an empty list", "at least one message"));
        }
        let messages = request
            .messages
            .iter()
            .enumerate()
            .map(|(index, message)| Message::read(&format!("messages[{index}]"), Json::from(message)));
        let tools = request.tools.iter().flatten().enumerate();
        let tools = tools.map(|(index, tool)| read_tool(&format!("tools[{index}]"), Json::from(tool)));
        let mut conversation = Self {
            messages: messages.collect::<Result<_>>()?,
            tools: tools.collect::<Result<_>>()?,
            add_generation_prompt: request.add_generation_prompt,
            enable_thinking: None,
            variables: read_variables(request)?,
        };
        let thinking = conversation.variables.iter().find(|(name, _)| name == "enable_thinking");
        conversation.enable_thinking = match thinking {
            Some((_, Json::Bool(value))) => Some(*value),
            _ => None,
        };
        Ok(conversation)
    }

    /// The path of the first picture or video.
    pub(crate) fn first_picture(&self) -> Option<&str> {
        self.messages.iter().find_map(|message| message.content.first_picture())
    }

    /// Whether an assistant's text holds thinking that a template would cut out.
    pub(crate) fn has_inline_thinking(&self) -> bool {
        self.messages.iter().any(|message| message.inline(Inline::Cut).is_some())
    }

    /// The template's variables. `constants` are the checkpoint's own (its special tokens' names).
    pub(crate) fn context(&self, paint: &Paint, inline: Inline, constants: &[(String, String)]) -> Value {
        let messages: Vec<Value> = self.messages.iter().map(|message| message.value(paint, inline)).collect();
        let tools = match self.tools.as_slice() {
            // What transformers passes without tools, so `tools is none` holds as it does there.
            [] => Value::from(()),
            tools => tools.iter().map(|tool| tool_value(paint, tool)).collect::<Vec<_>>().into(),
        };
        let fixed = [
            ("messages".to_owned(), Value::from(messages)),
            ("tools".to_owned(), tools),
            ("documents".to_owned(), Value::from(())),
            ("add_generation_prompt".to_owned(), Value::from(self.add_generation_prompt)),
        ];
        let constants = constants.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str())));
        let variables = self.variables.iter().map(|(name, value)| (name.clone(), paint.option(value)));
        Value::from_pairs(fixed.into_iter().chain(constants).chain(variables))
    }
}

fn read_variables(request: &ChatRequest) -> Result<Vec<(String, Json)>> {
    let named = [
        ("enable_thinking", request.enable_thinking.map(Json::Bool)),
        ("reasoning_effort", request.reasoning_effort.clone().map(Json::String)),
        ("clear_thinking", request.clear_thinking.map(Json::Bool)),
    ];
    let mut variables: Vec<(String, Json)> =
        named.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    for (name, value) in &request.extra {
        let field = format!("chat_template_kwargs.{name}");
        if TAKEN.contains(&name.as_str()) {
            return Err(Error::request(field, "a variable that the request itself fills", "another name"));
        }
        let value = Json::from(value);
        match variables.iter().find(|(known, _)| known == name) {
            Some((_, known)) if *known == value => {}
            Some(_) => {
                return Err(Error::request(
                    field,
                    format!("another value than `{name}` has"),
                    "the same value",
                ));
            }
            None => variables.push((name.clone(), value)),
        }
    }
    Ok(variables)
}

impl Message {
    fn read(path: &str, json: Json) -> Result<Self> {
        let mut fields = object(path, json)?;
        let role = match take(&mut fields, "role") {
            Some(Json::String(role)) => read_role(path, &role)?,
            other => return Err(wrong(format!("{path}.role"), other.as_ref(), "a string")),
        };
        let content = match take(&mut fields, "content") {
            None | Some(Json::Null) => Content::Text(String::new()),
            Some(Json::String(text)) => Content::Text(text),
            Some(Json::Array(parts)) => {
                let parts = parts.into_iter().enumerate();
                let parts =
                    parts.map(|(index, part)| Part::read(format!("{path}.content[{index}]"), role, part));
                Content::Parts(parts.collect::<Result<_>>()?)
            }
            other => {
                return Err(wrong(
                    format!("{path}.content"),
                    other.as_ref(),
                    "a string, null or a list of content parts",
                ));
            }
        };
        let reasoning = optional_text(&mut fields, path, "reasoning_content")?;
        let calls = match take(&mut fields, "tool_calls") {
            None | Some(Json::Null) => Vec::new(),
            Some(Json::Array(calls)) => {
                let calls = calls.into_iter().enumerate();
                let calls =
                    calls.map(|(index, call)| Call::read(&format!("{path}.tool_calls[{index}]"), call));
                calls.collect::<Result<_>>()?
            }
            other => return Err(wrong(format!("{path}.tool_calls"), other.as_ref(), "a list of calls")),
        };
        if let Some(id) = optional_text(&mut fields, path, "tool_call_id")? {
            fields.push(("tool_call_id".into(), Json::String(id)));
        }
        Ok(Self { role, content, reasoning, calls, rest: fields })
    }

    /// Thinking and answer, where the content holds both and the rule cuts.
    fn inline(&self, rule: Inline) -> Option<(String, String)> {
        if self.role != "assistant" || self.reasoning.is_some() {
            return None;
        }
        match &self.content {
            Content::Text(text) => rule.cut(text),
            Content::Parts(parts) => {
                let texts = parts.iter().map(|part| match part {
                    Part::Text(text) => Some(text.as_str()),
                    Part::Object { kind: TEXT, fields, .. } => {
                        fields.iter().find_map(|(name, value)| match value {
                            Json::String(text) if name == TEXT => Some(text.as_str()),
                            _ => None,
                        })
                    }
                    Part::Object { .. } | Part::Result { .. } => None,
                });
                rule.cut(&texts.collect::<Option<String>>()?)
            }
        }
    }

    fn value(&self, paint: &Paint, inline: Inline) -> Value {
        let mut fields = vec![("role".to_owned(), Value::from(self.role))];
        let (reasoning, content) = match self.inline(inline) {
            Some((reasoning, content)) => (Some(paint.text(&reasoning)), paint.text(&content)),
            None => (self.reasoning.as_ref().map(|text| paint.text(text)), self.content.value(paint)),
        };
        fields.push(("content".to_owned(), content));
        fields.extend(reasoning.map(|text| ("reasoning_content".to_owned(), text)));
        if !self.calls.is_empty() {
            let calls: Vec<Value> = self.calls.iter().map(|call| call.value(paint)).collect();
            fields.push(("tool_calls".to_owned(), Value::from(calls)));
        }
        Value::from_pairs(fields.into_iter().chain(values(paint, &self.rest)))
    }
}

impl Content {
    fn read(path: &str, role: &str, json: Option<Json>) -> Result<Self> {
        match json {
            None | Some(Json::Null) => Ok(Self::Text(String::new())),
            Some(Json::String(text)) => Ok(Self::Text(text)),
            Some(Json::Array(parts)) => {
                let parts = parts.into_iter().enumerate();
                let parts = parts.map(|(index, part)| Part::read(format!("{path}[{index}]"), role, part));
                Ok(Self::Parts(parts.collect::<Result<_>>()?))
            }
            other => Err(wrong(path, other.as_ref(), "a string, null or a list of content parts")),
        }
    }

    fn first_picture(&self) -> Option<&str> {
        let Self::Parts(parts) = self else { return None };
        parts.iter().find_map(|part| match part {
            Part::Object { kind, path, .. } if PICTURES.contains(kind) => Some(path.as_str()),
            Part::Result { output, .. } => output.first_picture(),
            _ => None,
        })
    }

    fn value(&self, paint: &Paint) -> Value {
        match self {
            Self::Text(text) => paint.text(text),
            Self::Parts(parts) => parts.iter().map(|part| part.value(paint)).collect::<Vec<_>>().into(),
        }
    }
}

impl Part {
    fn read(path: String, role: &str, json: Json) -> Result<Self> {
        if let Json::String(text) = json {
            return Ok(Self::Text(text));
        }
        let mut fields = object(&path, json)?;
        let kind = match take(&mut fields, "type") {
            None if role == "tool" && fields.iter().any(|(name, _)| name == OUTPUT) => {
                let output = Content::read(&format!("{path}.{OUTPUT}"), role, take(&mut fields, OUTPUT))?;
                return Ok(Self::Result { output, fields });
            }
            Some(Json::String(kind)) => read_kind(&path, role, &kind)?,
            other => return Err(wrong(format!("{path}.type"), other.as_ref(), "a string")),
        };
        if kind == TEXT {
            let text = fields.iter().find(|(name, _)| name == TEXT).map(|(_, value)| value);
            if !matches!(text, Some(Json::String(_))) {
                return Err(wrong(format!("{path}.text"), text, "a string"));
            }
        }
        Ok(Self::Object { kind, fields, path })
    }

    fn value(&self, paint: &Paint) -> Value {
        match self {
            Self::Text(text) => paint.text(text),
            Self::Object { kind, fields, .. } => {
                let kind = [("type".to_owned(), Value::from(*kind))];
                Value::from_pairs(kind.into_iter().chain(values(paint, fields)))
            }
            Self::Result { output, fields } => {
                let output = (OUTPUT.to_owned(), output.value(paint));
                Value::from_pairs(values(paint, fields).chain([output]))
            }
        }
    }
}

impl Call {
    fn read(path: &str, json: Json) -> Result<Self> {
        let mut outer = object(path, json)?;
        let (around, mut fields, path) = match take(&mut outer, "function") {
            Some(function) => {
                match take(&mut outer, "type") {
                    None => {}
                    Some(Json::String(kind)) if kind == "function" => {}
                    other => return Err(wrong(format!("{path}.type"), other.as_ref(), "\"function\"")),
                }
                let path = format!("{path}.function");
                (Some(outer), object(&path, function)?, path)
            }
            None => (None, outer, path.to_owned()),
        };
        let name = match take(&mut fields, "name") {
            Some(Json::String(name)) => name,
            other => return Err(wrong(format!("{path}.name"), other.as_ref(), "a string")),
        };
        let arguments = read_arguments(&format!("{path}.arguments"), take(&mut fields, "arguments"))?;
        Ok(Self { around, name, arguments, rest: fields })
    }

    fn value(&self, paint: &Paint) -> Value {
        let name = ("name".to_owned(), paint.text(&self.name));
        let arguments = ("arguments".to_owned(), paint.json(&self.arguments));
        let function = Value::from_pairs([name, arguments].into_iter().chain(values(paint, &self.rest)));
        match &self.around {
            None => function,
            Some(around) => {
                let kind = ("type".to_owned(), Value::from("function"));
                let function = ("function".to_owned(), function);
                Value::from_pairs(values(paint, around).chain([kind, function]))
            }
        }
    }
}

fn read_role(path: &str, role: &str) -> Result<&'static str> {
    match role {
        "system" | "developer" => Ok("system"),
        "user" => Ok("user"),
        "assistant" => Ok("assistant"),
        "tool" => Ok("tool"),
        _ => Err(Error::request(
            format!("{path}.role"),
            format!("{role:?}"),
            "one of system, developer, user, assistant, tool",
        )),
    }
}

fn read_kind(path: &str, role: &str, kind: &str) -> Result<&'static str> {
    let known = std::iter::once(TEXT).chain(PICTURES).chain((role == "tool").then_some(REFERENCE));
    known.into_iter().find(|known| *known == kind).ok_or_else(|| {
        Error::request(
            format!("{path}.type"),
            format!("{kind:?}"),
            "one of text, image_url, image, video_url, video",
        )
    })
}

/// Arguments are an object, or a string that holds one as JSON. A call without arguments has none or an empty string.
fn read_arguments(field: &str, json: Option<Json>) -> Result<Json> {
    let parsed = match json {
        None | Some(Json::Null) => Json::Object(Vec::new()),
        Some(Json::String(text)) if text.trim().is_empty() => Json::Object(Vec::new()),
        Some(Json::String(text)) => Json::parse(&text).map_err(|problem| {
            Error::request(
                field,
                format!("a string that is not JSON ({problem})"),
                "a JSON object in a string",
            )
        })?,
        Some(json) => json,
    };
    match parsed {
        Json::Object(_) => Ok(parsed),
        other => Err(wrong(field, Some(&other), "an object, or a string that holds one as JSON")),
    }
}

fn read_tool(path: &str, json: Json) -> Result<Json> {
    let (function, path) = match (json.field("function"), json.field("type")) {
        (Some(function), None) => (function, format!("{path}.function")),
        (Some(function), Some(Json::String(kind))) if kind == "function" => {
            (function, format!("{path}.function"))
        }
        (Some(_), kind) => return Err(wrong(format!("{path}.type"), kind, "\"function\"")),
        (None, _) => (&json, path.to_owned()),
    };
    match (function, function.field("name")) {
        (Json::Object(_), Some(Json::String(_))) => Ok(json),
        (Json::Object(_), name) => Err(wrong(format!("{path}.name"), name, "the function's name")),
        (other, _) => Err(wrong(path, Some(other), "a function object")),
    }
}

fn tool_value(paint: &Paint, tool: &Json) -> Value {
    match tool {
        Json::Object(entries) if tool.field("function").is_some() => {
            Value::from_pairs(entries.iter().map(|(name, value)| match (name.as_str(), value) {
                // Checked to be the constant: a template may compare it.
                ("type", Json::String(kind)) => (name.clone(), Value::from(kind.as_str())),
                _ => (paint.name(name), paint.json(value)),
            }))
        }
        tool => paint.json(tool),
    }
}

fn values<'a>(paint: &'a Paint, fields: &'a [(String, Json)]) -> impl Iterator<Item = (String, Value)> + 'a {
    fields.iter().map(|(name, value)| (paint.name(name), paint.json(value)))
}

fn object(path: &str, json: Json) -> Result<Vec<(String, Json)>> {
    match json {
        Json::Object(fields) => Ok(fields),
        other => Err(wrong(path, Some(&other), "an object")),
    }
}

fn take(fields: &mut Vec<(String, Json)>, name: &str) -> Option<Json> {
    let place = fields.iter().position(|(known, _)| known == name)?;
    Some(fields.remove(place).1)
}

/// A field that is a string, or null or absent.
fn optional_text(fields: &mut Vec<(String, Json)>, path: &str, name: &str) -> Result<Option<String>> {
    match take(fields, name) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => Ok(Some(text)),
        other => Err(wrong(format!("{path}.{name}"), other.as_ref(), "a string or null")),
    }
}

fn wrong(field: impl Into<String>, found: Option<&Json>, expected: &str) -> Error {
    let found = match found {
        None => "missing".to_owned(),
        Some(Json::String(text)) if text.chars().count() <= 40 => format!("{text:?}"),
        Some(other) => other.kind().to_owned(),
    };
    Error::request(field, found, expected)
}

#[cfg(test)]
mod tests;
