"""This node among the others: its cells, the lines to theirs, and where plain messages go.

It knows who owns what from `owner_of` alone; whoever follows the coordinator (`cells`) tells it when that has changed.
What is for a cell that nobody answers for is parked until somebody does, for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Protocol

from sluice.broker.net.connection import Connection
from sluice.clock import steady_time
from sluice.cluster.plain.bridge import GREETING as BRIDGE
from sluice.cluster.plain.bridge import Bridge, BridgeEnd
from sluice.cluster.cell import Cell
from sluice.cluster.plain.bridge_frames import ALONE, ANY_CELL, Goal, read_messages, write_message
from sluice.cluster.ingress.stream_acceptor import guest, is_known
from sluice.cluster.plain.interest import Interest, pick
from sluice.cluster.transport.streams import LineProtocol, NoOwner
from sluice.cluster.transport.local_stream import join
from sluice.cluster.plain.retained_search import Searches, Seeker
from sluice.cluster.plain.fanout import ABANDONED, LONGEST_SWEEP, UNREACHABLE, Lookup, Parked, Spread
from sluice.cluster.plain.node_inbox import Memory
from sluice.wire.packets import Publish

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 10.0  # as `cluster.publish_timeout` unless it is set


class NodeLines(Protocol):
    """The way to other nodes."""

    def dial(self, cell: int, greeting: bytes, protocol: LineProtocol) -> None: ...
    def dial_node(self, node: str, greeting: bytes, protocol: LineProtocol) -> None: ...


class Node:
    """`answer_seconds` bounds what a publish, a settlement or a subscription waits for another cell."""

    def __init__(
        self,
        cells: int,
        owner_of: Callable[[int], str | None],
        lines: NodeLines,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.cells = cells
        self.answer_seconds = answer_seconds
        self.owner_of = owner_of
        self.lines = lines
        self.local: dict[int, Cell] = {}  # those that are open here
        self.interest = Interest(cells)
        self._bridges: dict[str, Bridge] = {}
        self._memories: dict[str, Memory] = {}  # by the id of another node: what we have of it
        self._last_mark = 0
        self._parked: list[Parked] = []
        self._blocked: set[int] = set()  # cells with parked publishes: later ones wait behind them
        self._sweeping = False
        self._held: list[Connection] = []
        self.searches = Searches()

    def now(self) -> float:
        return steady_time()

    def warn(self, text: str) -> None:
        log.warning(text)

    # ---- cells and nodes come and go

    def opened(self, cell: Cell) -> None:
        """A cell is open here: lines may be opened to it."""
        self.local[cell.number] = cell
        cell.is_closed = False
        self.interest.replace(cell.number, cell.filters)
        for bridge in self._bridges.values():
            bridge.tell(cell.number, cell.filters, True)
        self.retry()

    def closed(self, cell: int) -> None:
        """Nobody is let in to it any more. What it was interested in is so until its next owner says otherwise; what it
        owes is lost (`Cell.lose`) when it can keep nothing more."""
        closed = self.local.pop(cell, None)
        if closed is not None:
            closed.is_closed = True

    def peers_changed(self, peers: Iterable[str]) -> None:
        """The ids of all other nodes that live."""
        wanted = set(peers)
        for peer in [one for one in self._bridges if one not in wanted]:
            self._bridges.pop(peer).end()
        self._memories = {peer: one for peer, one in self._memories.items() if peer in wanted}
        for peer in wanted:
            if peer not in self._bridges:
                self._bridges[peer] = Bridge(self, peer)
        self.retry()

    def tables(self) -> list[tuple[int, dict[bytes, int]]]:
        return [(number, cell.filters) for number, cell in self.local.items()]

    # ---- lines

    def dial(self, cell: int, greeting: bytes, protocol: LineProtocol) -> None:
        """Open a line to a cell, wherever it is."""
        here = self.local.get(cell)
        if here is not None:
            join(protocol, guest(here.broker.connect(), greeting))
        elif self.owner_of(cell) is None:
            asyncio.get_running_loop().call_soon(protocol.connection_lost, NoOwner(cell))
        else:
            self.lines.dial(cell, greeting, protocol)

    def accept(self, cell: int, greeting: bytes, peer: str = "") -> LineProtocol | None:
        """Somebody opens a line to this node, or to a cell of it; None: it is not here."""
        if greeting == BRIDGE:
            return BridgeEnd(self, self._memories.setdefault(peer, Memory()))
        here = self.local.get(cell)
        if here is None or not is_known(greeting):
            return None
        return guest(here.broker.connect(), greeting)

    # ---- interest

    def tell(self, cell: Cell, changes: Mapping[bytes, int]) -> None:
        if self.local.get(cell.number) is cell:  # else it is told whole, once it is open
            self.interest.change(cell.number, changes)
            for bridge in self._bridges.values():
                bridge.tell(cell.number, changes, False)

    def hear_interest(self, cell: int, filters: Mapping[bytes, int], whole: bool) -> None:
        if cell in self.local or cell >= self.cells:
            return  # it has moved here meanwhile
        if whole:
            self.interest.replace(cell, filters)
            self.retry()  # it is open there
        else:
            self.interest.change(cell, filters)

    def when_known(self, known: Callable[[], None], late: Callable[[], None]) -> None:
        """Call `known` when every node that lives has heard of all our filters, or `late` if that
        takes too long."""
        waiting = Countdown(len(self._bridges) + 1, known)
        for bridge in list(self._bridges.values()):
            bridge.when_known(waiting.one)
        waiting.one()
        if not waiting.is_over:
            asyncio.get_running_loop().call_later(self.answer_seconds, waiting.give_up, late)

    # ---- publishes

    def new_spread(self, message: Publish, done: Callable[[int, str], None]) -> Spread:
        """A publish of this node, on its way. Where a cell moves before it has kept it, the next owner is asked."""
        spread = Spread(message, done)
        self._last_mark += 1
        spread.mark = self._last_mark
        spread.until = self.now() + self.answer_seconds
        spread.lost = lambda cell: self.send_again((cell, []), spread)
        return spread

    def spread(self, goals: Mapping[int, list[bytes]], message: Publish, spread: Spread | None) -> None:
        """Send a message to cells, with the shared subscriptions that each is to choose a member for."""
        by_bridge: dict[Bridge, list[Goal]] = {}
        for cell, shares in goals.items():
            bridge = self._bridge_to(cell)
            if spread is not None and cell in self._blocked and cell not in self.local:
                spread.wait()
                self._park(Parked((cell, shares), spread, spread.until))
            elif bridge is None:
                self.send((cell, shares), message, spread)
            else:
                by_bridge.setdefault(bridge, []).append((cell, shares))
        for bridge, some in by_bridge.items():
            bridge.publish(some, message, spread)

    def _bridge_to(self, cell: int) -> Bridge | None:
        """None: the cell is here, or nobody can be asked for it."""
        if cell in self.local:
            return None
        bridge = self._bridges.get(self.owner_of(cell) or "")
        return bridge if bridge is not None and bridge.is_open else None

    def send(self, goal: Goal, message: Publish, spread: Spread | None) -> None:
        cell, shares = goal
        here = self.local.get(cell)
        bridge = self._bridge_to(cell)
        if here is not None:
            for name in here.take(message, shares, spread):
                self.hand_on(name, message, spread, {cell})
        elif bridge is not None:
            bridge.publish([goal], message, spread)
        elif spread is not None:
            spread.wait()
            self._park(Parked(goal, spread, spread.until))

    def resend(self, goal: Goal, spread: Spread) -> None:
        """Send what was not answered, unless it must not take effect any more."""
        if not self._is_over(spread):
            self.send(goal, spread.message, spread)

    def _is_over(self, spread: Spread) -> bool:
        """Return whether a publish must not be sent a second time.

        One whose publisher is gone was never answered and is dropped: its publisher may have written
        newer values elsewhere. One that is older than a retained message of the same cell goes to
        subscribers, and leaves the retained message as it is.
        """
        source = spread.source
        if source is None:
            return False
        if source.is_abandoned(spread):
            spread.fault = spread.fault or ABANDONED
            return True
        if spread.message.retain and source.is_superseded(spread):
            spread.message = unretained(spread.message, self.now())
        return False

    def send_again(self, goal: Goal, spread: Spread) -> None:
        """It was not where it was sent: a cell has moved, or the members of shared subscriptions have gone."""
        if self._is_over(spread):
            return
        cell, shares = goal
        if cell == ANY_CELL:
            for name in shares:
                self.hand_on(name, spread.message, spread, set())
        elif self.owner_of(cell) is None or cell in self.local:
            self.send(goal, spread.message, spread)
        else:
            spread.wait()  # the owner does not know yet, or we do not: a moment later one of us does
            self._park(Parked(goal, spread, spread.until))
            asyncio.get_running_loop().call_later(0.05, self.retry)

    def hand_on(self, name: bytes, message: Publish, spread: Spread | None, past: set[int]) -> None:
        """A shared subscription of which a cell has no member: another cell may have one."""
        members = self.interest.match(message.topic).shares.get(name, {})
        others = {cell: count for cell, count in members.items() if cell not in past}
        if others:
            cell = pick(others)
            here = self.local.get(cell)
            if here is None:
                self.send_share(cell, name, message, spread)
            elif here.take(message, [ALONE, name], spread):
                self.hand_on(name, message, spread, past | {cell})

    def send_share(self, cell: int, name: bytes, message: Publish, spread: Spread | None) -> None:
        bridge = self._bridge_to(cell)
        if bridge is not None:
            bridge.publish([(cell, [ALONE, name])], message, spread)

    def post_will(self, cell: int, will: Publish) -> None:
        """A will for a queue of another cell. Nobody waits to hear of it, so the log does."""
        spread = self.new_spread(will, partial(self._will_is_over, will.topic))
        self.send((cell, []), will, spread)
        spread.finish(0)

    def _will_is_over(self, topic: bytes, taken: int, fault: str) -> None:
        if fault:
            self.warn(f"a will for {topic.decode()} was not kept: {fault}")

    def _park(self, parked: Parked) -> None:
        self._parked.append(parked)
        if isinstance(parked.what, Spread):
            self._blocked.add(parked.goal[0])
        self.sweep_later()

    def retry(self) -> None:
        """Cells or nodes have come: perhaps somebody answers for what is parked."""
        parked, self._parked = self._parked, []
        parked.sort(key=_in_order)
        self._blocked.clear()
        for one in parked:
            cell = one.goal[0]
            if cell not in self.local and self._bridge_to(cell) is None:
                self._park(one)
            elif isinstance(one.what, Spread):
                self.resend(one.goal, one.what)
                one.what.finish(0)
            else:
                one.what.park(-1)
                self.look_up(cell, one.what)

    def sweep_later(self) -> None:
        """Something waits for other nodes: see in a moment that it does not wait too long."""
        if not self._sweeping:
            self._sweeping = True
            seconds = min(LONGEST_SWEEP, self.answer_seconds / 4)
            asyncio.get_running_loop().call_later(seconds, self._sweep)

    def _sweep(self) -> None:
        """Refuse what has waited too long. A lookup of retained messages has no bound: they arrive when
        their cell has an owner again, as long as the subscription exists."""
        self._sweeping = False
        now = self.now()
        parked, self._parked = self._parked, []
        self._blocked.clear()
        for one in parked:
            what = one.what
            if isinstance(what, Lookup):
                if what.wanted is None or what.wanted():
                    self._park(one)
                else:
                    what.park(-1)
                    what.add([])
            elif one.until > now:
                self._park(one)
            else:
                what.finish(0, UNREACHABLE)
        for bridge in list(self._bridges.values()):
            if bridge.expire(now):
                self.sweep_later()
        if any(self._bridge_to(cell) is not None for cell in self._blocked):
            self.retry()

    # ---- retained messages

    def look_up_all(self, cells: list[int], lookup: Lookup) -> None:
        by_bridge: dict[Bridge, list[int]] = {}
        for cell in cells:
            bridge = self._bridge_to(cell)
            if bridge is None:
                self.look_up(cell, lookup)
            else:
                by_bridge.setdefault(bridge, []).append(cell)
        for bridge, some in by_bridge.items():
            bridge.look_up(some, lookup)

    def look_up(self, cell: int, lookup: Lookup) -> None:
        here = self.local.get(cell)
        bridge = self._bridge_to(cell)
        if here is not None:
            self.searches.begin(here, lookup.topic_filter, LocalSeeker(self, lookup))
        elif bridge is not None:
            bridge.look_up([cell], lookup)
        else:
            self._park(Parked((cell, []), lookup, 0.0))
            lookup.park(1)

    # ---- slow neighbours

    def hold_back(self, connection: Connection) -> None:
        """Its publishes go to a node that reads slowly: it must not be faster for long."""
        if any(bridge.choked for bridge in self._bridges.values()) and connection.hold():
            self._held.append(connection)

    def unhold(self) -> None:
        held, self._held = self._held, []
        for connection in held:
            connection.unhold()


class LocalSeeker(Seeker):
    """A lookup of this node that searches one of its own cells."""

    def __init__(self, node: Node, lookup: Lookup) -> None:
        self._node = node
        self._lookup = lookup

    def is_waiting(self) -> bool:
        return self._lookup.wanted is None or self._lookup.wanted()

    def found(self, messages: list[Publish]) -> None:
        self._lookup.add(messages, 0)

    def is_over(self, cell: int, moved: bool) -> None:
        if moved:
            self._node.look_up(cell, self._lookup)
        else:
            self._lookup.add([])


class Countdown:
    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._count = count
        self._done = done

    @property
    def is_over(self) -> bool:
        return self._count == 0

    def one(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._done()

    def give_up(self, late: Callable[[], None]) -> None:
        if self._count > 0:
            late()


def unretained(message: Publish, now: float) -> Publish:
    """Return a copy of a message that goes to subscribers alone."""
    copy = read_messages(write_message(message, now), 0, now)[0]
    copy.retain = False
    return copy


def _in_order(parked: Parked) -> int:
    """Publishes in the order in which they came, behind questions for retained messages."""
    return parked.what.mark if isinstance(parked.what, Spread) else 0
