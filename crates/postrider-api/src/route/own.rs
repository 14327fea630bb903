//! The table of our own API: every path under `/postrider/v1` with its methods, permissions and the
//! names that its requests have in the audit log. `openapi.json` describes the same paths.

use super::path::PathSegments;
use crate::access::RequiredPermission;
use hyper::Method;

/// An endpoint of our own API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnEndpoint {
    OpenApi,
    Clock,
    AdvanceClock,
    Endpoints,
    AdmitEndpoint,
    Audit,
    VerifyAudit,
    Sessions,
    RevokeSessions,
    RotateSessionKey,
    Cluster,
    DrainNode,
    UndrainNode,
    Handshakes,
    Handshake,
    RepeatHandshake,
    DeadLetters,
    DeadLetterSummary,
    DeadLetter,
    ReplayDeadLetters,
    PurgeDeadLetters,
    WriteDeadLetters,
    Replays,
    Replay,
    CancelReplay,
    ResumeReplay,
    Listen,
    ListenReply,
    TestFilter,
    PauseSubscription,
    ResumeSubscription,
    ProbeSubscription,
    Server,
    Stats,
    StatsSeries,
    Subscriptions,
    Subscription,
    SubscriptionAttempts,
    Events,
    EventStream,
    Event,
}

/// Clients that may use an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnAccess {
    /// Anybody: the description of the API.
    Open,
    /// Anybody on this machine while only this machine can reach the server.
    Loopback,
    /// Clients that may read for GET, and clients that may write for anything else.
    ByMethod,
    /// Clients that may do this, whatever the method.
    Permission(RequiredPermission),
}

#[derive(Debug, PartialEq)]
struct OwnRow {
    /// Segments behind `/postrider`; `*` stands for a name.
    path: &'static [&'static str],
    endpoint: OwnEndpoint,
    /// As the `Allow` header lists them.
    allow: &'static str,
    access: OwnAccess,
    /// Whether it is about resources that any node of a cluster may make.
    uses_catalog: bool,
    /// Resource and action of a POST in the audit log; none where nothing is recorded.
    audited: Option<(&'static str, &'static str)>,
}

const fn row(
    path: &'static [&'static str],
    endpoint: OwnEndpoint,
    allow: &'static str,
    resource: &'static str,
    action: &'static str,
) -> OwnRow {
    OwnRow {
        path,
        endpoint,
        allow,
        access: OwnAccess::ByMethod,
        uses_catalog: false,
        audited: Some((resource, action)),
    }
}

impl OwnRow {
    const fn with(self, access: OwnAccess) -> OwnRow {
        OwnRow { access, ..self }
    }

    const fn of_catalog(self) -> OwnRow {
        OwnRow {
            uses_catalog: true,
            ..self
        }
    }

    const fn unrecorded(self) -> OwnRow {
        OwnRow {
            audited: None,
            ..self
        }
    }

    fn matches(&self, path: &[&str]) -> bool {
        let mut pairs = self.path.iter().zip(path);
        self.path.len() == path.len() && pairs.all(|(known, part)| *known == "*" || known == part)
    }
}

use OwnEndpoint as E;

/// More specific paths first.
static ROWS: [OwnRow; 41] = [
    row(&["v1", "openapi.json"], E::OpenApi, "GET", "openapi.json", "post").with(OwnAccess::Open),
    row(&["v1", "clock"], E::Clock, "GET", "clock", "post").with(OwnAccess::Loopback),
    row(
        &["v1", "clock", "advance"],
        E::AdvanceClock,
        "POST",
        "clock",
        "advance",
    )
    .with(OwnAccess::Loopback),
    row(&["v1", "endpoints"], E::Endpoints, "GET", "endpoint", "post"),
    row(
        &["v1", "endpoints", "admit"],
        E::AdmitEndpoint,
        "POST",
        "endpoint",
        "admit",
    ),
    // Lines of the audit log name clients and their addresses.
    row(&["v1", "audit"], E::Audit, "GET", "audit", "post")
        .with(OwnAccess::Permission(RequiredPermission::Write)),
    row(
        &["v1", "audit", "verify"],
        E::VerifyAudit,
        "GET",
        "audit",
        "verify",
    )
    .with(OwnAccess::Permission(RequiredPermission::Write)),
    row(&["v1", "sessions"], E::Sessions, "GET", "sessions", "post"),
    row(
        &["v1", "sessions", "revoke"],
        E::RevokeSessions,
        "POST",
        "sessions",
        "revoke",
    ),
    row(
        &["v1", "sessions", "rotate-key"],
        E::RotateSessionKey,
        "POST",
        "sessions",
        "rotate-key",
    ),
    row(&["v1", "cluster"], E::Cluster, "GET", "cluster", "post"),
    row(
        &["v1", "cluster", "drain"],
        E::DrainNode,
        "POST",
        "cluster",
        "drain",
    ),
    row(
        &["v1", "cluster", "undrain"],
        E::UndrainNode,
        "POST",
        "cluster",
        "undrain",
    ),
    row(
        &["v1", "handshakes"],
        E::Handshakes,
        "GET, POST",
        "handshake",
        "ask",
    )
    .of_catalog(),
    row(
        &["v1", "handshakes", "*"],
        E::Handshake,
        "GET",
        "handshake",
        "post",
    )
    .of_catalog(),
    row(
        &["v1", "handshakes", "*", "repeat"],
        E::RepeatHandshake,
        "POST",
        "handshake",
        "repeat",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters"],
        E::DeadLetters,
        "GET",
        "deadletters",
        "post",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters", "summary"],
        E::DeadLetterSummary,
        "GET",
        "deadletters",
        "summary",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters", "replay"],
        E::ReplayDeadLetters,
        "POST",
        "deadletters",
        "replay",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters", "purge"],
        E::PurgeDeadLetters,
        "POST",
        "deadletters",
        "purge",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters", "write"],
        E::WriteDeadLetters,
        "POST",
        "deadletters",
        "write",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters", "replays"],
        E::Replays,
        "GET",
        "deadletters",
        "replays",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters", "*"],
        E::DeadLetter,
        "GET",
        "deadletters",
        "post",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters", "replays", "*"],
        E::Replay,
        "GET",
        "deadletters.replay",
        "post",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters", "replays", "*", "cancel"],
        E::CancelReplay,
        "POST",
        "deadletters.replay",
        "cancel",
    )
    .of_catalog(),
    row(
        &["v1", "deadletters", "replays", "*", "resume"],
        E::ResumeReplay,
        "POST",
        "deadletters.replay",
        "resume",
    )
    .of_catalog(),
    row(&["v1", "listen"], E::Listen, "POST", "listen", "start")
        .with(OwnAccess::Permission(RequiredPermission::Write))
        .of_catalog(),
    row(&["v1", "listen", "*", "*"], E::ListenReply, "POST", "", "")
        .with(OwnAccess::Permission(RequiredPermission::Write))
        .unrecorded(),
    // Filters are posted because they are long.
    row(&["v1", "filters", "test"], E::TestFilter, "POST", "", "")
        .with(OwnAccess::Permission(RequiredPermission::Read))
        .unrecorded(),
    row(
        &["v1", "subscriptions", "pause"],
        E::PauseSubscription,
        "POST",
        "subscription",
        "pause",
    )
    .of_catalog(),
    row(
        &["v1", "subscriptions", "resume"],
        E::ResumeSubscription,
        "POST",
        "subscription",
        "resume",
    )
    .of_catalog(),
    row(
        &["v1", "subscriptions", "probe"],
        E::ProbeSubscription,
        "POST",
        "subscription",
        "probe",
    )
    .of_catalog(),
    row(&["v1", "server"], E::Server, "GET", "server", "post"),
    row(&["v1", "stats"], E::Stats, "GET", "stats", "post").of_catalog(),
    row(
        &["v1", "stats", "series"],
        E::StatsSeries,
        "GET",
        "stats",
        "series",
    )
    .of_catalog(),
    row(
        &["v1", "subscriptions"],
        E::Subscriptions,
        "GET",
        "subscription",
        "post",
    )
    .of_catalog(),
    row(
        &["v1", "subscription"],
        E::Subscription,
        "GET",
        "subscription",
        "post",
    )
    .of_catalog(),
    row(
        &["v1", "subscription", "attempts"],
        E::SubscriptionAttempts,
        "GET",
        "subscription",
        "attempts",
    )
    .of_catalog(),
    row(&["v1", "events"], E::Events, "GET", "events", "post"),
    row(
        &["v1", "events", "stream"],
        E::EventStream,
        "GET",
        "events",
        "stream",
    ),
    row(&["v1", "events", "*"], E::Event, "GET", "events", "post"),
];

/// A path of our own API: its row of the table, if it has one, and the names in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OwnRoute<'p> {
    row: Option<&'static OwnRow>,
    /// Percent-encoded, in their order.
    pub names: [&'p str; 2],
}

impl<'p> OwnRoute<'p> {
    /// Of a path that begins with `/postrider`.
    pub fn parse(segments: &PathSegments<'p>) -> OwnRoute<'p> {
        let path = segments.all().and_then(|all| all.get(1..)).unwrap_or_default();
        let row = ROWS.iter().find(|row| row.matches(path));
        let mut names = [""; 2];
        if let Some(row) = row {
            let sent = row.path.iter().zip(path).filter(|(known, _)| **known == "*");
            for (slot, (_, name)) in names.iter_mut().zip(sent) {
                *slot = name;
            }
        }
        OwnRoute { row, names }
    }

    /// None: the API has no such path.
    pub fn endpoint(&self) -> Option<OwnEndpoint> {
        self.row.map(|row| row.endpoint)
    }

    pub fn access(&self) -> OwnAccess {
        self.row.map_or(OwnAccess::ByMethod, |row| row.access)
    }

    /// The methods of this path, as the `Allow` header lists them.
    pub fn allow(&self) -> &'static str {
        self.row.map_or("", |row| row.allow)
    }

    /// HEAD is possible where GET is, but for a stream, which has no end.
    pub fn allows(&self, method: &Method) -> bool {
        let method = match *method {
            Method::HEAD if self.endpoint() != Some(OwnEndpoint::EventStream) => "GET",
            ref other => other.as_str(),
        };
        self.allow().split(", ").any(|allowed| allowed == method)
    }

    pub fn uses_catalog(&self) -> bool {
        self.row.is_some_and(|row| row.uses_catalog)
    }

    pub fn uses_archive(&self) -> bool {
        self.row.is_some_and(|row| row.path[1] == "deadletters")
    }

    /// Resource and action of a POST in the audit log; none where nothing is recorded.
    pub fn audited(&self) -> Option<(&'static str, &'static str)> {
        self.row.map_or(Some(("unknown", "post")), |row| row.audited)
    }
}

#[cfg(test)]
pub(crate) fn rows() -> impl Iterator<Item = (&'static [&'static str], &'static str)> {
    ROWS.iter().map(|row| (row.path, row.allow))
}
