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
from sluice.admin.model import DeadLetterFilter, Diagnosis, Finding, Queue
from sluice.admin.queries.dead_letter_operations import DeadLetterScan
from sluice.admin.queries.diagnosis import phrases
from sluice.admin.queries.diagnosis.group_diagnosis import diagnose_group
from sluice.admin.queries.diagnosis.policy_findings import find_queue_pause
from sluice.admin.queries.diagnosis.recent_flow import RecentFlow
from sluice.message import decode_headers
from sluice.queues.service import GroupInspector, QueueInspector


async def diagnose(facade: BrokerFacade, flow: RecentFlow, name: str, group: str) -> Diagnosis:
    name = strip_queue_prefix(name)
    inspected = facade.inspector.find(name)
    if inspected is None:
        return Diagnosis(name, False, [_no_queue(facade.inspector.all_names(), name)])
    queue = inspected.view()
    groups = inspected.groups()
    chosen = [one for one in groups if one.name == group] if group else groups
    findings: list[Finding] = []
    if group and not chosen:
        findings.append(_no_such_group(queue.name, groups, group))
    elif not groups:
        findings.append(_no_group(queue) if queue.total_messages else _empty_queue(inspected))
    else:
        findings += _diagnose_groups(flow, inspected, chosen, bool(group), facade.engine.now)
    if inspected.is_full():
        findings.append(_full(queue))
    dead = await _diagnose_dead_letters(facade, queue, group)
    if dead is not None:
        now = facade.engine.now
        is_fault = any(flow.loses_messages(one, now) for one in chosen or groups)
        _insert_dead_letters(findings, replace(dead, is_fault=is_fault))
    harmless_codes = ["standby", "dead-letters"]
    if any(one.waiting() for one in groups):
        harmless_codes.append("consumer-away")  # of one consumer while others work
    if all(finding.code in harmless_codes and not finding.is_fault for finding in findings):
        findings.insert(0, _flowing(queue))
    findings[:0] = find_queue_pause(queue, facade.engine.now)
    return Diagnosis(name, not any(finding.is_fault for finding in findings), findings)


# ---- the queue


def _no_queue(names: list[str], name: str) -> Finding:
    similar = get_close_matches(name, names, 3, 0.6)
    what = f"there is no queue {name!r}"
    if similar:
        return Finding(
            "no-queue",
            f"{what}; similar names: {', '.join(similar)}",
            phrases.doctor_command(similar[0]),
        )
    return Finding("no-queue", what, phrases.create_queue_command(name))


def _empty_queue(inspected: QueueInspector) -> Finding:
    """Report an empty queue and how it became empty."""
    queue = inspected.view()
    if queue.enqueued == 0:
        refused = (
            f"; {phrases.pluralize(queue.refused, 'publish', 'publishes')} refused"
            if queue.refused
            else ""
        )
        bindings = inspected.rules().bindings
        if bindings:
            return Finding(
                "nothing-captured",
                "no message was published yet that the queue captures: none has arrived on"
                f" {', '.join(bindings)}{refused}",
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
        f" {phrases.count_messages(queue.enqueued, 'came and was', 'came and were')} settled",
        "",
        is_fault=False,
    )


def _no_group(queue: Queue) -> Finding:
    return Finding(
        "no-group",
        f"{phrases.count_messages(queue.total_messages, 'waits', 'wait')}, and no consumer has ever"
        " subscribed: there is no group",
        phrases.start_first_worker_hint(queue.name),
    )


def _no_such_group(queue: str, groups: list[GroupInspector], name: str) -> Finding:
    names = [group.name for group in groups]
    busy = [group.name for group in groups if group.members()]
    similar = get_close_matches(name, names, 1, 0.6)
    if busy:
        return Finding(
            "wrong-group",
            f"there is no group {name!r}; consumers are in {', '.join(busy)}",
            phrases.doctor_command(queue, similar[0] if similar else busy[0]),
        )
    if similar:
        return Finding(
            "wrong-group",
            f"there is no group {name!r}; similar name: {similar[0]}",
            phrases.doctor_command(queue, similar[0]),
        )
    others = f"; the queue has {', '.join(names)}" if names else ", nor any other group"
    return Finding(
        "no-group",
        f"there is no group {name!r}{others}",
        phrases.start_first_worker_hint(queue, name),
    )


def _full(queue: Queue) -> Finding:
    return Finding(
        "full",
        f"the queue is full at {phrases.pluralize(queue.total_messages, 'message')}"
        " and refuses publishes" + (f": {queue.refused:,} so far" if queue.refused else ""),
        phrases.configure_command(queue.name, "limits.max_queue_depth", str(2 * queue.max_depth)),
    )


def _flowing(queue: Queue) -> Finding:
    return Finding(
        "flowing",
        f"messages flow: {queue.enqueue_rate:g}/s in, {queue.dequeue_rate:g}/s delivered,"
        f" {queue.ack_rate:g}/s acknowledged, {queue.total_messages:,} waiting or in delivery",
        "",
        is_fault=False,
    )


# ---- groups


def _diagnose_groups(
    flow: RecentFlow,
    queue: QueueInspector,
    chosen: list[GroupInspector],
    is_one: bool,
    now: float,
) -> list[Finding]:
    """Diagnose one group or all: those with a backlog first, the largest first."""
    behind = sorted([one for one in chosen if one.lag()], key=_lag_of, reverse=True)
    findings: list[Finding] = []
    for group in behind:
        findings += diagnose_group(flow, group, now, include_name=len(queue.groups()) > 1)
    if behind:
        return findings
    depth = phrases.pluralize(queue.depth(), "message")
    started_after = [group for group in chosen if not group.has_enqueued()]
    if queue.depth() and started_after:
        group = started_after[0]
        return [
            Finding(
                "began-behind",
                f"group {group.name} starts after the stored messages ({depth}) and gets only"
                " new ones",
                phrases.seek_command(queue.name, group.name, "earliest"),
            )
        ]
    if queue.depth() and is_one:
        return [
            Finding(
                "empty",
                f"group {chosen[0].name} has settled its messages; the rest is for other groups",
                "",
                is_fault=False,
            )
        ]
    findings = [_empty_queue(queue)]
    if queue.enqueued() and not any(group.members() for group in chosen):
        name = chosen[0].name
        findings.append(
            Finding(
                "no-consumer",
                f"group {name} has no consumers",
                phrases.start_worker_hint(queue.name, name),
                is_fault=False,
            )
        )
    return findings


def _lag_of(group: GroupInspector) -> int:
    return group.lag()


# ---- dead letters


async def _diagnose_dead_letters(facade: BrokerFacade, queue: Queue, group: str) -> Finding | None:
    """Report the number and reasons of dead letters, with the description of the last one."""
    if not queue.dead or not any(
        one.depth() for one in facade.inspector.dead_letter_queues_of(queue.name)
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
