//! Case-insensitive text comparison, character by character like .NET's ordinal comparison.
//!
//! No character outside ASCII folds to one inside it, so an ASCII operand is compared as bytes.

use aho_corasick::{AhoCorasick, AhoCorasickKind};
use std::ops::Deref;
use std::sync::OnceLock;

pub fn fold(c: char) -> char {
    if c.is_ascii() {
        return c.to_ascii_uppercase();
    }
    let mut upper = c.to_uppercase();
    match (upper.next(), upper.next()) {
        (Some(one), None) if !one.is_ascii() => one,
        _ => c,
    }
}

pub fn folded(text: &str) -> String {
    match text.is_ascii() {
        true => text.to_ascii_uppercase(),
        false => text.chars().map(fold).collect(),
    }
}

pub fn same(text: &str, operand: &str) -> bool {
    if operand.is_ascii() {
        return text.eq_ignore_ascii_case(operand);
    }
    text.chars().map(fold).eq(operand.chars().map(fold))
}

pub fn begins_with(text: &str, operand: &str) -> bool {
    if operand.is_ascii() {
        let head = text.as_bytes().get(..operand.len());
        return head.is_some_and(|head| head.eq_ignore_ascii_case(operand.as_bytes()));
    }
    let mut text = text.chars().map(fold);
    operand.chars().map(fold).all(|c| text.next() == Some(c))
}

pub fn ends_with(text: &str, operand: &str) -> bool {
    if operand.is_ascii() {
        let start = text.len().checked_sub(operand.len());
        let tail = start.map(|start| &text.as_bytes()[start..]);
        return tail.is_some_and(|tail| tail.eq_ignore_ascii_case(operand.as_bytes()));
    }
    let mut text = text.chars().rev().map(fold);
    operand.chars().rev().map(fold).all(|c| text.next() == Some(c))
}

/// Whether a short text contains an operand; compares at every position.
fn contains(text: &str, operand: &str) -> bool {
    let Some(&first) = operand.as_bytes().first() else {
        return true;
    };
    if operand.is_ascii() {
        let bytes = text.as_bytes();
        let (lower, upper) = (first.to_ascii_lowercase(), first.to_ascii_uppercase());
        return memchr::memchr2_iter(lower, upper, bytes).any(|at| {
            let here = bytes.get(at..at + operand.len());
            here.is_some_and(|here| here.eq_ignore_ascii_case(operand.as_bytes()))
        });
    }
    text.char_indices()
        .any(|(at, _)| begins_with(&text[at..], operand))
}

/// The operands of `StringContains`, searched for together: the time depends on the length of the
/// text, not on the number or the content of the operands.
#[derive(Clone, Debug, Default)]
pub struct SearchTerms {
    terms: Vec<String>,
    /// Built when a text is searched that is too long for comparing at every position.
    automaton: OnceLock<AhoCorasick>,
}

impl SearchTerms {
    /// Comparing at every position costs text × operands; beyond this the automaton is cheaper, and
    /// a hostile text cannot make it slow.
    const NAIVE_STEPS_MAX: usize = 1 << 14;

    /// Whether the text is short enough to be searched without folding it first.
    pub fn is_short(&self, text: &str) -> bool {
        let terms: usize = self.terms.iter().map(String::len).sum();
        text.len().saturating_mul(terms) <= SearchTerms::NAIVE_STEPS_MAX
    }

    pub fn any_in_short(&self, text: &str) -> bool {
        self.terms.iter().any(|term| contains(text, term))
    }

    /// Whether a folded text contains one of the operands.
    pub fn any_in_folded(&self, folded_text: &str) -> bool {
        let automaton = self.automaton.get_or_init(|| {
            let terms = self.terms.iter().map(|term| folded(term));
            // The contiguous form needs the least memory among those that search at full speed.
            let kind = Some(AhoCorasickKind::ContiguousNFA);
            AhoCorasick::builder()
                .kind(kind)
                .build(terms)
                .expect("operands are far fewer than an automaton can have")
        });
        automaton.is_match(folded_text)
    }
}

impl From<Vec<String>> for SearchTerms {
    fn from(terms: Vec<String>) -> SearchTerms {
        SearchTerms {
            terms,
            automaton: OnceLock::new(),
        }
    }
}

impl Deref for SearchTerms {
    type Target = Vec<String>;

    fn deref(&self) -> &Vec<String> {
        &self.terms
    }
}

impl PartialEq for SearchTerms {
    fn eq(&self, other: &SearchTerms) -> bool {
        self.terms == other.terms
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn terms(all: &[&str]) -> SearchTerms {
        let all: Vec<String> = all.iter().map(|&term| term.to_owned()).collect();
        all.into()
    }

    #[test]
    fn letters_outside_ascii_never_stand_for_letters_inside() {
        assert!(!same("\u{131}", "I") && !same("\u{17f}", "s") && !same("\u{212a}", "k"));
        assert!(same("\u{df}", "\u{df}") && !same("\u{df}", "ss"));
        assert!(same("\u{3c2}\u{3c3}", "\u{3a3}\u{3a3}"));
    }

    #[test]
    fn long_texts_are_searched_for_all_terms_at_once() {
        let long = "A".repeat(1 << 12) + "b";
        let several = terms(&["x", "yz", &long]);
        let text = "a".repeat(1 << 20);
        assert!(!several.is_short(&text));
        assert!(!several.any_in_folded(&folded(&text)));
        assert!(several.any_in_folded(&folded(&(text + "B"))));
        assert!(terms(&["x", ""]).any_in_folded(""));
        assert!(!terms(&[]).any_in_folded("X"));
    }

    fn word() -> impl Strategy<Value = String> {
        prop_oneof!["[a-cA-C\u{e9}\u{c9}]{0,3}", "[a-b]{0,2}", any::<String>()]
    }

    proptest! {
        #[test]
        fn case_makes_no_difference(text in word(), operand in word()) {
            let other = folded(&text);
            for test in [same, begins_with, ends_with, contains] {
                prop_assert_eq!(test(&text, &operand), test(&other, &operand));
                prop_assert_eq!(test(&operand, &text), test(&operand, &other));
            }
        }

        #[test]
        fn agrees_with_folded_strings(text in word(), operands in prop::collection::vec(word(), 0..4)) {
            let a = folded(&text);
            for operand in &operands {
                let b = folded(operand);
                prop_assert_eq!(same(&text, operand), a == b);
                prop_assert_eq!(begins_with(&text, operand), a.starts_with(&b));
                prop_assert_eq!(ends_with(&text, operand), a.ends_with(&b));
                prop_assert_eq!(contains(&text, operand), a.contains(&b));
            }
            let any = operands.iter().any(|operand| a.contains(&folded(operand)));
            let search = SearchTerms::from(operands);
            prop_assert_eq!(search.any_in_short(&text), any);
            prop_assert_eq!(search.any_in_folded(&a), any);
        }
    }
}
