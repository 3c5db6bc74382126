"""`sluice peek`: show messages of a queue without taking them."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.cli.support import (
    BAD,
    FAINT,
    WARN,
    Column,
    CommandContext,
    GroupOption,
    Output,
    Queue,
    command,
    escape_controls,
    facts_table,
    format_age,
    format_payload,
    format_size,
    queue_path,
    styled,
    table,
)

Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most this many.")]

_ORIGIN: Final = (
    ("queue", "original-queue"),
    ("partition", "original-partition"),
    ("sequence", "original-sequence"),
)

HEX_BYTES: Final = 48  # of a payload that is not text


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "peek", rich_help_panel=panel)(peek)


def peek(
    cli: CommandContext,
    queue: Queue,
    group: GroupOption = "",
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    start: Annotated[int | None, typer.Option(min=0, help="From this sequence on.")] = None,
    limit: Limit = 20,
    full: Annotated[
        bool, typer.Option("--full", help="Each message whole, not one line of it.")
    ] = False,
) -> None:
    """Show messages without taking them, oldest first. With --group, its unsettled ones."""
    found = cli.api.get(
        queue_path(queue, "messages"), group=group, partition=partition, start=start, limit=limit
    )
    if cli.print_if_json(found):
        return
    if not found:
        cli.out.show(
            f"Nothing is kept in {queue}"
            + (f" that group {group} has to settle." if group else ".")
        )
        return
    if full:
        for nth, message in enumerate(found):
            show_message(cli.out, message, cli.now, gap=nth > 0)
        return
    cli.out.show(message_table(cli.out, found, cli.now))
    if len(found) == limit:
        cli.out.note(f"The oldest {limit}; there may be more: --limit, --start")


def message_table(out: Output, rows: list[dict[str, Any]], now: float) -> Table:
    columns = [
        Column("message"),
        Column("place", number=True),
        Column("age", number=True),
        Column("state"),
    ]
    keyed = any(row["key"] for row in rows)
    columns += [*([Column("key")] if keyed else []), Column("payload", cut=True)]
    shown: list[list[str | Text]] = []
    for row in rows:
        cells: list[str | Text] = [row["message_id"], f"{row['partition']}/{row['sequence']}"]
        cells += [format_age(row["enqueued_at"], now).removesuffix(" ago"), _state(row)]
        shown.append(
            [
                *cells,
                *([row["key"]] if keyed else []),
                format_payload(row["payload"], row["size"], out.payload_width),
            ]
        )
    return table(columns, shown, out.width)


def show_message(out: Output, message: Mapping[str, Any], now: float, gap: bool = False) -> None:
    """Show all of one message, its payload last: as text, or as the first bytes in hex."""
    pairs: list[tuple[str, str | Text]] = [
        (
            "place",
            f"{message['queue']}, partition {message['partition']}, sequence {message['sequence']}",
        ),
        ("state", _state(message)),
        ("enqueued", _format_time(message["enqueued_at"], now)),
    ]
    pairs += [
        (name, _format_time(message[key], now))
        for name, key in (("delivery", "deliver_at"), ("expires", "expires_at"))
        if message[key]
    ]
    plain = (("key", "key"), ("priority", "priority"), ("topic", "topic"), ("type", "content_type"))
    pairs += [
        (name, str(message[key]))
        for name, key in (*plain, ("answer to", "response_topic"))
        if message[key]
    ]
    pairs += [(f"+ {name}", value) for name, value in message["properties"]]
    pairs += _dead_letter_facts(message["headers"], now)
    pairs.append(("size", format_size(message["size"])))
    out.show(
        *([""] if gap else []), styled(message["message_id"], style="bold"), facts_table(pairs)
    )
    payload = message["payload"]
    if payload is None:
        start = base64.b64decode(message["payload_base64"])[:HEX_BYTES]
        out.show(
            styled(
                f"not text: {start.hex(' ')}{' ...' if message['size'] > HEX_BYTES else ''}",
                style=FAINT,
            )
        )
        out.note("All of it is in payload_base64 of --json")
        return
    if payload:
        sys.stdout.write(escape_controls(payload, multiline=True) + "\n")


def _dead_letter_facts(headers: Mapping[str, str], now: float) -> list[tuple[str, str | Text]]:
    """Return the headers of a dead letter in readable form. JSON has all of them unchanged."""
    if "dead-reason" not in headers:
        return [(name, value) for name, value in headers.items()]
    died = headers["dead-reason"] + (
        f": {headers['dead-description']}" if headers.get("dead-description") else ""
    )
    origin = [f"{name} {headers[key]}" for name, key in _ORIGIN if headers.get(key)]
    pairs: list[tuple[str, str | Text]] = [
        ("died of", styled(died, style=BAD)),
        ("died", _format_time(headers.get("dead-at"), now)),
        ("in group", headers.get("original-group", "")),
        ("attempts", headers.get("attempts", "")),
        ("first attempt", _format_time(headers.get("first-attempt-at"), now)),
        ("last attempt", _format_time(headers.get("last-attempt-at"), now)),
        ("was message", ", ".join([headers.get("original-message-id", ""), *origin])),
        ("published", _format_time(headers.get("original-enqueued-at"), now)),
    ]
    return [pair for pair in pairs if pair[1]]


def _format_time(text: str | None, now: float) -> str:
    return f"{format_age(text, now)} ({text})" if text else ""


def _state(row: Mapping[str, Any]) -> str | Text:
    state_text = row["state"] + (
        f" by {row['consumer']}" if row["state"] == "delivered" and row["consumer"] else ""
    )
    failed = row["attempt"] > 1 or row["state"] == "retrying"
    return styled(
        f"{state_text}, attempt {row['attempt']}" if failed else state_text,
        style=WARN if failed else "",
    )
