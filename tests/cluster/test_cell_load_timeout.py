"""A node that loads a cell of a dead node too slowly gives it to another node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from sluice.broker.acl import AnonymousAccess
from sluice.broker.limits import Limits
from sluice.broker_host import BrokerHost
from sluice.cluster.cells import Cells
from sluice.cluster.membership import NodeInfo
from sluice.cluster.node import Node
from sluice.config.settings import Settings
from sluice.store.memory import MemoryStore
from sluice.store_opener import CellStore
from tests.cluster.kit import until
from tests.cluster.memory_cluster import log_event

CELLS = 2
LOAD_SECONDS = 0.05


class SharedFacts:
    """What a coordinator stores; every node sees a change at once."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self.claims: dict[int, str] = {}
        self.avoided: dict[int, set[str]] = {}
        self.listeners: list[Callable[[], None]] = []

    def change(self) -> None:
        for listener in self.listeners:
            listener()


class FakeCoordinator:
    expected_names: tuple[str, ...] = ()

    def __init__(self, facts: SharedFacts, node_id: str) -> None:
        self.facts, self.node_id = facts, node_id
        self.nodes, self.claims, self.avoided = facts.nodes, facts.claims, facts.avoided
        self.suspicions: dict[str, set[str]] = {}
        self.may_own = True

    async def claim(self, cell: int, previous: str | None) -> bool:
        if self.claims.get(cell) != previous:
            return False
        self.claims[cell] = self.node_id
        self.facts.change()
        return True

    async def release(self, cell: int) -> None:
        assert self.claims.get(cell) == self.node_id
        del self.claims[cell]
        self.facts.change()

    async def avoid(self, cell: int) -> None:
        self.avoided.setdefault(cell, set()).add(self.node_id)
        self.facts.change()


class SlowHost:
    """A host whose load takes until the test lets it end."""

    def __init__(self, host: BrokerHost, gate: asyncio.Event, is_thread_free: bool) -> None:
        self.host = host
        self.gate = gate
        self.closed: list[bool] = []
        self._is_thread_free = is_thread_free

    @property
    def broker(self) -> Any:
        return self.host.broker

    async def open(self, on_load: Callable[[], None] | None = None) -> None:
        if on_load is not None and self._is_thread_free:
            on_load()
        await self.gate.wait()
        await self.host.open()

    async def flush(self) -> None:
        await self.host.flush()

    async def close(self, keep: bool = True) -> None:
        self.closed.append(keep)
        await self.host.close(keep)


class SlowNode:
    def __init__(self, facts: SharedFacts, name: str, is_thread_free: bool = True) -> None:
        self.gate = asyncio.Event()
        self.hosts: list[SlowHost] = []
        self.take_overs: list[bool] = []
        self._is_thread_free = is_thread_free
        streams: Any = _NoStreams()
        self.coordinator = cast("Any", FakeCoordinator(facts, f"{name}-1"))
        self.cells = Cells(
            Node(CELLS, lambda cell: None, streams), self.coordinator, self._make, LOAD_SECONDS
        )
        self.cells.this_node = facts.nodes[f"{name}-1"] = NodeInfo(f"{name}-1", name, "")
        facts.listeners.append(self.cells.reconcile)

    def _make(self, number: int, take_over: bool, on_failure: Callable[[], None]) -> SlowHost:
        loop = asyncio.get_running_loop()
        host = BrokerHost(
            Settings(store="memory"),
            Limits(),
            AnonymousAccess(True),
            on_failure,
            CellStore(number),
            MemoryStore(loop.call_soon_threadsafe),
            log=log_event,
        )
        self.take_overs.append(take_over)
        self.hosts.append(SlowHost(host, self.gate, self._is_thread_free))
        return self.hosts[-1]

    def open_cells(self) -> list[int]:
        return sorted(self.cells.open_cells)


class _NoStreams:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def claimed_by_a_dead_node() -> SharedFacts:
    facts = SharedFacts()
    facts.claims.update(dict.fromkeys(range(CELLS), "dead-1"))
    return facts


async def test_slow_cell_is_given_back_and_opened_by_another_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = claimed_by_a_dead_node()
    slow, quick = SlowNode(facts, "slow"), SlowNode(facts, "quick")
    quick.gate.set()
    facts.change()
    await until(lambda: quick.open_cells() == [0, 1])
    assert slow.cells.load_timeouts == 1 and slow.open_cells() == []
    assert set(facts.claims.values()) == {"quick-1"}
    assert all(quick.take_overs), "its predecessor may still hold the store"
    assert "cell not loaded in time" in caplog.text
    assert [host.closed for host in slow.hosts] == [[]]  # its thread still runs
    slow.gate.set()
    await until(lambda: slow.hosts[0].closed == [False])
    assert slow.open_cells() == [] and quick.open_cells() == [0, 1]


async def test_last_node_that_is_left_loads_without_limit() -> None:
    facts = claimed_by_a_dead_node()
    one, two = SlowNode(facts, "one"), SlowNode(facts, "two")
    facts.change()
    await until(lambda: len(facts.avoided) == CELLS)
    await asyncio.sleep(3 * LOAD_SECONDS)
    assert one.cells.load_timeouts + two.cells.load_timeouts == CELLS
    one.gate.set()
    two.gate.set()
    await until(lambda: sorted(one.open_cells() + two.open_cells()) == [0, 1])


async def test_only_node_never_gives_a_cell_back() -> None:
    facts = claimed_by_a_dead_node()
    only = SlowNode(facts, "only")
    facts.change()
    await asyncio.sleep(3 * LOAD_SECONDS)
    assert only.cells.load_timeouts == 0 and not facts.avoided
    only.gate.set()
    await until(lambda: only.open_cells() == [0, 1])


async def test_waiting_for_a_free_thread_does_not_count() -> None:
    """A node that takes over many cells loads a few of them at a time."""
    facts = claimed_by_a_dead_node()
    busy, other = SlowNode(facts, "busy", is_thread_free=False), SlowNode(facts, "other")
    other.gate.set()
    facts.change()
    await until(lambda: other.open_cells())
    await asyncio.sleep(3 * LOAD_SECONDS)
    assert busy.cells.load_timeouts == 0
    busy.gate.set()
    await until(lambda: busy.open_cells())
