// One dead letter.

import { h } from "../dom.js";
import { attempt, badge, button, code, empty, facts, heading, load, mono, notice, section, text, when } from "../ui.js";
import { get, post } from "../api.js";
import { to } from "../ids.js";
import { purge, replay } from "./dead-letters.js";
import * as f from "../format.js";

export default function page(ctx) {
  const id = ctx.params.id;
  ctx.title = `Dead letter ${id}`;
  const box = h("div");
  load(ctx, box, () => get(`deadletters/${encodeURIComponent(id)}`, {}, ctx.signal), (one) => [
    one.trouble && notice("warn", text(one.trouble)),
    section("Letter", facts([
      ["State", badge(one.state)],
      ["Subscription", text(`${one.topic}/${one.subscription}`)],
      ["Reason", text(f.words(one.reason))],
      ["Attempts", one.deliveryAttempts === undefined ? null : f.count(one.deliveryAttempts)],
      ["Last outcome", one.lastDeliveryOutcome ? text(f.outcome(one.lastDeliveryOutcome)) : null],
      ["Published", one.publishTime ? when(one.publishTime) : null],
      ["Last attempt", one.lastDeliveryAttemptTime ? when(one.lastDeliveryAttemptTime) : null],
      ["Given up", when(one.deadLetteredTime, { relative: true })],
      ["Will be written", one.due ? when(one.due, { relative: true }) : null],
      ["Event", one.eventId ? h("a", { href: to.event(one.eventId) }, mono(one.eventId)) : null],
      ["Type", one.eventType ? text(one.eventType) : null],
      ["Subject", one.subject ? text(one.subject) : null],
      ["Blob", one.blob ? mono(`${one.blob.account}/${one.blob.container}/${one.blob.path}`) : null],
      ["Replayed", one.replays ? f.plural(one.replays, "time") : null],
    ])),
    section("Event as it is kept", one.event === undefined || one.event === null ? empty("It cannot be shown.") : code(f.pretty(one.event), "Event")),
  ]);
  const isWritten = !id.startsWith("pending-");
  // A letter has another id once it is in a blob.
  const write = async (event) => {
    if (await attempt(event.target, () => post("deadletters/write", { id }, ctx.signal), "The dead letter is written")) ctx.go(to.letters());
  };
  return [
    heading(`Dead letter ${id}`, {
      crumbs: [["Dead letters", to.letters()]],
      actions: isWritten ? [button("Purge …", () => purge(ctx, { id }, () => ctx.go(to.letters())), { kind: "danger" }), button("Replay …", () => replay(ctx, { id }), { kind: "primary" })] : [button("Write now", write, { kind: "primary" })],
      note: isWritten ? null : "Not yet written to its blob; until then it can be neither replayed nor purged.",
    }),
    box,
  ];
}
