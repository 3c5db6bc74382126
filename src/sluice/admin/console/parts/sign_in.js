// The sign-in dialog: a user name and a password, or a token. No other code asks for credentials.

import { basicAuthorization, bearerAuthorization } from "../api/api.js";
import { openDialog } from "./dialogs.js";
import { freshId, h, replace } from "../base/dom.js";
import { sentence } from "../base/format.js";

const ROLES = "with the role viewer, operator or admin";
const WAYS = {
  password: {
    label: "User name and password",
    hint: `A user of this broker ${ROLES}.`,
    fields: [
      ["User name", "text", "username"],
      ["Password", "password", "current-password"],
    ],
    authorization: (name, password) => basicAuthorization(name.trim(), password),
  },
  token: {
    label: "Token",
    hint: `An access token or JWT ${ROLES}.`,
    fields: [["Token", "password", "off"]],
    authorization: (text) => bearerAuthorization(text.trim()),
  },
};

let lastWay = "password"; // a refused attempt is repeated the same way

/** Resolve to the value of an Authorization header, or null when the dialog is dismissed. */
export function askForCredentials(refusal) {
  const place = h("div", { class: "fields" });
  let inputs = [];
  const switches = Object.entries(WAYS).map(([way, { label }]) =>
    h("button", { type: "button", "aria-pressed": "false", onclick: () => show(way) }, label),
  );

  function show(way) {
    lastWay = way;
    const { fields, hint } = WAYS[way];
    inputs = fields.map(([label, type, autocomplete], nth) =>
      h("input", {
        id: freshId("credential"),
        type,
        autocomplete,
        autofocus: nth === 0,
        required: true,
        spellcheck: "false",
        autocapitalize: "none",
      }),
    );
    replace(
      place,
      fields.map(([label], nth) =>
        h("div", { class: "field" }, h("label", { for: inputs[nth].id }, label), inputs[nth]),
      ),
      h("p", { class: "hint" }, hint, " Stored in this tab only, until you close it."),
    );
    Object.keys(WAYS).forEach((one, nth) =>
      switches[nth].setAttribute("aria-pressed", String(one === way)),
    );
    if (place.isConnected) inputs[0].focus();
  }

  show(lastWay);
  return openDialog({
    title: "Sign in",
    stays: true,
    body(close) {
      const form = h(
        "form",
        { class: "dialog-body" },
        h("p", { role: "alert" }, sentence(refusal?.message) || "Authentication required."),
        h("div", { class: "segments", role: "group", "aria-label": "Sign in with" }, switches),
        place,
        h(
          "div",
          { class: "dialog-foot" },
          h("button", { type: "submit", class: "primary" }, "Sign in"),
        ),
      );
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        close(WAYS[lastWay].authorization(...inputs.map((input) => input.value)));
      });
      return form;
    },
  });
}
