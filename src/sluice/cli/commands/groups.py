"""Consumer groups: `sluice group ...`, `sluice seek`, `sluice consumers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sluice.cli.support.rest_client import of_queue
from sluice.cli.support.completion import Group, GroupOption, Queue
from sluice.cli.support.options import Yes
from sluice.cli.support.output import BAD, FAINT, WARN, Column, facts, styled, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import ago, count, duration, plural, read_time, runs

app = typer.Typer(no_args_is_help=True, help="The groups of consumers of a queue.")


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="group", rich_help_panel=panel)
    command(root, "seek", rich_help_panel=panel)(seek)
    command(root, "consumers", rich_help_panel=panel)(consumers)


@command(app, "list")
def list_groups(visit: Visit, queue: Queue) -> None:
    """The groups of a queue and how far behind they are."""
    found = visit.api.get(of_queue(queue, "groups"))
    if visit.answered(found):
        return
    if not found:
        visit.out.show(f"{queue} has no groups. A group is there from its first consumer on.")
        return
    visit.out.show(group_table(found, visit.now))


@command(app, "show")
def show(visit: Visit, queue: Queue, group: Group) -> None:
    """One group: its books and its consumers."""
    found = visit.api.get(of_queue(queue, "groups", group))
    if visit.answered(found):
        return
    books = found["ledger"]
    told = [f"{count(books[key])} {key}" for key in ("waiting", "delivered", "retrying", "acked", "dead")]
    told += [f"{count(books[key])} {key}" for key in ("expired", "purged") if books[key]]
    visit.out.show(
        styled(f"{found['name']} of {queue}", style="bold"),
        facts(
            [
                ("lag", _lag(found, visit.now)),
                ("books", f"{count(books['enqueued'])} enqueued = {' + '.join(told)}"),
                ("failures", f"{count(found['nacked'])} nacked, {count(found['redelivered'])} redelivered"),
                ("floors", _floors(found["floors"])),
            ]
        ),
    )
    if found["consumers"]:
        visit.out.show("", consumer_table(found["consumers"], visit.now, with_group=False))
    else:
        visit.out.show(styled("no consumers", style=WARN if found["lag"] else FAINT))


@command(app, "create")
def create(
    visit: Visit,
    queue: Queue,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the new group.")],
    start: Annotated[
        str, typer.Option(metavar="WHERE", help="earliest, latest, a sequence or a time.")
    ] = "earliest",
) -> None:
    """Make a group before its first consumer comes, so that it misses nothing."""
    made = visit.api.post(of_queue(queue, "groups"), {"name": group, "start": start})
    if visit.answered(made):
        return
    visit.out.show(f"Created group {made['name']} of {queue}: {plural(made['lag'], 'message')} to go.")


@command(app, "delete")
def delete(visit: Visit, queue: Queue, group: Group, yes: Yes = False) -> None:
    """Remove a group and its position. Messages that only it still needed go too."""
    found = visit.api.get(of_queue(queue, "groups", group))
    visit.out.confirm(f"Delete group {group} of {queue}, {plural(found['lag'], 'message')} behind?", yes)
    visit.api.delete(of_queue(queue, "groups", group))
    if visit.answered({"deleted": group, "queue": queue}):
        return
    visit.out.show(f"Deleted group {group} of {queue}.")


def seek(
    visit: Visit,
    queue: Queue,
    group: Group,
    to: Annotated[
        str,
        typer.Option(
            metavar="WHERE", help="earliest, latest, a sequence, a time (2030-01-31T12:00:00Z) or @seconds."
        ),
    ],
) -> None:
    """Send a group to another place of the queue: back to replay, forward to skip."""
    found = visit.api.post(of_queue(queue, "groups", group, "seek"), {"to": to})
    if visit.answered(found):
        return
    visit.out.show(f"Group {found['name']} of {queue} is at {to}: {plural(found['lag'], 'message')} to go.")


def consumers(visit: Visit, queue: Queue, group: GroupOption = "") -> None:
    """Who consumes a queue, which partitions they have and whether they move."""
    found = [row for row in visit.api.get(of_queue(queue, "consumers")) if not group or row["group"] == group]
    if visit.answered(found):
        return
    if not found:
        visit.out.show(f"Nobody consumes {queue}. Why not: sluice doctor {queue}")
        return
    visit.out.show(consumer_table(found, visit.now, with_group=True))


def group_table(rows: list[dict[str, Any]], now: float) -> Table:
    columns = [Column("group"), *(Column(head, number=True) for head in ("lag", "waiting", "out", "retry"))]
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
        told: list[str | Text] = [row["client"], *([row["group"]] if with_group else [])]
        none = "draining" if row["prefetch"] == 0 else "none"
        told += [runs(row["partitions"]) or none, count(row["inflight"]), count(row["prefetch"])]
        shown.append([*told, ago(row["settled_at"], now), _state(row)])
    return table(columns, shown)


def _group_row(row: Mapping[str, Any], now: float) -> list[str | Text]:
    books = row["ledger"]
    lonely = row["lag"] > 0 and not row["consumers"]
    return [
        row["name"],
        count(row["lag"]),
        count(books["waiting"]),
        count(books["delivered"]),
        styled(count(books["retrying"]), style=WARN if books["retrying"] else ""),
        count(books["acked"]),
        styled(count(books["dead"]), style=BAD if books["dead"] else ""),
        duration(max(0.0, now - read_time(row["oldest_at"]))) if row["oldest_at"] else "-",
        styled(count(len(row["consumers"])), style=WARN if lonely else ""),
    ]


def _lag(row: Mapping[str, Any], now: float) -> str:
    if not row["lag"]:
        return "0, everything is settled"
    return f"{plural(row['lag'], 'message')}, the oldest from {ago(row['oldest_at'], now)}"


def _floors(floors: list[int]) -> str:
    """By partition; a queue may have thousands of them."""
    shown = ", ".join(count(floor) for floor in floors[:16])
    return f"{shown}, ... ({len(floors)} partitions)" if len(floors) > 16 else shown


def _state(row: Mapping[str, Any]) -> str | Text:
    if row["stalled"]:
        return styled("stalled", style=BAD)
    if not row["connected"]:
        return styled("disconnected", style=WARN)
    if row["slow"]:
        return styled("slow", style=WARN)
    more = [
        word
        for word, told in (("exclusive", row["exclusive"]), (f"priority {row['priority']}", row["priority"]))
        if told
    ]
    return ", ".join(["ok", *more])
