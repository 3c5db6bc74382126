"""Who may connect, and with which rights: the question the broker asks, and the simplest of its answers.

The broker asks once per connection (`Access.admit`) and keeps the `Grant` it gets; a connection that may do everything
has no grant at all, so the usual case costs nothing. How people prove who they are is known in the room `access`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sluice.broker.acl.grants import Grant
from sluice.wire.packets import Connect
from sluice.wire.reasons import NOT_AUTHORIZED, SUCCESS


class AuthResult:
    """The answer to a CONNECT: a reason and words for it. For an admitted client also its grant (None: everything), its
    user name (empty: it has none), when its proof runs out (0.0: never) and what tells that proof from a later one."""

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
    """Where a CONNECT comes from, and the id that the client will have."""

    def __init__(self, client_id: str, address: str, transport: Any) -> None:
        self.client_id = client_id
        self.address = address
        self._transport = transport

    def get_certificate(self) -> dict[str, Any]:
        """The client certificate that TLS has verified, in the form of `ssl.SSLSocket.getpeercert`; or nothing."""
        found = self._transport.get_extra_info("peercert") if self._transport is not None else None
        return found if isinstance(found, dict) else {}


AuthCallback = Callable[[AuthResult], None]


class AccessControl(Protocol):
    def authenticate(self, connect: Connect, peer: PeerInfo, on_result: AuthCallback) -> None:
        """Answer by calling `reply` once, in the loop: before this returns, or later. Until then the connection is
        not read from."""


class AnonymousAccess:
    """Everybody comes in, or nobody does."""

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
