// Flat bars: messages by state, and partitions by consumer.

import { h, replace, s, setAttribute, setText } from "../base/dom.js";
import { count, plural, ranges } from "../base/format.js";

export const STATES = [
  ["waiting", "Waiting", "ready for a consumer, or after an earlier message of its key"],
  ["delivered", "Delivered", "with a consumer, not settled yet"],
  ["retrying", "Retrying", "failed, waiting for its next attempt"],
  ["delayed", "Delayed", "not before a time that the publisher set"],
];

/** Waiting, delivered, retrying and delayed messages as one bar with numbers. */
export class StateBar {
  constructor(label) {
    this.label = label;
    this.parts = STATES.map(([state]) => s("rect", { class: `state-${state}`, y: 0, height: 10 }));
    this.svg = s(
      "svg",
      { class: "state-bar", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img" },
      s("rect", { class: "state-none", width: 1000, height: 10 }),
      this.parts,
    );
    this.numbers = STATES.map(() => h("strong", { class: "num" }));
    this.items = STATES.map(([state, name, meaning], nth) =>
      h(
        "li",
        { title: meaning },
        h("span", { class: `swatch state-${state}` }),
        `${name} `,
        this.numbers[nth],
      ),
    );
    this.element = h(
      "div",
      { class: "states" },
      this.svg,
      h("ul", { class: "legend" }, this.items),
    );
  }

  /** Without `delayed`, the server counts those as waiting, and the state is hidden. */
  update(values) {
    const amounts = STATES.map(([state]) => values[state] ?? 0);
    const total = amounts.reduce((sum, amount) => sum + amount, 0);
    let at = 0;
    amounts.forEach((amount, nth) => {
      const width = total ? (amount / total) * 1000 : 0;
      setAttribute(this.parts[nth], "x", at.toFixed(1));
      setAttribute(this.parts[nth], "width", width.toFixed(1));
      at += width;
      setText(this.numbers[nth], count(amount));
      this.items[nth].hidden = STATES[nth][0] === "delayed" && values.delayed === undefined;
    });
    setAttribute(
      this.svg,
      "aria-label",
      `${this.label}: ` +
        STATES.map(([, name], nth) => `${name.toLowerCase()} ${count(amounts[nth])}`).join(", "),
    );
  }
}

const TONES = 8;

/** The partitions of a group in a row, each in the color of its consumer. */
export class PartitionStrip {
  constructor() {
    this.element = s("svg", {
      class: "strip",
      height: 22,
      role: "img",
      preserveAspectRatio: "none",
    });
    this.key = "";
  }

  update(total, consumers) {
    const serving = (one) => `${one.client}:${one.partitions.join()}`;
    const key = `${total}|${consumers.map(serving).join("|")}`;
    if (key === this.key) return;
    this.key = key;
    const owner = new Array(total).fill(-1);
    consumers.forEach((one, nth) =>
      one.partitions.forEach((partition) => (owner[partition] = nth)),
    );
    const runs = [];
    // Up to 64 partitions have a cell each; beyond that, adjacent ones of a consumer are merged.
    owner.forEach((nth, partition) => {
      const last = runs.at(-1);
      if (total > 64 && last && last.owner === nth) last.to = partition;
      else runs.push({ owner: nth, from: partition, to: partition });
    });
    const cell = 1000 / total;
    const gap = total > 200 ? 0 : Math.min(4, cell * 0.12);
    setAttribute(this.element, "viewBox", "0 0 1000 22");
    replace(
      this.element,
      runs.map((run) => {
        const name = run.owner < 0 ? "no consumer" : consumers[run.owner].client;
        const which =
          run.from === run.to ? `partition ${run.from}` : `partitions ${run.from} to ${run.to}`;
        return s(
          "rect",
          {
            class: toneOf(run.owner),
            x: (run.from * cell).toFixed(2),
            width: Math.max(0.5, (run.to - run.from + 1) * cell - gap).toFixed(2),
            height: 22,
            rx: 2,
          },
          s("title", null, `${which}: ${name}`),
        );
      }),
    );
    const served = owner.filter((nth) => nth >= 0).length;
    setAttribute(
      this.element,
      "aria-label",
      `${served} of ${total} partitions have a consumer. ` +
        consumers.map((one) => `${one.client}: ${ranges(one.partitions) || "none"}`).join("; "),
    );
  }
}

export function toneOf(nth) {
  return nth < 0 ? "cell-none" : `cell-${nth % TONES}`;
}

/** How many messages each partition holds: a hot key shows as one tall bar. */
export class PartitionBars {
  constructor() {
    this.element = s("svg", {
      class: "partition-bars",
      height: 56,
      role: "img",
      preserveAspectRatio: "none",
      viewBox: "0 0 1000 56",
    });
    this.key = "";
  }

  update(partitions) {
    const key = partitions.map((one) => one.messages).join();
    if (key === this.key) return;
    this.key = key;
    const most = Math.max(1, ...partitions.map((one) => one.messages));
    const cell = 1000 / Math.max(1, partitions.length);
    replace(
      this.element,
      partitions.map((one, nth) => {
        const height = one.messages ? Math.max(2, (one.messages / most) * 52) : 0;
        return s(
          "g",
          null,
          s("rect", { class: "bar-foot", x: nth * cell, y: 55, width: cell * 0.86, height: 1 }),
          s("rect", {
            class: "bar-fill",
            x: nth * cell,
            y: 55 - height,
            width: cell * 0.86,
            height,
          }),
          s(
            "rect",
            { class: "bar-hit", x: nth * cell, y: 0, width: cell, height: 56 },
            s(
              "title",
              null,
              `partition ${one.number}: ${plural(one.messages, "message")}, sequences ` +
                `${count(one.first)} to ${count(one.next - 1)}`,
            ),
          ),
        );
      }),
    );
    const fullest = partitions.reduce(
      (best, one) => (one.messages > (best?.messages ?? -1) ? one : best),
      null,
    );
    setAttribute(
      this.element,
      "aria-label",
      fullest
        ? `Messages by partition; the fullest is ${fullest.number} with ${count(fullest.messages)}`
        : "No partitions",
    );
  }
}
