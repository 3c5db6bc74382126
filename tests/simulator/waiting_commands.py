"""Commands on waiting messages in the simulation: random ones, and what must hold afterward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.errors import AlreadyDelivered, InvalidQueueConfig
from sluice.queues.names import format_message_id
from sluice.queues.ports import Publisher
from tests.simulator.oracle import CANCELLED, Pair, Violation

if TYPE_CHECKING:
    from tests.simulator.environment import Environment

Location = tuple[int, int]


class WaitingCommands(Publisher):
    """Cancels and moves messages, as a client that gets an acknowledgement for each command."""

    def __init__(self, world: Environment) -> None:
        self._world = world
        self._by_tag: dict[int, tuple[Location | None, int]] = {}  # with the frame of the command
        self._cancelled: set[Location] = set()  # acknowledged: nothing may undo it

    def cancel(self, location: Location, own_id: bytes) -> str:
        """Cancel the message at a location; return what became of it."""
        world = self._world
        oracle = world.oracle
        engine = world.engine
        partition, seq = engine.partitions[location[0]], location[1]
        name, is_held = self._look_up(location, own_id)
        try:
            engine.commands.cancel(partition, seq, name, "ann")
        except AlreadyDelivered:
            if not is_held:
                raise Violation(f"{location} is not cancelled, and no client holds it") from None
            return "too late to cancel"
        if is_held:
            raise Violation(f"{location} is cancelled while a client holds it")
        for pair in self._pairs_at(location):
            oracle.settle(pair, CANCELLED)
        world.retention.changed.add(partition.queue.name)
        self._await_commit(location)
        return "cancelled"

    def reschedule(self, location: Location, own_id: bytes, seconds: float) -> str:
        """Move the message at a location; return what became of it."""
        world = self._world
        engine = world.engine
        partition, seq = engine.partitions[location[0]], location[1]
        name, is_held = self._look_up(location, own_id)
        now = world.loop.now
        try:
            engine.commands.reschedule(partition, seq, name, now + seconds, "ann")
        except AlreadyDelivered:
            if not is_held:
                raise Violation(f"{location} is not moved, and no client holds it") from None
            return "too late to reschedule"
        except InvalidQueueConfig:
            return "not rescheduled: given up or expired before"
        if is_held:
            raise Violation(f"{location} is moved while a client holds it")
        due = now + seconds
        pairs = self._pairs_at(location)
        for sent in {pair.sent for pair in pairs}:
            sent.plain = False  # it loses its place among those of its key
            sent.move(due, int(partition.expires(seq)), world.oracle.frame)
        for pair in pairs:
            world.oracle.forget_order(pair)
            pair.attempts.move(due, world.oracle.frame)
        self._await_commit(None)
        return "rescheduled"

    def _pairs_at(self, location: Location) -> list[Pair]:
        return [pair for pair in self._world.oracle.pairs.values() if pair.location == location]

    def _await_commit(self, cancelled: Location | None) -> None:
        world = self._world
        world.serial += 1
        self._by_tag[world.serial] = (cancelled, world.oracle.frame)
        world.engine.frame_builder.add_commit_waiter(self, world.serial)

    def _look_up(self, location: Location, own_id: bytes) -> tuple[bytes, bool]:
        """Return the generated id of a message, and whether a client holds it."""
        world = self._world
        oracle = world.oracle
        engine = world.engine
        pid, seq = location
        partition = engine.partitions[pid]
        found = engine.commands.find(partition.queue, own_id) if own_id else None
        if found is not None and not found[0].holds(found[1]):
            raise Violation(f"{own_id!r} leads to {found[1]}, which is deleted")
        name = format_message_id(pid, seq)
        if engine.commands.find(partition.queue, name) != (partition, seq):
            raise Violation(f"{name!r} does not lead to {location}")
        is_held = any(
            number[1:] == location and number[0] in engine.groups  # not of a deleted group
            for number in (*oracle.in_flight, *world.schedule.reclaimed)
        )
        return name, is_held

    def on_committed(self, tag: int) -> None:
        location, frame = self._by_tag.pop(tag)
        if not self._world.oracle.is_durable(frame):
            raise Violation(f"the command on {location} is acknowledged, and a crash can undo it")
        if location is not None:
            self._cancelled.add(location)

    def delivered(self, location: Location) -> None:
        if location in self._cancelled:
            raise Violation(f"{location} was cancelled, and is delivered")

    def restarted(self) -> None:
        self._by_tag = {}
