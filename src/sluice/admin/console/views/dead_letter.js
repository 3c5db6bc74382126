// One dead letter: its reason, payload and history, and the actions retry and delete.

import { api } from "../api.js";
import { ask, attempt, notice, openDialog } from "../dialogs.js";
import { h, replace } from "../dom.js";
import { messageFacts, propertyTables, eventsFromHeaders, timeline } from "../message_parts.js";
import { payloadView } from "../payload.js";
import { to } from "../router.js";
import { facts, tag, time } from "../widgets.js";

export const MEANINGS = {
  max_retries: "failed more often than the queue allows",
  timeout: "not settled within the queue's total time",
  rejected: "a consumer rejected it",
  expired: "no consumer took it in time",
  overflow: "the queue was full",
};

export const headerOf = (deadLetter, key) => deadLetter.headers?.[key] ?? "";

/** The id of the original message; a dead letter has its own id in the dead-letter queue. */
export const originalId = (deadLetter) =>
  headerOf(deadLetter, "original-message-id") || deadLetter.message_id;

/** Retry a dead letter and report it; false when it was skipped. */
export async function retryDeadLetter(name, deadLetter, toAll = false) {
  const id = originalId(deadLetter);
  const done = await attempt(() => api.retryDeadLetter(name, deadLetter.message_id, toAll));
  if (!done) return false;
  if (done.retried === 0) {
    notice(`${id} was not put back: a consumer holds it, or its original queue is gone.`, {
      bad: true,
    });
    return false;
  }
  const group = headerOf(deadLetter, "original-group");
  const whom = toAll || !group ? "all groups" : `group ${group}`;
  notice(`${id} is back in ${name} for ${whom}.`, {
    href: to.message(name, id),
    link: "Message details",
  });
  return true;
}

async function deleteDeadLetter(name, deadLetter) {
  const id = originalId(deadLetter);
  const done = await ask({
    title: "Delete this dead letter?",
    text: h(
      "p",
      null,
      "Dead letter ",
      h("strong", null, id),
      " of queue ",
      h("strong", null, name),
      " is deleted permanently.",
    ),
    button: "Delete",
    danger: true,
    act: () => api.deleteDeadLetter(name, deadLetter.message_id),
  });
  if (done) notice(`Dead letter ${id} is deleted.`);
  return Boolean(done);
}

/** Show a dead letter in a drawer; resolves to true when it no longer exists afterwards. */
export async function openDeadLetter(app, name, id) {
  const deadLetter = await attempt(() => api.deadLetter(name, id));
  if (!deadLetter) return false;
  const history = h("div", null, timeline(eventsFromHeaders(deadLetter)));
  api.trace(name, originalId(deadLetter)).then(
    (trace) => trace.events?.length && replace(history, timeline(trace.events)),
    () => null, // not stored any more: the headers of the dead letter have its history
  );
  const gone = await openDialog({
    title: originalId(deadLetter),
    kind: "drawer",
    back: () =>
      document.querySelector(
        `[data-dead-letter="${CSS.escape(deadLetter.message_id)}"] button.link`,
      ),
    body: (close) => bodyOf(app, name, deadLetter, history, close),
  });
  return Boolean(gone);
}

function bodyOf(app, name, deadLetter, history, close) {
  const why = headerOf(deadLetter, "dead-reason");
  const description = headerOf(deadLetter, "dead-description");
  const endWith = (act) => async () => (await act()) && close(true);
  return h(
    "div",
    { class: "dialog-body" },
    h("p", { class: "verdict" }, tag(why || "unknown", "bad"), " ", MEANINGS[why] ?? ""),
    description ? h("blockquote", null, description) : null,
    h(
      "div",
      { class: "tools" },
      app.button(
        "Retry",
        "operator",
        endWith(() => retryDeadLetter(name, deadLetter)),
        "primary",
      ),
      app.button(
        "Retry for all groups",
        "operator",
        endWith(() => retryDeadLetter(name, deadLetter, true)),
      ),
      app.button(
        "Delete",
        "operator",
        endWith(() => deleteDeadLetter(name, deadLetter)),
      ),
    ),
    facts(
      [
        ["Died", time(headerOf(deadLetter, "dead-at"), { milliseconds: true })],
        ["Attempts", headerOf(deadLetter, "attempts") || "\u2013"],
        ["Group", headerOf(deadLetter, "original-group") || "all"],
        ["Came from", h("code", null, headerOf(deadLetter, "original-topic") || name)],
      ],
      "columns",
    ),
    payloadView(deadLetter),
    h("h3", null, "History"),
    history,
    h(
      "p",
      null,
      h(
        "a",
        { href: to.message(name, originalId(deadLetter)), onclick: () => close() },
        "Message details",
      ),
    ),
    h(
      "details",
      null,
      h("summary", null, "Raw message"),
      messageFacts(deadLetter),
      propertyTables(deadLetter),
    ),
  );
}
