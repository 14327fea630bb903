use super::page::{MetricKind, MetricsPage, labels};
use super::*;
use std::time::Duration;

#[test]
fn lines_are_as_prometheus_reads_them() {
    let mut page = MetricsPage::default();
    page.family("x_total", MetricKind::Counter, "How many.");
    page.line("x_total", "", 3);
    page.line(
        "x_total",
        &labels(&[("topic", "a\"b\\c\nd"), ("reason", "r")]),
        0.5,
    );
    let expected = "# HELP x_total How many.\n# TYPE x_total counter\n\
                    x_total 3\n\
                    x_total{topic=\"a\\\"b\\\\c\\nd\",reason=\"r\"} 0.5\n";
    assert_eq!(page.text, expected);
}

#[test]
fn histograms_count_upwards() {
    let histogram = Histogram {
        counts: [2, 0, 1],
        beyond: 4,
        sum: Duration::from_millis(1_250),
    };
    let mut page = MetricsPage::default();
    page.histogram("h", "topic=\"t\"", &[0.5, 1.0, 30.0], &histogram, |_, value| {
        value
    });
    let expected = "h_bucket{topic=\"t\",le=\"0.5\"} 2\n\
                    h_bucket{topic=\"t\",le=\"1\"} 2\n\
                    h_bucket{topic=\"t\",le=\"30\"} 3\n\
                    h_bucket{topic=\"t\",le=\"+Inf\"} 7\n\
                    h_sum{topic=\"t\"} 1.25\n\
                    h_count{topic=\"t\"} 7\n";
    assert_eq!(page.text, expected);
}

// Regression: deleting a topic that is summed up with others must not make the counter decrease,
// since a decrease would be taken for a restart.
#[test]
fn what_is_added_up_never_goes_back() {
    let shown = MonotonicCounters::default();
    let told = [5.0, 9.0, 3.0, 10.0].map(|value| shown.at_least("x", value));
    assert_eq!(told, [5.0, 9.0, 9.0, 10.0]);
    assert_eq!(shown.at_least("y", 1.0), 1.0);
}

#[test]
fn it_is_decided_once_who_is_shown_alone() {
    let topics: [OnceLock<bool>; 4] = Default::default();
    let mut alive = 0;
    let decided = topics.each_ref().map(|one| decide(one, &mut alive, 2));
    assert_eq!(decided, [true, true, false, false]);
    // After a topic with its own series is deleted, a new topic gets its slot, but not one that has
    // already been summed up with others.
    let mut alive = 1;
    let fresh = OnceLock::new();
    assert!(!decide(&topics[2], &mut alive, 2));
    assert!(decide(&fresh, &mut alive, 2));
    assert!(!decide(&OnceLock::new(), &mut alive, 2));
}
