//! Three NATS servers and three nodes suffer kills, stalls and cut links, on a schedule drawn from
//! a seed, while events are published and subscriptions created; then all faults are healed, and
//! everything acknowledged must be there.
//!
//! `POSTRIDER_JEPSEN_SEED` repeats a schedule, `POSTRIDER_JEPSEN_SECS` sets the duration of faults,
//! `POSTRIDER_JEPSEN_FAULTS` names the kinds to draw from, such as `KillNode,HoldNats`.

mod faults;
mod history;

use crate::client::TestConnection;
use crate::cluster::{ClusterPlan, TestCluster};
use crate::dead_letters::dead_letter_to;
use crate::durability::ReproducibleRandom;
use crate::receiver::{ReceivedDelivery, ScriptedReply, TestReceiver};
use crate::server::{EDGE_VERSION, JSON, event, slow_tests};
use crate::wait;
use faults::{FaultDraw, revive};
use history::{
    ExpectedSubscription, FaultPeriod, HistoryRules, ObservedAttempt, PublishRecord, RunHistory, SentEvent,
    SentKind,
};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Duration of faults in a normal test run.
const SECONDS: u64 = 120;
/// Duration of faults in slow tests.
const SECONDS_SLOW: u64 = 600;
/// Time without faults at first, in which effects of faults must not occur.
const CALM: Duration = Duration::from_secs(8);
/// After the last fault everything acknowledged must arrive within this time.
const SETTLE: Duration = Duration::from_secs(90);
/// Time after which a publisher tries another node.
const ANSWER_PATIENCE: Duration = Duration::from_secs(6);
const PUBLISHERS: u64 = 3;
/// First number of events that are published to check that they arrive.
const SEEN_TO_ARRIVE: u64 = 1_000_000;
/// Pause between a publisher's requests. All processes share two cores.
const PACE: Duration = Duration::from_millis(120);
const MANAGE_PACE: Duration = Duration::from_millis(700);
/// Pause between creating and deleting subscriptions. There is one such thread for each node.
const MAKE_PACE: Duration = Duration::from_secs(2);
/// Pause between events that are published concurrently: with the patience below it bounds how many
/// requests are open.
const MATCHED_PACE: Duration = Duration::from_millis(300);
/// A change is answered once silent nodes are known to be dead, or refused after a while.
const MANAGE_PATIENCE: Duration = Duration::from_secs(30);
/// Longest time for which a node may act on the old state after a change was answered.
const BOUND: Duration = Duration::from_secs(5);
/// First number of events that are published to see which subscriptions they match.
const MATCHED: u64 = 2_000_000;
const CLIENT: &str = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n";
/// Every so many-th delivery to the flaky receiver gets a 503.
const FLAKY: u64 = 4;

const WANTED: [ExpectedSubscription; 5] = [
    wanted("steady", None, true),
    wanted("flaky", None, true),
    wanted("chosen", Some(SentKind::Chosen), true),
    wanted("batched", None, true),
    wanted("doomed", Some(SentKind::Doomed), false),
];

const fn wanted(name: &'static str, only: Option<SentKind>, arrives: bool) -> ExpectedSubscription {
    ExpectedSubscription { name, only, arrives }
}

const RULES: HistoryRules = HistoryRules {
    waits: &[
        Duration::from_secs(1),
        Duration::from_secs(2),
        Duration::from_secs(3),
    ],
    // Leases expire, leaders are elected, partitions are taken over and shared out again.
    aftermath: Duration::from_secs(30),
};

/// Retries after a second or two, so that many deliveries are open at any time.
fn config(shelf: &Path) -> String {
    let lines = format!(
        "profile = \"custom\"\ndead_letter.delay = \"1s\"\n\
         [profile_custom]\nschedule = [\"1s\", \"2s\", \"3s\"]\nfloors = {{ \"503\" = \"1s\" }}\nother_floor = \"1s\"\n\
         response_timeout = \"10s\"\njitter_percent = 0\n\
         [[storage_account]]\nname = \"shelf\"\nkind = \"directory\"\npath = \"{}\"\n",
        shelf.display()
    );
    format!("{lines}{CLIENT}")
}

/// State that the threads of a run share.
struct JepsenRun {
    began: Instant,
    nodes: Vec<SocketAddr>,
    stop: AtomicBool,
    events: AtomicU64,
    history: Mutex<RunHistory>,
    notes: Mutex<Vec<(Duration, String)>>,
    managed: Mutex<ManagedSubscriptions>,
}

/// Subscriptions created and deleted during the run: those known to exist, and those known not to.
#[derive(Default)]
struct ManagedSubscriptions {
    there: BTreeSet<String>,
    gone: BTreeSet<String>,
    refused: u64,
    /// Time of the answer to each creation.
    answered: BTreeMap<String, Duration>,
    /// Subscriptions that were to be deleted, with any result.
    given_up: BTreeSet<String>,
    /// Acknowledged events of these subscriptions' topic: number, node, start of the request.
    matched: Vec<(u64, usize, Duration)>,
    /// Endpoint numbers to which one subscription was changed, with the time of the answer.
    moved: Vec<(u64, Duration)>,
    /// Time of the answer to each pause, and time of the request to end it.
    pauses: Vec<(Duration, Option<Duration>)>,
}

impl JepsenRun {
    fn now(&self) -> Duration {
        wait::now() - self.began
    }

    fn note(&self, what: impl Into<String>) {
        let note = (self.now(), what.into());
        println!("{:7.2} {}", note.0.as_secs_f64(), note.1);
        self.notes.lock().expect("no panic holds it").push(note);
    }

    fn ended(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// Publishes until the end; each event is repeated until it is answered 200.
    fn publish(&self, publisher: u64) {
        let target = format!("/topics/orders/events?{EDGE_VERSION}");
        let mut chance = ReproducibleRandom(publisher);
        let mut connection: Option<(usize, TestConnection)> = None;
        while !self.ended() {
            let events: Vec<(u64, SentKind)> = (0..=chance.below(2))
                .map(|_| {
                    let kind = SentKind::ALL[[0, 0, 1, 1, 2][chance.below(5) as usize]];
                    (self.events.fetch_add(1, Relaxed), kind)
                })
                .collect();
            for tries in 1.. {
                // Like most clients, usually stays with the same node.
                let stays = connection.take().filter(|_| chance.below(4) > 0);
                let node = stays
                    .as_ref()
                    .map_or_else(|| chance.below(3) as usize, |(node, _)| *node);
                let open = || TestConnection::open_within(self.nodes[node], ANSWER_PATIENCE);
                let began = self.now();
                let body: Vec<Value> = events.iter().map(|(n, kind)| body(*n, tries, *kind)).collect();
                let sent = stays
                    .map_or_else(open, |(_, known)| Ok(known))
                    .and_then(|mut to| {
                        let answer = to.send("POST", &target, &[JSON], json!(body).to_string().as_bytes())?;
                        connection = Some((node, to));
                        Ok(answer)
                    });
                let (acknowledged, answer) = match sent {
                    Ok(answer) if answer.status == 200 => (true, String::from("200")),
                    Ok(answer) => (false, format!("{} {}", answer.status, answer.text())),
                    Err(e) => (false, e.to_string()),
                };
                let sendings = events
                    .iter()
                    .map(|(event, kind)| (SentEvent { event: *event, tries }, *kind));
                self.history
                    .lock()
                    .expect("no panic holds it")
                    .publishes
                    .push(PublishRecord {
                        sendings: sendings.collect(),
                        node,
                        began,
                        ended: self.now(),
                        answer,
                        acknowledged,
                    });
                if acknowledged || self.ended() {
                    break;
                }
                connection = None;
                pace(PACE);
            }
            pace(PACE);
        }
    }

    /// Creates subscriptions and deletes some of them, at one node: while it is cut off, others are
    /// created elsewhere.
    fn manage(&self, url: &str, node: usize) {
        let mut chance = ReproducibleRandom(77 + node as u64);
        let mut made: Vec<String> = Vec::new();
        for number in 0.. {
            if self.ended() {
                return;
            }
            let delete = made.len() > 3 && chance.below(3) == 0;
            let name = match delete {
                true => made.swap_remove(chance.below(made.len() as u64) as usize),
                false => format!("made-{node}-{number}"),
            };
            let path = format!("/topics/managed/eventSubscriptions/{name}?{EDGE_VERSION}");
            let destination =
                json!({"endpointType": "WebHook", "properties": {"endpointUrl": format!("{url}/{name}")}});
            let body = json!({"properties": {"destination": destination}}).to_string();
            let (method, body) = if delete {
                ("DELETE", "")
            } else {
                ("PUT", body.as_str())
            };
            let began = self.now();
            if delete {
                let mut managed = self.managed.lock().expect("no panic holds it");
                managed.given_up.insert(name.clone());
            }
            let answer = TestConnection::open_within(self.nodes[node], MANAGE_PATIENCE)
                .and_then(|mut to| to.send(method, &path, &[JSON], body.as_bytes()));
            let answered = self.now();
            let mut managed = self.managed.lock().expect("no panic holds it");
            match answer {
                Ok(answer) if answer.status == 200 && delete => {
                    managed.gone.insert(name);
                }
                Ok(answer) if answer.status == 200 => {
                    managed.there.insert(name.clone());
                    managed.answered.insert(name.clone(), answered);
                    made.push(name);
                }
                other => {
                    // The result is unknown: the subscription may exist or not.
                    managed.there.remove(&name);
                    managed.refused += 1;
                    if let Ok(answer) = &other
                        && !matches!(answer.status, 429 | 503)
                    {
                        drop(managed);
                        self.note(format!(
                            "{method} {name} at node {node} since {began:?}: {} {}",
                            answer.status,
                            answer.text()
                        ));
                    }
                }
            }
            pace(MAKE_PACE);
        }
    }

    /// Publishes to the topic whose subscriptions come and go, at each node in turn. Requests do
    /// not wait for each other: a node that is cut off holds many, from before and after changes at
    /// other nodes.
    fn publish_matched(&self) {
        std::thread::scope(|scope| {
            for number in MATCHED.. {
                if self.ended() {
                    return;
                }
                scope.spawn(move || self.publish_one_matched(number));
                pace(MATCHED_PACE);
            }
        });
    }

    fn publish_one_matched(&self, number: u64) {
        let target = format!("/topics/managed/events?{EDGE_VERSION}");
        let node = (number % 3) as usize;
        let began = self.now();
        let mut small = event(format!("e-{number}"));
        small["data"] = json!({"n": number, "try": 1});
        let body = json!([small]).to_string();
        let answer = TestConnection::open_within(self.nodes[node], MANAGE_PATIENCE)
            .and_then(|mut to| to.send("POST", &target, &[JSON], body.as_bytes()));
        if answer.is_ok_and(|answer| answer.status == 200) {
            let mut managed = self.managed.lock().expect("no panic holds it");
            managed.matched.push((number, node, began));
        }
    }

    /// Moves the endpoint of one subscription, and pauses and resumes another, at any node.
    fn change(&self, url: &str) {
        let mut chance = ReproducibleRandom(78);
        let send = |node: usize, method: &str, path: &str, body: &Value| {
            let authorization = ("authorization", "Bearer hush");
            let headers: &[_] = if path.starts_with("/postrider") {
                &[authorization, JSON]
            } else {
                &[JSON]
            };
            let answer = TestConnection::open_within(self.nodes[node], MANAGE_PATIENCE)
                .and_then(|mut to| to.send(method, path, headers, body.to_string().as_bytes()));
            answer.is_ok_and(|answer| answer.status == 200)
        };
        for number in 1.. {
            if self.ended() {
                return;
            }
            let path = format!("/topics/managed/eventSubscriptions/moving?{EDGE_VERSION}");
            let destination = json!({"endpointType": "WebHook", "properties": {"endpointUrl": format!("{url}/moving-{number}")}});
            let body = json!({"properties": {"destination": destination}});
            if send(chance.below(3) as usize, "PUT", &path, &body) {
                let at = self.now();
                self.managed
                    .lock()
                    .expect("no panic holds it")
                    .moved
                    .push((number, at));
            }
            let verb = if number % 2 == 1 { "pause" } else { "resume" };
            if verb == "resume"
                && let Some((_, end)) = self.managed.lock().expect("no panic holds it").pauses.last_mut()
            {
                end.get_or_insert(self.now());
            }
            let path = format!("/postrider/v1/subscriptions/{verb}");
            let done = send(
                chance.below(3) as usize,
                "POST",
                &path,
                &json!({"id": "managed/paused"}),
            );
            if done && verb == "pause" {
                let at = self.now();
                self.managed
                    .lock()
                    .expect("no panic holds it")
                    .pauses
                    .push((at, None));
            }
            pace(MANAGE_PACE);
        }
    }

    /// Behaviour of the receiver, which serves all subscriptions by path.
    fn receive(&self, delivery: &ReceivedDelivery, chance: &Mutex<ReproducibleRandom>) -> ScriptedReply {
        let began = self.now();
        let of = delivery.path.trim_start_matches('/').to_owned();
        let (slow, luck) = {
            let mut chance = chance.lock().expect("no panic holds it");
            (chance.below(40), chance.below(FLAKY))
        };
        // Long enough for attempts to be in progress when their node is killed.
        pace(Duration::from_millis(slow));
        let status = match of.as_str() {
            "flaky" if luck == 0 => 503,
            "doomed" => 400,
            _ => 200,
        };
        let count = delivery
            .header("aeg-delivery-count")
            .and_then(|count| count.parse().ok());
        let events = delivery.json();
        let ended = self.now();
        let attempts = events
            .as_array()
            .expect("an array of events")
            .iter()
            .map(|event| ObservedAttempt {
                subscription: of.clone(),
                sending: SentEvent {
                    event: event["data"]["n"].as_u64().expect("a number"),
                    tries: event["data"]["try"].as_u64().expect("a number") as u32,
                },
                kind: event["eventType"].as_str().unwrap_or_default().to_owned(),
                count: count.expect("a count"),
                began,
                ended,
                took: status == 200,
                whole: event["data"]["filling"].as_str()
                    == Some(&filling(event["data"]["n"].as_u64().unwrap_or(0))),
            });
        self.history
            .lock()
            .expect("no panic holds it")
            .attempts
            .extend(attempts);
        ScriptedReply::Status(status)
    }
}

fn body(number: u64, tries: u32, kind: SentKind) -> Value {
    let mut event = event(format!("e-{number}"));
    event["eventType"] = json!(kind.name());
    event["data"] = json!({"n": number, "try": tries, "filling": filling(number)});
    event
}

/// Filler of an event: some events are large, and a few requests exceed a NATS message, so that
/// streams grow and are compacted.
fn filling(number: u64) -> String {
    let size = match ReproducibleRandom(number).below(50) {
        0 => 740_000,
        1..=12 => 100_000,
        _ => 100,
    };
    number.to_string().repeat(size / number.to_string().len())
}

/// Pauses between two actions.
fn pace(time: Duration) {
    std::thread::sleep(time);
}

/// A number from the environment.
fn given(name: &str) -> Option<u64> {
    let text = std::env::var_os(name)?;
    Some(text.to_str().and_then(|text| text.parse().ok()).expect(name))
}

/// Dead letters of the run, by subscription, from a directory of blobs.
fn letters(shelf: &Path) -> Vec<(String, SentEvent)> {
    let mut found = Vec::new();
    let mut folders = vec![shelf.to_owned()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let within = path.strip_prefix(shelf).expect("it is in there");
            let of = within
                .iter()
                .nth(1)
                .and_then(|of| of.to_str())
                .unwrap_or_default();
            // Blobs that are being written have a temporary name.
            let hidden = |name: &str| name.starts_with(".postrider-");
            if path.file_name().and_then(|name| name.to_str()).is_none_or(hidden) {
                continue;
            }
            let Ok(bytes) = std::fs::read(&path) else { continue };
            let letters: Vec<Value> = serde_json::from_slice(&bytes).expect("a blob is an array of letters");
            found.extend(letters.iter().map(|letter| {
                let sending = SentEvent {
                    event: letter["data"]["n"].as_u64().expect("a number"),
                    tries: letter["data"]["try"].as_u64().expect("a number") as u32,
                };
                (of.to_lowercase(), sending)
            }));
        }
    }
    found
}

#[test]
fn nothing_acknowledged_is_lost_whatever_one_fault_after_the_other_does() {
    let shelf = tempfile::tempdir().expect("a temporary directory");
    let plan = ClusterPlan {
        nats: 3,
        nodes: 3,
        partitions: 6,
        lease: "5s",
        config: config(shelf.path()),
    };
    let seed = given("POSTRIDER_JEPSEN_SEED").unwrap_or_else(|| {
        let bytes = std::process::id() as u64
            ^ std::time::UNIX_EPOCH
                .elapsed()
                .map_or(0, |since| since.as_nanos() as u64);
        ReproducibleRandom(bytes).below(1_000_000_000)
    });
    let usual = if slow_tests() { SECONDS_SLOW } else { SECONDS };
    let seconds = given("POSTRIDER_JEPSEN_SECS").unwrap_or(usual);
    let faults = std::env::var_os("POSTRIDER_JEPSEN_FAULTS").unwrap_or_default();
    let faults = faults.to_str().expect("names of faults").to_owned();
    say(&format!(
        "POSTRIDER_JEPSEN_SEED={seed} POSTRIDER_JEPSEN_SECS={seconds} POSTRIDER_JEPSEN_FAULTS={faults}"
    ));
    let Some(mut crew) = TestCluster::start(&plan) else {
        return;
    };
    let run = Arc::new(JepsenRun {
        began: wait::now(),
        nodes: crew.nodes.iter().map(|node| node.http).collect(),
        stop: AtomicBool::new(false),
        events: AtomicU64::new(0),
        history: Mutex::default(),
        notes: Mutex::default(),
        managed: Mutex::default(),
    });
    let receiver = {
        let (run, chance) = (run.clone(), Mutex::new(ReproducibleRandom(seed)));
        TestReceiver::answering(move |delivery| run.receive(delivery, &chance))
    };
    subscribe(&crew, &receiver);
    let kept = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("jepsen-{seed}"));
    std::thread::scope(|scope| {
        for publisher in 0..PUBLISHERS {
            let run = &run;
            scope.spawn(move || run.publish(publisher));
        }
        let url = receiver.url("");
        let (change, matched, changes_url) = (&run, &run, url.clone());
        for node in 0..3 {
            let (manage, url) = (&run, url.clone());
            scope.spawn(move || manage.manage(&url, node));
        }
        scope.spawn(move || change.change(&changes_url));
        scope.spawn(move || matched.publish_matched());
        torment(
            &mut crew,
            &run,
            FaultDraw::new(seed, &faults),
            Duration::from_secs(seconds),
        );
        run.stop.store(true, Relaxed);
    });
    run.note("everybody has stopped publishing");
    let wrong = settle(&mut crew, &run, &receiver, shelf.path());
    if !wrong.is_empty() {
        crew.keep_logs(&kept);
        let notes = run.notes.lock().expect("no panic holds it").clone();
        let history: String = notes
            .iter()
            .map(|(at, what)| format!("{:7.2} {what}\n", at.as_secs_f64()))
            .collect();
        std::fs::write(
            kept.join("history.txt"),
            format!("{history}\n{}", wrong.join("\n")),
        )
        .expect("it can be written");
        let shown = &wrong[..wrong.len().min(10)];
        panic!(
            "{} things are wrong, such as\n{}\nPOSTRIDER_JEPSEN_SEED={seed} POSTRIDER_JEPSEN_SECS={seconds}; logs and history in {}",
            wrong.len(),
            shown.join("\n"),
            kept.display()
        );
    }
}

/// Prints to the terminal even if the test passes, so that the seed is known.
fn say(what: &str) {
    // Regular output is shown only for failed tests.
    let _ = writeln!(std::io::stderr(), "{what}");
}

fn subscribe(crew: &TestCluster, receiver: &TestReceiver) {
    let node = &crew.nodes[0];
    node.put_topic("orders");
    node.put_topic("managed");
    for name in ["moving", "paused"] {
        node.subscribe("managed", name, &receiver.url(&format!("/{name}")), json!({}));
    }
    for one in WANTED {
        let mut properties = match one.only {
            Some(kind) => json!({"filter": {"includedEventTypes": [kind.name()]}}),
            None => json!({}),
        };
        if one.name == "batched" {
            properties["destination"] = json!({"properties": {"maxEventsPerBatch": 20}});
        }
        if !one.arrives {
            properties = dead_letter_to("shelf", "dead", properties);
        }
        node.subscribe(
            "orders",
            one.name,
            &receiver.url(&format!("/{}", one.name)),
            properties,
        );
    }
}

/// Injects one fault after the other.
fn torment(crew: &mut TestCluster, run: &JepsenRun, mut deck: FaultDraw, time: Duration) {
    let look = |crew: &mut TestCluster| {
        for ended in revive(crew) {
            run.note(ended);
        }
    };
    for_a_while(CALM, || look(crew));
    let end = run.now() + time;
    while run.now() < end {
        let (fault, lasts, pause) = (deck.draw(), deck.lasts(), deck.pause());
        run.note(format!("{fault:?} for {lasts:?}"));
        let began = run.now();
        fault.begin(crew);
        for_a_while(lasts, || look(crew));
        fault.end(crew);
        run.note(format!("{fault:?} is over"));
        run.history
            .lock()
            .expect("no panic holds it")
            .troubles
            .push(FaultPeriod {
                what: format!("{fault:?}"),
                began,
                healed: run.now(),
            });
        for_a_while(pause, || look(crew));
    }
}

/// Waits for this long, calling `look` now and then.
fn for_a_while(time: Duration, mut look: impl FnMut()) {
    let nothing = wait::is_true_within(time, || {
        look();
        false
    });
    assert!(!nothing);
}

/// Waits until everything is at rest, then returns all violations.
fn settle(crew: &mut TestCluster, run: &JepsenRun, receiver: &TestReceiver, shelf: &Path) -> Vec<String> {
    let mut wrong = Vec::new();
    let well = wait::is_true_within(SETTLE, || {
        revive(crew);
        crew.nodes.iter_mut().all(|node| node.is_ready())
    });
    if !well {
        wrong.push("not every node came back".to_owned());
        return wrong;
    }
    run.note("all nodes are back");
    let mut missing = 0;
    let complete = wait::is_true_within(SETTLE, || {
        pace(Duration::from_millis(200));
        let mut history = run.history.lock().expect("no panic holds it");
        history.letters = letters(shelf);
        missing = history.missing(&WANTED).len();
        missing == 0
    });
    run.note(format!("everything has arrived: {complete}, {missing} missing"));
    check_managed(crew, run, receiver, &mut wrong);
    for (n, node) in crew.nodes.iter().enumerate() {
        let panics = node.log().into_iter().filter(|line| line.contains("panicked at"));
        wrong.extend(panics.map(|line| format!("node {n}: {line}")));
    }
    let mut history = run.history.lock().expect("no panic holds it");
    // Probe events are left out. A subscription whose creation was never confirmed may still have
    // received them.
    history
        .attempts
        .retain(|attempt| attempt.sending.event < SEEN_TO_ARRIVE);
    let refusals = refusals(&history);
    match history.audit(&WANTED, RULES) {
        Ok(tally) => {
            let faults = history.troubles.len();
            say(&format!("jepsen: {faults} faults, nothing is lost: {tally:?}"));
            for cost in history.costs(RULES) {
                println!(
                    "{:6.2} s without an acknowledgement, {:6.2} s late at most: {} for {:?}",
                    cost.unacknowledged.as_secs_f64(),
                    cost.late.as_secs_f64(),
                    cost.trouble.what,
                    cost.trouble.healed - cost.trouble.began
                );
            }
            println!("publishers heard: {refusals:#?}");
            let odd = refusals.keys().filter(|answer| odd(answer));
            wrong.extend(odd.map(|answer| format!("a publisher should never hear this: {answer}")));
        }
        Err(found) => wrong.extend(found),
    }
    wrong
}

/// Refusals that publishers got, without numbers that vary.
fn refusals(history: &RunHistory) -> BTreeMap<String, usize> {
    let mut counted = BTreeMap::new();
    for one in &history.publishes {
        let answer: String = one.answer.chars().take(160).collect();
        *counted.entry(answer).or_insert(0) += 1;
    }
    counted
}

/// Whether an answer is neither an acknowledgement, nor a refusal that asks to retry, nor a broken
/// connection.
fn odd(answer: &str) -> bool {
    let status: Option<u16> = answer.split(' ').next().and_then(|word| word.parse().ok());
    status.is_some_and(|status| !matches!(status, 200 | 429 | 503))
}

/// Every node must know the subscriptions whose creation was acknowledged, and none whose deletion
/// was.
fn check_managed(crew: &TestCluster, run: &JepsenRun, receiver: &TestReceiver, wrong: &mut Vec<String>) {
    let managed = run.managed.lock().expect("no panic holds it");
    let ManagedSubscriptions {
        there, gone, refused, ..
    } = &*managed;
    let there: BTreeSet<String> = there.difference(gone).cloned().collect();
    println!(
        "{} subscriptions made, {} deleted, {refused} refused",
        there.len(),
        gone.len()
    );
    for (n, node) in crew.nodes.iter().enumerate() {
        let path = format!("/topics/managed/eventSubscriptions?{EDGE_VERSION}");
        let known = node.send("GET", &path, &[], "").expect(200).json();
        let known: BTreeSet<String> = known
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|one| one["name"].as_str().map(str::to_lowercase))
            .collect();
        let lost: Vec<_> = there.difference(&known).collect();
        let back: Vec<_> = gone.intersection(&known).collect();
        if !lost.is_empty() || !back.is_empty() {
            wrong.push(format!(
                "node {n} has lost subscriptions {lost:?}, and has {back:?} again"
            ));
        }
        // These subscriptions must also get events.
        let number = SEEN_TO_ARRIVE + n as u64;
        let events = json!([body(number, 1, SentKind::Plain)]);
        let taken =
            wait::is_true_in_time(|| node.edge("POST", "/topics/managed/events", &events).status == 200);
        if !taken {
            wrong.push(format!(
                "node {n} takes no events though nothing is broken any more"
            ));
            continue;
        }
        let reached = |of: &String| {
            let history = run.history.lock().expect("no panic holds it");
            let is =
                |attempt: &ObservedAttempt| attempt.subscription == *of && attempt.sending.event == number;
            history.attempts.iter().any(is)
        };
        if !wait::is_true_in_time(|| there.iter().all(reached)) {
            wrong.push(format!("what node {n} takes does not reach every subscription"));
        }
        if let Some(of) = gone.iter().find(|of| reached(of)) {
            wrong.push(format!(
                "what node {n} takes still reaches {of}, which is deleted"
            ));
        }
    }
    drop(receiver.take_received());
    check_matched(run, &managed, &there, wrong);
    check_bounds(run, &managed, wrong);
}

/// Events acknowledged after a subscription's creation was answered must have reached it, at
/// whichever nodes.
fn check_matched(
    run: &JepsenRun,
    managed: &ManagedSubscriptions,
    there: &BTreeSet<String>,
    wrong: &mut Vec<String>,
) {
    let mut missing = Vec::new();
    let complete = wait::is_true_within(SETTLE, || {
        let history = run.history.lock().expect("no panic holds it");
        let reached: BTreeSet<(&str, u64)> = history
            .attempts
            .iter()
            .map(|attempt| (attempt.subscription.as_str(), attempt.sending.event))
            .collect();
        missing.clear();
        for name in there.difference(&managed.given_up) {
            let Some(answered) = managed.answered.get(name) else {
                continue;
            };
            let after = managed.matched.iter().filter(|(_, _, began)| began > answered);
            let lacks = after.filter(|(event, ..)| !reached.contains(&(name.as_str(), *event)));
            missing.extend(lacks.map(|(event, node, began)| {
                format!("event {event}, acknowledged by node {node} and sent at {began:?}, never reached {name}, answered at {answered:?}")
            }));
        }
        missing.is_empty()
    });
    let kept = there.difference(&managed.given_up).count();
    println!(
        "{} events audited at {kept} subscriptions made meanwhile",
        managed.matched.len()
    );
    if !complete {
        wrong.extend(missing);
    }
}

/// After a change was answered, no node may act on the old state for longer than the bound.
fn check_bounds(run: &JepsenRun, managed: &ManagedSubscriptions, wrong: &mut Vec<String>) {
    let history = run.history.lock().expect("no panic holds it");
    println!(
        "{} endpoint changes and {} pauses audited",
        managed.moved.len(),
        managed.pauses.len()
    );
    for attempt in &history.attempts {
        let moved = attempt
            .subscription
            .strip_prefix("moving-")
            .and_then(|number| number.parse::<u64>().ok());
        if let Some(old) = moved
            && let Some((new, at)) = managed.moved.iter().find(|(new, _)| *new > old)
            && attempt.began > *at + BOUND
        {
            wrong.push(format!(
                "moving-{old} is sent to at {:?}, though moving-{new} was answered at {at:?}",
                attempt.began
            ));
        }
        let within = |(from, to): &&(Duration, Option<Duration>)| {
            attempt.began > *from + BOUND && to.is_none_or(|to| attempt.began < to)
        };
        if attempt.subscription == "paused"
            && let Some((from, _)) = managed.pauses.iter().find(within)
        {
            wrong.push(format!(
                "sent at {:?} though a pause was answered at {from:?}",
                attempt.began
            ));
        }
    }
}
