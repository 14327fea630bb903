// Cluster: the nodes, what each owns, and how the store behind them is doing.

import { h } from "../dom.js";
import { badge, button, confirmDialog, empty, facts, figure, figures, follow, heading, mono, notice, section, table, text, toast, when } from "../ui.js";
import { get, post } from "../api.js";
import * as f from "../format.js";

const STANDING = { live: "ok", draining: "info", drained: "quiet", dead: "bad", left: "quiet" };
const STREAM_STATES = { ok: ["current", "ok"], none: ["no leader", "bad"], behind: ["behind", "warn"], offline: ["offline", "bad"] };

export default function page(ctx) {
  ctx.title = "Cluster";
  const box = h("div");
  const list = follow(ctx, box, 2, () => get("cluster", {}, ctx.signal), (cluster) => [
    troubles(cluster),
    summary(cluster),
    section("Nodes", nodes(cluster, () => list.again())),
    cluster.kind === "jetstream" && section("Partitions", partitions(cluster)),
    cluster.jetstream && section("JetStream", jetstream(cluster.jetstream)),
  ]);
  return [heading("Cluster", { note: "Which nodes there are, what each delivers, and where events are kept." }), box];
}

const byId = (cluster, id) => cluster.nodes.find((one) => one.id === id);

function troubles(cluster) {
  const dead = cluster.nodes.filter((one) => one.standing === "dead").map((one) => one.name);
  const unserved = cluster.partitions.filter((one) => !one.serving).length;
  const said = [
    ...(cluster.jetstream?.trouble ?? []),
    ...(dead.length ? [`Not heard of any more: ${dead.join(", ")}`] : []),
    ...(unserved ? [`${f.plural(unserved, "partition")} of ${f.count(cluster.partitions.length)} ${unserved === 1 ? "is" : "are"} served by no node: what is in there waits`] : []),
  ];
  return said.length > 0 && notice("warn", h("ul", { class: "plain" }, said.map((one) => h("li", {}, text(one)))));
}

function summary(cluster) {
  const sum = (name) => cluster.nodes.reduce((all, one) => all + (one[name] ?? 0), 0);
  const rate = (name) => cluster.nodes.filter((one) => one.standing !== "dead").reduce((all, one) => all + (one.rates?.[name] ?? 0), 0);
  const present = cluster.nodes.filter((one) => one.standing === "live").length;
  const store = cluster[cluster.kind];
  return section("Store",
    figures(
      figure("Nodes live", f.count(present), { note: `of ${f.count(cluster.nodes.length)}` }),
      figure("Published", f.rate(rate("publishedPerSec")), { unit: "/s" }),
      figure("Delivered", f.rate(rate("deliveredPerSec")), { unit: "/s" }),
      figure("Waiting", f.short(sum("waiting"))),
      figure("Retrying", f.short(sum("retrying"))),
    ),
    facts([
      ["Kept in", cluster.kind === "jetstream" ? "NATS JetStream" : "files of this server, by itself"],
      ["Promise", store ? text(`${store.guarantee.charAt(0).toUpperCase()}${store.guarantee.slice(1)}.`) : "not known yet"],
      cluster.kind === "jetstream" && ["Since the nodes began", counts(cluster.counts)],
    ]));
}

const counts = (all) => `${f.plural(all.takeovers, "takeover")}, ${f.count(all.redelivered)} offered again, ${f.count(all.fenced)} refused as another's, ${f.count(all.forwarded)} handed on`;

function nodes(cluster, again) {
  const rows = [...cluster.nodes].sort((a, b) => a.name.localeCompare(b.name));
  const canDrain = cluster.kind === "jetstream";
  return table("Nodes", [
    { label: "Node", cell: (one) => [text(one.name), one.id === cluster.node && h("span", { class: "muted" }, " (this one)")] },
    { label: "Standing", cell: (one) => badge(one.standing, STANDING[one.standing]) },
    { label: "Partitions", cell: (one) => (one.partitions.length ? `${one.partitions.join(", ")}${one.steward && canDrain ? " (steward)" : ""}` : "–") },
    { label: "Waiting", number: true, cell: (one) => f.short(one.waiting) },
    { label: "Retrying", number: true, cell: (one) => f.short(one.retrying) },
    { label: "Delivered /s", number: true, cell: (one) => f.rate(one.rates?.deliveredPerSec) },
    { label: "Heard", cell: (one) => (canDrain ? `${f.millis(one.heardAgoMs)} ago` : "–") },
    { label: "Address", cell: (one) => (one.url ? mono(one.url) : "–") },
    { label: "Version", cell: (one) => mono(one.version) },
    { label: "Since", cell: (one) => when(one.started) },
    canDrain && { label: "Action", cell: (one) => action(cluster, one, again) },
  ].filter(Boolean), rows);
}

function action(cluster, one, again) {
  if (one.standing === "live") {
    return button("Drain", () => drainDialog(cluster, one, again), { kind: "small", label: `Drain ${one.name}`, key: `drain:${one.id}` });
  }
  if (one.standing === "draining" || one.standing === "drained") {
    return button("Take part again", () => confirmDialog({
      title: `Let ${one.name} take part again?`,
      text: "It takes its share of the partitions from the others.",
      action: "Take part again",
      danger: false,
      work: async () => {
        await post("cluster/undrain", { node: one.id });
        toast(`${one.name} takes part again`);
        again();
      },
    }), { kind: "small", label: `Let ${one.name} take part again`, key: `undrain:${one.id}` });
  }
  return "–";
}

function drainDialog(cluster, one, again) {
  const last = !cluster.nodes.some((other) => other.id !== one.id && other.standing === "live");
  confirmDialog({
    title: `Drain ${one.name}?`,
    text: last
      ? "No other node is live: nothing would be delivered any more, and publishes would be refused, until a node takes part again."
      : "Its partitions go to the other nodes once attempts under way have ended, which takes ten seconds at most. It goes on answering; what is published to it is kept by the others.",
    action: "Drain",
    word: last ? one.name : null,
    work: async () => {
      await post("cluster/drain", { node: one.id, force: last });
      toast(`${one.name} gives its partitions away`);
      again();
    },
  });
}

/** The worst of a stream's copies. */
function streamState(stream) {
  if (!stream) return null;
  if (stream.trouble) return "none";
  if (stream.replicas.some((copy) => copy.offline)) return "offline";
  return stream.replicas.some((copy) => !copy.current) ? "behind" : "ok";
}

const shownState = (stream) => {
  const state = streamState(stream);
  return state ? badge(...STREAM_STATES[state]) : "–";
};

const copies = (stream) => (stream?.replicas.length
  ? h("ul", { class: "plain" }, stream.replicas.map((copy) => h("li", {}, text(copy.server), h("span", { class: "muted" }, copy.offline ? " offline" : copy.lag ? ` ${f.count(copy.lag)} behind` : copy.current ? "" : " behind"))))
  : "–");

function partitions(cluster) {
  return table("Partitions", [
    { label: "Partition", cell: (one) => f.count(one.number) },
    { label: "Owner", cell: (one) => (one.owner ? text(byId(cluster, one.owner)?.name ?? one.owner) : "–") },
    { label: "Served", cell: (one) => badge(one.serving ? "served" : one.owner ? "loading" : "free", one.serving ? "ok" : "warn") },
    { label: "Waiting", number: true, cell: (one) => f.short(one.waiting) },
    { label: "Retrying", number: true, cell: (one) => f.short(one.retrying) },
    { label: "Dead letters", number: true, cell: (one) => f.short(one.letters) },
    { label: "Stream", cell: (one) => shownState(one.stream) },
    { label: "Leader", cell: (one) => (one.stream?.leader ? text(one.stream.leader) : "–") },
    { label: "Copies", cell: (one) => copies(one.stream) },
    { label: "Size", number: true, cell: (one) => (one.stream ? f.bytes(one.stream.bytes) : "–") },
  ], cluster.partitions);
}

function jetstream(store) {
  return [
    facts([
      ["Server", store.version ? mono(store.version) : "not connected"],
      ["Copies of each stream", `${f.count(store.replicas)}${store.replicas === store.replicasWanted ? "" : `, though ${f.count(store.replicasWanted)} are asked for`}`],
      ["Written to disk", store.sync === "always" ? "before it is acknowledged" : store.sync === "unknown" ? "the servers do not say when" : `every ${store.sync.replace("interval ", "")}`],
    ]),
    store.servers.length > 0 && table("NATS servers", [
      { label: "Server", cell: (one) => text(one.name || "(does not answer)") },
      { label: "Version", cell: (one) => (one.version ? mono(one.version) : "–") },
      { label: "Writes to disk", cell: (one) => text(one.sync) },
    ], store.servers, { showCaption: true }),
    store.streams.length > 0 ? table("Other streams", [
      { label: "Stream", cell: (one) => mono(one.name) },
      { label: "State", cell: (one) => shownState(one) },
      { label: "Leader", cell: (one) => (one.leader ? text(one.leader) : "–") },
      { label: "Size", number: true, cell: (one) => f.bytes(one.bytes) },
    ], store.streams, { showCaption: true }) : empty("JetStream has not been looked at yet."),
  ];
}
