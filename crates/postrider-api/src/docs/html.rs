//! HTML output: markup comes only from string constants of this program, everything else is
//! escaped.

/// An HTML fragment under construction.
#[derive(Default)]
pub struct HtmlBuffer(String);

impl HtmlBuffer {
    /// Appends markup. The text must be known at compile time, so that no later input can become
    /// markup.
    pub fn tag(&mut self, markup: &'static str) -> &mut HtmlBuffer {
        self.0.push_str(markup);
        self
    }

    /// Appends escaped text, also between the quotes of an attribute.
    pub fn text(&mut self, text: &str) -> &mut HtmlBuffer {
        for c in text.chars() {
            match c {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                c => self.0.push(c),
            }
        }
        self
    }

    pub fn code(&mut self, text: &str) -> &mut HtmlBuffer {
        self.tag("<code>").text(text).tag("</code>")
    }

    /// Appends one line of prose; text between backticks becomes code.
    pub fn prose(&mut self, text: &str) -> &mut HtmlBuffer {
        for (at, part) in text.split('`').enumerate() {
            match at % 2 {
                0 => self.text(part),
                _ => self.code(part),
            };
        }
        self
    }

    /// Appends paragraphs that are separated by empty lines.
    pub fn paragraphs(&mut self, text: &str) -> &mut HtmlBuffer {
        for paragraph in text.split("\n\n") {
            self.tag("<p>").prose(paragraph).tag("</p>\n");
        }
        self
    }

    pub fn heading(&mut self, level: u8, id: &str, text: &str) -> &mut HtmlBuffer {
        let (open, close) = match level {
            2 => ("<h2 id=\"", "</h2>\n"),
            3 => ("<h3 id=\"", "</h3>\n"),
            _ => ("<h4 id=\"", "</h4>\n"),
        };
        self.tag(open)
            .text(id)
            .tag("\"><a href=\"#")
            .text(id)
            .tag("\">")
            .prose(text)
            .tag("</a>")
            .tag(close)
    }

    /// Appends a sample that can be copied.
    pub fn sample(&mut self, text: &str) -> &mut HtmlBuffer {
        self.tag("<pre class=\"code\" tabindex=\"0\"><code>")
            .text(text)
            .tag("</code></pre>\n")
    }

    pub fn add(&mut self, other: &HtmlBuffer) -> &mut HtmlBuffer {
        self.0.push_str(&other.0);
        self
    }

    pub fn finish(self) -> String {
        self.0
    }
}

/// An element id made from a name.
pub fn slug(name: &str) -> String {
    let mut slug = String::new();
    for c in name.chars() {
        match c.to_ascii_lowercase() {
            c if c.is_ascii_alphanumeric() => slug.push(c),
            _ if slug.ends_with('-') || slug.is_empty() => {}
            _ => slug.push('-'),
        }
    }
    slug.truncate(slug.trim_end_matches('-').len());
    slug
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_text_becomes_markup() {
        let mut page = HtmlBuffer::default();
        let hostile = "<script>alert('1')</script>\"><img src=x onerror=alert(1)>`<b>`&";
        page.text(hostile)
            .prose(hostile)
            .paragraphs(hostile)
            .heading(2, hostile, hostile);
        page.code(hostile).sample(hostile);
        let page = page.finish();
        for markup in ["<script", "<img", "<b>", "\"><img", "onerror=alert(1)>"] {
            assert!(!page.contains(markup), "{markup} in {page}");
        }
        assert!(page.contains("<code>&lt;b&gt;</code>&amp;"), "{page}");
    }

    #[test]
    fn ids() {
        let check = |name: &str, expected: &str| assert_eq!(slug(name), expected, "{name}");
        check("Dead letters", "dead-letters");
        check("[[topic.subscription]]", "topic-subscription");
        check("profile_custom", "profile-custom");
        check("--", "");
    }
}
