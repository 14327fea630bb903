//! Points in time, and the clock that is handed in.

use std::fmt;
use std::future::Future;
use std::ops::{Add, Sub};
use std::pin::Pin;
use std::time::Duration;

/// A point in time: nanoseconds since the Unix epoch, UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    pub const MIN: Timestamp = Timestamp(0);
    /// The last instant that fits into four-digit years and 64 bits of nanoseconds.
    pub const MAX: Timestamp = Timestamp(i64::MAX);

    pub const fn from_nanos(nanos: i64) -> Timestamp {
        Timestamp(nanos)
    }

    pub const fn from_secs(secs: i64) -> Timestamp {
        Timestamp(secs * 1_000_000_000)
    }

    pub const fn nanos(self) -> i64 {
        self.0
    }

    /// The time from `earlier` to this; zero if `earlier` is later.
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0).max(0) as u64)
    }

    /// Parses RFC 3339, with or without an offset (none means UTC), with `T` or a space.
    pub fn parse(text: &str) -> Option<Timestamp> {
        let text = text.trim();
        let at = text
            .parse::<jiff::Timestamp>()
            .ok()
            .or_else(|| text.replace(" +", "+").parse().ok())
            .or_else(|| {
                let civil: jiff::civil::DateTime = text.parse().ok()?;
                civil
                    .to_zoned(jiff::tz::TimeZone::UTC)
                    .ok()
                    .map(|z| z.timestamp())
            })?;
        i64::try_from(at.as_nanosecond()).ok().map(Timestamp)
    }

    /// Parses the date of an HTTP header. A date beyond the range becomes [`Timestamp::MAX`].
    pub fn parse_http_date(text: &str) -> Option<Timestamp> {
        let Ok(zoned) = jiff::fmt::rfc2822::parse(text) else {
            // The last day of the year 9999, which some servers send for "never", is beyond jiff's
            // range.
            let never = jiff::fmt::strtime::parse("%a, %d %b 9999 %H:%M:%S GMT", text).is_ok();
            return never.then_some(Timestamp::MAX);
        };
        let nanos = zoned.timestamp().as_nanosecond();
        Some(Timestamp(nanos.clamp(0, i128::from(i64::MAX)) as i64))
    }

    /// Formatted for HTTP headers: `Sun, 06 Nov 1994 08:49:37 GMT`.
    pub fn http_date(self) -> String {
        let at = jiff::Timestamp::from_nanosecond(i128::from(self.0))
            .expect("64 bits of nanoseconds lie within jiff's range");
        at.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
    }

    /// The calendar fields in UTC.
    pub fn civil(self) -> CivilTime {
        let at = jiff::Timestamp::from_nanosecond(i128::from(self.0))
            .expect("64 bits of nanoseconds lie within jiff's range");
        let z = jiff::tz::Offset::UTC.to_datetime(at);
        CivilTime {
            year: z.year(),
            month: z.month() as u8,
            day: z.day() as u8,
            hour: z.hour() as u8,
            minute: z.minute() as u8,
            second: z.second() as u8,
            nanos: z.subsec_nanosecond() as u32,
        }
    }
}

/// The calendar fields of a timestamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CivilTime {
    pub year: i16,
    pub month: u8,
    pub day: u8,
    pub hour: u8,
    pub minute: u8,
    pub second: u8,
    pub nanos: u32,
}

/// ISO 8601 in UTC with seven fractional digits, as Event Grid writes times.
impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = self.civil();
        write!(
            f,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:07}Z",
            c.year,
            c.month,
            c.day,
            c.hour,
            c.minute,
            c.second,
            c.nanos / 100
        )
    }
}

impl Add<Duration> for Timestamp {
    type Output = Timestamp;
    fn add(self, by: Duration) -> Timestamp {
        let by = i64::try_from(by.as_nanos()).unwrap_or(i64::MAX);
        Timestamp(self.0.saturating_add(by))
    }
}

impl Sub<Duration> for Timestamp {
    type Output = Timestamp;
    /// Saturates at the first instant.
    fn sub(self, by: Duration) -> Timestamp {
        let by = i64::try_from(by.as_nanos()).unwrap_or(i64::MAX);
        let first = Timestamp::MIN.0.min(self.0);
        Timestamp(self.0.saturating_sub(by).max(first))
    }
}

/// A boxed future that completes at a point in time.
pub type Sleep<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// The source of time. Only implementations of this read the machine's clock.
pub trait Clock: Send + Sync {
    fn now(&self) -> Timestamp;
    /// Completes once `now() >= deadline`.
    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_clients_write_and_prints_seven_digits() {
        let check = |text: &str, expected: &str| {
            let at = Timestamp::parse(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(at.to_string(), expected, "{text}");
        };
        check("2020-08-13T17:18:13.1647262Z", "2020-08-13T17:18:13.1647262Z");
        check("2030-01-02T13:04:05+05:30", "2030-01-02T07:34:05.0000000Z");
        check("2030-01-02 03:04:05+00:00", "2030-01-02T03:04:05.0000000Z");
        check("2030-01-02 03:04:05 +00:00", "2030-01-02T03:04:05.0000000Z");
        check("2023-01-02T03:04:05.678901", "2023-01-02T03:04:05.6789010Z");
        let date = Timestamp::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        assert_eq!(date.to_string(), "1994-11-06T08:49:37.0000000Z");
        assert_eq!(date.http_date(), "Sun, 06 Nov 1994 08:49:37 GMT");
        let far = Timestamp::parse_http_date("Fri, 31 Dec 9999 23:59:59 GMT");
        assert_eq!(far, Some(Timestamp::MAX));
        for bad in ["", "yesterday", "2020-13-01T00:00:00Z", "12"] {
            assert_eq!(Timestamp::parse(bad), None, "{bad}");
        }
    }
}
