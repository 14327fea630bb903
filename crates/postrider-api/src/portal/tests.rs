//! Over real connections, as a browser would ask.

use crate::azure::subscriptions::tests::lab::{GROUP, Got, Lab, VERSION, web_hook};
use postrider_portal::INDEX;
use serde_json::{Value, json};

/// A browser on one of the server's own pages.
struct Browser<'a> {
    lab: &'a Lab,
    cookie: String,
    token: String,
}

impl<'a> Browser<'a> {
    async fn signed_in(lab: &'a Lab, secret: &str) -> Browser<'a> {
        let got = sign_in(lab, secret).await.expect(200);
        Browser {
            lab,
            cookie: cookie(&got),
            token: got.body["csrf"].as_str().unwrap().to_owned(),
        }
    }

    async fn ask(&self, method: &str, path: &str, body: Option<Value>, more: &[(&str, &str)]) -> Got {
        let mut headers = vec![("cookie", self.cookie.as_str())];
        if !more.iter().any(|(name, _)| *name == "host") {
            headers.push(("host", "localhost"));
        }
        headers.extend(more);
        self.lab.exchange(method, path, body.as_ref(), &headers).await
    }

    async fn get(&self, path: &str) -> Got {
        self.ask("GET", path, None, &[]).await
    }

    async fn change(&self, method: &str, path: &str, body: Option<Value>) -> Got {
        let token = [("x-csrf-token", self.token.as_str())];
        self.ask(method, path, body, &token).await
    }
}

async fn sign_in(lab: &Lab, secret: &str) -> Got {
    let headers = [("host", "localhost"), ("content-type", "application/json")];
    let body = json!({ "secret": secret });
    lab.exchange("POST", "/portal/session", Some(&body), &headers)
        .await
}

/// What a browser sends back.
fn cookie(got: &Got) -> String {
    let set = got.header("set-cookie");
    set.split(';').next().unwrap().to_owned()
}

#[tokio::test]
async fn files_are_served_with_what_keeps_them_safe() {
    let lab = Lab::new(false).await;
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
async fn the_first_page_says_whether_there_is_a_session() {
    let lab = Lab::new(false).await;
    let is_for_strangers =
        |got: &Got| String::from_utf8_lossy(&got.bytes).contains("data-visitor=\"stranger\"");
    let mut browser = Browser::signed_in(&lab, "owner secret").await;
    let known = browser.get("/portal").await.expect(200);
    assert!(!is_for_strangers(&known));
    assert!(known.header("vary").contains("cookie"));
    // From elsewhere the cookie is not sent along, whether there is one or not.
    let stranger = [("host", "localhost")];
    let linked = [("host", "localhost"), ("sec-fetch-site", "cross-site")];
    let got = lab.exchange("GET", "/portal", None, &linked).await.expect(200);
    assert!(!is_for_strangers(&got));
    let got = lab.exchange("GET", "/portal", None, &stranger).await.expect(200);
    assert!(is_for_strangers(&got));
    assert_ne!(got.header("etag"), known.header("etag"));
    // What a browser has kept from before it signed out is not taken for what holds now.
    browser
        .change("DELETE", "/portal/session", None)
        .await
        .expect(204);
    let tag = [("if-none-match", known.header("etag"))];
    let got = browser.ask("GET", "/portal", None, &tag).await.expect(200);
    assert!(is_for_strangers(&got));
    browser.cookie = "postrider_session=guessed".to_owned();
    assert!(is_for_strangers(&browser.get("/portal").await.expect(200)));
}

#[track_caller]
fn check_headers(got: &Got) {
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
    let lab = Lab::new(false).await;
    let got = sign_in(&lab, "reader secret").await.expect(200);
    let set = got.header("set-cookie").to_owned();
    assert!(set.starts_with("postrider_session="), "{set}");
    let attributes: Vec<&str> = set.split("; ").skip(1).collect();
    assert_eq!(
        attributes,
        ["Path=/", "Max-Age=43200", "HttpOnly", "SameSite=Strict", "Secure"]
    );
    assert_eq!(got.header("cache-control"), "no-store");
    assert_eq!(got.body["client"], "reader");
    assert_eq!(got.body["roles"], json!(["reader"]));
    assert!(!cookie(&got).contains(got.body["csrf"].as_str().unwrap()));

    let browser = Browser {
        lab: &lab,
        cookie: cookie(&got),
        token: got.body["csrf"].as_str().unwrap().into(),
    };
    assert_eq!(browser.get("/portal/session").await.expect(200).body, got.body);
    browser.get("/postrider/v1/endpoints").await.expect(200);

    // Signing out needs the token, and ends it for good.
    browser
        .ask("DELETE", "/portal/session", None, &[])
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
async fn wrong_secrets_are_counted_and_say_nothing() {
    let lab = Lab::new(false).await;
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
    // What any page can make a browser send.
    ask(good.clone(), &[host]).await.expect(415);
    ask(good.clone(), &[host, ("content-type", "text/plain")])
        .await
        .expect(415);
    // Under a name that is not ours, and from a page that is not ours.
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
    let lab = Lab::new(false).await;
    lab.topic("t1").await;
    let browser = Browser::signed_in(&lab, "owner secret").await;
    let other = Browser::signed_in(&lab, "owner secret").await;
    let path = format!(
        "{GROUP}/providers/Microsoft.EventGrid/topics/t1/eventSubscriptions/sub?api-version={VERSION}"
    );
    let body = || Some(web_hook("/x", json!({})));

    let refused = browser.ask("PUT", &path, body(), &[]).await.expect(403);
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

    // Our own API, too.
    let admit = "/postrider/v1/endpoints/admit";
    let asked = || Some(json!({"endpoint": "https://nowhere/"}));
    browser.ask("POST", admit, asked(), &[]).await.expect(403);
    browser.change("POST", admit, asked()).await.expect(404);

    // The roles are those of the client.
    let reader = Browser::signed_in(&lab, "reader secret").await;
    reader.get(&path).await.expect(404);
    reader.change("PUT", &path, body()).await.expect(403);
}

#[tokio::test]
async fn a_session_counts_only_for_pages_of_ours_and_without_another_credential() {
    let lab = Lab::new(false).await;
    let browser = Browser::signed_in(&lab, "owner secret").await;
    let path = "/postrider/v1/endpoints";
    let ask = async |more: &[(&str, &str)]| browser.ask("GET", path, None, more).await;
    ask(&[]).await.expect(200);
    // A name that somebody else's resolver gave our address.
    let got = ask(&[("host", "evil.example")]).await.expect(403);
    assert!(got.body["detail"].as_str().unwrap().contains("listen.names"));
    ask(&[("host", "")]).await.expect(403);
    ask(&[("origin", "http://evil.example")]).await.expect(403);
    ask(&[("origin", "null")]).await.expect(403);
    ask(&[("sec-fetch-site", "same-site")]).await.expect(403);
    ask(&[("sec-fetch-site", "same-origin")]).await.expect(200);
    // Whoever shows a credential is judged by it.
    ask(&[("authorization", "Bearer wrong")]).await.expect(401);
    ask(&[
        ("authorization", "Bearer reader secret"),
        ("host", "evil.example"),
    ])
    .await
    .expect(200);

    let with = async |cookie: &str| {
        let headers = [("host", "localhost"), ("cookie", cookie)];
        lab.exchange("GET", path, None, &headers).await
    };
    let good = &browser.cookie;
    with(&format!("a=b; {good};c")).await.expect(200);
    // Another host of the domain may have set one of the same name.
    with(&format!("postrider_session=x; {good}")).await.expect(200);
    for bad in [
        "postrider_session=",
        "postrider_session=x",
        "postrider_session",
        "x=y",
    ] {
        with(bad).await.expect(401);
    }
    with(&good.to_uppercase()).await.expect(401);
    let long = format!("postrider_session={}", "a".repeat(10_000));
    with(&long).await.expect(401);
}
