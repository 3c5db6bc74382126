"""How many connections there are, and how many each address and each user has, and the word for one too many.

Nothing is counted where there is no limit. All cells of a node have one crowd: a limit is one of the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.limits import Limits

if TYPE_CHECKING:
    from sluice.broker.net.connection import Connection

SILENT_SHARE: Final = (
    2  # so many times its limit an address may have open before it is cut off without a word
)


class Crowd:
    def __init__(self, limits: Limits) -> None:
        self._limits: Limits = limits
        self._inside: set[Connection] = set()  # those that have a session
        self._address_of: dict[Connection, str] = {}
        self._user_of: dict[Connection, str] = {}
        self._by_address: dict[str, int] = {}
        self._by_user: dict[str, int] = {}

    def opened(self, connection: Connection) -> bool:
        """Whether a new socket may stay to say who it is."""
        limit = self._limits.max_connections_per_address
        if not limit:
            return True
        address = connection.address()
        if not address:
            return True  # from another cell, not from anywhere
        self._address_of[connection] = address
        count = self._by_address.get(address, 0) + 1
        self._by_address[address] = count
        return count <= limit * SILENT_SHARE

    def fault_of_address(self, connection: Connection) -> str:
        """Why no further client is taken from where this one comes from; the empty string when one is."""
        limit = self._limits.max_connections_per_address
        if limit and self._by_address.get(self._address_of.get(connection, ""), 0) > limit:
            return f"one address may have {limit} connections here, and has them: close one first"
        return ""

    def fault_of_number(self) -> str:
        limit = self._limits.max_connections
        if limit and len(self._inside) >= limit:
            return f"this server takes {limit} clients and has them"
        return ""

    def fault_of_user(self, user: str) -> str:
        limit = self._limits.max_connections_per_user
        if limit and user and self._by_user.get(user, 0) >= limit:
            return f"one user may have {limit} connections here, and has them: close one first"
        return ""

    def entered(self, connection: Connection, user: str) -> None:
        """It has a session now."""
        if self._limits.max_connections:
            self._inside.add(connection)
        if self._limits.max_connections_per_user and user:
            self._user_of[connection] = user
            self._by_user[user] = self._by_user.get(user, 0) + 1

    def left(self, connection: Connection) -> None:
        """It has no session any more; its socket may be there for a while yet."""
        self._inside.discard(connection)
        user = self._user_of.pop(connection, "")
        if user:
            _count_down(self._by_user, user)

    def closed(self, connection: Connection) -> None:
        self.left(connection)
        address = self._address_of.pop(connection, "")
        if address:
            _count_down(self._by_address, address)


def _count_down(counts: dict[str, int], key: str) -> None:
    left = counts.get(key, 0) - 1
    if left > 0:
        counts[key] = left
    else:
        counts.pop(key, None)
