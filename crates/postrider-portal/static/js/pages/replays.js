// Replays of dead letters: all of them, or one and how far it is.

import { h } from "../dom.js";
import { attempt, badge, button, empty, facts, follow, heading, section, table, text, when } from "../ui.js";
import { get, post } from "../api.js";
import { to } from "../ids.js";
import * as f from "../format.js";

export default function page(ctx) {
  return ctx.params.id ? one(ctx, ctx.params.id) : list(ctx);
}

function list(ctx) {
  ctx.title = "Replays";
  const box = h("div");
  follow(ctx, box, 3, () => get("deadletters/replays", {}, ctx.signal), ({ value }) =>
    value.length
      ? table("Replays, newest first", [
          { label: "Replay", cell: (job) => h("a", { href: to.replay(String(job.id)) }, `Replay ${job.id}`) },
          { label: "State", cell: (job) => badge(job.state) },
          { label: "Begun", cell: (job) => when(job.created, { relative: true }) },
          { label: "Which", wide: true, cell: (job) => said(job.request) },
          { label: "Done", number: true, cell: (job) => `${f.count(job.replayed)} of ${f.count(job.total)}` },
          { label: "Failed", number: true, cell: (job) => f.count(job.failed) },
        ], value)
      : empty("Nothing has been replayed yet."));
  return [heading("Replays", { crumbs: [["Dead letters", to.letters()]] }), box];
}

function said(request = {}) {
  const parts = [
    request.id && `letter ${request.id}`,
    request.subscription && `of ${request.subscription}`,
    request.reason && f.words(request.reason),
    request.since && `since ${f.time(request.since)}`,
    request.all && "all",
    request.to && `to ${request.to}`,
    request.rate && `${f.count(request.rate)} per second`,
  ];
  return text(parts.filter(Boolean).join(", ") || "–");
}

function one(ctx, id) {
  ctx.title = `Replay ${id}`;
  const box = h("div");
  const path = `deadletters/replays/${encodeURIComponent(id)}`;
  const job = follow(ctx, box, 1, () => get(path, {}, ctx.signal), (now) => {
    const done = now.replayed + now.failed;
    const part = now.total ? Math.min(1, done / now.total) : now.state === "done" ? 1 : 0;
    const bar = h("span", { class: "ratio-part" });
    bar.style.setProperty("inline-size", `${Math.round(part * 100)}%`);
    const act = (verb, said) => async (event) => {
      if (await attempt(event.target, () => post(`${path}/${verb}`, {}, ctx.signal), said)) job.again();
    };
    return section("Progress",
      h("div", { class: "ratio", role: "progressbar", "aria-label": "Replayed", "aria-valuemin": "0", "aria-valuemax": String(now.total), "aria-valuenow": String(Math.min(done, now.total)), "aria-valuetext": `${f.count(done)} of ${f.count(now.total)}` }, bar),
      facts([
        ["State", badge(now.state)],
        ["Replayed", `${f.count(now.replayed)} of ${f.count(now.total)}`],
        ["Failed", f.count(now.failed)],
        ["Begun", when(now.created, { relative: true })],
        ["Which", said(now.request)],
      ]),
      h("div", { class: "actions" },
        now.state === "running" && button("Cancel the replay", act("cancel", "The replay stands still"), { kind: "danger" }),
        now.state === "cancelled" && button("Go on with it", act("resume", "The replay goes on"), { kind: "primary" })));
  });
  return [heading(`Replay ${id}`, { crumbs: [["Dead letters", to.letters()], ["Replays", "#/deadletters/replays"]] }), box];
}
