"""Standing by: whether a store has an owner, asked without taking it.

A broker that stands by opens no door and holds nothing. It looks from time to time, and takes the store when the owner
has given it back or its lease has lapsed.
"""

from __future__ import annotations

from sluice.store.redis.errors import passes, text_of
from sluice.store.redis.keys import Keys
from sluice.store.redis.connection import Server


def owner_of(url: str, prefix: str, answer_seconds: float) -> str:
    """Who has the store; empty: nobody. A Redis that does not answer may have an owner: its fault stands for one."""
    keys = Keys(prefix)
    server = Server(url, answer_seconds)
    try:
        server.look()
        link = server.link()
        try:
            owner = link.ask([(keys.lease, ["GET", keys.lease])])[0]
        finally:
            link.close()
    except Exception as fault:
        if not passes(fault):
            raise
        return f"unknown ({text_of(fault)})"
    finally:
        server.close()
    return bytes(owner or b"").decode(errors="replace")
