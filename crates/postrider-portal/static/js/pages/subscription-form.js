// Creates or changes a subscription, with every setting that one has.

import { fill, h } from "../dom.js";
import { button, code, disclosure, heading, load, loading, mono, notice, attempt, toast } from "../ui.js";
import { Form, compact, part } from "../form.js";
import { filterEditor } from "../filter.js";
import { armChange, armGet, armPost, server } from "../api.js";
import { storageId, subscriptionId, subscriptionOf, to, topicOf } from "../ids.js";
import { SCHEMA_NAMES, allTopics, topicOptions } from "../shared.js";
import { takeFilter } from "./lab.js";
import { spoken } from "./topic-form.js";
import * as f from "../format.js";

/** What stands in for a secret in an answer. Sent back, it means the one that is already there. */
const HIDDEN = "Hidden";
const HEADERS_MAX = 10;
/** The storage account that every server has unless its configuration takes it away. */
const LOCAL_ACCOUNT = "local";

const KINDS = [
  ["WebHook", "Webhook"], ["AzureFunction", "Azure function"], ["EventHub", "Event hub"], ["ServiceBusQueue", "Service Bus queue"],
  ["ServiceBusTopic", "Service Bus topic"], ["StorageQueue", "Storage queue"], ["HybridConnection", "Hybrid connection"],
];
const RESOURCE_HELP = {
  AzureFunction: "…/providers/Microsoft.Web/sites/<app>/functions/<name>",
  EventHub: "…/providers/Microsoft.EventHub/namespaces/<name>/eventhubs/<name>",
  ServiceBusQueue: "…/providers/Microsoft.ServiceBus/namespaces/<name>/queues/<name>",
  ServiceBusTopic: "…/providers/Microsoft.ServiceBus/namespaces/<name>/topics/<name>",
  HybridConnection: "…/providers/Microsoft.Relay/namespaces/<name>/hybridConnections/<name>",
  StorageQueue: "…/providers/Microsoft.Storage/storageAccounts/<name>",
};
const hasBatches = (kind) => kind === "WebHook" || kind === "AzureFunction";
const hasHeaders = (kind) => kind !== "StorageQueue";

export default function page(ctx) {
  const existing = ctx.params.id ? subscriptionOf(ctx.params.id) : null;
  ctx.title = existing ? `Edit ${existing.name}` : "New subscription";
  const box = h("div");
  load(ctx, box, async () => {
    const info = await server(ctx.signal);
    const [read, topics] = await Promise.all([existing ? armGet(existing.id, ctx.signal) : null, existing ? [] : allTopics(info, ctx.signal)]);
    return { info, read, topics };
  }, (known) => build(ctx, { ...known, existing }));
  const crumbs = [["Subscriptions", to.subscriptions()]];
  if (existing) crumbs.push([existing.name, to.subscription(existing.id)]);
  return [heading(ctx.title, { crumbs }), box];
}

function build(ctx, { info, read, topics, existing }) {
  const form = new Form();
  const resource = read?.resource ?? {};
  const p = resource.properties ?? {};
  const given = ctx.query.get("topic");
  const asked = given ? topicOf(given) : null;

  const basics = basicsPart(form, ctx, { info, p, topics, existing, asked });
  const destination = destinationPart(form, ctx, { info, p, existing });
  const filter = filterEditor(form, { path: "properties.filter", filter: p.filter ?? takeFilter() ?? {} });
  const retry = retryPart(form, { info, p });
  const letters = lettersPart(form, { info, p });

  const body = async () => compact({
    properties: {
      ...(await destination.value()),
      filter: filter.value(),
      ...basics.value(),
      ...retry.value(),
      ...letters.value(),
    },
  });
  const preview = h("div");
  const details = disclosure("What will be sent", preview);
  details.addEventListener("toggle", async () => {
    if (!details.open) return;
    try {
      fill(preview, code(f.pretty(masked(await body())), "Request body"));
    } catch (problem) {
      fill(preview, notice("bad", problem.message));
    }
  });

  const go = h("button", { type: "submit", class: "button primary" }, existing ? "Save" : "Create subscription");
  const submit = async (event) => {
    event.preventDefault();
    form.clear();
    go.disabled = true;
    fill(form.progress, loading("Saving"));
    try {
      const id = existing?.id ?? subscriptionId(basics.topic(), basics.name());
      const whole = await body();
      // A destination that this API does not know stays as it is: only a change can leave it out.
      const method = destination.isForeign ? "PATCH" : "PUT";
      const saved = await armChange(method, id, whole, { etag: read?.etag, create: !existing, target: destination.endpointPath(), signal: ctx.signal, report: (state, operation) => report(form, id, state, operation) });
      toast(`${subscriptionOf(id).name} is saved`);
      ctx.go(to.subscription(saved?.id ?? id));
    } catch (problem) {
      if (problem.name === "AbortError" || problem.status === 401) return;
      form.show(spoken(problem, existing, "subscription"));
    } finally {
      if (!ctx.signal.aborted) fill(form.progress);
      go.disabled = false;
    }
  };
  return h(
    "form",
    { class: "form", novalidate: true, on: { submit } },
    form.summary,
    part("Basics", {}, basics.element),
    part("Destination", {}, destination.element),
    part("Filter", { open: !existing || Boolean(p.filter) }, filter.element),
    part("Retry", { open: Boolean(existing) }, retry.element),
    part("Dead letters", { open: letters.isSet || letters.isWarned }, letters.element),
    part("Labels, expiry and schema", { open: Boolean(p.labels?.length || p.expirationTimeUtc) }, basics.more),
    details,
    form.progress,
    h("div", { class: "form-actions" }, go, h("a", { class: "button", href: existing ? to.subscription(existing.id) : asked ? to.topic(asked.id) : to.subscriptions() }, "Cancel")),
  );
}

/** How far the handshake with a webhook is. */
function report(form, id, state, operation) {
  const transcript = h("a", { href: to.handshake(operation) }, "See the handshake");
  if (state === "AwaitingManualAction") {
    fill(form.progress, notice("warn", h("p", {}, h("strong", {}, "Awaiting manual validation. "), "The webhook did not answer with the validation code. It was sent a URL: somebody must open it before its time is up; the handshake says when that is. The subscription is made as soon as that happens, whether this page stays open or not."), h("p", {}, transcript)));
  } else {
    fill(form.progress, notice("info", loading("The webhook is asked whether it wants events"), transcript));
  }
}

/** What is shown on the screen shows no secret. */
function masked(body) {
  const copy = JSON.parse(JSON.stringify(body));
  const destination = copy.properties.destination ?? copy.properties.deliveryWithResourceIdentity?.destination;
  for (const one of destination?.properties?.deliveryAttributeMappings ?? []) if (one.properties?.isSecret) one.properties.value = "•••";
  return copy;
}

function basicsPart(form, ctx, { info, p, topics, existing, asked }) {
  const name = form.text({ label: "Name", path: "name", value: existing?.name, required: true, disabled: Boolean(existing), help: "3 to 64 letters, digits or hyphens." });
  const domainTopic = form.text({ label: "Domain topic", path: "domainTopic", value: asked?.domain ? asked.name : "", help: "Empty: all events of the domain." });
  const fixed = existing?.topic;
  const topicList = fixed ? [[fixed.id, fixed.name]] : topicOptions(topics);
  const first = fixed?.id ?? asked?.domain?.id ?? asked?.id ?? topics[0]?.id ?? "";
  const sameId = topics.find((one) => one.id.toLowerCase() === first.toLowerCase())?.id ?? first;
  const choose = (id) => (domainTopic.element.hidden = Boolean(fixed) || topicOf(id).kind !== "domains");
  const topic = form.choice({ label: "Topic", path: "topic", value: sameId, options: topicList.length ? topicList : [["", "There is no topic yet"]], disabled: Boolean(fixed), change: choose });
  choose(sameId);

  const profile = form.choice({ label: "Profile", path: "properties.postrider.profile", value: p.postrider?.profile ?? "", options: [["", `That of the topic or server (${info.profile})`], ...info.profiles.map((one) => [one, one])], help: "How deliveries are retried: waits, limits, which answers are final." });
  const schema = form.choice({ label: "Delivery schema", path: "properties.eventDeliverySchema", value: p.eventDeliverySchema ?? "", options: [["", "As the topic takes events"], ...["EventGridSchema", "CloudEventSchemaV1_0", "CustomInputSchema"].map((one) => [one, SCHEMA_NAMES[one]])] });
  const labels = form.lines({ label: "Labels", path: "properties.labels", value: p.labels ?? [], help: "One per line." });
  const expiry = form.text({ label: `Expires (${f.timeZone})`, type: "datetime-local", path: "properties.expirationTimeUtc", value: f.toLocalField(p.expirationTimeUtc), read: (input) => {
    if (input.validity.badInput) throw new Error("is not a time");
    // The field knows no seconds: what was not touched stays to the second.
    if (input.value === f.toLocalField(p.expirationTimeUtc)) return p.expirationTimeUtc ?? undefined;
    return f.fromLocalField(input.value) ?? undefined;
  } });
  return {
    element: [h("div", { class: "columns" }, topic.element, domainTopic.element, name.element, profile.element)],
    more: [labels.element, h("div", { class: "columns" }, expiry.element, schema.element)],
    name: () => name.value(),
    topic: () => {
      const chosen = topicOf(topic.control.value);
      const inside = chosen.kind === "domains" ? domainTopic.value() : null;
      return inside ? topicOf(`${chosen.id}/topics/${inside}`) : chosen;
    },
    value: () => ({
      labels: labels.value(),
      expirationTimeUtc: expiry.value(),
      eventDeliverySchema: schema.value(),
      postrider: profile.value() ? { profile: profile.value() } : undefined,
    }),
  };
}

function destinationPart(form, ctx, { info, p, existing }) {
  const withIdentity = p.deliveryWithResourceIdentity;
  const old = p.destination ?? withIdentity?.destination ?? null;
  if (old && !KINDS.some(([kind]) => kind === old.endpointType)) {
    return {
      isForeign: true,
      endpointPath: () => null,
      element: [notice("info", "This destination was set up over the IoT Edge API or the configuration and can be changed only there."), code(f.pretty(old), "Destination")],
      value: () => ({}),
    };
  }
  const place = h("div");
  let current = null;
  const identity = identityFields(form, "properties.deliveryWithResourceIdentity.identity", withIdentity?.identity, "Deliver with the identity of the topic");
  const base = () => (identity.type() ? "properties.deliveryWithResourceIdentity.destination" : "properties.destination");
  const show = (kind) => {
    const same = old?.endpointType === kind ? old.properties ?? {} : {};
    current = destinationFields(form, ctx, { info, kind, d: same, base, existing: old?.endpointType === kind ? existing : null });
    fill(place, current.element);
    identity.element.hidden = kind === "WebHook" || kind === "AzureFunction" || kind === "HybridConnection";
  };
  const kind = form.choice({ label: "Kind", path: () => `${base()}.endpointType`, value: old?.endpointType ?? "WebHook", options: KINDS, change: show });
  show(old?.endpointType ?? "WebHook");
  return {
    isForeign: false,
    /** The member that says where events go: a handshake that fails is about it. */
    endpointPath: () => `${base()}.properties.${kind.control.value === "WebHook" ? "endpointUrl" : "resourceId"}`,
    element: [kind.element, place, identity.element],
    value: async () => {
      const destination = { endpointType: kind.value(), properties: await current.value() };
      const who = identity.element.hidden ? undefined : identity.value();
      return who ? { deliveryWithResourceIdentity: { identity: who, destination } } : { destination };
    },
  };
}

function identityFields(form, path, given, label) {
  const user = form.text({ label: "User-assigned identity", path: `${path}.userAssignedIdentity`, value: given?.userAssignedIdentity, help: "…/providers/Microsoft.ManagedIdentity/userAssignedIdentities/<name>" });
  const type = form.choice({ label, path: `${path}.type`, value: given?.type ?? "", options: [["", "No identity"], ["SystemAssigned", "System-assigned"], ["UserAssigned", "User-assigned"]], change: (value) => (user.element.hidden = value !== "UserAssigned") });
  user.element.hidden = given?.type !== "UserAssigned";
  return {
    element: h("div", { class: "columns" }, type.element, user.element),
    type: () => type.control.value,
    value: () => (type.value() ? { type: type.value(), userAssignedIdentity: type.value() === "UserAssigned" ? user.value() : undefined } : undefined),
  };
}

function destinationFields(form, ctx, { info, kind, d, base, existing }) {
  const at = (member) => () => `${base()}.properties.${member}`;
  const parts = [];
  const readers = [];
  const take = (member, field) => {
    parts.push(field.element);
    readers.push(async () => [member, await field.value()]);
  };
  if (kind === "WebHook") {
    // Its query may be a secret: it is read only when asked for, or when the rest is saved.
    const kept = existing && (d.endpointUrl || d.endpointBaseUrl);
    const reveal = kept && button("Show current", async (event) => {
      const answer = await attempt(event.target, () => armPost(existing.id, "getFullUrl", {}, ctx.signal));
      if (answer) {
        url.control.value = answer.endpointUrl;
        url.control.focus();
      }
    }, { kind: "small" });
    const url = form.text({ label: "URL", path: at("endpointUrl"), type: "url", placeholder: kept || "https://", required: !kept, beside: reveal, help: kept ? "Empty: the current URL stays." : "It is asked whether it wants events before any is sent." });
    parts.push(url.element);
    readers.push(async () => ["endpointUrl", url.value() ?? (await armPost(existing.id, "getFullUrl", {}, ctx.signal)).endpointUrl]);
    const tenant = form.text({ label: "Azure AD tenant", path: at("azureActiveDirectoryTenantId"), value: d.azureActiveDirectoryTenantId });
    const application = form.text({ label: "Azure AD application", path: at("azureActiveDirectoryApplicationIdOrUri"), value: d.azureActiveDirectoryApplicationIdOrUri });
    const tls = form.choice({ label: "Oldest TLS version", path: at("minimumTlsVersionAllowed"), value: d.minimumTlsVersionAllowed ?? "", options: [["", "Not said"], ["1.0", "1.0"], ["1.1", "1.1"], ["1.2", "1.2"]] });
    parts.push(h("div", { class: "columns" }, tenant.element, application.element, tls.element));
    readers.push(() => ["azureActiveDirectoryTenantId", tenant.value()], () => ["azureActiveDirectoryApplicationIdOrUri", application.value()], () => ["minimumTlsVersionAllowed", tls.value()]);
  } else {
    take("resourceId", form.text({ label: "Resource id", path: at("resourceId"), value: d.resourceId, required: true, help: RESOURCE_HELP[kind] }));
  }
  if (kind === "StorageQueue") {
    take("queueName", form.text({ label: "Queue", path: at("queueName"), value: d.queueName, required: true }));
    take("queueMessageTimeToLiveInSeconds", form.number({ label: "Time to live of messages, in seconds", path: at("queueMessageTimeToLiveInSeconds"), value: d.queueMessageTimeToLiveInSeconds, min: -1, max: 2147483647 }));
  }
  if (hasBatches(kind)) {
    const defaults = info.batchDefaults;
    const events = form.number({ label: "Events per batch, at most", path: at("maxEventsPerBatch"), value: d.maxEventsPerBatch, min: 1, max: Math.max(5000, d.maxEventsPerBatch ?? 0), placeholder: "1", help: `${defaults.maxEventsPerBatch} if only a size is set.` });
    const size = form.number({ label: "Preferred batch size in KB", path: at("preferredBatchSizeInKilobytes"), value: d.preferredBatchSizeInKilobytes, min: 1, max: Math.max(1024, d.preferredBatchSizeInKilobytes ?? 0), placeholder: String(defaults.preferredBatchSizeInKilobytes) });
    parts.push(h("div", { class: "columns" }, events.element, size.element));
    readers.push(() => ["maxEventsPerBatch", events.value()], () => ["preferredBatchSizeInKilobytes", size.value()]);
  }
  if (hasHeaders(kind)) {
    const word = kind === "EventHub" || kind.startsWith("ServiceBus") ? "Delivery properties" : "Delivery headers";
    const rows = form.rows({
      legend: word,
      path: at("deliveryAttributeMappings"),
      values: d.deliveryAttributeMappings ?? [],
      add: "Add one",
      none: `Up to ${HEADERS_MAX}, each with a fixed value or with one out of the event.`,
      make: (row, value) => headerRow(form, row, value),
    });
    parts.push(rows.element);
    readers.push(() => {
      const list = rows.value();
      return ["deliveryAttributeMappings", list.length ? list : undefined];
    });
  }
  return {
    element: h("div", {}, parts),
    value: async () => {
      const members = {};
      for (const read of readers) {
        const [member, value] = await read();
        members[member] = value;
      }
      return members;
    },
  };
}

function headerRow(form, at, given = {}) {
  const q = given.properties ?? {};
  const isKept = Boolean(q.isSecret) && q.value === HIDDEN;
  const firstKind = given.type === "Dynamic" ? "Dynamic" : q.isSecret ? "Secret" : "Static";
  const place = h("div", { class: "field-slot" });
  let value = null;
  const show = (kind) => {
    if (kind === "Dynamic") value = form.text({ label: "Field of the event", path: () => `${at()}.properties.sourceField`, value: q.sourceField, placeholder: "data.customer", required: true });
    else if (kind === "Secret") value = form.text({ label: "Value", path: () => `${at()}.properties.value`, type: "password", keepSpaces: true, required: !isKept, placeholder: isKept ? "unchanged" : null, help: isKept ? "Empty: it stays as it is." : "It is never shown again." });
    else value = form.text({ label: "Value", path: () => `${at()}.properties.value`, value: q.isSecret ? "" : q.value, keepSpaces: true, optional: false, read: (input) => input.value });
    fill(place, value.element);
  };
  const name = form.text({ label: "Name", path: () => `${at()}.name`, value: given.name, required: true });
  const kind = form.choice({ label: "Kind", path: () => `${at()}.type`, value: firstKind, options: [["Static", "Static"], ["Secret", "Static, secret"], ["Dynamic", "Dynamic"]], change: show });
  show(firstKind);
  return {
    element: h("div", { class: "advanced" }, name.element, kind.element, place),
    value: () => {
      const chosen = kind.value();
      if (chosen === "Dynamic") return { name: name.value(), type: "Dynamic", properties: { sourceField: value.value() } };
      const isSecret = chosen === "Secret";
      return { name: name.value(), type: "Static", properties: { value: value.value() ?? HIDDEN, isSecret } };
    },
  };
}

function retryPart(form, { p }) {
  const attempts = form.number({ label: "Attempts, at most", path: "properties.retryPolicy.maxDeliveryAttempts", value: p.retryPolicy?.maxDeliveryAttempts, min: 1, max: 30, placeholder: "30" });
  const minutes = form.number({ label: "Time to live in minutes", path: "properties.retryPolicy.eventTimeToLiveInMinutes", value: p.retryPolicy?.eventTimeToLiveInMinutes, min: 1, max: 1440, placeholder: "1440" });
  return {
    element: [h("p", { class: "help" }, "Whichever ends first gives an event up. When attempts fall is said by the profile."), h("div", { class: "columns" }, attempts.element, minutes.element)],
    value: () => {
      const policy = compact({ maxDeliveryAttempts: attempts.value(), eventTimeToLiveInMinutes: minutes.value() });
      return { retryPolicy: Object.keys(policy).length ? policy : undefined };
    },
  };
}

function lettersPart(form, { info, p }) {
  const withIdentity = p.deadLetterWithResourceIdentity;
  const old = (p.deadLetterDestination ?? withIdentity?.deadLetterDestination)?.properties;
  const accounts = h("datalist", { id: "letter-accounts" }, (info.storageAccounts ?? []).map((one) => h("option", { value: storageId(info, one) }, one)));
  const identity = identityFields(form, "properties.deadLetterWithResourceIdentity.identity", withIdentity?.identity, "Write with the identity of the topic");
  const base = () => (identity.type() ? "properties.deadLetterWithResourceIdentity.deadLetterDestination" : "properties.deadLetterDestination");
  const offered = info.storageAccounts?.includes(LOCAL_ACCOUNT) ? LOCAL_ACCOUNT : info.storageAccounts?.[0];
  const account = form.text({ label: "Storage account", path: () => `${base()}.properties.resourceId`, value: old?.resourceId ?? (offered ? storageId(info, offered) : ""), list: accounts.id, required: true, help: "A resource id. The list has those that this server knows." });
  const container = form.text({ label: "Container", path: () => `${base()}.properties.blobContainerName`, value: old?.blobContainerName ?? "deadletters", required: true });
  const rest = h("div", {}, accounts, h("div", { class: "columns" }, account.element, container.element), identity.element);
  const on = form.check({ label: "Keep events that are given up", path: "properties.deadLetterDestination", value: Boolean(old), help: info.deadLetterDefault ? ["Without it they go to the default of this server: ", mono(info.deadLetterDefault), "."] : null });
  const isWarned = () => !info.deadLetterDefault && !on.control.checked;
  const keep = offered && button(`Keep them in the account "${offered}"`, () => {
    on.control.checked = true;
    account.control.value = storageId(info, offered);
    show();
    container.control.focus();
  }, { kind: "small", key: "keep-letters" });
  const warning = notice("warn", h("p", {}, h("strong", {}, "Events that cannot be delivered will be dropped. "), "No place is chosen that keeps them, and this server has no default."), keep && h("p", {}, keep));
  const show = () => {
    rest.hidden = !on.control.checked;
    warning.hidden = !isWarned();
  };
  on.control.addEventListener("change", show);
  show();
  return {
    isSet: Boolean(old),
    isWarned: isWarned(),
    element: [warning, on.element, rest],
    value: () => {
      if (!on.value()) return {};
      const place = { endpointType: "StorageBlob", properties: { resourceId: account.value(), blobContainerName: container.value() } };
      const who = identity.value();
      return who ? { deadLetterWithResourceIdentity: { identity: who, deadLetterDestination: place } } : { deadLetterDestination: place };
    },
  };
}
