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
          { label: "State", cell: stateOf },
          { label: "Begun", cell: (job) => when(job.created, { relative: true }) },
          { label: "Which", wide: true, cell: (job) => said(job.request) },
          { label: "Replayed", number: true, cell: (job) => `${f.count(job.replayed)} of ${f.count(job.total)}` },
          { label: "Delivered", number: true, cell: (job) => (job.outcome ? f.count(job.outcome.delivered) : job.replayed ? "not known" : "–") },
          { label: "Failed", number: true, cell: (job) => f.count(job.failed + (job.outcome?.failed ?? 0)) },
        ], value)
      : empty("Nothing has been replayed yet."));
  return [heading("Replays", { crumbs: [["Dead letters", to.letters()]] }), box];
}

/** The state of a replay. One that is done has sent its events on their way: that is good only once they have arrived. */
function stateOf(job) {
  if (job.state !== "done") return badge(job.state);
  const { delivered = 0, failed = 0, waiting = 0, unknown = 0 } = job.outcome ?? {};
  const done = (kind, more) => [badge("done", kind), more && h("span", { class: "muted" }, ` ${more}`)];
  if (!job.replayed) return done("quiet", "nothing was replayed");
  if (failed) return done("bad", `${f.count(failed)} given up again`);
  if (waiting) return done("info", `${f.count(waiting)} not delivered yet`);
  return done(delivered && !unknown ? "ok" : "quiet", unknown > 0 && `${f.count(unknown)} not known here`);
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
    const part = now.total ? Math.min(1, done / now.total) : now.state === "done" || now.state === "incomplete" ? 1 : 0;
    const bar = h("span", { class: "ratio-part" });
    bar.style.setProperty("inline-size", `${Math.round(part * 100)}%`);
    const act = (verb, said) => async (event) => {
      if (await attempt(event.target, () => post(`${path}/${verb}`, {}, ctx.signal), said)) job.again();
    };
    return section("Progress",
      h("div", { class: "ratio", role: "progressbar", "aria-label": "Replayed", "aria-valuemin": "0", "aria-valuemax": String(now.total), "aria-valuenow": String(Math.min(done, now.total)), "aria-valuetext": `${f.count(done)} of ${f.count(now.total)}` }, bar),
      facts([
        ["State", stateOf(now)],
        ["Replayed", `${f.count(now.replayed)} of ${f.count(now.total)}`],
        ["Delivered", now.outcome ? f.count(now.outcome.delivered) : now.replayed ? "not known here" : null],
        ["Given up again", now.outcome?.failed ? h("span", { class: "loss" }, f.count(now.outcome.failed)) : null],
        ["Not delivered yet", now.outcome?.waiting ? f.count(now.outcome.waiting) : null],
        ["Not known here", now.outcome?.unknown ? f.count(now.outcome.unknown) : null],
        ["Not replayed", now.failed ? f.count(now.failed) : null],
        ["Not readable", now.unreadable ? f.count(now.unreadable) : null],
        ["Begun", when(now.created, { relative: true })],
        ["Which", said(now.request)],
      ]),
      now.unreadableBlobs?.length
        ? table("Blobs whose letters could not be replayed", [
            { label: "Blob", wide: true, cell: (blob) => text(`${blob.account}/${blob.container}/${blob.path}`) },
            { label: "Letters", number: true, cell: (blob) => f.count(blob.letters) },
            { label: "State", cell: (blob) => badge(blob.state) },
            { label: "Why", wide: true, cell: (blob) => text(blob.reason) },
          ], now.unreadableBlobs)
        : null,
      h("div", { class: "actions" },
        now.state === "running" && button("Cancel the replay", act("cancel", "The replay stands still"), { kind: "danger" }),
        now.state === "cancelled" && button("Go on with it", act("resume", "The replay goes on"), { kind: "primary" })));
  });
  return [heading(`Replay ${id}`, { crumbs: [["Dead letters", to.letters()], ["Replays", "#/deadletters/replays"]] }), box];
}
