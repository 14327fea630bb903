//! Round trips: a client can send back any subscription that it has read, and nothing changes,
//! neither what is delivered nor what is read afterwards. Tested through the management API and the
//! edge API, whichever of them created the subscription.

use postrider_core::envelope::KeyStyle;
use postrider_core::event::EventSchema;
use postrider_core::filter::EventFilter;
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::profile::{CLOUD_2021, EDGE, Profile};
use postrider_core::subscription::{
    BatchDefaults, BatchLimits, BatchSettings, DeadLetterDestination, Destination, Subscription,
    SubscriptionRetrySettings, Topic, WebHook,
};
use postrider_core::time::Timestamp;
use postrider_wire::arm::{ApiVersion, ProvisioningState, Scope, SubscriptionView};
use postrider_wire::resources::{
    EffectiveSettings, ResourceLimits, Road, SubscriptionContext, TopicContext, edge_subscription,
    parse_subscription,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::time::Duration;

const URL: &str = "https://a.example/x?code=1";
const TOPIC_ID: &str = "/subscriptions/S/resourceGroups/G/providers/Microsoft.EventGrid/topics/T";
const ACCOUNT: &str = "/subscriptions/S/resourceGroups/G/providers/Microsoft.Storage/storageAccounts/acc";

/// Configuration of a server, as far as reads depend on it.
#[derive(Clone, Debug)]
struct ServerSettings {
    profile: Profile,
    limits: ResourceLimits,
}

impl ServerSettings {
    fn shown(&self, subscription: &Subscription) -> EffectiveSettings {
        EffectiveSettings::of(subscription, &self.profile, &self.limits.batch_defaults)
    }

    fn read(&self, api: Road, subscription: &Subscription) -> Value {
        match api {
            Road::Edge => {
                let topic = Topic::custom(TopicId(1), "T", ["a", "b"].map(Secret::new));
                let defaults = &self.limits.batch_defaults;
                json!(edge_subscription(subscription, &topic, "/iotHubs/h", defaults))
            }
            Road::Azure | Road::Config => SubscriptionView {
                subscription,
                state: ProvisioningState::Succeeded,
                scope: &Scope::Resource(TOPIC_ID.into()),
                scope_id: TOPIC_ID,
                nested: false,
                api_version: &ApiVersion::parse("2022-06-15").unwrap(),
                shown: self.shown(subscription),
            }
            .body(),
        }
    }

    fn write(&self, api: Road, body: &Value, previous: &Subscription) -> Result<Subscription, String> {
        let text = body.to_string();
        let context = SubscriptionContext {
            road: api,
            name: "sub",
            topic: TopicContext {
                name: "T",
                input_schema: EventSchema::EventGrid,
                mapping: None,
                default_types: &[],
            },
            limits: &self.limits,
            now: Timestamp::from_secs(1_900_000_000),
            previous: Some(previous),
            api_version: "2022-06-15",
            shown: Some(self.shown(previous)),
        };
        let spec = parse_subscription(RawJson::parse(&text).unwrap(), &context).map_err(|e| e.to_string())?;
        let created = previous.created;
        Ok(spec.into_subscription(SubscriptionId(1), TopicId(1), None, created))
    }
}

fn batch_limits() -> impl Strategy<Value = BatchLimits> {
    (1u32..6000, 1u32..1100).prop_map(|(events_max, kilobytes)| BatchLimits {
        events_max,
        kilobytes,
    })
}

fn server() -> impl Strategy<Value = ServerSettings> {
    let profile = prop_oneof![
        Just(CLOUD_2021),
        Just(EDGE),
        // As [profile_custom] may define it.
        (1u32..60, 1u64..400_000).prop_map(|(attempts_max, seconds)| Profile {
            attempts_max,
            time_to_live: Duration::from_secs(seconds),
            ..CLOUD_2021
        })
    ];
    let defaults = prop_oneof![
        Just(BatchDefaults::default()),
        (batch_limits(), batch_limits()).prop_map(|(cloud, edge)| BatchDefaults { cloud, edge })
    ];
    (profile, defaults).prop_map(|(profile, batch_defaults)| ServerSettings {
        profile,
        limits: ResourceLimits {
            batch_defaults,
            ..ResourceLimits::default()
        },
    })
}

fn filter(origin: Road) -> impl Strategy<Value = EventFilter> {
    let begins = proptest::option::of("/[a-z]{1,4}");
    let types = proptest::option::of(proptest::collection::vec("[A-Z][a-z]{1,4}", 1..3));
    (begins, types, any::<bool>()).prop_map(move |(begins, included_event_types, case)| EventFilter {
        subject_begins_with: begins,
        included_event_types,
        subject_case_sensitive: case,
        keys: match origin {
            Road::Edge => KeyStyle::Edge,
            Road::Config | Road::Azure => KeyStyle::Cloud,
        },
        ..EventFilter::default()
    })
}

fn subscription_of(origin: Road) -> impl Strategy<Value = Subscription> {
    let batching = (
        proptest::option::of(1u32..=5000),
        proptest::option::of(1u32..=1033),
    );
    let retry = (proptest::option::of(1u32..=60), proptest::option::of(1u32..=5000));
    let labels = proptest::collection::vec("[a-z]{1,4}", 0..3);
    let rest = (any::<bool>(), any::<bool>(), labels);
    (batching, retry, filter(origin), rest).prop_map(
        move |((events_max, preferred_kilobytes), retry, filter, (cloud_events, dead_letter, labels))| {
            let hook = WebHook {
                batching: BatchSettings {
                    events_max,
                    preferred_kilobytes,
                },
                ..WebHook::new(URL)
            };
            Subscription {
                origin,
                labels,
                filter,
                retry: SubscriptionRetrySettings {
                    attempts_max: retry.0,
                    time_to_live_minutes: retry.1,
                },
                delivery_schema: match cloud_events {
                    true => EventSchema::CloudEvent,
                    false => EventSchema::EventGrid,
                },
                dead_letter: dead_letter.then(|| DeadLetterDestination {
                    account: ACCOUNT.into(),
                    container: "letters".into(),
                }),
                ..Subscription::new(SubscriptionId(1), TopicId(1), "sub", Destination::WebHook(hook))
            }
        },
    )
}

fn subscription() -> impl Strategy<Value = Subscription> {
    prop_oneof![Just(Road::Edge), Just(Road::Config), Just(Road::Azure)].prop_flat_map(subscription_of)
}

/// Everything that decides what is delivered, when, and how often.
fn behaviour(server: &ServerSettings, one: &Subscription) -> impl PartialEq + std::fmt::Debug + use<> {
    let retry = one.retry;
    let mut filter = one.filter.clone();
    // An empty prefix or suffix is the same as none.
    filter.subject_begins_with.get_or_insert_default();
    filter.subject_ends_with.get_or_insert_default();
    (
        server.shown(one).batch,
        retry.attempts_max.unwrap_or(server.profile.attempts_max),
        retry.time_to_live(&server.profile),
        one.delivery_schema,
        filter,
        (one.origin, one.labels.clone(), one.dead_letter.clone()),
    )
}

proptest! {
    #[test]
    fn a_read_that_is_sent_back_changes_nothing(
        server in server(),
        subscription in subscription(),
        apis in proptest::collection::vec(prop_oneof![Just(Road::Edge), Just(Road::Azure)], 1..4),
    ) {
        let mut current = subscription;
        for api in apis {
            let before = server.read(api, &current);
            let mut body = before.clone();
            // A client adds the URL, which reads do not show, from getFullUrl.
            body["properties"]["destination"]["properties"]["endpointUrl"] = json!(URL);
            let written = server.write(api, &body, &current);
            let written = written.map_err(|e| TestCaseError::fail(format!("{api:?} refused {body}: {e}")))?;
            prop_assert_eq!(behaviour(&server, &written), behaviour(&server, &current));
            prop_assert_eq!(server.read(api, &written), before);
            current = written;
        }
    }
}

#[test]
fn limits_of_batches_are_read_as_they_are_in_force() {
    let limits = |origin: Road, events_max: Option<u32>, preferred_kilobytes: Option<u32>| {
        let batching = BatchSettings {
            events_max,
            preferred_kilobytes,
        };
        let limits = batching.in_force(BatchDefaults::default().of(origin));
        (limits.events_max, limits.kilobytes, limits.is_batched())
    };
    assert_eq!(limits(Road::Azure, None, None), (1, 64, false));
    assert_eq!(limits(Road::Azure, None, Some(100)), (10, 100, true));
    assert_eq!(limits(Road::Azure, Some(7), None), (7, 64, true));
    assert_eq!(limits(Road::Config, None, Some(64)), (10, 64, true));
    assert_eq!(limits(Road::Edge, Some(7), None), (7, 1033, true));
    assert_eq!(limits(Road::Azure, Some(1), Some(64)), (1, 64, false));
}
