//! Clients that leave, send nonsense, send too much or come in crowds.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use flint_engine::testing::ToyLm;
use flint_server::ServerOptions;
use serde_json::{Value, json};
use support::{LIMITS, Server, agent, ask, endless, fault, frames, says};

const CHAT: &str = "/v1/chat/completions";

/// Opens a connection and sends a chat request by hand.
fn send(server: &Server, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut socket = TcpStream::connect(server.address).unwrap();
    let length = body.len();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    socket.write_all(head.as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    socket
}

fn slow() -> Server {
    Server::start(|chat| endless(chat, Duration::from_millis(3)))
}

#[test]
fn a_client_that_leaves_ends_its_request_in_both_modes() {
    let server = slow();
    for (gone, stream) in [(1, true), (2, false)] {
        let mut socket = send(&server, &json!({ "messages": ask("go"), "stream": stream }));
        if stream {
            let mut start = [0; 200];
            socket.read_exact(&mut start).unwrap();
        } else {
            server.wait("the reply is being computed", |status| status.running == 1);
        }
        drop(socket);
        let left =
            server.wait("the request is cancelled", |status| status.cancelled == gone && status.running == 0);
        std::thread::sleep(Duration::from_millis(20));
        assert!(server.status().rounds <= left.rounds + 1, "the engine goes on without a client");
    }
}

#[test]
fn a_crowd_that_vanishes_leaves_a_healthy_server() {
    let server = slow();
    let crowd: Vec<TcpStream> = (0..50)
        .map(|index| send(&server, &json!({ "messages": ask("go"), "stream": index % 2 == 0 })))
        .collect();
    server.wait("all are there", |status| status.running + status.waiting == 50);
    for socket in &crowd {
        socket.shutdown(Shutdown::Both).unwrap();
    }
    drop(crowd);
    server
        .wait("all are gone", |status| status.cancelled == 50 && status.running == 0 && status.waiting == 0);
    let (status, body) = server.get("/health");
    assert_eq!((status, &body["running"], &body["waiting"]), (200, &json!(0), &json!(0)));
    let (status, _) = server.post(CHAT, &json!({ "messages": ask("go"), "max_tokens": 3 }));
    assert_eq!(status, 200);
}

#[test]
fn replies_in_a_crowd_equal_the_same_replies_alone() {
    let server = Server::start(|chat| endless(chat, Duration::ZERO));
    let body = |seed: usize| json!({ "messages": ask(&"word ".repeat(seed)), "seed": seed, "max_tokens": 40, "temperature": 1 });
    let text = |answer: &Value| answer["choices"][0]["message"].to_string();
    let alone: Vec<String> = (0..12).map(|seed| text(&server.post(CHAT, &body(seed)).1)).collect();
    std::thread::scope(|scope| {
        for (seed, expected) in alone.iter().enumerate() {
            let (server, text, body) = (&server, &text, &body);
            scope.spawn(move || {
                for _ in 0..3 {
                    assert_eq!(&text(&server.post(CHAT, &body(seed)).1), expected, "seed {seed}");
                }
            });
        }
    });
}

#[test]
fn a_full_queue_is_answered_503() {
    let options = ServerOptions::default();
    let server = Server::start_with(|chat| endless(chat, Duration::from_millis(3)), options, 1);
    let crowd: Vec<TcpStream> = (0..5).map(|_| send(&server, &json!({ "messages": ask("go") }))).collect();
    server.wait("the queue is full", |status| status.running + status.waiting == 5);
    let (status, body) = server.post(CHAT, &json!({ "messages": ask("go") }));
    assert_eq!((status, fault(&body).1.as_str()), (503, "overloaded"));
    drop(crowd);
}

#[test]
fn a_failing_model_ends_the_stream_with_an_error_and_the_reply_with_a_500() {
    let fails = |_: &_| {
        let mut forwards = 0;
        ToyLm::new(LIMITS, 3).before_forward(Box::new(move |_| {
            forwards += 1;
            if forwards % 8 == 0 {
                return Err(flint_model::Error::Unsupported("the \"device\" is gone".into()));
            }
            Ok(())
        }))
    };
    let server = Server::start(fails);
    let body = json!({ "messages": ask("go"), "seed": 1, "stream": true, "logit_bias": stops(&server) });
    let (status, text) = server.post_text(CHAT, &body.to_string());
    let (frames, done) = frames(&text);
    assert_eq!((status, done), (200, false));
    let (last, before) = frames.split_last().unwrap();
    assert!(before.len() > 2 && last["error"]["message"].as_str().unwrap().contains("\"device\""), "{text}");
    let (status, body) =
        server.post(CHAT, &json!({ "messages": ask("go"), "seed": 1, "logit_bias": stops(&server) }));
    assert_eq!((status, fault(&body).1.as_str()), (500, "engine_failed"));
    assert_eq!(server.get("/health").0, 200);
}

/// Biases that keep a model from ending its reply.
fn stops(server: &Server) -> Value {
    server.chat.stop_tokens().iter().map(|token| (token.to_string(), json!(-100))).collect()
}

#[test]
fn a_dead_engine_is_not_healthy() {
    let server = Server::start(|_| ToyLm::new(LIMITS, 3).before_forward(Box::new(|_| panic!("a defect"))));
    let (status, _) = server.post(CHAT, &json!({ "messages": ask("go") }));
    assert_eq!(status, 500);
    let (status, body) = server.get("/health");
    assert_eq!((status, &body["status"]), (503, &json!("ended")));
    assert!(body["reason"].as_str().unwrap().contains("a defect"), "{body}");
}

#[test]
fn an_engine_that_stands_still_with_work_is_not_healthy() {
    let options = ServerOptions { stall: Duration::from_millis(50), ..ServerOptions::default() };
    let server = Server::start_with(|chat| endless(chat, Duration::from_secs(1)), options, 4);
    assert_eq!(server.get("/health").0, 200);
    let socket = send(&server, &json!({ "messages": ask("go"), "max_tokens": 1 }));
    server.wait("the request runs", |status| status.running == 1);
    std::thread::sleep(Duration::from_millis(100));
    let (status, body) = server.get("/health");
    assert_eq!((status, &body["status"]), (503, &json!("stalled")));
    drop(socket);
}

#[test]
fn a_body_over_the_limit_is_answered_413() {
    let options = ServerOptions { body_bytes: 1 << 20, ..ServerOptions::default() };
    let server = Server::start_with(|chat| says(chat, "a"), options, 4);
    for bytes in [(1 << 20) + 1, 20 << 20] {
        let (status, text) = server.post_text(CHAT, &"x".repeat(bytes));
        let body: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, fault(&body).1.as_str()), (413, "body_too_large"), "{bytes} bytes");
    }
    let padding = " ".repeat((1 << 20) - 60);
    let (status, text) = server.post_text(CHAT, &format!("{}{padding}", json!({ "messages": ask("a") })));
    assert_eq!(status, 200, "{text}");
}

#[test]
fn deeply_nested_json_is_refused_and_the_server_lives() {
    let server = Server::start(|chat| says(chat, "a"));
    for (open, close) in [("[", "]"), ("{\"x\":", "}")] {
        let depth = 100_000;
        let nested = format!("{{\"x\":{}1{}}}", open.repeat(depth), close.repeat(depth));
        let (status, text) = server.post_text(CHAT, &nested);
        let body: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, fault(&body).1.as_str()), (400, "invalid_json"));
    }
    assert_eq!(server.get("/health").0, 200);
}

#[test]
fn bodies_that_are_no_json_object_are_answered_400() {
    let server = Server::start(|chat| says(chat, "a"));
    for body in ["", "{", "[]", "null", "\"a\"", "{\"messages\":[}", "{\"a\":1}x", "\u{0}"] {
        assert_eq!(server.post_text(CHAT, body).0, 400, "{body:?}");
    }
    let request = agent().post(server.url(CHAT)).header("content-type", "application/json");
    let invalid_utf8: &[u8] = b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}";
    assert_eq!(request.send(invalid_utf8).unwrap().status().as_u16(), 400);
}

#[test]
fn only_json_is_taken_so_that_no_page_can_post_a_form() {
    let server = Server::start(|chat| says(chat, "a"));
    let body = json!({ "messages": ask("a") }).to_string();
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let response = agent().post(server.url(CHAT)).header("content-type", kind).send(&body).unwrap();
        assert_eq!(response.status().as_u16(), 415, "{kind}");
    }
    let request = agent().post(server.url(CHAT)).header("content-type", "application/json; charset=utf-8");
    assert_eq!(request.send(&body).unwrap().status().as_u16(), 200);
}

#[test]
fn another_sites_name_is_refused_and_no_origin_is_let_in() {
    let server = Server::start(|chat| says(chat, "a"));
    let response = agent().get(server.url("/v1/models")).header("host", "evil.example").call().unwrap();
    assert_eq!(response.status().as_u16(), 403);
    let response =
        agent().get(server.url("/v1/models")).header("origin", "https://evil.example").call().unwrap();
    assert!(response.headers().keys().all(|name| !name.as_str().starts_with("access-control")));
    let host = format!("localhost:{}", server.address.port());
    assert_eq!(
        agent().get(server.url("/v1/models")).header("host", &host).call().unwrap().status().as_u16(),
        200
    );
}

#[test]
fn a_shutdown_lets_a_running_reply_end() {
    let mut server = slow();
    let mut socket = send(&server, &json!({ "messages": ask("go"), "stream": true, "max_tokens": 60 }));
    server.wait("the reply runs", |status| status.running == 1);
    server.ask_to_stop();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    assert!(text.contains("data: [DONE]"), "{text}");
    server.join();
    assert!(TcpStream::connect(server.address).is_err(), "the door is closed");
}

#[test]
fn a_shutdown_cuts_replies_off_when_their_time_is_over() {
    let options = ServerOptions { drain: Duration::from_millis(50), ..ServerOptions::default() };
    let mut server = Server::start_with(|chat| endless(chat, Duration::from_millis(20)), options, 4);
    let socket = send(&server, &json!({ "messages": ask("go"), "stream": true }));
    server.wait("the reply runs", |status| status.running == 1);
    let asked = Instant::now();
    server.ask_to_stop();
    server.join();
    assert!(asked.elapsed() < Duration::from_secs(5));
    server.wait("the request is cancelled", |status| status.running == 0);
    drop(socket);
}
