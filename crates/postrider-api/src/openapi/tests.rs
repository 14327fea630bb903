//! The description against the server: each has exactly what the other has.

use super::*;
use crate::azure::subscriptions::tests::test_server::{ApiTestServer, TestAnswer};
use crate::listen::ListenSessions;
use crate::route::Route;
use crate::route::own::{self, OwnEndpoint};
use async_trait::async_trait;
use hyper::Method;
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_engine::deliver::{DeliveryReply, DeliveryRequest, DeliveryTransport};
use postrider_engine::recorder::EventState;
use postrider_engine::subscription_health::{HealthReasonKind, SubscriptionHealth};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];
/// Credentials that the lab's server accepts.
const OWNER: (&str, &str) = ("authorization", "Bearer owner secret");
const READER: (&str, &str) = ("authorization", "Bearer reader secret");
const HOST: (&str, &str) = ("host", "localhost");

fn document() -> Value {
    serde_json::from_str(TEXT).unwrap()
}

/// The path with a value for each parameter.
fn filled(path: &str) -> String {
    let parts = path
        .split('/')
        .map(|part| if part.starts_with('{') { "x" } else { part });
    parts.collect::<Vec<_>>().join("/")
}

fn ours() -> impl Iterator<Item = DescribedOperation> {
    operations()
        .into_iter()
        .filter(|one| one.path.starts_with("/postrider/"))
}

fn needs(operation: &DescribedOperation) -> String {
    text(operation.told, "x-needs").unwrap().into_owned()
}

/// Whether the router does not know the path, as opposed to a missing resource.
fn is_unknown_path(got: &TestAnswer, path: &str) -> bool {
    got.status == 404 && got.body["detail"] == format!("{path} does not exist")
}

#[test]
fn it_is_whole() {
    let document = document();
    let (mut names, mut used) = (BTreeSet::new(), BTreeSet::new());
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(members) => {
                if let Some(Value::String(to)) = members.get("$ref") {
                    found.insert(to.clone());
                }
                members.values().for_each(|one| references(one, found));
            }
            Value::Array(list) => list.iter().for_each(|one| references(one, found)),
            _ => {}
        }
    }
    references(&document, &mut used);
    for to in &used {
        let pointer = to.strip_prefix('#').expect("inside the document");
        assert!(document.pointer(pointer).is_some(), "{to} is not there");
    }
    for kind in ["schemas", "responses"] {
        for name in document["components"][kind].as_object().unwrap().keys() {
            let to = format!("#/components/{kind}/{name}");
            assert!(used.contains(&to), "{to} is used nowhere");
        }
    }
    let tags: Vec<_> = document["tags"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tag| &tag["name"])
        .collect();
    let schemes = document["components"]["securitySchemes"].as_object().unwrap();
    for DescribedOperation { method, path, told } in operations() {
        let told: Value = serde_json::from_str(told.text()).unwrap();
        let id = told["operationId"].as_str().expect("an operation has an id");
        assert!(names.insert(id.to_owned()), "{id} is there twice");
        assert!(tags.contains(&&told["tags"][0]), "{id} has a tag that is listed");
        assert!(!told["summary"].as_str().unwrap().ends_with('.'), "{id}");
        let security = told["security"].as_array().unwrap();
        let named = security.iter().flat_map(|one| one.as_object().unwrap().keys());
        for scheme in named {
            assert!(schemes.contains_key(scheme), "{id}: {scheme}");
        }
        let inside: Vec<_> = path
            .split('/')
            .filter_map(|part| part.strip_prefix('{'))
            .collect();
        let parameters = told["parameters"].as_array().cloned().unwrap_or_default();
        let of_path = parameters.iter().filter(|one| one["in"] == "path");
        let of_path: Vec<_> = of_path
            .map(|one| format!("{}}}", one["name"].as_str().unwrap()))
            .collect();
        assert_eq!(inside, of_path, "{id}");
        let body = &told["requestBody"]["content"]["application/json"];
        assert!(
            body.is_null() || !body["example"].is_null(),
            "{id} has an example of its body"
        );
        // On a command line the example is between single quotes.
        assert!(!body["example"].to_string().contains('\''), "{id}");
        assert!(method != "GET" || body.is_null(), "{id}");
    }
}

#[test]
fn names_are_those_of_the_code() {
    let document = document();
    let check = |schema: &str, expected: Vec<&str>| {
        assert_eq!(
            document["components"]["schemas"][schema]["enum"],
            json!(expected),
            "{schema}"
        );
    };
    check("Outcome", Outcome::ALL.map(Outcome::name).to_vec());
    check("Reason", GiveUpReason::ALL.map(GiveUpReason::name).to_vec());
    check(
        "SubscriptionHealth",
        SubscriptionHealth::ALL.map(SubscriptionHealth::name).to_vec(),
    );
    let code = &document["components"]["schemas"]["HealthReason"]["properties"]["code"]["enum"];
    assert_eq!(*code, json!(HealthReasonKind::ALL.map(HealthReasonKind::name)));
    let states = EventState::ALL;
    check("EventState", states.map(EventState::name).to_vec());
    let of_deliveries = states.iter().filter(|state| matches!(state, EventState::All(_)));
    check("DeliveryState", of_deliveries.map(|state| state.name()).collect());
}

#[test]
fn the_route_table_has_what_is_described() {
    let described: BTreeSet<(String, String)> = ours()
        .map(|one| {
            let parts = one.path.trim_start_matches("/postrider/").split('/');
            let parts = parts.map(|part| if part.starts_with('{') { "*" } else { part });
            (parts.collect::<Vec<_>>().join("/"), one.method)
        })
        .collect();
    let routed: BTreeSet<(String, String)> = own::rows()
        .flat_map(|(path, allow)| {
            let methods = allow.split(", ");
            methods.map(move |method| (path.join("/"), method.to_owned()))
        })
        .collect();
    assert_eq!(routed, described);
}

#[test]
fn paths_are_found_and_others_are_not() {
    let check = |path: &str, expected: Option<OwnEndpoint>| {
        let path = format!("/postrider/{path}");
        match Route::parse(&Method::GET, &path) {
            Route::Own(route) => assert_eq!(route.endpoint(), expected, "{path}"),
            other => panic!("{path}: {other:?}"),
        }
    };
    check("v1/events", Some(OwnEndpoint::Events));
    check("v1/events/x", Some(OwnEndpoint::Event));
    check("v1/events/stream", Some(OwnEndpoint::EventStream));
    check("v1/events/x/y", None);
    check("v1/event", None);
    check("v1", None);
    check("", None);
    check("v2/events", None);
    check("v1/deadletters/summary", Some(OwnEndpoint::DeadLetterSummary));
    check("v1/deadletters/replays/7/cancel", Some(OwnEndpoint::CancelReplay));
    check("v1/deadletters/replays/7/remove", None);
    check("v1/a/b/c/d/e/f", None);
}

/// Every path answers to the methods that are described and refuses all others, listing the ones it
/// knows.
#[tokio::test]
async fn methods() {
    let lab = ApiTestServer::new(false).await;
    let paths: BTreeSet<&str> = ours().map(|one| one.path).collect();
    for path in paths {
        let known: BTreeSet<String> = ours()
            .filter(|one| one.path == path)
            .map(|one| one.method)
            .collect();
        let asked = filled(path);
        // The server runs on no test clock, which is reported before any other error.
        let no_clock = path.starts_with("/postrider/v1/clock");
        for method in METHODS {
            let got = lab.send(method, &asked, None, &[]).await;
            assert!(!is_unknown_path(&got, &asked), "{method} {path}: {}", got.body);
            let refused = got.status == 405;
            assert!(
                no_clock || refused != known.contains(method),
                "{method} {path}: {}",
                got.body
            );
            if refused {
                let allow: BTreeSet<String> = got.header("allow").split(", ").map(str::to_owned).collect();
                assert_eq!(allow, known, "{method} {path}");
            }
        }
    }
    for path in [
        "/postrider",
        "/postrider/v1",
        "/postrider/v1/nothing",
        "/postrider/v1/events/x/y/z/a/b",
    ] {
        let got = lab.send("GET", path, None, &[]).await;
        assert!(is_unknown_path(&got, path), "{path}: {}", got.body);
        lab.exchange("GET", path, None, &[HOST]).await.expect(401);
    }
    // Operations outside `/postrider/`.
    for one in operations()
        .iter()
        .filter(|one| !one.path.starts_with("/postrider/"))
    {
        let got = lab.send(&one.method, one.path, None, &[]).await;
        assert!(
            ![404, 405].contains(&got.status),
            "{} {}: {}",
            one.method,
            one.path,
            got.body
        );
    }
}

/// The permissions in the description are those that the server enforces.
#[tokio::test]
async fn credentials() {
    let lab = ApiTestServer::new(false).await;
    for one in operations() {
        let path = filled(one.path);
        let ask = async |headers: &[(&str, &str)]| {
            let mut all = vec![HOST];
            all.extend(headers);
            lab.exchange(&one.method, &path, None, &all).await
        };
        let (nobody, reader, owner) = (ask(&[]).await, ask(&[READER]).await, ask(&[OWNER]).await);
        let check = |who: &str, got: &TestAnswer, statuses: &[u16], expected: bool| {
            let is = statuses.contains(&got.status);
            assert_eq!(
                is, expected,
                "{} {} of {who}: {} {}",
                one.method, one.path, got.status, got.body
            );
        };
        match &*needs(&one) {
            "nothing" if one.path == "/portal/session" => check("nobody", &nobody, &[415], true),
            "nothing" | "loopback" => check("nobody", &nobody, &[401, 403], false),
            "session" => check("nobody", &nobody, &[401], true),
            "read" => {
                check("nobody", &nobody, &[401], true);
                check("reader", &reader, &[401, 403], false);
            }
            "write" => {
                check("nobody", &nobody, &[401], true);
                check("reader", &reader, &[403], true);
                check("owner", &owner, &[401, 403], false);
            }
            other => panic!("{}: needs {other:?}", one.path),
        }
    }
}

/// The names after `words` (such as `known are `) in an error message.
fn listed<'a>(detail: &'a str, words: &str) -> Option<BTreeSet<&'a str>> {
    let (_, list) = detail.split_once(words)?;
    Some(
        list.split([',', ' '])
            .filter(|one| !one.is_empty() && *one != "and")
            .collect(),
    )
}

/// The query parameters that the server's errors list are those of the description.
#[tokio::test]
async fn parameters() {
    let lab = ApiTestServer::new(false).await;
    let mut checked = 0;
    for one in ours().filter(|one| one.method == "GET" && needs(one) == "read") {
        let path = filled(one.path);
        let told: Value = serde_json::from_str(one.told.text()).unwrap();
        let all = told["parameters"].as_array().cloned().unwrap_or_default();
        let all: Vec<_> = all.into_iter().filter(|one| one["in"] == "query").collect();
        let names: BTreeSet<&str> = all.iter().map(|one| one["name"].as_str().unwrap()).collect();
        let got = lab.send("GET", &format!("{path}?nonsense=1"), None, &[]).await;
        if got.status == 200 {
            // Paths without parameters ignore their query.
            assert!(names.is_empty(), "{path}");
            continue;
        }
        let detail = got.body["detail"].as_str().unwrap_or_default().to_owned();
        let known = listed(&detail, "known are ")
            .or_else(|| listed(&detail, "known is "))
            .unwrap_or_default();
        assert!(detail.contains("nonsense: is not known"), "{path}: {detail}");
        assert_eq!(known, names, "{path}: {detail}");
        for one in &all {
            let name = one["name"].as_str().unwrap();
            let schema = match one["schema"]["$ref"].as_str() {
                Some(to) => document().pointer(to.strip_prefix('#').unwrap()).unwrap().clone(),
                None => one["schema"].clone(),
            };
            let required = all
                .iter()
                .filter(|other| other["required"] == true && other["name"] != name);
            let required: String = required
                .map(|other| format!("&{}=x", other["name"].as_str().unwrap()))
                .collect();
            let ask = async |value: &str| {
                lab.send("GET", &format!("{path}?{name}={value}{required}"), None, &[])
                    .await
            };
            if let Some(choices) = schema["enum"].as_array() {
                let got = ask("nonsense").await.expect(400);
                let known = listed(got.body["detail"].as_str().unwrap(), "is not one of ");
                let choices: BTreeSet<&str> = choices.iter().map(|one| one.as_str().unwrap()).collect();
                assert_eq!(known, Some(choices), "{path}?{name}");
                checked += 1;
            }
            if let Some(most) = schema["maximum"].as_u64() {
                assert_ne!(ask(&most.to_string()).await.status, 400, "{path}?{name}={most}");
                let got = ask(&(most + 1).to_string()).await.expect(400);
                assert_eq!(got.body["field"], name, "{path}: {}", got.body);
                checked += 1;
            }
            if let Some(least) = schema["minimum"].as_u64().filter(|least| *least > 0) {
                assert_ne!(ask(&least.to_string()).await.status, 400, "{path}?{name}={least}");
                ask(&(least - 1).to_string()).await.expect(400);
            }
        }
    }
    assert!(checked >= 8, "{checked}");
}

/// A transport that sends nothing.
struct NullTransport;

#[async_trait]
impl DeliveryTransport for NullTransport {
    async fn send(self: Arc<Self>, _: DeliveryRequest) -> DeliveryReply {
        std::future::pending().await
    }
}

/// Members that are not described are refused by name.
#[tokio::test]
async fn members_of_bodies() {
    let listeners = Arc::new(ListenSessions::new(Arc::new(NullTransport)));
    let lab = ApiTestServer::with(false, |server| server.listeners = Some(listeners)).await;
    let document = document();
    for one in ours().filter(|one| one.method == "POST" && needs(one) != "loopback") {
        let told: Value = serde_json::from_str(one.told.text()).unwrap();
        let schema = &told["requestBody"]["content"]["application/json"]["schema"];
        let schema = match schema["$ref"].as_str() {
            Some(to) => document.pointer(to.strip_prefix('#').unwrap()).unwrap(),
            None => schema,
        };
        let Some(members) = schema["properties"].as_object() else {
            continue;
        };
        assert_eq!(schema["additionalProperties"], false, "{}", one.path);
        let mut body = told["requestBody"]["content"]["application/json"]["example"].clone();
        body["nonsense"] = json!(1);
        let got = lab.send("POST", &filled(one.path), Some(&body), &[]).await;
        let detail = got.body["detail"].as_str().unwrap_or_default();
        assert_eq!(got.status, 400, "{}: {detail}", one.path);
        assert!(detail.contains("nonsense"), "{}: {detail}", one.path);
        let detail = detail.replace('`', "");
        let known = ["known are ", "known is ", "expected one of ", "expected "];
        let known = known.iter().find_map(|words| listed(&detail, words));
        let mut known = known.unwrap_or_else(|| panic!("{}: {detail}", one.path));
        // serde appends where the error was.
        known.retain(|one| {
            one.chars().all(char::is_alphabetic) && !["at", "line", "column", "or"].contains(one)
        });
        let expected: BTreeSet<&str> = members.keys().map(String::as_str).collect();
        assert_eq!(known, expected, "{}: {detail}", one.path);
    }
}
