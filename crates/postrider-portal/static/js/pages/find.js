// Search results: topics, subscriptions, endpoints and events whose name, address or id is like the typed one.

import { h } from "../dom.js";
import { badge, brief, empty, heading, linkButton, load, mono, section, table, text, when } from "../ui.js";
import { armList, get, nameContains, server } from "../api.js";
import { KIND_NAMES, everywhere, to, topicOf } from "../ids.js";
import { health, topicLink } from "../shared.js";
import * as f from "../format.js";

/** Things of one kind that are shown. */
const SHOWN_MAX = 20;
const TOPIC_KINDS = ["topics", "domains", "systemTopics"];

export default function page(ctx) {
  const words = (ctx.query.get("q") ?? "").trim();
  ctx.title = "Find";
  const box = h("div");
  if (words) load(ctx, box, () => search(ctx, words), (found) => show(ctx, words, found));
  return [heading(words ? `Found for ${words}` : "Find"), words ? box : empty("Type a name, an address or an event id into the field above.")];
}

async function search(ctx, words) {
  const { signal } = ctx;
  const info = await server(signal);
  const listed = async (kind) => (await armList(everywhere(info, kind), { filter: nameContains(words), top: SHOWN_MAX, signal })).value;
  const [lists, subscriptions, endpoints, events] = await Promise.all([
    Promise.all(TOPIC_KINDS.map(listed)),
    get("subscriptions", { q: words, top: SHOWN_MAX }, signal),
    get("endpoints", {}, signal),
    // The flight recorder may be off.
    get("events", { id: words, limit: SHOWN_MAX }, signal).catch((error) => (error.status >= 500 ? { value: [] } : Promise.reject(error))),
  ]);
  const isLike = (one) => one.endpoint.toLowerCase().includes(words.toLowerCase());
  return { topics: lists.flat().map((one) => topicOf(one.id)), subscriptions, endpoints: endpoints.value.filter(isLike), events: events.value };
}

function show(ctx, words, { topics, subscriptions, endpoints, events }) {
  const total = topics.length + subscriptions.total + endpoints.length + events.length;
  if (!total) return empty("No topic, subscription or endpoint is called that, and no recorded event has this id.", h("p", {}, linkButton("Search events", to.events())));
  // A single hit is what was meant. An event that came twice has one page.
  const isOneEvent = events.length > 0 && events.length === total && events.every((one) => one.id === events[0].id);
  const only = isOneEvent ? to.event(events[0].id) : total > 1 ? null : topics[0] ? to.topic(topics[0].id) : subscriptions.value[0]?.id ? to.subscription(subscriptions.value[0].id) : null;
  if (only) {
    ctx.replace(only);
    return null;
  }
  const more = (count, href) => count > SHOWN_MAX && h("p", {}, h("a", { href }, `All ${f.count(count)}`));
  return [
    topics.length > 0 && section("Topics", table("Topics", [
      { label: "Topic", cell: topicLink },
      { label: "Kind", cell: (one) => KIND_NAMES[one.kind] },
      { label: "Resource group", cell: (one) => text(one.group) },
    ], topics)),
    subscriptions.total > 0 && section("Subscriptions", table("Subscriptions", [
      { label: "Subscription", cell: (one) => (one.id ? h("a", { href: to.subscription(one.id) }, text(one.name)) : text(one.name)) },
      { label: "Topic", cell: (one) => text(one.topic ?? "–") },
      { label: "Health", wide: true, cell: health },
      { label: "Endpoint", wide: true, cell: (one) => (one.endpoint ? brief(one.endpoint, mono) : "–") },
    ], subscriptions.value, { cards: true }), more(subscriptions.total, to.subscriptions({ q: words }))),
    endpoints.length > 0 && section("Endpoints", table("Endpoints", [
      { label: "Endpoint", wide: true, cell: (one) => h("a", { href: to.endpoints({ q: one.endpoint }) }, brief(one.endpoint, mono)) },
      { label: "State", cell: (one) => badge(one.state) },
      { label: "Subscriptions", number: true, cell: (one) => f.count(one.subscriptions?.length ?? 0) },
    ], endpoints.slice(0, SHOWN_MAX)), more(endpoints.length, to.endpoints({ q: words }))),
    events.length > 0 && section("Events", table("Events", [
      { label: "Event", cell: (one) => h("a", { href: to.event(one.id) }, brief(one.id, mono)) },
      { label: "Accepted", cell: (one) => when(one.acceptedAt) },
      { label: "Topic", cell: (one) => text(one.topic) },
      { label: "State", cell: (one) => badge(one.state) },
    ], events)),
  ];
}
