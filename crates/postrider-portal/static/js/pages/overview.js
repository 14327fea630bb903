// How the server is doing, at a glance.

import { fill, h } from "../dom.js";
import { badge, empty, figure, figures, follow, heading, mono, section, sectionWith, select, labelled, notice, table, when, text } from "../ui.js";
import { get, health } from "../api.js";
import { trafficCharts } from "../charts.js";
import { byReason, resumeButton, subscriptionNames, subscriptionTable } from "../shared.js";
import { to } from "../ids.js";
import * as f from "../format.js";

/** Subscriptions that the verdict names. */
const NAMED_MAX = 10;
const SPANS = [["60", "1 hour"], ["360", "6 hours"], ["1440", "24 hours"]];

export default function page(ctx) {
  ctx.title = "Overview";
  const verdict = h("div");
  const warned = h("div");
  const now = h("div");
  const charts = h("div");
  const below = h("div");
  let span = SPANS.some(([key]) => key === ctx.query.get("minutes")) ? ctx.query.get("minutes") : "60";
  follow(ctx, warned, 60, () => health(ctx.signal), (answer) => (answer.warnings ?? []).map((one) => notice("warn", text(one.detail))));
  const stats = follow(ctx, now, 3, () => get("stats", { top: 10 }, ctx.signal), (answer) => {
    fill(verdict, judged(answer.verdict));
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
    verdict,
    warned,
    now,
    sectionWith("Traffic", labelled("Span", choose), charts),
    below,
  ];
}

/** Whether somebody should look at a subscription, which ones, why, and what to do. */
function judged({ status, text: said, subscriptions }) {
  if (status === "well") return h("div", { class: "verdict-box ok" }, h("p", { class: "verdict-text" }, badge(said, "ok")));
  const worst = subscriptions.some((one) => one.health === "failing") ? "bad" : "warn";
  const lines = subscriptions.slice(0, NAMED_MAX).map((one) => {
    const [reason] = one.reasons;
    return h("li", {},
      badge(one.health), " ",
      one.id ? h("a", { href: to.subscription(one.id) }, text(one.name)) : text(one.name),
      one.topic && h("span", { class: "muted" }, " of ", text(one.topic)),
      reason && [": ", text(reason.text), ".", reason.todo && h("span", { class: "muted" }, " What to do: ", text(reason.todo), ".")]);
  });
  const more = subscriptions.length - lines.length;
  return h("section", { class: `verdict-box ${worst}`, "aria-labelledby": "verdict" },
    h("h2", { class: "verdict-text", id: "verdict" }, said),
    lines.length > 0 && h("ul", { class: "plain links" }, lines),
    more > 0 && h("p", {}, `and ${f.count(more)} more: `, h("a", { href: to.subscriptions({ health: "failing" }) }, "those that fail"), ", ", h("a", { href: to.subscriptions({ health: "attention" }) }, "those that need attention")));
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
      figure("Dead-lettered", f.short(totals.deadLettered), { tone: totals.deadLettered > 0 ? "warn" : "", note: totals.deadLettersPending > 0 ? `${f.short(totals.deadLettersPending)} not yet written` : byReason(totals.deadLetteredBy) }),
      figure("Dropped", f.short(totals.dropped), { tone: totals.dropped > 0 ? "bad" : "", note: byReason(totals.droppedBy) }),
    ),
    section(
      "Sick endpoints",
      sick.length
        ? table(
            "Endpoints that are not delivered to at once",
            [
              { label: "Endpoint", wide: true, cell: (one) => mono(one.endpoint) },
              { label: "State", cell: (one) => badge(one.state) },
              { label: "Cause", cell: (one) => text(one.causeText ?? f.outcome(one.cause)) },
              { label: "Subscriptions", cell: (one) => subscriptionNames(one.subscriptions ?? []) },
              { label: "Since", cell: (one) => when(one.since, { relative: true }) },
              { label: "Until", cell: (one) => when(one.until, { relative: true }) },
              { label: "Waiting", number: true, cell: (one) => f.short(one.waiting) },
              { label: "Action", cell: (one) => resumeButton(one.endpoint, again) },
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
