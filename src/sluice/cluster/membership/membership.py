"""Who is there, who holds what, who is not heard: a coordinator on any board.

      cells                         how many there are, for the life of the cluster
      secret                        what nodes prove to each other, unless cluster.secret is configured
      nodes/<id>                    NodeInfo, under the node's lease
      claims/<cell>                 id of the node that holds it; outlives the node
      suspicions/<id>/<id of who>   under the lease of who has it

The rule that keeps it safe: I may own for as long after I *asked* for my lease to be kept as the lease lasts. The board
counts from when it heard me, so it never ends a lease before I have stopped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from sluice.cluster.membership.coordinator import CoordinatorError, NodeInfo, decode_node
from sluice.cluster.membership.kv import Change, CoordinationKv, CoordinatorUnavailable, Lease

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.1  # between attempts to keep a lease
READ_BACK_SECONDS: Final = 5.0  # what we wait to see our own writes come back


class Membership:
    """A `Coordinator`."""

    def __init__(self, kv: CoordinationKv, cells: int, lease_seconds: float) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self.claims: dict[int, str] = {}
        self.suspicions: dict[str, set[str]] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._kv = kv
        self._cells = cells
        self._lease_seconds = lease_seconds
        self._this_node: NodeInfo | None = None
        self._lease: Lease | None = None
        self._is_registered = False  # registered, as far as we have heard
        self._is_watching = False
        self._may_own_until = 0.0  # by the loop's clock
        self._keepalive_task: asyncio.Task[None] | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def may_own(self) -> bool:
        return self._is_registered and asyncio.get_running_loop().time() < self._may_own_until

    # ---- coming and going

    async def shared_secret(self) -> str:
        made = secrets.token_hex(32).encode()
        return (await self._kv.compare_and_swap("secret", None, made) or made).decode()

    async def start(self, this_node: NodeInfo) -> None:
        loop = asyncio.get_running_loop()
        self._this_node = this_node
        agreed = await self._kv.compare_and_swap("cells", None, b"%d" % self._cells)
        if agreed != b"%d" % self._cells:
            raise CoordinatorError(
                f"this cluster has {(agreed or b'?').decode()} cells, and cluster.cells is {self._cells} here",
                f"Set cluster.cells = {(agreed or b'?').decode()}, or another cluster.name for a cluster of its own",
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
                await self._kv.revoke(
                    lease
                )  # nobody would keep it: the others must not take us for a node
            raise CoordinatorUnavailable(
                "the coordinator does not show what we wrote", "See whether it is well"
            )
        self._is_registered = True
        self._keepalive_task = loop.create_task(self._keep_lease_alive(lease))

    def _check_protocol_version(self, this_node: NodeInfo) -> None:
        """Nodes that do not understand each other must not share queues."""
        for other in self.nodes.values():
            if other.speaks != this_node.speaks:
                raise CoordinatorError(
                    f"node {other.name!r} speaks version {other.speaks} of the language between nodes, and this "
                    f"Sluice version {this_node.speaks}",
                    "Stop every node, then start all of them with the same version of Sluice: nothing kept is lost",
                )

    def _check_secret(self, this_node: NodeInfo) -> None:
        """Refuse to start with another secret than the others: no link would come up."""
        for other in self.nodes.values():
            is_earlier_self = other.name == this_node.name and other.link == this_node.link
            if other.key != this_node.key and not is_earlier_self:
                raise CoordinatorError(
                    f"node {other.name!r} has another cluster secret than this one",
                    "Give every node the same cluster.secret (or cluster.secret_file), or none at all. To change it, "
                    "stop every node first",
                )

    async def _acquire_name(self, this_node: NodeInfo) -> None:
        """A name belongs to one node. One of our name at our own address is what we were before; another may be on its
        way out, and is waited for as long as a lease can last."""
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
                    f"a node called {this_node.name!r} is in the cluster already, at {namesakes[0].link}",
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
        """From here on others may own what I did."""
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
            self._may_own_until, self._lose_membership, "its lease was not kept in time"
        )

    async def _keep_lease_alive(self, lease: Lease) -> None:
        """Three times per lease, and more often when no answer comes."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(lease.seconds / 3)
            is_alive = None
            while is_alive is None:
                asked_at = loop.time()
                try:
                    is_alive = await self._kv.keep_alive(lease)
                except CoordinatorError as fault:
                    log.warning("the coordinator does not answer", extra={"fault": str(fault)})
                    await asyncio.sleep(RETRY_SECONDS)
            if not is_alive:
                self._lose_membership("its lease has ended")
                return
            self._extend_ownership(asked_at)

    # ---- what is written

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

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """What was written is true for us when it has come back, in the order in which all see it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_BACK_SECONDS):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    # ---- what is heard

    def _load_snapshot(self, entries: dict[str, bytes]) -> None:
        self.nodes.clear()
        self.claims.clear()
        self.suspicions.clear()
        self._apply_changes(list(entries.items()))

    def _apply_changes(self, changes: Sequence[Change]) -> None:
        for key, value in changes:
            self._apply_change(key, value)
        if (
            self._is_registered
            and self._this_node is not None
            and self._this_node.id not in self.nodes
        ):
            self._lose_membership("it was put out by the others")
        self._changed.set()
        try:
            self.on_change()
        except Exception:  # whatever it is, the next change must be heard too
            log.exception("a change of the cluster was not followed")

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
            known = self.suspicions.setdefault(suspect, set())
            if value is None:
                known.discard(by)
            else:
                known.add(by)
            if not known:
                del self.suspicions[suspect]


def _node_key(node_id: str) -> str:
    return f"nodes/{node_id}"
