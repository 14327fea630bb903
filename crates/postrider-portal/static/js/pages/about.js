// What this server is.

import { h } from "../dom.js";
import { facts, heading, load, mono, section, text } from "../ui.js";
import { currentSession, get } from "../api.js";
import { storageId } from "../ids.js";
import * as f from "../format.js";

export default function page(ctx) {
  ctx.title = "About";
  const box = h("div");
  // Asked anew: whoever comes here wants what holds now.
  load(ctx, box, () => get("server", {}, ctx.signal), (info) => h("div", { class: "split" },
    section("Server", facts([
      ["Version", mono(info.version)],
      ["Address", info.publicUrl ? mono(info.publicUrl) : "that of each request"],
      ["Profile", text(info.profile)],
      ["Profiles", h("ul", { class: "labels" }, (info.profiles ?? []).map((one) => h("li", {}, text(one))))],
      ["Clock", info.testClock ? "a test clock, moved by hand" : "the machine's"],
      ["Flight recorder", info.recorder?.enabled ? `on, keeps ${info.recorder.keep}, at most ${typeof info.recorder.bytes === "number" ? f.bytes(info.recorder.bytes) : info.recorder.bytes}` : "off: events cannot be searched or traced"],
      ["Storage accounts", (info.storageAccounts ?? []).length ? h("ul", { class: "plain" }, info.storageAccounts.map((one) => h("li", {}, mono(storageId(info, one))))) : "none"],
    ])),
    section("As Azure sees it", facts([
      ["Subscription", mono(info.azure.subscription)],
      ["Tenant", mono(info.azure.tenant)],
      ["Resource group", text(info.azure.resourceGroup)],
      ["Location", text(info.azure.location)],
    ]), h("h3", {}, "You"), facts([
      ["Client", text(currentSession()?.client ?? "")],
      ["Roles", h("ul", { class: "labels" }, (currentSession()?.roles ?? []).map((one) => h("li", {}, text(one))))],
    ])),
    section("Elsewhere", h("ul", { class: "links" },
      h("li", {}, h("a", { href: "/docs" }, "Documentation of the API")),
      h("li", {}, h("a", { href: "/postrider/v1/openapi.json" }, "OpenAPI description")),
      h("li", {}, h("a", { href: "/metrics" }, "Metrics for Prometheus")),
      h("li", {}, h("a", { href: "/healthz" }, "Health"))))));
  return [heading("About this server"), box];
}
