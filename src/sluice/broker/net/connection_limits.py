"""How many connections there are, and how many each address and each user has, and the word for one too many.

Nothing is counted where there is no limit. All cells of a node have one crowd: a limit is one of the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.limits import Limits

if TYPE_CHECKING:
    from sluice.broker.net.connection import Connection

ABORT_LIMIT_FACTOR: Final = (
    2  # so many times its limit an address may have open before it is cut off without a word
)


class ConnectionLimits:
    def __init__(self, limits: Limits) -> None:
        self._limits: Limits = limits
        self._with_session: set[Connection] = set()  # those that have a session
        self._addresses: dict[Connection, str] = {}
        self._users: dict[Connection, str] = {}
        self._count_by_address: dict[str, int] = {}
        self._count_by_user: dict[str, int] = {}

    def admit_socket(self, connection: Connection) -> bool:
        """Whether a new socket may stay to say who it is."""
        limit = self._limits.max_connections_per_address
        if not limit:
            return True
        address = connection.address()
        if not address:
            return True  # from another cell, not from anywhere
        self._addresses[connection] = address
        count = self._count_by_address.get(address, 0) + 1
        self._count_by_address[address] = count
        return count <= limit * ABORT_LIMIT_FACTOR

    def address_limit_error(self, connection: Connection) -> str:
        """Why no further client is taken from where this one comes from; the empty string when one is."""
        limit = self._limits.max_connections_per_address
        if limit and self._count_by_address.get(self._addresses.get(connection, ""), 0) > limit:
            return f"one address may have {limit} connections here, and has them: close one first"
        return ""

    def total_limit_error(self) -> str:
        limit = self._limits.max_connections
        if limit and len(self._with_session) >= limit:
            return f"this server takes {limit} clients and has them"
        return ""

    def user_limit_error(self, user: str) -> str:
        limit = self._limits.max_connections_per_user
        if limit and user and self._count_by_user.get(user, 0) >= limit:
            return f"one user may have {limit} connections here, and has them: close one first"
        return ""

    def on_session_opened(self, connection: Connection, user: str) -> None:
        """It has a session now."""
        if self._limits.max_connections:
            self._with_session.add(connection)
        if self._limits.max_connections_per_user and user:
            self._users[connection] = user
            self._count_by_user[user] = self._count_by_user.get(user, 0) + 1

    def on_session_closed(self, connection: Connection) -> None:
        """It has no session any more; its socket may be there for a while yet."""
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
