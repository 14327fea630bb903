//! Durations as people write them: `5m`, `1h30m`, `200ms`, `0`, `never`.

use serde::de::{Deserializer, Error, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

pub use postrider_core::duration::{NEVER, parse, print};

const HOUR: u64 = 3600;

/// Like [`print()`], but a day is `24h`: schedules are documented in hours.
pub fn print_hours(duration: Duration) -> String {
    let hours = duration.as_secs() / HOUR;
    if duration == NEVER || hours == 0 {
        return print(duration);
    }
    let rest = duration - Duration::from_secs(hours * HOUR);
    match rest.as_millis() {
        0 => format!("{hours}h"),
        _ => format!("{hours}h{}", print(rest)),
    }
}

pub fn serialize<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&print(*duration))
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    from.deserialize_any(TextVisitor { read: parse })
}

/// Deserializes text that `read` parses, or the number zero.
struct TextVisitor<T> {
    read: fn(&str) -> Result<T, String>,
}

impl<T: From<Duration>> Visitor<'_> for TextVisitor<T> {
    type Value = T;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a duration such as \"30s\"")
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.read)(text).map_err(E::custom)
    }
    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        match number {
            0 => Ok(Duration::ZERO.into()),
            _ => Err(E::custom(format!("{number} needs a unit, such as \"{number}s\""))),
        }
    }
    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::custom(format!("{number} is not a duration"))),
        }
    }
}

/// A duration inside a list or a table.
#[derive(Serialize, Deserialize)]
#[serde(transparent)]
pub struct DurationItem(#[serde(with = "self")] pub Duration);

/// A duration that may be left out.
pub mod optional {
    use super::*;

    pub fn serialize<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        duration.map(DurationItem).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<DurationItem>::deserialize(from)?.map(|DurationItem(duration)| duration))
    }
}

/// A list of durations that may be left out.
pub mod optional_list {
    use super::*;

    pub fn serialize<S: Serializer>(list: &Option<Vec<Duration>>, to: S) -> Result<S::Ok, S::Error> {
        let items = |list: &Vec<Duration>| list.iter().copied().map(DurationItem).collect::<Vec<_>>();
        list.as_ref().map(items).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<Duration>>, D::Error> {
        let list = Option::<Vec<DurationItem>>::deserialize(from)?;
        Ok(list.map(|list| list.into_iter().map(|DurationItem(duration)| duration).collect()))
    }
}

/// A duration or `"off"`, for a key that may be left out.
pub mod optional_or_off {
    use super::super::custom::OrOff;
    use super::*;

    struct DurationOrOff(OrOff<Duration>);

    impl<'de> Deserialize<'de> for DurationOrOff {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<DurationOrOff, D::Error> {
            let read = |text: &str| match text.trim() {
                "off" => Ok(OrOff::Off),
                text => parse(text)
                    .map(OrOff::On)
                    .map_err(|reason| format!("{reason}, nor \"off\"")),
            };
            from.deserialize_any(TextVisitor { read }).map(DurationOrOff)
        }
    }

    pub fn serialize<S: Serializer>(given: &Option<OrOff<Duration>>, to: S) -> Result<S::Ok, S::Error> {
        let item = |given: OrOff<Duration>| match given {
            OrOff::Off => OrOff::Off,
            OrOff::On(duration) => OrOff::On(DurationItem(duration)),
        };
        given.map(item).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<OrOff<Duration>>, D::Error> {
        Ok(Option::<DurationOrOff>::deserialize(from)?.map(|DurationOrOff(given)| given))
    }
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
        assert_eq!(print_hours(Duration::from_secs(125_200)), "34h46m40s");
        assert_eq!(print_hours(Duration::from_secs(86_400)), "24h");
        assert_eq!(print_hours(Duration::from_millis(200)), "200ms");
        assert_eq!(print_hours(NEVER), "never");
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
