"""Exclusive queues: the last value of each key, for one client. Rows of native integers."""

from sluice.queues.compacted.exclusive import (
    ExclusiveQueues,
    ExclusiveRules,
    OwnerRead,
    read_expiry,
)
from sluice.queues.compacted.key_cache import KeyCache
from sluice.queues.compacted.owner import Owner
from sluice.queues.compacted.owner_subscriber import OwnerSubscriber
from sluice.queues.compacted.owner_table import hash_name, zeros

__all__ = [
    "ExclusiveQueues",
    "ExclusiveRules",
    "KeyCache",
    "Owner",
    "OwnerRead",
    "OwnerSubscriber",
    "hash_name",
    "read_expiry",
    "zeros",
]
