//! Connection strings, as Azure hands them out: `Name=value;Name=value`.

/// The value of one part, such as `EntityPath`; none if it is missing or empty.
pub fn part<'a>(connection: &'a str, name: &str) -> Option<&'a str> {
    let mut parts = connection.split(';').filter_map(|part| part.split_once('='));
    let (_, value) = parts.find(|(n, _)| n.trim().eq_ignore_ascii_case(name))?;
    Some(value.trim()).filter(|value| !value.is_empty())
}
