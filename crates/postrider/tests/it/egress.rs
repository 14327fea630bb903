//! Addresses of deliveries, and the defence against hostile receivers and events.

use crate::dead_letters::dead_letter_to;
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::net::TcpListener;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A server that logs why attempts fail.
fn talkative(config: &str) -> TestServer {
    ServerSetup::config(format!("log.level = \"info,postrider_engine=debug\"\n{config}")).start()
}

#[test]
fn metadata_addresses_are_never_dialled() {
    let server = talkative("");
    server.put_topic("orders");
    let urls = [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fe80::1]/",
        "http://0.0.0.0:9/",
        "http://168.63.129.16/",
        "http://2852039166/",
        "http://0xa9fea9fe/",
    ];
    let mut accepted = 0;
    for (n, url) in urls.iter().enumerate() {
        let body = json!({"properties": {"destination": {"endpointType": "WebHook", "properties": {"endpointUrl": url}}}});
        let answer = server.edge("PUT", &format!("/topics/orders/eventSubscriptions/s{n}"), &body);
        // The URL may be refused or accepted; the address that would be dialled is what matters.
        assert!(matches!(answer.status, 200 | 400), "{url}: {}", answer.text());
        accepted += u64::from(answer.status == 200);
    }
    assert!(accepted >= 4);
    server.publish("orders", &[event("e1")]);
    server.counted("/deliveries/attemptsFailed", accepted);
    server.logged(&[
        "attempt failed",
        "egress.policy forbids 169.254.169.254 (cloud metadata)",
    ]);
    wait::until("each of them is told of", || {
        let log = server.log();
        let forbidden = log.iter().filter(|line| line.contains("egress.policy forbids"));
        (forbidden.count() >= 4).then_some(())
    });
    assert_eq!(server.health()["deliveries"]["delivered"], 0);
}

// The proxy is up but opens no tunnel.
#[test]
fn a_fault_of_the_proxy_is_told_and_held_against_no_endpoint() {
    let proxy = TestReceiver::answering(|_| ScriptedReply::Status(502));
    let receiver = TestReceiver::start();
    let address = proxy.url("").replace("http://", "");
    let server = talkative(&format!(
        "[egress]\nproxy = \"http://me:hush@{address}\"\nno_proxy = [\"localhost\"]\n"
    ));
    server.put_topic("orders");
    server.subscribe("orders", "through", &receiver.url("/through"), json!(null));
    let direct = receiver.url("/direct").replace("127.0.0.1", "localhost");
    server.subscribe("orders", "direct", &direct, json!(null));
    let events: Vec<Value> = (0..12).map(|n| event(format!("e{n}"))).collect();
    server.publish("orders", &events);
    server.counted("/deliveries/delivered", 12);
    // More than the ten failures that would put an endpoint on probation.
    server.counted("/proxy/faults", 12);
    let health = server.health();
    assert_eq!(health["proxy"]["address"], address, "{health}");
    assert_eq!(health["warnings"][0]["code"], "proxy", "{health}");
    assert!(receiver.take_received().iter().all(|one| one.path == "/direct"));
    assert!(proxy.take_received().iter().all(|one| one.method == "CONNECT"));
    server.logged(&["attempt failed", "could not open a tunnel (502)"]);
    assert!(!server.log().iter().any(|line| line.contains("hush")));
    assert!(
        !server
            .log()
            .iter()
            .any(|line| line.contains("endpoint keeps failing"))
    );
}

#[test]
fn the_policy_internet_allows_neither_http_nor_loopback() {
    let receiver = TestReceiver::start();
    let server = talkative("egress.policy = \"internet\"");
    server.put_topic("orders");
    server.subscribe("orders", "plain", &receiver.url("/"), json!(null));
    server.subscribe(
        "orders",
        "loopback",
        &receiver.url("/").replace("http:", "https:"),
        json!(null),
    );
    server.publish("orders", &[event("e1")]);
    server.counted("/deliveries/attemptsFailed", 2);
    server.logged(&["egress.policy forbids http"]);
    server.logged(&["egress.policy forbids 127.0.0.1 (loopback)"]);
    assert!(receiver.take_received().is_empty());
}

#[test]
fn a_custom_policy_allows_what_it_lists() {
    let receiver = TestReceiver::start();
    for (config, arrives) in [
        (
            "egress = { policy = \"custom\", allow = [\"127.0.0.0/8\"] }",
            true,
        ),
        (
            "egress = { policy = \"custom\", allow = [\"127.0.0.0/8\"], deny = [\"127.0.0.1\"] }",
            false,
        ),
        (
            "egress = { policy = \"custom\", allow = [\"10.0.0.0/8\"] }",
            false,
        ),
    ] {
        let server = ServerSetup::config(config).start();
        server.put_topic("orders");
        server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
        server.publish("orders", &[event("e1")]);
        if arrives {
            receiver.next();
        } else {
            server.counted("/deliveries/attemptsFailed", 1);
            assert!(receiver.take_received().is_empty(), "{config}");
        }
    }
}

/// A web server that must not get any request.
struct UnusedWebServer(TcpListener);

impl UnusedWebServer {
    fn at(address: &str) -> UnusedWebServer {
        let listener = TcpListener::bind((address, 0)).expect("a free port");
        listener.set_nonblocking(true).expect("a socket can be told");
        UnusedWebServer(listener)
    }

    fn port(&self) -> u16 {
        self.0.local_addr().expect("it is bound").port()
    }

    #[track_caller]
    fn assert_nobody_came(&self) {
        let came = self.0.accept().map(|(_, peer)| peer);
        assert_eq!(came.unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

#[test]
fn storage_accounts_and_collectors_are_dialled_only_if_the_policy_allows_it() {
    let (webhook, account, collector) = (
        TestReceiver::start(),
        UnusedWebServer::at("127.0.0.1"),
        UnusedWebServer::at("127.0.0.1"),
    );
    // Names are not checked at the start: their addresses are judged when they are dialled.
    let config = format!(
        "profile = \"cloud-2018\"\negress = {{ policy = \"custom\", allow = [\"10.0.0.0/8\"] }}\n\
         [traces]\notlp_endpoint = \"http://localhost:{}\"\n\
         [[storage_account]]\nname = \"far\"\nkey = \"a2V5\"\nblob_endpoint = \"http://localhost:{}/far\"\n",
        collector.port(),
        account.port(),
    );
    let server = ServerSetup::config(config).start();
    server.put_topic("orders");
    let once = json!({"retryPolicy": {"maxDeliveryAttempts": 1}});
    let properties = dead_letter_to("far", "letters", once);
    server.subscribe("orders", "billing", &webhook.url("/"), properties);
    server.publish("orders", &[event("e1")]);
    server.logged(&[
        "dead letters cannot be written",
        "egress.policy forbids",
        "127.0.0.1",
    ]);
    server.logged(&["traces cannot be exported", "egress.policy forbids", "127.0.0.1"]);
    account.assert_nobody_came();
    collector.assert_nobody_came();
    assert!(webhook.take_received().is_empty());
}

#[test]
fn the_keys_of_an_issuer_are_fetched_only_from_where_the_policy_allows_it() {
    let keys = UnusedWebServer::at("127.0.0.2");
    let keys_url = format!("http://127.0.0.2:{}/keys", keys.port());
    // The issuer itself is allowed, but its keys are at an address that is not.
    let base: Arc<OnceLock<String>> = Arc::default();
    let issuer = {
        let base = base.clone();
        TestReceiver::answering(move |_| {
            let issuer = base.get().expect("it is set before anybody asks");
            let document = json!({"issuer": issuer, "jwks_uri": keys_url}).to_string();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                document.len()
            );
            ScriptedReply::Bytes((head + &document).into_bytes())
        })
    };
    let url = issuer.url("/tenant");
    base.set(url.clone()).expect("it is set once");
    let server = ServerSetup::config(format!(
        "egress = {{ policy = \"custom\", allow = [\"127.0.0.1\"] }}\n\
         [oidc]\nissuer = \"{url}\"\naudience = \"api://grid\"\n"
    ))
    .start();
    let part = |value: Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
    let (header, claims) = (
        part(json!({"alg": "RS256", "kid": "k"})),
        part(json!({"iss": url, "aud": "api://grid"})),
    );
    let bearer = format!("Bearer {header}.{claims}.c2lnbmF0dXJl");
    server
        .send(
            "GET",
            "/postrider/v1/endpoints",
            &[("authorization", &bearer)],
            "",
        )
        .expect(401);
    assert_eq!(issuer.next().path, "/tenant/.well-known/openid-configuration");
    server.logged(&["keys of the token issuer", "egress.policy forbids 127.0.0.2"]);
    keys.assert_nobody_came();
}

#[test]
fn redirects_are_not_followed() {
    let elsewhere = TestReceiver::start();
    let target = elsewhere.url("/elsewhere");
    let receiver = TestReceiver::answering(move |delivery| {
        let status = &delivery.path[1..];
        ScriptedReply::Bytes(
            format!("HTTP/1.1 {status} Moved\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n")
                .into_bytes(),
        )
    });
    let server = TestServer::start_plain();
    server.put_topic("orders");
    for status in [301, 302, 303, 307, 308] {
        server.subscribe(
            "orders",
            &format!("s{status}"),
            &receiver.url(&format!("/{status}")),
            json!(null),
        );
    }
    server.publish("orders", &[event("e1")]);
    server.counted("/deliveries/attemptsFailed", 5);
    assert!(elsewhere.take_received().is_empty());
    assert_eq!(server.health()["deliveries"]["delivered"], 0);
}

#[test]
fn large_and_endless_answers_do_not_hurt() {
    let receiver = TestReceiver::answering(|delivery| match delivery.path.as_str() {
        "/large" => {
            let mut bytes = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", 10 << 20).into_bytes();
            bytes.resize(bytes.len() + (10 << 20), b'x');
            ScriptedReply::Bytes(bytes)
        }
        "/endless" => ScriptedReply::Endless {
            head: b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec(),
            piece: format!("1000\r\n{}\r\n", "x".repeat(4096)).into_bytes(),
        },
        "/header" => ScriptedReply::Endless {
            head: b"HTTP/1.1 200 OK\r\n".to_vec(),
            piece: format!("x-more: {}\r\n", "x".repeat(4000)).into_bytes(),
        },
        _ => ScriptedReply::Status(200),
    });
    let server = TestServer::start_plain();
    server.put_topic("orders");
    for path in ["/large", "/endless", "/header", "/plain"] {
        server.subscribe(
            "orders",
            &format!("to-{}", &path[1..]),
            &receiver.url(path),
            json!(null),
        );
    }
    let idle = server.resident();
    let events: Vec<Value> = (0..5).map(|n| event(format!("e{n}"))).collect();
    server.publish("orders", &events);
    // A success is decided by the first line, whatever follows; a head without an end is a failure.
    server.counted("/deliveries/delivered", 15);
    server.counted("/deliveries/attemptsFailed", 5);
    let grown = server.resident().saturating_sub(idle) >> 20;
    assert!(grown < 50, "{grown} MB more");
}

#[test]
fn a_slow_answer_does_not_hold_up_its_neighbours() {
    let receiver = TestReceiver::answering(|delivery| match delivery.path.as_str() {
        "/silent" => ScriptedReply::Silence,
        _ => ScriptedReply::Status(200),
    });
    let server = TestServer::start_plain();
    server.put_topic("orders");
    // Another path on the same host and port is another endpoint.
    server.subscribe("orders", "silent", &receiver.url("/silent"), json!(null));
    server.subscribe("orders", "prompt", &receiver.url("/prompt"), json!(null));
    let events: Vec<Value> = (0..200).map(|n| event(format!("e{n}"))).collect();
    server.publish("orders", &events);
    server.counted("/deliveries/delivered", 200);
}

#[test]
fn events_cannot_inject_headers() {
    let receiver = TestReceiver::start();
    let key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let config = format!(
        "[[topic]]\nname = \"orders\"\nkey1 = \"{key}\"\n[[topic.subscription]]\nname = \"hook\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{}\", delivery_attribute_mappings = [\
         {{ name = \"X-Dyn\", type = \"Dynamic\", properties = {{ sourceField = \"data.v\" }} }} ] }} }}\n",
        receiver.url("/")
    );
    let server = ServerSetup::config(config).start();
    for value in [
        "a\r\nX-Evil: 1",
        "a\nX-Evil: 1",
        "a\r\n\r\nPOST /evil HTTP/1.1\r\n\r\n",
        "a\0b",
        "\u{7f}",
        "\r",
        "ok",
    ] {
        let mut sent = event("e1");
        sent["data"] = json!({"v": value});
        // Values that become headers must not break out of them in the data version either.
        sent["dataVersion"] = json!(value);
        let target = "/topics/orders/api/events";
        server
            .send(
                "POST",
                target,
                &[JSON, ("aeg-sas-key", key)],
                json!([sent]).to_string(),
            )
            .expect(200);
        let delivery = receiver.next();
        assert_eq!(
            (delivery.path.as_str(), delivery.header("x-evil")),
            ("/", None),
            "{value:?}"
        );
        assert_eq!(delivery.json()[0]["data"]["v"], value, "the body is as it was");
        let header = delivery.header("x-dyn").unwrap_or_default();
        assert!(!header.contains(['\r', '\n', '\0']), "{header:?}");
        if value == "ok" {
            assert_eq!((header, delivery.header("aeg-data-version")), ("ok", Some("ok")));
        }
    }
    assert!(receiver.take_received().is_empty());
}

#[test]
fn header_names_and_values_are_checked_when_a_subscription_is_made() {
    let refused = |name: &str, value: &str| {
        let config = format!(
            "[[topic]]\nname = \"orders\"\n[[topic.subscription]]\nname = \"hook\"\n\
             destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"http://127.0.0.1:9/\", \
             delivery_attribute_mappings = [{{ name = {}, type = \"Static\", properties = {{ value = {} }} }}] }} }}\n",
            json!(name),
            json!(value)
        );
        let told = ServerSetup::config(config).refusal();
        assert!(
            told.contains("subscription \"hook\" of topic \"orders\""),
            "{told}"
        );
        assert!(told.contains("deliveryAttributeMappings"), "{told}");
    };
    for name in [
        "",
        "bad name",
        "bad:name",
        "bad\r\nname",
        "aeg-event-type",
        "Host",
        "Content-Length",
        "Transfer-Encoding",
    ] {
        refused(name, "v");
    }
    refused("X-Static", "a\r\nX-Evil: 1");
    refused("X-Static", "a\0");

    // The same through the API, where it does not take effect at all.
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let mappings = json!([{"name": "bad name", "type": "Static", "properties": {"value": "v"}}]);
    let properties = json!({"endpointUrl": "http://127.0.0.1:9/", "deliveryAttributeMappings": mappings});
    let body = json!({"properties": {"destination": {"endpointType": "WebHook", "properties": properties}}});
    server
        .edge("PUT", "/topics/orders/eventSubscriptions/hook", &body)
        .expect(400);
}

#[test]
fn an_address_that_does_not_resolve_is_a_failed_attempt() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "nowhere", "http://nowhere.invalid/", json!(null));
    server.publish("orders", &[event("e1")]);
    server.counted("/deliveries/attemptsFailed", 1);
    let receiver = TestReceiver::start();
    server.subscribe("orders", "nowhere", &receiver.url("/"), json!(null));
    receiver.nothing_within(Duration::from_millis(50));
}
