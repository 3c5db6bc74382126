// Connected clients and persistent sessions; and one client with its subscriptions.

import { api, listOf } from "../api/api.js";
import { ask, notice } from "../parts/dialogs.js";
import { h, replace } from "../base/dom.js";
import { bytes, count, span } from "../base/format.js";
import { to } from "../base/router.js";
import {
  empty,
  facts,
  failed,
  loading,
  pageHead,
  reloadEvery,
  table,
  tag,
  time,
} from "../parts/widgets.js";

const EVERY = 5000;
const LIMIT = 100;
const FOREVER = 0xffffffff;

export function clientsPage(app) {
  const place = h("div", null, loading("clients"));
  const status = h("span", { class: "soft", role: "status" });
  const prefix = h("input", {
    type: "search",
    placeholder: "Client ID begins with",
    "aria-label": "Client ID begins with",
    autocomplete: "off",
    spellcheck: "false",
    oninput: () => first(),
  });
  const state = h(
    "select",
    { "aria-label": "State", onchange: () => first() },
    h("option", { value: "" }, "Connected or not"),
    h("option", { value: "connected" }, "Connected"),
    h("option", { value: "disconnected" }, "Session only"),
  );
  const form = h("form", { class: "tools" }, prefix, state, status);
  form.addEventListener("submit", (event) => event.preventDefault());
  const more = h("button", { type: "button", onclick: () => next() }, "Next page");
  const back = h("button", { type: "button", onclick: () => first() }, "First page");
  const pager = h("nav", { class: "pager", "aria-label": "Pages of clients", hidden: true });
  replace(pager, back, more);
  let after = "";
  let last = "";
  const page = reloadEvery(load, EVERY);

  function first() {
    after = "";
    load();
  }

  function next() {
    after = last;
    load();
  }

  async function load() {
    const where = { prefix: prefix.value, state: state.value, after, limit: LIMIT };
    try {
      const found = listOf(await api.clients(where), "clients");
      if (!page.alive || prefix.value !== where.prefix || after !== where.after) return;
      last = found.at(-1)?.client ?? "";
      if (place.contains(document.activeElement) && place.querySelector("table")) return;
      replace(place, found.length ? clientTable(found) : none(where));
      const shown = found.length < LIMIT && !after ? count(found.length) : `${count(LIMIT)} a page`;
      const text = `${shown} shown`;
      if (status.textContent !== text) replace(status, text);
      pager.hidden = found.length < LIMIT && !after;
      more.disabled = found.length < LIMIT;
      back.disabled = !after;
    } catch (fault) {
      if (page.alive) replace(place, failed(fault, load));
    }
  }

  return {
    title: "Clients",
    element: h("div", { class: "page" }, pageHead("Clients"), form, place, pager),
    destroy: page.end,
  };
}

function clientTable(found) {
  return table(
    "Clients",
    [
      { label: "Client" },
      { label: "State" },
      { label: "User" },
      { label: "Protocol" },
      { label: "Address" },
      { label: "Subscriptions", number: true },
      { label: "In flight", number: true },
      { label: "Queued", number: true },
      { label: "Dropped", number: true },
    ],
    found.map((client) =>
      h(
        "tr",
        null,
        h(
          "th",
          { scope: "row" },
          h("a", { href: to.client(client.client), class: "code" }, client.client),
        ),
        h("td", null, stateOf(client)),
        h("td", null, client.user || "\u2013"),
        h("td", null, client.protocol),
        h("td", null, client.address ? h("code", { class: "address" }, client.address) : "\u2013"),
        h("td", { class: "num" }, count(client.subscriptions)),
        h("td", { class: "num" }, count(client.inflight)),
        h("td", { class: "num" }, count(client.queued)),
        h("td", { class: client.dropped ? "num is-warn" : "num" }, count(client.dropped)),
      ),
    ),
    { kind: "cards-on-phone" },
  );
}

function stateOf(client) {
  return client.connected
    ? [tag("connected", "good"), " ", time(client.connected_at, { age: true })]
    : [tag("session only"), " ", time(client.disconnected_at, { age: true })];
}

function none({ prefix, state }) {
  if (prefix || state) return empty("No client matches", h("p", null, "Widen the choice above."));
  return empty(
    "No clients",
    h("p", null, "No client is connected, and no session waits for its client."),
  );
}

export function clientPage(app, { client }) {
  const place = h("div", { class: "stack" }, loading(client));
  const page = reloadEvery(load, EVERY);
  let shown = "";

  async function load() {
    try {
      const detail = await api.client(client);
      if (!page.alive) return;
      kick.hidden = false;
      const key = JSON.stringify(detail);
      if (key === shown || place.contains(document.activeElement)) return;
      shown = key;
      replace(place, detailOf(detail));
    } catch (fault) {
      if (!page.alive) return;
      shown = "";
      kick.hidden = fault.status === 404;
      replace(place, failed(fault, fault.status === 404 ? null : load));
    }
  }

  const kick = app.button("Disconnect", "operator", () => kickClient(client, load), "danger");
  kick.hidden = true; // until there is a client
  return {
    title: client,
    element: h(
      "div",
      { class: "page" },
      pageHead(client, { trail: [["Clients", to.clients()]], actions: [kick] }),
      place,
    ),
    destroy: page.end,
  };
}

function detailOf({ client, subscriptions, consumers }) {
  return [
    h(
      "section",
      { class: "card", "aria-label": "Connection and session" },
      facts(
        [
          ["State", stateOf(client)],
          ["User", client.user || "\u2013"],
          ["Protocol", client.protocol],
          ["Address", client.address ? h("code", null, client.address) : "\u2013"],
          ["Session", sessionText(client.session_expiry)],
          ["In flight", count(client.inflight), "Sent and not acknowledged"],
          ["Queued", `${count(client.queued)}, ${bytes(client.queued_bytes)}`],
          ["Dropped", count(client.dropped), "Too slow, or a limit was full"],
        ],
        "columns",
      ),
    ),
    h("h2", null, `Subscriptions (${count(client.subscriptions)})`),
    subscriptions.length
      ? table(
          "Subscriptions",
          [{ label: "Topic filter" }, { label: "QoS", number: true }],
          subscriptions.map((one) =>
            h(
              "tr",
              null,
              h("th", { scope: "row" }, h("code", { class: "wrap" }, one.filter)),
              h("td", { class: "num" }, one.qos),
            ),
          ),
        )
      : h("p", { class: "soft" }, "It has no subscription."),
    consumers.length
      ? [
          h("h2", null, "Consumes"),
          table(
            "Queues that it consumes",
            [
              { label: "Queue" },
              { label: "Group" },
              { label: "In flight", number: true },
              { label: "Prefetch", number: true },
            ],
            consumers.map((one) =>
              h(
                "tr",
                null,
                h("th", { scope: "row" }, h("a", { href: to.queue(one.queue) }, one.queue)),
                h("td", null, h("code", null, one.group)),
                h("td", { class: "num" }, count(one.inflight)),
                h("td", { class: "num" }, count(one.prefetch)),
              ),
            ),
          ),
        ]
      : null,
  ];
}

function sessionText(seconds) {
  if (seconds === 0) return "ends with the connection";
  if (seconds === FOREVER) return "does not expire";
  return `outlives the connection by ${span(seconds)}`;
}

async function kickClient(client, load) {
  const end = h("input", { type: "checkbox", id: "end-session" });
  const done = await ask({
    title: `Disconnect ${client}?`,
    text: h(
      "p",
      null,
      "The broker closes the connection of client ",
      h("strong", null, client),
      ". Its session survives as usual, and it may connect again: to keep it out, change its " +
        "user or the access rules.",
    ),
    button: "Disconnect",
    danger: true,
    fields: {
      element: h(
        "span",
        { class: "check" },
        end,
        h(
          "label",
          { for: "end-session" },
          "Delete its session too, with subscriptions and pending messages",
        ),
      ),
      values: () => end.checked,
    },
    act: (endSession) => api.kickClient(client, endSession),
  });
  if (!done) return;
  const what = [
    done.disconnected ? "is disconnected" : "",
    done.session_ended ? "has no session any more" : "",
  ].filter(Boolean);
  notice(`Client ${client} ${what.join(" and ")}.`);
  await load();
}
