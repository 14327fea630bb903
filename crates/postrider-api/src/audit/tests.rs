use super::*;
use crate::EdgeAccess;
use crate::azure::subscriptions::tests::test_server::{ApiTestServer, LabClock, web_hook};
use postrider_audit::{AuditQuery, Config, LineOrder};
use postrider_core::ids::Secret;
use std::time::Duration;

/// A server with an audit log in this directory.
async fn recording(
    directory: &tempfile::TempDir,
    change: impl FnOnce(&mut Server),
) -> (ApiTestServer, Arc<AuditLog>) {
    let config = Config {
        directory: directory.path().to_owned(),
        keep: Duration::from_secs(86_400),
        bytes_max: 1 << 30,
        node: String::new(),
    };
    let log = AuditLog::open(config, Arc::new(LabClock)).unwrap();
    let kept = log.clone();
    let lab = ApiTestServer::with(false, |server| {
        server.audit = Some(kept);
        server.wall = Arc::new(LabClock);
        change(server);
    });
    (lab.await, log)
}

/// The lines of the log, the oldest first.
fn lines(log: &AuditLog) -> Vec<Value> {
    let query = AuditQuery {
        order: LineOrder::OldestFirst,
        limit: 1000,
        ..AuditQuery::default()
    };
    let rows = log.read(&query).unwrap().rows;
    rows.iter()
        .map(|row| serde_json::from_str(&row.text).unwrap())
        .collect()
}

#[tokio::test]
async fn requests_without_a_credential_cannot_push_lines_out_of_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let (lab, log) = recording(&directory, |_| {}).await;
    let local = ("host", "localhost");
    let requests = [
        ("POST", "/adfs/oauth2/token", local, 400),
        ("GET", "/eventsubscriptions/x/validate", local, 400),
        ("GET", "/eventsubscriptions/x/validate?id=1&token=2", local, 404),
        ("PUT", "/portal/x", local, 404),
        ("PUT", "/portal/session", local, 405),
        ("POST", "/portal/session", local, 415),
        ("PUT", "/topics/t", ("host", "elsewhere.example"), 403),
        ("GET", "/topics", ("host", "elsewhere.example"), 403),
    ];
    for _ in 0..30 {
        for (method, path, host, status) in requests {
            lab.exchange(method, path, None, &[host]).await.expect(status);
        }
    }
    assert_eq!(log.status().last_seq, u64::from(REFUSALS_PER_MINUTE));
    // Refusals of authenticated clients are all recorded.
    let reader = ("authorization", "Bearer reader secret");
    let refused = lab
        .exchange("PUT", "/postrider/v1/clock/advance", None, &[local, reader])
        .await;
    assert!(refused.status >= 400, "{}", refused.status);
    let last = lines(&log).pop().unwrap();
    assert_eq!(last["actor"]["id"], "reader");
}

#[tokio::test]
async fn a_webhook_s_query_is_shown_to_those_who_may_write_and_that_is_recorded() {
    const KEY: &str = "a2V5";
    let directory = tempfile::tempdir().unwrap();
    let keys = EdgeAccess::Keys([Secret::new(KEY), Secret::new("")]);
    let (lab, log) = recording(&directory, |server| server.config.edge = keys).await;
    lab.topic("t").await;
    let with = async |method: &str, path: &str, body: Option<Value>, who: (&str, &str)| {
        let json = ("content-type", "application/json");
        let headers = [("host", "localhost"), json, who];
        lab.exchange(method, path, body.as_ref(), &headers)
            .await
            .expect(200)
    };
    let reader = ("authorization", "Bearer reader secret");
    let owner = ("authorization", "Bearer owner secret");
    let key = ("aeg-sas-key", KEY);
    let hook = web_hook("/hook?code=c0de", json!({}));
    with("PUT", "/topics/t/eventSubscriptions/s", Some(hook), owner).await;
    let hook = web_hook("/plain", json!({}));
    with("PUT", "/topics/t/eventSubscriptions/plain", Some(hook), owner).await;
    let written = log.status().last_seq;
    for path in ["/topics/t/eventSubscriptions", "/topics/t/eventSubscriptions/s"] {
        let read = with("GET", path, None, reader).await;
        let text = String::from_utf8(read.bytes.to_vec()).unwrap();
        assert!(
            text.contains("\"https://hook/hook\"") && !text.contains("c0de"),
            "{text}"
        );
    }
    with("GET", "/topics/t/eventSubscriptions/plain", None, owner).await;
    assert_eq!(log.status().last_seq, written, "no secret was shown");
    for who in [owner, key] {
        for path in ["/topics/t/eventSubscriptions", "/topics/t/eventSubscriptions/s"] {
            let read = with("GET", path, None, who).await;
            assert!(String::from_utf8_lossy(&read.bytes).contains("code=c0de"));
            let last = lines(&log).pop().unwrap();
            assert_eq!(last["action"], "subscription.getFullUrl");
            assert_eq!(last["resource"], path);
        }
    }
    assert_eq!(log.status().last_seq, written + 4);
    assert!(lines(&log).iter().all(|line| !line.to_string().contains("c0de")));
}

#[tokio::test]
async fn tokens_are_recorded_as_tokens_whichever_key_has_signed_them() {
    let directory = tempfile::tempdir().unwrap();
    let (lab, log) = recording(&directory, |_| {}).await;
    let before = lab.token_of("owner");
    let rotate = "/postrider/v1/sessions/rotate-key";
    lab.send("POST", rotate, Some(&json!({})), &[]).await.expect(200);
    for token in [before, lab.token_of("owner")] {
        let headers = [("authorization", token.as_str())];
        lab.send("POST", rotate, Some(&json!({})), &headers)
            .await
            .expect(200);
        let last = lines(&log).pop().unwrap();
        assert_eq!(
            (&last["actor"]["id"], &last["actor"]["via"]),
            (&json!("owner"), &json!("token"))
        );
    }
}

#[test]
fn refusals_of_strangers_are_counted_beyond_so_many_a_minute() {
    let mut budget = RefusalBudget::default();
    let now = Timestamp::from_secs(1_700_000_000);
    let recorded = (0..1000).filter(|_| budget.take(now).is_some()).count();
    assert_eq!(recorded as u32, REFUSALS_PER_MINUTE);
    let later = now + std::time::Duration::from_secs(60);
    assert_eq!(budget.take(later), Some(1000 - u64::from(REFUSALS_PER_MINUTE)));
    assert_eq!(budget.take(later), Some(0));
}

#[test]
fn long_parameters_are_left_out() {
    let notes = AuditNotes::default();
    let mut members = Map::new();
    members.insert("x".into(), json!("y".repeat(DETAIL_BYTES_MAX)));
    notes.parameters(&members);
    assert_eq!(*notes.parameters.lock().unwrap(), None);
    members.insert("x".into(), json!("y"));
    notes.parameters(&members);
    assert_eq!(*notes.parameters.lock().unwrap(), Some(json!({"x": "y"})));
}
