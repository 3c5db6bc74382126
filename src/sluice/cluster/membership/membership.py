"""A coordinator on any coordination KV: registrations, claims and suspicions.

      cells                         number of cells, fixed for the lifetime of the cluster
      secret                        shared secret of the nodes, unless cluster.secret is set
      nodes/<id>                    NodeInfo, under the node's lease
      claims/<cell>                 id of the node that owns the cell; outlives the node
      suspicions/<id>/<id>          suspected node, reporting node; under the reporter's lease
      avoided/<cell>/<id>           node that could not load the cell in time; under its lease
      counters/<id>                 counters of a process for $SYS, under its lease

Invariant: a node may own cells for the length of its lease, counted from when it *sent* the
renewal. The KV counts from when it received the renewal, so it never ends a lease before the node
has stopped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from sluice.cluster.membership.coordinator import CoordinatorError, NodeInfo, decode_node
from sluice.cluster.membership.kv import Change, CoordinationKv, CoordinatorUnavailable, Lease

log = logging.getLogger(__name__)

Key = TypeVar("Key", int, str)

RETRY_SECONDS: Final = 0.1  # between attempts to renew a lease
READ_BACK_SECONDS: Final = 5.0  # how long we wait to see our own writes


class Membership:
    """A `Coordinator` on a `CoordinationKv`."""

    def __init__(
        self,
        kv: CoordinationKv,
        cells: int,
        lease_seconds: float,
        expected_names: tuple[str, ...] = (),
    ) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self.claims: dict[int, str] = {}
        self.suspicions: dict[str, set[str]] = {}
        self.avoided: dict[int, set[str]] = {}
        self.expected_names = expected_names
        self.counters: dict[str, dict[str, int]] = {}  # by node id, as nodes share them
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._kv = kv
        self._cells = cells
        self._lease_seconds = lease_seconds
        self._this_node: NodeInfo | None = None
        self._lease: Lease | None = None
        self._is_registered = False  # as far as we know
        self._is_watching = False
        self._may_own_until = 0.0  # by the loop's clock
        self._keepalive_task: asyncio.Task[None] | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def may_own(self) -> bool:
        return self._is_registered and asyncio.get_running_loop().time() < self._may_own_until

    @property
    def node_id(self) -> str:
        """Return the id under which this node has joined last, or an empty string."""
        return self._this_node.id if self._this_node is not None else ""

    # ---- joining and leaving

    async def shared_secret(self) -> str:
        made = secrets.token_hex(32).encode()
        return (await self._kv.compare_and_swap("secret", None, made) or made).decode()

    async def start(self, this_node: NodeInfo) -> None:
        loop = asyncio.get_running_loop()
        self._this_node = this_node
        agreed = await self._kv.compare_and_swap("cells", None, b"%d" % self._cells)
        if agreed != b"%d" % self._cells:
            raise CoordinatorError(
                f"this cluster has {(agreed or b'?').decode()} cells, "
                f"and cluster.cells is {self._cells} here",
                f"Set cluster.cells = {(agreed or b'?').decode()}, "
                "or another cluster.name for a cluster of its own",
            )
        if not self._is_watching:
            self._is_watching = True
            self._kv.watch(self._load_snapshot, self._apply_changes)
            await self._wait_until(lambda: self._changed.is_set())
        self._check_protocol_version(this_node)
        self._check_secret(this_node)
        await self._acquire_name(this_node)
        asked_at = loop.time()
        lease = await self._kv.grant(self._lease_seconds)
        await self._kv.put_with_lease(_node_key(this_node.id), this_node.encode(), lease)
        self._lease = lease
        self._extend_ownership(asked_at)
        await self._wait_until(lambda: this_node.id in self.nodes)
        if this_node.id not in self.nodes:
            with suppress(CoordinatorError):
                # Nothing would renew the lease, and other nodes must not count us as a node.
                await self._kv.revoke(lease)
            raise CoordinatorUnavailable(
                "the coordinator does not return what this node wrote",
                "Check the health of etcd or Redis",
            )
        self._is_registered = True
        self._keepalive_task = loop.create_task(self._keep_lease_alive(lease))

    def _check_protocol_version(self, this_node: NodeInfo) -> None:
        """Refuse to join nodes with another protocol version: they must not share queues."""
        for other in self.nodes.values():
            if other.speaks != this_node.speaks:
                raise CoordinatorError(
                    f"node {other.name!r} uses version {other.speaks} of the protocol between "
                    f"nodes, and this Sluice uses version {this_node.speaks}",
                    "Stop every node, then start all of them with the same version of Sluice: "
                    "no stored data is lost",
                )

    def _check_secret(self, this_node: NodeInfo) -> None:
        """Refuse to start with another secret than the other nodes: no link would come up."""
        for other in self.nodes.values():
            is_earlier_self = other.name == this_node.name and other.link == this_node.link
            if other.key != this_node.key and not is_earlier_self:
                raise CoordinatorError(
                    f"node {other.name!r} has another cluster secret than this one",
                    "Give every node the same cluster.secret (or cluster.secret_file), or none "
                    "at all. To change it, stop every node first",
                )

    async def _acquire_name(self, this_node: NodeInfo) -> None:
        """Wait until no other node has our name.

        A node with our name and our address is our previous run: evict it. Another one may be
        leaving: wait for it as long as a lease can last.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 2 * self._lease_seconds
        while True:
            namesakes = [
                one
                for one in self.nodes.values()
                if one.name == this_node.name and one.id != this_node.id
            ]
            if not namesakes:
                return
            for namesake in namesakes:
                if namesake.link == this_node.link:
                    await self.evict(namesake.id)
            if loop.time() > deadline:
                raise CoordinatorError(
                    f"a node called {this_node.name!r} is in the cluster already, "
                    f"at {namesakes[0].link}",
                    "Give each node a cluster.node of its own",
                )
            await asyncio.sleep(RETRY_SECONDS)

    async def stop(self) -> None:
        lease, self._lease = self._lease, None
        self._deregister()
        if lease is not None:
            with suppress(CoordinatorError):
                await self._kv.revoke(lease)
        await self._kv.close()

    def _deregister(self) -> None:
        self._is_registered = False
        self._changed.set()
        if self._keepalive_task is not None:
            self._keepalive_task.cancel()
            self._keepalive_task = None
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None

    def _lose_membership(self, reason: str) -> None:
        """Give up membership: from here on other nodes may own our cells."""
        if not self._is_registered:
            return
        self._deregister()
        log.error("this node is no longer in the cluster", extra={"why": reason})
        self.on_lost()

    # ---- the lease

    def _extend_ownership(self, asked_at: float) -> None:
        assert self._lease is not None
        self._may_own_until = asked_at + self._lease.seconds
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        loop = asyncio.get_running_loop()
        self._lease_timer = loop.call_at(
            self._may_own_until, self._lose_membership, "its lease was not renewed in time"
        )

    async def _keep_lease_alive(self, lease: Lease) -> None:
        """Renew the lease three times per lifetime, and more often when no answer arrives."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(lease.seconds / 3)
            is_alive = None
            while is_alive is None:
                asked_at = loop.time()
                try:
                    is_alive = await self._kv.keep_alive(lease)
                except CoordinatorError as fault:
                    log.warning("coordinator not reachable", extra={"fault": str(fault)})
                    await asyncio.sleep(RETRY_SECONDS)
            if not is_alive:
                self._lose_membership("its lease has ended")
                return
            self._extend_ownership(asked_at)

    # ---- writing

    async def claim(self, cell: int, previous: str | None) -> bool:
        this_node = self._this_node
        if this_node is None or not self.may_own:
            return False
        old = None if previous is None else previous.encode()
        found = await self._kv.compare_and_swap(
            f"claims/{cell}", old, this_node.id.encode(), _node_key(this_node.id)
        )
        if found != this_node.id.encode():
            return False
        await self._wait_until(
            lambda: self.claims.get(cell) == this_node.id or not self._is_registered
        )
        return self.may_own

    async def release(self, cell: int) -> None:
        this_node = self._this_node
        if this_node is not None and self.claims.get(cell) == this_node.id:
            await self._kv.compare_and_swap(f"claims/{cell}", this_node.id.encode(), None)
            await self._wait_until(lambda: self.claims.get(cell) != this_node.id)

    async def evict(self, node_id: str) -> None:
        await self._kv.revoke_lease_of(_node_key(node_id))
        await self._wait_until(lambda: node_id not in self.nodes)

    async def suspect(self, node_id: str, is_silent: bool) -> None:
        if self._this_node is None or self._lease is None:
            return
        key = f"suspicions/{node_id}/{self._this_node.id}"
        if is_silent:
            await self._kv.put_with_lease(key, b"silent", self._lease)
        else:
            await self._kv.compare_and_swap(key, b"silent", None)

    async def avoid(self, cell: int) -> None:
        this_node = self._this_node
        if this_node is None or self._lease is None:
            return
        await self._kv.put_with_lease(f"avoided/{cell}/{this_node.id}", b"slow", self._lease)
        await self._wait_until(lambda: this_node.id in self.avoided.get(cell, ()))

    async def share_counters(self, counters: dict[str, int]) -> None:
        """Let the other nodes know these counters, until this node leaves."""
        this_node, lease = self._this_node, self._lease
        if this_node is not None and lease is not None:
            value = json.dumps(counters, separators=(",", ":")).encode()
            await self._kv.put_with_lease(f"counters/{this_node.id}", value, lease)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a write has come back: then it is visible in the order that all nodes see."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_BACK_SECONDS):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    # ---- reading

    def _load_snapshot(self, entries: dict[str, bytes]) -> None:
        self.nodes.clear()
        self.claims.clear()
        self.suspicions.clear()
        self.avoided.clear()
        self.counters.clear()
        self._apply_changes(list(entries.items()))

    def _apply_changes(self, changes: Sequence[Change]) -> None:
        for key, value in changes:
            self._apply_change(key, value)
        if (
            self._is_registered
            and self._this_node is not None
            and self._this_node.id not in self.nodes
        ):
            self._lose_membership("other nodes evicted it")
        self._changed.set()
        try:
            self.on_change()
        except Exception:  # a failing listener must not stop the next change
            log.exception("failed to apply a cluster change")

    def _apply_change(self, key: str, value: bytes | None) -> None:
        kind, _, rest = key.partition("/")
        if kind == "nodes":
            node = None if value is None else decode_node(value)
            if node is None:
                self.nodes.pop(rest, None)
            else:
                self.nodes[rest] = node
        elif kind == "claims" and rest.isdecimal():
            if value is None:
                self.claims.pop(int(rest), None)
            else:
                self.claims[int(rest)] = value.decode()
        elif kind == "suspicions":
            suspect, _, by = rest.partition("/")
            _apply_report(self.suspicions, suspect, by, value is not None)
        elif kind == "counters":
            if value is None:
                self.counters.pop(rest, None)
            else:
                self.counters[rest] = json.loads(value)
        elif kind == "avoided":
            cell, _, by = rest.partition("/")
            if cell.isdecimal():
                _apply_report(self.avoided, int(cell), by, value is not None)


def _apply_report(reports: dict[Key, set[str]], about: Key, by: str, is_given: bool) -> None:
    """Add or remove the report of the node `by`."""
    reporters = reports.setdefault(about, set())
    if is_given:
        reporters.add(by)
    else:
        reporters.discard(by)
    if not reporters:
        del reports[about]


def _node_key(node_id: str) -> str:
    return f"nodes/{node_id}"
