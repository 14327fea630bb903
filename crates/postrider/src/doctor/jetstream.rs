//! JetStream: whether it is reachable, has the capacity that is needed, and how durable it is.

use super::finding::Finding;
use postrider_core::time::Clock;
use postrider_engine::clock::SystemClock;
use postrider_jetstream::JetStreamSettings;
use postrider_jetstream::health::{
    self, JetStreamReport, NOT_THERE, ServerExamination, StreamStatus, SyncPolicy,
};
use std::time::Duration;
use tokio::time::timeout;

const ABOUT: &str = "jetstream";
/// A server that is not reached within this time counts as down.
const PATIENCE: Duration = Duration::from_secs(10);
/// Publish requests are cut into messages of this size; smaller messages mean many more of them.
const PAYLOAD_LEAST: usize = 256 << 10;
/// With less storage left, an account is soon full.
const STORAGE_LEFT_LEAST: u64 = 1 << 30;
/// Streams besides the partitions': catalog, archive, nodes.
const OTHER_STREAMS: u64 = 3;

/// Examines JetStream. The duration is the offset of the server's clock from ours.
pub async fn examine(settings: &JetStreamSettings) -> (Vec<Finding>, Option<Duration>) {
    match timeout(PATIENCE, health::examine(settings)).await {
        Err(_) => (vec![unreachable("no server answers")], None),
        Ok(Err(e)) => (vec![unreachable(&e.to_string())], None),
        Ok(Ok(seen)) => {
            let now = SystemClock.now();
            let apart = seen.now.map(|there| there.since(now).max(now.since(there)));
            (judge(settings, &seen), apart)
        }
    }
}

fn unreachable(why: &str) -> Finding {
    let todo = if why.contains("refuses these credentials") || why.contains("credentials") {
        "give a user that the servers know: store.jetstream.user and password, token, nkey or credentials_file"
    } else if why.contains("does not offer JetStream") {
        "switch it on: jetstream { store_dir: … } in the server's configuration, and jetstream: enabled for the account"
    } else if why.contains("or later is needed") {
        "install a newer nats-server"
    } else if why.contains("certificate") || why.contains("InvalidContentType") {
        "look at store.jetstream.tls, ca_file, cert_file and key_file"
    } else {
        "start the NATS servers, or look at store.jetstream.urls and the network between"
    };
    Finding::problem(ABOUT, why, todo)
}

fn judge(settings: &JetStreamSettings, seen: &ServerExamination) -> Vec<Finding> {
    let cluster = match &seen.cluster {
        Some(cluster) => format!(", cluster {cluster} with {} addresses", seen.addresses),
        None => ", a single server".into(),
    };
    let (server, version) = (&seen.server, &seen.version);
    let mut found = vec![Finding::ok(
        ABOUT,
        format!("connected to {server}, version {version}{cluster}"),
    )];
    found.extend(replicas(settings, seen));
    found.extend(account(settings, seen));
    if seen.payload_max < PAYLOAD_LEAST {
        let what = format!(
            "messages may have {} KiB only: events are cut into many of them",
            seen.payload_max >> 10
        );
        found.push(Finding::warning(
            ABOUT,
            what,
            "set max_payload: 2MB in the servers' configuration",
        ));
    }
    found.extend(streams(settings, &seen.report));
    found.push(disk(&seen.report));
    found
}

fn replicas(settings: &JetStreamSettings, seen: &ServerExamination) -> Option<Finding> {
    let wanted = settings.replicas;
    if wanted == 1 {
        return None;
    }
    let has = match seen.cluster {
        None => 1,
        Some(_) => seen.addresses,
    };
    // A server may have several addresses, or hide them, so the number of servers is not certain.
    let what = format!("store.jetstream.replicas is {wanted}, but {has} servers are known");
    let todo = "start more NATS servers in one cluster, or ask for fewer replicas";
    match (&seen.cluster, has < wanted) {
        (_, false) => None,
        (None, true) => Some(Finding::problem(ABOUT, what, todo)),
        (Some(_), true) => Some(Finding::warning(ABOUT, what, todo)),
    }
}

fn account(settings: &JetStreamSettings, seen: &ServerExamination) -> Vec<Finding> {
    let mut found = Vec::new();
    let missing = seen
        .report
        .streams
        .iter()
        .filter(|stream| is_missing(stream))
        .count() as u64;
    if let Some(max) = seen.streams_max
        && seen.streams as u64 + missing > max
    {
        let needed = u64::from(settings.partitions) + OTHER_STREAMS;
        let has = seen.streams;
        let what = format!("the account may have {max} streams and has {has}; this cluster needs {needed}");
        let todo = "raise the account's limit, or use fewer partitions before the first start";
        found.push(Finding::problem(ABOUT, what, todo));
    }
    if let Some(max) = seen.storage_max {
        let left = max.saturating_sub(seen.storage);
        let what = format!("{} MiB of the account's {} MiB are left", left >> 20, max >> 20);
        let todo = "raise max_file_store or the account's limit; publishes are refused when it is full";
        found.push(match left {
            0 => Finding::problem(ABOUT, what, todo),
            left if left < STORAGE_LEFT_LEAST => Finding::warning(ABOUT, what, todo),
            _ => Finding::ok(ABOUT, what),
        });
    }
    found
}

fn is_missing(stream: &StreamStatus) -> bool {
    stream.trouble.as_deref() == Some(NOT_THERE)
}

fn streams(settings: &JetStreamSettings, report: &JetStreamReport) -> Vec<Finding> {
    let prefix = &settings.prefix;
    let (missing, there): (Vec<&StreamStatus>, Vec<&StreamStatus>) =
        report.streams.iter().partition(|one| is_missing(one));
    if there.is_empty() {
        let what = format!("no streams of {prefix:?} yet: the first start makes them");
        return vec![Finding::ok(ABOUT, what)];
    }
    let mut found = Vec::new();
    if !missing.is_empty() {
        let names: Vec<&str> = missing.iter().map(|one| one.name.as_str()).collect();
        let what = format!("streams that should be there are not: {}", names.join(", "));
        let todo = "if the number of partitions was fixed lower by the first start, set store.jetstream.partitions to \
                    that; otherwise somebody deleted them, and what was in them is lost";
        found.push(Finding::warning(ABOUT, what, todo));
    }
    for stream in &there {
        let name = &stream.name;
        if let Some(why) = &stream.trouble {
            let todo = "see that most of the stream's servers are up and reach each other";
            let problem = Finding::problem(ABOUT, format!("stream {name} cannot be written: {why}"), todo);
            found.push(problem.command(format!("nats stream info {name}")));
        }
        if stream.trouble.is_none() && stream.replicas < settings.replicas {
            let (has, wanted) = (stream.replicas, settings.replicas);
            let what =
                format!("stream {name} is kept by {has} servers though store.jetstream.replicas is {wanted}");
            let todo = "change the stream";
            let warning = Finding::warning(ABOUT, what, todo);
            found.push(warning.command(format!("nats stream edit {name} --replicas {wanted}")));
        }
        let behind: Vec<&str> = stream
            .others
            .iter()
            .filter(|copy| copy.offline || !copy.current)
            .map(|copy| copy.server.as_str())
            .collect();
        if !behind.is_empty() {
            let what = format!(
                "the copies of stream {name} on {} are away or behind",
                behind.join(", ")
            );
            found.push(Finding::warning(
                ABOUT,
                what,
                "start those servers, or wait until they have caught up",
            ));
        }
    }
    found.extend(report.nearly_spent().into_iter().map(|what| {
        Finding::warning(
            ABOUT,
            what,
            "move to a cluster with another prefix before that, by postrider migrate",
        )
    }));
    if found.is_empty() {
        let messages: u64 = there.iter().map(|one| one.messages).sum();
        let bytes: u64 = there.iter().map(|one| one.bytes).sum();
        let count = there.len();
        found.push(Finding::ok(
            ABOUT,
            format!("{count} streams, {messages} messages, {} MiB", bytes >> 20),
        ));
    }
    found
}

/// Durability after a power cut.
fn disk(report: &JetStreamReport) -> Finding {
    let guarantee = &report.guarantee;
    match report.sync {
        SyncPolicy::Always => Finding::ok(ABOUT, format!("sync always: {guarantee}")),
        SyncPolicy::Interval(_) => Finding::warning(
            ABOUT,
            format!("sync {}: {guarantee}", report.sync),
            "set sync_interval: always in the servers' jetstream settings, unless that is what is wanted",
        ),
        SyncPolicy::Unknown => Finding::warning(
            ABOUT,
            format!("sync unknown: {guarantee}"),
            "set store.jetstream.monitor_urls, or system_user and system_password, so that the servers can be asked",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::FindingLevel;
    use postrider_jetstream::health::{StreamReplicaStatus, guarantee};
    use std::sync::Arc;

    fn stream(name: &str, replicas: usize) -> StreamStatus {
        StreamStatus {
            name: name.into(),
            leader: Some("n1".into()),
            others: (1..replicas)
                .map(|n| StreamReplicaStatus {
                    server: format!("n{}", n + 1),
                    current: true,
                    offline: false,
                    lag: 0,
                })
                .collect(),
            replicas,
            messages: 10,
            bytes: 2 << 20,
            ..StreamStatus::default()
        }
    }

    fn report(replicas: usize, sync: SyncPolicy, streams: Vec<StreamStatus>) -> Arc<JetStreamReport> {
        Arc::new(JetStreamReport {
            version: Some("2.15.1".into()),
            servers: Vec::new(),
            replicas,
            sync,
            guarantee: guarantee(replicas, sync),
            partitions: 1,
            streams,
        })
    }

    fn seen(report: Arc<JetStreamReport>) -> ServerExamination {
        ServerExamination {
            server: "n1".into(),
            version: "2.15.1".into(),
            cluster: Some("C1".into()),
            addresses: 3,
            payload_max: 1 << 20,
            streams: 2,
            streams_max: None,
            storage: 0,
            storage_max: None,
            now: None,
            report,
        }
    }

    fn settings(replicas: usize) -> JetStreamSettings {
        JetStreamSettings {
            replicas,
            ..JetStreamSettings::default()
        }
    }

    fn check(settings: &JetStreamSettings, seen: &ServerExamination, level: FindingLevel, part: &str) {
        let found = judge(settings, seen);
        let worst = found.iter().map(|one| one.level).max().unwrap();
        assert_eq!(worst, level, "{found:#?}");
        assert!(
            found
                .iter()
                .any(|one| one.level == level && one.what.contains(part)),
            "{part}: {found:#?}"
        );
        assert!(
            found
                .iter()
                .all(|one| one.level == FindingLevel::Ok || one.todo.is_some()),
            "{found:#?}"
        );
    }

    #[test]
    fn what_is_well_is_said_to_be() {
        let good = report(
            3,
            SyncPolicy::Always,
            vec![stream("p00", 3), stream("catalog", 3)],
        );
        check(
            &settings(3),
            &seen(good),
            FindingLevel::Ok,
            "2 streams, 20 messages, 4 MiB",
        );
        let gone = |name: &str| StreamStatus {
            trouble: Some(NOT_THERE.into()),
            ..stream(name, 3)
        };
        let fresh = report(3, SyncPolicy::Always, vec![gone("p00"), gone("catalog")]);
        check(
            &settings(3),
            &seen(fresh),
            FindingLevel::Ok,
            "the first start makes them",
        );
        let half = report(3, SyncPolicy::Always, vec![stream("p00", 3), gone("p01")]);
        check(&settings(3), &seen(half), FindingLevel::Warning, "not: p01");
    }

    #[test]
    fn what_cannot_be_is_a_problem() {
        let good = || report(1, SyncPolicy::Always, vec![stream("p00", 1)]);
        let alone = ServerExamination {
            cluster: None,
            addresses: 0,
            ..seen(good())
        };
        check(&settings(1), &alone, FindingLevel::Ok, "a single server");
        check(
            &settings(3),
            &alone,
            FindingLevel::Problem,
            "replicas is 3, but 1 servers",
        );
        let few = ServerExamination {
            addresses: 2,
            ..seen(good())
        };
        check(&settings(3), &few, FindingLevel::Warning, "2 servers are known");
        let full = ServerExamination {
            storage: 10 << 30,
            storage_max: Some(10 << 30),
            ..seen(good())
        };
        check(
            &settings(1),
            &full,
            FindingLevel::Problem,
            "0 MiB of the account's",
        );
        let missing = StreamStatus {
            trouble: Some(NOT_THERE.into()),
            ..stream("p00", 1)
        };
        let limited = ServerExamination {
            streams: 10,
            streams_max: Some(10),
            ..seen(report(1, SyncPolicy::Always, vec![missing]))
        };
        check(
            &settings(1),
            &limited,
            FindingLevel::Problem,
            "this cluster needs 11",
        );
        let leaderless = StreamStatus {
            trouble: Some("it has no leader".into()),
            ..stream("p00", 3)
        };
        let report = report(3, SyncPolicy::Always, vec![leaderless]);
        check(
            &settings(3),
            &seen(report),
            FindingLevel::Problem,
            "p00 cannot be written: it has no leader",
        );
    }

    #[test]
    fn what_is_not_as_it_should_be_is_warned_of() {
        let minutes = SyncPolicy::Interval(Duration::from_secs(120));
        let streams = || vec![stream("p00", 1)];
        check(
            &settings(1),
            &seen(report(1, minutes, streams())),
            FindingLevel::Warning,
            "sync interval 2m",
        );
        check(
            &settings(1),
            &seen(report(1, SyncPolicy::Unknown, streams())),
            FindingLevel::Warning,
            "sync unknown",
        );
        check(
            &settings(3),
            &seen(report(1, SyncPolicy::Always, streams())),
            FindingLevel::Warning,
            "p00 is kept by 1 servers",
        );
        let mut away = stream("p00", 3);
        away.others[1].offline = true;
        check(
            &settings(3),
            &seen(report(3, SyncPolicy::Always, vec![away])),
            FindingLevel::Warning,
            "on n3 are away",
        );
        let small = ServerExamination {
            payload_max: 64 << 10,
            ..seen(report(1, SyncPolicy::Always, streams()))
        };
        check(&settings(1), &small, FindingLevel::Warning, "64 KiB");
    }

    #[test]
    fn it_is_said_what_to_do_about_a_server_that_cannot_be_used() {
        for (why, todo) in [
            (
                "cannot connect to nats://x: Connection refused",
                "start the NATS servers",
            ),
            (
                "cannot connect to nats://x: the server refuses these credentials",
                "a user that the servers know",
            ),
            (
                "the NATS server does not offer JetStream to this account: x",
                "switch it on",
            ),
            (
                "the NATS server has version 2.9.0, but 2.12 or later is needed",
                "newer nats-server",
            ),
            (
                "cannot connect: invalid peer certificate: UnknownIssuer",
                "ca_file",
            ),
        ] {
            let finding = unreachable(why);
            assert!(finding.todo.as_ref().unwrap().contains(todo), "{finding:?}");
        }
    }
}
