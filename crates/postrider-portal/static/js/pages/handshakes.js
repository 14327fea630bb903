// Handshakes: whether webhooks want the events that somebody subscribed them to.

import { h } from "../dom.js";
import { badge, empty, follow, heading, labelled, mono, select, table, text, when } from "../ui.js";
import { get } from "../api.js";
import { to } from "../ids.js";
import * as f from "../format.js";

const STATES = ["asking", "awaiting", "failed", "succeeded", "cancelled"];

export default function page(ctx) {
  ctx.title = "Handshakes";
  let state = ctx.query.get("state") ?? "";
  const box = h("div");
  const list = follow(ctx, box, 5, () => get("handshakes", { state, limit: 200 }, ctx.signal), ({ value, count }) =>
    value.length
      ? [
          h("p", { class: "muted", role: "status" }, f.plural(count, "handshake")),
          table("Handshakes with webhooks", [
            { label: "Subscription", cell: (one) => h("a", { href: to.handshake(one.operation) }, text(one.name)) },
            { label: "Topic", cell: (one) => text(one.topic ?? "gone") },
            { label: "Endpoint", wide: true, cell: (one) => mono(one.endpoint ?? "") },
            { label: "State", cell: (one) => badge(one.state) },
            { label: "Begun", cell: (one) => when(one.begun, { relative: true }) },
            { label: "More", wide: true, cell: (one) => (one.message ? text(one.message) : one.until ? ["until ", when(one.until, { relative: true })] : "–") },
          ], value),
        ]
      : empty(state ? "No handshake is in that state." : "No webhook has been asked yet."));
  return [
    heading("Handshakes", { note: "Before a webhook gets events it must show that it wants them: with its answer, or by a visit to a URL that it was sent." }),
    h("div", { class: "toolbar" }, labelled("State", select([["", "Any"], ...STATES.map((one) => [one, one])], state, (value) => {
      state = value;
      ctx.remember({ state });
      list.again();
    }))),
    box,
  ];
}
