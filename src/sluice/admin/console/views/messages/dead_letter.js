// One dead letter: its reason, payload and history, and the actions retry and delete.

import { field } from "../../parts/actions.js";
import { api } from "../../api/api.js";
import { ask, attempt, notice, openDialog } from "../../parts/dialogs.js";
import { h, replace } from "../../base/dom.js";
import {
  messageFacts,
  propertyTables,
  eventsFromHeaders,
  timeline,
} from "../../parts/message_parts.js";
import { payloadBytes, payloadView } from "../../parts/payload.js";
import { to } from "../../base/router.js";
import { facts, tag, time } from "../../parts/widgets.js";

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
  const done = await attempt(() =>
    api.retryDeadLetter(name, deadLetter.message_id, { to_all: toAll }),
  );
  return reportRetry(name, deadLetter, done, toAll);
}

function reportRetry(name, deadLetter, done, toAll) {
  const id = originalId(deadLetter);
  if (!done) return false;
  if (done.retried === 0) {
    notice(`${id} was not put back: a consumer holds it, or its original queue is gone.`, {
      bad: true,
    });
    return false;
  }
  const group = headerOf(deadLetter, "original-group");
  const whom = toAll || !group ? "all groups" : `group ${group}`;
  const queue = headerOf(deadLetter, "original-queue") || name;
  notice(`${id} is back in ${queue} for ${whom}.`, {
    href: to.message(queue, id),
    link: "Message details",
  });
  return true;
}

/** Text that a text area returns as it was: whole, and without line ends that it would change. */
function editableText(deadLetter) {
  const whole = payloadBytes(deadLetter).length === deadLetter.size;
  const text = deadLetter.payload;
  return whole && typeof text === "string" && !text.includes("\r") ? text : null;
}

async function editAndRetry(name, deadLetter) {
  const id = originalId(deadLetter);
  const group = headerOf(deadLetter, "original-group");
  const payload = h("textarea", {
    rows: 12,
    spellcheck: "false",
    autofocus: true,
    class: "code",
  });
  payload.value = editableText(deadLetter);
  const done = await ask({
    title: `Edit and retry ${id}`,
    text: h(
      "p",
      null,
      `The message goes back to ${group ? `group ${group}` : "all groups"} with this payload. ` +
        "Its dead letter is deleted in the same step. Key and properties stay.",
    ),
    button: "Retry with this payload",
    fields: { element: field("Payload", payload), values: () => payload.value },
    act: (text) =>
      api.retryDeadLetter(name, deadLetter.message_id, { to_all: false, payload: text }),
  });
  return reportRetry(name, deadLetter, done, false);
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
  const address = location.hash;
  const deadLetter = await attempt(() => api.deadLetter(name, id));
  if (!deadLetter || location.hash !== address) return false;
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
    body: (close) =>
      h(
        "div",
        { class: "dialog-body" },
        deadLetterParts(app, name, deadLetter, () => close(true)),
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
      ),
  });
  return Boolean(gone);
}

/** The error, the actions, and the message as it is stored in the dead-letter queue. */
export function deadLetterParts(app, name, deadLetter, gone) {
  const why = headerOf(deadLetter, "dead-reason");
  const description = headerOf(deadLetter, "dead-description");
  const endWith = (act) => async () => (await act()) && gone();
  const edit = app.button(
    "Edit and retry",
    "operator",
    endWith(() => editAndRetry(name, deadLetter)),
  );
  if (editableText(deadLetter) === null) {
    edit.disabled = true;
    edit.title = "Not text: use sluice dlq retry with --payload-file";
  }
  return [
    h("p", { class: "verdict" }, tag(why || "unknown", "bad"), " ", MEANINGS[why] ?? ""),
    description ? h("blockquote", null, description) : null,
    h(
      "p",
      { class: "soft" },
      "It is in the dead-letter queue ",
      h("a", { href: to.queue(deadLetter.queue) }, deadLetter.queue),
      ", as ",
      h("code", null, deadLetter.message_id),
      ".",
    ),
    h(
      "div",
      { class: "tools" },
      app.button(
        "Retry",
        "operator",
        endWith(() => retryDeadLetter(name, deadLetter)),
        "primary",
      ),
      edit,
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
    h(
      "details",
      null,
      h("summary", null, "Raw message"),
      messageFacts(deadLetter),
      propertyTables(deadLetter),
    ),
  ];
}
