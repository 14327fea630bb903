// Numbers, times and names as people read them.

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const small = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
const one = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const minutes = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });
const near = new Intl.RelativeTimeFormat(undefined, { numeric: "always", style: "short" });

const ahead = new Intl.RelativeTimeFormat(undefined, { numeric: "always" });

export const timeZone = Intl.DateTimeFormat().resolvedOptions().timeZone;

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (n) => (isNumber(n) ? whole.format(n) : "–");
export const short = (n) => (!isNumber(n) ? "–" : Math.abs(n) < 10_000 ? whole.format(n) : compact.format(n));
export const rate = (n) => (!isNumber(n) ? "–" : n === 0 ? "0" : n < 100 ? small.format(n) : compact.format(n));
export const plural = (n, word, words = `${word}s`) => `${count(n)} ${n === 1 ? word : words}`;

export function millis(ms) {
  if (!isNumber(ms)) return "–";
  if (ms < 1000) return `${ms < 10 ? small.format(ms) : whole.format(ms)}\u00a0ms`;
  return seconds(ms / 1000);
}

export function seconds(s) {
  if (!isNumber(s)) return "–";
  if (s < 60) return `${s < 10 ? one.format(s) : whole.format(s)}\u00a0s`;
  const units = [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]];
  const at = units.findIndex(([, size]) => s >= size);
  const [[big, size], next] = [units[at], units[at + 1]];
  const rest = next ? Math.floor((s % size) / next[1]) : 0;
  return `${whole.format(Math.floor(s / size))}\u00a0${big}${rest ? ` ${rest}\u00a0${next[0]}` : ""}`;
}

export function bytes(n) {
  if (!isNumber(n)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) {
    n /= 1024;
    at += 1;
  }
  return `${at === 0 ? whole.format(n) : one.format(n)}\u00a0${units[at]}`;
}

/** Milliseconds since 1970; NaN if it is no time. */
export const instant = (text) => Date.parse(text);

export function time(text, { precise = false } = {}) {
  const at = new Date(text);
  if (Number.isNaN(at.getTime())) return String(text ?? "–");
  const part = precise ? `${clock.format(at)}.${String(at.getMilliseconds()).padStart(3, "0")}` : clock.format(at);
  // A line may end between day and time, and nowhere else.
  return at.toDateString() === new Date().toDateString() ? part : `${day.format(at).replaceAll(" ", "\u00a0")}, ${part}`;
}

export const minute = (ms) => minutes.format(new Date(ms));
export const dayOf = (ms) => day.format(new Date(ms));

export function ago(text, now = Date.now()) {
  const at = instant(text);
  if (Number.isNaN(at)) return "";
  const delta = (at - now) / 1000;
  const size = Math.abs(delta);
  if (size < 1) return "now";
  for (const [unit, length] of [["day", 86_400], ["hour", 3600], ["minute", 60], ["second", 1]]) {
    if (size >= length) return near.format(Math.trunc(delta / length), unit);
  }
  return "now";
}

/** A time to come, as in "in 5 minutes": rounded up, since nothing happens before. */
export function soon(text, now = Date.now()) {
  const delta = (instant(text) - now) / 1000;
  if (!(delta >= 1)) return "at once";
  const [unit, length] = [["hour", 3600], ["minute", 60], ["second", 1]].find(([, size]) => delta > size) ?? ["second", 1];
  return ahead.format(Math.ceil(delta / length), unit);
}

/** `datetime-local` ⇄ RFC 3339. Fields are in the reader's time zone, the API's times in UTC. */
export function toLocalField(text) {
  const at = new Date(text);
  if (!text || Number.isNaN(at.getTime())) return "";
  const two = (n) => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}T${two(at.getHours())}:${two(at.getMinutes())}`;
}

export function fromLocalField(value) {
  const at = value ? new Date(value) : null;
  return at && !Number.isNaN(at.getTime()) ? at.toISOString() : null;
}

/** camelCase words as a person would say them. */
export const words = (text) =>
  String(text ?? "").replace(/([a-z0-9])([A-Z])/g, (_, a, b) => `${a} ${b.toLowerCase()}`).replace(/\bhttp\b/g, "HTTP");

/** Outcomes of attempts in the words of the reasons for a subscription's health. */
const OUTCOMES = {
  Success: "Success", NotFound: "not found", Disabled: "destination disabled", Full: "destination full", Unauthorized: "not authorized",
  BadRequest: "refused as a bad request", TimedOut: "no answer in time", Busy: "endpoint busy", PayloadTooLarge: "payload too large",
  Probation: "endpoint on probation", Canceled: "canceled", Aborted: "connection closed before an answer", SocketError: "no connection",
  ResolutionError: "host name not resolved", SessionQueueNotSupported: "queue with sessions not supported", Forbidden: "forbidden",
  InvalidAzureFunctionDestination: "invalid Azure Function", GenericError: "the endpoint answered with an error", ProxyError: "the proxy failed",
};

/** Names of the statuses that webhooks answer failures with. */
const STATUSES = {
  301: "Moved Permanently", 302: "Found", 303: "See Other", 307: "Temporary Redirect", 308: "Permanent Redirect", 400: "Bad Request",
  401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 406: "Not Acceptable", 408: "Request Timeout",
  409: "Conflict", 410: "Gone", 411: "Length Required", 412: "Precondition Failed", 413: "Payload Too Large", 415: "Unsupported Media Type",
  421: "Misdirected Request", 422: "Unprocessable Entity", 423: "Locked", 429: "Too Many Requests", 431: "Request Header Fields Too Large",
  500: "Internal Server Error", 501: "Not Implemented", 502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
  507: "Insufficient Storage",
};

/** An outcome in plain words: by the status, if there was an answer and it was a failure. */
export function outcome(name, status = null) {
  if (status && name !== "Success") return ["HTTP", status, STATUSES[status]].filter(Boolean).join(" ");
  return OUTCOMES[name] ?? words(name);
}

export const pretty = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

/** Text that is JSON with its lines broken; any other text as it is. */
export function prettyText(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
