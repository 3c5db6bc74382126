// All queues at a glance: the node's figures, charts, and a row of live figures for each queue. A
// thousand queues are shown page by page, and a tick rewrites only changed figures.

import { createQueue } from "../parts/actions.js";
import { Chart } from "../charts/charts.js";
import { mosquitto } from "../base/commands.js";
import { h, replace, setText } from "../base/dom.js";
import { bytes, count, rate, span, timeOf } from "../base/format.js";
import { command, loading, pageHead } from "../parts/widgets.js";
import { QueueTable } from "./queues/queue_table.js";

export function overviewPage(app) {
  const charts = [
    new Chart({
      title: "Queue flow",
      unit: "messages/s",
      show: rate,
      lines: [
        { label: "In", tone: "in" },
        { label: "Delivered", tone: "out" },
        { label: "Acknowledged", tone: "ack" },
      ],
    }),
    new Chart({
      title: "Messages in queues",
      unit: "",
      show: count,
      whole: true,
      lines: [{ label: "Depth of all queues", tone: "depth", area: true }],
    }),
    new Chart({
      title: "MQTT publishes",
      unit: "messages/s",
      show: rate,
      lines: [
        { label: "Received", tone: "in" },
        { label: "Sent", tone: "out" },
      ],
    }),
  ];
  const values = Object.fromEntries(
    [
      "node",
      "version",
      "store",
      "up",
      "connections",
      "sessions",
      "messages",
      "consumers",
      "deadLetters",
      "bytes",
    ].map((key) => [key, h("dd", { class: "num" }, "\u2013")]),
  );
  const fact = (label, key, title) => h("div", { title }, h("dt", null, label), values[key]);
  const strip = h(
    "dl",
    { class: "facts strip" },
    fact("Node", "node"),
    fact("Version", "version"),
    fact("Store", "store"),
    fact("Up for", "up"),
    fact("Connections", "connections", "Clients connected now"),
    fact("Sessions", "sessions", "Of connected and of disconnected clients"),
    fact("Messages", "messages", "Messages stored in all queues"),
    fact("Size", "bytes", "Bytes stored in all queues"),
    fact("Consumers", "consumers"),
    fact("Dead letters", "deadLetters"),
  );
  const table = new QueueTable(app);
  const place = h("div", null, loading("queues"));
  const element = h(
    "div",
    { class: "page" },
    pageHead("Queues", { actions: [app.button("Create a queue", "admin", createQueue)] }),
    strip,
    h(
      "div",
      { class: "charts three" },
      charts.map((chart) => chart.element),
    ),
    place,
  );
  let shown = "";

  function showFacts() {
    const node = app.node;
    const queues = [...app.queues.values()];
    const sum = (key) => queues.reduce((total, queue) => total + queue[key], 0);
    const started = timeOf(node.started_at);
    const now = timeOf(node.now) ?? new Date();
    setText(values.node, node.name);
    setText(values.version, node.version);
    setText(values.store, node.store);
    setText(values.up, started ? span((now.getTime() - started.getTime()) / 1000) : "\u2013");
    setText(values.connections, count(node.connections));
    setText(values.sessions, count(node.sessions));
    setText(values.messages, count(node.messages));
    setText(values.bytes, bytes(sum("bytes")));
    setText(values.consumers, count(sum("active_consumers")));
    const deadLetters = queues
      .filter((queue) => queue.is_dead_letters)
      .reduce((total, queue) => total + queue.total_messages, 0);
    setText(values.deadLetters, count(deadLetters));
  }

  return {
    title: "Queues",
    element,
    tick() {
      showFacts();
      const of = (field) => app.history.of(null, field);
      charts[0].update([of("enqueue_rate"), of("dequeue_rate"), of("ack_rate")], app.history.now());
      charts[1].update([of("total_messages")], app.history.now());
      charts[2].update([of("publishes_in"), of("publishes_out")], app.history.now());
      const kind = app.queues.size ? "table" : "empty";
      if (kind !== shown) {
        shown = kind;
        replace(place, kind === "table" ? table.element : teach(app));
      }
      if (kind === "table") table.update();
    },
    destroy() {
      charts.forEach((chart) => chart.destroy());
    },
  };
}

/** The next steps on a broker without queues; and how to add users where none exist. */
function teach(app) {
  const step = (title, text, ...lines) =>
    h("li", null, h("h3", null, title), h("p", { class: "soft" }, text), lines.map(command));
  const steps = [
    step(
      "Publish a message",
      "Any MQTT client will do. The first message creates the queue with the settings of the " +
        "matching template; it appears here at once.",
      mosquitto("pub", "$queue/tasks", "-m", "'resize cat.png'"),
    ),
    step(
      "Consume it",
      "A subscription joins a consumer group. The broker delivers, waits for the " +
        "acknowledgement, and retries what fails.",
      mosquitto("sub", "$queue/tasks", "-i", "worker-1", "-C", "1"),
    ),
  ];
  if (app.who?.anonymous)
    steps.push(
      step(
        "Add a user",
        "This broker accepts every client on this machine. Before other machines may connect, " +
          "create a user, and start the broker again with the file and the options that it has " +
          "now. The console then asks for the user name and the password.",
        "sluice user add admin --role admin --file users.toml",
        "SLUICE_AUTH__USERS=users.toml sluice serve",
      ),
    );
  return h(
    "section",
    { class: "empty", "aria-label": "First steps" },
    h("h2", null, "No queues yet: the next steps"),
    h("ol", { class: "steps" }, steps),
  );
}
