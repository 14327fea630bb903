//! `/postrider/v1/sessions`: lists portal sessions and valid tokens, and revokes them.

use crate::Server;
use crate::access::{Caller, RequiredPermission};
use crate::access_state::RevocationTarget;
use crate::http::{Answer, ApiCall};
use crate::own_api::{Problem, body, read_object};
use crate::peers::{PeerResponses, gather, note_missing};
use postrider_core::time::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

/// Logins that are listed at most. Beyond it the oldest are no longer shown; they stay valid, and
/// end with `revoke` of their client or of all.
const LOGINS_MAX: usize = 10_000;

/// Persists the list of this node's logins over a restart, as one line for each.
pub trait LoginJournal: Send + Sync {
    fn read(&self) -> Result<String, String>;
    fn append(&self, line: &str) -> Result<(), String>;
    fn replace(&self, text: &str) -> Result<(), String>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LoginKind {
    Portal,
    Token,
}

/// A portal session or a token that was issued to a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Login {
    pub id: String,
    pub kind: LoginKind,
    pub client: String,
    pub address: IpAddr,
    /// In seconds since 1970.
    pub issued: i64,
    pub expires: i64,
    pub epoch: u64,
}

#[derive(Default)]
struct LoginList {
    /// In the order in which they began.
    logins: VecDeque<Login>,
    /// Number of lines in the journal, including those of ended logins.
    lines: usize,
    journal: Option<Arc<dyn LoginJournal>>,
    /// Whether the journal cannot be written. Logged once.
    troubled: bool,
}

/// The logins of this node.
#[derive(Default)]
pub(crate) struct Logins(Mutex<LoginList>);

impl Logins {
    /// Loads the logins of the journal that are still valid, and writes to the journal from now on.
    fn keep_in(&self, journal: Arc<dyn LoginJournal>, now: Timestamp) -> Result<(), String> {
        let text = journal.read()?;
        // Skips a line that was cut short by a crash.
        let logins = text
            .lines()
            .filter_map(|line| serde_json::from_str::<Login>(line).ok());
        let mut logins: VecDeque<Login> = logins.filter(|login| login.expires > seconds(now)).collect();
        while logins.len() > LOGINS_MAX {
            logins.pop_front();
        }
        let mut listed = self.0.lock().expect("no panic holds it");
        listed.logins = logins;
        listed.journal = Some(journal);
        listed.rewrite()
    }

    fn add(&self, login: Login, now: Timestamp) {
        let mut listed = self.0.lock().expect("no panic holds it");
        if listed.logins.len() >= LOGINS_MAX {
            listed.logins.retain(|one| one.expires > seconds(now));
        }
        if listed.logins.len() >= LOGINS_MAX {
            listed.logins.pop_front();
        }
        let line = serde_json::to_string(&login).expect("its keys are text");
        listed.logins.push_back(login);
        let Some(journal) = listed.journal.clone() else {
            return;
        };
        listed.lines += 1;
        let written = match listed.lines > 2 * LOGINS_MAX {
            true => listed.rewrite(),
            false => journal.append(&line),
        };
        // The login is valid; only the list may lack it after a restart.
        if let Err(reason) = &written
            && !listed.troubled
        {
            tracing::warn!(reason, "the list of logins cannot be written");
        }
        listed.troubled = written.is_err();
    }

    fn remove(&self, id: &str) {
        let mut listed = self.0.lock().expect("no panic holds it");
        listed.logins.retain(|login| login.id != id);
    }

    fn all(&self) -> Vec<Login> {
        let listed = self.0.lock().expect("no panic holds it");
        listed.logins.iter().cloned().collect()
    }
}

impl LoginList {
    fn rewrite(&mut self) -> Result<(), String> {
        let mut text = String::new();
        for login in &self.logins {
            text.push_str(&serde_json::to_string(login).expect("its keys are text"));
            text.push('\n');
        }
        self.lines = self.logins.len();
        match &self.journal {
            Some(journal) => journal.replace(&text),
            None => Ok(()),
        }
    }
}

fn seconds(time: Timestamp) -> i64 {
    time.nanos() / 1_000_000_000
}

impl Server {
    /// Persists the list of logins in this journal from now on.
    pub fn use_login_journal(&self, journal: Arc<dyn LoginJournal>) -> Result<(), String> {
        self.logins.keep_in(journal, self.wall.now())
    }

    /// Records a successful login: at the portal, at the token endpoint, or by managed identity.
    pub(crate) fn login_succeeded(
        &self,
        call: &ApiCall,
        kind: LoginKind,
        client: &str,
        given: IssuedCredential<'_>,
    ) {
        let login = Login {
            id: given.id.to_owned(),
            kind,
            client: client.to_owned(),
            address: call.peer.to_canonical(),
            issued: given.issued,
            expires: given.expires,
            epoch: given.epoch,
        };
        self.logins.add(login, self.wall.now());
    }

    /// Records a sign-out.
    pub(crate) fn login_ended(&self, id: &str) {
        self.logins.remove(id);
    }
}

/// Token or session that a login issued.
pub(crate) struct IssuedCredential<'a> {
    pub id: &'a str,
    /// In seconds since 1970.
    pub issued: i64,
    pub expires: i64,
    pub epoch: u64,
}

/// The logins of this node that are still valid.
pub(crate) fn own_logins(server: &Server) -> Vec<Login> {
    let now = seconds(server.wall.now());
    let mut logins = server.logins.all();
    logins.retain(|login| {
        let has_key = login.kind == LoginKind::Token || server.access.session_key_holds(login.epoch);
        has_key && login.expires > now && server.access.holds(&login.client, &login.id, login.epoch)
    });
    logins
}

/// The logins of all nodes, and the names of nodes that did not answer.
async fn all_logins(server: &Server) -> (Vec<Login>, Vec<String>) {
    let Some(peers) = &server.peers else {
        return (own_logins(server), Vec::new());
    };
    let heard: PeerResponses<Vec<Login>> = gather(&**peers, "logins", &json!({})).await;
    let mut logins: Vec<Login> = heard.answers.into_iter().flat_map(|(_, logins)| logins).collect();
    logins.sort_by(|a, b| (a.issued, &a.id).cmp(&(b.issued, &b.id)));
    (logins, heard.missing)
}

/// Lists logins. The addresses of other clients are shown only to clients that may read the audit
/// log.
pub(crate) async fn list(server: &Server, call: &ApiCall, caller: &Caller) -> Answer {
    let (logins, missing) = all_logins(server).await;
    let shown = logins.iter().map(|login| {
        let mut shown = json!({
            "id": login.id,
            "kind": login.kind,
            "client": login.client,
            "issued": Timestamp::from_secs(login.issued).to_string(),
            "expires": Timestamp::from_secs(login.expires).to_string(),
        });
        if caller.may(RequiredPermission::Write) || login.client.eq_ignore_ascii_case(&caller.id) {
            shown["address"] = json!(login.address);
        }
        shown
    });
    let mut answer = json!({"value": shown.collect::<Vec<_>>()});
    note_missing(&mut answer, missing);
    body(call, answer)
}

/// Body: `{"id": …}`, `{"client": …}` or `{"all": true}`.
pub(crate) async fn revoke(server: &Server, call: &mut ApiCall) -> Result<Answer, Problem> {
    let members = read_object(call).await?;
    let asked = read_revoke(&members)?;
    let (logins, mut missing) = all_logins(server).await;
    let what = match asked {
        RevokeRequest::All => RevocationTarget::All,
        RevokeRequest::Client(name) => {
            let known = server.client(&name).is_some()
                || logins
                    .iter()
                    .any(|login| login.client.eq_ignore_ascii_case(&name));
            if !known {
                let reason = format!("client: {name:?} is not a client of this server and has no session");
                return Err(Problem {
                    field: Some("client"),
                    ..Problem::new(404, reason)
                });
            }
            RevocationTarget::Client(name)
        }
        RevokeRequest::Id(id) => match logins.iter().find(|login| login.id == id) {
            Some(login) => RevocationTarget::Id(id, login.expires + 600),
            None => {
                let reason = format!("id: there is no session or token {id:?}; it may have ended");
                return Err(Problem {
                    field: Some("id"),
                    ..Problem::new(404, reason)
                });
            }
        },
    };
    let count = logins
        .iter()
        .filter(|login| match &what {
            RevocationTarget::All => true,
            RevocationTarget::Client(name) => login.client.eq_ignore_ascii_case(name),
            RevocationTarget::Id(id, _) => login.id == *id,
        })
        .count();
    missing.extend(server.revoke(&what).await?);
    let mut answer = json!({"revoked": count});
    note_missing(&mut answer, missing);
    Ok(body(call, answer))
}

#[derive(Debug, PartialEq, Eq)]
enum RevokeRequest {
    All,
    Client(String),
    Id(String),
}

fn read_revoke(members: &Map<String, Value>) -> Result<RevokeRequest, Problem> {
    let mut asked = None;
    for (name, value) in members {
        let text = |field| match value.as_str().filter(|text| !text.is_empty()) {
            Some(text) => Ok(text.to_owned()),
            None => Err(Problem::field(field, "must be text that is not empty")),
        };
        let one = match name.as_str() {
            "id" => RevokeRequest::Id(text("id")?),
            "client" => RevokeRequest::Client(text("client")?),
            "all" if value == &Value::Bool(true) => RevokeRequest::All,
            "all" => return Err(Problem::field("all", "must be true")),
            other => {
                let reason = format!("{other}: is not known; known are id, client and all");
                return Err(Problem::new(400, reason));
            }
        };
        if asked.replace(one).is_some() {
            return Err(Problem::new(400, "only one of id, client and all may be given"));
        }
    }
    asked.ok_or_else(|| Problem::new(400, "one of id, client and all is required"))
}

/// Body: `{"now": true}` ends tokens of the replaced key at once; otherwise they stay valid until
/// they expire.
pub(crate) async fn rotate_key(server: &Server, call: &mut ApiCall) -> Result<Answer, Problem> {
    let members = read_object(call).await?;
    if let Some(other) = members.keys().find(|key| *key != "now") {
        return Err(Problem::new(400, format!("{other}: is not known; known is now")));
    }
    let at_once = match members.get("now") {
        None => false,
        Some(Value::Bool(at_once)) => *at_once,
        Some(_) => return Err(Problem::field("now", "must be true or false")),
    };
    let missing = server.rotate_key(at_once).await?;
    let key = server.access.signing_key().key_set();
    let mut answer = json!({"keyId": key["keys"][0]["kid"]});
    note_missing(&mut answer, missing);
    Ok(body(call, answer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::azure::subscriptions::tests::test_server::ApiTestServer;

    const NOW: Timestamp = Timestamp::from_secs(1_800_000_000);

    #[derive(Default)]
    struct MemoryLoginJournal(Mutex<String>);

    impl LoginJournal for MemoryLoginJournal {
        fn read(&self) -> Result<String, String> {
            Ok(self.0.lock().unwrap().clone())
        }
        fn append(&self, line: &str) -> Result<(), String> {
            let mut text = self.0.lock().unwrap();
            text.push_str(line);
            text.push('\n');
            Ok(())
        }
        fn replace(&self, text: &str) -> Result<(), String> {
            *self.0.lock().unwrap() = text.to_owned();
            Ok(())
        }
    }

    fn login(id: &str, kind: LoginKind, expires: i64) -> Login {
        Login {
            id: id.into(),
            kind,
            client: "me".into(),
            address: "192.0.2.1".parse().unwrap(),
            issued: seconds(NOW),
            expires: seconds(NOW) + expires,
            epoch: 0,
        }
    }

    #[test]
    fn logins_are_listed_after_a_restart_until_they_are_over() {
        let journal = Arc::new(MemoryLoginJournal::default());
        let before = Logins::default();
        before.keep_in(journal.clone(), NOW).unwrap();
        before.add(login("a", LoginKind::Token, 60), NOW);
        before.add(login("b", LoginKind::Portal, 60), NOW);
        before.add(login("c", LoginKind::Token, 5), NOW);
        journal.append("{\"id\":\"cut sho").unwrap();
        let after = Logins::default();
        let later = NOW + std::time::Duration::from_secs(10);
        after.keep_in(journal, later).unwrap();
        let ids: Vec<_> = after.all().into_iter().map(|login| login.id).collect();
        assert_eq!(ids, ["a", "b"]);
    }

    #[test]
    fn only_so_many_are_listed() {
        let logins = Logins::default();
        for n in 0..LOGINS_MAX + 3 {
            logins.add(login(&n.to_string(), LoginKind::Token, 60), NOW);
        }
        let all = logins.all();
        assert_eq!((all.len(), all[0].id.as_str()), (LOGINS_MAX, "3"));
    }

    #[tokio::test]
    async fn a_token_holds_for_its_issuer_its_audience_and_until_it_is_revoked() {
        let lab = ApiTestServer::new(false).await;
        let now = seconds(lab.server.wall.now());
        let claims = |name: &str, value: Value| {
            let mut claims = json!({
                "iss": "https://localhost/t/v2.0", "aud": "https://management.azure.com/", "appid": "owner",
                "jti": "one", "epoch": 0, "exp": now + 600,
            });
            claims[name] = value;
            claims
        };
        let ask = async |claims: &Value| {
            let token = format!("Bearer {}", lab.server.access.signing_key().sign(claims));
            let headers = [("host", "localhost:8443"), ("authorization", token.as_str())];
            lab.exchange("GET", "/postrider/v1/sessions", None, &headers)
                .await
        };
        for (name, good) in [
            ("iss", "https://localhost/adfs"),
            ("iss", "http://localhost:1/t/"),
            ("aud", "https://eventgrid.azure.net"),
            ("aud", "https://localhost:8443//"),
        ] {
            ask(&claims(name, json!(good))).await.expect(200);
        }
        for (name, bad, reason) in [
            ("iss", json!("https://evil.example/t/v2.0"), "issuer"),
            ("iss", json!("https://localhost/other/v2.0"), "issuer"),
            ("iss", json!("https://localhost"), "issuer"),
            ("iss", json!("https://localhost.evil.example/adfs"), "issuer"),
            ("iss", Value::Null, "issuer"),
            ("aud", json!("https://vault.azure.net"), "audience"),
            ("aud", json!("https://evil.example/"), "audience"),
            ("aud", json!("api://postrider"), "audience"),
            ("aud", Value::Null, "audience"),
        ] {
            let refused = ask(&claims(name, bad.clone())).await.expect(401);
            let detail = refused.body["detail"].as_str().unwrap().to_owned();
            assert!(detail.contains(reason), "{bad}: {detail}");
        }
        // A service that was issued a token for itself cannot use that token here by calling this
        // server by its own name.
        for (name, url) in [
            ("aud", "https://evil.example/"),
            ("iss", "https://evil.example/adfs"),
        ] {
            let claims = claims(name, json!(url));
            let token = format!("Bearer {}", lab.server.access.signing_key().sign(&claims));
            let headers = [("host", "evil.example"), ("authorization", token.as_str())];
            let path = "/postrider/v1/sessions";
            let refused = lab.exchange("GET", path, None, &headers).await.expect(401);
            assert!(refused.body["detail"].as_str().unwrap().contains("this server"));
        }
        // The address that the client connected to is a name of this server, whatever the `Host`
        // header says.
        let token = lab
            .server
            .access
            .signing_key()
            .sign(&claims("iss", json!("https://127.0.0.1:443/adfs")));
        let token = format!("Bearer {token}");
        let headers = [("host", "unlisted.example"), ("authorization", token.as_str())];
        lab.exchange("GET", "/postrider/v1/sessions", None, &headers)
            .await
            .expect(200);
        let revoke = async |body: Value| {
            lab.send("POST", "/postrider/v1/sessions/revoke", Some(&body), &[])
                .await
        };
        revoke(json!({"id": "one"})).await.expect(404);
        revoke(json!({"client": "stranger"})).await.expect(404);
        revoke(json!({"client": "OWNER"})).await.expect(200);
        let refused = ask(&claims("jti", json!("one"))).await.expect(401);
        assert!(refused.body["detail"].as_str().unwrap().contains("revoked"));
        // New tokens have a later epoch; none has an epoch beyond that.
        ask(&claims("epoch", json!(1))).await.expect(200);
        ask(&claims("epoch", json!(2))).await.expect(401);
        revoke(json!({"all": true})).await.expect(200);
        ask(&claims("epoch", json!(1))).await.expect(401);
    }

    #[tokio::test]
    async fn addresses_of_other_clients_are_for_those_who_may_write() {
        let lab = ApiTestServer::new(false).await;
        for client in ["owner", "reader"] {
            let body = json!({"secret": format!("{client} secret")});
            let json = [("host", "localhost"), ("content-type", "application/json")];
            lab.exchange("POST", "/portal/session", Some(&body), &json)
                .await
                .expect(200);
        }
        let addresses = async |client: &str| {
            let bearer = format!("Bearer {client} secret");
            let headers = [("authorization", bearer.as_str())];
            let got = lab
                .send("GET", "/postrider/v1/sessions", None, &headers)
                .await
                .expect(200);
            let list = got.body["value"].as_array().unwrap().clone();
            let each = list.iter().map(|one| {
                let client = one["client"].as_str().unwrap();
                (client.to_owned(), one["address"].is_string())
            });
            each.collect::<Vec<_>>()
        };
        let expected = |of_owner| vec![("owner".to_owned(), of_owner), ("reader".to_owned(), true)];
        assert_eq!(addresses("owner").await, expected(true));
        assert_eq!(addresses("reader").await, expected(false));
    }

    #[test]
    fn one_thing_is_revoked_at_a_time() {
        let read = |text: &str| {
            let Value::Object(members) = serde_json::from_str(text).unwrap() else {
                panic!("an object")
            };
            read_revoke(&members).map_err(|problem| problem.detail)
        };
        assert_eq!(read(r#"{"id":"x"}"#), Ok(RevokeRequest::Id("x".into())));
        assert_eq!(read(r#"{"client":"x"}"#), Ok(RevokeRequest::Client("x".into())));
        assert_eq!(read(r#"{"all":true}"#), Ok(RevokeRequest::All));
        for bad in [
            r#"{}"#,
            r#"{"all":false}"#,
            r#"{"id":""}"#,
            r#"{"id":7}"#,
            r#"{"id":"x","all":true}"#,
            r#"{"x":1}"#,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
