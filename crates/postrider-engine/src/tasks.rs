//! The engine's tasks, counted by kind: a stop that takes too long names those that have not ended.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

/// The kinds of tasks that the engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskKind {
    DeliveryLane,
    LateAnswer,
    RetryTimer,
    ProbationSaver,
    FailureReport,
    CatalogChange,
    CatalogFollower,
    ExpiryTimer,
    SubscriptionRestore,
    SubscriptionRemoval,
    WebhookValidation,
    DeletionNotice,
    DeadLetterTimer,
    DeadLetterWriter,
    BlobAnnouncement,
    Replay,
    ReplaySupervisor,
}

impl TaskKind {
    const ALL: [(TaskKind, &'static str); 17] = [
        (TaskKind::DeliveryLane, "delivery lane"),
        (TaskKind::LateAnswer, "late answer"),
        (TaskKind::RetryTimer, "retry timer"),
        (TaskKind::ProbationSaver, "probation saver"),
        (TaskKind::FailureReport, "failure report"),
        (TaskKind::CatalogChange, "catalog change"),
        (TaskKind::CatalogFollower, "catalog follower"),
        (TaskKind::ExpiryTimer, "expiry timer"),
        (TaskKind::SubscriptionRestore, "subscription restore"),
        (TaskKind::SubscriptionRemoval, "subscription removal"),
        (TaskKind::WebhookValidation, "webhook validation"),
        (TaskKind::DeletionNotice, "deletion notice"),
        (TaskKind::DeadLetterTimer, "dead-letter timer"),
        (TaskKind::DeadLetterWriter, "dead-letter writer"),
        (TaskKind::BlobAnnouncement, "blob announcement"),
        (TaskKind::Replay, "replay"),
        (TaskKind::ReplaySupervisor, "replay supervisor"),
    ];
}

#[derive(Default)]
pub struct TaskRegistry {
    tracker: TaskTracker,
    running: Arc<[AtomicUsize; TaskKind::ALL.len()]>,
}

impl TaskRegistry {
    pub fn spawn<F>(&self, kind: TaskKind, task: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        let counted = RunningTask::new(self.running.clone(), kind);
        self.tracker.spawn(async move {
            let _counted = counted;
            task.await
        })
    }

    /// After this, [`TaskRegistry::wait`] returns once no task runs; further tasks may still be
    /// spawned until then.
    pub fn close(&self) {
        self.tracker.close();
    }

    pub async fn wait(&self) {
        self.tracker.wait().await;
    }

    /// How many tasks of a kind run.
    pub fn running(&self, kind: TaskKind) -> usize {
        self.running[kind as usize].load(Acquire)
    }

    /// The kinds of tasks that run, with their numbers, for people: `3 × delivery lane, 1 × replay`.
    pub fn describe_running(&self) -> String {
        let counts = TaskKind::ALL
            .iter()
            .map(|(kind, name)| (self.running(*kind), *name));
        let named: Vec<String> = counts
            .filter(|(count, _)| *count > 0)
            .map(|(count, name)| format!("{count} × {name}"))
            .collect();
        named.join(", ")
    }
}

struct RunningTask {
    running: Arc<[AtomicUsize; TaskKind::ALL.len()]>,
    kind: TaskKind,
}

impl RunningTask {
    fn new(running: Arc<[AtomicUsize; TaskKind::ALL.len()]>, kind: TaskKind) -> RunningTask {
        running[kind as usize].fetch_add(1, AcqRel);
        RunningTask { running, kind }
    }
}

impl Drop for RunningTask {
    fn drop(&mut self) {
        self.running[self.kind as usize].fetch_sub(1, AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_own_counter() {
        for (place, (kind, _)) in TaskKind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, place);
        }
    }

    #[tokio::test]
    async fn running_tasks_are_named_and_ended_ones_are_not() {
        let tasks = TaskRegistry::default();
        let forever = tasks.spawn(TaskKind::Replay, std::future::pending::<()>());
        let ended = tasks.spawn(TaskKind::DeliveryLane, async {});
        ended.await.unwrap();
        assert_eq!(tasks.describe_running(), "1 × replay");
        forever.abort();
        tasks.close();
        tasks.wait().await;
        assert_eq!(tasks.describe_running(), "");
    }
}
