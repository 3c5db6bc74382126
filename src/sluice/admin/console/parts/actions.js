// Actions on queues and messages: publish, pause, cancel, purge and so on. Each opens a dialog that
// names what it changes, and shows the server's refusal in that dialog.

import { api } from "../api/api.js";
import { ask, notice } from "./dialogs.js";
import { freshId, h, replace } from "../base/dom.js";
import { count, plural } from "../base/format.js";
import { to } from "../base/router.js";

/** A labelled input: { element, input }. */
export function field(label, input, hint = "") {
  const id = freshId("field");
  input.id = id;
  const note = hint ? h("p", { class: "hint", id: `${id}-hint` }, hint) : null;
  if (note) input.setAttribute("aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { for: id }, label), input, note);
}

const line = (attributes = {}) =>
  h("input", { type: "text", autocomplete: "off", spellcheck: "false", ...attributes });

/** Parse lines of "name: value" into pairs. */
export function readPairs(text) {
  return text
    .split("\n")
    .filter((row) => row.trim())
    .map((row) => {
      const colon = row.indexOf(":");
      return colon < 0
        ? [row.trim(), ""]
        : [row.slice(0, colon).trim(), row.slice(colon + 1).trim()];
    });
}

export async function publishMessage(name) {
  const payload = h("textarea", { rows: 6, spellcheck: "false", autofocus: true, class: "code" });
  const own = {
    message_id: line(),
    key: line(),
    priority: line({ inputmode: "numeric", placeholder: "0" }),
    delay: line({ placeholder: "0s" }),
    content_type: line({ placeholder: "application/json" }),
  };
  const properties = h("textarea", {
    rows: 2,
    spellcheck: "false",
    class: "code",
    placeholder: "trace: 17",
  });
  const element = h(
    "div",
    { class: "fields" },
    field("Payload", payload),
    h(
      "details",
      null,
      h("summary", null, "Key, priority, delay, properties"),
      h(
        "div",
        { class: "field-grid" },
        field(
          "Message id",
          own.message_id,
          "A second message with this id within the dedup window is not stored.",
        ),
        field("Partition key", own.key, "Messages with one key stay in order."),
        field("Priority", own.priority, "0 to 9."),
        field("Delay", own.delay, "Such as 500ms, 10s, 2h."),
        field("Content type", own.content_type),
      ),
      field("User properties", properties, "One per line, name: value."),
    ),
  );
  const values = () => {
    const message = { payload: payload.value };
    for (const [key, input] of Object.entries(own))
      if (input.value.trim())
        message[key] = key === "priority" ? Number(input.value) : input.value.trim();
    const pairs = readPairs(properties.value);
    if (pairs.length) message.properties = pairs;
    return message;
  };
  const done = await ask({
    title: `Publish to ${name}`,
    text: h(
      "p",
      { class: "soft" },
      "It is stored as if a client had published it with QoS 1, and goes to every group.",
    ),
    button: "Publish",
    fields: { element, values },
    act: (message) => api.publish(name, message),
  });
  if (done) {
    const text = done.duplicate
      ? `A message with id ${done.message_id} was published just before: not stored again.`
      : `Published to ${name} as ${done.message_id}.`;
    notice(text, { href: to.message(name, done.message_id), link: "Message details" });
  }
  return done;
}

export async function purgeQueue(name, depth) {
  const done = await ask({
    title: `Purge ${name}?`,
    text: h(
      "p",
      null,
      "Every message in queue ",
      h("strong", null, name),
      " that no consumer is working on is removed for all groups, ",
      depth === undefined ? "" : `about ${plural(depth, "message")} now, `,
      "the delayed and retrying ones included. Deliveries in flight stay and can be settled. ",
      "It cannot be undone. Dead letters stay.",
    ),
    button: `Purge ${name}`,
    danger: true,
    act: () => api.purge(name),
  });
  if (done) notice(`${plural(done.purged, "message")} removed from ${name}.`);
  return done;
}

/** Pause a queue, or one group of it: ask for the reason, which everyone then sees. */
export async function pause(name, group = "") {
  const reason = line({ autofocus: true, maxlength: 1000, placeholder: "the mail server is down" });
  const done = await ask({
    title: group ? `Pause group ${group}?` : `Pause ${name}?`,
    text: h(
      "p",
      null,
      group ? ["Group ", h("strong", null, group), " of queue "] : "Queue ",
      h("strong", null, name),
      " delivers nothing more until it is resumed. Publishes are accepted and stored, and " +
        "deliveries in flight can be settled.",
    ),
    button: group ? "Pause the group" : "Pause the queue",
    danger: true,
    fields: { element: field("Reason, shown to everyone", reason), values: () => reason.value },
    act: (why) => api.pause(name, group, why.trim()),
  });
  if (done) notice(`${group ? `Group ${group} of ${name}` : name} is paused.`);
  return done;
}

export async function resume(name, group = "") {
  const done = await ask({
    title: group ? `Resume group ${group}?` : `Resume ${name}?`,
    text: h(
      "p",
      null,
      group
        ? "Its consumers get messages again, unless the queue itself is paused."
        : "Its consumers get messages again. A group that was paused by itself stays paused.",
    ),
    button: "Resume",
    act: () => api.resume(name, group),
  });
  if (done) notice(`${group ? `Group ${group} of ${name}` : name} is resumed.`);
  return done;
}

/** Cancel a message that no consumer has. */
export async function cancelMessage(name, message) {
  const done = await ask({
    title: `Cancel ${message}?`,
    text: h(
      "p",
      null,
      "The message is removed from queue ",
      h("strong", null, name),
      " for all groups, and never delivered. It cannot be undone.",
    ),
    button: "Cancel it",
    danger: true,
    act: async () => {
      await api.cancelMessage(name, message);
      return true;
    },
  });
  if (done) notice(`${message} is cancelled.`);
  return done;
}

/** Deliver a message that no consumer has at another time. */
export async function rescheduleMessage(name, message) {
  const delay = line({ autofocus: true, placeholder: "10m" });
  const done = await ask({
    title: `Reschedule ${message}`,
    text: h(
      "p",
      null,
      "The message is delivered after this time, from now. A waiting message gives up its place " +
        "in the order; a failed one is retried then.",
    ),
    button: "Reschedule",
    fields: {
      element: field("Deliver in", delay, "Such as 30s, 10m, 2h; 0s: now."),
      values: () => delay.value.trim(),
    },
    act: (text) => api.rescheduleMessage(name, message, { delay: text }),
  });
  if (done) notice(`${message} is rescheduled.`);
  return done;
}

/** Ask the user to type the name of the queue: this deletes more than messages. */
export async function deleteQueue(name) {
  const typed = line({ autofocus: true });
  const done = await ask({
    title: `Delete ${name}?`,
    text: h(
      "p",
      null,
      "Queue ",
      h("strong", null, name),
      " is deleted with its messages, groups and settings. Its dead-letter queue stays. The " +
        "next publish creates a new queue of that name.",
    ),
    button: "Delete the queue",
    danger: true,
    fields: { element: field(`Type ${name} to confirm`, typed), values: () => typed.value },
    act: async (written) => {
      if (written !== name)
        throw Object.assign(new Error("That is not the name of the queue."), { name: "Mistyped" });
      await api.deleteQueue(name);
    },
  });
  if (done) notice(`Queue ${name} is deleted.`);
  return done;
}

export async function seekGroup(name, group) {
  const where = h(
    "select",
    { autofocus: true },
    ["earliest", "latest", "sequence", "time"].map((kind) =>
      h(
        "option",
        { value: kind },
        {
          earliest: "the oldest stored message",
          latest: "the end: skip the backlog",
          sequence: "a sequence, in every partition",
          time: "a time",
        }[kind],
      ),
    ),
  );
  const sequence = line({ inputmode: "numeric", placeholder: "0" });
  const moment = h("input", { type: "datetime-local", step: 1 });
  const more = h("div");
  const show = () =>
    replace(
      more,
      where.value === "sequence"
        ? field("Sequence", sequence)
        : where.value === "time"
          ? field("Time, local", moment, "The first message that was enqueued at or after it.")
          : null,
    );
  where.addEventListener("change", show);
  const values = () => {
    if (where.value === "sequence") return sequence.value.trim();
    if (where.value === "time") return moment.value ? new Date(moment.value).toISOString() : "";
    return where.value;
  };
  const done = await ask({
    title: `Seek group ${group}`,
    text: h(
      "p",
      null,
      "Group ",
      h("strong", null, group),
      " of queue ",
      h("strong", null, name),
      " continues from another position. Backwards, stored messages are delivered again; " +
        "forwards, skipped messages count as purged for this group.",
    ),
    button: "Seek",
    fields: { element: h("div", { class: "fields" }, field("Go to", where), more), values },
    act: (target) => api.seek(name, group, target),
  });
  if (done) notice(`Group ${group} of ${name} was moved; its lag is ${count(done.lag ?? 0)}.`);
  return done;
}

export async function createQueue() {
  const name = line({ autofocus: true, placeholder: "tasks/image", required: true });
  const partitions = line({ inputmode: "numeric", value: "10" });
  const ordering = h(
    "select",
    null,
    ["partition", "none", "strict"].map((value) =>
      h(
        "option",
        { value },
        {
          partition: "by key, in parallel over partitions",
          none: "any order, full parallelism",
          strict: "one order for the whole queue",
        }[value],
      ),
    ),
  );
  const element = h(
    "div",
    { class: "fields" },
    field("Name", name, "One or more levels, such as tasks/image."),
    field("Order", ordering),
    field(
      "Partitions",
      partitions,
      "As many consumers can work at once. Strict order always has one.",
    ),
  );
  const values = () => {
    const config = { name: name.value.trim(), ordering: ordering.value };
    if (ordering.value !== "strict")
      config.partitions = /^\d+$/.test(partitions.value.trim())
        ? Number(partitions.value)
        : partitions.value;
    return config;
  };
  const done = await ask({
    title: "Create a queue",
    button: "Create",
    fields: { element, values },
    act: async (config) => (await api.createQueue(config)) ?? config,
  });
  if (done) location.hash = to.queue(name.value.trim().replace(/^\$queue\//, ""));
  return done;
}
