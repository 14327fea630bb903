//! `/docs`: documentation of this server for people. The pages are rendered completely by the
//! server and can be read without scripts.

mod html;
mod configuration;
mod profiles;
mod reference;
#[cfg(test)]
mod tests;

use crate::http::{Answer, ApiCall};
use crate::own_api::{Problem, nothing_here};
use crate::{Server, metrics, openapi, portal};
use bytes::Bytes;
pub(crate) use html::HtmlBuffer;
use hyper::Method;
use std::sync::{LazyLock, OnceLock};

/// Sent exactly as written.
const OVERVIEW: &str = include_str!("docs/overview.html");
const HTML: &str = "text/html; charset=utf-8";

/// A page without the frame around it.
struct DocPage {
    title: &'static str,
    lead: &'static str,
    /// Whether the page is long enough to need a search field.
    searchable: bool,
    body: HtmlBuffer,
    /// Links to the page's sections, grouped under titles.
    menu: Vec<(String, Vec<SectionLink>)>,
}

/// A link to a section of the same page.
struct SectionLink {
    id: String,
    text: String,
}

impl SectionLink {
    fn here(id: &str, text: &str) -> SectionLink {
        SectionLink {
            id: id.to_owned(),
            text: text.to_owned(),
        }
    }
}

const PAGES: [(&str, &str); 5] = [
    ("/docs", "Overview"),
    ("/docs/api", "API reference"),
    ("/docs/configuration", "Configuration"),
    ("/docs/profiles", "Profiles"),
    ("/docs/metrics", "Metrics"),
];

/// Pages whose content does not depend on the server.
static API: LazyLock<Bytes> = LazyLock::new(|| framed("/docs/api", reference::page()));
static PROFILES: LazyLock<Bytes> = LazyLock::new(|| framed("/docs/profiles", profiles::page()));
static START: LazyLock<Bytes> = LazyLock::new(|| framed("/docs", overview()));

/// Pages that depend only on how the server was started. Anyone may request them, so each is
/// rendered only once.
#[derive(Default)]
pub(crate) struct CachedDocPages {
    configuration: OnceLock<Bytes>,
    metrics: OnceLock<Bytes>,
}

pub(crate) fn answer(server: &Server, call: &ApiCall) -> Answer {
    let outcome = page(server, call);
    portal::guarded(outcome.unwrap_or_else(|problem| problem.answer(&call.id)))
}

fn page(server: &Server, call: &ApiCall) -> Result<Answer, Problem> {
    let bytes = match call.uri.path().trim_end_matches('/') {
        "/docs" => START.clone(),
        "/docs/api" => API.clone(),
        "/docs/profiles" => PROFILES.clone(),
        "/docs/configuration" => {
            let make = || framed("/docs/configuration", configuration::page(server.configuration));
            server.pages.configuration.get_or_init(make).clone()
        }
        "/docs/metrics" => {
            let make = || framed("/docs/metrics", metrics_page(server));
            server.pages.metrics.get_or_init(make).clone()
        }
        _ => return Err(nothing_here(call)),
    };
    match call.method {
        Method::GET | Method::HEAD => Ok(portal::content(call, HTML, bytes)),
        _ => Err(Problem::method("GET, HEAD")),
    }
}

/// `/postrider/v1/openapi.json`
pub(crate) fn description(call: &ApiCall) -> Answer {
    let bytes = Bytes::from_static(openapi::TEXT.as_bytes());
    portal::content(call, "application/json; charset=utf-8", bytes)
}

fn overview() -> DocPage {
    let mut body = HtmlBuffer::default();
    body.tag(OVERVIEW);
    let mut links = Vec::new();
    // Every section of the overview has an id and a title.
    for section in OVERVIEW.split("<h2 id=\"").skip(1) {
        let (id, rest) = section.split_once('"').unwrap_or_default();
        let title = rest
            .split_once("\">")
            .and_then(|(_, rest)| rest.split_once("</a>"));
        links.push(SectionLink::here(id, title.unwrap_or_default().0));
    }
    DocPage {
        title: "What this server speaks",
        lead: "Postrider takes events in, writes them down, and delivers them until they arrive or are set aside. \
               It speaks the APIs of Azure Event Grid, and one of its own.",
        searchable: false,
        body,
        menu: vec![("On this page".to_owned(), links)],
    }
}

/// The metric families of `/metrics`, without values.
fn metrics_page(server: &Server) -> DocPage {
    let mut body = HtmlBuffer::default();
    body.tag("<section class=\"panel\">\n<table class=\"members\"><thead><tr><th scope=\"col\">Name</th>");
    body.tag("<th scope=\"col\">Type</th><th scope=\"col\">Meaning</th></tr></thead>\n<tbody>\n");
    let cluster = server.cluster.as_ref().map(|view| view.now());
    let text = metrics::families(server, cluster.as_ref());
    let (mut name, mut help) = ("", "");
    for line in text.lines() {
        if let Some(said) = line.strip_prefix("# HELP ") {
            (name, help) = said.split_once(' ').unwrap_or((said, ""));
        } else if let Some((of, kind)) = line.strip_prefix("# TYPE ").and_then(|said| said.split_once(' ')) {
            body.tag("<tr><th scope=\"row\">")
                .code(of)
                .tag("</th><td>")
                .text(kind)
                .tag("</td><td>");
            body.text(if of == name { help } else { "" }).tag("</td></tr>\n");
        }
    }
    body.tag("</tbody></table>\n</section>\n");
    DocPage {
        title: "Metrics",
        lead: "What Prometheus reads at `/metrics`. The repository has a Grafana dashboard and alert rules in `contrib`. \
               `GET /postrider/v1/stats` says the same as JSON.",
        searchable: true,
        body,
        menu: Vec::new(),
    }
}

/// Adds the frame that every page has, in the portal's style.
fn framed(path: &str, page: DocPage) -> Bytes {
    let mut out = HtmlBuffer::default();
    out.tag("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    out.tag("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    out.tag("<meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"referrer\" content=\"no-referrer\">\n");
    out.tag("<title>").text(page.title).tag(" · Postrider</title>\n");
    out.tag("<link rel=\"icon\" href=\"/portal/icon.svg\" type=\"image/svg+xml\">\n");
    out.tag("<link rel=\"stylesheet\" href=\"/portal/style.css\">\n");
    out.tag("<link rel=\"stylesheet\" href=\"/portal/docs/docs.css\">\n");
    out.tag("<script src=\"/portal/js/theme.js\"></script>\n");
    out.tag("<script type=\"module\" src=\"/portal/docs/docs.js\"></script>\n</head>\n<body>\n");
    out.tag("<a class=\"skip\" href=\"#main\">Skip to content</a>\n<div class=\"frame docs\">\n");
    out.tag("<header class=\"topbar\">\n<a class=\"brand\" href=\"/docs\">")
        .tag(MARK)
        .tag("<span>Postrider</span></a>\n");
    out.tag("<div class=\"bar-end\" id=\"bar-end\"><a class=\"button small\" href=\"/portal\">Portal</a></div>\n</header>\n");
    out.tag("<nav id=\"menu\" class=\"menu\" aria-label=\"Documentation\">\n");
    out.tag("<div class=\"menu-group\"><p class=\"menu-title\" id=\"menu-pages\">Documentation</p>\n");
    out.tag("<ul aria-labelledby=\"menu-pages\">\n");
    for (to, name) in PAGES {
        out.tag("<li><a href=\"").text(to).tag("\"");
        out.tag(if to == path {
            " aria-current=\"page\">"
        } else {
            ">"
        })
        .text(name)
        .tag("</a></li>\n");
    }
    out.tag("</ul></div>\n");
    for (place, (title, links)) in page.menu.iter().enumerate() {
        let id = format!("menu-{place}");
        out.tag("<div class=\"menu-group\"><p class=\"menu-title\" id=\"")
            .text(&id)
            .tag("\">")
            .text(title)
            .tag("</p>\n");
        out.tag("<ul aria-labelledby=\"").text(&id).tag("\">\n");
        for link in links {
            out.tag("<li><a href=\"#")
                .text(&link.id)
                .tag("\">")
                .text(&link.text)
                .tag("</a></li>\n");
        }
        out.tag("</ul></div>\n");
    }
    out.tag("</nav>\n<main id=\"main\" tabindex=\"-1\">\n<header class=\"page-head\">\n<h1>")
        .text(page.title)
        .tag("</h1>\n");
    out.tag("<p class=\"note\">").prose(page.lead).tag("</p>\n");
    if page.searchable {
        // Searching needs a script, which inserts the search field here.
        out.tag("<div id=\"find\"></div>\n");
    }
    out.tag("</header>\n")
        .add(&page.body)
        .tag("</main>\n</div>\n</body>\n</html>\n");
    out.finish().into()
}

/// The postrider's horn, as the portal draws it.
const MARK: &str = "<svg viewBox=\"0 0 32 32\" class=\"mark\" aria-hidden=\"true\" focusable=\"false\">\
                    <circle cx=\"14.5\" cy=\"15\" r=\"6.2\"/><path d=\"M4.5 21.2H17c4.2 0 6.2-3.6 9.8-7.4\"/>\
                    <path d=\"M24.3 10.7l5.2 5.2\"/><path d=\"M4.5 19.4V23\"/></svg>";
