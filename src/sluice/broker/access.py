"""Who may connect, publish and subscribe.

The broker asks this room once per connection (`Access.admit`) and once per publish or filter (`Grant`); a connection
that may do everything has no grant at all, so the usual case costs nothing.
"""

from __future__ import annotations

from typing import Protocol

from sluice.wire.packets import Connect
from sluice.wire.reasons import NOT_AUTHORIZED, SUCCESS


class Grant:
    """What one connection may do. The base class allows nothing."""

    def may_publish(self, topic: bytes) -> bool:
        return False

    def may_subscribe(self, topic_filter: bytes) -> bool:
        return False


class Verdict:
    """The answer to a CONNECT: a reason, words for it, and the grant of an admitted client (None: everything)."""

    def __init__(self, reason: int = SUCCESS, why: str = "", grant: Grant | None = None) -> None:
        self.reason = reason
        self.why = why
        self.grant = grant


class Access(Protocol):
    def admit(self, connect: Connect, peer: str) -> Verdict: ...


class Anonymous:
    """Everybody comes in, or nobody does."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed

    def admit(self, connect: Connect, peer: str) -> Verdict:
        if self._allowed:
            return Verdict()
        return Verdict(
            NOT_AUTHORIZED, "anonymous clients are not admitted: set auth.allow_anonymous, or add users"
        )
