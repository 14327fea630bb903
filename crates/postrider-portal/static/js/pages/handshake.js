// One handshake with all that was said.

import { h } from "../dom.js";
import { attempt, badge, button, code, empty, facts, follow, heading, mono, notice, section, table, text, when } from "../ui.js";
import { get, post } from "../api.js";
import { to } from "../ids.js";
import * as f from "../format.js";

export default function page(ctx) {
  const operation = ctx.params.id;
  ctx.title = "Handshake";
  const box = h("div");
  const path = `handshakes/${encodeURIComponent(operation)}`;
  follow(ctx, box, 2, () => get(path, {}, ctx.signal), (one) => [
    one.state === "awaiting" && notice("warn", h("strong", {}, "Awaiting manual validation. "), "Somebody must open the validation URL that the webhook was sent, before ", when(one.until, { relative: true }), "."),
    one.message && notice("bad", text(one.message)),
    section("Handshake", facts([
      ["State", badge(one.state)],
      ["Subscription", one.subscription ? h("a", { href: to.subscription(one.subscription) }, text(one.name)) : text(one.name)],
      ["Topic", text(one.topic ?? "gone")],
      ["Endpoint", mono(one.endpoint ?? "")],
      ["Delivery schema", text(one.deliverySchema)],
      ["Purpose", one.trial ? "a trial: nothing changes" : one.replaces ? "a change of a subscription" : "a new subscription"],
      ["Begun", when(one.begun, { relative: true })],
      ["Ended", one.ended ? when(one.ended, { relative: true }) : null],
    ]), one.state === "failed" && button("Repeat it", async (event) => {
      const begun = await attempt(event.target, () => post(`${path}/repeat`, {}), "The webhook is asked again");
      if (begun) ctx.go(to.handshake(begun.operation));
    }, { kind: "primary" })),
    section("What was said", (one.transcript ?? []).length ? one.transcript.map(exchange) : empty("Nothing yet.")),
  ]);
  return [heading("Handshake", { crumbs: [["Handshakes", to.handshakes()]], mark: h("span", { class: "kind" }, mono(operation)) }), box];
}

function exchange(one, at) {
  const headers = (list, title) => list?.length ? table(title, [{ label: "Header", cell: (header) => mono(header.name) }, { label: "Value", wide: true, cell: (header) => mono(header.value) }], list, { showCaption: true }) : null;
  return h("details", { class: "disclosure", open: at === 0 },
    h("summary", {}, when(one.at, { precise: true }), " ", mono(`${one.method} ${one.url}`), " ", one.answer ? `→ ${one.answer.status}` : "→ no answer"),
    h("p", {}, h("strong", {}, "Verdict: "), text(one.verdict ?? "–")),
    headers(one.headers, "Sent headers"),
    one.failure && notice("bad", text(one.failure)),
    one.answer && [headers(one.answer.headers, "Received headers"), one.answer.body ? code(f.prettyText(one.answer.body), "Body of the answer") : h("p", { class: "muted" }, "The answer had no body.")]);
}
