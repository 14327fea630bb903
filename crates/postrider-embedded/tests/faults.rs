//! The embedded log under disk faults: power loss, damage, full disks, failed flushes, killed
//! processes.

mod fault_disk;

use fault_disk::{DiskImage, FaultDisk};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::time::Timestamp;
use postrider_embedded::generations::Generations;
use postrider_embedded::{
    EmbeddedArchive, EmbeddedCatalog, EmbeddedLog, Scrub, ScrubStep, examine, restore, rewrite_catalog,
    segment, segment_gaps,
};
use postrider_store::conformance::{
    SeededRandom, WANT, at, claim_all, events, eventually, is_unavailable, settled, sub, topic,
};
use postrider_store::seal::Keyring;
use postrider_store::{
    Archive, Backlog, BlobId, Catalog, CatalogChange, Claim, ClaimLimits, Error, EventLog,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// A log on a disk in memory; its state database is a real file in a directory of its own.
struct OpenedLog {
    log: EmbeddedLog,
    disk: FaultDisk,
    directory: TempDir,
}

impl OpenedLog {
    async fn try_on(
        image: DiskImage,
        state: Option<&[u8]>,
        segment_bytes_max: u64,
    ) -> Result<OpenedLog, Error> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.redb");
        if let Some(state) = state {
            std::fs::write(&path, state).unwrap();
        }
        let disk = FaultDisk::new(image);
        let log = EmbeddedLog::open_on(Arc::new(disk.clone()), &path, 7, segment_bytes_max).await?;
        Ok(OpenedLog { log, disk, directory })
    }

    async fn on(image: DiskImage, state: Option<&[u8]>, segment_bytes_max: u64) -> OpenedLog {
        OpenedLog::try_on(image, state, segment_bytes_max).await.unwrap()
    }

    async fn fresh(subscriptions: &[u64], segment_bytes_max: u64) -> OpenedLog {
        let opened = OpenedLog::on(DiskImage::new(), None, segment_bytes_max).await;
        for id in subscriptions {
            opened.log.open_subscription(sub(*id)).await.unwrap();
        }
        opened
    }

    /// The state database as a crash would leave it: read until no write came in between.
    fn state(&self) -> Vec<u8> {
        whole_file(&self.directory.path().join("state.redb"))
    }

    /// Closes the log; returns what is on disk then.
    async fn closed(self) -> (DiskImage, Vec<u8>) {
        self.log.close().await.unwrap();
        (self.disk.image(), self.state())
    }
}

/// A file as a crash would leave it: read until no write came in between.
fn whole_file(path: &Path) -> Vec<u8> {
    let mut last = std::fs::read(path).unwrap();
    loop {
        let now = std::fs::read(path).unwrap();
        if now == last {
            return now;
        }
        last = now;
    }
}

const SEGMENT: u64 = 64 << 20;

fn texts(claims: &[Claim]) -> Vec<String> {
    claims.iter().map(|claim| claim.object().to_owned()).collect()
}

async fn settle_all(log: &dyn EventLog, of: SubscriptionId, claims: &[Claim], next: NextStep) {
    log.settle(of, claims.iter().map(|claim| settled(claim, next)).collect())
        .await
        .unwrap();
}

/// Acknowledged events: position and text.
type AcknowledgedEvents = Arc<Mutex<BTreeMap<Position, String>>>;

/// Publishes `count` requests of one to three events of random sizes.
async fn publish(log: &dyn EventLog, acknowledged: &AcknowledgedEvents, name: &str, count: usize, seed: u64) {
    let mut random = SeededRandom(seed);
    for n in 0..count {
        let all: Vec<String> = (0..1 + random.below(3))
            .map(|i| format!("{name}{n}.{i} {}", "p".repeat(random.below(2_000) as usize)))
            .collect();
        let batch: Vec<(&str, &[u64])> = all.iter().map(|text| (text.as_str(), &[1u64][..])).collect();
        let first = log.append(events(&batch)).await.unwrap();
        let mut acknowledged = acknowledged.lock().unwrap();
        for (i, text) in all.into_iter().enumerate() {
            let known = acknowledged.insert(Position(first.0 + i as u64), text);
            assert!(known.is_none(), "{first} was given out twice");
        }
    }
}

/// Checks that everything acknowledged is present, and that everything else present was published.
async fn check_all_there(log: &dyn EventLog, acknowledged: &BTreeMap<Position, String>, when: &str) {
    let claims = claim_all(log, sub(1), at(0)).await;
    let found: BTreeMap<Position, String> = claims
        .iter()
        .map(|c| (c.position(), c.object().to_owned()))
        .collect();
    assert_eq!(found.len(), claims.len(), "{when}: twice");
    for (position, text) in acknowledged {
        assert_eq!(found.get(position), Some(text), "{when}: event {position}");
    }
    assert!(claims.is_sorted_by_key(Claim::position), "{when}: out of order");
    log.release(sub(1), claims);
}

// Simulate a power loss before and after each flush of a busy log, and start from every image.
#[tokio::test(flavor = "multi_thread")]
async fn a_power_cut_at_any_commit_loses_nothing_acknowledged() {
    for (seed, segment_bytes_max) in [(1u64, SEGMENT), (2, 20 << 10), (3, 6 << 10)] {
        let opened = OpenedLog::fresh(&[1], segment_bytes_max).await;
        let acknowledged = AcknowledgedEvents::default();
        let cuts = Arc::new(Mutex::new(Vec::new()));
        let path = opened.directory.path().join("state.redb");
        opened.disk.at_sync({
            let (acknowledged, cuts) = (acknowledged.clone(), cuts.clone());
            move |image| {
                let known = acknowledged.lock().unwrap().clone();
                // Read at the same time, because an older state database is refused with this log.
                cuts.lock().unwrap().push((image, whole_file(&path), known));
            }
        });
        let publish = |name, n: u64| publish(&opened.log, &acknowledged, name, 25, seed * 100 + n);
        tokio::join!(publish("a", 1), publish("b", 2), publish("c", 3), publish("d", 4));
        opened.disk.no_more_at_sync();
        opened.log.close().await.unwrap();

        let cuts = std::mem::take(&mut *cuts.lock().unwrap());
        assert!(cuts.len() > 40, "{} cuts", cuts.len());
        for (n, (image, state, known)) in cuts.into_iter().enumerate() {
            let when = format!("seed {seed}, cut {n}");
            let restarted = OpenedLog::on(image, Some(&state), segment_bytes_max).await;
            assert_eq!(restarted.log.health().corrupt, [""; 0], "{when}");
            check_all_there(&restarted.log, &known, &when).await;
            // Restart again, with a new event in between.
            let position = restarted.log.append(events(&[("new", &[1])])).await.unwrap();
            assert!(known.keys().all(|known| *known < position), "{when}");
            let mut known = known;
            known.insert(position, "new".into());
            let again = OpenedLog::on(restarted.disk.cut(n as u64), Some(&restarted.state()), SEGMENT).await;
            assert_eq!(again.log.health().corrupt, [""; 0], "{when}, again");
            check_all_there(&again.log, &known, &when).await;
        }
    }
}

/// A log of twelve requests, one commit each; the third event of each request is for another
/// subscription.
async fn twelve_requests(segment_bytes_max: u64) -> (OpenedLog, Vec<Claim>) {
    let opened = OpenedLog::fresh(&[1, 2], segment_bytes_max).await;
    for n in 0..12 {
        let (a, b) = (format!("a{n:02} {}", "x".repeat(n * 40)), format!("b{n:02}"));
        opened
            .log
            .append(events(&[(&a, &[1]), (&b, &[1]), ("c", &[2])]))
            .await
            .unwrap();
    }
    let claims = claim_all(&opened.log, sub(1), at(0)).await;
    assert_eq!(claims.len(), 24);
    (opened, claims)
}

fn only_log(image: &mut DiskImage) -> &mut Vec<u8> {
    let mut logs = image.iter_mut().filter(|(name, _)| name.ends_with(".log"));
    let (_, bytes) = logs.next().unwrap();
    assert!(logs.next().is_none());
    bytes
}

#[tokio::test]
async fn a_segment_cut_short_keeps_what_is_before_the_cut() {
    let (opened, claims) = twelve_requests(SEGMENT).await;
    let image = opened.disk.image();
    let state = opened.state();
    let mut starts: Vec<u64> = claims.iter().map(|claim| claim.entry.place).collect();
    starts.dedup();
    let used = opened.log.health().bytes;
    starts.push(used);
    let closed = opened.closed().await.1;
    let mut lengths = BTreeSet::from([0, 1, 24, 63]);
    for start in &starts {
        lengths.extend([
            start - 1,
            *start,
            start + 1,
            start + 39,
            start + 40,
            start + 41,
            start + 60,
        ]);
    }
    for len in lengths {
        // If the state database does not know of the end, it counts as an interrupted commit. After
        // an orderly stop, or without the head, which was durable first, it is known that events
        // are missing.
        for (state, orderly) in [(&state, len < 48), (&closed, true)] {
            let mut image = image.clone();
            only_log(&mut image).truncate(len as usize);
            let restarted = OpenedLog::on(image, Some(state), SEGMENT).await;
            let whole = starts.windows(2).filter(|pair| pair[1] <= len).count() * 2;
            let found = claim_all(&restarted.log, sub(1), at(0)).await;
            assert_eq!(texts(&found), texts(&claims[..whole]), "cut at {len}");
            assert_eq!(
                !restarted.log.health().corrupt.is_empty(),
                orderly && whole < 24,
                "cut at {len}"
            );
            let next = restarted.log.append(events(&[("new", &[1])])).await.unwrap();
            assert!(
                !orderly || next >= Position(36),
                "cut at {len}: {next} was given out before"
            );
            let again = OpenedLog::on(restarted.disk.image(), Some(&restarted.state()), SEGMENT).await;
            assert_eq!(
                claim_all(&again.log, sub(1), at(0)).await.len(),
                whole + 1,
                "cut at {len}"
            );
        }
    }
}

#[tokio::test]
async fn a_damaged_record_is_reported_and_the_others_are_delivered() {
    let (opened, claims) = twelve_requests(SEGMENT).await;
    let used = opened.log.health().bytes as usize;
    let (image, state) = opened.closed().await;
    for request in 0..12 {
        let first = &claims[request * 2];
        let start = first.entry.place as usize;
        let end = claims
            .get(request * 2 + 2)
            .map_or(used, |next| next.entry.place as usize);
        for within in [0, 4, 5, 9, 14, 18, 25, 30, 37, 40, 44, 80, 110, end - start - 1] {
            let mut image = image.clone();
            only_log(&mut image)[start + within] ^= 0x10;
            let when = format!("request {request}, byte {within}");
            let directory = tempfile::tempdir().unwrap();
            let copy = directory.path().join("state.redb");
            std::fs::write(&copy, &state).unwrap();
            let examined = examine(&copy, Arc::new(FaultDisk::new(image.clone())))
                .unwrap()
                .lost;
            let restarted = OpenedLog::on(image, Some(&state), SEGMENT).await;
            let mut expected = texts(&claims);
            expected.drain(request * 2..request * 2 + 2);
            let found = claim_all(&restarted.log, sub(1), at(0)).await;
            assert_eq!(texts(&found), expected, "{when}");
            assert_eq!(claim_all(&restarted.log, sub(2), at(0)).await.len(), 11, "{when}");
            let health = restarted.log.health();
            assert_eq!(health.corrupt_records, 1, "{when}");
            assert!(
                health.corrupt[0].contains(&format!("at bytes {start} to")),
                "{when}: {:?}",
                health.corrupt
            );
            let [lost] = &health.lost[..] else {
                panic!("{when}: {:?}", health.lost);
            };
            let lost_of = |id| lost.deliveries[&sub(id)].first_attempts;
            assert!(
                (2..=3).contains(&lost_of(1)) && (1..=3).contains(&lost_of(2)),
                "{when}: {lost:?}"
            );
            assert_eq!((lost.to.0 - lost.from.0, lost.end_known), (3, true), "{when}");
            assert_eq!(examined, health.lost, "{when}");
            assert_eq!(health.corrupt_deliveries, lost_of(1) + lost_of(2), "{when}");
            assert_eq!(restarted.log.backlog(sub(1)).waiting, 0, "{when}");
            // Once the rest is settled, nothing needs the segment.
            settle_all(&restarted.log, sub(1), &found, NextStep::Done).await;
            let position = restarted.log.append(events(&[("new", &[1])])).await.unwrap();
            assert_eq!(position, Position(36), "{when}");
        }
    }
}

// Like above, in a segment opened by its index: the damage is noticed only when the record is read.
#[tokio::test]
async fn damage_behind_an_index_is_found_when_it_is_read() {
    let (opened, claims) = twelve_requests(900).await;
    assert!(opened.log.health().segments > 3);
    opened.log.release(sub(1), claims.clone());
    let (image, state) = opened.closed().await;
    // Restart so that every segment has its index and is not read at the start.
    let (image, state) = OpenedLog::on(image, Some(&state), SEGMENT).await.closed().await;
    for request in 0..12 {
        let first = &claims[request * 2];
        let (name, offset) = place_of(&image, first);
        for within in [2, 30, 60] {
            let mut image = image.clone();
            image.get_mut(&name).unwrap()[offset + within] ^= 0x10;
            let restarted = OpenedLog::on(image, Some(&state), SEGMENT).await;
            assert_eq!(restarted.log.health().corrupt_records, 0);
            let found = claim_all(&restarted.log, sub(1), at(0)).await;
            let mut expected = texts(&claims);
            expected.drain(request * 2..request * 2 + 2);
            assert_eq!(texts(&found), expected, "request {request}, byte {within}");
            let health = restarted.log.health();
            assert!(
                health.corrupt[0].contains(&format!("{name} at byte {offset}")),
                "{:?}",
                health.corrupt
            );
            assert_eq!(restarted.log.backlog(sub(1)).waiting, 0);
            // The damaged records do not hold back any subscription, so their segment is deleted.
            let other = claim_all(&restarted.log, sub(2), at(0)).await;
            settle_all(&restarted.log, sub(1), &found, NextStep::Done).await;
            settle_all(&restarted.log, sub(2), &other, NextStep::Done).await;
            restarted.log.close().await.unwrap();
            assert_eq!(
                restarted.log.health().segments,
                1,
                "request {request}, byte {within}"
            );
        }
    }
}

// A look at the files finds what a start finds, and changes nothing.
#[tokio::test]
async fn a_look_at_the_files_finds_what_a_start_finds() {
    let (opened, claims) = twelve_requests(900).await;
    let older = opened.state();
    settle_all(&opened.log, sub(1), &claims, NextStep::RetryAt(at(5))).await;
    let (image, state) = opened.closed().await;
    let names = logs(&image);
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("state.redb");
    let look = |image: &DiskImage, state: &[u8]| {
        std::fs::write(&copy, state).unwrap();
        let disk = FaultDisk::new(image.clone());
        let found = examine(&copy, Arc::new(disk.clone())).unwrap();
        assert!(disk.image() == *image, "a look changed something");
        found
    };
    // Retries and first attempts of a segment that is missing.
    let mut missing = image.clone();
    missing.remove(&names[1]);
    let found = look(&missing, &state);
    let restarted = OpenedLog::on(missing, Some(&state), 900).await;
    assert_eq!(found.lost, restarted.log.health().lost);
    assert!(found.lost[0].deliveries[&sub(1)].retries > 0, "{found:?}");
    // The head of a closed segment.
    let mut headless = image.clone();
    headless.get_mut(&names[1]).unwrap()[..64].fill(0);
    let found = look(&headless, &state);
    assert!(found.damaged[0].contains(&names[1]), "{found:?}");
    // An older state database beside a newer log.
    let (newer, _) = OpenedLog::on(image, Some(&state), 900).await.closed().await;
    let found = look(&newer, &older);
    let why = found.refused.expect("a start refuses it");
    assert!(why.contains("is an older copy"), "{why}");
}

/// The file that holds a claim's record, and where in it.
fn place_of(image: &DiskImage, claim: &Claim) -> (String, usize) {
    let bases = image.keys().filter_map(|name| segment::base_of(name));
    let base = bases.filter(|base| *base <= claim.entry.first).max().unwrap();
    (segment::log_name(base), claim.entry.place as usize)
}

#[tokio::test]
async fn a_retry_whose_record_is_damaged_is_dropped_and_reported() {
    let (opened, claims) = twelve_requests(900).await;
    settle_all(&opened.log, sub(1), &claims, NextStep::RetryAt(at(5))).await;
    let (mut image, state) = opened.closed().await;
    let (name, offset) = place_of(&image, &claims[4]);
    image.get_mut(&name).unwrap()[offset + 50] ^= 1;
    let restarted = OpenedLog::on(image, Some(&state), SEGMENT).await;
    let found = claim_all(&restarted.log, sub(1), at(5)).await;
    let mut expected = texts(&claims);
    expected.drain(4..6);
    assert_eq!(texts(&found), expected);
    assert!(!restarted.log.health().corrupt.is_empty());
    settle_all(&restarted.log, sub(1), &found, NextStep::Done).await;
    eventually("nothing is left", || {
        restarted.log.backlog(sub(1)) == Backlog::default()
    })
    .await;
}

#[tokio::test]
async fn a_damaged_head_or_index_costs_no_event() {
    let (opened, claims) = twelve_requests(900).await;
    opened.log.release(sub(1), claims.clone());
    let (image, state) = opened.closed().await;
    let (image, state) = OpenedLog::on(image, Some(&state), SEGMENT).await.closed().await;
    let check = async |image: DiskImage, reported: bool, when: &str| {
        let restarted = OpenedLog::on(image, Some(&state), SEGMENT).await;
        assert_eq!(
            texts(&claim_all(&restarted.log, sub(1), at(0)).await),
            texts(&claims),
            "{when}"
        );
        let health = restarted.log.health();
        assert_eq!(
            !health.corrupt.is_empty(),
            reported,
            "{when}: {:?}",
            health.corrupt
        );
    };
    let written = image.keys().filter(|name| !name.starts_with("spare"));
    for name in written {
        // An index is rebuilt; only damage that cannot be repaired is reported.
        let reported = name.ends_with(".log") && image[name].len() > 64;
        for byte in [0, 9, 17, 26, 33] {
            let mut image = image.clone();
            image.get_mut(name).unwrap()[byte] ^= 4;
            check(image, reported, &format!("{name} at {byte}")).await;
        }
        if name.ends_with(".idx") {
            let mut without = image.clone();
            without.remove(name);
            check(without, false, &format!("without {name}")).await;
            let mut emptied = image.clone();
            emptied.get_mut(name).unwrap().clear();
            check(emptied, false, &format!("{name} is empty")).await;
        }
    }
    let without = image.iter().filter(|(name, _)| name.ends_with(".log"));
    check(
        without
            .map(|(name, bytes)| (name.clone(), bytes.clone()))
            .collect(),
        false,
        "without indexes",
    )
    .await;
    // An index without a segment is removed.
    let mut orphaned = image.clone();
    orphaned.insert("00000000000000009999.idx".into(), b"nothing".to_vec());
    let restarted = OpenedLog::on(orphaned, Some(&state), SEGMENT).await;
    assert!(!restarted.disk.image().contains_key("00000000000000009999.idx"));
}

#[tokio::test]
async fn a_log_without_its_state_is_refused_and_left_alone() {
    let (opened, _) = twelve_requests(SEGMENT).await;
    let (image, _) = opened.closed().await;
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultDisk::new(image.clone());
    let state = directory.path().join("state.redb");
    let result = EmbeddedLog::open_on(Arc::new(disk.clone()), &state, 8, SEGMENT).await;
    assert!(matches!(result, Err(Error::Corrupt(_))));
    assert_eq!(disk.image(), image);
}

#[tokio::test]
async fn a_full_disk_refuses_publishes_until_there_is_room() {
    let opened = OpenedLog::fresh(&[1], 200 << 10).await;
    opened.disk.limit(Some(1 << 20));
    let text = "p".repeat(10_000);
    let mut known = BTreeMap::new();
    let refused = loop {
        let text = format!("{} {text}", known.len());
        match opened.log.append(events(&[(&text, &[1])])).await {
            Ok(position) => known.insert(position, text),
            Err(e) => break Err::<(), _>(e),
        };
    };
    assert!(is_unavailable(&refused), "{refused:?}");
    assert!(known.len() > 50, "{} went in", known.len());
    assert!(opened.log.health().refusing.is_some());
    check_all_there(&opened.log, &known, "while it is full").await;

    // A crash at this point loses nothing either.
    let restarted = OpenedLog::on(opened.disk.image(), Some(&opened.state()), 200 << 10).await;
    check_all_there(&restarted.log, &known, "after a crash").await;

    // Once the stored events are delivered, publishing works again without intervention.
    let claims = claim_all(&opened.log, sub(1), at(0)).await;
    settle_all(&opened.log, sub(1), &claims, NextStep::Done).await;
    eventually("publishes are taken again", || {
        opened.log.health().refusing.is_none()
    })
    .await;
    let position = opened.log.append(events(&[("new", &[1])])).await.unwrap();
    assert!(known.keys().all(|known| *known < position));
    let (image, state) = opened.closed().await;
    let restarted = OpenedLog::on(image, Some(&state), 200 << 10).await;
    assert_eq!(texts(&claim_all(&restarted.log, sub(1), at(0)).await), ["new"]);
}

#[tokio::test]
async fn room_that_returns_is_used() {
    let opened = OpenedLog::fresh(&[1], SEGMENT).await;
    opened.disk.limit(Some(100 << 10));
    opened.log.append(events(&[("a", &[1])])).await.unwrap();
    let big = "p".repeat(100_000);
    assert!(is_unavailable(&opened.log.append(events(&[(&big, &[1])])).await));
    opened.disk.limit(None);
    eventually("publishes are taken again", || {
        opened.log.health().refusing.is_none()
    })
    .await;
    opened.log.append(events(&[(&big, &[1])])).await.unwrap();
    assert_eq!(claim_all(&opened.log, sub(1), at(0)).await.len(), 2);
}

/// Waits until publishing works and appends; returns the position.
async fn append_at_last(log: &dyn EventLog, text: &str) -> Position {
    eventually("publishes are taken again", || log.health().refusing.is_none()).await;
    log.append(events(&[(text, &[1])])).await.unwrap()
}

// Fail a flush or a write before anything is in the segment, after something is, and twice in a
// row.
#[tokio::test]
async fn after_a_failed_flush_the_log_goes_on_in_a_new_segment() {
    for (round, before) in [0, 1, 5].into_iter().enumerate() {
        for (writes, syncs) in [(0, 1), (1, 0), (0, 3), (2, 1)] {
            let opened = OpenedLog::fresh(&[1], SEGMENT).await;
            let mut known = BTreeMap::new();
            for n in 0..before {
                let text = format!("before {n}");
                known.insert(opened.log.append(events(&[(&text, &[1])])).await.unwrap(), text);
            }
            opened.disk.fail_writes(writes);
            opened.disk.fail_syncs(syncs);
            let long = "refused ".repeat(300);
            let refused = opened
                .log
                .append(events(&[(&long, &[1]), ("also refused", &[1])]))
                .await;
            assert!(is_unavailable(&refused), "{refused:?}");
            for n in 0..3 {
                let text = format!("after {n}");
                let position = append_at_last(&opened.log, &text).await;
                known.insert(position, text);
            }
            check_all_there(&opened.log, &known, "while it runs").await;
            let state = opened.state();
            for seed in 0..20 {
                let when = format!("round {round}, {writes} writes, {syncs} flushes, seed {seed}");
                let image = if seed == 0 {
                    opened.disk.image()
                } else {
                    opened.disk.cut(seed)
                };
                let restarted = OpenedLog::on(image, Some(&state), SEGMENT).await;
                check_all_there(&restarted.log, &known, &when).await;
                assert_eq!(restarted.log.health().corrupt, [""; 0], "{when}");
            }
        }
    }
}

#[tokio::test]
async fn segments_go_when_nobody_needs_them() {
    let opened = OpenedLog::fresh(&[1, 2], 8 << 10).await;
    let text = "p".repeat(1_000);
    for _ in 0..100 {
        opened
            .log
            .append(events(&[(&text, &[1]), ("for two", &[2])]))
            .await
            .unwrap();
    }
    let log = &opened.log;
    let full = log.health().segments;
    assert!(full > 10, "{full} segments");
    let one = claim_all(log, sub(1), at(0)).await;
    let two = claim_all(log, sub(2), at(0)).await;
    // Settle all but one retry in the middle and one dead letter further on.
    let rest: Vec<Claim> = one
        .iter()
        .enumerate()
        .filter(|(n, _)| *n != 30)
        .map(|(_, c)| c.clone())
        .collect();
    settle_all(log, sub(1), &rest, NextStep::Done).await;
    settle_all(log, sub(1), &one[30..31], NextStep::RetryAt(at(50))).await;
    settle_all(log, sub(2), &two[..90], NextStep::Done).await;
    settle_all(log, sub(2), &two[91..], NextStep::Done).await;
    settle_all(
        log,
        sub(2),
        &two[90..91],
        NextStep::DeadLetter(GiveUpReason::BadRequest),
    )
    .await;
    eventually("the others are gone", || log.health().segments == 3).await;
    assert_eq!(log.pending_dead_letters()[0].count, 1);
    let retry = claim_all(log, sub(1), at(50)).await;
    assert_eq!(retry.len(), 1);
    settle_all(log, sub(1), &retry, NextStep::Done).await;

    let (image, state) = opened.closed().await;
    let logs = image.keys().filter(|name| name.ends_with(".log")).count();
    assert_eq!(
        logs,
        2,
        "the dead letter's and the current one: {:?}",
        image.keys()
    );
    let restarted = OpenedLog::on(image, Some(&state), 8 << 10).await;
    let log = &restarted.log;
    assert_eq!(log.subscriptions(), []);
    log.close_subscription(sub(1)).await.unwrap();
    eventually("only the letter's and the current one", || {
        log.health().segments == 2
    })
    .await;
    let letters = log.letters(sub(2), None, at(100), WANT).await.unwrap();
    assert_eq!(letters[0].object(), "for two");
    // No publish follows that would cause a checkpoint.
    log.dead_letters_done(sub(2), vec![letters[0].key()])
        .await
        .unwrap();
    assert_eq!(log.health().segments, 1);
}

#[tokio::test]
async fn a_segment_stays_until_all_of_its_letters_are_done() {
    let opened = OpenedLog::fresh(&[1], 8 << 10).await;
    let text = "p".repeat(1_000);
    for _ in 0..40 {
        let request: Vec<(&str, &[u64])> = vec![(&text, &[1]), ("small", &[1])];
        opened.log.append(events(&request)).await.unwrap();
    }
    let log = &opened.log;
    let claims = claim_all(log, sub(1), at(0)).await;
    settle_all(
        log,
        sub(1),
        &claims,
        NextStep::DeadLetter(GiveUpReason::BadRequest),
    )
    .await;
    log.flush().await.unwrap();
    let full = log.health().segments;
    assert!(full > 4, "{full} segments");
    let page = ClaimLimits {
        events_max: 7,
        ..WANT
    };
    let mut last = full;
    loop {
        let letters = log.letters(sub(1), None, at(100), page).await.unwrap();
        if letters.is_empty() {
            break;
        }
        let keys = letters.iter().map(|letter| letter.key()).collect();
        log.dead_letters_done(sub(1), keys).await.unwrap();
        let now = log.health().segments;
        assert!(now == last || now + 1 == last, "{now} segments after {last}");
        last = now;
    }
    assert_eq!((last, log.pending_dead_letters()), (1, vec![]));

    // Closing the subscription releases the segments as well.
    for _ in 0..40 {
        log.append(events(&[(&text, &[1])])).await.unwrap();
    }
    let claims = claim_all(log, sub(1), at(0)).await;
    settle_all(
        log,
        sub(1),
        &claims,
        NextStep::DeadLetter(GiveUpReason::BadRequest),
    )
    .await;
    assert_eq!(log.close_subscription(sub(1)).await.unwrap(), 40);
    eventually("only the current one", || log.health().segments == 1).await;
    let (image, state) = opened.closed().await;
    let restarted = OpenedLog::on(image, Some(&state), 8 << 10).await;
    assert_eq!(restarted.log.pending_dead_letters(), []);
}

#[tokio::test]
async fn a_letter_whose_record_is_damaged_is_dropped_and_reported() {
    let (opened, claims) = twelve_requests(900).await;
    settle_all(
        &opened.log,
        sub(1),
        &claims,
        NextStep::DeadLetter(GiveUpReason::BadRequest),
    )
    .await;
    let (mut image, state) = opened.closed().await;
    // Damage the records of two requests with two dead letters each.
    for request in [2, 7] {
        let (name, offset) = place_of(&image, &claims[request * 2]);
        image.get_mut(&name).unwrap()[offset + 50] ^= 1;
    }
    let restarted = OpenedLog::on(image, Some(&state), SEGMENT).await;
    let log = &restarted.log;
    let known = log.health().corrupt_records;
    assert_eq!(log.pending_dead_letters()[0].count, 24);
    // A page on which everything is damaged continues with the next dead letter.
    let after = (at(2), claims[3].position());
    let one = ClaimLimits {
        events_max: 1,
        ..WANT
    };
    let letters = log.letters(sub(1), Some(after), at(9), one).await.unwrap();
    assert_eq!(letters[0].object(), claims[6].object());
    assert_eq!(log.pending_dead_letters()[0].count, 22);
    assert_eq!(log.health().corrupt_deliveries, 2);
    let letters = log.letters(sub(1), None, at(9), WANT).await.unwrap();
    let mut expected = texts(&claims);
    expected.drain(14..16);
    expected.drain(4..6);
    let found: Vec<&str> = letters.iter().map(|letter| letter.object()).collect();
    assert_eq!(found, expected);
    assert_eq!(log.pending_dead_letters()[0].count, 20);
    let health = log.health();
    assert_eq!(
        (health.corrupt_deliveries, health.corrupt_records),
        (4, known + 2)
    );
    assert_eq!(log.letters(sub(1), None, at(9), WANT).await.unwrap().len(), 20);
    assert_eq!(log.health().corrupt_deliveries, 4);
}

#[tokio::test]
async fn a_subscription_that_is_closed_lets_its_segments_go() {
    let opened = OpenedLog::fresh(&[1], 8 << 10).await;
    let text = "p".repeat(1_000);
    for _ in 0..50 {
        opened.log.append(events(&[(&text, &[1])])).await.unwrap();
    }
    let claims = opened
        .log
        .claim(
            sub(1),
            at(0),
            ClaimLimits {
                events_max: 20,
                ..WANT
            },
        )
        .await
        .unwrap();
    settle_all(&opened.log, sub(1), &claims, NextStep::RetryAt(at(5))).await;
    assert_eq!(opened.log.close_subscription(sub(1)).await.unwrap(), 50);
    let (image, _) = opened.closed().await;
    assert_eq!(image.keys().filter(|name| name.ends_with(".log")).count(), 1);
}

// ---- missing segments ----------------------------------------------------------------------

/// Requests of two events for subscriptions 1 and 2, in several segments; subscription 2 has
/// settled the first half except for one retry and one dead letter.
async fn several_segments() -> (DiskImage, Vec<u8>, Vec<Claim>) {
    let opened = OpenedLog::fresh(&[1, 2, 3], 4 << 10).await;
    let text = "p".repeat(500);
    for n in 0..40 {
        let text = format!("{n} {text}");
        opened
            .log
            .append(events(&[(&text, &[1, 2]), ("two", &[2])]))
            .await
            .unwrap();
    }
    let log = &opened.log;
    let half = ClaimLimits {
        events_max: 40,
        ..WANT
    };
    let two = log.claim(sub(2), at(0), half).await.unwrap();
    settle_all(log, sub(2), &two[..1], NextStep::RetryAt(at(50))).await;
    settle_all(
        log,
        sub(2),
        &two[1..2],
        NextStep::DeadLetter(GiveUpReason::BadRequest),
    )
    .await;
    settle_all(log, sub(2), &two[2..], NextStep::Done).await;
    log.flush().await.unwrap();
    let one = claim_all(log, sub(1), at(0)).await;
    assert_eq!(one.len(), 40);
    log.release(sub(1), one.clone());
    let (image, state) = opened.closed().await;
    (image, state, one)
}

fn logs(image: &DiskImage) -> Vec<String> {
    image
        .keys()
        .filter(|name| name.ends_with(".log"))
        .cloned()
        .collect()
}

/// A round of scrubbing: the sum of its steps.
fn scrub_round(scrub: &mut Scrub) -> ScrubStep {
    let mut round = ScrubStep::default();
    while !round.is_last {
        let step = scrub.step().unwrap();
        round.bytes += step.bytes;
        round.damaged += step.damaged;
        round.is_last = step.is_last;
    }
    round
}

#[tokio::test]
async fn damage_is_found_by_a_scrub_while_the_server_runs() {
    let (image, state, claims) = several_segments().await;
    let opened = OpenedLog::on(image, Some(&state), 4 << 10).await;
    let path = |name: &str| opened.directory.path().join(name);
    let catalog = EmbeddedCatalog::open(&path("catalog.redb"), keys()).unwrap();
    let archive = EmbeddedArchive::open(&path("archive.redb")).unwrap();
    let mut scrub = opened.log.scrub(&catalog, &archive);
    let whole = scrub_round(&mut scrub);
    assert_eq!(whole.damaged, 0);
    let image = opened.disk.image();
    let used: u64 = logs(&image).iter().map(|name| image[name].len() as u64).sum();
    assert!(whole.bytes > used / 2, "{} of {used} bytes", whole.bytes);

    // Damage a record that was not read since the start, an index, and blocks of two databases.
    let (name, offset) = place_of(&image, &claims[20]);
    opened.disk.flip(&name, offset + 50);
    let index = segment::index_name(claims[0].entry.first);
    opened.disk.flip(&index, 40);
    for name in ["catalog.redb", "state.redb"] {
        let mut bytes = std::fs::read(path(name)).unwrap();
        bytes[10_000] ^= 1;
        std::fs::write(path(name), bytes).unwrap();
    }
    assert_eq!(scrub_round(&mut scrub).damaged, 4);
    let health = opened.log.health();
    assert_eq!(health.corrupt_records, 4);
    for place in [
        format!("{name} at bytes {offset} to "),
        index,
        "catalog.redb: the block at byte ".into(),
        "state.redb: the block at byte ".into(),
    ] {
        let named = health.corrupt.iter().any(|known| known.contains(&place));
        assert!(named, "{place} is not in {:?}", health.corrupt);
    }
    // Known damage is reported once.
    assert_eq!(scrub_round(&mut scrub).damaged, 0);
    assert_eq!(opened.log.health().corrupt_records, 4);
}

// Damage found during operation is known to the next start, which does not read closed segments.
#[tokio::test]
async fn damage_that_was_found_is_reported_until_it_is_taken_note_of() {
    let (image, state, claims) = several_segments().await;
    let opened = OpenedLog::on(image, Some(&state), 4 << 10).await;
    let (name, offset) = place_of(&opened.disk.image(), &claims[20]);
    opened.disk.flip(&name, offset + 50);
    let found = claim_all(&opened.log, sub(1), at(0)).await;
    assert_eq!(found.len(), 39);
    let known = opened.log.health().corrupt;
    assert_eq!(known.len(), 1);
    opened.log.release(sub(1), found);
    let (image, state) = opened.closed().await;
    let again = OpenedLog::on(image, Some(&state), 4 << 10).await;
    assert_eq!(again.log.health().corrupt, known);
}

// A block of the state database becomes unreadable while the server runs.
#[tokio::test]
async fn a_state_database_that_is_damaged_while_it_is_used_shows() {
    let opened = OpenedLog::fresh(&[1], SEGMENT).await;
    opened.log.append(events(&[("a", &[1])])).await.unwrap();
    let claims = claim_all(&opened.log, sub(1), at(0)).await;
    opened.log.flush().await.unwrap();
    assert_eq!(opened.log.health().unrecorded, None);
    let path = opened.directory.path().join("state.redb");
    let flip = || {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 2000).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 2000).unwrap();
    };
    flip();
    settle_all(&opened.log, sub(1), &claims, NextStep::RetryAt(at(50))).await;
    eventually("it shows", || {
        let health = opened.log.health();
        health.unrecorded.is_some() && health.corrupt.iter().any(|place| place.contains("state.redb"))
    })
    .await;
    flip();
    eventually("it goes on", || opened.log.health().unrecorded.is_none()).await;
    assert_eq!(claim_all(&opened.log, sub(1), at(50)).await.len(), 1);
}

// Remove, empty, truncate or replace each segment in turn, with and without its index.
#[tokio::test]
async fn a_missing_segment_is_reported_with_what_it_held() {
    let (image, state, one) = several_segments().await;
    let logs = logs(&image);
    assert!(logs.len() > 4, "{logs:?}");
    let base = |name: &str| name[..20].parse::<u64>().unwrap();
    for (n, name) in logs.iter().enumerate() {
        let end = logs.get(n + 1).map_or(80, |next| base(next));
        if base(name) == end {
            continue;
        }
        for with_index in [true, false] {
            for (how, keep) in [("gone", None), ("empty", Some(0)), ("cut", Some(1000))] {
                let when = format!("{name} {how}, with its index: {with_index}");
                let mut image = image.clone();
                match keep {
                    None => drop(image.remove(name)),
                    Some(len) => image.get_mut(name).unwrap().truncate(len),
                }
                let index = name.replace(".log", ".idx");
                if !with_index {
                    image.remove(&index);
                }
                let restarted = OpenedLog::on(image, Some(&state), 4 << 10).await;
                let health = restarted.log.health();
                assert!(!health.corrupt.is_empty(), "{when}");
                let found = claim_all(&restarted.log, sub(1), at(0)).await;
                let lost: Vec<&Claim> = one
                    .iter()
                    .filter(|claim| (base(name)..end).contains(&claim.position().0))
                    .filter(|claim| !texts(&found).contains(&claim.object().to_owned()))
                    .collect();
                assert_eq!(
                    found.len() + lost.len(),
                    one.len(),
                    "{when}: the rest is delivered"
                );
                if how == "cut" {
                    assert!(health.corrupt[0].contains(name), "{when}: {:?}", health.corrupt);
                    continue;
                }
                let [gap] = &health.lost[..] else {
                    panic!("{when}: {:?}", health.lost);
                };
                assert_eq!((gap.from.0, gap.to.0), (base(name), end), "{when}");
                let of_one = gap.deliveries[&sub(1)];
                if of_one.exact {
                    assert_eq!(of_one.first_attempts, lost.len() as u64, "{when}");
                } else {
                    assert!(of_one.first_attempts >= lost.len() as u64, "{when}");
                }
                let of_two = gap.deliveries.get(&sub(2)).copied().unwrap_or_default();
                let failed = (of_two.retries, of_two.letters);
                assert_eq!(failed, if n == 0 { (1, 1) } else { (0, 0) }, "{when}");
                assert!(health.corrupt_deliveries >= lost.len() as u64, "{when}");
                assert!(
                    health.corrupt[0].contains("are lost"),
                    "{when}: {:?}",
                    health.corrupt
                );
                let next = restarted.log.append(events(&[("new", &[3])])).await.unwrap();
                assert!(next.0 >= 80, "{when}: {next} was given out before");
                // The loss was reported once, and the index is kept as evidence.
                if with_index && n + 1 < logs.len() && how == "gone" {
                    assert!(
                        restarted.disk.image().contains_key(&format!("{index}.orphan")),
                        "{when}"
                    );
                }
                let (image, state) = restarted.closed().await;
                let again = OpenedLog::on(image, Some(&state), 4 << 10).await;
                // Reported until the operator acknowledges it.
                let health_again = again.log.health();
                assert_eq!(health_again.lost, health.lost, "{when}");
                assert_eq!(health_again.corrupt_deliveries, 0, "{when}: counted once");
                let directory = again.directory.path().to_owned();
                again.log.close().await.unwrap();
                let image = again.disk.image();
                drop(again.log);
                let path = directory.join("state.redb");
                assert!(!segment_gaps::known_losses(&path).unwrap().is_empty(), "{when}");
                assert!(!restore::forget_losses(&directory).unwrap().is_empty(), "{when}");
                let state = std::fs::read(&path).unwrap();
                let noted = OpenedLog::on(image, Some(&state), 4 << 10).await;
                assert_eq!(noted.log.health().lost, [], "{when}");
                assert_eq!(noted.log.health().corrupt, [""; 0], "{when}");
            }
        }
    }
}

#[tokio::test]
async fn exchanged_segments_are_refused_and_named() {
    let (mut image, state, _) = several_segments().await;
    let logs = logs(&image);
    let of_first = image[&logs[1]].clone();
    let of_second = image.insert(logs[2].clone(), of_first).unwrap();
    image.insert(logs[1].clone(), of_second);
    let Err(Error::Corrupt(why)) = OpenedLog::try_on(image, Some(&state), 4 << 10).await else {
        panic!("two segments are in each other's place");
    };
    for name in [&logs[1], &logs[2]] {
        assert!(why.contains(name), "{why}");
    }
    assert!(!why.contains("another log"), "{why}");
}

// Segments of equal length with exchanged indexes: judged by length alone, each index fits.
#[tokio::test]
async fn the_index_of_another_segment_is_not_believed() {
    let opened = OpenedLog::fresh(&[1], 4 << 10).await;
    let text = "p".repeat(500);
    for n in 10..50 {
        let to_one = events(&[(&format!("{n} {text}"), &[1])]);
        opened.log.append(to_one).await.unwrap();
    }
    let (image, state) = opened.closed().await;
    let logs = logs(&image);
    let (a, b) = (&logs[1], &logs[3]);
    assert_eq!(image[a].len(), image[b].len());
    let index = |name: &str| name.replace(".log", ".idx");
    // The index as an older program wrote it, without the base.
    let older = |index: &[u8]| {
        let mut older = [b"PRidx1\0\0\0\0\0\0", &index[12..36], &index[44..]].concat();
        let crc = crc32fast::hash(&older[12..]);
        older[8..12].copy_from_slice(&crc.to_le_bytes());
        older
    };
    for (is_older, is_swapped) in [(false, false), (true, false), (false, true), (true, true)] {
        let when = format!("of an older program: {is_older}, swapped: {is_swapped}");
        let mut image = image.clone();
        for name in [a, b] {
            let known = &image[&index(name)];
            let known = if is_older { older(known) } else { known.clone() };
            image.insert(index(name), known);
        }
        if is_swapped {
            let of_a = image[&index(a)].clone();
            let of_b = image.insert(index(b), of_a).unwrap();
            image.insert(index(a), of_b);
        }
        let indexes = [a, b].map(|name| image[&index(name)].clone());
        let restarted = OpenedLog::on(image, Some(&state), 4 << 10).await;
        assert_eq!(claim_all(&restarted.log, sub(1), at(0)).await.len(), 40, "{when}");
        assert_eq!(restarted.log.health().corrupt, [""; 0], "{when}");
        // A valid index was used and not rebuilt.
        let after = restarted.disk.image();
        let kept = [a, b].map(|name| after[&index(name)].clone()) == indexes;
        assert_eq!(kept, !is_swapped, "{when}");
    }
}

#[tokio::test]
async fn a_log_without_any_segment_is_a_loss_of_all_that_waited() {
    let (_, state, _) = several_segments().await;
    let restarted = OpenedLog::on(DiskImage::new(), Some(&state), 4 << 10).await;
    let lost = restarted.log.health().lost;
    assert_eq!(lost.first().unwrap().from, Position(0));
    assert_eq!(lost.last().unwrap().to, Position(80));
    let of_one: u64 = lost
        .iter()
        .filter_map(|one| one.deliveries.get(&sub(1)))
        .map(|one| one.total())
        .sum();
    assert!(of_one >= 40, "{of_one}");
    assert!(restarted.log.append(events(&[("new", &[1])])).await.unwrap() >= Position(80));
}

// Kill the process, and remove, empty or zero the active segment.
#[tokio::test]
async fn the_segment_that_a_killed_process_wrote_to_cannot_vanish_silently() {
    for checkpointed in [false, true] {
        for how in ["gone", "empty", "zeroed", "beginning only"] {
            let when = format!("{how}, with a checkpoint before the last events: {checkpointed}");
            let opened = OpenedLog::fresh(&[1], SEGMENT).await;
            for n in 0..300 {
                if n == 100 && checkpointed {
                    opened.log.flush().await.unwrap();
                }
                opened
                    .log
                    .append(events(&[(&n.to_string(), &[1])]))
                    .await
                    .unwrap();
            }
            let (mut image, state) = (opened.disk.image(), opened.state());
            let name = logs(&image).pop().unwrap();
            let file = image.get_mut(&name).unwrap();
            match how {
                "gone" => drop(image.remove(&name)),
                "empty" => file.clear(),
                "zeroed" => file.fill(0),
                // Without a record of the segment's end, a power loss could have left the same.
                _ if !checkpointed => continue,
                _ => file.truncate(500),
            }
            let directory = tempfile::tempdir().unwrap();
            let copy = directory.path().join("state.redb");
            std::fs::write(&copy, &state).unwrap();
            let examined = examine(&copy, Arc::new(FaultDisk::new(image.clone())))
                .unwrap()
                .lost;

            let restarted = OpenedLog::on(image, Some(&state), SEGMENT).await;
            let health = restarted.log.health();
            let [lost] = &health.lost[..] else {
                panic!("{when}: {:?}", health.lost);
            };
            assert!(!lost.end_known, "{when}: {lost:?}");
            assert!(
                lost.from.0 < 10 && !lost.deliveries[&sub(1)].exact,
                "{when}: {lost:?}"
            );
            assert_eq!(
                lost.to.0,
                if checkpointed { 100 } else { 0 },
                "{when}: as far as is known"
            );
            assert_eq!(examined, health.lost, "{when}");
            assert!(health.corrupt[0].contains(&name), "{when}: {:?}", health.corrupt);
            let next = restarted.log.append(events(&[("new", &[1])])).await.unwrap();
            assert!(next.0 >= 300, "{when}: position {next} was given out before");
            let found = claim_all(&restarted.log, sub(1), at(0)).await;
            assert_eq!(texts(&found).last().map(String::as_str), Some("new"), "{when}");
        }
    }
}

#[tokio::test]
async fn a_segment_without_an_event_is_no_loss() {
    // Killed before the first event: nothing is missing.
    let opened = OpenedLog::fresh(&[1], SEGMENT).await;
    let again = OpenedLog::on(opened.disk.image(), Some(&opened.state()), SEGMENT).await;
    assert_eq!(again.log.health().lost, []);
    // Stopped in order: the state database knows that there was no event.
    let (mut image, state) = again.closed().await;
    image.retain(|name, _| !name.ends_with(".log"));
    let again = OpenedLog::on(image, Some(&state), SEGMENT).await;
    assert_eq!(again.log.health().lost, []);
    assert_eq!(
        again.log.append(events(&[("a", &[1])])).await.unwrap(),
        Position(0)
    );
}

// A power loss after the head of the first segment was durable and before the state database was.
#[tokio::test]
async fn a_first_start_that_was_cut_short_leaves_a_usable_directory() {
    let (image, _) = OpenedLog::fresh(&[], SEGMENT).await.closed().await;
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultDisk::new(image);
    let state = directory.path().join("state.redb");
    let log = EmbeddedLog::open_on(Arc::new(disk), &state, 8, SEGMENT)
        .await
        .unwrap();
    assert_eq!(log.health().corrupt, [""; 0]);
    log.open_subscription(sub(1)).await.unwrap();
    log.append(events(&[("a", &[1])])).await.unwrap();
    assert_eq!(claim_all(&log, sub(1), at(0)).await.len(), 1);
}

// With a publish every few milliseconds, settlements are on disk with the next one: counted, not
// timed.
#[tokio::test]
async fn what_is_settled_is_on_disk_with_the_next_publish() {
    let ids: Vec<u64> = (1..=23).collect();
    let opened = OpenedLog::fresh(&ids, SEGMENT).await;
    let mut offered_again = 0;
    for n in 0..20 {
        opened
            .log
            .append(events(&[(&format!("{n}"), &ids)]))
            .await
            .unwrap();
        for id in &ids {
            let claims = claim_all(&opened.log, sub(*id), at(0)).await;
            settle_all(&opened.log, sub(*id), &claims, NextStep::Done).await;
        }
        opened.log.append(events(&[("next", &[])])).await.unwrap();
        // Killed here.
        let again = OpenedLog::on(opened.disk.image(), Some(&opened.state()), SEGMENT).await;
        offered_again += again.log.health().redelivered;
        for id in &ids {
            offered_again += claim_all(&again.log, sub(*id), at(0)).await.len() as u64;
        }
    }
    // A settlement may miss a commit that is already under way, but not all of 460.
    assert!(offered_again <= 23, "{offered_again} of 460 were offered again");
}

// ---- damaged and older databases ----------------------------------------------------------------

// Flip single bits all over the file: either nothing in use was hit, or the start reports what was.
#[tokio::test]
async fn a_flipped_bit_in_the_state_database_is_never_silent() {
    let opened = OpenedLog::fresh(&[1, 2], SEGMENT).await;
    for n in 0..300 {
        opened
            .log
            .append(events(&[(&format!("{n}"), &[1, 2])]))
            .await
            .unwrap();
    }
    let one = claim_all(&opened.log, sub(1), at(0)).await;
    settle_all(&opened.log, sub(1), &one, NextStep::RetryAt(at(50))).await;
    let two = claim_all(&opened.log, sub(2), at(0)).await;
    settle_all(
        &opened.log,
        sub(2),
        &two,
        NextStep::DeadLetter(GiveUpReason::BadRequest),
    )
    .await;
    opened.log.flush().await.unwrap();
    let (image, state) = opened.closed().await;
    let used = state.iter().rposition(|byte| *byte != 0).unwrap();
    let (mut refused, mut unharmed) = (0, 0);
    for at_byte in (20..used).step_by((used / 60).max(1)) {
        let mut state = state.clone();
        state[at_byte] ^= 1 << (at_byte % 8);
        match OpenedLog::try_on(image.clone(), Some(&state), SEGMENT).await {
            Err(Error::Corrupt(why)) => {
                assert!(
                    why.contains("state.redb") && why.contains("postrider restore"),
                    "{why}"
                );
                refused += 1;
            }
            Err(e) => panic!("byte {at_byte}: {e}"),
            Ok(opened) => {
                assert_eq!(opened.log.backlog(sub(1)).retrying, 300, "byte {at_byte}");
                assert_eq!(opened.log.pending_dead_letters()[0].count, 300, "byte {at_byte}");
                assert_eq!(
                    claim_all(&opened.log, sub(1), at(50)).await.len(),
                    300,
                    "byte {at_byte}"
                );
                unharmed += 1;
            }
        }
    }
    assert!(refused > 0, "{refused} refused, {unharmed} in free space");
}

#[tokio::test]
async fn a_damaged_state_database_is_salvaged_and_what_may_be_open_is_delivered_again() {
    let directory = tempfile::tempdir().unwrap();
    let log = EmbeddedLog::open(directory.path(), 7).await.unwrap();
    for id in [1, 2] {
        log.open_subscription(sub(id)).await.unwrap();
    }
    for n in 0..300 {
        log.append(events(&[(&format!("{n}"), &[1, 2])])).await.unwrap();
    }
    for id in [1, 2] {
        let claims = claim_all(&log, sub(id), at(0)).await;
        settle_all(&log, sub(id), &claims, NextStep::RetryAt(at(50))).await;
    }
    log.flush().await.unwrap();
    log.close().await.unwrap();
    drop(log);
    let path = directory.path().join("state.redb");
    let whole = std::fs::read(&path).unwrap();
    let used = whole.iter().rposition(|byte| *byte != 0).unwrap();
    let mut salvaged = 0;
    for at_byte in (20..used).step_by((used / 40).max(1)) {
        let mut state = whole.clone();
        state[at_byte] ^= 4;
        // All files are of the same time, and only this one is damaged.
        let copy = tempfile::tempdir().unwrap();
        std::fs::create_dir(copy.path().join("log")).unwrap();
        for file in std::fs::read_dir(directory.path().join("log")).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), copy.path().join("log").join(file.file_name())).unwrap();
        }
        std::fs::write(copy.path().join("state.redb"), &state).unwrap();
        let open = async || EmbeddedLog::open(copy.path(), 7).await;
        if open().await.is_ok() {
            continue;
        }
        let told = restore::accept_damage(copy.path(), None).unwrap();
        assert!(told.iter().any(|line| line.contains("kept as")), "{told:?}");
        let log = open().await.unwrap();
        for id in [1, 2] {
            let mut found: BTreeSet<Position> = claim_all(&log, sub(id), at(0))
                .await
                .iter()
                .map(Claim::position)
                .collect();
            found.extend(claim_all(&log, sub(id), at(50)).await.iter().map(Claim::position));
            assert_eq!(found.len(), 300, "byte {at_byte}, subscription {id}: {told:?}");
        }
        log.close().await.unwrap();
        salvaged += 1;
        if salvaged == 4 {
            return;
        }
    }
    assert!(salvaged > 0);
}

fn keys() -> Arc<Keyring> {
    let key = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    Arc::new(Keyring::parse(key, "a test").unwrap())
}

#[tokio::test]
async fn an_older_state_database_or_catalogue_is_refused_until_it_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let life = async |name: &str| {
        let generations = Generations::check(directory.path())?;
        let log = EmbeddedLog::open_with(directory.path(), 7, generations.clone()).await?;
        let catalog = directory.path().join("catalog.redb");
        let catalog = EmbeddedCatalog::open_with(&catalog, keys(), generations.clone())?;
        let archive = directory.path().join("archive.redb");
        let _archive = EmbeddedArchive::open_with(&archive, generations)?;
        catalog.next_id().await?;
        log.open_subscription(sub(1)).await?;
        log.append(events(&[(name, &[1])])).await?;
        log.close().await
    };
    life("a").await.unwrap();
    for file in ["state.redb", "catalog.redb", "archive.redb"] {
        let path = directory.path().join(file);
        let older = std::fs::read(&path).unwrap();
        life("b").await.unwrap();
        let newer = std::fs::read(&path).unwrap();
        std::fs::write(&path, &older).unwrap();
        // Repeated attempts are refused as well.
        for _ in 0..4 {
            let Err(Error::Corrupt(why)) = life("c").await else {
                panic!("{file} is older, and nobody minds");
            };
            assert!(why.contains(&format!("{file} is an older copy")), "{why}");
            assert!(why.contains("--accept-mixed-files"), "{why}");
        }
        std::fs::write(&path, &newer).unwrap();
        life("d").await.unwrap();
        std::fs::write(&path, &older).unwrap();
        let told = restore::accept_mixed_files(directory.path()).unwrap();
        assert!(told.iter().any(|line| line.contains(file)), "{told:?}");
        life("e").await.unwrap();
        assert_eq!(restore::accept_mixed_files(directory.path()).unwrap(), [""; 0]);
    }
    // A rewritten file is newer, and its former version counts as older.
    let path = directory.path().join("catalog.redb");
    let older = std::fs::read(&path).unwrap();
    rewrite_catalog(&path, &keys()).unwrap();
    assert!(std::fs::read(&path).unwrap().starts_with(b"PRblocks1"));
    for file in ["archive.redb", "state.redb"] {
        postrider_embedded::compact(&directory.path().join(file)).unwrap();
    }
    life("rewritten").await.unwrap();
    let rewritten = std::fs::read(&path).unwrap();
    std::fs::write(&path, &older).unwrap();
    let Err(Error::Corrupt(why)) = life("c").await else {
        panic!("the catalogue from before it was rewritten is older, and nobody minds");
    };
    assert!(why.contains("catalog.redb is an older copy"), "{why}");
    std::fs::write(&path, &rewritten).unwrap();
    life("again").await.unwrap();
    // Without the other databases only the log detects the older copy.
    let path = directory.path().join("state.redb");
    let older = std::fs::read(&path).unwrap();
    life("f").await.unwrap();
    std::fs::write(&path, &older).unwrap();
    let Err(Error::Corrupt(why)) = EmbeddedLog::open(directory.path(), 7).await else {
        panic!("the log has seen a later one");
    };
    assert!(why.contains("the log has seen"), "{why}");
}

// A change of the catalog, and nothing published or delivered after it.
#[tokio::test]
async fn an_older_catalogue_is_found_out_though_nothing_followed_its_last_change() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let generations = Generations::check(directory.path()).unwrap();
    let log = EmbeddedLog::open_with(directory.path(), 7, generations.clone())
        .await
        .unwrap();
    let catalog = EmbeddedCatalog::open_with(&path("catalog.redb"), keys(), generations).unwrap();
    catalog
        .commit(vec![CatalogChange::PutTopic(topic(1, "a"))])
        .await
        .unwrap();
    let older = whole_file(&path("catalog.redb"));
    catalog
        .commit(vec![CatalogChange::PutTopic(topic(2, "b"))])
        .await
        .unwrap();
    // Killed here, with the older catalog restored: a checkpoint follows soon.
    eventually("the older one is refused", || {
        let copy = tempfile::tempdir().unwrap();
        std::fs::write(copy.path().join("state.redb"), whole_file(&path("state.redb"))).unwrap();
        std::fs::write(copy.path().join("catalog.redb"), &older).unwrap();
        Generations::check(copy.path())
            .is_err_and(|e| e.to_string().contains("catalog.redb is an older copy"))
    })
    .await;
    log.close().await.unwrap();
}

/// Offsets in a database file: one in each block in use, and some in the header.
fn places(file: &[u8]) -> Vec<usize> {
    const STORED: usize = 4104;
    let used = file.iter().rposition(|byte| *byte != 0).unwrap();
    let header = [0, 3, 17, 25, 30, 100, 230, 4000];
    let blocks = (STORED..used)
        .step_by(STORED)
        .flat_map(|block| [block + 60, block + 2000]);
    let all = header.into_iter().chain(blocks);
    all.filter(|at| {
        *at < used
            && file[*at / STORED * STORED..]
                .iter()
                .take(STORED)
                .any(|byte| *byte != 0)
    })
    .collect()
}

// Kill the process after a commit and flip one bit: the commit is there, or the start names the
// damage.
#[tokio::test]
async fn one_flipped_bit_after_a_kill_undoes_no_commit_silently() {
    const LAST: u64 = 40;
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let catalog = EmbeddedCatalog::open(&path("catalog.redb"), keys()).unwrap();
    let archive = EmbeddedArchive::open(&path("archive.redb")).unwrap();
    for n in 1..=LAST {
        let put = CatalogChange::PutTopic(topic(n, &n.to_string()));
        catalog.commit(vec![put]).await.unwrap();
        archive.skip_numbers(BlobId(n), n).await.unwrap();
    }
    let (killed_catalog, killed_archive) = (
        whole_file(&path("catalog.redb")),
        whole_file(&path("archive.redb")),
    );
    let mut refused = 0;
    for (name, killed) in [("catalog.redb", killed_catalog), ("archive.redb", killed_archive)] {
        for at_byte in places(&killed) {
            let copy = tempfile::tempdir().unwrap();
            let path = copy.path().join(name);
            let mut flipped = killed.clone();
            flipped[at_byte] ^= 16;
            std::fs::write(&path, &flipped).unwrap();
            let found = match name {
                "catalog.redb" => match EmbeddedCatalog::open(&path, keys()) {
                    Ok(catalog) => Ok(catalog.load().await.unwrap().topics.len() as u64),
                    Err(e) => Err(e),
                },
                _ => match EmbeddedArchive::open(&path) {
                    Ok(archive) => Ok(archive.numbers().await.unwrap().1),
                    Err(e) => Err(e),
                },
            };
            match found {
                Ok(found) => assert_eq!(found, LAST, "{name}, byte {at_byte}"),
                Err(e) => {
                    refused += 1;
                    assert!(e.to_string().contains(name), "{name}, byte {at_byte}: {e}");
                }
            }
        }
    }
    assert!(refused > 4, "{refused}");
}

// Flip one bit at the beginning: magic, checksums, redb's header. The pages, and so the salvaged
// data, are intact.
#[tokio::test]
async fn a_damaged_beginning_does_not_keep_the_rest_from_being_salvaged() {
    const TOPICS: u64 = 30;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.redb");
    let catalog = EmbeddedCatalog::open(&path, keys()).unwrap();
    let put = |n: u64| CatalogChange::PutTopic(topic(n, &n.to_string()));
    catalog.commit((1..=TOPICS).map(put).collect()).await.unwrap();
    let killed = whole_file(&path);
    drop(catalog);
    let stopped = whole_file(&path);
    for (how, whole) in [("killed", killed), ("stopped", stopped)] {
        // The magic of the file, the header's checksum, redb's magic, its page size, a reserved
        // byte.
        for at_byte in [2, 17, 21, 26, 37, 2000] {
            let copy = tempfile::tempdir().unwrap();
            std::fs::create_dir(copy.path().join("log")).unwrap();
            let path = copy.path().join("catalog.redb");
            let mut flipped = whole.clone();
            flipped[at_byte] ^= 1;
            std::fs::write(&path, &flipped).unwrap();
            let opened = EmbeddedCatalog::open(&path, keys());
            assert!(opened.is_err(), "{how}, byte {at_byte}: damage must be reported");
            let told = restore::accept_damage(copy.path(), None).unwrap();
            let catalog = EmbeddedCatalog::open(&path, keys()).unwrap();
            let topics = catalog.load().await.unwrap().topics.len() as u64;
            assert_eq!(topics, TOPICS, "{how}, byte {at_byte}: {told:?}");
        }
    }
}

// Its blobs would be listed under subscriptions whose ids are the same by chance.
#[tokio::test]
async fn an_archive_of_another_installation_is_refused() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for (directory, identity) in directories.iter().zip([7, 8]) {
        let path = directory.path();
        let generations = Generations::check(path).unwrap();
        let log = EmbeddedLog::open_with(path, identity, generations.clone())
            .await
            .unwrap();
        let catalog = path.join("catalog.redb");
        let catalog = EmbeddedCatalog::open_with(&catalog, keys(), generations.clone()).unwrap();
        let archive = EmbeddedArchive::open_with(&path.join("archive.redb"), generations).unwrap();
        archive.skip_numbers(BlobId(1), 1).await.unwrap();
        log.open_subscription(sub(1)).await.unwrap();
        log.flush().await.unwrap();
        log.close().await.unwrap();
        drop((log, catalog, archive));
        Generations::check(path).unwrap();
    }
    let [ours, other] = directories;
    let path = ours.path().join("archive.redb");
    std::fs::copy(other.path().join("archive.redb"), &path).unwrap();
    let refused = Generations::check(ours.path()).unwrap_err().to_string();
    assert!(
        refused.contains("archive.redb belongs to another installation"),
        "{refused}"
    );
    assert!(restore::accept_mixed_files(ours.path()).is_err());
    std::fs::remove_file(&path).unwrap();
    restore::accept_mixed_files(ours.path()).unwrap();
    Generations::check(ours.path()).unwrap();
}

// The log alone says which one it is, and how far it went.
#[tokio::test]
async fn a_missing_state_database_is_made_anew_where_that_is_accepted() {
    for (how, accept) in [
        ("mixed", restore::accept_mixed_files as fn(&Path) -> _),
        ("damage", |path| restore::accept_damage(path, None)),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let generations = Generations::check(directory.path()).unwrap();
        let log = EmbeddedLog::open_with(directory.path(), 7, generations.clone())
            .await
            .unwrap();
        let catalog = directory.path().join("catalog.redb");
        let catalog = EmbeddedCatalog::open_with(&catalog, keys(), generations).unwrap();
        log.open_subscription(sub(1)).await.unwrap();
        for n in 0..20 {
            log.append(events(&[(&n.to_string(), &[1])])).await.unwrap();
        }
        catalog.next_id().await.unwrap();
        log.close().await.unwrap();
        drop((log, catalog));
        std::fs::remove_file(directory.path().join("state.redb")).unwrap();

        let told = accept(directory.path()).unwrap();
        let anew = told
            .iter()
            .any(|line| line.contains("made anew of what the log knows"));
        assert!(anew, "{how}: {told:?}");
        let generations = Generations::check(directory.path()).unwrap();
        // Every start generates another fresh identity.
        let log = EmbeddedLog::open_with(directory.path(), 8, generations)
            .await
            .unwrap();
        assert_eq!(claim_all(&log, sub(1), at(0)).await.len(), 20, "{how}");
        let next = log.append(events(&[("new", &[1])])).await.unwrap();
        assert_eq!(next, Position(20), "{how}");
        log.close().await.unwrap();
    }
}

// A plain redb file, as an older program wrote it.
#[tokio::test]
async fn a_database_without_checksums_is_taken_over() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state.redb");
    drop(redb::Database::create(&path).unwrap());
    let log = EmbeddedLog::open(directory.path(), 7).await.unwrap();
    log.open_subscription(sub(1)).await.unwrap();
    log.append(events(&[("a", &[1])])).await.unwrap();
    log.close().await.unwrap();
    drop(log);
    assert!(std::fs::read(&path).unwrap().starts_with(b"PRblocks1"));
    let log = EmbeddedLog::open(directory.path(), 7).await.unwrap();
    assert_eq!(claim_all(&log, sub(1), at(0)).await.len(), 1);
}

// ---- killed processes -------------------------------------------------------------------------

/// Subscription `of` (1 to 3) matches every `of`-th event.
fn matches(of: u64, event: u64) -> bool {
    event.is_multiple_of(of)
}

const CHILD: &str = "POSTRIDER_FAULTS_CHILD";

/// Body of the process to be killed: publishes, claims and settles, and reports each step as a
/// line.
#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "how the test above this one speaks to its own process"
)]
fn a_process_to_be_killed() {
    let Ok(arguments) = std::env::var(CHILD) else {
        return;
    };
    let (directory, start) = arguments.rsplit_once(' ').unwrap();
    let start: u64 = start.parse().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(publish_and_deliver(Path::new(directory), start));
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A single write, so that a kill cannot leave half a line that looks complete.
    let _ = out
        .write_all(format!("\n{line} .\n").as_bytes())
        .and_then(|()| out.flush());
}

async fn publish_and_deliver(directory: &Path, start: u64) {
    let log = open_directory(directory).await;
    for of in 1..=3 {
        log.open_subscription(sub(of)).await.unwrap();
    }
    let mut random = SeededRandom(start);
    let mut next = start;
    for now in start as i64.. {
        let texts: Vec<(String, Vec<u64>)> = (next..next + 1 + random.below(5))
            .map(|n| {
                let size = if random.one_in(20) {
                    60_000
                } else {
                    random.below(900)
                };
                let text = format!("{n} {}", "p".repeat(size as usize));
                (text, (1..=3).filter(|of| matches(*of, n)).collect())
            })
            .collect();
        let batch: Vec<(&str, &[u64])> = texts
            .iter()
            .map(|(text, ids)| (text.as_str(), ids.as_slice()))
            .collect();
        log.append(events(&batch)).await.unwrap();
        for n in next..next + texts.len() as u64 {
            say(&format!("accepted {n}"));
        }
        next += texts.len() as u64;
        for of in 1..=3 {
            if random.one_in(of + 1) {
                continue;
            }
            let want = ClaimLimits {
                events_max: 1 + random.below(8) as usize,
                ..WANT
            };
            let claims = log.claim(sub(of), at(now), want).await.unwrap();
            let mut all = Vec::new();
            for claim in claims {
                let what = match random.below(10) {
                    0..7 => NextStep::Done,
                    7..9 => NextStep::RetryAt(at(now + random.below(30) as i64)),
                    _ => {
                        log.release(sub(of), vec![claim]);
                        continue;
                    }
                };
                if what == NextStep::Done {
                    say(&format!(
                        "delivered {of} {}",
                        claim.object().split(' ').next().unwrap()
                    ));
                }
                all.push(settled(&claim, what));
            }
            log.settle(sub(of), all).await.unwrap();
        }
    }
}

async fn open_directory(directory: &Path) -> EmbeddedLog {
    let disk = postrider_embedded::disk::LocalDirectory::open(directory.join("log")).unwrap();
    let state = directory.join("state.redb");
    EmbeddedLog::open_on(Arc::new(disk), &state, 7, 300 << 10)
        .await
        .unwrap()
}

// Kill a busy process repeatedly, restart it on what is left, and finally deliver the rest.
#[tokio::test]
async fn killed_again_and_again_nothing_accepted_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let mut random = SeededRandom(11);
    let mut accepted = BTreeSet::new();
    let mut delivered: BTreeSet<(u64, u64)> = BTreeSet::new();
    for round in 0..25u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_process_to_be_killed", "--nocapture"])
            .env(
                CHILD,
                format!("{} {}", directory.path().display(), round * 1_000_000),
            )
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut left = 5 + random.below(1_500);
        let mut killed = false;
        while let Some(Ok(line)) = lines.next() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["accepted", n, "."] => {
                    accepted.insert(n.parse::<u64>().unwrap());
                }
                ["delivered", of, n, "."] => {
                    let (of, n) = (of.parse().unwrap(), n.parse().unwrap());
                    assert!(matches(of, n), "{n} does not match {of}");
                    delivered.insert((of, n));
                }
                _ => continue,
            }
            left = left.saturating_sub(1);
            if left == 0 && !killed {
                killed = true;
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(killed, "round {round}: the process ended by itself");
    }
    assert!(accepted.len() > 1_000, "{} were accepted", accepted.len());

    let log = open_directory(directory.path()).await;
    assert_eq!(log.health().corrupt, [""; 0]);
    for of in 1..=3 {
        let mut rest = BTreeSet::new();
        for claim in claim_all(&log, sub(of), Timestamp::MAX).await {
            let n = claim.object().split(' ').next().unwrap().parse().unwrap();
            assert!(matches(of, n), "{n} does not match {of}");
            assert!(rest.insert(n), "{n} was offered twice to {of}");
        }
        for n in accepted.iter().filter(|n| matches(of, **n)) {
            assert!(
                rest.contains(n) || delivered.contains(&(of, *n)),
                "{n} is lost for {of}"
            );
        }
    }
    log.close().await.unwrap();
}
