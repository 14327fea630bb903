//! An external issuer of tokens (OpenID Connect), whose keys are fetched on demand.

use crate::access::{AccessRefusal, Caller, LEEWAY, Role};
use async_trait::async_trait;
use bytes::Bytes;
use postrider_core::time::Timestamp;
use postrider_wire::token::{KeySet, Token};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;
use tokio_util::task::TaskTracker;

/// The issuer is queried at most this often, whatever tokens arrive.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Keys older than this are fetched again before they are trusted further: one may have been
/// withdrawn.
const KEYS_LAST: Duration = Duration::from_secs(3600);
/// Claims that are searched for the client's name, unless the configuration names one.
const CLIENT_CLAIMS: [&str; 4] = ["azp", "appid", "client_id", "sub"];

/// Fetches documents over HTTP.
#[async_trait]
pub trait HttpFetch: Send + Sync {
    /// The body of a 200. Anything else is an error message for people.
    async fn get(&self, url: &str) -> Result<Bytes, String>;
}

/// Configuration of an external issuer: which tokens are trusted, and for what.
#[derive(Clone, Debug)]
pub struct IssuerConfig {
    pub issuer: String,
    pub audience: String,
    /// None: taken from the issuer's discovery document.
    pub jwks_url: Option<String>,
    /// A claim, or a path to one inside others: `realm_access.roles`.
    pub role_claim: String,
    pub client_claim: Option<String>,
    /// Roles by value of the claim. If empty, the values are this server's own role names.
    pub roles: BTreeMap<String, Role>,
}

pub struct TokenIssuer {
    trust: IssuerConfig,
    fetch: Arc<dyn HttpFetch>,
    known: RwLock<IssuerKeys>,
    /// Time of the last query. The lock is held by the task that queries the issuer.
    asking: Arc<tokio::sync::Mutex<Option<Timestamp>>>,
    /// Fetches of keys, one at a time, each bounded by the timeout of [`HttpFetch`]. Nothing is lost if
    /// the process ends before one does.
    fetches: TaskTracker,
}

#[derive(Clone, Default)]
struct IssuerKeys {
    keys: Arc<KeySet>,
    since: Option<Timestamp>,
    /// Why the last fetch failed.
    trouble: Option<String>,
}

impl TokenIssuer {
    pub fn new(trust: IssuerConfig, fetch: Arc<dyn HttpFetch>) -> Arc<TokenIssuer> {
        Arc::new(TokenIssuer {
            trust,
            fetch,
            known: RwLock::default(),
            asking: Arc::default(),
            fetches: TaskTracker::new(),
        })
    }

    /// Whether the token's unverified claims name this issuer. Proves nothing yet.
    pub fn claims_to_have_made(&self, token: &Token<'_>) -> bool {
        token.claim("iss") == Some(&self.trust.issuer)
    }

    fn known(&self) -> IssuerKeys {
        self.known
            .read()
            .expect("nothing panics while it is held")
            .clone()
    }

    /// Fetches keys if the token's key is unknown, or if the known keys are old.
    pub async fn prepare(self: &Arc<Self>, token: &Token<'_>, now: Timestamp) {
        let wanting = |known: &IssuerKeys| !known.keys.knows(token.key_id.as_deref());
        let known = self.known();
        let aged = known.since.is_none_or(|since| now.since(since) >= KEYS_LAST);
        let mut asked = if wanting(&known) {
            self.asking.clone().lock_owned().await
        } else if aged && let Ok(asked) = self.asking.clone().try_lock_owned() {
            asked
        } else {
            // The key is known. If the keys are old, another request is already fetching them.
            return;
        };
        // Another request may have fetched them while this one waited for the lock.
        if self.known().since != known.since && !wanting(&self.known()) {
            return;
        }
        if asked.is_some_and(|last| now.since(last) < ASK_AGAIN) {
            return;
        }
        *asked = Some(now);
        // Spawned as a task: the request may be cancelled, and the next fetch would be refused for
        // a minute.
        let issuer = self.clone();
        let fetching = self.fetches.spawn(async move {
            let _asked = asked;
            issuer.fetch_anew(now).await;
        });
        // The task does not panic; if it did, the token would be refused because its key is
        // unknown.
        let _ = fetching.await;
    }

    async fn fetch_anew(&self, now: Timestamp) {
        let fetched = self.fetch_keys().await;
        let mut known = self.known.write().expect("nothing panics while it is held");
        match fetched {
            Ok(keys) => {
                *known = IssuerKeys {
                    keys: Arc::new(keys),
                    since: Some(now),
                    trouble: None,
                };
            }
            Err(reason) => {
                tracing::warn!(issuer = %self.trust.issuer, reason, "the keys of the token issuer cannot be fetched");
                known.trouble = Some(reason);
            }
        }
    }

    async fn fetch_keys(&self) -> Result<KeySet, String> {
        let url = match &self.trust.jwks_url {
            Some(url) => url.clone(),
            None => self.discover().await?,
        };
        let text = self.fetch.get(&url).await?;
        let keys = KeySet::read(&text).map_err(|reason| format!("{url}: {reason}"))?;
        if keys.is_empty() {
            return Err(format!("{url}: holds no key for RS256 or ES256"));
        }
        Ok(keys)
    }

    async fn discover(&self) -> Result<String, String> {
        let base = self.trust.issuer.trim_end_matches('/');
        let url = format!("{base}/.well-known/openid-configuration");
        let text = self.fetch.get(&url).await?;
        let document: Value = serde_json::from_slice(&text).map_err(|e| format!("{url}: not JSON: {e}"))?;
        // Otherwise the operator of one tenant of a shared host could speak for another.
        if document["issuer"] != self.trust.issuer.as_str() {
            let (found, wanted) = (&document["issuer"], &self.trust.issuer);
            return Err(format!("{url}: is of the issuer {found}, not {wanted:?}"));
        }
        let keys = document["jwks_uri"].as_str();
        keys.map(str::to_owned)
            .ok_or_else(|| format!("{url}: has no jwks_uri"))
    }

    /// Whether the token names a key of the issuer but is not signed with it.
    pub fn is_forged(&self, token: &Token<'_>) -> bool {
        let keys = self.known().keys;
        keys.knows(token.key_id.as_deref()) && !keys.has_signed(token)
    }

    /// Verifies a token with the keys that are known.
    pub fn caller(&self, token: &Token<'_>, now: Timestamp) -> Result<Caller, AccessRefusal> {
        let known = self.known();
        if !known.keys.has_signed(token) {
            let reason = match (known.keys.knows(token.key_id.as_deref()), known.trouble) {
                (true, _) => "the signature of the bearer token does not match",
                (false, Some(_)) => "the keys of the token's issuer cannot be fetched",
                (false, None) => "the bearer token is signed with a key that its issuer does not publish",
            };
            return Err(AccessRefusal::unknown(reason));
        }
        token.check_time(now, LEEWAY).map_err(AccessRefusal::unknown)?;
        let audience = &self.trust.audience;
        if !token.is_for(audience) {
            let reason = format!("the bearer token was made for another audience than {audience:?}");
            return Err(AccessRefusal::unknown(reason));
        }
        self.trust.caller(&token.claims)
    }
}

impl IssuerConfig {
    /// The caller that the claims of a verified token name.
    fn caller(&self, claims: &Value) -> Result<Caller, AccessRefusal> {
        let named = |claim: &str| found(claims, claim)?.as_str().filter(|id| !id.is_empty());
        let id = match &self.client_claim {
            Some(claim) => named(claim),
            None => CLIENT_CLAIMS.into_iter().find_map(named),
        };
        let Some(id) = id else {
            let claim = self.client_claim.as_deref().unwrap_or("azp or sub");
            return Err(AccessRefusal::unknown(format!(
                "the bearer token has no claim {claim} to name its client"
            )));
        };
        let mut roles = Vec::new();
        for role in words(found(claims, &self.role_claim)).filter_map(|word| self.role(word)) {
            if !roles.contains(&role) {
                roles.push(role);
            }
        }
        Ok(Caller {
            id: id.to_owned(),
            roles,
        })
    }

    fn role(&self, word: &str) -> Option<Role> {
        match self.roles.is_empty() {
            true => Role::ALL.into_iter().find(|role| role.name() == word),
            false => self.roles.get(word).copied(),
        }
    }
}

/// Finds a claim by its name, which may contain dots (`https://example.com/roles`), or else by its
/// path.
fn found<'a>(claims: &'a Value, path: &str) -> Option<&'a Value> {
    claims
        .get(path)
        .or_else(|| path.split('.').try_fold(claims, |inner, name| inner.get(name)))
}

/// Roles come as a list, or as one text separated by spaces.
fn words(claim: Option<&Value>) -> impl Iterator<Item = &str> {
    let (list, text) = match claim {
        Some(Value::Array(list)) => (list.as_slice(), ""),
        Some(Value::String(text)) => (&[][..], text.as_str()),
        _ => (&[][..], ""),
    };
    list.iter()
        .filter_map(Value::as_str)
        .chain(text.split_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_wire::token::SigningKey;
    use serde_json::json;
    use std::collections::HashMap;
    use std::future::Future;
    use std::sync::Mutex;
    use std::task::Poll;

    const NOW: Timestamp = Timestamp::from_secs(1_800_000_000);
    const ISSUER: &str = "https://login.example/t";
    const DISCOVERY: &str = "https://login.example/t/.well-known/openid-configuration";
    const KEYS: &str = "https://login.example/keys";

    #[derive(Default)]
    struct FakeIssuerPages {
        pages: Mutex<HashMap<String, String>>,
        asked: Mutex<Vec<String>>,
    }

    impl FakeIssuerPages {
        fn put(&self, url: &str, page: Value) {
            let mut pages = self.pages.lock().unwrap();
            pages.insert(url.into(), page.to_string());
        }

        fn asked(&self) -> usize {
            self.asked.lock().unwrap().len()
        }
    }

    #[async_trait]
    impl HttpFetch for FakeIssuerPages {
        async fn get(&self, url: &str) -> Result<Bytes, String> {
            self.asked.lock().unwrap().push(url.into());
            // Like a real fetch, needs more than one poll.
            tokio::task::yield_now().await;
            let pages = self.pages.lock().unwrap();
            let page = pages.get(url).cloned();
            page.map(Bytes::from).ok_or_else(|| format!("{url}: 404"))
        }
    }

    fn trust() -> IssuerConfig {
        IssuerConfig {
            issuer: ISSUER.into(),
            audience: "api://grid".into(),
            jwks_url: None,
            role_claim: "roles".into(),
            client_claim: None,
            roles: BTreeMap::new(),
        }
    }

    fn claims() -> Value {
        json!({"iss": ISSUER, "aud": "api://grid", "azp": "app", "exp": 1_800_000_100, "roles": ["reader"]})
    }

    fn with(name: &str, value: Value) -> Value {
        let mut claims = claims();
        claims[name] = value;
        claims
    }

    fn issuer(keys: &SigningKey) -> (Arc<FakeIssuerPages>, Arc<TokenIssuer>) {
        let pages = Arc::new(FakeIssuerPages::default());
        pages.put(DISCOVERY, json!({"issuer": ISSUER, "jwks_uri": KEYS}));
        pages.put(KEYS, keys.key_set());
        (pages.clone(), TokenIssuer::new(trust(), pages))
    }

    async fn judge(issuer: &Arc<TokenIssuer>, text: &str, now: Timestamp) -> Result<Caller, String> {
        let token = Token::parse(text).unwrap();
        assert!(issuer.claims_to_have_made(&token));
        issuer.prepare(&token, now).await;
        issuer.caller(&token, now).map_err(|refused| refused.to_string())
    }

    #[tokio::test]
    async fn keys_arrive_though_whoever_asked_has_gone() {
        let key = SigningKey::fresh();
        let (pages, issuer) = issuer(&key);
        let text = key.sign(&claims());
        let token = Token::parse(&text).unwrap();
        {
            let mut asking = std::pin::pin!(issuer.prepare(&token, NOW));
            assert!(
                std::future::poll_fn(|context| Poll::Ready(asking.as_mut().poll(context).is_pending())).await
            );
        }
        // The issuer is not queried again so soon: the fetch that the first request began must have
        // completed.
        judge(&issuer, &text, NOW).await.unwrap();
        assert_eq!(pages.asked(), 2, "discovery and keys, once");
    }

    #[tokio::test]
    async fn a_token_is_judged_by_signature_time_audience_and_roles() {
        let key = SigningKey::fresh();
        let (pages, issuer) = issuer(&key);
        let check = async |claims: Value, expected: Result<&[Role], &str>| {
            let found = judge(&issuer, &key.sign(&claims), NOW).await;
            let roles = found.map(|caller| caller.roles);
            assert_eq!(roles, expected.map(Into::into).map_err(str::to_owned), "{claims}");
        };
        check(claims(), Ok(&[Role::Reader])).await;
        check(with("aud", json!(["x", "api://grid"])), Ok(&[Role::Reader])).await;
        check(with("exp", json!(1_799_999_881)), Ok(&[Role::Reader])).await;
        check(with("exp", json!(1_799_999_880)), Err("the token has expired")).await;
        check(
            with("nbf", json!(1_800_000_121)),
            Err("the token is not valid yet"),
        )
        .await;
        check(
            with("aud", json!("api://other")),
            Err("the bearer token was made for another audience than \"api://grid\""),
        )
        .await;
        check(
            with("azp", json!(7)),
            Err("the bearer token has no claim azp or sub to name its client"),
        )
        .await;
        check(with("roles", json!("king")), Ok(&[])).await;
        assert_eq!(pages.asked(), 2, "discovery and keys, once");

        let stranger = SigningKey::fresh();
        let mut forged = stranger.sign(&claims());
        let refused = judge(&issuer, &forged, NOW).await.unwrap_err();
        assert_eq!(
            refused,
            "the bearer token is signed with a key that its issuer does not publish"
        );
        // A token with the name of the real key and a signature of another.
        let real = key.sign(&claims());
        let (head, _) = real.split_once('.').unwrap();
        let (_, rest) = forged.split_once('.').unwrap();
        forged = format!("{head}.{rest}");
        let refused = judge(&issuer, &forged, NOW).await.unwrap_err();
        assert_eq!(refused, "the signature of the bearer token does not match");
    }

    #[tokio::test]
    async fn an_unknown_key_is_looked_for_at_most_once_a_minute() {
        let (old, new) = (SigningKey::fresh(), SigningKey::fresh());
        let (pages, issuer) = issuer(&old);
        assert!(judge(&issuer, &old.sign(&claims()), NOW).await.is_ok());
        assert_eq!(pages.asked(), 2);
        pages.put(KEYS, new.key_set());
        let later = |seconds| NOW + Duration::from_secs(seconds);
        assert!(judge(&issuer, &new.sign(&claims()), later(59)).await.is_err());
        assert_eq!(pages.asked(), 2, "not yet");
        assert!(judge(&issuer, &new.sign(&claims()), later(60)).await.is_ok());
        assert_eq!(pages.asked(), 4);
        assert!(
            judge(&issuer, &old.sign(&claims()), later(61)).await.is_err(),
            "withdrawn"
        );
    }

    #[tokio::test]
    async fn a_withdrawn_key_is_trusted_no_longer_than_an_hour_and_an_issuer_out_of_reach_keeps_its_keys() {
        let (old, new) = (SigningKey::fresh(), SigningKey::fresh());
        let (pages, issuer) = issuer(&old);
        let token = old.sign(&with("exp", json!(1_800_009_999)));
        assert!(judge(&issuer, &token, NOW).await.is_ok());
        pages.pages.lock().unwrap().clear();
        assert!(
            judge(&issuer, &token, NOW + KEYS_LAST).await.is_ok(),
            "out of reach"
        );
        assert_eq!(pages.asked(), 3);
        pages.put(DISCOVERY, json!({"issuer": ISSUER, "jwks_uri": KEYS}));
        pages.put(KEYS, new.key_set());
        assert!(judge(&issuer, &token, NOW + KEYS_LAST + ASK_AGAIN).await.is_err());
    }

    #[tokio::test]
    async fn what_is_wrong_with_an_issuer_is_found_out() {
        let key = SigningKey::fresh();
        let check = async |discovery: Value, keys: Value, expected: &str| {
            let (pages, issuer) = issuer(&key);
            pages.put(DISCOVERY, discovery);
            pages.put(KEYS, keys);
            let refused = judge(&issuer, &key.sign(&claims()), NOW).await.unwrap_err();
            assert_eq!(refused, "the keys of the token's issuer cannot be fetched");
            assert_eq!(issuer.known().trouble.as_deref(), Some(expected));
        };
        check(
            json!({"issuer": "https://login.example/other", "jwks_uri": KEYS}),
            key.key_set(),
            "https://login.example/t/.well-known/openid-configuration: is of the issuer \
             \"https://login.example/other\", not \"https://login.example/t\"",
        )
        .await;
        check(
            json!({"issuer": ISSUER}),
            key.key_set(),
            "https://login.example/t/.well-known/openid-configuration: has no jwks_uri",
        )
        .await;
        check(
            json!({"issuer": ISSUER, "jwks_uri": KEYS}),
            json!({"keys": [{"kty": "oct"}]}),
            "https://login.example/keys: holds no key for RS256 or ES256",
        )
        .await;
        check(
            json!({"issuer": ISSUER, "jwks_uri": "https://login.example/none"}),
            key.key_set(),
            "https://login.example/none: 404",
        )
        .await;
    }

    #[test]
    fn roles_and_the_client_are_found_where_the_operator_says() {
        let check = |trust: &IssuerConfig, claims: Value, id: &str, roles: &[Role]| {
            let caller = trust.caller(&claims).unwrap();
            assert_eq!((caller.id.as_str(), &*caller.roles), (id, roles), "{claims}");
        };
        let plain = trust();
        check(
            &plain,
            json!({"sub": "s", "roles": "reader data-sender reader"}),
            "s",
            &[Role::Reader, Role::DataSender],
        );
        check(
            &plain,
            json!({"sub": "s", "appid": "a", "roles": [1, "owner"]}),
            "a",
            &[Role::Owner],
        );
        check(&plain, json!({"sub": "s"}), "s", &[]);
        let mapped = IssuerConfig {
            role_claim: "realm_access.roles".into(),
            client_claim: Some("email".into()),
            roles: BTreeMap::from([("grid-admin".into(), Role::Owner)]),
            ..trust()
        };
        check(
            &mapped,
            json!({"email": "e", "realm_access": {"roles": ["owner", "grid-admin"]}}),
            "e",
            &[Role::Owner],
        );
        check(
            &mapped,
            json!({"email": "e", "realm_access": {"roles": ["owner"]}}),
            "e",
            &[],
        );
        check(
            &mapped,
            json!({"email": "e", "realm_access.roles": ["grid-admin"]}),
            "e",
            &[Role::Owner],
        );
        assert!(mapped.caller(&json!({"sub": "s"})).is_err());
    }
}
