// Parts that show one message: its facts, properties, and its history as a timeline.

import { h } from "../base/dom.js";
import { bytes, count, span, timeOf } from "../base/format.js";
import { facts, table, time } from "./widgets.js";

const text = (value) =>
  value === "" || value === null || value === undefined
    ? h("span", { class: "soft" }, "\u2013")
    : h("code", null, value);

export function messageFacts(message) {
  const entries = [
    ["Message id", text(message.message_id)],
    ["Enqueued", time(message.enqueued_at, { milliseconds: true })],
    ["Partition", count(message.partition)],
    ["Sequence", count(message.sequence)],
    ["Key", text(message.key)],
    ["Priority", count(message.priority)],
    ["Size", bytes(message.size)],
  ];
  if (message.content_type) entries.push(["Content type", text(message.content_type)]);
  if (timeOf(message.expires_at)) entries.push(["Expires", time(message.expires_at)]);
  if (timeOf(message.deliver_at)) entries.push(["Not before", time(message.deliver_at)]);
  if (message.topic) entries.push(["Captured from", text(message.topic)]);
  if (message.response_topic) entries.push(["Response topic", text(message.response_topic)]);
  if (message.consumer) entries.push(["Consumer", text(message.consumer)]);
  return facts(entries, "columns");
}

/** Tables of the publisher's properties and of the headers that Sluice wrote. */
export function propertyTables(message) {
  const own = Array.isArray(message.properties)
    ? message.properties
    : Object.entries(message.properties ?? {});
  const written = Object.entries(message.headers ?? {});
  const rows = (entries) =>
    entries.map(([name, value]) =>
      h(
        "tr",
        null,
        h("th", { scope: "row" }, h("code", null, name)),
        h("td", null, h("code", { class: "wrap" }, value)),
      ),
    );
  const columns = [{ label: "Property" }, { label: "Value" }];
  return h(
    "div",
    { class: "property-tables" },
    h("h3", null, "Properties"),
    own.length
      ? table("Properties of the publisher", columns, rows(own), { kind: "pairs" })
      : h("p", { class: "soft" }, "The publisher set none."),
    written.length
      ? h(
          "details",
          null,
          h("summary", null, `Headers written by Sluice (${written.length})`),
          table("Headers written by Sluice", columns, rows(written), { kind: "pairs" }),
        )
      : null,
  );
}

const KINDS = {
  enqueued: "start",
  delivered: "busy",
  extended: "busy",
  acked: "good",
  redriven: "start",
  nacked: "warn",
  "timed-out": "warn",
  vanished: "warn",
  released: "",
  dead: "bad",
  expired: "bad",
};

const WORDS = {
  enqueued: "Enqueued",
  delivered: "Delivered",
  extended: "Deadline extended",
  acked: "Acknowledged",
  nacked: "Failed (nack)",
  "timed-out": "Deadline passed",
  vanished: "Consumer vanished",
  released: "Released",
  dead: "Dead letter",
  redriven: "Redriven",
  expired: "Expired",
};

/** Events, oldest first, each with the time since the previous one. */
export function timeline(events) {
  let before = null;
  return h(
    "ol",
    { class: "timeline" },
    events.map((event) => {
      const at = timeOf(event.at);
      const passed = at && before ? (at.getTime() - before.getTime()) / 1000 : null;
      if (at) before = at;
      const who = [
        event.attempt ? `attempt ${count(event.attempt)}` : "",
        event.consumer,
        event.group ? `group ${event.group}` : "",
      ].filter(Boolean);
      return h(
        "li",
        { class: KINDS[event.what] ?? "" },
        h(
          "div",
          { class: "timeline-when" },
          time(event.at, { milliseconds: true }),
          passed === null ? null : h("span", { class: "soft" }, ` +${span(passed)}`),
        ),
        h(
          "div",
          { class: "timeline-what" },
          h("strong", null, WORDS[event.what] ?? event.what),
          who.length ? h("span", { class: "soft" }, ` ${who.join(" \u00b7 ")}`) : null,
          event.detail ? h("p", null, event.detail) : null,
        ),
      );
    }),
  );
}

/** The history in the headers of a dead letter, for when the broker remembers no events. */
export function eventsFromHeaders(deadLetter) {
  const headers = deadLetter.headers ?? {};
  const group = headers["original-group"] ?? "";
  const attempts = Number(headers.attempts ?? 0);
  const events = [];
  if (headers["original-enqueued-at"])
    events.push({ at: headers["original-enqueued-at"], what: "enqueued" });
  if (headers["first-attempt-at"])
    events.push({ at: headers["first-attempt-at"], what: "delivered", group, attempt: 1 });
  if (attempts > 1 && headers["last-attempt-at"])
    events.push({ at: headers["last-attempt-at"], what: "delivered", group, attempt: attempts });
  if (headers["dead-at"])
    events.push({
      at: headers["dead-at"],
      what: "dead",
      group,
      detail: [headers["dead-reason"], headers["dead-description"]].filter(Boolean).join(": "),
    });
  return events;
}
