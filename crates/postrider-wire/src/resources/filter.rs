//! Filters of subscriptions: parsed and rendered.

use super::read::{JsonNode, check_chars};
use super::{FieldError, ResourceLimits, Road};
use postrider_core::decimal::Decimal;
use postrider_core::filter::{
    AdvancedFilter, EventFilter, FilterCondition, FilterOperands, KeyStyle, OPERATORS, OperandKind,
    operator_from_name,
};
use serde::Serialize;
use serde_json::value::RawValue;

/// Limits of the filter of one subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterLimits {
    pub filters_max: usize,
    /// Of all advanced filters together.
    pub values_max: usize,
    pub value_chars_max: usize,
}

/// The cloud's limits.
impl Default for FilterLimits {
    fn default() -> FilterLimits {
        FilterLimits {
            filters_max: 25,
            values_max: 25,
            value_chars_max: 512,
        }
    }
}

const EVENT_TYPES_MAX: usize = 500;
const EVENT_TYPE_CHARS_MAX: usize = 512;
const KEY_CHARS_MAX: usize = 512;
const SUBJECT_CHARS_MAX: usize = 1024;
/// Limit of the characters of a number.
const NUMBER_CHARS_MAX: usize = 512;
/// Limit of the absolute value of a number's exponent.
const EXPONENT_MAX: u32 = 9999;

pub(super) fn parse_filter(
    node: &JsonNode<'_>,
    road: Road,
    origin: Road,
    limits: &ResourceLimits,
) -> Result<EventFilter, FieldError> {
    // Articles of 2018 call it `subjectIsCaseSensitive`.
    let case_sensitive = match node.bool("isSubjectCaseSensitive")? {
        None => node.bool("subjectIsCaseSensitive")?,
        given => given,
    };
    Ok(EventFilter {
        included_event_types: node.strings("includedEventTypes", EVENT_TYPES_MAX, EVENT_TYPE_CHARS_MAX)?,
        subject_begins_with: node.short_string("subjectBeginsWith", SUBJECT_CHARS_MAX)?,
        subject_ends_with: node.short_string("subjectEndsWith", SUBJECT_CHARS_MAX)?,
        subject_case_sensitive: case_sensitive.unwrap_or(false),
        arrays: node.bool("enableAdvancedFilteringOnArrays")?.unwrap_or(false),
        advanced: parse_advanced(node, road, &limits.of_filters(road))?,
        keys: key_style(origin),
    })
}

pub(super) fn key_style(road: Road) -> KeyStyle {
    match road {
        Road::Edge => KeyStyle::Edge,
        Road::Config | Road::Azure => KeyStyle::Cloud,
    }
}

fn parse_advanced(
    node: &JsonNode<'_>,
    road: Road,
    limits: &FilterLimits,
) -> Result<Vec<AdvancedFilter>, FieldError> {
    let list = node.list("advancedFilters")?.unwrap_or_default();
    let refused = |most: usize, what: &str, were: usize| {
        let reason = format!("must not have more than {most} {what}, had {were}");
        Err(node.at("advancedFilters").fail(reason))
    };
    if list.len() > limits.filters_max {
        return refused(limits.filters_max, "filters", list.len());
    }
    let mut values = 0;
    let mut advanced = Vec::with_capacity(list.len());
    for entry in &list {
        let filter = parse_entry(entry, road, limits)?;
        values += count_values(&filter.test);
        advanced.push(filter);
    }
    if values > limits.values_max {
        return refused(limits.values_max, "values in all filters together", values);
    }
    Ok(advanced)
}

fn parse_entry(
    entry: &JsonNode<'_>,
    road: Road,
    limits: &FilterLimits,
) -> Result<AdvancedFilter, FieldError> {
    let entry = entry.clone().of_kind(postrider_core::json::JsonKind::Object)?;
    // Articles of 2018 call it `Operator`.
    let word = match entry.get("operatorType") {
        None if entry.get("operator").is_some() => "operator",
        _ => "operatorType",
    };
    let name = entry.need_string(word)?;
    let known = operator_from_name(&name).filter(|operator| operator.on_edge || road != Road::Edge);
    let Some(operator) = known else {
        let known = OPERATORS
            .iter()
            .filter(|operator| operator.on_edge || road != Road::Edge);
        let known: Vec<_> = known.map(|operator| operator.name).collect();
        let reason = format!("must be one of {}, was {name:?}", known.join(", "));
        return Err(entry.at(word).fail(reason));
    };
    let key = entry.need_string("key")?;
    check_chars(&key, KEY_CHARS_MAX).map_err(|reason| entry.at("key").fail(reason))?;
    let test = match operator.operand {
        OperandKind::Number(test) => test(parse_number(&one_value(&entry, operator.name)?)?),
        OperandKind::Bool(test) => {
            let value = one_value(&entry, operator.name)?;
            test(value.value.as_bool().ok_or_else(|| value.not("true or false"))?)
        }
        OperandKind::Numbers(test) => test(many_values(&entry, operator.name, parse_number)?),
        OperandKind::Ranges(test) => test(many_values(&entry, operator.name, parse_range)?),
        OperandKind::Strings(test) => test(many_values(&entry, operator.name, |value| {
            value.as_short_string(limits.value_chars_max)
        })?),
        OperandKind::Nothing(test) => {
            for member in ["value", "values"] {
                if let Some(given) = entry.get(member) {
                    return Err(given.fail(format!("must be left out: {} takes no value", operator.name)));
                }
            }
            test()
        }
    };
    Ok(AdvancedFilter { key, test })
}

fn one_value<'a>(entry: &JsonNode<'a>, operator: &str) -> Result<JsonNode<'a>, FieldError> {
    if let Some(values) = entry.get("values") {
        return Err(values.fail(format!("must be left out: {operator} takes one \"value\"")));
    }
    entry.need("value")
}

fn many_values<'a, T>(
    entry: &JsonNode<'a>,
    operator: &str,
    parse: impl Fn(&JsonNode<'a>) -> Result<T, FieldError>,
) -> Result<Vec<T>, FieldError> {
    if let Some(value) = entry.get("value") {
        return Err(value.fail(format!("must be left out: {operator} takes a list of \"values\"")));
    }
    let values = entry.need("values")?;
    let list = values.elements()?;
    if list.is_empty() {
        return Err(values.fail("must not be empty"));
    }
    list.iter().map(parse).collect()
}

fn parse_number(value: &JsonNode<'_>) -> Result<Decimal, FieldError> {
    let text = value.value.as_number().ok_or_else(|| value.not("a number"))?;
    check_chars(text, NUMBER_CHARS_MAX).map_err(|reason| value.fail(reason))?;
    let exponent = text.split_once(['e', 'E']).map_or("", |(_, exponent)| exponent);
    let size = exponent.trim_start_matches(['+', '-']).trim_start_matches('0');
    if !size.is_empty() && !size.parse::<u32>().is_ok_and(|size| size <= EXPONENT_MAX) {
        return Err(value.fail(format!("must have an exponent of at most {EXPONENT_MAX}")));
    }
    Ok(Decimal::parse(text).expect("the text was checked to be a JSON number"))
}

fn parse_range(value: &JsonNode<'_>) -> Result<(Decimal, Decimal), FieldError> {
    let ends = value.elements()?;
    let [from, to] = ends.as_slice() else {
        return Err(value.fail(format!("must be a range of two numbers, had {}", ends.len())));
    };
    let (from, to) = (parse_number(from)?, parse_number(to)?);
    if from > to {
        return Err(value.fail(format!("must be a range from low to high, was [{from}, {to}]")));
    }
    Ok((from, to))
}

fn count_values(test: &FilterCondition) -> usize {
    match test.operands() {
        FilterOperands::Nothing => 0,
        FilterOperands::Number(_) | FilterOperands::Bool(_) => 1,
        FilterOperands::Numbers(values) => values.len(),
        FilterOperands::Ranges(ranges) => ranges.len(),
        FilterOperands::Strings(values) => values.len(),
    }
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("strings can always be written")
}

/// A filter as every API renders it. Numbers keep all their digits. Values that equal their default
/// are left out.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FilterBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject_begins_with: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject_ends_with: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub is_subject_case_sensitive: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub included_event_types: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_advanced_filtering_on_arrays: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advanced_filters: Option<Vec<AdvancedFilterBody>>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdvancedFilterBody {
    pub operator_type: &'static str,
    pub key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<Vec<Box<RawValue>>>,
}

impl FilterBody {
    pub fn of(filter: &EventFilter) -> FilterBody {
        let advanced = filter
            .advanced
            .iter()
            .map(AdvancedFilterBody::of)
            .collect::<Vec<_>>();
        FilterBody {
            subject_begins_with: filter.subject_begins_with.clone(),
            subject_ends_with: filter.subject_ends_with.clone(),
            is_subject_case_sensitive: filter.subject_case_sensitive.then_some(true),
            included_event_types: filter.included_event_types.clone(),
            enable_advanced_filtering_on_arrays: filter.arrays.then_some(true),
            advanced_filters: (!advanced.is_empty()).then_some(advanced),
        }
    }

    pub fn is_empty(&self) -> bool {
        let FilterBody {
            subject_begins_with,
            subject_ends_with,
            is_subject_case_sensitive,
            included_event_types,
            enable_advanced_filtering_on_arrays,
            advanced_filters,
        } = self;
        subject_begins_with.is_none()
            && subject_ends_with.is_none()
            && is_subject_case_sensitive.is_none()
            && included_event_types.is_none()
            && enable_advanced_filtering_on_arrays.is_none()
            && advanced_filters.is_none()
    }
}

impl AdvancedFilterBody {
    fn of(filter: &AdvancedFilter) -> AdvancedFilterBody {
        let raw = |text| RawValue::from_string(text).expect("operands are written as JSON");
        let (value, values) = match filter.test.operands() {
            FilterOperands::Nothing => (None, None),
            FilterOperands::Number(value) => (Some(raw(value.to_string())), None),
            FilterOperands::Bool(value) => (Some(raw(value.to_string())), None),
            FilterOperands::Numbers(values) => {
                (None, Some(values.iter().map(|n| raw(n.to_string())).collect()))
            }
            FilterOperands::Ranges(ranges) => {
                let range = |(from, to): &(Decimal, Decimal)| raw(format!("[{from},{to}]"));
                (None, Some(ranges.iter().map(range).collect()))
            }
            FilterOperands::Strings(values) => {
                (None, Some(values.iter().map(|text| raw(quoted(text))).collect()))
            }
        };
        AdvancedFilterBody {
            operator_type: filter.test.operator(),
            key: filter.key.clone(),
            value,
            values,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::json::RawJson;

    fn parse(text: &str, road: Road) -> Result<EventFilter, String> {
        let body = format!("{{\"filter\":{text}}}");
        let root = JsonNode::root(RawJson::parse(&body).unwrap()).unwrap();
        parse_filter(
            &root.need_object("filter").unwrap(),
            road,
            road,
            &ResourceLimits::default(),
        )
        .map_err(|error| error.to_string())
    }

    /// Parses one advanced filter and renders it again.
    fn check(entry: &str, road: Road, expected: Result<&str, &str>) {
        let filter = parse(&format!("{{\"advancedFilters\":[{entry}]}}"), road);
        let written = filter.map(|filter| {
            let body = FilterBody::of(&filter);
            serde_json::to_string(&body.advanced_filters.unwrap()[0]).unwrap()
        });
        let short = |text: &str| text.replace("filter.advancedFilters[0]", "@");
        assert_eq!(
            written.map_err(|e| short(&e)),
            expected.map(Into::into).map_err(Into::into),
            "{entry}"
        );
    }

    #[test]
    fn every_operator_is_read_and_written() {
        let both = |operator: &str, operand: &str| {
            let entry = format!(r#"{{"operatorType":"{operator}","key":"data.n"{operand}}}"#);
            check(&entry, Road::Azure, Ok(&entry));
            check(&entry, Road::Config, Ok(&entry));
            let lower = entry
                .replace("operatorType", "OPERATORTYPE")
                .replace(operator, &operator.to_lowercase());
            check(&lower.replace("key", "Key"), Road::Azure, Ok(&entry));
            let edge = operator_from_name(operator).unwrap().on_edge;
            assert_eq!(
                parse(&format!("{{\"advancedFilters\":[{entry}]}}"), Road::Edge).is_ok(),
                edge,
                "{operator}"
            );
        };
        for operator in &OPERATORS {
            match operator.operand {
                OperandKind::Number(_) => both(operator.name, r#","value":12345678901234567890.5"#),
                OperandKind::Numbers(_) => both(operator.name, r#","values":[-1,0.5,1e300]"#),
                OperandKind::Ranges(_) => both(operator.name, r#","values":[[-1,1],[2,2]]"#),
                OperandKind::Bool(_) => both(operator.name, r#","value":false"#),
                OperandKind::Strings(_) => both(operator.name, r#","values":["a","","\"ü"]"#),
                OperandKind::Nothing(_) => both(operator.name, ""),
            }
        }
    }

    #[test]
    fn operands_are_checked() {
        let bad = |entry: &str, reason: &str| check(entry, Road::Azure, Err(reason));
        bad("1", "@ must be an object, was a number");
        bad("{}", "@.operatorType is required");
        bad(r#"{"operatorType":"StringIn"}"#, "@.key is required");
        bad(
            r#"{"operatorType":"StringIn","key":""}"#,
            "@.key must not be empty",
        );
        bad(r#"{"operatorType":"StringIn","key":"a"}"#, "@.values is required");
        bad(
            r#"{"operatorType":"StringIn","key":"a","values":null}"#,
            "@.values is required",
        );
        bad(
            r#"{"operatorType":"StringIn","key":"a","values":"x"}"#,
            "@.values must be a list, was a string",
        );
        bad(
            r#"{"operatorType":"StringIn","key":"a","values":[]}"#,
            "@.values must not be empty",
        );
        bad(
            r#"{"operatorType":"StringIn","key":"a","values":["x",1]}"#,
            "@.values[1] must be a string, was a number",
        );
        bad(
            r#"{"operatorType":"StringIn","key":"a","values":[null]}"#,
            "@.values[0] must be a string, was null",
        );
        bad(
            r#"{"operatorType":"StringIn","key":"a","value":"x"}"#,
            "@.value must be left out: StringIn takes a list of \"values\"",
        );
        bad(
            r#"{"operatorType":"NumberLessThan","key":"a","values":[1]}"#,
            "@.values must be left out: NumberLessThan takes one \"value\"",
        );
        bad(
            r#"{"operatorType":"NumberLessThan","key":"a"}"#,
            "@.value is required",
        );
        bad(
            r#"{"operatorType":"NumberLessThan","key":"a","value":"1"}"#,
            "@.value must be a number, was a string",
        );
        bad(
            r#"{"operatorType":"NumberLessThan","key":"a","value":1e10000}"#,
            "@.value must have an exponent of at most 9999",
        );
        bad(
            r#"{"operatorType":"NumberIn","key":"a","values":[true]}"#,
            "@.values[0] must be a number, was true or false",
        );
        bad(
            r#"{"operatorType":"BoolEquals","key":"a","value":"true"}"#,
            "@.value must be true or false, was a string",
        );
        bad(
            r#"{"operatorType":"NumberInRange","key":"a","values":[1,2]}"#,
            "@.values[0] must be a list, was a number",
        );
        bad(
            r#"{"operatorType":"NumberInRange","key":"a","values":[[1,2],[1]]}"#,
            "@.values[1] must be a range of two numbers, had 1",
        );
        bad(
            r#"{"operatorType":"NumberNotInRange","key":"a","values":[[2,1.5]]}"#,
            "@.values[0] must be a range from low to high, was [2, 1.5]",
        );
        bad(
            r#"{"operatorType":"IsNotNull","key":"a","value":1}"#,
            "@.value must be left out: IsNotNull takes no value",
        );
        check(
            r#"{"operatorType":"StringNotContains","key":"a","values":["x"]}"#,
            Road::Edge,
            Err(
                "@.operatorType must be one of NumberIn, NumberNotIn, NumberLessThan, NumberGreaterThan, \
                 NumberLessThanOrEquals, NumberGreaterThanOrEquals, BoolEquals, StringIn, StringNotIn, \
                 StringBeginsWith, StringEndsWith, StringContains, was \"StringNotContains\"",
            ),
        );
        // The spelling of 2018.
        check(
            r#"{"Operator":"StringIn","Key":"a","Values":["x"]}"#,
            Road::Azure,
            Ok(r#"{"operatorType":"StringIn","key":"a","values":["x"]}"#),
        );
    }

    #[test]
    fn counts_and_lengths_are_limited_everywhere() {
        let check = |filter: String, expected: Result<(), &str>| {
            for road in [Road::Azure, Road::Config, Road::Edge] {
                assert_eq!(parse(&filter, road).map(drop), expected.map_err(Into::into));
            }
        };
        let filters = |count: usize, values: &str| {
            let entry = format!(r#"{{"operatorType":"StringIn","key":"a","values":[{values}]}}"#);
            format!("{{\"advancedFilters\":[{}]}}", vec![entry; count].join(","))
        };
        check(filters(25, "\"x\""), Ok(()));
        check(
            filters(26, "\"x\""),
            Err("filter.advancedFilters must not have more than 25 filters, had 26"),
        );
        check(filters(5, r#""1","2","3","4","5""#), Ok(()));
        check(
            filters(13, r#""1","2""#),
            Err("filter.advancedFilters must not have more than 25 values in all filters together, had 26"),
        );
        check(filters(1, &format!("\"{}\"", "ü".repeat(512))), Ok(()));
        check(
            filters(1, &format!("\"{}\"", "ü".repeat(513))),
            Err("filter.advancedFilters[0].values[0] must not be longer than 512 characters, was 513"),
        );
        let long = |member: &str, value: &str| check_long(member, value, &check);
        long("subjectBeginsWith", &"x".repeat(1025));
        long("subjectEndsWith", &"x".repeat(1025));
        let number = format!(
            r#"{{"advancedFilters":[{{"operatorType":"NumberIn","key":"a","values":[{}]}}]}}"#,
            "9".repeat(513)
        );
        check(
            number,
            Err("filter.advancedFilters[0].values[0] must not be longer than 512 characters, was 513"),
        );
        let key = filters(1, "\"x\"").replace("\"a\"", &format!("\"{}\"", "k".repeat(513)));
        check(
            key,
            Err("filter.advancedFilters[0].key must not be longer than 512 characters, was 513"),
        );
        let types = format!(r#"{{"includedEventTypes":[{}]}}"#, vec!["\"t\""; 501].join(","));
        check(
            types,
            Err("filter.includedEventTypes must not have more than 500 items, had 501"),
        );
    }

    fn check_long(member: &str, value: &str, check: &impl Fn(String, Result<(), &str>)) {
        let chars = value.len();
        let expected = format!(
            "filter.{member} must not be longer than {} characters, was {chars}",
            chars - 1
        );
        check(format!(r#"{{"{member}":"{value}"}}"#), Err(&expected));
    }

    #[test]
    fn the_configuration_may_widen_the_limits_of_what_it_declares() {
        let entry = r#"{"operatorType":"StringIn","key":"a","values":["1","2","3"]}"#;
        let body = format!(
            r#"{{"filter":{{"advancedFilters":[{}]}}}}"#,
            vec![entry; 30].join(",")
        );
        let root = JsonNode::root(RawJson::parse(&body).unwrap()).unwrap();
        let node = root.need_object("filter").unwrap();
        let limits = ResourceLimits {
            declared_filters: FilterLimits {
                filters_max: 30,
                values_max: 90,
                value_chars_max: 1,
            },
            ..ResourceLimits::default()
        };
        assert_eq!(
            parse_filter(&node, Road::Config, Road::Config, &limits)
                .unwrap()
                .advanced
                .len(),
            30
        );
        assert!(parse_filter(&node, Road::Edge, Road::Edge, &limits).is_err());
    }

    #[test]
    fn the_rest_of_a_filter() {
        let check = |text: &str, expected: &str| {
            let written =
                parse(text, Road::Azure).map(|f| serde_json::to_string(&FilterBody::of(&f)).unwrap());
            assert_eq!(written.unwrap_or_else(|error| error), expected, "{text}");
        };
        check("{}", "{}");
        check(r#"{"unknown":1,"subjectBeginsWith":null}"#, "{}");
        check(
            r#"{"SubjectBeginsWith":"/a","subjectEndsWith":"","isSubjectCaseSensitive":true}"#,
            r#"{"subjectBeginsWith":"/a","subjectEndsWith":"","isSubjectCaseSensitive":true}"#,
        );
        check(
            r#"{"subjectIsCaseSensitive":"True"}"#,
            r#"{"isSubjectCaseSensitive":true}"#,
        );
        check(
            r#"{"includedEventTypes":["All"],"enableAdvancedFilteringOnArrays":true}"#,
            r#"{"includedEventTypes":["All"],"enableAdvancedFilteringOnArrays":true}"#,
        );
        check(
            r#"{"includedEventTypes":"a"}"#,
            "filter.includedEventTypes must be a list, was a string",
        );
        check(
            r#"{"includedEventTypes":["a",1]}"#,
            "filter.includedEventTypes[1] must be a string, was a number",
        );
        check(
            r#"{"subjectEndsWith":1}"#,
            "filter.subjectEndsWith must be a string, was a number",
        );
        check(
            r#"{"advancedFilters":{}}"#,
            "filter.advancedFilters must be a list, was an object",
        );
        assert_eq!(parse("{}", Road::Edge).unwrap().keys, KeyStyle::Edge);
        assert_eq!(parse("{}", Road::Config).unwrap().keys, KeyStyle::Cloud);
    }
}
