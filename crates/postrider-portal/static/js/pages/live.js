// Events as they come and go.

import { fill, h } from "../dom.js";
import { badge, brief, button, empty, failure, heading, labelled, mono, select, text } from "../ui.js";
import { pause, readStream } from "../api.js";
import { outcomeBadge } from "../shared.js";
import { to } from "../ids.js";
import * as f from "../format.js";

/** More lines than this are not kept. */
const LINES_MAX = 500;
/** New lines are drawn together, this many times a second at most. */
const DRAW_MS = 250;
const WAIT_MAX = 30;

export default function page(ctx) {
  ctx.title = "Live stream";
  const asked = { topic: ctx.query.get("topic") ?? "", subscription: ctx.query.get("subscription") ?? "" };
  const wanted = { what: "", words: "" };
  const lines = [];
  let held = false;
  let missed = 0;
  let isDirty = false;
  const state = h("p", { class: "muted", role: "status" }, "Connecting …");
  const body = h("tbody", { role: "rowgroup" });
  const nothing = h("div");
  const grid = h("table", { class: "live many", role: "table" },
    h("caption", { class: "sr" }, "Events, newest first"),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ["Event", "Time", "What", "Type", "Subject", "Where"].map((label) => h("th", { scope: "col", role: "columnheader" }, label)))),
    body);

  const fits = (one) => (!wanted.what || one.what === wanted.what) && (!wanted.words || one.haystack.includes(wanted.words));
  const draw = () => {
    if (!isDirty || held) return;
    isDirty = false;
    const shown = lines.filter(fits);
    fill(nothing, shown.length ? null : empty(lines.length ? "Nothing that came is like that." : "Nothing has come yet. Publish an event and it appears here."));
    grid.hidden = !shown.length;
    // Rows are kept from one time to the next, so that whoever reads or has chosen one keeps it.
    const rows = shown.map((one) => (one.row ??= line(one)));
    for (const row of [...body.children]) if (!rows.includes(row)) row.remove();
    rows.forEach((row, at) => {
      if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
    });
  };
  const timer = setInterval(draw, DRAW_MS);
  ctx.signal.addEventListener("abort", () => clearInterval(timer));

  const received = (name, data) => {
    let one;
    try {
      one = JSON.parse(data);
    } catch {
      return;
    }
    one.what = name;
    one.haystack = `${one.id} ${one.type} ${one.subject} ${one.topic} ${one.subscription ?? ""} ${one.outcome ?? ""}`.toLowerCase();
    lines.unshift(one);
    lines.length = Math.min(lines.length, LINES_MAX);
    isDirty = true;
    if (held) {
      missed += 1;
      fill(hold, `Go on (${f.short(missed)} new)`);
    }
  };

  let stream = new AbortController();
  const connect = async () => {
    stream.abort(new DOMException("another stream is wanted", "AbortError"));
    stream = new AbortController();
    const mine = stream;
    const stop = () => mine.abort(ctx.signal.reason);
    ctx.signal.addEventListener("abort", stop, { once: true });
    for (let wait = 1; !mine.signal.aborted; wait = Math.min(wait * 2, WAIT_MAX)) {
      try {
        await readStream("events/stream", asked, { signal: mine.signal, received, opened: () => { wait = 1; state.textContent = "Connected"; } });
        state.textContent = "The stream ended; connecting again …";
      } catch (error) {
        if (error.name === "AbortError" || error.status === 401) return;
        if (error.status >= 400 && error.status < 500) {
          fill(state, failure(error, connect));
          return;
        }
        state.textContent = `${error.message} Next try in ${wait} s.`;
      }
      try {
        await pause(wait, mine.signal);
      } catch {
        return;
      }
    }
  };
  const change = (members) => {
    Object.assign(asked, members);
    ctx.remember(asked);
    lines.length = 0;
    isDirty = true;
    connect();
  };

  const hold = button("Pause", () => {
    held = !held;
    missed = 0;
    fill(hold, held ? "Go on" : "Pause");
    hold.setAttribute("aria-pressed", String(held));
    draw();
  }, { key: "hold" });
  hold.setAttribute("aria-pressed", "false");
  const input = (label, name) => {
    const control = h("input", { type: "text", value: asked[name], autocomplete: "off", spellcheck: "false", on: { change: () => change({ [name]: control.value.trim() }) } });
    return labelled(label, control);
  };
  const words = h("input", { type: "search", autocomplete: "off", spellcheck: "false", on: { input: () => { wanted.words = words.value.trim().toLowerCase(); isDirty = true; } } });
  isDirty = true;
  draw();
  connect();
  return [
    heading("Live stream", { actions: [hold, button("Clear", () => { lines.length = 0; isDirty = true; draw(); })] }),
    h("div", { class: "toolbar", role: "search", "aria-label": "Narrow the list" },
      input("Topic", "topic"),
      input("Subscription", "subscription"),
      labelled("Show", select([["", "Everything"], ["accepted", "Accepted"], ["attempted", "Attempts"], ["ended", "Ends"]], "", (value) => { wanted.what = value; isDirty = true; })),
      labelled("Containing", words)),
    state,
    nothing,
    grid,
    h("p", { class: "muted" }, `The last ${f.count(LINES_MAX)} are kept here; the rest is found by `, h("a", { href: to.events() }, "search"), "."),
  ];
}

function line(one) {
  const cell = (label, ...children) => h("td", { role: "cell", "data-label": label }, h("div", { class: "cell" }, children));
  const what = one.what === "attempted" && one.outcome
    ? outcomeBadge(one.outcome, one.status)
    : badge(one.what === "ended" && one.state ? one.state : one.what);
  return h("tr", { role: "row" },
    h("th", { scope: "row", role: "rowheader", "data-label": "Event" }, h("a", { href: to.event(String(one.id)) }, brief(one.id, mono))),
    cell("Time", h("time", { datetime: one.at }, f.time(one.at, { precise: true }))),
    cell("What", what),
    cell("Type", brief(one.type)),
    cell("Subject", brief(one.subject)),
    cell("Where", text(one.topic), one.subscription ? [" → ", text(one.subscription.split("/").at(-1))] : null));
}
