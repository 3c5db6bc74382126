"""`sluice publish`: publish one message, the lines of stdin or a file, or many copies.

It uses MQTT with QoS 1, like any publisher: an acknowledgement means that the message is stored.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final
from uuid import uuid4

import typer
from rich.progress import Progress, TaskID

from sluice.cli.support import (
    CommandContext,
    CommandError,
    MqttOption,
    Queue,
    command,
    error_from_refusal,
    format_plural,
    make_client,
    parse_seconds,
    queue_path,
    usage_error,
)
from sluice.client import Client, Confirm, PublishRefused
from sluice.errors import SluiceError

MAX_IN_FLIGHT: Final = 1000  # at once
CHUNK_BYTES: Final = 65_536


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "publish", rich_help_panel=panel)(publish)


@dataclass
class PublishBatch:
    """The messages to publish, and the progress so far."""

    topic: str
    payloads: AsyncIterator[list[bytes]]  # as they arrive
    total: int | None
    properties: list[tuple[str, str]]
    message_id: str  # of the one message, or the prefix of each id
    options: dict[str, Any]
    is_duplicate: bool = False  # the queue had a message of this id, and has no second one
    sent: int = 0
    published: int = 0
    refusal: PublishRefused | None = None
    in_flight: list[Confirm] = field(default_factory=list)


def publish(
    cli: CommandContext,
    queue: Queue,
    payload: Annotated[
        str | None, typer.Argument(help="The message; without it each line of stdin is one.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="The whole file as one message."),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="With --file: each line of it is a message.")
    ] = False,
    key: Annotated[
        str, typer.Option("--key", "-k", help="Partition key: messages of one key stay in order.")
    ] = "",
    message_id: Annotated[
        str,
        typer.Option(
            "--id", help="Message id; of several messages the beginning, -1, -2 ... follow."
        ),
    ] = "",
    priority: Annotated[int, typer.Option(min=0, max=9, help="Higher goes first.")] = 0,
    delay: Annotated[
        str, typer.Option(metavar="DURATION", help="Not before 500ms, 10s, 2h have passed.")
    ] = "",
    expiry: Annotated[str, typer.Option(metavar="DURATION", help="Time to live.")] = "",
    content_type: Annotated[
        str, typer.Option(metavar="TYPE", help="Such as application/json.")
    ] = "",
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property", "-p", metavar="KEY=VALUE", help="User property; can be repeated."
        ),
    ] = None,
    copies: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Publish it this many times.")
    ] = 1,
    mqtt: MqttOption = None,
) -> None:
    """Publish to a queue. Ends when the broker has stored every message."""
    queue_path(queue)
    pairs = [("partition-key", key)] if key else []
    pairs += [("priority", str(priority))] if priority else []
    pairs += [("delay", delay)] if delay and parse_seconds("--delay", delay) else []
    pairs += [_parse_property(one) for one in properties or []]
    options: dict[str, Any] = {"content_type": content_type} if content_type else {}
    if expiry:
        options["expiry_seconds"] = max(1, round(parse_seconds("--expiry", expiry)))
    payloads, total = _payloads(payload, file, lines, copies)
    single = total == 1
    batch = PublishBatch(
        topic=f"$queue/{queue.removeprefix('$queue/')}",
        payloads=payloads,
        total=total,
        properties=pairs,
        # A single message gets an id here, so that `explain` can find it.
        message_id=message_id or (uuid4().hex[:16] if single else ""),
        options=options,
    )
    known = _find_stored(cli, queue, message_id) if message_id and single else None
    started = time.monotonic()
    try:
        asyncio.run(_publish(cli, mqtt, batch))
    except (SluiceError, KeyboardInterrupt):
        if batch.published:  # messages stored before the error stay stored
            _report(cli, queue, batch, time.monotonic() - started)
        raise
    batch.is_duplicate = known is not None and known == _find_stored(cli, queue, message_id)
    _report(cli, queue, batch, time.monotonic() - started)


def _find_stored(cli: CommandContext, queue: str, message_id: str) -> object:
    """Return what tells a stored message from a later one of the same id; None if unknown.

    An acknowledgement of MQTT does not say whether a message was a duplicate. Without the REST API,
    or for a message that is settled and forgotten, nothing is known.
    """
    try:
        trace = cli.api.get(queue_path(queue, "messages", message_id))
    except CommandError:
        return None
    message, events = trace["message"], trace["events"]
    if message is not None:
        return message["partition"], message["sequence"]
    return events[0]["at"] if events else None


async def _publish(cli: CommandContext, mqtt: str | None, batch: PublishBatch) -> None:
    client = make_client(
        cli.broker, mqtt, client_id=f"sluice-cli-{uuid4().hex[:8]}", reconnect=False
    )
    async with client:
        with cli.out.progress(batch.total) as progress:
            task = progress.add_task("publishing", total=batch.total, rate="")
            async for payloads in batch.payloads:
                for payload in payloads:
                    _send(client, batch, payload)
                await _await_acks(batch, progress, task)
                if batch.refusal is not None:
                    break
    if batch.refusal is not None:
        raise error_from_refusal(batch.refusal)


def _send(client: Client, batch: PublishBatch, payload: bytes) -> None:
    batch.sent += 1
    user = batch.properties
    if batch.message_id:
        name = batch.message_id if batch.total == 1 else f"{batch.message_id}-{batch.sent}"
        user = [("message-id", name), *user]
    batch.in_flight.append(
        client.publish_nowait(batch.topic, payload, qos=1, user=user, **batch.options)
    )


async def _await_acks(batch: PublishBatch, progress: Progress, task: TaskID) -> None:
    """Wait for all acknowledgements, also after a refusal: stored messages are counted."""
    started, before = time.monotonic(), batch.published
    for confirm in batch.in_flight:
        try:
            await confirm
            batch.published += 1
        except PublishRefused as refusal:
            batch.refusal = batch.refusal or refusal
    batch.in_flight.clear()
    speed = (batch.published - before) / max(time.monotonic() - started, 1e-6)
    progress.update(task, completed=batch.published, rate=f"{speed:,.0f}/s")


def _report(cli: CommandContext, queue: str, batch: PublishBatch, seconds: float) -> None:
    if cli.as_json:
        summary: dict[str, object] = {"queue": queue, "published": batch.published}
        if batch.total == 1:
            summary["message_id"] = batch.message_id
            summary["duplicate"] = batch.is_duplicate
        cli.out.print_json(summary)
    elif batch.is_duplicate:
        cli.out.show(
            f"{batch.message_id} is in {queue} already: acknowledged, and not stored again."
        )
    elif batch.total == 1 and batch.published:
        cli.out.show(f"Published {batch.message_id} to {queue}.")
    elif batch.published:
        speed = f" ({batch.published / seconds:,.0f}/s)" if batch.published >= 100 else ""
        cli.out.show(f"Published {format_plural(batch.published, 'message')} to {queue}{speed}.")
    elif not batch.sent:
        cli.out.note("Nothing to publish: stdin was empty.")


def _payloads(
    payload: str | None, file: Path | None, lines: bool, copies: int
) -> tuple[AsyncIterator[list[bytes]], int | None]:
    """Return the messages, and their number if that is known."""
    if payload is not None and file is not None:
        raise usage_error("a payload and --file exclude each other", "Give one of the two")
    if lines and file is None:
        raise usage_error(
            "--lines needs --file", "Without a payload, lines of stdin are messages anyway"
        )
    if payload is None and file is None and sys.stdin.isatty():
        raise usage_error(
            "there is nothing to publish",
            "Give a payload, --file, or lines on stdin: echo hello | sluice publish QUEUE",
        )
    if payload is not None:
        return _copies(payload.encode("utf-8", "surrogateescape"), copies), copies
    if file is not None and not lines:
        return _copies(file.read_bytes(), copies), copies
    if copies != 1:
        raise usage_error(
            "--count repeats one message, not lines", "Leave it out, or give a payload"
        )
    return read_lines(file.open("rb") if file is not None else sys.stdin.buffer), None


async def _copies(payload: bytes, count: int) -> AsyncIterator[list[bytes]]:
    for start in range(0, count, MAX_IN_FLIGHT):
        yield [payload] * min(MAX_IN_FLIGHT, count - start)


def _parse_property(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise usage_error(f"--property {text!r} is not KEY=VALUE", "Write it as site=north")
    return name, value


async def read_lines(source: BinaryIO) -> AsyncIterator[list[bytes]]:
    """Yield the lines that have arrived, without line ends. Closes `source`.

    The last line need not have a line end. `tail -f log | sluice publish logs` may be silent for an
    hour: the connection must stay alive meanwhile, and Ctrl-C must end it. A thread blocked in a
    read can be neither notified nor ended, so the event loop itself waits for the descriptor.
    """
    rest = b""
    with source:
        while data := await _read(source):
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            if lines:
                yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest.removesuffix(b"\r")]


async def _read(source: BinaryIO) -> bytes:
    try:
        descriptor = source.fileno()
        await _wait_readable(descriptor)
    except (OSError, ValueError):  # a plain file, /dev/null, or no file
        return source.read(CHUNK_BYTES)
    return os.read(descriptor, CHUNK_BYTES)


async def _wait_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
