// Walks through the whole portal in a real browser, on a server with real traffic, and prints a line for each thing that holds.
// Usage: node portal.mjs BASE OWNER_SECRET READER_SECRET DELAYED_BASE, with NODE_PATH set and a Chromium on PATH. What the two servers must
// be configured with is in crates/postrider/tests/it/portal.rs: the second has made its own secret, and its dead letters wait. POSTRIDER_SHOTS=DIR keeps a picture of every page in every size and colour.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { DESKTOP, PHONE, Watch, openBrowser, walkByKeyboard } from "./portal-looks.mjs";
import { BACKWARDS, BREAKOUT, IDS, LONG, MARKUP, Server, domainId, gridEvent, makeTraffic, startWebhooks, storageAccount, subscriptionId, systemTopicId, topicId, until } from "./portal-traffic.mjs";

const [base, secret, readerSecret, delayedBase] = process.argv.slice(2);
const server = new Server(base, secret);
const hooks = await startWebhooks();
const { context, close } = await openBrowser();
const page = context.pages()[0] ?? (await context.newPage());
const keptToken = () => page.evaluate(() => localStorage.getItem("postrider.session"));
const watch = new Watch(page, base);

const ORDERS = topicId("orders");
const of = (topic, name) => subscriptionId(topic, name);
const link = (place, id, more = "") => `#/${place}/${encodeURIComponent(id)}${more}`;

// ---- the small words of the walk

async function step(name, work) {
  const begun = Date.now();
  try {
    await work();
    const problems = watch.taken();
    assert.deepEqual(problems, [], "the page was quiet");
    console.log(`ok ${name} (${Date.now() - begun} ms)`);
  } catch (error) {
    console.error(`failed: ${name}\n${error.stack}\n${(await page.locator("main").innerText({ timeout: 1000 }).catch(() => page.locator("body").innerText()).catch(() => "")).slice(0, 3000)}\n${watch.taken().join("\n")}`);
    if (watch.shots) await page.screenshot({ path: `${watch.shots}/failed.png`, fullPage: true }).catch(() => {});
    throw error;
  }
}

const settled = () => page.waitForFunction(() => !document.querySelector(".state.loading") && document.querySelector("#page-heading"));
async function go(hash) {
  await page.evaluate((to) => { location.hash = to; }, hash);
  await settled();
}
const button = (name, exact = true) => page.getByRole("button", { name, exact });
const plain = (text) => text.replace(/[()[\].*+?^$|\\]/g, "\\$&");
const field = (label, at = 0, where = page) => where.getByLabel(new RegExp(`^${plain(label)}( \\(optional\\))?$`)).nth(at);
/** What is to be read there, on one line. */
const read = async (where) => (await where.innerText()).replace(/\s+/g, " ");
const says = (text) => page.locator("main").getByText(text).first().waitFor();
const inDialog = (name) => page.locator("dialog").getByRole("button", { name, exact: true });
const focused = (what) => page.evaluate((name) => document.activeElement?.[name] ?? "", what);
const hashIs = (pattern) => page.waitForFunction((source) => new RegExp(source).test(location.hash), pattern.source);

async function signIn(as) {
  await page.locator("#secret").fill(as);
  await page.keyboard.press("Enter");
  await page.locator(".frame").waitFor();
  await settled();
}

/** What the summary of a form says is wrong, and the field that it leads to. */
async function formSays(pattern, label) {
  await page.waitForFunction((source) => new RegExp(source).test(document.querySelector(".error-summary:not([hidden])")?.textContent ?? ""), pattern.source);
  assert.equal(await focused("className"), "error-summary");
  await page.locator(".error-summary .link").click();
  const named = await page.evaluate(() => {
    const at = document.activeElement;
    const error = document.getElementById(`${at.id}-error`);
    return { label: document.querySelector(`label[for="${at.id}"]`)?.textContent ?? "", invalid: at.getAttribute("aria-invalid"), error: error && !error.hidden ? error.textContent : "", described: at.getAttribute("aria-describedby") ?? "", errorId: error?.id };
  });
  assert.ok(named.label.startsWith(label), `the error is at "${named.label}", not at "${label}"`);
  assert.equal(named.invalid, "true");
  assert.ok(named.described.includes(named.errorId) && named.error.length > 8, `the field says why: ${named.error}`);
}

const resource = async (id) => (await server.send("GET", `${id}?api-version=2025-02-15`)).json;

// ---- the walk

async function walk() {
  await step("each look finds what it is there to find", async () => {
    await page.goto(`${base}/portal`);
    await page.locator("#secret").waitFor();
    assert.deepEqual(await watch.faults(), []);
    await page.evaluate((markup) => {
      const main = document.querySelector("main");
      const wide = document.createElement("div");
      wide.textContent = "w".repeat(4000);
      const hostile = document.createElement("div");
      hostile.innerHTML = markup;
      const pale = document.createElement("p");
      pale.textContent = "hardly to be read";
      pale.className = "pale";
      pale.style.color = "#ddd";
      const narrow = document.createElement("p");
      narrow.textContent = "a breakable sentence";
      narrow.style.inlineSize = "5ch";
      narrow.style.wordBreak = "break-all";
      main.append(wide, hostile, pale, narrow, Object.assign(document.createElement("h1"), { textContent: "another" }));
      console.error("said by a test");
      setTimeout(() => { throw new Error("thrown by a test"); });
      fetch("https://elsewhere.invalid/").catch(() => {});
      eval?.("1");
    }, BREAKOUT).catch(() => {});
    const found = [];
    await until("everything is found", async () => {
      found.push(...(await watch.faults()));
      return found.some((one) => one.includes("thrown by a test")) && found.some((one) => /Content Security Policy/i.test(one));
    });
    for (const expected of [/too wide/, /hangs out/, /markup that the portal does not make/, /axe .*image-alt/, /axe .*color-contrast/, /"breakable" is broken in the middle/, /said by a test/, /thrown by a test/, /Content Security Policy.*elsewhere|elsewhere.*Content Security Policy/i, /2 main headings/]) {
      assert.ok(found.some((one) => expected.test(one)), `${expected} is not among\n${found.join("\n")}`);
    }
    const other = await context.newPage();
    const stranger = new Watch(other, "http://127.0.0.1:1");
    await other.goto(`${base}/portal`);
    assert.ok(stranger.taken().some((one) => one.startsWith("request to elsewhere")));
    await other.close();
    await page.reload();
    await page.locator("#secret").waitFor();
  });

  await step("the page may run and call nothing but what is from here", async () => {
    const answer = await page.goto(`${base}/portal`);
    const policy = answer.headers()["content-security-policy"];
    for (const part of ["default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'"]) assert.ok(policy.includes(part), policy);
    assert.ok(!/unsafe|\*|https?:/.test(policy), policy);
  });

  await step("sign-in refuses a wrong secret and goes where one wanted to go", async () => {
    await page.goto(`${base}/portal#/events?topic=orders`);
    await page.locator("#secret").waitFor();
    assert.equal(await focused("id"), "secret");
    // The clients of this server are named in its configuration: there is no file to be told of.
    assert.match(await read(page.locator("#secret-help")), /credentials\.toml in its data directory/);
    await watch.look("sign-in");
    await watch.expecting(401, async () => {
      await page.locator("#secret").fill("wrong");
      await page.keyboard.press("Enter");
      await page.getByText("That is not the secret of a client of this server.").waitFor();
    });
    assert.equal(await page.locator("#secret").getAttribute("aria-invalid"), "true");
    await watch.look("sign-in-refused");
    await signIn(secret);
    assert.match(page.url(), /#\/events\?topic=orders$/);
    await page.reload();
    await page.locator(".frame").waitFor();
    assert.equal(await page.evaluate(() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie])), `[{"postrider.session":${JSON.stringify(await keptToken())}},{},""]`, "nothing but the token is kept where a script can read it");
    assert.ok((await keptToken()).length >= 40);
    const [cookie] = await context.cookies();
    assert.deepEqual([cookie.name, cookie.httpOnly, cookie.sameSite], [`postrider_session_${new URL(base).port}`, true, "Strict"]);
  });

  await step("a request without the session's token changes nothing", async () => {
    const attempt = (headers) => page.evaluate(async ([url, more]) => (await fetch(url, { method: "PUT", headers: { "content-type": "application/json", ...more }, body: "{\"location\":\"westus2\"}" })).status, [`${topicId("forged")}?api-version=2025-02-15`, headers]);
    await watch.expecting([403, 401], async () => {
      assert.equal(await attempt({}), 403);
      assert.equal(await attempt({ "x-csrf-token": "guessed" }), 403);
      // Another web server on this machine is sent the cookie, and has nothing else.
      const look = (url) => page.evaluate(async (asked) => (await fetch(asked)).status, url);
      for (const url of ["/portal/session", "/postrider/v1/endpoints", `${topicId("forged")}?api-version=2025-02-15`]) assert.equal(await look(url), 403);
    });
    await assert.rejects(resource(topicId("forged")), /404/);
  });

  await step("each page says where one is", async () => {
    await go("#/endpoints");
    assert.equal(await focused("id"), "page-heading");
    await page.waitForFunction(() => document.getElementById("announcer").textContent === "Endpoints");
    assert.equal(await page.title(), "Endpoints · Postrider");
    assert.equal(await page.locator(".menu [aria-current=page]").innerText(), "Endpoints");
    await page.goBack();
    await hashIs(/#\/events/);
  });

  await step("the keyboard is enough", async () => {
    await page.reload();
    await settled();
    await page.keyboard.press("Tab");
    assert.equal(await focused("id"), "skip");
    await page.keyboard.press("Enter");
    assert.equal(await focused("id"), "main");
    for (const hash of ["#/", "#/events", "#/subscriptions/new", link("topics", ORDERS)]) {
      await go(hash);
      await walkByKeyboard(page);
    }
    // A dialog keeps the focus while it is open, and gives it back.
    await button("Delete").focus();
    await page.keyboard.press("Enter");
    await page.locator("dialog[open]").waitFor();
    for (let count = 0; count < 9; count += 1) {
      await page.keyboard.press("Tab");
      assert.ok(await page.evaluate(() => document.activeElement === document.body || document.activeElement.closest("dialog") !== null), "the focus left the dialog");
    }
    await watch.look("dialog-delete");
    await page.keyboard.press("Escape");
    await page.locator("dialog").waitFor({ state: "detached" });
    assert.equal(await focused("textContent"), "Delete");
  });

  await step("the search box finds events, topics, subscriptions and endpoints", find);
  await step("loss is red, with its cause and what to do", loss);

  await step("a topic is made with every setting, and what the server refuses is said at its field", makeTopic);
  await step("a change on top of somebody else's is refused", changeTopic);
  await step("a subscription is made with every setting, and what the server refuses is said at its field", makeSubscription);
  await step("editing keeps what is not shown", editSubscription);
  await step("a failed handshake is said at the URL", refusedHandshake);
  await step("a webhook that does not answer for itself is waited for", awaitValidation);
  await step("an event is sent, and seen live, and found", sendAndWatch);
  await step("the story of an event is told in a drawing and in words", story);
  await step("events are searched", search);
  await step("the lab tells which events a filter takes", lab);
  await step("charts have their numbers as text", charts);
  await step("deliveries are paused and go on", pauseAndResume);
  await step("a sick endpoint is probed", probe);
  await step("dead letters are looked at and replayed", replay);
  await step("dead letters that wait are written when asked for", writeNow);
  await step("a replay is good only if its events arrive", replayOutcome);
  await step("dead letters are purged only by who means it", purge);
  await step("keys are shown when asked for, and made anew", keys);

  for (const [name, hash, missing] of pages()) {
    await step(`page ${name}`, async () => {
      const open = async () => {
        await go(hash);
        if (name === "live") await server.publish("topics", "orders", [gridEvent(`live-${MARKUP}`, { subject: BREAKOUT })]).then(() => page.locator("table.live tbody tr").first().waitFor());
        await watch.look(name);
      };
      await (missing ? watch.expecting(404, open) : open());
    });
  }

  await step("page cluster-nodes", clusterNodes);

  await step("the menu of a phone opens, closes and leads on", async () => {
    await page.setViewportSize(PHONE);
    const menu = button("Menu");
    await menu.click();
    assert.equal(await menu.getAttribute("aria-expanded"), "true");
    assert.deepEqual(await watch.faults(), []);
    if (watch.shots) await page.screenshot({ path: `${watch.shots}/menu-phone.png` });
    await page.locator(".menu").getByText("Endpoints").focus();
    await page.keyboard.press("Escape");
    assert.equal(await menu.getAttribute("aria-expanded"), "false");
    await menu.click();
    await page.locator(".menu").getByText("About").click();
    await hashIs(/#\/about/);
    assert.ok(!(await page.locator(".menu").isVisible()));
    await page.setViewportSize(DESKTOP);
  });

  await step("a server that is away is said to be", async () => {
    await watch.expecting("away", async () => {
      await page.route("**/postrider/v1/**", (route) => route.abort());
      await page.evaluate(() => { location.hash = "#/endpoints"; });
      await page.locator("main").getByText("The server cannot be reached").waitFor();
      assert.deepEqual(await watch.faults(), []);
      await page.unroute("**/postrider/v1/**");
    });
    await button("Try again").click();
    await says("http://127.0.0.1");
  });

  await step("who may only read is told so", async () => {
    await button("Sign out").click();
    await page.locator("#secret").waitFor();
    await signIn(readerSecret);
    await go(link("subscriptions", of(ORDERS, "shop")));
    await watch.expecting(403, async () => {
      await button("Delete").click();
      await page.locator("dialog input").fill("shop");
      await inDialog("Delete").click();
      await page.locator("dialog .notice.bad").waitFor();
      await page.keyboard.press("Escape");
    });
    await resource(of(ORDERS, "shop"));
  });

  await step("a session that ended leads to sign-in and back", async () => {
    await go("#/deadletters/replays");
    await watch.expecting(401, async () => {
      const csrf = await keptToken();
      const [cookie] = await context.cookies();
      const ended = await fetch(`${base}/portal/session`, { method: "DELETE", headers: { cookie: `${cookie.name}=${cookie.value}`, "x-csrf-token": csrf } });
      assert.equal(ended.status, 204);
      await page.locator("#secret").waitFor();
    });
    assert.match(page.url(), /next=%23%2Fdeadletters%2Freplays/);
    await signIn(secret);
    assert.match(page.url(), /#\/deadletters\/replays$/);
  });

  await step("after signing out nothing is left to see", async () => {
    await button("Sign out").click();
    await page.locator("#secret").waitFor();
    assert.deepEqual(await context.cookies(), []);
    await page.goBack();
    await page.locator("#secret").waitFor();
    assert.equal(await page.locator(".frame").count(), 0);
    await page.evaluate(() => { location.hash = "#/sign-in?next=javascript:document.documentElement.dataset.hacked=1"; });
    await signIn(secret);
    assert.match(page.url(), /#\/$/);
    assert.deepEqual(await watch.faults(), []);
  });
}

/** Every page, by the name of its picture; the last says that its subject is not there. */
function pages() {
  const customers = domainId("customers");
  const hostile = (name, id) => [`event-${name}`, link("events", id)];
  return [
    ["overview", "#/"],
    ["topics", "#/topics"],
    ["domains", "#/topics?kind=domains"],
    ["system-topics", "#/topics?kind=systemTopics"],
    ["topic", link("topics", ORDERS)],
    ["topic-new", "#/topics/new"],
    ["topic-edit", link("topics", ORDERS, "/edit")],
    ["topic-mapped-edit", link("topics", topicId("legacy-erp"), "/edit")],
    ["domain", link("topics", customers)],
    ["domain-new", "#/topics/new?kind=domains"],
    ["domain-topic", link("topics", `${customers}/topics/acme`)],
    ["system-topic", link("topics", systemTopicId("blobs"))],
    ["system-topic-new", "#/topics/new?kind=systemTopics"],
    ["subscriptions", "#/subscriptions"],
    ["subscription", link("subscriptions", of(ORDERS, "shop"))],
    ["subscription-hostile", link("subscriptions", of(ORDERS, "warehouse"))],
    ["subscription-sick", link("subscriptions", of(ORDERS, "sick-partner"))],
    ["subscription-awaiting", link("subscriptions", of(ORDERS, "by-hand"))],
    ["subscription-new", "#/subscriptions/new"],
    ["subscription-edit", link("subscriptions", of(ORDERS, "warehouse"), "/edit")],
    ["events", "#/events"],
    ["event", link("events", IDS.flaky)],
    ["event-dead-lettered", link("events", IDS.rejected)],
    ["event-twice", link("events", IDS.twice)],
    hostile("hostile", MARKUP), hostile("breakout", BREAKOUT), hostile("backwards", BACKWARDS), hostile("long", LONG.slice(0, 300)),
    ["event-none", "#/events/nothing", true],
    ["live", "#/live"],
    ["send", "#/send"],
    ["find", "#/find?q=er"],
    ["lab", `#/lab?subscription=${encodeURIComponent(of(ORDERS, "big-spenders"))}`],
    ["dead-letters", "#/deadletters"],
    ["replays", "#/deadletters/replays"],
    ["endpoints", "#/endpoints"],
    ["handshakes", "#/handshakes"],
    ["cluster", "#/cluster"],
    ["audit", "#/audit"],
    ["about", "#/about"],
    ["no-such-page", "#/nowhere"],
  ];
}

// ---- managing

async function makeTopic() {
  await go("#/topics");
  await page.getByRole("link", { name: "New topic" }).click();
  await field("Name").waitFor();
  await button("Create topic").click();
  await formSays(/Name: is required/, "Name");
  const names = field("Name");
  await watch.expecting(400, async () => {
    await names.fill("no good!");
    await button("Create topic").click();
    await formSays(/Name:/, "Name");
  });
  await names.fill("made-here");
  await field("Profile").selectOption("cloud-2019");
  await field("Input schema").selectOption("CustomEventSchema");
  await page.getByLabel("id: field of the event").fill("nr");
  await page.getByLabel("eventType: field of the event").fill("kind");
  await page.getByLabel("eventType if it is not there").fill("Made.Here");
  await page.getByLabel("subject if it is not there").fill("/made");
  await page.getByLabel("dataVersion if it is not there").fill("1");
  await page.getByText("Who may publish").click();
  await page.getByLabel("Refuse keys and SAS tokens").check();
  await button("Add an address").click();
  await field("Address or network").fill("not an address");
  // A closed part of the form opens when the error is in it.
  await page.getByText("Who may publish").click();
  await watch.expecting(400, async () => {
    await button("Create topic").click();
    await formSays(/Address or network:/, "Address or network");
  });
  await watch.look("topic-form-refused");
  await field("Address or network").fill("10.0.0.0/8");
  await page.locator("summary", { hasText: "Event types" }).click();
  await button("Add an event type").click();
  await field("Event type").fill("Made.Here");
  await field("Display name").fill(MARKUP);
  await page.locator("summary", { hasText: "More" }).click();
  await field("Oldest TLS version").selectOption("1.2");
  await field("Data residency").selectOption("WithinRegion");
  await page.locator("summary", { hasText: "Tags and identity" }).click();
  await button("Add a tag").click();
  await field("Name", 1).fill("owner");
  await field("Value").fill(BREAKOUT);
  await field("Identity").selectOption("SystemAssigned");
  await page.getByText("What will be sent").click();
  await page.locator("pre").getByText("Made.Here").first().waitFor();
  await button("Create topic").click();
  await hashIs(/made-here$/);
  await settled();
  const made = await resource(topicId("made-here"));
  const { properties: p } = made;
  assert.deepEqual(
    [p.inputSchema, p.postrider.profile, p.disableLocalAuth, p.inboundIpRules[0].ipMask, p.minimumTlsVersionAllowed, p.dataResidencyBoundary, p.inputSchemaMapping.properties.id.sourceField, p.inputSchemaMapping.properties.eventType.defaultValue, Object.keys(p.eventTypeInfo.inlineEventTypes), made.tags, made.identity.type],
    ["CustomEventSchema", "cloud-2019", true, "10.0.0.0/8", "1.2", "WithinRegion", "nr", "Made.Here", ["Made.Here"], { owner: BREAKOUT }, "SystemAssigned"],
  );
  await go("#/topics/new");
  await field("Name").fill("made-here");
  await watch.expecting(412, async () => {
    await button("Create topic").click();
    await formSays(/there is a topic of that name already/, "Name");
  });
}

async function changeTopic() {
  await go(link("topics", topicId("telemetry"), "/edit"));
  const before = await resource(topicId("telemetry"));
  await server.send("PATCH", `${topicId("telemetry")}?api-version=2025-02-15`, { body: { tags: { by: "somebody else" } } });
  await until("the other change holds", async () => (await resource(topicId("telemetry"))).tags?.by);
  assert.equal(before.tags?.by, undefined);
  await page.getByLabel("Refuse keys and SAS tokens").check();
  await watch.expecting(412, async () => {
    await button("Save").click();
    await page.locator(".error-summary").getByText("Somebody else has changed this topic").waitFor();
  });
  await page.reload();
  await settled();
  await button("Add a tag").click();
  await field("Name", 2).fill("second");
  await field("Value", 1).fill("2");
  await button("Save").click();
  await hashIs(/telemetry$/);
  assert.deepEqual((await resource(topicId("telemetry"))).tags, { by: "somebody else", second: "2" });
}

async function makeSubscription() {
  await go(`#/subscriptions/new?topic=${encodeURIComponent(ORDERS)}`);
  const create = button("Create subscription");
  await create.click();
  await formSays(/Name: is required/, "Name");
  await field("Name").fill("made-here");
  await create.click();
  await formSays(/URL: is required/, "URL");
  await watch.expecting(400, async () => {
    await field("URL").fill("ftp://127.0.0.1/");
    await create.click();
    await formSays(/URL:/, "URL");
  });
  await field("URL").fill(hooks.url("/made?code=s3cret"));
  await field("Events per batch, at most").fill("7");
  await field("Preferred batch size in KB").fill("99");
  for (const [at, [name, kind, label, value]] of [["x-static", "Static", "Value", "seen"], ["x-secret", "Secret", "Value", "hunter2"], ["x-dynamic", "Dynamic", "Field of the event", "data.customer"]].entries()) {
    await button("Add one").click();
    const row = page.locator("fieldset", { hasText: "Delivery headers" }).locator("li").nth(at);
    await row.getByLabel("Name").fill(name);
    await row.getByLabel("Kind").selectOption(kind);
    await row.getByLabel(label).fill(value);
  }
  await page.getByLabel("Event types").fill("Order.Created\nOrder.Paid");
  await page.getByLabel("Subject begins with").fill("/orders/");
  await page.getByLabel("Subject ends with").fill("9");
  await page.getByLabel("Upper and lower case differ in subjects").check();
  await page.getByLabel("Look into arrays").check();
  const filters = [
    ["data.customer", "StringNotIn", "Values", `${MARKUP}\nnobody`], ["data.total", "NumberInRange", "Values", "1, 5\n7 12345678901234567890.5"], ["data.total", "NumberLessThan", "Value", "1e9"],
    ["data.gift", "BoolEquals", "Value", "true"], ["data.total", "IsNotNull", null, null], ["data.total", "NumberNotIn", "Values", "3\n4"],
  ];
  for (const [at, [key, operator, label, value]] of filters.entries()) {
    await button("Add an advanced filter").click();
    const row = page.locator("fieldset", { hasText: "Advanced filters" }).locator("li").nth(at);
    await row.getByLabel("Key").fill(key);
    await row.getByLabel("Operator").selectOption(operator);
    if (operator === "BoolEquals") await row.getByLabel(label).selectOption(value);
    else if (label) await row.getByLabel(label).fill(value);
  }
  const filter = page.locator("fieldset", { hasText: "Advanced filters" });
  await watch.expecting(400, async () => {
    await filter.locator("li").nth(0).getByLabel("Values").fill("v".repeat(600));
    await create.click();
    await formSays(/Values:/, "Values");
  });
  await watch.look("subscription-form-refused");
  await filter.locator("li").nth(0).getByLabel("Values").fill(`${MARKUP}\nnobody`);
  await page.locator("summary", { hasText: "Retry" }).click();
  await field("Attempts, at most").fill("77");
  await create.click();
  await formSays(/Attempts, at most: must be a whole number from 1 to 30/, "Attempts");
  await field("Attempts, at most").fill("5");
  await field("Time to live in minutes").fill("30");
  // Nothing would keep what is given up: the part of the form is open, says so and offers a place.
  const dropped = page.getByText("Events that cannot be delivered will be dropped.");
  assert.ok(await dropped.isVisible());
  await button('Keep them in the account "local"').click();
  assert.ok(await page.getByLabel("Keep events that are given up").isChecked());
  assert.equal(await field("Storage account").inputValue(), storageAccount("local"));
  assert.ok(!(await dropped.isVisible()));
  await page.getByLabel("Keep events that are given up").uncheck();
  assert.ok(await dropped.isVisible());
  await page.getByLabel("Keep events that are given up").check();
  await watch.expecting([400, 404], async () => {
    await field("Storage account").fill(storageAccount("nowhere"));
    await create.click();
    await formSays(/Storage account:/, "Storage account");
  });
  await field("Storage account").fill(storageAccount("local"));
  await field("Container").fill("made-here");
  await page.locator("summary", { hasText: "Labels, expiry and schema" }).click();
  await page.getByLabel("Labels").fill(`${MARKUP}\nsecond`);
  await page.getByLabel("Expires (Europe/Berlin)").fill("2099-07-01T12:30");
  await field("Delivery schema").selectOption("EventGridSchema");
  await field("Profile").selectOption("cloud-2020");
  await create.click();
  await hashIs(/made-here$/);
  await settled();
  const { properties: p } = await resource(of(ORDERS, "made-here"));
  const d = p.destination.properties;
  assert.deepEqual(
    [d.endpointBaseUrl, d.maxEventsPerBatch, d.preferredBatchSizeInKilobytes, p.retryPolicy, p.labels, p.eventDeliverySchema, p.postrider.profile, p.deadLetterDestination.properties.blobContainerName, new Date(p.expirationTimeUtc).toISOString()],
    [hooks.url("/made"), 7, 99, { maxDeliveryAttempts: 5, eventTimeToLiveInMinutes: 30 }, [MARKUP, "second"], "EventGridSchema", "cloud-2020", "made-here", "2099-07-01T10:30:00.000Z"],
  );
  const { filter: f } = p;
  assert.deepEqual([f.includedEventTypes, f.subjectBeginsWith, f.subjectEndsWith, f.isSubjectCaseSensitive, f.enableAdvancedFilteringOnArrays], [["Order.Created", "Order.Paid"], "/orders/", "9", true, true]);
  assert.deepEqual(f.advancedFilters.map((one) => one.operatorType), filters.map(([, operator]) => operator));
  assert.deepEqual(f.advancedFilters[0].values, [MARKUP, "nobody"]);
  assert.deepEqual(d.deliveryAttributeMappings.map((one) => [one.name, one.type, one.properties.isSecret ?? null, one.properties.sourceField ?? one.properties.value]), [["x-static", "Static", false, "seen"], ["x-secret", "Static", true, "Hidden"], ["x-dynamic", "Dynamic", null, "data.customer"]]);
  assert.ok(!(await page.locator("main").innerText()).includes("s3cret"), "the query of a webhook is not shown unasked");
  await button("Show whole URL").click();
  await says("code=s3cret");
}

async function editSubscription() {
  await go(link("subscriptions", of(ORDERS, "made-here"), "/edit"));
  await button("Add an advanced filter").focus();
  for (let count = 6; count > 0; count -= 1) await page.locator("fieldset", { hasText: "Advanced filters" }).getByRole("button", { name: /^Remove/ }).first().click();
  await page.getByLabel("Event types").fill("Made.Here");
  await page.getByLabel("Subject ends with").fill("");
  await field("Events per batch, at most").fill("1");
  await button("Save").click();
  await hashIs(/made-here$/);
  await settled();
  const { properties: p } = await resource(of(ORDERS, "made-here"));
  assert.deepEqual([p.filter.includedEventTypes, p.filter.advancedFilters ?? [], p.labels, p.destination.properties.maxEventsPerBatch], [["Made.Here"], [], [MARKUP, "second"], 1]);
  await server.publish("topics", "orders", [gridEvent("made-1", { eventType: "Made.Here" })]);
  const sent = await until("it is delivered", () => hooks.requests.find((one) => one.path === "/made"));
  assert.equal(sent.query, "code=s3cret");
  assert.deepEqual([sent.headers["x-static"], sent.headers["x-secret"], sent.headers["x-dynamic"]], ["seen", "hunter2", "acme"]);
  // Whoever deletes must type the name.
  await button("Delete").click();
  assert.ok(await inDialog("Delete").isDisabled());
  await page.locator("dialog input").fill("made-here");
  await inDialog("Delete").click();
  await hashIs(/topics\/.*orders$/);
  await assert.rejects(resource(of(ORDERS, "made-here")), /404/);
}

/** The server asks the webhook after it has taken the subscription; what went wrong is at the URL all the same. */
async function refusedHandshake() {
  await go(`#/subscriptions/new?topic=${encodeURIComponent(ORDERS)}`);
  await field("Name").fill("refused-here");
  await field("URL").fill(hooks.url("/unwilling"));
  // The subscription is looked for, and is not there any more.
  await watch.expecting(404, async () => {
    await button("Create subscription").click();
    await formSays(/URL: .*NotFound/, "URL");
  });
  await watch.look("subscription-form-handshake");
}

async function awaitValidation() {
  await go(`#/subscriptions/new?topic=${encodeURIComponent(ORDERS)}`);
  await field("Name").fill("opened-by-hand");
  await field("URL").fill(hooks.url("/manual"));
  await button("Create subscription").click();
  await page.getByText("Awaiting manual validation.").waitFor();
  await watch.look("subscription-awaiting-validation");
  const asked = await until("it was asked", () => hooks.validations.find((one) => one.name === "opened-by-hand"));
  const visit = await fetch(asked.url);
  assert.equal(visit.status, 200);
  await hashIs(/opened-by-hand$/);
  await go("#/handshakes?state=failed");
  await page.getByRole("link", { name: "unwilling" }).click();
  await says("What was said");
  await watch.look("handshake-failed");
}

// ---- watching

async function sendAndWatch() {
  await go("#/live");
  await page.locator("main").getByText("Connected").waitFor();
  const other = await context.newPage();
  await other.goto(`${base}/portal#/send?topic=${encodeURIComponent(ORDERS)}`);
  await field("Id", 0, other).fill("sent-here");
  await field("Data", 0, other).fill("{ not json");
  await other.getByRole("button", { name: "Send", exact: true }).click();
  await other.locator(".error-summary").getByText("Data: is not JSON").waitFor();
  await field("Data", 0, other).fill(JSON.stringify({ total: 2000, text: MARKUP }));
  await other.getByRole("button", { name: "Send", exact: true }).click();
  await other.getByText("200: accepted.").waitFor();
  await other.close();
  const rows = page.locator("table.live tbody tr", { hasText: "sent-here" });
  await rows.filter({ hasText: "accepted" }).first().waitFor();
  await rows.filter({ hasText: "big-spenders" }).filter({ hasText: "Success" }).first().waitFor();
  await button("Pause").click();
  const shown = await page.locator("table.live tbody tr").count();
  await server.publish("topics", "orders", [gridEvent("while-held")]);
  await page.getByRole("button", { name: /Go on \(\d+ new\)/ }).waitFor();
  assert.equal(await page.locator("table.live tbody tr").count(), shown);
  await page.getByRole("button", { name: /Go on/ }).click();
  await page.locator("table.live tbody tr", { hasText: "while-held" }).first().waitFor();
  await page.getByLabel("Containing").fill("while-held");
  await page.waitForFunction(() => [...document.querySelectorAll("table.live tbody tr")].every((row) => row.textContent.includes("while-held")));
  await page.getByLabel("Containing").fill("");
  await page.locator("table.live tbody tr", { hasText: "sent-here" }).first().getByRole("link").click();
  await hashIs(/#\/events\/sent-here$/);
  await says("big-spenders");
}

async function story() {
  // Of several attempts the failed ones come first.
  await go(link("subscriptions", of(ORDERS, "flaky-partner")));
  const attempts = page.getByRole("table", { name: "Recent attempts to deliver to flaky-partner" }).locator("tbody tr");
  await attempts.first().waitFor();
  const results = await attempts.evaluateAll((rows) => rows.map((row) => row.querySelector(".badge").textContent));
  const firstGood = results.indexOf("●HTTP 200 OK");
  assert.ok(firstGood > 0 && results.slice(0, firstGood).every((one) => one === "■HTTP 503 Service Unavailable") && results.slice(firstGood).every((one) => one === "●HTTP 200 OK"), results.join());
  await page.getByLabel("Show", { exact: true }).selectOption("failed");
  await page.waitForFunction(() => [...document.querySelectorAll("main tbody tr .badge")].every((one) => !one.textContent.includes("200 OK")));
  await go(link("events", IDS.flaky));
  const drawing = page.locator(".timeline svg");
  assert.match(await drawing.getAttribute("aria-label"), /Timeline of \d+ subscriptions/);
  assert.equal(await drawing.getAttribute("role"), "img");
  const lane = page.getByRole("region", { name: "Subscription flaky-partner" });
  const words = await read(lane);
  for (const said of [/Attempt 1 ■ HTTP 503 Service Unavailable/, /Attempt 2 ■ HTTP 503 Service Unavailable/, /Attempt 3 ● Success 200/, /queued .* connect .* first byte .* total/, /To be tried again at/]) assert.match(words, said);
  await lane.getByText("Response (text/html)").first().click();
  assert.ok((await lane.locator("pre").first().innerText()).startsWith(MARKUP), "a response is shown as the text that it is");
  // It is drawn anew every few seconds; what was opened stays open.
  await page.waitForResponse((answer) => answer.url().includes("/events/order-7"));
  assert.ok(await lane.locator("pre").first().isVisible());
  assert.match(await read(page.getByRole("table", { name: /did not match/ })), /big-spenders advanced filter 1: data.total NumberGreaterThan 1000/);
  await go(link("events", IDS.rejected));
  const given = await read(page.getByRole("region", { name: "Subscription strict-partner" }));
  assert.match(given, /dead-lettered/);
  assert.match(given, /Dead-letter blob: local\/deadletters\//);
}

async function search() {
  await go("#/events");
  await page.getByLabel("Event type").fill("Order.Paid");
  await button("Search").click();
  await page.waitForFunction(() => [...document.querySelectorAll("main tbody tr")].length > 0 && [...document.querySelectorAll("main tbody tr")].every((row) => row.textContent.includes("Order.Paid")));
  assert.equal(await page.locator("main tbody tr").count(), 4);
  assert.match(page.url(), /type=Order.Paid/);
  await page.getByLabel("Event type").fill("");
  await page.getByLabel("State").selectOption("unmatched");
  await button("Search").click();
  await page.waitForFunction(() => [...document.querySelectorAll("main tbody tr")].every((row) => row.textContent.includes("unmatched")));
  await page.getByLabel("State").selectOption("");
  await page.getByLabel("Subject begins with").fill("/nowhere");
  await button("Search").click();
  await says("No recorded event is like that.");
}

async function lab() {
  await go(`#/lab?topic=${encodeURIComponent(ORDERS)}`);
  await page.locator(".lab-count").waitFor();
  await page.getByLabel("Events to try").selectOption("200");
  await page.getByLabel("Event types").fill("Order.Paid");
  await page.waitForFunction(() => /^4 of the last/.test(document.querySelector(".lab-count")?.textContent));
  await page.locator("main tbody tr", { hasText: "event type:" }).first().waitFor();
  // One line for each event, with what it failed by beside it.
  for (const size of [DESKTOP, PHONE]) {
    await page.setViewportSize(size);
    const rows = await page.locator("table.lines tbody tr").evaluateAll((all) => all.map((row) => row.getBoundingClientRect().height));
    assert.ok(rows.length > 20 && Math.max(...rows) < 34, `rows are ${Math.max(...rows)} px high`);
  }
  await page.setViewportSize(DESKTOP);
  await button("Add an advanced filter").click();
  await page.getByLabel("Key").fill("data.total");
  await page.getByLabel("Operator").selectOption("NumberGreaterThan");
  await page.getByRole("textbox", { name: "Value" }).fill("100");
  await page.waitForFunction(() => /^0 of the last/.test(document.querySelector(".lab-count")?.textContent));
  await page.locator("main tbody tr", { hasText: "data.total NumberGreaterThan 100" }).first().waitFor();
  await button("Edit as JSON").click();
  const text = await page.getByLabel("Filter as JSON").inputValue();
  assert.deepEqual(JSON.parse(text).advancedFilters, [{ operatorType: "NumberGreaterThan", key: "data.total", value: 100 }]);
  await watch.expecting(400, async () => {
    await page.getByLabel("Filter as JSON").fill(JSON.stringify({ advancedFilters: [{ operatorType: "NumberIs", key: MARKUP, values: [1] }] }));
    await page.locator(".results .notice.bad").waitFor();
    // It is asked again whenever there are new events.
    await watch.look("lab-refused");
  });
  await page.getByLabel("Filter as JSON").fill(text);
  await page.waitForFunction(() => /^0 of the last/.test(document.querySelector(".lab-count")?.textContent));
  await button("Subscribe with this filter").click();
  await hashIs(/subscriptions\/new/);
  await field("Name").waitFor();
  assert.equal(await page.getByLabel("Event types").inputValue(), "Order.Paid");
}

async function charts() {
  await go("#/");
  const shown = page.locator("figure.chart");
  await shown.first().locator("svg[role=img]").waitFor();
  assert.equal(await shown.count(), 3);
  const series = await server.ours("stats/series?minutes=60");
  const peak = Math.max(...series.delivered);
  assert.ok(peak > 0, "something was delivered");
  const labels = await shown.locator("svg[role=img]").evaluateAll((all) => all.map((one) => one.getAttribute("aria-label")));
  assert.match(labels[0], /^Deliveries per minute\. Delivered: now [\d.,]+, at most [\d.,]+/);
  assert.match(labels[1], /^Failures per minute\. Failed attempts: now .*, at most [1-9]/);
  assert.match(labels[2], /^Latency, accepted to delivered\. p99: now [\d.,]+\sm?s/);
  await page.getByRole("button", { name: "Deliveries per minute: show as a table" }).click();
  const rows = await shown.first().locator("tbody tr").count();
  assert.equal(rows, series.delivered.length);
  assert.deepEqual(await watch.faults(), []);
  await latencyAxis();
  await page.getByLabel("Span").selectOption("1440");
  await page.waitForResponse((answer) => answer.url().includes("minutes=1440"));
  const stats = await server.ours("stats");
  assert.ok(stats.latencyMs.p95 > 0 && stats.rates.publishedPerSec > 0, JSON.stringify([stats.latencyMs, stats.rates]));
  await go(link("subscriptions", of(ORDERS, "warehouse")));
  await page.locator("figure.chart svg[role=img]").nth(2).waitFor();
  assert.match(await page.locator("figure.chart svg[role=img]").nth(2).getAttribute("aria-label"), /p50: now [\d.,]+\sm?s/);
}

/** Labels are whole, and round in the unit that they are in, whatever the latencies are. */
async function latencyAxis() {
  const series = await server.ours("stats/series?minutes=60");
  for (const [most, expected] of [
    [0.7, ["0 ms", "0.25 ms", "0.5 ms", "0.75 ms"]], [480, ["0 ms", "200 ms", "400 ms", "600 ms"]], [2400, ["0 ms", "1 s", "2 s", "3 s"]],
    [66_000, ["0 ms", "30 s", "1 min", "1 min 30 s"]], [1_500_000, ["0 ms", "10 min", "20 min", "30 min"]], [50_000_000, ["0 ms", "6 h", "12 h", "18 h"]],
    [200_000_000, ["0 ms", "1 d", "2 d", "3 d"]],
  ]) {
    const p99Ms = series.p99Ms.map((_, at) => (at === 30 ? most : null));
    await page.route("**/stats/series?*", (route) => route.fulfill({ json: { ...series, p99Ms, p95Ms: p99Ms, p50Ms: p99Ms } }));
    await go("#/about");
    await go("#/");
    const drawing = page.locator("figure.chart", { hasText: "Latency" }).locator("svg[role=img]");
    await drawing.waitFor();
    const labels = await drawing.evaluate((svg) => [...svg.querySelectorAll("text[text-anchor=end]")].map((label) => ({ said: label.textContent.replaceAll("\u00a0", " "), left: label.getBoundingClientRect().left - svg.getBoundingClientRect().left })));
    assert.deepEqual(labels.map((label) => label.said), expected);
    for (const { said, left } of labels) assert.ok(left >= 0, `"${said}" is cut off by ${-left} px`);
    await page.unroute("**/stats/series?*");
  }
  await go("#/about");
  await go("#/");
  await page.locator("figure.chart svg[role=img]").first().waitFor();
}

async function pauseAndResume() {
  await go(link("subscriptions", of(ORDERS, "shop")));
  await button("Pause").click();
  await button("Resume").waitFor();
  await says("Paused: events are accepted, kept and wait.");
  await watch.look("subscription-paused");
  await server.publish("topics", "orders", [gridEvent("in-the-pause")]);
  await go(link("events", "in-the-pause"));
  await page.getByRole("region", { name: "Subscription shop" }).getByText(/paused/i).first().waitFor();
  await go("#/subscriptions?state=paused");
  await page.locator("main tbody tr", { hasText: "shop" }).waitFor();
  assert.equal(await page.locator("main tbody tr").count(), 1);
  assert.ok(!hooks.requests.some((one) => one.query === "code=s3cret" && one.path === "/ok" && one.ids.includes("in-the-pause")));
  await go(link("subscriptions", of(ORDERS, "shop")));
  await button("Resume").click();
  await button("Pause").waitFor();
  await until("it is delivered after the pause", () => hooks.requests.some((one) => one.query === "code=s3cret" && one.path === "/ok" && one.ids.includes("in-the-pause")));
}

async function probe() {
  const before = hooks.requests.filter((one) => one.path === "/sick").length;
  await until("the endpoint is left alone", async () => (await server.ours("stats")).sick.some((one) => one.state === "delayed"));
  await go(link("subscriptions", of(ORDERS, "sick-partner")));
  await says("delayed");
  // Its own attempts: what the endpoint answered, and nothing about other subscriptions.
  const attempts = page.getByRole("table", { name: "Recent attempts to deliver to sick-partner" });
  const first = attempts.locator("tbody tr").first();
  await first.waitFor();
  assert.match(await read(first), /■ HTTP 500 Internal Server Error [1-9]\d* [\d.,]+\sm?s \{"error":"<script>/);
  assert.doesNotMatch(await read(attempts), /shop|warehouse|Generic error/);
  await button("Send one event as a test").click();
  await until("one event is sent to it", () => hooks.requests.filter((one) => one.path === "/sick").length > before);
  await go("#/");
  const sick = page.getByRole("region", { name: "Sick endpoints" });
  await sick.getByText(hooks.url("/sick")).waitFor();
  assert.match(await read(sick), /HTTP 500 Internal Server Error orders\/sick-partner/);
  assert.doesNotMatch(await read(sick), /Generic error/);
  await sick.getByRole("button", { name: /^Resume deliveries now/ }).waitFor();
  await go("#/endpoints?state=delayed");
  const endpoints = page.getByRole("table", { name: "Endpoints" });
  assert.match(await read(endpoints), /sick-partner/);
  assert.match(await read(endpoints), /HTTP 500 Internal Server Error HTTP 500 Internal Server Error/);
  assert.doesNotMatch(await read(endpoints), /Generic error/);
  await endpoints.getByRole("button", { name: /^Resume deliveries now/ }).waitFor();
}

// ---- what is lost

/** A subscription without a dead-letter place whose endpoint refuses everything. */
async function loss() {
  await server.subscribe(ORDERS, "lossy", hooks.url("/reject?lossy"), { settings: { filter: { subjectBeginsWith: "/lossy" } } });
  await server.publish("topics", "orders", Array.from({ length: 5 }, (_, i) => gridEvent(`lossy-${i}`, { subject: `/lossy/${i}` })));
  await until("they are dropped", async () => (await server.ours("stats")).totals.dropped >= 5);
  await go("#/");
  const verdict = page.locator(".verdict-box.bad");
  await verdict.waitFor();
  const { verdict: judged, totals } = await server.ours("stats");
  assert.match(await read(verdict), /^\d+ subscriptions need attention/);
  assert.ok(judged.subscriptions.some((one) => one.name === "lossy" && one.reasons[0].code === "dropped"));
  const line = verdict.locator("li", { hasText: "lossy" });
  assert.match(await read(line), /■ failing lossy of orders: 5 of 5 events dropped in the last 5 minutes \(HTTP 400 Bad Request, no dead-letter destination\)\. What to do: .*dead-letter destination/);
  const red = await page.evaluate(() => getComputedStyle(document.querySelector(".figure.bad .figure-value")).color);
  const isRed = (colour) => { const [r, g, b] = colour.match(/\d+/g).map(Number); return r > 120 && r > 2 * g && r > 2 * b; };
  assert.ok(isRed(red), red);
  assert.match(await read(page.locator(".figure.bad")), new RegExp(`^Dropped ${totals.dropped} Undeliverable due to HTTP bad request: \\d+$`));
  await watch.look("overview-loss");
  await line.getByRole("link").click();
  await hashIs(/lossy$/);
  const notice = page.locator("main .notice.bad");
  await notice.waitFor();
  assert.match(await read(notice), /5 of 5 events dropped .*What to do: /);
  assert.match(await read(page.locator(".figure.bad")), /^Dropped 5 Undeliverable due to HTTP bad request: 5$/);
  const state = page.locator(".status-line");
  assert.match(await read(state), /■ failing Delivery: ○ admitting/);
  assert.equal(await page.locator("main .badge.ok", { hasText: "admitting" }).count(), 0, "events that are sent and lost are not well");
  await page.getByRole("region", { name: "Settings" }).getByText("none: events that cannot be delivered are dropped").waitFor();
  const failures = page.locator("figure.chart", { hasText: "Failures per minute" }).locator("svg[role=img]");
  await page.waitForFunction(() => [...document.querySelectorAll("figure.chart svg[role=img]")].some((one) => /Dropped: now [\d.,]+, at most [1-9]/.test(one.getAttribute("aria-label"))));
  assert.ok(isRed(await failures.locator("path.bar.c").evaluate((bar) => getComputedStyle(bar).fill)));
  await watch.look("subscription-loss");
  await go("#/subscriptions?health=failing");
  const failing = page.locator("main tbody tr", { hasText: "lossy" });
  await failing.waitFor();
  assert.match(await read(failing), /■ failing 5 of 5 events dropped/);
  assert.equal(await page.locator("main tbody tr", { hasText: "warehouse" }).count(), 0);
  await page.getByLabel("Health").selectOption("healthy");
  await page.locator("main tbody tr", { hasText: "warehouse" }).waitFor();
  assert.equal(await page.locator("main tbody tr", { hasText: "lossy" }).count(), 0);
  // A server whose letters have a place by default drops nothing, and warns of nothing.
  await server.send("DELETE", `${of(ORDERS, "lossy")}?api-version=2025-02-15`);
}

async function find() {
  const search = async (words) => {
    await page.locator("#find").fill(words);
    await page.keyboard.press("Enter");
  };
  // A single hit is opened; the way back leads to where one was.
  await go("#/about");
  await search(IDS.delivered);
  await hashIs(/#\/events\/order-1$/);
  await page.goBack();
  await hashIs(/#\/about$/);
  await settled();
  await search("legacy-erp");
  await hashIs(/#\/topics\/.*legacy-erp$/);
  await search("big-spend");
  await hashIs(/#\/subscriptions\/.*big-spenders$/);
  await search("/sick");
  await hashIs(/#\/find\?q=%2Fsick$/);
  await settled();
  assert.match(await read(page.getByRole("region", { name: "Subscriptions" })), /sick-partner/);
  assert.match(await read(page.getByRole("region", { name: "Endpoints" })), new RegExp(plain(hooks.url("/sick"))));
  await search("er");
  await page.getByRole("region", { name: "Topics" }).getByRole("link", { name: "orders", exact: true }).waitFor();
  await search("nothing-has-this-name");
  await says("No topic, subscription or endpoint is called that");
  for (const hostile of [MARKUP, BREAKOUT, LONG]) {
    await search(hostile);
    await page.waitForFunction((words) => document.querySelector("h1").textContent.includes(words.slice(0, 50)), hostile);
    await settled();
    assert.deepEqual(await watch.faults(), []);
  }
}

async function replay() {
  await go("#/deadletters");
  await button("orders/strict-partner").click();
  const letter = page.locator("main table", { hasText: "Given up" }).locator("tbody tr").first();
  await letter.getByRole("link").first().click();
  await page.locator("main pre").waitFor();
  await watch.look("dead-letter");
  await button("Replay …").click();
  await page.locator(".dry-run").getByText("1 event").waitFor();
  await page.keyboard.press("Escape");
  await go("#/deadletters?subscription=orders%2Fstrict-partner");
  await button("Replay …").click();
  const counted = await page.locator(".dry-run strong").innerText();
  assert.match(counted, /^3\d events$/);
  await watch.look("dialog-replay");
  await watch.expecting([400, 404], async () => {
    await page.getByLabel("To another subscription").fill("orders/nobody");
    await inDialog("Replay").click();
    await formSays(/To another subscription:|nobody/, "To another subscription");
  });
  await page.getByLabel("To another subscription").fill("");
  await page.getByLabel("Events per second, at most").fill("1");
  await inDialog("Replay").click();
  await hashIs(/deadletters\/replay\/\d+$/);
  const bar = page.getByRole("progressbar", { name: "Replayed" });
  await bar.waitFor();
  const all = Number.parseInt(counted, 10);
  assert.equal(await bar.getAttribute("aria-valuemax"), String(all));
  await page.waitForFunction(() => Number(document.querySelector("[role=progressbar]")?.getAttribute("aria-valuenow")) >= 1);
  await watch.look("replay-running");
  await button("Cancel the replay").click();
  await button("Go on with it").waitFor();
  const done = Number(await bar.getAttribute("aria-valuenow"));
  assert.ok(done >= 1 && done < all, `${done} of ${all} were replayed at one a second`);
  await watch.look("replay-cancelled");
}

/** On the second server, whose dead letters wait for minutes and have a place by default. */
async function writeNow() {
  const other = await context.newPage();
  const seen = new Watch(other, delayedBase);
  // Here the browser runs on the machine of the server, and is told where its secret is.
  await other.goto(`${delayedBase}/portal`);
  await other.locator("#secret").waitFor();
  const file = await other.locator("#secret-help code").innerText();
  assert.match(file, /^\/.*\/credentials\.toml$/);
  const [, made] = /^client_secret = "(.+)"$/m.exec(readFileSync(file, "utf8"));
  await seen.look("sign-in-here");
  await other.locator("#secret").fill(made);
  await other.keyboard.press("Enter");
  await other.locator(".verdict-box.ok").getByText("All well").waitFor();
  const delayed = new Server(delayedBase, made);
  const events = Array.from({ length: 12 }, (_, i) => gridEvent(`late-${i}`));
  await delayed.topic("orders");
  await delayed.subscribe(ORDERS, "strict", hooks.url("/reject"));
  await delayed.publish("topics", "orders", events);
  await until("they are given up", async () => (await delayed.ours("deadletters/summary")).value[0]?.pending === events.length);
  await other.goto(`${delayedBase}/portal#/deadletters`);
  await other.locator("main").getByText("12 events are not written to blobs yet").waitFor();
  await other.getByRole("button", { name: "Replay …" }).click();
  const dialog = other.locator("dialog");
  await dialog.getByText("0 events would be delivered again.").waitFor();
  assert.match(await read(dialog.locator(".notice")), /^12 events are written to blobs in [45] minutes, and can be replayed then\. Write now$/);
  assert.ok(await dialog.getByRole("button", { name: "Replay", exact: true }).isDisabled());
  await seen.look("dialog-replay-waiting");
  await other.keyboard.press("Escape");
  // One by itself, then the rest.
  await other.locator("main table", { hasText: "Given up" }).getByRole("link", { name: /^pending-/ }).first().click();
  await other.waitForFunction(() => location.hash.startsWith("#/deadletters/letter/pending-"));
  await other.getByText("Not yet written to its blob").waitFor();
  await seen.look("dead-letter-waiting");
  await other.getByRole("button", { name: "Write now" }).click();
  await other.waitForFunction(() => location.hash === "#/deadletters");
  await other.locator("main").getByText("11 events are not written to blobs yet").waitFor();
  await other.getByRole("button", { name: "Replay …" }).click();
  await dialog.getByText("1 event would be delivered again.").waitFor();
  await dialog.getByRole("button", { name: "Write now" }).click();
  await dialog.getByText("12 events would be delivered again.").waitFor();
  assert.equal(await dialog.locator(".notice").count(), 0);
  assert.equal((await delayed.ours("deadletters/summary")).value[0].pending, 0);
  // A new subscription loses nothing here: the form names the place, and warns of nothing.
  await other.keyboard.press("Escape");
  await other.goto(`${delayedBase}/portal#/subscriptions/new`);
  await other.locator("summary", { hasText: "Dead letters" }).click();
  await other.getByText("Without it they go to the default of this server: local/kept.").waitFor();
  assert.ok(!(await other.getByText("Events that cannot be delivered will be dropped.").isVisible()));
  await other.goto(`${delayedBase}/portal${link("subscriptions", of(ORDERS, "strict"))}`);
  await other.getByText("the default of this server: local/kept").waitFor();
  // Cookies are those of a host, whatever the port.
  await other.getByRole("button", { name: "Sign out" }).click();
  await other.locator("#secret").waitFor();
  assert.deepEqual(seen.taken(), []);
  await other.close();
}

async function replayOutcome() {
  const job = { id: 99, state: "done", created: new Date().toISOString(), replayed: 3, failed: 0, total: 3, request: { all: true } };
  for (const [name, members, kind, said] of [
    ["nothing was there", { replayed: 0, total: 0 }, "quiet", /done nothing was replayed/],
    ["nothing is known", {}, "quiet", /Delivered not known/],
    ["all arrived", { outcome: { delivered: 3, failed: 0, waiting: 0 } }, "ok", /Delivered 3/],
    ["some are not known", { outcome: { delivered: 2, failed: 0, waiting: 0, unknown: 1 } }, "quiet", /1 not known here/],
    ["some were given up", { outcome: { delivered: 1, failed: 2, waiting: 0 } }, "bad", /2 given up again/],
    ["none arrived", { outcome: { delivered: 0, failed: 3, waiting: 0 } }, "bad", /3 given up again/],
    ["some wait", { outcome: { delivered: 1, failed: 0, waiting: 2 } }, "info", /2 not delivered yet/],
  ]) {
    await page.route("**/deadletters/replays/99", (route) => route.fulfill({ json: { ...job, ...members } }));
    await go("#/about");
    await go("#/deadletters/replay/99");
    const badge = page.locator("main .badge", { hasText: "done" });
    await badge.waitFor();
    assert.equal(await badge.getAttribute("class"), `badge ${kind}`, name);
    assert.match(await read(page.locator("main")), said);
    await page.unroute("**/deadletters/replays/99");
  }
  await go("#/deadletters");
}

async function purge() {
  await go("#/deadletters?subscription=orders%2Fstrict-partner&since=1h");
  await page.locator("main table").last().waitFor();
  const before = (await server.ours("deadletters/summary")).value.find((one) => one.subscription === "strict-partner").written;
  await button("Purge …").click();
  const confirm = page.locator("dialog").getByRole("button", { name: /^Purge \d+ events$/ });
  assert.ok(await confirm.isDisabled());
  await page.getByLabel(/Type/).fill("purg");
  assert.ok(await confirm.isDisabled());
  await watch.look("dialog-purge");
  await page.keyboard.press("Escape");
  const after = (await server.ours("deadletters/summary")).value.find((one) => one.subscription === "strict-partner").written;
  assert.ok(after >= before, "nothing was purged");
  const letter = page.locator("main table", { hasText: "Given up" }).locator("tbody tr").first();
  await letter.getByRole("link").first().click();
  await page.locator("main pre").waitFor();
  await button("Purge …").click();
  await page.locator("dialog").getByRole("button", { name: "Purge 1 event" }).click();
  await hashIs(/deadletters$/);
  await until("one less is there", async () => (await server.ours("deadletters/summary")).value.find((one) => one.subscription === "strict-partner").written < after);
}

/** The example of the API's description, with a node that can take part again: its table has the most columns. */
async function clusterNodes() {
  const described = (await server.ours("openapi.json")).paths["/postrider/v1/cluster"].get.responses["200"].content["application/json"].example;
  const [node] = described.nodes;
  const cluster = { ...described, nodes: [node, { ...node, id: "00000000000000a2", name: "node-2", standing: "drained" }] };
  await page.route("**/postrider/v1/cluster", (route) => route.fulfill({ json: cluster }));
  await go("#/cluster");
  await button("Let node-2 take part again").waitFor();
  await watch.look("cluster-nodes");
  await page.unroute("**/postrider/v1/cluster");
}

async function keys() {
  await go(link("topics", topicId("legacy-erp")));
  assert.equal(await page.locator(".secret").count(), 0);
  await button("Show keys").click();
  const shown = page.locator(".secret").nth(1);
  await shown.waitFor();
  const before = await shown.innerText();
  await button("Regenerate key2").click();
  await inDialog("Regenerate").click();
  await page.locator("dialog").waitFor({ state: "detached" });
  await page.waitForFunction((old) => document.querySelectorAll(".secret")[1]?.textContent !== old, before);
  await go("#/about");
  assert.equal(await page.locator(".secret").count(), 0);
}

try {
  await makeTraffic(server, hooks);
  await walk();
} catch {
  process.exitCode = 1;
} finally {
  await close();
  hooks.close();
}
