"""`sluice explain`, `sluice doctor` and `sluice verify`: why things are as they are, and what to do about it.

The broker finds the reasons; here they are laid out so that the first line is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group as Stack
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sluice.cli.support.rest_client import of_queue
from sluice.cli.support.completion import GroupOption, Queue, complete_queue
from sluice.cli.support.errors import NEEDS_MENDING, NOT_FOUND, SOMETHING_WRONG, Failure
from sluice.cli.commands.monitoring.losses import warn_of_losses
from sluice.cli.support.output import BAD, FAINT, GOOD, WARN, Column, Output, styled, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import ago, clock, duration, plural, read_time, visible
from sluice.errors import StoreLocked
from sluice.units import path_segment

# How each step of a life looks.
_STEPS: Final = {
    "enqueued": ("●", ""),
    "delivered": ("→", ""),
    "extended": ("↻", FAINT),
    "acked": ("✓", GOOD),
    "nacked": ("✗", WARN),
    "timed-out": ("✗", WARN),
    "vanished": ("✗", WARN),
    "released": ("←", FAINT),
    "dead": ("✝", BAD),
    "redriven": ("↺", "cyan"),
    "expired": ("✝", BAD),
}
_STATES: Final = {"acked": GOOD, "dead": BAD, "expired": BAD, "retrying": WARN, "delayed": FAINT}


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "explain", rich_help_panel=panel)(explain)
    command(root, "doctor", rich_help_panel=panel)(doctor)
    command(root, "verify", rich_help_panel=panel)(verify)


def explain(
    visit: Visit,
    message_id: Annotated[
        str, typer.Argument(metavar="MESSAGE-ID", help="As publish, peek or a delivery named it.")
    ],
    queue: Annotated[
        str, typer.Option("--queue", "-q", metavar="QUEUE", help="Only there.", autocompletion=complete_queue)
    ] = "",
) -> None:
    """The life of one message so far, and why it is where it is now."""
    queues = [queue] if queue else _who_knows(visit, message_id)
    lives = [visit.api.get(of_queue(name, "messages", message_id)) for name in queues]
    if visit.answered(lives[0] if queue else lives):
        return
    for nth, life in enumerate(lives):
        if nth:
            visit.out.show("")
        _show_life(visit.out, life, visit.now)


def doctor(visit: Visit, queue: Queue, group: GroupOption = "") -> None:
    """Why nothing arrives: the first true reason and the command that helps. Exit code 5 when something is wrong."""
    if not visit.as_json:
        warn_of_losses(visit)
    found = visit.api.get(of_queue(queue, "diagnosis"), group=group)
    if visit.as_json:
        visit.out.data(found)
    else:
        _show_findings(visit.out, found)
    if not found["healthy"]:
        raise typer.Exit(SOMETHING_WRONG)


def verify(
    visit: Visit,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Check the directory of a stopped broker instead of a running one."),
    ] = None,
) -> None:
    """Count everything again, one by one, and compare with the books. Exit code 5 when they differ;
    with --data, 6 when
    they are right and the next start will repair a file, such as a log with a torn end."""
    found = _verify_offline(data) if data is not None else {"faults": visit.api.get("verify")}
    faults = found["faults"]
    notes = found.get("notes", [])
    if not visit.answered({"healthy": not faults, **found}):
        visit.out.show(*(styled(f"! {note}", style=WARN) for note in notes))
        if faults:
            visit.out.show(
                styled(f"✗ {plural(len(faults), 'fault')}:", style=BAD), *(f"  {fault}" for fault in faults)
            )
        elif data is not None:
            held = f"{plural(found['messages'], 'message')} in {plural(found['queues'], 'queue')}"
            visit.out.show(
                styled(f"✓ Every book is right and every message can be read: {held}.", style=GOOD)
            )
        else:
            visit.out.show(styled("✓ The books of every queue and group are right.", style=GOOD))
    if faults:
        raise typer.Exit(SOMETHING_WRONG)
    if notes:
        raise typer.Exit(NEEDS_MENDING)


def _verify_offline(data: Path) -> dict[str, Any]:
    # The broker's rooms, which no other command of a visitor needs.
    from dataclasses import asdict

    from sluice.admin.queries.offline_verification import verify_store
    from sluice.store.embedded.store import EmbeddedStore

    try:
        return asdict(verify_store(data, EmbeddedStore))
    except StoreLocked as refusal:
        raise Failure(refusal.what, "Leave --data out to ask the broker that has it open") from None


def _who_knows(visit: Visit, message_id: str) -> list[str]:
    queues: list[str] = visit.api.get(f"messages/{path_segment(message_id)}")["queues"]
    if not queues:
        raise Failure(
            f"no queue knows a message {message_id!r}",
            "Look for its id with `sluice peek` or `sluice dlq list`; what was settled long ago is forgotten",
            NOT_FOUND,
        )
    return queues


def _show_life(out: Output, life: Mapping[str, Any], now: float) -> None:
    out.show(styled(f"{life['message_id']} in {life['queue']}", style="bold"))
    out.show(styled(life["summary"]))
    if life["events"]:
        out.show("", Padding(_timeline(life["events"], now), (0, 0, 0, 1)))
    if life["states"]:
        out.show(
            "",
            table(
                [Column("group"), Column("state"), Column("why")],
                [_state(one, now) for one in life["states"]],
            ),
        )
    steps = dict.fromkeys(one["do"] for one in life["states"] if one["do"])
    letters = life["dead_letters"]
    if letters and not steps:
        steps[f"sluice dlq show {life['queue']} {letters[0]}"] = None
    if steps:
        out.show("", styled("What to do", style="bold"), *(_advice(step) for step in steps))


def _timeline(events: list[dict[str, Any]], now: float) -> Table:
    """A line per event: when, how long after the one before, what, who, why."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    grid.add_column(no_wrap=True, style=FAINT)
    grid.add_column(no_wrap=True, justify="right", style=FAINT)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    groups = {event["group"] for event in events if event["group"]}
    before = 0.0
    for event in events:
        at = read_time(event["at"])
        since = f"+{duration(at - before)}" if before and at >= before else ""
        before = at
        sign, style = _STEPS.get(event["what"], ("·", ""))
        grid.add_row(
            clock(event["at"], now), since, styled(sign, style=style), _event(event, style, len(groups) > 1)
        )
    return grid


def _event(event: Mapping[str, Any], style: str, name_group: bool) -> Text:
    line = styled(event["what"].replace("-", " "), style=style)
    if event["consumer"]:
        word = "to" if event["what"] == "delivered" else "by"
        line.append(f" {word} {visible(event['consumer'])}", style="default")
    if event["group"] and (name_group or not event["consumer"]):
        line.append(f" in {visible(event['group'])}", style=FAINT)
    if event["attempt"]:
        line.append(f", attempt {event['attempt']}", style=FAINT)
    if event["detail"]:
        line.append(f": {visible(event['detail'])}", style="default")
    return line


def _state(one: Mapping[str, Any], now: float) -> list[str | Text]:
    told = one["state"].replace("-", " ")
    if one["due"]:
        told += f", due {ago(one['due'], now)}"
    elif one["deadline"]:
        told += f", until {ago(one['deadline'], now)}"
    return [one["group"], styled(told, style=_STATES.get(one["state"], "")), one["why"]]


def _show_findings(out: Output, found: Mapping[str, Any]) -> None:
    findings = found["findings"]
    if not findings:
        out.show(styled(f"✓ {found['queue']} is well.", style=GOOD))
        return
    for nth, finding in enumerate(findings):
        if nth == 1:
            out.show("", styled("Also", style="bold"))
        fault = finding["is_fault"]
        sign, style = ("✗", BAD) if fault else ("✓", GOOD) if found["healthy"] and not nth else ("·", FAINT)
        out.show(_item(styled(sign, style=style), styled(finding["what"], style="bold" if not nth else "")))
        if finding["do"]:
            out.show(_advice(finding["do"]))


def _item(sign: Text, body: Text) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(sign, body)
    return grid


def _advice(step: str) -> Padding:
    """A command stands out, and can be copied whole."""
    text = styled(step, style="cyan" if step.startswith("sluice ") else "")
    return Padding(Stack(text), (0, 0, 0, 2))
