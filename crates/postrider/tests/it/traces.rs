//! Traces: the trace context that receivers get, and the spans that a collector gets.

use crate::azure_clients::{installed, scripts};
use crate::client::HeaderPairs;
use crate::clock_lab::ClockLab;
use crate::receiver::{ReceivedDelivery, ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::slice::from_ref;
use std::sync::{Arc, Mutex};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const OTHER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

/// A topic `clouds` for CloudEvents with a subscription `all` that has the further lines `more`.
fn clouds(receiver: &TestReceiver, more: &str) -> String {
    let url = receiver.url("/");
    format!(
        "[[topic]]\nname = \"clouds\"\nkey1 = \"{KEY}\"\ninput_schema = \"CloudEventSchemaV1_0\"\n\
         [[topic.subscription]]\nname = \"all\"\nevent_delivery_schema = \"CloudEventSchemaV1_0\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}\"{more} }} }}\n"
    )
}

/// A CloudEvent with an optional trace context.
fn cloud_event(id: &str, trace: Option<&str>) -> Value {
    let mut event = json!({"specversion": "1.0", "type": "t", "source": "/s", "id": id, "data": {}});
    if let Some(trace) = trace {
        event["traceparent"] = json!(trace);
    }
    event
}

#[track_caller]
fn publish_clouds(server: &TestServer, events: &[Value], headers: HeaderPairs<'_>) {
    let batch = ("content-type", "application/cloudevents-batch+json");
    let headers = [headers, &[batch, ("aeg-sas-key", KEY)]].concat();
    let body = json!(events).to_string();
    server
        .send("POST", "/topics/clouds/api/events", &headers, body)
        .expect(200);
}

#[track_caller]
fn publish(server: &TestServer, id: &str, headers: HeaderPairs<'_>) {
    let path = "/topics/orders/events?api-version=2019-01-01-preview";
    let body = json!([event(id)]).to_string();
    server
        .send("POST", path, &[headers, &[JSON]].concat(), body)
        .expect(200);
}

fn told(delivery: &ReceivedDelivery) -> (Option<&str>, Option<&str>) {
    (delivery.header("traceparent"), delivery.header("tracestate"))
}

#[test]
fn without_a_collector_a_producer_s_trace_is_passed_on_as_it_came() {
    for profile in ["cloud-2018", "cloud-2021", "cloud-current", "edge"] {
        let receiver = TestReceiver::start();
        let server = ServerSetup::default().profile(profile).start();
        server.put_topic("orders");
        server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
        let check = |headers: HeaderPairs<'_>, expected| {
            publish(&server, "1", headers);
            assert_eq!(told(&receiver.next()), expected, "{profile} {headers:?}");
        };
        let parent = ("traceparent", PARENT);
        check(&[], (None, None));
        check(&[parent], (Some(PARENT), None));
        check(&[("traceparent", UNSAMPLED)], (Some(UNSAMPLED), None));
        let state = [parent, ("tracestate", "a=1, b=2"), ("tracestate", "c=3")];
        check(&state, (Some(PARENT), Some("a=1,b=2,c=3")));
        // Invalid headers are ignored without affecting valid ones.
        check(&[parent, ("tracestate", "no state")], (Some(PARENT), None));
        check(
            &[("traceparent", "00-1-2-3"), ("tracestate", "a=1")],
            (None, None),
        );
        check(&[parent, ("traceparent", OTHER)], (None, None));
        check(&[("tracestate", "a=1")], (None, None));
    }
}

#[test]
fn an_event_s_own_trace_wins_and_different_ones_are_not_mixed_up() {
    let receiver = TestReceiver::start();
    let config = clouds(&receiver, ", max_events_per_batch = 10");
    let server = ServerSetup::config(config).start();
    let check = |events: &[Value], headers: HeaderPairs<'_>, expected| {
        publish_clouds(&server, events, headers);
        let delivery = receiver.next();
        assert_eq!(delivery.ids().len(), events.len());
        assert_eq!(told(&delivery), expected, "{events:?} {headers:?}");
        assert_eq!(delivery.json(), json!(events), "an event stays as it is");
    };
    let (own, plain) = (cloud_event("1", Some(OTHER)), cloud_event("2", None));
    let parent = [("traceparent", PARENT), ("tracestate", "a=1")];
    check(from_ref(&own), &[], (Some(OTHER), None));
    check(from_ref(&own), &parent, (Some(OTHER), None));
    check(from_ref(&plain), &parent, (Some(PARENT), Some("a=1")));
    check(
        &[plain.clone(), plain.clone()],
        &parent,
        (Some(PARENT), Some("a=1")),
    );
    check(&[own.clone(), own.clone()], &parent, (Some(OTHER), None));
    check(&[own.clone(), plain.clone()], &parent, (None, None));
    check(&[own, plain], &[], (None, None));
    check(
        &[cloud_event("3", Some("nonsense"))],
        &parent,
        (Some(PARENT), Some("a=1")),
    );

    // In binary mode attributes are headers with a prefix.
    let headers = [
        ("ce-specversion", "1.0"),
        ("ce-type", "t"),
        ("ce-source", "/s"),
        ("ce-id", "4"),
        ("ce-traceparent", OTHER),
        ("traceparent", PARENT),
        JSON,
        ("aeg-sas-key", KEY),
    ];
    server
        .send("POST", "/topics/clouds/api/events", &headers, "{}")
        .expect(200);
    assert_eq!(told(&receiver.next()), (Some(OTHER), None));
}

#[test]
fn a_subscription_s_own_header_wins() {
    let receiver = TestReceiver::start();
    let mapping = ", delivery_attribute_mappings = [{ name = \"traceparent\", type = \"Static\", \
                   properties = { value = \"mine\" } }]";
    let server = ServerSetup::config(clouds(&receiver, mapping)).start();
    let headers = [("traceparent", PARENT), ("tracestate", "a=1")];
    publish_clouds(&server, &[cloud_event("1", None)], &headers);
    assert_eq!(told(&receiver.next()), (Some("mine"), None));
}

/// A stand-in for a collector that speaks JSON.
struct JsonCollector(TestReceiver);

impl JsonCollector {
    fn start() -> JsonCollector {
        JsonCollector(TestReceiver::start())
    }

    fn config(&self) -> String {
        format!(
            "client = [{{ id = \"me\", secret = \"hush\" }}]\n[traces]\notlp_endpoint = \"{}\"\nprotocol = \"http/json\"\nheaders = {{ x-key = \"hidden\" }}\n",
            self.0.url("")
        )
    }

    /// Receives spans until there are `count`.
    #[track_caller]
    fn spans(&self, count: usize) -> Vec<Value> {
        let mut spans = Vec::new();
        while spans.len() < count {
            let request = self.0.next();
            assert_eq!(request.path, "/v1/traces");
            assert_eq!(request.header("x-key"), Some("hidden"));
            for span in request.json()["resourceSpans"][0]["scopeSpans"][0]["spans"]
                .as_array()
                .expect("spans")
            {
                spans.push(plain(span));
            }
        }
        assert_eq!(spans.len(), count, "{spans:#?}");
        spans
    }
}

/// A span with its attributes by name, as the Python collector prints it.
fn plain(span: &Value) -> Value {
    let mut span = span.clone();
    let all = span["attributes"]
        .as_array()
        .expect("attributes")
        .iter()
        .map(|one| {
            let (kind, value) = one["value"]
                .as_object()
                .and_then(|v| v.iter().next())
                .expect("a value");
            let value = match kind.as_str() {
                "intValue" => json!(
                    value
                        .as_str()
                        .and_then(|n| n.parse::<i64>().ok())
                        .expect("a number")
                ),
                "arrayValue" => {
                    let values = value["values"].as_array().into_iter().flatten();
                    values.map(|value| value["stringValue"].clone()).collect()
                }
                _ => value.clone(),
            };
            (one["key"].as_str().expect("a key").to_owned(), value)
        });
    span["attributes"] = Value::Object(all.collect());
    span
}

fn named<'s>(spans: &'s [Value], name: &str) -> Vec<&'s Value> {
    spans.iter().filter(|span| span["name"] == name).collect()
}

/// `(trace, span, flags)` of a header.
#[track_caller]
fn context(delivery: &ReceivedDelivery) -> (String, String, String) {
    let header = delivery.header("traceparent").expect("a traceparent");
    let parts: Vec<&str> = header.split('-').collect();
    assert_eq!((parts.len(), parts[0]), (4, "00"), "{header}");
    (parts[1].to_owned(), parts[2].to_owned(), parts[3].to_owned())
}

/// Asserts that an event's history names its trace.
#[track_caller]
fn shows(server: &TestServer, id: &str, trace: &str) {
    let path = format!("/postrider/v1/events/{id}");
    let story = server
        .send("GET", &path, &[("authorization", "Bearer hush")], "")
        .expect(200)
        .json();
    assert_eq!(story["stories"][0]["trace"], trace, "{story}");
}

#[test]
fn a_collector_sees_the_publish_request_and_every_attempt_in_the_producer_s_trace() {
    let collector = JsonCollector::start();
    let receiver = TestReceiver::answering(|delivery| {
        let again = delivery.header("aeg-delivery-count") != Some("0");
        ScriptedReply::Status(if again { 200 } else { 503 })
    });
    let lab = ClockLab::subscribed(ServerSetup::test_clock(collector.config()), receiver, json!(null));
    let headers = [("traceparent", PARENT), ("tracestate", "a=1")];
    publish(&lab.server, "1", &headers);
    let mut arrived = lab.at_once();
    arrived.push(lab.next_arrival());
    let spans = collector.spans(3);
    let publish = named(&spans, "publish orders")[0];
    let attempts = named(&spans, "deliver orders");
    for span in &spans {
        assert_eq!(span["traceId"], TRACE);
        assert_eq!(span["parentSpanId"], "00f067aa0ba902b7", "{span}");
        assert_eq!(span["traceState"], "a=1");
    }
    assert_eq!(publish["attributes"]["messaging.message.id"], "1");
    for (arrival, span) in arrived.iter().zip(&attempts) {
        let (trace, id, flags) = context(&arrival.delivery);
        assert_eq!((trace.as_str(), flags.as_str()), (TRACE, "01"));
        assert_eq!(span["spanId"], id, "the header names the span");
        assert_eq!(arrival.delivery.header("tracestate"), Some("a=1"));
        assert_eq!(span["links"][0]["spanId"], "00f067aa0ba902b7");
    }
    let [first, second] = attempts[..] else {
        panic!("{spans:#?}");
    };
    assert_eq!(first["status"]["code"], 2);
    assert_eq!(first["attributes"]["http.response.status_code"], 503);
    assert_eq!(first["attributes"]["postrider.next"], "retry");
    assert_eq!(first["attributes"]["postrider.attempt"], 1);
    assert_eq!(second.get("status"), None);
    assert_eq!(second["attributes"]["postrider.next"], "done");
    assert_eq!(second["attributes"]["postrider.attempt"], 2);
    assert_ne!(first["spanId"], second["spanId"]);
    shows(&lab.server, "1", TRACE);
}

#[test]
fn what_its_producer_does_not_want_recorded_is_passed_on_and_not_exported() {
    let collector = JsonCollector::start();
    let receiver = TestReceiver::start();
    let server = ServerSetup::config(collector.config()).start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    publish(&server, "1", &[("traceparent", UNSAMPLED)]);
    assert_eq!(told(&receiver.next()), (Some(UNSAMPLED), None));
    // Only the next event has spans: the unsampled one has none.
    publish(&server, "2", &[("traceparent", PARENT)]);
    receiver.next();
    for span in collector.spans(2) {
        assert_eq!(span["attributes"]["messaging.message.id"], "2");
    }
}

#[test]
fn an_event_without_a_trace_begins_one() {
    let collector = JsonCollector::start();
    let receiver = TestReceiver::start();
    let server = ServerSetup::config(collector.config()).start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    publish(&server, "1", &[]);
    let (trace, id, flags) = context(&receiver.next());
    assert_eq!(flags, "01");
    let spans = collector.spans(2);
    let (publish, attempt) = (
        named(&spans, "publish orders")[0],
        named(&spans, "deliver orders")[0],
    );
    assert_eq!(
        (&publish["traceId"], &attempt["traceId"]),
        (&json!(trace), &json!(trace))
    );
    assert_eq!(attempt["spanId"], id);
    assert_eq!(attempt["parentSpanId"], publish["spanId"]);
    assert_eq!((publish.get("parentSpanId"), attempt.get("links")), (None, None));
    shows(&server, "1", &trace);
}

#[test]
fn a_request_with_events_of_several_traces_has_a_trace_of_its_own_that_names_them() {
    let collector = JsonCollector::start();
    let receiver = TestReceiver::start();
    let config = collector.config() + &clouds(&receiver, ", max_events_per_batch = 10");
    let server = ServerSetup::config(config).start();
    let events = [cloud_event("1", Some(PARENT)), cloud_event("2", Some(OTHER))];
    publish_clouds(&server, &events, &[]);
    let (trace, id, _) = context(&receiver.next());
    shows(&server, "1", TRACE);
    shows(&server, "2", "0af7651916cd43dd8448eb211c80319c");
    let spans = collector.spans(2);
    let attempt = named(&spans, "deliver clouds")[0];
    assert_eq!(
        (&attempt["traceId"], &attempt["spanId"]),
        (&json!(trace), &json!(id))
    );
    assert!(!PARENT.contains(&trace) && !OTHER.contains(&trace));
    assert_eq!(attempt.get("parentSpanId"), None);
    for span in &spans {
        let links = span["links"].as_array().expect("links").iter();
        let links: BTreeSet<&str> = links.filter_map(|link| link["traceId"].as_str()).collect();
        assert_eq!(links, BTreeSet::from([TRACE, "0af7651916cd43dd8448eb211c80319c"]));
        assert_eq!(span["attributes"]["messaging.batch.message_count"], 2);
        assert_eq!(span["attributes"]["postrider.event.ids"], json!(["1", "2"]));
    }
}

#[test]
fn a_trace_survives_a_restart() {
    let collector = JsonCollector::start();
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(500));
    let mut lab = ClockLab::subscribed(ServerSetup::test_clock(collector.config()), receiver, json!(null));
    publish(
        &lab.server,
        "1",
        &[("traceparent", PARENT), ("tracestate", "a=1")],
    );
    let before = lab.at_once();
    lab.server.kill();
    lab.server.start();
    let after = lab.next_arrival();
    assert_eq!(after.count(), 1);
    assert_eq!(after.delivery.header("tracestate"), Some("a=1"));
    let (trace, id, _) = context(&after.delivery);
    assert_eq!(trace, TRACE);
    assert_ne!(id, context(&before[0].delivery).1);
    wait::until("the span of the second attempt", || {
        let requests = collector.0.take_received();
        requests
            .iter()
            .any(|request| request.text().contains(&id))
            .then_some(())
    });
}

#[test]
fn a_collector_that_is_away_or_refuses_harms_no_delivery_and_drops_are_counted() {
    let refusing = TestReceiver::answering(|_| ScriptedReply::Status(400));
    let nobody = {
        let gone = TestReceiver::start();
        gone.url("")
    };
    for (url, dropped) in [(refusing.url(""), true), (nobody, false)] {
        let receiver = TestReceiver::start();
        let config = format!("[traces]\notlp_endpoint = \"{url}\"\n");
        let mut server = ServerSetup::config(config).start();
        server.put_topic("orders");
        server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
        for id in 0..20 {
            publish(&server, &id.to_string(), &[]);
        }
        let ids: BTreeSet<String> = (0..20).map(|id| id.to_string()).collect();
        receiver.all_of(&ids);
        server.logged(&["traces cannot be exported", &url]);
        let count = |name: &str| {
            let text = server.send("GET", "/metrics", &[], "").expect(200);
            let line = text
                .text()
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.expect("the counter is there")
                .parse::<u64>()
                .expect("a number")
        };
        assert_eq!(count("postrider_traces_exported_total"), 0);
        if dropped {
            wait::until("every span is counted as dropped", || {
                (count("postrider_traces_dropped_total") == 40).then_some(())
            });
        }
        let asked = wait::now();
        server.stop();
        assert!(
            asked.elapsed() < wait::PATIENCE / 2,
            "nobody waits for the collector"
        );
    }
}

#[test]
fn variables_of_opentelemetry_are_heeded() {
    let collector = TestReceiver::start();
    let receiver = TestReceiver::start();
    let server = ServerSetup::default()
        .with("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url("/base"))
        .with("OTEL_EXPORTER_OTLP_HEADERS", "x-key=hid%20den")
        .with("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
        .with("OTEL_SERVICE_NAME", "grid")
        .start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    publish(&server, "1", &[]);
    let request = collector.next();
    assert_eq!(request.path, "/base/v1/traces");
    assert_eq!(request.header("x-key"), Some("hid den"));
    let resource = plain(&request.json()["resourceSpans"][0]["resource"]);
    assert_eq!(resource["attributes"]["service.name"], "grid");
    assert!(
        !server.log().concat().contains("hid den"),
        "a secret is not logged"
    );
}

/// A collector with OpenTelemetry's own message types, as a child process.
struct PythonCollector {
    child: Child,
    port: String,
    lines: Arc<Mutex<Vec<Value>>>,
}

impl PythonCollector {
    fn start(directory: &std::path::Path) -> PythonCollector {
        let mut child = Command::new(directory.join("venv/bin/python"))
            .arg(scripts().join("python/otlp.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the collector can be started");
        let mut out = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
        let port = out.next().expect("a port").expect("text");
        let lines: Arc<Mutex<Vec<Value>>> = Arc::default();
        let seen = lines.clone();
        // The thread ends with the child.
        std::thread::spawn(move || {
            for line in out.map_while(Result::ok) {
                let span = serde_json::from_str(&line).expect("lines of JSON");
                seen.lock().expect("no panic holds it").push(span);
            }
        });
        PythonCollector { child, port, lines }
    }
}

impl Drop for PythonCollector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn opentelemetry_s_own_messages_read_what_is_exported() {
    let Some(directory) = installed() else { return };
    let collector = PythonCollector::start(&directory);
    for protocol in ["http/protobuf", "http/json"] {
        let receiver = TestReceiver::start();
        let config = format!(
            "[traces]\notlp_endpoint = \"http://127.0.0.1:{}\"\nprotocol = \"{protocol}\"\n\
             headers = {{ x-key = \"hidden\" }}\nservice_name = \"grid\"\n{}",
            collector.port,
            clouds(&receiver, ", max_events_per_batch = 10")
        );
        let server = ServerSetup::config(config).start();
        let events = [cloud_event("1", Some(PARENT)), cloud_event("2", Some(OTHER))];
        publish_clouds(&server, &events, &[]);
        let mixed = context(&receiver.next());
        publish_clouds(&server, &events[..1], &[("tracestate", "ignored=1")]);
        let joined = context(&receiver.next());
        let spans = wait::until("four spans", || {
            let lines = collector.lines.lock().expect("no panic holds it");
            assert!(lines.iter().all(|line| line.get("error").is_none()), "{lines:?}");
            (lines.len() >= 4).then(|| lines.clone())
        });
        collector.lines.lock().expect("no panic holds it").clear();
        assert_eq!(spans.len(), 4);
        for span in &spans {
            assert_eq!(
                (&span["key"], &span["scope"]),
                (&json!("hidden"), &json!("postrider"))
            );
            assert_eq!(span["resource"]["service.name"], "grid");
            assert_eq!(span["attributes"]["messaging.system"], "eventgrid");
            assert_eq!(span["attributes"]["messaging.destination.name"], "clouds");
            assert_eq!(span["status"]["code"], 0);
            assert!(span["begun"].as_u64() > Some(1_700_000_000_000_000_000), "{span}");
            assert!(span["took"].as_u64() < Some(30_000_000_000), "{span}");
        }
        let attempts = named(&spans, "deliver clouds");
        let of = |wanted: &(String, String, String)| {
            let found = attempts.iter().find(|span| span["spanId"] == wanted.1);
            found.unwrap_or_else(|| panic!("no span {wanted:?} in {spans:#?}"))
        };
        let (mixed, joined) = ((of(&mixed), mixed), (of(&joined), joined));
        assert_eq!(mixed.0["traceId"], mixed.1.0);
        assert_eq!(
            (&joined.0["traceId"], joined.1.0.as_str()),
            (&json!(TRACE), TRACE)
        );
        assert_eq!(joined.0["parentSpanId"], "00f067aa0ba902b7");
        assert_eq!(
            (mixed.0["kind"].as_i64(), mixed.0["parentSpanId"].as_str()),
            (Some(3), Some(""))
        );
        assert_eq!(mixed.0["links"].as_array().map(Vec::len), Some(2));
        assert_eq!(mixed.0["attributes"]["postrider.event.ids"], json!(["1", "2"]));
        assert_eq!(joined.0["attributes"]["messaging.message.id"], "1");
        assert_eq!(joined.0["attributes"]["http.response.status_code"], 200);
        assert_eq!(named(&spans, "publish clouds").len(), 2);
    }
}
