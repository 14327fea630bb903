//! The configuration as text: the effective one, and the commented default file.

use super::LoadedConfig;

/// Effective configuration as TOML, secrets masked. The edge module's variables are not keys of the
/// file and follow as comments.
pub fn print_config(loaded: &LoadedConfig) -> String {
    let mut text = toml::to_string(&loaded.config).expect("every setting has a TOML form");
    text.push_str("\n# Variables of the edge module\n");
    for (key, value) in loaded.edge.printed() {
        text.push_str(&format!("# {key}={value}\n"));
    }
    text
}

/// Default configuration file, which sets nothing and explains every key.
///
/// A line `#key = value` shows a default; a line `# key = value` shows an example.
pub fn default_config_text() -> &'static str {
    include_str!("default.toml")
}
