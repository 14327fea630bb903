//! The flight recorder on local files: the history of every event, for as long as it is kept.
//!
//! The engine pushes records into a bounded queue and continues. One thread writes them into
//! segments as frames, another writes the index files of closed segments. Nothing is flushed to the
//! disk: a power failure loses the last seconds of history, never an event.

mod queue;
mod writer;
mod record;
mod frame;
mod redact;
mod segment;
mod index;
mod lifecycle_facts;
mod query;
mod live_stream;

pub use query::{BUDGET, cost};

pub use segment::damaged_files;

use frame::SEGMENT_HEAD;
use index::RecordIndex;
use lifecycle_facts::LifecycleFacts;
use live_stream::{LINES_MAX, LiveLineBuilder, RecentEvents};
use postrider_core::ids::TopicId;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::recorder::{
    AcceptedRequest, AttemptedRequest, BlobWritten, EndedDeliveries, EventHistory, EventPage, EventPlace,
    EventQuery, EventRecorder, HeldEndpoint, LiveStreamLine, RecentEvent, RecorderStatus, RecordingQueries,
    ReleasedEndpoint, ReplayedDeadLetters, RetiredSubscription, SubscriptionHistory,
};
use query::QuerySession;
use queue::RecordQueue;
use record::RecordFrame;
use segment::{RecordFrameReader, RecorderSegment};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::broadcast;
use writer::{FrameBuffer, RecorderItem};

#[derive(Debug, thiserror::Error)]
#[error("cannot open the flight recorder at {path}: {source}")]
pub struct Error {
    path: PathBuf,
    source: io::Error,
}

#[derive(Clone, Debug)]
pub struct Config {
    pub directory: PathBuf,
    /// Segments whose last record is older are dropped.
    pub keep: Duration,
    /// The oldest segments are dropped when all together exceed this.
    pub bytes_max: u64,
    /// A segment is closed when it exceeds this size or age.
    pub segment_bytes: u64,
    pub segment_span: Duration,
    /// Whether events are accepted and attempted by other nodes too. The live stream then includes
    /// attempts of events that are not known here.
    pub among_others: bool,
}

impl Config {
    pub fn new(directory: PathBuf) -> Config {
        Config {
            directory,
            keep: Duration::from_secs(3 * 86_400),
            bytes_max: 1 << 30,
            segment_bytes: 32 << 20,
            segment_span: Duration::from_secs(600),
            among_others: false,
        }
    }
}

/// How long a query waits for the records pushed before it.
const CATCH_UP_MAX: Duration = Duration::from_secs(5);
/// The same in a cluster: peer requests wait a second for the reply.
const CATCH_UP_AMONG_OTHERS_MAX: Duration = Duration::from_millis(500);

/// Stores records on disk and answers queries. Stops, with everything written, when it is dropped.
pub struct FlightRecorder {
    shared: Arc<RecorderShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct RecorderShared {
    config: Config,
    clock: Arc<dyn Clock>,
    queue: RecordQueue,
    /// The oldest first; the last one is being written.
    segments: RwLock<Vec<Arc<RecorderSegment>>>,
    facts: RwLock<LifecycleFacts>,
    recents: Mutex<RecentEvents>,
    lines: broadcast::Sender<Arc<LiveStreamLine>>,
    trouble: Mutex<Option<String>>,
    /// Whether all segments of an earlier process have been checked.
    checked: (Mutex<bool>, Condvar),
}

/// Work for the thread that maintains the indexes.
enum IndexJob {
    /// Write the index of a closed segment into its file.
    Seal(Arc<RecorderSegment>),
    /// Check the index of a segment of an earlier process, and rebuild it if necessary.
    Check(Arc<RecorderSegment>),
    /// All segments of the earlier process have been checked.
    Checked,
}

impl FlightRecorder {
    /// Opens the segments of an earlier process. Segments without an index are indexed in the
    /// background.
    pub fn open(config: Config, clock: Arc<dyn Clock>) -> Result<Arc<FlightRecorder>, Error> {
        let path = config.directory.clone();
        FlightRecorder::start(config, clock).map_err(|source| Error { path, source })
    }

    fn start(config: Config, clock: Arc<dyn Clock>) -> io::Result<Arc<FlightRecorder>> {
        let mut directory = std::fs::DirBuilder::new();
        directory.recursive(true).mode(0o700).create(&config.directory)?;
        let found = find_segments(&config)?;
        let shared = Arc::new(RecorderShared {
            queue: RecordQueue::default(),
            segments: RwLock::new(found.clone()),
            facts: RwLock::default(),
            recents: Mutex::default(),
            lines: broadcast::channel(LINES_MAX).0,
            trouble: Mutex::default(),
            checked: Default::default(),
            config,
            clock,
        });
        shared.reload_facts();
        let (jobs, todo) = mpsc::channel();
        for segment in found.into_iter().rev() {
            // The receiver is held here, so sending cannot fail.
            let _ = jobs.send(IndexJob::Check(segment));
        }
        let _ = jobs.send(IndexJob::Checked);
        let writing = RecordingThread::begin(shared.clone(), jobs);
        let indexing = shared.clone();
        let threads = vec![
            thread("recorder", move || writing.run())?,
            thread("recorder-index", move || indexing.keep_indexes(&todo))?,
        ];
        Ok(Arc::new(FlightRecorder {
            shared,
            threads: Mutex::new(threads),
        }))
    }

    /// Returns once everything that was recorded before the call can be found, so that a client
    /// that was told of an acceptance can query the event. The wait is bounded, in case a disk
    /// hangs.
    pub fn flush(&self) {
        self.shared.queue.flush(match self.shared.config.among_others {
            true => CATCH_UP_AMONG_OTHERS_MAX,
            false => CATCH_UP_MAX,
        });
    }

    /// Returns once all segments of an earlier process can be queried.
    pub fn wait_indexed(&self) {
        let (checked, changed) = &self.shared.checked;
        let checked = checked.lock().expect("no panic holds it");
        drop(
            changed
                .wait_while(checked, |checked| !*checked)
                .expect("no panic holds it"),
        );
    }

    /// Writes everything that has been recorded and ends the threads. Nothing is recorded
    /// afterwards.
    pub fn stop(&self) {
        self.shared.queue.close();
        let threads = std::mem::take(&mut *self.threads.lock().expect("no panic holds it"));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the flight recorder has panicked");
            }
        }
    }

    /// A page for at most this much work; see [`BUDGET`].
    pub fn search_within(&self, query: &EventQuery, budget: u64) -> EventPage {
        self.flush();
        let facts = self.shared.facts.read().expect("no panic holds it");
        QuerySession::new(self.shared.segments(), &facts).search(query, budget)
    }
}

impl Drop for FlightRecorder {
    fn drop(&mut self) {
        self.stop();
    }
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run)
}

/// The segments in the directory, the oldest first. Files that cannot be segments are removed.
fn find_segments(config: &Config) -> io::Result<Vec<Arc<RecorderSegment>>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&config.directory)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|e| e.to_str());
        match extension {
            Some("rec") => match RecorderSegment::open(&path)? {
                Some(segment) => found.push(Arc::new(segment)),
                None => std::fs::remove_file(&path)?,
            },
            Some("idx-new") => std::fs::remove_file(&path)?,
            _ => {}
        }
    }
    found.sort_by_key(|segment| segment.start);
    Ok(found)
}

impl RecorderShared {
    fn segments(&self) -> Vec<Arc<RecorderSegment>> {
        self.segments.read().expect("no panic holds it").clone()
    }

    fn trouble(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().expect("no panic holds it")
    }

    /// Reads all facts again, in their order.
    fn reload_facts(&self) {
        let mut facts = self.facts.write().expect("no panic holds it");
        *facts = LifecycleFacts::default();
        let (mut reader, mut work) = (RecordFrameReader::default(), Default::default());
        for segment in self.segments() {
            let offsets = segment.index.read().expect("no panic holds it").facts().to_vec();
            for offset in offsets {
                let content = reader.read(&segment, offset, &mut work);
                if let Some(frame) = content.and_then(|bytes| RecordFrame::read(bytes, segment.start)) {
                    facts.add(&frame);
                }
            }
        }
    }

    fn keep_indexes(&self, todo: &mpsc::Receiver<IndexJob>) {
        for job in todo {
            let (segment, result) = match job {
                IndexJob::Seal(segment) => {
                    let result = segment.seal();
                    (segment, result)
                }
                IndexJob::Check(segment) => {
                    let good = match &*segment.index.read().expect("no panic holds it") {
                        RecordIndex::File(index) => index.is_whole(),
                        RecordIndex::Memory(_) => true,
                        RecordIndex::Missing => false,
                    };
                    let result = if good { Ok(()) } else { segment.rebuild() };
                    (segment, result)
                }
                IndexJob::Checked => {
                    self.reload_facts();
                    *self.checked.0.lock().expect("no panic holds it") = true;
                    self.checked.1.notify_all();
                    continue;
                }
            };
            if let Err(e) = result {
                // The segment may have been dropped in the meantime.
                tracing::warn!(segment = %segment.path.display(), error = %e, "cannot index what was recorded");
            }
        }
    }

    /// Whether a segment has reached its maximum age.
    fn is_old(&self, segment: &RecorderSegment, now: Timestamp) -> bool {
        now.since(Timestamp::from_nanos(segment.start)) >= self.config.segment_span
    }

    /// Drops segments that are too old or exceed the size limit. The last one stays while it is
    /// written.
    fn retain(&self, now: Timestamp, writing: bool) {
        let mut segments = self.segments.write().expect("no panic holds it");
        let mut bytes: u64 = segments.iter().map(|segment| segment.bytes()).sum();
        let oldest = (now - self.config.keep).nanos();
        let mut dropped = 0;
        while let Some(segment) = segments.get(dropped) {
            // No record of a segment is newer than the start of the next one.
            let end = match segments.get(dropped + 1) {
                Some(next) => next.start,
                None if writing => break,
                None => segment
                    .start
                    .saturating_add(self.config.segment_span.as_nanos() as i64),
            };
            if end >= oldest && bytes <= self.config.bytes_max {
                break;
            }
            bytes -= segment.bytes();
            dropped += 1;
        }
        let gone: Vec<Arc<RecorderSegment>> = segments.drain(..dropped).collect();
        let first = segments
            .first()
            .map(|segment| Timestamp::from_nanos(segment.start));
        drop(segments);
        for segment in &gone {
            if let Err(e) = segment.delete() {
                tracing::warn!(segment = %segment.path.display(), error = %e, "cannot delete what was recorded");
            }
        }
        if let (false, Some(first)) = (gone.is_empty(), first) {
            self.facts
                .write()
                .expect("no panic holds it")
                .forget_before(first);
        }
    }
}

/// The writer's thread.
struct RecordingThread {
    shared: Arc<RecorderShared>,
    jobs: mpsc::Sender<IndexJob>,
    open: Option<(Arc<RecorderSegment>, FrameBuffer)>,
    teller: LiveLineBuilder,
    looked: Timestamp,
}

/// How often to check for segments that are too old.
const LOOK_AROUND: Duration = Duration::from_secs(60);

impl RecordingThread {
    fn begin(shared: Arc<RecorderShared>, jobs: mpsc::Sender<IndexJob>) -> RecordingThread {
        let teller = LiveLineBuilder::new(shared.config.among_others);
        RecordingThread {
            looked: Timestamp::MIN,
            shared,
            jobs,
            open: None,
            teller,
        }
    }

    fn run(mut self) {
        let shared = self.shared.clone();
        let mut records = Vec::new();
        let mut worked = false;
        while shared.queue.take(&mut records, worked) {
            worked = !records.is_empty();
            let now = shared.clock.now();
            if worked {
                self.write(&records, now);
                shared.queue.done(records.len() as u64);
                records.clear();
            }
            if now.since(self.looked) >= LOOK_AROUND {
                self.looked = now;
                if self
                    .open
                    .as_ref()
                    .is_some_and(|(segment, _)| shared.is_old(segment, now))
                {
                    self.close();
                }
                shared.retain(now, self.open.is_some());
            }
        }
        self.close();
    }

    fn write(&mut self, records: &[RecorderItem], now: Timestamp) {
        match self.try_write(records, now) {
            Ok(()) => {
                if self.shared.trouble().take().is_some() {
                    tracing::info!("the flight recorder can write again");
                }
            }
            Err(e) => {
                // A partial write is recognized by its checksum and cut off. The next records start
                // a new segment.
                self.close();
                self.shared.queue.lost.fetch_add(records.len() as u64, Relaxed);
                let first = self.shared.trouble().replace(e.to_string()).is_none();
                if first {
                    tracing::warn!(error = %e, "the flight recorder cannot write; what happens meanwhile is not recorded");
                }
            }
        }
    }

    fn try_write(&mut self, records: &[RecorderItem], now: Timestamp) -> io::Result<()> {
        // As many as fit between two checks of the segment's size.
        for records in records.chunks(512) {
            self.roll(now)?;
            let (segment, frames) = self.open.as_mut().expect("one was just begun");
            for record in records {
                frames.add(record);
            }
            // The lock is taken before the append, so that a reload of facts sees these either in
            // the file or here, not twice.
            let is_fact = |r: &RecorderItem| {
                matches!(
                    r,
                    RecorderItem::Held(_) | RecorderItem::Released(_) | RecorderItem::Retired(_)
                )
            };
            let mut facts = records
                .iter()
                .any(is_fact)
                .then(|| self.shared.facts.write().expect("no panic holds it"));
            segment.append(&frames.bytes, &mut frames.notes)?;
            frames.written();
            if let Some(facts) = &mut facts {
                records.iter().for_each(|record| note_fact(facts, record));
            }
            drop(facts);
            self.tell(records);
        }
        Ok(())
    }

    /// Ensures that there is a segment to write to, and begins a new one if the current one is
    /// full.
    fn roll(&mut self, now: Timestamp) -> io::Result<()> {
        let config = &self.shared.config;
        let full = |(segment, frames): &(Arc<RecorderSegment>, FrameBuffer)| {
            frames.end() >= config.segment_bytes || self.shared.is_old(segment, now)
        };
        if self.open.as_ref().is_some_and(|open| !full(open)) {
            return Ok(());
        }
        self.close();
        let mut segments = self.shared.segments.write().expect("no panic holds it");
        // Clocks can be set back; the order of segments must still be the order of writing.
        let after = segments.last().map_or(0, |last| last.start + 1);
        let start = now.nanos().max(after);
        let segment = Arc::new(RecorderSegment::create(&self.shared.config.directory, start)?);
        segments.push(segment.clone());
        drop(segments);
        self.open = Some((segment, FrameBuffer::new(start, SEGMENT_HEAD as u64)));
        self.shared.retain(now, true);
        Ok(())
    }

    fn close(&mut self) {
        if let Some((segment, _)) = self.open.take() {
            // The index thread ends only after this one.
            let _ = self.jobs.send(IndexJob::Seal(segment));
        }
    }

    fn tell(&mut self, records: &[RecorderItem]) {
        let shared = &self.shared;
        {
            let mut recents = shared.recents.lock().expect("no panic holds it");
            for record in records {
                if let RecorderItem::Accepted(accepted) = record {
                    recents.add(accepted);
                }
            }
        }
        if shared.lines.receiver_count() == 0 {
            self.teller.forget();
            return;
        }
        let segments = shared.segments();
        let facts = shared.facts.read().expect("no panic holds it");
        // An attempt can end before the acceptance of its event is recorded. Readers of the stream
        // expect the acceptance first.
        let is_accepted = |record: &&RecorderItem| matches!(record, RecorderItem::Accepted(_));
        let rest = records.iter().filter(|record| !is_accepted(record));
        for record in records.iter().filter(is_accepted).chain(rest) {
            self.teller.tell(record, &segments, &facts, |line| {
                // Without a subscriber the line is dropped.
                let _ = shared.lines.send(Arc::new(line));
            });
        }
    }
}

fn note_fact(facts: &mut LifecycleFacts, record: &RecorderItem) {
    match record {
        RecorderItem::Held(held) => facts.hold(&held.endpoint, held.cause, held.at, held.until),
        RecorderItem::Released(released) => facts.release(&released.endpoint, released.at),
        RecorderItem::Retired(retired) => facts.retire(retired.subscription.0, retired.at, retired.reason),
        _ => {}
    }
}

impl EventRecorder for FlightRecorder {
    fn on(&self) -> bool {
        true
    }

    fn accepted(&self, accepted: AcceptedRequest) {
        self.shared.queue.push(RecorderItem::Accepted(accepted));
    }

    fn attempted(&self, attempted: AttemptedRequest) {
        self.shared.queue.push(RecorderItem::Attempted(attempted));
    }

    fn ended(&self, ended: EndedDeliveries) {
        self.shared.queue.push(RecorderItem::Ended(ended));
    }

    fn retired(&self, retired: RetiredSubscription) {
        self.shared.queue.push(RecorderItem::Retired(retired));
    }

    fn held(&self, held: HeldEndpoint) {
        self.shared.queue.push(RecorderItem::Held(held));
    }

    fn released(&self, released: ReleasedEndpoint) {
        self.shared.queue.push(RecorderItem::Released(released));
    }

    fn blob(&self, blob: BlobWritten) {
        self.shared.queue.push(RecorderItem::Blob(blob));
    }

    fn replayed(&self, replayed: ReplayedDeadLetters) {
        self.shared.queue.push(RecorderItem::Replayed(replayed));
    }
}

impl RecordingQueries for FlightRecorder {
    fn trace(&self, id: &str) -> Vec<EventHistory> {
        self.flush();
        let facts = self.shared.facts.read().expect("no panic holds it");
        QuerySession::new(self.shared.segments(), &facts).trace(id)
    }

    fn search(&self, query: &EventQuery) -> EventPage {
        self.search_within(query, BUDGET)
    }

    fn happened(&self, events: &[(EventPlace, Timestamp)]) -> Vec<Vec<SubscriptionHistory>> {
        self.flush();
        let facts = self.shared.facts.read().expect("no panic holds it");
        let mut session = QuerySession::new(self.shared.segments(), &facts);
        let events = events.iter();
        events
            .map(|(place, accepted)| session.happened(*place, *accepted))
            .collect()
    }

    fn events_at(&self, places: &[EventPlace]) -> Vec<Option<EventHistory>> {
        self.flush();
        let facts = self.shared.facts.read().expect("no panic holds it");
        let mut session = QuerySession::new(self.shared.segments(), &facts);
        places.iter().map(|place| session.event_at(*place)).collect()
    }

    fn recent(&self, topic: Option<TopicId>, max: usize) -> Vec<RecentEvent> {
        self.flush();
        self.shared
            .recents
            .lock()
            .expect("no panic holds it")
            .latest(topic, max)
    }

    fn subscribe(&self) -> broadcast::Receiver<Arc<LiveStreamLine>> {
        self.shared.lines.subscribe()
    }

    fn status(&self) -> RecorderStatus {
        let segments = self.shared.segments();
        let missing = |segment: &&Arc<RecorderSegment>| {
            matches!(
                *segment.index.read().expect("no panic holds it"),
                RecordIndex::Missing
            )
        };
        RecorderStatus {
            on: true,
            lost: self.shared.queue.lost.load(Relaxed),
            segments: segments.len() as u64,
            bytes: segments.iter().map(|segment| segment.bytes()).sum(),
            oldest: segments
                .first()
                .map(|segment| Timestamp::from_nanos(segment.start)),
            indexing: segments.iter().filter(missing).count() as u64,
            trouble: self.shared.trouble().clone(),
        }
    }
}
