// Creates or changes a topic, a domain or a system topic, with every setting that one has.

import { fill, h } from "../dom.js";
import { code, disclosure, heading, load, loading, notice, toast } from "../ui.js";
import { Form, compact, part } from "../form.js";
import { Problem, armAll, armChange, armGet, server } from "../api.js";
import { KIND_NAMES, storageId, to, topicIdOf, topicOf } from "../ids.js";
import { SCHEMAS } from "../shared.js";
import * as f from "../format.js";

const KINDS = ["topics", "domains", "systemTopics"];
const MAPPED = [["id", false], ["topic", false], ["eventTime", false], ["eventType", true], ["subject", true], ["dataVersion", true]];

export default function page(ctx) {
  const existing = ctx.params.id ? topicOf(ctx.params.id) : null;
  const kind = existing?.kind ?? (KINDS.includes(ctx.query.get("kind")) ? ctx.query.get("kind") : "topics");
  const what = KIND_NAMES[kind].toLowerCase();
  ctx.title = existing ? `Edit ${existing.name}` : `New ${what}`;
  const box = h("div");
  load(ctx, box, async () => {
    const info = await server(ctx.signal);
    const [read, types] = await Promise.all([
      existing ? armGet(existing.id, ctx.signal) : null,
      kind === "systemTopics" ? armAll("/providers/Microsoft.EventGrid/topicTypes", { signal: ctx.signal }) : [],
    ]);
    return { info, read, types };
  }, (known) => build(ctx, { ...known, kind, what, existing }));
  const crumbs = existing ? [["Topics", to.topics({ kind: kind === "topics" ? "" : kind })], [existing.name, to.topic(existing.id)]] : [["Topics", to.topics({ kind: kind === "topics" ? "" : kind })]];
  const tabs = !existing && h("nav", { class: "tabs", "aria-label": "What to create" }, KINDS.map((one) => h("a", { href: to.newTopic({ kind: one }), "aria-current": one === kind ? "page" : null }, KIND_NAMES[one])));
  return [heading(ctx.title, { crumbs }), tabs, box];
}

function build(ctx, { info, read, types, kind, what, existing }) {
  const form = new Form();
  const resource = read?.resource ?? {};
  const p = resource.properties ?? {};
  const fixed = Boolean(existing);
  const isSystem = kind === "systemTopics";

  const name = form.text({ label: "Name", path: "name", value: existing?.name, required: true, disabled: fixed, help: isSystem ? "3 to 128 letters, digits or hyphens." : "3 to 50 letters, digits or hyphens." });
  const group = form.text({ label: "Resource group", path: "resourceGroup", value: existing?.group ?? info.azure.resourceGroup, required: true, disabled: fixed });
  const location = form.text({ label: "Location", path: "location", value: resource.location ?? info.azure.location, disabled: fixed });
  const profile = form.choice({ label: "Profile", path: "properties.postrider.profile", value: p.postrider?.profile ?? "", options: [["", `The server's (${info.profile})`], ...info.profiles.map((one) => [one, one])], help: "How deliveries are retried, unless a subscription says otherwise." });
  const tags = form.rows({
    legend: "Tags",
    path: "tags",
    values: Object.entries(resource.tags ?? {}),
    add: "Add a tag",
    make: (at, [tagName, tagValue] = ["", ""]) => {
      const left = form.text({ label: "Name", path: () => `${at()}.name`, value: tagName, required: true });
      const right = form.text({ label: "Value", path: () => `${at()}.value`, value: tagValue });
      return { element: h("div", { class: "columns" }, left.element, right.element), value: () => [left.value(), right.value() ?? ""] };
    },
  });
  const identity = form.choice({ label: "Identity", path: "identity.type", value: resource.identity?.type ?? "", options: [["", "None"], ["SystemAssigned", "System-assigned"], ["UserAssigned", "User-assigned"], ["SystemAssigned, UserAssigned", "Both"]], change: (value) => (identities.element.hidden = !value.includes("UserAssigned")) });
  const identities = form.lines({ label: "User-assigned identities", path: "identity.userAssignedIdentities", value: Object.keys(resource.identity?.userAssignedIdentities ?? {}), help: "One resource id per line." });
  identities.element.hidden = !(resource.identity?.type ?? "").includes("UserAssigned");
  const readIdentity = () => {
    const type = identity.value();
    if (!type) return undefined;
    const list = type.includes("UserAssigned") ? identities.value() ?? [] : [];
    return { type, userAssignedIdentities: list.length ? Object.fromEntries(list.map((one) => [one, {}])) : undefined };
  };

  const special = isSystem ? systemPart(form, { info, p, types, fixed }) : customPart(form, { p, resource, kind, fixed });
  const body = () => {
    const pairs = tags.value();
    return compact({
      location: location.value() ?? info.azure.location,
      tags: pairs.length ? Object.fromEntries(pairs) : undefined,
      identity: readIdentity(),
      ...special.beside(),
      properties: { ...special.value(), postrider: profile.value() ? { profile: profile.value() } : undefined },
    });
  };
  const preview = h("div");
  const details = disclosure("What will be sent", preview);
  details.addEventListener("toggle", () => {
    if (!details.open) return;
    try {
      fill(preview, code(f.pretty(body()), "Request body"));
    } catch (problem) {
      fill(preview, notice("bad", problem.message));
    }
  });

  const go = h("button", { type: "submit", class: "button primary" }, existing ? "Save" : `Create ${what}`);
  const submit = async (event) => {
    event.preventDefault();
    form.clear();
    go.disabled = true;
    fill(form.progress, loading("Saving"));
    try {
      const id = existing?.id ?? topicIdOf(info, group.value(), kind, name.value());
      const saved = await armChange("PUT", id, body(), { etag: read?.etag, create: !existing, signal: ctx.signal });
      toast(`${topicOf(id).name} is saved`);
      ctx.go(to.topic(saved?.id ?? id));
    } catch (problem) {
      if (problem.name === "AbortError" || problem.status === 401) return;
      form.show(spoken(problem, existing, what));
    } finally {
      fill(form.progress);
      go.disabled = false;
    }
  };
  return h(
    "form",
    { class: "form", novalidate: true, on: { submit } },
    form.summary,
    part("Basics", {}, h("div", { class: "columns" }, name.element, group.element, location.element, profile.element)),
    special.parts,
    part("Tags and identity", { open: Boolean(resource.tags || resource.identity) }, tags.element, identity.element, identities.element),
    details,
    form.progress,
    h("div", { class: "form-actions" }, go, h("a", { class: "button", href: existing ? to.topic(existing.id) : to.topics({ kind: kind === "topics" ? "" : kind }) }, "Cancel")),
  );
}

export function spoken(problem, existing, what) {
  if (problem.status !== 412) return problem;
  return existing
    ? new Problem(412, `Somebody else has changed this ${what} since it was opened here. Load it again to see what it is now.`)
    : new Problem(412, `name there is a ${what} of that name already`, { target: "name" });
}

function systemPart(form, { info, p, types, fixed }) {
  const list = h("datalist", { id: "topic-types" }, types.map((one) => h("option", { value: one.name }, one.properties?.displayName)));
  const type = form.text({ label: "Topic type", path: "properties.topicType", value: p.topicType ?? (types.some((one) => one.name === "Microsoft.Storage.StorageAccounts") ? "Microsoft.Storage.StorageAccounts" : ""), required: true, list: list.id, disabled: fixed });
  const accounts = h("datalist", { id: "sources" }, (info.storageAccounts ?? []).map((one) => h("option", { value: storageId(info, one) })));
  const source = form.text({ label: "Source", path: "properties.source", value: p.source, required: true, list: accounts.id, disabled: fixed, help: "The resource id of what the events come from, such as a storage account of this server." });
  return {
    parts: part("Source", {}, list, accounts, type.element, source.element),
    beside: () => ({}),
    value: () => ({ source: source.value(), topicType: type.value() }),
  };
}

function customPart(form, { p, resource, kind, fixed }) {
  const mapping = h("div");
  const mapped = new Map();
  const old = p.inputSchemaMapping?.properties ?? {};
  const showMapping = (schema) => {
    mapped.clear();
    if (schema === "EventGridSchema") return fill(mapping, h("p", { class: "help" }, "Events come in the schema of Event Grid and are not mapped."));
    const rows = MAPPED.map(([member, hasDefault]) => {
      const path = `properties.inputSchemaMapping.properties.${member}`;
      const source = form.text({ label: `${member}: field of the event`, path: `${path}.sourceField`, value: old[member]?.sourceField, disabled: fixed });
      const otherwise = hasDefault && schema === "CustomEventSchema" ? form.text({ label: `${member} if it is not there`, path: `${path}.defaultValue`, value: old[member]?.defaultValue, disabled: fixed }) : null;
      mapped.set(member, { source, otherwise });
      return h("div", { class: "columns" }, source.element, otherwise?.element);
    });
    fill(mapping, h("fieldset", { class: "group" }, h("legend", {}, "Mapping"), schema === "CloudEventSchemaV1_0" && h("p", { class: "help" }, "CloudEvents need no mapping; leave it empty unless you have one."), rows));
  };
  const schema = form.choice({ label: "Input schema", path: "properties.inputSchema", value: p.inputSchema ?? "EventGridSchema", options: SCHEMAS, disabled: fixed, change: showMapping, help: fixed ? "Fixed when it was created." : "Cannot be changed later." });
  showMapping(p.inputSchema ?? "EventGridSchema");
  const readMapping = () => {
    const members = {};
    for (const [member, { source, otherwise }] of mapped) {
      const one = compact({ sourceField: source.value(), defaultValue: otherwise?.value() });
      if (Object.keys(one).length) members[member] = one;
    }
    const needed = schema.value() === "CustomEventSchema";
    return mapped.size && (needed || Object.keys(members).length) ? { inputSchemaMappingType: "Json", properties: members } : undefined;
  };

  const keysOff = form.check({ label: "Refuse keys and SAS tokens", path: "properties.disableLocalAuth", value: p.disableLocalAuth, help: "Then only bearer tokens of clients may publish." });
  const network = form.choice({ label: "Public network access", path: "properties.publicNetworkAccess", value: p.publicNetworkAccess ?? "Enabled", options: [["Enabled", "Enabled"], ["Disabled", "Disabled"]] });
  const rules = form.rows({
    legend: "Allowed addresses",
    path: "properties.inboundIpRules",
    values: (p.inboundIpRules ?? []).map((rule) => rule.ipMask),
    add: "Add an address",
    none: "Everyone may publish from anywhere. Up to 128 addresses or networks, such as 10.0.0.0/8.",
    make: (at, mask) => {
      const field = form.text({ label: "Address or network", path: () => `${at()}.ipMask`, value: mask, required: true });
      return { element: field.element, value: () => ({ ipMask: field.value(), action: "Allow" }) };
    },
  });
  const tls = form.choice({ label: "Oldest TLS version", path: "properties.minimumTlsVersionAllowed", value: p.minimumTlsVersionAllowed ?? "", options: [["", "Not said"], ["1.0", "1.0"], ["1.1", "1.1"], ["1.2", "1.2"]] });
  const residency = form.choice({ label: "Data residency", path: "properties.dataResidencyBoundary", value: p.dataResidencyBoundary ?? "", options: [["", "Not said"], ["WithinGeopair", "Within geopair"], ["WithinRegion", "Within region"]], help: "Kept and shown, as in the cloud." });
  const sku = form.choice({ label: "SKU", path: "sku.name", value: resource.sku?.name ?? "Basic", options: [["Basic", "Basic"], ["Premium", "Premium"]] });
  const types = form.rows({
    legend: "Event types of this topic",
    path: "properties.eventTypeInfo.inlineEventTypes",
    values: Object.entries(p.eventTypeInfo?.inlineEventTypes ?? {}),
    add: "Add an event type",
    none: "Names that subscribers can choose from. Other types may be published all the same.",
    make: (at, [typeName, one] = ["", {}]) => {
      const fields = [["displayName", "Display name"], ["description", "Description"], ["documentationUrl", "Documentation URL"], ["dataSchemaUrl", "Data schema URL"]].map(([member, label]) => [member, form.text({ label, path: () => `${at()}.${member}`, value: one?.[member] })]);
      const key = form.text({ label: "Event type", path: () => `${at()}.name`, value: typeName, required: true });
      return { element: h("div", { class: "columns" }, key.element, fields.map(([, field]) => field.element)), value: () => [key.value(), compact(Object.fromEntries(fields.map(([member, field]) => [member, field.value()])))] };
    },
  });
  const domain = kind === "domains" && {
    create: form.check({ label: "Make a domain topic with its first subscription", path: "properties.autoCreateTopicWithFirstSubscription", value: p.autoCreateTopicWithFirstSubscription ?? true }),
    remove: form.check({ label: "Delete a domain topic with its last subscription", path: "properties.autoDeleteTopicWithLastSubscription", value: p.autoDeleteTopicWithLastSubscription ?? true }),
  };
  return {
    parts: [
      part("Events", {}, schema.element, mapping, domain && [domain.create.element, domain.remove.element]),
      part("Who may publish", { open: fixed }, keysOff.element, network.element, rules.element),
      part("Event types", { open: Boolean(p.eventTypeInfo) }, types.element),
      part("More", { open: false }, h("div", { class: "columns" }, tls.element, residency.element, sku.element)),
    ],
    beside: () => ({ sku: { name: sku.value() } }),
    value: () => {
      const masks = rules.value();
      const named = types.value();
      return {
        inputSchema: schema.control.value,
        inputSchemaMapping: readMapping(),
        disableLocalAuth: keysOff.value(),
        publicNetworkAccess: network.value(),
        inboundIpRules: masks.length ? masks : undefined,
        minimumTlsVersionAllowed: tls.value(),
        dataResidencyBoundary: residency.value(),
        eventTypeInfo: named.length ? { kind: "Inline", inlineEventTypes: Object.fromEntries(named) } : undefined,
        ...(domain ? { autoCreateTopicWithFirstSubscription: domain.create.value(), autoDeleteTopicWithLastSubscription: domain.remove.value() } : {}),
      };
    },
  };
}
