//! Handshakes: asking webhooks whether they want the events of a subscription, before it is in
//! force.
//!
//! Each handshake has a task of its own, and only that task ends it. A visit to the callback, a
//! cancellation and a newer handshake for the same subscription are signalled to the task, and the
//! signaller waits until the task has acted.

mod deletion_notice;
mod request_slots;
mod validation_request;
mod handshake_task;

use crate::deliver::DeliveryTransport;
use crate::manage::SubscriptionRead;
use crate::tasks::TaskKind;
use crate::unless_done;
use crate::{Engine, Error};
use postrider_core::handshake::{ValidationRetries, supports_manual_validation};
use postrider_core::ids::{Secret, TopicId};
use postrider_core::subscription::{Destination, Subscription};
use postrider_core::time::{Clock, Timestamp};
use postrider_store::{Catalog, CatalogChange, Handshake, HandshakeState};
use request_slots::{HandshakeOwner, HandshakeSlots};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Handshakes in progress, those that wait for a visit included. Beyond this no more are begun.
const UNDER_WAY_MAX: usize = 20_000;
/// The part of them that one caller may have.
const UNDER_WAY_PER_CALLER_MAX: usize = 2_000;
/// Failed handshakes that are kept, and for how long.
const FAILED_MAX: usize = 1_000;
const FAILED_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// Successful or cancelled handshakes that are remembered until a restart.
const ENDED_MAX: usize = 1_000;
/// How early a visit may come before the answer of the webhook that made it, in real time.
const OVERTAKING: Duration = Duration::from_secs(1);
/// How long a visitor waits for the subscription to be in force, in real time.
const IN_FORCE_WITHIN: Duration = Duration::from_secs(20);

/// The settings of handshakes.
#[derive(Clone)]
pub struct HandshakeRules {
    /// If false, subscriptions are in force at once, and webhooks are not notified of their
    /// deletion.
    pub enabled: bool,
    /// The origin that requests name.
    pub origin: String,
    /// The requests per minute that are asked for.
    pub rate: u32,
    pub patience: ValidationRetries,
    pub response_timeout: Duration,
    /// The source of codes, tokens and ids. Must be unpredictable.
    pub guids: Arc<dyn Fn() -> Uuid + Send + Sync>,
    /// The source of operation names: guids in lower case.
    pub operations: Arc<dyn Fn() -> String + Send + Sync>,
}

impl Default for HandshakeRules {
    fn default() -> HandshakeRules {
        HandshakeRules {
            enabled: true,
            origin: "eventgrid.azure.net".into(),
            rate: 60_000,
            patience: ValidationRetries {
                tries: 3,
                pause: Duration::from_secs(5),
            },
            response_timeout: Duration::from_secs(30),
            guids: Arc::new(Uuid::new_v4),
            operations: Arc::new(|| Uuid::new_v4().to_string()),
        }
    }
}

impl HandshakeRules {
    fn guid(&self) -> String {
        (self.guids)().to_string()
    }
}

/// The state of an operation that creates or changes a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperationState {
    InProgress,
    Succeeded,
    Failed { code: &'static str, message: String },
    Canceled,
}

/// A handshake and its state, for reports.
#[derive(Clone, Debug, PartialEq)]
pub struct HandshakeReport {
    pub handshake: Arc<Handshake>,
    /// How the handshake ended, unless it failed or is in progress.
    pub ended: Option<(Timestamp, HandshakeEnd)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeEnd {
    Granted,
    Cancelled,
}

/// Why a visit to the callback changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfirmationRefusal {
    /// A visitor without the right token learns nothing more.
    #[error("there is no such validation, or the token is not the one that was sent")]
    Unknown,
    #[error("the endpoint has not answered the validation request yet: answer it first, then visit this URL")]
    TooEarly,
    #[error("the subscription has been validated already")]
    Already,
    #[error("this validation was cancelled: the subscription was changed or deleted meanwhile")]
    Cancelled,
    #[error("this validation has failed: {0}")]
    Failed(String),
    #[error("the server cannot put the subscription in force now, try again shortly")]
    Unavailable,
}

/// The identity of a subscription by name: its topic, its domain topic and its name, in lower case.
type SubscriptionNameKey = (TopicId, Option<String>, String);

fn key(topic: TopicId, domain_topic: Option<&str>, name: &str) -> SubscriptionNameKey {
    (topic, domain_topic.map(str::to_lowercase), name.to_lowercase())
}

fn key_of(subscription: &Subscription) -> SubscriptionNameKey {
    key(
        subscription.topic,
        subscription.domain_topic.as_deref(),
        &subscription.name,
    )
}

/// The signals to the task of a handshake.
struct HandshakeSignals {
    /// The caller and topic that the request is charged to.
    owner: HandshakeOwner,
    cancelled: CancellationToken,
    /// Whether another handshake for the same subscription follows at once.
    superseded: AtomicBool,
    /// Cancelled once a visitor with the right token has come to the callback.
    confirmed: CancellationToken,
    /// Notified when the webhook has answered, or is asked again.
    moved: Notify,
    /// Cancelled once the task has ended.
    over: CancellationToken,
    /// Whether another node asks: then there is no task here.
    elsewhere: AtomicBool,
    /// Whether the end of the handshake is already stored, or belongs to another node by now.
    settled: AtomicBool,
}

impl HandshakeSignals {
    fn new(owner: HandshakeOwner) -> HandshakeSignals {
        HandshakeSignals {
            owner,
            cancelled: CancellationToken::new(),
            superseded: AtomicBool::new(false),
            confirmed: CancellationToken::new(),
            moved: Notify::new(),
            over: CancellationToken::new(),
            elsewhere: AtomicBool::new(false),
            settled: AtomicBool::new(false),
        }
    }
}

#[derive(Default)]
struct HandshakeTable {
    /// In progress, by operation.
    under_way: BTreeMap<String, (Arc<Handshake>, Arc<HandshakeSignals>)>,
    /// The operation that is to put each subscription in force; trials are not included.
    current: BTreeMap<SubscriptionNameKey, String>,
    /// Ordered by the time of failure and the operation.
    failed: BTreeMap<(Timestamp, String), Arc<Handshake>>,
    /// The latest is last.
    ended: VecDeque<HandshakeReport>,
}

impl HandshakeTable {
    fn find(&self, operation: &str) -> Option<HandshakeReport> {
        let seen = |handshake: &Arc<Handshake>| HandshakeReport {
            handshake: handshake.clone(),
            ended: None,
        };
        let is = |handshake: &Handshake| handshake.operation == operation;
        let under_way = self.under_way.get(operation).map(|(one, _)| seen(one));
        under_way
            .or_else(|| self.failed.values().rev().find(|one| is(one)).map(seen))
            .or_else(|| self.ended.iter().rev().find(|one| is(&one.handshake)).cloned())
    }

    /// Why no more handshakes may be begun for this owner, if so.
    fn objection(&self, owner: &HandshakeOwner) -> Option<String> {
        if self.under_way.len() >= UNDER_WAY_MAX {
            return Some(format!("{UNDER_WAY_MAX} webhook validations are under way"));
        }
        let own = self
            .under_way
            .values()
            .filter(|(_, said)| said.owner.caller == owner.caller);
        (own.count() >= UNDER_WAY_PER_CALLER_MAX).then(|| {
            format!(
                "{UNDER_WAY_PER_CALLER_MAX} webhook validations of {} are under way, the most that one caller may \
                 have: wait until some of them have ended",
                owner.caller
            )
        })
    }

    fn begin(&mut self, handshake: Arc<Handshake>, said: Arc<HandshakeSignals>) {
        let operation = handshake.operation.clone();
        if !handshake.trial {
            self.current
                .insert(key_of(&handshake.subscription), operation.clone());
        }
        self.under_way.insert(operation, (handshake, said));
    }

    fn end(&mut self, handshake: &Handshake) {
        self.under_way.remove(&handshake.operation);
        let key = key_of(&handshake.subscription);
        if self.current.get(&key) == Some(&handshake.operation) {
            self.current.remove(&key);
        }
    }

    fn remember(&mut self, seen: HandshakeReport) {
        self.ended.push_back(seen);
        while self.ended.len() > ENDED_MAX {
            self.ended.pop_front();
        }
    }

    fn failed(&mut self, handshake: Handshake) {
        if let HandshakeState::Failed { at, .. } = handshake.state {
            let key = (at, handshake.operation.clone());
            self.failed.insert(key, Arc::new(handshake));
        }
    }

    /// Removes failed handshakes that are too old or too many.
    fn prune(&mut self, now: Timestamp) -> Vec<CatalogChange> {
        let mut changes = Vec::new();
        while let Some(((at, operation), _)) = self.failed.first_key_value() {
            if now.since(*at) < FAILED_FOR && self.failed.len() < FAILED_MAX {
                break;
            }
            changes.push(CatalogChange::DeleteHandshake(operation.clone()));
            self.failed.pop_first();
        }
        changes
    }
}

/// All known handshakes.
pub struct HandshakeRegistry {
    rules: HandshakeRules,
    transport: Arc<dyn DeliveryTransport>,
    catalog: Arc<dyn Catalog>,
    clock: Arc<dyn Clock>,
    book: Mutex<HandshakeTable>,
    places: Arc<HandshakeSlots>,
    notices: deletion_notice::DeletionNotices,
    /// Tasks that do something other than wait.
    busy: AtomicUsize,
    /// Handshakes that have yet to ask.
    asking: AtomicUsize,
}

impl HandshakeRegistry {
    pub(crate) fn new(
        rules: HandshakeRules,
        transport: Arc<dyn DeliveryTransport>,
        catalog: Arc<dyn Catalog>,
        clock: Arc<dyn Clock>,
    ) -> HandshakeRegistry {
        HandshakeRegistry {
            rules,
            transport,
            catalog,
            clock,
            book: Mutex::default(),
            places: Arc::default(),
            notices: deletion_notice::DeletionNotices::default(),
            busy: AtomicUsize::new(0),
            asking: AtomicUsize::new(0),
        }
    }

    fn book(&self) -> MutexGuard<'_, HandshakeTable> {
        self.book.lock().expect("no panic holds it")
    }

    /// The handshake in progress that is to put this subscription in force.
    pub fn pending(&self, topic: TopicId, domain_topic: Option<&str>, name: &str) -> Option<Arc<Handshake>> {
        let book = self.book();
        let operation = book.current.get(&key(topic, domain_topic, name))?;
        book.under_way.get(operation).map(|(one, _)| one.clone())
    }

    /// The handshakes in progress that are to put subscriptions of a topic in force, by domain
    /// topic and name.
    pub fn pending_of(&self, topic: TopicId) -> Vec<Arc<Handshake>> {
        let book = self.book();
        let of_topic = book.current.range((topic, None, String::new())..);
        let of_topic = of_topic.take_while(|(key, _)| key.0 == topic);
        let found = of_topic.filter_map(|(_, operation)| book.under_way.get(operation));
        found.map(|(one, _)| one.clone()).collect()
    }

    /// All handshakes in progress that are to put a subscription in force.
    pub fn all_pending(&self) -> Vec<Arc<Handshake>> {
        let book = self.book();
        let found = book.current.values();
        let found = found.filter_map(|operation| book.under_way.get(operation));
        found.map(|(one, _)| one.clone()).collect()
    }

    pub fn operation(&self, operation: &str) -> Option<OperationState> {
        let seen = self.seen(operation)?;
        Some(match (&seen.handshake.state, seen.ended) {
            (_, Some((_, HandshakeEnd::Granted))) => OperationState::Succeeded,
            (_, Some((_, HandshakeEnd::Cancelled))) => OperationState::Canceled,
            (HandshakeState::Failed { message, .. }, None) => OperationState::Failed {
                code: "Url validation",
                message: message.clone(),
            },
            (HandshakeState::Asking | HandshakeState::Awaiting { .. }, None) => OperationState::InProgress,
        })
    }

    pub fn seen(&self, operation: &str) -> Option<HandshakeReport> {
        self.book().find(&operation.to_lowercase())
    }

    /// All known handshakes, the latest first.
    pub fn all(&self) -> Vec<HandshakeReport> {
        let book = self.book();
        let under_way = book.under_way.values().map(|(one, _)| one);
        let seen = |one: &Arc<Handshake>| HandshakeReport {
            handshake: one.clone(),
            ended: None,
        };
        let mut all: Vec<HandshakeReport> = under_way.chain(book.failed.values()).map(seen).collect();
        all.extend(book.ended.iter().cloned());
        drop(book);
        all.sort_by(|a, b| {
            let order = |seen: &HandshakeReport| (seen.handshake.begun, seen.handshake.operation.clone());
            order(b).cmp(&order(a))
        });
        all
    }

    /// Cancels the handshake that is to put this subscription in force. On return the handshake has
    /// ended in one way or the other; the caller then has to check whether the subscription is in
    /// force.
    pub async fn cancel(&self, topic: TopicId, domain_topic: Option<&str>, name: &str) -> Result<(), Error> {
        self.cancel_key(&key(topic, domain_topic, name), false).await
    }

    async fn cancel_key(&self, key: &SubscriptionNameKey, superseded: bool) -> Result<(), Error> {
        let said = {
            let book = self.book();
            let operation = book.current.get(key);
            operation.and_then(|one| book.under_way.get(one)).cloned()
        };
        match said {
            Some((handshake, said)) => {
                said.superseded.store(superseded, Release);
                self.cancel_one(&handshake, &said).await
            }
            None => Ok(()),
        }
    }

    /// Cancels all handshakes of a topic, or of one topic inside a domain. On return they have
    /// ended.
    pub(crate) async fn cancel_of(&self, topic: TopicId, inside: Option<&str>) -> Result<(), Error> {
        let of_topic = |one: &Handshake| {
            let of = &one.subscription;
            let here = |name: &str| {
                of.domain_topic
                    .as_deref()
                    .is_some_and(|of| of.eq_ignore_ascii_case(name))
            };
            of.topic == topic && inside.is_none_or(here)
        };
        let under_way: Vec<_> = {
            let book = self.book();
            let all = book.under_way.values();
            all.filter(|(one, _)| of_topic(one)).cloned().collect()
        };
        for (_, said) in &under_way {
            said.cancelled.cancel();
        }
        for (handshake, said) in under_way {
            self.cancel_one(&handshake, &said).await?;
        }
        Ok(())
    }

    /// Forgets the failed handshakes of a deleted topic; returns the changes that make this
    /// durable.
    pub(crate) fn forget(&self, topic: TopicId) -> Vec<CatalogChange> {
        let mut changes = Vec::new();
        self.book().failed.retain(|_, one| {
            let stays = one.subscription.topic != topic;
            if !stays {
                changes.push(CatalogChange::DeleteHandshake(one.operation.clone()));
            }
            stays
        });
        changes
    }

    async fn cancel_one(&self, handshake: &Handshake, said: &HandshakeSignals) -> Result<(), Error> {
        if said.elsewhere.load(Acquire) {
            return self.cancel_remote_handshake(handshake, said).await;
        }
        said.cancelled.cancel();
        said.over.cancelled().await;
        if self.book().under_way.contains_key(&handshake.operation) {
            return Err(Error::Stopping);
        }
        Ok(())
    }

    /// Cancels a handshake of another node, which learns of it through the catalog.
    async fn cancel_remote_handshake(
        &self,
        handshake: &Handshake,
        said: &HandshakeSignals,
    ) -> Result<(), Error> {
        let gone = CatalogChange::DeleteHandshake(handshake.operation.clone());
        self.catalog.commit(vec![gone]).await?;
        self.ended_elsewhere(&handshake.operation, HandshakeEnd::Cancelled);
        said.over.cancel();
        Ok(())
    }

    /// Ends a handshake that has no task on this node, or no longer needs it.
    fn ended_elsewhere(&self, operation: &str, how: HandshakeEnd) {
        let now = self.clock.now();
        let mut book = self.book();
        let Some((handshake, said)) = book.under_way.get(operation).cloned() else {
            book.failed.retain(|_, one| one.operation != operation);
            return;
        };
        said.settled.store(true, Release);
        book.end(&handshake);
        let ended = Some((now, how));
        book.remember(HandshakeReport { handshake, ended });
        drop(book);
        said.cancelled.cancel();
        if said.elsewhere.load(Acquire) {
            said.over.cancel();
        }
    }

    /// Applies a handshake that another node has begun or changed.
    pub(crate) fn apply_remote_handshake(&self, handshake: Handshake) {
        let mut book = self.book();
        let known = book.under_way.get(&handshake.operation).cloned();
        let failed = matches!(handshake.state, HandshakeState::Failed { .. });
        if let Some((_, said)) = &known
            && !said.elsewhere.load(Acquire)
        {
            // This node was taken for dead, and another node has taken the handshake over.
            said.settled.store(true, Release);
            said.cancelled.cancel();
        }
        if failed {
            if let Some((before, said)) = known {
                book.end(&before);
                said.over.cancel();
            }
            book.failed(handshake);
            return;
        }
        let said = match known {
            Some((_, said)) if said.elsewhere.load(Acquire) => said,
            _ => {
                let said = HandshakeSignals::new(HandshakeOwner::new("", handshake.subscription.topic));
                said.elsewhere.store(true, Release);
                Arc::new(said)
            }
        };
        book.begin(Arc::new(handshake), said.clone());
        drop(book);
        said.moved.notify_waiters();
    }

    /// Whether this node runs the handshake.
    fn runs_here(&self, operation: &str) -> bool {
        let book = self.book();
        let known = book.under_way.get(operation);
        known.is_some_and(|(_, said)| !said.elsewhere.load(Acquire))
    }

    /// Applies the end of a handshake on another node.
    pub(crate) fn apply_remote_handshake_end(&self, operation: &str, granted: bool) {
        let how = match granted {
            true => HandshakeEnd::Granted,
            false => HandshakeEnd::Cancelled,
        };
        self.ended_elsewhere(operation, how);
    }

    /// The topic of a handshake in progress, and whether it is only a trial.
    pub(crate) fn topic_of(&self, operation: &str) -> Option<(TopicId, bool)> {
        let book = self.book();
        let (one, _) = book.under_way.get(operation)?;
        Some((one.subscription.topic, one.trial))
    }

    pub(crate) fn is_under_way(&self, operation: &str) -> bool {
        self.book().under_way.contains_key(operation)
    }

    /// Whether a task does something other than wait for an answer, a visit or a time.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Acquire) > 0
    }

    /// Whether a webhook is still to be asked, or asked again.
    pub(crate) fn asks(&self) -> bool {
        self.asking.load(Acquire) > 0
    }

    /// The number of handshakes in progress, trials included.
    pub fn under_way(&self) -> usize {
        self.book().under_way.len()
    }

    /// Deletion notices that were not delivered.
    pub fn notices_failed(&self) -> u64 {
        self.notices.failed()
    }
}

impl Engine {
    /// Whether a webhook has to be asked before a subscription with this destination is in force,
    /// when the management API creates or changes it.
    pub fn needs_handshake(&self, destination: &Destination) -> bool {
        self.handshakes.rules.enabled && matches!(destination, Destination::WebHook(_))
    }

    /// Cancels the handshake of a subscription that is changed without one.
    pub(crate) async fn supersede_handshake(&self, subscription: &Subscription) -> Result<(), Error> {
        self.handshakes.cancel_key(&key_of(subscription), true).await
    }

    /// Begins a handshake with the webhook of a subscription, which is in force once the handshake
    /// succeeds. Durable on return. Cancels a handshake in progress for the same subscription. The
    /// caller must have the only turn at the subscription's name. `callback_base` is the beginning
    /// of the callback URL.
    pub async fn ask(
        self: &Arc<Self>,
        subscription: Subscription,
        callback_base: &str,
        api_version: &str,
        caller: &str,
    ) -> Result<Arc<Handshake>, Error> {
        self.supersede_handshake(&subscription).await?;
        let question = self.question(subscription, false, callback_base, api_version)?;
        self.begin(question, None, caller).await
    }

    /// Like [`Engine::ask`], unless another node has changed the subscription since `read`.
    pub async fn begin_handshake_if_unchanged(
        self: &Arc<Self>,
        subscription: Subscription,
        read: SubscriptionRead,
        callback_base: &str,
        api_version: &str,
        caller: &str,
    ) -> Result<Arc<Handshake>, Error> {
        self.read(&subscription).check_pending(&read)?;
        self.supersede_handshake(&subscription).await?;
        let question = self.question(subscription, false, callback_base, api_version)?;
        self.begin(question, Some(read), caller).await
    }

    /// Repeats the handshake with the webhook of a subscription in force, without changing
    /// anything.
    pub async fn repeat_handshake(
        self: &Arc<Self>,
        subscription: &Subscription,
        callback_base: &str,
        api_version: &str,
        caller: &str,
    ) -> Result<Arc<Handshake>, Error> {
        let question = self.question(subscription.clone(), true, callback_base, api_version)?;
        self.begin(question, None, caller).await
    }

    fn question(
        &self,
        mut subscription: Subscription,
        trial: bool,
        callback_base: &str,
        api_version: &str,
    ) -> Result<Handshake, Error> {
        if self.is_stopping() {
            return Err(Error::Stopping);
        }
        if self.directory.topic_by_id(subscription.topic).is_none() {
            return Err(Error::Gone);
        }
        let (topic, domain_topic, name) = key_of(&subscription);
        let known = self.directory.subscription(topic, domain_topic.as_deref(), &name);
        if let Some(known) = &known {
            // A subscription put in force in the meantime keeps its identity.
            subscription.id = known.id;
            subscription.created = known.created;
        }
        let rules = &self.handshakes.rules;
        let begun = self.clock.now();
        let operation = (rules.operations)();
        let token = format!("{}{}", (rules.guids)().simple(), (rules.guids)().simple());
        let callback = supports_manual_validation(api_version).then(|| {
            validation_request::callback(
                callback_base,
                &subscription.name,
                &operation,
                begun,
                api_version,
                &token,
            )
        });
        Ok(Handshake {
            operation,
            subscription,
            replaces: known.is_some(),
            trial,
            code: rules.guid().to_uppercase(),
            token: Secret::new(token),
            callback: callback.map(Secret::new),
            begun,
            by: self.node.name.as_deref().map(str::to_owned),
            state: HandshakeState::Asking,
            transcript: Vec::new(),
        })
    }

    async fn begin(
        self: &Arc<Self>,
        handshake: Handshake,
        read: Option<SubscriptionRead>,
        caller: &str,
    ) -> Result<Arc<Handshake>, Error> {
        let owner = HandshakeOwner::new(caller, handshake.subscription.topic);
        if let Some(full) = self.handshakes.book().objection(&owner) {
            return Err(Error::Store(postrider_store::Error::Busy(full)));
        }
        let _turn = self.subscription_name_turn(&handshake.subscription).await;
        if let Some(read) = read {
            self.read(&handshake.subscription).check(&read)?;
        }
        self.catalog
            .commit(vec![CatalogChange::PutHandshake(handshake.clone())])
            .await?;
        Ok(self.take_up_handshake(handshake, owner))
    }

    /// Restores a handshake whose caller is not known.
    fn restore_handshake(self: &Arc<Self>, handshake: Handshake) {
        let owner = HandshakeOwner::new("", handshake.subscription.topic);
        self.take_up_handshake(handshake, owner);
    }

    fn take_up_handshake(self: &Arc<Self>, handshake: Handshake, owner: HandshakeOwner) -> Arc<Handshake> {
        let handshake = Arc::new(handshake);
        let said = Arc::new(HandshakeSignals::new(owner));
        self.handshakes.book().begin(handshake.clone(), said.clone());
        let running = handshake_task::HandshakeTask::new(self.clone(), handshake.clone(), said);
        self.dispatcher
            .tasks
            .spawn(TaskKind::WebhookValidation, running.run());
        handshake
    }

    /// Applies a stored handshake that this node does not know.
    pub(crate) fn apply_stored_handshake(self: &Arc<Self>, handshake: Handshake) {
        let failed = matches!(handshake.state, HandshakeState::Failed { .. });
        if failed || !self.node.is_this_node(handshake.by.as_deref()) {
            self.handshakes.apply_remote_handshake(handshake);
        } else if !self.handshakes.runs_here(&handshake.operation) {
            // This node stored the handshake itself, and gave up waiting for the confirmation.
            self.restore_handshake(handshake);
        }
    }

    /// Restores the handshakes that were in progress when the earlier process ended.
    pub(crate) async fn restore_handshakes(self: &Arc<Self>, loaded: Vec<Handshake>) -> Result<(), Error> {
        let mut changes = Vec::new();
        for handshake in loaded {
            let topic = self.directory.topic_by_id(handshake.subscription.topic);
            if topic.is_none() {
                // The topic was deleted while the handshake was not.
                changes.push(CatalogChange::DeleteHandshake(handshake.operation));
            } else if matches!(handshake.state, HandshakeState::Failed { .. }) {
                self.handshakes.book().failed(handshake);
            } else if !self.node.is_this_node(handshake.by.as_deref()) {
                self.handshakes.apply_remote_handshake(handshake);
            } else {
                self.restore_handshake(handshake);
            }
        }
        changes.extend(self.handshakes.book().prune(self.clock.now()));
        if !changes.is_empty() {
            unless_done(self.catalog.commit(changes).await)?;
        }
        Ok(())
    }

    /// Takes over the handshakes of nodes that are gone, or of a server without a cluster.
    pub async fn take_over_handshakes(
        self: &Arc<Self>,
        gone: impl Fn(Option<&str>) -> bool,
    ) -> Result<(), Error> {
        let left: Vec<(Arc<Handshake>, Arc<HandshakeSignals>)> = {
            let book = self.handshakes.book();
            let left = |(one, said): &&(Arc<Handshake>, Arc<HandshakeSignals>)| {
                gone(one.by.as_deref()) && said.elsewhere.load(Acquire)
            };
            book.under_way.values().filter(left).cloned().collect()
        };
        for (handshake, said) in left {
            let mut handshake = Handshake::clone(&handshake);
            handshake.by = self.node.name.as_deref().map(str::to_owned);
            let change = CatalogChange::PutHandshake(handshake.clone());
            match self.catalog.commit(vec![change]).await {
                Ok(()) => {}
                // The handshake has changed, and the change is applied here in a moment.
                Err(postrider_store::Error::Conflict(_)) => continue,
                Err(e) => return Err(e.into()),
            }
            if !self.handshakes.is_under_way(&handshake.operation) {
                continue;
            }
            said.elsewhere.store(false, Release);
            let handshake = Arc::new(handshake);
            self.handshakes.book().begin(handshake.clone(), said.clone());
            let running = handshake_task::HandshakeTask::new(self.clone(), handshake, said);
            self.dispatcher
                .tasks
                .spawn(TaskKind::WebhookValidation, running.run());
        }
        Ok(())
    }

    /// Puts the subscription of another node's handshake in force: a visitor with the right token
    /// came to the callback here.
    fn grant_here(&self, operation: &str, said: &Arc<HandshakeSignals>) {
        let Some(engine) = self.me.upgrade() else {
            return;
        };
        let known = self.handshakes.book().under_way.get(operation).cloned();
        // Granted once, however often the callback is visited.
        if let Some((handshake, _)) = known
            && !said.confirmed.is_cancelled()
        {
            let running = handshake_task::HandshakeTask::new(engine, handshake, said.clone());
            self.dispatcher
                .tasks
                .spawn(TaskKind::WebhookValidation, running.run_granted());
        }
    }

    /// Handles a visit to the callback of a handshake. `Ok` once its subscription is in force.
    pub async fn confirm(
        &self,
        name: &str,
        operation: &str,
        token: &str,
    ) -> Result<Arc<Handshake>, ConfirmationRefusal> {
        let operation = operation.to_lowercase();
        let said = self.handshakes.book().under_way.get(&operation).cloned();
        let seen = self
            .handshakes
            .seen(&operation)
            .ok_or(ConfirmationRefusal::Unknown)?;
        let named = seen.handshake.subscription.name.eq_ignore_ascii_case(name);
        if !named || !same(seen.handshake.token.expose(), token) || seen.handshake.callback.is_none() {
            return Err(ConfirmationRefusal::Unknown);
        }
        if let Some((_, said)) = said {
            if !self
                .handshakes
                .may_be_visited(&operation, &said, &*self.wall)
                .await
            {
                return Err(ConfirmationRefusal::TooEarly);
            }
            if said.elsewhere.load(Acquire) {
                self.grant_here(&operation, &said);
            }
            said.confirmed.cancel();
            tokio::select! {
                biased;
                () = said.over.cancelled() => {}
                () = self.wall.sleep_until(self.wall.now() + IN_FORCE_WITHIN) => return Err(ConfirmationRefusal::Unavailable),
            }
            let seen = self.handshakes.seen(&operation);
            return match seen.as_ref().map(outcome) {
                Some(Err(ConfirmationRefusal::Already)) => Ok(seen.expect("just looked at").handshake),
                Some(Err(other)) => Err(other),
                Some(Ok(())) | None => Err(ConfirmationRefusal::Unavailable),
            };
        }
        match outcome(&seen) {
            Err(why) => Err(why),
            // The handshake ended between the two lookups; the next visit will see how.
            Ok(()) => Err(ConfirmationRefusal::Unavailable),
        }
    }
}

/// The result of a handshake that has ended.
fn outcome(seen: &HandshakeReport) -> Result<(), ConfirmationRefusal> {
    match (&seen.handshake.state, seen.ended) {
        (_, Some((_, HandshakeEnd::Granted))) => Err(ConfirmationRefusal::Already),
        (_, Some((_, HandshakeEnd::Cancelled))) => Err(ConfirmationRefusal::Cancelled),
        (HandshakeState::Failed { message, .. }, None) => Err(ConfirmationRefusal::Failed(message.clone())),
        _ => Ok(()),
    }
}

impl HandshakeRegistry {
    /// Whether a visit is allowed now. CloudEvents webhooks answer first and visit then: a visit
    /// before the answer is refused, unless the answer arrives shortly.
    async fn may_be_visited(
        &self,
        operation: &str,
        said: &HandshakeSignals,
        wall: &dyn postrider_core::time::Clock,
    ) -> bool {
        let early = || {
            let book = self.book();
            let asked = book.under_way.get(operation);
            asked.is_some_and(|(one, _)| {
                one.state == HandshakeState::Asking && validation_request::is_options(one)
            })
        };
        let mut patience = wall.sleep_until(wall.now() + OVERTAKING);
        loop {
            let moved = said.moved.notified();
            if !early() {
                return true;
            }
            tokio::select! {
                biased;
                () = moved => {}
                () = said.over.cancelled() => return true,
                () = &mut patience => return !early(),
            }
        }
    }
}

/// Compares in constant time.
fn same(one: &str, other: &str) -> bool {
    let differ = one.bytes().zip(other.bytes()).fold(0, |d, (a, b)| d | (a ^ b));
    one.len() == other.len() && differ == 0
}
