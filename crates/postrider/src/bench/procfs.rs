//! Readings from the kernel: CPU time and peak memory of a process, and of the whole machine.
//!
//! Every reading is `None` where there is no `/proc`.

use std::fs;

use serde::Serialize;

/// CPU seconds that a process has used so far, with the children it has waited for.
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(process_ticks(&stat)? as f64 / ticks_per_second())
}

/// The most memory a process has had resident, in MiB.
pub fn rss_peak_mib(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(rss_peak_kib(&status)? as f64 / 1024.0)
}

/// The memory a process has resident now, in MiB.
pub fn rss_mib(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(kib(field(&status, "VmRSS")?)? as f64 / 1024.0)
}

/// CPU seconds during which any core of this machine was busy or taken away by its host.
pub fn machine_busy_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    Some(busy_ticks(&stat)? as f64 / ticks_per_second())
}

/// The machine's load average of the last minute.
pub fn load_average() -> Option<f64> {
    let averages = fs::read_to_string("/proc/loadavg").ok()?;
    averages.split_ascii_whitespace().next()?.parse().ok()
}

/// Description of the machine that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct MachineInfo {
    pub cpu: String,
    pub cores: usize,
    pub memory_mib: u64,
    pub kernel: String,
}

impl MachineInfo {
    pub fn read() -> MachineInfo {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let cpu = field(&read("/proc/cpuinfo"), "model name")
            .unwrap_or("unknown")
            .to_owned();
        let memory = read("/proc/meminfo");
        let memory_kib = field(&memory, "MemTotal").and_then(kib).unwrap_or(0);
        MachineInfo {
            cpu,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory_kib / 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}

/// utime, stime, cutime and cstime of a `/proc/<pid>/stat` line.
fn process_ticks(stat: &str) -> Option<u64> {
    // The command name may hold spaces and brackets: count the fields after its last bracket.
    let after_name = stat.rsplit_once(')')?.1;
    let fields: Vec<&str> = after_name.split_ascii_whitespace().collect();
    sum(fields.get(11..15)?)
}

/// Everything but idle and I/O wait in the first line of `/proc/stat`.
fn busy_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    // user nice system idle iowait irq softirq steal; guest time is part of user time.
    Some(sum(fields.get(..3)?)? + sum(fields.get(5..8)?)?)
}

fn rss_peak_kib(status: &str) -> Option<u64> {
    kib(field(status, "VmHWM")?)
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

fn kib(value: &str) -> Option<u64> {
    value.strip_suffix("kB")?.trim().parse().ok()
}

fn sum(fields: &[&str]) -> Option<u64> {
    fields.iter().map(|field| field.parse::<u64>().ok()).sum()
}

/// The unit of the kernel's counters, from the auxiliary vector: asking libc would need `unsafe`.
fn ticks_per_second() -> f64 {
    const USUAL: u64 = 100;
    let vector = fs::read("/proc/self/auxv").unwrap_or_default();
    clock_ticks(&vector).unwrap_or(USUAL) as f64
}

/// The `AT_CLKTCK` entry of an auxiliary vector of a 64-bit process.
fn clock_ticks(vector: &[u8]) -> Option<u64> {
    const AT_CLKTCK: u64 = 17;
    let (words, _) = vector.as_chunks::<8>();
    let (entries, _) = words.as_chunks::<2>();
    let mut entries = entries.iter().map(|entry| entry.map(u64::from_ne_bytes));
    entries.find(|[key, _]| *key == AT_CLKTCK).map(|[_, ticks]| ticks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_found_behind_any_command_name() {
        let check = |stat: &str, expected| assert_eq!(process_ticks(stat), expected);
        let rest = "S 1 2 3 0 -1 4194560 10 20 30 40 500 60 7 8 20 0 3 0 99";
        check(&format!("42 (postrider) {rest}"), Some(575));
        check(&format!("42 (a ) b) (c) {rest}"), Some(575));
        check("42 (postrider) S 1 2", None);
        check("", None);
    }

    #[test]
    fn busy_time_leaves_out_idle_and_waiting() {
        let stat = "cpu  100 1 20 9000 800 3 4 5 6 7\ncpu0 1 2 3\n";
        assert_eq!(busy_ticks(stat), Some(133));
        assert_eq!(busy_ticks("intr 1"), None);
    }

    #[test]
    fn peak_memory_is_read_from_the_status() {
        assert_eq!(
            rss_peak_kib("Name:\tx\nVmHWM:\t   12345 kB\nVmRSS:\t 1 kB\n"),
            Some(12345)
        );
        assert_eq!(rss_peak_kib("Name:\tx\n"), None);
    }

    #[test]
    fn the_tick_is_read_from_the_auxiliary_vector() {
        let words = [6u64, 4096, 17, 250, 0, 0];
        let vector: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(clock_ticks(&vector), Some(250));
        assert_eq!(clock_ticks(&vector[..12]), None);
    }
}
