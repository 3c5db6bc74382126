"""Who stands at an admin door, and what they may do there.

The REST and gRPC doors hand in what the caller sent and the address it came from, and get an `Identity` or a refusal;
`require` is the one place where a role is compared. What a password, a token or a JWT is, and where they are kept, is
not known here: `Credentials` tells.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from sluice.errors import NotAllowed, NotAuthenticated

_REMEDY: Final = (
    "Send Authorization: Bearer <token>, with a token made by `sluice token add` or a JWT, or Basic with a user's "
    "name and password"
)

MAX_TOKEN_BYTES: Final = 16_384  # bytes of a token that are looked at


def looks_like_jwt(text: str) -> bool:
    """Whether it is to be taken for a JWT rather than for a password: three parts, the first a JSON object."""
    return text.startswith("eyJ") and text.count(".") == 2 and len(text) <= MAX_TOKEN_BYTES


class Role(IntEnum):
    """Each may do what the one before it may."""

    VIEWER = 1  # see everything
    OPERATOR = 2  # publish, retry, purge, seek
    ADMIN = 3  # make, configure and delete queues and groups

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, label: str) -> Role:
        """The role of this name; ValueError says which there are."""
        for role in cls:
            if role.label == label:
                return role
        raise ValueError(f"must be one of {', '.join(role.label for role in cls)}")


@dataclass(frozen=True)
class Identity:
    name: str
    role: Role
    is_anonymous: bool = False


class Credentials(Protocol):
    """Both are asked from any thread. None: it proves nothing; which part of it was wrong is not told."""

    def verify_bearer(self, text: str) -> Identity | None: ...

    def verify_password(self, name: str, password: str, peer: str) -> Identity | None:
        """May take the time of one password hash. Raises NotAuthenticated for an address that has to wait."""


class AdminAuthenticator:
    """Tells who a caller is. Without credentials everybody is an administrator: the start sees to it that such a door
    is open on loopback only."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        self._credentials = credentials

    @property
    def allows_anonymous(self) -> bool:
        """Whether callers need not say who they are. Such a door must look at the Host header itself: a web page
        elsewhere can make a browser on this machine ask for it."""
        return self._credentials is None

    def identify(self, authorization: str | None, peer: str) -> Identity:
        """Thread-safe. A password that was not seen lately takes some 50 ms: `recognise` keeps those off a loop."""
        credentials = self._credentials
        if credentials is None:
            return Identity("anonymous", Role.ADMIN, is_anonymous=True)
        scheme, _, value = (authorization or "").strip().partition(" ")
        value = value.strip()
        identity: Identity | None = None
        if not scheme:
            raise NotAuthenticated("this door needs to know who you are", _REMEDY)
        if scheme.lower() == "bearer":
            identity = credentials.verify_bearer(value)
        elif scheme.lower() == "basic":
            name, password = _read_basic(value)
            identity = credentials.verify_password(name, password, peer)
        if identity is None:
            raise NotAuthenticated(
                "these credentials are not known, have expired, or have no role here", _REMEDY
            )
        return identity

    async def identify_async(self, authorization: str | None, peer: str) -> Identity:
        """The same for a door's loop: what takes long is done in a thread."""
        if authorization is not None and authorization[:6].lower() == "basic ":
            return await asyncio.to_thread(self.identify, authorization, peer)
        return self.identify(authorization, peer)


def require_role(identity: Identity, role: Role, action: str) -> None:
    """Refuse `what` (such as "purge a queue") to somebody whose role is less than `role`."""
    if identity.role < role:
        raise NotAllowed(
            identity.name,
            f"{action} (that takes the role {role.label}, and this one is {identity.role.label})",
        )


def _read_basic(text: str) -> tuple[str, str]:
    try:
        name, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        name, colon, password = "", "", ""
    if not colon:
        raise NotAuthenticated("the Basic credentials cannot be read", _REMEDY)
    return name, password
