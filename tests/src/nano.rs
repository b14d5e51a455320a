//! The goldens of the random tiny models: prompts, logits, cached greedy decoding, streams after layers, router picks
//! and selected positions.
//!
//! The fixtures' READMEs justify the tolerances: fp32 in another order of summation moves logits by at most 6e-5, so
//! 1e-3 for logits and 2e-4 for streams.

use std::collections::HashMap;
use std::path::Path;

use flint_backend::Backend;
use flint_cpu::Cpu;
use flint_model::probe::{Point, Probe, Seen};
use flint_model::{Batch, Glm, LanguageModel, Span, Want};

use crate::feeding::{self, bits};
use crate::goldens::{Goldens, assert_close, floats};

const LOGITS: f32 = 1e-3;
const STREAMS: f32 = 2e-4;

/// Collects what it is asked for.
#[derive(Default)]
pub struct Collector {
    /// What was seen, rows of successive forwards behind one another.
    pub floats: HashMap<Point, Vec<f32>>,
    /// The same for ids.
    pub ids: HashMap<Point, Vec<u32>>,
}

impl Probe for Collector {
    fn wants(&self, _point: Point) -> bool {
        true
    }

    fn take(&mut self, point: Point, seen: Seen) {
        match seen {
            Seen::Floats(values) => self.floats.entry(point).or_default().extend(values),
            Seen::Ids(values) => self.ids.entry(point).or_default().extend(values),
        }
    }
}

/// Compares prefill logits, best tokens and cached greedy decoding of prompts p7, p64 and p300. `prefix` stands before
/// the names of results (`f32.` in the MLX fixtures).
///
pub fn check_text(model: &mut dyn LanguageModel, goldens: &Goldens, prefix: &str) {
    for prompt in ["p7", "p64", "p300"] {
        let tokens = goldens.tokens(&format!("{prompt}.input_ids"));
        let rows = feeding::feed(model, &tokens, &[tokens.len()]);
        let argmax: Vec<u32> = rows.iter().map(|row| feeding::best(row)).collect();
        assert_eq!(argmax, goldens.tokens(&format!("{prefix}{prompt}.argmax")), "{prompt}: best tokens");
        let positions = if goldens.has(&format!("{prompt}.positions")) {
            goldens.tokens(&format!("{prompt}.positions"))
        } else {
            (0..tokens.len() as u32).collect()
        };
        let kept: Vec<f32> = positions.iter().flat_map(|p| floats(&rows[*p as usize])).collect();
        assert_close(prompt, &kept, &goldens.floats(&format!("{prefix}{prompt}.logits")), LOGITS);
        let (found, logits) = feeding::greedy(model, &tokens, 16);
        assert_eq!(
            found,
            goldens.tokens(&format!("{prefix}{prompt}.greedy.tokens")),
            "{prompt}: greedy tokens"
        );
        let logits: Vec<f32> = logits.iter().flat_map(floats).collect();
        let expected = goldens.floats(&format!("{prefix}{prompt}.greedy.logits"));
        assert_close(&format!("{prompt}: greedy logits"), &logits, &expected, LOGITS);
    }
}

/// Runs a prompt with somebody looking at every point.
///
pub fn look<B: Backend>(model: &mut Glm<B>, tokens: &[u32]) -> Collector {
    let sequence = model.open().unwrap();
    let mut collector = Collector::default();
    let span = Span { sequence, sure: tokens.to_vec(), drafts: vec![], want: Want::All };
    let seen = model.forward_probed(&Batch { spans: vec![span.clone()] }, &mut collector).unwrap();
    model.close(sequence).unwrap();
    let plain = feeding::feed(model, tokens, &[tokens.len()]);
    feeding::assert_same("a forward that is looked at", &bits(&seen.values), &plain.concat());
    collector
}

/// Root of the mean square of the differences, relative to that of the expected values.
fn relative_distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f64| x * x;
    let pairs = found.iter().zip(expected);
    let apart: f64 = pairs.map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let size: f64 = expected.iter().map(|b| square(f64::from(*b))).sum();
    if apart == 0.0 { 0.0 } else { (apart / size.max(1e-30)).sqrt() }
}

/// How far the prefill logits of an arithmetic with rounded inputs are from the goldens': the farthest of three prompts.
pub fn text_distance(model: &mut dyn LanguageModel, goldens: &Goldens, prefix: &str) -> f64 {
    let distance = |prompt: &&str| {
        let tokens = goldens.tokens(&format!("{prompt}.input_ids"));
        let rows = feeding::feed(model, &tokens, &[tokens.len()]);
        let positions = if goldens.has(&format!("{prompt}.positions")) {
            goldens.tokens(&format!("{prompt}.positions"))
        } else {
            (0..tokens.len() as u32).collect()
        };
        let kept: Vec<f32> = positions.iter().flat_map(|p| floats(&rows[*p as usize])).collect();
        relative_distance(&kept, &goldens.floats(&format!("{prefix}{prompt}.logits")))
    };
    ["p7", "p64", "p300"]
        .iter()
        .map(distance)
        .fold(0.0, |worst, d| if d > worst || d.is_nan() { d } else { worst })
}

/// Compares every point of a forward with another model's, in the network's order, up to the first choice (experts,
/// pools) that differs: behind it the two do not compute the same. Panics where values differ by more than `most`.
pub fn compare_inside<A: Backend, B: Backend>(model: &mut Glm<A>, other: &mut Glm<B>, most: f64) -> String {
    let tokens = feeding::Dice::new(12).tokens(90, model.limits().vocabulary);
    let (found, expected) = (look(model, &tokens), look(other, &tokens));
    let mut worst = (0.0, None);
    for layer in 0..model.config().layers() {
        let points = [
            Point::AttentionMix(layer),
            Point::Latents(layer),
            Point::Pools(layer),
            Point::KdaWindow(layer),
            Point::KdaState(layer),
            Point::Attention(layer),
            Point::AttentionStreams(layer),
            Point::FeedMix(layer),
            Point::RouterLogits(layer),
            Point::Picks(layer),
            Point::PickWeights(layer),
            Point::Shared(layer),
            Point::Feed(layer),
            Point::Streams(layer),
        ];
        for point in points {
            if found.ids.get(&point) != expected.ids.get(&point) {
                return format!(
                    "up to {point:?}, where choices differ, at most {:.1e} at {:?}",
                    worst.0, worst.1
                );
            }
            let (Some(a), Some(b)) = (found.floats.get(&point), expected.floats.get(&point)) else {
                continue;
            };
            let distance = relative_distance(a, b);
            assert!(
                distance <= most,
                "{point:?} differs by {distance:.1e} of its size; {most:.0e} is allowed"
            );
            if distance > worst.0 {
                worst = (distance, Some(point));
            }
        }
    }
    format!("all layers, at most {:.1e} at {:?}", worst.0, worst.1)
}

/// Compares the streams after layers 0, 3, 6 and 7 of prompt p7.
///
pub fn check_streams(model: &mut Glm<Cpu>, goldens: &Goldens, prefix: &str) {
    let seen = look(model, &goldens.tokens("p7.input_ids"));
    for layer in [0, 3, 6, 7] {
        let expected = goldens.floats(&format!("{prefix}p7.layer{layer:02}.out"));
        assert_close(
            &format!("streams after layer {layer}"),
            &seen.floats[&Point::Streams(layer)],
            &expected,
            STREAMS,
        );
    }
}

/// Compares every stored intermediate of the fixture in the official layout, which is too large for the repository.
///
pub fn check_official(model: &mut Glm<Cpu>, folder: &Path) {
    let goldens = Goldens::open(&folder.join("goldens.safetensors"));
    check_text(model, &goldens, "");
    for prompt in ["p7", "p64", "p300"] {
        check_inside(model, &goldens, prompt);
    }
}

/// Every stored point of one prompt.
fn check_inside(model: &mut Glm<Cpu>, goldens: &Goldens, prompt: &str) {
    let tokens = goldens.tokens(&format!("{prompt}.input_ids"));
    let seen = look(model, &tokens);
    let all: Vec<u32> = (0..tokens.len() as u32).collect();
    let positions = format!("{prompt}.positions");
    let kept = if goldens.has(&positions) { goldens.tokens(&positions) } else { all.clone() };
    let layers = model.config().layers();
    let (streams, hidden) = (model.config().streams, model.config().hidden_size);
    for layer in 0..layers {
        let named = |part: &str| format!("{prompt}.layer{layer:02}.{part}");
        let compare = |part: &str, point: Point, width: usize| {
            if goldens.has(&named(part)) {
                let expected = goldens.floats(&named(part));
                let rows = if expected.len() == all.len() * width { &all } else { &kept };
                assert_close(&named(part), &take(&seen.floats[&point], rows, width), &expected, STREAMS);
            }
        };
        compare("attn_mix", Point::AttentionStreams(layer), streams * hidden);
        compare("out", Point::Streams(layer), streams * hidden);
        compare("attn", Point::Attention(layer), hidden);
        compare("mlp", Point::Feed(layer), hidden);
        compare("latent", Point::Latents(layer), model.config().kv_lora_rank);
        compare("router.logits", Point::RouterLogits(layer), model.config().experts);
        check_mix(goldens, &seen, &named, layer, streams);
        check_picks(goldens, &seen, &named, layer, model.config().experts_per_token, (&all, &kept));
        check_positions(goldens, &seen, &named, layer, model.config());
        check_states(goldens, &seen, &named, layer);
    }
    let final_norm = goldens.floats(&format!("{prompt}.final_norm"));
    let rows = if final_norm.len() == all.len() * hidden { &all } else { &kept };
    assert_close("final norm", &take(&seen.floats[&Point::FinalNorm], rows, hidden), &final_norm, STREAMS);
}

/// Rows of a matrix.
fn take(values: &[f32], rows: &[u32], width: usize) -> Vec<f32> {
    rows.iter().flat_map(|row| values[*row as usize * width..][..width].to_vec()).collect()
}

fn check_mix(goldens: &Goldens, seen: &Collector, named: &dyn Fn(&str) -> String, layer: usize, n: usize) {
    for (site, point) in [("attn_hc", Point::AttentionMix(layer)), ("ffn_hc", Point::FeedMix(layer))] {
        if !goldens.has(&named(&format!("{site}.post"))) {
            continue;
        }
        let rows = seen.floats[&point].chunks_exact(n + n * n);
        let post: Vec<f32> = rows.clone().flat_map(|row| row[..n].to_vec()).collect();
        let comb: Vec<f32> = rows.flat_map(|row| row[n..].to_vec()).collect();
        assert_close(&named("post"), &post, &goldens.floats(&named(&format!("{site}.post"))), 1e-5);
        assert_close(&named("comb"), &comb, &goldens.floats(&named(&format!("{site}.comb"))), 1e-5);
    }
}

fn check_picks(
    goldens: &Goldens,
    seen: &Collector,
    named: &dyn Fn(&str) -> String,
    layer: usize,
    per_row: usize,
    (all, kept): (&[u32], &[u32]),
) {
    if !goldens.has(&named("router.experts")) {
        return;
    }
    let (ids, weights) = (goldens.tokens(&named("router.experts")), goldens.floats(&named("router.weights")));
    let rows = if ids.len() == all.len() * per_row { all } else { kept };
    for (index, row) in rows.iter().enumerate() {
        let range = index * per_row..(index + 1) * per_row;
        let mut expected: Vec<_> = ids[range.clone()].iter().zip(&weights[range]).collect();
        expected.sort_by_key(|pair| *pair.0);
        let at = *row as usize * per_row;
        let picks = &seen.ids[&Point::Picks(layer)][at..at + per_row];
        assert_eq!(picks, expected.iter().map(|p| *p.0).collect::<Vec<_>>(), "{}", named("router.experts"));
        let expected: Vec<f32> = expected.iter().map(|pair| *pair.1).collect();
        let found = &seen.floats[&Point::PickWeights(layer)][at..at + per_row];
        assert_close(&named("router.weights"), found, &expected, 1e-4);
    }
}

fn check_positions(
    goldens: &Goldens,
    seen: &Collector,
    named: &dyn Fn(&str) -> String,
    layer: usize,
    config: &flint_weights::ModelConfig,
) {
    if !goldens.has(&named("topk")) {
        return;
    }
    let (pool, kept) = (config.index_kpool as u32, config.index_topk / config.index_kpool);
    let width = config.index_topk + config.index_kpool - 1;
    for (row, reference) in goldens.ints(&named("topk")).chunks_exact(width).enumerate() {
        let mut expected: Vec<u32> = reference.iter().filter_map(|p| u32::try_from(*p).ok()).collect();
        expected.sort_unstable();
        let picks = &seen.ids[&Point::Pools(layer)][row * kept..(row + 1) * kept];
        let end = row as u32 + 1;
        let pools = picks.iter().filter(|p| **p != u32::MAX).flat_map(|p| p * pool..(p + 1) * pool);
        let found: Vec<u32> = pools.chain(end / pool * pool..end).collect();
        assert_eq!(found, expected, "{} of row {row}", named("topk"));
    }
}

fn check_states(goldens: &Goldens, seen: &Collector, named: &dyn Fn(&str) -> String, layer: usize) {
    for (part, point) in [("kda_state", Point::KdaState(layer)), ("conv_state", Point::KdaWindow(layer))] {
        if goldens.has(&named(part)) {
            assert_close(&named(part), &seen.floats[&point], &goldens.floats(&named(part)), STREAMS);
        }
    }
}
