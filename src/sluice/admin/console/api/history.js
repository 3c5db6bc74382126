// Samples of the live stream for charts: the last five minutes of each queue and of the node, one
// per second. All series share one ring of times, so a queue costs only its numbers. Times are
// those of the broker's clock: two samples that arrive together are still a second apart. A rate
// needs two samples; the first rate, which the broker reports as 0, is not drawn. What happened
// before the page was opened comes from the broker, one sample per five seconds.

export const SAMPLES = 300;
const FIELDS = ["total_messages", "enqueue_rate", "dequeue_rate", "ack_rate"];

class Series {
  constructor(fields) {
    this.values = Object.fromEntries(
      fields.map((field) => [field, new Float64Array(SAMPLES).fill(NaN)]),
    );
    this.seen = 0;
  }
}

export class History {
  constructor() {
    this.times = new Float64Array(SAMPLES).fill(NaN);
    this.at = -1; // index of the newest sample
    this.ticks = 0;
    this.queues = new Map();
    this.whole = new Series([...FIELDS, "publishes_in", "publishes_out"]);
    this.counters = null;
    this.node = "";
    this.arrivedAt = 0;
    this.past = new Map(); // by queue, null for all: { field: [[time, value]] } from the broker
  }

  /** Use the samples that the broker has; `parts`: those of each node, summed. */
  backfill(name, parts) {
    const fields = {};
    for (const part of parts)
      for (const field of Object.keys(part).filter((key) => Array.isArray(part[key]))) {
        if (field === "times") continue;
        const sums = (fields[field] ??= new Map());
        part.times.forEach((time, nth) => {
          const value = part[field][nth];
          if (value === null) return;
          const slot = parts.length > 1 ? Math.round(time / 5) * 5 : time;
          sums.set(slot, (sums.get(slot) ?? 0) + value);
        });
      }
    const series = Object.entries(fields).map(([field, sums]) => [
      field,
      [...sums].sort(([a], [b]) => a - b).map(([time, value]) => [time * 1000, value]),
    ]);
    this.past.set(name, Object.fromEntries(series));
  }

  /** The time now by the broker's clock, which may differ from the browser's. */
  now() {
    if (this.at < 0) return Date.now();
    return this.times[this.at] + Math.max(0, Date.now() - this.arrivedAt);
  }

  /** Add one event of the stream; after a reconnect the broker may send the same sample again. */
  add(node, queues, now = Date.parse(node.now)) {
    const last = this.at < 0 ? -Infinity : this.times[this.at];
    if (now < last || node.name !== this.node) this.counters = null;
    if (now < last) this.times.fill(NaN); // the clock was set back, or another node answers
    this.node = node.name;
    this.arrivedAt = Date.now();
    if (now !== last) {
      this.at = (this.at + 1) % SAMPLES;
      this.ticks += 1;
    }
    this.times[this.at] = now;
    const sums = { total_messages: 0, enqueue_rate: 0, dequeue_rate: 0, ack_rate: 0 };
    for (const queue of queues) {
      let series = this.queues.get(queue.name);
      const isNew = !series;
      if (isNew) this.queues.set(queue.name, (series = new Series(FIELDS)));
      for (const field of FIELDS) {
        series.values[field][this.at] = isNew && field !== "total_messages" ? NaN : queue[field];
        sums[field] += queue[field];
      }
      series.seen = this.ticks;
    }
    if (this.ticks === 1)
      for (const field of FIELDS) if (field !== "total_messages") sums[field] = NaN;
    for (const [name, series] of this.queues) {
      if (series.seen === this.ticks) continue;
      for (const field of FIELDS) series.values[field][this.at] = NaN;
      if (this.ticks - series.seen > SAMPLES) this.queues.delete(name);
    }
    const flow = this.#flow(node, now);
    for (const [field, value] of Object.entries({ ...sums, ...flow }))
      this.whole.values[field][this.at] = value;
  }

  /** Turn counters of the node into rates; a counter that fell means a restart, and no rate. */
  #flow(node, now) {
    const before = this.counters;
    if (before?.now === now) return {};
    this.counters = { now, received: node.publishes_received, sent: node.publishes_sent };
    const seconds = before ? (now - before.now) / 1000 : 0;
    if (seconds <= 0 || seconds > 5 || node.publishes_received < before.received)
      return { publishes_in: NaN, publishes_out: NaN };
    return {
      publishes_in: (node.publishes_received - before.received) / seconds,
      publishes_out: Math.max(0, node.publishes_sent - before.sent) / seconds,
    };
  }

  /** Return the samples of a field, oldest first, as [time, value], without missing ones. */
  of(name, field, last = SAMPLES) {
    const series = name === null ? this.whole : this.queues.get(name);
    const points = [];
    if (!series) return points;
    const values = series.values[field];
    const now = this.now();
    for (let nth = SAMPLES - last + 1; nth <= SAMPLES; nth += 1) {
      const index = (this.at + nth) % SAMPLES;
      if (!Number.isNaN(values[index]) && !Number.isNaN(this.times[index]))
        points.push([this.times[index], values[index]]);
    }
    const begin = points[0]?.[0] ?? now;
    const past = (this.past.get(name)?.[field] ?? []).filter(
      ([time]) => time < begin && now - time < last * 1000,
    );
    return [...past, ...points];
  }
}
