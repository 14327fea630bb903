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
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

pub(crate) const NAME: &str = "postrider_session";
pub(crate) const TOKEN: &str = "x-csrf-token";
/// Beyond it the oldest ends. Only who knows a secret can begin one.
const SESSIONS_MAX: usize = 1000;
/// A session ends this long after it began, however busy it is.
pub(crate) const LIFETIME: Duration = Duration::from_secs(12 * 3600);

/// They live as long as the process: who has signed in does so again after a restart.
#[derive(Default)]
pub(crate) struct Sessions(Mutex<HashMap<String, Session>>);

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
}

impl Sessions {
    /// The new session with its id, which nobody can guess.
    pub fn begin(&self, client: &str, now: Timestamp) -> (Secret, Session) {
        let id = fresh_key();
        let session = Session {
            client: client.to_owned(),
            token: fresh_key(),
            begun: now,
        };
        let mut all = self.0.lock().expect("no panic holds it");
        if all.len() >= SESSIONS_MAX {
            all.retain(|_, known| !known.is_over(now));
        }
        if all.len() >= SESSIONS_MAX {
            let oldest = all.iter().min_by_key(|(_, known)| known.begun);
            if let Some(oldest) = oldest.map(|(id, _)| id.clone()) {
                all.remove(&oldest);
            }
        }
        all.insert(id.expose().to_owned(), session.clone());
        (id, session)
    }

    pub fn get(&self, id: &str, now: Timestamp) -> Option<Session> {
        let mut all = self.0.lock().expect("no panic holds it");
        let found = all.get(id)?;
        if found.is_over(now) {
            all.remove(id);
            return None;
        }
        Some(found.clone())
    }

    pub fn end(&self, id: &str) {
        self.0.lock().expect("no panic holds it").remove(id);
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

    #[test]
    fn a_session_ends_when_it_is_ended_or_its_time_is_over() {
        let sessions = Sessions::default();
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
    fn there_are_only_so_many() {
        let sessions = Sessions::default();
        let at = |n: usize| NOW + Duration::from_millis(n as u64);
        let ids: Vec<Secret> = (0..SESSIONS_MAX + 2)
            .map(|n| sessions.begin("me", at(n)).0)
            .collect();
        let last = at(SESSIONS_MAX + 2);
        let known = ids
            .iter()
            .map(|id| sessions.get(id.expose(), last).is_some())
            .collect::<Vec<_>>();
        assert_eq!(known[..3], [false, false, true]);
        assert_eq!(known.iter().filter(|known| **known).count(), SESSIONS_MAX);
        // All of them are over.
        sessions.begin("me", NOW + LIFETIME * 2);
        assert_eq!(sessions.0.lock().unwrap().len(), 1);
    }
}
