//! The data directory: whether it can be written, whether flushes are durable, and whether its
//! content is sound.

use super::finding::{Finding, quoted};
use crate::config::Config;
use crate::secrets;
use crate::serve::AUDIT_DIRECTORY;
use postrider_core::ids::Position;
use postrider_core::time::Timestamp;
use postrider_embedded::database::damaged_blocks;
use postrider_embedded::disk::{Disk, LocalDirectory, open_database};
use postrider_embedded::generations::{FileKind, Generations};
use postrider_embedded::record::{RecordKind, decode_batch};
use postrider_embedded::segment::{Segment, base_of, index_base_of, index_name};
use postrider_embedded::{EmbeddedArchive, EmbeddedCatalog, Examination, examine, segment_gaps};
use postrider_engine::dead_letter_blob::dead_letters_of;
use postrider_store::seal::Keyring;
use postrider_store::{Archive, BlobFilter, Catalog, CatalogContent, Error};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use tokio::time::Instant;

/// With less space, the log soon refuses to write.
const SPACE_LEAST: u64 = 128 << 20;
const SPACE_GOOD: u64 = 1 << 30;
/// Number of flushes that are timed, and the time after which timing stops.
const FLUSHES: usize = 20;
const FLUSHES_TIME: Duration = Duration::from_secs(3);
/// Every publish request waits for a flush.
const FLUSH_GOOD: Duration = Duration::from_millis(20);
/// Most bytes of the log to read, the newest first.
const LOG_BYTES_MAX: u64 = 1 << 30;
/// Longest time to read the log.
const LOG_TIME: Duration = Duration::from_secs(10);
/// Larger databases are not copied for examination.
const DATABASE_BYTES_MAX: u64 = 512 << 20;
/// Blob records that are read at once.
const BLOBS_AT_ONCE: usize = 100;
/// Account whose blobs are in the data directory.
const LOCAL_ACCOUNT: &str = "local";
/// Most damaged places that are named.
const DAMAGE_NAMED_MAX: usize = 5;

/// User of the data directory.
pub enum DirectoryUse {
    /// The directory does not exist: no server was ever started with it.
    Absent,
    /// No server; none can start while the lock is held.
    Free {
        _held: Option<File>,
    },
    Server,
}

pub fn find_use(data_dir: &Path) -> Result<DirectoryUse, Finding> {
    if !data_dir.exists() {
        return Ok(DirectoryUse::Absent);
    }
    let path = data_dir.join("lock");
    let failed = |e: io::Error| {
        let what = format!("cannot look at {}: {e}", path.display());
        let todo = "run the doctor as the user that runs the server";
        Finding::problem("data directory", what, todo).command(as_owner(data_dir))
    };
    let file = match File::open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(DirectoryUse::Free { _held: None }),
        file => file.map_err(failed)?,
    };
    match file.try_lock() {
        Ok(()) => Ok(DirectoryUse::Free { _held: Some(file) }),
        Err(TryLockError::WouldBlock) => Ok(DirectoryUse::Server),
        Err(TryLockError::Error(e)) => Err(failed(e)),
    }
}

/// The doctor's command line, run as the owner of a file.
fn as_owner(path: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    match fs::metadata(path) {
        Ok(found) => format!("sudo -u '#{}' postrider doctor", found.uid()),
        Err(_) => "sudo postrider doctor".to_owned(),
    }
}

/// Whether the directory can be written, how much space is free, and how long a flush takes. Leaves
/// nothing behind.
pub fn directory(data_dir: &Path) -> Vec<Finding> {
    let about = "data directory";
    let shown = data_dir.display();
    let mut found = Vec::new();
    if data_dir.exists() && !data_dir.is_dir() {
        let what = format!("{shown} is not a directory");
        return vec![Finding::problem(
            about,
            what,
            "name another with --data-dir or data_dir",
        )];
    }
    // The first start creates missing directories, below the nearest one that exists.
    let mut there = std::path::absolute(data_dir).unwrap_or_else(|_| data_dir.to_owned());
    while !there.exists() && there.pop() {}
    match data_dir.exists() {
        true => found.push(Finding::ok(about, format!("{shown}"))),
        false => found.push(Finding::ok(
            about,
            format!("{shown} will be made by the first start"),
        )),
    }
    // The file has no name, so it disappears in any case.
    match tempfile::tempfile_in(&there) {
        Err(e) => {
            let what = format!("{} cannot be written: {e}", there.display());
            let todo = "give it to the user that runs the server";
            let owner = format!("sudo chown -R \"$USER\" {}", quoted(&there.to_string_lossy()));
            found.push(Finding::problem(about, what, todo).command(owner));
            return found;
        }
        Ok(file) => found.push(flushes(file)),
    }
    found.extend(space(&there));
    found
}

fn flushes(mut file: File) -> Finding {
    let about = "disk";
    let begun = Instant::now();
    let mut took = Vec::with_capacity(FLUSHES);
    while took.len() < FLUSHES && begun.elapsed() < FLUSHES_TIME {
        let one = Instant::now();
        if let Err(e) = file.write_all(&[0; 4096]).and_then(|()| file.sync_data()) {
            let what = format!("what is written cannot be made durable: {e}");
            let todo = "look at the disk and its file system; without it no publish can be accepted";
            return Finding::problem(about, what, todo).command("dmesg --level=err,warn | tail");
        }
        took.push(one.elapsed());
    }
    took.sort();
    judge_flushes(took[took.len() / 2], took[took.len() - 1])
}

fn judge_flushes(usual: Duration, worst: Duration) -> Finding {
    let millis = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1000.0);
    let what = format!("a flush takes {}, at worst {}", millis(usual), millis(worst));
    match usual <= FLUSH_GOOD {
        true => Finding::ok("disk", what),
        false => Finding::warning(
            "disk",
            format!("{what}: every publish waits for one"),
            "put data_dir on a faster disk",
        ),
    }
}

fn space(there: &Path) -> Vec<Finding> {
    let Ok(stat) = rustix::fs::statvfs(there) else {
        return Vec::new();
    };
    let block = if stat.f_frsize > 0 {
        stat.f_frsize
    } else {
        stat.f_bsize
    };
    let mut found = vec![judge_space(stat.f_bavail * block, stat.f_blocks * block)];
    // Magic numbers of these file systems in Linux.
    const TMPFS: u64 = 0x0102_1994;
    const NFS: u64 = 0x6969;
    let kind = rustix::fs::statfs(there).map(|stat| stat.f_type as u64);
    let elsewhere = "put data_dir on a local disk";
    match kind {
        Ok(TMPFS) => found.push(Finding::warning(
            "disk",
            "the data directory is in memory (tmpfs): a restart of the machine loses all events",
            elsewhere,
        )),
        Ok(NFS) => found.push(Finding::warning(
            "disk",
            "the data directory is on NFS: whether locks and flushes hold is up to its server",
            elsewhere,
        )),
        _ => {}
    }
    found
}

fn judge_space(available: u64, total: u64) -> Finding {
    let what = format!("{} MiB free of {} MiB", available >> 20, total >> 20);
    let todo = "make room; the log refuses publishes when the disk is full";
    match available {
        0..SPACE_LEAST => Finding::problem("disk", what, todo),
        SPACE_LEAST..SPACE_GOOD => Finding::warning("disk", what, todo),
        _ => Finding::ok("disk", what),
    }
}

/// Time of the last write to the data directory.
pub fn last_written(data_dir: &Path) -> Option<Timestamp> {
    let times = [
        data_dir.to_owned(),
        data_dir.join("log"),
        data_dir.join("recorder"),
    ]
    .into_iter()
    .filter_map(|directory| fs::read_dir(directory).ok())
    .flatten()
    .filter_map(|entry| {
        let modified = entry.ok()?.metadata().ok()?.modified().ok()?;
        let since = modified.duration_since(UNIX_EPOCH).ok()?;
        Some(Timestamp::MIN + since)
    });
    times.max()
}

/// Examines the log's files. No server may be writing them.
pub fn log(data_dir: &Path, deep: bool) -> Vec<Finding> {
    let about = "log";
    let path = data_dir.join("log");
    if !path.exists() {
        return vec![Finding::ok(about, "empty")];
    }
    match scan(&path, deep) {
        Ok(scanned) => {
            let mut found = scanned.judge();
            found.extend(orphans(&path));
            if deep {
                found.extend(indexes(&path));
                found.extend(audit(&data_dir.join(AUDIT_DIRECTORY)));
                found.extend(recorder(&data_dir.join("recorder")));
            }
            found
        }
        Err(e) => {
            let what = format!("{} cannot be read: {e}", path.display());
            let todo = "run the doctor as the user that runs the server";
            vec![Finding::problem(about, what, todo).command(as_owner(data_dir))]
        }
    }
}

/// Whether every index agrees with its segment.
fn indexes(log: &Path) -> Vec<Finding> {
    let disk = LocalDirectory::look_at(log.to_owned());
    let todo = "nothing is lost: delete the index with the server stopped, and the next start makes it anew";
    let mut found = Vec::new();
    let mut whole = 0;
    for name in disk.names().unwrap_or_default() {
        let Some(base) = index_base_of(&name).filter(|base| name == index_name(*base)) else {
            continue;
        };
        match fits(&disk, base) {
            Ok(true) => whole += 1,
            Ok(false) => {
                let what = format!("{name} is damaged, or is not the index of its segment");
                found.push(Finding::warning("log", what, todo));
            }
            Err(e) => found.push(Finding::warning(
                "log",
                format!("{name} cannot be read: {e}"),
                todo,
            )),
        }
    }
    if found.is_empty() {
        found.push(Finding::ok("log", format!("{whole} indexes fit their segments")));
    }
    found
}

fn fits(disk: &dyn Disk, base: Position) -> io::Result<bool> {
    let Some(index) = Segment::open_index(disk, base)? else {
        return Ok(false);
    };
    let scanned = Segment::open_scanned(disk, base, index.end(), |segment, offset, header, payload| {
        if header.kind == RecordKind::Batch
            && let Some(batch) = decode_batch(payload)
        {
            segment.index_batch(offset, header.first, &batch);
        }
    });
    let segment = match scanned {
        // A missing segment is reported elsewhere.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
        scanned => scanned?.0,
    };
    let held = |segment: &Segment| {
        let mut held = segment.subscriptions();
        held.sort_by_key(|(of, _, _)| *of);
        held
    };
    Ok(segment.end() == index.end() && held(&segment) == held(&index))
}

fn audit(directory: &Path) -> Option<Finding> {
    if !directory.exists() {
        return None;
    }
    Some(match postrider_audit::verify(directory) {
        Err(e) => Finding::warning("audit", format!("cannot be read: {e}"), "look at the disk"),
        Ok(verified) => match verified.broken {
            None => Finding::ok("audit", format!("{} lines, in an unbroken chain", verified.lines)),
            Some(broken) => Finding::problem(
                "audit",
                format!("{} line {}: {}", broken.file, broken.line, broken.reason),
                "compare it with a copy that was kept elsewhere",
            ),
        },
    })
}

fn recorder(directory: &Path) -> Option<Finding> {
    if !directory.exists() {
        return None;
    }
    Some(match postrider_recorder::damaged_files(directory) {
        Err(e) => Finding::warning("recorder", format!("cannot be read: {e}"), "look at the disk"),
        Ok(damaged) if damaged.is_empty() => Finding::ok("recorder", "all of it readable"),
        Ok(damaged) => Finding::warning(
            "recorder",
            format!("damaged: {}", damaged.join(", ")),
            "look at the disk; the traces of some events are not complete, nothing else is concerned",
        ),
    })
}

/// Whether the blobs of the account `local` agree with the archive.
async fn blobs(data_dir: &Path, archive: &EmbeddedArchive) -> Vec<Finding> {
    let mut found = Vec::new();
    let (mut read, mut after) = (0_u64, None);
    let damaged = |what: String| {
        let todo = "put the file back from a backup; these dead letters cannot be replayed without it";
        Finding::problem("dead letters", what, todo)
    };
    loop {
        let page = match archive.list(&BlobFilter::default(), after, BLOBS_AT_ONCE).await {
            Ok(page) => page,
            Err(e) => {
                found.push(damaged(format!("the archive cannot be read: {e}")));
                break;
            }
        };
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        for blob in page.iter().filter(|blob| blob.account == LOCAL_ACCOUNT) {
            read += 1;
            let path = data_dir
                .join("deadletters")
                .join(&blob.container)
                .join(&blob.path);
            let fault = match fs::read(&path) {
                Err(e) => Some(e.to_string()),
                Ok(body) => dead_letters_of(blob, &body).err().map(|fault| fault.reason),
            };
            if let Some(why) = fault
                && found.len() < DAMAGE_NAMED_MAX
            {
                found.push(damaged(format!("{}: {why}", path.display())));
            }
        }
    }
    if found.is_empty() {
        found.push(Finding::ok(
            "dead letters",
            format!("{read} blobs are as they were written"),
        ));
    }
    found
}

/// Remains of missing or unreadable segments that earlier starts have set aside.
fn orphans(log: &Path) -> Vec<Finding> {
    let names = fs::read_dir(log).into_iter().flatten();
    let mut names: Vec<String> = names
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".orphan"))
        .collect();
    names.sort();
    if names.is_empty() {
        return Vec::new();
    }
    let (count, first) = (names.len(), &names[0]);
    vec![Finding::warning(
        "log",
        format!(
            "{count} files are left of segments that were missing, cut short or unreadable: {first} and so on"
        ),
        "keep them while you look for the cause; they may be deleted",
    )]
}

#[derive(Debug, Default)]
struct ScannedSegment {
    segments: usize,
    read: usize,
    bytes: u64,
    damaged: Vec<String>,
    torn: Vec<String>,
}

fn scan(path: &Path, deep: bool) -> io::Result<ScannedSegment> {
    let mut bases: Vec<Position> = fs::read_dir(path)?
        .filter_map(|entry| base_of(entry.ok()?.file_name().to_str()?))
        .collect();
    bases.sort();
    let disk = LocalDirectory::open(path)?;
    let begun = Instant::now();
    let mut scanned = ScannedSegment {
        segments: bases.len(),
        ..ScannedSegment::default()
    };
    let mut limit = Position(u64::MAX);
    for &base in bases.iter().rev() {
        if !deep && (scanned.bytes > LOG_BYTES_MAX || begun.elapsed() > LOG_TIME) {
            break;
        }
        let (_, found) = Segment::open_scanned(&disk, base, limit, |_, _, _, _| {})?;
        scanned.read += 1;
        scanned.bytes += found.end;
        for damage in found.damage {
            let place = segment_gaps::place_text(base, &damage);
            match damage.torn && limit == Position(u64::MAX) {
                true => scanned.torn.push(place),
                false => scanned.damaged.push(place),
            }
        }
        limit = base;
    }
    Ok(scanned)
}

impl ScannedSegment {
    fn judge(self) -> Vec<Finding> {
        let about = "log";
        let mut found = Vec::new();
        for place in self.damaged.iter().take(DAMAGE_NAMED_MAX) {
            found.push(Finding::problem(
                about,
                format!("a damaged record: {place}"),
                "look at the disk; the server goes on without these events, and counts them in /healthz",
            ));
        }
        if self.damaged.len() > DAMAGE_NAMED_MAX {
            let more = self.damaged.len() - DAMAGE_NAMED_MAX;
            found.push(Finding::problem(
                about,
                format!("{more} more damaged records"),
                "look at the disk",
            ));
        }
        for place in &self.torn {
            let what = format!(
                "a commit was cut short, which was never acknowledged: {place}; the next start mends it"
            );
            found.push(Finding::ok(about, what));
        }
        if found.is_empty() {
            let ScannedSegment {
                segments,
                read,
                bytes,
                ..
            } = self;
            let what = match read == segments {
                true => format!("{segments} segments, {} MiB, all of it readable", bytes >> 20),
                false => format!(
                    "{segments} segments; the newest {read} ({} MiB) are readable",
                    bytes >> 20
                ),
            };
            found.push(Finding::ok(about, what));
        }
        found
    }
}

/// Examines copies of the databases, because opening one may repair it. Returns the content of the
/// catalog, too.
pub async fn databases(config: &Config, deep: bool) -> (Vec<Finding>, Option<CatalogContent>) {
    let data_dir = &config.data_dir;
    let mut found = Vec::new();
    for kind in FileKind::ALL {
        let path = data_dir.join(kind.file());
        match damaged_blocks(&path) {
            Ok(0) | Err(_) => {}
            Ok(count) => found.push(Finding::problem(
                "log",
                format!("{}: {count} damaged blocks of 4096 bytes", path.display()),
                "look at the disk; what they hit is said below, unless it is free space",
            )),
        }
    }
    if let Err(e) = check_copies(data_dir, deep) {
        let todo = "put back all files of one backup, or accept these";
        let place = quoted(&data_dir.to_string_lossy());
        let command = format!("postrider restore --data-dir {place} --accept-mixed-files");
        found.push(Finding::problem("log", e, todo).command(command));
    }
    let keys = match secrets::keyring_to_read(config) {
        Ok(keys) => Some(keys),
        // The check below reports the damage, which needs no key.
        Err(e) if matches!(e.downcast_ref(), Some(Error::Corrupt(_))) => Some(Keyring::ephemeral()),
        Err(e) => {
            let todo = "set secrets.key or secrets.key_file, or put the key back; the server does not start without it";
            found.push(Finding::problem("secrets", format!("{e:#}"), todo));
            None
        }
    };
    let catalogue = keys.and_then(|keys| {
        look(data_dir, "catalog.redb", "catalogue", deep, &mut found, |copy| {
            EmbeddedCatalog::open(copy, Arc::new(keys)).map_err(|e| e.to_string())
        })
    });
    let mut loaded = None;
    if let Some((_kept, catalogue)) = catalogue {
        match catalogue.load().await {
            Ok(all) => {
                let (topics, subscriptions) = (all.topics.len(), all.subscriptions.len());
                let what = format!("topics: {topics}, subscriptions: {subscriptions}");
                found.push(Finding::ok("catalogue", what));
                loaded = Some(all);
            }
            Err(e) => found.push(damaged(
                "catalogue",
                &data_dir.join("catalog.redb"),
                &e.to_string(),
            )),
        }
    }
    let readable = |name: &str, what: &str| Finding::ok("log", format!("{name} is readable ({what})"));
    let lost = look(data_dir, "state.redb", "log", deep, &mut found, |copy| {
        open_database(copy, 1 << 20).map(drop)?;
        if !data_dir.join("log").exists() && fs::metadata(copy).is_ok_and(|file| file.len() == 0) {
            return Ok(Examination::default());
        }
        let log = LocalDirectory::look_at(data_dir.join("log"));
        examine(copy, Arc::new(log)).map_err(|e| e.to_string())
    });
    let known = look(data_dir, "state.redb", "log", deep, &mut Vec::new(), |copy| {
        segment_gaps::known_losses(copy).map_err(|e| e.to_string())
    });
    for what in known.iter().flat_map(|(_kept, known)| known) {
        let place = quoted(&data_dir.to_string_lossy());
        found.push(
            Finding::warning(
                "log",
                format!("found by an earlier start: {what}"),
                "look at the disk; once you have taken note of it, end the report with the server stopped",
            )
            .command(format!("postrider restore --data-dir {place} --forget-losses")),
        );
    }
    if let Some((kept, lost)) = lost {
        found.push(readable("state.redb", "retries and dead letters on their way"));
        if let Some(why) = lost.refused {
            let todo = "put back all files of one backup; the server does not start with these";
            let original = data_dir.display().to_string();
            let why = why.replace(&kept.path().display().to_string(), &original);
            found.push(Finding::problem("log", why, todo));
        }
        found.extend(lost.damaged.into_iter().map(|place| {
            let todo = "look at the disk; the server goes on without what stood there";
            Finding::problem("log", format!("damaged: {place}"), todo)
        }));
        found.extend(lost.lost.iter().map(|one| {
            Finding::problem(
                "log",
                segment_gaps::describe(one),
                "put the missing files back before the next start; a start goes on without these events, and \
                 counts their deliveries as dropped",
            )
        }));
    }
    let archive = |copy: &Path| EmbeddedArchive::open(copy).map_err(|e| e.to_string());
    if let Some((_kept, archive)) = look(data_dir, "archive.redb", "log", deep, &mut found, archive) {
        found.push(readable("archive.redb", "dead letters in blobs"));
        if deep {
            found.extend(blobs(data_dir, &archive).await);
        }
    }
    (found, loaded)
}

/// Whether the databases belong to the same generation; copies of them are examined.
fn check_copies(data_dir: &Path, deep: bool) -> Result<(), String> {
    let directory = tempfile::tempdir().map_err(|e| e.to_string())?;
    for kind in FileKind::ALL {
        let path = data_dir.join(kind.file());
        let Ok(file) = fs::metadata(&path) else { continue };
        let copied = (deep || file.len() <= DATABASE_BYTES_MAX)
            && damaged_blocks(&path).is_ok_and(|count| count == 0)
            && fs::copy(&path, directory.path().join(kind.file())).is_ok();
        if !copied {
            // Databases that are too large are not checked; damaged ones have been reported
            // already.
            return Ok(());
        }
    }
    match Generations::check(directory.path()) {
        Err(Error::Corrupt(e))
            if e.contains("not of the same time") || e.contains("another installation") =>
        {
            Err(e.replace(
                &directory.path().display().to_string(),
                &data_dir.display().to_string(),
            ))
        }
        _ => Ok(()),
    }
}

/// Opens a copy of a file, in a temporary directory that is returned with it.
fn look<T>(
    data_dir: &Path,
    name: &str,
    about: &'static str,
    deep: bool,
    found: &mut Vec<Finding>,
    open: impl FnOnce(&Path) -> Result<T, String>,
) -> Option<(tempfile::TempDir, T)> {
    let path = data_dir.join(name);
    let length = fs::metadata(&path).ok()?.len();
    if length == 0 {
        return None;
    }
    if length > DATABASE_BYTES_MAX && !deep {
        let what = format!(
            "{name} has {} MiB and is not looked into: neither missing events nor copies of another time are found",
            length >> 20
        );
        let todo = "read it as well, with room for a copy in the temporary directory";
        found.push(Finding::warning(about, what, todo).command("postrider doctor --deep"));
        return None;
    }
    let copied = copy(&path, name);
    let (directory, copy) = match copied {
        Ok(copied) => copied,
        Err(e) => {
            let what = format!("{} cannot be read: {e}", path.display());
            let todo =
                "run the doctor as the user that runs the server, with room in the temporary directory";
            found.push(Finding::warning(about, what, todo).command(as_owner(data_dir)));
            return None;
        }
    };
    match open(&copy) {
        Ok(opened) => Some((directory, opened)),
        Err(e) => {
            let place = copy.display().to_string();
            let e = e.replace(&place, name);
            let copied_to = directory.path().display().to_string();
            let why = e.replace(&copied_to, &data_dir.display().to_string());
            found.push(damaged(about, &path, &why));
            None
        }
    }
}

fn copy(path: &Path, name: &str) -> io::Result<(tempfile::TempDir, PathBuf)> {
    let directory = tempfile::tempdir()?;
    let copy = directory.path().join(name);
    fs::copy(path, &copy)?;
    Ok((directory, copy))
}

fn damaged(about: &'static str, path: &Path, why: &str) -> Finding {
    let what = format!("{} is damaged: {why}", path.display());
    Finding::problem(
        about,
        what,
        "put it back from a backup; the server does not start with it",
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::FindingLevel;
    use super::*;

    #[test]
    fn room_and_speed_are_judged() {
        assert_eq!(judge_space(10 << 20, 1 << 40).level, FindingLevel::Problem);
        assert_eq!(judge_space(500 << 20, 1 << 40).level, FindingLevel::Warning);
        assert_eq!(judge_space(5 << 30, 1 << 40).level, FindingLevel::Ok);
        let millis = Duration::from_millis;
        assert_eq!(judge_flushes(millis(2), millis(90)).level, FindingLevel::Ok);
        assert_eq!(judge_flushes(millis(80), millis(90)).level, FindingLevel::Warning);
    }

    #[test]
    fn nothing_is_made_where_nothing_is() {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("data");
        assert!(matches!(find_use(&data_dir), Ok(DirectoryUse::Absent)));
        let found = super::directory(&data_dir);
        assert!(
            found.iter().all(|one| one.level != FindingLevel::Problem),
            "{found:?}"
        );
        assert!(found[0].what.contains("will be made"), "{found:?}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        fs::write(&data_dir, "").unwrap();
        assert_eq!(super::directory(&data_dir)[0].level, FindingLevel::Problem);
    }

    #[test]
    fn who_holds_the_lock_is_found_out_without_taking_it() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(
            find_use(directory.path()),
            Ok(DirectoryUse::Free { _held: None })
        ));
        let lock = File::create(directory.path().join("lock")).unwrap();
        lock.try_lock().unwrap();
        assert!(matches!(find_use(directory.path()), Ok(DirectoryUse::Server)));
        lock.unlock().unwrap();
        assert!(matches!(
            find_use(directory.path()),
            Ok(DirectoryUse::Free { _held: Some(_) })
        ));
        // The test for the lock has released it again.
        lock.try_lock().unwrap();
    }

    #[tokio::test]
    async fn a_damaged_database_is_named_and_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        fs::write(&path, "no database at all").unwrap();
        let config = Config {
            data_dir: directory.path().to_owned(),
            ..Config::default()
        };
        let (found, loaded) = databases(&config, false).await;
        assert!(loaded.is_none());
        assert_eq!(found[0].level, FindingLevel::Problem, "{found:?}");
        assert!(found[0].what.contains("catalog.redb"), "{found:?}");
        assert_eq!(fs::read(&path).unwrap(), b"no database at all");
    }
}
