//! Publish requests: whatever the body and its headers, parsing ends in events whose spans lie in
//! the body, or in a refusal with a 4xx status.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use postrider_core::event::EventSchema;
use postrider_wire::publish::{EventRules, PublishApi, PublishHeaders, PublishLimits, parse};

const CONTENT_TYPES: [Option<&str>; 5] = [
    None,
    Some("application/json"),
    Some("application/cloudevents+json; charset=utf-8"),
    Some("application/cloudevents-batch+json"),
    Some("text/plain"),
];
const LIMITS: PublishLimits = PublishLimits {
    request_bytes: 64 << 10,
    event_bytes: 16 << 10,
    events_max: 50,
};

fuzz_target!(|bytes: &[u8]| {
    let Some((&[choice, headers], body)) = bytes.split_first_chunk::<2>() else {
        return;
    };
    let rules = EventRules {
        road: if choice & 1 == 0 {
            PublishApi::Cloud
        } else {
            PublishApi::Edge
        },
        schema: match (choice >> 1) % 3 {
            0 => EventSchema::EventGrid,
            1 => EventSchema::CloudEvent,
            _ => EventSchema::Custom,
        },
        mapping: None,
        topic_id: "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/topics/t",
        domain: choice & 0x40 != 0,
        limits: LIMITS,
    };
    // The binary form takes its attributes from headers: here from the body's first line.
    let line = body.split(|b| *b == b'\n').next().unwrap_or_default();
    let value = std::str::from_utf8(line).unwrap_or("x");
    let names = [
        "ce-id",
        "ce-source",
        "ce-type",
        "ce-specversion",
        "ce-time",
        "ce-subject",
    ];
    let ce_headers: Vec<(&str, &str)> = names
        .iter()
        .enumerate()
        .filter(|(bit, _)| headers >> bit & 1 == 1)
        .map(|(_, name)| (*name, if *name == "ce-specversion" { "1.0" } else { value }))
        .collect();
    let head = PublishHeaders {
        content_type: CONTENT_TYPES[usize::from(choice >> 3) % CONTENT_TYPES.len()],
        ce_headers: &ce_headers,
    };
    match parse(&rules, &head, Bytes::copy_from_slice(body), |event| {
        event.index as u32
    }) {
        Ok(parsed) => {
            assert!(parsed.events.len() <= LIMITS.events_max);
            for event in &parsed.events {
                let object = &parsed.body[event.object.range()];
                serde_json::from_slice::<&serde_json::value::RawValue>(object)
                    .expect("an accepted event is JSON");
            }
        }
        Err(error) => assert!((400..500).contains(&error.status), "{error}"),
    }
});
