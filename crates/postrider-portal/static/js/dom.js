// The only way in which the portal makes elements. Everything that comes from the server is hostile: it becomes
// text or the value of an attribute that cannot do anything, never markup, never a style, never a script.

const SVG = "http://www.w3.org/2000/svg";

/** Pages of this server that are not the portal's own. */
const PLAIN_LINKS = new Set(["/docs", "/metrics", "/healthz", "/postrider/v1/openapi.json"]);

const ATTRIBUTES = new Set([
  "id", "class", "for", "type", "name", "value", "placeholder", "title", "role", "tabindex", "scope", "colspan", "rowspan",
  "rows", "cols", "min", "max", "step", "minlength", "maxlength", "pattern", "autocomplete", "autocapitalize", "spellcheck",
  "inputmode", "list", "multiple", "required", "disabled", "readonly", "checked", "selected", "open", "hidden", "lang", "dir",
  "datetime", "label", "method", "novalidate", "enterkeyhint", "translate",
]);

const SVG_ATTRIBUTES = new Set([
  "viewBox", "width", "height", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "rx", "ry", "d", "points", "transform",
  "text-anchor", "dominant-baseline", "preserveAspectRatio", "focusable", "class", "role", "id", "stroke-dasharray",
  "vector-effect", "fill", "stroke", "stroke-width", "stroke-linecap", "stroke-linejoin",
]);

const isAllowed = (name, known) => known.has(name) || name.startsWith("aria-") || name.startsWith("data-");

/** Whether following the link can only lead to a page of this portal, or to one of the few named above. */
export const isSafeLink = (href) => href.startsWith("#/") || PLAIN_LINKS.has(href);

/**
 * Makes an element. `props.on` has listeners, `props.href` a link; what is null, undefined or false is left out.
 * Children are nodes, texts, numbers, or lists of them.
 */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") listen(element, value);
    else if (name === "href") link(element, String(value));
    else if (isAllowed(name, ATTRIBUTES)) element.setAttribute(name, value === true ? "" : String(value));
    else throw new Error(`attribute ${name} is not one that the portal sets`);
  }
  append(element, children);
  return element;
}

/** The same for drawings. */
export function svg(tag, props, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") listen(element, value);
    else if (isAllowed(name, SVG_ATTRIBUTES)) element.setAttribute(name, String(value));
    else throw new Error(`attribute ${name} is not one that the portal draws with`);
  }
  append(element, children);
  return element;
}

function listen(element, listeners) {
  for (const [event, listener] of Object.entries(listeners)) {
    if (listener) element.addEventListener(event, listener);
  }
}

function link(element, href) {
  if (element.tagName !== "A" || !isSafeLink(href)) throw new Error("only pages of the portal are linked to");
  element.setAttribute("href", href);
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === true) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replaces what an element has. Who had the focus there has it again, if the same thing is there again. */
export function fill(element, ...children) {
  const active = document.activeElement;
  const key = active && active !== element && element.contains(active) ? focusKey(active) : null;
  element.replaceChildren();
  append(element, children);
  if (!key) return element;
  for (const candidate of element.querySelectorAll("a, button, input, select, textarea, summary, [tabindex]")) {
    if (focusKey(candidate) === key) {
      candidate.focus({ preventScroll: true });
      break;
    }
  }
  return element;
}

const focusKey = (element) =>
  element.id || element.dataset.key || element.getAttribute("href") || `${element.tagName}:${element.textContent}`;

let made = 0;
/** An id that no other element of the document has. */
export const freshId = (word) => `${word}-${++made}`;
