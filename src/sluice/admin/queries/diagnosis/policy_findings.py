"""The part of the diagnosis that explains pauses, open breakers and reached limits."""

from __future__ import annotations

from sluice.admin.model import Finding, Pause, Queue
from sluice.admin.queries.diagnosis import phrases
from sluice.queues.service import GroupInspector, views


def find_queue_pause(queue: Queue, now: float) -> list[Finding]:
    command = phrases.format_command("queue", "resume", queue.name)
    return _describe_pause(queue.pause, f"queue {queue.name}", command, now)


def find_closed_by_policy(inspected: GroupInspector, now: float) -> list[Finding]:
    """Return which policies of the group keep it from delivering; a pause of the queue is none."""
    group = inspected.view()
    queue = inspected.queue
    rules = inspected.rules
    findings = _describe_pause(
        group.pause,
        f"group {group.name}",
        phrases.format_command("group", "resume", queue, group.name),
        now,
    )
    if "breaker" in group.held_by:
        findings.append(
            Finding(
                "breaker-open",
                f"the breaker of group {group.name} is {group.breaker}:"
                f" {phrases.pluralize(int(rules.breaker_failures), 'delivery', 'deliveries')}"
                " failed in a row",
                "Repair what the workers depend on. After"
                f" {phrases.format_duration(rules.breaker_open_for)} one message is delivered as a"
                " probe",
            )
        )
    limits = {
        "max_inflight": phrases.pluralize(int(rules.max_in_flight), "delivery", "deliveries")
        + " in flight",
        "max_rate": f"{rules.max_rate:g} deliveries per second",
    }
    for name, limit in limits.items():
        if name in group.held_by:
            findings.append(
                Finding(
                    "limited",
                    f"group {group.name} delivers as much as limits.{name} allows: {limit}",
                    "If its workers can take more: "
                    + phrases.configure_command(queue, f"limits.{name}", "null"),
                    is_fault=False,
                )
            )
    return findings


def find_held_keys(inspected: GroupInspector, now: float) -> list[Finding]:
    """Name the keys that wait for the repair of a dead letter, the first ones one by one."""
    held = inspected.held_keys()
    if not held:
        return []
    shown = ", ".join(f"{one.key!r} (since {one.message_id} died)" for one in held[:5])
    more = ", ..." if len(held) > 5 else ""
    waiting = sum(one.waiting for one in held)
    first = held[0]
    return [
        Finding(
            "keys-held",
            f"group {inspected.name} holds {phrases.pluralize(len(held), 'key')} for repair:"
            f" {shown}{more}; {phrases.count_messages(waiting, 'waits', 'wait')}",
            describe_hold_remedy(inspected.queue, first, now),
        )
    ]


def find_limited_keys(inspected: GroupInspector) -> list[Finding]:
    """Return that messages of some keys wait for a limit of their key."""
    count = inspected.limited_keys()
    if not count:
        return []
    rules = inspected.rules
    limits = []
    if rules.max_in_flight_per_key:
        limits.append(f"limits.max_inflight_per_key ({rules.max_in_flight_per_key})")
    if rules.max_rate_per_key:
        limits.append(f"limits.max_rate_per_key ({rules.max_rate_per_key:g} per second)")
    return [
        Finding(
            "keys-limited",
            f"messages of {phrases.pluralize(count, 'key')} wait in group {inspected.name} for"
            f" {' or '.join(limits)}",
            "If workers can take more of a key, raise the limit",
            is_fault=False,
        )
    ]


def describe_hold_remedy(queue: str, held: views.HeldKey, now: float) -> str:
    """Say what ends the hold of a key."""
    if not held.dead_letters:
        return f"{held.message_id} was put back: the key goes on when it is settled"
    until = (
        f"; otherwise it goes on at {phrases.format_time(held.releases_at, now)}"
        if held.releases_at
        else ""
    )
    return (
        f"Put the dead letter back, repaired if needed, or discard it:"
        f" `{phrases.format_command('dlq', 'list', queue)}`, then `sluice dlq retry` or"
        f" `sluice dlq purge`{until}"
    )


def _describe_pause(pause: Pause | None, what: str, command: str, now: float) -> list[Finding]:
    if pause is None:
        return []
    reason = f": {pause.reason}" if pause.reason else ""
    age = phrases.format_duration(max(0.0, now - pause.at))
    return [
        Finding(
            "paused",
            f"{what} was paused by {pause.by} {age} ago{reason}",
            command,
            is_fault=False,
        )
    ]
