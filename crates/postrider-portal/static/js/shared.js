// What several pages show alike.

import { h } from "./dom.js";
import { attempt, badge, brief, button, mono, outcomeTone, table, text, when } from "./ui.js";
import { armAll, post } from "./api.js";
import { KIND_NAMES, everywhere, subscriptionOf, to, topicOf } from "./ids.js";
import * as f from "./format.js";

/** All topics, domains and system topics as `{id, kind, name, resource}`. */
export async function allTopics(info, signal) {
  const kinds = ["topics", "domains", "systemTopics"];
  const lists = await Promise.all(kinds.map((kind) => armAll(everywhere(info, kind), { signal })));
  return lists.flat().map((resource) => ({ ...topicOf(resource.id), resource }));
}

export const topicOptions = (topics) =>
  ["topics", "domains", "systemTopics"]
    .map((kind) => [`${KIND_NAMES[kind]}s`, topics.filter((topic) => topic.kind === kind).map((topic) => [topic.id, topic.name])])
    .filter(([, options]) => options.length);

/** Values of a subscription's `health`, the worst first. */
export const HEALTH = ["failing", "attention", "healthy", "idle", "paused"];
/** Values of a subscription's `state`: whether events are sent to its endpoint. */
export const DELIVERY = ["admitting", "delayed", "probing", "paused"];

/** A subscription's health with the worst reason. */
export function health(one) {
  const worst = one.reasons?.[0];
  return h("div", { class: "health" }, badge(one.health), worst && h("p", { class: "muted" }, text(worst.text)));
}

/** Whether events are sent to a subscription's endpoint now. */
export const delivery = (one) => h("span", {}, badge(one.state), one.until && h("span", { class: "muted" }, ` until ${f.time(one.until)}`));

/** Reasons for a subscription's health, the worst first, each with the next step. */
export function reasonList(one) {
  const tones = { dropped: "bad", paused: "info" };
  const kind = (reason, at) => tones[reason.code] ?? (at === 0 && one.health === "failing" ? "bad" : "warn");
  return h("ul", { class: "plain" }, (one.reasons ?? []).map((reason, at) =>
    h("li", { class: `notice ${kind(reason, at)}` }, h("strong", {}, text(sentence(reason.text)), "."), reason.todo && [" What to do: ", text(reason.todo), "."])));
}

const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

/** Events given up, by reason; null if there are none. */
export function byReason(counts) {
  const all = Object.entries(counts ?? {}).sort((a, b) => b[1] - a[1]);
  return all.length ? all.map(([reason, count]) => `${f.words(reason)}: ${f.short(count)}`).join(", ") : null;
}

export const topicLink = (topic) => (topic.kind === "other" ? text(topic.name) : h("a", { href: to.topic(topic.id) }, text(topic.name)));

const NAMES_MAX = 3;

/** Links to the subscriptions of an endpoint: `{topic, name, id?}` each. */
export function subscriptionNames(all) {
  const href = (one) => (one.id ? to.subscription(one.id) : to.subscriptions({ topic: one.topic, q: one.name }));
  return h("ul", { class: "plain" },
    all.slice(0, NAMES_MAX).map((one) => h("li", {}, h("a", { href: href(one) }, text(one.topic ? `${one.topic}/${one.name}` : one.name)))),
    all.length > NAMES_MAX && h("li", { class: "muted" }, `and ${f.count(all.length - NAMES_MAX)} more`));
}

/** The button that ends the wait for a sick endpoint. */
export const resumeButton = (endpoint, done) => button("Resume deliveries now", async (event) => {
  if (await attempt(event.target, () => post("endpoints/admit", { endpoint }), "Deliveries go on")) done();
}, { kind: "small", label: `Resume deliveries now: ${endpoint}`, key: `admit:${endpoint}` });

/** A table of subscriptions as the statistics show them. */
export function subscriptionTable(caption, rows, { withTopic = true } = {}) {
  const columns = [
    { label: "Subscription", cell: (one) => h("a", { href: to.subscription(one.id) }, text(one.name)) },
    withTopic && { label: "Topic", cell: (one) => topicLink(subscriptionOf(one.id).topic) },
    { label: "Health", wide: true, cell: health },
    { label: "Delivery", cell: delivery },
    { label: "Endpoint", wide: true, cell: (one) => (one.endpoint ? brief(one.endpoint, mono) : "–") },
    { label: "Waiting", number: true, cell: (one) => f.short(one.waiting + (one.retrying ?? 0)) },
    { label: "Oldest", number: true, cell: (one) => (one.oldestUndeliveredSeconds ? f.seconds(one.oldestUndeliveredSeconds) : "–") },
    { label: "Delivered/s", number: true, cell: (one) => f.rate(one.deliveredPerSec) },
    { label: "Failed", number: true, cell: (one) => f.short(one.failed) },
    { label: "p95", number: true, cell: (one) => f.millis(one.latencyMs?.p95) },
  ];
  return table(caption, columns.filter(Boolean), rows);
}

/** A table of events as a search finds them. */
export function eventTable(caption, rows) {
  return table(
    caption,
    [
      { label: "Event", cell: (one) => h("a", { href: to.event(one.id) }, brief(one.id, mono)) },
      { label: "Accepted", cell: (one) => when(one.acceptedAt) },
      { label: "What", wide: true, cell: (one) => [brief(one.type), " ", h("span", { class: "muted" }, brief(one.subject))] },
      { label: "Topic", cell: (one) => text(one.topic) },
      { label: "State", cell: (one) => badge(one.state) },
      { label: "Attempts", number: true, cell: (one) => f.count(one.attempts) },
      { label: "Subscriptions", wide: true, cell: (one) => subscriptionsOf(one) },
    ],
    rows,
  );
}

const SHOWN_MAX = 4;
function subscriptionsOf(event) {
  const all = event.subscriptions ?? [];
  if (!all.length) return h("span", { class: "muted" }, "none");
  const more = all.length - SHOWN_MAX + (event.subscriptionsLeftOut ?? 0);
  const failedOnly = (one) => one.lastOutcome && one.lastOutcome !== "Success";
  return h(
    "ul",
    { class: "plain receivers" },
    all.slice(0, SHOWN_MAX).map((one) => h("li", {}, badge(one.state), " ", text(one.name), failedOnly(one) && h("span", { class: "muted" }, ` ${f.outcome(one.lastOutcome)}`))),
    more > 0 && h("li", { class: "muted" }, `and ${f.count(more)} more`),
  );
}

/** How an attempt ended. */
export const outcomeBadge = (outcome, status) => h("span", {}, badge(f.outcome(outcome, status), outcomeTone(outcome)), status && outcome === "Success" ? h("span", { class: "muted" }, ` ${status}`) : null);

export const OUTCOMES = [
  "Success", "NotFound", "Disabled", "Full", "Unauthorized", "BadRequest", "TimedOut", "Busy", "PayloadTooLarge", "Probation", "Canceled",
  "Aborted", "SocketError", "ResolutionError", "SessionQueueNotSupported", "Forbidden", "InvalidAzureFunctionDestination", "GenericError",
  "ProxyError",
];
export const STATES = ["delivered", "pending", "retrying", "deadLettered", "dropped", "unmatched", "mixed"];
export const REASONS = [
  "MaxDeliveryAttemptsExceeded", "TimeToLiveExceeded", "UndeliverableDueToHttpBadRequest", "UndeliverableDueToClientError",
  "SubscriptionDeleted", "StoredEventCorrupt", "SubscriptionExpired", "DeadLetterDestinationUnavailable", "DeadLetterDestinationRemoved",
  "TooManyHops",
];
export const SCHEMAS = [["EventGridSchema", "Event Grid"], ["CloudEventSchemaV1_0", "CloudEvents 1.0"], ["CustomEventSchema", "Custom, mapped"]];
export const SCHEMA_NAMES = { ...Object.fromEntries(SCHEMAS), CustomInputSchema: "Custom, as it came" };
