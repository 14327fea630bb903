//! Durations as people write them: `5m`, `1h30m`, `200ms`, `0`, `never`.

use serde::de::{Deserializer, Error, Visitor};
use serde::ser::Serializer;
use std::fmt;
use std::time::Duration;

/// What `never` means: longer than any time can be added to.
pub const NEVER: Duration = Duration::MAX;

const UNITS: [(&str, u64); 5] = [
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1_000),
    ("ms", 1),
];

pub fn parse(text: &str) -> Result<Duration, String> {
    let refused = || format!("\"{text}\" is not a duration such as \"30s\", \"1h30m\" or \"never\"");
    match text.trim() {
        "never" => return Ok(NEVER),
        "0" => return Ok(Duration::ZERO),
        "" => return Err(refused()),
        _ => {}
    }
    let mut millis: u64 = 0;
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (number, after) = rest.split_at(digits(rest));
        let (unit, after) = after.split_at(
            after
                .find(|c: char| !c.is_ascii_lowercase())
                .unwrap_or(after.len()),
        );
        let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(refused)?;
        millis = number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(*scale))
            .and_then(|part| millis.checked_add(part))
            .ok_or_else(refused)?;
        rest = after;
    }
    Ok(Duration::from_millis(millis))
}

fn digits(text: &str) -> usize {
    text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())
}

/// The shortest text that [`parse`] reads back as the same duration, to the millisecond.
pub fn print(duration: Duration) -> String {
    if duration == NEVER {
        return "never".into();
    }
    let mut millis = duration.as_millis();
    let mut text = String::new();
    for (unit, scale) in UNITS {
        let count = millis / u128::from(scale);
        millis %= u128::from(scale);
        if count > 0 {
            text.push_str(&format!("{count}{unit}"));
        }
    }
    if text.is_empty() { "0s".into() } else { text }
}

pub fn serialize<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&print(*duration))
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    struct Written;
    impl Visitor<'_> for Written {
        type Value = Duration;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a duration such as \"30s\"")
        }
        fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
            parse(text).map_err(E::custom)
        }
        fn visit_u64<E: Error>(self, number: u64) -> Result<Duration, E> {
            match number {
                0 => Ok(Duration::ZERO),
                _ => Err(E::custom(format!("{number} needs a unit, such as \"{number}s\""))),
            }
        }
        fn visit_i64<E: Error>(self, number: i64) -> Result<Duration, E> {
            match u64::try_from(number) {
                Ok(number) => self.visit_u64(number),
                Err(_) => Err(E::custom(format!("{number} is not a duration"))),
            }
        }
    }
    from.deserialize_any(Written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_prints() {
        let check = |text: &str, millis: u64, printed: &str| {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
            assert_eq!(print(Duration::from_millis(millis)), printed, "{text}");
        };
        check("5m", 300_000, "5m");
        check("4h", 14_400_000, "4h");
        check("30s", 30_000, "30s");
        check("200ms", 200, "200ms");
        check("1h30m", 5_400_000, "1h30m");
        check("90s", 90_000, "1m30s");
        check("1d", 86_400_000, "1d");
        check("0", 0, "0s");
        check("0s", 0, "0s");
        assert_eq!(parse("never"), Ok(NEVER));
        assert_eq!(print(NEVER), "never");
    }

    #[test]
    fn refuses_what_it_cannot_be_sure_of() {
        for text in [
            "",
            "5",
            "m",
            "5x",
            "1.5h",
            "-1s",
            "5 m",
            "5M",
            "99999999999999999999s",
            "ms5",
        ] {
            assert!(parse(text).is_err_and(|reason| reason.contains(text)), "{text}");
        }
    }
}
