"""`sluice schedule ...`: recurring publishes to a queue."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from sluice.cli.support import (
    BAD,
    WARN,
    Column,
    CommandContext,
    Queue,
    Yes,
    command,
    format_age,
    format_count,
    queue_path,
    styled,
    table,
)

app = typer.Typer(no_args_is_help=True, help="Recurring publishes to a queue.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")]


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="schedule", rich_help_panel=panel)


@command(app, "add")
def add(
    cli: CommandContext,
    queue: Queue,
    name: Name,
    payload: Annotated[str, typer.Argument(metavar="[PAYLOAD]", help="Of each message.")] = "",
    cron: Annotated[
        str, typer.Option(metavar="EXPRESSION", help='When: "30 2 * * *", five fields.')
    ] = "",
    every: Annotated[str, typer.Option(metavar="DURATION", help="Or how often: 15m.")] = "",
    time_zone: Annotated[
        str, typer.Option(metavar="ZONE", help="Of --cron: Europe/Berlin. Default: UTC.")
    ] = "",
    jitter: Annotated[
        str, typer.Option(metavar="DURATION", help="Delay each tick by up to this time.")
    ] = "",
    missed: Annotated[
        str, typer.Option(metavar="POLICY", help="For missed ticks: skip, once or all.")
    ] = "skip",
    key: Annotated[str, typer.Option(metavar="KEY", help="Partition key of its messages.")] = "",
    content_type: Annotated[str, typer.Option(metavar="TYPE", help="Of its messages.")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Change the schedule of this name.")
    ] = False,
) -> None:
    """Publish to a queue again and again. The first message comes at the first tick after now."""
    body = {
        "payload": payload,
        "cron": cron,
        "every": every,
        "time_zone": time_zone,
        "jitter": jitter,
        "missed": missed,
        "key": key,
        "content_type": content_type,
    }
    if replace:
        made = cli.api.put(queue_path(queue, "schedules", name), body)
    else:
        made = cli.api.post(queue_path(queue, "schedules"), {"name": name, **body})
    if cli.print_if_json(made):
        return
    cli.out.show(f"{'Changed' if replace else 'Added'} schedule {name}. Next: {_next_run(made)}")


@command(app, "list")
def list_schedules(
    cli: CommandContext,
    queue: Annotated[str, typer.Argument(metavar="[QUEUE]", help="Only those of this queue.")] = "",
) -> None:
    """List schedules with their next run and their last one."""
    found = cli.api.get(queue_path(queue, "schedules") if queue else "/schedules")
    if cli.print_if_json(found):
        return
    if not found:
        cli.out.show("There are no schedules. Add one: sluice schedule add --help")
        return
    columns = [Column("name"), Column("queue"), Column("when"), Column("next"), Column("last run")]
    columns += [Column("published", number=True), Column("state")]
    rows: list[list[str | Text]] = [
        [
            row["name"],
            row["queue"],
            _when(row),
            _next_run(row),
            _last_run(row, cli.now),
            format_count(row["counts"]["published"]),
            _state(row),
        ]
        for row in found
    ]
    cli.out.show(table(columns, rows))


@command(app, "show")
def show(cli: CommandContext, queue: Queue, name: Name) -> None:
    """Show a schedule: its next five and its last five runs."""
    found = cli.api.get(queue_path(queue, "schedules", name))
    if cli.print_if_json(found):
        return
    cli.out.show(
        styled(f"{name} of {found['queue']}: {_when(found)}", style="bold"),
        f"state: {_state(found)}",
        *[f"next   {_minute(tick)}" for tick in found["next_runs"]],
        *[
            f"last   {_minute(run['tick'])}  {run['outcome']}  {run['message_id'] or run['detail']}"
            for run in found["last_runs"]
        ],
    )


@command(app, "pause")
def pause(
    cli: CommandContext,
    queue: Queue,
    name: Name,
    reason: Annotated[str, typer.Option(help="Shown wherever the pause is.")] = "",
) -> None:
    """Let a schedule tick no more, until it is resumed."""
    found = cli.api.post(queue_path(queue, "schedules", name, "pause"), {"reason": reason})
    if cli.print_if_json(found):
        return
    cli.out.show(f"Paused schedule {name}. To go on: sluice schedule resume {queue} {name}")


@command(app, "resume")
def resume(cli: CommandContext, queue: Queue, name: Name) -> None:
    """End the pause of a schedule."""
    found = cli.api.post(queue_path(queue, "schedules", name, "resume"))
    if cli.print_if_json(found):
        return
    cli.out.show(f"Resumed schedule {name}. Next: {_next_run(found)}")


@command(app, "run-now")
def run_now(cli: CommandContext, queue: Queue, name: Name) -> None:
    """Publish its message now. Its ticks do not change."""
    run = cli.api.post(queue_path(queue, "schedules", name, "run"))
    if cli.print_if_json(run):
        return
    cli.out.show(f"{name}: {run['outcome']} {run['message_id']}")


@command(app, "remove")
def remove(cli: CommandContext, queue: Queue, name: Name, yes: Yes = False) -> None:
    """Remove a schedule. Messages that it has published stay."""
    cli.out.confirm(f"Remove schedule {name} of {queue}?", yes)
    cli.api.delete(queue_path(queue, "schedules", name))
    if cli.print_if_json({"removed": name, "queue": queue}):
        return
    cli.out.show(f"Removed schedule {name} of {queue}.")


def _when(row: dict[str, Any]) -> str:
    return f"{row['cron']} {row['time_zone']}" if row["cron"] else f"every {row['every']}"


def _minute(time: str) -> str:
    """Show a time in UTC to the second."""
    return time.replace("T", " ")[:19] + " UTC"


def _next_run(row: dict[str, Any]) -> str:
    return _minute(row["next_runs"][0]) if row["next_runs"] else "never"


def _last_run(row: dict[str, Any], now: float) -> str:
    if not row["last_runs"]:
        return "-"
    last = row["last_runs"][0]
    return f"{last['outcome']} {format_age(last['at'], now)}"


def _state(row: dict[str, Any]) -> str | Text:
    if row["fault"]:
        return styled(row["fault"], style=BAD)
    if row["pause"]:
        return styled(f"paused by {row['pause']['by']}", style=WARN)
    return "ok"
