"""Operations on the dead letters of a queue: list, redrive, delete.

They are stored in its dead-letter queue and its invalid-message channel. Other queues may use the
same ones, so dead letters of other queues are filtered out. Operations on many dead letters run in
portions, so that deliveries continue meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import islice
from typing import Final

from sluice.admin import model
from sluice.admin.broker_facade import (
    BATCH_SIZE,
    BrokerFacade,
    split_into_batches,
    strip_queue_prefix,
)
from sluice.admin.model import DeadLetterFilter, Redriven
from sluice.admin.queries.dead_letter_errors import (
    MAX_EXAMINED,
    ErrorCounter,
    normalize_error,
)
from sluice.admin.queries.message_lookup import build_message_view, read_in_batches
from sluice.errors import (
    InUse,
    InvalidPayload,
    InvalidQueueConfig,
    MessageTooLarge,
    UnknownMessage,
)
from sluice.message import Message, decode_headers
from sluice.queues.flow import REASONS, is_reason, same_reason
from sluice.queues.service import MessageLocation, QueueInspector, stored_messages

MAX_RETRIED: Final = 100_000  # dead letters that one call redrives


class DeadLetterScan:
    """Iterate over the dead letters of one queue that a filter matches, oldest first."""

    def __init__(self, facade: BrokerFacade, name: str, criteria: DeadLetterFilter) -> None:
        self._facade = facade
        if criteria.reason and not is_reason(criteria.reason):
            raise InvalidQueueConfig(
                f"{criteria.reason!r} is not a reason of dead letters", f"Use {', '.join(REASONS)}"
            )
        self._name = strip_queue_prefix(name)
        self._criteria = criteria
        self._needle = criteria.contains.encode()
        self._dead_letter_queues = facade.inspector.dead_letter_queues_of(self._name)

    async def scan(self, after: str = "") -> AsyncIterator[tuple[MessageLocation, Message]]:
        """Yield the dead letters after `after`. State may change between any two of them."""
        for nth, dead_letter_queue in enumerate(self._dead_letter_queues):
            locations = dead_letter_queue.locations()
            if after:
                last_location = dead_letter_queue.parse_location(after)
                if last_location is not None:
                    locations = dead_letter_queue.locations_after(last_location)
                    after = ""
                elif nth < len(self._dead_letter_queues) - 1:
                    continue
                else:
                    raise UnknownMessage(dead_letter_queue.name, after)
            async for location, message in read_in_batches(self._facade, locations):
                if self._matches(dead_letter_queue.name, message):
                    yield location, message

    def _matches(self, dead_letter_queue: str, message: Message) -> bool:
        criteria = self._criteria
        headers = dict(decode_headers(message.headers))
        origin = headers.get("original-queue", "")
        if self._name not in (origin, dead_letter_queue) and (
            origin or dead_letter_queue != f"dlq/{self._name}"
        ):
            return False
        if criteria.reason and not same_reason(criteria.reason, headers):
            return False
        if criteria.group and criteria.group != headers.get("original-group", ""):
            return False
        if criteria.error and criteria.error != normalize_error(
            headers.get("dead-description", "")
        ):
            return False
        died_at = float(message.enqueued_at_ms) / 1000.0
        if died_at < criteria.since or (criteria.until and died_at >= criteria.until):
            return False
        return not self._needle or self._needle in message.payload


async def find_dead_letter(
    facade: BrokerFacade, name: str, message_id: str
) -> tuple[MessageLocation, Message]:
    """Find a dead letter by its own id or by the id of the original message."""
    for dead_letter_queue in facade.inspector.dead_letter_queues_of(strip_queue_prefix(name)):
        location = dead_letter_queue.parse_location(message_id)
        if location is not None and stored_messages.is_stored(location):
            (message,) = await facade.read_messages([location])
            if message is not None and stored_messages.is_stored(location):
                return location, message
    async for location, message in dead_letters_of(facade, name, message_id):
        return location, message
    raise UnknownMessage(strip_queue_prefix(name), message_id)


async def dead_letters_of(
    facade: BrokerFacade, name: str, message_id: str
) -> AsyncIterator[tuple[MessageLocation, Message]]:
    """Yield every dead letter of a message: one for each group that gave it up."""
    async for location, message in DeadLetterScan(facade, name, DeadLetterFilter()).scan():
        if dict(decode_headers(message.headers)).get("original-message-id", "") == message_id:
            yield location, message


async def list_dead_letters(
    facade: BrokerFacade,
    name: str,
    criteria: DeadLetterFilter,
    after: str,
    limit: int,
    payload_bytes: int,
) -> list[model.Message]:
    found: list[model.Message] = []
    if limit > 0:
        async for location, message in DeadLetterScan(facade, name, criteria).scan(
            strip_queue_prefix(after)
        ):
            found.append(build_message_view(location, message, payload_bytes))
            if len(found) >= limit:
                break
    return found


async def group_by_error(
    facade: BrokerFacade, name: str, criteria: DeadLetterFilter, limit: int
) -> model.DeadLetterErrors:
    """Count the dead letters that match by error; examine at most `limit` of them."""
    if not 0 < limit <= MAX_EXAMINED:
        raise InvalidQueueConfig(f"limit is {limit}", f"Give 1 to {MAX_EXAMINED}")
    counter = ErrorCounter()
    async for _, message in DeadLetterScan(facade, name, criteria).scan():
        if counter.examined >= limit:
            return counter.result(complete=False)
        headers = dict(decode_headers(message.headers))
        counter.add(headers, float(message.enqueued_at_ms) / 1000.0)
    return counter.result(complete=True)


# ---- redrive


async def retry_dead_letter(
    facade: BrokerFacade, name: str, message_id: str, to_all: bool, payload: bytes | None = None
) -> Redriven:
    """Redrive a dead letter, with another payload if one is given."""
    location, dead_letter = await find_dead_letter(facade, name, message_id)
    facade.begin_change()
    if payload is None:
        is_done = facade.engine.redrive.redrive(*location, dead_letter, to_all)
    else:
        is_done = _redrive_edited(facade, location, dead_letter, to_all, payload)
    if not is_done:
        raise InUse(*_explain_refused_retry(facade, dead_letter, message_id))
    await facade.wait_committed()
    return Redriven(retried=1, skipped=0, left=0)


def _redrive_edited(
    facade: BrokerFacade,
    location: MessageLocation,
    dead_letter: Message,
    to_all: bool,
    payload: bytes,
) -> bool:
    """Redrive with another payload, in one frame; the checks are those of a publish."""
    origin = dict(decode_headers(dead_letter.headers)).get("original-queue", "")
    queue = facade.engine.queues.get(origin)
    if queue is None:
        return False
    if len(payload) > queue.rules.max_message_size:
        raise MessageTooLarge(queue.name, len(payload), int(queue.rules.max_message_size))
    if queue.rules.schema:
        fault = facade.queue_handler.schemas.get_validator(queue)(payload)
        if fault:
            raise InvalidPayload(queue.name, fault)
    message = Message(payload, dead_letter.props, dead_letter.key)
    return bool(
        facade.engine.redrive.redrive_repaired(*location, dead_letter, queue, message, to_all)
    )


def _explain_refused_retry(
    facade: BrokerFacade, dead_letter: Message, message_id: str
) -> tuple[str, str]:
    origin = dict(decode_headers(dead_letter.headers)).get("original-queue", "")
    if not origin:
        return (
            f"{message_id!r} has no original queue",
            "It was published to this queue and is not a dead letter: consume it, or publish it"
            " again to the right queue",
        )
    if origin not in facade.engine.queues:
        return (
            f"queue {origin!r}, the original queue of {message_id!r}, is gone",
            f"sluice queue create {origin}",
        )
    return (
        f"a consumer of the dead-letter queue is processing {message_id!r}",
        "Wait until it is settled, or stop that consumer",
    )


async def retry_dead_letters(
    facade: BrokerFacade, name: str, criteria: DeadLetterFilter, limit: int, to_all: bool
) -> Redriven:
    if not 0 < limit <= MAX_RETRIED:
        raise InvalidQueueConfig(f"limit is {limit}", f"Give 1 to {MAX_RETRIED}")
    retried = skipped = left = 0
    async for location, dead_letter in DeadLetterScan(facade, name, criteria).scan():
        if retried + skipped >= limit:
            left += 1
            continue
        facade.begin_change()
        if facade.engine.redrive.redrive(*location, dead_letter, to_all):
            retried += 1
        else:
            skipped += 1
    await facade.wait_committed()
    return Redriven(retried=retried, skipped=skipped, left=left)


# ---- delete


async def purge_dead_letters(facade: BrokerFacade, name: str, criteria: DeadLetterFilter) -> int:
    count = 0
    async for location, _ in DeadLetterScan(facade, name, criteria).scan():
        facade.begin_change()
        if facade.purge(location):
            count += 1
    await facade.wait_committed()
    return count


async def delete_dead_letter(facade: BrokerFacade, name: str, message_id: str) -> None:
    location, _ = await find_dead_letter(facade, name, message_id)
    facade.begin_change()
    if not facade.purge(location):
        raise InUse(
            f"a consumer of the dead-letter queue is processing {message_id!r}",
            "Wait until it is settled, or stop that consumer",
        )
    await facade.wait_committed()


async def purge_queue(
    facade: BrokerFacade, name: str, older_than: float = 0.0, keep_newest: int = 0
) -> int:
    """Delete all messages that existed at the start and that no consumer is processing.

    With `older_than` (seconds) and `keep_newest`, only those that arrived before and are not among
    the newest messages of the queue.
    """
    queue = facade.get_queue(name)
    if older_than or keep_newest:
        return await _trim_queue(facade, facade.inspect(name), older_than, keep_newest)
    count = 0
    for partition, end in [(partition, int(partition.next_seq)) for partition in queue.partitions]:
        seq = 0
        while seq < end and facade.is_current(queue):
            facade.begin_change()
            before = int(queue.depth)
            seq = int(facade.engine.removal.purge_range(partition, seq, end, BATCH_SIZE))
            count += before - int(queue.depth)
            await facade.yield_to_loop()
    await facade.wait_committed()
    return count


async def _trim_queue(
    facade: BrokerFacade, queue: QueueInspector, older_than: float, keep_newest: int
) -> int:
    cutoff = facade.sync_clock() - older_than
    excess = queue.count_stored() - keep_newest
    count = 0
    for batch in split_into_batches(islice(queue.locations(), max(0, excess))):
        if not queue.is_current():
            break
        facade.begin_change()
        old = [one for one in batch if stored_messages.arrived_at(one) < cutoff]
        before = queue.depth()
        for partition, seq in old:
            facade.engine.removal.purge_range(partition, seq, seq + 1, 1)
        count += before - queue.depth()
        if len(old) < len(batch):
            break  # the others are younger
        await facade.yield_to_loop()
    await facade.wait_committed()
    return count
