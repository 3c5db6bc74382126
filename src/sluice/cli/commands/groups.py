"""Consumer groups: `sluice group ...`, `sluice seek`, `sluice consumers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sluice.cli.support import (
    BAD,
    FAINT,
    WARN,
    Column,
    CommandContext,
    Group,
    GroupOption,
    Queue,
    Yes,
    command,
    facts_table,
    format_age,
    format_count,
    format_duration,
    format_plural,
    format_ranges,
    queue_path,
    styled,
    table,
    to_timestamp,
)

app = typer.Typer(no_args_is_help=True, help="The groups of consumers of a queue.")


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="group", rich_help_panel=panel)
    command(root, "seek", rich_help_panel=panel)(seek)
    command(root, "consumers", rich_help_panel=panel)(consumers)


@command(app, "list")
def list_groups(cli: CommandContext, queue: Queue) -> None:
    """List the groups of a queue and how far behind they are."""
    found = cli.api.get(queue_path(queue, "groups"))
    if cli.print_if_json(found):
        return
    if not found:
        cli.out.show(f"{queue} has no groups. The first consumer creates a group.")
        return
    cli.out.show(group_table(found, cli.now))


@command(app, "show")
def show(cli: CommandContext, queue: Queue, group: Group) -> None:
    """Show one group: its ledger and its consumers."""
    found = cli.api.get(queue_path(queue, "groups", group))
    if cli.print_if_json(found):
        return
    ledger = found["ledger"]
    parts = [
        f"{format_count(ledger[key])} {key}"
        for key in ("waiting", "delivered", "retrying", "acked", "dead")
    ]
    parts += [
        f"{format_count(ledger[key])} {key}"
        for key in ("expired", "purged", "cancelled")
        if ledger[key]
    ]
    cli.out.show(
        styled(f"{found['name']} of {queue}", style="bold"),
        facts_table(
            [
                ("lag", _format_lag(found, cli.now)),
                ("ledger", f"{format_count(ledger['enqueued'])} enqueued = {' + '.join(parts)}"),
                (
                    "failures",
                    f"{format_count(found['nacked'])} nacked, "
                    f"{format_count(found['redelivered'])} redelivered",
                ),
                ("low watermarks", _format_low_watermarks(found["floors"])),
            ]
        ),
    )
    if found["held_keys"]:
        cli.out.show(
            "", styled("keys held for repair", style=WARN), _held_key_table(found, cli.now)
        )
    if found["consumers"]:
        cli.out.show("", consumer_table(found["consumers"], cli.now, with_group=False))
    else:
        cli.out.show(styled("no consumers", style=WARN if found["lag"] else FAINT))


@command(app, "create")
def create(
    cli: CommandContext,
    queue: Queue,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the new group.")],
    start: Annotated[
        str, typer.Option(metavar="WHERE", help="earliest, latest, a sequence or a time.")
    ] = "earliest",
) -> None:
    """Create a group before its first consumer, so that it misses nothing."""
    made = cli.api.post(queue_path(queue, "groups"), {"name": group, "start": start})
    if cli.print_if_json(made):
        return
    cli.out.show(
        f"Created group {made['name']} of {queue}: {format_plural(made['lag'], 'message')} to go."
    )


@command(app, "delete")
def delete(cli: CommandContext, queue: Queue, group: Group, yes: Yes = False) -> None:
    """Remove a group and its position. Messages that only it still needed are deleted."""
    found = cli.api.get(queue_path(queue, "groups", group))
    cli.out.confirm(
        f"Delete group {group} of {queue}, {format_plural(found['lag'], 'message')} behind?", yes
    )
    cli.api.delete(queue_path(queue, "groups", group))
    if cli.print_if_json({"deleted": group, "queue": queue}):
        return
    cli.out.show(f"Deleted group {group} of {queue}.")


@command(app, "pause")
def pause(
    cli: CommandContext,
    queue: Queue,
    group: Group,
    reason: Annotated[str, typer.Option(help="Shown wherever the pause is.")] = "",
) -> None:
    """Deliver nothing more to one group. Its deliveries in flight can be settled."""
    found = cli.api.post(queue_path(queue, "groups", group, "pause"), {"reason": reason})
    if cli.print_if_json(found):
        return
    cli.out.show(f"Paused group {group} of {queue}. To go on: sluice group resume {queue} {group}")


@command(app, "resume")
def resume(cli: CommandContext, queue: Queue, group: Group) -> None:
    """End the pause of a group."""
    found = cli.api.post(queue_path(queue, "groups", group, "resume"))
    if cli.print_if_json(found):
        return
    cli.out.show(
        f"Resumed group {group} of {queue}: {format_plural(found['lag'], 'message')} to go."
    )


def seek(
    cli: CommandContext,
    queue: Queue,
    group: Group,
    to: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="earliest, latest, a sequence, a time (2030-01-31T12:00:00Z) or @seconds.",
        ),
    ],
) -> None:
    """Move a group to another position of the queue: back to replay, forward to skip."""
    found = cli.api.post(queue_path(queue, "groups", group, "seek"), {"to": to})
    if cli.print_if_json(found):
        return
    cli.out.show(
        f"Group {found['name']} of {queue} is at {to}:"
        f" {format_plural(found['lag'], 'message')} to go."
    )


def consumers(cli: CommandContext, queue: Queue, group: GroupOption = "") -> None:
    """List the consumers of a queue, their partitions and whether they make progress."""
    found = [
        row
        for row in cli.api.get(queue_path(queue, "consumers"))
        if not group or row["group"] == group
    ]
    if cli.print_if_json(found):
        return
    if not found:
        cli.out.show(f"{queue} has no consumers. Why not: sluice doctor {queue}")
        return
    cli.out.show(consumer_table(found, cli.now, with_group=True))


def group_table(rows: list[dict[str, Any]], now: float) -> Table:
    columns = [
        Column("group"),
        *(Column(head, number=True) for head in ("lag", "waiting", "out", "retry")),
    ]
    columns += [Column(head, number=True) for head in ("acked", "dead", "oldest", "consumers")]
    return table(columns, [_group_row(row, now) for row in rows])


def consumer_table(rows: list[dict[str, Any]], now: float, with_group: bool) -> Table:
    columns = [Column("client"), *([Column("group")] if with_group else []), Column("partitions")]
    columns += [
        Column("out", number=True),
        Column("prefetch", number=True),
        Column("last settled", number=True),
    ]
    columns.append(Column("state"))
    shown: list[list[str | Text]] = []
    for row in rows:
        cells: list[str | Text] = [row["client"], *([row["group"]] if with_group else [])]
        none = "draining" if row["prefetch"] == 0 else "none"
        cells += [
            format_ranges(row["partitions"]) or none,
            format_count(row["inflight"]),
            format_count(row["prefetch"]),
        ]
        shown.append([*cells, format_age(row["settled_at"], now), _state(row)])
    return table(columns, shown)


def _group_row(row: Mapping[str, Any], now: float) -> list[str | Text]:
    ledger = row["ledger"]
    has_no_consumers = row["lag"] > 0 and not row["consumers"]
    return [
        row["name"],
        format_count(row["lag"]),
        format_count(ledger["waiting"]),
        format_count(ledger["delivered"]),
        styled(format_count(ledger["retrying"]), style=WARN if ledger["retrying"] else ""),
        format_count(ledger["acked"]),
        styled(format_count(ledger["dead"]), style=BAD if ledger["dead"] else ""),
        format_duration(max(0.0, now - to_timestamp(row["oldest_at"])))
        if row["oldest_at"]
        else "-",
        styled(format_count(len(row["consumers"])), style=WARN if has_no_consumers else ""),
    ]


def _held_key_table(found: Mapping[str, Any], now: float) -> Table:
    rows: list[list[str | Text]] = [
        [
            row["key"] or "(the whole queue)",
            row["message_id"],
            format_age(row["held_at"], now),
            format_count(row["waiting"]),
            "put back"
            if not row["dead_letters"]
            else format_plural(row["dead_letters"], "dead letter"),
        ]
        for row in found["held_keys"]
    ]
    columns = [Column("key"), Column("died"), Column("held since", number=True)]
    return table([*columns, Column("waiting", number=True), Column("waits for")], rows)


def _format_lag(row: Mapping[str, Any], now: float) -> str:
    if not row["lag"]:
        return "0, everything is settled"
    oldest = format_age(row["oldest_at"], now)
    return f"{format_plural(row['lag'], 'message')}, the oldest from {oldest}"


def _format_low_watermarks(low_watermarks: list[int]) -> str:
    """Format by partition, the first 16; a queue may have thousands."""
    shown = ", ".join(format_count(sequence) for sequence in low_watermarks[:16])
    return f"{shown}, ... ({len(low_watermarks)} partitions)" if len(low_watermarks) > 16 else shown


def _state(row: Mapping[str, Any]) -> str | Text:
    if row["stalled"]:
        return styled("stalled", style=BAD)
    if not row["connected"]:
        return styled("disconnected", style=WARN)
    if row["slow"]:
        return styled("slow", style=WARN)
    more = [
        word
        for word, is_shown in (
            ("exclusive", row["exclusive"]),
            (f"priority {row['priority']}", row["priority"]),
        )
        if is_shown
    ]
    return ", ".join(["ok", *more])
