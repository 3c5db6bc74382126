"""Why nothing arrives: the first true reason, and the command that helps.

The order of the questions is the order of the answers. A message must be there, a group must want it, somebody must
consume for that group, that consumer must be able to take it, and the message must be allowed to go: the first of these
that is not so is the reason, and what follows from it is not one. Each finding has a code that stays.
"""

from __future__ import annotations

from difflib import get_close_matches

from sluice.admin.queries.diagnosis import phrases
from sluice.admin.queries.diagnosis.group_diagnosis import diagnose_group, lag_of
from sluice.admin.broker_facade import Hands, plain
from sluice.admin.queries.dead_letter_operations import Letters, homes
from sluice.admin.queries.view_builders import Register
from sluice.admin.views import Diagnosis, Finding, LetterFilter
from sluice.message import decode_headers
from sluice.queues.model.group import Group
from sluice.queues.model.queue import Queue
from sluice.queues.model.queue_rules import REJECT
from sluice.queues.service import Figures


async def diagnose(hands: Hands, register: Register, name: str, group: str) -> Diagnosis:
    name = plain(name)
    queue = hands.engine.queues.get(name)
    if queue is None:
        return Diagnosis(name, False, [_no_queue(register, name)])
    figures = hands.door.service.figures(queue)
    findings: list[Finding] = []
    chosen = queue.groups.get(group) if group else None
    if group and chosen is None:
        findings.append(_no_such_group(queue, group))
    elif not queue.groups:
        findings.append(_no_group(queue) if queue.depth else _nothing_there(queue))
    else:
        findings += _groups(hands, queue, chosen)
    if queue.depth >= queue.rules.max_depth and queue.rules.overflow == REJECT:
        findings.append(_full(queue))
    dead = await _dead_letters(hands, queue, group)
    if dead is not None:
        _place(findings, dead)
    quiet = ["standby", "dead-letters"]
    if any(int(cursor.waiting()) for one in queue.groups.values() for cursor in one.cursors):
        quiet.append("consumer-away")  # of some consumer while others work
    if all(finding.code in quiet and not finding.is_fault for finding in findings):
        findings.insert(0, _flows(queue, figures))
    return Diagnosis(name, not any(finding.is_fault for finding in findings), findings)


# ---- the queue


def _no_queue(register: Register, name: str) -> Finding:
    near = get_close_matches(name, register.all_names(), 3, 0.6)
    what = f"there is no queue {name!r}"
    if near:
        return Finding("no-queue", f"{what}; near it: {', '.join(near)}", phrases.doctor(near[0]))
    return Finding("no-queue", what, phrases.create_queue(name))


def _nothing_there(queue: Queue) -> Finding:
    """An empty queue, and how it came to that."""
    if queue.enqueued == 0:
        refused = (
            f"; {phrases.count_of(int(queue.refused), 'publish', 'publishes')} refused" if queue.refused else ""
        )
        if queue.rules.bindings:
            filters = ", ".join(queue.rules.bindings)
            return Finding(
                "nothing-captured",
                f"nothing was published yet that the queue captures: no message has come on {filters}{refused}",
                phrases.command("queue", "config", queue.name),
            )
        return Finding(
            "never-published", f"nothing was ever published here{refused}", phrases.publish(queue.name)
        )
    return Finding(
        "empty",
        f"the queue is empty: {phrases.messages(int(queue.enqueued), 'came and was', 'came and were')} settled",
        "",
        is_fault=False,
    )


def _no_group(queue: Queue) -> Finding:
    return Finding(
        "no-group",
        f"{phrases.messages(int(queue.depth), 'waits', 'wait')}, and nobody has ever subscribed: there is no group",
        phrases.start_first_worker(queue.name),
    )


def _no_such_group(queue: Queue, name: str) -> Finding:
    busy = [group.name for group in queue.groups.values() if group.consumers]
    near = get_close_matches(name, list(queue.groups), 1, 0.6)
    if busy:
        return Finding(
            "wrong-group",
            f"there is no group {name!r}; consumers are in {', '.join(busy)}",
            phrases.doctor(queue.name, near[0] if near else busy[0]),
        )
    if near:
        return Finding(
            "wrong-group",
            f"there is no group {name!r}; near it: {near[0]}",
            phrases.doctor(queue.name, near[0]),
        )
    told = f"; the queue has {', '.join(queue.groups)}" if queue.groups else ", nor any other"
    return Finding(
        "no-group", f"there is no group {name!r}{told}", phrases.start_first_worker(queue.name, name)
    )


def _full(queue: Queue) -> Finding:
    return Finding(
        "full",
        f"the queue is full at {phrases.count_of(int(queue.depth), 'message')} and refuses publishes"
        + (f": {int(queue.refused):,} so far" if queue.refused else ""),
        phrases.configure(queue.name, "limits.max_queue_depth", str(2 * int(queue.rules.max_depth))),
    )


def _flows(queue: Queue, figures: Figures) -> Finding:
    rates = figures.rates
    return Finding(
        "flowing",
        f"messages flow: {rates.enqueued:g}/s in, {rates.delivered:g}/s delivered, {rates.acked:g}/s acknowledged, "
        f"{int(queue.depth):,} waiting or in work",
        "",
        is_fault=False,
    )


# ---- its groups


def _groups(hands: Hands, queue: Queue, chosen: Group | None) -> list[Finding]:
    """Of the group that was asked about, or of all: those with something to do first, the fullest first."""
    groups = [chosen] if chosen is not None else sorted(queue.groups.values(), key=lag_of, reverse=True)
    findings: list[Finding] = []
    for group in groups:
        if lag_of(group):
            findings += diagnose_group(hands, group, name_it=len(queue.groups) > 1)
    if findings or any(lag_of(group) for group in groups):
        return findings
    began_behind = [group for group in groups if not any(cursor.count_entered() for cursor in group.cursors)]
    if queue.depth and began_behind:
        group = began_behind[0]
        return [
            Finding(
                "began-behind",
                f"group {group.name} began behind what is here ({phrases.count_of(int(queue.depth), 'message')}), and "
                "wants only what comes now",
                phrases.seek(queue.name, group.name, "earliest"),
            )
        ]
    if chosen is not None and queue.depth:
        return [
            Finding(
                "empty",
                f"group {chosen.name} has settled all that was for it; what is left is for other groups",
                "",
                is_fault=False,
            )
        ]
    findings = [_nothing_there(queue)]
    if queue.enqueued and not any(group.consumers for group in groups):
        name = groups[0].name
        findings.append(
            Finding(
                "no-consumer",
                f"nobody consumes for group {name}",
                phrases.start_worker(queue.name, name),
                is_fault=False,
            )
        )
    return findings


# ---- its dead letters


async def _dead_letters(hands: Hands, queue: Queue, group: str) -> Finding | None:
    """How many there are, and what they died of: told by the last of them."""
    if not queue.dead or not any(home.depth for home in homes(hands, queue.name)):
        return None
    count = 0
    last: dict[str, str] = {}
    reasons: dict[str, int] = {}
    async for _, letter in Letters(hands, queue.name, LetterFilter(group=group)).walk():
        count += 1
        last = dict(decode_headers(letter.headers))
        reason = last.get("dead-reason", "")
        reasons[reason] = reasons.get(reason, 0) + 1
        if count >= 10_000:
            break
    if not count:
        return None
    told = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
    said = last.get("dead-description", "")
    more = "at least " if count >= 10_000 else ""
    return Finding(
        "dead-letters",
        f"{more}{phrases.count_of(count, 'message')} went to the dead letters ({told}); the last one at "
        f"{last.get('dead-at', '')}" + (f" said: {said}" if said else ""),
        f"{phrases.list_letters(queue.name)}  then  {phrases.retry_letters(queue.name)}",
    )


def _place(findings: list[Finding], dead: Finding) -> None:
    """Dead letters are the reason when nothing else waits; else they are worth knowing."""
    if (
        all(finding.code in ("empty", "no-consumer") and not finding.is_fault for finding in findings)
        and findings
    ):
        findings.insert(0, dead)
    else:
        findings.append(Finding(dead.code, dead.what, dead.do, is_fault=False))
