"""Connection limits: in total, per address and per user.

Connections are counted only where a limit is set. All cells of a node share one `ConnectionLimits`,
because a limit applies to the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.limits import Limits

if TYPE_CHECKING:
    from sluice.broker.net.connection import Connection

# An address that opens more than this multiple of its limit is disconnected without a CONNACK.
ABORT_LIMIT_FACTOR: Final = 2


class ConnectionLimits:
    def __init__(self, limits: Limits) -> None:
        self._limits: Limits = limits
        self._with_session: set[Connection] = set()  # connections that have a session
        self._addresses: dict[Connection, str] = {}
        self._users: dict[Connection, str] = {}
        self._count_by_address: dict[str, int] = {}
        self._count_by_user: dict[str, int] = {}

    def admit_socket(self, connection: Connection) -> bool:
        """Return whether a new socket may stay open and send a CONNECT."""
        limit = self._limits.max_connections_per_address
        if not limit:
            return True
        address = connection.address()
        if not address:
            return True  # a connection from another cell has no address
        self._addresses[connection] = address
        count = self._count_by_address.get(address, 0) + 1
        self._count_by_address[address] = count
        return count <= limit * ABORT_LIMIT_FACTOR

    def address_limit_error(self, connection: Connection) -> str:
        """Return why the address of `connection` may have no further client, or an empty string."""
        limit = self._limits.max_connections_per_address
        if limit and self._count_by_address.get(self._addresses.get(connection, ""), 0) > limit:
            return f"this address has reached its limit of {limit} connections: close one first"
        return ""

    def total_limit_error(self) -> str:
        limit = self._limits.max_connections
        if limit and len(self._with_session) >= limit:
            return f"this server has reached its limit of {limit} clients"
        return ""

    def user_limit_error(self, user: str) -> str:
        limit = self._limits.max_connections_per_user
        if limit and user and self._count_by_user.get(user, 0) >= limit:
            return f"this user has reached its limit of {limit} connections: close one first"
        return ""

    def on_session_opened(self, connection: Connection, user: str) -> None:
        """Count a connection that has opened a session."""
        if self._limits.max_connections:
            self._with_session.add(connection)
        if self._limits.max_connections_per_user and user:
            self._users[connection] = user
            self._count_by_user[user] = self._count_by_user.get(user, 0) + 1

    def on_session_closed(self, connection: Connection) -> None:
        """Stop counting a connection whose session has closed.

        Its socket may stay open for a while.
        """
        self._with_session.discard(connection)
        user = self._users.pop(connection, "")
        if user:
            _decrement(self._count_by_user, user)

    def on_closed(self, connection: Connection) -> None:
        self.on_session_closed(connection)
        address = self._addresses.pop(connection, "")
        if address:
            _decrement(self._count_by_address, address)


def _decrement(counts: dict[str, int], key: str) -> None:
    remaining = counts.get(key, 0) - 1
    if remaining > 0:
        counts[key] = remaining
    else:
        counts.pop(key, None)
