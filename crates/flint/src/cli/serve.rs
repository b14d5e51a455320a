//! `flint serve`: the OpenAI API over HTTP.
//!
//! The first Ctrl-C closes the door and lets running replies end, the second one ends at once.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use flint_server::{ServerOptions, ServerState};
use tokio::net::TcpListener;
use tracing::level_filters::LevelFilter;

use crate::assemble::assemble;
use crate::config::settings::{ModelSettings, ServeSettings};
use crate::config::{ConfigFile, LogLevel, ServeFlags};
use crate::error::{Error, Result};
use crate::interrupt::{Interrupts, Presses};
use crate::terminal::{Style, Terminal};

/// Threads for sockets. Rendering and tokenising have the runtime's own pool; the engine has its own threads.
const SOCKET_THREADS: usize = 2;

/// How long tasks of cut-off replies may take to end.
const CUT_OFF: Duration = Duration::from_millis(500);

/// Serves until Ctrl-C.
pub(crate) fn run(
    flags: ServeFlags,
    file: &ConfigFile,
    interrupts: &Interrupts,
    terminal: Terminal,
) -> Result<ExitCode> {
    let serve = ServeSettings::new(flags.serve.over(file)?)?;
    let settings = ModelSettings::new(flags.model.over(file)?, flags.dir, serve.parallel, flags.force)?;
    start_log(serve.log);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SOCKET_THREADS)
        .enable_all()
        .build()
        .map_err(Error::io("starting the server"))?;
    // The port is taken before the load: a port in use is known at once.
    let listener = runtime
        .block_on(TcpListener::bind(serve.address))
        .map_err(Error::io(format!("listening on {} (another --port may be free)", serve.address)))?;
    let address = listener.local_addr().map_err(Error::io("listening"))?;
    let assembled = assemble(&settings, serve.queue, terminal)?;
    let state = ServerState {
        engine: assembled.engine.handle(),
        chat: assembled.chat,
        model_name: serve.name.unwrap_or(assembled.name),
        started: SystemTime::now(),
    };
    let options =
        ServerOptions { body_bytes: serve.body_bytes, drain: serve.drain, ..ServerOptions::default() };
    let mut presses = interrupts.take();
    terminal.note(Style::Plain, &format!("flint {} · {}", env!("CARGO_PKG_VERSION"), assembled.summary));
    terminal.line(Style::Bold, &format!("listening on http://{address}"))?;
    let status = runtime.block_on(until_ended(listener, state, options, interrupts.take(), &mut presses))?;
    runtime.shutdown_timeout(CUT_OFF);
    assembled.engine.shutdown();
    Ok(status)
}

async fn until_ended(
    listener: TcpListener,
    state: ServerState,
    options: ServerOptions,
    mut first: Presses,
    all: &mut Presses,
) -> Result<ExitCode> {
    let shutdown = async move {
        first.next().await;
    };
    let serving = flint_server::serve(listener, state, options, shutdown);
    let second = async {
        all.next().await;
        all.next().await
    };
    tokio::select! {
        result = serving => result.map(|()| ExitCode::SUCCESS).map_err(Error::io("serving")),
        press = second => Ok(ExitCode::from(press.status())),
    }
}

/// Logs go to standard error, one line an event.
fn start_log(level: LogLevel) {
    let filter = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(filter).with_target(false).init();
}
