// The dead letters of a queue: reason, time, attempts and group. They can be read, redriven one by
// one or by filter, and deleted.

import { api, listOf } from "../../api/api.js";
import { ask, notice } from "../../parts/dialogs.js";
import { h, replace } from "../../base/dom.js";
import { count, plural } from "../../base/format.js";
import { preview } from "../../parts/payload.js";
import { empty, failed, loading, table, tag, time } from "../../parts/widgets.js";
import { MEANINGS, headerOf, openDeadLetter, originalId, retryDeadLetter } from "./dead_letter.js";

const LIMIT = 50;
const BATCH = 1000; // redriven per call, so that a long redrive shows its progress
const REASONS = ["max_retries", "timeout", "rejected", "expired", "overflow"];
const SPANS = [
  ["", "Any time"],
  ["900", "Last 15 minutes"],
  ["3600", "Last hour"],
  ["86400", "Last day"],
  ["604800", "Last 7 days"],
];

export function deadLettersTab(page, route) {
  const { app, name } = page;
  const place = h("div", null, loading("dead letters"));
  const more = h(
    "button",
    { type: "button", hidden: true, onclick: () => load(deadLetters.at(-1)?.message_id) },
    "Show more",
  );
  const reason = h(
    "select",
    { "aria-label": "Reason", onchange: () => load() },
    h("option", { value: "" }, "Any reason"),
    REASONS.map((one) => h("option", { value: one, title: MEANINGS[one] }, one)),
  );
  const group = h(
    "select",
    { "aria-label": "Group", onchange: () => load() },
    h("option", { value: "" }, "Any group"),
  );
  const since = h(
    "select",
    { "aria-label": "Died", onchange: () => load() },
    SPANS.map(([value, label]) => h("option", { value }, label)),
  );
  const contains = h("input", {
    type: "search",
    placeholder: "Payload contains",
    "aria-label": "Payload contains",
    autocomplete: "off",
    spellcheck: "false",
  });
  const status = h("span", { class: "soft", role: "status" });
  const retryAll = app.button("Retry all that match", "operator", () => retryMatching(), "primary");
  const purgeAll = app.button("Delete all that match", "operator", () => purgeMatching());
  const form = h(
    "form",
    { class: "tools" },
    reason,
    group,
    since,
    contains,
    h("button", { type: "submit" }, "Filter"),
    status,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    load();
  });
  const bulk = h("div", { class: "tools bulk" }, retryAll, purgeAll);
  const errorsPlace = h("div", { class: "errors" });
  const chosenError = h("div", { class: "tools", hidden: true });
  let chosen = null; // { reason, error }: an error whose dead letters are listed
  let deadLetters = [];
  let alive = true;
  let groupsKey = "";
  let depth = null;

  load().then(() => route.open && openOne(route.open));

  /** The values of the form, without empty fields. */
  function filter() {
    const given = {
      reason: reason.value,
      group: group.value,
      contains: contains.value,
      error: chosen?.error,
    };
    if (since.value) given.since = new Date(Date.now() - Number(since.value) * 1000).toISOString();
    return Object.fromEntries(Object.entries(given).filter(([, value]) => value));
  }

  function filterInWords() {
    const words = [];
    if (reason.value) words.push(`reason ${reason.value}`);
    if (group.value) words.push(`group ${group.value}`);
    if (since.value) words.push(SPANS.find(([value]) => value === since.value)[1].toLowerCase());
    if (contains.value) words.push(`payload contains "${contains.value}"`);
    if (chosen) words.push(`error "${chosen.error}"`);
    return words.length ? words.join(", ") : "all of them";
  }

  function choose(error) {
    chosen = error;
    reason.value = error?.reason ?? "";
    replace(
      chosenError,
      h("span", null, "Error: ", h("code", null, error?.error)),
      h("button", { type: "button", onclick: () => choose(null) }, "Show all errors"),
    );
    chosenError.hidden = !error;
    load();
  }

  /** The errors of all dead letters that the rest of the filter selects. */
  async function loadErrors() {
    const { error, ...where } = filter();
    const found = await api.deadLetterErrors(name, where).catch(() => null);
    if (!alive) return;
    errorsPlace.hidden = Boolean(chosen) || !found?.errors.length;
    if (!errorsPlace.hidden) replace(errorsPlace, errorTable(found));
  }

  function errorTable({ errors, examined, complete }) {
    const act = (one, work) => () => {
      const before = [chosen, reason.value];
      [chosen, reason.value] = [one, one.reason];
      return work().finally(() => {
        [chosen, reason.value] = before;
        load();
      });
    };
    const named = (button, text) => {
      button.setAttribute("aria-label", text);
      return button;
    };
    return [
      h("h2", null, "Errors"),
      complete
        ? null
        : h("p", { class: "soft" }, `Counted over the oldest ${count(examined)} dead letters.`),
      table(
        `Errors of ${name}`,
        [
          { label: "Error" },
          { label: "Reason" },
          { label: "Count", number: true },
          { label: "First" },
          { label: "Last" },
          { label: "Groups" },
          { label: "Actions" },
        ],
        errors.map((one) =>
          h(
            "tr",
            null,
            h(
              "th",
              { scope: "row" },
              h(
                "button",
                { type: "button", class: "link", title: one.example, onclick: () => choose(one) },
                one.error,
              ),
            ),
            h("td", null, tag(one.reason, "bad")),
            h("td", { class: "num" }, count(one.count)),
            h("td", null, time(one.first_at)),
            h("td", null, time(one.last_at)),
            h("td", null, one.groups.join(", ") || h("span", { class: "soft" }, "all")),
            h(
              "td",
              null,
              h(
                "span",
                { class: "row-actions" },
                named(
                  app.button("Retry", "operator", act(one, retryMatching)),
                  `Retry all with error ${one.error}`,
                ),
                named(
                  app.button("Delete", "operator", act(one, purgeMatching)),
                  `Delete all with error ${one.error}`,
                ),
              ),
            ),
          ),
        ),
        { kind: "cards-on-phone" },
      ),
    ];
  }

  async function load(after = "") {
    if (!after) loadErrors();
    try {
      const found = listOf(
        await api.deadLetters(name, { ...filter(), after, limit: LIMIT, payload_bytes: 400 }),
        "dead_letters",
      );
      if (!alive) return;
      deadLetters = after ? [...deadLetters, ...found] : found;
      replace(place, deadLetters.length ? tableOf() : nothing());
      more.hidden = found.length < LIMIT;
      bulk.hidden = deadLetters.length === 0;
      replace(status, deadLetters.length ? `${count(deadLetters.length)} shown` : "");
    } catch (fault) {
      if (alive)
        replace(
          place,
          failed(fault, () => load()),
        );
    }
  }

  function tableOf() {
    return table(
      `Dead letters of ${name}`,
      [
        { label: "Message" },
        { label: "Died" },
        { label: "Reason" },
        { label: "Attempts", number: true },
        { label: "Group" },
        { label: "Payload" },
        { label: "Actions" },
      ],
      deadLetters.map((deadLetter) => {
        const id = originalId(deadLetter);
        const why = headerOf(deadLetter, "dead-reason");
        const description = headerOf(deadLetter, "dead-description");
        return h(
          "tr",
          { dataset: { deadLetter: deadLetter.message_id } },
          h(
            "th",
            { scope: "row" },
            h(
              "button",
              { type: "button", class: "link code", onclick: () => openOne(deadLetter.message_id) },
              id,
            ),
          ),
          h("td", null, time(headerOf(deadLetter, "dead-at"))),
          h(
            "td",
            { class: "nowrap" },
            tag(why || "unknown", "bad"),
            description
              ? h("span", { class: "soft reason-text", title: description }, description)
              : null,
          ),
          h("td", { class: "num" }, headerOf(deadLetter, "attempts") || "\u2013"),
          h(
            "td",
            null,
            headerOf(deadLetter, "original-group")
              ? h("code", null, headerOf(deadLetter, "original-group"))
              : h("span", { class: "soft" }, "all"),
          ),
          h("td", { class: "preview-cell" }, preview(deadLetter, 60)),
          h("td", null, retryButton(deadLetter)),
        );
      }),
      { kind: "cards-on-phone" },
    );
  }

  function retryButton(deadLetter) {
    const button = app.button("Retry", "operator", async () => {
      button.disabled = true;
      if (await retryDeadLetter(name, deadLetter)) load();
      else button.disabled = false;
    });
    button.setAttribute("aria-label", `Retry ${originalId(deadLetter)}`);
    return button;
  }

  async function openOne(id) {
    if ((await openDeadLetter(app, name, id)) && alive) await load();
  }

  async function retryMatching() {
    const toAll = h("input", { type: "checkbox", id: "to-all" });
    const done = await ask({
      title: `Retry dead letters of ${name}`,
      text: h(
        "p",
        null,
        "The dead letters of queue ",
        h("strong", null, name),
        ` that match (${filterInWords()}) are put back into their partitions and delivered again.`,
      ),
      button: "Retry them",
      fields: {
        element: h(
          "span",
          { class: "check" },
          toAll,
          h("label", { for: "to-all" }, "For all groups, not only the one that failed"),
        ),
        values: () => toAll.checked,
      },
      act: async (all, say) => {
        let retried = 0;
        let skipped = 0;
        for (;;) {
          const step = await api.retryDeadLetters(name, { ...filter(), limit: BATCH, to_all: all });
          retried += step.retried;
          skipped = step.skipped;
          say(`${plural(retried, "message")} put back, ${count(step.left)} to go`);
          if (step.left === 0 || step.retried === 0) return { retried, skipped };
        }
      },
    });
    if (!done) return;
    notice(
      `${plural(done.retried, "dead letter")} put back into ` +
        `${name}${done.skipped ? `, ${count(done.skipped)} skipped` : ""}.`,
    );
    await load();
  }

  async function purgeMatching() {
    const done = await ask({
      title: `Delete dead letters of ${name}?`,
      text: h(
        "p",
        null,
        "The dead letters of queue ",
        h("strong", null, name),
        ` that match (${filterInWords()}) are deleted permanently.`,
      ),
      button: `Delete dead letters of ${name}`,
      danger: true,
      act: () => api.purgeDeadLetters(name, filter()),
    });
    if (!done) return;
    notice(`${plural(done.purged ?? 0, "dead letter")} of ${name} deleted.`);
    await load();
  }

  function nothing() {
    if (Object.keys(filter()).length)
      return empty("No dead letter matches", h("p", null, "Widen the filter above."));
    return empty(
      "No dead letters",
      h(
        "p",
        null,
        "A message becomes a dead letter when it failed too often, took too long, or a " +
          "consumer rejected it. It has its payload, its properties and its history; from here " +
          "it can be retried.",
      ),
      h(
        "p",
        { class: "soft" },
        "Consumers reject with a publish to ",
        h("code", null, `$queue/${name}/$reject/<message-id>`),
        ".",
      ),
    );
  }

  return {
    element: h(
      "section",
      { "aria-label": "Dead letters" },
      form,
      chosenError,
      errorsPlace,
      bulk,
      place,
      h("div", { class: "pager" }, more),
    ),
    detail({ stats, groups }) {
      const key = groups.map((one) => one.name).join("\n");
      if (key !== groupsKey) {
        groupsKey = key;
        const before = group.value;
        replace(
          group,
          h("option", { value: "" }, "Any group"),
          groups.map((one) =>
            h("option", { value: one.name, selected: one.name === before }, one.name),
          ),
        );
      }
      // New ones are fetched only at the top of the list, and not while one is open.
      const grew = depth !== null && stats.dlq_messages !== depth;
      depth = stats.dlq_messages;
      if (grew && deadLetters.length <= LIMIT && !document.querySelector("dialog[open]")) load();
    },
    refresh: () => load(),
    destroy: () => (alive = false),
  };
}
