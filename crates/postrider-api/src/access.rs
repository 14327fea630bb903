//! Authentication and authorization: which client sent a request, and what it may do.

use crate::Server;
use crate::http::ApiCall;
use crate::own_address::is_own_name;
use crate::throttle::{CredentialKind, LockedOut};
use postrider_core::ids::Secret;
use postrider_wire::token::Token;
use std::fmt;
use std::time::Duration;

/// Clock difference that is tolerated between the issuer of a token and its verifier.
pub(crate) const LEEWAY: Duration = Duration::from_secs(120);

/// Audiences of Azure's management API and of Event Grid in each Azure cloud: az and the SDKs
/// request tokens for them unless they are configured otherwise.
const AUDIENCES: [&str; 9] = [
    "https://management.azure.com",
    "https://management.core.windows.net",
    "https://eventgrid.azure.net",
    "https://management.usgovcloudapi.net",
    "https://management.core.usgovcloudapi.net",
    "https://eventgrid.azure.us",
    "https://management.chinacloudapi.cn",
    "https://management.core.chinacloudapi.cn",
    "https://eventgrid.azure.cn",
];

/// The host without its port.
fn host_name(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    }
}

/// The host of a URL that has no path.
fn host_of(url: &str) -> Option<&str> {
    let (scheme, authority) = url.split_once("://")?;
    let web = ["http", "https"]
        .iter()
        .any(|known| known.eq_ignore_ascii_case(scheme));
    let plain = !authority.is_empty() && !authority.contains(['/', '?', '#', '@']);
    (web && plain).then(|| host_name(authority))
}

/// Role of a client: decides which requests it may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// All permissions.
    Owner,
    /// All permissions except managing access. No API manages access yet, so the role equals
    /// `Owner`.
    Contributor,
    /// Read access, without keys and other secrets.
    Reader,
    /// Publish events.
    DataSender,
}

impl Role {
    pub const ALL: [Role; 4] = [Role::Owner, Role::Contributor, Role::Reader, Role::DataSender];

    /// Name of the role in the configuration and in this server's tokens.
    pub fn name(self) -> &'static str {
        match self {
            Role::Owner => "owner",
            Role::Contributor => "contributor",
            Role::Reader => "reader",
            Role::DataSender => "data-sender",
        }
    }

    pub fn may(self, need: RequiredPermission) -> bool {
        match self {
            Role::Owner | Role::Contributor => true,
            Role::Reader => need == RequiredPermission::Read,
            Role::DataSender => need == RequiredPermission::Send,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Permission that a request requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredPermission {
    Read,
    /// Change resources, and see their secrets.
    Write,
    Send,
}

/// A configured client, which can log in with its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfiguredClient {
    pub id: String,
    pub secret: Secret,
    pub role: Role,
}

/// The sender of a request, authenticated by a valid credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub id: String,
    /// Empty if the token of an external issuer grants no role.
    pub roles: Vec<Role>,
}

impl Caller {
    pub fn may(&self, need: RequiredPermission) -> bool {
        self.roles.iter().any(|role| role.may(need))
    }

    /// Returns the caller if it has the permission that the request requires.
    pub fn need(self, need: RequiredPermission) -> Result<Caller, AccessRefusal> {
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
        Err(AccessRefusal::Forbidden(format!(
            "The client '{}' does not have authorization to perform this action: it {has}, and this needs {needed}.",
            self.id
        )))
    }
}

impl From<&ConfiguredClient> for Caller {
    fn from(client: &ConfiguredClient) -> Caller {
        Caller {
            id: client.id.clone(),
            roles: vec![client.role],
        }
    }
}

/// Reason why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessRefusal {
    /// 401.
    #[error("{0}")]
    Unknown(String),
    /// 403.
    #[error("{0}")]
    Forbidden(String),
    /// 429.
    #[error("{0}")]
    LockedOut(String),
}

impl From<LockedOut> for AccessRefusal {
    fn from(locked: LockedOut) -> AccessRefusal {
        AccessRefusal::LockedOut(locked.reason())
    }
}

impl AccessRefusal {
    pub fn unknown(reason: impl Into<String>) -> AccessRefusal {
        AccessRefusal::Unknown(reason.into())
    }
}

/// Credential of a request whose response stays open for hours. A credential that a login gave out
/// can be revoked meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamCredential {
    /// The id of a browser's session.
    Session(String),
    /// A token issued by this server.
    Token { client: String, id: String, epoch: u64 },
    /// A client's secret or an external issuer's token, which this server cannot revoke.
    Other,
}

impl Server {
    /// The credential that authenticated a request.
    pub(crate) fn lasting_credential(&self, call: &ApiCall) -> Result<StreamCredential, AccessRefusal> {
        // A request with an `Authorization` header is judged by that header alone, never by its
        // cookie.
        if !call.headers.contains_key(hyper::header::AUTHORIZATION) {
            let session = self.session(call)?;
            return Ok(session.map_or(StreamCredential::Other, |(id, _)| StreamCredential::Session(id)));
        }
        let token = bearer_of(call).and_then(Token::parse);
        Ok(match token {
            Some(token) if self.access.has_signed(&token, self.wall.now()) => {
                let (client, id, epoch) = grant_of(&token);
                StreamCredential::Token {
                    client: client.to_owned(),
                    id: id.to_owned(),
                    epoch,
                }
            }
            _ => StreamCredential::Other,
        })
    }

    /// Whether a credential is still valid: not revoked, and its session not ended.
    pub(crate) fn is_credential_valid(&self, credential: &StreamCredential) -> bool {
        match credential {
            StreamCredential::Session(id) => self.live_session(id, self.wall.now()).is_some(),
            StreamCredential::Token { client, id, epoch } => self.access.holds(client, id, *epoch),
            StreamCredential::Other => true,
        }
    }

    /// Authenticates the bearer token of a request: a client's secret, a token of this server or a
    /// token of the external issuer. Without a credential, a browser's session stands for the
    /// client that began it.
    pub fn caller(&self, call: &ApiCall, need: RequiredPermission) -> Result<Caller, AccessRefusal> {
        if !call.headers.contains_key(hyper::header::AUTHORIZATION)
            && let Some((_, session)) = self.session(call)?
        {
            let caller = self.caller_of_session(&session)?;
            call.notes.caller(&caller, "session");
            return call.identified(caller).need(need);
        }
        let Some(token) = bearer_of(call) else {
            return Err(AccessRefusal::unknown("a bearer token is required"));
        };
        let caller = self.caller_of_token(call, token)?;
        call.notes.caller(&caller, self.kind_of_credential(token));
        call.identified(caller).need(need)
    }

    /// Kind of a valid bearer token, as the audit log names it.
    fn kind_of_credential(&self, token: &str) -> &'static str {
        match Token::parse(token) {
            Some(token) if self.access.has_signed(&token, self.wall.now()) => "token",
            Some(token)
                if self
                    .issuer
                    .as_ref()
                    .is_some_and(|one| one.claims_to_have_made(&token)) =>
            {
                "issuer"
            }
            _ => "secret",
        }
    }

    /// The caller that a bearer token belongs to.
    pub fn caller_of_token(&self, call: &ApiCall, token: &str) -> Result<Caller, AccessRefusal> {
        let wrong = |reason: &str| match self.wrong_credential(call, CredentialKind::Bearer, "") {
            Ok(()) => AccessRefusal::unknown(reason),
            Err(locked) => locked.into(),
        };
        let Some(token) = Token::parse(token) else {
            self.check_lockout(call, CredentialKind::Bearer)?;
            return match self.client_with_secret(token) {
                Some(client) => Ok(client.into()),
                None => Err(wrong("the bearer token is not valid")),
            };
        };
        if self.access.has_signed(&token, self.wall.now()) {
            return self.caller_of_ours(call, &token);
        }
        match &self.issuer {
            Some(issuer) if issuer.claims_to_have_made(&token) => {
                let caller = issuer.caller(&token, self.wall.now());
                match caller {
                    // Expired tokens and tokens that cannot be verified are not guesses: they do
                    // not count towards a lock-out.
                    Err(AccessRefusal::Unknown(reason)) if issuer.is_forged(&token) => Err(wrong(&reason)),
                    other => other,
                }
            }
            _ => Err(wrong(
                "the bearer token was not signed by anyone whom this server trusts",
            )),
        }
    }

    /// The caller of a token that this server issued. The client's role is read from the
    /// configuration, not from the token, so that removing a client or changing its role takes
    /// effect at once.
    fn caller_of_ours(&self, call: &ApiCall, token: &Token<'_>) -> Result<Caller, AccessRefusal> {
        token
            .check_time(self.wall.now(), LEEWAY)
            .map_err(AccessRefusal::unknown)?;
        if !token
            .claim("iss")
            .is_some_and(|issuer| self.is_own_issuer(call, issuer))
        {
            return Err(AccessRefusal::unknown(
                "the token names another issuer than this server",
            ));
        }
        if !token
            .claim("aud")
            .is_some_and(|audience| self.is_own_audience(call, audience))
        {
            return Err(AccessRefusal::unknown(
                "the token was made for another audience than this server; ask for \
                 https://management.azure.com/, https://eventgrid.azure.net/ or the server's own URL",
            ));
        }
        let (id, jti, epoch) = grant_of(token);
        if !self.access.holds(id, jti, epoch) {
            return Err(AccessRefusal::unknown("the token was revoked; log in again"));
        }
        match self.client(id) {
            Some(client) => Ok(client.into()),
            None => Err(AccessRefusal::unknown(format!(
                "the token was given to '{id}', which is no longer a client of this server"
            ))),
        }
    }

    /// Whether an issuer is named as [`crate::login`] names the issuer of this server's tokens,
    /// below a URL of this server.
    fn is_own_issuer(&self, call: &ApiCall, issuer: &str) -> bool {
        let tenant = &self.config.tenant;
        let endings = [
            "/adfs".to_owned(),
            format!("/{tenant}/"),
            format!("/{tenant}/v2.0"),
        ];
        let mut bases = endings
            .iter()
            .filter_map(|ending| issuer.strip_suffix(ending.as_str()));
        bases.any(|base| self.is_own_url(call, base))
    }

    /// Whether clients request tokens of this server for an audience: an Azure resource that the
    /// server stands in for, or the server itself.
    fn is_own_audience(&self, call: &ApiCall, audience: &str) -> bool {
        let audience = audience.trim_end_matches('/');
        AUDIENCES.iter().any(|known| known.eq_ignore_ascii_case(audience)) || self.is_own_url(call, audience)
    }

    /// Whether a URL without a path names this server: by one of its names, by the address that the
    /// client connected to, or by the name of another node of the cluster. Ports are ignored,
    /// because every listener and node accepts the tokens. The `Host` header is ignored too: an
    /// attacker who replays a token that was made for another server would write that server's name
    /// into it.
    fn is_own_url(&self, call: &ApiCall, url: &str) -> bool {
        let public = self.config.public_url.as_deref().unwrap_or_default();
        if !public.is_empty() && public.trim_end_matches('/').eq_ignore_ascii_case(url) {
            return true;
        }
        let Some(host) = host_of(url) else {
            return false;
        };
        let is = |name: &str| name.eq_ignore_ascii_case(host);
        let of_node = |url: &str| host_of(url.trim_end_matches('/')).is_some_and(is);
        is_own_name(self, call.local, host)
            || self
                .cluster
                .as_ref()
                .is_some_and(|cluster| cluster.now().nodes.iter().any(|node| of_node(&node.url)))
    }

    pub(crate) fn client(&self, id: &str) -> Option<&ConfiguredClient> {
        let mut clients = self.config.clients.iter();
        clients.find(|client| client.id.eq_ignore_ascii_case(id))
    }

    /// Compares with every client, so that the duration does not reveal which one came close.
    pub(crate) fn client_with_secret(&self, secret: &str) -> Option<&ConfiguredClient> {
        let mut found = None;
        for client in &self.config.clients {
            if same(client.secret.expose(), secret) {
                found = found.or(Some(client));
            }
        }
        found
    }

    /// Fetches the external issuer's keys if the token of this request needs them.
    /// [`Server::caller`] uses the keys that are known.
    pub(crate) async fn prepare(&self, call: &ApiCall) {
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

/// Client, id and epoch of a token of this server. Tokens of earlier versions have neither id nor
/// epoch.
fn grant_of<'a>(token: &'a Token<'_>) -> (&'a str, &'a str, u64) {
    let claim = |name| token.claim(name).unwrap_or_default();
    let epoch = token.claims["epoch"].as_u64().unwrap_or_default();
    (claim("appid"), claim("jti"), epoch)
}

fn bearer_of(call: &ApiCall) -> Option<&str> {
    call.header("authorization").and_then(bearer)
}

pub(crate) fn bearer(authorization: &str) -> Option<&str> {
    let (scheme, token) = authorization.trim().split_once(' ')?;
    scheme.eq_ignore_ascii_case("Bearer").then(|| token.trim())
}

/// Compares secrets in a time that does not depend on where they differ. An empty secret matches
/// nothing.
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
            let found = [
                RequiredPermission::Read,
                RequiredPermission::Write,
                RequiredPermission::Send,
            ]
            .map(|need| role.may(need));
            assert_eq!(found, expected, "{role}");
        };
        check(Role::Owner, [true, true, true]);
        check(Role::Contributor, [true, true, true]);
        check(Role::Reader, [true, false, false]);
        check(Role::DataSender, [false, false, true]);
    }

    #[test]
    fn a_refusal_names_the_client_its_role_and_the_role_it_needs() {
        let check = |roles: &[Role], need: RequiredPermission, words: &str| {
            let caller = Caller {
                id: "me".into(),
                roles: roles.into(),
            };
            let refused = caller.need(need).unwrap_err();
            let expected =
                format!("The client 'me' does not have authorization to perform this action: {words}");
            assert_eq!(refused, AccessRefusal::Forbidden(expected));
        };
        check(
            &[Role::Reader],
            RequiredPermission::Write,
            "it has the role reader, and this needs owner or contributor.",
        );
        check(
            &[Role::DataSender],
            RequiredPermission::Read,
            "it has the role data-sender, and this needs owner or contributor or reader.",
        );
        check(
            &[],
            RequiredPermission::Send,
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
    fn the_host_of_an_audience_has_no_path() {
        let check = |url: &str, expected: Option<&str>| assert_eq!(host_of(url), expected, "{url}");
        check("https://h", Some("h"));
        check("HTTP://h:1", Some("h"));
        check("https://[::1]:1", Some("::1"));
        for bad in [
            "h",
            "https://",
            "https://h/x",
            "api://h",
            "https://h@evil",
            "https://h?x",
        ] {
            check(bad, None);
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
