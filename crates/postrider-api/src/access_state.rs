//! Validity of this server's tokens and sessions: revocations, and the keys that sign tokens and
//! seal sessions.
//!
//! The state is one small document, kept by the store and shared by all nodes of a cluster. Each
//! change raises the document's epoch, and every token and session carries the epoch at which it
//! was issued. A revocation names the epoch below which tokens and sessions are invalid, so it
//! depends on no clock: even a node that has not heard of the revocation yet issues tokens that are
//! revoked.

use crate::Server;
use crate::login::TOKEN_LIFETIME;
use crate::own_api::Problem;
use crate::peers::gather;
use crate::sessions::{self, PortalSession};
use async_trait::async_trait;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD as BASE64;
use bytes::Bytes;
use postrider_core::time::Timestamp;
use postrider_wire::seal::Seal;
use postrider_wire::token::{KeySet, SigningKey, Token, fresh_pkcs8};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Limit of revoked clients, and of revoked ids, that are remembered. Each is remembered until
/// nothing that it revokes could still be valid.
const REVOKED_MAX: usize = 10_000;
/// With more remembered ids than this, a sign-out is remembered by the process only and no longer
/// stored.
const SIGN_OUTS_MAX: usize = REVOKED_MAX / 2;
/// Replaced keys that still verify tokens but sign none.
const PREVIOUS_KEYS_MAX: usize = 8;
/// How long a revocation is remembered: longer than the lifetime of any token or session.
const REMEMBERED: Duration = Duration::from_secs(13 * 3600);
/// How long a replaced key still verifies: the lifetime of its last token plus the tolerated clock
/// difference.
const KEY_OVERLAP: Duration = Duration::from_secs(TOKEN_LIFETIME as u64 + 120);
/// How often a change is attempted while other nodes change the document at the same time.
const TRIES: u32 = 20;
/// How often a node looks for changes of which no notification reached it.
const REFRESH_EVERY: Duration = Duration::from_secs(15);

/// Storage of the access document, shared by all nodes of a cluster.
#[async_trait]
pub trait AccessStore: Send + Sync {
    /// The stored text with its revision; none if nothing was stored yet.
    async fn read(&self) -> Result<Option<(Bytes, u64)>, String>;
    /// Stores the text if the stored text still has revision `expected` (0: nothing is stored).
    /// Returns false if the revision differs.
    async fn swap(&self, text: Bytes, expected: u64) -> Result<bool, String>;
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AccessDocument {
    /// Every document that was stored has it: text without it is not one.
    epoch: u64,
    /// Tokens and sessions of earlier epochs are revoked.
    #[serde(default)]
    all_before: u64,
    /// The same for single clients, by their ids in lower case.
    #[serde(default)]
    clients: BTreeMap<String, RevokedClient>,
    /// Single tokens and sessions, with the second after which they would not hold anyway.
    #[serde(default)]
    ids: BTreeMap<String, i64>,
    /// PKCS #8 in base64; none: the key of `token-key.pem` signs.
    #[serde(default)]
    signing_key: Option<String>,
    /// The epoch in which the key was last replaced: sessions of earlier epochs are sealed with a key that is gone.
    #[serde(default)]
    key_epoch: u64,
    #[serde(default)]
    previous_keys: Vec<PreviousKey>,
    /// No two texts that were ever stored are the same.
    #[serde(default)]
    nonce: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct RevokedClient {
    before: u64,
    /// In seconds since 1970.
    at: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PreviousKey {
    /// Public keys only.
    key_set: Value,
    until: i64,
}

fn seconds(time: Timestamp) -> i64 {
    time.nanos() / 1_000_000_000
}

impl AccessDocument {
    fn is_unrevoked(&self, client: &str, id: &str, epoch: u64) -> bool {
        let revoked = self.clients.get(&client.to_lowercase());
        // No server issues an epoch that is later than the document's: such a token or session is
        // forged.
        epoch <= self.epoch
            && epoch >= self.all_before
            && revoked.is_none_or(|revoked| epoch >= revoked.before)
            && !self.ids.contains_key(id)
    }

    /// Begins a change: raises the epoch, and drops revocations and keys that no longer have an
    /// effect.
    fn advance(&mut self, now: Timestamp) {
        self.epoch += 1;
        let now = seconds(now);
        let remembered = REMEMBERED.as_secs() as i64;
        self.clients.retain(|_, revoked| revoked.at + remembered > now);
        self.ids.retain(|_, until| *until > now);
        self.previous_keys.retain(|key| key.until > now);
    }

    fn revoke_all(&mut self, now: Timestamp) {
        self.advance(now);
        self.all_before = self.epoch;
        self.clients.clear();
        self.ids.clear();
    }

    fn revoke_client(&mut self, client: &str, now: Timestamp) -> Result<(), Problem> {
        self.advance(now);
        let client = client.to_lowercase();
        has_room(
            self.clients.len(),
            self.clients.contains_key(&client),
            REVOKED_MAX,
        )?;
        let revoked = RevokedClient {
            before: self.epoch,
            at: seconds(now),
        };
        self.clients.insert(client, revoked);
        Ok(())
    }

    fn revoke_id(&mut self, id: &str, until: i64, now: Timestamp) -> Result<(), Problem> {
        self.advance(now);
        has_room(self.ids.len(), self.ids.contains_key(id), REVOKED_MAX)?;
        self.ids.insert(id.to_owned(), until);
        Ok(())
    }

    /// Remembers a sign-out. Sign-outs may use only half of the limit, so that revocations always
    /// fit.
    fn sign_out(&mut self, id: &str, until: i64, now: Timestamp) -> Result<(), Problem> {
        self.advance(now);
        has_room(self.ids.len(), self.ids.contains_key(id), SIGN_OUTS_MAX)?;
        self.ids.insert(id.to_owned(), until);
        Ok(())
    }

    /// Replaces the signing key. `current` is the key that has signed until now.
    fn rotate(
        &mut self,
        current: &SigningKey,
        new: &[u8],
        at_once: bool,
        now: Timestamp,
    ) -> Result<(), Problem> {
        self.advance(now);
        match at_once {
            true => self.previous_keys.clear(),
            false if self.previous_keys.len() >= PREVIOUS_KEYS_MAX => {
                let reason = "the key was replaced too often in the last hour; wait, or use now";
                return Err(Problem::new(409, reason));
            }
            false => self.previous_keys.push(PreviousKey {
                key_set: current.key_set(),
                until: seconds(now + KEY_OVERLAP),
            }),
        }
        self.signing_key = Some(BASE64.encode(new));
        self.key_epoch = self.epoch;
        Ok(())
    }
}

fn has_room(count: usize, known: bool, max: usize) -> Result<(), Problem> {
    if known || count < max {
        return Ok(());
    }
    let reason = format!("{max} revocations are remembered already; revoke by client, or all");
    Err(Problem::new(409, reason))
}

/// The document in force, with its keys parsed.
struct ActiveAccessDocument {
    document: AccessDocument,
    signing_key: SigningKey,
    /// Seals portal sessions. Derived from the signing key in force and not from `token-key.pem`,
    /// so that `rotate-key` locks out anyone who has stolen that file.
    session_seal: Seal,
    previous: Vec<(KeySet, Timestamp)>,
}

impl ActiveAccessDocument {
    fn new(document: AccessDocument, initial: &SigningKey) -> Result<ActiveAccessDocument, String> {
        let signing_key = match &document.signing_key {
            None => initial.clone(),
            Some(text) => {
                let der = BASE64.decode(text).map_err(|e| e.to_string())?;
                SigningKey::from_pkcs8(&der).map_err(|e| e.to_string())?
            }
        };
        let mut previous = Vec::new();
        for key in &document.previous_keys {
            let keys = KeySet::read(key.key_set.to_string().as_bytes())?;
            previous.push((keys, Timestamp::from_secs(key.until)));
        }
        Ok(ActiveAccessDocument {
            document,
            session_seal: Seal::new(signing_key.derived_secret(), "session"),
            signing_key,
            previous,
        })
    }
}

pub(crate) struct AccessState {
    /// Signs while the document has no key of its own.
    initial: SigningKey,
    in_force: RwLock<Arc<ActiveAccessDocument>>,
    store: Option<Arc<dyn AccessStore>>,
    changing: tokio::sync::Mutex<()>,
    /// The epoch in force: wakes what a revocation must end.
    epochs: watch::Sender<u64>,
}

impl AccessState {
    pub fn new(initial: &SigningKey) -> AccessState {
        let in_force =
            ActiveAccessDocument::new(AccessDocument::default(), initial).expect("it holds no keys");
        AccessState {
            initial: initial.clone(),
            in_force: RwLock::new(Arc::new(in_force)),
            store: None,
            changing: tokio::sync::Mutex::default(),
            epochs: watch::Sender::default(),
        }
    }

    fn now(&self) -> Arc<ActiveAccessDocument> {
        self.in_force.read().expect("no panic holds it").clone()
    }

    /// Puts a document in force, unless the one in force has a later epoch.
    fn adopt(&self, document: AccessDocument) -> Result<(), String> {
        let new = ActiveAccessDocument::new(document, &self.initial)?;
        let mut in_force = self.in_force.write().expect("no panic holds it");
        if new.document.epoch >= in_force.document.epoch {
            let epoch = new.document.epoch;
            *in_force = Arc::new(new);
            self.epochs
                .send_if_modified(|told| std::mem::replace(told, epoch) != epoch);
        }
        Ok(())
    }

    /// Told of every change. The change is in force for whoever asks after being told.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.epochs.subscribe()
    }

    /// Given to tokens and sessions.
    pub fn epoch(&self) -> u64 {
        self.now().document.epoch
    }

    /// Whether a token or session of this client is not revoked.
    pub fn holds(&self, client: &str, id: &str, epoch: u64) -> bool {
        self.now().document.is_unrevoked(client, id, epoch)
    }

    /// Whether a portal session of this epoch can be sealed with the key in force: the key has not
    /// been replaced since.
    pub fn session_key_holds(&self, epoch: u64) -> bool {
        epoch >= self.now().document.key_epoch
    }

    /// The seal of portal sessions, with the epoch that new sessions get.
    pub fn session_seal(&self) -> (Seal, u64) {
        let in_force = self.now();
        (in_force.session_seal.clone(), in_force.document.epoch)
    }

    pub fn signing_key(&self) -> SigningKey {
        self.now().signing_key.clone()
    }

    pub fn has_signed(&self, token: &Token<'_>, now: Timestamp) -> bool {
        let in_force = self.now();
        let mut previous = in_force.previous.iter();
        in_force.signing_key.has_signed(token)
            || previous.any(|(keys, until)| now < *until && keys.has_signed(token))
    }

    /// Public keys with which others verify this server's tokens.
    pub fn key_set(&self, now: Timestamp) -> Value {
        let in_force = self.now();
        let mut keys = in_force.signing_key.key_set();
        let previous = in_force.document.previous_keys.iter();
        for key in previous.filter(|key| key.until > seconds(now)) {
            if let (Some(all), Some(more)) = (keys["keys"].as_array_mut(), key.key_set["keys"].as_array()) {
                all.extend(more.iter().cloned());
            }
        }
        keys
    }

    async fn stored(&self) -> Result<Option<(AccessDocument, u64)>, String> {
        let Some(store) = &self.store else {
            return Ok(None);
        };
        let Some((text, revision)) = store.read().await? else {
            return Ok(None);
        };
        let document = serde_json::from_slice(&text).map_err(|e| format!("it cannot be read: {e}"))?;
        Ok(Some((document, revision)))
    }

    async fn refresh(&self) -> Result<(), String> {
        match self.stored().await? {
            Some((document, _)) => self.adopt(document),
            None => Ok(()),
        }
    }
}

/// Target of a revocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RevocationTarget {
    All,
    Client(String),
    /// A token or session, and the second at which it expires anyway.
    Id(String, i64),
}

impl Server {
    /// Keeps the access document in this store from now on. Must be called before the first
    /// request.
    pub async fn use_access_store(&mut self, store: Arc<dyn AccessStore>) -> Result<(), String> {
        self.access.store = Some(store);
        self.access.refresh().await
    }

    /// Puts changes of other nodes in force.
    pub(crate) async fn refresh_access(&self) -> Result<(), String> {
        self.access.refresh().await
    }

    /// Looks for changes of other nodes until `stop`, so that a node which was unreachable learns
    /// of them too.
    pub async fn run_access_refresh(self: Arc<Server>, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.wall.sleep_until(self.wall.now() + REFRESH_EVERY) => {}
            }
            if let Err(reason) = self.refresh_access().await {
                tracing::warn!(
                    reason,
                    "revocations of tokens and sessions cannot be read from the store"
                );
            }
        }
    }

    /// Revokes tokens and sessions. Returns the names of the nodes that may not have heard of it
    /// yet.
    pub(crate) async fn revoke(&self, what: &RevocationTarget) -> Result<Vec<String>, Problem> {
        let now = self.wall.now();
        let missing = self
            .change_access(|document, _| match what {
                RevocationTarget::All => {
                    document.revoke_all(now);
                    Ok(())
                }
                RevocationTarget::Client(client) => document.revoke_client(client, now),
                RevocationTarget::Id(id, until) => document.revoke_id(id, *until, now),
            })
            .await?;
        tracing::info!(revoked = ?what, "tokens and sessions were revoked");
        Ok(missing)
    }

    /// Ends a portal session for good: at every node, and after a restart.
    pub(crate) async fn end_session(&self, session: &PortalSession) {
        // Ended at this node at once, even if storing the sign-out fails.
        self.sessions.end(session);
        self.login_ended(&session.name);
        let (now, until) = (self.wall.now(), session.given().expires);
        let stored = self.change_access(|document, _| document.sign_out(&session.name, until, now));
        if let Err(problem) = stored.await {
            tracing::warn!(
                reason = problem.detail,
                "a sign-out could not be stored: the session's cookie would be taken again after a restart"
            );
        }
    }

    /// Replaces the key that signs tokens and seals portal sessions.
    pub(crate) async fn rotate_key(&self, at_once: bool) -> Result<Vec<String>, Problem> {
        let (now, new) = (self.wall.now(), fresh_pkcs8());
        let missing = self
            .change_access(|document, current| document.rotate(current, &new, at_once, now))
            .await?;
        tracing::info!(
            at_once,
            "the key that signs tokens was replaced; portal sessions have ended"
        );
        Ok(missing)
    }

    async fn change_access(
        &self,
        change: impl Fn(&mut AccessDocument, &SigningKey) -> Result<(), Problem>,
    ) -> Result<Vec<String>, Problem> {
        let unavailable =
            |reason: String| Problem::new(503, format!("revocations and keys cannot be stored: {reason}"));
        let _one = self.access.changing.lock().await;
        for _ in 0..TRIES {
            let stored = self.access.stored().await.map_err(unavailable)?;
            let (mut document, revision) = stored.unwrap_or_else(|| (self.access.now().document.clone(), 0));
            let current =
                ActiveAccessDocument::new(document.clone(), &self.access.initial).map_err(unavailable)?;
            change(&mut document, &current.signing_key)?;
            document.nonce = sessions::fresh_id();
            let text = serde_json::to_vec(&document).expect("its keys are text");
            if let Some(store) = &self.access.store
                && !store.swap(text.into(), revision).await.map_err(unavailable)?
            {
                continue;
            }
            self.access.adopt(document).map_err(unavailable)?;
            return Ok(match &self.peers {
                Some(peers) => gather::<Value>(&**peers, "access", &json!({})).await.missing,
                None => Vec::new(),
            });
        }
        Err(unavailable("other nodes change them all the time".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_800_000_000);

    #[test]
    fn a_revocation_ends_what_was_given_before_it_and_nothing_else() {
        let mut document = AccessDocument::default();
        let given = document.epoch;
        assert!(document.is_unrevoked("Me", "1", given));
        document.revoke_client("ME", NOW).unwrap();
        assert!(!document.is_unrevoked("me", "1", given));
        assert!(document.is_unrevoked("you", "2", given));
        assert!(
            document.is_unrevoked("me", "3", document.epoch),
            "a new login holds"
        );
        let until = seconds(NOW) + 60;
        document.revoke_id("2", until, NOW).unwrap();
        assert!(!document.is_unrevoked("you", "2", given) && document.is_unrevoked("you", "4", given));
        document.revoke_all(NOW);
        assert!(!document.is_unrevoked("you", "4", given));
        assert!(document.is_unrevoked("you", "5", document.epoch));
        // The revocation also covers ids issued in the epochs between.
        assert!(!document.is_unrevoked("you", "4", document.epoch - 1));
    }

    #[test]
    fn an_epoch_in_the_future_is_forged() {
        let mut document = AccessDocument::default();
        assert!(!document.is_unrevoked("me", "1", 1) && !document.is_unrevoked("me", "1", u64::MAX));
        document.revoke_all(NOW);
        assert!(document.is_unrevoked("me", "1", 1));
        assert!(
            !document.is_unrevoked("me", "1", u64::MAX),
            "it would outlive every revocation"
        );
    }

    #[test]
    fn text_without_an_epoch_is_no_document() {
        for text in ["{}", "[]", r#"{"v":3}"#] {
            assert!(serde_json::from_str::<AccessDocument>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sign_outs_leave_room_for_revocations() {
        let mut document = AccessDocument::default();
        for n in 0..SIGN_OUTS_MAX {
            document.ids.insert(n.to_string(), seconds(NOW) + 60);
        }
        assert_eq!(document.sign_out("x", i64::MAX, NOW).unwrap_err().status, 409);
        document.sign_out("7", i64::MAX, NOW).unwrap();
        document.revoke_id("x", i64::MAX, NOW).unwrap();
    }

    #[test]
    fn sessions_are_sealed_with_the_key_in_force() {
        let state = AccessState::new(&SigningKey::fresh());
        let (seal, epoch) = state.session_seal();
        let sealed = seal.close("session");
        assert!(state.session_key_holds(epoch));
        // Documents of versions before sealed sessions have no member for the key's epoch.
        let stored = serde_json::from_value(json!({"epoch": 3})).unwrap();
        state.adopt(stored).unwrap();
        assert!(state.session_seal().0.open(sealed.expose()).is_some());
        let mut document = state.now().document.clone();
        document
            .rotate(&state.signing_key(), &fresh_pkcs8(), false, NOW)
            .unwrap();
        state.adopt(document).unwrap();
        assert!(state.session_seal().0.open(sealed.expose()).is_none());
        assert!(!state.session_key_holds(epoch));
        assert!(state.session_key_holds(state.epoch()));
    }

    #[test]
    fn what_would_have_ended_anyway_is_forgotten_and_the_rest_is_bounded() {
        let mut document = AccessDocument::default();
        document.revoke_client("me", NOW).unwrap();
        document.revoke_id("1", seconds(NOW) + 60, NOW).unwrap();
        document.revoke_client("you", NOW + REMEMBERED).unwrap();
        assert_eq!((document.clients.len(), document.ids.len()), (1, 0));
        for n in 0..REVOKED_MAX {
            document.ids.insert(n.to_string(), seconds(NOW + REMEMBERED) + 60);
        }
        let refused = document.revoke_id("x", i64::MAX, NOW + REMEMBERED).unwrap_err();
        assert_eq!(refused.status, 409);
        document.revoke_id("7", i64::MAX, NOW + REMEMBERED).unwrap();
    }

    #[test]
    fn a_replaced_key_verifies_until_its_last_token_has_ended_or_not_at_all() {
        let old = SigningKey::fresh();
        let text = old.sign(&json!({}));
        let token = Token::parse(&text).unwrap();
        let state = AccessState::new(&old);
        let rotate = |at_once: bool| {
            let mut document = state.now().document.clone();
            document
                .rotate(&state.signing_key(), &fresh_pkcs8(), at_once, NOW)
                .unwrap();
            // As another node reads the stored document.
            let text = serde_json::to_vec(&document).unwrap();
            state.adopt(serde_json::from_slice(&text).unwrap()).unwrap();
        };
        assert!(state.has_signed(&token, NOW));
        rotate(false);
        assert!(!state.signing_key().has_signed(&token));
        assert!(state.has_signed(&token, NOW));
        assert_eq!(state.key_set(NOW)["keys"].as_array().unwrap().len(), 2);
        assert!(!state.has_signed(&token, NOW + KEY_OVERLAP));
        assert_eq!(
            state.key_set(NOW + KEY_OVERLAP)["keys"].as_array().unwrap().len(),
            1
        );
        rotate(true);
        assert!(!state.has_signed(&token, NOW));
        assert_eq!(state.key_set(NOW)["keys"].as_array().unwrap().len(), 1);
        // A document with an earlier epoch does not replace a later one.
        state.adopt(AccessDocument::default()).unwrap();
        assert!(!state.has_signed(&token, NOW));
    }
}
