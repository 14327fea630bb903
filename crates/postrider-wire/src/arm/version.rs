//! `api-version`: a date, and whether the version is a preview.

use std::fmt;

/// A version of the management API. Every date is accepted; the content of answers depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiVersion {
    text: String,
    /// `20220615`
    date: u32,
    preview: bool,
}

impl ApiVersion {
    /// Parses `2022-06-15` or `2021-10-15-preview`; none for anything else.
    pub fn parse(text: &str) -> Option<ApiVersion> {
        let (date, preview) = match text.get(10..) {
            Some("") => (text, false),
            Some(rest) if rest.eq_ignore_ascii_case("-preview") => (&text[..10], true),
            _ => return None,
        };
        let dashes = date.bytes().enumerate();
        let well_formed = dashes.into_iter().all(|(at, byte)| {
            matches!(at, 4 | 7) == (byte == b'-') && (byte == b'-' || byte.is_ascii_digit())
        });
        if !well_formed {
            return None;
        }
        let date = date.replace('-', "").parse().ok()?;
        let (month, day) = (date / 100 % 100, date % 100);
        ((1..=12).contains(&month) && (1..=31).contains(&day)).then(|| ApiVersion {
            text: text.to_owned(),
            date,
            preview,
        })
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether topics have `sku`, `kind` and `extendedLocation`, which only previews do.
    pub fn has_sku(&self) -> bool {
        self.preview && self.date >= 20_200_401
    }

    pub fn has_data_residency(&self) -> bool {
        self.date >= 20_211_015
    }

    pub fn has_local_auth(&self) -> bool {
        self.date >= 20_210_601
    }

    /// Whether topics have `minimumTlsVersionAllowed` and `eventTypeInfo`.
    pub fn has_minimum_tls(&self) -> bool {
        self.date >= 20_230_601
    }
}

impl fmt::Display for ApiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_with_or_without_preview() {
        let check = |text: &str, expected: Option<(u32, bool)>| {
            let read = ApiVersion::parse(text).map(|version| (version.date, version.preview));
            assert_eq!(read, expected, "{text}");
        };
        check("2022-06-15", Some((20_220_615, false)));
        check("2021-10-15-preview", Some((20_211_015, true)));
        check("2021-10-15-PREVIEW", Some((20_211_015, true)));
        for wrong in [
            "",
            "2022",
            "2022-13-01",
            "2022-06-00",
            "2022-06-15-",
            "2022-06-15-beta",
            "20220-6-15",
            "2022-06-1é",
            "2022/06/15",
            "-022-06-15",
        ] {
            check(wrong, None);
        }
    }
}
