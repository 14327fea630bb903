//! Logins as Azure's clients do them, and the rights of the tokens.

use crate::client::{HttpTestAnswer, TestConnection};
use crate::server::{EDGE_VERSION, JSON, ServerSetup, TestServer, event};
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

const TENANT: &str = "00000000-0000-0000-0000-000000000002";
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");
const CLIENTS: &str = "\
[[client]]\nid = \"boss\"\nsecret = \"boss-secret\"\n\
[[client]]\nid = \"hand\"\nsecret = \"hand-secret\"\nrole = \"contributor\"\n\
[[client]]\nid = \"eye\"\nsecret = \"eye-secret\"\nrole = \"reader\"\n\
[[client]]\nid = \"mouth\"\nsecret = \"mouth-secret\"\nrole = \"data-sender\"\n";

fn clients() -> ServerSetup {
    ServerSetup::config(format!("edge.require_auth = true\n{CLIENTS}"))
}

fn form(client: &str) -> String {
    format!(
        "grant_type=client_credentials&client_id={client}&client_secret={client}-secret\
         &scope=https%3A%2F%2Fmanagement.azure.com%2F%2F.default"
    )
}

fn post(server: &TestServer, path: &str, form: &str) -> HttpTestAnswer {
    server.send("POST", path, &[FORM], form)
}

/// A token for a client whose secret is derived from its name.
#[track_caller]
fn token(server: &TestServer, client: &str) -> String {
    let answer = post(server, &format!("/{TENANT}/oauth2/v2.0/token"), &form(client));
    access_token(&answer.expect(200))
}

fn access_token(answer: &HttpTestAnswer) -> String {
    answer.json()["access_token"].as_str().unwrap().to_owned()
}

/// Claims of a token, whoever signed it.
fn claims(token: &str) -> Value {
    let part = token.split('.').nth(1).unwrap();
    serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(part).unwrap()).unwrap()
}

fn with(server: &TestServer, method: &str, path: &str, token: &str, body: &Value) -> HttpTestAnswer {
    let bearer = format!("Bearer {token}");
    let body = match body {
        Value::Null => String::new(),
        body => body.to_string(),
    };
    server.send(method, path, &[JSON, ("authorization", &bearer)], body)
}

#[test]
fn a_token_says_who_its_bearer_is() {
    let server = clients().start();
    let base = format!("http://{}", server.http);
    for (path, issuer, version) in [
        ("/adfs/oauth2/token/", format!("{base}/adfs"), "1.0"),
        (
            "/common/oauth2/v2.0/token",
            format!("{base}/{TENANT}/v2.0"),
            "2.0",
        ),
        (
            "/organizations/oauth2/token?client-request-id=x",
            format!("{base}/{TENANT}/"),
            "1.0",
        ),
    ] {
        let answer = post(&server, path, &form("mouth")).expect(200);
        assert_eq!(answer.header("cache-control"), Some("no-store"), "{path}");
        let body = answer.json();
        assert_eq!(body["token_type"], "Bearer");
        let claims = claims(body["access_token"].as_str().unwrap());
        assert_eq!(claims["iss"], issuer, "{path}");
        assert_eq!(claims["ver"], version, "{path}");
        assert_eq!(claims["aud"], "https://management.azure.com/");
        assert_eq!(claims["tid"], TENANT);
        assert_eq!(
            (&claims["appid"], &claims["azp"]),
            (&json!("mouth"), &json!("mouth"))
        );
        assert_eq!(claims["roles"], json!(["data-sender"]));
        assert_eq!(claims["sub"], claims["oid"]);
        assert_eq!(claims["oid"].as_str().unwrap().len(), 36);
        assert_eq!(claims["nbf"], claims["iat"]);
        let life = claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap();
        assert_eq!(life, 3600);
    }
    // Version 1 of the protocol has resources instead of scopes, and numbers as text.
    let old = "grant_type=client_credentials&client_id=eye&client_secret=eye-secret&resource=https://h/";
    let body = post(&server, &format!("/{TENANT}/oauth2/token"), old)
        .expect(200)
        .json();
    assert_eq!(
        (&body["resource"], &body["expires_in"]),
        (&json!("https://h/"), &json!("3600"))
    );
    assert_eq!(
        claims(body["access_token"].as_str().unwrap())["aud"],
        "https://h/"
    );
    // The secret may also come in the header.
    let basic = format!("Basic {}", BASE64_STANDARD.encode("eye:eye-secret"));
    let answer = server.send(
        "POST",
        "/adfs/oauth2/token",
        &[FORM, ("authorization", &basic)],
        "grant_type=client_credentials",
    );
    assert_eq!(claims(&access_token(&answer.expect(200)))["appid"], "eye");
}

#[test]
fn a_login_that_fails_says_why_as_oauth_does() {
    let server = clients().start();
    let check = |path: &str, form: &str, status: u16, error: &str, words: &[&str]| {
        let answer = post(&server, path, form).expect(status);
        let body = answer.json();
        assert_eq!(body["error"], error, "{form}: {body}");
        let description = body["error_description"].as_str().unwrap();
        for word in words {
            assert!(description.contains(word), "{word} in {description}");
        }
        assert!(!description.contains("secret-of"), "{description}");
        answer
    };
    let path = format!("/{TENANT}/oauth2/v2.0/token");
    let all = form("boss");
    let wrong = all.replace("boss-secret", "secret-of-nobody");
    let refused = check(&path, &wrong, 401, "invalid_client", &["AADSTS7000215", "'boss'"]);
    assert_eq!(
        refused.header("www-authenticate"),
        Some("Basic realm=\"postrider\"")
    );
    server.logged(&["logins were refused", "boss"]);
    // The secret of one client does not work for another.
    let other = all.replace("client_id=boss", "client_id=hand");
    check(&path, &other, 401, "invalid_client", &["'hand'"]);
    let unknown = all.replace("client_id=boss", "client_id=nobody");
    check(&path, &unknown, 401, "invalid_client", &["'nobody'"]);
    let password = all.replace("client_credentials", "password");
    check(&path, &password, 400, "unsupported_grant_type", &["'password'"]);
    for name in ["grant_type", "client_id", "client_secret"] {
        let without = all.replace(&format!("{name}="), "x=");
        check(&path, &without, 400, "invalid_request", &[&format!("'{name}'")]);
    }
    check(
        &path,
        &format!("{all}&scope=y"),
        400,
        "invalid_request",
        &["'scope'"],
    );
    check(
        "/contoso.example/oauth2/v2.0/token",
        &all,
        400,
        "invalid_request",
        &["AADSTS90002", "'contoso.example'", TENANT],
    );
    let long = format!("{all}&x={}", "y".repeat(100_000));
    check(&path, &long, 400, "invalid_request", &["longer"]);
    let get = server.send("GET", &path, &[], "").expect(405);
    assert_eq!(get.header("allow"), Some("POST"));
}

#[test]
fn the_way_to_log_in_is_told_on_both_listeners() {
    let server = clients().start();
    let mut tls = TestConnection::open_tls(server.https, "127.0.0.1", &server.ca()).unwrap();
    let mut plain = server.connect();
    for (connection, base) in [
        (&mut tls, format!("https://{}", server.https)),
        (&mut plain, format!("http://{}", server.http)),
    ] {
        let mut get = |path: &str| connection.send("GET", path, &[], b"").unwrap().expect(200).json();
        let metadata = get("/metadata/endpoints?api-version=2022-09-01");
        assert_eq!(metadata["resourceManager"], base);
        assert_eq!(
            metadata["authentication"]["loginEndpoint"],
            format!("{base}/adfs")
        );
        assert_eq!(get("/metadata/endpoints?api-version=2020-06-01")[0], metadata);
        let adfs = get("/adfs/.well-known/openid-configuration");
        assert_eq!(adfs["token_endpoint"], format!("{base}/adfs/oauth2/token/"));
        for name in [TENANT, "common", "organizations", "adfs"] {
            let found = get(&format!("/{name}/v2.0/.well-known/openid-configuration"));
            assert_eq!(found["issuer"], format!("{base}/{TENANT}/v2.0"));
            assert_eq!(
                found["token_endpoint"],
                format!("{base}/{name}/oauth2/v2.0/token")
            );
            let keys = found["jwks_uri"].as_str().unwrap().strip_prefix(&base).unwrap();
            let keys = get(keys);
            assert_eq!(keys["keys"][0]["kty"], "EC", "{keys}");
            assert!(keys["keys"][0].get("d").is_none(), "the private half stays here");
        }
        let instance = get("/common/discovery/instance?api-version=1.1&authorization_endpoint=x");
        assert_eq!(
            instance["tenant_discovery_endpoint"],
            format!("{base}/{TENANT}/v2.0/.well-known/openid-configuration")
        );
    }
    let other = "/contoso.example/v2.0/.well-known/openid-configuration";
    let refused = plain.send("GET", other, &[], b"").unwrap().expect(400).json();
    assert_eq!(refused["error"], "invalid_request");

    let public = ServerSetup::config("listen.public_url = \"https://grid.example\"").start();
    let metadata = public
        .send("GET", "/metadata/endpoints", &[], "")
        .expect(200)
        .json();
    assert_eq!(metadata["resourceManager"], "https://grid.example");
}

#[test]
fn roles_decide_on_every_road() {
    let server = clients().start();
    let [boss, hand, eye, mouth] = ["boss", "hand", "eye", "mouth"].map(|client| token(&server, client));
    let topic = format!("/topics/orders?{EDGE_VERSION}");
    let null = &Value::Null;
    let edge = |status: u16, method: &str, token: &str| {
        let answer = with(&server, method, &topic, token, null).expect(status);
        if status == 403 {
            let refusal = answer.json();
            assert_eq!(refusal["error"]["details"]["code"], "Forbidden", "{refusal}");
        }
    };
    edge(403, "PUT", &eye);
    edge(403, "PUT", &mouth);
    edge(200, "PUT", &hand);
    edge(200, "GET", &eye);
    edge(403, "GET", &mouth);
    // The secret itself works as a token, with the same role.
    edge(403, "PUT", "eye-secret");
    edge(200, "GET", "eye-secret");
    edge(401, "GET", "nobody-secret");

    let events = json!([event("e1")]);
    for path in [
        "/topics/orders/api/events".to_owned(),
        format!("/topics/orders/events?{EDGE_VERSION}"),
    ] {
        let publish = |token: &str| with(&server, "POST", &path, token, &events);
        for token in [&boss, &hand, &mouth, &"mouth-secret".to_owned()] {
            publish(token).expect(200);
        }
        let refused = publish(&eye).expect(403).text().to_owned();
        for word in ["'eye'", "reader", "data-sender"] {
            assert!(refused.contains(word), "{word} in {refused}");
        }
        publish(&format!("{}x", boss)).expect(401);
    }

    let ours = "/postrider/v1/endpoints";
    with(&server, "GET", ours, &eye, null).expect(200);
    let refused = with(&server, "GET", ours, &mouth, null).expect(403).json();
    let detail = refused["detail"].as_str().unwrap();
    assert!(
        detail.contains("'mouth'") && detail.contains("reader"),
        "{detail}"
    );
    let admit = format!("{ours}/admit");
    let body = json!({"endpoint": "x"});
    with(&server, "POST", &admit, &eye, &body).expect(403);
    with(&server, "POST", &admit, &boss, &body).expect(404);
    with(
        &server,
        "POST",
        "/postrider/v1/deadletters/purge",
        &eye,
        &json!({}),
    )
    .expect(403);
    with(&server, "GET", "/postrider/v1/deadletters", &eye, null).expect(200);

    let azure = "/subscriptions?api-version=2022-12-01";
    with(&server, "GET", azure, &eye, null).expect(200);
    with(&server, "GET", azure, &mouth, null).expect(403);
}

#[test]
fn tokens_are_listed_and_revoked_and_their_key_is_replaced_for_good() {
    let mut server = clients().start();
    let [boss, eye] = ["boss", "eye"].map(|client| token(&server, client));
    let endpoints = |server: &TestServer, token: &str| {
        with(server, "GET", "/postrider/v1/endpoints", token, &Value::Null)
    };
    let listed = |server: &TestServer| {
        let found = with(
            server,
            "GET",
            "/postrider/v1/sessions",
            "boss-secret",
            &Value::Null,
        );
        found.expect(200).json()["value"].as_array().unwrap().clone()
    };
    let change = |server: &TestServer, verb: &str, body: Value| {
        let path = format!("/postrider/v1/sessions/{verb}");
        with(server, "POST", &path, "eye-secret", &body).expect(403);
        with(server, "POST", &path, "boss-secret", &body)
            .expect(200)
            .json()
    };
    let all = listed(&server);
    assert_eq!(all.len(), 2, "{all:?}");
    let shown = all.iter().find(|one| one["client"] == "boss").unwrap().clone();
    assert_eq!(
        (&shown["kind"], &shown["address"]),
        (&json!("token"), &json!("127.0.0.1"))
    );
    assert_eq!(shown["id"], claims(&boss)["jti"]);

    assert_eq!(change(&server, "revoke", json!({"client": "eye"}))["revoked"], 1);
    let refused = endpoints(&server, &eye).expect(401).json();
    assert!(
        refused["detail"].as_str().unwrap().contains("revoked"),
        "{refused}"
    );
    endpoints(&server, &boss).expect(200);
    let again = token(&server, "eye");
    endpoints(&server, &again).expect(200);

    server.kill();
    server.start();
    endpoints(&server, &eye).expect(401);
    endpoints(&server, &boss).expect(200);
    endpoints(&server, &again).expect(200);
    assert_eq!(listed(&server).len(), 2);
    change(&server, "revoke", json!({"id": shown["id"]}));
    endpoints(&server, &boss).expect(401);
    endpoints(&server, &again).expect(200);

    // Tokens of the old key stay valid until they expire, unless they are revoked at once.
    change(&server, "rotate-key", json!({}));
    endpoints(&server, &again).expect(200);
    let new = change(&server, "rotate-key", json!({"now": true}))["keyId"].clone();
    endpoints(&server, &again).expect(401);
    let fresh = token(&server, "eye");
    server.kill();
    server.start();
    endpoints(&server, &fresh).expect(200);
    endpoints(&server, &again).expect(401);
    let keys = server
        .send("GET", "/common/discovery/v2.0/keys", &[], "")
        .expect(200)
        .json();
    assert_eq!(keys["keys"].as_array().unwrap().len(), 1);
    assert_eq!(keys["keys"][0]["kid"], new);

    // A token for another service is not accepted.
    let other = form("eye").replace("management.azure.com", "vault.azure.net");
    let other = access_token(&post(&server, "/common/oauth2/v2.0/token", &other).expect(200));
    let refused = endpoints(&server, &other).expect(401).json();
    assert!(
        refused["detail"].as_str().unwrap().contains("audience"),
        "{refused}"
    );
}

#[test]
fn an_address_that_guesses_keys_has_to_wait_and_is_logged() {
    let key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let server = ServerSetup::config(format!("topic = [{{ name = \"orders\", key1 = \"{key}\" }}]")).start();
    let publish = |key: &str| {
        let events = json!([event("e1")]).to_string();
        server.send(
            "POST",
            "/topics/orders/api/events",
            &[JSON, ("aeg-sas-key", key)],
            events,
        )
    };
    // Requests without credentials do not count as guesses.
    for _ in 0..15 {
        server
            .send("POST", "/topics/orders/api/events", &[JSON], "[]")
            .expect(401);
    }
    for _ in 0..10 {
        publish("wrong").expect(401);
    }
    let refused = (0..20)
        .map(|_| publish("wrong"))
        .find(|answer| answer.status == 429)
        .expect("a wait has begun");
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=300).contains(&wait), "{wait}");
    assert_eq!(refused.json()["error"]["code"], "TooManyRequests");
    server.logged(&["too many wrong credentials", "127.0.0.1", "topic-key", "orders"]);
    // A key too long to be guessed is checked even for a throttled address.
    publish(key).expect(200);
    let metrics = server.send("GET", "/metrics", &[], "").expect(200);
    let line = "postrider_throttled_credentials_total{kind=\"topic-key\"} ";
    let count = metrics.text().lines().find_map(|one| one.strip_prefix(line));
    assert_ne!(count.expect("it is counted"), "0");
}

#[test]
fn nothing_but_the_edge_api_is_open_to_strangers() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let events = json!([event("e1")]).to_string();
    for (method, path) in [
        ("GET", "/subscriptions?api-version=2022-12-01"),
        (
            "GET",
            "/providers/Microsoft.EventGrid/topicTypes?api-version=2022-06-15",
        ),
        ("GET", "/postrider/v1/endpoints"),
        ("GET", "/postrider/v1/deadletters"),
        ("GET", "/postrider/v1/nothing"),
        ("POST", "/topics/orders/api/events"),
    ] {
        for headers in [&[JSON][..], &[JSON, ("authorization", "Bearer x.y.z")]] {
            let answer = server.send(method, path, headers, &events).expect(401);
            assert!(answer.header("www-authenticate").is_some(), "{path}");
        }
    }
}

#[test]
fn tokens_outlive_the_process_but_not_their_client() {
    let mut server = clients().start();
    let [boss, eye] = ["boss", "eye"].map(|client| token(&server, client));
    server.kill();
    server.start();
    let ours = |server: &TestServer, token: &str| {
        with(server, "GET", "/postrider/v1/endpoints", token, &Value::Null)
    };
    ours(&server, &boss).expect(200);
    ours(&server, &eye).expect(200);
    server.stop();
    server.configure("[[client]]\nid = \"boss\"\nsecret = \"new\"\nrole = \"data-sender\"\n".into());
    server.start();
    ours(&server, &boss).expect(403);
    let refused = ours(&server, &eye).expect(401).json();
    assert!(refused["detail"].as_str().unwrap().contains("'eye'"), "{refused}");
    // A token of another server is not accepted.
    let elsewhere = clients().start();
    ours(&server, &token(&elsewhere, "boss")).expect(401);
    let key = server.data_dir().join("token-key.pem");
    let mode = std::fs::metadata(key).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn the_first_start_says_where_the_secret_is() {
    let mut server = TestServer::start_plain();
    let path = server.data_dir().join("credentials.toml");
    let line = server.logged(&["client id and secret", path.to_str().unwrap()]);
    let credentials: toml::Table = toml::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let text = |name: &str| credentials[name].as_str().unwrap().to_owned();
    assert!(!line.contains(&text("client_secret")));
    assert_eq!(text("tenant"), TENANT);
    assert_eq!(text("subscription"), "00000000-0000-0000-0000-000000000001");
    let form = format!(
        "grant_type=client_credentials&client_id={}&client_secret={}",
        text("client_id"),
        text("client_secret")
    );
    let token = access_token(&post(&server, "/adfs/oauth2/token", &form).expect(200));
    with(&server, "GET", "/postrider/v1/endpoints", &token, &Value::Null).expect(200);
    let before = std::fs::read(&path).unwrap();
    server.stop();
    server.start();
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

/// A browser that has signed in to the portal.
struct PortalBrowser {
    cookie: String,
    token: String,
}

impl PortalBrowser {
    #[track_caller]
    fn sign_in(server: &TestServer, client: &str) -> PortalBrowser {
        let body = json!({"secret": format!("{client}-secret")}).to_string();
        let answer = server.send("POST", "/portal/session", &[JSON], body).expect(200);
        let cookie = answer.header("set-cookie").and_then(|set| set.split(';').next());
        PortalBrowser {
            cookie: cookie.expect("a session has a cookie").to_owned(),
            token: answer.json()["csrf"].as_str().unwrap().to_owned(),
        }
    }

    fn send(&self, server: &TestServer, method: &str) -> HttpTestAnswer {
        let headers = [
            ("cookie", self.cookie.as_str()),
            ("x-csrf-token", self.token.as_str()),
        ];
        server.send(method, "/portal/session", &headers, "")
    }
}

#[test]
fn portal_sessions_outlive_the_process_unless_they_were_ended() {
    let mut server = clients().start();
    let [stays, leaves] = [(); 2].map(|()| PortalBrowser::sign_in(&server, "boss"));
    leaves.send(&server, "DELETE").expect(204);
    leaves.send(&server, "GET").expect(401);
    server.kill();
    server.start();
    stays.send(&server, "GET").expect(200);
    leaves.send(&server, "GET").expect(401);
    let ask = |server: &TestServer, method: &str, verb: &str, body: &Value| {
        let path = format!("/postrider/v1/sessions{verb}");
        with(server, method, &path, "boss-secret", body)
            .expect(200)
            .json()
    };
    let portal_sessions = |server: &TestServer| {
        let listed = ask(server, "GET", "", &Value::Null);
        let kinds = listed["value"].as_array().unwrap().iter().map(|one| &one["kind"]);
        kinds.filter(|kind| **kind == "portal").count()
    };
    assert_eq!(portal_sessions(&server), 1);

    // The first key's file makes no valid sessions after the key was replaced.
    ask(&server, "POST", "/rotate-key", &json!({}));
    stays.send(&server, "GET").expect(401);
    assert_eq!(portal_sessions(&server), 0);
    let again = PortalBrowser::sign_in(&server, "boss");
    server.kill();
    server.start();
    stays.send(&server, "GET").expect(401);
    again.send(&server, "GET").expect(200);
    ask(&server, "POST", "/revoke", &json!({"all": true}));
    again.send(&server, "GET").expect(401);
}

#[test]
fn the_bare_address_leads_to_the_portal() {
    let server = TestServer::start_plain();
    for method in ["GET", "HEAD"] {
        let answer = server.send(method, "/", &[], "").expect(303);
        assert_eq!(answer.header("location"), Some("/portal"));
    }
    server.send("POST", "/", &[JSON], "[]").expect(404);
    server.logged(&[&format!("the portal is at http://{}/portal", server.http)]);
    let own = clients().start();
    own.logged(&["clients and their secrets are those of the configuration", "4"]);
}

/// The path is absolute; a relative one would not tell readers of the log where the file is.
#[test]
fn the_secrets_path_is_whole_though_the_directory_was_named_shortly() {
    let server = ServerSetup {
        data_dir: Some("data".into()),
        ..ServerSetup::default()
    }
    .start();
    let line = server.logged(&["client id and secret"]);
    let path = line.split("path=").nth(1).unwrap_or_default();
    assert!(
        path.starts_with('/') && path.contains("/data/credentials.toml"),
        "{line}"
    );
}

#[test]
fn a_managed_identity_is_there_only_if_it_is_asked_for_and_only_here() {
    let off = clients().start();
    let [msi, imds] = [
        "/msi/token?api-version=2019-08-01&resource=https%3A%2F%2Feventgrid.azure.net",
        "/metadata/identity/oauth2/token?api-version=2018-02-01&resource=https://eventgrid.azure.net",
    ];
    for path in [msi, imds] {
        off.send("GET", path, &[("metadata", "true")], "").expect(404);
    }
    let config = format!("azure.managed_identity = \"mouth\"\n{CLIENTS}");
    let server = ServerSetup::config(config.clone()).start();
    for (path, header) in [(msi, ("x-identity-header", "x")), (imds, ("metadata", "true"))] {
        let body = server.send("GET", path, &[header], "").expect(200).json();
        let claims = claims(body["access_token"].as_str().unwrap());
        assert_eq!(
            (&claims["appid"], &claims["tid"]),
            (&json!("mouth"), &json!(TENANT))
        );
        assert_eq!(body["resource"], "https://eventgrid.azure.net");
        assert_eq!(
            body["expires_on"],
            claims["exp"].to_string(),
            "a number in a string"
        );
        // A page in a browser cannot send the header, nor does it have our host name.
        server.send("GET", path, &[], "").expect(400);
        server
            .send("GET", path, &[header, ("host", "evil.example")], "")
            .expect(403);
        server
            .send("GET", &format!("{path}&client_id=boss"), &[header], "")
            .expect(400);
    }
    let wide = ServerSetup {
        config,
        flags: Some(["--http=0.0.0.0:0", "--https=off"].map(String::from).into()),
        ..ServerSetup::default()
    };
    let wide = ServerSetup {
        config: format!("edge.allow_open = true\n{}", wide.config),
        ..wide
    };
    let told = wide.refusal();
    assert!(
        told.contains("azure.managed_identity") && told.contains("0.0.0.0:0"),
        "{told}"
    );
    let told = ServerSetup::config("azure.managed_identity = \"nobody\"").refusal();
    assert!(
        told.contains("azure.managed_identity") && told.contains("nobody"),
        "{told}"
    );
}

#[test]
fn tokens_of_an_external_issuer_are_taken() {
    let issuer = clients().start();
    let base = format!("https://{}/{TENANT}/v2.0", issuer.https);
    let config = |audience: &str| {
        format!(
            "[transport]\nextra_ca_files = [{:?}]\n\
             [oidc]\nissuer = \"{base}\"\naudience = \"{audience}\"\nroles = {{ owner = \"reader\", data-sender = \"data-sender\" }}\n",
            issuer.ca()
        )
    };
    let mut server = ServerSetup::config(config("api://grid")).start();
    let token_for = |client: &str| {
        let mut tls = TestConnection::open_tls(issuer.https, "127.0.0.1", &issuer.ca()).unwrap();
        let form = form(client).replace(
            "https%3A%2F%2Fmanagement.azure.com%2F%2F.default",
            "api://grid/.default",
        );
        let path = format!("/{TENANT}/oauth2/v2.0/token");
        let answer = tls.send("POST", &path, &[FORM], form.as_bytes()).unwrap();
        access_token(&answer.expect(200))
    };
    let ours = |server: &TestServer, token: &str| {
        with(server, "GET", "/postrider/v1/endpoints", token, &Value::Null)
    };
    let boss = token_for("boss");
    ours(&server, &boss).expect(200);
    // The roles are mapped: an owner at the issuer is a reader here, and a contributor has no role.
    let admit = "/postrider/v1/endpoints/admit";
    with(&server, "POST", admit, &boss, &json!({"endpoint": "x"})).expect(403);
    let refused = ours(&server, &token_for("hand")).expect(403).json();
    assert!(
        refused["detail"].as_str().unwrap().contains("no role"),
        "{refused}"
    );
    server.put_topic("orders");
    let publish = |token: &str| {
        with(
            &server,
            "POST",
            "/topics/orders/api/events",
            token,
            &json!([event("e1")]),
        )
    };
    publish(&token_for("mouth")).expect(200);
    publish(&boss).expect(403);
    // At another address the same server is another issuer, which is not trusted.
    ours(&server, &token(&issuer, "boss")).expect(401);
    // The generated client still works.
    let credentials = std::fs::read_to_string(server.data_dir().join("credentials.toml")).unwrap();
    let credentials: toml::Table = toml::from_str(&credentials).unwrap();
    ours(&server, credentials["client_secret"].as_str().unwrap()).expect(200);

    server.stop();
    server.configure(config("api://other"));
    server.start();
    let refused = ours(&server, &boss).expect(401).json();
    assert!(
        refused["detail"].as_str().unwrap().contains("api://other"),
        "{refused}"
    );
    // Without trust in the issuer's certificate no keys are fetched, and the log tells why.
    server.stop();
    let untrusted = config("api://grid").split_once("[oidc]").unwrap().1.to_owned();
    server.configure(format!("[oidc]{untrusted}"));
    server.start();
    ours(&server, &boss).expect(401);
    server.logged(&["keys of the token issuer", "certificate"]);
}

/// Runs `postrider az-setup` for this server, with only `az` on its PATH.
fn az_setup(server: &TestServer, az: Option<&Path>, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
    command
        .env_clear()
        .args(["az-setup", "--https", &server.https.to_string()])
        .arg("--data-dir")
        .arg(server.data_dir())
        .args(more);
    if let Some(az) = az {
        let path = format!("{}:/usr/bin:/bin", az.parent().unwrap().display());
        command.env("PATH", path).env("AZURE_CONFIG_DIR", "/somewhere");
    }
    command.output().unwrap()
}

/// A fake `az` that records its arguments.
fn fake_az(directory: &Path, more: &str) -> std::path::PathBuf {
    let path = directory.join("az");
    let script = format!(
        "#!/bin/sh\necho \"$AZURE_CONFIG_DIR $REQUESTS_CA_BUNDLE $*\" >>{:?}\n{more}\n",
        directory.join("calls")
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn az_setup_prints_or_does_what_az_needs() {
    let server = TestServer::start_plain();
    let credentials = std::fs::read_to_string(server.data_dir().join("credentials.toml")).unwrap();
    let credentials: toml::Table = toml::from_str(&credentials).unwrap();
    let [id, secret] = ["client_id", "client_secret"].map(|name| credentials[name].as_str().unwrap());
    let ca = server.ca().canonicalize().unwrap().display().to_string();
    let url = format!("https://{}", server.https);

    let printed = az_setup(&server, None, &["--name", "LocalGrid"]);
    let printed = String::from_utf8(printed.stdout).unwrap();
    for line in [
        format!("export REQUESTS_CA_BUNDLE={ca}"),
        format!("export NODE_EXTRA_CA_CERTS={ca}"),
        format!("  az cloud register --name LocalGrid --endpoint-resource-manager={url}"),
        "az cloud set --name LocalGrid &&".to_owned(),
        format!("az login --service-principal --username={id} --password={secret} --tenant={TENANT}"),
    ] {
        assert!(printed.lines().any(|found| found == line), "{line} in {printed}");
    }

    let directory = tempfile::tempdir().unwrap();
    let calls = || std::fs::read_to_string(directory.path().join("calls")).unwrap();
    let az = fake_az(directory.path(), "[ \"$2\" != show ]");
    let done = az_setup(&server, Some(&az), &["--run"]);
    let (told, said) = (
        String::from_utf8(done.stderr).unwrap(),
        String::from_utf8(done.stdout).unwrap(),
    );
    assert_eq!(done.status.code(), Some(0), "{told}");
    assert!(
        !told.contains(secret) && told.contains("--password=********"),
        "{told}"
    );
    assert!(
        said.contains(&format!("export REQUESTS_CA_BUNDLE={ca}")),
        "{said}"
    );
    let expected: String = [
        "cloud show --name Postrider".to_owned(),
        format!("cloud register --name Postrider --endpoint-resource-manager={url}"),
        "cloud set --name Postrider".to_owned(),
        // Tokens of a previous server are removed.
        format!("logout --username={id}"),
        format!("login --service-principal --username={id} --password={secret} --tenant={TENANT}"),
    ]
    .map(|call| format!("/somewhere {ca} {call}\n"))
    .concat();
    assert_eq!(calls(), expected);

    // A known cloud is updated; the first command that fails is the last one run.
    std::fs::remove_file(directory.path().join("calls")).unwrap();
    let az = fake_az(directory.path(), "[ \"$2\" != set ] || exit 9");
    let failed = az_setup(&server, Some(&az), &["--run"]);
    assert_eq!(failed.status.code(), Some(9));
    assert!(
        calls().contains("cloud update") && !calls().contains("login"),
        "{}",
        calls()
    );

    let failed = az_setup(&server, Some(Path::new("/nowhere/az")), &["--run"]);
    let told = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{told}");
    assert!(told.contains("az is not on the PATH"), "{told}");
}

#[test]
fn az_setup_says_so_if_no_server_answers() {
    let mut server = TestServer::start_plain();
    server.stop();
    let directory = tempfile::tempdir().unwrap();
    let az = fake_az(directory.path(), "");
    let failed = az_setup(&server, Some(&az), &["--run"]);
    let told = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{told}");
    assert!(told.contains("is the server running?"), "{told}");
    assert!(!directory.path().join("calls").exists(), "az was not called");
}
