//! `/postrider/v1/openapi.json`: our own API as programs read it. The file is the one source: the pages under `/docs`
//! are made of it, and a path under `/postrider` that it does not have does not exist.

#[cfg(test)]
mod tests;

use postrider_core::json::Raw;
use std::borrow::Cow;
use std::sync::LazyLock;

pub(crate) const TEXT: &str = include_str!("openapi.json");

/// In the order of the file, which serde's maps would not keep.
pub(crate) static DOCUMENT: LazyLock<Raw<'static>> =
    LazyLock::new(|| Raw::parse(TEXT).expect("a test reads the same file"));

/// The paths under `/postrider`, in parts.
static PATHS: LazyLock<Vec<Vec<&'static str>>> = LazyLock::new(|| {
    let paths = at(*DOCUMENT, "paths").members();
    paths
        .filter_map(|path| path.name.strip_prefix("/postrider/"))
        .map(|path| path.split('/').collect())
        .collect()
});

/// Whether there is such a path under `/postrider`.
pub(crate) fn has(path: &[&str]) -> bool {
    PATHS.iter().any(|known| {
        let mut pairs = known.iter().zip(path);
        known.len() == path.len() && pairs.all(|(known, part)| known.starts_with('{') || known == part)
    })
}

/// An operation, and where it is.
pub(crate) struct Operation {
    pub method: String,
    pub path: &'static str,
    pub told: Raw<'static>,
}

/// In the order of the file.
pub(crate) fn operations() -> Vec<Operation> {
    let paths = at(*DOCUMENT, "paths").members();
    let all = paths.flat_map(|path| {
        path.value.members().map(move |method| Operation {
            method: method.name.to_ascii_uppercase(),
            path: path.name,
            told: method.value,
        })
    });
    all.collect()
}

/// What a reference stands for; anything else stands for itself.
pub(crate) fn resolved(value: Raw<'static>) -> Raw<'static> {
    match text(value, "$ref") {
        Some(to) => to.trim_start_matches("#/").split('/').fold(*DOCUMENT, at),
        None => value,
    }
}

/// A member; null if there is none.
pub(crate) fn at(value: Raw<'static>, name: &str) -> Raw<'static> {
    value.get(name).unwrap_or(Raw::trusted("null"))
}

pub(crate) fn text(value: Raw<'static>, name: &str) -> Option<Cow<'static, str>> {
    value.get(name)?.as_str()
}
