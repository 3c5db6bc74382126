"""Accepts links from other nodes: the handshake of each connection, then its link.

A node trusts what arrives over a link, so a caller must prove that it knows the cluster secret,
call this very incarnation, be registered at the coordinator, and with TLS have a certificate for
the host that it has registered. Every other caller is answered with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from sluice.cluster.transport.known_nodes import KnownNodes
from sluice.cluster.transport.link_authentication import (
    LinkAuthenticationError,
    LinkCall,
    certificate_matches_host,
    check_caller,
)
from sluice.cluster.transport.link_connection import LinkConnection
from sluice.cluster.transport.link_handshake import (
    NOT_NOW,
    OTHER_INCARNATION,
    HandshakeChannel,
    LinkRefused,
    decode_greeting,
)
from sluice.cluster.transport.link_sockets import LinkSockets, certificate_names, peer_name
from sluice.cluster.transport.refusal_log import RefusalLog
from sluice.units import parse_address

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS: Final = 5.0  # for the greeting and both proofs
MAX_HANDSHAKES: Final = 64  # at a time; they bound the memory for unknown callers
# The registration of an authenticated caller may arrive after its call.
REGISTRATION_WAIT_SECONDS: Final = 1.0
ACCEPT_RETRY_SECONDS: Final = 0.1  # after a failure, such as a lack of file descriptors


class LinkAcceptor:
    """`new_link` creates the link with the node of the given id."""

    def __init__(
        self, sockets: LinkSockets, known: KnownNodes, new_link: Callable[[str], LinkConnection]
    ) -> None:
        self.links: set[LinkConnection] = set()  # established
        self._sockets = sockets
        self._known = known
        self._new_link = new_link
        self._listener: socket.socket | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._unserved: set[socket.socket] = set()  # their task has not begun
        self._handshakes = 0
        self._refusals = RefusalLog("link refused", asyncio.get_running_loop().time)

    def open(self) -> int:
        """Listen; return the port, 0 for a Unix socket."""
        listener = self._listener = self._sockets.listen()
        self._watch_listener()
        name = listener.getsockname()
        return int(name[1]) if isinstance(name, tuple) else 0

    async def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for connection in self._unserved:
            connection.close()
        self._unserved.clear()
        await asyncio.sleep(0)  # transports close their sockets in the next turn

    def _watch_listener(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept_connection)

    def _accept_connection(self) -> None:
        listener = self._listener
        if listener is None:
            return
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the caller has gone
        except OSError as fault:
            log.warning("link not accepted", extra={"fault": str(fault)})
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener.fileno())
            self._retry = loop.call_later(ACCEPT_RETRY_SECONDS, self._watch_listener)
            return
        if self._handshakes >= MAX_HANDSHAKES:
            connection.close()  # a node calls again
            self._refusals.log("", "", f"more than {MAX_HANDSHAKES} callers at a time")
            return
        connection.setblocking(False)
        self._handshakes += 1
        self._unserved.add(connection)
        task = asyncio.create_task(self._serve(connection))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Serve a connection from its handshake to its end."""
        self._unserved.discard(connection)
        try:
            accepted = await self._shake_hands(connection)
        finally:
            self._handshakes -= 1
        if accepted is None:
            return
        channel, link = accepted
        self.links.add(link)
        try:
            channel.hand_over(link)
            await link.ended
        finally:
            self.links.discard(link)
            link.end("this node has left the cluster")
            link.fail_streams()

    async def _shake_hands(
        self, connection: socket.socket
    ) -> tuple[HandshakeChannel, LinkConnection] | None:
        """Return an authenticated connection and its link, or None after a ping or a refusal."""
        channel = HandshakeChannel()
        caller = address = ""
        is_greeted = False
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._sockets.accept(connection, lambda: channel)
                address = peer_name(channel.transport)
                message = await channel.read()
                is_greeted = True
                call = decode_greeting(message)
                if call is not None:
                    caller = call.caller
                    await self._authenticate(call, channel)
                await channel.write_reply(b"")
            if call is not None:
                log.info("link accepted", extra={"node": caller, "address": address})
                return channel, self._new_link(caller)
            channel.close()
        except LinkAuthenticationError as fault:
            await self._refuse(channel, caller, address, LinkRefused(str(fault)))
        except LinkRefused as refusal:
            await self._refuse(channel, caller, address, refusal)
        except TimeoutError:
            late = LinkRefused("the handshake took too long", NOT_NOW)
            await self._refuse(channel, caller, address, late)
        except OSError as fault:
            if isinstance(fault, ssl.SSLError) and not isinstance(fault, ssl.SSLEOFError):
                self._refusals.log(caller, address, f"TLS: {fault.reason or fault}")
            elif is_greeted:  # not a mere probe of the port
                self._refusals.log(caller, address, str(fault), logging.INFO)
            channel.abort()
        except asyncio.CancelledError:
            channel.abort()
            raise
        return None

    async def _refuse(
        self, channel: HandshakeChannel, caller: str, address: str, refusal: LinkRefused
    ) -> None:
        level = logging.INFO if refusal.is_expected else logging.WARNING
        self._refusals.log(caller, address, str(refusal), level)
        if channel.transport is not None:
            with suppress(OSError):
                await channel.refuse(refusal)

    async def _authenticate(self, call: LinkCall, channel: HandshakeChannel) -> None:
        """Return if the caller is a registered node that calls this incarnation; else raise."""
        if call.cluster != self._known.cluster:
            raise LinkRefused("this is another cluster")
        key = self._known.key
        if key is None:
            raise LinkRefused("this node is not in the cluster now", NOT_NOW, True)
        self._check_ids(call)
        await check_caller(key, call, channel.read, channel.write_reply)
        node = await self._known.wait_registered(call.caller, REGISTRATION_WAIT_SECONDS)
        if node is None:
            raise LinkRefused("the caller is not a registered node", NOT_NOW)
        self._check_ids(call)
        if self._sockets.has_tls:
            host = parse_address(node.link).host
            if not certificate_matches_host(certificate_names(channel.transport), host):
                raise LinkRefused(
                    "the certificate of the caller has no subject alternative name "
                    f"{host}, the host that node {node.name} has registered"
                )

    def _check_ids(self, call: LinkCall) -> None:
        known = self._known
        if not known.node_id or call.caller in known.departed_ids:
            raise LinkRefused("caller or acceptor is not in the cluster now", NOT_NOW, True)
        if call.acceptor != known.node_id:
            raise LinkRefused("this node has another incarnation now", OTHER_INCARNATION, True)
