// The current state of a queue: figures, charts, message states, diagnosis, groups and partitions.

import { api } from "../../api/api.js";
import { PartitionBars, StateBar } from "../../charts/bars.js";
import { Chart } from "../../charts/charts.js";
import { mosquitto } from "../../base/commands.js";
import { Keyed, h, setText } from "../../base/dom.js";
import { bytes, count, rate, short } from "../../base/format.js";
import { command, empty } from "../../parts/widgets.js";
import { DoctorCard } from "./doctor.js";
import { GroupCard } from "./groups.js";

const depthOf = (depth, stats) =>
  stats.max_depth ? `${count(depth)} / ${short(stats.max_depth)}` : count(depth);

/** @type {[string, string, (value: number, stats: any) => string, string][]} */
const FIGURES = [
  ["total_messages", "Depth", depthOf, "Stored messages, and how many the queue accepts"],
  ["enqueue_rate", "In/s", rate, "Enqueued per second"],
  ["dequeue_rate", "Delivered/s", rate, "Deliveries per second, repeated ones included"],
  ["ack_rate", "Acked/s", rate, "Acknowledged per second"],
  ["inflight_messages", "In flight", count, "With a consumer, not settled yet"],
  ["retrying", "Retrying", count, "Failed, waiting for the next attempt"],
  ["dlq_messages", "Dead letters", count, "In its dead-letter queue now"],
  ["active_consumers", "Consumers", count, "Connected now, over all groups"],
  ["bytes", "Size", bytes, "Stored bytes"],
  ["duplicates", "Duplicates", count, "Publishes with a known id: acknowledged, not stored again"],
  ["refused", "Refused", count, "Publishes that the queue refused"],
];

export function figuresTab(page) {
  const { app, name } = page;
  const values = Object.fromEntries(FIGURES.map(([key]) => [key, h("dd", { class: "num" })]));
  const strip = h(
    "dl",
    { class: "facts strip" },
    FIGURES.map(([key, label, , title]) => h("div", { title }, h("dt", null, label), values[key])),
  );
  const depth = new Chart({
    title: "Depth",
    unit: "messages",
    show: count,
    whole: true,
    lines: [{ label: "Depth", tone: "depth", area: true }],
  });
  const flow = new Chart({
    title: "Flow",
    unit: "messages/s",
    show: rate,
    lines: [
      { label: "In", tone: "in" },
      { label: "Delivered", tone: "out" },
      { label: "Acknowledged", tone: "ack" },
    ],
  });
  api.queueSamples(name).then(
    (samples) => app.history.backfill(name, [samples]),
    () => null, // charts then begin now
  );
  const states = new StateBar(`Messages of ${name}`);
  const statesNote = h("span", { class: "soft" });
  const doctor = new DoctorCard(name);
  const bars = new PartitionBars();
  const byPartition = h(
    "div",
    { class: "by-partition" },
    h("h3", null, "By partition"),
    bars.element,
  );
  const groupsPlace = h("div", { class: "groups" });
  const groups = new Keyed(groupsPlace, (group) => new GroupCard(page, group.name));
  const none = noGroups(name);
  const groupHead = h("h2", { class: "section-head" }, "Consumer groups");
  const element = h(
    "div",
    null,
    strip,
    h("div", { class: "charts two" }, depth.element, flow.element),
    h(
      "div",
      { class: "two-columns" },
      h(
        "section",
        { class: "card", "aria-label": "Messages by state" },
        h("div", { class: "card-head" }, h("h2", null, "Messages by state"), statesNote),
        states.element,
        byPartition,
      ),
      doctor.element,
    ),
    groupHead,
    groupsPlace,
    none,
  );

  return {
    element,
    detail(detail) {
      showFigures(detail.stats);
      const waiting =
        detail.groups.length === 0
          ? { waiting: detail.stats.total_messages, delivered: 0, retrying: 0 }
          : sumOf(detail.groups.map((group) => group.ledger));
      states.update(waiting);
      setText(
        statesNote,
        detail.groups.length > 1 ? `summed over ${count(detail.groups.length)} groups` : "",
      );
      groups.show(
        detail.groups.map((group) => ({
          ...group,
          total: detail.stats.partitions,
          alone: detail.groups.length === 1,
          limits: detail.config,
        })),
        (group) => group.name,
      );
      none.hidden = detail.groups.length > 0;
      bars.update(detail.partitions);
      byPartition.hidden = detail.partitions.length < 2;
    },
    tick() {
      const stats = app.queues.get(name);
      if (stats) showFigures(stats);
      const of = (field) => app.history.of(name, field);
      depth.update([of("total_messages")], app.history.now());
      flow.update([of("enqueue_rate"), of("dequeue_rate"), of("ack_rate")], app.history.now());
    },
    refresh: () => doctor.load(),
    destroy() {
      depth.destroy();
      flow.destroy();
      doctor.destroy();
    },
  };

  function showFigures(stats) {
    for (const [key, , show] of FIGURES) setText(values[key], show(stats[key], stats));
    values.retrying.classList.toggle("is-warn", stats.retrying > 0);
    values.active_consumers.classList.toggle(
      "is-warn",
      stats.active_consumers === 0 && stats.total_messages > 0,
    );
  }
}

/** Only `delayed` may be missing: an older server counts those as waiting. */
function sumOf(ledgers) {
  const sums = { waiting: 0, delivered: 0, retrying: 0 };
  for (const ledger of ledgers) {
    for (const state of ["waiting", "delivered", "retrying", "delayed"])
      if (ledger[state] !== undefined) sums[state] = (sums[state] ?? 0) + ledger[state];
  }
  return sums;
}

function noGroups(name) {
  return empty(
    "No group consumes this queue yet",
    h(
      "p",
      null,
      "Its messages are stored for the first group. A group is created by its first " +
        "subscriber; the part of the client id before the last hyphen names it:",
    ),
    command(mosquitto("sub", `$queue/${name}`, "-i", "worker-1")),
  );
}
