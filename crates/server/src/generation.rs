//! What both completion routes ask for: sampling, bounds, stops, and how the reply is sent.

use flint_chat::GenerationDefaults;
use flint_engine::Sampling;
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::{Fields, shown};
use crate::random::random_seed;

/// Stop strings of one request. Each is searched at every token.
const MOST_STOPS: usize = 64;
/// Bytes of one stop string. Text that may be its start is held back.
const LONGEST_STOP_BYTES: usize = 1024;
/// Seeds are echoed in JSON; a negative one is taken by its bits.
const SEED: &str = "seed";

/// How tokens are drawn where a request says nothing: as the checkpoint's authors recommend, else from the model's
/// distribution as it is. The seed is 0.
pub fn default_sampling(defaults: &GenerationDefaults) -> Sampling {
    let temperature = if defaults.do_sample == Some(false) { Some(0.0) } else { defaults.temperature };
    Sampling {
        temperature: temperature.unwrap_or(1.0),
        top_p: defaults.top_p.unwrap_or(1.0),
        top_k: defaults.top_k.unwrap_or(0),
        min_p: defaults.min_p.unwrap_or(0.0),
        repetition_penalty: defaults.repetition_penalty.unwrap_or(1.0),
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        seed: 0,
    }
}

/// The part of a request that every completion route shares.
#[derive(Clone, Debug)]
pub(crate) struct Generation {
    pub(crate) sampling: Sampling,
    /// Bound of the reply, and the field that gave it; `None` lets the context be the bound.
    pub(crate) max_tokens: Option<(&'static str, usize)>,
    /// Stop strings, none of them empty.
    pub(crate) stop: Vec<String>,
    pub(crate) stream: bool,
    /// Whether a stream ends with a chunk of its own for the usage.
    pub(crate) include_usage: bool,
    /// The seed as the client may send it again.
    pub(crate) seed: Value,
}

impl Generation {
    /// Reads the shared fields of `body`; what is absent comes from the checkpoint's `defaults`.
    pub(crate) fn read(body: Fields, defaults: &GenerationDefaults) -> Result<Self, ApiError> {
        refuse_unsupported(body)?;
        let stream = body.boolean("stream")?.unwrap_or(false);
        let (seed, seed_bits) = read_seed(body)?;
        let usual = default_sampling(defaults);
        let sampling = Sampling {
            temperature: body.number("temperature")?.unwrap_or(usual.temperature),
            top_p: body.number("top_p")?.unwrap_or(usual.top_p),
            top_k: read_top_k(body)?.unwrap_or(usual.top_k),
            min_p: body.number("min_p")?.unwrap_or(usual.min_p),
            repetition_penalty: body.number("repetition_penalty")?.unwrap_or(usual.repetition_penalty),
            presence_penalty: body.number("presence_penalty")?.unwrap_or(usual.presence_penalty),
            frequency_penalty: body.number("frequency_penalty")?.unwrap_or(usual.frequency_penalty),
            logit_bias: read_logit_bias(body)?,
            seed: seed_bits,
        };
        Ok(Self {
            sampling,
            max_tokens: read_max_tokens(body)?,
            stop: read_stop(body)?,
            stream,
            include_usage: read_include_usage(body, stream)?,
            seed,
        })
    }
}

/// Fields that clients know from other servers and that would change the result, with the value that changes nothing.
/// `null`, empty lists and empty objects change nothing either.
const UNSUPPORTED: &[(&str, Option<Harmless>)] = &[
    ("add_generation_prompt", Some(Harmless::Is(true))),
    ("allowed_token_ids", None),
    ("audio", None),
    ("bad_words", None),
    ("best_of", Some(Harmless::Number(1.0))),
    ("chat_template", None),
    ("continue_final_message", Some(Harmless::Is(false))),
    ("documents", None),
    ("dry_multiplier", Some(Harmless::Number(0.0))),
    ("dynatemp_range", Some(Harmless::Number(0.0))),
    ("function_call", Some(Harmless::Text("none"))),
    ("functions", None),
    ("grammar", None),
    ("guided_choice", None),
    ("guided_grammar", None),
    ("guided_json", None),
    ("guided_regex", None),
    ("ignore_eos", Some(Harmless::Is(false))),
    ("include_stop_str_in_output", Some(Harmless::Is(false))),
    ("json_schema", None),
    ("length_penalty", Some(Harmless::Number(1.0))),
    ("logits_processors", None),
    ("min_tokens", Some(Harmless::Number(0.0))),
    ("mirostat", Some(Harmless::Number(0.0))),
    ("n", Some(Harmless::Number(1.0))),
    ("prompt_logprobs", Some(Harmless::Number(0.0))),
    ("repeat_penalty", Some(Harmless::Number(1.0))),
    ("stop_token_ids", None),
    ("structured_outputs", None),
    ("suffix", Some(Harmless::Text(""))),
    ("tfs_z", Some(Harmless::Number(1.0))),
    ("thinking_budget", None),
    ("top_a", Some(Harmless::Number(0.0))),
    ("truncate_prompt_tokens", None),
    ("typical_p", Some(Harmless::Number(1.0))),
    ("use_beam_search", Some(Harmless::Is(false))),
    ("web_search_options", None),
    ("xtc_probability", Some(Harmless::Number(0.0))),
];

/// The value of a field for which ignoring it is right.
#[derive(Clone, Copy, Debug)]
enum Harmless {
    Is(bool),
    Number(f64),
    Text(&'static str),
}

impl Harmless {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::Is(wanted) => value.as_bool() == Some(wanted),
            Self::Number(wanted) => value.as_f64().is_some_and(|v| v.total_cmp(&wanted).is_eq()),
            Self::Text(wanted) => value.as_str() == Some(wanted),
        }
    }
}

impl std::fmt::Display for Harmless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Is(wanted) => write!(f, "{wanted}"),
            Self::Number(wanted) => write!(f, "{wanted}"),
            Self::Text(wanted) => write!(f, "{wanted:?}"),
        }
    }
}

fn refuse_unsupported(body: Fields) -> Result<(), ApiError> {
    for (name, harmless) in UNSUPPORTED {
        let Some(value) = body.value(name) else { continue };
        let empty = value.as_array().is_some_and(Vec::is_empty)
            || value.as_object().is_some_and(serde_json::Map::is_empty);
        if empty || harmless.is_some_and(|h| h.is(value)) {
            continue;
        }
        let remedy = harmless.map_or("leave it out".to_owned(), |h| format!("leave it out, or send {h}"));
        return Err(ApiError::unsupported(*name, format!("{name} is not supported yet; {remedy}")));
    }
    refuse_response_format(body)
}

fn refuse_response_format(body: Fields) -> Result<(), ApiError> {
    const NAME: &str = "response_format";
    let Some(format) = body.object(NAME)? else { return Ok(()) };
    match Fields::new(format, "response_format.").text("type")? {
        Some("text") => Ok(()),
        Some(kind) => Err(ApiError::unsupported(
            NAME,
            format!(
                "response_format {kind:?} is not supported yet; send {{\"type\": \"text\"}} or leave it out"
            ),
        )),
        None => Err(ApiError::invalid("response_format.type", "response_format.type is missing")),
    }
}

fn read_seed(body: Fields) -> Result<(Value, u64), ApiError> {
    let Some(value) = body.value(SEED) else {
        let seed = random_seed();
        return Ok((Value::from(seed), seed));
    };
    match value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned)) {
        Some(bits) => Ok((value.clone(), bits)),
        None => Err(ApiError::invalid(SEED, format!("seed is {}; it must be a whole number", shown(value)))),
    }
}

/// `top_k`, where other servers write "off" as -1 as well as 0.
fn read_top_k(body: Fields) -> Result<Option<usize>, ApiError> {
    if body.value("top_k").and_then(Value::as_i64) == Some(-1) {
        return Ok(Some(0));
    }
    Ok(body.integer("top_k", 0..=u64::from(u32::MAX))?.map(|k| k as usize))
}

fn read_logit_bias(body: Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(object) = body.object("logit_bias")? else { return Ok(Vec::new()) };
    let fields = Fields::new(object, "logit_bias.");
    let mut biases = Vec::with_capacity(object.len());
    for name in object.keys() {
        let path = fields.path(name);
        let token = name
            .parse::<u32>()
            .map_err(|_| ApiError::invalid(&path, format!("{path}: the key must be a token number")))?;
        if let Some(bias) = fields.number(name)? {
            biases.push((token, bias));
        }
    }
    Ok(biases)
}

fn read_max_tokens(body: Fields) -> Result<Option<(&'static str, usize)>, ApiError> {
    const NEW: &str = "max_completion_tokens";
    const OLD: &str = "max_tokens";
    let range = 1..=u64::MAX;
    let clamp = |tokens: u64| usize::try_from(tokens).unwrap_or(usize::MAX);
    let new = body.integer(NEW, range.clone())?.map(clamp);
    let old = body.integer(OLD, range)?.map(clamp);
    match (new, old) {
        (Some(new), Some(old)) if new != old => Err(ApiError::invalid(
            OLD,
            format!("max_tokens is {old} and max_completion_tokens is {new}; send one of them"),
        )),
        (Some(new), _) => Ok(Some((NEW, new))),
        (None, old) => Ok(old.map(|tokens| (OLD, tokens))),
    }
}

/// `stop` as a string or a list of strings. An empty one would match everywhere and is ignored.
fn read_stop(body: Fields) -> Result<Vec<String>, ApiError> {
    const NAME: &str = "stop";
    let wrong = |what: String| ApiError::invalid(NAME, what);
    let texts: Vec<&str> = match body.value(NAME) {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => list
            .iter()
            .map(|item| {
                item.as_str().ok_or_else(|| wrong(format!("stop holds {}; all must be strings", shown(item))))
            })
            .collect::<Result<_, _>>()?,
        Some(other) => {
            return Err(wrong(format!("stop is {}; it must be a string or a list of strings", shown(other))));
        }
    };
    let stops: Vec<String> = texts.into_iter().filter(|text| !text.is_empty()).map(str::to_owned).collect();
    if stops.len() > MOST_STOPS {
        return Err(wrong(format!(
            "stop holds {} strings; at most {MOST_STOPS} are searched for",
            stops.len()
        )));
    }
    match stops.iter().find(|text| text.len() > LONGEST_STOP_BYTES) {
        Some(long) => {
            Err(wrong(format!("a stop string has {} bytes; at most {LONGEST_STOP_BYTES} fit", long.len())))
        }
        None => Ok(stops),
    }
}

fn read_include_usage(body: Fields, stream: bool) -> Result<bool, ApiError> {
    const NAME: &str = "stream_options";
    let Some(options) = body.object(NAME)? else { return Ok(false) };
    if !stream {
        return Err(ApiError::invalid(NAME, "stream_options is for streams; send \"stream\": true with it"));
    }
    Ok(Fields::new(options, "stream_options.").boolean("include_usage")?.unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: &Value) -> Result<Generation, ApiError> {
        Generation::read(Fields::new(body.as_object().unwrap(), ""), &GenerationDefaults::default())
    }

    fn param(body: &Value) -> String {
        read(body).unwrap_err().body()["error"]["param"].as_str().unwrap().to_owned()
    }

    #[test]
    fn empty_stop_strings_are_ignored() {
        for stop in [json!(""), json!(["", ""]), json!([])] {
            assert!(read(&json!({ "stop": stop })).unwrap().stop.is_empty());
        }
        assert_eq!(read(&json!({ "stop": ["", "END"] })).unwrap().stop, ["END"]);
    }

    #[test]
    fn a_stop_of_another_type_is_refused_by_name() {
        assert_eq!(param(&json!({ "stop": 5 })), "stop");
        assert_eq!(param(&json!({ "stop": ["a", 5] })), "stop");
    }

    #[test]
    fn known_fields_that_would_change_the_result_are_refused_by_name() {
        for (name, value) in [
            ("n", json!(2)),
            ("functions", json!([{ "name": "f" }])),
            ("ignore_eos", json!(true)),
            ("guided_json", json!({ "type": "object" })),
            ("response_format", json!({ "type": "json_object" })),
            ("response_format", json!({ "type": "json_schema" })),
            ("min_tokens", json!(3)),
        ] {
            assert_eq!(param(&json!({ name: value })), name);
        }
    }

    #[test]
    fn known_fields_with_a_value_that_changes_nothing_are_accepted() {
        let body = json!({ "n": 1, "functions": [], "ignore_eos": false, "best_of": 1.0, "suffix": "",
            "guided_json": null, "response_format": { "type": "text" }, "service_tier": "auto", "made_up": [1] });
        read(&body).unwrap();
    }

    #[test]
    fn a_seed_is_random_unless_given_and_comes_back_as_sent() {
        let (one, other) = (read(&json!({})).unwrap(), read(&json!({})).unwrap());
        assert_ne!(one.seed, other.seed);
        assert!(one.sampling.seed < 1 << 53);
        let given = read(&json!({ "seed": -3 })).unwrap();
        assert_eq!((given.seed, given.sampling.seed), (json!(-3), u64::MAX - 2));
    }

    #[test]
    fn two_bounds_that_disagree_are_refused() {
        assert_eq!(param(&json!({ "max_tokens": 5, "max_completion_tokens": 6 })), "max_tokens");
        let both = read(&json!({ "max_tokens": 5, "max_completion_tokens": 5 })).unwrap();
        assert_eq!(both.max_tokens, Some(("max_completion_tokens", 5)));
        assert_eq!(param(&json!({ "max_tokens": 0 })), "max_tokens");
        assert_eq!(param(&json!({ "max_tokens": 1.5 })), "max_tokens");
    }

    #[test]
    fn logit_bias_keys_are_token_numbers() {
        let body = read(&json!({ "logit_bias": { "5": -100, "7": 2.5 } })).unwrap();
        assert_eq!(body.sampling.logit_bias, [(5, -100.0), (7, 2.5)]);
        assert_eq!(param(&json!({ "logit_bias": { "hello": 1 } })), "logit_bias.hello");
    }

    #[test]
    fn stream_options_need_a_stream() {
        assert_eq!(param(&json!({ "stream_options": { "include_usage": true } })), "stream_options");
        let body = json!({ "stream": true, "stream_options": { "include_usage": true } });
        assert!(read(&body).unwrap().include_usage);
    }
}
