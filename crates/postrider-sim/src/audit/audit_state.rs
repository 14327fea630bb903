//! The auditor's state, and its judgements about deliveries.

use super::dead_letters::AuditedLetters;
use super::endpoint::{AuditedEndpoint, RequestArrival, TICK};
use super::pauses::AuditedPauses;
use super::rules::{AuditRules, EXPIRY_LEAD, FIRST_DELAY_MAX, ReceiverOutcome};
use super::{ObservedRequest, Violation, ViolationKind};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::subscription::DeadLetterDestination;
use postrider_core::time::Timestamp;
use postrider_store::DeadLetterKey;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash};
use std::time::Duration;

/// A delivery that nothing holds back must be in flight after this long …
const PROMPT: Duration = Duration::from_secs(2);
/// … plus this for each delivery that waits for the same endpoint, which may admit them one by one.
const PROMPT_EACH: Duration = Duration::from_millis(60);
/// After the clock was set or the disk was full, every task has read the clock again by then: no
/// sleep is longer than a minute.
const LOOKED_AGAIN: Duration = Duration::from_secs(75);

pub struct AuditedSubscription {
    pub name: String,
    pub rules: AuditRules,
    pub dead_letters: Option<DeadLetterDestination>,
    pub batch_max: usize,
    pub receiver: usize,
    pub moved: Timestamp,
    /// The receiver that a change in progress may already have pointed it to.
    pub moving: Option<usize>,
    pub expires: Option<Timestamp>,
    /// Whether a deletion is in progress.
    pub going: bool,
    /// When the subscription was deleted.
    pub gone: Option<Timestamp>,
    pub pauses: AuditedPauses,
    /// When an event of the subscription was last found to have expired.
    pub expired_at: Option<Timestamp>,
}

impl AuditedSubscription {
    /// The age of an event published at this time, without pauses; none if it cannot be determined.
    fn age(&self, published: Timestamp, now: Timestamp) -> Option<Duration> {
        let paused = self.pauses.within(published, now)?;
        Some(now.since(published).saturating_sub(paused))
    }
}

pub struct AuditedEvent {
    pub published: Timestamp,
    pub era: u64,
    pub matched: BTreeSet<usize>,
    pub acknowledged: bool,
}

pub struct RequestAtReceiver {
    pub ids: Vec<u64>,
    pub sub: usize,
    pub receiver: usize,
    pub at: Timestamp,
    /// How often the clock had been set.
    pub sets: u64,
    pub life: u32,
    pub era: u64,
    pub ended: Option<AuditedAnswer>,
    /// The answer that the receiver gives if nothing interrupts it.
    pub will: Option<(Timestamp, ReceiverOutcome)>,
}

#[derive(Clone, Copy)]
pub struct AuditedAnswer {
    pub at: Timestamp,
    pub sets: u64,
    pub came: ReceiverOutcome,
    pub retry_after: Option<Duration>,
}

/// How an attempt ended for the engine, as far as the auditor can tell.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum EngineView {
    InTime,
    TimedOut,
    Unclear,
}

impl RequestAtReceiver {
    pub fn told(&self, rules: &AuditRules) -> EngineView {
        let timeout = rules.response_timeout();
        match self.ended {
            None => EngineView::TimedOut,
            Some(ended) if ended.sets != self.sets => EngineView::Unclear,
            Some(ended) if ended.at + TICK < self.at + timeout => EngineView::InTime,
            Some(ended) if ended.at > self.at + timeout + TICK => EngineView::TimedOut,
            Some(_) => EngineView::Unclear,
        }
    }

    pub fn succeeded(&self, rules: &AuditRules) -> bool {
        matches!(self.ended, Some(AuditedAnswer { came: ReceiverOutcome::Answered(status), .. }) if rules.is_success(status))
    }

    /// Whether a success of this request may count: in time, or late within the late window.
    pub fn may_count(&self, rules: &AuditRules) -> bool {
        let late = |ended: AuditedAnswer| {
            let window = rules.late_window();
            window.is_some_and(|window| ended.at <= self.at + window + TICK)
        };
        match self.told(rules) {
            EngineView::InTime | EngineView::Unclear => true,
            EngineView::TimedOut => self.ended.is_some_and(late),
        }
    }
}

/// A number known within bounds: a power cut may or may not have removed records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoundedCount {
    pub least: u32,
    pub most: u32,
}

impl BoundedCount {
    pub fn plus_one(self) -> BoundedCount {
        BoundedCount {
            least: self.least + 1,
            most: self.most + 1,
        }
    }
}

#[derive(Clone, Copy)]
pub struct AuditedAttempt {
    pub request: usize,
    pub number: BoundedCount,
    pub settled: bool,
    /// Whether the attempt was settled in a later life than the one that made it, if the settlement
    /// was for this attempt.
    pub settled_late: bool,
    /// Whether the attempt's record survives.
    pub recorded: bool,
    /// Whether it may have been refused as part of a batch that was too large.
    pub maybe_halved: bool,
}

#[derive(Clone, Default)]
pub struct AuditedDelivery {
    pub tries: Vec<AuditedAttempt>,
    pub recorded: BoundedCount,
    pub ends: Vec<&'static str>,
    /// An end that a power cut may have removed.
    pub maybe_ended: bool,
    /// When the last attempt was recorded.
    pub tried_at: Option<Timestamp>,
    /// When the delivery's end was recorded.
    pub ended_at: Option<Timestamp>,
    /// The largest batch that the delivery may be sent in, and the life for which this holds: it
    /// was part of a batch that was too large.
    pub most_together: Option<(usize, u32)>,
}

pub type AuditedDeliveryKey = (usize, u64);

#[derive(Default)]
pub struct AuditState {
    pub subs: Vec<AuditedSubscription>,
    pub by_id: BTreeMap<SubscriptionId, usize>,
    pub endpoints: Vec<AuditedEndpoint>,
    /// By receiver and subscription: delays of only that subscription's deliveries.
    pub own_endpoints: BTreeMap<(usize, usize), AuditedEndpoint>,
    pub events: BTreeMap<u64, AuditedEvent>,
    /// The event at each position of the log.
    pub ids: BTreeMap<Position, u64>,
    pub requests: Vec<RequestAtReceiver>,
    pub deliveries: BTreeMap<AuditedDeliveryKey, AuditedDelivery>,
    pub letters: AuditedLetters,
    /// The delay and patience of dead letters, if they differ from the documents'.
    pub letter_timing: Option<(Duration, Duration)>,
    /// Whether the operator wants batches halved after 400, too.
    pub halves_after_400: bool,
    /// The deliveries before their latest settlement, until that is durable.
    pub lately: Vec<(AuditedDeliveryKey, AuditedDelivery)>,
    pub life: u32,
    /// Changes whenever something happens that may hold deliveries back.
    pub era: u64,
    pub sets: u64,
    /// When the clock was last set or the disk was full, by a clock that is never set.
    pub disturbed: Option<Duration>,
    pub disk_full: bool,
    /// The current time of that clock.
    pub elapsed: Duration,
    /// The latest time that the simulated clock ever showed.
    pub latest: Timestamp,
    pub trace: DefaultHasher,
    pub wrong: Vec<Violation>,
    /// A record of everything that happened, if requested.
    pub notes: Option<Vec<String>>,
}

impl AuditState {
    pub fn note(&mut self, now: Timestamp, what: impl FnOnce() -> String) {
        if let Some(notes) = &mut self.notes {
            notes.push(format!("{now} {}", what()));
        }
    }

    pub fn wrong(&mut self, kind: ViolationKind, what: String) {
        if let Some(notes) = &mut self.notes {
            notes.push(format!("WRONG {kind:?}: {what}"));
        }
        self.wrong.push(Violation { kind, what });
    }

    /// Whether no clock change or full disk excuses a late attempt.
    pub fn undisturbed(&self) -> bool {
        let looked = |at: Duration| self.elapsed > at + LOOKED_AGAIN;
        self.disturbed.is_none_or(looked) && !self.disk_full
    }

    /// Forgets endpoints that no subscription uses, with their delays.
    pub fn forget_unused(&mut self, now: Timestamp) {
        for (receiver, endpoint) in self.endpoints.iter_mut().enumerate() {
            let exists =
                |sub: &AuditedSubscription| sub.gone.is_none() && sub.expires.is_none_or(|at| now < at);
            let points = |sub: &AuditedSubscription| sub.receiver == receiver || sub.moving == Some(receiver);
            let used = |sub: &AuditedSubscription| points(sub) && exists(sub);
            if !self.subs.iter().any(used) {
                endpoint.abandon();
            }
        }
        for ((receiver, sub), own) in &mut self.own_endpoints {
            let sub = &self.subs[*sub];
            let points = sub.receiver == *receiver || sub.moving == Some(*receiver);
            let exists = sub.gone.is_none() && sub.expires.is_none_or(|at| now < at);
            if !points || !exists {
                own.abandon();
            }
        }
    }

    pub fn all_endpoints(&mut self) -> impl Iterator<Item = &mut AuditedEndpoint> {
        self.endpoints.iter_mut().chain(self.own_endpoints.values_mut())
    }

    pub fn own_endpoint(&mut self, receiver: usize, sub: usize) -> &mut AuditedEndpoint {
        let own = self.own_endpoints.entry((receiver, sub));
        own.or_insert_with(AuditedEndpoint::of_one_subscription)
    }

    pub fn arrived(&mut self, seen: ObservedRequest, now: Timestamp) -> usize {
        let named = self.subs.iter().position(|sub| sub.name == seen.subscription);
        let Some(number) = named else {
            let what = format!("a delivery for {:?}, which does not exist", seen.subscription);
            self.wrong(ViolationKind::Astray, what);
            return usize::MAX;
        };
        let request = self.requests.len();
        let sub = &mut self.subs[number];
        if sub.moving == Some(seen.receiver) && sub.receiver != seen.receiver {
            sub.receiver = seen.receiver;
            sub.moved = now;
        }
        let sub = &self.subs[number];
        let (rules, name) = (sub.rules, sub.name.clone());
        let expired = sub.expires.is_some_and(|at| now > at) && self.undisturbed();
        if sub.gone.is_some_and(|gone| now > gone) || expired {
            let what = format!("events {:?} sent at {now} for {name}, which is gone", seen.ids);
            self.wrong(ViolationKind::Astray, what);
        } else if seen.receiver != sub.receiver && now > sub.moved {
            let what = format!("events {:?} for {name} sent to {}", seen.ids, seen.receiver);
            self.wrong(ViolationKind::Astray, what);
        }
        if self.subs[number].pauses.are_on() {
            let what = format!("events {:?} sent at {now} for {name}, which is paused", seen.ids);
            self.wrong(ViolationKind::NotPaused, what);
        }
        let sub = &self.subs[number];
        let distinct: BTreeSet<u64> = seen.ids.iter().copied().collect();
        if seen.ids.len() > sub.batch_max || distinct.len() < seen.ids.len() || seen.ids.is_empty() {
            let what = format!("events {:?} in one batch for {name}", seen.ids);
            self.wrong(ViolationKind::Unasked, what);
        }
        let delayed = |endpoint: &AuditedEndpoint| endpoint.delayed_until().is_some();
        let delayed =
            delayed(&self.endpoints[seen.receiver]) || delayed(self.own_endpoint(seen.receiver, number));
        let expires = delayed.then(|| self.first_expiry(number, now)).flatten();
        let arrival = RequestArrival {
            expires,
            request,
            deliveries: seen.ids.iter().map(|id| (number, *id)).collect(),
            obeys: rules.knows_delays(),
            timeout: rules.response_timeout(),
        };
        let own = self
            .own_endpoint(seen.receiver, number)
            .arrive(arrival.clone(), now);
        if let Some(what) = self.endpoints[seen.receiver].arrive(arrival, now).or(own) {
            let what = format!(
                "events {:?} for {name} sent to {} at {now}: {what}",
                seen.ids, seen.receiver
            );
            self.wrong(ViolationKind::NotLeftAlone, what);
        }
        self.requests.push(RequestAtReceiver {
            ids: seen.ids.clone(),
            sub: number,
            receiver: seen.receiver,
            at: now,
            sets: self.sets,
            life: self.life,
            era: self.era,
            ended: None,
            will: seen.will.map(|(after, came)| (now + after, came)),
        });
        let mut count = BoundedCount::default();
        for id in &seen.ids {
            self.check_halved(number, *id, request);
            self.check_attempt(number, *id, request);
            let delivery = self.deliveries.entry((number, *id)).or_default();
            count.least = count.least.max(delivery.recorded.least);
            count.most = count.most.max(delivery.recorded.most);
        }
        let said = seen.attempts_before;
        if said < count.least || said > count.most {
            let what = format!(
                "aeg-delivery-count of {:?} for {name} says {said}, not {count:?}",
                seen.ids
            );
            self.wrong(ViolationKind::Count, what);
        }
        for id in &seen.ids {
            let delivery = self.deliveries.entry((number, *id)).or_default();
            if seen.ids.len() == 1 {
                delivery.recorded = BoundedCount {
                    least: said,
                    most: said,
                };
            }
            let number = delivery.recorded.plus_one();
            delivery.tries.push(AuditedAttempt {
                request,
                number,
                settled: false,
                settled_late: false,
                recorded: false,
                maybe_halved: false,
            });
        }
        self.note(now, || {
            format!(
                "request {request} {:?} of {name} to {}, count {said}",
                seen.ids, seen.receiver
            )
        });
        (now.nanos(), number, seen.receiver, &seen.ids, said).hash(&mut self.trace);
        request
    }

    /// When the first unfinished event of a subscription expires; now, if one was just found to
    /// have expired.
    fn first_expiry(&self, number: usize, now: Timestamp) -> Option<Timestamp> {
        let sub = &self.subs[number];
        let lately = |at: &Timestamp| *at <= now && now.since(*at) <= PROMPT;
        if let Some(at) = sub.expired_at.filter(lately) {
            return Some(at);
        }
        let open = self.events.iter().filter(|(id, event)| {
            let delivery = self.deliveries.get(&(number, **id));
            event.matched.contains(&number) && delivery.is_none_or(|delivery| delivery.ends.is_empty())
        });
        let expiry = |event: &AuditedEvent| match sub.pauses.within(event.published, now) {
            Some(paused) => event.published + paused + sub.rules.time_to_live,
            None => now,
        };
        open.map(|(_, event)| expiry(event)).min()
    }

    /// Checks an event that expired without an attempt: it, or another event at about that time,
    /// should have been used as a probe.
    fn check_unattempted(&mut self, key: AuditedDeliveryKey, now: Timestamp) {
        let (sub, event) = (&self.subs[key.0], &self.events[&key.1]);
        let rules = &sub.rules;
        let expiry = event.published + rules.time_to_live;
        // Any request from then on showed how the endpoint is, or was in flight.
        let from = expiry - EXPIRY_LEAD - FIRST_DELAY_MAX - LOOKED_AGAIN;
        let disturbed = event.era != self.era || !self.undisturbed();
        let changed = sub.moved > event.published || sub.moving.is_some();
        let paused = sub.pauses.within(event.published, now) != Some(Duration::ZERO);
        if !rules.knows_delays() || disturbed || changed || paused {
            return;
        }
        let receiver = sub.receiver;
        let own = self.own_endpoints.get(&(receiver, key.0));
        let endpoints = own.into_iter().chain([&self.endpoints[receiver]]);
        let until = endpoints.filter_map(AuditedEndpoint::delayed_until).max();
        if until.is_none_or(|until| until < expiry + TICK) {
            return;
        }
        let asked = |request: &RequestAtReceiver| {
            request.receiver == receiver && request.at >= from && request.at <= expiry
        };
        // The expiry is known only for the oldest event.
        let older = self.events.iter().any(|(id, other)| {
            let ended = self
                .deliveries
                .get(&(key.0, *id))
                .and_then(|delivery| delivery.ended_at);
            let before = other.matched.contains(&key.0) && other.published < event.published;
            before && ended.is_none_or(|at| at > from)
        });
        if !older && !self.requests.iter().rev().any(asked) {
            let what = format!(
                "event {} for {} expired at {expiry} with no attempt, while {receiver} was left alone",
                key.1, sub.name
            );
            self.wrong(ViolationKind::HeldBack, what);
        }
    }

    /// A batch was too large: its events count no attempt, and come again in smaller batches.
    pub fn halve_batch(&mut self, request: usize) {
        let of = &self.requests[request];
        let rules = &self.subs[of.sub].rules;
        let halves = of.ended.is_some_and(
            |ended| matches!(ended.came, ReceiverOutcome::Answered(status) if rules.halves(status)),
        );
        let told = of.told(rules);
        if of.ids.len() < 2 || !halves || told == EngineView::TimedOut {
            return;
        }
        let most = of.ids.len().div_ceil(2);
        for id in of.ids.clone() {
            let sub = self.requests[request].sub;
            let delivery = self.deliveries.entry((sub, id)).or_default();
            let Some(last) = delivery.tries.last_mut().filter(|last| last.request == request) else {
                continue;
            };
            if told == EngineView::Unclear {
                last.maybe_halved = true;
                continue;
            }
            delivery.tries.pop();
            delivery.most_together = Some((most, self.life));
        }
    }

    fn check_halved(&mut self, number: usize, id: u64, request: usize) {
        let delivery = self.deliveries.entry((number, id)).or_default();
        if delivery
            .tries
            .last()
            .is_some_and(|last| last.maybe_halved && !last.settled)
        {
            delivery.tries.pop();
        }
        let together = self.requests[request].ids.len();
        if let Some((most, life)) = delivery.most_together
            && life == self.life
            && together > most
        {
            let name = &self.subs[number].name;
            let what = format!("event {id} for {name} sent with {together}, {most} are the most");
            self.wrong(ViolationKind::NotHalved, what);
        }
    }

    /// Checks whether an event may be attempted now.
    fn check_attempt(&mut self, number: usize, id: u64, request: usize) {
        let sub = &self.subs[number];
        let (rules, name) = (sub.rules, sub.name.clone());
        let now = self.requests[request].at;
        let Some(event) = self.events.get(&id) else {
            self.wrong(
                ViolationKind::Unasked,
                format!("event {id} for {name} was never published"),
            );
            return;
        };
        if !event.matched.contains(&number) {
            self.wrong(
                ViolationKind::Unasked,
                format!("event {id} does not match {name}"),
            );
            return;
        }
        let (published, era) = (event.published, event.era);
        let age = sub.age(published, now);
        if age.is_some_and(|age| age >= rules.time_to_live) {
            let what = format!("event {id} for {name} attempted {age:?} after publishing");
            self.wrong(ViolationKind::TooLate, what);
        }
        let delivery = self.deliveries.get(&(number, id)).cloned().unwrap_or_default();
        if let Some(end) = delivery.ends.last() {
            let what = format!("event {id} for {name} attempted at {now} though it was {end}");
            self.wrong(ViolationKind::AfterItsEnd, what);
            return;
        }
        if delivery.recorded.least >= rules.attempts_max {
            let what = format!(
                "event {id} for {name} attempted after {:?} attempts",
                delivery.recorded
            );
            self.wrong(ViolationKind::TooOften, what);
        }
        let Some(last) = delivery.tries.last() else {
            self.check_prompt(number, published, era, request, || {
                format!("first attempt of event {id} for {name}")
            });
            return;
        };
        let before = &self.requests[last.request];
        if !last.settled && before.life == self.life {
            self.wrong(
                ViolationKind::Twice,
                format!("event {id} for {name} attempted twice at once"),
            );
            return;
        }
        if let Some(what) = self.over(&rules, before, now) {
            let what = format!("event {id} for {name} attempted at {now} after {what}");
            self.wrong(ViolationKind::AfterItsEnd, what);
            return;
        }
        if !last.recorded {
            return;
        }
        // A receiver cannot delay the retry beyond the end of the event's time to live; pauses have
        // moved that end, perhaps by an unknown time.
        let ended = before.ended.map_or(published, |ended| ended.at);
        let paused = self.subs[number].pauses.within(published, ended);
        // After the clock was set back, a later pause may seem to have been there before.
        let paused = paused.filter(|_| before.sets == self.sets);
        let published = published + paused.unwrap_or_default();
        let (earliest, latest) = due(&rules, before, last.number, published);
        let clear = before.told(&rules) != EngineView::Unclear && paused.is_some();
        let era = before.era;
        if now < earliest {
            let what = format!(
                "event {id} for {name} ({:?}) attempted at {now}, due {earliest}, after attempt {:?} of {}",
                rules.document, last.number, before.at
            );
            self.wrong(ViolationKind::Early, what);
        }
        if clear {
            self.check_prompt(number, latest, era, request, || {
                format!("attempt {} of event {id} for {name}", delivery.tries.len() + 1)
            });
        }
    }

    /// Why an attempt after `before` in the same life should not have been made, if so.
    fn over(&self, rules: &AuditRules, before: &RequestAtReceiver, now: Timestamp) -> Option<String> {
        if before.life != self.life {
            return None;
        }
        // The receiver's intended answer counts even if nobody read it, provided that nothing
        // interrupted it.
        let unheard = before.will.filter(|_| before.era == self.era);
        let (at, came) = before.ended.map(|ended| (ended.at, ended.came)).or(unheard)?;
        let ReceiverOutcome::Answered(status) = came else {
            return None;
        };
        let over = match before.told(rules) {
            EngineView::InTime => rules.is_success(status) || rules.is_final(status),
            EngineView::TimedOut => {
                let window = rules.late_window();
                let counts = window.is_some_and(|window| at + TICK < before.at + window);
                rules.is_success(status) && counts && now > at + TICK
            }
            EngineView::Unclear => false,
        };
        over.then(|| format!("{status} at {at}"))
    }

    /// Checks that a due delivery is attempted promptly, unless its endpoint is slow or on
    /// probation, or something has happened since.
    fn check_prompt(
        &mut self,
        number: usize,
        due: Timestamp,
        era: u64,
        request: usize,
        what: impl FnOnce() -> String,
    ) {
        let request = &self.requests[request];
        let (receiver, now) = (request.receiver, request.at);
        let endpoint = &self.endpoints[receiver];
        let own = self.own_endpoints.get(&(receiver, number));
        let suspect = endpoint.suspect || own.is_some_and(|own| own.suspect);
        let held = suspect && self.subs[number].rules.knows_delays();
        // The old endpoint may have held it back, with every lane waiting for an answer.
        let sub = &self.subs[number];
        if sub.moved > Timestamp::MIN && self.sets > 0 {
            // Deliveries may wait for as long as the clock was set back.
            return;
        }
        if sub.pauses.changing {
            // Deliveries resume before the callers learn that the pause has ended.
            return;
        }
        let due = due.max(sub.pauses.ended());
        let waited = now.since(due.max(sub.moved + sub.rules.response_timeout()));
        if era != self.era || !self.undisturbed() || !endpoint.quick || held || waited <= PROMPT {
            return;
        }
        let busy = |key: &AuditedDeliveryKey| self.subs[key.0].receiver == receiver;
        let mut waiting = self.missing(now).filter(busy).count() as u32;
        if let Some((since, flood)) = endpoint.flood
            && due <= since + PROMPT + PROMPT_EACH * flood
        {
            waiting = waiting.max(flood);
        }
        if waited > PROMPT + PROMPT_EACH * waiting {
            let what = format!("{} waited {waited:?} with {waiting} others", what());
            self.wrong(ViolationKind::HeldBack, what);
        }
    }

    /// The pause of a subscription has ended: its backlog is sent at once.
    pub fn flood(&mut self, number: usize, now: Timestamp) {
        let receiver = self.subs[number].receiver;
        let busy = |key: &AuditedDeliveryKey| self.subs[key.0].receiver == receiver;
        let waiting = self.missing(now).filter(busy).count() as u32;
        self.endpoints[receiver].flood = Some((now, waiting));
    }

    /// The log is told what follows an attempt, and when that was decided.
    pub fn settled(&mut self, number: usize, id: u64, next: NextStep, decided: Timestamp, now: Timestamp) {
        let key = (number, id);
        let before = self.deliveries.entry(key).or_default().clone();
        let end = match next {
            NextStep::RetryAt(_) => None,
            NextStep::Done => Some("delivered"),
            NextStep::DeadLetter(_) => Some("dead-lettered"),
            NextStep::Drop(_) => Some("dropped"),
        };
        let name = self.subs[number].name.clone();
        if end.is_some() && !before.ends.is_empty() {
            let what = format!("event {id} for {name} was {:?} and is {end:?}", before.ends);
            self.wrong(ViolationKind::TwoEnds, what);
        }
        let after = self.deliveries.get_mut(&key).expect("just made");
        if let Some(last) = after.tries.last_mut().filter(|last| !last.settled) {
            last.settled = true;
            last.settled_late = self.requests[last.request].life != self.life;
            last.recorded = true;
            after.recorded = last.number;
            after.tried_at = Some(now);
        }
        after.most_together = None;
        after.ends.extend(end);
        after.ended_at = end.map(|_| now);
        let unattempted = after.tries.is_empty();
        if let NextStep::DeadLetter(GiveUpReason::TimeToLiveExceeded)
        | NextStep::Drop(GiveUpReason::TimeToLiveExceeded) = next
        {
            self.subs[number].expired_at = Some(now);
            if unattempted {
                self.check_unattempted(key, now);
            }
        }
        self.lately.push((key, before));
        if let NextStep::DeadLetter(reason) = next {
            let recorded = self.lately.last().expect("just pushed").1.recorded;
            self.given_up(key, reason, recorded, now);
        }
        self.note(now, || format!("settled {id} of {name}: {next:?}"));
        if let Some(what) = self.explained(key, next, decided, now) {
            let what = format!("event {id} for {name} is {end:?}: {what}");
            self.wrong(ViolationKind::WrongEnd, what);
        }
    }

    /// The objection to such an end, if there is one.
    fn explained(
        &self,
        key: AuditedDeliveryKey,
        next: NextStep,
        decided: Timestamp,
        now: Timestamp,
    ) -> Option<String> {
        let rules = &self.subs[key.0].rules;
        let delivery = &self.deliveries[&key];
        let reason = match next {
            NextStep::RetryAt(_) => return None,
            NextStep::Done => {
                let mut requests = delivery.tries.iter().map(|t| &self.requests[t.request]);
                let counts = requests.any(|r| r.succeeded(rules) && r.may_count(rules));
                return (!counts).then(|| "nobody took it in time".into());
            }
            // The delivery was in progress when the subscription was deleted.
            NextStep::Drop(GiveUpReason::SubscriptionGone) => {
                let sub = &self.subs[key.0];
                return (!sub.going && sub.gone.is_none()).then(|| "nobody deletes it".into());
            }
            NextStep::Drop(GiveUpReason::SubscriptionExpired) => {
                let expired = self.subs[key.0].expires.is_some_and(|at| at <= now);
                return (!expired && self.sets == 0).then(|| "its time is not over".into());
            }
            NextStep::DeadLetter(_) if !rules.dead_letter => return Some("it has no dead letters".into()),
            NextStep::Drop(_) if rules.dead_letter => return Some("it has dead letters".into()),
            NextStep::DeadLetter(reason) | NextStep::Drop(reason) => reason,
        };
        let explained = match reason {
            GiveUpReason::AttemptsExhausted => delivery.recorded.most >= rules.attempts_max,
            GiveUpReason::TimeToLiveExceeded => {
                let sub = &self.subs[key.0];
                // A decision dated after now was made before the clock was set back. Pauses that
                // began since then did not apply at that time.
                let before_set_back = decided > now;
                let old = |event: &AuditedEvent| {
                    let age = sub.age(event.published, self.latest).filter(|_| !before_set_back);
                    let age = age.unwrap_or_else(|| self.latest.since(event.published));
                    let paused = !before_set_back && sub.pauses.were_on(decided);
                    age >= rules.time_to_live && !paused
                };
                self.events.get(&key.1).is_some_and(old)
            }
            GiveUpReason::BadRequest | GiveUpReason::ClientError => {
                let last = delivery.tries.last().map(|t| &self.requests[t.request]);
                let bad_request = reason == GiveUpReason::BadRequest;
                let alone = last.is_some_and(|last| last.ids.len() == 1);
                let fits = |status: u16| {
                    rules.is_final(status)
                        && (status == 400) == bad_request
                        && (alone || !rules.halves(status))
                };
                // After the last attempt this is the reason, whatever the answer.
                let more_allowed = delivery.recorded.least < rules.attempts_max;
                more_allowed
                    && last.and_then(|last| last.ended).is_some_and(
                        |ended| matches!(ended.came, ReceiverOutcome::Answered(status) if fits(status)),
                    )
            }
            // These reasons end dead letters or whole subscriptions, never a single delivery.
            GiveUpReason::SubscriptionGone
            | GiveUpReason::SubscriptionExpired
            | GiveUpReason::Corrupt
            | GiveUpReason::DeadLetterUnavailable
            | GiveUpReason::DeadLetterWithoutDestination
            | GiveUpReason::TooManyHops => false,
        };
        (!explained).then(|| format!("{reason} does not hold"))
    }

    /// The deliveries of these dead letters.
    pub fn keys(&self, of: SubscriptionId, letters: &[DeadLetterKey]) -> Vec<AuditedDeliveryKey> {
        let Some(sub) = self.by_id.get(&of) else {
            return Vec::new();
        };
        let ids = letters.iter().filter_map(|(_, position)| self.ids.get(position));
        ids.map(|id| (*sub, *id)).collect()
    }

    /// Deliveries of acknowledged events to existing subscriptions that have not ended.
    pub fn missing(&self, now: Timestamp) -> impl Iterator<Item = AuditedDeliveryKey> {
        let accepted = self.events.iter().filter(|(_, event)| event.acknowledged);
        let keys = accepted.flat_map(|(id, event)| event.matched.iter().map(|sub| (*sub, *id)));
        keys.filter(move |key| {
            let sub = &self.subs[key.0];
            let exists = sub.gone.is_none() && sub.expires.is_none_or(|at| now < at);
            let ended = |d: &AuditedDelivery| !d.ends.is_empty() || d.maybe_ended;
            exists && !self.deliveries.get(key).is_some_and(ended)
        })
    }
}

/// The earliest time at which the attempt after `before` may be made, and the latest at which it is
/// due.
fn due(
    rules: &AuditRules,
    before: &RequestAtReceiver,
    number: BoundedCount,
    published: Timestamp,
) -> (Timestamp, Timestamp) {
    let after = |at: Timestamp, came: ReceiverOutcome, asked: Option<Duration>| {
        let floor = rules.floor(came);
        // A receiver may ask for a longer wait, but not beyond the event's time to live.
        let asked = asked.map_or(at, |asked| (at + asked).min(published + rules.time_to_live));
        let earliest = at + rules.step(number.least).max(floor);
        let latest = at + rules.step_longest(number.most).max(floor);
        (earliest.max(asked), latest.max(asked))
    };
    let timed_out = after(
        before.at + rules.response_timeout(),
        ReceiverOutcome::TimedOut,
        None,
    );
    let Some(ended) = before.ended else {
        return timed_out;
    };
    let answered = after(ended.at, ended.came, ended.retry_after);
    match before.told(rules) {
        EngineView::InTime => answered,
        EngineView::TimedOut => timed_out,
        EngineView::Unclear => (answered.0.min(timed_out.0), answered.1.max(timed_out.1)),
    }
}
