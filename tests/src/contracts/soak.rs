//! Many requests that come, go and leave early: replies stay the same, memory stays flat.

use flint_engine::{Engine, EngineOptions, Event, Handle, Request, Sampling};
use flint_model::LanguageModel;

use crate::feeding::Dice;

/// Requests of a round.
const REQUESTS: usize = 200;
/// Memory that a round may keep: what a pool grows by when rows meet in another way.
const KEPT: usize = 64 << 20;

/// A request, and after how many tokens its client leaves.
struct Client {
    request: Request,
    leaves_after: Option<usize>,
}

/// Serves 200 requests of mixed lengths and rules three times in different orders; clients of a third of them leave
/// early. Every reply must be the same each time, and `free` (the device's free bytes) must not sink after the second
/// time. Returns what to say.
pub fn soak(model: Box<dyn LanguageModel>, options: EngineOptions, free: impl Fn() -> usize) -> String {
    let mut dice = Dice::new(77);
    let vocabulary = model.limits().vocabulary;
    let clients: Vec<Client> = (0..REQUESTS).map(|index| client(&mut dice, vocabulary, index)).collect();
    let engine = Engine::start(model, EngineOptions { queue: REQUESTS, ..options });
    let handle = engine.handle();
    let order: Vec<usize> = (0..REQUESTS).collect();
    let expected = round(&handle, &clients, &order);
    let mut shuffled: Vec<usize> = order.iter().rev().copied().collect();
    assert!(
        round(&handle, &clients, &shuffled) == expected,
        "the same replies when requests come in reverse"
    );
    let before = free();
    shuffled.sort_by_key(|index| index * 37 % REQUESTS);
    assert!(round(&handle, &clients, &shuffled) == expected, "the same replies in a third order");
    let kept = before.saturating_sub(free());
    engine.shutdown();
    assert!(kept <= KEPT, "{REQUESTS} requests took {kept} bytes that they did not give back");
    let tokens: usize = expected.iter().map(Vec::len).sum();
    format!("{REQUESTS} requests, {tokens} tokens, three times; {kept} bytes kept")
}

fn client(dice: &mut Dice, vocabulary: usize, index: usize) -> Client {
    let length = if dice.below(5) == 0 { 200 + dice.below(200) } else { 1 + dice.below(60) };
    let drawn = Sampling { temperature: 0.9, top_p: 0.95, seed: index as u64, ..Sampling::greedy() };
    let max_tokens = 1 + dice.below(40);
    Client {
        request: Request {
            prompt: dice.tokens(length, vocabulary),
            max_tokens: Some(max_tokens),
            stop_tokens: Vec::new(),
            sampling: if dice.below(2) == 0 { Sampling::greedy() } else { drawn },
            logprobs: (dice.below(6) == 0).then_some(3),
        },
        leaves_after: (dice.below(3) == 0).then(|| dice.below(max_tokens)),
    }
}

/// The tokens that each client saw, by client, when they come in `order`.
fn round(handle: &Handle, clients: &[Client], order: &[usize]) -> Vec<Vec<u32>> {
    let running: Vec<_> =
        order.iter().map(|&index| (index, handle.submit(clients[index].request.clone()).unwrap())).collect();
    let mut seen = vec![Vec::new(); clients.len()];
    for (index, mut events) in running {
        let most = clients[index].leaves_after.unwrap_or(usize::MAX);
        while seen[index].len() < most {
            match events.recv() {
                Some(Event::Token(token)) => seen[index].push(token.id),
                Some(Event::Failed(error)) => panic!("request {index}: {error}"),
                Some(_) => {}
                None => break,
            }
        }
    }
    seen
}
