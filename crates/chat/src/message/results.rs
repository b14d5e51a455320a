//! Long runs of tool results, sorted here instead of by the template.
//!
//! Templates put the results of parallel calls into the order of the calls by comparing every result with every other:
//! 500 results took the release's template two seconds. Where trial renderings show that a template follows one of the
//! rules below, a long run is put into order here, and a message of a role that no template knows is set before it, so
//! that the template finds no calls to sort by. What it then renders is what it would have rendered itself.

use std::collections::HashMap;

use serde_json::json;

use super::{ChatRequest, Content, Conversation, Json, Message, Part};
use crate::error::Result;

/// Runs of up to this many results are left to the template: they cost it little.
const SHORT: usize = 32;
/// The role of the message between calls and their sorted results.
const SEPARATOR: &str = "-";

/// When a template sorts the results behind a message with calls. Always: every result has an id, no two the same, and
/// each is the id of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SortRule {
    /// Calls without a result may remain.
    SomeAnswered,
    /// Every call has its result.
    AllAnswered,
}

impl SortRule {
    /// The rules to try.
    pub(crate) const ALL: [Self; 2] = [Self::SomeAnswered, Self::AllAnswered];

    /// Conversations that tell the rules apart from each other and from others.
    pub(crate) fn trials() -> Vec<ChatRequest> {
        let trial = |calls: &[&str], results: &[&str]| {
            let calls = calls.iter().map(|id| {
                json!({"id": id, "type": "function", "function": {"name": format!("f{id}"), "arguments": {"k": id}}})
            });
            let mut messages = vec![
                json!({"role": "user", "content": "a"}),
                json!({"role": "assistant", "content": "", "tool_calls": calls.collect::<Vec<_>>()}),
            ];
            messages.extend(results.iter().enumerate().map(|(index, id)| {
                let mut result = json!({"role": "tool", "content": format!("r{index}")});
                if !id.is_empty() {
                    result["tool_call_id"] = json!(id);
                }
                result
            }));
            messages.push(json!({"role": "user", "content": "b"}));
            ChatRequest::new(messages)
        };
        vec![
            trial(&["x", "y", "z"], &["x", "y", "z"]),
            trial(&["x", "y", "z"], &["z", "x", "y"]),
            trial(&["x", "y", "z"], &["z", "x"]),
            trial(&["x", "y"], &["y", "y"]),
            trial(&["x", "y"], &["y", "q"]),
            trial(&["x", "y"], &["y", "x", "q"]),
            trial(&["x", "y"], &["y", ""]),
            trial(&["x", "x", "y"], &["y", "x"]),
            trial(&["", "x", "y"], &["y", "x"]),
        ]
    }
}

impl Conversation {
    /// Sorts long runs of results; with `every`, short ones too.
    pub(crate) fn sort_results(&mut self, rule: SortRule, every: bool) {
        let mut sorted: Vec<Message> = Vec::with_capacity(self.messages.len() + 1);
        let mut rest = std::mem::take(&mut self.messages).into_iter().peekable();
        while let Some(message) = rest.next() {
            sorted.push(message);
            let mut run = Vec::new();
            while let Some(result) = rest.next_if(|next| next.role == "tool") {
                run.push(result);
            }
            let behind_calls = sorted.last().is_some_and(|before| before.role == "assistant");
            let long = run.len() > SHORT || (every && !run.is_empty());
            if behind_calls && long && run.iter().all(|result| !result.content.has_results()) {
                if let Some(order) = sorted.last().and_then(|before| order(before, &run, rule)) {
                    let mut places: Vec<_> = order.into_iter().zip(run).collect();
                    places.sort_by_key(|(place, _)| *place);
                    run = places.into_iter().map(|(_, result)| result).collect();
                }
                sorted.push(Message::separator());
            }
            sorted.append(&mut run);
        }
        self.messages = sorted;
    }
}

impl Message {
    fn separator() -> Self {
        let content = Content::Text(String::new());
        Self { role: SEPARATOR, content, reasoning: None, calls: Vec::new(), rest: Vec::new() }
    }
}

impl Content {
    /// Whether this message holds several results, which only the template can tell apart.
    fn has_results(&self) -> bool {
        matches!(self, Self::Parts(parts) if parts.iter().any(|part| matches!(part, Part::Result { .. })))
    }
}

/// The place of each result among the calls, if the rule says to sort.
fn order(before: &Message, run: &[Message], rule: SortRule) -> Option<Vec<usize>> {
    let mut places = HashMap::new();
    for (place, call) in before.calls.iter().enumerate() {
        let fields = call.around.as_ref().unwrap_or(&call.rest);
        let id = text_of(fields, "id")?;
        if places.insert(id, place).is_some() {
            return None;
        }
    }
    if rule == SortRule::AllAnswered && run.len() != places.len() {
        return None;
    }
    // Removing a place that was taken makes a second result with the same id unknown.
    run.iter().map(|result| places.remove(text_of(&result.rest, "tool_call_id")?)).collect()
}

fn text_of<'a>(fields: &'a [(String, Json)], name: &str) -> Option<&'a str> {
    fields.iter().find_map(|(known, value)| match value {
        Json::String(text) if known == name && !text.is_empty() => Some(text.as_str()),
        _ => None,
    })
}

/// The first rule that renders every trial as the template itself does.
pub(crate) fn find_rule(render: impl Fn(&Conversation) -> Result<String>) -> Option<SortRule> {
    SortRule::ALL.into_iter().find(|rule| {
        SortRule::trials().iter().all(|trial| {
            let Ok(conversation) = Conversation::read(trial) else { return false };
            let mut sorted = conversation.clone();
            sorted.sort_results(*rule, true);
            matches!((render(&conversation), render(&sorted)), (Ok(one), Ok(other)) if one == other)
        })
    })
}
