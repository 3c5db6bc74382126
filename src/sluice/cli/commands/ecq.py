"""Exclusive compacted queues: `sluice ecq ...`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sluice.cli.commands.messages.peek import Limit, message_table, show_message
from sluice.cli.support import (
    FAINT,
    WARN,
    Column,
    CommandContext,
    Yes,
    command,
    facts_table,
    format_age,
    format_count,
    format_plural,
    format_size,
    styled,
    table,
)
from sluice.units import quote_path_segment

app = typer.Typer(
    no_args_is_help=True, help="Exclusive compacted queues: the last values of one client's keys."
)

Client = Annotated[str, typer.Argument(metavar="CLIENT", help="Client id of the owner.")]


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="ecq", rich_help_panel=panel)


def owner_path(client: str, *parts: str) -> str:
    return "/".join(["/ecq", quote_path_segment(client), *parts])


@command(app, "list")
def list_owners(
    cli: CommandContext,
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only client ids with this prefix.")
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most this many.")
    ] = 100,
) -> None:
    """List the owners, how many values wait, and how far each has acknowledged."""
    found = cli.api.get("/ecq", prefix=prefix, limit=limit)
    if cli.print_if_json(found):
        return
    if not found and prefix:
        cli.out.show(f"No client whose id begins with {prefix!r} owns an exclusive queue.")
        return
    if not found:
        cli.out.show(
            "No client owns an exclusive queue. The first value creates one: $ECQ/w/<client>/<key>"
        )
        return
    cli.out.show(owner_table(found, cli.now, cli.out.width))
    if len(found) == limit:
        cli.out.note(f"The first {limit}; there may be more: --limit, or a prefix")


@command(app, "show")
def show(cli: CommandContext, client: Client) -> None:
    """Show one owner."""
    found = cli.api.get(owner_path(client))
    if cli.print_if_json(found):
        return
    cli.out.show(
        styled(f"$ECQ/{found['client']}", style="bold"),
        facts_table(
            [
                (
                    "waiting",
                    f"{format_count(found['depth'])} of {format_plural(found['keys'], 'key')}, "
                    f"{format_size(found['bytes'])}",
                ),
                ("last sequence", _format_written(found, cli.now)),
                ("acknowledged", _format_acked(found, cli.now)),
                ("owner", _format_owner(found)),
            ]
        ),
    )


@command(app, "peek")
def peek(
    cli: CommandContext,
    client: Client,
    start: Annotated[int, typer.Option(min=0, help="From this sequence on.")] = 0,
    limit: Limit = 20,
    full: Annotated[
        bool, typer.Option("--full", help="Each value whole, not one line of it.")
    ] = False,
) -> None:
    """Look at the last value of each key without taking it, oldest first."""
    found = cli.api.get(owner_path(client, "values"), start=start, limit=limit)
    if cli.print_if_json(found):
        return
    if not found:
        cli.out.show(f"Nothing is kept for {client}.")
        return
    if full:
        for nth, message in enumerate(found):
            show_message(cli.out, message, cli.now, gap=nth > 0)
        return
    cli.out.show(message_table(cli.out, found, cli.now))
    if len(found) == limit:
        cli.out.note(f"The oldest {limit}; there may be more: --limit, --start")


@command(app, "purge")
def purge(cli: CommandContext, client: Client, yes: Yes = False) -> None:
    """Delete every value of an owner. Its sequences continue."""
    found = cli.api.get(owner_path(client))
    cli.out.confirm(f"Throw away {format_plural(found['keys'], 'value')} of {client}?", yes)
    done = cli.api.post(owner_path(client, "purge"))
    if cli.print_if_json(done):
        return
    cli.out.show(f"Threw away {format_plural(done['purged'], 'value')} of {client}.")


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
            styled(format_count(row["depth"]), style="" if row["depth"] else FAINT),
            format_count(row["keys"]),
            format_size(row["bytes"]),
            format_count(row["last_sequence"]),
            format_count(row["acked_sequence"]),
            format_age(row["acked_at"], now) if row["acked_at"] else "never",
            _format_owner(row),
        ]
        for row in rows
    ]
    return table(columns, shown, width)


def _format_written(found: dict[str, Any], now: float) -> str:
    if not found["written_at"]:
        return "nothing was ever written"
    return f"{format_count(found['last_sequence'])}, written {format_age(found['written_at'], now)}"


def _format_acked(found: dict[str, Any], now: float) -> str:
    if not found["acked_at"]:
        return "nothing yet"
    return f"up to {format_count(found['acked_sequence'])}, {format_age(found['acked_at'], now)}"


def _format_owner(found: dict[str, Any]) -> Text:
    if not found["connected"]:
        return styled("away", style=FAINT)
    return (
        styled("subscribed")
        if found["subscribed"]
        else styled("connected, not subscribed", style=WARN)
    )
