// Talks to the server: the session, our own API, and the management API. A session has two halves: a cookie that
// scripts cannot read but that browsers send to every port of the host, and a token in the storage of this origin, which
// no other port can read. Neither opens anything alone.

export const API_VERSION = "2025-02-15";
const ARM_PAGE = 100;

/** Why a request was refused. `target` is the path of the field that is wrong, where the server named one. */
export class Problem extends Error {
  constructor(status, message, { code = null, target = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.target = target;
  }
}

/** The session has ended; whoever catches this has nothing to show. */
export class SignedOut extends Problem {}

let session = null;

const KEPT = "postrider.session";
/** Stands in where a browser allows no storage: the session ends with the page then. */
let keptHere = null;

/** The token of the session, as the last tab to sign in has kept it. */
function keptToken() {
  try {
    return localStorage.getItem(KEPT) ?? keptHere;
  } catch {
    return keptHere;
  }
}

function keepToken(token) {
  keptHere = token;
  try {
    if (token) localStorage.setItem(KEPT, token);
    else localStorage.removeItem(KEPT);
  } catch {
    // Then it is kept as long as this page.
  }
}

const onSignedOut = new Set();

export const currentSession = () => session;
export const whenSignedOut = (listener) => onSignedOut.add(listener);

/** Asks for the session of the cookie and the kept token; null if there is none. */
export async function resumeSession() {
  if (!keptToken()) return (session = null);
  const answer = await send("GET", "/portal/session", {});
  if (answer.status === 401 || answer.status === 403) return (session = null);
  session = await readJson(answer);
  return session;
}

export async function signIn(secret) {
  const answer = await send("POST", "/portal/session", { body: { secret } });
  session = await readJson(answer);
  keepToken(session.csrf);
  return session;
}

export async function signOut() {
  const answer = await send("DELETE", "/portal/session", {});
  if (!answer.ok && answer.status !== 401) await readJson(answer);
  session = null;
  keepToken(null);
}

function dropSession() {
  session = null;
  keepToken(null);
  for (const listener of onSignedOut) listener();
}

async function send(method, url, { body, headers, signal, credentials = "same-origin" }) {
  const all = new Headers(headers);
  if (!all.has("accept")) all.set("accept", "application/json");
  if (body !== undefined && !all.has("content-type")) all.set("content-type", "application/json");
  // Who publishes with a key does so without the session, and needs no proof of it.
  const token = credentials === "omit" ? null : keptToken();
  if (token) all.set("x-csrf-token", token);
  const text = body === undefined || typeof body === "string" ? body : JSON.stringify(body);
  try {
    return await fetch(url, { method, headers: all, body: text, signal, credentials, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server cannot be reached. Check that it runs and try again.");
  }
}

/** Sends a request with the session's authority and answers with the Response, or throws a Problem. */
export async function request(method, url, options = {}) {
  let answer = await send(method, url, options);
  let ended = answer.status === 401;
  if (answer.status === 403) {
    // Another tab may have signed in or out since the page was loaded.
    const before = session?.csrf;
    const again = await resumeSession();
    ended = !again;
    if (again && again.csrf !== before) {
      answer = await send(method, url, options);
      ended = answer.status === 401;
    }
  }
  if (ended) {
    dropSession();
    throw new SignedOut(401, "The session has ended. Sign in again.");
  }
  if (!answer.ok) throw await problem(answer);
  return answer;
}

async function problem(answer) {
  const text = await answer.text();
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // Not every proxy on the way answers in JSON.
  }
  const error = body?.error;
  if (error && typeof error === "object") {
    const detail = Array.isArray(error.details) ? error.details[0] : null;
    return new Problem(answer.status, String(error.message ?? detail?.message ?? answer.statusText), {
      code: detail?.code ?? error.code ?? null,
      target: error.target ?? null,
    });
  }
  if (body?.detail || body?.title) {
    return new Problem(answer.status, String(body.detail ?? body.title), { target: body.field ?? null });
  }
  return new Problem(answer.status, `The server answered ${answer.status} ${answer.statusText}`.trim());
}

async function readJson(answer) {
  if (!answer.ok) throw await problem(answer);
  const text = await answer.text();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch {
    throw new Problem(answer.status, "The server's answer was not JSON.");
  }
}

export const query = (members) => {
  const pairs = new URLSearchParams();
  for (const [name, value] of Object.entries(members)) {
    if (value !== null && value !== undefined && value !== "") pairs.set(name, String(value));
  }
  const text = pairs.toString();
  return text ? `?${text}` : "";
};

// ---- our own API

const OURS = "/postrider/v1/";

/** What `/healthz` says, also while the server is not ready. */
export async function health(signal) {
  const answer = await send("GET", "/healthz", { signal });
  return JSON.parse(await answer.text());
}

export async function get(path, members = {}, signal) {
  const answer = await readJson(await request("GET", `${OURS}${path}${query(members)}`, { signal }));
  if (!signal?.aborted) noteMissing(path, answer?.missing);
  return answer;
}

// Nodes of a cluster that did not answer, by what was asked: what only they know is not in what is shown.
const missing = new Map();
const onIncomplete = new Set();
export const whenIncomplete = (listener) => onIncomplete.add(listener);

function noteMissing(path, names) {
  if (Array.isArray(names) && names.length) missing.set(path, names.map(String));
  else if (!missing.delete(path)) return;
  sayIncomplete();
}

function sayIncomplete() {
  const all = [...new Set([...missing.values()].flat())].sort();
  for (const listener of onIncomplete) listener(all);
}

/** Another page is shown: what the one before lacked does not matter any more. */
export function forgetMissing() {
  if (!missing.size) return;
  missing.clear();
  sayIncomplete();
}

export const post = async (path, body, signal) => readJson(await request("POST", `${OURS}${path}`, { body, signal }));

let serverInfo = null;
/** What the server is, asked for once. */
export async function server(signal) {
  serverInfo ??= await get("server", {}, signal);
  return serverInfo;
}

// ---- the management API

/** A link that the server gave, on this origin: behind a proxy its own idea of the host may be another. */
function local(link) {
  const url = new URL(link, location.origin);
  return `${url.pathname}${url.search}`;
}

const path = (id) => id.split("/").map(encodeURIComponent).join("/");
export const armUrl = (id, members = {}) => `${path(id)}${query({ "api-version": API_VERSION, ...members })}`;

/** A resource with the ETag of what was read. */
export async function armGet(id, signal) {
  const answer = await request("GET", armUrl(id), { signal });
  const etag = answer.headers.get("etag");
  return { resource: await readJson(answer), etag };
}

export async function armPost(id, action, body, signal) {
  return readJson(await request("POST", armUrl(`${id}/${action}`), { body: body ?? {}, signal }));
}

/** One page of a list: `{value, next}`; `next` is given to the same function again. */
export async function armList(id, { filter = null, next = null, top = ARM_PAGE, signal } = {}) {
  const url = next ?? armUrl(id, { $top: top, $filter: filter });
  const page = await readJson(await request("GET", url, { signal }));
  return { value: page.value ?? [], next: page.nextLink ? local(page.nextLink) : null };
}

/** All pages of a list, up to a bound. */
export async function armAll(id, { signal, most = 2000 } = {}) {
  const all = [];
  let next = null;
  do {
    const page = await armList(id, { next, signal });
    all.push(...page.value);
    next = page.next;
  } while (next && all.length < most);
  return all;
}

/** `contains(name, 'text')`, with its quotes doubled. */
export const nameContains = (text) => (text ? `contains(name, '${text.replaceAll("'", "''")}')` : null);

/**
 * Creates, changes or deletes, and follows the operation to its end. `report(status, resource)` is told how far it is:
 * `InProgress` or `AwaitingManualAction`, which lasts until somebody visits the validation URL. `target` is the path of the member that
 * a failed operation is about.
 */
export async function armChange(method, id, body, { etag = null, create = false, target = null, report = () => {}, signal } = {}) {
  const headers = {};
  if (etag) headers["if-match"] = etag;
  if (create) headers["if-none-match"] = "*";
  const answer = await request(method, armUrl(id), { body, headers, signal });
  const operation = answer.headers.get("azure-asyncoperation");
  const resource = await readJson(answer);
  if (!operation) return resource;
  const url = local(operation);
  const name = operationName(url);
  for (let wait = seconds(answer.headers.get("retry-after"), 0); ; ) {
    await pause(wait, signal);
    const asked = await request("GET", url, { signal });
    const state = await readJson(asked);
    if (state.status === "Succeeded") break;
    if (state.status === "Failed" || state.status === "Canceled") {
      const error = state.error ?? {};
      throw new Problem(409, error.message ?? `The operation ended as ${state.status}.`, {
        code: error.code ?? state.status,
        target: error.target ?? target,
      });
    }
    const provisioning = await provisioningState(id, signal);
    report(provisioning === "AwaitingManualAction" ? provisioning : state.status, name);
    wait = Math.max(1, seconds(asked.headers.get("retry-after"), 1));
  }
  if (method === "DELETE") return null;
  return (await armGet(id, signal)).resource;
}

const operationName = (url) => url.split("?")[0].split("/").pop().toLowerCase();

async function provisioningState(id, signal) {
  try {
    return (await armGet(id, signal)).resource?.properties?.provisioningState;
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

function seconds(text, otherwise) {
  const value = Number(text ?? NaN);
  return Number.isFinite(value) ? Math.min(value, 30) : otherwise;
}

export const pause = (secs, signal) =>
  new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, secs * 1000);
    signal?.addEventListener("abort", stop, { once: true });
  });

// ---- publishing

/** Publishes with a key of the topic, as any publisher would. */
export async function publish(kind, name, key, contentType, text, signal) {
  const url = `/${kind}/${encodeURIComponent(name)}/api/events${query({ "api-version": "2018-01-01" })}`;
  const headers = { "aeg-sas-key": key, "content-type": contentType };
  const answer = await send("POST", url, { body: text, headers, signal, credentials: "omit" });
  if (!answer.ok) throw await problem(answer);
  return answer.status;
}

// ---- server-sent events

const LINE_MAX = 1 << 20;

/**
 * Reads a stream of server-sent events until it ends or is aborted. By fetch and not by EventSource: that one cannot
 * tell a session that has ended from a server that is away.
 */
export async function readStream(streamPath, members, { signal, opened, received }) {
  const answer = await request("GET", `${OURS}${streamPath}${query(members)}`, { signal, headers: { accept: "text/event-stream" } });
  opened();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "message";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    if (rest.length > LINE_MAX) throw new Problem(0, "The stream sent a line that is too long.");
    const lines = rest.split(/\r\n|\n|\r/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (data.length) received(name, data.join("\n"));
        name = "message";
        data = [];
      } else if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
  }
}
