// One subscription: how it is, what it is set to, and what can be done with it.

import { fill, h } from "../dom.js";
import { attempt, badge, brief, button, code, confirmDialog, disclosure, empty, facts, figure, figures, follow, heading, labelled, linkButton, load, mono, notice, outcomeTone, resource as named, section, sectionWith, select, table, text, toast, when } from "../ui.js";
import { armChange, armPost, get, post, server } from "../api.js";
import { letterPath, subscriptionOf, to } from "../ids.js";
import { SCHEMA_NAMES, byReason, delivery, reasonList, topicLink } from "../shared.js";
import { trafficCharts } from "../charts.js";
import * as f from "../format.js";

/** Attempts that the page shows, and pages of a search that finds none. */
const ATTEMPTS_SHOWN = 20;
const PAGES_MAX = 5;

export default function page(ctx) {
  const { id, name, topic } = subscriptionOf(ctx.params.id);
  ctx.title = name;
  const now = h("div");
  const charts = h("div");
  const settings = h("div");
  const recent = h("div");
  const handshakes = h("div");
  let shown = null;
  let isWatched = false;
  let attempts = null;
  let outcome = "";

  const ask = async () => ({ one: await get("subscription", { id }, ctx.signal), info: await server(ctx.signal) });
  const state = follow(ctx, now, 4, ask, ({ one, info }) => {
    const resource = one.resource ?? null;
    const said = JSON.stringify(resource);
    if (said !== shown) fill(settings, resource ? show(ctx, id, resource, info) : empty("Its settings cannot be shown."));
    shown = said;
    if (isAwaited(one)) {
      for (const box of [charts, recent]) fill(box, empty("Events come once its webhook has agreed to take them."));
    } else watchTraffic();
    return status(ctx, one, act);
  });
  /** What there is to see only of a subscription that is in force. */
  const watchTraffic = () => {
    if (isWatched) return;
    isWatched = true;
    for (const box of [charts, recent]) fill(box);
    follow(ctx, charts, 30, () => get("stats/series", { subscription: id, minutes: 60 }, ctx.signal), (data) => trafficCharts({ ...data, published: null }, ctx.signal));
    attempts = follow(ctx, recent, 10, () => recentAttempts(ctx, id, outcome), (value) => (value.length ? attemptTable(name, value) : empty(outcome ? "No failed attempt is recorded." : "No attempt is recorded.")));
  };
  const act = async (control, verb, done) => {
    if (await attempt(control, () => post(`subscriptions/${verb}`, { id }), done)) state.again();
  };
  listHandshakes(ctx, id, handshakes);

  const remove = () => confirmDialog({
    title: `Delete subscription ${name}`,
    text: "Events that wait are not delivered any more. With a dead-letter destination they are written there, otherwise they are lost.",
    action: "Delete",
    word: name,
    work: async () => {
      await armChange("DELETE", id, undefined, { signal: ctx.signal });
      toast(`${name} is deleted`);
      ctx.go(topic.kind === "other" ? to.subscriptions() : to.topic(topic.id));
    },
  });
  return [
    heading(name, {
      crumbs: [["Subscriptions", to.subscriptions()]],
      mark: h("span", { class: "kind" }, "of ", topicLink(topic)),
      actions: [linkButton("Edit", to.subscription(id, "/edit")), button("Delete", remove, { kind: "danger" })],
    }),
    now,
    section("Last hour", charts),
    h("div", { class: "split" }, section("Settings", settings), section("Handshakes", handshakes)),
    sectionWith("Recent attempts", [labelled("Show", select([["", "All, failed first"], ["failed", "Failed only"]], outcome, (chosen) => {
      outcome = chosen;
      attempts?.again();
    })), linkButton("Search", to.events({ subscription: id })), linkButton("Live", to.live({ subscription: id }))], recent),
  ];
}

/** The latest attempts, failed ones first. A search takes only so long: it is gone on with while it finds nothing. */
async function recentAttempts(ctx, id, outcome) {
  let cursor = null;
  for (let page = 0; page < PAGES_MAX; page += 1) {
    const answer = await get("subscription/attempts", { id, outcome, limit: ATTEMPTS_SHOWN, cursor }, ctx.signal);
    if (answer.value.length || !answer.cursor) return answer.value;
    cursor = answer.cursor;
  }
  return [];
}

function attemptTable(name, rows) {
  return table(`Recent attempts to deliver to ${name}`, [
    { label: "Event", cell: (one) => [h("a", { href: to.event(one.event.id) }, brief(one.event.id, mono)), h("div", { class: "muted" }, brief(one.event.type))] },
    { label: "Result", cell: (one) => badge(one.text, outcomeTone(one.outcome)) },
    { label: "Attempt", number: true, cell: (one) => f.count(one.attempt) },
    { label: "Latency", number: true, cell: (one) => f.millis(one.latencyMs) },
    { label: "Answer", wide: true, cell: (one) => (one.answer ? brief(one.answer, mono) : one.failure ? h("span", { class: "muted" }, brief(one.failure)) : "–") },
    { label: "Began", cell: (one) => when(one.at) },
  ], rows);
}

/** A new one whose webhook has not agreed yet. One that is being changed is in force as it was. */
const isAwaited = (one) => one.attempts === 0 && ["AwaitingManualAction", "Creating"].includes(one.resource?.properties?.provisioningState);

function status(ctx, one, act) {
  const byHand = one.resource?.properties?.provisioningState === "AwaitingManualAction" && notice("warn", "The webhook has to be validated by hand: somebody must open the validation URL that it was sent. See the handshake below.");
  if (isAwaited(one)) return byHand || notice("info", "The webhook is being asked whether it wants events.");
  const paused = one.state === "paused";
  const sick = one.state === "delayed" || one.state === "probing";
  return [
    h(
      "div",
      { class: "status-line" },
      h("div", { class: "states" }, badge(one.health), h("span", {}, h("span", { class: "muted" }, "Delivery: "), delivery(one))),
      h("div", { class: "actions" },
        sick && button("Send one event as a test", (event) => act(event.target, "probe", "One event is sent to see whether the endpoint is well")),
        paused ? button("Resume", (event) => act(event.target, "resume", "Deliveries go on"), { kind: "primary" }) : button("Pause", (event) => act(event.target, "pause", "Deliveries wait; nothing is lost")),
      ),
    ),
    reasonList({ ...one, reasons: (one.reasons ?? []).filter(({ code }) => code !== "paused") }),
    paused && notice("info", "Paused: events are accepted, kept and wait. Nothing is lost, and the time does not count towards their time to live."),
    byHand,
    figures(
      figure("Waiting", f.short(one.waiting), { note: `and ${f.short(one.retrying)} to be tried again` }),
      figure("Oldest undelivered", one.oldestUndeliveredSeconds ? f.seconds(one.oldestUndeliveredSeconds) : "none"),
      figure("Delivered", f.short(one.delivered), { note: `${f.rate(one.deliveredPerSec)}/s now` }),
      figure("Failed attempts", f.short(one.failed), { note: `of ${f.short(one.attempts)}`, tone: one.failed > 0 ? "warn" : "" }),
      figure("Dead-lettered", f.short(one.deadLettered), { note: h("a", { href: to.letters({ subscription: letterPath(one.id) }) }, `${f.short(one.deadLettersPending)} not yet written`) }),
      figure("Dropped", f.short(one.dropped), { tone: one.dropped > 0 ? "bad" : "", note: byReason(one.droppedBy) }),
      figure("Latency p95", f.millis(one.latencyMs?.p95), { note: `p50 ${f.millis(one.latencyMs?.p50)}, p99 ${f.millis(one.latencyMs?.p99)}` }),
    ),
  ];
}

/** Where events go that are given up. */
function deadLetters(place, info) {
  if (place) return ["container ", mono(place.properties?.blobContainerName), " of ", named(place.properties?.resourceId)];
  if (info.deadLetterDefault) return ["the default of this server: ", mono(info.deadLetterDefault)];
  return h("span", { class: "loss" }, "none: events that cannot be delivered are dropped");
}

function show(ctx, id, resource, info) {
  const p = resource.properties ?? {};
  const withIdentity = p.deliveryWithResourceIdentity;
  const destination = p.destination ?? withIdentity?.destination ?? {};
  const d = destination.properties ?? {};
  const letter = p.deadLetterDestination ?? p.deadLetterWithResourceIdentity?.deadLetterDestination;
  const url = h("span", {}, mono(d.endpointUrl ?? d.endpointBaseUrl ?? ""));
  const reveal = destination.endpointType === "WebHook" && button("Show whole URL", async (event) => {
    const answer = await attempt(event.target, () => armPost(id, "getFullUrl", {}, ctx.signal));
    if (answer) {
      fill(url, mono(answer.endpointUrl));
      event.target.remove();
    }
  }, { kind: "small" });
  const filter = p.filter ?? {};
  const retry = p.retryPolicy ?? {};
  const headers = d.deliveryAttributeMappings ?? [];
  return [
    facts([
      ["State", badge(p.provisioningState)],
      ["Destination", text(destination.endpointType)],
      ["URL", d.endpointUrl || d.endpointBaseUrl ? [url, " ", reveal] : null],
      ["Resource", d.resourceId ? named(d.resourceId) : null],
      ["Queue", d.queueName ? text(d.queueName) : null],
      ["Output", d.outputName ? text(d.outputName) : null],
      ["Message time to live", d.queueMessageTimeToLiveInSeconds ? f.seconds(d.queueMessageTimeToLiveInSeconds) : null],
      ["Azure AD", d.azureActiveDirectoryTenantId ? [text(d.azureActiveDirectoryApplicationIdOrUri), " in ", text(d.azureActiveDirectoryTenantId)] : null],
      ["Identity", withIdentity ? text(withIdentity.identity?.userAssignedIdentity ?? withIdentity.identity?.type) : null],
      ["Batches", d.maxEventsPerBatch ? `up to ${f.plural(d.maxEventsPerBatch, "event")}, about ${f.count(d.preferredBatchSizeInKilobytes)} KB` : null],
      ["Delivered as", SCHEMA_NAMES[p.eventDeliverySchema] ?? text(p.eventDeliverySchema)],
      ["Retry", `up to ${f.plural(retry.maxDeliveryAttempts, "attempt")} in ${f.plural(retry.eventTimeToLiveInMinutes, "minute")}`],
      ["Profile", p.postrider?.profile ? text(p.postrider.profile) : "that of the topic or server"],
      ["Dead letters", deadLetters(letter, info)],
      ["Expires", p.expirationTimeUtc ? when(p.expirationTimeUtc, { relative: true }) : null],
      ["Labels", p.labels?.length ? h("ul", { class: "labels" }, p.labels.map((label) => h("li", {}, text(label)))) : null],
    ]),
    headers.length > 0 && [h("h3", {}, "Delivery headers"), table("Delivery headers", [
      { label: "Name", cell: (one) => mono(one.name) },
      { label: "Kind", cell: (one) => text(one.type) },
      { label: "Value", cell: (one) => (one.type === "Dynamic" ? mono(one.properties?.sourceField) : one.properties?.isSecret ? h("span", { class: "muted" }, "secret") : mono(one.properties?.value)) },
    ], headers)],
    h("div", { class: "panel-head" }, h("h3", {}, "Filter"), linkButton("Open in the lab", to.lab({ subscription: id }), "small")),
    showFilter(filter),
    disclosure("Resource as JSON", mono(resource.id), code(f.pretty(resource), "Resource")),
  ];
}

function showFilter(filter) {
  const advanced = filter.advancedFilters ?? [];
  const value = (one) => (one.values ? one.values.map((v) => (Array.isArray(v) ? `${v[0]} to ${v[1]}` : String(v))).join(", ") : one.value === undefined ? "" : String(one.value));
  return facts([
    ["Event types", filter.includedEventTypes?.length ? h("ul", { class: "labels" }, filter.includedEventTypes.map((one) => h("li", {}, text(one)))) : "all"],
    ["Subject begins with", filter.subjectBeginsWith ? mono(filter.subjectBeginsWith) : null],
    ["Subject ends with", filter.subjectEndsWith ? mono(filter.subjectEndsWith) : null],
    ["Case", filter.isSubjectCaseSensitive ? "matters in subjects" : null],
    ["Arrays", filter.enableAdvancedFilteringOnArrays ? "are looked into" : null],
    ["Advanced", advanced.length ? h("ol", { class: "plain" }, advanced.map((one) => h("li", {}, mono(`${one.key} ${one.operatorType} ${value(one)}`)))) : null],
  ]);
}

async function listHandshakes(ctx, id, box) {
  await load(ctx, box, () => get("handshakes", { subscription: id, limit: 10 }, ctx.signal), ({ value }) => {
    const ask = button("Ask the webhook again", async (event) => {
      const begun = await attempt(event.target, () => post("handshakes", { subscription: id }), "The webhook is asked");
      if (begun) ctx.go(to.handshake(begun.operation));
    }, { kind: "small" });
    if (!value.length) return [empty("None is remembered."), ask];
    return [table("Handshakes with the webhook", [
      { label: "Begun", cell: (one) => h("a", { href: to.handshake(one.operation) }, when(one.begun)) },
      { label: "State", cell: (one) => badge(one.state) },
      { label: "More", cell: (one) => (one.message ? text(one.message) : one.until ? ["until ", when(one.until)] : "") },
    ], value), ask];
  });
}
