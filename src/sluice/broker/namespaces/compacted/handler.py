"""Where MQTT meets the exclusive compacted queues: what is written to and read from under `$ECQ/`.

$ECQ/w/<client>/<key>     publish: the next value of a key of that client's queue; a key has one or more levels
$ECQ/<client>/#           subscribe, at QoS 1 and as that client: its own queue

The `w` keeps the two apart. It translates and answers; what becomes of values is the engine's.

Writes are gathered, and done together at the end of the turn: among millions of keys nothing that a write looks for is
near, and looking for many at once takes hardly longer than looking for one (`Finder.touch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le
from librt.vecs import vec
from mypy_extensions import i64

from sluice.broker.namespaces.compacted.exclusive_subscriber import OwnedDelivery, OwnedReader
from sluice.broker.namespaces.queues.reason_mapping import reason_of, subscribe_reason_of
from sluice.broker.sessions.subscriptions import encode_identifiers
from sluice.broker.turn import Turn
from sluice.errors import InvalidQueueConfig, QueueError
from sluice.message import LAST_SECOND, Message
from sluice.queues.engine import Engine
from sluice.queues.compacted.owner_table import name_hash, numbers
from sluice.queues.compacted.key_cache import KnownKeys
from sluice.queues.compacted.owner import Owner
from sluice.queues.bulk.start_position import time_of
from sluice.wire.packets import Publish, SubscriptionRequest
from sluice.wire.properties import Properties
from sluice.wire.reasons import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    NOT_AUTHORIZED,
    TOPIC_FILTER_INVALID,
    TOPIC_NAME_INVALID,
)
from sluice.wire.topics import ONES, WORD

if TYPE_CHECKING:
    from sluice.broker.net.connection import Connection
    from sluice.broker.sessions.session import Session

PREFIX: Final = b"$ECQ/"
WRITE: Final = b"$ECQ/w/"
WRITE_WORD: Final = 0x2F_772F_5143_4524  # the same as a number of seven bytes
WRITE_MASK: Final = 0xFF_FFFF_FFFF_FFFF
SLASHES: Final = 0x2F2F_2F2F_2F2F_2F2F
WRITE_SO: Final = "write to $ECQ/w/<client>/<key>, neither of them empty"
READ_SO: Final = (
    "a client subscribes to its own queue, $ECQ/<client>/# with its client id, and to nothing else below $ECQ"
)
QOS_BITS: Final = 3 << 16  # of a session's tag
MOST_GATHERED: Final = 64  # what they look at is to stay near until the last of them is done


class Write:
    """A PUBLISH that waits for the end of the turn. There is one for each that may wait, used over and over: an object
    of its own for every write would cost more than finding its owner does."""

    def __init__(self, nobody: Session) -> None:
        self.session: Session = nobody
        self.tag: i64 = 0  # what the session knows it by
        self.topic: bytes = b""
        self.cut: i64 = 0  # where the name of the client ends in it
        self.key: bytes = b""
        self.props: bytes = b""
        self.payload: bytes = b""
        self.expires: i64 = 0

    def refuse(self, reason: i64, why: str) -> None:
        session = self.session
        packet = Publish(b"", b"", (self.tag & QOS_BITS) >> 16, packet_id=self.tag & 0xFFFF)
        if packet.qos > 0:
            session.answer_far(packet, False, self.tag >> 20, reason, why)
        elif session.connection is not None:
            session.refuse(packet, session.connection, reason, why)


class EcqDoor:
    def __init__(self, engine: Engine, turn: Turn) -> None:
        self._engine: Engine = engine
        self._turn: Turn = turn
        self.most: int = MOST_GATHERED  # that are gathered
        self._writes: list[Write] = []  # of which so many wait
        self._waiting: i64 = 0
        self._clients: vec[i64] = numbers(MOST_GATHERED)  # for each of them the hash of its client,
        self._marks: vec[i64] = numbers(MOST_GATHERED)  # the mark of its key,
        self._found: vec[i64] = numbers(MOST_GATHERED)  # and where its value was found
        self._keys: KnownKeys = KnownKeys()
        self._catch_up: Callable[[], None] = self.catch_up
        self._warned: bool = False  # of a client id that is not bound to a user

    def _begin(self) -> None:
        """Something is asked of the engine. What was written before it comes before it."""
        self.catch_up()
        turn = self._turn
        self._engine.now = turn.now
        turn.schedule()

    # ---- writing

    def publish(self, packet: Publish, session: Session, connection: Connection) -> None:
        """A PUBLISH to a topic under `$ECQ/`. The door of queues has begun the turn."""
        topic = packet.topic
        cut = end_of_client(topic)
        if cut < 0:
            session.refuse(packet, connection, TOPIC_NAME_INVALID, WRITE_SO)
            return
        if self._engine.unavailable:
            try:
                self._engine.check_available()
            except QueueError as error:
                session.refuse(packet, connection, reason_of(error), str(error))
                return
        if packet.qos > 0:
            session.answer_later(packet)
        nth = self._waiting
        if nth == len(self._writes):
            self._writes.append(Write(session))
        write = self._writes[nth]
        write.session = session
        write.tag = session.tag(packet)
        write.topic = topic
        write.cut = cut
        write.payload = packet.payload
        write.props = packet.raw
        write.expires = expiry_of(packet)
        keys = self._keys
        spot = keys.at(topic, cut + 1)
        write.key = keys.keys[spot]
        self._marks[nth] = keys.marks[spot]
        self._clients[nth] = name_hash(topic, len(WRITE), cut)
        self._waiting = nth + 1
        if nth + 1 >= self.most or (packet.qos == 2 and session.sid):
            self.catch_up()  # QoS 2: the value belongs into the frame of its packet id
        elif nth == 0:
            self._turn.put_off = self._catch_up
        session.router.hold_back(connection)

    def catch_up(self) -> None:
        """Do what was gathered. Whoever is to be answered behind those who wrote calls this first [MQTT-4.6.0-2]."""
        size = self._waiting
        if size == 0:
            return
        self._waiting = 0
        self._turn.put_off = None
        exclusive = self._engine.exclusive
        journal = self._engine.journal
        now = self._turn.now
        clients, marks, found = self._clients, self._marks, self._found
        found[0] = -1
        if size > 1:
            exclusive.finder.find_all(clients, marks, found, size)
        values = exclusive.values
        writes = self._writes
        nth: i64 = 0
        while nth < size:
            at = found[nth]
            if exclusive.values != values:
                at = -1  # there is a new key, and with it all rows of its owner may be elsewhere
            write = writes[nth]
            payload = write.payload
            write.payload = b""  # which may be large, and the next to wait here may be long in coming
            try:
                exclusive.write(
                    at,
                    b"" if at >= 0 else write.topic[len(WRITE) : write.cut],
                    clients[nth],
                    marks[nth],
                    write.key,
                    write.props,
                    payload,
                    write.expires,
                    now,
                )
            except QueueError as error:
                write.refuse(reason_of(error), str(error))
            else:
                if write.tag & QOS_BITS:
                    journal.add_receipt(write.session, write.tag)
            nth += 1

    def publish_will(self, will: Publish) -> None:
        """There is nobody left to hear a refusal, so the log does."""
        self._begin()
        topic = will.topic
        cut = end_of_client(topic)
        fault = WRITE_SO
        try:
            if cut >= 0:
                self._engine.check_available()
                client = topic[len(WRITE) : cut].decode()
                self._engine.exclusive.publish(client, message_of(will, topic[cut + 1 :]), self._engine.now)
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
        fault = fault_of_reading(topic_filter, session.client_id)
        if fault:
            return fault, READ_SO
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
        if not self._warned:
            self._check_binding(session)
        return 1, ""

    def _check_binding(self, session: Session) -> None:
        """Warn once if clients of other users can connect with the id of an owner, and so read its queue.

        An owner is a client id. Where clients have users, the rules must say whose it is.
        """
        grant, connection = session.grant, session.connection
        if grant is None or not session.user or connection is None or grant.binds_client():
            return
        self._warned = True
        facts: dict[str, object] = {
            "client": session.client_id,
            "user": session.user,
            "why": "the access rules let other users connect with this client id, and read its exclusive queue",
            "do": 'have a rule allow "connect" with clients = ["%u", "%u:*"], and no rule allow it for all clients',
        }
        connection.broker.log("exclusive queue not bound to a user", facts)

    def _join(self, session: Session, identifier: int, start: str) -> None:
        exclusive = self._engine.exclusive
        owner = exclusive.owners.get(session.client_id)
        behind: i64 = place_of(owner, start) if start else -1  # and who cannot say where becomes no owner
        if owner is None:
            owner = exclusive.make(session.client_id, self._engine.now)
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

    def paused(self, reader: OwnedReader) -> None:
        """Its client is away."""
        self._engine.exclusive.put_down(reader)

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
            elif exclusive.heal(reader):
                self._engine.warnings.append(
                    f"values of {session.client_id} were asked of the store and did not come: asked for again"
                )


def is_write(topic: bytes) -> bool:
    """Whether a topic begins with `WRITE`, and goes on: seven bytes are compared at once."""
    return len(topic) >= WORD and read_i64_le(topic, 0) & WRITE_MASK == WRITE_WORD


def end_of_client(topic: bytes) -> i64:
    """Where the name of the client ends in a topic that can be written to; -1 when it is none."""
    end: i64 = len(topic)
    if not is_write(topic):
        return -1
    cut: i64 = len(WRITE)
    while cut + WORD <= end:
        word = read_i64_le(topic, cut) ^ SLASHES
        slashes = (
            ((word - ONES) & ~word) >> 7
        ) & ONES  # a bit for the first of them at least, and none before it
        if slashes:
            before = ((slashes & -slashes) - 1) & ONES  # a bit for each byte that stands before it,
            cut += ((before * ONES) >> 56) & 0xFF  # and so many bits that is
            break
        cut += WORD
    else:
        while cut < end and topic[cut] != 0x2F:
            cut += 1
    return cut if len(WRITE) < cut < end - 1 else -1


def message_of(packet: Publish, key: bytes) -> Message:
    message = Message(packet.payload, packet.raw, key)
    message.expires = expiry_of(packet)
    return message


def expiry_of(packet: Publish) -> i64:
    return min(int(packet.expires_at + 0.999), LAST_SECOND) if packet.expires_at != 0.0 else 0


def filter_of(client_id: str) -> bytes:
    return PREFIX + client_id.encode() + b"/#"


def is_own(topic_filter: bytes, client_id: str) -> bool:
    """Whether a filter is the queue of this client. An id with a further level or a wildcard in it cannot have one."""
    if "/" in client_id or "+" in client_id or "#" in client_id:
        return False
    return topic_filter == filter_of(client_id)


def fault_of_reading(topic_filter: bytes, client_id: str) -> int:
    """Why this client cannot read there, whatever the rules allow: another's queue, or none at all; 0 when it can."""
    if is_own(topic_filter, client_id):
        return 0
    levels = topic_filter.split(b"/")
    whole = len(levels) == 3 and levels[2] == b"#" and levels[1] not in (b"", b"+")
    return NOT_AUTHORIZED if whole else TOPIC_FILTER_INVALID


def place_of(owner: Owner | None, start: str) -> i64:
    """The sequence behind which an owner goes on that wants to `start` somewhere; -1: one that is new has but one
    place to start at."""
    seconds: i64 = 0
    if start != "earliest" and start != "latest" and not is_sequence(start):
        try:
            since = float(start[1:]) if start.startswith("@") else time_of(start)
            if abs(since) >= float(LAST_SECOND):
                raise OverflowError
            seconds = int(since)
        except (ValueError, OverflowError):
            raise InvalidQueueConfig(
                f"start is {start!r}",
                "Use earliest, latest, a sequence, or a time such as 2030-01-31T12:00:00Z",
            ) from None
    if owner is None:
        return -1
    if start == "earliest":
        return 0
    if start == "latest":
        return owner.next - 1
    if is_sequence(start):
        return max(0, int(start) - 1)
    slot = owner.since(seconds)
    return owner.seq(slot) - 1 if slot >= 0 else owner.next - 1


def is_sequence(start: str) -> bool:
    return start.isascii() and start.isdigit() and len(start) <= 18
