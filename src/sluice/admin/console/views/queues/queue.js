// One queue: its heading, actions and tabs. Changing the tab keeps the heading and the focus.

import { deleteQueue, pause, publishMessage, purgeQueue, resume } from "../../parts/actions.js";
import { api } from "../../api/api.js";
import { mosquitto } from "../../base/commands.js";
import { h, replace, setAttribute, setText } from "../../base/dom.js";
import { count } from "../../base/format.js";
import { to } from "../../base/router.js";
import { command, empty, failed, loading, pageHead, tag } from "../../parts/widgets.js";
import { pauseText } from "./admission.js";
import { configTab } from "./config.js";
import { deadLettersTab } from "../messages/dead_letters.js";
import { figuresTab } from "./figures.js";
import { messagesTab } from "../messages/messages.js";

/** @type {[string, string, (page: any, route: any) => any][]} */
const TABS = [
  ["", "Overview", figuresTab],
  ["messages", "Messages", messagesTab],
  ["dead-letters", "Dead letters", deadLettersTab],
  ["config", "Configuration", configTab],
];

export function queuePage(app, route) {
  const name = route.name;
  const place = h("div", { class: "tab-place" }, loading("the queue"));
  const tags = h("span", { class: "tags" });
  const paused = h("p", { class: "held", role: "status", hidden: true });
  const deadLetters = h("span", { class: "badge num", hidden: true });
  const links = TABS.map(([tab, label]) =>
    h("a", { href: to.queue(name, tab) }, label, tab === "dead-letters" ? deadLetters : null),
  );
  const remove = async () => {
    if (await deleteQueue(name)) location.hash = to.overview();
  };
  const purge = async () => {
    if (await purgeQueue(name, page.latest?.stats.total_messages)) tab?.refresh?.();
  };
  const publish = async () => {
    if (await publishMessage(name)) gone ? load() : tab?.refresh?.();
  };
  const isPaused = () => page.latest?.stats.pause != null;
  const toggle = app.button("Pause", "operator", async () => {
    const stats = isPaused() ? await resume(name) : await pause(name);
    if (stats) showStats((page.latest.stats = stats));
  });
  const ofLiving = [
    toggle,
    app.button("Purge", "operator", purge),
    app.button("Delete", "admin", remove),
  ];
  const actions = [app.button("Publish a message", "operator", publish, "primary"), ...ofLiving];
  const element = h(
    "div",
    { class: "page" },
    pageHead(name, { trail: [["Queues", to.overview()]], tags: [tags], actions }),
    paused,
    h("nav", { class: "tabs", "aria-label": `Queue ${name}` }, links),
    place,
  );

  let tab = null;
  let alive = true;
  let gone = false; // the queue does not exist
  let missed = 0; // samples in a row without it: among very many queues it may never be listed

  const page = {
    title: name,
    queue: name,
    element,
    name,
    app,
    latest: null, // the newest QueueDetail

    /** Change the tab of the same queue and leave the rest, the focus included. */
    navigate(next) {
      if (next.page !== "queue" || next.name !== name) return false;
      route = next;
      if (!gone) showTab(next);
      return true;
    },
    detail(detail) {
      page.latest = detail;
      showStats(detail.stats);
      tab?.detail?.(detail);
    },
    tick() {
      const stats = app.queues.get(name);
      missed = stats ? 0 : missed + 1;
      if (gone ? stats : missed === 2) load(); // it was created or deleted
      if (stats && page.latest) showStats(stats);
      tab?.tick?.();
    },
    restored() {
      if (page.latest) tab?.refresh?.();
      else load();
    },
    destroy() {
      alive = false;
      tab?.destroy?.();
    },
  };

  let tagsKey = "";

  function showStats(stats) {
    const shown = [stats.ordering, stats.partitions, stats.type, stats.is_dead_letters].join();
    if (shown !== tagsKey) {
      tagsKey = shown;
      const order =
        { partition: "order by key", none: "any order", strict: "strict order" }[stats.ordering] ??
        stats.ordering;
      replace(
        tags,
        tag(order),
        tag(`${count(stats.partitions)} partition${stats.partitions === 1 ? "" : "s"}`),
        stats.type === "compacted" ? tag("compacted") : null,
        stats.is_dead_letters ? originOf(name) : null,
      );
    }
    setText(toggle, stats.pause ? "Resume" : "Pause");
    setText(paused, stats.pause ? `Paused ${pauseText(stats.pause)}` : "");
    paused.hidden = !stats.pause;
    setText(deadLetters, count(stats.dlq_messages));
    deadLetters.hidden = !stats.dlq_messages;
  }

  function showTab(next) {
    tab?.destroy?.();
    const nth = TABS.findIndex(([key]) => key === next.tab);
    links.forEach((link, other) =>
      setAttribute(link, "aria-current", other === nth ? "page" : null),
    );
    tab = TABS[nth][2](page, next);
    replace(place, tab.element);
    if (page.latest) tab.detail?.(page.latest);
    if (app.hasSample) tab.tick?.();
  }

  async function load() {
    try {
      const detail = await api.queue(name);
      if (!alive) return;
      if (gone) missed = 0;
      setGone(false);
      page.detail(detail);
      if (!tab) showTab(route);
      app.live.follow(name);
    } catch (fault) {
      if (!alive) return;
      tab?.destroy?.();
      tab = null;
      setGone(fault.status === 404);
      replace(place, gone ? missing(name) : failed(fault, load));
    }
  }

  /** A queue that does not exist can be neither purged nor deleted; a message would create it. */
  function setGone(is) {
    gone = is;
    for (const action of ofLiving) action.hidden = gone;
    if (gone) page.latest = null;
  }
  load();
  return page;
}

function originOf(name) {
  const origin = name.startsWith("dlq/") ? name.slice(4) : "";
  return origin
    ? h(
        "a",
        { class: "tag bad", href: to.queue(origin, "dead-letters") },
        `dead letters of ${origin}`,
      )
    : tag("dead letters", "bad");
}

function missing(name) {
  return empty(
    "There is no queue of this name",
    h("p", null, "Its first message or consumer creates it:"),
    command(mosquitto("pub", `$queue/${name}`, "-m", "hello")),
    h("p", null, h("a", { href: to.overview() }, "All queues")),
  );
}
