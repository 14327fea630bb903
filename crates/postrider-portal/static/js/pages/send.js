// Composes an event in a topic's schema and publishes it as any publisher would: with a key.

import { fill, h } from "../dom.js";
import { button, empty, heading, load, loading, mono, notice, section } from "../ui.js";
import { Form } from "../form.js";
import { armPost, publish, server } from "../api.js";
import { to } from "../ids.js";
import { SCHEMA_NAMES, allTopics, topicOptions } from "../shared.js";

const CONTENT_TYPES = {
  EventGridSchema: "application/json",
  CustomEventSchema: "application/json",
  CloudEventSchemaV1_0: "application/cloudevents+json",
};

export default function page(ctx) {
  ctx.title = "Send an event";
  const box = h("div");
  load(ctx, box, async () => {
    const topics = await allTopics(await server(ctx.signal), ctx.signal);
    return topics.filter((one) => one.kind !== "systemTopics");
  }, (topics) => build(ctx, topics));
  return [heading("Send an event"), box];
}

function build(ctx, topics) {
  if (!topics.length) return empty("There is no topic to send to yet.", h("p", {}, h("a", { class: "button primary", href: to.newTopic() }, "Create a topic")));
  const form = new Form();
  const wanted = ctx.query.get("topic")?.toLowerCase();
  const first = topics.find((one) => one.id.toLowerCase() === wanted) ?? topics[0];
  const find = () => topics.find((one) => one.id === topic.control.value) ?? first;
  const place = h("div");
  const sent = h("div", { "aria-live": "polite" });
  let composer = null;
  let asText = null;

  const compose = () => {
    const chosen = find();
    asText = null;
    composer = fieldsFor(form, chosen);
    fill(place, h("p", { class: "help" }, `This ${chosen.kind === "domains" ? "domain" : "topic"} takes: `, h("strong", {}, SCHEMA_NAMES[chosen.resource.properties.inputSchema] ?? "events")), composer.element);
    raw.setAttribute("aria-pressed", "false");
  };
  const topic = form.choice({ label: "Topic or domain", path: "topic", value: first.id, options: topicOptions(topics), change: compose });
  const raw = h("button", { type: "button", class: "button small", "aria-pressed": "false", on: { click: () => {
    if (asText) return compose();
    let event;
    try {
      event = composer.value();
    } catch (problem) {
      return form.show(problem);
    }
    asText = form.area({ label: "Event as JSON", path: "event", rows: 14, required: true, value: JSON.stringify(event, null, 2), read: readJson });
    asText.control.classList.add("code-input");
    asText.control.setAttribute("dir", "ltr");
    fill(place, asText.element);
    raw.setAttribute("aria-pressed", "true");
  } } }, "Edit as JSON");
  compose();

  const go = button("Send", null, { type: "submit", kind: "primary" });
  const submit = async (event) => {
    event.preventDefault();
    form.clear();
    go.disabled = true;
    fill(form.progress, loading("Sending"));
    const chosen = find();
    try {
      const body = (asText ?? composer).value();
      const list = Array.isArray(body) ? body : [body];
      const schema = chosen.resource.properties.inputSchema;
      const { key1 } = await armPost(chosen.id, "listKeys", {}, ctx.signal);
      const isBatch = schema !== "CloudEventSchemaV1_0" || list.length !== 1;
      const type = schema === "CloudEventSchemaV1_0" && isBatch ? "application/cloudevents-batch+json" : CONTENT_TYPES[schema] ?? "application/json";
      const status = await publish(chosen.kind, chosen.name, key1, type, JSON.stringify(isBatch ? list : list[0]), ctx.signal);
      const ids = list.map((one) => one?.id).filter((id) => typeof id === "string" && id);
      fill(sent, notice("ok",
        h("p", {}, h("strong", {}, `${status}: accepted. `), "It is on the server's disk."),
        ids.map((id) => h("p", {}, h("a", { href: to.event(id) }, "Where is event ", mono(id), "?")))));
      composer.renew?.();
    } catch (problem) {
      if (problem.name === "AbortError" || (problem.status === 401 && !problem.code)) return;
      form.show(problem);
    } finally {
      if (!ctx.signal.aborted) fill(form.progress);
      go.disabled = false;
    }
  };
  return h("form", { class: "form", novalidate: true, on: { submit } },
    form.summary,
    section("Event", topic.element, place, h("div", {}, raw)),
    form.progress,
    sent,
    h("div", { class: "form-actions" }, go));
}

function readJson(input) {
  let parsed;
  try {
    parsed = JSON.parse(input.value);
  } catch (error) {
    throw new Error(`is not JSON: ${error.message}`);
  }
  if (parsed === null || typeof parsed !== "object") throw new Error("must be an object or a list of objects");
  return parsed;
}

const freshId = () => (globalThis.crypto?.randomUUID ? crypto.randomUUID() : `portal-${Date.now()}`);

function dataField(form, path, value) {
  const field = form.area({ label: "Data", path, rows: 5, value, help: "JSON.", read: (input) => {
    if (!input.value.trim()) return undefined;
    try {
      return JSON.parse(input.value);
    } catch (error) {
      throw new Error(`is not JSON: ${error.message}`);
    }
  } });
  field.control.classList.add("code-input");
  field.control.setAttribute("dir", "ltr");
  return field;
}

/** Fields for the topic's schema. */
function fieldsFor(form, topic) {
  const schema = topic.resource.properties.inputSchema;
  const inDomain = topic.kind === "domains";
  const id = form.text({ label: "Id", path: "id", value: freshId(), required: true });
  const renew = () => (id.control.value = freshId());
  if (schema === "CloudEventSchemaV1_0") {
    const type = form.text({ label: "Type", path: "type", value: "portal.test", required: true });
    const source = form.text({ label: inDomain ? "Source (the domain topic)" : "Source", path: "source", value: inDomain ? "" : "/postrider/portal", required: true });
    const subject = form.text({ label: "Subject", path: "subject", value: "/portal/test" });
    const data = dataField(form, "data", '{\n  "hello": "world"\n}');
    return {
      renew,
      element: h("div", {}, h("div", { class: "columns" }, id.element, type.element, source.element, subject.element), data.element),
      value: () => {
        const event = { specversion: "1.0", id: id.value(), type: type.value(), source: source.value(), time: new Date().toISOString() };
        if (subject.value() !== undefined) event.subject = subject.value();
        const payload = data.value();
        if (payload !== undefined) Object.assign(event, { datacontenttype: "application/json", data: payload });
        return event;
      },
    };
  }
  if (schema === "CustomEventSchema") {
    const mapping = topic.resource.properties.inputSchemaMapping?.properties ?? {};
    const example = {};
    const samples = { id: freshId(), eventType: "portal.test", subject: "/portal/test", eventTime: new Date().toISOString(), dataVersion: "1", topic: "" };
    for (const [member, mapped] of Object.entries(mapping)) if (mapped?.sourceField) example[mapped.sourceField] = samples[member] ?? "";
    const body = form.area({ label: "Event", path: "event", rows: 12, required: true, value: JSON.stringify({ ...example, hello: "world" }, null, 2), read: readJson, help: "In the topic's own schema." });
    body.control.classList.add("code-input");
    body.control.setAttribute("dir", "ltr");
    return { element: h("div", {}, body.element), value: () => body.value() };
  }
  const type = form.text({ label: "Event type", path: "eventType", value: "portal.test", required: true });
  const subject = form.text({ label: "Subject", path: "subject", value: "/portal/test", required: true });
  const version = form.text({ label: "Data version", path: "dataVersion", value: "1" });
  const domainTopic = inDomain ? form.text({ label: "Domain topic", path: "topic", required: true }) : null;
  const data = dataField(form, "data", '{\n  "hello": "world"\n}');
  return {
    renew,
    element: h("div", {}, h("div", { class: "columns" }, id.element, type.element, subject.element, version.element, domainTopic?.element), data.element),
    value: () => ({
      id: id.value(), eventType: type.value(), subject: subject.value(), eventTime: new Date().toISOString(), dataVersion: version.value() ?? "",
      ...(domainTopic ? { topic: domainTopic.value() } : {}), data: data.value() ?? {},
    }),
  };
}
