//! The Host check: a page of another site must not drive a server on this machine.
//!
//! DNS rebinding points a name of the attacker's at 127.0.0.1, so that the browser takes the server for the page's own
//! origin. The request's Host header still names the attacker's site. A server that listens on a loopback address
//! therefore answers to loopback names and to the address it is bound to, nothing else.

use std::net::{IpAddr, SocketAddr};

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::error::ApiError;

/// Which Host headers are answered.
#[derive(Clone, Debug)]
pub(crate) enum HostCheck {
    /// Bound to an address of the network: clients use names that the server cannot know.
    Any,
    /// Bound to this loopback address.
    Loopback(IpAddr),
}

impl HostCheck {
    /// The check for a server that is bound to `address`.
    pub(crate) fn new(address: SocketAddr) -> Self {
        let ip = address.ip();
        if ip.to_canonical().is_loopback() { Self::Loopback(ip) } else { Self::Any }
    }

    fn allows(&self, host: &str) -> bool {
        let Self::Loopback(bound) = self else { return true };
        let name = without_port(host);
        if name.eq_ignore_ascii_case("localhost") {
            return true;
        }
        let bare = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')).unwrap_or(name);
        bare.parse::<IpAddr>().is_ok_and(|ip| ip == *bound || ip.is_loopback())
    }
}

/// `host[:port]` without the port. An IPv6 address keeps its brackets.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    }
}

/// Refuses requests whose Host header is not the server's own.
pub(crate) async fn check_host(State(check): State<HostCheck>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    if check.allows(host) {
        return next.run(request).await;
    }
    ApiError::request(
        StatusCode::FORBIDDEN,
        Some("host_not_allowed"),
        None,
        format!(
            "the Host header is {host:?}, but this server listens on a loopback address and answers to localhost, \
             127.0.0.1 and [::1] only; use one of these, or start it with --host"
        ),
    )
    .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback() -> HostCheck {
        HostCheck::new("127.0.0.1:8080".parse().unwrap())
    }

    #[test]
    fn loopback_names_with_and_without_a_port_are_allowed() {
        for host in ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8080"] {
            assert!(loopback().allows(host), "{host}");
        }
    }

    #[test]
    fn other_names_are_refused_on_loopback() {
        for host in [
            "",
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "10.0.0.1",
            "127.0.0.1.nip.io",
        ] {
            assert!(!loopback().allows(host), "{host}");
        }
    }

    #[test]
    fn a_server_on_the_network_answers_to_any_name() {
        assert!(HostCheck::new("0.0.0.0:8080".parse().unwrap()).allows("box.lan"));
    }
}
