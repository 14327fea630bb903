//! The auditor's own test: bugs are planted from outside, and each must be reported as what it is.
//! A bug is a faulty part that is handed in, or a changed profile; none of it ships.

use async_trait::async_trait;
use bytes::Bytes;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::pause::{SubscriptionPause, SubscriptionPauses};
use postrider_core::probation::ProbationRules;
use postrider_core::profile::{Profile, StatusRule};
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::time::Timestamp;
use postrider_engine::blobs::{BlobError, BlobStore, WrittenBlobVersion};
use postrider_engine::deliver::{DeliveryReply, DeliveryRequest, DeliveryTransport};
use postrider_sim::audit::ViolationKind;
use postrider_sim::simulated_run::{PlantedBugs, run_with};
use postrider_sim::workload::ACCOUNT_TOPIC;
use postrider_store::{
    Archive, Backlog, BlobFilter, BlobId, BlobRecord, Catalog, CatalogChange, CatalogContent, Claim,
    ClaimLimits, DeadLetterKey, DeadLetterMark, Error, EventLog, LogHealth, LogListener, PendingDeadLetter,
    PendingDeadLetters, ReplayJob, Settlement,
};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A planted bug must be noticed within this many seeds.
const SEEDS_MAX: u64 = 400;

/// Runs seeds until the auditor reports this kind of error; returns how many it took.
fn is_noticed(planted: &PlantedBugs, kind: ViolationKind) -> u64 {
    let mut others = Vec::new();
    for seed in 0..SEEDS_MAX {
        let report = run_with(seed, planted, false);
        if report.wrong.iter().any(|wrong| wrong.kind == kind) {
            println!("{kind:?} noticed with seed {seed}");
            return seed;
        }
        others.extend(report.wrong);
    }
    panic!("nobody noticed in {SEEDS_MAX} seeds; but {others:#?}");
}

/// The fault of a log.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LogFault {
    /// Confirms appends that it has not stored.
    AppendsNothing,
    /// Ends deliveries that should be retried.
    ForgetsRetries,
    /// Records a retry for too early a time.
    HurriesRetries,
    /// Loses the number of attempts.
    ForgetsAttempts,
    /// Offers deliveries again that were settled as done.
    OffersAgain,
    /// Offers deliveries again that were withdrawn.
    OffersWithdrawn,
    /// Keeps the backlog of a closed subscription.
    NeverCloses,
    /// Never returns from a claim that found nothing.
    ClaimNeverReturns,
    /// Removes dead letters when they are read, before they are in a blob.
    ForgetsLettersRead,
    /// Removes dead letters when it is opened.
    ForgetsLettersAtStart,
    /// Removes a dead letter only at the second request.
    KeepsLetters,
    /// Records dead letters with one attempt too many.
    AddsAttempts,
    /// Gives every letter the same reason.
    MixesReasonsUp,
    /// Makes dead letters of some deliveries that are done.
    LettersOfDone,
    /// Does not find a dead letter that is looked up by itself, as before a withdrawal.
    FindsNoSingleLetter,
    /// Begins the delay of a dead letter at the decision, even if the attempt was long before.
    LateLetters,
    /// Does not report how long events have waited.
    HidesAge,
    /// Confirms announcements of blobs that it has not stored.
    AppendsNoAnnouncement,
}

/// A claim without limits.
const EVERYTHING: ClaimLimits = ClaimLimits {
    events_max: usize::MAX,
    bytes_max: usize::MAX,
    overhead: 0,
};

struct FaultyLog {
    log: Arc<dyn EventLog>,
    bent: LogFault,
    offered_again: Mutex<BTreeSet<Position>>,
}

fn bent(bent: LogFault) -> PlantedBugs {
    PlantedBugs {
        log: Some(Box::new(move |log| {
            Arc::new(FaultyLog {
                log,
                bent,
                offered_again: Mutex::default(),
            })
        })),
        ..PlantedBugs::default()
    }
}

#[async_trait]
impl EventLog for FaultyLog {
    async fn append(&self, batch: PublishedBatch) -> Result<Position, Error> {
        if self.bent == LogFault::AppendsNothing && batch.body.len().is_multiple_of(7) {
            return Ok(Position(0));
        }
        if self.bent == LogFault::AppendsNoAnnouncement && batch.topic == ACCOUNT_TOPIC {
            return Ok(Position(0));
        }
        self.log.append(batch).await
    }

    async fn claim(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<Claim>, Error> {
        let claims = self.log.claim(of, now, want).await?;
        if self.bent == LogFault::ClaimNeverReturns && claims.is_empty() {
            std::future::pending::<()>().await;
        }
        Ok(claims)
    }

    async fn settle(&self, of: SubscriptionId, mut settled: Vec<Settlement>) -> Result<(), Error> {
        for one in &mut settled {
            match (self.bent, one.next) {
                (LogFault::ForgetsRetries, NextStep::RetryAt(_))
                    if one.claim.position().0.is_multiple_of(5) =>
                {
                    one.next = NextStep::Done;
                }
                (LogFault::HurriesRetries, NextStep::RetryAt(due)) => {
                    one.next = NextStep::RetryAt(due - Duration::from_secs(3));
                }
                (LogFault::ForgetsAttempts, NextStep::RetryAt(_)) => one.attempts_made = 0,
                (LogFault::AddsAttempts, NextStep::DeadLetter(_)) => one.attempts_made += 1,
                (LogFault::LateLetters, NextStep::DeadLetter(_)) => {
                    let now = one.at;
                    if let Some(last) = &mut one.last_attempt {
                        last.at = now;
                    }
                }
                (LogFault::LettersOfDone, NextStep::Done) if one.claim.position().0.is_multiple_of(5) => {
                    one.next = NextStep::DeadLetter(GiveUpReason::AttemptsExhausted);
                }
                _ => {}
            }
        }
        if self.bent == LogFault::OffersAgain {
            let mut offered = self.offered_again.lock().expect("no panic holds it");
            let mut again =
                |one: &&Settlement| one.next == NextStep::Done && offered.insert(one.claim.position());
            let claims = settled.iter().filter(&mut again).map(|one| one.claim.clone());
            self.log.release(of, claims.collect());
        }
        self.log.settle(of, settled).await
    }

    async fn withdraw(
        &self,
        of: SubscriptionId,
        waiting: Vec<(Timestamp, Position)>,
    ) -> Result<Vec<Position>, Error> {
        if self.bent == LogFault::OffersWithdrawn {
            return Ok(waiting.into_iter().map(|(_, position)| position).collect());
        }
        self.log.withdraw(of, waiting).await
    }

    async fn flush(&self) -> Result<(), Error> {
        self.log.flush().await
    }

    fn pending_dead_letters(&self) -> Vec<PendingDeadLetters> {
        self.log.pending_dead_letters()
    }

    async fn letters(
        &self,
        of: SubscriptionId,
        after: Option<DeadLetterKey>,
        until: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<PendingDeadLetter>, Error> {
        let mut letters = self.log.letters(of, after, until, want).await?;
        match self.bent {
            LogFault::FindsNoSingleLetter if want.events_max == 1 => letters.clear(),
            LogFault::ForgetsLettersRead => {
                let keys = letters.iter().map(PendingDeadLetter::key).collect();
                self.log.dead_letters_done(of, keys).await?;
            }
            LogFault::MixesReasonsUp => letters
                .iter_mut()
                .for_each(|letter| letter.reason = GiveUpReason::TimeToLiveExceeded),
            _ => {}
        }
        Ok(letters)
    }

    async fn dead_letters_done(&self, of: SubscriptionId, letters: Vec<DeadLetterKey>) -> Result<(), Error> {
        let mut letters = letters;
        if self.bent == LogFault::KeepsLetters {
            let mut kept = self.offered_again.lock().expect("no panic holds it");
            letters.retain(|(_, position)| !kept.insert(*position));
        }
        self.log.dead_letters_done(of, letters).await
    }

    fn release(&self, of: SubscriptionId, claims: Vec<Claim>) {
        self.log.release(of, claims);
    }

    fn next_due(&self) -> Option<Timestamp> {
        self.log.next_due()
    }

    fn next_due_after(&self, after: Timestamp) -> Option<Timestamp> {
        self.log.next_due_after(after)
    }

    fn due(&self, now: Timestamp) -> Vec<SubscriptionId> {
        self.log.due(now)
    }

    async fn open_subscription(&self, of: SubscriptionId) -> Result<(), Error> {
        if self.bent == LogFault::ForgetsLettersAtStart {
            let letters = self.log.letters(of, None, Timestamp::MAX, EVERYTHING).await?;
            let keys = letters.iter().map(PendingDeadLetter::key).collect();
            self.log.dead_letters_done(of, keys).await?;
        }
        self.log.open_subscription(of).await
    }

    async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error> {
        if self.bent == LogFault::NeverCloses {
            return Ok(0);
        }
        self.log.close_subscription(of).await
    }

    fn subscriptions(&self) -> Vec<SubscriptionId> {
        self.log.subscriptions()
    }

    fn backlog(&self, of: SubscriptionId) -> Backlog {
        let backlog = self.log.backlog(of);
        match self.bent {
            LogFault::HidesAge => Backlog {
                oldest: None,
                ..backlog
            },
            _ => backlog,
        }
    }

    fn health(&self) -> LogHealth {
        self.log.health()
    }

    fn identity(&self) -> u64 {
        self.log.identity()
    }

    fn listen(&self, listener: Arc<dyn LogListener>) {
        self.log.listen(listener);
    }

    async fn close(&self) -> Result<(), Error> {
        self.log.close().await
    }
}

/// A catalog that loses some changes.
struct FaultyCatalog {
    catalog: Arc<dyn Catalog>,
    misreads: fn(&mut CatalogContent),
    loses: fn(&CatalogChange) -> bool,
}

fn losing(loses: fn(&CatalogChange) -> bool) -> PlantedBugs {
    PlantedBugs {
        catalog: Some(Box::new(move |catalog| {
            Arc::new(FaultyCatalog {
                catalog,
                loses,
                misreads: |_| {},
            })
        })),
        ..PlantedBugs::default()
    }
}

#[async_trait]
impl Catalog for FaultyCatalog {
    async fn load(&self) -> Result<CatalogContent, Error> {
        let mut loaded = self.catalog.load().await?;
        (self.misreads)(&mut loaded);
        Ok(loaded)
    }

    async fn commit(&self, mut changes: Vec<CatalogChange>) -> Result<(), Error> {
        changes.retain(|change| !(self.loses)(change));
        self.catalog.commit(changes).await
    }

    async fn next_id(&self) -> Result<u64, Error> {
        self.catalog.next_id().await
    }
}

/// A transport that sends more, or reports less, than it should.
#[derive(Clone, Copy)]
enum TransportFault {
    FollowsRedirections,
    TakesFailureForSuccess,
    SendsTwice,
}

struct FaultyTransport {
    transport: Arc<dyn DeliveryTransport>,
    bent: TransportFault,
}

#[async_trait]
impl DeliveryTransport for FaultyTransport {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        let reply = self.transport.clone().send(request.clone()).await;
        let DeliveryReply::Answered(mut answer) = reply else {
            return reply;
        };
        match self.bent {
            TransportFault::FollowsRedirections => {
                if let Some(location) = answer.headers.get("location") {
                    let location = location.to_str().expect("text").parse().expect("a URL");
                    let url = Arc::new(location);
                    return self
                        .transport
                        .clone()
                        .send(DeliveryRequest { url, ..request })
                        .await;
                }
            }
            TransportFault::TakesFailureForSuccess => {
                if answer.status >= 500 {
                    answer.status = 200;
                }
            }
            TransportFault::SendsTwice => {
                if answer.status == 503 {
                    return self.transport.clone().send(request).await;
                }
            }
        }
        DeliveryReply::Answered(answer)
    }
}

fn sending(bent: TransportFault) -> PlantedBugs {
    PlantedBugs {
        transport: Some(Box::new(move |transport| {
            Arc::new(FaultyTransport { transport, bent })
        })),
        ..PlantedBugs::default()
    }
}

/// The fault of a blob store.
#[derive(Clone, Copy)]
enum BlobStoreFault {
    /// Confirms some blobs that it has not written.
    WritesNothing,
    /// Writes blobs under the subscription's own spelling.
    LowerCase,
    /// Writes months, days and hours with two digits.
    PadsWithZeros,
    /// Keeps only the first dead letter of every blob.
    KeepsOneLetter,
}

struct FaultyBlobStore {
    blobs: Arc<dyn BlobStore>,
    bent: BlobStoreFault,
}

fn storing(bent: BlobStoreFault) -> PlantedBugs {
    PlantedBugs {
        blobs: Some(Box::new(move |blobs| Arc::new(FaultyBlobStore { blobs, bent }))),
        ..PlantedBugs::default()
    }
}

#[async_trait]
impl BlobStore for FaultyBlobStore {
    fn accounts(&self) -> Vec<String> {
        self.blobs.accounts()
    }

    fn check_name(&self, account: &str, container: &str) -> Result<(), String> {
        self.blobs.check_name(account, container)
    }

    async fn probe(&self, account: &str, container: &str) -> Result<(), BlobError> {
        self.blobs.probe(account, container).await
    }

    async fn put(
        &self,
        account: &str,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError> {
        let (mut path, mut body) = (path.to_owned(), body);
        match self.bent {
            BlobStoreFault::WritesNothing if body.len().is_multiple_of(3) => {
                let (etag, url) = ("0x1".to_owned(), path);
                return Ok(WrittenBlobVersion { etag, url });
            }
            BlobStoreFault::WritesNothing => {}
            BlobStoreFault::LowerCase => path = path.to_lowercase(),
            BlobStoreFault::PadsWithZeros => {
                let padded: Vec<String> = path.split('/').map(|part| format!("{part:0>2}")).collect();
                path = padded.join("/");
            }
            BlobStoreFault::KeepsOneLetter => {
                let text = std::str::from_utf8(&body).expect("text");
                let first = text.split(r#"},{"id""#).next().expect("there is one");
                if first.len() < text.len() {
                    body = Bytes::from(format!("{first}}}]"));
                }
            }
        }
        self.blobs.put(account, container, &path, body).await
    }

    async fn get(&self, account: &str, container: &str, path: &str) -> Result<Bytes, BlobError> {
        self.blobs.get(account, container, path).await
    }

    async fn delete(&self, account: &str, container: &str, path: &str) -> Result<(), BlobError> {
        self.blobs.delete(account, container, path).await
    }
}

/// An archive that confirms records that it has not stored.
struct FaultyArchive(Arc<dyn Archive>);

#[async_trait]
impl Archive for FaultyArchive {
    async fn add(&self, _blob: BlobRecord) -> Result<BlobId, Error> {
        Ok(BlobId(0))
    }

    async fn get(&self, id: BlobId) -> Result<Option<BlobRecord>, Error> {
        self.0.get(id).await
    }

    async fn list(
        &self,
        filter: &BlobFilter,
        after: Option<BlobId>,
        max: usize,
    ) -> Result<Vec<BlobRecord>, Error> {
        self.0.list(filter, after, max).await
    }

    async fn last(&self) -> Result<Option<BlobId>, Error> {
        self.0.last().await
    }

    async fn counts(&self) -> Result<Vec<(SubscriptionId, GiveUpReason, u64)>, Error> {
        self.0.counts().await
    }

    async fn mark(&self, id: BlobId, marks: Vec<DeadLetterMark>) -> Result<(), Error> {
        self.0.mark(id, marks).await
    }

    async fn remove(&self, id: BlobId) -> Result<(), Error> {
        self.0.remove(id).await
    }

    async fn put_job(
        &self,
        job: ReplayJob,
        marks: Option<(BlobId, Vec<DeadLetterMark>)>,
    ) -> Result<(), Error> {
        self.0.put_job(job, marks).await
    }

    async fn jobs(&self) -> Result<Vec<ReplayJob>, Error> {
        self.0.jobs().await
    }

    async fn remove_job(&self, id: u64) -> Result<(), Error> {
        self.0.remove_job(id).await
    }

    async fn next_job(&self) -> Result<u64, Error> {
        self.0.next_job().await
    }

    async fn numbers(&self) -> Result<(BlobId, u64), Error> {
        self.0.numbers().await
    }

    async fn skip_numbers(&self, blobs: BlobId, jobs: u64) -> Result<(), Error> {
        self.0.skip_numbers(blobs, jobs).await
    }
}

/// All profiles, changed in the same way.
fn doctored(doctor: fn(&mut Profile)) -> PlantedBugs {
    PlantedBugs {
        profiles: Some(Box::new(move |profiles| {
            let all: Vec<Profile> = profiles.iter().copied().collect();
            for mut profile in all {
                doctor(&mut profile);
                profiles.put(profile);
            }
        })),
        ..PlantedBugs::default()
    }
}

/// The profile's table of statuses with some rules changed.
fn with_rule(profile: &mut Profile, change: impl Fn(u16, StatusRule) -> StatusRule) {
    let lines = profile.statuses.iter().map(|line| {
        let mut line = *line;
        line.web_hook = change(line.status, line.web_hook);
        line.azure_resource = change(line.status, line.azure_resource);
        line
    });
    profile.statuses = lines.collect::<Vec<_>>().leak();
}

fn with_probation(profile: &mut Profile, change: impl Fn(&mut ProbationRules)) {
    if let Some(probation) = &mut profile.probation {
        change(probation);
    }
}

#[test]
fn without_a_bug_nobody_complains() {
    for seed in 0..SEEDS_MAX {
        let report = run_with(seed, &PlantedBugs::default(), false);
        assert!(
            report.wrong.is_empty(),
            "POSTRIDER_SEED={seed}: {:#?}",
            report.wrong
        );
    }
}

#[test]
fn an_event_that_was_accepted_and_not_stored() {
    is_noticed(&bent(LogFault::AppendsNothing), ViolationKind::Lost);
}

#[test]
fn a_retry_that_was_forgotten() {
    is_noticed(&bent(LogFault::ForgetsRetries), ViolationKind::Lost);
}

#[test]
fn a_retry_that_was_written_down_for_too_early() {
    is_noticed(&bent(LogFault::HurriesRetries), ViolationKind::Early);
}

#[test]
fn attempts_that_were_forgotten() {
    is_noticed(&bent(LogFault::ForgetsAttempts), ViolationKind::Count);
}

#[test]
fn a_delivery_that_was_done_and_is_offered_again() {
    is_noticed(&bent(LogFault::OffersAgain), ViolationKind::AfterItsEnd);
}

#[test]
fn a_delivery_that_was_withdrawn_and_is_offered_again() {
    is_noticed(&bent(LogFault::OffersWithdrawn), ViolationKind::AfterItsEnd);
}

#[test]
fn a_second_end() {
    is_noticed(&bent(LogFault::OffersWithdrawn), ViolationKind::TwoEnds);
}

#[test]
fn what_waits_for_a_subscription_that_is_gone() {
    is_noticed(&bent(LogFault::NeverCloses), ViolationKind::Unrest);
}

#[test]
fn a_task_that_is_never_woken() {
    is_noticed(&bent(LogFault::ClaimNeverReturns), ViolationKind::NotStopped);
}

#[test]
fn a_deletion_that_did_not_last() {
    is_noticed(
        &losing(|change| matches!(change, CatalogChange::DeleteSubscription(_))),
        ViolationKind::Astray,
    );
}

#[test]
fn a_pause_that_did_not_last() {
    is_noticed(
        &losing(|change| matches!(change, CatalogChange::PutSubscription(s) if !s.pauses.is_empty())),
        ViolationKind::NotPaused,
    );
}

#[test]
fn a_pause_that_events_age_in() {
    // The pause continues, but its beginning is lost.
    fn misread(loaded: &mut CatalogContent) {
        for subscription in &mut loaded.subscriptions {
            let mut pauses: Vec<SubscriptionPause> = subscription.pauses.iter().collect();
            for pause in pauses.iter_mut().filter(|pause| pause.until.is_none()) {
                pause.from = Timestamp::MAX;
            }
            subscription.pauses = SubscriptionPauses::of(pauses);
        }
    }
    let planted = PlantedBugs {
        catalog: Some(Box::new(|catalog| {
            Arc::new(FaultyCatalog {
                catalog,
                loses: |_| false,
                misreads: misread,
            })
        })),
        ..PlantedBugs::default()
    };
    is_noticed(&planted, ViolationKind::WrongEnd);
}

#[test]
fn a_last_attempt_that_the_status_is_blamed_for() {
    fn misread(loaded: &mut CatalogContent) {
        for subscription in &mut loaded.subscriptions {
            let attempts_max = &mut subscription.retry.attempts_max;
            *attempts_max = attempts_max.map(|attempts| attempts + 1);
        }
    }
    let planted = PlantedBugs {
        catalog: Some(Box::new(|catalog| {
            Arc::new(FaultyCatalog {
                catalog,
                loses: |_| false,
                misreads: misread,
            })
        })),
        ..PlantedBugs::default()
    };
    is_noticed(&planted, ViolationKind::WrongEnd);
}

#[test]
fn a_new_endpoint_that_did_not_last() {
    is_noticed(
        &losing(|change| matches!(change, CatalogChange::PutSubscription(s) if s.id.0.is_multiple_of(2))),
        ViolationKind::Astray,
    );
}

#[test]
fn a_delay_that_a_restart_forgets() {
    is_noticed(
        &losing(|change| matches!(change, CatalogChange::PutEndpointDelay(_))),
        ViolationKind::NotLeftAlone,
    );
}

#[test]
fn a_redirection_that_was_followed() {
    is_noticed(
        &sending(TransportFault::FollowsRedirections),
        ViolationKind::Astray,
    );
}

#[test]
fn a_failure_that_was_taken_for_a_success() {
    is_noticed(
        &sending(TransportFault::TakesFailureForSuccess),
        ViolationKind::WrongEnd,
    );
}

#[test]
fn an_attempt_that_the_transport_repeats() {
    is_noticed(&sending(TransportFault::SendsTwice), ViolationKind::Twice);
}

#[test]
fn a_final_status_that_is_retried() {
    let planted = doctored(|profile| {
        with_rule(profile, |_, rule| match rule {
            StatusRule::Final => StatusRule::RetryAfter(Duration::from_secs(10)),
            other => other,
        });
    });
    is_noticed(&planted, ViolationKind::AfterItsEnd);
}

#[test]
fn a_status_that_ends_what_should_be_retried() {
    let planted = doctored(|profile| {
        with_rule(
            profile,
            |status, rule| if status == 408 { StatusRule::Final } else { rule },
        );
    });
    is_noticed(&planted, ViolationKind::WrongEnd);
}

#[test]
fn a_batch_that_is_given_up_as_a_whole() {
    is_noticed(
        &doctored(|profile| profile.split_batches_on = &[]),
        ViolationKind::WrongEnd,
    );
}

#[test]
fn a_failure_that_is_taken_for_a_batch_too_large() {
    let planted = doctored(|profile| profile.split_batches_on = &[400, 413, 500, 503]);
    is_noticed(&planted, ViolationKind::Twice);
}

#[test]
fn a_floor_that_is_ignored() {
    let planted = doctored(|profile| {
        with_rule(profile, |status, rule| match rule {
            StatusRule::RetryAfter(_) if status == 503 => StatusRule::RetryAfter(Duration::ZERO),
            other => other,
        });
    });
    is_noticed(&planted, ViolationKind::Early);
}

#[test]
fn a_schedule_that_lags() {
    let planted = doctored(|profile| {
        let later = |step: &Duration| *step + Duration::from_secs(20);
        profile.schedule = profile.schedule.iter().map(later).collect::<Vec<_>>().leak();
    });
    is_noticed(&planted, ViolationKind::HeldBack);
}

#[test]
fn a_time_to_live_that_is_ignored() {
    let planted = doctored(|profile| profile.time_to_live = Duration::from_secs(1_000_000));
    is_noticed(&planted, ViolationKind::TooLate);
}

#[test]
fn attempts_without_end() {
    // Subscriptions of the default profile leave the attempts to it; those with their own limit are
    // not affected.
    let planted = doctored(|profile| {
        profile.attempts_max = 1000;
        profile.schedule = const { &[Duration::from_secs(60)] };
    });
    is_noticed(&planted, ViolationKind::TooOften);
}

#[test]
fn an_impatient_timeout() {
    let planted = doctored(|profile| profile.response_timeout = Duration::from_secs(20));
    is_noticed(&planted, ViolationKind::Early);
}

#[test]
fn a_batch_that_has_no_more_time_than_a_single_event() {
    let planted = doctored(|profile| profile.batch_response_timeout = profile.response_timeout);
    is_noticed(&planted, ViolationKind::Early);
}

#[test]
fn a_late_answer_that_came_too_late() {
    let planted = doctored(|profile| profile.late_window = Some(Duration::from_secs(3600)));
    is_noticed(&planted, ViolationKind::WrongEnd);
}

#[test]
fn a_late_answer_that_nobody_hears() {
    let planted = doctored(|profile| profile.late_window = None);
    is_noticed(&planted, ViolationKind::AfterItsEnd);
}

#[test]
fn a_sick_endpoint_that_is_not_left_alone() {
    let planted = doctored(|profile| with_probation(profile, |rules| rules.failures = u32::MAX));
    is_noticed(&planted, ViolationKind::NotLeftAlone);
}

#[test]
fn a_healthy_endpoint_that_is_left_alone() {
    let planted = doctored(|profile| with_probation(profile, |rules| rules.failures = 1));
    is_noticed(&planted, ViolationKind::HeldBack);
}

#[test]
fn a_delay_that_never_ends() {
    let planted = doctored(|profile| {
        with_probation(profile, |rules| {
            rules.causes = &[];
            rules.other = Duration::from_secs(1_000_000);
            rules.max = Duration::from_secs(1_000_000);
        });
        // Otherwise a delivery that waits for so long would expire.
        profile.time_to_live = Duration::from_secs(10_000_000);
    });
    is_noticed(&planted, ViolationKind::Lost);
}

#[test]
fn an_event_that_expires_with_no_attempt_while_its_endpoint_is_left_alone() {
    is_noticed(&bent(LogFault::HidesAge), ViolationKind::HeldBack);
}

#[test]
fn a_letter_that_is_forgotten_before_it_is_in_a_blob() {
    is_noticed(&bent(LogFault::ForgetsLettersRead), ViolationKind::Unwritten);
}

#[test]
fn a_letter_that_a_restart_forgets() {
    is_noticed(&bent(LogFault::ForgetsLettersAtStart), ViolationKind::Unwritten);
}

#[test]
fn a_blob_that_was_acknowledged_and_not_written() {
    is_noticed(&storing(BlobStoreFault::WritesNothing), ViolationKind::Unwritten);
}

#[test]
fn a_blob_that_lacks_letters() {
    is_noticed(&storing(BlobStoreFault::KeepsOneLetter), ViolationKind::Unwritten);
}

#[test]
fn a_blob_under_the_wrong_name() {
    is_noticed(&storing(BlobStoreFault::LowerCase), ViolationKind::Misfiled);
}

#[test]
fn a_blob_under_a_padded_hour() {
    is_noticed(&storing(BlobStoreFault::PadsWithZeros), ViolationKind::Misfiled);
}

#[test]
fn a_letter_with_one_attempt_too_many() {
    is_noticed(&bent(LogFault::AddsAttempts), ViolationKind::Misreported);
}

#[test]
fn a_letter_with_the_wrong_reason() {
    is_noticed(&bent(LogFault::MixesReasonsUp), ViolationKind::Misreported);
}

#[test]
fn a_letter_that_was_delivered() {
    is_noticed(&bent(LogFault::LettersOfDone), ViolationKind::NotALetter);
}

#[test]
fn a_late_answer_to_the_last_attempt_that_nobody_hears() {
    is_noticed(&bent(LogFault::FindsNoSingleLetter), ViolationKind::NotALetter);
}

#[test]
fn a_letter_that_waits_from_when_its_event_was_found_to_be_too_old() {
    is_noticed(&bent(LogFault::LateLetters), ViolationKind::HeldBack);
}

#[test]
fn a_letter_that_is_written_again() {
    is_noticed(&bent(LogFault::KeepsLetters), ViolationKind::NotALetter);
}

#[test]
fn a_letter_that_is_written_at_once() {
    let planted = doctored(|profile| profile.dead_letter.delay = Duration::ZERO);
    is_noticed(&planted, ViolationKind::Hasty);
}

#[test]
fn a_letter_that_waits_too_long_to_be_written() {
    let planted = doctored(|profile| profile.dead_letter.delay += Duration::from_secs(1800));
    is_noticed(&planted, ViolationKind::HeldBack);
}

#[test]
fn a_letter_that_is_given_up_too_early() {
    let planted = doctored(|profile| profile.dead_letter.give_up_after = Duration::from_secs(60));
    is_noticed(&planted, ViolationKind::GivenUpEarly);
}

#[test]
fn a_blob_that_the_archive_does_not_know() {
    let planted = PlantedBugs {
        archive: Some(Box::new(|archive| Arc::new(FaultyArchive(archive)))),
        ..PlantedBugs::default()
    };
    is_noticed(&planted, ViolationKind::Unlisted);
}

#[test]
fn a_blob_that_nobody_is_told_of() {
    is_noticed(&bent(LogFault::AppendsNoAnnouncement), ViolationKind::Untold);
}
