//! Public interface of the audit log.

use crate::Error;
use crate::checkpoint;
use crate::line::{AuditEntry, ChainHead};
use crate::read::{self, AuditLinePage, AuditQuery};
use crate::segment::AuditSegment;
use crate::verify::{Verification, verify_segments};
use crate::writer::{self, AppendResult, AuditDisk, AuditWriter, RealAuditDisk, WriterCommand};
use postrider_core::time::{Clock, Timestamp};
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::oneshot;

/// Entries that can wait for the writer.
const QUEUE_MAX: usize = 4096;

#[derive(Clone, Debug)]
pub struct Config {
    pub directory: PathBuf,
    /// Older lines are dropped.
    pub keep: Duration,
    /// The oldest lines are dropped when all lines together exceed this size.
    pub bytes_max: u64,
    /// The name of this node; empty on a single server.
    pub node: String,
}

/// Why nothing can be recorded now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the audit log cannot be written: {0}")]
pub struct AuditUnwritable(pub String);

/// State of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditStatus {
    /// When and why the last write failed; none if it succeeded.
    pub trouble: Option<(Timestamp, String)>,
    /// Why lines that were durable are missing or changed, as found at the start or since.
    pub damage: Option<String>,
    pub last_seq: u64,
    pub bytes: u64,
}

#[derive(Default)]
struct AuditLogState {
    segments: Vec<AuditSegment>,
    head: ChainHead,
    trouble: Option<(Timestamp, String)>,
    damage: Option<String>,
}

/// State shared by the writer and the readers.
pub(crate) struct SharedAuditState {
    pub config: Config,
    state: Mutex<AuditLogState>,
}

impl SharedAuditState {
    pub fn segments(&self) -> Vec<AuditSegment> {
        self.state.lock().expect("no panic holds it").segments.clone()
    }

    pub fn publish(&self, segments: Vec<AuditSegment>, head: ChainHead) {
        let mut state = self.state.lock().expect("no panic holds it");
        state.segments = segments;
        state.head = head;
    }

    pub fn set_trouble(&self, trouble: Option<(Timestamp, String)>) {
        let mut state = self.state.lock().expect("no panic holds it");
        match (&state.trouble, &trouble) {
            (None, Some((_, why))) => {
                tracing::error!(directory = %self.config.directory.display(), why, "the audit log cannot be written: changes are refused until it can")
            }
            (Some(_), None) => tracing::info!("the audit log can be written again"),
            _ => {}
        }
        // While writes keep failing, the first failure is the one that is reported.
        if trouble.is_none() || state.trouble.is_none() {
            state.trouble = trouble;
        }
    }
}

impl SharedAuditState {
    /// Tells the operator that recorded lines are missing or changed.
    pub fn set_damage(&self, why: &str) {
        let directory = self.config.directory.display();
        tracing::error!(%directory, why, "the audit log was damaged: recorded lines are missing or changed; it goes on, and \"postrider audit verify\" names the place");
        let mut state = self.state.lock().expect("no panic holds it");
        state.damage.get_or_insert_with(|| why.to_owned());
    }
}

/// The log of one server. Appending returns once the line is durable.
pub struct AuditLog {
    shared: Arc<SharedAuditState>,
    commands: SyncSender<WriterCommand>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl AuditLog {
    /// Opens the log and continues the chain of earlier processes. A line that a crash left
    /// unfinished is removed, which the next line records.
    pub fn open(config: Config, clock: Arc<dyn Clock>) -> Result<Arc<AuditLog>, Error> {
        AuditLog::open_on(config, clock, Box::new(RealAuditDisk))
    }

    pub(crate) fn open_on(
        config: Config,
        clock: Arc<dyn Clock>,
        disk: Box<dyn AuditDisk>,
    ) -> Result<Arc<AuditLog>, Error> {
        let path = config.directory.clone();
        let start = || -> io::Result<Arc<AuditLog>> {
            let opened = writer::open(&config.directory)?;
            let shared = Arc::new(SharedAuditState {
                config,
                state: Mutex::new(AuditLogState {
                    segments: opened.segments.clone(),
                    head: opened.head.clone(),
                    trouble: None,
                    damage: None,
                }),
            });
            if let Some(why) = &opened.damage {
                shared.set_damage(why);
            }
            let (commands, todo) = sync_channel(QUEUE_MAX);
            let writer = AuditWriter::new(shared.clone(), clock, disk, opened);
            let thread = std::thread::Builder::new()
                .name("audit".into())
                .spawn(move || writer.run(&todo))?;
            Ok(Arc::new(AuditLog {
                shared,
                commands,
                thread: Mutex::new(Some(thread)),
            }))
        };
        start().map_err(|source| Error { path, source })
    }

    /// Whether a change may begin: there is room to record it. A disk that has failed is tried
    /// again.
    pub async fn admit(&self) -> Result<(), AuditUnwritable> {
        let troubled = self
            .shared
            .state
            .lock()
            .expect("no panic holds it")
            .trouble
            .is_some();
        if !troubled {
            return Ok(());
        }
        let (waiter, told) = oneshot::channel();
        self.send(WriterCommand::Retry(waiter))?;
        wait(told).await.map(drop)
    }

    /// Records an entry. Returns its number once it is durable.
    pub async fn append(&self, entry: AuditEntry) -> Result<u64, AuditUnwritable> {
        let (waiter, told) = oneshot::channel();
        self.send(WriterCommand::Append(Box::new(entry), Some(waiter)))?;
        wait(told).await
    }

    /// Records an entry soon, without waiting for it.
    pub fn note(&self, entry: AuditEntry) {
        if let Err(why) = self.send(WriterCommand::Append(Box::new(entry), None)) {
            tracing::error!(%why, "a line of the audit log is lost");
        }
    }

    fn send(&self, command: WriterCommand) -> Result<(), AuditUnwritable> {
        self.commands.try_send(command).map_err(|e| match e {
            TrySendError::Full(_) => AuditUnwritable("too many lines wait to be written".into()),
            TrySendError::Disconnected(_) => closed(),
        })
    }

    pub fn status(&self) -> AuditStatus {
        let state = self.shared.state.lock().expect("no panic holds it");
        AuditStatus {
            trouble: state.trouble.clone(),
            damage: state.damage.clone(),
            last_seq: state.head.seq,
            bytes: state.segments.iter().map(|segment| segment.bytes).sum(),
        }
    }

    /// A page of lines. Reads files, so it must not run on a thread that others wait for.
    pub fn read(&self, query: &AuditQuery) -> io::Result<AuditLinePage> {
        read::read(&self.shared.segments(), &self.shared.config.node, query)
    }

    /// Verifies the whole chain up to the last durable line. Reads all files, and starts again if
    /// one is dropped meanwhile.
    pub fn verify(&self) -> io::Result<Verification> {
        const TRIES: u32 = 3;
        let mut tries = 1;
        loop {
            // Read first: the segments then have its line.
            let checkpoint = checkpoint::read(&self.shared.config.directory)?;
            let segments = self.shared.segments();
            match verify_segments(&segments, checkpoint) {
                Err(e)
                    if e.kind() == io::ErrorKind::NotFound
                        && tries < TRIES
                        && segments != self.shared.segments() =>
                {
                    tries += 1;
                }
                other => return other,
            }
        }
    }

    /// Writes all waiting entries and ends the thread. Nothing is recorded afterwards.
    pub fn close(&self) {
        let thread = self.thread.lock().expect("no panic holds it").take();
        let Some(thread) = thread else { return };
        // Fails only if the writer has already ended.
        let _ = self.commands.send(WriterCommand::Close);
        if thread.join().is_err() {
            tracing::error!("the thread of the audit log has panicked");
        }
    }
}

impl Drop for AuditLog {
    fn drop(&mut self) {
        self.close();
    }
}

fn closed() -> AuditUnwritable {
    AuditUnwritable("the server is stopping".into())
}

async fn wait(told: oneshot::Receiver<AppendResult>) -> Result<u64, AuditUnwritable> {
    told.await.unwrap_or_else(|_| Err(closed()))
}

#[cfg(test)]
mod tests;
