//! One checkpoint's way of talking: conversations to prompts, tokens to text.

use std::sync::Arc;

use serde_json::json;

use crate::error::{Error, Result};
use crate::files::{self, ChatFiles, GenerationDefaults, TokenizerConfig};
use crate::ink::{Ink, Provenance};
use crate::message::{ChatRequest, Conversation, SortRule, find_rule};
use crate::reasoning::{self, Inline};
use crate::stream::{StreamOptions, TextStream, Utf8};
use crate::template::{Moment, Paint, Template};
use crate::tokenizer::Tokenizer;

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// What the model reads.
    pub tokens: Vec<u32>,
    /// The same as text. Control tokens in it may be foreign text, which `tokens` spell out.
    pub text: String,
    /// Whether the reply begins inside the thinking: the prompt's last token opens it.
    pub in_reasoning: bool,
}

/// What the checkpoint's template can do, found by rendering trial conversations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "four answers to four questions, each reported by name")]
pub struct Capabilities {
    /// `enable_thinking` changes the prompt. Without, [`ChatFormat::render`] ends the thinking itself when asked to.
    pub thinking_switch: bool,
    /// `reasoning_effort` changes the prompt.
    pub reasoning_effort: bool,
    /// Tools appear in the prompt.
    pub tools: bool,
    /// Images have a place in the prompt.
    pub images: bool,
}

/// A checkpoint's tokenizer, chat template and conventions. Read-only; share it behind an `Arc`.
pub struct ChatFormat {
    tokenizer: Tokenizer,
    template: Option<Renderer>,
    /// For requests with tools, where the checkpoint has a template of its own for them.
    tools_template: Option<Renderer>,
    constants: Vec<(String, String)>,
    stop_tokens: Vec<u32>,
    defaults: GenerationDefaults,
    capabilities: Capabilities,
}

/// A template, with the rule by which it sorts the results of calls where that is known.
struct Renderer {
    template: Template,
    sort_rule: Option<SortRule>,
}

impl ChatFormat {
    /// Reads the files and tries the template.
    ///
    /// Errors: a file that is not what its name says, a tokenizer that is not byte-level, a template that does not
    /// compile or fails on a single user message. A checkpoint without a template opens; only
    /// [`render`](Self::render) needs one.
    pub fn open(files: &ChatFiles<'_>) -> Result<Self> {
        let tokenizer = Tokenizer::open(files.tokenizer_json)?;
        let config = TokenizerConfig::read(files)?;
        let sources = config.templates(files)?;
        let constants = config.constants();
        let compile = |source: &files::TemplateSource| {
            let template = Template::compile(&source.name, &source.text)?;
            let moment = template.moment();
            let sort_rule = find_rule(|trial| {
                template.render(trial.context(&Paint::Plain, Inline::Keep, &constants), None, &moment)
            });
            Ok(Renderer { template, sort_rule })
        };
        let mut format = Self {
            template: sources.plain.as_ref().map(compile).transpose()?,
            tools_template: sources.tools.as_ref().map(compile).transpose()?,
            constants: constants.clone(),
            stop_tokens: files::stop_tokens(files, &tokenizer)?,
            defaults: files::defaults(files)?,
            capabilities: Capabilities { images: true, ..Capabilities::default() },
            tokenizer,
        };
        if let Some(source) = &sources.plain {
            format.capabilities = format.try_out(&config.image_token()).map_err(|error| match error {
                Error::Render { line, problem } => Error::Template {
                    name: source.name.clone(),
                    line,
                    problem: format!("a single user message does not render: {problem}"),
                },
                other => other,
            })?;
        }
        Ok(format)
    }

    /// Turns a conversation into a prompt.
    ///
    /// `text` is what the template gives; in `tokens`, control tokens come from the template alone, and foreign text
    /// that looks like one is spelled out. Errors name the field of the request, or carry the template's own words.
    pub fn render(&self, request: &ChatRequest) -> Result<Prompt> {
        let mut conversation = Conversation::read(request)?;
        if let Some(field) = conversation.first_picture().filter(|_| !self.capabilities.images) {
            return Err(Error::NoImages { field: field.to_owned() });
        }
        let asks_for_tools = request.tools.as_ref().is_some_and(|tools| !tools.is_empty());
        let tools_template = self.tools_template.as_ref().filter(|_| asks_for_tools);
        let renderer = tools_template.or(self.template.as_ref()).ok_or(Error::NoTemplate)?;
        if let Some(rule) = renderer.sort_rule {
            conversation.sort_results(rule, false);
        }
        let Provenance { mut text, trusted } = self.render_marked(&renderer.template, &conversation)?;
        let mut tokens = self.tokenizer.encode(&text, &trusted)?;
        let vocabulary = self.tokenizer.vocabulary();
        let opens =
            |tokens: &[u32]| tokens.last().is_some_and(|last| Some(*last) == vocabulary.open_thinking);
        if conversation.enable_thinking == Some(false) && opens(&tokens) {
            // A template without a switch: empty thinking, as in the histories that the model was trained on.
            if let Some(close) = vocabulary.close_thinking {
                tokens.push(close);
                text.push_str(reasoning::CLOSE);
            }
        }
        let in_reasoning = request.add_generation_prompt && opens(&tokens);
        Ok(Prompt { tokens, text, in_reasoning })
    }

    /// Encodes text that somebody else wrote: control tokens in it are spelled out.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer.encode(text, &[])
    }

    /// Encodes text in which control tokens are meant.
    pub fn encode_trusted(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer.encode(text, std::slice::from_ref(&(0..text.len())))
    }

    /// The text of tokens, control tokens included; bytes that are no text become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut utf8 = Utf8::default();
        let vocabulary = self.tokenizer.vocabulary();
        let mut text: String = tokens.iter().map(|token| utf8.push(vocabulary.bytes(*token))).collect();
        text.push_str(&utf8.finish());
        text
    }

    /// The bytes that a token stands for, part of a character perhaps; none for an unknown id.
    pub fn token_bytes(&self, token: u32) -> Vec<u8> {
        self.tokenizer.vocabulary().bytes(token).to_vec()
    }

    /// Tokens that end a reply, ascending.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// What the checkpoint's authors recommend for sampling.
    pub fn defaults(&self) -> GenerationDefaults {
        self.defaults.clone()
    }

    /// What the template can do; nothing without a template.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Whether the checkpoint has a chat template.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// A machine that turns a reply's tokens into text.
    pub fn stream(&self, options: StreamOptions) -> TextStream {
        TextStream::new(Arc::clone(self.tokenizer.vocabulary()), options)
    }

    /// Renders with foreign text inked, in the way that gives the plain rendering's text.
    fn render_marked(&self, template: &Template, conversation: &Conversation) -> Result<Provenance> {
        let moment = template.moment();
        let render = |paint: &Paint, inline: Inline, moment: &Moment| {
            let context = conversation.context(paint, inline, &self.constants);
            template.render(context, paint.ink(), moment)
        };
        let plain = render(&Paint::Plain, Inline::Keep, &moment)?;
        let ink = Ink::new(self.tokenizer.alphabet(), &plain).map(Arc::new).ok_or_else(|| {
            Error::request("messages", "text that uses every private-use block of Unicode", "less of it")
        })?;
        let rules = if conversation.has_inline_thinking() { &Inline::RULES[..] } else { &Inline::RULES[..1] };
        for paint in [Paint::All(Arc::clone(&ink)), Paint::Risky(Arc::clone(&ink))] {
            for rule in rules {
                // A template that stumbles over ink is one that looks at its input: try the next way.
                let Ok(rendered) = render(&paint, *rule, &moment) else { continue };
                let read = ink.read(&rendered);
                if read.text == plain {
                    return Ok(read);
                }
            }
        }
        // No way gives the plain text: the template acts on control tokens that it finds in foreign text. Safety first.
        let rule = rules.last().copied().unwrap_or(Inline::Keep);
        render(&Paint::All(Arc::clone(&ink)), rule, &moment).map(|rendered| ink.read(&rendered))
    }

    /// Renders trial conversations. Fails only if the simplest one fails.
    fn try_out(&self, image_token: &str) -> Result<Capabilities> {
        let request = || ChatRequest::new(vec![json!({"role": "user", "content": "a"})]);
        let text = |request: ChatRequest| self.render(&request).map(|prompt| prompt.text);
        text(request())?;
        let thinking = |on| {
            let template = &self.template.as_ref().ok_or(Error::NoTemplate)?.template;
            let conversation = Conversation::read(&ChatRequest { enable_thinking: Some(on), ..request() })?;
            self.render_marked(template, &conversation).map(|read| read.text)
        };
        let effort = |effort: &str| text(ChatRequest { reasoning_effort: Some(effort.into()), ..request() });
        let tool = json!({"type": "function", "function": {
            "name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}}});
        let picture = json!({"type": "image_url", "image_url": {"url": "data:,"}});
        let pictures = ChatRequest::new(vec![json!({"role": "user", "content": [picture]})]);
        let has = |rendered: Result<String>, needle: &str| rendered.is_ok_and(|text| text.contains(needle));
        let differ =
            |one: Result<String>, other: Result<String>| matches!((one, other), (Ok(a), Ok(b)) if a != b);
        Ok(Capabilities {
            thinking_switch: differ(thinking(true), thinking(false)),
            reasoning_effort: differ(effort("low"), effort("high")),
            tools: has(text(ChatRequest { tools: Some(vec![tool]), ..request() }), "probe_tool"),
            images: has(text(pictures), image_token),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_by_which_a_template_sorts_results_is_found_by_trial() {
        let tokenizer_json = include_bytes!("../../../models/flint-tiny/tokenizer.json");
        let rule = |template| {
            let files = ChatFiles { tokenizer_json, chat_template: Some(template), ..ChatFiles::default() };
            ChatFormat::open(&files).unwrap().template.unwrap().sort_rule
        };
        let tiny = include_str!("../../../models/flint-tiny/chat_template.jinja");
        assert_eq!(rule(tiny), Some(SortRule::AllAnswered));
        let release = include_str!("../tests/fixtures/release_like.jinja");
        assert_eq!(rule(release), Some(SortRule::SomeAnswered));
        let shows_roles = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}";
        assert_eq!(rule(shows_roles), None);
        let keeps_order = "{% for m in messages if m.role == 'tool' %}{{ m.content }}{% endfor %}";
        assert_eq!(rule(keeps_order), None);
    }
}
