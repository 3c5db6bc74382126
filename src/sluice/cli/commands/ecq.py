"""Exclusive compacted queues: `sluice ecq ...`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sluice.cli.commands.messages.peek import Limit, message_table, show_message
from sluice.cli.support.options import Yes
from sluice.cli.support.output import FAINT, WARN, Column, facts, styled, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import ago, count, plural, size
from sluice.units import path_segment

app = typer.Typer(
    no_args_is_help=True, help="Exclusive compacted queues: the last values of one client's keys."
)

Client = Annotated[str, typer.Argument(metavar="CLIENT", help="Client id of the owner.")]


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="ecq", rich_help_panel=panel)


def of_owner(client: str, *parts: str) -> str:
    return "/".join(["ecq", path_segment(client), *parts])


@command(app, "list")
def list_owners(
    visit: Visit,
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only client ids that begin so.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most this many.")] = 100,
) -> None:
    """Who owns one, how much waits, and how far each has come."""
    found = visit.api.get("ecq", prefix=prefix, limit=limit)
    if visit.answered(found):
        return
    if not found and prefix:
        visit.out.show(f"No client whose id begins with {prefix!r} owns an exclusive queue.")
        return
    if not found:
        visit.out.show(
            "Nobody owns an exclusive queue. One is there from the first value on: $ECQ/w/<client>/<key>"
        )
        return
    visit.out.show(owner_table(found, visit.now, visit.out.width))
    if len(found) == limit:
        visit.out.note(f"The first {limit}; there may be more: --limit, or a prefix")


@command(app, "show")
def show(visit: Visit, client: Client) -> None:
    """One owner."""
    found = visit.api.get(of_owner(client))
    if visit.answered(found):
        return
    visit.out.show(
        styled(f"$ECQ/{found['client']}", style="bold"),
        facts(
            [
                (
                    "waiting",
                    f"{count(found['depth'])} of {plural(found['keys'], 'key')}, {size(found['bytes'])}",
                ),
                ("last sequence", _written(found, visit.now)),
                ("acknowledged", _acked(found, visit.now)),
                ("owner", _where(found)),
            ]
        ),
    )


@command(app, "peek")
def peek(
    visit: Visit,
    client: Client,
    start: Annotated[int, typer.Option(min=0, help="From this sequence on.")] = 0,
    limit: Limit = 20,
    full: Annotated[bool, typer.Option("--full", help="Each value whole, not one line of it.")] = False,
) -> None:
    """Look at the last value of each key without taking it, oldest first."""
    found = visit.api.get(of_owner(client, "values"), start=start, limit=limit)
    if visit.answered(found):
        return
    if not found:
        visit.out.show(f"Nothing is kept for {client}.")
        return
    if full:
        for nth, message in enumerate(found):
            show_message(visit.out, message, visit.now, gap=nth > 0)
        return
    visit.out.show(message_table(visit.out, found, visit.now))
    if len(found) == limit:
        visit.out.note(f"The oldest {limit}; there may be more: --limit, --start")


@command(app, "purge")
def purge(visit: Visit, client: Client, yes: Yes = False) -> None:
    """Throw away every value of an owner. Its sequences go on where they were."""
    found = visit.api.get(of_owner(client))
    visit.out.confirm(f"Throw away {plural(found['keys'], 'value')} of {client}?", yes)
    done = visit.api.post(of_owner(client, "purge"))
    if visit.answered(done):
        return
    visit.out.show(f"Threw away {plural(done['purged'], 'value')} of {client}.")


def owner_table(rows: list[dict[str, Any]], now: float, width: int) -> Table:
    columns = [
        Column("client"),
        Column("waiting", number=True),
        Column("keys", number=True),
        Column("size", number=True),
        Column("last sequence", number=True),
        Column("acknowledged", number=True),
        Column("", cut=True),
        Column("owner"),
    ]
    shown: list[list[str | Text]] = [
        [
            row["client"],
            styled(count(row["depth"]), style="" if row["depth"] else FAINT),
            count(row["keys"]),
            size(row["bytes"]),
            count(row["last_sequence"]),
            count(row["acked_sequence"]),
            ago(row["acked_at"], now) if row["acked_at"] else "never",
            _where(row),
        ]
        for row in rows
    ]
    return table(columns, shown, width)


def _written(found: dict[str, Any], now: float) -> str:
    if not found["written_at"]:
        return "nothing was ever written"
    return f"{count(found['last_sequence'])}, written {ago(found['written_at'], now)}"


def _acked(found: dict[str, Any], now: float) -> str:
    if not found["acked_at"]:
        return "nothing yet"
    return f"up to {count(found['acked_sequence'])}, {ago(found['acked_at'], now)}"


def _where(found: dict[str, Any]) -> Text:
    if not found["connected"]:
        return styled("away", style=FAINT)
    return styled("subscribed") if found["subscribed"] else styled("connected, not subscribed", style=WARN)
