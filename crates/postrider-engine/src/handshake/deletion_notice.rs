//! Notifies webhooks that their subscription was deleted: once, on a best-effort basis.

use super::validation_request;
use crate::Engine;
use crate::attempt::fixed_headers;
use crate::counters::add;
use crate::deliver::{DeliveryReply, DeliveryRequest};
use crate::directory::TopicEntry;
use crate::tasks::TaskKind;
use http::Method;
use http::header::HeaderValue;
use postrider_core::event::EventSchema;
use postrider_core::subscription::{ResourceOrigin, Subscription, TopicKind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::Semaphore;

/// Notices in progress. Beyond this none is sent: a topic with a thousand subscriptions may be
/// deleted.
const NOTICES_MAX: usize = 1_000;

pub(super) struct DeletionNotices {
    room: Arc<Semaphore>,
    failed: AtomicU64,
}

impl Default for DeletionNotices {
    fn default() -> DeletionNotices {
        DeletionNotices {
            room: Arc::new(Semaphore::new(NOTICES_MAX)),
            failed: AtomicU64::new(0),
        }
    }
}

impl DeletionNotices {
    pub(super) fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }
}

impl Engine {
    /// Notifies the webhook of a deleted subscription. Returns at once; nothing waits for the
    /// notice, and its failure has no effect.
    pub(crate) fn notify_subscription_deleted(
        &self,
        subscription: &Subscription,
        topic: Option<&TopicEntry>,
    ) {
        let Some(topic) = topic else {
            return;
        };
        let cloud = subscription.origin == ResourceOrigin::Azure;
        if !cloud || !self.needs_handshake(&subscription.destination) || self.is_stopping() {
            return;
        }
        let notices = &self.handshakes.notices;
        let Some(request) = self.notice(subscription, topic) else {
            return;
        };
        let Ok(room) = notices.room.clone().try_acquire_owned() else {
            add(&notices.failed, 1);
            tracing::debug!(subscription = %subscription.name, "too many deletion notices under way");
            return;
        };
        let name = subscription.name.clone();
        let handshakes = self.handshakes.clone();
        let (clock, stop) = (self.clock.clone(), self.dispatcher.stop.clone());
        self.dispatcher.tasks.spawn(TaskKind::DeletionNotice, async move {
            let _room = room;
            let deadline = clock.now() + handshakes.rules.response_timeout;
            let why = tokio::select! {
                biased;
                () = stop.cancelled() => "the server is shutting down".to_owned(),
                reply = handshakes.transport.clone().send(request) => match reply {
                    DeliveryReply::Answered(answer) if (200..300).contains(&answer.status) => return,
                    DeliveryReply::Answered(answer) => format!("status {}", answer.status),
                    DeliveryReply::Failed(failure) => failure.detail,
                },
                () = clock.sleep_until(deadline) => "no answer in time".to_owned(),
            };
            add(&handshakes.notices.failed, 1);
            tracing::debug!(subscription = %name, why, "deletion notice not delivered");
        });
    }

    fn notice(&self, subscription: &Subscription, topic: &TopicEntry) -> Option<DeliveryRequest> {
        let url = validation_request::web_hook_url(subscription)?;
        let cloud = subscription.delivery_schema == EventSchema::CloudEvent;
        let (mut headers, _) = fixed_headers(subscription, subscription.delivery_schema, !cloud);
        headers.insert(
            validation_request::EVENT_TYPE,
            HeaderValue::from_static("SubscriptionDeletion"),
        );
        headers.insert(validation_request::DELIVERY_COUNT, HeaderValue::from_static("0"));
        let id = self.handshakes.rules.guid();
        let of = resource_id(subscription, topic, self.directory.prefix());
        let data = [("eventSubscriptionId", of.as_str())];
        let kind = "Microsoft.EventGrid.SubscriptionDeletedEvent";
        let now = self.clock.now();
        let body = if cloud {
            validation_request::cloud_event(&id, &topic.full_id, kind, now, &data)
        } else {
            headers.insert(validation_request::DATA_VERSION, HeaderValue::from_static("1"));
            validation_request::event_grid_event(&id, &topic.full_id, kind, now, &data)
        };
        Some(DeliveryRequest {
            method: Method::POST,
            url,
            headers: Arc::new(headers),
            more: Vec::new(),
            body: body.into(),
            guard: None,
        })
    }
}

/// The resource id of a subscription as events spell it.
fn resource_id(subscription: &Subscription, topic: &TopicEntry, prefix: &str) -> String {
    let name = &subscription.name;
    if let TopicKind::System { .. } = topic.topic.kind {
        let (group, of) = (&topic.topic.resource_group, &topic.topic.name);
        let provider = "providers/Microsoft.EventGrid";
        return format!(
            "{prefix}/resourceGroups/{group}/{provider}/systemTopics/{of}/eventSubscriptions/{name}"
        );
    }
    let inside = subscription.domain_topic.as_ref();
    let inside = inside.map_or(String::new(), |name| format!("/topics/{name}"));
    format!(
        "{}{inside}/providers/Microsoft.EventGrid/eventSubscriptions/{name}",
        topic.full_id
    )
}
