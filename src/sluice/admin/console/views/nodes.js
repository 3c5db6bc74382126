// The nodes of this broker: version, uptime and load of each; and in a cluster, the owners of
// cells.

import { api, listOf } from "../api/api.js";
import { h, replace } from "../base/dom.js";
import { bytes, count, span, timeOf } from "../base/format.js";
import { facts, failed, loading, pageHead, table, tag, time } from "../parts/widgets.js";

const EVERY = 5000;

export function nodesPage() {
  const place = h("div", { class: "cards" }, loading("nodes"));
  let alive = true;
  let timer = 0;
  const load = async () => {
    try {
      const [nodes, cluster] = await Promise.all([api.nodes(), api.cluster()]);
      const cards = listOf(nodes, "nodes").map(card);
      if (alive) replace(place, cluster.enabled ? [clusterCard(cluster), ...cards] : cards);
    } catch (fault) {
      if (alive) replace(place, failed(fault, load));
    }
    if (alive) timer = setTimeout(load, EVERY);
  };
  load();
  return {
    title: "Nodes",
    element: h("div", { class: "page" }, pageHead("Nodes"), place),
    destroy() {
      alive = false;
      clearTimeout(timer);
    },
  };
}

function clusterCard(cluster) {
  const moving = cluster.cells.filter((cell) => cell.node !== cell.wanted);
  return h(
    "section",
    { class: "card", "aria-label": `Cluster ${cluster.name}` },
    h(
      "div",
      { class: "card-head" },
      h("h2", null, `Cluster ${cluster.name}`),
      moving.length === 0
        ? tag("every cell is at its planned owner", "good")
        : tag(`${count(moving.length)} of ${count(cluster.cells.length)} cells are moving`, "warn"),
    ),
    table(
      "Nodes of the cluster",
      [
        { label: "Node" },
        { label: "Cells", number: true },
        { label: "MQTT" },
        { label: "Up since" },
        { label: "Not reached by" },
      ],
      cluster.nodes.map((node) =>
        h(
          "tr",
          null,
          h("th", { scope: "row" }, node.name, node.name === cluster.me ? " (this node)" : null),
          h("td", { class: "num" }, count(node.cells)),
          h("td", null, h("code", null, node.mqtt || "\u2013")),
          h("td", null, time(node.started_at)),
          h(
            "td",
            null,
            node.suspected_by.length ? tag(node.suspected_by.join(", "), "bad") : "\u2013",
          ),
        ),
      ),
    ),
    moving.length === 0
      ? null
      : table(
          "Moving cells",
          [{ label: "Cell", number: true }, { label: "Owner" }, { label: "Moves to" }],
          moving.map((cell) =>
            h(
              "tr",
              null,
              h("td", { class: "num" }, String(cell.cell)),
              h("td", null, cell.node || "none"),
              h("td", null, cell.wanted),
            ),
          ),
          { quiet: false },
        ),
  );
}

function card(node) {
  const started = timeOf(node.started_at);
  const now = timeOf(node.now) ?? new Date();
  const skew = (now.getTime() - Date.now()) / 1000;
  return h(
    "section",
    { class: "card", "aria-label": `Node ${node.name}` },
    h(
      "div",
      { class: "card-head" },
      h("h2", null, node.name),
      node.stopping ? tag("stopping", "warn") : tag("running", "good"),
    ),
    facts(
      [
        ["Version", `${node.version} (${node.build})`],
        ["Store", h("code", null, node.store)],
        ["Started", time(node.started_at)],
        ["Up for", started ? span((now.getTime() - started.getTime()) / 1000) : "\u2013"],
        [
          "Clock",
          Math.abs(skew) < 2
            ? "agrees with this browser"
            : `${span(Math.abs(skew))} ${skew > 0 ? "ahead of" : "behind"} this browser`,
        ],
      ],
      "columns",
    ),
    h("div", { class: "node-tables" }, carries(node), sinceStart(node)),
  );
}

function carries(node) {
  return figures(
    "Current load",
    ["Now"],
    [
      ["Connections", count(node.connections)],
      ["Sessions", count(node.sessions)],
      ["Subscriptions to plain topics", count(node.subscriptions)],
      ["Retained messages", count(node.retained)],
      ["Queues", count(node.queues)],
      ["Messages in queues", count(node.messages)],
    ],
  );
}

function sinceStart(node) {
  return figures(
    "Since it started",
    ["Received", "Sent"],
    [
      ["Publishes", count(node.publishes_received), count(node.publishes_sent)],
      ["Packets", count(node.packets_received), count(node.packets_sent)],
      ["Bytes", bytes(node.bytes_received), bytes(node.bytes_sent)],
      ["Dropped for slow subscribers", "", count(node.publishes_dropped)],
    ],
  );
}

function figures(caption, columns, rows) {
  const head = h(
    "tr",
    null,
    h("td"),
    columns.map((label) => h("th", { scope: "col", class: "num" }, label)),
  );
  return h(
    "table",
    { class: "pairs figures" },
    h("caption", null, caption),
    h("thead", null, head),
    h("tbody", null, rows.map(row)),
  );
}

function row([label, ...values]) {
  return h(
    "tr",
    null,
    h("th", { scope: "row" }, label),
    values.map((value) => h("td", { class: "num" }, value)),
  );
}
