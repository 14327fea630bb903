// Starts the portal: the frame around every page, and the way from one to the next.

import { fill, h } from "./dom.js";
import { announce, button, failure, loading, mark, notice, select, text } from "./ui.js";
import * as api from "./api.js";
import { to } from "./ids.js";
import signInPage from "./pages/sign-in.js";
import overviewPage from "./pages/overview.js";
import topicsPage from "./pages/topics.js";
import topicPage from "./pages/topic.js";
import topicFormPage from "./pages/topic-form.js";
import subscriptionsPage from "./pages/subscriptions.js";
import subscriptionPage from "./pages/subscription.js";
import subscriptionFormPage from "./pages/subscription-form.js";
import sendPage from "./pages/send.js";
import livePage from "./pages/live.js";
import eventsPage from "./pages/events.js";
import eventPage from "./pages/event.js";
import findPage from "./pages/find.js";
import lettersPage from "./pages/dead-letters.js";
import letterPage from "./pages/dead-letter.js";
import replaysPage from "./pages/replays.js";
import labPage from "./pages/lab.js";
import endpointsPage from "./pages/endpoints.js";
import handshakesPage from "./pages/handshakes.js";
import handshakePage from "./pages/handshake.js";
import clusterPage from "./pages/cluster.js";
import auditPage from "./pages/audit.js";
import aboutPage from "./pages/about.js";

/** Each with its place in the menu. `:x` takes one segment. */
const ROUTES = [
  ["", overviewPage, "#/"],
  ["topics", topicsPage, "#/topics"],
  ["topics/new", topicFormPage, "#/topics"],
  ["topics/:id", topicPage, "#/topics"],
  ["topics/:id/edit", topicFormPage, "#/topics"],
  ["subscriptions", subscriptionsPage, "#/subscriptions"],
  ["subscriptions/new", subscriptionFormPage, "#/subscriptions"],
  ["subscriptions/:id", subscriptionPage, "#/subscriptions"],
  ["subscriptions/:id/edit", subscriptionFormPage, "#/subscriptions"],
  ["find", findPage, null],
  ["events", eventsPage, "#/events"],
  ["events/:id", eventPage, "#/events"],
  ["live", livePage, "#/live"],
  ["send", sendPage, "#/send"],
  ["lab", labPage, "#/lab"],
  ["deadletters", lettersPage, "#/deadletters"],
  ["deadletters/letter/:id", letterPage, "#/deadletters"],
  ["deadletters/replays", replaysPage, "#/deadletters"],
  ["deadletters/replay/:id", replaysPage, "#/deadletters"],
  ["endpoints", endpointsPage, "#/endpoints"],
  ["handshakes", handshakesPage, "#/handshakes"],
  ["handshakes/:id", handshakePage, "#/handshakes"],
  ["cluster", clusterPage, "#/cluster"],
  ["audit", auditPage, "#/audit"],
  ["about", aboutPage, "#/about"],
];

const MENU = [
  ["Watch", [["Overview", "#/"], ["Events", "#/events"], ["Live stream", "#/live"], ["Dead letters", "#/deadletters"], ["Endpoints", "#/endpoints"]]],
  ["Manage", [["Topics", "#/topics"], ["Subscriptions", "#/subscriptions"], ["Handshakes", "#/handshakes"]]],
  ["Try", [["Send an event", "#/send"], ["Filter lab", "#/lab"]]],
  ["Server", [["Cluster", "#/cluster"], ["Audit", "#/audit"], ["Documentation", "/docs"], ["About", "#/about"]]],
];

const app = document.getElementById("app");
let main = null;
let menu = null;
let leave = new AbortController();
let first = true;
/** Stands above every page, and is empty while all nodes answer. */
const incomplete = h("div");

function sayIncomplete(names) {
  const said = names.join(", ");
  // Pages ask again and again: what is said already is not said anew.
  if (incomplete.dataset.said === said) return;
  incomplete.dataset.said = said;
  fill(incomplete, said && notice("warn", h("strong", {}, "Not the whole answer. "), names.length > 1 ? "These nodes do not answer: " : "This node does not answer: ", text(said), ". What is known only there is not shown. See ", h("a", { href: "#/cluster" }, "Cluster"), "."));
}

function frame() {
  const links = MENU.map(([title, items], at) =>
    h(
      "div",
      { class: "menu-group" },
      h("p", { class: "menu-title", id: `menu-${at}` }, title),
      h("ul", { "aria-labelledby": `menu-${at}` }, items.map(([text, href]) => h("li", {}, h("a", { href }, text)))),
    ),
  );
  const opener = button("Menu", () => show(opener.getAttribute("aria-expanded") !== "true"), { kind: "menu-opener", key: "menu" });
  const show = (open) => {
    opener.setAttribute("aria-expanded", String(open));
    menu.classList.toggle("open", open);
  };
  opener.setAttribute("aria-controls", "menu");
  opener.setAttribute("aria-expanded", "false");
  menu = h("nav", { id: "menu", class: "menu", "aria-label": "Main", on: {
    click: (event) => event.target.closest("a") && show(false),
    keydown: (event) => {
      if (event.key === "Escape" && opener.getAttribute("aria-expanded") === "true") {
        show(false);
        opener.focus();
      }
    },
  } }, links);
  main = h("main", { id: "main", tabindex: "-1" });
  fill(
    app,
    h(
      "div",
      { class: "frame" },
      h(
        "header",
        { class: "topbar" },
        opener,
        h("a", { href: "#/", class: "brand", "aria-label": "Postrider, overview" }, mark(), h("span", {}, "Postrider")),
        h("form", { class: "find", role: "search", "aria-label": "Find", on: { submit: find } },
          h("label", { for: "find", class: "sr" }, "Find a topic, a subscription, an endpoint or an event"),
          h("input", { id: "find", type: "search", placeholder: "Name, endpoint or event id", autocomplete: "off", spellcheck: "false", autocapitalize: "off", enterkeyhint: "search" }),
        ),
        h("div", { class: "bar-end" }, themeChoice(), h("span", { class: "who", title: "Signed in as" }, h("span", { class: "sr" }, "Signed in as "), h("bdi", {}, api.currentSession()?.client ?? "")),
          button("Sign out", leaveServer, { kind: "small quiet" })),
      ),
      menu,
      main,
    ),
  );
}

function find(event) {
  event.preventDefault();
  const input = event.target.querySelector("input");
  const words = input.value.trim();
  if (!words) return input.focus();
  input.value = "";
  location.hash = to.find({ q: words });
}

async function leaveServer() {
  try {
    await api.signOut();
  } catch {
    // The cookie may be gone already, or the server; either way nothing is shown any more.
  }
  app.replaceChildren();
  main = null;
  location.hash = "#/sign-in";
  route();
}

function themeChoice() {
  const control = select([["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]], document.documentElement.dataset.theme ?? "auto", (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      if (theme === "auto") localStorage.removeItem("postrider.theme");
      else localStorage.setItem("postrider.theme", theme);
    } catch {
      // Then the choice holds until the page is closed.
    }
  }, { id: "theme", class: "theme" });
  return h("div", { class: "theme-choice" }, h("label", { for: "theme", class: "sr" }, "Colours"), control);
}

/** `#/topics/a%2Fb?x=1` → path segments and query. */
function where() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const segments = path.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { segments, query: new URLSearchParams(query) };
}

function match(segments) {
  for (const [pattern, page, place] of ROUTES) {
    const parts = pattern.split("/").filter(Boolean);
    if (parts.length !== segments.length) continue;
    const params = {};
    const fits = parts.every((part, at) => {
      if (!part.startsWith(":")) return part === segments[at];
      params[part.slice(1)] = segments[at];
      return true;
    });
    if (fits) return { page, params, place };
  }
  return null;
}

const signInLink = () => {
  const here = location.hash;
  return here && here !== "#/" && !here.startsWith("#/sign-in") ? `#/sign-in?next=${encodeURIComponent(here)}` : "#/sign-in";
};

function route() {
  leave.abort(new DOMException("the page was left", "AbortError"));
  leave = new AbortController();
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  const { segments, query } = where();
  if (!api.currentSession()) {
    if (segments[0] !== "sign-in") return location.replace(signInLink());
    main = null;
    const ctx = context({}, query);
    fill(app, signInPage(ctx));
    return settle(ctx);
  }
  if (segments[0] === "sign-in") return location.replace("#/");
  if (!main) frame();
  api.forgetMissing();
  const found = match(segments);
  for (const link of menu.querySelectorAll("a")) {
    if (link.getAttribute("href") === found?.place) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const ctx = context(found?.params ?? {}, query);
  if (found) fill(main, found.page(ctx));
  else {
    ctx.title = "Not found";
    fill(main, h("h1", { tabindex: "-1", id: "page-heading" }, "There is no such page"), h("p", {}, h("a", { href: "#/" }, "To the overview")));
  }
  main.prepend(incomplete);
  settle(ctx);
}

function context(params, query) {
  return {
    params,
    query,
    signal: leave.signal,
    title: "",
    /** Changes the query of this page without leaving it or adding to the history. */
    remember(members) {
      const [path] = location.hash.split("?");
      const pairs = new URLSearchParams();
      for (const [name, value] of Object.entries(members)) if (value) pairs.set(name, value);
      history.replaceState(null, "", pairs.size ? `${path}?${pairs}` : path);
    },
    go: (href) => (location.hash = href),
    /** The same, so that the way back does not lead here again. */
    replace: (href) => location.replace(href),
    rename(title) {
      document.title = `${title} · Postrider`;
    },
  };
}

/** Whoever cannot see the page change is told, and is put at its beginning. */
function settle(ctx) {
  document.title = ctx.title ? `${ctx.title} · Postrider` : "Postrider";
  window.scrollTo(0, 0);
  const target = document.getElementById("page-heading");
  if (!first || document.activeElement === document.body) {
    if (ctx.keepFocus) ctx.keepFocus.focus();
    else if (!first) target?.focus({ preventScroll: true });
  }
  if (!first) announce(ctx.title);
  first = false;
}

async function start() {
  document.getElementById("skip").addEventListener("click", () => document.getElementById("main")?.focus());
  fill(app, h("div", { class: "boot" }, loading("Starting")));
  try {
    // A page that was sent to nobody in particular says so.
    if (document.documentElement.dataset.visitor !== "stranger") await api.resumeSession();
  } catch (error) {
    fill(app, h("main", { id: "main", class: "boot" }, h("h1", {}, "Postrider"), failure(error, start)));
    return;
  }
  api.whenSignedOut(() => {
    if (!location.hash.startsWith("#/sign-in")) location.replace(signInLink());
    else route();
  });
  api.whenIncomplete(sayIncomplete);
  window.addEventListener("hashchange", route);
  route();
}

start();
