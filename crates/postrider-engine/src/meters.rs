//! Meters: rates and latencies minute by minute, updated as things happen so that nothing has to be
//! scanned for them.
//!
//! A meter takes no memory until something is noted on it. Only minutes in which something happened
//! are kept, so that a clock may jump by years at no cost.

use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// Minutes that are kept for the whole engine …
pub const MINUTES_OF_ALL: usize = 24 * 60;
/// … and for one topic or subscription, of which there may be very many.
pub const MINUTES_OF_ONE: usize = 3 * 60;
/// The minutes that percentiles cover by default, the present one included.
pub const LATENCY_MINUTES: usize = 15;

/// Causes of failures that are counted separately per minute; further ones are counted without
/// outcome and status.
const CAUSES_PER_MINUTE_MAX: usize = 8;

/// Causes of one minute that are restored from an earlier process: those counted separately, and
/// one without details for each effect and reason.
const CAUSES_RESTORED_MAX: usize = CAUSES_PER_MINUTE_MAX + 1 + 2 * GiveUpReason::ALL.len();

const NANOS_PER_MINUTE: i64 = 60_000_000_000;
/// Rates are counted in steps, so that they follow quickly and fall to zero within a minute.
const NANOS_PER_STEP: i64 = 5_000_000_000;
const STEPS_PER_MINUTE: usize = 12;
/// How late a minute may come: lanes read the clock before they note. A greater difference means
/// that the clock was set back.
const MINUTES_LATE_MAX: i64 = 2;

/// Upper bounds of the end-to-end latency histogram, in seconds, for Prometheus.
pub const LATENCY_BOUNDS: [f64; 17] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 21600.0,
    86400.0,
];
/// Upper bounds of the request duration histogram, in seconds.
pub const DURATION_BOUNDS: [f64; 15] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];

/// The numbers of the whole engine, of a topic or of a subscription.
#[derive(Debug)]
pub struct Meter {
    minutes_max: usize,
    kept: Mutex<Option<Box<MeterData>>>,
}

/// A meter of one topic or subscription.
impl Default for Meter {
    fn default() -> Meter {
        Meter {
            minutes_max: MINUTES_OF_ONE,
            kept: Mutex::new(None),
        }
    }
}

/// The result of one delivery request, or of settling deliveries without sending them.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeterNote<'a> {
    pub attempt: Option<AttemptMeasurement>,
    /// The end-to-end latencies of delivered events, with the number of events for each.
    pub delivered: &'a [(Duration, usize)],
    /// Events that were given up, by cause.
    pub given_up: &'a [(FailureCause, usize)],
}

/// Why something failed, and the effect on the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FailureCause {
    pub effect: FailureEffect,
    /// The outcome of the attempt; for an event that was given up, of its last attempt if there was
    /// one.
    pub outcome: Option<Outcome>,
    pub status: Option<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FailureEffect {
    /// A request failed, whatever followed for its events.
    AttemptFailed,
    DeadLettered(GiveUpReason),
    Dropped(GiveUpReason),
}

impl FailureCause {
    fn unspecific(self) -> FailureCause {
        FailureCause {
            outcome: None,
            status: None,
            ..self
        }
    }
}

/// The outcomes of events and requests within a number of minutes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentCounts {
    /// Requests, and the failed ones among them.
    pub attempts: u64,
    pub failed: u64,
    /// Events.
    pub delivered: u64,
    pub dead_lettered: u64,
    pub dropped: u64,
    pub causes: BTreeMap<FailureCause, u64>,
}

impl RecentCounts {
    pub fn add(&mut self, other: &RecentCounts) {
        self.attempts += other.attempts;
        self.failed += other.failed;
        self.delivered += other.delivered;
        self.dead_lettered += other.dead_lettered;
        self.dropped += other.dropped;
        for (cause, count) in &other.causes {
            *self.causes.entry(*cause).or_default() += count;
        }
    }

    /// Events that reached an end.
    pub fn ended(&self) -> u64 {
        self.delivered + self.dead_lettered + self.dropped
    }
}

/// The measurements of one delivery request.
#[derive(Clone, Copy, Debug)]
pub struct AttemptMeasurement {
    pub outcome: Outcome,
    pub status: Option<u16>,
    pub took: Duration,
    /// How long the request's first event had waited, if this was its first attempt.
    pub waited: Option<Duration>,
}

#[derive(Debug, Default)]
struct MeterData {
    steps: [RateStep; STEPS_PER_MINUTE + 1],
    /// Ordered by time, without empty ones.
    minutes: VecDeque<MeterMinute>,
    totals: MeterTotals,
}

#[derive(Clone, Copy, Debug, Default)]
struct RateStep {
    number: i64,
    published: u32,
    delivered: u32,
    failed: u32,
}

/// A meter's counts of one minute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeterMinute {
    /// Minutes since 1970.
    pub number: i64,
    pub published: u64,
    pub delivered: u64,
    pub attempts: u32,
    pub failed: u32,
    pub dead_lettered: u32,
    pub dropped: u32,
    pub causes: Vec<(FailureCause, u32)>,
    pub latency: MinuteLatencies,
}

impl MeterMinute {
    /// Adds the counts of an earlier process for the same minute.
    fn absorb(&mut self, earlier: &MeterMinute) {
        self.published += earlier.published;
        self.delivered += earlier.delivered;
        let counts = [
            (&mut self.attempts, earlier.attempts),
            (&mut self.failed, earlier.failed),
            (&mut self.dead_lettered, earlier.dead_lettered),
            (&mut self.dropped, earlier.dropped),
        ];
        for (count, more) in counts {
            *count = count.saturating_add(more);
        }
        for (cause, count) in earlier.causes.iter().take(CAUSES_RESTORED_MAX) {
            self.add_cause(*cause, *count);
        }
        for (stretch, count) in &earlier.latency.0 {
            if usize::from(*stretch) < STRETCHES {
                self.latency.add_to(*stretch, *count);
            }
        }
    }

    fn failed_by(&mut self, cause: FailureCause, count: usize) {
        self.add_cause(cause, count as u32);
        match cause.effect {
            FailureEffect::AttemptFailed => self.failed += count as u32,
            FailureEffect::DeadLettered(_) => self.dead_lettered += count as u32,
            FailureEffect::Dropped(_) => self.dropped += count as u32,
        }
    }

    fn add_cause(&mut self, cause: FailureCause, count: u32) {
        let full = self.causes.len() >= CAUSES_PER_MINUTE_MAX;
        let known = |cause: FailureCause, causes: &[(FailureCause, u32)]| {
            causes.iter().position(|(known, _)| *known == cause)
        };
        let cause = match known(cause, &self.causes) {
            None if full => cause.unspecific(),
            _ => cause,
        };
        match known(cause, &self.causes) {
            Some(at) => self.causes[at].1 = self.causes[at].1.saturating_add(count),
            None => self.causes.push((cause, count)),
        }
    }
}

/// Totals since the start, for exporters that keep time series themselves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MeterTotals {
    /// From acceptance to delivery, for each event.
    pub latency: Histogram<{ LATENCY_BOUNDS.len() }>,
    /// For each request.
    pub duration: Histogram<{ DURATION_BOUNDS.len() }>,
    /// The requests by outcome.
    pub outcomes: [u64; Outcome::ALL.len()],
    /// The summed durations of successful and of failed requests.
    pub succeeded: Duration,
    pub failed: Duration,
    /// Requests that were a first attempt, and the summed waits of their events.
    pub first_attempts: u64,
    pub waited: Duration,
}

/// Counts by upper bound; the last one counts values beyond all bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram<const BOUNDS: usize> {
    pub counts: [u64; BOUNDS],
    pub beyond: u64,
    pub sum: Duration,
}

impl<const BOUNDS: usize> Default for Histogram<BOUNDS> {
    fn default() -> Self {
        Histogram {
            counts: [0; BOUNDS],
            beyond: 0,
            sum: Duration::ZERO,
        }
    }
}

impl<const BOUNDS: usize> Histogram<BOUNDS> {
    fn add(&mut self, bounds: &[f64; BOUNDS], took: Duration, count: usize) {
        let seconds = took.as_secs_f64();
        let at = bounds.partition_point(|bound| *bound < seconds);
        *self.counts.get_mut(at).unwrap_or(&mut self.beyond) += count as u64;
        self.sum = self.sum.saturating_add(times(took, count));
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().sum::<u64>() + self.beyond
    }

    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.beyond += other.beyond;
        self.sum = self.sum.saturating_add(other.sum);
    }
}

impl MeterTotals {
    pub fn merge(&mut self, other: &MeterTotals) {
        self.latency.merge(&other.latency);
        self.duration.merge(&other.duration);
        for (count, more) in self.outcomes.iter_mut().zip(&other.outcomes) {
            *count += more;
        }
        self.succeeded = self.succeeded.saturating_add(other.succeeded);
        self.failed = self.failed.saturating_add(other.failed);
        self.first_attempts += other.first_attempts;
        self.waited = self.waited.saturating_add(other.waited);
    }
}

/// Events and failed requests per second, over the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EventRates {
    pub published: f64,
    pub delivered: f64,
    pub failed: f64,
}

/// Latency percentiles of the events delivered in a period. Accurate to an eighth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyQuantiles {
    pub p50: Duration,
    pub p95: Duration,
    pub p99: Duration,
}

/// Latency counts by bucket number, from which percentiles are computed. Counts of several meters
/// can be added up, percentiles cannot.
pub type LatencyBucketCounts = Vec<(u16, u64)>;

impl LatencyQuantiles {
    /// None without any counts. Buckets may come in any order, and more than once.
    pub fn of(stretches: &[(u16, u64)]) -> Option<LatencyQuantiles> {
        let mut all = LatencyBuckets::default();
        for (stretch, count) in stretches {
            if let Some(known) = all.0.get_mut(usize::from(*stretch)) {
                *known = known.saturating_add(*count);
            }
        }
        all.percentiles()
    }
}

/// The counts of one minute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MinuteTally {
    /// Minutes since 1970.
    pub number: i64,
    pub published: u64,
    pub delivered: u64,
    pub failed: u64,
    pub dead_lettered: u64,
    pub dropped: u64,
    pub latency: LatencyBucketCounts,
}

/// The counts of consecutive minutes, the last of them the present one.
#[derive(Clone, Debug, PartialEq)]
pub struct MinuteSeries {
    /// When the first minute began.
    pub start: Timestamp,
    pub published: Vec<u64>,
    pub delivered: Vec<u64>,
    pub failed: Vec<u64>,
    pub dead_lettered: Vec<u64>,
    pub dropped: Vec<u64>,
    /// None where nothing was delivered.
    pub latency: Vec<Option<LatencyQuantiles>>,
}

impl MinuteSeries {
    /// The series of the minutes up to `now`. Tallies of the same minute, from several meters, are
    /// added up.
    pub fn of(now: Timestamp, minutes: usize, tallies: &[MinuteTally]) -> MinuteSeries {
        let last = now.nanos().div_euclid(NANOS_PER_MINUTE);
        let first = last - minutes as i64 + 1;
        let mut series = MinuteSeries {
            start: Timestamp::from_nanos(first * NANOS_PER_MINUTE),
            published: vec![0; minutes],
            delivered: vec![0; minutes],
            failed: vec![0; minutes],
            dead_lettered: vec![0; minutes],
            dropped: vec![0; minutes],
            latency: vec![None; minutes],
        };
        let mut stretches: Vec<LatencyBucketCounts> = vec![Vec::new(); minutes];
        for tally in tallies {
            let at = usize::try_from(tally.number - first)
                .ok()
                .filter(|at| *at < minutes);
            let Some(at) = at else { continue };
            series.published[at] += tally.published;
            series.delivered[at] += tally.delivered;
            series.failed[at] += tally.failed;
            series.dead_lettered[at] += tally.dead_lettered;
            series.dropped[at] += tally.dropped;
            stretches[at].extend(&tally.latency);
        }
        for (latency, stretches) in series.latency.iter_mut().zip(&stretches) {
            *latency = LatencyQuantiles::of(stretches);
        }
        series
    }
}

impl Meter {
    /// A meter of the whole engine.
    pub fn of_all() -> Meter {
        Meter {
            minutes_max: MINUTES_OF_ALL,
            ..Meter::default()
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<MeterData>>> {
        self.kept.lock().expect("no panic holds it")
    }

    /// Counts accepted events.
    pub fn published(&self, now: Timestamp, events: usize) {
        let mut kept = self.lock();
        let kept = kept.get_or_insert_default();
        kept.step(now).published += events as u32;
        kept.minute(now, self.minutes_max).published += events as u64;
    }

    pub fn note(&self, now: Timestamp, noted: &MeterNote<'_>) {
        let mut kept = self.lock();
        let kept = kept.get_or_insert_default();
        let delivered: usize = noted.delivered.iter().map(|(_, count)| count).sum();
        let failed = u32::from(noted.attempt.is_some_and(|one| one.outcome != Outcome::Success));
        let step = kept.step(now);
        step.delivered += delivered as u32;
        step.failed += failed;
        let minute = kept.minute(now, self.minutes_max);
        minute.delivered += delivered as u64;
        if let Some(attempt) = noted.attempt {
            minute.attempts += 1;
            if attempt.outcome != Outcome::Success {
                let cause = FailureCause {
                    effect: FailureEffect::AttemptFailed,
                    outcome: Some(attempt.outcome),
                    status: attempt.status,
                };
                minute.failed_by(cause, 1);
            }
        }
        for (cause, count) in noted.given_up {
            minute.failed_by(*cause, *count);
        }
        for (latency, count) in noted.delivered {
            minute.latency.add(*latency, *count);
        }
        for (latency, count) in noted.delivered {
            kept.totals.latency.add(&LATENCY_BOUNDS, *latency, *count);
        }
        if let Some(attempt) = noted.attempt {
            kept.totals.attempted(attempt);
        }
    }

    /// A request was refused as a whole and its events are sent again at once. Nothing is known of the events yet, so
    /// that the request is in the totals alone: neither health nor charts take it for a failure.
    pub fn note_split(&self, attempt: AttemptMeasurement) {
        let mut kept = self.lock();
        kept.get_or_insert_default().totals.attempted(attempt);
    }

    pub fn rates(&self, now: Timestamp) -> EventRates {
        self.lock()
            .as_ref()
            .map_or(EventRates::default(), |kept| kept.rates(now))
    }

    /// The latencies of the last minutes, the present one included; none if nothing was delivered
    /// in them.
    pub fn latency(&self, now: Timestamp, minutes: usize) -> Option<LatencyQuantiles> {
        LatencyQuantiles::of(&self.stretches(now, minutes))
    }

    /// The same as counts by bucket.
    pub fn stretches(&self, now: Timestamp, minutes: usize) -> LatencyBucketCounts {
        let kept = self.lock();
        let last = now.nanos().div_euclid(NANOS_PER_MINUTE);
        let mut all = LatencyBuckets::default();
        for minute in kept
            .iter()
            .flat_map(|kept| kept.between(last - minutes as i64 + 1, last))
        {
            all.add(&minute.latency);
        }
        let taken = all.0.iter().enumerate().filter(|(_, count)| **count > 0);
        taken.map(|(stretch, count)| (stretch as u16, *count)).collect()
    }

    /// The last minutes in which something happened, the present one included.
    pub fn tallies(&self, now: Timestamp, minutes: usize) -> Vec<MinuteTally> {
        let last = now.nanos().div_euclid(NANOS_PER_MINUTE);
        let kept = self.lock();
        let minutes = kept
            .iter()
            .flat_map(|kept| kept.between(last - minutes as i64 + 1, last));
        let tally = |minute: &MeterMinute| MinuteTally {
            number: minute.number,
            published: minute.published,
            delivered: minute.delivered,
            failed: u64::from(minute.failed),
            dead_lettered: u64::from(minute.dead_lettered),
            dropped: u64::from(minute.dropped),
            latency: minute
                .latency
                .0
                .iter()
                .map(|(stretch, count)| (*stretch, u64::from(*count)))
                .collect(),
        };
        minutes.map(tally).collect()
    }

    /// The outcomes of the last minutes, the present one included.
    pub fn recent(&self, now: Timestamp, minutes: usize) -> RecentCounts {
        let last = now.nanos().div_euclid(NANOS_PER_MINUTE);
        let kept = self.lock();
        let mut recent = RecentCounts::default();
        for minute in kept
            .iter()
            .flat_map(|kept| kept.between(last - minutes as i64 + 1, last))
        {
            recent.attempts += u64::from(minute.attempts);
            recent.failed += u64::from(minute.failed);
            recent.delivered += minute.delivered;
            recent.dead_lettered += u64::from(minute.dead_lettered);
            recent.dropped += u64::from(minute.dropped);
            for (cause, count) in &minute.causes {
                *recent.causes.entry(*cause).or_default() += u64::from(*count);
            }
        }
        recent
    }

    pub fn series(&self, now: Timestamp, minutes: usize) -> MinuteSeries {
        MinuteSeries::of(now, minutes, &self.tallies(now, minutes))
    }

    /// The last minutes in which something happened, as they are stored.
    pub fn minutes(&self, now: Timestamp) -> Vec<MeterMinute> {
        let last = now.nanos().div_euclid(NANOS_PER_MINUTE);
        let kept = self.lock();
        let minutes = kept.iter().flat_map(|kept| {
            let first = last.saturating_sub(self.minutes_max as i64) + 1;
            kept.between(first, last)
        });
        minutes.cloned().collect()
    }

    /// The last minute in which something happened, in minutes since 1970.
    pub fn last_minute(&self) -> Option<i64> {
        self.lock().as_ref()?.minutes.back().map(|minute| minute.number)
    }

    /// Adds minutes of an earlier process. Minutes that are too old, or in the future, are left
    /// out.
    pub fn restore(&self, now: Timestamp, minutes: &[MeterMinute]) {
        let last = now.nanos().div_euclid(NANOS_PER_MINUTE);
        let first = last.saturating_sub(self.minutes_max as i64) + 1;
        let minutes: Vec<&MeterMinute> = minutes
            .iter()
            .filter(|minute| (first..=last).contains(&minute.number))
            .collect();
        if minutes.is_empty() {
            return;
        }
        let mut kept = self.lock();
        let kept = kept.get_or_insert_default();
        for earlier in minutes {
            let at = kept
                .minutes
                .partition_point(|minute| minute.number < earlier.number);
            if kept
                .minutes
                .get(at)
                .is_none_or(|minute| minute.number != earlier.number)
            {
                let minute = MeterMinute {
                    number: earlier.number,
                    ..MeterMinute::default()
                };
                kept.minutes.insert(at, minute);
            }
            kept.minutes[at].absorb(earlier);
        }
    }

    /// None while nothing was noted.
    pub fn totals(&self) -> Option<MeterTotals> {
        self.lock().as_ref().map(|kept| kept.totals.clone())
    }

    /// Adds the totals of a meter that is about to be dropped.
    pub fn absorb(&self, other: &Meter) {
        if let Some(more) = other.totals() {
            self.lock().get_or_insert_default().totals.merge(&more);
        }
    }
}

impl MeterTotals {
    fn attempted(&mut self, attempt: AttemptMeasurement) {
        let AttemptMeasurement {
            outcome,
            took,
            waited,
            ..
        } = attempt;
        self.duration.add(&DURATION_BOUNDS, took, 1);
        self.outcomes[usize::from(outcome.code())] += 1;
        let sum = match outcome {
            Outcome::Success => &mut self.succeeded,
            _ => &mut self.failed,
        };
        *sum = sum.saturating_add(took);
        if let Some(waited) = waited {
            self.first_attempts += 1;
            self.waited = self.waited.saturating_add(waited);
        }
    }
}

impl MeterData {
    fn step(&mut self, now: Timestamp) -> &mut RateStep {
        let number = now.nanos().div_euclid(NANOS_PER_STEP);
        let at = number.rem_euclid(self.steps.len() as i64) as usize;
        let step = &mut self.steps[at];
        if step.number != number {
            *step = RateStep {
                number,
                ..RateStep::default()
            };
        }
        step
    }

    fn rates(&self, now: Timestamp) -> EventRates {
        let present = now.nanos().div_euclid(NANOS_PER_STEP);
        let oldest = present - STEPS_PER_MINUTE as i64;
        let into = now.nanos().rem_euclid(NANOS_PER_STEP) as f64 / NANOS_PER_STEP as f64;
        let mut rates = EventRates::default();
        for step in &self.steps {
            // A part of the oldest step lies more than a minute back.
            let share = match step.number {
                number if number == oldest => 1.0 - into,
                number if number > oldest && number <= present => 1.0,
                _ => continue,
            };
            rates.published += share * f64::from(step.published);
            rates.delivered += share * f64::from(step.delivered);
            rates.failed += share * f64::from(step.failed);
        }
        for rate in [&mut rates.published, &mut rates.delivered, &mut rates.failed] {
            *rate /= 60.0;
        }
        rates
    }

    fn minute(&mut self, now: Timestamp, minutes_max: usize) -> &mut MeterMinute {
        let number = now.nanos().div_euclid(NANOS_PER_MINUTE);
        let minutes = &mut self.minutes;
        while minutes
            .back()
            .is_some_and(|last| last.number > number + MINUTES_LATE_MAX)
        {
            minutes.pop_back();
        }
        let mut at = minutes.len();
        while at > 0 && minutes[at - 1].number > number {
            at -= 1;
        }
        if at > 0 && minutes[at - 1].number == number {
            return &mut minutes[at - 1];
        }
        // Minutes that are too old to be shown are removed.
        while minutes
            .front()
            .is_some_and(|first| first.number <= number - minutes_max as i64)
        {
            minutes.pop_front();
            at -= 1;
        }
        minutes.insert(
            at,
            MeterMinute {
                number,
                ..MeterMinute::default()
            },
        );
        &mut minutes[at]
    }

    fn between(&self, first: i64, last: i64) -> impl Iterator<Item = &MeterMinute> {
        let from = self.minutes.partition_point(|minute| minute.number < first);
        let to = self.minutes.partition_point(|minute| minute.number <= last);
        self.minutes.range(from..to.max(from))
    }
}

/// Latency counts by bucket number, without empty buckets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MinuteLatencies(pub Vec<(u16, u32)>);

impl MinuteLatencies {
    fn add(&mut self, took: Duration, count: usize) {
        self.add_to(stretch_of(took), count as u32);
    }

    fn add_to(&mut self, stretch: u16, count: u32) {
        match self.0.iter_mut().find(|(known, _)| *known == stretch) {
            Some((_, known)) => *known = known.saturating_add(count),
            None => self.0.push((stretch, count)),
        }
    }
}

/// Latency counts by bucket number, with empty buckets, added up.
struct LatencyBuckets([u64; STRETCHES]);

impl Default for LatencyBuckets {
    fn default() -> LatencyBuckets {
        LatencyBuckets([0; STRETCHES])
    }
}

impl LatencyBuckets {
    fn add(&mut self, latencies: &MinuteLatencies) {
        for (stretch, count) in &latencies.0 {
            self.0[usize::from(*stretch)] += u64::from(*count);
        }
    }

    fn percentiles(&self) -> Option<LatencyQuantiles> {
        let all: u64 = self.0.iter().sum();
        (all > 0).then(|| LatencyQuantiles {
            p50: self.quantile(all, 0.50),
            p95: self.quantile(all, 0.95),
            p99: self.quantile(all, 0.99),
        })
    }

    /// Latencies are assumed to be spread evenly within a bucket.
    fn quantile(&self, all: u64, share: f64) -> Duration {
        let wanted = share * all as f64;
        let mut before = 0.0;
        for (stretch, count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            let count = *count as f64;
            if before + count >= wanted {
                let (from, to) = (begin_of(stretch), begin_of(stretch + 1));
                let micros = from + (to - from) * ((wanted - before) / count);
                return Duration::from_secs_f64(micros / 1e6);
            }
            before += count;
        }
        Duration::ZERO
    }
}

/// Bucket widths double every eight buckets; the first bucket is 64 µs wide.
const FIRST_STRETCH_BITS: u32 = 6;
const STRETCHES_PER_DOUBLING: usize = 8;
/// Enough buckets for 64 bits of microseconds.
const STRETCHES: usize = 1 + (u64::BITS - FIRST_STRETCH_BITS) as usize * STRETCHES_PER_DOUBLING;

fn stretch_of(took: Duration) -> u16 {
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    if micros < 1 << FIRST_STRETCH_BITS {
        return 0;
    }
    let bits = micros.ilog2();
    let part = (micros >> (bits - STRETCHES_PER_DOUBLING.ilog2())) as usize % STRETCHES_PER_DOUBLING;
    let doublings = (bits - FIRST_STRETCH_BITS) as usize;
    (1 + doublings * STRETCHES_PER_DOUBLING + part) as u16
}

/// The lower bound of a bucket, in microseconds.
fn begin_of(stretch: usize) -> f64 {
    let Some(beyond) = stretch.checked_sub(1) else {
        return 0.0;
    };
    let doublings = (beyond / STRETCHES_PER_DOUBLING) as u32 + FIRST_STRETCH_BITS;
    let part = (beyond % STRETCHES_PER_DOUBLING) as f64 / STRETCHES_PER_DOUBLING as f64;
    f64::powi(2.0, doublings as i32) * (1.0 + part)
}

fn times(took: Duration, count: usize) -> Duration {
    took.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: i64 = 1_700_000_040;

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_secs(START + secs)
    }

    fn millis(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn delivered(meter: &Meter, secs: i64, latency: Duration, count: usize) {
        let noted = MeterNote {
            delivered: &[(latency, count)],
            ..MeterNote::default()
        };
        meter.note(at(secs), &noted);
    }

    fn failed(meter: &Meter, secs: i64) {
        let attempt = AttemptMeasurement {
            outcome: Outcome::Busy,
            status: Some(503),
            took: millis(20),
            waited: Some(millis(5)),
        };
        let noted = MeterNote {
            attempt: Some(attempt),
            ..MeterNote::default()
        };
        meter.note(at(secs), &noted);
    }

    fn given_up(effect: FailureEffect, status: u16) -> FailureCause {
        FailureCause {
            effect,
            outcome: Some(Outcome::BadRequest),
            status: Some(status),
        }
    }

    #[track_caller]
    fn about(found: Duration, expected: Duration) {
        let (found, expected) = (found.as_secs_f64(), expected.as_secs_f64());
        assert!(
            (found - expected).abs() <= expected / 8.0 + 64e-6,
            "{found} s, not about {expected} s"
        );
    }

    #[test]
    fn stretches_follow_each_other_and_hold_what_they_should() {
        // Up to a thousand years; beyond that, floats are not precise enough for the check.
        for stretch in 0..400 {
            let (from, to) = (begin_of(stretch), begin_of(stretch + 1));
            assert!(from < to);
            let first = Duration::from_micros(from as u64);
            assert_eq!(usize::from(stretch_of(first)), stretch, "{first:?}");
            let last = Duration::from_micros(to as u64 - 1);
            assert_eq!(usize::from(stretch_of(last)), stretch, "{last:?}");
            assert!(stretch == 0 || to / from <= 1.125 + 1e-9);
        }
        assert_eq!(usize::from(stretch_of(Duration::MAX)), STRETCHES - 1);
    }

    #[test]
    fn percentiles_are_about_right() {
        let meter = Meter::default();
        assert_eq!(meter.latency(at(0), 15), None);
        for n in 1..=1000 {
            delivered(&meter, n / 100, millis(n as u64), 1);
        }
        let found = meter.latency(at(60), 15).unwrap();
        about(found.p50, millis(500));
        about(found.p95, millis(950));
        about(found.p99, millis(990));
        // Equal latencies stay equal, however many there are.
        let meter = Meter::default();
        delivered(&meter, 0, Duration::from_secs(86_400), 5000);
        let found = meter.latency(at(0), 1).unwrap();
        about(found.p50, Duration::from_secs(86_400));
        about(found.p99, Duration::from_secs(86_400));
        assert_eq!(meter.latency(at(60), 1), None, "that was another minute");
    }

    #[test]
    fn rates_are_of_the_last_minute() {
        let meter = Meter::default();
        assert_eq!(meter.rates(at(0)), EventRates::default());
        for secs in 0..120 {
            meter.published(at(secs), 10);
            delivered(&meter, secs, millis(1), 5);
            failed(&meter, secs);
        }
        let rates = meter.rates(at(120));
        assert_eq!((rates.published, rates.delivered, rates.failed), (10.0, 5.0, 1.0));
        // No further events: half of the rate is left after half a minute, and nothing after a
        // whole one.
        let half = meter.rates(at(150));
        assert_eq!(half.published, 5.0);
        assert_eq!(meter.rates(at(180)), EventRates::default());
        assert_eq!(meter.rates(at(86_400)), EventRates::default());
        // An event of this instant counts already.
        meter.published(at(86_400), 60);
        assert_eq!(meter.rates(at(86_400)).published, 1.0);
    }

    #[test]
    fn series_have_a_place_for_every_minute() {
        let meter = Meter::default();
        meter.published(at(0), 2);
        delivered(&meter, 59, millis(10), 2);
        delivered(&meter, 121, millis(80), 1);
        failed(&meter, 122);
        let given_up = [
            (
                given_up(FailureEffect::DeadLettered(GiveUpReason::BadRequest), 400),
                3,
            ),
            (given_up(FailureEffect::Dropped(GiveUpReason::BadRequest), 400), 4),
        ];
        let noted = MeterNote {
            given_up: &given_up,
            ..MeterNote::default()
        };
        meter.note(at(130), &noted);
        let series = meter.series(at(179), 4);
        assert_eq!(series.start, at(-60));
        assert_eq!(series.published, [0, 2, 0, 0]);
        assert_eq!(series.delivered, [0, 2, 0, 1]);
        assert_eq!(series.failed, [0, 0, 0, 1]);
        assert_eq!(series.dead_lettered, [0, 0, 0, 3]);
        assert_eq!(series.dropped, [0, 0, 0, 4]);
        assert_eq!(
            series.latency.iter().map(Option::is_some).collect::<Vec<_>>(),
            [false, true, false, true]
        );
        about(series.latency[3].unwrap().p50, millis(80));
        assert_eq!(meter.series(at(180), 1).delivered, [0]);
        assert_eq!(Meter::default().series(at(0), 2).published, [0, 0]);
    }

    #[test]
    fn recent_counts_have_the_causes_of_failures() {
        let meter = Meter::default();
        assert_eq!(meter.recent(at(0), 5), RecentCounts::default());
        let dropped = |secs: i64, status: u16| {
            let given_up = [(
                given_up(FailureEffect::Dropped(GiveUpReason::BadRequest), status),
                2,
            )];
            let noted = MeterNote {
                given_up: &given_up,
                ..MeterNote::default()
            };
            meter.note(at(secs), &noted);
        };
        dropped(0, 400);
        delivered(&meter, 60, millis(1), 3);
        failed(&meter, 60);
        dropped(240, 400);
        let all = meter.recent(at(299), 5);
        assert_eq!(
            (all.attempts, all.failed, all.delivered, all.dropped),
            (1, 1, 3, 4)
        );
        assert_eq!(all.ended(), 7);
        let busy = FailureCause {
            effect: FailureEffect::AttemptFailed,
            outcome: Some(Outcome::Busy),
            status: Some(503),
        };
        let refused = given_up(FailureEffect::Dropped(GiveUpReason::BadRequest), 400);
        assert_eq!(all.causes, BTreeMap::from([(busy, 1), (refused, 4)]));
        assert_eq!(meter.recent(at(300), 5).dropped, 2, "the first is too old");
        // Causes beyond the separate ones are still counted.
        for status in 400..500 {
            dropped(300, status);
        }
        let all = meter.recent(at(300), 1);
        assert_eq!((all.dropped, all.causes.values().sum::<u64>()), (200, 200));
        assert_eq!(all.causes.len(), CAUSES_PER_MINUTE_MAX + 1);
        let mut twice = all.clone();
        twice.add(&all);
        assert_eq!((twice.dropped, twice.causes[&refused]), (400, 4));
    }

    #[test]
    fn a_refused_batch_that_is_sent_again_in_halves_is_no_failure() {
        let meter = Meter::default();
        meter.note_split(AttemptMeasurement {
            outcome: Outcome::PayloadTooLarge,
            status: Some(413),
            took: millis(5),
            waited: None,
        });
        assert_eq!(meter.recent(at(0), 5), RecentCounts::default());
        assert_eq!(meter.rates(at(0)), EventRates::default());
        assert_eq!(meter.totals().unwrap().duration.count(), 1);
    }

    // Two nodes, one fast and one slow: the percentiles of both together are those of all events.
    #[test]
    fn what_several_meters_have_is_added_up() {
        let (one, other, both) = (Meter::default(), Meter::default(), Meter::default());
        for n in 1..=900 {
            delivered(&one, n % 120, millis(10), 1);
            delivered(&both, n % 120, millis(10), 1);
        }
        for n in 1..=100 {
            delivered(&other, n % 60, millis(2000), 1);
            delivered(&both, n % 60, millis(2000), 1);
        }
        one.published(at(61), 3);
        other.published(at(61), 4);
        both.published(at(61), 7);
        let mut tallies = one.tallies(at(119), 3);
        tallies.extend(other.tallies(at(119), 3));
        assert_eq!(MinuteSeries::of(at(119), 3, &tallies), both.series(at(119), 3));
        let mut stretches = one.stretches(at(119), 15);
        stretches.extend(other.stretches(at(119), 15));
        let found = LatencyQuantiles::of(&stretches).unwrap();
        assert_eq!(Some(found), both.latency(at(119), 15));
        about(found.p50, millis(10));
        about(found.p95, millis(2000));
        assert_eq!(LatencyQuantiles::of(&[]), None);
        // Bucket numbers that no meter writes are ignored.
        assert_eq!(LatencyQuantiles::of(&[(u16::MAX, 5)]), None);
        let old = MinuteTally {
            number: 0,
            delivered: 5,
            ..MinuteTally::default()
        };
        assert_eq!(MinuteSeries::of(at(119), 2, &[old]).delivered, [0, 0]);
    }

    #[test]
    fn what_is_too_old_is_let_go_and_leaps_cost_nothing() {
        let meter = Meter::default();
        let count = |meter: &Meter| meter.lock().as_ref().unwrap().minutes.len();
        for minute in 0..1000 {
            meter.published(at(minute * 60), 1);
        }
        assert_eq!(count(&meter), MINUTES_OF_ONE);
        let series = meter.series(at(999 * 60), MINUTES_OF_ALL);
        assert_eq!(series.published.iter().sum::<u64>(), MINUTES_OF_ONE as u64);
        // A hundred years later, nothing is left.
        let later = 100 * 365 * 86_400;
        meter.published(at(later), 7);
        assert_eq!(count(&meter), 1);
        assert_eq!(meter.series(at(later), 3).published, [0, 0, 7]);
        // After the clock is set back, minutes that are now in the future are discarded.
        meter.published(at(0), 1);
        assert_eq!(meter.series(at(0), 1).published, [1]);
        assert_eq!(count(&meter), 1);
    }

    #[test]
    fn minutes_of_an_earlier_process_are_added() {
        let earlier = Meter::default();
        earlier.published(at(0), 3);
        delivered(&earlier, 0, millis(10), 2);
        failed(&earlier, 61);
        let dropped = [(given_up(FailureEffect::Dropped(GiveUpReason::BadRequest), 400), 5)];
        let noted = MeterNote {
            given_up: &dropped,
            ..MeterNote::default()
        };
        earlier.note(at(61), &noted);
        for status in 400..420 {
            let dropped = [(
                given_up(FailureEffect::Dropped(GiveUpReason::BadRequest), status),
                1,
            )];
            let noted = MeterNote {
                given_up: &dropped,
                ..MeterNote::default()
            };
            earlier.note(at(62), &noted);
        }
        let kept = earlier.minutes(at(62));
        let meter = Meter::default();
        meter.restore(at(100), &kept);
        assert_eq!(meter.series(at(100), 5), earlier.series(at(100), 5));
        assert_eq!(meter.recent(at(100), 5), earlier.recent(at(100), 5));
        assert_eq!(meter.minutes(at(100)), kept);
        assert_eq!(
            meter.totals(),
            Some(MeterTotals::default()),
            "what others count starts anew"
        );
        assert_eq!(meter.last_minute(), kept.last().map(|minute| minute.number));
        // Events were counted since the restart, in the same minute.
        let meter = Meter::default();
        delivered(&meter, 70, millis(10), 7);
        failed(&meter, 130);
        meter.restore(at(131), &kept);
        let recent = meter.recent(at(131), 5);
        assert_eq!((recent.delivered, recent.dropped, recent.failed), (9, 25, 2));
        assert_eq!(meter.series(at(131), 3).delivered, [2, 7, 0]);
        // The clock was set back since, or far forward.
        for now in [at(-60), at(86_400)] {
            let meter = Meter::default();
            meter.restore(now, &kept);
            assert_eq!(meter.minutes(now), []);
        }
        // Values that no meter writes do no harm.
        let meter = Meter::default();
        let strange = MeterMinute {
            latency: MinuteLatencies(vec![(u16::MAX, 5), (3, u32::MAX)]),
            failed: 4,
            ..kept[0].clone()
        };
        meter.restore(at(1), &[strange.clone(), strange]);
        assert_eq!(meter.recent(at(1), 1).failed, 8);
        assert!(meter.latency(at(1), 1).is_some());
    }

    // Two lanes read the clock on either side of the minute and note in the other order.
    #[test]
    fn a_minute_may_come_late() {
        let meter = Meter::default();
        meter.published(at(61), 1);
        meter.published(at(59), 2);
        meter.published(at(62), 4);
        assert_eq!(meter.series(at(62), 2).published, [2, 5]);
    }

    #[test]
    fn totals_are_counted_by_bound_and_outcome() {
        let meter = Meter::default();
        assert_eq!(meter.totals(), None);
        delivered(&meter, 0, millis(5), 2);
        delivered(&meter, 0, millis(6), 1);
        delivered(&meter, 0, Duration::from_secs(100_000), 1);
        failed(&meter, 0);
        let other = Meter::default();
        failed(&other, 0);
        meter.absorb(&other);
        let totals = meter.totals().unwrap();
        assert_eq!(
            totals.latency.counts[..3],
            [2, 1, 0],
            "bounds belong to what is below"
        );
        assert_eq!((totals.latency.beyond, totals.latency.count()), (1, 4));
        assert_eq!(totals.latency.sum, millis(16) + Duration::from_secs(100_000));
        assert_eq!(totals.duration.count(), 2);
        assert_eq!(totals.outcomes[usize::from(Outcome::Busy.code())], 2);
        assert_eq!((totals.succeeded, totals.failed), (Duration::ZERO, millis(40)));
        assert_eq!((totals.first_attempts, totals.waited), (2, millis(10)));
    }
}
