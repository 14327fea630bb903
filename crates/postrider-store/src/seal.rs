//! Sealing of stored secrets: AES-256-GCM under a key that is kept apart from them.
//!
//! A sealed value is JSON of version 2, so that a program that knows only version 1 refuses it by
//! version: `{"v":2,"key":"<id>","sealed":"<base64 of nonce, ciphertext and tag>"}`. The value's
//! storage location is authenticated with it, so a value that was moved to another row cannot be
//! opened.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use ring::{digest, hmac};
use std::borrow::Cow;
use std::fmt;

pub const KEY_BYTES: usize = 32;
/// Maximum number of keys of one keyring: the current key and those of earlier rotations.
pub const KEYS_MAX: usize = 16;

const BEGINNING: &str = r#"{"v":2,"key":""#;
const MIDDLE: &str = r#"","sealed":""#;
const END: &str = r#""}"#;
const ID_DIGITS: usize = 16;

/// Public id of a key: the first bytes of its SHA-256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyId(pub u64);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    #[error(
        "sealed under key {needed}, which is not in {source_name} (it holds {known}): put the key back, beneath the key that is to be used from now on"
    )]
    UnknownKey {
        needed: KeyId,
        source_name: String,
        known: String,
    },
    #[error("the sealed {0} was changed or damaged: it does not match its key")]
    Damaged(String),
}

/// Why a text does not contain keys. Nothing of the text is part of the message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{source_name}: {reason}")]
pub struct KeyError {
    source_name: String,
    reason: String,
}

impl KeyError {
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

struct SealingKey {
    id: KeyId,
    sealing: LessSafeKey,
    naming: hmac::Key,
}

/// Encryption keys: the first one seals, all of them open.
pub struct Keyring {
    keys: Vec<SealingKey>,
    /// Where the keys come from, for messages.
    source_name: String,
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Keyring").field(&self.ids()).finish()
    }
}

impl Keyring {
    /// Parses base64 keys of 32 bytes each, one per line or separated by commas. Lines starting
    /// with `#` are comments.
    pub fn parse(text: &str, source_name: impl Into<String>) -> Result<Keyring, KeyError> {
        let source_name = source_name.into();
        let refused = |reason: String| KeyError {
            source_name: source_name.clone(),
            reason,
        };
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
        let words = lines.flat_map(|line| line.split(',')).map(str::trim);
        let mut keys = Vec::new();
        for (index, word) in words.filter(|word| !word.is_empty()).enumerate() {
            let bytes = BASE64.decode(word).unwrap_or_default();
            let Ok(bytes) = <[u8; KEY_BYTES]>::try_from(bytes) else {
                return Err(refused(format!(
                    "key {} is not base64 of 32 bytes; \"openssl rand -base64 32\" makes one",
                    index + 1
                )));
            };
            keys.push(SealingKey::new(&bytes));
        }
        match keys.len() {
            0 => Err(refused(
                "no key; \"openssl rand -base64 32\" makes one".to_owned(),
            )),
            1..=KEYS_MAX => Ok(Keyring { keys, source_name }),
            _ => Err(refused(format!("more than {KEYS_MAX} keys"))),
        }
    }

    /// Generates a key, as text.
    pub fn fresh_text() -> String {
        let mut bytes = [0; KEY_BYTES];
        random(&mut bytes);
        BASE64.encode(bytes)
    }

    /// A key that is never stored: values sealed under it are lost with the process.
    pub fn ephemeral() -> Keyring {
        Keyring::parse(&Keyring::fresh_text(), "the memory of this process").expect("a fresh key is a key")
    }

    /// Adds the other keyring's keys for opening.
    pub fn with_opening_keys(mut self, other: Keyring) -> Keyring {
        let new: Vec<SealingKey> = other.keys.into_iter().filter(|key| !self.knows(key.id)).collect();
        if !new.is_empty() {
            self.source_name = format!("{} and {}", self.source_name, other.source_name);
            self.keys.extend(new);
        }
        self
    }

    /// The key that seals.
    pub fn current(&self) -> KeyId {
        self.keys[0].id
    }

    pub fn ids(&self) -> Vec<KeyId> {
        self.keys.iter().map(|key| key.id).collect()
    }

    pub fn knows(&self, id: KeyId) -> bool {
        self.keys.iter().any(|key| key.id == id)
    }

    /// Fails unless values sealed under this key can be opened.
    pub fn require(&self, needed: KeyId) -> Result<(), SealError> {
        self.key(needed).map(drop)
    }

    fn key(&self, needed: KeyId) -> Result<&SealingKey, SealError> {
        let found = self.keys.iter().find(|key| key.id == needed);
        found.ok_or_else(|| {
            let known: Vec<String> = self.keys.iter().map(|key| key.id.to_string()).collect();
            SealError::UnknownKey {
                needed,
                source_name: self.source_name.clone(),
                known: known.join(", "),
            }
        })
    }

    /// Seals a value for the given location.
    pub fn seal(&self, place: &str, value: &[u8]) -> Vec<u8> {
        let key = &self.keys[0];
        let mut nonce = [0; NONCE_LEN];
        random(&mut nonce);
        let mut bytes = value.to_vec();
        let tag = key.sealing.seal_in_place_separate_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(place.as_bytes()),
            &mut bytes,
        );
        let tag = tag.expect("a stored value is far smaller than the cipher's limit");
        let whole = [&nonce[..], &bytes, tag.as_ref()].concat();
        let text = BASE64.encode(whole);
        format!("{BEGINNING}{}{MIDDLE}{text}{END}", key.id).into_bytes()
    }

    /// Opens a value that was sealed for this location. A value that is not sealed is returned
    /// unchanged.
    pub fn open<'a>(&self, place: &str, stored: &'a [u8]) -> Result<Cow<'a, [u8]>, SealError> {
        let damaged = || SealError::Damaged(place.to_owned());
        let Some((id, text)) = split(stored) else {
            return match stored.starts_with(BEGINNING.as_bytes()) {
                true => Err(damaged()),
                false => Ok(Cow::Borrowed(stored)),
            };
        };
        let key = self.key(id)?;
        let mut bytes = BASE64.decode(text).map_err(|_| damaged())?;
        let nonce = bytes.first_chunk::<NONCE_LEN>().copied().ok_or_else(damaged)?;
        let opened = key.sealing.open_within(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(place.as_bytes()),
            &mut bytes,
            NONCE_LEN..,
        );
        let len = opened.map_err(|_| damaged())?.len();
        bytes.truncate(len);
        Ok(Cow::Owned(bytes))
    }

    /// A keyed hash of a text, usable as a name: without the sealing key it reveals nothing about
    /// the text.
    pub fn name_of(&self, text: &str) -> String {
        let tag = hmac::sign(&self.keys[0].naming, text.as_bytes());
        BASE64.encode(tag.as_ref())
    }
}

impl SealingKey {
    fn new(bytes: &[u8; KEY_BYTES]) -> SealingKey {
        let mut context = digest::Context::new(&digest::SHA256);
        context.update(b"postrider secret key");
        context.update(bytes);
        let digest = context.finish();
        let id = digest.as_ref().first_chunk().expect("SHA-256 has 32 bytes");
        let unbound = UnboundKey::new(&AES_256_GCM, bytes).expect("the key has 32 bytes");
        let master = hmac::Key::new(hmac::HMAC_SHA256, bytes);
        let naming = hmac::sign(&master, b"postrider names");
        SealingKey {
            id: KeyId(u64::from_be_bytes(*id)),
            sealing: LessSafeKey::new(unbound),
            naming: hmac::Key::new(hmac::HMAC_SHA256, naming.as_ref()),
        }
    }
}

/// Id of the key that a stored value is sealed under, or `None` if the value is not sealed.
pub fn key_of(stored: &[u8]) -> Option<KeyId> {
    split(stored).map(|(id, _)| id)
}

fn split(stored: &[u8]) -> Option<(KeyId, &[u8])> {
    let rest = stored.strip_prefix(BEGINNING.as_bytes())?;
    let (digits, rest) = rest.split_at_checked(ID_DIGITS)?;
    let id = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    let text = rest.strip_prefix(MIDDLE.as_bytes())?;
    Some((KeyId(id), text.strip_suffix(END.as_bytes())?))
}

fn random(bytes: &mut [u8]) {
    let filled = SystemRandom::new().fill(bytes);
    filled.expect("the system has random bytes");
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    const B: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";

    fn ring(text: &str) -> Keyring {
        Keyring::parse(text, "a test").unwrap()
    }

    #[test]
    fn what_was_sealed_is_opened_in_its_place_only_and_unchanged_only() {
        let keys = ring(A);
        let sealed = keys.seal("topics/1", b"hunter2");
        assert_eq!(key_of(&sealed), Some(keys.current()));
        assert_eq!(&*keys.open("topics/1", &sealed).unwrap(), b"hunter2");
        assert_ne!(sealed, keys.seal("topics/1", b"hunter2"), "another nonce");
        let damaged = |place: &str| SealError::Damaged(place.to_owned());
        assert_eq!(keys.open("topics/2", &sealed), Err(damaged("topics/2")));
        for at in BEGINNING.len()..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(keys.open("topics/1", &changed).is_err(), "byte {at}");
        }
        assert!(keys.open("topics/1", &sealed[..sealed.len() - 3]).is_err());
        assert_eq!(&*keys.open("topics/1", br#"{"v":1}"#).unwrap(), br#"{"v":1}"#);
    }

    #[test]
    fn older_programs_refuse_a_sealed_record_by_its_version() {
        let sealed = ring(A).seal("topics/1", b"{}");
        let json: serde_json::Value = serde_json::from_slice(&sealed).unwrap();
        assert_eq!(json["v"], 2);
    }

    #[test]
    fn the_first_key_seals_and_all_open() {
        let (a, b) = (ring(A), ring(B));
        let both = ring(&format!("# new\n{B}\n{A}\n"));
        assert_eq!(both.current(), b.current());
        let sealed = a.seal("p", b"x");
        assert_eq!(&*both.open("p", &sealed).unwrap(), b"x");
        assert_eq!(&*b.open("p", &both.seal("p", b"x")).unwrap(), b"x");
        let error = b.open("p", &sealed).unwrap_err().to_string();
        for word in [a.current().to_string(), b.current().to_string(), "a test".into()] {
            assert!(error.contains(&word), "{error}");
        }
        assert_eq!(ring(B).with_opening_keys(ring(A)).ids(), both.ids());
        assert_eq!(ring(&format!("{B},{A}")).ids(), both.ids());
        assert_ne!(a.name_of("x"), b.name_of("x"));
    }

    #[test]
    fn text_that_holds_no_key_is_refused_without_being_shown() {
        for text in [
            "",
            "# only a comment",
            "hunter2",
            "AAAA",
            &format!("{A}\nhunter2"),
        ] {
            let error = Keyring::parse(text, "the file").unwrap_err().to_string();
            assert!(error.starts_with("the file: "), "{error}");
            assert!(error.contains("openssl rand"), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
