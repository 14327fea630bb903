//! Reads dead letters from their blob, and checks them against the archive's record of it.

use crate::blobs::BlobError;
use postrider_core::json::{JsonKind, RawJson};
use postrider_store::{BlobFault, BlobRecord, DeadLetterMark};

/// Why an archived dead letter cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterFault {
    pub fault: BlobFault,
    /// The reason, for people.
    pub reason: String,
}

impl DeadLetterFault {
    fn damaged(reason: impl Into<String>) -> DeadLetterFault {
        DeadLetterFault {
            fault: BlobFault::Damaged,
            reason: reason.into(),
        }
    }

    /// None for a store that is out of reach or rejects the credentials: the blob may be intact,
    /// and reading it may work later.
    pub fn of_error(error: &BlobError) -> Option<DeadLetterFault> {
        let fault = match error {
            BlobError::NotFound(_) | BlobError::NoContainer { .. } => BlobFault::Missing,
            BlobError::UnknownAccount(_) => BlobFault::NoAccount,
            BlobError::TooLarge { .. } => BlobFault::Damaged,
            BlobError::Refused { .. } | BlobError::Unreachable { .. } => return None,
        };
        Some(DeadLetterFault {
            fault,
            reason: error.to_string(),
        })
    }
}

/// `account/container/path`, for people.
pub fn full_path(blob: &BlobRecord) -> String {
    format!("{}/{}/{}", blob.account, blob.container, blob.path)
}

/// The dead letters of a blob in order, if the blob is what the archive recorded. In an altered
/// blob the position of a dead letter would not identify it.
pub fn dead_letters_of<'a>(blob: &BlobRecord, body: &'a [u8]) -> Result<Vec<RawJson<'a>>, DeadLetterFault> {
    let parsed = std::str::from_utf8(body)
        .ok()
        .and_then(|text| RawJson::parse(text).ok());
    let Some(parsed) = parsed else {
        let written = match blob.bytes {
            0 => String::new(),
            bytes => format!(" ({} bytes; {bytes} were written)", body.len()),
        };
        return Err(DeadLetterFault::damaged(format!("the blob is not JSON{written}")));
    };
    if parsed.kind() != JsonKind::Array {
        return Err(DeadLetterFault::damaged("the blob is not a JSON array"));
    }
    let letters: Vec<RawJson<'a>> = parsed.elements().collect();
    let (found, expected) = (letters.len(), blob.marks.len());
    if found != expected {
        return Err(DeadLetterFault::damaged(format!(
            "the blob holds {found} dead letters; {expected} were written"
        )));
    }
    // Records of older versions contain neither length nor hash.
    if blob.bytes > 0 && body.len() as u64 != blob.bytes {
        return Err(DeadLetterFault::damaged(format!(
            "the blob was altered: it has {} bytes; {} were written",
            body.len(),
            blob.bytes
        )));
    }
    if blob.sha256.is_some_and(|written| written != sha256(body)) {
        return Err(DeadLetterFault::damaged(
            "the blob was altered: its SHA-256 is not the one of what was written",
        ));
    }
    Ok(letters)
}

/// The hash of a blob's content for the archive.
pub fn sha256(body: &[u8]) -> [u8; 32] {
    let hash = ring::digest::digest(&ring::digest::SHA256, body);
    hash.as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// Checks that this is the dead letter that the archive recorded at its index, as far as the mark
/// tells.
pub fn check_letter(letter: RawJson<'_>, mark: DeadLetterMark) -> Result<(), DeadLetterFault> {
    let name = match letter.get("specversion") {
        Some(_) => "deadletterreason",
        None => "deadLetterReason",
    };
    let reason = letter
        .get(name)
        .filter(|reason| reason.kind() == JsonKind::String);
    let expected = mark.reason.name();
    match reason.and_then(|reason| reason.as_str()) {
        Some(reason) if reason == expected => Ok(()),
        Some(reason) => Err(DeadLetterFault::damaged(format!(
            "the blob holds another dead letter in this place: {name} is {reason:?}, not {expected:?}"
        ))),
        None => Err(DeadLetterFault::damaged(format!(
            "the blob holds no dead letter in this place: {name} is not there"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::ids::SubscriptionId;
    use postrider_core::retry::GiveUpReason;
    use postrider_core::time::Timestamp;
    use postrider_store::BlobId;

    fn mark(reason: GiveUpReason) -> DeadLetterMark {
        DeadLetterMark {
            reason,
            replays: 0,
            purged: false,
        }
    }

    #[test]
    fn a_blob_is_compared_with_the_archive() {
        let mut blob = BlobRecord {
            id: BlobId(1),
            subscription: SubscriptionId(1),
            subscription_name: "s".into(),
            topic_name: "t".into(),
            account: "a".into(),
            container: "c".into(),
            path: "p".into(),
            written: Timestamp::from_secs(0),
            bytes: 9,
            sha256: None,
            marks: vec![mark(GiveUpReason::BadRequest); 2],
        };
        let compare = |blob: &BlobRecord, body: &[u8], expected: Result<usize, &str>| {
            let read = dead_letters_of(blob, body);
            let found = read.as_ref().map(Vec::len).map_err(|fault| fault.reason.as_str());
            assert_eq!(found, expected);
        };
        let check = |body: &[u8], expected| compare(&blob, body, expected);
        check(b"[{},{}]  ", Ok(2));
        check(
            b"[{},{}]",
            Err("the blob was altered: it has 7 bytes; 9 were written"),
        );
        check(b"[{},{}", Err("the blob is not JSON (6 bytes; 9 were written)"));
        check(b"", Err("the blob is not JSON (0 bytes; 9 were written)"));
        check(
            b"[\"\xff\",1]",
            Err("the blob is not JSON (7 bytes; 9 were written)"),
        );
        check(b"{\"a\":1}", Err("the blob is not a JSON array"));
        check(b"[{}]", Err("the blob holds 1 dead letters; 2 were written"));
        check(b"[1,2,3]", Err("the blob holds 3 dead letters; 2 were written"));

        let written = br#"[{"data":1},{"data":2}]"#;
        blob.bytes = written.len() as u64;
        compare(&blob, br#"[{"data":1},{"data":3}]"#, Ok(2));
        blob.sha256 = Some(sha256(written));
        compare(&blob, written, Ok(2));
        compare(
            &blob,
            br#"[{"data":1},{"data":3}]"#,
            Err("the blob was altered: its SHA-256 is not the one of what was written"),
        );
        // The record of an older version.
        (blob.bytes, blob.sha256) = (0, None);
        compare(&blob, b"[{},{}]", Ok(2));
    }

    #[test]
    fn a_letter_is_compared_with_its_mark() {
        let check = |text: &str, expected: bool| {
            let found = check_letter(RawJson::parse(text).unwrap(), mark(GiveUpReason::BadRequest));
            assert_eq!(found.is_ok(), expected, "{text}: {found:?}");
        };
        check(r#"{"deadLetterReason":"UndeliverableDueToHttpBadRequest"}"#, true);
        check(
            r#"{"specversion":"1.0","deadletterreason":"UndeliverableDueToHttpBadRequest"}"#,
            true,
        );
        check(r#"{"deadLetterReason":"TimeToLiveExceeded"}"#, false);
        check(r#"{"deadLetterReason":1}"#, false);
        check("{}", false);
        check("7", false);
        check("null", false);
    }

    #[test]
    fn a_store_out_of_reach_is_no_fault_of_the_blob() {
        let check = |error: BlobError, expected: Option<BlobFault>| {
            assert_eq!(
                DeadLetterFault::of_error(&error).map(|fault| fault.fault),
                expected
            );
        };
        let (account, detail) = ("a".to_owned(), "x".to_owned());
        check(BlobError::NotFound("p".into()), Some(BlobFault::Missing));
        check(BlobError::UnknownAccount("a".into()), Some(BlobFault::NoAccount));
        check(
            BlobError::Refused {
                account: account.clone(),
                detail: detail.clone(),
            },
            None,
        );
        check(BlobError::Unreachable { account, detail }, None);
    }
}
