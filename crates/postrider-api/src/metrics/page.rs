//! Text in Prometheus' exposition format, version 0.0.4.

use postrider_engine::meters::Histogram;
use std::fmt::{Display, Write};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    Histogram,
    /// Only a sum and a count.
    Summary,
    /// A counter whose name is prescribed and lacks the suffix that Prometheus expects of counters.
    Untyped,
}

#[derive(Default)]
pub(super) struct MetricsPage {
    pub text: String,
}

impl MetricsPage {
    pub fn family(&mut self, name: &str, kind: MetricKind, help: &str) {
        let kind = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
            MetricKind::Summary => "summary",
            MetricKind::Untyped => "untyped",
        };
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Appends a sample. `labels` as [`labels`] renders them.
    pub fn line(&mut self, name: &str, labels: &str, value: impl Display) {
        self.text.push_str(name);
        if !labels.is_empty() {
            self.text.push('{');
            self.text.push_str(labels);
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }

    /// Appends a histogram. `told` may adjust each value before it is written; it also gets the
    /// beginning of the line.
    pub fn histogram<const BOUNDS: usize>(
        &mut self,
        name: &str,
        labels: &str,
        bounds: &[f64; BOUNDS],
        histogram: &Histogram<BOUNDS>,
        told: impl Fn(&str, f64) -> f64,
    ) {
        let mut tell = |ending: &str, labels: &str, value: f64| {
            let name = format!("{name}_{ending}");
            let value = told(&format!("{name}{labels}"), value);
            self.line(&name, labels, value);
        };
        let mut so_far = 0;
        for (bound, count) in bounds.iter().zip(histogram.counts) {
            so_far += count;
            tell("bucket", &format!("{labels},le=\"{bound}\""), so_far as f64);
        }
        let all = histogram.count() as f64;
        tell("bucket", &format!("{labels},le=\"+Inf\""), all);
        tell("sum", labels, histogram.sum.as_secs_f64());
        tell("count", labels, all);
    }
}

pub(super) fn labels(labels: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (label, value) in labels {
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(label);
        text.push_str("=\"");
        for c in value.chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                '"' => text.push_str("\\\""),
                '\n' => text.push_str("\\n"),
                other => text.push(other),
            }
        }
        text.push('"');
    }
    text
}
