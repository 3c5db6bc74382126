"""The store in Redis: one stream per partition. KEYS.md describes every key.

Only a broker that uses Redis imports this package: it loads the Redis client library.
"""

from sluice.store.redis.connection import Argument, RedisChannel, RedisServer
from sluice.store.redis.errors import StoreFenced, is_transient
from sluice.store.redis.log import confirm_loss
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.ownership import read_owner
from sluice.store.redis.store import RedisStore
from sluice.store.redis.views import QueueStats, StoreStats, read_store_stats

__all__ = [
    "Argument",
    "QueueStats",
    "RedisChannel",
    "RedisOptions",
    "RedisServer",
    "RedisStore",
    "StoreFenced",
    "StoreStats",
    "confirm_loss",
    "is_transient",
    "read_owner",
    "read_store_stats",
]
