//! Connections to JetStream.

use crate::sealer::ValueSealer;
use async_nats::jetstream::context::{AccountErrorKind, ContextBuilder};
use async_nats::jetstream::{self, stream};
use async_nats::{ConnectErrorKind, ConnectOptions, Event, ServerAddr};
use postrider_core::ids::Secret;
use postrider_store::Error;
use postrider_store::seal::Keyring;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The oldest supported server version.
const SERVER_MIN: (u64, u64) = (2, 12);
/// How long an acknowledgement is awaited before the outcome of the message is looked up.
const ACK_WAIT: Duration = Duration::from_secs(2);
/// How long an answer to a read is awaited; short, because reads can be repeated at another server.
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// A server that answers none of three consecutive pings is gone.
const PING_EVERY: Duration = Duration::from_secs(2);
/// Allowance for headers, which servers count as part of a message.
const HEADERS_MAX: usize = 4 << 10;

/// Settings of the store, equal on all nodes except for how to reach the servers.
#[derive(Clone, Debug)]
pub struct JetStreamSettings {
    /// `nats://host:port` or `tls://host:port`, any servers of the same cluster.
    pub urls: Vec<String>,
    pub auth: NatsAuth,
    pub tls: NatsTls,
    /// Number of servers that store each stream.
    pub replicas: usize,
    pub prefix: String,
    /// Fixed when the cluster starts for the first time.
    pub partitions: u8,
    pub lease: Duration,
    /// The servers' monitoring addresses, which tell how they write to disk.
    pub monitor_urls: Vec<String>,
    /// Credentials of the servers' system account, which tells the same without monitoring.
    pub system: Option<NatsAuth>,
    /// Keys that values with secrets are sealed under, equal on all nodes; without keys they are
    /// not sealed.
    pub keys: Option<Arc<Keyring>>,
}

impl Default for JetStreamSettings {
    fn default() -> JetStreamSettings {
        JetStreamSettings {
            urls: vec!["nats://127.0.0.1:4222".into()],
            auth: NatsAuth::None,
            tls: NatsTls::default(),
            replicas: 1,
            prefix: "postrider".into(),
            partitions: 8,
            lease: Duration::from_secs(5),
            monitor_urls: Vec::new(),
            system: None,
            keys: None,
        }
    }
}

#[derive(Clone, Debug)]
pub enum NatsAuth {
    None,
    Password {
        user: String,
        password: Secret,
    },
    Token(Secret),
    /// The seed of an NKey.
    Nkey(Secret),
    /// A file with a JWT and a seed.
    Credentials(PathBuf),
}

#[derive(Clone, Debug, Default)]
pub struct NatsTls {
    pub required: bool,
    /// CA certificates to trust in addition to those of the machine.
    pub ca: Option<PathBuf>,
    /// The client certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// Names of streams and subjects.
#[derive(Clone, Debug)]
pub struct StreamNames {
    prefix: Arc<str>,
}

impl StreamNames {
    pub fn new(prefix: &str) -> StreamNames {
        StreamNames {
            prefix: prefix.into(),
        }
    }

    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub fn partition(&self, number: u8) -> String {
        format!("{}-p{number:02}", self.prefix)
    }

    pub fn partition_subjects(&self, number: u8) -> String {
        format!("{}.p{number:02}.>", self.prefix)
    }

    pub fn all_events(&self, number: u8) -> String {
        format!("{}.p{number:02}.e.*", self.prefix)
    }

    pub fn events(&self, number: u8, chunk: u64) -> String {
        format!("{}.p{number:02}.e.{chunk}", self.prefix)
    }

    pub fn journal(&self, number: u8) -> String {
        format!("{}.p{number:02}.s", self.prefix)
    }

    pub fn snapshots(&self, number: u8) -> String {
        format!("{}.p{number:02}.n", self.prefix)
    }
}

/// Two connections, one for writing and one for reading, so that neither delays the other.
#[derive(Clone)]
pub struct NatsConnection {
    pub client: async_nats::Client,
    /// For publishing; acknowledgements have a timeout.
    pub js: jetstream::Context,
    /// For requests, on the same connection.
    pub asking: jetstream::Context,
    /// For reading, on a connection of its own.
    pub reading: jetstream::Context,
    pub names: StreamNames,
    pub replicas: usize,
    pub sealer: ValueSealer,
    reconnects: watch::Receiver<u64>,
}

impl NatsConnection {
    /// Connects and checks the server's version. `node` is the name that servers display for this
    /// connection.
    pub async fn open(settings: &JetStreamSettings, node: &str) -> Result<NatsConnection, Error> {
        let (count, reconnects) = watch::channel(0);
        let count = Arc::new(count);
        let client = connect(settings, &format!("postrider/{node}"), move |event| {
            if event == Event::Connected {
                count.send_modify(|count| *count += 1);
            }
        })
        .await?;
        check_server(&client)?;
        let reader = connect(settings, &format!("postrider/{node}/reading"), |_| {}).await?;
        let context = |client: &async_nats::Client, wait| {
            let builder = ContextBuilder::new().timeout(wait);
            builder.build(client.clone())
        };
        let js = context(&client, ACK_WAIT);
        if let Err(e) = js.query_account().await {
            let reason = error_chain(&e);
            let what = match e.kind() {
                AccountErrorKind::TimedOut => "JetStream does not answer; its servers may have no leader yet",
                _ => "the NATS server does not offer JetStream to this account",
            };
            return Err(Error::Unavailable(format!("{what}: {reason}")));
        }
        Ok(NatsConnection {
            js,
            asking: context(&client, ANSWER_WAIT),
            reading: context(&reader, ANSWER_WAIT),
            client,
            names: StreamNames::new(&settings.prefix),
            replicas: settings.replicas,
            sealer: ValueSealer::new(settings.keys.clone()),
            reconnects,
        })
    }

    /// Number of times that the writing connection was established.
    pub fn reconnects(&self) -> watch::Receiver<u64> {
        self.reconnects.clone()
    }

    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == async_nats::connection::State::Connected
    }

    /// Maximum size of a message.
    pub fn message_max(&self) -> usize {
        self.client
            .max_payload()
            .saturating_sub(HEADERS_MAX)
            .max(HEADERS_MAX)
    }

    /// The stream of this name, created if necessary: stored on disk, nothing discarded, readable
    /// from any replica.
    pub async fn stream(&self, name: &str, subjects: Vec<String>) -> Result<stream::Stream, Error> {
        let config = stream::Config {
            name: name.into(),
            subjects,
            num_replicas: self.replicas,
            storage: stream::StorageType::File,
            retention: stream::RetentionPolicy::Limits,
            discard: stream::DiscardPolicy::New,
            allow_direct: true,
            // Message ids are not used for deduplication; the window would only take memory.
            duplicate_window: Duration::from_millis(100),
            ..stream::Config::default()
        };
        let made = self.js.get_or_create_stream(config).await;
        made.map_err(|e| Error::Unavailable(format!("stream {name} is not there: {}", error_chain(&e))))
    }
}

pub(crate) async fn connect(
    settings: &JetStreamSettings,
    name: &str,
    heard: impl Fn(Event) + Send + Sync + 'static,
) -> Result<async_nats::Client, Error> {
    let shown = settings
        .urls
        .iter()
        .map(|url| without_secrets(url))
        .collect::<Vec<_>>();
    let shown = shown.join(", ");
    let unusable = |reason: String| Error::Unavailable(format!("cannot connect to {shown}: {reason}"));
    let mut servers = Vec::new();
    let mut from_url = None;
    for url in &settings.urls {
        let server: ServerAddr = url.parse().map_err(|_| {
            Error::Unavailable(format!(
                "{} is not the address of a NATS server",
                without_secrets(url)
            ))
        })?;
        // The client ignores credentials in the address.
        if let (Some(user), Some(password)) = (server.username(), server.password()) {
            from_url = Some((user.to_owned(), password.to_owned()));
        }
        servers.push(server);
    }
    let mut options = ConnectOptions::new()
        .name(name)
        .ping_interval(PING_EVERY)
        .connection_timeout(Duration::from_secs(2))
        .reconnect_delay_callback(|tries| Duration::from_millis((1 << tries.min(8)).min(250)))
        .event_callback(move |event| {
            match &event {
                Event::Connected | Event::Draining | Event::Closed => tracing::debug!(%event, "nats"),
                other => tracing::warn!(event = %other, "nats"),
            }
            heard(event);
            async {}
        });
    options = match (&settings.auth, from_url) {
        (NatsAuth::None, Some((user, password))) => options.user_and_password(user, password),
        (NatsAuth::None, None) => options,
        (NatsAuth::Password { user, password }, _) => {
            options.user_and_password(user.clone(), password.expose().into())
        }
        (NatsAuth::Token(token), _) => options.token(token.expose().into()),
        (NatsAuth::Nkey(seed), _) => options.nkey(seed.expose().into()),
        (NatsAuth::Credentials(file), _) => options.credentials_file(file).await.map_err(|e| {
            unusable(format!(
                "the credentials file {} cannot be used: {e}",
                file.display()
            ))
        })?,
    };
    let tls = &settings.tls;
    if tls.required {
        options = options.require_tls(true);
    }
    if let Some(ca) = &tls.ca {
        options = options.add_root_certificates(ca.clone());
    }
    if let Some((certificate, key)) = &tls.client {
        options = options.add_client_certificate(certificate.clone(), key.clone());
    }
    options.connect(servers).await.map_err(|e| {
        unusable(match e.kind() {
            ConnectErrorKind::AuthorizationViolation => "the server refuses these credentials".into(),
            ConnectErrorKind::Authentication => {
                format!("the credentials are not well-formed: {}", error_chain(&e))
            }
            _ => error_chain(&e),
        })
    })
}

fn check_server(client: &async_nats::Client) -> Result<(), Error> {
    let version = client.server_info().version;
    if is_new_enough(&version) {
        return Ok(());
    }
    let (major, minor) = SERVER_MIN;
    Err(Error::Unavailable(format!(
        "the NATS server has version {version}, but {major}.{minor} or later is needed"
    )))
}

fn is_new_enough(version: &str) -> bool {
    let mut numbers = version.split(['.', '-']).map(|number| number.parse::<u64>().ok());
    let (major, minor) = (numbers.next().flatten(), numbers.next().flatten());
    major.zip(minor).is_some_and(|version| version >= SERVER_MIN)
}

/// An address without credentials, for display.
pub fn without_secrets(url: &str) -> String {
    match (url.split_once("://"), url.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        (None, Some((_, host))) => host.into(),
        _ => url.into(),
    }
}

/// The text of an error with its causes.
pub fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(one) = cause {
        let more = one.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = one.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for version in ["2.12.0", "2.15.1", "3.0.0", "2.12.0-RC.1", "10.1"] {
            assert!(is_new_enough(version), "{version}");
        }
        for version in ["2.11.9", "1.99.0", "2.9.25", "", "x.y", "2"] {
            assert!(!is_new_enough(version), "{version}");
        }
    }

    #[test]
    fn secrets_of_an_address_are_not_shown() {
        let check = |url: &str, expected: &str| assert_eq!(without_secrets(url), expected);
        check("nats://me:s@cret@host:4222", "nats://host:4222");
        check("me:secret@host", "host");
        check("tls://host:1", "tls://host:1");
    }

    #[test]
    fn names_are_as_documented() {
        let names = StreamNames::new("pr");
        assert_eq!(names.partition(7), "pr-p07");
        assert_eq!(names.partition_subjects(7), "pr.p07.>");
        assert_eq!(names.events(63, 12), "pr.p63.e.12");
        assert_eq!(
            (names.journal(0), names.snapshots(0)),
            ("pr.p00.s".into(), "pr.p00.n".into())
        );
    }
}
