//! Browser sessions: a cookie that scripts cannot read, and a token that only scripts of this
//! origin have.
//!
//! Browsers send cookies to every port of a host, so another web server on the same machine
//! receives this server's cookie. The cookie alone therefore grants nothing: every request also
//! needs the token, which the answer to the sign-in gives to the page and which no later answer
//! gives to a client that has only the cookie.

use crate::Server;
use crate::access::{AccessRefusal, Caller, same};
use crate::http::ApiCall;
use crate::logins::IssuedCredential;
use crate::own_address::addressed_by_name;
use hyper::header::COOKIE;
use postrider_core::ids::Secret;
use postrider_core::time::Timestamp;
use postrider_wire::auth::fresh_key;
use postrider_wire::seal::{Seal, fingerprint};
use serde_json::json;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// Prefix of the cookie's name; the port follows, see [`cookie_name`].
const NAME: &str = "postrider_session";
pub(crate) const TOKEN: &str = "x-csrf-token";
/// Lifetime of a session, however busy it is.
pub(crate) const LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// Limit of ended sessions that are remembered until they would have expired. Only the client that
/// began a session can end it.
const ENDED_MAX: usize = 10_000;

/// Portal sessions. The state of a session is in its id, sealed with the key of
/// [`crate::access_state`], so that every node of a cluster accepts it, also after a restart.
/// Sign-outs are stored there, too; the list kept here ends a session at once, and also if storing
/// fails.
#[derive(Default)]
pub(crate) struct PortalSessions {
    /// Sessions that were ended, by name, with the time when each began.
    ended: Mutex<HashMap<String, Timestamp>>,
}

#[derive(Clone, Debug)]
pub(crate) struct PortalSession {
    /// The id of the client that signed in.
    pub client: String,
    /// Fingerprint of the session's token. The cookie is signed but not encrypted, so it must not
    /// contain the token itself.
    token_fingerprint: String,
    begun: Timestamp,
    /// Identifies the session in the list of sessions. Grants nothing.
    pub name: String,
    /// See [`crate::access_state`].
    epoch: u64,
}

/// A new random name for a session or a token.
pub(crate) fn fresh_id() -> String {
    let random = fresh_key();
    let letters = random.expose().bytes().filter(u8::is_ascii_alphanumeric);
    letters.take(16).map(char::from).collect()
}

impl PortalSession {
    pub fn given(&self) -> IssuedCredential<'_> {
        let seconds = self.begun.nanos() / 1_000_000_000;
        IssuedCredential {
            id: &self.name,
            issued: seconds,
            expires: seconds + LIFETIME.as_secs() as i64,
            epoch: self.epoch,
        }
    }

    fn is_over(&self, now: Timestamp) -> bool {
        now.since(self.begun) >= LIFETIME
    }

    fn write(&self) -> String {
        json!([
            self.client,
            self.token_fingerprint,
            self.begun.nanos(),
            self.name,
            self.epoch
        ])
        .to_string()
    }

    fn read(text: &str) -> Option<PortalSession> {
        let (client, token_fingerprint, begun, name, epoch): (String, String, i64, String, u64) =
            serde_json::from_str(text).ok()?;
        Some(PortalSession {
            client,
            token_fingerprint,
            begun: Timestamp::from_nanos(begun),
            name,
            epoch,
        })
    }
}

impl PortalSessions {
    /// Begins a session and returns its sealed id, its token and the session. Neither can be
    /// guessed. `epoch` is that of the seal.
    pub fn begin(
        client: &str,
        (seal, epoch): (Seal, u64),
        now: Timestamp,
    ) -> (Secret, Secret, PortalSession) {
        let token = fresh_key();
        let session = PortalSession {
            client: client.to_owned(),
            token_fingerprint: fingerprint(token.expose()),
            begun: now,
            name: fresh_id(),
            epoch,
        };
        (seal.close(&session.write()), token, session)
    }

    pub fn get(&self, id: &str, seal: &Seal, now: Timestamp) -> Option<PortalSession> {
        let session = PortalSession::read(&seal.open(id)?)?;
        if session.is_over(now) {
            // Remembered as ended, so that setting the clock back does not revive the session.
            self.end(&session);
            return None;
        }
        let ended = self.ended.lock().expect("no panic holds it");
        (!ended.contains_key(&session.name)).then_some(session)
    }

    pub fn end(&self, session: &PortalSession) {
        let mut ended = self.ended.lock().expect("no panic holds it");
        let newest = ended.values().copied().max().unwrap_or(Timestamp::MIN);
        if ended.len() >= ENDED_MAX {
            // Sessions that began a lifetime before the newest one have expired anyway.
            ended.retain(|_, begun| newest.since(*begun) < LIFETIME);
        }
        if ended.len() >= ENDED_MAX {
            let oldest = ended.iter().min_by_key(|(_, begun)| **begun);
            if let Some(oldest) = oldest.map(|(name, _)| name.clone()) {
                ended.remove(&oldest);
            }
        }
        ended.insert(session.name.clone(), session.begun);
    }
}

/// The name of the session's cookie. It differs by port, so that servers at other ports of the same
/// host neither overwrite the cookie nor mistake it for theirs. Over https the prefix `__Host-`
/// keeps other hosts from setting it.
pub(crate) fn cookie_name(server: &Server, call: &ApiCall) -> String {
    let https = is_https(server, call);
    let authority = call.host();
    let port = match authority.rsplit_once(':') {
        Some((_, port)) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => port,
        _ if https => "443",
        _ => "80",
    };
    match https {
        true => format!("__Host-{NAME}_{port}"),
        false => format!("{NAME}_{port}"),
    }
}

/// Whether the browser uses TLS: with this server, or with a proxy at the public URL.
pub(crate) fn is_https(server: &Server, call: &ApiCall) -> bool {
    let public = server.config.public_url.as_deref().unwrap_or_default();
    let public = public.strip_prefix("https://").unwrap_or_default();
    let authority = public.split('/').next().unwrap_or_default();
    call.scheme == "https" || (!authority.is_empty() && authority.eq_ignore_ascii_case(call.host()))
}

/// The values of the cookies with this name. There may be several: other hosts of the same domain
/// can set cookies too.
fn presented<'a>(call: &'a ApiCall, cookie: &'a str) -> impl Iterator<Item = &'a str> {
    let headers = call.headers.get_all(COOKIE).into_iter();
    let pairs = headers
        .filter_map(|header| header.to_str().ok())
        .flat_map(|header| header.split(';'));
    pairs
        .filter_map(|pair| pair.trim().split_once('='))
        .filter(move |(name, _)| *name == cookie)
        .map(|(_, value)| value)
}

impl Server {
    /// The session of a request, with its id; none without a cookie. Refused without the session's
    /// token, and for pages of other origins.
    pub(crate) fn session(&self, call: &ApiCall) -> Result<Option<(String, PortalSession)>, AccessRefusal> {
        let Some((id, session)) = self.session_of_cookie(call)? else {
            return Ok(None);
        };
        let sent = call.header(TOKEN).unwrap_or_default();
        if !same(&session.token_fingerprint, &fingerprint(sent)) {
            let reason = match sent.is_empty() {
                true => "is required with a session",
                false => "is not that of the session",
            };
            return Err(AccessRefusal::Forbidden(format!("{TOKEN}: {reason}")));
        }
        Ok(Some((id, session)))
    }

    /// The session that the cookie names. Proves nothing without the token, see the module's
    /// documentation.
    pub(crate) fn session_of_cookie(
        &self,
        call: &ApiCall,
    ) -> Result<Option<(String, PortalSession)>, AccessRefusal> {
        let cookie = cookie_name(self, call);
        let mut ids = presented(call, &cookie).peekable();
        if ids.peek().is_none() {
            return Ok(None);
        }
        self.check_page(call)?;
        let now = self.wall.now();
        let found = ids.find_map(|id| Some((id.to_owned(), self.live_session(id, now)?)));
        match found {
            Some(found) => Ok(Some(found)),
            None => Err(AccessRefusal::unknown("the session has ended")),
        }
    }

    /// The session with this id, unless it has ended or was revoked.
    pub(crate) fn live_session(&self, id: &str, now: Timestamp) -> Option<PortalSession> {
        let session = self.sessions.get(id, &self.access.session_seal().0, now)?;
        let holds = self.access.holds(&session.client, &session.name, session.epoch);
        holds.then_some(session)
    }

    /// Refuses requests of other pages: a browser adds its cookies to whatever any page makes it
    /// send.
    pub(crate) fn check_page(&self, call: &ApiCall) -> Result<(), AccessRefusal> {
        addressed_by_name(self, call).map_err(AccessRefusal::Forbidden)?;
        match call.header("sec-fetch-site") {
            None | Some("same-origin" | "none") => Ok(()),
            Some(_) => Err(AccessRefusal::Forbidden(
                "sec-fetch-site: a page of another origin may not use a session".to_owned(),
            )),
        }
    }

    /// The caller of a session. Its role is read from the configuration, as for tokens.
    pub(crate) fn caller_of_session(&self, session: &PortalSession) -> Result<Caller, AccessRefusal> {
        match self.client(&session.client) {
            Some(client) => Ok(client.into()),
            None => Err(AccessRefusal::unknown(format!(
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

    fn seal() -> (Seal, u64) {
        (Seal::new(&Secret::new("secret"), "session"), 0)
    }

    #[test]
    fn a_session_ends_when_it_is_ended_or_its_time_is_over() {
        let sessions = PortalSessions::default();
        let (id, token, session) = PortalSessions::begin("me", seal(), NOW);
        let known = |after: Duration| {
            let found = sessions.get(id.expose(), &seal().0, NOW + after);
            found.map(|found| found.client)
        };
        assert_eq!(known(LIFETIME - Duration::from_secs(1)), Some("me".into()));
        assert_eq!(known(LIFETIME), None);
        // Setting the clock back does not revive the session.
        assert_eq!(known(Duration::ZERO), None);

        let (other, _, begun) = PortalSessions::begin("me", seal(), NOW);
        assert_ne!(other.expose(), id.expose());
        assert_eq!(session.token_fingerprint, fingerprint(token.expose()));
        sessions.end(&begun);
        assert!(sessions.get(other.expose(), &seal().0, NOW).is_none());
        assert!(sessions.get("", &seal().0, NOW).is_none());
    }

    #[test]
    fn another_node_knows_a_session_and_a_stranger_does_not() {
        let (id, _, session) = PortalSessions::begin("me", seal(), NOW);
        let found = PortalSessions::default()
            .get(id.expose(), &seal().0, NOW)
            .unwrap();
        assert_eq!(
            (found.client, found.token_fingerprint),
            ("me".to_owned(), session.token_fingerprint)
        );
        let other = Seal::new(&Secret::new("other"), "session");
        assert!(PortalSessions::default().get(id.expose(), &other, NOW).is_none());
    }

    #[test]
    fn only_so_many_ended_ones_are_remembered() {
        let sessions = PortalSessions::default();
        let at = |n: usize| NOW + Duration::from_millis(n as u64);
        let begun: Vec<(Secret, PortalSession)> = (0..ENDED_MAX + 2)
            .map(|n| PortalSessions::begin("me", seal(), at(n)))
            .map(|(id, _, session)| (id, session))
            .collect();
        begun.iter().for_each(|(_, session)| sessions.end(session));
        let last = at(ENDED_MAX + 2);
        let known = |n: usize| sessions.get(begun[n].0.expose(), &seal().0, last).is_some();
        assert_eq!(
            [known(0), known(1), known(2), known(ENDED_MAX + 1)],
            [true, true, false, false]
        );
    }
}
