"""Our link to another node: calls it, and calls again after each failure until it is closed."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from sluice.backoff import Backoff
from sluice.cluster.membership import NodeInfo
from sluice.cluster.transport.known_nodes import KnownNodes
from sluice.cluster.transport.link_authentication import (
    LinkAuthenticationError,
    LinkCall,
    prove_as_caller,
)
from sluice.cluster.transport.link_connection import LinkConnection
from sluice.cluster.transport.link_handshake import (
    LINK,
    OTHER_INCARNATION,
    PING,
    REFUSED,
    HandshakeChannel,
    LinkRefused,
    encode_greeting,
)
from sluice.cluster.transport.link_sockets import LinkSockets, is_refused
from sluice.cluster.transport.mux import Mux
from sluice.cluster.transport.refusal_log import RefusalLog

RETRY_BACKOFF: Final = Backoff(0.05, max_seconds=1.0)
HANDSHAKE_SECONDS: Final = 7.0  # longer than the acceptor takes, so that its reason arrives
PROBE_SECONDS: Final = 1.0


class OutgoingLink:
    """`on_peer_gone` is called with the id of the node if nothing listens at its address."""

    def __init__(
        self,
        node: NodeInfo,
        sockets: LinkSockets,
        known: KnownNodes,
        new_link: Callable[[str], LinkConnection],
        on_peer_gone: Callable[[str], None],
        refusals: RefusalLog,
    ) -> None:
        self._node = node
        self._sockets = sockets
        self._known = known
        self._new_link = new_link
        self._on_peer_gone = on_peer_gone
        self._refusals = refusals
        self._link = new_link(node.id)
        self._task = asyncio.create_task(self._run())

    @property
    def mux(self) -> Mux:
        return self._link.mux

    def close(self, reason: str) -> asyncio.Task[None]:
        """End the link; return the task that ends with it."""
        self._link.end(reason)
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        attempt = 0
        try:
            while True:
                if await self._run_link():
                    attempt = 0
                if await is_refused(self._node.link, PROBE_SECONDS):
                    self._on_peer_gone(self._node.id)
                await asyncio.sleep(RETRY_BACKOFF.delay(attempt, random.random()))
                attempt += 1
        finally:
            self._link.fail_streams()

    async def _run_link(self) -> bool:
        """Run one link from its call to its end; return whether it was established."""
        link = self._link
        try:
            channel = await self._call()
            if channel is not None:
                channel.hand_over(link)
                await link.ended
            return channel is not None
        finally:
            # Before the streams end, because their protocols dial again at once.
            self._link = self._new_link(self._node.id)
            link.end("this node has left the cluster")
            link.fail_streams()

    async def _call(self) -> HandshakeChannel | None:
        """Return a connection on which both ends have authenticated, or None."""
        known, node = self._known, self._node
        if known.key is None:
            return None
        call = LinkCall(known.cluster, known.node_id, node.id)
        channel = HandshakeChannel()
        is_open = False
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._sockets.connect(node.link, lambda: channel)
                await channel.write(encode_greeting(LINK, call))
                await prove_as_caller(known.key, call, channel.read_reply, channel.write)
                await channel.read_reply()
            is_open = True
            return channel
        except LinkRefused as refusal:
            if refusal.kind == REFUSED:
                self._log(str(refusal))
            elif refusal.kind == OTHER_INCARNATION:
                self._on_peer_gone(node.id)
        except LinkAuthenticationError as fault:
            self._log(str(fault))
        except ssl.SSLError as fault:
            self._log(f"TLS: {fault.reason or fault}")
        except (OSError, TimeoutError):
            pass  # no listener, or too slow: the caller retries
        finally:
            if not is_open:
                channel.abort()
        return None

    def _log(self, reason: str) -> None:
        self._refusals.log(self._node.id, self._node.link, reason)


async def ping(sockets: LinkSockets, link: str) -> bool | None:
    """Return whether a node answers at an address; None if nothing listens there any more."""
    if await is_refused(link, PROBE_SECONDS):
        return None
    channel = HandshakeChannel()
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await sockets.connect(link, lambda: channel)
            await channel.write(encode_greeting(PING))
            await channel.read_reply()
        return True
    except (LinkAuthenticationError, LinkRefused, OSError, TimeoutError):
        return False
    finally:
        with suppress(OSError):
            channel.close()
