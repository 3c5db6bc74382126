// The trace of one message: its state in each group and why, its events, and the message itself.

import { cancelMessage, rescheduleMessage } from "../../parts/actions.js";
import { api } from "../../api/api.js";
import { attempt, notice } from "../../parts/dialogs.js";
import { h, replace } from "../../base/dom.js";
import { count, sentence } from "../../base/format.js";
import { messageFacts, propertyTables, timeline } from "../../parts/message_parts.js";
import { payloadView } from "../../parts/payload.js";
import { to } from "../../base/router.js";
import {
  advice,
  empty,
  failed,
  loading,
  pageHead,
  prose,
  stateTag,
  time,
} from "../../parts/widgets.js";
import { deadLetterParts } from "./dead_letter.js";

const EVERY = 2000;

export function messageTracePage(app, route) {
  const { name, id } = route;
  const place = h("div", { class: "stack" }, loading("the trace"));
  const parts = ["summary", "events", "states", "deadLetters", "message"].map((key) => [
    key,
    h("div", { class: "stack" }),
  ]);
  const [summary, events, states, deadLetters, message] = parts.map(([, element]) => element);
  const draw = { summary: summaryOf, events: eventsOf, states: statesOf };
  draw.message = (trace) => messageOf(app, trace, name, reload);
  draw.deadLetters = (trace) => deadLetterCards(app, name, trace.deadLetters, reload);
  const known = new Map();
  let alive = true;
  let timer = 0;

  /** After an action: the part with its button is redrawn as well. */
  function reload() {
    const focused = document.activeElement;
    if (focused instanceof HTMLElement) focused.blur();
    return load();
  }

  async function load() {
    clearTimeout(timer);
    try {
      const trace = await api.trace(name, id);
      // Each group that gave the message up has a dead letter of its own.
      trace.deadLetters = (
        await Promise.all(
          (trace.dead_letters ?? []).map((one) => api.deadLetter(name, one).catch(() => null)),
        )
      ).filter(Boolean);
      if (!alive) return;
      if (!known.size)
        replace(
          place,
          summary,
          deadLetters,
          h("div", { class: "two-columns" }, events, states),
          message,
        );
      show(trace);
    } catch (fault) {
      if (!alive) return;
      known.clear();
      const gone = fault.status === 404;
      replace(
        place,
        gone
          ? empty(sentence(fault.message), h("p", null, prose(fault.advice)))
          : failed(fault, load),
      );
      if (gone) return;
    }
    timer = setTimeout(load, EVERY);
  }

  /**
   * Redraw only the part that changed, and none that has the focus: a user reads or copies there.
   */
  function show(trace) {
    for (const [key, element] of parts) {
      const others = key === "message" ? [trace.dead_letters, trace.states] : null;
      const content = JSON.stringify([trace[key], others]);
      if (known.get(key) === content || element.contains(document.activeElement)) continue;
      known.set(key, content);
      replace(element, draw[key](trace));
    }
  }

  load();
  const trail = [
    ["Queues", to.overview()],
    [name, to.queue(name)],
    ["Messages", to.queue(name, "messages")],
  ];
  return {
    title: id,
    element: h("div", { class: "page" }, pageHead(id, { trail }), place),
    restored: load,
    destroy() {
      alive = false;
      clearTimeout(timer);
    },
  };
}

function summaryOf(trace) {
  return [h("p", { class: "summary" }, prose(trace.summary))];
}

function deadLetterCards(app, name, deadLetters, load) {
  return deadLetters.map((deadLetter) =>
    h(
      "section",
      { class: "card stack", "aria-label": `Dead letter ${deadLetter.message_id}` },
      h("h2", null, titleOf(deadLetter)),
      deadLetterParts(app, name, deadLetter, load),
    ),
  );
}

function titleOf(deadLetter) {
  const group = deadLetter.headers["original-group"];
  return group ? `Dead letter of group ${group}` : "Dead letter";
}

function eventsOf(trace) {
  const forgotten = h("p", { class: "soft" }, "The broker no longer stores its events.");
  return h(
    "section",
    { "aria-label": "Timeline" },
    h("h2", null, "Timeline"),
    trace.events.length ? timeline(trace.events) : forgotten,
  );
}

function statesOf(trace) {
  const none = h("p", { class: "soft" }, "No group consumes the queue yet.");
  return h(
    "section",
    { "aria-label": "In each group" },
    h("h2", null, "In each group"),
    trace.states.length ? trace.states.map(stateCard) : none,
  );
}

/** The actions on a message that a consumer may still get: none while one is working on it. */
function waitingActions(app, trace, name, reload) {
  const states = trace.states.map((one) => one.state);
  const waits = ["waiting", "delayed", "retrying"];
  if (states.includes("delivered") || (states.length && !states.some((one) => waits.includes(one))))
    return null;
  const id = trace.message_id;
  const run = (act) => async () => {
    if (await act()) await reload();
  };
  const now = () =>
    attempt(() => api.rescheduleMessage(name, id, { delay: "0s" })).then((done) => {
      if (done) notice(`${id} is delivered now.`);
      return done;
    });
  const isHeld = states.some((one) => one === "delayed" || one === "retrying");
  return h(
    "div",
    { class: "actions" },
    isHeld ? app.button("Deliver now", "operator", run(now)) : null,
    app.button("Reschedule", "operator", run(() => rescheduleMessage(name, id))),
    app.button("Cancel message", "operator", run(() => cancelMessage(name, id)), "danger"),
  );
}

function messageOf(app, trace, name, reload) {
  const message = trace.message;
  if (!message)
    return trace.deadLetters.length
      ? null // it is shown above
      : h(
          "p",
          { class: "soft" },
          "The message is no longer stored: every group has settled it, and it is in no " +
            "dead-letter queue.",
        );
  return h(
    "section",
    { class: "card", "aria-label": "The message" },
    waitingActions(app, trace, name, reload),
    payloadView(message),
    messageFacts(message),
    propertyTables(message),
  );
}

function stateCard(one) {
  const more = [
    one.attempt ? `attempt ${count(one.attempt)}` : "",
    one.failures ? `${count(one.failures)} failed` : "",
    one.consumer ? `consumer ${one.consumer}` : "",
  ].filter(Boolean);
  return h(
    "div",
    { class: "card state-card" },
    h(
      "div",
      { class: "card-head" },
      h("h3", null, one.group),
      stateTag(one.state),
      more.length ? h("span", { class: "soft" }, more.join(" \u00b7 ")) : null,
    ),
    one.why ? h("p", null, prose(one.why)) : null,
    one.due ? h("p", { class: "soft" }, "Due at ", time(one.due)) : null,
    one.deadline ? h("p", { class: "soft" }, "Deadline ", time(one.deadline)) : null,
    advice(one.do),
  );
}
