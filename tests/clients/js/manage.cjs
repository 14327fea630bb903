// Drives the management plane with the unmodified @azure/arm-eventgrid and @azure/identity, and prints each thing that holds.
// Usage: node manage.cjs HTTPS_BASE TENANT CLIENT SECRET SUBSCRIPTION STORAGE_ACCOUNT, with NODE_EXTRA_CA_CERTS and NODE_PATH set.
"use strict";

const assert = require("node:assert");
const http = require("node:http");
const { ClientSecretCredential } = require("@azure/identity");
const { EventGridManagementClient } = require("@azure/arm-eventgrid");
const { EventGridPublisherClient, AzureKeyCredential } = require("@azure/eventgrid");

const [base, tenant, clientId, secret, account, storage] = process.argv.slice(2);
const group = "rg1";
const topicId = `/subscriptions/${account}/resourceGroups/${group}/providers/Microsoft.EventGrid/topics/js-topic`;
const storageId = `/subscriptions/${account}/resourceGroups/${group}/providers/Microsoft.Storage/storageAccounts/${storage}`;

function holds(what, condition, detail) {
  assert.ok(condition, `${what}: ${JSON.stringify(detail)}`);
  console.log(what);
}

async function refused(what, status, code, act) {
  await assert.rejects(act, (error) => {
    const said = `${error.code} ${error.message} ${JSON.stringify(error.details)}`;
    assert.ok((status === null || error.statusCode === status) && said.includes(code), `${what}: ${error.statusCode} ${said}`);
    return true;
  });
  console.log(what);
}

// A webhook: /good proves itself, anything else is 404.
const arrived = [];
let waiting = () => {};
const hook = http.createServer((request, response) => {
  let text = "";
  request.on("data", (piece) => (text += piece));
  request.on("end", () => {
    if (!request.url.startsWith("/good")) {
      response.writeHead(404).end();
    } else if (request.headers["aeg-event-type"] === "SubscriptionValidation") {
      const { validationCode } = JSON.parse(text)[0].data;
      response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify({ validationResponse: validationCode }));
    } else {
      response.writeHead(200).end();
      if (request.headers["aeg-event-type"] === "Notification") arrived.push(...JSON.parse(text));
      waiting();
    }
  });
});

async function delivered(count) {
  while (arrived.length < count) await new Promise((resolve) => (waiting = resolve));
  return arrived.splice(0, count);
}

async function all(pages) {
  const found = [];
  for await (const one of pages) found.push(one);
  return found;
}

async function main() {
  await new Promise((resolve) => hook.listen(0, "127.0.0.1", resolve));
  const url = (path) => `http://127.0.0.1:${hook.address().port}${path}`;
  const credential = new ClientSecretCredential(tenant, clientId, secret, { authorityHost: base, disableInstanceDiscovery: true });
  const client = new EventGridManagementClient(credential, account, { endpoint: base });
  const quick = { updateIntervalInMs: 1 };

  const topic = await client.topics.beginCreateOrUpdateAndWait(group, "js-topic", { location: "westus2", tags: { a: "b" } }, quick);
  holds("a topic is created", topic.id === topicId, topic);
  const got = await client.topics.get(group, "js-topic");
  holds("it is there", got.provisioningState === "Succeeded" && got.endpoint === `${base}/topics/js-topic/api/events`, got);
  holds("it is listed", (await all(client.topics.listByResourceGroup(group))).some((one) => one.name === "js-topic"));
  const patched = await client.topics.beginUpdateAndWait(group, "js-topic", { tags: { c: "d" } }, quick);
  holds("its tags are changed", (await client.topics.get(group, "js-topic")).tags.c === "d", patched);
  const keys = await client.topics.listSharedAccessKeys(group, "js-topic");
  const fresh = await client.topics.beginRegenerateKeyAndWait(group, "js-topic", { keyName: "key2" }, quick);
  holds("a key is regenerated", fresh.key1 === keys.key1 && fresh.key2 !== keys.key2);

  const subscriptions = client.eventSubscriptions;
  const body = {
    destination: {
      endpointType: "WebHook",
      endpointUrl: url("/good?code=secret"),
      deliveryAttributeMappings: [{ type: "Static", name: "x-secret", value: "two", isSecret: true }],
    },
    filter: { advancedFilters: [{ operatorType: "NumberIn", key: "data.n", values: [1, 2] }] },
    retryPolicy: { maxDeliveryAttempts: 5, eventTimeToLiveInMinutes: 60 },
    deadLetterDestination: { endpointType: "StorageBlob", resourceId: storageId, blobContainerName: "deadletters" },
  };
  const made = await subscriptions.beginCreateOrUpdateAndWait(topicId, "js-sub", body, quick);
  holds("a subscription is created", made.provisioningState === "Succeeded" || made.name === "js-sub", made);
  const read = await subscriptions.get(topicId, "js-sub");
  holds("it is there, typed", read.destination.endpointType === "WebHook" && read.destination.endpointBaseUrl === url("/good"), read);
  holds("secrets are hidden", read.destination.deliveryAttributeMappings[0].value === "Hidden", read.destination);
  holds("the full URL is told", (await subscriptions.getFullUrl(topicId, "js-sub")).endpointUrl === url("/good?code=secret"));
  holds("headers are told", (await subscriptions.getDeliveryAttributes(topicId, "js-sub")).value[0].value === "two");

  const publisher = new EventGridPublisherClient(got.endpoint, "EventGrid", new AzureKeyCredential(fresh.key2));
  const event = (id, n) => ({ id, subject: "/js", eventType: "Js.Sent", dataVersion: "1", data: { n } });
  await publisher.send([event("js-1", 1), event("no", 3)]);
  holds("an event arrives, another does not match", (await delivered(1))[0].id === "js-1", arrived);

  await subscriptions.beginUpdateAndWait(topicId, "js-sub", { labels: ["z"] }, quick);
  const after = await subscriptions.get(topicId, "js-sub");
  holds("PATCH keeps the rest", after.labels[0] === "z" && after.deadLetterDestination.blobContainerName === "deadletters", after);
  const listed = await all(subscriptions.listByResource(group, "Microsoft.EventGrid", "topics", "js-topic"));
  holds("it is listed", listed.length === 1 && listed[0].name === "js-sub", listed);
  const nested = await all(client.topicEventSubscriptions.list(group, "js-topic"));
  holds("nested too", nested.length === 1 && nested[0].name === "js-sub", nested);
  const bad = { destination: { endpointType: "WebHook", endpointUrl: url("/nowhere") } };
  await refused("a failed handshake fails the operation", null, "Url validation", () =>
    subscriptions.beginCreateOrUpdateAndWait(topicId, "js-bad", bad, quick),
  );
  await refused("and leaves nothing", 404, "ResourceNotFound", () => subscriptions.get(topicId, "js-bad"));
  const wrong = { ...body, retryPolicy: { maxDeliveryAttempts: 31 } };
  await refused("a wrong value is refused by name", 400, "maxDeliveryAttempts", () =>
    subscriptions.beginCreateOrUpdateAndWait(topicId, "js-wrong", wrong, quick),
  );

  const tokens = new EventGridPublisherClient(got.endpoint, "EventGrid", credential);
  await tokens.send([event("js-2", 2)]);
  holds("a token publishes", (await delivered(1))[0].id === "js-2");

  await client.domains.beginCreateOrUpdateAndWait(group, "js-domain", { location: "westus2" }, quick);
  await client.domainTopics.beginCreateOrUpdateAndWait(group, "js-domain", "one", quick);
  holds("domain topics are listed", (await all(client.domainTopics.listByDomain(group, "js-domain"))).length === 1);
  await client.domainTopics.beginDeleteAndWait(group, "js-domain", "one", quick);
  await client.domains.beginDeleteAndWait(group, "js-domain", quick);
  const source = { location: "westus2", source: storageId, topicType: "Microsoft.Storage.StorageAccounts" };
  await client.systemTopics.beginCreateOrUpdateAndWait(group, "js-system", source, quick);
  holds("a system topic is there", (await client.systemTopics.get(group, "js-system")).source === storageId);
  await client.systemTopics.beginDeleteAndWait(group, "js-system", quick);
  holds("topic types are listed", (await all(client.topicTypes.list())).length > 2);

  await subscriptions.beginDeleteAndWait(topicId, "js-sub", quick);
  await client.topics.beginDeleteAndWait(group, "js-topic", quick);
  await refused("a deleted topic is gone", 404, "ResourceNotFound", () => client.topics.get(group, "js-topic"));
  hook.close();
  hook.closeAllConnections();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
