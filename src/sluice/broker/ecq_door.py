"""Where MQTT meets the exclusive compacted queues: what is written to and read from under `$ECQ/`.

$ECQ/w/<client>/<key>     publish: the next value of a key of that client's queue; a key has one or more levels
$ECQ/<client>/#           subscribe, at QoS 1 and as that client: its own queue

The `w` keeps the two apart. It translates and answers; what becomes of values is the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.ecq_reader import OwnedDelivery, OwnedReader
from sluice.broker.queue_reasons import reason_of, subscribe_reason_of
from sluice.broker.subscriptions import encode_identifiers
from sluice.broker.turn import Turn
from sluice.errors import InvalidQueueConfig, QueueError
from sluice.message import LAST_SECOND, Message
from sluice.queues.engine import Engine
from sluice.queues.owner import Owner
from sluice.queues.start import time_of
from sluice.wire.packets import Publish, SubscriptionRequest
from sluice.wire.properties import Properties
from sluice.wire.reasons import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    NOT_AUTHORIZED,
    TOPIC_FILTER_INVALID,
    TOPIC_NAME_INVALID,
)
from sluice.wire.topics import begins

if TYPE_CHECKING:
    from sluice.broker.connection import Connection
    from sluice.broker.session import Session

PREFIX: Final = b"$ECQ/"
WRITE: Final = b"$ECQ/w/"
WRITE_SO: Final = "write to $ECQ/w/<client>/<key>, neither of them empty"
READ_SO: Final = (
    "a client subscribes to its own queue, $ECQ/<client>/# with its client id, and to nothing else below $ECQ"
)


class EcqDoor:
    def __init__(self, engine: Engine, turn: Turn) -> None:
        self._engine: Engine = engine
        self._turn: Turn = turn

    def _begin(self) -> None:
        turn = self._turn
        self._engine.now = turn.now
        turn.schedule()

    # ---- writing

    def publish(self, packet: Publish, session: Session, connection: Connection) -> None:
        """A PUBLISH to a topic under `$ECQ/`. The door of queues has begun the turn."""
        try:
            if not self._write(packet):
                session.refuse(packet, connection, TOPIC_NAME_INVALID, WRITE_SO)
                return
        except QueueError as error:
            session.refuse(packet, connection, reason_of(error), str(error))
            return
        if packet.qos > 0:
            self._engine.journal.add_receipt(session, session.tag(packet))
            session.answer_later(packet)
        session.router.hold_back(connection)

    def _write(self, packet: Publish) -> bool:
        """Whether the topic is one that can be written to."""
        topic = packet.topic
        if not begins(topic, WRITE):
            return False
        end: i64 = len(topic)
        cut: i64 = len(WRITE)
        while cut < end and topic[cut] != 0x2F:
            cut += 1
        if cut == len(WRITE) or cut >= end - 1:
            return False
        self._engine.check_available()
        message = Message(packet.payload, packet.raw, topic[cut + 1 :])
        if packet.expires_at != 0.0:
            message.expires = min(int(packet.expires_at + 0.999), LAST_SECOND)
        self._engine.exclusive.publish(topic[len(WRITE) : cut].decode(), message, self._engine.now)
        return True

    def publish_will(self, will: Publish) -> None:
        """There is nobody left to hear a refusal, so the log does."""
        self._begin()
        fault = WRITE_SO
        try:
            if self._write(will):
                return
        except QueueError as error:
            fault = str(error)
        self._engine.warnings.append(f"a will for {will.topic.decode()} was not kept: {fault}")

    # ---- subscribing

    def subscribe(
        self, session: Session, request: SubscriptionRequest, properties: Properties | None, identifier: int
    ) -> tuple[int, str]:
        """An owner takes its queue: the granted QoS, or a reason and why."""
        self._begin()
        topic_filter = request.topic_filter
        if not is_own(topic_filter, session.client_id):
            levels = topic_filter.split(b"/")
            whole = len(levels) == 3 and levels[2] == b"#" and levels[1] not in (b"", b"+")
            return (NOT_AUTHORIZED if whole else TOPIC_FILTER_INVALID), READ_SO
        if request.qos != 1 or session.router.limits.max_qos < 1:
            return (
                IMPLEMENTATION_SPECIFIC_ERROR,
                "an exclusive queue is read at QoS 1: its PUBACKs tell how far the owner has come",
            )
        start = ""
        for name, value in properties.user if properties is not None else []:
            if name == "start":
                start = value
        try:
            self._join(session, identifier, start)
        except QueueError as error:
            return subscribe_reason_of(error), str(error)
        session.queue_requests[topic_filter] = (1, [str(identifier)])
        return 1, ""

    def _join(self, session: Session, identifier: int, start: str) -> None:
        exclusive = self._engine.exclusive
        owner = exclusive.owners.get(session.client_id)
        if owner is None:
            owner = exclusive.make(session.client_id, self._engine.now)
        behind: i64 = place_of(owner, start) if start else -1
        extra = encode_identifiers([identifier] if identifier else [])
        reader = session.reader
        if reader is not None and owner.reader is reader:
            reader.extra = extra  # the same again, as clients do on each connect: what it has stays with it
            exclusive.feed(reader)
        else:
            reader = OwnedReader(session, extra)
            session.reader = reader
            exclusive.join(reader, session.client_id, self._engine.now)
        if behind >= 0:
            exclusive.seek(owner, behind, self._engine.now)

    def rejoin(self, session: Session, wishes: list[str]) -> None:
        """A subscription from before a restart, of a session whose client is not back yet. It goes on where it was."""
        self._begin()
        self._join(session, int(wishes[0]), "")

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Whether there was such a subscription."""
        found = session.queue_requests.pop(topic_filter, None) is not None
        if found:
            self.ended(session)
        return found

    # ---- a session comes and goes

    def resumed(self, session: Session) -> None:
        """It is connected again."""
        if session.reader is not None:
            self.feed(session.reader)

    def ended(self, session: Session) -> None:
        reader = session.reader
        if reader is not None:
            self._begin()
            session.reader = None
            self._engine.exclusive.leave(reader)

    def acknowledged(self, delivery: OwnedDelivery) -> None:
        """A PUBACK, whatever its reason: the client is done with the value [MQTT-4.3.2-5]."""
        self._begin()
        self._engine.exclusive.ack(delivery.reader, delivery.seq, delivery.token, self._engine.now)

    def feed(self, reader: OwnedReader) -> None:
        self._begin()
        self._engine.exclusive.feed(reader)

    def heal(self, sessions: list[Session]) -> None:
        """The fallback: whoever is subscribed and not served, for whatever reason, is served from here on."""
        self._begin()
        exclusive = self._engine.exclusive
        for session in sessions:
            asked = (
                session.queue_requests.get(filter_of(session.client_id)) if session.queue_requests else None
            )
            if asked is None:
                continue
            owner = exclusive.owners.get(session.client_id)
            reader = session.reader
            if owner is None or reader is None or owner.reader is not reader:
                self._engine.warnings.append(
                    f"{session.client_id} was subscribed to its queue, and was not served"
                )
                self._join(session, int(asked[1][0]), "")
            elif owner.after(reader.sent) >= 0:
                exclusive.feed(reader)


def filter_of(client_id: str) -> bytes:
    return PREFIX + client_id.encode() + b"/#"


def is_own(topic_filter: bytes, client_id: str) -> bool:
    """Whether a filter is the queue of this client. An id with a further level or a wildcard in it cannot have one."""
    if "/" in client_id or "+" in client_id or "#" in client_id:
        return False
    return topic_filter == filter_of(client_id)


def place_of(owner: Owner, start: str) -> i64:
    """The sequence behind which an owner goes on that wants to `start` somewhere."""
    if start == "earliest":
        return 0
    if start == "latest":
        return owner.next - 1
    if start.isascii() and start.isdigit() and len(start) <= 18:
        return max(0, int(start) - 1)
    try:
        seconds = float(start[1:]) if start.startswith("@") else time_of(start)
        slot = owner.since(int(seconds))
    except (ValueError, OverflowError):
        raise InvalidQueueConfig(
            f"start is {start!r}", "Use earliest, latest, a sequence, or a time such as 2030-01-31T12:00:00Z"
        ) from None
    return owner.seq(slot) - 1 if slot >= 0 else owner.next - 1
