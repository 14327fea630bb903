// What several pages show alike.

import { h } from "./dom.js";
import { badge, brief, mono, outcomeTone, table, text, when } from "./ui.js";
import { armAll } from "./api.js";
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

export const HEALTH = ["admitting", "delayed", "probing", "paused"];

export function health(one) {
  const more = [];
  if (one.cause) more.push(f.words(one.cause));
  if (one.until) more.push(`until ${f.time(one.until)}`);
  return h("span", { class: "health" }, badge(one.state), more.length > 0 && h("span", { class: "muted" }, ` ${more.join(", ")}`));
}

export const topicLink = (topic) => (topic.kind === "other" ? text(topic.name) : h("a", { href: to.topic(topic.id) }, text(topic.name)));

/** A table of subscriptions as the statistics show them. */
export function subscriptionTable(caption, rows, { withTopic = true } = {}) {
  const columns = [
    { label: "Subscription", cell: (one) => h("a", { href: to.subscription(one.id) }, text(one.name)) },
    withTopic && { label: "Topic", cell: (one) => topicLink(subscriptionOf(one.id).topic) },
    { label: "Health", cell: health },
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
    all.slice(0, SHOWN_MAX).map((one) => h("li", {}, badge(one.state), " ", text(one.name), failedOnly(one) && h("span", { class: "muted" }, ` ${f.words(one.lastOutcome)}`))),
    more > 0 && h("li", { class: "muted" }, `and ${f.count(more)} more`),
  );
}

export const outcomeBadge = (outcome, status) => h("span", {}, badge(outcome, outcomeTone(outcome)), status ? h("span", { class: "muted" }, ` ${status}`) : null);

export const OUTCOMES = [
  "Success", "NotFound", "Disabled", "Full", "Unauthorized", "BadRequest", "TimedOut", "Busy", "PayloadTooLarge", "Probation", "Canceled",
  "Aborted", "SocketError", "ResolutionError", "SessionQueueNotSupported", "Forbidden", "InvalidAzureFunctionDestination", "GenericError",
];
export const STATES = ["delivered", "pending", "retrying", "deadLettered", "dropped", "unmatched", "mixed"];
export const REASONS = [
  "MaxDeliveryAttemptsExceeded", "TimeToLiveExceeded", "UndeliverableDueToHttpBadRequest", "UndeliverableDueToClientError",
  "SubscriptionDeleted", "StoredEventCorrupt", "SubscriptionExpired", "DeadLetterDestinationUnavailable", "DeadLetterDestinationRemoved",
];
export const SCHEMAS = [["EventGridSchema", "Event Grid"], ["CloudEventSchemaV1_0", "CloudEvents 1.0"], ["CustomEventSchema", "Custom, mapped"]];
export const SCHEMA_NAMES = { ...Object.fromEntries(SCHEMAS), CustomInputSchema: "Custom, as it came" };
