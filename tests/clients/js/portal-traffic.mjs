// Something to look at: webhooks of every temper, topics, subscriptions, and events with hostile texts in all their members.

import { createServer } from "node:http";

const GROUP = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1/providers/Microsoft.EventGrid";
const VERSION = "api-version=2025-02-15";
const PATIENCE_MS = 30_000;
const LOOK_EVERY_MS = 50;

export const topicId = (name) => `${GROUP}/topics/${name}`;
export const domainId = (name) => `${GROUP}/domains/${name}`;
export const systemTopicId = (name) => `${GROUP}/systemTopics/${name}`;
export const subscriptionId = (topic, name) => `${topic}/providers/Microsoft.EventGrid/eventSubscriptions/${name}`;

/** Looks until there is something to see; fails when patience ends. */
export async function until(what, look) {
  const deadline = Date.now() + PATIENCE_MS;
  for (;;) {
    const found = await look();
    if (found) return found;
    if (Date.now() > deadline) throw new Error(`not in time: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY_MS));
  }
}

// ---- what an attacker would write; each would leave a mark on the page if it were ever taken for markup

export const MARKUP = `<script>document.documentElement.dataset.hacked="script"</script>`;
export const BREAKOUT = `"><img src=x onerror='document.documentElement.dataset.hacked="img"'><svg onload=alert(1)>`;
export const BACKWARDS = "\u202Egnp.exe \u2066\u200B\u200D\uFEFFzero\u0301\u0301\u0301\u0301width";
export const LONG = "x".repeat(700);

// ---- webhooks

/** Serves all of them, by path. `requests` has what was delivered, `validations` who was asked and where to answer for them. */
export async function startWebhooks() {
  const requests = [];
  const validations = [];
  const tries = new Map();
  const server = createServer((request, answer) => {
    const chunks = [];
    request.on("data", (chunk) => chunks.push(chunk));
    request.on("end", () => {
      const [path, query = ""] = request.url.split("?");
      const events = JSON.parse(Buffer.concat(chunks).toString() || "[]");
      const list = Array.isArray(events) ? events : [events];
      const say = (status, body = "", headers = {}) => answer.writeHead(status, headers).end(body);
      // How CloudEvents ask.
      if (request.method === "OPTIONS") return say(200, "", { "webhook-allowed-origin": "*", "webhook-allowed-rate": "*" });
      if (request.headers["aeg-event-type"] === "SubscriptionValidation") {
        const [{ data, topic }] = list;
        validations.push({ name: request.headers["aeg-subscription-name"]?.toLowerCase(), topic, url: data.validationUrl });
        // The one that does not answer for itself waits for somebody to open the URL.
        if (path === "/manual") return say(200);
        if (path === "/unwilling") return say(404, MARKUP, { "content-type": "text/html", "x-why": BREAKOUT });
        return say(200, JSON.stringify({ validationResponse: data.validationCode }), { "content-type": "application/json" });
      }
      requests.push({ path, query, headers: request.headers, ids: list.map((event) => event.id) });
      const key = `${path} ${list[0]?.id}`;
      tries.set(key, (tries.get(key) ?? 0) + 1);
      switch (path) {
        case "/slow": return setTimeout(() => say(200), 350);
        case "/flaky": return tries.get(key) < 3 ? say(503, `${MARKUP}${BREAKOUT}${LONG}`, { "content-type": "text/html" }) : say(200, "ok at last");
        case "/sick": return say(500, JSON.stringify({ error: MARKUP, trace: [BREAKOUT, BACKWARDS] }), { "content-type": "application/json" });
        case "/reject": return say(400, `no thank you ${BREAKOUT}`, { "content-type": `text/plain; x="${BREAKOUT.replaceAll('"', "")}"` });
        default: return say(200);
      }
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address();
  return { url: (path) => `http://127.0.0.1:${port}${path}`, requests, validations, close: () => { server.closeAllConnections(); server.close(); } };
}

// ---- the server, as a client with a bearer token sees it

export class Server {
  constructor(base, secret) {
    this.base = base;
    this.secret = secret;
    this.keys = new Map();
  }

  async send(method, path, { body, headers = {} } = {}) {
    const answer = await fetch(`${this.base}${path}`, { method, body: body === undefined ? undefined : JSON.stringify(body), headers: { authorization: `Bearer ${this.secret}`, "content-type": "application/json", ...headers } });
    const text = await answer.text();
    if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${text}`);
    return { json: text ? JSON.parse(text) : null, headers: answer.headers };
  }

  ours = async (path) => (await this.send("GET", `/postrider/v1/${path}`)).json;

  /** Makes a resource; `state` is the one to wait for. */
  async make(id, body, state = "Succeeded") {
    await this.send("PUT", `${id}?${VERSION}`, { body });
    await until(`${id} is ${state}`, async () => (await this.send("GET", `${id}?${VERSION}`)).json.properties.provisioningState === state);
  }

  topic = (name, properties = {}, more = {}) => this.make(topicId(name), { location: "westus2", properties, ...more });

  async subscribe(topic, name, url, { settings = {}, destination = {}, state } = {}) {
    const properties = { destination: { endpointType: "WebHook", properties: { endpointUrl: url, ...destination } }, ...settings };
    await this.make(subscriptionId(topic, name), { properties }, state);
  }

  async publish(kind, name, events, contentType = "application/json") {
    const id = `${GROUP}/${kind}/${name}`;
    if (!this.keys.has(id)) this.keys.set(id, (await this.send("POST", `${id}/listKeys?${VERSION}`)).json.key1);
    const headers = { "aeg-sas-key": this.keys.get(id), "content-type": contentType, authorization: "" };
    const answer = await fetch(`${this.base}/${kind}/${name}/api/events?api-version=2018-01-01`, { method: "POST", body: JSON.stringify(events), headers: Object.fromEntries(Object.entries(headers).filter(([, value]) => value)) });
    if (!answer.ok) throw new Error(`publishing to ${name}: ${answer.status} ${await answer.text()}`);
  }
}

export const gridEvent = (id, more = {}) => ({ id, subject: "/orders/42", eventType: "Order.Created", eventTime: new Date().toISOString(), dataVersion: "1.0", data: { total: 12.5, customer: "acme" }, ...more });
export const cloudEvent = (id, more = {}) => ({ specversion: "1.0", id, source: "/machines/7", type: "Machine.Started", subject: "/hall/3", time: new Date().toISOString(), datacontenttype: "application/json", data: { speed: 3 }, ...more });

/** Ids of the events that tests look for. */
export const IDS = { delivered: "order-1", flaky: "order-7", rejected: "letter-1", hostile: MARKUP, twice: "seen-twice" };

/** Topics, subscriptions and traffic; returns when the states that pages show have come about. */
export async function makeTraffic(server, hooks) {
  const orders = topicId("orders");
  const letters = { deadLetterDestination: { endpointType: "StorageBlob", properties: { resourceId: storageAccount("local"), blobContainerName: "deadletters" } } };
  await Promise.all([
    server.topic("orders", { inboundIpRules: [{ ipMask: "127.0.0.0/8", action: "Allow" }], eventTypeInfo: { kind: "Inline", inlineEventTypes: { "Order.Created": { displayName: MARKUP, description: BREAKOUT } } } }, { tags: { owner: MARKUP, note: BACKWARDS, long: LONG.slice(0, 200) } }),
    server.topic("telemetry", { inputSchema: "CloudEventSchemaV1_0" }),
    server.topic("legacy-erp", { inputSchema: "CustomEventSchema", inputSchemaMapping: { inputSchemaMappingType: "Json", properties: { id: { sourceField: "nr" }, subject: { sourceField: "what" }, eventType: { sourceField: "kind", defaultValue: "Erp.Changed" }, dataVersion: { defaultValue: "1" }, topic: {}, eventTime: {} } } }),
    server.make(domainId("customers"), { location: "westus2" }),
    server.make(systemTopicId("blobs"), { location: "westus2", properties: { source: storageAccount("local"), topicType: "Microsoft.Storage.StorageAccounts" } }),
  ]);
  const hostile = { labels: [MARKUP.slice(0, 60), BREAKOUT, BACKWARDS], filter: { advancedFilters: [{ operatorType: "StringNotIn", key: "data.customer", values: [MARKUP, BREAKOUT] }] } };
  await Promise.all([
    server.subscribe(orders, "shop", hooks.url("/ok?code=s3cret"), { settings: letters, destination: { deliveryAttributeMappings: [{ name: "x-key", type: "Static", properties: { value: "hunter2", isSecret: true } }, { name: "x-who", type: "Dynamic", properties: { sourceField: "data.customer" } }] } }),
    server.subscribe(orders, "warehouse", hooks.url("/slow"), { settings: hostile }),
    server.subscribe(orders, "flaky-partner", hooks.url("/flaky"), { settings: { filter: { subjectEndsWith: "7" } } }),
    server.subscribe(orders, "sick-partner", hooks.url("/sick"), { settings: { filter: { includedEventTypes: ["Order.Created"] } } }),
    server.subscribe(orders, "strict-partner", hooks.url("/reject"), { settings: { ...letters, filter: { subjectBeginsWith: "/letters" } } }),
    server.subscribe(orders, "big-spenders", hooks.url("/ok"), { settings: { filter: { advancedFilters: [{ operatorType: "NumberGreaterThan", key: "data.total", value: 1000 }] } } }),
    server.subscribe(topicId("telemetry"), "batches", hooks.url("/batch"), { destination: { maxEventsPerBatch: 50, preferredBatchSizeInKilobytes: 64 } }),
    server.subscribe(topicId("legacy-erp"), "mirror", hooks.url("/ok")),
    server.subscribe(domainId("customers"), "all-customers", hooks.url("/ok")),
    server.subscribe(`${domainId("customers")}/topics/acme`, "acme-only", hooks.url("/ok")),
    server.subscribe(orders, "by-hand", hooks.url("/manual"), { state: "AwaitingManualAction" }),
    server.send("PUT", `${subscriptionId(orders, "unwilling")}?${VERSION}`, { body: { properties: { destination: { endpointType: "WebHook", properties: { endpointUrl: hooks.url("/unwilling") } } } } }),
  ]);

  const few = Array.from({ length: 24 }, (_, i) => gridEvent(`order-${i}`, { subject: `/orders/${i}`, eventType: i % 6 ? "Order.Created" : "Order.Paid" }));
  for (const event of few) await server.publish("topics", "orders", [event]);
  await server.publish("topics", "orders", Array.from({ length: 30 }, (_, i) => gridEvent(`letter-${i}`, { subject: `/letters/${i}`, eventType: "Letter.Sent", data: { text: i === 1 ? [MARKUP, BREAKOUT, BACKWARDS, LONG] : "plain" } })));
  await server.publish("topics", "orders", [
    gridEvent(MARKUP, { subject: `${BREAKOUT}7`, eventType: MARKUP, data: { customer: BACKWARDS, [MARKUP]: BREAKOUT } }),
    gridEvent(BREAKOUT, { subject: `/letters/${MARKUP}`, eventType: BACKWARDS }),
    gridEvent(BACKWARDS, { subject: `/letters/${BACKWARDS}`, eventType: `T${LONG}`.slice(0, 300) }),
    gridEvent(LONG.slice(0, 300), { subject: `/${LONG}/7`, eventType: BREAKOUT }),
    gridEvent(IDS.twice),
  ]);
  await server.publish("topics", "orders", [gridEvent(IDS.twice)]);
  await server.publish("topics", "telemetry", Array.from({ length: 120 }, (_, i) => cloudEvent(`machine-${i}`)), "application/cloudevents-batch+json");
  await server.publish("topics", "legacy-erp", [{ nr: "erp-1", what: MARKUP, kind: "Erp.Changed" }]);
  await server.publish("domains", "customers", [gridEvent("acme-1", { topic: "acme" }), gridEvent("globex-1", { topic: "globex" })]);

  await until("a sick endpoint is left alone", async () => (await server.ours("stats")).sick.length > 0);
  await until("dead letters are written", async () => (await server.ours("deadletters/summary")).value.some((one) => one.written >= 30));
  await until("the handshake that fails has failed", async () => (await server.ours("handshakes?state=failed")).value.length > 0);
  await until("a retry has succeeded", async () => (await server.ours(`events/${IDS.flaky}`)).stories[0].subscriptions.some((one) => one.name === "flaky-partner" && one.state === "delivered"));
}

export const storageAccount = (name) => `/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1/providers/Microsoft.Storage/storageAccounts/${name}`;
