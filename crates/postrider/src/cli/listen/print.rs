//! Deliveries for people, or as lines of JSON. Control characters in others' text are escaped.

use super::delivery_handler::{ForwardResult, HandledDelivery};
use super::stream::SessionDelivery;
use crate::receiver::{indented, printable};
use crate::terminal::{self, harmless};
use bytes::Bytes;
use postrider_core::time::Timestamp;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};

/// Characters of an event's data that are shown on its line.
const DATA_SHOWN_MAX: usize = 400;
/// Bytes of one event that are shown with `--full`.
const EVENT_SHOWN_MAX: usize = 256 << 10;

/// Output format of deliveries.
#[derive(Clone, Copy, Debug)]
pub struct DeliveryPrinter {
    json: bool,
    full: bool,
    forwards: bool,
    color: bool,
}

/// Writes to the standard output and flushes.
pub fn write(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Events of a delivery as they were written; a body that is not JSON becomes a string.
pub fn events(delivery: &SessionDelivery) -> Vec<Box<RawValue>> {
    let text = String::from_utf8_lossy(&delivery.body);
    let one = || serde_json::from_str::<Box<RawValue>>(&text).map(|event| vec![event]);
    let all = match text.trim_ascii_start().starts_with('[') {
        true => serde_json::from_str::<Vec<Box<RawValue>>>(&text),
        false => one(),
    };
    all.unwrap_or_else(|_| {
        let text = Value::String(text.into_owned()).to_string();
        RawValue::from_string(text).into_iter().collect()
    })
}

/// The body of a delivery with only its first events, each as it was written.
pub fn first_events(delivery: &SessionDelivery, count: usize) -> Bytes {
    let events = events(delivery);
    let first: Vec<&str> = events.iter().take(count).map(|event| event.get()).collect();
    format!("[{}]", first.join(",")).into()
}

#[derive(Serialize)]
struct PrintedEventLine<'a> {
    delivery: u64,
    attempt: u64,
    headers: &'a BTreeMap<String, String>,
    event: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    forwarded: Option<Value>,
}

impl DeliveryPrinter {
    pub fn of_terminal(json: bool, full: bool, forwards: bool) -> DeliveryPrinter {
        let variable = |name: &str| {
            std::env::vars_os()
                .find(|(n, _)| n == name)
                .map(|(_, value)| value)
        };
        let terminal = std::io::stdout().is_terminal() && variable("TERM").is_some_and(|term| term != "dumb");
        DeliveryPrinter {
            json,
            full,
            forwards,
            color: terminal && variable("NO_COLOR").is_none_or(|value| value.is_empty()),
        }
    }

    /// Output of a delivery.
    pub fn lines(
        &self,
        delivery: &SessionDelivery,
        events: &[Box<RawValue>],
        outcome: Option<&HandledDelivery>,
        now: Timestamp,
    ) -> String {
        let forwarded = outcome.and_then(|outcome| outcome.forwarded.as_ref());
        let line = |event: &RawValue| match self.json {
            true => json_line(delivery, event, forwarded),
            false => self.text(delivery, event, forwarded, now),
        };
        events.iter().map(|event| line(event)).collect()
    }

    fn text(
        &self,
        delivery: &SessionDelivery,
        event: &RawValue,
        forwarded: Option<&ForwardResult>,
        now: Timestamp,
    ) -> String {
        let members: BTreeMap<Cow<'_, str>, &RawValue> =
            serde_json::from_str(event.get()).unwrap_or_default();
        let member = |names: [&str; 2]| {
            let found = names.iter().find_map(|name| members.get(*name))?;
            let text: Option<String> = serde_json::from_str(found.get()).ok();
            Some(harmless(&text.unwrap_or_else(|| found.get().to_owned())))
        };
        let time = terminal::time(&now.to_string());
        let mut parts = vec![self.paint("2", &time)];
        parts.extend(forwarded.map(|forwarded| self.result(forwarded)));
        parts.extend(member(["type", "eventType"]).map(|kind| self.paint("1", &kind)));
        parts.extend(member(["subject", "subject"]).map(|subject| self.paint("36", &subject)));
        parts.extend(member(["id", "id"]));
        if delivery.attempts_made() > 0 {
            let again = format!("(attempt {})", delivery.attempts_made() + 1);
            parts.push(self.paint("33", &again));
        }
        if self.full {
            let whole = printable(&indented(event.get(), EVENT_SHOWN_MAX), true);
            return format!("{}\n{whole}\n", parts.join("  "));
        }
        // Forwarded events are not printed: their receiver shows them.
        if !self.forwards {
            let data = members.get("data").or_else(|| members.get("data_base64"));
            let data = data.copied().or(members.is_empty().then_some(event));
            parts.extend(data.map(|data| shortened(&compact(data.get()))));
        }
        parts.join("  ") + "\n"
    }

    fn result(&self, forwarded: &ForwardResult) -> String {
        match forwarded {
            ForwardResult::Answered { status, took } => {
                let color = if (200..300).contains(status) { "32" } else { "31" };
                let status = self.paint(color, &status.to_string());
                format!("{status} in {} ms", took.as_millis())
            }
            ForwardResult::Failed(reason) => self.paint("31", &format!("failed: {}", harmless(reason))),
        }
    }

    fn paint(&self, code: &str, text: &str) -> String {
        match self.color {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }
}

fn json_line(delivery: &SessionDelivery, event: &RawValue, forwarded: Option<&ForwardResult>) -> String {
    let forwarded = forwarded.map(|forwarded| match forwarded {
        ForwardResult::Answered { status, took } => {
            serde_json::json!({"status": status, "ms": took.as_micros() as f64 / 1000.0})
        }
        ForwardResult::Failed(reason) => serde_json::json!({ "failure": reason }),
    });
    // The event keeps its spelling, on one line.
    let event = RawValue::from_string(compact(event.get()));
    let line = event.and_then(|event| {
        serde_json::to_string(&PrintedEventLine {
            delivery: delivery.number,
            attempt: delivery.attempts_made() + 1,
            headers: &delivery.headers,
            event: &event,
            forwarded,
        })
    });
    line.map_or_else(|e| format!("{{\"error\":\"{e}\"}}\n"), |line| line + "\n")
}

/// Valid JSON without the whitespace between its parts. Everything else stays: order, numbers,
/// escapes.
fn compact(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let (mut in_string, mut escaped) = (false, false);
    for c in json.chars() {
        if in_string {
            in_string = escaped || c != '"';
            escaped = c == '\\' && !escaped;
        } else if c.is_ascii_whitespace() {
            continue;
        } else {
            in_string = c == '"';
        }
        out.push(c);
    }
    out
}

fn shortened(text: &str) -> String {
    let shown = harmless(text);
    match shown.char_indices().nth(DATA_SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &shown[..end]),
        None => shown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const NOW: Timestamp = Timestamp::from_secs(1_900_000_000); // 17:46:40
    const PLAIN: DeliveryPrinter = DeliveryPrinter {
        json: false,
        full: false,
        forwards: false,
        color: false,
    };

    fn delivery(body: &str, count: &str) -> SessionDelivery {
        SessionDelivery {
            number: 3,
            method: "POST".into(),
            headers: BTreeMap::from([("aeg-delivery-count".to_owned(), count.to_owned())]),
            body: body.to_owned().into(),
        }
    }

    fn shown(screen: DeliveryPrinter, body: &str, outcome: Option<HandledDelivery>) -> String {
        let delivery = delivery(body, "0");
        screen.lines(&delivery, &events(&delivery), outcome.as_ref(), NOW)
    }

    const ORDER: &str =
        r#"[{"id":"1","eventType":"Made","subject":"/o","data":{"b": 1.0, "a":"x  y"},"topic":"t"}]"#;

    #[test]
    fn an_event_is_a_line() {
        assert_eq!(
            shown(PLAIN, ORDER, None),
            "2030-03-17T17:46:40Z  Made  /o  1  {\"b\":1.0,\"a\":\"x  y\"}\n"
        );
        let cloud = r#"{"specversion":"1.0","type":"T","source":"/s","id":"i"}"#;
        assert_eq!(shown(PLAIN, cloud, None), "2030-03-17T17:46:40Z  T  i\n");
        assert_eq!(
            shown(PLAIN, "[1,2]", None),
            "2030-03-17T17:46:40Z  1\n2030-03-17T17:46:40Z  2\n"
        );
        assert_eq!(
            shown(PLAIN, "no JSON", None),
            "2030-03-17T17:46:40Z  \"no JSON\"\n"
        );
        let again = delivery(ORDER, "2");
        let text = PLAIN.lines(&again, &events(&again), None, NOW);
        assert!(text.contains("  1  (attempt 3)  {"), "{text}");
        let long = format!(r#"{{"id":"1","data":"{}"}}"#, "ü".repeat(1000));
        assert!(shown(PLAIN, &long, None).ends_with("üü…\n"));
    }

    #[test]
    fn the_first_events_of_a_batch() {
        let batch = delivery("[{\"id\": 1}, {\"id\":2.0},\n3]", "0");
        assert_eq!(first_events(&batch, 2), "[{\"id\": 1},{\"id\":2.0}]");
    }

    #[test]
    fn hostile_events_stay_on_their_line() {
        let hostile = "{\"id\":\"\\u001b[2J\\nx\",\"type\":\"\u{202e}t\",\"data\":{\"a\":\n\"\u{200b}\"}}";
        let text = shown(PLAIN, hostile, None);
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        assert_eq!(
            text,
            "2030-03-17T17:46:40Z  \\u202et  \\u001b[2J\\u000ax  {\"a\":\"\\u200b\"}\n"
        );
        let screen = DeliveryPrinter { full: true, ..PLAIN };
        let text = shown(screen, hostile, None);
        assert!(!text.contains(['\u{1b}', '\u{202e}', '\u{200b}']), "{text}");
        let screen = DeliveryPrinter { json: true, ..PLAIN };
        assert_eq!(shown(screen, hostile, None).matches('\n').count(), 1);
    }

    #[test]
    fn what_a_forwarded_delivery_came_to() {
        let screen = DeliveryPrinter {
            forwards: true,
            ..PLAIN
        };
        let of = |forwarded| {
            let outcome = HandledDelivery {
                forwarded: Some(forwarded),
                trouble: None,
            };
            shown(screen, ORDER, Some(outcome))
        };
        let took = Duration::from_micros(12_500);
        assert_eq!(
            of(ForwardResult::Answered { status: 503, took }),
            "2030-03-17T17:46:40Z  503 in 12 ms  Made  /o  1\n"
        );
        assert_eq!(
            of(ForwardResult::Failed("refused\n".into())),
            "2030-03-17T17:46:40Z  failed: refused\\u000a  Made  /o  1\n"
        );
    }

    #[test]
    fn colors_are_for_terminals() {
        let screen = DeliveryPrinter { color: true, ..PLAIN };
        let text = shown(screen, ORDER, None);
        assert!(
            text.starts_with("\x1b[2m2030-03-17T17:46:40Z\x1b[0m  \x1b[1mMade\x1b[0m"),
            "{text:?}"
        );
        assert!(!shown(PLAIN, ORDER, None).contains('\x1b'));
    }

    #[test]
    fn json_is_one_object_on_a_line() {
        let screen = DeliveryPrinter { json: true, ..PLAIN };
        let body = "[{\"id\":\"1\",\n \"n\":12345678901234567890.0}, {\"id\":\"2\"}]";
        let text = shown(screen, body, None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            r#"{"delivery":3,"attempt":1,"headers":{"aeg-delivery-count":"0"},"event":{"id":"1","n":12345678901234567890.0}}"#
        );
        let second: Value = serde_json::from_str(lines[1]).unwrap();
        assert_eq!(second["event"]["id"], "2");
        assert_eq!(lines.len(), 2);
    }
}
