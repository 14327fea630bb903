// Endpoints: who is well, who is left alone, and why.

import { h } from "../dom.js";
import { badge, empty, follow, heading, labelled, mono, searchBox, select, table, text, when } from "../ui.js";
import { get } from "../api.js";
import { resumeButton, subscriptionNames } from "../shared.js";
import * as f from "../format.js";

const SHOWN_MAX = 200;
const ORDER = ["delayed", "probing", "admitting"];

export default function page(ctx) {
  ctx.title = "Endpoints";
  const box = h("div");
  const asked = { q: ctx.query.get("q") ?? "", state: ctx.query.get("state") ?? "" };
  const list = follow(ctx, box, 5, () => get("endpoints", {}, ctx.signal), ({ value }) => {
    const words = asked.q.toLowerCase();
    const rows = value
      .filter((one) => (!asked.state || one.state === asked.state) && (!words || one.endpoint.toLowerCase().includes(words)))
      .sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || b.waiting - a.waiting);
    if (!rows.length) return empty(value.length ? "No endpoint is like that." : "No subscription has an endpoint yet.");
    return [
      h("p", { class: "muted", role: "status" }, f.plural(rows.length, "endpoint"), rows.length > SHOWN_MAX && `, of which the first ${SHOWN_MAX} are shown`),
      table("Endpoints", [
        { label: "Endpoint", wide: true, cell: (one) => [mono(one.endpoint), one.thisServer && h("p", { class: "muted" }, "This server: events delivered here come back. Loops end after limits.hops_max deliveries.")] },
        { label: "State", cell: (one) => badge(one.state) },
        { label: "Cause", cell: (one) => (one.cause ? text(one.causeText ?? f.outcome(one.cause)) : "–") },
        { label: "Last answer", cell: (one) => (one.last ? [text(one.last.text), " ", h("span", { class: "muted" }, when(one.last.at))] : "–") },
        { label: "Until", cell: (one) => (one.probeDue ? "with the next event" : one.until ? when(one.until, { relative: true }) : "–") },
        { label: "In flight", number: true, cell: (one) => f.count(one.inFlight) },
        { label: "Waiting", number: true, cell: (one) => f.short(one.waiting) },
        { label: "Subscriptions", cell: (one) => subscriptionNames(one.subscriptions ?? []) },
        { label: "Action", cell: (one) => one.state !== "admitting" && resumeButton(one.endpoint, list.again) },
      ], rows.slice(0, SHOWN_MAX)),
    ];
  });
  const change = (members) => {
    Object.assign(asked, members);
    ctx.remember(asked);
    list.again();
  };
  return [
    heading("Endpoints", { note: "After ten different events in a row have failed, everything for an endpoint waits; then one is sent to see whether it is well again." }),
    h("div", { class: "toolbar", role: "search", "aria-label": "Narrow the list" }, searchBox("Search by address", asked.q, (q) => change({ q })), labelled("State", select([["", "Any"], ...ORDER.map((one) => [one, one])], asked.state, (state) => change({ state })))),
    box,
  ];
}
