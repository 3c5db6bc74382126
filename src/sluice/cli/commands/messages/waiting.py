"""`sluice cancel` and `sluice reschedule`: messages that wait, by their ids or by a filter.

A command on several messages by a filter counts them first and asks, unless `--yes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from sluice.cli.support import (
    CommandContext,
    Contains,
    DryRun,
    Queue,
    Yes,
    command,
    filter_parameters,
    format_count,
    format_plural,
    parse_seconds,
    parse_time_argument,
    queue_path,
    usage_error,
)

STATES: Final = ("waiting", "delayed", "retrying")
MAX_MESSAGES: Final = 100_000  # that one call changes

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Messages; leave them out to choose by a filter."),
]
All = Annotated[bool, typer.Option("--all", help="All messages that no consumer works on.")]


@dataclass(frozen=True)
class MessageFilter:
    """The options that select messages which wait."""

    key: Annotated[str, typer.Option(metavar="KEY", help="With this partition key.")] = ""
    state: Annotated[str, typer.Option(metavar="STATE", help="waiting, delayed or retrying.")] = ""
    since: Annotated[
        str,
        typer.Option(metavar="WHEN", help="Enqueued at or after: a time, or 2h for two hours ago."),
    ] = ""
    until: Annotated[str, typer.Option(metavar="WHEN", help="Enqueued before.")] = ""
    contains: Contains = ""

    def wanted(self, now: float) -> dict[str, object]:
        """Return the given options as parameters of a request."""
        if self.state and self.state not in STATES:
            raise usage_error(f"--state {self.state!r} is not a state", f"Use {', '.join(STATES)}")
        return filter_parameters(self, now)


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "cancel", rich_help_panel=panel)(cancel)
    command(root, "reschedule", rich_help_panel=panel)(reschedule)


def cancel(
    cli: CommandContext,
    queue: Queue,
    chosen: MessageFilter,
    ids: Ids = None,
    every: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Remove messages that wait, are delayed or wait for a retry: they are never delivered."""
    wanted = chosen.wanted(cli.now)
    _check_selection(bool(ids), every, bool(wanted))
    if ids:
        for message_id in ids if not dry_run else []:
            cli.api.delete(queue_path(queue, "messages", message_id))
        _report(cli, "Cancelled", queue, _result_of(ids, dry_run))
        return
    _change_many(cli, queue, "cancel", "Cancelled", wanted, dry_run, yes)


def reschedule(
    cli: CommandContext,
    queue: Queue,
    chosen: MessageFilter,
    ids: Ids = None,
    now: Annotated[bool, typer.Option("--now", help="Deliver or retry them now.")] = False,
    delay: Annotated[
        str, typer.Option("--in", metavar="DURATION", help="Deliver them after this time.")
    ] = "",
    at: Annotated[str, typer.Option(metavar="TIME", help="Deliver them at or after it.")] = "",
    every: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Deliver messages at another time: now, later, or before their delay or backoff is over."""
    if now + bool(delay) + bool(at) != 1:
        raise usage_error("no time is given, or several are", "Give one of --now, --in and --at")
    when: dict[str, object] = {"deliver_at": parse_time_argument("--at", at, None)}
    if not at:
        when = {"delay": f"{parse_seconds('--in', delay):g}s" if delay else "0s"}
    wanted = chosen.wanted(cli.now)
    _check_selection(bool(ids), every, bool(wanted))
    if ids:
        for message_id in ids if not dry_run else []:
            cli.api.post(queue_path(queue, "messages", message_id, "reschedule"), when)
        _report(cli, "Rescheduled", queue, _result_of(ids, dry_run))
        return
    _change_many(cli, queue, "reschedule", "Rescheduled", wanted | when, dry_run, yes)


def _check_selection(by_id: bool, every: bool, filtered: bool) -> None:
    if by_id + every + filtered == 0:
        raise usage_error(
            "no messages are selected",
            "Name them by their ids, or choose with --all, --key, --state, --since or --contains",
        )
    if by_id + every + filtered > 1:
        raise usage_error("ids, --all and a filter exclude each other", "Give one of the three")


def _result_of(ids: list[str], dry_run: bool) -> dict[str, Any]:
    return {"changed": len(ids), "in_delivery": 0, "left": 0, "dry_run": dry_run}


def _change_many(
    cli: CommandContext,
    queue: str,
    path: str,
    done: str,
    body: dict[str, object],
    dry_run: bool,
    yes: bool,
) -> None:
    """Count the messages, ask, and change them."""
    target = queue_path(queue, "messages", path)
    result = cli.api.post(target, {**body, "limit": MAX_MESSAGES, "dry_run": True})
    if dry_run or not result["changed"]:
        _report(cli, done, queue, result)
        return
    number = format_plural(result["changed"], "message")
    cli.out.confirm(f"{path.capitalize()} {number} of {queue}?", yes)
    _report(cli, done, queue, cli.api.post(target, {**body, "limit": MAX_MESSAGES}))


def _report(cli: CommandContext, done: str, queue: str, result: dict[str, Any]) -> None:
    if cli.print_if_json(result):
        return
    number = format_plural(result["changed"], "message")
    late = (
        f", {format_count(result['in_delivery'])} too late: in delivery"
        if result["in_delivery"]
        else ""
    )
    left = f", {format_count(result['left'])} left" if result["left"] else ""
    if result["dry_run"]:
        cli.out.show(f"Would change {number} of {queue}{late}{left}.")
    else:
        cli.out.show(f"{done} {number} of {queue}{late}{left}.")
