//! Exits the process when stopping takes too long, whatever the cause: a task that is never woken,
//! a worker thread that spins, a disk that does not answer.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Time after the grace period after which the process exits if it has not stopped.
pub const STOP_MARGIN: Duration = Duration::from_secs(15);

/// The part of the server that is being stopped, for the line that is printed if it never stops.
#[derive(Clone)]
pub struct StopProgress {
    part: Arc<Mutex<String>>,
}

impl StopProgress {
    pub fn begin(part: &str) -> StopProgress {
        StopProgress {
            part: Arc::new(Mutex::new(part.to_owned())),
        }
    }

    pub fn enter(&self, part: &str) {
        *self.part.lock().expect("no panic while it is locked") = part.to_owned();
    }

    fn part(&self) -> String {
        self.part.lock().expect("no panic while it is locked").clone()
    }
}

/// Dropping the watchdog disarms it.
pub struct StopWatchdog {
    _disarm: Sender<()>,
}

impl StopWatchdog {
    /// Calls `expire` with the part that did not stop after `patience`, unless dropped before. Runs
    /// on its own thread because the runtime's timers may have stopped, too.
    pub fn arm(
        patience: Duration,
        progress: StopProgress,
        expire: impl FnOnce(String) + Send + 'static,
    ) -> StopWatchdog {
        let (disarm, disarmed) = channel();
        thread::spawn(move || {
            if disarmed.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                expire(progress.part());
            }
        });
        StopWatchdog { _disarm: disarm }
    }
}

/// Time to write the last line before the process exits.
const LAST_LINE_PATIENCE: Duration = Duration::from_secs(1);

/// Exits the process with status 1. `tell` gets a limited time, since the log may be a pipe that
/// nobody reads.
pub fn tell_and_exit(tell: impl FnOnce() + Send + 'static) -> ! {
    tell_within(LAST_LINE_PATIENCE, tell);
    std::process::exit(1);
}

/// Returns when `tell` has returned, or after `patience`.
fn tell_within(patience: Duration, tell: impl FnOnce() + Send + 'static) {
    let (told, telling) = channel::<()>();
    thread::spawn(move || {
        tell();
        drop(told);
    });
    // Either error means that waiting is over: no value is ever sent.
    let _ = telling.recv_timeout(patience);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expired_watchdog_names_the_part_that_did_not_end() {
        let progress = StopProgress::begin("live streams");
        progress.enter("delivery engine");
        let (send, named) = channel();
        let _watchdog = StopWatchdog::arm(Duration::ZERO, progress, move |part| {
            send.send(part).unwrap();
        });
        assert_eq!(named.recv().unwrap(), "delivery engine");
    }

    #[test]
    fn a_dropped_watchdog_never_expires() {
        let (send, named) = channel::<String>();
        let watchdog = StopWatchdog::arm(Duration::from_secs(3600), StopProgress::begin("x"), move |part| {
            send.send(part).unwrap();
        });
        drop(watchdog);
        // The thread ends and drops its sender without sending.
        assert!(named.recv().is_err());
    }

    // The exit waited for a line that could not be written.
    #[test]
    fn a_line_that_cannot_be_written_is_left_alone() {
        let (write, written) = channel::<()>();
        let (begun, begins) = channel();
        tell_within(Duration::from_millis(1), move || {
            begun.send(()).unwrap();
            let _ = written.recv();
        });
        begins.recv().unwrap();
        assert!(write.send(()).is_ok(), "it still waits to be written");
        let (told, telling) = channel();
        tell_within(Duration::from_secs(3600), move || told.send(()).unwrap());
        assert!(
            telling.try_recv().is_ok(),
            "one that can be written is waited for"
        );
    }
}
