//! JSON as .NET reads configuration: with comments and trailing commas.

use serde_json::Value;

pub fn parse(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(&plain(text.trim_start_matches('\u{feff}')))
}

/// Replaces what JSON does not allow by blanks, so that lines and columns stay the same.
fn plain(text: &str) -> String {
    let mut out: Vec<char> = Vec::with_capacity(text.len());
    let mut letters = text.chars().peekable();
    // Position of a comma that nothing but blanks and comments has followed yet.
    let mut comma = None;
    while let Some(c) = letters.next() {
        match c {
            '"' => {
                comma = None;
                out.push(c);
                while let Some(c) = letters.next() {
                    out.push(c);
                    match c {
                        '\\' => out.extend(letters.next()),
                        '"' => break,
                        _ => {}
                    }
                }
            }
            '/' if letters.peek() == Some(&'/') => {
                out.push(' ');
                while let Some(c) = letters.next_if(|c| *c != '\n') {
                    out.push(blank(c));
                }
            }
            '/' if letters.peek() == Some(&'*') => {
                out.push(' ');
                let mut before = ' ';
                for c in letters.by_ref() {
                    out.push(blank(c));
                    if (before, c) == ('*', '/') {
                        break;
                    }
                    before = c;
                }
            }
            ',' => {
                comma = Some(out.len());
                out.push(c);
            }
            ']' | '}' => {
                if let Some(at) = comma.take() {
                    out[at] = ' ';
                }
                out.push(c);
            }
            c => {
                if !c.is_whitespace() {
                    comma = None;
                }
                out.push(c);
            }
        }
    }
    out.into_iter().collect()
}

fn blank(c: char) -> char {
    if c == '\n' { c } else { ' ' }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn comments_and_last_commas_are_passed_over() {
        let text = "\u{feff}{ // a comment, with a comma\n \"a\": [1, 2, /* , */ ],\n \"b\": \"// no, \\\" /* , */ ]\",\n}";
        assert_eq!(
            parse(text).unwrap(),
            json!({"a": [1, 2], "b": "// no, \" /* , */ ]"})
        );
        let refused = parse("{\n// x\n\"a\": [1 2]}").unwrap_err();
        assert_eq!(refused.line(), 3);
        assert!(parse("{\"a\": [,]}").is_ok(), "as lenient as it needs to be");
        assert!(parse("{\"a\": 1,,}").is_err());
    }
}
