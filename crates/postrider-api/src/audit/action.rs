//! Classification of requests for the audit log: which are recorded, and under which name.

use crate::http::decoded;
use crate::route::{EdgeRoute, ManagementPath, Route, is_read};
use hyper::Method;
use serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionKind {
    /// Changes something, or shows a secret: always recorded.
    Change,
    /// A login or logout: always recorded, but allowed even if it cannot be recorded.
    Login,
    /// Read access: recorded only when refused for lack of permission.
    Read,
}

/// Action of a request, as the audit log names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditedAction {
    pub name: String,
    pub resource: String,
    pub kind: ActionKind,
    /// Whether the answer is recorded too: it says what was done, and holds no secret.
    pub shows_answer: bool,
}

/// POST actions of the management API, by the names that they are recorded under.
const VERBS: [&str; 8] = [
    "listKeys",
    "regenerateKey",
    "getFullUrl",
    "getDeliveryAttributes",
    "regenerateKey1",
    "register",
    "unregister",
    CHECK_NAME,
];

/// The only POST to the management API that neither changes anything nor shows a secret.
const CHECK_NAME: &str = "checkNameAvailability";

/// The action of a request; none if requests like it are never recorded, such as publishing. An
/// unknown path of our own API counts as a change.
pub(crate) fn of(method: &Method, path: &str, route: &Route<'_>) -> Option<AuditedAction> {
    let action = |name: String, kind: ActionKind| {
        Some(AuditedAction {
            shows_answer: name.starts_with("deadletters."),
            name,
            resource: decoded(path).into_owned(),
            kind,
        })
    };
    let reads = is_read(method);
    let kind = match reads {
        true => ActionKind::Read,
        false => ActionKind::Change,
    };
    match route {
        Route::Publish(_)
        | Route::Edge(EdgeRoute::Publish(_))
        | Route::Health(_)
        | Route::Metrics
        | Route::Docs
        | Route::Root
        | Route::Unknown => None,
        // With the token in its query a visit puts the subscription in force.
        Route::Validation(_) => action("subscription.validate".into(), ActionKind::Change),
        Route::PortalSession | Route::Portal if reads => None,
        Route::PortalSession if *method == Method::POST => action("login".into(), ActionKind::Login),
        Route::PortalSession if *method == Method::DELETE => action("logout".into(), ActionKind::Login),
        Route::PortalSession | Route::Portal => action(format!("portal.{}", verb_of(method)), kind),
        Route::Own(route) => {
            let (resource, posted) = route.audited()?;
            let verb = match *method {
                Method::POST => posted,
                _ => verb_of(method),
            };
            action(format!("{resource}.{verb}"), kind)
        }
        Route::Edge(EdgeRoute::Topics | EdgeRoute::Topic(_)) => {
            action(format!("topic.{}", verb_of(method)), kind)
        }
        Route::Edge(_) => action(format!("subscription.{}", verb_of(method)), kind),
        Route::Management(path) => Some(managed(method, *path, reads)),
        Route::Login(route) if route.gives_tokens() => action("login".into(), ActionKind::Login),
        Route::Login(_) => None,
    }
}

fn verb_of(method: &Method) -> &'static str {
    match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => "read",
        Method::PUT | Method::PATCH => "write",
        Method::DELETE => "delete",
        _ => "post",
    }
}

/// The action of a management API path.
fn managed(method: &Method, path: ManagementPath<'_>, reads: bool) -> AuditedAction {
    let path = path.decoded();
    let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let mut verb = verb_of(method).to_owned();
    if *method == Method::POST
        && let Some(last) = parts.pop()
    {
        let known = VERBS.iter().find(|known| known.eq_ignore_ascii_case(last));
        verb = known.map_or_else(|| last.chars().take(32).collect(), |known| (*known).to_owned());
    }
    let has = |word: &str| parts.iter().any(|part| part.eq_ignore_ascii_case(word));
    let kind = if has("eventSubscriptions") {
        "subscription"
    } else if has("domains") && has("topics") {
        "domainTopic"
    } else if has("topics") {
        "topic"
    } else if has("domains") {
        "domain"
    } else if has("systemTopics") {
        "systemTopic"
    } else if has("storageAccounts") {
        "storageAccount"
    } else if has("providers") {
        "provider"
    } else if has("resourceGroups") {
        "resourceGroup"
    } else {
        "resource"
    };
    AuditedAction {
        name: format!("{kind}.{verb}"),
        resource: format!("/{}", parts.join("/")),
        kind: if reads || verb == CHECK_NAME {
            ActionKind::Read
        } else {
            ActionKind::Change
        },
        shows_answer: false,
    }
}

/// The resource that the members of a request to our own API name.
pub fn resource_of(parameters: &Value) -> Option<String> {
    let named = ["id", "subscription", "topic", "endpoint", "node"]
        .iter()
        .find_map(|name| parameters[*name].as_str());
    named.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_change_something_has_a_name() {
        let check = |method: Method, path: &str, expected: Option<(&str, ActionKind)>| {
            let found = of(&method, path, &Route::parse(&method, path));
            let found = found.as_ref().map(|action| (action.name.as_str(), action.kind));
            assert_eq!(found, expected, "{method} {path}");
        };
        let changes = |name: &'static str| Some((name, ActionKind::Change));
        let arm = "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/topics/t";
        check(Method::PUT, arm, changes("topic.write"));
        check(Method::PATCH, arm, changes("topic.write"));
        check(Method::DELETE, arm, changes("topic.delete"));
        check(Method::GET, arm, Some(("topic.read", ActionKind::Read)));
        check(
            Method::POST,
            &format!("{arm}/listkeys"),
            changes("topic.listKeys"),
        );
        check(
            Method::POST,
            &format!("{arm}/regenerateKey"),
            changes("topic.regenerateKey"),
        );
        let one = format!("{arm}/providers/Microsoft.EventGrid/eventSubscriptions/s");
        check(Method::PUT, &one, changes("subscription.write"));
        check(
            Method::POST,
            &format!("{one}/getFullUrl"),
            changes("subscription.getFullUrl"),
        );
        check(
            Method::POST,
            &format!("{one}/getDeliveryAttributes"),
            changes("subscription.getDeliveryAttributes"),
        );
        let domain = "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/domains/d";
        check(Method::PUT, domain, changes("domain.write"));
        check(
            Method::PUT,
            &format!("{domain}/topics/t"),
            changes("domainTopic.write"),
        );
        check(
            Method::DELETE,
            "/subscriptions/s/resourceGroups/g",
            changes("resourceGroup.delete"),
        );
        let storage =
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/a/listKeys";
        check(Method::POST, storage, changes("storageAccount.listKeys"));

        check(
            Method::POST,
            "/subscriptions/s/providers/Microsoft.Storage/checknameavailability",
            Some(("provider.checkNameAvailability", ActionKind::Read)),
        );

        check(Method::PUT, "/topics/t", changes("topic.write"));
        check(Method::DELETE, "/topics/t", changes("topic.delete"));
        check(
            Method::PUT,
            "/topics/t/eventSubscriptions/s",
            changes("subscription.write"),
        );
        check(Method::GET, "/topics/t", Some(("topic.read", ActionKind::Read)));

        for (path, name) in [
            ("subscriptions/pause", "subscription.pause"),
            ("subscriptions/resume", "subscription.resume"),
            ("subscriptions/probe", "subscription.probe"),
            ("endpoints/admit", "endpoint.admit"),
            ("cluster/drain", "cluster.drain"),
            ("clock/advance", "clock.advance"),
            ("deadletters/replay", "deadletters.replay"),
            ("deadletters/purge", "deadletters.purge"),
            ("deadletters/write", "deadletters.write"),
            ("deadletters/replays/7/cancel", "deadletters.replay.cancel"),
            ("handshakes", "handshake.ask"),
            ("handshakes/x/repeat", "handshake.repeat"),
            ("listen", "listen.start"),
            ("something/new", "unknown.post"),
        ] {
            check(Method::POST, &format!("/postrider/v1/{path}"), changes(name));
        }
        check(
            Method::DELETE,
            "/postrider/v1/sessions",
            changes("sessions.delete"),
        );
        check(
            Method::GET,
            "/postrider/v1/stats",
            Some(("stats.read", ActionKind::Read)),
        );
        check(
            Method::GET,
            "/eventSubscriptions/s/validate",
            changes("subscription.validate"),
        );

        let logs_in = Some(("login", ActionKind::Login));
        check(Method::POST, "/portal/session", logs_in);
        check(
            Method::DELETE,
            "/portal/session",
            Some(("logout", ActionKind::Login)),
        );
        check(Method::POST, "/common/oauth2/v2.0/token", logs_in);
        check(Method::POST, "/adfs/oauth2/token", logs_in);
        check(Method::GET, "/metadata/identity/oauth2/token", logs_in);
        for (method, path) in [
            (Method::POST, "/topics/t/api/events"),
            (Method::POST, "/domains/d/api/events"),
            (Method::POST, "/api/events"),
            (Method::POST, "/topics/t"),
            (Method::POST, "/topics/t/api"),
            (Method::POST, "/topics/t/events"),
            (Method::POST, "/postrider/v1/filters/test"),
            (Method::POST, "/postrider/v1/listen/token/7"),
            (Method::GET, "/portal/js/app.js"),
            (Method::GET, "/healthz"),
            (Method::GET, "/common/discovery/keys"),
        ] {
            check(method, path, None);
        }
    }
}
