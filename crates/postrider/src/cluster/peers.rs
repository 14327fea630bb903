//! The other nodes of the cluster, as the API asks them.

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use postrider_api::Server;
use postrider_api::listen;
use postrider_api::peers::{self, Peers, RawPeerReplies};
use postrider_jetstream::membership::{Membership, NodeStatus};
use postrider_jetstream::peer_requests::{PeerMessenger, PeerRequestHandler};
use postrider_jetstream::{JetStreamCluster, NodeId};
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

pub struct ClusterPeers {
    asker: Arc<PeerMessenger>,
    name: String,
    id: String,
    began: Instant,
    hearing: TaskTracker,
}

impl ClusterPeers {
    pub fn new(cluster: &JetStreamCluster) -> Arc<ClusterPeers> {
        let node = cluster.members.node();
        Arc::new(ClusterPeers {
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
impl Peers for ClusterPeers {
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
            Some(NodeStatus::Live | NodeStatus::Draining) => true,
            Some(NodeStatus::Dead | NodeStatus::Left) => false,
            None => self.began.elapsed() < KNOWN_BY,
        }
    }

    async fn ask(&self, question: &str, body: Bytes) -> RawPeerReplies {
        let asked = self.asker.request_all(question, body, PATIENCE).await;
        let membership = self.asker.handle().membership();
        let name = |node: NodeId| name_of(&membership, node);
        // A dead node's records are missing as well: it cannot reply until it is back.
        let dead = membership
            .nodes
            .iter()
            .filter(|member| member.standing == NodeStatus::Dead)
            .map(|member| member.id);
        let missing: BTreeSet<NodeId> = asked.missing.iter().copied().chain(dead).collect();
        let answered = asked.answers.iter().map(|(node, _)| *node);
        let answered: BTreeSet<NodeId> = answered.collect();
        RawPeerReplies {
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
        self.asker.request_one(node, question, body, within).await
    }

    async fn tell(&self, what: &str, body: Bytes) {
        if let Err(e) = self.asker.broadcast(what, body).await {
            tracing::debug!(what, error = %e, "other nodes cannot be told");
        }
    }

    async fn hear(&self, what: &str) -> Option<mpsc::Receiver<Bytes>> {
        let heard = self.asker.subscribe_broadcast(what).await.ok()?;
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
struct PeerReplier(Weak<Server>);

#[async_trait]
impl PeerRequestHandler for PeerReplier {
    async fn answer(&self, question: &str, body: Bytes) -> Result<Bytes, String> {
        match self.0.upgrade() {
            Some(server) => peers::answer(&server, question, body).await,
            None => Err("the node is shutting down".into()),
        }
    }
}

/// Starts to reply to peer requests.
pub fn serve_peer_requests(cluster: &JetStreamCluster, server: &Arc<Server>) {
    let answering = PeerReplier(Arc::downgrade(server));
    cluster.asker.set_handler(Arc::new(answering));
}

/// Deletes the subscriptions of listen sessions whose node is gone, until `stop`. Only the
/// coordinator does so.
pub async fn delete_orphaned_listen_sessions(
    cluster: Arc<JetStreamCluster>,
    server: Arc<Server>,
    stop: CancellationToken,
) {
    let mut changes = cluster.members.changes();
    let mut steward = cluster.members.coordinator();
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
                all = listen::delete_orphaned_subscriptions(&server) => all,
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
