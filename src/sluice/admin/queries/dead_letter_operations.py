"""Dead letters of a queue: looking through them, putting them back, throwing them away.

They lie in its dead-letter queue and in its invalid-message channel, which other queues may use as well: what died in
another queue is not this one's. Work on many is done some at a time, so that deliveries go on meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from sluice.admin.broker_facade import AT_ONCE, Hands, Place, plain
from sluice.admin.queries.message_lookup import message_view, oldest_first, place_of, read_through
from sluice.admin.views import LetterFilter, MessageView, Redriven
from sluice.errors import InUse, InvalidQueueConfig, UnknownMessage, UnknownQueue
from sluice.message import Message, decode_headers
from sluice.queues.flow import dead_letters
from sluice.queues.log.frame_builder import PURGED
from sluice.queues.model.queue import Queue

MOST_AT_ONCE: Final = 100_000  # letters that one call puts back


def homes(hands: Hands, name: str) -> list[Queue]:
    """Where the dead letters of a queue lie. A dead-letter queue may be named itself, also when its queue is gone."""
    name = plain(name)
    queues = hands.engine.queues
    queue = queues.get(name)
    if queue is None:
        orphaned = queues.get(f"dlq/{name}")
        if orphaned is None:
            raise UnknownQueue(name)
        return [orphaned]
    found: list[Queue] = []
    for channel in (queue.rules.dlq_name if queue.rules.dlq_enabled else "", queue.rules.invalid_name):
        home = queues.get(channel)
        if home is not None and home is not queue and home not in found:
            found.append(home)
    if not found and name.startswith("dlq/"):
        return [queue]
    return found


class Letters:
    """The dead letters of one queue that a filter means, oldest first."""

    def __init__(self, hands: Hands, name: str, wanted: LetterFilter) -> None:
        self._hands = hands
        self._name = plain(name)
        self._wanted = wanted
        self._needle = wanted.contains.encode()
        self._homes = homes(hands, name)

    async def walk(self, after: str = "") -> AsyncIterator[tuple[Place, Message]]:
        """Behind the letter `after`. Between any two of them others may have been at work."""
        for nth, home in enumerate(self._homes):
            starts = [0] * len(home.partitions)
            if after:
                last = place_of(self._hands, home, after)
                if last is not None:
                    starts = _behind(home, last)
                    after = ""
                elif nth < len(self._homes) - 1:
                    continue
                else:
                    raise UnknownMessage(home.name, after)
            async for place, message in read_through(self._hands, oldest_first(home.partitions, starts)):
                if self._means(home, message):
                    yield place, message

    def _means(self, home: Queue, message: Message) -> bool:
        wanted = self._wanted
        story = dict(decode_headers(message.headers))
        origin = story.get("original-queue", "")
        if self._name not in (origin, home.name) and (origin or home.name != f"dlq/{self._name}"):
            return False
        if wanted.reason and wanted.reason not in (
            story.get("dead-reason", ""),
            story.get("rejectionReason", ""),
        ):
            return False
        if wanted.group and wanted.group != story.get("original-group", ""):
            return False
        died_at = float(message.enqueued_at) / 1000.0
        if died_at < wanted.since or (wanted.until and died_at >= wanted.until):
            return False
        return not self._needle or self._needle in message.payload


def _behind(home: Queue, last: Place) -> list[int]:
    """Where to go on in each partition after the letter `last`, which may be gone by now: by time, as they are told."""
    partition, seq = last
    time = int(partition.time(seq))  # known for a while also of what is gone
    if time == 0:
        nearest = int(partition.first_live(seq))
        time = int(partition.time(nearest)) if nearest < partition.next else 0
    starts: list[int] = []
    for other in home.partitions:
        if other is partition:
            starts.append(seq + 1)
            continue
        start = int(other.first_since(time)) if time else 0
        if other.number < partition.number:  # of one moment, the lower partition came first
            while start < other.next and other.time(start) == time:
                start = int(other.first_live(start + 1))
        starts.append(start)
    return starts


async def find_letter(hands: Hands, name: str, message_id: str) -> tuple[Place, Message]:
    """A dead letter by its own id, or by that of the message it was."""
    for home in homes(hands, name):
        place = place_of(hands, home, message_id)
        if place is not None and place[0].holds(place[1]):
            (message,) = await hands.read([place])
            if message is not None and place[0].holds(place[1]):
                return place, message
    async for place, message in letters_of(hands, name, message_id):
        return place, message
    raise UnknownMessage(plain(name), message_id)


async def letters_of(hands: Hands, name: str, message_id: str) -> AsyncIterator[tuple[Place, Message]]:
    """Every dead letter that a message has left: one for each group that gave it up."""
    async for place, message in Letters(hands, name, LetterFilter()).walk():
        if dict(decode_headers(message.headers)).get("original-message-id", "") == message_id:
            yield place, message


async def list_letters(
    hands: Hands, name: str, wanted: LetterFilter, after: str, limit: int, payload_bytes: int
) -> list[MessageView]:
    found: list[MessageView] = []
    if limit > 0:
        async for place, message in Letters(hands, name, wanted).walk(plain(after)):
            found.append(message_view(place, message, None, payload_bytes))
            if len(found) >= limit:
                break
    return found


# ---- putting back


async def retry_one(hands: Hands, name: str, message_id: str, to_all: bool) -> Redriven:
    place, letter = await find_letter(hands, name, message_id)
    hands.begin()
    if not dead_letters.redrive(hands.engine, place[0], place[1], letter, to_all):
        raise InUse(*_why_not(hands, letter, message_id))
    await hands.kept()
    return Redriven(retried=1, skipped=0, left=0)


def _why_not(hands: Hands, letter: Message, message_id: str) -> tuple[str, str]:
    origin = dict(decode_headers(letter.headers)).get("original-queue", "")
    if not origin:
        return (
            f"{message_id!r} does not say which queue it came from",
            "It was published here and did not die elsewhere: consume it, or publish it again where it belongs",
        )
    if origin not in hands.engine.queues:
        return f"queue {origin!r}, from which {message_id!r} came, is gone", f"sluice queue create {origin}"
    return (
        f"a consumer of the dead letters is working on {message_id!r}",
        "Wait until it is settled, or stop that consumer",
    )


async def retry_many(hands: Hands, name: str, wanted: LetterFilter, limit: int, to_all: bool) -> Redriven:
    if not 0 < limit <= MOST_AT_ONCE:
        raise InvalidQueueConfig(f"limit is {limit}", f"Give 1 to {MOST_AT_ONCE}")
    retried = skipped = left = 0
    async for place, letter in Letters(hands, name, wanted).walk():
        if retried + skipped >= limit:
            left += 1
            continue
        hands.begin()
        if dead_letters.redrive(hands.engine, place[0], place[1], letter, to_all):
            retried += 1
        else:
            skipped += 1
    await hands.kept()
    return Redriven(retried=retried, skipped=skipped, left=left)


# ---- throwing away


async def purge(hands: Hands, name: str, wanted: LetterFilter) -> int:
    count = 0
    async for place, _ in Letters(hands, name, wanted).walk():
        hands.begin()
        if hands.engine.remove_for_all(place[0], place[1], PURGED):
            count += 1
    await hands.kept()
    return count


async def delete(hands: Hands, name: str, message_id: str) -> None:
    place, _ = await find_letter(hands, name, message_id)
    hands.begin()
    if not hands.engine.remove_for_all(place[0], place[1], PURGED):
        raise InUse(
            f"a consumer of the dead letters is working on {message_id!r}",
            "Wait until it is settled, or stop that consumer",
        )
    await hands.kept()


async def purge_queue(hands: Hands, name: str) -> int:
    """Everything in a queue that nobody is working on and that was there when this began."""
    queue = hands.queue(name)
    count = 0
    for partition, end in [(partition, int(partition.next)) for partition in queue.partitions]:
        seq = 0
        while seq < end and hands.lives(queue):
            hands.begin()
            before = int(queue.depth)
            seq = hands.purge_some(partition, seq, end, AT_ONCE)
            count += before - int(queue.depth)
            await hands.breathe()
    await hands.kept()
    return count
