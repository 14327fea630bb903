//! Keys that seal stored secrets: their sources, and the commands that change them.

use crate::config::{self, Config, ServeFlags, StoreKind};
use crate::credentials::{self, read_if_there, write_private};
use crate::private_files::{make_directory, restrict_new_files};
use crate::{offline_audit, serve, terminal};
use anyhow::{Context, Result, bail};
use postrider_embedded::{catalog_key, rewrite_catalog};
use postrider_store::seal::{KeyId, Keyring, key_of};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};

/// File of the generated key, if none is configured.
const DEFAULT_FILE: &str = "secret-key";

#[derive(Clone, Debug, clap::Args)]
pub struct SecretsArgs {
    #[command(subcommand)]
    command: SecretsCommand,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum SecretsCommand {
    /// Seal all secrets of a stopped server under another key
    ///
    /// A key that the server generated is replaced by a new one. With secrets.key or
    /// secrets.key_file, put the new key before the old one first.
    Rotate(DirectoryFlags),
}

/// The stopped server that a command is about.
#[derive(Clone, Debug, clap::Args)]
pub struct DirectoryFlags {
    /// Configuration file (TOML); also POSTRIDER_CONFIG
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The data directory [default: ./postrider-data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

impl DirectoryFlags {
    fn load(&self) -> Result<Config> {
        let flags = ServeFlags {
            config: self.config.clone(),
            data_dir: self.data_dir.clone(),
            ..ServeFlags::default()
        };
        let config = config::load(&flags, std::env::vars())?.config;
        let data_dir = &config.data_dir;
        if !data_dir.is_dir() {
            bail!("{} is not a data directory", data_dir.display());
        }
        Ok(config)
    }
}

/// The keys of a stopped server's directory, whatever is damaged in it. None where nothing is sealed yet.
pub fn keys_of_directory(data_dir: &Path) -> Result<Option<Keyring>> {
    let flags = DirectoryFlags {
        config: None,
        data_dir: Some(data_dir.to_owned()),
    };
    let config = flags.load()?;
    match configured(&config)? {
        None => own(&config),
        keys => Ok(keys),
    }
}

/// The keys of this installation. The first start makes one if none is configured.
pub fn keyring(config: &Config) -> Result<Keyring> {
    credentials::remove_unfinished(&default_file(config))?;
    if let Some(keys) = existing(config, &catalog(&config.data_dir))? {
        return Ok(keys);
    }
    let text = Keyring::fresh_text();
    let path = default_file(config);
    make_directory(&config.data_dir)?;
    write_keys(&path, &[&text])?;
    Ok(Keyring::parse(&text, path.display().to_string())?)
}

/// Like [`keyring`], for read-only commands: a key generated because nothing is sealed yet is not
/// stored, and the catalog is read from a copy, because opening it may repair it.
pub fn keyring_to_read(config: &Config) -> Result<Keyring> {
    let directory = tempfile::tempdir()?;
    let copy = catalog(directory.path());
    let original = catalog(&config.data_dir);
    if original.exists() {
        let copying = || format!("copying {} to look at it", original.display());
        fs::copy(&original, &copy).with_context(copying)?;
    }
    Ok(existing(config, &copy)?.unwrap_or_else(Keyring::ephemeral))
}

fn default_file(config: &Config) -> PathBuf {
    config.data_dir.join(DEFAULT_FILE)
}

/// Configured keys, which the nodes of a cluster share.
pub fn configured(config: &Config) -> Result<Option<Keyring>> {
    if let Some(key) = &config.secrets.key {
        return Ok(Some(Keyring::parse(key.expose(), "secrets.key")?));
    }
    let Some(file) = &config.secrets.key_file else {
        return Ok(None);
    };
    let source = format!("secrets.key_file {}", file.display());
    let text = read_if_there(file)?;
    let text = text.with_context(|| {
        let make = file.display();
        format!("{source}: there is no such file; \"openssl rand -base64 32 > {make}\" makes one")
    })?;
    Ok(Some(Keyring::parse(&text, source)?))
}

/// Keys that the server generated.
fn own(config: &Config) -> Result<Option<Keyring>> {
    let path = default_file(config);
    let text = read_if_there(&path)?;
    Ok(text
        .map(|text| Keyring::parse(&text, path.display().to_string()))
        .transpose()?)
}

/// Existing keys; `None` before the first start. Fails if they do not open the sealed files.
fn existing(config: &Config, catalog: &Path) -> Result<Option<Keyring>> {
    let is_configured = config.secrets.key.is_some() || config.secrets.key_file.is_some();
    let keys = match is_configured {
        true => configured(config)?,
        false => own(config)?,
    };
    let data_dir = &config.data_dir;
    let Some((needed, path)) = needed(data_dir, catalog)? else {
        return Ok(keys);
    };
    match &keys {
        Some(keys) if keys.knows(needed) => {}
        Some(keys) => {
            let made = own(config)
                .ok()
                .flatten()
                .filter(|own| is_configured && own.knows(needed));
            let hint = made.map(|_| {
                format!(
                    "{} opens it: \"postrider secrets rotate\" seals everything under the configured key",
                    default_file(config).display()
                )
            });
            let refused = keys
                .require(needed)
                .with_context(|| format!("opening {}", path.display()));
            match hint {
                Some(hint) => refused.context(hint)?,
                None => refused?,
            }
        }
        None => bail!(
            "the secrets in {} are sealed under key {needed}, but {} is missing and neither secrets.key nor \
             secrets.key_file is set: put the key back from its backup",
            data_dir.display(),
            default_file(config).display()
        ),
    }
    Ok(keys)
}

/// The key that the data directory needs, and a file sealed under it. `looked_at` is the catalog's
/// file to read, which may be a copy.
fn needed(data_dir: &Path, looked_at: &Path) -> Result<Option<(KeyId, PathBuf)>> {
    let token_key = credentials::token_key_path(data_dir);
    if let Some(id) = token_key_id(data_dir)? {
        return Ok(Some((id, token_key)));
    }
    Ok(catalog_key(looked_at)?.map(|id| (id, catalog(data_dir))))
}

fn token_key_id(data_dir: &Path) -> Result<Option<KeyId>> {
    let text = read_if_there(&credentials::token_key_path(data_dir))?;
    Ok(text.and_then(|text| key_of(text.trim_end().as_bytes())))
}

fn catalog(data_dir: &Path) -> PathBuf {
    data_dir.join("catalog.redb")
}

fn write_keys(path: &Path, keys: &[&str]) -> Result<()> {
    let text = format!(
        "# Opens the secrets in this directory; without it they are lost. Back it up apart from them.\n{}\n",
        keys.join("\n")
    );
    write_private(path, &text)
}

pub fn run(args: &SecretsArgs) -> Result<()> {
    match &args.command {
        SecretsCommand::Rotate(flags) => rotate(&flags.load()?),
    }
}

/// Seals everything under a new key. After an interruption at any point the stored keys open
/// everything, and the next run continues.
fn rotate(config: &Config) -> Result<()> {
    embedded_only(config)?;
    restrict_new_files();
    let _lock = serve::lock(&config.data_dir)?;
    let told = seal_anew(config);
    offline_audit::record(&config.data_dir, "secrets.rotate", json!({}), &told);
    terminal::print(told?)
}

/// Report of the work, for people.
fn seal_anew(config: &Config) -> Result<String> {
    let path = default_file(config);
    if let Some(keys) = configured(config)? {
        let before = match own(config)? {
            Some(made) => keys.with_opening_keys(made),
            None => keys,
        };
        if let Some((id, sealed)) = needed(&config.data_dir, &catalog(&config.data_dir))? {
            before
                .require(id)
                .with_context(|| format!("opening {}", sealed.display()))?;
        }
        reseal(config, &before)?;
        // Nothing is sealed under the server's own key any more.
        if path.exists() {
            postrider_embedded::erase(&path).with_context(|| format!("removing {}", path.display()))?;
        }
        let others = before.ids().len() - 1;
        let note = match others {
            0 => "; to change the key, put the new one before it and run this again".to_owned(),
            _ => "; keys behind it are no longer needed".to_owned(),
        };
        return Ok(format!(
            "everything is sealed under key {}{note}",
            before.current()
        ));
    }
    let before = keyring(config)?;
    let new = Keyring::fresh_text();
    let old = read_if_there(&path)?.unwrap_or_default();
    let old: Vec<&str> = old
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
        .collect();
    let both: Vec<&str> = [new.as_str()].into_iter().chain(old.first().copied()).collect();
    if old.len() > 1 {
        // After an interrupted run some files may be sealed under each of the keys.
        reseal(config, &before)?;
    }
    write_keys(&path, &both)?;
    let keys = keyring(config)?;
    reseal(config, &keys)?;
    write_keys(&path, &[&new])?;
    Ok(format!(
        "everything is sealed under the new key {}; back up {}",
        keys.current(),
        path.display()
    ))
}

fn embedded_only(config: &Config) -> Result<()> {
    if config.store.kind == StoreKind::Jetstream {
        bail!("store.kind is \"jetstream\": this command is for the data directory of an embedded store");
    }
    Ok(())
}

/// Seals everything under the first key, in new files without remains of the old content.
fn reseal(config: &Config, keys: &Keyring) -> Result<()> {
    let catalog = catalog(&config.data_dir);
    if catalog.exists() {
        rewrite_catalog(&catalog, keys)?;
    }
    credentials::reseal_files(&config.data_dir, keys)
}

/// `postrider compact`: rewrites the databases of a stopped server.
pub fn compact(flags: &DirectoryFlags) -> Result<()> {
    let config = flags.load()?;
    embedded_only(&config)?;
    restrict_new_files();
    let _lock = serve::lock(&config.data_dir)?;
    let lines = compact_files(&config);
    offline_audit::record(&config.data_dir, "store.compact", json!({}), &lines);
    terminal::print(lines?.join("\n"))
}

/// Reports the sizes of the databases before and after.
fn compact_files(config: &Config) -> Result<Vec<String>> {
    let keys = keyring(config)?;
    let mut lines = Vec::new();
    for name in ["catalog.redb", "archive.redb", "state.redb"] {
        let path = config.data_dir.join(name);
        let Some(before) = size(&path) else { continue };
        match name {
            "catalog.redb" => rewrite_catalog(&path, &keys)?,
            _ => postrider_embedded::compact(&path)?,
        }
        let after = size(&path).unwrap_or_default();
        lines.push(format!("{name}: {before} bytes before, {after} after"));
    }
    if lines.is_empty() {
        bail!("{} holds no databases", config.data_dir.display());
    }
    Ok(lines)
}

fn size(path: &Path) -> Option<u64> {
    let len = std::fs::metadata(path).ok()?.len();
    (len > 0).then_some(len)
}
