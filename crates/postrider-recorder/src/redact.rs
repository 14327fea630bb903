//! The stored part of a response: its beginning as text, with likely secrets masked.

use crate::frame::clip;

/// The bytes kept of the response to a failed attempt.
pub const SNIPPET_MAX: usize = 1024;
/// The bytes kept of the response to a successful one, which is rarely read.
pub const SNIPPET_OF_SUCCESS_MAX: usize = 256;
const MASK: &str = "***";

/// A member or header whose name ends in one of these words, in any case, is a secret:
/// `clientSecret`, `api_key`,
/// `x-auth-token`; not `secretary`, `session-service.invalid` or `token_type`.
const WORDS: [&str; 24] = [
    "authorization",
    "password",
    "passwd",
    "pwd",
    "secret",
    "secrets",
    "token",
    "tokens",
    "apikey",
    "credential",
    "credentials",
    "cookie",
    "cookies",
    "signature",
    "session",
    "sessionid",
    "sid",
    "key",
    "keys",
    "code",
    "sig",
    "sas",
    "pin",
    "passphrase",
];

/// Whether the value of this name must not be shown.
pub fn is_secret(name: &str) -> bool {
    let last = last_word(name);
    WORDS.iter().any(|word| last.eq_ignore_ascii_case(word))
}

/// `Key` of `sasKey`, `key` of `api_key`, all of `APIKEY`.
fn last_word(name: &str) -> &str {
    let name = name.trim_end_matches(['-', '_', '.']);
    let bytes = name.as_bytes();
    let begins = |at: &usize| {
        let (before, here) = (bytes[at - 1], bytes[*at]);
        matches!(before, b'-' | b'_' | b'.') || (here.is_ascii_uppercase() && !before.is_ascii_uppercase())
    };
    let start = (1..bytes.len()).rev().find(begins);
    start.and_then(|at| name.get(at..)).unwrap_or(name)
}

/// The beginning of a body as text, and whether there was more. Invalid bytes show as replacement
/// characters.
pub fn snippet(body: &[u8], max: usize) -> (String, bool) {
    // A value may begin before the cut and end after it, so more is scanned than is kept.
    let seen = &body[..body.len().min(max * 2)];
    let text = String::from_utf8_lossy(seen);
    let masked = mask(&text);
    let kept = clip(&masked, max);
    let truncated = body.len() > seen.len() || kept.len() < masked.len();
    (kept.to_owned(), truncated)
}

/// Replaces the values of secret names in anything that looks like `"name": "value"`, `name=value`
/// or `name: value`. Works on fragments of JSON, forms, headers and plain text.
pub fn mask(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let mut copied = 0;
    let mut at = 0;
    while at < bytes.len() {
        if !is_name(bytes[at]) {
            at += 1;
            continue;
        }
        let name_start = at;
        while at < bytes.len() && is_name(bytes[at]) {
            at += 1;
        }
        let name = &text[name_start..at];
        let Some(value) = value_after(bytes, at) else {
            // `Bearer abc` and `SharedAccessSignature sr=…`, anywhere.
            if let Some(end) = credential_after(name, bytes, at) {
                out.push_str(&text[copied..at + 1]);
                out.push_str(MASK);
                copied = end;
                at = end;
            }
            continue;
        };
        if is_secret(name) && !is_error_code(name, &bytes[at..value.0], &text[value.0..value.1]) {
            out.push_str(&text[copied..value.0]);
            out.push_str(MASK);
            copied = value.1;
            at = value.1;
        }
    }
    out.push_str(&text[copied..]);
    out
}

/// `code` and similar names hold a secret in `?code=…` and an error in `{"code":"NotFound"}` or
/// `{"statusCode":404}`. A value that consists of letters, or is a small number, and is not part of
/// a query or a form is an error.
fn is_error_code(name: &str, between: &[u8], value: &str) -> bool {
    let word = |c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '.' | ' ');
    let number = value.len() <= 5 && value.bytes().all(|b| b.is_ascii_digit());
    name.to_ascii_lowercase().ends_with("code")
        && !between.contains(&b'=')
        && (number || (value.len() <= 40 && value.chars().all(word)))
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.') || byte >= 0x80
}

fn skip(bytes: &[u8], mut at: usize, which: impl Fn(u8) -> bool) -> usize {
    while at < bytes.len() && which(bytes[at]) {
        at += 1;
    }
    at
}

/// The range of the value that belongs to a name which ends at `at`.
fn value_after(bytes: &[u8], at: usize) -> Option<(usize, usize)> {
    let blank = |b: u8| matches!(b, b' ' | b'\t' | b'\n' | b'\r');
    // The name's own closing quote, which may be escaped: JSON within JSON.
    let quote = skip(bytes, at, |b| matches!(b, b'\\' | b'"' | b'\''));
    let sign = skip(bytes, quote, blank);
    if !matches!(bytes.get(sign), Some(b':' | b'=')) {
        return None;
    }
    let start = skip(bytes, sign + 1, blank);
    let escaped = skip(bytes, start, |b| b == b'\\');
    match bytes.get(escaped) {
        Some(&quote @ (b'"' | b'\'')) => {
            let inner = escaped + 1;
            let mut end = inner;
            let closing = escaped > start;
            while end < bytes.len() && bytes[end] != quote {
                // In JSON within JSON the value's closing quote is the escaped one.
                if bytes[end] == b'\\' && closing && bytes.get(end + 1) == Some(&quote) {
                    break;
                }
                end += if bytes[end] == b'\\' { 2 } else { 1 };
            }
            // Only whole characters are skipped: both bytes of an escape are ASCII, or the second
            // begins a character.
            Some((inner, char_start(bytes, end.min(bytes.len()))))
        }
        Some(b'{' | b'[') => Some((start, structure_end(bytes, start))),
        _ => {
            let to_line_end = bytes[sign] == b':' && quote == at;
            let end = skip(bytes, start, |b| match b {
                b'\n' | b'\r' | b'"' | b'<' => false,
                b',' | b'}' | b']' | b'&' | b';' | b' ' => to_line_end && b != b'}' && b != b']',
                _ => true,
            });
            Some((start, end))
        }
    }
}

fn char_start(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() && bytes[at] & 0xc0 == 0x80 {
        at += 1;
    }
    at
}

/// The end of the object or array that begins here, or of the text.
fn structure_end(bytes: &[u8], start: usize) -> usize {
    let (mut depth, mut at, mut quoted) = (0usize, start, false);
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if quoted => at += 1,
            b'"' => quoted = !quoted,
            b'{' | b'[' if !quoted => depth += 1,
            b'}' | b']' if !quoted => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

/// The end of the credential after the name of an authorization scheme.
fn credential_after(name: &str, bytes: &[u8], at: usize) -> Option<usize> {
    let scheme = ["bearer", "basic", "sharedaccesssignature"]
        .iter()
        .any(|scheme| name.eq_ignore_ascii_case(scheme));
    if !scheme || bytes.get(at) != Some(&b' ') {
        return None;
    }
    let end = skip(bytes, at + 1, |b| {
        !matches!(b, b' ' | b'"' | b'\'' | b'\n' | b'\r' | b',' | b'<')
    });
    (end > at + 1).then_some(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn secrets_are_masked_by_their_names() {
        let check = |text: &str, expected: &str| assert_eq!(mask(text), expected, "{text}");
        check(
            r#"{"error":"no","apiKey":"abc","n":1}"#,
            r#"{"error":"no","apiKey":"***","n":1}"#,
        );
        check(
            r#"{"client_secret" : "a\"b", "x":2}"#,
            r#"{"client_secret" : "***", "x":2}"#,
        );
        check(r#"{"password":12345,"x":2}"#, r#"{"password":***,"x":2}"#);
        check(r#"{"tokens":["a","b]"],"x":2}"#, r#"{"tokens":***,"x":2}"#);
        check(
            r#"{"body":"{\"token\":\"abc\",\"n\":1}"}"#,
            r#"{"body":"{\"token\":\"***\",\"n\":1}"}"#,
        );
        check("grant=x&code=abc&state=1", "grant=x&code=***&state=1");
        check(
            "Authorization: Bearer abc.def\nhost: x",
            "Authorization: ***\nhost: x",
        );
        check("sent Bearer abc.def to x", "sent Bearer *** to x");
        check("<a href='?sig=abc'>", "<a href='?sig=***");
        check(
            r#"{"statusCode":404,"code":"NotFound"}"#,
            r#"{"statusCode":404,"code":"NotFound"}"#,
        );
        check(r#"{"code":"4/0AbCd-123"}"#, r#"{"code":"***"}"#);
        check(
            r#"{"keyboard":"us","decoded":"x","monkey":"m"}"#,
            r#"{"keyboard":"us","decoded":"x","monkey":"m"}"#,
        );
        check(
            r#"{"sasKey":"x","aeg-sas-key":"y"}"#,
            r#"{"sasKey":"***","aeg-sas-key":"***"}"#,
        );
        check(r#"{"token":"cut of"#, r#"{"token":"***"#);
    }

    #[test]
    fn a_snippet_is_bounded_and_says_so() {
        assert_eq!(
            snippet(b"ok\x00\x1b[31m", 1024),
            ("ok\0\x1b[31m".to_owned(), false)
        );
        let (text, truncated) = snippet(&[b'x'; 5000], 1024);
        assert_eq!((text.len(), truncated), (1024, true));
        let (text, truncated) = snippet(b"\xff\xfe", 1024);
        assert_eq!((text.as_str(), truncated), ("\u{fffd}\u{fffd}", false));
        // The value is cut in the middle; no part of it is shown.
        let body = format!(
            "{}{}",
            "x".repeat(1000),
            r#" "token":"abcdefghijklmnopqrstuvwxyz""#
        );
        assert!(!snippet(body.as_bytes(), 1024).0.contains("abc"));
    }

    proptest! {
        #[test]
        fn any_text_can_be_masked(text in "\\PC{0,80}") {
            mask(&text);
        }

        #[test]
        fn no_value_of_a_secret_is_left(before in "[a-z{\", ]{0,20}", value in "[A-Z]{8,20}") {
            let shapes = [
                format!("{before}\"password\":\"{value}\""),
                format!("{before} token={value}"),
                format!("{before}\nx-api-key: {value}"),
            ];
            for shape in shapes {
                prop_assert!(!mask(&shape).contains(&value), "{}", shape);
            }
        }
    }
}
