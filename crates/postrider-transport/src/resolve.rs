//! Name resolution.

use async_trait::async_trait;
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use tokio::sync::watch;

/// Resolves a host name to addresses, in the order in which they should be tried.
///
/// Never called for IP literals. An empty result means that the name has no addresses.
#[async_trait]
pub trait NameResolver: Send + Sync {
    async fn addresses(&self, host: &str) -> io::Result<Vec<IpAddr>>;
}

/// Lookups at the same time: the system may take long for one, and blocks a thread meanwhile.
const LOOKUPS_MAX: usize = 32;
/// The part of them for names whose last lookup failed or outlasted all its waiters.
const SLOW_LOOKUPS_MAX: usize = LOOKUPS_MAX / 2;
/// Names that wait to be looked up. Beyond it a lookup fails at once.
const NAMES_QUEUED_MAX: usize = 16_384;
/// Slow names that are remembered; beyond it all are forgotten.
const SLOW_NAMES_MAX: usize = 16_384;
/// Enough for the system's resolver library.
const THREAD_STACK_BYTES: usize = 512 << 10;

/// Uses the operating system, on threads of its own: a hanging lookup holds up neither other work
/// nor, for long, lookups of other names. Each name is looked up by one thread at a time, for all
/// its waiters.
#[derive(Clone)]
pub struct SystemResolver {
    lookups: Arc<Lookups>,
}

type LookupResult = io::Result<Vec<IpAddr>>;
/// An error is stored by its kind and text, so that all waiters get it.
type SharedLookupResult = Result<Vec<IpAddr>, (io::ErrorKind, String)>;
/// None until the lookup has ended.
type PendingLookup = Option<SharedLookupResult>;

struct Lookups {
    look_up: Box<dyn Fn(&str) -> LookupResult + Send + Sync>,
    state: Mutex<LookupState>,
}

#[derive(Default)]
struct LookupState {
    /// Names that wait or are being looked up.
    pending: HashMap<Arc<str>, watch::Sender<PendingLookup>>,
    /// Names that wait for a thread, in the order of the requests.
    quick: VecDeque<Arc<str>>,
    slow: VecDeque<Arc<str>>,
    slow_names: HashSet<Arc<str>>,
    threads: usize,
    /// Threads that look up slow names.
    slow_threads: usize,
}

impl Default for SystemResolver {
    fn default() -> SystemResolver {
        SystemResolver::new()
    }
}

impl SystemResolver {
    pub fn new() -> SystemResolver {
        SystemResolver::looking_up(|host| {
            let found = (host, 0).to_socket_addrs()?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }

    fn looking_up(look_up: impl Fn(&str) -> LookupResult + Send + Sync + 'static) -> SystemResolver {
        SystemResolver {
            lookups: Arc::new(Lookups {
                look_up: Box::new(look_up),
                state: Mutex::default(),
            }),
        }
    }
}

#[async_trait]
impl NameResolver for SystemResolver {
    async fn addresses(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        let mut answer = self.lookups.ask(host)?;
        let found = match answer.wait_for(Option::is_some).await {
            Ok(found) => found.clone(),
            Err(_) => None,
        };
        match found {
            Some(Ok(addresses)) => Ok(addresses),
            Some(Err((kind, text))) => Err(io::Error::new(kind, text)),
            None => Err(io::Error::other("the lookup was given up")),
        }
    }
}

impl Lookups {
    fn state(&self) -> MutexGuard<'_, LookupState> {
        self.state.lock().expect("no panic while it is locked")
    }

    fn ask(self: &Arc<Self>, host: &str) -> io::Result<watch::Receiver<PendingLookup>> {
        let mut state = self.state();
        if let Some(answer) = state.pending.get(host) {
            return Ok(answer.subscribe());
        }
        if state.quick.len() + state.slow.len() >= NAMES_QUEUED_MAX {
            let reason = format!("{NAMES_QUEUED_MAX} other names wait to be looked up");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, reason));
        }
        let name: Arc<str> = host.into();
        let (sender, answer) = watch::channel(None);
        state.pending.insert(name.clone(), sender);
        match state.slow_names.contains(host) {
            true => state.slow.push_back(name),
            false => state.quick.push_back(name),
        }
        if state.threads < LOOKUPS_MAX {
            let lookups = self.clone();
            let thread = thread::Builder::new()
                .name("resolver".to_owned())
                .stack_size(THREAD_STACK_BYTES);
            match thread.spawn(move || lookups.run()) {
                Ok(_) => state.threads += 1,
                // The running threads will take the lookup.
                Err(_) if state.threads > 0 => {}
                Err(error) => {
                    state.pending.remove(host);
                    state.quick.retain(|name| **name != *host);
                    state.slow.retain(|name| **name != *host);
                    return Err(error);
                }
            }
        }
        Ok(answer)
    }

    /// Looks names up until none is left that this thread may take.
    fn run(&self) {
        let mut state = self.state();
        while let Some((name, is_slow)) = state.next() {
            drop(state);
            let found = (self.look_up)(&name).map_err(|error| (error.kind(), error.to_string()));
            state = self.state();
            state.slow_threads -= usize::from(is_slow);
            let waited_for = match state.pending.remove(&name) {
                Some(sender) => sender.send(Some(found.clone())).is_ok(),
                None => false,
            };
            state.note(name, waited_for && found.is_ok());
        }
        state.threads -= 1;
    }
}

impl LookupState {
    /// The next name to look up. Names without a waiter are skipped.
    fn next(&mut self) -> Option<(Arc<str>, bool)> {
        loop {
            let (name, is_slow) = match self.quick.pop_front() {
                Some(name) => (name, false),
                None if self.slow_threads < SLOW_LOOKUPS_MAX => (self.slow.pop_front()?, true),
                None => return None,
            };
            let awaited = self
                .pending
                .get(&name)
                .is_some_and(|sender| sender.receiver_count() > 0);
            if awaited {
                self.slow_threads += usize::from(is_slow);
                return Some((name, is_slow));
            }
            self.pending.remove(&name);
        }
    }

    fn note(&mut self, name: Arc<str>, is_quick: bool) {
        if is_quick {
            self.slow_names.remove(&name);
        } else {
            if self.slow_names.len() >= SLOW_NAMES_MAX {
                self.slow_names.clear();
            }
            self.slow_names.insert(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Condvar;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    #[derive(Default)]
    struct GatedLookup {
        open: Mutex<bool>,
        opened: Condvar,
    }

    impl GatedLookup {
        fn wait(&self) {
            let open = self.open.lock().unwrap();
            drop(self.opened.wait_while(open, |open| !*open).unwrap());
        }

        fn set(&self, open: bool) {
            *self.open.lock().unwrap() = open;
            self.opened.notify_all();
        }
    }

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[tokio::test]
    async fn everyone_who_waits_for_a_name_shares_one_lookup() {
        let (gate, count) = (Arc::new(GatedLookup::default()), Arc::new(AtomicUsize::new(0)));
        let (waiting, counted) = (gate.clone(), count.clone());
        let resolver = SystemResolver::looking_up(move |_| {
            counted.fetch_add(1, SeqCst);
            waiting.wait();
            Ok(vec![HERE])
        });
        let answers: Vec<_> = (0..100).map(|_| resolver.lookups.ask("name").unwrap()).collect();
        gate.set(true);
        for mut answer in answers {
            let found = answer.wait_for(Option::is_some).await.unwrap();
            assert_eq!(*found, Some(Ok(vec![HERE])));
        }
        assert_eq!(count.load(SeqCst), 1);
        assert_eq!(resolver.addresses("name").await.unwrap(), [HERE]);
        assert_eq!(count.load(SeqCst), 2);
    }

    // Regression: 512 hanging names took every thread of the runtime's pool, which other work needs
    // as well.
    #[tokio::test]
    async fn names_that_hang_leave_threads_to_others() {
        let gate = Arc::new(GatedLookup::default());
        gate.set(true);
        let (waiting, begun) = (gate.clone(), Arc::new(AtomicUsize::new(0)));
        let counted = begun.clone();
        let resolver = SystemResolver::looking_up(move |host| {
            if host == "good" {
                return Ok(vec![HERE]);
            }
            counted.fetch_add(1, SeqCst);
            waiting.wait();
            Err(io::Error::other("no answer"))
        });
        for n in 0..100 {
            resolver.addresses(&format!("hangs{n}")).await.unwrap_err();
        }
        gate.set(false);
        begun.store(0, SeqCst);
        let hanging: Vec<_> = (0..100)
            .map(|n| resolver.lookups.ask(&format!("hangs{n}")).unwrap())
            .collect();
        assert_eq!(resolver.addresses("good").await.unwrap(), [HERE]);
        assert!(begun.load(SeqCst) <= SLOW_LOOKUPS_MAX);
        gate.set(true);
        for mut answer in hanging {
            answer.wait_for(Option::is_some).await.unwrap();
        }
        let resting = || {
            let state = resolver.lookups.state();
            (state.pending.len(), state.quick.len(), state.slow.len())
        };
        assert_eq!(resting(), (0, 0, 0));
    }
}
