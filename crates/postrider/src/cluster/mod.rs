//! The server as a node of a cluster: joining, sharing secrets, and cleaning up after nodes that
//! are gone.

pub mod peers;
pub mod view;

use crate::config::{Config, StoreKind};
use crate::{credentials, secrets};
use anyhow::{Context, Result, bail};
use postrider_core::ids::Secret;
use postrider_core::time::Clock;
use postrider_engine::Engine;
use postrider_engine::clock::SystemClock;
use postrider_engine::node::{self, SendingTurn};
use postrider_jetstream::connection::without_secrets;
use postrider_jetstream::{JetStreamCluster, JetStreamSettings, Membership, NodeId, NodeInfo};
use postrider_store::Catalog;
use postrider_store::seal::Keyring;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// File with the node's id.
const NODE_ID: &str = "node-id";
/// Longest wait for partitions after the start. A node gets them within milliseconds, unless other
/// nodes own them or something delays it for longer anyway.
const SETTLE_PATIENCE: Duration = Duration::from_secs(2);
const SETTLE_LOOK: Duration = Duration::from_millis(5);

/// Connection and layout of the JetStream store; `None` with the embedded store.
pub fn settings(config: &Config) -> Option<JetStreamSettings> {
    let clustered = config.store.kind == StoreKind::Jetstream;
    clustered.then(|| config.store.jetstream.settings())
}

/// Joins the cluster. `url` is the address at which this node is reachable.
pub async fn join(
    config: &Config,
    mut settings: JetStreamSettings,
    url: String,
) -> Result<Arc<JetStreamCluster>> {
    settings.keys = secrets::configured(config)?.map(Arc::new);
    let id = own_id(&config.data_dir)?;
    let node = NodeInfo {
        id,
        process: crate::serve::random(),
        name: name(config, id),
        url,
        version: env!("CARGO_PKG_VERSION").into(),
        started: SystemClock.now(),
    };
    let shown = settings.urls.iter().map(|url| without_secrets(url));
    let urls = shown.collect::<Vec<_>>().join(", ");
    let cluster = JetStreamCluster::open(settings, node).await;
    let cluster = cluster.with_context(|| format!("joining the cluster at {urls}"))?;
    Ok(Arc::new(cluster))
}

/// The node's id, created at its first start.
fn own_id(data_dir: &Path) -> Result<NodeId> {
    let path = data_dir.join(NODE_ID);
    match credentials::read_if_there(&path)? {
        Some(text) => match NodeId::parse(text.trim()) {
            Some(id) => Ok(id),
            None => bail!(
                "{} does not hold the number of a node: put it back, or remove it to join as a new node",
                path.display()
            ),
        },
        None => {
            let id = NodeId(crate::serve::random());
            credentials::write_private(&path, &format!("{id}\n"))?;
            Ok(id)
        }
    }
}

/// Display name of the node: as configured, or the machine's name with a part of the id, since
/// several nodes may run on one machine.
fn name(config: &Config, id: NodeId) -> String {
    let configured = config.store.jetstream.node_name.clone();
    configured.unwrap_or_else(|| {
        let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let machine: String = machine.chars().filter(plain).take(48).collect();
        let short = &id.to_string()[..4];
        match machine.is_empty() {
            true => format!("node-{short}"),
            false => format!("{machine}-{short}"),
        }
    })
}

/// Makes the cluster's secrets those of this node, so that any node takes the tokens, keys and
/// certificates of any other. The first node provides its own secrets. Returns whether a file has
/// changed.
pub async fn share_secrets(cluster: &JetStreamCluster, config: &Config, keys: &Keyring) -> Result<bool> {
    let mut changed = false;
    for shared in credentials::shared(config) {
        let own = shared.read(keys)?;
        let agreed = cluster.secret(shared.name, || Secret::new(own.clone())).await;
        let agreed = agreed.with_context(|| format!("sharing the secret {:?}", shared.name))?;
        if agreed.expose() != own {
            shared.write(agreed.expose(), keys)?;
            changed = true;
        }
    }
    Ok(changed)
}

/// The node as the engine sees it, and the sender of its share of the work.
pub fn node(cluster: &JetStreamCluster) -> (node::NodeIdentity, watch::Sender<SendingTurn>) {
    let me = cluster.members.node().id;
    let (share, sharing) = watch::channel(sharing(me, &cluster.members.membership()));
    let node = node::NodeIdentity {
        name: Some(me.to_string().into()),
        coordinator: cluster.members.coordinator(),
        sharing,
    };
    (node, share)
}

/// This node's index among the nodes that deliver. A node that is about to own partitions counts
/// itself.
fn sharing(me: NodeId, membership: &Membership) -> SendingTurn {
    let mut all: BTreeSet<NodeId> = membership.owners().collect();
    all.insert(me);
    SendingTurn::new(all.range(..me).count(), all.len())
}

/// Takes up work that other nodes leave behind, until `stop`.
pub async fn run_membership_tasks(
    cluster: Arc<JetStreamCluster>,
    engine: Arc<Engine>,
    share: watch::Sender<SendingTurn>,
    stop: CancellationToken,
) {
    let me = cluster.members.node().id;
    let mut changes = cluster.members.changes();
    let mut steward = cluster.members.coordinator();
    let mut swept: BTreeMap<u8, u64> = BTreeMap::new();
    loop {
        let membership = changes.borrow_and_update().clone();
        let is_steward = *steward.borrow_and_update();
        let now = sharing(me, &membership);
        share.send_if_modified(|known| std::mem::replace(known, now) != now);
        tokio::select! {
            () = stop.cancelled() => return,
            () = take_up_orphaned_work(&cluster, &engine, &membership, is_steward, &mut swept) => {}
        }
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

/// Failures are retried at the next membership change; every heartbeat is one.
async fn take_up_orphaned_work(
    cluster: &JetStreamCluster,
    engine: &Arc<Engine>,
    membership: &Membership,
    is_steward: bool,
    swept: &mut BTreeMap<u8, u64>,
) {
    if let Err(e) = sweep(cluster, engine, swept).await {
        tracing::debug!(error = %e, "what deleted subscriptions left cannot be looked for");
    }
    if is_steward {
        let present: BTreeSet<String> = membership.present().map(|member| member.id.to_string()).collect();
        let gone = |by: Option<&str>| by.is_none_or(|by| !present.contains(by));
        if let Err(e) = engine.take_over_handshakes(gone).await {
            tracing::warn!(error = %e, "handshakes of a node that has gone cannot be taken up");
        }
    }
}

/// Ends the deliveries of subscriptions that were deleted while nobody served a partition.
async fn sweep(
    cluster: &JetStreamCluster,
    engine: &Engine,
    swept: &mut BTreeMap<u8, u64>,
) -> Result<(), postrider_engine::Error> {
    let served: BTreeMap<u8, u64> = cluster
        .log
        .partitions()
        .iter()
        .map(|one| (one.number(), one.epoch()))
        .collect();
    if served
        .iter()
        .all(|(number, epoch)| swept.get(number) == Some(epoch))
    {
        *swept = served;
        return Ok(());
    }
    // A subscription that is unknown here may be new rather than deleted, so the catalog catches up
    // first.
    let exists = |id| engine.directory.subscription_by_id(id).is_some();
    let mut strays = cluster.log.unknown_subscriptions(exists);
    let head = cluster.catalog.head().await?;
    cluster.catalog.applied(head).await?;
    strays.retain(|id| !exists(*id));
    engine.retire_unknown_subscriptions(strays).await?;
    *swept = served;
    Ok(())
}

/// Waits briefly until some node accepts events, so that the first publish requests are not
/// refused. The node serves requests even when that takes longer.
pub async fn wait_until_accepting(cluster: &JetStreamCluster, clock: &dyn Clock) {
    let me = cluster.members.node().id;
    let others = || cluster.members.membership().owners().any(|owner| owner != me);
    let until = clock.now() + SETTLE_PATIENCE;
    let takes_in = || cluster.catalog.is_current() && (cluster.log.accepts_events() || others());
    while !takes_in() && clock.now() < until {
        clock.sleep_until(clock.now() + SETTLE_LOOK).await;
    }
}

/// Address of this node for the others: as configured, or that of its listener.
pub fn url(
    config: &Config,
    http: Option<std::net::SocketAddr>,
    https: Option<std::net::SocketAddr>,
) -> String {
    let configured = config.listen.public_url.clone();
    let listening = || {
        https
            .map(|at| format!("https://{at}"))
            .or(http.map(|at| format!("http://{at}")))
    };
    configured.or_else(listening).unwrap_or_default()
}

/// Refuses a test clock in a cluster.
pub fn check_clock(test_clock: bool) -> Result<()> {
    if test_clock {
        bail!("--test-clock: a clock that a test moves belongs to one server; use store.kind = \"embedded\"");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_keeps_its_number() {
        let directory = tempfile::tempdir().unwrap();
        let id = own_id(directory.path()).unwrap();
        assert_eq!(own_id(directory.path()).unwrap(), id);
        std::fs::write(directory.path().join(NODE_ID), "12").unwrap();
        let refused = own_id(directory.path()).unwrap_err().to_string();
        assert!(refused.contains("node-id"), "{refused}");
    }

    #[test]
    fn a_node_has_a_name_of_its_own() {
        let mut config = Config::default();
        let of = |config: &Config, id| name(config, NodeId(id));
        assert_ne!(of(&config, 1 << 60), of(&config, 2 << 60));
        config.store.jetstream.node_name = Some("a".into());
        assert_eq!(of(&config, 1 << 60), "a");
    }
}
