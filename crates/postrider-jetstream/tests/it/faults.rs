use crate::nats::{NatsProcess, PATIENCE};
use crate::publish_answers::{PublishAnswers, check, check_anew, publish};
use crate::support::{empty_log, log_with, named, next_epoch, take};
use futures_util::future::join_all;
use postrider_core::retry::NextStep;
use postrider_jetstream::partition::{ClaimBudget, EVENT_SEQUENCE_MAX, partition_of};
use postrider_jetstream::{
    JetStreamLog, JetStreamSettings, NatsAuth, NatsConnection, NoForwarding, NodeBounds, NodeShared,
    Partition,
};
use postrider_store::conformance::{WANT, at, claim_all, events, eventually, settled, sub};
use postrider_store::{Claim, ClaimLimits, Error, EventLog, LogListener};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

// The old owner does not know that it has lost the partition and continues with everything it has,
// while another node takes over.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_owner_that_goes_on_changes_nothing() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let (old_connection, new_connection) = (server.connect().await, server.connect().await);
    let mut fenced = 0;
    for round in 0..20 {
        let name = format!("r{round}");
        let (connection, other) = (
            named(old_connection.clone(), &name),
            named(new_connection.clone(), &name),
        );
        let old = empty_log(&connection);
        let partition = take(&connection, &old, 0).await;
        let told = PublishAnswers::default();
        let never = AtomicBool::new(false);
        let publishers = join_all((0..16).map(|n| publish(&old, &told, n, &never)));
        let takeover = async {
            eventually("some are accepted", || told.count() > 200 + 37 * round).await;
            let some = ClaimLimits {
                events_max: 90,
                ..WANT
            };
            let claims = old.claim(sub(1), at(0), some).await.unwrap();
            // Thirty are settled in time, thirty after the partition was lost, and thirty never.
            let done = |claims: &[Claim]| {
                claims
                    .iter()
                    .map(|claim| settled(claim, NextStep::Done))
                    .collect::<Vec<_>>()
            };
            old.settle(sub(1), done(&claims[..30])).await.unwrap();
            old.flush().await.unwrap();
            let new = empty_log(&other);
            take(&other, &new, 0).await;
            tokio::time::timeout(PATIENCE, partition.ended().cancelled())
                .await
                .unwrap();
            old.settle(sub(1), done(&claims[30..60])).await.unwrap();
            assert!(old.flush().await.is_err(), "the old owner cannot write");
            (
                new,
                claims[..30].iter().map(Claim::position).collect::<BTreeSet<_>>(),
            )
        };
        let (_, (new, done)) = tokio::join!(publishers, takeover);
        assert!(old.shared().counters.fenced.load(Relaxed) >= 30);
        fenced += old.shared().counters.fenced.load(Relaxed) - 30;
        assert!(
            old.claim(sub(1), at(0), WANT).await.unwrap().is_empty(),
            "it hands nothing out"
        );

        let claims = claim_all(&*new, sub(1), at(0)).await;
        check(&told, &claims, &done);
        assert!(
            claims.iter().all(|claim| !done.contains(&claim.position())),
            "delivered, and settled in time"
        );
        // The new owner writes after what the old one left; the next owner reads the same.
        let enough = AtomicBool::new(true);
        join_all((100..108).map(|n| publish(&new, &told, n, &enough))).await;
        let third = empty_log(&connection);
        take(&connection, &third, 0).await;
        check(&told, &claim_all(&*third, sub(1), at(0)).await, &done);
    }
    assert!(fenced > 0, "no publisher was cut off in twenty rounds");
}

// Everything acknowledged is present after the server was killed; requests in flight are present
// once or not at all, and publishers get correct answers.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_accepted_is_lost_when_the_server_is_killed() {
    let Some(mut server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let log = empty_log(&connection);
    take(&connection, &log, 3).await;
    let told = PublishAnswers::default();
    let enough = AtomicBool::new(false);
    let mut done = BTreeSet::new();
    let publishers = join_all((0..16).map(|n| publish(&log, &told, n, &enough)));
    let kills = async {
        for _ in 0..3 {
            let before = told.count();
            eventually("more are accepted", || told.count() > before + 300).await;
            let some = ClaimLimits {
                events_max: 50,
                ..WANT
            };
            let claims = log.claim(sub(1), at(0), some).await.unwrap();
            server.kill();
            let at_kill = told.count();
            // Settled while the server is down.
            let all = claims
                .iter()
                .map(|claim| settled(claim, NextStep::Done))
                .collect();
            log.settle(sub(1), all).await.unwrap();
            server.run();
            log.flush().await.unwrap();
            done.extend(claims.iter().map(Claim::position));
            // Far more than were in flight, so some were accepted after the writer had recovered.
            eventually("it goes on", || told.count() > at_kill + 300).await;
        }
        enough.store(true, Relaxed);
    };
    tokio::join!(publishers, kills);
    // A kill between two messages costs no acknowledgement, so that not every round has to recover.
    assert!(log.shared().counters.recoveries.load(Relaxed) > 0);
    drop(log);
    check_anew(&connection, &told, &done).await;
}

// A suspended server accepts later what was sent to it: acknowledgements time out, and the messages
// are found.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hangs_for_a_while_loses_and_doubles_nothing() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let log = empty_log(&connection);
    take(&connection, &log, 3).await;
    let told = PublishAnswers::default();
    let enough = AtomicBool::new(false);
    let publishers = join_all((0..16).map(|n| publish(&log, &told, n, &enough)));
    let hang = async {
        for round in 1..=2 {
            let before = told.count();
            eventually("more are accepted", || told.count() > before + 200).await;
            server.pause();
            let recoveries = || log.shared().counters.recoveries.load(Relaxed);
            eventually("an acknowledgement is given up", || recoveries() >= round).await;
            server.resume();
            eventually("it goes on", || told.count() > before + 300).await;
        }
        enough.store(true, Relaxed);
    };
    tokio::join!(publishers, hang);
    check(&told, &claim_all(&*log, sub(1), at(0)).await, &BTreeSet::new());
    drop(log);
    let log = empty_log(&connection);
    take(&connection, &log, 3).await;
    check(&told, &claim_all(&*log, sub(1), at(0)).await, &BTreeSet::new());
}

#[derive(Default)]
struct CountingListener {
    ready: AtomicUsize,
    due: AtomicUsize,
    letters: AtomicUsize,
}

impl LogListener for CountingListener {
    fn ready(&self, _of: postrider_core::ids::SubscriptionId, count: usize) {
        self.ready.fetch_add(count, Relaxed);
    }
    fn due_changed(&self) {
        self.due.fetch_add(1, Relaxed);
    }
    fn dead_letters_added(&self) {
        self.letters.fetch_add(1, Relaxed);
    }
}

// A partition moves from one node to another while both live.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_moves_with_all_that_waits_in_it() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let (one, two) = (empty_log(&connection), empty_log(&connection));
    let refused = one.append(events(&[("x", &[1])])).await.unwrap_err();
    assert!(refused.to_string().contains("owns no partition"), "{refused}");
    take(&connection, &one, 1).await;
    take(&connection, &one, 2).await;
    for n in 0..8 {
        one.append(events(&[(&format!("e{n}"), &[1]), ("other", &[2])]))
            .await
            .unwrap();
    }
    assert_eq!(one.backlog(sub(1)).waiting, 8);
    let claims = claim_all(&*one, sub(1), at(0)).await;
    let in_two: Vec<&Claim> = claims
        .iter()
        .filter(|claim| postrider_jetstream::partition::partition_of(claim.position()) == 2)
        .collect();
    assert_eq!(in_two.len(), 4, "both partitions take their share");
    let next = [
        NextStep::Done,
        NextStep::RetryAt(at(50)),
        NextStep::DeadLetter(postrider_core::retry::GiveUpReason::BadRequest),
    ];
    let heard = Arc::new(CountingListener::default());
    two.listen(heard.clone());

    // Three of four attempts end while the partition is given up; the fourth does not.
    let give_up = one.hand_over(2, Duration::from_millis(300));
    let settle = async {
        let partition = one.partition(2).unwrap();
        eventually("it is retired", || !partition.is_open()).await;
        assert_eq!(
            one.claim(sub(2), at(0), WANT).await.unwrap().len(),
            4,
            "only the other one hands out"
        );
        let all = in_two
            .iter()
            .zip(next)
            .map(|(claim, next)| settled(claim, next))
            .collect();
        one.settle(sub(1), all).await.unwrap();
    };
    let (given_up, ()) = tokio::join!(give_up, settle);
    given_up.unwrap();
    assert_eq!(one.partitions().len(), 1);
    let late = vec![settled(in_two[3], NextStep::Done)];
    one.settle(sub(1), late).await.unwrap();
    assert_eq!(one.shared().counters.fenced.load(Relaxed), 1);

    take(&connection, &two, 2).await;
    assert_eq!(
        heard.ready.load(Relaxed),
        5,
        "four of one subscription, one of the other"
    );
    assert_eq!((heard.due.load(Relaxed), heard.letters.load(Relaxed)), (1, 1));
    assert_eq!(two.health().redelivered, 0, "nothing was under way any more");
    let again = claim_all(&*two, sub(1), at(49)).await;
    assert_eq!(
        again.iter().map(Claim::object).collect::<Vec<_>>(),
        [in_two[3].object()]
    );
    assert_eq!(claim_all(&*two, sub(1), at(50)).await.len(), 1);
    assert_eq!(two.letters(sub(1), None, at(99), WANT).await.unwrap().len(), 1);
    // A subscription that does not exist is closed, and so is one that was closed before the
    // partition came.
    let strays = two.unknown_subscriptions(|of| of == sub(1));
    assert_eq!(strays.len(), 1);
    assert_eq!(two.close_subscription(strays[0]).await.unwrap(), 4);
    assert_eq!(two.backlog(sub(2)).waiting, 0);
    one.close().await.unwrap();
    two.close_subscription(sub(1)).await.unwrap();
    take(&connection, &two, 1).await;
    assert_eq!(
        two.subscriptions(),
        [],
        "both are closed in what comes later, too"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_lease_nothing_is_taken_in_or_handed_out() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let valid = Arc::new(AtomicBool::new(true));
    let lease = valid.clone();
    let shared = NodeShared::new("test", Arc::new(move || lease.load(Relaxed)));
    let log = JetStreamLog::new(connection.clone(), 7, shared.clone(), Arc::new(NoForwarding));
    log.add(
        Partition::take(&connection, 0, next_epoch(), shared)
            .await
            .unwrap(),
    );
    log.append(events(&[("a", &[1]), ("b", &[1])])).await.unwrap();
    let one = ClaimLimits {
        events_max: 1,
        ..WANT
    };
    let claims = log.claim(sub(1), at(0), one).await.unwrap();
    valid.store(false, Relaxed);
    assert!(matches!(
        log.append(events(&[("c", &[1])])).await,
        Err(Error::Unavailable(_))
    ));
    assert!(matches!(
        log.claim(sub(1), at(0), WANT).await,
        Err(Error::Unavailable(_))
    ));
    assert!(log.health().refusing.is_some());
    // Deliveries under way can still be settled.
    log.settle(sub(1), vec![settled(&claims[0], NextStep::Done)])
        .await
        .unwrap();
    valid.store(true, Relaxed);
    assert_eq!(claim_all(&log, sub(1), at(0)).await.len(), 1);
    assert!(log.health().refusing.is_none());
}

// An operator removes messages with open deliveries, and a foreign message is written into the
// stream.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_gone_from_the_stream_is_dropped_and_counted() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let none = NodeBounds {
        cache_bytes: 0,
        ..NodeBounds::default()
    };
    let log = log_with(&connection, none);
    // The stream exists before its first owner.
    let foreign = connection
        .stream("postrider-p00", vec!["postrider.p00.>".into()])
        .await;
    foreign.unwrap();
    connection
        .js
        .publish("postrider.p00.s", "hello".into())
        .await
        .unwrap()
        .await
        .unwrap();
    take(&connection, &log, 0).await;
    let mut firsts = Vec::new();
    for n in 0..6 {
        firsts.push(
            log.append(events(&[(&format!("e{n}"), &[1, 2]), ("x", &[2])]))
                .await
                .unwrap(),
        );
    }
    let stream = connection.js.get_stream("postrider-p00").await.unwrap();
    let sequence = |n: usize| firsts[n].0 >> 20 & 0xf_ffff_ffff;
    stream.delete_message(sequence(2)).await.unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    let texts: Vec<&str> = claims.iter().map(Claim::object).collect();
    assert_eq!(texts, ["e0", "e1", "e3", "e4", "e5"]);
    assert_eq!(log.health().corrupt_deliveries, 3);
    assert_eq!(log.backlog(sub(2)).waiting, 10);
    let all = claims
        .iter()
        .map(|claim| settled(claim, NextStep::Done))
        .collect();
    log.settle(sub(1), all).await.unwrap();
    log.flush().await.unwrap();
    // A message without the chain's header only occupies a sequence.
    connection
        .js
        .publish("postrider.p00.e.1", "hello".into())
        .await
        .unwrap()
        .await
        .unwrap();
    log.append(events(&[("e6", &[1])])).await.unwrap();
    drop(log);
    let log = log_with(&connection, none);
    take(&connection, &log, 0).await;
    let claims = claim_all(&*log, sub(1), at(0)).await;
    assert_eq!(claims.iter().map(Claim::object).collect::<Vec<_>>(), ["e6"]);
    assert_eq!(log.backlog(sub(2)).waiting, 10);
}

// A subscription is deleted while nobody owns the partition: the next owner drops its deliveries
// and records the others as usual.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_is_taken_after_a_subscription_was_deleted() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let old = empty_log(&connection);
    take(&connection, &old, 0).await;
    for n in 0..4 {
        let text = format!("e{n}");
        old.append(events(&[(&text, &[1, 2])])).await.unwrap();
    }
    drop(old);
    let log = empty_log(&connection);
    log.close_subscription(sub(2)).await.unwrap();
    take(&connection, &log, 0).await;
    assert_eq!(log.backlog(sub(2)).waiting, 0);
    let journalled = || log.shared().counters.journal_messages.load(Relaxed);
    eventually("that it is gone is written down", || journalled() > 0).await;
    let before = journalled();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    let all = claims
        .iter()
        .map(|claim| settled(claim, NextStep::Done))
        .collect();
    log.settle(sub(1), all).await.unwrap();
    eventually("what was settled is written down", || journalled() > before).await;
}

// A partition that is being given up hands nothing out, not even to claims that began before.
// Claims that are not settled in time are counted, and their deliveries are made again by the next
// owner.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_given_up_hands_nothing_out() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let log = empty_log(&connection);
    let partition = take(&connection, &log, 0).await;
    for n in 0..5 {
        log.append(events(&[(&format!("e{n}"), &[1])])).await.unwrap();
    }
    let some = ClaimLimits {
        events_max: 3,
        ..WANT
    };
    let claims = log.claim(sub(1), at(0), some).await.unwrap();
    partition.retire();
    let mut more = Vec::new();
    partition.claim_waiting(
        sub(1),
        &mut ClaimBudget::new(WANT),
        &Default::default(),
        &mut more,
    );
    assert!(more.is_empty());
    log.settle(sub(1), vec![settled(&claims[0], NextStep::Done)])
        .await
        .unwrap();
    log.hand_over(0, Duration::ZERO).await.unwrap();
    assert_eq!(log.shared().counters.redelivered.load(Relaxed), 2);
    let next = empty_log(&connection);
    take(&connection, &next, 0).await;
    let claims = claim_all(&*next, sub(1), at(0)).await;
    let texts: Vec<&str> = claims.iter().map(Claim::object).collect();
    assert_eq!(texts, ["e1", "e2", "e3", "e4"]);
    assert_eq!(next.shared().counters.redelivered.load(Relaxed), 0);
}

// Like the test above, while the events to be claimed are being read.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_is_given_up_while_it_is_read() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let none = NodeBounds {
        cache_bytes: 0,
        ..NodeBounds::default()
    };
    let log = log_with(&connection, none);
    let partition = take(&connection, &log, 0).await;
    log.append(events(&[("again", &[1]), ("fresh", &[2])]))
        .await
        .unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    log.settle(sub(1), vec![settled(&claims[0], NextStep::RetryAt(at(5)))])
        .await
        .unwrap();
    log.flush().await.unwrap();
    drop(claims);
    // The last message stays in memory, however small the cache is.
    log.append(events(&[("later", &[3])])).await.unwrap();
    server.pause();
    let asking = join_all([1, 2].map(|of| log.claim(sub(of), at(10), WANT)));
    let giving_up = async {
        // The claims have started to read.
        tokio::task::yield_now().await;
        partition.retire();
        server.resume();
    };
    let (claimed, ()) = tokio::time::timeout(PATIENCE, async { tokio::join!(asking, giving_up) })
        .await
        .expect("nobody waits for ever");
    for claims in claimed {
        assert!(claims.unwrap().is_empty());
    }
}

// Finished data does not stay: neither events nor the journal nor old snapshots.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_does_not_grow_with_what_is_done() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let bounds = NodeBounds {
        chunk_bytes: 50 << 10,
        snapshot_journal_bytes: 4 << 10,
        snapshot_event_bytes: 400 << 10,
        ..NodeBounds::default()
    };
    let log = log_with(&connection, bounds);
    take(&connection, &log, 0).await;
    // An event that is never delivered keeps only its own chunk.
    log.append(events(&[("kept", &[2])])).await.unwrap();
    let text = "x".repeat(5_000);
    for _ in 0..600 {
        log.append(events(&[(&text, &[1])])).await.unwrap();
        let claims = claim_all(&*log, sub(1), at(0)).await;
        let all = claims
            .iter()
            .map(|claim| settled(claim, NextStep::Done))
            .collect();
        log.settle(sub(1), all).await.unwrap();
    }
    log.flush().await.unwrap();
    let stream = connection.js.get_stream("postrider-p00").await.unwrap();
    assert!(log.shared().counters.snapshots.load(Relaxed) >= 5);
    log.close().await.unwrap();
    let state = stream.get_info().await.unwrap().state;
    assert!(state.messages < 60 && state.bytes < 400_000, "{state:?}");
    let log = log_with(&connection, bounds);
    take(&connection, &log, 0).await;
    assert_eq!(
        (log.subscriptions(), log.backlog(sub(2)).waiting),
        (vec![sub(2)], 1)
    );
    let claims = claim_all(&*log, sub(2), at(0)).await;
    assert_eq!(claims[0].object(), "kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_be_used_is_named_with_the_reason() {
    let Some(server) = NatsProcess::start_with("authorization { user: me, password: secret }") else {
        return;
    };
    let open = async |urls: &[String], auth: NatsAuth| {
        let settings = JetStreamSettings {
            urls: urls.to_vec(),
            auth,
            ..JetStreamSettings::default()
        };
        NatsConnection::open(&settings, "test")
            .await
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    let url = server.url();
    let password = |password: &str| NatsAuth::Password {
        user: "me".into(),
        password: postrider_core::ids::Secret::new(password),
    };
    let refused = open(std::slice::from_ref(&url), password("wrong"))
        .await
        .unwrap_err();
    assert!(
        refused.contains(&url) && refused.contains("refuses these credentials"),
        "{refused}"
    );
    assert!(!refused.contains("wrong"), "{refused}");
    open(std::slice::from_ref(&url), password("secret"))
        .await
        .unwrap();
    let with_password = url.replace("nats://", "nats://me:secret@");
    open(&[with_password], NatsAuth::None).await.unwrap();
    let nobody = open(&["nats://127.0.0.1:1".into()], NatsAuth::None)
        .await
        .unwrap_err();
    assert!(
        nobody.contains("127.0.0.1:1") && nobody.contains("refused"),
        "{nobody}"
    );
    let nonsense = open(&["http://[".into()], NatsAuth::None).await.unwrap_err();
    assert!(
        nonsense.contains("not the address of a NATS server"),
        "{nonsense}"
    );
}

// Deliveries that were claimed and not settled when the owner died are counted by the next owner:
// first attempts and retries, whether or not a snapshot came between.
#[tokio::test(flavor = "multi_thread")]
async fn what_may_be_delivered_twice_is_counted() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let often = NodeBounds {
        snapshot_journal_bytes: 1,
        ..NodeBounds::default()
    };
    for (name, bounds) in [("rare", NodeBounds::default()), ("often", often)] {
        let connection = named(connection.clone(), name);
        let log = log_with(&connection, bounds);
        take(&connection, &log, 0).await;
        for n in 0..30 {
            log.append(events(&[(&format!("event {n}"), &[1])]))
                .await
                .unwrap();
        }
        let some = |events_max| ClaimLimits { events_max, ..WANT };
        let claims = log.claim(sub(1), at(0), some(10)).await.unwrap();
        let due = |n| at(if n < 4 { 5 } else { 50 });
        let retried = claims.iter().enumerate();
        let retried = retried.map(|(n, claim)| settled(claim, NextStep::RetryAt(due(n))));
        log.settle(sub(1), retried.collect()).await.unwrap();
        // Flush first: first attempts that ended since the last journal record would be counted as
        // well, because as many more may have begun since.
        log.flush().await.unwrap();
        let snapshots = || log.shared().counters.snapshots.load(Relaxed);
        if name == "often" {
            eventually("a snapshot is written", || snapshots() > 0).await;
        }
        // Four retries and three first attempts are under way.
        let before = snapshots();
        assert_eq!(log.claim(sub(1), at(5), some(4)).await.unwrap().len(), 4);
        assert_eq!(log.claim(sub(1), at(0), some(3)).await.unwrap().len(), 3);
        log.flush().await.unwrap();
        if name == "often" {
            while snapshots() == before {
                log.append(events(&[("of another", &[2])])).await.unwrap();
                let other = log.claim(sub(2), at(0), some(1)).await.unwrap();
                log.settle(sub(2), vec![settled(&other[0], NextStep::Done)])
                    .await
                    .unwrap();
                log.flush().await.unwrap();
            }
            // Claims that the snapshot does not contain follow it in the journal.
            log.flush().await.unwrap();
        }
        drop(log);
        let next = empty_log(&connection);
        take(&connection, &next, 0).await;
        assert_eq!(next.health().redelivered, 7, "{name}");
        assert_eq!(claim_all(&*next, sub(1), at(50)).await.len(), 30);
        // After an orderly release nothing is delivered again.
        next.close().await.unwrap();
        let last = empty_log(&connection);
        take(&connection, &last, 0).await;
        assert_eq!(last.health().redelivered, 0, "{name}");
    }
}

// A stream that has reached the last sequence that positions can name: its events are still
// delivered, and other partitions accept new ones.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_has_used_up_its_numbers_takes_no_events_any_more() {
    const LEFT: u64 = 12;
    let Some(server) = NatsProcess::start() else {
        return;
    };
    let connection = server.connect().await;
    let names = &connection.names;
    let config = async_nats::jetstream::stream::Config {
        name: names.partition(5),
        subjects: vec![names.partition_subjects(5)],
        first_sequence: Some(EVENT_SEQUENCE_MAX - LEFT),
        allow_direct: true,
        ..Default::default()
    };
    connection.js.create_stream(config).await.unwrap();
    let log = empty_log(&connection);
    let partition = take(&connection, &log, 5).await;
    let mut accepted = Vec::new();
    let refusal = loop {
        let text = format!("event {}", accepted.len());
        match log.append_here(events(&[(&text, &[1])])).await {
            Ok(position) => accepted.push(position),
            Err(e) => break e.to_string(),
        }
    };
    assert!(refusal.contains("used up its numbers"), "{refusal}");
    assert!(
        (1..=LEFT as usize).contains(&accepted.len()),
        "{}",
        accepted.len()
    );
    assert!(accepted.is_sorted() && accepted.iter().all(|one| partition_of(*one) == 5));
    assert!(partition.is_open() && !partition.takes_in());
    // Their outcomes can still be recorded, and the next owner knows them.
    let claims = claim_all(&*log, sub(1), at(0)).await;
    assert_eq!(claims.iter().map(Claim::position).collect::<Vec<_>>(), accepted);
    log.settle(sub(1), vec![settled(&claims[0], NextStep::Done)])
        .await
        .unwrap();
    log.flush().await.unwrap();
    drop((log, partition));
    let log = empty_log(&connection);
    let partition = take(&connection, &log, 5).await;
    assert!(partition.is_full(), "from the beginning");
    let claims = claim_all(&*log, sub(1), at(0)).await;
    assert_eq!(
        claims.iter().map(Claim::position).collect::<Vec<_>>(),
        accepted[1..]
    );
    take(&connection, &log, 6).await;
    for _ in 0..5 {
        let position = log.append_here(events(&[("elsewhere", &[1])])).await.unwrap();
        assert_eq!(partition_of(position), 6);
    }
}
