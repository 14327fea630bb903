//! JSON Web Tokens: this server's, signed with ES256, and those of other issuers, signed with ES256
//! or RS256.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use postrider_core::ids::Secret;
use postrider_core::time::Timestamp;
use ring::rand::SystemRandom;
use ring::signature::{self, EcdsaKeyPair, KeyPair, RsaPublicKeyComponents, UnparsedPublicKey};
use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Longer tokens are refused without being examined.
const TOKEN_BYTES_MAX: usize = 16 << 10;
/// Keys of a key set that are examined at most.
const KEYS_MAX: usize = 256;

/// The key that signs this server's tokens. Its `Debug` form reveals nothing.
#[derive(Clone)]
pub struct SigningKey(Arc<Inner>);

struct Inner {
    pair: EcdsaKeyPair,
    public: PublicKey,
    /// The thumbprint of RFC 7638: the same key has the same id after a restart.
    id: String,
    x: String,
    y: String,
    /// Digest of the private key, see [`SigningKey::derived_secret`].
    digest: Secret,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a private key for ES256 in PKCS #8: {0}")]
pub struct InvalidSigningKey(String);

impl SigningKey {
    /// A new random key. It is lost with the process; to store a key, use [`fresh_pkcs8`].
    pub fn fresh() -> SigningKey {
        SigningKey::from_pkcs8(&fresh_pkcs8()).expect("a key that was just made is one")
    }

    pub fn from_pkcs8(der: &[u8]) -> Result<SigningKey, InvalidSigningKey> {
        let algorithm = &signature::ECDSA_P256_SHA256_FIXED_SIGNING;
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, der, &SystemRandom::new())
            .map_err(|e| InvalidSigningKey(e.to_string()))?;
        let point = pair.public_key().as_ref().to_vec();
        // An uncompressed point: a marker byte, then both coordinates.
        let (x, y) = (BASE64.encode(&point[1..33]), BASE64.encode(&point[33..]));
        let canonical = format!(r#"{{"crv":"P-256","kty":"EC","x":"{x}","y":"{y}"}}"#);
        let id = BASE64.encode(ring::digest::digest(&ring::digest::SHA256, canonical.as_bytes()));
        let public = PublicKey::Es256(point);
        let mut digest = ring::digest::Context::new(&ring::digest::SHA256);
        digest.update(b"derived secrets");
        digest.update(der);
        Ok(SigningKey(Arc::new(Inner {
            pair,
            public,
            id,
            x,
            y,
            digest: Secret::new(BASE64.encode(digest.finish())),
        })))
    }

    /// A token with these claims.
    pub fn sign(&self, claims: &Value) -> String {
        let head = json!({"typ": "JWT", "alg": "ES256", "kid": self.0.id});
        let mut token = BASE64.encode(head.to_string());
        token.push('.');
        BASE64.encode_string(claims.to_string(), &mut token);
        let signature = self.0.pair.sign(&SystemRandom::new(), token.as_bytes());
        let signature = signature.expect("the system has a source of randomness");
        token.push('.');
        BASE64.encode_string(signature, &mut token);
        token
    }

    pub fn has_signed(&self, token: &Token<'_>) -> bool {
        token.key_id.as_deref() == Some(&self.0.id) && token.is_signed_by(&self.0.public)
    }

    /// A secret known only to holders of this private key, from which keys for other purposes are
    /// derived. Each private key has its own.
    pub fn derived_secret(&self) -> &Secret {
        &self.0.digest
    }

    /// Public keys with which others verify this server's tokens: a JSON Web Key Set.
    pub fn key_set(&self) -> Value {
        let Inner { id, x, y, .. } = &*self.0;
        json!({"keys": [{
            "kty": "EC", "use": "sig", "alg": "ES256", "kid": id, "crv": "P-256", "x": x, "y": y,
        }]})
    }
}

/// A new private key for ES256, in PKCS #8.
pub fn fresh_pkcs8() -> Vec<u8> {
    let algorithm = &signature::ECDSA_P256_SHA256_FIXED_SIGNING;
    let der = EcdsaKeyPair::generate_pkcs8(algorithm, &SystemRandom::new());
    der.expect("the system has a source of randomness")
        .as_ref()
        .to_vec()
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey")
    }
}

/// A key that verifies signatures. It is bound to one algorithm: a token cannot choose another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublicKey {
    /// The uncompressed point.
    Es256(Vec<u8>),
    Rs256 {
        modulus: Vec<u8>,
        exponent: Vec<u8>,
    },
}

/// The keys of an issuer, with their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeySet(Vec<(Option<String>, PublicKey)>);

impl KeySet {
    /// Parses a JSON Web Key Set. Keys for other algorithms and uses are left out.
    pub fn read(text: &[u8]) -> Result<KeySet, String> {
        let set: Value = serde_json::from_slice(text).map_err(|e| format!("not JSON: {e}"))?;
        let keys = set["keys"].as_array().ok_or("has no list of keys")?;
        let usable = |key: &Value| Some((key["kid"].as_str().map(str::to_owned), public_key(key)?));
        Ok(KeySet(keys.iter().take(KEYS_MAX).filter_map(usable).collect()))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn knows(&self, key_id: Option<&str>) -> bool {
        self.fitting(key_id).next().is_some()
    }

    pub fn has_signed(&self, token: &Token<'_>) -> bool {
        self.fitting(token.key_id.as_deref())
            .any(|key| token.is_signed_by(key))
    }

    /// The keys that may have signed a token. A token that names no key may be signed with any.
    fn fitting<'a>(&'a self, key_id: Option<&'a str>) -> impl Iterator<Item = &'a PublicKey> {
        let fits = move |id: &Option<String>| key_id.is_none() || id.as_deref() == key_id;
        self.0.iter().filter(move |(id, _)| fits(id)).map(|(_, key)| key)
    }
}

fn public_key(key: &Value) -> Option<PublicKey> {
    let text = |name: &str| key[name].as_str();
    if text("use").is_some_and(|purpose| purpose != "sig") {
        return None;
    }
    let number = |name: &str| BASE64.decode(text(name)?).ok();
    let for_algorithm = |name: &str| text("alg").is_none_or(|found| found == name);
    match text("kty")? {
        "EC" if text("crv") == Some("P-256") && for_algorithm("ES256") => {
            let (x, y) = (number("x")?, number("y")?);
            (x.len() == 32 && y.len() == 32).then(|| PublicKey::Es256([&[4], &*x, &*y].concat()))
        }
        "RSA" if for_algorithm("RS256") => Some(PublicKey::Rs256 {
            // ring refuses leading zeros, and some issuers write them.
            modulus: without_leading_zeros(number("n")?),
            exponent: without_leading_zeros(number("e")?),
        }),
        _ => None,
    }
}

fn without_leading_zeros(mut bytes: Vec<u8>) -> Vec<u8> {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    bytes.drain(..zeros);
    bytes
}

/// A parsed token. Its claims must not be trusted before its signature was checked.
#[derive(Clone, Debug)]
pub struct Token<'a> {
    signed: &'a str,
    signature: Vec<u8>,
    algorithm: String,
    pub key_id: Option<String>,
    pub claims: Value,
}

impl<'a> Token<'a> {
    /// None if the text is no signed token.
    pub fn parse(text: &'a str) -> Option<Token<'a>> {
        if text.len() > TOKEN_BYTES_MAX {
            return None;
        }
        let (signed, signature) = text.rsplit_once('.')?;
        let (head, claims) = signed.split_once('.')?;
        let read = |part: &str| serde_json::from_slice::<Value>(&BASE64.decode(part).ok()?).ok();
        let (head, claims) = (read(head)?, read(claims)?);
        // An extension that must be understood and is not (RFC 7515 §4.1.11) makes the token
        // invalid.
        if !claims.is_object() || head.get("crit").is_some() {
            return None;
        }
        Some(Token {
            signed,
            signature: BASE64.decode(signature).ok()?,
            algorithm: head["alg"].as_str()?.to_owned(),
            key_id: head["kid"].as_str().map(str::to_owned),
            claims,
        })
    }

    pub fn claim(&self, name: &str) -> Option<&str> {
        self.claims[name].as_str()
    }

    pub fn is_signed_by(&self, key: &PublicKey) -> bool {
        let (signed, signature) = (self.signed.as_bytes(), self.signature.as_slice());
        match key {
            PublicKey::Es256(point) => {
                self.algorithm == "ES256"
                    && UnparsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, point)
                        .verify(signed, signature)
                        .is_ok()
            }
            PublicKey::Rs256 { modulus, exponent } => {
                let key = RsaPublicKeyComponents {
                    n: modulus,
                    e: exponent,
                };
                self.algorithm == "RS256"
                    && key
                        .verify(&signature::RSA_PKCS1_2048_8192_SHA256, signed, signature)
                        .is_ok()
            }
        }
    }

    /// Whether the token is valid at `now`, with a tolerated clock difference of `leeway`. A token
    /// without an expiry is never valid.
    pub fn check_time(&self, now: Timestamp, leeway: Duration) -> Result<(), &'static str> {
        let at = |name: &str| match &self.claims[name] {
            Value::Null => Ok(None),
            // Some issuers write fractions of a second.
            value => match value.as_f64() {
                Some(seconds) if (0.0..9e9).contains(&seconds) => {
                    Ok(Some(Timestamp::from_secs(seconds as i64)))
                }
                _ => Err("the token's times are not numbers of seconds"),
            },
        };
        let ends = at("exp")?.ok_or("the token does not say when it expires")?;
        if ends + leeway <= now {
            return Err("the token has expired");
        }
        if at("nbf")?.is_some_and(|begins| begins > now + leeway) {
            return Err("the token is not valid yet");
        }
        Ok(())
    }

    /// Whether the token was made for this audience; a token may name several.
    pub fn is_for(&self, audience: &str) -> bool {
        match &self.claims["aud"] {
            Value::String(one) => one == audience,
            Value::Array(several) => several.iter().any(|one| one == audience),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> SigningKey {
        SigningKey::fresh()
    }

    fn set(keys: Value) -> KeySet {
        KeySet::read(keys.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn what_was_signed_is_known_again_by_the_key_and_by_its_public_half() {
        let (ours, other) = (key(), key());
        let text = ours.sign(&json!({"sub": "é", "n": 1}));
        let token = Token::parse(&text).unwrap();
        assert_eq!(token.claims, json!({"sub": "é", "n": 1}));
        assert!(ours.has_signed(&token));
        assert!(!other.has_signed(&token));
        let published = set(ours.key_set());
        assert!(published.has_signed(&token));
        assert!(published.knows(token.key_id.as_deref()) && published.knows(None));
        assert!(!published.knows(Some("x")));
        assert!(!set(other.key_set()).has_signed(&token));
        assert_eq!(format!("{ours:?}"), "SigningKey");
    }

    #[test]
    fn a_token_with_any_byte_changed_is_not_signed() {
        let ours = key();
        let text = ours.sign(&json!({"sub": "client"}));
        let bytes = |text: &str| BASE64.decode(text.rsplit('.').next().unwrap()).unwrap();
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            let signed = Token::parse(&changed).is_some_and(|token| ours.has_signed(&token));
            assert!(
                !signed || bytes(&changed) == bytes(&text),
                "{at}: {changed} for {text}"
            );
        }
    }

    #[test]
    fn the_key_decides_the_algorithm_and_not_the_token() {
        let ours = key();
        let point = match &ours.0.public {
            PublicKey::Es256(point) => point.clone(),
            PublicKey::Rs256 { .. } => unreachable!("ours are ES256"),
        };
        let claims = BASE64.encode(r#"{"sub":"x"}"#);
        for algorithm in ["none", "HS256", "RS256", "es256"] {
            let head = BASE64.encode(json!({"alg": algorithm, "kid": ours.0.id}).to_string());
            let signed = format!("{head}.{claims}");
            // An attack on servers that use the public key as a shared secret.
            let mac = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &point);
            let mac = BASE64.encode(ring::hmac::sign(&mac, signed.as_bytes()));
            let real = ours.0.pair.sign(&SystemRandom::new(), signed.as_bytes()).unwrap();
            for signature in [String::new(), mac, BASE64.encode(real)] {
                let text = format!("{signed}.{signature}");
                let token = Token::parse(&text).unwrap();
                assert!(!ours.has_signed(&token), "{algorithm}");
                assert!(!set(ours.key_set()).has_signed(&token), "{algorithm}");
            }
        }
    }

    #[test]
    fn what_is_no_token_is_none() {
        let ours = key();
        let crit = format!(
            "{}.{}.AA",
            BASE64.encode(r#"{"alg":"ES256","crit":["b64"]}"#),
            BASE64.encode("{}")
        );
        let long = ours.sign(&json!({"x": "y".repeat(TOKEN_BYTES_MAX)}));
        for bad in ["", ".", "..", "a.b.c", "e30.e30.", "bnVsbA.e30.AA", &crit, &long] {
            assert!(Token::parse(bad).is_none(), "{bad}");
        }
        let head = BASE64.encode(r#"{"alg":"ES256"}"#);
        assert!(Token::parse(&format!("{head}.{}.AA", BASE64.encode("[]"))).is_none());
        assert!(Token::parse(&format!("{head}.{}.AA", BASE64.encode("{}"))).is_some());
    }

    #[test]
    fn a_token_holds_from_its_beginning_to_its_end_give_or_take() {
        let now = Timestamp::from_secs(1_800_000_000);
        let leeway = Duration::from_secs(120);
        let check = |claims: Value, expected: Result<(), &'static str>| {
            let token = Token {
                signed: "",
                signature: Vec::new(),
                algorithm: String::new(),
                key_id: None,
                claims: claims.clone(),
            };
            assert_eq!(token.check_time(now, leeway), expected, "{claims}");
        };
        let at = |seconds: i64| 1_800_000_000 + seconds;
        check(json!({"exp": at(1)}), Ok(()));
        check(json!({"exp": at(-119), "nbf": at(120)}), Ok(()));
        check(json!({"exp": at(-120)}), Err("the token has expired"));
        check(
            json!({"exp": at(9), "nbf": at(121)}),
            Err("the token is not valid yet"),
        );
        check(json!({"exp": 1_800_000_000.5}), Ok(()));
        check(json!({}), Err("the token does not say when it expires"));
        for bad in [json!("soon"), json!(-1), json!(1e300), json!([])] {
            check(
                json!({"exp": bad}),
                Err("the token's times are not numbers of seconds"),
            );
        }
    }

    #[test]
    fn rs256_is_checked_and_unusable_keys_are_left_out() {
        // RFC 7515 appendix A.2.
        let n = "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZS-pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ";
        let text = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ.cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W2Fp5jujGbds9uJdbF9CUAr7t1dnZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkSjtQBMHlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12jzDwusC-eOkHWEsqtFZESc6BfI7noOPqvhJ1phCnvWh6IeYI2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUPQGe77Rw";
        let token = Token::parse(text).unwrap();
        assert_eq!(token.claim("iss"), Some("joe"));
        let rsa = json!({"kty": "RSA", "n": n, "e": "AQAB", "kid": "a"});
        assert!(
            set(json!({"keys": [rsa]})).has_signed(&token),
            "without a kid any key may be it"
        );
        let padded = BASE64.encode([&[0], &*BASE64.decode(n).unwrap()].concat());
        let padded = json!({"kty": "RSA", "n": padded, "e": "AAEAAQ"});
        assert!(set(json!({"keys": [padded]})).has_signed(&token));

        let ours = key();
        let mut keys = ours.key_set()["keys"].as_array().unwrap().clone();
        keys.push(json!({"kty": "RSA", "n": n, "e": "AQAB", "use": "enc"}));
        keys.push(json!({"kty": "RSA", "n": n, "e": "AQAB", "alg": "RS512"}));
        keys.push(json!({"kty": "oct", "k": "AA"}));
        keys.push(json!({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}));
        keys.push(json!({"kty": "EC", "crv": "P-384", "x": "AA", "y": "AA"}));
        keys.push(json!(3));
        let found = set(json!({"keys": keys}));
        assert_eq!(found.0.len(), 1);
        assert!(!found.has_signed(&token));
        assert!(set(json!({"keys": []})).is_empty());
        assert!(KeySet::read(b"{}").is_err() && KeySet::read(b"<html>").is_err());
    }

    #[test]
    fn a_token_is_for_its_audience() {
        let check = |aud: Value, expected: bool| {
            let key = key();
            let text = key.sign(&json!({"aud": aud}));
            assert_eq!(
                Token::parse(&text).unwrap().is_for("api://grid"),
                expected,
                "{aud}"
            );
        };
        check(json!("api://grid"), true);
        check(json!(["x", "api://grid"]), true);
        check(json!("api://grid/"), false);
        check(json!(["x"]), false);
        check(json!(null), false);
    }
}
