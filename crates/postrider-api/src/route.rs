//! Paths to routes: a request's path is parsed once, and everything that depends on it reads the
//! [`Route`]: dispatch, permissions, allowed methods, the catch-up of a cluster's catalog, the audit
//! log and the check of `openapi.json`.

pub(crate) mod own;
mod path;

pub(crate) use own::OwnRoute;
pub(crate) use path::{ManagementPath, PathSegments};

use crate::access::RequiredPermission;
use hyper::Method;
use postrider_wire::publish::PublishApi;

/// The meaning of a request's path. Names are as they were sent, percent-encoded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Route<'p> {
    /// `/`, which leads browsers to the portal.
    Root,
    Publish(PublishRoute<'p>),
    /// The validation URL of an event subscription.
    Validation(&'p str),
    Health(HealthRoute),
    Metrics,
    PortalSession,
    /// The portal's files.
    Portal,
    Docs,
    Own(OwnRoute<'p>),
    Edge(EdgeRoute<'p>),
    Management(ManagementPath<'p>),
    Login(LoginRoute<'p>),
    Unknown,
}

/// The publish API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PublishRoute<'p> {
    Topic(&'p str),
    Domain(&'p str),
    /// `/api/events`; the host names the topic.
    ByHost,
    /// An endpoint with another end, such as `/topics/{name}` or `/domains/{name}/api`. Publishers
    /// of the cloud are refused; the edge API has no such POST.
    Incomplete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HealthRoute {
    All,
    Live,
    Ready,
}

/// The API of the IoT Edge module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EdgeRoute<'p> {
    Topics,
    Topic(&'p str),
    Publish(&'p str),
    Subscriptions(&'p str),
    Subscription { topic: &'p str, name: &'p str },
    Unknown,
}

/// The login services that Azure's clients know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoginRoute<'p> {
    /// The addresses of all services of this cloud.
    Metadata,
    /// `openid-configuration`.
    Discovery(LoginService<'p>),
    Token(LoginService<'p>),
    Keys(LoginService<'p>),
    /// Whether this is a login service at all.
    Instance,
    /// A token for any program on this machine, as managed identities get it.
    Identity,
}

/// The kind of login service that a client speaks to, with the tenant of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoginService<'p> {
    Adfs,
    V1(&'p str),
    V2(&'p str),
}

/// A request's dependence on resources that another node of the cluster may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CatalogAccess {
    None,
    /// Reads resources: a missing one is looked for again after a catch-up.
    Read,
    /// Changes resources: caught up with before, and answered once in force at every node.
    Write,
    /// Hands in events, which are matched by every change that was answered before.
    Publish(PublishApi),
    /// Puts a subscription in force whose webhook was asked.
    Validate,
}

impl<'p> Route<'p> {
    pub fn parse(method: &Method, path: &'p str) -> Route<'p> {
        let segments = PathSegments::of(path);
        let is = |at: usize, word: &str| segments.get(at).eq_ignore_ascii_case(word);
        let name = segments.get(1);
        match segments.count() {
            4 if is(2, "api") && is(3, "events") && is(0, "topics") => {
                Route::Publish(PublishRoute::Topic(name))
            }
            4 if is(2, "api") && is(3, "events") && is(0, "domains") => {
                Route::Publish(PublishRoute::Domain(name))
            }
            2 if is(0, "api") && is(1, "events") => Route::Publish(PublishRoute::ByHost),
            3 if is(0, "eventsubscriptions") && is(2, "validate") => Route::Validation(name),
            0 => Route::Root,
            1 if is(0, "healthz") => Route::Health(HealthRoute::All),
            2 if is(0, "healthz") && is(1, "live") => Route::Health(HealthRoute::Live),
            2 if is(0, "healthz") && is(1, "ready") => Route::Health(HealthRoute::Ready),
            1 if is(0, "metrics") => Route::Metrics,
            2 if is(0, "portal") && is(1, "session") => Route::PortalSession,
            _ if is(0, "portal") => Route::Portal,
            _ if is(0, "docs") => Route::Docs,
            _ if is(0, "postrider") => Route::Own(OwnRoute::parse(&segments)),
            count @ 2..=4
                if *method == Method::POST
                    && (is(0, "domains")
                        || is(0, "api")
                        || is(0, "topics") && (count == 2 || is(2, "api"))) =>
            {
                Route::Publish(PublishRoute::Incomplete)
            }
            _ if is(0, "topics") => Route::Edge(EdgeRoute::parse(&segments)),
            _ => match ManagementPath::of(path) {
                Some(path) => Route::Management(path),
                None => LoginRoute::parse(&segments).map_or(Route::Unknown, Route::Login),
            },
        }
    }

    pub fn catalog_access(&self, method: &Method) -> CatalogAccess {
        let reads = is_read(method);
        match self {
            Route::Publish(PublishRoute::Incomplete) => CatalogAccess::None,
            Route::Publish(_) => CatalogAccess::Publish(PublishApi::Cloud),
            Route::Edge(EdgeRoute::Publish(_)) => CatalogAccess::Publish(PublishApi::Edge),
            Route::Validation(_) => CatalogAccess::Validate,
            Route::Own(route) if !route.uses_catalog() => CatalogAccess::None,
            Route::Management(path) if reads || path.reads_by_post(method) => CatalogAccess::Read,
            Route::Own(_) | Route::Edge(_) if reads => CatalogAccess::Read,
            Route::Own(_) | Route::Edge(_) | Route::Management(_) => CatalogAccess::Write,
            Route::Root
            | Route::Health(_)
            | Route::Metrics
            | Route::PortalSession
            | Route::Portal
            | Route::Docs
            | Route::Login(_)
            | Route::Unknown => CatalogAccess::None,
        }
    }

    /// Whether the request is about dead letters, whose archive is caught up with apart.
    pub fn uses_archive(&self) -> bool {
        matches!(self, Route::Own(route) if route.uses_archive())
    }
}

impl<'p> EdgeRoute<'p> {
    fn parse(segments: &PathSegments<'p>) -> EdgeRoute<'p> {
        let (topic, name) = (segments.get(1), segments.get(3));
        let is = |word: &str| segments.get(2).eq_ignore_ascii_case(word);
        match segments.count() {
            1 => EdgeRoute::Topics,
            2 => EdgeRoute::Topic(topic),
            // The segment behind `events` says nothing.
            3 | 4 if is("events") => EdgeRoute::Publish(topic),
            3 if is("eventSubscriptions") => EdgeRoute::Subscriptions(topic),
            4 if is("eventSubscriptions") => EdgeRoute::Subscription { topic, name },
            _ => EdgeRoute::Unknown,
        }
    }

    /// The methods of this path, as the `Allow` header lists them.
    pub fn allow(self) -> &'static str {
        match self {
            EdgeRoute::Topics | EdgeRoute::Subscriptions(_) => "GET",
            EdgeRoute::Topic(_) | EdgeRoute::Subscription { .. } => "GET, PUT, DELETE",
            EdgeRoute::Publish(_) => "POST",
            EdgeRoute::Unknown => "",
        }
    }

    pub fn need(self, method: &Method) -> RequiredPermission {
        match (self, method) {
            (_, &Method::GET | &Method::HEAD) => RequiredPermission::Read,
            (EdgeRoute::Publish(_), &Method::POST) => RequiredPermission::Send,
            _ => RequiredPermission::Write,
        }
    }
}

impl<'p> LoginRoute<'p> {
    fn parse(segments: &PathSegments<'p>) -> Option<LoginRoute<'p>> {
        let path = segments.all()?;
        let lower: Vec<String> = path.iter().map(|part| part.to_ascii_lowercase()).collect();
        let lower: Vec<&str> = lower.iter().map(String::as_str).collect();
        let tenant = *path.first()?;
        Some(match lower.as_slice() {
            ["metadata", "endpoints"] => LoginRoute::Metadata,
            ["metadata", "identity", "oauth2", "token"] | ["msi", "token"] => LoginRoute::Identity,
            [_, "discovery", "instance"] => LoginRoute::Instance,
            ["adfs", ".well-known", "openid-configuration"] => LoginRoute::Discovery(LoginService::Adfs),
            ["adfs", "oauth2", "token"] => LoginRoute::Token(LoginService::Adfs),
            ["adfs", "discovery", "keys"] => LoginRoute::Keys(LoginService::Adfs),
            // az asks here for the id of a tenant that it knows by name.
            ["adfs", _, "v2.0", ".well-known", "openid-configuration"] => {
                LoginRoute::Discovery(LoginService::V2(path[1]))
            }
            [_, "v2.0", ".well-known", "openid-configuration"] => {
                LoginRoute::Discovery(LoginService::V2(tenant))
            }
            [_, ".well-known", "openid-configuration"] => LoginRoute::Discovery(LoginService::V1(tenant)),
            [_, "oauth2", "v2.0", "token"] => LoginRoute::Token(LoginService::V2(tenant)),
            [_, "oauth2", "token"] => LoginRoute::Token(LoginService::V1(tenant)),
            [_, "discovery", "v2.0", "keys"] => LoginRoute::Keys(LoginService::V2(tenant)),
            [_, "discovery", "keys"] => LoginRoute::Keys(LoginService::V1(tenant)),
            _ => return None,
        })
    }

    pub fn gives_tokens(self) -> bool {
        matches!(self, LoginRoute::Token(_) | LoginRoute::Identity)
    }

    /// The one method of this path.
    pub fn method(self) -> Method {
        match self {
            LoginRoute::Token(_) => Method::POST,
            _ => Method::GET,
        }
    }
}

pub(crate) fn is_read(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catalog_access_follows_from_path_and_method() {
        let check = |method: Method, path: &str, expected: CatalogAccess| {
            let route = Route::parse(&method, path);
            assert_eq!(route.catalog_access(&method), expected, "{method} {path}");
        };
        let arm = "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/topics/t";
        check(Method::GET, arm, CatalogAccess::Read);
        check(Method::PUT, arm, CatalogAccess::Write);
        check(Method::POST, &format!("{arm}/listKeys"), CatalogAccess::Read);
        check(
            Method::POST,
            &format!("{arm}/regenerateKey"),
            CatalogAccess::Write,
        );
        let subscription = format!("{arm}/providers/Microsoft.EventGrid/eventSubscriptions/s");
        check(
            Method::POST,
            &format!("{subscription}/getfullurl"),
            CatalogAccess::Read,
        );
        for published in ["/topics/t/api/events", "/domains/d/api/events", "/api/events"] {
            check(Method::POST, published, CatalogAccess::Publish(PublishApi::Cloud));
        }
        check(
            Method::POST,
            "/topics/t/events",
            CatalogAccess::Publish(PublishApi::Edge),
        );
        check(
            Method::GET,
            "/eventSubscriptions/s/validate",
            CatalogAccess::Validate,
        );
        check(Method::GET, "/topics/t/eventSubscriptions/s", CatalogAccess::Read);
        check(
            Method::DELETE,
            "/topics/t/eventSubscriptions/s",
            CatalogAccess::Write,
        );
        check(
            Method::POST,
            "/postrider/v1/subscriptions/pause",
            CatalogAccess::Write,
        );
        check(Method::POST, "/postrider/v1/listen", CatalogAccess::Write);
        check(
            Method::GET,
            "/postrider/v1/deadletters/replays/7",
            CatalogAccess::Read,
        );
        for other in [
            "/postrider/v1/listen/token/7",
            "/postrider/v1/cluster/drain",
            "/healthz",
            "/portal/x",
            "/common/oauth2/token",
        ] {
            check(Method::POST, other, CatalogAccess::None);
        }
    }

    #[test]
    fn paths_are_parsed_whatever_their_case_and_slashes() {
        let check = |method: Method, path: &str, expected: Route<'_>| {
            assert_eq!(Route::parse(&method, path), expected, "{method} {path}");
        };
        check(Method::GET, "/", Route::Root);
        check(
            Method::POST,
            "//Topics/a%20b//API/Events/",
            Route::Publish(PublishRoute::Topic("a%20b")),
        );
        check(
            Method::POST,
            "/topics/t",
            Route::Publish(PublishRoute::Incomplete),
        );
        check(Method::PUT, "/topics/t", Route::Edge(EdgeRoute::Topic("t")));
        check(Method::GET, "/topics/t/api", Route::Edge(EdgeRoute::Unknown));
        check(Method::GET, "/healthz/ready", Route::Health(HealthRoute::Ready));
        check(Method::GET, "/healthz/other", Route::Unknown);
        check(
            Method::POST,
            "/Common/OAuth2/v2.0/token",
            Route::Login(LoginRoute::Token(LoginService::V2("Common"))),
        );
        check(Method::GET, "/a/b/c/d/e/f/g", Route::Unknown);
    }
}
