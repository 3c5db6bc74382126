"""Between two nodes: one line each way for all that is plain MQTT. The node that dials speaks, the other one answers.

A publish goes once to a node, however many of its cells want it. What was not answered when the line breaks is given
back to the node, which asks whoever owns the cells by then. If that is the same node it may have it already: each
publish has a mark, by which it is known again (`taken`).
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
from sluice.cluster.plain.bridge_frames import FrameBroken, Frames, Goal, frame
from sluice.cluster.transport.streams import LineTransport
from sluice.cluster.plain.retained_search import Seeker
from sluice.cluster.plain.fanout import UNREACHABLE, Lookup, Origin, Spread
from sluice.cluster.plain.node_inbox import Memory, key_of
from sluice.queues.log.cross_node_dedup import KEY_BITS
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.cluster.node import Node

GREETING: Final = b"bridge"
FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.5
LARGEST_NUMBER: Final = (1 << 63) - 1  # of a note in the log
HEARD_EVERY: Final = 64  # answers, before the peer may forget what they were about


class Bridge:
    """To one other node."""

    def __init__(self, node: Node, peer: str) -> None:
        self.choked = False
        self._node = node
        self._peer = peer
        self._transport: LineTransport | None = None
        self._out: list[bytes] = []
        self._frames = Frames()
        self._last = 0
        self._publishes: dict[int, tuple[list[Goal], Spread]] = {}
        self._lookups: dict[int, tuple[list[int], Lookup]] = {}
        self._told = 0  # the number of the last interest that was told,
        self._known = 0  # and up to which the peer has heard it
        self._listeners: list[tuple[int, Callable[[], None]]] = []
        self._heard = 0  # answers on this line
        self._pause = FIRST_PAUSE
        self._ended = False
        self.dial()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def dial(self) -> None:
        if not self._ended and self._transport is None:
            self._node.lines.dial_node(self._peer, GREETING, self)

    def end(self) -> None:
        """The peer is gone: whatever it owed, somebody else answers for."""
        self._ended = True
        if self._transport is not None:
            self._transport.close()
        self._give_back()
        listeners, self._listeners = self._listeners, []
        for _, known in listeners:
            known()

    # ---- the line

    def connection_made(self, transport: LineTransport) -> None:
        if self._ended:
            transport.close()
            return
        self._transport = transport
        self._frames = Frames()
        self._heard = 0
        self._pause = FIRST_PAUSE
        self.choked = False
        for cell, table in self._node.tables():
            self.tell(cell, table, True)
        self._listeners = [(self._told, known) for _, known in self._listeners]
        self._node.retry()

    def data_received(self, data: bytes) -> None:
        for kind, body in self._frames.feed(data):
            if kind == bridge_frames.KNOWN:
                self._hear_known(bridge_frames.unpack(">I", body)[0])
            elif kind == bridge_frames.ANSWER:
                self._hear_answer(body)
            elif kind == bridge_frames.FOUND:
                self._hear_found(body)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None:
        self._transport = None
        self._out.clear()
        self.choked = False
        self._give_back()
        if not self._ended:
            asyncio.get_running_loop().call_later(self._pause, self.dial)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def pause_writing(self) -> None:
        self.choked = True

    def resume_writing(self) -> None:
        self.choked = False
        self._node.unhold()

    def _say(self, kind: int, body: bytes) -> None:
        if self._transport is None:
            return
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(frame(kind, body))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and out:
            self._transport.write(b"".join(out))

    def _give_back(self) -> None:
        publishes, self._publishes = self._publishes, {}
        lookups, self._lookups = self._lookups, {}
        for goals, spread in publishes.values():
            for goal in goals:
                self._node.resend(goal, spread)
            spread.finish(0)
        for cells, lookup in lookups.values():
            for cell in cells:
                self._node.look_up(cell, lookup)

    # ---- what the node says

    def tell(self, cell: int, filters: Mapping[bytes, int], whole: bool) -> None:
        self._told += 1
        told = json.dumps({name.decode(): count for name, count in filters.items()})
        self._say(bridge_frames.INTEREST, struct.pack(">IHB", self._told, cell, whole) + told.encode())

    def when_known(self, known: Callable[[], None]) -> None:
        """Call back when the peer has heard all that was told so far."""
        if self._ended or (self.is_open and self._known == self._told):
            known()
        else:
            self._listeners.append((self._told, known))

    def publish(self, goals: list[Goal], message: Publish, spread: Spread | None) -> None:
        number = mark = 0
        if spread is not None:
            mark = spread.mark
            number = self._last = self._last % 0xFFFF_FFFF + 1
            self._publishes[number] = (goals, spread)
            spread.wait()
            self._node.sweep_later()
        body = struct.pack(">IQ", number, mark) + bridge_frames.write_goals(goals)
        body += bridge_frames.write_message(message, self._node.now())
        origin = spread.origin if spread is not None else None
        if origin is None:
            self._say(bridge_frames.PUBLISH, body)
        else:
            head = struct.pack(">HQQQ", origin.cell, origin.session, origin.mark, origin.lowest)
            self._say(bridge_frames.ONCE, head + body)

    def expire(self, now: float) -> bool:
        """Give up what the peer has not answered in time, and return whether something still waits.
        An answer that comes later is ignored."""
        late = [number for number, (_, spread) in self._publishes.items() if spread.until <= now]
        for number in late:
            _, spread = self._publishes.pop(number)
            spread.finish(0, UNREACHABLE)
        return bool(self._publishes)

    def look_up(self, cells: list[int], lookup: Lookup) -> None:
        number = self._last = self._last % 0xFFFF_FFFF + 1
        self._lookups[number] = (cells, lookup)
        goals: list[Goal] = [(cell, []) for cell in cells]
        self._say(bridge_frames.LOOKUP, struct.pack(">I", number) + bridge_frames.write_goals(goals) + lookup.topic_filter)

    # ---- what the peer answers

    def _hear_known(self, number: int) -> None:
        self._known = number
        ready = [known for told, known in self._listeners if told <= number]
        self._listeners = [one for one in self._listeners if one[0] > number]
        for known in ready:
            known()

    def _hear_answer(self, body: bytes) -> None:
        number, taken = bridge_frames.unpack(">II", body)
        gone, at = _read_goals(self._node, body, 8, True)
        _, spread = self._publishes.pop(number, ([], None))
        if spread is not None:
            for goal in gone:
                self._node.send_again(goal, spread)
            spread.finish(taken, body[at:].decode(errors="replace"))
        self._heard += 1
        if self._heard % HEARD_EVERY == 0:
            self._say(bridge_frames.HEARD, struct.pack(">I", self._heard))

    def _hear_found(self, body: bytes) -> None:
        (number,) = bridge_frames.unpack(">I", body)
        gone, at = _read_goals(self._node, body, 4)
        messages = bridge_frames.read_messages(body, at, self._node.now())
        cells, lookup = self._lookups.pop(number, ([], None))
        if lookup is not None:
            for cell, _ in gone:
                self._node.look_up(cell, lookup)
            lookup.add(messages, len(cells) - len(gone))


def _read_goals(node: Node, body: bytes, at: int, with_any: bool = False) -> tuple[list[Goal], int]:
    goals, end = bridge_frames.read_goals(body, at)
    for cell, _ in goals:
        if cell >= node.cells and not (with_any and cell == bridge_frames.ANY_CELL):
            raise FrameBroken(f"there is no cell {cell}")
    return goals, end


def _read_origin(body: bytes) -> Origin:
    cell, session, mark, lowest = bridge_frames.unpack(">HQQQ", body)
    if session > LARGEST_NUMBER or max(mark, lowest) > LARGEST_NUMBER >> KEY_BITS:
        raise FrameBroken("the number of a session or of a mark cannot be stored")
    return Origin(cell, session, mark, lowest)


class BridgeEnd:
    """From one other node."""

    def __init__(self, node: Node, memory: Memory) -> None:
        self._node = node
        self._memory = memory
        self._line = memory.new_line(node.now())
        self._transport: LineTransport | None = None
        self._frames = Frames()
        self._out: list[bytes] = []
        self._unheard: deque[list[int]] = deque()  # what our answers were about, in their order
        self._heard = 0

    def connection_made(self, transport: LineTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        node = self._node
        for kind, body in self._frames.feed(data):
            if kind == bridge_frames.PUBLISH:
                self._take(body, None)
            elif kind == bridge_frames.ONCE:
                self._take(body[26:], _read_origin(body))
            elif kind == bridge_frames.INTEREST:
                number, cell, whole = bridge_frames.unpack(">IHB", body)
                node.hear_interest(cell, bridge_frames.read_filters(body, 7), bool(whole))
                self._say(bridge_frames.KNOWN, struct.pack(">I", number))
            elif kind == bridge_frames.LOOKUP:
                self._look_up(body)
            elif kind == bridge_frames.HEARD:
                self._forget(bridge_frames.unpack(">I", body)[0])

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None:
        self._transport = None
        self._memory.line_broke(self._line, self._node.now())

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...

    def _say(self, kind: int, body: bytes) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(frame(kind, body))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.write(b"".join(out))

    def _take(self, body: bytes, origin: Origin | None) -> None:
        node = self._node
        number, mark = bridge_frames.unpack(">IQ", body)
        goals, at = _read_goals(node, body, 12)
        message = bridge_frames.read_message(body, at, node.now())
        if number == 0:
            for cell, shares in goals:
                here = node.local.get(cell)
                if here is not None:
                    here.take(message, shares, None)
            return
        gone: list[Goal] = []
        keys: list[int] = []
        answer = Spread(message, partial(self._answer, number, gone, keys))
        for cell, shares in goals:
            here = node.local.get(cell)
            if here is None:
                gone.append((cell, shares))
            else:
                key = key_of(mark, cell)
                keys.append(key)
                taken = self._memory.find(key, cell, self._line)
                taken.give(here, shares, message, origin)
                taken.tell(answer, gone)
        answer.finish(0)

    def _answer(self, number: int, gone: list[Goal], keys: list[int], taken: int, fault: str) -> None:
        body = struct.pack(">II", number, taken) + bridge_frames.write_goals(gone) + fault.encode()
        self._say(bridge_frames.ANSWER, body)
        self._unheard.append(keys)

    def _forget(self, heard: int) -> None:
        while self._heard < heard and self._unheard:
            self._heard += 1
            for key in self._unheard.popleft():
                self._memory.forget(key)

    def _look_up(self, body: bytes) -> None:
        node = self._node
        (number,) = bridge_frames.unpack(">I", body)
        goals, at = _read_goals(node, body, 4)
        seeker = RemoteSeeker(self, number, len(goals))
        for cell, _ in goals:
            here = node.local.get(cell)
            if here is None:
                seeker.is_over(cell, True)
            else:
                node.searches.begin(here, body[at:], seeker)
        seeker.answer_if_over()

    def is_open(self) -> bool:
        return self._transport is not None

    def answer_lookup(self, number: int, gone: list[Goal], found: list[Publish]) -> None:
        now = self._node.now()
        messages = b"".join([bridge_frames.write_message(one, now) for one in found])
        self._say(bridge_frames.FOUND, struct.pack(">I", number) + bridge_frames.write_goals(gone) + messages)


class RemoteSeeker(Seeker):
    """A lookup of another node: it is answered in one frame, when all of its cells have been searched."""

    def __init__(self, end: BridgeEnd, number: int, cells: int) -> None:
        self._end = end
        self._number = number
        self._left = cells
        self._gone: list[Goal] = []
        self._found: list[Publish] = []
        self._answered = False

    def is_waiting(self) -> bool:
        return self._end.is_open()

    def found(self, messages: list[Publish]) -> None:
        self._found += messages

    def is_over(self, cell: int, moved: bool) -> None:
        if moved:
            self._gone.append((cell, []))
        self._left -= 1
        self.answer_if_over()

    def answer_if_over(self) -> None:
        if self._left == 0 and not self._answered:
            self._answered = True
            self._end.answer_lookup(self._number, self._gone, self._found)
