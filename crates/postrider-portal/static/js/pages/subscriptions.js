// All subscriptions and how they are.

import { h } from "../dom.js";
import { empty, follow, heading, labelled, linkButton, pager, searchBox, select, spoken } from "../ui.js";
import { get } from "../api.js";
import { DELIVERY, HEALTH, subscriptionTable } from "../shared.js";
import { to } from "../ids.js";
import * as f from "../format.js";

const TOP = 50;
const choices = (words) => [["", "Any"], ...words.map((word) => [word, spoken(word)])];

export default function page(ctx) {
  ctx.title = "Subscriptions";
  const asked = { topic: ctx.query.get("topic") ?? "", health: ctx.query.get("health") ?? "", state: ctx.query.get("state") ?? "", q: ctx.query.get("q") ?? "", skip: Number(ctx.query.get("skip")) || 0 };
  const box = h("div");
  const list = follow(ctx, box, 5, () => get("subscriptions", { topic: asked.topic, health: asked.health, state: asked.state, q: asked.q, top: TOP, skip: asked.skip }, ctx.signal), ({ value, total }) => {
    if (!value.length) {
      const filtered = asked.topic || asked.health || asked.state || asked.q;
      return filtered ? empty("No subscription is like that.") : empty("There are no subscriptions yet.", h("p", {}, linkButton("Create a subscription", to.newSubscription(), "primary")));
    }
    return [
      h("p", { class: "muted", role: "status" }, f.plural(total, "subscription")),
      subscriptionTable("Subscriptions", value),
      pager({ skip: asked.skip, top: TOP, total, go: (skip) => change({ skip }) }),
    ];
  });
  const change = (members) => {
    Object.assign(asked, { skip: 0 }, members);
    ctx.remember({ ...asked, skip: asked.skip || "" });
    list.again();
  };
  const topic = h("input", { type: "text", value: asked.topic, autocomplete: "off", spellcheck: "false", on: { change: () => change({ topic: topic.value.trim() }) } });
  return [
    heading("Subscriptions", { actions: [linkButton("New subscription", to.newSubscription(), "primary")] }),
    h(
      "div",
      { class: "toolbar", role: "search", "aria-label": "Narrow the list" },
      searchBox("Search by name or endpoint", asked.q, (q) => change({ q })),
      labelled("Topic", topic),
      labelled("Health", select(choices(HEALTH), asked.health, (health) => change({ health }))),
      labelled("Delivery", select(choices(DELIVERY), asked.state, (state) => change({ state }))),
    ),
    box,
  ];
}
