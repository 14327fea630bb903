// Publishes with the unmodified Azure SDK in every way it knows, and prints the ids that were accepted.
// Usage: node publish.cjs HTTP_BASE HTTPS_BASE KEY CLIENT_SECRET, with NODE_EXTRA_CA_CERTS and NODE_PATH set.
"use strict";

const assert = require("node:assert");
const { EventGridPublisherClient, AzureKeyCredential, AzureSASCredential } = require("@azure/eventgrid");
const { generateSharedAccessSignature } = require("@azure/eventgrid");

const [http, https, key, secret] = process.argv.slice(2);
const accepted = [];
const endpoint = (base, topic) => `${base}/topics/${topic}/api/events`;
const gridEvent = (id) => ({ id, subject: "/js", eventType: "Js.Sent", dataVersion: "1.0", data: { n: 1, text: "grün" } });
const cloudEvent = (id) => ({ id, source: "/js", type: "Js.Sent", data: { n: 1 } });

async function send(client, events, options) {
  await client.send(events, options);
  accepted.push(...events.map((event) => event.id));
}

async function refused(status, act) {
  await assert.rejects(act, (error) => {
    assert.strictEqual(error.statusCode, status, error);
    return true;
  });
}

async function main() {
  for (const [name, base] of [["http", http], ["https", https]]) {
    const options = base === http ? { allowInsecureConnection: true } : {};
    const credential = new AzureKeyCredential(key);
    const open = (topic, schema, by = credential) =>
      new EventGridPublisherClient(endpoint(base, topic), schema, by, options);

    const orders = open("orders", "EventGrid");
    await send(orders, [gridEvent(`js-${name}-one`)]);
    await send(orders, [gridEvent(`js-${name}-a`), { ...gridEvent(`js-${name}-b`), eventTime: new Date() }]);
    await send(open("clouds", "CloudEvent"), [
      cloudEvent(`js-${name}-ce`),
      { ...cloudEvent(`js-${name}-ext`), extensionAttributes: { tenant: "acme" }, subject: "s", time: new Date() },
      { ...cloudEvent(`js-${name}-bytes`), data: new Uint8Array([0, 1]), datacontenttype: "application/octet-stream" },
    ]);
    await send(open("things", "Custom"), [{ id: `js-${name}-custom`, any: { shape: true } }]);

    const sas = await generateSharedAccessSignature(endpoint(base, "orders"), credential, new Date(Date.now() + 300000));
    await send(open("orders", "EventGrid", new AzureSASCredential(sas)), [gridEvent(`js-${name}-sas`)]);
    const past = await generateSharedAccessSignature(endpoint(base, "orders"), credential, new Date(Date.now() - 300000));
    await refused(401, () => open("orders", "EventGrid", new AzureSASCredential(past)).send([gridEvent("no")]));
    await refused(401, () => open("orders", "EventGrid", new AzureKeyCredential("d3Jvbmc=")).send([gridEvent("no")]));
    await refused(404, () => open("missing", "EventGrid").send([gridEvent("no")]));
    await refused(400, () => orders.send([]));
    await refused(400, () => open("orders", "CloudEvent").send([cloudEvent("no")]));
    await refused(400, () => open("clouds", "EventGrid").send([gridEvent("no")]));
    await refused(413, () => orders.send([{ ...gridEvent("no"), data: { text: "x".repeat(4000000) } }]));
  }
  // Tokens go over https only.
  const token = { getToken: async () => ({ token: secret, expiresOnTimestamp: Date.now() + 3600000 }) };
  await send(new EventGridPublisherClient(endpoint(https, "orders"), "EventGrid", token), [gridEvent("js-token")]);
  console.log(accepted.join("\n"));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
