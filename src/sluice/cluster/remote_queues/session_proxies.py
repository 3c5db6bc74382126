"""All legs of one session: which cells its publishes and subscriptions go to, and what becomes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.cluster_port import Legs
from sluice.broker.net.connection import Connection
from sluice.broker.namespaces.queues.queue_consumer import user_property
from sluice.broker.namespaces.queues.queue_topics import PREFIX, Wishes, parse_queue_topic, read_wishes
from sluice.cluster.ingress.stream_acceptor import LEG
from sluice.cluster.remote_queues.session_proxy import Leg
from sluice.cluster.transport.streams import LineTransport
from sluice.cluster.plain.fanout import LONGEST_SWEEP, UNREACHABLE
from sluice.cluster.remote_queues.routing import EVERYWHERE, cell_of_filter
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Connect, Disconnect, Publish
from sluice.wire.reasons import IMPLEMENTATION_SPECIFIC_ERROR
from sluice.wire.topics import matches

if TYPE_CHECKING:
    from sluice.broker.sessions.session import Session
    from sluice.cluster.cell import CellAbroad


class SessionLegs(Legs):
    def __init__(self, session: Session, abroad: CellAbroad, fresh: bool) -> None:
        self.session = session
        self._abroad = abroad
        self._fresh = fresh  # else the session is from before a restart, and so may be its far ones
        self._legs: dict[int, Leg] = {}
        self._held: list[Connection] = []

    # ---- what the session wants

    def publish(self, cell: i64, packet: Publish, settles: bool, connection: Connection) -> None:
        session = self.session
        if packet.qos > 0:
            session.answer_later(packet)
        leg = self._leg(int(cell))
        if packet.qos == 2 and not settles:
            self._abroad.pass_by_leg(session, packet, partial(leg.publish, packet, False, session.epoch()))
        else:
            session.defer_receipt(packet)
            leg.publish(packet, settles, session.epoch())
        if leg.is_full() and connection.hold():
            self._held.append(connection)

    def subscribe(
        self, topic_filter: bytes, qos: int, wishes: list[str], answer: Callable[[int, str], None]
    ) -> None:
        cells = self._cells_of(topic_filter)
        gathered = Gathered(len(cells), qos, answer)
        for cell in cells:
            self._leg(cell).subscribe(topic_filter, qos, wishes, gathered.add)

    def rejoin(self, topic_filter: bytes, qos: int, wishes: list[str]) -> None:
        """From before a restart: the lines are opened when the client is back."""
        for cell in self._cells_of(topic_filter):
            self._leg(cell).remember(topic_filter, qos, wishes)

    def unsubscribe(self, topic_filter: bytes) -> None:
        for cell in self._cells_of(topic_filter):
            if cell in self._legs:
                self._legs[cell].unsubscribe(topic_filter)

    def attached(self) -> None:
        for leg in self._legs.values():
            leg.attached()

    def departed(self) -> None:
        self._held.clear()
        for leg in self._legs.values():
            leg.departed()

    def ended(self) -> None:
        for leg in self._legs.values():
            leg.end()
        self._legs.clear()

    def line_is_free(self) -> None:
        for leg in self._legs.values():
            leg.hear(True)

    # ---- for the legs

    def dial(self, cell: int, leg: Leg) -> None:
        self._abroad.node.dial(cell, LEG, leg)

    def is_connected(self) -> bool:
        return self.session.connection is not None

    def answer(self, packet: Publish, settles: bool, epoch: int, reason: int, why: str) -> None:
        if packet.qos > 0:
            self.session.answer_far(packet, settles, epoch, reason, why)
        self.unhold()

    def refuse_late(self, packet: Publish, settles: bool, epoch: int) -> None:
        """The client of a publish is told that there was no answer in time."""
        session = self.session
        connection = session.connection
        if session.version == V5 or not settles:
            session.answer_far(packet, settles, epoch, IMPLEMENTATION_SPECIFIC_ERROR, UNREACHABLE)
        elif connection is not None and session.epoch() == epoch:
            # MQTT 3.1.1 cannot refuse a settlement: without an answer the client repeats it.
            connection.end(IMPLEMENTATION_SPECIFIC_ERROR, UNREACHABLE)
        self.unhold()

    def answer_by(self) -> float:
        """When what is asked now must be answered."""
        return self.now() + self._abroad.node.answer_seconds

    def sweep_seconds(self) -> float:
        return min(LONGEST_SWEEP, self._abroad.node.answer_seconds / 4)

    def unhold(self) -> None:
        if self._held and not any(leg.is_full() for leg in self._legs.values()):
            held, self._held = self._held, []
            for connection in held:
                connection.unhold()

    def now(self) -> float:
        return self.session.router.turn.now

    def begin(self) -> None:
        """A line is read: a turn of this cell begins."""
        self.session.router.turn.begin()

    def soon(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)

    def warn(self, text: str) -> None:
        self._abroad.node.warn(text)

    def end_far(self, cell: int) -> None:
        """A far session that outlived its line is to end, and there is no line to say so."""
        self._abroad.node.dial(cell, LEG, Farewell(self.session.client_id))

    def covers(self, topic_filter: bytes, topic: bytes) -> bool:
        """Whether a delivery on this topic is of that subscription."""
        pattern = PREFIX + parse_queue_topic(topic_filter).queue.encode()
        return matches(pattern, PREFIX + parse_queue_topic(topic).queue.encode())

    # ----

    def _cells_of(self, topic_filter: bytes) -> list[int]:
        home, cells = self._abroad.cell, self._abroad.node.cells
        cell = cell_of_filter(topic_filter, cells)
        return [one for one in range(cells) if one != home] if cell == EVERYWHERE else [cell]

    def _leg(self, cell: int) -> Leg:
        leg = self._legs.get(cell)
        if leg is None:
            leg = self._legs[cell] = Leg(self, cell, self._fresh)
        return leg


class Gathered:
    """One answer of many: refused if one refuses."""

    def __init__(self, count: int, qos: int, answer: Callable[[int, str], None]) -> None:
        self._count = count
        self._reason = qos
        self._why = ""
        self._answer = answer

    def add(self, reason: int, why: str) -> None:
        self._count -= 1
        if reason >= 0x80 and self._reason < 0x80:
            self._reason, self._why = reason, why
        if self._count == 0:
            self._answer(self._reason, self._why)


class Farewell:
    """Ends a far session: whoever begins it anew and leaves has none."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id

    def connection_made(self, transport: LineTransport) -> None:
        connect = Connect(self._client_id, V5, True, 0)
        transport.write(encode(connect, V5) + encode(Disconnect(), V5))

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


def name_once(packet: Publish, name: str) -> None:
    """Exactly once, also when it has to be said twice: a queue takes a name only once."""
    wishes = Wishes()
    read_wishes(packet.raw, wishes)
    if wishes.begin < 0 and packet.topic.startswith(PREFIX):
        packet.raw += user_property(b"message-id", name.encode())
