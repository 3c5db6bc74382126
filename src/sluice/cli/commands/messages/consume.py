"""`sluice consume`: take messages of a queue as a member of a group, print them, and say what became of them.

A message is settled after it was printed, never before: when the reader of our output goes away, the last message is
still in the queue. What was taken and not printed is given back without counting as a failure.
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

from sluice.cli.support.rest_client import of_queue
from sluice.cli.support.completion import Queue, complete_group
from sluice.cli.support.errors import wrong_command
from sluice.cli.support.mqtt_client import Mqtt, in_words, make_client, seconds_of
from sluice.cli.support.output import FAINT, WARN, styled
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import duration, plural, size
from sluice.client import Client, ClientError, Confirm, Message, PublishRefused, SubscribeRefused
from sluice.client.queues.delivery import FACTS

PREFETCH: Final = 100


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "consume", rich_help_panel=panel)(consume)


@dataclass
class Taking:
    """How messages are taken."""

    topic: str
    group: str
    verb: str  # $ack, $nack or $release
    told: list[tuple[str, str]]  # with each settlement
    count: int | None
    idle_seconds: float | None  # None: wait for ever
    taken: int = 0
    held: list[Message] = field(default_factory=list)  # not settled: given back at the end
    answers: list[tuple[Message, Confirm]] = field(default_factory=list)  # settlements under way


def consume(
    visit: Visit,
    queue: Queue,
    group: Annotated[
        str,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="The group to take them for; it is made if there is none.",
            autocompletion=complete_group,
        ),
    ],
    ack: Annotated[bool, typer.Option("--ack", help="Each message is done (this is the default).")] = False,
    nack: Annotated[
        bool, typer.Option("--nack", help="Each message failed: it comes again after its backoff.")
    ] = False,
    leave: Annotated[
        bool, typer.Option("--leave", help="Give them back at the end, as if never taken.")
    ] = False,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="At most this many.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until Ctrl-C.")] = False,
    wait: Annotated[
        str, typer.Option(metavar="DURATION", help="Without --follow: end when nothing came for so long.")
    ] = "2s",
    delay: Annotated[
        str, typer.Option(metavar="DURATION", help="With --nack: come again after this time instead.")
    ] = "",
    description: Annotated[str, typer.Option(metavar="TEXT", help="With --nack: what went wrong.")] = "",
    start: Annotated[
        str,
        typer.Option(
            metavar="WHERE", help="Where a new group begins: earliest, latest, a sequence or a time."
        ),
    ] = "",
    mqtt: Mqtt = None,
) -> None:
    """Take messages over MQTT and print them: payloads on stdout, or one JSON object per line."""
    of_queue(queue)
    if ack + nack + leave > 1:
        raise wrong_command("--ack, --nack and --leave exclude each other", "Give one of the three")
    if leave and follow:
        raise wrong_command(
            "--leave cannot hold messages for ever", "Leave out --follow, or look at them with `sluice peek`"
        )
    if (delay or description) and not nack:
        raise wrong_command("--delay and --description are said of --nack", "Add --nack, or leave them out")
    if delay:
        seconds_of("--delay", delay)
    told = [pair for pair in (("delay", delay), ("description", description)) if pair[1]]
    taking = Taking(
        topic=f"$queue/{queue.removeprefix('$queue/')}",
        group=group,
        verb="$nack" if nack else "$release" if leave else "$ack",
        told=told,
        count=count,
        idle_seconds=None if follow else seconds_of("--wait", wait),
    )
    try:
        asyncio.run(_consume(visit, mqtt, taking, start))
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass  # how --follow ends
    except (PublishRefused, SubscribeRefused) as refusal:
        raise in_words(refusal) from None
    if not visit.as_json:
        _sum_up(visit, queue, taking)


async def _consume(visit: Visit, mqtt: str | None, taking: Taking, start: str) -> None:
    client = make_client(
        visit.where, mqtt, client_id=f"sluice-cli-{uuid4().hex[:8]}", reconnect=False, max_buffered=PREFETCH
    )
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # give back first, like Ctrl-C
    async with client:
        # With a count, one at a time: what is sent ahead of need would have to be given back.
        ahead = PREFETCH if taking.count is None else taking.count if taking.verb == "$release" else 1
        wishes = [("consumer-group", taking.group), ("prefetch", str(min(ahead, PREFETCH)))]
        await client.subscribe(taking.topic, qos=1, user=[*wishes, *([("start", start)] if start else [])])
        try:
            async for message in _arriving(client, taking):
                taking.held.append(message)
                _print(visit, message)
                taking.taken += 1
                last = taking.taken == taking.count
                if taking.verb != "$release":
                    taking.held.remove(message)
                    await _settle(visit, client, taking, message, last)
                if last:
                    break
        finally:
            await _give_back(visit, client, taking)


async def _arriving(client: Client, taking: Taking) -> AsyncIterator[Message]:
    messages = client.messages()
    while True:
        try:
            async with asyncio.timeout(taking.idle_seconds):
                message = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            return
        yield message


async def _settle(visit: Visit, client: Client, taking: Taking, message: Message, last: bool) -> None:
    """The last one leaves together with the subscription, in one write: nothing more can be sent in between, to be
    counted as a failure when we go."""
    confirm = client.publish_nowait(
        f"{taking.topic}/{taking.verb}",
        qos=1,
        user=[*_named(message), ("consumer-group", taking.group), *taking.told],
    )
    if last:
        await client.unsubscribe(taking.topic)
    taking.answers.append((message, confirm))
    if last or taking.count is not None or len(taking.answers) >= PREFETCH:
        await _hear(visit, taking)


async def _hear(visit: Visit, taking: Taking) -> None:
    """What the broker says to our settlements. One that came too late concerns that message alone."""
    answers, taking.answers = taking.answers, []
    for message, confirm in answers:
        try:
            await confirm
        except PublishRefused as refusal:
            visit.out.note(
                f"{_story(message).get('message-id', '')}: {refusal.reason_string or refusal.what}"
            )


async def _give_back(visit: Visit, client: Client, taking: Taking) -> None:
    """What we have and did not settle, unharmed: releases and the end of the subscription in one write. A question
    without meaning goes before: its answer stands in the stream behind all that is still on its way to us."""
    if not client.is_connected:
        return
    await _hear(visit, taking)
    await client.unsubscribe(f"{client.client_id}/nothing", check=False)
    messages = client.messages()
    try:
        while True:
            async with asyncio.timeout(0):
                taking.held.append(await anext(messages))
    except (TimeoutError, StopAsyncIteration, ClientError):
        pass
    for message in taking.held:
        named = [*_named(message), ("consumer-group", taking.group)]
        client.publish_nowait(f"{taking.topic}/$release", qos=1, user=named)
    await client.unsubscribe(taking.topic, check=False)
    taking.held.clear()


def _story(message: Message) -> dict[str, str]:
    """What the broker wrote on the delivery: it stands before what the publisher wrote."""
    story: dict[str, str] = {}
    for name, value in message.properties.user[: len(FACTS)]:
        if name in FACTS:
            story.setdefault(name, value)
    return story


def _named(message: Message) -> list[tuple[str, str]]:
    story = _story(message)
    return [(name, story[name]) for name in ("message-id", "delivery-token") if name in story]


def _print(visit: Visit, message: Message) -> None:
    """On disk or down the pipe before it is settled: flushed."""
    if visit.as_json:
        visit.out.line(_as_json(message))
        return
    if not visit.out.console.is_terminal:
        sys.stdout.buffer.write(message.payload + b"\n")
        sys.stdout.buffer.flush()
        return
    story = _story(message)
    head = styled(
        f"{story.get('message-id', '')}  {story.get('partition')}/{story.get('sequence')}",
        style=FAINT,
    )
    if story.get("attempt", "1") != "1":
        head.append(f"  attempt {story['attempt']}", style=WARN)
    try:
        visit.out.show(head, message.payload.decode())
    except UnicodeDecodeError:
        visit.out.show(head, f"({size(len(message.payload))}, not text)")
    sys.stdout.flush()


def _as_json(message: Message) -> dict[str, Any]:
    story = _story(message)
    properties = message.properties
    try:
        text: str | None = message.payload.decode()
    except UnicodeDecodeError:
        text = None
    return {
        "message_id": story.get("message-id", ""),
        "queue": story.get("queue", ""),
        "group": story.get("consumer-group", ""),
        "partition": int(story.get("partition", -1)),
        "sequence": int(story.get("sequence", -1)),
        "attempt": int(story.get("attempt", 1)),
        "enqueued_at": story.get("enqueued-at", ""),
        "content_type": properties.content_type or "",
        "properties": [list(pair) for pair in properties.user if story.get(pair[0]) != pair[1]],
        "payload": text,
        "payload_base64": base64.b64encode(message.payload).decode(),
    }


def _sum_up(visit: Visit, queue: str, taking: Taking) -> None:
    done = {"$ack": "acked", "$nack": "nacked", "$release": "given back"}[taking.verb]
    if taking.taken:
        visit.out.note(f"{plural(taking.taken, 'message')} {done}")
    elif taking.idle_seconds is not None:
        visit.out.note(
            f"Nothing came in {duration(taking.idle_seconds)}. Why: sluice doctor {queue} --group {taking.group}"
        )
