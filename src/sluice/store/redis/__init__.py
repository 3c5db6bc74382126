"""The store in Redis: one stream per partition. KEYS.md describes every key."""

from __future__ import annotations

from sluice.store.redis.store import RedisStore

__all__ = ["RedisStore"]
