// Where is event X? Everything that is recorded about one, drawn along time.

import { fill, h, svg } from "../dom.js";
import { badge, button, code, disclosure, empty, facts, follow, heading, mono, notice, outcomeTone, section, table, text, when } from "../ui.js";
import { get } from "../api.js";
import { to } from "../ids.js";
import { outcomeBadge } from "../shared.js";
import { predicate } from "./lab.js";
import * as f from "../format.js";

const LANES_MAX = 40;
const UNMATCHED_SHOWN = 25;

export default function page(ctx) {
  const id = ctx.params.id;
  ctx.title = `Event ${id}`;
  const box = h("div");
  follow(ctx, box, 5, () => get(`events/${encodeURIComponent(id)}`, {}, ctx.signal), ({ stories }) => show(ctx, stories));
  return [heading(id, { crumbs: [["Events", to.events()]], mark: h("span", { class: "kind" }, "Event") }), box];
}

function show(ctx, stories) {
  if (!stories.length) return empty("Nothing is recorded about this event.");
  const several = stories.length > 1;
  return [
    several && notice("info", `An event of this id was accepted ${f.plural(stories.length, "time")}: the newest is first.`),
    stories.map((story, at) => (several ? h("details", { class: "story", open: at === 0, "data-key": story.position }, h("summary", {}, badge(story.state), " accepted ", when(story.acceptedAt)), one(ctx, story)) : one(ctx, story))),
  ];
}

function one(ctx, story) {
  const all = story.subscriptions ?? [];
  const matched = all.filter((sub) => sub.matched);
  const unmatched = all.filter((sub) => !sub.matched);
  return [
    h("p", { class: "verdict" }, badge(story.state), " ", verdict(story, matched)),
    section("Event", wideFacts([
      ["Topic", [text(story.topic), story.domainTopic ? [" / ", text(story.domainTopic)] : null]],
      ["Type", text(story.type)],
      ["Subject", text(story.subject)],
      ["Source", story.source ? text(story.source) : null],
      ["Schema", text(story.schema)],
      ["Accepted", when(story.acceptedAt, { precise: true, relative: true })],
      ["Published by", text(story.publisher)],
      ["Accepted by", story.acceptedBy ? text(story.acceptedBy) : null],
      ["Size", f.bytes(story.bytes)],
      ["Position", mono(story.position)],
      ["Trace", story.trace ? mono(story.trace) : null],
      ["Replay", story.replay ? `number ${f.count(story.replay)} of this event` : null],
    ])),
    section("Timeline", matched.length ? timeline(ctx, story, matched) : empty("No subscription wanted this event."), matched.map((sub) => lane(story, sub))),
    unmatched.length > 0 && section("Subscriptions that it did not match", missed(unmatched)),
  ];
}

const wideFacts = (pairs) => {
  const list = facts(pairs);
  list.classList.add("two");
  return list;
};

function verdict(story, matched) {
  if (!matched.length) return "Accepted; none of the topic's subscriptions matched it.";
  const by = (state) => matched.filter((sub) => sub.state === state).length;
  const words = [["delivered", "delivered to"], ["pending", "waiting for a first attempt to"], ["retrying", "being tried again to"], ["held", "held back for"], ["deadLettered", "dead-lettered for"], ["dropped", "dropped for"]];
  return `${words.filter(([state]) => by(state)).map(([state, said]) => `${said} ${f.plural(by(state), "subscription")}`).join(", ")}.`.replace(/^./, (c) => c.toUpperCase());
}

// ---- the drawing: one lane per subscription along a scale that stretches what is near and shrinks what is far

const TICKS = [[0.01, "10 ms"], [0.1, "0.1 s"], [1, "1 s"], [10, "10 s"], [60, "1 min"], [600, "10 min"], [3600, "1 h"], [21_600, "6 h"], [86_400, "1 d"], [604_800, "7 d"]];
const bend = (s) => Math.log10(1 + Math.max(0, s) / 0.005);
const LANE = 34;
const HEAD = 26;

function timeline(ctx, story, matched) {
  const drawing = h("div", { class: "timeline" });
  const begin = f.instant(story.acceptedAt);
  const since = (at) => (f.instant(at) - begin) / 1000;
  const shown = matched.slice(0, LANES_MAX);
  const points = shown.flatMap((sub) => [...(sub.attempts ?? []).map((one) => since(one.at) + (one.timings?.totalMs ?? 0) / 1000), sub.next?.at ? since(sub.next.at) : 0, sub.ended?.at ? since(sub.ended.at) : 0]);
  const last = Math.max(0.1, ...points.filter(Number.isFinite)) * 1.6;
  const draw = () => {
    const width = drawing.clientWidth;
    if (width <= 0) return;
    const left = width < 520 ? 12 : 170;
    const x = (s) => left + 8 + ((width - left - 30) * bend(s)) / bend(last);
    const names = left < 100;
    const lane = names ? LANE + 14 : LANE;
    const height = HEAD + shown.length * lane + 8;
    let used = -100;
    const grid = [[0, "accepted"], ...TICKS].filter(([s]) => s <= last).map(([s, label]) => {
      const at = x(s);
      const room = at - used > 44;
      // The first label stands beside its line where there is no room before it.
      if (room) used = s === 0 && names ? at + 36 : at;
      return [svg("path", { d: `M${at} ${HEAD - 6}V${height}`, class: s === 0 ? "axis" : "grid" }), room && svg("text", { x: at, y: 12, class: "tick", "text-anchor": s === 0 && names ? "start" : "middle" }, label)];
    });
    const rows = shown.map((sub, i) => {
      const y = HEAD + i * lane + (names ? lane - 14 : lane / 2);
      const name = svg("text", { x: names ? left : left - 4, y: names ? y - 16 : y, class: "lane-name", "text-anchor": names ? "start" : "end", "dominant-baseline": "middle" }, shorten(sub.name, names ? 44 : 24));
      const attempts = sub.attempts ?? [];
      const ends = [...attempts.map((one) => since(one.at)), sub.ended?.at ? since(sub.ended.at) : 0];
      const until = Math.max(0, ...ends.filter(Number.isFinite));
      const marks = attempts.map((one) => {
        const [from, to] = [x(since(one.at)), x(since(one.at) + (one.timings?.totalMs ?? 0) / 1000)];
        return [svg("path", { d: `M${from} ${y}H${Math.max(to, from + 1)}`, class: `span ${outcomeTone(one.outcome)}` }), glyph(outcomeTone(one.outcome), Math.max(to, from + 1), y)];
      });
      const next = sub.next?.at && since(sub.next.at) > 0 ? [svg("path", { d: `M${x(until)} ${y}H${x(since(sub.next.at))}`, class: "wait" }), glyph("next", x(since(sub.next.at)), y)] : null;
      const end = sub.ended?.at && sub.ended.disposition !== "delivered" ? glyph("end", x(since(sub.ended.at)) + 9, y) : null;
      return [name, svg("path", { d: `M${x(0)} ${y}H${x(until)}`, class: "track" }), glyph("start", x(0), y), marks, next, end];
    });
    const label = `Timeline of ${f.plural(shown.length, "subscription")}; the lists below say the same in words`;
    fill(drawing, svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, grid, rows));
  };
  const observer = new ResizeObserver(draw);
  observer.observe(drawing);
  ctx.signal.addEventListener("abort", () => observer.disconnect());
  return [
    drawing,
    h("ul", { class: "legend" }, [["start", "accepted"], ["ok", "delivered"], ["bad", "failed attempt"], ["info", "held on probation"], ["next", "next attempt"], ["end", "given up"]].map(([kind, said]) =>
      h("li", {}, svg("svg", { viewBox: "-8 -8 16 16", width: 14, height: 14, "aria-hidden": "true", focusable: "false" }, glyph(kind, 0, 0)), said))),
    matched.length > LANES_MAX && h("p", { class: "muted" }, `Drawn are the first ${LANES_MAX} of ${f.count(matched.length)}.`),
  ];
}

const shorten = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

/** Each outcome has a form of its own beside its colour. */
function glyph(kind, x, y) {
  const at = { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, class: `glyph ${kind}` };
  switch (kind) {
    case "ok": return svg("circle", { ...at, r: 5.5 });
    case "start": return svg("circle", { ...at, r: 3.5 });
    case "bad": return svg("path", { ...at, d: "M-4.5 -4.500L4.500 4.500M4.500 -4.500L-4.500 4.500" });
    case "warn": return svg("path", { ...at, d: "M0 -6L6 5H-6z" });
    case "next": return svg("circle", { ...at, r: 5 });
    case "end": return svg("rect", { ...at, x: -4.5, y: -4.5, width: 9, height: 9 });
    default: return svg("path", { ...at, d: "M0 -6L6 0L0 6L-6 0z" });
  }
}

// ---- the same in words

function lane(story, sub) {
  const attempts = sub.attempts ?? [];
  const begin = f.instant(story.acceptedAt);
  const offset = (at) => `+${f.millis(f.instant(at) - begin)}`;
  const steps = [step("start", when(story.acceptedAt, { precise: true }), "", "Accepted and written down; it matched the filter.")];
  for (const one of attempts) steps.push(attemptStep(sub, one, offset));
  if (sub.next && sub.next.why === "paused") steps.push(step("next", "", "", h("span", {}, h("strong", {}, "On hold: "), text(sub.next.text))));
  else if (sub.next) steps.push(step("next", when(sub.next.at, { precise: true }), offset(sub.next.at), h("span", {}, h("strong", {}, "Next attempt "), `${f.ago(sub.next.at)}: `, sub.next.text ? text(sub.next.text) : REASONS[sub.next.why] ?? text(f.words(sub.next.why)))));
  // A success says itself that it was delivered.
  const isSaid = sub.ended?.disposition === "delivered" && attempts.at(-1)?.outcome === "Success";
  if (sub.ended && !isSaid) steps.push(endStep(sub.ended, offset));
  return h("section", { class: "lane", "aria-label": `Subscription ${sub.name}` },
    h("h3", {}, h("a", { href: to.subscription(sub.id) }, text(sub.name)), " ", badge(sub.state)),
    h("ol", { class: "steps" }, steps));
}

const step = (kind, at, offset, ...children) =>
  h("li", { class: `step ${kind}` },
    svg("svg", { viewBox: "-8 -8 16 16", width: 16, height: 16, "aria-hidden": "true", focusable: "false" }, glyph(kind, 0, 0)),
    h("div", { class: "step-time" }, at, offset && h("span", { class: "muted" }, ` ${offset}`)),
    h("div", { class: "step-body" }, children));

const REASONS = {
  schedule: "the next step of the retry schedule",
  floor: "the least wait after such an answer",
  retryAfter: "the endpoint asked for it (Retry-After)",
  probation: "the endpoint is left alone for now",
  jitter: "the schedule, with a little chance",
  ttl: "the last moment before it expires",
};
const DECISIONS = { done: "Done.", retry: "To be tried again", deadLetter: "Set aside as a dead letter", drop: "Dropped" };

function attemptStep(sub, one, offset) {
  const t = one.timings ?? {};
  const timings = [["queued", t.queuedMs], ["connect", t.connectMs], ["first byte", t.firstByteMs], ["total", t.totalMs]].filter(([, ms]) => typeof ms === "number");
  const d = one.decision ?? {};
  const why = d.reason ? f.words(d.reason) : d.why && (REASONS[d.why] ?? f.words(d.why));
  return step(outcomeTone(one.outcome), when(one.at, { precise: true }), offset(one.at),
    h("p", {}, h("strong", {}, `Attempt ${f.count(one.number)} `), outcomeBadge(one.outcome, one.status), one.batch > 1 && h("span", { class: "muted" }, ` with ${f.plural(one.batch - 1, "other event")}`), one.node && h("span", { class: "muted" }, " by ", text(one.node))),
    h("p", {}, mono(one.endpoint)),
    timings.length > 0 && h("p", { class: "timings" }, timings.map(([name, ms]) => h("span", {}, h("span", { class: "muted" }, `${name} `), f.millis(ms)))),
    d.kind && d.kind !== "done" && h("p", {}, DECISIONS[d.kind] ?? f.words(d.kind), d.at && [" at ", when(d.at, { precise: true })], why && [": ", text(why)]),
    one.response?.snippet ? response(sub, one) : null);
}

function response(sub, one) {
  const shown = disclosure(["Response", one.response.contentType ? [" (", text(one.response.contentType), ")"] : "", one.response.truncated ? ", the beginning" : ""], code(one.response.truncated ? one.response.snippet : f.prettyText(one.response.snippet), `Response of the endpoint to attempt ${one.number}`));
  shown.dataset.key = `response:${sub.id}:${one.number}`;
  return shown;
}

function endStep(ended, offset) {
  const isGood = ended.disposition === "delivered" || ended.disposition === "done";
  return step(isGood ? "ok" : "end", when(ended.at, { precise: true }), offset(ended.at),
    h("p", {}, badge(ended.disposition), ended.reason && [" ", text(f.words(ended.reason))]),
    ended.pending && h("p", {}, text(ended.pending.text), ended.pending.due && [", due ", when(ended.pending.due, { precise: true })]),
    ended.blob && h("p", {}, "Dead-letter blob: ", mono(`${ended.blob.account}/${ended.blob.container}/${ended.blob.path}`)));
}

function missed(unmatched) {
  const box = h("div");
  const draw = (rows) => fill(box,
    table("Subscriptions that the event did not match, and the predicate that failed", [
      { label: "Subscription", cell: (sub) => h("a", { href: to.subscription(sub.id) }, text(sub.name)) },
      { label: "Why not", wide: true, cell: (sub) => predicate(sub.predicate) },
      { label: "Try", number: true, cell: (sub) => h("a", { href: to.lab({ subscription: sub.id }), "aria-label": `Lab: the filter of ${sub.name}` }, "Lab") },
    ], rows),
    rows.length < unmatched.length && button(`Show all ${f.count(unmatched.length)}`, () => draw(unmatched)));
  draw(unmatched.slice(0, UNMATCHED_SHOWN));
  return box;
}
