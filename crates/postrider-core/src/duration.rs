//! Durations in configuration files and on the command line: `5m`, `1h30m`, `200ms`, `0`, `never`.

use std::time::Duration;

/// The value of `never`: longer than anything it may be added to.
pub const NEVER: Duration = Duration::MAX;

const UNITS: [(&str, u64); 5] = [
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1_000),
    ("ms", 1),
];

/// Parses a duration; the error says what is wrong, for people.
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
