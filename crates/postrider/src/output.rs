//! Output of commands: for people, or as JSON for programs. Every command prints lists as JSON
//! arrays.

use crate::terminal::harmless;
use postrider_core::outcome::Outcome;
use postrider_engine::subscription_health::words_of;
use serde_json::Value;

/// The same flag everywhere.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct OutputFlags {
    /// Output format: for people, or JSON
    #[arg(
        long,
        short = 'o',
        value_enum,
        value_name = "FORM",
        default_value = "text",
        global = true
    )]
    output: OutputFormat,
    /// Earlier name of "--output json" in some commands.
    #[arg(long, global = true, hide = true, conflicts_with = "output")]
    json: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OutputFormat {
    /// Tables and lines
    #[default]
    #[value(alias = "table")]
    Text,
    /// JSON; lists are arrays
    Json,
}

impl OutputFlags {
    pub fn form(self) -> OutputFormat {
        match self.json {
            true => OutputFormat::Json,
            false => self.output,
        }
    }

    pub fn is_json(self) -> bool {
        self.form() == OutputFormat::Json
    }
}

/// An outcome by its name, in plain words: by the status where there was an answer.
pub fn outcome_words(outcome: &Value, status: &Value) -> String {
    let name = outcome.as_str().unwrap_or("-");
    let known = Outcome::ALL.into_iter().find(|outcome| outcome.name() == name);
    match (known, status.as_u64().and_then(|status| status.try_into().ok())) {
        // A server of a later version may know more.
        (None, None) => harmless(name),
        (known, status) => words_of(known, status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct OutputTestLine {
        #[command(flatten)]
        output: OutputFlags,
    }

    #[test]
    fn earlier_names_still_work() {
        let form = |flags: &[&str]| {
            let words = ["x"].iter().chain(flags);
            OutputTestLine::try_parse_from(words)
                .map(|line| line.output.form())
                .ok()
        };
        assert_eq!(form(&[]), Some(OutputFormat::Text));
        assert_eq!(form(&["-o", "table"]), Some(OutputFormat::Text));
        assert_eq!(form(&["--output", "text"]), Some(OutputFormat::Text));
        assert_eq!(form(&["--output=json"]), Some(OutputFormat::Json));
        assert_eq!(form(&["--json"]), Some(OutputFormat::Json));
        assert_eq!(form(&["--json", "-o", "text"]), None);
        assert_eq!(form(&["-o", "yaml"]), None);
    }
}
