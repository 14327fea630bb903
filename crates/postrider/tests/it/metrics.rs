//! Metrics for Prometheus, and the same numbers in our own API.

use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const CLIENT: &str = "[[client]]\nid = \"boss\"\nsecret = \"hush\"\n";

type MetricLabels = BTreeMap<String, String>;

/// A page of metrics, parsed as strictly as promtool does.
struct ParsedMetricsPage {
    /// Kind of each family.
    families: BTreeMap<String, String>,
    samples: BTreeMap<(String, MetricLabels), f64>,
}

impl ParsedMetricsPage {
    #[track_caller]
    fn get(server: &TestServer) -> ParsedMetricsPage {
        let answer = server.send("GET", "/metrics", &[], "").expect(200);
        let content_type = answer.header("content-type").expect("it says what it is");
        assert_eq!(content_type, "text/plain; version=0.0.4; charset=utf-8");
        ParsedMetricsPage::parse(answer.text())
    }

    #[track_caller]
    fn parse(text: &str) -> ParsedMetricsPage {
        assert!(text.ends_with('\n') && !text.contains('\r'));
        let mut page = ParsedMetricsPage {
            families: BTreeMap::new(),
            samples: BTreeMap::new(),
        };
        let (mut helped, mut family, mut kind) = ("", "", "");
        for line in text.lines() {
            if let Some(said) = line.strip_prefix("# HELP ") {
                let (name, help) = said.split_once(' ').expect("a name and a text");
                assert!(!help.trim().is_empty(), "{line}");
                helped = name;
            } else if let Some(said) = line.strip_prefix("# TYPE ") {
                let (name, of) = said.split_once(' ').expect("a name and a kind");
                assert_eq!(name, helped, "{line}: not after its help");
                assert!(is_name(name), "{line}");
                let kinds = ["counter", "gauge", "histogram", "summary", "untyped"];
                assert!(kinds.contains(&of), "{line}");
                assert_eq!(of == "counter", name.ends_with("_total"), "{line}");
                let known = page.families.insert(name.to_owned(), of.to_owned());
                assert_eq!(known, None, "{line}: announced twice");
                (family, kind) = (name, of);
            } else {
                let (name, labels, value) = sample(line);
                let endings: &[&str] = match kind {
                    "histogram" => &["_bucket", "_sum", "_count"],
                    "summary" => &["_sum", "_count"],
                    _ => &[""],
                };
                let ours = endings.iter().any(|ending| name == format!("{family}{ending}"));
                assert!(ours, "{line}: not of {family}");
                let bucket = name.ends_with("_bucket") && kind == "histogram";
                assert_eq!(labels.contains_key("le"), bucket, "{line}");
                assert!(!labels.contains_key("quantile"), "{line}");
                assert!(kind != "counter" || value >= 0.0, "{line}");
                let known = page.samples.insert((name, labels), value);
                assert_eq!(known, None, "{line}: there twice");
            }
        }
        page.check_sums();
        page
    }

    /// Histogram buckets are cumulative up to the total count.
    #[track_caller]
    fn check_sums(&self) {
        for (family, kind) in &self.families {
            let [sum, count] = ["_sum", "_count"].map(|ending| format!("{family}{ending}"));
            let parts = self.samples.keys().filter(|key| [&sum, &count].contains(&&key.0));
            for (_, labels) in parts {
                for name in [&sum, &count] {
                    assert!(
                        self.samples.contains_key(&(name.clone(), labels.clone())),
                        "{name} {labels:?}"
                    );
                }
            }
            if kind != "histogram" {
                continue;
            }
            let mut buckets: BTreeMap<MetricLabels, Vec<(f64, f64)>> = BTreeMap::new();
            for ((name, labels), value) in &self.samples {
                if *name == format!("{family}_bucket") {
                    let mut labels = labels.clone();
                    let bound = labels.remove("le").expect("a bound").replace("+Inf", "inf");
                    let bound: f64 = bound.parse().expect("a bound is a number");
                    buckets.entry(labels).or_default().push((bound, *value));
                }
            }
            for (labels, mut counts) in buckets {
                counts.sort_by(|a, b| a.0.total_cmp(&b.0));
                assert!(
                    counts.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1),
                    "{family}: {counts:?}"
                );
                let (last, all) = counts.last().copied().expect("there are buckets");
                let count = self.samples.get(&(count.clone(), labels));
                assert_eq!((last, Some(&all)), (f64::INFINITY, count), "{family}");
            }
        }
    }

    #[track_caller]
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        let labels: MetricLabels = labels.collect();
        let found = self.samples.get(&(name.to_owned(), labels.clone()));
        *found.unwrap_or_else(|| {
            let near: Vec<_> = self.samples.iter().filter(|(key, _)| key.0 == name).collect();
            panic!("no {name} {labels:?} among {near:#?}")
        })
    }

    /// Sum over all samples of a name.
    fn sum(&self, name: &str) -> f64 {
        let all = self.samples.iter().filter(|(key, _)| key.0 == name);
        all.map(|(_, value)| value).sum()
    }
}

fn is_name(name: &str) -> bool {
    let mut letters = name.chars();
    let first = letters
        .next()
        .is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    first && letters.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// `name{label="value",…} 1.5`
#[track_caller]
fn sample(line: &str) -> (String, MetricLabels, f64) {
    let at = line.find(['{', ' ']).unwrap_or_else(|| panic!("{line}"));
    let (name, mut rest) = line.split_at(at);
    assert!(is_name(name), "{line}");
    let mut labels = MetricLabels::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
            assert!(is_name(label), "{line}");
            let mut value = String::new();
            let mut letters = after.char_indices();
            let end = loop {
                match letters.next().unwrap_or_else(|| panic!("{line}: no end")) {
                    (at, '"') => break at,
                    (_, '\\') => match letters.next() {
                        Some((_, 'n')) => value.push('\n'),
                        Some((_, c @ ('\\' | '"'))) => value.push(c),
                        other => panic!("{line}: {other:?} is not escaped so"),
                    },
                    (_, c) => value.push(c),
                }
            };
            let known = labels.insert(label.to_owned(), value);
            assert_eq!(known, None, "{line}: a label twice");
            rest = &after[end + 1..];
            match rest.split_at(1) {
                (",", more) => rest = more,
                ("}", more) => {
                    rest = more;
                    break;
                }
                _ => panic!("{line}"),
            }
        }
    }
    let value = rest.strip_prefix(' ').unwrap_or_else(|| panic!("{line}"));
    (
        name.to_owned(),
        labels,
        value.parse().unwrap_or_else(|_| panic!("{line}")),
    )
}

#[track_caller]
fn ours(server: &TestServer, path: &str) -> Value {
    let path = format!("/postrider/v1/{path}");
    let answer = server.send("GET", &path, &[("authorization", "Bearer hush")], "");
    answer.expect(200).json()
}

#[test]
fn counters_of_topics_and_subscriptions() {
    let receiver = TestReceiver::start();
    let refusing = TestReceiver::answering(|_| ScriptedReply::Status(400));
    let server = ServerSetup::config(CLIENT).start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.subscribe("orders", "never", &refusing.url("/"), json!(null));
    server.publish("orders", &[event("1")]);
    server.publish("orders", &[event("2"), event("3")]);
    server
        .edge("POST", "/topics/orders/events", &json!({"no": "event"}))
        .expect(400);
    server.counted("/deliveries/delivered", 3);
    server.counted("/deliveries/attemptsFailed", 3);

    let page = ParsedMetricsPage::get(&server);
    assert_eq!(page.value("postrider_up", &[]), 1.0);
    let topic = [("topic", "orders")];
    let of = |name: &str, subscription: &str| {
        page.value(name, &[("topic", "orders"), ("subscription", subscription)])
    };
    assert_eq!(page.value("postrider_published_events_total", &topic), 3.0);
    assert_eq!(page.value("postrider_publish_requests_total", &topic), 2.0);
    assert_eq!(page.value("postrider_publish_refused_total", &topic), 1.0);
    assert!(page.value("postrider_publish_seconds_total", &topic) > 0.0);
    for subscription in ["billing", "never"] {
        assert_eq!(of("postrider_matched_events_total", subscription), 3.0);
        assert_eq!(of("postrider_delivery_attempts_total", subscription), 3.0);
        assert!(of("postrider_delivery_attempt_seconds_total", subscription) > 0.0);
        assert_eq!(of("postrider_oldest_undelivered_seconds", subscription), 0.0);
    }
    assert_eq!(of("postrider_delivered_events_total", "billing"), 3.0);
    assert_eq!(of("postrider_delivery_attempts_failed_total", "billing"), 0.0);
    assert_eq!(of("postrider_delivery_attempts_failed_total", "never"), 3.0);
    let outcome = |subscription: &str, outcome: &str| {
        let labels = [
            ("topic", "orders"),
            ("subscription", subscription),
            ("outcome", outcome),
        ];
        page.value("postrider_delivery_attempt_outcomes_total", &labels)
    };
    assert_eq!(
        (outcome("billing", "Success"), outcome("never", "BadRequest")),
        (3.0, 3.0)
    );
    assert_eq!(
        page.value("postrider_delivery_latency_seconds_count", &topic),
        3.0
    );
    assert_eq!(
        page.value("postrider_attempt_duration_seconds_count", &topic),
        6.0
    );
    assert!(page.families.keys().all(|name| name.starts_with("postrider_")));

    // The same numbers in the API for people.
    let stats = ours(&server, "stats");
    let totals = [
        ("published", "postrider_published_events_total"),
        ("publishRefused", "postrider_publish_refused_total"),
        ("matched", "postrider_matched_events_total"),
        ("unmatched", "postrider_unmatched_events_total"),
        ("delivered", "postrider_delivered_events_total"),
        ("attempts", "postrider_delivery_attempts_total"),
        ("attemptsFailed", "postrider_delivery_attempts_failed_total"),
        ("deadLettered", "postrider_dead_lettered_events_total"),
        ("dropped", "postrider_dropped_events_total"),
    ];
    for (total, name) in totals {
        let told = stats["totals"][total].as_f64();
        assert_eq!(told, Some(page.sum(name)), "{total}: {}", stats["totals"]);
    }
    assert_eq!(stats["totals"]["dropped"], 3);
    let rate = |name: &str| stats["rates"][name].as_f64().expect("a rate");
    assert!(
        rate("publishedPerSec") > 0.0 && rate("deliveredPerSec") > 0.0,
        "{stats}"
    );
    for percentile in ["p50", "p95", "p99"] {
        let took = stats["latencyMs"][percentile].as_f64();
        assert!(took.is_some_and(|took| took > 0.0 && took < 30_000.0), "{stats}");
    }
    assert!(
        stats["topics"][0]["publishedPerSec"].as_f64() > Some(0.0),
        "{stats}"
    );
    assert_eq!(server.send("POST", "/metrics", &[], "").status, 405);
}

#[test]
fn refused_publishes_are_counted_by_reason_and_logged_with_their_target_whatever_the_path() {
    let config = "[limits]\nrequest_bytes_max = 2000\n[[topic]]\nname = \"orders\"\n\
                  key1 = \"a-key-of-the-topic-orders-0123456789\"\n[[domain]]\nname = \"tenants\"\n\
                  key1 = \"a-key-of-the-domain-tenants-01234567\"\n";
    let server = ServerSetup::config(config).start();
    let key = |key: &'static str| ("aeg-sas-key", key);
    let good = key("a-key-of-the-topic-orders-0123456789");
    let post = |target: &str, headers: &[(&str, &str)], body: &str, status: u16| {
        server.send("POST", target, headers, body).expect(status);
    };
    let wrong = key("a-key-of-nobody-at-all-0123456789012");
    for _ in 0..3 {
        post(
            "/topics/orders/api/events?aeg-sas-key=hush",
            &[JSON, wrong],
            "[]",
            401,
        );
    }
    post("/topics/orders/api/events", &[JSON, good], "{", 400);
    let long = "x".repeat(3000);
    post("/topics/orders/api/events", &[JSON, good], &long, 413);
    post("/domains/tenants/api/events", &[JSON], "[]", 401);
    post("/topics/nobody/api/events", &[JSON, good], "[]", 404);
    post("/domains/nobody/api/events", &[JSON, good], "[]", 404);
    post("/api/events", &[JSON, good], "[]", 404);
    for end in [
        "/topics/orders",
        "/topics/orders/api",
        "/topics/orders/api/event",
        "/domains/tenants",
        "/domains/tenants/api",
        "/domains/tenants/api/event",
        "/api/event",
    ] {
        post(end, &[JSON, good], "[]", 404);
    }
    post(
        "/topics/nobody/events?api-version=2019-01-01-preview",
        &[JSON],
        "[]",
        404,
    );
    post(
        "/topics/orders/events?api-version=2019-01-01-preview",
        &[],
        "[]",
        415,
    );
    post(
        "/topics/orders/events?api-version=2019-01-01-preview",
        &[JSON],
        "{",
        400,
    );
    // GET requests are not publish requests, and unknown paths belong to no topic.
    server.send("GET", "/topics/orders/api/events", &[], "");
    post("/", &[JSON], "[]", 404);
    post("/wp-login.php", &[JSON], "[]", 404);
    post("/topics/orders/api/events/more", &[JSON], "[]", 404);

    let page = ParsedMetricsPage::get(&server);
    let of = |reason: &str| page.value("postrider_publish_refused_by_reason_total", &[("reason", reason)]);
    let expected = [
        ("unauthorized", 4.0),
        ("bad_request", 2.0),
        ("too_large", 1.0),
        ("not_found", 11.0),
        ("unsupported_media_type", 1.0),
        ("forbidden", 0.0),
        ("too_many_requests", 0.0),
        ("unavailable", 0.0),
    ];
    for (reason, count) in expected {
        assert_eq!(of(reason), count, "{reason}");
    }
    let line = server.logged(&["publish refused", "/topics/orders/api/events", "unauthorized"]);
    for part in [
        "WARN",
        "client=127.0.0.1",
        "credential=\"aeg-sas-key\"",
        "not authorized",
        "times=1",
    ] {
        assert!(line.contains(part), "{part:?} is missing in {line}");
    }
    server.logged(&["publish refused", "/topics/nobody/api/events", "not_found"]);
    server.logged(&["publish refused", "/topics/nobody/events", "not_found"]);
    server.logged(&[
        "publish refused",
        "/domains/tenants/api/events",
        "credential=\"none\"",
    ]);
    let log = server.log();
    let alike = log
        .iter()
        .filter(|line| line.contains("/topics/orders/api/events") && line.contains("unauthorized"));
    assert_eq!(alike.count(), 1, "{log:#?}");
    assert!(
        !log.iter()
            .any(|line| line.contains("hush") || line.contains("a-key-of")),
        "{log:#?}"
    );
}

// An event that is retried for an hour: the displayed age is its own, whether it waits or is
// retried, and its delivery latency is measured.
#[test]
fn the_oldest_event_grows_older_until_it_arrives() {
    let well = Arc::new(AtomicBool::new(false));
    let answers = well.clone();
    let receiver = TestReceiver::answering(move |_| {
        ScriptedReply::Status(if answers.load(Relaxed) { 200 } else { 500 })
    });
    let mut server = ServerSetup::test_clock(CLIENT).start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("1")]);
    let of = [("topic", "orders"), ("subscription", "billing")];
    let age = |server: &TestServer| {
        ParsedMetricsPage::get(server).value("postrider_oldest_undelivered_seconds", &of)
    };
    server.advance(&json!({"by": "1h"}));
    // The age of a waiting retry is known to the second.
    let an_hour = 3600.0..3601.0;
    assert!(an_hour.contains(&age(&server)), "{}", age(&server));
    let page = ParsedMetricsPage::get(&server);
    assert_eq!(page.value("postrider_retrying_events", &of), 1.0);
    let tried = page.value("postrider_delivery_attempts_total", &of);
    assert!(tried > 3.0);
    let stats = ours(&server, "stats");
    let oldest = stats["oldestUndeliveredSeconds"].as_f64();
    assert!(oldest.is_some_and(|age| an_hour.contains(&age)), "{oldest:?}");
    // The age is also known from disk after a restart; counters start at zero, and the test clock
    // continues from its stored time.
    server.stop();
    server.start();
    let restarted = ours(&server, "subscriptions")["value"][0]["oldestUndeliveredSeconds"].clone();
    assert!(restarted.is_number(), "{restarted}");

    well.store(true, Relaxed);
    let accepted = age(&server);
    let (before, _) = server.advance(&json!({"by": "0s"}));
    let (arrived, attempts) = server.advance(&json!({"toNextAttempt": true}));
    assert_eq!(attempts, 1);
    assert_eq!(age(&server), 0.0);
    let took = accepted + arrived.since(before).as_secs_f64();
    let page = ParsedMetricsPage::get(&server);
    let sum = page.value("postrider_delivery_latency_seconds_sum", &[("topic", "orders")]);
    assert!((sum - took).abs() < 1.5, "{sum} s, not {took} s");
    let one = &ours(&server, "subscriptions")["value"][0];
    assert_eq!(one["oldestUndeliveredSeconds"], Value::Null);
    let p50 = one["latencyMs"]["p50"].as_f64().expect("something was delivered") / 1e3;
    assert!((p50 - took).abs() < took / 8.0, "{p50} s, not about {took} s");
}

#[test]
fn what_happened_minute_by_minute() {
    let receiver = TestReceiver::answering(|one| match one.path.as_str() {
        "/sick" => ScriptedReply::Status(500),
        _ => ScriptedReply::Status(200),
    });
    let server = ServerSetup::test_clock(CLIENT).start();
    for topic in ["orders", "other"] {
        server.put_topic(topic);
    }
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.subscribe("orders", "sick", &receiver.url("/sick"), json!(null));
    server.publish("orders", &[event("1"), event("2")]);
    server.advance(&json!({"by": "2m"}));
    server.publish("orders", &[event("3")]);
    server.publish("other", &[event("4")]);
    server.advance(&json!({"by": "0s"}));

    let numbers = |series: &Value, name: &str| -> Vec<u64> {
        let list = series[name]
            .as_array()
            .unwrap_or_else(|| panic!("{name} in {series}"));
        list.iter().map(|n| n.as_u64().expect("a number")).collect()
    };
    let all = ours(&server, "stats/series?minutes=3");
    assert_eq!(all["stepSeconds"], 60);
    assert_eq!(numbers(&all, "published"), [2, 0, 2]);
    assert_eq!(numbers(&all, "delivered"), [2, 0, 1]);
    // Attempts at once and after 10 s, 40 s and 100 s; the last event's first attempt is in the
    // third minute.
    let failed = numbers(&all, "failed");
    let stats = ours(&server, "stats");
    assert_eq!(
        json!(failed.iter().sum::<u64>()),
        stats["totals"]["attemptsFailed"]
    );
    assert_eq!(numbers(&all, "dropped"), [0, 0, 0]);
    assert_eq!(numbers(&all, "deadLettered"), [0, 0, 0]);
    let percentiles = all["p95Ms"].as_array().expect("a list");
    assert!(
        percentiles[0].is_number() && percentiles[1].is_null() && percentiles[2].is_number(),
        "{all}"
    );
    let topic = ours(&server, "stats/series?topic=orders&minutes=3");
    assert_eq!(numbers(&topic, "published"), [2, 0, 1]);
    assert_eq!(numbers(&topic, "delivered"), [2, 0, 1]);
    let one = ours(&server, "stats/series?subscription=billing&minutes=2");
    assert_eq!(numbers(&one, "delivered"), [0, 1]);
    assert_eq!(numbers(&one, "failed"), [0, 0]);
    assert_eq!(one["published"], Value::Null);
    assert_eq!(
        ours(&server, "stats/series")["delivered"]
            .as_array()
            .map(Vec::len),
        Some(60)
    );

    // A day passes at once: the series is all zeros.
    server.advance(&json!({"by": "25h"}));
    let later = ours(&server, "stats/series?minutes=1440");
    assert!(numbers(&later, "published").iter().all(|n| *n == 0), "{later}");
    for bad in [
        "minutes=0",
        "minutes=1441",
        "minutes=x",
        "minutes=181&topic=orders",
        "topic=none",
        "since=1",
    ] {
        let path = format!("/postrider/v1/stats/series?{bad}");
        let answer = server.send("GET", &path, &[("authorization", "Bearer hush")], "");
        assert!([400, 404].contains(&answer.status), "{bad}: {}", answer.text());
    }
}

#[test]
fn the_names_of_azure_monitor_and_of_the_edge_module() {
    let receiver = TestReceiver::answering(|one| match one.path.as_str() {
        "/never" => ScriptedReply::Status(400),
        _ => ScriptedReply::Status(200),
    });
    let config = "[metrics]\nazure_names = true\n\
                  [[topic]]\nname = \"same\"\n[[domain]]\nname = \"same\"\n";
    let setup = ServerSetup::config(config).with("metrics__reporterType", "prometheus");
    let server = setup.start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.subscribe("orders", "never", &receiver.url("/never"), json!(null));
    server.publish("orders", &[event("1")]);
    server.counted("/deliveries/delivered", 1);
    server.counted("/deliveries/attemptsFailed", 1);

    let page = ParsedMetricsPage::get(&server);
    // Topics with equal names must not make two samples of the same name.
    for topic in ["same", "domains/same"] {
        assert_eq!(
            page.value("postrider_published_events_total", &[("topic", topic)]),
            0.0
        );
    }
    let resource = ("Resource", "orders");
    let billing = [resource, ("EventSubscriptionName", "billing")];
    let never = [resource, ("EventSubscriptionName", "never")];
    assert_eq!(page.value("PublishSuccessCount", &[resource]), 1.0);
    assert_eq!(page.value("PublishFailCount", &[resource]), 0.0);
    assert_eq!(page.value("UnmatchedEventCount", &[resource]), 0.0);
    assert_eq!(page.value("PublishSuccessLatencyInMs_count", &[resource]), 1.0);
    assert_eq!(page.value("MatchedEventCount", &billing), 1.0);
    assert_eq!(page.value("DeliverySuccessCount", &billing), 1.0);
    assert_eq!(page.value("DestinationProcessingDurationInMs_count", &never), 1.0);
    let error = [
        never[0],
        never[1],
        ("ErrorType", "BadRequest"),
        ("Error", "BadRequest"),
    ];
    assert_eq!(page.value("DeliveryAttemptFailCount", &error), 1.0);
    assert_eq!(page.sum("DroppedEventCount"), 1.0);
    assert_eq!(page.sum("DeadLetteredCount"), 0.0);

    let topic = ("topic", "orders");
    let billing = [topic, ("subscription", "billing")];
    let never = [topic, ("subscription", "never")];
    for (name, expected) in [
        ("EventsReceived", 1.0),
        ("UnmatchedEvents", 0.0),
        ("SuccessRequests", 1.0),
        ("SystemErrorRequests", 0.0),
        ("UserErrorRequests", 0.0),
        ("SuccessRequestLatencyMs_count", 1.0),
    ] {
        assert_eq!(page.value(name, &[topic]), expected, "{name}");
    }
    for (name, expected) in [
        ("DeliverySuccessCounts", [1.0, 0.0]),
        ("DeliveryFailureCounts", [0.0, 1.0]),
        ("DeliveryAttemptsCount", [1.0, 1.0]),
        ("ExpiredCounts", [0.0, 0.0]),
        ("DeliverySuccessLatencyMs_count", [1.0, 0.0]),
        ("DeliveryFailureLatencyMs_count", [0.0, 1.0]),
        ("SystemDelayForFirstAttemptMs_count", [1.0, 1.0]),
    ] {
        let found = [&billing, &never].map(|labels| page.value(name, labels));
        assert_eq!(found, expected, "{name}");
    }
    // Path and query in the module's own documentation.
    let path = "/metrics?api-version=2019-01-01-preview";
    let answer = server.send("GET", path, &[], "").expect(200);
    assert!(
        ParsedMetricsPage::parse(answer.text())
            .families
            .contains_key("EventsReceived")
    );
}

#[test]
fn what_dashboards_and_alerts_ask_for_is_there() {
    let receiver = TestReceiver::start();
    let server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("1")]);
    server.counted("/deliveries/delivered", 1);
    let page = ParsedMetricsPage::get(&server);
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    for file in ["grafana/postrider.json", "prometheus/alerts.yml"] {
        let text = std::fs::read_to_string(contrib.join(file)).expect("it is in the repository");
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let asked: BTreeSet<&str> = words.filter(|word| word.starts_with("postrider_")).collect();
        assert!(asked.len() > 5, "{file} asks for {asked:?}");
        for name in asked {
            let kind = page.families.get(name);
            let bucket = name
                .strip_suffix("_bucket")
                .and_then(|name| page.families.get(name));
            assert!(
                kind.is_some_and(|kind| kind != "histogram")
                    || bucket.is_some_and(|kind| kind == "histogram"),
                "{file} asks for {name}, which is not there"
            );
        }
    }
    let text = std::fs::read_to_string(contrib.join("grafana/postrider.json")).expect("read before");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "every panel has an id of its own");
}
