"""Tokens for the admin APIs: random, shown once, stored as a hash.

    [token."ci"]
    sha256 = "..."
    role = "operator"
    expires = 2027-01-01T00:00:00Z

A token has 256 random bits and cannot be guessed, so a plain hash is enough to store it and to look
it up.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sluice.access.identity import Role
from sluice.access.watched_file import write_private
from sluice.errors import ConfigError

TOKEN_PREFIX: Final = "slu_"  # so that scanners for leaked secrets can find one
_SHA256_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ApiToken:
    name: str
    sha256: str
    role: Role
    expires: datetime | None = None

    def is_valid_at(self, when: float) -> bool:
        return self.expires is None or when < self.expires.timestamp()


def make_token(name: str, role: Role, expires: datetime | None) -> tuple[ApiToken, str]:
    """Create a token; return it with its text, which is shown once and never stored."""
    if not name or not name.isprintable():
        raise ConfigError(
            "a token needs a name that can be printed", "Name it for what uses it, such as ci"
        )
    text = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return ApiToken(name, hash_token(text), role, expires), text


def hash_token(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def read_tokens(text: str) -> dict[str, ApiToken]:
    """Return all tokens by their hash."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise ValueError(f"it is not TOML: {fault}") from None
    table = document.pop("token", {})
    if document or not isinstance(table, dict):
        raise ValueError('it contains something other than tables [token."name"]')
    tokens = [_read_token(name, given) for name, given in table.items()]
    return {token.sha256: token for token in tokens}


def _read_token(name: str, table: object) -> ApiToken:
    if not isinstance(table, Mapping) or not table.keys() <= {"sha256", "role", "expires"}:
        raise ValueError(f"token {name!r} has other keys than sha256, role and expires")
    hashed = table.get("sha256")
    if not isinstance(hashed, str) or not _SHA256_HEX.fullmatch(hashed):
        raise ValueError(f"sha256 of token {name!r} is not 64 hexadecimal digits")
    expires = table.get("expires")
    if expires is not None and not isinstance(expires, datetime):
        raise ValueError(f"expires of token {name!r} must be a time such as 2027-01-01T00:00:00Z")
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    try:
        return ApiToken(name, hashed, Role.parse(str(table.get("role"))), expires)
    except ValueError as error:
        raise ValueError(f"role of token {name!r} {error}") from None


def write_tokens(path: Path, tokens: Mapping[str, ApiToken]) -> None:
    lines = ["# Written by `sluice token`; read again by a running server when it changes."]
    for token in tokens.values():
        lines += [
            "",
            f"[token.{json.dumps(token.name, ensure_ascii=False)}]",
            f'sha256 = "{token.sha256}"',
        ]
        lines.append(f'role = "{token.role.label}"')
        if token.expires is not None:
            lines.append(
                f"expires = {token.expires.astimezone(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}"
            )
    write_private(path, "\n".join(lines) + "\n")


def load_tokens(path: Path) -> dict[str, ApiToken]:
    """Load the tokens for the command line; a missing file has no tokens."""
    try:
        return read_tokens(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as fault:
        raise ConfigError(f"{path} cannot be used: {fault}", "Correct it first") from None
