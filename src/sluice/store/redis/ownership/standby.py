"""Standby: reads the owner of a store without taking it.

A standby broker opens no listener and holds no resources. It checks the owner periodically, and
takes the store when the owner has released it or the lease has expired.
"""

from __future__ import annotations

from sluice.store.redis.connection import RedisServer
from sluice.store.redis.errors import error_text, is_transient
from sluice.store.redis.keys import RedisKeys


def read_owner(url: str, prefix: str, answer_seconds: float) -> str:
    """Return the owner of the store, empty for none.

    A Redis that does not answer may have an owner: its error is returned instead.
    """
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
