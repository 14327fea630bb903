//! `postrider context`: the servers that the client commands know by name, in a small file only its
//! owner can read.

use crate::client::ClientFlags;
use crate::config::{ConfigSecret, nearest};
use crate::output::OutputFlags;
use crate::private_files;
use crate::terminal::{harmless, print, table};
use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Content of the contexts file.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ContextsFile {
    /// Name of the context that is used where none is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    current: Option<String>,
    #[serde(default, rename = "context")]
    contexts: BTreeMap<String, ServerContext>,
}

/// A server and how to reach it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ServerContext {
    pub url: String,
    /// Certificates to trust besides the system's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "in_clear")]
    secret: Option<ConfigSecret>,
    /// File that holds nothing but the secret, or a `credentials.toml`.
    #[serde(skip_serializing_if = "Option::is_none")]
    secret_file: Option<PathBuf>,
    /// Resource group that is used where none is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// Secrets are not masked in this file: it is where they are kept.
fn in_clear<S: serde::Serializer>(secret: &Option<ConfigSecret>, to: S) -> Result<S::Ok, S::Error> {
    secret.as_ref().map(ConfigSecret::expose).serialize(to)
}

impl ServerContext {
    pub fn secret(&self) -> Result<Option<ConfigSecret>> {
        if let Some(secret) = &self.secret {
            return Ok(Some(secret.clone()));
        }
        let Some(path) = &self.secret_file else {
            return Ok(None);
        };
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let table: Option<toml::Table> = toml::from_str(&text).ok();
        let named = table
            .as_ref()
            .and_then(|table| table.get("client_secret")?.as_str());
        let secret = named.unwrap_or(text.trim());
        ensure!(
            !secret.is_empty() && !secret.contains('\n'),
            "{} must hold a secret on one line, or client_secret = \"…\"",
            path.display()
        );
        Ok(Some(ConfigSecret::new(secret)))
    }
}

/// Path of the contexts file: as given, or in the user's configuration directory.
pub fn path(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let directory = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let base = match (directory("XDG_CONFIG_HOME"), directory("HOME")) {
        (Some(base), _) => PathBuf::from(base),
        (None, Some(home)) => PathBuf::from(home).join(".config"),
        // Without a home directory there are no contexts, and none can be added without naming a
        // file.
        (None, None) => return Ok(PathBuf::new()),
    };
    Ok(base.join("postrider/contexts.toml"))
}

impl ContextsFile {
    /// Reads the file; a missing file has no contexts.
    pub fn read(path: &Path) -> Result<ContextsFile> {
        if path.as_os_str().is_empty() {
            return Ok(ContextsFile::default());
        }
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(ContextsFile::default()),
            Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
        };
        toml::from_str(&text).map_err(|e| {
            // The parser's error message quotes the line, which might hold a secret.
            let before = &text[..e.span().map_or(0, |span| span.start.min(text.len()))];
            let line = before.matches('\n').count() + 1;
            anyhow::anyhow!("{} line {line}: {}", path.display(), e.message())
        })
    }

    /// Replaces the file atomically; only its owner may read it from the first byte on.
    fn write(&self, path: &Path) -> Result<()> {
        let writing = || format!("writing {}", path.display());
        ensure!(
            !path.as_os_str().is_empty(),
            "there is no home directory to keep contexts in: set POSTRIDER_CONTEXTS to a file"
        );
        let directory = match path.parent() {
            Some(directory) if !directory.as_os_str().is_empty() => directory,
            _ => Path::new("."),
        };
        private_files::make_directory(directory)?;
        let mut file = tempfile::NamedTempFile::new_in(directory).with_context(writing)?;
        file.write_all(toml::to_string(self)?.as_bytes())
            .with_context(writing)?;
        file.as_file().sync_all().with_context(writing)?;
        file.persist(path).map_err(|e| e.error).with_context(writing)?;
        Ok(())
    }

    pub fn named(&self, name: &str) -> Result<&ServerContext> {
        if let Some(context) = self.contexts.get(name) {
            return Ok(context);
        }
        if self.contexts.is_empty() {
            bail!("context {name:?} does not exist: add one with \"postrider context add\"");
        }
        let names: Vec<_> = self.contexts.keys().map(String::as_str).collect();
        let hint = nearest(name, names.iter().copied());
        let hint = hint
            .map(|near| format!("; did you mean {near:?}?"))
            .unwrap_or_default();
        bail!("context {name:?} does not exist, only {}{hint}", names.join(", "))
    }

    /// Context that is used where none is named.
    pub fn in_use(&self) -> Result<Option<(&str, &ServerContext)>> {
        let Some(name) = self.current.as_deref() else {
            return Ok(None);
        };
        Ok(Some((name, self.named(name)?)))
    }
}

/// Name servers, and choose the one that the other commands use
#[derive(Clone, Debug, Args)]
pub struct ContextArgs {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    client: ClientFlags,
    #[command(flatten)]
    output: OutputFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Save a server: --server, and --secret or --secret-file; --ca, --group. An existing name is
    /// replaced
    Add {
        name: String,
        /// File that the secret is read from at every use
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
        /// Resource group to use where none is named
        #[arg(long, short = 'g', visible_alias = "resource-group")]
        group: Option<String>,
        /// Use it from now on, as the first one always is
        #[arg(long = "use")]
        in_use: bool,
    },
    /// List the contexts; the one in use has a star
    List,
    /// Use this context from now on
    Use { name: String },
    /// Remove a context
    Remove { name: String },
    /// Print a context, without its secret
    Show {
        /// [default: the context in use]
        name: Option<String>,
    },
}

pub fn run(args: &ContextArgs) -> Result<()> {
    let path = path(args.client.contexts.as_deref())?;
    let mut contexts = ContextsFile::read(&path)?;
    match &args.command {
        Command::Add {
            name,
            secret_file,
            group,
            in_use,
        } => {
            contexts.add(name, added(&args.client, secret_file, group)?, *in_use)?;
            contexts.write(&path)?;
            let used = match contexts.current.as_ref() == Some(name) {
                true => ", which is in use now",
                false => "",
            };
            print(format!("added {name}{used}; kept in {}", path.display()))
        }
        Command::List => match args.output.is_json() {
            true => print(format!("{:#}", contexts.list_json())),
            false => print(contexts.list()),
        },
        Command::Use { name } => {
            contexts.named(name)?;
            contexts.current = Some(name.clone());
            contexts.write(&path)?;
            print(format!("{name} is in use"))
        }
        Command::Remove { name } => {
            contexts.remove(name)?;
            contexts.write(&path)?;
            print(format!("removed {name}"))
        }
        Command::Show { name } => match args.output.is_json() {
            true => print(format!("{:#}", contexts.show_json(name.as_deref())?)),
            false => print(contexts.show(name.as_deref())?),
        },
    }
}

fn added(
    flags: &ClientFlags,
    secret_file: &Option<PathBuf>,
    group: &Option<String>,
) -> Result<ServerContext> {
    let Some(url) = &flags.server else {
        bail!("give the server's address with --server");
    };
    crate::client::check_url(url)?;
    ensure!(
        flags.secret.is_none() || secret_file.is_none(),
        "give --secret or --secret-file, not both"
    );
    let absolute = |path: &Option<PathBuf>| path.as_ref().map(std::path::absolute).transpose();
    let context = ServerContext {
        url: url.clone(),
        ca: absolute(&flags.ca)?,
        secret: flags.secret.clone(),
        secret_file: absolute(secret_file)?,
        group: group.clone(),
    };
    // Fail now if the secret cannot be read: it could not be read later either.
    context.secret()?;
    Ok(context)
}

impl ContextsFile {
    fn add(&mut self, name: &str, context: ServerContext, in_use: bool) -> Result<()> {
        let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        ensure!(
            !name.is_empty() && name.chars().all(word),
            "a context's name has letters, digits, hyphens, dots and underscores, not {name:?}"
        );
        if in_use || self.contexts.is_empty() {
            self.current = Some(name.to_owned());
        }
        self.contexts.insert(name.to_owned(), context);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> Result<()> {
        self.named(name)?;
        self.contexts.remove(name);
        if self.current.as_deref() == Some(name) {
            self.current = None;
        }
        Ok(())
    }

    fn list(&self) -> String {
        if self.contexts.is_empty() {
            return "no contexts: the commands ask the server on this machine".to_owned();
        }
        let mut table = table(&["", "context", "server", "group"], &[]);
        for (name, context) in &self.contexts {
            let star = match self.current.as_ref() == Some(name) {
                true => "*",
                false => "",
            };
            let group = context.group.as_deref().unwrap_or("-");
            table.add_row([star, name, &harmless(&context.url), &harmless(group)]);
        }
        table.to_string()
    }

    fn list_json(&self) -> Value {
        let all = self.contexts.iter();
        all.map(|(name, context)| self.json_of(name, context)).collect()
    }

    fn show_json(&self, name: Option<&str>) -> Result<Value> {
        let (name, context) = self.named_or_in_use(name)?;
        Ok(self.json_of(name, context))
    }

    /// A context as JSON, without its secret.
    fn json_of(&self, name: &str, context: &ServerContext) -> Value {
        json!({
            "name": name,
            "current": self.current.as_deref() == Some(name),
            "server": context.url,
            "ca": context.ca,
            "group": context.group,
            "hasSecret": context.secret.is_some() || context.secret_file.is_some(),
            "secretFile": context.secret_file,
        })
    }

    fn named_or_in_use<'a>(&'a self, name: Option<&'a str>) -> Result<(&'a str, &'a ServerContext)> {
        match name {
            Some(name) => Ok((name, self.named(name)?)),
            None => self
                .in_use()?
                .context("no context is in use: the commands ask the server on this machine"),
        }
    }

    fn show(&self, name: Option<&str>) -> Result<String> {
        let (name, context) = self.named_or_in_use(name)?;
        let file = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let secret = match (&context.secret, &context.secret_file) {
            (Some(_), _) => "kept here".to_owned(),
            (None, Some(path)) => format!("read from {}", path.display()),
            (None, None) => "none".to_owned(),
        };
        let rows = [
            ("context", name.to_owned()),
            ("server", context.url.clone()),
            ("secret", secret),
            ("ca", file(&context.ca).unwrap_or_else(|| "-".into())),
            ("group", context.group.clone().unwrap_or_else(|| "-".into())),
        ];
        let lines = rows.map(|(name, value)| format!("{name:<9}{}", harmless(&value)));
        Ok(lines.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(url: &str) -> ServerContext {
        ServerContext {
            url: url.into(),
            ca: None,
            secret: Some(ConfigSecret::new("s3cret")),
            secret_file: None,
            group: Some("rg1".into()),
        }
    }

    #[test]
    fn what_is_written_is_read_and_only_by_its_owner() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/contexts.toml");
        assert!(ContextsFile::read(&path).unwrap().contexts.is_empty());
        let mut contexts = ContextsFile::default();
        contexts.add("a", context("http://a"), false).unwrap();
        contexts.add("b", context("http://b"), false).unwrap();
        contexts.write(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut read = ContextsFile::read(&path).unwrap();
        assert_eq!(read.in_use().unwrap().unwrap().0, "a");
        let secret = read.named("b").unwrap().secret().unwrap().unwrap();
        assert_eq!(secret.expose(), "s3cret");
        assert!(!read.show(None).unwrap().contains("s3cret"));
        assert!(!read.list().contains("s3cret"));
        read.remove("a").unwrap();
        assert!(read.in_use().unwrap().is_none());
        let refused = read.add("a b", context("http://a"), false).unwrap_err();
        assert!(refused.to_string().contains("\"a b\""));
    }

    #[test]
    fn a_secret_may_stand_in_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        let mut context = context("http://a");
        context.secret = None;
        context.secret_file = Some(path.clone());
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            context.secret().map(|secret| secret.unwrap().expose().to_owned())
        };
        assert_eq!(read("abc=\n").unwrap(), "abc=");
        assert_eq!(read("client_id = 'x'\nclient_secret = 'toml'\n").unwrap(), "toml");
        assert!(read("\n").unwrap_err().to_string().contains("must hold a secret"));
        assert!(read("s3cret\nx").is_err_and(|e| !e.to_string().contains("s3cret")));
    }

    #[test]
    fn a_damaged_file_is_told_by_its_line_without_secrets() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c.toml");
        std::fs::write(&path, "current = 'a'\n[context.a]\nurl = 'x'\nsecrt = 's3cret'\n").unwrap();
        let refused = ContextsFile::read(&path).unwrap_err().to_string();
        assert!(
            refused.contains("line 4") && refused.contains("secrt"),
            "{refused}"
        );
        assert!(!refused.contains("s3cret"), "{refused}");
    }
}
