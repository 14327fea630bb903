//! Names of operations that finished before they were answered. Nothing is stored about them: a
//! name proves by itself that this server issued it, also after a restart.

use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

/// A new name: a GUID in lower case, half random, half a signature of the random half.
pub fn fresh_operation(key: &[u8]) -> String {
    let mut chance = [0; 8];
    SystemRandom::new()
        .fill(&mut chance)
        .expect("the system has a source of randomness");
    named(key, chance)
}

/// Whether a name, in any casing, was issued with this key.
pub fn is_operation(key: &[u8], name: &str) -> bool {
    let digits: String = name.chars().filter(|c| *c != '-').collect();
    let chance: Option<Vec<u8>> = (0..8)
        .map(|at| u8::from_str_radix(digits.get(at * 2..at * 2 + 2)?, 16).ok())
        .collect();
    let chance: Option<[u8; 8]> = chance.and_then(|bytes| bytes.try_into().ok());
    chance.is_some_and(|chance| named(key, chance).eq_ignore_ascii_case(name))
}

/// A GUID that is the same for the same text, and that cannot be guessed or told from a random one
/// without the key.
pub fn stable_guid(key: &[u8], text: &str) -> String {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&tag.as_ref()[..16]);
    guid(bytes)
}

fn named(key: &[u8], chance: [u8; 8]) -> String {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&chance);
    bytes[6] = bytes[6] & 0x0f | 0x40;
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), &bytes[..8]);
    bytes[8..].copy_from_slice(&tag.as_ref()[..8]);
    guid(bytes)
}

/// Formats a GUID, marked as random (version 4), because some clients check that.
fn guid(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_were_given_out_are_known() {
        let name = fresh_operation(b"key");
        assert_eq!(name.len(), 36);
        assert!(is_operation(b"key", &name), "{name}");
        assert!(is_operation(b"key", &name.to_uppercase()));
        assert!(!is_operation(b"another", &name));
        assert_ne!(name, fresh_operation(b"key"));
        let mut other = name.clone().into_bytes();
        other[35] = if other[35] == b'0' { b'1' } else { b'0' };
        assert!(!is_operation(b"key", std::str::from_utf8(&other).unwrap()));
        for wrong in [
            "",
            "x",
            "39fd9d60-f5b7-4a29-88f1-2f09348c1da6",
            "ééééééééé",
            &name[1..],
        ] {
            assert!(!is_operation(b"key", wrong), "{wrong}");
        }
    }

    #[test]
    fn a_stable_guid_is_the_same_for_the_same_text() {
        let guid = stable_guid(b"key", "a");
        assert_eq!(guid, stable_guid(b"key", "a"));
        assert_ne!(guid, stable_guid(b"key", "b"));
        assert_ne!(guid, stable_guid(b"other", "a"));
        assert_eq!((guid.len(), &guid[14..15]), (36, "4"));
    }
}
