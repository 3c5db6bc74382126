"""The store in Redis: one stream per partition. The face is `store.RedisStore`; every key stands in KEYS.md."""

from __future__ import annotations

from sluice.store.redis.store import RedisStore

__all__ = ["RedisStore"]
