// The filter lab: write a filter, see which of the recent events it takes and why not the others.

import { fill, h } from "../dom.js";
import { badge, brief, button, empty, failure, heading, load, loading, mono, notice, section, table, text } from "../ui.js";
import { Form } from "../form.js";
import { filterEditor } from "../filter.js";
import { armGet, post, server } from "../api.js";
import { subscriptionOf, to, topicName, topicOf } from "../ids.js";
import { allTopics, topicOptions } from "../shared.js";
import * as f from "../format.js";

const REST_MS = 350;
const TITLE_MAX = 1000;
const LINE_MAX = 200;

let carried = null;
/** The filter that the lab handed to a new subscription, once. */
export function takeFilter() {
  const filter = carried;
  carried = null;
  return filter;
}

export default function page(ctx) {
  ctx.title = "Filter lab";
  const box = h("div");
  const subscription = ctx.query.get("subscription");
  load(ctx, box, async () => {
    const info = await server(ctx.signal);
    const [topics, read] = await Promise.all([allTopics(info, ctx.signal), subscription ? armGet(subscription, ctx.signal) : null]);
    return { topics, filter: read?.resource?.properties?.filter ?? {} };
  }, ({ topics, filter }) => build(ctx, topics, filter, subscription ? subscriptionOf(subscription).topic : ctx.query.get("topic") ? topicOf(ctx.query.get("topic")) : null));
  return [heading("Filter lab", { note: "Nothing is changed here: the filter is tried on the events that were published last." }), box];
}

function build(ctx, topics, filter, asked) {
  if (!topics.length) return empty("There is no topic yet, and so no event to try a filter on.", h("p", {}, h("a", { class: "button primary", href: to.newTopic() }, "Create a topic")));
  const form = new Form();
  const results = h("div", { class: "results" });
  const wanted = (asked?.domain?.id ?? asked?.id ?? topics[0].id).toLowerCase();
  const first = topics.find((one) => one.id.toLowerCase() === wanted) ?? topics[0];
  let timer = null;
  let asking = null;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(run, REST_MS);
  };
  const topic = form.choice({ label: "Topic", path: "topic", value: first.id, options: topicOptions(topics), change: later });
  const limit = form.choice({ label: "Events to try", path: "limit", value: "50", options: [["20", "20"], ["50", "50"], ["200", "200"]], change: later });
  const editor = filterEditor(form, { path: "filter", filter: tidy(filter), changed: later });

  const run = async () => {
    clearTimeout(timer);
    asking?.abort();
    asking = new AbortController();
    const mine = asking;
    ctx.signal.addEventListener("abort", () => mine.abort());
    form.clear();
    let body;
    try {
      body = { topic: topicName(topicOf(topic.value())), filter: editor.value() ?? {}, limit: Number(limit.value()) };
    } catch {
      // It is being written; an error in every half of a word would only be in the way.
      return fill(results, empty("The filter is not complete yet."));
    }
    if (!results.hasChildNodes()) fill(results, loading("Trying"));
    try {
      const { value } = await post("filters/test", body, mine.signal);
      if (!mine.signal.aborted) fill(results, show(value));
    } catch (problem) {
      if (problem.name === "AbortError" || problem.status === 401) return;
      if (problem.target) {
        const active = document.activeElement;
        form.show(problem);
        active?.focus?.();
        fill(results, notice("bad", text(problem.message)));
      } else fill(results, failure(problem, run));
    }
  };
  ctx.signal.addEventListener("abort", () => clearTimeout(timer));
  queueMicrotask(run);
  const carry = () => {
    try {
      carried = editor.value() ?? {};
    } catch (problem) {
      return form.show(problem);
    }
    ctx.go(to.newSubscription({ topic: topic.value() }));
  };
  return h("div", { class: "lab" },
    h("form", { class: "form", novalidate: true, on: { submit: (event) => { event.preventDefault(); run(); } } },
      form.summary,
      section("Filter", h("div", { class: "columns" }, topic.element, limit.element), editor.element,
        h("div", { class: "form-actions" }, button("Try it", null, { type: "submit", kind: "primary" }), button("Subscribe with this filter", carry)))),
    section("Events", results));
}

/** Empty texts that answers have for what is not filtered. */
const tidy = (filter) => Object.fromEntries(Object.entries(filter).filter(([, value]) => value !== "" && value !== null));

function show(events) {
  if (!events.length) return empty("No event of this topic is recorded. Send one, or publish some.", h("p", {}, h("a", { href: "#/send", class: "button" }, "Send an event")));
  const matched = events.filter((one) => one.matched).length;
  return [
    h("p", { role: "status", class: "lab-count" }, h("strong", {}, f.count(matched)), ` of the last ${f.plural(events.length, "event")} match`),
    h("div", { class: "ratio", "aria-hidden": "true" }, ratio(matched / events.length)),
    table("Recent events and whether the filter takes them", [
      { label: "Event", cell: (one) => h("a", { href: to.event(one.id), title: `accepted ${f.time(one.at)}` }, line(one.id)) },
      { label: "Type and subject", cell: (one) => line(`${one.type} ${one.subject}`) },
      { label: "Match, or why not", cell: (one) => (one.matched ? badge("matched") : [badge("no"), line(predicateText(one.predicate))]) },
    ], events, { lines: true }),
  ];
}

function ratio(part) {
  const bar = h("span", { class: "ratio-part" });
  bar.style.setProperty("inline-size", `${Math.round(part * 100)}%`);
  return bar;
}

const PREDICATES = { eventType: "event type", subjectBeginsWith: "subject begins with", subjectEndsWith: "subject ends with", advanced: "advanced filter", domainTopic: "domain topic", expired: "the subscription has expired" };
function predicateName(one) {
  const number = one.kind === "advanced" && Number.isInteger(one.index) ? ` ${one.index + 1}` : "";
  return `${PREDICATES[one.kind] ?? f.words(one.kind)}${number}: `;
}
const predicateText = (one) => (one ? `${predicateName(one)}${one.text}` : "");
export const predicate = (one) => (one ? [h("span", { class: "muted" }, predicateName(one)), brief(one.text, mono)] : "");

/** A text of which a line shows as much as it has room for, and its title more. */
const line = (value) => h("bdi", { title: value.slice(0, TITLE_MAX) }, value.slice(0, LINE_MAX));
