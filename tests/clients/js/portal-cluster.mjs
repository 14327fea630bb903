// Looks at the portal's cluster page in a real browser, on one of two nodes, and drains the other there.
// Usage: node portal-cluster.mjs BASE OWNER_SECRET, with NODE_PATH set and a Chromium on PATH. The nodes are called node-0, which is
// asked, and node-1; crates/postrider/tests/it/cluster_page.rs starts them. POSTRIDER_SHOTS=DIR keeps pictures.

import assert from "node:assert/strict";
import { Watch, openBrowser, walkByKeyboard } from "./portal-looks.mjs";

const [base, secret] = process.argv.slice(2);
const { context, close } = await openBrowser();
const page = context.pages()[0] ?? (await context.newPage());
const watch = new Watch(page, base);

async function step(name, work) {
  await work();
  assert.deepEqual(watch.taken(), [], "the page was quiet");
  console.log(`ok ${name}`);
}

const row = (name) => page.locator("table").first().locator("tbody tr").filter({ hasText: name });
const standing = (name, word) => row(name).locator(".badge").filter({ hasText: word }).waitFor();
const inDialog = (name) => page.locator("dialog").getByRole("button", { name, exact: true });

try {
  await step("the nodes, their partitions and JetStream are shown", async () => {
    await page.goto(`${base}/portal#/cluster`);
    await page.locator("#secret").fill(secret);
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { name: "JetStream" }).waitFor();
    await standing("node-0", "live");
    await standing("node-1", "live");
    const text = await page.locator("main").innerText();
    for (const part of ["(this one)", "(steward)", "survives", "NATS JetStream", "postrider-catalog"]) assert.ok(text.includes(part), `${part} is missing in ${text}`);
    await watch.look("cluster");
    await walkByKeyboard(page);
  });

  await step("a node is drained only by who means it", async () => {
    await page.getByRole("button", { name: "Drain node-1", exact: true }).click();
    await watch.look("cluster-drain");
    await inDialog("Cancel").click();
    await page.locator("dialog").waitFor({ state: "detached" });
    await standing("node-1", "live");
    await page.getByRole("button", { name: "Drain node-1", exact: true }).click();
    await inDialog("Drain").click();
    await page.locator("dialog").waitFor({ state: "detached" });
    await standing("node-1", "drained");
    await watch.look("cluster-drained");
  });

  await step("the last one that is live is drained by its name alone", async () => {
    await page.getByRole("button", { name: "Drain node-0", exact: true }).click();
    assert.ok(await inDialog("Drain").isDisabled());
    await watch.look("cluster-drain-last");
    await page.keyboard.press("Escape");
    await page.locator("dialog").waitFor({ state: "detached" });
    await standing("node-0", "live");
  });

  await step("a drained node takes part again", async () => {
    await page.getByRole("button", { name: "Let node-1 take part again", exact: true }).click();
    await inDialog("Take part again").click();
    await page.locator("dialog").waitFor({ state: "detached" });
    await standing("node-1", "live");
  });
} catch (error) {
  console.error(`${error.stack}\n${(await page.locator("body").innerText().catch(() => "")).slice(0, 2000)}`);
  process.exitCode = 1;
} finally {
  await close();
}
