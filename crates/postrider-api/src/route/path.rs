//! Paths taken apart.

use crate::http::decoded;
use hyper::Method;

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

/// Path of the management API. Its resource ids have many more segments than other paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ManagementPath {
    /// Decoded, in the casing that was sent.
    pub segments: Vec<String>,
    /// The same in lower case.
    pub lower: Vec<String>,
}

/// POST actions that change nothing.
const READING_ACTIONS: [&str; 3] = ["listkeys", "getfullurl", "getdeliveryattributes"];

impl ManagementPath {
    pub fn has(path: &str) -> bool {
        // Only the beginning is looked at, because every unknown path comes here.
        let first = path.split('/').find(|part| !part.is_empty()).unwrap_or_default();
        let first = decoded(first);
        let first = first.split('/').find(|part| !part.is_empty()).unwrap_or_default();
        ["subscriptions", "providers", "tenants"]
            .iter()
            .any(|word| first.eq_ignore_ascii_case(word))
    }

    /// Some clients escape the slashes of a resource id inside a path; no name has one.
    pub fn parse(path: &str) -> ManagementPath {
        let path = decoded(path);
        let parts = path.split('/').filter(|part| !part.is_empty());
        let segments: Vec<String> = parts.map(str::to_owned).collect();
        let lower = segments.iter().map(|part| part.to_lowercase()).collect();
        ManagementPath { segments, lower }
    }

    /// Whether a POST only asks, as for keys.
    pub fn reads_by_post(&self, method: &Method) -> bool {
        let action = self.lower.last().map(String::as_str).unwrap_or_default();
        *method == Method::POST && READING_ACTIONS.contains(&action)
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
            assert!(ManagementPath::has(good), "{good}");
        }
        for other in [
            "/",
            "",
            "/topics/subscriptions",
            "/subscription",
            "/x%2Fsubscriptions",
        ] {
            assert!(!ManagementPath::has(other), "{other}");
        }
        let path = ManagementPath::parse("/%2Fsubscriptions%2Fs/resourceGroups//My%20group/");
        assert_eq!(
            path.segments,
            ["subscriptions", "s", "resourceGroups", "My group"]
        );
        assert_eq!(path.lower, ["subscriptions", "s", "resourcegroups", "my group"]);
    }
}
