use super::*;
use crate::arm::EventGridId;
use crate::resources::{
    FieldError, ResourceLimits, Road, SubscriptionContext, TopicContext, parse_subscription,
    patch_subscription,
};
use postrider_core::event::EventSchema;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::profile::CLOUD_2021;
use postrider_core::subscription::BatchDefaults;
use postrider_core::time::Timestamp;

const NOW: Timestamp = Timestamp::from_secs(1_900_000_000); // 2030-03-17
const STORAGE: &str = "/subscriptions/S/resourceGroups/G/providers/Microsoft.Storage/storageAccounts/acc";
const TOPIC: &str = "/subscriptions/S/resourceGroups/G/providers/Microsoft.EventGrid/topics/T";
const BLOB_TYPES: [&str; 2] = ["Microsoft.Storage.BlobCreated", "Microsoft.Storage.BlobDeleted"];

fn read(
    body: &Value,
    version: &str,
    types: &[&str],
    previous: Option<&Subscription>,
    patch: bool,
) -> Result<Subscription, FieldError> {
    let limits = ResourceLimits {
        web_hook_https_only: true,
        ..ResourceLimits::default()
    };
    let context = SubscriptionContext {
        road: Road::Azure,
        name: "sub",
        topic: TopicContext {
            name: "T",
            input_schema: EventSchema::EventGrid,
            mapping: None,
            default_types: types,
        },
        limits: &limits,
        now: NOW,
        previous,
        api_version: version,
        shown: previous.map(settings),
    };
    let text = body.to_string();
    let raw = RawJson::parse(&text).unwrap();
    let spec = match patch {
        true => patch_subscription(raw, &context)?,
        false => parse_subscription(raw, &context)?,
    };
    Ok(spec.into_subscription(SubscriptionId(1), TopicId(1), None, NOW))
}

fn made(properties: Value) -> Subscription {
    read(
        &json!({ "properties": properties }),
        "2022-06-15",
        &[],
        None,
        false,
    )
    .expect("it is well-formed")
}

fn hook(url: &str) -> Value {
    json!({"endpointType": "WebHook", "properties": {"endpointUrl": url}})
}

fn shown(subscription: &Subscription) -> Value {
    view(subscription, &Scope::Topic(grid()), TOPIC, false).body()
}

fn grid() -> EventGridId {
    EventGridId {
        group: "G".into(),
        name: "T".into(),
    }
}

fn view<'a>(
    subscription: &'a Subscription,
    scope: &'a Scope,
    scope_id: &'a str,
    nested: bool,
) -> SubscriptionView<'a> {
    static VERSION: std::sync::LazyLock<ApiVersion> =
        std::sync::LazyLock::new(|| ApiVersion::parse("2022-06-15").unwrap());
    SubscriptionView {
        subscription,
        state: ProvisioningState::Succeeded,
        scope,
        scope_id,
        nested,
        api_version: &VERSION,
        shown: settings(subscription),
    }
}

fn settings(subscription: &Subscription) -> EffectiveSettings {
    EffectiveSettings::of(subscription, &CLOUD_2021, &BatchDefaults::default())
}

// The cloud's answers to a PUT and to the GET behind it, recorded from the az test suite.
#[test]
fn the_recorded_subscription_of_the_cloud() {
    let attributes = |secret: &str| {
        json!([
            {"name": "somestaticname1", "type": "Static", "properties": {"value": "somestaticvalue1", "isSecret": false}},
            {"name": "somestaticname2", "type": "Static", "properties": {"value": secret, "isSecret": true}},
            {"name": "somedynamicattribname1", "type": "Dynamic", "properties": {"sourceField": "data.key1"}},
        ])
    };
    let body = json!({"properties": {
        "destination": {"endpointType": "WebHook", "properties": {
            "endpointUrl": "https://host/path?code=x",
            "deliveryAttributeMappings": attributes("somestaticvalue2"),
        }},
        "filter": {"isSubjectCaseSensitive": false},
        "retryPolicy": {"maxDeliveryAttempts": 30, "eventTimeToLiveInMinutes": 1440},
    }});
    let subscription = read(&body, "2020-10-15-preview", &BLOB_TYPES, None, false).unwrap();
    let scope = Scope::Resource(STORAGE.into());
    let mut view = view(&subscription, &scope, STORAGE, false);
    view.state = ProvisioningState::Creating;

    let resource = |properties: Value| {
        json!({
            "id": format!("{STORAGE}/providers/Microsoft.EventGrid/eventSubscriptions/sub"),
            "name": "sub",
            "type": "Microsoft.EventGrid/eventSubscriptions",
            "systemData": null,
            "properties": properties,
        })
    };
    let topic = "/subscriptions/S/resourceGroups/G/providers/microsoft.storage/storageaccounts/acc";
    let first = resource(json!({
        "topic": topic,
        "provisioningState": "Creating",
        "destination": {"endpointType": "WebHook", "properties": {
            "endpointUrl": null,
            "endpointBaseUrl": "https://host/path",
            "deliveryAttributeMappings": attributes("somestaticvalue2"),
        }},
        "filter": {"includedEventTypes": BLOB_TYPES},
        "labels": null,
        "retryPolicy": {"maxDeliveryAttempts": 30, "eventTimeToLiveInMinutes": 1440},
    }));
    let text = body.to_string();
    assert_eq!(
        view.first_answer(SentMembers::of(RawJson::parse(&text).unwrap())),
        first
    );

    view.state = ProvisioningState::Succeeded;
    let read = resource(json!({
        "topic": topic,
        "provisioningState": "Succeeded",
        "destination": {"endpointType": "WebHook", "properties": {
            "endpointUrl": null,
            "endpointBaseUrl": "https://host/path",
            "maxEventsPerBatch": 1,
            "preferredBatchSizeInKilobytes": 64,
            "deliveryAttributeMappings": attributes("Hidden"),
        }},
        "filter": {"subjectBeginsWith": "", "subjectEndsWith": "", "includedEventTypes": BLOB_TYPES},
        "labels": null,
        "eventDeliverySchema": "EventGridSchema",
        "retryPolicy": {"maxDeliveryAttempts": 30, "eventTimeToLiveInMinutes": 1440},
    }));
    assert_eq!(view.body(), read);
    assert_eq!(
        delivery_attributes(&subscription.destination)["value"],
        attributes("somestaticvalue2")
    );
    assert_eq!(
        full_url(&subscription.destination).unwrap(),
        json!({"endpointUrl": "https://host/path?code=x"})
    );
}

#[test]
fn the_first_answer_has_what_was_sent_and_no_defaults_but_those_of_the_retry_policy() {
    let subscription = made(json!({"destination": hook("https://a/x")}));
    let scope = Scope::Topic(grid());
    let view = view(&subscription, &scope, TOPIC, false);
    let first = &view.first_answer(SentMembers::default())["properties"];
    let names: Vec<&String> = first.as_object().unwrap().keys().collect();
    let expected = [
        "destination",
        "labels",
        "provisioningState",
        "retryPolicy",
        "topic",
    ];
    assert_eq!(names, expected);
    let retry = json!({"maxDeliveryAttempts": 30, "eventTimeToLiveInMinutes": 1440});
    assert_eq!(first["retryPolicy"], retry);
    let sent = SentMembers {
        delivery_schema: true,
        filter: true,
    };
    let first = &view.first_answer(sent)["properties"];
    assert_eq!(
        (&first["eventDeliverySchema"], &first["filter"]),
        (&json!("EventGridSchema"), &json!({}))
    );
    let whole = view.body();
    assert_eq!(
        whole["properties"]["filter"],
        json!({"subjectBeginsWith": "", "subjectEndsWith": ""})
    );
    assert_eq!(whole["properties"]["retryPolicy"], retry);

    let check = |body: Value, expected: (bool, bool)| {
        let text = body.to_string();
        let sent = SentMembers::of(RawJson::parse(&text).unwrap());
        assert_eq!((sent.delivery_schema, sent.filter), expected, "{text}");
    };
    check(json!({}), (false, false));
    check(json!({"properties": {"filter": null}}), (false, false));
    check(
        json!({"properties": {"Filter": {}, "EventDeliverySchema": "x"}}),
        (true, true),
    );
}

#[test]
fn ids_and_types_follow_the_spelling() {
    let subscription = made(json!({"destination": hook("https://a/x")}));
    let check = |scope: Scope, id: &str, nested: bool, expected: (&str, &str)| {
        let body = view(&subscription, &scope, id, nested).body();
        let got = (body["id"].as_str().unwrap(), body["type"].as_str().unwrap());
        assert_eq!(got, (&*format!("{id}{}", expected.0), expected.1));
        body["properties"]["topic"].clone()
    };
    let extension = (
        "/providers/Microsoft.EventGrid/eventSubscriptions/sub",
        "Microsoft.EventGrid/eventSubscriptions",
    );
    let nested = |kind| ("/eventSubscriptions/sub", kind);
    let group = "/subscriptions/S/resourceGroups/G";
    let at = |path: &str| format!("{group}/providers/Microsoft.EventGrid/{path}");
    for (scope, path, kind) in [
        (
            Scope::Topic(grid()),
            "topics/T",
            "Microsoft.EventGrid/topics/eventSubscriptions",
        ),
        (
            Scope::Domain(grid()),
            "domains/T",
            "Microsoft.EventGrid/domains/eventSubscriptions",
        ),
        (
            Scope::DomainTopic {
                domain: grid(),
                name: "X".into(),
            },
            "domains/T/topics/X",
            "Microsoft.EventGrid/domains/topics/eventSubscriptions",
        ),
        (
            Scope::SystemTopic(grid()),
            "systemTopics/T",
            "Microsoft.EventGrid/systemTopics/eventSubscriptions",
        ),
    ] {
        check(scope.clone(), &at(path), false, extension);
        let topic = check(scope, &at(path), true, nested(kind));
        let provider = match path.starts_with("systemTopics") {
            true => "Microsoft.EventGrid",
            false => "microsoft.eventgrid",
        };
        assert_eq!(topic, format!("{group}/providers/{provider}/{path}"));
    }
    assert_eq!(check(Scope::Group("G".into()), group, false, extension), group);
    assert_eq!(
        check(Scope::Account, "/subscriptions/S", false, extension),
        "/subscriptions/S"
    );
}

#[test]
fn everything_a_subscription_can_have_is_shown() {
    let identity = format!(
        "{}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/u",
        "/subscriptions/s/resourceGroups/g"
    );
    let dead = json!({"endpointType": "StorageBlob", "properties": {"resourceId": STORAGE, "blobContainerName": "dead"}});
    let subscription = made(json!({
        "deliveryWithResourceIdentity": {
            "identity": {"type": "UserAssigned", "userAssignedIdentity": identity},
            "destination": {"endpointType": "webhook", "properties": {
                "endpointUrl": "https://a/x?k=1",
                "azureActiveDirectoryTenantId": "t",
                "azureActiveDirectoryApplicationIdOrUri": "app",
                "maxEventsPerBatch": 10,
                "minimumTlsVersionAllowed": "1.2",
            }},
        },
        "deadLetterWithResourceIdentity": {"identity": {"type": "SystemAssigned"}, "deadLetterDestination": dead},
        "filter": {
            "includedEventTypes": ["A"],
            "subjectBeginsWith": "/a",
            "isSubjectCaseSensitive": true,
            "enableAdvancedFilteringOnArrays": true,
            "advancedFilters": [
                {"operatorType": "NumberIn", "key": "data.a", "values": [1, 2.5]},
                {"operatorType": "NumberGreaterThan", "key": "data.b", "value": 5},
                {"operatorType": "NumberInRange", "key": "data.c", "values": [[1, 3]]},
                {"operatorType": "BoolEquals", "key": "data.d", "value": true},
                {"operatorType": "StringIn", "key": "data.e", "values": ["x"]},
                {"operatorType": "IsNotNull", "key": "data.f"},
            ],
        },
        "labels": ["l1"],
        "expirationTimeUtc": "2031-01-01T00:00:00Z",
        "eventDeliverySchema": "CloudEventSchemaV1_0",
        "retryPolicy": {"maxDeliveryAttempts": 3},
        "postrider": {"profile": "cloud-2019"},
    }));
    let properties = &shown(&subscription)["properties"];
    let mut expected = json!({
        "topic": TOPIC.replace("Microsoft.EventGrid", "microsoft.eventgrid"),
        "provisioningState": "Succeeded",
        "destination": null,
        "deliveryWithResourceIdentity": {
            "identity": {"type": "UserAssigned", "userAssignedIdentity": identity},
            "destination": {"endpointType": "WebHook", "properties": {
                "endpointUrl": null,
                "endpointBaseUrl": "https://a/x",
                "azureActiveDirectoryTenantId": "t",
                "azureActiveDirectoryApplicationIdOrUri": "app",
                "maxEventsPerBatch": 10,
                "preferredBatchSizeInKilobytes": 64,
            }},
        },
        "deadLetterWithResourceIdentity": {
            "identity": {"type": "SystemAssigned"},
            "deadLetterDestination": dead,
        },
        "filter": {
            "includedEventTypes": ["A"],
            "subjectBeginsWith": "/a",
            "subjectEndsWith": "",
            "isSubjectCaseSensitive": true,
            "enableAdvancedFilteringOnArrays": true,
            "advancedFilters": [
                {"operatorType": "NumberIn", "key": "data.a", "values": [1.0, 2.5]},
                {"operatorType": "NumberGreaterThan", "key": "data.b", "value": 5.0},
                {"operatorType": "NumberInRange", "key": "data.c", "values": [[1.0, 3.0]]},
                {"operatorType": "BoolEquals", "key": "data.d", "value": true},
                {"operatorType": "StringIn", "key": "data.e", "values": ["x"]},
                {"operatorType": "IsNotNull", "key": "data.f"},
            ],
        },
        "labels": ["l1"],
        "expirationTimeUtc": "2031-01-01T00:00:00Z",
        "eventDeliverySchema": "CloudEventSchemaV1_0",
        "retryPolicy": {"maxDeliveryAttempts": 3, "eventTimeToLiveInMinutes": 1440},
        "postrider": {"profile": "cloud-2019"},
    });
    assert_eq!(*properties, expected);
    // The same number is written as a float.
    assert!(
        properties.to_string().contains("\"values\":[1.0,2.5]"),
        "{properties}"
    );

    // Properties that are newer than the API version are not shown.
    let newest = ApiVersion::parse("2025-02-15").unwrap();
    let scope = Scope::Topic(grid());
    let mut view = view(&subscription, &scope, TOPIC, false);
    view.api_version = &newest;
    expected["deliveryWithResourceIdentity"]["destination"]["properties"]["minimumTlsVersionAllowed"] =
        json!("1.2");
    assert_eq!(view.body()["properties"], expected);

    // A body that was read can be sent back, also with PUT if masked values are filled in.
    let mut body = json!({"properties": expected});
    let destination = &mut body["properties"]["deliveryWithResourceIdentity"]["destination"];
    destination["properties"]["endpointUrl"] = json!("https://a/x?k=1");
    let again = read(&body, "2025-02-15", &[], Some(&subscription), false).unwrap();
    assert_eq!(shown(&again)["properties"], shown(&subscription)["properties"]);
}

#[test]
fn numbers_that_no_float_can_hold() {
    let check = |text: &str, expected: f64| {
        assert_eq!(number(&Decimal::parse(text).unwrap()), json!(expected), "{text}");
    };
    check("1", 1.0);
    check("-0.5", -0.5);
    check("1e300", 1e300);
    check("1e9999", f64::MAX);
    check("-1e9999", f64::MIN);
    check("1e-9999", 0.0);
    check("9007199254740993", 9007199254740992.0);
}

#[test]
fn destinations_of_every_type_are_shown_as_they_were_sent() {
    let g = "/subscriptions/s/resourceGroups/g/providers";
    let check = |kind: &str, sent: Value, more: Value| {
        let subscription = made(json!({"destination": {"endpointType": kind, "properties": sent}}));
        let mut expected = sent.clone();
        for (name, value) in more.as_object().unwrap() {
            expected[name] = value.clone();
        }
        let got = shown(&subscription)["properties"]["destination"].take();
        assert_eq!(
            got,
            json!({"endpointType": kind, "properties": expected}),
            "{kind}"
        );
        let patched = read(
            &json!({"destination": got}),
            "2022-06-15",
            &[],
            Some(&subscription),
            true,
        );
        assert_eq!(
            patched.unwrap().destination,
            with_batching(&subscription.destination),
            "{kind}"
        );
    };
    let none = json!({});
    check(
        "EventHub",
        json!({"resourceId": format!("{g}/Microsoft.EventHub/namespaces/n/eventhubs/e")}),
        none.clone(),
    );
    check(
        "ServiceBusQueue",
        json!({"resourceId": format!("{g}/Microsoft.ServiceBus/namespaces/n/queues/q")}),
        none.clone(),
    );
    check(
        "ServiceBusTopic",
        json!({"resourceId": format!("{g}/Microsoft.ServiceBus/namespaces/n/topics/t")}),
        none.clone(),
    );
    check(
        "HybridConnection",
        json!({
            "resourceId": format!("{g}/Microsoft.Relay/namespaces/n/hybridConnections/h"),
            "deliveryAttributeMappings": [{"name": "X", "type": "Dynamic", "properties": {"sourceField": "data.x"}}],
        }),
        none.clone(),
    );
    check(
        "StorageQueue",
        json!({"resourceId": STORAGE, "queueName": "queue1", "queueMessageTimeToLiveInSeconds": 300}),
        none,
    );
    check(
        "AzureFunction",
        json!({"resourceId": format!("{g}/Microsoft.Web/sites/s/functions/f")}),
        json!({"maxEventsPerBatch": 1, "preferredBatchSizeInKilobytes": 64}),
    );
}

/// Defaults that were shown and sent back become explicit.
fn with_batching(destination: &Destination) -> Destination {
    let mut destination = destination.clone();
    if let Destination::AzureFunction { batching, .. } = &mut destination {
        batching.events_max = Some(1);
        batching.preferred_kilobytes = Some(64);
    }
    destination
}

/// A subscription that uses every property.
fn full() -> Subscription {
    made(json!({
        "destination": {"endpointType": "WebHook", "properties": {
            "endpointUrl": "https://a/x?code=1",
            "maxEventsPerBatch": 10,
            "preferredBatchSizeInKilobytes": 128,
            "deliveryAttributeMappings": [
                {"name": "open", "type": "Static", "properties": {"value": "v", "isSecret": false}},
                {"name": "hidden", "type": "Static", "properties": {"value": "s3cr3t", "isSecret": true}},
            ],
        }},
        "filter": {"subjectBeginsWith": "/a", "includedEventTypes": ["A"]},
        "labels": ["l1", "l2"],
        "expirationTimeUtc": "2031-01-01T00:00:00Z",
        "retryPolicy": {"maxDeliveryAttempts": 3, "eventTimeToLiveInMinutes": 5},
        "deadLetterDestination": {"endpointType": "StorageBlob", "properties": {"resourceId": STORAGE, "blobContainerName": "dead"}},
        "postrider": {"profile": "cloud-2019"},
    }))
}

#[test]
fn a_change_keeps_what_it_does_not_mention() {
    let before = full();
    let check = |patch: Value, change: &dyn Fn(&mut Subscription)| {
        let mut expected = before.clone();
        change(&mut expected);
        for body in [patch.clone(), json!({ "properties": patch })] {
            let after =
                read(&body, "2021-10-15-preview", &[], Some(&before), true).expect("it is well-formed");
            assert_eq!(after, expected, "{body}");
        }
    };
    let hook =
        |properties: Value| json!({"destination": {"endpointType": "WebHook", "properties": properties}});
    for nothing in [
        json!({}),
        json!({"properties": {}}),
        json!({"provisioningState": "Succeeded"}),
    ] {
        let error = read(&nothing, "2021-10-15-preview", &[], Some(&before), true).unwrap_err();
        assert_eq!(
            (error.code, error.reason.as_str()),
            ("InvalidRequest", "must name something to change, such as labels")
        );
    }
    check(
        json!({"destination": null, "filter": null, "labels": null, "retryPolicy": null, "deadLetterDestination": null,
               "expirationTimeUtc": null, "eventDeliverySchema": null, "deliveryWithResourceIdentity": null}),
        &|_| {},
    );
    check(json!({"labels": ["l3"]}), &|s| s.labels = vec!["l3".into()]);
    check(json!({"labels": []}), &|s| s.labels.clear());
    check(json!({"retryPolicy": {"maxDeliveryAttempts": 7}}), &|s| {
        s.retry.attempts_max = Some(7)
    });
    check(json!({"eventDeliverySchema": "CloudEventSchemaV1_0"}), &|s| {
        s.delivery_schema = EventSchema::CloudEvent
    });
    check(json!({"postrider": {"profile": "edge"}}), &|s| {
        s.profile = Some("edge".into())
    });
    check(json!({"postrider": {}}), &|s| s.profile = None);
    // The body that az sends without `--endpoint`, and the body it would send if it repeated what
    // it was shown.
    check(
        hook(json!({"maxEventsPerBatch": 10, "preferredBatchSizeInKilobytes": 128})),
        &|_| {},
    );
    check(
        hook(json!({"endpointUrl": null, "endpointBaseUrl": "https://a/x"})),
        &|_| {},
    );
    check(json!({"destination": {"endpointType": "webhook"}}), &|_| {});
    check(json!({"destination": {"properties": {}}}), &|_| {});
    check(
        hook(json!({"endpointUrl": "https://b/y?z=2", "maxEventsPerBatch": 20})),
        &|s| {
            if let Destination::WebHook(hook) = &mut s.destination {
                hook.url = postrider_core::ids::Secret::new("https://b/y?z=2");
                hook.batching.events_max = Some(20);
            }
        },
    );
    check(
        hook(json!({"deliveryAttributeMappings": [
            {"name": "HIDDEN", "type": "Static", "properties": {"value": "Hidden", "isSecret": true}}]})),
        &|s| {
            if let Destination::WebHook(hook) = &mut s.destination {
                hook.attributes.remove(0);
                hook.attributes[0].name = "HIDDEN".into();
            }
        },
    );
    check(hook(json!({"deliveryAttributeMappings": []})), &|s| {
        if let Destination::WebHook(hook) = &mut s.destination {
            hook.attributes.clear();
        }
    });
    check(
        json!({"deadLetterWithResourceIdentity": {"identity": {"type": "SystemAssigned"}, "deadLetterDestination":
            {"endpointType": "StorageBlob", "properties": {"resourceId": STORAGE, "blobContainerName": "other"}}}}),
        &|s| {
            s.dead_letter.as_mut().unwrap().container = "other".into();
            s.dead_letter_identity = Some(ResourceIdentity {
                kind: "SystemAssigned".into(),
                user_assigned: None,
            });
        },
    );
}

#[test]
fn a_filter_is_replaced_whole_and_another_type_of_destination_too() {
    let before = full();
    let patch = |body: Value| read(&body, "2022-06-15", &[], Some(&before), true);
    let after = patch(json!({"filter": {"subjectEndsWith": ".png"}})).unwrap();
    assert_eq!(after.filter.subject_ends_with.as_deref(), Some(".png"));
    assert_eq!(
        (
            after.filter.subject_begins_with,
            after.filter.included_event_types
        ),
        (None, None)
    );

    let queue =
        json!({"endpointType": "StorageQueue", "properties": {"resourceId": STORAGE, "queueName": "queue1"}});
    let after = patch(json!({ "destination": queue })).unwrap();
    assert!(after.destination.attributes().is_empty());
    let refused = |body: Value| {
        let error = patch(body).unwrap_err();
        format!("{} {}", error.path, error.reason)
    };
    assert_eq!(
        refused(json!({"destination": {"endpointType": "StorageQueue", "properties": {}}})),
        "destination.properties.resourceId is required"
    );
    assert_eq!(
        refused(json!({"destination": {"endpointType": "StorageQueue"}})),
        "destination.properties is required"
    );
    assert_eq!(
        refused(json!({"properties": {"retryPolicy": {"maxDeliveryAttempts": 31}}})),
        "properties.retryPolicy.maxDeliveryAttempts must be between 1 and 30, was 31"
    );
    assert_eq!(
        refused(
            json!({"destination": {"properties": {"deliveryAttributeMappings": [
            {"name": "new", "type": "Static", "properties": {"value": "Hidden", "isSecret": true}}]}}})
        ),
        "destination.properties.deliveryAttributeMappings[0].properties.value is masked: give the secret itself"
    );
}

// A subscription that another API created may have values that this API would refuse. A client that
// changes its labels must not be refused because of the rest.
#[test]
fn only_what_was_sent_is_judged_again() {
    let mut before = full();
    before.retry.attempts_max = Some(50);
    before.name = "a.b".into();
    before.expires = Some(NOW);
    let after = read(&json!({"labels": ["x"]}), "2022-06-15", &[], Some(&before), true).unwrap();
    assert_eq!(after.retry.attempts_max, Some(50));
    assert_eq!(after.labels, ["x"]);
}

#[test]
fn active_directory_is_kept_or_taken_away_as_a_whole() {
    let before = made(json!({"destination": {"endpointType": "WebHook", "properties": {
        "endpointUrl": "https://a/x",
        "azureActiveDirectoryTenantId": "t",
        "azureActiveDirectoryApplicationIdOrUri": "app",
    }}}));
    let patch = |properties: Value| {
        let body = json!({"destination": {"endpointType": "WebHook", "properties": properties}});
        read(&body, "2022-06-15", &[], Some(&before), true).map(|after| match after.destination {
            Destination::WebHook(hook) => (hook.aad_tenant, hook.aad_application),
            other => panic!("{other:?}"),
        })
    };
    let both = (Some("t".to_owned()), Some("app".to_owned()));
    assert_eq!(patch(json!({})).unwrap(), both);
    let taken = json!({"azureActiveDirectoryTenantId": "", "azureActiveDirectoryApplicationIdOrUri": ""});
    assert_eq!(patch(taken).unwrap(), (None, None));
    assert!(patch(json!({"azureActiveDirectoryTenantId": "u"})).is_err());
    let authorization = json!({"deliveryAttributeMappings": [
        {"name": "Authorization", "type": "Static", "properties": {"value": "x", "isSecret": true}}]});
    assert!(patch(authorization).is_err());
}

/// A subscription that another API made.
fn made_by(road: Road, properties: &Value) -> Subscription {
    let limits = ResourceLimits::default();
    let context = SubscriptionContext {
        road,
        name: "sub",
        topic: TopicContext {
            name: "T",
            input_schema: EventSchema::EventGrid,
            mapping: None,
            default_types: &[],
        },
        limits: &limits,
        now: NOW,
        previous: None,
        api_version: "",
        shown: None,
    };
    let text = json!({ "properties": properties }).to_string();
    let spec = parse_subscription(RawJson::parse(&text).unwrap(), &context).expect("it is well-formed");
    spec.into_subscription(SubscriptionId(1), TopicId(1), None, NOW)
}

// Reads of what the edge API and the configuration made can be sent back, though nobody could make it here.
#[test]
fn what_was_read_can_be_sent_back() {
    let eg = json!({"endpointType": "eventGrid", "properties": {"sasKey": "k", "topicName": "up",
        "endpointUrl": "https://t.westus2-1.eventgrid.azure.net/api/events?api-version=2018-01-01"}});
    let bus = "Endpoint=sb://n/;SharedAccessKeyName=a;SharedAccessKey=b;EntityPath=q";
    let queue = "DefaultEndpointsProtocol=https;AccountName=acc;AccountKey=a2V5;EndpointSuffix=x";
    let local = json!({"endpointType": "StorageBlob",
        "properties": {"resourceId": "local", "blobContainerName": "dead"}});
    for (road, properties) in [
        (Road::Edge, json!({"destination": eg})),
        (
            Road::Edge,
            json!({"destination": {"endpointType": "edgeHub", "properties": {"outputName": "o"}}}),
        ),
        (
            Road::Edge,
            json!({"destination":
            {"endpointType": "ServiceBusQueue", "properties": {"connectionString": bus}}}),
        ),
        (
            Road::Edge,
            json!({"destination":
            {"endpointType": "StorageQueue", "properties": {"connectionString": queue, "queueName": "one"}}}),
        ),
        (
            Road::Config,
            json!({"destination":
            {"endpointType": "StorageQueue", "properties": {"resourceId": "local", "queueName": "one"}}}),
        ),
        (
            Road::Config,
            json!({"destination": hook("https://a/x"), "deadLetterDestination": local}),
        ),
        (
            Road::Edge,
            json!({"destination": hook("https://a/x"), "persistencePolicy": {"isPersisted": "true"}}),
        ),
        (
            Road::Edge,
            json!({"destination": hook("https://a/x"), "filter": {"includedEventTypes": ["All"]}}),
        ),
        (
            Road::Edge,
            json!({"destination": hook("https://a/x"), "filter": {"includedEventTypes": []}}),
        ),
        (
            Road::Edge,
            json!({"destination": hook("https://a/x"), "filter": {"includedEventTypes": [""]}}),
        ),
    ] {
        let previous = made_by(road, &properties);
        let mut body = shown(&previous);
        if body["properties"]["destination"]["endpointType"] == "WebHook" {
            body["properties"]["destination"] = hook("https://a/x");
        }
        for patch in [false, true] {
            let after = read(&body, "2022-06-15", &[], Some(&previous), patch);
            let after = after.unwrap_or_else(|error| panic!("{properties} {patch}: {error}"));
            assert_eq!(shown(&after), shown(&previous), "{properties} {patch}");
            assert_eq!(
                after.filter.included_event_types,
                previous.filter.included_event_types
            );
            let policy = |one: &Subscription| {
                one.extras
                    .as_deref()
                    .is_some_and(|text| text.contains("isPersisted"))
            };
            assert_eq!(policy(&after), policy(&previous), "{properties} {patch}");
            assert_eq!(
                std::mem::discriminant(&after.destination),
                std::mem::discriminant(&previous.destination)
            );
        }
    }
    // Nothing becomes possible by it that was not there.
    let previous = made_by(Road::Edge, &json!({"destination": hook("https://a/x")}));
    let refused = read(
        &json!({"properties": {"destination": eg}}),
        "2022-06-15",
        &[],
        Some(&previous),
        false,
    );
    assert!(refused.is_err());
    let all = json!({"properties": {"destination": hook("https://a/x"), "filter": {"includedEventTypes": ["All"]}}});
    assert!(read(&all, "2022-06-15", &[], Some(&previous), false).is_err());
}

#[test]
fn event_types_by_source_and_version() {
    let types = |types: Value, version: &str, defaults: &[&str]| {
        let body = json!({"properties": {"destination": hook("https://a/x"), "filter": {"includedEventTypes": types}}});
        read(&body, version, defaults, None, false)
            .map(|subscription| subscription.filter.included_event_types)
            .map_err(|error| error.of_event_subscription().to_string())
    };
    let named = |names: &[&str]| {
        Ok(Some(
            names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(),
        ))
    };
    assert_eq!(types(json!(null), "2022-06-15", &[]), Ok(None));
    assert_eq!(types(json!([]), "2022-06-15", &[]), Ok(None));
    assert_eq!(types(json!(null), "2022-06-15", &BLOB_TYPES), named(&BLOB_TYPES));
    assert_eq!(types(json!(["X"]), "2022-06-15", &BLOB_TYPES), named(&["X"]));
    for old in ["2018-01-01", "2018-09-15-preview", "2019-01-01"] {
        assert_eq!(types(json!(["All"]), old, &[]), Ok(None), "{old}");
    }
    for new in ["2019-02-01-preview", "2019-06-01", "2025-02-15"] {
        assert_eq!(
            types(json!(["all"]), new, &[]),
            Err("Invalid event subscription request: properties.filter.includedEventTypes must be left out for all \
                 types: [\"All\"] is refused since 2019-02-01-preview."
                .into()),
            "{new}"
        );
    }
    assert!(types(json!([""]), "2022-06-15", &[]).is_err());
    assert!(types(json!([1]), "2022-06-15", &[]).is_err());
}

// Every sentence of the reference about refusals, and the resulting message.
#[test]
fn refusals() {
    let refused = |properties: Value, expected: &str| {
        let body = json!({ "properties": properties });
        let error = read(&body, "2022-06-15", &[], None, false).expect_err(&body.to_string());
        let error = error.of_event_subscription();
        assert_eq!(error.code, "InvalidRequest");
        let expected = match expected.strip_prefix('=') {
            Some(whole) => whole.to_owned(),
            None => format!("Invalid event subscription request: properties.{expected}."),
        };
        assert_eq!(error.to_string(), expected, "{body}");
    };
    let with = |name: &str, value: Value| {
        let mut properties = json!({"destination": hook("https://a/x")});
        properties[name] = value;
        properties
    };
    let to = |kind: &str, properties: Value| json!({"destination": {"endpointType": kind, "properties": properties}});
    let url = "=Invalid event subscription request: Supplied URL is invalid. It cannot be null or empty and should be a \
               proper HTTPS URL like https://www.example.com.";
    for wrong in [
        json!(null),
        json!(""),
        json!("http://a/x"),
        json!("ftp://a"),
        json!("hook"),
        json!(1),
    ] {
        refused(to("WebHook", json!({"endpointUrl": wrong})), url);
    }
    refused(json!({}), "destination is required");
    refused(
        to("Pigeon", json!({})),
        "destination.endpointType must be one of WebHook, EventHub, ServiceBusQueue, ServiceBusTopic, StorageQueue, \
         AzureFunction, HybridConnection, was \"Pigeon\"",
    );
    let mut both = with(
        "deliveryWithResourceIdentity",
        json!({"identity": {"type": "SystemAssigned"}, "destination": hook("https://a/x")}),
    );
    refused(
        both.clone(),
        "deliveryWithResourceIdentity must be left out beside destination",
    );
    both["destination"] = json!(null);
    both["deliveryWithResourceIdentity"]["identity"] =
        json!({"type": "UserAssigned", "userAssignedIdentity": "u"});
    refused(
        both,
        "deliveryWithResourceIdentity.identity.userAssignedIdentity must be a resource id \
         …/providers/Microsoft.ManagedIdentity/userAssignedIdentities/<name>",
    );

    let retry = |name: &str, value: i64| with("retryPolicy", json!({ name: value }));
    refused(
        retry("maxDeliveryAttempts", 0),
        "retryPolicy.maxDeliveryAttempts must be between 1 and 30, was 0",
    );
    refused(
        retry("maxDeliveryAttempts", 31),
        "retryPolicy.maxDeliveryAttempts must be between 1 and 30, was 31",
    );
    refused(
        retry("eventTimeToLiveInMinutes", 0),
        "retryPolicy.eventTimeToLiveInMinutes must be between 1 and 1440, was 0",
    );
    refused(
        retry("eventTimeToLiveInMinutes", 1441),
        "retryPolicy.eventTimeToLiveInMinutes must be between 1 and 1440, was 1441",
    );
    for wrong in ["2030-03-17T00:00:00Z", "soon"] {
        refused(
            with("expirationTimeUtc", json!(wrong)),
            "=Invalid expiration time.",
        );
    }
    refused(
        with("eventDeliverySchema", json!("CustomInputSchema")),
        "eventDeliverySchema cannot be CustomEventSchema: the topic's input schema is EventGridSchema",
    );

    let hook_with =
        |name: &str, value: Value| to("WebHook", json!({"endpointUrl": "https://a/x", name: value}));
    let at = "destination.properties";
    for (name, most) in [
        ("maxEventsPerBatch", 5000),
        ("preferredBatchSizeInKilobytes", 1024),
    ] {
        for wrong in [0, most + 1] {
            let expected = format!("{at}.{name} must be between 1 and {most}, was {wrong}");
            refused(hook_with(name, json!(wrong)), &expected);
        }
    }
    refused(
        hook_with("azureActiveDirectoryTenantId", json!("t")),
        &format!("{at}.azureActiveDirectoryApplicationIdOrUri is required with azureActiveDirectoryTenantId"),
    );
    refused(
        hook_with("queueMessageTimeToLiveInSeconds", json!(1)),
        &format!("{at}.queueMessageTimeToLiveInSeconds must be left out: WebHook has no such property"),
    );
    let queue = |name: &str, value: Value| {
        to(
            "StorageQueue",
            json!({"resourceId": STORAGE, "queueName": "queue1", name: value}),
        )
    };
    for (name, value) in [
        ("maxEventsPerBatch", json!(1)),
        ("preferredBatchSizeInKilobytes", json!(1)),
        ("deliveryAttributeMappings", json!([])),
        ("azureActiveDirectoryTenantId", json!("t")),
    ] {
        refused(
            queue(name, value),
            &format!("{at}.{name} must be left out: StorageQueue has no such property"),
        );
    }
    let account = "must be a resource id …/providers/Microsoft.Storage/storageAccounts/<name>";
    refused(
        queue("resourceId", json!("acc")),
        &format!("{at}.resourceId {account}"),
    );
    let dead = |properties: Value| {
        with(
            "deadLetterDestination",
            json!({"endpointType": "StorageBlob", "properties": properties}),
        )
    };
    refused(
        dead(json!({"resourceId": "acc", "blobContainerName": "dead"})),
        &format!("deadLetterDestination.properties.resourceId {account}"),
    );
    refused(
        dead(json!({"resourceId": STORAGE})),
        "deadLetterDestination.properties.blobContainerName is required",
    );
    let mut twice = dead(json!({"resourceId": STORAGE, "blobContainerName": "dead"}));
    twice["deadLetterWithResourceIdentity"] = json!({});
    refused(
        twice,
        "deadLetterWithResourceIdentity must be left out beside deadLetterDestination",
    );

    let attribute =
        |name: &str, value: &str| json!({"name": name, "type": "Static", "properties": {"value": value}});
    let mappings = |list: Vec<Value>| hook_with("deliveryAttributeMappings", json!(list));
    let at = "destination.properties.deliveryAttributeMappings";
    refused(
        mappings((0..11).map(|i| attribute(&format!("x{i}"), "v")).collect()),
        &format!("{at} must not have more than 10 attributes, had 11"),
    );
    refused(
        mappings(vec![attribute("x", &"v".repeat(4097))]),
        &format!("{at}[0].properties.value must not be longer than 4096 bytes, was 4097"),
    );
    refused(
        mappings(vec![attribute("AEG-x", "v")]),
        &format!("{at}[0].name must not begin with aeg-, which is reserved, was \"AEG-x\""),
    );
    refused(
        mappings(vec![attribute("a b", "v")]),
        &format!("{at}[0].name must be an HTTP header name of at most 256 letters, was \"a b\""),
    );
    refused(
        mappings(vec![attribute("a", "v"), attribute("A", "v")]),
        &format!("{at}[1].name is given twice: \"A\""),
    );

    let filter = |name: &str, value: Value| with("filter", json!({ name: value }));
    let string_in =
        |values: usize| json!({"operatorType": "StringIn", "key": "k", "values": vec!["v"; values]});
    refused(
        filter("advancedFilters", json!(vec![string_in(1); 26])),
        "filter.advancedFilters must not have more than 25 filters, had 26",
    );
    refused(
        filter("advancedFilters", json!([string_in(13), string_in(13)])),
        "filter.advancedFilters must not have more than 25 values in all filters together, had 26",
    );
    refused(
        filter(
            "advancedFilters",
            json!([{"operatorType": "StringIn", "key": "k", "values": ["v".repeat(513)]}]),
        ),
        "filter.advancedFilters[0].values[0] must not be longer than 512 characters, was 513",
    );
    refused(
        filter(
            "advancedFilters",
            json!([{"operatorType": "NumberIn", "key": "k", "values": ["1"]}]),
        ),
        "filter.advancedFilters[0].values[0] must be a number, was a string",
    );
    refused(
        filter("subjectBeginsWith", json!(1)),
        "filter.subjectBeginsWith must be a string, was a number",
    );
    let error = read(
        &with(
            "filter",
            json!({"advancedFilters": [{"operatorType": "Like", "key": "k"}]}),
        ),
        "2022-06-15",
        &[],
        None,
        false,
    );
    assert!(error.is_err());
}
