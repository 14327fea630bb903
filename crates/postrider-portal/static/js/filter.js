// The editor of filters, for subscriptions and for the lab.

import { fill, freshId, h } from "./dom.js";
import { compact, exactNumber } from "./form.js";

const OPERATORS = [
  ["Text", "strings", ["StringIn", "StringNotIn", "StringBeginsWith", "StringNotBeginsWith", "StringEndsWith", "StringNotEndsWith", "StringContains", "StringNotContains"]],
  ["Numbers", "numbers", ["NumberIn", "NumberNotIn"]],
  ["Number", "number", ["NumberLessThan", "NumberLessThanOrEquals", "NumberGreaterThan", "NumberGreaterThanOrEquals"]],
  ["Ranges", "ranges", ["NumberInRange", "NumberNotInRange"]],
  ["True or false", "bool", ["BoolEquals"]],
  ["Presence", "none", ["IsNullOrUndefined", "IsNotNull"]],
];
const operandOf = (operator) => OPERATORS.find(([, , names]) => names.some((name) => name.toLowerCase() === String(operator).toLowerCase()))?.[1] ?? "strings";
const operatorOf = (text) => OPERATORS.flatMap(([, , names]) => names).find((name) => name.toLowerCase() === String(text).toLowerCase()) ?? "StringIn";

const ADVANCED_MAX = 25;
const KEYS = ["id", "topic", "subject", "eventType", "dataVersion", "source", "type", "data."];

/**
 * An editor for one filter. `path` is where it stands in the body; `changed` is told of every change. `value()` gives the filter, undefined
 * if nothing is filtered.
 */
export function filterEditor(form, { path, filter = {}, eventTypes = [], changed = () => {} }) {
  let read = null;
  let isText = false;
  const box = h("div", { class: "filter-fields" });
  const keys = h("datalist", { id: freshId("keys") }, KEYS.map((key) => h("option", { value: key })));

  const build = (given) => {
    const types = form.lines({
      label: "Event types",
      path: `${path}.includedEventTypes`,
      value: given.includedEventTypes ?? [],
      help: ["One per line. Empty: all types.", eventTypes.length > 0 && ` Known: ${eventTypes.slice(0, 12).join(", ")}${eventTypes.length > 12 ? ", …" : ""}`],
    });
    const begins = form.text({ label: "Subject begins with", path: `${path}.subjectBeginsWith`, value: given.subjectBeginsWith, keepSpaces: true });
    const ends = form.text({ label: "Subject ends with", path: `${path}.subjectEndsWith`, value: given.subjectEndsWith, keepSpaces: true });
    const sensitive = form.check({ label: "Upper and lower case differ in subjects", path: `${path}.isSubjectCaseSensitive`, value: given.isSubjectCaseSensitive });
    const arrays = form.check({ label: "Look into arrays", path: `${path}.enableAdvancedFilteringOnArrays`, value: given.enableAdvancedFilteringOnArrays, help: "A key that leads to an array matches if any of its elements does." });
    const advanced = form.rows({
      legend: "Advanced filters",
      path: `${path}.advancedFilters`,
      values: given.advancedFilters ?? [],
      add: "Add an advanced filter",
      none: `All of them must match, up to ${ADVANCED_MAX}.`,
      changed,
      make: (at, value) => advancedRow(form, at, value, keys.id),
    });
    fill(box, keys, types.element, h("div", { class: "columns" }, begins.element, ends.element), sensitive.element, arrays.element, advanced.element);
    read = () => {
      const list = advanced.value();
      return compact({
        includedEventTypes: types.value(),
        subjectBeginsWith: begins.value(),
        subjectEndsWith: ends.value(),
        isSubjectCaseSensitive: sensitive.value() || undefined,
        enableAdvancedFilteringOnArrays: arrays.value() || undefined,
        advancedFilters: list.length ? list : undefined,
      });
    };
  };

  const buildText = (given) => {
    const area = form.area({
      label: "Filter as JSON",
      path,
      rows: 12,
      value: JSON.stringify(given, null, 2),
      read: (input) => {
        let parsed;
        try {
          parsed = JSON.parse(input.value.trim() || "{}");
        } catch (error) {
          throw new Error(`is not JSON: ${error.message}`);
        }
        if (parsed === null || typeof parsed !== "object" || Array.isArray(parsed)) throw new Error("must be a JSON object");
        return parsed;
      },
    });
    area.control.classList.add("code-input");
    area.control.setAttribute("dir", "ltr");
    fill(box, area.element);
    read = () => area.value();
  };

  const toggle = h("button", { type: "button", class: "button small", "aria-pressed": "false", on: { click: () => {
    let now;
    try {
      now = read();
    } catch (problem) {
      return form.show(problem);
    }
    isText = !isText;
    toggle.setAttribute("aria-pressed", String(isText));
    (isText ? buildText : build)(now);
    changed();
  } } }, "Edit as JSON");
  build(filter);
  const element = h("div", { class: "filter-editor", on: { input: changed, change: changed } }, h("div", { class: "filter-head" }, toggle), box);
  return {
    element,
    value: () => {
      const value = read();
      return Object.keys(value).length ? value : undefined;
    },
    set: (given) => (isText ? buildText : build)(given),
  };
}

function advancedRow(form, at, given = {}, keysId) {
  const operatorName = operatorOf(given.operatorType ?? given.operator ?? "StringIn");
  const place = h("div", { class: "field-slot" });
  let operand = null;
  let values = given.values ?? (given.value === undefined ? [] : [given.value]);
  const show = (name) => {
    const kind = operandOf(name);
    if (operand?.kind === kind) return;
    if (operand?.text) values = operand.text().split("\n").filter(Boolean);
    operand = makeOperand(form, at, kind, values);
    fill(place, operand.element);
  };
  const key = form.text({ label: "Key", path: () => `${at()}.key`, value: given.key, list: keysId, required: true, placeholder: "data.total" });
  const operator = form.choice({
    label: "Operator",
    path: () => `${at()}.operatorType`,
    value: operatorName,
    options: OPERATORS.map(([title, , names]) => [title, names.map((name) => [name, name])]),
    change: show,
  });
  show(operatorName);
  return {
    element: h("div", { class: "advanced" }, key.element, operator.element, place),
    value: () => ({ operatorType: operator.value(), key: key.value(), ...operand.value() }),
  };
}

const printed = (value) => (Array.isArray(value) ? value.join(", ") : String(value));

function makeOperand(form, at, kind, values) {
  if (kind === "none") return { kind, element: h("p", { class: "help" }, "Takes no value."), value: () => ({}) };
  if (kind === "bool") {
    const field = form.choice({ label: "Value", path: () => `${at()}.value`, value: String(values[0] ?? "true"), options: [["true", "true"], ["false", "false"]] });
    return { kind, element: field.element, value: () => ({ value: field.value() === "true" }) };
  }
  if (kind === "number") {
    const field = form.text({ label: "Value", path: () => `${at()}.value`, value: values[0] === undefined ? "" : printed(values[0]), optional: false, read: (input) => numberOf(input.value) });
    field.control.setAttribute("inputmode", "decimal");
    return {
      kind,
      element: field.element,
      text: () => field.control.value,
      value: () => ({ value: field.value() }),
    };
  }
  const hints = { strings: "One value per line.", numbers: "One number per line.", ranges: "One range per line: low, high" };
  const field = form.area({
    label: "Values",
    path: () => `${at()}.values`,
    rows: 2,
    required: true,
    help: hints[kind],
    value: values.map(printed).join("\n"),
    read: (input) => {
      const lines = input.value.split("\n").filter((line) => line !== "");
      if (!lines.length) throw new Error("must have at least one value");
      if (kind === "strings") return lines;
      return lines.map((line) => {
        if (kind === "numbers") return numberOf(line);
        const ends = line.split(/[,;\s]+/).filter(Boolean);
        if (ends.length !== 2) throw new Error(`must have two numbers in each line, had ${JSON.stringify(line)}`);
        return ends.map((end) => numberOf(end));
      });
    },
  });
  return { kind, element: field.element, text: () => field.control.value, value: () => ({ values: field.value() }) };
}

function numberOf(text) {
  const number = exactNumber(text ?? "");
  if (number === null) throw new Error(`must be a number, was ${JSON.stringify(text)}`);
  return number;
}
