//! Who is asking, and what they may do.

use crate::Server;
use crate::http::Call;
use postrider_core::ids::Secret;
use postrider_wire::token::Token;
use std::fmt;
use std::time::Duration;

/// By how much the clocks of those who issue and those who judge tokens may differ.
pub(crate) const LEEWAY: Duration = Duration::from_secs(120);

/// What a client may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Everything.
    Owner,
    /// Everything but managing access, of which there is none yet: as an owner.
    Contributor,
    /// Looking, without keys and other secrets.
    Reader,
    /// Publishing.
    DataSender,
}

impl Role {
    pub const ALL: [Role; 4] = [Role::Owner, Role::Contributor, Role::Reader, Role::DataSender];

    /// As the configuration and our tokens spell it.
    pub fn name(self) -> &'static str {
        match self {
            Role::Owner => "owner",
            Role::Contributor => "contributor",
            Role::Reader => "reader",
            Role::DataSender => "data-sender",
        }
    }

    pub fn may(self, need: Need) -> bool {
        match self {
            Role::Owner | Role::Contributor => true,
            Role::Reader => need == Need::Read,
            Role::DataSender => need == Need::Send,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Read,
    /// Changing resources, and seeing their secrets.
    Write,
    Send,
}

/// Someone who can log in with a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    pub id: String,
    pub secret: Secret,
    pub role: Role,
}

/// Someone who has shown a valid credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub id: String,
    /// None at all if an external issuer's token gives none.
    pub roles: Vec<Role>,
}

impl Caller {
    pub fn may(&self, need: Need) -> bool {
        self.roles.iter().any(|role| role.may(need))
    }

    /// The caller again, if it may do what the request needs.
    pub fn need(self, need: Need) -> Result<Caller, NoAccess> {
        if self.may(need) {
            return Ok(self);
        }
        let listed = |roles: &mut dyn Iterator<Item = Role>| {
            roles.map(|role| role.name()).collect::<Vec<_>>().join(" or ")
        };
        let has = match self.roles.is_empty() {
            true => "has no role".to_owned(),
            false => format!("has the role {}", listed(&mut self.roles.iter().copied())),
        };
        let needed = listed(&mut Role::ALL.into_iter().filter(|role| role.may(need)));
        Err(NoAccess::Forbidden(format!(
            "The client '{}' does not have authorization to perform this action: it {has}, and this needs {needed}.",
            self.id
        )))
    }
}

impl From<&Client> for Caller {
    fn from(client: &Client) -> Caller {
        Caller {
            id: client.id.clone(),
            roles: vec![client.role],
        }
    }
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAccess {
    /// 401.
    #[error("{0}")]
    Unknown(String),
    /// 403.
    #[error("{0}")]
    Forbidden(String),
}

impl NoAccess {
    pub fn unknown(reason: impl Into<String>) -> NoAccess {
        NoAccess::Unknown(reason.into())
    }
}

impl Server {
    /// Judges the bearer token of a request: a client's secret, a token of ours, or one of the external issuer.
    /// Where no credential is sent along, the session of a browser stands for the client who began it.
    pub fn caller(&self, call: &Call, need: Need) -> Result<Caller, NoAccess> {
        if !call.headers.contains_key(hyper::header::AUTHORIZATION)
            && let Some((_, session)) = self.session(call)?
        {
            return self.caller_of_session(&session)?.need(need);
        }
        let Some(token) = bearer_of(call) else {
            return Err(NoAccess::unknown("a bearer token is required"));
        };
        self.caller_of_token(token)?.need(need)
    }

    /// Whose token this is.
    pub fn caller_of_token(&self, token: &str) -> Result<Caller, NoAccess> {
        if let Some(client) = self.client_with_secret(token) {
            return Ok(client.into());
        }
        let Some(token) = Token::parse(token) else {
            return Err(NoAccess::unknown("the bearer token is not valid"));
        };
        if self.config.signing_key.has_signed(&token) {
            return self.caller_of_ours(&token);
        }
        match &self.issuer {
            Some(issuer) if issuer.claims_to_have_made(&token) => issuer.caller(&token, self.wall.now()),
            _ => Err(NoAccess::unknown(
                "the bearer token was not signed by anyone whom this server trusts",
            )),
        }
    }

    /// What a client may do is in the configuration, not in the token: who is taken out of it, or given
    /// another role, need not be waited for.
    fn caller_of_ours(&self, token: &Token<'_>) -> Result<Caller, NoAccess> {
        token
            .check_time(self.wall.now(), LEEWAY)
            .map_err(NoAccess::unknown)?;
        let id = token.claim("appid").unwrap_or_default();
        match self.client(id) {
            Some(client) => Ok(client.into()),
            None => Err(NoAccess::unknown(format!(
                "the token was given to '{id}', which is no longer a client of this server"
            ))),
        }
    }

    pub(crate) fn client(&self, id: &str) -> Option<&Client> {
        let mut clients = self.config.clients.iter();
        clients.find(|client| client.id.eq_ignore_ascii_case(id))
    }

    /// Looks at all of them, so that the time it takes does not tell which one came close.
    pub(crate) fn client_with_secret(&self, secret: &str) -> Option<&Client> {
        let mut found = None;
        for client in &self.config.clients {
            if same(client.secret.expose(), secret) {
                found = found.or(Some(client));
            }
        }
        found
    }

    /// Fetches the external issuer's keys if this request's token makes it necessary. [`Server::caller`] uses
    /// what is there.
    pub(crate) async fn prepare(&self, call: &Call) {
        let Some(issuer) = &self.issuer else {
            return;
        };
        let Some(token) = bearer_of(call).and_then(Token::parse) else {
            return;
        };
        if issuer.claims_to_have_made(&token) {
            issuer.prepare(&token, self.wall.now()).await;
        }
    }
}

fn bearer_of(call: &Call) -> Option<&str> {
    call.header("authorization").and_then(bearer)
}

pub(crate) fn bearer(authorization: &str) -> Option<&str> {
    let (scheme, token) = authorization.trim().split_once(' ')?;
    scheme.eq_ignore_ascii_case("Bearer").then(|| token.trim())
}

/// Compares secrets in a time that does not depend on where they differ. An empty one is nobody's.
pub(crate) fn same(known: &str, presented: &str) -> bool {
    let differing = known
        .bytes()
        .zip(presented.bytes())
        .fold(0, |acc, (x, y)| std::hint::black_box(acc | (x ^ y)));
    !known.is_empty() && known.len() == presented.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_allow_what_they_are_for() {
        let check = |role: Role, expected: [bool; 3]| {
            let found = [Need::Read, Need::Write, Need::Send].map(|need| role.may(need));
            assert_eq!(found, expected, "{role}");
        };
        check(Role::Owner, [true, true, true]);
        check(Role::Contributor, [true, true, true]);
        check(Role::Reader, [true, false, false]);
        check(Role::DataSender, [false, false, true]);
    }

    #[test]
    fn a_refusal_names_the_client_its_role_and_the_role_it_needs() {
        let check = |roles: &[Role], need: Need, words: &str| {
            let caller = Caller {
                id: "me".into(),
                roles: roles.into(),
            };
            let refused = caller.need(need).unwrap_err();
            let expected =
                format!("The client 'me' does not have authorization to perform this action: {words}");
            assert_eq!(refused, NoAccess::Forbidden(expected));
        };
        check(
            &[Role::Reader],
            Need::Write,
            "it has the role reader, and this needs owner or contributor.",
        );
        check(
            &[Role::DataSender],
            Need::Read,
            "it has the role data-sender, and this needs owner or contributor or reader.",
        );
        check(
            &[],
            Need::Send,
            "it has no role, and this needs owner or contributor or data-sender.",
        );
    }

    #[test]
    fn secrets_are_the_same_only_if_they_are() {
        assert!(same("secret", "secret"));
        for (known, presented) in [
            ("secret", "secreT"),
            ("secret", "secret "),
            ("secret", ""),
            ("", ""),
        ] {
            assert!(!same(known, presented), "{known:?} {presented:?}");
        }
    }

    #[test]
    fn a_bearer_token_is_taken_from_its_header() {
        assert_eq!(bearer("Bearer x.y"), Some("x.y"));
        assert_eq!(bearer("bearer   x "), Some("x"));
        assert_eq!(bearer("Basic x"), None);
        assert_eq!(bearer("Bearerx"), None);
    }
}
