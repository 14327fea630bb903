// Resource ids, taken apart and put together.

const GRID = "/providers/microsoft.eventgrid/";
const KINDS = { topics: "topics", domains: "domains", systemtopics: "systemTopics" };

export const KIND_NAMES = {
  topics: "Topic",
  domains: "Domain",
  domainTopics: "Domain topic",
  systemTopics: "System topic",
  other: "Resource",
};

/** What a topic's id says: `{id, kind, name, group, domain?}`; `kind` is `other` for resources of other providers. */
export function topicOf(id) {
  const parts = String(id).split("/");
  const at = String(id).toLowerCase().indexOf(GRID);
  const group = /\/resourcegroups\/([^/]+)/i.exec(id)?.[1] ?? "";
  const tail = at < 0 ? [] : id.slice(at + GRID.length).split("/");
  const kind = KINDS[tail[0]?.toLowerCase()];
  if (kind && tail.length === 2) return { id, kind, name: tail[1], group };
  if (kind === "domains" && tail.length === 4 && tail[2].toLowerCase() === "topics") {
    return { id, kind: "domainTopics", name: tail[3], group, domain: { id: parts.slice(0, -2).join("/"), name: tail[1] } };
  }
  return { id, kind: "other", name: parts.at(-1) ?? "", group };
}

/** What a subscription's id says: its name and the topic that it hangs on. */
export function subscriptionOf(id) {
  const text = String(id);
  const at = text.toLowerCase().lastIndexOf("/eventsubscriptions/");
  if (at < 0) return { id, name: text.split("/").at(-1) ?? "", topic: topicOf("") };
  const scope = text.slice(0, at).replace(/\/providers\/microsoft\.eventgrid$/i, "");
  return { id, name: text.slice(at + "/eventsubscriptions/".length), topic: topicOf(scope) };
}

/** Where a subscription of this topic is. */
export function subscriptionId(topic, name) {
  return topic.kind === "systemTopics"
    ? `${topic.id}/eventSubscriptions/${name}`
    : `${topic.id}/providers/Microsoft.EventGrid/eventSubscriptions/${name}`;
}

/** How dead letters name a subscription: `topic/name` or `domain/topic/name`. */
export function letterPath(id) {
  const { name, topic } = subscriptionOf(id);
  return [topic.domain?.name, topic.name, name].filter(Boolean).join("/");
}

/** The name by which our own API filters. */
export const topicName = (topic) => (topic.domain ? topic.domain.name : topic.name);

export const account = (info) => `/subscriptions/${info.azure.subscription}`;
export const group = (info, name) => `${account(info)}/resourceGroups/${name || info.azure.resourceGroup}`;
export const everywhere = (info, kind) => `${account(info)}/providers/Microsoft.EventGrid/${kind}`;
export const topicIdOf = (info, groupName, kind, name) => `${group(info, groupName)}/providers/Microsoft.EventGrid/${kind}/${name}`;
export const storageId = (info, name) => `${group(info)}/providers/Microsoft.Storage/storageAccounts/${name}`;

// ---- links

const part = encodeURIComponent;
const tail = (members) => {
  const pairs = new URLSearchParams();
  for (const [name, value] of Object.entries(members ?? {})) if (value) pairs.set(name, value);
  return pairs.size ? `?${pairs}` : "";
};
export const to = {
  topic: (id, more = "") => `#/topics/${part(id)}${more}`,
  subscription: (id, more = "") => `#/subscriptions/${part(id)}${more}`,
  find: (members) => `#/find${tail(members)}`,
  event: (id) => `#/events/${part(id)}`,
  events: (members) => `#/events${tail(members)}`,
  topics: (members) => `#/topics${tail(members)}`,
  subscriptions: (members) => `#/subscriptions${tail(members)}`,
  endpoints: (members) => `#/endpoints${tail(members)}`,
  letters: (members) => `#/deadletters${tail(members)}`,
  letter: (id) => `#/deadletters/letter/${part(id)}`,
  replay: (id) => `#/deadletters/replay/${part(id)}`,
  handshake: (operation) => `#/handshakes/${part(operation)}`,
  handshakes: (members) => `#/handshakes${tail(members)}`,
  lab: (members) => `#/lab${tail(members)}`,
  live: (members) => `#/live${tail(members)}`,
  send: (members) => `#/send${tail(members)}`,
  newTopic: (members) => `#/topics/new${tail(members)}`,
  newSubscription: (members) => `#/subscriptions/new${tail(members)}`,
};
