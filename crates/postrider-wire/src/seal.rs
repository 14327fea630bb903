//! Signed text that clients carry for the server: they can read it but not change it.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use postrider_core::ids::Secret;
use ring::hmac;

/// Longer text is refused without being examined.
const SEALED_BYTES_MAX: usize = 4 << 10;

/// A key that text is sealed with. Its `Debug` form reveals nothing.
#[derive(Clone)]
pub struct Seal(hmac::Key);

impl Seal {
    /// Derives a key from the secret. `purpose` keeps text that is sealed for one purpose from
    /// being accepted for another.
    pub fn new(secret: &Secret, purpose: &str) -> Seal {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret.expose().as_bytes());
        let derived = hmac::sign(&key, purpose.as_bytes());
        Seal(hmac::Key::new(hmac::HMAC_SHA256, derived.as_ref()))
    }

    /// The text with a signature, readable for everyone, in characters that are valid in a cookie
    /// or a URL.
    pub fn close(&self, text: &str) -> Secret {
        let body = BASE64.encode(text);
        let signature = BASE64.encode(hmac::sign(&self.0, body.as_bytes()));
        Secret::new(format!("{body}.{signature}"))
    }

    /// Returns the sealed text; none if it was not sealed with this key.
    pub fn open(&self, sealed: &str) -> Option<String> {
        if sealed.len() > SEALED_BYTES_MAX {
            return None;
        }
        let (body, signature) = sealed.split_once('.')?;
        let signature = BASE64.decode(signature).ok()?;
        hmac::verify(&self.0, body.as_bytes(), &signature).ok()?;
        String::from_utf8(BASE64.decode(body).ok()?).ok()
    }
}

/// Identifies a secret without storing it: the secret cannot be recovered from the fingerprint.
pub fn fingerprint(secret: &str) -> String {
    BASE64.encode(ring::digest::digest(&ring::digest::SHA256, secret.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_sealed_is_opened() {
        let secret = Secret::new("s");
        let seal = Seal::new(&secret, "a");
        let sealed = seal.close("text");
        let sealed = sealed.expose();
        assert_eq!(seal.open(sealed).as_deref(), Some("text"));
        assert_eq!(Seal::new(&secret, "a").open(sealed).as_deref(), Some("text"));
        assert_eq!(Seal::new(&secret, "b").open(sealed), None);
        assert_eq!(Seal::new(&Secret::new("t"), "a").open(sealed), None);
        for at in 0..sealed.len() {
            let mut changed = sealed.as_bytes().to_vec();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(seal.open(&changed), None, "{changed}");
        }
        for wrong in ["", ".", "a.b", "text", &"x".repeat(SEALED_BYTES_MAX + 1)] {
            assert_eq!(seal.open(wrong), None, "{wrong}");
        }
    }
}
