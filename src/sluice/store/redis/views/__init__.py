"""What the store shows to other readers of Redis: groups, pending lists, retries, statistics."""

from sluice.store.redis.views.group_views import GroupViews
from sluice.store.redis.views.maintenance import ViewMaintenance
from sluice.store.redis.views.stats import QueueStats, StoreStats, read_store_stats

__all__ = ["GroupViews", "QueueStats", "StoreStats", "ViewMaintenance", "read_store_stats"]
