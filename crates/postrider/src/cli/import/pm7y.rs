//! pm7y's AzureEventGridSimulator: `appsettings.json` with `topics`, each on a port of its own.

use super::{
    ImportResult, ImportedSubscription, ImportedTopic, NO_VALIDATION, flag, list, member, number, text,
    web_hook,
};
use serde_json::{Map, Value, json};

const KINDS: [&str; 4] = ["http", "serviceBus", "storageQueue", "eventHub"];

pub fn read(root: &Value) -> Result<ImportResult, String> {
    let Some(top) = root.as_object() else {
        return Err("the file must be an object with topics".into());
    };
    let mut imported = ImportResult::default();
    let topics = list(root, "topics")?;
    if member(root, "topics").is_none() {
        return Err("there are no topics: is it the simulator's appsettings.json?".into());
    }
    if flag(root, "dangerousAcceptAnyServerCertificateValidator") == Some(true) {
        imported.warn(
            "dangerousAcceptAnyServerCertificateValidator: webhooks need certificates that this machine trusts",
        );
    }
    if member(root, "eventValidationLimits").is_some() {
        imported.warn("eventValidationLimits: the limits here are Event Grid's own");
    }
    imported.warn_of_rest(
        top,
        &[
            "topics",
            "dangerousAcceptAnyServerCertificateValidator",
            "eventValidationLimits",
        ],
    );
    for (at, topic) in topics.iter().enumerate() {
        let name = text(topic, "name").ok_or_else(|| format!("topics[{at}].name is required"))?;
        read_topic(&mut imported, name, topic).map_err(|reason| format!("topic {name:?}: {reason}"))?;
    }
    imported.warn_of_names();
    Ok(imported)
}

fn read_topic(imported: &mut ImportResult, name: &str, topic: &Value) -> Result<(), String> {
    if flag(topic, "disabled") == Some(true) {
        imported.warn(format!("topic {name:?} is disabled and left out"));
        return Ok(());
    }
    if let Some(port) = number(topic, "port").or_else(|| number(topic, "httpsPort")) {
        imported.warn(format!(
            "topic {name:?} had port {port} of its own; all topics share the server's: publish to \
             <server>/topics/{name}/api/events"
        ));
    }
    let key = text(topic, "key");
    match key {
        Some(_) => imported.warn(
            "keys are in the file for the server's configuration (write it with --output grid.toml and serve it with \
             --config); \"apply\" cannot set them and leaves those that the server makes",
        ),
        None => imported.warn(format!(
            "topic {name:?} took events without a key; here publishers need one (\"postrider key list --topic {name}\")"
        )),
    }
    let input_schema = text(topic, "inputSchema").map(schema).transpose()?;
    if input_schema.is_none() {
        imported.warn(format!(
            "topic {name:?} took events of either schema; here it takes EventGridSchema: set inputSchema to \
             CloudEventSchemaV1_0 if that is what publishers send"
        ));
    }
    let delivered = text(topic, "outputSchema").map(schema).transpose()?;

    let mut subscriptions = Vec::new();
    let nothing = json!([]);
    match member(topic, "subscribers").unwrap_or(&nothing) {
        Value::Array(all) => {
            for one in all {
                read_subscriber(imported, &mut subscriptions, "http", one, topic, delivered)?;
            }
        }
        groups @ Value::Object(map) => {
            for name in map.keys() {
                if !KINDS.iter().any(|kind| kind.eq_ignore_ascii_case(name)) {
                    return Err(format!("subscribers.{name} is none of {}", KINDS.join(", ")));
                }
            }
            for kind in KINDS {
                for one in list(groups, kind)? {
                    read_subscriber(imported, &mut subscriptions, kind, one, topic, delivered)?;
                }
            }
        }
        _ => return Err("subscribers must be a list or an object".into()),
    }
    imported.topics.push(ImportedTopic {
        name: name.to_owned(),
        key1: key.map(str::to_owned),
        input_schema,
        subscriptions,
    });
    Ok(())
}

fn read_subscriber(
    imported: &mut ImportResult,
    all: &mut Vec<ImportedSubscription>,
    kind: &str,
    given: &Value,
    topic: &Value,
    delivered: Option<&'static str>,
) -> Result<(), String> {
    let name = text(given, "name").ok_or("a subscriber has no name")?;
    let about = |reason: String| format!("subscriber {name:?}: {reason}");
    if flag(given, "disabled") == Some(true) {
        imported.warn(format!("subscriber {name:?} is disabled and left out"));
        return Ok(());
    }
    let destination = match kind {
        "http" => {
            let url = text(given, "endpoint").ok_or_else(|| about("endpoint is required".into()))?;
            if flag(given, "disableValidation") == Some(true) {
                imported.warn(format!(
                    "subscriber {name:?} has disableValidation: {NO_VALIDATION}"
                ));
            }
            web_hook(url)
        }
        "serviceBus" => service_bus(given, topic).map_err(about)?,
        "storageQueue" => storage_queue(given, topic).map_err(about)?,
        _ => event_hub(given, topic).map_err(about)?,
    };
    if kind != "http" {
        imported.warn(format!(
            "subscriber {name:?}: its connection string is not in the file, and this server may not deliver to {kind} \
             yet; \"apply\" says so"
        ));
    }
    let own = text(given, "deliverySchema")
        .map(schema)
        .transpose()
        .map_err(about)?;
    all.push(ImportedSubscription {
        name: name.to_owned(),
        destination,
        filter: member(given, "filter")
            .map(filter)
            .transpose()
            .map_err(about)?
            .flatten(),
        event_delivery_schema: own.or(delivered),
        retry_policy: member(given, "retryPolicy").and_then(retry),
        dead_letter_destination: dead_letter(imported, name, given),
    });
    Ok(())
}

fn schema(name: &str) -> Result<&'static str, String> {
    match name.to_ascii_lowercase().as_str() {
        "eventgridschema" => Ok("EventGridSchema"),
        "cloudeventv1_0" | "cloudeventschemav1_0" => Ok("CloudEventSchemaV1_0"),
        _ => Err(format!("{name:?} is neither EventGridSchema nor CloudEventV1_0")),
    }
}

/// `retryPolicy`, which may be switched off: a single attempt.
fn retry(policy: &Value) -> Option<Value> {
    let mut made = Map::new();
    if flag(policy, "enabled") == Some(false) {
        made.insert("maxDeliveryAttempts".into(), json!(1));
    } else if let Some(attempts) = number(policy, "maxDeliveryAttempts") {
        made.insert("maxDeliveryAttempts".into(), json!(attempts));
    }
    if let Some(minutes) = number(policy, "eventTimeToLiveInMinutes") {
        made.insert("eventTimeToLiveInMinutes".into(), json!(minutes));
    }
    (!made.is_empty()).then_some(Value::Object(made))
}

fn dead_letter(imported: &mut ImportResult, name: &str, given: &Value) -> Option<Value> {
    let settings = member(given, "deadLetter")?;
    if flag(settings, "enabled") == Some(false) {
        return None;
    }
    let folder = text(settings, "folderPath").unwrap_or("./dead-letters");
    imported.warn(format!(
        "subscriber {name:?} wrote dead letters into {folder}; here they go to the container \"deadletters\" of the \
         account \"local\", a directory of the server's data; \"[[storage_account]]\" in its configuration names other places"
    ));
    let place = json!({"resourceId": "local", "blobContainerName": "deadletters"});
    Some(json!({"endpointType": "StorageBlob", "properties": place}))
}

fn filter(given: &Value) -> Result<Option<Value>, String> {
    let mut made = Map::new();
    let types: Vec<&Value> = list(given, "includedEventTypes")?.iter().collect();
    let all = types
        .iter()
        .any(|one| one.as_str().is_some_and(|one| one.eq_ignore_ascii_case("all")));
    if !types.is_empty() && !all {
        made.insert("includedEventTypes".into(), json!(types));
    }
    for name in ["subjectBeginsWith", "subjectEndsWith"] {
        if let Some(text) = text(given, name) {
            made.insert(name.into(), json!(text));
        }
    }
    if flag(given, "isSubjectCaseSensitive") == Some(true) {
        made.insert("isSubjectCaseSensitive".into(), json!(true));
    }
    let advanced: Vec<Value> = list(given, "advancedFilters")?
        .iter()
        .map(advanced)
        .collect::<Result<_, _>>()?;
    if !advanced.is_empty() {
        made.insert("advancedFilters".into(), json!(advanced));
    }
    Ok((!made.is_empty()).then_some(Value::Object(made)))
}

/// Advanced filters of the emulator may have one value or several, whatever the operator.
fn advanced(given: &Value) -> Result<Value, String> {
    let key = text(given, "key").ok_or("an advanced filter has no key")?;
    let operator = text(given, "operatorType").ok_or("an advanced filter has no operatorType")?;
    let lower = operator.to_ascii_lowercase();
    let several = list(given, "values")?;
    let one = member(given, "value");
    let mut made = json!({"operatorType": operator, "key": event_key(key)});
    let single = lower == "boolequals" || lower.contains("lessthan") || lower.contains("greaterthan");
    match (single, one, several) {
        _ if lower.starts_with("isn") => {}
        (true, Some(one), _) => made["value"] = one.clone(),
        (true, None, [one]) => made["value"] = one.clone(),
        (false, _, [_, ..]) => made["values"] = json!(several),
        (false, Some(one), []) => made["values"] = json!([one]),
        _ => return Err(format!("the advanced filter {key} {operator} needs a value")),
    }
    Ok(made)
}

/// `Data.Key1` becomes `data.Key1`: the part outside the data is spelled as in an event.
fn event_key(key: &str) -> String {
    let (head, rest) = key
        .split_once('.')
        .map_or((key, None), |(head, rest)| (head, Some(rest)));
    let known = [
        "id",
        "topic",
        "subject",
        "eventType",
        "eventTime",
        "dataVersion",
        "data",
        "source",
        "type",
    ];
    let head = known
        .iter()
        .find(|name| name.eq_ignore_ascii_case(head))
        .copied()
        .unwrap_or(head);
    match rest {
        Some(rest) => format!("{head}.{rest}"),
        None => head.to_owned(),
    }
}

/// A setting of a subscriber, or else of its topic.
fn inherited<'a>(given: &'a Value, topic: &'a Value, name: &str, prefix: &str) -> Option<&'a str> {
    text(given, name).or_else(|| text(topic, &format!("{prefix}{name}")))
}

/// The namespace by its own setting, or from the connection string.
fn namespace(given: &Value, topic: &Value, prefix: &str) -> Result<String, String> {
    if let Some(name) = inherited(given, topic, "namespace", prefix) {
        return Ok(name.to_owned());
    }
    let connection = inherited(given, topic, "connectionString", prefix);
    let endpoint = connection.and_then(|text| {
        text.split(';')
            .filter_map(|part| part.split_once('='))
            .find(|(name, _)| name.trim().eq_ignore_ascii_case("Endpoint"))
    });
    let host = endpoint.and_then(|(_, url)| url.trim().strip_prefix("sb://"));
    let host = host
        .and_then(|host| host.split(['/', '.', ':']).next())
        .filter(|host| !host.is_empty());
    host.map(str::to_owned)
        .ok_or_else(|| "neither namespace nor connectionString says where it is".to_owned())
}

fn service_bus(given: &Value, topic: &Value) -> Result<Value, String> {
    let namespace = namespace(given, topic, "serviceBus")?;
    let (kind, name) = match (text(given, "queue"), text(given, "topic")) {
        (Some(queue), None) => ("ServiceBusQueue", queue),
        (None, Some(topic)) => ("ServiceBusTopic", topic),
        _ => return Err("needs either queue or topic".into()),
    };
    broker(kind, format!("{namespace}/{name}"), given)
}

fn event_hub(given: &Value, topic: &Value) -> Result<Value, String> {
    let namespace = namespace(given, topic, "eventHub")?;
    let name = text(given, "eventHubName").ok_or("eventHubName is required")?;
    broker("EventHub", format!("{namespace}/{name}"), given)
}

fn broker(kind: &str, id: String, given: &Value) -> Result<Value, String> {
    let mut made = json!({"endpointType": kind, "properties": {"resourceId": id}});
    let mappings = match member(given, "properties") {
        None => Vec::new(),
        Some(Value::Object(all)) => all
            .iter()
            .map(|(name, one)| attribute(name, one))
            .collect::<Result<_, _>>()?,
        Some(_) => return Err("properties must be an object".into()),
    };
    if !mappings.is_empty() {
        made["properties"]["deliveryAttributeMappings"] = json!(mappings);
    }
    Ok(made)
}

fn attribute(name: &str, given: &Value) -> Result<Value, String> {
    let value = text(given, "value").ok_or_else(|| format!("properties.{name}.value is required"))?;
    match text(given, "type").map(str::to_ascii_lowercase).as_deref() {
        Some("static") => {
            Ok(json!({"name": name, "type": "Static", "properties": {"value": value, "isSecret": false}}))
        }
        Some("dynamic") => {
            Ok(json!({"name": name, "type": "Dynamic", "properties": {"sourceField": event_key(value)}}))
        }
        _ => Err(format!("properties.{name}.type must be static or dynamic")),
    }
}

fn storage_queue(given: &Value, topic: &Value) -> Result<Value, String> {
    let queue = text(given, "queueName").ok_or("queueName is required")?;
    let connection = inherited(given, topic, "connectionString", "storageQueue")
        .ok_or("connectionString does not say which account it is")?;
    let account = connection
        .split(';')
        .filter_map(|part| part.split_once('='))
        .find(|(name, _)| name.trim().eq_ignore_ascii_case("AccountName"))
        .map(|(_, name)| name.trim());
    let account = match account {
        Some(account) => account,
        None if connection
            .to_ascii_lowercase()
            .contains("usedevelopmentstorage=true") =>
        {
            "devstoreaccount1"
        }
        None => return Err("connectionString does not say which account it is".into()),
    };
    Ok(json!({"endpointType": "StorageQueue", "properties": {"resourceId": account, "queueName": queue}}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::declarations::{DeclarationSet, FileFormat};

    fn imported(text: &str) -> Result<ImportResult, String> {
        read(&super::super::relaxed::parse(text).unwrap())
    }

    #[test]
    fn the_old_form_with_a_list_of_webhooks() {
        let made = imported(
            r#"{
              "Topics": [ // one on each port
                {"name": "parcels", "port": 61001, "key": "abc=", "subscribers": [
                  {"name": "tracking", "endpoint": "http://localhost:7001/hook?code=1", "disableValidation": true,
                   "filter": {"includedEventTypes": ["Parcel.Sent"], "subjectEndsWith": "/eu",
                     "advancedFilters": [
                       {"operatorType": "NumberGreaterThanOrEquals", "key": "Data.Weight", "value": 5},
                       {"operatorType": "StringContains", "key": "Subject", "value": "x"},
                       {"operatorType": "StringIn", "key": "Data.To", "values": ["a", "b"]},
                       {"operatorType": "IsNotNull", "key": "Data.From"}]}},
                  {"name": "off", "endpoint": "http://x", "disabled": true},
                ]},
                {"name": "empty", "httpsPort": 61002, "key": null, "inputSchema": "CloudEventV1_0"},
                {"name": "gone", "port": 61003, "disabled": true, "subscribers": []},
              ],
              "Serilog": {},
            }"#,
        )
        .unwrap();
        let [parcels, empty] = &made.topics[..] else {
            panic!("{made:#?}")
        };
        assert_eq!(
            (parcels.key1.as_deref(), parcels.input_schema),
            (Some("abc="), None)
        );
        assert_eq!(
            (empty.key1.as_deref(), empty.input_schema),
            (None, Some("CloudEventSchemaV1_0"))
        );
        let [tracking] = &parcels.subscriptions[..] else {
            panic!("{parcels:#?}")
        };
        assert_eq!(
            tracking.destination,
            web_hook("http://localhost:7001/hook?code=1")
        );
        assert_eq!(
            tracking.filter.as_ref().unwrap(),
            &json!({"includedEventTypes": ["Parcel.Sent"], "subjectEndsWith": "/eu", "advancedFilters": [
                {"operatorType": "NumberGreaterThanOrEquals", "key": "data.Weight", "value": 5},
                {"operatorType": "StringContains", "key": "subject", "values": ["x"]},
                {"operatorType": "StringIn", "key": "data.To", "values": ["a", "b"]},
                {"operatorType": "IsNotNull", "key": "data.From"}]})
        );
        let told = made.warnings.join("\n");
        for word in [
            "port 61001",
            "<server>/topics/parcels/api/events",
            "disableValidation",
            "[validation] enabled = false",
            "\"off\" is disabled",
            "\"gone\" is disabled",
            "Serilog",
            "postrider key list --topic empty",
            "keys are in the file",
        ] {
            assert!(told.contains(word), "{word} in {told}");
        }
    }

    #[test]
    fn the_new_form_with_other_destinations() {
        let made = imported(
            r#"{"topics": [{"name": "parcels", "port": 1, "key": "k", "outputSchema": "CloudEventV1_0",
                "eventHubConnectionString": "Endpoint=sb://hubs.servicebus.windows.net/;SharedAccessKey=hunter2",
                "subscribers": {
                  "http": [{"name": "h", "endpoint": "https://x", "deliverySchema": "EventGridSchema",
                            "retryPolicy": {"maxDeliveryAttempts": 4, "eventTimeToLiveInMinutes": 10},
                            "deadLetter": {"enabled": true, "folderPath": "/var/dead"}},
                           {"name": "once", "endpoint": "https://x", "retryPolicy": {"enabled": false}}],
                  "serviceBus": [{"name": "q", "namespace": "bus", "sharedAccessKey": "hunter2", "queue": "in",
                     "properties": {"Kind": {"type": "dynamic", "value": "EventType"},
                                    "From": {"type": "static", "value": "here"}}}],
                  "storageQueue": [{"name": "s", "connectionString": "AccountName=acc;AccountKey=hunter2", "queueName": "z"}],
                  "eventHub": [{"name": "e", "eventHubName": "hub"}]}}]}"#,
        )
        .unwrap();
        let all = &made.topics[0].subscriptions;
        let names: Vec<_> = all.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["h", "once", "q", "s", "e"]);
        assert_eq!(all[0].event_delivery_schema, Some("EventGridSchema"));
        assert_eq!(all[1].event_delivery_schema, Some("CloudEventSchemaV1_0"));
        assert_eq!(
            all[0].retry_policy,
            Some(json!({"maxDeliveryAttempts": 4, "eventTimeToLiveInMinutes": 10}))
        );
        assert_eq!(all[1].retry_policy, Some(json!({"maxDeliveryAttempts": 1})));
        assert!(all[0].dead_letter_destination.is_some());
        assert_eq!(
            all[2].destination,
            json!({"endpointType": "ServiceBusQueue", "properties": {"resourceId": "bus/in",
                "deliveryAttributeMappings": [
                    {"name": "From", "type": "Static", "properties": {"value": "here", "isSecret": false}},
                    {"name": "Kind", "type": "Dynamic", "properties": {"sourceField": "eventType"}}]}})
        );
        assert_eq!(
            all[3].destination,
            json!({"endpointType": "StorageQueue", "properties": {"resourceId": "acc", "queueName": "z"}})
        );
        assert_eq!(all[4].destination["properties"]["resourceId"], "hubs/hub");
        for format in [FileFormat::Yaml, FileFormat::Json, FileFormat::Toml] {
            let text = made.text(format).unwrap();
            assert!(!text.contains("hunter2"), "{text}");
            let mut grid = DeclarationSet::default();
            grid.add(&text, format, "grid")
                .unwrap_or_else(|e| panic!("{e}\n{text}"));
            assert_eq!((grid.resources.len(), grid.subscriptions.len()), (1, 5));
        }
        assert!(made.warnings.iter().any(|told| told.contains("/var/dead")));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let refused = |text: &str, expected: &str| {
            let refused = imported(text).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        };
        refused("[]", "must be an object");
        refused("{}", "there are no topics");
        refused(r#"{"topics": {}}"#, "topics must be a list");
        refused(r#"{"topics": [{"port": 1}]}"#, "topics[0].name is required");
        refused(
            r#"{"topics": [{"name": "abc", "subscribers": [{"name": "s"}]}]}"#,
            "topic \"abc\": subscriber \"s\": endpoint is required",
        );
        refused(
            r#"{"topics": [{"name": "abc", "subscribers": {"htp": []}}]}"#,
            "subscribers.htp is none of",
        );
        refused(
            r#"{"topics": [{"name": "abc", "inputSchema": "Xml"}]}"#,
            "\"Xml\" is neither",
        );
    }
}
