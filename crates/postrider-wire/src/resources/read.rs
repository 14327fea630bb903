//! A lenient JSON reader that keeps track of the path of each value.

use postrider_core::json::{self, JsonKind, RawJson};
use std::fmt;
use std::ops::RangeInclusive;

/// A field that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Path in the body: `properties.filter.advancedFilters[0].key`. Empty for the body itself.
    pub path: String,
    /// The reason, worded to follow the path.
    pub reason: String,
    /// The error code of the API: `InvalidDestination` for destinations at the edge, otherwise
    /// `InvalidRequest`.
    pub code: &'static str,
    /// The message of the original service, where it is known.
    said: Option<String>,
}

impl FieldError {
    pub fn new(path: impl Into<String>, reason: impl Into<String>) -> FieldError {
        FieldError {
            path: path.into(),
            reason: reason.into(),
            code: "InvalidRequest",
            said: None,
        }
    }

    /// Replaces the message by the original service's own. Path and reason stay available.
    pub(super) fn saying(self, message: impl Into<String>) -> FieldError {
        FieldError {
            said: Some(message.into()),
            ..self
        }
    }

    /// Uses the message with which the cloud refuses event subscriptions, followed by path and
    /// reason.
    pub fn of_event_subscription(self) -> FieldError {
        if self.said.is_some() {
            return self;
        }
        let message = format!("Invalid event subscription request: {self}.");
        self.saying(message)
    }

    /// Uses the code and message with which the edge module refuses destinations.
    pub(super) fn of_edge_destination(self) -> FieldError {
        let message = format!("EventSubscription.Properties.Destination failed validation. Reason: {self}.");
        FieldError {
            code: "InvalidDestination",
            said: Some(message),
            ..self
        }
    }
}

/// The message of the answer.
impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.said {
            Some(message) => f.write_str(message),
            None if self.path.is_empty() => write!(f, "the body {}", self.reason),
            None => write!(f, "{} {}", self.path, self.reason),
        }
    }
}

impl std::error::Error for FieldError {}

/// Checks that a request's body is JSON.
pub fn read_body(bytes: &[u8]) -> Result<RawJson<'_>, FieldError> {
    let refused = |why: String| FieldError::new("", format!("is not JSON: {why}"));
    let text = std::str::from_utf8(bytes).map_err(|error| refused(error.to_string()))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    RawJson::parse(text).map_err(|error: json::Error| refused(error.to_string()))
}

/// Limit of the characters of any text that has no narrower limit.
pub(super) const TEXT_CHARS_MAX: usize = 8192;

/// A value and its path.
#[derive(Clone, Debug)]
pub(super) struct JsonNode<'a> {
    pub path: String,
    pub value: RawJson<'a>,
}

const NULL: &str = "null";

impl<'a> JsonNode<'a> {
    /// The whole body, which must be an object.
    pub fn root(body: RawJson<'a>) -> Result<JsonNode<'a>, FieldError> {
        JsonNode {
            path: String::new(),
            value: body,
        }
        .of_kind(JsonKind::Object)
    }

    pub fn fail(&self, reason: impl Into<String>) -> FieldError {
        FieldError::new(&self.path, reason)
    }

    /// The member with this name; null if absent.
    pub fn at(&self, name: &str) -> JsonNode<'a> {
        let path = if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        };
        let value = self.value.get_any_case(name).unwrap_or(RawJson::trusted(NULL));
        JsonNode { path, value }
    }

    /// The member with this name, unless it is absent or null.
    pub fn get(&self, name: &str) -> Option<JsonNode<'a>> {
        Some(self.at(name)).filter(|member| !member.value.is_null())
    }

    /// Whether one of these members is present, even as null.
    pub fn has_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.value.get_any_case(name).is_some())
    }

    pub fn need(&self, name: &str) -> Result<JsonNode<'a>, FieldError> {
        self.get(name).ok_or_else(|| self.at(name).fail("is required"))
    }

    pub fn object(&self, name: &str) -> Result<Option<JsonNode<'a>>, FieldError> {
        self.get(name)
            .map(|member| member.of_kind(JsonKind::Object))
            .transpose()
    }

    pub fn need_object(&self, name: &str) -> Result<JsonNode<'a>, FieldError> {
        self.need(name)?.of_kind(JsonKind::Object)
    }

    pub fn string(&self, name: &str) -> Result<Option<String>, FieldError> {
        self.get(name).map(|member| member.as_string()).transpose()
    }

    /// A string of at most `chars_max` characters.
    pub fn short_string(&self, name: &str, chars_max: usize) -> Result<Option<String>, FieldError> {
        let member = self.get(name);
        member.map(|member| member.as_short_string(chars_max)).transpose()
    }

    /// A string that must be present and not empty.
    pub fn need_string(&self, name: &str) -> Result<String, FieldError> {
        let text = self.need(name)?.as_string()?;
        if text.is_empty() {
            return Err(self.at(name).fail("must not be empty"));
        }
        Ok(text)
    }

    pub fn bool(&self, name: &str) -> Result<Option<bool>, FieldError> {
        self.get(name).map(|member| member.as_bool()).transpose()
    }

    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, FieldError> {
        let Some(member) = self.get(name) else {
            return Ok(None);
        };
        let Some(text) = member.value.as_number() else {
            return Err(member.not("a whole number"));
        };
        if text.contains(['.', 'e', 'E']) {
            return Err(member.fail(format!("must be a whole number, was {text}")));
        }
        match text.parse() {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let (least, most) = range.into_inner();
                Err(member.fail(format!("must be between {least} and {most}, was {text}")))
            }
        }
    }

    /// A number between 1 and `most`.
    pub fn count(&self, name: &str, most: u32) -> Result<Option<u32>, FieldError> {
        let number = self.integer(name, 1..=i64::from(most))?;
        Ok(number.map(|number| u32::try_from(number).expect("the range was checked")))
    }

    /// A member whose value is one of `words`, in any case.
    pub fn word<T: Copy>(&self, name: &str, words: &[(&str, T)]) -> Result<Option<T>, FieldError> {
        let Some(given) = self.string(name)? else {
            return Ok(None);
        };
        match words.iter().find(|(word, _)| word.eq_ignore_ascii_case(&given)) {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => {
                let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
                let reason = format!("must be one of {}, was {given:?}", words.join(", "));
                Err(self.at(name).fail(reason))
            }
        }
    }

    pub fn list(&self, name: &str) -> Result<Option<Vec<JsonNode<'a>>>, FieldError> {
        self.get(name).map(|member| member.elements()).transpose()
    }

    /// A list of at most `items_max` strings, each of at most `chars_max` characters.
    pub fn strings(
        &self,
        name: &str,
        items_max: usize,
        chars_max: usize,
    ) -> Result<Option<Vec<String>>, FieldError> {
        let Some(list) = self.list(name)? else {
            return Ok(None);
        };
        if list.len() > items_max {
            let reason = format!("must not have more than {items_max} items, had {}", list.len());
            return Err(self.at(name).fail(reason));
        }
        list.iter()
            .map(|item| item.as_short_string(chars_max))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    pub fn elements(&self) -> Result<Vec<JsonNode<'a>>, FieldError> {
        let list = self.clone().of_kind(JsonKind::Array)?;
        let elements = list.value.elements().enumerate();
        Ok(elements
            .map(|(i, value)| JsonNode {
                path: format!("{}[{i}]", self.path),
                value,
            })
            .collect())
    }

    pub fn as_string(&self) -> Result<String, FieldError> {
        self.as_short_string(TEXT_CHARS_MAX)
    }

    pub fn as_short_string(&self, chars_max: usize) -> Result<String, FieldError> {
        let text = self.value.as_str().ok_or_else(|| self.not("a string"))?;
        check_chars(&text, chars_max).map_err(|reason| self.fail(reason))?;
        Ok(text.into())
    }

    /// A boolean. Strings are accepted too, because the edge articles use them.
    pub fn as_bool(&self) -> Result<bool, FieldError> {
        let written = self.value.as_str();
        match (self.value.as_bool(), written.as_deref()) {
            (Some(value), _) => Ok(value),
            (_, Some(word)) if word.eq_ignore_ascii_case("true") => Ok(true),
            (_, Some(word)) if word.eq_ignore_ascii_case("false") => Ok(false),
            _ => Err(self.not("true or false")),
        }
    }

    pub fn of_kind(self, kind: JsonKind) -> Result<JsonNode<'a>, FieldError> {
        if self.value.kind() == kind {
            return Ok(self);
        }
        Err(self.not(name_of(kind)))
    }

    /// An error for a value of the wrong type. The value is not shown: it might be a secret in the
    /// wrong place.
    pub fn not(&self, wanted: &str) -> FieldError {
        self.fail(format!("must be {wanted}, was {}", name_of(self.value.kind())))
    }
}

/// Refuses a text that is too long, with the reason.
pub(super) fn check_chars(text: &str, chars_max: usize) -> Result<(), String> {
    // Only a text with more bytes than allowed characters needs counting.
    let chars = match text.len() > chars_max {
        true => text.chars().count(),
        false => return Ok(()),
    };
    if chars <= chars_max {
        return Ok(());
    }
    Err(format!(
        "must not be longer than {chars_max} characters, was {chars}"
    ))
}

fn name_of(kind: JsonKind) -> &'static str {
    match kind {
        JsonKind::Null => "null",
        JsonKind::Bool => "true or false",
        JsonKind::Number => "a number",
        JsonKind::String => "a string",
        JsonKind::Array => "a list",
        JsonKind::Object => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_field_and_the_reason() {
        let body = r#"{"A":{"b":[1,"x",{"c":null}],"n":9000,"f":1.5,"s":"","t":"TRUE","huge":99999999999999999999}}"#;
        let root = JsonNode::root(RawJson::parse(body).unwrap()).unwrap();
        let a = root.need_object("a").unwrap();
        let check = |error: FieldError, expected: &str| assert_eq!(error.to_string(), expected);

        check(root.need("z").unwrap_err(), "z is required");
        check(
            a.need_object("b").unwrap_err(),
            "a.b must be an object, was a list",
        );
        check(a.string("n").unwrap_err(), "a.n must be a string, was a number");
        check(a.need_string("s").unwrap_err(), "a.s must not be empty");
        check(
            a.strings("b", 9, 9).unwrap_err(),
            "a.b[0] must be a string, was a number",
        );
        check(
            a.count("n", 5000).unwrap_err(),
            "a.n must be between 1 and 5000, was 9000",
        );
        check(
            a.count("huge", 5000).unwrap_err(),
            "a.huge must be between 1 and 5000, was 99999999999999999999",
        );
        check(
            a.count("f", 5000).unwrap_err(),
            "a.f must be a whole number, was 1.5",
        );
        check(
            a.count("s", 5000).unwrap_err(),
            "a.s must be a whole number, was a string",
        );
        check(
            a.bool("s").unwrap_err(),
            "a.s must be true or false, was a string",
        );
        check(
            a.word("t", &[("yes", 1), ("no", 2)]).unwrap_err(),
            "a.t must be one of yes, no, was \"TRUE\"",
        );
        assert_eq!(a.bool("t"), Ok(Some(true)));
        let b = a.list("b").unwrap().unwrap();
        check(b[2].need("c").unwrap_err(), "a.b[2].c is required");

        check(
            JsonNode::root(RawJson::trusted("[]")).unwrap_err(),
            "the body must be an object, was a list",
        );
        check(
            read_body(b"{").unwrap_err(),
            "the body is not JSON: expected ',' or '}' at byte 1",
        );
        assert!(read_body(b"\xff").is_err());
        assert_eq!(read_body("\u{feff}{}".as_bytes()).unwrap().text(), "{}");
    }
}
