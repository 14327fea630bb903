//! The rules for names of containers and blobs.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// The longest path that Azure, S3 and Google all allow.
const PATH_BYTES_MAX: usize = 1024;

/// The prefix of files that are being written. No blob may have it.
pub(crate) const TEMPORARY: &str = ".postrider-";

/// Checks Azure's rules for containers; the error is for people.
pub(crate) fn check_container(name: &str) -> Result<(), String> {
    let letter_or_digit = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let reason = if name.starts_with('$') {
        "is reserved by Azure"
    } else if !(3..=63).contains(&name.len()) {
        "must have 3 to 63 characters"
    } else if !name.bytes().all(|b| letter_or_digit(&b) || b == b'-') {
        "may hold only lowercase letters, digits and hyphens"
    } else if name.starts_with('-') || name.ends_with('-') {
        "must begin and end with a letter or digit"
    } else if name.contains("--") {
        "must not hold two hyphens in a row"
    } else {
        return Ok(());
    };
    Err(format!("container name {name:?} {reason}"))
}

/// Checks a blob's path. A path that one of the stores would interpret is refused for all of them.
pub(crate) fn check_path(path: &str) -> Result<(), String> {
    let reason = if path.is_empty() || path.len() > PATH_BYTES_MAX {
        "must have 1 to 1024 bytes"
    } else if path.chars().any(|c| c.is_control() || c == '\\') {
        "must not hold control characters or backslashes"
    } else if path.split('/').any(str::is_empty) {
        "must not begin or end with a slash or hold two in a row"
    } else if path.split('/').any(|s| s == "." || s == "..") {
        "must not hold the segments . or .."
    } else if path.split('/').any(|s| s.starts_with(TEMPORARY)) {
        "must not hold a segment that begins with .postrider-"
    } else {
        return Ok(());
    };
    Err(format!("blob path {path:?} {reason}"))
}

/// A path encoded for a URL, with its slashes kept.
pub(crate) fn encode(path: &str) -> String {
    const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
        .remove(b'-')
        .remove(b'.')
        .remove(b'_')
        .remove(b'~')
        .remove(b'/');
    utf8_percent_encode(path, ENCODED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_named_by_azures_rules() {
        let long = "a".repeat(63);
        for good in ["abc", "dead-letters", "0-1-2", "123", &long] {
            assert_eq!(check_container(good), Ok(()), "{good}");
        }
        let too_long = "a".repeat(64);
        for (bad, why) in [
            ("", "3 to 63"),
            ("ab", "3 to 63"),
            (too_long.as_str(), "3 to 63"),
            ("$root", "reserved"),
            ("$web", "reserved"),
            ("$logs", "reserved"),
            ("Dead", "lowercase"),
            ("a_b", "lowercase"),
            ("a.b", "lowercase"),
            ("a/b", "lowercase"),
            ("...", "lowercase"),
            ("äbc", "lowercase"),
            ("-abc", "begin and end"),
            ("abc-", "begin and end"),
            ("a--b", "two hyphens"),
        ] {
            let told = check_container(bad).unwrap_err();
            assert!(told.contains(why), "{bad}: {told}");
        }
    }

    #[test]
    fn paths_that_mean_more_than_a_name_are_refused() {
        let check = |path: &str, good: bool| assert_eq!(check_path(path).is_ok(), good, "{path:?}");
        check("ORDERS/all/2026/11/16/3/one.json", true);
        check("a b/ü%?#&+.json", true);
        check("..a/b..", true);
        check(&"a".repeat(1024), true);
        for bad in [
            "",
            "/",
            "/etc/passwd",
            "a/",
            "a//b",
            ".",
            "..",
            "../a",
            "a/../b",
            "a/./b",
        ] {
            check(bad, false);
        }
        for bad in ["a\0b", "a\nb", "a\\..\\b", "a/.postrider-1-1", &"a".repeat(1025)] {
            check(bad, false);
        }
    }

    #[test]
    fn paths_are_encoded_for_urls() {
        assert_eq!(encode("a b/ü%?#~.json"), "a%20b/%C3%BC%25%3F%23~.json");
    }
}
