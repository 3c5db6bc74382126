"""A leg: a session's line to one other cell. It speaks MQTT 5 there, as a client of the same name.

    home session ──Leg──▶ line ──▶ Connection and Session of the same client id in the far cell

The far cell does with it what it does with every client: groups, prefetch, receive maximum, settling, refusals in
words. Packet ids are the leg's own. What was published and not answered is said again when the line breaks or the cell
moves. What the client had been given over the line before is settled by token then, because late work is work: and it
is so before the new line subscribes to anything, so that nobody is given what is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.broker.cluster_port import WITHOUT_PROPERTIES, FarDelivery
from sluice.broker.cluster_port import Leg as Port
from sluice.broker.net.connection import NO_LIMIT
from sluice.broker.namespaces.queues.queue_topics import EXTEND, NACK, REJECT, RELEASE
from sluice.broker.sessions.subscriptions import encode_identifiers
from sluice.cluster.remote_queues.unsettled import Holding, name_in, settlement
from sluice.cluster.transport.streams import LineTransport
from sluice.cluster.remote_queues.pending_requests import Asked, Sent, Whole
from sluice.errors import ProtocolViolation
from sluice.wire.decode import decode, decode_publish
from sluice.wire.encode import write_ack, write_packet, write_publish, write_reasoned
from sluice.wire.framing import Framer, body_of, length_of
from sluice.wire.packets import (
    V5,
    Ack,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsubscribe,
)
from sluice.wire.primitives import read_u16
from sluice.wire.properties import PUBACK, PUBLISH, Properties
from sluice.wire.reasons import IMPLEMENTATION_SPECIFIC_ERROR

if TYPE_CHECKING:
    from sluice.cluster.remote_queues.session_proxies import SessionLegs

FIRST_PAUSE: Final = 0.02  # before a line that broke is dialled again,
LONGEST_PAUSE: Final = 0.5  # and at most
NO_OWNER: Final = (
    "the part of the cluster that has this queue does not answer: subscribe again in a moment, "
    "and see `sluice cluster status` if it stays so"
)
MOST_WAITING: Final = 1024  # publishes that wait for an answer, before the publisher is not heard


class Leg(Port):
    def __init__(self, legs: SessionLegs, cell: int, fresh: bool) -> None:
        self.cell = cell
        self.lasting = False  # the far session outlives its line
        self._legs = legs
        self._fresh = fresh  # a far session of this name would be of an earlier life
        self._life = 0  # counts lines
        self._transport: LineTransport | None = None
        self._dialling = False
        self._ended = False
        self._framer = Framer(NO_LIMIT)
        self._last_topic: bytes = b""  # of the last delivery
        self._out: BytesWriter | None = None
        self._last_id = 0
        self._sent: dict[int, Sent] = {}  # publishes without an answer, in order
        self._backlog: deque[Sent] = deque()  # and those that are not said yet
        self._limit = 1024  # what the far cell takes without an answer
        self._asked: dict[int, Asked] = {}
        self._filters: dict[bytes, tuple[int, list[str]]] = {}
        self._given: dict[int, FarDelivery] = {}  # what the client has of this line, by the line's packet id
        self._said: set[int] = set()  # of those, what the far cell has said on this line
        self._holding = Holding()  # what the client has not settled yet, where a PUBACK does not
        self._by_puback: dict[bytes, bool] = {}  # by topic: where it does
        self._of_topic: bytes = b""  # the topic of the last delivery,
        self._held: dict[bytes, bytes] | None = None  # and where those of its queue are noted
        self._pause = FIRST_PAUSE
        self._choked = False
        self._renews = False  # the line is to be made anew, once nothing on it waits for an answer
        self._sweeping = False

    # ---- the line

    def dial(self) -> None:
        if self._transport is None and not self._dialling and not self._ended:
            self._dialling = True
            self._legs.dial(self.cell, self)

    def connection_made(self, transport: LineTransport) -> None:
        self._dialling = False
        if self._ended:
            transport.close()
            return
        self._transport = transport
        self._framer = Framer(NO_LIMIT)
        self._choked = False
        self._renews = False
        self._life += 1
        self._said.clear()
        session = self._legs.session
        self.lasting = bool(self._filters) and session.expiry > 0
        connect = Connect(session.client_id, V5, self._fresh or not self.lasting, 0)
        connect.properties.session_expiry = session.expiry if self.lasting else 0
        connect.properties.receive_maximum = max(1, int(session.window))
        connect.username = session.user or None  # so that its deliveries there are bound to the user as well
        if session.version != V5:
            connect.properties.user.append(WITHOUT_PROPERTIES)
        connection = session.connection
        if connection is not None and connection.peer_limit != NO_LIMIT and session.version == V5:
            connect.properties.maximum_packet_size = int(connection.peer_limit)
        self._fresh = False
        self._say(connect)
        again, self._sent = self._sent, {}
        self._backlog.extendleft(reversed([sent for sent in again.values() if not sent.refused]))
        others = self._settle_late()
        self._say(Pingreq())  # its answer comes behind all that is said again
        self._asked = {
            key: asked for key, asked in self._asked.items() if asked.topic_filter in self._filters
        }
        waiting, self._asked = {asked.topic_filter: asked for asked in self._asked.values()}, {}
        for topic_filter, (qos, wishes) in self._filters.items():
            asked = waiting.get(topic_filter) or Asked(topic_filter, None)
            self._say_subscribe(asked, qos, wishes)
        self._backlog.extend(others)
        self._work_off()

    def _settle_late(self) -> list[Sent]:
        """Say what waits to be said of deliveries of earlier lines; all else that waits."""
        self._holding.line_is_new()
        self._look_again()
        waiting, self._backlog = self._backlog, deque()
        others: list[Sent] = []
        for sent in waiting:
            for part in self._in_parts(sent):
                if part.settles and part.epoch < 0:
                    self._backlog.append(part)
                else:
                    others.append(part)
        self._work_off()
        return others

    def _in_parts(self, sent: Sent) -> list[Sent]:
        if not sent.settles or sent.epoch < 0:
            return [sent]
        late, rest = self._holding.split(sent.packet)
        if not late:
            return [sent]
        whole = Whole(sent, len(late) if rest is None else len(late) + 1)
        parts = [Sent(packet, True, -1, whole, sent.until) for packet in late]
        if rest is not None:
            parts.append(Sent(rest, True, sent.epoch, whole, sent.until))
        return parts

    def data_received(self, data: bytes) -> None:
        self._legs.begin()
        data = self._framer.join(data)
        try:
            self._read(data)
        except ProtocolViolation as fault:
            self._legs.warn(f"the line to cell {self.cell} is not understood: {fault}")
            self._drop()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None:
        self._transport = None
        self._dialling = False
        self._out = None
        if not self._ended and (self._filters or self._sent or self._backlog) and self._legs.is_connected():
            self._legs.later(self._pause, self.dial)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def pause_writing(self) -> None:
        self._choked = True

    def resume_writing(self) -> None:
        self._choked = False
        self._work_off()
        self._legs.unhold()

    def is_full(self) -> bool:
        """Whether its client should not publish more for now."""
        return self._choked or len(self._backlog) >= MOST_WAITING

    def hear(self, listening: bool) -> None:
        """The client reads again, or does not."""
        if self._transport is not None:
            if listening:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # ---- what the session wants

    def publish(self, packet: Publish, settles: bool, epoch: int) -> None:
        if packet.expires_at:
            packet.expiry = max(0, int(packet.expires_at - self._legs.now() + 0.999))
        sent = Sent(packet, settles, epoch)
        if epoch >= 0 and packet.qos > 0:
            sent.until = self._legs.answer_by()
            self._sweep_later()
        if settles and epoch >= 0 and self._given:
            self._note_words(packet)
        if self._transport is None:
            self._backlog.append(sent)
            self.dial()
        else:
            if settles:
                self._backlog.extend(self._in_parts(sent))
            else:
                self._backlog.append(sent)
            self._work_off()

    def _note_words(self, packet: Publish) -> None:
        """A client that has said of a delivery that it failed may answer the packet afterwards: that is no ack."""
        verb = self._holding.verb(packet)
        if verb in (NACK, REJECT, RELEASE, EXTEND):
            names = set(self._holding.names(packet))
            for delivery in self._given.values():
                message = delivery.message
                if name_in(message.raw) in names or message.topic.partition(b"/$msg/")[2] in names:
                    delivery.failed = delivery.failed or verb != EXTEND
                    if self._legs.session.version != V5:
                        self._holding.keep(message, delivery.life != self._life)

    def subscribe(
        self, topic_filter: bytes, qos: int, wishes: list[str], answer: Callable[[int, str], None] | None
    ) -> None:
        asked = Asked(topic_filter, answer, self._legs.answer_by(), self._filters.get(topic_filter))
        self._sweep_later()
        self._filters[topic_filter] = (qos, wishes)
        self._look_again()
        if self._transport is None:
            self._asked[-len(self._asked) - 1] = asked
            self.dial()
        elif self._legs.session.expiry > 0 and not self.lasting:
            self._asked[-len(self._asked) - 1] = asked
            self._renews = True  # the far session ends with its line, and must not from now on
            self._renew()
        else:
            self._say_subscribe(asked, qos, wishes)

    def unsubscribe(self, topic_filter: bytes) -> None:
        self._look_again()
        if self._filters.pop(topic_filter, None) is not None and self._transport is not None:
            self._say(Unsubscribe(self._next_id(), [topic_filter]))

    def acknowledged(self, delivery: FarDelivery, reason: i64) -> None:
        far_id = int(delivery.far_id)
        if self._given.get(far_id) is delivery:
            del self._given[far_id]
        if delivery.life == self._life and self._transport is not None:
            write_ack(self._output(), PUBACK, delivery.far_id, reason, None, V5)
        elif not delivery.failed and self._settles_by_puback(delivery.message.topic):
            verb = b"/$ack" if reason < 0x80 else b"/$nack"
            self.publish(settlement(delivery.message, verb), True, -1)

    def remember(self, topic_filter: bytes, qos: int, wishes: list[str]) -> None:
        """A subscription from before a restart; the far session may have it too."""
        self._filters[topic_filter] = (qos, wishes)
        self.lasting = True

    def attached(self) -> None:
        if self._filters or self._sent or self._backlog:
            self.dial()

    def departed(self) -> None:
        """The client is away: so are we, and the far session waits as the session at home does. What the client will
        publish again itself is forgotten; what it believes to be received is said when it is back."""
        self._drop()
        self._sent = {key: one for key, one in self._sent.items() if one.packet.qos == 2 or one.epoch < 0}
        self._backlog = deque(one for one in self._backlog if one.packet.qos == 2 or one.epoch < 0)
        self._asked.clear()

    def end(self) -> None:
        """The session is no more: the far one neither."""
        self._ended = True
        if self._transport is not None:
            over = Properties()
            over.session_expiry = 0
            write_reasoned(self._output(), 0xE0, 0, over if self.lasting else None, V5)
            self.flush()
            self._transport.close()
        elif self.lasting:
            self._legs.end_far(self.cell)

    # ---- what the far cell says

    def _read(self, data: bytes) -> None:
        """Work off every whole packet; keep the rest. Deliveries and plain PUBACKs are nearly all of them."""
        size: i64 = len(data)
        at: i64 = 0
        needed: i64 = 0
        while at < size:
            body = body_of(data, at, size)
            if body == 0:
                break
            length = length_of(data, at, body)
            end: i64 = body + length
            if end > size:
                needed = end - at
                break
            head: i64 = data[at]
            if head >> 4 == PUBLISH:
                packet = decode_publish(data, head & 15, body, end, V5, self._last_topic)
                self._last_topic = packet.topic
                self._deliver(packet)
            elif head == 0x40 and length == 2:
                self._answered(int(read_u16(data, body, end)), 0, None)
            else:
                self._take(decode(data, head, body, end, V5))
            at = end
        if at < size:
            self._framer.keep(data, at, needed)

    def _take(self, packet: Packet) -> None:
        if isinstance(packet, Ack):
            self._answered(int(packet.packet_id), int(packet.reason), packet.properties)
        elif isinstance(packet, Suback):
            asked = self._asked.pop(packet.packet_id, None)
            reason = packet.reasons[0]
            if asked is not None and reason >= 0x80:
                self._filters.pop(asked.topic_filter, None)
            if asked is not None and asked.answer is not None:
                asked.answer(reason, _words(packet.properties))
            elif asked is not None and asked.topic_filter not in self._filters and reason < 0x80:
                # The client was refused meanwhile.
                self._say(Unsubscribe(self._next_id(), [asked.topic_filter]))
        elif isinstance(packet, Connack):
            self._pause = FIRST_PAUSE
            if packet.reason >= 0x80:
                self._legs.warn(f"cell {self.cell} refuses a line: {_words(packet.properties)}")
            elif packet.properties is not None and packet.properties.receive_maximum:
                self._limit = packet.properties.receive_maximum
            self._work_off()
        elif isinstance(packet, Pingresp):
            self._all_said()
        elif isinstance(packet, Disconnect):
            self._drop()

    def _deliver(self, packet: Publish) -> None:
        session = self._legs.session
        extra = b"" if packet.subscription_ids is None else encode_identifiers(packet.subscription_ids)
        if packet.expiry >= 0:
            packet.expires_at = self._legs.now() + float(packet.expiry)
        if packet.topic is not self._of_topic:
            self._look_at(packet.topic)
        if self._held is not None:
            self._holding.note(self._held, packet.topic, packet.raw)
        if packet.qos == 0:
            session.deliver(packet, 0, False, extra, None)
            return
        far_id = int(packet.packet_id)
        self._said.add(far_id)
        known = self._given.get(far_id)
        if known is not None and packet.dup:
            known.life = self._life
            session.say_far_again(known)
            return
        delivery = FarDelivery(packet, extra, self, packet.packet_id, self._life)
        self._given[far_id] = delivery
        session.deliver_far(delivery)
        if session.connection is not None and session.connection.choked:
            self.hear(False)

    def _all_said(self) -> None:
        """What the client has of an earlier line and was not said again on this one is not its any more: it may still
        finish it, and if it never had it on its present connection it never will."""
        for far_id, delivery in list(self._given.items()):
            if far_id not in self._said and delivery.life != self._life:
                del self._given[far_id]
                if delivery.unsaid:
                    self._legs.session.drop_far(delivery)

    def _answered(self, packet_id: int, reason: int, properties: Properties | None) -> None:
        sent = self._sent.pop(packet_id, None)
        if sent is not None:
            if sent.settles and reason < 0x80:
                self._holding.settled(sent.packet)
            whole = sent.whole
            if sent.refused:
                pass
            elif whole is not None:
                if whole.add(reason, _words(properties)) and not whole.refused:
                    said = whole.sent
                    self._legs.answer(said.packet, True, said.epoch, whole.reason, whole.why)
            elif sent.epoch >= 0:
                self._legs.answer(sent.packet, sent.settles, sent.epoch, reason, _words(properties))
        if self._renews:
            self._renew()
        elif self._backlog:
            self._work_off()

    def _renew(self) -> None:
        if all(sent.refused for sent in self._sent.values()):
            self._drop()

    # ---- what has waited too long

    def _sweep_later(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._legs.later(self._legs.sweep_seconds(), self._sweep)

    def _sweep(self) -> None:
        """Refuse what the far cell has not answered in time: it has no owner, or is not reached."""
        self._sweeping = False
        self._legs.begin()
        now = self._legs.now()
        late = [sent for sent in self._sent.values() if 0.0 < sent.until <= now]
        late += [sent for sent in self._backlog if 0.0 < sent.until <= now]
        if late:
            # What settles by token is said all the same: late work is work.
            kept = [sent for sent in self._backlog if not 0.0 < sent.until <= now or sent.epoch < 0]
            self._backlog = deque(kept)
        for sent in late:
            sent.until = 0.0
            self._refuse(sent)
        for key, asked in list(self._asked.items()):
            if asked.answer is not None and asked.until <= now:
                self._refuse_subscription(key, asked)
        waits = any(sent.until for sent in self._sent.values())
        waits = waits or any(sent.until for sent in self._backlog)
        if waits or any(asked.answer is not None for asked in self._asked.values()):
            self._sweep_later()

    def _refuse(self, sent: Sent) -> None:
        whole = sent.whole
        if whole is None:
            sent.refused = True
            self._legs.refuse_late(sent.packet, sent.settles, sent.epoch)
        elif not whole.refused:
            whole.refused = True
            self._legs.refuse_late(whole.sent.packet, True, whole.sent.epoch)

    def _refuse_subscription(self, key: int, asked: Asked) -> None:
        answer, asked.answer = asked.answer, None
        if asked.before is None:
            self._filters.pop(asked.topic_filter, None)
        else:
            self._filters[asked.topic_filter] = asked.before
        self._look_again()
        if key < 0:
            del self._asked[key]  # it was never said
        if answer is not None:
            answer(IMPLEMENTATION_SPECIFIC_ERROR, NO_OWNER)

    # ---- saying it

    def _work_off(self) -> None:
        if self._transport is None or self._renews:
            return
        backlog = self._backlog
        while backlog and len(self._sent) < self._limit and not self._choked:
            sent = backlog.popleft()
            packet = sent.packet
            out = self._output()
            extra = b""
            if packet.expiry >= 0:
                extra = b"\x02" + int(packet.expiry).to_bytes(4, "big")
            if packet.qos == 0 and sent.epoch >= 0:
                write_publish(out, packet, packet.topic, 0, packet.retain, False, 0, extra, V5)
                if sent.settles:
                    self._holding.settled(packet)
                continue
            packet_id = self._next_id()
            self._sent[packet_id] = sent
            write_publish(out, packet, packet.topic, 1, packet.retain, False, packet_id, extra, V5)

    def _say_subscribe(self, asked: Asked, qos: int, wishes: list[str]) -> None:
        packet_id = self._next_id()
        self._asked[packet_id] = asked
        properties = Properties()
        identifier = int(wishes[0])
        if identifier:
            properties.subscription_ids = [identifier]
        properties.user = list(zip(wishes[1::2], wishes[2::2]))
        if self._legs.session.version != V5 and "ack-mode" not in wishes[1::2]:
            properties.user.append(("ack-mode", "puback"))
        self._say(Subscribe(packet_id, [SubscriptionRequest(asked.topic_filter, qos)], properties))

    def _look_at(self, topic: bytes) -> None:
        """Deliveries of another queue than before: whether they are to be noted, and where."""
        self._of_topic = topic
        self._held = None
        if self._legs.session.version == V5:
            by_puback = self._by_puback.get(topic)
            if by_puback is None:
                by_puback = self._by_puback[topic] = self._settles_by_puback(topic)
            if not by_puback:
                self._held = self._holding.of_queue(topic)

    def _look_again(self) -> None:
        """What is known of topics was true of other subscriptions, or of another line."""
        self._of_topic = b""
        self._by_puback.clear()

    def _settles_by_puback(self, topic: bytes) -> bool:
        if self._legs.session.version != V5:
            return True
        mode = "explicit"
        for topic_filter, (_, wishes) in self._filters.items():
            if self._legs.covers(topic_filter, topic) and "ack-mode" in wishes[1::2]:
                mode = dict(zip(wishes[1::2], wishes[2::2]))["ack-mode"]
        return mode == "puback"

    def _next_id(self) -> int:
        while True:
            self._last_id = self._last_id % 65_535 + 1
            if self._last_id not in self._sent and self._last_id not in self._asked:
                return self._last_id

    def _say(self, packet: Packet) -> None:
        write_packet(self._output(), packet, V5)

    def _output(self) -> BytesWriter:
        if self._out is None:
            self._out = BytesWriter()
            self._legs.soon(self.flush)
        return self._out

    def flush(self) -> None:
        out, self._out = self._out, None
        if out is not None and self._transport is not None:
            self._transport.write(out.getvalue())

    def _drop(self) -> None:
        if self._transport is not None:
            self.flush()
            self._transport.close()


def _words(properties: Properties | None) -> str:
    return properties.reason_string or "" if properties is not None else ""
