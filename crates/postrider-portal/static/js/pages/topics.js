// Topics, domains and system topics.

import { fill, h } from "../dom.js";
import { badge, button, empty, heading, linkButton, load, searchBox, table, text } from "../ui.js";
import { armList, get, nameContains, server } from "../api.js";
import { KIND_NAMES, everywhere, to, topicOf } from "../ids.js";
import { SCHEMA_NAMES } from "../shared.js";
import * as f from "../format.js";

const KINDS = ["topics", "domains", "systemTopics"];
const PLURALS = { topics: "Topics", domains: "Domains", systemTopics: "System topics" };

export default function page(ctx) {
  let kind = KINDS.includes(ctx.query.get("kind")) ? ctx.query.get("kind") : "topics";
  let search = ctx.query.get("q") ?? "";
  ctx.title = PLURALS[kind];
  const box = h("div", { "aria-live": "off" });
  const tabs = h("nav", { class: "tabs", "aria-label": "Kinds of topics" }, KINDS.map((one) => h("a", { href: to.topics({ kind: one === "topics" ? "" : one, q: search }), "aria-current": one === kind ? "page" : null }, PLURALS[one])));

  const again = () => load(ctx, box, async () => {
    const info = await server(ctx.signal);
    const page = await armList(everywhere(info, kind), { filter: nameContains(search), signal: ctx.signal });
    return { page, rates: await ratesOf(page.value, ctx.signal) };
  }, ({ page, rates }) => show(ctx, kind, search, page, rates));

  again();
  return [
    heading(PLURALS[kind], { actions: [linkButton(`New ${KIND_NAMES[kind].toLowerCase()}`, to.newTopic({ kind }), "primary")] }),
    tabs,
    h("div", { class: "toolbar", role: "search", "aria-label": "Narrow the list" }, searchBox("Search by name", search, (value) => {
      search = value;
      ctx.remember({ kind: kind === "topics" ? "" : kind, q: search });
      again();
    })),
    box,
  ];
}

/** Rates are a nicety: without them the list is still a list. */
async function ratesOf(resources, signal) {
  if (!resources.length) return new Map();
  try {
    const stats = await get("stats", { topics: resources.map((one) => one.name).join(","), top: 0 }, signal);
    return new Map((stats.topics ?? []).map((one) => [String(one.resourceId).toLowerCase(), one]));
  } catch (error) {
    if (error.name === "AbortError" || error.status === 401) throw error;
    return new Map();
  }
}

function show(ctx, kind, search, { value, next }, rates) {
  if (!value.length) {
    const what = KIND_NAMES[kind].toLowerCase();
    return search
      ? empty(`No ${what} has “${search}” in its name.`)
      : empty(`There is no ${what} yet.`, h("p", {}, linkButton(`Create a ${what}`, to.newTopic({ kind }), "primary")));
  }
  const rate = (one) => rates.get(one.id.toLowerCase());
  const special = kind === "systemTopics"
    ? [{ label: "Topic type", cell: (one) => text(one.properties.topicType) }, { label: "Source", wide: true, cell: (one) => text(one.properties.source) }]
    : [{ label: "Schema", cell: (one) => SCHEMA_NAMES[one.properties.inputSchema] ?? text(one.properties.inputSchema) }];
  const columns = [
    { label: "Name", cell: (one) => h("a", { href: to.topic(one.id) }, text(one.name)) },
    ...special,
    { label: "Resource group", cell: (one) => text(topicOf(one.id).group) },
    { label: "State", cell: (one) => badge(one.properties.provisioningState) },
    { label: "Published/s", number: true, cell: (one) => f.rate(rate(one)?.publishedPerSec) },
    { label: "Published", number: true, cell: (one) => f.short(rate(one)?.published) },
  ];
  const rows = [...value];
  const box = h("div");
  const draw = () => fill(box, table(PLURALS[kind], columns, rows), next && button("Show more", more));
  const more = async () => {
    const page = await armList(null, { next, signal: ctx.signal });
    for (const [id, one] of await ratesOf(page.value, ctx.signal)) rates.set(id, one);
    rows.push(...page.value);
    next = page.next;
    draw();
  };
  draw();
  return box;
}
