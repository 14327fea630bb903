//! `$filter` of lists: a subset of OData, for names only.

use super::ArmError;

/// Condition on the names of listed resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameFilter {
    Contains(String),
    Is(String),
    Not(Box<NameFilter>),
    Both(Box<NameFilter>, Box<NameFilter>),
    Either(Box<NameFilter>, Box<NameFilter>),
}

/// Limit of nested parentheses and `not`, so that a hostile filter cannot overflow the stack.
const DEPTH_MAX: usize = 64;

impl NameFilter {
    /// Reads a filter such as `contains(name, 'a') and not (name eq 'ab')`.
    pub fn parse(text: &str) -> Result<NameFilter, ArmError> {
        let refused = |reason: String| {
            let message = format!(
                "$filter {reason}; it may say contains(name, 'text'), name eq 'text', name ne 'text', and, or, not"
            );
            ArmError::new(400, "InvalidRequest", message).at("$filter")
        };
        let tokens = tokens(text).map_err(refused)?;
        let mut reader = FilterParser {
            tokens: &tokens,
            depth: 0,
        };
        let filter = reader.either().map_err(refused)?;
        match reader.tokens.first() {
            None => Ok(filter),
            Some(token) => Err(refused(format!(
                "has {} where nothing was expected",
                token.shown()
            ))),
        }
    }

    /// Whether the filter selects this name. Names compare without case.
    pub fn takes(&self, name: &str) -> bool {
        self.takes_lower(&name.to_lowercase())
    }

    fn takes_lower(&self, name: &str) -> bool {
        match self {
            NameFilter::Contains(text) => name.contains(text.as_str()),
            NameFilter::Is(text) => name == text,
            NameFilter::Not(filter) => !filter.takes_lower(name),
            NameFilter::Both(a, b) => a.takes_lower(name) && b.takes_lower(name),
            NameFilter::Either(a, b) => a.takes_lower(name) || b.takes_lower(name),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum FilterToken {
    Word(String),
    /// In lower case.
    Text(String),
    Open,
    Close,
    Comma,
}

impl FilterToken {
    fn shown(&self) -> String {
        match self {
            FilterToken::Word(word) => word.clone(),
            FilterToken::Text(text) => format!("'{text}'"),
            FilterToken::Open => "(".into(),
            FilterToken::Close => ")".into(),
            FilterToken::Comma => ",".into(),
        }
    }

    fn is(&self, word: &str) -> bool {
        matches!(self, FilterToken::Word(own) if own.eq_ignore_ascii_case(word))
    }
}

fn tokens(text: &str) -> Result<Vec<FilterToken>, String> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let taken = match first {
            '(' => {
                tokens.push(FilterToken::Open);
                1
            }
            ')' => {
                tokens.push(FilterToken::Close);
                1
            }
            ',' => {
                tokens.push(FilterToken::Comma);
                1
            }
            '\'' => {
                let (value, taken) = quoted(rest)?;
                tokens.push(FilterToken::Text(value.to_lowercase()));
                taken
            }
            _ => {
                let end = rest.find(|c: char| c.is_whitespace() || "(),'".contains(c));
                let taken = end.unwrap_or(rest.len());
                tokens.push(FilterToken::Word(rest[..taken].to_owned()));
                taken
            }
        };
        rest = rest[taken..].trim_start();
    }
    Ok(tokens)
}

/// Parses a quoted text, in which quotes are doubled. Returns the text and the length it takes.
fn quoted(text: &str) -> Result<(String, usize), String> {
    let mut value = String::new();
    let mut at = 1;
    loop {
        let Some(end) = text[at..].find('\'') else {
            return Err("has a text without its closing quote".into());
        };
        value.push_str(&text[at..at + end]);
        at += end + 1;
        if !text[at..].starts_with('\'') {
            return Ok((value, at));
        }
        value.push('\'');
        at += 1;
    }
}

struct FilterParser<'a> {
    tokens: &'a [FilterToken],
    depth: usize,
}

impl FilterParser<'_> {
    fn take(&mut self, wanted: impl Fn(&FilterToken) -> bool) -> bool {
        match self.tokens {
            [first, rest @ ..] if wanted(first) => {
                self.tokens = rest;
                true
            }
            _ => false,
        }
    }

    fn next(&mut self, expected: &str) -> Result<&FilterToken, String> {
        let [first, rest @ ..] = self.tokens else {
            return Err(format!("ends where {expected} was expected"));
        };
        self.tokens = rest;
        Ok(first)
    }

    fn need(&mut self, wanted: &FilterToken) -> Result<(), String> {
        let shown = wanted.shown();
        match self.next(&shown)? {
            token if token == wanted => Ok(()),
            token => Err(format!("has {} where {shown} was expected", token.shown())),
        }
    }

    fn either(&mut self) -> Result<NameFilter, String> {
        let mut filter = self.both()?;
        while self.take(|token| token.is("or")) {
            filter = NameFilter::Either(Box::new(filter), Box::new(self.both()?));
        }
        Ok(filter)
    }

    fn both(&mut self) -> Result<NameFilter, String> {
        let mut filter = self.one()?;
        while self.take(|token| token.is("and")) {
            filter = NameFilter::Both(Box::new(filter), Box::new(self.one()?));
        }
        Ok(filter)
    }

    fn one(&mut self) -> Result<NameFilter, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(format!("is nested more than {DEPTH_MAX} deep"));
        }
        let filter = self.one_of_depth();
        self.depth -= 1;
        filter
    }

    fn one_of_depth(&mut self) -> Result<NameFilter, String> {
        if self.take(|token| token.is("not")) {
            return Ok(NameFilter::Not(Box::new(self.one()?)));
        }
        if self.take(|token| *token == FilterToken::Open) {
            let filter = self.either()?;
            self.need(&FilterToken::Close)?;
            return Ok(filter);
        }
        if self.take(|token| token.is("contains")) {
            self.need(&FilterToken::Open)?;
            self.name()?;
            self.need(&FilterToken::Comma)?;
            let text = self.text()?;
            self.need(&FilterToken::Close)?;
            return Ok(NameFilter::Contains(text));
        }
        self.name()?;
        let operator = self.next("eq or ne")?;
        let is = operator.is("eq");
        if !is && !operator.is("ne") {
            return Err(format!("has {} where eq or ne was expected", operator.shown()));
        }
        let same = NameFilter::Is(self.text()?);
        Ok(if is { same } else { NameFilter::Not(Box::new(same)) })
    }

    fn name(&mut self) -> Result<(), String> {
        match self.next("name")? {
            token if token.is("name") => Ok(()),
            token => Err(format!("has {} where name was expected", token.shown())),
        }
    }

    fn text(&mut self) -> Result<String, String> {
        match self.next("a text in quotes")? {
            FilterToken::Text(text) => Ok(text.clone()),
            token => Err(format!(
                "has {} where a text in quotes was expected",
                token.shown()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_filters_take() {
        let names = ["orders", "Orders-2", "returns", "o'hara"];
        let check = |filter: &str, expected: &[&str]| {
            let parsed = NameFilter::parse(filter).unwrap();
            let taken: Vec<_> = names.into_iter().filter(|name| parsed.takes(name)).collect();
            assert_eq!(taken, expected, "{filter}");
        };
        check("name eq 'ORDERS'", &["orders"]);
        check("name ne 'orders'", &["Orders-2", "returns", "o'hara"]);
        check("CONTAINS(namE,'RD')", &["orders", "Orders-2"]);
        check("contains( name , 'rd' ) and Name ne 'orders-2'", &["orders"]);
        check("name eq 'orders' or name eq 'returns'", &["orders", "returns"]);
        check(
            "NOT (name eq 'orders' or contains(name,'-'))",
            &["returns", "o'hara"],
        );
        check("not contains(name,'r')", &[]);
        check(
            "not name eq 'orders' and not contains(name,'2')",
            &["returns", "o'hara"],
        );
        check("name eq 'o''hara'", &["o'hara"]);
        // `and` binds more tightly than `or`.
        check(
            "name eq 'returns' or name eq 'orders' and name ne 'orders'",
            &["returns"],
        );
        check("contains(name,'')", &names);
    }

    #[test]
    fn filters_that_are_refused() {
        let check = |filter: &str, reason: &str| {
            let error = NameFilter::parse(filter).unwrap_err();
            assert_eq!((error.status, error.target.as_deref()), (400, Some("$filter")));
            assert!(
                error.message.starts_with(&format!("$filter {reason};")),
                "{filter}: {error}"
            );
        };
        check("", "ends where name was expected");
        check("location eq 'westus'", "has location where name was expected");
        check("name gt 'a'", "has gt where eq or ne was expected");
        check("name eq orders", "has orders where a text in quotes was expected");
        check("name eq 'a", "has a text without its closing quote");
        check("name eq 'a' and", "ends where name was expected");
        check("name eq 'a' name eq 'b'", "has name where nothing was expected");
        check("contains('a', name)", "has 'a' where name was expected");
        check("contains(name 'a')", "has 'a' where , was expected");
        check("(name eq 'a'", "ends where ) was expected");
        check("startswith(name,'a')", "has startswith where name was expected");
        check(&"not ".repeat(10_000), "is nested more than 64 deep");
        check(&"(".repeat(10_000), "is nested more than 64 deep");
    }
}
