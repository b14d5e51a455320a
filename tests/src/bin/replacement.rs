//! Which expert should leave? The share of uses that each rule finds in its slots, on traces of the trained toy model
//! (every layer, prompts of the panel with their greedy replies) and on synthetic skewed ones of the release's size.
//!
//! `cargo run --release -p flint-contracts --bin replacement`

#![allow(clippy::unwrap_used, clippy::print_stdout)] // a measurement for people

use flint_contracts::contracts::panel_prompts;
use flint_contracts::feeding::Dice;
use flint_contracts::{Tiny, cpu, load};
use flint_cpu::Arithmetic;
use flint_model::bank::replace::{Replacement, hit_rate};
use flint_model::probe::{Point, Probe, Seen};
use flint_model::{Batch, LanguageModel, Span, Want};

/// Prompts of the panel that are recorded, and tokens of each reply.
const PROMPTS: usize = 40;
const REPLY: usize = 96;

/// One layer's forwards: the experts of each.
type Trace = Vec<Vec<usize>>;

fn main() {
    let rules = [
        ("least recent", Replacement::LeastRecent),
        ("least frequent, 8", Replacement::LeastFrequent { half_life: 8.0 }),
        ("least frequent, 32", Replacement::LeastFrequent { half_life: 32.0 }),
        ("least frequent, 64", Replacement::LeastFrequent { half_life: 64.0 }),
        ("least frequent, 128", Replacement::LeastFrequent { half_life: 128.0 }),
        ("least frequent, 512", Replacement::LeastFrequent { half_life: 512.0 }),
    ];
    let (experts, layers) = recorded();
    println!("flint-tiny: {} layers, {experts} experts, {} forwards", layers.len(), layers[0].len());
    table(&rules, experts, &[4, 8, 12, 16], &layers);
    for (name, repeats, drift) in [("steady", 0.0, 0), ("local", 0.5, 0), ("local, drifting", 0.5, 400)] {
        println!("synthetic, {name}: 288 experts, 8 a token, 4000 tokens");
        let layers: Vec<Trace> = (0..4).map(|seed| synthetic(seed, repeats, drift)).collect();
        table(&rules, 288, &[16, 36, 72, 144], &layers);
    }
}

/// Hit rates over the second half of each trace, without and with the first half as a profile.
fn table(rules: &[(&str, Replacement)], experts: usize, slots: &[usize], layers: &[Trace]) {
    print!("{:<34}", "slots");
    for slots in slots {
        print!("{slots:>8}");
    }
    println!();
    for profile in [false, true] {
        for (name, rule) in rules {
            print!("{:<34}", format!("{name}{}", if profile { ", profile" } else { "" }));
            for &slots in slots {
                let rate = |trace: &Trace| {
                    let (before, after) = trace.split_at(trace.len() / 2);
                    let mut usage = vec![0; if profile { experts } else { 0 }];
                    if profile {
                        before.iter().flatten().for_each(|expert| usage[*expert] += 1);
                    }
                    hit_rate(*rule, experts, slots, &usage, after)
                };
                let mean = layers.iter().map(rate).sum::<f64>() / layers.len() as f64;
                print!("{:>7.1}%", mean * 100.0);
            }
            println!();
        }
    }
}

/// What the router picked, by layer.
struct Recorder {
    layers: Vec<Trace>,
    experts_per_token: usize,
}

impl Probe for Recorder {
    fn wants(&self, point: Point) -> bool {
        matches!(point, Point::Picks(_))
    }

    fn take(&mut self, point: Point, seen: Seen) {
        let (Point::Picks(layer), Seen::Ids(picks)) = (point, seen) else { return };
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, Vec::new());
        }
        debug_assert_eq!(picks.len() % self.experts_per_token, 0);
        let mut experts: Vec<usize> = picks.into_iter().map(|pick| pick as usize).collect();
        experts.sort_unstable();
        experts.dedup();
        self.layers[layer].push(experts);
    }
}

fn recorded() -> (usize, Vec<Trace>) {
    let mut model = load(Tiny::Trained, cpu(Arithmetic::Lanes, 2));
    let config = model.config().clone();
    let mut recorder = Recorder { layers: Vec::new(), experts_per_token: config.experts_per_token };
    for prompt in panel_prompts().into_iter().take(PROMPTS) {
        let sequence = model.open().unwrap();
        let mut sure = prompt;
        for _ in 0..REPLY {
            let spans = vec![Span { sequence, sure, drafts: Vec::new(), want: Want::Next }];
            let logits = model.forward_probed(&Batch { spans }, &mut recorder).unwrap();
            model.commit(sequence, 0).unwrap();
            let best = logits.row(0).iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            sure = vec![best as u32];
        }
        model.close(sequence).unwrap();
    }
    let layers = recorder.layers.into_iter().filter(|layer| !layer.is_empty()).collect();
    (config.experts, layers)
}

/// Tokens that repeat some of the last one's experts and draw the others by a skewed law, whose order may drift.
fn synthetic(seed: u64, repeats: f64, drift: usize) -> Trace {
    const EXPERTS: usize = 288;
    let mut dice = Dice::new(100 + seed);
    let mut chance = move || dice.below(1 << 20) as f64 / f64::from(1 << 20);
    let mut order: Vec<usize> = (0..EXPERTS).collect();
    (1..EXPERTS).for_each(|last| order.swap(last, (chance() * (last + 1) as f64) as usize));
    let weights: Vec<f64> = (1..=EXPERTS).map(|rank| (rank as f64).powf(-0.8)).collect();
    let all: f64 = weights.iter().sum();
    let mut trace: Trace = Vec::new();
    for token in 0..4000 {
        if drift > 0 && token % drift == drift - 1 {
            (0..EXPERTS / 4).for_each(|_| {
                let (a, b) = ((chance() * EXPERTS as f64) as usize, (chance() * EXPERTS as f64) as usize);
                order.swap(a, b);
            });
        }
        let mut picks: Vec<usize> = Vec::new();
        if let Some(last) = trace.last() {
            picks.extend(last.iter().filter(|_| chance() < repeats));
        }
        while picks.len() < 8 {
            let mut left = chance() * all;
            let rank = weights.iter().position(|weight| {
                left -= weight;
                left <= 0.0
            });
            let pick = order[rank.unwrap_or(0)];
            if !picks.contains(&pick) {
                picks.push(pick);
            }
        }
        trace.push(picks);
    }
    trace
}
