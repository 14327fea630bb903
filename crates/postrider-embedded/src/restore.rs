//! Recovery of a stopped server's directory with files of different times or damage, at the
//! operator's explicit request.

use crate::database::{damaged_blocks, open_damaged, read_generations};
use crate::disk::{Directory, Disk};
use crate::generations::{self, FileKind};
use crate::record::{Kind, Progress, Reader, STATE_GENERATION};
use crate::segment::{Head, Segment, base_of, log_name};
use crate::state::{State, Write};
use crate::{archive, catalog, chain};
use postrider_core::ids::Position;
use postrider_store::Error;
use std::io;
use std::path::{Path, PathBuf};

/// The latest generation of the state database that the log has recorded.
fn seen_by_log(log: &dyn Disk) -> io::Result<u64> {
    let mut seen = 0;
    for base in log.names()?.iter().filter_map(|name| base_of(name)) {
        let head = Head::read(&*log.open(&log_name(base))?)?;
        seen = seen.max(head.map_or(0, |head| head.generation));
        Segment::open_scanned(log, base, Position(u64::MAX), |_, _, header, payload| {
            if header.kind == Kind::Progress {
                let mut reader = Reader::new(payload);
                while let Some((of, progress)) = Progress::decode(&mut reader) {
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
        let head = base_of(name).map(|base| Head::read(&*log.open(&log_name(base))?));
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
    told.extend(State::rebuild(None, &new, log)?);
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
    let known = chain::known_losses(&path)?;
    if !known.is_empty() {
        State::open(&path, 0)?.write(&[Write::ForgetLosses])?;
    }
    let told = known.iter().map(|one| format!("no longer reported: {one}"));
    Ok(told.collect())
}

/// Accepts the files as they are, even if some are older. Returns descriptions of the consequences.
pub fn accept_mixed_files(data_dir: &Path) -> Result<Vec<String>, Error> {
    let log = Directory::look_at(data_dir.join("log"));
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

/// Replaces damaged databases by their readable content and keeps the damaged files next to them.
/// Returns descriptions of what is lost.
pub fn accept_damage(data_dir: &Path) -> Result<Vec<String>, Error> {
    let mut told = Vec::new();
    let log = Directory::look_at(data_dir.join("log"));
    for kind in FileKind::ALL {
        let path = data_dir.join(kind.file());
        let failed = |e: io::Error| Error::Unavailable(format!("{}: {e}", path.display()));
        if !path.exists() {
            // A missing state database is created below.
            continue;
        }
        // Checked before the salvage, which repairs the header.
        let damaged = damaged_blocks(&path).map_err(failed)?;
        let opened = open_damaged(&path);
        if damaged == 0 && opened.is_some() {
            continue;
        }
        let new = with_suffix(&path, ".salvaged");
        remove_if_there(&new).map_err(failed)?;
        let lost = match kind {
            FileKind::State => State::rebuild(opened.as_ref(), &new, &log)?,
            FileKind::Catalog => catalog::rebuild(opened.as_ref(), &new)?,
            FileKind::Archive => archive::rebuild(opened.as_ref(), &new)?,
        };
        drop(opened);
        let aside = with_suffix(&path, ".damaged");
        std::fs::rename(&path, &aside).map_err(failed)?;
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
