// The form of a queue's settings: the path, kind and meaning of each setting. Only the server
// validates values; a setting that is not listed here is shown and cannot be edited.

/** @typedef {[string, string, string | string[], string?]} Field path, label, kind, meaning */

/** @type {{ title: string, fields: Field[] }[]} */
export const SECTIONS = [
  {
    title: "Queue",
    fields: [
      [
        "partitions",
        "Partitions",
        "int",
        "Limits how many consumers of a group work at once. It can grow.",
      ],
      [
        "ordering",
        "Order",
        ["none", "partition", "strict"],
        "partition: by key. strict: the whole queue, one partition.",
      ],
      [
        "partition_strategy",
        "Partition strategy",
        "text",
        "hash, or the name of an installed plug-in. It cannot change.",
      ],
      ["type", "Type", ["work", "compacted"], "compacted keeps the last message of each key."],
      [
        "bindings",
        "Bindings",
        "bindings",
        "Topic filters whose messages the queue stores as well; one per line.",
      ],
    ],
  },
  {
    title: "Retries",
    fields: [
      ["retry_policy.max_retries", "Retries", "int", "Failures beyond this make a dead letter."],
      ["retry_policy.initial_backoff", "First backoff", "text", "Before the first retry."],
      ["retry_policy.max_backoff", "Longest backoff", "text", ""],
      [
        "retry_policy.backoff_multiplier",
        "Multiplier",
        "number",
        "Each backoff is this much longer.",
      ],
      [
        "retry_policy.total_timeout",
        "Total time",
        "text",
        "From the first attempt; afterwards it becomes a dead letter.",
      ],
      ["retry_policy.jitter", "Jitter", "number", "0 to 1: the random share of the backoff."],
    ],
  },
  {
    title: "Dead letters",
    fields: [
      ["dlq_config.enabled", "Keep dead letters", "bool", ""],
      ["dlq_config.topic", "Dead-letter queue", "optional", "Empty: dlq/ and the queue's name."],
      [
        "dlq_config.invalid_topic",
        "Invalid-message queue",
        "optional",
        "For messages that consumers mark as invalid.",
      ],
      [
        "dlq_config.alert_webhook",
        "Alert webhook",
        "optional",
        "An address that receives a POST for each dead letter.",
      ],
      [
        "dlq_config.on_dead",
        "After a message died",
        ["continue", "hold-key"],
        "hold-key: later messages of its key wait until the dead letter is put back or discarded.",
      ],
      ["dlq_config.hold_timeout", "Hold a key for", "text", "0s: until it is repaired."],
    ],
  },
  {
    title: "Limits",
    fields: [
      ["limits.max_queue_depth", "Depth", "int", "Messages; Overflow says what happens beyond."],
      ["limits.overflow", "Overflow", ["reject", "drop-oldest", "dead-letter"], ""],
      ["limits.max_message_size", "Message size", "int", "Bytes."],
      ["limits.message_ttl", "Time to live", "text", "0s: forever."],
      ["limits.on_expiry", "On expiry", ["drop", "dead-letter"], ""],
      [
        "limits.retention",
        "Retention",
        "text",
        "How long settled messages are stored for replays.",
      ],
      [
        "limits.dedup_window",
        "Dedup window",
        "text",
        "A repeated message id within it is not stored again.",
      ],
    ],
  },
  {
    title: "Limits of each group",
    fields: [
      ["limits.max_inflight", "In flight", "optional", "Deliveries at once; empty: no limit."],
      ["limits.max_rate", "Rate", "optional", "Such as 100/s or 30/m burst 5; empty: no limit."],
      [
        "limits.max_inflight_per_key",
        "In flight per key",
        "optional",
        "Deliveries of one partition key at once; empty: no limit.",
      ],
      [
        "limits.max_rate_per_key",
        "Rate per key",
        "optional",
        "Of each partition key, such as 1/s; empty: no limit.",
      ],
      ["breaker.failures", "Breaker", "int", "Failures in a row that stop a group; 0: never."],
      ["breaker.window", "Window", "text", "The failures count if they are within this time."],
      ["breaker.open_for", "Open for", "text", "Then one message is delivered as a probe."],
    ],
  },
  {
    title: "Delivery",
    fields: [
      [
        "performance.delivery_timeout",
        "Deadline",
        "text",
        "For one delivery; a consumer may extend it.",
      ],
      ["performance.prefetch", "Prefetch", "int", "Unsettled deliveries for each consumer."],
      [
        "performance.rebalance_after",
        "Rebalance after",
        "text",
        "How long messages with a key wait for a consumer with capacity before their " +
          "partition moves.",
      ],
      [
        "performance.batch_size",
        "Batch",
        "int",
        "Messages of one key that may be in flight at once.",
      ],
      ["performance.compression", "Compression", ["none", "zstd"], ""],
      [
        "performance.durability",
        "Durability",
        ["sync", "interval"],
        "sync: on disk before the publisher is answered.",
      ],
    ],
  },
  {
    title: "Schema",
    fields: [["schema", "JSON Schema", "json", "For payloads; empty: any payload."]],
  },
];

export function valueAt(config, path) {
  return path.split(".").reduce((value, key) => value?.[key], config);
}

export function setAt(target, path, value) {
  const keys = path.split(".");
  const last = keys.pop();
  for (const key of keys) target = target[key] ??= {};
  target[last] = value;
}

/** Format a value for its input. */
export function shown(kind, value) {
  if (kind === "bindings")
    return (value ?? [])
      .map((one) =>
        typeof one === "string"
          ? one
          : Object.keys(one.headers ?? {}).length
            ? JSON.stringify(one)
            : one.topic,
      )
      .join("\n");
  if (kind === "json")
    return value === undefined || value === null ? "" : JSON.stringify(value, null, 2);
  return value === undefined || value === null ? "" : String(value);
}

/**
 * Parse an input to JSON. An unreadable value is sent as it is: the server explains the error
 * better.
 */
export function read(kind, text) {
  const given = text.trim();
  if (kind === "int" || kind === "number")
    return given !== "" && !Number.isNaN(Number(given)) ? Number(given) : given;
  if (kind === "optional") return given === "" ? null : given;
  if (kind === "json") return given === "" ? null : parsed(given);
  if (kind === "bindings")
    return given
      .split("\n")
      .map((row) => row.trim())
      .filter(Boolean)
      .map((row) => (row.startsWith("{") ? parsed(row) : row));
  return given;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/**
 * Split a refusal into errors by field, { "limits.max_queue_depth": "must be ..." }, and the rest.
 */
export function faultsOf(message, paths) {
  const byField = new Map();
  const rest = [];
  const problems = message.replace(/^.*cannot be used: /s, "").split("; ");
  let last = null; // the text of one error may contain a semicolon
  for (const problem of problems) {
    const path = paths.find(
      (one) => problem.startsWith(`${one} `) || problem.startsWith(`${one}.`),
    );
    const words = path ? problem.slice(path.length).trim() : problem;
    const named =
      path ??
      last ??
      paths.find((one) => new RegExp(`\\b${one.split(".").at(-1)}\\b`).test(problem));
    if (named) byField.set(named, [byField.get(named), words].filter(Boolean).join("; "));
    else rest.push(problem);
    last = path ?? last;
  }
  return { byField, rest };
}
