//! A real server on a loopback port, over a model without weights and flint-tiny's own tokenizer and template.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests; each test file uses its part"
)]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use flint_chat::{ChatFiles, ChatFormat};
use flint_engine::testing::ToyLm;
use flint_engine::{Engine, EngineOptions, Handle, Status};
use flint_model::Limits;
use flint_server::{ServerOptions, ServerState};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// Sizes of the model without weights; the vocabulary is flint-tiny's.
pub(crate) const LIMITS: Limits =
    Limits { vocabulary: 5120, context: 600, rows: 64, drafts: 0, sequences: 4 };

/// A running server.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) chat: Arc<ChatFormat>,
    engine: Option<Engine>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// flint-tiny's tokenizer and template.
pub(crate) fn chat_format() -> ChatFormat {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flint-tiny");
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let template = String::from_utf8(read("chat_template.jinja")).unwrap();
    ChatFormat::open(&ChatFiles {
        tokenizer_json: &read("tokenizer.json"),
        chat_template: Some(&template),
        tokenizer_config: Some(&read("tokenizer_config.json")),
        generation_config: Some(&read("generation_config.json")),
        config: Some(&read("config.json")),
    })
    .unwrap()
}

/// A model whose reply is `text` and an end, whatever it is asked. With thinking turned off it starts behind the block.
pub(crate) fn says(chat: &ChatFormat, text: &str) -> ToyLm {
    let mut script = chat.encode_trusted(text).unwrap();
    script.push(chat.stop_tokens()[0]);
    let one = |text: &str| chat.encode_trusted(text).unwrap()[0];
    let (open, close) = (one("<think>"), one("</think>"));
    ToyLm::new(LIMITS, 1).alter_rows(Box::new(move |tokens, logits| {
        let start = tokens.iter().rposition(|token| *token == open).map_or(0, |at| at + 1);
        let reply = &tokens[start..];
        let behind = |tokens: &[u32]| tokens.iter().position(|token| *token == close);
        let place = match (reply.first() == Some(&close), behind(&script)) {
            (true, Some(skip)) => skip + reply.len(),
            _ => reply.len(),
        };
        if let Some(next) = script.get(place) {
            logits[*next as usize] = 50.0;
        }
    }))
}

/// A model that never ends a reply, `pause` a forward.
pub(crate) fn endless(chat: &ChatFormat, pause: Duration) -> ToyLm {
    let stops = chat.stop_tokens().to_vec();
    ToyLm::new(LIMITS, 2)
        .alter_rows(Box::new(move |_, logits| {
            for stop in &stops {
                logits[*stop as usize] = f32::NEG_INFINITY;
            }
        }))
        .before_forward(Box::new(move |_| {
            std::thread::sleep(pause);
            Ok(())
        }))
}

impl Server {
    /// A server over the model that `model` makes.
    pub(crate) fn start(model: impl FnOnce(&ChatFormat) -> ToyLm) -> Self {
        Self::start_with(model, ServerOptions::default(), 64)
    }

    /// The same with bounds; `queue` requests may wait.
    pub(crate) fn start_with(
        model: impl FnOnce(&ChatFormat) -> ToyLm,
        options: ServerOptions,
        queue: usize,
    ) -> Self {
        let chat = Arc::new(chat_format());
        let options_of_engine = EngineOptions { rows_per_round: 64, parallel: 4, queue };
        let engine = Engine::start(Box::new(model(&chat)), options_of_engine);
        let state = ServerState {
            engine: engine.handle(),
            chat: Arc::clone(&chat),
            model_name: "toy".into(),
            started: SystemTime::UNIX_EPOCH,
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                let shutdown = async {
                    let _ = stopped.await;
                };
                flint_server::serve(listener, state, options, shutdown).await.unwrap();
            });
            runtime.shutdown_background();
        });
        let address = told.recv().unwrap();
        Self { address, chat, engine: Some(engine), stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) fn handle(&self) -> Handle {
        self.engine.as_ref().unwrap().handle()
    }

    pub(crate) fn status(&self) -> Status {
        self.handle().status()
    }

    /// Waits until `wanted` holds of the engine's status, for a few seconds at most.
    pub(crate) fn wait(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < end, "{what}: {status:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Sends JSON and reads the status and the JSON of the answer.
    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.post_text(path, &body.to_string());
        (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
    }

    /// Sends a text as JSON and reads the status and the text of the answer.
    pub(crate) fn post_text(&self, path: &str, body: &str) -> (u16, String) {
        let mut response =
            agent().post(self.url(path)).header("content-type", "application/json").send(body).unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }

    pub(crate) fn get(&self, path: &str) -> (u16, Value) {
        let mut response = agent().get(self.url(path)).call().unwrap();
        (response.status().as_u16(), response.body_mut().read_json().unwrap())
    }

    /// Sends JSON and reads a stream's frames; whether `[DONE]` came last.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> (Vec<Value>, bool) {
        let (status, text) = self.post_text(path, &body.to_string());
        assert_eq!(status, 200, "{text}");
        frames(&text)
    }

    /// Asks the server to shut down; it goes on until its replies have ended.
    pub(crate) fn ask_to_stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until the server has ended.
    pub(crate) fn join(&mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.engine.take());
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The frames of a stream's text, and whether `[DONE]` came last.
pub(crate) fn frames(text: &str) -> (Vec<Value>, bool) {
    let mut events: Vec<&str> = text.split_terminator("\n\n").collect();
    let done = events.last() == Some(&"data: [DONE]");
    if done {
        events.pop();
    }
    let frame = |event: &&str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
    (events.iter().map(frame).collect(), done)
}

/// A client that takes error answers as answers.
pub(crate) fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(Duration::from_secs(30)))
        .build()
        .into()
}

/// One user message.
pub(crate) fn ask(text: &str) -> Value {
    serde_json::json!([{ "role": "user", "content": text }])
}

/// The path of an error's parameter, its code and its message.
pub(crate) fn fault(body: &Value) -> (String, String, String) {
    let field = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
    (field("param"), field("code"), field("message"))
}
