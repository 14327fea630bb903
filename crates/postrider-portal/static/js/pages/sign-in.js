// Sign-in with a client's secret, and back to where one was.

import { fill, h } from "../dom.js";
import { mark, mono, notice } from "../ui.js";
import { signIn } from "../api.js";

/** Where the secret is that the server has generated: its file is named only to browsers on the server's own machine. */
function whereabouts() {
  const { credentials } = document.documentElement.dataset;
  if (credentials) return ["The first start of the server wrote one to ", mono(credentials), "."];
  return ["The first start of the server wrote one to ", mono("credentials.toml"), " in its data directory, unless its configuration names clients."];
}

export default function page(ctx) {
  ctx.title = "Sign in";
  const trouble = h("div", { id: "sign-in-trouble" });
  const secret = h("input", { id: "secret", type: "password", name: "secret", autocomplete: "current-password", required: true, "aria-describedby": "secret-help sign-in-trouble" });
  const go = h("button", { type: "submit", class: "button primary" }, "Sign in");
  ctx.keepFocus = secret;
  const submit = async (event) => {
    event.preventDefault();
    fill(trouble);
    if (!secret.value.trim()) return refuse("Give the client's secret.");
    go.disabled = true;
    try {
      await signIn(secret.value.trim());
      secret.value = "";
      const next = ctx.query.get("next");
      location.hash = next?.startsWith("#/") && !next.startsWith("#/sign-in") ? next : "#/";
    } catch (error) {
      refuse(error.status === 401 ? "That is not the secret of a client of this server." : error.message);
    } finally {
      go.disabled = false;
    }
  };
  const refuse = (text) => {
    fill(trouble, notice("bad", text));
    secret.setAttribute("aria-invalid", "true");
    secret.focus();
    secret.select();
  };
  return h(
    "main",
    { id: "main", class: "sign-in", tabindex: "-1" },
    h("div", { class: "sign-in-card" },
      h("div", { class: "brand big" }, mark(), h("span", {}, "Postrider")),
      h("h1", { id: "page-heading", tabindex: "-1" }, "Sign in"),
      ctx.query.get("next") && h("p", { class: "note" }, "Sign in to go on where you were."),
      h("form", { on: { submit }, novalidate: true },
        // Password managers keep a secret by the name that stands before it.
        h("input", { type: "text", name: "username", value: "postrider", autocomplete: "username", hidden: true, readonly: true, tabindex: "-1", "aria-hidden": "true" }),
        h("div", { class: "field" },
          h("label", { for: "secret" }, "Client secret"),
          secret,
          h("p", { class: "help", id: "secret-help" }, ...whereabouts()),
        ),
        trouble,
        h("div", { class: "form-actions" }, go),
      ),
    ),
  );
}
