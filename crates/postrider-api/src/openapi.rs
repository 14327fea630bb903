//! `/postrider/v1/openapi.json`: the description of our own API for programs, and the single source
//! for it: the pages under `/docs` are generated from it, and a path under `/postrider` that it
//! lacks does not exist.

#[cfg(test)]
mod tests;

use postrider_core::json::RawJson;
use std::borrow::Cow;
use std::sync::LazyLock;

pub(crate) const TEXT: &str = include_str!("openapi.json");

/// The parsed description. Members keep the order of the file, which serde's maps would not
/// preserve.
pub(crate) static DOCUMENT: LazyLock<RawJson<'static>> =
    LazyLock::new(|| RawJson::parse(TEXT).expect("a test reads the same file"));

/// An operation of the description with its path.
pub(crate) struct DescribedOperation {
    pub method: String,
    pub path: &'static str,
    pub told: RawJson<'static>,
}

/// All operations, in the order of the file.
pub(crate) fn operations() -> Vec<DescribedOperation> {
    let paths = at(*DOCUMENT, "paths").members();
    let all = paths.flat_map(|path| {
        path.value.members().map(move |method| DescribedOperation {
            method: method.name.to_ascii_uppercase(),
            path: path.name,
            told: method.value,
        })
    });
    all.collect()
}

/// Resolves a `$ref`; any other value is returned unchanged.
pub(crate) fn resolved(value: RawJson<'static>) -> RawJson<'static> {
    match text(value, "$ref") {
        Some(to) => to.trim_start_matches("#/").split('/').fold(*DOCUMENT, at),
        None => value,
    }
}

/// A member of a value; null if absent.
pub(crate) fn at(value: RawJson<'static>, name: &str) -> RawJson<'static> {
    value.get(name).unwrap_or(RawJson::trusted("null"))
}

pub(crate) fn text(value: RawJson<'static>, name: &str) -> Option<Cow<'static, str>> {
    value.get(name)?.as_str()
}
