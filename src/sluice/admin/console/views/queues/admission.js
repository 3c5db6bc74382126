// What keeps a queue or a group from delivering, in words: pauses, the breaker, limits.

import { count, localTime, plural, timeOf } from "../../base/format.js";

/** "by ann since 10:42:07: the mail server is down". */
export function pauseText(pause) {
  const reason = pause.reason ? `: ${pause.reason}` : "";
  return `by ${pause.by} since ${localTime(timeOf(pause.at))}${reason}`;
}

const STATES = {
  "queue-paused": ["Paused with its queue", "Nothing is delivered until the queue is resumed."],
  "breaker:open": [
    "Breaker open",
    "Its deliveries failed in a row. After a while one message is delivered as a probe.",
  ],
  "breaker:probing": [
    "Breaker probing",
    "One message is delivered as a probe: if it is acknowledged, the group goes on.",
  ],
  max_inflight: ["At its limit", "As many deliveries are in flight as limits.max_inflight allows."],
  max_rate: ["At its limit", "limits.max_rate is used up for the moment."],
  max_inflight_per_key: [
    "Keys at their limit",
    "Messages of some keys wait: limits.max_inflight_per_key is reached.",
  ],
  max_rate_per_key: [
    "Keys at their limit",
    "Messages of some keys wait: limits.max_rate_per_key is used up for the moment.",
  ],
};

/** The first reason why the group gets no message now: { state, why }, or null. */
export function stateOf(group) {
  if (group.pause) return { state: "Paused", why: pauseText(group.pause) };
  const reason = group.held_by?.[0];
  if (!reason) return null;
  const [state, why] = STATES[reason === "breaker" ? `breaker:${group.breaker}` : reason] ?? [
    "Held back",
    reason,
  ];
  return { state, why };
}

/** The limits of each group, as configured; "" if there are none. */
export function limitsText(config) {
  const limits = config.limits ?? {};
  const parts = [];
  if (limits.max_inflight) parts.push(`${count(limits.max_inflight)} in flight`);
  if (limits.max_rate) parts.push(limits.max_rate);
  if (limits.max_inflight_per_key) {
    parts.push(`${count(limits.max_inflight_per_key)} in flight per key`);
  }
  if (limits.max_rate_per_key) parts.push(`${limits.max_rate_per_key} per key`);
  const failures = config.breaker?.failures;
  if (failures) parts.push(`breaker after ${plural(failures, "failure")} in a row`);
  return parts.length ? `Limits: ${parts.join(", ")}` : "";
}
