use super::*;
use crate::line::{Actor, AuditOutcome};
use crate::read::{LineOrder, LinePosition};
use crate::verify::verify;
use postrider_core::time::Sleep;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};
use tempfile::TempDir;

struct TestClock(AtomicI64);

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_secs(self.0.load(Relaxed))
    }

    fn sleep_until(&self, _: Timestamp) -> Sleep<'_> {
        Box::pin(std::future::pending())
    }
}

fn clock() -> Arc<TestClock> {
    Arc::new(TestClock(AtomicI64::new(1_700_000_000)))
}

fn config(directory: &Path) -> Config {
    Config {
        directory: directory.join("audit"),
        keep: Duration::MAX,
        bytes_max: 1 << 30,
        node: String::new(),
    }
}

fn entry(actor: &str, action: &str, resource: &str) -> AuditEntry {
    AuditEntry {
        actor: Actor {
            id: actor.into(),
            roles: vec!["owner".into()],
            via: "secret".into(),
        },
        action: action.into(),
        resource: resource.into(),
        outcome: AuditOutcome {
            status: Some(200),
            ..AuditOutcome::default()
        },
        ..AuditEntry::default()
    }
}

async fn written(log: &AuditLog, count: usize) {
    for n in 0..count {
        log.append(entry("ci", "topic.write", &format!("/topics/t{n}")))
            .await
            .unwrap();
    }
}

fn files(config: &Config) -> Vec<PathBuf> {
    let found = crate::segment::find(&config.directory).unwrap();
    found.into_iter().map(|segment| segment.path).collect()
}

#[tokio::test]
async fn a_line_is_on_disk_before_the_change_is_answered_and_the_chain_outlives_a_restart() {
    let place = TempDir::new().unwrap();
    let config = config(place.path());
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    assert_eq!(log.append(entry("ci", "topic.write", "/t")).await, Ok(1));
    // Not closed, as after a kill.
    assert_eq!(verify(&config.directory).unwrap().last_seq, 1);
    drop(log);
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    assert_eq!(log.append(entry("ci", "topic.delete", "/t")).await, Ok(2));
    let found = log.verify().unwrap();
    assert_eq!((found.intact, found.lines, found.first_seq), (true, 2, 1));
    assert_eq!(log.status().last_seq, 2);
}

#[tokio::test]
async fn an_unfinished_line_is_cut_off_and_told_of() {
    let place = TempDir::new().unwrap();
    let config = config(place.path());
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    written(&log, 3).await;
    drop(log);
    let path = &files(&config)[0];
    for torn in [&b"{\"seq\":4,\"ti"[..], b"\0\0\0\0\n{}\n"] {
        let mut content = std::fs::read(path).unwrap();
        let whole = content.len();
        content.extend_from_slice(torn);
        std::fs::write(path, &content).unwrap();
        let last = verify(&config.directory).unwrap().last_seq;
        let log = AuditLog::open(config.clone(), clock()).unwrap();
        let seq = log.append(entry("ci", "login", "/")).await.unwrap();
        assert_eq!(seq, last + 2, "the repair has a line of its own");
        let page = log
            .read(&AuditQuery {
                limit: 10,
                ..AuditQuery::default()
            })
            .unwrap();
        assert!(
            page.rows[1].text.contains("audit.repair"),
            "{}",
            page.rows[1].text
        );
        assert!(
            page.rows[1]
                .text
                .contains(&format!("\"bytesRemoved\":{}", torn.len()))
        );
        assert!(log.verify().unwrap().intact);
        assert!(std::fs::read(path).unwrap().len() > whole);
        drop(log);
    }
}

#[tokio::test]
async fn a_zero_byte_in_a_line_does_not_cost_the_lines_after_it() {
    let place = TempDir::new().unwrap();
    let config = config(place.path());
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    written(&log, 5).await;
    drop(log);
    let path = &files(&config)[0];
    let mut content = std::fs::read(path).unwrap();
    let second = content.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    content[second + 40] = 0;
    std::fs::write(path, &content).unwrap();
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    assert!(
        std::fs::read(path).unwrap().starts_with(&content),
        "nothing was cut off"
    );
    assert_eq!(log.append(entry("ci", "login", "/")).await.unwrap(), 6);
    let broken = log.verify().unwrap().broken.expect("the second line is damaged");
    assert_eq!((broken.line, broken.seq), (2, 2));
    drop(log);

    // A power cut: some sectors never reached the disk, while later lines of the same write did.
    let sector = content.len().next_multiple_of(512);
    let intact = content[second..].to_vec();
    let mut torn = content.clone();
    torn.resize(sector + 512, 0);
    torn.extend_from_slice(&intact);
    std::fs::write(path, &torn).unwrap();
    drop(AuditLog::open(config.clone(), clock()).unwrap());
    let kept = std::fs::read(path).unwrap();
    let zeros = kept
        .windows(100)
        .any(|window| window.iter().all(|byte| *byte == 0));
    assert!(kept.starts_with(&content) && !zeros);
}

#[tokio::test]
async fn the_first_line_that_was_tampered_with_is_named() {
    let place = TempDir::new().unwrap();
    let config = config(place.path());
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    written(&log, 6).await;
    drop(log);
    let path = files(&config)[0].clone();
    let original = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = original.split_inclusive('\n').collect();
    let check = |content: String, line: u64, words: &str| {
        std::fs::write(&path, content).unwrap();
        let found = verify(&config.directory).unwrap();
        let broken = found
            .broken
            .unwrap_or_else(|| panic!("{words}: nothing was noticed"));
        assert!(!found.intact);
        assert_eq!(broken.line, line, "{words}: {broken:?}");
        assert!(broken.reason.contains(words), "{words}: {broken:?}");
    };
    check(original.replace("/topics/t2", "/topics/tX"), 3, "was edited");
    let without = [&lines[..2], &lines[3..]].concat().concat();
    check(without, 3, "line 3 is missing");
    check(
        [&lines[..1], &lines[3..]].concat().concat(),
        2,
        "lines 2 to 3 are missing",
    );
    let swapped = [&lines[..2], &[lines[3], lines[2]], &lines[4..]]
        .concat()
        .concat();
    check(swapped, 3, "line 3 is missing");
    let doubled = [&lines[..3], &lines[2..]].concat().concat();
    check(doubled, 4, "out of order");
    let (half, _) = lines[2].split_at(lines[2].len() / 2);
    check(
        format!("{}{half}\n{}", lines[..2].concat(), lines[3..].concat()),
        3,
        "not a line",
    );
    // A line that was rewritten with a matching hash does not fit the next line.
    let content = lines[2].replace("/topics/t2", "/topics/tX");
    let (content, _) = content.split_once(",\"hash\":").unwrap();
    let hash = crate::line::hash_of(content.as_bytes());
    let forged = format!("{content},\"hash\":\"{hash}\"}}\n");
    check(
        [lines[..2].concat(), forged, lines[3..].concat()].concat(),
        4,
        "chain is broken",
    );
    check([&lines[3..]].concat().concat(), 1, "lines 1 to 3 are missing");

    std::fs::write(&path, &original).unwrap();
    assert!(verify(&config.directory).unwrap().intact);
}

#[tokio::test]
async fn the_oldest_files_go_by_bytes_and_the_rest_still_verifies() {
    let place = TempDir::new().unwrap();
    let config = Config {
        bytes_max: 256 << 10,
        ..config(place.path())
    };
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    for n in 0..200 {
        let long = "x".repeat(4000);
        log.append(entry("ci", "topic.write", &format!("/{n}/{long}")))
            .await
            .unwrap();
    }
    let found = log.verify().unwrap();
    assert!(found.intact, "{found:?}");
    assert!(found.first_seq > 1 && found.anchor != crate::line::GENESIS);
    assert!(log.status().bytes <= 256 << 10, "{}", log.status().bytes);
    drop(log);
    assert!(verify(&config.directory).unwrap().intact);
    // Files that the log itself has not dropped are detected as missing.
    std::fs::remove_file(&files(&config)[0]).unwrap();
    let broken = verify(&config.directory).unwrap().broken.unwrap();
    assert!(broken.reason.contains("no later line records"), "{broken:?}");
    std::fs::remove_file(&files(&config)[1]).unwrap();
    assert!(!verify(&config.directory).unwrap().intact);
}

#[tokio::test]
async fn the_oldest_files_go_by_age() {
    let place = TempDir::new().unwrap();
    let config = Config {
        keep: Duration::from_secs(8 * 3600),
        ..config(place.path())
    };
    let clock = clock();
    let log = AuditLog::open(config.clone(), clock.clone()).unwrap();
    for _ in 0..20 {
        written(&log, 1).await;
        clock.0.fetch_add(3600, Relaxed);
    }
    let page = log
        .read(&AuditQuery {
            limit: 1000,
            order: LineOrder::OldestFirst,
            ..AuditQuery::default()
        })
        .unwrap();
    let oldest = page.rows[0].time;
    let now = clock.now();
    assert!(
        now.since(oldest) <= Duration::from_secs(10 * 3600),
        "{oldest} {now}"
    );
    assert!(log.verify().unwrap().intact);
}

struct FailingAuditDisk(Arc<AtomicBool>, RealAuditDisk);

impl AuditDisk for FailingAuditDisk {
    fn write_at(&mut self, file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
        if self.0.load(Relaxed) {
            // Half of the bytes reach the disk.
            self.1.write_at(file, &bytes[..bytes.len() / 2], at)?;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.1.write_at(file, bytes, at)
    }

    fn sync(&mut self, file: &File) -> io::Result<()> {
        self.1.sync(file)
    }

    fn reserve(&mut self, file: &File, at: u64, bytes: u64) -> io::Result<()> {
        match self.0.load(Relaxed) {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => self.1.reserve(file, at, bytes),
        }
    }
}

#[tokio::test]
async fn a_full_disk_is_told_of_before_a_change_and_no_line_is_lost() {
    let place = TempDir::new().unwrap();
    let config = config(place.path());
    let full = Arc::new(AtomicBool::new(false));
    let disk = Box::new(FailingAuditDisk(full.clone(), RealAuditDisk));
    let log = AuditLog::open_on(config.clone(), clock(), disk).unwrap();
    written(&log, 2).await;
    log.admit().await.unwrap();
    full.store(true, Relaxed);
    let why = log.append(entry("ci", "topic.write", "/late")).await.unwrap_err();
    assert!(why.0.contains("the disk is full"), "{why}");
    log.admit().await.unwrap_err();
    assert!(log.status().trouble.is_some());
    assert!(verify(&config.directory).unwrap().intact);
    full.store(false, Relaxed);
    log.admit().await.unwrap();
    assert_eq!(log.status().trouble, None);
    let found = log.verify().unwrap();
    assert_eq!((found.intact, found.lines), (true, 3));
    assert_eq!(log.append(entry("ci", "topic.write", "/t")).await, Ok(4));
}

#[tokio::test]
async fn lines_are_found_by_what_is_asked_and_page_by_page() {
    let place = TempDir::new().unwrap();
    let clock = clock();
    let log = AuditLog::open(config(place.path()), clock.clone()).unwrap();
    let start = clock.now();
    for (actor, action, resource) in [
        ("ci", "topic.write", "/topics/a"),
        ("CI", "topic.delete", "/topics/A"),
        ("me", "topics.other", "/topics/b"),
        ("me", "login", "/portal/session"),
    ] {
        log.append(entry(actor, action, resource)).await.unwrap();
        clock.0.fetch_add(10, Relaxed);
    }
    let base = || AuditQuery {
        limit: 100,
        order: LineOrder::OldestFirst,
        ..AuditQuery::default()
    };
    let check = |query: AuditQuery, expected: &[u64]| {
        let found: Vec<u64> = log.read(&query).unwrap().rows.iter().map(|row| row.seq).collect();
        assert_eq!(found, expected, "{query:?}");
    };
    let text = |text: &str| Some(text.to_owned());
    check(base(), &[1, 2, 3, 4]);
    check(
        AuditQuery {
            actor: text("ci"),
            ..base()
        },
        &[1, 2],
    );
    check(
        AuditQuery {
            action: text("topic"),
            ..base()
        },
        &[1, 2],
    );
    check(
        AuditQuery {
            action: text("Topic.Delete"),
            ..base()
        },
        &[2],
    );
    check(
        AuditQuery {
            resource: text("/topics/a"),
            ..base()
        },
        &[1, 2],
    );
    let at = |secs: u64| Some(start + Duration::from_secs(secs));
    check(
        AuditQuery {
            since: at(10),
            until: at(30),
            ..base()
        },
        &[2, 3],
    );
    let mut query = AuditQuery {
        limit: 3,
        ..AuditQuery::default()
    };
    let first = log.read(&query).unwrap();
    assert_eq!(
        first.rows.iter().map(|row| row.seq).collect::<Vec<_>>(),
        [4, 3, 2]
    );
    query.after = first.next;
    assert_eq!(query.after.as_ref().map(|at: &LinePosition| at.seq), Some(2));
    check(query, &[1]);
}

#[tokio::test]
async fn a_log_that_is_removed_while_it_is_written_is_noticed_and_goes_on() {
    let place = TempDir::new().unwrap();
    let config = config(place.path());
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    written(&log, 3).await;
    assert_eq!(log.status().damage, None);
    std::fs::remove_dir_all(&config.directory).unwrap();
    written(&log, 2).await;
    let damage = log.status().damage.expect("it was noticed");
    assert!(damage.contains("was removed while the server ran"), "{damage}");
    // The lines after it are on disk, and continue the chain.
    let found = log.verify().unwrap();
    let reason = found.broken.expect("lines are missing").reason;
    assert!(reason.starts_with("lines 1 to 3 are missing"), "{reason}");
    assert_eq!((found.first_seq, found.last_seq), (4, 5));
    drop(log);
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    assert!(log.status().damage.is_some(), "the next start tells of it, too");
}

#[tokio::test]
async fn a_file_that_is_replaced_or_cut_while_it_is_written_is_noticed() {
    let place = TempDir::new().unwrap();
    let config = config(place.path());
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    written(&log, 3).await;
    let file = files(&config).remove(0);
    File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(10)
        .unwrap();
    written(&log, 1).await;
    assert!(log.status().damage.unwrap().contains("cut short"));
    let file = files(&config).pop().unwrap();
    let copy = place.path().join("copy");
    std::fs::copy(&file, &copy).unwrap();
    std::fs::rename(&copy, &file).unwrap();
    written(&log, 1).await;
    assert_eq!(files(&config).len(), 3, "each time a new file was begun");
}

#[tokio::test]
async fn what_is_missing_at_a_start_is_told_and_stays_visible() {
    let remove_all: fn(&Config) = |config| std::fs::remove_dir_all(&config.directory).unwrap();
    let cut: fn(&Config) = |config| {
        let file = files(config).pop().unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        let first = text.split_inclusive('\n').next().unwrap();
        std::fs::write(&file, first).unwrap();
    };
    let rewrite: fn(&Config) = |config| {
        let mut head = ChainHead::default();
        let line = |_| head.append(&entry("me", "topic.read", "/"), "", Timestamp::from_secs(1));
        let text: String = (0..3).map(line).collect();
        std::fs::write(files(config).pop().unwrap(), text).unwrap();
    };
    for (how, lines) in [(remove_all, 0), (cut, 1), (rewrite, 2)] {
        let place = TempDir::new().unwrap();
        let config = config(place.path());
        let log = AuditLog::open(config.clone(), clock()).unwrap();
        written(&log, 3).await;
        drop(log);
        how(&config);
        let found = verify(&config.directory).unwrap();
        assert!(!found.intact && found.broken.is_some());
        assert_eq!(found.lines, lines);
        let log = AuditLog::open(config.clone(), clock()).unwrap();
        assert!(log.status().damage.is_some());
        assert_eq!(log.append(entry("ci", "topic.write", "/t")).await, Ok(4));
        assert!(!log.verify().unwrap().intact, "a line more hides nothing");
        drop(log);
        assert!(!verify(&config.directory).unwrap().intact);
    }
}

#[tokio::test]
async fn an_edited_line_is_told_at_the_start() {
    let place = TempDir::new().unwrap();
    let config = config(place.path());
    let log = AuditLog::open(config.clone(), clock()).unwrap();
    written(&log, 3).await;
    drop(log);
    let file = files(&config).pop().unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replacen("/topics/t1", "/topics/t7", 1)).unwrap();
    let log = AuditLog::open(config, clock()).unwrap();
    let damage = log.status().damage.unwrap();
    assert!(damage.contains("line 2: the line was edited"), "{damage}");
}
