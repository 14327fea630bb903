//! Listeners, the running server, and everything that it has to reach.

use super::finding::{Finding, quoted};
use crate::cli::ids::PROVIDER;
use crate::cli::management_client::ManagementClient;
use crate::client::{ApiClient, ClientFlags};
use crate::config::{ClientRole, Config, ConfigSecret, LoadedConfig};
use crate::fetch::Fetcher;
use crate::outgoing::{self, StoreConnector};
use crate::serve;
use bytes::Bytes;
use http::{Method, Uri};
use postrider_blobs::ObjectStores;
use postrider_core::outcome::Outcome;
use postrider_core::subscription::DeadLetterDestination;
use postrider_core::time::Timestamp;
use postrider_engine::blobs::{BlobError, BlobStore};
use postrider_engine::clock::SystemClock;
use postrider_engine::dead_letters;
use postrider_engine::deliver::TransportFailureKind;
use postrider_engine::endpoint;
use postrider_engine::subscription_health::words_of;
use postrider_store::CatalogContent as Catalogue;
use postrider_transport::HttpTransport;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time for one request to the local server.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// Time for one endpoint, from resolving its name to the end of the TLS handshake.
const REACH_TIME: Duration = Duration::from_secs(5);
/// Most endpoints to try, and how many at once.
const ENDPOINTS_MAX: usize = 200;
const AT_ONCE: usize = 16;
/// Most healthy endpoints that are named.
const WELL_NAMED_MAX: usize = 10;
/// Container to try in accounts that no subscription names a container of; nothing is created.
const CONTAINER: &str = "deadletters";
const DEAD_LETTERS_TODO: &str = "make the storage account reachable and let its container exist";
/// Events of listeners at the command line go to hosts of this name, which nobody resolves.
const NOT_ON_THE_NETWORK: &str = "postrider.invalid";

/// Enabled listeners: scheme and address.
fn listeners(config: &Config) -> Vec<(&'static str, SocketAddr)> {
    let http = config.listen.http.map(|at| ("http", at));
    let https = config.listen.https.map(|at| ("https", at));
    http.into_iter().chain(https).collect()
}

/// URL of a listener for clients on this machine.
fn url(scheme: &str, at: SocketAddr) -> String {
    let ip = match at.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    format!("{scheme}://{}", SocketAddr::new(ip, at.port()))
}

fn client(config: &Config, url: &str, secret: Option<ConfigSecret>) -> anyhow::Result<ApiClient> {
    let ca = config.data_dir.join("tls/ca.pem");
    let ca = match &config.listen.cert_file {
        Some(own) => Some(own.clone()),
        None => ca.exists().then_some(ca),
    };
    ApiClient::new(&ClientFlags {
        server: Some(url.to_owned()),
        secret,
        data_dir: Some(config.data_dir.clone()),
        ca,
        // The operator's contexts are about other servers.
        contexts: Some(PathBuf::new()),
        ..ClientFlags::default()
    })
}

/// The secret of a client that may read everything, if the configuration has one.
fn reader(config: &Config) -> Option<ConfigSecret> {
    let mut clients = config.clients.iter();
    let reader = clients.find(|client| client.role != ClientRole::DataSender)?;
    Some(reader.secret.clone())
}

/// Answer of `/healthz` at a listener, and the time there.
async fn healthz(config: &Config, url: &str) -> Result<(Value, Option<Timestamp>), String> {
    let asking = async {
        // `/healthz` needs no secret: this placeholder is not sent.
        let nobody = ConfigSecret::new("nobody");
        let client = client(config, url, Some(nobody))?;
        client
            .send(Method::GET, "/healthz", false, &[], Bytes::new())
            .await
    };
    let answer = timeout(ANSWER_TIME, asking).await;
    let answer = answer.map_err(|_| "no answer in time".to_owned())?;
    let answer = answer.map_err(|e| format!("{e:#}"))?;
    let date = answer.header("date").and_then(Timestamp::parse_http_date);
    let health: Option<Value> = serde_json::from_slice(&answer.body).ok();
    // A program other than Postrider would not have these members.
    let ours = health.filter(|health| health["status"].is_string() && health["store"].is_object());
    let ours =
        ours.ok_or_else(|| format!("something that is not Postrider answers, with {}", answer.status))?;
    Ok((ours, date))
}

/// Whether a server could listen on its addresses.
pub async fn free_ports(config: &Config) -> Vec<Finding> {
    let mut found = Vec::new();
    for (scheme, at) in listeners(config) {
        // The port is released at once.
        let bound = TcpListener::bind(at).map(drop);
        found.push(match bound {
            Ok(()) => Finding::ok("listeners", format!("{scheme}://{at} is free")),
            Err(e) => taken(config, scheme, at, &e).await,
        });
    }
    found
}

async fn taken(config: &Config, scheme: &str, at: SocketAddr, error: &std::io::Error) -> Finding {
    let about = "listeners";
    let key = format!("listen.{scheme}");
    match error.kind() {
        ErrorKind::AddrInUse => {
            let who = match healthz(config, &url(scheme, at)).await {
                Ok(_) => "another Postrider, with another data directory,",
                Err(_) => "another program",
            };
            let what = format!("{who} listens on {at}");
            let todo = format!("stop it, or set {key} to another address");
            let command = format!("ss -ltnp 'sport = :{}'", at.port());
            Finding::problem(about, what, todo).command(command)
        }
        ErrorKind::AddrNotAvailable => {
            let what = format!("{at} is not an address of this machine");
            Finding::problem(about, what, format!("set {key} to one that is")).command("ip -brief address")
        }
        ErrorKind::PermissionDenied => {
            let what = format!("{at}: only root may listen on ports below 1024");
            let todo = format!("set {key} to a higher port, or permit it");
            Finding::problem(about, what, todo)
                .command("sudo setcap cap_net_bind_service=+ep \"$(command -v postrider)\"")
        }
        _ => Finding::problem(
            about,
            format!("cannot listen on {at}: {error}"),
            format!("look at {key}"),
        ),
    }
}

/// The server that has locked the data directory.
#[derive(Default)]
pub struct RunningServerInfo {
    /// Time that the server reports.
    pub date: Option<Timestamp>,
    /// Address of the server, if it answers.
    pub url: Option<String>,
}

/// Asks the server that has locked the data directory for its health.
pub async fn running(config: &Config) -> (Vec<Finding>, RunningServerInfo) {
    let about = "server";
    let mut found = Vec::new();
    let mut health = None;
    let mut running = RunningServerInfo::default();
    for (scheme, at) in listeners(config) {
        if at.port() == 0 {
            let what =
                format!("it holds the data directory and listens for {scheme} on a port that is not known");
            let todo = format!("say which, with --{scheme} {}:PORT", at.ip());
            found.push(Finding::warning("listeners", what, todo).command("ss -ltnp | grep postrider"));
            continue;
        }
        let url = url(scheme, at);
        match healthz(config, &url).await {
            Ok((said, date)) => {
                found.push(Finding::ok("listeners", format!("the server answers at {url}")));
                if running.url.is_none() {
                    running.date = date;
                    running.url = Some(url);
                    health = Some(said);
                }
            }
            Err(e) => {
                let what = format!("a server holds the data directory but is not to be found at {url}: {e}");
                let todo = "give the doctor the flags and variables that the server was started with; \
                            if they are right, it hangs: look at its log and restart it";
                found.push(Finding::problem(about, what, todo).command("ps -C postrider -o pid,etime,args"));
            }
        }
    }
    found.extend(health.iter().flat_map(judge_health));
    (found, running)
}

/// Findings from a server's `/healthz`.
fn judge_health(health: &Value) -> Vec<Finding> {
    let about = "server";
    let mut found = Vec::new();
    let notices = |name: &str| -> Vec<(String, String)> {
        let text = |one: &Value, name: &str| one[name].as_str().unwrap_or_default().to_owned();
        let all = health[name].as_array().map_or(&[][..], Vec::as_slice);
        all.iter()
            .map(|one| (text(one, "code"), text(one, "detail")))
            .collect()
    };
    for (code, detail) in notices("reasons") {
        let todo = match code.as_str() {
            "stopping" => "start it again",
            "nodeReplaced" => "give every node a data directory of its own, and restart this one",
            "catalogueUnreadable" => "upgrade this node to the version of the others, or restart it",
            "jetstreamAway" | "leaseLost" | "noPartitionServed" => {
                "see what is said of jetstream; the server goes on by itself once JetStream does"
            }
            _ => "make room on the disk, or look at it; the server goes on by itself once it can write",
        };
        found.push(Finding::problem(
            about,
            format!("it refuses publishes: {detail}"),
            todo,
        ));
    }
    for (code, detail) in notices("warnings") {
        let todo = match code.as_str() {
            "deadLetters" => DEAD_LETTERS_TODO,
            "certificate" => "see what is said of tls",
            "proxy" => "look at the proxy, and at egress.proxy and egress.no_proxy",
            "recorder" => "look at data_dir/recorder; only the stories of events suffer",
            "nodeMissing" => "start the node again; it is forgotten after an hour if it owns nothing",
            "partitionsUnserved" => {
                "wait a moment: a live node takes them; if none does, look at the nodes' logs"
            }
            "draining" => "\"postrider cluster undrain\" lets it take part again",
            "jetstream" | "jetstreamSoon" | "replicaBehind" | "replicasFewer" | "sync" => {
                "see what is said of jetstream"
            }
            _ => "look at the server's log and at the disk",
        };
        found.push(Finding::warning(about, detail, todo));
    }
    if health["testClock"].is_object() {
        let what = "it runs on a test clock: nothing is retried unless someone moves it";
        found.push(Finding::warning(
            about,
            what,
            "start it without --test-clock, unless this is a test",
        ));
    }
    let version = health["version"].as_str().unwrap_or("?");
    if version != env!("CARGO_PKG_VERSION") {
        let what = format!(
            "it is version {version}, and this is {}",
            env!("CARGO_PKG_VERSION")
        );
        found.push(Finding::warning(
            about,
            what,
            "restart it with the program that is installed now",
        ));
    }
    if found.is_empty() {
        let (profile, dropped) = (&health["profile"], &health["deliveries"]["dropped"]);
        let dropped: u64 = dropped
            .as_object()
            .map_or(0, |reasons| reasons.values().filter_map(Value::as_u64).sum());
        let what = format!(
            "ready; version {version}, profile {}, events dropped since its start: {dropped}",
            profile.as_str().unwrap_or("?")
        );
        found.push(Finding::ok(about, what));
    }
    found
}

/// An endpoint that events are sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExaminedEndpoint {
    name: String,
    /// Cause and end of the probation delay.
    delay: Option<String>,
    waiting: u64,
    /// Command that sends a probe at once.
    probe: Option<String>,
    last: LastRequestState,
}

/// Result of the latest request to an endpoint, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LastRequestState {
    Ended(LastRequest),
    /// No request since the server's start.
    NothingSent,
    /// The same, but attempts of an earlier run have failed with these causes.
    FailedBefore(String),
    /// No server runs that could say.
    NoServer,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct LastRequest {
    at: String,
    outcome: Option<Outcome>,
    status: Option<u16>,
}

impl LastRequest {
    fn read(last: &Value) -> Option<LastRequest> {
        let name = last["outcome"].as_str()?;
        Some(LastRequest {
            at: last["at"].as_str()?.to_owned(),
            outcome: Outcome::ALL.into_iter().find(|outcome| outcome.name() == name),
            status: last["status"]
                .as_u64()
                .and_then(|status| u16::try_from(status).ok()),
        })
    }

    fn is_success(&self) -> bool {
        self.outcome == Some(Outcome::Success)
    }

    /// `its last answer, at …, was HTTP 500 Internal Server Error`
    fn in_words(&self) -> String {
        let words = words_of(self.outcome, self.status);
        match self.status {
            Some(_) => format!("its last answer, at {}, was {words}", self.at),
            None => format!("the last request to it, at {}, failed: {words}", self.at),
        }
    }

    /// Meaning of a failure and possible remedies.
    fn todo(&self) -> &'static str {
        match (self.status, self.outcome) {
            (Some(401 | 403), _) | (None, Some(Outcome::Unauthorized | Outcome::Forbidden)) => {
                "it does not accept the credentials: look at the code, key or header that the subscription sends"
            }
            (Some(404 | 410), _) | (None, Some(Outcome::NotFound)) => {
                "there is nothing at that path: correct the subscription's endpoint URL, or deploy what belongs there"
            }
            (Some(400 | 413 | 415 | 422), _) => {
                "it refuses what it is sent: see \"postrider event search\" and \"event trace\" for the events, and the \
                 subscription's schema"
            }
            (Some(408 | 429 | 503), _) | (None, Some(Outcome::Busy)) => {
                "it is overloaded or starting: events are tried again by themselves, up to their time to live"
            }
            (Some(300..400), _) => "it redirects, which is not followed: subscribe the address it leads to",
            (Some(500..), _) => {
                "the program there fails: look at its log; events are tried again up to their time to live"
            }
            (_, Some(Outcome::TimedOut)) => {
                "it takes too long to answer: let it accept events first and work on them afterwards"
            }
            _ => {
                "look at the program there and at the way to it; events are tried again up to their time to live"
            }
        }
    }
}

/// Endpoints that the running server knows.
pub async fn endpoints_of(config: &Config, url: &str) -> Result<Vec<ExaminedEndpoint>, Finding> {
    let asking = async {
        let client = client(config, url, reader(config))?;
        let endpoints = client.get("/postrider/v1/endpoints").await?;
        // Subscriptions that can be named in the probe command of an endpoint on probation.
        let sick = client
            .get("/postrider/v1/subscriptions?state=delayed&top=1000")
            .await?;
        let read = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes);
        anyhow::Ok((read(&endpoints)?, read(&sick)?))
    };
    let failed = |why: String| {
        let what = format!("the server does not say what its endpoints are: {why}");
        Finding::warning(
            "endpoints",
            what,
            "run the doctor as a user who may read the data directory",
        )
    };
    let answer = timeout(ANSWER_TIME, asking).await;
    let answer = answer.map_err(|_| failed("no answer in time".into()))?;
    let (endpoints, sick) = answer.map_err(|e| failed(format!("{e:#}")))?;
    let list = |answer: &Value| answer["value"].as_array().cloned().unwrap_or_default();
    let mut endpoints: Vec<ExaminedEndpoint> = list(&endpoints).iter().filter_map(told).collect();
    for one in list(&sick) {
        let name = one["endpoint"].as_str();
        if let Some(endpoint) = endpoints
            .iter_mut()
            .find(|known| Some(known.name.as_str()) == name)
        {
            endpoint.probe = one["id"].as_str().and_then(|id| probe(id, url, &config.data_dir));
        }
    }
    Ok(endpoints)
}

/// Answer of the running server's own API; `Err` says why there is none.
pub async fn ask(config: &Config, url: &str, path: &str) -> Result<Value, String> {
    let asking = async {
        let bytes = client(config, url, reader(config))?.get(path).await?;
        anyhow::Ok(serde_json::from_slice(&bytes)?)
    };
    match timeout(ANSWER_TIME, asking).await {
        Ok(answer) => answer.map_err(|e| format!("{e:#}")),
        Err(_) => Err("no answer in time".into()),
    }
}

/// Reads an endpoint as the API reports it.
fn told(one: &Value) -> Option<ExaminedEndpoint> {
    let text = |name: &str| one[name].as_str();
    Some(ExaminedEndpoint {
        name: text("endpoint")?.to_owned(),
        delay: text("causeText").or(text("cause")).map(|cause| {
            format!(
                "left alone until {} ({cause}, since {})",
                text("until").unwrap_or("?"),
                text("since").unwrap_or("?")
            )
        }),
        waiting: one["waiting"].as_u64().unwrap_or(0),
        probe: None,
        last: LastRequest::read(&one["last"]).map_or(LastRequestState::NothingSent, LastRequestState::Ended),
    })
}

/// Adds the causes of failures of an earlier run, by endpoint, where nothing has been sent since the server's start.
pub fn add_earlier_failures(endpoints: &mut [ExaminedEndpoint], mut failures: BTreeMap<String, String>) {
    for endpoint in endpoints {
        if endpoint.last == LastRequestState::NothingSent
            && let Some(causes) = failures.remove(&endpoint.name)
        {
            endpoint.last = LastRequestState::FailedBefore(causes);
        }
    }
}

/// The command that has the endpoint of a subscription asked.
fn probe(id: &str, url: &str, data_dir: &Path) -> Option<String> {
    let (on, name) = id.rsplit_once("/eventSubscriptions/")?;
    let on = match on.strip_suffix("/providers/Microsoft.EventGrid") {
        Some(scope) => format!("--scope {}", quoted(scope)),
        None => format!("--system-topic {}", quoted(on.rsplit_once("/systemTopics/")?.1)),
    };
    let (name, data_dir) = (quoted(name), quoted(&data_dir.to_string_lossy()));
    Some(format!(
        "postrider subscription probe {name} {on} --server {url} --data-dir {data_dir}"
    ))
}

/// Endpoints that a server would send to if it were started: those of the catalog, and declared
/// ones.
pub fn endpoints_in(config: &Config, catalogue: Option<&Catalogue>) -> (Vec<Finding>, Vec<ExaminedEndpoint>) {
    let known = serve::destinations(config);
    let mut found = Vec::new();
    let mut endpoints: BTreeMap<String, ExaminedEndpoint> = BTreeMap::new();
    let mut add = |name: String, delay: Option<String>| {
        let endpoint = endpoints.entry(name.clone()).or_insert_with(|| ExaminedEndpoint {
            name,
            delay: None,
            waiting: 0,
            probe: None,
            last: LastRequestState::NoServer,
        });
        endpoint.delay = endpoint.delay.take().or(delay);
    };
    let empty = Catalogue::default();
    let catalogue = catalogue.unwrap_or(&empty);
    for subscription in &catalogue.subscriptions {
        match known.reach(&subscription.destination) {
            Ok(reach) => add(endpoint::name(&reach.url), None),
            Err(why) => {
                let what = format!(
                    "subscription {:?}: destination.{}: {}",
                    subscription.name, why.field, why.reason
                );
                let todo = "say where it is with a [[destination]] or [[storage_account]], or change the subscription";
                found.push(Finding::problem("endpoints", what, todo));
            }
        }
    }
    for properties in declared(config) {
        let url = properties["destination"]["properties"]["endpointUrl"].as_str();
        if let Some(Ok(url)) = url.map(str::parse::<Uri>) {
            add(endpoint::name(&url), None);
        }
    }
    for one in &catalogue.endpoint_delays {
        let delay = one.delay;
        if let Some(of) = dead_letters::write_delay_of(&one.endpoint) {
            let known = catalogue.subscriptions.iter().find(|known| known.id == of);
            found.extend(known.map(|subscription| {
                let what = format!(
                    "dead letters of subscription {:?} could not be written since {}",
                    subscription.name, delay.since
                );
                Finding::warning("storage", what, DEAD_LETTERS_TODO)
            }));
            continue;
        }
        let text = format!(
            "left alone until {} ({}, since {})",
            delay.until,
            words_of(Some(delay.cause), delay.status),
            delay.since
        );
        // A probation delay may be that of a single subscription.
        add(
            endpoint::DelayScope::parse(&one.endpoint).0.to_owned(),
            Some(text),
        );
    }
    (found, endpoints.into_values().collect())
}

/// Declared subscriptions, as the configuration has them.
fn declared(config: &Config) -> impl Iterator<Item = &Value> {
    let topics = config.declared_subscriptions().map(|(_, one)| one);
    let domains = config.domains.iter().flat_map(|domain| {
        let inside = domain.topics.iter().flat_map(|topic| &topic.subscriptions);
        domain.subscriptions.iter().chain(inside)
    });
    let system = config.system_topics.iter().flat_map(|topic| &topic.subscriptions);
    topics.chain(domains).chain(system).map(|one| &one.properties)
}

/// Warns of an endpoint that is this server.
fn loops_back_finding(config: &Config, endpoint: &str) -> Option<Finding> {
    let place = |url: &str| {
        let url: Uri = url.parse().ok()?;
        let host = url.host()?.trim_matches(['[', ']']).to_ascii_lowercase();
        let usual = if url.scheme_str() == Some("https") {
            443
        } else {
            80
        };
        Some((host, url.port_u16().unwrap_or(usual)))
    };
    let (host, port) = place(endpoint)?;
    let address: Option<IpAddr> = host.parse().ok();
    let here = |at: SocketAddr| {
        let own = address.is_some_and(|ip| ip.to_canonical().is_loopback() || ip == at.ip());
        let named = config
            .listen
            .names
            .iter()
            .any(|name| name.eq_ignore_ascii_case(&host));
        at.port() == port && (own || named || host == "localhost")
    };
    let public = config.listen.public_url.as_deref().and_then(place);
    let ours = listeners(config).into_iter().any(|(_, at)| here(at)) || public == Some((host, port));
    ours.then(|| {
        let what = format!("{endpoint} is this server: events that are delivered there come back");
        let todo =
            "make sure that no topic leads back into itself; loops end after limits.hops_max deliveries";
        Finding::warning("endpoints", what, todo)
    })
}

/// Whether the proxy can be reached.
pub async fn proxy(config: &Config) -> Option<Finding> {
    let about = "proxy";
    let todo = "look at the proxy and at egress.proxy; nothing is delivered through it meanwhile";
    let rules = match outgoing::rules(config) {
        Ok(rules) => rules,
        Err(e) => return Some(Finding::problem(about, format!("{e:#}"), todo)),
    };
    let address = rules.proxy.as_ref()?.health().address.clone();
    let connector = postrider_transport::Connector::new(
        postrider_transport::Config {
            connect_timeout: REACH_TIME,
            ..rules
        },
        Arc::new(SystemClock),
    );
    let reached = match connector {
        Ok(connector) => connector.reach_proxy().await,
        Err(e) => Err(e.to_string()),
    };
    Some(match reached {
        Ok(()) => Finding::ok(about, format!("{address} can be reached")),
        Err(reason) => Finding::problem(about, format!("{address} {reason}"), todo),
    })
}

/// Tries to connect to endpoints as a delivery would.
pub async fn reach(loaded: &LoadedConfig, mut endpoints: Vec<ExaminedEndpoint>) -> Vec<Finding> {
    let about = "endpoints";
    let mut found = Vec::new();
    endpoints.retain(|one| {
        let host = one
            .name
            .parse::<Uri>()
            .ok()
            .and_then(|url| url.host().map(str::to_owned));
        !host.is_some_and(|host| host.ends_with(NOT_ON_THE_NETWORK))
    });
    if endpoints.is_empty() {
        return vec![Finding::ok(about, "none: there are no subscriptions")];
    }
    found.extend(
        endpoints
            .iter()
            .filter_map(|one| loops_back_finding(&loaded.config, &one.name)),
    );
    let transport = outgoing::rules(&loaded.config).and_then(|rules| {
        let config = postrider_transport::Config {
            connect_timeout: REACH_TIME,
            ..serve::transport(loaded, rules)
        };
        Ok(HttpTransport::new(config, Arc::new(SystemClock))?)
    });
    let transport = match transport {
        Ok(transport) => Arc::new(transport),
        Err(e) => {
            let what = format!("deliveries cannot be made: {e:#}");
            return vec![Finding::problem(
                "configuration",
                what,
                "look at [transport] and [egress]",
            )];
        }
    };
    // Endpoints on probation come first, so that they are not cut off.
    endpoints.sort_by_key(|one| (one.delay.is_none(), std::cmp::Reverse(one.waiting)));
    let left_out = endpoints.len().saturating_sub(ENDPOINTS_MAX);
    endpoints.truncate(ENDPOINTS_MAX);
    let room = Arc::new(Semaphore::new(AT_ONCE));
    let mut trying = JoinSet::new();
    for endpoint in endpoints {
        let (transport, room) = (transport.clone(), room.clone());
        trying.spawn(async move {
            let _place = room.acquire_owned().await;
            let reached = match endpoint.name.parse::<Uri>() {
                Ok(url) => transport
                    .reach(&url)
                    .await
                    .map_err(|failure| (failure.kind, failure.detail)),
                Err(_) => Err((
                    TransportFailureKind::Resolution,
                    format!("{} is not a URL", endpoint.name),
                )),
            };
            (endpoint, reached)
        });
    }
    let mut tried = trying.join_all().await;
    tried.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let mut well = Vec::new();
    for (endpoint, reached) in tried {
        match judge(&endpoint, reached) {
            Some(finding) => found.push(finding),
            None => well.push(endpoint),
        }
    }
    if well.len() <= WELL_NAMED_MAX {
        found.extend(well.iter().map(|one| Finding::ok(about, well_in_words(one))));
    } else {
        let answered = well
            .iter()
            .filter(|one| matches!(one.last, LastRequestState::Ended(_)));
        let (all, answered) = (well.len(), answered.count());
        let what = match well.iter().any(|one| one.last == LastRequestState::NoServer) {
            true => format!("{all} can be connected to; what they answer is known once a server runs"),
            false => format!(
                "{answered} accepted their last delivery; {} more can be connected to, and were sent nothing since \
                 the server's start",
                all - answered
            ),
        };
        found.push(Finding::ok(about, what));
    }
    if left_out > 0 {
        let what = format!("{left_out} more were not tried");
        found.push(Finding::ok(about, what));
    }
    found
}

/// Finding for an endpoint that can be reached and has not failed.
fn well_in_words(endpoint: &ExaminedEndpoint) -> String {
    let name = &endpoint.name;
    match &endpoint.last {
        LastRequestState::Ended(last) => format!(
            "{name} accepted its last delivery, at {} ({})",
            last.at,
            words_of(last.outcome, last.status)
        ),
        LastRequestState::NothingSent | LastRequestState::FailedBefore(_) => {
            format!("{name} can be connected to; nothing was sent to it since the server's start")
        }
        LastRequestState::NoServer => {
            format!("{name} can be connected to; what it answers is known once a server runs")
        }
    }
}

/// Finding for an endpoint; `None` if it is healthy.
fn judge(
    endpoint: &ExaminedEndpoint,
    reached: Result<(), (TransportFailureKind, String)>,
) -> Option<Finding> {
    let about = "endpoints";
    let name = &endpoint.name;
    let waiting = match endpoint.waiting {
        0 => String::new(),
        count => format!("; events waiting: {count}"),
    };
    let delay = endpoint
        .delay
        .as_ref()
        .map_or(String::new(), |delay| format!(", {delay}"));
    let failed = match &endpoint.last {
        LastRequestState::Ended(last) if !last.is_success() => Some(last),
        _ => None,
    };
    match (reached, &endpoint.delay) {
        (Ok(()), None) if let LastRequestState::FailedBefore(causes) = &endpoint.last => {
            let what = format!("{}, but before that: {causes}{waiting}", well_in_words(endpoint));
            Some(Finding::warning(about, what, "see what is said of subscriptions"))
        }
        (Ok(()), None) => failed.map(|last| {
            let what = format!("{name} can be connected to, but {}{waiting}", last.in_words());
            Finding::warning(about, what, last.todo())
        }),
        (Ok(()), Some(delay)) => {
            let answered = failed.map_or(String::new(), |last| format!("; {}", last.in_words()));
            let what = format!("{name} can be connected to, but is {delay}{answered}{waiting}");
            let finding = Finding::warning(about, what, "it is asked again by itself; to go on at once");
            Some(match &endpoint.probe {
                None => Finding {
                    todo: Some("it is asked again by itself then, once a server runs".into()),
                    ..finding
                },
                Some(probe) => finding.command(probe.clone()),
            })
        }
        (Err((TransportFailureKind::Forbidden, detail)), _) => Some(Finding::problem(
            about,
            format!("{name} is never dialled: {detail}{waiting}"),
            "allow it with egress.policy, or egress.policy = \"custom\" and egress.allow; or change the subscription",
        )),
        (Err((kind, detail)), _) => {
            let todo = match kind {
                TransportFailureKind::Resolution => "look at the name and at this machine's DNS",
                TransportFailureKind::Proxy => "look at the proxy, and at egress.proxy and egress.no_proxy",
                _ if detail.contains(postrider_transport::NOT_TLS) => {
                    "have that port speak https, or correct scheme and port of the subscription's endpoint URL"
                }
                _ if detail.contains("tls") => {
                    "have it show a certificate that this machine trusts, or name its CA in transport.extra_ca_files"
                }
                _ => "start it, or open the way to it; events wait meanwhile, up to their time to live",
            };
            let finding = Finding::warning(
                about,
                format!("{name} cannot be reached: {detail}{delay}{waiting}"),
                todo,
            );
            let host = name
                .parse::<Uri>()
                .ok()
                .and_then(|url| url.host().map(str::to_owned));
            Some(match (kind, host) {
                (TransportFailureKind::Resolution, Some(host)) => {
                    finding.command(format!("getent hosts {}", quoted(&host)))
                }
                (_, Some(_)) => finding.command(format!("curl -v {}", quoted(name))),
                _ => finding,
            })
        }
    }
}

/// Where the subscriptions of a stopped server send dead letters.
pub fn dead_letter_places_in(config: &Config, catalogue: Option<&Catalogue>) -> Vec<DeadLetterDestination> {
    let stored = catalogue.into_iter().flat_map(|all| &all.subscriptions);
    let stored = stored.filter_map(|one| one.dead_letter.clone());
    stored
        .chain(declared(config).filter_map(dead_letter_place))
        .collect()
}

/// Where the subscriptions of the running server send dead letters.
pub async fn dead_letter_places_of(
    config: &Config,
    url: &str,
) -> Result<Vec<DeadLetterDestination>, Finding> {
    let asking = async {
        let arm = ManagementClient::connect(client(config, url, reader(config))?, None).await?;
        arm.list(&format!("{}/{PROVIDER}/eventSubscriptions", arm.ids.account()))
            .await
    };
    let failed = |why: String| {
        let what = format!("the server does not say where dead letters go: {why}");
        let todo = "run the doctor as a user who may read the data directory";
        Finding::warning("storage", what, todo)
    };
    let answer = timeout(ANSWER_TIME, asking).await;
    let answer = answer.map_err(|_| failed("no answer in time".into()))?;
    let all = answer.map_err(|e| failed(format!("{e:#}")))?;
    Ok(all
        .iter()
        .filter_map(|one| dead_letter_place(&one["properties"]))
        .collect())
}

/// The dead-letter destination in the properties of a subscription.
fn dead_letter_place(properties: &Value) -> Option<DeadLetterDestination> {
    let place = match &properties["deadLetterWithResourceIdentity"] {
        Value::Null => properties,
        with_identity => with_identity,
    };
    let place = &place["deadLetterDestination"]["properties"];
    Some(DeadLetterDestination {
        account: place["resourceId"].as_str()?.to_owned(),
        container: place["blobContainerName"].as_str()?.to_owned(),
    })
}

/// Whether dead letters could be written. Writes nothing that stays.
pub async fn storage(config: &Config, named: &[DeadLetterDestination]) -> Vec<Finding> {
    let about = "storage";
    let mut found = Vec::new();
    // Containers that subscriptions name, by account.
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for configured in config.all_storage_accounts() {
        places.entry(configured.name).or_default();
    }
    let named = named.iter().map(|to| (to.account_name(), &*to.container));
    for (account, container) in named.chain(config.default_dead_letter_container()) {
        let containers = places.entry(account.to_owned()).or_default();
        if !containers.iter().any(|known| known == container) {
            containers.push(container.to_owned());
        }
    }
    let accounts = config.all_storage_accounts().into_iter().map(serve::account);
    let stores = accounts.collect::<anyhow::Result<Vec<_>>>().and_then(|accounts| {
        let clock = Arc::new(SystemClock);
        let connector = StoreConnector::new(outgoing::rules(config)?, clock.clone())?;
        Ok(ObjectStores::new(accounts, clock, connector)?)
    });
    let stores = match stores {
        Ok(stores) => Arc::new(stores),
        Err(e) => {
            let todo = "look at the [[storage_account]]s";
            return vec![Finding::problem(about, format!("{e:#}"), todo)];
        }
    };
    let mut trying = JoinSet::new();
    for (account, containers) in places {
        let certain = !containers.is_empty();
        let containers = if certain {
            containers
        } else {
            vec![CONTAINER.to_owned()]
        };
        for container in containers {
            let (stores, account) = (stores.clone(), account.clone());
            trying.spawn(async move {
                let probed = timeout(REACH_TIME * 2, stores.probe(&account, &container)).await;
                let probed = probed.unwrap_or_else(|_| {
                    Err(BlobError::Unreachable {
                        account: account.clone(),
                        detail: "no answer in time".into(),
                    })
                });
                (account, container, certain, probed)
            });
        }
    }
    let mut tried = trying.join_all().await;
    tried.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
    for (account, container, certain, probed) in tried {
        found.push(match probed {
            Ok(()) => {
                let what = format!("account {account:?}, container {container:?}: dead letters can be written");
                Finding::ok(about, what)
            }
            // Nobody wants that container: only the account was tried.
            Err(BlobError::NoContainer { .. }) if !certain => {
                Finding::ok(about, format!("account {account:?} answers"))
            }
            Err(e) => {
                let todo = match &e {
                    BlobError::UnknownAccount(_) => {
                        "add a [[storage_account]] of this name, or change the subscription's deadLetterDestination"
                    }
                    BlobError::NoContainer { .. } => {
                        "make the container, or set create_containers = true for the account"
                    }
                    BlobError::Refused { .. } => "look at the account's key",
                    _ => "make it reachable; dead letters wait for dead_letter.give_up_after",
                };
                Finding::problem(about, format!("account {account:?}, container {container:?}: {e}"), todo)
            }
        });
    }
    found
}

/// Whether the keys of the token issuer can be fetched.
pub async fn issuer(config: &Config) -> Option<Finding> {
    let oidc = config.oidc.as_ref()?;
    let about = "oidc";
    let url = match &oidc.jwks_url {
        Some(url) => url.clone(),
        None => format!(
            "{}/.well-known/openid-configuration",
            oidc.issuer.trim_end_matches('/')
        ),
    };
    let fetcher = outgoing::rules(config).and_then(Fetcher::new);
    let fetched = match fetcher {
        Ok(fetcher) => fetcher.fetch(&url).await,
        Err(e) => Err(e),
    };
    Some(match fetched {
        Ok(body) if serde_json::from_slice::<Value>(&body).is_ok() => {
            Finding::ok(about, format!("{url} answers"))
        }
        Ok(_) => Finding::problem(
            about,
            format!("{url} answers with something that is not JSON"),
            "look at [oidc]",
        ),
        Err(e) => {
            let what = format!("{url}: {e:#}");
            let todo = "look at [oidc]; tokens of this issuer are refused while its keys cannot be had";
            Finding::problem(about, what, todo).command(format!("curl -v {}", quoted(&url)))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::finding::FindingLevel;
    use super::*;
    use serde_json::json;

    #[test]
    fn listeners_are_addressed_from_here() {
        let check = |at: &str, expected: &str| assert_eq!(url("http", at.parse().unwrap()), expected);
        check("127.0.0.1:5888", "http://127.0.0.1:5888");
        check("0.0.0.0:80", "http://127.0.0.1:80");
        check("[::]:80", "http://[::1]:80");
        check("10.1.2.3:80", "http://10.1.2.3:80");
    }

    #[test]
    fn what_a_server_says_is_passed_on_with_advice() {
        let well = json!({"version": env!("CARGO_PKG_VERSION"), "profile": "edge", "reasons": [], "warnings": [],
            "deliveries": {"dropped": {"A": 2, "B": 1}}});
        let found = judge_health(&well);
        assert_eq!(found[0].level, FindingLevel::Ok);
        assert!(found[0].what.contains("since its start: 3"), "{found:?}");
        let ill = json!({"version": "0.0.1", "testClock": {},
            "reasons": [{"code": "logUnwritable", "detail": "the disk is full"}],
            "warnings": [{"code": "deadLetters", "detail": "stuck"}]});
        let found = judge_health(&ill);
        let levels: Vec<FindingLevel> = found.iter().map(|one| one.level).collect();
        assert_eq!(
            levels,
            [
                FindingLevel::Problem,
                FindingLevel::Warning,
                FindingLevel::Warning,
                FindingLevel::Warning
            ]
        );
        assert!(found[0].what.contains("the disk is full"), "{found:?}");
    }

    #[test]
    fn endpoints_are_judged_by_what_came_of_dialling_them() {
        let endpoint = |delay: Option<&str>| ExaminedEndpoint {
            name: "https://example.com/hook".into(),
            delay: delay.map(str::to_owned),
            waiting: 3,
            probe: delay.map(|_| "postrider subscription probe x".to_owned()),
            last: LastRequestState::NothingSent,
        };
        let well = endpoint(None);
        assert_eq!(judge(&well, Ok(())), None);
        assert!(well_in_words(&well).ends_with("nothing was sent to it since the server's start"));
        let mut failed_before = [endpoint(None)];
        let causes = BTreeMap::from([(well.name.clone(), "HTTP 400 Bad Request".to_owned())]);
        add_earlier_failures(&mut failed_before, causes);
        let found = judge(&failed_before[0], Ok(())).unwrap();
        assert_eq!(found.level, FindingLevel::Warning);
        assert!(
            found
                .what
                .contains("start, but before that: HTTP 400 Bad Request"),
            "{found:?}"
        );
        let answered = |outcome: &str, status: Option<u16>| {
            let last = json!({"at": "T", "outcome": outcome, "status": status});
            ExaminedEndpoint {
                last: LastRequest::read(&last).map_or(LastRequestState::NothingSent, LastRequestState::Ended),
                ..endpoint(None)
            }
        };
        let fine = answered("Success", Some(202));
        assert_eq!(judge(&fine, Ok(())), None);
        assert_eq!(
            well_in_words(&fine),
            "https://example.com/hook accepted its last delivery, at T (HTTP 202 Accepted)"
        );
        let warned = |outcome: &str, status: Option<u16>, what: &str, todo: &str| {
            let finding = judge(&answered(outcome, status), Ok(())).unwrap();
            assert_eq!(finding.level, FindingLevel::Warning);
            assert!(finding.what.contains(what), "{finding:?}");
            assert!(
                finding.todo.as_deref().unwrap_or_default().contains(todo),
                "{finding:?}"
            );
        };
        let was = "its last answer, at T, was HTTP";
        warned(
            "GenericError",
            Some(500),
            &format!("{was} 500 Internal Server Error"),
            "look at its log",
        );
        warned(
            "Unauthorized",
            Some(401),
            &format!("{was} 401 Unauthorized"),
            "credentials",
        );
        warned(
            "NotFound",
            Some(404),
            &format!("{was} 404 Not Found"),
            "at that path",
        );
        warned(
            "BadRequest",
            Some(400),
            &format!("{was} 400 Bad Request"),
            "refuses what it is sent",
        );
        warned(
            "Busy",
            Some(503),
            &format!("{was} 503 Service Unavailable"),
            "overloaded",
        );
        warned(
            "TimedOut",
            None,
            "at T, failed: no answer in time",
            "takes too long",
        );
        warned(
            "SomethingNew",
            None,
            "failed: unknown cause",
            "look at the program",
        );
        let failed = |kind: TransportFailureKind, detail: &str| Err((kind, detail.to_owned()));
        let forbidden = failed(TransportFailureKind::Forbidden, "egress.policy forbids it");
        let forbidden = judge(&well, forbidden).unwrap();
        assert_eq!(forbidden.level, FindingLevel::Problem);
        let lost = judge(&well, failed(TransportFailureKind::Resolution, "no such name")).unwrap();
        assert_eq!(
            (lost.level, lost.commands.as_slice()),
            (FindingLevel::Warning, &["getent hosts example.com".into()][..])
        );
        assert!(lost.what.ends_with("events waiting: 3"), "{lost:?}");
        let plain = failed(TransportFailureKind::Socket, postrider_transport::NOT_TLS);
        let todo = judge(&well, plain).unwrap().todo.unwrap();
        assert!(todo.contains("speak https"), "{todo}");
        let back = judge(&endpoint(Some("left alone until T")), Ok(())).unwrap();
        assert!(back.what.contains("left alone until T"), "{back:?}");
        assert_eq!(back.commands, ["postrider subscription probe x"]);
    }

    #[test]
    fn an_endpoint_that_is_this_server_is_warned_of() {
        let mut config = Config::default();
        config.listen.http = Some("127.0.0.1:5888".parse().unwrap());
        config.listen.https = None;
        config.listen.names = vec!["grid.example".into()];
        config.listen.public_url = Some("https://events.example".into());
        let check = |url: &str, expected: bool| {
            assert_eq!(loops_back_finding(&config, url).is_some(), expected, "{url}");
        };
        check("http://127.0.0.1:5888/topics/a/api/events", true);
        check("http://localhost:5888/", true);
        check("http://[::1]:5888/", true);
        check("http://grid.example:5888/", true);
        check("https://events.example/topics/a/api/events", true);
        check("http://127.0.0.1:5889/", false);
        check("https://other.example/", false);
    }

    #[test]
    fn the_command_that_asks_an_endpoint_names_a_subscription() {
        let check = |id: &str, expected: &str| {
            let told = probe(id, "http://h:1", Path::new("d"));
            assert_eq!(told.as_deref(), Some(expected));
        };
        let group = "/subscriptions/0/resourceGroups/rg1/providers/Microsoft.EventGrid";
        check(
            &format!("{group}/topics/t/providers/Microsoft.EventGrid/eventSubscriptions/s"),
            &format!(
                "postrider subscription probe s --scope {group}/topics/t --server http://h:1 --data-dir d"
            ),
        );
        check(
            &format!("{group}/systemTopics/t/eventSubscriptions/s"),
            "postrider subscription probe s --system-topic t --server http://h:1 --data-dir d",
        );
    }
}
