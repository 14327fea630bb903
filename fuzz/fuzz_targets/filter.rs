//! Filters: a subscription's filter, a zero byte, then an event. Both are read as the APIs read
//! them; the work is bounded by the budget, and the budget changes no decision.
#![no_main]

use libfuzzer_sys::fuzz_target;
use postrider_core::envelope::EventEnvelope;
use postrider_core::event::EventSchema;
use postrider_core::filter::{EventFilter, FilterBudget, FilterInput};
use postrider_core::json::{JsonKind, RawJson};
use postrider_core::time::Timestamp;
use postrider_wire::resources::{
    ResourceLimits, Road, SubscriptionContext, TopicContext, parse_subscription, read_body,
};

const BUDGET: u64 = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    let Some((&choice, rest)) = bytes.split_first() else {
        return;
    };
    let Some(zero) = rest.iter().position(|byte| *byte == 0) else {
        return;
    };
    let (Ok(filter), Ok(event)) = (
        std::str::from_utf8(&rest[..zero]),
        std::str::from_utf8(&rest[zero + 1..]),
    ) else {
        return;
    };
    let schema = match choice % 3 {
        0 => EventSchema::EventGrid,
        1 => EventSchema::CloudEvent,
        _ => EventSchema::Custom,
    };
    let road = if choice & 0x80 == 0 {
        Road::Azure
    } else {
        Road::Edge
    };
    let Some(filter) = read_filter(filter, road, schema) else {
        return;
    };
    let Ok(object) = RawJson::parse(event) else {
        return;
    };
    if object.kind() != JsonKind::Object {
        return;
    }
    let envelope = EventEnvelope::read(schema, object, None);
    let mut unlimited = FilterInput::new(&envelope, "orders", FilterBudget::UNLIMITED);
    let mismatch = filter
        .first_mismatch(&mut unlimited)
        .expect("the budget has no limit");
    let mut bounded = FilterInput::new(&envelope, "orders", FilterBudget::bytes(BUDGET));
    if let Ok(same) = filter.first_mismatch(&mut bounded) {
        assert_eq!(same, mismatch);
    }
    if let Some(mismatch) = mismatch {
        assert!(!filter.is_open());
        assert!(!filter.explain(mismatch).is_empty());
    }
});

fn read_filter(filter: &str, road: Road, schema: EventSchema) -> Option<EventFilter> {
    let body = format!(
        r#"{{"properties":{{"destination":{{"endpointType":"WebHook","properties":{{"endpointUrl":"https://example.com/"}}}},"filter":{filter}}}}}"#
    );
    let limits = ResourceLimits::default();
    let context = SubscriptionContext {
        road,
        name: "billing",
        topic: TopicContext {
            name: "orders",
            input_schema: schema,
            mapping: None,
            default_types: &[],
        },
        limits: &limits,
        now: Timestamp::from_secs(1_600_000_000),
        previous: None,
        api_version: "2022-06-15",
        shown: None,
    };
    let spec = parse_subscription(read_body(body.as_bytes()).ok()?, &context).ok()?;
    Some(spec.filter)
}
