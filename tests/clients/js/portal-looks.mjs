// A browser, and what must hold on every page that it shows.

import { createRequire } from "node:module";
import { accessSync, constants, mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const require = createRequire(import.meta.url);
const { chromium } = require("playwright-core");
const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
const FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const PATIENCE_MS = 15_000;

export const DESKTOP = { width: 1280, height: 800 };
export const PHONE = { width: 390, height: 844 };
/** Each with the rules of axe that may be broken by its size or colours alone; all of them are tried in the first. */
const MODES = [
  ["desktop-light", DESKTOP, "light", null],
  ["desktop-dark", DESKTOP, "dark", ["color-contrast"]],
  ["phone-dark", PHONE, "dark", ["color-contrast", "target-size", "scrollable-region-focusable", "aria-hidden-focus"]],
  ["phone-light", PHONE, "light", []],
];
/** The rows of a table are made alike; axe gets to see so many of each. */
const ROWS_SEEN = 5;

function installed() {
  for (const directory of (process.env.PATH ?? "").split(":")) {
    for (const name of NAMES) {
      const path = join(directory, name);
      try {
        accessSync(path, constants.X_OK);
        return path;
      } catch {
        // Not here, then.
      }
    }
  }
  throw new Error(`no browser is on PATH; looked for ${NAMES.join(", ")}: see tests/clients/setup.sh`);
}

/** A browser that knows nothing of earlier ones. */
export async function openBrowser() {
  const profile = mkdtempSync(join(tmpdir(), "portal-"));
  const context = await chromium.launchPersistentContext(profile, { executablePath: installed(), args: FLAGS, viewport: DESKTOP, timezoneId: "Europe/Berlin", locale: "en-GB" });
  context.setDefaultTimeout(PATIENCE_MS);
  const close = async () => {
    await context.close();
    rmSync(profile, { recursive: true, force: true });
  };
  return { context, close };
}

/** Notes whatever a page must never do. */
export class Watch {
  #problems = [];
  #expected = new Set();
  /** By status: answers that came, and how many of them the console has told of. */
  #answered = new Map();
  #said = new Map();

  constructor(page, base) {
    this.page = page;
    this.origin = new URL(base).origin;
    this.shots = process.env.POSTRIDER_SHOTS ?? null;
    if (this.shots) mkdirSync(this.shots, { recursive: true });
    page.on("pageerror", (error) => this.#problems.push(`error: ${error.stack ?? error.message}`));
    page.on("dialog", (dialog) => {
      this.#problems.push(`dialog: ${dialog.message()}`);
      dialog.dismiss();
    });
    page.on("console", (message) => {
      if (message.type() !== "error" && message.type() !== "warning") return;
      const status = /status of (\d+)|(ERR_FAILED|ERR_CONNECTION\w*)/.exec(message.text());
      if (status?.[1]) this.#count(this.#said, status[1]);
      if (status && this.#expected.has(status[1] ?? "away")) return;
      this.#problems.push(`console: ${message.text()} ${message.location().url ?? ""}`);
    });
    page.on("response", (response) => {
      if (response.status() >= 400) this.#count(this.#answered, String(response.status()));
    });
    page.on("request", (request) => {
      const url = request.url();
      if (!url.startsWith(`${this.origin}/`) && !/^(data|blob):/.test(url)) this.#problems.push(`request to elsewhere: ${url}`);
    });
  }

  /** While `work` runs, answers with these statuses are part of the plot. */
  async expecting(statuses, work) {
    const list = [statuses].flat().map(String);
    for (const status of list) this.#expected.add(status);
    try {
      return await work();
    } finally {
      // The browser writes to its console after the page has the answer.
      for (const status of list) {
        while ((this.#answered.get(status) ?? 0) > (this.#said.get(status) ?? 0)) await this.page.waitForEvent("console");
      }
      for (const status of list) this.#expected.delete(status);
    }
  }

  #count(counts, status) {
    counts.set(status, (counts.get(status) ?? 0) + 1);
  }

  /** What has gone wrong since this was last asked. */
  taken() {
    return this.#problems.splice(0);
  }

  /** Everything that is wrong with the page as it is shown now; nothing is the aim. */
  async faults({ rules = null, within = null } = {}) {
    return [...this.taken(), ...(await this.page.evaluate(looksWrong)), ...(await this.#axe(rules, within))];
  }

  async #axe(rules, within) {
    if (rules?.length === 0) return [];
    if (!(await this.page.evaluate(() => "axe" in window))) {
      // Not as a script of the page: that would be against its policy, and so it should be.
      const session = await this.page.context().newCDPSession(this.page);
      await session.send("Runtime.evaluate", { expression: AXE });
      await session.detach();
    }
    return this.page.evaluate(async ([only, place, rows]) => {
      const options = { resultTypes: ["violations"], ...(only ? { runOnly: { type: "rule", values: only } } : { rules: { "target-size": { enabled: true } } }) };
      const { violations } = await window.axe.run({ include: [place ?? "html"], exclude: [`tbody tr:nth-child(n + ${rows + 1})`] }, options);
      return violations.map((one) => `axe ${one.impact} ${one.id}: ${one.nodes.slice(0, 3).map((node) => `${node.html.slice(0, 160)} (${node.failureSummary?.split("\n")[1]?.trim().slice(0, 160)})`).join(" | ")}`);
    }, [rules, within, ROWS_SEEN]);
  }

  /** Looks at the page, or at the dialog in front of it, in every size and colour; throws with all that is wrong. */
  async look(name) {
    const wrong = [];
    const within = (await this.page.locator("dialog[open]").count()) ? "dialog[open]" : null;
    for (const [mode, viewport, colorScheme, rules] of MODES) {
      await this.page.setViewportSize(viewport);
      await this.page.emulateMedia({ colorScheme });
      await this.page.evaluate(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))));
      const faults = await this.faults({ rules, within });
      wrong.push(...faults.map((fault) => `${name}, ${mode}: ${fault}`));
      if (this.shots) await this.page.screenshot({ path: join(this.shots, `${name}-${mode}.png`), fullPage: true });
    }
    await this.page.setViewportSize(DESKTOP);
    await this.page.emulateMedia({ colorScheme: "light" });
    if (wrong.length) throw new Error(wrong.join("\n"));
  }
}

/** Runs in the page. What hangs out, what was executed, and what a screen reader would miss at once. */
function looksWrong() {
  const wrong = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) wrong.push(`the page is ${root.scrollWidth - root.clientWidth} px too wide`);
  const isOwn = (element) => element.closest("svg, pre, .scroll, .sr, thead, textarea, select") === null;
  for (const element of document.querySelectorAll("main *")) {
    const box = element.getBoundingClientRect();
    const edge = (element.parentElement.closest(".panel, dialog, main") ?? root).getBoundingClientRect().right;
    if (box.width > 0 && isOwn(element) && box.right > edge + 1) {
      wrong.push(`<${element.localName} class="${element.getAttribute("class") ?? ""}"> hangs out by ${Math.round(box.right - edge)} px`);
      break;
    }
  }
  // Longer words are such as ids, which may be broken anywhere.
  const texts = document.createTreeWalker(document.querySelector("main") ?? root, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  const linesOf = () => new Set([...range.getClientRects()].filter((one) => one.width > 0).map((one) => Math.round(one.top))).size;
  const isBroken = (node, from, until) => {
    range.setStart(node, from);
    range.setEnd(node, until);
    return linesOf() > 1;
  };
  while (texts.nextNode()) {
    const { currentNode: node } = texts;
    if (node.parentElement.closest(".unbroken, .sr, svg, pre, textarea, option") || !isBroken(node, 0, node.data.length)) continue;
    const words = [...node.data.matchAll(/[\p{L}\p{N}]+/gu)].filter(([word]) => word.length <= 22);
    const broken = words.find((word) => isBroken(node, word.index, word.index + word[0].length));
    if (broken) wrong.push(`"${broken[0]}" is broken in the middle, in <${node.parentElement.localName} class="${node.parentElement.className}"> "${node.data.slice(0, 60)}"`);
  }
  if (root.dataset.hacked) wrong.push(`a text was executed: ${root.dataset.hacked}`);
  if (document.querySelector("img, iframe, object, embed, base, [style*='url'], [onerror], [onload], [onclick]")) wrong.push("there is markup that the portal does not make");
  if (document.querySelectorAll("script").length !== 2) wrong.push("there are other scripts than the portal's");
  for (const link of document.querySelectorAll("a[href]")) {
    if (!/^(#\/|\/)/.test(link.getAttribute("href"))) wrong.push(`a link leads to ${link.getAttribute("href")}`);
  }
  const headings = document.querySelectorAll("h1").length;
  if (headings !== 1) wrong.push(`there are ${headings} main headings`);
  if (!document.title.includes("Postrider") || document.title.length < 12) wrong.push(`the title is "${document.title}"`);
  const twice = [...document.querySelectorAll("[id]")].map((element) => element.id).filter((id, at, all) => all.indexOf(id) !== at);
  if (twice.length) wrong.push(`two elements have the id ${twice[0]}`);
  return wrong;
}

/**
 * Goes through the page with the Tab key alone, from its beginning. Throws if anything that can be used is not reached, or is reached
 * without it being seen. A page that replaces parts of itself meanwhile is gone through again.
 */
export async function walkByKeyboard(page, most = 300) {
  for (let replaced = 0; replaced < 10; replaced += 1) {
    if (await walkOnce(page, most)) return;
  }
  throw new Error("the page replaces what can be used all the time");
}

/** Returns false if something that was to be reached has been taken from the page. */
async function walkOnce(page, most) {
  await page.evaluate(() => {
    document.activeElement?.blur();
    window.scrollTo(0, 0);
    window.unseen = [];
    const usable = "a[href], button:enabled, input:enabled, select:enabled, textarea:enabled, summary, [tabindex='0']";
    window.unreached = new Set([...document.querySelectorAll(usable)].filter((one) => one.checkVisibility({ visibilityProperty: true }) && one.tabIndex >= 0));
    window.reached = ({ target }) => {
      window.unreached.delete(target);
      const { outlineStyle, outlineWidth } = getComputedStyle(target);
      const { top, bottom } = target.getBoundingClientRect();
      const isSeen = outlineStyle !== "none" && parseFloat(outlineWidth) >= 2 && bottom > 0 && top < innerHeight;
      if (!isSeen) window.unseen.push(target.outerHTML.slice(0, 120));
    };
    document.addEventListener("focusin", window.reached);
  });
  const look = () => page.evaluate(() => ({ unseen: window.unseen, missed: [...window.unreached].filter((one) => one.isConnected).map((one) => one.outerHTML.slice(0, 120)), gone: [...window.unreached].some((one) => !one.isConnected) }));
  let { unseen, missed, gone } = await look();
  for (let count = 0; count < most && missed.length; count += 1) {
    await page.keyboard.press("Tab");
    if (count % 10 === 9) ({ unseen, missed, gone } = await look());
  }
  await page.evaluate(() => document.removeEventListener("focusin", window.reached));
  if (unseen.length) throw new Error(`the focus is not seen on ${unseen[0]}`);
  // A new element in the place of one that is gone may have taken the focus back to the page's beginning.
  if (missed.length && !gone) throw new Error(`not reached by keyboard: ${missed.slice(0, 3).join(" ")}`);
  return !gone;
}
