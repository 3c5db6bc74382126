// Small parts that pages share: times, tags, commands to copy, page headings, empty states.

import { complete } from "../base/commands.js";
import { h, setText } from "../base/dom.js";
import { ago, localTime, sentence, span, timeOf, utcTime } from "../base/format.js";

/** A time: local, with UTC on hover; "never" for none. */
export function time(value, { age = false, milliseconds = false, none = "\u2013" } = {}) {
  const date = timeOf(value);
  if (!date) return h("span", { class: "soft" }, none);
  return h(
    "time",
    { datetime: date.toISOString(), title: utcTime(date) },
    age ? ago(date) : localTime(date, milliseconds),
  );
}

/** How long ago, as text; "" for never. */
export function ageText(value) {
  const date = timeOf(value);
  return date ? span((Date.now() - date.getTime()) / 1000) : "";
}

export function tag(text, tone = "") {
  return h("span", { class: `tag ${tone}` }, text);
}

const TONES = {
  acked: "good",
  delivered: "busy",
  retrying: "warn",
  delayed: "",
  waiting: "",
  dead: "bad",
  expired: "bad",
};

export function stateTag(state) {
  return tag(state, TONES[state] ?? "");
}

/** A command line with a button that copies it. */
export function command(line) {
  const text = complete(line);
  const button = h("button", { type: "button", class: "copy", "aria-label": "Copy" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      setText(button, "Copied");
    } catch {
      setText(button, "Select it");
    }
    setTimeout(() => setText(button, "Copy"), 1500);
  });
  return h("div", { class: "command" }, h("pre", { tabindex: 0 }, h("code", null, text)), button);
}

const COMMAND = /^(sluice|mosquitto_(pub|sub)|curl) /;

/**
 * Advice of the server, by lines: a command to copy, or a sentence with commands in backticks.
 */
export function advice(text) {
  if (!text) return null;
  return text
    .split("\n")
    .filter(Boolean)
    .map((line) => (COMMAND.test(line) ? command(line) : h("p", { class: "advice" }, prose(line))));
}

const MARKED = /(`[^`]+`|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z)/;

/** Server text as a sentence: times become local, and text in backticks becomes code. */
export function prose(text) {
  return sentence(text)
    .split(MARKED)
    .map((part, nth) =>
      nth % 2 === 0
        ? part
        : part.startsWith("`")
          ? h("code", null, complete(part.slice(1, -1)))
          : time(part),
    );
}

/** Facts as a list of terms: [[label, value, title?]]. */
export function facts(entries, kind = "") {
  return h(
    "dl",
    { class: `facts ${kind}` },
    entries.map(([label, value, title]) =>
      h("div", { title }, h("dt", null, label), h("dd", null, value)),
    ),
  );
}

export function empty(title, ...content) {
  return h("div", { class: "empty" }, h("h2", null, title), ...content);
}

/** A placeholder while something loads. */
export function loading(what) {
  return h("p", { class: "soft loading", role: "status" }, `Loading ${what} \u2026`);
}

export function failed(fault, retry) {
  return h(
    "div",
    { class: "empty bad", role: "alert" },
    h("h2", null, prose(fault.message)),
    fault.advice ? h("p", null, prose(fault.advice)) : null,
    retry ? h("button", { type: "button", onclick: retry }, "Try again") : null,
  );
}

/** Label the cells of a row: on a phone each row is a card, with labels in place of columns. */
export function labelCells(row, columns) {
  [...row.children].forEach((cell, nth) => {
    if (cell.localName === "td") cell.dataset.label = columns[nth]?.label ?? "";
  });
  return row;
}

/** A table with a caption, hidden if `quiet`. `columns`: [{ label, number, title }]. */
export function table(caption, columns, rows, { quiet = true, kind = "" } = {}) {
  const head = h(
    "tr",
    null,
    columns.map((column) =>
      h(
        "th",
        { scope: "col", class: column.number ? "num" : null, title: column.title },
        column.label,
      ),
    ),
  );
  const labelled = rows instanceof Node ? null : rows.map((row) => labelCells(row, columns));
  const body = labelled ? h("tbody", null, labelled) : rows;
  return h(
    "div",
    { class: "table-box", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      { class: kind },
      h("caption", { class: quiet ? "hidden" : null }, caption),
      h("thead", null, head),
      body,
    ),
  );
}

/** A heading with its breadcrumbs; the title gets the focus after navigation. */
export function pageHead(title, { trail = [], tags = [], actions = [] } = {}) {
  return h(
    "header",
    { class: "page-head" },
    trail.length
      ? h(
          "nav",
          { class: "trail", "aria-label": "Way up" },
          trail.map(([text, href], nth) => [
            nth ? h("span", { "aria-hidden": "true" }, " / ") : null,
            h("a", { href }, text),
          ]),
        )
      : null,
    h(
      "div",
      { class: "page-title" },
      h("h1", { tabindex: -1 }, title),
      h("span", { class: "tags" }, tags),
      h("div", { class: "actions" }, actions),
    ),
  );
}

/** Call `load` now and at intervals, until the page ends. */
export function reloadEvery(load, every) {
  const page = {
    alive: true,
    timer: 0,
    end() {
      page.alive = false;
      clearTimeout(page.timer);
    },
  };
  const next = async () => {
    await load();
    if (page.alive) page.timer = setTimeout(next, every);
  };
  queueMicrotask(next);
  return page;
}
