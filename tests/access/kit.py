"""Files of users, rules and keys for a test, and a broker without sockets that uses them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jwt

from sluice.access.acl_file import read_rules
from sluice.access.authenticator import Authenticator
from sluice.access.identity import Role
from sluice.access.passwords import PasswordVerifier
from sluice.access.users import User, read_users, with_password, write_users
from sluice.access.watched_file import WatchedFile
from tests.broker.kit import BrokerHarness

SECRET = "a secret that is known to both sides of it"
PASSWORD = "correct horse battery staple"
_HASHES: dict[str, str] = {}


def make_user(
    name: str, password: str = PASSWORD, role: Role | None = None, disabled: bool = False
) -> User:
    """Return a user; the same password is hashed once, because hashing takes time."""
    if password not in _HASHES:
        _HASHES[password] = with_password(User(name, ""), password).hash
    return User(name, _HASHES[password], role, disabled)


def users_file(folder: Path, *users: User) -> Path:
    path = folder / "users.toml"
    write_users(path, {user.name: user for user in users})
    return path


def rules_file(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(text)
    return path


def touch_in_future(path: Path) -> None:
    """Make the file look changed, even if the clock of the file system is coarse."""
    now = time.time_ns() + 1_000_000_000
    os.utime(path, ns=(now, now))


def token_of(secret: str = SECRET, algorithm: str = "HS256", **claims: Any) -> str:
    return jwt.encode({"exp": time.time() + 600, **claims}, secret, algorithm)


class AccessHarness(BrokerHarness):
    """A broker with files of users and rules. Passwords are checked synchronously."""

    def __init__(
        self, folder: Path, rules: str | None, *users: User, anonymous: bool = True
    ) -> None:
        self.now = 0.0
        self.users_path = users_file(folder, *users)
        self.rules_path = rules_file(folder, rules) if rules is not None else None
        self.passwords = (
            PasswordVerifier(WatchedFile(self.users_path, read_users, self.clock))
            if users
            else None
        )
        watched = (
            WatchedFile(self.rules_path, read_rules, self.clock)
            if self.rules_path is not None
            else None
        )
        self.authenticator = Authenticator(anonymous, self.passwords, rules=watched)
        self.authenticator._brokers = lambda: [self.broker]
        super().__init__(access=self.authenticator)

    def clock(self) -> float:
        return self.now

    def change_rules(self, text: str) -> None:
        assert self.rules_path is not None
        self.rules_path.write_text(text)
        touch_in_future(self.rules_path)
        self.authenticator.reload_files()
        self.loop.settle()

    def change_users(self, *users: User) -> None:
        write_users(self.users_path, {user.name: user for user in users})
        touch_in_future(self.users_path)
        self.authenticator.reload_files()
        self.loop.settle()
