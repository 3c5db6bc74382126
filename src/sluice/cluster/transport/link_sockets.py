"""Sockets of links: listen, accept and connect, over TCP, TCP with mutual TLS, or Unix sockets.

TLS is version 1.3 with certificates at both ends. The calling end checks that the certificate of
the other one has the host that it calls; the acceptor checks the caller after the handshake of the
link, when it knows which node calls. A Unix socket is for processes of one machine: only the user
that runs the broker can open it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluice.broker.net import ListenerError
from sluice.errors import ConfigError
from sluice.units import Address, parse_address

UNIX_PREFIX: Final = "unix:"  # of the link address of a node that listens on a Unix socket
BACKLOG: Final = 256
CONNECT_SECONDS: Final = 5.0


@dataclass(frozen=True)
class LinkTls:
    """PEM files. Both sides present a certificate, and `authority` has signed both."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True)
class LinkOptions:
    listen: Address
    cluster: str = "sluice"
    heartbeat: float = 0.5
    silence: float = 2.0
    tls: LinkTls | None = None
    path: Path | None = None  # listen on this Unix socket instead


class LinkSockets:
    """Opens the sockets of all links of this node."""

    def __init__(self, options: LinkOptions) -> None:
        self._address = options.listen
        self._path = options.path
        self._tls = options.tls
        self._server_context: ssl.SSLContext | None = None
        self._client_context: ssl.SSLContext | None = None

    @property
    def has_tls(self) -> bool:
        return self._tls is not None

    def listen(self) -> socket.socket:
        """Open the listening socket; raise ListenerError or ConfigError if that is impossible."""
        if self._tls is not None:
            self._server_context = _make_context(self._tls, ssl.PROTOCOL_TLS_SERVER)
            self._client_context = _make_context(self._tls, ssl.PROTOCOL_TLS_CLIENT)
        if self._path is not None:
            return _listen_on_path(self._path)
        host, port = self._address.host, self._address.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as fault:
            raise ListenerError("cluster", host, port, fault) from fault
        listener.setblocking(False)
        return listener

    async def accept(self, connection: socket.socket, factory: Callable[[], Any]) -> Any:
        """Start the protocol of an accepted connection, after its TLS handshake."""
        context = self._server_context
        _, protocol = await asyncio.get_running_loop().connect_accepted_socket(
            factory,
            connection,
            ssl=context,
            ssl_handshake_timeout=CONNECT_SECONDS if context is not None else None,
        )
        return protocol

    async def connect(self, link: str, factory: Callable[[], Any]) -> Any:
        """Connect to the link address of another node and return the protocol."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            if link.startswith(UNIX_PREFIX):
                _, protocol = await loop.create_unix_connection(
                    factory, link.removeprefix(UNIX_PREFIX)
                )
                return protocol
            address, context = parse_address(link), self._client_context
            _, protocol = await loop.create_connection(
                factory,
                address.host,
                address.port,
                ssl=context,
                server_hostname=address.host if context is not None else None,
            )
        return protocol


async def is_refused(link: str, timeout_seconds: float) -> bool:
    """Return whether an address refuses connections: then no process listens there any more."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_seconds):
            if link.startswith(UNIX_PREFIX):
                transport, _ = await loop.create_unix_connection(
                    asyncio.Protocol, link.removeprefix(UNIX_PREFIX)
                )
            else:
                address = parse_address(link)
                transport, _ = await loop.create_connection(
                    asyncio.Protocol, address.host, address.port
                )
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, TimeoutError):
        return False
    transport.close()
    return False


def peer_name(transport: Any) -> str:
    """Return the address of the other end for the log."""
    peer = transport.get_extra_info("peername")
    if isinstance(peer, tuple) and len(peer) >= 2:
        return str(Address(peer[0], peer[1]))
    return "unix"


def certificate_names(transport: Any) -> list[str]:
    """Return the subject alternative names of the peer's certificate, which TLS has verified."""
    certificate = transport.get_extra_info("peercert") or {}
    return [value for _, value in certificate.get("subjectAltName", ())]


def _listen_on_path(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            path.unlink()  # of a previous run
        listener.bind(str(path))
        os.chmod(path, 0o600)  # before `listen`, so that no other user connects
        listener.listen(BACKLOG)
    except OSError as fault:
        listener.close()
        raise ListenerError("cluster", str(path), 0, fault) from fault
    listener.setblocking(False)
    return listener


def _make_context(tls: LinkTls, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        # An empty pass phrase fails for an encrypted key; without one, OpenSSL would ask for it.
        context.load_cert_chain(tls.certificate, tls.key, password="")
        context.load_verify_locations(tls.authority)
    except (OSError, ValueError) as fault:  # SSLError is an OSError
        reason = getattr(fault, "reason", None) or fault
        raise ConfigError(
            f"the link between the nodes cannot use its TLS files: {reason}",
            "Give PEM files in cluster.tls_cert, cluster.tls_key (without a pass phrase) "
            "and cluster.tls_ca",
        ) from fault
    return context
