// The settings of a queue, to read and to change. Only changes are sent; errors are shown at their
// fields.

import { api } from "../../api/api.js";
import { SECTIONS, faultsOf, read, setAt, shown, valueAt } from "../../parts/config_fields.js";
import { notice, troubleOf } from "../../parts/dialogs.js";
import { freshId, h, replace } from "../../base/dom.js";
import { plural } from "../../base/format.js";
import { failed, loading } from "../../parts/widgets.js";

export function configTab(page) {
  const { app, name } = page;
  const place = h("div", null, loading("the configuration"));
  let alive = true;

  async function load() {
    try {
      const config = await api.config(name);
      if (alive) replace(place, formOf(config));
    } catch (fault) {
      if (alive) replace(place, failed(fault, load));
    }
  }

  function formOf(config) {
    const allowed = app.may("admin");
    const fields = new Map();
    const sections = SECTIONS.map((section) =>
      h(
        "fieldset",
        { class: section.title === "Schema" ? "card whole" : "card", disabled: !allowed },
        h("legend", null, section.title),
        section.fields.map((spec) => row(spec, config, fields, touched)),
      ),
    );
    const trouble = h("div", { class: "trouble", role: "alert" });
    const save = h("button", { type: "submit", class: "primary", disabled: true }, "Save");
    const undo = h(
      "button",
      { type: "button", disabled: true, onclick: () => replace(place, formOf(config)) },
      "Undo",
    );
    const state = h(
      "span",
      { class: "soft", role: "status" },
      allowed ? "" : "Needs the role admin",
    );
    const form = h(
      "form",
      { class: "config" },
      h("div", { class: "config-grid" }, sections),
      h("div", { class: "tools sticky" }, trouble, save, undo, state),
    );

    function changed() {
      return [...fields].filter(([, { input, kind, before }]) => textOf(input, kind) !== before);
    }

    function touched() {
      const amount = changed().length;
      save.disabled = undo.disabled = amount === 0;
      replace(state, amount ? plural(amount, "change") : "");
      for (const [, { element, input, kind, before }] of fields)
        element.classList.toggle("is-changed", textOf(input, kind) !== before);
    }

    function refuse(fault) {
      const { byField, rest } = faultsOf(fault.message, [...fields.keys()]);
      for (const [path, words] of byField) fields.get(path).say(words);
      replace(
        trouble,
        rest.length
          ? troubleOf(Object.assign(fault, { message: rest.join("; ") }))
          : h("p", null, `Not saved: see ${plural(byField.size, "field")}.`),
      );
      const first = [...fields.keys()].find((path) => byField.has(path));
      if (first) fields.get(first).input.focus();
    }

    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const changes = {};
      for (const [path, { input, kind }] of changed())
        setAt(
          changes,
          path,
          kind === "bool" ? input.checked : read(Array.isArray(kind) ? "text" : kind, input.value),
        );
      for (const [, { say }] of fields) say("");
      replace(trouble);
      save.disabled = true;
      try {
        const after = await api.configure(name, changes);
        notice(`The configuration of ${name} is changed; it applies now.`);
        if (alive) replace(place, formOf(after?.config ?? after));
      } catch (fault) {
        save.disabled = false;
        if (fault.status === 400 || fault.status === 409 || fault.status === 422) refuse(fault);
        else replace(trouble, troubleOf(fault));
      }
    });
    return form;
  }

  load();
  return {
    element: h("section", { "aria-label": "Configuration" }, place),
    destroy: () => (alive = false),
  };
}

function textOf(input, kind) {
  return kind === "bool" ? String(input.checked) : input.value;
}

/** @param {import("../../parts/config_fields.js").Field} field */
function row([path, label, kind, meaning], config, fields, touched) {
  const id = freshId("config");
  const value = valueAt(config, path);
  const input = inputFor(kind, value);
  input.id = id;
  input.name = path;
  input.addEventListener("input", () => {
    say("");
    touched();
  });
  const hint = h("p", { class: "hint", id: `${id}-hint` }, meaning);
  const fault = h("p", { class: "fault", id: `${id}-fault`, hidden: true });
  input.setAttribute("aria-describedby", `${hint.id} ${fault.id}`);
  const say = (words) => {
    replace(fault, words);
    fault.hidden = !words;
    if (words) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  };
  const element = h(
    "div",
    { class: kind === "bool" ? "field check-field" : "field" },
    h("label", { for: id }, label),
    input,
    fault,
    meaning ? hint : null,
  );
  fields.set(path, { input, kind, before: textOf(input, kind), say, element });
  return element;
}

function inputFor(kind, value) {
  if (Array.isArray(kind))
    return h(
      "select",
      null,
      kind.map((one) => h("option", { value: one, selected: one === value }, one)),
    );
  if (kind === "bool") {
    const box = h("input", { type: "checkbox" });
    box.checked = Boolean(value);
    return box;
  }
  const text = shown(kind, value);
  if (kind === "json" || kind === "bindings") {
    const area = h("textarea", {
      class: "code",
      rows:
        kind === "json"
          ? Math.min(14, Math.max(3, text.split("\n").length))
          : Math.max(2, text.split("\n").length),
      spellcheck: "false",
    });
    area.value = text;
    return area;
  }
  return h("input", {
    type: "text",
    class: kind === "optional" ? "long" : null,
    value: text,
    inputmode: kind === "int" ? "numeric" : kind === "number" ? "decimal" : null,
    autocomplete: "off",
    spellcheck: "false",
  });
}
