//! Paths taken apart.

use crate::http::decoded;
use hyper::Method;
use std::borrow::Cow;

/// The parts of a path between slashes; empty ones do not count.
pub(crate) struct PathSegments<'p> {
    parts: [&'p str; PathSegments::MAX],
    /// May be greater than `MAX`: no route outside of the management API is that long.
    len: usize,
}

impl<'p> PathSegments<'p> {
    pub const MAX: usize = 6;

    pub fn of(path: &'p str) -> PathSegments<'p> {
        let mut segments = PathSegments {
            parts: [""; PathSegments::MAX],
            len: 0,
        };
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if let Some(slot) = segments.parts.get_mut(segments.len) {
                *slot = part;
            }
            segments.len += 1;
        }
        segments
    }

    pub fn count(&self) -> usize {
        self.len
    }

    /// Empty beyond the last one.
    pub fn get(&self, at: usize) -> &'p str {
        self.parts.get(at).copied().unwrap_or("")
    }

    /// All segments, unless there are more than a route can have.
    pub fn all(&self) -> Option<&[&'p str]> {
        self.parts.get(..self.len)
    }
}

/// Path of the management API, percent-encoded. It is taken apart only where that is needed, and
/// after the caller is known: its resource ids may have very many segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ManagementPath<'p>(&'p str);

/// POST actions that change nothing.
const READING_ACTIONS: [&str; 3] = ["listKeys", "getFullUrl", "getDeliveryAttributes"];

impl<'p> ManagementPath<'p> {
    /// None: the path is of another API.
    pub fn of(path: &'p str) -> Option<ManagementPath<'p>> {
        // Only the beginning is looked at, because every unknown path comes here.
        let first = path.split('/').find(|part| !part.is_empty()).unwrap_or_default();
        let first = decoded(first);
        let first = first.split('/').find(|part| !part.is_empty()).unwrap_or_default();
        ["subscriptions", "providers", "tenants"]
            .iter()
            .any(|word| first.eq_ignore_ascii_case(word))
            .then_some(ManagementPath(path))
    }

    /// Without percent escapes. Some clients escape the slashes of a resource id inside a path; no
    /// name has one.
    pub fn decoded(self) -> Cow<'p, str> {
        decoded(self.0)
    }

    pub fn segments(self) -> Vec<String> {
        let path = self.decoded();
        let parts = path.split('/').filter(|part| !part.is_empty());
        parts.map(str::to_owned).collect()
    }

    /// Whether a POST only asks, as for keys.
    pub fn reads_by_post(self, method: &Method) -> bool {
        let path = self.decoded();
        let action = path.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
        *method == Method::POST
            && READING_ACTIONS
                .iter()
                .any(|known| known.eq_ignore_ascii_case(action))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_the_management_api() {
        for good in [
            "/subscriptions",
            "//Subscriptions/x",
            "/providers/a",
            "/tenants",
            "/%2Fsubscriptions%2Fx/providers",
        ] {
            assert!(ManagementPath::of(good).is_some(), "{good}");
        }
        for other in [
            "/",
            "",
            "/topics/subscriptions",
            "/subscription",
            "/x%2Fsubscriptions",
        ] {
            assert!(ManagementPath::of(other).is_none(), "{other}");
        }
        let path = ManagementPath::of("/%2Fsubscriptions%2Fs/resourceGroups//My%20group/").unwrap();
        assert_eq!(
            path.segments(),
            ["subscriptions", "s", "resourceGroups", "My group"]
        );
        for (path, expected) in [
            ("/subscriptions/s/topics/t/LISTKEYS/", true),
            ("/subscriptions/s/topics/t/regenerateKey", false),
        ] {
            let path = ManagementPath::of(path).unwrap();
            assert_eq!(path.reads_by_post(&Method::POST), expected);
            assert!(!path.reads_by_post(&Method::PUT));
        }
    }
}
