"""Commands on waiting messages: which messages a packet names, and what it is answered.

The topics are `$cancel` and `$reschedule`.

Most ids lead to the message at once. Other ids of publishers are searched for among the stored
messages (`flow/id_search`), and the packet is answered in a later turn, on the connection that it
came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.namespaces.queues.queue_options import (
    read_delay,
    read_message_ids,
    read_timestamp_ms,
)
from sluice.broker.namespaces.reason_mapping import get_reason_code
from sluice.broker.queue_topics import (
    MAX_IDS,
    RESCHEDULE,
    PublishOptions,
    QueueTopic,
    read_publish_options,
)
from sluice.errors import (
    InvalidQueueConfig,
    QueueError,
    TooManyIds,
    TooManyMessages,
    UnknownMessage,
    UnknownQueue,
)
from sluice.queues.engine import Engine
from sluice.queues.model import IdSearch, Partition, Queue
from sluice.queues.names import parse_message_id
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.sessions import Session


class Command(IdSearch):
    """A packet with a command, while its messages are searched for and after that."""

    def __init__(
        self,
        topics: CommandTopics,
        queue: Queue,
        packet: Publish,
        session: Session,
        message_ids: list[bytes],
        due_at: float,
    ) -> None:
        super().__init__(queue, [])
        self._topics: CommandTopics = topics
        self.packet: Publish = packet
        self.session: Session = session
        self.message_ids: list[bytes] = message_ids
        self.due_at: float = due_at  # the new time; negative: cancel
        self.epoch: i64 = session.inbound.get_epoch()
        self.is_deferred: bool = False  # answered in a later turn

    def on_done(self) -> None:
        self._topics.answer_searched(self)


class CommandTopics:
    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = engine
        self._options = PublishOptions()  # reused: of the current packet

    def execute(
        self, packet: Publish, parsed: QueueTopic, queue: Queue | None, session: Session
    ) -> None:
        """Apply the command to all messages that the packet names, and acknowledge it."""
        if queue is None:
            raise UnknownQueue(parsed.queue)
        message_ids = self._read_ids(packet, parsed)
        due_at = self._read_due_at() if parsed.verb == RESCHEDULE else -1.0
        command = Command(self, queue, packet, session, message_ids, due_at)
        unknown = self._locate(command)
        if not unknown:
            self._apply(command)
            self._acknowledge(command)
            return
        inbound = session.inbound
        if packet.qos > 0:
            inbound.defer_receipt(packet)
            inbound.expect_commit(packet)
        command.is_deferred = True
        command.wanted = set(unknown)
        self._engine.id_searches.start(command)

    def _read_ids(self, packet: Publish, parsed: QueueTopic) -> list[bytes]:
        """Return the ids: from user properties, the topic or the payload, as of a settlement."""
        options = self._options
        read_publish_options(packet.raw_properties, options)
        if options.all_ids is not None:
            if len(options.all_ids) > MAX_IDS:
                raise TooManyIds(MAX_IDS)
            return options.all_ids
        if options.id:
            return [options.id]
        if parsed.argument:
            return [parsed.argument]
        return read_message_ids(packet.payload)

    def _read_due_at(self) -> float:
        """Return the new time that the packet gives, in seconds since 1970."""
        options = self._options
        if options.delay:
            return self._engine.now + read_delay("delay", options.delay)
        if options.deliver_at:
            return float(read_timestamp_ms(options.deliver_at)) / 1000.0
        raise InvalidQueueConfig(
            "no time is given",
            "Give it as user property delay, 0s to deliver it now, or deliver-at",
        )

    def _locate(self, command: Command) -> list[bytes]:
        """Find the messages by their ids; return the ids that must be searched for."""
        queue = command.queue
        unknown: list[bytes] = []
        for message_id in command.message_ids:
            location = self._engine.commands.find(queue, message_id)
            if location is not None:
                command.found[message_id] = location
            elif not self._is_deleted(queue, message_id):
                unknown.append(message_id)
        return unknown

    def _is_deleted(self, queue: Queue, message_id: bytes) -> bool:
        """Return whether a generated id is of a message that is not stored any more.

        A message that was redriven has its first id as its own id.
        """
        pid, seq = parse_message_id(message_id)
        partition = self._engine.partitions.get(int(pid))
        return (
            not queue.dead_by_reason
            and partition is not None
            and partition.queue is queue
            and seq < partition.next_seq
        )

    def answer_searched(self, command: Command) -> None:
        """Apply the command after its messages were searched for, and answer its packet."""
        packet = command.packet
        inbound = command.session.inbound
        try:
            self._apply(command)
        except QueueError as error:
            if packet.qos > 0:
                inbound.ack_deferred(
                    packet, True, command.epoch, get_reason_code(error), str(error)
                )
            return
        self._acknowledge(command)

    def _acknowledge(self, command: Command) -> None:
        """Acknowledge the packet after the commit of its effects."""
        packet = command.packet
        inbound = command.session.inbound
        if packet.qos == 0:
            return
        tag = packet.packet_id | (packet.qos << 16) | (command.epoch << 20)
        if command.is_deferred:
            inbound.on_written(tag)
        self._engine.frame_builder.add_commit_waiter(inbound, tag)
        if not command.is_deferred:
            inbound.expect_commit(packet)

    def _apply(self, command: Command) -> None:
        """Apply the command to as many messages as possible; raise the first error."""
        first_error: QueueError | None = None
        failed = 0
        for message_id in command.message_ids:
            try:
                self._apply_one(command, message_id, command.found.get(message_id))
            except QueueError as error:
                failed += 1
                first_error = first_error or error
        if first_error is not None:
            total = len(command.message_ids)
            if total > 1:
                first_error.remedy = f"This applies to {failed} of {total}. {first_error.remedy}"
            raise first_error

    def _apply_one(
        self, command: Command, message_id: bytes, location: tuple[Partition, int] | None
    ) -> None:
        queue = command.queue
        if location is None or queue.is_deleted:
            shown_id = message_id.decode("utf-8", "replace")
            if command.is_cut:
                raise TooManyMessages(queue.name, shown_id)
            raise UnknownMessage(queue.name, shown_id)
        by = command.session.client_id
        commands = self._engine.commands
        if command.due_at < 0.0:
            commands.cancel(location[0], location[1], message_id, by)
        else:
            commands.reschedule(location[0], location[1], message_id, command.due_at, by)
