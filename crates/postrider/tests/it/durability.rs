//! Acknowledged events arrive, however often the server is killed.

use crate::client::TestConnection;
use crate::receiver::{ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{EDGE_VERSION, JSON, TestServer, event, slow_tests};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// A small random generator: the same seed gives the same run, as far as processes allow.
pub struct ReproducibleRandom(pub u64);

impl ReproducibleRandom {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }
}

/// Publishes without end and remembers acknowledged events.
pub struct DurabilityLoad {
    address: SocketAddr,
    stop: AtomicBool,
    pub acknowledged: AtomicU64,
    pub ids: Mutex<BTreeSet<String>>,
}

impl DurabilityLoad {
    pub fn new(server: &TestServer) -> DurabilityLoad {
        DurabilityLoad {
            address: server.http,
            stop: AtomicBool::new(false),
            acknowledged: AtomicU64::new(0),
            ids: Mutex::default(),
        }
    }

    pub fn stop(&self) {
        self.stop.store(true, Relaxed);
    }

    /// Runs one publisher, which reconnects whenever it is disconnected. Every other event is of
    /// type "even".
    pub fn publish(&self, publisher: usize) {
        let target = format!("/topics/orders/events?{EDGE_VERSION}");
        let mut chance = ReproducibleRandom(publisher as u64);
        let mut number = 0;
        while !self.stop.load(Relaxed) {
            let Ok(mut connection) = TestConnection::open(self.address) else {
                std::thread::yield_now();
                continue;
            };
            while !self.stop.load(Relaxed) {
                let events: Vec<Value> = (0..=chance.below(5))
                    .map(|_| {
                        number += 1;
                        let parity = if number % 2 == 0 { "even" } else { "odd" };
                        let mut event = event(format!("{parity}-{publisher}-{number}"));
                        event["eventType"] = json!(parity);
                        event
                    })
                    .collect();
                match connection.send("POST", &target, &[JSON], json!(events).to_string().as_bytes()) {
                    Ok(answer) if answer.status == 200 => {
                        let ids = events
                            .iter()
                            .map(|e| e["id"].as_str().expect("it has one").to_owned());
                        self.ids.lock().expect("no panic holds it").extend(ids);
                        self.acknowledged.fetch_add(1, Relaxed);
                    }
                    Ok(answer) => assert!(matches!(answer.status, 429 | 503), "{}", answer.text()),
                    Err(_) => break,
                }
            }
        }
    }

    /// Waits for this many further acknowledgements.
    pub fn progress(&self, requests: u64) {
        let goal = self.acknowledged.load(Relaxed) + requests;
        crate::wait::until("publishes are acknowledged", || {
            (self.acknowledged.load(Relaxed) >= goal).then_some(())
        });
    }
}

#[test]
fn nothing_acknowledged_is_lost_when_the_server_is_killed_at_any_moment() {
    let rounds = if slow_tests() { 30 } else { 6 };
    let [all, even, batched] = [(); 3].map(|()| TestReceiver::start());
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "all", &all.url("/"), json!(null));
    server.subscribe(
        "orders",
        "even",
        &even.url("/"),
        json!({"filter": {"includedEventTypes": ["even"]}}),
    );
    let batch = json!({"destination": {"properties": {"maxEventsPerBatch": 50}}});
    server.subscribe("orders", "batched", &batched.url("/"), batch);

    let load = DurabilityLoad::new(&server);
    let mut chance = ReproducibleRandom(20_261_115);
    std::thread::scope(|scope| {
        for publisher in 0..4 {
            let load = &load;
            scope.spawn(move || load.publish(publisher));
        }
        for _ in 0..rounds {
            load.progress(1 + chance.below(200));
            server.kill();
            server.start();
        }
        load.progress(20);
        load.stop();
    });

    let acknowledged = load.ids.into_inner().expect("no panic holds it");
    assert!(acknowledged.len() > 20 * rounds);
    all.all_of(&acknowledged);
    batched.all_of(&acknowledged);
    let wanted = acknowledged
        .iter()
        .filter(|id| id.starts_with("even"))
        .cloned()
        .collect();
    let mut seen = even.all_of(&wanted);
    // All other deliveries must have gone to the right subscription.
    seen.extend(even.take_received().iter().flat_map(|delivery| delivery.ids()));
    let stray: Vec<_> = seen.iter().filter(|id| !id.starts_with("even")).collect();
    assert!(stray.is_empty(), "{stray:?}");
    assert_eq!(server.health()["store"]["corruptRecords"], 0);
}

#[test]
fn what_waits_behind_a_held_up_receiver_outlives_the_server() {
    let gate = Arc::new(ReplyGate::default());
    let receiver = TestReceiver::answering({
        let gate = gate.clone();
        move |_| {
            gate.wait();
            ScriptedReply::Status(200)
        }
    });
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let mut expected = BTreeSet::new();
    for round in 0..3 {
        let events: Vec<_> = (0..200).map(|n| event(format!("{round}-{n}"))).collect();
        server.publish("orders", &events);
        expected.extend(events.iter().map(|e| e["id"].as_str().unwrap().to_owned()));
        server.kill();
        server.start();
    }
    gate.open();
    receiver.all_of(&expected);
    server.counted("/deliveries/delivered", 600);
    // Settled deliveries, after a moment to record them, are not made again.
    server.stop();
    receiver.take_received();
    server.start();
    server.publish("orders", &[event("last")]);
    assert_eq!(receiver.next().ids(), ["last"]);
    server.counted("/deliveries/delivered", 1);
    assert_eq!(server.health()["deliveries"]["attempts"], 1);
}
