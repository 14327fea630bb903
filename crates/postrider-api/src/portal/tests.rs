//! The portal over real connections, with requests as a browser sends them.

use crate::LocalSignInPage;
use crate::azure::subscriptions::tests::test_server::{
    ApiTestServer, GROUP, LabClock, TestAnswer, VERSION, web_hook,
};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use postrider_portal::INDEX;
use serde_json::{Value, json};
use std::path::Path;

/// A browser on one of the server's own pages.
struct Browser<'a> {
    lab: &'a ApiTestServer,
    cookie: String,
    token: String,
}

impl<'a> Browser<'a> {
    async fn signed_in(lab: &'a ApiTestServer, secret: &str) -> Browser<'a> {
        let got = sign_in(lab, secret).await.expect(200);
        Browser {
            lab,
            cookie: cookie(&got),
            token: got.body["csrf"].as_str().unwrap().to_owned(),
        }
    }

    async fn ask(&self, method: &str, path: &str, body: Option<Value>, more: &[(&str, &str)]) -> TestAnswer {
        let mut headers = vec![("cookie", self.cookie.as_str())];
        for (name, value) in [("host", "localhost"), ("x-csrf-token", self.token.as_str())] {
            if !more.iter().any(|(given, _)| *given == name) {
                headers.push((name, value));
            }
        }
        headers.extend(more);
        self.lab.exchange(method, path, body.as_ref(), &headers).await
    }

    async fn get(&self, path: &str) -> TestAnswer {
        self.ask("GET", path, None, &[]).await
    }

    async fn change(&self, method: &str, path: &str, body: Option<Value>) -> TestAnswer {
        self.ask(method, path, body, &[]).await
    }
}

async fn sign_in(lab: &ApiTestServer, secret: &str) -> TestAnswer {
    let headers = [("host", "localhost"), ("content-type", "application/json")];
    let body = json!({ "secret": secret });
    lab.exchange("POST", "/portal/session", Some(&body), &headers)
        .await
}

/// A client that has only the cookie, such as another web server on the same host.
const NO_TOKEN: [(&str, &str); 1] = [("x-csrf-token", "")];

/// The cookie that a browser sends back.
fn cookie(got: &TestAnswer) -> String {
    let set = got.header("set-cookie");
    set.split(';').next().unwrap().to_owned()
}

#[tokio::test]
async fn files_are_served_with_what_keeps_them_safe() {
    let lab = ApiTestServer::new(false).await;
    let ask = async |method: &str, path: &str, more: &[(&str, &str)]| {
        let mut headers = vec![("host", "localhost")];
        headers.extend(more);
        lab.exchange(method, path, None, &headers).await
    };
    for path in ["/portal", "/portal/", "/portal/index.html"] {
        let got = ask("GET", path, &[]).await.expect(200);
        assert_eq!(got.header("content-type"), "text/html; charset=utf-8");
        assert!(got.bytes.starts_with(b"<!doctype html>"), "{path}");
    }
    for file in postrider_portal::FILES {
        let path = format!("/portal/{}", file.path);
        let got = ask("GET", &path, &[]).await.expect(200);
        assert_eq!(got.header("content-type"), file.content_type);
        assert_eq!(got.header("cache-control"), "no-cache");
        if file.path != INDEX {
            assert_eq!(got.bytes, file.bytes, "{path}");
        }
        check_headers(&got);
        let tag = got.header("etag").to_owned();
        let again = ask("GET", &path, &[("if-none-match", &tag)]).await.expect(304);
        assert!(again.bytes.is_empty());
        assert_eq!(again.header("etag"), tag);
        let weak = format!("\"other\", W/{tag}");
        ask("GET", &path, &[("if-none-match", &weak)]).await.expect(304);
        ask("GET", &path, &[("if-none-match", "\"other\"")])
            .await
            .expect(200);
        let head = ask("HEAD", &path, &[]).await.expect(200);
        assert!(head.bytes.is_empty());
        assert_eq!(head.header("content-length"), got.bytes.len().to_string());
    }
    for hostile in [
        "/portal/../Cargo.toml",
        "/portal/%2e%2e/Cargo.toml",
        "/portal/js",
        "/portal/js/",
        "/portal//index.html",
        "/portal/INDEX.HTML",
        "/PORTAL",
        "/portal/index.html/x",
        "/portal/session/x",
        "/portal/js%2Fapp.js",
    ] {
        let got = ask("GET", hostile, &[]).await.expect(404);
        assert_eq!(
            got.header("content-type"),
            "application/problem+json",
            "{hostile}"
        );
        check_headers(&got);
    }
    let refused = ask("POST", "/portal/index.html", &[]).await.expect(405);
    assert_eq!(refused.header("allow"), "GET, HEAD");
    ask("PUT", "/portal/session", &[]).await.expect(405);
}

#[tokio::test]
async fn only_browsers_on_this_machine_learn_where_the_secret_is() {
    let path = Path::new("/var/lib/a \"b\" <c>/credentials.toml");
    let mut lab = ApiTestServer::with(false, |server| {
        server.local_sign_in_page = Some(LocalSignInPage::new(path));
    })
    .await;
    let shown = async |lab: &ApiTestServer, headers: &[(&str, &str)]| {
        let got = lab.exchange("GET", "/portal", None, headers).await.expect(200);
        let text = String::from_utf8_lossy(&got.bytes).into_owned();
        assert!(text.contains("data-visitor=\"stranger\""), "{text}");
        let told = "data-credentials=\"/var/lib/a &quot;b&quot; &lt;c&gt;/credentials.toml\"";
        assert_eq!(text.contains(told), text.contains("data-credentials"), "{text}");
        (text.contains(told), got.header("etag").to_owned())
    };
    let (told, tag) = shown(&lab, &[("host", "localhost:5888")]).await;
    assert!(told);
    for host in ["127.0.0.1", "127.0.0.2:5888", "[::1]:5888", "LOCALHOST"] {
        assert!(shown(&lab, &[("host", host)]).await.0, "{host}");
    }
    let unchanged = [("host", "localhost"), ("if-none-match", tag.as_str())];
    let got = lab.exchange("GET", "/portal", None, &unchanged).await.expect(304);
    assert!(got.bytes.is_empty());
    // Names that resolve to this machine, and local proxies.
    for remote in [
        [("host", "postrider.example"), ("accept", "*/*")],
        [("host", "192.0.2.1"), ("accept", "*/*")],
        [("host", "localhost.example"), ("accept", "*/*")],
        [("host", "localhost"), ("x-forwarded-for", "192.0.2.1")],
        [("host", "localhost"), ("forwarded", "for=192.0.2.1")],
        [("host", "localhost"), ("via", "1.1 proxy")],
    ] {
        assert!(!shown(&lab, &remote).await.0, "{remote:?}");
    }
    lab.ends.peer = "192.0.2.1".parse().unwrap();
    let remote = [("host", "localhost"), ("if-none-match", tag.as_str())];
    assert!(!shown(&lab, &remote).await.0);
    // A server with configured clients has generated no secret file.
    let lab = ApiTestServer::new(false).await;
    assert!(!shown(&lab, &[("host", "localhost")]).await.0);
}

#[tokio::test]
async fn the_first_page_says_whether_there_is_a_session() {
    let lab = ApiTestServer::new(false).await;
    let is_for_strangers =
        |got: &TestAnswer| String::from_utf8_lossy(&got.bytes).contains("data-visitor=\"stranger\"");
    let mut browser = Browser::signed_in(&lab, "owner secret").await;
    let known = browser.get("/portal").await.expect(200);
    assert!(!is_for_strangers(&known));
    assert!(known.header("vary").contains("cookie"));
    // A browser sends no cookie with requests from other sites, whether it has one or not.
    let stranger = [("host", "localhost")];
    let linked = [("host", "localhost"), ("sec-fetch-site", "cross-site")];
    let got = lab.exchange("GET", "/portal", None, &linked).await.expect(200);
    assert!(!is_for_strangers(&got));
    let got = lab.exchange("GET", "/portal", None, &stranger).await.expect(200);
    assert!(is_for_strangers(&got));
    assert_ne!(got.header("etag"), known.header("etag"));
    // After a sign-out, the page that a browser cached while signed in is not confirmed as current.
    browser
        .change("DELETE", "/portal/session", None)
        .await
        .expect(204);
    let tag = [("if-none-match", known.header("etag"))];
    let got = browser.ask("GET", "/portal", None, &tag).await.expect(200);
    assert!(is_for_strangers(&got));
    browser.cookie = "__Host-postrider_session_443=guessed".to_owned();
    assert!(is_for_strangers(&browser.get("/portal").await.expect(200)));
}

#[track_caller]
fn check_headers(got: &TestAnswer) {
    let policy = got.header("content-security-policy");
    let parts: Vec<&str> = policy.split("; ").collect();
    let expected = [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ];
    assert_eq!(parts, expected);
    assert_eq!(got.header("x-content-type-options"), "nosniff");
    assert_eq!(got.header("referrer-policy"), "no-referrer");
    assert_eq!(got.header("x-frame-options"), "DENY");
    assert_eq!(got.header("cross-origin-opener-policy"), "same-origin");
}

#[tokio::test]
async fn a_secret_becomes_a_session_and_the_session_ends() {
    let lab = ApiTestServer::new(false).await;
    let got = sign_in(&lab, "reader secret").await.expect(200);
    let set = got.header("set-cookie").to_owned();
    assert!(set.starts_with("__Host-postrider_session_443="), "{set}");
    let attributes: Vec<&str> = set.split("; ").skip(1).collect();
    assert_eq!(
        attributes,
        ["Path=/", "Max-Age=43200", "HttpOnly", "SameSite=Strict", "Secure"]
    );
    assert_eq!(got.header("cache-control"), "no-store");
    assert_eq!(got.body["client"], "reader");
    assert_eq!(got.body["roles"], json!(["reader"]));
    // Every port of the host receives the cookie and can decode it, so the token must not be in it.
    let readable = cookie(&got)
        .split(['=', '.'])
        .nth(1)
        .map(|text| BASE64.decode(text).unwrap());
    let readable = String::from_utf8(readable.unwrap()).unwrap();
    assert!(readable.contains("reader"), "{readable}");
    assert!(
        !readable.contains(got.body["csrf"].as_str().unwrap()),
        "{readable}"
    );

    let browser = Browser {
        lab: &lab,
        cookie: cookie(&got),
        token: got.body["csrf"].as_str().unwrap().into(),
    };
    assert_eq!(browser.get("/portal/session").await.expect(200).body, got.body);
    browser.get("/postrider/v1/endpoints").await.expect(200);

    // Signing out requires the token, and ends the session for good.
    browser
        .ask("DELETE", "/portal/session", None, &NO_TOKEN)
        .await
        .expect(403);
    let ended = browser
        .change("DELETE", "/portal/session", None)
        .await
        .expect(204);
    assert!(ended.header("set-cookie").contains("Max-Age=0"));
    browser.get("/portal/session").await.expect(401);
    browser.get("/postrider/v1/endpoints").await.expect(401);
    browser
        .change("DELETE", "/portal/session", None)
        .await
        .expect(401);
}

#[tokio::test]
async fn the_cookie_alone_opens_nothing_and_names_its_port() {
    let lab = ApiTestServer::new(false).await;
    let browser = Browser::signed_in(&lab, "owner secret").await;
    let group = format!("{GROUP}/providers/Microsoft.EventGrid/topics?api-version={VERSION}");
    for path in ["/portal/session", "/postrider/v1/endpoints", group.as_str()] {
        browser.get(path).await.expect(200);
        let refused = browser.ask("GET", path, None, &NO_TOKEN).await.expect(403);
        let told = String::from_utf8_lossy(&refused.bytes).into_owned();
        assert!(told.contains("x-csrf-token"), "{told}");
        assert!(!told.contains(&browser.token), "the other half is not given away");
    }
    let headers = [("host", "localhost:8443"), ("content-type", "application/json")];
    let secret = json!({"secret": "owner secret"});
    let got = lab
        .exchange("POST", "/portal/session", Some(&secret), &headers)
        .await
        .expect(200);
    assert!(
        cookie(&got).starts_with("__Host-postrider_session_8443="),
        "{}",
        cookie(&got)
    );
    // The cookie of one port is not accepted on another.
    let token = got.body["csrf"].as_str().unwrap().to_owned();
    let set = cookie(&got);
    for (host, status) in [
        ("localhost:8443", 200),
        ("localhost:8444", 401),
        ("localhost", 401),
    ] {
        let headers = [
            ("host", host),
            ("cookie", set.as_str()),
            ("x-csrf-token", token.as_str()),
        ];
        lab.exchange("GET", "/portal/session", None, &headers)
            .await
            .expect(status);
    }
}

#[tokio::test]
async fn every_answer_has_the_headers_that_keep_it_safe() {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    let topic = format!("{GROUP}/providers/Microsoft.EventGrid/topics/t1");
    let version = format!("?api-version={VERSION}");
    let owner = ("authorization", "Bearer owner secret");
    for (method, path, kept) in [
        ("GET", "/healthz".to_owned(), "no-store"),
        ("GET", "/metrics".to_owned(), "no-store"),
        ("GET", "/nothing".to_owned(), "no-store"),
        ("PUT", "/api/events".to_owned(), "no-store"),
        ("GET", "/topics/t1".to_owned(), "no-store"),
        ("GET", "/docs".to_owned(), "no-cache"),
        ("GET", "/metadata/endpoints".to_owned(), "no-store"),
        ("POST", "/common/oauth2/token".to_owned(), "no-store"),
        ("POST", "/topics/t1/api/events".to_owned(), "no-store"),
        ("GET", format!("{topic}{version}"), "no-cache"),
        ("POST", format!("{topic}/listKeys{version}"), "no-store"),
        ("GET", "/postrider/v1/server".to_owned(), "no-store"),
        ("GET", "/postrider/v1/nothing".to_owned(), "no-store"),
        ("GET", "/portal/app.js".to_owned(), "no-store"),
    ] {
        for headers in [&[("host", "h.example")][..], &[("host", "localhost"), owner]] {
            let got = lab.exchange(method, &path, None, headers).await;
            assert_eq!(got.header("x-content-type-options"), "nosniff", "{path}");
            assert_eq!(got.header("cache-control"), kept, "{path}");
            let policy = got.header("strict-transport-security");
            // The portal calls paths of every API: a browser keeps the longest policy for all ports
            // of the host.
            let expected = match headers[0].1 {
                "h.example" => "max-age=31536000",
                _ => "max-age=300",
            };
            assert_eq!(policy, expected, "{path}");
        }
    }
}

#[tokio::test]
async fn an_address_that_guesses_has_to_wait_and_sessions_go_on() {
    let lab = ApiTestServer::with(false, |server| server.wall = std::sync::Arc::new(LabClock)).await;
    let browser = Browser::signed_in(&lab, "owner secret").await;
    for _ in 0..10 {
        sign_in(&lab, "wrong").await.expect(401);
    }
    for secret in ["wrong", "owner secret"] {
        let got = sign_in(&lab, secret).await.expect(429);
        assert_eq!(got.header("retry-after"), "1");
        assert!(got.headers.get("set-cookie").is_none());
    }
    // A valid session is no guess, and other kinds of credentials are counted separately.
    browser.get("/portal/session").await.expect(200);
    let path = "/postrider/v1/endpoints";
    let bearer = async |token: &str| {
        let value = format!("Bearer {token}");
        lab.exchange(
            "GET",
            path,
            None,
            &[("host", "localhost"), ("authorization", &value)],
        )
        .await
    };
    for _ in 0..10 {
        bearer("wrong").await.expect(401);
    }
    bearer("owner secret").await.expect(429);
    let text = crate::metrics::text(&lab.server, None);
    for line in [
        "postrider_wrong_credentials_total{kind=\"portal\"} 10",
        "postrider_throttled_credentials_total{kind=\"portal\"} 2",
        "postrider_wrong_credentials_total{kind=\"bearer\"} 10",
        "postrider_credential_lockouts_total 2",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[tokio::test]
async fn wrong_secrets_are_counted_and_say_nothing() {
    let lab = ApiTestServer::new(false).await;
    for wrong in ["", "x", "owner", "owner secreT", "owner secret "] {
        let got = sign_in(&lab, wrong).await.expect(401);
        assert_eq!(got.body["field"], "secret");
        assert_eq!(got.body["detail"], "secret: is not that of any client");
        assert!(got.headers.get("set-cookie").is_none());
    }
    assert_eq!(lab.server.logins_refused.total(), 5);
    let ask = async |body: Value, headers: &[(&str, &str)]| {
        lab.exchange("POST", "/portal/session", Some(&body), headers)
            .await
    };
    let host = ("host", "localhost");
    let json_type = ("content-type", "application/json");
    let good = json!({"secret": "owner secret"});
    ask(json!({"secret": 5}), &[host, json_type]).await.expect(400);
    ask(json!({}), &[host, json_type]).await.expect(400);
    let got = ask(json!({"secret": "x", "more": 1}), &[host, json_type])
        .await
        .expect(400);
    assert_eq!(got.body["detail"], "more: is not known; known is secret");
    // Requests that any page can make a browser send.
    ask(good.clone(), &[host]).await.expect(415);
    ask(good.clone(), &[host, ("content-type", "text/plain")])
        .await
        .expect(415);
    // Under a host name that is not the server's, and from a page of another origin.
    ask(good.clone(), &[("host", "evil.example"), json_type])
        .await
        .expect(403);
    ask(
        good.clone(),
        &[host, json_type, ("origin", "https://evil.example")],
    )
    .await
    .expect(403);
    ask(good.clone(), &[host, json_type, ("sec-fetch-site", "cross-site")])
        .await
        .expect(403);
    ask(good, &[host, json_type, ("origin", "https://localhost")])
        .await
        .expect(200);
}

#[tokio::test]
async fn changes_need_the_token_of_the_session() {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    let browser = Browser::signed_in(&lab, "owner secret").await;
    let other = Browser::signed_in(&lab, "owner secret").await;
    let path = format!(
        "{GROUP}/providers/Microsoft.EventGrid/topics/t1/eventSubscriptions/sub?api-version={VERSION}"
    );
    let body = || Some(web_hook("/x", json!({})));

    let refused = browser.ask("PUT", &path, body(), &NO_TOKEN).await.expect(403);
    assert_eq!(
        refused.error(),
        ("AuthorizationFailed", "x-csrf-token: is required with a session")
    );
    for wrong in ["x", other.token.as_str()] {
        let token = [("x-csrf-token", wrong)];
        let refused = browser.ask("PUT", &path, body(), &token).await.expect(403);
        assert_eq!(refused.error().1, "x-csrf-token: is not that of the session");
    }
    browser.change("PUT", &path, body()).await.expect(201);
    browser.get(&path).await.expect(200);
    browser.change("DELETE", &path, None).await.expect(202);

    // Our own API requires the token as well.
    let admit = "/postrider/v1/endpoints/admit";
    let asked = || Some(json!({"endpoint": "https://nowhere/"}));
    browser.ask("POST", admit, asked(), &NO_TOKEN).await.expect(403);
    browser.change("POST", admit, asked()).await.expect(404);

    // The roles are those of the client.
    let reader = Browser::signed_in(&lab, "reader secret").await;
    reader.get(&path).await.expect(404);
    reader.change("PUT", &path, body()).await.expect(403);
}

#[tokio::test]
async fn a_session_counts_only_for_pages_of_ours_and_without_another_credential() {
    let lab = ApiTestServer::new(false).await;
    let browser = Browser::signed_in(&lab, "owner secret").await;
    let path = "/postrider/v1/endpoints";
    let ask = async |more: &[(&str, &str)]| browser.ask("GET", path, None, more).await;
    ask(&[]).await.expect(200);
    // A host name of another party that resolves to this server's address.
    let got = ask(&[("host", "evil.example")]).await.expect(403);
    assert!(got.body["detail"].as_str().unwrap().contains("listen.names"));
    ask(&[("host", "")]).await.expect(403);
    ask(&[("origin", "http://evil.example")]).await.expect(403);
    ask(&[("origin", "null")]).await.expect(403);
    ask(&[("sec-fetch-site", "same-site")]).await.expect(403);
    ask(&[("sec-fetch-site", "same-origin")]).await.expect(200);
    // A request with a credential is judged by the credential.
    ask(&[("authorization", "Bearer wrong")]).await.expect(401);
    ask(&[
        ("authorization", "Bearer reader secret"),
        ("host", "evil.example"),
    ])
    .await
    .expect(200);

    let with = async |cookie: &str| {
        let headers = [
            ("host", "localhost"),
            ("cookie", cookie),
            ("x-csrf-token", browser.token.as_str()),
        ];
        lab.exchange("GET", path, None, &headers).await
    };
    let good = &browser.cookie;
    with(&format!("a=b; {good};c")).await.expect(200);
    // Another host of the domain may have set a cookie of the same name.
    with(&format!("__Host-postrider_session_443=x; {good}"))
        .await
        .expect(200);
    for bad in [
        "__Host-postrider_session_443=",
        "__Host-postrider_session_443=x",
        "__Host-postrider_session_443",
        "x=y",
    ] {
        with(bad).await.expect(401);
    }
    with(&good.to_uppercase()).await.expect(401);
    let long = format!("__Host-postrider_session_443={}", "a".repeat(10_000));
    with(&long).await.expect(401);
}
