//! What goes in and what comes out: requests, and the events of their replies.

use flint_model::Limits;

use crate::{Error, Sampling};

/// Most alternatives that [`Request::logprobs`] may ask for.
const MOST_LOGPROBS: usize = 20;

/// A prompt, and what its reply must be like.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Tokens of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens of the reply, at least 1. `None`: as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Tokens that end the reply. One that the vocabulary does not have never occurs.
    pub stop_tokens: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Report log-probabilities: of the drawn token and of this many best ones, 0 to 20.
    pub logprobs: Option<usize>,
}

impl Request {
    /// Checks the request against a model's sizes and returns the most tokens that its reply may have.
    pub(crate) fn check(&self, limits: &Limits) -> Result<usize, Error> {
        if self.prompt.is_empty() {
            return Err(Error::Invalid {
                field: "prompt",
                value: "an empty prompt".to_owned(),
                expected: "at least one token is needed".to_owned(),
            });
        }
        for (index, &token) in self.prompt.iter().enumerate() {
            if token as usize >= limits.vocabulary {
                return Err(Error::Invalid {
                    field: "prompt",
                    value: format!("token {token} at index {index}"),
                    expected: format!("the vocabulary has {} tokens", limits.vocabulary),
                });
            }
        }
        if self.max_tokens == Some(0) {
            return Err(Error::Invalid {
                field: "max_tokens",
                value: "0".to_owned(),
                expected: "a reply has at least 1 token".to_owned(),
            });
        }
        if let Some(count) = self.logprobs.filter(|count| *count > MOST_LOGPROBS) {
            return Err(Error::Invalid {
                field: "logprobs",
                value: count.to_string(),
                expected: format!("a count from 0 to {MOST_LOGPROBS} is expected"),
            });
        }
        self.sampling.validate(limits.vocabulary)?;
        let room = limits.context.saturating_sub(self.prompt.len());
        match self.max_tokens {
            Some(asked) if asked <= room => Ok(asked),
            None if room > 0 => Ok(room),
            _ => Err(Error::ContextLength {
                prompt: self.prompt.len(),
                max_tokens: self.max_tokens,
                limit: limits.context,
            }),
        }
    }
}

/// What happens to a request, in order: `Started`, any number of `Token`, then `Finished` or `Failed`. A request that fails
/// before it is started has no `Started`.
#[derive(Clone, Debug)]
pub enum Event {
    /// The request left the queue; its prompt is being read.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: usize,
    },
    /// The reply's next token.
    Token(Token),
    /// The reply is complete.
    Finished {
        /// Why it ends here.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
    /// The reply ends incomplete.
    Failed(Error),
}

/// One token of a reply.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its log-probability and the best alternatives, where the request asks for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Log-probabilities of one position, from the model's own distribution: before bias, penalties, temperature and cuts.
///
/// A token that the model rules out has `-inf`. Natural logarithm.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token that was drawn.
    pub chosen: f32,
    /// The most probable tokens: probability descending, then id ascending.
    pub top: Vec<(u32, f32)>,
}

/// Why a reply is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// This stop token was drawn. It is not among the reply's [`Event::Token`]s.
    StopToken(u32),
    /// The reply has as many tokens as were asked for, or as the context holds.
    Length,
}

/// What a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens drawn: the reply's, and the stop token if one ended it.
    pub completion_tokens: usize,
    /// From leaving the queue to the first token.
    pub prefill_seconds: f64,
    /// From the first token to the last.
    pub decode_seconds: f64,
    /// From submission to leaving the queue.
    pub queue_seconds: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { vocabulary: 10, context: 20, rows: 8, drafts: 2, sequences: 2 };

    fn request(prompt: usize, max_tokens: Option<usize>) -> Request {
        Request {
            prompt: vec![1; prompt],
            max_tokens,
            stop_tokens: Vec::new(),
            sampling: Sampling::greedy(),
            logprobs: None,
        }
    }

    #[test]
    fn a_reply_of_no_stated_length_may_fill_the_context() {
        assert_eq!(request(5, None).check(&LIMITS).unwrap(), 15);
        assert_eq!(request(5, Some(15)).check(&LIMITS).unwrap(), 15);
        assert_eq!(request(19, None).check(&LIMITS).unwrap(), 1);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        for (prompt, max_tokens) in
            [(5, Some(16)), (20, None), (21, None), (20, Some(1)), (5, Some(usize::MAX))]
        {
            let error = request(prompt, max_tokens).check(&LIMITS).unwrap_err();
            let message = error.to_string();
            assert!(matches!(error, Error::ContextLength { limit: 20, .. }), "{message}");
            assert!(message.contains(&format!("prompt of {prompt} tokens")), "{message}");
            assert!(
                max_tokens.is_none_or(|asked| message.contains(&format!("max_tokens {asked}"))),
                "{message}"
            );
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let message = |request: Request| request.check(&LIMITS).unwrap_err().to_string();
        assert!(message(request(0, None)).starts_with("prompt: an empty prompt"));
        assert!(message(request(1, Some(0))).starts_with("max_tokens: 0"));
        let unknown = Request { prompt: vec![3, 10], ..request(1, None) };
        assert!(
            message(unknown).starts_with("prompt: token 10 at index 1 cannot be used, the vocabulary has 10")
        );
        let greedy = Request { logprobs: Some(21), ..request(1, None) };
        assert!(message(greedy).starts_with("logprobs: 21"));
    }
}
