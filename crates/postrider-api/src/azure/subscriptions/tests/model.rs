//! Model test: requests through the management and the edge API, in any order, end in the state
//! that a simple model predicts.

use super::extension;
use super::test_server::{ApiTestServer, GROUP, web_hook};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const TOPICS: [&str; 2] = ["t1", "t2"];
const NAMES: [&str; 3] = ["one", "ONE", "two"];

#[derive(Clone, Debug)]
enum ModelStep {
    /// Through the management API, nested or as an extension; the webhook agrees or refuses.
    Put {
        agrees: bool,
        labels: Vec<u8>,
        attempts: Option<u32>,
        prefix: Option<u8>,
    },
    Patch {
        url: Option<bool>,
        labels: Option<Vec<u8>>,
        attempts: Option<u32>,
        prefix: Option<u8>,
    },
    Delete,
    EdgePut {
        labels: Vec<u8>,
        attempts: Option<u32>,
    },
    EdgeDelete,
    /// Refused in any state.
    Nonsense,
    /// Deletes the topic with its subscriptions and creates it again.
    Remake,
}

#[derive(Clone, Debug)]
struct ModelAction {
    topic: usize,
    name: usize,
    nested: bool,
    step: ModelStep,
}

fn labels() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0..4u8, 0..3)
}

fn acts() -> impl Strategy<Value = ModelAction> {
    let attempts = || prop::option::of(1..=30u32);
    let prefix = || prop::option::of(0..3u8);
    let step = prop_oneof![
        4 => (prop::bool::weighted(0.8), labels(), attempts(), prefix())
            .prop_map(|(agrees, labels, attempts, prefix)| ModelStep::Put { agrees, labels, attempts, prefix }),
        3 => (prop::option::of(prop::bool::weighted(0.7)), prop::option::of(labels()), attempts(), prefix())
            .prop_map(|(url, labels, attempts, prefix)| ModelStep::Patch { url, labels, attempts, prefix }),
        2 => Just(ModelStep::Delete),
        2 => (labels(), attempts()).prop_map(|(labels, attempts)| ModelStep::EdgePut { labels, attempts }),
        1 => Just(ModelStep::EdgeDelete),
        1 => Just(ModelStep::Nonsense),
        1 => Just(ModelStep::Remake),
    ];
    (0..TOPICS.len(), 0..NAMES.len(), any::<bool>(), step).prop_map(|(topic, name, nested, step)| {
        ModelAction {
            topic,
            name,
            nested,
            step,
        }
    })
}

/// The model's state of a subscription.
#[derive(Clone, Debug, PartialEq)]
struct PredictedSubscription {
    /// The round in which it was created.
    created: usize,
    /// In the casing of its creation.
    name: String,
    path: String,
    labels: Vec<String>,
    attempts: Option<u32>,
    prefix: Option<String>,
}

type SubscriptionModel = BTreeMap<(usize, String), PredictedSubscription>;

fn words(labels: &[u8]) -> Vec<String> {
    labels.iter().map(|label| format!("l{label}")).collect()
}

/// Applies a step to the model. Returns the expected status.
fn predict(model: &mut SubscriptionModel, act: &ModelAction, round: usize) -> u16 {
    let key = (act.topic, NAMES[act.name].to_lowercase());
    let before = model.get(&key).cloned();
    let name = before
        .as_ref()
        .map_or(NAMES[act.name].to_owned(), |known| known.name.clone());
    let created = before.as_ref().map_or(round, |known| known.created);
    let prefix_of = |prefix: &Option<u8>| prefix.map(|prefix| format!("/p{prefix}"));
    match &act.step {
        ModelStep::Put {
            agrees,
            labels,
            attempts,
            prefix,
        } => {
            if *agrees {
                let known = PredictedSubscription {
                    created,
                    name,
                    path: hook(true, round),
                    labels: words(labels),
                    attempts: *attempts,
                    prefix: prefix_of(prefix),
                };
                model.insert(key, known);
            }
            201
        }
        ModelStep::Patch {
            url,
            labels,
            attempts,
            prefix,
        } => {
            let Some(mut known) = before else {
                return 404;
            };
            if *url != Some(false) {
                if url.is_some() {
                    known.path = hook(true, round);
                }
                if let Some(labels) = labels {
                    known.labels = words(labels);
                }
                known.attempts = attempts.or(known.attempts);
                if prefix.is_some() {
                    known.prefix = prefix_of(prefix);
                }
                model.insert(key, known);
            }
            201
        }
        ModelStep::Delete => match model.remove(&key) {
            Some(_) => 202,
            None => 204,
        },
        ModelStep::EdgePut { labels, attempts } => {
            let known = PredictedSubscription {
                created,
                name: NAMES[act.name].to_owned(),
                path: hook(true, round),
                labels: words(labels),
                attempts: *attempts,
                prefix: None,
            };
            model.insert(key, known);
            200
        }
        ModelStep::EdgeDelete => match model.remove(&key) {
            Some(_) => 200,
            None => 404,
        },
        ModelStep::Nonsense => 400,
        ModelStep::Remake => {
            model.retain(|(topic, _), _| *topic != act.topic);
            200
        }
    }
}

fn hook(agrees: bool, round: usize) -> String {
    format!("/{}/{round}?code={round}", if agrees { "yes" } else { "no" })
}

fn topic_path(topic: usize) -> String {
    format!("{GROUP}/providers/Microsoft.EventGrid/topics/{}", TOPICS[topic])
}

fn properties(labels: &[u8], attempts: Option<u32>, prefix: &Option<u8>) -> Value {
    let mut more = json!({ "labels": words(labels) });
    if let Some(attempts) = attempts {
        more["retryPolicy"] = json!({ "maxDeliveryAttempts": attempts });
    }
    if let Some(prefix) = prefix {
        more["filter"] = json!({ "subjectBeginsWith": format!("/p{prefix}") });
    }
    more
}

async fn perform(lab: &ApiTestServer, act: &ModelAction, round: usize) -> u16 {
    let topic = topic_path(act.topic);
    let name = NAMES[act.name];
    let path = match act.nested {
        true => format!("{topic}/eventSubscriptions/{name}"),
        false => extension(&topic, name),
    };
    let edge = format!("/topics/{}/eventSubscriptions/{name}", TOPICS[act.topic]);
    let got = match &act.step {
        ModelStep::Put {
            agrees,
            labels,
            attempts,
            prefix,
        } => {
            let body = web_hook(&hook(*agrees, round), properties(labels, *attempts, prefix));
            lab.arm("PUT", &path, Some(body)).await
        }
        ModelStep::Patch {
            url,
            labels,
            attempts,
            prefix,
        } => {
            let mut body = properties(labels.as_deref().unwrap_or_default(), *attempts, prefix);
            if labels.is_none() {
                body["labels"] = Value::Null;
            }
            if let Some(agrees) = url {
                let url = format!("https://hook{}", hook(*agrees, round));
                body["destination"] = json!({"endpointType": "WebHook", "properties": {"endpointUrl": url}});
            }
            lab.arm("PATCH", &path, Some(body)).await
        }
        ModelStep::Delete => lab.arm("DELETE", &path, None).await,
        ModelStep::EdgePut { labels, attempts } => {
            let body = web_hook(&hook(true, round), properties(labels, *attempts, &None));
            lab.edge("PUT", &edge, Some(body)).await
        }
        ModelStep::EdgeDelete => lab.edge("DELETE", &edge, None).await,
        ModelStep::Nonsense => {
            let body = web_hook(
                "/yes",
                json!({"filter": {"advancedFilters": [{"operatorType": "Like"}]}}),
            );
            lab.arm("PUT", &path, Some(body)).await
        }
        ModelStep::Remake => {
            lab.edge("DELETE", &format!("/topics/{}", TOPICS[act.topic]), None)
                .await
                .expect(200);
            lab.edge("PUT", &format!("/topics/{}", TOPICS[act.topic]), Some(json!({})))
                .await
        }
    };
    if got.status == 201 {
        lab.ends(&got).await;
    }
    got.status
}

/// Both APIs show exactly what the model predicts.
async fn compare(lab: &ApiTestServer, model: &SubscriptionModel) {
    for (topic, topic_name) in TOPICS.iter().enumerate() {
        let mut of_topic: Vec<&PredictedSubscription> = model
            .iter()
            .filter(|((of, _), _)| *of == topic)
            .map(|(_, known)| known)
            .collect();
        of_topic.sort_by_key(|known| known.created);
        let list = lab
            .arm("GET", &format!("{}/eventSubscriptions", topic_path(topic)), None)
            .await
            .expect(200);
        let names: Vec<&str> = of_topic.iter().map(|known| known.name.as_str()).collect();
        assert_eq!(list.names(), names);
        let edge = lab
            .edge("GET", &format!("/topics/{topic_name}/eventSubscriptions"), None)
            .await
            .expect(200);
        assert_eq!(edge.body.as_array().map(Vec::len), Some(names.len()));
        for (known, body) in of_topic.iter().zip(list.body["value"].as_array().unwrap()) {
            let shown = &body["properties"];
            assert_eq!(shown["provisioningState"], "Succeeded");
            let base = known.path.split_once('?').unwrap().0;
            assert_eq!(
                shown["destination"]["properties"]["endpointBaseUrl"],
                format!("https://hook{base}")
            );
            let labels = if known.labels.is_empty() {
                Value::Null
            } else {
                json!(known.labels)
            };
            assert_eq!(shown["labels"], labels);
            assert_eq!(
                shown["retryPolicy"]["maxDeliveryAttempts"],
                known.attempts.unwrap_or(30)
            );
            assert_eq!(
                shown["filter"]["subjectBeginsWith"],
                known.prefix.clone().unwrap_or_default()
            );

            let path = format!("/topics/{topic_name}/eventSubscriptions/{}", known.name);
            let edge = lab.edge("GET", &path, None).await.expect(200);
            let shown = edge.properties();
            assert_eq!(
                shown["destination"]["properties"]["endpointUrl"],
                format!("https://hook{}", known.path)
            );
            let labels = shown.get("labels").cloned().unwrap_or(json!([]));
            assert_eq!(labels, json!(known.labels));
            let attempts = shown["retryPolicy"]["maxDeliveryAttempts"].as_u64();
            assert_eq!(attempts, known.attempts.map(u64::from));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn both_views_end_where_the_model_does(acts in prop::collection::vec(acts(), 1..24)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let lab = ApiTestServer::new(true).await;
            for topic in TOPICS {
                lab.edge("PUT", &format!("/topics/{topic}"), Some(json!({}))).await.expect(200);
            }
            let mut model = SubscriptionModel::new();
            for (round, act) in acts.iter().enumerate() {
                let expected = predict(&mut model, act, round);
                let status = perform(&lab, act, round).await;
                assert_eq!(status, expected, "{act:?}");
            }
            compare(&lab, &model).await;
        });
    }
}
