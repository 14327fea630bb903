// Charts, drawn by hand. Each is a figure with a drawing, a line that says what the pointer is over, and the same numbers as a table.

import { fill, h, svg } from "./dom.js";
import { button, table } from "./ui.js";
import * as f from "./format.js";

const HEIGHT = 170;
const LEFT_MIN = 46;
/** Between the labels of the left axis and the drawing. */
const LABEL_GAP = 6;
/** The width of a character of these labels, at most; they are 11 px high. */
const LABEL_CHARACTER = 7.4;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 22;
/** More points than this are drawn together. */
const POINTS_MAX = 180;

const total = (values) => values.reduce((a, b) => a + (b ?? 0), 0);
const greatest = (values) => values.reduce((a, b) => Math.max(a, b ?? 0), 0);

/**
 * `series` are `{name, values, look: "line" | "bars", colour: "a" … "e", dash?}`; `join` says how neighbours are drawn together; `steps`
 * are the round distances between ticks. Bars stand on each other, lines do not.
 */
export function chart({ title, start, stepSeconds, series, format = f.short, steps = decimalStep, unit = "", join = "sum", signal }) {
  const drawing = h("div", { class: "chart-drawing" });
  const readout = h("p", { class: "chart-readout", "aria-hidden": "true" });
  const rows = h("div", { class: "chart-table", hidden: true });
  const first = f.instant(start);
  const grouped = together(series, join);
  const at = (index) => first + index * grouped.size * stepSeconds * 1000;
  const data = { ...grouped, at, format, steps, unit, title };

  const toggle = button("Table", () => {
    const show = rows.hidden;
    rows.hidden = !show;
    drawing.hidden = show;
    readout.hidden = show;
    toggle.setAttribute("aria-pressed", String(show));
    if (show && !rows.hasChildNodes()) fill(rows, asTable(data));
  }, { kind: "small", label: `${title}: show as a table`, key: `table:${title}` });
  toggle.setAttribute("aria-pressed", "false");

  const draw = () => {
    const width = drawing.clientWidth;
    if (width > 0) fill(drawing, picture(data, width, readout));
  };
  const observer = new ResizeObserver(draw);
  observer.observe(drawing);
  signal?.addEventListener("abort", () => observer.disconnect());
  fill(readout, summary(data));
  return h(
    "figure",
    { class: "chart" },
    h("figcaption", {}, h("span", { class: "chart-title" }, title), legend(series), toggle),
    drawing,
    readout,
    rows,
  );
}

function together(series, join) {
  const length = Math.max(0, ...series.map((one) => one.values.length));
  const size = Math.max(1, Math.ceil(length / POINTS_MAX));
  const merge = join === "sum" ? (part) => total(part) / part.length : greatest;
  const shrink = (values) => {
    const shrunk = [];
    for (let i = 0; i < values.length; i += size) {
      const part = values.slice(i, i + size);
      shrunk.push(part.every((value) => value === null || value === undefined) ? null : merge(part));
    }
    return shrunk;
  };
  return { size, series: series.map((one) => ({ ...one, values: shrink(one.values) })), length: Math.ceil(length / size) };
}

const legend = (series) =>
  h(
    "ul",
    { class: "legend", "aria-label": "Legend" },
    series.map((one) =>
      h(
        "li",
        {},
        svg(
          "svg",
          { viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true", focusable: "false" },
          one.look === "line"
            ? svg("path", { d: "M0 5H18", class: `line ${one.colour}`, "stroke-dasharray": one.dash })
            : svg("rect", { x: 1, y: 1, width: 16, height: 8, class: `bar ${one.colour}` }),
        ),
        one.name,
      ),
    ),
  );

function summary({ series, format, unit }) {
  const parts = series.map((one) => {
    const seen = one.values.filter((value) => value !== null && value !== undefined);
    if (!seen.length) return `${one.name}: no data`;
    return `${one.name}: now ${format(seen.at(-1))}, at most ${format(greatest(seen))}`;
  });
  return `${parts.join(" · ")}${unit ? ` ${unit}` : ""}`;
}

/** The least of 1, 2, 2.5, 5 or 10 times a power of ten that is at least `rough`. */
function decimalStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
}

const SECOND = 1000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
/** Distances between ticks from one second on: whole in the unit that the labels are in. */
const TIME_STEPS = [
  ...[1, 2, 5, 10, 20, 30].map((n) => n * SECOND), ...[1, 2, 5, 10, 20, 30].map((n) => n * MINUTE), ...[1, 2, 3, 6, 12].map((n) => n * HOUR),
];

/** The same for milliseconds that are shown as times. */
function timeStep(rough) {
  if (rough <= SECOND / 2) return decimalStep(rough);
  return TIME_STEPS.find((step) => step >= rough) ?? decimalStep(rough / DAY) * DAY;
}

/** A round number at or above the greatest value, and the ticks up to there. */
function scale(most, stepAbove = decimalStep) {
  if (!(most > 0)) return { top: 1, ticks: [0, 1] };
  const step = stepAbove(most / 3);
  const ticks = [];
  for (let value = 0; ; value += step) {
    ticks.push(value);
    if (value >= most) break;
  }
  return { top: ticks.at(-1), ticks };
}

function picture(data, width, readout) {
  const { series, length, at, format, steps, title } = data;
  const bars = series.filter((one) => one.look === "bars");
  const stacked = Array.from({ length }, (_, i) => total(bars.map((one) => one.values[i])));
  const most = Math.max(greatest(stacked), ...series.filter((one) => one.look !== "bars").map((one) => greatest(one.values)));
  const { top, ticks } = scale(most, steps);
  const labels = ticks.map(format);
  const left = Math.max(LEFT_MIN, Math.ceil(greatest(labels.map((label) => label.length)) * LABEL_CHARACTER) + LABEL_GAP);
  const inner = { width: Math.max(10, width - left - RIGHT), height: HEIGHT - TOP - BOTTOM };
  const slot = inner.width / Math.max(1, length);
  const x = (i) => left + (i + 0.5) * slot;
  const y = (value) => TOP + inner.height * (1 - value / top);

  const grid = ticks.map((value, tick) => [
    svg("path", { d: `M${left} ${y(value)}H${width - RIGHT}`, class: value === 0 ? "axis" : "grid" }),
    svg("text", { x: left - LABEL_GAP, y: y(value), class: "tick", "text-anchor": "end", "dominant-baseline": "middle" }, labels[tick]),
  ]);
  const every = Math.max(1, Math.ceil(length / Math.max(2, Math.floor(inner.width / 80))));
  const times = [];
  for (let i = length - 1; i >= 0; i -= every) {
    // The first label would be cut off by the edge.
    if (x(i) > left + 14) times.push(svg("text", { x: Math.min(x(i), width - RIGHT - 16), y: HEIGHT - 6, class: "tick", "text-anchor": "middle" }, f.minute(at(i))));
  }

  const base = new Array(length).fill(0);
  const drawn = series.map((one) => {
    if (one.look === "bars") {
      let d = "";
      one.values.forEach((value, i) => {
        if (!value) return;
        const [from, until] = [y(base[i]), y(base[i] + value)];
        base[i] += value;
        const [w, gap] = [Math.max(1, slot * 0.78), slot * 0.11];
        d += `M${(left + i * slot + gap).toFixed(1)} ${from.toFixed(1)}v${Math.min(-1, until - from).toFixed(1)}h${w.toFixed(1)}V${from.toFixed(1)}z`;
      });
      return svg("path", { d, class: `bar ${one.colour}` });
    }
    let d = "";
    let pen = "M";
    one.values.forEach((value, i) => {
      if (value === null || value === undefined) {
        pen = "M";
        return;
      }
      d += `${pen}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
      // A point that stands alone has no line to be seen by; one without length still has its round ends.
      if (pen === "M") d += "h0";
      pen = "L";
    });
    return svg("path", { d, class: `line ${one.colour}`, "stroke-dasharray": one.dash });
  });

  const hair = svg("path", { class: "hair", d: "" });
  const rest = () => {
    hair.setAttribute("d", "");
    fill(readout, summary(data));
  };
  const over = (event) => {
    const box = picture.getBoundingClientRect();
    const i = Math.floor((event.clientX - box.left - left) / slot);
    if (i < 0 || i >= length) return rest();
    hair.setAttribute("d", `M${x(i)} ${TOP}V${HEIGHT - BOTTOM}`);
    const values = series.map((one) => `${one.name} ${one.values[i] === null || one.values[i] === undefined ? "–" : format(one.values[i])}`);
    fill(readout, `${f.minute(at(i))}: ${values.join(" · ")}`);
  };
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": `${title}. ${summary(data)}`, on: { pointermove: over, pointerleave: rest } },
    grid,
    times,
    drawn,
    hair,
  );
  return picture;
}

function asTable({ series, length, at, format, title, size }) {
  const order = Array.from({ length }, (_, i) => length - 1 - i);
  const columns = [
    { label: "Time", cell: (i) => f.minute(at(i)) },
    ...series.map((one) => ({ label: one.name, number: true, cell: (i) => (one.values[i] === null || one.values[i] === undefined ? "–" : format(one.values[i])) })),
  ];
  const each = size > 1 ? `, ${size} minutes together` : "";
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, table(`${title}, newest first${each}`, columns, order, { showCaption: true }));
}

// ---- the series of the API

/** The three charts of a server or of one subscription. */
export function trafficCharts(data, signal) {
  const common = { start: data.start, stepSeconds: data.stepSeconds, signal };
  const perMinute = (values) => values ?? [];
  return h(
    "div",
    { class: "charts" },
    chart({
      ...common,
      title: "Deliveries per minute",
      series: [
        { name: "Delivered", values: perMinute(data.delivered), look: "bars", colour: "a" },
        ...(data.published ? [{ name: "Published", values: data.published, look: "line", colour: "b", dash: "4 3" }] : []),
      ],
    }),
    chart({
      ...common,
      title: "Failures per minute",
      series: [
        { name: "Failed attempts", values: perMinute(data.failed), look: "bars", colour: "d" },
        { name: "Dead-lettered", values: perMinute(data.deadLettered), look: "bars", colour: "e" },
        { name: "Dropped", values: perMinute(data.dropped), look: "bars", colour: "c" },
      ],
    }),
    chart({
      ...common,
      title: "Latency, accepted to delivered",
      join: "max",
      format: f.millis,
      steps: timeStep,
      series: [
        { name: "p99", values: perMinute(data.p99Ms), look: "line", colour: "c", dash: "1 3" },
        { name: "p95", values: perMinute(data.p95Ms), look: "line", colour: "d", dash: "6 3" },
        { name: "p50", values: perMinute(data.p50Ms), look: "line", colour: "a" },
      ],
    }),
  );
}
