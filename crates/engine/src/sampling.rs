//! The rules that a request sets for its draws.

use std::collections::BTreeSet;

use crate::Error;

/// How a reply's tokens are chosen from the logits.
///
/// Order of application, each on what the one before left:
/// 1. `logit_bias`, then `repetition_penalty`, then `frequency_penalty` and `presence_penalty`, on the logits;
/// 2. `temperature`; at zero the largest logit is taken, the lowest id among equals, and nothing below matters;
/// 3. `min_p`, then `top_k`, then `top_p` on what is kept, in the order (probability descending, id ascending);
/// 4. one draw from what is kept, keyed by `seed` and the token's absolute position.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits, 0 or more. 0 is greedy.
    pub temperature: f32,
    /// Keeps the most probable tokens up to this share of the probability, 0 to 1. At least one token is kept; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the most probable tokens. 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens with at least this share of the best token's probability, 0 to 1. 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of every token that prompt or reply hold, above 0. 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token that the reply holds, -2 to 2. 0 is off. The prompt does not count.
    pub presence_penalty: f32,
    /// Subtracted once for every time that the reply holds the token, -2 to 2. 0 is off. The prompt does not count.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, -100 to 100.
    pub logit_bias: Vec<(u32, f32)>,
    /// Names the reply among all that the rules allow: the same seed gives the same reply.
    pub seed: u64,
}

impl Sampling {
    /// Always the largest logit, the lowest id among equals; every other rule off.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }

    /// Checks every field against its range, and the tokens of `logit_bias` against the vocabulary.
    pub fn validate(&self, vocabulary: usize) -> Result<(), Error> {
        within("temperature", self.temperature, 0.0, f32::MAX)?;
        within("top_p", self.top_p, 0.0, 1.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        // The least normal number: dividing by less could turn a finite logit into infinity.
        within("repetition_penalty", self.repetition_penalty, f32::MIN_POSITIVE, f32::MAX)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        let mut named = BTreeSet::new();
        for &(token, bias) in &self.logit_bias {
            within("logit_bias", bias, -100.0, 100.0)?;
            if token as usize >= vocabulary {
                return Err(Error::Invalid {
                    field: "logit_bias",
                    value: format!("token {token}"),
                    expected: format!("the vocabulary has {vocabulary} tokens"),
                });
            }
            if !named.insert(token) {
                return Err(Error::Invalid {
                    field: "logit_bias",
                    value: format!("token {token}, named twice,"),
                    expected: "a token has one bias".to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Whether any rule but the bias changes logits by what the sequence holds.
    #[expect(clippy::float_cmp, reason = "exactly 1 is the value that is off")]
    pub(crate) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

fn within(field: &'static str, value: f32, least: f32, most: f32) -> Result<(), Error> {
    // Written so that NaN fails.
    if value >= least && value <= most {
        return Ok(());
    }
    let expected = if most < f32::MAX {
        format!("a number from {least} to {most} is expected")
    } else if least == 0.0 {
        "a finite number of 0 or more is expected".to_owned()
    } else {
        "a finite number above 0 is expected".to_owned()
    };
    Err(Error::Invalid { field, value: value.to_string(), expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut Sampling);

    #[test]
    fn every_refusal_names_field_and_value() {
        let with = |change: Change| {
            let mut sampling = Sampling::greedy();
            change(&mut sampling);
            sampling.validate(10).unwrap_err().to_string()
        };
        let expectations: [(Change, &str, &str); 14] = [
            (|s| s.temperature = -1.0, "temperature", "-1"),
            (|s| s.temperature = f32::NAN, "temperature", "NaN"),
            (|s| s.temperature = f32::INFINITY, "temperature", "inf"),
            (|s| s.top_p = 1.5, "top_p", "1.5"),
            (|s| s.top_p = -0.5, "top_p", "-0.5"),
            (|s| s.min_p = 2.0, "min_p", "2"),
            (|s| s.repetition_penalty = 0.0, "repetition_penalty", "0"),
            (|s| s.repetition_penalty = f32::INFINITY, "repetition_penalty", "inf"),
            (|s| s.presence_penalty = 2.5, "presence_penalty", "2.5"),
            (|s| s.frequency_penalty = -3.0, "frequency_penalty", "-3"),
            (|s| s.logit_bias = vec![(3, 101.0)], "logit_bias", "101"),
            (|s| s.logit_bias = vec![(3, f32::NEG_INFINITY)], "logit_bias", "-inf"),
            (|s| s.logit_bias = vec![(10, 1.0)], "logit_bias", "token 10"),
            (|s| s.logit_bias = vec![(4, 1.0), (4, 2.0)], "logit_bias", "token 4, named twice"),
        ];
        for (change, field, value) in expectations {
            let message = with(change);
            assert!(message.starts_with(&format!("{field}: {value}")), "{message}");
        }
    }

    #[test]
    fn zero_is_greedy_whatever_its_sign() {
        for temperature in [0.0, -0.0] {
            assert!(Sampling { temperature, ..Sampling::greedy() }.validate(1).is_ok());
        }
    }
}
