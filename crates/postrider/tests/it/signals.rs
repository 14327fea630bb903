//! Signals to programs that a test has started.

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::process::Child;

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

pub fn send(child: &Child, signal: Signal) {
    kill_process(pid_of(child), signal).expect("a child that runs takes signals");
}

/// Stops every thread of the program. Sending the signal returns before they have stopped; the
/// system reports the stop to the parent once the last thread has.
pub fn hold(child: &Child) {
    send(child, Signal::STOP);
    let stopped = waitpid(Some(pid_of(child)), WaitOptions::UNTRACED).expect("a child can be waited for");
    let (_, status) = stopped.expect("the wait was for as long as it takes");
    assert!(
        status.stopped(),
        "the program ended instead of stopping: {status:?}"
    );
}

pub fn go_on(child: &Child) {
    send(child, Signal::CONT);
}
