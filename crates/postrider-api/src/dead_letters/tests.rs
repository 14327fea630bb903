//! The API's functions called directly, on an engine with stores in memory and receivers that
//! refuse everything.

use super::replays::{ReplayBody, ReplayStart};
use super::selection::{
    DeadLetterName, DeadLetterOperation, DeadLetterSelection, SelectionRequest, read_query, read_since,
};
use super::{page, pending, purge, replays, summary};
use crate::own_api::Problem;
use async_trait::async_trait;
use bytes::Bytes;
use postrider_core::ids::{Position, Secret, SubscriptionId, TopicId};
use postrider_core::profile::Profiles;
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{DeadLetterDestination, Destination, Subscription, Topic, WebHook};
use postrider_core::time::{Clock, Sleep, Timestamp};
use postrider_engine::blobs::{BlobError, BlobStore, WrittenBlobVersion};
use postrider_engine::clock::SystemClock;
use postrider_engine::dead_letters::DeadLetterService;
use postrider_engine::deliver::{DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport};
use postrider_engine::replay::DeadLetterId;
use postrider_engine::{Engine, EngineParts, dispatch, handshake};
use postrider_store::memory::{MemoryArchive, MemoryCatalog, MemoryLog};
use postrider_store::{BlobId, BlobRecord, DeadLetterMark, ReplayState};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);
const HOUR: Duration = Duration::from_secs(3600);

/// A clock that stands still.
struct DeadLetterTestClock;

impl Clock for DeadLetterTestClock {
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

/// Answers 400 to every request.
struct RefusingReceiver;

#[async_trait]
impl DeliveryTransport for RefusingReceiver {
    async fn send(self: Arc<Self>, _: DeliveryRequest) -> DeliveryReply {
        DeliveryReply::Answered(DeliveryAnswer {
            status: 400,
            ..DeliveryAnswer::default()
        })
    }
}

/// Blobs by path, how often they were read, and whether the account is out of reach.
#[derive(Default)]
struct FakeBlobAccount {
    blobs: Mutex<BTreeMap<String, Bytes>>,
    reads: Mutex<usize>,
    down: Mutex<bool>,
}

#[async_trait]
impl BlobStore for FakeBlobAccount {
    fn accounts(&self) -> Vec<String> {
        vec!["local".into()]
    }

    fn check_name(&self, _: &str, _: &str) -> Result<(), String> {
        Ok(())
    }

    async fn probe(&self, _: &str, _: &str) -> Result<(), BlobError> {
        Ok(())
    }

    async fn put(
        &self,
        account: &str,
        _: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError> {
        if *self.down.lock().unwrap() {
            return Err(BlobError::Unreachable {
                account: account.into(),
                detail: "timed out".into(),
            });
        }
        self.blobs.lock().unwrap().insert(path.into(), body);
        Ok(WrittenBlobVersion {
            etag: "0".into(),
            url: path.into(),
        })
    }

    async fn get(&self, account: &str, _: &str, path: &str) -> Result<Bytes, BlobError> {
        *self.reads.lock().unwrap() += 1;
        if *self.down.lock().unwrap() {
            return Err(BlobError::Unreachable {
                account: account.into(),
                detail: "timed out".into(),
            });
        }
        let found = self.blobs.lock().unwrap().get(path).cloned();
        found.ok_or_else(|| BlobError::NotFound(path.into()))
    }

    async fn delete(&self, _: &str, _: &str, path: &str) -> Result<(), BlobError> {
        self.blobs.lock().unwrap().remove(path);
        Ok(())
    }
}

struct DeadLetterTestEngine {
    engine: Arc<Engine>,
    shelf: Arc<FakeBlobAccount>,
}

impl DeadLetterTestEngine {
    /// Topics `orders` (subscriptions `audit`, 11, and `mail`, 12) and `returns` (subscription
    /// `audit`, 13).
    async fn new() -> DeadLetterTestEngine {
        let shelf = Arc::new(FakeBlobAccount::default());
        let archive = Arc::new(MemoryArchive::default());
        let engine = Engine::start(EngineParts {
            log: Arc::new(MemoryLog::new(7)),
            catalog: Arc::new(MemoryCatalog::default()),
            transport: Arc::new(RefusingReceiver),
            clock: Arc::new(DeadLetterTestClock),
            wall: Arc::new(SystemClock),
            profiles: Profiles::default(),
            id_prefix: "/subscriptions/s".into(),
            dispatch: dispatch::Config::default(),
            dead_letters: DeadLetterService::new(shelf.clone(), archive, None),
            handshake: handshake::HandshakeRules::default(),
            recorder: Arc::new(postrider_engine::recorder::NoRecorder),
            node: postrider_engine::node::NodeIdentity::alone(),
        })
        .await
        .unwrap();
        for (id, name) in [(1, "orders"), (2, "returns")] {
            engine.put_topic(topic(id, name)).await.unwrap();
        }
        for (id, topic, name) in [(11, 1, "audit"), (12, 1, "mail"), (13, 2, "audit")] {
            engine
                .put_subscription(subscription(id, topic, name))
                .await
                .unwrap();
        }
        DeadLetterTestEngine { engine, shelf }
    }

    /// Writes a blob of one subscription with dead letters of these reasons. Each call is an hour
    /// later.
    async fn blob(&self, of: u64, names: (&str, &str), reasons: &[GiveUpReason]) -> BlobId {
        let archive = &self.engine.dead_letters.archive;
        let number = archive.last().await.unwrap().unwrap_or_default().0 + 1;
        let letters: Vec<String> = (0..reasons.len())
            .map(|place| letter(&format!("e{number}-{place}"), reasons[place]))
            .collect();
        let body = format!("[{}]", letters.join(","));
        let path = format!("{of}/{number}.json");
        self.shelf.put("local", "dead", &path, body.into()).await.unwrap();
        let marks = reasons.iter().map(|reason| DeadLetterMark {
            reason: *reason,
            replays: 0,
            purged: false,
        });
        let record = BlobRecord {
            id: BlobId(0),
            subscription: SubscriptionId(of),
            subscription_name: names.1.into(),
            topic_name: names.0.into(),
            account: "local".into(),
            container: "dead".into(),
            path,
            written: NOW - HOUR * 100 + HOUR * number as u32,
            bytes: 0,
            sha256: None,
            marks: marks.collect(),
        };
        archive.add(record).await.unwrap()
    }

    async fn ids(&self, query: &str) -> (Vec<String>, Option<String>) {
        let page = page::list(&self.engine, None, query).await.unwrap();
        (
            page.value.into_iter().map(|entry| here(entry).id).collect(),
            page.continuation,
        )
    }

    /// The ids on all pages, one page after the other.
    async fn all_ids(&self, query: &str) -> Vec<String> {
        let (mut all, mut next) = self.ids(query).await;
        while let Some(continuation) = next {
            let (more, after) = self.ids(&format!("{query}&continuation={continuation}")).await;
            all.extend(more);
            next = after;
        }
        all
    }

    async fn refusal(&self, query: &str) -> String {
        page::list(&self.engine, None, query)
            .await
            .err()
            .expect(query)
            .detail
    }

    async fn replay(&self, body: Value) -> Result<ReplayStart, Problem> {
        replays::start(&self.engine, None, &members(body)).await
    }

    async fn job(&self, body: Value) -> ReplayBody {
        match self.replay(body).await.unwrap() {
            ReplayStart::UnderWay(job) => *job,
            ReplayStart::Counted(counted) => panic!("counted {counted}"),
        }
    }

    /// Waits until a replay has stopped.
    async fn ended(&self, id: u64) -> ReplayBody {
        while self.engine.is_replaying(id) {
            tokio::task::yield_now().await;
        }
        replays::get(&self.engine, &id.to_string()).await.unwrap()
    }
}

fn members(body: Value) -> Map<String, Value> {
    body.as_object().unwrap().clone()
}

fn letter(id: &str, reason: GiveUpReason) -> String {
    format!(
        concat!(
            r#"{{"id":"{id}","subject":"s","eventType":"T","eventTime":"2023-11-14T22:13:20Z","topic":"/t","#,
            r#""dataVersion":"","metadataVersion":"1","data":{{"price":1.50}},"deadLetterReason":"{reason}","#,
            r#""deliveryAttempts":3,"lastDeliveryOutcome":"NotFound","publishTime":"2023-11-14T22:13:20Z","#,
            r#""lastDeliveryAttemptTime":"2023-11-14T22:15:20Z"}}"#
        ),
        id = id,
        reason = reason.name(),
    )
}

fn topic(id: u64, name: &str) -> Topic {
    Topic {
        resource_group: "rg".into(),
        location: "here".into(),
        created: NOW,
        ..Topic::custom(TopicId(id), name, [Secret::new("a"), Secret::new("b")])
    }
}

fn subscription(id: u64, topic: u64, name: &str) -> Subscription {
    Subscription {
        dead_letter: Some(DeadLetterDestination {
            account: "local".into(),
            container: "dead".into(),
        }),
        created: NOW,
        ..Subscription::new(
            SubscriptionId(id),
            TopicId(topic),
            name,
            Destination::WebHook(WebHook::new("http://receiver/")),
        )
    }
}

const EXHAUSTED: GiveUpReason = GiveUpReason::AttemptsExhausted;
const BAD: GiveUpReason = GiveUpReason::BadRequest;

#[test]
fn names_are_read_as_they_are_written() {
    let check = |text: &str, expected: Option<DeadLetterName>| {
        assert_eq!(DeadLetterName::parse(text), expected, "{text}");
        if let Some(name) = expected {
            assert_eq!(name.to_string(), text);
        }
    };
    let id = DeadLetterId {
        blob: BlobId(12),
        place: 3,
    };
    check("12-3", Some(DeadLetterName::Written(id)));
    let key = (Timestamp::from_nanos(1_700_000_000_000_000_001), Position(42));
    let of = SubscriptionId(7);
    check(
        "pending-7-1700000000000000001-42",
        Some(DeadLetterName::Pending { of, key }),
    );
    for bad in [
        "",
        "12",
        "12-",
        "-12",
        "12-3-4",
        "12--3",
        "a-b",
        "12-99999999999",
        "pending-1-2",
        "pending-1-2-3-4",
    ] {
        check(bad, None);
    }
}

#[test]
fn a_query_is_refused_by_name() {
    let known = ["reason", "since"];
    let read = read_query("since=2030-01-01T00:00:00%2B02:00&reason=x", &known).unwrap();
    assert_eq!(read[0], ("since", "2030-01-01T00:00:00+02:00".to_owned()));
    let check = |query: &str, expected: &str| {
        let detail = read_query(query, &known).unwrap_err().detail;
        assert_eq!(detail, expected, "{query}");
    };
    check("colour=red", "colour: is not known; known are reason, since");
    check("reason=a&reason=b", "reason: is given twice");
}

#[test]
fn since_is_a_time_or_how_long_ago() {
    let hours = |n: u32| NOW - HOUR * n;
    assert_eq!(read_since("2h", NOW).unwrap(), hours(2));
    assert_eq!(read_since("2023-11-14T21:13:20Z", NOW).unwrap(), hours(1));
    for bad in ["", "yesterday", "never", "-2h"] {
        let detail = read_since(bad, NOW).unwrap_err().detail;
        assert!(
            detail.starts_with(&format!("since: {bad:?} is neither")),
            "{detail}"
        );
    }
}

/// Unwraps a dead letter of this node; there is no other node.
fn here(shown: page::DeadLetterBody) -> page::ApiDeadLetter {
    match shown {
        page::DeadLetterBody::Here(entry) => *entry,
        page::DeadLetterBody::Elsewhere(text) => panic!("{text}"),
    }
}

#[tokio::test]
async fn pages_follow_each_other_without_gap_or_repetition() {
    let world = DeadLetterTestEngine::new().await;
    for _ in 0..3 {
        world
            .blob(11, ("orders", "audit"), &[EXHAUSTED, BAD, EXHAUSTED])
            .await;
        world.blob(12, ("orders", "mail"), &[BAD]).await;
    }
    let (all, end) = world.ids("limit=1000").await;
    assert_eq!(all.len(), 12);
    assert_eq!(end, None);
    assert_eq!(all[..5], ["1-0", "1-1", "1-2", "2-0", "3-0"]);
    for limit in 1..=13 {
        assert_eq!(world.all_ids(&format!("limit={limit}")).await, all, "{limit}");
    }
    // A page that ends with the last dead letter has no continuation.
    let (_, end) = world.ids("limit=12").await;
    assert_eq!(end, None);
}

#[tokio::test]
async fn filters_choose_by_marks_and_read_no_blob_in_vain() {
    let world = DeadLetterTestEngine::new().await;
    world.blob(11, ("orders", "audit"), &[EXHAUSTED, BAD]).await;
    world.blob(12, ("orders", "mail"), &[EXHAUSTED]).await;
    world.blob(11, ("orders", "audit"), &[EXHAUSTED]).await;
    let check = async |query: &str, expected: &[&str], reads: usize| {
        *world.shelf.reads.lock().unwrap() = 0;
        assert_eq!(world.all_ids(query).await, expected, "{query}");
        assert_eq!(*world.shelf.reads.lock().unwrap(), reads, "{query}");
    };
    check("subscription=orders/audit", &["1-0", "1-1", "3-0"], 2).await;
    check("subscription=MAIL", &["2-0"], 1).await;
    check("subscription=12", &["2-0"], 1).await;
    check("reason=UndeliverableDueToHttpBadRequest", &["1-1"], 1).await;
    check("reason=timetoliveexceeded", &[], 0).await;
    // The third blob was written 97 hours ago.
    check("since=98h", &["2-0", "3-0"], 2).await;
    check("since=98h&subscription=mail", &["2-0"], 1).await;
    check(
        "limit=1&subscription=orders/audit&reason=MaxDeliveryAttemptsExceeded",
        &["1-0", "3-0"],
        2,
    )
    .await;
}

#[tokio::test]
async fn what_is_wrong_with_a_listing_is_named() {
    let world = DeadLetterTestEngine::new().await;
    let check = async |query: &str, expected: &str| {
        let detail = world.refusal(query).await;
        assert!(detail.starts_with(expected), "{query}: {detail}");
    };
    check(
        "subscription=audit",
        "subscription: \"audit\" may mean any of orders/audit (11), returns/audit (13)",
    )
    .await;
    check(
        "subscription=nobody",
        "subscription: subscription \"nobody\" does not exist",
    )
    .await;
    check(
        "subscription=99",
        "subscription: subscription \"99\" does not exist",
    )
    .await;
    check(
        "reason=Bored",
        "reason: \"Bored\" is not one of MaxDeliveryAttemptsExceeded, ",
    )
    .await;
    check("limit=0", "limit: must be from 1 to 1000").await;
    check("limit=1001", "limit: must be").await;
    check("continuation=x", "continuation: is not one").await;
    check(
        "offset=3",
        "offset: is not known; known are subscription, reason, since, limit, continuation",
    )
    .await;
}

#[tokio::test]
async fn a_letter_is_shown_as_it_is_in_its_blob() {
    let world = DeadLetterTestEngine::new().await;
    world.blob(11, ("orders", "audit"), &[EXHAUSTED, BAD]).await;
    let shown = page::show(&world.engine, None, "1-1").await.unwrap();
    let text = serde_json::to_string(&shown).unwrap();
    assert!(text.contains(r#""data":{"price":1.50}"#), "{text}");
    let mut shown: Value = serde_json::from_str(&text).unwrap();
    let event = shown.as_object_mut().unwrap().remove("event").unwrap();
    assert_eq!(
        event,
        serde_json::from_str::<Value>(&letter("e1-1", BAD)).unwrap()
    );
    assert_eq!(
        shown,
        json!({
            "id": "1-1", "state": "written", "topic": "orders", "subscription": "audit", "subscriptionId": 11,
            "reason": "UndeliverableDueToHttpBadRequest", "deliveryAttempts": 3, "lastDeliveryOutcome": "NotFound",
            "publishTime": "2023-11-14T22:13:20Z", "lastDeliveryAttemptTime": "2023-11-14T22:15:20Z",
            "deadLetteredTime": "2023-11-14T22:15:20Z", "eventId": "e1-1", "eventType": "T", "subject": "s",
            "blob": {"account": "local", "container": "dead", "path": "11/1.json"}, "replays": 0,
        })
    );
    for missing in ["1-2", "2-0", "x"] {
        assert_eq!(
            page::show(&world.engine, None, missing)
                .await
                .err()
                .unwrap()
                .status,
            404,
            "{missing}"
        );
    }
}

/// Six blobs of `orders/audit` with two dead letters each: gone, cut off, with other dead letters,
/// with fewer, no array, intact; then one of `orders/mail`, to which somebody has added a second
/// dead letter.
async fn damaged_world() -> DeadLetterTestEngine {
    let world = DeadLetterTestEngine::new().await;
    for _ in 0..6 {
        world.blob(11, ("orders", "audit"), &[EXHAUSTED; 2]).await;
    }
    world.blob(12, ("orders", "mail"), &[BAD; 3]).await;
    let mut blobs = world.shelf.blobs.lock().unwrap();
    blobs.remove("11/1.json");
    let cut = blobs["11/2.json"].slice(..100);
    blobs.insert("11/2.json".into(), cut);
    let other = format!("[{},{}]", letter("x", BAD), letter("y", BAD));
    blobs.insert("11/3.json".into(), other.into());
    blobs.insert(
        "11/4.json".into(),
        format!("[{}]", letter("e4-1", EXHAUSTED)).into(),
    );
    blobs.insert("11/5.json".into(), Bytes::from_static(b"{}"));
    let mixed = format!("[{},{{}},{}]", letter("e7-0", BAD), letter("e7-2", BAD));
    blobs.insert("12/7.json".into(), mixed.into());
    drop(blobs);
    world
}

#[tokio::test]
async fn letters_whose_blob_is_missing_or_damaged_are_listed_as_such() {
    let world = damaged_world().await;
    let page = page::list(&world.engine, None, "").await.unwrap();
    let entries: Vec<page::ApiDeadLetter> = page.value.into_iter().map(here).collect();
    let states: Vec<(&str, &str)> = entries.iter().map(|entry| (&*entry.id, entry.state)).collect();
    assert_eq!(
        states,
        [
            ("1-0", "missing"),
            ("1-1", "missing"),
            ("2-0", "damaged"),
            ("2-1", "damaged"),
            ("3-0", "damaged"),
            ("3-1", "damaged"),
            ("4-0", "damaged"),
            ("4-1", "damaged"),
            ("5-0", "damaged"),
            ("5-1", "damaged"),
            ("6-0", "written"),
            ("6-1", "written"),
            ("7-0", "written"),
            ("7-1", "damaged"),
            ("7-2", "written"),
        ]
    );
    assert_eq!(
        serde_json::to_value(&entries[0]).unwrap(),
        json!({
            "id": "1-0", "state": "missing", "missing": true, "topic": "orders", "subscription": "audit",
            "subscriptionId": 11, "reason": "MaxDeliveryAttemptsExceeded",
            "deadLetteredTime": "2023-11-10T19:13:20.0000000Z", "trouble": "blob \"11/1.json\" does not exist",
            "blob": {"account": "local", "container": "dead", "path": "11/1.json", "letters": 2}, "replays": 0,
        })
    );
    let trouble = |at: usize| entries[at].trouble.clone().unwrap();
    assert_eq!(trouble(2), "the blob is not JSON");
    assert!(
        trouble(4).contains("holds another dead letter in this place"),
        "{}",
        trouble(4)
    );
    assert_eq!(trouble(6), "the blob holds 1 dead letters; 2 were written");
    assert_eq!(trouble(8), "the blob is not a JSON array");
    assert!(!entries[2].missing && entries[10].trouble.is_none());
    // The filter applies to what was written, not to what the blob holds now.
    assert_eq!(
        world.all_ids("subscription=mail&limit=1").await,
        ["7-0", "7-1", "7-2"]
    );
}

#[tokio::test]
async fn showing_a_letter_that_is_missing_or_damaged_names_blob_and_reason() {
    let world = damaged_world().await;
    let check = async |id: &str, status: u16, expected: &[&str]| {
        let problem = page::show(&world.engine, None, id).await.err().unwrap();
        assert_eq!(problem.status, status, "{id}: {}", problem.detail);
        for part in expected {
            assert!(problem.detail.contains(part), "{id}: {}", problem.detail);
        }
    };
    check(
        "1-0",
        410,
        &["1-0 is missing", "local/dead/11/1.json", "does not exist"],
    )
    .await;
    check(
        "2-1",
        410,
        &["2-1 is damaged", "local/dead/11/2.json", "not JSON"],
    )
    .await;
    check("7-1", 410, &["7-1 is damaged", "local/dead/12/7.json"]).await;
    page::show(&world.engine, None, "7-2").await.unwrap();
    check("1-9", 404, &["does not exist"]).await;
    *world.shelf.down.lock().unwrap() = true;
    check("1-0", 503, &["timed out"]).await;
}

#[tokio::test]
async fn an_account_out_of_reach_is_not_taken_for_missing_blobs() {
    let world = damaged_world().await;
    *world.shelf.down.lock().unwrap() = true;
    let page = page::list(&world.engine, None, "").await.unwrap();
    for entry in page.value.into_iter().map(here) {
        assert!(!entry.missing);
        assert_eq!(entry.state, "written");
        assert!(entry.trouble.unwrap().contains("timed out"));
    }
    let tallies = summary(&world.engine, &SystemClock, None).await.unwrap().value;
    let tallies = serde_json::to_value(tallies).unwrap();
    assert_eq!(
        (&tallies[0]["missing"], &tallies[0]["damaged"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(
        (&tallies[0]["unchecked"], &tallies[0]["written"]),
        (&json!(12), &json!(12))
    );
    assert!(tallies[0]["trouble"].as_str().unwrap().contains("timed out"));
}

#[tokio::test]
async fn missing_and_damaged_letters_are_counted_left_out_of_replays_and_purged() {
    let world = damaged_world().await;
    let tallies = async || {
        let tallies = summary(&world.engine, &SystemClock, None).await.unwrap().value;
        let tallies = serde_json::to_value(tallies).unwrap();
        let numbers = ["written", "missing", "damaged", "unchecked"];
        let each = |tally: &Value| numbers.map(|name| tally[name].as_u64());
        tallies.as_array().unwrap().iter().map(each).collect::<Vec<_>>()
    };
    assert_eq!(
        tallies().await,
        [
            [Some(12), Some(2), Some(8), None],
            [Some(3), Some(0), Some(1), None]
        ]
    );

    let job = world.job(json!({"all": true})).await;
    assert_eq!(job.total, 15);
    let job = world.ended(job.id).await;
    assert_eq!((job.state, job.replayed, job.failed), ("incomplete", 4, 11));
    assert_eq!(job.unreadable, 11);
    let blobs: Vec<(&str, u64, &str)> = job
        .unreadable_blobs
        .iter()
        .map(|blob| (&*blob.path, blob.letters, blob.state))
        .collect();
    assert_eq!(
        blobs,
        [
            ("11/1.json", 2, "missing"),
            ("11/2.json", 2, "damaged"),
            ("11/3.json", 2, "damaged"),
            ("11/4.json", 2, "damaged"),
            ("11/5.json", 2, "damaged"),
            ("12/7.json", 1, "damaged"),
        ]
    );
    // Only dead letters that were replayed are marked as replayed.
    let marks = world
        .engine
        .dead_letters
        .archive
        .get(BlobId(7))
        .await
        .unwrap()
        .unwrap()
        .marks;
    assert_eq!(
        marks.iter().map(|mark| mark.replays).collect::<Vec<_>>(),
        [1, 0, 1]
    );

    let ask = async |body: Value| purge(&world.engine, None, &members(body)).await.unwrap();
    assert_eq!(ask(json!({"id": "7-1"})).await, json!({"purged": 1}));
    for id in ["1-0", "1-1", "2-0", "2-1"] {
        assert_eq!(ask(json!({"id": id})).await, json!({"purged": 1}), "{id}");
    }
    let waiting = |tallies: Vec<[Option<u64>; 4]>| tallies.into_iter().map(|tally| tally[..3].to_vec());
    let left: Vec<_> = waiting(tallies().await).collect();
    assert_eq!(
        left,
        [vec![Some(8), Some(0), Some(6)], vec![Some(2), Some(0), Some(0)]]
    );
    assert_eq!(ask(json!({"all": true})).await, json!({"purged": 10}));
    assert!(
        world
            .engine
            .dead_letters
            .archive
            .counts()
            .await
            .unwrap()
            .iter()
            .all(|(.., n)| *n == 0)
    );
}

#[tokio::test]
async fn a_replay_is_counted_then_run_and_what_fails_again_waits_to_be_written() {
    let world = DeadLetterTestEngine::new().await;
    world.blob(11, ("orders", "audit"), &[EXHAUSTED; 5]).await;
    world.blob(12, ("orders", "mail"), &[BAD]).await;
    match world
        .replay(json!({"subscription": "orders/audit", "dryRun": true}))
        .await
    {
        Ok(ReplayStart::Counted(counted)) => assert_eq!(counted, json!({"count": 5, "pending": 0})),
        _ => panic!("five letters"),
    }
    let job = world
        .job(json!({"subscription": "orders/audit", "since": "200h", "rate": 1000}))
        .await;
    assert_eq!((job.id, job.total), (1, 5));
    let job = world.ended(job.id).await;
    assert_eq!((job.state, job.replayed, job.failed), ("done", 5, 0));
    assert_eq!(
        serde_json::to_value(&job).unwrap()["request"],
        json!({
            "subscription": "orders/audit", "subscriptionId": 11, "since": "2023-11-06T14:13:20.0000000Z", "rate": 1000,
        })
    );
    assert_eq!(replays::resume(&world.engine, "1").await.unwrap_err().status, 409);
    assert_eq!(
        replays::cancel(&world.engine, &SystemClock, "1")
            .await
            .unwrap()
            .state,
        "done"
    );
    assert_eq!(replays::get(&world.engine, "2").await.unwrap_err().status, 404);

    // The receiver refuses the replayed events again.
    let waiting = || {
        world
            .engine
            .log()
            .pending_dead_letters()
            .first()
            .map_or(0, |waiting| waiting.count)
    };
    while waiting() < 5 {
        tokio::task::yield_now().await;
    }
    let all = world.all_ids("limit=2&subscription=orders/audit").await;
    assert_eq!(all.len(), 10);
    assert!(
        all[5..]
            .iter()
            .all(|id| id.starts_with("pending-11-1700000000000000000-")),
        "{all:?}"
    );
    assert_eq!(
        world
            .all_ids("limit=2&reason=MaxDeliveryAttemptsExceeded")
            .await
            .len(),
        5
    );
    assert_eq!(
        world
            .all_ids("limit=1&reason=UndeliverableDueToHttpBadRequest")
            .await
            .len(),
        6
    );
    let shown = serde_json::to_value(page::show(&world.engine, None, &all[5]).await.unwrap()).unwrap();
    assert_eq!(shown["state"], "pending");
    assert_eq!(shown["deadLetteredTime"], "2023-11-14T22:13:20.0000000Z");
    assert_eq!(shown["due"], "2023-11-14T22:18:20.0000000Z");
    assert_eq!(
        shown["event"]["deadLetterReason"],
        "UndeliverableDueToHttpBadRequest"
    );
    assert_eq!(shown["event"]["deliveryAttempts"], 1);
    let early = world.replay(json!({"id": all[5]})).await.err().unwrap();
    assert_eq!((early.status, early.field), (409, Some("id")));
    let counted = world.replay(json!({"reason": "UndeliverableDueToHttpBadRequest", "dryRun": true}));
    match counted.await {
        Ok(ReplayStart::Counted(counted)) => assert_eq!(
            counted,
            json!({"count": 1, "pending": 5, "due": "2023-11-14T22:18:20.0000000Z"})
        ),
        _ => panic!("one letter is written, five wait"),
    }

    let tallies =
        serde_json::to_value(summary(&world.engine, &SystemClock, None).await.unwrap().value).unwrap();
    assert_eq!(
        tallies[0],
        json!({
            "topic": "orders", "subscription": "audit", "subscriptionId": 11, "written": 5,
            "missing": 0, "damaged": 0,
            "reasons": {"MaxDeliveryAttemptsExceeded": 5}, "pending": 5,
            "oldestPending": "2023-11-14T22:13:20.0000000Z",
        })
    );
}

#[tokio::test]
async fn letters_are_written_as_soon_as_somebody_wants_them_to_be() {
    let world = DeadLetterTestEngine::new().await;
    world.blob(11, ("orders", "audit"), &[EXHAUSTED; 5]).await;
    world.blob(12, ("orders", "mail"), &[BAD; 2]).await;
    let job = world.job(json!({"all": true})).await;
    world.ended(job.id).await;
    let waiting = || {
        let waiting = world.engine.log().pending_dead_letters();
        waiting.iter().map(|waiting| waiting.count).sum::<u64>()
    };
    while waiting() < 7 {
        tokio::task::yield_now().await;
    }
    let write = async |body: Value| {
        let asked = SelectionRequest::read(&members(body), NOW, DeadLetterOperation::Write)?;
        pending::write(&world.engine, None, &asked).await
    };
    let due = "2023-11-14T22:18:20.0000000Z";
    assert_eq!(
        write(json!({"dryRun": true})).await.unwrap(),
        json!({"count": 7, "pending": 7, "due": due})
    );
    assert_eq!(
        write(json!({"reason": "MaxDeliveryAttemptsExceeded"}))
            .await
            .unwrap(),
        json!({"written": 0})
    );
    let refused = write(json!({"id": "1-0"})).await.unwrap_err();
    assert_eq!((refused.status, refused.field), (409, Some("id")));
    let refused = write(json!({"id": "pending-11-5-5"})).await.unwrap_err();
    assert_eq!((refused.status, refused.field), (404, Some("id")));

    // While the account is out of reach the dead letters stay pending, and the reason is shown.
    *world.shelf.down.lock().unwrap() = true;
    let refused = write(json!({"subscription": "mail"})).await.unwrap_err();
    assert_eq!(refused.status, 503);
    assert!(
        refused.detail.contains("\"mail\"") && refused.detail.contains("timed out"),
        "{}",
        refused.detail
    );
    assert_eq!(waiting(), 7);
    *world.shelf.down.lock().unwrap() = false;

    let all = world.all_ids("subscription=orders/audit").await;
    let one = all.last().unwrap().clone();
    assert_eq!(write(json!({"id": one})).await.unwrap(), json!({"written": 1}));
    assert_eq!(write(json!({"id": one})).await.unwrap_err().status, 404);
    assert_eq!(
        write(json!({"subscription": "mail", "since": "1h"}))
            .await
            .unwrap(),
        json!({"written": 2})
    );
    assert_eq!(write(json!({})).await.unwrap(), json!({"written": 4}));
    assert_eq!(waiting(), 0);
    let written = world.all_ids("reason=UndeliverableDueToHttpBadRequest").await;
    assert_eq!(written.len(), 9);
    assert!(written.iter().all(|id| !id.starts_with("pending")), "{written:?}");
}

#[tokio::test]
async fn a_replay_is_cancelled_and_gone_on_with() {
    let world = DeadLetterTestEngine::new().await;
    world.blob(11, ("orders", "audit"), &[EXHAUSTED; 400]).await;
    let job = world.job(json!({"all": true, "rate": 100})).await;
    assert_eq!(job.state, "running");
    assert_eq!(replays::resume(&world.engine, "1").await.unwrap_err().status, 409);
    let job = replays::cancel(&world.engine, &SystemClock, "1").await.unwrap();
    assert_eq!(job.state, "cancelled");
    assert!(job.replayed < 400, "{}", job.replayed);

    // As if the server had been killed during the replay: the archive still says that it runs.
    let archive = &world.engine.dead_letters.archive;
    let mut stored = archive.jobs().await.unwrap().remove(0);
    stored.state = ReplayState::Running;
    // A higher rate, so that the test ends sooner.
    stored.request = stored.request.replace(r#""rate":100"#, r#""rate":100000"#);
    archive.put_job(stored, None).await.unwrap();
    assert_eq!(replays::list(&world.engine).await.unwrap()[0].state, "cancelled");

    let job = replays::resume(&world.engine, "1").await.unwrap();
    assert_eq!((job.state, job.total), ("running", 400));
    let job = world.ended(1).await;
    assert_eq!((job.state, job.replayed, job.failed), ("done", 400, 0));
}

#[tokio::test]
async fn a_deleted_subscription_is_known_by_its_letters() {
    let world = DeadLetterTestEngine::new().await;
    world.blob(5, ("orders", "old"), &[EXHAUSTED]).await;
    world.blob(6, ("returns", "old"), &[EXHAUSTED]).await;
    // Dead letters of a deleted subscription do not belong to a new one with the same name.
    world.blob(7, ("orders", "mail"), &[EXHAUSTED]).await;
    assert_eq!(world.all_ids("subscription=orders/old").await, ["1-0"]);
    assert_eq!(world.all_ids("subscription=6").await, ["2-0"]);
    assert_eq!(world.all_ids("subscription=orders/mail").await, [""; 0]);
    assert_eq!(world.all_ids("subscription=7").await, ["3-0"]);
    let ambiguous = world.refusal("subscription=old").await;
    assert!(
        ambiguous.contains("orders/old (5), returns/old (6)"),
        "{ambiguous}"
    );

    let homeless = world
        .replay(json!({"subscription": "orders/old"}))
        .await
        .err()
        .unwrap();
    assert_eq!((homeless.status, homeless.field), (400, Some("to")));
    let job = world
        .job(json!({"subscription": "orders/old", "to": "mail"}))
        .await;
    let job = world.ended(job.id).await;
    assert_eq!((job.replayed, job.failed), (1, 0));
}

#[tokio::test]
async fn purged_letters_are_not_shown_any_more() {
    let world = DeadLetterTestEngine::new().await;
    world.blob(11, ("orders", "audit"), &[EXHAUSTED, BAD, BAD]).await;
    world.blob(12, ("orders", "mail"), &[BAD]).await;
    let ask = async |body: Value| purge(&world.engine, None, &members(body)).await;
    assert_eq!(ask(json!({"id": "1-2"})).await.unwrap(), json!({"purged": 1}));
    assert_eq!(ask(json!({"id": "1-2"})).await.unwrap_err().status, 404);
    assert_eq!(
        page::show(&world.engine, None, "1-2").await.err().unwrap().status,
        404
    );
    let bad = BAD.name();
    assert_eq!(
        ask(json!({"reason": bad, "dryRun": true})).await.unwrap(),
        json!({"count": 2, "pending": 0})
    );
    assert_eq!(ask(json!({"reason": bad})).await.unwrap(), json!({"purged": 2}));
    assert_eq!(world.all_ids("limit=1").await, ["1-0"]);
    assert_eq!(ask(json!({"all": true})).await.unwrap(), json!({"purged": 1}));
    assert!(world.shelf.blobs.lock().unwrap().is_empty());
}

#[tokio::test]
async fn what_is_wrong_with_a_request_is_named() {
    let world = DeadLetterTestEngine::new().await;
    let check = async |body: Value, expected: &str| {
        let detail = world.replay(body.clone()).await.err().expect("refused").detail;
        assert!(detail.starts_with(expected), "{body}: {detail}");
    };
    check(json!({}), "one of subscription, reason, since and id is required").await;
    check(json!({"rate": 5, "dryRun": true}), "one of subscription").await;
    check(json!({"all": false}), "all: must be true").await;
    check(json!({"all": true, "id": "1-0"}), "id: names one dead letter").await;
    check(json!({"id": "1-0"}), "dead letter 1-0 does not exist").await;
    check(
        json!({"id": "first"}),
        "id: \"first\" is not the id of a dead letter",
    )
    .await;
    check(json!({"id": 1}), "id: must be a string").await;
    check(json!({"all": true, "rate": 0}), "rate: must be a whole number").await;
    check(
        json!({"all": true, "rate": "5/s"}),
        "rate: must be a whole number",
    )
    .await;
    check(
        json!({"all": true, "to": "audit"}),
        "to: \"audit\" may mean any of",
    )
    .await;
    check(
        json!({"all": true, "to": "nobody"}),
        "to: subscription \"nobody\" does not exist",
    )
    .await;
    check(json!({"all": true, "dryRun": 1}), "dryRun: must be true or false").await;
    check(
        json!({"all": true, "speed": 1}),
        "speed: is not known; known are subscription, ",
    )
    .await;
    // Purging goes nowhere at no rate.
    let refused = purge(&world.engine, None, &members(json!({"all": true, "rate": 1}))).await;
    assert!(refused.unwrap_err().detail.starts_with("rate: is not known"));
}

#[test]
fn a_request_means_the_same_when_it_is_read_again() {
    let meant = DeadLetterSelection {
        subscription: Some("orders/audit".into()),
        subscription_id: Some(11),
        reason: Some("TimeToLiveExceeded".into()),
        since: Some("2023-11-14T22:13:20.0000001Z".into()),
        to_id: Some(12),
        rate: Some(50),
        ..DeadLetterSelection::default()
    };
    let request = meant.request();
    assert_eq!(request.filter.subscription, Some(SubscriptionId(11)));
    assert_eq!(request.filter.reason, Some(GiveUpReason::TimeToLiveExceeded));
    assert_eq!(request.filter.since, Some(NOW + Duration::from_nanos(100)));
    assert_eq!((request.to, request.rate), (Some(SubscriptionId(12)), Some(50)));
    let again: DeadLetterSelection = serde_json::from_str(&serde_json::to_string(&meant).unwrap()).unwrap();
    assert_eq!(again, meant);
}
