//! Authorization of publish requests: access keys, signed tokens, bearer tokens.

use crate::error::PublishError;
use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use percent_encoding::percent_decode_str;
use postrider_core::ids::Secret;
use postrider_core::time::Timestamp;
use ring::hmac;
use std::borrow::Cow;
use std::hint::black_box;

/// The credentials of a request as they were sent; none if absent.
#[derive(Clone, Copy, Default)]
pub struct PresentedCredentials<'a> {
    /// Header `aeg-sas-key`.
    pub key: Option<&'a str>,
    /// Header `aeg-sas-token`.
    pub token: Option<&'a str>,
    /// Header `Authorization`.
    pub authorization: Option<&'a str>,
    /// Query parameter `aeg-sas-key`, still percent-encoded.
    pub query_key: Option<&'a str>,
}

impl PresentedCredentials<'_> {
    /// Whether the request uses a key or a signature made with one, and no bearer token.
    pub fn is_key_or_signature(&self) -> bool {
        self.key.is_some()
            || self.token.is_some()
            || match self.authorization {
                Some(authorization) => shared_signature(authorization).is_some(),
                None => self.query_key.is_some(),
            }
    }
}

/// The token of `Authorization: SharedAccessSignature …`.
fn shared_signature(authorization: &str) -> Option<&str> {
    let (scheme, token) = authorization.trim().split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("SharedAccessSignature")
        .then_some(token)
}

/// Credentials that a topic accepts.
#[derive(Clone, Copy)]
pub struct TopicCredentials<'a> {
    /// An empty one is no key.
    pub keys: [&'a Secret; 2],
    /// Whether keys and signatures are refused, so that only bearer tokens are accepted.
    pub local_auth_disabled: bool,
    /// The endpoint as the client addressed it: `scheme://host[:port]/path`, without a query.
    pub url_used: &'a str,
    /// Other URLs of the same endpoint, such as the public one behind a proxy.
    pub also_known_as: &'a [String],
    /// Host that refusals name, in upper case.
    pub host: &'a str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthorizedBy<'a> {
    /// By the access key with this number, 1 or 2.
    Key(u8),
    /// By a token signed with one of the keys.
    SasToken,
    /// Not decided: the caller has to check this bearer token.
    Bearer(&'a str),
}

/// A new access key: 32 bytes from the system's generator, in base64.
pub fn fresh_key() -> Secret {
    use ring::rand::SecureRandom;
    let mut bytes = [0; 32];
    ring::rand::SystemRandom::new()
        .fill(&mut bytes)
        .expect("the system has a source of randomness");
    Secret::new(base64::prelude::BASE64_STANDARD.encode(bytes))
}

/// Decides by the first credential that is present, in this order: `aeg-sas-key`, `aeg-sas-token`,
/// `Authorization`, the key in the query. If it is wrong, later ones are not tried.
pub fn authorize<'a>(
    presented: &PresentedCredentials<'a>,
    guard: &TopicCredentials<'_>,
    now: Timestamp,
) -> Result<AuthorizedBy<'a>, PublishError> {
    if let Some(key) = presented.key {
        return guard.check_key(key);
    }
    if let Some(token) = presented.token {
        return guard.check_token(token, now);
    }
    if let Some(authorization) = presented.authorization {
        let (scheme, credential) = authorization
            .trim()
            .split_once(' ')
            .ok_or_else(PublishError::scheme_unsupported)?;
        return if scheme.eq_ignore_ascii_case("SharedAccessSignature") {
            guard.check_token(credential, now)
        } else if scheme.eq_ignore_ascii_case("Bearer") {
            Ok(AuthorizedBy::Bearer(credential.trim()))
        } else {
            Err(PublishError::scheme_unsupported())
        };
    }
    if let Some(key) = presented.query_key {
        // A bare '+' is kept: keys are base64, and no key contains a space.
        return guard.check_key(&percent_decode_str(key).decode_utf8_lossy());
    }
    Err(PublishError::credential_missing())
}

/// The edge module has a single pair of keys and accepts only the header.
pub fn edge_authorize(
    presented: &PresentedCredentials<'_>,
    keys: [&Secret; 2],
) -> Result<AuthorizedBy<'static>, PublishError> {
    presented
        .key
        .and_then(|key| key_number(keys, key))
        .map(AuthorizedBy::Key)
        .ok_or_else(PublishError::edge_unauthorized)
}

impl TopicCredentials<'_> {
    /// Whether the decisive credential is a key that the topic does not have, or is signed with
    /// such a key: a guess, as opposed to a token that has expired or was made for another
    /// resource.
    pub fn is_unknown(&self, presented: &PresentedCredentials<'_>) -> bool {
        let is_wrong_key = |key: &str| !key.is_empty() && key_number(self.keys, key).is_none();
        let is_wrong_token = |token: &str| match SasToken::parse(token.trim()) {
            Some(token) => !self.keys.iter().any(|key| token.is_signed_with(key)),
            None => !token.trim().is_empty(),
        };
        if let Some(key) = presented.key {
            return is_wrong_key(key);
        }
        let signed = presented
            .token
            .or_else(|| presented.authorization.and_then(shared_signature));
        match (signed, presented.authorization, presented.query_key) {
            (Some(token), ..) => is_wrong_token(token),
            (None, None, Some(key)) => is_wrong_key(&percent_decode_str(key).decode_utf8_lossy()),
            _ => false,
        }
    }

    fn check_key(&self, key: &str) -> Result<AuthorizedBy<'static>, PublishError> {
        if key.is_empty() {
            return Err(PublishError::credential_empty("aeg-sas-key"));
        }
        self.check_local_auth()?;
        match key_number(self.keys, key) {
            Some(number) => Ok(AuthorizedBy::Key(number)),
            None => Err(PublishError::key_unauthorized(self.host, None)),
        }
    }

    fn check_token(&self, token: &str, now: Timestamp) -> Result<AuthorizedBy<'static>, PublishError> {
        let token = token.trim();
        if token.is_empty() {
            return Err(PublishError::credential_empty("aeg-sas-token"));
        }
        self.check_local_auth()?;
        let refuse = |reason| PublishError::key_unauthorized(self.host, Some(reason));
        let token =
            SasToken::parse(token).ok_or_else(|| refuse("The token is not of the form r=...&e=...&s=..."))?;
        // The signature is checked first: without the key, a client learns nothing about the rest.
        if !self.keys.iter().any(|key| token.is_signed_with(key)) {
            return Err(refuse("The signature of the token does not match"));
        }
        let expiry = expiry(token.expiry).ok_or_else(|| refuse("The expiry of the token is not a time"))?;
        if expiry <= now {
            return Err(refuse("The token has expired"));
        }
        let resource = percent_decode_str(token.resource).decode_utf8_lossy();
        let mut urls = std::iter::once(self.url_used).chain(self.also_known_as.iter().map(String::as_str));
        if !urls.any(|url| covers(&resource, url)) {
            return Err(refuse("The token was made for another resource"));
        }
        Ok(AuthorizedBy::SasToken)
    }

    fn check_local_auth(&self) -> Result<(), PublishError> {
        match self.local_auth_disabled {
            true => Err(PublishError::key_unauthorized(
                self.host,
                Some("Local authentication is disabled"),
            )),
            false => Ok(()),
        }
    }
}

/// The number of the matching key. The duration does not depend on which one matches.
fn key_number(keys: [&Secret; 2], presented: &str) -> Option<u8> {
    let [first, second] = keys.map(|key| !key.expose().is_empty() & same(key.expose(), presented));
    match (first, second) {
        (true, _) => Some(1),
        (_, true) => Some(2),
        _ => None,
    }
}

/// Compares in a time that does not depend on where the texts differ. Lengths are not secret.
fn same(a: &str, b: &str) -> bool {
    let difference = a
        .bytes()
        .zip(b.bytes())
        .fold(0, |acc, (a, b)| black_box(acc | (a ^ b)));
    a.len() == b.len() && difference == 0
}

/// The parts of a shared access signature, each as it was received.
struct SasToken<'a> {
    signed: &'a str,
    resource: &'a str,
    expiry: &'a str,
    signature: &'a str,
}

impl<'a> SasToken<'a> {
    fn parse(token: &'a str) -> Option<SasToken<'a>> {
        let (signed, signature) = token.rsplit_once("&s=")?;
        let (resource, expiry) = signed.strip_prefix("r=")?.split_once("&e=")?;
        Some(SasToken {
            signed,
            resource,
            expiry,
            signature,
        })
    }

    /// The signature is computed over the text as received, because each language escapes it
    /// differently.
    fn is_signed_with(&self, key: &Secret) -> bool {
        if key.expose().is_empty() {
            return false;
        }
        let (Ok(key), Ok(signature)) = (
            BASE64.decode(key.expose()),
            BASE64.decode(Cow::from(percent_decode_str(self.signature)).as_ref()),
        ) else {
            return false;
        };
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        hmac::verify(&key, self.signed.as_bytes(), &signature).is_ok()
    }
}

/// Standard base64, with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Parses a token's expiry, as UTC unless it has an offset.
fn expiry(encoded: &str) -> Option<Timestamp> {
    let read = |encoded: &str| {
        let text = percent_decode_str(encoded).decode_utf8().ok()?;
        let text = match text.contains('/') {
            true => iso_from_us(&text)?,
            false => text.into_owned(),
        };
        Timestamp::parse(&text).or_else(|| {
            // "Never" is often written as the year 9999, which exceeds the range of a timestamp.
            let year: u16 = text.get(..4)?.parse().ok()?;
            let as_if_earlier = format!("2240{}", &text[4..]);
            (year > 2261 && Timestamp::parse(&as_if_earlier).is_some()).then_some(Timestamp::MAX)
        })
    };
    // '+' stands for a space, or for itself before an offset that was not encoded.
    read(&encoded.replace('+', " ")).or_else(|| read(encoded))
}

/// Parses `6/15/2030 6:20:15 PM`, which .NET and JavaScript write, optionally followed by an
/// offset.
fn iso_from_us(text: &str) -> Option<String> {
    // Also splits at U+202F, which newer .NET versions write before AM and PM.
    let mut words = text.split_whitespace().peekable();
    let mut date = words.next()?.split('/').map(|n| n.parse::<u16>().ok());
    let (month, day, year) = (date.next()??, date.next()??, date.next()??);
    let mut time = words.next()?.split(':').map(|n| n.parse::<u8>().ok());
    let (mut hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    if let Some(half) = words.next_if(|word| !word.starts_with(['+', '-'])) {
        if !(1..=12).contains(&hour) {
            return None;
        }
        hour %= 12;
        if half.eq_ignore_ascii_case("PM") {
            hour += 12;
        } else if !half.eq_ignore_ascii_case("AM") {
            return None;
        }
    }
    let offset = words.next().unwrap_or("Z");
    if date.next().is_some() || time.next().is_some() || words.next().is_some() {
        return None;
    }
    Some(format!(
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{offset}"
    ))
}

/// Whether a token made for `resource` is valid for `url`: the same scheme, host and port, and the
/// same path or one above it. Queries and case are ignored.
fn covers(resource: &str, url: &str) -> bool {
    let (Some(resource), Some(url)) = (TokenScopeUrl::parse(resource), TokenScopeUrl::parse(url)) else {
        return false;
    };
    let path = resource.path.trim_end_matches('/');
    let rest = url.path.get(path.len()..);
    url.scheme.eq_ignore_ascii_case(resource.scheme)
        && url.authority.eq_ignore_ascii_case(resource.authority)
        && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        && url.path[..path.len()].eq_ignore_ascii_case(path)
}

/// A URL without its query; the port is empty if the scheme implies it.
struct TokenScopeUrl<'a> {
    scheme: &'a str,
    authority: &'a str,
    path: &'a str,
}

impl<'a> TokenScopeUrl<'a> {
    fn parse(url: &'a str) -> Option<TokenScopeUrl<'a>> {
        let (scheme, rest) = url.split_once("://")?;
        let rest = rest.split(['?', '#']).next()?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let port = match scheme.to_ascii_lowercase().as_str() {
            "https" => ":443",
            "http" => ":80",
            _ => return None,
        };
        let authority = authority.strip_suffix(port).unwrap_or(authority);
        (!authority.is_empty()).then_some(TokenScopeUrl {
            scheme,
            authority,
            path,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const URL: &str = "https://mytopic.westus2-1.eventgrid.azure.net/api/events";
    const DOTNET: &str = "r=https%3a%2f%2fmytopic.westus2-1.eventgrid.azure.net%2fapi%2fevents&e=6%2f15%2f2030+6%3a20%3a15+PM&s=e2%2fsSn5K3wjyGEwQZN66HT3DYvAdE0%2fob2PBQzaIoKo%3d";
    const PYTHON: &str = "r=https%3A%2F%2Fmytopic.westus2-1.eventgrid.azure.net%2Fapi%2Fevents&e=2030-06-15T18%3A20%3A15&s=NNbIJScw0XHBS2%2B%2Fc7arHJ563XR%2BhvhtwOmivSjWI2o%3D";

    fn at(text: &str) -> Timestamp {
        Timestamp::parse(text).unwrap()
    }

    fn guard<'a>(first: &'a Secret, second: &'a Secret) -> TopicCredentials<'a> {
        TopicCredentials {
            keys: [first, second],
            local_auth_disabled: false,
            url_used: URL,
            also_known_as: &[],
            host: "mytopic.local",
        }
    }

    /// A token with these parts, unescaped, signed with `KEY`.
    fn sign(resource: &str, expiry: &str) -> String {
        let signed = format!("r={resource}&e={expiry}");
        let key = hmac::Key::new(hmac::HMAC_SHA256, &BASE64.decode(KEY).unwrap());
        let signature = BASE64.encode(hmac::sign(&key, signed.as_bytes()));
        let signature = signature
            .replace('+', "%2B")
            .replace('/', "%2F")
            .replace('=', "%3D");
        format!("{signed}&s={signature}")
    }

    fn not_authorized(reason: &str) -> String {
        match reason {
            "" => "The request authorization key is not authorized for MYTOPIC.LOCAL.".to_string(),
            reason => format!(
                "The request authorization key is not authorized for MYTOPIC.LOCAL. This is due to the reason: {reason}."
            ),
        }
    }

    /// The accepted credential, or a status, a detail code and the message.
    type Expected<'a> = Result<AuthorizedBy<'a>, (u16, &'a str, &'a str)>;

    #[test]
    fn the_first_credential_decides() {
        let (first, second) = (Secret::new(KEY), Secret::new("c2Vjb25k+/8="));
        let mut guard = guard(&first, &second);
        let now = at("2030-01-01T00:00:00Z");
        let shared = format!("SharedAccessSignature {PYTHON}");
        let p = |key, token, authorization, query_key| PresentedCredentials {
            key,
            token,
            authorization,
            query_key,
        };
        let check =
            |guard: &TopicCredentials<'_>, presented: PresentedCredentials<'_>, expected: Expected<'_>| {
                let found = authorize(&presented, guard, now);
                let found = found
                    .as_ref()
                    .map_err(|e| (e.status, e.detail, e.message.as_str()));
                assert_eq!(found.copied(), expected);
            };
        fn unauthorized(message: &str) -> Expected<'_> {
            Err((401, "Unauthorized", message))
        }
        let wrong = not_authorized("");

        check(&guard, p(Some(KEY), None, None, None), Ok(AuthorizedBy::Key(1)));
        check(
            &guard,
            p(Some("c2Vjb25k+/8="), None, None, None),
            Ok(AuthorizedBy::Key(2)),
        );
        check(
            &guard,
            p(None, Some(DOTNET), None, None),
            Ok(AuthorizedBy::SasToken),
        );
        check(
            &guard,
            p(None, Some(PYTHON), None, None),
            Ok(AuthorizedBy::SasToken),
        );
        check(
            &guard,
            p(None, None, Some(&shared), None),
            Ok(AuthorizedBy::SasToken),
        );
        check(
            &guard,
            p(None, None, Some("bearer  a.b.c"), None),
            Ok(AuthorizedBy::Bearer("a.b.c")),
        );
        check(
            &guard,
            p(None, None, None, Some("c2Vjb25k%2B%2f8%3D")),
            Ok(AuthorizedBy::Key(2)),
        );
        check(
            &guard,
            p(None, None, None, Some("c2Vjb25k+/8=")),
            Ok(AuthorizedBy::Key(2)),
        );

        // A valid credential of lower precedence does not help.
        check(
            &guard,
            p(Some("AAAA"), Some(PYTHON), None, None),
            unauthorized(&wrong),
        );
        check(
            &guard,
            p(None, Some("r=&e=&s="), Some("Bearer x"), Some(KEY)),
            unauthorized(&not_authorized("The signature of the token does not match")),
        );
        check(
            &guard,
            p(None, None, Some("Basic eDp5"), Some(KEY)),
            unauthorized(&PublishError::scheme_unsupported().message),
        );
        check(
            &guard,
            p(None, None, Some("Bearer"), None),
            unauthorized(&PublishError::scheme_unsupported().message),
        );
        check(&guard, p(None, None, None, Some("AAAA")), unauthorized(&wrong));
        check(
            &guard,
            p(None, None, None, None),
            unauthorized(
                "Request must contain one of the following authorization signature: aeg-sas-token, aeg-sas-key.",
            ),
        );
        let empty = Err((401, "Unauthorized", "Request must have a value for aeg-sas-key."));
        check(&guard, p(Some(""), None, None, None), empty);
        check(&guard, p(None, None, None, Some("")), empty);
        check(
            &guard,
            p(None, Some(" "), None, None),
            Err((
                401,
                "Unauthorized",
                "Request must have a value for aeg-sas-token.",
            )),
        );

        guard.local_auth_disabled = true;
        let disabled = not_authorized("Local authentication is disabled");
        check(&guard, p(Some(KEY), None, None, None), unauthorized(&disabled));
        check(&guard, p(None, Some(PYTHON), None, None), unauthorized(&disabled));
        check(
            &guard,
            p(None, None, Some("Bearer t"), None),
            Ok(AuthorizedBy::Bearer("t")),
        );
    }

    #[test]
    fn an_unset_key_opens_nothing() {
        let (first, second) = (Secret::default(), Secret::new(KEY));
        let now = at("2030-01-01T00:00:00Z");
        let token = PresentedCredentials {
            token: Some(PYTHON),
            ..PresentedCredentials::default()
        };
        assert_eq!(
            authorize(&token, &guard(&first, &second), now),
            Ok(AuthorizedBy::SasToken)
        );
        assert!(authorize(&token, &guard(&first, &first), now).is_err());
        // An HMAC with an empty key can be computed by anyone.
        let signed = "r=https%3A%2F%2Fmytopic.westus2-1.eventgrid.azure.net&e=2030-06-15";
        let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, b""), signed.as_bytes());
        let forged = format!("{signed}&s={}", BASE64.encode(signature));
        let forged = PresentedCredentials {
            token: Some(&forged),
            ..PresentedCredentials::default()
        };
        assert!(authorize(&forged, &guard(&first, &first), now).is_err());
        let empty = PresentedCredentials {
            key: Some(""),
            ..PresentedCredentials::default()
        };
        assert!(edge_authorize(&empty, [&first, &first]).is_err());
    }

    #[test]
    fn tokens_made_by_the_real_clients_open_the_topic_until_they_expire() {
        let vectors = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/data/wire/sas-token-vectors.json"
        ));
        let vectors: Vec<Value> = serde_json::from_str(vectors).unwrap();
        assert_eq!(vectors.len(), 7);
        for vector in vectors {
            let text = |name: &str| vector[name].as_str().unwrap();
            let (other, key) = (Secret::new("b3RoZXI="), Secret::new(text("key")));
            let guard = TopicCredentials {
                url_used: text("endpoint"),
                ..guard(&other, &key)
            };
            let presented = PresentedCredentials {
                token: Some(text("token")),
                ..PresentedCredentials::default()
            };
            // The JavaScript client drops the milliseconds.
            let expiry = at(text("expiry"));
            let second = std::time::Duration::from_secs(1);
            assert_eq!(
                authorize(&presented, &guard, expiry - second),
                Ok(AuthorizedBy::SasToken),
                "{vector}"
            );
            let expired = authorize(&presented, &guard, expiry + second).unwrap_err();
            assert_eq!(expired.message, not_authorized("The token has expired"));

            for at in 0..text("token").len() {
                let mut bytes = text("token").as_bytes().to_vec();
                bytes[at] ^= 1;
                let damaged = String::from_utf8(bytes).unwrap();
                let presented = PresentedCredentials {
                    token: Some(&damaged),
                    ..PresentedCredentials::default()
                };
                let found = authorize(&presented, &guard, expiry - second);
                // Base64 has spare bits in its last character, and %2B equals %2b.
                let equivalent = SasToken::parse(&damaged).is_some_and(|t| t.is_signed_with(&key));
                assert_eq!(found.is_ok(), equivalent, "{damaged}");
                assert!(at >= text("token").find("&s=").unwrap() || found.is_err());
            }
        }
    }

    #[test]
    fn expiry_is_read_as_every_language_writes_it() {
        let check = |encoded: &str, expected: Option<&str>| {
            assert_eq!(expiry(encoded), expected.map(at), "{encoded}");
        };
        check("6%2f15%2f2030+6%3a20%3a15+PM", Some("2030-06-15T18:20:15Z"));
        check("6%2F15%2F2030%206%3A20%3A15%20PM", Some("2030-06-15T18:20:15Z"));
        check(
            "6%2F15%2F2030%206%3A20%3A15%20PM%20%2B00%3A00",
            Some("2030-06-15T18:20:15Z"),
        );
        check(
            "6%2F15%2F2030%206%3A20%3A15%20PM%20%2B02%3A00",
            Some("2030-06-15T16:20:15Z"),
        );
        check(
            "6%2F15%2F2030%206%3A20%3A15%E2%80%AFPM",
            Some("2030-06-15T18:20:15Z"),
        );
        check("1%2F2%2F2030%2012%3A00%3A00%20AM", Some("2030-01-02T00:00:00Z"));
        check("1%2F2%2F2030%2012%3A00%3A00%20PM", Some("2030-01-02T12:00:00Z"));
        check("06/15/2030 18:20:15", Some("2030-06-15T18:20:15Z"));
        check("06/15/2030 18:20:15 +00:00", Some("2030-06-15T18:20:15Z"));
        check("2030-06-15T18%3A20%3A15", Some("2030-06-15T18:20:15Z"));
        check("2030-06-15T18%3A20%3A15Z", Some("2030-06-15T18:20:15Z"));
        check(
            "2030-06-15T18%3A20%3A15.1234567Z",
            Some("2030-06-15T18:20:15.1234567Z"),
        );
        check("2030-06-15T18:20:15+00:00", Some("2030-06-15T18:20:15Z"));
        check(
            "2030-06-15+18%3A20%3A15.5%2B00%3A00",
            Some("2030-06-15T18:20:15.5Z"),
        );
        check(
            "2030-06-15%2018%3A20%3A15%20%2B00%3A00",
            Some("2030-06-15T18:20:15Z"),
        );
        assert_eq!(expiry("12/31/9999 11:59:59 PM"), Some(Timestamp::MAX));
        assert_eq!(expiry("9999-12-31T23:59:59.9999999Z"), Some(Timestamp::MAX));
        for bad in [
            "",
            "soon",
            "6/15/2030",
            "13/1/2030 1:00:00 PM",
            "6/15/2030 13:00:00 PM",
            "6/15/2030 0:00:00 AM",
            "6/15/2030 1:00:00 XM",
            "6/15/2030 1:00:00 PM x",
            "6/15/2030 1:00:00 PM +00:00 x",
            "6/15/2030/1 1:00:00 PM",
            "9999-13-01T00:00:00Z",
            "99999",
            "é/é/é é:é:é",
            "%ff",
            "ééé",
        ] {
            check(bad, None);
        }
    }

    #[test]
    fn a_token_opens_its_resource_and_what_lies_below() {
        let check = |resource: &str, url: &str, expected: bool| {
            assert_eq!(covers(resource, url), expected, "{resource} for {url}");
        };
        let url = "https://h:8443/topics/t1/api/events";
        check("https://h:8443/topics/t1/api/events", url, true);
        check("https://H:8443/Topics/t1/api/events/", url, true);
        check(
            "https://h:8443/topics/t1/api/events?apiVersion=2018-01-01",
            url,
            true,
        );
        check("https://h:8443/topics/t1?api-version=x#y", url, true);
        check("https://h:8443/", url, true);
        check("https://h:8443", url, true);
        check("https://h:443/a", "https://h/a", true);
        check("http://h/a", "http://h:80/a", true);
        check("https://h:8443/topics/t", url, false);
        check("https://h:8443/topics/t1/api/events/more", url, false);
        check("https://h:8443/topics/t2/api/events", url, false);
        check("http://h:8443/topics/t1/api/events", url, false);
        check("https://h/topics/t1/api/events", url, false);
        check("https://h:84", url, false);
        check("https://h:8443/topics/é", "https://h:8443/topics/ab", false);
        for bad in [
            "",
            "https:",
            "https://",
            "https:///",
            "ftp://h:8443",
            "h:8443/topics/t1",
            "?",
            "/",
        ] {
            check(bad, url, false);
        }
    }

    #[test]
    fn a_token_may_name_any_address_of_the_endpoint() {
        let (first, second) = (Secret::new(KEY), Secret::default());
        let public = ["https://events.example.com/t1/api/events".to_string()];
        let now = at("2030-01-01T00:00:00Z");
        let guard = TopicCredentials {
            url_used: "http://10.0.0.7:8080/t1/api/events",
            also_known_as: &public,
            ..guard(&first, &second)
        };
        let check = |resource: &str, reason: Option<&str>| {
            let token = sign(resource, "2030-06-15T00:00:00Z");
            let presented = PresentedCredentials {
                token: Some(&token),
                ..PresentedCredentials::default()
            };
            let found = authorize(&presented, &guard, now);
            assert_eq!(
                found.err().map(|e| e.message),
                reason.map(not_authorized),
                "{resource}"
            );
        };
        check("https%3a%2f%2fevents.example.com%2ft1%2fapi%2fevents", None);
        check("http%3A%2F%2F10.0.0.7%3A8080%2Ft1%2Fapi%2Fevents", None);
        check("http://10.0.0.7:8080/t1/api/events", None);
        check(
            "https%3a%2f%2fevents.example.com%2ft2%2fapi%2fevents",
            Some("The token was made for another resource"),
        );
    }

    #[test]
    fn ill_formed_tokens_are_refused_with_a_reason() {
        let (first, second) = (Secret::new(KEY), Secret::new("not base64!"));
        let guard = guard(&first, &second);
        let check = |token: &str, reason: &str| {
            let presented = PresentedCredentials {
                token: Some(token),
                ..PresentedCredentials::default()
            };
            let error = authorize(&presented, &guard, at("2030-01-01T00:00:00Z")).unwrap_err();
            assert_eq!(error.message, not_authorized(reason), "{token}");
            assert_eq!((error.status, error.code), (401, "Unauthorized"));
        };
        for token in ["x", "r=a&e=b", "e=a&r=b&s=c", "&s=", "r=a&s=b"] {
            check(token, "The token is not of the form r=...&e=...&s=...");
        }
        check("r=a&e=b&s=c", "The signature of the token does not match");
        check("r=a&e=b&s=%zz", "The signature of the token does not match");
        check(&sign(URL, "whenever"), "The expiry of the token is not a time");
        check(&sign(URL, "2029-12-31T23:59:59Z"), "The token has expired");
        check(&sign(URL, "2030-01-01T00:00:00Z"), "The token has expired");
        check(
            &sign("https://x", "2030-02-01"),
            "The token was made for another resource",
        );
    }

    #[test]
    fn the_edge_compares_its_pair_of_keys() {
        let (first, second) = (Secret::new("one"), Secret::new("two"));
        let check = |key: Option<&str>, expected: Option<u8>| {
            let presented = PresentedCredentials {
                key,
                ..PresentedCredentials::default()
            };
            let found = edge_authorize(&presented, [&first, &second]);
            assert_eq!(
                found.as_ref().ok(),
                expected.map(AuthorizedBy::Key).as_ref(),
                "{key:?}"
            );
            if let Err(error) = found {
                assert_eq!((error.status, error.detail), (401, "UnAuthorized"));
            }
        };
        check(Some("one"), Some(1));
        check(Some("two"), Some(2));
        check(Some("on"), None);
        check(Some("one "), None);
        check(Some(""), None);
        check(None, None);
    }
}
