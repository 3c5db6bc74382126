// Formatting of numbers, sizes and times. Knows nothing of pages; every function returns text.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hour12: false,
});
const day = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "2-digit" });

export function count(value) {
  return whole.format(value ?? 0);
}

/** Per second: one decimal below 100, none above. */
export function rate(value) {
  const given = value ?? 0;
  if (given > 0 && given < 0.05) return "<0.1";
  return given < 100 ? given.toFixed(1) : whole.format(given);
}

/** For axes and tight places: 1.2k, 3.4M. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${tenth.format(value / 1e9)}G`;
  if (size >= 1e6) return `${tenth.format(value / 1e6)}M`;
  if (size >= 1e4) return `${tenth.format(value / 1e3)}k`;
  return size > 0 && size < 10 && value % 1 !== 0 ? tenth.format(value) : whole.format(value);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  let size = value ?? 0;
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? whole.format(size) : tenth.format(size)} ${UNITS[unit]}`;
}

/** A span of seconds in its two largest units: 3 d 4 h, 12 min 5 s, 340 ms. */
export function span(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "";
  const given = Math.max(0, seconds);
  if (given === 0) return "0 s";
  if (given < 0.9995) return `${Math.round(given * 1000)} ms`;
  if (given < 60)
    return `${given < 10 ? given.toFixed(1).replace(/\.0$/, "") : Math.round(given)} s`;
  const total = Math.round(given);
  /** @type {[number, string][]} */
  const parts = [
    [Math.floor(total / 86400), "d"],
    [Math.floor(total / 3600) % 24, "h"],
    [Math.floor(total / 60) % 60, "min"],
    [total % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  return parts
    .slice(first, first + 2)
    .filter(([amount]) => amount > 0)
    .map(([amount, unit]) => `${amount} ${unit}`)
    .join(" ");
}

/** Parse a time: ISO text, null for never, or seconds since 1970. */
export function timeOf(value) {
  if (value === null || value === undefined || value === "" || value === 0) return null;
  const date = typeof value === "number" ? new Date(value * 1000) : new Date(value);
  return Number.isNaN(date.getTime()) ? null : date;
}

/** Local time; the day only when it is not today. */
export function localTime(date, milliseconds = false) {
  const written =
    clock.format(date) +
    (milliseconds ? `.${String(date.getMilliseconds()).padStart(3, "0")}` : "");
  return date.toDateString() === new Date().toDateString()
    ? written
    : `${day.format(date)} ${written}`;
}

export function utcTime(date) {
  return `${date.toISOString().replace("T", " ").replace("Z", "")} UTC`;
}

/** Format the age of a time, for columns. */
export function ago(date, now = Date.now()) {
  const seconds = (now - date.getTime()) / 1000;
  if (seconds < 0) return `in ${span(-seconds)}`;
  return seconds < 1 ? "now" : `${span(seconds)} ago`;
}

/** [0, 1, 2, 5, 7, 8] as "0-2, 5, 7-8", with a dash that is read as a range. */
export function ranges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const runs = [];
  for (const number of sorted) {
    const last = runs.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([from, to]) => (from === to ? `${from}` : `${from}\u2013${to}`)).join(", ");
}

/** Turn a clause of the server into a sentence: a capital and a full stop. */
export function sentence(text) {
  const given = (text ?? "").trim();
  if (!given) return "";
  return given[0].toUpperCase() + given.slice(1) + (/[.!?:]$/.test(given) ? "" : ".");
}

export function plural(amount, one, many = `${one}s`) {
  return `${count(amount)} ${amount === 1 ? one : many}`;
}
