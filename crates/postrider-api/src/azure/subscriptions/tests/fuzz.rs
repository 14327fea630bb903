//! Fuzzing: bodies of the specification in which some values are replaced by others.

use super::test_server::{ApiTestServer, GROUP, web_hook};
use super::{T1, extension};
use proptest::prelude::*;
use serde_json::{Value, json};

const EXAMPLES: &str = include_str!("../../../../../../tests/data/arm/subscription-examples-2022-06-15.json");

/// Values that are valid nowhere, or only in one place.
fn odd() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        Just(json!("")),
        Just(json!("Hidden")),
        Just(json!("WebHook")),
        Just(json!("https://[::1")),
        Just(json!("\u{0}\r\n\u{10ffff}")),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!("x".repeat(5000))),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..30).prop_map(Value::from),
            prop::collection::btree_map(name(), inner, 0..4).prop_map(|map| json!(map)),
        ]
    })
}

fn name() -> impl Strategy<Value = String> {
    const KNOWN: [&str; 11] = [
        "properties",
        "destination",
        "endpointType",
        "endpointUrl",
        "deliveryAttributeMappings",
        "filter",
        "advancedFilters",
        "operatorType",
        "values",
        "identity",
        "postrider",
    ];
    prop_oneof![
        prop::sample::select(&KNOWN[..]).prop_map(str::to_owned),
        "\\PC{0,6}"
    ]
}

/// Replaces the value at the place that the numbers lead to; a last number may remove or add a
/// member instead.
fn exchange(body: &mut Value, way: &[usize], name: &str, value: Value) {
    let [turn, rest @ ..] = way else {
        *body = value;
        return;
    };
    match body {
        Value::Object(members) if *turn % 5 == 0 && rest.is_empty() => {
            drop(members.insert(name.to_owned(), value))
        }
        Value::Object(members) if *turn % 5 == 1 && rest.is_empty() => {
            let gone = members.keys().nth(turn % members.len().max(1)).cloned();
            gone.map(|gone| members.remove(&gone));
        }
        Value::Object(members) if !members.is_empty() => {
            let at = turn % members.len();
            let (_, inner) = members.iter_mut().nth(at).expect("it is within");
            exchange(inner, rest, name, value);
        }
        Value::Array(elements) if !elements.is_empty() => {
            let at = turn % elements.len();
            exchange(&mut elements[at], rest, name, value);
        }
        other => *other = value,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    // Any body is either accepted, or refused with a reason and without side effects.
    #[test]
    fn odd_bodies_are_taken_or_refused(
        example in any::<prop::sample::Index>(),
        changes in prop::collection::vec((prop::collection::vec(0..50usize, 0..6), name(), odd()), 1..4),
        put in any::<bool>(),
        on_storage in any::<bool>(),
    ) {
        let examples: Vec<Value> = serde_json::from_str(EXAMPLES).unwrap();
        let bodies: Vec<&Value> = examples.iter().map(|one| &one["body"]).filter(|body| !body.is_null()).collect();
        let mut body = bodies[example.index(bodies.len())].clone();
        for (way, name, value) in changes {
            exchange(&mut body, &way, &name, value);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let lab = ApiTestServer::new(false).await;
            lab.topic("t1").await;
            let storage = format!("{GROUP}/providers/Microsoft.Storage/storageAccounts/devstoreaccount1");
            let path = extension(if on_storage { &storage } else { T1 }, "sub");
            lab.arm("PUT", &path, Some(web_hook("/x", json!({"labels": ["l"]})))).await.expect(201);
            let before = lab.arm("GET", &path, None).await.expect(200);
            let got = lab.arm(if put { "PUT" } else { "PATCH" }, &path, Some(body.clone())).await;
            let after = lab.arm("GET", &path, None).await.expect(200);
            match got.status {
                201 => assert_eq!(after.properties()["provisioningState"], "Succeeded"),
                400 => {
                    assert!(!got.error().0.is_empty() && !got.error().1.is_empty(), "{}", got.body);
                    assert_eq!(after.body, before.body);
                }
                other => panic!("{other}: {body}"),
            }
        });
    }
}
