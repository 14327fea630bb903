//! Sessions of browsers: a cookie that scripts cannot read, and a token that pages of others cannot send.

use crate::Server;
use crate::access::{Caller, NoAccess, same};
use crate::http::Call;
use crate::ours::addressed_by_name;
use hyper::Method;
use hyper::header::COOKIE;
use postrider_core::ids::Secret;
use postrider_core::time::Timestamp;
use postrider_wire::auth::fresh_key;
use postrider_wire::seal::Seal;
use serde_json::json;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

pub(crate) const NAME: &str = "postrider_session";
pub(crate) const TOKEN: &str = "x-csrf-token";
/// A session ends this long after it began, however busy it is.
pub(crate) const LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// Sessions that were ended before their time are remembered until it is over. Only who has begun one can end one.
const ENDED_MAX: usize = 10_000;

/// A session is what its id says, under our seal: any node of a cluster knows it. A server that is alone seals with a key
/// of its own, so that who has signed in does so again after a restart.
pub(crate) struct Sessions {
    seal: Seal,
    /// When each began that was ended.
    ended: Mutex<HashMap<String, Timestamp>>,
}

#[derive(Clone, Debug)]
pub(crate) struct Session {
    /// The id of the client whose secret was shown.
    pub client: String,
    pub token: Secret,
    begun: Timestamp,
}

impl Session {
    fn is_over(&self, now: Timestamp) -> bool {
        now.since(self.begun) >= LIFETIME
    }

    fn write(&self) -> String {
        json!([self.client, self.token.expose(), self.begun.nanos()]).to_string()
    }

    fn read(text: &str) -> Option<Session> {
        let (client, token, begun): (String, String, i64) = serde_json::from_str(text).ok()?;
        Some(Session {
            client,
            token: Secret::new(token),
            begun: Timestamp::from_nanos(begun),
        })
    }
}

impl Sessions {
    pub fn new(secret: &Secret) -> Sessions {
        Sessions {
            seal: Seal::new(secret, "session"),
            ended: Mutex::default(),
        }
    }

    /// The new session with its id, which nobody can guess.
    pub fn begin(&self, client: &str, now: Timestamp) -> (Secret, Session) {
        let session = Session {
            client: client.to_owned(),
            token: fresh_key(),
            begun: now,
        };
        (self.seal.close(&session.write()), session)
    }

    pub fn get(&self, id: &str, now: Timestamp) -> Option<Session> {
        let session = Session::read(&self.seal.open(id)?)?;
        if session.is_over(now) {
            // It is not there again when the clock is put back.
            self.end(id);
            return None;
        }
        let ended = self.ended.lock().expect("no panic holds it").contains_key(id);
        (!ended).then_some(session)
    }

    pub fn end(&self, id: &str) {
        let Some(session) = self.seal.open(id).and_then(|text| Session::read(&text)) else {
            return;
        };
        let mut ended = self.ended.lock().expect("no panic holds it");
        let newest = ended.values().copied().max().unwrap_or(Timestamp::MIN);
        if ended.len() >= ENDED_MAX {
            // Those that began long before another was ended are over by themselves.
            ended.retain(|_, begun| newest.since(*begun) < LIFETIME);
        }
        if ended.len() >= ENDED_MAX {
            let oldest = ended.iter().min_by_key(|(_, begun)| **begun);
            if let Some(oldest) = oldest.map(|(id, _)| id.clone()) {
                ended.remove(&oldest);
            }
        }
        ended.insert(id.to_owned(), session.begun);
    }
}

/// What a request's cookies of our name say. There may be several: other hosts of the same domain can set them too.
fn presented(call: &Call) -> impl Iterator<Item = &str> {
    let headers = call.headers.get_all(COOKIE).into_iter();
    let pairs = headers
        .filter_map(|header| header.to_str().ok())
        .flat_map(|header| header.split(';'));
    pairs
        .filter_map(|pair| pair.trim().split_once('='))
        .filter(|(name, _)| *name == NAME)
        .map(|(_, value)| value)
}

impl Server {
    /// The session that a request belongs to, with its id; none if it shows none. Refused if it may have been made
    /// by a page that is not ours.
    pub(crate) fn session(&self, call: &Call) -> Result<Option<(String, Session)>, NoAccess> {
        let mut ids = presented(call).peekable();
        if ids.peek().is_none() {
            return Ok(None);
        }
        self.check_page(call)?;
        let now = self.wall.now();
        let found = ids.find_map(|id| Some((id.to_owned(), self.sessions.get(id, now)?)));
        let Some((id, session)) = found else {
            return Err(NoAccess::unknown("the session has ended"));
        };
        let changes = !matches!(call.method, Method::GET | Method::HEAD);
        let sent = call.header(TOKEN).unwrap_or_default();
        if changes && !same(session.token.expose(), sent) {
            let reason = match sent.is_empty() {
                true => "is required with a session",
                false => "is not that of the session",
            };
            return Err(NoAccess::Forbidden(format!("{TOKEN}: {reason}")));
        }
        Ok(Some((id, session)))
    }

    /// A browser adds its cookies to whatever any page makes it send: only what our own pages send counts.
    pub(crate) fn check_page(&self, call: &Call) -> Result<(), NoAccess> {
        addressed_by_name(self, call).map_err(NoAccess::Forbidden)?;
        match call.header("sec-fetch-site") {
            None | Some("same-origin" | "none") => Ok(()),
            Some(_) => Err(NoAccess::Forbidden(
                "sec-fetch-site: a page of another origin may not use a session".to_owned(),
            )),
        }
    }

    /// What a client may do is in the configuration, as for tokens.
    pub(crate) fn caller_of_session(&self, session: &Session) -> Result<Caller, NoAccess> {
        match self.client(&session.client) {
            Some(client) => Ok(client.into()),
            None => Err(NoAccess::unknown(format!(
                "the session was begun by '{}', which is no longer a client of this server",
                session.client
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);

    fn sessions() -> Sessions {
        Sessions::new(&Secret::new("secret"))
    }

    #[test]
    fn a_session_ends_when_it_is_ended_or_its_time_is_over() {
        let sessions = sessions();
        let (id, session) = sessions.begin("me", NOW);
        let known = |after: Duration| sessions.get(id.expose(), NOW + after).map(|found| found.client);
        assert_eq!(known(LIFETIME - Duration::from_secs(1)), Some("me".into()));
        assert_eq!(known(LIFETIME), None);
        // It is not there again when the clock is put back.
        assert_eq!(known(Duration::ZERO), None);

        let (other, _) = sessions.begin("me", NOW);
        assert_ne!(other.expose(), id.expose());
        assert_ne!(session.token.expose(), id.expose());
        sessions.end(other.expose());
        assert!(sessions.get(other.expose(), NOW).is_none());
        assert!(sessions.get("", NOW).is_none());
    }

    #[test]
    fn another_node_knows_a_session_and_a_stranger_does_not() {
        let (id, session) = sessions().begin("me", NOW);
        let found = sessions().get(id.expose(), NOW).unwrap();
        assert_eq!(
            (found.client.as_str(), found.token.expose()),
            ("me", session.token.expose())
        );
        let stranger = Sessions::new(&Secret::new("other"));
        assert!(stranger.get(id.expose(), NOW).is_none());
        // What is not a session cannot be ended, so nobody can fill the memory.
        stranger.end(id.expose());
        assert!(stranger.ended.lock().unwrap().is_empty());
    }

    #[test]
    fn only_so_many_ended_ones_are_remembered() {
        let sessions = sessions();
        let at = |n: usize| NOW + Duration::from_millis(n as u64);
        let ids: Vec<Secret> = (0..ENDED_MAX + 2)
            .map(|n| sessions.begin("me", at(n)).0)
            .collect();
        ids.iter().for_each(|id| sessions.end(id.expose()));
        let last = at(ENDED_MAX + 2);
        let known = |n: usize| sessions.get(ids[n].expose(), last).is_some();
        assert_eq!(
            [known(0), known(1), known(2), known(ENDED_MAX + 1)],
            [true, true, false, false]
        );
    }
}
