// One consumer group: its lag, its ledger, and which consumer serves which partitions.

import { pause, resume, seekGroup } from "../../parts/actions.js";
import { PartitionStrip, StateBar, toneOf } from "../../charts/bars.js";
import { Keyed, h, replace, setAttribute, setText } from "../../base/dom.js";
import { count, ranges } from "../../base/format.js";
import { ageText, labelCells, table, tag } from "../../parts/widgets.js";
import { limitsText, stateOf } from "./admission.js";

const LEDGER = [
  "enqueued",
  "waiting",
  "delivered",
  "retrying",
  "acked",
  "dead",
  "expired",
  "purged",
  "cancelled",
];

const CONSUMER_COLUMNS = [
  { label: "Consumer" },
  { label: "Partitions" },
  { label: "In flight", number: true },
  { label: "Prefetch", number: true },
  { label: "Priority", number: true },
  { label: "Last settled", number: true },
  { label: "State" },
];

export class GroupCard {
  constructor(page, name) {
    this.lag = h("strong", { class: "num" });
    this.oldest = h("span", { class: "soft" });
    this.bar = new StateBar(`Group ${name}`);
    this.ledger = Object.fromEntries(LEDGER.map((key) => [key, h("td", { class: "num" })]));
    for (const key of LEDGER) this.ledger[key].dataset.label = key;
    this.redelivered = h("td", { class: "num", "data-label": "redelivered" });
    this.nacked = h("td", { class: "num", "data-label": "nacked" });
    this.strip = new PartitionStrip();
    this.state = h("strong");
    this.why = h("span");
    this.held = h("p", { class: "held", role: "status", hidden: true }, this.state, " ", this.why);
    this.limits = h("p", { class: "soft", hidden: true });
    this.group = null;
    this.toggle = page.app.button("Pause", "operator", async () => {
      const done = this.group?.pause ? await resume(page.name, name) : await pause(page.name, name);
      if (done) this.#showAdmission({ ...this.group, ...done });
    });
    this.body = h("tbody");
    this.consumers = new Keyed(this.body, (consumer) => new ConsumerRow(consumer));
    this.table = table(`Consumers of group ${name}`, CONSUMER_COLUMNS, this.body);
    this.noConsumers = h(
      "p",
      { class: "soft" },
      "No consumer is connected: the unsettled messages of this group wait for one.",
    );
    this.element = h(
      "section",
      { class: "card group", "aria-label": `Group ${name}` },
      h(
        "div",
        { class: "card-head" },
        h("h3", null, name),
        h("span", { class: "lag" }, "lag ", this.lag),
        this.oldest,
        h(
          "span",
          { class: "push" },
          this.toggle,
          " ",
          page.app.button("Seek", "operator", () => seekGroup(page.name, name)),
        ),
      ),
      this.held,
      this.limits,
      this.bar.element,
      this.#ledgerTable(name),
      h(
        "div",
        { class: "strip-row" },
        h("span", { class: "soft" }, "Partitions"),
        this.strip.element,
      ),
      this.table,
      this.noConsumers,
    );
  }

  /** The ledger: enqueued is the sum of the other columns. */
  #ledgerTable(name) {
    const heads = [
      ...LEDGER.map((key, nth) => (nth === 1 ? ["=", key] : nth > 1 ? ["+", key] : ["", key])),
      ["", "redelivered"],
      ["", "nacked"],
    ];
    return h(
      "div",
      { class: "table-box", tabindex: 0, role: "region", "aria-label": `Ledger of group ${name}` },
      h(
        "table",
        { class: "ledger" },
        h(
          "caption",
          { class: "hidden" },
          `Ledger of group ${name}: enqueued is the sum of the next eight`,
        ),
        h(
          "thead",
          null,
          h(
            "tr",
            null,
            heads.map(([sign, label], nth) =>
              h(
                "th",
                { scope: "col", class: nth === LEDGER.length ? "num apart" : "num" },
                sign ? h("span", { class: "sign", "aria-hidden": "true" }, sign) : null,
                label,
              ),
            ),
          ),
        ),
        h("tbody", null, h("tr", null, Object.values(this.ledger), this.redelivered, this.nacked)),
      ),
    );
  }

  /** Show why the group gets no messages, if a pause, its breaker or a limit is the reason. */
  #showAdmission(group) {
    this.group = group;
    const held = stateOf(group);
    setText(this.toggle, group.pause ? "Resume" : "Pause");
    this.held.hidden = held === null;
    setText(this.state, held?.state ?? "");
    setText(this.why, held?.why ?? "");
    const limits = limitsText(group.limits ?? {});
    this.limits.hidden = limits === "";
    setText(this.limits, limits);
  }

  update(group) {
    this.#showAdmission(group);
    setText(this.lag, count(group.lag));
    const age = group.lag > 0 ? ageText(group.oldest_at) : "";
    setText(this.oldest, age ? `oldest waits ${age}` : "");
    this.bar.element.hidden = group.alone; // the queue's own bar shows the same
    this.bar.update(group.ledger);
    for (const key of LEDGER) setText(this.ledger[key], count(group.ledger[key]));
    this.ledger.dead.classList.toggle("is-bad", group.ledger.dead > 0);
    setText(this.redelivered, count(group.redelivered));
    setText(this.nacked, count(group.nacked));
    this.strip.update(group.total, group.consumers);
    this.consumers.show(
      group.consumers.map((consumer, nth) => ({ ...consumer, nth })),
      (consumer) => consumer.client,
    );
    this.table.hidden = group.consumers.length === 0;
    this.noConsumers.hidden = group.consumers.length > 0;
  }
}

class ConsumerRow {
  constructor(consumer) {
    this.swatch = h("span", { "aria-hidden": "true" });
    this.cells = Object.fromEntries(
      ["partitions", "inflight", "prefetch", "priority", "settled", "state"].map((key) => [
        key,
        h("td", { class: ["partitions", "state"].includes(key) ? null : "num" }),
      ]),
    );
    this.element = h(
      "tr",
      null,
      h(
        "th",
        { scope: "row" },
        h("span", { class: "named" }, this.swatch, h("code", null, consumer.client)),
      ),
      Object.values(this.cells),
    );
    this.stateKey = null;
    labelCells(this.element, CONSUMER_COLUMNS);
  }

  update(consumer) {
    setAttribute(
      this.swatch,
      "class",
      `swatch ${toneOf(consumer.partitions.length ? consumer.nth : -1)}`,
    );
    setText(
      this.cells.partitions,
      ranges(consumer.partitions) || (consumer.prefetch === 0 ? "none, draining" : "none"),
    );
    setText(this.cells.inflight, count(consumer.inflight));
    setText(this.cells.prefetch, count(consumer.prefetch));
    setText(this.cells.priority, count(consumer.priority));
    const age = ageText(consumer.settled_at);
    setText(this.cells.settled, age.endsWith("ms") ? "now" : age ? `${age} ago` : "never");
    const key = [consumer.connected, consumer.stalled, consumer.slow, consumer.exclusive].join();
    if (key === this.stateKey) return;
    this.stateKey = key;
    replace(
      this.cells.state,
      consumer.connected ? null : tag("disconnected", "warn"),
      consumer.stalled ? tag("stalled", "bad") : null,
      consumer.slow ? tag("slow reader", "warn") : null,
      consumer.exclusive ? tag("exclusive") : null,
      consumer.connected && !consumer.stalled && !consumer.slow ? tag("connected", "good") : null,
    );
  }
}
