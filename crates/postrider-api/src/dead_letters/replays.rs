//! Replays: started, listed, cancelled and resumed.

use super::page::fault_name;
use super::selection::{DeadLetterOperation, DeadLetterSelection, SelectionRequest, number};
use super::{is_zero, pending, store_unavailable};
use crate::own_api::Problem;
use crate::peers::Peers;
use postrider_core::ids::SubscriptionId;
use postrider_core::time::Clock;
use postrider_engine::Engine;
use postrider_engine::dead_letters::PendingDeadLetterSummary;
use postrider_engine::replay::{ReplayRefusal, ReplayRequest};
use postrider_store::{ReplayJob, ReplayState, UnreadableBlob};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Ended replays that are kept in the list.
const ENDED_MAX: usize = 100;
/// A cancelled replay ends soon, and its counts are final then. Limit of the time that is waited
/// for this …
const CANCEL_PATIENCE: Duration = Duration::from_secs(5);
/// … and how often the replay is checked meanwhile.
const CANCEL_PAUSE: Duration = Duration::from_millis(10);

#[derive(Debug, Serialize)]
pub struct ReplayBody {
    pub id: u64,
    pub state: &'static str,
    created: String,
    pub replayed: u64,
    pub failed: u64,
    pub total: u64,
    /// Of `failed`: dead letters whose blobs are missing, damaged or in an account that is not
    /// configured.
    #[serde(skip_serializing_if = "is_zero")]
    pub unreadable: u64,
    #[serde(rename = "unreadableBlobs", skip_serializing_if = "Vec::is_empty")]
    pub unreadable_blobs: Vec<UnreadableBlobBody>,
    request: DeadLetterSelection,
    /// Matching dead letters that the replay leaves out, because they were still pending when it
    /// began.
    #[serde(skip_serializing_if = "is_zero")]
    pub pending: u64,
    /// When the first of the pending ones is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due: Option<String>,
    /// Outcomes of the replayed events, as far as this node counted them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<ReplayOutcomeBody>,
}

/// Replayed events, counted by outcome.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ReplayOutcomeBody {
    pub delivered: u64,
    /// Dead-lettered or dropped again.
    pub failed: u64,
    pub waiting: u64,
    /// Replayed before the server started, or delivered by another node.
    #[serde(skip_serializing_if = "is_zero")]
    pub unknown: u64,
}

impl ReplayOutcomeBody {
    /// None if this node has counted no outcomes of the replay.
    fn of(engine: &Engine, job: &ReplayJob) -> Option<ReplayOutcomeBody> {
        let counted = engine.dispatcher.replay_outcomes.of(job.id)?;
        Some(ReplayOutcomeBody {
            delivered: counted.delivered,
            failed: counted.failed,
            waiting: counted.waiting,
            unknown: job.replayed.saturating_sub(counted.total()),
        })
    }
}

/// A blob with dead letters that could not be replayed.
#[derive(Debug, Serialize)]
pub struct UnreadableBlobBody {
    pub account: String,
    pub container: String,
    pub path: String,
    pub letters: u64,
    pub state: &'static str,
    pub reason: String,
}

/// The request of a replay as the archive stores it.
#[derive(Serialize, Deserialize)]
struct StoredReplayRequest {
    total: u64,
    #[serde(flatten)]
    meant: DeadLetterSelection,
}

impl ReplayBody {
    fn of(engine: &Engine, job: &ReplayJob) -> ReplayBody {
        let kept = read(job).unwrap_or_else(|_| StoredReplayRequest {
            total: job.replayed + job.failed,
            meant: DeadLetterSelection::default(),
        });
        ReplayBody {
            id: job.id,
            state: match job.state {
                ReplayState::Done if job.unreadable > 0 => "incomplete",
                ReplayState::Done => "done",
                ReplayState::Running if engine.is_under_way(job) => "running",
                // A replay that was running when the server was stopped is not under way either.
                ReplayState::Running | ReplayState::Cancelled => "cancelled",
            },
            created: job.created.to_string(),
            replayed: job.replayed,
            failed: job.failed,
            total: kept.total,
            unreadable: job.unreadable,
            unreadable_blobs: job.unreadable_blobs.iter().map(UnreadableBlobBody::of).collect(),
            request: kept.meant,
            pending: 0,
            due: None,
            outcome: ReplayOutcomeBody::of(engine, job),
        }
    }
}

impl UnreadableBlobBody {
    fn of(blob: &UnreadableBlob) -> UnreadableBlobBody {
        UnreadableBlobBody {
            account: blob.account.clone(),
            container: blob.container.clone(),
            path: blob.path.clone(),
            letters: blob.letters,
            state: fault_name(blob.fault),
            reason: blob.reason.clone(),
        }
    }
}

/// The request of a replay that another node has begun.
pub fn request(job: &ReplayJob) -> Option<ReplayRequest> {
    Some(read(job).ok()?.meant.request())
}

fn read(job: &ReplayJob) -> Result<StoredReplayRequest, serde_json::Error> {
    serde_json::from_str(&job.request)
}

/// All known replays, the newest first.
pub async fn list(engine: &Engine) -> Result<Vec<ReplayBody>, Problem> {
    let mut jobs = engine
        .dead_letters
        .archive
        .jobs()
        .await
        .map_err(store_unavailable)?;
    jobs.sort_by_key(|job| std::cmp::Reverse(job.id));
    Ok(jobs.iter().map(|job| ReplayBody::of(engine, job)).collect())
}

pub async fn get(engine: &Engine, id: &str) -> Result<ReplayBody, Problem> {
    let job = find(engine, id).await?;
    Ok(ReplayBody::of(engine, &job))
}

async fn find(engine: &Engine, id: &str) -> Result<ReplayJob, Problem> {
    let jobs = engine
        .dead_letters
        .archive
        .jobs()
        .await
        .map_err(store_unavailable)?;
    let found = number(id).and_then(|id: u64| jobs.into_iter().find(|job| job.id == id));
    found.ok_or_else(|| Problem::new(404, format!("replay {id:?} does not exist")))
}

pub enum ReplayStart {
    Counted(Value),
    UnderWay(Box<ReplayBody>),
}

pub async fn start(
    engine: &Arc<Engine>,
    peers: Option<&dyn Peers>,
    members: &Map<String, Value>,
) -> Result<ReplayStart, Problem> {
    let asked = SelectionRequest::read(members, engine.clock.now(), DeadLetterOperation::Replay)?;
    let meant = asked.meant(engine).await?;
    let total = engine
        .count_letters(&meant.filter())
        .await
        .map_err(store_unavailable)?;
    let left_out = match pending::excluded_pending(&meant) {
        Some(filter) => pending::count(engine, peers, &filter).await?,
        None => PendingDeadLetterSummary::default(),
    };
    if asked.dry_run {
        let mut counted = json!({"count": total});
        pending::show(&mut counted, &left_out);
        return Ok(ReplayStart::Counted(counted));
    }
    if let Some(path) = &meant.homeless {
        let detail = format!("subscription {path:?} is deleted: say to which other one its dead letters go");
        return Err(Problem::field("to", detail));
    }
    let request = meant.request();
    let kept = serde_json::to_string(&StoredReplayRequest { total, meant }).expect("names are strings");
    let started = engine
        .start_replay(None, request, kept)
        .await
        .map_err(store_unavailable)?;
    let job = started.map_err(refused)?;
    forget_old(engine).await.map_err(store_unavailable)?;
    Ok(ReplayStart::UnderWay(Box::new(ReplayBody {
        pending: left_out.count,
        due: left_out.due.map(|due| due.to_string()),
        ..ReplayBody::of(engine, &job)
    })))
}

fn refused(refusal: ReplayRefusal) -> Problem {
    let status = match refusal {
        ReplayRefusal::TooMany => 429,
        ReplayRefusal::UnderWay | ReplayRefusal::Ended => 409,
    };
    Problem::new(status, refusal.to_string())
}

async fn forget_old(engine: &Engine) -> Result<(), postrider_store::Error> {
    let archive = &engine.dead_letters.archive;
    let mut ended = archive.jobs().await?;
    ended.retain(|job| job.state == ReplayState::Done);
    ended.sort_by_key(|job| std::cmp::Reverse(job.id));
    for job in ended.iter().skip(ENDED_MAX) {
        archive.remove_job(job.id).await?;
    }
    Ok(())
}

/// Stops a replay and waits until it has stopped. A replay that has ended is left unchanged.
pub async fn cancel(engine: &Engine, wall: &dyn Clock, id: &str) -> Result<ReplayBody, Problem> {
    let job = find(engine, id).await?;
    if engine.stop_replay(&job).await.map_err(store_unavailable)? {
        let deadline = wall.now() + CANCEL_PATIENCE;
        while engine.is_under_way(&find(engine, id).await?) && wall.now() < deadline {
            wall.sleep_until(wall.now() + CANCEL_PAUSE).await;
        }
    }
    get(engine, id).await
}

/// Resumes a replay. The caller guarantees that nobody else resumes it at the same time.
pub async fn resume(engine: &Arc<Engine>, id: &str) -> Result<ReplayBody, Problem> {
    let known = find(engine, id).await?;
    // While the replay is under way, the progress that is read next might not be the last that it
    // writes.
    if engine.is_under_way(&known) {
        return Err(refused(ReplayRefusal::UnderWay));
    }
    let job = find(engine, id).await?;
    if job.state == ReplayState::Done {
        return Err(refused(ReplayRefusal::Ended));
    }
    let unreadable = |e| {
        Problem::new(
            409,
            format!("replay {id} was made by another version of the server: {e}"),
        )
    };
    let StoredReplayRequest { meant, .. } = read(&job).map_err(unreadable)?;
    let request = meant.request();
    let target = request.to.or(request.filter.subscription);
    let gone = |of: SubscriptionId| engine.directory.subscription_by_id(of).is_none();
    if target.is_some_and(gone) {
        let name = meant.to.or(meant.subscription).unwrap_or_default();
        return Err(Problem::new(
            409,
            format!("subscription {name:?} has been deleted meanwhile"),
        ));
    }
    let said = job.request.clone();
    let started = engine
        .start_replay(Some(job), request, said)
        .await
        .map_err(store_unavailable)?;
    Ok(ReplayBody::of(engine, &started.map_err(refused)?))
}
