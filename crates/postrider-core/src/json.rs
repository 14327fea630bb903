//! JSON as text: checks it once, then hands out slices of it.
//!
//! Events pass through Postrider without being parsed into trees: the publish path needs the
//! positions of each event and of a few envelope members, a filter needs one member deep inside,
//! and the delivery path copies the original bytes. A general parser builds more than that, or
//! reads the text twice; this one reads it once and allocates nothing.

use std::borrow::Cow;
use std::fmt;

/// The greatest nesting depth of objects and arrays.
pub const DEPTH_MAX: usize = 128;

/// Where and why a text is not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    pub at: usize,
    pub what: &'static str,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.what, self.at)
    }
}

impl std::error::Error for Error {}

/// The text of a single valid JSON value, without white space around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawJson<'a>(&'a str);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonKind {
    Null,
    Bool,
    Number,
    String,
    Array,
    Object,
}

impl<'a> RawJson<'a> {
    /// Checks that `text` is one JSON value and nothing else.
    pub fn parse(text: &'a str) -> Result<RawJson<'a>, Error> {
        let mut scanner = JsonScanner::new(text);
        let raw = scanner.value()?;
        scanner.end()?;
        Ok(raw)
    }

    /// Wraps text that this module has checked before, such as a stored slice.
    pub fn trusted(text: &'a str) -> RawJson<'a> {
        RawJson(text)
    }

    pub fn text(self) -> &'a str {
        self.0
    }

    pub fn kind(self) -> JsonKind {
        match self.0.as_bytes().first() {
            Some(b'{') => JsonKind::Object,
            Some(b'[') => JsonKind::Array,
            Some(b'"') => JsonKind::String,
            Some(b't' | b'f') => JsonKind::Bool,
            Some(b'n') | None => JsonKind::Null,
            Some(_) => JsonKind::Number,
        }
    }

    pub fn is_null(self) -> bool {
        self.kind() == JsonKind::Null
    }

    pub fn as_bool(self) -> Option<bool> {
        match self.0 {
            "true" => Some(true),
            "false" => Some(false),
            _ => None,
        }
    }

    /// The number's text.
    pub fn as_number(self) -> Option<&'a str> {
        (self.kind() == JsonKind::Number).then_some(self.0)
    }

    /// The string, unescaped.
    pub fn as_str(self) -> Option<Cow<'a, str>> {
        (self.kind() == JsonKind::String).then(|| unescape(&self.0[1..self.0.len() - 1]))
    }

    /// The members of an object; nothing for any other value.
    pub fn members(self) -> JsonMembers<'a> {
        let mut scanner = JsonScanner::new(self.0);
        let open = self.kind() == JsonKind::Object && scanner.open(b'{').is_ok();
        JsonMembers {
            scanner,
            first: true,
            open,
        }
    }

    /// The elements of an array; nothing for any other value.
    pub fn elements(self) -> JsonElements<'a> {
        let mut scanner = JsonScanner::new(self.0);
        let open = self.kind() == JsonKind::Array && scanner.open(b'[').is_ok();
        JsonElements {
            scanner,
            first: true,
            open,
        }
    }

    /// The member of this name, compared exactly; the last one if it is repeated.
    pub fn get(self, name: &str) -> Option<RawJson<'a>> {
        self.members().filter(|m| m.is(name)).last().map(|m| m.value)
    }

    /// The member of this name without regard to ASCII case; an exact match is preferred.
    pub fn get_any_case(self, name: &str) -> Option<RawJson<'a>> {
        let mut found = None;
        for member in self.members() {
            if member.is(name) {
                return Some(member.value);
            }
            if found.is_none() && unescape(member.name).eq_ignore_ascii_case(name) {
                found = Some(member.value);
            }
        }
        found
    }

    /// Follows a dot path, each dot one object level, as [`RawJson::get_any_case`] finds each member.
    /// Reads the text once, however deep the path is and whatever the cases of its names.
    pub fn follow(self, path: &str) -> Option<RawJson<'a>> {
        JsonScanner::new(self.0).follow(Some(path), true).ok().flatten()
    }
}

/// A member of an object.
#[derive(Clone, Copy, Debug)]
pub struct JsonMember<'a> {
    /// As written between the quotes, with its escapes.
    pub name: &'a str,
    pub value: RawJson<'a>,
}

impl JsonMember<'_> {
    pub fn is(&self, name: &str) -> bool {
        is_name(self.name, name)
    }
}

/// Whether a member's name, as written between the quotes, means `name`.
fn is_name(written: &str, name: &str) -> bool {
    written == name || (written.contains('\\') && unescape(written) == name)
}

pub struct JsonMembers<'a> {
    scanner: JsonScanner<'a>,
    first: bool,
    open: bool,
}

impl<'a> Iterator for JsonMembers<'a> {
    type Item = JsonMember<'a>;
    fn next(&mut self) -> Option<JsonMember<'a>> {
        if !self.open {
            return None;
        }
        let name = self.scanner.next_name(&mut self.first).ok().flatten()?;
        let value = self.scanner.value().ok()?;
        Some(JsonMember { name, value })
    }
}

pub struct JsonElements<'a> {
    scanner: JsonScanner<'a>,
    first: bool,
    open: bool,
}

impl<'a> Iterator for JsonElements<'a> {
    type Item = RawJson<'a>;
    fn next(&mut self) -> Option<RawJson<'a>> {
        if !self.open || !self.scanner.next_element(&mut self.first).ok()? {
            return None;
        }
        self.scanner.value().ok()
    }
}

/// Reads a text from left to right and validates it on the way.
#[derive(Clone, Debug)]
pub struct JsonScanner<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl<'a> JsonScanner<'a> {
    pub fn new(text: &'a str) -> JsonScanner<'a> {
        JsonScanner {
            text,
            at: 0,
            depth: 0,
        }
    }

    /// The scanner's position.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The next byte that is not white space, without consuming it.
    pub fn peek(&mut self) -> Option<u8> {
        let bytes = self.text.as_bytes();
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = bytes.get(self.at) {
            self.at += 1;
        }
        bytes.get(self.at).copied()
    }

    /// Fails unless only white space is left.
    pub fn end(&mut self) -> Result<(), Error> {
        match self.peek() {
            None => Ok(()),
            Some(_) => self.fail("unexpected text after the value"),
        }
    }

    /// Consumes the opening bracket of an object or array.
    pub fn open(&mut self, bracket: u8) -> Result<(), Error> {
        if self.peek() != Some(bracket) {
            return self.fail(match bracket {
                b'{' => "expected an object",
                _ => "expected an array",
            });
        }
        if self.depth == DEPTH_MAX {
            return self.fail("nested too deeply");
        }
        self.depth += 1;
        self.at += 1;
        Ok(())
    }

    /// Inside an object: consumes the next member's name and the colon, or the closing brace.
    pub fn next_name(&mut self, first: &mut bool) -> Result<Option<&'a str>, Error> {
        match self.peek() {
            Some(b'}') => {
                self.at += 1;
                self.depth -= 1;
                return Ok(None);
            }
            Some(b',') if !*first => {
                self.at += 1;
                self.peek();
            }
            Some(_) if *first => {}
            _ => return self.fail("expected ',' or '}'"),
        }
        *first = false;
        let name = self.string()?;
        if self.peek() != Some(b':') {
            return self.fail("expected ':'");
        }
        self.at += 1;
        Ok(Some(name))
    }

    /// Inside an array: true when an element follows, false when the closing bracket was consumed.
    pub fn next_element(&mut self, first: &mut bool) -> Result<bool, Error> {
        match self.peek() {
            Some(b']') => {
                self.at += 1;
                self.depth -= 1;
                return Ok(false);
            }
            Some(b',') if !*first => {
                self.at += 1;
                if self.peek() == Some(b']') {
                    return self.fail("expected a value");
                }
            }
            Some(_) if *first => {}
            _ => return self.fail("expected ',' or ']'"),
        }
        *first = false;
        Ok(true)
    }

    /// Consumes a whole value.
    pub fn value(&mut self) -> Result<RawJson<'a>, Error> {
        let next = self.peek();
        let start = self.at;
        match next {
            Some(b'"') => {
                self.string()?;
            }
            Some(b'{') => {
                self.open(b'{')?;
                let mut first = true;
                while self.next_name(&mut first)?.is_some() {
                    self.value()?;
                }
            }
            Some(b'[') => {
                self.open(b'[')?;
                let mut first = true;
                while self.next_element(&mut first)? {
                    self.value()?;
                }
            }
            Some(b't') => self.word("true")?,
            Some(b'f') => self.word("false")?,
            Some(b'n') => self.word("null")?,
            Some(b'-' | b'0'..=b'9') => self.number()?,
            Some(_) => return self.fail("expected a value"),
            None => return self.fail("unexpected end of input"),
        }
        Ok(RawJson(&self.text[start..self.at]))
    }

    /// Consumes a value and finds the value that the path leads to inside; the value itself without
    /// a path. With `may_stop` the scanner may stop inside the value once the answer is known.
    fn follow(&mut self, path: Option<&str>, may_stop: bool) -> Result<Option<RawJson<'a>>, Error> {
        let Some(path) = path else {
            return self.value().map(Some);
        };
        if self.peek() != Some(b'{') {
            self.value()?;
            return Ok(None);
        }
        let (name, rest) = match path.split_once('.') {
            Some((name, rest)) => (name, Some(rest)),
            None => (path, None),
        };
        self.open(b'{')?;
        let (mut first, mut exact, mut found) = (true, false, None);
        while let Some(written) = self.next_name(&mut first)? {
            if !exact && is_name(written, name) {
                let value = self.follow(rest, may_stop)?;
                if may_stop {
                    return Ok(value);
                }
                (exact, found) = (true, Some(value));
            } else if found.is_none() && unescape(written).eq_ignore_ascii_case(name) {
                // An exact match may still follow, so the rest of the object is needed.
                found = Some(self.follow(rest, false)?);
            } else {
                self.value()?;
            }
        }
        Ok(found.flatten())
    }

    /// Consumes a string and returns the text between the quotes.
    fn string(&mut self) -> Result<&'a str, Error> {
        #[cfg(test)]
        tests::STRINGS_READ.with(|count| count.set(count.get() + 1));
        let bytes = self.text.as_bytes();
        if bytes.get(self.at) != Some(&b'"') {
            return self.fail("expected a string");
        }
        let start = self.at + 1;
        let mut at = start;
        loop {
            at = plain_end(bytes, at);
            match bytes.get(at) {
                Some(b'"') => {
                    self.at = at + 1;
                    return Ok(&self.text[start..at]);
                }
                Some(b'\\') => {
                    let length = match bytes.get(at + 1) {
                        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
                        Some(b'u') => {
                            let hex = bytes.get(at + 2..at + 6);
                            if !hex.is_some_and(|h| h.iter().all(u8::is_ascii_hexdigit)) {
                                self.at = at;
                                return self.fail("bad escape");
                            }
                            6
                        }
                        _ => {
                            self.at = at;
                            return self.fail("bad escape");
                        }
                    };
                    at += length;
                }
                Some(_) => {
                    self.at = at;
                    return self.fail("control character in a string");
                }
                None => {
                    self.at = at;
                    return self.fail("unterminated string");
                }
            }
        }
    }

    fn number(&mut self) -> Result<(), Error> {
        let bytes = self.text.as_bytes();
        let digits = |mut at: usize| {
            while bytes.get(at).is_some_and(u8::is_ascii_digit) {
                at += 1;
            }
            at
        };
        let mut at = self.at;
        if bytes[at] == b'-' {
            at += 1;
        }
        let whole = at;
        at = digits(at);
        if at == whole || (bytes[whole] == b'0' && at > whole + 1) {
            return self.fail("bad number");
        }
        if bytes.get(at) == Some(&b'.') {
            let fraction = at + 1;
            at = digits(fraction);
            if at == fraction {
                return self.fail("bad number");
            }
        }
        if let Some(b'e' | b'E') = bytes.get(at) {
            at += 1;
            if let Some(b'+' | b'-') = bytes.get(at) {
                at += 1;
            }
            let exponent = at;
            at = digits(exponent);
            if at == exponent {
                return self.fail("bad number");
            }
        }
        self.at = at;
        Ok(())
    }

    fn word(&mut self, word: &'static str) -> Result<(), Error> {
        if !self.text[self.at..].starts_with(word) {
            return self.fail("expected a value");
        }
        self.at += word.len();
        Ok(())
    }

    fn fail<T>(&self, what: &'static str) -> Result<T, Error> {
        Err(Error { at: self.at, what })
    }
}

/// The first byte at or after `at` that ends a plain run: a quote, a backslash or a control
/// character.
fn plain_end(bytes: &[u8], mut at: usize) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    let zero_bytes = |x: u64| x.wrapping_sub(ONES) & !x & HIGHS;
    // Eight bytes at a time; the exact byte is found below.
    while let Some(chunk) = bytes.get(at..at + 8) {
        let word = u64::from_le_bytes(chunk.try_into().expect("eight bytes"));
        let quote = zero_bytes(word ^ (ONES * u64::from(b'"')));
        let escape = zero_bytes(word ^ (ONES * u64::from(b'\\')));
        let control = word.wrapping_sub(ONES * 0x20) & !word & HIGHS;
        let hit = quote | escape | control;
        if hit != 0 {
            return at + (hit.trailing_zeros() / 8) as usize;
        }
        at += 8;
    }
    while bytes
        .get(at)
        .is_some_and(|b| *b != b'"' && *b != b'\\' && *b >= 0x20)
    {
        at += 1;
    }
    at
}

/// The string that a valid JSON string's inner text encodes. A lone surrogate becomes U+FFFD.
pub fn unescape(inner: &str) -> Cow<'_, str> {
    if !inner.contains('\\') {
        return Cow::Borrowed(inner);
    }
    let mut out = String::with_capacity(inner.len());
    let mut rest = inner;
    while let Some(found) = rest.find('\\') {
        out.push_str(&rest[..found]);
        let bytes = rest.as_bytes();
        let mut used = 2;
        match bytes.get(found + 1) {
            Some(b'b') => out.push('\u{8}'),
            Some(b'f') => out.push('\u{c}'),
            Some(b'n') => out.push('\n'),
            Some(b'r') => out.push('\r'),
            Some(b't') => out.push('\t'),
            Some(b'u') => {
                let unit = |at: usize| {
                    let hex = rest.get(at..at + 4)?;
                    u32::from_str_radix(hex, 16).ok()
                };
                let high = unit(found + 2).unwrap_or(0xFFFD);
                used = 6;
                let mut code = high;
                if (0xD800..0xDC00).contains(&high) && rest[found + 6..].starts_with("\\u") {
                    let low = unit(found + 8).unwrap_or(0);
                    if (0xDC00..0xE000).contains(&low) {
                        code = 0x1_0000 + ((high - 0xD800) << 10) + (low - 0xDC00);
                        used = 12;
                    }
                }
                out.push(char::from_u32(code).unwrap_or('\u{FFFD}'));
            }
            Some(other) => out.push(char::from(*other)),
            None => {}
        }
        rest = rest.get(found + used..).unwrap_or("");
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Writes `text` as a JSON string, quotes included.
pub fn write_string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let end = plain_end(bytes, at);
        out.extend_from_slice(&bytes[at..end]);
        let Some(byte) = bytes.get(end) else {
            break;
        };
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            control => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                out.extend_from_slice(b"\\u00");
                out.push(HEX[usize::from(control >> 4)]);
                out.push(HEX[usize::from(control & 15)]);
            }
        }
        at = end + 1;
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    thread_local! {
        /// Strings that scanners have read, as a measure of their work.
        pub static STRINGS_READ: Cell<usize> = const { Cell::new(0) };
    }

    #[test]
    fn accepts_and_refuses_what_serde_json_does() {
        let texts = [
            "",
            " ",
            "{}",
            "[]",
            "[1,]",
            "{,}",
            "{\"a\":1,}",
            "{\"a\"}",
            "{\"a\":}",
            "[1 2]",
            "nul",
            "null",
            "tru",
            "true",
            "01",
            "-",
            "-0",
            "1.",
            "1.5e",
            "1e+5",
            ".5",
            "+1",
            "\"a",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\u12g4\"",
            "\"\\u1234\"",
            "\"\t\"",
            "[[[[]]]]",
            "{\"a\":{\"b\":[1,{}]}} ",
            "1 1",
            "[,1]",
            "{\"a\":1 \"b\":2}",
            "\"\u{e9}\"",
            "\u{feff}1",
            "{a:1}",
            "['a']",
            "[1]]",
            "}",
            "\"12345678\\\\\"",
            "\"1234567\u{1f}\"",
            "[true,false , null]",
        ];
        for text in texts {
            let ours = RawJson::parse(text).is_ok();
            let theirs = serde_json::from_str::<&serde_json::value::RawValue>(text.trim()).is_ok();
            assert_eq!(ours, theirs, "{text:?}");
        }
    }

    #[test]
    fn depth_is_bounded() {
        let deep = |n: usize| "[".repeat(n) + &"]".repeat(n);
        assert!(RawJson::parse(&deep(DEPTH_MAX)).is_ok());
        assert_eq!(
            RawJson::parse(&deep(DEPTH_MAX + 1)).unwrap_err().what,
            "nested too deeply"
        );
    }

    #[test]
    fn finds_members_and_elements() {
        let raw = RawJson::parse(r#"{"a": 1 , "B":{"c":[1,"x",null]}, "a":2, "q\u0041":true}"#).unwrap();
        assert_eq!(raw.get("a").unwrap().text(), "2");
        assert_eq!(raw.get("b"), None);
        assert_eq!(raw.get("qA").unwrap().as_bool(), Some(true));
        let c = raw.get_any_case("b").unwrap().get("c").unwrap();
        let elements: Vec<&str> = c.elements().map(RawJson::text).collect();
        assert_eq!(elements, ["1", "\"x\"", "null"]);
    }

    // Regression: the rest of the text was read again at each level, which took a hundred times as
    // long for a hundred levels.
    #[test]
    fn a_path_is_followed_in_one_pass() {
        const LEVELS: usize = 100;
        let leaves = r#","x":1"#.repeat(100);
        for (name, in_path) in [("a", "a"), ("A", "a")] {
            let text = format!(r#"{{"{name}":"#).repeat(LEVELS) + "7" + &format!("{leaves}}}").repeat(LEVELS);
            let raw = RawJson::parse(&text).unwrap();
            let path = vec![in_path; LEVELS].join(".");
            let strings = text.matches(':').count();
            let before = STRINGS_READ.get();
            assert_eq!(raw.follow(&path).unwrap().text(), "7");
            assert_eq!(raw.follow(&format!("{path}.b")), None);
            assert!(STRINGS_READ.get() - before <= 2 * strings, "{name}");
        }
    }

    fn nested() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            Just("1".to_owned()),
            Just("null".to_owned()),
            Just("[{}]".to_owned())
        ];
        leaf.prop_recursive(5, 60, 4, |inner| {
            prop::collection::vec(("[aAbB]|\\\\u0061|", inner), 0..4).prop_map(|members| {
                let members = members.iter().map(|(name, value)| format!(r#""{name}":{value}"#));
                format!("{{{}}}", members.collect::<Vec<_>>().join(","))
            })
        })
    }

    proptest! {
        #[test]
        fn a_path_leads_where_its_names_lead_one_by_one(text in nested(), path in "[aAbB](\\.[aAbB]?){0,4}") {
            let raw = RawJson::parse(&text).unwrap();
            let expected = path.split('.').try_fold(raw, |at, name| at.get_any_case(name));
            prop_assert_eq!(raw.follow(&path), expected);
        }
    }

    fn any_json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f64>().prop_map(|f| serde_json::json!(f)),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
                prop::collection::vec((any::<String>(), inner), 0..6)
                    .prop_map(|m| serde_json::Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn reads_every_value_back(value in any_json()) {
            let pretty = serde_json::to_string_pretty(&value).unwrap();
            prop_assert_eq!(RawJson::parse(&pretty).unwrap().text(), &pretty);
            let compact = value.to_string();
            let raw = RawJson::parse(&compact).unwrap();
            prop_assert_eq!(raw.text(), &compact);
            for (name, member) in value.as_object().into_iter().flatten() {
                prop_assert_eq!(raw.get(name).unwrap().text(), member.to_string());
            }
            for (found, element) in raw.elements().zip(value.as_array().into_iter().flatten()) {
                prop_assert_eq!(found.text(), element.to_string());
            }
        }

        #[test]
        fn agrees_with_serde_json_on_damaged_text(value in any_json(), at in any::<usize>(), byte in any::<u8>()) {
            let mut bytes = value.to_string().into_bytes();
            if !bytes.is_empty() {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            if let Ok(text) = std::str::from_utf8(&bytes) {
                let ours = RawJson::parse(text).is_ok();
                let theirs = serde_json::from_str::<&serde_json::value::RawValue>(text.trim_matches([' ', '\n', '\r', '\t'])).is_ok();
                prop_assert_eq!(ours, theirs, "{}", text);
            }
        }

        #[test]
        fn strings_survive(text in any::<String>()) {
            let mut out = Vec::new();
            write_string(&text, &mut out);
            let written = std::str::from_utf8(&out).unwrap();
            prop_assert_eq!(serde_json::from_str::<String>(written).unwrap(), text.clone());
            let raw = RawJson::parse(written).unwrap();
            prop_assert_eq!(raw.as_str().unwrap(), text);
        }
    }
}
