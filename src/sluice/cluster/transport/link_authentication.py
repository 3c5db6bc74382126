"""Mutual authentication of two nodes, before any frame of a link.

Both know a secret, and neither sends it. After the greeting of the caller follow

      acceptor to caller    32 random bytes: the challenge
      caller to acceptor    32 random bytes, then the proof of the caller
      acceptor to caller    the proof of the acceptor

A proof is an HMAC over the role, the name of the cluster, the ids of both nodes and both random
values. So a recorded proof is worthless in another call, a proof for one node is worthless at
another, and a challenge cannot be answered by reflecting it. The caller proves itself first: an
unknown caller receives nothing that would help to guess the secret.

With mutual TLS, the certificate of the caller must also have the host that the caller registered.
This module does not know sockets: callers pass `read` and `write`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import scrypt
from ipaddress import ip_address
from typing import Any, Final

from sluice.errors import SluiceError

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
CALLER: Final = b"caller"
ACCEPTOR: Final = b"acceptor"
SAME_SECRET: Final = "Give every node the same cluster.secret, or none at all"

Read = Callable[[], Awaitable[Any]]
Write = Callable[[bytes], Awaitable[Any]]


class LinkAuthenticationError(SluiceError):
    """The other end of a link has not proved that it knows the cluster secret."""


@dataclass(frozen=True, slots=True)
class LinkCall:
    """Which node calls which. A proof is valid for one such call."""

    cluster: str
    caller: str
    acceptor: str


class LinkKey:
    """The key of all proofs, derived from the cluster secret."""

    def __init__(self, secret: str, cluster: str) -> None:
        self._key = _derive_key(secret, cluster)

    @property
    def fingerprint(self) -> str:
        """Return an id that tells keys apart and reveals nothing. Nodes register it."""
        return hmac.digest(self._key, b"fingerprint", "sha256")[:8].hex()

    def proof(self, role: bytes, call: LinkCall, challenge: bytes, reply: bytes) -> bytes:
        names = (call.cluster.encode(), call.caller.encode(), call.acceptor.encode())
        parts = (b"sluice link", role, *names, challenge, reply)
        text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, text, "sha256")


@lru_cache(maxsize=16)
def _derive_key(secret: str, cluster: str) -> bytes:
    """Make guessing a weak secret expensive: each guess costs some 50 ms and 16 MiB."""
    return scrypt(
        secret.encode(), salt=b"sluice cluster " + cluster.encode(), n=2**14, r=8, p=1, dklen=32
    )


async def prove_as_caller(key: LinkKey, call: LinkCall, read: Read, write: Write) -> None:
    """Run the caller's side of the handshake, or raise LinkAuthenticationError."""
    challenge = await _read(read, NONCE_BYTES)
    reply = os.urandom(NONCE_BYTES)
    await write(reply + key.proof(CALLER, call, challenge, reply))
    answer = await _read(read, PROOF_BYTES)
    if not hmac.compare_digest(answer, key.proof(ACCEPTOR, call, challenge, reply)):
        raise LinkAuthenticationError(
            f"node {call.acceptor} does not know the cluster secret", SAME_SECRET
        )


async def check_caller(key: LinkKey, call: LinkCall, read: Read, write: Write) -> None:
    """Run the acceptor's side of the handshake, or raise LinkAuthenticationError."""
    challenge = os.urandom(NONCE_BYTES)
    await write(challenge)
    answer = await _read(read, NONCE_BYTES + PROOF_BYTES)
    reply, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, key.proof(CALLER, call, challenge, reply)):
        raise LinkAuthenticationError("the caller does not know the cluster secret", SAME_SECRET)
    await write(key.proof(ACCEPTOR, call, challenge, reply))


async def _read(read: Read, size: int) -> bytes:
    message = await read()
    if not isinstance(message, bytes) or len(message) != size:
        raise LinkAuthenticationError(
            "the peer does not follow the handshake of the link",
            "Run the same version of Sluice on all nodes",
        )
    return message


def certificate_matches_host(names: Iterable[str], host: str) -> bool:
    """Return whether a certificate with these subject alternative names belongs to a host."""
    wanted = _normalize_name(host)
    return any(
        _normalize_name(name) == wanted or _wildcard_matches(_normalize_name(name), wanted)
        for name in names
    )


def _normalize_name(name: str) -> str:
    try:
        return str(ip_address(name.strip("[]")))
    except ValueError:
        return name.lower().rstrip(".")


def _wildcard_matches(pattern: str, name: str) -> bool:
    """Match a wildcard: `*.nodes.example.org` covers one level, never a top-level domain."""
    star, _, domain = pattern.partition(".")
    _, _, rest = name.partition(".")
    return star == "*" and "." in domain and domain == rest
