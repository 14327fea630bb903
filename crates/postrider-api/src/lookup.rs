//! Looks up topics and subscriptions by the names and ids that queries of our own API use.

use crate::Server;
use crate::handshakes::by_resource_id;
use crate::own_api::Problem;
use postrider_core::subscription::{Subscription, TopicKind};
use postrider_engine::directory::TopicEntry;
use postrider_wire::arm::topic_id;
use std::sync::Arc;

/// A topic, domain or system topic by its name, or the topic with this resource id.
pub(crate) fn topic(server: &Server, said: &str) -> Result<Arc<TopicEntry>, Problem> {
    let found = match said.starts_with('/') {
        true => by_id(server, said),
        false => by_name(server, said),
    };
    found.ok_or_else(|| missing("topic", said))
}

pub(crate) fn missing(field: &'static str, said: &str) -> Problem {
    Problem {
        field: Some(field),
        ..Problem::new(404, format!("{field}: {said:?} does not exist"))
    }
}

fn by_name(server: &Server, name: &str) -> Option<Arc<TopicEntry>> {
    let directory = &server.engine.directory;
    let system = || {
        let mut all = directory.system_topics().into_iter();
        all.find(|entry| entry.topic.name.eq_ignore_ascii_case(name))
    };
    directory
        .topic(name)
        .or_else(|| directory.domain(name))
        .or_else(system)
}

fn by_id(server: &Server, id: &str) -> Option<Arc<TopicEntry>> {
    let id = id.trim_end_matches('/');
    let directory = &server.engine.directory;
    let last = id.rsplit('/').next().unwrap_or_default();
    let named = directory.topic(last).into_iter().chain(directory.domain(last));
    let mut all = named.chain(directory.system_topics());
    all.find(|entry| self::id(server, entry).eq_ignore_ascii_case(id))
        .or_else(|| directory.scope_by_source(id))
}

/// The resource id of a topic.
pub(crate) fn id(server: &Server, entry: &TopicEntry) -> String {
    match &entry.topic.kind {
        TopicKind::Scope { source, .. } => source.clone(),
        _ => topic_id(&server.config.account, &entry.topic),
    }
}

/// A subscription by its resource id, its name, or `topic/name`.
pub(crate) fn subscription(
    server: &Server,
    field: &'static str,
    said: &str,
) -> Result<Arc<Subscription>, Problem> {
    let missing = || missing(field, said);
    if said.starts_with('/') {
        return by_resource_id(server, said).ok_or_else(missing);
    }
    let (of, name) = match said.rsplit_once('/') {
        Some((of, name)) => (Some(of), name),
        None => (None, said),
    };
    let directory = &server.engine.directory;
    let path = |subscription: &Subscription| {
        let entry = directory.topic_by_id(subscription.topic)?;
        Some(match &subscription.domain_topic {
            Some(inside) => format!("{}/{inside}", entry.topic.name),
            None => entry.topic.name.clone(),
        })
    };
    let mut found = directory.all_subscriptions();
    found.retain(|one| {
        one.name.eq_ignore_ascii_case(name)
            && of.is_none_or(|of| path(one).is_some_and(|path| path.eq_ignore_ascii_case(of)))
    });
    if found.len() > 1 {
        let reason = format!(
            "{said:?} may mean {} subscriptions: give a resource id",
            found.len()
        );
        return Err(Problem::field(field, reason));
    }
    found.pop().ok_or_else(missing)
}
