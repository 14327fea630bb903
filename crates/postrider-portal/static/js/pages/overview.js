// How the server is doing, at a glance.

import { fill, h } from "../dom.js";
import { badge, button, empty, figure, figures, follow, heading, mono, section, sectionWith, select, labelled, table, when, attempt, text } from "../ui.js";
import { get, post } from "../api.js";
import { trafficCharts } from "../charts.js";
import { subscriptionTable } from "../shared.js";
import { to } from "../ids.js";
import * as f from "../format.js";

const SPANS = [["60", "1 hour"], ["360", "6 hours"], ["1440", "24 hours"]];

export default function page(ctx) {
  ctx.title = "Overview";
  const now = h("div");
  const charts = h("div");
  const below = h("div");
  let span = SPANS.some(([key]) => key === ctx.query.get("minutes")) ? ctx.query.get("minutes") : "60";
  const stats = follow(ctx, now, 3, () => get("stats", { top: 10 }, ctx.signal), (answer) => {
    fill(below, busy(answer));
    return show(answer, () => stats.again());
  });
  const series = follow(ctx, charts, 30, () => get("stats/series", { minutes: span }, ctx.signal), (answer) => trafficCharts(answer, ctx.signal));
  const choose = select(SPANS, span, (value) => {
    span = value;
    ctx.remember({ minutes: value === "60" ? "" : value });
    series.again();
  });
  return [
    heading("Overview", { actions: [h("a", { href: "#/send", class: "button" }, "Send an event"), h("a", { href: to.newSubscription(), class: "button primary" }, "New subscription")] }),
    now,
    sectionWith("Traffic", labelled("Span", choose), charts),
    below,
  ];
}

function show(stats, again) {
  const { totals, rates, latencyMs } = stats;
  const old = stats.oldestUndeliveredSeconds ?? 0;
  const sick = stats.sick ?? [];
  return [
    figures(
      figure("Published", f.rate(rates.publishedPerSec), { unit: "/s", note: `${f.short(totals.published)} in all` }),
      figure("Delivered", f.rate(rates.deliveredPerSec), { unit: "/s", note: `${f.short(totals.delivered)} in all` }),
      figure("Failed attempts", f.rate(rates.failedPerSec), { unit: "/s", tone: rates.failedPerSec > 0 ? "warn" : "", note: `${f.short(totals.attemptsFailed)} of ${f.short(totals.attempts)}` }),
      figure("Oldest undelivered", old ? f.seconds(old) : "none", { tone: old > 300 ? "warn" : "", note: `${f.short(totals.pending)} pending` }),
      figure("Latency p95", f.millis(latencyMs?.p95), { note: `p50 ${f.millis(latencyMs?.p50)}, p99 ${f.millis(latencyMs?.p99)}` }),
      figure("Dead-lettered", f.short(totals.deadLettered), { tone: totals.deadLettered > 0 ? "warn" : "", note: `${f.short(totals.dropped)} dropped` }),
    ),
    section(
      "Sick endpoints",
      sick.length
        ? table(
            "Endpoints that are not delivered to at once",
            [
              { label: "Endpoint", wide: true, cell: (one) => mono(one.endpoint) },
              { label: "State", cell: (one) => badge(one.state) },
              { label: "Cause", cell: (one) => text(f.words(one.cause)) },
              { label: "Since", cell: (one) => when(one.since, { relative: true }) },
              { label: "Until", cell: (one) => when(one.until, { relative: true }) },
              { label: "Waiting", number: true, cell: (one) => f.short(one.waiting) },
              { label: "Action", cell: (one) => button("Deliver again", async (event) => {
                const done = await attempt(event.target, () => post("endpoints/admit", { endpoint: one.endpoint }), "Deliveries go on");
                if (done) again();
              }, { kind: "small", label: `Deliver again to ${one.endpoint}`, key: `admit:${one.endpoint}` }) },
            ],
            sick,
          )
        : empty("Every endpoint takes what it is sent."),
    ),
  ];
}

function busy(stats) {
  const worst = (stats.subscriptions ?? []).filter((one) => one.waiting > 0 || one.state !== "admitting");
  return [
    worst.length > 0 && section("Subscriptions with something waiting", subscriptionTable("Subscriptions with something waiting", worst), h("p", {}, h("a", { href: to.subscriptions() }, "All subscriptions"))),
    section(
      "Topics",
      (stats.topics ?? []).length
        ? table(
            "Topics by what is published to them",
            [
              { label: "Topic", cell: (one) => (one.resourceId ? h("a", { href: to.topic(one.resourceId) }, text(one.name)) : text(one.name)) },
              { label: "Published/s", number: true, cell: (one) => f.rate(one.publishedPerSec) },
              { label: "Published", number: true, cell: (one) => f.short(one.published) },
              { label: "Refused", number: true, cell: (one) => f.short(one.refused) },
              { label: "Matched by none", number: true, cell: (one) => f.short(one.unmatched) },
            ],
            [...stats.topics].sort((a, b) => b.publishedPerSec - a.publishedPerSec || b.published - a.published).slice(0, 10),
          )
        : empty("There are no topics yet.", h("p", {}, h("a", { href: to.newTopic(), class: "button primary" }, "Create a topic"))),
    ),
  ];
}
