//! Replays: dead letters are read from their blobs and appended to the log again, for one
//! subscription.

use crate::attempt::DeliveryPlan;
use crate::blobs::BlobError;
use crate::counters::add;
use crate::dead_letter_blob::{DeadLetterFault, check_letter, dead_letters_of, full_path};
use crate::dead_letters::blob_place;
use crate::dispatch::metering::MatchedSubscriptions;
use crate::recorder::{
    AcceptedRequest, DeadLetterBlobLocation, ReplayedDeadLetters, RoutingVerdicts, TopicAudience,
};
use crate::tasks::TaskKind;
use crate::{Engine, Error};
use bytes::Bytes;
use postrider_core::event::{ByteSpan, EventRef, EventSchema, MissingMembers, PublishedBatch};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::json::{JsonKind, RawJson};
use postrider_core::render::{delivered_schema, read_dead_letter};
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_store::{
    BlobFilter, BlobId, BlobRecord, DeadLetterMark, ReplayJob, ReplayState, UnreadableBlob,
};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Dead letters that are appended together.
const LETTERS_PER_APPEND_MAX: usize = 100;
/// With a rate, dead letters are appended in portions of this much time.
const PORTIONS_PER_SECOND: u32 = 10;
/// Replays that run at the same time.
const REPLAYS_MAX: usize = 8;
/// Wait before a refused append or a failed read of a blob is retried.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// A dead letter, identified by its blob and its index in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeadLetterId {
    pub blob: BlobId,
    pub place: u32,
}

/// Selects dead letters in blobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArchivedDeadLetterFilter {
    pub subscription: Option<SubscriptionId>,
    pub reason: Option<GiveUpReason>,
    pub since: Option<Timestamp>,
    /// Only this dead letter.
    pub letter: Option<DeadLetterId>,
}

impl ArchivedDeadLetterFilter {
    fn blobs(&self) -> BlobFilter {
        BlobFilter {
            subscription: self.subscription,
            reason: self.reason,
            since: self.since,
        }
    }

    /// Whether the filter selects the dead letter at this index, in a blob that it selects.
    pub fn takes(&self, place: usize, mark: DeadLetterMark) -> bool {
        let asked = self.letter.is_none_or(|letter| letter.place as usize == place);
        asked && !mark.purged && self.reason.is_none_or(|reason| mark.reason == reason)
    }
}

/// The parameters of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplayRequest {
    pub filter: ArchivedDeadLetterFilter,
    /// Another target than the subscription of the dead letters.
    pub to: Option<SubscriptionId>,
    /// Dead letters per second.
    pub rate: Option<u32>,
}

/// Parses the parameters of a replay from its stored request.
pub type ReplayRequestParser = Box<dyn Fn(&ReplayJob) -> Option<ReplayRequest> + Send + Sync>;

/// Replays in progress on this node.
#[derive(Default)]
pub struct ReplayRegistry {
    running: Mutex<BTreeMap<u64, Arc<ReplayRun>>>,
    read: OnceLock<ReplayRequestParser>,
}

#[derive(Default)]
struct ReplayRun {
    stop: CancellationToken,
    /// Whether a person stopped the replay; otherwise the next coordinator continues it.
    by_hand: AtomicBool,
}

impl ReplayRegistry {
    fn running(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<ReplayRun>>> {
        self.running.lock().expect("no panic holds it")
    }
}

/// Why a replay does not begin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayRefusal {
    #[error("{REPLAYS_MAX} replays are under way")]
    TooMany,
    #[error("the replay is under way")]
    UnderWay,
    #[error("the replay has ended")]
    Ended,
}

impl Engine {
    /// Blobs that a filter selects, in order, after `after`.
    pub async fn letter_blobs(
        &self,
        filter: &ArchivedDeadLetterFilter,
        after: Option<BlobId>,
        max: usize,
    ) -> Result<Vec<BlobRecord>, Error> {
        let archive = &self.dead_letters.archive;
        if let Some(letter) = filter.letter {
            let blob = archive.get(letter.blob).await?;
            let again = after.is_some_and(|after| after >= letter.blob);
            return Ok(blob.into_iter().filter(|_| !again).collect());
        }
        Ok(archive.list(&filter.blobs(), after, max).await?)
    }

    /// The number of dead letters in blobs that a filter selects.
    pub async fn count_letters(&self, filter: &ArchivedDeadLetterFilter) -> Result<u64, Error> {
        const PAGE: usize = 100;
        let (mut count, mut after) = (0, None);
        loop {
            let page = self.letter_blobs(filter, after, PAGE).await?;
            let Some(last) = page.last() else {
                return Ok(count);
            };
            after = Some(last.id);
            for blob in &page {
                let marks = blob.marks.iter().enumerate();
                count += marks.filter(|(place, mark)| filter.takes(*place, **mark)).count() as u64;
            }
        }
    }

    /// The content of a blob, as stored.
    pub async fn read_blob(&self, blob: &BlobRecord) -> Result<Bytes, BlobError> {
        let blobs = &self.dead_letters.blobs;
        blobs.get(&blob.account, &blob.container, &blob.path).await
    }

    /// Hides dead letters permanently; a blob without visible ones is deleted. Returns how many
    /// were hidden.
    pub async fn purge_letters(&self, filter: &ArchivedDeadLetterFilter) -> Result<u64, Error> {
        let (mut purged, mut after) = (0, None);
        loop {
            let _one_at_a_time = self.dead_letters.marking.lock().await;
            let page = self.letter_blobs(filter, after, 1).await?;
            let Some(mut blob) = page.into_iter().next() else {
                return Ok(purged);
            };
            let (was, mut hidden) = (blob.marks.clone(), 0);
            for (place, mark) in blob.marks.iter_mut().enumerate() {
                if filter.takes(place, *mark) {
                    mark.purged = true;
                    hidden += 1;
                }
            }
            let archive = &self.dead_letters.archive;
            purged += hidden;
            if blob.marks.iter().all(|mark| mark.purged) {
                let blobs = &self.dead_letters.blobs;
                if let Err(e) = blobs.delete(&blob.account, &blob.container, &blob.path).await {
                    tracing::warn!(path = %blob.path, error = %e, "purged dead letters stay in their blob");
                }
                archive.remove(blob.id).await?;
            } else if !archive.mark_if(blob.id, &was, blob.marks).await? {
                // Another node has replayed some of them in the meantime: read the blob again.
                purged -= hidden;
                continue;
            }
            after = Some(blob.id);
        }
    }

    /// Begins a replay, or continues one that was cancelled or interrupted. `said` is the request
    /// as its author wrote it, stored with the replay.
    pub async fn start_replay(
        self: &Arc<Self>,
        job: Option<ReplayJob>,
        request: ReplayRequest,
        said: String,
    ) -> Result<Result<ReplayJob, ReplayRefusal>, Error> {
        let archive = &self.dead_letters.archive;
        let mut job = match job {
            Some(job) if job.state == ReplayState::Done => return Ok(Err(ReplayRefusal::Ended)),
            Some(job) => job,
            None => ReplayJob {
                id: archive.next_job().await?,
                request: said,
                created: self.clock.now(),
                next: (BlobId(0), 0),
                last: archive.last().await?.unwrap_or_default(),
                replayed: 0,
                failed: 0,
                unreadable: 0,
                unreadable_blobs: Vec::new(),
                state: ReplayState::Running,
            },
        };
        job.state = ReplayState::Running;
        if !self.node.is_coordinator() {
            // The coordinator sees the stored replay and begins it.
            archive.put_job(job.clone(), None).await?;
            return Ok(Ok(job));
        }
        let run = match self.begin_run(job.id) {
            Ok(run) => run,
            Err(refusal) => return Ok(Err(refusal)),
        };
        if let Err(e) = archive.put_job(job.clone(), None).await {
            self.replays.running().remove(&job.id);
            return Err(e.into());
        }
        let running = self.clone().replay(job.clone(), request, run);
        self.dispatcher.tasks.spawn(TaskKind::Replay, running);
        Ok(Ok(job))
    }

    fn begin_run(&self, id: u64) -> Result<Arc<ReplayRun>, ReplayRefusal> {
        let mut running = self.replays.running();
        if running.contains_key(&id) {
            return Err(ReplayRefusal::UnderWay);
        }
        if running.len() >= REPLAYS_MAX {
            return Err(ReplayRefusal::TooMany);
        }
        let run = Arc::new(ReplayRun {
            stop: self.dispatcher.stop.child_token(),
            by_hand: AtomicBool::new(false),
        });
        running.insert(id, run.clone());
        Ok(run)
    }

    /// Sets how replays that another node has begun are parsed; without it they do not run here. To
    /// be called once.
    pub fn set_replay_request_parser(&self, read: ReplayRequestParser) {
        // A second call has no effect.
        let _ = self.replays.read.set(read);
    }

    /// In a cluster: runs the replays of all nodes while this node is the coordinator.
    pub(crate) async fn run_replays(self: Arc<Self>) {
        let archive = self.dead_letters.archive.clone();
        let mut steward = self.node.coordinator.clone();
        loop {
            let mine = *steward.borrow_and_update();
            let looked = match mine {
                true => self.look_at_replays().await,
                false => {
                    self.replays.running().values().for_each(|run| run.stop.cancel());
                    Ok(())
                }
            };
            if let Err(e) = &looked {
                tracing::error!(error = %e, "cannot look at the replays");
            }
            let again = self.wall.sleep_until(self.wall.now() + TRY_AGAIN);
            tokio::select! {
                biased;
                () = self.dispatcher.stop.cancelled() => return,
                () = crate::node::changed(&mut steward) => {}
                () = archive.jobs_changed() => {}
                () = self.replays_ended.notified() => {}
                () = again, if looked.is_err() => {}
            }
        }
    }

    async fn look_at_replays(self: &Arc<Self>) -> Result<(), Error> {
        let archive = &self.dead_letters.archive;
        let to_cancel = archive.cancel_requests().await?;
        for id in &to_cancel {
            self.cancel_replay(*id);
        }
        for mut job in archive.jobs().await? {
            if job.state != ReplayState::Running || self.is_replaying(job.id) {
                continue;
            }
            if to_cancel.contains(&job.id) {
                job.state = ReplayState::Cancelled;
                archive.put_job(job, None).await?;
                continue;
            }
            let request = self.replays.read.get().and_then(|read| read(&job));
            // Beyond the bound, a replay begins when another has ended.
            if let Some(request) = request
                && let Ok(run) = self.begin_run(job.id)
            {
                tracing::info!(replay = job.id, "a replay is taken up");
                self.dispatcher
                    .tasks
                    .spawn(TaskKind::Replay, self.clone().replay(job, request, run));
            }
        }
        Ok(())
    }

    /// Whether a replay is in progress, on any node.
    pub fn is_under_way(&self, job: &ReplayJob) -> bool {
        let elsewhere = self.node.name.is_some() && job.state == ReplayState::Running;
        elsewhere || self.is_replaying(job.id)
    }

    /// Stops a replay on whichever node runs it, which takes a moment. It can be continued later.
    /// Returns whether it was in progress.
    pub async fn stop_replay(&self, job: &ReplayJob) -> Result<bool, Error> {
        if self.cancel_replay(job.id) {
            return Ok(true);
        }
        let elsewhere = self.is_under_way(job);
        if elsewhere {
            self.dead_letters.archive.request_cancel(job.id).await?;
        }
        Ok(elsewhere)
    }

    /// Whether a replay is in progress on this node.
    pub fn is_replaying(&self, id: u64) -> bool {
        self.replays.running().contains_key(&id)
    }

    /// Stops a replay on this node; it can be continued later. Returns whether it was in progress.
    pub fn cancel_replay(&self, id: u64) -> bool {
        let running = self.replays.running();
        let run = running.get(&id);
        run.inspect(|run| {
            run.by_hand.store(true, Release);
            run.stop.cancel();
        })
        .is_some()
    }

    async fn replay(self: Arc<Self>, mut job: ReplayJob, request: ReplayRequest, run: Arc<ReplayRun>) {
        let id = job.id;
        if let Err(e) = self.replay_all(&mut job, &request, &run.stop).await {
            tracing::error!(replay = id, error = %e, "replay cut short; it can be gone on with");
            job.state = ReplayState::Cancelled;
        }
        // Another node continues, or has already continued, from the recorded progress.
        let left = self.node.name.is_some()
            && run.stop.is_cancelled()
            && !run.by_hand.load(Acquire)
            && job.state != ReplayState::Done;
        if !left && let Err(e) = self.dead_letters.archive.put_job(job, None).await {
            tracing::error!(replay = id, error = %e, "cannot record how far a replay has come");
        }
        self.replays.running().remove(&id);
        self.replays_ended.notify_one();
    }

    async fn replay_all(
        &self,
        job: &mut ReplayJob,
        request: &ReplayRequest,
        stop: &CancellationToken,
    ) -> Result<(), Error> {
        let mut pace = ReplayPace::new(request.rate, self.wall.now());
        loop {
            // The page starts with the blob that was begun.
            let after = job.next.0.0.checked_sub(1).map(BlobId);
            let page = self.letter_blobs(&request.filter, after, 1).await?;
            let blob = page.into_iter().next().filter(|blob| blob.id <= job.last);
            let Some(blob) = blob else {
                job.state = ReplayState::Done;
                return Ok(());
            };
            if blob.id != job.next.0 {
                job.next = (blob.id, 0);
            }
            let body = match self.fetch(&blob, stop).await {
                FetchedBlob::Body(body) => body,
                FetchedBlob::Stopped => {
                    job.state = ReplayState::Cancelled;
                    return Ok(());
                }
                FetchedBlob::Unreadable(fault) => {
                    skip_blob(job, request, &blob, fault);
                    continue;
                }
            };
            let letters = match dead_letters_of(&blob, &body) {
                Ok(letters) => letters,
                Err(fault) => {
                    skip_blob(job, request, &blob, fault);
                    continue;
                }
            };
            self.replay_blob(job, request, blob, &letters, &mut pace, stop)
                .await?;
            if stop.is_cancelled() {
                job.state = ReplayState::Cancelled;
                return Ok(());
            }
            job.next = (BlobId(job.next.0.0 + 1), 0);
        }
    }

    /// Reads a blob, retrying until the store answers.
    async fn fetch(&self, blob: &BlobRecord, stop: &CancellationToken) -> FetchedBlob {
        loop {
            match self.read_blob(blob).await {
                Ok(body) => return FetchedBlob::Body(body),
                Err(e) => match DeadLetterFault::of_error(&e) {
                    Some(fault) => return FetchedBlob::Unreadable(fault),
                    None => {
                        tracing::warn!(path = %blob.path, error = %e, "a blob of dead letters cannot be read")
                    }
                },
            }
            if self.pause(TRY_AGAIN, stop).await {
                return FetchedBlob::Stopped;
            }
        }
    }

    async fn replay_blob(
        &self,
        job: &mut ReplayJob,
        request: &ReplayRequest,
        mut blob: BlobRecord,
        letters: &[RawJson<'_>],
        pace: &mut ReplayPace,
        stop: &CancellationToken,
    ) -> Result<(), Error> {
        let target = request.to.unwrap_or(blob.subscription);
        let mut place = job.next.1 as usize;
        while place < blob.marks.len() {
            let most = pace.portion(self.wall.now());
            if most == 0 {
                if self.pause(pace.until_more(self.wall.now()), stop).await {
                    return Ok(());
                }
                continue;
            }
            let _one_at_a_time = self.dead_letters.marking.lock().await;
            // Dead letters may have been purged or replayed by others in the meantime.
            match self.dead_letters.archive.get(blob.id).await? {
                Some(fresh) => blob = fresh,
                None => break,
            }
            let chosen: Vec<usize> = (place..blob.marks.len().min(letters.len()))
                .filter(|at| request.filter.takes(*at, blob.marks[*at]))
                .take(most)
                .collect();
            let Some(last) = chosen.last().copied() else {
                place = blob.marks.len();
                break;
            };
            let check = |at: &usize| check_letter(letters[*at], blob.marks[*at]);
            let fault = chosen.iter().find_map(|at| check(at).err());
            let (whole, damaged): (Vec<usize>, Vec<usize>) =
                chosen.into_iter().partition(|at| check(at).is_ok());
            let plan = self.dispatcher.outlet(target).and_then(|outlet| outlet.plan());
            let batches = plan
                .as_ref()
                .map_or_else(Vec::new, |plan| self.batches(plan, letters, &whole, &blob.marks));
            let replayed: usize = batches.iter().map(|batch| batch.events.len()).sum();
            let from = self.recorder.on().then(|| Arc::new(blob_place(&blob)));
            for batch in batches {
                let noted = from.as_ref().zip(plan.as_deref());
                if !self.append_replayed(job.id, target, batch, noted, stop).await? {
                    return Ok(());
                }
            }
            pace.spent(whole.len());
            place = last + 1;
            job.next = (blob.id, place as u32);
            job.replayed += replayed as u64;
            job.failed += (whole.len() - replayed) as u64;
            if let Some(fault) = fault {
                add_unreadable(job, &blob, damaged.len() as u64, fault);
            }
            add(&self.dispatcher.counters.replayed, replayed);
            if !self.record_replayed(job, &mut blob, &whole, stop).await? {
                return Ok(());
            }
            if stop.is_cancelled() {
                return Ok(());
            }
        }
        job.next = (blob.id, place as u32);
        Ok(())
    }

    /// Records that dead letters of a blob were replayed, and the progress of the replay. False if
    /// another node has taken over.
    async fn record_replayed(
        &self,
        job: &ReplayJob,
        blob: &mut BlobRecord,
        chosen: &[usize],
        stop: &CancellationToken,
    ) -> Result<bool, Error> {
        let archive = &self.dead_letters.archive;
        loop {
            let was = blob.marks.clone();
            for at in chosen {
                if let Some(mark) = blob.marks.get_mut(*at) {
                    mark.replays = mark.replays.saturating_add(1);
                }
            }
            let marks = blob.marks.clone();
            if archive.put_job_if(job.clone(), blob.id, &was, marks).await? {
                return Ok(true);
            }
            // Another node has changed the blob or the replay: it has purged dead letters, or
            // continues this replay.
            if stop.is_cancelled() {
                return Ok(false);
            }
            match archive.get(blob.id).await? {
                Some(fresh) => *blob = fresh,
                None => {
                    archive.put_job(job.clone(), None).await?;
                    return Ok(true);
                }
            }
        }
    }

    /// The chosen dead letters as publish requests, one for each earlier number of replays. Dead
    /// letters that cannot be sent to the target are left out.
    fn batches(
        &self,
        plan: &DeliveryPlan,
        letters: &[RawJson<'_>],
        chosen: &[usize],
        marks: &[DeadLetterMark],
    ) -> Vec<PublishedBatch> {
        let mut drafts: BTreeMap<(u32, u8), ReplayBatchDraft> = BTreeMap::new();
        for at in chosen {
            let Some((schema, event)) = letters.get(*at).and_then(|letter| restore(plan, *letter)) else {
                continue;
            };
            let replay = u32::from(marks[*at].replays).saturating_add(1);
            drafts
                .entry((replay, schema as u8))
                .or_insert_with(|| ReplayBatchDraft::new(schema))
                .add(&event);
        }
        let now = self.clock.now();
        let finish = |((replay, _), draft): ((u32, u8), ReplayBatchDraft)| draft.finish(plan, replay, now);
        drafts.into_iter().map(finish).collect()
    }

    /// False when the replay is stopped before the append. `noted` is the source and target for the
    /// recorder, if there is one.
    async fn append_replayed(
        &self,
        job: u64,
        of: SubscriptionId,
        batch: PublishedBatch,
        noted: Option<(&Arc<DeadLetterBlobLocation>, &DeliveryPlan)>,
        stop: &CancellationToken,
    ) -> Result<bool, Error> {
        let wanted = MatchedSubscriptions::of(&batch);
        loop {
            let outcomes = &self.dispatcher.replay_outcomes;
            let appending = outcomes.begin_append(job, of);
            match self.log.append(batch.clone()).await {
                Ok(first) => {
                    // Only the node that delivers the events sees how they end.
                    if self.log.owns_position(first) {
                        appending.appended(first, batch.events.len());
                    }
                    self.dispatcher.count_matched(&wanted);
                    if let Some((blob, plan)) = noted {
                        self.note_replayed(first, batch, blob, plan);
                    }
                    return Ok(true);
                }
                Err(postrider_store::Error::Closed) => return Err(Error::Stopping),
                Err(e) => tracing::warn!(error = %e, "a replay waits for the log"),
            }
            if self.pause(TRY_AGAIN, stop).await {
                return Ok(false);
            }
        }
    }

    fn note_replayed(
        &self,
        first: Position,
        batch: PublishedBatch,
        blob: &Arc<DeadLetterBlobLocation>,
        plan: &DeliveryPlan,
    ) {
        let replayed = ReplayedDeadLetters {
            subscription: plan.subscription.id,
            at: batch.received,
            blob: blob.clone(),
            first,
            count: batch.events.len() as u32,
        };
        // Other subscriptions of the topic were not considered.
        let heard_by = vec![plan.subscription.clone()];
        self.recorder.accepted(AcceptedRequest {
            first: Some(first),
            batch: Arc::new(batch),
            audience: Arc::new(TopicAudience::new(
                &plan.topic.topic,
                &plan.topic.full_id,
                heard_by,
            )),
            verdicts: RoutingVerdicts::default(),
        });
        self.recorder.replayed(replayed);
    }

    /// Returns true when the replay is stopped first.
    pub(crate) async fn pause(&self, real: Duration, stop: &CancellationToken) -> bool {
        tokio::select! {
            biased;
            () = stop.cancelled() => true,
            () = self.wall.sleep_until(self.wall.now() + real) => false,
        }
    }
}

enum FetchedBlob {
    Body(Bytes),
    Unreadable(DeadLetterFault),
    Stopped,
}

/// Skips a blob whose dead letters cannot be read.
fn skip_blob(job: &mut ReplayJob, request: &ReplayRequest, blob: &BlobRecord, fault: DeadLetterFault) {
    let left = blob.marks.iter().enumerate().skip(job.next.1 as usize);
    let letters = left
        .filter(|(place, mark)| request.filter.takes(*place, **mark))
        .count() as u64;
    if letters > 0 {
        add_unreadable(job, blob, letters, fault);
    }
    job.next = (BlobId(blob.id.0 + 1), 0);
}

fn add_unreadable(job: &mut ReplayJob, blob: &BlobRecord, letters: u64, fault: DeadLetterFault) {
    let path = full_path(blob);
    tracing::warn!(replay = job.id, %path, letters, reason = %fault.reason, "dead letters cannot be replayed");
    job.add_unreadable(UnreadableBlob {
        id: blob.id,
        account: blob.account.clone(),
        container: blob.container.clone(),
        path: blob.path.clone(),
        letters,
        fault: fault.fault,
        reason: fault.reason,
    });
}

/// The event of a dead letter in a form that can be sent to the subscription, if there is one.
fn restore(plan: &DeliveryPlan, letter: RawJson<'_>) -> Option<(EventSchema, String)> {
    if letter.kind() != JsonKind::Object {
        return None;
    }
    let (schema, event) = read_dead_letter(letter);
    let delivery = plan.rendering().delivery;
    match (schema, delivery) {
        // The original event is inside the Event Grid envelope that it was given.
        (EventSchema::EventGrid, EventSchema::Custom) => {
            let original = RawJson::parse(&event).ok()?.get("data")?.text().to_owned();
            Some((EventSchema::Custom, original))
        }
        (schema, delivery) => (delivered_schema(schema, delivery) == delivery).then_some((schema, event)),
    }
}

/// A publish request that is being built.
struct ReplayBatchDraft {
    schema: EventSchema,
    body: String,
    events: Vec<EventRef>,
}

impl ReplayBatchDraft {
    fn new(schema: EventSchema) -> ReplayBatchDraft {
        ReplayBatchDraft {
            schema,
            body: String::from("["),
            events: Vec::new(),
        }
    }

    fn add(&mut self, event: &str) {
        if !self.events.is_empty() {
            self.body.push(',');
        }
        let start = self.body.len();
        self.body.push_str(event);
        self.events.push(event_ref(self.schema, event, start));
    }

    fn finish(mut self, plan: &DeliveryPlan, replay: u32, now: Timestamp) -> PublishedBatch {
        self.body.push(']');
        PublishedBatch {
            topic: plan.topic.topic.id,
            schema: self.schema,
            received: now,
            publisher: "replay".into(),
            trace: None,
            replay,
            hops: 0,
            body: Bytes::from(self.body),
            events: self.events,
            matched: vec![Box::new([plan.subscription.id])],
        }
    }
}

/// The event reference that publishing would have made for an event whose text begins at `start`.
fn event_ref(schema: EventSchema, event: &str, start: usize) -> EventRef {
    let mut noted = EventRef {
        object: ByteSpan::new(start, start + event.len()),
        ..EventRef::default()
    };
    let object = RawJson::trusted(event);
    if schema != EventSchema::EventGrid {
        return noted;
    }
    let absent = |name: &str| object.get(name).is_none_or(|value| value.is_null());
    noted.lacks = MissingMembers {
        topic: absent("topic"),
        data_version: object.get("dataVersion").is_none(),
        metadata_version: object.get("metadataVersion").is_none(),
    };
    if let Some(version) = object
        .get("dataVersion")
        .filter(|value| value.kind() == JsonKind::String)
    {
        let text = version.text();
        let at = start + (text.as_ptr() as usize - event.as_ptr() as usize);
        noted.data_version = ByteSpan::new(at + 1, at + text.len() - 1);
    }
    noted
}

/// Limits replays to a number of dead letters per second, in even portions.
struct ReplayPace {
    rate: Option<u32>,
    began: Timestamp,
    spent: u64,
}

impl ReplayPace {
    fn new(rate: Option<u32>, now: Timestamp) -> ReplayPace {
        ReplayPace {
            rate,
            began: now,
            spent: 0,
        }
    }

    /// How many dead letters may be appended now.
    fn portion(&self, now: Timestamp) -> usize {
        let Some(rate) = self.rate else {
            return LETTERS_PER_APPEND_MAX;
        };
        // The first portion is due at once.
        let step = u64::from(rate.div_ceil(PORTIONS_PER_SECOND).max(1));
        let earned = (now.since(self.began).as_secs_f64() * f64::from(rate)) as u64 + step;
        (earned.saturating_sub(self.spent).min(step) as usize).min(LETTERS_PER_APPEND_MAX)
    }

    fn until_more(&self, now: Timestamp) -> Duration {
        let Some(rate) = self.rate else {
            return Duration::ZERO;
        };
        let step = u64::from(rate.div_ceil(PORTIONS_PER_SECOND).max(1));
        let needed = (self.spent + 1).saturating_sub(step) as f64 / f64::from(rate);
        let at = self.began + Duration::from_secs_f64(needed);
        at.since(now).max(Duration::from_millis(1))
    }

    fn spent(&mut self, letters: usize) {
        self.spent += letters as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_secs(1_000_000) + Duration::from_millis(millis)
    }

    #[test]
    fn a_rate_is_kept_in_even_portions() {
        let mut pace = ReplayPace::new(Some(50), at(0));
        let mut sent = Vec::new();
        let mut now = 0;
        while now < 2000 {
            let portion = pace.portion(at(now));
            if portion == 0 {
                now += pace.until_more(at(now)).as_millis() as u64;
                continue;
            }
            assert!(portion <= 5, "{portion}");
            pace.spent(portion);
            sent.push((now, portion));
        }
        let first_second: usize = sent.iter().filter(|(t, _)| *t < 1000).map(|(_, n)| n).sum();
        let total: usize = sent.iter().map(|(_, n)| n).sum();
        assert!((50..=56).contains(&first_second), "{first_second}");
        assert!((100..=106).contains(&total), "{total}");
    }

    #[test]
    fn without_a_rate_everything_goes() {
        let pace = ReplayPace::new(None, at(0));
        assert_eq!(pace.portion(at(0)), LETTERS_PER_APPEND_MAX);
    }

    #[test]
    fn what_publishing_notes_is_noted_again() {
        let event = r#"{"id":"1","topic":"/t","dataVersion":"2.0","data":{}}"#;
        let noted = event_ref(EventSchema::EventGrid, event, 10);
        assert!(!noted.lacks.topic && !noted.lacks.data_version && noted.lacks.metadata_version);
        let range = noted.data_version.range();
        assert_eq!(&event[range.start - 10..range.end - 10], "2.0");
    }
}
