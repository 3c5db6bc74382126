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

from sluice.cluster.membership.kv import Board, BoardUnavailable, Change, Lease
from sluice.cluster.membership.coordinator import CoordinatorError, NodeInfo, decode_node

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.1  # between attempts to keep a lease
SEEN_SECONDS: Final = 5.0  # what we wait to see our own writes come back


class Membership:
    """A `Coordinator`."""

    def __init__(self, board: Board, cells: int, lease_seconds: float) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self.claims: dict[int, str] = {}
        self.suspicions: dict[str, set[str]] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._board = board
        self._cells = cells
        self._lease_seconds = lease_seconds
        self._me: NodeInfo | None = None
        self._lease: Lease | None = None
        self._is_in = False  # registered, as far as we have heard
        self._following = False
        self._safe_until = 0.0  # by the loop's clock
        self._keeping: asyncio.Task[None] | None = None
        self._lapsing: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def may_own(self) -> bool:
        return self._is_in and asyncio.get_running_loop().time() < self._safe_until

    # ---- coming and going

    async def shared_secret(self) -> str:
        made = secrets.token_hex(32).encode()
        return (await self._board.swap("secret", None, made) or made).decode()

    async def start(self, me: NodeInfo) -> None:
        loop = asyncio.get_running_loop()
        self._me = me
        agreed = await self._board.swap("cells", None, b"%d" % self._cells)
        if agreed != b"%d" % self._cells:
            raise CoordinatorError(
                f"this cluster has {(agreed or b'?').decode()} cells, and cluster.cells is {self._cells} here",
                f"Set cluster.cells = {(agreed or b'?').decode()}, or another cluster.name for a cluster of its own",
            )
        if not self._following:
            self._following = True
            self._board.follow(self._learn_all, self._learn)
            await self._until(lambda: self._changed.is_set())
        self._check_language(me)
        self._check_secret(me)
        await self._have_name(me)
        asked_at = loop.time()
        lease = await self._board.grant(self._lease_seconds)
        await self._board.pin(_node_key(me.id), me.encode(), lease)
        self._lease = lease
        self._prolong(asked_at)
        await self._until(lambda: me.id in self.nodes)
        if me.id not in self.nodes:
            with suppress(CoordinatorError):
                await self._board.revoke(
                    lease
                )  # nobody would keep it: the others must not take us for a node
            raise BoardUnavailable("the coordinator does not show what we wrote", "See whether it is well")
        self._is_in = True
        self._keeping = loop.create_task(self._keep(lease))

    def _check_language(self, me: NodeInfo) -> None:
        """Nodes that do not understand each other must not share queues."""
        for other in self.nodes.values():
            if other.speaks != me.speaks:
                raise CoordinatorError(
                    f"node {other.name!r} speaks version {other.speaks} of the language between nodes, and this "
                    f"Sluice version {me.speaks}",
                    "Stop every node, then start all of them with the same version of Sluice: nothing kept is lost",
                )

    def _check_secret(self, me: NodeInfo) -> None:
        """Refuse to start with another secret than the others: no link would come up."""
        for other in self.nodes.values():
            was_me = other.name == me.name and other.link == me.link
            if other.key != me.key and not was_me:
                raise CoordinatorError(
                    f"node {other.name!r} has another cluster secret than this one",
                    "Give every node the same cluster.secret (or cluster.secret_file), or none at all. To change it, "
                    "stop every node first",
                )

    async def _have_name(self, me: NodeInfo) -> None:
        """A name belongs to one node. One of our name at our own address is what we were before; another may be on its
        way out, and is waited for as long as a lease can last."""
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + 2 * self._lease_seconds
        while True:
            twins = [one for one in self.nodes.values() if one.name == me.name and one.id != me.id]
            if not twins:
                return
            for twin in twins:
                if twin.link == me.link:
                    await self.put_out(twin.id)
            if loop.time() > patient_until:
                raise CoordinatorError(
                    f"a node called {me.name!r} is in the cluster already, at {twins[0].link}",
                    "Give each node a cluster.node of its own",
                )
            await asyncio.sleep(RETRY_SECONDS)

    async def stop(self) -> None:
        lease, self._lease = self._lease, None
        self._leave()
        if lease is not None:
            with suppress(CoordinatorError):
                await self._board.revoke(lease)
        await self._board.close()

    def _leave(self) -> None:
        self._is_in = False
        self._changed.set()
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        if self._lapsing is not None:
            self._lapsing.cancel()
            self._lapsing = None

    def _lose(self, why: str) -> None:
        """From here on others may own what I did."""
        if not self._is_in:
            return
        self._leave()
        log.error("this node is no longer in the cluster", extra={"why": why})
        self.on_lost()

    # ---- the lease

    def _prolong(self, asked_at: float) -> None:
        assert self._lease is not None
        self._safe_until = asked_at + self._lease.seconds
        if self._lapsing is not None:
            self._lapsing.cancel()
        loop = asyncio.get_running_loop()
        self._lapsing = loop.call_at(self._safe_until, self._lose, "its lease was not kept in time")

    async def _keep(self, lease: Lease) -> None:
        """Three times per lease, and more often when no answer comes."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(lease.seconds / 3)
            kept = None
            while kept is None:
                asked_at = loop.time()
                try:
                    kept = await self._board.keep(lease)
                except CoordinatorError as fault:
                    log.warning("the coordinator does not answer", extra={"fault": str(fault)})
                    await asyncio.sleep(RETRY_SECONDS)
            if not kept:
                self._lose("its lease has ended")
                return
            self._prolong(asked_at)

    # ---- what is written

    async def claim(self, cell: int, previous: str | None) -> bool:
        me = self._me
        if me is None or not self.may_own:
            return False
        old = None if previous is None else previous.encode()
        found = await self._board.swap(f"claims/{cell}", old, me.id.encode(), _node_key(me.id))
        if found != me.id.encode():
            return False
        await self._until(lambda: self.claims.get(cell) == me.id or not self._is_in)
        return self.may_own

    async def release(self, cell: int) -> None:
        me = self._me
        if me is not None and self.claims.get(cell) == me.id:
            await self._board.swap(f"claims/{cell}", me.id.encode(), None)
            await self._until(lambda: self.claims.get(cell) != me.id)

    async def put_out(self, node_id: str) -> None:
        await self._board.evict(_node_key(node_id))
        await self._until(lambda: node_id not in self.nodes)

    async def suspect(self, node_id: str, silent: bool) -> None:
        if self._me is None or self._lease is None:
            return
        key = f"suspicions/{node_id}/{self._me.id}"
        if silent:
            await self._board.pin(key, b"silent", self._lease)
        else:
            await self._board.swap(key, b"silent", None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """What was written is true for us when it has come back, in the order in which all see it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SEEN_SECONDS):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    # ---- what is heard

    def _learn_all(self, facts: dict[str, bytes]) -> None:
        self.nodes.clear()
        self.claims.clear()
        self.suspicions.clear()
        self._learn(list(facts.items()))

    def _learn(self, changes: Sequence[Change]) -> None:
        for key, value in changes:
            self._learn_one(key, value)
        if self._is_in and self._me is not None and self._me.id not in self.nodes:
            self._lose("it was put out by the others")
        self._changed.set()
        try:
            self.on_change()
        except Exception:  # whatever it is, the next change must be heard too
            log.exception("a change of the cluster was not followed")

    def _learn_one(self, key: str, value: bytes | None) -> None:
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
