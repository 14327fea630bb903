//! `/docs/configuration`: every key, generated from the commented default configuration.

use super::html::{HtmlBuffer, slug};
use super::{DocPage, SectionLink};

/// A table of the configuration.
#[derive(Debug, Default, PartialEq)]
struct ConfigSection<'a> {
    /// Empty at the top level.
    name: &'a str,
    /// Whether there may be several such tables.
    list: bool,
    intro: Vec<String>,
    keys: Vec<ConfigKey<'a>>,
}

#[derive(Debug, PartialEq)]
struct ConfigKey<'a> {
    name: &'a str,
    value: &'a str,
    /// Whether `value` is the default; otherwise it is an example.
    default: bool,
    about: String,
}

pub fn page(text: &str) -> DocPage {
    let mut body = HtmlBuffer::default();
    let mut links = Vec::new();
    let mut ids: Vec<String> = Vec::new();
    for section in read(text) {
        let title = match (section.name, section.list) {
            ("", _) => "Top level".to_owned(),
            (name, true) => format!("[[{name}]]"),
            (name, false) => format!("[{name}]"),
        };
        let id = slug(&title);
        let before = ids.iter().filter(|known| **known == id).count();
        ids.push(id.clone());
        let id = if before == 0 {
            id
        } else {
            format!("{id}-{}", before + 1)
        };
        body.tag("<section class=\"panel\">\n").heading(2, &id, &title);
        for paragraph in &section.intro {
            body.tag("<p>").text(paragraph).tag("</p>\n");
        }
        if !section.keys.is_empty() {
            body.tag(
                "<table class=\"members\"><thead><tr><th scope=\"col\">Key</th><th scope=\"col\">Value</th>",
            );
            body.tag("<th scope=\"col\">Meaning</th></tr></thead>\n<tbody>\n");
        }
        for key in &section.keys {
            row(&mut body, &section, key);
        }
        if !section.keys.is_empty() {
            body.tag("</tbody></table>\n");
        }
        body.tag("</section>\n");
        links.push(SectionLink::here(&id, &title));
    }
    DocPage {
        title: "Configuration",
        lead: "Every key, as `postrider config` prints it. `postrider serve --print-config` shows what holds.",
        searchable: true,
        body,
        menu: vec![("Tables".to_owned(), links)],
    }
}

fn row(out: &mut HtmlBuffer, section: &ConfigSection<'_>, key: &ConfigKey<'_>) {
    out.tag("<tr><th scope=\"row\">").code(key.name);
    if !section.list {
        let table = match section.name {
            "" => String::new(),
            name => format!("{}__", name.replace('.', "__")),
        };
        let variable = format!("POSTRIDER_{table}{}", key.name).to_uppercase();
        out.tag(" <span class=\"muted variable\">")
            .code(&variable)
            .tag("</span>");
    }
    out.tag("</th><td>").code(key.value);
    if !key.default {
        out.tag(" <span class=\"muted\">for example</span>");
    }
    out.tag("</td><td>").text(&key.about).tag("</td></tr>\n");
}

/// Parses the configuration text. A comment directly before a key or the head of a table describes
/// it; a comment followed by an empty line introduces the next table.
fn read(text: &str) -> Vec<ConfigSection<'_>> {
    let mut sections = vec![ConfigSection::default()];
    let mut alone: Vec<String> = Vec::new();
    let mut about: Vec<&str> = Vec::new();
    for line in text.lines().chain([""]) {
        let at_the_begin = sections.len() == 1 && sections[0].keys.is_empty();
        let bare = line.strip_prefix('#').unwrap_or(line);
        let said = bare.strip_prefix(' ').unwrap_or(bare);
        if let Some((name, list)) = head(said) {
            let mut intro = std::mem::take(&mut alone);
            intro.extend(paragraph(&mut about));
            sections.push(ConfigSection {
                name,
                list,
                intro,
                keys: Vec::new(),
            });
        } else if let Some((name, value)) = assignment(said) {
            let key = ConfigKey {
                name,
                value,
                default: !bare.starts_with(' '),
                about: paragraph(&mut about).unwrap_or_default(),
            };
            sections.last_mut().expect("there is one").keys.push(key);
        } else if !said.is_empty() {
            about.push(said);
        } else if at_the_begin {
            sections[0].intro.extend(paragraph(&mut about));
        } else {
            alone.extend(paragraph(&mut about));
        }
    }
    sections
}

fn paragraph(lines: &mut Vec<&str>) -> Option<String> {
    let text = lines.join(" ");
    lines.clear();
    (!text.is_empty()).then_some(text)
}

fn is_name(text: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_.".contains(&byte);
    !text.is_empty() && text.bytes().all(known)
}

/// `[name]` or `[[name]]`
fn head(line: &str) -> Option<(&str, bool)> {
    let inner = line.strip_prefix('[')?.strip_suffix(']')?;
    let list = inner.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
    let name = list.unwrap_or(inner);
    is_name(name).then_some((name, list.is_some()))
}

fn assignment(line: &str) -> Option<(&str, &str)> {
    let (name, value) = line.split_once(" = ")?;
    is_name(name).then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_belong_to_what_follows_them() {
        let text = "# All of it.\n#\n# \"#key = value\" is a default.\n\n# Which one:\n# a or b.\n#profile = \"a\"\n\n# threads = 4\n\
                    \n# Where.\n[listen]\n#https = \"1\"\n\n# Accounts, in general.\n\n# One kind.\n# [[account]]\n# name = \"x\"\n# Only it.\n# key = \"k\"\n";
        let read = read(text);
        let shown: Vec<_> = read
            .iter()
            .map(|section| {
                let keys = section.keys.iter();
                let keys: Vec<_> = keys
                    .map(|key| format!("{} {} {} {}", key.name, key.value, key.default, key.about))
                    .collect();
                (
                    section.name,
                    section.list,
                    section.intro.join("|"),
                    keys.join("|"),
                )
            })
            .collect();
        let expected = [
            (
                "",
                false,
                "All of it.|\"#key = value\" is a default.".to_owned(),
                "profile \"a\" true Which one: a or b.|threads 4 false ".to_owned(),
            ),
            (
                "listen",
                false,
                "Where.".to_owned(),
                "https \"1\" true ".to_owned(),
            ),
            (
                "account",
                true,
                "Accounts, in general.|One kind.".to_owned(),
                "name \"x\" false |key \"k\" false Only it.".to_owned(),
            ),
        ];
        assert_eq!(shown, expected);
    }
}
