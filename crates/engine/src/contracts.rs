//! The engine's contracts on a toy model, over thousands of random schedules: whatever arrives when, whoever leaves, however
//! few rows a forward has and whatever a drafter says, a reply is the one that its request gets alone.

use std::sync::{Arc, atomic::Ordering};

use flint_model::{LanguageModel, Limits};
use proptest::prelude::*;

use crate::{
    Drafter, EngineOptions, Error, Event, Events, FinishReason, Handle, Request, Sampling, Token,
    engine::Command,
    rounds::Rounds,
    testing::{Liar, ToyLm},
};

const LIMITS: Limits = Limits { vocabulary: 24, context: 60, rows: 40, drafts: 4, sequences: 6 };

/// An engine that moves only when told to.
struct Bench {
    handle: Handle,
    commands: flume::Receiver<Command>,
    rounds: Rounds,
    open: Arc<std::sync::atomic::AtomicUsize>,
}

impl Bench {
    fn new(model: ToyLm, options: EngineOptions, drafter: Option<Box<dyn Drafter>>) -> Self {
        let open = model.open_sequences();
        let (handle, commands) = Handle::new(&model, options);
        let rounds = Rounds::new(Box::new(model), drafter, handle.options(), handle.shared());
        Self { handle, commands, rounds, open }
    }

    fn submit(&mut self, request: &Request) -> Events {
        let events = self.handle.submit(request.clone()).unwrap();
        for command in self.commands.try_iter() {
            if let Command::Serve(job) = command {
                self.rounds.accept(*job);
            }
        }
        events
    }
}

/// A reply without its times.
#[derive(Clone, Debug, Default, PartialEq)]
struct Reply {
    tokens: Vec<Token>,
    end: Option<(Option<FinishReason>, String)>,
    completion_tokens: usize,
}

impl Reply {
    /// Everything that has arrived.
    fn collect(&mut self, events: &mut Events) {
        while let Ok(Some(event)) = events.recv_timeout(std::time::Duration::ZERO) {
            match event {
                Event::Started { .. } => assert!(self.tokens.is_empty(), "a reply starts once"),
                Event::Token(token) => self.tokens.push(token),
                Event::Finished { reason, usage } => {
                    self.completion_tokens = usage.completion_tokens;
                    self.end = Some((Some(reason), String::new()));
                }
                Event::Failed(error) => self.end = Some((None, error.to_string())),
            }
        }
    }

    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

/// The toy model; some contexts have no token to draw, so that failures are part of every schedule.
fn model(poisoned: bool) -> ToyLm {
    let toy = ToyLm::new(LIMITS, 99);
    if !poisoned {
        return toy;
    }
    toy.alter_rows(Box::new(|tokens, row| match tokens.iter().sum::<u32>() % 19 {
        0 => row[3] = f32::NAN,
        1 => row[5] = f32::INFINITY,
        2 => row[7] = f32::NEG_INFINITY,
        _ => {}
    }))
}

fn solo(request: &Request, poisoned: bool) -> Reply {
    let options = EngineOptions { rows_per_round: LIMITS.rows, parallel: 1, queue: 0 };
    let mut bench = Bench::new(model(poisoned), options, None);
    let mut events = bench.submit(request);
    let mut reply = Reply::default();
    while !bench.rounds.is_idle() {
        bench.rounds.round();
    }
    reply.collect(&mut events);
    reply
}

#[derive(Clone, Debug)]
struct Client {
    request: Request,
    arrives: usize,
    /// Rounds after its arrival at which it leaves.
    leaves: Option<usize>,
}

fn any_sampling() -> impl Strategy<Value = Sampling> {
    let temperature = prop_oneof![Just(0.0_f32), Just(-0.0), Just(0.3), Just(1.0), Just(3.0)];
    let top_p = prop_oneof![3 => Just(1.0_f32), 1 => Just(0.0), 2 => 0.2..1.0_f32];
    let top_k = prop_oneof![2 => Just(0_usize), 1 => 1..10_usize];
    let min_p = prop_oneof![2 => Just(0.0_f32), 1 => 0.0..0.5_f32];
    let penalties = prop_oneof![
        2 => Just((1.0_f32, 0.0_f32, 0.0_f32)),
        2 => (0.5..2.0_f32, -2.0..2.0_f32, -2.0..2.0_f32),
    ];
    let bias = prop_oneof![
        2 => Just(Vec::new()),
        1 => prop::collection::btree_map(0..24_u32, -9.0..9.0_f32, 0..4).prop_map(|map| map.into_iter().collect()),
    ];
    (temperature, top_p, top_k, min_p, penalties, bias, any::<u64>()).prop_map(
        |(temperature, top_p, top_k, min_p, penalties, logit_bias, seed)| Sampling {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty: penalties.0,
            presence_penalty: penalties.1,
            frequency_penalty: penalties.2,
            logit_bias,
            seed,
        },
    )
}

fn any_client() -> impl Strategy<Value = Client> {
    // A small alphabet makes shared prefixes; stop tokens are common enough to be met.
    let prompt = prop_oneof![prop::collection::vec(0..3_u32, 1..5), prop::collection::vec(0..24_u32, 1..45)];
    let max_tokens = prop_oneof![Just(None), (1..16_usize).prop_map(Some)];
    let stop_tokens = prop::collection::vec(0..30_u32, 0..3);
    let logprobs = prop_oneof![2 => Just(None), 1 => (0..6_usize).prop_map(Some)];
    let leaves = prop_oneof![3 => Just(None), 1 => (0..12_usize).prop_map(Some)];
    (prompt, max_tokens, stop_tokens, any_sampling(), logprobs, 0..10_usize, leaves).prop_map(
        |(prompt, max_tokens, stop_tokens, sampling, logprobs, arrives, leaves)| Client {
            request: Request { prompt, max_tokens, stop_tokens, sampling, logprobs },
            arrives,
            leaves,
        },
    )
}

fn any_options() -> impl Strategy<Value = EngineOptions> {
    (1..50_usize, 1..8_usize).prop_map(|(rows_per_round, parallel)| EngineOptions {
        rows_per_round,
        parallel,
        queue: 100,
    })
}

/// Runs a schedule to its end, and checks what must hold at any end. Returns the reply and whether its client left early.
fn run(mut bench: Bench, clients: &[Client]) -> (Vec<(Reply, bool)>, Bench) {
    let mut replies = vec![(Reply::default(), false); clients.len()];
    let mut waiting: Vec<Option<Events>> = clients.iter().map(|_| None).collect();
    for round in 0..5000 {
        for (index, client) in clients.iter().enumerate() {
            if client.arrives == round {
                waiting[index] = Some(bench.submit(&client.request));
            }
            if client.leaves.is_some_and(|after| client.arrives + after == round)
                && let Some(events) = waiting[index].take()
            {
                drop(events);
                replies[index].1 = replies[index].0.end.is_none();
            }
        }
        bench.rounds.round();
        for (events, reply) in waiting.iter_mut().zip(&mut replies) {
            if let Some(events) = events {
                reply.0.collect(events);
            }
        }
        if round > 30 && bench.rounds.is_idle() {
            break;
        }
    }
    let status = bench.handle.status();
    assert_eq!((status.running, status.waiting), (0, 0), "gauges return to zero");
    assert_eq!(bench.open.load(Ordering::SeqCst), 0, "every sequence is closed");
    assert_eq!(status.finished + status.failed + status.cancelled, clients.len() as u64);
    assert_eq!(status.cancelled, replies.iter().filter(|(_, left)| *left).count() as u64);
    (replies, bench)
}

fn assert_as_alone(clients: &[Client], replies: &[(Reply, bool)], poisoned: bool) {
    for (client, (reply, left)) in clients.iter().zip(replies) {
        let alone = solo(&client.request, poisoned);
        if *left {
            assert!(
                alone.tokens.starts_with(&reply.tokens),
                "the start of {client:?}: {reply:?} alone: {alone:?}"
            );
        } else {
            assert_eq!(reply, &alone, "{client:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn concurrent_is_solo(
        clients in prop::collection::vec(any_client(), 1..10),
        options in any_options(),
        poisoned in any::<bool>(),
    ) {
        let (replies, _) = run(Bench::new(model(poisoned), options, None), &clients);
        assert_as_alone(&clients, &replies, poisoned);
    }

    #[test]
    fn drafted_is_plain(
        clients in prop::collection::vec(any_client(), 1..8),
        options in any_options(),
        poisoned in any::<bool>(),
        lies in any::<u64>(),
    ) {
        let texts = clients.iter()
            .map(|client| [client.request.prompt.clone(), solo(&client.request, poisoned).ids()].concat())
            .collect();
        let liar = Liar::new(lies, texts);
        let (replies, _) = run(Bench::new(model(poisoned), options, Some(Box::new(liar))), &clients);
        assert_as_alone(&clients, &replies, poisoned);
    }

    #[test]
    fn a_failed_forward_fails_its_requests_and_no_other(
        clients in prop::collection::vec(any_client(), 1..8),
        options in any_options(),
        fails_at in 0..30_usize,
    ) {
        let mut forward = 0;
        let model = ToyLm::new(LIMITS, 99).before_forward(Box::new(move |_| {
            forward += 1;
            if forward == fails_at + 1 {
                return Err(flint_model::Error::Unsupported("the device is gone".to_owned()));
            }
            Ok(())
        }));
        let (replies, _) = run(Bench::new(model, options, None), &clients);
        for (client, (reply, left)) in clients.iter().zip(&replies) {
            let alone = solo(&client.request, false);
            match &reply.end {
                Some((None, message)) => {
                    prop_assert_eq!(message, "the model failed: the device is gone");
                    prop_assert!(alone.tokens.starts_with(&reply.tokens));
                }
                _ if *left => {}
                _ => prop_assert_eq!(reply, &alone),
            }
        }
    }
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        max_tokens: Some(max_tokens),
        stop_tokens: Vec::new(),
        sampling: Sampling::greedy(),
        logprobs: None,
    }
}

fn client(prompt: &[u32], max_tokens: usize, arrives: usize) -> Client {
    Client { request: request(prompt, max_tokens), arrives, leaves: None }
}

#[test]
fn true_drafts_take_fewer_rounds() {
    let request = request(&[1, 2, 3], 20);
    let text = [request.prompt.clone(), solo(&request, false).ids()].concat();
    let options = EngineOptions::default();
    let drafter = |seed| Some(Box::new(Liar::new(seed, vec![text.clone()])) as Box<dyn Drafter>);
    let clients = [Client { request, arrives: 0, leaves: None }];
    let (_, plain) = run(Bench::new(model(false), options, None), &clients);
    let plain = plain.handle.status();
    assert_eq!((plain.rounds, plain.drafted, plain.accepted), (20, 0, 0));
    let mut rejected = 0;
    for seed in 0..10 {
        let (_, drafted) = run(Bench::new(model(false), options, drafter(seed)), &clients);
        let drafted = drafted.handle.status();
        assert!(drafted.rounds < 18, "{drafted:?}");
        assert_eq!(drafted.emitted, 20);
        assert_eq!(drafted.rounds + drafted.accepted, 20, "a round emits one token more than it accepts");
        rejected += drafted.drafted - drafted.accepted;
    }
    assert!(rejected > 10, "the drafter lies: {rejected}");
}

#[test]
fn the_last_token_of_a_reply_needs_no_draft() {
    let request = request(&[1, 2, 3], 2);
    let text = [request.prompt.clone(), solo(&request, false).ids()].concat();
    for seed in 0..10 {
        let drafter = Box::new(Liar::new(seed, vec![text.clone()]));
        let clients = [Client { request: request.clone(), arrives: 0, leaves: None }];
        let (_, bench) = run(Bench::new(model(false), EngineOptions::default(), Some(drafter)), &clients);
        assert_eq!((bench.handle.status().drafted, bench.handle.status().rows), (0, 4));
    }
}

#[test]
fn running_replies_get_a_token_every_round_while_a_long_prompt_is_read() {
    let options = EngineOptions { rows_per_round: 4, parallel: 3, queue: 9 };
    let mut bench = Bench::new(model(false), options, None);
    let mut short = bench.submit(&request(&[1], 20));
    bench.rounds.round();
    let _long = bench.submit(&request(&[2; 40], 5));
    let mut reply = Reply::default();
    reply.collect(&mut short);
    for round in 0..10 {
        assert_eq!(reply.tokens.len(), 1 + round);
        bench.rounds.round();
        reply.collect(&mut short);
    }
}

#[test]
fn a_prompt_is_read_in_as_few_forwards_as_the_budget_allows() {
    let options = EngineOptions { rows_per_round: 10, parallel: 3, queue: 9 };
    let (_, bench) = run(Bench::new(model(false), options, None), &[client(&[1; 31], 1, 0)]);
    assert_eq!((bench.handle.status().rounds, bench.handle.status().rows), (4, 31));
}

#[test]
fn requests_beyond_the_queue_are_refused_with_numbers_until_a_place_is_free() {
    let options = EngineOptions { rows_per_round: 10, parallel: 1, queue: 1 };
    let mut bench = Bench::new(model(false), options, None);
    let mut first = bench.submit(&request(&[1], 1));
    let _second = bench.submit(&request(&[1], 1));
    let error = bench.handle.submit(request(&[1], 1)).unwrap_err();
    assert!(matches!(error, Error::Busy { in_flight: 2, limit: 2 }), "{error}");
    bench.rounds.round();
    let mut reply = Reply::default();
    reply.collect(&mut first);
    assert!(reply.end.is_some());
    bench.submit(&request(&[1], 1));
}

#[test]
fn options_are_bounded_by_the_model_and_the_effective_ones_are_seen() {
    let asked = EngineOptions { rows_per_round: 1000, parallel: 1000, queue: 3 };
    let bench = Bench::new(model(false), asked, None);
    assert_eq!(bench.handle.options(), EngineOptions { rows_per_round: 40, parallel: 6, queue: 3 });
    let none = EngineOptions { rows_per_round: 0, parallel: 0, queue: 0 }.within(&LIMITS);
    assert_eq!(none, EngineOptions { rows_per_round: 1, parallel: 1, queue: 0 });
    let narrow = EngineOptions { rows_per_round: 2, parallel: 6, queue: 0 }.within(&LIMITS);
    assert_eq!(narrow.parallel, 2, "every running request has a row");
}

#[test]
fn a_sequence_that_cannot_be_opened_fails_its_request_only() {
    let mut full = model(false);
    for _ in 0..LIMITS.sequences - 1 {
        full.open().unwrap();
    }
    let options = EngineOptions { rows_per_round: 40, parallel: 2, queue: 9 };
    let mut bench = Bench::new(full, options, None);
    let mut first = bench.submit(&request(&[1], 3));
    let mut second = bench.submit(&request(&[2], 3));
    for _ in 0..3 {
        bench.rounds.round();
    }
    let mut replies = [Reply::default(), Reply::default()];
    replies[0].collect(&mut first);
    replies[1].collect(&mut second);
    assert_eq!(replies[0], solo(&request(&[1], 3), false));
    assert!(replies[1].end.as_ref().is_some_and(|end| end.1.contains("open sequences: 7 asked for")));
}

#[test]
fn a_stop_token_is_counted_and_not_sent() {
    let plain = solo(&request(&[1, 2], 10), false);
    let at = (1..10).find(|at| !plain.ids()[..*at].contains(&plain.ids()[*at])).unwrap();
    let stop = plain.ids()[at];
    let stopped = solo(&Request { stop_tokens: vec![77, stop], ..request(&[1, 2], 10) }, false);
    assert_eq!(stopped.tokens, plain.tokens[..at]);
    assert_eq!(stopped.end.unwrap().0, Some(FinishReason::StopToken(stop)));
    assert_eq!(stopped.completion_tokens, at + 1);
    assert_eq!((plain.end.unwrap().0, plain.completion_tokens), (Some(FinishReason::Length), 10));
}

#[test]
fn a_reply_may_fill_the_context_to_its_last_token() {
    let open_ended = Request { max_tokens: None, ..request(&[1; 50], 1) };
    let reply = solo(&open_ended, false);
    assert_eq!(reply.tokens.len(), 10);
    assert_eq!(reply.end.unwrap().0, Some(FinishReason::Length));
}
