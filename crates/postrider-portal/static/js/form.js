// Forms whose fields know which member of the body they write, so that an error of the server finds its way back to them.

import { fill, freshId, h } from "./dom.js";
import { Problem } from "./api.js";

/** A number with all the digits that were typed, where the browser can send them. */
export function exactNumber(text) {
  const trimmed = text.trim();
  if (!/^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(trimmed)) return null;
  return typeof JSON.rawJSON === "function" ? JSON.rawJSON(trimmed) : Number(trimmed);
}

export class Form {
  #fields = [];
  #summary = h("div", { class: "error-summary", tabindex: "-1", role: "alert", hidden: true });
  #progress = h("div", { class: "form-progress" });

  get summary() {
    return this.#summary;
  }

  get progress() {
    return this.#progress;
  }

  /**
   * One field. `path` is the member that it writes (text, or a function where that depends on other fields); `read` turns what is in
   * the control into the member's value, undefined to leave it out, and may throw with a reason.
   */
  field({ label, control, path, help = null, read, optional = false, wide = false, beside = null }) {
    const id = (control.id ||= freshId("field"));
    const describedBy = [];
    const hint = help && h("p", { class: "help", id: `${id}-help` }, help);
    if (hint) describedBy.push(hint.id);
    const trouble = h("p", { class: "error", id: `${id}-error`, hidden: true });
    describedBy.push(trouble.id);
    control.setAttribute("aria-describedby", describedBy.join(" "));
    const isCheck = control.type === "checkbox";
    const caption = h("label", { for: id }, label, optional && h("span", { class: "optional" }, " (optional)"));
    const element = isCheck
      ? h("div", { class: "field check" }, h("div", { class: "check-line" }, control, caption), hint, trouble)
      : h("div", { class: wide ? "field wide" : "field" }, caption, beside ? h("div", { class: "beside" }, control, beside) : control, hint, trouble);
    const field = {
      element,
      control,
      label,
      path: typeof path === "function" ? path : () => path,
      value: () => {
        try {
          return read ? read(control) : control.value;
        } catch (reason) {
          throw new Problem(400, reason.message, { target: field.path() });
        }
      },
      refuse: (text) => {
        trouble.hidden = !text;
        fill(trouble, text && [h("span", { class: "sr" }, "Error: "), text]);
        if (text) control.setAttribute("aria-invalid", "true");
        else control.removeAttribute("aria-invalid");
      },
    };
    control.addEventListener("input", () => field.refuse(null));
    this.#fields.push(field);
    return field;
  }

  text({ value = "", type = "text", placeholder = null, list = null, required = false, keepSpaces = false, disabled = false, ...rest }) {
    const control = h("input", { type, value: value ?? "", placeholder, list, disabled, autocomplete: type === "password" ? "new-password" : "off", spellcheck: "false", autocapitalize: "off", "aria-required": required ? "true" : null });
    const read = (input) => {
      const text = keepSpaces ? input.value : input.value.trim();
      if (text === "") {
        if (required) throw new Error("is required");
        return undefined;
      }
      return text;
    };
    return this.field({ control, read, optional: !required, ...rest });
  }

  number({ value = "", min, max, required = false, placeholder = null, ...rest }) {
    const control = h("input", { type: "number", value: value ?? "", min, max, step: 1, placeholder, inputmode: "numeric" });
    const read = (input) => {
      if (input.value === "") {
        if (input.validity.badInput) throw new Error("must be a whole number");
        if (required) throw new Error("is required");
        return undefined;
      }
      const number = Number(input.value);
      if (!Number.isInteger(number) || number < min || number > max) throw new Error(`must be a whole number from ${min} to ${max}`);
      return number;
    };
    return this.field({ control, read, optional: !required, ...rest });
  }

  check({ value = false, disabled = false, ...rest }) {
    return this.field({ control: h("input", { type: "checkbox", checked: Boolean(value), disabled }), read: (input) => input.checked, ...rest });
  }

  choice({ value = "", options, change = null, disabled = false, ...rest }) {
    const control = h(
      "select",
      { disabled, on: { change: change && (() => change(control.value)) } },
      options.map((option) =>
        Array.isArray(option[1])
          ? h("optgroup", { label: option[0] }, option[1].map(([key, text]) => h("option", { value: key, selected: key === value }, text)))
          : h("option", { value: option[0], selected: option[0] === value }, option[1]),
      ),
    );
    return this.field({ control, read: (input) => (input.value === "" ? undefined : input.value), ...rest });
  }

  area({ value = "", rows = 3, required = false, ...rest }) {
    const control = h("textarea", { rows, spellcheck: "false", autocapitalize: "off", dir: "auto" });
    control.value = value ?? "";
    const read = (input) => {
      if (required && !input.value.trim()) throw new Error("is required");
      return input.value;
    };
    return this.field({ control, read, optional: !required, wide: true, ...rest });
  }

  /** Texts, one to a line. */
  lines({ value = [], ...rest }) {
    return this.area({
      ...rest,
      value: value.join("\n"),
      read: (input) => {
        const list = input.value.split("\n").filter((line) => line !== "");
        return list.length ? list : undefined;
      },
    });
  }

  /**
   * Rows that can be added and removed. `make(path, value)` returns `{element, value()}`; `path()` is that of the row where it
   * stands now.
   */
  rows({ legend, path, values = [], make, add, none = null, changed = () => {} }) {
    const rows = [];
    const list = h("ol", { class: "rows" });
    const nothing = none && h("p", { class: "help" }, none);
    const append = (value, focus) => {
      const row = {};
      const at = () => `${typeof path === "function" ? path() : path}[${rows.indexOf(row)}]`;
      Object.assign(row, make(at, value));
      const remove = h("button", { type: "button", class: "button small quiet", on: { click: () => {
        const index = rows.indexOf(row);
        rows.splice(index, 1);
        line.remove();
        if (nothing) nothing.hidden = rows.length > 0;
        (list.children[Math.min(index, rows.length - 1)]?.querySelector("input, select, textarea") ?? adder).focus();
        changed();
      } } }, "Remove");
      const line = h("li", { class: "row" }, row.element, remove);
      rows.push(row);
      const number = () => rows.indexOf(row) + 1;
      remove.addEventListener("focus", () => remove.setAttribute("aria-label", `Remove ${legend} ${number()}`));
      list.append(line);
      if (nothing) nothing.hidden = true;
      if (focus) line.querySelector("input, select, textarea")?.focus();
    };
    const adder = h("button", { type: "button", class: "button small", on: { click: () => { append(undefined, true); changed(); } } }, add);
    for (const value of values) append(value, false);
    return {
      element: h("fieldset", { class: "group" }, h("legend", {}, legend), nothing, list, adder),
      value: () => rows.map((row) => row.value()),
      clear: () => {
        rows.length = 0;
        list.replaceChildren();
        if (nothing) nothing.hidden = false;
      },
      append: (value) => append(value, false),
    };
  }

  /** Takes what was said about errors away. */
  clear() {
    this.#summary.hidden = true;
    this.#summary.replaceChildren();
    for (const field of this.#live()) field.refuse(null);
  }

  #live() {
    this.#fields = this.#fields.filter((field) => field.element.isConnected);
    return this.#fields.filter((field) => !field.element.closest("[hidden]"));
  }

  /** The field that a path means: itself, the nearest around it, or the first inside it. */
  #find(target) {
    if (!target) return null;
    const wanted = target.toLowerCase();
    let best = null;
    for (const field of this.#live()) {
      const path = field.path()?.toLowerCase();
      if (!path) continue;
      if (path === wanted) return field;
      const around = wanted.startsWith(`${path}.`) || wanted.startsWith(`${path}[`);
      if (around && (!best || path.length > best.path().length)) best = field;
    }
    return best ?? this.#live().find((field) => field.path()?.toLowerCase().startsWith(wanted)) ?? null;
  }

  /** Shows a problem at its field and in a summary, which gets the focus. */
  show(problem) {
    this.clear();
    const field = this.#find(problem.target);
    let said = problem.message;
    // The server's sentence names the path, perhaps after a word about the request; beside the field itself that is noise.
    for (const path of [`${problem.target} `, `${problem.target}: `]) {
      const at = problem.target ? said.indexOf(path) : -1;
      if (at === 0 || (field && at > 0 && said.slice(0, at).endsWith(": "))) said = said.slice(at + path.length);
    }
    if (field) field.refuse(said);
    const line = field
      ? h("button", { type: "button", class: "link", on: { click: () => reveal(field.control) } }, `${field.label}: ${said}`)
      : h("span", {}, problem.message);
    fill(this.#summary, h("h2", {}, "There is a problem"), h("ul", {}, h("li", {}, line)));
    this.#summary.hidden = false;
    this.#summary.focus();
    this.#summary.scrollIntoView({ block: "nearest" });
  }
}

function reveal(control) {
  for (let at = control.closest("details"); at; at = at.parentElement?.closest("details")) at.open = true;
  control.focus();
  control.scrollIntoView({ block: "center" });
}

/** A part of a form, closed unless it matters. */
export function part(title, { open = true, note = null } = {}, ...children) {
  return h("details", { class: "part", open }, h("summary", {}, h("h2", {}, title)), note && h("p", { class: "help" }, note), h("div", { class: "part-body" }, children));
}

/** Leaves out what is undefined, deeply, and objects that nothing is left of. */
export function compact(value) {
  if (Array.isArray(value)) return value.map(compact);
  if (value === null || typeof value !== "object" || (typeof JSON.isRawJSON === "function" && JSON.isRawJSON(value))) return value;
  const kept = Object.entries(value).filter(([, member]) => member !== undefined).map(([name, member]) => [name, compact(member)]);
  return Object.fromEntries(kept.filter(([, member]) => member !== undefined));
}
