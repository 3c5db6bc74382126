// The table of queues: filter, sort, a page of rows. Rows are reused by name, and only changed
// figures are rewritten. If the sort figure changes, the order is refreshed every few seconds, but
// not while the user points or types in the table: a row that jumps away is worse than one that is
// out of order.

import { api } from "../../api/api.js";
import { Spark } from "../../charts/charts.js";
import { Keyed, freshId, h, setAttribute, setText } from "../../base/dom.js";
import { count, plural, rate } from "../../base/format.js";
import { to } from "../../base/router.js";
import { labelCells } from "../../parts/widgets.js";

const ROWS = 50;
const SETTLE = 4000;

const COLUMNS = [
  { key: "name", label: "Queue" },
  {
    key: "total_messages",
    label: "Depth",
    number: true,
    title: "Stored messages, now and over the last 90 seconds",
  },
  { key: "enqueue_rate", label: "In/s", number: true, title: "Messages enqueued per second" },
  { key: "ack_rate", label: "Acked/s", number: true, title: "Messages acknowledged per second" },
  {
    key: "inflight_messages",
    label: "In flight",
    number: true,
    title: "With a consumer, not settled yet",
  },
  {
    key: "retrying",
    label: "Retrying",
    number: true,
    title: "Failed, waiting for the next attempt",
  },
  { key: "active_consumers", label: "Consumers", number: true },
  { key: "dlq_messages", label: "Dead letters", number: true },
];

/** @type {[string, string, (queue: any) => boolean][]} */
const WHICH = [
  ["all", "All queues", () => true],
  ["backlog", "With messages", (queue) => queue.total_messages > 0],
  [
    "idle",
    "Waiting without a consumer",
    (queue) => queue.total_messages > 0 && queue.active_consumers === 0,
  ],
  ["paused", "Paused", (queue) => queue.pause != null],
  ["dead", "With dead letters", (queue) => queue.dlq_messages > 0],
];

export class QueueTable {
  constructor(app) {
    this.app = app;
    this.sortKey = "name";
    this.down = false;
    this.page = 0;
    this.order = [];
    this.orderedAt = 0;
    this.body = h("tbody");
    this.rows = new Keyed(this.body, (queue) => new Row(queue.name));
    this.#controls();
    this.heads = COLUMNS.map((column) => {
      const button = h(
        "button",
        { type: "button", class: "sort", onclick: () => this.#sort(column) },
        column.label,
        h("span", { class: "sort-mark", "aria-hidden": "true" }),
      );
      return h(
        "th",
        { scope: "col", class: column.number ? "num" : null, title: column.title },
        button,
      );
    });
    this.none = h("p", { class: "soft none", hidden: true }, "No queue matches.");
    this.box = h(
      "div",
      { class: "table-box" },
      h(
        "table",
        { class: "queues" },
        h("caption", { class: "hidden" }, "Queues"),
        h("thead", null, h("tr", null, this.heads)),
        this.body,
      ),
    );
    this.element = h(
      "section",
      { "aria-label": "Queues" },
      this.tools,
      this.box,
      this.none,
      this.pager,
    );
    this.#mark();
  }

  #controls() {
    const again = () => {
      this.page = 0;
      this.orderedAt = 0;
      this.update();
    };
    const id = freshId("filter");
    this.filter = h("input", {
      id,
      type: "search",
      placeholder: "Filter by name",
      autocomplete: "off",
      spellcheck: "false",
      oninput: again,
    });
    this.which = h(
      "select",
      { "aria-label": "Which queues", onchange: again },
      WHICH.map(([value, label]) => h("option", { value }, label)),
    );
    this.deadLetters = h("input", { type: "checkbox", id: `${id}-dlq`, onchange: again });
    this.total = h("span", { class: "soft", role: "status" });
    this.tools = h(
      "div",
      { class: "tools" },
      h("label", { class: "hidden", for: id }, "Filter by name"),
      this.filter,
      this.which,
      h(
        "span",
        { class: "check" },
        this.deadLetters,
        h("label", { for: `${id}-dlq` }, "Dead-letter queues too"),
      ),
      this.total,
    );
    this.back = h("button", { type: "button", onclick: () => this.#turn(-1) }, "Previous");
    this.forth = h("button", { type: "button", onclick: () => this.#turn(1) }, "Next");
    this.where = h("span", { class: "soft num", role: "status" });
    this.pager = h(
      "nav",
      { class: "pager", "aria-label": "Pages of queues" },
      this.back,
      this.where,
      this.forth,
    );
  }

  #turn(by) {
    this.page += by;
    this.update();
    this.element.scrollIntoView({ block: "start" });
  }

  #sort(column) {
    if (this.sortKey === column.key) this.down = !this.down;
    else {
      this.sortKey = column.key;
      this.down = Boolean(column.number); // numbers start with the largest
    }
    this.page = 0;
    this.orderedAt = 0;
    this.#mark();
    this.update();
  }

  #mark() {
    this.heads.forEach((head, nth) => {
      const own = COLUMNS[nth].key === this.sortKey;
      setAttribute(head, "aria-sort", own ? (this.down ? "descending" : "ascending") : null);
    });
  }

  /** Load what the broker remembers of the shown queues, once, for the sparklines. */
  #loadPast(names) {
    const { history } = this.app;
    for (const name of names.filter((one) => !history.past.has(one)).slice(0, LOADS)) {
      history.past.set(name, {});
      api.queueSamples(name).then(
        (samples) => history.backfill(name, [samples]),
        () => null, // the sparkline then begins now
      );
    }
  }

  #inUse() {
    return this.body.matches(":hover") || this.body.contains(document.activeElement);
  }

  #arrange() {
    const wanted = this.filter.value
      .trim()
      .toLowerCase()
      .replace(/^\$queue\//, "");
    const test = WHICH.find(([value]) => value === this.which.value)[2];
    const kept = [...this.app.queues.values()].filter(
      (queue) =>
        (this.deadLetters.checked || !queue.is_dead_letters) &&
        test(queue) &&
        queue.name.toLowerCase().includes(wanted),
    );
    const key = this.sortKey;
    const turn = this.down ? -1 : 1;
    kept.sort(
      (a, b) =>
        (key === "name" ? 0 : turn * (a[key] - b[key])) ||
        (key === "name" ? turn : 1) * (a.name < b.name ? -1 : a.name > b.name ? 1 : 0),
    );
    this.order = kept.map((queue) => queue.name);
  }

  update() {
    const moving = this.sortKey !== "name" || this.which.value !== "all";
    const due = Date.now() - this.orderedAt > (moving ? SETTLE : 0);
    if (this.orderedAt === 0 || (due && !(moving && this.#inUse()))) {
      this.#arrange();
      this.orderedAt = Date.now();
    }
    const there = this.order.filter((name) => this.app.queues.has(name));
    const pages = Math.max(1, Math.ceil(there.length / ROWS));
    this.page = Math.min(Math.max(0, this.page), pages - 1);
    const names = there.slice(this.page * ROWS, (this.page + 1) * ROWS);
    this.rows.show(
      names.map((name) => this.app.queues.get(name)),
      (queue) => queue.name,
    );
    const now = this.app.history.now();
    this.#loadPast(names);
    for (const [name, row] of this.rows.parts)
      row.spark.update(this.app.history.of(name, "total_messages", Spark.samples), now);
    this.none.hidden = there.length > 0;
    this.box.hidden = there.length === 0;
    this.pager.hidden = pages === 1;
    this.back.disabled = this.page === 0;
    this.forth.disabled = this.page === pages - 1;
    setText(
      this.where,
      `${count(this.page * ROWS + 1)}\u2013${count(this.page * ROWS + names.length)} of ` +
        `${count(there.length)}`,
    );
    const listed = this.app.queues.size;
    const all = this.app.node?.queues ?? listed;
    setText(
      this.total,
      listed < all
        ? `${plural(there.length, "queue")}; the first ${count(listed)} of ${count(all)} are listed`
        : plural(there.length, "queue"),
    );
  }
}

/** What a page of sparklines may ask for; the rest is asked with the next sample. */
const LOADS = 10;

class Row {
  constructor(name) {
    const number = () => h("td", { class: "num" });
    this.depth = h("span", { class: "num" });
    this.spark = new Spark();
    this.cells = Object.fromEntries(
      ["enqueue_rate", "ack_rate", "inflight_messages", "retrying", "active_consumers"].map(
        (key) => [key, number()],
      ),
    );
    this.deadLetters = h("a", { href: to.queue(name, "dead-letters") });
    this.noDeadLetters = h("span", { class: "soft" }, "0");
    this.deadLettersCell = h("td", { class: "num" }, this.noDeadLetters);
    this.kind = h("span", { class: "soft kind" });
    this.element = h(
      "tr",
      null,
      h(
        "th",
        { scope: "row" },
        h("a", { href: to.queue(name), class: "queue-name" }, name),
        this.kind,
      ),
      h("td", { class: "num depth-cell" }, this.spark.element, this.depth),
      Object.values(this.cells),
      this.deadLettersCell,
    );
    labelCells(this.element, COLUMNS);
  }

  update(queue) {
    setText(this.depth, count(queue.total_messages));
    const full = queue.max_depth > 0 && queue.total_messages >= queue.max_depth * 0.9;
    this.depth.classList.toggle("is-warn", full);
    setAttribute(
      this.depth,
      "title",
      queue.max_depth > 0
        ? `${Math.floor((100 * queue.total_messages) / queue.max_depth)} % of its limit of ` +
            `${count(queue.max_depth)}`
        : null,
    );
    for (const key of ["enqueue_rate", "ack_rate"])
      this.#figure(this.cells[key], queue[key], rate(queue[key]));
    for (const key of ["inflight_messages", "retrying", "active_consumers"])
      this.#figure(this.cells[key], queue[key], count(queue[key]));
    const waits = queue.total_messages > 0 && !queue.is_dead_letters;
    const alone = waits && queue.active_consumers === 0;
    this.cells.active_consumers.classList.toggle("is-warn", alone);
    setAttribute(
      this.cells.active_consumers,
      "title",
      alone ? "Messages wait and no consumer takes them" : null,
    );
    this.cells.retrying.classList.toggle("is-warn", queue.retrying > 0);
    setText(this.deadLetters, count(queue.dlq_messages));
    const wanted = queue.dlq_messages > 0 ? this.deadLetters : this.noDeadLetters;
    if (this.deadLettersCell.firstChild !== wanted) this.deadLettersCell.replaceChildren(wanted);
    const kinds = [
      queue.pause ? "paused" : "",
      queue.is_dead_letters ? "dead letters" : "",
      queue.type === "compacted" ? "compacted" : "",
      queue.ordering === "strict" ? "strict order" : "",
    ].filter(Boolean);
    setText(this.kind, kinds.join(" \u00b7 "));
  }

  #figure(cell, value, text) {
    setText(cell, text);
    cell.classList.toggle("is-zero", value === 0);
  }
}
