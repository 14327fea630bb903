//! `postrider demo`: the real server on a fast clock, a receiver with every kind of trouble, and a
//! stream of events between them, displayed while they are delivered, retried and given up.

mod clock;
mod scenario;
mod receiver;
mod publisher;
mod counts;
mod messages;
mod screen;

use crate::config::{self, ServeFlags};
use crate::private_files;
use crate::serve::{self, RunningServer, TimeSource};
use anyhow::{Context, Result, ensure};
use clock::FastClock;
use counts::{DemoCounts, SubscriptionGauges};
use messages::MessageLog;
use postrider_core::time::Clock;
use postrider_engine::clock::SystemClock;
use publisher::{AcceptedCounts, DemoPublisher};
use receiver::{DemoReceiver, ReceivedRequest};
use scenario::DemoScenario;
use screen::{DemoFrame, DemoScreen, DemoSummary};
use std::future::Future;
use std::io::{IsTerminal, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

const REFRESH_EVERY: Duration = Duration::from_millis(125);
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// Pause between the end of one followed event and the next at the same endpoint.
const FOLLOW_PAUSE: Duration = Duration::from_millis(2500);
/// Deliveries still open this long after the end of publishing are counted as unfinished.
const PATIENCE: Duration = Duration::from_secs(45);
/// How long the numbers may take to add up: a delivery that is being settled is counted twice.
const SETTLING: Duration = Duration::from_secs(3);
/// Requests that the receiver has seen and the display has not.
const SEEN_MAX: usize = 16_384;
/// Grace period on the fast clock, in which attempts in flight end in a real moment.
const GRACE: Duration = Duration::from_secs(3600);

#[derive(clap::Args, Clone, Debug)]
pub struct DemoArgs {
    /// Seconds that pass for the server in one real second
    // The server waits 30 s for an answer and 10 s for a connection: at 300, a tenth and a
    // thirtieth of a real second, plenty on loopback. Much faster, and a busy machine would make
    // healthy answers look late.
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub speed: u32,
    /// Real seconds to publish for
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub secs: u64,
    /// Events to publish per real second
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub rate: u32,
    /// Keep the server's directory and print its path
    #[arg(long)]
    pub keep: bool,
}

impl DemoArgs {
    fn events_max(&self) -> u64 {
        self.secs * u64::from(self.rate)
    }
}

pub fn run(args: &DemoArgs) -> Result<()> {
    let out = std::io::stdout();
    let variable = |name: &str| {
        std::env::vars_os()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value)
    };
    let live = out.is_terminal() && variable("TERM").is_some_and(|term| term != "dumb");
    let color = live && variable("NO_COLOR").is_none_or(|value| value.is_empty());
    // Logging stays off: its lines would tear the table, and failures show in the numbers.
    serve::runtime(None)?.block_on(async {
        let mut stop = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
        let interrupted = async {
            tokio::select! {
                _ = stop.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        let screen = DemoScreen::new(out, live, color);
        let tally = play(args, screen, interrupted).await?;
        ensure!(tally.adds_up(), "the deliveries do not add up");
        Ok(())
    })
}

/// Starts everything, displays it until it is at rest, and stops it. Returns the final numbers.
async fn play<W: Write>(
    args: &DemoArgs,
    screen: DemoScreen<W>,
    interrupted: impl Future<Output = ()>,
) -> Result<DemoCounts> {
    let scene = DemoScenario::of(args);
    let mut directory = tempfile::Builder::new().prefix("postrider-demo-").tempdir()?;
    directory.disable_cleanup(args.keep);
    let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
    let key = postrider_wire::auth::fresh_key().expose().to_owned();
    let text = scene.config(&key, listener.local_addr()?);
    let loaded = configure(directory.path(), &text)?;

    let clock = Arc::new(FastClock::new(SystemClock.now(), args.speed));
    let running = RunningServer::start(&loaded, TimeSource::Of(clock.clone())).await?;
    let server = running.http.context("the server does not listen")?;
    let gauges = SubscriptionGauges::new(running.server.engine.clone())?;

    let (seen_tx, seen) = mpsc::channel(SEEN_MAX);
    let (published_tx, published) = watch::channel(AcceptedCounts::default());
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let receiver = Arc::new(DemoReceiver {
        scene,
        clock: clock.clone(),
        seen: seen_tx,
    });
    tasks.spawn(receiver.serve(listener));
    let publisher = DemoPublisher {
        server,
        key,
        rate: args.rate,
        events_max: args.events_max(),
        clock: clock.clone(),
        published: published_tx,
    };
    tasks.spawn(publisher.run(stop.clone()));

    let mut show = DemoDisplay {
        args,
        clock,
        started: Instant::now(),
        gauges,
        published,
        seen,
        story: MessageLog::new(scene, FOLLOW_PAUSE * args.speed),
        screen,
        progress_at: Instant::now() + PROGRESS_EVERY,
    };
    show.screen.introduce(&scene)?;
    show.until_rest(&mut tasks, stop, interrupted).await?;
    let tally = show.settled().await;
    show.sum_up(&tally, &running)?;
    if args.keep {
        show.screen
            .add_line(&format!("Kept: {}", directory.path().display()))?;
    }
    running.stop(GRACE).await?;
    tasks.shutdown().await;
    Ok(tally)
}

/// Loads a configuration that keeps everything in one directory, listens on a free port and ignores
/// the environment.
fn configure(directory: &Path, text: &str) -> Result<config::LoadedConfig> {
    let file = directory.join("postrider.toml");
    private_files::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
    let flags = ServeFlags {
        config: Some(file),
        data_dir: Some(directory.join("data")),
        http: Some("127.0.0.1:0".into()),
        https: Some("off".into()),
        ..ServeFlags::default()
    };
    Ok(config::load(&flags, [])?)
}

/// State of the display loop.
struct DemoDisplay<'a, W: Write> {
    args: &'a DemoArgs,
    clock: Arc<FastClock>,
    started: Instant,
    gauges: SubscriptionGauges,
    published: watch::Receiver<AcceptedCounts>,
    seen: mpsc::Receiver<ReceivedRequest>,
    story: MessageLog,
    screen: DemoScreen<W>,
    progress_at: Instant,
}

impl<W: Write> DemoDisplay<'_, W> {
    /// Returns when every delivery has ended, at the deadline, or soon after an interruption.
    async fn until_rest(
        &mut self,
        tasks: &mut JoinSet<Result<()>>,
        stop: CancellationToken,
        interrupted: impl Future<Output = ()>,
    ) -> Result<()> {
        let mut interrupted = std::pin::pin!(interrupted);
        let mut refresh = refreshes();
        let deadline = self.started + Duration::from_secs(self.args.secs) + PATIENCE;
        loop {
            tokio::select! {
                biased;
                () = &mut interrupted, if !stop.is_cancelled() => stop.cancel(),
                // Only the publisher ends without an error.
                Some(ended) = tasks.join_next() => ended.context("a part of the demo panicked")??,
                _ = refresh.tick() => {}
            }
            let tally = self.look()?;
            let enough = stop.is_cancelled() || tally.at_rest();
            if tally.published.over && enough || Instant::now() >= deadline {
                return Ok(());
            }
        }
    }

    /// Reads the server's numbers, then what the receiver has seen.
    fn read(&mut self) -> DemoCounts {
        let mut tally = self.gauges.read(*self.published.borrow());
        while let Ok(seen) = self.seen.try_recv() {
            self.story.observe(&seen);
        }
        for row in &mut tally.rows {
            row.accepted = self.story.accepted(row.part);
        }
        self.story.compare(&tally, self.clock.elapsed());
        tally
    }

    /// Reads everything and displays it.
    fn look(&mut self) -> Result<DemoCounts> {
        let tally = self.read();
        let frame = DemoFrame {
            tally: &tally,
            told: &self.story.told,
            now: self.clock.now(),
            after: self.clock.elapsed(),
            real: self.started.elapsed(),
            speed: self.args.speed,
            events_max: self.args.events_max(),
        };
        if self.screen.is_live() {
            self.screen.draw(&frame)?;
        } else {
            self.screen.add_happenings(frame.told)?;
            if Instant::now() >= self.progress_at {
                self.progress_at += PROGRESS_EVERY;
                self.screen.add_progress(&frame)?;
            }
        }
        Ok(tally)
    }

    /// The numbers once they add up, or as they are at the deadline.
    async fn settled(&mut self) -> DemoCounts {
        let deadline = Instant::now() + SETTLING;
        let mut refresh = refreshes();
        loop {
            refresh.tick().await;
            let tally = self.read();
            if tally.adds_up() || Instant::now() >= deadline {
                return tally;
            }
        }
    }

    fn sum_up(&mut self, tally: &DemoCounts, running: &RunningServer) -> Result<()> {
        let log = running.server.engine.log().health();
        self.screen.print_summary(&DemoSummary {
            tally,
            after: self.clock.elapsed(),
            real: self.started.elapsed(),
            segments: log.segments,
            bytes: log.bytes,
        })?;
        Ok(())
    }
}

fn refreshes() -> tokio::time::Interval {
    let mut refresh = tokio::time::interval(REFRESH_EVERY);
    refresh.set_missed_tick_behavior(MissedTickBehavior::Delay);
    refresh
}

#[cfg(test)]
mod tests {
    use super::scenario::DemoSubscription;
    use super::*;

    // An end-to-end run with few events and short waits: real sockets, real files, a fast clock.
    #[test]
    fn every_delivery_comes_to_its_end_and_the_sums_add_up() {
        let args = DemoArgs {
            speed: 300,
            secs: 1,
            rate: 40,
            keep: false,
        };
        let mut out = Vec::new();
        let screen = DemoScreen::new(&mut out, false, false);
        let showing = play(&args, screen, std::future::pending());
        let tally = serve::runtime(Some(2)).unwrap().block_on(showing).unwrap();
        let text = String::from_utf8(out).unwrap();

        assert!(tally.adds_up(), "{text}");
        assert!(tally.at_rest(), "{text}");
        assert_eq!(tally.published.events, 40, "{text}");
        assert!(
            tally.sum(|row| row.failed) > 0 && text.contains("attempt 2"),
            "a retry: {text}"
        );
        assert!(
            tally.sum(|row| row.dead_lettered_total()) > 0,
            "a dead letter: {text}"
        );
        assert!(tally.sum(|row| row.dropped_total()) > 0, "a drop: {text}");
        assert_eq!(
            tally.rows[DemoSubscription::Healthy as usize].delivered,
            40,
            "{text}"
        );
        assert!(text.contains("✓ adds up") && !text.contains('\x1b'), "{text}");
    }
}
