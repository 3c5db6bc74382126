// One dead letter: why it died, what it carries, its story, and the way back or out.

import { api } from "../api.js";
import { ask, attempt, notice, openDialog } from "../dialogs.js";
import { h, replace } from "../dom.js";
import { messageFacts, propertyTables, storyOf, timeline } from "../message_parts.js";
import { payloadView } from "../payload.js";
import { to } from "../router.js";
import { facts, tag, time } from "../widgets.js";

export const MEANINGS = {
  max_retries: "failed more often than the queue allows",
  timeout: "not done within the queue's total time",
  rejected: "a consumer said: never again",
  expired: "nobody took it in time",
  overflow: "the queue was full",
};

export const headerOf = (letter, key) => letter.headers?.[key] ?? "";

/** The id it had in life; a letter's own is that of a message in the dead-letter queue. */
export const originalId = (letter) => headerOf(letter, "original-message-id") || letter.message_id;

/** Put it back, and say so; false when it was not. */
export async function retryLetter(name, letter, toAll = false) {
  const id = originalId(letter);
  const done = await attempt(() => api.retryLetter(name, letter.message_id, toAll));
  if (!done) return false;
  if (done.retried === 0) {
    notice(`${id} was not put back: somebody works on it, or the queue it came from is gone.`, { bad: true });
    return false;
  }
  const group = headerOf(letter, "original-group");
  const whom = toAll || !group ? "all groups" : `group ${group}`;
  notice(`${id} is back in ${name} for ${whom}.`, { href: to.message(name, id), link: "Its life" });
  return true;
}

async function deleteLetter(name, letter) {
  const id = originalId(letter);
  const done = await ask({
    title: "Delete this dead letter?",
    text: h(
      "p",
      null,
      "Dead letter ",
      h("strong", null, id),
      " of queue ",
      h("strong", null, name),
      " is gone for good.",
    ),
    button: "Delete",
    danger: true,
    act: () => api.deleteLetter(name, letter.message_id),
  });
  if (done) notice(`Dead letter ${id} is deleted.`);
  return Boolean(done);
}

/** Show it at the side; resolves to true when it is no longer there afterwards. */
export async function openLetter(app, name, id) {
  const letter = await attempt(() => api.deadLetter(name, id));
  if (!letter) return false;
  const story = h("div", null, timeline(storyOf(letter)));
  api.biography(name, originalId(letter)).then(
    (life) => life.events?.length && replace(story, timeline(life.events)),
    () => null, // forgotten: the letter's own headers have told what they know
  );
  const gone = await openDialog({
    title: originalId(letter),
    kind: "drawer",
    back: () => document.querySelector(`[data-letter="${CSS.escape(letter.message_id)}"] button.link`),
    body: (close) => bodyOf(app, name, letter, story, close),
  });
  return Boolean(gone);
}

function bodyOf(app, name, letter, story, close) {
  const why = headerOf(letter, "dead-reason");
  const told = headerOf(letter, "dead-description");
  const endWith = (act) => async () => (await act()) && close(true);
  return h(
    "div",
    { class: "dialog-body" },
    h("p", { class: "verdict" }, tag(why || "unknown", "bad"), " ", MEANINGS[why] ?? ""),
    told ? h("blockquote", null, told) : null,
    h(
      "div",
      { class: "tools" },
      app.button(
        "Retry",
        "operator",
        endWith(() => retryLetter(name, letter)),
        "primary",
      ),
      app.button(
        "Retry for all groups",
        "operator",
        endWith(() => retryLetter(name, letter, true)),
      ),
      app.button(
        "Delete",
        "operator",
        endWith(() => deleteLetter(name, letter)),
      ),
    ),
    facts(
      [
        ["Died", time(headerOf(letter, "dead-at"), { milliseconds: true })],
        ["Attempts", headerOf(letter, "attempts") || "\u2013"],
        ["Group", headerOf(letter, "original-group") || "all"],
        ["Came from", h("code", null, headerOf(letter, "original-topic") || name)],
      ],
      "columns",
    ),
    payloadView(letter),
    h("h3", null, "Its story"),
    story,
    h(
      "p",
      null,
      h(
        "a",
        { href: to.message(name, originalId(letter)), onclick: () => close() },
        "The life of this message",
      ),
    ),
    h("details", null, h("summary", null, "As it is kept"), messageFacts(letter), propertyTables(letter)),
  );
}
