//! Idle connections, kept for the next request to the same origin.

use crate::egress::DestinationScheme;
use postrider_core::time::Timestamp;
use std::collections::{HashMap, VecDeque};
use std::mem;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

pub const IDLE_PER_ORIGIN_MAX: usize = 64;
/// The most hosts (with their port) that idle connections are kept for.
pub const ORIGINS_MAX: usize = 1024;
/// An idle connection older than this is closed instead of used.
pub const IDLE_TIME_MAX: Duration = Duration::from_secs(20);
/// The least interval at which returned connections sweep the whole pool.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// A pool of idle connections. Returns the most recently used connection first: the peer is least
/// likely to have closed it, and surplus connections grow old and are closed.
///
/// An origin is a scheme and an authority as written in the URL: `host` and `host:80` do not share.
pub(crate) struct IdlePool<C> {
    idle_max: usize,
    shelves: Mutex<IdlePoolState<C>>,
}

struct IdlePoolState<C> {
    by_authority: HashMap<Box<str>, AuthorityConnections<C>>,
    swept: Timestamp,
    /// The number of idle connections to all authorities.
    idle: usize,
}

/// The idle connections to one authority, oldest first.
struct AuthorityConnections<C> {
    http: VecDeque<IdleConnection<C>>,
    https: VecDeque<IdleConnection<C>>,
    used: Timestamp,
}

struct IdleConnection<C> {
    since: Timestamp,
    connection: C,
}

impl<C> IdleConnection<C> {
    fn is_stale(&self, now: Timestamp) -> bool {
        now.since(self.since) > IDLE_TIME_MAX
    }
}

impl<C> IdlePool<C> {
    /// `idle_max` is the most connections that are kept, over all origins.
    pub fn new(idle_max: usize) -> IdlePool<C> {
        IdlePool {
            idle_max,
            shelves: Mutex::new(IdlePoolState {
                by_authority: HashMap::new(),
                swept: Timestamp::MIN,
                idle: 0,
            }),
        }
    }

    /// Takes the youngest idle connection to the origin.
    pub fn take(&self, scheme: DestinationScheme, authority: &str, now: Timestamp) -> Option<C> {
        let mut shelves = self.lock();
        let IdlePoolState {
            by_authority, idle, ..
        } = &mut *shelves;
        let shelf = by_authority.get_mut(authority)?;
        shelf.used = now;
        let row = shelf.row(scheme);
        let youngest = row.pop_back()?;
        *idle -= 1;
        if !youngest.is_stale(now) {
            return Some(youngest.connection);
        }
        // The others are older still. Closing takes system calls, so they are dropped after the
        // lock.
        let stale = mem::take(row);
        *idle -= stale.len();
        drop(shelves);
        drop(stale);
        None
    }

    /// Adds an idle connection, replacing the origin's oldest one if there are too many. Without
    /// space in the pool the connection is closed.
    pub fn put(&self, scheme: DestinationScheme, authority: &str, connection: C, now: Timestamp) {
        let mut locked = self.lock();
        let shelves = &mut *locked;
        let swept = shelves.sweep_if_due(now);
        let mut evicted = None;
        if !shelves.by_authority.contains_key(authority) {
            evicted = shelves.make_room();
        }
        let shelf = match shelves.by_authority.get_mut(authority) {
            Some(shelf) => shelf,
            None => shelves
                .by_authority
                .entry(authority.into())
                .or_insert(AuthorityConnections {
                    http: VecDeque::new(),
                    https: VecDeque::new(),
                    used: now,
                }),
        };
        shelf.used = now;
        let row = shelf.row(scheme);
        let mut surplus = if row.len() < IDLE_PER_ORIGIN_MAX {
            None
        } else {
            row.pop_front()
        };
        let idle = IdleConnection {
            since: now,
            connection,
        };
        if surplus.is_some() {
            row.push_back(idle);
        } else if shelves.idle < self.idle_max {
            row.push_back(idle);
            shelves.idle += 1;
        } else {
            surplus = Some(idle);
        }
        drop(locked);
        drop((swept, evicted, surplus));
    }

    /// Closes connections that have been idle for too long.
    pub fn sweep(&self, now: Timestamp) {
        let stale = self.lock().sweep(now);
        drop(stale);
    }

    /// The number of idle connections.
    pub fn len(&self) -> usize {
        self.lock()
            .by_authority
            .values()
            .map(AuthorityConnections::len)
            .sum()
    }

    #[cfg(test)]
    fn counted(&self) -> usize {
        self.lock().idle
    }

    fn lock(&self) -> MutexGuard<'_, IdlePoolState<C>> {
        self.shelves
            .lock()
            .expect("nothing panics while it holds the pool")
    }
}

impl<C> IdlePoolState<C> {
    fn sweep_if_due(&mut self, now: Timestamp) -> Vec<IdleConnection<C>> {
        // A clock that was set back delays the next sweep but does not prevent it.
        if now.since(self.swept) >= SWEEP_EVERY || now < self.swept {
            self.sweep(now)
        } else {
            Vec::new()
        }
    }

    /// Takes all stale connections, to be dropped without the lock.
    fn sweep(&mut self, now: Timestamp) -> Vec<IdleConnection<C>> {
        self.swept = now;
        let mut stale = Vec::new();
        self.by_authority.retain(|_, shelf| {
            for row in [&mut shelf.http, &mut shelf.https] {
                let count = row.iter().take_while(|idle| idle.is_stale(now)).count();
                stale.extend(row.drain(..count));
            }
            shelf.len() > 0
        });
        self.idle -= stale.len();
        stale
    }

    /// Makes space for another authority, if there are too many: takes an empty one, or else the
    /// least recently used one.
    fn make_room(&mut self) -> Option<AuthorityConnections<C>> {
        if self.by_authority.len() < ORIGINS_MAX {
            return None;
        }
        let least = self
            .by_authority
            .iter()
            .min_by_key(|(_, shelf)| (shelf.len() > 0, shelf.used));
        let authority = least.map(|(authority, _)| authority.clone())?;
        let evicted = self.by_authority.remove(&authority)?;
        self.idle -= evicted.len();
        Some(evicted)
    }
}

impl<C> AuthorityConnections<C> {
    fn row(&mut self, scheme: DestinationScheme) -> &mut VecDeque<IdleConnection<C>> {
        match scheme {
            DestinationScheme::Http => &mut self.http,
            DestinationScheme::Https => &mut self.https,
        }
    }

    fn len(&self) -> usize {
        self.http.len() + self.https.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DestinationScheme::{Http, Https};

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_secs(1_000_000 + secs)
    }

    #[test]
    fn the_last_to_come_back_is_the_first_to_leave() {
        let pool = IdlePool::new(usize::MAX);
        for connection in 0..3 {
            pool.put(Http, "a", connection, at(0));
        }
        pool.put(Https, "a", 10, at(0));
        pool.put(Http, "b", 20, at(0));
        let taken: Vec<_> = std::iter::from_fn(|| pool.take(Http, "a", at(1))).collect();
        assert_eq!(taken, [2, 1, 0]);
        assert_eq!(pool.take(Https, "a", at(1)), Some(10));
        assert_eq!(pool.take(Http, "c", at(1)), None);
        assert_eq!(pool.len(), 1);
    }

    #[test]
    fn an_origin_keeps_the_youngest_up_to_its_bound() {
        let pool = IdlePool::new(usize::MAX);
        for connection in 0..IDLE_PER_ORIGIN_MAX + 2 {
            pool.put(Http, "a", connection, at(0));
        }
        let taken: Vec<_> = std::iter::from_fn(|| pool.take(Http, "a", at(1))).collect();
        assert_eq!(taken.len(), IDLE_PER_ORIGIN_MAX);
        assert_eq!(taken.last(), Some(&2));
    }

    // Regression: idle connections to many origins took the file descriptors that others need.
    #[test]
    fn all_origins_together_keep_no_more_than_their_bound() {
        let pool = IdlePool::new(5);
        for origin in ["a", "b", "c"] {
            for connection in 0..3 {
                pool.put(Http, origin, connection, at(0));
            }
        }
        assert_eq!((pool.len(), pool.counted()), (5, 5));
        assert_eq!(pool.take(Http, "c", at(1)), None);
        assert_eq!(pool.take(Http, "b", at(1)), Some(1));
        pool.put(Http, "c", 7, at(1));
        assert_eq!((pool.len(), pool.counted()), (5, 5));
        assert_eq!(pool.take(Http, "a", at(30)), None);
        assert_eq!((pool.len(), pool.counted()), (2, 2));
        pool.sweep(at(60));
        assert_eq!((pool.len(), pool.counted()), (0, 0));
    }

    #[test]
    fn old_connections_are_not_handed_out() {
        let pool = IdlePool::new(usize::MAX);
        pool.put(Http, "a", 1, at(0));
        pool.put(Http, "a", 2, at(1));
        assert_eq!(pool.take(Http, "a", at(20)), Some(2));
        assert_eq!(pool.take(Http, "a", at(21)), None);
        assert_eq!(pool.len(), 0);
    }

    #[test]
    fn sweeping_drops_the_old_and_forgets_the_empty() {
        let pool = IdlePool::new(usize::MAX);
        pool.put(Http, "a", 1, at(0));
        pool.put(Http, "b", 2, at(10));
        pool.sweep(at(25));
        assert_eq!(pool.len(), 1);
        assert_eq!(pool.lock().by_authority.len(), 1);
        // Without an explicit sweep, too, when a connection comes back.
        pool.put(Http, "c", 3, at(31));
        assert_eq!(pool.len(), 1);
    }

    #[test]
    fn the_origin_used_least_recently_makes_room() {
        let pool = IdlePool::new(usize::MAX);
        for n in 0..ORIGINS_MAX {
            pool.put(Http, &n.to_string(), n, at(0) + Duration::from_millis(n as u64));
        }
        pool.put(Http, "0", 0, at(2));
        pool.put(Http, "one more", 0, at(2));
        assert_eq!(pool.lock().by_authority.len(), ORIGINS_MAX);
        assert_eq!(pool.take(Http, "1", at(2)), None);
        assert_eq!(pool.take(Http, "0", at(2)), Some(0));
        // An authority without connections is removed before any that has some.
        assert_eq!(pool.take(Http, "7", at(2)), Some(7));
        pool.put(Http, "and another", 0, at(2));
        assert!(!pool.lock().by_authority.contains_key("7"));
        assert_eq!(pool.take(Http, "2", at(2)), Some(2));
    }
}
