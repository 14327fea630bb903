//! Findings of the doctor, and their output.

use crate::terminal::{harmless, with_times, wrapped};
use serde_json::{Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FindingLevel {
    Ok,
    /// Works with a defect, or will not work for much longer.
    Warning,
    /// Does not work.
    Problem,
}

impl FindingLevel {
    fn name(self) -> &'static str {
        match self {
            FindingLevel::Ok => "ok",
            FindingLevel::Warning => "warning",
            FindingLevel::Problem => "problem",
        }
    }

    fn color(self) -> &'static str {
        match self {
            FindingLevel::Ok => "\x1b[32m",
            FindingLevel::Warning => "\x1b[33m",
            FindingLevel::Problem => "\x1b[31m",
        }
    }
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub level: FindingLevel,
    /// Part of the installation: `tls`, `disk`.
    pub about: &'static str,
    pub what: String,
    pub todo: Option<String>,
    /// Commands to be typed as they are.
    pub commands: Vec<String>,
}

impl Finding {
    pub fn ok(about: &'static str, what: impl Into<String>) -> Finding {
        Finding {
            level: FindingLevel::Ok,
            about,
            what: what.into(),
            todo: None,
            commands: Vec::new(),
        }
    }

    pub fn warning(about: &'static str, what: impl Into<String>, todo: impl Into<String>) -> Finding {
        Finding {
            level: FindingLevel::Warning,
            todo: Some(todo.into()),
            ..Finding::ok(about, what)
        }
    }

    pub fn problem(about: &'static str, what: impl Into<String>, todo: impl Into<String>) -> Finding {
        Finding {
            level: FindingLevel::Problem,
            ..Finding::warning(about, what, todo)
        }
    }

    pub fn command(mut self, command: impl Into<String>) -> Finding {
        self.commands.push(command.into());
        self
    }
}

fn count(findings: &[Finding], level: FindingLevel) -> usize {
    findings.iter().filter(|one| one.level == level).count()
}

pub fn has_problems(findings: &[Finding]) -> bool {
    count(findings, FindingLevel::Problem) > 0
}

pub fn as_json(findings: &[Finding]) -> Value {
    let checks = findings.iter().map(|one| {
        let mut shown = json!({"level": one.level.name(), "about": one.about, "what": one.what});
        if let Some(todo) = &one.todo {
            shown["todo"] = json!(todo);
        }
        if !one.commands.is_empty() {
            shown["commands"] = json!(one.commands);
        }
        shown
    });
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ok": !has_problems(findings),
        "problems": count(findings, FindingLevel::Problem),
        "warnings": count(findings, FindingLevel::Warning),
        "checks": checks.collect::<Vec<_>>(),
    })
}

pub fn as_text(findings: &[Finding], colors: bool) -> String {
    let mut text = String::new();
    let width = findings.iter().map(|one| one.about.len()).max().unwrap_or(0);
    for one in findings {
        let name = one.level.name();
        let (color, plain) = if colors {
            (one.level.color(), "\x1b[0m")
        } else {
            ("", "")
        };
        let indent = 7 + 2 + width + 2;
        let told = |text: &str, indent: usize| wrapped(&with_times(&harmless(text)), indent);
        let what = told(&one.what, indent);
        text.push_str(&format!(
            "{color}{name:<7}{plain}  {:<width$}  {what}\n",
            one.about
        ));
        if let Some(todo) = &one.todo {
            text.push_str(&format!("{:indent$}→ {}\n", "", told(todo, indent + 2)));
        }
        for command in &one.commands {
            // In one piece, so that it can be copied.
            text.push_str(&format!("{:indent$}  $ {}\n", "", harmless(command)));
        }
    }
    let some = |count: usize, word: &str| match count {
        1 => format!("1 {word}"),
        _ => format!("{count} {word}s"),
    };
    let problems = some(count(findings, FindingLevel::Problem), "problem");
    let warnings = some(count(findings, FindingLevel::Warning), "warning");
    text.push_str(&format!("\n{problems}, {warnings}"));
    text
}

/// A word quoted for a shell.
pub fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Vec<Finding> {
        vec![
            Finding::ok("tls", "good until 2030"),
            Finding::warning("disk", "almost\nfull\x1b[2J", "make room").command("du -sh /data"),
        ]
    }

    #[test]
    fn text_is_aligned_counted_and_harmless() {
        let text = as_text(&some(), false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "ok       tls   good until 2030");
        assert!(lines[1].starts_with("warning  disk  almost"), "{text}");
        assert!(!text.contains('\x1b'), "{text:?}");
        assert_eq!(lines[2], "               → make room");
        assert_eq!(lines[3], "                 $ du -sh /data");
        assert_eq!(*lines.last().unwrap(), "0 problems, 1 warning");
        assert!(as_text(&some(), true).contains("\x1b[33mwarning\x1b[0m"));
    }

    #[test]
    fn json_says_the_same() {
        let shown = as_json(&some());
        assert_eq!(
            (&shown["ok"], &shown["problems"], &shown["warnings"]),
            (&json!(true), &json!(0), &json!(1))
        );
        assert_eq!(shown["checks"][1]["commands"], json!(["du -sh /data"]));
        assert_eq!(shown["checks"][0].get("todo"), None);
        let mut found = some();
        found.push(Finding::problem("port", "taken", "free it"));
        assert!(has_problems(&found) && as_json(&found)["ok"] == json!(false));
    }

    #[test]
    fn commands_can_be_typed_as_they_are() {
        assert_eq!(quoted("/var/lib/postrider"), "/var/lib/postrider");
        assert_eq!(quoted("/my data/it's"), r"'/my data/it'\''s'");
        assert_eq!(quoted("$(rm)"), "'$(rm)'");
        assert_eq!(quoted(""), "''");
    }
}
