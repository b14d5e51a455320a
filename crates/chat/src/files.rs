//! The small files of a checkpoint that say how to talk to it.

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The template's own file; it wins over the one in `tokenizer_config.json`.
pub(crate) const TEMPLATE: &str = "chat_template.jinja";

/// Contents of a checkpoint's text files, as stored.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer_json: &'a [u8],
    /// `chat_template.jinja`.
    pub chat_template: Option<&'a str>,
    /// `tokenizer_config.json`: names of special tokens, and in some checkpoints the template.
    pub tokenizer_config: Option<&'a [u8]>,
    /// `generation_config.json`: stop tokens and sampling defaults.
    pub generation_config: Option<&'a [u8]>,
    /// `config.json`: stop tokens.
    pub config: Option<&'a [u8]>,
}

/// What the checkpoint's authors recommend for sampling (`generation_config.json`); `None` where they say nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Whether to sample at all; `false` asks for greedy decoding.
    pub do_sample: Option<bool>,
    /// Sampling temperature.
    pub temperature: Option<f32>,
    /// Nucleus: the share of probability that is sampled from.
    pub top_p: Option<f32>,
    /// Number of tokens that are sampled from.
    pub top_k: Option<usize>,
    /// Least probability, as a share of the most probable token's.
    pub min_p: Option<f32>,
    /// Divisor of the logits of tokens seen before.
    pub repetition_penalty: Option<f32>,
}

/// A template with the name that errors call it by.
pub(crate) struct TemplateSource {
    pub(crate) name: String,
    pub(crate) text: String,
}

/// The template for requests without tools, and another one for requests with tools where the checkpoint has two.
#[derive(Default)]
pub(crate) struct TemplateSources {
    pub(crate) plain: Option<TemplateSource>,
    pub(crate) tools: Option<TemplateSource>,
}

/// `tokenizer_config.json`, read.
pub(crate) struct TokenizerConfig(Map<String, Value>);

impl TokenizerConfig {
    pub(crate) fn read(files: &ChatFiles<'_>) -> Result<Self> {
        Ok(Self(read_object(TOKENIZER_CONFIG, files.tokenizer_config)?))
    }

    /// Variables of the template: `bos_token`, `eos_token` and whatever else is named `..._token` and has a text.
    pub(crate) fn constants(&self) -> Vec<(String, String)> {
        let text = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Object(token) => token.get("content").and_then(Value::as_str).map(str::to_owned),
            _ => None,
        };
        let tokens = self.0.iter().filter(|(name, _)| name.ends_with("_token"));
        tokens.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect()
    }

    /// The checkpoint's templates.
    pub(crate) fn templates(&self, files: &ChatFiles<'_>) -> Result<TemplateSources> {
        let source = |name: &str, text: &str| TemplateSource { name: name.into(), text: text.into() };
        if let Some(text) = files.chat_template {
            return Ok(TemplateSources { plain: Some(source(TEMPLATE, text)), tools: None });
        }
        match self.0.get("chat_template") {
            None | Some(Value::Null) => Ok(TemplateSources::default()),
            Some(Value::String(text)) => {
                Ok(TemplateSources { plain: Some(source(TOKENIZER_CONFIG, text)), tools: None })
            }
            Some(Value::Array(list)) => {
                let named = |wanted: &str| {
                    let entry = list.iter().find(|entry| entry["name"] == wanted)?;
                    Some(source(&format!("{wanted:?} of {TOKENIZER_CONFIG}"), entry["template"].as_str()?))
                };
                let templates = TemplateSources { plain: named("default"), tools: named("tool_use") };
                if templates.plain.is_none() {
                    let problem = "chat_template is a list without an entry named \"default\"".into();
                    return Err(Error::File { file: TOKENIZER_CONFIG, problem, remedy: AGAIN });
                }
                Ok(templates)
            }
            Some(_) => {
                let problem = "chat_template is neither a string nor a list".into();
                Err(Error::File { file: TOKENIZER_CONFIG, problem, remedy: AGAIN })
            }
        }
    }

    /// The text of the token that stands for a picture.
    pub(crate) fn image_token(&self) -> String {
        self.constants()
            .into_iter()
            .find(|(name, _)| name == "image_token")
            .map_or("<|image|>".into(), |(_, text)| text)
    }
}

/// Tokens that end a reply where no file names any: the end of a text, and the openings of the turns that follow one.
const STOP_TEXTS: [&str; 3] = ["<|endoftext|>", "<|user|>", "<|observation|>"];
const AGAIN: &str = "download the file again";

/// Stop tokens, ascending: those of both files, or by their texts where neither names one.
pub(crate) fn stop_tokens(files: &ChatFiles<'_>, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut tokens = Vec::new();
    let config = read_object(CONFIG, files.config)?;
    let text_config = config.get("text_config").and_then(Value::as_object);
    for object in [Some(&config), text_config].into_iter().flatten() {
        tokens.extend(read_tokens(CONFIG, object.get("eos_token_id"))?);
    }
    let generation = read_object(GENERATION, files.generation_config)?;
    tokens.extend(read_tokens(GENERATION, generation.get("eos_token_id"))?);
    if tokens.is_empty() {
        tokens.extend(STOP_TEXTS.iter().filter_map(|text| tokenizer.token(text)));
    }
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}

/// `generation_config.json`'s recommendations.
pub(crate) fn defaults(files: &ChatFiles<'_>) -> Result<GenerationDefaults> {
    let config = read_object(GENERATION, files.generation_config)?;
    let wrong = |name: &str, expected: &str| Error::File {
        file: GENERATION,
        problem: format!("{name} is not {expected}"),
        remedy: AGAIN,
    };
    let given = |name: &str| config.get(name).filter(|value| !value.is_null());
    let float = |name: &str| {
        let number =
            given(name).map(|value| value.as_f64().ok_or_else(|| wrong(name, "a number"))).transpose()?;
        Ok::<_, Error>(number.map(|number| number as f32))
    };
    let flag =
        |name: &str| given(name).map(|value| value.as_bool().ok_or_else(|| wrong(name, "true or false")));
    let count =
        |name: &str| given(name).map(|value| value.as_u64().ok_or_else(|| wrong(name, "a whole number")));
    Ok(GenerationDefaults {
        do_sample: flag("do_sample").transpose()?,
        temperature: float("temperature")?,
        top_p: float("top_p")?,
        top_k: count("top_k").transpose()?.map(|count| count as usize),
        min_p: float("min_p")?,
        repetition_penalty: float("repetition_penalty")?,
    })
}

fn read_object(file: &'static str, bytes: Option<&[u8]>) -> Result<Map<String, Value>> {
    let Some(bytes) = bytes else { return Ok(Map::new()) };
    serde_json::from_slice(bytes).map_err(|error| Error::File {
        file,
        problem: format!("not a JSON object ({error})"),
        remedy: AGAIN,
    })
}

/// A token id, a list of them, or nothing.
fn read_tokens(file: &'static str, value: Option<&Value>) -> Result<Vec<u32>> {
    let wrong = |value: &Value| Error::File {
        file,
        problem: format!("eos_token_id is {value}, expected a token id or a list of them"),
        remedy: AGAIN,
    };
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| wrong(value));
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}
