//! The walk over a span's wanted rows: which tokens are drawn, and how many drafts stand.

use crate::{
    Error, FinishReason, Sampling, Token,
    history::History,
    sampler::{Row, Sampler, need_only_the_best},
};

/// What a request's draws depend on besides the logits, and when they end.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) sampling: Sampling,
    pub(crate) stop_tokens: Vec<u32>,
    /// Most tokens of the reply.
    pub(crate) max_tokens: usize,
    pub(crate) logprobs: Option<usize>,
}

impl Rules {
    /// Whether all that a walk does depends on the best logit of each row alone.
    pub(crate) fn need_only_the_best(&self) -> bool {
        self.logprobs.is_none() && need_only_the_best(&self.sampling)
    }
}

/// How a reply ends.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Finished(FinishReason),
    Failed(Error),
}

/// What a walk found.
#[derive(Debug, Default)]
pub(crate) struct Walked {
    /// Tokens of the reply, in order.
    pub(crate) tokens: Vec<Token>,
    /// Drafts that are part of the sequence.
    pub(crate) accepted: usize,
    /// Set when the reply ends here.
    pub(crate) end: Option<End>,
}

/// Draws a token from each row as long as the drafts before it were drawn too.
///
/// `rows` are the logits of the last sure row and of each draft row, `1 + drafts.len()` of them. Draws enter `history` one
/// by one, so penalties see what a plain run would see. The first draw that is not the draft ends the walk, and so does the
/// end of the reply: what was proposed past it never becomes part of the sequence.
pub(crate) fn walk<'a>(
    sampler: &mut Sampler,
    rules: &Rules,
    history: &mut History,
    rows: impl Iterator<Item = Row<'a>>,
    drafts: &[u32],
) -> Walked {
    let mut walked = Walked::default();
    let mut drafts = drafts.iter();
    for row in rows {
        let drawn = match sampler.draw(row, &rules.sampling, history) {
            Ok(drawn) => drawn,
            // The tokens before it stand: a plain run would have sent them, too.
            Err(error) => {
                walked.end = Some(End::Failed(error));
                break;
            }
        };
        history.push(drawn);
        if rules.stop_tokens.contains(&drawn) {
            walked.end = Some(End::Finished(FinishReason::StopToken(drawn)));
            break;
        }
        let logprobs = match row {
            Row::Whole(row) => rules.logprobs.map(|count| sampler.logprobs(row, drawn, count)),
            Row::Best(_) => None,
        };
        walked.tokens.push(Token { id: drawn, logprobs });
        if history.len() - history.prompt() >= rules.max_tokens {
            walked.end = Some(End::Finished(FinishReason::Length));
            break;
        }
        if drafts.next() != Some(&drawn) {
            break;
        }
        walked.accepted += 1;
    }
    walked
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCABULARY: usize = 6;

    fn rules(max_tokens: usize, stop_tokens: &[u32]) -> Rules {
        Rules { sampling: Sampling::greedy(), stop_tokens: stop_tokens.to_vec(), max_tokens, logprobs: None }
    }

    /// Rows whose greedy tokens are these.
    fn rows(tokens: &[u32]) -> Vec<Vec<f32>> {
        tokens
            .iter()
            .map(|&best| (0..VOCABULARY as u32).map(|t| f32::from(u8::from(t == best))).collect())
            .collect()
    }

    fn walked(rules: &Rules, targets: &[u32], drafts: &[u32]) -> (Vec<u32>, usize, Walked, usize) {
        let rows = rows(targets);
        let mut history = History::new(vec![0, 0], false);
        let walked = walk(
            &mut Sampler::default(),
            rules,
            &mut history,
            rows.iter().map(|row| Row::Whole(row)),
            drafts,
        );
        (walked.tokens.iter().map(|t| t.id).collect(), walked.accepted, walked, history.len())
    }

    #[test]
    fn drafts_stand_up_to_the_first_that_was_not_drawn() {
        let (tokens, accepted, walked, length) = walked(&rules(9, &[]), &[1, 2, 3, 4], &[1, 2, 5]);
        assert_eq!((tokens, accepted, length), (vec![1, 2, 3], 2, 5));
        assert!(walked.end.is_none());
    }

    #[test]
    fn all_drafts_right_give_one_token_more_than_drafts() {
        let (tokens, accepted, ..) = walked(&rules(9, &[]), &[1, 2, 3], &[1, 2]);
        assert_eq!((tokens, accepted), (vec![1, 2, 3], 2));
    }

    #[test]
    fn a_stop_token_ends_the_walk_and_is_not_accepted() {
        let (tokens, accepted, walked, _) = walked(&rules(9, &[2]), &[1, 2, 3], &[1, 2]);
        assert_eq!((tokens, accepted), (vec![1], 1));
        assert!(matches!(walked.end, Some(End::Finished(FinishReason::StopToken(2)))));
    }

    #[test]
    fn the_length_ends_the_walk() {
        let (tokens, accepted, walked, _) = walked(&rules(2, &[]), &[1, 2, 3], &[1, 2]);
        assert_eq!((tokens, accepted), (vec![1, 2], 1));
        assert!(matches!(walked.end, Some(End::Finished(FinishReason::Length))));
    }

    #[test]
    fn tokens_before_a_bad_row_stand() {
        let mut rows = rows(&[1, 2, 3]);
        rows[1][0] = f32::NAN;
        let mut history = History::new(vec![0, 0], false);
        let slices = rows.iter().map(|row| Row::Whole(row));
        let walked = walk(&mut Sampler::default(), &rules(9, &[]), &mut history, slices, &[1, 2]);
        assert_eq!(walked.tokens.iter().map(|t| t.id).collect::<Vec<_>>(), [1]);
        assert!(matches!(walked.end, Some(End::Failed(Error::Logits { position: 3, .. }))));
    }
}
