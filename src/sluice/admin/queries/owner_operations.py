"""Operations on exclusive queues: list owners, show their state, read and purge their values."""

from __future__ import annotations

import asyncio
import heapq
from typing import Final

from sluice.admin import model
from sluice.admin.broker_facade import BrokerFacade
from sluice.broker.namespaces import read_message_properties
from sluice.errors import UnknownOwner
from sluice.message import Message
from sluice.queues.compacted import Owner, read_expiry
from sluice.queues.service import views

NAMES_PER_TURN: Final = 8192  # names examined before the loop is yielded
ROWS_PER_TURN: Final = 16_384  # rows of owners examined before the loop is yielded


async def list_owners(
    facade: BrokerFacade, prefix: str, after: str, limit: int
) -> list[model.Owner]:
    """Return owners by client id, starting after `after`."""
    facade.sync_clock()
    owners = facade.engine.exclusive.owners
    found: list[str] = []
    names = list(owners)
    for start in range(0, len(names), NAMES_PER_TURN):
        batch = [
            name
            for name in names[start : start + NAMES_PER_TURN]
            if name > after and name.startswith(prefix)
        ]
        found = heapq.nsmallest(limit, [*found, *batch])
        await facade.yield_to_loop()
    views: list[model.Owner] = []
    rows = 0
    for name in found:
        owner = owners.get(name)
        if owner is None:
            continue
        views.append(build_owner_view(facade, owner))
        rows += 8 + int(owner.row_count())
        if rows >= ROWS_PER_TURN:
            rows = 0
            await facade.yield_to_loop()
    return views


def find_owner(facade: BrokerFacade, client: str) -> Owner:
    owner = facade.engine.exclusive.owners.get(client)
    if owner is None:
        raise UnknownOwner(client)
    return owner


def build_owner_view(facade: BrokerFacade, owner: Owner) -> model.Owner:
    return model.Owner(
        client=owner.client,
        depth=owner.count_unacked(),
        keys=int(owner.live_values),
        bytes=int(owner.stored_bytes),
        last_sequence=int(owner.next_seq) - 1,
        acked_sequence=int(owner.acked),
        acked_at=float(owner.acked_at) / 1000.0,
        written_at=float(owner.last_write_at),
        subscribed=owner.subscriber is not None,
        connected=facade.broker.registry.is_connected(owner.client),
    )


async def peek_owner(
    facade: BrokerFacade, client: str, start: int, limit: int, payload_bytes: int
) -> list[model.Message]:
    """Return the stored values of an owner from a sequence on, oldest first.

    Expired values are removed, as when the owner reads: only a value itself has its expiry.
    """
    facade.sync_clock()
    owner = find_owner(facade, client)
    locations: list[tuple[int, int]] = []
    slot = owner.slot_after(max(0, start) - 1)
    while slot >= 0 and len(locations) < limit:
        locations.append((int(owner.seq(slot)), int(owner.address(slot))))
        slot = owner.slot_after(owner.seq(slot))
    records = await _read_records(facade, [address for _, address in locations])
    found: list[model.Message] = []
    for (seq, _), data in zip(locations, records, strict=True):
        message = None if data is None else facade.engine.decode_message(data)
        if message is None:
            continue
        expires_at = read_expiry(message)
        if expires_at and float(expires_at) <= facade.engine.now:
            facade.engine.exclusive.expire_value(owner, seq, facade.begin_change())
        else:
            found.append(_build_value_view(owner, seq, message, payload_bytes))
    return found


async def _read_records(facade: BrokerFacade, addresses: list[int]) -> list[bytes | None]:
    if not addresses:
        return []
    waiter: asyncio.Future[list[bytes | None]] = asyncio.get_running_loop().create_future()

    def done(found: list[bytes | None]) -> None:
        if not waiter.done():
            waiter.set_result(found)

    facade.commit_loop.read(addresses, done)
    return await waiter


def _build_value_view(
    owner: Owner, seq: int, message: Message, payload_bytes: int
) -> model.Message:
    """Show a value as a message of its owner's queue; its id is its sequence."""
    reader = owner.subscriber
    state = views.WAITING
    if seq <= owner.acked or seq in owner.acked_out_of_order:
        state = views.SETTLED
    elif reader is not None and seq in reader.in_flight:
        state = views.DELIVERED
    attached = read_message_properties(message)
    return model.Message(
        message_id=str(seq),
        queue=f"$ECQ/{owner.client}",
        partition=0,
        sequence=seq,
        key=message.key.decode("utf-8", "replace"),
        priority=0,
        payload=message.payload[:payload_bytes],
        size=len(message.payload),
        enqueued_at=float(message.enqueued_at_ms) / 1000.0,
        expires_at=float(read_expiry(message)),
        deliver_at=0.0,
        topic="",
        content_type=attached.content_type,
        response_topic=attached.response_topic,
        correlation_data=attached.correlation_data,
        properties=list(attached.user),
        headers={},
        state=state,
        attempt=1 if state == views.DELIVERED else 0,
        consumer=owner.client if state == views.DELIVERED else "",
    )


async def purge_owner(facade: BrokerFacade, client: str) -> int:
    """Delete every value of an owner; the owner and its sequence stay."""
    owner = find_owner(facade, client)
    now = facade.begin_change()
    count = facade.engine.exclusive.purge(owner, now)
    await facade.wait_committed()
    return count
