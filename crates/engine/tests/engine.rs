//! The engine's thread: cancellation, failures, panics, shutdown. Hooks hold the model at known places, so nothing sleeps.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use flint_engine::{
    Engine, EngineOptions, Error, Event, Events, FinishReason, Request, Sampling, testing::ToyLm,
};
use flint_model::{Batch, Limits};

const LIMITS: Limits = Limits { vocabulary: 32, context: 400, rows: 64, drafts: 4, sequences: 8 };

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        max_tokens: Some(max_tokens),
        stop_tokens: Vec::new(),
        sampling: Sampling::greedy(),
        logprobs: None,
    }
}

/// The reply's tokens, and the event that ends it.
fn tokens(events: &mut Events) -> (Vec<u32>, Event) {
    let mut tokens = Vec::new();
    loop {
        let event = events.recv().unwrap_or(Event::Started { prompt_tokens: usize::MAX });
        match event {
            Event::Started { prompt_tokens } => assert!(prompt_tokens < usize::MAX, "the events have no end"),
            Event::Token(token) => tokens.push(token.id),
            end => return (tokens, end),
        }
    }
}

/// A model that stops before each forward until it is let on.
struct Gate {
    entered: flume::Receiver<usize>,
    go: flume::Sender<()>,
}

fn gated() -> (ToyLm, Gate) {
    let (enter, entered) = flume::unbounded();
    let (go, wait) = flume::unbounded();
    let toy = ToyLm::new(LIMITS, 1).before_forward(Box::new(move |batch: &Batch| {
        let _ = enter.send(batch.spans.len());
        let _ = wait.recv();
        Ok(())
    }));
    (toy, Gate { entered, go })
}

#[test]
fn a_reply_comes_as_events_in_order() {
    let engine = Engine::start(Box::new(ToyLm::new(LIMITS, 1)), EngineOptions::default());
    let mut events = engine.handle().submit(request(&[1, 2, 3], 5)).unwrap();
    assert!(matches!(events.recv(), Some(Event::Started { prompt_tokens: 3 })));
    for _ in 0..5 {
        assert!(matches!(events.recv(), Some(Event::Token(_))));
    }
    let Some(Event::Finished { reason: FinishReason::Length, usage }) = events.recv() else {
        panic!("finished")
    };
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (3, 5));
    assert!(usage.queue_seconds >= 0.0 && usage.prefill_seconds >= 0.0 && usage.decode_seconds >= 0.0);
    assert!(events.recv().is_none() && events.recv().is_none());
    assert_eq!(events.recv_timeout(Duration::ZERO).map(|event| event.is_none()), Ok(true));
}

#[test]
fn dropping_the_events_stops_the_work_within_one_forward() {
    let (toy, gate) = gated();
    let open = toy.open_sequences();
    let engine = Engine::start(Box::new(toy), EngineOptions::default());
    let handle = engine.handle();
    let leaving = handle.submit(request(&[1; 300], 50)).unwrap();
    assert_eq!(gate.entered.recv(), Ok(1));
    let mut staying = handle.submit(request(&[2], 3)).unwrap();
    gate.go.send(()).unwrap();
    assert_eq!(gate.entered.recv(), Ok(2), "both run");
    drop(leaving);
    gate.go.send(()).unwrap();
    assert_eq!(gate.entered.recv(), Ok(1), "the forward after it is without the one that left");
    assert_eq!(open.load(Ordering::SeqCst), 1);
    assert_eq!(handle.status().cancelled, 1);
    drop(gate);
    assert_eq!(tokens(&mut staying).0.len(), 3);
    let status = handle.status();
    assert_eq!((status.running, status.waiting, status.finished), (0, 0, 1));
}

#[test]
fn fifty_clients_that_vanish_leave_an_engine_that_works() {
    let (toy, gate) = gated();
    let open = toy.open_sequences();
    let engine = Engine::start(Box::new(toy), EngineOptions::default());
    let handle = engine.handle();
    let clients: Vec<Events> = (0..50).map(|i| handle.submit(request(&[i % 32; 40], 300)).unwrap()).collect();
    gate.entered.recv().unwrap();
    let before = handle.status();
    assert_eq!(before.running + before.waiting, 50);
    drop(clients);
    drop(gate);
    assert_eq!(tokens(&mut handle.submit(request(&[3], 4)).unwrap()).0.len(), 4);
    let status = handle.status();
    assert_eq!((status.running, status.waiting, status.cancelled, status.finished), (0, 0, 50, 1));
    assert!(status.last_progress > before.last_progress);
    assert_eq!(open.load(Ordering::SeqCst), 0);
}

#[test]
fn shutdown_ends_every_request_after_the_running_forward() {
    let (toy, gate) = gated();
    let engine = Engine::start(Box::new(toy), EngineOptions { parallel: 1, ..EngineOptions::default() });
    let handle = engine.handle();
    let mut running = handle.submit(request(&[1; 300], 50)).unwrap();
    let mut waiting = handle.submit(request(&[1], 1)).unwrap();
    gate.entered.recv().unwrap();
    let stopping = std::thread::spawn(move || engine.shutdown());
    while handle.status().ended.is_none() {
        std::thread::yield_now();
    }
    assert!(matches!(handle.submit(request(&[1], 1)), Err(Error::Stopped)), "nobody new while it stops");
    gate.go.send(()).unwrap();
    stopping.join().unwrap();
    assert_eq!(handle.status().rounds, 1);
    for events in [&mut running, &mut waiting] {
        assert!(matches!(tokens(events).1, Event::Failed(Error::Stopped)));
    }
    assert!(matches!(handle.submit(request(&[1], 1)), Err(Error::Stopped)));
    let status = handle.status();
    assert_eq!((status.running, status.waiting), (0, 0));
    assert!(matches!(status.ended, Some(Error::Stopped)));
}

#[test]
fn a_panic_in_the_model_is_reported_and_hangs_nobody() {
    let mut forward = 0;
    let toy = ToyLm::new(LIMITS, 1).before_forward(Box::new(move |_| {
        forward += 1;
        assert!(forward < 3, "a kernel went wrong");
        Ok(())
    }));
    let engine = Engine::start(Box::new(toy), EngineOptions { parallel: 2, ..EngineOptions::default() });
    let handle = engine.handle();
    let mut all: Vec<Events> = (0..5).filter_map(|_| handle.submit(request(&[1], 30)).ok()).collect();
    assert!(!all.is_empty());
    for events in &mut all {
        let (tokens, end) = tokens(events);
        assert!(tokens.len() <= 2);
        let Event::Failed(error @ Error::Dead { .. }) = end else { panic!("{end:?}") };
        assert!(error.to_string().contains("a kernel went wrong"), "{error}");
    }
    assert!(matches!(handle.submit(request(&[1], 1)), Err(Error::Dead { .. })));
    let status = handle.status();
    assert!(status.ended.is_some());
    assert_eq!((status.running, status.waiting), (0, 0));
    engine.shutdown();
}

#[test]
fn a_forward_that_fails_ends_its_requests_and_the_next_ones_run() {
    let mut forward = 0;
    let toy = ToyLm::new(LIMITS, 1).before_forward(Box::new(move |_| {
        forward += 1;
        if forward == 2 { Err(flint_model::Error::Unsupported("no memory".to_owned())) } else { Ok(()) }
    }));
    let open = toy.open_sequences();
    let engine = Engine::start(Box::new(toy), EngineOptions::default());
    let handle = engine.handle();
    let (sent, end) = tokens(&mut handle.submit(request(&[1], 30)).unwrap());
    assert_eq!(sent.len(), 1);
    assert!(matches!(end, Event::Failed(Error::Model(_))));
    assert_eq!(tokens(&mut handle.submit(request(&[1], 30)).unwrap()).0.len(), 30);
    assert_eq!((handle.status().failed, open.load(Ordering::SeqCst)), (1, 0));
}

#[test]
fn a_row_of_nan_ends_its_request_and_the_neighbour_goes_on() {
    let (enter, entered) = flume::unbounded();
    let (go, wait) = flume::unbounded::<()>();
    let toy = ToyLm::new(LIMITS, 1)
        .before_forward(Box::new(move |batch| {
            let _ = enter.send(batch.spans.len());
            let _ = wait.recv();
            Ok(())
        }))
        .alter_rows(Box::new(|tokens, row| {
            if tokens[0] == 7 && tokens.len() == 4 {
                row[0] = f32::NAN;
            }
        }));
    let engine = Engine::start(Box::new(toy), EngineOptions::default());
    let handle = engine.handle();
    let mut ill = handle.submit(request(&[7, 1], 30)).unwrap();
    entered.recv().unwrap();
    let mut well = handle.submit(request(&[8, 1], 30)).unwrap();
    drop(go);
    let (sent, end) = tokens(&mut ill);
    assert_eq!(sent.len(), 2);
    assert!(matches!(end, Event::Failed(Error::Logits { position: 4, .. })), "{end:?}");
    let (sent, end) = tokens(&mut well);
    assert_eq!(sent.len(), 30);
    assert!(matches!(end, Event::Finished { .. }));
}

#[test]
fn a_model_that_returns_too_few_logits_fails_its_requests_by_name() {
    struct Short(ToyLm);
    impl flint_model::LanguageModel for Short {
        fn limits(&self) -> Limits {
            self.0.limits()
        }
        fn arithmetic_id(&self) -> &str {
            self.0.arithmetic_id()
        }
        fn open(&mut self) -> flint_model::Result<flint_model::SequenceId> {
            self.0.open()
        }
        fn length(&self, sequence: flint_model::SequenceId) -> flint_model::Result<usize> {
            self.0.length(sequence)
        }
        fn forward(&mut self, batch: &Batch) -> flint_model::Result<flint_model::Logits> {
            self.0.forward(batch).map(|mut logits| {
                logits.values.pop();
                logits
            })
        }
        fn commit(&mut self, sequence: flint_model::SequenceId, accepted: usize) -> flint_model::Result<()> {
            self.0.commit(sequence, accepted)
        }
        fn close(&mut self, sequence: flint_model::SequenceId) -> flint_model::Result<()> {
            self.0.close(sequence)
        }
        fn save(&mut self, sequence: flint_model::SequenceId) -> flint_model::Result<Vec<u8>> {
            self.0.save(sequence)
        }
        fn load(&mut self, saved: &[u8]) -> flint_model::Result<flint_model::SequenceId> {
            self.0.load(saved)
        }
    }
    let engine = Engine::start(Box::new(Short(ToyLm::new(LIMITS, 1))), EngineOptions::default());
    // A greedy request sees the best logits alone, one with log-probabilities the whole rows.
    for (logprobs, found) in
        [(None, "the best logits of 0 rows"), (Some(0), "31 logits for a vocabulary of 32")]
    {
        let asked = flint_engine::Request { logprobs, ..request(&[1], 3) };
        let (_, end) = tokens(&mut engine.handle().submit(asked).unwrap());
        let Event::Failed(error @ Error::Broken { .. }) = end else { panic!("{end:?}") };
        assert!(error.to_string().contains(found), "{error}");
    }
}

#[test]
fn many_threads_get_the_replies_that_they_get_alone() {
    let start = || {
        Engine::start(
            Box::new(ToyLm::new(LIMITS, 1)),
            EngineOptions { rows_per_round: 9, parallel: 4, queue: 99 },
        )
    };
    let alone: Vec<Vec<u32>> = (0..24)
        .map(|index| {
            let engine = start();
            tokens(&mut engine.handle().submit(request(&[index; 20], 25)).unwrap()).0
        })
        .collect();
    let engine = start();
    let alone = Arc::new(alone);
    let threads: Vec<_> = (0..24_u32)
        .map(|index| {
            let (handle, alone) = (engine.handle(), Arc::clone(&alone));
            std::thread::spawn(move || {
                for _ in 0..4 {
                    let mut events = handle.submit(request(&[index; 20], 25)).unwrap();
                    assert_eq!(tokens(&mut events).0, alone[index as usize]);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(engine.handle().status().finished, 96);
}

#[test]
fn events_can_be_awaited() {
    let engine = Engine::start(Box::new(ToyLm::new(LIMITS, 1)), EngineOptions::default());
    let mut events = engine.handle().submit(request(&[1], 3)).unwrap();
    let mut count = 0;
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    loop {
        let mut next = std::pin::pin!(events.recv_async());
        let event = loop {
            if let std::task::Poll::Ready(event) = next.as_mut().poll(&mut context) {
                break event;
            }
            std::thread::yield_now();
        };
        match event {
            Some(_) => count += 1,
            None => break,
        }
    }
    assert_eq!(count, 5, "started, three tokens, finished");
}
