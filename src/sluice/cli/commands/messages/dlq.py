"""`sluice dlq ...`: dead letters, by the name of the queue whose messages they were.

What is put back or thrown away in numbers is counted and shown first, and asked for, unless `--yes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from sluice.cli.support.rest_client import of_queue
from sluice.cli.support.completion import Queue, complete_group
from sluice.cli.support.errors import Failure, wrong_command
from sluice.cli.commands.messages.peek import Limit, show_message
from sluice.cli.support.time_arguments import moment
from sluice.cli.support.options import DryRun, ToAll, Yes
from sluice.cli.support.output import BAD, FAINT, Column, Output, styled, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import ago, count, one_line, plural

app = typer.Typer(no_args_is_help=True, help="Dead letters: see, put back, throw away.")

BATCH: Final = 500  # put back by one call
LOOKED_AT: Final = 1000  # of a preview
SHOWN: Final = 5

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the dead letter, or of the message that died.")]
Reason = Annotated[
    str, typer.Option(metavar="REASON", help="Died of: max_retries, timeout, rejected, expired, overflow.")
]
OfGroup = Annotated[
    str,
    typer.Option("--group", "-g", metavar="GROUP", help="Died in this group.", autocompletion=complete_group),
]
Since = Annotated[
    str, typer.Option(metavar="WHEN", help="Died at or after: a time, or 2h for two hours ago.")
]
Until = Annotated[str, typer.Option(metavar="WHEN", help="Died before.")]
Contains = Annotated[str, typer.Option(metavar="TEXT", help="With this text in the payload.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="dlq", rich_help_panel=panel)


@command(app, "list")
def list_letters(
    visit: Visit,
    queue: Queue,
    reason: Reason = "",
    group: OfGroup = "",
    since: Since = "",
    until: Until = "",
    contains: Contains = "",
    after: Annotated[str, typer.Option(metavar="ID", help="Only those behind this dead letter.")] = "",
    limit: Limit = 50,
) -> None:
    """The dead letters of a queue: why and when they died."""
    wanted = _filter(reason, group, since, until, contains, visit.now)
    found = visit.api.get(of_queue(queue, "dlq"), **wanted, after=after, limit=limit)
    if visit.answered(found):
        return
    if not found:
        visit.out.show(f"No dead letters of {queue}{' that fit' if wanted else ''}.")
        return
    _show_letters(visit.out, found, visit.now)
    if len(found) == limit:
        visit.out.note(f"The first {limit}; go on with --after {found[-1]['message_id']}")


@command(app, "show")
def show(visit: Visit, queue: Queue, message_id: Id) -> None:
    """One dead letter whole: payload, properties and the story of its death."""
    found = visit.api.get(of_queue(queue, "dlq", message_id))
    if visit.answered(found):
        return
    show_message(visit.out, found, visit.now)


@command(app, "retry")
def retry(
    visit: Visit,
    queue: Queue,
    message_id: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", help="One dead letter; leave it out and say which by --all or a filter."
        ),
    ] = "",
    every: All = False,
    reason: Reason = "",
    group: OfGroup = "",
    since: Since = "",
    until: Until = "",
    contains: Contains = "",
    to_all: ToAll = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Put dead letters back into their queue: one, or all that fit. They begin again with attempt 1."""
    wanted = _filter(reason, group, since, until, contains, visit.now)
    _choose_one(bool(message_id), every, bool(wanted), "retry")
    if message_id:
        found = _one_letter(visit, queue, message_id)
        if dry_run:
            _show_preview(visit, "would_retry", [found], False)
            return
        answer = visit.api.post(of_queue(queue, "dlq", message_id, "retry"), {"to_all": to_all})
        if not answer["retried"]:
            raise Failure(
                f"dead letter {message_id} was not put back: somebody works on it, or its queue is gone",
                f"See who consumes the dead letters: sluice consumers dlq/{queue}",
            )
        _report(visit, queue, answer)
        return
    letters, more = _preview(visit, queue, wanted)
    if dry_run or not letters:
        _show_preview(visit, "would_retry", letters, more)
        return
    if not yes:
        _show_preview(visit, "would_retry", letters, more, ask=True)
    visit.out.confirm(f"Put {_number(letters, more)} back into {queue}?", yes)
    _report(visit, queue, _retry_many(visit, queue, wanted, to_all, None if more else len(letters)))


@command(app, "purge")
def purge(
    visit: Visit,
    queue: Queue,
    message_id: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", help="One dead letter; leave it out and say which by --all or a filter."
        ),
    ] = "",
    every: All = False,
    reason: Reason = "",
    group: OfGroup = "",
    since: Since = "",
    until: Until = "",
    contains: Contains = "",
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Throw dead letters away for good: one, or all that fit."""
    wanted = _filter(reason, group, since, until, contains, visit.now)
    _choose_one(bool(message_id), every, bool(wanted), "purge")
    if message_id:
        letters, more = [_one_letter(visit, queue, message_id)], False
    else:
        letters, more = _preview(visit, queue, wanted)
    if dry_run or not letters:
        _show_preview(visit, "would_purge", letters, more)
        return
    if not yes:
        _show_preview(visit, "would_purge", letters, more, ask=True)
    visit.out.confirm(f"Throw {_number(letters, more)} of {queue} away for good?", yes)
    if message_id:
        visit.api.delete(of_queue(queue, "dlq", message_id))
        answer = {"purged": 1}
    else:
        answer = visit.api.post(of_queue(queue, "dlq", "purge"), wanted)
    if visit.answered(answer):
        return
    visit.out.show(f"Purged {plural(answer['purged'], 'dead letter')} of {queue}.")


def _one_letter(visit: Visit, queue: str, message_id: str) -> dict[str, Any]:
    """Return one dead letter. It must be that one: what is done next goes to the same path."""
    found: dict[str, Any] = visit.api.get(of_queue(queue, "dlq", message_id))
    names = [found.get("message_id"), found.get("headers", {}).get("original-message-id")]
    if message_id not in names:
        raise Failure(
            f"the server was asked for dead letter {message_id} of {queue}, and answered with something else",
            "Nothing was changed. See whether a proxy before the server changes paths",
        )
    return found


def _filter(reason: str, group: str, since: str, until: str, contains: str, now: float) -> dict[str, object]:
    given = {"reason": reason, "group": group, "contains": contains}
    given |= {"since": moment("--since", since, now), "until": moment("--until", until, now)}
    return {name: value for name, value in given.items() if value}


def _choose_one(one: bool, every: bool, filtered: bool, verb: str) -> None:
    if one + every + filtered == 0:
        raise wrong_command(
            "which dead letters is not said",
            f"Name one by its id, or choose with --all, --reason, --group or --since: sluice dlq {verb} --help",
        )
    if one + every + filtered > 1:
        raise wrong_command("an id, --all and a filter exclude each other", "Give one of the three")


def _preview(visit: Visit, queue: str, wanted: Mapping[str, object]) -> tuple[list[dict[str, Any]], bool]:
    """What the filter fits, up to a bound, and whether there is more."""
    found: list[dict[str, Any]] = []
    page = 100
    while len(found) < LOOKED_AT:
        after = found[-1]["message_id"] if found else ""
        letters = visit.api.get(of_queue(queue, "dlq"), **wanted, after=after, limit=page, payload_bytes=200)
        found += letters
        if len(letters) < page:
            return found, False
    return found, True


def _show_preview(
    visit: Visit, name: str, letters: list[dict[str, Any]], more: bool, ask: bool = False
) -> None:
    if visit.as_json:
        if not ask:
            visit.out.data({name: len(letters), "more": more, "letters": letters})
        return
    if not letters:
        visit.out.show("No dead letters that fit. Nothing to do.")
        return
    _show_letters(visit.out, letters[:SHOWN], visit.now)
    reasons = Counter(row["headers"].get("dead-reason", "?") for row in letters)
    told = ", ".join(f"{reason} {count(number)}" for reason, number in reasons.most_common())
    visit.out.show(styled(f"{_number(letters, more)} in all: {told}", style="bold"))


def _number(letters: list[dict[str, Any]], more: bool) -> str:
    return ("more than " if more else "") + plural(len(letters), "dead letter")


def _retry_many(
    visit: Visit, queue: str, wanted: Mapping[str, object], to_all: bool, total: int | None
) -> dict[str, int]:
    """By batches, so that each call is short and the bar moves. What is skipped would be met again: a batch that puts
    nothing back is the last one."""
    done = {"retried": 0, "skipped": 0, "left": 0}
    with visit.out.progress(total) as progress:
        task = progress.add_task("putting back", total=total, rate="")
        while True:
            body = {**wanted, "limit": BATCH, "to_all": to_all}
            answer = visit.api.post(of_queue(queue, "dlq", "retry"), body)
            done["retried"] += answer["retried"]
            done["skipped"], done["left"] = answer["skipped"], answer["left"]
            progress.update(task, completed=done["retried"])
            if not answer["left"] or not answer["retried"]:
                return done


def _report(visit: Visit, queue: str, answer: Mapping[str, int]) -> None:
    if visit.answered(answer):
        return
    whose = ("it", "its") if answer["skipped"] == 1 else ("them", "their")
    skipped = (
        f", {count(answer['skipped'])} skipped (somebody works on {whose[0]}, or {whose[1]} queue is gone)"
    )
    left = f", {count(answer['left'])} left"
    visit.out.show(
        f"Put {plural(answer['retried'], 'dead letter')} back into {queue}"
        f"{skipped if answer['skipped'] else ''}{left if answer['left'] else ''}."
    )


def _show_letters(out: Output, letters: list[dict[str, Any]], now: float) -> None:
    columns = [
        Column("dead letter"),
        Column("died", number=True),
        Column("reason", style=BAD),
        Column("group"),
    ]
    columns += [
        Column("tries", number=True),
        Column("what was said"),
        Column("payload", cut=True, style=FAINT),
    ]
    rows = []
    for row in letters:
        story = row["headers"]
        rows.append(
            [
                row["message_id"],
                ago(story.get("dead-at") or row["enqueued_at"], now).removesuffix(" ago"),
                story.get("dead-reason", ""),
                story.get("original-group", ""),
                story.get("attempts", ""),
                story.get("dead-description", ""),
                one_line(row["payload"], row["size"], out.payload_width),
            ]
        )
    out.show(table(columns, rows, out.width))
