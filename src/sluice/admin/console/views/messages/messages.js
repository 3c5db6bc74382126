// The messages of a queue, oldest first; showing them takes nothing. One message opens in a drawer.

import { api, listOf } from "../../api/api.js";
import { mosquitto } from "../../base/commands.js";
import { openDialog } from "../../parts/dialogs.js";
import { h, replace } from "../../base/dom.js";
import { bytes, count } from "../../base/format.js";
import { messageFacts, propertyTables } from "../../parts/message_parts.js";
import { payloadView, preview } from "../../parts/payload.js";
import { to } from "../../base/router.js";
import { command, empty, failed, loading, stateTag, table, time } from "../../parts/widgets.js";

const LIMIT = 50;

export function messagesTab(page) {
  const { name } = page;
  const place = h("div", null, loading("messages"));
  const group = h(
    "select",
    { "aria-label": "Group", onchange: () => load() },
    h("option", { value: "" }, "All groups"),
  );
  const partition = h("input", {
    type: "text",
    inputmode: "numeric",
    placeholder: "all",
    "aria-label": "Partition",
    class: "short",
    onchange: () => load(),
  });
  const start = h("input", {
    type: "text",
    inputmode: "numeric",
    placeholder: "oldest",
    "aria-label": "From sequence",
    class: "short",
    onchange: () => load(),
  });
  const refresh = h("button", { type: "button", onclick: () => load() }, "Refresh");
  const status = h("span", { class: "soft", role: "status" });
  const form = h(
    "form",
    { class: "tools" },
    group,
    h("label", { class: "inline" }, "Partition ", partition),
    h("label", { class: "inline" }, "From sequence ", start),
    refresh,
    status,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    load();
  });
  let alive = true;
  let groupsKey = "";
  load();

  async function load() {
    try {
      const where = {
        limit: LIMIT,
        payload_bytes: 400,
        group: group.value,
        partition: partition.value.trim(),
        start: start.value.trim(),
      };
      const found = listOf(await api.messages(name, where), "messages");
      if (!alive) return;
      replace(place, found.length ? tableOf(found) : nothing(name, where));
      replace(
        status,
        found.length < LIMIT ? `${count(found.length)} shown` : `the first ${count(LIMIT)}`,
      );
    } catch (fault) {
      if (alive) replace(place, failed(fault, load));
    }
  }

  function tableOf(found) {
    return table(
      `Messages of ${name}`,
      [
        { label: "Message" },
        { label: "Enqueued" },
        { label: "State" },
        { label: "Partition", number: true },
        { label: "Sequence", number: true },
        { label: "Key" },
        { label: "Size", number: true },
        { label: "Payload" },
      ],
      found.map((message) =>
        h(
          "tr",
          null,
          h(
            "th",
            { scope: "row" },
            h(
              "button",
              { type: "button", class: "link code", onclick: () => openMessage(name, message) },
              message.message_id,
            ),
          ),
          h("td", null, time(message.enqueued_at)),
          h(
            "td",
            { class: "nowrap" },
            stateTag(message.state),
            message.attempt > 0
              ? h("span", { class: "soft" }, ` attempt ${count(message.attempt)}`)
              : null,
          ),
          h("td", { class: "num" }, count(message.partition)),
          h("td", { class: "num" }, count(message.sequence)),
          h(
            "td",
            null,
            message.key ? h("code", null, message.key) : h("span", { class: "soft" }, "\u2013"),
          ),
          h("td", { class: "num" }, bytes(message.size)),
          h("td", { class: "preview-cell" }, preview(message)),
        ),
      ),
    );
  }

  return {
    element: h("section", { "aria-label": "Messages" }, form, place),
    detail({ groups }) {
      const key = groups.map((one) => one.name).join("\n");
      if (key === groupsKey) return;
      groupsKey = key;
      const chosen = group.value;
      replace(
        group,
        h("option", { value: "" }, "All groups"),
        groups.map((one) =>
          h("option", { value: one.name, selected: one.name === chosen }, `Group ${one.name}`),
        ),
      );
    },
    refresh: load,
    destroy: () => (alive = false),
  };
}

/** The list has the beginning of each payload; opening a message fetches the whole. */
async function openMessage(name, listed) {
  const whole = await api.trace(name, listed.message_id).catch(() => null);
  const message = whole?.message ? { ...whole.message, state: listed.state } : listed;
  await openDialog({
    title: message.message_id,
    kind: "drawer",
    body: (close) =>
      h(
        "div",
        { class: "dialog-body" },
        h(
          "p",
          null,
          stateTag(message.state),
          " ",
          h(
            "a",
            { href: to.message(name, message.message_id), onclick: () => close() },
            "Message details",
          ),
        ),
        payloadView(message),
        messageFacts(message),
        propertyTables(message),
      ),
  });
}

function nothing(name, where) {
  if (where.group || where.partition || where.start)
    return empty("No message matches", h("p", null, "Widen the choice above."));
  return empty(
    "The queue is empty",
    h(
      "p",
      null,
      "Everything in it has been settled, or nothing was published yet. Publish with any " +
        "MQTT client, or with the button above:",
    ),
    command(mosquitto("pub", `$queue/${name}`, "-m", "hello")),
  );
}
