//! The health of JetStream, and the durability that its settings guarantee.

use crate::connection::{self, JetStreamSettings, NatsConnection, error_chain};
use crate::partition::{EVENT_SEQUENCE_MAX, SPENT};
use async_nats::jetstream::stream::Info;
use async_nats::jetstream::{self, ErrorCode};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use postrider_core::time::Timestamp;
use postrider_store::Error;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// Maximum duration of one request.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a result is reused.
const FRESH: Duration = Duration::from_secs(2);
/// The servers' sync setting changes only with a restart, so it is reused for longer.
const SYNC_FRESH: Duration = Duration::from_secs(60);
/// Sequence from which operators are warned that a partition's stream will run out of numbers.
const NEARLY_SPENT: u64 = EVENT_SEQUENCE_MAX / 10 * 9;
/// Maximum size of a monitor's answer.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// Description of a stream that does not exist.
pub const NOT_THERE: &str = "it is not there";

/// Everything that can be learned of a NATS server without changing anything.
#[derive(Clone, Debug)]
pub struct ServerExamination {
    pub server: String,
    pub version: String,
    /// The NATS cluster that the server belongs to.
    pub cluster: Option<String>,
    /// Number of that cluster's servers that are announced to clients.
    pub addresses: usize,
    /// Maximum size of a message.
    pub payload_max: usize,
    /// Number of streams in the account, and its limit.
    pub streams: usize,
    pub streams_max: Option<u64>,
    /// Bytes on disk used by the account, and its limit.
    pub storage: u64,
    pub storage_max: Option<u64>,
    /// The server's clock, if a stream exists by which it can be read.
    pub now: Option<Timestamp>,
    pub report: Arc<JetStreamReport>,
}

/// Examines JetStream for a cluster that may not have been started yet.
pub async fn examine(settings: &JetStreamSettings) -> Result<ServerExamination, Error> {
    let connection = NatsConnection::open(settings, "doctor").await?;
    let account = connection.asking.query_account().await;
    let account = account.map_err(|e| Error::Unavailable(error_chain(&e)))?;
    let info = connection.client.server_info();
    let prefix = connection.names.prefix();
    let others = ["catalog", "archive"].map(|name| format!("{prefix}-{name}"));
    let nodes = format!("KV_{prefix}-nodes");
    let others: Vec<String> = others.into_iter().chain([nodes.clone()]).collect();
    let now = server_time(&connection, &nodes).await;
    let health = JetStreamHealth::new(connection.clone(), settings.clone(), settings.partitions, others);
    let limit = |limit: Option<i64>| {
        limit
            .and_then(|limit| u64::try_from(limit).ok())
            .filter(|limit| *limit > 0)
    };
    Ok(ServerExamination {
        server: info.server_name.clone(),
        version: info.version.clone(),
        cluster: info.cluster.clone(),
        addresses: info.connect_urls.len(),
        payload_max: info.max_payload,
        streams: account.streams,
        streams_max: limit(account.limits.max_streams),
        storage: account.storage,
        storage_max: limit(account.limits.max_storage),
        now,
        report: health.look().await,
    })
}

/// Only answers about streams contain the server's time.
async fn server_time(connection: &NatsConnection, stream: &str) -> Option<Timestamp> {
    let question = connection
        .client
        .request(format!("$JS.API.STREAM.INFO.{stream}"), Bytes::new());
    let answer = tokio::time::timeout(PATIENCE, question).await.ok()?.ok()?;
    let answer: Value = serde_json::from_slice(&answer.payload).ok()?;
    Timestamp::parse(answer["ts"].as_str()?)
}

/// When a server flushes acknowledged data to disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncPolicy {
    /// Before the acknowledgement.
    Always,
    /// At this interval.
    Interval(Duration),
    /// The server does not tell.
    Unknown,
}

impl fmt::Display for SyncPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SyncPolicy::Always => f.write_str("always"),
            SyncPolicy::Interval(every) => write!(f, "interval {}", length(*every)),
            SyncPolicy::Unknown => f.write_str("unknown"),
        }
    }
}

fn length(of: Duration) -> String {
    match of.as_secs() {
        0 => format!("{}ms", of.as_millis()),
        secs if secs % 3600 == 0 => format!("{}h", secs / 3600),
        secs if secs % 60 == 0 => format!("{}m", secs / 60),
        secs => format!("{secs}s"),
    }
}

impl SyncPolicy {
    /// The guarantee that holds for all of several servers.
    fn weakest(all: impl IntoIterator<Item = SyncPolicy>) -> SyncPolicy {
        let weaker = |a: SyncPolicy, b: SyncPolicy| match (a, b) {
            (SyncPolicy::Unknown, _) | (_, SyncPolicy::Unknown) => SyncPolicy::Unknown,
            (SyncPolicy::Interval(a), SyncPolicy::Interval(b)) => SyncPolicy::Interval(a.max(b)),
            (SyncPolicy::Interval(a), SyncPolicy::Always) | (SyncPolicy::Always, SyncPolicy::Interval(a)) => {
                SyncPolicy::Interval(a)
            }
            (SyncPolicy::Always, SyncPolicy::Always) => SyncPolicy::Always,
        };
        all.into_iter().reduce(weaker).unwrap_or(SyncPolicy::Unknown)
    }
}

/// Describes in a sentence which failures an acknowledged event survives.
pub fn guarantee(replicas: usize, sync: SyncPolicy) -> String {
    let servers = match replicas {
        0 | 1 => "a crash of the server".to_owned(),
        // A majority must remain.
        2 => "a crash of both servers".to_owned(),
        n if (n - 1) / 2 == 1 => format!("the loss of any one of its {n} servers and a crash of all of them"),
        n => format!(
            "the loss of any {} of its {n} servers and a crash of all of them",
            (n - 1) / 2
        ),
    };
    let disk = if replicas <= 1 {
        ", but not the loss of that server's disk"
    } else {
        ""
    };
    match (sync, replicas <= 1) {
        (SyncPolicy::Always, true) => {
            format!("an acknowledged event survives {servers} and a power cut{disk}")
        }
        (SyncPolicy::Always, false) => {
            format!("an acknowledged event survives {servers}, and a power cut of all of them at once")
        }
        (SyncPolicy::Interval(every), true) => format!(
            "an acknowledged event survives {servers}, but a power cut can take what was published in the last {}\
             {}",
            length(every),
            ", and the loss of that server's disk takes everything"
        ),
        (SyncPolicy::Interval(_), false) => format!(
            "an acknowledged event survives {servers}, but a power cut of all of them at once can take whole streams: \
             set sync_interval: always where that can happen"
        ),
        (SyncPolicy::Unknown, true) => format!(
            "an acknowledged event survives {servers}{disk}; whether it survives a power cut is not known, because \
             the server does not say how it writes to disk"
        ),
        (SyncPolicy::Unknown, false) => format!(
            "an acknowledged event survives {servers}; whether it survives a power cut of all of them at once is not \
             known, because the servers do not say how they write to disk"
        ),
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerStatus {
    pub name: String,
    pub version: String,
    pub sync: SyncPolicy,
}

/// A replica of a stream on a server that is not the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamReplicaStatus {
    pub server: String,
    pub current: bool,
    pub offline: bool,
    /// Number of operations that the replica lags behind.
    pub lag: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamStatus {
    pub name: String,
    /// `None` if there is no leader, or for a single server.
    pub leader: Option<String>,
    pub others: Vec<StreamReplicaStatus>,
    pub replicas: usize,
    pub messages: u64,
    pub bytes: u64,
    pub last_sequence: u64,
    /// Why nothing is known of the stream.
    pub trouble: Option<String>,
}

/// A report on the health of JetStream.
#[derive(Clone, Debug)]
pub struct JetStreamReport {
    /// Version of the server that this node is connected to; `None` while disconnected.
    pub version: Option<String>,
    /// The servers that tell how they write to disk.
    pub servers: Vec<ServerStatus>,
    /// Number of replicas of the stream with the fewest.
    pub replicas: usize,
    pub sync: SyncPolicy,
    pub guarantee: String,
    /// The partitions' streams ordered by number, then the others.
    pub streams: Vec<StreamStatus>,
    pub partitions: u8,
}

impl JetStreamReport {
    /// Reasons why JetStream currently cannot store data.
    pub fn trouble(&self) -> Vec<String> {
        let mut trouble = Vec::new();
        if self.version.is_none() {
            trouble.push("there is no connection to a NATS server".into());
        }
        let streams = self.streams.iter().filter_map(|stream| {
            let why = stream.trouble.as_ref()?;
            Some(format!("stream {} cannot be written: {why}", stream.name))
        });
        trouble.extend(streams);
        trouble.extend(self.spent(EVENT_SEQUENCE_MAX));
        trouble
    }

    /// Partitions whose streams will run out of numbers; reported early enough to act.
    pub fn nearly_spent(&self) -> Vec<String> {
        match self.spent(EVENT_SEQUENCE_MAX) {
            spent if spent.is_empty() => self.spent(NEARLY_SPENT),
            _ => Vec::new(),
        }
    }

    /// Like this report, without the missing streams of partitions that are starting and have not
    /// created them yet.
    pub fn without_missing(&self, starting: &BTreeSet<u8>) -> JetStreamReport {
        let mut report = self.clone();
        let partitions = report.streams.iter_mut().take(usize::from(self.partitions));
        for (number, stream) in (0..=u8::MAX).zip(partitions) {
            if starting.contains(&number) && stream.trouble.as_deref() == Some(NOT_THERE) {
                stream.trouble = None;
            }
        }
        report
    }

    fn spent(&self, from: u64) -> Vec<String> {
        let partitions = self.streams.iter().take(usize::from(self.partitions));
        let spent = partitions.filter(|stream| stream.last_sequence >= from);
        let told = |stream: &StreamStatus| {
            let percent = u128::from(stream.last_sequence) * 100 / u128::from(EVENT_SEQUENCE_MAX);
            match stream.last_sequence >= EVENT_SEQUENCE_MAX {
                true => format!("stream {} takes no events any more: {SPENT}", stream.name),
                false => format!("stream {} has used {percent} % of its numbers", stream.name),
            }
        };
        spent.map(told).collect()
    }
}

/// Examines the health of JetStream on demand and caches the result for a short time.
pub struct JetStreamHealth {
    connection: NatsConnection,
    settings: JetStreamSettings,
    partitions: u8,
    streams: Vec<String>,
    report: Mutex<Option<(Instant, Arc<JetStreamReport>)>>,
    servers: Mutex<Option<(Instant, Vec<ServerStatus>)>>,
}

impl JetStreamHealth {
    /// `others` are streams besides those of the partitions.
    pub fn new(
        connection: NatsConnection,
        settings: JetStreamSettings,
        partitions: u8,
        others: Vec<String>,
    ) -> JetStreamHealth {
        let own = (0..partitions).map(|number| connection.names.partition(number));
        JetStreamHealth {
            streams: own.chain(others).collect(),
            connection,
            settings,
            partitions,
            report: Mutex::default(),
            servers: Mutex::default(),
        }
    }

    /// The health now, or up to two seconds ago. Takes at most a few seconds.
    pub async fn look(&self) -> Arc<JetStreamReport> {
        let mut known = self.report.lock().await;
        if let Some((when, report)) = &*known
            && when.elapsed() < FRESH
        {
            return report.clone();
        }
        let (servers, streams) = tokio::join!(self.servers(), self.streams());
        let report = Arc::new(self.put_together(servers, streams));
        *known = Some((Instant::now(), report.clone()));
        report
    }

    /// Makes the next look examine JetStream again, regardless of the cache.
    pub async fn forget(&self) {
        *self.report.lock().await = None;
    }

    fn put_together(&self, servers: Vec<ServerStatus>, streams: Vec<StreamStatus>) -> JetStreamReport {
        let told = streams
            .iter()
            .filter(|stream| stream.trouble.is_none())
            .map(|stream| stream.replicas);
        let replicas = told.min().unwrap_or(self.settings.replicas);
        let sync = SyncPolicy::weakest(servers.iter().map(|server| server.sync));
        let connected = self.connection.is_connected();
        JetStreamReport {
            version: connected.then(|| self.connection.client.server_info().version.clone()),
            servers,
            replicas,
            sync,
            guarantee: guarantee(replicas, sync),
            streams,
            partitions: self.partitions,
        }
    }

    async fn streams(&self) -> Vec<StreamStatus> {
        join_all(self.streams.iter().map(|name| self.stream(name))).await
    }

    async fn stream(&self, name: &str) -> StreamStatus {
        let ask = async {
            let stream = self.connection.asking.get_stream_no_info(name).await;
            let stream = stream.map_err(|e| error_chain(&e))?;
            stream.get_info().await.map_err(|e| {
                let source = e
                    .source()
                    .and_then(|source| source.downcast_ref::<jetstream::Error>());
                match source.map(jetstream::Error::error_code) {
                    Some(ErrorCode::STREAM_NOT_FOUND) => NOT_THERE.into(),
                    _ => error_chain(&e),
                }
            })
        };
        match tokio::time::timeout(PATIENCE, ask).await {
            Ok(Ok(info)) => describe(name, &info),
            Ok(Err(why)) => StreamStatus {
                name: name.into(),
                trouble: Some(why),
                ..StreamStatus::default()
            },
            Err(_) => StreamStatus {
                name: name.into(),
                trouble: Some("its leader does not answer".into()),
                ..StreamStatus::default()
            },
        }
    }

    /// How the servers write to disk, as far as they tell.
    async fn servers(&self) -> Vec<ServerStatus> {
        let mut known = self.servers.lock().await;
        if let Some((when, servers)) = &*known
            && when.elapsed() < SYNC_FRESH
        {
            return servers.clone();
        }
        let servers = match &self.settings.monitor_urls[..] {
            [] => self.ask_system().await,
            urls => join_all(urls.iter().map(|url| monitor(url))).await,
        };
        *known = Some((Instant::now(), servers.clone()));
        servers
    }

    /// Asks by means of the system account, if there are credentials for it.
    async fn ask_system(&self) -> Vec<ServerStatus> {
        let Some(auth) = self.settings.system.clone() else {
            return Vec::new();
        };
        let settings = JetStreamSettings {
            auth,
            ..self.settings.clone()
        };
        let asked = tokio::time::timeout(PATIENCE * 3, async {
            let client = connection::connect(&settings, "postrider/health", |_| {}).await?;
            let all = gather(&client).await;
            let _ = client.drain().await;
            Ok::<_, postrider_store::Error>(all)
        });
        match asked.await {
            Ok(Ok(servers)) => servers,
            Ok(Err(e)) => {
                tracing::warn!(error = %e, "the system account cannot be asked");
                Vec::new()
            }
            Err(_) => Vec::new(),
        }
    }
}

/// Collects one answer per server until no more arrive.
async fn gather(client: &async_nats::Client) -> Vec<ServerStatus> {
    let mut servers = BTreeMap::new();
    let inbox = client.new_inbox();
    let Ok(mut replies) = client.subscribe(inbox.clone()).await else {
        return Vec::new();
    };
    let question = Bytes::from_static(b"{\"config\":true}");
    if client
        .publish_with_reply("$SYS.REQ.SERVER.PING.JSZ", inbox, question)
        .await
        .is_err()
    {
        return Vec::new();
    }
    let until = Instant::now() + PATIENCE;
    while let Ok(Some(reply)) = tokio::time::timeout_at(until, replies.next()).await {
        let Ok(answer) = serde_json::from_slice::<Value>(&reply.payload) else {
            break;
        };
        let text = |of: &str| answer["server"][of].as_str().unwrap_or_default().to_owned();
        let server = ServerStatus {
            name: text("name"),
            version: text("ver"),
            sync: sync_of(&answer["data"]["config"]),
        };
        servers.insert(server.name.clone(), server);
    }
    servers.into_values().collect()
}

/// Reads a server's name, version and sync setting from its HTTP monitoring.
async fn monitor(url: &str) -> ServerStatus {
    let answer = match tokio::time::timeout(PATIENCE, get(url)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(why)) => {
            tracing::warn!(url, why, "a NATS server's monitor cannot be read");
            Value::Null
        }
        Err(_) => Value::Null,
    };
    let text = |of: &str| answer[of].as_str().unwrap_or_default().to_owned();
    ServerStatus {
        name: text("server_name"),
        version: text("version"),
        sync: sync_of(&answer["jetstream"]["config"]),
    }
}

fn sync_of(config: &Value) -> SyncPolicy {
    if config["sync_always"].as_bool() == Some(true) {
        return SyncPolicy::Always;
    }
    match config["sync_interval"].as_u64() {
        Some(nanos) if nanos > 0 => SyncPolicy::Interval(Duration::from_nanos(nanos)),
        _ => SyncPolicy::Unknown,
    }
}

/// Host and port of a monitor's address, and the path prefix of its pages.
fn address(url: &str) -> Result<(&str, &str), String> {
    let rest = url.strip_prefix("http://").ok_or("only http:// can be read")?;
    let (host, base) = rest.split_once('/').unwrap_or((rest, ""));
    let well = !host.is_empty() && !host.contains('@') && url.bytes().all(|b| b.is_ascii_graphic());
    well.then_some((host, base.trim_end_matches('/')))
        .ok_or_else(|| "it is not an address".into())
}

/// Fetches a page of a monitor. A single small request to a configured server needs no HTTP client.
async fn get(url: &str) -> Result<Value, String> {
    let (host, base) = address(url)?;
    let slash = if base.is_empty() { "" } else { "/" };
    let target = if host
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok())
    {
        host.to_owned()
    } else {
        format!("{host}:80")
    };
    let failed = |e: std::io::Error| e.to_string();
    let mut stream = TcpStream::connect(target).await.map_err(failed)?;
    let request = format!("GET {slash}{base}/varz HTTP/1.0\r\nHost: {host}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.map_err(failed)?;
    let mut answer = Vec::new();
    stream
        .take(ANSWER_BYTES_MAX)
        .read_to_end(&mut answer)
        .await
        .map_err(failed)?;
    let body = answer
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .ok_or("it does not speak HTTP")?;
    if !answer.starts_with(b"HTTP/1.") || answer.get(9..12) != Some(b"200") {
        return Err("it does not answer with 200".into());
    }
    serde_json::from_slice(&answer[body + 4..]).map_err(|_| "it does not answer with JSON".into())
}

fn describe(name: &str, info: &Info) -> StreamStatus {
    let cluster = info.cluster.as_ref();
    let leader = cluster.and_then(|cluster| cluster.leader.clone());
    let replicas = info.config.num_replicas;
    let copies = cluster
        .map(|cluster| &cluster.replicas[..])
        .unwrap_or_default()
        .iter();
    StreamStatus {
        name: name.into(),
        trouble: (leader.is_none() && replicas > 1).then(|| "it has no leader".into()),
        leader,
        others: copies
            .map(|copy| StreamReplicaStatus {
                server: copy.name.clone(),
                current: copy.current,
                offline: copy.offline,
                lag: copy.lag.unwrap_or(0),
            })
            .collect(),
        replicas,
        messages: info.state.messages,
        bytes: info.state.bytes,
        last_sequence: info.state.last_sequence,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_that_nobody_has_made_yet_are_no_trouble_and_lost_ones_are() {
        let stream = |name: &str, why: &str| StreamStatus {
            name: name.into(),
            trouble: Some(why.into()),
            ..StreamStatus::default()
        };
        let report = JetStreamReport {
            version: Some("2.12.0".into()),
            servers: Vec::new(),
            replicas: 1,
            sync: SyncPolicy::Unknown,
            guarantee: String::new(),
            streams: vec![
                stream("x-p00", NOT_THERE),
                stream("x-p01", NOT_THERE),
                stream("x-p02", "it has no leader"),
                stream("x-catalog", NOT_THERE),
            ],
            partitions: 3,
        };
        let trouble = report.without_missing(&[0, 2, 3].into()).trouble();
        assert_eq!(trouble.len(), 3, "{trouble:?}");
        for (told, name) in trouble.iter().zip(["x-p01", "x-p02", "x-catalog"]) {
            assert!(told.contains(name), "{told}");
        }
    }

    #[test]
    fn streams_that_use_up_their_numbers_are_named() {
        let report = |partition: u64, other: u64| {
            let stream = |name: &str, last_sequence| StreamStatus {
                name: name.into(),
                last_sequence,
                ..StreamStatus::default()
            };
            JetStreamReport {
                version: Some("2.12.0".into()),
                servers: Vec::new(),
                replicas: 1,
                sync: SyncPolicy::Unknown,
                guarantee: String::new(),
                streams: vec![stream("x-p00", partition), stream("x-catalog", other)],
                partitions: 1,
            }
        };
        let most = u64::MAX;
        let fine = report(NEARLY_SPENT - 1, most);
        assert_eq!((fine.trouble(), fine.nearly_spent()), (vec![], vec![]));
        let soon = report(NEARLY_SPENT, most);
        assert!(soon.trouble().is_empty());
        assert_eq!(soon.nearly_spent(), ["stream x-p00 has used 89 % of its numbers"]);
        let over = report(EVENT_SEQUENCE_MAX, most);
        assert!(over.trouble()[0].starts_with("stream x-p00 takes no events any more"));
        assert!(over.nearly_spent().is_empty());
    }

    #[test]
    fn the_guarantee_is_told_for_every_setting() {
        let every = SyncPolicy::Interval(Duration::from_secs(120));
        let check = |replicas, sync, has: &[&str], has_not: &[&str]| {
            let text = guarantee(replicas, sync);
            for part in has {
                assert!(
                    text.contains(part),
                    "{replicas} {sync}: {part:?} is missing in {text:?}"
                );
            }
            for part in has_not {
                assert!(!text.contains(part), "{replicas} {sync}: {part:?} is in {text:?}");
            }
            assert!(
                !text.ends_with('.') && !text.contains('\n') && !text.contains("  "),
                "{text:?}"
            );
        };
        check(
            1,
            SyncPolicy::Always,
            &[
                "a crash of the server and a power cut",
                "not the loss of that server's disk",
            ],
            &["not known"],
        );
        check(
            1,
            every,
            &["a power cut can take", "last 2m", "disk takes everything"],
            &["not known", "any one"],
        );
        check(
            1,
            SyncPolicy::Unknown,
            &["a crash of the server", "is not known", "disk"],
            &["2m"],
        );
        check(
            3,
            SyncPolicy::Always,
            &["any one of its 3 servers", "and a power cut of all of them"],
            &["can take", "not known"],
        );
        check(
            3,
            every,
            &[
                "any one of its 3 servers",
                "can take whole streams",
                "sync_interval: always",
            ],
            &["not known"],
        );
        check(
            3,
            SyncPolicy::Unknown,
            &["any one of its 3 servers", "is not known"],
            &["can take"],
        );
        check(
            5,
            SyncPolicy::Always,
            &["any 2 of its 5 servers", "and a power cut of all of them"],
            &["can take", "not known"],
        );
        check(
            5,
            every,
            &["any 2 of its 5 servers", "can take whole streams"],
            &["not known"],
        );
        check(
            5,
            SyncPolicy::Unknown,
            &["any 2 of its 5 servers", "is not known"],
            &["can take"],
        );
    }

    #[test]
    fn the_weakest_server_decides() {
        let two = SyncPolicy::Interval(Duration::from_secs(2));
        let four = SyncPolicy::Interval(Duration::from_secs(4));
        assert_eq!(SyncPolicy::weakest([]), SyncPolicy::Unknown);
        assert_eq!(
            SyncPolicy::weakest([SyncPolicy::Always, SyncPolicy::Always]),
            SyncPolicy::Always
        );
        assert_eq!(SyncPolicy::weakest([SyncPolicy::Always, two, four]), four);
        assert_eq!(
            SyncPolicy::weakest([four, SyncPolicy::Unknown, SyncPolicy::Always]),
            SyncPolicy::Unknown
        );
    }

    #[test]
    fn settings_are_read_as_servers_write_them() {
        let read = |text: &str| sync_of(&serde_json::from_str(text).unwrap());
        assert_eq!(
            read(r#"{"sync_interval":120000000000,"strict":true}"#).to_string(),
            "interval 2m"
        );
        assert_eq!(
            read(r#"{"sync_interval":120000000000,"sync_always":true}"#).to_string(),
            "always"
        );
        assert_eq!(read(r#"{"sync_interval":1500000000}"#).to_string(), "interval 1s");
        assert_eq!(read("{}").to_string(), "unknown");
        assert_eq!(read("null"), SyncPolicy::Unknown);
    }

    #[test]
    fn addresses_of_monitors_are_checked() {
        assert_eq!(address("http://host:8222"), Ok(("host:8222", "")));
        assert_eq!(address("http://host:8222/nats/"), Ok(("host:8222", "nats")));
        for wrong in [
            "https://host:8222",
            "host:8222",
            "http://",
            "http://a:b@host",
            "http://host/ x",
        ] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }
}
