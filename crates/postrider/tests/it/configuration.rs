//! The operator's configuration, and the files that the first start creates.

use crate::client::TestConnection;
use crate::server::{EDGE_VERSION, JSON, ServerSetup, TestServer, event};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path)
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        .permissions()
        .mode()
        & 0o777
}

/// Output of `--print-config`.
#[track_caller]
fn printed(config: &str, env: &[(&'static str, &str)], flags: &[&str]) -> String {
    let setup = ServerSetup {
        config: config.into(),
        env: env
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect(),
        flags: Some(
            [&["--print-config"], flags]
                .concat()
                .into_iter()
                .map(String::from)
                .collect(),
        ),
        ..ServerSetup::default()
    };
    let output = setup.run();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_configuration_that_is_not_understood_is_refused_by_name() {
    for (config, words) in [
        ("[listen]\nhtps = \"127.0.0.1:1\"\n", ["listen.htps", "https"]),
        ("profile = \"cloud-2022\"\n", ["profile", "cloud-2022"]),
        ("[shutdown]\ngrace = \"soon\"\n", ["shutdown.grace", "soon"]),
        ("[egress]\npolicy = \"none\"\n", ["egress.policy", "none"]),
        (
            "[[topic]]\nname = \"a b\"\n",
            ["topic \"a b\" in the configuration", "name"],
        ),
        (
            "[[topic]]\nname = \"orders\"\ninput_schema = \"Nope\"\n",
            ["topic \"orders\"", "inputSchema"],
        ),
        ("not toml", ["postrider.toml", "line 1"]),
    ] {
        let told = ServerSetup::config(config).refusal();
        for word in words {
            assert!(told.contains(word), "{word:?} in {told}");
        }
    }
    let setup = ServerSetup {
        env: vec![("POSTRIDER_LISTEN__HTPS", "off".into())],
        ..ServerSetup::default()
    };
    let told = setup.refusal();
    assert!(
        told.contains("POSTRIDER_LISTEN__HTPS") && told.contains("listen.htps"),
        "{told}"
    );
}

#[test]
fn flags_win_over_variables_over_the_file() {
    let file =
        "[listen]\nhttp = \"127.0.0.1:1001\"\nhttps = \"127.0.0.1:1002\"\n[azure]\nlocation = \"filed\"\n";
    let env = [
        ("POSTRIDER_LISTEN__HTTPS", "127.0.0.1:2002"),
        ("POSTRIDER_LISTEN__HTTP", "127.0.0.1:2001"),
    ];
    let text = printed(file, &env, &["--http", "127.0.0.1:3001"]);
    for line in [
        "http = \"127.0.0.1:3001\"",
        "https = \"127.0.0.1:2002\"",
        "location = \"filed\"",
        "profile = \"cloud-2021\"",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[test]
fn the_printed_configuration_hides_every_secret() {
    let file = "[[client]]\nid = \"me\"\nsecret = \"hush-1\"\n\
                [[storage_account]]\nname = \"abc\"\nkey = \"aHVzaC0y\"\n\
                [[topic]]\nname = \"orders\"\nkey1 = \"aHVzaC0z\"\nkey2 = \"aHVzaC00\"\n\
                [[topic.subscription]]\nname = \"s\"\n\
                destination = { endpoint_type = \"WebHook\", properties = { endpoint_url = \"http://h/?code=hush-5\", \
                delivery_attribute_mappings = [{ name = \"A\", type = \"Static\", properties = { value = \"hush-6\", isSecret = true } }] } }\n";
    let env = [
        ("inbound__clientAuth__sasKeys__enabled", "true"),
        ("inbound__clientAuth__sasKeys__key1", "hush-7"),
    ];
    let text = printed(file, &env, &[]);
    for secret in ["hush", "aHVzaC"] {
        assert!(!text.contains(secret), "{text}");
    }
    assert!(text.contains("name = \"orders\""), "{text}");
}

#[test]
fn an_open_edge_api_is_not_offered_to_the_network() {
    let listening = |config: &str| ServerSetup {
        config: config.into(),
        flags: Some(["--http=0.0.0.0:0", "--https=off"].map(String::from).into()),
        ..ServerSetup::default()
    };
    let told = listening("").refusal();
    assert!(
        told.contains("edge.require_auth") && told.contains("0.0.0.0:0"),
        "{told}"
    );
    let server = listening("edge.allow_open = true").start();
    assert!(server.http.ip().is_unspecified());
    let closed =
        listening("edge.require_auth = true\nclient = [{ id = \"me\", secret = \"client-secret\" }]").start();
    let local = std::net::SocketAddr::from(([127, 0, 0, 1], closed.http.port()));
    let mut connection = TestConnection::open(local).unwrap();
    let target = format!("/topics/orders?{EDGE_VERSION}");
    connection.send("PUT", &target, &[JSON], b"").unwrap().expect(401);
    connection
        .send("PUT", &target, &[JSON, ("aeg-sas-key", "")], b"")
        .unwrap()
        .expect(401);
    connection
        .send(
            "PUT",
            &target,
            &[JSON, ("authorization", "Bearer client-secret")],
            b"",
        )
        .unwrap()
        .expect(200);
}

#[test]
fn an_open_edge_api_answers_only_to_its_own_names() {
    let server = ServerSetup::config("listen.names = [\"grid.example\"]").start();
    let get = |host: &str| {
        server.send(
            "GET",
            &format!("/topics?{EDGE_VERSION}"),
            &[JSON, ("host", host)],
            "",
        )
    };
    for host in [
        "localhost",
        "LOCALHOST:80",
        "127.0.0.1",
        "[::1]:5888",
        "grid.example:1",
    ] {
        get(host).expect(200);
    }
    for host in [
        "evil.example",
        "evil.example:5888",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "[::2]",
    ] {
        let refusal = get(host).expect(403).json();
        assert_eq!(refusal["error"]["details"]["code"], "Forbidden", "{refusal}");
    }
    // A page in a browser cannot publish either, whether it uses our address as its host or calls
    // it.
    server.put_topic("orders");
    let body = json!([event("e1")]).to_string();
    let publish = |headers: &[(&str, &str)]| server.send("POST", "/topics/orders/events", headers, &body);
    publish(&[JSON, ("host", "evil.example")]).expect(403);
    for origin in [
        "https://evil.example",
        "http://localhost.evil.example:80",
        "null",
        "http://localhost:1",
        "https://grid.example",
    ] {
        publish(&[JSON, ("origin", origin)]).expect(403);
    }
    // A page's form cannot send the required content type, and requests without any are refused,
    // too.
    publish(&[("content-type", "text/plain")]).expect(415);
    publish(&[]).expect(415);
    // Our own pages may publish, and so may deliveries, which have an origin that no page has.
    let own = format!("http://{}", server.http);
    for origin in [own.as_str(), "eventgrid.azure.net"] {
        publish(&[JSON, ("origin", origin)]).expect(200);
    }
}

#[test]
fn the_first_start_makes_keys_that_only_the_owner_can_read() {
    let mut server = TestServer::start_plain();
    let data = server.data_dir();
    for private in ["credentials.toml", "tls/ca-key.pem", "tls/server-key.pem"] {
        assert_eq!(mode(&data.join(private)), 0o600, "{private}");
        server.logged(&["created", private]);
    }
    server.logged(&["created", "tls/ca.pem"]);
    let credentials: toml::Table =
        toml::from_str(&std::fs::read_to_string(data.join("credentials.toml")).unwrap()).unwrap();
    let secret = credentials["client_secret"].as_str().unwrap().to_owned();
    assert!(secret.len() >= 32 && credentials["client_id"].as_str().is_some());
    assert!(!server.log().join("\n").contains(&secret));

    // The files are kept across a restart, and the secret publishes.
    let ca = std::fs::read(server.ca()).unwrap();
    server.stop();
    server.start();
    assert_eq!(std::fs::read(server.ca()).unwrap(), ca);
    server.put_topic("orders");
    let bearer = format!("Bearer {secret}");
    let events = json!([event("e1")]).to_string();
    server
        .send(
            "POST",
            "/topics/orders/api/events",
            &[JSON, ("authorization", &bearer)],
            events,
        )
        .expect(200);
}

#[test]
fn https_needs_no_trust_but_in_the_servers_own_ca() {
    let server = ServerSetup::config("listen.names = [\"grid.example\"]").start();
    let target = format!("/topics/orders?{EDGE_VERSION}");
    for name in ["localhost", "127.0.0.1", "::1", "grid.example"] {
        let mut connection = TestConnection::open_tls(server.https, name, &server.ca()).unwrap();
        connection.send("PUT", &target, &[JSON], b"").unwrap().expect(200);
        connection.send("GET", "/healthz", &[], b"").unwrap().expect(200);
    }
    let elsewhere = TestServer::start_plain();
    let mut stranger = TestConnection::open_tls(server.https, "localhost", &elsewhere.ca()).unwrap();
    assert!(
        stranger.send("GET", "/healthz", &[], b"").is_err(),
        "another server's CA does not vouch for it"
    );
    let mut other = TestConnection::open_tls(server.https, "other.example", &server.ca()).unwrap();
    assert!(
        other.send("GET", "/healthz", &[], b"").is_err(),
        "nor does its own for another name"
    );
    // A client that speaks plain http to the https port gets an explanation.
    let mut plain = TestConnection::open(server.https).unwrap();
    let answer = plain.send("GET", "/healthz", &[], b"").unwrap().expect(400);
    assert!(answer.text().contains("https"), "{}", answer.text());
    let mut connection = TestConnection::open_tls(server.https, "localhost", &server.ca()).unwrap();
    connection.send("GET", "/healthz", &[], b"").unwrap().expect(200);
}

#[test]
fn declared_resources_follow_the_file() {
    let config = |batch: u32| {
        format!(
            "[[topic]]\nname = \"orders\"\n[[subscription]]\ntopic = \"orders\"\nname = \"s1\"\n\
             destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"http://127.0.0.1:9/\", max_events_per_batch = {batch} }} }}\n"
        )
    };
    let mut server = ServerSetup::config(config(5)).start();
    let shown = |server: &TestServer| {
        let subscription = server
            .edge("GET", "/topics/orders/eventSubscriptions/s1", &Value::Null)
            .expect(200)
            .json();
        subscription["properties"]["destination"]["properties"]["maxEventsPerBatch"].clone()
    };
    assert_eq!(shown(&server), 5);
    server.put_topic("by-hand");
    server.stop();
    server.configure(config(7));
    server.start();
    assert_eq!(shown(&server), 7);
    server.edge("GET", "/topics/by-hand", &Value::Null).expect(200);
}

#[test]
fn the_log_can_be_json() {
    let setup = ServerSetup {
        flags: Some(
            ["--http=127.0.0.1:0", "--https=127.0.0.1:0", "--log-format=json"]
                .map(String::from)
                .into(),
        ),
        ..ServerSetup::default()
    };
    let mut server = setup.start();
    server.stop();
    for line in server.log() {
        let line: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(line["level"].is_string(), "{line}");
    }
}
