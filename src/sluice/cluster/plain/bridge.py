"""Plain MQTT traffic between two nodes: one stream each way; the dialing node sends requests.

A publish is sent once per node, however many of its cells need it. When the stream breaks, the
bridge returns unanswered requests to the node, which sends them to the current owners of the
cells. If the owner is the same node, it may have the message already. Invariant: each publish has
a dedup id, by which the receiver recognizes it (`node_inbox`).
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from sluice.cluster.plain import bridge_frames
from sluice.cluster.plain.bridge_frames import CellTarget, FrameReader, MalformedFrame, encode_frame
from sluice.cluster.plain.fanout import UNREACHABLE, Fanout, PublishOrigin, RetainedLookup
from sluice.cluster.plain.node_inbox import NodeInbox, entry_key
from sluice.cluster.plain.retained_search import SearchListener
from sluice.cluster.transport import StreamTransport
from sluice.queues.log import PART_BITS
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.cluster.node import Node

BRIDGE_GREETING: Final = b"bridge"
MIN_REDIAL_SECONDS: Final = 0.02
MAX_REDIAL_SECONDS: Final = 0.5
MAX_NOTE_NUMBER: Final = (1 << 63) - 1  # of a note in the log
ACKS_RECEIVED_INTERVAL: Final = 64  # answers between two frames that let the peer forget them


class Bridge:
    """The requests to one other node."""

    def __init__(self, node: Node, peer: str) -> None:
        self.is_write_paused = False
        self._node = node
        self._peer = peer
        self._transport: StreamTransport | None = None
        self._out: list[bytes] = []
        self._frames = FrameReader()
        self._last_request_id = 0
        self._publishes: dict[int, tuple[list[CellTarget], Fanout]] = {}
        self._lookups: dict[int, tuple[list[int], RetainedLookup]] = {}
        self._sent_interest = 0  # number of the last INTEREST frame
        self._acked_interest = 0  # number of the last INTEREST frame that the peer acknowledged
        self._interest_waiters: list[tuple[int, Callable[[], None]]] = []
        self._answers_received = 0  # on this stream
        self._redial_seconds = MIN_REDIAL_SECONDS
        self._is_ended = False
        self.dial()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def dial(self) -> None:
        if not self._is_ended and self._transport is None:
            self._node.dialer.dial_node(self._peer, BRIDGE_GREETING, self)

    def end(self) -> None:
        """End the bridge, because the peer is gone; other nodes answer its open requests."""
        self._is_ended = True
        if self._transport is not None:
            self._transport.close()
        self._return_unanswered()
        waiters, self._interest_waiters = self._interest_waiters, []
        for _, on_known in waiters:
            on_known()

    # ---- the stream

    def connection_made(self, transport: StreamTransport) -> None:
        if self._is_ended:
            transport.close()
            return
        self._transport = transport
        self._frames = FrameReader()
        self._answers_received = 0
        self._redial_seconds = MIN_REDIAL_SECONDS
        self.is_write_paused = False
        for cell, table in self._node.interest_tables():
            self.send_interest(cell, table, True)
        self._interest_waiters = [
            (self._sent_interest, on_known) for _, on_known in self._interest_waiters
        ]
        self._node.retry_parked()

    def data_received(self, data: bytes) -> None:
        for kind, body in self._frames.feed(data):
            if kind == bridge_frames.INTEREST_ACK:
                self._on_interest_ack(bridge_frames.unpack_fields(">I", body)[0])
            elif kind == bridge_frames.PUBLISH_ACK:
                self._on_publish_ack(body)
            elif kind == bridge_frames.LOOKUP_RESULT:
                self._on_lookup_result(body)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None:
        self._transport = None
        self._out.clear()
        self.is_write_paused = False
        self._return_unanswered()
        if not self._is_ended:
            asyncio.get_running_loop().call_later(self._redial_seconds, self.dial)
            self._redial_seconds = min(2 * self._redial_seconds, MAX_REDIAL_SECONDS)

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._node.unthrottle_connections()

    def _send(self, kind: int, body: bytes) -> None:
        if self._transport is None:
            return
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(encode_frame(kind, body))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and out:
            self._transport.write(b"".join(out))

    def _return_unanswered(self) -> None:
        publishes, self._publishes = self._publishes, {}
        lookups, self._lookups = self._lookups, {}
        for targets, fanout in publishes.values():
            for target in targets:
                self._node.resend(target, fanout)
            fanout.add_answer(0)
        for cells, lookup in lookups.values():
            for cell in cells:
                self._node.look_up(cell, lookup)

    # ---- requests of the node

    def send_interest(self, cell: int, filters: Mapping[bytes, int], is_full_table: bool) -> None:
        self._sent_interest += 1
        table = json.dumps({name.decode(): count for name, count in filters.items()})
        self._send(
            bridge_frames.INTEREST,
            struct.pack(">IHB", self._sent_interest, cell, is_full_table) + table.encode(),
        )

    def after_interest_known(self, on_known: Callable[[], None]) -> None:
        """Call `on_known` when the peer has received all interest sent so far."""
        if self._is_ended or (self.is_open and self._acked_interest == self._sent_interest):
            on_known()
        else:
            self._interest_waiters.append((self._sent_interest, on_known))

    def publish(self, targets: list[CellTarget], message: Publish, fanout: Fanout | None) -> None:
        number = dedup_id = 0
        if fanout is not None:
            dedup_id = fanout.dedup_id
            number = self._last_request_id = self._last_request_id % 0xFFFF_FFFF + 1
            self._publishes[number] = (targets, fanout)
            fanout.expect_answer()
            self._node.schedule_sweep()
        body = struct.pack(">IQ", number, dedup_id) + bridge_frames.write_targets(targets)
        body += bridge_frames.write_message(message, self._node.now())
        origin = fanout.origin if fanout is not None else None
        if origin is None:
            self._send(bridge_frames.PUBLISH, body)
        else:
            head = struct.pack(
                ">HQQQ", origin.cell, origin.session, origin.dedup_id, origin.lowest_open_id
            )
            self._send(bridge_frames.PUBLISH_ONCE, head + body)

    def expire_publishes(self, now: float) -> bool:
        """Fail publishes that the peer has not answered in time; return whether some remain.

        A later answer is ignored.
        """
        late = [number for number, (_, fanout) in self._publishes.items() if fanout.deadline <= now]
        for number in late:
            _, fanout = self._publishes.pop(number)
            fanout.add_answer(0, UNREACHABLE)
        return bool(self._publishes)

    def look_up(self, cells: list[int], lookup: RetainedLookup) -> None:
        number = self._last_request_id = self._last_request_id % 0xFFFF_FFFF + 1
        self._lookups[number] = (cells, lookup)
        targets: list[CellTarget] = [(cell, []) for cell in cells]
        self._send(
            bridge_frames.LOOKUP,
            struct.pack(">I", number) + bridge_frames.write_targets(targets) + lookup.topic_filter,
        )

    # ---- answers of the peer

    def _on_interest_ack(self, number: int) -> None:
        self._acked_interest = number
        ready = [on_known for sent, on_known in self._interest_waiters if sent <= number]
        self._interest_waiters = [one for one in self._interest_waiters if one[0] > number]
        for on_known in ready:
            on_known()

    def _on_publish_ack(self, body: bytes) -> None:
        number, receivers = bridge_frames.unpack_fields(">II", body)
        moved, at = _read_targets(self._node, body, 8, True)
        _, fanout = self._publishes.pop(number, ([], None))
        if fanout is not None:
            for target in moved:
                self._node.reroute(target, fanout)
            fanout.add_answer(receivers, body[at:].decode(errors="replace"))
        self._answers_received += 1
        if self._answers_received % ACKS_RECEIVED_INTERVAL == 0:
            self._send(bridge_frames.ACKS_RECEIVED, struct.pack(">I", self._answers_received))

    def _on_lookup_result(self, body: bytes) -> None:
        (number,) = bridge_frames.unpack_fields(">I", body)
        moved, at = _read_targets(self._node, body, 4)
        messages = bridge_frames.read_messages(body, at, self._node.now())
        cells, lookup = self._lookups.pop(number, ([], None))
        if lookup is not None:
            for cell, _ in moved:
                self._node.look_up(cell, lookup)
            lookup.add_answer(messages, len(cells) - len(moved))


def _read_targets(
    node: Node, body: bytes, at: int, with_any: bool = False
) -> tuple[list[CellTarget], int]:
    targets, end = bridge_frames.read_targets(body, at)
    for cell, _ in targets:
        if cell >= node.cells and not (with_any and cell == bridge_frames.ANY_CELL):
            raise MalformedFrame(f"there is no cell {cell}")
    return targets, end


def _read_origin(body: bytes) -> PublishOrigin:
    cell, session, dedup_id, lowest = bridge_frames.unpack_fields(">HQQQ", body)
    if session > MAX_NOTE_NUMBER or max(dedup_id, lowest) > MAX_NOTE_NUMBER >> PART_BITS:
        raise MalformedFrame("a session number or dedup id is too large to be stored")
    return PublishOrigin(cell, session, dedup_id, lowest)


class BridgeReceiver:
    """The requests of one other node."""

    def __init__(self, node: Node, inbox: NodeInbox) -> None:
        self._node = node
        self._inbox = inbox
        self._stream_number = inbox.open_stream(node.now())
        self._transport: StreamTransport | None = None
        self._frames = FrameReader()
        self._out: list[bytes] = []
        # Inbox keys of each answer, in order of sending.
        self._unconfirmed_answers: deque[list[int]] = deque()
        self._confirmed_answers = 0

    def connection_made(self, transport: StreamTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        node = self._node
        for kind, body in self._frames.feed(data):
            if kind == bridge_frames.PUBLISH:
                self._accept_publish(body, None)
            elif kind == bridge_frames.PUBLISH_ONCE:
                self._accept_publish(body[26:], _read_origin(body))
            elif kind == bridge_frames.INTEREST:
                number, cell, is_full_table = bridge_frames.unpack_fields(">IHB", body)
                node.receive_interest(
                    cell, bridge_frames.read_filters(body, 7), bool(is_full_table)
                )
                self._send(bridge_frames.INTEREST_ACK, struct.pack(">I", number))
            elif kind == bridge_frames.LOOKUP:
                self._look_up(body)
            elif kind == bridge_frames.ACKS_RECEIVED:
                self._confirm_answers(bridge_frames.unpack_fields(">I", body)[0])

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None:
        self._transport = None
        self._inbox.on_stream_lost(self._stream_number, self._node.now())

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...

    def _send(self, kind: int, body: bytes) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(encode_frame(kind, body))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.write(b"".join(out))

    def _accept_publish(self, body: bytes, origin: PublishOrigin | None) -> None:
        node = self._node
        number, dedup_id = bridge_frames.unpack_fields(">IQ", body)
        targets, at = _read_targets(node, body, 12)
        message = bridge_frames.read_message(body, at, node.now())
        if number == 0:
            for cell, shares in targets:
                here = node.local_cells.get(cell)
                if here is not None:
                    here.deliver(message, shares, None)
            return
        moved: list[CellTarget] = []
        keys: list[int] = []
        answer = Fanout(message, partial(self._answer, number, moved, keys))
        for cell, shares in targets:
            here = node.local_cells.get(cell)
            if here is None:
                moved.append((cell, shares))
            else:
                key = entry_key(dedup_id, cell)
                keys.append(key)
                entry = self._inbox.find_or_add(key, cell, self._stream_number)
                entry.deliver(here, shares, message, origin)
                entry.answer_when_committed(answer, moved)
        answer.add_answer(0)

    def _answer(
        self, number: int, moved: list[CellTarget], keys: list[int], receivers: int, fault: str
    ) -> None:
        body = (
            struct.pack(">II", number, receivers)
            + bridge_frames.write_targets(moved)
            + fault.encode()
        )
        self._send(bridge_frames.PUBLISH_ACK, body)
        self._unconfirmed_answers.append(keys)

    def _confirm_answers(self, confirmed: int) -> None:
        while self._confirmed_answers < confirmed and self._unconfirmed_answers:
            self._confirmed_answers += 1
            for key in self._unconfirmed_answers.popleft():
                self._inbox.remove(key)

    def _look_up(self, body: bytes) -> None:
        node = self._node
        (number,) = bridge_frames.unpack_fields(">I", body)
        targets, at = _read_targets(node, body, 4)
        listener = RemoteSearchListener(self, number, len(targets))
        for cell, _ in targets:
            here = node.local_cells.get(cell)
            if here is None:
                listener.on_done(cell, True)
            else:
                node.searches.start(here, body[at:], listener)
        listener.answer_if_done()

    def is_open(self) -> bool:
        return self._transport is not None

    def answer_lookup(self, number: int, moved: list[CellTarget], found: list[Publish]) -> None:
        now = self._node.now()
        messages = b"".join([bridge_frames.write_message(one, now) for one in found])
        self._send(
            bridge_frames.LOOKUP_RESULT,
            struct.pack(">I", number) + bridge_frames.write_targets(moved) + messages,
        )


class RemoteSearchListener(SearchListener):
    """A lookup of another node, answered in one frame after all of its cells are searched."""

    def __init__(self, receiver: BridgeReceiver, number: int, cells: int) -> None:
        self._receiver = receiver
        self._number = number
        self._remaining = cells
        self._moved_cells: list[CellTarget] = []
        self._found: list[Publish] = []
        self._is_answered = False

    def is_wanted(self) -> bool:
        return self._receiver.is_open()

    def on_found(self, messages: list[Publish]) -> None:
        self._found += messages

    def on_done(self, cell: int, has_moved: bool) -> None:
        if has_moved:
            self._moved_cells.append((cell, []))
        self._remaining -= 1
        self.answer_if_done()

    def answer_if_done(self) -> None:
        if self._remaining == 0 and not self._is_answered:
            self._is_answered = True
            self._receiver.answer_lookup(self._number, self._moved_cells, self._found)
