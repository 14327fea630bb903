// Pieces that every page is made of.

import { fill, freshId, h, svg } from "./dom.js";
import { SignedOut } from "./api.js";
import * as f from "./format.js";

// ---- the head of a page

/** The heading that has the focus when a page is opened, with what can be done beside it. */
export function heading(title, { actions = [], crumbs = [], note = null, mark = null } = {}) {
  return h(
    "header",
    { class: "page-head" },
    crumbs.length > 0 &&
      h(
        "nav",
        { "aria-label": "You are here", class: "crumbs" },
        h("ol", {}, crumbs.map(([text, href]) => h("li", {}, h("a", { href }, text)))),
      ),
    h(
      "div",
      { class: "page-title" },
      h("h1", { tabindex: "-1", id: "page-heading" }, text(title)),
      mark,
      actions.length > 0 && h("div", { class: "actions" }, actions),
    ),
    note && h("p", { class: "note" }, note),
  );
}

export const section = (title, ...children) => {
  const id = freshId("section");
  return h("section", { class: "panel", "aria-labelledby": id }, h("h2", { id }, title), children);
};

/** A section whose heading has something beside it. */
export const sectionWith = (title, beside, ...children) => {
  const id = freshId("section");
  return h(
    "section",
    { class: "panel", "aria-labelledby": id },
    h("div", { class: "panel-head" }, h("h2", { id }, title), h("div", { class: "actions" }, beside)),
    children,
  );
};

export const button = (text, click, { kind = "", disabled = false, label = null, key = null, type = "button" } = {}) =>
  h("button", { type, class: `button ${kind}`, disabled, "aria-label": label, "data-key": key ?? text, on: { click } }, text);

export const linkButton = (text, href, kind = "") => h("a", { href, class: `button ${kind}` }, text);

// ---- words with a colour; the colour never stands alone

const TONES = {
  ok: ["healthy", "delivered", "Success", "Succeeded", "succeeded", "done", "Enabled", "matched"],
  warn: ["attention", "delayed", "retrying", "retry", "held", "mixed", "awaiting", "AwaitingManualAction", "pending", "cancelled", "incomplete"],
  info: ["probing", "asking", "running", "Creating", "Updating", "InProgress", "accepted", "attempted", "Probation"],
  bad: ["failing", "deadLettered", "deadLetter", "dropped", "drop", "failed", "Failed", "missing", "damaged", "noAccount", "Canceled"],
  quiet: ["idle", "admitting", "paused", "unmatched", "written", "ended", "Disabled"],
};
const MARKS = { ok: "●", warn: "▲", info: "◆", bad: "■", quiet: "○" };

export function tone(word) {
  for (const [name, list] of Object.entries(TONES)) if (list.includes(word)) return name;
  return null;
}

/** An outcome is good if it is a success; every other one is a failure. */
export const outcomeTone = (outcome) => tone(outcome) ?? "bad";

const SPOKEN = { deadLettered: "dead-lettered", deadLetter: "dead letter", attention: "needs attention" };

export function badge(word, as = null) {
  const kind = as ?? tone(word) ?? "quiet";
  return h(
    "span",
    { class: `badge ${kind}` },
    h("span", { "aria-hidden": "true", class: "badge-mark" }, MARKS[kind]),
    spoken(word),
  );
}

/** A word of the API as badges show it. */
export const spoken = (word) => SPOKEN[word] ?? f.words(word);

// ---- values

export const mono = (value) => h("code", {}, text(value));
export const text = (value) => h("bdi", {}, pieces(String(value ?? "")));

/** A column has room for a word of so many characters. Longer ones, such as ids, may be broken anywhere. */
const WORD_MAX = 22;
const LONG_WORD = new RegExp(`[^\\s-]{${WORD_MAX + 1}}`, "u");
/** Words of fewer characters need no place to be broken at. */
const HAS_PIECES = /[^\s-]{16}/u;
/** After a mark, as in URLs and names with dots. */
const PIECES = /(?<=[^./_:,;@?&=][./_:,;@?&=]+)(?![./_:,;@?&=])/u;

/** A text that may be broken where names have their marks, and in the middle of a word only if that is too long for a column. */
function pieces(value) {
  if (!HAS_PIECES.test(value)) return value;
  return value.split(PIECES).map((piece, at) => [at > 0 && h("wbr"), LONG_WORD.test(piece) ? h("span", { class: "unbroken" }, piece) : piece]);
}

const BRIEF = 96;
/** The beginning of what may be very long; the whole is the title. For lists: the page of the thing itself shows all. */
export function brief(value, make = text) {
  const points = [...String(value ?? "")];
  if (points.length <= BRIEF) return make(String(value ?? ""));
  const shown = make(`${points.slice(0, BRIEF - 1).join("")}…`);
  shown.setAttribute("title", points.slice(0, 1000).join(""));
  return shown;
}

/** A resource by its name alone; the whole id is the title. */
export function resource(id) {
  const shown = mono(String(id ?? "").split("/").at(-1));
  shown.setAttribute("title", String(id ?? ""));
  return shown;
}

export function when(value, { precise = false, relative = false } = {}) {
  if (!value) return "–";
  const shown = f.time(value, { precise });
  return h(
    "time",
    { datetime: value, title: `${value} (UTC)` },
    shown,
    relative && h("span", { class: "muted" }, ` (${f.ago(value)})`),
  );
}

/** Names and values. A value that is null is left out. */
export const facts = (pairs) =>
  h(
    "dl",
    { class: "facts" },
    pairs
      .filter((pair) => pair && pair[1] !== null && pair[1] !== undefined)
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );

export function figure(label, value, { unit = "", tone: kind = "", note = null } = {}) {
  return h(
    "div",
    { class: `figure ${kind}` },
    h("dt", {}, label),
    h("dd", {}, h("span", { class: "figure-value" }, value), unit && h("span", { class: "unit" }, ` ${unit}`), note && h("span", { class: "figure-note" }, note)),
  );
}
export const figures = (...items) => h("dl", { class: "figures" }, items);

export const code = (text, label) => h("pre", { class: "code", tabindex: "0", role: "region", "aria-label": label }, h("code", { dir: "ltr" }, text));

// ---- tables

/** A table of no more columns fits a phone as it is. */
const COLUMNS_FEW = 4;
/** From so many numbers on, the card of a row has them side by side. */
const NUMBERS_MANY = 3;

const isBlank = (content) => content === "" || content === "–" || content === null || content === undefined || content === false;

/**
 * A table with a caption. Columns are `{label, cell(row), number?, wide?}`; the first names its row. On a narrow screen each row
 * becomes a card: the roles are said in words, since browsers forget them with the layout. `cards` says so of a table with few columns.
 * With `lines` each row is one line on every screen, and cells end in an ellipsis.
 */
export function table(caption, columns, rows, { showCaption = false, cards = columns.length > COLUMNS_FEW, lines = false } = {}) {
  const head = columns.map((column) =>
    h("th", { scope: "col", role: "columnheader", class: column.number ? "number" : null }, column.label),
  );
  const line = (row) =>
    h(
      "tr",
      { role: "row" },
      columns.map((column, at) => {
        const content = column.cell(row);
        const props = { "data-label": column.label, class: [column.number && "number", column.wide && "wide", isBlank(content) && "blank"].filter(Boolean).join(" ") || null };
        return at === 0
          ? h("th", { ...props, scope: "row", role: "rowheader" }, content)
          : h("td", { ...props, role: "cell" }, h("div", { class: "cell" }, content));
      }),
    );
  return h(
    "table",
    { role: "table", class: lines ? "lines" : cards ? (columns.filter((column) => column.number).length >= NUMBERS_MANY ? "many counts" : "many") : "few" },
    h("caption", { class: showCaption ? null : "sr" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    h("tbody", { role: "rowgroup" }, rows.map(line)),
  );
}

// ---- states

export const loading = (what = "Loading") =>
  h("p", { class: "state loading", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), `${what} …`);

export const empty = (text, ...more) => h("div", { class: "state empty" }, h("p", {}, text), more);

export function failure(error, retry) {
  return h(
    "div",
    { class: "state failed", role: "alert" },
    h("p", {}, h("strong", {}, error.status === 404 ? "Not found. " : "That did not work. "), h("bdi", {}, error.message)),
    retry && button("Try again", retry),
  );
}

export const notice = (kind, ...children) => h("div", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status" }, children);

const turns = new WeakMap();

const wasLeft = (error) => error instanceof SignedOut || error?.name === "AbortError";

/** Shows what a question is answered with, and until then and otherwise why there is nothing. */
export async function load(ctx, box, ask, show) {
  // Answers may overtake each other; only the last question counts.
  const turn = (turns.get(box) ?? 0) + 1;
  turns.set(box, turn);
  if (!box.hasChildNodes()) fill(box, loading());
  try {
    const answer = await ask();
    if (ctx.signal.aborted || turns.get(box) !== turn) return null;
    fill(box, show(answer));
    return answer;
  } catch (error) {
    if (wasLeft(error) || ctx.signal.aborted || turns.get(box) !== turn) return null;
    fill(box, failure(error, () => { fill(box, loading()); load(ctx, box, ask, show); }));
    if (!error.status && error.status !== 0) console.error(error);
    return null;
  }
}

const RELATIVE_MS = 30_000;

/**
 * The same again and again while the page is looked at. What has not changed is not drawn anew; once there is something to see, a
 * failed question says so above it and leaves it there.
 */
export function follow(ctx, box, everySeconds, ask, show) {
  let last = null;
  let timer = null;
  let asking = false;
  let isWantedAgain = false;
  const body = h("div");
  const trouble = h("div");
  fill(box, trouble, body);
  fill(body, loading());
  const turn = async () => {
    clearTimeout(timer);
    if (asking) {
      isWantedAgain = true;
      return;
    }
    asking = true;
    try {
      if (!document.hidden || last === null) {
        const answer = await ask();
        if (ctx.signal.aborted) return;
        // What is said of times, such as "in 3 min", grows old though nothing else changes.
        const said = `${Math.floor(Date.now() / RELATIVE_MS)} ${JSON.stringify(answer)}`;
        if (said !== last) keepOpen(body, () => fill(body, show(answer)));
        last = said;
        fill(trouble);
      }
    } catch (error) {
      if (wasLeft(error) || ctx.signal.aborted) return;
      if (last === null) fill(body);
      fill(trouble, failure(error, turn));
      if (error.status === undefined) console.error(error);
      if (error.status === 404) return;
    } finally {
      asking = false;
    }
    if (isWantedAgain) {
      isWantedAgain = false;
      return turn();
    }
    timer = setTimeout(turn, everySeconds * 1000);
  };
  ctx.signal.addEventListener("abort", () => clearTimeout(timer));
  turn();
  return { again: () => { last = last === null ? null : ""; return turn(); } };
}

/** Draws anew; what the reader has opened or closed stays so. */
function keepOpen(box, draw) {
  const key = (details) => details.dataset.key ?? details.querySelector("summary")?.textContent;
  const known = new Map([...box.querySelectorAll("details")].map((details) => [key(details), details.open]));
  draw();
  for (const details of box.querySelectorAll("details")) details.open = known.get(key(details)) ?? details.open;
}

// ---- things said in passing

export function announce(text) {
  const place = document.getElementById("announcer");
  place.textContent = "";
  setTimeout(() => (place.textContent = text), 50);
}

export function toast(text, kind = "ok") {
  const place = document.getElementById("toasts");
  const item = h("div", { class: `toast ${kind}` }, h("span", {}, text), h("button", { type: "button", class: "icon-button", "aria-label": "Dismiss", on: { click: () => item.remove() } }, "×"));
  place.append(item);
  setTimeout(() => item.remove(), kind === "bad" ? 15_000 : 6000);
}

/** Does something, and says how it went. */
export async function attempt(control, work, success) {
  if (control) control.disabled = true;
  try {
    const answer = await work();
    if (success) toast(typeof success === "function" ? success(answer) : success);
    return answer ?? true;
  } catch (error) {
    if (!wasLeft(error)) toast(error.message, "bad");
    return null;
  } finally {
    if (control) control.disabled = false;
  }
}

export function copyButton(value, label = "Copy") {
  return button(label, async (event) => {
    try {
      await navigator.clipboard.writeText(typeof value === "function" ? value() : value);
      toast("Copied");
    } catch {
      toast("The browser does not let the portal copy; select the text by hand", "bad");
    }
    event.target.focus?.();
  }, { kind: "small", key: `copy:${label}` });
}

// ---- dialogs

/** Opens a dialog. `build(close)` returns what is in it. */
export function openDialog(title, build, { wide = false } = {}) {
  const id = freshId("dialog");
  const before = document.activeElement;
  const dialog = h("dialog", { "aria-labelledby": id, class: wide ? "wide-dialog" : null });
  const close = () => dialog.open && dialog.close();
  dialog.append(
    h("div", { class: "dialog-head" }, h("h2", { id }, title), h("button", { type: "button", class: "icon-button", "aria-label": "Close", on: { click: close } }, "×")),
    h("div", { class: "dialog-body" }, build(close)),
  );
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (before?.isConnected) before.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * Asks whether something that cannot be undone is meant. With `word`, it must be typed. `work` runs inside the dialog: what goes wrong is
 * shown there.
 */
export function confirmDialog({ title, text, action, word = null, danger = true, work }) {
  return openDialog(title, (close) => {
    const trouble = h("div");
    const input = word && h("input", { type: "text", id: freshId("confirm"), autocomplete: "off", spellcheck: "false", autocapitalize: "off" });
    const go = button(action, null, { kind: danger ? "danger" : "primary", type: "submit" });
    const check = () => (go.disabled = Boolean(word) && input.value.trim() !== word);
    if (word) input.addEventListener("input", check);
    check();
    const submit = async (event) => {
      event.preventDefault();
      if (go.disabled) return;
      go.disabled = true;
      fill(trouble, loading("Working"));
      try {
        await work();
        close();
      } catch (error) {
        if (wasLeft(error)) return close();
        fill(trouble, notice("bad", h("bdi", {}, error.message)));
        check();
      }
    };
    return h(
      "form",
      { method: "dialog", on: { submit } },
      h("p", {}, text),
      word && h("div", { class: "field" }, h("label", { for: input.id }, "Type ", mono(word), " to confirm"), input),
      trouble,
      h("div", { class: "dialog-actions" }, button("Cancel", close), go),
    );
  });
}

// ---- small controls

let selects = 0;
export function labelled(label, control) {
  control.id ||= `control-${++selects}`;
  return h("div", { class: "field inline" }, h("label", { for: control.id }, label), control);
}

export function select(options, value, change, props = {}) {
  return h(
    "select",
    { ...props, on: change && { change: (event) => change(event.target.value) } },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)),
  );
}

/** A search box that says what it holds once typing rests. */
export function searchBox(label, value, change) {
  let timer = null;
  const input = h("input", {
    type: "search",
    value,
    autocomplete: "off",
    spellcheck: "false",
    "data-key": "search",
    on: {
      input: () => {
        clearTimeout(timer);
        timer = setTimeout(() => change(input.value.trim()), 300);
      },
    },
  });
  const field = labelled(label, input);
  field.classList.add("grow");
  return field;
}

/** The rest of a list by pages. */
export function pager({ skip, top, total, go }) {
  if (total <= top && skip === 0) return null;
  const last = Math.min(skip + top, total);
  return h(
    "nav",
    { class: "pager", "aria-label": "Pages" },
    button("‹ Previous", () => go(Math.max(0, skip - top)), { disabled: skip === 0, key: "pager-previous" }),
    h("span", {}, total ? `${f.count(skip + 1)}–${f.count(last)} of ${f.count(total)}` : "none"),
    button("Next ›", () => go(skip + top), { disabled: last >= total, key: "pager-next" }),
  );
}

export function disclosure(summary, ...children) {
  return h("details", { class: "disclosure" }, h("summary", {}, summary), children);
}

/** The mark of the house: a post horn. */
export const mark = () =>
  svg(
    "svg",
    { viewBox: "0 0 32 32", class: "mark", "aria-hidden": "true", focusable: "false" },
    svg("circle", { cx: 14.5, cy: 15, r: 6.2 }),
    svg("path", { d: "M4.5 21.2H17c4.2 0 6.2-3.6 9.8-7.4" }),
    svg("path", { d: "M24.3 10.7l5.2 5.2" }),
    svg("path", { d: "M4.5 19.4V23" }),
  );
