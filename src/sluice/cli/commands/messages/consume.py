"""`sluice consume`: take messages of a queue as a member of a group, print and settle them.

A message is settled after it was printed, never before: if the reader of the output goes away, the
last message is still in the queue. Messages that were taken and not printed are released, which
does not count as a failure.
"""

from __future__ import annotations

import asyncio
import base64
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final
from uuid import uuid4

import typer

from sluice.cli.support import (
    EXIT_NOT_FOUND,
    FAINT,
    WARN,
    CommandContext,
    CommandError,
    MqttOption,
    Queue,
    command,
    complete_group,
    error_from_refusal,
    format_duration,
    format_plural,
    format_size,
    make_client,
    parse_seconds,
    queue_path,
    styled,
    usage_error,
)
from sluice.client import Client, ClientError, Confirm, Message, PublishRefused, SubscribeRefused
from sluice.client.queues import BROKER_PROPERTIES

PREFETCH: Final = 100


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "consume", rich_help_panel=panel)(consume)


@dataclass
class ConsumeState:
    """The options and the state of a run."""

    topic: str
    group: str
    verb: str  # $ack, $nack or $release
    settle_properties: list[tuple[str, str]]  # of each settlement
    count: int | None
    idle_seconds: float | None  # None: wait forever
    unchecked_reason: str = ""  # why it is unknown whether the queue existed before
    received: int = 0
    unsettled: list[Message] = field(default_factory=list)  # released at the end
    # Settlements in flight.
    pending_acks: list[tuple[Message, Confirm]] = field(default_factory=list)


def consume(
    cli: CommandContext,
    queue: Queue,
    group: Annotated[
        str,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="The group to take them for; created if missing.",
            autocompletion=complete_group,
        ),
    ],
    ack: Annotated[
        bool, typer.Option("--ack", help="Acknowledge each message (the default).")
    ] = False,
    nack: Annotated[
        bool,
        typer.Option("--nack", help="Each message failed: it is redelivered after its backoff."),
    ] = False,
    leave: Annotated[
        bool, typer.Option("--leave", help="Release them at the end, as if never taken.")
    ] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="At most this many.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more until Ctrl-C.")
    ] = False,
    wait: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Without --follow: end after this long without a message."
        ),
    ] = "2s",
    delay: Annotated[
        str,
        typer.Option(metavar="DURATION", help="With --nack: redeliver after this time instead."),
    ] = "",
    description: Annotated[
        str, typer.Option(metavar="TEXT", help="With --nack: what went wrong.")
    ] = "",
    start: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Where a new group begins: earliest, latest, a sequence or a time.",
        ),
    ] = "",
    create: Annotated[
        bool, typer.Option("--create", help="Create the queue if there is none of this name.")
    ] = False,
    mqtt: MqttOption = None,
) -> None:
    """Take messages over MQTT and print them: payloads on stdout, or one JSON object per line."""
    queue_path(queue)
    if ack + nack + leave > 1:
        raise usage_error("--ack, --nack and --leave exclude each other", "Give one of the three")
    if leave and follow:
        raise usage_error(
            "--leave cannot hold messages forever",
            "Leave out --follow, or look at them with `sluice peek`",
        )
    if (delay or description) and not nack:
        raise usage_error("--delay and --description need --nack", "Add --nack, or leave them out")
    if delay:
        parse_seconds("--delay", delay)
    settle_properties = [
        pair for pair in (("delay", delay), ("description", description)) if pair[1]
    ]
    state = ConsumeState(
        topic=f"$queue/{queue.removeprefix('$queue/')}",
        group=group,
        verb="$nack" if nack else "$release" if leave else "$ack",
        settle_properties=settle_properties,
        count=count,
        idle_seconds=None if follow else parse_seconds("--wait", wait),
    )
    if not create:
        state.unchecked_reason = _check_exists(cli, queue)
    try:
        asyncio.run(_consume(cli, mqtt, state, start))
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass  # --follow ends this way
    except (PublishRefused, SubscribeRefused) as refusal:
        raise error_from_refusal(refusal) from None
    if not cli.as_json:
        _print_summary(cli, queue, state)


def _check_exists(cli: CommandContext, queue: str) -> str:
    """Refuse a queue that does not exist: to subscribe to it would create it, and its group.

    Only the REST API tells without creating it. A user who may not ask it, or cannot reach it,
    consumes unchecked; return why.
    """
    try:
        cli.api.get(queue_path(queue))
        return ""
    except CommandError as failure:
        if failure.code != EXIT_NOT_FOUND:
            return failure.what
        hint = failure.remedy if failure.remedy.startswith("Did you mean") else ""
        raise CommandError(
            failure.what,
            f"{hint} To create it, add --create".lstrip(),
            EXIT_NOT_FOUND,
        ) from None


async def _consume(cli: CommandContext, mqtt: str | None, state: ConsumeState, start: str) -> None:
    client = make_client(
        cli.broker,
        mqtt,
        client_id=f"sluice-cli-{uuid4().hex[:8]}",
        reconnect=False,
        max_buffered=PREFETCH,
    )
    task = asyncio.current_task()
    assert task is not None
    # Release first, like Ctrl-C.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with client:
        # With a count, one at a time: prefetched messages would have to be released.
        prefetch = (
            PREFETCH if state.count is None else state.count if state.verb == "$release" else 1
        )
        subscribe_properties = [
            ("consumer-group", state.group),
            ("prefetch", str(min(prefetch, PREFETCH))),
        ]
        await client.subscribe(
            state.topic, qos=1, user=[*subscribe_properties, *([("start", start)] if start else [])]
        )
        try:
            async for message in _receive(client, state):
                state.unsettled.append(message)
                _print_message(cli, message)
                state.received += 1
                last = state.received == state.count
                if state.verb != "$release":
                    state.unsettled.remove(message)
                    await _settle(cli, client, state, message, last)
                if last:
                    break
        finally:
            await _release_unsettled(cli, client, state)


async def _receive(client: Client, state: ConsumeState) -> AsyncIterator[Message]:
    messages = client.messages()
    while True:
        try:
            async with asyncio.timeout(state.idle_seconds):
                message = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            return
        yield message


async def _settle(
    cli: CommandContext, client: Client, state: ConsumeState, message: Message, last: bool
) -> None:
    """Settle a message. The last settlement is written together with the unsubscribe.

    So the broker sends no further message in between, which would count as failed when we
    disconnect.
    """
    confirm = client.publish_nowait(
        f"{state.topic}/{state.verb}",
        qos=1,
        user=[*_delivery_ids(message), ("consumer-group", state.group), *state.settle_properties],
    )
    if last:
        await client.unsubscribe(state.topic)
    state.pending_acks.append((message, confirm))
    if last or state.count is not None or len(state.pending_acks) >= PREFETCH:
        await _await_acks(cli, state)


async def _await_acks(cli: CommandContext, state: ConsumeState) -> None:
    """Wait for the broker's answers to our settlements. A late settlement concerns that message
    alone.
    """
    pending_acks, state.pending_acks = state.pending_acks, []
    for message, confirm in pending_acks:
        try:
            await confirm
        except PublishRefused as refusal:
            cli.out.note(
                f"{_delivery_properties(message).get('message-id', '')}:"
                f" {refusal.reason_string or refusal.what}"
            )


async def _release_unsettled(cli: CommandContext, client: Client, state: ConsumeState) -> None:
    """Release the messages that are not settled, in one write with the unsubscribe.

    A request without effect goes first: its answer arrives after all messages that are in flight to
    us.
    """
    if not client.is_connected:
        return
    await _await_acks(cli, state)
    await client.unsubscribe(f"{client.client_id}/nothing", check=False)
    messages = client.messages()
    try:
        while True:
            async with asyncio.timeout(0):
                state.unsettled.append(await anext(messages))
    except (TimeoutError, StopAsyncIteration, ClientError):
        pass
    for message in state.unsettled:
        delivery_ids = [*_delivery_ids(message), ("consumer-group", state.group)]
        client.publish_nowait(f"{state.topic}/$release", qos=1, user=delivery_ids)
    await client.unsubscribe(state.topic, check=False)
    state.unsettled.clear()


def _delivery_properties(message: Message) -> dict[str, str]:
    """Return the properties that the broker added; they precede those of the publisher."""
    delivery: dict[str, str] = {}
    for name, value in message.properties.user[: len(BROKER_PROPERTIES)]:
        if name in BROKER_PROPERTIES:
            delivery.setdefault(name, value)
    return delivery


def _delivery_ids(message: Message) -> list[tuple[str, str]]:
    delivery = _delivery_properties(message)
    return [(name, delivery[name]) for name in ("message-id", "delivery-token") if name in delivery]


def _print_message(cli: CommandContext, message: Message) -> None:
    """Print a message and flush, before it is settled."""
    if cli.as_json:
        cli.out.print_json_line(_as_json(message))
        return
    if not cli.out.console.is_terminal:
        sys.stdout.buffer.write(message.payload + b"\n")
        sys.stdout.buffer.flush()
        return
    delivery = _delivery_properties(message)
    head = styled(
        f"{delivery.get('message-id', '')}  {delivery.get('partition')}/{delivery.get('sequence')}",
        style=FAINT,
    )
    if delivery.get("attempt", "1") != "1":
        head.append(f"  attempt {delivery['attempt']}", style=WARN)
    try:
        cli.out.show(head, message.payload.decode())
    except UnicodeDecodeError:
        cli.out.show(head, f"({format_size(len(message.payload))}, not text)")
    sys.stdout.flush()


def _as_json(message: Message) -> dict[str, Any]:
    delivery = _delivery_properties(message)
    properties = message.properties
    try:
        text: str | None = message.payload.decode()
    except UnicodeDecodeError:
        text = None
    return {
        "message_id": delivery.get("message-id", ""),
        "queue": delivery.get("queue", ""),
        "group": delivery.get("consumer-group", ""),
        "partition": int(delivery.get("partition", -1)),
        "sequence": int(delivery.get("sequence", -1)),
        "attempt": int(delivery.get("attempt", 1)),
        "enqueued_at": delivery.get("enqueued-at", ""),
        "content_type": properties.content_type or "",
        "properties": [list(pair) for pair in properties.user if delivery.get(pair[0]) != pair[1]],
        "payload": text,
        "payload_base64": base64.b64encode(message.payload).decode(),
    }


def _print_summary(cli: CommandContext, queue: str, state: ConsumeState) -> None:
    outcome = {"$ack": "acked", "$nack": "nacked", "$release": "given back"}[state.verb]
    if state.received:
        cli.out.note(f"{format_plural(state.received, 'message')} {outcome}")
    elif state.idle_seconds is not None:
        cli.out.note(
            f"Nothing came in {format_duration(state.idle_seconds)}."
            f" Why: sluice doctor {queue} --group {state.group}"
        )
        if state.unchecked_reason:
            cli.out.note(
                f"Whether there was a queue {queue} was not checked: {state.unchecked_reason}"
            )
