// Events that were given up, and what can still be done with them.

import { fill, h } from "../dom.js";
import { badge, brief, button, confirmDialog, empty, failure, heading, labelled, linkButton, load, loading, mono, openDialog, section, select, table, text, toast, when } from "../ui.js";
import { Form, compact } from "../form.js";
import { get, post } from "../api.js";
import { to } from "../ids.js";
import { REASONS } from "../shared.js";
import * as f from "../format.js";

const LIMIT = 50;
const SPANS = [["", "Any time"], ["1h", "Last hour"], ["24h", "Last day"], ["7d", "Last week"]];

export default function page(ctx) {
  ctx.title = "Dead letters";
  const asked = { subscription: ctx.query.get("subscription") ?? "", reason: ctx.query.get("reason") ?? "", since: ctx.query.get("since") ?? "" };
  const summary = h("div");
  const list = h("div");
  const subscription = h("input", { type: "text", value: asked.subscription, autocomplete: "off", spellcheck: "false", placeholder: "topic/subscription", on: { change: () => change({ subscription: subscription.value.trim() }) } });
  const change = (members) => {
    Object.assign(asked, members);
    ctx.remember(asked);
    subscription.value = asked.subscription;
    again();
  };
  const again = () => listLetters(ctx, asked, list);
  const sum = () => load(ctx, summary, () => get("deadletters/summary", {}, ctx.signal), ({ value }) => (value.length ? tallies(value, change) : empty("No subscription has dead letters.")));
  sum();
  again();
  const done = () => {
    sum();
    again();
  };
  return [
    heading("Dead letters", { actions: [linkButton("Replays", "#/deadletters/replays"), button("Purge …", () => purge(ctx, asked, done), { kind: "danger" }), button("Replay …", () => replay(ctx, asked), { kind: "primary" })] }),
    section("By subscription", summary),
    section("Letters",
      h("div", { class: "toolbar", role: "search", "aria-label": "Narrow the list" },
        labelled("Subscription", subscription),
        labelled("Reason", select([["", "Any"], ...REASONS.map((one) => [one, f.words(one)])], asked.reason, (reason) => change({ reason }))),
        labelled("Given up", select(SPANS.some(([key]) => key === asked.since) ? SPANS : [...SPANS, [asked.since, `since ${asked.since}`]], asked.since, (since) => change({ since })))),
      list),
  ];
}

function tallies(value, change) {
  return table("Dead letters by subscription", [
    { label: "Subscription", cell: (one) => [button(`${one.topic}/${one.subscription}`, () => change({ subscription: one.deleted ? String(one.subscriptionId) : `${one.topic}/${one.subscription}` }), { kind: "link", key: `tally:${one.subscriptionId}` }), one.deleted && h("span", { class: "muted" }, " (deleted)")] },
    { label: "Written", number: true, cell: (one) => f.count(one.written) },
    { label: "Reasons", cell: (one) => h("ul", { class: "plain" }, Object.entries(one.reasons ?? {}).map(([reason, n]) => h("li", {}, `${f.words(reason)}: ${f.count(n)}`))) },
    { label: "To be written", number: true, cell: (one) => f.count(one.pending) },
    { label: "Oldest of those", cell: (one) => (one.oldestPending ? when(one.oldestPending, { relative: true }) : "–") },
    { label: "Trouble", wide: true, cell: (one) => (one.trouble ? h("span", { class: "error" }, text(one.trouble)) : "none") },
  ], value);
}

function listLetters(ctx, asked, box) {
  const rows = [];
  const inner = h("div");
  const foot = h("div", { class: "more" });
  fill(box, inner, foot);
  const turn = async (continuation) => {
    fill(foot, loading());
    try {
      const page = await get("deadletters", { ...asked, limit: LIMIT, continuation }, ctx.signal);
      rows.push(...page.value);
      if (rows.length) fill(inner, letterTable(rows));
      fill(foot, page.continuation ? button("Show more", () => turn(page.continuation)) : rows.length ? null : empty("There are no dead letters like that."));
    } catch (error) {
      if (error.name !== "AbortError" && error.status !== 401) fill(foot, failure(error, () => turn(continuation)));
    }
  };
  turn(null);
}

function letterTable(rows) {
  return table("Dead letters, oldest first", [
    { label: "Letter", cell: (one) => h("a", { href: to.letter(one.id) }, mono(one.id)) },
    { label: "Event", cell: (one) => (one.eventId ? h("a", { href: to.event(one.eventId) }, brief(one.eventId, mono)) : h("span", { class: "muted" }, one.missing ? "missing" : "unknown")) },
    { label: "Type", cell: (one) => brief(one.eventType) },
    { label: "Subscription", cell: (one) => text(`${one.topic}/${one.subscription}`) },
    { label: "Reason", cell: (one) => text(f.words(one.reason)) },
    { label: "Last outcome", cell: (one) => text(f.words(one.lastDeliveryOutcome ?? "")) },
    { label: "Attempts", number: true, cell: (one) => f.count(one.deliveryAttempts) },
    { label: "Given up", cell: (one) => when(one.deadLetteredTime) },
    { label: "State", cell: (one) => [badge(one.missing ? "missing" : one.state), one.replays ? h("span", { class: "muted" }, ` replayed ${f.plural(one.replays, "time")}`) : null] },
  ], rows);
}

/** `{subscription, reason, since}`, or all; or the one that `id` names. */
function which(asked) {
  if (asked.id) return { id: asked.id };
  const filter = compact({ subscription: asked.subscription || undefined, reason: asked.reason || undefined, since: asked.since || undefined });
  return Object.keys(filter).length ? filter : { all: true };
}

function described(asked) {
  if (asked.id) return `Dead letter ${asked.id}`;
  const parts = [asked.subscription && `of ${asked.subscription}`, asked.reason && `because of ${f.words(asked.reason)}`, asked.since && `given up since ${asked.since}`].filter(Boolean);
  return parts.length ? `Dead letters ${parts.join(", ")}` : "All dead letters";
}

/** Counts first what would be replayed, then does so at a rate. */
export function replay(ctx, asked) {
  openDialog("Replay", (close) => {
    const form = new Form();
    const count = h("div", { role: "status" }, loading("Counting"));
    const rate = form.number({ label: "Events per second, at most", path: "rate", min: 1, max: 4294967295, placeholder: "no limit" });
    const target = form.text({ label: "To another subscription", path: "to", placeholder: "topic/subscription", help: "Empty: each to the one that it was for." });
    const go = button("Replay", null, { type: "submit", kind: "primary", disabled: true });
    const recount = async () => {
      try {
        const answer = await post("deadletters/replay", { ...which(asked), dryRun: true }, ctx.signal);
        fill(count, h("p", { class: "dry-run" }, h("strong", {}, f.plural(answer.count, "event")), " would be delivered again."));
        go.disabled = answer.count === 0;
      } catch (error) {
        fill(count, failure(error));
      }
    };
    recount();
    const submit = async (event) => {
      event.preventDefault();
      form.clear();
      try {
        const job = await post("deadletters/replay", compact({ ...which(asked), rate: rate.value(), to: target.value() }), ctx.signal);
        close();
        ctx.go(to.replay(String(job.id)));
      } catch (error) {
        form.show(error);
      }
    };
    return h("form", { novalidate: true, on: { submit } }, form.summary, h("p", {}, described(asked), "."), count, rate.element, target.element,
      h("p", { class: "help" }, "A replayed event carries a header that says so, and starts a fresh retry policy. Dead letters stay in their blobs."),
      h("div", { class: "dialog-actions" }, button("Cancel", close), go));
  });
}

export async function purge(ctx, asked, done) {
  let counted;
  try {
    counted = await post("deadletters/purge", { ...which(asked), dryRun: true }, ctx.signal);
  } catch (error) {
    if (error.name !== "AbortError") toast(error.message, "bad");
    return;
  }
  if (!counted.count) return toast("There is nothing to purge");
  confirmDialog({
    title: "Purge dead letters",
    text: `${described(asked)}: ${f.plural(counted.count, "event")}. They are taken out of their blobs and cannot be brought back.`,
    action: `Purge ${f.plural(counted.count, "event")}`,
    word: asked.id ? null : "purge",
    work: async () => {
      const { purged } = await post("deadletters/purge", which(asked), ctx.signal);
      toast(`${f.plural(purged, "event")} purged`);
      done();
    },
  });
}
