"""This node's view of the cluster: its cells, the bridges to other nodes, routing of publishes.

It learns owners from `owner_of` alone; `Cells`, which watches the coordinator, reports changes.
Invariant: a request for a cell without a reachable owner is parked. It is sent when an owner
appears, or refused at its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Protocol

from sluice.broker.net import connect_in_memory
from sluice.broker.ports import ConnectionPort
from sluice.clock import steady_time
from sluice.cluster.cell import Cell
from sluice.cluster.plain.bridge import BRIDGE_GREETING as BRIDGE
from sluice.cluster.plain.bridge import Bridge, BridgeReceiver
from sluice.cluster.plain.bridge_frames import (
    ANY_CELL,
    SHARES_ONLY,
    CellTarget,
    read_messages,
    write_message,
)
from sluice.cluster.plain.fanout import (
    ABANDONED,
    MAX_SWEEP_SECONDS,
    UNREACHABLE,
    Fanout,
    ParkedRequest,
    RetainedLookup,
)
from sluice.cluster.plain.interest import Interest, pick_cell
from sluice.cluster.plain.node_inbox import NodeInbox
from sluice.cluster.plain.retained_search import RetainedSearches, SearchListener
from sluice.cluster.transport import NoOwner, StreamProtocol, accept_stream, is_known_greeting
from sluice.wire.packets import Publish

log = logging.getLogger(__name__)

DEFAULT_ANSWER_SECONDS: Final = 10.0  # the default of `cluster.publish_timeout`


class NodeDialer(Protocol):
    """Opens streams to other nodes."""

    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None: ...
    def dial_node(self, node: str, greeting: bytes, protocol: StreamProtocol) -> None: ...


class Node:
    """One node. `answer_seconds` bounds how long a request waits for another cell's answer."""

    def __init__(
        self,
        cells: int,
        owner_of: Callable[[int], str | None],
        dialer: NodeDialer,
        answer_seconds: float = DEFAULT_ANSWER_SECONDS,
    ) -> None:
        self.cells = cells
        self.answer_seconds = answer_seconds
        self.owner_of = owner_of
        self.dialer = dialer
        self.local_cells: dict[int, Cell] = {}  # cells that are open here
        self.interest = Interest(cells)
        self._bridges: dict[str, Bridge] = {}
        self._inboxes: dict[str, NodeInbox] = {}  # by node id: publishes received from that node
        self._last_dedup_id = 0
        self._parked: list[ParkedRequest] = []
        # Cells with parked publishes. Later publishes are parked too, to keep the order.
        self._blocked_cells: set[int] = set()
        self._is_sweep_scheduled = False
        self._throttled_connections: list[ConnectionPort] = []
        self.searches = RetainedSearches()

    def now(self) -> float:
        return steady_time()

    def warn(self, text: str) -> None:
        log.warning(text)

    # ---- membership changes

    def on_cell_opened(self, cell: Cell) -> None:
        """Register a cell that opened here and announce its interest."""
        self.local_cells[cell.number] = cell
        cell.is_closed = False
        self.interest.replace_table(cell.number, cell.filters)
        for bridge in self._bridges.values():
            bridge.send_interest(cell.number, cell.filters, True)
        self.retry_parked()

    def on_cell_closed(self, cell: int) -> None:
        """Accept no more streams for a cell.

        Its interest stays in force until its next owner announces another. Its unanswered
        publishes fail later, in `Cell.mark_lost`, when it can commit nothing more.
        """
        closed = self.local_cells.pop(cell, None)
        if closed is not None:
            closed.is_closed = True

    def set_peers(self, peers: Iterable[str]) -> None:
        """Set the ids of all other live nodes."""
        current = set(peers)
        for peer in [one for one in self._bridges if one not in current]:
            self._bridges.pop(peer).end()
        self._inboxes = {peer: one for peer, one in self._inboxes.items() if peer in current}
        for peer in current:
            if peer not in self._bridges:
                self._bridges[peer] = Bridge(self, peer)
        self.retry_parked()

    def interest_tables(self) -> list[tuple[int, dict[bytes, int]]]:
        return [(number, cell.filters) for number, cell in self.local_cells.items()]

    # ---- streams

    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None:
        """Open a stream to a cell, local or remote."""
        here = self.local_cells.get(cell)
        if here is not None:
            acceptor = accept_stream(here.broker.connect(), greeting)
            connect_in_memory(protocol, acceptor, asyncio.get_running_loop().call_soon)
        elif self.owner_of(cell) is None:
            asyncio.get_running_loop().call_soon(protocol.connection_lost, NoOwner(cell))
        else:
            self.dialer.dial(cell, greeting, protocol)

    def accept(self, cell: int, greeting: bytes, peer: str = "") -> StreamProtocol | None:
        """Accept a stream to this node or one of its cells; return None if the cell is not here."""
        if greeting == BRIDGE:
            return BridgeReceiver(self, self._inboxes.setdefault(peer, NodeInbox()))
        here = self.local_cells.get(cell)
        if here is None or not is_known_greeting(greeting):
            return None
        return accept_stream(here.broker.connect(), greeting)

    # ---- interest

    def broadcast_interest(self, cell: Cell, changes: Mapping[bytes, int]) -> None:
        # A cell that is not registered yet announces its whole table when it opens.
        if self.local_cells.get(cell.number) is cell:
            self.interest.apply_changes(cell.number, changes)
            for bridge in self._bridges.values():
                bridge.send_interest(cell.number, changes, False)

    def receive_interest(
        self, cell: int, filters: Mapping[bytes, int], is_full_table: bool
    ) -> None:
        if cell in self.local_cells or cell >= self.cells:
            return  # the cell has moved here meanwhile
        if is_full_table:
            self.interest.replace_table(cell, filters)
            self.retry_parked()  # a full table means that the cell is open there
        else:
            self.interest.apply_changes(cell, filters)

    def after_interest_known(
        self, on_known: Callable[[], None], on_timeout: Callable[[], None]
    ) -> None:
        """Call `on_known` when every live node has our filters, or `on_timeout` if that is late."""
        waiting = Countdown(len(self._bridges) + 1, on_known)
        for bridge in list(self._bridges.values()):
            bridge.after_interest_known(waiting.count_down)
        waiting.count_down()
        if not waiting.is_done:
            asyncio.get_running_loop().call_later(self.answer_seconds, waiting.give_up, on_timeout)

    # ---- publishes

    def new_fanout(self, message: Publish, on_done: Callable[[int, str], None]) -> Fanout:
        """Return a fan-out for a publish of this node.

        If a cell moves before it has committed the message, the fan-out goes to its next owner.
        """
        fanout = Fanout(message, on_done)
        self._last_dedup_id += 1
        fanout.dedup_id = self._last_dedup_id
        fanout.deadline = self.now() + self.answer_seconds
        fanout.on_lost = lambda cell: self.reroute((cell, []), fanout)
        return fanout

    def fan_out(
        self, targets: Mapping[int, list[bytes]], message: Publish, fanout: Fanout | None
    ) -> None:
        """Send a message to cells, with the shares that each cell chooses a member for."""
        by_bridge: dict[Bridge, list[CellTarget]] = {}
        for cell, shares in targets.items():
            bridge = self._bridge_to(cell)
            if fanout is not None and cell in self._blocked_cells and cell not in self.local_cells:
                fanout.expect_answer()
                self._park(ParkedRequest((cell, shares), fanout, fanout.deadline))
            elif bridge is None:
                self.send_to_cell((cell, shares), message, fanout)
            else:
                by_bridge.setdefault(bridge, []).append((cell, shares))
        for bridge, some in by_bridge.items():
            bridge.publish(some, message, fanout)

    def _bridge_to(self, cell: int) -> Bridge | None:
        """Return the open bridge to a cell's owner; None if the cell is local or unreachable."""
        if cell in self.local_cells:
            return None
        bridge = self._bridges.get(self.owner_of(cell) or "")
        return bridge if bridge is not None and bridge.is_open else None

    def send_to_cell(self, target: CellTarget, message: Publish, fanout: Fanout | None) -> None:
        cell, shares = target
        here = self.local_cells.get(cell)
        bridge = self._bridge_to(cell)
        if here is not None:
            for name in here.deliver(message, shares, fanout):
                self.forward_shared(name, message, fanout, {cell})
        elif bridge is not None:
            bridge.publish([target], message, fanout)
        elif fanout is not None:
            fanout.expect_answer()
            self._park(ParkedRequest(target, fanout, fanout.deadline))

    def resend(self, target: CellTarget, fanout: Fanout) -> None:
        """Send an unanswered publish again, unless it must not take effect any more."""
        if not self._is_resend_forbidden(fanout):
            self.send_to_cell(target, fanout.message, fanout)

    def _is_resend_forbidden(self, fanout: Fanout) -> bool:
        """Return whether a publish must not be sent a second time.

        An unanswered publish whose publisher has disconnected is dropped: the publisher may have
        written newer values elsewhere. A publish that is older than a retained message of the
        same cell goes to subscribers only and does not replace the retained message.
        """
        source = fanout.source
        if source is None:
            return False
        if source.is_abandoned(fanout):
            fanout.fault = fanout.fault or ABANDONED
            return True
        if fanout.message.retain and source.is_superseded(fanout):
            fanout.message = without_retain(fanout.message, self.now())
        return False

    def reroute(self, target: CellTarget, fanout: Fanout) -> None:
        """Route a publish again after its cell has moved or its share has lost its members."""
        if self._is_resend_forbidden(fanout):
            return
        cell, shares = target
        if cell == ANY_CELL:
            for name in shares:
                self.forward_shared(name, fanout.message, fanout, set())
        elif self.owner_of(cell) is None or cell in self.local_cells:
            self.send_to_cell(target, fanout.message, fanout)
        else:
            # The owner or this node does not know of the move yet; retry in a moment.
            fanout.expect_answer()
            self._park(ParkedRequest(target, fanout, fanout.deadline))
            asyncio.get_running_loop().call_later(0.05, self.retry_parked)

    def forward_shared(
        self, name: bytes, message: Publish, fanout: Fanout | None, tried_cells: set[int]
    ) -> None:
        """Send a shared message to another cell that has members, if there is one."""
        members = self.interest.match(message.topic).shares.get(name, {})
        others = {cell: count for cell, count in members.items() if cell not in tried_cells}
        if others:
            cell = pick_cell(others)
            here = self.local_cells.get(cell)
            if here is None:
                self.send_share(cell, name, message, fanout)
            elif here.deliver(message, [SHARES_ONLY, name], fanout):
                self.forward_shared(name, message, fanout, tried_cells | {cell})

    def send_share(self, cell: int, name: bytes, message: Publish, fanout: Fanout | None) -> None:
        bridge = self._bridge_to(cell)
        if bridge is not None:
            bridge.publish([(cell, [SHARES_ONLY, name])], message, fanout)

    def send_will(self, cell: int, will: Publish) -> None:
        """Send a will to a queue of another cell.

        No client waits for it, so failures are logged.
        """
        fanout = self.new_fanout(will, partial(self._on_will_done, will.topic))
        self.send_to_cell((cell, []), will, fanout)
        fanout.add_answer(0)

    def _on_will_done(self, topic: bytes, receivers: int, fault: str) -> None:
        if fault:
            self.warn(f"will for {topic.decode()} not stored: {fault}")

    def _park(self, parked: ParkedRequest) -> None:
        self._parked.append(parked)
        if isinstance(parked.request, Fanout):
            self._blocked_cells.add(parked.target[0])
        self.schedule_sweep()

    def retry_parked(self) -> None:
        """Send parked requests whose cell is reachable now."""
        parked, self._parked = self._parked, []
        parked.sort(key=_send_order)
        self._blocked_cells.clear()
        for one in parked:
            cell = one.target[0]
            if cell not in self.local_cells and self._bridge_to(cell) is None:
                self._park(one)
            elif isinstance(one.request, Fanout):
                self.resend(one.target, one.request)
                one.request.add_answer(0)
            else:
                one.request.park(-1)
                self.look_up(cell, one.request)

    def schedule_sweep(self) -> None:
        """Schedule a check of the deadlines of parked and unanswered requests."""
        if not self._is_sweep_scheduled:
            self._is_sweep_scheduled = True
            seconds = min(MAX_SWEEP_SECONDS, self.answer_seconds / 4)
            asyncio.get_running_loop().call_later(seconds, self._expire_parked)

    def _expire_parked(self) -> None:
        """Refuse parked requests that are past their deadline.

        A retained lookup has no deadline: it continues when its cell has an owner again, as long
        as the subscription exists.
        """
        self._is_sweep_scheduled = False
        now = self.now()
        parked, self._parked = self._parked, []
        self._blocked_cells.clear()
        for one in parked:
            request = one.request
            if isinstance(request, RetainedLookup):
                if request.is_wanted():
                    self._park(one)
                else:
                    request.park(-1)
                    request.add_answer([])
            elif one.deadline > now:
                self._park(one)
            else:
                request.add_answer(0, UNREACHABLE)
        for bridge in list(self._bridges.values()):
            if bridge.expire_publishes(now):
                self.schedule_sweep()
        if any(self._bridge_to(cell) is not None for cell in self._blocked_cells):
            self.retry_parked()

    # ---- retained messages

    def look_up_all(self, cells: list[int], lookup: RetainedLookup) -> None:
        by_bridge: dict[Bridge, list[int]] = {}
        for cell in cells:
            bridge = self._bridge_to(cell)
            if bridge is None:
                self.look_up(cell, lookup)
            else:
                by_bridge.setdefault(bridge, []).append(cell)
        for bridge, some in by_bridge.items():
            bridge.look_up(some, lookup)

    def look_up(self, cell: int, lookup: RetainedLookup) -> None:
        here = self.local_cells.get(cell)
        bridge = self._bridge_to(cell)
        if here is not None:
            self.searches.start(here, lookup.topic_filter, LocalSearchListener(self, lookup))
        elif bridge is not None:
            bridge.look_up([cell], lookup)
        else:
            self._park(ParkedRequest((cell, []), lookup, 0.0))
            lookup.park(1)

    # ---- backpressure

    def throttle_if_congested(self, connection: ConnectionPort) -> None:
        """Throttle a publisher while a bridge's peer reads too slowly."""
        if (
            any(bridge.is_write_paused for bridge in self._bridges.values())
            and connection.throttle()
        ):
            self._throttled_connections.append(connection)

    def unthrottle_connections(self) -> None:
        throttled, self._throttled_connections = self._throttled_connections, []
        for connection in throttled:
            connection.unthrottle()


class LocalSearchListener(SearchListener):
    """Feeds a search of a local cell into a lookup of this node."""

    def __init__(self, node: Node, lookup: RetainedLookup) -> None:
        self._node = node
        self._lookup = lookup

    def is_wanted(self) -> bool:
        return self._lookup.is_wanted()

    def on_found(self, messages: list[Publish]) -> None:
        self._lookup.add_answer(messages, 0)

    def on_done(self, cell: int, has_moved: bool) -> None:
        if has_moved:
            self._node.look_up(cell, self._lookup)
        else:
            self._lookup.add_answer([])


class Countdown:
    """Calls `on_done` after `count` calls of `count_down`."""

    def __init__(self, count: int, on_done: Callable[[], None]) -> None:
        self._count = count
        self._on_done = on_done

    @property
    def is_done(self) -> bool:
        return self._count == 0

    def count_down(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._on_done()

    def give_up(self, on_timeout: Callable[[], None]) -> None:
        if self._count > 0:
            on_timeout()


def without_retain(message: Publish, now: float) -> Publish:
    """Return a copy of a message that subscribers receive and that is not retained."""
    copy = read_messages(write_message(message, now), 0, now)[0]
    copy.retain = False
    return copy


def _send_order(parked: ParkedRequest) -> int:
    """Return a sort key: retained lookups first, then publishes in order of arrival."""
    return parked.request.dedup_id if isinstance(parked.request, Fanout) else 0
