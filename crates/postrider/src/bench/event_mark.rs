//! Mark inside each event: the run, the event's number and its publish time.
//!
//! The mark has a fixed width and no character that JSON escapes, so the sink finds it in any
//! envelope without parsing.

use std::time::{SystemTime, UNIX_EPOCH};

use memchr::memmem;

const PREFIX: &[u8] = b"PRB!";

/// `PRB!` run (8 hex digits) `!` seq (12) `!` published (16) `!`
pub const LEN: usize = PREFIX.len() + 8 + 1 + 12 + 1 + 16 + 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventMark {
    pub run: u32,
    /// Counts from 0 within the run; 12 hex digits at most.
    pub seq: u64,
    /// Nanoseconds, as read by [`now_nanos`].
    pub published: u64,
}

impl EventMark {
    pub fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(PREFIX);
        write_hex(self.run.into(), 8, out);
        write_hex(self.seq, 12, out);
        write_hex(self.published, 16, out);
    }

    /// Reads the mark at the start of `text`.
    fn read(text: &[u8]) -> Option<EventMark> {
        let fields = text.get(PREFIX.len()..LEN)?;
        Some(EventMark {
            run: read_hex(&fields[..9])?.try_into().ok()?,
            seq: read_hex(&fields[9..22])?,
            published: read_hex(&fields[22..])?,
        })
    }
}

/// All marks in a body, in order.
pub fn scan(body: &[u8]) -> impl Iterator<Item = EventMark> {
    memmem::find_iter(body, PREFIX).filter_map(|at| EventMark::read(&body[at..]))
}

/// The machine's wall clock. Publisher and sink share it, so a difference of two readings is a
/// latency.
#[expect(
    clippy::disallowed_methods,
    reason = "the measurement compares real times across processes"
)]
pub fn now_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// Writes the lowest `digits` hex digits of `value`, and the `!` that ends a field.
fn write_hex(value: u64, digits: u32, out: &mut Vec<u8>) {
    for digit in (0..digits).rev() {
        out.push(b"0123456789abcdef"[(value >> (digit * 4) & 15) as usize]);
    }
    out.push(b'!');
}

fn read_hex(field: &[u8]) -> Option<u64> {
    let digits = field.strip_suffix(b"!")?;
    digits.iter().try_fold(0, |value, digit| {
        let digit = (*digit as char).to_digit(16)?;
        Some(value << 4 | u64::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &[u8], expected: &[EventMark]) {
        assert_eq!(scan(body).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn marks_are_found_in_any_envelope() {
        let marks = [0, 77, (1 << 48) - 1].map(|seq| EventMark {
            run: 0xdead_0001,
            seq,
            published: 1_790_000_000_123_456_789 + seq,
        });
        let mut body = b"[".to_vec();
        for mark in marks {
            body.extend_from_slice(b"{\"data\":{\"mark\":\"");
            let before = body.len();
            mark.write(&mut body);
            assert_eq!(body.len() - before, LEN);
            body.extend_from_slice(b"\"}},");
        }
        check(&body, &marks);
        let as_json_string = serde_json::to_string(&String::from_utf8(body).unwrap()).unwrap();
        check(as_json_string.as_bytes(), &marks);
    }

    #[test]
    fn what_only_looks_like_a_mark_is_passed_over() {
        check(b"", &[]);
        check(b"PRB!", &[]);
        check(b"PRB!0000000g!000000000000!0000000000000000!", &[]);
        check(b"PRB!+0000001!000000000000!0000000000000000!", &[]);
        check(b"PRB!00000001-000000000000!0000000000000000!", &[]);
        check(b"PRB!00000001!000000000000!0000000000000000", &[]);
    }
}
