//! Report of a measurement: a table for people and a line of JSON for programs.

use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;

use super::procfs::MachineInfo;
use super::publisher::PublishingResult;
use super::sink::{LatencyPercentiles, SinkStats};
use super::{BenchLoad, MeasuredServer};

/// All results, as printed by `--output json`.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    pub machine: MachineInfo,
    pub fdatasync_ms: LatencyPercentiles,
    pub secs: f64,
    pub size: usize,
    pub conns: u32,
    pub backlog: u64,
    pub runs: Vec<LoadResult>,
    pub ratios: Vec<RelayRatio>,
    pub recorder: Vec<RecorderCost>,
}

/// Result of one load on one server.
#[derive(Clone, Debug, Serialize)]
pub struct LoadResult {
    pub load: BenchLoad,
    pub server: MeasuredServer,
    /// Events offered per second; `None` in a run for the highest rate.
    pub offered_per_s: Option<f64>,
    pub deliveries_per_s: f64,
    pub ack_ms: LatencyPercentiles,
    pub end_to_end_ms: LatencyPercentiles,
    pub cpu_us_per_delivery: Option<f64>,
    /// CPU time of the servers that keep the log, where they are processes of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_cpu_us_per_delivery: Option<f64>,
    pub rss_peak_mib: Option<f64>,
    pub published: u64,
    pub publish_failed: u64,
    pub delivered: u64,
    pub missing: u64,
    pub duplicates: u64,
    pub events_per_delivery_request: f64,
    pub deliveries_per_second: Vec<u64>,
    pub deliveries_per_endpoint: Vec<u64>,
    /// Share of the machine's CPU that neither the server nor the bench used: other programs were
    /// running.
    pub cpu_share_others: Option<f64>,
    pub error_first: Option<String>,
}

/// Kernel readings of a run.
#[derive(Clone, Copy, Debug)]
pub struct KernelUsage {
    pub server_cpu_s: Option<f64>,
    /// CPU time of the servers that keep the log, where they are processes of their own.
    pub store_cpu_s: Option<f64>,
    pub server_rss_peak_mib: Option<f64>,
    pub cpu_share_others: Option<f64>,
}

/// A run as a multiple of the relay's run of the same load.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RelayRatio {
    pub load: BenchLoad,
    pub server: MeasuredServer,
    pub at_half_rate: bool,
    pub deliveries_per_s: Option<f64>,
    pub end_to_end_p50: Option<f64>,
    pub end_to_end_p99: Option<f64>,
    pub cpu_us_per_delivery: Option<f64>,
    pub rss_peak_mib: Option<f64>,
}

/// A run with the flight recorder as a multiple of the run of the same load without it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RecorderCost {
    pub load: BenchLoad,
    pub at_half_rate: bool,
    pub deliveries_per_s: Option<f64>,
    pub end_to_end_p99: Option<f64>,
    pub cpu_us_per_delivery: Option<f64>,
}

impl LoadResult {
    pub fn new(
        load: BenchLoad,
        server: MeasuredServer,
        offered_per_s: Option<f64>,
        published: PublishingResult,
        arrived: SinkStats,
        usage: KernelUsage,
    ) -> LoadResult {
        let per_delivery = |cpu_s: f64| quotient(cpu_s * 1e6, arrived.delivered as f64);
        let rate = quotient(published.delivered_meanwhile as f64, published.secs);
        let expected = published.events * load.fan_out();
        let per_request = quotient(arrived.delivered as f64, arrived.requests as f64);
        LoadResult {
            load,
            server,
            offered_per_s: offered_per_s.map(tenths),
            deliveries_per_s: tenths(rate.unwrap_or(0.0)),
            ack_ms: published.ack_ms,
            end_to_end_ms: arrived.latency_ms,
            cpu_us_per_delivery: usage.server_cpu_s.and_then(per_delivery).map(tenths),
            store_cpu_us_per_delivery: usage.store_cpu_s.and_then(per_delivery).map(tenths),
            rss_peak_mib: usage.server_rss_peak_mib.map(tenths),
            published: published.events,
            publish_failed: published.failed,
            delivered: arrived.delivered,
            missing: expected.saturating_sub(arrived.delivered),
            duplicates: arrived.duplicates,
            events_per_delivery_request: tenths(per_request.unwrap_or(0.0)),
            deliveries_per_second: arrived.per_second,
            deliveries_per_endpoint: arrived.per_endpoint,
            cpu_share_others: usage.cpu_share_others.map(hundredths),
            error_first: published.error_first,
        }
    }

    /// A run of ten seconds at this rate, at 10 µs a delivery.
    #[cfg(test)]
    pub(super) fn example(load: BenchLoad, deliveries_per_s: f64, store_cpu_us: Option<f64>) -> LoadResult {
        let delivered = (deliveries_per_s * 10.0) as u64;
        let published = PublishingResult {
            events: delivered / load.fan_out(),
            failed: 0,
            error_first: None,
            secs: 10.0,
            delivered_meanwhile: delivered,
            ack_ms: LatencyPercentiles::default(),
        };
        let arrived = SinkStats {
            delivered,
            ..SinkStats::default()
        };
        let usage = KernelUsage {
            server_cpu_s: Some(delivered as f64 * 10e-6),
            store_cpu_s: store_cpu_us.map(|us| delivered as f64 * us * 1e-6),
            server_rss_peak_mib: None,
            cpu_share_others: None,
        };
        LoadResult::new(load, MeasuredServer::Postrider, None, published, arrived, usage)
    }

    fn ratio_to(&self, relay: &LoadResult) -> RelayRatio {
        let of = |ours: f64, theirs: f64| quotient(ours, theirs).map(hundredths);
        let of_measured = |ours: Option<f64>, theirs: Option<f64>| of(ours?, theirs?);
        RelayRatio {
            load: self.load,
            server: self.server,
            at_half_rate: self.offered_per_s.is_some(),
            // At half rate, both servers are offered half of their own highest rate, so the rates
            // are not compared.
            deliveries_per_s: of(self.deliveries_per_s, relay.deliveries_per_s)
                .filter(|_| self.offered_per_s.is_none()),
            end_to_end_p50: of(self.end_to_end_ms.p50, relay.end_to_end_ms.p50),
            end_to_end_p99: of(self.end_to_end_ms.p99, relay.end_to_end_ms.p99),
            cpu_us_per_delivery: of_measured(self.cpu_us_per_delivery, relay.cpu_us_per_delivery),
            rss_peak_mib: of_measured(self.rss_peak_mib, relay.rss_peak_mib),
        }
    }
}

/// Ratios of every run, except the relay's own, to the relay's run of the same load.
pub fn ratios(runs: &[LoadResult]) -> Vec<RelayRatio> {
    let compared = |run: &LoadResult| {
        let same_load = |other: &&LoadResult| {
            other.server == MeasuredServer::Relay
                && other.load == run.load
                && other.offered_per_s.is_some() == run.offered_per_s.is_some()
        };
        let relay = runs.iter().find(same_load)?;
        (run.server != MeasuredServer::Relay).then(|| run.ratio_to(relay))
    };
    runs.iter().filter_map(compared).collect()
}

/// Cost of the flight recorder, for loads that were run with it and without it.
pub fn recorder(runs: &[LoadResult]) -> Vec<RecorderCost> {
    let of = |server: MeasuredServer| runs.iter().filter(move |run| run.server == server);
    let compared = |with: &LoadResult| {
        let same = |other: &&LoadResult| {
            other.load == with.load && other.offered_per_s.is_some() == with.offered_per_s.is_some()
        };
        let ratio = with.ratio_to(of(MeasuredServer::Unrecorded).find(same)?);
        Some(RecorderCost {
            load: ratio.load,
            at_half_rate: ratio.at_half_rate,
            deliveries_per_s: ratio.deliveries_per_s,
            end_to_end_p99: ratio.end_to_end_p99,
            cpu_us_per_delivery: ratio.cpu_us_per_delivery,
        })
    };
    of(MeasuredServer::Postrider).filter_map(compared).collect()
}

impl BenchReport {
    /// The tables and remarks, ready to print.
    pub fn text(&self) -> String {
        let MachineInfo {
            cpu,
            cores,
            memory_mib,
            kernel,
        } = &self.machine;
        let mut text = format!(
            "{cpu}, {cores} cores, {memory_mib} MiB, Linux {kernel}; fdatasync p50 {} ms, p99 {} ms\n\
             {} bytes per event, {} connections, {} s per run\n\n{}\n",
            millis(self.fdatasync_ms.p50),
            millis(self.fdatasync_ms.p99),
            self.size,
            self.conns,
            self.secs,
            self.runs_table(),
        );
        if !self.ratios.is_empty() {
            text += &format!("\nAs a multiple of the relay\n{}\n", self.ratios_table());
        }
        if !self.recorder.is_empty() {
            text += &format!(
                "\nWith the flight recorder, as a multiple of without it\n{}\n",
                self.recorder_table()
            );
        }
        for remark in self.remarks() {
            text += &format!("\n{remark}");
        }
        text
    }

    fn runs_table(&self) -> Table {
        let mut table = table(&[
            "load",
            "server",
            "deliveries/s",
            "ack\np50 ms",
            "ack\np99 ms",
            "end-to-end\np50 ms",
            "end-to-end\np99 ms",
            "CPU µs\n/delivery",
            "peak RSS\nMiB",
            "missing",
            "duplicates",
        ]);
        for run in &self.runs {
            table.add_row([
                named(run.load, run.offered_per_s.is_some()),
                run.server.to_string(),
                format!("{:.0}", run.deliveries_per_s),
                millis(run.ack_ms.p50),
                millis(run.ack_ms.p99),
                millis(run.end_to_end_ms.p50),
                millis(run.end_to_end_ms.p99),
                or_dash(run.cpu_us_per_delivery, |us| format!("{us:.1}")),
                or_dash(run.rss_peak_mib, |mib| format!("{mib:.0}")),
                run.missing.to_string(),
                run.duplicates.to_string(),
            ]);
        }
        table
    }

    fn ratios_table(&self) -> Table {
        let mut table = table(&[
            "load",
            "server",
            "deliveries/s",
            "end-to-end p50",
            "end-to-end p99",
            "CPU/delivery",
            "peak RSS",
        ]);
        for ratio in &self.ratios {
            let times = |value| or_dash(value, |value| format!("{value:.2}×"));
            table.add_row([
                named(ratio.load, ratio.at_half_rate),
                ratio.server.to_string(),
                times(ratio.deliveries_per_s),
                times(ratio.end_to_end_p50),
                times(ratio.end_to_end_p99),
                times(ratio.cpu_us_per_delivery),
                times(ratio.rss_peak_mib),
            ]);
        }
        table
    }

    fn recorder_table(&self) -> Table {
        let mut table = table(&["load", "deliveries/s", "end-to-end p99", "CPU/delivery"]);
        for cost in &self.recorder {
            let times = |value| or_dash(value, |value| format!("{value:.2}×"));
            table.add_row([
                named(cost.load, cost.at_half_rate),
                times(cost.deliveries_per_s),
                times(cost.end_to_end_p99),
                times(cost.cpu_us_per_delivery),
            ]);
        }
        table
    }

    fn remarks(&self) -> Vec<String> {
        let name =
            |run: &LoadResult| format!("{}, {}", named(run.load, run.offered_per_s.is_some()), run.server);
        let runs: Vec<(String, &LoadResult)> = self.runs.iter().map(|run| (name(run), run)).collect();
        remarks(runs.iter().map(|(name, run)| (name.as_str(), *run)))
    }
}

/// Remarks on conditions that distort the numbers.
pub(super) fn remarks<'a>(runs: impl Iterator<Item = (&'a str, &'a LoadResult)>) -> Vec<String> {
    const OTHERS_MAX: f64 = 0.05;
    let mut remarks = Vec::new();
    let mut share: f64 = 0.0;
    for (name, run) in runs {
        share = share.max(run.cpu_share_others.unwrap_or(0.0));
        if run.publish_failed > 0 {
            let failed = run.publish_failed;
            let error = run.error_first.as_deref().unwrap_or("unknown");
            remarks.push(format!(
                "{name}: {failed} events were not accepted; the first error: {error}"
            ));
        }
    }
    if share > OTHERS_MAX {
        remarks.push(format!(
            "other programs used up to {:.0} % of the CPU meanwhile: repeat this on a quiet machine",
            share * 100.0
        ));
    }
    remarks
}

pub(super) fn table(columns: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_FULL_CONDENSED)
        .set_header(columns.iter().map(Cell::new));
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

pub(super) fn named(load: BenchLoad, at_half_rate: bool) -> String {
    let suffix = if at_half_rate { " at half rate" } else { "" };
    format!("{load}{suffix}")
}

pub(super) fn millis(value: f64) -> String {
    if value < 10.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.0}")
    }
}

pub(super) fn or_dash(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "–".to_owned(), show)
}

pub(super) fn quotient(a: f64, b: f64) -> Option<f64> {
    (b > 0.0).then(|| a / b)
}

pub(super) fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

pub(super) fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(load: BenchLoad, server: MeasuredServer, offered_per_s: Option<f64>, factor: u64) -> LoadResult {
        let published = PublishingResult {
            events: 1000 * factor,
            failed: 0,
            error_first: None,
            secs: 2.0,
            delivered_meanwhile: 900 * factor * load.fan_out(),
            ack_ms: LatencyPercentiles::default(),
        };
        let at = |p50| LatencyPercentiles {
            p50,
            p99: p50 * 4.0,
            ..LatencyPercentiles::default()
        };
        let arrived = SinkStats {
            delivered: 1000 * factor * load.fan_out(),
            requests: 1000 * factor,
            latency_ms: at(factor as f64),
            ..SinkStats::default()
        };
        let usage = KernelUsage {
            server_cpu_s: Some(0.05),
            store_cpu_s: None,
            server_rss_peak_mib: Some(8.0 * factor as f64),
            cpu_share_others: Some(0.01),
        };
        LoadResult::new(load, server, offered_per_s, published, arrived, usage)
    }

    fn report(runs: Vec<LoadResult>) -> BenchReport {
        let ratios = ratios(&runs);
        let recorder = recorder(&runs);
        let cpu = "A CPU".to_owned();
        let kernel = "6.1".to_owned();
        let machine = MachineInfo {
            cpu,
            cores: 2,
            memory_mib: 4096,
            kernel,
        };
        let fdatasync_ms = LatencyPercentiles::default();
        BenchReport {
            machine,
            fdatasync_ms,
            secs: 2.0,
            size: 1024,
            conns: 64,
            backlog: 0,
            runs,
            ratios,
            recorder,
        }
    }

    #[test]
    fn rates_are_of_the_publishing_time_and_costs_of_everything_delivered() {
        let run = run(BenchLoad::FanOut, MeasuredServer::Relay, None, 2);
        assert_eq!(run.deliveries_per_s, 9000.0);
        assert_eq!(run.cpu_us_per_delivery, Some(2.5));
        assert_eq!(run.events_per_delivery_request, 10.0);
        assert_eq!(run.missing, 0);
    }

    #[test]
    fn a_run_is_compared_with_the_relay_under_the_same_load() {
        let ratios = ratios(&[
            run(BenchLoad::Single, MeasuredServer::Relay, None, 4),
            run(BenchLoad::Single, MeasuredServer::Postrider, None, 2),
            run(BenchLoad::BatchIn, MeasuredServer::Postrider, None, 2),
            run(BenchLoad::Single, MeasuredServer::Relay, Some(10.0), 1),
            run(BenchLoad::Single, MeasuredServer::Postrider, Some(5.0), 3),
        ]);
        let [most, half] = &ratios[..] else {
            panic!("expected two ratios, got {ratios:?}");
        };
        assert_eq!(most.deliveries_per_s, Some(0.5));
        assert_eq!(most.cpu_us_per_delivery, Some(2.0));
        assert_eq!(most.rss_peak_mib, Some(0.5));
        assert!(half.at_half_rate);
        assert_eq!(half.end_to_end_p99, Some(3.0));
    }

    #[test]
    fn the_recorder_is_compared_with_its_absence() {
        let runs = [
            run(BenchLoad::Single, MeasuredServer::Unrecorded, None, 4),
            run(BenchLoad::Single, MeasuredServer::Postrider, None, 3),
            run(BenchLoad::FanOut, MeasuredServer::Postrider, None, 3),
        ];
        let [cost] = &recorder(&runs)[..] else {
            panic!("expected one comparison");
        };
        assert_eq!(cost.deliveries_per_s, Some(0.75));
        let text = report(runs.to_vec()).text();
        assert!(text.contains("With the flight recorder"), "{text}");
        assert!(text.contains("0.75×"), "{text}");
    }

    #[test]
    fn the_text_has_a_row_for_every_run_and_every_ratio() {
        let text = report(vec![
            run(BenchLoad::Single, MeasuredServer::Relay, None, 4),
            run(BenchLoad::Single, MeasuredServer::Postrider, None, 2),
        ])
        .text();
        let rows = |word: &str| text.lines().filter(|line| line.contains(word)).count();
        assert_eq!(rows("┆ relay "), 1, "{text}");
        assert_eq!(rows("┆ postrider "), 2, "{text}");
        assert!(text.contains("0.50×"), "{text}");
        assert!(!text.contains("not accepted"), "{text}");
    }

    #[test]
    fn failures_and_company_are_remarked_upon() {
        let mut bad = run(BenchLoad::Single, MeasuredServer::Postrider, None, 1);
        bad.publish_failed = 3;
        bad.error_first = Some("401 no".to_owned());
        bad.cpu_share_others = Some(0.38);
        let text = report(vec![bad]).text();
        assert!(
            text.contains("3 events were not accepted; the first error: 401 no"),
            "{text}"
        );
        assert!(text.contains("used up to 38 % of the CPU"), "{text}");
    }

    #[test]
    fn the_json_is_one_line() {
        let report = report(vec![run(
            BenchLoad::BatchInOut,
            MeasuredServer::Backlogged,
            None,
            1,
        )]);
        let line = serde_json::to_string(&report).unwrap();
        assert!(!line.contains('\n'));
        assert!(
            line.contains(r#""load":"batch-in-out","server":"postrider+backlog""#),
            "{line}"
        );
    }
}
