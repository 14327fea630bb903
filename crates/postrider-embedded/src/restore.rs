//! Recovery of a stopped server's directory with files of different times or damage, at the
//! operator's explicit request.

use crate::database::{Salvage, damaged_blocks, is_refused, read_generations};
use crate::disk::{Disk, LocalDirectory};
use crate::generations::{self, FileKind};
use crate::record::{RecordKind, STATE_GENERATION, SubscriptionProgress, VarintReader};
use crate::segment::{Segment, SegmentHead, base_of, log_name};
use crate::state::{StateDatabase, StateWrite};
use crate::{archive, catalog, segment_gaps};
use postrider_core::ids::Position;
use postrider_store::Error;
use postrider_store::seal::Keyring;
use std::io;
use std::path::{Path, PathBuf};

/// The latest generation of the state database that the log has recorded.
fn seen_by_log(log: &dyn Disk) -> io::Result<u64> {
    let mut seen = 0;
    for base in log.names()?.iter().filter_map(|name| base_of(name)) {
        let head = SegmentHead::read(&*log.open(&log_name(base))?)?;
        seen = seen.max(head.map_or(0, |head| head.generation));
        Segment::open_scanned(log, base, Position(u64::MAX), |_, _, header, payload| {
            if header.kind == RecordKind::Progress {
                let mut reader = VarintReader::new(payload);
                while let Some((of, progress)) = SubscriptionProgress::decode(&mut reader) {
                    if of == STATE_GENERATION {
                        seen = seen.max(progress.frontier.0);
                    }
                }
            }
        })?;
    }
    Ok(seen)
}

/// Builds a missing state database from the log: a new one would have another identity than the
/// log.
fn replace_missing_state(data_dir: &Path, log: &dyn Disk) -> Result<Vec<String>, Error> {
    let path = data_dir.join(FileKind::State.file());
    let failed = |e: io::Error| Error::Unavailable(format!("{}: {e}", path.display()));
    let is_there = std::fs::metadata(&path).is_ok_and(|file| file.len() > 0);
    let names = log.names().map_err(failed)?;
    let has_identity = |name: &String| {
        let head = base_of(name).map(|base| SegmentHead::read(&*log.open(&log_name(base))?));
        head.transpose().map(|head| head.flatten().is_some())
    };
    let mut any = false;
    for name in &names {
        any |= has_identity(name).map_err(failed)?;
    }
    if is_there || !any {
        return Ok(Vec::new());
    }
    let new = with_suffix(&path, ".salvaged");
    remove_if_there(&new).map_err(failed)?;
    let mut told = vec!["state.redb is missing and is made anew of what the log knows".to_owned()];
    told.extend(StateDatabase::rebuild(None, &new, log)?);
    put_in_place(data_dir, &new, &path).map_err(failed)?;
    Ok(told)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn put_in_place(data_dir: &Path, new: &Path, path: &Path) -> io::Result<()> {
    std::fs::rename(new, path)?;
    std::fs::File::open(data_dir)?.sync_all()
}

/// Deletes the losses that earlier starts have recorded. Returns their descriptions.
pub fn forget_losses(data_dir: &Path) -> Result<Vec<String>, Error> {
    let path = data_dir.join(FileKind::State.file());
    if !std::fs::metadata(&path).is_ok_and(|file| file.len() > 0) {
        return Ok(Vec::new());
    }
    let known = segment_gaps::known_losses(&path)?;
    if !known.is_empty() {
        StateDatabase::open(&path, 0)?.write(&[StateWrite::ForgetLosses])?;
    }
    let told = known.iter().map(|one| format!("no longer reported: {one}"));
    Ok(told.collect())
}

/// Accepts the files as they are, even if some are older. Returns descriptions of the consequences.
pub fn accept_mixed_files(data_dir: &Path) -> Result<Vec<String>, Error> {
    let log = LocalDirectory::look_at(data_dir.join("log"));
    let mut told = replace_missing_state(data_dir, &log)?;
    told.extend(generations::accept_mixed(data_dir)?);
    let seen = seen_by_log(&log).map_err(|e| Error::Unavailable(format!("reading the log: {e}")))?;
    let path = data_dir.join(FileKind::State.file());
    let own = read_generations(&path)?.map_or(0, |read| read.known[FileKind::State as usize]);
    if own < seen && path.exists() {
        crate::database::raise_generation(&path, FileKind::State, seen)?;
        told.push(format!(
            "state.redb: generation {own} is taken for {seen}, which the log has seen; retries and dead letters that \
             were recorded after the copy was made are forgotten, and deliveries made since then may be made again"
        ));
    }
    Ok(told)
}

/// Replaces damaged databases by what can be read of them, and keeps the damaged files beside. `keys` open the
/// catalogue's records. Returns what is lost, in words.
pub fn accept_damage(data_dir: &Path, keys: Option<&Keyring>) -> Result<Vec<String>, Error> {
    let mut told = Vec::new();
    let log = LocalDirectory::look_at(data_dir.join("log"));
    for kind in FileKind::ALL {
        let path = data_dir.join(kind.file());
        let failed = |e: io::Error| Error::Unavailable(format!("{}: {e}", path.display()));
        let (new, aside) = (with_suffix(&path, ".salvaged"), with_suffix(&path, ".damaged"));
        if !path.exists() {
            if !new.exists() || !aside.exists() {
                // A missing state database is made anew below.
                continue;
            }
            put_in_place(data_dir, &new, &path).map_err(failed)?;
            told.push(format!("{}: an interrupted restore was finished", kind.file()));
        }
        let old = Salvage::open(&path, kind);
        let is_readable = || match (kind, &old, keys) {
            (FileKind::Catalog, Some(old), Some(keys)) => catalog::opens(old, keys),
            _ => true,
        };
        if damaged_blocks(&path).map_err(failed)? == 0
            && !is_refused(&path, &new).map_err(failed)?
            && is_readable()
        {
            continue;
        }
        remove_if_there(&new).map_err(failed)?;
        let lost = match kind {
            FileKind::State => StateDatabase::rebuild(old.as_ref(), &new, &log)?,
            FileKind::Catalog => catalog::rebuild(old.as_ref(), &new, keys)?,
            FileKind::Archive => archive::rebuild(old.as_ref(), &new)?,
        };
        // The file has its name at every moment, whenever this is killed.
        remove_if_there(&aside).map_err(failed)?;
        if std::fs::hard_link(&path, &aside).is_err() {
            std::fs::copy(&path, &aside).map_err(failed)?;
        }
        put_in_place(data_dir, &new, &path).map_err(failed)?;
        if lost.is_empty() {
            told.push(format!("{}: all rows were kept", kind.file()));
        }
        told.extend(lost);
        told.push(format!("the damaged file is kept as {}", aside.display()));
    }
    // The salvaged content may be older than what other files have recorded of it.
    told.extend(accept_mixed_files(data_dir)?);
    Ok(told)
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::EmbeddedCatalog;
    use crate::record::SubscriptionProgress;
    use crate::state::RetryEntry;
    use postrider_core::ids::SubscriptionId;
    use postrider_core::time::Timestamp;
    use postrider_store::conformance::{at, sub, topic};
    use postrider_store::{Catalog, CatalogChange};
    use std::collections::BTreeSet;
    use std::sync::Arc;

    const BLOCK: usize = 4104;
    const SUBSCRIPTIONS: u64 = 15;
    const RETRIES: u64 = 30;

    type Row = (u64, u64, u64);

    fn rows(path: &Path) -> (BTreeSet<Row>, BTreeSet<u64>) {
        let state = StateDatabase::open(path, 7).unwrap();
        let open = state.open_within(Position(0)..Position(u64::MAX)).unwrap();
        let open = open
            .iter()
            .map(|(of, retry, _)| (of.0, retry.due.nanos() as u64, retry.position.0));
        let cursors = state.recover().unwrap().cursors;
        let rewound = cursors
            .iter()
            .filter(|(_, progress)| progress.frontier == Position(0));
        (open.collect(), rewound.map(|(of, _)| of.0).collect())
    }

    fn retry(position: u64) -> RetryEntry {
        RetryEntry {
            due: at(position as i64),
            position: Position(position),
            attempts_made: 1,
            last: None,
            segment: Position(0),
            offset: 64,
            index: 0,
            received: Timestamp::MIN,
        }
    }

    /// Numbers of the blocks that were written.
    fn blocks_of(bytes: &[u8]) -> Vec<usize> {
        let blocks = bytes[16..].chunks_exact(BLOCK).enumerate();
        let written = blocks.filter(|(_, block)| block.iter().any(|byte| *byte != 0));
        written.map(|(number, _)| number).collect()
    }

    fn flip(bytes: &[u8], at: usize) -> Vec<u8> {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 1;
        flipped
    }

    fn state_of_many(path: &Path, close: bool) -> (BTreeSet<Row>, Vec<u8>) {
        let state = StateDatabase::open(path, 7).unwrap();
        for of in 1..=SUBSCRIPTIONS {
            let position = |n: u64| 100 + of * RETRIES + n;
            let mut writes: Vec<StateWrite> = (0..RETRIES)
                .map(|n| StateWrite::PutRetry(sub(of), retry(position(n))))
                .collect();
            let progress = SubscriptionProgress {
                frontier: Position(5000),
                open: Vec::new(),
            };
            writes.push(StateWrite::Cursor(SubscriptionId(of), progress));
            state.write(&writes).unwrap();
        }
        let killed = std::fs::read(path).unwrap();
        state.database().close();
        let bytes = if close {
            std::fs::read(path).unwrap()
        } else {
            killed
        };
        (rows(path).0, bytes)
    }

    // A flipped bit of a key moves a row to another subscription, if it is copied.
    #[test]
    fn no_damaged_row_of_the_state_is_kept_and_nothing_is_lost_silently() {
        for close in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("state.redb");
            let (before, bytes) = state_of_many(&path, close);
            assert_eq!(before.len() as u64, SUBSCRIPTIONS * RETRIES);
            let mut hit = 0;
            for block in blocks_of(&bytes) {
                for within in [12, 2000] {
                    std::fs::write(&path, flip(&bytes, 16 + block * BLOCK + within)).unwrap();
                    let place = format!("block {block}, byte {within}, closed {close}");
                    let told = match accept_damage(directory.path(), None) {
                        // Without a log nothing else knows which one it is.
                        Err(e) if e.to_string().contains("which log this is") => continue,
                        told => told.unwrap(),
                    };
                    let (after, rewound) = rows(&path);
                    assert!(after.is_subset(&before), "{place}: {told:?}");
                    let lost: BTreeSet<u64> = before.difference(&after).map(|(of, _, _)| *of).collect();
                    assert!(
                        lost.is_subset(&rewound),
                        "{place}: {lost:?} of {rewound:?}, {told:?}"
                    );
                    hit += usize::from(!lost.is_empty());
                }
            }
            assert!(hit > 5, "{hit} flips hit retries");
        }
    }

    #[tokio::test]
    async fn a_damaged_catalogue_is_left_as_it_is_and_all_but_the_damaged_row_is_salvaged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        let keys =
            Arc::new(Keyring::parse("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "a test").unwrap());
        {
            let catalog = EmbeddedCatalog::open(&path, keys.clone()).unwrap();
            for id in 1..=SUBSCRIPTIONS {
                let put = CatalogChange::PutTopic(topic(id, &format!("topic-{id}")));
                catalog.commit(vec![put]).await.unwrap();
            }
        }
        let bytes = std::fs::read(&path).unwrap();
        let (mut refused, mut partly) = (0, 0);
        for block in blocks_of(&bytes) {
            let flipped = flip(&bytes, 16 + block * BLOCK + 1200);
            std::fs::write(&path, &flipped).unwrap();
            if let Err(e) = EmbeddedCatalog::open(&path, keys.clone()) {
                refused += 1;
                assert!(e.to_string().contains("is damaged: 1 damaged blocks"), "{e}");
                let same = std::fs::read(&path).unwrap() == flipped;
                assert!(same, "block {block} was changed by a refused start");
            }
            std::fs::write(&path, &flipped).unwrap();
            let told = accept_damage(directory.path(), Some(&keys)).unwrap();
            let loaded = EmbeddedCatalog::open(&path, keys.clone())
                .unwrap()
                .load()
                .await
                .unwrap();
            let count = loaded.topics.len() as u64;
            assert!(
                count + 1 >= SUBSCRIPTIONS,
                "block {block}: {count} topics, {told:?}"
            );
            if count < SUBSCRIPTIONS {
                partly += 1;
                assert!(
                    told.iter().any(|told| told.contains("14 of 15 topics")),
                    "{told:?}"
                );
            }
        }
        assert!(
            refused > 2 && partly > 0,
            "{refused} refused, {partly} with a row less"
        );
    }

    #[tokio::test]
    async fn a_restore_that_was_killed_between_its_renames_is_finished() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        let keys = Arc::new(Keyring::ephemeral());
        let catalog = EmbeddedCatalog::open(&path, keys.clone()).unwrap();
        let put = CatalogChange::PutTopic(topic(1, "orders"));
        catalog.commit(vec![put]).await.unwrap();
        drop(catalog);
        let whole = std::fs::read(&path).unwrap();
        std::fs::rename(&path, with_suffix(&path, ".salvaged")).unwrap();
        std::fs::write(with_suffix(&path, ".damaged"), flip(&whole, 5000)).unwrap();
        let told = accept_damage(directory.path(), Some(&keys)).unwrap();
        assert!(told[0].contains("interrupted restore was finished"), "{told:?}");
        let loaded = EmbeddedCatalog::open(&path, keys).unwrap().load().await.unwrap();
        assert_eq!(loaded.topics.len(), 1);
    }

    // A write that never reached the disk leaves zeros behind, which no checksum tells from free space.
    #[test]
    fn a_block_that_lost_its_write_is_refused_before_redb_reads_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.redb");
        let (_, bytes) = state_of_many(&path, true);
        let mut refused = 0;
        for block in blocks_of(&bytes) {
            let mut zeroed = bytes.clone();
            zeroed[16 + block * BLOCK..][..BLOCK].fill(0);
            std::fs::write(&path, &zeroed).unwrap();
            // A panic over pages that make no sense would say "the file is damaged" instead.
            if let Err(e) = StateDatabase::open(&path, 7) {
                refused += 1;
                assert!(e.to_string().contains("damaged blocks of"), "{e}");
                assert_eq!(std::fs::read(&path).unwrap(), zeroed, "block {block}");
            }
        }
        assert!(refused > 5, "{refused} refused");
    }
}
