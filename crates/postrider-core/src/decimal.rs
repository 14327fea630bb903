//! Exact decimal numbers, as JSON writes them.
//!
//! Filters compare the numbers of events with the numbers of subscriptions. Binary floats would
//! treat 9007199254740993 and 9007199254740992 as equal; decimals do not, at any length and with
//! any exponent.

use std::cmp::Ordering;
use std::fmt;

/// A decimal number: equal and ordered by value, so 1, 1.0 and 10e-1 are one number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Decimal {
    negative: bool,
    /// ASCII digits without zeros at either end; none for zero.
    digits: Box<[u8]>,
    /// The value is 0.DIGITS × 10^magnitude; zero for zero.
    magnitude: i64,
}

/// Larger exponents are treated as this one. Such numbers only ever compare with each other.
const EXPONENT_MAX: i64 = 1 << 60;

impl Decimal {
    /// Reads the text of a JSON number and nothing else: no white space, no sign `+`, no `.5`.
    pub fn parse(text: &str) -> Option<Decimal> {
        let DecimalParts {
            negative,
            whole,
            fraction,
            magnitude,
        } = DecimalParts::read(text)?;
        Some(Decimal {
            negative,
            digits: [whole, fraction].concat().into(),
            magnitude,
        })
    }

    fn parts(&self) -> DecimalParts<'_> {
        DecimalParts {
            negative: self.negative,
            whole: &self.digits,
            fraction: &[],
            magnitude: self.magnitude,
        }
    }
}

/// Compares the text of a JSON number with a decimal without allocating; none if it is not a
/// number.
pub fn compare(text: &str, to: &Decimal) -> Option<Ordering> {
    Some(DecimalParts::read(text)?.compare(&to.parts()))
}

/// A parsed number that borrows its text; the digits are `whole` followed by `fraction`.
struct DecimalParts<'a> {
    negative: bool,
    whole: &'a [u8],
    fraction: &'a [u8],
    magnitude: i64,
}

impl<'a> DecimalParts<'a> {
    fn read(text: &'a str) -> Option<DecimalParts<'a>> {
        let bytes = text.as_bytes();
        let (negative, bytes) = match bytes.strip_prefix(b"-") {
            Some(rest) => (true, rest),
            None => (false, bytes),
        };
        let (mut whole, rest) = digits(bytes);
        if whole.is_empty() || (whole[0] == b'0' && whole.len() > 1) {
            return None;
        }
        let (mut fraction, rest) = match rest.strip_prefix(b".") {
            Some(rest) => {
                let (fraction, rest) = digits(rest);
                (!fraction.is_empty()).then_some((fraction, rest))?
            }
            None => (&[][..], rest),
        };
        let exponent = match rest {
            [] => 0,
            [b'e' | b'E', rest @ ..] => read_exponent(rest)?,
            _ => return None,
        };

        whole = skip_zeros(whole);
        let mut magnitude = exponent + whole.len() as i64;
        if whole.is_empty() {
            let significant = skip_zeros(fraction);
            magnitude -= (fraction.len() - significant.len()) as i64;
            fraction = significant;
        }
        fraction = drop_zeros(fraction);
        if fraction.is_empty() {
            whole = drop_zeros(whole);
        }
        if whole.is_empty() && fraction.is_empty() {
            return Some(DecimalParts {
                negative: false,
                whole,
                fraction,
                magnitude: 0,
            });
        }
        Some(DecimalParts {
            negative,
            whole,
            fraction,
            magnitude,
        })
    }

    fn is_zero(&self) -> bool {
        self.whole.is_empty() && self.fraction.is_empty()
    }

    fn compare(&self, other: &DecimalParts<'_>) -> Ordering {
        let sign = |parts: &DecimalParts<'_>| match (parts.is_zero(), parts.negative) {
            (true, _) => 0,
            (false, true) => -1,
            (false, false) => 1,
        };
        let sizes = || {
            // Neither number has zeros at its ends, so of two with a common prefix the longer is
            // greater.
            let (a, b) = (
                self.whole.iter().chain(self.fraction),
                other.whole.iter().chain(other.fraction),
            );
            self.magnitude.cmp(&other.magnitude).then_with(|| a.cmp(b))
        };
        sign(self).cmp(&sign(other)).then_with(|| match sign(self) {
            0 => Ordering::Equal,
            1 => sizes(),
            _ => sizes().reverse(),
        })
    }
}

fn digits(bytes: &[u8]) -> (&[u8], &[u8]) {
    let end = bytes.iter().take_while(|b| b.is_ascii_digit()).count();
    bytes.split_at(end)
}

fn skip_zeros(digits: &[u8]) -> &[u8] {
    &digits[digits.iter().take_while(|b| **b == b'0').count()..]
}

fn drop_zeros(digits: &[u8]) -> &[u8] {
    &digits[..digits.len() - digits.iter().rev().take_while(|b| **b == b'0').count()]
}

/// Parses the text after the `e`: an optional sign and at least one digit.
fn read_exponent(bytes: &[u8]) -> Option<i64> {
    let (negative, bytes) = match bytes {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        rest => (false, rest),
    };
    if bytes.is_empty() || !bytes.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let size = bytes.iter().fold(0i64, |size, digit| {
        size.saturating_mul(10)
            .saturating_add(i64::from(digit - b'0'))
            .min(EXPONENT_MAX)
    });
    Some(if negative { -size } else { size })
}

impl Ord for Decimal {
    fn cmp(&self, other: &Decimal) -> Ordering {
        self.parts().compare(&other.parts())
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Decimal) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The number as JSON text: plain while that is short, with an exponent otherwise.
impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// More zeros than this are written as an exponent.
        const ZEROS_MAX: i64 = 20;
        let digits = std::str::from_utf8(&self.digits).expect("digits are ASCII");
        let length = digits.len() as i64;
        if digits.is_empty() {
            return f.write_str("0");
        }
        if self.negative {
            f.write_str("-")?;
        }
        if self.magnitude > length + ZEROS_MAX || self.magnitude < -ZEROS_MAX {
            let (first, rest) = digits.split_at(1);
            let point = if rest.is_empty() { "" } else { "." };
            return write!(f, "{first}{point}{rest}e{}", self.magnitude - 1);
        }
        if self.magnitude <= 0 {
            let zeros = self.magnitude.unsigned_abs() as usize;
            return write!(f, "0.{:0<zeros$}{digits}", "");
        }
        if self.magnitude >= length {
            let zeros = (self.magnitude - length) as usize;
            return write!(f, "{digits}{:0<zeros$}", "");
        }
        let (whole, fraction) = digits.split_at(self.magnitude as usize);
        write!(f, "{whole}.{fraction}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decimal(text: &str) -> Decimal {
        Decimal::parse(text).unwrap_or_else(|| panic!("{text}"))
    }

    #[test]
    fn only_json_numbers_are_numbers() {
        for bad in [
            "", "-", "+1", "01", "-01", "00", "1.", ".5", "1.e1", "1e", "1e+", "1e1.0", " 1", "1 ", "0x1",
            "NaN", "Infinity", "1_000", "--1", "1-", "\u{661}",
        ] {
            assert_eq!(Decimal::parse(bad), None, "{bad:?}");
            assert_eq!(compare(bad, &decimal("1")), None, "{bad:?}");
        }
    }

    #[test]
    fn numbers_are_ordered_by_value() {
        let check = |a: &str, expected: Ordering, b: &str| {
            assert_eq!(decimal(a).cmp(&decimal(b)), expected, "{a} {b}");
            assert_eq!(decimal(b).cmp(&decimal(a)), expected.reverse(), "{b} {a}");
            assert_eq!(compare(a, &decimal(b)), Some(expected), "{a} {b}");
            assert_eq!(decimal(a) == decimal(b), expected.is_eq(), "{a} {b}");
        };
        use Ordering::{Equal, Less};
        check("1", Equal, "1.0");
        check("1", Equal, "10e-1");
        check("100", Equal, "1E+2");
        check("0", Equal, "-0");
        check("0", Equal, "0e999999999999999999999");
        check("-0.0", Equal, "0.000e-5");
        check("0.1", Equal, "1e-1");
        check("0.001", Equal, "0.1e-2");
        check("9007199254740992", Less, "9007199254740993");
        check("0.3", Less, "0.30000000000000004");
        check("-1", Less, "0");
        check("-2", Less, "-1");
        check("-1", Less, "-0.5");
        check("9", Less, "10");
        check("99", Less, "100.01");
        check("0.09", Less, "0.1");
        check("1e400", Less, "2e400");
        check("1e400", Less, "1.1e400");
        check("-1e400", Less, "1e-400");
        check("1e-400", Less, "1e-399");
        check("0", Less, "1e-999999999999999999999999");
        check("1e308", Less, "1e999999999999999999999999");
        check("1e999999999999999999999999", Less, "2e999999999999999999999999");
    }

    #[test]
    fn prints_a_plain_number() {
        let check = |text: &str, expected: &str| {
            let number = decimal(text);
            assert_eq!(number.to_string(), expected);
            assert_eq!(decimal(&number.to_string()), number);
        };
        check("-0", "0");
        check("1.50", "1.5");
        check("-12e3", "-12000");
        check("5e-3", "0.005");
        check("0.1", "0.1");
        check("123.456", "123.456");
        check("1e400", "1e400");
        check("-1.25e-400", "-1.25e-400");
        check("9007199254740993", "9007199254740993");
    }

    /// `units` × 10^-`places`, with and without needless zeros.
    fn written(units: i64, places: usize, zeros: usize) -> String {
        let sign = if units < 0 { "-" } else { "" };
        let digits = format!("{:0>width$}", units.unsigned_abs(), width = places + 1);
        let (whole, fraction) = digits.split_at(digits.len() - places);
        match places + zeros {
            0 => format!("{sign}{whole}"),
            _ => format!("{sign}{whole}.{fraction}{:0<zeros$}", ""),
        }
    }

    proptest! {
        #[test]
        fn agrees_with_integers(a: i64, b: i64, p in 0usize..12, q in 0usize..12, zeros in 0usize..3) {
            let scaled = |units: i64, places: usize| i128::from(units) * 10i128.pow(12 - places as u32);
            let expected = scaled(a, p).cmp(&scaled(b, q));
            let (x, y) = (written(a, p, zeros), written(b, q, 0));
            prop_assert_eq!(decimal(&x).cmp(&decimal(&y)), expected, "{} {}", x, y);
            prop_assert_eq!(compare(&x, &decimal(&y)), Some(expected));
            // The same number with the point moved into the exponent.
            let moved = format!("{a}e-{p}");
            prop_assert_eq!(decimal(&moved), decimal(&x));
        }

        #[test]
        fn near_numbers_agree_with_integers(a in -50i64..50, b in -50i64..50, p in 0usize..3, q in 0usize..3) {
            let scaled = |units: i64, places: usize| units * 10i64.pow(3 - places as u32);
            let order = decimal(&written(a, p, 1)).cmp(&decimal(&written(b, q, 0)));
            prop_assert_eq!(order, scaled(a, p).cmp(&scaled(b, q)));
        }

        #[test]
        fn printing_keeps_the_value(units: i64, exponent in -450i64..450) {
            let number = decimal(&format!("{units}e{exponent}"));
            prop_assert_eq!(Decimal::parse(&number.to_string()), Some(number));
        }

        #[test]
        fn accepts_what_the_scanner_accepts(text in "-?[0-9]{0,3}(\\.[0-9]{0,3})?([eE][+-]?[0-9]{0,25})?") {
            let expected = crate::json::RawJson::parse(&text).is_ok();
            prop_assert_eq!(Decimal::parse(&text).is_some(), expected, "{}", text);
        }
    }
}
