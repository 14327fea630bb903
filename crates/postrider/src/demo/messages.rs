//! Messages of the demo: single events followed from failure to end, endpoints on probation, dead
//! letters.

use super::counts::{DemoCounts, SubscriptionCounts};
use super::receiver::ReceivedRequest;
use super::scenario::{DemoScenario, DemoSubscription};
use postrider_core::probation::EndpointProbationDelay;
use postrider_core::retry::GiveUpReason;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DemoMessage {
    /// Time since the start.
    pub after: Duration,
    pub mood: MessageTone,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageTone {
    Good,
    Patient,
    Bad,
}

/// Derived from the requests that the receiver saw and from changes of the server's numbers.
pub struct MessageLog {
    scene: DemoScenario,
    /// Pause after the end of one followed event before the next is followed.
    pause: Duration,
    strands: BTreeMap<DemoSubscription, FollowedSubscription>,
    pub told: Vec<DemoMessage>,
}

/// State of the messages about one part.
#[derive(Default)]
struct FollowedSubscription {
    followed: Option<FollowedEvent>,
    pause_until: Duration,
    /// Events that the receiver accepted.
    accepted: BTreeSet<u64>,
    /// Requests that the receiver answered with a failure.
    failures_seen: u64,
    /// Failed attempts without an answer of the receiver.
    failures_unseen: u64,
    delay: Option<EndpointProbationDelay>,
    ends: BTreeMap<GiveUpReason, u64>,
    /// Open deliveries at the last reading of the numbers.
    open: u64,
}

/// An event that is followed from its first failure to its end.
#[derive(Clone, Copy)]
struct FollowedEvent {
    event: u64,
    attempt: u32,
    status: u16,
    after: Duration,
    /// Reason why the event will be given up, and the count for that reason before.
    ending: Option<(GiveUpReason, u64)>,
}

impl MessageLog {
    pub fn new(scene: DemoScenario, pause: Duration) -> MessageLog {
        MessageLog {
            scene,
            pause,
            strands: DemoSubscription::ALL
                .into_iter()
                .map(|part| (part, FollowedSubscription::default()))
                .collect(),
            told: Vec::new(),
        }
    }

    /// Number of different events that a part has accepted.
    pub fn accepted(&self, part: DemoSubscription) -> u64 {
        self.strands[&part].accepted.len() as u64
    }

    /// Processes a request that the receiver got.
    pub fn observe(&mut self, seen: &ReceivedRequest) {
        let part = seen.part;
        let strand = self.strands.get_mut(&part).expect("every part has a strand");
        if seen.status == 200 {
            strand
                .accepted
                .extend(seen.events.iter().map(|event| event.number));
        } else {
            strand.failures_seen += 1;
        }
        let Some(event) = seen.events.first() else {
            return;
        };
        let earlier = match strand.followed {
            Some(followed) if followed.event == event.number => Some(followed),
            None if seen.attempt == 1 && seen.status != 200 && part.fails_by_event() => {
                if seen.after < strand.pause_until {
                    return;
                }
                None
            }
            _ => return,
        };
        let who = format!(
            "event {} → {}: attempt {}",
            event.number,
            part.name(),
            seen.attempt
        );
        if seen.status == 200 {
            strand.followed = None;
            strand.pause_until = seen.after + self.pause;
            let text = format!("{who} delivered, {} after it was published", span(event.age));
            self.tell(seen.after, MessageTone::Good, text);
            return;
        }
        let ending = self.scene.given_up(part, seen.attempt, seen.status);
        strand.followed = Some(FollowedEvent {
            event: event.number,
            attempt: seen.attempt,
            status: seen.status,
            after: seen.after,
            ending: ending.map(|reason| (reason, strand.ends.get(&reason).copied().unwrap_or(0))),
        });
        if ending.is_some() {
            // The end is announced once the server has counted it.
            return;
        }
        let later = earlier.map(|e| {
            format!(
                ", {} after the one before",
                span(seen.after.saturating_sub(e.after))
            )
        });
        let text = format!("{who} answered {}{}", seen.status, later.unwrap_or_default());
        self.tell(seen.after, MessageTone::Patient, text);
    }

    /// Compares with numbers that must have been read before the latest requests were observed, so
    /// that every counted failure that the receiver answered has been observed.
    pub fn compare(&mut self, tally: &DemoCounts, after: Duration) {
        for row in &tally.rows {
            self.compare_delay(row, after);
            self.compare_failures(row, after);
            self.compare_ends(row, after);
            self.strands
                .get_mut(&row.part)
                .expect("every part has a strand")
                .open = row.open();
        }
    }

    fn compare_delay(&mut self, row: &SubscriptionCounts, after: Duration) {
        let name = row.part.name();
        let strand = self.strands.get_mut(&row.part).expect("every part has a strand");
        let before = std::mem::replace(&mut strand.delay, row.delay);
        let (mood, text) = match (before, row.delay) {
            (None, Some(now)) => {
                let step = span(now.step);
                (
                    MessageTone::Bad,
                    format!("{name} keeps failing ({}): left alone for {step}", now.cause),
                )
            }
            (Some(before), Some(now)) if before.until != now.until => {
                let step = span(now.step);
                (
                    MessageTone::Patient,
                    format!("{name}: the probe failed ({}): left alone for {step}", now.cause),
                )
            }
            (Some(before), None) => {
                let long = span(before.until.since(before.since));
                let open = strand.open;
                (
                    MessageTone::Good,
                    format!("{name} answers again after {long}; {open} deliveries were waiting for it"),
                )
            }
            _ => return,
        };
        self.tell(after, mood, text);
    }

    /// Failed attempts that the receiver did not cause: late answers and broken connections.
    fn compare_failures(&mut self, row: &SubscriptionCounts, after: Duration) {
        let strand = self.strands.get_mut(&row.part).expect("every part has a strand");
        let unseen = row.failed.saturating_sub(strand.failures_seen);
        let more = unseen.saturating_sub(strand.failures_unseen);
        strand.failures_unseen = strand.failures_unseen.max(unseen);
        if more > 0 {
            let text = format!("{}: attempts without an answer in time: {more}", row.part.name());
            self.tell(after, MessageTone::Bad, text);
        }
    }

    fn compare_ends(&mut self, row: &SubscriptionCounts, after: Duration) {
        let part = row.part;
        let strand = self.strands.get_mut(&part).expect("every part has a strand");
        let ends = [("dead-lettered", &row.dead_lettered), ("dropped", &row.dropped)];
        let ends = ends
            .into_iter()
            .flat_map(|(end, counts)| counts.iter().map(move |(reason, n)| (end, *reason, *n)));
        let mut texts = Vec::new();
        for (end, reason, count) in ends {
            let known = strand.ends.insert(reason, count).unwrap_or(0);
            if let Some(followed) = strand.followed
                && let Some((expected, before)) = followed.ending
                && expected == reason
                && count > before
            {
                let FollowedEvent {
                    event,
                    attempt,
                    status,
                    ..
                } = followed;
                strand.followed = None;
                strand.pause_until = after + self.pause;
                let name = part.name();
                let attempts = if attempt == 1 {
                    String::new()
                } else {
                    format!(" after {attempt} attempts")
                };
                texts.push(format!(
                    "event {event} → {name}: {status}, {end}{attempts}: {reason}"
                ));
            } else if !part.fails_by_event() && count > known {
                texts.push(format!("{}: {} {end}: {reason}", part.name(), count - known));
            }
        }
        for text in texts {
            self.tell(after, MessageTone::Bad, text);
        }
    }

    fn tell(&mut self, after: Duration, mood: MessageTone, text: String) {
        self.told.push(DemoMessage { after, mood, text });
    }
}

/// A duration in words.
pub fn span(long: Duration) -> String {
    let secs = long.as_secs();
    let (hours, mins, rest) = (secs / 3600, secs / 60 % 60, secs % 60);
    match (hours, mins, rest) {
        (0, 0, _) => format!("{secs} s"),
        (0, _, 0) => format!("{mins} min"),
        (0, 0..10, _) => format!("{mins} min {rest} s"),
        (0, ..) => format!("{mins} min"),
        (_, 0, _) => format!("{hours} h"),
        _ => format!("{hours} h {mins} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::counts::tests::row;
    use super::super::receiver::ReceivedEvent;
    use super::*;
    use postrider_core::outcome::Outcome;
    use postrider_core::time::Timestamp;

    fn story() -> MessageLog {
        let scene = DemoScenario {
            slow_for: Duration::ZERO,
            buggy_event_last: 100,
            buggy_attempts_max: 2,
            broken_minutes_to_live: 1,
        };
        MessageLog::new(scene, Duration::from_secs(100))
    }

    fn seen(part: DemoSubscription, number: u64, attempt: u32, status: u16, after: u64) -> ReceivedRequest {
        let after = Duration::from_secs(after);
        ReceivedRequest {
            part,
            events: vec![ReceivedEvent { number, age: after }],
            attempt,
            status,
            after,
        }
    }

    fn texts(story: &MessageLog) -> Vec<&str> {
        story.told.iter().map(|h| h.text.as_str()).collect()
    }

    #[test]
    fn one_event_is_followed_until_it_arrives_then_another_after_a_pause() {
        let mut story = story();
        for (number, attempt, status, after) in [
            (1, 1, 200, 0),
            (2, 1, 503, 1),
            (3, 1, 503, 2),
            (2, 2, 503, 33),
            (2, 3, 200, 95),
            (4, 1, 503, 120),
        ] {
            story.observe(&seen(DemoSubscription::Flaky, number, attempt, status, after));
        }
        story.observe(&seen(DemoSubscription::Flaky, 5, 1, 503, 200));
        let expected = [
            "event 2 → flaky: attempt 1 answered 503",
            "event 2 → flaky: attempt 2 answered 503, 32 s after the one before",
            "event 2 → flaky: attempt 3 delivered, 1 min 35 s after it was published",
            "event 5 → flaky: attempt 1 answered 503",
        ];
        assert_eq!(texts(&story), expected);
        assert_eq!(story.accepted(DemoSubscription::Flaky), 2);
    }

    #[test]
    fn a_dead_letter_is_told_when_the_server_has_counted_it() {
        let mut story = story();
        let mut tally = DemoCounts {
            rows: vec![row(DemoSubscription::Buggy, 9)],
            ..DemoCounts::default()
        };
        story.observe(&seen(DemoSubscription::Buggy, 7, 1, 500, 1));
        story.observe(&seen(DemoSubscription::Buggy, 7, 2, 500, 11));
        tally.rows[0].failed = 2;
        story.compare(&tally, Duration::from_secs(11));
        assert_eq!(texts(&story), ["event 7 → buggy: attempt 1 answered 500"]);
        tally.rows[0].dead_lettered = vec![(GiveUpReason::AttemptsExhausted, 1)];
        story.compare(&tally, Duration::from_secs(12));
        let last = "event 7 → buggy: 500, dead-lettered after 2 attempts: MaxDeliveryAttemptsExceeded";
        assert_eq!(texts(&story)[1..], [last]);
    }

    #[test]
    fn an_endpoint_left_alone_and_answers_that_never_came_are_told() {
        let mut story = story();
        let at = Timestamp::from_secs;
        let mut tally = DemoCounts {
            rows: vec![row(DemoSubscription::Healthy, 9)],
            ..DemoCounts::default()
        };
        let mut delay = EndpointProbationDelay {
            cause: Outcome::Busy,
            status: None,
            since: at(0),
            until: at(10),
            step: Duration::from_secs(10),
        };
        tally.rows[0].delay = Some(delay);
        tally.rows[0].failed = 1;
        story.compare(&tally, Duration::ZERO);
        (delay.until, delay.step) = (at(90), Duration::from_secs(80));
        tally.rows[0].delay = Some(delay);
        story.compare(&tally, Duration::ZERO);
        tally.rows[0].waiting = 5;
        story.compare(&tally, Duration::ZERO);
        (tally.rows[0].delay, tally.rows[0].waiting) = (None, 0);
        story.compare(&tally, Duration::ZERO);
        let expected = [
            "healthy keeps failing (Busy): left alone for 10 s",
            "healthy: attempts without an answer in time: 1",
            "healthy: the probe failed (Busy): left alone for 1 min 20 s",
            "healthy answers again after 1 min 30 s; 5 deliveries were waiting for it",
        ];
        assert_eq!(texts(&story), expected);
    }

    #[test]
    fn lengths_of_time_read_well() {
        let check = |secs, expected: &str| assert_eq!(span(Duration::from_secs(secs)), expected);
        check(0, "0 s");
        check(59, "59 s");
        check(60, "1 min");
        check(95, "1 min 35 s");
        check(1805, "30 min");
        check(3600, "1 h");
        check(7500, "2 h 5 min");
    }
}
