//! Topics, domains, system topics and their surroundings, as Azure's management clients see them.

use crate::client::HttpTestAnswer;
use crate::server::{JSON, ServerSetup, TestServer, event};
use serde_json::{Value, json};

const ACCOUNT: &str = "00000000-0000-0000-0000-000000000001";
const VERSION: &str = "api-version=2022-06-15";
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

fn config() -> String {
    format!(
        "[[client]]\nid = \"boss\"\nsecret = \"hush\"\n\
         [[client]]\nid = \"eye\"\nsecret = \"look\"\nrole = \"reader\"\n\
         [[storage_account]]\nname = \"devstoreaccount1\"\nkind = \"azure\"\nkey = \"{KEY}\"\n\
         blob_endpoint = \"http://127.0.0.1:1/devstoreaccount1\"\n\
         queue_endpoint = \"http://127.0.0.1:1/devstoreaccount1\"\n\
         [[storage_account]]\nname = \"pubstgrunnerb71cd29e\"\nkind = \"directory\"\npath = \"blobs\"\n"
    )
}

fn start() -> TestServer {
    ServerSetup::config(config()).start()
}

/// Path of a resource within a group.
fn within(group: &str, rest: &str) -> String {
    format!("/subscriptions/{ACCOUNT}/resourceGroups/{group}/providers/Microsoft.EventGrid/{rest}")
}

fn topic(name: &str) -> String {
    within("rg1", &format!("topics/{name}"))
}

fn call(
    server: &TestServer,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &Value,
) -> HttpTestAnswer {
    let mut all = vec![("authorization", "Bearer hush")];
    all.extend(headers);
    let body = match body {
        Value::Null => String::new(),
        body => {
            all.push(JSON);
            body.to_string()
        }
    };
    server.send(method, target, &all, body)
}

/// Sends a request as the owner, with an API version.
fn arm(server: &TestServer, method: &str, path: &str, body: &Value) -> HttpTestAnswer {
    let mark = if path.contains('?') { '&' } else { '?' };
    call(server, method, &format!("{path}{mark}{VERSION}"), &[], body)
}

#[track_caller]
fn get(server: &TestServer, path: &str) -> Value {
    arm(server, "GET", path, &Value::Null).expect(200).json()
}

/// Code, target and message of an error.
#[track_caller]
fn error(answer: HttpTestAnswer, status: u16) -> (String, String, String) {
    let body = answer.expect(status).json();
    let text = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
    assert!(!text("code").is_empty() && !text("message").is_empty(), "{body}");
    (text("code"), text("target"), text("message"))
}

/// Path and query of a URL of this server.
fn local(url: &str) -> &str {
    let at = url.match_indices('/').nth(2).expect("an absolute URL").0;
    &url[at..]
}

fn names(list: &Value) -> Vec<&str> {
    let value = list["value"].as_array().expect("a list");
    value
        .iter()
        .map(|one| one["name"].as_str().expect("a name"))
        .collect()
}

/// Members of a recorded answer must be in ours, with the same type; null matches anything.
fn check_shape(recorded: &Value, ours: &Value, at: &str) {
    match (recorded, ours) {
        (Value::Null, _) | (_, Value::Null) => {}
        (Value::Object(recorded), Value::Object(ours)) => {
            for (name, value) in recorded.iter().filter(|(_, value)| !value.is_null()) {
                let own = ours
                    .get(name)
                    .unwrap_or_else(|| panic!("{at}.{name} is missing in {ours:?}"));
                check_shape(value, own, &format!("{at}.{name}"));
            }
        }
        (Value::Array(recorded), Value::Array(ours)) => {
            if let (Some(recorded), Some(ours)) = (recorded.first(), ours.first()) {
                check_shape(recorded, ours, &format!("{at}[0]"));
            }
        }
        (Value::String(_), Value::String(_))
        | (Value::Bool(_), Value::Bool(_))
        | (Value::Number(_), Value::Number(_)) => {}
        _ => panic!("{at} was {recorded} in the recording, is {ours}"),
    }
}

// Requests recorded from az and the SDKs, in their order, get the statuses that the clients needed.
#[test]
fn recorded_requests_get_the_answers_that_the_clients_needed() {
    let server = start();
    let text = include_str!("../../../../tests/data/arm/resource-requests.json");
    let recorded: Vec<Value> = serde_json::from_str(text).unwrap();
    assert!(recorded.len() > 60);
    for one in &recorded {
        let field = |name: &str| one[name].as_str().unwrap_or_default();
        let (method, path) = (field("method"), field("path"));
        let answer = call(
            &server,
            method,
            &format!("{path}?{}", field("query")),
            &[],
            &one["body"],
        );
        let called = format!("{} {method} {path}: {}", field("call"), answer.text());
        let needed = one["status"].as_u64().unwrap();
        if method == "DELETE" {
            // The recorded server did not tell whether the resource had existed.
            assert!(matches!(answer.status, 202 | 204), "{called}");
            continue;
        }
        // The recorded server was a stand-in; the service itself changes system topics
        // synchronously.
        let at_once = path.contains("/systemTopics/") && matches!(method, "PUT" | "PATCH");
        let needed = if at_once && needed == 201 { 200 } else { needed };
        assert_eq!(u64::from(answer.status), needed, "{called}");
        let body = answer.json();
        if answer.status == 404 {
            assert_eq!(body["error"]["code"], one["answer"]["error"]["code"], "{called}");
            continue;
        }
        let mut shown = one["answer"].clone();
        if let Some(members) = shown.as_object_mut() {
            // Newer versions of the API do not have these members; the recorded server echoed
            // whatever it had.
            let listed = members.contains_key("value");
            let preview = field("query").contains("preview");
            if listed && !preview {
                members.remove("value");
            }
        }
        check_shape(&shown, &body, &called);
        for name in ["name", "type", "location"] {
            if one["answer"][name].is_string() {
                assert_eq!(body[name], one["answer"][name], "{called}");
            }
        }
        if at_once {
            assert_eq!(body["properties"]["provisioningState"], "Succeeded", "{called}");
            assert_eq!(answer.header("azure-asyncoperation"), None, "{called}");
        } else if method == "PUT" || method == "PATCH" {
            assert_eq!(answer.header("retry-after"), Some("0"), "{called}");
            let operation = local(answer.header("azure-asyncoperation").unwrap()).to_owned();
            let status = call(&server, "GET", &operation, &[], &Value::Null)
                .expect(200)
                .json();
            assert_eq!(status["status"], "Succeeded", "{called}");
            let id = status["id"].as_str().unwrap();
            assert_eq!(local(id), operation);
            assert!(
                operation
                    .to_lowercase()
                    .contains(status["name"].as_str().unwrap())
            );
        }
    }
}

// Requests among the specification's examples behave as specified.
#[test]
fn examples_of_the_specification() {
    let server = start();
    let text = include_str!("../../../../tests/data/arm/resource-examples-2022-06-15.json");
    let examples: Vec<Value> = serde_json::from_str(text).unwrap();
    assert!(examples.len() > 25);
    for one in &examples {
        let field = |name: &str| one[name].as_str().unwrap_or_default();
        // Some examples use another resource than the one that the first examples create.
        let path = field("path")
            .replace("{account}", ACCOUNT)
            .replace("exampletopic2", "exampletopic1")
            .replace("exampledomain2", "exampledomain1")
            .replace("exampleSystemTopic2", "exampleSystemTopic1")
            .replace("topics/topic1", "topics/exampledomaintopic1");
        let body = one["body"].to_string().replace("{account}", ACCOUNT);
        let body: Value = serde_json::from_str(&body).unwrap();
        let target = format!("{path}?{}", field("query"));
        let answer = call(&server, field("method"), &target, &[], &body);
        let statuses = one["statuses"].as_array().unwrap();
        let documented = statuses.contains(&json!(answer.status));
        assert!(
            documented,
            "{}: {} {}",
            field("operation"),
            answer.status,
            answer.text()
        );
    }
}

#[test]
fn a_topic_from_its_making_to_its_end() {
    let mut server = start();
    let path = topic("orders");
    let sent = json!({"location": "West US 2", "tags": {"team": "a"}, "identity": {"type": "SystemAssigned"},
        "properties": {"inputSchema": "EventGridSchema", "postrider": {"profile": "cloud-2020"}}});
    let made = arm(&server, "PUT", &path, &sent).expect(201);
    assert_eq!(made.json()["properties"]["provisioningState"], "Creating");
    let operation = local(made.header("azure-asyncoperation").unwrap()).to_owned();
    assert!(
        operation.contains("/locations/westus2/operationsStatus/"),
        "{operation}"
    );
    for header in ["x-ms-request-id", "x-ms-correlation-request-id", "etag"] {
        assert!(made.header(header).is_some(), "{header}");
    }
    assert_eq!(made.header("cache-control"), Some("no-cache"));

    let shown = get(&server, &path.to_uppercase());
    assert_eq!(shown["properties"]["provisioningState"], "Succeeded");
    assert_eq!(shown["id"], path);
    assert_eq!(shown["tags"], json!({"team": "a"}));
    assert_eq!(shown["properties"]["postrider"]["profile"], "cloud-2020");
    assert!(shown["identity"]["principalId"].is_string());

    // Both keys can publish; a new key replaces the old one at once.
    let endpoint = local(shown["properties"]["endpoint"].as_str().unwrap()).to_owned();
    let publish = |server: &TestServer, key: &Value| {
        let key = key.as_str().unwrap();
        let headers = [("aeg-sas-key", key), JSON];
        server
            .send("POST", &endpoint, &headers, json!([event("1")]).to_string())
            .status
    };
    let keys = arm(&server, "POST", &format!("{path}/listKeys"), &Value::Null)
        .expect(200)
        .json();
    assert_eq!(
        (publish(&server, &keys["key1"]), publish(&server, &keys["key2"])),
        (200, 200)
    );
    let again = arm(
        &server,
        "POST",
        &format!("{path}/regenerateKey"),
        &json!({"keyName": "key1"}),
    );
    let again = again.expect(200).json();
    assert_eq!(again["key2"], keys["key2"]);
    assert_ne!(again["key1"], keys["key1"]);
    assert_eq!(
        (publish(&server, &keys["key1"]), publish(&server, &again["key1"])),
        (401, 200)
    );

    // A PATCH keeps members that it does not name, a PUT does not; neither changes the keys.
    let patched = arm(&server, "PATCH", &path, &json!({"tags": {"b": "c"}}))
        .expect(201)
        .json();
    assert_eq!(patched["properties"]["provisioningState"], "Updating");
    assert_eq!(patched["properties"]["postrider"]["profile"], "cloud-2020");
    assert_eq!(patched["tags"], json!({"b": "c"}));
    let put = arm(&server, "PUT", &path, &json!({"location": "westus2"}))
        .expect(201)
        .json();
    assert_eq!((&put["tags"], &put["identity"]), (&Value::Null, &Value::Null));
    assert_eq!(
        put["properties"]["metricResourceId"],
        shown["properties"]["metricResourceId"]
    );
    assert_eq!(
        arm(&server, "POST", &format!("{path}/listKeys"), &Value::Null).json(),
        again
    );

    // All of this survives a kill, and so do the operation URLs that clients were given.
    server.kill();
    server.start();
    assert_eq!(
        arm(&server, "POST", &format!("{path}/listKeys"), &Value::Null).json(),
        again
    );
    let status = call(&server, "GET", &operation, &[], &Value::Null)
        .expect(200)
        .json();
    assert_eq!(status["status"], "Succeeded");

    let deleted = arm(&server, "DELETE", &path, &Value::Null).expect(202);
    assert!(deleted.body.is_empty());
    let result = local(deleted.header("location").unwrap()).to_owned();
    call(&server, "GET", &result, &[], &Value::Null).expect(204);
    arm(&server, "DELETE", &path, &Value::Null).expect(204);
    let (code, _, message) = error(arm(&server, "GET", &path, &Value::Null), 404);
    assert_eq!(code, "ResourceNotFound");
    assert!(message.contains("topics/orders"), "{message}");
    assert_eq!(publish(&server, &again["key1"]), 404);
}

#[test]
fn what_is_refused_and_why() {
    let server = start();
    let path = topic("orders");
    let here = json!({"location": "westus2"});
    arm(&server, "PUT", &path, &here).expect(201);
    let check = |answer: HttpTestAnswer, status: u16, code: &str, target: &str| {
        let (given, at, message) = error(answer, status);
        assert_eq!((given.as_str(), at.as_str()), (code, target), "{message}");
        message
    };
    // Refusals of credentials and API versions.
    let none = server.send("GET", &format!("{path}?{VERSION}"), &[], "");
    let challenge = none.header("www-authenticate").unwrap().to_owned();
    assert!(
        challenge.starts_with("Bearer authorization_uri=\"http"),
        "{challenge}"
    );
    check(none, 401, "AuthenticationFailed", "");
    let reader = |method: &str, path: &str| {
        server.send(
            method,
            &format!("{path}?{VERSION}"),
            &[("authorization", "Bearer look")],
            "",
        )
    };
    reader("GET", &path).expect(200);
    check(
        reader("POST", &format!("{path}/listKeys")),
        403,
        "AuthorizationFailed",
        "",
    );
    check(reader("DELETE", &path), 403, "AuthorizationFailed", "");
    let plain = |target: &str| call(&server, "GET", target, &[], &Value::Null);
    check(plain(&path), 400, "MissingApiVersionParameter", "api-version");
    check(
        plain(&format!("{path}?api-version=2022")),
        400,
        "InvalidApiVersionParameter",
        "api-version",
    );
    plain(&format!("{path}?api-version=2031-01-01-preview")).expect(200);
    check(
        arm(
            &server,
            "GET",
            "/subscriptions/11111111-0000-0000-0000-000000000000",
            &Value::Null,
        ),
        404,
        "SubscriptionNotFound",
        "",
    );
    check(
        arm(&server, "POST", &path, &Value::Null),
        405,
        "MethodNotAllowed",
        "",
    );
    let nothing = within("rg1", "gadgets/g");
    check(
        arm(&server, "GET", &nothing, &Value::Null),
        404,
        "InvalidResourceType",
        "",
    );
    let other = "/subscriptions/00000000-0000-0000-0000-000000000001/providers/Microsoft.Nothing/things";
    check(
        arm(&server, "GET", other, &Value::Null),
        404,
        "InvalidResourceNamespace",
        "",
    );

    // Refusals of bodies.
    let put = |name: &str, body: Value| arm(&server, "PUT", &topic(name), &body);
    check(put("abc", Value::Null), 400, "InvalidRequestContent", "");
    let broken = [("authorization", "Bearer hush"), JSON];
    let broken = server.send("PUT", &format!("{path}?{VERSION}"), &broken, "{\"a\":");
    check(broken, 400, "InvalidRequestContent", "");
    let said = check(put("ab", here.clone()), 400, "InvalidRequest", "name");
    assert_eq!(said, "Topic name must be between 3 and 50 characters in length.");
    check(put("System-x", here.clone()), 400, "InvalidRequest", "name");
    check(
        put(
            "abc",
            json!({"location": "x", "properties": {"inputSchema": "Xml"}}),
        ),
        400,
        "InvalidRequest",
        "properties.inputSchema",
    );
    check(
        put(
            "abc",
            json!({"location": "x", "properties": {"inboundIpRules": [{"ipMask": "no"}]}}),
        ),
        400,
        "InvalidRequest",
        "properties.inboundIpRules[0].ipMask",
    );
    assert_eq!(
        arm(&server, "GET", &topic("abc"), &Value::Null).status,
        404,
        "nothing was made"
    );

    // Conflicts with existing resources.
    let said = check(
        put("orders", json!({"location": "eastus"})),
        409,
        "InvalidResourceLocation",
        "location",
    );
    assert!(said.contains("already exists in location 'westus2'"), "{said}");
    let elsewhere = within("rg2", "topics/Orders");
    let said = check(arm(&server, "PUT", &elsewhere, &here), 409, "Conflict", "name");
    assert_eq!(
        said,
        "Topic with the specified name already exists. Choose a different topic name."
    );
    check(
        arm(&server, "GET", &elsewhere, &Value::Null),
        404,
        "ResourceNotFound",
        "",
    );
    arm(&server, "DELETE", &elsewhere, &Value::Null).expect(204);
    get(&server, &path);
    let patch = |body: Value| arm(&server, "PATCH", &path, &body);
    check(
        patch(json!({"properties": {"inputSchema": "CloudEventSchemaV1_0"}})),
        400,
        "InvalidRequest",
        "properties.inputSchema",
    );
    check(
        patch(json!({"location": "eastus"})),
        400,
        "InvalidRequest",
        "location",
    );
    let absent = arm(&server, "PATCH", &topic("absent"), &json!({"tags": {}}));
    check(absent, 404, "ResourceNotFound", "");
    let regenerate = |body: Value| arm(&server, "POST", &format!("{path}/regenerateKey"), &body);
    check(
        regenerate(json!({"keyName": "key3"})),
        400,
        "InvalidRequest",
        "keyName",
    );
    check(regenerate(json!({})), 400, "InvalidRequest", "keyName");
}

#[test]
fn lists_come_in_pages() {
    let server = start();
    // Created in an order other than that of the names.
    for number in (0..45).rev() {
        let group = if number % 3 == 0 { "Other" } else { "rg1" };
        let path = within(group, &format!("topics/topic-{number:02}"));
        arm(&server, "PUT", &path, &json!({"location": "westus2"})).expect(201);
    }
    let pages = |first: String| {
        let mut found = Vec::new();
        let mut sizes = Vec::new();
        let mut next = Some(first);
        while let Some(target) = next {
            let page = call(&server, "GET", &target, &[], &Value::Null)
                .expect(200)
                .json();
            found.extend(names(&page).iter().map(|name| (*name).to_owned()));
            sizes.push(names(&page).len());
            next = page["nextLink"].as_str().map(|link| local(link).to_owned());
        }
        (found, sizes)
    };
    let all = format!("/subscriptions/{ACCOUNT}/providers/Microsoft.EventGrid/topics?{VERSION}");
    let (found, sizes) = pages(all.clone());
    assert_eq!(sizes, [20, 20, 5], "twenty unless something else is asked for");
    let created: Vec<String> = (0..45).rev().map(|number| format!("topic-{number:02}")).collect();
    assert_eq!(found, created, "in order of creation");
    assert_eq!(pages(format!("{all}&$top=100")).1, [45]);
    let (other, sizes) = pages(format!("{}?{VERSION}&$top=8", within("OTHER", "topics")));
    assert_eq!((other.len(), sizes), (15, vec![8, 7]));
    let filter = "contains(NAME,'TOPIC-1') and not (name eq 'topic-11' or name eq 'topic-12')";
    let filter = filter.replace(' ', "%20").replace('\'', "%27");
    let (found, sizes) = pages(format!("{all}&%24filter={filter}&%24top=3"));
    assert_eq!(sizes, [3, 3, 2], "the filter holds on every page: {found:?}");
    assert!(
        found
            .iter()
            .all(|name| name.starts_with("topic-1") && name != "topic-11")
    );

    // Deleting or creating resources between two pages neither hides nor repeats others.
    let first = call(&server, "GET", &format!("{all}&$top=10"), &[], &Value::Null).json();
    assert_eq!(names(&first).last(), Some(&"topic-35"));
    arm(&server, "DELETE", &topic("topic-35"), &Value::Null).expect(202);
    arm(
        &server,
        "PUT",
        &topic("topic-40a"),
        &json!({"location": "westus2"}),
    )
    .expect(201);
    let next = local(first["nextLink"].as_str().unwrap()).to_owned();
    let next = call(&server, "GET", &next, &[], &Value::Null).json();
    assert_eq!(names(&next).first(), Some(&"topic-34"));
    assert_eq!(pages(all.clone()).0.last().map(String::as_str), Some("topic-40a"));

    let refused = |query: &str| {
        error(
            call(&server, "GET", &format!("{all}&{query}"), &[], &Value::Null),
            400,
        )
        .1
    };
    assert_eq!(refused("$top=0"), "$top");
    assert_eq!(refused("$top=101"), "$top");
    assert_eq!(refused("$filter=location%20eq%20'westus2'"), "$filter");
    assert_eq!(refused("$skiptoken=***"), "$skiptoken");
    let name_of_an_earlier_version = "dG9waWMtMzU"; // topic-35
    assert_eq!(
        refused(&format!("$skiptoken={name_of_an_earlier_version}")),
        "$skiptoken"
    );
}

#[test]
fn changes_that_depend_on_what_is_there() {
    let server = start();
    let path = format!("{}?{VERSION}", topic("orders"));
    let put = |headers: &[(&str, &str)]| call(&server, "PUT", &path, headers, &json!({"tags": {"a": "b"}}));
    assert_eq!(error(put(&[("if-match", "*")]), 412).0, "PreconditionFailed");
    let first = put(&[("if-none-match", "*")]).expect(201);
    let etag = first.header("etag").unwrap().to_owned();
    assert_eq!(error(put(&[("if-none-match", "*")]), 412).1, "If-None-Match");
    let shown = call(&server, "GET", &path, &[], &Value::Null).expect(200);
    assert_eq!(shown.header("etag"), Some(&*etag));
    let patch = |etag: &str| {
        let body = json!({"tags": {"c": "d"}});
        call(&server, "PATCH", &path, &[("if-match", etag)], &body)
    };
    let second = patch(&etag).expect(201).header("etag").unwrap().to_owned();
    assert_ne!(second, etag);
    assert_eq!(error(patch(&etag), 412).1, "If-Match");
    let delete = |etag: &str| call(&server, "DELETE", &path, &[("if-match", etag)], &Value::Null);
    assert_eq!(error(delete(&etag), 412).0, "PreconditionFailed");
    delete(&second).expect(202);

    // Exactly one of many concurrent creates is the first.
    let made: Vec<u16> = std::thread::scope(|threads| {
        let start = || threads.spawn(|| put(&[("if-none-match", "*")]).status);
        let started: Vec<_> = (0..16).map(|_| start()).collect();
        started.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let count = |status: u16| made.iter().filter(|one| **one == status).count();
    assert_eq!((count(201), count(412)), (1, 15));
}

#[test]
fn domains_and_their_topics() {
    let server = start();
    let domain = within("rg1", "domains/sales");
    let body = json!({"location": "westus2", "properties": {"autoCreateTopicWithFirstSubscription": false}});
    let made = arm(&server, "PUT", &domain, &body).expect(201).json();
    let properties = &made["properties"];
    assert_eq!(properties["autoCreateTopicWithFirstSubscription"], false);
    assert_eq!(properties["autoDeleteTopicWithLastSubscription"], true);
    let endpoint = properties["endpoint"].as_str().unwrap();
    assert!(endpoint.ends_with("/domains/sales/api/events"), "{endpoint}");
    let elsewhere = arm(&server, "PUT", &within("rg2", "domains/sales"), &body);
    let said = "Domain with the specified already exists. Choose a different domain name.";
    assert_eq!(error(elsewhere, 409).2, said);

    let topic = |name: &str| format!("{domain}/topics/{name}");
    assert_eq!(
        error(arm(&server, "GET", &topic("East"), &Value::Null), 404).0,
        "ResourceNotFound"
    );
    for name in ["East", "west", "north"] {
        let made = arm(&server, "PUT", &topic(name), &Value::Null).expect(201);
        assert!(made.header("azure-asyncoperation").is_some());
        assert_eq!(made.json()["properties"]["provisioningState"], "Creating");
    }
    let shown = get(&server, &topic("EAST"));
    assert_eq!(shown["id"], topic("East"));
    assert_eq!(shown["type"], "Microsoft.EventGrid/domains/topics");
    assert_eq!(shown["properties"]["provisioningState"], "Succeeded");
    let list = get(&server, &format!("{domain}/topics?$top=2"));
    assert_eq!(names(&list), ["East", "west"]);
    let rest = local(list["nextLink"].as_str().unwrap()).to_owned();
    assert_eq!(
        names(&call(&server, "GET", &rest, &[], &Value::Null).json()),
        ["north"]
    );
    arm(&server, "DELETE", &topic("west"), &Value::Null).expect(202);
    arm(&server, "DELETE", &topic("west"), &Value::Null).expect(204);
    assert_eq!(
        names(&get(&server, &format!("{domain}/topics"))),
        ["East", "north"]
    );

    let patch = json!({"properties": {"autoDeleteTopicWithLastSubscription": false}});
    let patched = arm(&server, "PATCH", &domain, &patch).expect(201).json();
    assert_eq!(
        patched["properties"]["autoCreateTopicWithFirstSubscription"],
        false
    );
    assert_eq!(
        patched["properties"]["autoDeleteTopicWithLastSubscription"],
        false
    );
    arm(&server, "DELETE", &domain, &Value::Null).expect(202);
    assert_eq!(
        error(arm(&server, "PUT", &topic("East"), &Value::Null), 404).0,
        "ResourceNotFound"
    );
    arm(&server, "DELETE", &topic("East"), &Value::Null).expect(204);
}

#[test]
fn system_topics_have_sources() {
    let server = start();
    let storage = |name: &str| {
        format!(
            "/subscriptions/{ACCOUNT}/resourceGroups/rg1/providers/Microsoft.Storage/storageAccounts/{name}"
        )
    };
    let put = |name: &str, source: &str, kind: &str| {
        let body = json!({"location": "westus2", "properties": {"source": source, "topicType": kind}});
        arm(
            &server,
            "PUT",
            &within("rg1", &format!("systemTopics/{name}")),
            &body,
        )
    };
    let stores = "Microsoft.Storage.StorageAccounts";
    let made = put("blobs", &storage("devstoreaccount1"), stores).expect(200);
    assert_eq!(made.header("azure-asyncoperation"), None);
    assert!(made.header("etag").is_some());
    let made = made.json();
    assert_eq!(made["properties"]["source"], storage("devstoreaccount1"));
    assert_eq!(made["properties"]["provisioningState"], "Succeeded");
    assert_eq!(made.get("identity"), None);
    put("blobs", &storage("DEVSTOREACCOUNT1"), stores).expect(200);
    let refused = |answer: HttpTestAnswer| {
        let (code, target, message) = error(answer, 400);
        assert_eq!(code, "InvalidRequest");
        (target, message)
    };
    let (target, said) = refused(put("more", &storage("devstoreaccount1"), stores));
    assert_eq!(target, "properties.source");
    assert!(
        said.starts_with("Only one system topic is allowed per source"),
        "{said}"
    );
    let (target, said) = refused(put("more", &storage("nobody"), stores));
    assert_eq!(target, "properties.source");
    assert!(
        said.contains("devstoreaccount1"),
        "it says which there are: {said}"
    );
    assert_eq!(refused(put("more", "nonsense", "A.B")).0, "properties.source");
    assert_eq!(
        refused(put("more", &storage("local"), "Microsoft.Devices.IoTHubs")).0,
        "properties.topicType"
    );
    assert_eq!(
        refused(put("blobs", &storage("local"), stores)).0,
        "properties.source",
        "it is fixed"
    );
    let group = format!("/subscriptions/{ACCOUNT}/resourceGroups/rg1");
    put("more", &group, "Microsoft.Resources.ResourceGroups").expect(200);
    // System topics are identified by group and name.
    let body =
        json!({"location": "westus2", "properties": {"source": storage("local"), "topicType": stores}});
    arm(&server, "PUT", &within("rg2", "systemTopics/blobs"), &body).expect(200);
    let all = get(
        &server,
        &format!("/subscriptions/{ACCOUNT}/providers/Microsoft.EventGrid/systemTopics"),
    );
    assert_eq!(names(&all), ["blobs", "more", "blobs"], "in order of creation");
    assert_eq!(names(&get(&server, &within("rg2", "systemTopics"))), ["blobs"]);
    let patch = arm(
        &server,
        "PATCH",
        &within("rg1", "systemTopics/blobs"),
        &json!({"tags": {"a": "b"}}),
    );
    let patched = patch.expect(200);
    assert_eq!(patched.header("azure-asyncoperation"), None);
    let patched = patched.json();
    assert_eq!(patched["tags"], json!({"a": "b"}));
    assert_eq!(patched["properties"]["provisioningState"], "Succeeded");
    let nothing = arm(&server, "PATCH", &within("rg1", "systemTopics/blobs"), &json!({}));
    assert_eq!(error(nothing, 400).0, "InvalidRequest");
    arm(
        &server,
        "DELETE",
        &within("rg1", "systemTopics/blobs"),
        &Value::Null,
    )
    .expect(202);
    put("more-blobs", &storage("devstoreaccount1"), stores).expect(200);
}

#[test]
fn network_rules_decide_who_publishes() {
    let server = start();
    let path = topic("orders");
    arm(&server, "PUT", &path, &json!({"location": "westus2"})).expect(201);
    let keys = arm(&server, "POST", &format!("{path}/listKeys"), &Value::Null).json();
    let publish = || {
        let headers = [("aeg-sas-key", keys["key1"].as_str().unwrap()), JSON];
        server.send(
            "POST",
            "/topics/orders/api/events",
            &headers,
            json!([event("1")]).to_string(),
        )
    };
    let rules = |properties: Value| {
        arm(&server, "PATCH", &path, &json!({"properties": properties})).expect(201);
    };
    publish().expect(200);
    rules(json!({"inboundIpRules": [{"ipMask": "10.0.0.0/8", "action": "Allow"}]}));
    let refused = publish().expect(403).json();
    assert_eq!(refused["error"]["code"], "Forbidden");
    rules(json!({"inboundIpRules": [{"ipMask": "10.0.0.0/8"}, {"ipMask": "127.0.0.0/8"}]}));
    publish().expect(200);
    rules(json!({"publicNetworkAccess": "Disabled"}));
    publish().expect(403);
    rules(json!({"publicNetworkAccess": "Enabled", "inboundIpRules": []}));
    publish().expect(200);
}

#[test]
fn both_views_show_the_same_topics() {
    let server = start();
    server.put_topic("from-edge");
    arm(
        &server,
        "PUT",
        &topic("From-Azure"),
        &json!({"location": "westus2"}),
    )
    .expect(201);
    assert_eq!(
        names(&get(&server, &within("rg1", "topics"))),
        ["from-edge", "From-Azure"]
    );
    let edge = server.edge("GET", "/topics", &Value::Null).expect(200).json();
    let edge: Vec<_> = edge.as_array().unwrap().iter().map(|one| &one["name"]).collect();
    // The edge API shows only topics with `edge`.
    assert_eq!(edge, ["from-edge"]);
    arm(&server, "DELETE", &topic("FROM-EDGE"), &Value::Null).expect(202);
    server.edge("GET", "/topics/from-edge", &Value::Null).expect(404);
}

#[test]
fn groups_are_there_when_they_are_used() {
    let mut server = start();
    let group = |name: &str| format!("/subscriptions/{ACCOUNT}/resourcegroups/{name}");
    let all = format!("/subscriptions/{ACCOUNT}/resourcegroups");
    let exists = |server: &TestServer, name: &str| arm(server, "HEAD", &group(name), &Value::Null).status;
    assert_eq!(names(&get(&server, &all)), ["rg1"]);
    assert_eq!((exists(&server, "RG1"), exists(&server, "mine")), (204, 404));
    let missing = arm(&server, "GET", &group("mine"), &Value::Null);
    assert_eq!(error(missing, 404).0, "ResourceGroupNotFound");

    let body = json!({"location": "West Europe", "tags": {"a": "b"}});
    let made = arm(&server, "PUT", &group("Mine"), &body).expect(201).json();
    assert_eq!(
        (&made["location"], &made["tags"]),
        (&json!("westeurope"), &json!({"a": "b"}))
    );
    arm(&server, "PUT", &group("mine"), &body).expect(200);
    let moved = arm(&server, "PUT", &group("mine"), &json!({"location": "eastus"}));
    assert_eq!(error(moved, 409).0, "InvalidResourceGroupLocation");
    // A topic without a location gets that of its group, which is created with it.
    let orders = within("Mine", "topics/orders");
    let made = arm(&server, "PUT", &orders, &json!({"properties": {}}))
        .expect(201)
        .json();
    assert_eq!(made["location"], "westeurope");
    arm(
        &server,
        "PUT",
        &within("yours", "domains/sales"),
        &json!({"location": "westus2"}),
    )
    .expect(201);
    server.kill();
    server.start();
    assert_eq!(names(&get(&server, &all)), ["rg1", "Mine", "yours"]);
    assert_eq!(get(&server, &group("MINE"))["tags"], json!({"a": "b"}));

    let resources = |server: &TestServer, path: &str| {
        let list = get(server, path);
        let found: Vec<String> = names(&list).iter().map(|name| (*name).to_owned()).collect();
        found
    };
    let every = format!("/subscriptions/{ACCOUNT}/resources");
    let stores = ["devstoreaccount1", "pubstgrunnerb71cd29e", "local"];
    assert_eq!(
        resources(&server, &every),
        [&stores[..], &["orders", "sales"]].concat()
    );
    assert_eq!(
        resources(&server, &format!("{}/resources", group("mine"))),
        ["orders"]
    );
    let filter = "$filter=resourceType%20eq%20'Microsoft.EventGrid/domains'";
    assert_eq!(resources(&server, &format!("{every}?{filter}")), ["sales"]);
    let filter = "$filter=resourceGroup%20eq%20'MINE'";
    assert_eq!(resources(&server, &format!("{every}?{filter}")), ["orders"]);
    let wrong = arm(&server, "GET", &format!("{every}?$filter=nonsense"), &Value::Null);
    assert_eq!(error(wrong, 400).1, "$filter");

    let deleted = arm(&server, "DELETE", &group("mine"), &Value::Null).expect(202);
    let result = local(deleted.header("location").unwrap()).to_owned();
    call(&server, "GET", &result, &[], &Value::Null).expect(204);
    assert_eq!(exists(&server, "mine"), 404);
    arm(&server, "GET", &orders, &Value::Null).expect(404);
    arm(&server, "DELETE", &group("mine"), &Value::Null).expect(404);
    assert_eq!(names(&get(&server, &all)), ["rg1", "yours"]);
}

/// Asks whether a storage account name is available, as az does before it creates one.
fn availability(server: &TestServer, name: &Value) -> HttpTestAnswer {
    let path = format!("/subscriptions/{ACCOUNT}/providers/Microsoft.Storage/checkNameAvailability");
    let body = json!({"name": name, "type": "Microsoft.Storage/storageAccounts"});
    arm(server, "POST", &path, &body)
}

#[test]
fn storage_accounts_are_configured_not_made() {
    let server = start();
    let ask = |name: &str| availability(&server, &json!(name)).expect(200).json();
    assert_eq!(ask("clieventgrid1"), json!({"nameAvailable": true}));
    let there = json!({
        "nameAvailable": false,
        "reason": "AlreadyExists",
        "message": "The storage account named devstoreaccount1 is already taken.",
    });
    assert_eq!(ask("devstoreaccount1"), there);
    assert_eq!(ask("No_Such")["reason"], "AccountNameInvalid");
    assert_eq!(error(availability(&server, &json!(7)), 400).1, "name");

    let path = |group: &str, name: &str| {
        format!(
            "/subscriptions/{ACCOUNT}/resourceGroups/{group}/providers/Microsoft.Storage/storageAccounts/{name}"
        )
    };
    let body = json!({"location": "westus2", "kind": "StorageV2", "sku": {"name": "Standard_LRS"}});
    let put = |group: &str, name: &str| arm(&server, "PUT", &path(group, name), &body);
    let known = put("rg1", "devstoreaccount1").expect(200).json();
    assert_eq!(known, get(&server, &path("rg1", "devstoreaccount1")));
    let (code, _, said) = error(put("elsewhere", "devstoreaccount1"), 409);
    assert_eq!(code, "StorageAccountAlreadyTaken");
    assert!(said.contains("'rg1'"), "{said}");
    let (code, target, said) = error(put("rg1", "CliStorage1"), 400);
    assert_eq!(
        (code.as_str(), target.as_str()),
        ("NotSupported", "storage_account")
    );
    assert!(
        said.contains("[[storage_account]]") && said.contains("CliStorage1"),
        "{said}"
    );
}

// Names in messages keep the casing of the service's types, and of the request.
#[test]
fn messages_keep_the_casing_of_names() {
    let server = start();
    arm(&server, "PUT", &topic("orders"), &json!({"location": "westus2"})).expect(201);
    let check = |method: &str, path: String, status: u16, expected: &str| {
        let (_, _, said) = error(arm(&server, method, &path, &json!({})), status);
        assert!(said.contains(expected), "{path}: {said}");
    };
    check(
        "GET",
        within("rg1", "partnertopics/Mine"),
        404,
        "'Microsoft.EventGrid/partnerTopics/Mine'",
    );
    check(
        "PUT",
        within("rg1", "PARTNERNAMESPACES/Mine"),
        400,
        "Microsoft.EventGrid/partnerNamespaces are not supported",
    );
    for behind in ["privateEndpointConnections", "privateLinkResources"] {
        check(
            "GET",
            format!("{}/{behind}/Mine", topic("orders")),
            404,
            &format!("'Microsoft.EventGrid/topics/orders/{behind}/Mine'"),
        );
    }
    let account = format!("/subscriptions/{ACCOUNT}");
    check(
        "GET",
        format!("{account}/resourceGroups/rg1/providers/Microsoft.Compute/virtualMachines/Vm1"),
        404,
        "'Microsoft.Compute'",
    );
    check(
        "GET",
        format!("{account}/providers/Microsoft.Compute"),
        404,
        "'Microsoft.Compute'",
    );
    check(
        "GET",
        "/providers/Microsoft.EventGrid/topicTypes/No.Such".into(),
        404,
        "'No.Such'",
    );
    check(
        "GET",
        format!(
            "{account}/resourceGroups/rg1/providers/No.Such/Things/a/providers/Microsoft.EventGrid/eventTypes"
        ),
        404,
        "'No.Such.Things'",
    );
    check(
        "GET",
        format!("{account}/resourceGroups/rg1/providers/Microsoft.Storage/storageAccounts/NoBody"),
        404,
        "'Microsoft.Storage/storageAccounts/NoBody'",
    );
}

#[test]
fn private_links_that_could_be_made() {
    let server = start();
    let body = json!({"location": "westus2"});
    arm(&server, "PUT", &topic("orders"), &body).expect(201);
    arm(&server, "PUT", &within("rg1", "domains/sales"), &body).expect(201);
    for (kind, name, group, display_name) in [
        ("topics", "orders", "topic", "Event Grid topic"),
        ("domains", "sales", "domain", "Event Grid domain"),
    ] {
        let of = within("rg1", &format!("{kind}/{name}"));
        let expected = json!({
            "properties": {
                "groupId": group,
                "displayName": display_name,
                "requiredMembers": [group],
                "requiredZoneNames": ["privatelink.eventgrid.azure.net"],
            },
            "id": format!("{of}/privateLinkResources/{group}"),
            "name": group,
            "type": format!("Microsoft.EventGrid/{kind}/privateLinkResources"),
        });
        let list = get(&server, &format!("{of}/privateLinkResources"));
        assert_eq!(list, json!({"value": [expected]}));
        assert_eq!(
            get(&server, &format!("{of}/privateLinkResources/{group}")),
            expected
        );
    }
}

#[test]
fn what_clients_ask_for_besides() {
    let server = start();
    let account = format!("/subscriptions/{ACCOUNT}");
    let accounts = get(&server, "/subscriptions");
    assert_eq!(accounts["value"][0]["subscriptionId"], ACCOUNT);
    assert_eq!(get(&server, &account)["state"], "Enabled");
    assert_eq!(
        get(&server, "/tenants")["value"][0]["tenantId"],
        "00000000-0000-0000-0000-000000000002"
    );
    assert!(names(&get(&server, &format!("{account}/locations"))).contains(&"westus2"));
    let provider = get(&server, &format!("{account}/providers/microsoft.eventgrid"));
    assert_eq!(provider["registrationState"], "Registered");
    let register = format!("{account}/providers/Microsoft.EventGrid/register");
    arm(&server, "POST", &register, &Value::Null).expect(200);
    assert_eq!(
        get(&server, &format!("{account}/providers"))["value"]
            .as_array()
            .unwrap()
            .len(),
        3
    );

    let storage = format!("{account}/resourceGroups/rg1/providers/Microsoft.Storage/storageAccounts");
    let list = get(
        &server,
        &format!("{account}/providers/Microsoft.Storage/storageAccounts"),
    );
    assert_eq!(
        names(&list),
        ["devstoreaccount1", "pubstgrunnerb71cd29e", "local"]
    );
    let one = get(&server, &format!("{storage}/DevStoreAccount1"));
    assert_eq!(one["id"], format!("{storage}/devstoreaccount1"));
    assert_eq!(
        one["properties"]["primaryEndpoints"]["blob"],
        "http://127.0.0.1:1/devstoreaccount1/"
    );
    let keys = arm(
        &server,
        "POST",
        &format!("{storage}/devstoreaccount1/listKeys"),
        &Value::Null,
    );
    assert_eq!(keys.expect(200).json()["keys"][0]["value"], KEY);
    arm(
        &server,
        "POST",
        &format!("{storage}/local/listKeys"),
        &Value::Null,
    )
    .expect(409);
    assert_eq!(
        error(
            arm(&server, "GET", &format!("{storage}/nobody"), &Value::Null),
            404
        )
        .0,
        "ResourceNotFound"
    );
    let container = format!("{storage}/local/blobServices/default/containers/letters");
    assert_eq!(get(&server, &container)["name"], "letters");

    let types = get(&server, "/providers/Microsoft.EventGrid/topicTypes");
    for name in [
        "Microsoft.EventGrid.Topics",
        "Microsoft.EventGrid.Domains",
        "Microsoft.Storage.StorageAccounts",
    ] {
        assert!(names(&types).contains(&name), "{name}");
    }
    let locations = &types["value"][0]["properties"]["supportedLocations"];
    assert_eq!(locations[0], "West US 2", "as people read them");
    let whole = "/providers/Microsoft.EventGrid/topicTypes/Microsoft.Resources.Subscriptions";
    assert_eq!(get(&server, whole)["properties"].get("supportedLocations"), None);
    let events = "/providers/Microsoft.EventGrid/topicTypes/microsoft.storage.storageaccounts/eventTypes";
    assert!(names(&get(&server, events)).contains(&"Microsoft.Storage.BlobCreated"));
    let unknown = arm(
        &server,
        "GET",
        "/providers/Microsoft.EventGrid/topicTypes/No.Such",
        &Value::Null,
    );
    assert_eq!(error(unknown, 404).0, "ResourceNotFound");
    assert!(names(&get(&server, "/providers/Microsoft.EventGrid/operations")).len() > 10);

    let named = json!({"location": "westus2", "properties": {"eventTypeInfo": {"kind": "Inline",
        "inlineEventTypes": {"Order.Placed": {"displayName": "Placed", "description": "An order was placed."}}}}});
    arm(&server, "PUT", &topic("orders"), &named).expect(201);
    let own = get(
        &server,
        &format!("{}/providers/Microsoft.EventGrid/eventTypes", topic("orders")),
    );
    assert_eq!(own["value"][0]["name"], "Order.Placed");
    assert_eq!(own["value"][0]["properties"]["displayName"], "Placed");
    for empty in [
        "partnerTopics",
        "namespaces",
        "topics/orders/privateEndpointConnections",
    ] {
        assert_eq!(
            get(&server, &within("rg1", empty)),
            json!({"value": []}),
            "{empty}"
        );
    }
    assert_eq!(
        error(
            arm(&server, "GET", &within("rg1", "namespaces/n"), &Value::Null),
            404
        )
        .0,
        "ResourceNotFound"
    );
}
