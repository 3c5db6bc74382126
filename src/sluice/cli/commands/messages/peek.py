"""`sluice peek`: what waits in a queue, without taking it."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.cli.support.rest_client import of_queue
from sluice.cli.support.completion import GroupOption, Queue
from sluice.cli.support.output import BAD, FAINT, WARN, Column, Output, facts, styled, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import ago, one_line, size, visible

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
    visit: Visit,
    queue: Queue,
    group: GroupOption = "",
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    start: Annotated[int | None, typer.Option(min=0, help="From this sequence on.")] = None,
    limit: Limit = 20,
    full: Annotated[bool, typer.Option("--full", help="Each message whole, not one line of it.")] = False,
) -> None:
    """Look at messages without taking them, oldest first. With --group, what that group has not settled."""
    found = visit.api.get(
        of_queue(queue, "messages"), group=group, partition=partition, start=start, limit=limit
    )
    if visit.answered(found):
        return
    if not found:
        visit.out.show(
            f"Nothing is kept in {queue}" + (f" that group {group} has to settle." if group else ".")
        )
        return
    if full:
        for nth, message in enumerate(found):
            show_message(visit.out, message, visit.now, gap=nth > 0)
        return
    visit.out.show(message_table(visit.out, found, visit.now))
    if len(found) == limit:
        visit.out.note(f"The oldest {limit}; there may be more: --limit, --start")


def message_table(out: Output, rows: list[dict[str, Any]], now: float) -> Table:
    columns = [Column("message"), Column("place", number=True), Column("age", number=True), Column("state")]
    keyed = any(row["key"] for row in rows)
    columns += [*([Column("key")] if keyed else []), Column("payload", cut=True)]
    shown: list[list[str | Text]] = []
    for row in rows:
        told: list[str | Text] = [row["message_id"], f"{row['partition']}/{row['sequence']}"]
        told += [ago(row["enqueued_at"], now).removesuffix(" ago"), _state(row)]
        shown.append(
            [
                *told,
                *([row["key"]] if keyed else []),
                one_line(row["payload"], row["size"], out.payload_width),
            ]
        )
    return table(columns, shown, out.width)


def show_message(out: Output, message: Mapping[str, Any], now: float, gap: bool = False) -> None:
    """All of one message, its payload last: as it is on a line of its own, or as many bytes."""
    pairs: list[tuple[str, str | Text]] = [
        ("place", f"{message['queue']}, partition {message['partition']}, sequence {message['sequence']}"),
        ("state", _state(message)),
        ("enqueued", _moment(message["enqueued_at"], now)),
    ]
    pairs += [
        (name, _moment(message[key], now))
        for name, key in (("delivery", "deliver_at"), ("expires", "expires_at"))
        if message[key]
    ]
    plain = (("key", "key"), ("priority", "priority"), ("topic", "topic"), ("type", "content_type"))
    pairs += [
        (name, str(message[key])) for name, key in (*plain, ("answer to", "response_topic")) if message[key]
    ]
    pairs += [(f"+ {name}", value) for name, value in message["properties"]]
    pairs += _story(message["headers"], now)
    pairs.append(("size", size(message["size"])))
    out.show(*([""] if gap else []), styled(message["message_id"], style="bold"), facts(pairs))
    payload = message["payload"]
    if payload is None:
        start = base64.b64decode(message["payload_base64"])[:HEX_BYTES]
        out.show(
            styled(f"not text: {start.hex(' ')}{' ...' if message['size'] > HEX_BYTES else ''}", style=FAINT)
        )
        out.note("All of it is in payload_base64 of --json")
        return
    if payload:
        sys.stdout.write(visible(payload, lines=True) + "\n")


def _story(headers: Mapping[str, str], now: float) -> list[tuple[str, str | Text]]:
    """What Sluice wrote on a dead letter, for people. JSON has all of it, word by word."""
    if "dead-reason" not in headers:
        return [(name, value) for name, value in headers.items()]
    died = headers["dead-reason"] + (
        f": {headers['dead-description']}" if headers.get("dead-description") else ""
    )
    place = [f"{name} {headers[key]}" for name, key in _ORIGIN if headers.get(key)]
    pairs: list[tuple[str, str | Text]] = [
        ("died of", styled(died, style=BAD)),
        ("died", _moment(headers.get("dead-at"), now)),
        ("in group", headers.get("original-group", "")),
        ("attempts", headers.get("attempts", "")),
        ("first attempt", _moment(headers.get("first-attempt-at"), now)),
        ("last attempt", _moment(headers.get("last-attempt-at"), now)),
        ("was message", ", ".join([headers.get("original-message-id", ""), *place])),
        ("published", _moment(headers.get("original-enqueued-at"), now)),
    ]
    return [pair for pair in pairs if pair[1]]


def _moment(text: str | None, now: float) -> str:
    return f"{ago(text, now)} ({text})" if text else ""


def _state(row: Mapping[str, Any]) -> str | Text:
    told = row["state"] + (
        f" by {row['consumer']}" if row["state"] == "delivered" and row["consumer"] else ""
    )
    failed = row["attempt"] > 1 or row["state"] == "retrying"
    return styled(f"{told}, attempt {row['attempt']}" if failed else told, style=WARN if failed else "")
