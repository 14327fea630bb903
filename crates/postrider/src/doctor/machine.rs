//! The machine: clock, open files, memory.

use super::finding::Finding;
use postrider_core::duration;
use postrider_core::time::Timestamp;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Build time of this program: a correct clock shows a later time.
const EARLIEST: Timestamp = Timestamp::from_secs(1_767_225_600);
/// Largest difference of clocks that agree. HTTP dates have whole seconds.
const SKEW_MAX: Duration = Duration::from_secs(3);
/// Open files needed: connections of two listeners, and deliveries.
const FILES_LEAST: u64 = 8_192;
const FILES_GOOD: u64 = 65_536;
const MEMORY_LEAST: u64 = 256 << 20;

/// Times to compare with the machine's clock.
#[derive(Debug, Default)]
pub struct ClockReferences {
    /// Time of the last write to the data directory.
    pub written: Option<Timestamp>,
    /// Time that the running server reports.
    pub server: Option<Timestamp>,
    /// Offset of a NATS server's clock from ours.
    pub nats: Option<Duration>,
    /// Whether the machine synchronizes its clock; `None` if unknown.
    pub synchronized: Option<bool>,
}

pub fn clock(now: Timestamp, times: &ClockReferences) -> Vec<Finding> {
    let about = "clock";
    let mut found = Vec::new();
    let set = "set the clock, or let it be kept: tokens, certificates and retries go by it";
    let keep = "sudo timedatectl set-ntp true";
    if now < EARLIEST {
        found.push(Finding::problem(about, format!("it shows {now}, which is long over"), set).command(keep));
    }
    if let Some(written) = times.written.filter(|written| written.since(now) > SKEW_MAX) {
        let ahead = duration::print(whole(written.since(now)));
        let what = format!("it was set back: files in the data directory were written {ahead} from now");
        let todo =
            "make sure that the clock is right; events received then wait for as long before they expire";
        found.push(Finding::warning(about, what, todo));
    }
    if let Some(server) = times.server {
        let apart = server.since(now).max(now.since(server));
        if apart > SKEW_MAX {
            let what = format!(
                "it differs from the running server's by {}",
                duration::print(whole(apart))
            );
            let todo = "is it another machine's? Then set its clock or this one's";
            found.push(Finding::warning(about, what, todo).command(keep));
        }
    }
    if let Some(apart) = times.nats.filter(|apart| *apart > SKEW_MAX) {
        let what = format!(
            "it differs from the NATS server's by {}",
            duration::print(whole(apart))
        );
        let todo =
            "keep the clocks of all nodes and servers: retries become due by the clock of whoever owns them";
        found.push(Finding::warning(about, what, todo).command(keep));
    }
    if times.synchronized == Some(false) {
        let what = "nothing keeps it right: the machine says that it is not synchronized";
        found.push(Finding::warning(about, what, "switch time synchronization on").command(keep));
    }
    if found.is_empty() {
        let kept = match times.synchronized {
            Some(true) => ", synchronized",
            _ => "",
        };
        found.push(Finding::ok(about, format!("{now}{kept}")));
    }
    found
}

fn whole(time: Duration) -> Duration {
    Duration::from_secs(time.as_secs())
}

/// Whether the machine reports a synchronized clock; `None` where that is not reported.
pub fn synchronized() -> Option<bool> {
    if Path::new("/run/systemd/timesync/synchronized").exists() {
        return Some(true);
    }
    let asked = Command::new("timedatectl")
        .args(["show", "--property=NTPSynchronized", "--value"])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    match asked.stdout.trim_ascii() {
        b"yes" => Some(true),
        b"no" => Some(false),
        _ => None,
    }
}

/// The hard limit of open files: a server started from here raises its soft limit to it.
pub fn open_files_max() -> Option<u64> {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Nofile).maximum
}

pub fn open_files(max: Option<u64>) -> Finding {
    let about = "open files";
    match max {
        None => Finding::ok(about, "no limit"),
        Some(max) if max >= FILES_LEAST => Finding::ok(about, format!("at most {max}")),
        Some(max) => Finding::warning(
            about,
            format!("at most {max}: every connection is one, and the next is not accepted"),
            format!("raise the limit; in a systemd unit, LimitNOFILE={FILES_GOOD}"),
        )
        .command(format!("ulimit -Hn {FILES_GOOD}")),
    }
}

/// Memory left to the machine, or to this process's control group if that has less.
pub fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let machine = meminfo(&text)?;
    let number = |name: &str| {
        let text = std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let ours = number("memory.max").map(|max| max.saturating_sub(number("memory.current").unwrap_or(0)));
    Some(ours.map_or(machine, |ours| ours.min(machine)))
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

pub fn memory(available: Option<u64>) -> Finding {
    let about = "memory";
    match available {
        None => Finding::ok(about, "the machine does not say"),
        Some(bytes) if bytes >= MEMORY_LEAST => Finding::ok(about, format!("{} MiB available", bytes >> 20)),
        Some(bytes) => Finding::warning(
            about,
            format!("only {} MiB available", bytes >> 20),
            format!(
                "give it {} MiB or more: queues and the log's buffers want room",
                MEMORY_LEAST >> 20
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::FindingLevel;
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_900_000_000);

    fn levels(now: Timestamp, times: &ClockReferences) -> Vec<FindingLevel> {
        clock(now, times).iter().map(|one| one.level).collect()
    }

    #[test]
    fn the_clock_is_compared_with_whatever_else_knows_the_time() {
        let second = Duration::from_secs(1);
        assert_eq!(levels(NOW, &ClockReferences::default()), [FindingLevel::Ok]);
        assert_eq!(
            levels(Timestamp::from_secs(0), &ClockReferences::default()),
            [FindingLevel::Problem]
        );
        let near = ClockReferences {
            written: Some(NOW + second),
            server: Some(NOW - second),
            nats: Some(second),
            synchronized: Some(true),
        };
        assert_eq!(levels(NOW, &near), [FindingLevel::Ok]);
        let off = ClockReferences {
            written: Some(NOW + 3600 * second),
            server: Some(NOW - 60 * second),
            nats: Some(120 * second),
            synchronized: Some(false),
        };
        let found = clock(NOW, &off);
        assert_eq!(levels(NOW, &off), [FindingLevel::Warning; 4]);
        assert!(found[0].what.contains("1h from now"), "{}", found[0].what);
        assert!(found[1].what.contains("by 1m"), "{}", found[1].what);
        assert!(found[2].what.contains("NATS server's by 2m"), "{}", found[2].what);
    }

    #[test]
    fn limits_are_judged() {
        let check =
            |max: Option<u64>, level: FindingLevel| assert_eq!(open_files(max).level, level, "{max:?}");
        check(None, FindingLevel::Ok);
        check(Some(1_048_576), FindingLevel::Ok);
        check(Some(1024), FindingLevel::Warning);
        assert_eq!(memory(Some(64 << 20)).level, FindingLevel::Warning);
        assert_eq!(memory(Some(1 << 30)).level, FindingLevel::Ok);
        assert_eq!(memory(None).level, FindingLevel::Ok);
        assert_eq!(
            meminfo("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(meminfo("nothing"), None);
    }
}
