//! Tables of requests with their results, then property tests.

use super::*;
use serde_json::{Value, json};

const TOPIC: &str = "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/topics/t";
const DOMAIN: &str = "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/domains/d";
const JSON: Option<&str> = Some("application/json; charset=utf-8");
const CE_BATCH: Option<&str> = Some("application/cloudevents-batch+json; charset=utf-8");
const CE_ONE: Option<&str> = Some("Application/CloudEvents+JSON;charset=UTF-8");

fn rules(road: PublishApi, schema: EventSchema) -> EventRules<'static> {
    EventRules {
        road,
        schema,
        mapping: None,
        topic_id: match road {
            PublishApi::Cloud => TOPIC,
            PublishApi::Edge => "t",
        },
        domain: false,
        limits: PublishLimits::default(),
    }
}

fn domain(schema: EventSchema) -> EventRules<'static> {
    EventRules {
        topic_id: DOMAIN,
        domain: true,
        ..rules(PublishApi::Cloud, schema)
    }
}

fn head(content_type: Option<&str>) -> PublishHeaders<'_> {
    PublishHeaders {
        content_type,
        ce_headers: &[],
    }
}

fn read(
    rules: &EventRules<'_>,
    head: &PublishHeaders<'_>,
    body: &str,
) -> Result<ParsedPublishRequest, PublishError> {
    parse(rules, head, Bytes::copy_from_slice(body.as_bytes()), |event| {
        event.index as u32
    })
}

/// A number of events, or a status, a detail code and a part of the message.
type Expected<'a> = Result<usize, (u16, &'a str, &'a str)>;

#[track_caller]
fn check(rules: &EventRules<'_>, head: &PublishHeaders<'_>, body: &str, expected: Expected<'_>) {
    match (read(rules, head, body), expected) {
        (Ok(parsed), Ok(events)) => {
            assert_eq!(parsed.events.len(), events, "{body}");
            for (index, event) in parsed.events.iter().enumerate() {
                assert_eq!(event.matched as usize, index);
            }
        }
        (Err(error), Err((status, detail, message))) => {
            assert_eq!((error.status, error.detail), (status, detail), "{body}: {error}");
            assert!(error.message.contains(message), "{body}: {error}");
        }
        (found, _) => panic!("{body}: {found:?}"),
    }
}

fn with(base: &Value, changes: Value) -> String {
    let mut event = base.clone();
    for (name, value) in changes.as_object().unwrap() {
        event[name] = value.clone();
    }
    event.to_string()
}

fn without(base: &Value, names: &[&str]) -> String {
    let mut event = base.clone();
    for name in names {
        event.as_object_mut().unwrap().remove(*name);
    }
    event.to_string()
}

fn grid_event() -> Value {
    json!({"id": "1", "subject": "s", "eventType": "T", "eventTime": "2026-01-01T00:00:00Z",
           "data": {"n": 1}, "dataVersion": "2"})
}

fn cloud_event() -> Value {
    json!({"specversion": "1.0", "id": "1", "source": "/src", "type": "T", "data": {"n": 1}, "ext1": "v"})
}

fn missing(name: &str) -> String {
    format!(" and requires '{name}' property to be set.")
}

const NONCONFORMING: &str = "The JSON received does not conform to the expected schema.";

#[test]
fn event_grid_events_in_the_cloud() {
    let rules = rules(PublishApi::Cloud, EventSchema::EventGrid);
    let base = grid_event();
    let check = |body: &str, expected: Expected<'_>| check(&rules, &head(JSON), body, expected);
    let ok = |event: String| {
        check(&format!("[{event}]"), Ok(1));
        check(&format!(" [ {event} ,\n{base}\t] "), Ok(2));
        check(&event, Ok(1));
    };
    let bad = |event: String, message: &str| {
        // A single invalid event makes the whole request fail.
        for body in [format!("[{event}]"), format!("[{base},{event},{base}]"), event] {
            check(&body, Err((400, "InputJsonInvalid", message)));
        }
    };
    ok(base.to_string());
    ok(without(&base, &["data", "dataVersion"]));
    ok(with(
        &base,
        json!({"topic": TOPIC, "metadataVersion": "1", "more": [1, {}]}),
    ));
    ok(with(
        &base,
        json!({"topic": null, "metadataVersion": null, "dataVersion": null, "data": null}),
    ));
    ok(with(&base, json!({"subject": "", "dataVersion": ""})));
    ok(base.to_string().replace("\"id\"", "\"\\u0069d\""));
    ok(with(&base, json!({"topic": TOPIC})).replace("/topics", "\\/topics"));

    bad("{}".into(), &missing("subject"));
    bad(without(&base, &["id", "eventType", "eventTime"]), &missing("id"));
    bad(without(&base, &["eventType", "eventTime"]), &missing("eventType"));
    bad(without(&base, &["eventTime"]), &missing("eventTime"));
    bad(with(&base, json!({"subject": null})), &missing("subject"));
    bad(with(&base, json!({"id": ""})), &missing("id"));
    bad(with(&base, json!({"eventType": ""})), &missing("eventType"));
    bad(base.to_string().replace("\"id\"", "\"ID\""), &missing("id"));
    bad(
        with(&base, json!({"id": 1})),
        "Token Expected: String, Actual Token Received: Integer.",
    );
    bad(
        with(&base, json!({"subject": 1.5})),
        "Token Expected: String, Actual Token Received: Float.",
    );
    bad(
        with(&base, json!({"eventType": ["T"]})),
        "Token Expected: String, Actual Token Received: StartArray.",
    );
    bad(
        with(&base, json!({"dataVersion": 1})),
        "Token Expected: String, Actual Token Received: Integer.",
    );
    bad(
        with(&base, json!({"topic": {}})),
        "Token Expected: String, Actual Token Received: StartObject.",
    );
    bad(
        with(&base, json!({"eventTime": "soon"})),
        "Property 'eventTime' is not a date-time.",
    );
    bad(
        with(&base, json!({"eventTime": ""})),
        "Property 'eventTime' is not a date-time.",
    );
    bad(
        with(&base, json!({"metadataVersion": "2"})),
        "requires 'metadataVersion' property to be set to '1'.",
    );
    bad(
        with(&base, json!({"metadataVersion": 1})),
        "requires 'metadataVersion' property to be set to '1'.",
    );
    bad(
        base.to_string().replacen('{', "{\"id\":\"0\",", 1),
        "Property 'id' is repeated.",
    );

    for topic in ["t", "", &TOPIC.to_uppercase()] {
        let event = with(&base, json!({"topic": topic}));
        check(
            &format!("[{event}]"),
            Err((
                401,
                "Unauthorized",
                "The request is not authorized to publish events for the topic '",
            )),
        );
    }
}

#[test]
fn bodies_that_are_no_array_of_objects() {
    let schemas = [EventSchema::EventGrid, EventSchema::Custom];
    for rules in schemas.map(|schema| rules(PublishApi::Cloud, schema)) {
        let check = |body: &str, message: &str| {
            check(&rules, &head(JSON), body, Err((400, "InputJsonInvalid", message)));
        };
        check("[]", NONCONFORMING);
        check("", "It is not valid JSON: unexpected end of input at byte 0.");
        check("[{", "It is not valid JSON: ");
        check("{\"a\":1", "It is not valid JSON: ");
        check("nothing", "It is not valid JSON: expected a value at byte 0.");
        check(
            "\"text\"",
            "Token Expected: StartArray, Actual Token Received: String.",
        );
        check("null", "Token Expected: StartArray, Actual Token Received: Null.");
        check(
            "true",
            "Token Expected: StartArray, Actual Token Received: Boolean.",
        );
        check(
            "[1]",
            "Token Expected: StartObject, Actual Token Received: Integer.",
        );
        check(
            "[[{}]]",
            "Token Expected: StartObject, Actual Token Received: StartArray.",
        );
        check(
            "[\"<object at 0x7f>\"]",
            "Token Expected: StartObject, Actual Token Received: String.",
        );
    }
    let grid = rules(PublishApi::Cloud, EventSchema::EventGrid);
    let good = grid_event().to_string();
    for body in [
        format!("[{good}]]"),
        format!("{good}{good}"),
        format!("[{good},]"),
    ] {
        check(
            &grid,
            &head(JSON),
            &body,
            Err((400, "InputJsonInvalid", "It is not valid JSON: ")),
        );
    }
    let nested =
        with(&grid_event(), json!({"data": "@"})).replace("\"@\"", &("[".repeat(126) + &"]".repeat(126)));
    check(&grid, &head(JSON), &format!("[{nested}]"), Ok(1));
    let nested = nested.replace("[[", "[[[").replace("]]", "]]]");
    check(
        &grid,
        &head(JSON),
        &nested,
        Err((400, "InputJsonInvalid", "nested too deeply")),
    );
    let broken = parse(
        &grid,
        &head(JSON),
        Bytes::from_static(b"[{\"id\":\"\xff\"}]"),
        |_| 0,
    );
    assert!(
        broken
            .unwrap_err()
            .message
            .ends_with("It is not valid UTF-8 at byte 8.")
    );
    // The body is parsed as JSON for any content type.
    for content_type in [None, Some(""), Some("text/plain"), CE_BATCH] {
        check(&grid, &head(content_type), &good, Ok(1));
    }
    let parsed = read(&grid, &head(JSON), &format!("\u{feff}{good}")).unwrap();
    assert_eq!(&parsed.body[parsed.events[0].object.range()], good.as_bytes());
}

#[test]
fn event_grid_events_on_the_edge() {
    let rules = rules(PublishApi::Edge, EventSchema::EventGrid);
    let base = grid_event();
    let check =
        |event: String, expected: Expected<'_>| check(&rules, &head(JSON), &format!("[{event}]"), expected);
    let bad = |event: String, message: &str| check(event, Err((400, "InputJsonInvalid", message)));
    check(base.to_string(), Ok(1));
    check(with(&base, json!({"topic": "t", "metadataVersion": "1"})), Ok(1));
    check(with(&base, json!({"eventTime": "whenever"})), Ok(1));
    check(
        base.to_string()
            .replace("eventType", "EventType")
            .replace("id", "Id"),
        Ok(1),
    );
    bad(without(&base, &["dataVersion"]), &missing("dataVersion"));
    bad(with(&base, json!({"dataVersion": null})), &missing("dataVersion"));
    bad(without(&base, &["eventTime"]), &missing("eventTime"));
    bad(
        with(&base, json!({"eventTime": 5})),
        "Token Expected: String, Actual Token Received: Integer.",
    );
    bad(
        with(&base, json!({"metadataVersion": "2"})),
        "requires 'metadataVersion' property to be set to '1'.",
    );
    bad(
        with(&base, json!({"topic": "other"})),
        "Property 'topic' must be 't'",
    );
    bad(
        with(&base, json!({"topic": TOPIC})),
        "Property 'topic' must be 't'",
    );
    bad(with(&base, json!({"ID": "2"})), "Property 'id' is repeated.");
}

#[test]
fn cloud_events_in_structured_mode() {
    let cloud = rules(PublishApi::Cloud, EventSchema::CloudEvent);
    let edge = rules(PublishApi::Edge, EventSchema::CloudEvent);
    let base = cloud_event();
    let one = base.to_string();
    for rules in [&cloud, &edge] {
        check(rules, &head(CE_ONE), &one, Ok(1));
        check(rules, &head(JSON), &one, Ok(1));
        check(rules, &head(CE_BATCH), &format!("[{one},{one}]"), Ok(2));
        let mode = |content_type, body: &str| read(rules, &head(content_type), body).unwrap().mode;
        assert_eq!(mode(CE_ONE, &one), PublishMode::Single);
        assert_eq!(mode(CE_BATCH, &format!("[{one}]")), PublishMode::Batch);
        for content_type in [CE_ONE, JSON] {
            let message = "'CloudEventV10' schema. The JSON received does not conform to the expected schema. \
                           Token Expected: StartObject, Actual Token Received: StartArray.";
            check(
                rules,
                &head(content_type),
                &format!("[{one}]"),
                Err((400, "InputJsonInvalid", message)),
            );
        }
        let message = "Token Expected: StartArray, Actual Token Received: StartObject.";
        check(
            rules,
            &head(CE_BATCH),
            &one,
            Err((400, "InputJsonInvalid", message)),
        );
        check(
            rules,
            &head(CE_BATCH),
            "[]",
            Err((400, "InputJsonInvalid", NONCONFORMING)),
        );
        for content_type in [
            None,
            Some(""),
            Some("text/plain"),
            Some("application/cloudevents"),
            Some("application/xml"),
        ] {
            let message = "The Content-Type header is either missing or it doesn't have a valid value.";
            check(
                rules,
                &head(content_type),
                &one,
                Err((415, "InvalidContentType", message)),
            );
        }
    }

    let ok = |event: String| check(&cloud, &head(CE_ONE), &event, Ok(1));
    let bad = |event: String, message: &str| {
        check(
            &cloud,
            &head(CE_ONE),
            &event,
            Err((400, "InputJsonInvalid", message)),
        );
    };
    ok(without(&base, &["data", "ext1"]));
    ok(with(
        &base,
        json!({"time": "2026-11-15T20:18:28.5Z", "subject": "s", "dataschema": "#1", "datacontenttype": "application/json"}),
    ));
    ok(with(
        &base,
        json!({"time": null, "subject": null, "data_base64": null}),
    ));
    ok(with(&base, json!({"data": null, "data_base64": "YWJj"})));
    bad("{}".into(), &missing("specversion"));
    bad(without(&base, &["type", "source", "id"]), &missing("eventType"));
    bad(without(&base, &["source", "id"]), &missing("source"));
    bad(without(&base, &["id"]), &missing("id"));
    bad(with(&base, json!({"source": ""})), &missing("source"));
    bad(with(&base, json!({"type": ""})), &missing("eventType"));
    bad(with(&base, json!({"id": ""})), &missing("id"));
    bad(
        with(&base, json!({"id": 7})),
        "Token Expected: String, Actual Token Received: Integer.",
    );
    bad(
        with(&base, json!({"subject": 7})),
        "Token Expected: String, Actual Token Received: Integer.",
    );
    bad(
        with(&base, json!({"time": "soon"})),
        "Property 'time' is not a date-time.",
    );
    bad(
        with(&base, json!({"data_base64": "YWJj"})),
        "Only one of the properties 'data' and 'data_base64'",
    );
    bad(grid_event().to_string(), &missing("specversion"));
    for version in ["0.3", "1.0-rc1", "1.1"] {
        bad(
            with(&base, json!({"specversion": version})),
            "requires 'specversion' property to be set to '1.0'.",
        );
    }
    check(
        &edge,
        &head(CE_ONE),
        &with(&base, json!({"specversion": "1.0-rc1"})),
        Ok(1),
    );
    let sample = with(&base, json!({"specversion": "1.0-rc1"})).replace("specversion", "specVersion");
    check(&edge, &head(CE_ONE), &sample, Ok(1));
    check(
        &edge,
        &head(CE_ONE),
        &with(&base, json!({"specversion": "0.3"})),
        Err((
            400,
            "InputJsonInvalid",
            "requires 'specversion' property to be set to '1.0'.",
        )),
    );
}

#[test]
fn a_cloud_event_in_binary_mode_becomes_a_structured_one() {
    let rules = rules(PublishApi::Cloud, EventSchema::CloudEvent);
    let headers = [
        ("CE-SpecVersion", "1.0"),
        ("ce-type", "T%20%22quoted%22"),
        ("ce-source", "/src"),
        ("ce-id", "%E2%82%AC1"),
        ("ce-time", "2026-01-01T00:00:00Z"),
        ("ce-ext1", "v"),
        ("ce-datacontenttype", "text/plain"),
        ("traceparent", "00-1-2-00"),
    ];
    let head = PublishHeaders {
        content_type: JSON,
        ce_headers: &headers,
    };
    let body = Bytes::from_static(b" {\"n\": 1} ");
    let mut seen = None;
    let parsed = parse(&rules, &head, body, |event| {
        seen = event.envelope.data.map(|data| data.text().to_string());
        7
    });
    let parsed = parsed.unwrap();
    assert_eq!(seen.as_deref(), Some("{\"n\": 1}"));
    assert_eq!((parsed.mode, parsed.events[0].matched), (PublishMode::Binary, 7));
    assert_eq!(parsed.events[0].object.range(), 0..parsed.body.len());
    assert_eq!(
        serde_json::from_slice::<Value>(&parsed.body).unwrap(),
        json!({"specversion": "1.0", "type": "T \"quoted\"", "source": "/src", "id": "€1",
               "time": "2026-01-01T00:00:00Z", "ext1": "v",
               "datacontenttype": "application/json; charset=utf-8", "data": {"n": 1}})
    );

    // Any one of the four headers selects binary mode.
    for header in ["ce-specversion", "ce-type", "ce-source", "ce-id"] {
        let error = read(
            &rules,
            &PublishHeaders {
                content_type: JSON,
                ce_headers: &[(header, "1.0")],
            },
            "{}",
        )
        .unwrap_err();
        assert_eq!((error.status, error.detail), (400, "InvalidCloudEventHeader"));
    }
    let one = cloud_event().to_string();
    check(
        &rules,
        &PublishHeaders {
            content_type: JSON,
            ce_headers: &[("ce-time", "x")],
        },
        &one,
        Ok(1),
    );
}

#[test]
fn binary_mode_refuses() {
    let rules = rules(PublishApi::Cloud, EventSchema::CloudEvent);
    let good = [
        ("ce-specversion", "1.0"),
        ("ce-type", "T"),
        ("ce-source", "s"),
        ("ce-id", "1"),
    ];
    let check = |content_type, headers: &[(&str, &str)], body: &str, expected: Expected<'_>| {
        check(
            &rules,
            &PublishHeaders {
                content_type,
                ce_headers: headers,
            },
            body,
            expected,
        );
    };
    check(JSON, &good, "1", Ok(1));
    for (index, &(name, _)) in good.iter().enumerate() {
        let mut headers = good.to_vec();
        headers[index].1 = "";
        let message = format!(
            "{name} header is empty for the cloud event. Please check required attributes at https://"
        );
        check(
            JSON,
            &headers,
            "1",
            Err((400, "InvalidCloudEventHeader", &message)),
        );
        headers.remove(index);
        let message = format!(
            "{name} header is missing for the cloud event. Please check required attributes at https://"
        );
        check(
            JSON,
            &headers,
            "1",
            Err((400, "InvalidCloudEventHeader", &message)),
        );
    }
    for content_type in [
        None,
        Some("text/plain"),
        Some("application/octet-stream"),
        Some("application/x+json"),
    ] {
        check(
            content_type,
            &good,
            "1",
            Err((
                415,
                "InvalidContentType",
                "The Content-Type header is either missing",
            )),
        );
    }
    for content_type in [CE_ONE, CE_BATCH] {
        check(
            content_type,
            &good,
            "1",
            Err((
                400,
                "InvalidCloudEventHeader",
                "in binary mode and a Content-Type",
            )),
        );
    }
    check(
        JSON,
        &good,
        "",
        Err((400, "InputJsonInvalid", "The body is empty.")),
    );
    for body in ["1,\"ext\":2", "1},{", "{", "nope", " "] {
        check(
            JSON,
            &good,
            body,
            Err((400, "InputJsonInvalid", "It is not valid JSON: ")),
        );
    }
    let also = |name, value| [&good[..], &[(name, value)]].concat();
    check(
        JSON,
        &also("ce-ext", "%ff"),
        "1",
        Err((400, "InvalidCloudEventHeader", "ce-ext header is invalid")),
    );
    check(
        JSON,
        &also("Ce-Id", "2"),
        "1",
        Err((400, "InvalidCloudEventHeader", "Ce-Id header is invalid")),
    );
    check(
        JSON,
        &also("ce-data", "2"),
        "1",
        Err((400, "InputJsonInvalid", "Property 'data' is repeated.")),
    );
    check(
        JSON,
        &also("ce-data_base64", "2"),
        "1",
        Err((400, "InputJsonInvalid", "Only one of the properties")),
    );
    check(
        JSON,
        &also("ce-time", "soon"),
        "1",
        Err((400, "InputJsonInvalid", "Property 'time' is not a date-time.")),
    );
}

#[test]
fn binary_mode_on_the_edge_takes_any_content() {
    let rules = rules(PublishApi::Edge, EventSchema::CloudEvent);
    let headers = [
        ("ce-specversion", "1.0-rc1"),
        ("ce-type", "T"),
        ("ce-source", "s"),
        ("ce-id", "1"),
    ];
    let check = |content_type, body: &str, name: &str, expected: Value| {
        let parsed = read(
            &rules,
            &PublishHeaders {
                content_type,
                ce_headers: &headers,
            },
            body,
        )
        .unwrap();
        let event: Value = serde_json::from_slice(&parsed.body).unwrap();
        assert_eq!(event[name], expected, "{event}");
    };
    check(Some("text/plain"), "abc", "data_base64", json!("YWJj"));
    check(Some("text/plain"), "abc", "datacontenttype", json!("text/plain"));
    check(Some("application/x+json"), "[1]", "data", json!([1]));
    check(None, "[1]", "data", json!([1]));
    check(None, "", "data", json!(null));
}

#[test]
fn events_for_a_domain_name_their_topic() {
    let names = |rules: &EventRules<'_>, content_type, body: &str| {
        let mut names = Vec::new();
        parse(
            rules,
            &head(content_type),
            Bytes::copy_from_slice(body.as_bytes()),
            |event| {
                names.push(event.domain_topic.clone().unwrap().into_owned());
                0
            },
        )
        .map(|_| names)
    };
    let mapping = InputMapping {
        topic: MappedField {
            source_field: Some("to.topic".into()),
            default_value: None,
        },
        subject: MappedField {
            source_field: None,
            default_value: Some("s".into()),
        },
        event_type: MappedField {
            source_field: None,
            default_value: Some("T".into()),
        },
        ..InputMapping::default()
    };
    let grid = domain(EventSchema::EventGrid);
    let cloud = domain(EventSchema::CloudEvent);
    let custom = EventRules {
        mapping: Some(&mapping),
        ..domain(EventSchema::Custom)
    };
    let full = format!("{}/TOPICS/foo", DOMAIN.to_uppercase());
    let bodies = |topic: &Value| {
        [
            (
                &grid,
                JSON,
                format!("[{}]", with(&grid_event(), json!({"topic": topic}))),
            ),
            (&cloud, CE_ONE, with(&cloud_event(), json!({"source": topic}))),
            (&custom, JSON, json!([{"to": {"topic": topic}}]).to_string()),
        ]
    };
    for (topic, expected) in [
        ("foo", "foo"),
        (full.as_str(), "foo"),
        ("Foo-1", "Foo-1"),
        ("é", "é"),
    ] {
        for (rules, content_type, body) in bodies(&json!(topic)) {
            assert_eq!(names(rules, content_type, &body).unwrap(), [expected], "{body}");
            let escaped = body.replace("foo", "\\u0066oo");
            assert_eq!(
                names(rules, content_type, &escaped).unwrap(),
                [expected],
                "{escaped}"
            );
        }
    }
    let other = format!("{DOMAIN}x/topics/foo");
    let below = format!("{DOMAIN}/topics/foo/bar");
    let nameless = format!("{DOMAIN}/topics/");
    for topic in [
        "https://x/foo",
        "urn:foo",
        "/foo",
        "foo/bar",
        DOMAIN,
        &nameless,
        &other,
        &below,
        TOPIC,
    ] {
        for (rules, content_type, body) in bodies(&json!(topic)) {
            let message = format!(
                "Required property 'topic' needs to either be a full resource id or should be just the name of the domain topic. Found: {topic}."
            );
            let error = names(rules, content_type, &body).unwrap_err();
            assert_eq!((error.status, error.detail), (400, "InputJsonInvalid"));
            assert_eq!(error.message, message);
        }
    }
    let names_missing = ["topic", "source", "to.topic"];
    for ((rules, content_type, body), name) in bodies(&Value::Null).into_iter().zip(names_missing) {
        let error = names(rules, content_type, &body).unwrap_err();
        assert!(error.message.ends_with(&missing(name)), "{error}");
    }
    check(
        &grid,
        &head(JSON),
        &grid_event().to_string(),
        Err((400, "InputJsonInvalid", &missing("topic"))),
    );
    check(
        &domain(EventSchema::Custom),
        &head(JSON),
        "[{}]",
        Err((400, "InputJsonInvalid", &missing("topic"))),
    );
}

#[test]
fn custom_events_are_checked_through_their_mapping() {
    let mapped = |source_field: Option<&str>, default_value: Option<&str>| MappedField {
        source_field: source_field.map(Into::into),
        default_value: default_value.map(Into::into),
    };
    let mapping = InputMapping {
        id: mapped(Some("myId"), None),
        event_time: mapped(Some("at"), None),
        event_type: mapped(Some("meta.type"), Some("Default")),
        subject: mapped(Some("mySubject"), None),
        data_version: mapped(Some("meta.version"), None),
        topic: MappedField::default(),
    };
    let with_mapping = EventRules {
        mapping: Some(&mapping),
        ..rules(PublishApi::Cloud, EventSchema::Custom)
    };
    let ok = |event: Value| check(&with_mapping, &head(JSON), &json!([event]).to_string(), Ok(1));
    let bad = |event: Value, message: &str| {
        check(
            &with_mapping,
            &head(JSON),
            &json!([event]).to_string(),
            Err((400, "InputJsonInvalid", message)),
        );
    };
    ok(json!({"mySubject": "s"}));
    ok(json!({"MYSUBJECT": ""}));
    ok(json!({"mySubject": "s", "meta": {"type": null, "version": null}, "myId": null, "at": null}));
    ok(
        json!({"mySubject": "s", "meta": {"type": "T", "version": "1"}, "myId": "1", "at": "2026-01-01T00:00:00Z"}),
    );
    bad(
        json!({}),
        "'CustomEvent' schema and requires 'mySubject' property to be set.",
    );
    bad(json!({"mySubject": null}), &missing("mySubject"));
    bad(
        json!({"mySubject": 1}),
        "Token Expected: String, Actual Token Received: Integer.",
    );
    bad(
        json!({"mySubject": "s", "meta": {"type": ""}}),
        &missing("meta.type"),
    );
    bad(
        json!({"mySubject": "s", "meta": {"type": 1}}),
        "Token Expected: String",
    );
    bad(json!({"mySubject": "s", "myId": 1}), "Token Expected: String");
    bad(
        json!({"mySubject": "s", "at": "soon"}),
        "Property 'at' is not a date-time.",
    );

    let nothing = InputMapping {
        subject: mapped(None, Some("s")),
        ..InputMapping::default()
    };
    let rules_bare = EventRules {
        mapping: Some(&nothing),
        ..with_mapping
    };
    check(
        &rules_bare,
        &head(JSON),
        "[{}]",
        Err((400, "InputJsonInvalid", &missing("eventType"))),
    );
    check(
        &rules(PublishApi::Edge, EventSchema::Custom),
        &head(JSON),
        "[{}, {\"id\":1}]",
        Ok(2),
    );

    let body = r#"[{"mySubject":"s","meta":{"version":"1\u002e5"}}]"#;
    let parsed = read(&with_mapping, &head(JSON), body).unwrap();
    assert_eq!(&parsed.body[parsed.events[0].data_version.range()], br"1\u002e5");
    assert_eq!(parsed.events[0].lacks, MissingMembers::default());
}

#[test]
fn limits_are_inclusive() {
    let event = grid_event().to_string();
    let batch = format!("[{event},{event},{event}]");
    let exact = EventRules {
        limits: PublishLimits {
            request_bytes: batch.len(),
            event_bytes: event.len(),
            events_max: 3,
        },
        ..rules(PublishApi::Cloud, EventSchema::EventGrid)
    };
    let check = |limits: PublishLimits, expected: Expected<'_>| {
        check(&EventRules { limits, ..exact }, &head(JSON), &batch, expected)
    };
    let limits = exact.limits;
    fn too_large(message: &str) -> Expected<'_> {
        Err((413, "PayloadTooLarge", message))
    }
    check(limits, Ok(3));
    let message = format!("The maximum size ({}) has been exceeded.", batch.len() - 1);
    check(
        PublishLimits {
            request_bytes: batch.len() - 1,
            ..limits
        },
        too_large(&message),
    );
    let message = format!(
        "The event at index 0 exceeds the limit of {} bytes.",
        event.len() - 1
    );
    check(
        PublishLimits {
            event_bytes: event.len() - 1,
            ..limits
        },
        too_large(&message),
    );
    check(
        PublishLimits {
            events_max: 2,
            ..limits
        },
        too_large("The request exceeds the limit of 2 events."),
    );
}

#[test]
fn spans_and_stamps() {
    let rules = rules(PublishApi::Cloud, EventSchema::EventGrid);
    let check = |extra: &str, topic: &str, data_version: &str, lacks: (bool, bool, bool)| {
        let event = format!(
            r#"{{"id":"1" , "subject":"s","eventType":"T","eventTime":"2026-01-01T00:00:00Z"{extra}}}"#
        );
        let parsed = read(&rules, &head(JSON), &format!("[ {event} ]")).unwrap();
        let text = |span: ByteSpan| std::str::from_utf8(&parsed.body[span.range()]).unwrap();
        let found = parsed.events[0];
        assert_eq!(text(found.object), event);
        assert_eq!(text(found.topic), topic);
        assert_eq!(text(found.data_version), data_version);
        let MissingMembers {
            topic,
            data_version,
            metadata_version,
        } = found.lacks;
        assert_eq!((topic, data_version, metadata_version), lacks, "{event}");
    };
    check("", "", "", (true, true, true));
    check(r#","dataVersion":"1.0""#, "", "1.0", (true, false, true));
    check(
        r#","dataVersion":"","metadataVersion":"1""#,
        "",
        "",
        (true, false, false),
    );
    check(
        r#", "topic" : null ,"dataVersion":null"#,
        r#""topic" : null"#,
        "",
        (true, false, true),
    );
    let topic = format!(r#""topic":"{TOPIC}""#);
    check(&format!(",{topic}"), &topic, "", (false, true, true));
    let topic = topic.replacen("topic", "t\\u006fpic", 1);
    check(&format!(",\n{topic}\n"), &topic, "", (false, true, true));
}

#[test]
fn the_body_is_not_copied() {
    let body = Bytes::from(format!("[{}]", grid_event()));
    let parsed = parse(
        &rules(PublishApi::Cloud, EventSchema::EventGrid),
        &head(JSON),
        body.clone(),
        |_| 0,
    )
    .unwrap();
    assert_eq!(parsed.body.as_ptr(), body.as_ptr());
}

#[test]
fn times_that_publishers_write() {
    for good in [
        "2026-11-15T20:18:28.479799Z",
        "2026-11-15T20:18:39.386Z",
        "2019-07-28T21:03:07+00:00",
        "2026-11-15T20:18:28",
        "2026-11-15 20:18:28Z",
        "2020-08-13T17:18:13.1647262Z",
        "2024-02-29T00:00:00-12:30",
        "0001-01-01T00:00:00",
        "9999-12-31T23:59:59.9999999Z",
        "2017-06-26T18:41:00.9584103Z",
        "2030-01-02 03:04:05 +00:00",
        "2000-02-29t00:00:00z",
    ] {
        assert!(is_date_time(good), "{good}");
    }
    for bad in [
        "",
        "soon",
        "12",
        "2026-13-01T00:00:00Z",
        "2026-02-29T00:00:00Z",
        "1900-02-29T00:00:00Z",
        "2026-04-31T00:00:00Z",
        "2026-01-01T24:00:00Z",
        "2026-01-01T00:60:00Z",
        "2026-01-01T00:00:00.Z",
        "2026-01-01T00:00:00ZZ",
        "2026-01-01T00:00:00+99:00",
        "2026-01-01T00:00:00+0x:00",
        "0000-01-01T00:00:00Z",
        "2026-01-00T00:00:00Z",
        "2026-1-1T00:00:00é",
    ] {
        assert!(!is_date_time(bad), "{bad}");
    }
}

/// Every publish request that was recorded from a real client, and whether the server accepted it.
#[test]
fn recorded_requests() {
    macro_rules! recorded {
        ($file:literal) => {
            include_str!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../../tests/data/wire/",
                $file
            ))
        };
    }
    let mapped = |field: &str, default: Option<&str>| MappedField {
        source_field: Some(field.into()),
        default_value: default.map(Into::into),
    };
    let mapping = InputMapping {
        subject: mapped("mySubject", None),
        event_type: mapped("myType", Some("T")),
        ..InputMapping::default()
    };
    let mut read_count = 0;
    for file in [
        recorded!("python-publisher.json"),
        recorded!("js-publisher.json"),
        recorded!("iot-edge-module.json"),
    ] {
        for exchange in serde_json::from_str::<Vec<Value>>(file).unwrap() {
            let request = &exchange["request"];
            let path = request["path"].as_str().unwrap();
            if request["method"] != "POST" || request["body"].is_string() {
                continue;
            }
            let topic = path.split('/').nth(2).unwrap();
            let (road, schema) = match topic {
                _ if !path.ends_with("/api/events") => (PublishApi::Edge, EventSchema::EventGrid),
                "tce" | "jce" => (PublishApi::Cloud, EventSchema::CloudEvent),
                "tcu" | "jcu" => (PublishApi::Cloud, EventSchema::Custom),
                _ => (PublishApi::Cloud, EventSchema::EventGrid),
            };
            let rules = EventRules {
                topic_id: topic,
                mapping: (schema == EventSchema::Custom).then_some(&mapping),
                ..rules(road, schema)
            };
            let head = head(request["headers"]["Content-Type"].as_str());
            let body = &request["body"];
            // The stand-in server accepted an empty list; the service does not.
            let is_empty = body.as_array().is_some_and(Vec::is_empty);
            let is_good = exchange["response_needed"]["status"] != 400 && !is_empty;
            let found = read(&rules, &head, &body.to_string());
            match found {
                Ok(parsed) => {
                    assert!(is_good, "{exchange}");
                    assert_eq!(parsed.events.len(), body.as_array().unwrap().len());
                }
                Err(error) => {
                    assert!(!is_good, "{error}: {exchange}");
                    assert_eq!(error.status, 400);
                }
            }
            read_count += 1;
        }
    }
    assert_eq!(read_count, 41);
}

/// A small generator, so that a failing case can be reproduced from its seed.
struct SeededEventGenerator(u64);

impl SeededEventGenerator {
    fn new(seed: u64) -> SeededEventGenerator {
        SeededEventGenerator(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % sides
    }

    fn pick<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.roll(choices.len())]
    }

    /// An event of this schema: mostly valid, in any order, with unusual text and unusual members.
    fn event(&mut self, schema: EventSchema) -> String {
        let texts = [
            "\"a\"",
            "\"\"",
            "\"é\\n\\u20AC\"",
            "\"\\ud83d\\ude00/\\\"\"",
            "null",
            "1.5e3",
            "[{\"id\":1}]",
        ];
        let names: &[&str] = match schema {
            EventSchema::EventGrid => &["id", "subject", "eventType", "dataVersion", "data", "x"],
            _ => &[
                "id",
                "source",
                "type",
                "subject",
                "data",
                "data_base64",
                "dataschema",
                "x",
            ],
        };
        let mut members: Vec<String> = Vec::new();
        for name in names {
            let skip = self.roll(12) == 0;
            let value = if self.roll(8) == 0 {
                self.pick(&texts)
            } else {
                self.pick(&texts[..1])
            };
            if !skip && *name != "data_base64" {
                members.push(format!("\"{name}\":{value}"));
            }
        }
        members.push(match schema {
            EventSchema::EventGrid => "\"eventTime\":\"2026-01-01T00:00:00Z\"".into(),
            _ => "\"specversion\" : \"1.0\"".into(),
        });
        if schema == EventSchema::EventGrid && self.roll(3) == 0 {
            members.push(format!("\"topic\":\"{TOPIC}\""));
        }
        if self.roll(20) == 0 {
            members.push(members[0].clone());
        }
        for at in (1..members.len()).rev() {
            members.swap(at, self.roll(at + 1));
        }
        let comma = self.pick(&[",", " ,\n", ", "]);
        format!("{{{}}}", members.join(comma))
    }

    fn damage(&mut self, bytes: &mut Vec<u8>) {
        let at = self.roll(bytes.len().max(1));
        match self.roll(5) {
            0 if !bytes.is_empty() => bytes[at] = self.roll(256) as u8,
            1 if !bytes.is_empty() => bytes[at] = *b"{}[],:\"\\n1 "[..].get(self.roll(11)).unwrap(),
            2 if !bytes.is_empty() => drop(bytes.remove(at)),
            3 => bytes.insert(at.min(bytes.len()), *b"{}[],:\"\\n1 ".get(self.roll(11)).unwrap()),
            _ => bytes.truncate(at),
        }
    }
}

/// Accepted bodies are parsed as serde_json parses them, and every span covers the right text.
fn agrees_with_serde_json(rules: &EventRules<'_>, head: &PublishHeaders<'_>, body: &[u8]) -> bool {
    let mut seen: Vec<[Option<String>; 7]> = Vec::new();
    let parsed = parse(rules, head, Bytes::copy_from_slice(body), |event| {
        let e = &event.envelope;
        let members = [
            e.id,
            e.topic,
            e.subject,
            e.event_type,
            e.time,
            e.data_version,
            e.data,
        ];
        seen.push(members.map(|member| member.map(|raw| raw.text().to_string())));
        event.index as u32
    });
    let Ok(parsed) = parsed else {
        return false;
    };
    let names = match rules.schema {
        EventSchema::EventGrid => [
            "id",
            "topic",
            "subject",
            "eventType",
            "eventTime",
            "dataVersion",
            "data",
        ],
        _ => ["id", "source", "subject", "type", "time", "dataschema", "data"],
    };
    let whole: Value = serde_json::from_slice(&parsed.body).unwrap();
    let theirs = match &whole {
        Value::Array(events) => events.as_slice(),
        event => std::slice::from_ref(event),
    };
    assert_eq!(theirs.len(), parsed.events.len());
    for ((event, found), seen) in theirs.iter().zip(&parsed.events).zip(&seen) {
        let text = |span: ByteSpan| std::str::from_utf8(&parsed.body[span.range()]).unwrap();
        let value = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(&value(text(found.object)), event);
        for (name, seen) in names.iter().zip(seen) {
            assert_eq!(
                seen.as_deref().map(value).as_ref(),
                event.get(*name),
                "{name} of {event}"
            );
        }
        if rules.schema == EventSchema::EventGrid {
            let version = value(&format!("\"{}\"", text(found.data_version)));
            assert_eq!(
                version,
                *event
                    .get("dataVersion")
                    .filter(|v| v.is_string())
                    .unwrap_or(&json!(""))
            );
            let topic = value(&format!("{{{}}}", text(found.topic)));
            assert_eq!(topic.get("topic"), event.get("topic"));
            assert_eq!(found.lacks.topic, event.get("topic").is_none_or(Value::is_null));
            assert_eq!(found.lacks.data_version, event.get("dataVersion").is_none());
            assert_eq!(
                found.lacks.metadata_version,
                event.get("metadataVersion").is_none()
            );
        }
    }
    true
}

#[test]
fn whatever_is_accepted_is_what_serde_json_reads() {
    let (mut accepted, mut refused) = (0, 0);
    for seed in 1..=6_000 {
        let mut dice = SeededEventGenerator::new(seed);
        let schema = [EventSchema::EventGrid, EventSchema::CloudEvent][dice.roll(2)];
        let events: Vec<String> = (0..1 + dice.roll(3)).map(|_| dice.event(schema)).collect();
        let mut body = format!("[{}]", events.join(", ")).into_bytes();
        for _ in 0..dice.roll(3) {
            dice.damage(&mut body);
        }
        let rules = rules(PublishApi::Cloud, schema);
        match agrees_with_serde_json(&rules, &head(CE_BATCH), &body) {
            true => accepted += 1,
            false => refused += 1,
        }
    }
    assert!(
        accepted > 500 && refused > 500,
        "{accepted} accepted, {refused} refused"
    );
}

#[test]
fn arbitrary_bytes_never_panic() {
    let mapping = InputMapping {
        subject: MappedField {
            source_field: Some("a.b".into()),
            default_value: None,
        },
        ..InputMapping::default()
    };
    let pieces: &[&[u8]] = &[
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\"",
        b"\\",
        b"\"id\"",
        b"\"topic\"",
        b"\"a\"",
        b"null",
        b"1",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\"\\u",
        b" ",
        b"\xc3\xa9",
        b"\"specversion\":\"1.0\"",
        b"\"eventTime\":\"2026-01-01T00:00:0",
    ];
    for seed in 1..=20_000 {
        let mut dice = SeededEventGenerator::new(seed);
        let body: Vec<u8> = (0..dice.roll(24))
            .flat_map(|_| dice.pick(pieces).to_vec())
            .collect();
        let body = Bytes::from(body);
        let value = String::from_utf8_lossy(&body).into_owned();
        let headers = [
            ("ce-specversion", "1.0"),
            ("ce-type", "T"),
            ("ce-source", &value),
            ("ce-id", "1"),
            ("é", ""),
        ];
        let ce_headers: &[_] = if dice.roll(2) == 0 { &headers } else { &[] };
        let content_type = *dice.pick(&[&JSON, &CE_BATCH, &CE_ONE, &None]);
        for schema in [
            EventSchema::EventGrid,
            EventSchema::CloudEvent,
            EventSchema::Custom,
        ] {
            let road = [PublishApi::Cloud, PublishApi::Edge][dice.roll(2)];
            let rules = EventRules {
                mapping: (schema == EventSchema::Custom).then_some(&mapping),
                domain: dice.roll(2) == 0,
                ..rules(road, schema)
            };
            let _ = parse(
                &rules,
                &PublishHeaders {
                    content_type,
                    ce_headers,
                },
                body.clone(),
                |_| 0,
            );
        }
    }
}
