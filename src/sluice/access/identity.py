"""Identify the callers of the admin APIs, and check their roles.

REST and gRPC pass the caller's credentials and its address, and get an `Identity` or an error.
`require_role` is the one place where roles are compared. This module does not know what a password,
a token or a JWT is and where they are stored: `Credentials` does.
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
    "Send Authorization: Bearer <token>, with a token made by `sluice token add` or a JWT, "
    "or Basic with a user's name and password"
)

MAX_TOKEN_BYTES: Final = 16_384  # a longer token is not checked


def looks_like_jwt(text: str) -> bool:
    """Return whether a text is a JWT and no password: three parts, the first a JSON object."""
    return text.startswith("eyJ") and text.count(".") == 2 and len(text) <= MAX_TOKEN_BYTES


class Role(IntEnum):
    """Each role includes the rights of the previous one."""

    VIEWER = 1  # see everything
    OPERATOR = 2  # publish, retry, purge, seek
    ADMIN = 3  # create, configure and delete queues and groups

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, label: str) -> Role:
        """Return the role of this name; a ValueError lists the roles."""
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
    """Verify credentials; called from any thread.

    None means that they are invalid; which part was wrong is not revealed.
    """

    def verify_bearer(self, text: str) -> Identity | None: ...

    def verify_password(self, name: str, password: str, peer: str) -> Identity | None:
        """Verify a password; may take the time of one password hash.

        Raise NotAuthenticated for an address that must wait.
        """


class AdminAuthenticator:
    """Identify the callers of the admin APIs.

    Without credentials every caller is an administrator: `build_access` allows that on
    loopback only.
    """

    def __init__(self, credentials: Credentials | None = None) -> None:
        self._credentials = credentials

    @property
    def allows_anonymous(self) -> bool:
        """Return whether callers need no credentials.

        Such an API must check the Host header itself: a foreign web page can make a browser on this
        machine send requests to it.
        """
        return self._credentials is None

    def identify(self, authorization: str | None, peer: str) -> Identity:
        """Identify a caller; thread-safe.

        A password that is not cached takes about 50 ms: `identify_async` keeps this out of the
        loop.
        """
        credentials = self._credentials
        if credentials is None:
            return Identity("anonymous", Role.ADMIN, is_anonymous=True)
        scheme, _, value = (authorization or "").strip().partition(" ")
        value = value.strip()
        identity: Identity | None = None
        if not scheme:
            raise NotAuthenticated("this API requires authentication", _REMEDY)
        if scheme.lower() == "bearer":
            identity = credentials.verify_bearer(value)
        elif scheme.lower() == "basic":
            name, password = _read_basic(value)
            identity = credentials.verify_password(name, password, peer)
        if identity is None:
            raise NotAuthenticated(
                "these credentials are unknown, have expired, or have no role here", _REMEDY
            )
        return identity

    async def identify_async(self, authorization: str | None, peer: str) -> Identity:
        """Identify a caller from an event loop: slow checks run in a thread."""
        if authorization is not None and authorization[:6].lower() == "basic ":
            return await asyncio.to_thread(self.identify, authorization, peer)
        return self.identify(authorization, peer)


def require_role(identity: Identity, role: Role, action: str) -> None:
    """Raise NotAllowed for `action` (such as "purge a queue") if the role is lower than `role`."""
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
