//! Delivery bodies that refer to stored events instead of copying them.
//!
//! An event goes to each subscription as the publisher's bytes with a few stamps in between. The
//! publisher's bytes are in memory once, however many deliveries of the event are in progress.

use bytes::Bytes;

/// Pieces of at least this many bytes are referred to, shorter ones copied: a reference costs an
/// atomic count and an entry in the list of pieces.
pub const SHARED_PIECE_MIN: usize = 4 * 1024;

/// The body of one delivery request, as a list of pieces.
#[derive(Clone, Debug, Default)]
pub struct DeliveryBody {
    /// Most bodies have a single piece, and so need no list.
    first: Bytes,
    others: Vec<Bytes>,
    len: usize,
}

impl DeliveryBody {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// All pieces as one; copies them if there are several.
    pub fn to_bytes(&self) -> Bytes {
        if self.others.is_empty() {
            return self.first.clone();
        }
        let mut whole = Vec::with_capacity(self.len);
        self.pieces().for_each(|piece| whole.extend_from_slice(piece));
        whole.into()
    }
}

impl From<Bytes> for DeliveryBody {
    fn from(bytes: Bytes) -> DeliveryBody {
        DeliveryBody {
            len: bytes.len(),
            first: bytes,
            others: Vec::new(),
        }
    }
}

impl From<Vec<u8>> for DeliveryBody {
    fn from(bytes: Vec<u8>) -> DeliveryBody {
        Bytes::from(bytes).into()
    }
}

impl From<String> for DeliveryBody {
    fn from(text: String) -> DeliveryBody {
        Bytes::from(text).into()
    }
}

impl PartialEq for DeliveryBody {
    fn eq(&self, other: &DeliveryBody) -> bool {
        self.len == other.len && self.to_bytes() == other.to_bytes()
    }
}

impl Eq for DeliveryBody {}

/// The output that rendering writes to.
pub trait RenderOutput {
    /// Appends bytes of any length.
    fn write(&mut self, bytes: &[u8]);

    /// The buffer to append short texts to.
    fn text(&mut self) -> &mut Vec<u8>;
}

impl RenderOutput for Vec<u8> {
    fn write(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }

    fn text(&mut self) -> &mut Vec<u8> {
        self
    }
}

/// Builds a [`DeliveryBody`]. Long pieces of the current source are referred to; everything else is
/// copied.
pub struct BodyBuilder {
    source: Bytes,
    pieces: Vec<Bytes>,
    /// The copied text after the last finished piece.
    text: Vec<u8>,
}

impl BodyBuilder {
    pub fn with_capacity(copied_bytes: usize) -> BodyBuilder {
        BodyBuilder {
            source: Bytes::new(),
            pieces: Vec::new(),
            text: Vec::with_capacity(copied_bytes),
        }
    }

    /// From now on, pieces of `source` that are written may be referred to.
    pub fn refer_to(&mut self, source: &Bytes) {
        self.source = source.clone();
    }

    pub fn finish(mut self) -> DeliveryBody {
        if self.pieces.is_empty() {
            return self.text.into();
        }
        self.close_text();
        let len = self.pieces.iter().map(Bytes::len).sum();
        let mut pieces = self.pieces.into_iter();
        DeliveryBody {
            first: pieces.next().unwrap_or_default(),
            others: pieces.collect(),
            len,
        }
    }

    fn close_text(&mut self) {
        if !self.text.is_empty() {
            self.pieces.push(std::mem::take(&mut self.text).into());
        }
    }

    /// The part of the source that `bytes` is a slice of, if it is.
    fn shared_piece(&self, bytes: &[u8]) -> Option<Bytes> {
        if bytes.len() < SHARED_PIECE_MIN {
            return None;
        }
        let start = (bytes.as_ptr() as usize).checked_sub(self.source.as_ptr() as usize)?;
        let inside = start.checked_add(bytes.len())? <= self.source.len();
        inside.then(|| self.source.slice_ref(bytes))
    }
}

impl RenderOutput for BodyBuilder {
    fn write(&mut self, bytes: &[u8]) {
        match self.shared_piece(bytes) {
            Some(piece) => {
                self.close_text();
                self.pieces.push(piece);
            }
            None => self.text.extend_from_slice(bytes),
        }
    }

    fn text(&mut self) -> &mut Vec<u8> {
        &mut self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn long_pieces_of_the_source_are_not_copied() {
        let source = Bytes::from(vec![b'x'; 3 * SHARED_PIECE_MIN]);
        let mut body = BodyBuilder::with_capacity(8);
        body.refer_to(&source);
        body.write(b"[");
        body.write(&source[1..]);
        body.text().push(b']');
        let body = body.finish();
        let pieces: Vec<&Bytes> = body.pieces().collect();
        assert_eq!(pieces.len(), 3);
        assert_eq!(pieces[1].as_ptr(), source[1..].as_ptr());
        assert_eq!(body.len(), source.len() + 1);
        assert_eq!(body.to_bytes().len(), body.len());
    }

    #[test]
    fn long_pieces_of_anything_else_are_copied() {
        let source = Bytes::from(vec![b'x'; SHARED_PIECE_MIN]);
        let other = vec![b'y'; SHARED_PIECE_MIN];
        let mut body = BodyBuilder::with_capacity(0);
        body.refer_to(&source);
        body.write(&other);
        let body = body.finish();
        assert_eq!(body.pieces().count(), 1);
        assert_eq!(body.to_bytes(), other);
    }

    proptest! {
        #[test]
        fn a_body_is_what_was_written(writes in prop::collection::vec((0usize..20_000, 0usize..20_000, any::<bool>()), 0..8)) {
            let source = Bytes::from((0..20_000u32).map(|n| n as u8).collect::<Vec<u8>>());
            let mut expected = Vec::new();
            let mut body = BodyBuilder::with_capacity(0);
            body.refer_to(&source);
            for (a, b, short) in writes {
                let (from, to) = (a.min(b), a.max(b));
                if short {
                    body.text().extend_from_slice(&source[from..to.min(from + 9)]);
                    expected.extend_from_slice(&source[from..to.min(from + 9)]);
                } else {
                    body.write(&source[from..to]);
                    expected.extend_from_slice(&source[from..to]);
                }
            }
            let body = body.finish();
            prop_assert_eq!(body.len(), expected.len());
            prop_assert_eq!(body.to_bytes(), expected);
        }
    }
}
