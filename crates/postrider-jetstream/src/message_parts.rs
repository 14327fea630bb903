//! Splitting of data that is too large for one message.

use async_nats::HeaderMap;
use bytes::{Bytes, BytesMut};

/// Header `<of>.<number>.<count>`: id of the whole, index of the part, number of parts.
pub const PART: &str = "Pr-Part";
/// Maximum size of the whole.
pub const WHOLE_BYTES_MAX: usize = 64 << 20;
/// Maximum length of a text in a header.
const HEADER_TEXT_MAX: usize = 512;

/// Splits data into parts of at most `max` bytes, with the header of each. Returns at least one
/// part.
pub fn cut(whole: Bytes, max: usize, of: u64) -> Vec<(Bytes, String)> {
    let max = max.max(1);
    let count = whole.len().div_ceil(max).max(1);
    let part = |n: usize| {
        let bytes = whole.slice(n * max..whole.len().min((n + 1) * max));
        (bytes, format!("{of:x}.{n}.{count}"))
    };
    (0..count).map(part).collect()
}

/// A text in a form that a header can contain.
pub fn header_text(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .take(HEADER_TEXT_MAX)
        .collect()
}

/// Reads the header of a part: id, index, count.
pub fn part_of(headers: &HeaderMap) -> Option<(u64, usize, usize)> {
    let text = headers.get(PART)?.as_str();
    let mut numbers = text.splitn(3, '.');
    let of = u64::from_str_radix(numbers.next()?, 16).ok()?;
    let number = numbers.next()?.parse().ok()?;
    let count = numbers.next()?.parse().ok()?;
    (number < count).then_some((of, number, count))
}

/// Joins parts that arrive in order. A missing part invalidates the whole.
#[derive(Debug, Default)]
pub struct PartAssembly {
    bytes: BytesMut,
    parts: usize,
}

impl PartAssembly {
    /// Adds a part. Returns the whole after the last part.
    pub fn add(&mut self, headers: &HeaderMap, payload: Bytes) -> Option<Bytes> {
        let (_, number, count) = part_of(headers)?;
        if number != self.parts || self.bytes.len() + payload.len() > WHOLE_BYTES_MAX {
            self.parts = usize::MAX;
            self.bytes.clear();
            return None;
        }
        if count == 1 {
            return Some(payload);
        }
        self.parts += 1;
        self.bytes.extend_from_slice(&payload);
        (self.parts == count).then(|| std::mem::take(&mut self.bytes).freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(part: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(PART, part);
        headers
    }

    #[test]
    fn what_was_cut_is_put_together() {
        for length in [0, 1, 9, 10, 11, 20, 95] {
            let whole = Bytes::from((0..length).map(|n| n as u8).collect::<Vec<_>>());
            let mut assembly = PartAssembly::default();
            let mut parts = cut(whole.clone(), 10, 0xfe);
            assert!(parts.iter().all(|(part, _)| part.len() <= 10));
            let (last, said) = parts.pop().unwrap();
            for (part, said) in parts {
                assert_eq!(assembly.add(&header(&said), part), None);
            }
            assert_eq!(assembly.add(&header(&said), last), Some(whole), "{length} bytes");
        }
    }

    #[test]
    fn a_missing_part_spoils_the_whole() {
        let mut assembly = PartAssembly::default();
        assert_eq!(assembly.add(&header("1.0.3"), Bytes::from_static(b"a")), None);
        assert_eq!(assembly.add(&header("1.2.3"), Bytes::from_static(b"c")), None);
        assert_eq!(assembly.add(&header("1.1.3"), Bytes::from_static(b"b")), None);
        assert_eq!(assembly.add(&header("1.2.3"), Bytes::from_static(b"c")), None);
        for wrong in ["", "1", "1.1.1", "1.0.0", "x.0.1", "1.-1.2"] {
            assert_eq!(part_of(&header(wrong)), None, "{wrong}");
        }
    }
}
