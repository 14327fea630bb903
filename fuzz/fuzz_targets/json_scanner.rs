//! The JSON scanner accepts exactly the texts that serde_json accepts, except for its bound on
//! depth.
#![no_main]

use libfuzzer_sys::fuzz_target;
use postrider_core::json::{RawJson, write_string};
use serde_json::value::RawValue;

/// Far below the scanner's bound on nesting, which serde_json's raw values do not share.
const BRACKETS_MAX: usize = 60;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let ours = RawJson::parse(text);
    if text.bytes().filter(|b| matches!(b, b'[' | b'{')).count() <= BRACKETS_MAX {
        let theirs = serde_json::from_str::<&RawValue>(text.trim_matches([' ', '\n', '\r', '\t']));
        assert_eq!(ours.is_ok(), theirs.is_ok(), "{text:?}");
    }
    if let Ok(raw) = ours {
        walk(raw);
    }
});

/// Reads every member, element and leaf.
fn walk(raw: RawJson<'_>) {
    for member in raw.members() {
        walk(member.value);
    }
    for element in raw.elements() {
        walk(element);
    }
    let _ = (
        raw.as_bool(),
        raw.as_number(),
        raw.get("a"),
        raw.get_any_case("A"),
    );
    if let Some(text) = raw.as_str() {
        let mut written = Vec::new();
        write_string(&text, &mut written);
        let written = std::str::from_utf8(&written).expect("strings are written as UTF-8");
        let again = RawJson::parse(written).expect("a written string can be read");
        assert_eq!(again.as_str().as_deref(), Some(&*text));
    }
}
