//! `/portal`: the files of the portal, and the sessions of its users.

#[cfg(test)]
mod tests;

use crate::Server;
use crate::access::AccessRefusal;
use crate::docs::HtmlBuffer;
use crate::http::{Answer, ApiCall, ResponseContent, empty};
use crate::logins::LoginKind;
use crate::own_address::is_local_visit;
use crate::own_api::{Problem, body, nothing_here, read_object};
use crate::sessions::{LIFETIME, PortalSession, PortalSessions, TOKEN, cookie_name, is_https};
use crate::throttle::{CredentialKind, LockedOut};
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderName, HeaderValue, IF_NONE_MATCH,
    REFERRER_POLICY, SET_COOKIE, VARY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use hyper::{Method, StatusCode};
use postrider_portal::{INDEX, PortalFile};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::sync::LazyLock;

const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
/// Content security policy: nothing is executed, displayed or called unless it comes from this
/// server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

pub(crate) async fn answer(server: &Server, call: &mut ApiCall) -> Answer {
    let outcome = route(server, call).await;
    guarded(outcome.unwrap_or_else(|problem| problem.answer(&call.id)))
}

/// Adds security headers for browsers.
pub(crate) fn guarded(mut answer: Answer) -> Answer {
    let headers = answer.headers_mut();
    let fixed = [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (X_FRAME_OPTIONS, "DENY"),
        (OPENER_POLICY, "same-origin"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    // Answers with files set their own caching.
    headers
        .entry(CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    answer
}

async fn route(server: &Server, call: &mut ApiCall) -> Result<Answer, Problem> {
    let path = call.uri.path();
    if path == "/portal/session" {
        return match call.method {
            Method::GET | Method::HEAD => current(server, call),
            Method::POST => sign_in(server, call).await,
            Method::DELETE => sign_out(server, call).await,
            _ => Err(Problem::method("GET, POST, DELETE")),
        };
    }
    let name = match path {
        "/portal" | "/portal/" => INDEX,
        other => other.strip_prefix("/portal/").unwrap_or_default(),
    };
    let file = postrider_portal::file(name).ok_or_else(|| nothing_here(call))?;
    match call.method {
        Method::GET | Method::HEAD if file.path == INDEX => Ok(index(server, call, file)),
        Method::GET | Method::HEAD => Ok(static_file(call, file)),
        _ => Err(Problem::method("GET, HEAD")),
    }
}

/// The page for visitors without a session. Its markup says so, so that its scripts send no request
/// that would only be refused.
static STRANGERS: LazyLock<PortalFile> = LazyLock::new(|| {
    let index = postrider_portal::file(INDEX).expect("the portal has a first page");
    PortalFile {
        path: "a stranger's index.html",
        bytes: index_with("data-visitor=\"stranger\"").into_bytes().leak(),
        ..*index
    }
});

/// The first page with further attributes of its root element.
fn index_with(attributes: &str) -> String {
    let index = postrider_portal::file(INDEX).expect("the portal has a first page");
    let text = std::str::from_utf8(index.bytes).expect("it is text");
    text.replacen("<html ", &format!("<html {attributes} "), 1)
}

/// The page for visitors without a session on this machine: names the file with the secret that the
/// server generated.
#[derive(Debug)]
pub struct LocalSignInPage {
    bytes: Bytes,
    tag: String,
}

impl LocalSignInPage {
    pub fn new(credentials: &Path) -> LocalSignInPage {
        let mut path = HtmlBuffer::default();
        path.text(&credentials.to_string_lossy());
        let page = index_with(&format!(
            "data-visitor=\"stranger\" data-credentials=\"{}\"",
            path.finish()
        ));
        LocalSignInPage {
            tag: tag_of(page.as_bytes()),
            bytes: page.into(),
        }
    }
}

fn index(server: &Server, call: &ApiCall, file: &PortalFile) -> Answer {
    // A visitor who follows a link from another site may have a session although the request has no
    // cookie: browsers do not send it with such requests.
    let is_from_elsewhere = matches!(call.header("sec-fetch-site"), Some("cross-site" | "same-site"));
    let has_session = is_from_elsewhere || matches!(server.session_of_cookie(call), Ok(Some(_)));
    let local = server.local_sign_in_page.as_ref();
    let mut answer = match local.filter(|_| is_local_visit(call)) {
        _ if has_session => static_file(call, file),
        Some(page) => tagged(call, file.content_type, page.bytes.clone(), &page.tag),
        None => static_file(call, &STRANGERS),
    };
    let headers = answer.headers_mut();
    headers.insert(VARY, HeaderValue::from_static("cookie, sec-fetch-site"));
    answer
}

/// ETags by path; the same in every process of one version.
static TAGS: LazyLock<HashMap<&'static str, String>> = LazyLock::new(|| {
    let files = postrider_portal::FILES.iter().chain([&*STRANGERS]);
    files.map(|file| (file.path, tag_of(file.bytes))).collect()
});

fn static_file(call: &ApiCall, file: &PortalFile) -> Answer {
    let tag = TAGS.get(file.path).map_or("", String::as_str);
    tagged(call, file.content_type, Bytes::from_static(file.bytes), tag)
}

/// An answer whose content is the same for the lifetime of the process.
pub(crate) fn content(call: &ApiCall, content_type: &'static str, bytes: Bytes) -> Answer {
    let tag = tag_of(&bytes);
    tagged(call, content_type, bytes, &tag)
}

fn tag_of(bytes: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    format!("\"{:016x}\"", hasher.finish())
}

fn tagged(call: &ApiCall, content_type: &'static str, bytes: Bytes, tag: &str) -> Answer {
    let known = call.headers.get_all(IF_NONE_MATCH).into_iter();
    let mut known = known
        .filter_map(|header| header.to_str().ok())
        .flat_map(|header| header.split(','))
        .map(|known| known.trim().trim_start_matches("W/"));
    let same = known.any(|known| known == tag || known == "*");
    let mut answer = match same {
        true => empty(StatusCode::NOT_MODIFIED, &call.id),
        false => empty(StatusCode::OK, &call.id),
    };
    if !same {
        *answer.body_mut() = ResponseContent::Whole(Full::new(bytes));
    }
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    // File names do not change with their content, so browsers must revalidate every time.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(tag) = HeaderValue::from_str(tag) {
        headers.insert(ETAG, tag);
    }
    answer
}

/// Body: `{"secret": …}` of a client.
async fn sign_in(server: &Server, call: &mut ApiCall) -> Result<Answer, Problem> {
    server.check_page(call)?;
    // Pages of other origins can post text without a preflight request, but not JSON.
    let content_type = call.header("content-type").unwrap_or_default();
    let media = content_type.split(';').next().unwrap_or_default().trim();
    if !media.eq_ignore_ascii_case("application/json") {
        return Err(Problem::new(415, "content-type: must be application/json"));
    }
    let members = read_object(call).await?;
    if let Some(other) = members.keys().find(|key| *key != "secret") {
        return Err(Problem::new(
            400,
            format!("{other}: is not known; known is secret"),
        ));
    }
    let Some(secret) = members.get("secret").and_then(Value::as_str) else {
        return Err(Problem::field("secret", "must be the secret of a client"));
    };
    let now = server.wall.now();
    let locked_out = |locked: LockedOut| Problem::new(429, locked.reason());
    server
        .check_lockout(call, CredentialKind::Portal)
        .map_err(locked_out)?;
    let Some(client) = server.client_with_secret(secret) else {
        server.logins_refused.count("portal", now);
        server
            .wrong_credential(call, CredentialKind::Portal, "portal")
            .map_err(locked_out)?;
        return Err(Problem {
            field: Some("secret"),
            ..Problem::new(401, "secret: is not that of any client")
        });
    };
    call.notes.actor(&client.id, &[client.role], "secret");
    // The replaced session is ended rather than left to expire. If the request does not prove that
    // the session is its own, the session stays.
    if let Ok(Some((_, replaced))) = server.session(call) {
        server.end_session(&replaced).await;
    }
    let (id, token, session) = PortalSessions::begin(&client.id, server.access.session_seal(), now);
    let mut answer = shown(server, call, &session, token.expose())?;
    let seconds = LIFETIME.as_secs();
    server.login_succeeded(call, LoginKind::Portal, &client.id, session.given());
    set_cookie(server, call, &mut answer, id.expose(), seconds);
    Ok(answer)
}

fn current(server: &Server, call: &ApiCall) -> Result<Answer, Problem> {
    let (_, session) = required(server, call)?;
    // The request was admitted, so it holds the session's token.
    let token = call.header(TOKEN).unwrap_or_default();
    shown(server, call, &session, token)
}

async fn sign_out(server: &Server, call: &ApiCall) -> Result<Answer, Problem> {
    let (_, session) = required(server, call)?;
    if let Ok(caller) = server.caller_of_session(&session) {
        call.notes.caller(&caller, "session");
    }
    server.end_session(&session).await;
    let mut answer = empty(StatusCode::NO_CONTENT, &call.id);
    set_cookie(server, call, &mut answer, "", 0);
    Ok(answer)
}

fn required(server: &Server, call: &ApiCall) -> Result<(String, PortalSession), Problem> {
    let session = server.session(call)?;
    session.ok_or_else(|| AccessRefusal::unknown("nobody has signed in").into())
}

fn shown(server: &Server, call: &ApiCall, session: &PortalSession, token: &str) -> Result<Answer, Problem> {
    let caller = server.caller_of_session(session)?;
    let roles: Vec<&str> = caller.roles.iter().map(|role| role.name()).collect();
    let shown = json!({"csrf": token, "client": caller.id, "roles": roles});
    Ok(body(call, shown))
}

fn set_cookie(server: &Server, call: &ApiCall, answer: &mut Answer, id: &str, seconds: u64) {
    let secure = if is_https(server, call) { "; Secure" } else { "" };
    let name = cookie_name(server, call);
    let cookie = format!("{name}={id}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}");
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        answer.headers_mut().insert(SET_COOKIE, cookie);
    }
}
