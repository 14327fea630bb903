// Conveniences for the pages under /docs. Everything on them can be read without.

import { h } from "../js/dom.js";

const ORIGIN = "http://127.0.0.1:5888";
const root = document.documentElement;
const announcer = h("div", { class: "sr", role: "status" });

/** All ids here are plain letters: nothing in them needs to be decoded. */
const pointedAt = () => (location.hash ? document.getElementById(location.hash.slice(1)) : null);

/** Examples name the address that the page came from, as text. */
function localise() {
  if (!/^https?:\/\/[A-Za-z0-9.:[\]-]+$/.test(location.origin)) return;
  for (const code of document.querySelectorAll("pre code")) {
    code.textContent = code.textContent.replaceAll(ORIGIN, location.origin);
  }
}

function copyButtons() {
  if (!navigator.clipboard) return;
  for (const pre of document.querySelectorAll("pre.code")) {
    const text = pre.textContent;
    const copy = async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
        announcer.textContent = "Copied";
      } catch {
        button.textContent = "Not possible";
      }
      setTimeout(() => (button.textContent = "Copy"), 2000);
    };
    const button = h("button", { type: "button", class: "button small copy", "aria-label": "Copy the example", on: { click: copy } }, "Copy");
    const box = h("div", { class: "sample" });
    pre.replaceWith(box);
    box.append(pre, button);
  }
}

function menuOpener() {
  const menu = document.getElementById("menu");
  const opener = h("button", { type: "button", class: "button menu-opener", "aria-controls": "menu", "aria-expanded": "false", on: { click: () => show(!menu.classList.contains("open")) } }, "Menu");
  const show = (open) => {
    menu.classList.toggle("open", open);
    opener.setAttribute("aria-expanded", String(open));
  };
  menu.addEventListener("click", (event) => event.target.closest("a") && show(false));
  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && menu.classList.contains("open")) {
      show(false);
      opener.focus();
    }
  });
  document.querySelector(".topbar").prepend(opener);
}

function themeChoice() {
  const choose = (event) => {
    const theme = event.target.value;
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    try {
      if (theme === "auto") localStorage.removeItem("postrider.theme");
      else localStorage.setItem("postrider.theme", theme);
    } catch {
      // Then the choice holds until the page is closed.
    }
  };
  const now = root.dataset.theme ?? "auto";
  const options = [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]];
  const select = h("select", { id: "theme", class: "theme", on: { change: choose } },
    options.map(([value, text]) => h("option", { value, selected: value === now }, text)));
  document.getElementById("bar-end").prepend(h("label", { for: "theme", class: "sr" }, "Colours"), select);
}

/** Shows only what has all the words. */
function finder() {
  const place = document.getElementById("find");
  if (!place) return;
  const panels = [...document.querySelectorAll("main > .panel")];
  const rows = panels.length === 1 ? [...panels[0].querySelectorAll("tbody > tr")] : [];
  const items = (rows.length ? rows : panels).map((element) => ({ element, text: element.textContent.toLowerCase() }));
  const titles = [...document.querySelectorAll("main > h2")];
  const count = h("span", { class: "muted", role: "status" });
  const find = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { element, text } of items) {
      element.hidden = !words.every((word) => text.includes(word));
      if (!element.hidden) shown += 1;
    }
    // A title with nothing under it says nothing.
    for (const title of titles) {
      let next = title.nextElementSibling;
      let empty = true;
      for (; next && next.tagName !== "H2"; next = next.nextElementSibling) {
        if (next.classList.contains("panel") && !next.hidden) empty = false;
      }
      title.hidden = words.length > 0 && empty;
      const note = title.nextElementSibling;
      if (note?.classList.contains("note")) note.hidden = title.hidden;
    }
    count.textContent = words.length ? `${shown} of ${items.length} shown` : "";
  };
  const input = h("input", { id: "find-text", type: "search", placeholder: "Find on this page", autocomplete: "off", spellcheck: "false", on: { input: find } });
  place.append(h("form", { class: "find-docs", role: "search", "aria-label": "On this page", on: { submit: (event) => event.preventDefault() } },
    h("label", { for: "find-text", class: "sr" }, "Find on this page"), input, count));
  // A link from the menu must not lead to something hidden.
  addEventListener("hashchange", () => {
    const target = pointedAt();
    if (!target?.closest("[hidden]")) return;
    input.value = "";
    find();
    target.scrollIntoView();
  });
}

root.dataset.scripted = "yes";
document.body.append(announcer);
localise();
copyButtons();
menuOpener();
themeChoice();
finder();
// What comes by a link with a place in it was put there before the page had its final height.
pointedAt()?.scrollIntoView();
