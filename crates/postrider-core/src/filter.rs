//! Filters: which events a subscription gets.

mod input;
mod text;

use crate::decimal::{self, Decimal};
use crate::envelope::{EnvelopeField, EventEnvelope};
use crate::json::{JsonKind, RawJson};
use input::LookedUpField;
pub use input::{FilterBudget, FilterBudgetExceeded, FilterInput};
use std::cmp::Ordering;
use std::fmt;
pub use text::SearchTerms;
use text::{begins_with, ends_with, same};

pub use crate::envelope::KeyStyle;

/// The conditions that an event must meet. All parts must hold; a part that is not set always does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventFilter {
    /// None, an empty list or the single word `All` mean every type.
    pub included_event_types: Option<Vec<String>>,
    pub subject_begins_with: Option<String>,
    pub subject_ends_with: Option<String>,
    pub subject_case_sensitive: bool,
    /// Whether advanced filters look into arrays (`enableAdvancedFilteringOnArrays`); otherwise an
    /// array matches none of them.
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
    pub test: FilterCondition,
}

/// An operator with its operands.
#[derive(Clone, Debug, PartialEq)]
pub enum FilterCondition {
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
    StringContains(SearchTerms),
    StringNotBeginsWith(Vec<String>),
    StringNotEndsWith(Vec<String>),
    StringNotContains(SearchTerms),
    IsNullOrUndefined,
    IsNotNull,
}

/// An operator by its name in the API, and how to make a test of it.
#[derive(Clone, Copy, Debug)]
pub struct FilterOperator {
    pub name: &'static str,
    /// Whether the edge module has this operator too.
    pub on_edge: bool,
    pub operand: OperandKind,
}

/// The operand of an operator: the member `value` (one) or `values` (a list), or neither.
#[derive(Clone, Copy, Debug)]
pub enum OperandKind {
    Number(fn(Decimal) -> FilterCondition),
    Numbers(fn(Vec<Decimal>) -> FilterCondition),
    Ranges(fn(Vec<(Decimal, Decimal)>) -> FilterCondition),
    Bool(fn(bool) -> FilterCondition),
    Strings(fn(Vec<String>) -> FilterCondition),
    Nothing(fn() -> FilterCondition),
}

/// Finds an operator by its name, in any case.
pub fn operator_from_name(name: &str) -> Option<&'static FilterOperator> {
    OPERATORS.iter().find(|o| o.name.eq_ignore_ascii_case(name))
}

pub static OPERATORS: [FilterOperator; 19] = {
    const fn edge(name: &'static str, operand: OperandKind) -> FilterOperator {
        FilterOperator {
            name,
            on_edge: true,
            operand,
        }
    }
    const fn cloud(name: &'static str, operand: OperandKind) -> FilterOperator {
        FilterOperator {
            name,
            on_edge: false,
            operand,
        }
    }
    use OperandKind::{Bool, Nothing, Number, Numbers, Ranges, Strings};
    [
        edge("NumberIn", Numbers(FilterCondition::NumberIn)),
        edge("NumberNotIn", Numbers(FilterCondition::NumberNotIn)),
        edge("NumberLessThan", Number(FilterCondition::NumberLessThan)),
        edge("NumberGreaterThan", Number(FilterCondition::NumberGreaterThan)),
        edge(
            "NumberLessThanOrEquals",
            Number(FilterCondition::NumberLessThanOrEquals),
        ),
        edge(
            "NumberGreaterThanOrEquals",
            Number(FilterCondition::NumberGreaterThanOrEquals),
        ),
        cloud("NumberInRange", Ranges(FilterCondition::NumberInRange)),
        cloud("NumberNotInRange", Ranges(FilterCondition::NumberNotInRange)),
        edge("BoolEquals", Bool(FilterCondition::BoolEquals)),
        edge("StringIn", Strings(FilterCondition::StringIn)),
        edge("StringNotIn", Strings(FilterCondition::StringNotIn)),
        edge("StringBeginsWith", Strings(FilterCondition::StringBeginsWith)),
        edge("StringEndsWith", Strings(FilterCondition::StringEndsWith)),
        edge(
            "StringContains",
            Strings(|terms| FilterCondition::StringContains(terms.into())),
        ),
        cloud(
            "StringNotBeginsWith",
            Strings(FilterCondition::StringNotBeginsWith),
        ),
        cloud("StringNotEndsWith", Strings(FilterCondition::StringNotEndsWith)),
        cloud(
            "StringNotContains",
            Strings(|terms| FilterCondition::StringNotContains(terms.into())),
        ),
        cloud(
            "IsNullOrUndefined",
            Nothing(|| FilterCondition::IsNullOrUndefined),
        ),
        cloud("IsNotNull", Nothing(|| FilterCondition::IsNotNull)),
    ]
};

impl FilterCondition {
    /// The operator's name in the API.
    pub fn operator(&self) -> &'static str {
        match self {
            FilterCondition::NumberIn(_) => "NumberIn",
            FilterCondition::NumberNotIn(_) => "NumberNotIn",
            FilterCondition::NumberLessThan(_) => "NumberLessThan",
            FilterCondition::NumberGreaterThan(_) => "NumberGreaterThan",
            FilterCondition::NumberLessThanOrEquals(_) => "NumberLessThanOrEquals",
            FilterCondition::NumberGreaterThanOrEquals(_) => "NumberGreaterThanOrEquals",
            FilterCondition::NumberInRange(_) => "NumberInRange",
            FilterCondition::NumberNotInRange(_) => "NumberNotInRange",
            FilterCondition::BoolEquals(_) => "BoolEquals",
            FilterCondition::StringIn(_) => "StringIn",
            FilterCondition::StringNotIn(_) => "StringNotIn",
            FilterCondition::StringBeginsWith(_) => "StringBeginsWith",
            FilterCondition::StringEndsWith(_) => "StringEndsWith",
            FilterCondition::StringContains(_) => "StringContains",
            FilterCondition::StringNotBeginsWith(_) => "StringNotBeginsWith",
            FilterCondition::StringNotEndsWith(_) => "StringNotEndsWith",
            FilterCondition::StringNotContains(_) => "StringNotContains",
            FilterCondition::IsNullOrUndefined => "IsNullOrUndefined",
            FilterCondition::IsNotNull => "IsNotNull",
        }
    }

    /// The operands of the test.
    pub fn operands(&self) -> FilterOperands<'_> {
        match self {
            FilterCondition::NumberIn(values) | FilterCondition::NumberNotIn(values) => {
                FilterOperands::Numbers(values)
            }
            FilterCondition::NumberLessThan(value)
            | FilterCondition::NumberGreaterThan(value)
            | FilterCondition::NumberLessThanOrEquals(value)
            | FilterCondition::NumberGreaterThanOrEquals(value) => FilterOperands::Number(value),
            FilterCondition::NumberInRange(ranges) | FilterCondition::NumberNotInRange(ranges) => {
                FilterOperands::Ranges(ranges)
            }
            FilterCondition::BoolEquals(value) => FilterOperands::Bool(*value),
            FilterCondition::StringIn(values)
            | FilterCondition::StringNotIn(values)
            | FilterCondition::StringBeginsWith(values)
            | FilterCondition::StringEndsWith(values)
            | FilterCondition::StringNotBeginsWith(values)
            | FilterCondition::StringNotEndsWith(values) => FilterOperands::Strings(values),
            FilterCondition::StringContains(terms) | FilterCondition::StringNotContains(terms) => {
                FilterOperands::Strings(terms)
            }
            FilterCondition::IsNullOrUndefined | FilterCondition::IsNotNull => FilterOperands::Nothing,
        }
    }
}

/// The values of a test, in the form that its [`OperandKind`] prescribes.
#[derive(Clone, Copy, Debug)]
pub enum FilterOperands<'a> {
    Number(&'a Decimal),
    Numbers(&'a [Decimal]),
    Ranges(&'a [(Decimal, Decimal)]),
    Bool(bool),
    Strings(&'a [String]),
    Nothing,
}

/// The first part of a filter that an event does not satisfy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterMismatch {
    EventType,
    SubjectPrefix,
    SubjectSuffix,
    /// Index into `EventFilter::advanced`.
    Advanced(usize),
}

impl fmt::Display for FilterMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FilterMismatch::EventType => f.write_str("the event type is not in includedEventTypes"),
            FilterMismatch::SubjectPrefix => f.write_str("the subject does not satisfy subjectBeginsWith"),
            FilterMismatch::SubjectSuffix => f.write_str("the subject does not satisfy subjectEndsWith"),
            FilterMismatch::Advanced(index) => {
                write!(f, "the event does not satisfy advancedFilters[{index}]")
            }
        }
    }
}

impl EventFilter {
    /// Whether the filter has nothing to test: every event matches.
    pub fn is_open(&self) -> bool {
        let empty = |text: &Option<String>| text.as_deref().is_none_or(str::is_empty);
        self.types().is_none()
            && empty(&self.subject_begins_with)
            && empty(&self.subject_ends_with)
            && self.advanced.is_empty()
    }

    /// Tests an event: none if it matches, otherwise the part that it does not satisfy.
    pub fn first_mismatch<'a>(
        &'a self,
        input: &mut FilterInput<'a>,
    ) -> Result<Option<FilterMismatch>, FilterBudgetExceeded> {
        if let Some(types) = self.types() {
            let (found, budget) = input.event_type();
            let Some(found) = found else {
                return Ok(Some(FilterMismatch::EventType));
            };
            if !any_hit(found, types, budget, same)? {
                return Ok(Some(FilterMismatch::EventType));
            }
        }
        if let Some(mismatch) = self.subject_mismatch(input)? {
            return Ok(Some(mismatch));
        }
        for (index, filter) in self.advanced.iter().enumerate() {
            let (field, budget) = input.field(&filter.key, self.keys)?;
            if !filter.test.holds(field, self.arrays, budget)? {
                return Ok(Some(FilterMismatch::Advanced(index)));
            }
        }
        Ok(None)
    }

    /// Like [`EventFilter::first_mismatch`], for a single event that no other filter looks at.
    pub fn mismatch_of(&self, event: &EventEnvelope<'_>, topic: &str) -> Option<FilterMismatch> {
        let mut input = FilterInput::new(event, topic, FilterBudget::UNLIMITED);
        self.first_mismatch(&mut input).expect("the budget has no limit")
    }

    /// Describes a mismatch of this filter in words.
    pub fn explain(&self, mismatch: FilterMismatch) -> String {
        match mismatch {
            FilterMismatch::Advanced(index) if index < self.advanced.len() => {
                let AdvancedFilter { key, test } = &self.advanced[index];
                format!("{mismatch}: {} on {key:?}", test.operator())
            }
            _ => mismatch.to_string(),
        }
    }

    /// The event types that match; none if every type does.
    fn types(&self) -> Option<&[String]> {
        match self.included_event_types.as_deref() {
            None | Some([]) => None,
            Some([one]) if one.eq_ignore_ascii_case("All") => None,
            types => types,
        }
    }

    fn subject_mismatch(
        &self,
        input: &mut FilterInput<'_>,
    ) -> Result<Option<FilterMismatch>, FilterBudgetExceeded> {
        let prefix = self.subject_begins_with.as_deref().unwrap_or_default();
        let suffix = self.subject_ends_with.as_deref().unwrap_or_default();
        if prefix.is_empty() && suffix.is_empty() {
            return Ok(None);
        }
        let (subject, budget) = input.subject();
        budget.spend(comparison_bytes(subject, prefix) + comparison_bytes(subject, suffix))?;
        let (begins, ends) = if self.subject_case_sensitive {
            (subject.starts_with(prefix), subject.ends_with(suffix))
        } else {
            (begins_with(subject, prefix), ends_with(subject, suffix))
        };
        Ok(match (begins, ends) {
            (false, _) => Some(FilterMismatch::SubjectPrefix),
            (true, false) => Some(FilterMismatch::SubjectSuffix),
            (true, true) => None,
        })
    }
}

impl FilterCondition {
    /// Tests the value that the key addresses.
    fn holds(
        &self,
        known: &LookedUpField<'_>,
        arrays: bool,
        budget: &mut FilterBudget,
    ) -> Result<bool, FilterBudgetExceeded> {
        // No field stands for an absent member or a null.
        let Some(field) = known.field else {
            // As documented: three of the negative operators hold for an absent value, three do
            // not.
            return Ok(matches!(
                self,
                FilterCondition::NumberNotIn(_)
                    | FilterCondition::NumberNotInRange(_)
                    | FilterCondition::StringNotIn(_)
                    | FilterCondition::IsNullOrUndefined
            ));
        };
        match self {
            FilterCondition::IsNullOrUndefined => return Ok(false),
            FilterCondition::IsNotNull => return Ok(true),
            _ => {}
        }
        match field.raw() {
            Some(raw) if raw.kind() == JsonKind::Object => Ok(false),
            Some(raw) if raw.kind() == JsonKind::Array => Ok(arrays && self.holds_for_array(raw, budget)?),
            // A value of another type satisfies neither an operator nor its negation.
            _ => Ok(self
                .hits(known, budget)?
                .is_some_and(|hit| hit != self.is_negative())),
        }
    }

    fn holds_for_array(
        &self,
        array: RawJson<'_>,
        budget: &mut FilterBudget,
    ) -> Result<bool, FilterBudgetExceeded> {
        let mut hit = false;
        for element in array.elements() {
            budget.spend(element.text().len())?;
            if element.kind() == JsonKind::Object {
                return Ok(false);
            }
            // Elements of another type are skipped.
            let element = LookedUpField::new(Some(EnvelopeField::Value(element)));
            hit = hit || self.hits(&element, budget)? == Some(true);
        }
        Ok(hit != self.is_negative())
    }

    fn is_negative(&self) -> bool {
        matches!(
            self,
            FilterCondition::NumberNotIn(_)
                | FilterCondition::NumberNotInRange(_)
                | FilterCondition::StringNotIn(_)
                | FilterCondition::StringNotBeginsWith(_)
                | FilterCondition::StringNotEndsWith(_)
                | FilterCondition::StringNotContains(_)
        )
    }

    /// Whether a value satisfies the operands, before any negation; none if the value is not of the
    /// operator's type.
    fn hits(
        &self,
        known: &LookedUpField<'_>,
        budget: &mut FilterBudget,
    ) -> Result<Option<bool>, FilterBudgetExceeded> {
        match self {
            FilterCondition::NumberIn(values) | FilterCondition::NumberNotIn(values) => {
                number_hits(known, values, budget, |text, value| {
                    decimal::compare(text, value) == Some(Ordering::Equal)
                })
            }
            FilterCondition::NumberInRange(ranges) | FilterCondition::NumberNotInRange(ranges) => {
                number_hits(known, ranges, budget, |text, (low, high)| {
                    decimal::compare(text, low).is_some_and(Ordering::is_ge)
                        && decimal::compare(text, high).is_some_and(Ordering::is_le)
                })
            }
            FilterCondition::NumberLessThan(value) => order_hits(known, value, budget, Ordering::is_lt),
            FilterCondition::NumberGreaterThan(value) => order_hits(known, value, budget, Ordering::is_gt),
            FilterCondition::NumberLessThanOrEquals(value) => {
                order_hits(known, value, budget, Ordering::is_le)
            }
            FilterCondition::NumberGreaterThanOrEquals(value) => {
                order_hits(known, value, budget, Ordering::is_ge)
            }
            FilterCondition::BoolEquals(value) => {
                let raw = known.field.and_then(EnvelopeField::raw);
                Ok(raw.and_then(|raw| raw.as_bool()).map(|found| found == *value))
            }
            FilterCondition::StringIn(values) | FilterCondition::StringNotIn(values) => {
                string_hits(known, values, budget, same)
            }
            FilterCondition::StringBeginsWith(values) | FilterCondition::StringNotBeginsWith(values) => {
                string_hits(known, values, budget, begins_with)
            }
            FilterCondition::StringEndsWith(values) | FilterCondition::StringNotEndsWith(values) => {
                string_hits(known, values, budget, ends_with)
            }
            FilterCondition::StringContains(terms) | FilterCondition::StringNotContains(terms) => {
                contains_hits(known, terms, budget)
            }
            FilterCondition::IsNullOrUndefined | FilterCondition::IsNotNull => Ok(None),
        }
    }
}

fn number_hits<T>(
    known: &LookedUpField<'_>,
    operands: &[T],
    budget: &mut FilterBudget,
    is_hit: impl Fn(&str, &T) -> bool,
) -> Result<Option<bool>, FilterBudgetExceeded> {
    let number = known
        .field
        .and_then(EnvelopeField::raw)
        .and_then(|raw| raw.as_number());
    let Some(text) = number else {
        return Ok(None);
    };
    budget.spend(text.len().saturating_mul(operands.len()))?;
    Ok(Some(operands.iter().any(|operand| is_hit(text, operand))))
}

fn order_hits(
    known: &LookedUpField<'_>,
    operand: &Decimal,
    budget: &mut FilterBudget,
    wanted: fn(Ordering) -> bool,
) -> Result<Option<bool>, FilterBudgetExceeded> {
    number_hits(known, std::slice::from_ref(operand), budget, |text, operand| {
        decimal::compare(text, operand).is_some_and(wanted)
    })
}

/// For comparisons that read no more than the shorter of text and operand.
fn string_hits(
    known: &LookedUpField<'_>,
    operands: &[String],
    budget: &mut FilterBudget,
    is_hit: fn(&str, &str) -> bool,
) -> Result<Option<bool>, FilterBudgetExceeded> {
    let Some(text) = known.text(budget)? else {
        return Ok(None);
    };
    any_hit(text, operands, budget, is_hit).map(Some)
}

/// Whether one of the operands is a hit, charged for the comparisons that were made.
fn any_hit(
    text: &str,
    operands: &[String],
    budget: &mut FilterBudget,
    is_hit: fn(&str, &str) -> bool,
) -> Result<bool, FilterBudgetExceeded> {
    let mut bytes = 0;
    let hit = operands.iter().any(|operand| {
        bytes += comparison_bytes(text, operand);
        is_hit(text, operand)
    });
    budget.spend(bytes)?;
    Ok(hit)
}

/// The charge of a comparison, which reads no more than the shorter of the two texts.
fn comparison_bytes(text: &str, operand: &str) -> usize {
    1 + text.len().min(operand.len())
}

fn contains_hits(
    known: &LookedUpField<'_>,
    terms: &SearchTerms,
    budget: &mut FilterBudget,
) -> Result<Option<bool>, FilterBudgetExceeded> {
    let Some(text) = known.text(budget)? else {
        return Ok(None);
    };
    budget.spend(text.len().saturating_add(terms.len()))?;
    if terms.is_short(text) {
        return Ok(Some(terms.any_in_short(text)));
    }
    Ok(Some(terms.any_in_folded(known.folded(text, budget)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EventSchema;
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

    fn advanced(key: &str, test: FilterCondition, arrays: bool) -> EventFilter {
        EventFilter {
            arrays,
            advanced: vec![AdvancedFilter {
                key: key.to_owned(),
                test,
            }],
            ..EventFilter::default()
        }
    }

    fn matches(filter: &EventFilter, schema: EventSchema, event: &str) -> Result<(), FilterMismatch> {
        let object = RawJson::parse(event).unwrap();
        let mismatch = filter.mismatch_of(&EventEnvelope::read(schema, object, None), "/the/topic");
        mismatch.map_or(Ok(()), Err)
    }

    /// Tests a single value at `data.v`; with an empty text the event has no such value.
    fn holds(test: &FilterCondition, value: &str, arrays: bool) -> bool {
        let event = match value {
            "" => r#"{"data":{}}"#.to_owned(),
            _ => format!(r#"{{"data":{{"v":{value}}}}}"#),
        };
        let filter = advanced("data.v", test.clone(), arrays);
        matches(&filter, EventSchema::EventGrid, &event).is_ok()
    }

    struct OperatorTestCase {
        test: FilterCondition,
        matching: &'static [&'static str],
        not_matching: &'static [&'static str],
        missing: bool,
        /// Arrays, tested with the flag; without it none of them matches.
        arrays_matching: &'static [&'static str],
        arrays_not_matching: &'static [&'static str],
    }

    fn check(row: OperatorTestCase) {
        let OperatorTestCase { test, .. } = &row;
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
        check(OperatorTestCase {
            test: FilterCondition::NumberIn(ns(&["1", "2.5", "1e400", "9007199254740993"])),
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
        check(OperatorTestCase {
            test: FilterCondition::NumberNotIn(ns(&["1", "2.5"])),
            matching: &["2", "0.1", "-1", "1e400"],
            not_matching: &["1", "1.00", "2.5", "\"7\"", "false", "{}"],
            missing: true,
            arrays_matching: &["[]", "[3]", "[\"1\"]", "[3,true]", "[null]"],
            arrays_not_matching: &["[1]", "[3,1]", "[\"x\",2.5]", "[3,{}]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::NumberLessThan(n("0.3")),
            matching: &["0.2", "0.29999999999999999999999", "-5", "-1e400"],
            not_matching: &["0.3", "0.30000000000000004", "1", "\"0\"", "true", "{}"],
            missing: false,
            arrays_matching: &["[5,0.1]"],
            arrays_not_matching: &["[]", "[0.3,4]", "[\"0.1\"]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::NumberGreaterThan(n("9007199254740992")),
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
        check(OperatorTestCase {
            test: FilterCondition::NumberLessThanOrEquals(n("10")),
            matching: &["10", "10.0", "9.99", "-10"],
            not_matching: &["10.01", "\"10\"", "false", "{}"],
            missing: false,
            arrays_matching: &["[11,10]"],
            arrays_not_matching: &["[11]", "[]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::NumberGreaterThanOrEquals(n("10")),
            matching: &["10", "1e1", "10.01"],
            not_matching: &["9.99", "-10", "\"10\"", "{}"],
            missing: false,
            arrays_matching: &["[9,10]"],
            arrays_not_matching: &["[9]", "[]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::NumberInRange(ranges(&[("1", "2"), ("10", "10")])),
            matching: &["1", "1.5", "2", "2.0", "10"],
            not_matching: &["0.999", "2.001", "9", "-1.5", "\"1\"", "{}"],
            missing: false,
            arrays_matching: &["[5,1]", "[\"x\",10]"],
            arrays_not_matching: &["[5]", "[]", "[\"1\"]", "[1,{}]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::NumberNotInRange(ranges(&[("1", "2"), ("10", "10")])),
            matching: &["0.999", "2.001", "9", "-1.5"],
            not_matching: &["1", "1.5", "2", "10", "\"5\"", "true", "{}"],
            missing: true,
            arrays_matching: &["[5]", "[]", "[\"1\",3]"],
            arrays_not_matching: &["[5,1]", "[10]", "[5,{}]"],
        });
    }

    #[test]
    fn bool_and_null_operators() {
        check(OperatorTestCase {
            test: FilterCondition::BoolEquals(true),
            matching: &["true"],
            not_matching: &["false", "\"true\"", "1", "{}"],
            missing: false,
            arrays_matching: &["[false,true]", "[1,true]"],
            arrays_not_matching: &["[]", "[false]", "[\"true\"]", "[true,{}]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::BoolEquals(false),
            matching: &["false"],
            not_matching: &["true", "0", "\"\"", "{}"],
            missing: false,
            arrays_matching: &["[false,true]"],
            arrays_not_matching: &["[]", "[true]"],
        });
        // Null tests ask only whether there is a value: arrays and objects are values.
        check(OperatorTestCase {
            test: FilterCondition::IsNullOrUndefined,
            matching: &[],
            not_matching: &["0", "\"\"", "false", "{}", "[]", "[null]"],
            missing: true,
            arrays_matching: &[],
            arrays_not_matching: &["[1]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::IsNotNull,
            matching: &["0", "\"\"", "false", "{}", "[]", "[null]", "[{}]"],
            not_matching: &[],
            missing: false,
            arrays_matching: &[],
            arrays_not_matching: &[],
        });
    }

    #[test]
    fn string_operators() {
        check(OperatorTestCase {
            test: FilterCondition::StringIn(ss(&["Blue", "\u{e9}t\u{e9}", "a\"b"])),
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
        check(OperatorTestCase {
            test: FilterCondition::StringNotIn(ss(&["Blue", "red"])),
            matching: &["\"green\"", "\"\"", "\"blues\""],
            not_matching: &["\"BLUE\"", "\"Red\"", "1", "true", "{}"],
            missing: true,
            arrays_matching: &["[]", "[\"green\"]", "[1]"],
            arrays_not_matching: &["[\"green\",\"blue\"]", "[\"green\",{}]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::StringBeginsWith(ss(&["Ab", "\u{d6}l"])),
            matching: &["\"ab\"", "\"ABC\"", "\"\u{f6}Ltank\"", "\"\\u0061b\""],
            not_matching: &["\"a\"", "\"cab\"", "\"ol\"", "5", "{}"],
            missing: false,
            arrays_matching: &["[\"x\",\"abc\"]"],
            arrays_not_matching: &["[]", "[\"x\"]", "[1]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::StringEndsWith(ss(&["Ab", "\u{d6}l"])),
            matching: &["\"ab\"", "\"cAB\"", "\"Roh\u{f6}L\""],
            not_matching: &["\"b\"", "\"abc\"", "\"\u{e9}b\"", "5", "{}"],
            missing: false,
            arrays_matching: &["[\"x\",\"cab\"]"],
            arrays_not_matching: &["[]", "[\"x\"]", "[1]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::StringContains(ss(&["Ab", "\u{d6}l"]).into()),
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
        check(OperatorTestCase {
            test: FilterCondition::StringNotBeginsWith(ss(&["Ab", "x"])),
            matching: &["\"a\"", "\"cab\"", "\"\""],
            not_matching: &["\"ABC\"", "\"X\"", "5", "true", "{}"],
            missing: false,
            arrays_matching: &["[]", "[\"a\"]", "[1]"],
            arrays_not_matching: &["[\"a\",\"abc\"]", "[\"a\",{}]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::StringNotEndsWith(ss(&["Ab", "x"])),
            matching: &["\"b\"", "\"abc\"", "\"\""],
            not_matching: &["\"cAB\"", "\"X\"", "5", "{}"],
            missing: false,
            arrays_matching: &["[]", "[\"b\"]", "[1]"],
            arrays_not_matching: &["[\"b\",\"cab\"]"],
        });
        check(OperatorTestCase {
            test: FilterCondition::StringNotContains(ss(&["Ab", "x"]).into()),
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
                OperandKind::Number(make) => make(n("1")),
                OperandKind::Numbers(make) => make(ns(&["1"])),
                OperandKind::Ranges(make) => make(ranges(&[("1", "2")])),
                OperandKind::Bool(make) => make(true),
                OperandKind::Strings(make) => make(ss(&["a"])),
                OperandKind::Nothing(make) => make(),
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
        let check = |filter: EventFilter, expected: Result<(), FilterMismatch>| {
            let event = r#"{"eventType":"Shop.Order","subject":"/Shops/1/orders/7.JSON"}"#;
            assert_eq!(
                matches(&filter, EventSchema::EventGrid, event),
                expected,
                "{filter:?}"
            );
        };
        let of_types = |types: &[&str]| EventFilter {
            included_event_types: Some(ss(types)),
            ..EventFilter::default()
        };
        let of_subject = |prefix: &str, suffix: &str, subject_case_sensitive| EventFilter {
            subject_begins_with: Some(prefix.to_owned()),
            subject_ends_with: Some(suffix.to_owned()),
            subject_case_sensitive,
            ..EventFilter::default()
        };
        check(EventFilter::default(), Ok(()));
        check(of_types(&[]), Ok(()));
        check(of_types(&["All"]), Ok(()));
        check(of_types(&["x", "shop.order"]), Ok(()));
        check(of_types(&["x", "All"]), Err(FilterMismatch::EventType));
        check(of_types(&["Shop"]), Err(FilterMismatch::EventType));
        check(of_subject("", "", true), Ok(()));
        check(of_subject("/shops/", ".json", false), Ok(()));
        check(
            of_subject("/shops/", "", true),
            Err(FilterMismatch::SubjectPrefix),
        );
        check(
            of_subject("/Shops/", ".json", true),
            Err(FilterMismatch::SubjectSuffix),
        );
        check(of_subject("/Shops/", ".JSON", true), Ok(()));
        check(
            of_subject("/stores/", ".json", false),
            Err(FilterMismatch::SubjectPrefix),
        );
        let bare = of_subject("/", "", false);
        assert_eq!(
            matches(&bare, EventSchema::CloudEvent, "{}"),
            Err(FilterMismatch::SubjectPrefix)
        );
        assert_eq!(
            matches(&of_types(&["t"]), EventSchema::Custom, "{}"),
            Err(FilterMismatch::EventType)
        );
    }

    #[test]
    fn all_parts_must_hold_and_the_first_that_does_not_is_named() {
        let entry = |key: &str, test| AdvancedFilter {
            key: key.to_owned(),
            test,
        };
        let filter = EventFilter {
            included_event_types: Some(ss(&["t"])),
            advanced: vec![
                entry("data.n", FilterCondition::NumberGreaterThan(n("1"))),
                entry("data.n", FilterCondition::NumberLessThan(n("5"))),
                entry("TOPIC", FilterCondition::StringEndsWith(ss(&["/topic"]))),
                entry("dataVersion", FilterCondition::StringIn(ss(&[""]))),
            ],
            ..EventFilter::default()
        };
        let event = |n: u8| format!(r#"{{"eventType":"t","data":{{"n":{n}}}}}"#);
        assert_eq!(matches(&filter, EventSchema::EventGrid, &event(3)), Ok(()));
        assert_eq!(
            matches(&filter, EventSchema::EventGrid, &event(1)),
            Err(FilterMismatch::Advanced(0))
        );
        let refused = matches(&filter, EventSchema::EventGrid, &event(9)).unwrap_err();
        assert_eq!(
            filter.explain(refused),
            "the event does not satisfy advancedFilters[1]: NumberLessThan on \"data.n\""
        );
        assert!(!filter.is_open() && EventFilter::default().is_open());
    }

    // The documented example: a number among the extension attributes, filtered with a string
    // operator.
    #[test]
    fn extension_attributes_compare_as_strings_too() {
        let event = r#"{"id":"1","source":"/s","type":"t","comexampleother":51,"on":true}"#;
        let check = |key: &str, test: FilterCondition, expected: bool| {
            let filter = advanced(key, test, false);
            assert_eq!(
                matches(&filter, EventSchema::CloudEvent, event).is_ok(),
                expected,
                "{filter:?}"
            );
        };
        check(
            "comexampleother",
            FilterCondition::StringBeginsWith(ss(&["5", "1"])),
            true,
        );
        check(
            "comexampleother",
            FilterCondition::StringNotBeginsWith(ss(&["5", "1"])),
            false,
        );
        check("comexampleother", FilterCondition::NumberIn(ns(&["51"])), true);
        check("on", FilterCondition::StringIn(ss(&["TRUE"])), true);
        check("on", FilterCondition::BoolEquals(true), true);
        check("eventtype", FilterCondition::StringIn(ss(&["T"])), true);
    }

    #[test]
    fn filters_of_one_event_share_its_fields_and_a_budget() {
        let text = "a".repeat(100_000);
        let event = format!(
            r#"{{"data":{{"v":"{text}","n":[{}]}}}}"#,
            vec!["1"; 1_000].join(",")
        );
        let envelope = EventEnvelope::read(EventSchema::EventGrid, RawJson::parse(&event).unwrap(), None);
        let terms =
            |n: usize| FilterCondition::StringContains(vec![format!("{n}{}", "x".repeat(500)); 25].into());
        let filters: Vec<EventFilter> = (0..50).map(|n| advanced("data.v", terms(n), false)).collect();
        // Looking the value up, reading and folding it are charged once; comparing is charged for
        // each filter.
        let work = |budget: u64| {
            let mut input = FilterInput::new(&envelope, "/the/topic", FilterBudget::bytes(budget));
            filters.iter().try_for_each(|filter| {
                let mismatch = filter.first_mismatch(&mut input)?;
                assert_eq!(mismatch, Some(FilterMismatch::Advanced(0)));
                Ok::<(), FilterBudgetExceeded>(())
            })
        };
        assert_eq!(work(54 * 100_000), Ok(()));
        assert_eq!(work(50 * 100_000), Err(FilterBudgetExceeded));
        let numbers = advanced("data.n", FilterCondition::NumberIn(ns(&["2"; 25])), true);
        let mut input = FilterInput::new(&envelope, "/the/topic", FilterBudget::bytes(110_000));
        assert_eq!(numbers.first_mismatch(&mut input), Err(FilterBudgetExceeded));
    }

    // Regression: 500 types of 512 characters in each subscription were compared with the event's
    // type free of charge.
    #[test]
    fn comparisons_of_types_subjects_and_strings_are_charged_by_their_length() {
        let long = "\u{e9}".repeat(500);
        let event = format!(r#"{{"eventType":"{long}","subject":"{long}","data":{{"v":"{long}"}}}}"#);
        let envelope = EventEnvelope::read(EventSchema::EventGrid, RawJson::parse(&event).unwrap(), None);
        let operands: Vec<String> = (0..25).map(|n| format!("{long}{n}")).collect();
        let work = 25 * long.len() as u64;
        let check = |filter: EventFilter, work: u64| {
            let mismatch = |budget: u64| {
                let mut input = FilterInput::new(&envelope, "/the/topic", FilterBudget::bytes(budget));
                filter.first_mismatch(&mut input)
            };
            assert_eq!(mismatch(work - 1), Err(FilterBudgetExceeded), "{filter:?}");
            assert!(matches!(mismatch(work * 2), Ok(Some(_))), "{filter:?}");
        };
        let types = EventFilter {
            included_event_types: Some(operands.clone()),
            ..EventFilter::default()
        };
        check(types, work);
        let subject = EventFilter {
            subject_begins_with: Some(operands[0].clone()),
            subject_ends_with: Some(operands[0].clone()),
            ..EventFilter::default()
        };
        check(subject, 2 * long.len() as u64);
        for test in [
            FilterCondition::StringIn,
            FilterCondition::StringBeginsWith,
            FilterCondition::StringEndsWith,
        ] {
            check(advanced("data.v", test(operands.clone()), false), work);
        }
    }

    // Regression: fields were searched one by one, for each filter of each subscription.
    #[test]
    fn many_fields_are_found_by_their_keys() {
        let members: Vec<String> = (0..100).map(|n| format!(r#""k{n}":{n}"#)).collect();
        let event = format!(r#"{{"data":{{{}}}}}"#, members.join(","));
        let envelope = EventEnvelope::read(EventSchema::EventGrid, RawJson::parse(&event).unwrap(), None);
        let mut input = FilterInput::new(&envelope, "/the/topic", FilterBudget::UNLIMITED);
        let keys: Vec<String> = (0..100).map(|n| format!("data.k{n}")).collect();
        for _ in 0..2 {
            for (n, key) in keys.iter().enumerate() {
                let (field, _) = input.field(key, KeyStyle::Cloud).unwrap();
                let found = field.field.and_then(EnvelopeField::raw).map(RawJson::text);
                assert_eq!(found, Some(n.to_string().as_str()));
            }
        }
        assert_eq!(input.known_fields(), (100, 100));
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
            type Make = fn(Vec<String>) -> FilterCondition;
            let pairs: [(Make, Make); 4] = [
                (FilterCondition::StringIn, FilterCondition::StringNotIn),
                (FilterCondition::StringBeginsWith, FilterCondition::StringNotBeginsWith),
                (FilterCondition::StringEndsWith, FilterCondition::StringNotEndsWith),
                (|terms| FilterCondition::StringContains(terms.into()), |terms| FilterCondition::StringNotContains(terms.into())),
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
            prop_assert_eq!(holds(&FilterCondition::NumberIn(single.clone()), &value, false), equal);
            prop_assert_eq!(holds(&FilterCondition::NumberNotIn(single.clone()), &value, false), !equal);
            prop_assert_eq!(holds(&FilterCondition::NumberInRange(pair.clone()), &value, false), within);
            prop_assert_eq!(holds(&FilterCondition::NumberNotInRange(pair), &value, false), !within);
            for operand in single {
                let less = holds(&FilterCondition::NumberLessThan(operand.clone()), &value, false);
                let at_least = holds(&FilterCondition::NumberGreaterThanOrEquals(operand.clone()), &value, false);
                let greater = holds(&FilterCondition::NumberGreaterThan(operand.clone()), &value, false);
                let at_most = holds(&FilterCondition::NumberLessThanOrEquals(operand), &value, false);
                prop_assert!(less != at_least && greater != at_most);
            }
        }
    }
}
