// The life of one message: what became of it in each group and why, every step with its time, and the message itself.

import { api } from "../api.js";
import { h, replace } from "../dom.js";
import { count, sentence } from "../format.js";
import { messageFacts, propertyTables, timeline } from "../message_parts.js";
import { payloadView } from "../payload.js";
import { to } from "../router.js";
import { advice, empty, failed, loading, pageHead, prose, stateTag, time } from "../widgets.js";

const EVERY = 2000;

export function biographyPage(app, route) {
  const { name, id } = route;
  const place = h("div", { class: "stack" }, loading("its life"));
  const parts = ["summary", "events", "states", "message"].map((key) => [key, h("div", { class: "stack" })]);
  const [summary, events, states, message] = parts.map(([, element]) => element);
  const draw = { summary: summaryOf, events: eventsOf, states: statesOf, message: messageOf };
  const known = new Map();
  let alive = true;
  let timer = 0;

  async function load() {
    clearTimeout(timer);
    try {
      const life = await api.biography(name, id);
      if (!alive) return;
      if (!known.size) replace(place, summary, h("div", { class: "two-columns" }, events, states), message);
      show(life);
    } catch (fault) {
      if (!alive) return;
      known.clear();
      const gone = fault.status === 404;
      replace(
        place,
        gone ? empty(sentence(fault.message), h("p", null, prose(fault.advice))) : failed(fault, load),
      );
      if (gone) return;
    }
    timer = setTimeout(load, EVERY);
  }

  /** Only the part that changed, and none that holds the focus: somebody reads or copies there. */
  function show(life) {
    for (const [key, element] of parts) {
      const told = JSON.stringify([life[key], key === "summary" ? life.dead_letters : null]);
      if (known.get(key) === told || element.contains(document.activeElement)) continue;
      known.set(key, told);
      replace(element, draw[key](life, name));
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

function summaryOf(life, name) {
  const letters = life.dead_letters ?? [];
  const link = (letter, nth) => [
    nth ? ", " : null,
    h("a", { href: to.letter(name, letter) }, h("code", null, letter)),
  ];
  return [
    h("p", { class: "summary" }, prose(life.summary)),
    letters.length ? h("p", null, "Its dead letters: ", letters.map(link)) : null,
  ];
}

function eventsOf(life) {
  const forgotten = h("p", { class: "soft" }, "Its events are not remembered any more.");
  return h(
    "section",
    { "aria-label": "Timeline" },
    h("h2", null, "Timeline"),
    life.events.length ? timeline(life.events) : forgotten,
  );
}

function statesOf(life) {
  const none = h("p", { class: "soft" }, "No group consumes the queue yet.");
  return h(
    "section",
    { "aria-label": "In each group" },
    h("h2", null, "In each group"),
    life.states.length ? life.states.map(stateCard) : none,
  );
}

function messageOf(life) {
  const message = life.message;
  if (!message)
    return h("p", { class: "soft" }, "The message itself is no longer kept: every group has settled it.");
  return h(
    "section",
    { class: "card", "aria-label": "The message" },
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
