//! The contract of every archive.

use super::{SeededRandom, at, sub};
use crate::{
    Archive, BlobFault, BlobFilter, BlobId, BlobRecord, DeadLetterMark, ReplayJob, ReplayState,
    UnreadableBlob,
};
use async_trait::async_trait;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::GiveUpReason;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A kind of archive under test.
#[async_trait]
pub trait ArchiveUnderTest: Send + Sync {
    /// A new and empty archive.
    async fn open(&self) -> Arc<dyn Archive>;
    /// Closes the archive and opens it again.
    async fn reopen(&self, archive: Arc<dyn Archive>) -> Arc<dyn Archive>;
}

/// Runs every test of the archive contract.
pub async fn archive(subject: &dyn ArchiveUnderTest) {
    a_blob_comes_back_as_it_was(subject).await;
    a_blob_that_is_written_again_takes_the_place_of_the_first(subject).await;
    blobs_are_listed_as_the_filter_says(subject).await;
    a_clock_that_was_set_back_hides_nothing(subject).await;
    letters_that_are_not_purged_are_counted(subject).await;
    numbers_are_never_given_out_twice(subject).await;
    numbers_that_are_skipped_are_not_given_out(subject).await;
    replays_are_kept_together_with_their_marks(subject).await;
    for seed in 1..=4 {
        any_sequence_of_blobs_follows_the_model(subject, seed).await;
    }
}

/// Counter that gives every blob of the suite its own path.
static BLOBS: AtomicU64 = AtomicU64::new(0);

fn mark(reason: GiveUpReason) -> DeadLetterMark {
    DeadLetterMark {
        reason,
        replays: 0,
        purged: false,
    }
}

fn blob(of: u64, written: i64, marks: Vec<DeadLetterMark>) -> BlobRecord {
    BlobRecord {
        id: BlobId(77),
        subscription: sub(of),
        subscription_name: format!("sub\"{of}"),
        topic_name: "töpic".into(),
        account: "account".into(),
        container: "container".into(),
        path: format!("SUB{of}/2020/1/1/0/{}.json", BLOBS.fetch_add(1, Relaxed)),
        written: at(written),
        bytes: 1 << 40,
        sha256: Some([7; 32]),
        marks,
    }
}

async fn ids(archive: &dyn Archive, filter: &BlobFilter) -> Vec<u64> {
    let found = archive.list(filter, None, usize::MAX).await.unwrap();
    found.iter().map(|blob| blob.id.0).collect()
}

pub async fn a_blob_comes_back_as_it_was(subject: &dyn ArchiveUnderTest) {
    let archive = subject.open().await;
    assert_eq!(archive.last().await.unwrap(), None);
    assert_eq!(archive.get(BlobId(0)).await.unwrap(), None);
    let mut marks = Vec::new();
    for reason in GiveUpReason::ALL {
        for (replays, purged) in [(0, false), (0, true), (1, false), (255, true), (255, false)] {
            marks.push(DeadLetterMark {
                reason,
                replays,
                purged,
            });
        }
    }
    let mut expected = blob(1, 5, marks);
    expected.id = archive.add(expected.clone()).await.unwrap();
    let mut empty = blob(2, 6, vec![]);
    empty.id = archive.add(empty.clone()).await.unwrap();
    assert!(empty.id > expected.id);
    let archive = subject.reopen(archive).await;
    assert_eq!(archive.get(expected.id).await.unwrap().as_ref(), Some(&expected));
    assert_eq!(archive.get(empty.id).await.unwrap().as_ref(), Some(&empty));
    assert_eq!(archive.last().await.unwrap(), Some(empty.id));

    expected.marks.reverse();
    archive.mark(expected.id, expected.marks.clone()).await.unwrap();
    archive
        .mark(BlobId(999), vec![mark(GiveUpReason::BadRequest)])
        .await
        .unwrap();
    archive.remove(empty.id).await.unwrap();
    archive.remove(empty.id).await.unwrap();
    let archive = subject.reopen(archive).await;
    assert_eq!(archive.last().await.unwrap(), Some(expected.id));
    assert_eq!(archive.get(empty.id).await.unwrap(), None);
    assert_eq!(archive.get(BlobId(999)).await.unwrap(), None);
    let all = archive.list(&BlobFilter::default(), None, 9).await.unwrap();
    assert_eq!(all, [expected]);
}

pub async fn a_blob_that_is_written_again_takes_the_place_of_the_first(subject: &dyn ArchiveUnderTest) {
    let archive = subject.open().await;
    let first = blob(1, 10, vec![mark(GiveUpReason::BadRequest)]);
    let again = BlobRecord {
        written: at(20),
        marks: vec![mark(GiveUpReason::BadRequest), mark(GiveUpReason::ClientError)],
        ..first.clone()
    };
    let elsewhere = BlobRecord {
        container: "elsewhere".into(),
        ..first.clone()
    };
    let before = archive.add(first).await.unwrap();
    let other = archive.add(elsewhere).await.unwrap();
    let after = archive.add(again).await.unwrap();
    let archive = subject.reopen(archive).await;
    assert_eq!(archive.get(before).await.unwrap(), None);
    assert_eq!(ids(&*archive, &BlobFilter::default()).await, [other.0, after.0]);
    let counts = archive.counts().await.unwrap();
    let total: u64 = counts.iter().map(|(_, _, count)| count).sum();
    assert_eq!(total, 3);
    archive.remove(after).await.unwrap();
    assert_eq!(ids(&*archive, &BlobFilter::default()).await, [other.0]);
}

pub async fn blobs_are_listed_as_the_filter_says(subject: &dyn ArchiveUnderTest) {
    use GiveUpReason::{AttemptsExhausted, BadRequest, TimeToLiveExceeded};
    let archive = subject.open().await;
    let purged = DeadLetterMark {
        purged: true,
        ..mark(BadRequest)
    };
    let all = [
        blob(1, 10, vec![mark(BadRequest), mark(AttemptsExhausted)]),
        blob(2, 20, vec![mark(BadRequest)]),
        blob(1, 20, vec![mark(AttemptsExhausted), purged]),
        blob(1, 30, vec![mark(BadRequest), mark(BadRequest)]),
        blob(2, 40, vec![mark(TimeToLiveExceeded)]),
    ];
    let mut given = Vec::new();
    for blob in all {
        given.push(archive.add(blob).await.unwrap());
    }
    let archive = subject.reopen(archive).await;
    let check = async |subscription: Option<u64>, reason, since: Option<i64>, expected: &[usize]| {
        let filter = BlobFilter {
            subscription: subscription.map(sub),
            reason,
            since: since.map(at),
        };
        let expected: Vec<BlobId> = expected.iter().map(|n| given[*n]).collect();
        // List everything in one page, and in pages of every smaller size.
        for max in 1..=6 {
            let mut found: Vec<BlobId> = Vec::new();
            loop {
                let page = archive.list(&filter, found.last().copied(), max).await.unwrap();
                assert!(page.len() <= max, "{filter:?}");
                assert!(page.iter().all(|blob| filter.takes(blob)), "{filter:?}");
                found.extend(page.iter().map(|blob| blob.id));
                if page.len() < max {
                    break;
                }
            }
            assert_eq!(found, expected, "{filter:?} in pages of {max}");
        }
    };
    check(None, None, None, &[0, 1, 2, 3, 4]).await;
    check(Some(1), None, None, &[0, 2, 3]).await;
    check(Some(2), None, None, &[1, 4]).await;
    check(Some(3), None, None, &[]).await;
    check(None, Some(BadRequest), None, &[0, 1, 3]).await;
    check(None, Some(AttemptsExhausted), None, &[0, 2]).await;
    check(None, Some(GiveUpReason::Corrupt), None, &[]).await;
    check(None, None, Some(20), &[1, 2, 3, 4]).await;
    check(None, None, Some(21), &[3, 4]).await;
    check(None, None, Some(41), &[]).await;
    check(Some(1), Some(BadRequest), None, &[0, 3]).await;
    check(Some(2), Some(AttemptsExhausted), None, &[]).await;
    check(Some(1), None, Some(11), &[2, 3]).await;
    check(None, Some(BadRequest), Some(11), &[1, 3]).await;
    check(Some(1), Some(BadRequest), Some(11), &[3]).await;
    check(Some(2), Some(TimeToLiveExceeded), Some(40), &[4]).await;
    let none = archive.list(&BlobFilter::default(), None, 0).await.unwrap();
    assert_eq!(none, []);
    let none = archive
        .list(&BlobFilter::default(), Some(BlobId(u64::MAX)), 9)
        .await
        .unwrap();
    assert_eq!(none, []);

    // Purged dead letters no longer count for their reason; the blob stays.
    archive.mark(given[3], vec![purged, purged]).await.unwrap();
    check(Some(1), Some(BadRequest), None, &[0]).await;
    check(Some(1), None, None, &[0, 2, 3]).await;
    archive
        .mark(given[3], vec![purged, mark(AttemptsExhausted)])
        .await
        .unwrap();
    check(None, Some(AttemptsExhausted), None, &[0, 2, 3]).await;
    archive.remove(given[0]).await.unwrap();
    check(None, None, None, &[1, 2, 3, 4]).await;
    check(Some(1), None, None, &[2, 3]).await;
    check(None, Some(BadRequest), None, &[1]).await;
    check(Some(1), Some(AttemptsExhausted), None, &[2, 3]).await;
}

pub async fn a_clock_that_was_set_back_hides_nothing(subject: &dyn ArchiveUnderTest) {
    let archive = subject.open().await;
    let mut given = Vec::new();
    for written in [10, 500, 20, 30, 600, 40] {
        let blob = blob(1, written, vec![mark(GiveUpReason::BadRequest)]);
        given.push(archive.add(blob).await.unwrap().0);
    }
    let check = async |since, expected: &[usize]| {
        let filter = BlobFilter {
            since: Some(at(since)),
            ..BlobFilter::default()
        };
        let expected: Vec<u64> = expected.iter().map(|n| given[*n]).collect();
        assert_eq!(ids(&*archive, &filter).await, expected, "since {since}");
        let filter = BlobFilter {
            subscription: Some(sub(1)),
            reason: Some(GiveUpReason::BadRequest),
            ..filter
        };
        assert_eq!(ids(&*archive, &filter).await, expected, "since {since}");
    };
    check(0, &[0, 1, 2, 3, 4, 5]).await;
    check(20, &[1, 2, 3, 4, 5]).await;
    check(35, &[1, 4, 5]).await;
    check(501, &[4]).await;
    archive.remove(BlobId(given[4])).await.unwrap();
    archive.remove(BlobId(given[1])).await.unwrap();
    check(25, &[3, 5]).await;
    check(501, &[]).await;
}

pub async fn letters_that_are_not_purged_are_counted(subject: &dyn ArchiveUnderTest) {
    use GiveUpReason::{BadRequest, TimeToLiveExceeded};
    let archive = subject.open().await;
    assert_eq!(archive.counts().await.unwrap(), []);
    let one = archive
        .add(blob(1, 1, vec![mark(BadRequest); 1_000]))
        .await
        .unwrap();
    let two = archive.add(blob(1, 2, vec![mark(BadRequest); 5])).await.unwrap();
    archive
        .add(blob(2, 2, vec![mark(TimeToLiveExceeded); 3]))
        .await
        .unwrap();
    let mut expected = vec![(sub(1), BadRequest, 1_005), (sub(2), TimeToLiveExceeded, 3)];
    assert_eq!(archive.counts().await.unwrap(), expected);
    let mut marks = vec![mark(BadRequest); 5];
    marks[0].purged = true;
    marks[1].replays = 2;
    marks[2].reason = TimeToLiveExceeded;
    archive.mark(two, marks).await.unwrap();
    expected[0].2 = 1_003;
    expected.insert(1, (sub(1), TimeToLiveExceeded, 1));
    expected.sort();
    assert_eq!(archive.counts().await.unwrap(), expected);
    archive.remove(one).await.unwrap();
    let archive = subject.reopen(archive).await;
    for count in &mut expected {
        if count.1 == BadRequest {
            count.2 = 3;
        }
    }
    assert_eq!(archive.counts().await.unwrap(), expected);
    archive.remove(two).await.unwrap();
    assert_eq!(archive.counts().await.unwrap(), [(sub(2), TimeToLiveExceeded, 3)]);
}

pub async fn numbers_are_never_given_out_twice(subject: &dyn ArchiveUnderTest) {
    let mut archive = subject.open().await;
    let mut blobs = BTreeSet::new();
    let mut jobs = BTreeSet::new();
    for round in 0..4 {
        for _ in 0..3 {
            let (one, two) = tokio::join!(archive.add(blob(1, 1, vec![])), archive.add(blob(1, 1, vec![])));
            let (one, two) = (one.unwrap(), two.unwrap());
            assert!(blobs.last().is_none_or(|last| one > *last && two > *last));
            assert!(blobs.insert(one) && blobs.insert(two));
            let (one, two) = tokio::join!(archive.next_job(), archive.next_job());
            assert!(jobs.insert(one.unwrap()) && jobs.insert(two.unwrap()));
        }
        if round % 2 == 0 {
            // Even the greatest number is not reused after its blob is removed.
            for id in &blobs {
                archive.remove(*id).await.unwrap();
            }
        }
        archive = subject.reopen(archive).await;
    }
}

pub async fn numbers_that_are_skipped_are_not_given_out(subject: &dyn ArchiveUnderTest) {
    let mut archive = subject.open().await;
    assert_eq!(archive.add(blob(1, 1, vec![])).await.unwrap(), BlobId(1));
    archive.skip_numbers(BlobId(6), 3).await.unwrap();
    assert_eq!(archive.add(blob(1, 1, vec![])).await.unwrap(), BlobId(7));
    archive.skip_numbers(BlobId(2), 9).await.unwrap();
    archive = subject.reopen(archive).await;
    assert_eq!(archive.add(blob(1, 1, vec![])).await.unwrap(), BlobId(8));
    assert_eq!(archive.next_job().await.unwrap(), 10);
    assert_eq!(ids(&*archive, &BlobFilter::default()).await, [1, 7, 8]);
    // Numbers of removed blobs count as allocated.
    archive.remove(BlobId(8)).await.unwrap();
    assert_eq!(archive.numbers().await.unwrap(), (BlobId(8), 10));
}

pub async fn replays_are_kept_together_with_their_marks(subject: &dyn ArchiveUnderTest) {
    let archive = subject.open().await;
    let id = archive
        .add(blob(1, 1, vec![mark(GiveUpReason::BadRequest); 3]))
        .await
        .unwrap();
    assert_eq!(archive.jobs().await.unwrap(), []);
    let job = |id: u64, state| ReplayJob {
        id,
        request: r#"{"reason": "ä"}"#.into(),
        created: at(3),
        next: (BlobId(4), 5),
        last: BlobId(6),
        replayed: 7,
        failed: 8,
        unreadable: 2,
        unreadable_blobs: vec![UnreadableBlob {
            id: BlobId(4),
            account: "a".into(),
            container: "c".into(),
            path: "ä.json".into(),
            letters: 2,
            fault: BlobFault::Damaged,
            reason: "is not JSON".into(),
        }],
        state,
    };
    let mut jobs = vec![
        job(1, ReplayState::Running),
        job(2, ReplayState::Cancelled),
        job(10, ReplayState::Done),
    ];
    for job in jobs.iter().rev() {
        archive.put_job(job.clone(), None).await.unwrap();
    }
    let archive = subject.reopen(archive).await;
    assert_eq!(archive.jobs().await.unwrap(), jobs);
    let mut marks = vec![mark(GiveUpReason::BadRequest); 3];
    marks[1].replays = 1;
    marks[2].purged = true;
    jobs[0].next = (BlobId(u64::MAX), u32::MAX);
    jobs[0].replayed += 1;
    archive
        .put_job(jobs[0].clone(), Some((id, marks.clone())))
        .await
        .unwrap();
    archive
        .put_job(jobs[1].clone(), Some((BlobId(999), marks.clone())))
        .await
        .unwrap();
    archive.remove_job(10).await.unwrap();
    archive.remove_job(10).await.unwrap();
    jobs.pop();
    let archive = subject.reopen(archive).await;
    assert_eq!(archive.jobs().await.unwrap(), jobs);
    assert_eq!(archive.get(id).await.unwrap().unwrap().marks, marks);
    assert_eq!(
        archive.counts().await.unwrap(),
        [(sub(1), GiveUpReason::BadRequest, 2)]
    );
    assert_eq!(archive.last().await.unwrap(), Some(id));
}

fn marks_random(random: &mut SeededRandom) -> Vec<DeadLetterMark> {
    let few = random.one_in(2);
    let one = |random: &mut SeededRandom| DeadLetterMark {
        reason: GiveUpReason::ALL[random.below(if few { 2 } else { 5 }) as usize],
        replays: random.below(300) as u8,
        purged: random.one_in(3),
    };
    (0..random.below(6)).map(|_| one(random)).collect()
}

/// Performs random operations, with a restart now and then, and compares the archive with a model.
pub async fn any_sequence_of_blobs_follows_the_model(subject: &dyn ArchiveUnderTest, seed: u64) {
    let mut random = SeededRandom(seed);
    let mut archive = subject.open().await;
    let mut model: BTreeMap<BlobId, BlobRecord> = BTreeMap::new();
    let mut now = 0;
    for step in 0..250 {
        let when = format!("seed {seed}, step {step}");
        let any = |random: &mut SeededRandom| BlobId(1 + random.below(model.len() as u64 * 2 + 2));
        match random.below(100) {
            0..35 => {
                now += random.below(4) as i64;
                let back = if random.one_in(5) {
                    random.below(9) as i64
                } else {
                    0
                };
                let mut new = blob(1 + random.below(4), now - back, marks_random(&mut random));
                new.id = archive.add(new.clone()).await.unwrap();
                assert!(model.keys().all(|known| *known < new.id), "{when}");
                model.insert(new.id, new);
            }
            35..50 => {
                let (id, marks) = (any(&mut random), marks_random(&mut random));
                if random.one_in(2) {
                    archive.mark(id, marks.clone()).await.unwrap();
                } else {
                    let job = ReplayJob {
                        id: 1,
                        request: String::new(),
                        created: at(0),
                        next: (id, 0),
                        last: id,
                        replayed: step,
                        failed: 0,
                        unreadable: 0,
                        unreadable_blobs: Vec::new(),
                        state: ReplayState::Running,
                    };
                    archive.put_job(job, Some((id, marks.clone()))).await.unwrap();
                }
                if let Some(known) = model.get_mut(&id) {
                    known.marks = marks;
                }
            }
            50..60 => {
                let id = any(&mut random);
                archive.remove(id).await.unwrap();
                model.remove(&id);
            }
            60..65 => archive = subject.reopen(archive).await,
            65..70 => {
                let mut expected: BTreeMap<(SubscriptionId, GiveUpReason), u64> = BTreeMap::new();
                for blob in model.values() {
                    for mark in blob.marks.iter().filter(|mark| !mark.purged) {
                        *expected.entry((blob.subscription, mark.reason)).or_default() += 1;
                    }
                }
                let expected: Vec<_> = expected.into_iter().map(|((of, why), n)| (of, why, n)).collect();
                assert_eq!(archive.counts().await.unwrap(), expected, "{when}");
                let last = model.keys().next_back().copied();
                assert_eq!(archive.last().await.unwrap(), last, "{when}");
                let id = any(&mut random);
                assert_eq!(archive.get(id).await.unwrap().as_ref(), model.get(&id), "{when}");
            }
            _ => {
                let filter = BlobFilter {
                    subscription: random.one_in(2).then(|| sub(1 + random.below(5))),
                    reason: random
                        .one_in(2)
                        .then(|| GiveUpReason::ALL[random.below(6) as usize]),
                    since: random.one_in(2).then(|| at(random.below(now as u64 + 3) as i64)),
                };
                let after = random.one_in(2).then(|| any(&mut random));
                let max = 1 + random.below(20) as usize;
                let later = model
                    .values()
                    .filter(|blob| after.is_none_or(|after| blob.id > after));
                let taken = later.filter(|blob| filter.takes(blob)).take(max);
                let expected: Vec<BlobRecord> = taken.cloned().collect();
                let found = archive.list(&filter, after, max).await.unwrap();
                assert_eq!(found, expected, "{when}: {filter:?} after {after:?}");
            }
        }
    }
}
