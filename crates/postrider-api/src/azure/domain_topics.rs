//! Topics inside domains.

use super::lists::{self, ListItem, ListPosition, ListRequest};
use super::topics::{self, view};
use super::{
    ArmContext, Result, check_preconditions, empty_answer, etag, json_answer, not_allowed, operations,
    put_etag, unavailable,
};
use crate::Server;
use crate::declare::{self, TopicResourceKind};
use crate::http::ApiCall;
use hyper::{Method, StatusCode};
use postrider_core::subscription::DomainTopic;
use postrider_engine::directory::TopicEntry;
use postrider_wire::arm::{ArmError, EventGridId, domain_topic_body};
use postrider_wire::resources::validate::check_name;
use std::sync::Arc;

pub(super) async fn answer(
    server: &Arc<Server>,
    call: &mut ApiCall,
    domain: &EventGridId,
    name: &str,
    rest: &[&str],
    context: &ArmContext,
) -> Result {
    if !rest.is_empty() {
        return Err(super::nothing_here(call));
    }
    match call.method {
        Method::GET | Method::HEAD => {
            let entry = topics::find(server, TopicResourceKind::Domain, domain)?;
            let Some(topic) = server.engine.directory.domain_topic(entry.topic.id, name) else {
                let kind = format!("Microsoft.EventGrid/domains/{}/topics", domain.name);
                return Err(ArmError::not_found(&kind, name, &domain.group));
            };
            Ok(shown(
                server,
                call,
                &entry,
                &topic,
                context,
                StatusCode::OK,
                "Succeeded",
            ))
        }
        Method::PUT => put(server, call, domain, name, context).await,
        Method::DELETE => delete(server, call, domain, name, context).await,
        _ => Err(not_allowed(call, "GET, PUT, DELETE")),
    }
}

fn shown(
    server: &Server,
    call: &ApiCall,
    domain: &TopicEntry,
    topic: &DomainTopic,
    context: &ArmContext,
    status: StatusCode,
    state: &str,
) -> crate::http::Answer {
    let body = domain_topic_body(&domain.topic, topic, &view(server, context, state));
    let mut answer = json_answer(call, status, &body);
    put_etag(&mut answer, &etag(server, topic));
    answer
}

/// Makes a domain topic. Clients send no body; one that is sent is ignored.
async fn put(
    server: &Arc<Server>,
    call: &ApiCall,
    domain: &EventGridId,
    name: &str,
    context: &ArmContext,
) -> Result {
    check_name(name)?;
    let entry = topics::find(server, TopicResourceKind::Domain, domain)?;
    let known = server.engine.directory.domain_topic(entry.topic.id, name);
    check_preconditions(call, known.as_ref().map(|topic| etag(server, topic)).as_deref())?;
    let _place = match &known {
        Some(_) => None,
        None => Some(declare::reserve_domain_topic_quota(server, &entry.topic).map_err(topics::over_quota)?),
    };
    let made = server.engine.put_domain_topic(entry.topic.id, name).await;
    let made = made.map_err(|e| match e {
        // The domain was deleted during the await.
        postrider_engine::Error::Gone => topics::find(server, TopicResourceKind::Domain, domain)
            .err()
            .unwrap_or_else(|| unavailable(&e)),
        e => unavailable(&e),
    })?;
    let state = if known.is_some() { "Updating" } else { "Creating" };
    let mut answer = shown(server, call, &entry, &made, context, StatusCode::CREATED, state);
    let (operation, _) = operations::finished(server, context, Some(&entry.topic.location));
    operations::announce(&mut answer, &operation);
    Ok(answer)
}

async fn delete(
    server: &Arc<Server>,
    call: &ApiCall,
    domain: &EventGridId,
    name: &str,
    context: &ArmContext,
) -> Result {
    let Ok(entry) = topics::find(server, TopicResourceKind::Domain, domain) else {
        return Ok(empty_answer(call, StatusCode::NO_CONTENT));
    };
    let known = server.engine.directory.domain_topic(entry.topic.id, name);
    if known.is_some() {
        check_preconditions(call, known.as_ref().map(|topic| etag(server, topic)).as_deref())?;
    }
    let deleted = server.engine.delete_domain_topic(entry.topic.id, name).await;
    match deleted.map_err(|e| unavailable(&e))? {
        true => Ok(operations::accepted(
            server,
            call,
            context,
            Some(&entry.topic.location),
        )),
        false => Ok(empty_answer(call, StatusCode::NO_CONTENT)),
    }
}

pub(super) fn list(server: &Server, call: &ApiCall, domain: &EventGridId, context: &ArmContext) -> Result {
    if call.method != Method::GET {
        return Err(not_allowed(call, "GET"));
    }
    let entry = topics::find(server, TopicResourceKind::Domain, domain)?;
    let asked = ListRequest::read(call)?;
    let limit = if asked.filter.is_none() {
        asked.top + 1
    } else {
        usize::MAX
    };
    let directory = &server.engine.directory;
    let after = asked
        .after
        .as_ref()
        .map(|last| (last.created, last.rank.as_str()));
    let found = directory.domain_topics_after(entry.topic.id, after, limit);
    let items = found.into_iter().map(|topic| ListItem {
        position: ListPosition {
            created: topic.created,
            rank: topic.name.to_lowercase(),
        },
        name: topic.name.clone(),
        of: topic,
    });
    Ok(lists::page(call, context, &asked, items, |topic| {
        domain_topic_body(&entry.topic, topic, &view(server, context, "Succeeded"))
    }))
}
