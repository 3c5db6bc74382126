"""Standing by: whether a store has an owner, asked without taking it.

A broker that stands by opens no door and holds nothing. It looks from time to time, and takes the store when the owner
has given it back or its lease has lapsed.
"""

from __future__ import annotations

from sluice.store.redis.connection import RedisServer
from sluice.store.redis.errors import error_text, is_transient
from sluice.store.redis.keys import RedisKeys


def read_owner(url: str, prefix: str, answer_seconds: float) -> str:
    """Who has the store; empty: nobody. A Redis that does not answer may have an owner: its fault stands for one."""
    keys = RedisKeys(prefix)
    server = RedisServer(url, answer_seconds)
    try:
        server.detect()
        channel = server.open_channel()
        try:
            owner = channel.execute([(keys.lease, ["GET", keys.lease])])[0]
        finally:
            channel.close()
    except Exception as fault:
        if not is_transient(fault):
            raise
        return f"unknown ({error_text(fault)})"
    finally:
        server.close()
    return bytes(owner or b"").decode(errors="replace")
