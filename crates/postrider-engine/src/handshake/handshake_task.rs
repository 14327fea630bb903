//! The task of one handshake: asks the webhook, waits for a visit, and ends the handshake.

use super::{HandshakeEnd, HandshakeReport, HandshakeSignals, validation_request};
use crate::deliver::{DeliveryReply, DeliveryRequest};
use crate::{Engine, Error};
use postrider_core::handshake::{ValidationVerdict, expired, message, method};
use postrider_core::subscription::Destination;
use postrider_core::time::Timestamp;
use postrider_store::{CatalogChange, Handshake, HandshakeExchange, HandshakeState};
use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::time::Duration;

/// Wait before a failed catalog write is retried.
const TROUBLE_PAUSE: Duration = Duration::from_secs(5);
/// Wait before a write is retried that conflicted with another node's change, in real time.
const CONFLICT_PAUSE: Duration = Duration::from_millis(50);

pub(super) struct HandshakeTask {
    engine: Arc<Engine>,
    handshake: Arc<Handshake>,
    said: Arc<HandshakeSignals>,
    asking: bool,
}

/// How the handshake ends.
enum HandshakeTaskEnd {
    Granted {
        rate: Option<u32>,
    },
    Failed {
        reason: String,
    },
    Cancelled,
    /// The engine stops; the next process continues the handshake.
    LeftToNextProcess,
}

/// The result of waiting for something.
enum HandshakeWait<T> {
    Done(T),
    Confirmed,
    Cancelled,
    Stopped,
}

impl<T> HandshakeWait<T> {
    fn or_end(self) -> Result<T, HandshakeTaskEnd> {
        match self {
            HandshakeWait::Done(value) => Ok(value),
            HandshakeWait::Confirmed => Err(HandshakeTaskEnd::Granted { rate: None }),
            HandshakeWait::Cancelled => Err(HandshakeTaskEnd::Cancelled),
            HandshakeWait::Stopped => Err(HandshakeTaskEnd::LeftToNextProcess),
        }
    }
}

impl HandshakeTask {
    /// The task counts as busy from now on.
    pub(super) fn new(
        engine: Arc<Engine>,
        handshake: Arc<Handshake>,
        said: Arc<HandshakeSignals>,
    ) -> HandshakeTask {
        engine.handshakes.busy.fetch_add(1, AcqRel);
        let mut running = HandshakeTask {
            engine,
            handshake,
            said,
            asking: false,
        };
        running.set_asking(running.handshake.state == HandshakeState::Asking);
        running
    }

    pub(super) async fn run(mut self) {
        let end = match self.play().await {
            Ok(never) => match never {},
            Err(end) => end,
        };
        self.finish(end).await;
    }

    /// Ends a handshake that is already known to be granted.
    pub(super) async fn run_granted(mut self) {
        self.finish(HandshakeTaskEnd::Granted { rate: None }).await;
    }

    async fn play(&mut self) -> Result<Infallible, HandshakeTaskEnd> {
        if self.handshake.state == HandshakeState::Asking {
            self.ask().await?;
        }
        let HandshakeState::Awaiting { until } = self.handshake.state else {
            return Err(HandshakeTaskEnd::LeftToNextProcess);
        };
        let engine = self.engine.clone();
        let mut time = engine.clock.sleep_until(until);
        self.wait(&mut time).await.or_end()?;
        Err(HandshakeTaskEnd::Failed {
            reason: expired(self.handshake.subscription.delivery_schema, self.window()),
        })
    }

    /// Asks until the webhook has received the request. `Ok` when a visit is awaited.
    async fn ask(&mut self) -> Result<(), HandshakeTaskEnd> {
        let engine = self.engine.clone();
        let rules = &engine.handshakes.rules;
        let owner = self.said.owner.clone();
        let mut tries = 0;
        loop {
            tries += 1;
            let request = self.request().ok_or_else(|| HandshakeTaskEnd::Failed {
                reason: "The topic of the subscription does not exist any more".into(),
            })?;
            let verdict = {
                let entering = engine.handshakes.places.enter(&owner);
                let mut entering = std::pin::pin!(entering);
                let place = self.wait(&mut entering).await.or_end()?;
                let sent = engine.clock.now();
                let reply = self.exchange(request.clone()).await?;
                let now = engine.clock.now();
                let asked = validation_request::asked(&self.handshake, rules, tries);
                let verdict = asked.verdict(validation_request::heard(reply.as_ref()), rules.patience, now);
                drop(place);
                self.write_down(&request, sent, reply.as_ref(), &verdict);
                verdict
            };
            match verdict {
                ValidationVerdict::Granted { rate } => return Err(HandshakeTaskEnd::Granted { rate }),
                ValidationVerdict::Refused { reason } => return Err(HandshakeTaskEnd::Failed { reason }),
                ValidationVerdict::TryAgain(at) => {
                    let mut time = engine.clock.sleep_until(at);
                    self.wait(&mut time).await.or_end()?;
                }
                ValidationVerdict::Manual => return self.await_visit().await,
            }
        }
    }

    fn request(&self) -> Option<DeliveryRequest> {
        let engine = &self.engine;
        let topic = engine.directory.topic_by_id(self.handshake.subscription.topic)?;
        let rules = &engine.handshakes.rules;
        validation_request::request(&self.handshake, &topic, rules, &rules.guid(), engine.clock.now())
    }

    /// Sends one request; none when no answer came in time.
    async fn exchange(&self, request: DeliveryRequest) -> Result<Option<DeliveryReply>, HandshakeTaskEnd> {
        let engine = &self.engine;
        let mut sending = engine.handshakes.transport.clone().send(request);
        let timeout = engine.handshakes.rules.response_timeout;
        let mut deadline = engine.clock.sleep_until(engine.clock.now() + timeout);
        let answered = async {
            tokio::select! {
                biased;
                reply = &mut sending => Some(reply),
                () = &mut deadline => None,
            }
        };
        let mut answered = std::pin::pin!(answered);
        self.wait(&mut answered).await.or_end()
    }

    /// Waits for something, or until the task is signalled. The task is not busy while it waits.
    async fn wait<F: Future + Unpin>(&self, what: F) -> HandshakeWait<F::Output> {
        self.engine.handshakes.busy.fetch_sub(1, AcqRel);
        let waited = tokio::select! {
            biased;
            () = self.engine.dispatcher.stop.cancelled() => HandshakeWait::Stopped,
            () = self.said.cancelled.cancelled() => HandshakeWait::Cancelled,
            () = self.said.confirmed.cancelled() => HandshakeWait::Confirmed,
            value = what => HandshakeWait::Done(value),
        };
        self.engine.handshakes.busy.fetch_add(1, AcqRel);
        waited
    }

    fn write_down(
        &mut self,
        request: &DeliveryRequest,
        sent: Timestamp,
        reply: Option<&DeliveryReply>,
        verdict: &ValidationVerdict,
    ) {
        let exchange = HandshakeExchange {
            at: sent,
            method: request.method.to_string(),
            url: validation_request::without_query(&self.handshake.subscription),
            headers: validation_request::redacted_headers(request),
            received: validation_request::received(reply, &self.handshake),
            verdict: told(verdict),
        };
        self.change(|handshake| handshake.transcript.push(exchange));
    }

    /// Changes the handshake where readers see it.
    fn change(&mut self, how: impl FnOnce(&mut Handshake)) {
        how(Arc::make_mut(&mut self.handshake));
        let mut book = self.engine.handshakes.book();
        if let Some((shown, _)) = book.under_way.get_mut(&self.handshake.operation) {
            *shown = self.handshake.clone();
        }
        drop(book);
        self.said.moved.notify_waiters();
    }

    fn set_asking(&mut self, asking: bool) {
        if asking != self.asking {
            self.asking = asking;
            let counter = &self.engine.handshakes.asking;
            match asking {
                true => counter.fetch_add(1, AcqRel),
                false => counter.fetch_sub(1, AcqRel),
            };
        }
    }

    fn window(&self) -> Duration {
        let subscription = &self.handshake.subscription;
        let topic = self.engine.directory.topic_by_id(subscription.topic);
        self.engine
            .profile(subscription, topic.as_deref())
            .validation_window
    }

    async fn await_visit(&mut self) -> Result<(), HandshakeTaskEnd> {
        let until = self.engine.clock.now() + self.window();
        // Visible before it is durable: the visit may already be on its way. After a crash in
        // between the webhook is asked again.
        self.change(|handshake| handshake.state = HandshakeState::Awaiting { until });
        self.set_asking(false);
        self.commit(vec![CatalogChange::PutHandshake((*self.handshake).clone())])
            .await
    }

    /// Makes changes durable, however long that takes.
    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), HandshakeTaskEnd> {
        loop {
            self.unless_settled()?;
            match self.engine.catalog.commit(changes.clone()).await {
                Ok(()) => return Ok(()),
                Err(e) => self.pause(&e).await?,
            }
        }
    }

    /// Ends the task if another node has ended the handshake or taken it over.
    fn unless_settled(&self) -> Result<(), HandshakeTaskEnd> {
        match self.said.settled.load(Acquire) {
            true => Err(HandshakeTaskEnd::LeftToNextProcess),
            false => Ok(()),
        }
    }

    async fn pause(&self, trouble: &postrider_store::Error) -> Result<(), HandshakeTaskEnd> {
        let (clock, pause) = match trouble {
            // The other node's change is applied here in a moment.
            postrider_store::Error::Conflict(_) => (&self.engine.wall, CONFLICT_PAUSE),
            other => {
                tracing::error!(error = %other, "cannot keep a handshake");
                (&self.engine.clock, TROUBLE_PAUSE)
            }
        };
        let mut time = clock.sleep_until(clock.now() + pause);
        self.engine.handshakes.busy.fetch_sub(1, AcqRel);
        let stopped = tokio::select! {
            biased;
            () = self.engine.dispatcher.stop.cancelled() => true,
            () = &mut time => false,
        };
        self.engine.handshakes.busy.fetch_add(1, AcqRel);
        if stopped {
            Err(HandshakeTaskEnd::LeftToNextProcess)
        } else {
            Ok(())
        }
    }

    async fn finish(&mut self, end: HandshakeTaskEnd) {
        let ended = match end {
            HandshakeTaskEnd::Granted { rate } => self.grant(rate).await,
            HandshakeTaskEnd::Failed { reason } => self.fail(reason).await,
            HandshakeTaskEnd::Cancelled => self.cancel().await,
            HandshakeTaskEnd::LeftToNextProcess => Err(HandshakeTaskEnd::LeftToNextProcess),
        };
        if ended.is_ok() {
            tracing::debug!(operation = %self.handshake.operation, "handshake ended");
        }
    }

    /// Puts the subscription in force, and deletes the handshake in the same commit.
    async fn grant(&mut self, rate: Option<u32>) -> Result<(), HandshakeTaskEnd> {
        let done = CatalogChange::DeleteHandshake(self.handshake.operation.clone());
        if self.handshake.trial {
            self.commit(vec![done]).await?;
            self.over(HandshakeEnd::Granted);
            return Ok(());
        }
        self.change(|handshake| {
            if let Destination::WebHook(hook) = &mut handshake.subscription.destination {
                hook.rate_max = rate;
            }
        });
        loop {
            let mut subscription = self.handshake.subscription.clone();
            let domain_topic = subscription.domain_topic.as_deref();
            let directory = &self.engine.directory;
            // A subscription that another API put in force in the meantime keeps its identity.
            if let Some(known) = directory.subscription(subscription.topic, domain_topic, &subscription.name)
            {
                subscription.id = known.id;
                subscription.created = known.created;
            }
            let putting = self
                .engine
                .put_subscription_with_changes(subscription, vec![done.clone()], None);
            match putting.await {
                Ok(_) => break,
                Err(Error::Store(e)) => self.pause(&e).await?,
                Err(Error::Stopping | Error::HandshakeOver) => {
                    return Err(HandshakeTaskEnd::LeftToNextProcess);
                }
                Err(gone) => {
                    let reason = format!("The endpoint was validated, but {gone}");
                    return Box::pin(self.fail(reason)).await;
                }
            }
        }
        let subscription = &self.handshake.subscription;
        tracing::info!(subscription = %subscription.name, "webhook validated");
        self.over(HandshakeEnd::Granted);
        Ok(())
    }

    async fn cancel(&mut self) -> Result<(), HandshakeTaskEnd> {
        self.unless_settled()?;
        let gone = CatalogChange::DeleteHandshake(self.handshake.operation.clone());
        self.commit(vec![gone]).await?;
        self.over(HandshakeEnd::Cancelled);
        if !self.said.superseded.load(Acquire) {
            self.release_scope().await;
        }
        Ok(())
    }

    async fn fail(&mut self, reason: String) -> Result<(), HandshakeTaskEnd> {
        let now = self.engine.clock.now();
        let subscription = &self.handshake.subscription;
        let endpoint = validation_request::without_query(subscription);
        let activity = self.engine.handshakes.rules.guid();
        let delivery = subscription.delivery_schema;
        let message = message(delivery, &endpoint, &reason, &activity, now);
        tracing::warn!(
            subscription = %subscription.name,
            endpoint,
            request = method(delivery),
            reason,
            "webhook not validated"
        );
        let mut failed = (*self.handshake).clone();
        failed.state = HandshakeState::Failed { at: now, message };
        let mut changes = vec![CatalogChange::PutHandshake(failed.clone())];
        changes.extend(self.engine.handshakes.book().prune(now));
        self.commit(changes).await?;
        {
            let mut book = self.engine.handshakes.book();
            book.end(&failed);
            book.failed(failed);
        }
        self.release_scope().await;
        Ok(())
    }

    /// Deletes the resource's hidden topic if the handshake was the last thing that belonged to it.
    async fn release_scope(&self) {
        let topic = self.handshake.subscription.topic;
        if let Err(e) = self.engine.release_scope(topic).await {
            tracing::warn!(error = %e, "cannot delete the topic of a resource that nothing hangs on");
        }
    }

    fn over(&self, how: HandshakeEnd) {
        let mut book = self.engine.handshakes.book();
        book.end(&self.handshake);
        book.remember(HandshakeReport {
            handshake: self.handshake.clone(),
            ended: Some((self.engine.clock.now(), how)),
        });
    }
}

impl Drop for HandshakeTask {
    fn drop(&mut self) {
        self.set_asking(false);
        self.said.over.cancel();
        self.engine.handshakes.busy.fetch_sub(1, AcqRel);
    }
}

/// A verdict, for people.
fn told(verdict: &ValidationVerdict) -> String {
    match verdict {
        ValidationVerdict::Granted { rate: None } => "granted".into(),
        ValidationVerdict::Granted { rate: Some(rate) } => {
            format!("granted, at most {rate} requests a minute")
        }
        ValidationVerdict::Manual => "heard; a visit to the validation URL is awaited".into(),
        ValidationVerdict::TryAgain(at) => format!("no answer in time; asked again at {at}"),
        ValidationVerdict::Refused { reason } => format!("refused: {reason}"),
    }
}
