// The audit log: who changed what, from where.

import { h } from "../dom.js";
import { attempt, button, code, disclosure, empty, follow, heading, labelled, notice, searchBox, select, table, text, when } from "../ui.js";
import { get } from "../api.js";
import * as f from "../format.js";

const TOP = 100;
const KINDS = ["login", "logout", "topic", "domain", "domainTopic", "systemTopic", "subscription", "deadletters", "endpoint", "cluster", "storageAccount", "server", "audit"];

export default function page(ctx) {
  ctx.title = "Audit";
  const asked = { actor: ctx.query.get("actor") ?? "", action: ctx.query.get("action") ?? "", resource: ctx.query.get("resource") ?? "" };
  /** Where pages begin that were turned to; the last is shown. */
  let cursors = [];
  const box = h("div");
  const verdict = h("div");
  const list = follow(ctx, box, 15, () => get("audit", { ...asked, cursor: cursors.at(-1) ?? "", limit: TOP }, ctx.signal), ({ value, cursor }) => [
    value.length
      ? table("Recorded actions", [
          { label: "Action", cell: (one) => text(one.action) },
          { label: "Client", cell: (one) => text(one.actor.id || "unknown") },
          { label: "Address", cell: (one) => text(one.address ?? "–") },
          { label: "Result", cell: (one) => text(result(one.outcome)) },
          { label: "Time", cell: (one) => when(one.time, { relative: true }) },
          { label: "Resource", wide: true, cell: (one) => text(one.resource || "–") },
          { label: "Details", wide: true, cell: (one) => disclosure(`Line ${f.count(one.seq)}`, code(JSON.stringify(one, null, 2), `Line ${one.seq} of the audit log`)) },
        ], value)
      : empty("Nothing like that is recorded."),
    h("div", { class: "toolbar" },
      button("Newer", () => turn(() => cursors.pop()), { kind: "small", disabled: !cursors.length, key: "newer" }),
      button("Older", () => turn(() => cursors.push(cursor)), { kind: "small", disabled: !cursor, key: "older" })),
  ]);
  const turn = (how) => {
    how();
    list.again();
  };
  const change = (members) => {
    Object.assign(asked, members);
    cursors = [];
    ctx.remember(asked);
    list.again();
  };
  const verify = (event) => attempt(event.target, async () => {
    const found = await get("audit/verify", {}, ctx.signal);
    const broken = (found.nodes ?? [found]).map((one) => one.broken).filter(Boolean);
    verdict.replaceChildren(broken.length
      ? notice("bad", h("strong", {}, "The chain is broken. "), ...broken.map((one) => text(`Line ${one.line} of ${one.file}: ${one.reason}. `)))
      : notice("ok", "No line was edited, removed or moved."));
  });
  return [
    heading("Audit", { note: "Changes, key reads, logins, replays, purges and pauses, and what was refused. Each line holds the hash of the line before it.", actions: [button("Verify the chain", verify, { key: "verify" })] }),
    verdict,
    h("div", { class: "toolbar", role: "search", "aria-label": "Narrow the list" },
      searchBox("Search by resource", asked.resource, (resource) => change({ resource })),
      searchBox("Client", asked.actor, (actor) => change({ actor })),
      labelled("Action", select([["", "Any"], ...KINDS.map((one) => [one, one])], asked.action, (action) => change({ action })))),
    box,
  ];
}

const result = (outcome) => [outcome.result, outcome.status, outcome.error].filter(Boolean).join(" · ");
