//! The portal: files for a browser, embedded in the binary. They need no build step and load
//! nothing from other hosts.

/// A file of the portal.
#[derive(Clone, Copy, Debug)]
pub struct PortalFile {
    /// Path below `/portal/`.
    pub path: &'static str,
    pub content_type: &'static str,
    pub bytes: &'static [u8],
}

macro_rules! files {
    ($($path:literal: $content_type:expr,)*) => {
        &[$(PortalFile {
            path: $path,
            content_type: $content_type,
            bytes: include_bytes!(concat!("../static/", $path)),
        },)*]
    };
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// All files, sorted by path.
pub const FILES: &[PortalFile] = files! {
    "docs/docs.css": "text/css; charset=utf-8",
    "docs/docs.js": SCRIPT,
    "icon.svg": "image/svg+xml",
    "index.html": "text/html; charset=utf-8",
    "js/api.js": SCRIPT,
    "js/app.js": SCRIPT,
    "js/charts.js": SCRIPT,
    "js/dom.js": SCRIPT,
    "js/filter.js": SCRIPT,
    "js/form.js": SCRIPT,
    "js/format.js": SCRIPT,
    "js/ids.js": SCRIPT,
    "js/pages/about.js": SCRIPT,
    "js/pages/audit.js": SCRIPT,
    "js/pages/cluster.js": SCRIPT,
    "js/pages/dead-letter.js": SCRIPT,
    "js/pages/dead-letters.js": SCRIPT,
    "js/pages/endpoints.js": SCRIPT,
    "js/pages/event.js": SCRIPT,
    "js/pages/events.js": SCRIPT,
    "js/pages/find.js": SCRIPT,
    "js/pages/handshake.js": SCRIPT,
    "js/pages/handshakes.js": SCRIPT,
    "js/pages/lab.js": SCRIPT,
    "js/pages/live.js": SCRIPT,
    "js/pages/overview.js": SCRIPT,
    "js/pages/replays.js": SCRIPT,
    "js/pages/send.js": SCRIPT,
    "js/pages/sign-in.js": SCRIPT,
    "js/pages/subscription-form.js": SCRIPT,
    "js/pages/subscription.js": SCRIPT,
    "js/pages/subscriptions.js": SCRIPT,
    "js/pages/topic-form.js": SCRIPT,
    "js/pages/topic.js": SCRIPT,
    "js/pages/topics.js": SCRIPT,
    "js/shared.js": SCRIPT,
    "js/theme.js": SCRIPT,
    "js/ui.js": SCRIPT,
    "style.css": "text/css; charset=utf-8",
};

/// The page that every route of the portal loads first.
pub const INDEX: &str = "index.html";

pub fn file(path: &str) -> Option<&'static PortalFile> {
    let at = FILES.binary_search_by_key(&path, |file| file.path).ok()?;
    FILES.get(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_file_is_in_it_and_found() {
        fn count(directory: &Path) -> usize {
            let entries = std::fs::read_dir(directory).expect("the portal's files are there");
            let paths = entries.map(|entry| entry.expect("readable").path());
            paths
                .map(|path| if path.is_dir() { count(&path) } else { 1 })
                .sum()
        }
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("static");
        assert_eq!(FILES.len(), count(&directory));
        for one in FILES {
            assert!(
                file(one.path).is_some_and(|found| found.path == one.path),
                "{}",
                one.path
            );
        }
        assert!(file("../Cargo.toml").is_none());
        assert!(file(INDEX).is_some());
    }
}
