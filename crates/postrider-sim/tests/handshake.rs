//! Handshakes of the engine with simulated webhooks, on simulated time.

use async_trait::async_trait;
use http::{HeaderMap, HeaderValue};
use postrider_core::event::{ByteSpan, EventRef, EventSchema, PublishedBatch};
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::profile::Profiles;
use postrider_core::subscription::{
    AttributeValue, DeliveryAttribute, Destination, ResourceOrigin, Subscription, Topic, WebHook,
};
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::dead_letters::DeadLetterService;
use postrider_engine::deliver::{
    DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport, TransportFailure, TransportFailureKind,
};
use postrider_engine::handshake::{ConfirmationRefusal, OperationState};
use postrider_engine::{Engine, EngineParts, Error, dispatch, handshake};
use postrider_sim::blobs::MemoryBlobs;
use postrider_sim::clock::SimClock;
use postrider_store::memory::{MemoryArchive, MemoryCatalog, MemoryLog};
use postrider_store::{Catalog, Handshake, HandshakeResponse, HandshakeState};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

const BASE: &str = "https://here:8443";
const API: &str = "2022-06-15";

/// The webhook's reaction to the next request; the last one repeats.
#[derive(Clone)]
enum WebhookAct {
    /// Answers with the code that it was sent.
    Echo,
    Answer(u16, &'static [(&'static str, &'static str)], &'static str),
    Silence,
    Broken,
    /// Reacts like the inner act, once it is notified.
    Held(Arc<Notify>, Box<WebhookAct>),
}

struct ScriptedWebhook {
    clock: Arc<SimClock>,
    acts: Mutex<Vec<WebhookAct>>,
    asked: Mutex<Vec<(Timestamp, DeliveryRequest)>>,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
}

impl ScriptedWebhook {
    fn set(&self, acts: &[WebhookAct]) {
        let mut acts = acts.to_vec();
        acts.reverse();
        *self.acts.lock().unwrap() = acts;
    }

    fn asked(&self) -> Vec<(Timestamp, DeliveryRequest)> {
        self.asked.lock().unwrap().clone()
    }

    fn next(&self) -> WebhookAct {
        let mut acts = self.acts.lock().unwrap();
        match acts.len() {
            1 => acts[0].clone(),
            _ => acts.pop().expect("it was told what to do"),
        }
    }

    async fn act(&self, act: WebhookAct, request: &DeliveryRequest) -> DeliveryReply {
        match act {
            WebhookAct::Silence => std::future::pending().await,
            WebhookAct::Broken => DeliveryReply::Failed(TransportFailure {
                kind: TransportFailureKind::Socket,
                detail: "hook.example refused the connection".into(),
            }),
            WebhookAct::Answer(status, headers, body) => {
                let mut answer = DeliveryAnswer {
                    status,
                    body: body.into(),
                    ..DeliveryAnswer::default()
                };
                for (name, value) in headers {
                    answer.headers.insert(*name, HeaderValue::from_static(value));
                }
                DeliveryReply::Answered(answer)
            }
            WebhookAct::Echo => {
                let body = json(request);
                let code = text_after(&body, r#""validationCode":""#);
                DeliveryReply::Answered(DeliveryAnswer {
                    status: 200,
                    body: format!(r#"{{"validationResponse":"{code}"}}"#).into(),
                    headers: HeaderMap::new(),
                    ..DeliveryAnswer::default()
                })
            }
            WebhookAct::Held(go, then) => {
                go.notified().await;
                Box::pin(self.act(*then, request)).await
            }
        }
    }
}

struct OpenRequestCount<'a>(&'a AtomicUsize);

impl Drop for OpenRequestCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

#[async_trait]
impl DeliveryTransport for ScriptedWebhook {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        let now_in_flight = self.in_flight.fetch_add(1, AcqRel) + 1;
        let _in_flight = OpenRequestCount(&self.in_flight);
        self.most_in_flight.fetch_max(now_in_flight, AcqRel);
        self.asked
            .lock()
            .unwrap()
            .push((self.clock.now(), request.clone()));
        let act = self.next();
        self.act(act, &request).await
    }
}

fn json(request: &DeliveryRequest) -> String {
    String::from_utf8(request.body_bytes().to_vec()).unwrap()
}

/// The text between this and the next quote.
fn text_after(text: &str, start: &str) -> String {
    let at = text.find(start).unwrap_or_else(|| panic!("{start} in {text}")) + start.len();
    text[at..].split('"').next().unwrap().to_owned()
}

struct HandshakeSetup {
    clock: Arc<SimClock>,
    catalog: Arc<MemoryCatalog>,
    hook: Arc<ScriptedWebhook>,
    engine: Arc<Engine>,
}

async fn start(
    clock: &Arc<SimClock>,
    catalog: &Arc<MemoryCatalog>,
    hook: &Arc<ScriptedWebhook>,
) -> Arc<Engine> {
    let blobs = Arc::new(MemoryBlobs::default());
    let parts = EngineParts {
        log: Arc::new(MemoryLog::new(7)),
        catalog: catalog.clone(),
        transport: hook.clone(),
        clock: clock.clone(),
        wall: clock.clone(),
        profiles: Profiles::default(),
        id_prefix: "/subscriptions/s".into(),
        dispatch: dispatch::Config::default(),
        dead_letters: DeadLetterService::new(blobs, Arc::new(MemoryArchive::default()), None),
        handshake: handshake::HandshakeRules::default(),
        recorder: Arc::new(postrider_engine::recorder::NoRecorder),
        node: postrider_engine::node::NodeIdentity::alone(),
    };
    Engine::start(parts).await.unwrap()
}

impl HandshakeSetup {
    async fn new(acts: &[WebhookAct]) -> HandshakeSetup {
        let clock = Arc::new(SimClock::start());
        clock.keep_steady();
        let catalog = Arc::new(MemoryCatalog::default());
        let hook = Arc::new(ScriptedWebhook {
            clock: clock.clone(),
            acts: Mutex::default(),
            asked: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
        });
        hook.set(acts);
        let engine = start(&clock, &catalog, &hook).await;
        engine.put_topic(topic()).await.unwrap();
        HandshakeSetup {
            clock,
            catalog,
            hook,
            engine,
        }
    }

    /// Ends this life and begins the next.
    async fn restart(&mut self) {
        self.engine.stop(std::future::ready(())).await.unwrap();
        self.engine = start(&self.clock, &self.catalog, &self.hook).await;
    }

    async fn ask(&self, subscription: Subscription) -> Arc<Handshake> {
        self.engine.ask(subscription, BASE, API, "").await.unwrap()
    }

    /// Waits until the operation has ended.
    async fn ended(&self, operation: &str) -> OperationState {
        self.until(|| self.state(operation) != OperationState::InProgress)
            .await;
        self.state(operation)
    }

    fn state(&self, operation: &str) -> OperationState {
        let state = self.engine.handshakes.operation(operation);
        state.unwrap_or_else(|| panic!("{operation} is not known"))
    }

    async fn until(&self, what: impl Fn() -> bool) {
        let end = self.clock.now() + Duration::from_secs(3600);
        while !what() {
            assert!(self.clock.now() < end, "it does not come");
            self.pass(Duration::from_millis(10)).await;
        }
    }

    async fn pass(&self, time: Duration) {
        self.clock.sleep_until(self.clock.now() + time).await;
    }

    fn in_force(&self, name: &str) -> Option<Arc<Subscription>> {
        self.engine.directory.subscription(TopicId(1), None, name)
    }

    fn pending(&self, name: &str) -> Option<Arc<Handshake>> {
        self.engine.handshakes.pending(TopicId(1), None, name)
    }

    async fn awaiting(&self, name: &str) -> Arc<Handshake> {
        let waits = || {
            self.pending(name)
                .is_some_and(|one| matches!(one.state, HandshakeState::Awaiting { .. }))
        };
        self.until(waits).await;
        self.pending(name).unwrap()
    }

    async fn stored(&self) -> Vec<Handshake> {
        self.catalog.load().await.unwrap().handshakes
    }
}

fn topic() -> Topic {
    Topic {
        resource_group: "rg1".into(),
        location: "westus2".into(),
        created: Timestamp::from_secs(1),
        ..Topic::custom(TopicId(1), "orders", [Secret::new("one"), Secret::new("two")])
    }
}

fn subscription(id: u64, name: &str) -> Subscription {
    Subscription {
        created: Timestamp::from_secs(2),
        origin: ResourceOrigin::Azure,
        ..Subscription::new(
            SubscriptionId(id),
            TopicId(1),
            name,
            Destination::WebHook(WebHook {
                attributes: vec![
                    attribute("x-plain", "seen", false),
                    attribute("x-hidden", "hunter2", true),
                ],
                ..WebHook::new("https://hook.example/in?code=s3cret")
            }),
        )
    }
}

fn cloud(id: u64, name: &str) -> Subscription {
    Subscription {
        delivery_schema: EventSchema::CloudEvent,
        ..subscription(id, name)
    }
}

fn attribute(name: &str, value: &str, secret: bool) -> DeliveryAttribute {
    DeliveryAttribute {
        name: name.into(),
        value: AttributeValue::Static {
            value: Secret::new(value),
            secret,
        },
    }
}

const OK: WebhookAct = WebhookAct::Answer(200, &[], "");
const SUCCEEDED: OperationState = OperationState::Succeeded;

/// The query of a callback: `id` and `token`.
fn callback(handshake: &Handshake) -> (String, String) {
    let url = handshake.callback.as_ref().unwrap().expose();
    let value = |name: &str| {
        let start = url.find(&format!("{name}=")).unwrap() + name.len() + 1;
        url[start..].split('&').next().unwrap().to_owned()
    };
    (value("id"), value("token"))
}

fn failure(state: OperationState) -> String {
    match state {
        OperationState::Failed { code, message } => {
            assert_eq!(code, "Url validation");
            message
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_webhook_that_says_the_code_gets_the_subscription() {
    let go = Arc::new(Notify::new());
    let world = HandshakeSetup::new(&[WebhookAct::Held(go.clone(), Box::new(WebhookAct::Echo))]).await;
    let handshake = world.ask(subscription(7, "Audit")).await;
    assert_eq!(world.stored().await, [(*handshake).clone()]);
    world.until(|| world.hook.asked().len() == 1).await;
    // Nothing may be delivered before the webhook has answered.
    assert_eq!(world.in_force("audit"), None);
    assert_eq!(world.state(&handshake.operation), OperationState::InProgress);
    assert!(!world.pending("AUDIT").unwrap().replaces);

    let (_, request) = world.hook.asked().remove(0);
    assert_eq!(request.method, "POST");
    assert_eq!(request.url.to_string(), "https://hook.example/in?code=s3cret");
    for (name, value) in [
        ("content-type", "application/json; charset=utf-8"),
        ("aeg-event-type", "SubscriptionValidation"),
        ("aeg-subscription-name", "AUDIT"),
        ("aeg-delivery-count", "0"),
        ("aeg-metadata-version", "1"),
        ("aeg-data-version", "1"),
        ("x-plain", "seen"),
        ("x-hidden", "hunter2"),
    ] {
        assert_eq!(request.header(name), Some(value), "{name}");
    }
    let body = json(&request);
    let url = handshake.callback.as_ref().unwrap().expose();
    let id = text_after(&body, r#""id":""#);
    let at = handshake.begun;
    assert_eq!(
        body,
        format!(
            r#"[{{"id":"{id}","topic":"/subscriptions/s/resourceGroups/rg1/providers/Microsoft.EventGrid/topics/orders","subject":"","eventType":"Microsoft.EventGrid.SubscriptionValidationEvent","eventTime":"{at}","metadataVersion":"1","dataVersion":"1","data":{{"validationCode":"{}","validationUrl":"{url}"}}}}]"#,
            handshake.code
        )
    );
    assert!(
        url.starts_with("https://here:8443/eventsubscriptions/Audit/validate?id="),
        "{url}"
    );

    go.notify_one();
    assert_eq!(world.ended(&handshake.operation).await, SUCCEEDED);
    assert_eq!(world.in_force("audit").unwrap().id, SubscriptionId(7));
    assert_eq!(world.pending("audit"), None);
    assert_eq!(world.stored().await, []);
    let seen = world.engine.handshakes.seen(&handshake.operation).unwrap();
    let [exchange] = &seen.handshake.transcript[..] else {
        panic!("{seen:?}");
    };
    assert_eq!(exchange.url, "https://hook.example/in");
    assert!(exchange.headers.contains(&("x-hidden".into(), "(hidden)".into())));
    assert!(exchange.headers.contains(&("x-plain".into(), "seen".into())));
    // The answer repeats the code, which is a secret of the handshake.
    assert!(
        matches!(&exchange.received, HandshakeResponse::Answer { status: 200, body, .. }
            if body.contains("validationResponse") && !body.contains(&handshake.code)),
        "{exchange:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_refusal_changes_nothing_and_is_kept() {
    let mut world = HandshakeSetup::new(&[
        WebhookAct::Echo,
        WebhookAct::Answer(404, &[("x-why", "gone")], "no such place"),
    ])
    .await;
    let first = world.ask(subscription(7, "audit")).await;
    assert_eq!(world.ended(&first.operation).await, SUCCEEDED);
    let before = world.in_force("audit").unwrap();
    let changed = Subscription {
        labels: vec!["new".into()],
        ..subscription(8, "Audit")
    };
    let second = world.ask(changed).await;
    assert!(second.replaces);
    // A changed subscription keeps its id.
    assert_eq!(second.subscription.id, SubscriptionId(7));
    let message = failure(world.ended(&second.operation).await);
    let start = "Webhook validation handshake failed for https://hook.example/in. Http POST request failed with \
                 response code NotFound. For troublehooting, visit https://aka.ms/esvalidation. Activity id:";
    assert!(message.starts_with(start), "{message}");
    assert!(message.ends_with(" (UTC)."), "{message}");
    assert_eq!(world.in_force("audit"), Some(before.clone()));

    world.restart().await;
    assert_eq!(failure(world.state(&second.operation)), message);
    assert_eq!(world.in_force("audit"), Some(before));
    // A successful handshake is remembered only until a restart.
    assert_eq!(world.engine.handshakes.operation(&first.operation), None);
    let kept = world.engine.handshakes.seen(&second.operation).unwrap();
    let exchange = &kept.handshake.transcript[0];
    let HandshakeResponse::Answer {
        status,
        headers,
        body,
    } = &exchange.received
    else {
        panic!("{exchange:?}");
    };
    assert_eq!((*status, body.as_str()), (404, "no such place"));
    assert_eq!(headers[..], [("x-why".to_owned(), "gone".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn a_silent_webhook_is_asked_three_times() {
    let world = HandshakeSetup::new(&[WebhookAct::Silence]).await;
    let handshake = world.ask(subscription(7, "audit")).await;
    let message = failure(world.ended(&handshake.operation).await);
    assert!(message.contains("(no answer in time)"), "{message}");
    let asked = world.hook.asked();
    let offsets: Vec<u64> = asked
        .iter()
        .map(|(at, _)| at.since(handshake.begun).as_secs())
        .collect();
    assert_eq!(offsets, [0, 35, 70]);
    let codes: Vec<String> = asked
        .iter()
        .map(|(_, request)| text_after(&json(request), r#""validationCode":""#))
        .collect();
    assert!(codes.iter().all(|code| *code == handshake.code), "{codes:?}");
    assert_eq!(world.in_force("audit"), None);

    // An answer to the second request counts, and a broken connection is no reason to ask again.
    world.hook.set(&[WebhookAct::Silence, WebhookAct::Echo]);
    let handshake = world.ask(subscription(7, "audit")).await;
    assert_eq!(world.ended(&handshake.operation).await, SUCCEEDED);
    world.hook.set(&[WebhookAct::Broken]);
    let handshake = world.ask(subscription(9, "other")).await;
    let message = failure(world.ended(&handshake.operation).await);
    assert!(
        message.contains("Unknown (hook.example refused the connection)"),
        "{message}"
    );
    assert_eq!(world.hook.asked().len(), 6);
}

#[tokio::test(start_paused = true)]
async fn a_visit_answers_for_a_webhook_that_does_not() {
    let world = HandshakeSetup::new(&[OK]).await;
    for (name, make) in [
        ("plain", subscription as fn(u64, &str) -> Subscription),
        ("cloud", cloud),
    ] {
        let handshake = world.ask(make(7, name)).await;
        let (id, token) = callback(&handshake);
        assert_eq!(id, handshake.operation);
        let awaiting = world.awaiting(name).await;
        let until = HandshakeState::Awaiting {
            until: handshake.begun + Duration::from_secs(300),
        };
        assert_eq!(awaiting.state, until);
        assert_eq!(world.in_force(name), None);
        for (name, id, token) in [
            (name, id.as_str(), "guess"),
            (name, id.as_str(), &token[1..]),
            (name, id.as_str(), ""),
            (name, "nothing", &token),
            ("other", &id, &token),
        ] {
            let visit = world.engine.confirm(name, id, token).await;
            assert_eq!(visit, Err(ConfirmationRefusal::Unknown), "{name} {id} {token}");
        }
        assert_eq!(world.in_force(name), None);
        let visit = world
            .engine
            .confirm(name, &id.to_uppercase(), &token)
            .await
            .unwrap();
        assert_eq!(visit.operation, handshake.operation);
        assert!(world.in_force(name).is_some());
        assert_eq!(world.state(&handshake.operation), SUCCEEDED);
        let again = world.engine.confirm(name, &id, &token).await;
        assert_eq!(again, Err(ConfirmationRefusal::Already));
        world.engine.delete_subscription(SubscriptionId(7)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_window_is_the_profiles() {
    let world = HandshakeSetup::new(&[OK]).await;
    for (profile, minutes) in [(None, 5), (Some("cloud-current"), 10), (Some("edge"), 5)] {
        let handshake = world
            .ask(Subscription {
                profile: profile.map(str::to_owned),
                ..subscription(7, "audit")
            })
            .await;
        world.awaiting("audit").await;
        world.pass(Duration::from_secs(minutes * 60 - 1)).await;
        assert_eq!(
            world.state(&handshake.operation),
            OperationState::InProgress,
            "{profile:?}"
        );
        world.pass(Duration::from_secs(2)).await;
        let message = failure(world.state(&handshake.operation));
        assert!(
            message.contains(&format!("(within {minutes} minutes)")),
            "{message}"
        );
        let (id, token) = callback(&handshake);
        let late = world.engine.confirm("audit", &id, &token).await;
        assert_eq!(late, Err(ConfirmationRefusal::Failed(message)));
        assert_eq!(world.in_force("audit"), None);
    }
}

#[tokio::test(start_paused = true)]
async fn the_oldest_versions_have_no_second_way() {
    let world = HandshakeSetup::new(&[OK]).await;
    let engine = &world.engine;
    let handshake = engine
        .ask(subscription(7, "audit"), BASE, "2018-01-01", "")
        .await
        .unwrap();
    assert_eq!(handshake.callback, None);
    failure(world.ended(&handshake.operation).await);
    let body = json(&world.hook.asked()[0].1);
    assert!(!body.contains("validationUrl"), "{body}");
    let visit = engine
        .confirm("audit", &handshake.operation, handshake.token.expose())
        .await;
    assert_eq!(visit, Err(ConfirmationRefusal::Unknown));
}

#[tokio::test(start_paused = true)]
async fn cloud_events_are_asked_for_with_options() {
    let granting: &[_] = &[
        ("webhook-allowed-origin", "eventgrid.azure.net"),
        ("webhook-allowed-rate", "120"),
    ];
    let world = HandshakeSetup::new(&[WebhookAct::Answer(204, granting, "")]).await;
    let handshake = world.ask(cloud(7, "audit")).await;
    assert_eq!(world.ended(&handshake.operation).await, SUCCEEDED);
    let (_, request) = world.hook.asked().remove(0);
    assert_eq!(request.method, "OPTIONS");
    assert_eq!(request.body.bytes.len(), 0);
    let callback = handshake.callback.as_ref().unwrap().expose();
    for (name, value) in [
        ("webhook-request-origin", Some("eventgrid.azure.net")),
        ("webhook-request-callback", Some(callback)),
        ("webhook-request-rate", Some("60000")),
        ("x-hidden", Some("hunter2")),
        ("content-type", None),
        ("aeg-event-type", None),
        ("origin", None),
    ] {
        assert_eq!(request.header(name), value, "{name}");
    }
    let Destination::WebHook(hook) = &world.in_force("audit").unwrap().destination else {
        panic!("a webhook it was");
    };
    assert_eq!(hook.rate_max, Some(120));
    let seen = world.engine.handshakes.seen(&handshake.operation).unwrap();
    let shown = format!("{:?}", seen.handshake.transcript);
    assert!(!shown.contains(handshake.token.expose()), "{shown}");
    assert!(
        shown.contains("https://here:8443/eventsubscriptions/audit/validate"),
        "{shown}"
    );

    world.hook.set(&[WebhookAct::Answer(404, &[], "")]);
    let handshake = world.ask(cloud(7, "audit")).await;
    let message = failure(world.ended(&handshake.operation).await);
    assert!(
        message.contains("Http OPTIONS request failed with response code NotFound. "),
        "{message}"
    );
    assert!(
        message.contains("https://aka.ms/esvalidationcloudevent. "),
        "{message}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_cloud_events_webhook_answers_first_and_visits_then() {
    let go = Arc::new(Notify::new());
    let world = HandshakeSetup::new(&[WebhookAct::Held(go.clone(), Box::new(OK))]).await;
    let handshake = world.ask(cloud(7, "audit")).await;
    let (id, token) = callback(&handshake);
    world.until(|| world.hook.asked().len() == 1).await;
    let visit = world.engine.confirm("audit", &id, &token).await;
    assert_eq!(visit, Err(ConfirmationRefusal::TooEarly));
    assert_eq!(world.in_force("audit"), None);
    // A visit shortly before the answer is not too early.
    let late_answer = async {
        world.pass(Duration::from_millis(200)).await;
        go.notify_one();
    };
    let (visit, ()) = tokio::join!(world.engine.confirm("audit", &id, &token), late_answer);
    assert!(visit.is_ok(), "{visit:?}");
    assert!(world.in_force("audit").is_some());

    // A webhook for Event Grid events may be confirmed while its answer is awaited.
    world.hook.set(&[WebhookAct::Silence]);
    let handshake = world.ask(subscription(8, "slow")).await;
    world.until(|| world.hook.asked().len() == 2).await;
    let (id, token) = callback(&handshake);
    assert!(world.engine.confirm("slow", &id, &token).await.is_ok());
    assert_eq!(world.in_force("slow").unwrap().id, SubscriptionId(8));
}

#[tokio::test(start_paused = true)]
async fn a_restart_takes_up_what_was_under_way() {
    let mut world = HandshakeSetup::new(&[WebhookAct::Silence]).await;
    let asking = world.ask(subscription(7, "asking")).await;
    world.until(|| world.hook.asked().len() == 1).await;
    world.hook.set(&[OK]);
    let awaiting = world.ask(subscription(8, "awaiting")).await;
    let until = world.awaiting("awaiting").await.state.clone();
    world.pass(Duration::from_secs(20)).await;
    world.hook.set(&[WebhookAct::Echo]);
    world.restart().await;
    assert_eq!(world.ended(&asking.operation).await, SUCCEEDED);
    assert!(world.in_force("asking").is_some());
    let asked = world.hook.asked();
    // The handshake that waits for a visit does not ask again.
    assert_eq!(asked.len(), 3);
    assert!(json(&asked[2].1).contains(&asking.code));
    assert_eq!(world.pending("awaiting").unwrap().state, until);
    let (id, token) = callback(&awaiting);
    assert!(world.engine.confirm("awaiting", &id, &token).await.is_ok());

    // A handshake whose window ended while the server was down fails at once.
    world.hook.set(&[OK]);
    let late = world.ask(subscription(9, "late")).await;
    world.awaiting("late").await;
    world.engine.stop(std::future::ready(())).await.unwrap();
    world.pass(Duration::from_secs(301)).await;
    world.engine = start(&world.clock, &world.catalog, &world.hook).await;
    failure(world.ended(&late.operation).await);
    assert_eq!(world.hook.asked().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_newer_question_takes_the_place_of_an_older_one() {
    let world = HandshakeSetup::new(&[WebhookAct::Silence, OK, WebhookAct::Echo]).await;
    let first = world.ask(subscription(7, "audit")).await;
    world.until(|| world.hook.asked().len() == 1).await;
    let second = world.ask(subscription(8, "Audit")).await;
    assert_eq!(world.state(&first.operation), OperationState::Canceled);
    world.awaiting("audit").await;
    let third = world.ask(subscription(9, "audit")).await;
    assert_eq!(world.state(&second.operation), OperationState::Canceled);
    let (id, token) = callback(&second);
    let visit = world.engine.confirm("audit", &id, &token).await;
    assert_eq!(visit, Err(ConfirmationRefusal::Cancelled));
    assert_eq!(world.ended(&third.operation).await, SUCCEEDED);
    assert_eq!(world.in_force("audit").unwrap().id, SubscriptionId(9));
    assert_eq!(world.stored().await, []);
    // A change that needs no handshake, such as one through another API, supersedes the handshake
    // as well.
    world.hook.set(&[OK]);
    let fourth = world.ask(subscription(9, "audit")).await;
    world.awaiting("audit").await;
    let edge = Subscription {
        origin: ResourceOrigin::Edge,
        ..subscription(9, "audit")
    };
    world.engine.put_subscription(edge).await.unwrap();
    assert_eq!(world.state(&fourth.operation), OperationState::Canceled);
    assert_eq!(world.in_force("audit").unwrap().origin, ResourceOrigin::Edge);
    let all: Vec<String> = world
        .engine
        .handshakes
        .all()
        .iter()
        .map(|seen| seen.handshake.operation.clone())
        .collect();
    assert_eq!(all.len(), 4);
    assert!(all.contains(&first.operation));
}

#[tokio::test(start_paused = true)]
async fn deleting_ends_what_is_under_way() {
    let world = HandshakeSetup::new(&[WebhookAct::Echo, OK]).await;
    let made = world.ask(subscription(7, "audit")).await;
    world.ended(&made.operation).await;
    let update = world.ask(subscription(7, "audit")).await;
    world.awaiting("audit").await;
    world.engine.delete_subscription(SubscriptionId(7)).await.unwrap();
    assert_eq!(world.state(&update.operation), OperationState::Canceled);
    assert_eq!(world.in_force("audit"), None);

    let new = world.ask(subscription(8, "new")).await;
    let other = world.ask(subscription(9, "other")).await;
    world.awaiting("new").await;
    world.awaiting("other").await;
    assert_eq!(world.engine.handshakes.pending_of(TopicId(1)).len(), 2);
    world
        .engine
        .handshakes
        .cancel(TopicId(1), None, "NEW")
        .await
        .unwrap();
    assert_eq!(world.state(&new.operation), OperationState::Canceled);
    world.hook.set(&[WebhookAct::Broken]);
    let failed = world.ask(subscription(10, "failed")).await;
    failure(world.ended(&failed.operation).await);
    world.engine.delete_topic(TopicId(1)).await.unwrap();
    assert_eq!(world.state(&other.operation), OperationState::Canceled);
    assert_eq!(world.engine.handshakes.operation(&failed.operation), None);
    assert_eq!(world.stored().await, []);
    let gone = world.engine.ask(subscription(11, "late"), BASE, API, "").await;
    assert!(matches!(gone, Err(Error::Gone)), "{gone:?}");
}

#[tokio::test(start_paused = true)]
async fn webhooks_are_told_once_that_their_subscription_is_gone() {
    let world = HandshakeSetup::new(&[WebhookAct::Echo]).await;
    let made = world.ask(subscription(7, "Audit")).await;
    world.ended(&made.operation).await;
    world
        .hook
        .set(&[WebhookAct::Answer(200, &[("webhook-allowed-origin", "*")], "")]);
    let made = world.ask(cloud(8, "Cloud")).await;
    world.ended(&made.operation).await;
    let edge = Subscription {
        origin: ResourceOrigin::Edge,
        ..subscription(9, "edge")
    };
    world.engine.put_subscription(edge).await.unwrap();
    assert_eq!(world.hook.asked().len(), 2);

    // The webhook does not answer: the deletion does not wait for it.
    world.hook.set(&[WebhookAct::Silence]);
    let before = world.clock.now();
    world.engine.delete_subscription(SubscriptionId(7)).await.unwrap();
    world.engine.delete_topic(TopicId(1)).await.unwrap();
    assert_eq!(world.clock.now(), before);
    world.pass(Duration::from_secs(60)).await;
    let asked = world.hook.asked();
    assert_eq!(asked.len(), 4, "once each, and not those of other roads");
    let plain = &asked[2].1;
    assert_eq!(plain.method, "POST");
    assert_eq!(plain.header("aeg-event-type"), Some("SubscriptionDeletion"));
    assert_eq!(plain.header("aeg-subscription-name"), Some("AUDIT"));
    let topic = "/subscriptions/s/resourceGroups/rg1/providers/Microsoft.EventGrid/topics/orders";
    let body = json(plain);
    assert!(body.starts_with(r#"[{"id":""#), "{body}");
    assert!(
        body.contains(r#""eventType":"Microsoft.EventGrid.SubscriptionDeletedEvent""#),
        "{body}"
    );
    let id = format!(
        r#""data":{{"eventSubscriptionId":"{topic}/providers/Microsoft.EventGrid/eventSubscriptions/Audit"}}}}]"#
    );
    assert!(body.ends_with(&id), "{body}");
    let cloud = &asked[3].1;
    assert_eq!(
        cloud.header("content-type"),
        Some("application/cloudevents+json; charset=utf-8")
    );
    let body = json(cloud);
    assert!(body.starts_with(r#"{"specversion":"1.0","id":""#), "{body}");
    assert!(
        body.contains(&format!(
            r#""source":"{topic}","type":"Microsoft.EventGrid.SubscriptionDeletedEvent""#
        )),
        "{body}"
    );
    assert!(body.contains("/eventSubscriptions/Cloud\"}}"), "{body}");
    assert_eq!(world.engine.handshakes.notices_failed(), 2);
}

#[tokio::test(start_paused = true)]
async fn not_everyone_is_asked_at_once() {
    let world = HandshakeSetup::new(&[WebhookAct::Silence]).await;
    for id in 0..200 {
        world.ask(subscription(id + 10, &format!("sub{id}"))).await;
    }
    world.pass(Duration::from_secs(1)).await;
    assert_eq!(world.hook.asked().len(), 128);
    assert_eq!(world.engine.handshakes.all_pending().len(), 200);
    world.hook.set(&[WebhookAct::Echo]);
    world
        .until(|| world.engine.handshakes.all_pending().is_empty())
        .await;
    assert_eq!(world.hook.most_in_flight.load(Acquire), 128);
    assert_eq!(world.engine.directory.subscriptions(TopicId(1)).len(), 200);
}

#[tokio::test(start_paused = true)]
async fn a_trial_changes_nothing() {
    let world = HandshakeSetup::new(&[WebhookAct::Echo]).await;
    let made = world.ask(subscription(7, "audit")).await;
    world.ended(&made.operation).await;
    let before = world.in_force("audit").unwrap();
    let trial = world
        .engine
        .repeat_handshake(&before, BASE, API, "")
        .await
        .unwrap();
    assert_eq!(world.pending("audit"), None);
    assert_eq!(world.ended(&trial.operation).await, SUCCEEDED);
    assert!(Arc::ptr_eq(&before, &world.in_force("audit").unwrap()));
    world.hook.set(&[WebhookAct::Answer(500, &[], "")]);
    let trial = world
        .engine
        .repeat_handshake(&before, BASE, API, "")
        .await
        .unwrap();
    failure(world.ended(&trial.operation).await);
    assert!(Arc::ptr_eq(&before, &world.in_force("audit").unwrap()));
}

// Regression: repeated handshakes were charged to the topic only, so one caller with many topics
// took all slots.
#[tokio::test(start_paused = true)]
async fn who_asks_again_has_a_share_of_what_may_be_under_way() {
    let world = HandshakeSetup::new(&[WebhookAct::Echo]).await;
    let made = world.ask(subscription(7, "audit")).await;
    world.ended(&made.operation).await;
    let known = world.in_force("audit").unwrap();
    world.hook.set(&[WebhookAct::Silence]);
    let ask_as = |caller: &'static str| world.engine.repeat_handshake(&known, BASE, API, caller);
    for _ in 0..2_000 {
        ask_as("me").await.unwrap();
    }
    let refused = ask_as("me").await.unwrap_err().to_string();
    assert!(refused.contains("2000 webhook validations of me"), "{refused}");
    ask_as("you").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn old_failures_are_forgotten() {
    let world = HandshakeSetup::new(&[WebhookAct::Broken]).await;
    for id in 0..1_003 {
        let handshake = world.ask(subscription(id + 10, &format!("sub{id}"))).await;
        failure(world.ended(&handshake.operation).await);
    }
    assert_eq!(world.engine.handshakes.all().len(), 1_000);
    assert_eq!(world.stored().await.len(), 1_000);
    let first = world.engine.handshakes.all().pop().unwrap();
    assert_eq!(first.handshake.subscription.name, "sub3");
    world.pass(Duration::from_secs(7 * 24 * 3600)).await;
    let last = world.ask(subscription(7, "last")).await;
    failure(world.ended(&last.operation).await);
    assert_eq!(world.engine.handshakes.all().len(), 1);
    assert_eq!(world.stored().await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn guessing_takes_more_than_luck() {
    let world = HandshakeSetup::new(&[OK]).await;
    let one = world.ask(subscription(7, "one")).await;
    let two = world.ask(subscription(8, "two")).await;
    let secrets = [
        &one.operation,
        &one.code,
        one.token.expose(),
        &two.operation,
        &two.code,
        two.token.expose(),
    ]
    .map(str::to_lowercase);
    for (i, secret) in secrets.iter().enumerate() {
        assert!(secret.len() >= 32 && !secrets[..i].contains(secret), "{secret}");
    }
    assert_eq!(one.token.expose().len(), 64);
    world.awaiting("one").await;
    // The token of one handshake is not valid for the other.
    world.awaiting("two").await;
    let visit = world
        .engine
        .confirm("one", &one.operation, two.token.expose())
        .await;
    assert_eq!(visit, Err(ConfirmationRefusal::Unknown));
}

fn published(world: &HandshakeSetup) -> PublishedBatch {
    let body = r#"{"id":"1","subject":"s","eventType":"t","eventTime":"2026-01-01T00:00:00Z","data":{}}"#;
    PublishedBatch {
        topic: TopicId(1),
        schema: EventSchema::EventGrid,
        received: world.clock.now(),
        publisher: "test".into(),
        trace: None,
        replay: 0,
        hops: 0,
        body: body.into(),
        events: vec![EventRef {
            object: ByteSpan::new(0, body.len()),
            ..EventRef::default()
        }],
        matched: vec![Box::new([SubscriptionId(7)])],
    }
}

#[tokio::test(start_paused = true)]
async fn the_rate_that_a_webhook_asked_for_is_kept() {
    let granting: &[_] = &[("webhook-allowed-origin", "*"), ("webhook-allowed-rate", "60")];
    let mut world = HandshakeSetup::new(&[WebhookAct::Answer(200, granting, "")]).await;
    let handshake = world.ask(cloud(7, "audit")).await;
    assert_eq!(world.ended(&handshake.operation).await, SUCCEEDED);
    // The rate is stored with the subscription: the next life applies it too.
    world.restart().await;
    world.pass(Duration::from_secs(60)).await;
    let entry = world.engine.directory.topic_by_id(TopicId(1)).unwrap();
    let start = world.clock.now();
    for _ in 0..5 {
        world
            .engine
            .accept(&entry, published(&world), Default::default())
            .await
            .unwrap();
    }
    world.until(|| world.hook.asked().len() == 6).await;
    let asked = world.hook.asked();
    let offsets: Vec<u128> = asked[1..]
        .iter()
        .map(|(at, _)| at.since(start).as_millis())
        .collect();
    for (second, offset) in offsets.iter().enumerate() {
        let earliest = second as u128 * 1000;
        assert!((earliest..earliest + 100).contains(offset), "{offsets:?}");
    }
    // After a pause the first request is sent at once.
    world.pass(Duration::from_secs(100)).await;
    let start = world.clock.now();
    world
        .engine
        .accept(&entry, published(&world), Default::default())
        .await
        .unwrap();
    world.until(|| world.hook.asked().len() == 7).await;
    assert!(world.hook.asked()[6].0.since(start) < Duration::from_millis(100));
}
