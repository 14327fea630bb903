//! Workleap's EventGridEmulator: `appsettings.json` with `Topics`, each a list of URLs.

use super::{ImportResult, ImportedSubscription, ImportedTopic, NO_VALIDATION, list, member, text, web_hook};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Longest name of a subscription.
const NAME_MAX: usize = 64;

pub fn read(root: &Value) -> Result<ImportResult, String> {
    let Some(top) = root.as_object() else {
        return Err("the file must be an object with Topics".into());
    };
    let topics = match member(root, "Topics") {
        Some(Value::Object(topics)) => topics,
        Some(_) => return Err("Topics must be an object: each topic with a list of URLs".into()),
        None => return Err("there are no Topics: is it the emulator's appsettings.json?".into()),
    };
    let mut imported = ImportResult::default();
    imported.warn_of_rest(top, &["Topics", "Filters"]);
    for (name, urls) in topics {
        let name = name.trim();
        if name.is_empty() || urls.is_null() {
            continue;
        }
        let about = |reason: &str| format!("Topics.{name}{reason}");
        let Value::Array(urls) = urls else {
            return Err(about(" must be a list of URLs"));
        };
        let mut subscriptions = Vec::new();
        let mut names = BTreeSet::new();
        let mut seen = BTreeSet::new();
        for (at, url) in urls.iter().enumerate() {
            let url = url
                .as_str()
                .ok_or_else(|| about(&format!("[{at}] must be a URL")))?
                .trim();
            if !seen.insert(url.to_lowercase()) {
                continue;
            }
            let lower = url.to_ascii_lowercase();
            if let Some(pulled) = lower.strip_prefix("pull://") {
                imported.warn(format!(
                    "topic {name:?}: {pulled:?} pulls its events; Postrider pushes them: give it a webhook"
                ));
                continue;
            }
            if !lower.starts_with("http://") && !lower.starts_with("https://") {
                imported.warn(format!(
                    "topic {name:?}: {url:?} is no URL, and left out as the emulator does"
                ));
                continue;
            }
            let types = included_types(root, name, url)?;
            subscriptions.push(ImportedSubscription {
                name: named(url, &mut names),
                destination: web_hook(url),
                filter: types.map(|types| json!({ "includedEventTypes": types })),
                event_delivery_schema: None,
                retry_policy: None,
                dead_letter_destination: None,
            });
        }
        imported.topics.push(ImportedTopic {
            name: name.to_owned(),
            key1: None,
            input_schema: None,
            subscriptions,
        });
    }
    if !imported.topics.is_empty() {
        imported.warn(
            "the emulator took events at /<topic>/api/events of either schema and with any key; here they go to \
             /topics/<topic>/api/events with a key (\"postrider key list\"), in EventGridSchema: set inputSchema to \
             CloudEventSchemaV1_0 if that is what publishers send",
        );
    }
    if imported
        .topics
        .iter()
        .any(|topic| !topic.subscriptions.is_empty())
    {
        imported.warn(NO_VALIDATION);
    }
    imported.warn_of_names();
    Ok(imported)
}

/// `Filters`: a list of filters that each name a subscriber, or, in older files, an object keyed by
/// subscriber.
fn included_types(root: &Value, topic: &str, url: &str) -> Result<Option<Vec<String>>, String> {
    let filters: Vec<(Option<&str>, Option<&str>, &Value)> = match member(root, "Filters") {
        None => return Ok(None),
        Some(Value::Array(filters)) => filters
            .iter()
            .map(|filter| {
                let subscriber = ["Subscription", "Subscriber", "Url", "Endpoint"]
                    .iter()
                    .find_map(|name| text(filter, name));
                (subscriber, text(filter, "Topic"), filter)
            })
            .collect(),
        Some(Value::Object(filters)) => filters
            .iter()
            .map(|(name, filter)| (Some(name.as_str()), None, filter))
            .collect(),
        Some(_) => return Err("Filters must be a list".into()),
    };
    let mut found = Vec::new();
    for (subscriber, of_topic, filter) in filters {
        let Some(subscriber) = subscriber else {
            return Err("a filter does not name its Subscription".into());
        };
        let same = |a: &str, b: &str| {
            a.trim_end_matches('/')
                .eq_ignore_ascii_case(b.trim_end_matches('/'))
        };
        if same(subscriber, url) && of_topic.is_none_or(|name| name.eq_ignore_ascii_case(topic)) {
            for kind in list(filter, "IncludedEventTypes")? {
                let kind = kind
                    .as_str()
                    .ok_or("IncludedEventTypes must be a list of names")?;
                found.push(kind.to_owned());
            }
        }
    }
    Ok((!found.is_empty()).then_some(found))
}

/// A name derived from a URL: its host and path, without characters that names cannot have.
fn named(url: &str, taken: &mut BTreeSet<String>) -> String {
    let bare = url.split_once("://").map_or(url, |(_, rest)| rest);
    let bare = bare.split(['?', '#']).next().unwrap_or(bare);
    let words = bare
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty());
    let mut name = words.collect::<Vec<_>>().join("-").to_lowercase();
    name.truncate(NAME_MAX - 4);
    let name = match name.trim_end_matches('-') {
        short if short.len() < 3 => format!("sub-{short}"),
        fine => fine.to_owned(),
    };
    let mut number = 2;
    let mut free = name.clone();
    while !taken.insert(free.clone()) {
        free = format!("{name}-{number}");
        number += 1;
    }
    free
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imported(text: &str) -> Result<ImportResult, String> {
        read(&super::super::relaxed::parse(text).unwrap())
    }

    #[test]
    fn topics_become_topics_and_urls_subscriptions() {
        let made = imported(
            r#"{
              "Topics": {
                "parcels": ["https://host.docker.internal:5001/hook?code=1", "https://host.docker.internal:5001/hook?code=2",
                            "http://other/", "http://OTHER/", "pull://slow", "nonsense"],
                "letters": [],
              },
              "Filters": [{"Subscription": "http://other", "IncludedEventTypes": ["Sent", "Lost"]}],
              "Logging": {"LogLevel": {}},
            }"#,
        )
        .unwrap();
        let [letters, parcels] = &made.topics[..] else {
            panic!("{made:#?}")
        };
        assert!(letters.subscriptions.is_empty());
        let names: Vec<_> = parcels
            .subscriptions
            .iter()
            .map(|one| one.name.as_str())
            .collect();
        assert_eq!(
            names,
            [
                "host-docker-internal-5001-hook",
                "host-docker-internal-5001-hook-2",
                "other"
            ]
        );
        assert_eq!(
            parcels.subscriptions[2].filter,
            Some(json!({"includedEventTypes": ["Sent", "Lost"]}))
        );
        assert_eq!(parcels.subscriptions[0].filter, None);
        let told = made.warnings.join("\n");
        for word in [
            "\"slow\" pulls",
            "nonsense",
            "Logging",
            "[validation] enabled = false",
            "postrider key list",
        ] {
            assert!(told.contains(word), "{word} in {told}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let refused = |text: &str, expected: &str| {
            let refused = imported(text).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        };
        refused("{}", "there are no Topics");
        refused(r#"{"Topics": []}"#, "Topics must be an object");
        refused(
            r#"{"Topics": {"a": "http://x"}}"#,
            "Topics.a must be a list of URLs",
        );
        refused(r#"{"Topics": {"a": [1]}}"#, "Topics.a[0] must be a URL");
    }

    #[test]
    fn names_are_short_and_one_of_a_kind() {
        let mut taken = BTreeSet::new();
        assert_eq!(named("http://x", &mut taken), "sub-x");
        assert_eq!(named("http://x/", &mut taken), "sub-x-2");
        let long = format!("https://{}/y", "a-b.".repeat(40));
        assert!(named(&long, &mut taken).len() <= NAME_MAX);
    }
}
