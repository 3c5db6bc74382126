"""The users file: names, password hashes and roles, in TOML.

    [user."alice"]
    password = "$argon2id$v=19$..."
    role = "admin"          # for REST, gRPC and the console; without it, MQTT only
    disabled = true

`sluice user ...` writes the file; it may also be edited by hand. It never contains a password.
"""

from __future__ import annotations

import json
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from sluice.access.identity import Role
from sluice.access.watched_file import write_private
from sluice.errors import ConfigError

MAX_PASSWORD_BYTES: Final = 1024  # bytes that are hashed for an unauthenticated client
MIN_PASSWORD_LENGTH: Final = 8
# A file without users has this line, unless it was damaged.
NO_USERS_LINE: Final = "# no users"

# One thread and 19 MiB, as OWASP recommends: password checks must leave CPU time to the broker.
HASHER: Final = PasswordHasher(time_cost=2, memory_cost=19_456, parallelism=1)


@dataclass(frozen=True)
class User:
    name: str
    hash: str
    role: Role | None = None
    disabled: bool = False

    @property
    def role_label(self) -> str:
        return self.role.label if self.role is not None else ""


def read_users(text: str) -> dict[str, User]:
    """Return all users by name. A ValueError says what is wrong, but never quotes a hash."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise ValueError(f"it is not TOML: {fault}") from None
    table = document.pop("user", {})
    if document or not isinstance(table, dict):
        raise ValueError('it contains something other than tables [user."name"]')
    return {name: _read_user(name, given) for name, given in table.items()}


def check_users_change(before: Mapping[str, User], text: str, after: Mapping[str, User]) -> None:
    """Refuse a file that lost all of its users: all clients would be disconnected.

    An editor that writes in two steps leaves such a file for a moment, and a full disk for longer.
    `sluice user remove` marks an empty file as intended.
    """
    if before and not after and NO_USERS_LINE not in text:
        raise ValueError(
            "it has no users any more; if that is on purpose, "
            f"write the line {NO_USERS_LINE!r} in it"
        )


def _read_user(name: str, table: object) -> User:
    fault = fault_of_user_name(name)
    if fault:
        raise ValueError(fault)
    if not isinstance(table, Mapping) or not table.keys() <= {"password", "role", "disabled"}:
        raise ValueError(f"user {name!r} has other keys than password, role and disabled")
    password = table.get("password", "")
    if not isinstance(password, str) or not password.startswith("$argon2id$"):
        raise ValueError(
            f"the password of user {name!r} is not an argon2id hash: "
            "set it with `sluice user passwd`"
        )
    role = table.get("role")
    disabled = table.get("disabled", False)
    if not isinstance(disabled, bool):
        raise ValueError(f"disabled of user {name!r} must be true or false")
    try:
        return User(name, password, Role.parse(str(role)) if role is not None else None, disabled)
    except ValueError as error:
        raise ValueError(f"role of user {name!r} {error}") from None


def fault_of_user_name(name: str) -> str:
    if not name or len(name.encode()) > 256:
        return "a user name has from 1 to 256 bytes"
    if not name.isprintable() or ":" in name:
        return f"user name {name!r} has a colon or a control character in it"
    return ""


def write_users(path: Path, users: Mapping[str, User]) -> None:
    lines = ["# Written by `sluice user`; read again by a running server when it changes."]
    if not users:
        lines.append(NO_USERS_LINE)
    for user in users.values():
        lines += ["", f"[user.{_quote(user.name)}]", f"password = {_quote(user.hash)}"]
        if user.role is not None:
            lines.append(f"role = {_quote(user.role.label)}")
        if user.disabled:
            lines.append("disabled = true")
    write_private(path, "\n".join(lines) + "\n")


def load_users(path: Path) -> dict[str, User]:
    """Load the users for the command line; a missing file has no users."""
    try:
        return read_users(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as fault:
        raise ConfigError(f"{path} cannot be used: {fault}", "Correct it first") from None


def with_password(user: User, password: str) -> User:
    if len(password) < MIN_PASSWORD_LENGTH:
        raise ConfigError(
            f"the password has fewer than {MIN_PASSWORD_LENGTH} characters", "Choose a longer one"
        )
    if len(password.encode()) > MAX_PASSWORD_BYTES:
        raise ConfigError(
            f"the password has more than {MAX_PASSWORD_BYTES} bytes", "Choose a shorter one"
        )
    return replace(user, hash=HASHER.hash(password))


def verify(hashed: str, password: bytes) -> bool:
    """Return whether the password matches; takes about 50 ms of one core, without the GIL."""
    try:
        HASHER.verify(hashed, password[:MAX_PASSWORD_BYTES])
    except (VerificationError, InvalidHashError):
        return False
    return len(password) <= MAX_PASSWORD_BYTES


def make_dummy_hash() -> str:
    """Return a hash to verify for an unknown user, so that timing does not reveal user names."""
    return HASHER.hash(secrets.token_hex(16))


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
