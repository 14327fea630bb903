//! A server with stores in memory, called over an in-memory connection, and webhooks whose paths
//! decide how they answer.

use crate::access::{ConfiguredClient, Role};
use crate::own_address::ConnectionEnds;
use crate::{Config, EdgeAccess, Server, declare};
use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Method};
use hyper_util::rt::TokioIo;
use postrider_core::ids::Secret;
use postrider_core::json::RawJson;
use postrider_core::profile::Profiles;
use postrider_core::time::{Clock, Sleep, Timestamp};
use postrider_engine::blobs::{BlobError, BlobStore, WrittenBlobVersion};
use postrider_engine::clock::SystemClock;
use postrider_engine::dead_letters::DeadLetterService;
use postrider_engine::deliver::{DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport};
use postrider_engine::{Engine, EngineParts, dispatch, handshake};
use postrider_store::Catalog;
use postrider_store::memory::{MemoryArchive, MemoryCatalog, MemoryLog};
use postrider_wire::resources::{self, Road};
use postrider_wire::token::SigningKey;
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

pub const ACCOUNT: &str = "00000000-0000-0000-0000-000000000001";
pub const GROUP: &str = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1";
pub const VERSION: &str = "2022-06-15";
const NOW: Timestamp = Timestamp::from_secs(1_790_000_000); // 2026-09-21

/// A clock that stands still.
pub struct LabClock;

impl Clock for LabClock {
    fn now(&self) -> Timestamp {
        NOW
    }
    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        match deadline <= NOW {
            true => Box::pin(std::future::ready(())),
            false => Box::pin(std::future::pending()),
        }
    }
}

/// Webhooks whose paths decide: `/no…` refuses, `/later…` wants manual validation, `/never…` does
/// not answer, all others agree at once.
struct ScriptedWebhooks;

#[async_trait]
impl DeliveryTransport for ScriptedWebhooks {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        let path = request.url.path();
        if path.starts_with("/never") {
            std::future::pending::<()>().await;
        }
        let mut answer = DeliveryAnswer {
            status: 200,
            ..DeliveryAnswer::default()
        };
        if path.starts_with("/no") {
            answer.status = 404;
        } else if !path.starts_with("/later") {
            let event: Value = serde_json::from_slice(&request.body_bytes()).unwrap_or_default();
            let code = &event[0]["data"]["validationCode"];
            answer.body = json!({ "validationResponse": code }).to_string().into();
            let origin = hyper::header::HeaderValue::from_static("*");
            answer.headers.insert("webhook-allowed-origin", origin);
        }
        DeliveryReply::Answered(answer)
    }
}

/// A storage account to which everything can be written.
struct LabStorageAccount;

#[async_trait]
impl BlobStore for LabStorageAccount {
    fn accounts(&self) -> Vec<String> {
        vec!["devstoreaccount1".into()]
    }
    fn check_name(&self, _: &str, _: &str) -> Result<(), String> {
        Ok(())
    }
    async fn probe(&self, _: &str, _: &str) -> Result<(), BlobError> {
        Ok(())
    }
    async fn put(&self, _: &str, _: &str, path: &str, _: Bytes) -> Result<WrittenBlobVersion, BlobError> {
        Ok(WrittenBlobVersion {
            etag: "0".into(),
            url: path.into(),
        })
    }
    async fn get(&self, _: &str, _: &str, path: &str) -> Result<Bytes, BlobError> {
        Err(BlobError::NotFound(path.into()))
    }
    async fn delete(&self, _: &str, _: &str, _: &str) -> Result<(), BlobError> {
        Ok(())
    }
}

#[derive(Clone)]
pub struct ApiTestServer {
    pub server: Arc<Server>,
    /// The connection that requests arrive on.
    pub ends: ConnectionEnds,
}

/// A connection from this machine to the default address.
const ENDS: ConnectionEnds = ConnectionEnds {
    peer: IpAddr::V4(Ipv4Addr::LOCALHOST),
    local: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 443),
};

#[derive(Debug)]
pub struct TestAnswer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Value,
    /// The body as it was received.
    pub bytes: Bytes,
}

impl TestAnswer {
    #[track_caller]
    pub fn expect(self, status: u16) -> TestAnswer {
        assert_eq!(self.status, status, "{}", self.body);
        self
    }

    #[track_caller]
    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).unwrap_or_else(|| panic!("no {name}"));
        value.to_str().expect("it is text")
    }

    /// Code and message of a refusal.
    pub fn error(&self) -> (&str, &str) {
        let text = |name: &str| self.body["error"][name].as_str().unwrap_or_default();
        (text("code"), text("message"))
    }

    pub fn properties(&self) -> &Value {
        &self.body["properties"]
    }

    /// The names in a list.
    #[track_caller]
    pub fn names(&self) -> Vec<String> {
        let list = self.body["value"].as_array().expect("a list");
        list.iter()
            .map(|one| one["name"].as_str().unwrap().to_owned())
            .collect()
    }
}

impl ApiTestServer {
    /// `asking`: whether webhooks need a handshake before they get events.
    pub async fn new(asking: bool) -> ApiTestServer {
        ApiTestServer::with(asking, |_| {}).await
    }

    pub async fn with(asking: bool, change: impl FnOnce(&mut Server)) -> ApiTestServer {
        ApiTestServer::on(Arc::new(MemoryCatalog::default()), asking, change).await
    }

    pub async fn on(
        catalog: Arc<dyn Catalog>,
        asking: bool,
        change: impl FnOnce(&mut Server),
    ) -> ApiTestServer {
        let archive = Arc::new(MemoryArchive::default());
        let engine = Engine::start(EngineParts {
            log: Arc::new(MemoryLog::new(7)),
            catalog,
            transport: Arc::new(ScriptedWebhooks),
            clock: Arc::new(LabClock),
            wall: Arc::new(SystemClock),
            profiles: Profiles::default(),
            id_prefix: format!("/subscriptions/{ACCOUNT}"),
            dispatch: dispatch::Config::default(),
            dead_letters: DeadLetterService::new(Arc::new(LabStorageAccount), archive, None),
            handshake: handshake::HandshakeRules {
                enabled: asking,
                ..handshake::HandshakeRules::default()
            },
            recorder: Arc::new(postrider_engine::recorder::NoRecorder),
            node: postrider_engine::node::NodeIdentity::alone(),
        })
        .await
        .unwrap();
        let config = Config {
            limits: Default::default(),
            resource_limits: resources::ResourceLimits::default(),
            edge: EdgeAccess::Open,
            host_names: vec!["localhost".into()],
            public_url: None,
            account: ACCOUNT.into(),
            tenant: "t".into(),
            resource_group: "rg1".into(),
            location: "westus2".into(),
            clients: vec![client("owner", Role::Owner), client("reader", Role::Reader)],
            signing_key: SigningKey::fresh(),
            throttle: crate::throttle::ThrottleRules::default(),
            managed_identity: None,
            naming_key: Secret::new("naming"),
            storage_accounts: Vec::new(),
            module_path: "/iotHubs/h/devices/d/modules/m".into(),
            profile: "cloud-2021".into(),
            version: "0",
            loopback_only: true,
            client_bounds: crate::limits::ClientBounds::default(),
            plain_http_exposed: None,
            quotas: crate::quotas::Quotas::AZURE,
            publishing_max: 8,
            filter_bytes_max: 1 << 20,
        };
        let mut server = Server::new(engine, config, Arc::new(SystemClock), 1);
        change(&mut server);
        ApiTestServer {
            server: Arc::new(server),
            ends: ENDS,
        }
    }

    /// An `Authorization` header with a token that this server issued to the client.
    pub fn token_of(&self, client: &str) -> String {
        let seconds = self.server.wall.now().nanos() / 1_000_000_000;
        let claims = json!({
            "iss": "https://localhost/t/v2.0", "aud": "https://management.azure.com/", "appid": client,
            "jti": "token", "epoch": self.server.access.epoch(), "exp": seconds + 600,
        });
        format!("Bearer {}", self.server.access.signing_key().sign(&claims))
    }

    /// A topic that every API reaches.
    pub async fn topic(&self, name: &str) {
        let body = RawJson::parse(r#"{"properties":{"edge":true}}"#).unwrap();
        declare::topic(&self.server, body, Road::Config, name, None)
            .await
            .unwrap();
    }

    pub async fn domain(&self, name: &str, auto_create: bool) {
        let flags = json!({"autoCreateTopicWithFirstSubscription": auto_create});
        let body = json!({ "properties": flags }).to_string();
        let body = RawJson::parse(&body).unwrap();
        declare::domain(&self.server, body, Road::Config, name, None)
            .await
            .unwrap();
    }

    pub async fn system_topic(&self, name: &str) {
        let source = format!("{GROUP}/providers/Microsoft.Storage/storageAccounts/devstoreaccount1");
        let body =
            json!({"properties": {"source": source, "topicType": "Microsoft.Storage.StorageAccounts"}});
        let body = body.to_string();
        let body = RawJson::parse(&body).unwrap();
        declare::system_topic(&self.server, body, Road::Config, name)
            .await
            .unwrap();
    }

    /// Sends a request over a new connection, as the owner unless another credential is given.
    pub async fn send(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        headers: &[(&str, &str)],
    ) -> TestAnswer {
        let mut all = headers.to_vec();
        let given = |name: &str| headers.iter().any(|(known, _)| *known == name);
        if !given("host") {
            all.push(("host", "localhost"));
        }
        if !given("authorization") {
            all.push(("authorization", "Bearer owner secret"));
        }
        self.exchange(method, path, body, &all).await
    }

    /// Sends a request over a new connection, with these headers only.
    pub async fn exchange(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        headers: &[(&str, &str)],
    ) -> TestAnswer {
        let body = body.map(Value::to_string).unwrap_or_default();
        self.exchange_text(method, path, body, headers).await
    }

    /// Like `exchange`, with a body that need not be JSON.
    pub async fn exchange_text(
        &self,
        method: &str,
        path: &str,
        body: String,
        headers: &[(&str, &str)],
    ) -> TestAnswer {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let stop = CancellationToken::new();
        let serving = crate::http::connection(
            self.server.clone(),
            theirs,
            crate::http::ConnectionOrigin::test(self.ends),
            stop,
        );
        let asking = async {
            let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(ours))
                .await
                .unwrap();
            let mut request = hyper::Request::builder()
                .method(Method::from_bytes(method.as_bytes()).unwrap())
                .uri(path);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let request = request.body(Full::new(Bytes::from(body))).unwrap();
            let exchange = async move {
                let response = sender.send_request(request).await.unwrap();
                let (head, body) = response.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                TestAnswer {
                    status: head.status.as_u16(),
                    headers: head.headers,
                    body: serde_json::from_slice(&body).unwrap_or_default(),
                    bytes: body,
                }
            };
            let (got, _) = tokio::join!(exchange, connection);
            got
        };
        let (got, ()) = tokio::join!(asking, serving);
        got
    }

    /// Sends a request to the management API.
    pub async fn arm(&self, method: &str, path: &str, body: Option<Value>) -> TestAnswer {
        self.arm_with(method, path, body, &[]).await
    }

    pub async fn arm_with(
        &self,
        method: &str,
        path: &str,
        body: Option<Value>,
        headers: &[(&str, &str)],
    ) -> TestAnswer {
        let sign = if path.contains('?') { '&' } else { '?' };
        let path = format!("{path}{sign}api-version={VERSION}");
        self.send(method, &path, body.as_ref(), headers).await
    }

    /// Sends a request to the edge API.
    pub async fn edge(&self, method: &str, path: &str, body: Option<Value>) -> TestAnswer {
        let path = format!("{path}?api-version=2019-01-01-preview");
        let headers = [("content-type", "application/json")];
        self.send(method, &path, body.as_ref(), &headers).await
    }

    /// Waits for the end of the operation that an answer names: its status, and the code of its
    /// error.
    pub async fn ends(&self, answer: &TestAnswer) -> (String, String) {
        let url = answer.header("azure-asyncoperation");
        let path = url
            .strip_prefix("https://localhost")
            .expect("a URL of this server")
            .to_owned();
        // Everything happens in memory, so a thousand polls are plenty.
        for _ in 0..1000 {
            let got = self.send("GET", &path, None, &[]).await.expect(200);
            let status = got.body["status"].as_str().unwrap().to_owned();
            if status != "InProgress" {
                return (status, got.error().0.to_owned());
            }
            tokio::task::yield_now().await;
        }
        panic!("the operation does not end");
    }
}

fn client(id: &str, role: Role) -> ConfiguredClient {
    ConfiguredClient {
        id: id.into(),
        secret: Secret::new(format!("{id} secret")),
        role,
    }
}

/// A body with a webhook as destination and these further properties.
pub fn web_hook(path: &str, more: Value) -> Value {
    let mut properties = json!({"destination": {"endpointType": "WebHook", "properties": {
        "endpointUrl": format!("https://hook{path}")}}});
    for (name, value) in more.as_object().unwrap() {
        properties[name] = value.clone();
    }
    json!({ "properties": properties })
}
