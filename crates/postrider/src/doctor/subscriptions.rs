//! The health of subscriptions, as the running server judges it.

use super::finding::Finding;
use super::network;
use crate::config::Config;
use serde_json::Value;
use std::collections::BTreeMap;

/// Warns of every subscription that needs attention, with the server's own reasons. Also the causes of their recent
/// failures, by endpoint.
pub async fn examine(config: &Config, url: &str) -> (Vec<Finding>, BTreeMap<String, String>) {
    match network::ask(config, url, "/postrider/v1/stats?top=0").await {
        Ok(stats) => (findings(&stats["verdict"]), failures(&stats["verdict"])),
        Err(why) => {
            let what = format!("the server does not say how its subscriptions are: {why}");
            let todo = "run the doctor as a user who may read the data directory";
            let found = Finding::warning("subscriptions", what, todo);
            (vec![found], BTreeMap::new())
        }
    }
}

fn findings(verdict: &Value) -> Vec<Finding> {
    let named = verdict["subscriptions"].as_array().map_or(&[][..], Vec::as_slice);
    let mut found: Vec<Finding> = named.iter().filter_map(finding).collect();
    let text = verdict["text"].as_str().unwrap_or("not known");
    if verdict["status"] == "well" {
        found.push(Finding::ok("subscriptions", "no events lost, failing or stuck"));
    } else if verdict["count"].as_u64() != Some(found.len() as u64) || found.is_empty() {
        let todo = "see the overview of the portal, or GET /postrider/v1/stats";
        found.push(Finding::warning("subscriptions", text, todo));
    }
    found
}

fn failures(verdict: &Value) -> BTreeMap<String, String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let of = |one: &Value| {
        let reasons = list(&one["reasons"]);
        let mut causes = reasons.iter().flat_map(|reason| list(&reason["causes"]));
        let cause = causes.find_map(|cause| cause["text"].as_str().map(str::to_owned))?;
        Some((one["endpoint"].as_str()?.to_owned(), cause))
    };
    list(&verdict["subscriptions"]).iter().filter_map(of).collect()
}

fn finding(one: &Value) -> Option<Finding> {
    let name = one["name"].as_str()?;
    let topic = one["topic"].as_str().unwrap_or_default();
    let reasons = one["reasons"].as_array()?;
    let texts: Vec<&str> = reasons
        .iter()
        .filter_map(|reason| reason["text"].as_str())
        .collect();
    let todo = reasons.iter().find_map(|reason| reason["todo"].as_str());
    let what = format!("subscription {name:?} of topic {topic:?}: {}", texts.join("; "));
    Some(Finding::warning(
        "subscriptions",
        what,
        todo.unwrap_or("look at the portal's page of the subscription"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::FindingLevel;
    use serde_json::json;

    #[test]
    fn every_subscription_that_needs_attention_is_named_with_its_reasons() {
        let well = findings(&json!({"status": "well", "text": "All well", "count": 0, "subscriptions": []}));
        assert_eq!((well.len(), well[0].level), (1, FindingLevel::Ok));

        let reasons = json!([
            {"code": "dropped", "text": "28 of 97 events dropped", "todo": "set a dead-letter destination",
             "causes": [{"count": 28, "text": "HTTP 400 Bad Request"}]},
            {"code": "backlog", "text": "3 events not delivered yet", "todo": "look"},
        ]);
        let shop = json!({"name": "shop", "topic": "orders", "health": "failing", "reasons": reasons,
            "endpoint": "http://h/"});
        let found =
            findings(&json!({"status": "attention", "text": "", "count": 1, "subscriptions": [shop]}));
        let [one] = &found[..] else { panic!("{found:?}") };
        assert_eq!(one.level, FindingLevel::Warning);
        assert_eq!(
            one.what,
            "subscription \"shop\" of topic \"orders\": 28 of 97 events dropped; 3 events not delivered yet"
        );
        assert_eq!(one.todo.as_deref(), Some("set a dead-letter destination"));
        assert_eq!(
            failures(&json!({"subscriptions": [shop]})),
            BTreeMap::from([("http://h/".to_owned(), "HTTP 400 Bad Request".to_owned())])
        );

        // More subscriptions than the server names, or nodes that did not answer.
        let text = "60 subscriptions need attention";
        let found =
            findings(&json!({"status": "attention", "text": text, "count": 60, "subscriptions": [shop]}));
        assert_eq!((found.len(), found[1].what.as_str()), (2, text));
        let text = "1 node did not answer";
        let found = findings(&json!({"status": "attention", "text": text, "count": 0, "subscriptions": []}));
        assert_eq!((found.len(), found[0].what.as_str()), (1, text));
    }
}
