"""Connected clients and persistent sessions: `sluice clients ...`."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.cli.support import (
    FAINT,
    GOOD,
    WARN,
    Column,
    CommandContext,
    Yes,
    command,
    facts_table,
    format_age,
    format_count,
    format_duration,
    format_plural,
    format_size,
    styled,
    table,
    usage_error,
)
from sluice.units import quote_path_segment

app = typer.Typer(
    no_args_is_help=True, help="Connected clients and persistent sessions: see, disconnect."
)

NEVER_EXPIRES: Final = 0xFFFF_FFFF

Client = Annotated[str, typer.Argument(metavar="CLIENT", help="Client id.")]


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="clients", rich_help_panel=panel)


def client_path(client: str) -> str:
    return f"/clients/{quote_path_segment(client)}"


@command(app, "list")
def list_clients(
    cli: CommandContext,
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only client ids with this prefix.")
    ] = "",
    connected: Annotated[bool, typer.Option("--connected", help="Only connected clients.")] = False,
    disconnected: Annotated[
        bool, typer.Option("--disconnected", help="Only sessions without a connection.")
    ] = False,
    user: Annotated[str, typer.Option("--user", help="Only clients of this user.")] = "",
    after: Annotated[str, typer.Option(help="Only client ids after this one.")] = "",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most this many.")
    ] = 100,
) -> None:
    """List clients: user, address, subscriptions, messages in flight, queued and dropped."""
    if connected and disconnected:
        raise usage_error("--connected and --disconnected exclude each other", "Give one of them")
    state = "connected" if connected else "disconnected" if disconnected else ""
    found = cli.api.get("/clients", prefix=prefix, state=state, user=user, after=after, limit=limit)
    if cli.print_if_json(found):
        return
    if not found:
        cli.out.show("No clients match." if prefix or state or user else "No clients.")
        return
    cli.out.show(client_table(found, cli.now, cli.out.width))
    if len(found) == limit:
        cli.out.note(f"The first {limit}; go on with --after {found[-1]['client']}")


@command(app, "show")
def show(cli: CommandContext, client: Client) -> None:
    """Show one client with its subscriptions."""
    found = cli.api.get(client_path(client))
    if cli.print_if_json(found):
        return
    one = found["client"]
    expiry = one["session_expiry"]
    cli.out.show(
        styled(one["client"], style="bold"),
        facts_table(
            [
                ("state", _format_state(one, cli.now)),
                ("user", one["user"] or "-"),
                ("protocol", one["protocol"]),
                ("address", one["address"] or "-"),
                ("session", _format_expiry(expiry)),
                ("in flight", format_count(one["inflight"])),
                ("queued", f"{format_count(one['queued'])}, {format_size(one['queued_bytes'])}"),
                ("dropped", format_count(one["dropped"])),
            ]
        ),
    )
    if found["subscriptions"]:
        rows: list[list[str | Text]] = [
            [row["filter"], str(row["qos"])] for row in found["subscriptions"]
        ]
        columns = [Column("subscription"), Column("QoS", number=True)]
        cli.out.show("", table(columns, rows, cli.out.width))
    if found["consumers"]:
        rows = [
            [
                row["queue"],
                row["group"],
                format_count(row["inflight"]),
                format_count(row["prefetch"]),
            ]
            for row in found["consumers"]
        ]
        columns = [
            Column("queue"),
            Column("group"),
            Column("in flight", number=True),
            Column("prefetch", number=True),
        ]
        cli.out.show("", table(columns, rows, cli.out.width))


@command(app, "kick")
def kick(
    cli: CommandContext,
    client: Client,
    end_session: Annotated[
        bool,
        typer.Option(
            "--end-session",
            help="Delete its session too, with subscriptions and pending messages.",
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Disconnect a client. It may connect again; its session survives, unless --end-session."""
    found = cli.api.get(client_path(client))["client"]
    what = f"Disconnect {client}" if found["connected"] else f"Go on with {client}"
    if end_session:
        filters = format_plural(found["subscriptions"], "subscription")
        pending = format_plural(found["queued"], "pending message")
        what += f", and delete its session with {filters} and {pending}"
    cli.out.confirm(f"{what}?", yes)
    path = client_path(client) + ("?end_session=true" if end_session else "")
    done = cli.api.delete(path)
    if cli.print_if_json(done):
        return
    parts = ["disconnected"] if done["disconnected"] else []
    if done["session_ended"]:
        parts.append("session deleted")
    cli.out.show(f"{client}: {', '.join(parts)}.")


def client_table(rows: list[dict[str, Any]], now: float, width: int) -> Table:
    columns = [
        Column("client"),
        Column("state"),
        Column("user"),
        Column("protocol"),
        Column("address"),
        Column("subscriptions", number=True),
        Column("in flight", number=True),
        Column("queued", number=True),
        Column("dropped", number=True),
    ]
    shown: list[list[str | Text]] = [
        [
            row["client"],
            _format_state(row, now),
            row["user"],
            row["protocol"].removeprefix("MQTT "),
            row["address"],
            format_count(row["subscriptions"]),
            format_count(row["inflight"]),
            format_count(row["queued"]),
            styled(format_count(row["dropped"]), style=WARN if row["dropped"] else FAINT),
        ]
        for row in rows
    ]
    return table(columns, shown, width)


def _format_state(row: dict[str, Any], now: float) -> Text:
    if row["connected"]:
        age = format_age(row["connected_at"], now).removesuffix(" ago")
        return styled(f"connected {age}", style=GOOD)
    return styled(f"gone {format_age(row['disconnected_at'], now)}", style=FAINT)


def _format_expiry(seconds: int) -> str:
    if seconds == 0:
        return "ends with the connection"
    if seconds == NEVER_EXPIRES:
        return "does not expire"
    return f"expires {format_duration(seconds)} after the connection"
