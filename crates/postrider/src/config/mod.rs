//! The operator's configuration: read once, parsed into types, refused with the key and the reason.
//!
//! Flags win over `POSTRIDER_*` variables, which win over the file, which wins over the defaults.
//! The edge module's own variables are read separately, into [`EdgeConfig`].

mod check;
mod custom;
mod declared;
mod destination;
mod duration;
mod edge;
mod egress;
mod jetstream;
mod layers;
mod model;
mod print;
mod secret;
mod storage;
mod traces;

pub use check::plain_http_exposed;
pub use custom::{EDGE_SUCCESS_STRICT, OrOff, ProbationCustom, ProfileCustom, TimeToLiveCheck};
pub use declared::{DeclaredDomain, DeclaredSubscription, DeclaredSystemTopic, DeclaredTopic};
pub use duration::{NEVER, print_hours};
pub use edge::{EdgeConfig, MetricsReporter, TlsPolicy, batch_defaults, event_grid_hosts};
pub use model::address::read as read_address;
pub use model::{
    AzureConfig, ClientRole, ClientSection, Config, LogFormat, StorageConfig as StoreConfig, StoreKind,
};
pub use print::{default_config_text, print_config};
pub use secret::ConfigSecret;
pub use storage::{AccountKind, StorageAccountConfig};
pub use traces::OtlpProtocol;

use std::fmt;
use std::path::PathBuf;

/// The flags of `postrider serve`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServeFlags {
    /// Configuration file (TOML); also POSTRIDER_CONFIG
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of events, keys and certificates [default: ./postrider-data]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Address or port of the HTTPS listener, or "off" [default: 127.0.0.1:4438]
    #[arg(long, value_name = "ADDR")]
    pub https: Option<String>,
    /// Address or port of the HTTP listener, or "off" [default: 127.0.0.1:5888]
    #[arg(long, value_name = "ADDR")]
    pub http: Option<String>,
    /// Event Grid to behave like [default: cloud-2021]
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    /// Let tests move the clock through the API
    #[arg(long)]
    pub test_clock: bool,
    /// How to write the log: text, json or auto, which is text on a terminal [default: auto]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// Print the effective configuration, secrets masked, and exit
    #[arg(long)]
    pub print_config: bool,
}

/// A configuration that passed all checks.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    pub config: Config,
    pub edge: EdgeConfig,
    /// Warnings about settings that are valid but probably unintended; logged at the start.
    pub warnings: Vec<String>,
    /// The configuration file that was read.
    pub file: Option<PathBuf>,
}

impl LoadedConfig {
    /// Whether anyone who reaches a listener may use the edge API.
    pub fn edge_is_open(&self) -> bool {
        check::edge_is_open(&self.config, &self.edge)
    }
}

/// Why a configuration was refused: the key, the reason and where the value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    pub key: String,
    pub reason: String,
    /// A file's path, a variable's name or a flag.
    pub source: Option<String>,
    pub hint: Option<String>,
}

impl ConfigError {
    fn new(key: impl Into<String>, reason: impl Into<String>) -> ConfigError {
        ConfigError {
            key: key.into(),
            reason: reason.into(),
            source: None,
            hint: None,
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.reason)?;
        if let Some(source) = &self.source {
            write!(f, " (in {source})")?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "; did you mean \"{hint}\"?")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// Reads the configuration from the flags, the environment that is handed in, and the file that
/// either of them names.
pub fn load(
    flags: &ServeFlags,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<LoadedConfig, ConfigError> {
    load_reporting_all(flags, env).map_err(|mut refused| refused.remove(0))
}

/// Like [`load`], but returns all mistakes rather than the first; the list is never empty.
pub fn load_reporting_all(
    flags: &ServeFlags,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<LoadedConfig, Vec<ConfigError>> {
    let mut env: Vec<_> = env.into_iter().collect();
    env.sort(); // one order, whatever the operating system's, for warnings and for repeated names

    let layers = layers::ConfigLayers::read(flags, &env).map_err(|refused| vec![refused])?;
    let mut config: Config = layers.extract()?;
    let (edge, mut warnings) = edge::read(&env).map_err(|refused| vec![refused])?;

    let said = |key: &str| layers.contains(key);
    let unspoken = traces::fill(&mut config.traces, said, &env).map_err(|refused| vec![refused])?;
    warnings.extend(unspoken);

    // The module's TLS policy applies only where our own listener settings are not set.
    match edge.tls_policy {
        Some(TlsPolicy::Strict) if !layers.contains("listen.http") => config.listen.http = None,
        Some(TlsPolicy::Disabled) if !layers.contains("listen.https") => config.listen.https = None,
        _ => {}
    }

    let refused = check::check(&config, &edge);
    if !refused.is_empty() {
        return Err(refused.into_iter().map(|one| layers.with_source(one)).collect());
    }
    warnings.extend(check::warnings(&config, &edge));
    warnings.extend(edge::ineffective_retry_variables(&env, &config.profile));
    Ok(LoadedConfig {
        config,
        edge,
        warnings,
        file: layers.file,
    })
}

/// The candidate that was probably meant by `word`.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    let most = 1.max(word.len() / 3);
    candidates
        .into_iter()
        .filter(|candidate| candidate.len().abs_diff(word.len()) <= most)
        .map(|candidate| (distance(&word, &candidate.to_lowercase()), candidate))
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= most)
        .map(|(_, candidate)| candidate)
}

/// How many letters must be added, dropped, changed or swapped with the next to get from one word to the other.
fn distance(from: &str, to: &str) -> usize {
    let [from, to] = [from, to].map(|word| word.chars().collect::<Vec<char>>());
    let mut rows = vec![vec![0; to.len() + 1]; from.len() + 1];
    for i in 0..=from.len() {
        for j in 0..=to.len() {
            rows[i][j] = match (i, j) {
                (0, n) | (n, 0) => n,
                _ => {
                    let changed = rows[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
                    let least = changed.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                    let swapped = i > 1 && j > 1 && from[i - 2..i] == [to[j - 1], to[j - 2]];
                    match swapped {
                        true => least.min(rows[i - 2][j - 2] + 1),
                        false => least,
                    }
                }
            };
        }
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests;
