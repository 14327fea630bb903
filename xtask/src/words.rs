//! `cargo xtask words`: two figures of how the code reads, which may only fall.
//!
//! A comment whose subject is a bare pronoun needs a second reading; a type name that is defined in
//! several files is no name in a search result. STYLE asks for a noun in both places.

use anyhow::{Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Comments that begin with a pronoun, of 1000 comments. Lower it when the figure falls.
const PRONOUN_LED_MAX: u32 = 4;
/// Type names that more than one file defines, of 1000 names. Lower it when the figure falls.
const DEFINED_TWICE_MAX: u32 = 5;
/// A figure may be this much below its maximum before the maximum has to be lowered.
const SLACK: u32 = 5;

const PRONOUNS: [&str; 14] = [
    "It", "It's", "One", "What", "Who", "Whoever", "Those", "Such", "That", "They", "There", "This one",
    "Whatever", "Which",
];

/// Names that are idiomatic in several places, told apart by their modules.
const COMMON: [&str; 14] = [
    "Error", "Config", "Server", "Client", "Kind", "State", "Request", "Response", "Options", "Args",
    "Command", "Builder", "Inner", "Handle",
];

/// Words that may stand between the beginning of a line and the keyword of a definition.
const VISIBILITY: [&str; 3] = ["pub ", "pub(crate) ", "pub(super) "];

#[derive(Debug, Default, PartialEq, Eq)]
struct Figures {
    comments: u32,
    pronoun_led: u32,
    /// Files that define each type name.
    types: BTreeMap<String, BTreeSet<PathBuf>>,
}

impl Figures {
    fn add(&mut self, file: &Path, text: &str) {
        let mut in_comment = false;
        for line in text.lines() {
            let line = line.trim_start();
            let comment = line
                .strip_prefix("//")
                .map(|rest| rest.trim_start_matches(['/', '!']).trim_start());
            if let Some(words) = comment
                && !in_comment
                && !words.is_empty()
            {
                self.comments += 1;
                self.pronoun_led += u32::from(is_pronoun_led(words));
            }
            in_comment = comment.is_some();
            if let Some(name) = defined_type(line) {
                let files = self.types.entry(name.to_owned()).or_default();
                files.insert(file.to_owned());
            }
        }
    }

    /// Of 1000 comments.
    fn pronoun_led_share(&self) -> u32 {
        1000 * self.pronoun_led / self.comments.max(1)
    }

    /// Of 1000 names.
    fn defined_twice_share(&self) -> u32 {
        let names = self
            .types
            .iter()
            .filter(|(name, _)| !COMMON.contains(&name.as_str()));
        let (all, twice) = names.fold((0, 0), |(all, twice), (_, files)| {
            (all + 1, twice + u32::from(files.len() > 1))
        });
        1000 * twice / all.max(1)
    }
}

fn is_pronoun_led(comment: &str) -> bool {
    PRONOUNS.iter().any(|word| {
        comment
            .strip_prefix(word)
            .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    })
}

/// The name of the type that a line defines.
fn defined_type(line: &str) -> Option<&str> {
    let line = VISIBILITY
        .iter()
        .find_map(|word| line.strip_prefix(word))
        .unwrap_or(line);
    let rest = ["struct ", "enum ", "trait "]
        .iter()
        .find_map(|word| line.strip_prefix(word))?;
    let end = rest
        .find(|c: char| !c.is_alphanumeric() && c != '_')
        .unwrap_or(rest.len());
    let name = &rest[..end];
    name.starts_with(|c: char| c.is_ascii_uppercase()).then_some(name)
}

/// Checks both figures of all Rust files of the workspace.
pub fn check(root: &Path) -> Result<()> {
    let mut figures = Figures::default();
    for directory in ["crates", "xtask", "fuzz/fuzz_targets"] {
        add_directory(&mut figures, &root.join(directory))?;
    }
    let (pronoun_led, twice) = (figures.pronoun_led_share(), figures.defined_twice_share());
    println!("comments led by a pronoun: {pronoun_led} of 1000, type names defined twice: {twice} of 1000");
    within(
        "comments led by a pronoun",
        pronoun_led,
        PRONOUN_LED_MAX,
        "PRONOUN_LED_MAX",
    )?;
    within(
        "type names defined in several files",
        twice,
        DEFINED_TWICE_MAX,
        "DEFINED_TWICE_MAX",
    )
}

/// A figure above its maximum is a step back; one far below has earned a lower maximum.
fn within(what: &str, share: u32, max: u32, name: &str) -> Result<()> {
    if share > max {
        bail!("{what}: {share} of 1000, more than {name} = {max} in xtask/src/words.rs allows");
    }
    if share + SLACK < max {
        bail!("{what}: {share} of 1000; keep the gain: set {name} = {share} in xtask/src/words.rs");
    }
    Ok(())
}

fn add_directory(figures: &mut Figures, directory: &Path) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            add_directory(figures, &path)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            figures.add(&path, &std::fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_comments_and_names() {
        let mut figures = Figures::default();
        let text = "\
//! Items of a shop.
//! It has more lines.

/// What is sold.
pub struct Item {
    // Italics are no pronoun.
    name: String,
    /// It's the price.
    price: u32,
}
pub(crate) enum Kind {}
";
        figures.add(Path::new("a.rs"), text);
        figures.add(
            Path::new("b.rs"),
            "struct Item;\nenum Kind {}\ntrait Other {}\nfn structure() {}\n",
        );
        assert_eq!((figures.comments, figures.pronoun_led), (4, 2));
        // `Kind` is a common name; of `Item` and `Other` one has two definitions.
        assert_eq!(
            (figures.pronoun_led_share(), figures.defined_twice_share()),
            (500, 500)
        );
    }

    #[test]
    fn a_figure_may_only_fall() {
        assert!(within("x", 31, 30, "X").is_err());
        assert!(within("x", 30, 30, "X").is_ok());
        assert!(within("x", 26, 30, "X").is_ok());
        assert!(within("x", 24, 30, "X").is_err());
    }
}
