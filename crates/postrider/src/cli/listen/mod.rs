//! `postrider listen`: events as they are delivered, on the terminal or at a local port.

mod stream;
mod delivery_handler;
mod print;

use super::args::SchemaArg;
use super::management_client::{ManagementClient, ServerRefusal};
use super::settings::{FilterSettings, RetrySettings};
use super::subscriptions::{SubscriptionScope, default_group_of, meaning};
use super::{CliFlags, UsageError};
use anyhow::{Context, Result, ensure};
use clap::Args;
use delivery_handler::{DeliveryHandler, ForwardUrl, HandledDelivery};
use postrider_core::time::Clock;
use postrider_engine::clock::SystemClock;
use print::DeliveryPrinter;
use serde_json::{Map, Value, json};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;
use stream::{DeliveryStream, SessionDelivery, SessionIntroduction, StreamItem};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::timeout;

const PATH: &str = "/postrider/v1/listen";
/// Deliveries handled at once; the server makes no more concurrent attempts at an endpoint.
const AT_ONCE_MAX: usize = 64;
/// First and longest pause before reconnecting after a lost connection.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Time for reports in progress at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Args)]
pub struct ListenArgs {
    #[command(flatten)]
    on: SubscriptionScope,
    /// Post each delivery to this URL, and answer with its response
    #[arg(long, value_name = "URL")]
    forward: Option<String>,
    /// Schema in which events are delivered
    #[arg(long, value_name = "SCHEMA", visible_alias = "schema", ignore_case = true)]
    delivery_schema: Option<SchemaArg>,
    /// Largest number of events in one delivery, 1 to 5000
    #[arg(long, value_name = "N")]
    max_events_per_batch: Option<u32>,
    /// Name of the temporary subscription [default: a new one]
    #[arg(long)]
    name: Option<String>,
    /// Print each event in full
    #[arg(long)]
    full: bool,
    /// End after exactly this many events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    #[command(flatten)]
    filter: FilterSettings,
    #[command(flatten)]
    retry: RetrySettings,
    #[command(flatten)]
    flags: CliFlags,
}

impl ListenArgs {
    /// Request body that starts the listen session.
    async fn body(&self, arm: &ManagementClient) -> Result<Value> {
        let (topic, domain_topic) = self.on.place(arm).await?;
        let mut properties = Map::new();
        self.filter.put_into(&mut properties)?;
        let group = default_group_of(arm, &topic).await?;
        self.retry.put_into(&mut properties, &meaning(arm, &group))?;
        let profile = properties
            .remove("postrider")
            .map(|mut ours| ours["profile"].take());
        let mut body = Value::Object(properties);
        body["topic"] = json!(topic);
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                body[name] = value;
            }
        };
        put("domainTopic", domain_topic.map(|name| json!(name)));
        put("name", self.name.as_ref().map(|name| json!(name)));
        put(
            "schema",
            self.delivery_schema.map(|schema| json!(schema.delivery_name())),
        );
        // No batch is larger than the total number of events wanted.
        let batch_max = self.max_events_per_batch.map(u64::from);
        put(
            "maxEventsPerBatch",
            batch_max.map(|max| json!(max.min(self.count.unwrap_or(max)))),
        );
        put("profile", profile);
        Ok(body)
    }
}

pub async fn listen(args: &ListenArgs) -> Result<()> {
    let forward = args.forward.as_deref().map(ForwardUrl::to).transpose()?;
    let forward = forward.map(Arc::new);
    let mut stop = StopSignals::new()?;
    let arm = args.flags.connect().await?;
    let body = args.body(&arm).await?;
    let arm = Arc::new(arm);
    let mut listener = ListenCommand {
        screen: DeliveryPrinter::of_terminal(args.flags.output.is_json(), args.full, forward.is_some()),
        forward,
        count: WantedEvents::up_to(args.count),
        forwards: ForwardCounts::default(),
        arm,
    };
    let listened = listener.run(&body, &mut stop).await;
    let came = listener.count.came;
    eprintln!("{came} event{} came", if came == 1 { "" } else { "s" });
    listened?;
    let ForwardCounts { made, failed } = listener.forwards;
    ensure!(
        failed == 0,
        "{failed} of {made} deliveries could not be forwarded"
    );
    Ok(())
}

/// Events received, of those wanted.
#[derive(Clone, Copy, Debug)]
struct WantedEvents {
    max: u64,
    /// Events of deliveries taken: those received, and those being forwarded.
    taken: u64,
    came: u64,
}

impl WantedEvents {
    fn up_to(max: Option<u64>) -> WantedEvents {
        WantedEvents {
            max: max.unwrap_or(u64::MAX),
            taken: 0,
            came: 0,
        }
    }

    /// How many of the next `events` events are wanted.
    fn take(&mut self, events: usize) -> usize {
        let left = usize::try_from(self.max - self.taken).unwrap_or(usize::MAX);
        let wanted = events.min(left);
        self.taken += wanted as u64;
        wanted
    }

    fn is_complete(&self) -> bool {
        self.came >= self.max
    }

    /// Deliveries taken over a lost connection will be delivered again.
    fn begin_again(&mut self) {
        self.taken = self.came;
    }
}

/// Counts of forwarded deliveries.
#[derive(Clone, Copy, Debug, Default)]
struct ForwardCounts {
    made: u64,
    /// Forwards without an answer, or with a status other than success.
    failed: u64,
}

/// Ctrl-C and the other signals that end the command.
struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    fn new() -> Result<StopSignals> {
        Ok(StopSignals {
            interrupt: signal(SignalKind::interrupt()).context("listening for Ctrl-C")?,
            terminate: signal(SignalKind::terminate()).context("listening for SIGTERM")?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// How one connection of the session ended.
enum SessionEnd {
    /// Ended by us or with all events received.
    Well,
    /// Lost, for this reason; reconnecting may succeed.
    Lost(String),
    /// The subscription was deleted.
    Deleted,
}

struct ListenCommand {
    arm: Arc<ManagementClient>,
    forward: Option<Arc<ForwardUrl>>,
    screen: DeliveryPrinter,
    count: WantedEvents,
    forwards: ForwardCounts,
}

impl ListenCommand {
    async fn run(&mut self, body: &Value, stop: &mut StopSignals) -> Result<()> {
        let mut deliveries = tokio::select! {
            biased;
            () = stop.asked() => return Ok(()),
            opened = DeliveryStream::open(self.arm.client(), body) => opened?,
        };
        self.greet(&deliveries.introduction, "listening to");
        loop {
            let why = match self.follow(deliveries, stop).await? {
                SessionEnd::Well => return Ok(()),
                SessionEnd::Deleted => anyhow::bail!("the subscription was deleted while it was listened to"),
                SessionEnd::Lost(why) => why,
            };
            eprintln!("the connection was lost ({why}); trying again");
            deliveries = tokio::select! {
                biased;
                () = stop.asked() => return Ok(()),
                opened = self.open_again(body) => opened?,
            };
            self.greet(
                &deliveries.introduction,
                "what was published meanwhile is not shown; listening again to",
            );
        }
    }

    fn greet(&self, made: &SessionIntroduction, how: &str) {
        let on = match &made.domain_topic {
            Some(inside) => format!("{}/{inside}", made.topic),
            None => made.topic.clone(),
        };
        let to = match &self.forward {
            Some(forward) => format!(", forwarding to {}", forward.shown),
            None => String::new(),
        };
        eprintln!("{how} {on} as subscription {}{to}; Ctrl-C ends it", made.name);
    }

    /// Reconnects until the server is back; fails if the server refuses the session.
    async fn open_again(&self, body: &Value) -> Result<DeliveryStream> {
        let mut pause = PAUSE_FIRST;
        loop {
            SystemClock.sleep_until(SystemClock.now() + pause).await;
            match DeliveryStream::open(self.arm.client(), body).await {
                Ok(opened) => return Ok(opened),
                Err(e) => {
                    let refused = e.downcast_ref::<ServerRefusal>().map(|refused| refused.status);
                    // 409 is retried: the subscription of the lost session may still exist under
                    // the same name.
                    if let Some(400..=408 | 410..=428 | 430..=499) = refused {
                        return Err(e);
                    }
                }
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    async fn follow(&mut self, mut deliveries: DeliveryStream, stop: &mut StopSignals) -> Result<SessionEnd> {
        let answerer = Arc::new(DeliveryHandler::new(
            self.arm.clone(),
            self.forward.clone(),
            &deliveries.introduction.token,
        ));
        let mut under_way = JoinSet::new();
        self.count.begin_again();
        let ended = loop {
            if self.count.is_complete() {
                break SessionEnd::Well;
            }
            tokio::select! {
                biased;
                () = stop.asked() => break SessionEnd::Well,
                Some(done) = under_way.join_next() => {
                    if !self.note(done.context("an answer panicked")?)? {
                        break SessionEnd::Well;
                    }
                }
                heard = deliveries.next(), if under_way.len() < AT_ONCE_MAX => match heard {
                    StreamItem::Delivery(mut delivery) => {
                        let events = print::events(&delivery).len();
                        let wanted = self.count.take(events);
                        if wanted == 0 && events > 0 {
                            // Unwanted deliveries are not answered: they stay with the server.
                            continue;
                        }
                        // Only the first events of the last batch are wanted. The batch is not
                        // reported as delivered, since the rest of it was not received.
                        let is_whole = wanted == events;
                        if !is_whole {
                            delivery.body = print::first_events(&delivery, wanted);
                        }
                        // Without forwarding, a delivery has arrived once it is printed.
                        if self.forward.is_none() && !self.show(&delivery, None)? {
                            break SessionEnd::Well;
                        }
                        let answerer = answerer.clone();
                        under_way.spawn(async move { answerer.handle_delivery(delivery, is_whole).await });
                    }
                    StreamItem::Ended(reason) if reason == "deleted" => break SessionEnd::Deleted,
                    StreamItem::Ended(reason) => break SessionEnd::Lost(reason),
                    StreamItem::Nothing(why) => break SessionEnd::Lost(why),
                },
            }
        };
        if let SessionEnd::Well = ended {
            let last = async {
                while let Some(done) = under_way.join_next().await {
                    let shown = done
                        .context("an answer panicked")
                        .and_then(|done| self.note(done))?;
                    if !shown {
                        break;
                    }
                }
                anyhow::Ok(())
            };
            tokio::select! {
                biased;
                () = stop.asked() => {}
                done = timeout(LAST_ANSWERS, last) => done.unwrap_or(Ok(()))?,
            }
        }
        Ok(ended)
    }

    /// Reports on a handled delivery. Returns whether the output is still read.
    fn note(&mut self, (delivery, outcome): (SessionDelivery, HandledDelivery)) -> Result<bool> {
        if let Some(trouble) = &outcome.trouble {
            eprintln!("delivery {}: {trouble}", delivery.number);
        }
        if let Some(forwarded) = &outcome.forwarded {
            self.forwards.made += 1;
            self.forwards.failed += u64::from(!forwarded.is_success());
        }
        match &self.forward {
            Some(_) => self.show(&delivery, Some(&outcome)),
            None => Ok(true),
        }
    }

    fn show(&mut self, delivery: &SessionDelivery, outcome: Option<&HandledDelivery>) -> Result<bool> {
        let events = print::events(delivery);
        let text = self.screen.lines(delivery, &events, outcome, SystemClock.now());
        self.count.came += events.len() as u64;
        match print::write(&text) {
            Ok(()) => Ok(true),
            // A closed pipe, as with `head`, is not an error.
            Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
            Err(e) => Err(e).context("printing"),
        }
    }
}

/// Parses and checks the URL to forward to.
fn forward_url(text: &str) -> Result<http::Uri> {
    let refused = || {
        UsageError::new(format!(
            "--forward: {text:?} is not a URL such as http://127.0.0.1:3000/hook"
        ))
    };
    let uri: http::Uri = text.parse().map_err(|_| refused())?;
    let known = matches!(uri.scheme_str(), Some("http" | "https"));
    match uri.authority() {
        Some(authority) if known && !authority.as_str().contains('@') => Ok(uri),
        _ => Err(refused().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_events_are_taken_than_are_wanted() {
        let mut count = WantedEvents::up_to(Some(5));
        assert_eq!([count.take(3), count.take(4), count.take(1)], [3, 2, 0]);
        assert!(!count.is_complete());
        count.came = 3;
        // Deliveries in progress are lost with the connection.
        count.begin_again();
        assert_eq!(count.take(9), 2);
        count.came = 5;
        assert!(count.is_complete());
        assert_eq!(WantedEvents::up_to(None).take(usize::MAX), usize::MAX);
    }
}
