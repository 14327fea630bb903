//! Which events a subscription wants.

use crate::decimal::{self, Decimal};
use crate::envelope::{Envelope, Field};
use crate::json::{Kind, Raw};
use std::cmp::Ordering;
use std::fmt;

pub use crate::envelope::KeyStyle;

/// What an event must be to match. All parts must hold; a part that is not set always does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filter {
    /// None, an empty list or the one word `All` mean every type.
    pub included_event_types: Option<Vec<String>>,
    pub subject_begins_with: Option<String>,
    pub subject_ends_with: Option<String>,
    pub subject_case_sensitive: bool,
    /// Advanced filters look into arrays (`enableAdvancedFilteringOnArrays`); without it an array
    /// matches none of them.
    pub arrays: bool,
    pub advanced: Vec<AdvancedFilter>,
    /// How keys address the members of events with a custom schema.
    pub keys: KeyStyle,
}

/// A test of one value of the event.
#[derive(Clone, Debug, PartialEq)]
pub struct AdvancedFilter {
    /// A dot path such as `data.order.total`.
    pub key: String,
    pub test: Test,
}

/// An operator with its operands.
#[derive(Clone, Debug, PartialEq)]
pub enum Test {
    NumberIn(Vec<Decimal>),
    NumberNotIn(Vec<Decimal>),
    NumberLessThan(Decimal),
    NumberGreaterThan(Decimal),
    NumberLessThanOrEquals(Decimal),
    NumberGreaterThanOrEquals(Decimal),
    /// Ranges include both ends.
    NumberInRange(Vec<(Decimal, Decimal)>),
    NumberNotInRange(Vec<(Decimal, Decimal)>),
    BoolEquals(bool),
    StringIn(Vec<String>),
    StringNotIn(Vec<String>),
    StringBeginsWith(Vec<String>),
    StringEndsWith(Vec<String>),
    StringContains(Vec<String>),
    StringNotBeginsWith(Vec<String>),
    StringNotEndsWith(Vec<String>),
    StringNotContains(Vec<String>),
    IsNullOrUndefined,
    IsNotNull,
}

/// An operator by its name in the API, and how a test is made of it.
#[derive(Clone, Copy, Debug)]
pub struct Operator {
    pub name: &'static str,
    /// The edge module knows it too.
    pub on_edge: bool,
    pub operand: Operand,
}

/// What an operator takes: the member `value` (one) or `values` (a list), or neither.
#[derive(Clone, Copy, Debug)]
pub enum Operand {
    Number(fn(Decimal) -> Test),
    Numbers(fn(Vec<Decimal>) -> Test),
    Ranges(fn(Vec<(Decimal, Decimal)>) -> Test),
    Bool(fn(bool) -> Test),
    Strings(fn(Vec<String>) -> Test),
    Nothing(fn() -> Test),
}

/// Finds an operator by its name, in any case.
pub fn operator_from_name(name: &str) -> Option<&'static Operator> {
    OPERATORS.iter().find(|o| o.name.eq_ignore_ascii_case(name))
}

pub static OPERATORS: [Operator; 19] = {
    const fn edge(name: &'static str, operand: Operand) -> Operator {
        Operator {
            name,
            on_edge: true,
            operand,
        }
    }
    const fn cloud(name: &'static str, operand: Operand) -> Operator {
        Operator {
            name,
            on_edge: false,
            operand,
        }
    }
    use Operand::{Bool, Nothing, Number, Numbers, Ranges, Strings};
    [
        edge("NumberIn", Numbers(Test::NumberIn)),
        edge("NumberNotIn", Numbers(Test::NumberNotIn)),
        edge("NumberLessThan", Number(Test::NumberLessThan)),
        edge("NumberGreaterThan", Number(Test::NumberGreaterThan)),
        edge("NumberLessThanOrEquals", Number(Test::NumberLessThanOrEquals)),
        edge(
            "NumberGreaterThanOrEquals",
            Number(Test::NumberGreaterThanOrEquals),
        ),
        cloud("NumberInRange", Ranges(Test::NumberInRange)),
        cloud("NumberNotInRange", Ranges(Test::NumberNotInRange)),
        edge("BoolEquals", Bool(Test::BoolEquals)),
        edge("StringIn", Strings(Test::StringIn)),
        edge("StringNotIn", Strings(Test::StringNotIn)),
        edge("StringBeginsWith", Strings(Test::StringBeginsWith)),
        edge("StringEndsWith", Strings(Test::StringEndsWith)),
        edge("StringContains", Strings(Test::StringContains)),
        cloud("StringNotBeginsWith", Strings(Test::StringNotBeginsWith)),
        cloud("StringNotEndsWith", Strings(Test::StringNotEndsWith)),
        cloud("StringNotContains", Strings(Test::StringNotContains)),
        cloud("IsNullOrUndefined", Nothing(|| Test::IsNullOrUndefined)),
        cloud("IsNotNull", Nothing(|| Test::IsNotNull)),
    ]
};

impl Test {
    /// The operator's name in the API.
    pub fn operator(&self) -> &'static str {
        match self {
            Test::NumberIn(_) => "NumberIn",
            Test::NumberNotIn(_) => "NumberNotIn",
            Test::NumberLessThan(_) => "NumberLessThan",
            Test::NumberGreaterThan(_) => "NumberGreaterThan",
            Test::NumberLessThanOrEquals(_) => "NumberLessThanOrEquals",
            Test::NumberGreaterThanOrEquals(_) => "NumberGreaterThanOrEquals",
            Test::NumberInRange(_) => "NumberInRange",
            Test::NumberNotInRange(_) => "NumberNotInRange",
            Test::BoolEquals(_) => "BoolEquals",
            Test::StringIn(_) => "StringIn",
            Test::StringNotIn(_) => "StringNotIn",
            Test::StringBeginsWith(_) => "StringBeginsWith",
            Test::StringEndsWith(_) => "StringEndsWith",
            Test::StringContains(_) => "StringContains",
            Test::StringNotBeginsWith(_) => "StringNotBeginsWith",
            Test::StringNotEndsWith(_) => "StringNotEndsWith",
            Test::StringNotContains(_) => "StringNotContains",
            Test::IsNullOrUndefined => "IsNullOrUndefined",
            Test::IsNotNull => "IsNotNull",
        }
    }
}

/// The first part of a filter that an event does not satisfy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    EventType,
    SubjectPrefix,
    SubjectSuffix,
    /// Index into `Filter::advanced`.
    Advanced(usize),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::EventType => f.write_str("the event type is not in includedEventTypes"),
            Mismatch::SubjectPrefix => f.write_str("the subject does not satisfy subjectBeginsWith"),
            Mismatch::SubjectSuffix => f.write_str("the subject does not satisfy subjectEndsWith"),
            Mismatch::Advanced(index) => {
                write!(f, "the event does not satisfy advancedFilters[{index}]")
            }
        }
    }
}

impl Filter {
    /// True if there is nothing to test: every event matches.
    pub fn is_open(&self) -> bool {
        let empty = |text: &Option<String>| text.as_deref().is_none_or(str::is_empty);
        self.types().is_none()
            && empty(&self.subject_begins_with)
            && empty(&self.subject_ends_with)
            && self.advanced.is_empty()
    }

    /// Decides whether the event is wanted; if not, says which part refused it. `topic` is the
    /// topic's name as delivered events carry it.
    pub fn matches(&self, event: &Envelope<'_>, topic: &str) -> Result<(), Mismatch> {
        if let Some(types) = self.types() {
            let found = event.event_type_field().and_then(Field::as_text);
            if !found.is_some_and(|found| types.iter().any(|t| same(&found, t))) {
                return Err(Mismatch::EventType);
            }
        }
        if self.subject_begins_with.is_some() || self.subject_ends_with.is_some() {
            self.matches_subject(event)?;
        }
        for (index, filter) in self.advanced.iter().enumerate() {
            let field = event.lookup(&filter.key, self.keys, topic);
            if !filter.test.holds(field, self.arrays) {
                return Err(Mismatch::Advanced(index));
            }
        }
        Ok(())
    }

    /// Puts a mismatch of this filter into words.
    pub fn explain(&self, mismatch: Mismatch) -> String {
        match mismatch {
            Mismatch::Advanced(index) if index < self.advanced.len() => {
                let AdvancedFilter { key, test } = &self.advanced[index];
                format!("{mismatch}: {} on {key:?}", test.operator())
            }
            _ => mismatch.to_string(),
        }
    }

    /// The types to choose from; none if every type will do.
    fn types(&self) -> Option<&[String]> {
        match self.included_event_types.as_deref() {
            None | Some([]) => None,
            Some([one]) if one.eq_ignore_ascii_case("All") => None,
            types => types,
        }
    }

    fn matches_subject(&self, event: &Envelope<'_>) -> Result<(), Mismatch> {
        let subject = event.subject_field().and_then(Field::as_text).unwrap_or_default();
        let prefix = self.subject_begins_with.as_deref().unwrap_or_default();
        let suffix = self.subject_ends_with.as_deref().unwrap_or_default();
        let (begins, ends) = if self.subject_case_sensitive {
            (subject.starts_with(prefix), subject.ends_with(suffix))
        } else {
            (begins_with(&subject, prefix), ends_with(&subject, suffix))
        };
        if !begins {
            return Err(Mismatch::SubjectPrefix);
        }
        if !ends {
            return Err(Mismatch::SubjectSuffix);
        }
        Ok(())
    }
}

impl Test {
    /// Tests what the key addresses; none stands for an absent member or a null.
    fn holds(&self, field: Option<Field<'_>>, arrays: bool) -> bool {
        let Some(field) = field else {
            // Three of the negative operators hold for nothing, three do not: so it is documented.
            return matches!(
                self,
                Test::NumberNotIn(_)
                    | Test::NumberNotInRange(_)
                    | Test::StringNotIn(_)
                    | Test::IsNullOrUndefined
            );
        };
        match self {
            Test::IsNullOrUndefined => return false,
            Test::IsNotNull => return true,
            _ => {}
        }
        match field.raw().map(Raw::kind) {
            Some(Kind::Object) => false,
            Some(Kind::Array) => arrays && field.raw().is_some_and(|array| self.holds_for_array(array)),
            // A value of another type satisfies neither an operator nor its negation.
            _ => self.hits(field).is_some_and(|hit| hit != self.is_negative()),
        }
    }

    fn holds_for_array(&self, array: Raw<'_>) -> bool {
        let mut hit = false;
        for element in array.elements() {
            if element.kind() == Kind::Object {
                return false;
            }
            // Elements of another type are passed over.
            hit |= self.hits(Field::Value(element)) == Some(true);
        }
        hit != self.is_negative()
    }

    fn is_negative(&self) -> bool {
        matches!(
            self,
            Test::NumberNotIn(_)
                | Test::NumberNotInRange(_)
                | Test::StringNotIn(_)
                | Test::StringNotBeginsWith(_)
                | Test::StringNotEndsWith(_)
                | Test::StringNotContains(_)
        )
    }

    /// Whether a value is what the operands describe, before any negation; none if the value is not
    /// of the operator's type.
    fn hits(&self, field: Field<'_>) -> Option<bool> {
        let number = |test: &dyn Fn(&str) -> Option<bool>| test(field.raw()?.as_number()?);
        let order = |operand: &Decimal, wanted: fn(Ordering) -> bool| {
            number(&|text| decimal::compare(text, operand).map(wanted))
        };
        let strings = |operands: &[String], test: fn(&str, &str) -> bool| {
            let text = field.as_text()?;
            Some(operands.iter().any(|operand| test(&text, operand)))
        };
        match self {
            Test::NumberIn(values) | Test::NumberNotIn(values) => number(&|text| {
                let equals = |v: &Decimal| decimal::compare(text, v) == Some(Ordering::Equal);
                Some(values.iter().any(equals))
            }),
            Test::NumberInRange(ranges) | Test::NumberNotInRange(ranges) => number(&|text| {
                let within = |(low, high): &(Decimal, Decimal)| {
                    decimal::compare(text, low).is_some_and(Ordering::is_ge)
                        && decimal::compare(text, high).is_some_and(Ordering::is_le)
                };
                Some(ranges.iter().any(within))
            }),
            Test::NumberLessThan(value) => order(value, Ordering::is_lt),
            Test::NumberGreaterThan(value) => order(value, Ordering::is_gt),
            Test::NumberLessThanOrEquals(value) => order(value, Ordering::is_le),
            Test::NumberGreaterThanOrEquals(value) => order(value, Ordering::is_ge),
            Test::BoolEquals(value) => Some(field.raw()?.as_bool()? == *value),
            Test::StringIn(values) | Test::StringNotIn(values) => strings(values, same),
            Test::StringBeginsWith(values) | Test::StringNotBeginsWith(values) => {
                strings(values, begins_with)
            }
            Test::StringEndsWith(values) | Test::StringNotEndsWith(values) => strings(values, ends_with),
            Test::StringContains(values) | Test::StringNotContains(values) => strings(values, contains),
            Test::IsNullOrUndefined | Test::IsNotNull => None,
        }
    }
}

// Text without regard to case, character by character as .NET's ordinal comparison does it. No
// character outside ASCII folds to one inside it, so an ASCII operand is compared as bytes.

fn fold(c: char) -> char {
    if c.is_ascii() {
        return c.to_ascii_uppercase();
    }
    let mut upper = c.to_uppercase();
    match (upper.next(), upper.next()) {
        (Some(one), None) if !one.is_ascii() => one,
        _ => c,
    }
}

fn same(text: &str, operand: &str) -> bool {
    if operand.is_ascii() {
        return text.eq_ignore_ascii_case(operand);
    }
    text.chars().map(fold).eq(operand.chars().map(fold))
}

fn begins_with(text: &str, operand: &str) -> bool {
    if operand.is_ascii() {
        let head = text.as_bytes().get(..operand.len());
        return head.is_some_and(|head| head.eq_ignore_ascii_case(operand.as_bytes()));
    }
    let mut text = text.chars().map(fold);
    operand.chars().map(fold).all(|c| text.next() == Some(c))
}

fn ends_with(text: &str, operand: &str) -> bool {
    if operand.is_ascii() {
        let start = text.len().checked_sub(operand.len());
        let tail = start.map(|start| &text.as_bytes()[start..]);
        return tail.is_some_and(|tail| tail.eq_ignore_ascii_case(operand.as_bytes()));
    }
    let mut text = text.chars().rev().map(fold);
    operand.chars().rev().map(fold).all(|c| text.next() == Some(c))
}

fn contains(text: &str, operand: &str) -> bool {
    /// Trying every place costs text × operand; beyond this a search in linear time is cheaper,
    /// and a hostile text cannot make it slow.
    const STEPS_MAX: usize = 1 << 14;
    let Some(&first) = operand.as_bytes().first() else {
        return true;
    };
    if text.len().saturating_mul(operand.len()) > STEPS_MAX {
        let folded = |text: &str| text.chars().map(fold).collect::<String>();
        return memchr::memmem::find(folded(text).as_bytes(), folded(operand).as_bytes()).is_some();
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Schema;
    use proptest::prelude::*;

    fn n(text: &str) -> Decimal {
        Decimal::parse(text).unwrap()
    }

    fn ns(texts: &[&str]) -> Vec<Decimal> {
        texts.iter().map(|text| n(text)).collect()
    }

    fn ss(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    fn ranges(texts: &[(&str, &str)]) -> Vec<(Decimal, Decimal)> {
        texts.iter().map(|(low, high)| (n(low), n(high))).collect()
    }

    fn advanced(key: &str, test: Test, arrays: bool) -> Filter {
        Filter {
            arrays,
            advanced: vec![AdvancedFilter {
                key: key.to_owned(),
                test,
            }],
            ..Filter::default()
        }
    }

    fn matches(filter: &Filter, schema: Schema, event: &str) -> Result<(), Mismatch> {
        let object = Raw::parse(event).unwrap();
        filter.matches(&Envelope::read(schema, object, None), "/the/topic")
    }

    /// Tests one value at `data.v`; the empty text leaves it out.
    fn holds(test: &Test, value: &str, arrays: bool) -> bool {
        let event = match value {
            "" => r#"{"data":{}}"#.to_owned(),
            _ => format!(r#"{{"data":{{"v":{value}}}}}"#),
        };
        let filter = advanced("data.v", test.clone(), arrays);
        matches(&filter, Schema::EventGrid, &event).is_ok()
    }

    struct Row {
        test: Test,
        matching: &'static [&'static str],
        not_matching: &'static [&'static str],
        missing: bool,
        /// Arrays, tested with the flag; without it none matches.
        arrays_matching: &'static [&'static str],
        arrays_not_matching: &'static [&'static str],
    }

    fn check(row: Row) {
        let Row { test, .. } = &row;
        for value in row.matching {
            assert!(holds(test, value, false), "{test:?} should match {value}");
            assert!(
                holds(test, value, true),
                "{test:?} should match {value} with arrays on"
            );
        }
        for value in row.not_matching {
            assert!(!holds(test, value, false), "{test:?} should not match {value}");
            assert!(
                !holds(test, value, true),
                "{test:?} should not match {value} with arrays on"
            );
        }
        for arrays in [false, true] {
            assert_eq!(holds(test, "", arrays), row.missing, "{test:?} missing");
            assert_eq!(holds(test, "null", arrays), row.missing, "{test:?} null");
        }
        for value in row.arrays_matching {
            assert!(
                !holds(test, value, false),
                "{test:?} should not match {value} with arrays off"
            );
            assert!(
                holds(test, value, true),
                "{test:?} should match {value} with arrays on"
            );
        }
        for value in row.arrays_not_matching {
            assert!(
                !holds(test, value, false),
                "{test:?} should not match {value} with arrays off"
            );
            assert!(
                !holds(test, value, true),
                "{test:?} should not match {value} with arrays on"
            );
        }
    }

    #[test]
    fn number_operators() {
        check(Row {
            test: Test::NumberIn(ns(&["1", "2.5", "1e400", "9007199254740993"])),
            matching: &[
                "1",
                "1.0",
                "10e-1",
                "25e-1",
                "1e400",
                "10.0e399",
                "9007199254740993",
            ],
            not_matching: &[
                "2",
                "-1",
                "9007199254740992",
                "1e401",
                "\"1\"",
                "true",
                "{}",
                "{\"v\":1}",
            ],
            missing: false,
            arrays_matching: &["[1]", "[7,\"x\",null,2.5]", "[[3],1]"],
            arrays_not_matching: &[
                "[]",
                "[3,4]",
                "[\"1\"]",
                "[1,{}]",
                "[{\"v\":1}]",
                "[null]",
                "[[1]]",
            ],
        });
        check(Row {
            test: Test::NumberNotIn(ns(&["1", "2.5"])),
            matching: &["2", "0.1", "-1", "1e400"],
            not_matching: &["1", "1.00", "2.5", "\"7\"", "false", "{}"],
            missing: true,
            arrays_matching: &["[]", "[3]", "[\"1\"]", "[3,true]", "[null]"],
            arrays_not_matching: &["[1]", "[3,1]", "[\"x\",2.5]", "[3,{}]"],
        });
        check(Row {
            test: Test::NumberLessThan(n("0.3")),
            matching: &["0.2", "0.29999999999999999999999", "-5", "-1e400"],
            not_matching: &["0.3", "0.30000000000000004", "1", "\"0\"", "true", "{}"],
            missing: false,
            arrays_matching: &["[5,0.1]"],
            arrays_not_matching: &["[]", "[0.3,4]", "[\"0.1\"]"],
        });
        check(Row {
            test: Test::NumberGreaterThan(n("9007199254740992")),
            matching: &["9007199254740993", "1e17", "1e400"],
            not_matching: &[
                "9007199254740992",
                "9007199254740992.0",
                "0",
                "-1e400",
                "\"1e17\"",
                "{}",
            ],
            missing: false,
            arrays_matching: &["[1,9007199254740992.1]"],
            arrays_not_matching: &["[1]", "[]"],
        });
        check(Row {
            test: Test::NumberLessThanOrEquals(n("10")),
            matching: &["10", "10.0", "9.99", "-10"],
            not_matching: &["10.01", "\"10\"", "false", "{}"],
            missing: false,
            arrays_matching: &["[11,10]"],
            arrays_not_matching: &["[11]", "[]"],
        });
        check(Row {
            test: Test::NumberGreaterThanOrEquals(n("10")),
            matching: &["10", "1e1", "10.01"],
            not_matching: &["9.99", "-10", "\"10\"", "{}"],
            missing: false,
            arrays_matching: &["[9,10]"],
            arrays_not_matching: &["[9]", "[]"],
        });
        check(Row {
            test: Test::NumberInRange(ranges(&[("1", "2"), ("10", "10")])),
            matching: &["1", "1.5", "2", "2.0", "10"],
            not_matching: &["0.999", "2.001", "9", "-1.5", "\"1\"", "{}"],
            missing: false,
            arrays_matching: &["[5,1]", "[\"x\",10]"],
            arrays_not_matching: &["[5]", "[]", "[\"1\"]", "[1,{}]"],
        });
        check(Row {
            test: Test::NumberNotInRange(ranges(&[("1", "2"), ("10", "10")])),
            matching: &["0.999", "2.001", "9", "-1.5"],
            not_matching: &["1", "1.5", "2", "10", "\"5\"", "true", "{}"],
            missing: true,
            arrays_matching: &["[5]", "[]", "[\"1\",3]"],
            arrays_not_matching: &["[5,1]", "[10]", "[5,{}]"],
        });
    }

    #[test]
    fn bool_and_null_operators() {
        check(Row {
            test: Test::BoolEquals(true),
            matching: &["true"],
            not_matching: &["false", "\"true\"", "1", "{}"],
            missing: false,
            arrays_matching: &["[false,true]", "[1,true]"],
            arrays_not_matching: &["[]", "[false]", "[\"true\"]", "[true,{}]"],
        });
        check(Row {
            test: Test::BoolEquals(false),
            matching: &["false"],
            not_matching: &["true", "0", "\"\"", "{}"],
            missing: false,
            arrays_matching: &["[false,true]"],
            arrays_not_matching: &["[]", "[true]"],
        });
        // These two ask whether there is a value, not what it is: arrays and objects are values.
        check(Row {
            test: Test::IsNullOrUndefined,
            matching: &[],
            not_matching: &["0", "\"\"", "false", "{}", "[]", "[null]"],
            missing: true,
            arrays_matching: &[],
            arrays_not_matching: &["[1]"],
        });
        check(Row {
            test: Test::IsNotNull,
            matching: &["0", "\"\"", "false", "{}", "[]", "[null]", "[{}]"],
            not_matching: &[],
            missing: false,
            arrays_matching: &[],
            arrays_not_matching: &[],
        });
    }

    #[test]
    fn string_operators() {
        check(Row {
            test: Test::StringIn(ss(&["Blue", "\u{e9}t\u{e9}", "a\"b"])),
            matching: &[
                "\"blue\"",
                "\"BLUE\"",
                "\"\u{c9}T\u{c9}\"",
                "\"bl\\u0075e\"",
                "\"A\\\"B\"",
            ],
            not_matching: &["\"blu\"", "\"blue \"", "\"\"", "\"ete\"", "1", "true", "{}"],
            missing: false,
            arrays_matching: &["[\"red\",\"blue\"]", "[1,\"BLUE\"]"],
            arrays_not_matching: &["[]", "[\"red\"]", "[1]", "[\"blue\",{}]"],
        });
        check(Row {
            test: Test::StringNotIn(ss(&["Blue", "red"])),
            matching: &["\"green\"", "\"\"", "\"blues\""],
            not_matching: &["\"BLUE\"", "\"Red\"", "1", "true", "{}"],
            missing: true,
            arrays_matching: &["[]", "[\"green\"]", "[1]"],
            arrays_not_matching: &["[\"green\",\"blue\"]", "[\"green\",{}]"],
        });
        check(Row {
            test: Test::StringBeginsWith(ss(&["Ab", "\u{d6}l"])),
            matching: &["\"ab\"", "\"ABC\"", "\"\u{f6}Ltank\"", "\"\\u0061b\""],
            not_matching: &["\"a\"", "\"cab\"", "\"ol\"", "5", "{}"],
            missing: false,
            arrays_matching: &["[\"x\",\"abc\"]"],
            arrays_not_matching: &["[]", "[\"x\"]", "[1]"],
        });
        check(Row {
            test: Test::StringEndsWith(ss(&["Ab", "\u{d6}l"])),
            matching: &["\"ab\"", "\"cAB\"", "\"Roh\u{f6}L\""],
            not_matching: &["\"b\"", "\"abc\"", "\"\u{e9}b\"", "5", "{}"],
            missing: false,
            arrays_matching: &["[\"x\",\"cab\"]"],
            arrays_not_matching: &["[]", "[\"x\"]", "[1]"],
        });
        check(Row {
            test: Test::StringContains(ss(&["Ab", "\u{d6}l"])),
            matching: &[
                "\"ab\"",
                "\"xxaBxx\"",
                "\"Roh\u{f6}Ltank\"",
                "\"aab\"",
                "\"\u{e9}ab\"",
            ],
            not_matching: &["\"a\"", "\"a b\"", "\"\"", "5", "{}"],
            missing: false,
            arrays_matching: &["[\"x\",\"cabs\"]"],
            arrays_not_matching: &["[]", "[\"x\"]", "[1]"],
        });
        check(Row {
            test: Test::StringNotBeginsWith(ss(&["Ab", "x"])),
            matching: &["\"a\"", "\"cab\"", "\"\""],
            not_matching: &["\"ABC\"", "\"X\"", "5", "true", "{}"],
            missing: false,
            arrays_matching: &["[]", "[\"a\"]", "[1]"],
            arrays_not_matching: &["[\"a\",\"abc\"]", "[\"a\",{}]"],
        });
        check(Row {
            test: Test::StringNotEndsWith(ss(&["Ab", "x"])),
            matching: &["\"b\"", "\"abc\"", "\"\""],
            not_matching: &["\"cAB\"", "\"X\"", "5", "{}"],
            missing: false,
            arrays_matching: &["[]", "[\"b\"]", "[1]"],
            arrays_not_matching: &["[\"b\",\"cab\"]"],
        });
        check(Row {
            test: Test::StringNotContains(ss(&["Ab", "x"])),
            matching: &["\"a\"", "\"a b\"", "\"\""],
            not_matching: &["\"cABs\"", "\"aXa\"", "5", "{}"],
            missing: false,
            arrays_matching: &["[]", "[\"a\"]", "[1]"],
            arrays_not_matching: &["[\"a\",\"cabs\"]"],
        });
    }

    #[test]
    fn every_operator_is_known_by_its_name() {
        for operator in &OPERATORS {
            let test = match operator.operand {
                Operand::Number(make) => make(n("1")),
                Operand::Numbers(make) => make(ns(&["1"])),
                Operand::Ranges(make) => make(ranges(&[("1", "2")])),
                Operand::Bool(make) => make(true),
                Operand::Strings(make) => make(ss(&["a"])),
                Operand::Nothing(make) => make(),
            };
            assert_eq!(test.operator(), operator.name);
            let found = operator_from_name(&operator.name.to_uppercase()).unwrap();
            assert_eq!(found.name, operator.name);
        }
        assert_eq!(OPERATORS.iter().filter(|o| o.on_edge).count(), 12);
        assert!(operator_from_name("StringMatches").is_none());
    }

    #[test]
    fn types_and_subjects() {
        let check = |filter: Filter, expected: Result<(), Mismatch>| {
            let event = r#"{"eventType":"Shop.Order","subject":"/Shops/1/orders/7.JSON"}"#;
            assert_eq!(matches(&filter, Schema::EventGrid, event), expected, "{filter:?}");
        };
        let of_types = |types: &[&str]| Filter {
            included_event_types: Some(ss(types)),
            ..Filter::default()
        };
        let of_subject = |prefix: &str, suffix: &str, subject_case_sensitive| Filter {
            subject_begins_with: Some(prefix.to_owned()),
            subject_ends_with: Some(suffix.to_owned()),
            subject_case_sensitive,
            ..Filter::default()
        };
        check(Filter::default(), Ok(()));
        check(of_types(&[]), Ok(()));
        check(of_types(&["All"]), Ok(()));
        check(of_types(&["x", "shop.order"]), Ok(()));
        check(of_types(&["x", "All"]), Err(Mismatch::EventType));
        check(of_types(&["Shop"]), Err(Mismatch::EventType));
        check(of_subject("", "", true), Ok(()));
        check(of_subject("/shops/", ".json", false), Ok(()));
        check(of_subject("/shops/", "", true), Err(Mismatch::SubjectPrefix));
        check(of_subject("/Shops/", ".json", true), Err(Mismatch::SubjectSuffix));
        check(of_subject("/Shops/", ".JSON", true), Ok(()));
        check(
            of_subject("/stores/", ".json", false),
            Err(Mismatch::SubjectPrefix),
        );
        let bare = of_subject("/", "", false);
        assert_eq!(
            matches(&bare, Schema::CloudEvent, "{}"),
            Err(Mismatch::SubjectPrefix)
        );
        assert_eq!(
            matches(&of_types(&["t"]), Schema::Custom, "{}"),
            Err(Mismatch::EventType)
        );
    }

    #[test]
    fn all_parts_must_hold_and_the_first_that_does_not_is_named() {
        let entry = |key: &str, test| AdvancedFilter {
            key: key.to_owned(),
            test,
        };
        let filter = Filter {
            included_event_types: Some(ss(&["t"])),
            advanced: vec![
                entry("data.n", Test::NumberGreaterThan(n("1"))),
                entry("data.n", Test::NumberLessThan(n("5"))),
                entry("TOPIC", Test::StringEndsWith(ss(&["/topic"]))),
                entry("dataVersion", Test::StringIn(ss(&[""]))),
            ],
            ..Filter::default()
        };
        let event = |n: u8| format!(r#"{{"eventType":"t","data":{{"n":{n}}}}}"#);
        assert_eq!(matches(&filter, Schema::EventGrid, &event(3)), Ok(()));
        assert_eq!(
            matches(&filter, Schema::EventGrid, &event(1)),
            Err(Mismatch::Advanced(0))
        );
        let refused = matches(&filter, Schema::EventGrid, &event(9)).unwrap_err();
        assert_eq!(
            filter.explain(refused),
            "the event does not satisfy advancedFilters[1]: NumberLessThan on \"data.n\""
        );
        assert!(!filter.is_open() && Filter::default().is_open());
    }

    // The documented example: a number among the extension attributes, filtered with a string operator.
    #[test]
    fn extension_attributes_compare_as_strings_too() {
        let event = r#"{"id":"1","source":"/s","type":"t","comexampleother":51,"on":true}"#;
        let check = |key: &str, test: Test, expected: bool| {
            let filter = advanced(key, test, false);
            assert_eq!(
                matches(&filter, Schema::CloudEvent, event).is_ok(),
                expected,
                "{filter:?}"
            );
        };
        check("comexampleother", Test::StringBeginsWith(ss(&["5", "1"])), true);
        check(
            "comexampleother",
            Test::StringNotBeginsWith(ss(&["5", "1"])),
            false,
        );
        check("comexampleother", Test::NumberIn(ns(&["51"])), true);
        check("on", Test::StringIn(ss(&["TRUE"])), true);
        check("on", Test::BoolEquals(true), true);
        check("eventtype", Test::StringIn(ss(&["T"])), true);
    }

    #[test]
    fn letters_outside_ascii_never_stand_for_letters_inside() {
        assert!(!same("\u{131}", "I") && !same("\u{17f}", "s") && !same("\u{212a}", "k"));
        assert!(same("\u{df}", "\u{df}") && !same("\u{df}", "ss"));
        assert!(same("\u{3c2}\u{3c3}", "\u{3a3}\u{3a3}"));
    }

    #[test]
    fn long_texts_are_searched_in_linear_time() {
        let text = "a".repeat(1 << 20);
        assert!(!contains(&text, &("A".repeat(1 << 18) + "b")));
        assert!(contains(&(text + "B"), &("A".repeat(1 << 18) + "b")));
    }

    fn word() -> impl Strategy<Value = String> {
        prop_oneof!["[a-cA-C\u{e9}\u{c9}]{0,3}", "[a-b]{0,2}", any::<String>()]
    }

    fn quoted(text: &str) -> String {
        let mut out = Vec::new();
        crate::json::write_string(text, &mut out);
        String::from_utf8(out).unwrap()
    }

    proptest! {
        #[test]
        fn string_operators_and_their_negations_are_complements(
            text in word(), operands in prop::collection::vec(word(), 0..4), arrays: bool,
        ) {
            let value = quoted(&text);
            type Make = fn(Vec<String>) -> Test;
            let pairs: [(Make, Make); 4] = [
                (Test::StringIn, Test::StringNotIn),
                (Test::StringBeginsWith, Test::StringNotBeginsWith),
                (Test::StringEndsWith, Test::StringNotEndsWith),
                (Test::StringContains, Test::StringNotContains),
            ];
            for (positive, negative) in pairs {
                let yes = holds(&positive(operands.clone()), &value, arrays);
                let no = holds(&negative(operands.clone()), &value, arrays);
                prop_assert_ne!(yes, no);
            }
        }

        #[test]
        fn number_operators_and_their_negations_are_complements(
            v in -5i32..5, operands in prop::collection::vec((-5i32..5, 0i32..4), 0..3),
        ) {
            let value = format!("{v}.0");
            let single: Vec<Decimal> = operands.iter().map(|(a, _)| n(&a.to_string())).collect();
            let pair: Vec<_> = operands.iter()
                .map(|(a, size)| (n(&a.to_string()), n(&(a + size).to_string()))).collect();
            let equal = operands.iter().any(|(a, _)| *a == v);
            let within = operands.iter().any(|(a, size)| (*a..=a + size).contains(&v));
            prop_assert_eq!(holds(&Test::NumberIn(single.clone()), &value, false), equal);
            prop_assert_eq!(holds(&Test::NumberNotIn(single.clone()), &value, false), !equal);
            prop_assert_eq!(holds(&Test::NumberInRange(pair.clone()), &value, false), within);
            prop_assert_eq!(holds(&Test::NumberNotInRange(pair), &value, false), !within);
            for operand in single {
                let less = holds(&Test::NumberLessThan(operand.clone()), &value, false);
                let at_least = holds(&Test::NumberGreaterThanOrEquals(operand.clone()), &value, false);
                let greater = holds(&Test::NumberGreaterThan(operand.clone()), &value, false);
                let at_most = holds(&Test::NumberLessThanOrEquals(operand), &value, false);
                prop_assert!(less != at_least && greater != at_most);
            }
        }

        #[test]
        fn case_makes_no_difference(text in word(), operand in word()) {
            let other: String = text.chars().map(fold).collect();
            for test in [same, begins_with, ends_with, contains] {
                prop_assert_eq!(test(&text, &operand), test(&other, &operand));
                prop_assert_eq!(test(&operand, &text), test(&operand, &other));
            }
        }

        #[test]
        fn agrees_with_folded_strings(text in word(), operand in word()) {
            let folded = |text: &str| text.chars().map(fold).collect::<String>();
            let (a, b) = (folded(&text), folded(&operand));
            prop_assert_eq!(same(&text, &operand), a == b);
            prop_assert_eq!(begins_with(&text, &operand), a.starts_with(&b));
            prop_assert_eq!(ends_with(&text, &operand), a.ends_with(&b));
            prop_assert_eq!(contains(&text, &operand), a.contains(&b));
        }
    }
}
