"""The ports at which every process of a node listens, reserved by the supervisor.

A reserved socket is bound and does not listen: it gets no connection, and no other program gets the
port while a process is restarted.
"""

from __future__ import annotations

import socket
from typing import Any

from sluice.broker.net import ListenerError
from sluice.config.settings import ListenSettings
from sluice.units import Address


class SharedPorts:
    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def reserve(self, listen: ListenSettings) -> ListenSettings:
        """Reserve the port of each listener; return the settings with the actual ports."""
        found: dict[str, Address | None] = {}
        for name in ListenSettings.model_fields:
            address: Address | None = getattr(listen, name)
            found[name] = address if address is None else self._reserve(name, address)
        return listen.model_copy(update=found)

    def _reserve(self, name: str, address: Address) -> Address:
        port = address.port
        try:
            families = socket.getaddrinfo(
                address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind, protocol, _, where in dict.fromkeys(families):
                if port:
                    # With the option, the port of another node with several processes would do.
                    _bind(family, kind, protocol, where, port, is_shared=False).close()
                bound = _bind(family, kind, protocol, where, port, is_shared=True)
                self._sockets.append(bound)
                port = bound.getsockname()[1]
        except OSError as fault:
            raise ListenerError(name, address.host, address.port, fault) from fault
        return Address(address.host, port)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def _bind(
    family: int, kind: int, protocol: int, where: Any, port: int, is_shared: bool
) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((where[0], port, *where[2:]))
    except BaseException:
        bound.close()
        raise
    return bound
