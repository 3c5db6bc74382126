// Last-value (exclusive) queues: their owners and how far each has read; and the values of one
// owner.

import { api, listOf } from "../api/api.js";
import { mosquitto, quoted } from "../base/commands.js";
import { ask, notice, openDialog } from "../parts/dialogs.js";
import { h, replace } from "../base/dom.js";
import { bytes, count, plural } from "../base/format.js";
import { messageFacts, propertyTables } from "../parts/message_parts.js";
import { payloadView, preview } from "../parts/payload.js";
import { to } from "../base/router.js";
import {
  command,
  empty,
  facts,
  failed,
  loading,
  pageHead,
  reloadEvery,
  stateTag,
  table,
  tag,
  time,
} from "../parts/widgets.js";

const EVERY = 5000;
const LIMIT = 200;

export function ownersPage() {
  const place = h("div", null, loading("owners"));
  const status = h("span", { class: "soft", role: "status" });
  const prefix = h("input", {
    type: "search",
    placeholder: "Client ID begins with",
    "aria-label": "Client ID begins with",
    spellcheck: "false",
    oninput: () => load(),
  });
  const form = h("form", { class: "tools" }, prefix, status);
  form.addEventListener("submit", (event) => event.preventDefault());
  const page = reloadEvery(load, EVERY);

  async function load() {
    try {
      const found = listOf(await api.owners({ prefix: prefix.value, limit: LIMIT }), "owners");
      if (!page.alive) return;
      replace(place, found.length ? ownerTable(found) : noOwners(prefix.value));
      replace(
        status,
        found.length < LIMIT ? plural(found.length, "owner") : `the first ${count(LIMIT)}`,
      );
    } catch (fault) {
      if (page.alive) replace(place, failed(fault, load));
    }
  }

  return {
    title: "Last-value queues",
    element: h("div", { class: "page" }, pageHead("Last-value queues"), form, place),
    destroy: page.end,
  };
}

function ownerTable(found) {
  return table(
    "Owners of last-value queues",
    [
      { label: "Owner" },
      { label: "" },
      { label: "Waiting", number: true },
      { label: "Keys", number: true },
      { label: "Size", number: true },
      { label: "Last sequence", number: true },
      { label: "Acknowledged", number: true },
      { label: "Last acknowledged" },
    ],
    found.map((owner) =>
      h(
        "tr",
        null,
        h(
          "th",
          { scope: "row" },
          h("a", { href: to.owner(owner.client), class: "code" }, owner.client),
        ),
        h("td", null, whereabouts(owner)),
        h("td", { class: "num" }, count(owner.depth)),
        h("td", { class: "num" }, count(owner.keys)),
        h("td", { class: "num" }, bytes(owner.bytes)),
        h("td", { class: "num" }, count(owner.last_sequence)),
        h("td", { class: "num" }, count(owner.acked_sequence)),
        h("td", null, time(owner.acked_at, { age: true, none: "never" })),
      ),
    ),
  );
}

function whereabouts(owner) {
  if (!owner.connected) return tag("away");
  return owner.subscribed ? tag("subscribed", "good") : tag("not subscribed", "warn");
}

function noOwners(prefix) {
  if (prefix) return empty("No owner matches", h("p", null, "Try another prefix."));
  return empty(
    "No client owns a last-value queue",
    h("p", null, "The first value creates one. Write it with any MQTT client:"),
    command(mosquitto("pub", "$ECQ/w/car-1/speed", "-m", "80")),
  );
}

export function ownerPage(app, { client }) {
  const head = h("div", null, loading(client));
  const more = h("div", null);
  const place = h("div", null);
  const page = reloadEvery(load, EVERY);

  async function load() {
    try {
      const owner = await api.owner(client);
      const values = listOf(
        await api.ownerValues(client, { limit: LIMIT, payload_bytes: 400 }),
        "messages",
      );
      if (!page.alive) return;
      purge.hidden = false;
      replace(head, summary(owner));
      replace(more, rest(owner, values));
      more.hidden = !more.firstChild;
      replace(
        place,
        values.length ? valueTable(client, values) : empty("No values are stored for this owner"),
      );
    } catch (fault) {
      if (!page.alive) return;
      if (fault.status === 404) {
        purge.hidden = true;
        replace(more);
        replace(place);
      }
      replace(head, failed(fault, load));
    }
  }

  const purge = app.button("Purge", "operator", () => purgeOwner(client, load), "danger");
  purge.hidden = true; // until there is something to purge
  return {
    title: client,
    element: h(
      "div",
      { class: "page" },
      pageHead(client, {
        trail: [["Last-value queues", to.owners()]],
        actions: [purge],
      }),
      head,
      more,
      place,
    ),
    destroy: page.end,
  };
}

function summary(owner) {
  return h(
    "section",
    { class: "card", "aria-label": `How far ${owner.client} has come` },
    facts(
      [
        ["Owner", whereabouts(owner)],
        ["Waiting", `${count(owner.depth)} of ${plural(owner.keys, "key")}, ${bytes(owner.bytes)}`],
        ["Last sequence", count(owner.last_sequence)],
        ["Last written", time(owner.written_at, { age: true, none: "never" })],
        ["Acknowledged up to", count(owner.acked_sequence)],
        ["Last acknowledged", time(owner.acked_at, { age: true, none: "never" })],
      ],
      "columns",
    ),
  );
}

/** How many values are shown and how to see the others; nothing when all are shown. */
function rest(owner, values) {
  if (!values.length || values.length >= owner.keys) return null;
  const next = values[values.length - 1].sequence + 1;
  return h(
    "div",
    null,
    h(
      "p",
      null,
      `The oldest ${count(values.length)} of ${plural(owner.keys, "value")}. The others:`,
    ),
    command(`sluice ecq peek ${quoted(owner.client)} --start ${next} --limit 1000`),
  );
}

function valueTable(client, values) {
  return table(
    `Last values of ${client}`,
    [
      { label: "Key" },
      { label: "Sequence", number: true },
      { label: "Written" },
      { label: "State" },
      { label: "Size", number: true },
      { label: "Value" },
    ],
    values.map((value) =>
      h(
        "tr",
        null,
        h(
          "th",
          { scope: "row" },
          h(
            "button",
            { type: "button", class: "link code", onclick: () => openValue(client, value) },
            value.key,
          ),
        ),
        h("td", { class: "num" }, count(value.sequence)),
        h("td", null, time(value.enqueued_at)),
        h("td", null, value.size === 0 ? tag("tombstone") : stateTag(value.state)),
        h("td", { class: "num" }, bytes(value.size)),
        h("td", { class: "preview-cell" }, preview(value)),
      ),
    ),
  );
}

async function openValue(client, listed) {
  const [whole] = await api
    .ownerValues(client, { start: listed.sequence, limit: 1, payload_bytes: 1048576 })
    .catch(() => []);
  const value = whole?.sequence === listed.sequence ? whole : listed;
  await openDialog({
    title: value.key,
    kind: "drawer",
    body: () =>
      h(
        "div",
        { class: "dialog-body" },
        h("p", null, stateTag(value.state)),
        payloadView(value),
        messageFacts(value),
        propertyTables(value),
      ),
  });
}

async function purgeOwner(client, load) {
  const done = await ask({
    title: `Purge ${client}?`,
    text: h(
      "p",
      null,
      "Every value that is stored for ",
      h("strong", null, client),
      " is removed, acknowledged or not. It cannot be undone. Its sequence continues.",
    ),
    button: `Purge ${client}`,
    danger: true,
    act: () => api.purgeOwner(client),
  });
  if (done) {
    notice(`${plural(done.purged, "value")} of ${client} removed.`);
    await load();
  }
}
