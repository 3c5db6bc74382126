"""`sluice explain`, `sluice doctor` and `sluice verify`: why a state is as it is, and what to do.

The broker finds the reasons; these commands print them so that the first line is the answer.
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

from sluice.cli.commands.monitoring.losses import warn_of_losses
from sluice.cli.support import (
    BAD,
    EXIT_FINDINGS,
    EXIT_NEEDS_REPAIR,
    EXIT_NOT_FOUND,
    FAINT,
    GOOD,
    WARN,
    Column,
    CommandContext,
    CommandError,
    GroupOption,
    Output,
    Queue,
    command,
    complete_queue,
    escape_controls,
    format_age,
    format_clock,
    format_duration,
    format_plural,
    queue_path,
    styled,
    table,
    to_timestamp,
)
from sluice.errors import StoreLocked
from sluice.units import quote_path_segment

# The sign and style of each event of a message.
_EVENT_STYLES: Final = {
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
_STATE_STYLES: Final = {
    "acked": GOOD,
    "dead": BAD,
    "expired": BAD,
    "retrying": WARN,
    "delayed": FAINT,
}


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "explain", rich_help_panel=panel)(explain)
    command(root, "doctor", rich_help_panel=panel)(doctor)
    command(root, "verify", rich_help_panel=panel)(verify)


def explain(
    cli: CommandContext,
    message_id: Annotated[
        str, typer.Argument(metavar="MESSAGE-ID", help="As publish, peek or a delivery named it.")
    ],
    queue: Annotated[
        str,
        typer.Option(
            "--queue", "-q", metavar="QUEUE", help="Only there.", autocompletion=complete_queue
        ),
    ] = "",
) -> None:
    """Show the events of one message so far, and why it is in its present state."""
    queues = [queue] if queue else _find_queues(cli, message_id)
    traces = [cli.api.get(queue_path(name, "messages", message_id)) for name in queues]
    if cli.print_if_json(traces[0] if queue else traces):
        return
    for nth, trace in enumerate(traces):
        if nth:
            cli.out.show("")
        _show_trace(cli.out, trace, cli.now)


def doctor(cli: CommandContext, queue: Queue, group: GroupOption = "") -> None:
    """Show why nothing arrives: the first true reason and the command that helps. Exit code 5 if
    something is wrong.
    """
    if not cli.as_json:
        warn_of_losses(cli)
    found = cli.api.get(queue_path(queue, "diagnosis"), group=group)
    if cli.as_json:
        cli.out.print_json(found)
    else:
        _show_findings(cli.out, found)
    if not found["healthy"]:
        raise typer.Exit(EXIT_FINDINGS)


def verify(
    cli: CommandContext,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Check the directory of a stopped broker instead of a running one."
        ),
    ] = None,
) -> None:
    """Recount everything and compare with the ledgers. Exit code 5 if they differ.

    With --data, exit code 6 if they are right and the next start will repair a file, such as a log
    with a torn end.
    """
    found = _verify_offline(data) if data is not None else {"faults": cli.api.get("/verify")}
    faults = found["faults"]
    notes = found.get("notes", [])
    if not cli.print_if_json({"healthy": not faults, **found}):
        cli.out.show(*(styled(f"! {note}", style=WARN) for note in notes))
        if faults:
            cli.out.show(
                styled(f"✗ {format_plural(len(faults), 'fault')}:", style=BAD),
                *(f"  {fault}" for fault in faults),
            )
        elif data is not None:
            contents = (
                f"{format_plural(found['messages'], 'message')}"
                f" in {format_plural(found['queues'], 'queue')}"
            )
            cli.out.show(
                styled(
                    f"✓ Every ledger is right and every message can be read: {contents}.",
                    style=GOOD,
                )
            )
        else:
            cli.out.show(styled("✓ The ledgers of every queue and group are right.", style=GOOD))
    if faults:
        raise typer.Exit(EXIT_FINDINGS)
    if notes:
        raise typer.Exit(EXIT_NEEDS_REPAIR)


def _verify_offline(data: Path) -> dict[str, Any]:
    # Packages of the broker, which no other client command needs.
    from dataclasses import asdict

    from sluice.admin.queries import combine_reports, verify_store
    from sluice.processes.cell_directory import cell_store_path, read_cells
    from sluice.store.embedded import EmbeddedStore

    try:
        cells = read_cells(data)
        if not cells:
            return asdict(verify_store(data, EmbeddedStore))
        paths = [cell_store_path(data, cell) for cell in range(cells)]
        return asdict(combine_reports(data, [verify_store(one, EmbeddedStore) for one in paths]))
    except StoreLocked as refusal:
        raise CommandError(
            refusal.what, "Leave --data out to ask the broker that has it open"
        ) from None


def _find_queues(cli: CommandContext, message_id: str) -> list[str]:
    queues: list[str] = cli.api.get(f"/messages/{quote_path_segment(message_id)}")["queues"]
    if not queues:
        raise CommandError(
            f"no queue knows a message {message_id!r}",
            "Look for its id with `sluice peek` or `sluice dlq list`;"
            " messages settled long ago are not remembered",
            EXIT_NOT_FOUND,
        )
    return queues


def _show_trace(out: Output, trace: Mapping[str, Any], now: float) -> None:
    out.show(styled(f"{trace['message_id']} in {trace['queue']}", style="bold"))
    out.show(styled(trace["summary"]))
    if trace["events"]:
        out.show("", Padding(_timeline(trace["events"], now), (0, 0, 0, 1)))
    if trace["states"]:
        out.show(
            "",
            table(
                [Column("group"), Column("state"), Column("why")],
                [_state(one, now) for one in trace["states"]],
            ),
        )
    steps = dict.fromkeys(one["do"] for one in trace["states"] if one["do"])
    dead_letters = trace["dead_letters"]
    if dead_letters and not steps:
        steps[f"sluice dlq show {trace['queue']} {dead_letters[0]}"] = None
    if steps:
        out.show("", styled("What to do", style="bold"), *(_format_remedy(step) for step in steps))


def _timeline(events: list[dict[str, Any]], now: float) -> Table:
    """Lay out one line per event: when, how long after the previous one, what, who, why."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    grid.add_column(no_wrap=True, style=FAINT)
    grid.add_column(no_wrap=True, justify="right", style=FAINT)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    groups = {event["group"] for event in events if event["group"]}
    before = 0.0
    for event in events:
        at = to_timestamp(event["at"])
        since = f"+{format_duration(at - before)}" if before and at >= before else ""
        before = at
        sign, style = _EVENT_STYLES.get(event["what"], ("·", ""))
        grid.add_row(
            format_clock(event["at"], now),
            since,
            styled(sign, style=style),
            _event(event, style, len(groups) > 1),
        )
    return grid


def _event(event: Mapping[str, Any], style: str, name_group: bool) -> Text:
    text = styled(event["what"].replace("-", " "), style=style)
    if event["consumer"]:
        preposition = "to" if event["what"] == "delivered" else "by"
        text.append(f" {preposition} {escape_controls(event['consumer'])}", style="default")
    if event["group"] and (name_group or not event["consumer"]):
        text.append(f" in {escape_controls(event['group'])}", style=FAINT)
    if event["attempt"]:
        text.append(f", attempt {event['attempt']}", style=FAINT)
    if event["detail"]:
        text.append(f": {escape_controls(event['detail'])}", style="default")
    return text


def _state(one: Mapping[str, Any], now: float) -> list[str | Text]:
    state_text = one["state"].replace("-", " ")
    if one["due"]:
        state_text += f", due {format_age(one['due'], now)}"
    elif one["deadline"]:
        state_text += f", until {format_age(one['deadline'], now)}"
    return [one["group"], styled(state_text, style=_STATE_STYLES.get(one["state"], "")), one["why"]]


def _show_findings(out: Output, found: Mapping[str, Any]) -> None:
    findings = found["findings"]
    if not findings:
        out.show(styled(f"✓ {found['queue']} is well.", style=GOOD))
        return
    for nth, finding in enumerate(findings):
        if nth == 1:
            out.show("", styled("Also", style="bold"))
        fault = finding["is_fault"]
        sign, style = (
            ("✗", BAD) if fault else ("✓", GOOD) if found["healthy"] and not nth else ("·", FAINT)
        )
        out.show(
            _item(
                styled(sign, style=style), styled(finding["what"], style="bold" if not nth else "")
            )
        )
        if finding["do"]:
            out.show(_format_remedy(finding["do"]))


def _item(sign: Text, body: Text) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(sign, body)
    return grid


def _format_remedy(step: str) -> Padding:
    """Format a step, by lines; a command has a line and a color, and can be copied whole."""
    lines = (
        styled(line, style="cyan" if line.startswith("sluice ") else "")
        for line in step.split("\n")
    )
    return Padding(Stack(*lines), (0, 0, 0, 2))
