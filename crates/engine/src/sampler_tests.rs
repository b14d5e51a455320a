//! What a draw must be. Held against a plain definition that sorts everything, and against the distribution itself.

use proptest::prelude::*;

use super::*;

fn rules(temperature: f32) -> Sampling {
    Sampling { temperature, ..Sampling::greedy() }
}

fn draw(logits: &[f32], rules: &Sampling, prompt: &[u32], reply: &[u32]) -> Result<u32, Error> {
    let mut history = History::new(prompt.to_vec(), rules.has_penalties());
    for &token in reply {
        history.push(token);
    }
    Sampler::default().draw(Row::Whole(logits), rules, &history)
}

/// The definition, without any shortcut: probabilities that remain, by token id.
fn distribution(logits: &[f64], rules: &Sampling) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut kept: Vec<(f64, usize)> = logits
        .iter()
        .map(|logit| ((logit - most) / f64::from(rules.temperature)).exp())
        .zip(0..)
        .filter(|(weight, _)| *weight > 0.0 && *weight >= f64::from(rules.min_p))
        .collect();
    kept.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    if rules.top_k > 0 {
        kept.truncate(rules.top_k);
    }
    if rules.top_p < 1.0 {
        let total: f64 = kept.iter().map(|(weight, _)| weight).sum();
        let mut sum = 0.0;
        let reached = kept.iter().position(|(weight, _)| {
            sum += weight;
            sum >= f64::from(rules.top_p) * total
        });
        kept.truncate(reached.map_or(kept.len(), |index| index + 1));
    }
    let total: f64 = kept.iter().map(|(weight, _)| weight).sum();
    let mut shares = vec![0.0; logits.len()];
    for (weight, token) in kept {
        shares[token] = weight / total;
    }
    shares
}

/// Draws over seeds and positions, and Pearson's statistic against `expected`, in standard deviations above its mean.
fn excess(counts: &[u32], expected: &[f64]) -> f64 {
    let draws = f64::from(counts.iter().sum::<u32>());
    let mut statistic = 0.0;
    let mut degrees = -1.0;
    for (&count, &share) in counts.iter().zip(expected) {
        if share == 0.0 {
            if count > 0 {
                return f64::INFINITY;
            }
            continue;
        }
        statistic += (f64::from(count) - share * draws).powi(2) / (share * draws);
        degrees += 1.0;
    }
    if degrees == 0.0 { 0.0 } else { (statistic - degrees) / (2.0_f64 * degrees).sqrt() }
}

fn counts(logits: &[f32], rules: &Sampling) -> Vec<u32> {
    let mut counts = vec![0; logits.len()];
    let mut sampler = Sampler::default();
    for seed in 0..200 {
        let rules = Sampling { seed, ..rules.clone() };
        let mut history = History::new(vec![0], rules.has_penalties());
        for _ in 0..200 {
            counts[sampler.draw(Row::Whole(logits), &rules, &history).unwrap() as usize] += 1;
            history.push(0);
        }
    }
    counts
}

const ROW: [f32; 10] = [1.5, -0.25, 0.0, 3.0, 2.5, 2.5, -4.0, 1.0, f32::NEG_INFINITY, 0.5];

#[test]
fn draws_have_the_distribution_of_every_rule() {
    let plain = rules(1.0);
    let cases = [
        plain.clone(),
        rules(0.6),
        rules(1.9),
        Sampling { top_k: 4, ..plain.clone() },
        Sampling { top_p: 0.9, ..plain.clone() },
        Sampling { top_p: 0.3, ..plain.clone() },
        Sampling { min_p: 0.1, ..plain.clone() },
        Sampling { temperature: 1.4, min_p: 0.02, top_k: 6, top_p: 0.93, ..plain.clone() },
    ];
    for rules in cases {
        let expected = distribution(&ROW.map(f64::from), &rules);
        let counts = counts(&ROW, &rules);
        let found = excess(&counts, &expected);
        assert!(found < 4.0, "{found} deviations off under {rules:?}: {counts:?}");
    }
}

#[test]
fn the_distribution_test_sees_a_temperature_that_is_five_percent_off() {
    let expected = distribution(&ROW.map(f64::from), &rules(1.05));
    assert!(excess(&counts(&ROW, &rules(1.0)), &expected) > 10.0);
}

#[test]
fn penalised_and_biased_draws_have_their_distribution() {
    // The history is all token 0, once in the prompt and up to 199 times in the reply: keep the count out of it.
    let rules = Sampling {
        repetition_penalty: 1.5,
        presence_penalty: 0.0,
        logit_bias: vec![(3, -2.0), (6, 5.0)],
        ..rules(1.0)
    };
    let mut adjusted = ROW.map(f64::from);
    adjusted[0] /= 1.5;
    adjusted[3] -= 2.0;
    adjusted[6] += 5.0;
    let found = excess(&counts(&ROW, &rules), &distribution(&adjusted, &rules));
    assert!(found < 4.0, "{found}");
}

#[test]
fn temperature_zero_takes_the_lowest_of_the_largest() {
    for temperature in [0.0, -0.0] {
        assert_eq!(draw(&[1.0, 3.0, 2.0, 3.0], &rules(temperature), &[0], &[]).unwrap(), 1);
        assert_eq!(draw(&[-0.0, 0.0, -0.0], &rules(temperature), &[0], &[]).unwrap(), 0);
        let biased = Sampling { logit_bias: vec![(0, 2.0)], ..rules(temperature) };
        assert_eq!(draw(&[1.0, 3.0, 2.0, 3.0], &biased, &[0], &[]).unwrap(), 0, "ties after the bias, too");
    }
}

#[test]
fn a_draw_is_the_same_on_every_machine() {
    // Pinned: another token here means that the replies of every seed have changed.
    let row: Vec<f32> = (0..50).map(|token| ((token * 37) % 50) as f32 / 10.0).collect();
    let rules = Sampling { seed: 1234, top_p: 0.95, ..rules(0.9) };
    let drawn: Vec<u32> = (1..13).map(|length| draw(&row, &rules, &vec![0; length], &[]).unwrap()).collect();
    assert_eq!(drawn, [39, 8, 27, 17, 9, 31, 40, 16, 27, 39, 9, 32]);
}

#[test]
fn the_draw_depends_on_seed_and_position_and_not_on_where_the_prompt_ends() {
    let of = |seed, prompt: &[u32], reply: &[u32]| {
        draw(&[0.0; 1000], &Sampling { seed, ..rules(1.0) }, prompt, reply).unwrap()
    };
    assert_eq!(of(1, &[5, 6, 7], &[]), of(1, &[8], &[8, 8]));
    assert_ne!(of(1, &[5, 6, 7], &[]), of(2, &[5, 6, 7], &[]));
    assert_ne!(of(1, &[5, 6, 7], &[]), of(1, &[5, 6, 7, 8], &[]));
}

#[test]
fn repetition_counts_prompt_and_reply_and_the_others_only_the_reply() {
    // Token 0 is in the prompt, token 1 twice in the reply, token 2 nowhere.
    let adjusted = |rules: &Sampling| {
        let mut history = History::new(vec![0], true);
        history.push(1);
        history.push(1);
        let mut sampler = Sampler::default();
        sampler.adjust(&[4.0, -4.0, 4.0], rules, &history);
        sampler.row
    };
    assert_eq!(adjusted(&Sampling { repetition_penalty: 2.0, ..rules(1.0) }), [2.0, -8.0, 4.0]);
    assert_eq!(adjusted(&Sampling { presence_penalty: 0.5, ..rules(1.0) }), [4.0, -4.5, 4.0]);
    assert_eq!(adjusted(&Sampling { frequency_penalty: 0.5, ..rules(1.0) }), [4.0, -5.0, 4.0]);
    let all = Sampling {
        logit_bias: vec![(1, 1.0)],
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..rules(1.0)
    };
    assert_eq!(adjusted(&all), [2.0, (-4.0 + 1.0) * 2.0 - 2.0 * 0.25 - 0.5, 4.0]);
}

proptest! {
    #[test]
    fn the_best_logit_is_all_that_a_greedy_draw_needs(
        row in prop::collection::vec(
            prop_oneof![
                8 => (-3i8..3).prop_map(f32::from),
                1 => Just(-0.0f32),
                1 => Just(f32::NAN),
                1 => Just(f32::INFINITY),
                4 => Just(f32::NEG_INFINITY),
            ],
            1..20,
        ),
    ) {
        let history = History::new(vec![0], false);
        let best = Best::of(&row).unwrap();
        let found = Sampler::default().draw(Row::Best(best), &rules(0.0), &history);
        let expected = draw(&row, &rules(0.0), &[0], &[]);
        prop_assert_eq!(format!("{found:?}"), format!("{expected:?}"));
    }
}

#[test]
fn a_row_without_a_token_is_an_error_that_names_the_position() {
    let mut bad = ROW;
    bad[7] = f32::NAN;
    for temperature in [0.0, 1.0] {
        for row in [&bad[..], &[f32::NEG_INFINITY; 3], &[]] {
            let error = draw(row, &rules(temperature), &[0, 0], &[0]).unwrap_err();
            assert!(matches!(error, Error::Logits { position: 3, .. }), "{error}");
        }
    }
}

#[test]
fn infinite_logits_share_the_probability() {
    let row = [0.0, f32::INFINITY, 1.0, f32::INFINITY, f32::NEG_INFINITY];
    assert_eq!(draw(&row, &rules(0.0), &[0], &[]).unwrap(), 1);
    for rules in [rules(1.0), Sampling { top_p: 0.9, ..rules(1.0) }, Sampling { top_k: 3, ..rules(1.0) }] {
        let counts = counts(&row, &rules);
        assert!(excess(&counts, &[0.0, 0.5, 0.0, 0.5, 0.0]) < 4.0, "{counts:?}");
    }
    let logprobs = Sampler::default().logprobs(&row, 2, 5);
    assert!(logprobs.chosen.is_infinite() && logprobs.chosen < 0.0);
    let half = 0.5_f32.ln();
    assert_eq!(logprobs.top, [(1, half), (3, half)], "what the model rules out is no alternative");
}

#[test]
fn any_finite_rule_draws_a_token_of_any_finite_row() {
    let rows = [[f32::MAX, f32::MIN, 0.0, f32::MAX], [f32::MIN; 4], [f32::MIN_POSITIVE, 0.0, -0.0, f32::MAX]];
    let extremes = [f32::MIN_POSITIVE, 1.0, f32::MAX];
    for row in rows {
        for temperature in extremes {
            for repetition_penalty in extremes {
                for (top_p, min_p, top_k) in [(1.0, 0.0, 0), (0.0, 0.0, 0), (1.0, 1.0, 0), (0.5, 1e-45, 2)] {
                    let rules = Sampling { top_p, top_k, min_p, repetition_penalty, ..rules(temperature) };
                    rules.validate(4).unwrap();
                    assert!(draw(&row, &rules, &[0, 1], &[3]).unwrap() < 4);
                }
            }
        }
    }
}

#[test]
fn logprobs_are_those_of_the_model_whatever_the_rules() {
    let logprobs = Sampler::default().logprobs(&ROW, 2, 4);
    let total = ROW.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>().ln();
    let of = |token: usize| (f64::from(ROW[token]) - total) as f32;
    assert!((logprobs.chosen - of(2)).abs() < 1e-6);
    assert_eq!(logprobs.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [3, 4, 5, 0]);
    for (token, logprob) in logprobs.top {
        assert!((logprob - of(token as usize)).abs() < 1e-6, "{token}");
    }
    assert!(Sampler::default().logprobs(&ROW, 0, 0).top.is_empty());
}

#[test]
fn a_drafter_with_the_same_key_draws_the_same_token_often() {
    let mut agreed = 0;
    let mut strangers = 0;
    let row = |shift: f32| -> Vec<f32> {
        (0..40).map(|t| ((t * 29) % 40) as f32 / 13.0 + shift * (t % 3) as f32).collect()
    };
    let (target, drafter) = (row(0.0), row(0.2));
    let [p, q] = [&target, &drafter]
        .map(|row| distribution(&row.iter().map(|logit| f64::from(*logit)).collect::<Vec<_>>(), &rules(1.0)));
    let distance = p.iter().zip(&q).map(|(p, q)| (p - q).abs()).sum::<f64>() / 2.0;
    let draws = 20_000;
    for seed in 0..draws {
        let with = |row: &[f32], seed| draw(row, &Sampling { seed, ..rules(1.0) }, &[0], &[]).unwrap();
        agreed += u32::from(with(&target, seed) == with(&drafter, seed));
        strangers += u32::from(with(&target, seed) == with(&drafter, seed + draws));
    }
    let share = f64::from(agreed) / draws as f64;
    let promised = (1.0 - distance) / (1.0 + distance);
    assert!(
        share > promised - 0.01,
        "{share} of draws agree, {promised} are promised at distance {distance}"
    );
    assert!(f64::from(strangers) / (draws as f64) < share / 4.0, "independent draws agree as often");
}

fn any_rules() -> impl Strategy<Value = Sampling> {
    let temperature = prop_oneof![Just(0.3_f32), Just(1.0), Just(4.0), 0.01..3.0_f32];
    let top_p = prop_oneof![Just(1.0_f32), Just(0.0), 0.0..1.0_f32, Just(0.9999)];
    let top_k = prop_oneof![Just(0_usize), 1..12_usize, Just(1000)];
    let min_p = prop_oneof![Just(0.0_f32), Just(1.0), 0.0..0.3_f32];
    (temperature, top_p, top_k, min_p, any::<u64>()).prop_map(|(temperature, top_p, top_k, min_p, seed)| {
        Sampling { top_p, top_k, min_p, seed, ..rules(temperature) }
    })
}

/// Few distinct values, so that ties are everywhere, with a spread that reaches weights of zero.
fn any_row() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![
        8 => (-40..40_i32).prop_map(|value| value as f32 / 4.0),
        1 => -2000.0..0.0_f32,
        1 => Just(f32::NEG_INFINITY),
    ];
    prop::collection::vec(logit, 1..200)
        .prop_filter("a token", |row| row.iter().any(|logit| *logit > f32::MIN))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn every_shortcut_draws_what_the_plain_definition_draws(row in any_row(), rules in any_rules(), length in 1..500_usize) {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut all: Vec<Candidate> = (0..).zip(&row)
            .map(|(token, logit)| Candidate {
                score: (f64::from(*logit) - f64::from(most)) * (1.0 / f64::from(rules.temperature)),
                token,
            })
            .collect();
        let floor = if rules.min_p > 0.0 { ln(f64::from(rules.min_p)) } else { f64::NEG_INFINITY };
        all.retain(|candidate| candidate.score >= floor && candidate.score > f64::NEG_INFINITY);
        all.sort();
        if rules.top_k > 0 {
            all.truncate(rules.top_k);
        }
        let noise = Noise::new(rules.seed, length);
        let total = all.iter().fold(0.0, |sum, candidate| sum + exp(candidate.score));
        // Where a sum meets the target to its last digits, another order of the sum may cut one token sooner or later.
        let expected = [1.0 - 1e-12, 1.0 + 1e-12].map(|tolerance| {
            let mut sum = 0.0;
            let target = f64::from(rules.top_p) * total * tolerance;
            let reached = all.iter().position(|candidate| {
                sum += exp(candidate.score);
                sum >= target
            });
            let count = if rules.top_p < 1.0 { reached.map_or(all.len(), |index| index + 1) } else { all.len() };
            all[..count].iter()
                .map(|c| Candidate { score: c.score + gumbel(noise.bits(c.token)), token: c.token })
                .min().unwrap().token
        });
        let drawn = draw(&row, &rules, &vec![0; length], &[]).unwrap();
        prop_assert!(expected.contains(&drawn), "drawn {}, expected {:?}", drawn, expected);
    }

    #[test]
    fn logprobs_are_in_total_order(row in any_row(), count in 0..20_usize) {
        let top = Sampler::default().logprobs(&row, 0, count).top;
        let mut order: Vec<u32> = (0..row.len() as u32).filter(|token| row[*token as usize] > f32::NEG_INFINITY).collect();
        order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
        order.truncate(count);
        prop_assert_eq!(top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), order);
        prop_assert!(top.windows(2).all(|pair| pair[0].1 >= pair[1].1));
    }
}
