// Searches the flight recorder.

import { fill, h } from "../dom.js";
import { button, empty, failure, heading, labelled, loading, select } from "../ui.js";
import { get } from "../api.js";
import { OUTCOMES, STATES, eventTable } from "../shared.js";
import { to } from "../ids.js";
import * as f from "../format.js";

const LIMIT = 50;
const MEMBERS = ["topic", "subscription", "type", "subject", "state", "outcome", "since", "until"];

export default function page(ctx) {
  ctx.title = "Events";
  const asked = Object.fromEntries(MEMBERS.map((name) => [name, ctx.query.get(name) ?? ""]));
  const results = h("div");
  const controls = {
    id: h("input", { type: "text", autocomplete: "off", spellcheck: "false", autocapitalize: "off" }),
    topic: h("input", { type: "text", value: asked.topic, autocomplete: "off", spellcheck: "false" }),
    subscription: h("input", { type: "text", value: asked.subscription, autocomplete: "off", spellcheck: "false" }),
    type: h("input", { type: "text", value: asked.type, autocomplete: "off", spellcheck: "false" }),
    subject: h("input", { type: "text", value: asked.subject, autocomplete: "off", spellcheck: "false" }),
    state: select([["", "Any"], ...STATES.map((one) => [one, f.words(one)])], asked.state, null),
    outcome: select([["", "Any"], ...OUTCOMES.map((one) => [one, f.outcome(one)])], asked.outcome, null),
    since: h("input", { type: "datetime-local", value: f.toLocalField(asked.since) }),
    until: h("input", { type: "datetime-local", value: f.toLocalField(asked.until) }),
  };
  const submit = (event) => {
    event.preventDefault();
    const id = controls.id.value.trim();
    if (id) return ctx.go(to.event(id));
    for (const name of MEMBERS) asked[name] = controls[name].value.trim();
    for (const name of ["since", "until"]) asked[name] = f.fromLocalField(controls[name].value) ?? "";
    ctx.remember(asked);
    search();
  };
  const search = () => {
    const rows = [];
    const list = h("div");
    const foot = h("div", { class: "more" });
    fill(results, list, foot);
    const turn = async (cursor) => {
      fill(foot, loading("Searching"));
      try {
        const page = await get("events", { ...asked, limit: LIMIT, cursor }, ctx.signal);
        rows.push(...page.value);
        if (rows.length) fill(list, eventTable("Events, newest first", rows));
        const searched = page.searched?.from ? `Searched back to ${f.time(page.searched.from)}. ` : "";
        if (page.cursor) fill(foot, h("p", { class: "muted", role: "status" }, searched, `${f.plural(rows.length, "event")} so far.`), button("Search further back", () => turn(page.cursor)));
        else if (rows.length) fill(foot, h("p", { class: "muted", role: "status" }, searched, `${f.plural(rows.length, "event")}, and no more are recorded.`));
        else fill(foot, empty("No recorded event is like that."));
      } catch (error) {
        if (error.name === "AbortError" || error.status === 401) return;
        fill(foot, failure(error, () => turn(cursor)));
      }
    };
    turn(null);
  };
  search();
  return [
    heading("Events", { actions: [h("a", { class: "button", href: to.live({ topic: asked.topic, subscription: asked.subscription }) }, "Live stream")] }),
    h("form", { class: "toolbar search-form", role: "search", "aria-label": "Search events", on: { submit } },
      labelled("Event id", controls.id),
      labelled("Topic", controls.topic),
      labelled("Subscription", controls.subscription),
      labelled("Event type", controls.type),
      labelled("Subject begins with", controls.subject),
      labelled("State", controls.state),
      labelled("Outcome of an attempt", controls.outcome),
      labelled("Accepted since", controls.since),
      labelled("Accepted until", controls.until),
      button("Search", null, { type: "submit", kind: "primary" })),
    results,
  ];
}
