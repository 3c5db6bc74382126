"""Partition strategies: which partition the messages of a key go to.

The default is `hash`: FNV-1a of the key modulo the partition count. An installed package can add
others: the entry point group `sluice.partition_strategies` names functions that return a
`PartitionStrategy`, and queues select one by its name (`partition_strategy`).

A stored queue whose strategy is not installed cannot be opened: messages of a key would go to
another partition than before, and their order would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final, Protocol

from sluice.errors import UnusableStrategy

STRATEGY_GROUP: Final = "sluice.partition_strategies"
HASH: Final = "hash"

ChoosePartition = Callable[[bytes, int], int]


class PartitionStrategy(Protocol):
    """Assigns keys to partitions, in the broker's event loop: it must not block."""

    def choose_partition(self, key: bytes, partitions: int) -> int:
        """Return the partition of a key, from 0 to `partitions` - 1.

        The result depends on the arguments alone, in every process: order per key needs it. (So
        `hash(key)` is unsuitable: it differs from one Python process to the next.)
        """


_loaded: dict[str, ChoosePartition] = {}


def find_partition_strategy(name: str) -> ChoosePartition | None:
    """Return the function of a strategy; None: `hash`, which the engine computes itself."""
    if name == HASH:
        return None
    if name not in _loaded:
        _loaded[name] = _load(name)
    return _loaded[name]


def _load(name: str) -> ChoosePartition:
    points = {point.name: point for point in entry_points(group=STRATEGY_GROUP)}
    if name not in points:
        raise UnusableStrategy(
            f"partition_strategy is {name!r}, which is not installed",
            "Install the package that provides it in the environment of the broker; available: "
            + ", ".join([HASH, *sorted(points)]),
        )
    try:
        strategy: PartitionStrategy = points[name].load()()
        return strategy.choose_partition
    except Exception as error:
        raise UnusableStrategy(
            f"the partition strategy {name!r} cannot be loaded: {type(error).__name__}: {error}",
            "Correct or replace the package that provides it",
        ) from error
