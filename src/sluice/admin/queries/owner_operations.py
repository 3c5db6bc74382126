"""Exclusive compacted queues as people look at them: who owns one, how far each has come, what is kept of it."""

from __future__ import annotations

import asyncio
import heapq
from typing import Final

from sluice.admin.broker_facade import Hands
from sluice.admin.queries.message_lookup import DELIVERED, SETTLED, WAITING
from sluice.admin.views import MessageView, OwnerView
from sluice.broker.namespaces.queues.publish_builder import attached_to
from sluice.errors import UnknownOwner
from sluice.message import Message
from sluice.queues.compacted.exclusive import expiry_of
from sluice.queues.compacted.owner import Owner

NAMES_AT_ONCE: Final = 8192  # names that are looked at before the broker may work again,
ROWS_AT_ONCE: Final = 16_384  # and rows of owners


async def list_owners(hands: Hands, prefix: str, after: str, limit: int) -> list[OwnerView]:
    """By client id, behind `after`."""
    hands.look()
    owners = hands.engine.exclusive.owners
    found: list[str] = []
    names = list(owners)
    for start in range(0, len(names), NAMES_AT_ONCE):
        some = [
            name for name in names[start : start + NAMES_AT_ONCE] if name > after and name.startswith(prefix)
        ]
        found = heapq.nsmallest(limit, [*found, *some])
        await hands.breathe()
    views: list[OwnerView] = []
    rows = 0
    for name in found:
        owner = owners.get(name)
        if owner is None:
            continue
        views.append(view_of(hands, owner))
        rows += 8 + int(owner.slots())
        if rows >= ROWS_AT_ONCE:
            rows = 0
            await hands.breathe()
    return views


def find(hands: Hands, client: str) -> Owner:
    owner = hands.engine.exclusive.owners.get(client)
    if owner is None:
        raise UnknownOwner(client)
    return owner


def view_of(hands: Hands, owner: Owner) -> OwnerView:
    return OwnerView(
        client=owner.client,
        depth=owner.depth(),
        keys=int(owner.live),
        bytes=int(owner.kept_bytes),
        last_sequence=int(owner.next) - 1,
        acked_sequence=int(owner.acked),
        acked_at=float(owner.acked_at) / 1000.0,
        written_at=float(owner.heard_at),
        subscribed=owner.reader is not None,
        connected=hands.broker.registry.is_connected(owner.client),
    )


async def peek(hands: Hands, client: str, start: int, limit: int, payload_bytes: int) -> list[MessageView]:
    """What is kept for an owner from a sequence on, oldest first. What turns out to have expired is removed, as it is
    when the owner reads: only a value itself says when it ends."""
    hands.look()
    owner = find(hands, client)
    places: list[tuple[int, int]] = []
    slot = owner.after(max(0, start) - 1)
    while slot >= 0 and len(places) < limit:
        places.append((int(owner.seq(slot)), int(owner.address(slot))))
        slot = owner.after(owner.seq(slot))
    records = await _read(hands, [address for _, address in places])
    found: list[MessageView] = []
    for (seq, _), data in zip(places, records, strict=True):
        message = None if data is None else hands.engine.message_of(data)
        if message is None:
            continue
        ends = expiry_of(message)
        if ends and float(ends) <= hands.engine.now:
            hands.engine.exclusive.expire(owner, seq, hands.begin())
        else:
            found.append(_value_view(owner, seq, message, payload_bytes))
    return found


async def _read(hands: Hands, addresses: list[int]) -> list[bytes | None]:
    if not addresses:
        return []
    waiter: asyncio.Future[list[bytes | None]] = asyncio.get_running_loop().create_future()

    def done(found: list[bytes | None]) -> None:
        if not waiter.done():
            waiter.set_result(found)

    hands.runner.read(addresses, done)
    return await waiter


def _value_view(owner: Owner, seq: int, message: Message, payload_bytes: int) -> MessageView:
    """A value is shown as a message of its owner's queue; its sequence is all the name it has."""
    reader = owner.reader
    state = WAITING
    if seq <= owner.acked or seq in owner.done:
        state = SETTLED
    elif reader is not None and seq in reader.out:
        state = DELIVERED
    attached = attached_to(message)
    return MessageView(
        message_id=str(seq),
        queue=f"$ECQ/{owner.client}",
        partition=0,
        sequence=seq,
        key=message.key.decode("utf-8", "replace"),
        priority=0,
        payload=message.payload[:payload_bytes],
        size=len(message.payload),
        enqueued_at=float(message.enqueued_at) / 1000.0,
        expires_at=float(expiry_of(message)),
        deliver_at=0.0,
        topic="",
        content_type=attached.content_type,
        response_topic=attached.response_topic,
        correlation_data=attached.correlation_data,
        properties=list(attached.user),
        headers={},
        state=state,
        attempt=1 if state == DELIVERED else 0,
        consumer=owner.client if state == DELIVERED else "",
    )


async def purge(hands: Hands, client: str) -> int:
    """Every value of an owner; its place and its sequences stay."""
    owner = find(hands, client)
    now = hands.begin()
    count = hands.engine.exclusive.purge(owner, now)
    await hands.kept()
    return count
