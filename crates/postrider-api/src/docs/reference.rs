//! `/docs/api`: the reference of our own API, generated from its OpenAPI description.

use super::html::{HtmlBuffer, slug};
use super::{DocPage, SectionLink};
use crate::openapi::{DOCUMENT, DescribedOperation, at, operations, resolved, text};
use postrider_core::json::{JsonKind, RawJson};
use std::fmt::Write;

/// Address in the examples; a script replaces it with the address that the page came from.
pub const ORIGIN: &str = "http://127.0.0.1:5888";
/// JSON that is wider than this is broken into lines.
const WIDTH: usize = 88;

pub fn page() -> DocPage {
    let document = *DOCUMENT;
    let all = operations();
    let mut body = HtmlBuffer::default();
    let info = at(document, "info");
    body.tag("<div class=\"panel\">\n");
    if let Some(description) = text(info, "description") {
        body.paragraphs(&description);
    }
    body.tag(
        "<p>The same for programs: <a href=\"/postrider/v1/openapi.json\">openapi.json</a>.</p>\n</div>\n",
    );
    body.tag("<section class=\"panel\">\n")
        .heading(2, "credentials", "Credentials");
    body.tag("<dl class=\"facts\">\n");
    for scheme in at(at(document, "components"), "securitySchemes").members() {
        body.tag("<div><dt>").code(scheme.name).tag("</dt><dd>");
        body.prose(&text(scheme.value, "description").unwrap_or_default());
        body.tag("</dd></div>\n");
    }
    body.tag("</dl>\n</section>\n");

    let mut menu = vec![(
        "Reference".to_owned(),
        vec![SectionLink::here("credentials", "Credentials")],
    )];
    for tag in at(document, "tags").elements() {
        let name = text(tag, "name").unwrap_or_default();
        body.heading(2, &slug(&name), &name);
        if let Some(description) = text(tag, "description") {
            body.tag("<p class=\"note\">").prose(&description).tag("</p>\n");
        }
        let mut links = Vec::new();
        for one in all.iter().filter(|one| of_tag(one, &name)) {
            operation(&mut body, one);
            links.push(SectionLink::here(
                &id(one),
                &text(one.told, "summary").unwrap_or_default(),
            ));
        }
        menu.push((name.into_owned(), links));
    }

    body.heading(2, "schemas", "Schemas");
    let mut links = Vec::new();
    for schema in at(at(document, "components"), "schemas").members() {
        let id = schema_id(schema.name);
        body.tag("<section class=\"panel\">\n")
            .heading(3, &id, schema.name);
        shape(&mut body, schema.value);
        body.tag("</section>\n");
        links.push(SectionLink::here(&id, schema.name));
    }
    menu.push(("Schemas".to_owned(), links));
    DocPage {
        title: "API reference",
        lead: "Postrider's own API: what became of events, how everything is, and what to do about it.",
        searchable: true,
        body,
        menu,
    }
}

fn of_tag(operation: &DescribedOperation, tag: &str) -> bool {
    let mut tags = at(operation.told, "tags").elements();
    tags.any(|one| one.as_str().is_some_and(|one| one == tag))
}

fn id(operation: &DescribedOperation) -> String {
    text(operation.told, "operationId")
        .unwrap_or_default()
        .into_owned()
}

fn schema_id(name: &str) -> String {
    format!("schema-{name}")
}

fn operation(out: &mut HtmlBuffer, operation: &DescribedOperation) {
    let told = operation.told;
    out.tag("<section class=\"panel operation\">\n");
    out.heading(3, &id(operation), &text(told, "summary").unwrap_or_default());
    out.tag("<p class=\"route\"><span class=\"method ")
        .text(&operation.method.to_lowercase())
        .tag("\">")
        .text(&operation.method)
        .tag("</span> ")
        .code(operation.path)
        .tag("</p>\n");
    if let Some(description) = text(told, "description") {
        out.paragraphs(&description);
    }
    out.tag("<p class=\"needs\">")
        .prose(needs(&text(told, "x-needs").unwrap_or_default()))
        .tag("</p>\n");
    parameters(out, at(told, "parameters"));
    let content = at(at(told, "requestBody"), "content").members().next();
    if let Some(content) = content {
        out.tag("<h4>Body</h4>\n");
        shape(out, at(content.value, "schema"));
    }
    out.tag("<h4>Example</h4>\n").sample(&curl(operation));
    answers(out, at(told, "responses"), told.get("x-data"));
    out.tag("</section>\n");
}

fn needs(what: &str) -> &'static str {
    match what {
        "nothing" => "Needs no credential.",
        "loopback" => {
            "Needs no credential while only this machine can reach the server; otherwise a bearer token."
        }
        "session" => "Needs the session of a browser.",
        "write" => "Needs the role `owner` or `contributor`.",
        _ => "Needs the role `reader`, `contributor` or `owner`.",
    }
}

fn parameters(out: &mut HtmlBuffer, parameters: RawJson<'static>) {
    let mut all = parameters.elements().peekable();
    if all.peek().is_none() {
        return;
    }
    out.tag("<h4>Parameters</h4>\n<table class=\"members\"><thead><tr><th scope=\"col\">Name</th><th scope=\"col\">Type</th>");
    out.tag("<th scope=\"col\">Meaning</th></tr></thead>\n<tbody>\n");
    for one in all {
        let schema = at(one, "schema");
        out.tag("<tr><th scope=\"row\">")
            .code(&text(one, "name").unwrap_or_default());
        let place = text(one, "in").unwrap_or_default();
        let required = at(one, "required").as_bool() == Some(true);
        out.tag(" <span class=\"muted\">").text(&place);
        out.text(if required && place != "path" {
            ", required"
        } else {
            ""
        });
        out.tag("</span></th><td>");
        kind(out, schema);
        out.tag("</td><td>")
            .prose(&text(one, "description").unwrap_or_default());
        bounds(out, schema);
        out.tag("</td></tr>\n");
    }
    out.tag("</tbody></table>\n");
}

/// The answers of an operation. `data` is the schema of a stream's events.
fn answers(out: &mut HtmlBuffer, responses: RawJson<'static>, data: Option<RawJson<'static>>) {
    out.tag("<h4>Answers</h4>\n<table class=\"members answers\"><thead><tr><th scope=\"col\">Status</th><th scope=\"col\">Body</th>");
    out.tag("<th scope=\"col\">Meaning</th></tr></thead>\n<tbody>\n");
    let mut examples = Vec::new();
    for response in responses.members() {
        let told = resolved(response.value);
        out.tag("<tr><th scope=\"row\">")
            .code(response.name)
            .tag("</th><td>");
        let content = at(told, "content").members().next();
        if let Some(content) = content {
            let schema = at(content.value, "schema");
            match content.name {
                "application/json" | "application/problem+json" => kind(out, schema),
                media => {
                    out.code(media);
                }
            }
            let succeeded = response.name.starts_with('2');
            if let Some(example) = content.value.get("example").filter(|_| succeeded) {
                examples.push((response.name, example));
            }
        }
        out.tag("</td><td>")
            .prose(&text(told, "description").unwrap_or_default());
        if let Some(content) = content.filter(|content| content.name.starts_with("text/")) {
            let more = text(at(content.value, "schema"), "description");
            out.tag(" ").prose(&more.unwrap_or_default());
            if let Some(data) = data {
                out.tag(" Data: ");
                kind(out, data);
                out.tag(".");
            }
        }
        out.tag("</td></tr>\n");
    }
    out.tag("</tbody></table>\n");
    for (status, example) in examples {
        out.tag("<details class=\"disclosure\"><summary>Example of ")
            .text(status)
            .tag("</summary>\n");
        match example.as_str() {
            Some(text) => out.sample(text.trim_end()),
            None => out.sample(&pretty(example, 0)),
        };
        out.tag("</details>\n");
    }
}

/// The type of a value, in a few words.
fn kind(out: &mut HtmlBuffer, schema: RawJson<'static>) {
    if let Some(to) = text(schema, "$ref") {
        let name = to.rsplit('/').next().unwrap_or_default().to_owned();
        out.tag("<a href=\"#")
            .text(&schema_id(&name))
            .tag("\">")
            .text(&name)
            .tag("</a>");
        return;
    }
    let choices = at(schema, "oneOf").elements();
    let mut choices = choices.peekable();
    if choices.peek().is_some() {
        for (at, choice) in choices.enumerate() {
            out.text(if at == 0 { "" } else { " or " });
            kind(out, choice);
        }
        return;
    }
    if let Some(only) = schema.get("const") {
        out.code(only.text());
        return;
    }
    let types: Vec<_> = match at(schema, "type").as_str() {
        Some(one) => vec![one],
        None => at(schema, "type")
            .elements()
            .filter_map(RawJson::as_str)
            .collect(),
    };
    for (place, one) in types.iter().enumerate() {
        out.text(if place == 0 { "" } else { " or " });
        match &**one {
            "array" => {
                out.text("list of ");
                kind(out, at(schema, "items"));
            }
            "string" if text(schema, "format").is_some_and(|format| format == "date-time") => {
                out.text("time");
            }
            "integer" => {
                out.text("whole number");
            }
            other => {
                out.text(other);
            }
        }
    }
    if types.is_empty() {
        out.text("any value");
    }
}

/// Limits, allowed values and default of a value.
fn bounds(out: &mut HtmlBuffer, schema: RawJson<'static>) {
    let number = |name: &str| schema.get(name).map(RawJson::text);
    match (number("minimum"), number("maximum")) {
        (Some(least), Some(most)) => out.text(&format!(" From {least} to {most}.")),
        (None, Some(most)) => out.text(&format!(" At most {most}.")),
        _ => out,
    };
    if let Some(fallback) = schema.get("default") {
        let shown = fallback.as_str().unwrap_or(fallback.text().into());
        out.text(" Unless said, ").code(&shown).text(".");
    }
    let choices: Vec<_> = at(schema, "enum")
        .elements()
        .filter_map(RawJson::as_str)
        .collect();
    one_of(out, &choices);
    let examples: Vec<_> = at(schema, "examples")
        .elements()
        .filter_map(RawJson::as_str)
        .collect();
    for (place, example) in examples.iter().enumerate() {
        out.text(if place == 0 { " Such as " } else { " or " })
            .code(example);
        out.text(if place + 1 == examples.len() { "." } else { "" });
    }
}

fn one_of(out: &mut HtmlBuffer, choices: &[std::borrow::Cow<'static, str>]) {
    for (place, choice) in choices.iter().enumerate() {
        out.text(if place == 0 { " One of " } else { ", " }).code(choice);
        out.text(if place + 1 == choices.len() { "." } else { "" });
    }
}

/// A schema with all its members.
fn shape(out: &mut HtmlBuffer, schema: RawJson<'static>) {
    if schema.get("$ref").is_some() {
        out.tag("<p>");
        kind(out, schema);
        out.tag("</p>\n");
        return;
    }
    if let Some(description) = text(schema, "description") {
        out.tag("<p>").prose(&description);
        bounds(out, schema);
        out.tag("</p>\n");
    }
    let mut rows = Vec::new();
    collect("", schema, &mut rows);
    if rows.is_empty() {
        return;
    }
    out.tag("<table class=\"members\"><thead><tr><th scope=\"col\">Member</th><th scope=\"col\">Type</th>");
    out.tag("<th scope=\"col\">Meaning</th></tr></thead>\n<tbody>\n");
    for row in rows {
        out.tag("<tr><th scope=\"row\">").code(&row.name);
        if !row.required {
            out.tag(" <span class=\"muted\">optional</span>");
        }
        out.tag("</th><td>");
        kind(out, row.schema);
        out.tag("</td><td>")
            .prose(&text(row.schema, "description").unwrap_or_default());
        bounds(out, row.schema);
        out.tag("</td></tr>\n");
    }
    out.tag("</tbody></table>\n");
}

struct MemberRow {
    name: String,
    required: bool,
    schema: RawJson<'static>,
}

/// Lists the members of a schema; nested members are named by their path.
fn collect(prefix: &str, schema: RawJson<'static>, rows: &mut Vec<MemberRow>) {
    for choice in at(schema, "oneOf").elements() {
        collect(prefix, choice, rows);
    }
    let required: Vec<_> = at(schema, "required")
        .elements()
        .filter_map(RawJson::as_str)
        .collect();
    for member in at(schema, "properties").members() {
        let name = format!("{prefix}{}", member.name);
        rows.push(MemberRow {
            name: name.clone(),
            required: required.iter().any(|one| *one == member.name),
            schema: member.value,
        });
        collect(&format!("{name}."), member.value, rows);
        collect(&format!("{name}[]."), at(member.value, "items"), rows);
    }
}

/// An example request as a command line.
fn curl(operation: &DescribedOperation) -> String {
    let told = operation.told;
    let mut command = String::from("curl");
    let changes = operation.method != "GET";
    let body = at(at(told, "requestBody"), "content").members().next();
    if changes && (body.is_none() || operation.method != "POST") {
        let _ = write!(command, " -X {}", operation.method);
    }
    if streams(told) {
        command.push_str(" -N");
    }
    match &*text(told, "x-needs").unwrap_or_default() {
        "nothing" | "loopback" => {}
        "session" => {
            command.push_str(" -b \"$SESSION_COOKIE\" -H \"x-csrf-token: $TOKEN\"");
        }
        _ => command.push_str(" -H \"authorization: Bearer $SECRET\""),
    }
    let path = operation.path.split('/').map(|part| {
        let name = part.strip_prefix('{').and_then(|part| part.strip_suffix('}'));
        name.map_or(part.to_owned(), |name| format!("${}", name.to_uppercase()))
    });
    let path: Vec<_> = path.collect();
    let _ = write!(command, " \"{ORIGIN}{}\"", path.join("/"));
    let required = at(told, "parameters").elements().filter(|one| {
        text(*one, "in").is_some_and(|place| place == "query") && at(*one, "required").as_bool() == Some(true)
    });
    for one in required {
        let name = text(one, "name").unwrap_or_default();
        let _ = write!(
            command,
            " -G --data-urlencode \"{name}=${}\"",
            name.to_uppercase()
        );
    }
    if let Some(example) = body.and_then(|body| body.value.get("example")) {
        if operation.path.starts_with("/portal/") {
            command.push_str(" -H \"content-type: application/json\"");
        }
        let _ = write!(command, " \\\n    -d '{}'", compact(example));
    }
    command
}

fn streams(told: RawJson<'static>) -> bool {
    let mut all = at(told, "responses").members();
    all.any(|response| response.value.text().contains("text/event-stream"))
}

/// JSON on one line.
fn compact(value: RawJson<'static>) -> String {
    pretty_within(value, 0, usize::MAX)
}

/// JSON on as many lines as needed.
fn pretty(value: RawJson<'static>, indent: usize) -> String {
    pretty_within(value, indent, WIDTH)
}

fn pretty_within(value: RawJson<'static>, indent: usize, width: usize) -> String {
    let (open, close) = match value.kind() {
        JsonKind::Object => ('{', '}'),
        JsonKind::Array => ('[', ']'),
        _ => return value.text().to_owned(),
    };
    let parts = |indent: usize, width: usize| -> Vec<String> {
        let members = value.members().map(|member| {
            let value = pretty_within(member.value, indent, width);
            format!("\"{}\": {value}", member.name)
        });
        let elements = value
            .elements()
            .map(|element| pretty_within(element, indent, width));
        members.chain(elements).collect()
    };
    let line = format!("{open}{}{close}", parts(0, usize::MAX).join(", "));
    if line.len().saturating_add(indent) <= width {
        return line;
    }
    let pad = " ".repeat(indent + 2);
    let parts = parts(indent + 2, width).join(&format!(",\n{pad}"));
    format!("{open}\n{pad}{parts}\n{}{close}", " ".repeat(indent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_broken_and_short_ones_are_not() {
        let short = RawJson::parse(r#"{ "a" : [1,  2], "b": {} }"#).unwrap();
        assert_eq!(pretty(short, 0), r#"{"a": [1, 2], "b": {}}"#);
        let long = r#"{"name": "0123456789012345678901234567890123456789", "list": ["01234567890123456789012345678901234567890"]}"#;
        let expected = "{\n  \"name\": \"0123456789012345678901234567890123456789\",\n  \
                        \"list\": [\"01234567890123456789012345678901234567890\"]\n}";
        assert_eq!(pretty(RawJson::parse(long).unwrap(), 0), expected);
        assert_eq!(compact(RawJson::parse(long).unwrap()), long);
    }
}
