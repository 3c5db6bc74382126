"""The access control interface of the broker, and its simplest implementation.

The broker asks once per connection (`AccessControl.authenticate`) and keeps the `Grant` it gets. A
connection that may do everything has no grant at all, so the usual case costs nothing. The package
`access` knows how clients authenticate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sluice.broker.acl.grants import Grant
from sluice.wire.packets import Connect
from sluice.wire.reasons import NOT_AUTHORIZED, SUCCESS


class AuthResult:
    """The result of authenticating a CONNECT: a reason code and its text.

    For an admitted client also its grant (None: everything is allowed), its user name (empty:
    none), the time when its credential expires (0.0: never) and an id of that credential.
    """

    def __init__(
        self,
        reason: int = SUCCESS,
        reason_string: str = "",
        grant: Grant | None = None,
        user: str = "",
        expires_at: float = 0.0,
        credential_id: str = "",
    ) -> None:
        self.reason = reason
        self.reason_string = reason_string
        self.grant = grant
        self.user = user
        self.expires_at = expires_at
        self.credential_id = credential_id


class PeerInfo:
    """The origin of a CONNECT, and the id that the client will have."""

    def __init__(self, client_id: str, address: str, transport: Any) -> None:
        self.client_id = client_id
        self.address = address
        self._transport = transport

    def get_certificate(self) -> dict[str, Any]:
        """Return the verified certificate (see `ssl.SSLSocket.getpeercert`), or an empty dict."""
        found = self._transport.get_extra_info("peercert") if self._transport is not None else None
        return found if isinstance(found, dict) else {}


AuthCallback = Callable[[AuthResult], None]


class AccessControl(Protocol):
    def authenticate(self, connect: Connect, peer: PeerInfo, on_result: AuthCallback) -> None:
        """Call `on_result` once, in the loop: before this returns, or later.

        The connection is not read until then.
        """

    def creates_queue(self, action: int, queue: str, user: str, client_id: str) -> bool | None:
        """Return whether a client's publish or subscription may create this queue.

        None: the server's settings decide.
        """
        return None


class AnonymousAccess(AccessControl):
    """Admit every client, or none."""

    def __init__(self, allowed: bool) -> None:
        self._is_allowed = allowed

    def authenticate(self, connect: Connect, peer: PeerInfo, on_result: AuthCallback) -> None:
        if self._is_allowed:
            on_result(AuthResult())
        else:
            on_result(
                AuthResult(
                    NOT_AUTHORIZED,
                    "anonymous clients are not admitted: set auth.allow_anonymous, or add users",
                )
            )
