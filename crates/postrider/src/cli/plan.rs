//! The steps that change a server to match declaration files.

use super::normalize::{NormalizedState, ServerBatchDefaults, StateDifference, with_usual_names};
use crate::terminal::harmless;
use serde_json::{Value, json};

/// Declared state of one resource.
#[derive(Clone, Debug, PartialEq)]
pub enum WantedResource {
    Topic(Value),
    /// A domain topic has no properties: it only exists.
    DomainTopic,
    Subscription {
        properties: Value,
        /// Default schema in which events are delivered.
        schema: String,
        /// Whether the cloud's default retry policy applies; the defaults of other profiles are not
        /// known here.
        cloud_retries: bool,
        batch_defaults: ServerBatchDefaults,
        /// Whether the source has event types of its own, which the server fills in where the
        /// subscription names none.
        typed_source: bool,
    },
}

impl WantedResource {
    /// Request body that creates or changes the resource; `None` if it has none.
    fn body(&self, exists: bool) -> Option<Value> {
        match self {
            WantedResource::Topic(body) => Some(body.clone()),
            WantedResource::DomainTopic => None,
            WantedResource::Subscription {
                properties,
                schema,
                batch_defaults,
                ..
            } => {
                // A subscription that the edge API made has other batch defaults than the file means.
                let mut properties = match exists {
                    true => batch_defaults.fill_in(properties),
                    false => properties.clone(),
                };
                // A PUT without the schema keeps the server's value; a file without it means the
                // default.
                if properties["eventDeliverySchema"].is_null() {
                    properties["eventDeliverySchema"] = json!(schema);
                }
                Some(json!({ "properties": properties }))
            }
        }
    }

    fn action(&self, present: Option<&Value>) -> PlanAction {
        let Some(present) = present else {
            return PlanAction::Create;
        };
        let differences = match self {
            WantedResource::Topic(body) => {
                NormalizedState::of_topic(present).differences(&NormalizedState::of_topic(body))
            }
            WantedResource::DomainTopic => Vec::new(),
            WantedResource::Subscription {
                properties,
                schema,
                cloud_retries,
                batch_defaults,
                typed_source,
            } => {
                let properties = &with_usual_names(properties);
                let mut present = NormalizedState::of_subscription(&present["properties"], schema);
                for limit in ["maxDeliveryAttempts", "eventTimeToLiveInMinutes"] {
                    if !cloud_retries && properties["retryPolicy"][limit].is_null() {
                        present.forget(&format!("retryPolicy.{limit}"));
                    }
                }
                if *typed_source && properties["filter"]["includedEventTypes"].is_null() {
                    present.forget("filter.includedEventTypes");
                }
                let wanted = batch_defaults.fill_in(properties);
                present.differences(&NormalizedState::of_subscription(&wanted, schema))
            }
        };
        match differences.is_empty() {
            true => PlanAction::Keep,
            false => PlanAction::Change(differences),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum PlanAction {
    Create,
    Change(Vec<StateDifference>),
    Keep,
    Delete,
}

impl PlanAction {
    fn sign(&self) -> char {
        match self {
            PlanAction::Create => '+',
            PlanAction::Change(_) => '~',
            PlanAction::Keep => '=',
            PlanAction::Delete => '-',
        }
    }

    fn word(&self) -> &'static str {
        match self {
            PlanAction::Create => "create",
            PlanAction::Change(_) => "change",
            PlanAction::Keep => "keep",
            PlanAction::Delete => "delete",
        }
    }

    /// The verb for a step that was done.
    pub fn done(&self) -> &'static str {
        match self {
            PlanAction::Create => "created",
            PlanAction::Change(_) => "changed",
            PlanAction::Keep => "unchanged",
            PlanAction::Delete => "deleted",
        }
    }
}

/// A resource and its action.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanStep {
    pub action: PlanAction,
    /// `topic orders`, for people.
    pub what: String,
    pub id: String,
    pub body: Option<Value>,
    pub etag: Option<String>,
}

impl PlanStep {
    pub fn of(
        what: String,
        id: String,
        wanted: &WantedResource,
        present: Option<&Value>,
        etag: Option<String>,
    ) -> PlanStep {
        PlanStep {
            action: wanted.action(present),
            what,
            id,
            body: wanted.body(present.is_some()),
            etag,
        }
    }

    pub fn delete(what: String, id: String) -> PlanStep {
        PlanStep {
            action: PlanAction::Delete,
            what,
            id,
            body: None,
            etag: None,
        }
    }

    pub fn changes_anything(&self) -> bool {
        self.action != PlanAction::Keep
    }

    fn json(&self) -> Value {
        let mut step = json!({"action": self.action.word(), "what": self.what, "id": self.id});
        if let PlanAction::Change(differences) = &self.action {
            let told = |one: &StateDifference| json!({"field": one.field, "old": one.old, "new": one.new});
            step["changes"] = differences.iter().map(told).collect();
        }
        step
    }
}

/// Steps in the order in which they are carried out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ApplyPlan(pub Vec<PlanStep>);

impl ApplyPlan {
    pub fn is_work(&self) -> bool {
        self.0.iter().any(PlanStep::changes_anything)
    }

    pub fn deletes(&self) -> usize {
        self.count(|action| *action == PlanAction::Delete)
    }

    fn count(&self, which: impl Fn(&PlanAction) -> bool) -> usize {
        self.0.iter().filter(|step| which(&step.action)).count()
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        for step in &self.0 {
            text.push_str(&format!("{} {}\n", step.action.sign(), harmless(&step.what)));
            if let PlanAction::Change(differences) = &step.action {
                for StateDifference { field, old, new } in differences {
                    let line = format!("{field}: {old} → {new}");
                    text.push_str(&format!("    {}\n", harmless(&line)));
                }
            }
        }
        text + &self.summary()
    }

    pub fn summary(&self) -> String {
        if !self.is_work() {
            return format!("nothing to do: {} as wanted", self.0.len());
        }
        format!(
            "{} to create, {} to change, {} to delete, {} as wanted",
            self.count(|action| *action == PlanAction::Create),
            self.count(|action| matches!(action, PlanAction::Change(_))),
            self.deletes(),
            self.count(|action| *action == PlanAction::Keep),
        )
    }

    pub fn json(&self) -> Value {
        self.0.iter().map(PlanStep::json).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(wanted: &WantedResource, present: Option<Value>) -> PlanStep {
        PlanStep::of("x".into(), "/x".into(), wanted, present.as_ref(), None)
    }

    #[test]
    fn what_is_there_is_changed_kept_or_created() {
        let wanted = WantedResource::Topic(json!({"properties": {"disableLocalAuth": true}}));
        assert_eq!(step(&wanted, None).action, PlanAction::Create);
        let there = |off: bool| {
            Some(json!({"location": "x", "properties": {"disableLocalAuth": off, "endpoint": "e"}}))
        };
        assert_eq!(step(&wanted, there(true)).action, PlanAction::Keep);
        let PlanAction::Change(differences) = step(&wanted, there(false)).action else {
            panic!("it differs")
        };
        assert_eq!(differences[0].field, "properties.disableLocalAuth");
        assert_eq!(
            step(&WantedResource::DomainTopic, Some(json!({}))).action,
            PlanAction::Keep
        );
        assert_eq!(step(&WantedResource::DomainTopic, None).body, None);
        let wanted = WantedResource::Subscription {
            properties: json!({"labels": ["a"]}),
            schema: "CloudEventSchemaV1_0".into(),
            cloud_retries: true,
            batch_defaults: ServerBatchDefaults::USUAL,
            typed_source: false,
        };
        let there = json!({"properties": {"labels": ["a"], "eventDeliverySchema": "CloudEventSchemaV1_0"}});
        assert_eq!(step(&wanted, Some(there)).action, PlanAction::Keep);
        // The server keeps the schema when a PUT does not name one.
        let there = json!({"properties": {"labels": ["a"], "eventDeliverySchema": "EventGridSchema"}});
        let changing = step(&wanted, Some(there));
        assert!(changing.changes_anything());
        let sent = json!({"properties": {"labels": ["a"], "eventDeliverySchema": "CloudEventSchemaV1_0"}});
        assert_eq!(changing.body, Some(sent));
    }

    #[test]
    fn what_the_server_knows_better_is_left_to_it() {
        let wanted = |properties: Value, cloud_retries: bool| WantedResource::Subscription {
            properties,
            schema: "EventGridSchema".into(),
            cloud_retries,
            batch_defaults: ServerBatchDefaults::USUAL,
            typed_source: true,
        };
        let there = || {
            Some(json!({"properties": {
            "retryPolicy": {"eventTimeToLiveInMinutes": 120}, "filter": {"includedEventTypes": ["A"]}}}))
        };
        let is_work = |wanted: WantedResource| step(&wanted, there()).changes_anything();
        assert!(is_work(wanted(json!({}), true)));
        assert!(!is_work(wanted(json!({}), false)));
        assert!(is_work(wanted(
            json!({"retryPolicy": {"eventTimeToLiveInMinutes": 1440}}),
            false
        )));
    }

    #[test]
    fn members_with_two_names_are_compared_under_one() {
        let action = |written: Value, shown: Value| {
            let wanted = WantedResource::Subscription {
                properties: written,
                schema: "EventGridSchema".into(),
                cloud_retries: false,
                batch_defaults: ServerBatchDefaults::USUAL,
                typed_source: false,
            };
            step(&wanted, Some(json!({"properties": shown}))).action
        };
        let shown = |minutes: u32, sensitive: bool| {
            json!({"retryPolicy": {"maxDeliveryAttempts": 30, "eventTimeToLiveInMinutes": minutes},
                "filter": {"isSubjectCaseSensitive": sensitive,
                    "advancedFilters": [{"operatorType": "StringIn", "key": "a", "values": ["x"]}]}})
        };
        let written = json!({"retryPolicy": {"eventExpiryInMinutes": 14},
            "filter": {"subjectIsCaseSensitive": true,
                "advancedFilters": [{"operator": "StringIn", "key": "a", "values": ["x"]}]}});
        assert_eq!(action(written.clone(), shown(14, true)), PlanAction::Keep);
        let PlanAction::Change(found) = action(written, shown(1440, true)) else {
            panic!("14 minutes are no 1440");
        };
        let found: Vec<_> = found
            .iter()
            .map(|one| (&*one.field, &*one.old, &*one.new))
            .collect();
        assert_eq!(found, [("retryPolicy.eventTimeToLiveInMinutes", "1440", "14")]);
    }

    #[test]
    fn limits_of_batches_that_a_file_leaves_out_are_the_servers() {
        let hook = |batches: Value| {
            let mut properties = json!({"endpointUrl": "https://a/x"});
            properties
                .as_object_mut()
                .unwrap()
                .extend(batches.as_object().unwrap().clone());
            json!({"destination": {"endpointType": "webhook", "properties": properties}})
        };
        let limits = |events: u32, size: u32| json!({"maxEventsPerBatch": events, "preferredBatchSizeInKilobytes": size});
        let is_work = |written: Value, shown: Value| {
            let wanted = WantedResource::Subscription {
                properties: hook(written),
                schema: "EventGridSchema".into(),
                cloud_retries: true,
                batch_defaults: ServerBatchDefaults {
                    events: 20,
                    kilobytes: 128,
                },
                typed_source: false,
            };
            step(&wanted, Some(json!({"properties": hook(shown)}))).changes_anything()
        };
        let size = || json!({"preferredBatchSizeInKilobytes": 64});
        let events = || json!({"maxEventsPerBatch": 50});
        for (written, shown) in [
            (json!({}), limits(1, 128)),
            (size(), limits(20, 64)),
            (events(), limits(50, 128)),
        ] {
            assert!(!is_work(written.clone(), shown), "{written}");
        }
        for (written, shown) in [
            (json!({}), limits(20, 128)),
            (size(), limits(1, 64)),
            (size(), limits(50, 64)),
            (events(), limits(50, 64)),
        ] {
            assert!(is_work(written.clone(), shown), "{written}");
        }
    }

    #[test]
    fn a_change_names_both_limits_of_batches() {
        let wanted = WantedResource::Subscription {
            properties: json!({"destination": {
                "endpointType": "WebHook",
                "properties": {"endpointUrl": "https://h/x", "maxEventsPerBatch": 5},
            }}),
            schema: "EventGridSchema".into(),
            cloud_retries: true,
            batch_defaults: ServerBatchDefaults::USUAL,
            typed_source: false,
        };
        let size = |exists: bool| {
            let body = wanted.body(exists).unwrap();
            body["properties"]["destination"]["properties"]["preferredBatchSizeInKilobytes"].clone()
        };
        assert_eq!((size(false), size(true)), (Value::Null, json!(64)));
    }

    #[test]
    fn a_plan_is_read_before_it_is_done() {
        let wanted = WantedResource::Topic(json!({"properties": {"disableLocalAuth": true}}));
        let named = |what: &str, present: Option<Value>| PlanStep {
            what: what.into(),
            ..step(&wanted, present)
        };
        let plan = ApplyPlan(vec![
            named("topic new", None),
            named("topic old", Some(json!({"properties": {}}))),
            named(
                "topic same",
                Some(json!({"properties": {"disableLocalAuth": true}})),
            ),
            PlanStep::delete("topic gone".into(), "/gone".into()),
        ]);
        assert_eq!(
            plan.text(),
            "+ topic new\n~ topic old\n    properties.disableLocalAuth: false → true\n= topic same\n- topic gone\n\
             1 to create, 1 to change, 1 to delete, 1 as wanted"
        );
        assert_eq!(plan.json()[1]["changes"][0]["new"], "true");
        let nothing = ApplyPlan(vec![plan.0[2].clone()]);
        assert!(!nothing.is_work());
        assert_eq!(nothing.text(), "= topic same\nnothing to do: 1 as wanted");
    }
}
