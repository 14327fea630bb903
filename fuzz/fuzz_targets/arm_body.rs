//! Bodies and paths of the management API and its relatives: a resource, or an error that names the
//! field.
#![no_main]

use libfuzzer_sys::fuzz_target;
use postrider_core::event::EventSchema;
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::time::Timestamp;
use postrider_wire::arm::{parse_path, parse_scope};
use postrider_wire::resources::{
    FieldError, ResourceLimits, Road, SubscriptionContext, TopicContext, parse_domain, parse_subscription,
    parse_system_topic, parse_topic, patch_subscription, patch_topic, read_body,
};

const ACCOUNT: &str = "00000000-0000-0000-0000-000000000001";

fuzz_target!(|bytes: &[u8]| {
    let Some((&choice, rest)) = bytes.split_first() else {
        return;
    };
    let road = match choice & 3 {
        0 | 1 => Road::Azure,
        2 => Road::Edge,
        _ => Road::Config,
    };
    match (choice >> 2) % 4 {
        0 => path(rest),
        1 => topic(road, rest),
        _ => subscription(road, rest),
    }
});

fn path(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let segments: Vec<String> = text
        .split('/')
        .filter(|segment| !segment.is_empty())
        .map(str::to_owned)
        .collect();
    let _ = (parse_path(&segments, ACCOUNT), parse_scope(text, ACCOUNT));
}

/// Two bodies, separated by a zero byte: the resource and a change of it.
fn bodies(bytes: &[u8]) -> (&[u8], &[u8]) {
    match bytes.iter().position(|byte| *byte == 0) {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (bytes, b"{}"),
    }
}

fn judged<T>(result: Result<T, FieldError>) -> Option<T> {
    result
        .inspect_err(|error| assert!(!error.to_string().is_empty(), "an error says something"))
        .ok()
}

fn topic(road: Road, bytes: &[u8]) {
    let (body, change) = bodies(bytes);
    let Some(body) = judged(read_body(body)) else {
        return;
    };
    judged(parse_domain(body, road, "orders", None));
    judged(parse_system_topic(body, road, "orders", None));
    let Some(spec) = judged(parse_topic(body, road, "orders", None)) else {
        return;
    };
    let now = Timestamp::from_secs(1_600_000_000);
    let keys = ["a", "b"].map(|letter| Secret::new(letter.repeat(44)));
    let topic = spec.into_topic(TopicId(1), "rg1".to_owned(), keys, now);
    judged(parse_topic(body, road, "orders", Some(&topic)));
    if let Some(change) = judged(read_body(change)) {
        judged(patch_topic(change, &topic));
    }
}

fn subscription(road: Road, bytes: &[u8]) {
    let (body, change) = bodies(bytes);
    let Some(body) = judged(read_body(body)) else {
        return;
    };
    let limits = ResourceLimits::default();
    let now = Timestamp::from_secs(1_600_000_000);
    let mut context = SubscriptionContext {
        road,
        name: "billing",
        topic: TopicContext {
            name: "orders",
            input_schema: EventSchema::EventGrid,
            mapping: None,
            default_types: &[],
        },
        limits: &limits,
        now,
        previous: None,
        api_version: "2022-06-15",
        shown: None,
    };
    let Some(spec) = judged(parse_subscription(body, &context)) else {
        return;
    };
    let previous = spec.into_subscription(SubscriptionId(1), TopicId(1), None, now);
    context.previous = Some(&previous);
    assert!(
        parse_subscription(body, &context).is_ok(),
        "the same body is taken twice"
    );
    if let Some(change) = judged(read_body(change)) {
        judged(patch_subscription(change, &context));
    }
}
