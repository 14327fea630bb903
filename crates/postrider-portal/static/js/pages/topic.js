// One topic, domain, domain topic or system topic.

import { fill, h } from "../dom.js";
import { attempt, badge, button, code, confirmDialog, copyButton, disclosure, empty, facts, heading, linkButton, load, mono, openDialog, pager, section, sectionWith, table, text, toast } from "../ui.js";
import { armChange, armGet, armList, armPost, get } from "../api.js";
import { KIND_NAMES, to, topicName, topicOf } from "../ids.js";
import { SCHEMA_NAMES, subscriptionTable } from "../shared.js";
import * as f from "../format.js";

const TOP = 50;

export default function page(ctx) {
  const topic = topicOf(ctx.params.id);
  const { kind } = topic;
  ctx.title = topic.name;
  const settings = h("div");
  const keys = h("div");
  const domainTopics = h("div");
  const subscriptions = h("div");
  const publishes = kind === "topics" || kind === "domains";

  load(ctx, settings, () => armGet(topic.id, ctx.signal), ({ resource }) => show(resource, topic));
  listSubscriptions(ctx, topic, subscriptions);
  if (kind === "domains") listDomainTopics(ctx, topic, domainTopics);
  if (publishes) hideKeys(ctx, topic, keys);

  const remove = () => confirmDialog({
    title: `Delete ${KIND_NAMES[kind].toLowerCase()} ${topic.name}`,
    text: "Its subscriptions go with it. Events that wait for them are not delivered any more: those of subscriptions with a dead-letter destination are written there.",
    action: "Delete",
    word: topic.name,
    work: async () => {
      await armChange("DELETE", topic.id, undefined, { signal: ctx.signal });
      toast(`${topic.name} is deleted`);
      ctx.go(topic.domain ? to.topic(topic.domain.id) : to.topics({ kind: kind === "topics" ? "" : kind }));
    },
  });
  const crumbs = topic.domain
    ? [["Domains", to.topics({ kind: "domains" })], [topic.domain.name, to.topic(topic.domain.id)]]
    : [[kind === "domains" ? "Domains" : kind === "systemTopics" ? "System topics" : "Topics", to.topics({ kind: kind === "topics" ? "" : kind })]];
  return [
    heading(topic.name, {
      crumbs,
      mark: h("span", { class: "kind" }, KIND_NAMES[kind]),
      actions: [
        publishes && linkButton("Send an event", to.send({ topic: topic.id })),
        kind !== "domainTopics" && linkButton("Edit", to.topic(topic.id, "/edit")),
        button("Delete", remove, { kind: "danger" }),
      ].filter(Boolean),
    }),
    h("div", { class: "split" }, section("Settings", settings), publishes && section("Access keys", keys)),
    kind === "domains" && sectionWith("Domain topics", button("New domain topic", () => addDomainTopic(ctx, topic, domainTopics)), domainTopics),
    sectionWith(
      "Subscriptions",
      [linkButton("Filter lab", to.lab({ topic: topic.id })), linkButton("New subscription", to.newSubscription({ topic: topic.id }), "primary")],
      subscriptions,
    ),
    h("p", {}, h("a", { href: to.events({ topic: topicName(topic) }) }, "Events of this topic"), " · ", h("a", { href: to.live({ topic: topicName(topic) }) }, "Live stream")),
  ];
}

function show(resource, topic) {
  const p = resource.properties ?? {};
  const rules = p.inboundIpRules ?? [];
  const tags = Object.entries(resource.tags ?? {});
  const mapped = Object.entries(p.inputSchemaMapping?.properties ?? {}).filter(([, one]) => one?.sourceField || one?.defaultValue);
  return [
    facts([
      ["State", badge(p.provisioningState)],
      ["Endpoint", p.endpoint ? mono(p.endpoint) : null],
      ["Input schema", p.inputSchema ? SCHEMA_NAMES[p.inputSchema] ?? text(p.inputSchema) : null],
      ["Mapping", mapped.length ? h("ul", { class: "plain" }, mapped.map(([name, one]) => h("li", {}, `${name} ← `, one.sourceField ? mono(one.sourceField) : "", one.defaultValue ? ` or “${one.defaultValue}”` : ""))) : null],
      ["Source", p.source ? mono(p.source) : null],
      ["Topic type", p.topicType ? text(p.topicType) : null],
      ["Profile", p.postrider?.profile ? text(p.postrider.profile) : topic.kind === "domainTopics" ? null : "the server's"],
      ["Publish with keys", p.endpoint ? (p.disableLocalAuth ? "no, tokens only" : "yes") : null],
      ["Public network", p.publicNetworkAccess ? badge(p.publicNetworkAccess) : null],
      ["Allowed addresses", p.publicNetworkAccess ? (rules.length ? h("ul", { class: "plain" }, rules.map((rule) => h("li", {}, mono(rule.ipMask)))) : "all") : null],
      ["Domain topics", p.autoCreateTopicWithFirstSubscription === undefined ? null : `made with the first subscription: ${p.autoCreateTopicWithFirstSubscription ? "yes" : "no"}; deleted with the last: ${p.autoDeleteTopicWithLastSubscription ? "yes" : "no"}`],
      ["Location", resource.location ? text(resource.location) : null],
      ["Tags", tags.length ? h("ul", { class: "plain" }, tags.map(([name, value]) => h("li", {}, text(name), " = ", text(value)))) : null],
    ]),
    disclosure("Resource as JSON", mono(resource.id), code(f.pretty(resource), "Resource")),
  ];
}

async function listSubscriptions(ctx, topic, box, skip = 0) {
  // Subscriptions of a domain and of its topics come together; a domain topic shows its own.
  const own = (one) => !topic.domain || one.id.toLowerCase().startsWith(`${topic.id.toLowerCase()}/`);
  await load(ctx, box, () => get("subscriptions", { topic: topicName(topic), top: TOP, skip }, ctx.signal), ({ value, total }) => {
    const rows = value.filter(own);
    if (!rows.length && skip === 0) return empty("Nobody subscribes yet: what is published is not delivered to anyone.");
    return [
      subscriptionTable(`Subscriptions of ${topic.name}`, rows, { withTopic: topic.kind === "domains" }),
      pager({ skip, top: TOP, total, go: (to) => listSubscriptions(ctx, topic, box, to) }),
    ];
  });
}

async function listDomainTopics(ctx, domain, box) {
  await load(ctx, box, () => armList(`${domain.id}/topics`, { signal: ctx.signal }), ({ value, next }) => {
    if (!value.length) return empty("This domain has no topics yet.");
    const rows = [...value];
    const inner = h("div");
    const more = async () => {
      const page = await armList(null, { next, signal: ctx.signal });
      rows.push(...page.value);
      next = page.next;
      draw();
    };
    const draw = () => fill(inner, table(`Topics of domain ${domain.name}`, [
      { label: "Name", cell: (one) => h("a", { href: to.topic(one.id) }, text(one.name)) },
      { label: "State", cell: (one) => badge(one.properties?.provisioningState ?? "Succeeded") },
    ], rows), next && button("Show more", more));
    draw();
    return inner;
  });
}

function addDomainTopic(ctx, domain, box) {
  openDialog("New domain topic", (close) => {
    const input = h("input", { id: "domain-topic-name", type: "text", autocomplete: "off", spellcheck: "false", "aria-describedby": "domain-topic-error" });
    const trouble = h("p", { class: "error", id: "domain-topic-error", role: "alert" });
    const submit = async (event) => {
      event.preventDefault();
      const name = input.value.trim();
      if (!name) return fill(trouble, "Give it a name.");
      try {
        await armChange("PUT", `${domain.id}/topics/${name}`, {}, { create: true, signal: ctx.signal });
        close();
        toast(`${name} is created`);
        listDomainTopics(ctx, domain, box);
      } catch (error) {
        fill(trouble, error.status === 412 ? "There is one of that name already." : error.message);
        input.focus();
      }
    };
    return h("form", { on: { submit } }, h("div", { class: "field" }, h("label", { for: input.id }, "Name"), input, trouble), h("div", { class: "dialog-actions" }, button("Cancel", close), button("Create", null, { kind: "primary", type: "submit" })));
  });
}

/** Keys are asked for only when somebody wants to see them, and forgotten with the page. */
function hideKeys(ctx, topic, box) {
  const reveal = async (event) => {
    const keys = await attempt(event.target, () => armPost(topic.id, "listKeys", {}, ctx.signal));
    if (keys) showKeys(ctx, topic, box, keys);
  };
  fill(box, h("p", { class: "muted" }, "Whoever has a key can publish."), button("Show keys", reveal));
}

function showKeys(ctx, topic, box, keys) {
  const line = (name) => h("div", { class: "key" },
    h("span", { class: "key-name" }, name), h("code", { class: "secret" }, keys[name]), copyButton(keys[name], `Copy ${name}`),
    button(`Regenerate ${name}`, () => confirmDialog({
      title: `Regenerate ${name}`,
      text: "Publishers that use this key are refused from then on.",
      action: "Regenerate",
      work: async () => {
        showKeys(ctx, topic, box, await armPost(topic.id, "regenerateKey", { keyName: name }, ctx.signal));
        toast(`${name} is new`);
      },
    }), { kind: "small" }));
  fill(box, line("key1"), line("key2"), button("Hide keys", () => hideKeys(ctx, topic, box)));
}
