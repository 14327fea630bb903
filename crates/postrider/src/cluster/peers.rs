//! The other nodes of the cluster, as the API asks them.

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use postrider_api::Server;
use postrider_api::listen;
use postrider_api::peers::{self, Gathered, Peers};
use postrider_jetstream::ask::{Answers, Asker};
use postrider_jetstream::members::{Membership, Standing};
use postrider_jetstream::{Cluster, NodeId};
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Time for a peer reply. A person is waiting for the answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Messages that wait for a subscriber; more are dropped.
const NEWS: usize = 64;
/// A node that is unknown this long after our start does not exist.
const KNOWN_BY: Duration = Duration::from_secs(60);
/// Pause before another try to delete what could not be deleted.
const LEFT_OVER_PAUSE: Duration = Duration::from_secs(5);

pub struct Others {
    asker: Arc<Asker>,
    name: String,
    id: String,
    began: Instant,
    hearing: TaskTracker,
}

impl Others {
    pub fn new(cluster: &Cluster) -> Arc<Others> {
        let node = cluster.members.node();
        Arc::new(Others {
            asker: cluster.asker.clone(),
            name: node.name.clone(),
            id: node.id.to_string(),
            began: Instant::now(),
            hearing: TaskTracker::new(),
        })
    }
}

/// Display name of a node, with its id if another node has the same name.
fn name_of(membership: &Membership, node: NodeId) -> String {
    let name = membership.name_of(node);
    let same = membership
        .nodes
        .iter()
        .any(|member| member.id != node && member.name == name);
    match same {
        true => format!("{name} ({node})"),
        false => name,
    }
}

#[async_trait]
impl Peers for Others {
    fn name(&self) -> &str {
        &self.name
    }

    fn id(&self) -> &str {
        &self.id
    }

    fn is_present(&self, id: &str) -> bool {
        let membership = self.asker.handle().membership();
        let known = membership.nodes.iter().find(|member| member.id.to_string() == id);
        match known.map(|member| member.standing) {
            Some(Standing::Live | Standing::Draining) => true,
            Some(Standing::Dead | Standing::Left) => false,
            None => self.began.elapsed() < KNOWN_BY,
        }
    }

    async fn ask(&self, question: &str, body: Bytes) -> Gathered {
        let asked = self.asker.ask(question, body, PATIENCE).await;
        let membership = self.asker.handle().membership();
        let name = |node: NodeId| name_of(&membership, node);
        // A dead node's records are missing as well: it cannot reply until it is back.
        let dead = membership
            .nodes
            .iter()
            .filter(|member| member.standing == Standing::Dead)
            .map(|member| member.id);
        let missing: BTreeSet<NodeId> = asked.missing.iter().copied().chain(dead).collect();
        let answered = asked.answers.iter().map(|(node, _)| *node);
        let answered: BTreeSet<NodeId> = answered.collect();
        Gathered {
            missing: missing.difference(&answered).map(|node| name(*node)).collect(),
            answers: asked
                .answers
                .into_iter()
                .map(|(node, answer)| (name(node), answer))
                .collect(),
        }
    }

    async fn ask_one(
        &self,
        id: &str,
        question: &str,
        body: Bytes,
        within: Duration,
    ) -> Result<Bytes, String> {
        let node = NodeId::parse(id).ok_or("no node has such a number")?;
        self.asker.ask_one(node, question, body, within).await
    }

    async fn tell(&self, what: &str, body: Bytes) {
        if let Err(e) = self.asker.tell(what, body).await {
            tracing::debug!(what, error = %e, "other nodes cannot be told");
        }
    }

    async fn hear(&self, what: &str) -> Option<mpsc::Receiver<Bytes>> {
        let heard = self.asker.hear(what).await.ok()?;
        let (news, received) = mpsc::channel(NEWS);
        self.hearing.spawn(async move {
            let mut heard = std::pin::pin!(heard);
            loop {
                let next = tokio::select! {
                    () = news.closed() => return,
                    next = heard.next() => next,
                };
                let Some(next) = next else { return };
                // A slow subscriber loses messages so that it does not hold up the others.
                let _ = news.try_send(next);
            }
        });
        Some(received)
    }
}

/// Replies to peer requests while the server exists.
struct Answering(Weak<Server>);

#[async_trait]
impl Answers for Answering {
    async fn answer(&self, question: &str, body: Bytes) -> Result<Bytes, String> {
        match self.0.upgrade() {
            Some(server) => peers::answer(&server, question, body).await,
            None => Err("the node is shutting down".into()),
        }
    }
}

/// Starts to reply to peer requests.
pub fn answer_with(cluster: &Cluster, server: &Arc<Server>) {
    let answering = Answering(Arc::downgrade(server));
    cluster.asker.answer_with(Arc::new(answering));
}

/// Deletes the subscriptions of listen sessions whose node is gone, until `stop`. Only the
/// coordinator does so.
pub async fn tend_listeners(cluster: Arc<Cluster>, server: Arc<Server>, stop: CancellationToken) {
    let mut changes = cluster.members.changes();
    let mut steward = cluster.members.steward();
    let mut seen = (BTreeSet::new(), false);
    loop {
        let present = changes
            .borrow_and_update()
            .present()
            .map(|member| member.id)
            .collect();
        let now = (present, *steward.borrow_and_update());
        if now.1 && now != seen {
            let all = tokio::select! {
                () = stop.cancelled() => return,
                all = listen::delete_left_over(&server) => all,
            };
            if !all {
                if server.engine.nap(LEFT_OVER_PAUSE).await {
                    return;
                }
                continue;
            }
        }
        seen = now;
        let more = tokio::select! {
            () = stop.cancelled() => return,
            more = changes.changed() => more,
            more = steward.changed() => more,
        };
        if more.is_err() {
            return;
        }
    }
}
