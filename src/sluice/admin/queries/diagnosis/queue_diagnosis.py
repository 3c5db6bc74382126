"""The diagnosis: why nothing arrives, with the cause first and the command that helps.

The order of the checks is the order of the findings. A message must exist, a group must want it,
the group must have a consumer, the consumer must be able to take it, and the message must be
deliverable. The first check that fails is the cause; its consequences are not reported. Each
finding has a stable code.

Whether dead letters and retries are faults depends on what the group has settled in the last
minutes, so that the verdict on a healthy queue does not change from one moment to the next.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from sluice.admin.broker_facade import BrokerFacade, strip_queue_prefix
from sluice.admin.model import DeadLetterFilter, Diagnosis, Finding
from sluice.admin.queries.dead_letter_operations import DeadLetterScan, dead_letter_queues_of
from sluice.admin.queries.diagnosis import phrases
from sluice.admin.queries.diagnosis.group_diagnosis import diagnose_group, group_lag
from sluice.admin.queries.diagnosis.policy_findings import find_queue_pause
from sluice.admin.queries.diagnosis.recent_flow import RecentFlow
from sluice.admin.queries.view_builders import QueueIndex
from sluice.message import decode_headers
from sluice.queues.model import REJECT_NEW, Group, Queue
from sluice.queues.service import QueueCounters


async def diagnose(
    facade: BrokerFacade, queue_index: QueueIndex, flow: RecentFlow, name: str, group: str
) -> Diagnosis:
    name = strip_queue_prefix(name)
    queue = facade.engine.queues.get(name)
    if queue is None:
        return Diagnosis(name, False, [_no_queue(queue_index, name)])
    stats = facade.queue_handler.service.collect_counters(queue)
    findings: list[Finding] = []
    chosen = queue.groups.get(group) if group else None
    if group and chosen is None:
        findings.append(_no_such_group(queue, group))
    elif not queue.groups:
        findings.append(_no_group(queue) if queue.depth else _empty_queue(queue))
    else:
        findings += _diagnose_groups(facade, flow, queue, chosen)
    if queue.depth >= queue.rules.max_depth and queue.rules.overflow == REJECT_NEW:
        findings.append(_full(queue))
    dead = await _diagnose_dead_letters(facade, queue, group)
    if dead is not None:
        judged = queue.groups.values() if chosen is None else (chosen,)
        dead = replace(
            dead, is_fault=any(flow.loses_messages(one, facade.engine.now) for one in judged)
        )
        _insert_dead_letters(findings, dead)
    harmless_codes = ["standby", "dead-letters"]
    if any(int(cursor.count_waiting()) for one in queue.groups.values() for cursor in one.cursors):
        harmless_codes.append("consumer-away")  # of one consumer while others work
    if all(finding.code in harmless_codes and not finding.is_fault for finding in findings):
        findings.insert(0, _flowing(queue, stats))
    findings[:0] = find_queue_pause(queue, facade.engine.now)
    return Diagnosis(name, not any(finding.is_fault for finding in findings), findings)


# ---- the queue


def _no_queue(queue_index: QueueIndex, name: str) -> Finding:
    similar = get_close_matches(name, queue_index.all_names(), 3, 0.6)
    what = f"there is no queue {name!r}"
    if similar:
        return Finding(
            "no-queue",
            f"{what}; similar names: {', '.join(similar)}",
            phrases.doctor_command(similar[0]),
        )
    return Finding("no-queue", what, phrases.create_queue_command(name))


def _empty_queue(queue: Queue) -> Finding:
    """Report an empty queue and how it became empty."""
    if queue.enqueued == 0:
        refused = (
            f"; {phrases.pluralize(int(queue.refused), 'publish', 'publishes')} refused"
            if queue.refused
            else ""
        )
        if queue.rules.bindings:
            filters = ", ".join(queue.rules.bindings)
            return Finding(
                "nothing-captured",
                "no message was published yet that the queue captures: none has arrived on"
                f" {filters}{refused}",
                phrases.format_command("queue", "config", queue.name),
            )
        return Finding(
            "never-published",
            f"nothing was ever published here{refused}",
            phrases.publish_command(queue.name),
        )
    return Finding(
        "empty",
        "the queue is empty:"
        f" {phrases.count_messages(int(queue.enqueued), 'came and was', 'came and were')} settled",
        "",
        is_fault=False,
    )


def _no_group(queue: Queue) -> Finding:
    return Finding(
        "no-group",
        f"{phrases.count_messages(int(queue.depth), 'waits', 'wait')}, and no consumer has ever"
        " subscribed: there is no group",
        phrases.start_first_worker_hint(queue.name),
    )


def _no_such_group(queue: Queue, name: str) -> Finding:
    busy = [group.name for group in queue.groups.values() if group.consumers]
    similar = get_close_matches(name, list(queue.groups), 1, 0.6)
    if busy:
        return Finding(
            "wrong-group",
            f"there is no group {name!r}; consumers are in {', '.join(busy)}",
            phrases.doctor_command(queue.name, similar[0] if similar else busy[0]),
        )
    if similar:
        return Finding(
            "wrong-group",
            f"there is no group {name!r}; similar name: {similar[0]}",
            phrases.doctor_command(queue.name, similar[0]),
        )
    other_groups = (
        f"; the queue has {', '.join(queue.groups)}" if queue.groups else ", nor any other group"
    )
    return Finding(
        "no-group",
        f"there is no group {name!r}{other_groups}",
        phrases.start_first_worker_hint(queue.name, name),
    )


def _full(queue: Queue) -> Finding:
    return Finding(
        "full",
        f"the queue is full at {phrases.pluralize(int(queue.depth), 'message')}"
        " and refuses publishes" + (f": {int(queue.refused):,} so far" if queue.refused else ""),
        phrases.configure_command(
            queue.name, "limits.max_queue_depth", str(2 * int(queue.rules.max_depth))
        ),
    )


def _flowing(queue: Queue, stats: QueueCounters) -> Finding:
    rates = stats.rates
    return Finding(
        "flowing",
        f"messages flow: {rates.enqueued:g}/s in, {rates.delivered:g}/s delivered,"
        f" {rates.acked:g}/s acknowledged, {int(queue.depth):,} waiting or in delivery",
        "",
        is_fault=False,
    )


# ---- groups


def _diagnose_groups(
    facade: BrokerFacade, flow: RecentFlow, queue: Queue, chosen: Group | None
) -> list[Finding]:
    """Diagnose one group or all: those with a backlog first, the largest first."""
    groups = (
        [chosen]
        if chosen is not None
        else sorted(queue.groups.values(), key=group_lag, reverse=True)
    )
    findings: list[Finding] = []
    for group in groups:
        if group_lag(group):
            findings += diagnose_group(facade, flow, group, include_name=len(queue.groups) > 1)
    if findings or any(group_lag(group) for group in groups):
        return findings
    started_after = [
        group for group in groups if not any(cursor.count_enqueued() for cursor in group.cursors)
    ]
    if queue.depth and started_after:
        group = started_after[0]
        return [
            Finding(
                "began-behind",
                f"group {group.name} starts after the stored messages"
                f" ({phrases.pluralize(int(queue.depth), 'message')}) and gets only new ones",
                phrases.seek_command(queue.name, group.name, "earliest"),
            )
        ]
    if chosen is not None and queue.depth:
        return [
            Finding(
                "empty",
                f"group {chosen.name} has settled its messages; the rest is for other groups",
                "",
                is_fault=False,
            )
        ]
    findings = [_empty_queue(queue)]
    if queue.enqueued and not any(group.consumers for group in groups):
        name = groups[0].name
        findings.append(
            Finding(
                "no-consumer",
                f"group {name} has no consumers",
                phrases.start_worker_hint(queue.name, name),
                is_fault=False,
            )
        )
    return findings


# ---- dead letters


async def _diagnose_dead_letters(facade: BrokerFacade, queue: Queue, group: str) -> Finding | None:
    """Report the number and reasons of dead letters, with the description of the last one."""
    if not queue.dead_by_reason or not any(
        dead_letter_queue.depth for dead_letter_queue in dead_letter_queues_of(facade, queue.name)
    ):
        return None
    count = 0
    last: dict[str, str] = {}
    reasons: dict[str, int] = {}
    async for _, dead_letter in DeadLetterScan(
        facade, queue.name, DeadLetterFilter(group=group)
    ).scan():
        count += 1
        last = dict(decode_headers(dead_letter.headers))
        reason = last.get("dead-reason", "")
        reasons[reason] = reasons.get(reason, 0) + 1
        if count >= 10_000:
            break
    if not count:
        return None
    reason_counts = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
    description = last.get("dead-description", "")
    prefix = "at least " if count >= 10_000 else ""
    return Finding(
        "dead-letters",
        f"{prefix}{phrases.count_messages(count, 'was', 'were')} dead-lettered ({reason_counts});"
        f" the last one at {last.get('dead-at', '')}"
        + (f" with description: {description}" if description else ""),
        f"{phrases.list_dead_letters_command(queue.name)}\n"
        f"{phrases.retry_dead_letters_command(queue.name)}",
    )


def _insert_dead_letters(findings: list[Finding], dead: Finding) -> None:
    """Put the dead letters first if nothing else waits, otherwise last."""
    if (
        all(
            finding.code in ("empty", "no-consumer") and not finding.is_fault
            for finding in findings
        )
        and findings
    ):
        findings.insert(0, dead)
    else:
        findings.append(dead)
