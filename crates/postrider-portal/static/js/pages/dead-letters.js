// Events that were given up, and what can still be done with them.

import { fill, h } from "../dom.js";
import { badge, brief, button, confirmDialog, empty, failure, heading, labelled, linkButton, load, loading, mono, notice, openDialog, section, select, table, text, toast, when } from "../ui.js";
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
  const sum = () => load(ctx, summary, () => get("deadletters/summary", {}, ctx.signal), ({ value }) => (value.length ? [unwritten(value), tallies(value, change)] : empty("No subscription has dead letters.")));
  const unwritten = (value) => {
    const pending = value.reduce((sum, one) => sum + one.pending, 0);
    return pending > 0 && waiting({ pending }, {}, ctx, done);
  };
  sum();
  again();
  const done = () => {
    sum();
    again();
  };
  return [
    heading("Dead letters", { actions: [linkButton("Replays", "#/deadletters/replays"), button("Purge …", () => purge(ctx, asked, done), { kind: "danger" }), button("Replay …", () => replay(ctx, asked, done), { kind: "primary" })] }),
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
    { label: "Missing", number: true, cell: (one) => f.count(one.missing ?? 0) },
    { label: "Damaged", number: true, cell: (one) => f.count(one.damaged ?? 0) },
    { label: "Reasons", cell: (one) => h("ul", { class: "plain" }, Object.entries(one.reasons ?? {}).map(([reason, n]) => h("li", {}, `${f.words(reason)}: ${f.count(n)}`))) },
    { label: "To be written", number: true, cell: (one) => f.count(one.pending) },
    { label: "Oldest of those", cell: (one) => (one.oldestPending ? when(one.oldestPending, { relative: true }) : "–") },
    { label: "Trouble", wide: true, cell: (one) => (one.trouble || one.unchecked ? h("span", { class: "error" }, text([one.unchecked && `${f.plural(one.unchecked, "letter")} not checked`, one.trouble].filter(Boolean).join("; "))) : "none") },
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

/** Its blob is gone, or does not hold it as it was written. */
const isUnreadable = (one) => one.state === "missing" || one.state === "damaged";

function letterTable(rows) {
  return table("Dead letters, oldest first", [
    { label: "Letter", cell: (one) => h("a", { href: to.letter(one.id) }, mono(one.id)) },
    { label: "Event", cell: (one) => (one.eventId ? h("a", { href: to.event(one.eventId) }, brief(one.eventId, mono)) : h("span", { class: "muted" }, "unknown")) },
    { label: "Type", cell: (one) => brief(one.eventType) },
    { label: "Subscription", cell: (one) => text(`${one.topic}/${one.subscription}`) },
    { label: "Reason", cell: (one) => text(f.words(one.reason)) },
    { label: "Last outcome", cell: (one) => text(f.outcome(one.lastDeliveryOutcome ?? "")) },
    { label: "Attempts", number: true, cell: (one) => f.count(one.deliveryAttempts) },
    { label: "Given up", cell: (one) => when(one.deadLetteredTime) },
    { label: "State", cell: (one) => [badge(one.state), isUnreadable(one) && one.blob && h("span", { class: "muted" }, " ", text(`${one.blob.account}/${one.blob.container}/${one.blob.path} (${f.plural(one.blob.letters ?? 0, "letter")}): ${one.trouble}`)), one.replays ? h("span", { class: "muted" }, ` replayed ${f.plural(one.replays, "time")}`) : null] },
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

/** Says that dead letters wait to be written, and until when, with a button that writes them now. `done` is called once they are. */
function waiting({ pending, due }, filter, ctx, done) {
  // Inside a dialog a toast would not be seen.
  const trouble = h("div");
  const write = button("Write now", async () => {
    write.disabled = true;
    fill(trouble);
    try {
      await post("deadletters/write", filter, ctx.signal);
      await done();
    } catch (error) {
      if (error.name !== "AbortError" && error.status !== 401) fill(trouble, failure(error));
    } finally {
      write.disabled = false;
    }
  }, { kind: "small" });
  const verb = pending === 1 ? "is" : "are";
  return notice("info",
    h("p", {}, h("strong", {}, f.plural(pending, "event")), due ? [` ${verb} written to blobs `, h("span", { title: due }, f.soon(due)), ", and can be replayed then."] : ` ${verb} not written to blobs yet, and can be replayed once written.`),
    h("p", {}, write), trouble);
}

/** Counts first what would be replayed, then does so at a rate. */
export function replay(ctx, asked, done = () => {}) {
  openDialog("Replay", (close) => {
    const form = new Form();
    const count = h("div", { role: "status" }, loading("Counting"));
    const pending = h("div");
    const rate = form.number({ label: "Events per second, at most", path: "rate", min: 1, max: 4294967295, placeholder: "no limit" });
    const target = form.text({ label: "To another subscription", path: "to", placeholder: "topic/subscription", help: "Empty: each to the one that it was for." });
    const go = button("Replay", null, { type: "submit", kind: "primary", disabled: true });
    const recount = async () => {
      try {
        const answer = await post("deadletters/replay", { ...which(asked), dryRun: true }, ctx.signal);
        fill(count, h("p", { class: "dry-run" }, h("strong", {}, f.plural(answer.count, "event")), " would be delivered again."));
        fill(pending, answer.pending > 0 && waiting(answer, which(asked), ctx, async () => {
          done();
          await recount();
        }));
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
    return h("form", { novalidate: true, on: { submit } }, form.summary, h("p", {}, described(asked), "."), count, pending, rate.element, target.element,
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
