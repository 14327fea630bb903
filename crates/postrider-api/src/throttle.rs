//! Throttling of wrong secrets, keys and tokens by the address of the client.
//!
//! An address that presents wrong credentials is locked out for a while: each wrong one after the
//! free attempts doubles the wait. Attempts during a wait are answered with 429 and do not lengthen
//! it. Each kind of credential is counted separately, and so are the keys of each topic: a
//! publisher with an outdated key does not lock its neighbours out of other topics or of the
//! portal. Other addresses are never affected.
//!
//! A secret is not examined during a wait, so that a right guess reveals nothing. Signed tokens,
//! sessions and access keys of at least [`UNGUESSABLE_CHARS_MIN`] characters are examined: they
//! cannot be found by trying, at whatever rate, and a client with the right one is not delayed by a
//! neighbour behind the same address.

use crate::Server;
use crate::http::ApiCall;
use postrider_core::ids::{Secret, TopicId};
use postrider_core::time::Timestamp;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Networks that are remembered at once, for all kinds of credentials together.
const NETWORKS_MAX: usize = 10_000;
/// The wait after the first wrong credential that is not free.
const WAIT_MIN: Duration = Duration::from_secs(1);
/// Wrong credentials are forgotten this long after the end of the last wait.
const FORGET_AFTER: Duration = Duration::from_secs(15 * 60);
/// Lock-outs that are logged in one second; the others are counted in the next line.
const LOGGED_PER_SECOND_MAX: u32 = 10;
/// An access key of this length cannot be guessed: generated ones have 44 characters.
pub(crate) const UNGUESSABLE_CHARS_MIN: usize = 32;
/// Shorter secrets of clients, and shorter keys, cause a warning when the server starts.
pub const SECRET_CHARS_MIN: usize = 16;

/// Configuration of the throttle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleRules {
    /// Wrong credentials of one kind from one network before the first wait; zero disables waits.
    pub free_attempts: u32,
    pub wait_max: Duration,
}

impl Default for ThrottleRules {
    fn default() -> ThrottleRules {
        ThrottleRules {
            free_attempts: 10,
            wait_max: Duration::from_secs(5 * 60),
        }
    }
}

impl ThrottleRules {
    /// The wait after this many wrong credentials.
    fn wait_after(self, wrong: u32) -> Duration {
        if self.free_attempts == 0 || wrong < self.free_attempts {
            return Duration::ZERO;
        }
        let doublings = (wrong - self.free_attempts).min(31);
        (WAIT_MIN * (1 << doublings)).min(self.wait_max)
    }
}

/// Kind of credential that is presented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CredentialKind {
    /// A client's secret at the portal.
    Portal,
    /// A client's secret at the token endpoint.
    TokenEndpoint,
    /// A client's secret or a token as the bearer of a request.
    Bearer,
    /// A key of a topic or domain, or a token signed with it.
    TopicKey(TopicId),
    /// A key of the edge API.
    EdgeKey,
}

impl CredentialKind {
    pub const NAMES: [&str; 5] = ["portal", "token-endpoint", "bearer", "topic-key", "edge-key"];

    fn number(self) -> usize {
        match self {
            CredentialKind::Portal => 0,
            CredentialKind::TokenEndpoint => 1,
            CredentialKind::Bearer => 2,
            CredentialKind::TopicKey(_) => 3,
            CredentialKind::EdgeKey => 4,
        }
    }

    fn name(self) -> &'static str {
        CredentialKind::NAMES[self.number()]
    }
}

/// Network whose attempts are counted together: an IPv4 address, or an IPv6 /64, since one client
/// has many IPv6 addresses.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

type ThrottleKey = (IpAddr, CredentialKind);

#[derive(Clone, Copy, Debug)]
struct WrongCredentials {
    count: u32,
    last: Timestamp,
    until: Timestamp,
}

impl WrongCredentials {
    fn is_forgotten(&self, now: Timestamp) -> bool {
        now.since(self.until) >= FORGET_AFTER
    }
}

#[derive(Default)]
struct ThrottleState {
    wrong: HashMap<ThrottleKey, WrongCredentials>,
    /// The second of the last log line, the number of lines in that second, and the number of
    /// unlogged lock-outs.
    logged: (i64, u32, u64),
}

/// Wrong credentials by network and kind.
pub(crate) struct Throttle {
    pub rules: ThrottleRules,
    state: Mutex<ThrottleState>,
    /// Wrong credentials by kind, in the order of [`CredentialKind::NAMES`].
    wrong: [AtomicU64; 5],
    /// Attempts answered with 429.
    refused: [AtomicU64; 5],
    lockouts: AtomicU64,
}

/// Counters for `/metrics`.
pub(crate) struct ThrottleCounts {
    pub wrong: [u64; 5],
    pub refused: [u64; 5],
    pub lockouts: u64,
}

/// A wait that has just begun, to be logged.
#[derive(Debug, PartialEq, Eq)]
struct Lockout {
    wrong: u32,
    wait: Duration,
    /// Lock-outs since the last line that were not logged.
    unlogged: u64,
}

impl Throttle {
    pub fn new(rules: ThrottleRules) -> Throttle {
        Throttle {
            rules,
            state: Mutex::default(),
            wrong: Default::default(),
            refused: Default::default(),
            lockouts: AtomicU64::new(0),
        }
    }

    /// How long the address has to wait before its next attempt; none if it may try now.
    fn wait(&self, address: IpAddr, kind: CredentialKind, now: Timestamp) -> Option<Duration> {
        let mut state = self.state.lock().expect("no panic holds it");
        let wrong = state.wrong.get_mut(&(network(address), kind))?;
        if now < wrong.last {
            // The clock was set back: the wait begins again, so that it never ends sooner than it
            // should.
            wrong.last = now;
            wrong.until = now + self.rules.wait_after(wrong.count);
        }
        let left = wrong.until.since(now);
        if left.is_zero() {
            return None;
        }
        self.refused[kind.number()].fetch_add(1, Relaxed);
        Some(left)
    }

    /// Counts a wrong credential. Returns the wait that begins if it is to be logged.
    fn count(&self, address: IpAddr, kind: CredentialKind, now: Timestamp) -> Option<Lockout> {
        self.wrong[kind.number()].fetch_add(1, Relaxed);
        let key = (network(address), kind);
        let mut state = self.state.lock().expect("no panic holds it");
        let ThrottleState { wrong, logged } = &mut *state;
        if wrong.len() >= NETWORKS_MAX && !wrong.contains_key(&key) {
            make_room(wrong, now);
        }
        let entry = wrong.entry(key).or_insert(WrongCredentials {
            count: 0,
            last: now,
            until: now,
        });
        if entry.is_forgotten(now) {
            entry.count = 0;
        }
        entry.count = entry.count.saturating_add(1);
        let wait = self.rules.wait_after(entry.count);
        (entry.last, entry.until) = (now, now + wait);
        if wait.is_zero() {
            return None;
        }
        self.lockouts.fetch_add(1, Relaxed);
        let count = entry.count;
        // Logged once when an address begins to guess; `/metrics` counts the longer waits that
        // follow.
        if count > self.rules.free_attempts {
            return None;
        }
        let second = now.nanos() / 1_000_000_000;
        if logged.0 != second {
            (logged.0, logged.1) = (second, 0);
        }
        if logged.1 >= LOGGED_PER_SECOND_MAX {
            logged.2 += 1;
            return None;
        }
        logged.1 += 1;
        Some(Lockout {
            wrong: count,
            wait,
            unlogged: std::mem::take(&mut logged.2),
        })
    }

    pub fn counts(&self) -> ThrottleCounts {
        ThrottleCounts {
            wrong: std::array::from_fn(|kind| self.wrong[kind].load(Relaxed)),
            refused: std::array::from_fn(|kind| self.refused[kind].load(Relaxed)),
            lockouts: self.lockouts.load(Relaxed),
        }
    }
}

/// Drops expired entries, and if that is not enough the quarter that has been quiet longest.
fn make_room(wrong: &mut HashMap<ThrottleKey, WrongCredentials>, now: Timestamp) {
    wrong.retain(|_, wrong| !wrong.is_forgotten(now));
    if wrong.len() < NETWORKS_MAX {
        return;
    }
    let mut times: Vec<Timestamp> = wrong.values().map(|wrong| wrong.last).collect();
    let (_, &mut quarter, _) = times.select_nth_unstable(NETWORKS_MAX / 4);
    let mut excess = NETWORKS_MAX / 4;
    wrong.retain(|_, one| {
        let goes = excess > 0 && one.last <= quarter;
        excess -= usize::from(goes);
        !goes
    });
}

/// The address is locked out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockedOut {
    pub seconds: u64,
}

impl LockedOut {
    pub fn reason(self) -> String {
        let Self { seconds } = self;
        format!(
            "Too many wrong credentials came from this address; the next attempt is looked at in {seconds} s."
        )
    }
}

impl Server {
    /// Whether credentials of this kind are examined; otherwise the answer must be 429.
    pub(crate) fn check_lockout(&self, call: &ApiCall, kind: CredentialKind) -> Result<(), LockedOut> {
        match self.throttle.wait(call.peer, kind, self.wall.now()) {
            None => Ok(()),
            Some(wait) => {
                let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
                call.retry_after_secs.store(seconds, Relaxed);
                Err(LockedOut { seconds })
            }
        }
    }

    /// Counts a wrong credential. Every API reports all of them here. `name` is that of the client
    /// or the topic, as far as it is known. The answer must be 429 if the address is locked out.
    pub(crate) fn wrong_credential(
        &self,
        call: &ApiCall,
        kind: CredentialKind,
        name: &str,
    ) -> Result<(), LockedOut> {
        // Credentials that are examined during a wait do not lengthen it.
        self.check_lockout(call, kind)?;
        if let Some(lockout) = self.throttle.count(call.peer, kind, self.wall.now()) {
            let Lockout {
                wrong,
                wait,
                unlogged,
            } = lockout;
            tracing::warn!(
                address = %call.peer, credential = kind.name(), name = %crate::login::shortened(name), wrong,
                wait_seconds = wait.as_secs(), unlogged,
                "too many wrong credentials: this address is locked out for a while"
            );
        }
        Ok(())
    }
}

/// Whether none of a pair of keys could be found by guessing. An empty text is no key.
pub(crate) fn are_unguessable(keys: [&Secret; 2]) -> bool {
    keys.iter().all(|key| {
        let length = key.expose().len();
        length == 0 || length >= UNGUESSABLE_CHARS_MIN
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_800_000_000);
    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn waits_double_from_a_second_to_the_longest() {
        let rules = ThrottleRules::default();
        let waits = [1, 9, 10, 11, 12, 17, 18, 19, 100, u32::MAX].map(|n| rules.wait_after(n).as_secs());
        assert_eq!(waits, [0, 0, 1, 2, 4, 128, 256, 300, 300, 300]);
        let off = ThrottleRules {
            free_attempts: 0,
            ..rules
        };
        assert_eq!(off.wait_after(1000), Duration::ZERO);
    }

    #[test]
    fn only_the_guessing_address_and_the_guessed_kind_are_locked_out() {
        let throttle = Throttle::new(ThrottleRules::default());
        let topic = |id| CredentialKind::TopicKey(TopicId(id));
        for _ in 0..9 {
            assert_eq!(throttle.count(A, topic(1), NOW), None);
        }
        assert_eq!(throttle.wait(A, topic(1), NOW), None);
        let begun = throttle.count(A, topic(1), NOW).expect("the tenth begins a wait");
        assert_eq!((begun.wrong, begun.wait), (10, secs(1)));
        assert_eq!(throttle.wait(A, topic(1), NOW), Some(secs(1)));
        for (address, kind) in [
            (B, topic(1)),
            (A, topic(2)),
            (A, CredentialKind::Portal),
            (A, CredentialKind::EdgeKey),
        ] {
            assert_eq!(throttle.wait(address, kind, NOW), None, "{address} {kind:?}");
        }
        // The same address in another notation.
        let mapped: IpAddr = "::ffff:192.0.2.1".parse().unwrap();
        assert!(throttle.wait(mapped, topic(1), NOW).is_some());
        // A single attempt after each wait begins a longer wait; only the first wait is logged.
        assert_eq!(throttle.wait(A, topic(1), NOW + secs(1)), None);
        assert_eq!(throttle.count(A, topic(1), NOW + secs(1)), None);
        assert_eq!(throttle.wait(A, topic(1), NOW + secs(1)), Some(secs(2)));
        let counts = throttle.counts();
        assert_eq!((counts.wrong[3], counts.refused[3], counts.lockouts), (11, 3, 2));
        // Setting the clock back does not prolong the wait.
        assert_eq!(throttle.wait(A, topic(1), NOW - secs(5000)), Some(secs(2)));
        // Forgotten after a quarter of an hour.
        let later = NOW + secs(3) + FORGET_AFTER;
        assert_eq!(throttle.count(A, topic(1), later), None);
        assert_eq!(throttle.wait(A, topic(1), later), None);
    }

    #[test]
    fn addresses_of_one_ipv6_network_count_together() {
        let throttle = Throttle::new(ThrottleRules::default());
        for n in 0..10 {
            let address = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 1, 1, 7, 7, 7, n));
            throttle.count(address, CredentialKind::Portal, NOW);
        }
        let wait = |text: &str| throttle.wait(text.parse().unwrap(), CredentialKind::Portal, NOW);
        assert!(wait("2001:db8:1:1::99").is_some());
        assert!(wait("2001:db8:1:2::99").is_none());
    }

    #[test]
    fn memory_is_bounded_and_the_newest_stay() {
        let throttle = Throttle::new(ThrottleRules {
            free_attempts: 1,
            ..ThrottleRules::default()
        });
        let address = |n: u32| IpAddr::V4(n.into());
        for n in 0..NETWORKS_MAX as u32 + 5 {
            let at = NOW + Duration::from_millis(n.into());
            throttle.count(address(n), CredentialKind::Portal, at);
        }
        let held = throttle.state.lock().unwrap().wrong.len();
        assert!((NETWORKS_MAX / 2..=NETWORKS_MAX).contains(&held), "{held}");
        let last = NOW + Duration::from_millis(NETWORKS_MAX as u64 + 4);
        let known = |n: u32| throttle.wait(address(n), CredentialKind::Portal, last).is_some();
        assert!(known(NETWORKS_MAX as u32 + 4) && known(NETWORKS_MAX as u32 - 1));
        assert!(!known(0));
    }

    #[test]
    fn many_lockouts_are_logged_a_few_times_a_second() {
        let throttle = Throttle::new(ThrottleRules {
            free_attempts: 1,
            ..ThrottleRules::default()
        });
        let logged = |from: u32, at: Timestamp| -> Vec<u64> {
            let all = (from..from + 25).filter_map(|n| {
                throttle
                    .count(IpAddr::V4(n.into()), CredentialKind::Bearer, at)
                    .map(|lockout| lockout.unlogged)
            });
            all.collect()
        };
        assert_eq!(logged(0, NOW), [0; 10]);
        let mut next = [0; 10];
        next[0] = 15;
        assert_eq!(logged(100, NOW + secs(1)), next);
    }
}
