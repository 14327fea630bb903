//! `postrider receiver`: a webhook for experiments. Prints requests and answers as configured.

use std::cell::Cell;
use std::io::Write;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use crate::config::read_address;
use anyhow::{Context, Result};
use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode, request};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::net::TcpListener;
use tokio::task::{JoinSet, LocalSet};

/// Twice Event Grid's largest delivery.
const BODY_BYTES_MAX: usize = 2 * 1024 * 1024;
const SHOWN_BYTES_MAX: usize = 16 * 1024;

#[derive(clap::Args, Clone, Debug)]
pub struct ReceiverArgs {
    /// Address or port to listen on.
    #[arg(long, default_value = "127.0.0.1:9000", value_parser = parse_listen)]
    listen: SocketAddr,
    /// Status to answer deliveries with.
    #[arg(long, default_value = "200", value_parser = parse_status)]
    status: StatusCode,
    /// How long to wait before answering a delivery: 200ms, 3s, 1m.
    #[arg(long, default_value = "0ms", value_parser = parse_delay)]
    delay: Duration,
    /// Answer 503 to this many deliveries first.
    #[arg(long, default_value_t = 0)]
    fail_first: u64,
}

/// Receives until interrupted, or until the standard output is closed.
pub fn run(args: ReceiverArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(LocalSet::new().run_until(async {
        let listener = TcpListener::bind(args.listen).await;
        let listener = listener.with_context(|| format!("listening on {}", args.listen))?;
        eprintln!("receiving on http://{}/", listener.local_addr()?);
        tokio::select! {
            biased;
            interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
            served = serve(listener, args, show) => served,
        }
    }))
}

/// Prints to the standard output; an error means that it is closed.
fn show(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Prints a received request.
type PrintRequest = fn(&str) -> std::io::Result<()>;

/// Serves until printing fails. Needs a `LocalSet`.
async fn serve(listener: TcpListener, args: ReceiverArgs, show: PrintRequest) -> Result<()> {
    let receiver = Rc::new(WebhookReceiver {
        failures_left: Cell::new(args.fail_first),
        args,
        show,
    });
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let stream = TokioIo::new(accepted?.0);
                let receiver = receiver.clone();
                connections.spawn_local(async move {
                    let service = service_fn(|request| receiver.clone().receive(request));
                    http1::Builder::new().serve_connection(stream, service).await
                });
            }
            Some(ended) = connections.join_next() => {
                let ended = ended.context("a connection panicked")?;
                // Broken connections are ignored; only a failure of our own output ends the
                // program.
                if let Err(error) = ended && error.is_user() {
                    return Ok(());
                }
            }
        }
    }
}

struct WebhookReceiver {
    args: ReceiverArgs,
    failures_left: Cell<u64>,
    show: PrintRequest,
}

type ReceiverAnswer = Response<Full<Bytes>>;

impl WebhookReceiver {
    async fn receive(self: Rc<Self>, request: Request<Incoming>) -> std::io::Result<ReceiverAnswer> {
        let (head, body) = request.into_parts();
        let Ok(body) = Limited::new(body, BODY_BYTES_MAX).collect().await else {
            (self.show)(&format!(
                "{}\n  (body too large or cut short)\n\n",
                head_line(&head)
            ))?;
            return Ok(answer(StatusCode::PAYLOAD_TOO_LARGE));
        };
        let body = body.to_bytes();
        let handshake = handshake(&head, &body);
        let note = if handshake.is_some() {
            "  (handshake answered)\n"
        } else {
            ""
        };
        (self.show)(&format!("{}\n{}{note}\n", head_line(&head), shown_body(&body)))?;
        if let Some(answer) = handshake {
            return Ok(answer);
        }
        if !self.args.delay.is_zero() {
            pause(self.args.delay).await;
        }
        Ok(answer(self.status_next()))
    }

    fn status_next(&self) -> StatusCode {
        match self.failures_left.get() {
            0 => self.args.status,
            left => {
                self.failures_left.set(left - 1);
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }
}

fn answer(status: StatusCode) -> ReceiverAnswer {
    let mut answer = Response::default();
    *answer.status_mut() = status;
    answer
}

/// The answer to a handshake; `None` for any other request.
pub fn handshake(head: &request::Parts, body: &[u8]) -> Option<ReceiverAnswer> {
    if head.method == Method::OPTIONS {
        return Some(allow_deliveries(head));
    }
    if head.headers.get("aeg-event-type")? != "SubscriptionValidation" {
        return None;
    }
    let mut answer = ReceiverAnswer::new(Full::from(validation_response(body)?));
    let json = HeaderValue::from_static("application/json");
    answer.headers_mut().insert(CONTENT_TYPE, json);
    Some(answer)
}

/// CloudEvents abuse protection: agrees to the origin and rate of the request.
fn allow_deliveries(head: &request::Parts) -> ReceiverAnswer {
    let anything = HeaderValue::from_static("*");
    let asked = |name| head.headers.get(name).unwrap_or(&anything).clone();
    let (origin, rate) = (asked("webhook-request-origin"), asked("webhook-request-rate"));
    let mut answer = answer(StatusCode::OK);
    let headers = answer.headers_mut();
    headers.insert(ALLOW, HeaderValue::from_static("POST, OPTIONS"));
    headers.insert("webhook-allowed-origin", origin);
    headers.insert("webhook-allowed-rate", rate);
    answer
}

/// The body that answers an Event Grid `SubscriptionValidation` event; `None` for any other body.
pub fn validation_response(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct ValidationEvent {
        data: ValidationData,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct ValidationData {
        validation_code: String,
    }
    let [event]: [ValidationEvent; 1] = serde_json::from_slice(body).ok()?;
    let answer = serde_json::json!({ "validationResponse": event.data.validation_code });
    Some(answer.to_string())
}

/// Method, path, and the headers of Event Grid or CloudEvents about the delivery.
fn head_line(head: &request::Parts) -> String {
    let mut line = format!("{} {}", head.method, head.uri);
    for (name, value) in &head.headers {
        let name = name.as_str();
        if ["aeg-", "ce-", "webhook-"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
        {
            line += &format!("  {name}: {}", String::from_utf8_lossy(value.as_bytes()));
        }
    }
    printable(&line, false)
}

/// The body for display: JSON is indented, control characters are escaped, and the length is
/// limited.
fn shown_body(body: &[u8]) -> String {
    if body.is_empty() {
        return String::new();
    }
    let text = match std::str::from_utf8(body) {
        Ok(text) if serde_json::from_str::<IgnoredAny>(text).is_ok() => indented(text, SHOWN_BYTES_MAX),
        _ => String::from_utf8_lossy(body).into_owned(),
    };
    let end = text.floor_char_boundary(SHOWN_BYTES_MAX);
    let mut shown = printable(&text[..end], true);
    if end < text.len() {
        shown += &format!(" … ({} bytes in all)", body.len());
    }
    shown + "\n"
}

/// Escapes control characters, and marks that reorder or hide text, so that a terminal shows them
/// instead of obeying.
pub fn printable(text: &str, keep_newlines: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let hidden = matches!(c,
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
        if (c.is_control() || hidden) && !(keep_newlines && c == '\n') {
            out += &format!("\\u{:04x}", c as u32);
        } else {
            out.push(c);
        }
    }
    out
}

/// Indents valid JSON, up to a little more than `bytes_max`. Order, numbers and escapes are
/// unchanged.
pub fn indented(json: &str, bytes_max: usize) -> String {
    let mut out = String::new();
    let mut depth = 0;
    let (mut in_string, mut escaped, mut opened) = (false, false, false);
    for c in json.chars() {
        if out.len() > bytes_max {
            break;
        }
        if in_string {
            out.push(c);
            in_string = escaped || c != '"';
            escaped = c == '\\' && !escaped;
            continue;
        }
        if c.is_ascii_whitespace() {
            continue;
        }
        let closes = matches!(c, '}' | ']');
        if closes {
            depth -= 1;
        }
        // An empty object or array stays on its line.
        if opened != closes {
            new_line(depth, &mut out);
        }
        opened = matches!(c, '{' | '[');
        out.push(c);
        match c {
            '{' | '[' => depth += 1,
            ',' => new_line(depth, &mut out),
            ':' => out.push(' '),
            '"' => in_string = true,
            _ => {}
        }
    }
    out
}

fn new_line(depth: usize, out: &mut String) {
    out.push('\n');
    out.extend(std::iter::repeat_n("  ", depth));
}

fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    read_address(text).ok_or_else(|| "must be an address such as 127.0.0.1:9000, or a port".to_owned())
}

fn parse_status(text: &str) -> Result<StatusCode, String> {
    let status: Option<StatusCode> = text.parse().ok();
    let status = status.filter(|status| (200..600).contains(&status.as_u16()));
    status.ok_or_else(|| "a status is a number from 200 to 599".to_owned())
}

fn parse_delay(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let millis = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        _ => return Err("a delay has a unit: 200ms, 3s, 1m".to_owned()),
    };
    let number: u32 = number.parse().map_err(|error| format!("{error}"))?;
    Ok(Duration::from_millis(u64::from(number) * millis))
}

#[expect(
    clippy::disallowed_methods,
    reason = "the sender is a real one, and waits in real time"
)]
async fn pause(duration: Duration) {
    tokio::time::sleep(duration).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(method: &str, headers: &[(&str, &str)]) -> request::Parts {
        let mut request = Request::builder().method(method).uri("/hook?a=b");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_validation_is_answered_with_its_code() {
        let check = |body: &str, expected: Option<&str>| {
            assert_eq!(
                validation_response(body.as_bytes()).as_deref(),
                expected,
                "{body}"
            );
        };
        check(
            r#"[{"id":"1","data":{"validationCode":"a\"b","validationUrl":"https://x"}}]"#,
            Some(r#"{"validationResponse":"a\"b"}"#),
        );
        check(r#"[{"data":{"other":"x"}}]"#, None);
        check(r#"[{"data":{"validationCode":5}}]"#, None);
        check("[]", None);
        check("{", None);
    }

    #[test]
    fn only_a_request_that_says_so_is_a_validation() {
        let body = br#"[{"data":{"validationCode":"c"}}]"#;
        let validation = head("POST", &[("aeg-event-type", "SubscriptionValidation")]);
        let notification = head("POST", &[("aeg-event-type", "Notification")]);
        assert_eq!(
            handshake(&validation, body).unwrap().headers()["content-type"],
            "application/json"
        );
        assert!(handshake(&notification, body).is_none());
        assert!(handshake(&head("POST", &[]), body).is_none());
    }

    #[test]
    fn a_sender_is_allowed_what_it_asks_for() {
        let asked = [
            ("webhook-request-origin", "eventgrid.local"),
            ("webhook-request-rate", "120"),
        ];
        let answer = handshake(&head("OPTIONS", &asked), b"").unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["webhook-allowed-origin"], "eventgrid.local");
        assert_eq!(answer.headers()["webhook-allowed-rate"], "120");
        let answer = handshake(&head("OPTIONS", &[]), b"").unwrap();
        assert_eq!(answer.headers()["webhook-allowed-rate"], "*");
    }

    #[test]
    fn the_head_is_one_line_of_what_matters() {
        let headers = [
            ("aeg-event-type", "Notification"),
            ("accept", "*/*"),
            ("ce-id", "7"),
        ];
        let line = head_line(&head("POST", &headers));
        assert_eq!(line, "POST /hook?a=b  aeg-event-type: Notification  ce-id: 7");
    }

    #[test]
    fn a_terminal_obeys_nothing_that_was_received() {
        let check = |text: &str, expected: &str| assert_eq!(shown_body(text.as_bytes()), expected);
        check("\u{1b}[2J\u{7}", "\\u001b[2J\\u0007\n");
        check("a\nb\r", "a\nb\\u000d\n");
        check("\"\u{9b}31m\u{7f}\"", "\"\\u009b31m\\u007f\"\n");
        check(
            "{\"a\":\"\u{202e}x\u{2066}\"}",
            "{\n  \"a\": \"\\u202ex\\u2066\"\n}\n",
        );
        check("grüße 🐎", "grüße 🐎\n");
        check("", "");
        assert_eq!(shown_body(b"\xff\x1b"), "\u{fffd}\\u001b\n");
        assert_eq!(printable("a\nb", false), "a\\u000ab");
    }

    #[test]
    fn json_is_indented_and_otherwise_left_alone() {
        let check = |json: &str, expected: &str| assert_eq!(indented(json, SHOWN_BYTES_MAX), expected);
        check("[]", "[]");
        check("[ { } ]", "[\n  {}\n]");
        check(
            r#"{"b":1.0,"a":[1,2],"b":"}{\"\\"}"#,
            "{\n  \"b\": 1.0,\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": \"}{\\\"\\\\\"\n}",
        );
        check("12345678901234567890", "12345678901234567890");
    }

    #[test]
    fn what_is_shown_has_an_end() {
        for body in [
            "[".repeat(1_000_000) + &"]".repeat(1_000_000),
            "x".repeat(BODY_BYTES_MAX),
        ] {
            let shown = shown_body(body.as_bytes());
            assert!(shown.len() < 2 * SHOWN_BYTES_MAX);
            assert!(shown.ends_with(&format!("({} bytes in all)\n", body.len())));
        }
    }

    #[test]
    fn options_are_refused_with_a_reason() {
        assert_eq!(parse_delay("200ms"), Ok(Duration::from_millis(200)));
        assert_eq!(parse_delay("3s"), Ok(Duration::from_secs(3)));
        assert!(parse_delay("200").is_err());
        assert!(parse_delay("ms").is_err());
        assert!(parse_delay("99999999999s").is_err());
        assert_eq!(parse_status("503"), Ok(StatusCode::SERVICE_UNAVAILABLE));
        assert!(parse_status("100").is_err());
        assert!(parse_status("abc").is_err());
        let here = "127.0.0.1:9000".parse().unwrap();
        for text in ["9000", "localhost:9000", "127.0.0.1:9000"] {
            assert_eq!(parse_listen(text), Ok(here), "{text}");
        }
        assert!(parse_listen("off").is_err());
    }
}
